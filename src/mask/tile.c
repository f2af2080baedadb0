/* The caller's function. */
#include <stdio.h>

#include "mask/mask.h"

qkv_status qkv__mask_tile_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p;
  if (m->fn) return QKV_OK;
  snprintf(why, bytes, "fn is NULL");
  return QKV_BAD_POINTER;
}

int32_t qkv__mask_tile_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  if (!bits) return QKV_TILE_SOME;
  const qkv_tile t = {
      r->e->b, r->head, r->row, r->rows, key, keys, r->e->position_q + r->row, qkv__position_of_key(r->e, key)};
  for (int64_t k = 0; k < keys; k++) bits[k] = 0;
  int32_t answer = m->fn(m->user, &t, bits);
  return answer == QKV_TILE_NONE || answer == QKV_TILE_ALL ? answer : QKV_TILE_SOME;
}

int64_t qkv__mask_tile_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  (void)m, (void)r;
  return key;
}

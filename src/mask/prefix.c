/* pos_key < a, for every query. */
#include <stdio.h>

#include "mask/mask.h"

qkv_status qkv__mask_prefix_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p;
  if (m->a >= 0) return QKV_OK;
  snprintf(why, bytes, "a %lld is negative", (long long)m->a);
  return QKV_BAD_MASK;
}

int32_t qkv__mask_prefix_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const int64_t first = qkv__position_of_key(r->e, key);
  if (first >= m->a) return QKV_TILE_NONE;
  if (first + keys <= m->a) return QKV_TILE_ALL;
  if (bits)
    for (int64_t k = 0; k < keys; k++) bits[k] = first + k < m->a ? ~(uint64_t)0 : 0;
  return QKV_TILE_SOME;
}

int64_t qkv__mask_prefix_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  return qkv__position_of_key(r->e, key) < m->a ? key : INT64_MAX;
}

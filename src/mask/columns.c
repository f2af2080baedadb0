/* The key is one of the last b of its chunk of `a` positions. */
#include <inttypes.h>
#include <stdio.h>

#include "mask/mask.h"

qkv_status qkv__mask_columns_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p;
  if (1 <= m->a && m->a <= INT32_MAX && 0 <= m->b && m->b <= m->a) return QKV_OK;
  snprintf(why, bytes, "a %" PRId64 ", b %" PRId64 ": a is not in 1..%" PRId32 ", or b not in 0..a", m->a, m->b, INT32_MAX);
  return QKV_BAD_MASK;
}

int32_t qkv__mask_columns_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const int64_t gap = m->a - m->b;
  int64_t at = qkv__position_of_key(r->e, key) % m->a, seen = 0;
  if (!bits) return QKV_TILE_SOME;
  for (int64_t k = 0; k < keys; k++) {
    bits[k] = 0 - (uint64_t)(at >= gap);
    seen += at >= gap;
    if (++at == m->a) at = 0;
  }
  return seen == 0 ? QKV_TILE_NONE : seen == keys ? QKV_TILE_ALL : QKV_TILE_SOME;
}

int64_t qkv__mask_columns_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const int64_t gap = m->a - m->b, at = qkv__position_of_key(r->e, key) % m->a;
  return m->b == 0 ? INT64_MAX : at >= gap ? key : key + gap - at;
}

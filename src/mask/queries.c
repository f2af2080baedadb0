/* The query's position is in a set: it sees every key. */
#include "mask/mask.h"

qkv_status qkv__mask_queries_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  return qkv__positions_check(p, m, why, bytes);
}

int32_t qkv__mask_queries_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const qkv__positions s = qkv__positions_of(m, r);
  const int64_t first = r->e->position_q + r->row;
  if (!bits) return qkv__positions_next(&s, first) < first + r->rows ? QKV_TILE_SOME : QKV_TILE_NONE;
  const uint64_t seeing = qkv__positions_bits(&s, first, r->rows);
  (void)key;
  if (!seeing) return QKV_TILE_NONE;
  if (seeing == ~(uint64_t)0 >> (64 - r->rows)) return QKV_TILE_ALL;
  for (int64_t k = 0; k < keys; k++) bits[k] = seeing;
  return QKV_TILE_SOME;
}

int64_t qkv__mask_queries_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const qkv__positions s = qkv__positions_of(m, r);
  const int64_t first = r->e->position_q + r->row;
  return qkv__positions_next(&s, first) < first + r->rows ? key : INT64_MAX;
}

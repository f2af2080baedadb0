/* Key and query lie in the same chunk of `a` positions, or at most b chunks apart. */
#include <inttypes.h>
#include <stdio.h>

#include "mask/mask.h"

/* Neighbours that count: more reach beyond all positions. */
static int64_t neighbours_of(const qkv_mask *m) { return QKV_MIN(m->b, ((int64_t)1 << 32) / m->a + 1); }

qkv_status qkv__mask_chunk_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p;
  if (1 <= m->a && m->a <= INT32_MAX && m->b >= 0) return QKV_OK;
  if (m->b < 0)
    snprintf(why, bytes, "b %" PRId64 ", the chunks on each side, is negative", m->b);
  else
    snprintf(why, bytes, "a %" PRId64 ", the size of a chunk, is not in 1..%" PRId32, m->a, INT32_MAX);
  return QKV_BAD_MASK;
}

int32_t qkv__mask_chunk_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const int64_t a = m->a, b = neighbours_of(m), position = r->e->position_q + r->row,
                first = qkv__position_of_key(r->e, key);
  const int64_t q0 = qkv__floor_div(position, a), q1 = qkv__floor_div(position + r->rows - 1, a), k0 = first / a,
                k1 = (first + keys - 1) / a;
  if (k1 < q0 - b || k0 > q1 + b) return QKV_TILE_NONE;
  if (q1 - b <= k0 && k1 <= q0 + b) return QKV_TILE_ALL;
  if (!bits) return QKV_TILE_SOME;
  for (int64_t k = 0; k < keys;) { /* the keys of a chunk are seen by the same rows */
    const int64_t chunk = (first + k) / a, end = QKV_MIN(keys, (chunk + 1) * a - first);
    const int64_t from = QKV_MAX((chunk - b) * a - position, 0), to = QKV_MIN((chunk + b + 1) * a - position, r->rows);
    const uint64_t rows = from < to ? ~(uint64_t)0 >> (64 - (to - from)) << from : 0;
    for (; k < end; k++) bits[k] = rows;
  }
  return QKV_TILE_SOME;
}

int64_t qkv__mask_chunk_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const int64_t a = m->a, b = neighbours_of(m), position = r->e->position_q + r->row;
  const int64_t low = (qkv__floor_div(position, a) - b) * a, end = (qkv__floor_div(position + r->rows - 1, a) + b + 1) * a;
  const int64_t from = QKV_MAX(low, qkv__position_of_key(r->e, key));
  return from < end ? qkv__key_of_position(r->e, from) : INT64_MAX;
}

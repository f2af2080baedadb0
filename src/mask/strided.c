/* Key and query are a whole number of strides apart, at most b of them. */
#include <inttypes.h>
#include <stdio.h>

#include "mask/mask.h"

static int64_t stride_at(const qkv_mask *m, int64_t b, int64_t head) {
  return m->t.data ? *(const int32_t *)(const void *)qkv__at(&m->t, 4, b, head, 0, 0) : m->a;
}
/* Positions that b strides reach. */
static int64_t reach_of(const qkv_mask *m, int64_t stride) {
  const int64_t far = (int64_t)1 << 33;
  return m->b < 0 || m->b > far / stride ? far : m->b * stride;
}

qkv_status qkv__mask_strided_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  if (!m->t.data) {
    if (1 <= m->a && m->a <= INT32_MAX) return QKV_OK;
    snprintf(why, bytes, "a %" PRId64 ", the stride, is not in 1..%" PRId32, m->a, INT32_MAX);
    return QKV_BAD_MASK;
  }
  if (m->a) {
    snprintf(why, bytes, "a %" PRId64 ": a stride is given, and strides in t too", m->a);
    return QKV_BAD_MASK;
  }
  for (int64_t b = 0; b < (m->t.stride[0] ? p->batch : QKV_MIN(1, p->batch)); b++)
    for (int64_t h = 0; h < (m->t.stride[1] ? p->num_heads : QKV_MIN(1, p->num_heads)); h++)
      if (stride_at(m, b, h) < 1) {
        snprintf(why, bytes, "t of entry %" PRId64 ", head %" PRId64 ": the stride %" PRId64 " is less than 1", b, h,
                 stride_at(m, b, h));
        return QKV_BAD_MASK;
      }
  return QKV_OK;
}

int32_t qkv__mask_strided_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const int64_t stride = stride_at(m, r->e->b, r->head), reach = reach_of(m, stride), position = r->e->position_q + r->row;
  const int32_t band = qkv__mask_band(r, key, keys, position - reach, position + reach, bits);
  if (band == QKV_TILE_NONE || stride == 1) return band;
  if (!bits) return QKV_TILE_SOME;
  uint64_t comb = 0;
  for (int64_t i = 0; i < 64; i += stride) comb |= (uint64_t)1 << i;
  const int64_t apart = qkv__position_of_key(r->e, key) - position;
  int64_t at = apart - qkv__floor_div(apart, stride) * stride; /* the first row that may see the key */
  for (int64_t k = 0; k < keys; k++) {
    const uint64_t rows = at < 64 ? comb << at : 0;
    bits[k] = band == QKV_TILE_ALL ? rows : bits[k] & rows;
    if (++at == stride) at = 0;
  }
  return QKV_TILE_SOME;
}

int64_t qkv__mask_strided_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const int64_t stride = stride_at(m, r->e->b, r->head), reach = reach_of(m, stride), position = r->e->position_q + r->row;
  int64_t from = QKV_MAX(qkv__position_of_key(r->e, key), position - reach);
  const int64_t apart = from - position, at = apart - qkv__floor_div(apart, stride) * stride;
  if (at >= r->rows) from += stride - at;
  return from <= position + r->rows - 1 + reach ? qkv__key_of_position(r->e, from) : INT64_MAX;
}

/* A byte per (entry, head, row, key - a); keys before a are visible. */
#include <stdio.h>

#include "mask/mask.h"

qkv_status qkv__mask_dense_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  if (m->a < 0) {
    snprintf(why, bytes, "a %lld, the first key of the bytes, is negative", (long long)m->a);
    return QKV_BAD_MASK;
  }
  if (m->t.data || !p->batch || !p->num_heads || !p->seqlen_q || p->seqlen_kv <= m->a) return QKV_OK;
  snprintf(why, bytes, "t.data, the bytes, is NULL");
  return QKV_BAD_POINTER;
}

int32_t qkv__mask_dense_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  if (key + keys <= m->a) return QKV_TILE_ALL;
  if (!bits) return QKV_TILE_SOME;
  for (int64_t k = 0; k < keys; k++) {
    if (key + k < m->a) {
      bits[k] = ~(uint64_t)0;
      continue;
    }
    const unsigned char *byte = (const unsigned char *)qkv__at(&m->t, 1, r->e->b, r->head, r->row, key + k - m->a);
    uint64_t word = 0;
    for (int64_t i = 0; i < r->rows; i++) word |= (uint64_t)(byte[i * m->t.stride[2]] != 0) << i;
    bits[k] = word;
  }
  return QKV_TILE_SOME;
}

int64_t qkv__mask_dense_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  (void)m, (void)r;
  return key;
}

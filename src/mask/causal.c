/* pos_key <= pos_query; a = QKV_ALIGN_START takes the queries as standing at the first keys. */
#include <stdio.h>

#include "mask/mask.h"

static int64_t diagonal(const qkv_mask *m, const qkv__rows *r) {
  return (m->a == QKV_ALIGN_START ? r->e->start_q : r->e->position_q) + r->row;
}

qkv_status qkv__mask_causal_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p;
  if (m->a == 0 || m->a == QKV_ALIGN_START) return QKV_OK;
  snprintf(why, bytes, "a %lld is neither 0 nor QKV_ALIGN_START", (long long)m->a);
  return QKV_BAD_MASK;
}

int32_t qkv__mask_causal_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  return qkv__mask_band(r, key, keys, INT64_MIN / 4, diagonal(m, r), bits);
}

int64_t qkv__mask_causal_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  return qkv__position_of_key(r->e, key) <= diagonal(m, r) + r->rows - 1 ? key : INT64_MAX;
}

/* pos_query - a <= pos_key <= pos_query + b; a negative bound is infinite. */
#include "mask/mask.h"

static int64_t low_of(const qkv_mask *m, int64_t position) {
  return m->a < 0 || m->a > INT32_MAX ? INT64_MIN / 4 : position - m->a;
}
static int64_t high_of(const qkv_mask *m, int64_t position) {
  return m->b < 0 || m->b > INT32_MAX ? INT64_MAX / 4 : position + m->b;
}

qkv_status qkv__mask_window_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  (void)p, (void)m, (void)why, (void)bytes;
  return QKV_OK;
}

int32_t qkv__mask_window_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const int64_t position = r->e->position_q + r->row;
  return qkv__mask_band(r, key, keys, low_of(m, position), high_of(m, position), bits);
}

int64_t qkv__mask_window_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const int64_t first = r->e->position_q + r->row, last = first + r->rows - 1, low = low_of(m, first);
  const int64_t from = QKV_MAX(low, qkv__position_of_key(r->e, key));
  return from <= high_of(m, last) ? qkv__key_of_position(r->e, from) : INT64_MAX;
}

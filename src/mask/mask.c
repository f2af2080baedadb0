/* The list of kinds, and the AND of OR-groups. */
#include <string.h>

#include "mask/mask.h"

const qkv__mask_kind qkv__mask_kinds[QKV_MASK_KINDS] = {
#define QKV__MASK_ROW(id, name, types, extents, by_head) \
  [QKV_MASK_##id] = {#name, types, extents, by_head, qkv__mask_##name##_check, qkv__mask_##name##_tile, qkv__mask_##name##_next},
    QKV__MASK_LIST(QKV__MASK_ROW)
#undef QKV__MASK_ROW
};

int qkv__mask_no_heads(const qkv_mask *m) {
  (void)m;
  return 0;
}
int qkv__mask_all_heads(const qkv_mask *m) {
  (void)m;
  return 1;
}
int qkv__mask_t_heads(const qkv_mask *m) { return m->t.data && m->t.stride[1] != 0; }

int qkv__mask_by_head(const qkv_problem *p) {
  for (int64_t i = 0; i < p->mask_count; i++)
    if (qkv__mask_kinds[p->mask[i].kind].by_head(&p->mask[i])) return 1;
  return 0;
}

void qkv__mask_extents(const qkv_problem *p, int64_t max_rows, int64_t max_keys, const qkv_mask *m, int64_t t[4], int64_t u[4]) {
  const int extents = qkv__mask_kinds[m->kind].extents, by_key = extents == QKV__BY_KEY, by_pair = extents == QKV__BY_PAIR;
  t[0] = u[0] = p->batch;
  t[1] = by_key ? 1 : p->num_heads;
  t[2] = by_pair ? max_rows : 1;
  t[3] = by_key ? max_keys : by_pair ? QKV_MAX(max_keys - QKV_MAX(m->a, 0), 0) : extents == QKV__BY_LIST ? QKV_MAX(m->a, 0) : 1;
  u[1] = u[3] = 1;
  u[2] = max_rows;
}

/* Index of the first term after the group that begins at i. */
static int64_t group_end(const qkv_problem *p, int64_t i) {
  for (i++; i < p->mask_count && p->mask[i].join == QKV_OR; i++) {
  }
  return i;
}

static int32_t group_tile(const qkv__rows *r, int64_t first, int64_t last, int64_t key, int64_t keys, uint64_t *bits) {
  const qkv_mask *m = r->p->p.mask;
  uint64_t more[64];
  int32_t answer = QKV_TILE_NONE;
  for (int64_t i = first; i < last; i++) {
    uint64_t *to = !bits ? NULL : answer == QKV_TILE_NONE ? bits : more;
    int32_t a = qkv__mask_kinds[m[i].kind].tile(&m[i], r, key, keys, to);
    if (a == QKV_TILE_ALL) return a;
    if (a == QKV_TILE_NONE) continue;
    if (to == more)
      for (int64_t k = 0; k < keys; k++) bits[k] |= more[k];
    answer = QKV_TILE_SOME;
  }
  return answer;
}

int32_t qkv__mask_tile(const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const qkv_problem *p = &r->p->p;
  uint64_t more[64];
  int32_t answer = QKV_TILE_ALL;
  for (int64_t i = 0; i < p->mask_count;) {
    int64_t end = group_end(p, i);
    uint64_t *to = !bits ? NULL : answer == QKV_TILE_ALL ? bits : more;
    int32_t a = group_tile(r, i, end, key, keys, to);
    if (a == QKV_TILE_NONE) return a;
    if (a == QKV_TILE_SOME) {
      if (to == more)
        for (int64_t k = 0; k < keys; k++) bits[k] &= more[k];
      answer = a;
    }
    i = end;
  }
  if (answer == QKV_TILE_SOME && bits) { /* what only the bits show */
    const uint64_t full = r->rows >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << r->rows) - 1;
    uint64_t any = 0, all = full;
    for (int64_t k = 0; k < keys; k++) {
      any |= bits[k];
      all &= bits[k];
    }
    if (!(any & full)) return QKV_TILE_NONE;
    if (all == full) return QKV_TILE_ALL;
  }
  return answer;
}

int64_t qkv__mask_next(const qkv__rows *r, int64_t key, int64_t end) {
  const qkv_problem *p = &r->p->p;
  for (int64_t before = -1; key < end && before != key;) { /* until no group moves it */
    before = key;
    for (int64_t i = 0; i < p->mask_count && key < end;) {
      int64_t last = group_end(p, i), best = INT64_MAX;
      for (; i < last; i++) {
        int64_t n = qkv__mask_kinds[p->mask[i].kind].next(&p->mask[i], r, key);
        if (n < best) best = n;
      }
      key = best;
    }
  }
  return key < end ? key : end;
}

int32_t qkv__mask_band(const qkv__rows *r, int64_t key, int64_t keys, int64_t low, int64_t high, uint64_t *bits) {
  const int64_t first = qkv__position_of_key(r->e, key), last = first + keys - 1, rows = r->rows;
  if (high < low || last < low || first > high + rows - 1) return QKV_TILE_NONE;
  if (low + rows - 1 <= first && last <= high) return QKV_TILE_ALL;
  if (bits) {
    for (int64_t k = 0; k < keys; k++) {
      int64_t a = QKV_MAX(first + k - high, 0), b = QKV_MIN(first + k - low, rows - 1); /* rows a..b see it */
      bits[k] = a > b ? 0 : (~(uint64_t)0 << a) & (~(uint64_t)0 >> (63 - b));
    }
  }
  return QKV_TILE_SOME;
}

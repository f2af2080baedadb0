/* Masks as visible tiles. A kind is one file and one row of the list; it answers two questions:
 *   tile   is a rectangle of rows x keys visible everywhere, nowhere, or in the bits given?
 *   next   which is the first key at or after `key` that a row of the range may see? (skipping whole stretches)
 * Nothing outside this folder knows a kind. */
#ifndef QKV_MASK_MASK_H
#define QKV_MASK_MASK_H

#include "problem/problem.h"

/* Rows of one head of one entry. */
typedef struct qkv__rows {
  const qkv__problem *p;
  const qkv__entry *e;
  int64_t head, row, rows;
} qkv__rows;

QKV_INLINE int64_t qkv__position_of_key(const qkv__entry *e, int64_t key) { return e->position_k + key - e->b0; }
QKV_INLINE int64_t qkv__key_of_position(const qkv__entry *e, int64_t position) { return position - e->position_k + e->b0; }

/* At most 64 keys; at most 64 rows if bits is given. With bits NULL, QKV_TILE_SOME means "not known to be all or none",
 * and rows may be any number. bits[k] bit r, written in full for SOME. */
typedef int32_t (*qkv__mask_tile_fn)(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits);
/* The first key >= `key` that may be visible, or INT64_MAX. */
typedef int64_t (*qkv__mask_next_fn)(const qkv_mask *m, const qkv__rows *r, int64_t key);

typedef struct qkv__mask_kind {
  const char *name;
  int t_types; /* set of element types of t (and u), 0: no tensor */
  int by_head; /* heads may differ */
  qkv_status (*check)(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes);
  qkv__mask_tile_fn tile;
  qkv__mask_next_fn next;
} qkv__mask_kind;

extern const qkv__mask_kind qkv__mask_kinds[QKV_MASK_KINDS];

/* The whole mask of a problem: AND of OR-groups. */
int32_t qkv__mask_tile(const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits);
int64_t qkv__mask_next(const qkv__rows *r, int64_t key, int64_t end);

/* Keys of positions low..high (both may be out of range) for each row r: bits from ranges. Rows' ranges move by one
 * position per row: row r sees low + r <= position <= high + r. The one loop of causal and window. */
int32_t qkv__mask_band(const qkv__rows *r, int64_t key, int64_t keys, int64_t low, int64_t high, uint64_t *bits);

/* The list: identifier, name, element types of t, whether heads may differ. */
#define QKV__MASK_LIST(X)                \
  X(CAUSAL, causal, 0, 0)                \
  X(WINDOW, window, 0, 0)                \
  X(PREFIX, prefix, 0, 0)                \
  X(DOCUMENT, document, 1 << QKV_I32, 0) \
  X(DENSE, dense, 1 << QKV_U8, 1)        \
  X(TILE, tile, 0, 1)
#define QKV__MASK_DECLARE(id, name, types, by_head)                                                                  \
  qkv_status qkv__mask_##name##_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes);             \
  int32_t qkv__mask_##name##_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits); \
  int64_t qkv__mask_##name##_next(const qkv_mask *m, const qkv__rows *r, int64_t key);
QKV__MASK_LIST(QKV__MASK_DECLARE)
#undef QKV__MASK_DECLARE

#endif

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

/* Extents of a kind's tensors t and u; a kind whose tensor may be left out says so in its check. */
enum {
  QKV__NO_TENSOR,
  QKV__BY_KEY,  /* t by entry and key, u by entry and row */
  QKV__BY_PAIR, /* t by entry, head, row and key, from key a on */
  QKV__BY_LIST, /* t: `a` values by entry and head */
  QKV__BY_HEAD  /* t: one value by entry and head */
};

typedef struct qkv__mask_kind {
  const char *name;
  int t_types; /* set of element types of t (and u), 0: no tensor */
  int extents; /* QKV__BY_... */
  int (*by_head)(const qkv_mask *m); /* whether heads may differ */
  qkv_status (*check)(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes);
  qkv__mask_tile_fn tile;
  qkv__mask_next_fn next;
} qkv__mask_kind;

extern const qkv__mask_kind qkv__mask_kinds[QKV_MASK_KINDS];

/* The whole mask of a problem: AND of OR-groups. */
int32_t qkv__mask_tile(const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits);
int64_t qkv__mask_next(const qkv__rows *r, int64_t key, int64_t end);
/* Whether some term may differ between heads. */
int qkv__mask_by_head(const qkv_problem *p);
/* Extents of a term's t and u. */
void qkv__mask_extents(const qkv_problem *p, int64_t max_rows, int64_t max_keys, const qkv_mask *m, int64_t t[4], int64_t u[4]);
/* What a kind answers for by_head. */
int qkv__mask_no_heads(const qkv_mask *m);
int qkv__mask_all_heads(const qkv_mask *m);
int qkv__mask_t_heads(const qkv_mask *m); /* t has a stride for heads */

/* Keys of positions low..high (both may be out of range) for each row r: bits from ranges. Rows' ranges move by one
 * position per row: row r sees low + r <= position <= high + r. The one loop of causal and window. */
int32_t qkv__mask_band(const qkv__rows *r, int64_t key, int64_t keys, int64_t low, int64_t high, uint64_t *bits);

/* A set of positions: a <= position < b, or a list (see QKV_MASK_KEYS). The two kinds that have one share this. */
typedef struct qkv__positions {
  int64_t from, to; /* the range, or all that a list may hold */
  const char *list; /* NULL: a range */
  int64_t count, stride;
} qkv__positions;
qkv_status qkv__positions_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes);
qkv__positions qkv__positions_of(const qkv_mask *m, const qkv__rows *r);
/* The first member at or after `position`, or INT64_MAX. */
int64_t qkv__positions_next(const qkv__positions *s, int64_t position);
/* Of n <= 64 positions from `first` on, bit i: first + i is a member. */
uint64_t qkv__positions_bits(const qkv__positions *s, int64_t first, int64_t n);

/* Quotient rounded down; divisor > 0. */
QKV_INLINE int64_t qkv__floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

/* The list: identifier, name, element types of t, its extents, whether heads may differ. */
#define QKV__MASK_LIST(X)                                                     \
  X(CAUSAL, causal, 0, QKV__NO_TENSOR, qkv__mask_no_heads)                    \
  X(WINDOW, window, 0, QKV__NO_TENSOR, qkv__mask_no_heads)                    \
  X(PREFIX, prefix, 0, QKV__NO_TENSOR, qkv__mask_no_heads)                    \
  X(DOCUMENT, document, 1 << QKV_I32, QKV__BY_KEY, qkv__mask_no_heads)        \
  X(DENSE, dense, 1 << QKV_U8, QKV__BY_PAIR, qkv__mask_t_heads)               \
  X(TILE, tile, 0, QKV__NO_TENSOR, qkv__mask_all_heads)                       \
  X(KEYS, keys, 1 << QKV_I32, QKV__BY_LIST, qkv__mask_t_heads)                \
  X(QUERIES, queries, 1 << QKV_I32, QKV__BY_LIST, qkv__mask_t_heads)          \
  X(CHUNK, chunk, 0, QKV__NO_TENSOR, qkv__mask_no_heads)                      \
  X(COLUMNS, columns, 0, QKV__NO_TENSOR, qkv__mask_no_heads)                  \
  X(STRIDED, strided, 1 << QKV_I32, QKV__BY_HEAD, qkv__mask_t_heads)          \
  X(BLOCKS, blocks, 0, QKV__NO_TENSOR, qkv__mask_blocks_heads)
int qkv__mask_blocks_heads(const qkv_mask *m);
#define QKV__MASK_DECLARE(id, name, types, extents, by_head)                                                         \
  qkv_status qkv__mask_##name##_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes);             \
  int32_t qkv__mask_##name##_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits); \
  int64_t qkv__mask_##name##_next(const qkv_mask *m, const qkv__rows *r, int64_t key);
QKV__MASK_LIST(QKV__MASK_DECLARE)
#undef QKV__MASK_DECLARE

#endif

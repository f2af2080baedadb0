/* The backward of one block of query rows against one block of keys, and what it needs: loading of blocks and storing of gradients.
 * backward.c is loops over this. A block of rows has at most 64 rows of one head, by their index; a block of keys is 64
 * absolute positions. */
#ifndef QKV_ATTENTION_GRADIENT_H
#define QKV_ATTENTION_GRADIENT_H

#include "attention/panel.h"

enum { QKV__MAX_BLOCK_PANELS = 16 };

/* Rows of a head. The pitch of Q, dO and dQ is a whole number of vectors. */
typedef struct qkv__row_block {
  int64_t head, row;
  int rows, empty, finite;  /* some lse is -inf; all of Q and dO are finite */
  void *Q, *dO, *Qt, *dOt;  /* row-major; and in panels, Q times c */
  void *dQ;                 /* total so far, or NULL */
  void *L2, *delta;         /* [64], delta less dlse */
  void *slope2;             /* [64], if there are slopes */
  uint32_t *Qp, *dOp, *Qr, *dOr; /* of QKV_FAST: pairs along the head dimension [padded / 2][64], and along rows [32][pitch] */
  double *position;         /* [64] */
} qkv__row_block;

typedef struct qkv__key_block {
  int64_t key; /* index in the entry of the first */
  int keys, finite;
  const void *K, *V; /* [64] rows of pitch ldk and ldv */
  int64_t ldk, ldv;
  void *dK, *dV; /* totals so far, or NULL */
} qkv__key_block;

typedef struct qkv__gradient_work {
  void *S, *D;             /* [64 keys][64 rows] */
  void *K, *V;             /* of a key block */
  void *rows, *old, *Ot;   /* [64][max(head_dim, head_dim_v)] */
  void *bias_rows, *bias;
  uint16_t *half, *turned; /* of QKV_FAST: [64][64 or padded head dimension], [64][64] */
  uint16_t *Kb, *Vb;       /* a key block in bf16, padded; */
  uint32_t *Kr;            /* and pairs of its keys [32][pitch] */
} qkv__gradient_work;

/* What a backward call works with. */
typedef struct qkv__backward {
  qkv__engine g;
  const qkv__gradients *to;
  int64_t ld, ldv;  /* pitches: head_dim and head_dim_v in whole vectors */
  int panels;       /* of a block of rows */
  int panel_row[QKV__MAX_BLOCK_PANELS + 1], panel_nv[QKV__MAX_BLOCK_PANELS]; /* first row, vectors */
} qkv__backward;

void qkv__backward_init(qkv__backward *j);
void qkv__row_block_carve(const qkv__backward *j, qkv__carver *c, int with_dq, qkv__row_block *q);
void qkv__gradient_carve(const qkv__backward *j, qkv__carver *c, qkv__gradient_work *w);
/* Pads of the key block's memory; once per task. */
void qkv__gradient_clear(const qkv__backward *j, qkv__gradient_work *w);

/* Rows [row, row + 64) of a head, as far as they exist; dQ = 0. */
void qkv__row_block_load(const qkv__backward *j, const qkv__entry *e, int64_t head, int64_t row, qkv__row_block *q,
                         qkv__gradient_work *w);
/* L2 and delta alone. */
void qkv__row_block_sums(const qkv__backward *j, const qkv__entry *e, int64_t head, int64_t row, qkv__row_block *q,
                         qkv__gradient_work *w);
/* Keys [key, key + keys) */
void qkv__key_block_load(const qkv__backward *j, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__key_block *k,
                         qkv__gradient_work *w);

/* Adds the pairs of the two blocks to dQ, dK and dV, those that are there. */
void qkv__gradient_tile(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k,
                        qkv__gradient_work *w);
/* dS[rows][64 keys] of the pairs, 0 where invisible, in w->S; 0 if nothing is visible. */
int qkv__gradient_scores(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k,
                         qkv__gradient_work *w);

/* rows[n][d] of a gradient = scale * from + 0, or added to it. `to` is the first row's address; from NULL: zeros. */
void qkv__gradient_store(const qkv__backward *j, const qkv_tensor *t, int accumulate, void *to, const void *from, int64_t ld, int64_t n,
                         int64_t d, double scale, qkv__gradient_work *w);

#endif

/* A checked layer: defaults filled in, memory laid out. */
#ifndef QKV_NN_LAYER_H
#define QKV_NN_LAYER_H

#include <qkv/nn.h>

#include "nn/names.h"
#include "nn/product.h"
#include "problem/tensor.h"

enum { QKV__Q, QKV__K, QKV__V, QKV__PARTS }; /* what the input projections make */

/* What a call uses. MEASURES runs nothing and needs no data. */
enum { QKV__MEASURES, QKV__FORWARD, QKV__BACKWARD, QKV__VIEWS };

/* q, k and v, or their gradients: rows of one matrix side by side; in cross-attention q has a matrix of its own. */
typedef struct qkv__heads {
  qkv_tensor part[QKV__PARTS]; /* (batch, -, row, column) */
} qkv__heads;

typedef struct qkv__layer {
  qkv_multihead m; /* the caller's, d_kv, d_out and dtype made explicit */
  qkv_multihead_gradients g;
  qkv_problem p; /* head_dim, head_dim_v, num_kv_heads and seqlen_kv made explicit; no tensors of the layer */
  qkv_rotary rotary[2]; /* of q and k, where has_rotary */
  int has_rotary[2];
  int self;
  int same_rows; /* self-attention whose queries and keys are the same rows */
  size_t element;
  qkv__side side[2];          /* queries, keys */
  int64_t width[QKV__PARTS];  /* columns of q, k, v */
  int64_t out_width;          /* of attention's output */
  int64_t rows[2];            /* of all entries */
  size_t activation_bytes;
} qkv__layer;

qkv_status qkv__layer_check(const qkv_multihead *m, const qkv_multihead_gradients *g, int use, qkv__layer *l, char *text, size_t bytes);

/* Activations in memory of l->activation_bytes. */
typedef struct qkv__activations {
  qkv__heads heads;
  qkv_tensor out; /* (batch, -, row, column) */
  char *lse;
} qkv__activations;
qkv__activations qkv__activations_at(const qkv__layer *l, char *memory);
/* The same for gradients: bytes, and views of memory. */
size_t qkv__heads_bytes(const qkv__layer *l);
qkv__heads qkv__heads_at(const qkv__layer *l, char *memory);
size_t qkv__out_bytes(const qkv__layer *l);
qkv_tensor qkv__out_at(const qkv__layer *l, char *memory);

/* (batch, head, row, column) of columns that are heads side by side. */
qkv_tensor qkv__split_heads(const qkv_tensor *rows, int64_t head_dim);
/* The attention problem in activations; with lse if `lse`. */
qkv_problem qkv__problem_of(const qkv__layer *l, const qkv__activations *a, int lse);

/* The parts' weights and biases among parameters or gradients, and the input they project. */
QKV_INLINE const qkv_tensor *qkv__weight(const qkv_projections *p, int part) {
  return part == QKV__Q ? &p->wq : part == QKV__K ? &p->wk : &p->wv;
}
QKV_INLINE const qkv_tensor *qkv__bias(const qkv_projections *p, int part) {
  return part == QKV__Q ? &p->bq : part == QKV__K ? &p->bk : &p->bv;
}
QKV_INLINE int64_t qkv__input_width(const qkv__layer *l, int part) { return part == QKV__Q ? l->m.d_model : l->m.d_kv; }
QKV_INLINE const qkv_tensor *qkv__input(const qkv__layer *l, int part) {
  return part == QKV__Q || l->self ? &l->m.x : &l->m.x_kv;
}
QKV_INLINE const qkv__side *qkv__side_of(const qkv__layer *l, int part) { return &l->side[part != QKV__Q]; }
/* The end of the parts from `part` on whose weights in p are one matrix and whose rows are the same. */
int qkv__group_end(const qkv__layer *l, const qkv_projections *p, int part);
/* Their weights. */
qkv__matrix qkv__group_weight(const qkv__layer *l, const qkv_projections *p, int from, int to);

#endif

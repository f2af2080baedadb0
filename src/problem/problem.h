/* A checked problem: defaults filled in, constants rounded. Every other part of the library works from this. */
#ifndef QKV_PROBLEM_PROBLEM_H
#define QKV_PROBLEM_PROBLEM_H

#include <qkv/qkv.h>

#include "base/port.h"

/* What a call reads and writes. Tensors it does not use may be left out (data NULL); out and lse are then not checked.
 * READS_OUT: out and lse are inputs, and both are needed if USES_OUT is there too. */
enum { QKV__USES_QK = 1, QKV__USES_V = 2, QKV__USES_OUT = 4, QKV__READS_OUT = 8 };

typedef struct qkv__problem {
  qkv_problem p;    /* the caller's, num_kv_heads, head_dim_v and softmax_scale made explicit */
  int f64;          /* the arithmetic */
  int64_t group;    /* num_heads / num_kv_heads */
  int64_t rows;     /* of a state: (entry, head, query), or (head, query) when the queries are ragged */
  int64_t max_rows; /* the most query rows of an entry */
  int64_t max_keys; /* the most keys of an entry */
  double c, g;      /* CONSTANTS of docs/NUMERICS.md, already rounded to the arithmetic's type */
  double keep, r;   /* of dropout; 1 without */
  uint64_t drop;    /* 32 random bits below this drop; 0: no dropout */
} qkv__problem;

/* One batch entry or ragged segment. Key j, b0 <= j < b1, has position position_k + j - b0; query i has position_q + i. */
typedef struct qkv__entry {
  int64_t b;
  int64_t batch_q, batch_kv; /* index on the batch axis of q, out, lse; of k, v */
  int64_t row0_q, row0_kv;   /* row of the entry's first query and key in these tensors */
  int64_t rows;              /* query rows to fill in */
  int64_t nq;                /* of which exist */
  int64_t b0, b1;
  int64_t position_k, position_q;
  int64_t start_q; /* position_q under START alignment */
} qkv__entry;

qkv_status qkv__check(const qkv_problem *in, int uses, qkv__problem *out, char *text, size_t bytes);
/* Gradients, and the problem they belong to. in NULL, with uses 0 only: dq, dk and dv are wanted. */
typedef struct qkv__gradients {
  qkv_gradients g;
  int wanted; /* set of QKV_D... */
} qkv__gradients;
qkv_status qkv__check_gradients(const qkv_problem *problem, const qkv_gradients *in, int uses, qkv__problem *p,
                                qkv__gradients *out, char *text, size_t bytes);
qkv_status qkv__check_context(const qkv_context *in, qkv_context *out, char *text, size_t bytes);
qkv_status qkv__check_region(const qkv__problem *p, const qkv_region *in, const qkv_tensor *to, qkv_region *out);
/* A state against itself; against the problem too unless p is NULL. */
qkv_status qkv__check_state(const qkv__problem *p, const qkv_state *s);

/* Row `index` of a state: its entry, head and query. */
void qkv__row_of(const qkv__problem *p, int64_t index, qkv__entry *e, int64_t *h, int64_t *i);
void qkv__entry_of(const qkv__problem *p, int64_t b, qkv__entry *e);

size_t qkv__dtype_bytes(int32_t dtype); /* 0 for an unknown type */
const char *qkv__dtype_name(int32_t dtype);

/* An element's address. */
QKV_INLINE char *qkv__at(const qkv_tensor *t, size_t element, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  return (char *)t->data +
         (i0 * t->stride[0] + i1 * t->stride[1] + i2 * t->stride[2] + i3 * t->stride[3]) * (int64_t)element;
}
/* A small parameter (slope, sink) as double, whatever its type. */
QKV_INLINE double qkv__parameter(const qkv_tensor *t, int64_t b, int64_t h) {
  if (t->dtype == QKV_F64) return *(const double *)(const void *)qkv__at(t, 8, b, h, 0, 0);
  return *(const float *)(const void *)qkv__at(t, 4, b, h, 0, 0);
}
/* The third counter word of dropout. */
QKV_INLINE uint32_t qkv__dropout_word(const qkv_problem *p, int64_t b, int64_t h) {
  return (uint32_t)(((uint64_t)p->batch_origin + (uint64_t)b) * (uint64_t)p->heads_total + (uint64_t)p->head_origin + (uint64_t)h);
}
/* R of docs/NUMERICS.md: computed in double, rounded once. The volatile keeps GCC 12 from dropping the pair of
 * conversions, which its vectoriser of straight-line code does. */
QKV_INLINE double qkv__round(const qkv__problem *p, double x) {
  volatile float f = (float)x;
  return p->f64 ? x : (double)f;
}

#endif

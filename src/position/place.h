/* What sinusoidal and rotary share: positions of rows, a tensor that may be changed in place, and the division into tasks. */
#ifndef QKV_POSITION_PLACE_H
#define QKV_POSITION_PLACE_H

#include "problem/problem.h"
#include "problem/tensor.h"

/* Position of row i of entry b: ids[b][i], or start + starts[b] + i. */
typedef struct qkv__places {
  int64_t start;
  const int32_t *starts;
  const qkv_tensor *ids;
} qkv__places;
QKV_INLINE double qkv__place(const qkv__places *p, int64_t b, int64_t i) {
  if (p->ids->data) return *(const int32_t *)(const void *)qkv__at(p->ids, 4, b, 0, i, 0);
  return (double)(p->start + (p->starts ? p->starts[b] : 0) + i);
}
qkv_status qkv__check_places(const qkv__report *r, const qkv__places *p, int64_t batch, int64_t seqlen);

/* Extents and types of x and out. An out without data becomes x; x may have no data if `write_only`. */
qkv_status qkv__check_in_place(const qkv__report *r, const qkv_tensor *x, qkv_tensor *out, const int64_t *n, int write_only);
qkv_status qkv__check_extent(const qkv__report *r, const char *name, int64_t n, int64_t least, int64_t limit);

/* Rows of an entry that one task takes, for `work` operations per row: it never depends on the executor. */
QKV_INLINE int64_t qkv__task_rows(int64_t rows, int64_t work) {
  const int64_t n = 65536 / QKV_MAX(work, 1);
  return QKV_MIN(QKV_MAX(rows, 1), n < 1 ? 1 : n > 64 ? 64 : n);
}

#endif

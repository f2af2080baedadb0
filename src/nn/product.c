#include "nn/product.h"

#include <limits.h>
#include <string.h>

#include "base/port.h"
#include "nn/cblas.h"
#include "nn/names.h"
#include "base/run.h"
#include "problem/problem.h"

enum { PIECE = 256, SUM_COLUMNS = 32 }; /* rows of a product's task, columns of a sum's */

/* ---- Rows ---- */

qkv__segment qkv__entry_rows(const qkv__side *s, int64_t e) {
  const int64_t first = s->cu ? s->cu[e] : 0, rows = s->cu ? s->cu[e + 1] - first : s->seqlen;
  const int64_t from = s->begin ? s->begin[e] : 0, to = s->end ? s->end[e] : rows;
  return (qkv__segment){s->cu ? 0 : e, first + from, to - from};
}

int qkv__matrix_fits(const qkv__matrix *m) {
  const int64_t r = m->rows, c = m->columns, rs = m->row_stride, cs = m->column_stride;
  if (r > INT_MAX || c > INT_MAX) return 0;
  if ((c <= 1 || cs == 1) && (r <= 1 || (rs >= QKV_MAX(1, c) && rs <= INT_MAX))) return 1;
  return (r <= 1 || rs == 1) && (c <= 1 || (cs >= QKV_MAX(1, r) && cs <= INT_MAX));
}

qkv_tensor qkv__rows_at(const qkv__side *s, char *data, int32_t dtype, int64_t ld) {
  const int64_t batch = s->sequence_major ? ld : s->seqlen * ld, row = s->sequence_major ? s->batch * ld : ld;
  return qkv_strided(data, dtype, batch, 0, row, 1);
}

static qkv__matrix rows_of(const qkv_tensor *t, size_t size, const qkv__segment *g, int64_t columns) {
  return (qkv__matrix){g->count ? qkv__at(t, size, g->batch, 0, g->row, 0) : t->data, g->count, columns, t->stride[2], t->stride[3]};
}

/* All rows of a tensor as one matrix, in the side's order; 0 where its strides do not allow it. */
static int merged(const qkv__side *s, const qkv_tensor *t, int64_t columns, qkv__matrix *m) {
  const int64_t batch = t->stride[0], row = t->stride[2];
  int64_t stride = row;
  if (s->partial || s->batch > INT_MAX / QKV_MAX(1, s->seqlen)) return 0;
  if (s->seqlen <= 1)
    stride = batch;
  else if (s->batch > 1 && s->sequence_major) {
    if (batch > INT64_MAX / s->batch || batch <= 0 || row != s->batch * batch) return 0;
    stride = batch;
  } else if (s->batch > 1) {
    if (row > INT64_MAX / s->seqlen || row <= 0 || batch != s->seqlen * row) return 0;
  }
  *m = (qkv__matrix){t->data, s->batch * s->seqlen, columns, stride, t->stride[3]};
  return qkv__matrix_fits(m);
}

/* The rows of two tensors of a side as pairs of matrices: one pair if both can be merged, else one for each entry. */
typedef struct pairs {
  const qkv__side *s;
  const qkv_tensor *a, *b;
  int64_t a_columns, b_columns, count, max_rows;
  qkv__matrix a_all, b_all;
  int all;
  size_t size;
} pairs;

static pairs pairs_of(const qkv__runner *r, const qkv__side *s, const qkv_tensor *a, int64_t a_columns, const qkv_tensor *b,
                      int64_t b_columns) {
  pairs p = {.s = s, .a = a, .b = b, .a_columns = a_columns, .b_columns = b_columns, .size = qkv__dtype_bytes(r->dtype)};
  p.all = merged(s, a, a_columns, &p.a_all) && merged(s, b, b_columns, &p.b_all);
  p.count = p.all ? 1 : s->entries;
  p.max_rows = p.all ? s->batch * s->seqlen : s->seqlen;
  return p;
}

static void pair_at(const pairs *p, int64_t index, qkv__matrix *a, qkv__matrix *b) {
  *a = p->a_all;
  *b = p->b_all;
  if (p->all) return;
  const qkv__segment g = qkv__entry_rows(p->s, index);
  *a = rows_of(p->a, p->size, &g, p->a_columns);
  *b = rows_of(p->b, p->size, &g, p->b_columns);
}

static qkv__matrix transposed(const qkv__matrix *m) {
  return (qkv__matrix){m->data, m->columns, m->rows, m->column_stride, m->row_stride};
}
/* Rows [from, from + PIECE) of it. */
static qkv__matrix piece_of(const qkv__matrix *m, int64_t from, size_t size) {
  qkv__matrix p = *m;
  p.rows = QKV_MAX(0, QKV_MIN(m->rows - from, PIECE));
  if (p.rows) p.data += from * m->row_stride * (int64_t)size;
  return p;
}
static int64_t pieces_of(int64_t rows) { return (rows + PIECE - 1) / PIECE; }

/* ---- Products ---- */

/* How an operand is told to a BLAS: its leading dimension, and whether it is transposed there. */
static int leading(const qkv__matrix *m, int row_major, int *trans) {
  const qkv__matrix t = transposed(m), *v = row_major ? m : &t; /* the transpose in row-major is the same memory */
  if ((v->columns <= 1 || v->column_stride == 1) && (v->rows <= 1 || v->row_stride >= QKV_MAX(1, v->columns))) {
    *trans = QKV__NO_TRANS;
    return (int)(v->rows <= 1 ? QKV_MAX(1, v->columns) : v->row_stride);
  }
  *trans = QKV__TRANS;
  return (int)(v->columns <= 1 ? QKV_MAX(1, v->rows) : v->column_stride);
}

/* c = a b or c += a b. The storage of c is never the transposed one, so it decides the order. */
static void product(int32_t dtype, const qkv__matrix *c, const qkv__matrix *a, const qkv__matrix *b, int add) {
  int ta, tb, tc, row_major = 1;
  if (!c->rows || !c->columns) return;
  int ldc = leading(c, 1, &tc);
  if (tc == QKV__TRANS) {
    row_major = 0;
    ldc = leading(c, 0, &tc);
  }
  const int order = row_major ? QKV__ROW_MAJOR : QKV__COLUMN_MAJOR, m = (int)c->rows, n = (int)c->columns, k = (int)a->columns;
  const int lda = leading(a, row_major, &ta), ldb = leading(b, row_major, &tb);
  if (dtype == QKV_F64)
    cblas_dgemm(order, ta, tb, m, n, k, 1, (const double *)(const void *)a->data, lda, (const double *)(const void *)b->data, ldb,
                add, (double *)(void *)c->data, ldc);
  else
    cblas_sgemm(order, ta, tb, m, n, k, 1, (const float *)(const void *)a->data, lda, (const float *)(const void *)b->data, ldb,
                (float)add, (float *)(void *)c->data, ldc);
}

static void copy_to_rows(int32_t dtype, const qkv__matrix *c, int64_t column, int64_t columns, const qkv_tensor *vector) {
  const size_t size = qkv__dtype_bytes(dtype);
  const int64_t step = vector ? vector->stride[3] : 0;
  for (int64_t i = 0; i < c->rows; i++) {
    char *to = c->data + (i * c->row_stride + column * c->column_stride) * (int64_t)size;
    const char *from = vector ? vector->data : NULL;
    if (c->column_stride == 1 && !from)
      memset(to, 0, (size_t)columns * size);
    else if (c->column_stride == 1 && (step == 1 || columns == 1))
      memcpy(to, from, (size_t)columns * size);
    else
      for (int64_t x = 0; x < columns; x++) {
        char *element = to + x * c->column_stride * (int64_t)size;
        if (from)
          memcpy(element, from + x * step * (int64_t)size, size);
        else
          memset(element, 0, size);
      }
  }
}

typedef struct rows_call {
  const qkv__runner *r;
  pairs p;
  qkv__matrix b;
  const qkv__fill *fill;
  int fills, add;
  int64_t pieces; /* of a pair, at most */
} rows_call;

static void fill_piece(const rows_call *k, const qkv__matrix *c) {
  int64_t column = 0;
  for (int i = 0; i < k->fills; column += k->fill[i++].columns)
    copy_to_rows(k->r->dtype, c, column, k->fill[i].columns, k->fill[i].vector);
}
static void fill_task(void *arg, int64_t task, int32_t worker) {
  const rows_call *k = arg;
  (void)worker;
  qkv__matrix c, a;
  pair_at(&k->p, task / k->pieces, &c, &a);
  c = piece_of(&c, task % k->pieces * PIECE, k->p.size);
  fill_piece(k, &c);
}
static void rows_task(void *arg, int64_t task, int32_t worker) {
  const rows_call *k = arg;
  (void)worker;
  qkv__matrix c, a;
  pair_at(&k->p, task / k->pieces, &c, &a);
  c = piece_of(&c, task % k->pieces * PIECE, k->p.size);
  a = piece_of(&a, task % k->pieces * PIECE, k->p.size);
  fill_piece(k, &c);
  product(k->r->dtype, &c, &a, &k->b, k->add);
}
/* The same by one call of the BLAS per pair. */
static void whole_task(void *arg, int64_t index, int32_t worker) {
  const rows_call *k = arg;
  (void)worker;
  qkv__matrix c, a;
  pair_at(&k->p, index, &c, &a);
  product(k->r->dtype, &c, &a, &k->b, k->add);
}

static qkv__runner serial(const qkv__runner *r) {
  qkv__runner s = *r;
  s.c.parallel_for = NULL;
  return s;
}

qkv_status qkv__rows_product(const qkv__runner *r, const qkv__side *s, const qkv_tensor *c, const qkv_tensor *a, qkv__matrix b,
                             int add, const qkv__fill *fill, int fills) {
  const qkv__runner alone = serial(r);
  const qkv__fill zero = {b.columns, NULL};
  rows_call k = {.r = r, .p = pairs_of(r, s, c, b.columns, a, b.rows), .b = b, .fill = fill, .fills = fills, .add = add};
  if (b.rows == 0) { /* nothing to sum: only the fill is left */
    if (add) return QKV_OK;
    if (!k.fills) k.fill = &zero, k.fills = 1;
  }
  k.pieces = QKV_MAX(1, pieces_of(k.p.max_rows));
  k.add |= k.fills > 0;
  if (r->tasks && b.rows) return qkv__run(&r->c, rows_task, &k, k.p.count * k.pieces);
  qkv_status status = k.fills ? qkv__run(&r->c, fill_task, &k, k.p.count * k.pieces) : QKV_OK;
  if (status == QKV_OK && b.rows) status = qkv__run(&alone.c, whole_task, &k, k.p.count);
  return status;
}

typedef struct sum_call {
  const qkv__runner *r;
  pairs p;
  qkv__matrix c;
  int add;
} sum_call;

static void sum_piece(const sum_call *k, int64_t from, int64_t rows) {
  qkv__matrix c = k->c;
  int add = k->add;
  c.data += from * c.row_stride * (int64_t)k->p.size;
  c.rows = rows;
  for (int64_t i = 0; i < k->p.count; i++) {
    qkv__matrix a, b;
    pair_at(&k->p, i, &a, &b);
    if (!a.rows) continue;
    a = transposed(&a);
    a.data += from * a.row_stride * (int64_t)k->p.size;
    a.rows = rows;
    product(k->r->dtype, &c, &a, &b, add);
    add = 1;
  }
  if (!add) copy_to_rows(k->r->dtype, &c, 0, c.columns, NULL);
}
static void sum_task(void *arg, int64_t task, int32_t worker) {
  const sum_call *k = arg;
  (void)worker;
  sum_piece(k, task * PIECE, QKV_MIN(PIECE, k->c.rows - task * PIECE));
}
static void sum_whole(void *arg, int64_t task, int32_t worker) {
  const sum_call *k = arg;
  (void)worker;
  (void)task;
  sum_piece(k, 0, k->c.rows);
}

qkv_status qkv__sum_product(const qkv__runner *r, const qkv__side *s, qkv__matrix c, const qkv_tensor *a, const qkv_tensor *b, int add) {
  sum_call k = {r, pairs_of(r, s, a, c.rows, b, c.columns), c, add};
  return r->tasks ? qkv__run(&r->c, sum_task, &k, pieces_of(c.rows)) : qkv__run(&r->c, sum_whole, &k, 1);
}

/* ---- Sums of columns ---- */

typedef struct columns_call {
  const qkv__runner *r;
  pairs p;
  const qkv_tensor *to;
  int add;
} columns_call;

static void add_f32(double *sum, const float *a, int64_t rows, int64_t rs, int64_t n, int64_t cs) {
  for (int64_t i = 0; i < rows; i++, a += rs)
    if (cs == 1 && n == SUM_COLUMNS)
      for (int x = 0; x < SUM_COLUMNS; x++) sum[x] += a[x];
    else
      for (int64_t x = 0; x < n; x++) sum[x] += a[x * cs];
}
static void add_f64(double *sum, const double *a, int64_t rows, int64_t rs, int64_t n, int64_t cs) {
  for (int64_t i = 0; i < rows; i++, a += rs)
    for (int64_t x = 0; x < n; x++) sum[x] += a[x * cs];
}

static void columns_task(void *arg, int64_t task, int32_t worker) {
  const columns_call *k = arg;
  (void)worker;
  const int64_t from = task * SUM_COLUMNS, n = QKV_MIN(SUM_COLUMNS, k->p.a_columns - from);
  double sum[SUM_COLUMNS] = {0};
  for (int64_t i = 0; i < k->p.count; i++) {
    qkv__matrix a, b;
    pair_at(&k->p, i, &a, &b);
    const char *data = a.data + from * a.column_stride * (int64_t)k->p.size;
    if (k->r->dtype == QKV_F64)
      add_f64(sum, (const double *)(const void *)data, a.rows, a.row_stride, n, a.column_stride);
    else
      add_f32(sum, (const float *)(const void *)data, a.rows, a.row_stride, n, a.column_stride);
  }
  for (int64_t x = 0; x < n; x++) {
    void *to = qkv__at(k->to, k->p.size, 0, 0, 0, from + x);
    if (k->r->dtype == QKV_F64)
      *(double *)to = k->add ? *(double *)to + sum[x] : sum[x];
    else
      *(float *)to = k->add ? *(float *)to + (float)sum[x] : (float)sum[x];
  }
}

qkv_status qkv__column_sums(const qkv__runner *r, const qkv__side *s, const qkv_tensor *to, int64_t columns, const qkv_tensor *a,
                            int add) {
  columns_call k = {r, pairs_of(r, s, a, columns, a, columns), to, add};
  return qkv__run(&r->c, columns_task, &k, (columns + SUM_COLUMNS - 1) / SUM_COLUMNS);
}

qkv_status qkv__zero_rows(const qkv__runner *r, const qkv__side *s, const qkv_tensor *to, int64_t columns) {
  const qkv__side all = {s->batch, s->seqlen, s->batch, NULL, NULL, NULL, 0, s->sequence_major};
  const qkv__fill zero = {columns, NULL};
  rows_call k = {.r = r, .p = pairs_of(r, &all, to, columns, to, columns), .fill = &zero, .fills = 1};
  k.pieces = QKV_MAX(1, pieces_of(k.p.max_rows));
  return qkv__run(&r->c, fill_task, &k, k.p.count * k.pieces);
}

/* Products of matrices whose rows are the rows of a batch, in whatever strides the caller has them. */
#ifndef QKV_NN_PRODUCT_H
#define QKV_NN_PRODUCT_H

#include <qkv/qkv.h>

/* The rows of one side, queries or keys: entries of the tensors' batch axis x rows each, and which of them the lengths leave in. */
typedef struct qkv__side {
  int64_t batch, seqlen; /* of the tensors: (1, all rows) of a ragged batch */
  int64_t entries;
  const int32_t *cu, *begin, *end; /* per entry, or NULL */
  int partial;                     /* some rows are left out */
  int sequence_major;              /* rows of one tensor over the batch follow each other: (row, batch, column) */
} qkv__side;

/* Live rows of an entry: rows [row, row + count) at index `batch` of the tensors' axis. */
typedef struct qkv__segment {
  int64_t batch, row, count;
} qkv__segment;
qkv__segment qkv__entry_rows(const qkv__side *s, int64_t entry);

/* How calls run. */
typedef struct qkv__runner {
  qkv_context c;
  int32_t dtype;
  int tasks; /* QKV_GEMM_TASKS */
} qkv__runner;

/* A matrix with rows and columns of any stride, of which one is 1. Strides count elements. */
typedef struct qkv__matrix {
  char *data;
  int64_t rows, columns, row_stride, column_stride;
} qkv__matrix;
/* Whether a BLAS takes it. */
int qkv__matrix_fits(const qkv__matrix *m);
/* Rows of a side in memory of `ld` elements per row. */
qkv_tensor qkv__rows_at(const qkv__side *s, char *data, int32_t dtype, int64_t ld);

/* Columns of a result that begin with the values of a vector, or 0 without one. */
typedef struct qkv__fill {
  int64_t columns;
  const qkv_tensor *vector;
} qkv__fill;

/* c = a b, or c += a b if `add`, or the fills (`fills` of them, which make up the columns) + a b. The live rows of c, n columns, and of
 * a, as many as b has rows. */
qkv_status qkv__rows_product(const qkv__runner *r, const qkv__side *s, const qkv_tensor *c, const qkv_tensor *a, qkv__matrix b,
                             int add, const qkv__fill *fill, int fills);
/* c = a^T b, or c += a^T b, summed over the live rows of a and b. */
qkv_status qkv__sum_product(const qkv__runner *r, const qkv__side *s, qkv__matrix c, const qkv_tensor *a, const qkv_tensor *b, int add);
/* to = sums of the columns of a over its live rows, or to += them; in double, rows ascending, whatever the executor. */
qkv_status qkv__column_sums(const qkv__runner *r, const qkv__side *s, const qkv_tensor *to, int64_t columns, const qkv_tensor *a,
                            int add);
/* All rows, live or not, become 0. */
qkv_status qkv__zero_rows(const qkv__runner *r, const qkv__side *s, const qkv_tensor *to, int64_t columns);

#endif

/* The two functions of CBLAS that are used. Declared here, not by a header of one vendor: any library with the standard interface and
 * 32-bit integers serves, and which one is a matter of linking. */
#ifndef QKV_NN_CBLAS_H
#define QKV_NN_CBLAS_H

enum { QKV__ROW_MAJOR = 101, QKV__COLUMN_MAJOR = 102, QKV__NO_TRANS = 111, QKV__TRANS = 112 };

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc);
void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
                 int ldb, double beta, double *c, int ldc);

#endif

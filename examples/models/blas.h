/* The BLAS as these examples use it: one product, and the number of its threads, which is a global of the process and so the
 * program's to set, not the library's. */
#ifndef QKV_EXAMPLES_BLAS_H
#define QKV_EXAMPLES_BLAS_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { BLAS_ROW_MAJOR = 101, BLAS_NO_TRANS = 111, BLAS_TRANS = 112 };
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc);
void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
                 int ldb, double beta, double *c, int ldc);

/* Each vendor has its own function for it; the one that the process has is called. 0, or -1 if it has none of them. */
static inline int blas_threads(int threads) {
  void *process = dlopen(NULL, RTLD_LAZY);
  void (*set_int)(int);
  void (*set_wide)(int64_t);
  int status = -1;
  if (!process) return -1;
  /* POSIX's way from an object pointer to a function. */
  *(void **)&set_int = dlsym(process, "openblas_set_num_threads");
  if (!set_int) *(void **)&set_int = dlsym(process, "MKL_Set_Num_Threads");
  *(void **)&set_wide = dlsym(process, "bli_thread_set_num_threads");
  if (set_int) {
    set_int(threads);
    status = 0;
  }
  if (set_wide) {
    set_wide(threads);
    status = 0;
  }
  dlclose(process);
  return status;
}

#endif

/* An executor on the OpenMP runtime of the program that includes this (compile it with -fopenmp). libqkv itself links
 * none. */
#ifndef QKV_OPENMP_H
#define QKV_OPENMP_H

#include <omp.h>
#include <qkv/qkv.h>

static inline void qkv_openmp_parallel_for(void *self, void (*body)(void *arg, int64_t task, int32_t worker), void *arg,
                                           int64_t tasks) {
  const int threads = (int)(intptr_t)self;
  int64_t task;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (task = 0; task < tasks; task++) body(arg, task, (int32_t)omp_get_thread_num());
}

/* Lets the calls of context run on `threads` threads; 0: as many as OpenMP would take. */
static inline void qkv_openmp(qkv_context *context, int threads) {
  if (threads <= 0) threads = omp_get_max_threads();
  context->num_workers = threads;
  context->parallel_for = qkv_openmp_parallel_for;
  context->self = (void *)(intptr_t)threads;
}

#endif

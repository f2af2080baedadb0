/* Running tasks under a caller's context: executor, allocator, cancel flag, floating-point state. */
#ifndef QKV_BASE_RUN_H
#define QKV_BASE_RUN_H

#include <qkv/qkv.h>

/* Runs body for each task, by the context's executor or serially. QKV_CANCELLED if the caller's flag was seen. */
qkv_status qkv__run(const qkv_context *c, void (*body)(void *arg, int64_t task, int32_t worker), void *arg, int64_t tasks);

/* Memory of one call: the caller's, or one allocation. *memory is aligned to 64. */
typedef struct qkv__memory {
  char *base;  /* aligned */
  void *owned; /* to release, or NULL */
} qkv__memory;
enum { QKV__MEMORY_SLACK = 63 }; /* for the alignment of a caller's scratch */
qkv_status qkv__memory_take(const qkv_context *c, void *scratch, size_t bytes, size_t need, qkv__memory *m);
void qkv__memory_release(const qkv_context *c, qkv__memory *m);

#endif

/* Executors for a qkv_context that a library must survive: any order of tasks, any number of workers. */
#ifndef QKV_SUPPORT_EXECUTOR_H
#define QKV_SUPPORT_EXECUTOR_H

#include <stdint.h>

#include "qkv/qkv.h"

typedef enum executor_kind {
  EXECUTOR_SERIAL,    /* ascending; all by the last worker */
  EXECUTOR_REVERSED,  /* descending; workers in turn */
  EXECUTOR_SHUFFLED,  /* an order drawn from the seed; random workers */
  EXECUTOR_THREADS,   /* real threads take tasks ascending */
  EXECUTOR_SCATTERED, /* real threads take tasks in the shuffled order */
  EXECUTOR_KINDS
} executor_kind;

typedef struct executor {
  executor_kind kind;
  int32_t workers;
  uint64_t seed;
  int64_t calls, tasks; /* of parallel_for, so far */
} executor;

executor executor_make(executor_kind kind, int32_t workers, uint64_t seed);
/* A context that runs on it. The executor must outlive the context. */
qkv_context executor_context(executor *e);
const char *executor_name(executor_kind kind);

#endif

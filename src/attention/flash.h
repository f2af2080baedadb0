/* Order 1 over tiles. */
#ifndef QKV_ATTENTION_FLASH_H
#define QKV_ATTENTION_FLASH_H

#include "schedule/schedule.h"

typedef struct qkv__flash {
  qkv__engine g;
  qkv__schedule s;
  const qkv_state *state; /* where the nodes of a divided task go; NULL: tasks finish their rows */
  char *worker_memory;
  size_t worker_bytes; /* of each worker */
} qkv__flash;

/* Memory of one worker; SIZE_MAX if it does not fit. */
size_t qkv__flash_worker_bytes(const qkv__engine *g, const qkv__schedule *s);
void qkv__flash_task(void *flash, int64_t task, int32_t worker);

#endif

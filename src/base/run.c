#include "base/run.h"

#include <stdlib.h>

#include "base/fpstate.h"
#include "base/port.h"

typedef struct job {
  const qkv_context *c;
  void (*body)(void *arg, int64_t task, int32_t worker);
  void *arg;
  int32_t cancelled;
} job;

static void trampoline(void *arg, int64_t task, int32_t worker) {
  job *j = arg;
  qkv__fpstate fp;
  if (j->c->cancel && QKV_LOAD_RELAXED(j->c->cancel)) {
    QKV_STORE_RELAXED(&j->cancelled, 1);
    return;
  }
  qkv__fp_enter(&fp);
  j->body(j->arg, task, worker);
  qkv__fp_leave(&fp);
}

qkv_status qkv__run(const qkv_context *c, void (*body)(void *arg, int64_t task, int32_t worker), void *arg, int64_t tasks) {
  job j = {c, body, arg, 0};
  if (tasks <= 0) return QKV_OK;
  if (c->parallel_for && tasks > 1)
    c->parallel_for(c->self, trampoline, &j, tasks);
  else
    for (int64_t t = 0; t < tasks; t++) trampoline(&j, t, 0);
  return QKV_LOAD_RELAXED(&j.cancelled) ? QKV_CANCELLED : QKV_OK;
}

static void *align_up(void *p) { return (char *)p + (64 - (uintptr_t)p % 64) % 64; }

qkv_status qkv__memory_take(const qkv_context *c, void *scratch, size_t bytes, size_t need, qkv__memory *m) {
  m->owned = NULL;
  m->base = NULL;
  if (scratch) {
    if (bytes < need + QKV__MEMORY_SLACK) return QKV_SCRATCH_TOO_SMALL;
    m->base = align_up(scratch);
    return QKV_OK;
  }
  if (bytes) return QKV_BAD_POINTER;
  if (need == 0) return QKV_OK;
  m->owned = c->alloc ? c->alloc(c->alloc_self, need + QKV__MEMORY_SLACK, 64) : malloc(need + QKV__MEMORY_SLACK);
  if (!m->owned) return QKV_NO_MEMORY;
  m->base = align_up(m->owned);
  return QKV_OK;
}

void qkv__memory_release(const qkv_context *c, qkv__memory *m) {
  if (!m->owned) return;
  if (c->release)
    c->release(c->alloc_self, m->owned);
  else
    free(m->owned);
}

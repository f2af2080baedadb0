#include "executor.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "rng.h"

typedef void task_body(void *arg, int64_t task, int32_t worker);

typedef struct crew {
  task_body *body;
  void *arg;
  const int64_t *order; /* NULL: ascending */
  int64_t tasks;
  atomic_llong next;
} crew;

typedef struct member {
  crew *crew;
  int32_t worker;
  pthread_t thread;
  int started;
} member;

static void *work(void *data) {
  member *m = data;
  for (;;) {
    int64_t n = atomic_fetch_add(&m->crew->next, 1);
    if (n >= m->crew->tasks) {
      return NULL;
    }
    m->crew->body(m->crew->arg, m->crew->order != NULL ? m->crew->order[n] : n, m->worker);
  }
}

static int64_t *shuffled(int64_t tasks, uint64_t seed) {
  int64_t *order = malloc((size_t)(tasks > 0 ? tasks : 1) * sizeof *order);
  if (order == NULL) {
    return NULL;
  }
  rng r = {seed, 1, 0};
  for (int64_t n = 0; n < tasks; n++) {
    int64_t at = rng_below(&r, n + 1);
    order[n] = order[at];
    order[at] = n;
  }
  return order;
}

static void with_threads(executor *e, task_body *body, void *arg, int64_t tasks, const int64_t *order) {
  crew c = {body, arg, order, tasks, 0};
  member *members = calloc((size_t)e->workers, sizeof *members);
  if (members == NULL) {
    member alone = {&c, 0, pthread_self(), 0};
    work(&alone);
    return;
  }
  for (int32_t w = 0; w < e->workers; w++) {
    members[w].crew = &c;
    members[w].worker = w;
    members[w].started = w > 0 && pthread_create(&members[w].thread, NULL, work, &members[w]) == 0;
  }
  work(&members[0]);
  for (int32_t w = 0; w < e->workers; w++) {
    if (members[w].started) {
      pthread_join(members[w].thread, NULL);
    }
  }
  free(members);
}

static void run_tasks(void *self, task_body *body, void *arg, int64_t tasks) {
  executor *e = self;
  e->calls++;
  e->tasks += tasks;
  int64_t *order = e->kind == EXECUTOR_SHUFFLED || e->kind == EXECUTOR_SCATTERED ? shuffled(tasks, e->seed) : NULL;
  if (e->kind >= EXECUTOR_THREADS) {
    with_threads(e, body, arg, tasks, order);
  } else {
    rng r = {e->seed, 2, 0};
    for (int64_t n = 0; n < tasks; n++) {
      int64_t task = order != NULL ? order[n] : e->kind == EXECUTOR_REVERSED ? tasks - 1 - n : n;
      int32_t worker = e->kind == EXECUTOR_SERIAL     ? e->workers - 1
                       : e->kind == EXECUTOR_REVERSED ? (int32_t)(n % e->workers)
                                                      : (int32_t)rng_below(&r, e->workers);
      body(arg, task, worker);
    }
  }
  free(order);
}

executor executor_make(executor_kind kind, int32_t workers, uint64_t seed) {
  executor e = {kind, workers > 0 ? workers : 1, seed, 0, 0};
  return e;
}

qkv_context executor_context(executor *e) {
  qkv_context c = qkv_context_default();
  c.num_workers = e->workers;
  c.self = e;
  c.parallel_for = run_tasks;
  return c;
}

const char *executor_name(executor_kind kind) {
  static const char *const names[EXECUTOR_KINDS] = {"serial", "reversed", "shuffled", "threads", "scattered"};
  return names[kind];
}

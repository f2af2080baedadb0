/* Which tasks a call is divided into: from the problem alone, never from the number of workers. A task is a range of rows
 * of one (entry, kv head) and one node of the key tree: all keys, or with few rows one of `nodes` neighbouring nodes of a
 * level. */
#ifndef QKV_SCHEDULE_SCHEDULE_H
#define QKV_SCHEDULE_SCHEDULE_H

#include "attention/panel.h"

/* Work of a row task. */
typedef struct qkv__cost {
  float work;
  int32_t task;
} qkv__cost;

typedef struct qkv__schedule {
  int64_t task_rows;  /* rows of a task, a multiple of the panel's width */
  int64_t panels;     /* panels of a task */
  int64_t *starts;      /* [batch + 1] row tasks before each entry, or NULL: entries have equal numbers, or are counted */
  struct qkv__cost *order; /* [row_tasks] least work first; NULL: by index. Tasks run from its end */
  int64_t grain;        /* row tasks that run as one, when there are very many small ones */
  int64_t row_tasks;  /* tasks over rows */
  int64_t nodes;      /* tasks over keys; 1: every task sees all keys */
  int level;          /* of these nodes */
  int64_t first_node; /* index of the first */
  int64_t tasks;      /* row_tasks * nodes */
  int64_t spares;     /* tree nodes of a panel */
  int64_t max_nodes;  /* scratch has room for so many nodes, */
  int64_t node_rows;  /* and so many rows of all nodes together */
} qkv__schedule;

typedef struct qkv__task {
  qkv__entry e;
  int64_t kv_head;
  int64_t f0, f1; /* rows of the group; f0 == f1: only dead rows */
  int first;      /* the first task of its (entry, kv head): it also stores the dead rows */
  int64_t node;   /* 0 <= node < nodes */
} qkv__task;

/* Splits [first, last) that hold keys of any entry. */
void qkv__split_range(const qkv__problem *p, int64_t *first, int64_t *last);
/* Tasks over rows when each has task_rows of them. */
int64_t qkv__count_tasks(const qkv__engine *g, int64_t task_rows);
void qkv__schedule_make(const qkv__engine *g, int whole_keys, qkv__schedule *s);
/* Room for starts, and for order if several workers share the tasks; to be filled before tasks run. */
void qkv__schedule_carve(const qkv__engine *g, int workers, qkv__carver *c, qkv__schedule *s);
void qkv__schedule_fill(const qkv__engine *g, qkv__schedule *s);
/* Row task and node of `task` = row task * nodes + node, the row tasks in their order. */
void qkv__schedule_task(const qkv__engine *g, const qkv__schedule *s, int64_t task, qkv__task *t);

#endif

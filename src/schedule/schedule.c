#include "schedule/schedule.h"

#include "base/order1.h"

enum {
  PANEL_MEMORY = 384 << 10, /* of the panels that share one pass over K and V: they stay in the second-level cache */
  MAX_PANELS = 16,
  PLENTY_PANELS = 8,        /* above, only if there are plenty of tasks: many threads share causal work evenly */
  PLENTY_TASKS = 256,
  ENOUGH_TASKS = 16,        /* fewer are divided further: by smaller ranges of rows, */
  FEW_TASKS = 8             /* and below this, by keys */
};

void qkv__split_range(const qkv__problem *p, int64_t *first, int64_t *last) {
  int64_t low = INT64_MAX, high = 0;
  for (int64_t b = 0; b < p->p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(p, b, &e);
    if (e.b0 >= e.b1) continue;
    low = QKV_MIN(low, e.position_k / QKV_SPLIT);
    high = QKV_MAX(high, (e.position_k + e.b1 - e.b0 - 1) / QKV_SPLIT + 1);
  }
  *first = low < high ? low : 0;
  *last = high;
}

static int64_t tasks_of(const qkv__entry *e, int64_t group, int64_t task_rows) {
  const int64_t rows = group * e->nq;
  return e->rows == 0 ? 0 : rows == 0 ? 1 : (rows + task_rows - 1) / task_rows;
}

int64_t qkv__count_tasks(const qkv__engine *g, int64_t task_rows) {
  int64_t n = 0;
  for (int64_t b = 0; b < g->p->p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(g->p, b, &e);
    n += tasks_of(&e, g->p->group, task_rows);
  }
  return n * g->p->p.num_kv_heads;
}

/* With level l, the key tasks of splits [first, last). */
static int64_t nodes_at(int64_t first, int64_t last, int level) {
  return last > first ? ((last - 1) >> level) - (first >> level) + 1 : 0;
}

void qkv__schedule_make(const qkv__engine *g, int whole_keys, qkv__schedule *s) {
  const qkv_problem *p = &g->p->p;
  const int64_t panel_bytes = (p->head_dim + 2 * p->head_dim_v) * g->w * g->k->real_bytes;
  const int64_t needed = (g->p->group * g->p->max_rows + g->w - 1) / g->w;
  int64_t first, last;
  /* a power of two, and never less for more rows: qkv_scratch is monotone */
  s->panels = 1;
  while (s->panels < needed && s->panels < MAX_PANELS && 2 * s->panels * panel_bytes <= PANEL_MEMORY) s->panels *= 2;
  while (s->panels > PLENTY_PANELS && qkv__count_tasks(g, s->panels * g->w) < PLENTY_TASKS) s->panels /= 2;
  while (s->panels > 1 && qkv__count_tasks(g, s->panels * g->w) < ENOUGH_TASKS) s->panels /= 2;
  s->task_rows = s->panels * g->w;
  s->row_tasks = qkv__count_tasks(g, s->task_rows);
  qkv__split_range(g->p, &first, &last);
  s->nodes = 1;
  s->level = 0;
  s->first_node = 0;
  s->spares = qkv__tree_spares(last - first);
  s->node_rows = s->max_nodes = 0;
  s->tasks = s->row_tasks;
  if (whole_keys || last - first < 2) return;

  const int forced = (g->flags & QKV_FORCE_SPLIT) != 0;
  if (s->row_tasks > 0 && (forced || (s->row_tasks < FEW_TASKS && g->p->rows <= s->row_tasks * g->w))) {
    int level = 0; /* the highest with enough tasks */
    while (!forced && nodes_at(first, last, level + 1) > 1 &&
           s->row_tasks * nodes_at(first, last, level + 1) >= ENOUGH_TASKS)
      level++;
    s->level = level;
    s->first_node = first >> level;
    s->nodes = nodes_at(first, last, level);
  }
  /* room for what this problem or a smaller one divides into: with r row tasks, at most 2 * 16 / r + 3 nodes */
  s->max_nodes = QKV_MAX(s->nodes, QKV_MIN(last - first, 2 * ENOUGH_TASKS + 3));
  s->node_rows = QKV_MAX(s->nodes > 1 ? s->nodes * g->p->rows : 0,
                         QKV_MIN((last - first) * g->p->rows, (2 * ENOUGH_TASKS + 3 * FEW_TASKS) * g->w));
  s->tasks = s->row_tasks * s->nodes;
}

void qkv__schedule_task(const qkv__engine *g, const qkv__schedule *s, int64_t task, qkv__task *t) {
  int64_t r = s->row_tasks - 1 - task / s->nodes, n = 0;
  t->node = task % s->nodes;
  for (int64_t b = 0;; b++) {
    qkv__entry_of(g->p, b, &t->e);
    n = tasks_of(&t->e, g->p->group, s->task_rows);
    if (r < n * g->p->p.num_kv_heads) break;
    r -= n * g->p->p.num_kv_heads;
  }
  t->kv_head = r % g->p->p.num_kv_heads;
  r /= g->p->p.num_kv_heads;
  t->first = r == 0;
  t->f0 = r * s->task_rows;
  t->f1 = QKV_MIN(t->f0 + s->task_rows, g->p->group * t->e.nq);
}

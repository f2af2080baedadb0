#include "schedule/schedule.h"

#include "base/order1.h"

enum {
  PANEL_MEMORY = 384 << 10, /* of the panels that share one pass over K and V: they stay in the second-level cache */
  MAX_PANELS = 16,
  PLENTY_PANELS = 8,        /* above, only if there are plenty of tasks: many threads share causal work evenly */
  PLENTY_TASKS = 256,
  ENOUGH_TASKS = 16,        /* fewer are divided further: by smaller ranges of rows, */
  FEW_TASKS = 8,            /* and below this, by keys */
  MANY_TASKS = 64,          /* more are run several at a time, as long as these remain, */
  GRAIN_FLOPS = 4000000,    /* up to so much work (about 20 microseconds) */
  LOOKS = 2000000           /* at the mask, to put tasks in order */
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

static int64_t grain(const qkv__engine *g, int64_t row_tasks) {
  const qkv_problem *p = &g->p->p;
  double pairs = 0;
  if (row_tasks <= MANY_TASKS) return 1;
  for (int64_t b = 0; b < p->batch; b++) {
    qkv__entry e;
    qkv__entry_of(g->p, b, &e);
    pairs += (double)p->num_heads * (double)e.nq * (double)(e.b1 - e.b0);
  }
  const double flops = 2 * pairs * (double)(p->head_dim + p->head_dim_v) / (double)row_tasks;
  const int64_t most = row_tasks / MANY_TASKS;
  return flops * (double)most <= GRAIN_FLOPS ? most : QKV_MAX(1, (int64_t)(GRAIN_FLOPS / flops));
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
  s->starts = NULL;
  s->order = NULL;
  s->grain = grain(g, s->row_tasks);
  s->tasks = (s->row_tasks + s->grain - 1) / s->grain;
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
  if (s->nodes > 1) {
    s->grain = 1;
    s->tasks = s->row_tasks * s->nodes;
  }
}

/* Whether all entries have the same number of query rows. */
static int is_even(const qkv__problem *p) { return !p->p.cu_seqlens_q && !p->p.q_length; }

void qkv__schedule_carve(const qkv__engine *g, int workers, qkv__carver *c, qkv__schedule *s) {
  s->starts = is_even(g->p) ? NULL : qkv__carve(c, g->p->p.batch + 1, sizeof *s->starts);
  s->order = workers > 1 && s->row_tasks <= INT32_MAX ? qkv__carve(c, s->row_tasks, sizeof *s->order) : NULL;
}

/* Keys that some row of the task may see, in whole blocks, times its rows. *looks is what is left of LOOKS. */
static float work_of(const qkv__engine *g, const qkv__schedule *s, const qkv__entry *e, int64_t kv_head, int64_t block, int64_t *looks) {
  const int64_t f0 = block * s->task_rows, f1 = QKV_MIN(f0 + s->task_rows, g->p->group * e->nq);
  int64_t row = 0, rows = e->nq, blocks = 0;
  if (f0 >= f1) return 0;
  if (f0 / e->nq == (f1 - 1) / e->nq) {
    row = f0 % e->nq;
    rows = f1 - f0;
  }
  const qkv__rows r = {g->p, e, kv_head * g->p->group + f0 / e->nq, row, rows};
  for (int64_t key = e->b0; *looks > 0 && (key = qkv__mask_next(&r, key, e->b1)) < e->b1; blocks++, --*looks)
    key = qkv__key_of_position(e, (qkv__position_of_key(e, key) / QKV_BLOCK + 1) * QKV_BLOCK);
  return (float)(f1 - f0) * (float)blocks;
}

static int above(qkv__cost a, qkv__cost b) { return a.work > b.work || (a.work == b.work && a.task > b.task); }

/* Heap sort, least work first: in place, and the same order everywhere. */
static void sift(qkv__cost *c, int64_t root, int64_t n) {
  for (int64_t child; (child = 2 * root + 1) < n; root = child) {
    if (child + 1 < n && above(c[child + 1], c[child])) child++;
    if (!above(c[child], c[root])) return;
    const qkv__cost t = c[root];
    c[root] = c[child];
    c[child] = t;
  }
}
static void sort(qkv__cost *c, int64_t n) {
  for (int64_t i = n / 2; i-- > 0;) sift(c, i, n);
  for (int64_t i = n - 1; i > 0; i--) {
    const qkv__cost t = c[0];
    c[0] = c[i];
    c[i] = t;
    sift(c, 0, i);
  }
}

void qkv__schedule_fill(const qkv__engine *g, qkv__schedule *s) {
  const int64_t heads = g->p->p.num_kv_heads;
  const int by_head = qkv__mask_by_head(&g->p->p);
  int64_t first = 0, looks = LOOKS;
  if (s->starts) s->starts[0] = 0;
  /* equal tasks need no order */
  if (s->nodes > 1 || s->grain > 1 || (is_even(g->p) && !g->p->p.mask_count && !g->p->p.kv_length && !g->p->p.kv_begin)) s->order = NULL;
  if (!s->starts && !s->order) return;
  for (int64_t b = 0; b < g->p->p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(g->p, b, &e);
    const int64_t blocks = tasks_of(&e, g->p->group, s->task_rows);
    if (s->starts) s->starts[b + 1] = first + blocks * heads;
    for (int64_t i = 0; s->order && i < blocks; i++)
      for (int64_t h = 0; h < heads; h++) {
        qkv__cost *c = &s->order[first + i * heads + h];
        c->task = (int32_t)(first + i * heads + h);
        c->work = h && !by_head ? c[-1].work : work_of(g, s, &e, h, i, &looks);
      }
    first += blocks * heads;
  }
  if (looks <= 0) s->order = NULL; /* looking for one must stay small beside the work */
  if (s->order) sort(s->order, s->row_tasks);
}

void qkv__schedule_task(const qkv__engine *g, const qkv__schedule *s, int64_t task, qkv__task *t) {
  int64_t r = s->row_tasks - 1 - task / s->nodes, n = 0;
  if (s->order) r = s->order[r].task;
  t->node = task % s->nodes;
  if (s->starts) {
    int64_t low = 0, high = g->p->p.batch; /* starts[low] <= r < starts[high] */
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (s->starts[middle] <= r) low = middle;
      else high = middle;
    }
    qkv__entry_of(g->p, low, &t->e);
    r -= s->starts[low];
  } else if (is_even(g->p)) {
    qkv__entry_of(g->p, 0, &t->e);
    n = tasks_of(&t->e, g->p->group, s->task_rows) * g->p->p.num_kv_heads;
    qkv__entry_of(g->p, r / n, &t->e);
    r %= n;
  } else
    for (int64_t b = 0;; b++) {
      qkv__entry_of(g->p, b, &t->e);
      n = tasks_of(&t->e, g->p->group, s->task_rows) * g->p->p.num_kv_heads;
      if (r < n) break;
      r -= n;
    }
  t->kv_head = r % g->p->p.num_kv_heads;
  r /= g->p->p.num_kv_heads;
  t->first = r == 0;
  t->f0 = r * s->task_rows;
  t->f1 = QKV_MIN(t->f0 + s->task_rows, g->p->group * t->e.nq);
}

#include "attention/state.h"

#include <string.h>

#include "base/cpu.h"
#include "base/fpstate.h"
#include "base/order1.h"
#include "base/run.h"
#include "reference/reference.h"
#include "schedule/schedule.h"

int qkv__engine_make(const qkv_context *c, const qkv__problem *p, qkv__engine *g) {
  g->p = p;
  const int fast = p->p.arithmetic == QKV_FAST && p->p.algorithm == QKV_FLASH && p->p.q.dtype == QKV_BF16 &&
                   p->p.k.dtype == QKV_BF16 && p->p.v.dtype == QKV_BF16 && p->p.dropout == 0;
  g->fast = NULL;
  g->k = qkv__kernel_of(p->f64, c->isa_cap, fast ? &g->fast : NULL, NULL);
  g->flags = c->flags;
  g->fuse = p->p.algorithm == QKV_FLASH && g->k && g->k->qk_exp &&
            ((qkv__cpu() & QKV__CPU_ADD_PIPES) || (c->flags & QKV_FORCE_FUSE));
  if (!g->k) return 0;
  g->w = g->k->lanes * g->k->max_nv;
  return 1;
}

/* The largest nodes that tile splits [first, last), ascending; returns their number and writes them if `to` is given. */
static int64_t tile(int64_t first, int64_t last, qkv_node *to) {
  int64_t n = 0;
  while (first < last) {
    int h = 0;
    while (!(first >> h & 1) && first + ((int64_t)2 << h) <= last) h++;
    if (to) {
      to[n].level = h;
      to[n].index = first >> h;
    }
    n++;
    first += (int64_t)1 << h;
  }
  return n;
}

static size_t node_values(const qkv__problem *p) { return (size_t)p->rows * (size_t)(p->p.head_dim_v + 2); }

qkv_status qkv__state_fits(const qkv__problem *p, const qkv_state *s, int64_t *nodes) {
  int64_t first, last;
  const qkv_status status = qkv__check_state(p, s);
  if (status != QKV_OK) return status;
  qkv__split_range(p, &first, &last);
  *nodes = tile(first, last, NULL);
  return *nodes > s->capacity ? QKV_STATE_FULL : QKV_OK;
}

void qkv__state_nodes(const qkv__problem *p, qkv_state *s) {
  int64_t first, last;
  qkv__split_range(p, &first, &last);
  s->count = tile(first, last, s->nodes);
}

qkv_status qkv_state_bytes(const qkv_problem *problem, int64_t capacity, int64_t *nodes, size_t *bytes) {
  qkv__problem p;
  qkv__fpstate fp;
  int64_t first, last, n;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check(problem, 0, &p, NULL, 0);
  qkv__fp_leave(&fp);
  if (s != QKV_OK) return s;
  if (capacity < 0) return QKV_BAD_STATE;
  qkv__split_range(&p, &first, &last);
  n = tile(first, last, NULL);
  if (capacity == 0) capacity = n;
  qkv__carver c = {NULL, 0, 0};
  int64_t values;
  qkv__carve(&c, capacity, sizeof(qkv_node));
  if (!qkv__mul(p.rows, p.p.head_dim_v + 2, &values) || !qkv__mul(values, capacity, &values)) return QKV_TOO_LARGE;
  qkv__carve(&c, values, p.f64 ? 8 : 4);
  if (c.overflow) return QKV_TOO_LARGE;
  if (nodes) *nodes = n;
  if (bytes) *bytes = c.used;
  return QKV_OK;
}

qkv_status qkv_state_init(const qkv_problem *problem, int64_t capacity, void *memory, size_t bytes, qkv_state *state) {
  qkv__problem p;
  size_t need;
  qkv__fpstate fp;
  if (!state) return QKV_BAD_POINTER;
  if (capacity < 0) return QKV_BAD_STATE;
  int64_t nodes;
  qkv_status s = qkv_state_bytes(problem, capacity, &nodes, &need);
  if (s != QKV_OK) return s;
  if (capacity == 0) capacity = nodes;
  qkv__fp_enter(&fp);
  s = qkv__check(problem, 0, &p, NULL, 0);
  qkv__fp_leave(&fp);
  if (need && (!memory || (uintptr_t)memory % 8)) return QKV_BAD_POINTER;
  if (bytes < need) return QKV_SCRATCH_TOO_SMALL;
  qkv__carver c = {memory, 0, 0};
  memset(state, 0, sizeof *state);
  state->size = sizeof *state;
  state->dtype = p.f64 ? QKV_F64 : QKV_F32;
  state->rows = p.rows;
  state->head_dim_v = p.p.head_dim_v;
  state->capacity = capacity;
  if (capacity) {
    state->nodes = qkv__carve(&c, capacity, sizeof(qkv_node));
    state->data = qkv__carve(&c, capacity * (int64_t)node_values(&p), p.f64 ? 8 : 4);
  }
  return s;
}

/* ---- Root and FINISH ---- */

typedef struct finish {
  const qkv__engine *g;
  const qkv_state *s;
  char *memory;
  size_t bytes;
  qkv__schedule plan;
} finish;

typedef struct finish_worker {
  qkv__panel panel;
  qkv__stage stage;
  qkv__tree tree;
} finish_worker;

static int64_t pending(int64_t nodes) { return QKV_MIN(nodes, QKV__TREE_DEPTH - 1) + 1; }

static void finish_carve(const qkv__engine *g, int64_t nodes, qkv__carver *c, finish_worker *w) {
  const size_t size = (size_t)g->k->real_bytes;
  qkv__panel_carve(g, c, &w->panel, 0);
  qkv__stage_carve(g, c, &w->stage);
  w->tree.spares = (int)pending(nodes);
  w->tree.depth = 0;
  for (int i = 0; i < w->tree.spares; i++) {
    w->tree.spare[i].O = qkv__carve(c, g->p->p.head_dim_v * g->w, size);
    w->tree.spare[i].m = qkv__carve(c, g->w, size);
    w->tree.spare[i].l = qkv__carve(c, g->w, size);
  }
}

size_t qkv__finish_worker_bytes(const qkv__engine *g, int64_t nodes) {
  qkv__carver c = {NULL, 0, 0};
  finish_worker w;
  finish_carve(g, nodes, &c, &w);
  return c.overflow ? SIZE_MAX / 2 : c.used;
}

static void finish_task(void *arg, int64_t task, int32_t worker) {
  const finish *f = arg;
  const qkv__engine *g = f->g;
  qkv__carver c = {f->memory + (size_t)worker * f->bytes, 0, 0};
  finish_worker w;
  qkv__task t;
  finish_carve(g, f->s->count, &c, &w);
  qkv__schedule_task(g, &f->plan, task, &t);
  if (t.first) qkv__store_dead_rows(g, &t.e, t.kv_head);
  if (t.f0 >= t.f1) return;
  qkv__panel_load(g, &t.e, t.kv_head, t.f0, t.f1 - t.f0, &w.panel, &w.stage);
  for (int64_t i = 0; i < f->s->count; i++) {
    qkv__tree_node n = qkv__tree_take(&w.tree);
    n.at = f->s->nodes[i];
    qkv__panel_from_state(g, &t.e, &w.panel, &n, f->s, i, &w.stage);
    qkv__tree_push(&w.tree, n, g->k, g->p->p.head_dim_v, w.panel.nv);
  }
  qkv__tree_root(&w.tree, g->k, g->p->p.head_dim_v, w.panel.nv);
  qkv__tree_node root = w.tree.depth ? w.tree.stack[0] : qkv__tree_take(&w.tree);
  if (!w.tree.depth) qkv__clear_node(g, &root, w.panel.w);
  qkv__panel_finish(g, &t.e, &w.panel, &root, &w.stage);
}

qkv_status qkv__finish_state(const qkv_context *c, const qkv__engine *g, const qkv_state *s, char *worker_memory,
                             size_t worker_bytes) {
  finish f = {g, s, worker_memory, worker_bytes, {0}};
  f.plan.panels = f.plan.nodes = 1;
  f.plan.task_rows = g->w;
  f.plan.row_tasks = f.plan.tasks = qkv__count_tasks(g, g->w);
  return qkv__run(c, finish_task, &f, f.plan.tasks);
}

static void reference_task(void *arg, int64_t task, int32_t worker) {
  const finish *f = arg;
  const qkv__problem *p = f->g->p;
  void *work = f->memory + (size_t)worker * f->bytes;
  qkv__entry e;
  int64_t h, i;
  qkv__row_of(p, task, &e, &h, &i);
  if (p->f64)
    qkv__reference_finish_f64(p, &e, h, i, f->s, task, work);
  else
    qkv__reference_finish_f32(p, &e, h, i, f->s, task, work);
}

qkv_status qkv_finish(const qkv_context *context, const qkv_problem *problem, const qkv_state *state) {
  qkv_context c;
  qkv__problem p;
  qkv__engine g;
  qkv__fpstate fp;
  qkv__memory m;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check_context(context, &c, NULL, 0);
  if (s == QKV_OK) s = qkv__check(problem, QKV__USES_OUT, &p, NULL, 0);
  if (s == QKV_OK) s = qkv__check_state(&p, state);
  if (s == QKV_OK && !qkv__engine_make(&c, &p, &g)) s = QKV_BAD_CONTEXT;
  if (s == QKV_OK) {
    const int reference = c.isa_cap && !strcmp(c.isa_cap, "reference");
    const size_t bytes = !reference ? qkv__finish_worker_bytes(&g, state->count)
                         : p.f64    ? qkv__reference_work_f64(&p)
                                    : qkv__reference_work_f32(&p);
    qkv__carver all = {NULL, 0, 0};
    qkv__carve(&all, c.num_workers, bytes);
    s = all.overflow ? QKV_TOO_LARGE : qkv__memory_take(&c, NULL, 0, all.used, &m);
    if (s == QKV_OK) {
      const finish f = {&g, state, m.base, bytes, {0}};
      if (reference)
        s = qkv__run(&c, reference_task, (void *)(uintptr_t)&f, p.rows);
      else
        s = qkv__finish_state(&c, &g, state, m.base, bytes);
      qkv__memory_release(&c, &m);
    }
  }
  qkv__fp_leave(&fp);
  return s;
}

/* ---- Merging states: row by row, in the merge kernel's lanes ---- */

typedef struct merging {
  const qkv__kernel *k;
  int64_t rows, dv;
  char *into, *from; /* node data */
  char *memory;
  size_t bytes;
} merging;

enum { MERGE_ROWS = 1024 };

/* A state's row is contiguous in O; a panel of one vector wants lanes across rows. Rows go through a transposed copy. */
static void merge_task(void *arg, int64_t task, int32_t worker) {
  const merging *g = arg;
  const qkv__kernel *k = g->k;
  const size_t size = (size_t)k->real_bytes;
  const int w = k->lanes * k->max_nv;
  qkv__carver c = {g->memory + (size_t)worker * g->bytes, 0, 0};
  void *O[2], *m[2], *l[2];
  for (int i = 0; i < 2; i++) {
    O[i] = qkv__carve(&c, g->dv * w, size);
    m[i] = qkv__carve(&c, w, size);
    l[i] = qkv__carve(&c, w, size);
  }
  const int64_t end = QKV_MIN(g->rows, (task + 1) * MERGE_ROWS);
  for (int64_t row = task * MERGE_ROWS; row < end; row += w) {
    const int64_t n = QKV_MIN(w, end - row);
    const int nv = (int)((n + k->lanes - 1) / k->lanes);
    char *side[2] = {g->into, g->from};
    for (int i = 0; i < 2; i++) {
      const char *M = side[i] + (size_t)(g->rows * g->dv) * size, *L = M + (size_t)g->rows * size;
      k->pack(O[i], side[i] + (size_t)(row * g->dv) * size, g->dv, n, g->dv, nv, 1);
      memset(l[i], 0, (size_t)w * size);
      memset(m[i], 0, (size_t)w * size);
      memcpy(m[i], M + (size_t)row * size, (size_t)n * size);
      memcpy(l[i], L + (size_t)row * size, (size_t)n * size);
    }
    k->merge(O[0], m[0], l[0], O[1], m[1], l[1], g->dv, nv);
    k->unpack(g->into + (size_t)(row * g->dv) * size, g->dv, O[0], n, g->dv, nv);
    memcpy(g->into + (size_t)(g->rows * g->dv + row) * size, m[0], (size_t)n * size);
    memcpy(g->into + (size_t)(g->rows * (g->dv + 1) + row) * size, l[0], (size_t)n * size);
  }
}

typedef struct merger {
  qkv_context c;
  merging job;
  qkv_state *s;
  size_t node_bytes;
} merger;

static char *data_of(const merger *m, const qkv_state *s, int64_t i) { return (char *)s->data + (size_t)i * m->node_bytes; }

static qkv_status merge_into(merger *m, int64_t slot, const char *from) {
  m->job.into = data_of(m, m->s, slot);
  m->job.from = (char *)(uintptr_t)from;
  return qkv__run(&m->c, merge_task, &m->job, (m->job.rows + MERGE_ROWS - 1) / MERGE_ROWS);
}

static void remove_slot(merger *m, int64_t i) {
  qkv_state *s = m->s;
  const size_t after = (size_t)(s->count - i - 1);
  memmove(&s->nodes[i], &s->nodes[i + 1], after * sizeof *s->nodes);
  memmove(data_of(m, s, i), data_of(m, s, i + 1), after * m->node_bytes);
  s->count--;
}

static int64_t begin_of(qkv_node n) { return n.index << n.level; }
static int64_t end_of(qkv_node n) { return (n.index + 1) << n.level; }

static int overlaps(const qkv_state *a, const qkv_state *b) {
  for (int64_t i = 0; i < a->count; i++)
    for (int64_t j = 0; j < b->count; j++)
      if (begin_of(a->nodes[i]) < end_of(b->nodes[j]) && begin_of(b->nodes[j]) < end_of(a->nodes[i])) return 1;
  return 0;
}

/* Merges the two neighbours with the lowest common ancestor until one node is left. */
static qkv_status to_root(merger *m) {
  qkv_state *s = m->s;
  qkv_status status = QKV_OK;
  while (s->count > 1 && status == QKV_OK) {
    int64_t best = 0;
    for (int64_t i = 1; i + 1 < s->count; i++)
      if (qkv__tree_ancestor(s->nodes[i], s->nodes[i + 1]) < qkv__tree_ancestor(s->nodes[best], s->nodes[best + 1]))
        best = i;
    const int level = qkv__tree_ancestor(s->nodes[best], s->nodes[best + 1]);
    status = merge_into(m, best, data_of(m, s, best + 1));
    s->nodes[best].index >>= level - s->nodes[best].level;
    s->nodes[best].level = level;
    remove_slot(m, best + 1);
  }
  return status;
}

/* Adds one node, then merges siblings as long as there are any. */
static qkv_status add_node(merger *m, qkv_node n, const char *data) {
  qkv_state *s = m->s;
  int64_t i = 0;
  while (i < s->count && begin_of(s->nodes[i]) < begin_of(n)) i++;
  memmove(&s->nodes[i + 1], &s->nodes[i], (size_t)(s->count - i) * sizeof *s->nodes);
  memmove(data_of(m, s, i + 1), data_of(m, s, i), (size_t)(s->count - i) * m->node_bytes);
  memcpy(data_of(m, s, i), data, m->node_bytes);
  s->nodes[i] = n;
  s->count++;
  for (;;) {
    const qkv_node now = s->nodes[i];
    int64_t left = now.index & 1 ? i - 1 : i;
    if (left < 0 || left + 1 >= s->count) return QKV_OK;
    const qkv_node a = s->nodes[left], b = s->nodes[left + 1];
    if (a.level != now.level || b.level != now.level || a.index >> 1 != now.index >> 1 || b.index >> 1 != now.index >> 1)
      return QKV_OK;
    qkv_status status = merge_into(m, left, data_of(m, s, left + 1));
    if (status != QKV_OK) return status;
    s->nodes[left].level = now.level + 1;
    s->nodes[left].index = now.index >> 1;
    remove_slot(m, left + 1);
    i = left;
  }
}

static qkv_status merge_states(merger *m, const qkv_state *from) {
  qkv_state *s = m->s;
  qkv_status status = QKV_OK;
  if (!overlaps(s, from)) {
    for (int64_t i = 0; i < from->count && status == QKV_OK; i++) status = add_node(m, from->nodes[i], data_of(m, from, i));
    return status;
  }
  /* two roots: from's, in the free room behind into's nodes */
  qkv_state right = *s;
  right.count = from->count;
  right.capacity = s->capacity - s->count;
  right.nodes = s->nodes + s->count;
  right.data = data_of(m, s, s->count);
  memcpy(right.nodes, from->nodes, (size_t)from->count * sizeof *right.nodes);
  memcpy(right.data, from->data, (size_t)from->count * m->node_bytes);
  m->s = &right;
  status = to_root(m);
  m->s = s;
  if (status == QKV_OK) status = to_root(m);
  if (status != QKV_OK) return status;
  status = merge_into(m, 0, right.data);
  while (begin_of(s->nodes[0]) > begin_of(right.nodes[0]) || end_of(s->nodes[0]) < end_of(right.nodes[0])) {
    s->nodes[0].level++;
    s->nodes[0].index >>= 1;
  }
  return status;
}

qkv_status qkv_merge(const qkv_context *context, qkv_state *into, const qkv_state *from) {
  merger m;
  qkv__memory memory;
  qkv__fpstate fp;
  qkv_status s = qkv__check_context(context, &m.c, NULL, 0);
  if (s == QKV_OK) s = qkv__check_state(NULL, into);
  if (s == QKV_OK) s = qkv__check_state(NULL, from);
  if (s != QKV_OK) return s;
  if (into->rows != from->rows || into->head_dim_v != from->head_dim_v || into->dtype != from->dtype) return QKV_BAD_STATE;
  if (from->count == 0) return QKV_OK;
  if (into == from || into->data == from->data) return QKV_BAD_OVERLAP;
  if (into->capacity - into->count < from->count) return QKV_STATE_FULL;
  m.job.k = qkv__kernel_of(into->dtype == QKV_F64, m.c.isa_cap, NULL, NULL);
  if (!m.job.k) return QKV_BAD_CONTEXT;
  m.s = into;
  m.job.rows = into->rows;
  m.job.dv = into->head_dim_v;
  const size_t size = (size_t)m.job.k->real_bytes;
  const int w = m.job.k->lanes * m.job.k->max_nv;
  m.node_bytes = (size_t)into->rows * (size_t)(into->head_dim_v + 2) * size;
  qkv__carver one = {NULL, 0, 0}, all = {NULL, 0, 0};
  for (int i = 0; i < 2; i++) {
    qkv__carve(&one, into->head_dim_v * w, size);
    qkv__carve(&one, w, size);
    qkv__carve(&one, w, size);
  }
  m.job.bytes = one.used;
  qkv__carve(&all, m.c.num_workers, one.used);
  s = qkv__memory_take(&m.c, NULL, 0, all.used, &memory);
  if (s != QKV_OK) return s;
  m.job.memory = memory.base;
  qkv__fp_enter(&fp);
  s = merge_states(&m, from);
  qkv__fp_leave(&fp);
  qkv__memory_release(&m.c, &memory);
  return s;
}

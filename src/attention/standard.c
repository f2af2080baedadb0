#include "attention/standard.h"

#include <string.h>

#include "base/order1.h"
#include "base/run.h"

typedef struct worker {
  qkv__panel panel;
  qkv__stage stage;
  qkv__tree_node node;
  void *K, *V, *one, *L, *z;
} worker;

static void carve(const qkv__engine *g, qkv__carver *c, worker *w) {
  const size_t size = (size_t)g->k->real_bytes;
  qkv__panel_carve(g, c, &w->panel, 1);
  qkv__stage_carve(g, c, &w->stage);
  w->node.O = qkv__carve(c, g->p->p.head_dim_v * g->w, size);
  w->K = qkv__carve(c, QKV_BLOCK * g->p->p.head_dim, size);
  w->V = qkv__carve(c, qkv__packed_values(g->p->p.head_dim_v), size);
  w->one = qkv__carve(c, g->w, size);
  w->L = qkv__carve(c, g->w, size);
  w->z = qkv__carve(c, g->w, size);
}

/* Tasks are panels: the schedule with one panel per task and all keys. */
static void schedule(const qkv__engine *g, qkv__schedule *s) {
  memset(s, 0, sizeof *s);
  s->panels = 1;
  s->task_rows = g->w;
  s->nodes = 1;
  s->row_tasks = qkv__count_tasks(g, s->task_rows);
  s->tasks = s->row_tasks;
}

size_t qkv__standard_layout(qkv__standard *s, int workers, void *memory) {
  const qkv__engine *g = &s->g;
  const size_t size = (size_t)g->k->real_bytes;
  qkv__carver one = {NULL, 0, 0}, c = {memory, 0, 0};
  qkv__schedule plan;
  worker w;
  int64_t n;
  carve(g, &one, &w);
  schedule(g, &plan);
  s->tasks = plan.tasks;
  s->keys = g->p->max_keys;
  s->worker_bytes = one.used;
  s->worker_memory = qkv__carve(&c, workers, one.used);
  s->sums = qkv__carve(&c, s->tasks, 2 * (size_t)g->w * size);
  if (!qkv__mul(s->tasks, s->keys, &n)) return SIZE_MAX;
  s->scores = qkv__carve(&c, n, (size_t)g->w * size);
  return c.overflow || one.overflow ? SIZE_MAX : c.used;
}

typedef struct block {
  int64_t key;
  int keys;
} block;

/* The block from `key` on. */
static block block_at(const qkv__entry *e, int64_t key) {
  const int64_t rest = QKV_BLOCK - qkv__position_of_key(e, key) % QKV_BLOCK;
  const block b = {key, (int)QKV_MIN(rest, e->b1 - key)};
  return b;
}

typedef struct place {
  worker w;
  qkv__task t;
  char *S; /* scores of the entry's first key */
  void *m, *l;
  size_t row; /* bytes of one key's scores */
} place;

static void enter(const qkv__standard *s, int64_t task, int32_t worker_index, int pass, place *at) {
  const qkv__engine *g = &s->g;
  const size_t size = (size_t)g->k->real_bytes;
  qkv__carver c = {s->worker_memory + (size_t)worker_index * s->worker_bytes, 0, 0};
  qkv__schedule plan;
  carve(g, &c, &at->w);
  memset(&plan, 0, sizeof plan);
  plan.panels = plan.nodes = 1;
  plan.task_rows = g->w;
  plan.row_tasks = plan.tasks = s->tasks;
  qkv__schedule_task(g, &plan, task, &at->t);
  at->S = s->scores + (size_t)task * (size_t)s->keys * (size_t)g->w * size;
  at->m = s->sums + (size_t)task * 2 * (size_t)g->w * size;
  at->l = (char *)at->m + (size_t)g->w * size;
  if (pass != 0) at->w.panel.Qt = NULL; /* only the scores need Q */
  if (at->t.f0 < at->t.f1)
    qkv__panel_load(g, &at->t.e, at->t.kv_head, at->t.f0, at->t.f1 - at->t.f0, &at->w.panel, &at->w.stage);
  at->row = (size_t)at->w.panel.w * size;
  at->w.node.m = at->m;
  at->w.node.l = at->l;
}

static void whole(int keys, qkv__runs *runs) {
  runs->count = 1;
  runs->full = keys == QKV_BLOCK;
  runs->run[0].from = 0;
  runs->run[0].to = keys;
}

/* Visibility of a block, all of which is computed. */
static int visible_bits(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, block b, uint64_t *bits) {
  qkv__runs runs;
  const int32_t seen = qkv__panel_visible(g, e, panel, b.key, b.keys, bits, &runs);
  if (seen == QKV_TILE_NONE) memset(bits, 0, QKV_BLOCK * sizeof *bits);
  return seen != QKV_TILE_ALL;
}

static void scores_task(void *arg, int64_t task, int32_t worker_index) {
  const qkv__standard *s = arg;
  const qkv__engine *g = &s->g;
  place at;
  enter(s, task, worker_index, 0, &at);
  if (at.t.f0 >= at.t.f1) return;
  const qkv__entry *e = &at.t.e;
  const qkv__panel *panel = &at.w.panel;
  qkv__clear_sums(g, &at.w.node, panel->w);
  for (int64_t key = e->b0; key < e->b1;) {
    const block b = block_at(e, key);
    char *S = at.S + (size_t)(key - e->b0) * at.row;
    const void *K;
    const int64_t ldk = qkv__block_keys(g, e, at.t.kv_head, key, b.keys, at.w.K, &K);
    uint64_t bits[QKV_BLOCK];
    qkv__runs runs;
    qkv__adjust a;
    whole(b.keys, &runs);
    const int partial = visible_bits(g, e, panel, b, bits);
    const int adjusts = qkv__panel_adjust(g, e, panel, key, b.keys, partial ? bits : NULL, &at.w.stage, &a);
    g->k->qk(panel->Qt, g->p->p.head_dim, K, ldk, &runs, S, at.m, adjusts ? NULL : at.m, panel->nv);
    if (adjusts) g->k->adjust(S, &runs, &a, at.m, at.m, panel->nv);
    key += b.keys;
  }
}

static void softmax_task(void *arg, int64_t task, int32_t worker_index) {
  const qkv__standard *s = arg;
  const qkv__engine *g = &s->g;
  place at;
  enter(s, task, worker_index, 1, &at);
  if (at.t.f0 >= at.t.f1) return;
  const qkv__entry *e = &at.t.e;
  const int nv = at.w.panel.nv;
  qkv__fill(g, at.w.one, at.w.panel.w, 1);
  g->k->rescale(at.m, at.m, at.w.z, at.w.L, nv); /* for z */
  for (int64_t key = e->b0; key < e->b1;) {
    const block b = block_at(e, key);
    qkv__runs runs;
    whole(b.keys, &runs);
    g->k->exp(at.S + (size_t)(key - e->b0) * at.row, &runs, at.w.z, at.w.L, nv);
    g->k->sum(at.l, at.w.one, at.w.L, nv);
    key += b.keys;
  }
}

static void values_task(void *arg, int64_t task, int32_t worker_index) {
  const qkv__standard *s = arg;
  const qkv__engine *g = &s->g;
  const qkv_problem *p = &g->p->p;
  place at;
  enter(s, task, worker_index, 2, &at);
  const qkv__entry *e = &at.t.e;
  if (at.t.first) qkv__store_dead_rows(g, e, at.t.kv_head);
  if (at.t.f0 >= at.t.f1) return;
  const qkv__panel *panel = &at.w.panel;
  qkv__fill(g, at.w.one, panel->w, 1);
  if (e->b0 == e->b1) qkv__clear_node(g, &at.w.node, panel->w);
  for (int64_t key = e->b0; key < e->b1;) {
    const block b = block_at(e, key);
    qkv__values V;
    qkv__block_values(g, e, at.t.kv_head, key, b.keys, 1, at.w.V, &V);
    uint64_t bits[QKV_BLOCK];
    qkv__runs runs;
    whole(b.keys, &runs);
    int selecting = 0;
    if ((p->mask_count || p->bias.data || (g->flags & QKV_FORCE_SELECT)) &&
        ((g->flags & QKV_FORCE_SELECT) || !qkv__values_finite(g, &V, b.keys))) {
      selecting = 1;
      if (!visible_bits(g, e, panel, b, bits)) qkv__panel_all_bits(panel, b.keys, bits);
      if (p->bias.data) {
        qkv__adjust a;
        qkv__panel_adjust(g, e, panel, key, b.keys, bits, &at.w.stage, &a);
        qkv__panel_hide(g, panel, &at.w.stage, b.keys, bits);
      }
    }
    char *S = at.S + (size_t)(key - e->b0) * at.row;
    if (p->dropout > 0) qkv__panel_drop(g, e, panel, key, &runs, S);
    g->k->pv(S, V.rows, V.ld, V.strip, p->head_dim_v, &runs, selecting ? bits : NULL,
             at.w.node.O, key == e->b0 ? NULL : at.w.one, panel->nv);
    key += b.keys;
  }
  qkv__panel_finish(g, e, panel, &at.w.node, &at.w.stage);
}

qkv_status qkv__standard_run(const qkv_context *c, qkv__standard *s) {
  qkv_status status = qkv__run(c, scores_task, s, s->tasks);
  if (status == QKV_OK) status = qkv__run(c, softmax_task, s, s->tasks);
  if (status == QKV_OK) status = qkv__run(c, values_task, s, s->tasks);
  return status;
}

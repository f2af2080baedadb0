/* The public calls that attend: check, lay out, run. */
#include <string.h>

#include "attention/flash.h"
#include "attention/standard.h"
#include "attention/state.h"
#include "base/fpstate.h"
#include "base/order1.h"
#include "base/run.h"
#include "reference/reference.h"

/* A checked call. */
typedef struct call {
  qkv__problem p;
  qkv_context c;
  int reference; /* the scalar text does it */
  qkv__flash flash;
  qkv__standard standard;
  qkv_state state; /* of a divided call, in scratch */
  size_t bytes;    /* of scratch, aligned */
  char *reference_memory, *finish_memory;
  size_t reference_bytes, finish_bytes;
} call;

static qkv_status prepare(const qkv_context *context, const qkv_problem *problem, int uses, call *k) {
  qkv_status s = qkv__check_context(context, &k->c, NULL, 0);
  if (s == QKV_OK) s = qkv__check(problem, uses, &k->p, NULL, 0);
  if (s != QKV_OK) return s;
  return qkv__engine_make(&k->c, &k->p, &k->flash.g) ? QKV_OK : QKV_BAD_CONTEXT;
}

/* Memory of a call that writes `state` with `nodes` nodes (or, with state NULL, out). With memory NULL only adds up. */
static qkv_status layout(call *k, const qkv_state *state, int64_t nodes, void *memory) {
  qkv__carver c = {memory, 0, 0};
  const int workers = k->c.num_workers;
  const qkv__engine *g = &k->flash.g;
  k->reference = k->c.isa_cap && !strcmp(k->c.isa_cap, "reference");
  if (k->reference) {
    k->reference_bytes = k->p.f64 ? qkv__reference_work_f64(&k->p) : qkv__reference_work_f32(&k->p);
    k->reference_memory = qkv__carve(&c, workers, (k->reference_bytes + 63) / 64 * 64);
    k->reference_bytes = (k->reference_bytes + 63) / 64 * 64;
  } else if (k->p.p.algorithm == QKV_STANDARD && !state) {
    k->standard.g = *g;
    c.used = qkv__standard_layout(&k->standard, workers, memory);
    if (c.used == SIZE_MAX) return QKV_TOO_LARGE;
  } else {
    qkv__schedule_make(g, 0, &k->flash.s);
    if (state) { /* every node of the state is a task of its own */
      k->flash.s.nodes = QKV_MAX(nodes, 1);
      k->flash.s.grain = 1;
      k->flash.s.tasks = k->flash.s.row_tasks * nodes;
      k->flash.state = state;
    } else if (k->flash.s.max_nodes) {
      k->state.nodes = qkv__carve(&c, k->flash.s.max_nodes, sizeof(qkv_node));
      k->state.data = qkv__carve(&c, k->flash.s.node_rows * (k->p.p.head_dim_v + 2), (size_t)g->k->real_bytes);
      k->state.size = sizeof k->state;
      k->state.dtype = k->p.f64 ? QKV_F64 : QKV_F32;
      k->state.rows = k->p.rows;
      k->state.head_dim_v = k->p.p.head_dim_v;
      k->state.count = k->state.capacity = k->flash.s.nodes;
      k->finish_bytes = qkv__finish_worker_bytes(g, k->flash.s.max_nodes);
      k->finish_memory = qkv__carve(&c, workers, k->finish_bytes);
      k->flash.state = k->flash.s.nodes > 1 ? &k->state : NULL;
    } else
      k->flash.state = NULL;
    qkv__schedule_carve(g, workers, &c, &k->flash.s);
    k->flash.worker_bytes = qkv__flash_worker_bytes(g, &k->flash.s);
    if (k->flash.worker_bytes == SIZE_MAX) return QKV_TOO_LARGE;
    k->flash.worker_memory = qkv__carve(&c, workers, k->flash.worker_bytes);
  }
  k->bytes = c.used;
  return c.overflow || c.used > SIZE_MAX / 2 ? QKV_TOO_LARGE : QKV_OK;
}

/* ---- The reference as an engine: one task per row ---- */

typedef struct scalar {
  call *k;
  const qkv_state *state; /* to fill in, or NULL */
} scalar;

static void reference_task(void *arg, int64_t task, int32_t worker) {
  const scalar *s = arg;
  const qkv__problem *p = &s->k->p;
  void *work = s->k->reference_memory + (size_t)worker * s->k->reference_bytes;
  qkv__entry e;
  int64_t h, i;
  qkv__row_of(p, task, &e, &h, &i);
  if (!s->state) {
    if (p->f64)
      qkv__reference_row_f64(p, &e, h, i, work);
    else
      qkv__reference_row_f32(p, &e, h, i, work);
    return;
  }
  const int64_t dv = p->p.head_dim_v, rows = s->state->rows;
  for (int64_t n = 0; n < s->state->count; n++) {
    if (p->f64) {
      double *data = (double *)s->state->data + n * rows * (dv + 2);
      qkv__reference_node_f64(p, &e, h, i, s->state->nodes[n], data + task * dv, data + rows * dv + task,
                              data + rows * (dv + 1) + task, work);
    } else {
      float *data = (float *)s->state->data + n * rows * (dv + 2);
      qkv__reference_node_f32(p, &e, h, i, s->state->nodes[n], data + task * dv, data + rows * dv + task,
                              data + rows * (dv + 1) + task, work);
    }
  }
}

static qkv_status run(call *k, qkv_state *state) {
  scalar s = {k, state};
  if (k->reference) return qkv__run(&k->c, reference_task, &s, k->p.rows);
  if (k->p.p.algorithm == QKV_STANDARD && !state) return qkv__standard_run(&k->c, &k->standard);
  if (!state && k->flash.state)
    for (int64_t n = 0; n < k->state.count; n++) {
      k->state.nodes[n].level = k->flash.s.level;
      k->state.nodes[n].index = k->flash.s.first_node + n;
    }
  qkv__schedule_fill(&k->flash.g, &k->flash.s);
  qkv_status r = qkv__run(&k->c, qkv__flash_task, &k->flash, k->flash.s.tasks);
  if (r == QKV_OK && !state && k->flash.state)
    r = qkv__finish_state(&k->c, &k->flash.g, &k->state, k->finish_memory, k->finish_bytes);
  return r;
}

static qkv_status attend(const qkv_context *context, const qkv_problem *problem, qkv_state *state, void *scratch,
                         size_t bytes) {
  call k;
  qkv__fpstate fp;
  qkv__memory m;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, problem, QKV__USES_QK | QKV__USES_V | (state ? 0 : QKV__USES_OUT), &k);
  int64_t nodes = 0;
  if (s == QKV_OK && state && k.p.p.algorithm != QKV_FLASH) s = QKV_UNSUPPORTED;
  if (s == QKV_OK && state) s = qkv__state_fits(&k.p, state, &nodes);
  if (s == QKV_OK) s = layout(&k, state, nodes, NULL);
  if (s == QKV_OK) s = qkv__memory_take(&k.c, scratch, bytes, k.bytes, &m);
  if (s == QKV_OK) {
    if (state) qkv__state_nodes(&k.p, state);
    s = layout(&k, state, nodes, m.base);
    if (s == QKV_OK) s = run(&k, state);
    qkv__memory_release(&k.c, &m);
  }
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_forward(const qkv_context *context, const qkv_problem *problem, void *scratch, size_t bytes) {
  return attend(context, problem, NULL, scratch, bytes);
}

qkv_status qkv_partial(const qkv_context *context, const qkv_problem *problem, qkv_state *state, void *scratch,
                       size_t bytes) {
  return state ? attend(context, problem, state, scratch, bytes) : QKV_BAD_POINTER;
}

qkv_status qkv_scratch(const qkv_context *context, const qkv_problem *problem, size_t *bytes) {
  call k;
  qkv__fpstate fp;
  if (!bytes) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, problem, 0, &k);
  if (s == QKV_OK) s = layout(&k, NULL, 0, NULL);
  if (s == QKV_OK) *bytes = k.bytes + QKV__MEMORY_SLACK;
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_check(const qkv_problem *problem, char *text, size_t bytes) {
  qkv__problem p;
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  const qkv_status s = qkv__check(problem, QKV__USES_QK | QKV__USES_V | QKV__USES_OUT, &p, text, bytes);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_visible(const qkv_problem *problem, const qkv_tile *tile, uint64_t *bits, int32_t *answer) {
  qkv__problem p;
  qkv__fpstate fp;
  qkv__entry e;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check(problem, 0, &p, NULL, 0);
  qkv__fp_leave(&fp);
  if (s != QKV_OK) return s;
  if (!tile || !bits || !answer) return QKV_BAD_POINTER;
  if (tile->batch < 0 || tile->batch >= p.p.batch || tile->head < 0 || tile->head >= p.p.num_heads) return QKV_BAD_REGION;
  qkv__entry_of(&p, tile->batch, &e);
  if (tile->rows < 1 || tile->rows > 64 || tile->keys < 1 || tile->keys > 64) return QKV_BAD_REGION;
  if (tile->row < 0 || tile->row > e.rows - tile->rows || tile->key < 0 || tile->key > p.max_keys - tile->keys)
    return QKV_BAD_REGION;
  /* the part that exists */
  const int64_t rows = QKV_MIN(tile->rows, e.nq - tile->row), from = QKV_MAX(tile->key, e.b0),
                to = QKV_MIN(tile->key + tile->keys, e.b1);
  const uint64_t full = tile->rows == 64 ? ~(uint64_t)0 : ((uint64_t)1 << tile->rows) - 1;
  memset(bits, 0, (size_t)tile->keys * sizeof *bits);
  *answer = QKV_TILE_NONE;
  if (rows <= 0 || from >= to) return QKV_OK;
  const qkv__rows r = {&p, &e, tile->head, tile->row, rows};
  const int32_t a = qkv__mask_tile(&r, from, to - from, bits + (from - tile->key));
  uint64_t any = 0, all = full;
  for (int64_t k = 0; k < tile->keys; k++) {
    const int in = tile->key + k >= from && tile->key + k < to;
    if (!in || a == QKV_TILE_NONE)
      bits[k] = 0;
    else
      bits[k] =
          (a == QKV_TILE_ALL ? ~(uint64_t)0 : bits[k]) & full & (rows >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << rows) - 1);
    any |= bits[k];
    all &= bits[k];
  }
  *answer = !any ? QKV_TILE_NONE : all == full ? QKV_TILE_ALL : QKV_TILE_SOME;
  return QKV_OK;
}

/* qkv_describe: the schedule and the mask in numbers. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "attention/state.h"
#include "base/fpstate.h"
#include "base/order1.h"
#include "base/run.h"
#include "schedule/schedule.h"

typedef struct writer {
  char *text;
  size_t bytes, used;
} writer;

static void line(writer *w, const char *format, ...) QKV_FORMAT(2, 3);
static void line(writer *w, const char *format, ...) {
  va_list a;
  const size_t rest = w->used < w->bytes ? w->bytes - w->used : 0;
  va_start(a, format);
  const int n = vsnprintf(w->text ? w->text + (rest ? w->used : 0) : NULL, w->text ? rest : 0, format, a);
  va_end(a);
  if (n > 0) w->used += (size_t)n;
}

typedef struct numbers {
  double all, visible, computed; /* pairs */
  double full, partial, skipped; /* tiles of 64 x 64 */
} numbers;

/* Visible pairs and tiles of one head of an entry. */
static void count_head(const qkv__problem *p, const qkv__entry *e, int64_t head, double times, numbers *n) {
  const double keys = (double)(e->b1 - e->b0);
  n->all += times * (double)e->nq * keys;
  if (e->b0 >= e->b1) return;
  for (int64_t row = 0; row < e->nq; row += 64) {
    const qkv__rows r = {p, e, head, row, QKV_MIN(64, e->nq - row)};
    const int64_t first = e->position_k / 64, last = (e->position_k + e->b1 - e->b0 - 1) / 64;
    double seen = 0, blocks = (double)(last - first + 1);
    for (int64_t key = e->b0; key < e->b1;) {
      uint64_t bits[64];
      key = qkv__mask_next(&r, key, e->b1);
      if (key >= e->b1) break;
      const int64_t position = qkv__position_of_key(e, key) / 64 * 64;
      key = QKV_MAX(e->b0, qkv__key_of_position(e, position));
      const int64_t end = QKV_MIN(e->b1, qkv__key_of_position(e, position + 64));
      const int32_t a = qkv__mask_tile(&r, key, end - key, bits);
      if (a != QKV_TILE_NONE) seen++;
      if (a == QKV_TILE_ALL) {
        n->full += times;
        n->visible += times * (double)(r.rows * (end - key));
      } else if (a == QKV_TILE_SOME) {
        const uint64_t rows = r.rows == 64 ? ~(uint64_t)0 : ((uint64_t)1 << r.rows) - 1;
        int64_t sum = 0;
        n->partial += times;
        for (int64_t k = 0; k < end - key; k++) sum += QKV_POPCOUNT64(bits[k] & rows);
        n->visible += times * (double)sum;
      }
      key = end;
    }
    n->skipped += times * (blocks - seen);
  }
}

/* Pairs that a task computes, dead lanes included. */
static double task_cost(const qkv__engine *g, const qkv__task *t, int64_t begin, int64_t end, qkv__panel *panel) {
  const qkv__entry *e = &t->e;
  double cost = 0;
  for (int64_t f = t->f0; f < t->f1; f += g->w) {
    const int64_t n = QKV_MIN(g->w, t->f1 - f);
    qkv__panel_load(g, e, t->kv_head, f, n, panel, NULL);
    for (int64_t key = begin; key < end;) {
      uint64_t bits[64];
      qkv__runs runs;
      key = qkv__panel_next(g, e, panel, key, end);
      if (key >= end) break;
      const int64_t position = qkv__position_of_key(e, key) / 64 * 64;
      key = QKV_MAX(begin, qkv__key_of_position(e, position));
      const int64_t to = QKV_MIN(end, qkv__key_of_position(e, position + 64));
      if (qkv__panel_visible(g, e, panel, key, (int)(to - key), bits, &runs) != QKV_TILE_NONE)
        for (int r = 0; r < runs.count; r++) cost += (double)(runs.run[r].to - runs.run[r].from) * panel->w;
      key = to;
    }
  }
  return cost;
}

qkv_status qkv_describe(const qkv_context *context, const qkv_problem *problem, char *text, size_t bytes) {
  enum { MAX_WORKERS = 1024 };
  qkv_context c;
  qkv__problem p;
  qkv__engine g;
  qkv__fpstate fp;
  const char *reason = "";
  size_t scratch = 0;
  writer w = {text, bytes, 0};
  if (!text && bytes) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check_context(context, &c, NULL, 0);
  if (s == QKV_OK) s = qkv__check(problem, 0, &p, NULL, 0);
  if (s == QKV_OK && !qkv__engine_make(&c, &p, &g)) s = QKV_BAD_CONTEXT;
  if (s == QKV_OK) s = qkv_scratch(&c, problem, &scratch);
  if (s != QKV_OK) {
    qkv__fp_leave(&fp);
    return s;
  }
  const int reference = c.isa_cap && !strcmp(c.isa_cap, "reference");
  const int standard = p.p.algorithm == QKV_STANDARD;
  qkv__kernel_of(p.f64, c.isa_cap, NULL, &reason);
  qkv__schedule plan;
  qkv__schedule_make(&g, standard, &plan);

  qkv__memory memory;
  qkv__carver room = {NULL, 0, 0};
  qkv__schedule_carve(&g, c.num_workers, &room, &plan);
  s = room.overflow ? QKV_TOO_LARGE : qkv__memory_take(&c, NULL, 0, room.used, &memory);
  if (s != QKV_OK) {
    qkv__fp_leave(&fp);
    return s;
  }
  room.base = memory.base;
  room.used = 0;
  qkv__schedule_carve(&g, c.num_workers, &room, &plan);
  if (!standard && room.base) qkv__schedule_fill(&g, &plan);

  numbers n = {0};
  const int by_head = qkv__mask_by_head(&p.p);
  for (int64_t b = 0; b < p.p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(&p, b, &e);
    if (by_head)
      for (int64_t h = 0; h < p.p.num_heads; h++) count_head(&p, &e, h, 1, &n);
    else if (p.p.num_heads)
      count_head(&p, &e, 0, (double)p.p.num_heads, &n);
  }

  /* the tasks in their order, each to the worker that is free first */
  double load[MAX_WORKERS] = {0}, sum = 0, max = 0;
  int least = 0;
  const int workers = QKV_MIN(c.num_workers, MAX_WORKERS);
  qkv__segment segment[64];
  double position[64];
  double spare[2][64];
  qkv__panel panel = {0};
  panel.segment = segment;
  panel.position = position;
  panel.slope2 = p.p.alibi_slopes.data ? spare[0] : NULL;
  panel.sink2 = NULL;
  qkv__task before = {0};
  double cost = 0;
  if (!standard)
    for (int64_t i = 0; i < plan.row_tasks * plan.nodes; i++) {
      qkv__task t;
      qkv__schedule_task(&g, &plan, i, &t);
      int64_t begin = t.e.b0, end = t.e.b1;
      if (plan.nodes > 1) {
        const int64_t index = plan.first_node + t.node;
        begin = QKV_MAX(begin, qkv__key_of_position(&t.e, (index << plan.level) * QKV_SPLIT));
        end = QKV_MIN(end, qkv__key_of_position(&t.e, ((index + 1) << plan.level) * QKV_SPLIT));
      }
      /* the heads of a block of rows come one after another */
      if (by_head || i == 0 || t.e.b != before.e.b || t.f0 != before.f0 || t.node != before.node)
        cost = task_cost(&g, &t, begin, end, &panel);
      before = t;
      if (i % plan.grain == 0) least = 0;
      for (int k = 1; i % plan.grain == 0 && k < workers; k++)
        if (load[k] < load[least]) least = k;
      load[least] += cost;
      sum += cost;
      if (load[least] > max) max = load[least];
    }
  qkv__memory_release(&c, &memory);
  n.computed = standard ? n.all : sum;

  static const char *const aligns[] = {"end", "start", "explicit"};
  line(&w, "algorithm: %s\n", standard ? "standard" : "flash");
  line(&w, "arithmetic: %s\n", g.fast ? "fast bf16" : p.f64 ? "f64" : "f32");
  line(&w, "order: %d\n", standard || g.fast ? 0 : QKV_ORDER);
  line(&w, "isa: %s\n", reference ? "reference" : g.fast ? g.fast->isa : g.k->isa);
  line(&w, "isa_reason: %s\n", reason);
  line(&w, "align: %s\n", aligns[p.p.align]);
  line(&w, "workers: %d\n", (int)c.num_workers);
  line(&w, "tasks: %" PRId64 "\n", reference ? p.rows : standard ? qkv__count_tasks(&g, g.w) : plan.tasks);
  line(&w, "rows_per_task: %" PRId64 "\n", reference ? 1 : standard ? g.w : plan.task_rows);
  line(&w, "key_parts: %" PRId64 "\n", reference || standard ? 1 : plan.nodes);
  line(&w, "scratch_bytes: %zu\n", scratch);
  line(&w, "pairs_all: %.0f\n", n.all);
  line(&w, "pairs_visible: %.0f\n", n.visible);
  line(&w, "pairs_computed: %.0f\n", n.computed);
  line(&w, "tiles_full: %.0f\n", n.full);
  line(&w, "tiles_partial: %.0f\n", n.partial);
  line(&w, "tiles_skipped: %.0f\n", n.skipped);
  /* without the locale's decimal sign */
  const int balance = (int)((max > 0 ? sum / max / workers : 1.0) * 10000 + 0.5);
  line(&w, "balance: %d.%04d\n", balance / 10000, balance % 10000);
  qkv__fp_leave(&fp);
  return QKV_OK;
}

/* qkv bench --suite: the rows of docs/PERFORMANCE.md, each measured beside the peak of this machine and beside what it is
 * compared with, and judged by the goal for this kind of processor. */
#include "bench_suite.h"

#include <ctype.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "commit.h"
#include "machine.h"

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

typedef struct {
  double must, goal;
} target;
#define NO_TARGET ((target){(double)NAN, (double)NAN})

/* A cell of the suite. isa NULL: the best. */
static int add_cell(suite *s, int group, int64_t rows, int64_t keys, int64_t heads, int64_t dim, int32_t dtype,
                    int32_t arithmetic, const char *mask, const char *isa, int threads) {
  series *c = &s->cell[s->cells];
  if (s->cells == SUITE_CELLS) abort();
  memset(c, 0, sizeof *c);
  c->group = group;
  c->b.o.seed = s->seed;
  cell *x = &c->r.c;
  x->batch = 1;
  x->seqlen_q = rows;
  x->seqlen_kv = keys;
  x->num_heads = x->num_kv_heads = heads;
  x->head_dim = x->head_dim_v = dim;
  x->dtype = dtype;
  x->algorithm = QKV_FLASH;
  x->arithmetic = arithmetic;
  x->threads = threads;
  x->mask = mask;
  bench_resolve_isa(isa, x, c->r.note, sizeof c->r.note);
  if (c->r.note[0]) c->r.outcome = SKIPPED;
  return s->cells++;
}

/* The backward pass of such a cell, of n rows and keys. */
static int add_backward(suite *s, int group, int64_t n, int64_t heads, int64_t dim, int32_t dtype, int32_t arithmetic,
                        const char *mask, int threads) {
  int i = add_cell(s, group, n, n, heads, dim, dtype, arithmetic, mask, NULL, threads);
  result *r = &s->cell[i].r;
  r->c.backward = 1;
  r->note[0] = 0;
  bench_resolve_isa(NULL, &r->c, r->note, sizeof r->note);
  r->outcome = r->note[0] ? SKIPPED : PLANNED;
  return i;
}

static int end_group(suite *s) {
  if (++s->groups >= SUITE_GROUPS) abort();
  return s->groups - 1;
}

static row *add_row(suite *s, int measure, int of, int beside, int64_t dim, target t, const char *name) {
  row *r = &s->row[s->rows++];
  if (s->rows > SUITE_ROWS) abort();
  memset(r, 0, sizeof *r);
  snprintf(r->name, sizeof r->name, "%s", name);
  r->measure = measure;
  r->of = of;
  r->beside = beside;
  r->dim = dim;
  r->must = t.must;
  r->goal = t.goal;
  r->group = of >= 0 ? s->cell[of].group : s->groups;
  r->median = r->best = (double)NAN;
  return r;
}

/* Rows whose goals are for processors of AMD and for AVX2; `other` has few. */
static target of_kind(const suite *s, double must, double goal) {
  return s->kind == MACHINE_OTHER ? NO_TARGET : (target){must, goal};
}

static void plan_forward(suite *s, int64_t d) {
  const int wide = d == 128, group = s->groups;
  const target two = wide ? (target){89, 95} : (target){87, 92}, one = wide ? (target){93, 97} : (target){90, 94};
  const target avx2 = wide ? (target){88, 93} : (target){85, 90}, floor = {75, (double)NAN};
  const int64_t n = 4096;
  int f = add_cell(s, group, n, n, 1, d, QKV_F32, QKV_CANONICAL, "none", NULL, 1), x2 = -1;
  const int best_is_avx2 = strcmp(s->cell[f].r.c.isa, "avx2") == 0;
  if (machine_peak_gflops(QKV_F32, "avx2") > 0) {
    x2 = best_is_avx2 ? f : add_cell(s, group, n, n, 1, d, QKV_F32, QKV_CANONICAL, "none", "avx2", 1);
  }
  add_row(s, SHARE, s->kind == MACHINE_AVX512_TWO ? f : -1, -1, d, two, "f32, AVX-512 with two FMA a cycle (Zen 5)");
  add_row(s, SHARE, s->kind == MACHINE_AVX512_ONE ? f : -1, -1, d, one, "f32, AVX-512 with one FMA a cycle (Zen 4)");
  if (s->kind == MACHINE_OTHER && !best_is_avx2) add_row(s, SHARE, f, -1, d, floor, "f32, best instruction set");
  add_row(s, SHARE, x2, -1, d, avx2, "f32, AVX2");

  const target causal = s->kind == MACHINE_OTHER ? (target){6, (double)NAN} : (target){4, 2};
  add_row(s, POINTS_LESS, add_cell(s, group, n, n, 1, d, QKV_F32, QKV_CANONICAL, "causal", NULL, 1), f, d, causal,
          "f32 causal, n = 4096");
  add_row(s, POINTS_LESS, add_cell(s, group, 1024, 1024, 2, d, QKV_F32, QKV_CANONICAL, "causal", NULL, 1), f, d, causal,
          "f32 causal, n = 1024");
  add_row(s, RATE, add_cell(s, group, n, n, 1, d, QKV_F16, QKV_CANONICAL, "none", NULL, 1), f, d, of_kind(s, 95, 98),
          "f16 storage, of f32's rate");
  add_row(s, RATE, add_cell(s, group, n, n, 1, d, QKV_BF16, QKV_CANONICAL, "none", NULL, 1), f, d, of_kind(s, 95, 98),
          "bf16 storage, of f32's rate");
  const target dot = wide ? (target){86, 92} : (target){82, 88};
  add_row(s, SHARE, add_cell(s, group, n, n, 1, d, QKV_BF16, QKV_FAST, "none", "avx512_bf16", 1), -1, d, dot,
          "bf16 fast, by dot products (AVX512-BF16)");
  add_row(s, SHARE, add_cell(s, group, n, n, 1, d, QKV_BF16, QKV_FAST, "none", "amx", 1), -1, d, NO_TARGET,
          "bf16 fast, by tiles (AMX)");
  add_row(s, SHARE, add_cell(s, group, 16, n, 1, d, QKV_F32, QKV_CANONICAL, "none", NULL, 1), -1, d,
          of_kind(s, wide ? 65 : 60, (double)NAN), "f32, 16 queries x 4096 keys");
  end_group(s);
}

/* The rate is stated for Zen 5; other processors have the floor that f64 has everywhere. */
static void plan_backward(suite *s, int64_t d) {
  const int group = s->groups;
  const int64_t n = 4096;
  const target floor = {70, (double)NAN};
  const target rate = s->kind != MACHINE_AVX512_TWO ? floor : d == 128 ? (target){89, 94} : (target){88, 93};
  const target causal = {5, (double)NAN}, shorter = {6, (double)NAN}, half = {90, (double)NAN}, fast = {1.5, (double)NAN};
  int f = add_backward(s, group, n, 1, d, QKV_F32, QKV_CANONICAL, "none", 1);
  add_row(s, SHARE, f, -1, d, rate, "f32 backward");
  add_row(s, POINTS_LESS, add_backward(s, group, n, 1, d, QKV_F32, QKV_CANONICAL, "causal", 1), f, d, causal,
          "f32 backward, causal");
  add_row(s, POINTS_LESS, add_backward(s, group, 1024, 2, d, QKV_F32, QKV_CANONICAL, "none", 1), f, d, shorter,
          "f32 backward, n = 1024");
  add_row(s, RATE, add_backward(s, group, n, 1, d, QKV_F16, QKV_CANONICAL, "none", 1), f, d, half,
          "f16 backward, of f32's rate");
  add_row(s, RATE, add_backward(s, group, n, 1, d, QKV_BF16, QKV_CANONICAL, "none", 1), f, d, half,
          "bf16 backward, of f32's rate");
  add_row(s, FASTER, add_backward(s, group, n, 1, d, QKV_BF16, QKV_FAST, "none", 1), f, d, fast,
          "bf16 fast backward, times f32's rate");
  add_row(s, SHARE, add_backward(s, group, n, 1, d, QKV_F64, QKV_CANONICAL, "none", 1), -1, d, floor, "f64 backward");
  end_group(s);
}

static void plan_dropout(suite *s) {
  int without = add_cell(s, s->groups, 4096, 4096, 1, 64, QKV_F32, QKV_CANONICAL, "none", NULL, 1);
  int with = add_cell(s, s->groups, 4096, 4096, 1, 64, QKV_F32, QKV_CANONICAL, "none", NULL, 1);
  s->cell[with].r.c.dropout = 0.1;
  add_row(s, EXTRA, with, without, 64, (target){25, (double)NAN}, "f32, dropout 0.1");
  end_group(s);
}

static void plan_lengths(suite *s, int64_t d) {
  static const int64_t n[] = {1024, 4096, 16384, 65536};
  int at[4] = {-1, -1, -1, -1};
  const int last = s->quick ? 3 : 4;
  for (int i = 0; i < last; i++) {
    at[i] = add_cell(s, s->groups, n[i], n[i], i < 2 ? 2 : 1, d, QKV_F32, QKV_CANONICAL, "none", NULL, 1);
  }
  s->long_group[s->groups] = 1;
  add_row(s, POINTS_LESS, at[2], at[1], d, of_kind(s, 2, 1), "f32, n = 16384");
  add_row(s, POINTS_LESS, at[3], at[1], d, of_kind(s, 2, 1), "f32, n = 65536");
  row *r = add_row(s, SPREAD, at[0], -1, d, of_kind(s, 5, (double)NAN), "f32, share from n = 1024 to the longest");
  r->first = at[0];
  r->last = at[last - 1];
  end_group(s);
}

static void plan_backward_lengths(suite *s, int64_t d) {
  static const int64_t n[] = {1024, 4096, 16384, 32768};
  const int last = s->quick ? 3 : 4, first = s->cells;
  for (int i = 0; i < last; i++) add_backward(s, s->groups, n[i], i < 2 ? 2 : 1, d, QKV_F32, QKV_CANONICAL, "none", 1);
  row *r = add_row(s, SPREAD, first, -1, d, of_kind(s, 5, (double)NAN), "f32 backward, lengths from n = 1024 on");
  r->first = first;
  r->last = first + last - 1;
  s->long_group[s->groups] = 1;
  end_group(s);
}

static void plan_dims(suite *s) {
  static const int64_t dim[] = {80, 96, 192, 256, 32, 33, 65, 127};
  static const double must[] = {85, 85, 85, 85, 80, 70, 70, 70};
  for (int i = 0; i < 8; i++) {
    int c = add_cell(s, s->groups, 4096, 4096, 1, dim[i], QKV_F32, QKV_CANONICAL, "none", NULL, 1);
    add_row(s, SHARE, c, -1, dim[i], of_kind(s, must[i], (double)NAN), "f32, other head dims");
  }
  end_group(s);
}

static void plan_threads(suite *s) {
  const target t = s->kind == MACHINE_OTHER ? (target){1.8, (double)NAN} : (target){1.9, 1.98};
  for (int64_t d = 64; d <= 128; d *= 2) {
    int one = add_cell(s, s->groups, 4096, 4096, 4, d, QKV_F32, QKV_CANONICAL, "none", NULL, 1), two = -1;
    if (machine_cpus() > 1) two = add_cell(s, s->groups, 4096, 4096, 4, d, QKV_F32, QKV_CANONICAL, "none", NULL, 2);
    row *r = add_row(s, TIMES, two, one, d, t, "f32, two threads over one");
    r->group = s->groups;
  }
  end_group(s);
}

/* One head too: its two threads share dk and dv. */
static void plan_backward_threads(suite *s) {
  for (int64_t heads = 4; heads >= 1; heads -= 3) {
    for (int64_t d = 64; d <= 128; d *= 2) {
      int one = add_backward(s, s->groups, 4096, heads, d, QKV_F32, QKV_CANONICAL, "none", 1), two = -1;
      if (machine_cpus() > 1) two = add_backward(s, s->groups, 4096, heads, d, QKV_F32, QKV_CANONICAL, "none", 2);
      row *r = add_row(s, TIMES, two, one, d, (target){heads == 1 ? 1.85 : 1.9, (double)NAN},
                       heads == 1 ? "f32 backward, one head, two threads over one" : "f32 backward, two threads over one");
      r->group = s->groups;
    }
  }
  end_group(s);
}

static void plan(suite *s) {
  s->kind = machine_kind();
  plan_forward(s, 64);
  plan_forward(s, 128);
  plan_backward(s, 64);
  plan_backward(s, 128);
  plan_dropout(s);
  plan_dims(s);
  plan_threads(s);
  plan_backward_threads(s);
  int call = add_cell(s, s->groups, 1, 1, 1, 64, QKV_F32, QKV_CANONICAL, "none", NULL, 1);
  add_row(s, MICROSECONDS, call, -1, 64, (target){1, (double)NAN}, "f32, a call with 1 query and 1 key, microseconds");
  end_group(s);
  plan_lengths(s, 64);
  plan_lengths(s, 128);
  plan_backward_lengths(s, 64);
  plan_backward_lengths(s, 128);
}

/* Leaves the rows whose names have the text, and the cells that they need. */
static void select_rows(suite *s, const char *text) {
  int rows = 0;
  for (int i = 0; i < s->cells; i++) s->cell[i].left_out = 1;
  for (int i = 0; i < s->rows; i++) {
    row r = s->row[i];
    if (text && !strstr(r.name, text)) continue;
    s->row[rows++] = r;
    if (r.of >= 0) s->cell[r.of].left_out = 0;
    if (r.beside >= 0) s->cell[r.beside].left_out = 0;
    for (int c = r.first; c < r.last; c++) s->cell[c].left_out = s->cell[c + 1].left_out = 0;
  }
  s->rows = rows;
}

/* ---- Measuring --------------------------------------------------------------------------------------------------- */

/* The thread's own seconds: another process on its core then does not count. Threads of a team run at the same time, so for
 * them it is the clock on the wall. */
static double seconds_of(const series *c) { return c->r.c.threads == 1 ? machine_thread_now() : machine_now(); }

/* Makes the data, runs once, and checks that run. */
static qkv_status open_cell(series *c, char *error, size_t n) {
  if (c->r.outcome != PLANNED) return QKV_OK;
  qkv_status status = bench_prepare(&c->b, &c->r, &c->t, error, n);
  if (status != QKV_OK || c->r.outcome == SKIPPED) return status;
  double t = seconds_of(c);
  status = bench_run(&c->t);
  t = seconds_of(c) - t;
  if (status != QKV_OK) {
    snprintf(error, n, "%s", qkv_status_text(status));
    return status;
  }
  c->calls = t < 0.02 ? (int)(0.02 / (t > 1e-7 ? t : 1e-7)) + 1 : 1;
  c->r.outcome = bench_check(&c->t, c->b.o.seed, 4e6, &c->r) ? DONE : WRONG;
  return QKV_OK;
}

static void close_cell(series *c) {
  bench_release(&c->t);
  bench_drop_data(&c->b);
}

/* One run of a cell: 20 ms of calls or a single one, between two measurements of the peak. Each is a mean over 8 ms, as the
 * run is one: the clock of a core that multiplies at full width sinks, and recovers between. */
static void run_cell(series *c) {
  if (c->r.outcome != DONE || c->runs == SUITE_RUNS) return;
  machine_rate before = bench_peak(&c->r.c, c->r.c.threads);
  double t = seconds_of(c), wall = machine_now();
  for (int i = 0; i < c->calls; i++) {
    if (bench_run(&c->t) != QKV_OK) return; /* interrupted */
  }
  t = seconds_of(c) - t;
  wall = machine_now() - wall;
  machine_rate after = bench_peak(&c->r.c, c->r.c.threads);
  double peak = (before.mean + after.mean) / 2, low = fmin(before.mean, after.mean), each = t / c->calls;
  double gflops = each > 0 ? c->t.flops / each / 1e9 : 0;
  int i = c->runs++;
  c->share[i] = peak > 0 ? 100 * gflops / peak : 0;
  c->gflops[i] = gflops;
  c->peak[i] = peak;
  c->seconds[i] = each;
  c->clean[i] = low > 0.8 * fmax(before.best, after.best);
  if (i == 0 || low < c->peak_low) c->peak_low = low;
  c->peak_high = fmax(c->peak_high, fmax(before.mean, after.mean));
  if (i == 0 || each < c->r.seconds) {
    c->r.seconds = each;
    c->r.gflops = gflops;
    c->r.peak_gflops = peak;
  }
  if (t > 0 && wall / t > c->waited) c->waited = wall / t;
  c->r.runs = c->runs;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double median_of(const double *value, int n) {
  double sorted[SUITE_RUNS];
  memcpy(sorted, value, (size_t)n * sizeof *value);
  qsort(sorted, (size_t)n, sizeof *sorted, by_value);
  return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static int smaller_is_better(int measure) {
  return measure == POINTS_LESS || measure == SPREAD || measure == MICROSECONDS || measure == EXTRA;
}

/* A disturbed peak makes a share look better than it is: the best is that of an undisturbed run, but at least the median. */
double suite_best_share(const series *c) {
  double best = c->runs ? median_of(c->share, c->runs) : 0;
  for (int i = 0; i < c->runs; i++) {
    if (c->clean[i]) best = fmax(best, c->share[i]);
  }
  return best;
}

void suite_value(const suite *s, row *r) {
  double value[SUITE_RUNS];
  int n = 0;
  r->median = r->best = r->alone = (double)NAN;
  if (r->of < 0 || s->cell[r->of].runs == 0) return;
  const series *c = &s->cell[r->of];
  if (r->measure == SPREAD) {
    double low = INFINITY, high = 0;
    for (int i = r->first; i <= r->last; i++) {
      if (s->cell[i].runs == 0) return;
      double share = median_of(s->cell[i].share, s->cell[i].runs);
      low = fmin(low, share);
      high = fmax(high, share);
    }
    value[n++] = 100 * (1 - low / high);
  } else {
    const series *b = r->beside >= 0 ? &s->cell[r->beside] : NULL;
    double alone[SUITE_RUNS];
    for (; n < c->runs && (!b || n < b->runs); n++) {
      switch (r->measure) {
      case POINTS_LESS: value[n] = b->share[n] - c->share[n]; break;
      case RATE: value[n] = 100 * c->share[n] / b->share[n]; break; /* the same peak */
      case EXTRA: value[n] = 100 * (b->share[n] / c->share[n] - 1); break;
      case FASTER: value[n] = c->gflops[n] / b->gflops[n]; break;
      case TIMES:
        value[n] = c->gflops[n] / b->gflops[n];
        alone[n] = c->peak[n] / b->peak[n];
        break;
      case MICROSECONDS: value[n] = 1e6 * c->seconds[n]; break;
      default: value[n] = c->share[n];
      }
    }
    if (n > 0 && r->measure == TIMES) r->alone = median_of(alone, n);
  }
  if (n == 0) return;
  r->median = median_of(value, n);
  r->best = r->median;
  for (int i = 0; i < n; i++) {
    const int clean = c->clean[i] && (r->beside < 0 || s->cell[r->beside].clean[i]);
    if (clean && r->measure != SPREAD) {
      r->best = smaller_is_better(r->measure) ? fmin(r->best, value[i]) : fmax(r->best, value[i]);
    }
  }
}

static int reaches(const row *r, double value) {
  return smaller_is_better(r->measure) ? value <= r->must : value >= r->must;
}

/* What is to be said of a row. */
static void judge(const suite *s, row *r) {
  suite_value(s, r);
  char *text = r->verdict;
  const size_t n = sizeof r->verdict;
  const series *c = r->of >= 0 ? &s->cell[r->of] : NULL;
  if (!c) {
    static const char *const why[] = {" on this CPU", ": --quick", "", ": one processor", "", "", "", ""};
    snprintf(text, n, "not measured%s", why[r->measure]);
  } else if (c->r.outcome == WRONG) {
    snprintf(text, n, "WRONG: %s", c->r.note);
  } else if (c->r.outcome == SKIPPED) {
    snprintf(text, n, "not measured: %s", c->r.note);
  } else if (isnan(r->median)) {
    snprintf(text, n, "not measured");
  } else if (isnan(r->must)) {
    snprintf(text, n, "no goal on this CPU");
  } else if (reaches(r, r->median)) {
    snprintf(text, n, "holds");
  } else if (r->measure == TIMES && r->alone < r->must + 0.05) {
    snprintf(text, n, "not decided: multiply-adds alone make %.2f", r->alone);
  } else {
    snprintf(text, n, "%s", reaches(r, r->best) ? "holds in the best run" : "falls short");
  }
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static void number_text(const row *r, double value, char *text, size_t n) {
  if (isnan(value)) {
    snprintf(text, n, "-");
  } else {
    const int small = r->measure == TIMES || r->measure == MICROSECONDS || r->measure == FASTER;
    snprintf(text, n, small ? "%.2f" : "%.1f", value);
  }
}

static void print_titles(void) {
  printf("%-48s %5s %9s  %7s %7s  %7s %6s\n", "share of the peak in % unless said", "d", "GFLOP/s", "median", "best", "must",
         "goal");
}

static void print_row(const suite *s, const row *r) {
  char median[32], best[32], must[40] = "", goal[32] = "", gflops[32] = "-", name[96];
  number_text(r, r->median, median, sizeof median);
  number_text(r, r->best, best, sizeof best);
  if (!isnan(r->must)) snprintf(must, sizeof must, "%s %g", smaller_is_better(r->measure) ? "<=" : ">=", r->must);
  if (!isnan(r->goal)) snprintf(goal, sizeof goal, "%g", r->goal);
  if (r->of >= 0 && s->cell[r->of].runs && r->measure != MICROSECONDS && r->measure != SPREAD) {
    snprintf(gflops, sizeof gflops, "%.1f", median_of(s->cell[r->of].gflops, s->cell[r->of].runs));
  }
  const char *unit = r->measure == POINTS_LESS ? ", points less"
                     : r->measure == SPREAD    ? ", spread"
                     : r->measure == EXTRA     ? ", more time"
                                               : "";
  snprintf(name, sizeof name, "%s%s", r->name, unit);
  printf("%-48s %5lld %9s  %7s %7s  %7s %6s  %s\n", name, (long long)r->dim, gflops, median, best, must, goal, r->verdict);
}

static const char *measure_name(int measure) {
  static const char *const name[] = {"share", "points_less", "rate", "times", "microseconds", "spread", "extra", "faster"};
  return name[measure];
}

static void add_number(cJSON *x, const char *name, double value) {
  if (!isnan(value)) cJSON_AddNumberToObject(x, name, round(value * 1e4) / 1e4);
}

static cJSON *row_json(const suite *s, const row *r) {
  const series *c = r->of >= 0 ? &s->cell[r->of] : NULL;
  cJSON *x = c && c->runs ? bench_row_json(&c->r) : cJSON_CreateObject();
  cJSON_DeleteItemFromObject(x, "extra_bytes");
  cJSON_AddStringToObject(x, "row", r->name);
  cJSON_AddNumberToObject(x, "d", (double)r->dim);
  cJSON_AddStringToObject(x, "measure", measure_name(r->measure));
  add_number(x, "median", r->median);
  add_number(x, "best", r->best);
  add_number(x, "must", r->must);
  add_number(x, "goal", r->goal);
  add_number(x, "alone", r->alone);
  if (c && c->runs) {
    add_number(x, "share_median", median_of(c->share, c->runs));
    add_number(x, "share_best", suite_best_share(c));
    add_number(x, "peak_spread", suite_peak_spread(c));
  }
  cJSON_AddStringToObject(x, "verdict", r->verdict);
  return x;
}

static const char *compiler(void) {
#if defined(__clang__) || !defined(__GNUC__)
  return __VERSION__;
#else
  return "GCC " __VERSION__;
#endif
}

static int write_json(suite *s, char *error, size_t n) {
  char cpu[256], date[32] = "";
  time_t now = time(NULL);
  struct tm utc;
  if (gmtime_r(&now, &utc)) strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  machine_describe(cpu, sizeof cpu);
  static const bench nothing;
  cJSON *x = cJSON_CreateObject();
  cJSON_AddStringToObject(x, "cpu", cpu);
  cJSON_AddStringToObject(x, "compiler", compiler());
  cJSON_AddStringToObject(x, "commit", QKV_COMMIT);
  cJSON_AddStringToObject(x, "date", date);
  cJSON_AddBoolToObject(x, "quick", s->quick);
  cJSON_AddItemToObject(x, "machine", bench_machine_json(&nothing));
  char *text = cJSON_PrintUnformatted(x);
  cJSON_Delete(x);
  if (!text) return cli_failure("out of memory");
  text[strlen(text) - 1] = 0; /* the brace: rows follow, one a line */
  fprintf(s->json.stream, "%s,\n \"rows\": [", text);
  cJSON_free(text);
  for (int i = 0; i < s->rows; i++) {
    fputs(i ? ",\n  " : "\n  ", s->json.stream);
    bench_print_item(s->json.stream, row_json(s, &s->row[i]));
  }
  fputs("]}\n", s->json.stream);
  return output_commit(&s->json, error, n);
}

/* A directory gets a file named after the CPU. */
static void json_path(const char *given, char *path, size_t n) {
  struct stat st;
  size_t length = strlen(given);
  int directory = (length > 0 && given[length - 1] == '/') || (stat(given, &st) == 0 && S_ISDIR(st.st_mode));
  snprintf(path, n, "%s", given);
  if (!directory) return;
  char cpu[256], slug[256];
  size_t used = 0;
  machine_describe(cpu, sizeof cpu);
  for (const char *p = cpu; *p; p++) {
    if (isalnum((unsigned char)*p)) {
      slug[used++] = (char)tolower((unsigned char)*p);
    } else if (used > 0 && slug[used - 1] != '-') {
      slug[used++] = '-';
    }
  }
  while (used > 0 && slug[used - 1] == '-') used--;
  slug[used] = 0;
  snprintf(path, n, "%s%s%s.json", given, length > 0 && given[length - 1] == '/' ? "" : "/", slug);
}

/* ---- The suite --------------------------------------------------------------------------------------------------- */

double suite_peak_spread(const series *c) { return c->peak_high > 0 ? 100 * (1 - c->peak_low / c->peak_high) : 0; }
double suite_share_spread(const series *c) {
  double low = INFINITY, high = suite_best_share(c);
  for (int i = 0; i < c->runs; i++) low = fmin(low, c->share[i]);
  return high > 0 ? 100 * (1 - low / high) : 0;
}

static int out_of_time(const suite *s) { return s->quick && machine_now() - s->begin > 40; }

qkv_status suite_run_cells(suite *s, const int *index, int count, int rounds, char *error, size_t n) {
  qkv_status status = QKV_OK;
  for (int i = 0; i < count && status == QKV_OK && !cli_interrupted(); i++) status = open_cell(&s->cell[index[i]], error, n);
  /* In turn, so that what is compared is measured in the same weather. A round is whole: its runs belong together. */
  for (int round = 0; round < rounds && status == QKV_OK && !cli_interrupted(); round++) {
    if (round > 0 && out_of_time(s)) break;
    for (int i = 0; i < count && !cli_interrupted(); i++) {
      series *c = &s->cell[index[i]];
      if (round < 2 || c->r.seconds < 3) run_cell(c);
    }
  }
  for (int i = 0; i < count; i++) close_cell(&s->cell[index[i]]);
  return status == QKV_CANCELLED ? QKV_OK : status;
}

static qkv_status run_group(suite *s, int group, int rounds, char *error, size_t n) {
  int index[SUITE_CELLS], count = 0;
  for (int i = 0; i < s->cells; i++) {
    if (s->cell[i].group == group && !s->cell[i].left_out) index[count++] = i;
  }
  if (count == 0) return QKV_OK;
  if (isatty(STDERR_FILENO)) fprintf(stderr, "\r\033[K[%d/%d] %d cells ...", group + 1, s->groups, count), fflush(stderr);
  qkv_status status = suite_run_cells(s, index, count, rounds, error, n);
  if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr), fflush(stderr);
  return status;
}

int bench_suite(const options *o) {
  static suite s;
  char error[512], cpu[256], path[1024];
  int status = CLI_OK, wrong = 0, measured = 0, waited = 0;
  memset(&s, 0, sizeof s);
  s.quick = o->quick;
  s.seed = o->seed;
  s.begin = machine_now();
  s.stolen = machine_stolen();
  if (o->json) {
    json_path(o->json, path, sizeof path);
    if (output_open(&s.json, path, error, sizeof error) != 0) return cli_failure("--json: %s", error);
  }
  cli_interrupts();
  plan(&s);
  select_rows(&s, o->only);
  if (s.rows == 0) {
    output_discard(&s.json);
    return cli_usage("--only '%s': no row has that in its name", o->only);
  }
  machine_describe(cpu, sizeof cpu);
  printf("%s\n%s, commit %s\n\n", cpu, compiler(), QKV_COMMIT);
  print_titles();
  fflush(stdout);
  for (int g = 0; g < s.groups && status == CLI_OK && !cli_interrupted(); g++) {
    const int rounds = s.quick ? (g < 2 ? 4 : s.long_group[g] ? 2 : 3) : (s.long_group[g] ? 3 : 9);
    if (!out_of_time(&s) && run_group(&s, g, rounds, error, sizeof error) != QKV_OK) status = cli_failure("%s", error);
    for (int i = 0; i < s.rows; i++) {
      if (s.row[i].group != g) continue;
      judge(&s, &s.row[i]);
      print_row(&s, &s.row[i]);
    }
    fflush(stdout);
  }
  for (int i = 0; i < s.cells; i++) {
    wrong += s.cell[i].r.outcome == WRONG;
    measured += s.cell[i].runs > 0;
    waited += s.cell[i].waited > 1.1;
  }
  if (waited) {
    printf("\n%d of %d cells had to wait for other processes; the time of one thread is its own, that of two is not.\n",
           waited, measured);
  }
  int regressed = 0;
  if (o->gate && status == CLI_OK && !cli_interrupted()) regressed = suite_gate(&s, o->gate);
  fflush(stdout);
  if (o->json && status == CLI_OK && !cli_interrupted() && write_json(&s, error, sizeof error) != 0) {
    status = cli_failure("--json: %s", error);
  }
  output_discard(&s.json);
  if (cli_interrupted()) return cli_interrupted_failure(o->json ? "no file was written" : "the rows above are complete");
  if (status == CLI_OK && wrong) status = cli_failure("%d results are wrong", wrong);
  if (status == CLI_OK && regressed < 0) status = CLI_FAILURE;
  if (status == CLI_OK && regressed) status = cli_failure("%d rows lost more than 10 points", regressed);
  return status;
}

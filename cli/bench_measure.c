/* qkv bench: data, time, memory, peak and check of one cell. */
#include <math.h>
#include <string.h>

#include "bench.h"
#include "machine.h"
#include "npy.h"
#include "oracle.h"
#include "qkv/openmp.h"
#include "rng.h"

/* ---- Data -------------------------------------------------------------------------------------------------------- */

int bench_read_inputs(bench *b) {
  char error[512], shape[128];
  if (!b->o.input[0]) return 0;
  for (int t = 0; t < 3; t++) {
    array *a = &b->file[t];
    if (npy_read(b->o.input[t], a, error, sizeof error) != 0) return cli_failure("%s", error);
    array_shape_text(a->rank, a->shape, shape, sizeof shape);
    if ((a->dtype != QKV_F32 && a->dtype != QKV_F64) || a->rank < 2) {
      return cli_failure("%s: shape %s: an array of floats (batch, heads, seqlen, dim) was expected", b->o.input[t], shape);
    }
    int64_t missing = 4 - a->rank;
    for (int x = 3; x >= 0; x--) {
      a->shape[x] = x >= missing ? a->shape[x - missing] : 1;
      a->stride[x] = x >= missing ? a->stride[x - missing] : 0;
    }
    a->rank = 4;
    for (int x = 0; x < 4; x++) {
      if (a->shape[x] < 1) return cli_failure("%s: shape %s: an extent is 0", b->o.input[t], shape);
    }
    if (a->shape[0] != 1 && a->shape[0] != b->o.batch) {
      return cli_failure("%s: shape %s: the first axis is neither 1 nor --batch %lld", b->o.input[t], shape,
                         (long long)b->o.batch);
    }
  }
  for (int t = 0; t < 3; t++) {
    const array *a = &b->file[t];
    int64_t count = a->shape[0] * a->shape[1] * a->shape[2] * a->shape[3];
    for (int64_t i = 0; i < count; i++) {
      if (!isfinite(load_value(a->dtype, a->data, i))) return cli_failure("%s: a value is not finite", b->o.input[t]);
    }
  }
  const array *q = &b->file[0], *k = &b->file[1], *v = &b->file[2];
  if (k->shape[3] != q->shape[3]) {
    return cli_failure("%s: dim %lld does not fit dim %lld of %s", b->o.input[1], (long long)k->shape[3],
                       (long long)q->shape[3], b->o.input[0]);
  }
  if (v->shape[1] != k->shape[1] || v->shape[2] != k->shape[2]) {
    return cli_failure("%s: %lld heads of %lld rows do not fit %lld heads of %lld rows of %s", b->o.input[2],
                       (long long)v->shape[1], (long long)v->shape[2], (long long)k->shape[1], (long long)k->shape[2],
                       b->o.input[1]);
  }
  return 0;
}

void bench_drop_data(bench *b) {
  for (int t = 0; t < TENSORS; t++) {
    machine_unmap(b->memory[t], b->bytes[t]);
    b->memory[t] = NULL;
  }
}

static int tensors_of(const cell *c) { return c->backward ? TENSORS : DATA_OUT + 1; }
static int32_t lse_type(const cell *c) { return c->dtype == QKV_F64 ? QKV_F64 : QKV_F32; }

/* Bytes of the tensors; SIZE_MAX if there is no such number. */
static size_t data_bytes(const cell *c, size_t bytes[TENSORS]) {
  const int64_t q[4] = {c->batch, c->num_heads, c->seqlen_q, c->head_dim},
                k[4] = {c->batch, c->num_kv_heads, c->seqlen_kv, c->head_dim},
                v[4] = {c->batch, c->num_kv_heads, c->seqlen_kv, c->head_dim_v},
                out[4] = {c->batch, c->num_heads, c->seqlen_q, c->head_dim_v},
                lse[4] = {c->batch, c->num_heads, c->seqlen_q, 1};
  const int64_t *extent[TENSORS] = {q, k, v, out, lse, out, q, k, v};
  size_t total = 0;
  memset(bytes, 0, TENSORS * sizeof *bytes);
  for (int t = 0; t < tensors_of(c); t++) {
    size_t size = array_element_size(t == DATA_LSE ? lse_type(c) : c->dtype);
    int64_t count = array_count(4, extent[t], size);
    if (count < 0 || (uint64_t)count * size > SIZE_MAX / 8) return SIZE_MAX;
    bytes[t] = (size_t)count * size;
    total += bytes[t];
  }
  return total;
}

/* Fills q, k, v or dout, from the file or with random numbers. */
static void fill(bench *b, const cell *c, int t, int64_t heads, int64_t rows, int64_t dim) {
  static const array none;
  const problem_dtype *type = problem_dtype_of(c->dtype);
  const array *a = t < 3 ? &b->file[t] : &none;
  int64_t to = 0;
  for (int64_t e = 0; e < c->batch; e++) {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t x = 0; x < dim; x++, to++) {
          double value;
          if (a->data) {
            int64_t from = (a->shape[0] == 1 ? 0 : e) * a->stride[0] + h * a->stride[1] + i % a->shape[2] * a->stride[2];
            value = load_value(a->dtype, a->data, from + x * a->stride[3]);
          } else {
            value = rng_normal_at((uint64_t)b->o.seed, (uint64_t)t, (uint64_t)to);
          }
          type->store((char *)b->memory[t] + to * (int64_t)type->size, value);
        }
      }
    }
  }
}

/* The tensors of a cell in fresh memory; the same numbers for the same shape. 0, or -1: no memory. */
static int make_data(bench *b, const cell *c) {
  const cell *s = &b->shape;
  if (b->memory[0] && s->batch == c->batch && s->num_heads == c->num_heads && s->num_kv_heads == c->num_kv_heads &&
      s->seqlen_q == c->seqlen_q && s->seqlen_kv == c->seqlen_kv && s->head_dim == c->head_dim &&
      s->head_dim_v == c->head_dim_v && s->dtype == c->dtype && s->backward == c->backward) {
    return 0;
  }
  bench_drop_data(b);
  b->shape = *c;
  data_bytes(c, b->bytes);
  for (int t = 0; t < tensors_of(c); t++) {
    b->memory[t] = machine_map(b->bytes[t]);
    if (!b->memory[t]) {
      bench_drop_data(b);
      return -1;
    }
  }
  fill(b, c, DATA_Q, c->num_heads, c->seqlen_q, c->head_dim);
  fill(b, c, DATA_K, c->num_kv_heads, c->seqlen_kv, c->head_dim);
  fill(b, c, DATA_V, c->num_kv_heads, c->seqlen_kv, c->head_dim_v);
  if (c->backward) fill(b, c, DATA_DOUT, c->num_heads, c->seqlen_q, c->head_dim_v);
  return 0;
}

/* ---- The check --------------------------------------------------------------------------------------------------- */

/* Whether every element was written and is a number. heads and rows are those of the tensor. */
static int all_finite(const cell *c, const char *name, const void *data, int64_t heads, int64_t rows, int64_t dim,
                      result *r) {
  for (int64_t i = 0; i < c->batch * heads * rows * dim; i++) {
    if (isfinite(load_value(c->dtype, data, i))) continue;
    int64_t row = i / dim, head = row / rows;
    snprintf(r->note, sizeof r->note, "%sbatch %lld, head %lld, row %lld was not written, or is no number", name,
             (long long)(head / heads), (long long)(head % heads), (long long)(row % rows));
    return 0;
  }
  return 1;
}

/* Some of `count` rows, so many as `cost` of each leaves for `work`: the first, the last, and some between. */
static int64_t sample_size(double cost, double work, int64_t count) {
  int64_t rows = cost * 32 < work ? 32 : (int64_t)(work / cost);
  if (rows < 4) rows = 4;
  return rows < count ? rows : count;
}
/* Ascending, one in each equal part: the oracle keeps the keys of a head. */
static int64_t sample(int64_t at, int64_t rows, int64_t count, int64_t seed) {
  int64_t from = at * count / rows, to = (at + 1) * count / rows;
  return at == 0          ? 0
         : at == rows - 1 ? count - 1
                          : from + (int64_t)(rng_at((uint64_t)seed, 7, (uint64_t)at) % (uint64_t)(to - from));
}

/* Compares n values at an index of a tensor with what they must be. */
typedef struct {
  const char *name; /* "" or "dq: " */
  const void *data;
  int32_t dtype;
  int64_t heads, rows; /* of the tensor */
} checked;
static int compare(const checked *t, int64_t row, int64_t dim, const oracle_value *value, double *worst, result *r) {
  const int64_t i = row % t->rows, h = row / t->rows % t->heads, e = row / t->rows / t->heads;
  for (int64_t x = 0; x < dim; x++) {
    double got = load_value(t->dtype, t->data, row * dim + x), ratio;
    double error = fabs(got - value[x].value - value[x].tail);
    if (!oracle_accepts(&value[x], got, &ratio)) {
      snprintf(r->note, sizeof r->note,
               "%sbatch %lld, head %lld, row %lld, column %lld is %.9g, not %.9g: the error %.2g is above the allowed %.2g",
               t->name, (long long)e, (long long)h, (long long)i, (long long)x, got, value[x].value, error, value[x].bound);
      return 0;
    }
    if (ratio >= *worst) {
      *worst = ratio;
      r->error = error;
      r->bound = value[x].bound;
    }
  }
  return 1;
}

/* Rows of out, and of the log-sum-exp if it is there. */
static int check_rows(oracle *o, const prepared *t, int64_t seed, double work, oracle_value *value, double *worst,
                      result *r) {
  const cell *c = &r->c;
  const qkv_problem *p = &t->problem;
  const int64_t dv = c->head_dim_v, count = c->batch * c->num_heads * c->seqlen_q;
  const int64_t rows = sample_size((double)c->seqlen_kv * (double)(c->head_dim + dv), work, count);
  const checked out = {"", p->out.data, c->dtype, c->num_heads, c->seqlen_q},
                lse = {"log-sum-exp: ", p->lse.data, p->lse.dtype, c->num_heads, c->seqlen_q};
  int good = 1;
  for (int64_t at = 0; at < rows && good; at++) {
    const int64_t row = sample(at, rows, count, seed);
    oracle_row(o, row / c->seqlen_q / c->num_heads, row / c->seqlen_q % c->num_heads, row % c->seqlen_q, value, &value[dv]);
    good = compare(&out, row, dv, value, worst, r);
    if (good && lse.data) good = compare(&lse, row, 1, &value[dv], worst, r);
    r->rows_checked++;
  }
  return good;
}

static int no_memory(result *r) {
  snprintf(r->note, sizeof r->note, "no memory for the check");
  return 0;
}

/* Rows of dq, and dk and dv of keys. */
static int check_gradients(oracle *o, const prepared *t, int64_t seed, double work, oracle_value *value, double *worst,
                           result *r) {
  const cell *c = &r->c;
  const qkv_gradients *g = &t->gradients;
  const int64_t d = c->head_dim, dv = c->head_dim_v, rows = c->batch * c->num_heads * c->seqlen_q,
                keys = c->batch * c->num_kv_heads * c->seqlen_kv, group = c->num_heads / c->num_kv_heads;
  const double each = (double)(3 * d + 2 * dv);
  const int64_t some_rows = sample_size((double)c->seqlen_kv * each, work, rows),
                some_keys = sample_size((double)(c->seqlen_q * group) * each, work, keys);
  const checked dq = {"dq: ", g->dq.data, c->dtype, c->num_heads, c->seqlen_q},
                dk = {"dk: ", g->dk.data, c->dtype, c->num_kv_heads, c->seqlen_kv},
                dval = {"dv: ", g->dv.data, c->dtype, c->num_kv_heads, c->seqlen_kv};
  int good = 1;
  for (int64_t at = 0; at < some_rows && good; at++) {
    const int64_t row = sample(at, some_rows, rows, seed);
    const int64_t head = row / c->seqlen_q;
    if (!oracle_dq(o, g, head / c->num_heads, head % c->num_heads, row % c->seqlen_q, value)) return no_memory(r);
    good = compare(&dq, row, d, value, worst, r);
    r->rows_checked++;
  }
  for (int64_t at = 0; at < some_keys && good; at++) {
    const int64_t key = sample(at, some_keys, keys, seed), head = key / c->seqlen_kv;
    if (!oracle_dkv(o, g, head / c->num_kv_heads, head % c->num_kv_heads, key % c->seqlen_kv, value, value + d)) {
      return no_memory(r);
    }
    good = compare(&dk, key, d, value, worst, r) && compare(&dval, key, dv, value + d, worst, r);
    r->rows_checked++;
  }
  return good;
}

/* Parts of the result against the plain formula in higher precision and the bound of the rounding; and whether every element
 * was written and is a number. */
int bench_check(const prepared *t, int64_t seed, double work, result *r) {
  const cell *c = &r->c;
  const qkv_gradients *g = &t->gradients;
  const int64_t d = c->head_dim, dv = c->head_dim_v;
  double worst = 0;
  if (!all_finite(c, "", t->problem.out.data, c->num_heads, c->seqlen_q, dv, r)) return 0;
  if (t->backward && !(all_finite(c, "dq: ", g->dq.data, c->num_heads, c->seqlen_q, d, r) &&
                       all_finite(c, "dk: ", g->dk.data, c->num_kv_heads, c->seqlen_kv, d, r) &&
                       all_finite(c, "dv: ", g->dv.data, c->num_kv_heads, c->seqlen_kv, dv, r))) {
    return 0;
  }
  oracle *o = oracle_new(&t->problem);
  oracle_value *value = malloc((size_t)(d + dv + 1) * sizeof *value);
  int good = (o && value) || no_memory(r);
  /* The gradients are checked as those of this out and log-sum-exp, so these are too. */
  if (good) good = check_rows(o, t, seed, t->backward ? work / 3 : work, value, &worst, r);
  if (good && t->backward) {
    r->rows_checked = 0;
    worst = 0;
    good = check_gradients(o, t, seed, work / 3, value, &worst, r);
  }
  free(value);
  oracle_free(o);
  return good;
}

/* ---- Measuring --------------------------------------------------------------------------------------------------- */

static void skip(result *r, size_t need, const char *what) {
  char a[32], f[32];
  bench_size_text((double)need, a, sizeof a);
  bench_size_text((double)machine_memory_free(), f, sizeof f);
  r->outcome = SKIPPED;
  snprintf(r->note, sizeof r->note, "%s of %s at n = %lld would take %s; %s are free", what, pass_name(&r->c),
           (long long)r->c.seqlen_kv, a, f);
}

/* Whether so many more bytes fit into memory with some room left for others. */
static int fits(size_t bytes) {
  uint64_t left = machine_memory_free();
  return left == 0 || (double)bytes + (1 << 26) < 0.95 * (double)left;
}

/* Makes the threads and touches the code, so that neither counts as the memory or time of the first cell. */
static void warm_up(const prepared *t) {
  qkv_problem small = t->problem;
  small.seqlen_q = small.seqlen_q < 128 ? small.seqlen_q : 128;
  small.seqlen_kv = small.seqlen_kv < 128 ? small.seqlen_kv : 128;
  small.mask_count = 0;
  small.kv_length = NULL;
  qkv_forward(&t->context, &small, NULL, 0);
  if (t->backward) qkv_backward(&t->context, &small, &t->gradients, NULL, 0);
}

/* Bytes that a call takes; what cli_describe says of it in *facts. */
static qkv_status take_scratch(prepared *t, const cell *c) {
  const qkv_problem *p = &t->problem;
  qkv_status status;
  char *facts = cli_describe(&t->context, p, &status);
  if (!facts) return status;
  const double dims = (double)(t->backward ? 3 * c->head_dim + 2 * c->head_dim_v : c->head_dim + c->head_dim_v);
  t->flops = cli_fact_number(facts, "pairs_visible") * 2 * dims;
  free(facts);
  return t->backward ? qkv_backward_scratch(&t->context, p, &t->gradients, &t->scratch_bytes)
                     : qkv_scratch(&t->context, p, &t->scratch_bytes);
}

/* The forward pass that a backward one needs. Outputs are NaN before: what is not written shows. */
static qkv_status run_before(const bench *b, const prepared *t) {
  qkv_status status = QKV_OK;
  memset(t->problem.out.data, 0xff, b->bytes[DATA_OUT]);
  if (t->backward) {
    memset(t->problem.lse.data, 0xff, b->bytes[DATA_LSE]);
    status = qkv_forward(&t->context, &t->problem, NULL, 0);
    for (int x = DATA_DQ; x <= DATA_DV; x++) memset(b->memory[x], 0xff, b->bytes[x]);
  }
  return status;
}

qkv_status bench_prepare(bench *b, result *r, prepared *t, char *error, size_t n) {
  const cell *c = &r->c;
  size_t bytes[TENSORS], total = data_bytes(c, bytes);
  memset(t, 0, sizeof *t);
  error[0] = 0;
  if (total == SIZE_MAX || !fits(total) || make_data(b, c) != 0) {
    skip(r, total, c->backward ? "q, k, v, out and gradients" : "q, k, v and out");
    return QKV_OK;
  }
  t->context = qkv_context_default();
  if (c->threads > 1) qkv_openmp(&t->context, c->threads);
  t->context.isa_cap = c->isa;
  t->context.cancel = cli_interrupts();

  qkv_problem *p = &t->problem;
  *p = qkv_problem_default();
  p->algorithm = c->algorithm;
  p->arithmetic = c->arithmetic;
  p->batch = c->batch;
  p->num_heads = c->num_heads;
  p->num_kv_heads = c->num_kv_heads;
  p->seqlen_q = c->seqlen_q;
  p->seqlen_kv = c->seqlen_kv;
  p->head_dim = c->head_dim;
  p->head_dim_v = c->head_dim_v;
  p->q = qkv_bhsd(b->memory[DATA_Q], c->dtype, c->num_heads, c->seqlen_q, c->head_dim);
  p->k = qkv_bhsd(b->memory[DATA_K], c->dtype, c->num_kv_heads, c->seqlen_kv, c->head_dim);
  p->v = qkv_bhsd(b->memory[DATA_V], c->dtype, c->num_kv_heads, c->seqlen_kv, c->head_dim_v);
  p->out = qkv_bhsd(b->memory[DATA_OUT], c->dtype, c->num_heads, c->seqlen_q, c->head_dim_v);
  p->dropout = c->dropout;
  p->seed = (uint64_t)b->o.seed;
  t->backward = c->backward;
  if (c->backward) {
    qkv_gradients *g = &t->gradients;
    *g = qkv_gradients_default();
    p->lse = qkv_bhs(b->memory[DATA_LSE], lse_type(c), c->num_heads, c->seqlen_q);
    g->dout = p->out;
    g->dq = p->q;
    g->dk = p->k;
    g->dv = p->v;
    g->dout.data = b->memory[DATA_DOUT];
    g->dq.data = b->memory[DATA_DQ];
    g->dk.data = b->memory[DATA_DK];
    g->dv.data = b->memory[DATA_DV];
  }
  t->mask = grow(NULL, sizeof *t->mask);
  const mask_text_extents extents = {c->batch, c->num_heads, c->seqlen_q, c->seqlen_kv};
  if (mask_text_parse(c->mask, &extents, NULL, t->mask, error, n) != 0) return QKV_BAD_MASK;
  p->mask = t->mask->terms;
  p->mask_count = t->mask->count;
  p->kv_length = t->mask->lengths.data;
  if (mask_text_complete(t->mask, &t->context, p, error, n) != 0) return QKV_BAD_MASK;

  qkv_status status = take_scratch(t, c);
  if (status == QKV_OK && !fits(t->scratch_bytes)) {
    skip(r, t->scratch_bytes, c->algorithm == QKV_STANDARD ? "the scores" : "the scratch memory");
    return QKV_OK;
  }
  if (status == QKV_OK) {
    warm_up(t);
    status = run_before(b, t);
  }
  if (status == QKV_OK && !(t->scratch = machine_map(t->scratch_bytes))) {
    skip(r, t->scratch_bytes, "the scratch memory");
  } else if (status != QKV_OK && status != QKV_CANCELLED) {
    if (t->backward) {
      qkv_backward_check(p, &t->gradients, error, n);
    } else {
      qkv_check(p, error, n);
    }
    if (!error[0]) snprintf(error, n, "%s", qkv_status_text(status));
  }
  return status;
}

qkv_status bench_run(const prepared *t) {
  return t->backward ? qkv_backward(&t->context, &t->problem, &t->gradients, t->scratch, t->scratch_bytes)
                     : qkv_forward(&t->context, &t->problem, t->scratch, t->scratch_bytes);
}

/* Whether a backward pass took more memory than it tells. */
static int tells_memory(const prepared *t, result *r) {
  char told[32], taken[32];
  qkv_status status;
  if (!t->backward) return 1;
  char *facts = cli_backward_describe(&t->context, &t->problem, &t->gradients, &status);
  double bytes = facts ? cli_fact_number(facts, "scratch_bytes") : 0;
  free(facts);
  if ((double)r->extra_bytes <= bytes) return 1;
  bench_size_text(bytes, told, sizeof told);
  bench_size_text((double)r->extra_bytes, taken, sizeof taken);
  snprintf(r->note, sizeof r->note, "a call took %s of extra memory, and qkv_backward_describe says %s", taken, told);
  return 0;
}

void bench_release(prepared *t) {
  machine_unmap(t->scratch, t->scratch_bytes);
  if (t->mask) mask_text_free(t->mask);
  free(t->mask);
  memset(t, 0, sizeof *t);
}

machine_rate bench_peak(const cell *c, int threads) {
  /* 16-bit storage is computed in f32. */
  int32_t type = c->arithmetic == QKV_FAST ? QKV_BF16 : c->dtype == QKV_F64 ? QKV_F64 : QKV_F32;
  return machine_peak(type, c->isa, threads);
}

qkv_status bench_measure(bench *b, result *r, char *error, size_t n) {
  const cell *c = &r->c;
  prepared t;
  qkv_status status = bench_prepare(b, r, &t, error, n);
  if (status != QKV_OK || r->outcome == SKIPPED) {
    bench_release(&t);
    return status;
  }
  machine_meter_begin(&t.context);
  status = bench_run(&t);
  r->extra_bytes = machine_meter_end(&t.context, t.scratch_bytes);
  double peak = bench_peak(c, 1).best, spent = 0;
  while (status == QKV_OK && (r->runs < b->o.repeat || spent < 0.3) && (spent < 3 || r->runs == 0)) {
    double seconds = machine_now();
    status = bench_run(&t);
    seconds = machine_now() - seconds;
    spent += seconds;
    if (status == QKV_OK && (r->runs == 0 || seconds < r->seconds)) r->seconds = seconds;
    r->runs++;
    if (seconds > 0.05 && r->runs < 8) peak = fmax(peak, bench_peak(c, 1).best);
  }
  if (status == QKV_OK) {
    peak = fmax(peak, bench_peak(c, 1).best);
    int cores = machine_cpus();
    r->peak_gflops = peak * (c->threads < cores ? c->threads : cores);
    r->gflops = r->seconds > 0 ? t.flops / r->seconds / 1e9 : 0;
    r->outcome = tells_memory(&t, r) && bench_check(&t, b->o.seed, 4e7, r) ? DONE : WRONG;
  } else if (status != QKV_CANCELLED) {
    snprintf(error, n, "%s", qkv_status_text(status));
  }
  bench_release(&t);
  return status;
}

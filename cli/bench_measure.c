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
  for (int t = 0; t < 4; t++) {
    machine_unmap(b->memory[t], b->bytes[t]);
    b->memory[t] = NULL;
  }
}

/* Bytes of q, k, v and out; SIZE_MAX if there is no such number. */
static size_t data_bytes(const cell *c, size_t bytes[4]) {
  int64_t extent[4][4] = {{c->batch, c->num_heads, c->seqlen_q, c->head_dim},
                          {c->batch, c->num_kv_heads, c->seqlen_kv, c->head_dim},
                          {c->batch, c->num_kv_heads, c->seqlen_kv, c->head_dim_v},
                          {c->batch, c->num_heads, c->seqlen_q, c->head_dim_v}};
  size_t size = array_element_size(c->dtype), total = 0;
  for (int t = 0; t < 4; t++) {
    int64_t count = array_count(4, extent[t], size);
    if (count < 0 || (uint64_t)count * size > SIZE_MAX / 8) return SIZE_MAX;
    bytes[t] = (size_t)count * size;
    total += bytes[t];
  }
  return total;
}

/* q, k, v, out of a cell in fresh memory; the same numbers for the same shape. 0, or -1: no memory. */
static int make_data(bench *b, const cell *c) {
  const cell *s = &b->shape;
  if (b->memory[0] && s->batch == c->batch && s->num_heads == c->num_heads && s->num_kv_heads == c->num_kv_heads &&
      s->seqlen_q == c->seqlen_q && s->seqlen_kv == c->seqlen_kv && s->head_dim == c->head_dim &&
      s->head_dim_v == c->head_dim_v && s->dtype == c->dtype) {
    return 0;
  }
  bench_drop_data(b);
  b->shape = *c;
  const problem_dtype *type = problem_dtype_of(c->dtype);
  data_bytes(c, b->bytes);
  for (int t = 0; t < 4; t++) {
    b->memory[t] = machine_map(b->bytes[t]);
    if (!b->memory[t]) {
      bench_drop_data(b);
      return -1;
    }
  }
  int64_t heads[3] = {c->num_heads, c->num_kv_heads, c->num_kv_heads};
  int64_t rows[3] = {c->seqlen_q, c->seqlen_kv, c->seqlen_kv};
  int64_t dim[3] = {c->head_dim, c->head_dim, c->head_dim_v};
  for (int t = 0; t < 3; t++) {
    const array *a = &b->file[t];
    int64_t to = 0;
    for (int64_t e = 0; e < c->batch; e++) {
      for (int64_t h = 0; h < heads[t]; h++) {
        for (int64_t i = 0; i < rows[t]; i++) {
          for (int64_t x = 0; x < dim[t]; x++, to++) {
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
  return 0;
}

/* ---- The check --------------------------------------------------------------------------------------------------- */

/* Rows of the result against the plain formula in higher precision and the bound of the rounding: first and last row, and
 * some between; and whether every element of out was written and is a number. */
int bench_check(const prepared *t, int64_t seed, double work, result *r) {
  const cell *c = &r->c;
  const qkv_problem *p = &t->problem;
  int64_t count = c->batch * c->num_heads * c->seqlen_q, dv = c->head_dim_v;
  for (int64_t i = 0; i < count * dv; i++) {
    if (!isfinite(load_value(c->dtype, p->out.data, i))) {
      int64_t row = i / dv, head = row / c->seqlen_q;
      snprintf(r->note, sizeof r->note, "batch %lld, head %lld, row %lld was not written, or is no number",
               (long long)(head / c->num_heads), (long long)(head % c->num_heads), (long long)(row % c->seqlen_q));
      return 0;
    }
  }
  double cost = (double)c->seqlen_kv * (double)(c->head_dim + dv), worst = 0;
  int64_t rows = cost * 32 < work ? 32 : (int64_t)(work / cost);
  if (rows < 4) rows = 4;
  if (rows > count) rows = count;
  oracle *o = oracle_new(p);
  oracle_value *value = malloc(((size_t)dv + 1) * sizeof *value);
  int good = o && value;
  if (!good) snprintf(r->note, sizeof r->note, "no memory for the check");
  for (int64_t at = 0; at < rows && good; at++) {
    /* Ascending, one in each equal part: the oracle keeps the keys of a head. */
    int64_t from = at * count / rows, to = (at + 1) * count / rows;
    int64_t row = at == 0          ? 0
                  : at == rows - 1 ? count - 1
                                   : from + (int64_t)(rng_at((uint64_t)seed, 7, (uint64_t)at) % (uint64_t)(to - from));
    int64_t i = row % c->seqlen_q, h = row / c->seqlen_q % c->num_heads, e = row / c->seqlen_q / c->num_heads;
    oracle_row(o, e, h, i, value, &value[dv]);
    for (int64_t x = 0; x < dv && good; x++) {
      double got = load_value(c->dtype, p->out.data, row * dv + x), ratio;
      double error = fabs(got - value[x].value - value[x].tail);
      good = oracle_accepts(&value[x], got, &ratio);
      if (!good) {
        snprintf(r->note, sizeof r->note,
                 "batch %lld, head %lld, row %lld, column %lld is %.9g, not %.9g: the error %.2g is above the allowed %.2g",
                 (long long)e, (long long)h, (long long)i, (long long)x, got, value[x].value, error, value[x].bound);
      } else if (ratio >= worst) {
        worst = ratio;
        r->error = error;
        r->bound = value[x].bound;
      }
    }
    r->rows_checked++;
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
  snprintf(r->note, sizeof r->note, "%s of %s at n = %lld would take %s; %s are free", what, algorithm_name(r->c.algorithm),
           (long long)r->c.seqlen_kv, a, f);
}

/* Whether so many more bytes fit into memory with some room left for others. */
static int fits(size_t bytes) {
  uint64_t left = machine_memory_free();
  return left == 0 || (double)bytes + (1 << 26) < 0.95 * (double)left;
}

/* Makes the threads and touches the code, so that neither counts as the memory or time of the first cell. */
static void warm_up(const qkv_context *context, const qkv_problem *p) {
  qkv_problem small = *p;
  small.seqlen_q = small.seqlen_q < 128 ? small.seqlen_q : 128;
  small.seqlen_kv = small.seqlen_kv < 128 ? small.seqlen_kv : 128;
  small.mask_count = 0;
  small.kv_length = NULL;
  qkv_forward(context, &small, NULL, 0);
}

qkv_status bench_prepare(bench *b, result *r, prepared *t, char *error, size_t n) {
  const cell *c = &r->c;
  size_t bytes[4], total = data_bytes(c, bytes);
  memset(t, 0, sizeof *t);
  error[0] = 0;
  if (total == SIZE_MAX || !fits(total) || make_data(b, c) != 0) {
    skip(r, total, "q, k, v and out");
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
  p->q = qkv_bhsd(b->memory[0], c->dtype, c->num_heads, c->seqlen_q, c->head_dim);
  p->k = qkv_bhsd(b->memory[1], c->dtype, c->num_kv_heads, c->seqlen_kv, c->head_dim);
  p->v = qkv_bhsd(b->memory[2], c->dtype, c->num_kv_heads, c->seqlen_kv, c->head_dim_v);
  p->out = qkv_bhsd(b->memory[3], c->dtype, c->num_heads, c->seqlen_q, c->head_dim_v);
  t->mask = grow(NULL, sizeof *t->mask);
  const mask_text_extents extents = {c->batch, c->num_heads, c->seqlen_q, c->seqlen_kv};
  if (mask_text_parse(c->mask, &extents, NULL, t->mask, error, n) != 0) return QKV_BAD_MASK;
  p->mask = t->mask->terms;
  p->mask_count = t->mask->count;
  p->kv_length = t->mask->lengths.data;

  qkv_status status = qkv_scratch(&t->context, p, &t->scratch_bytes);
  if (status == QKV_OK && (!fits(t->scratch_bytes) || !(t->scratch = machine_map(t->scratch_bytes)))) {
    skip(r, t->scratch_bytes, c->algorithm == QKV_STANDARD ? "the scores" : "the scratch memory");
    return QKV_OK;
  }
  char *facts = status == QKV_OK ? cli_describe(&t->context, p, &status) : NULL;
  if (facts) t->flops = cli_fact_number(facts, "pairs_visible") * 2 * (double)(c->head_dim + c->head_dim_v);
  free(facts);
  if (status == QKV_OK) {
    warm_up(&t->context, p);
    memset(p->out.data, 0xff, b->bytes[3]); /* NaN: what is not written shows */
  } else {
    qkv_check(p, error, n);
    if (!error[0]) snprintf(error, n, "%s", qkv_status_text(status));
  }
  return status;
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
  status = qkv_forward(&t.context, &t.problem, t.scratch, t.scratch_bytes);
  r->extra_bytes = machine_meter_end(&t.context, t.scratch_bytes);
  double peak = bench_peak(c, 1).best, spent = 0;
  while (status == QKV_OK && (r->runs < b->o.repeat || spent < 0.3) && (spent < 3 || r->runs == 0)) {
    double seconds = machine_now();
    status = qkv_forward(&t.context, &t.problem, t.scratch, t.scratch_bytes);
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
    r->outcome = bench_check(&t, b->o.seed, 4e7, r) ? DONE : WRONG;
  } else if (status != QKV_CANCELLED) {
    snprintf(error, n, "%s", qkv_status_text(status));
  }
  bench_release(&t);
  return status;
}

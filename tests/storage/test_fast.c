/* QKV_FAST: against float64 within its bound, the same bits for any executor and batch, hidden values that are not finite, and the
 * canonical result where the CPU or the types do not allow it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <qkv/qkv.h>

#include "base/half.h"

static uint64_t seed = 7;
static uint32_t random_below(uint32_t n) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((seed >> 33) % n);
}
static uint16_t random_bf16(void) { return qkv__narrow_bf16((float)random_below(4096) / 1024 - 2); }

/* A small problem, owned. */
typedef struct sample {
  qkv_problem p;
  qkv_mask mask;
  int64_t batch, heads, nq, nk, d, dv;
  uint16_t *q, *k, *v;
  float *out, *bias;
} sample;

static sample make(int round) {
  sample s = {0};
  s.batch = 1 + random_below(2);
  s.heads = 1 + random_below(3);
  s.nq = 1 + random_below(150);
  s.nk = round % 11 == 0 ? 1600 : 1 + random_below(700);
  s.d = round % 3 == 0 ? 64 : 1 + random_below(140);
  s.dv = round % 2 ? s.d : 1 + random_below(140);
  const int64_t nq = s.batch * s.heads * s.nq * s.d, nk = s.batch * s.nk * s.d, nv = s.batch * s.nk * s.dv;
  s.q = malloc((size_t)nq * 2);
  s.k = malloc((size_t)nk * 2);
  s.v = malloc((size_t)nv * 2);
  s.out = malloc((size_t)(s.batch * s.heads * s.nq * s.dv) * sizeof(float));
  s.bias = malloc((size_t)(s.nq * s.nk) * sizeof(float));
  assert_true(s.q && s.k && s.v && s.out && s.bias);
  for (int64_t i = 0; i < nq; i++) s.q[i] = random_bf16();
  for (int64_t i = 0; i < nk; i++) s.k[i] = random_bf16();
  for (int64_t i = 0; i < nv; i++) s.v[i] = random_bf16();
  for (int64_t i = 0; i < s.nq * s.nk; i++) s.bias[i] = random_below(9) ? (float)random_below(512) / 256 - 1 : -INFINITY;
  s.p = qkv_problem_default();
  s.p.arithmetic = QKV_FAST;
  s.p.batch = s.batch;
  s.p.num_heads = s.heads;
  s.p.num_kv_heads = 1;
  s.p.seqlen_q = s.nq;
  s.p.seqlen_kv = s.nk;
  s.p.head_dim = s.d;
  s.p.head_dim_v = s.dv;
  s.p.q = qkv_bhsd(s.q, QKV_BF16, s.heads, s.nq, s.d);
  s.p.k = qkv_bhsd(s.k, QKV_BF16, 1, s.nk, s.d);
  s.p.v = qkv_bhsd(s.v, QKV_BF16, 1, s.nk, s.dv);
  s.p.out = qkv_bhsd(s.out, QKV_F32, s.heads, s.nq, s.dv);
  if (round % 4 == 1) s.p.softcap = 20;
  if (round % 5 == 2) s.p.bias = qkv_strided(s.bias, QKV_F32, 0, 0, s.nk, 1);
  s.mask = round % 2 ? qkv_causal() : qkv_window(100, 30);
  return s;
}
static void use_mask(sample *s) { s->p.mask = &s->mask, s->p.mask_count = 1; }
static void drop(sample *s) { free(s->q), free(s->k), free(s->v), free(s->out), free(s->bias); }

static int sees(const sample *s, int64_t i, int64_t j) {
  const int64_t at = i + s->nk - s->nq;
  if (s->p.bias.data && s->bias[i * s->nk + j] == -INFINITY) return 0;
  if (!s->p.mask_count) return 1;
  return s->mask.kind == QKV_MASK_CAUSAL ? j <= at : j >= at - 100 && j <= at + 30;
}

/* Row (b, h, i) in double: values and bounds. The bound: a score errs by 2 d u A in its sum of products (u = 2^-24; A the sum of
 * their magnitudes), u |s| in each of scale, softcap, bias; a weight by half a last place of bf16, 2^-8 relative, and the cubic's
 * 1e-4; sums of n weights and n products by n u. */
static void expect_row(const sample *s, int64_t b, int64_t h, int64_t i) {
  const double u = ldexp(1, -24), scale = 1 / sqrt((double)s->d);
  double *p = malloc((size_t)s->nk * sizeof *p), max = -INFINITY, eta = 0, sum = 0;
  const uint16_t *q = s->q + ((b * s->heads + h) * s->nq + i) * s->d;
  for (int64_t j = 0; j < s->nk; j++) {
    const uint16_t *k = s->k + (b * s->nk + j) * s->d;
    double dot = 0, A = 0, x;
    p[j] = -INFINITY;
    if (!sees(s, i, j)) continue;
    for (int64_t c = 0; c < s->d; c++) {
      const double t = (double)qkv__widen_bf16(q[c]) * (double)qkv__widen_bf16(k[c]);
      dot += t;
      A += fabs(t);
    }
    x = dot * scale;
    if (s->p.softcap > 0) x = s->p.softcap * tanh(x / s->p.softcap);
    if (s->p.bias.data) x += (double)s->bias[i * s->nk + j];
    p[j] = x;
    max = fmax(max, x);
    eta = fmax(eta, u * (2 * (double)s->d * A * scale + 12 * fabs(x) + 8));
  }
  for (int64_t j = 0; j < s->nk; j++) {
    p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - max);
    sum += p[j];
  }
  const double error = 2 * (eta + ldexp(1, -8) + 1e-4 + 4 * (double)s->nk * u + 2 * u * fabs(max));
  for (int64_t x = 0; x < s->dv; x++) {
    double o = 0, a = 0;
    for (int64_t j = 0; j < s->nk; j++) {
      const double v = (double)qkv__widen_bf16(s->v[(b * s->nk + j) * s->dv + x]);
      if (p[j] > 0) o += p[j] * v, a += p[j] * fabs(v);
    }
    const double got = (double)s->out[((b * s->heads + h) * s->nq + i) * s->dv + x], want = sum > 0 ? o / sum : 0;
    assert_true(fabs(got - want) <= (sum > 0 ? error * a / sum : 0) + u * fabs(want));
  }
  free(p);
}

/* Which tables this CPU has; "canonical" answers too, and must equal the canonical call. */
static int is_fast(const qkv_context *c, const qkv_problem *p) {
  char text[2048];
  assert_int_equal(qkv_describe(c, p, text, sizeof text), QKV_OK);
  return strstr(text, "arithmetic: fast bf16") != NULL;
}
static const char *const tables[] = {"amx", "avx512_bf16"};

static void reversed(void *self, void (*body)(void *arg, int64_t task, int32_t worker), void *arg, int64_t tasks) {
  (void)self;
  for (int64_t t = tasks - 1; t >= 0; t--) body(arg, t, (int32_t)(t % 3));
}

static void test_accuracy_and_bits(void **state) {
  (void)state;
  for (int t = 0; t < 2; t++) {
    int fast = 0;
    for (int round = 0; round < 44; round++) {
      sample s = make(round);
      qkv_context c = qkv_context_default();
      const size_t bytes = (size_t)(s.batch * s.heads * s.nq * s.dv) * sizeof(float);
      float *first = malloc(bytes);
      if (round % 3) use_mask(&s);
      c.isa_cap = tables[t];
      if (qkv_describe(&c, &s.p, NULL, 0) == QKV_BAD_CONTEXT) { /* another architecture */
        drop(&s), free(first);
        continue;
      }
      fast += is_fast(&c, &s.p);
      memset(s.out, 255, bytes);
      assert_int_equal(qkv_forward(&c, &s.p, NULL, 0), QKV_OK);
      for (int n = 0; n < 12; n++) expect_row(&s, random_below((uint32_t)s.batch), random_below((uint32_t)s.heads), random_below((uint32_t)s.nq));
      memcpy(first, s.out, bytes);
      /* another executor, staged operands */
      c.num_workers = 3;
      c.parallel_for = reversed;
      c.flags = QKV_FORCE_STAGE | QKV_FORCE_SPLIT;
      memset(s.out, 255, bytes);
      assert_int_equal(qkv_forward(&c, &s.p, NULL, 0), QKV_OK);
      assert_memory_equal(first, s.out, bytes);
      /* the last entry alone */
      qkv_problem one = s.p;
      one.batch = 1;
      one.q.data = s.q + (s.batch - 1) * s.p.q.stride[0];
      one.k.data = s.k + (s.batch - 1) * s.p.k.stride[0];
      one.v.data = s.v + (s.batch - 1) * s.p.v.stride[0];
      assert_int_equal(qkv_forward(NULL, &one, NULL, 0), QKV_OK);
      if (t == 0 || !is_fast(NULL, &one)) { /* NULL takes the best table, which is the first if there is one */
        c.flags = 0;
        assert_int_equal(qkv_forward(&c, &one, NULL, 0), QKV_OK);
        assert_memory_equal(first + (s.batch - 1) * s.p.out.stride[0], s.out, bytes / (size_t)s.batch);
      }
      drop(&s), free(first);
    }
    printf("%s: %d problems by its instructions\n", tables[t], fast);
  }
}

static void test_not_finite(void **state) {
  static const uint16_t odd[] = {0x7fc1, 0xffff, 0x7f80, 0xff80, 0x7f81};
  (void)state;
  for (int t = 0; t < 2; t++)
    for (int round = 0; round < 20; round++) {
      sample s = make(round);
      qkv_context c = qkv_context_default();
      const int64_t n = s.heads * s.nq * s.dv;
      float *clean = malloc((size_t)(s.batch * n) * sizeof(float));
      s.p.batch = s.batch = 1;
      use_mask(&s);
      c.isa_cap = tables[t];
      if (qkv_describe(&c, &s.p, NULL, 0) == QKV_BAD_CONTEXT) {
        drop(&s), free(clean);
        continue;
      }
      const int64_t bad = random_below((uint32_t)s.nk);
      assert_int_equal(qkv_forward(&c, &s.p, NULL, 0), QKV_OK);
      memcpy(clean, s.out, (size_t)n * sizeof(float));
      if (round % 2) /* else only the value: its weight is a number */
        for (int64_t x = 0; x < s.d; x++) s.k[bad * s.d + x] = odd[random_below(5)];
      for (int64_t x = 0; x < s.dv; x++) s.v[bad * s.dv + x] = odd[random_below(5)];
      assert_int_equal(qkv_forward(&c, &s.p, NULL, 0), QKV_OK);
      for (int64_t h = 0; h < s.heads; h++)
        for (int64_t i = 0; i < s.nq; i++) {
          const size_t at = (size_t)((h * s.nq + i) * s.dv);
          if (sees(&s, i, bad)) assert_true(isnan(s.out[at]) || isinf(s.out[at]));
          else assert_memory_equal(&s.out[at], &clean[at], (size_t)s.dv * sizeof(float));
        }
      drop(&s), free(clean);
    }
}

/* Other types, the baseline, and CPUs without the instructions: canonical bits. */
static void test_elsewhere(void **state) {
  (void)state;
  sample s = make(3);
  const size_t bytes = (size_t)(s.batch * s.heads * s.nq * s.dv) * sizeof(float);
  float *want = malloc(bytes);
  for (int round = 0; round < 3; round++) {
    qkv_problem p = s.p;
    qkv_context c = qkv_context_default();
    if (round == 0) c.isa_cap = "portable";
    if (round == 1) p.algorithm = QKV_STANDARD;
    if (round == 2) p.q.dtype = QKV_F16;
    p.arithmetic = QKV_CANONICAL;
    assert_int_equal(qkv_forward(&c, &p, NULL, 0), QKV_OK);
    memcpy(want, s.out, bytes);
    p.arithmetic = QKV_FAST;
    assert_false(is_fast(&c, &p));
    assert_int_equal(qkv_forward(&c, &p, NULL, 0), QKV_OK);
    assert_memory_equal(want, s.out, bytes);
  }
  s.p.arithmetic = 2;
  assert_int_equal(qkv_check(&s.p, NULL, 0), QKV_BAD_VALUE);
  drop(&s), free(want);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_accuracy_and_bits), cmocka_unit_test(test_not_finite),
                                     cmocka_unit_test(test_elsewhere)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

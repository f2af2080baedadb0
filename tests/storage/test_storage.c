/* 16-bit storage: the conversions against plain double arithmetic, and results against the f32 run on widened inputs, rounded once. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <qkv/qkv.h>

#include "base/half.h"

/* ---- Conversions, written from the formats' definitions ---- */

typedef struct format {
  int exponent_bits, fraction_bits;
} format;
static const format F16 = {5, 10}, BF16 = {8, 7};

static double value_of(format f, uint16_t h) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const int exponent = h >> f.fraction_bits & top, fraction = h & ((1 << f.fraction_bits) - 1);
  const double sign = h & 0x8000 ? -1 : 1;
  if (exponent == top) return fraction ? (double)NAN : sign * (double)INFINITY;
  if (exponent == 0) return sign * ldexp(fraction, 1 - bias - f.fraction_bits);
  return sign * ldexp((1 << f.fraction_bits) + fraction, exponent - bias - f.fraction_bits);
}

/* Nearest, ties to even: by the spacing of the format at x. */
static double rounded(format f, double x) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  int e;
  if (!(fabs(x) <= (double)INFINITY) || x == 0 || isinf(x)) return x;
  frexp(x, &e);
  if (e - 1 < 1 - bias) e = 2 - bias;
  const double spacing = ldexp(1, e - 1 - f.fraction_bits), r = nearbyint(x / spacing) * spacing;
  return fabs(r) >= ldexp(1, bias + 1) ? copysign((double)INFINITY, x) : r;
}

static void check_format(format f, float (*widen)(uint16_t), uint16_t (*narrow)(float)) {
  for (int h = 0; h < 65536; h++) {
    const double want = value_of(f, (uint16_t)h);
    const float got = widen((uint16_t)h);
    if (isnan(want)) assert_true(isnan(got));
    else {
      assert_true((double)got == want && !signbit(got) == !signbit(want));
      assert_int_equal(narrow(got), h);
    }
  }
  /* every exponent and sign with a stride through the fractions, and the neighbourhood of each tie */
  for (uint64_t b = 0; b < 0x100000000u; b += 4093) {
    for (int step = -1; step <= 1; step++) {
      float x;
      const uint32_t bits = (uint32_t)(((b >> 12) << 12) + (uint64_t)(int64_t)step);
      memcpy(&x, &bits, sizeof x);
      const double got = value_of(f, narrow(x));
      if (isnan(x)) assert_true(isnan(got));
      else assert_true(got == rounded(f, (double)x));
    }
  }
}

static float widen_f16(uint16_t h) { return qkv__widen_f16(h); }
static float widen_bf16(uint16_t h) { return qkv__widen_bf16(h); }
static uint16_t narrow_f16(float x) { return qkv__narrow_f16(x); }
static uint16_t narrow_bf16(float x) { return qkv__narrow_bf16(x); }

static void test_conversions(void **state) {
  (void)state;
  check_format(F16, widen_f16, narrow_f16);
  check_format(BF16, widen_bf16, narrow_bf16);
}

/* ---- Results ---- */

static uint64_t seed = 1;
static uint32_t random_below(uint32_t n) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((seed >> 33) % n);
}

typedef struct operand {
  float *wide;    /* f32 */
  uint16_t *half; /* the same, in 16 bits */
  qkv_tensor t;
} operand;

/* rows x columns with a row stride and a column stride; dtype F32, F16 or BF16. */
static operand make(int32_t dtype, int64_t rows, int64_t columns, int64_t pad, int64_t spread) {
  const int64_t stride = columns * spread + pad, n = rows * stride;
  operand o = {calloc((size_t)n, sizeof(float)), calloc((size_t)n, sizeof(uint16_t)), {0}};
  assert_non_null(o.wide);
  assert_non_null(o.half);
  for (int64_t i = 0; i < n; i++) {
    float x = (float)random_below(4096) / 1024 - 2;
    if (random_below(50) == 0) x = ldexpf(x, -20); /* subnormal in f16 */
    if (dtype == QKV_F16) x = qkv__widen_f16(o.half[i] = qkv__narrow_f16(x));
    if (dtype == QKV_BF16) x = qkv__widen_bf16(o.half[i] = qkv__narrow_bf16(x));
    o.wide[i] = x;
  }
  o.t = qkv_strided(dtype == QKV_F32 ? (void *)o.wide : (void *)o.half, dtype, 0, 0, stride, spread);
  return o;
}
static qkv_tensor as_f32(const operand *o, float *data) {
  qkv_tensor t = o->t;
  t.data = data;
  t.dtype = QKV_F32;
  return t;
}

static void test_results(void **state) {
  static const int32_t dtypes[] = {QKV_F32, QKV_F16, QKV_BF16};
  static const char *const isas[] = {"avx512", "avx2", "neon", "portable", "reference"};
  (void)state;
  int compared = 0;
  for (int round = 0; round < 81; round++) {
    const int64_t nq = 1 + random_below(150), nk = 1 + random_below(700), d = 1 + random_below(140), dv = 1 + random_below(140);
    const int64_t pad = random_below(3), spread = 1 + (round % 7 == 6);
    operand q = make(dtypes[round % 3], nq, d, pad, spread), k = make(dtypes[round / 3 % 3], nk, d, pad, spread);
    operand v = make(dtypes[round / 9 % 3], nk, dv, pad, spread), out = make(dtypes[round / 27], nq, dv, pad, spread);
    operand bias = make(dtypes[random_below(3)], nq, nk, 0, 1);
    qkv_mask causal = qkv_causal();
    qkv_problem p = qkv_problem_default();
    p.batch = p.num_heads = 1;
    p.seqlen_q = nq;
    p.seqlen_kv = nk;
    p.head_dim = d;
    p.head_dim_v = dv;
    p.algorithm = round % 5 == 4 ? QKV_STANDARD : QKV_FLASH;
    if (round & 1) p.mask = &causal, p.mask_count = 1;
    qkv_problem w = p; /* on widened inputs */
    w.q = as_f32(&q, q.wide);
    w.k = as_f32(&k, k.wide);
    w.v = as_f32(&v, v.wide);
    w.out = as_f32(&out, out.wide);
    if (round % 4 == 3) w.bias = as_f32(&bias, bias.wide);
    assert_int_equal(qkv_forward(NULL, &w, NULL, 0), QKV_OK);
    p.q = q.t;
    p.k = k.t;
    p.v = v.t;
    p.out = out.t;
    if (round % 4 == 3) p.bias = bias.t;
    operand result = make(out.t.dtype, nq, dv, pad, spread);
    p.out = result.t;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
      for (uint32_t flags = 0; flags <= QKV_FORCE_STAGE; flags += QKV_FORCE_STAGE) {
        qkv_context c = qkv_context_default();
        c.isa_cap = isas[i];
        c.flags = flags;
        const qkv_status s = qkv_forward(&c, &p, NULL, 0);
        if (s == QKV_BAD_CONTEXT) continue; /* of another architecture */
        assert_int_equal(s, QKV_OK);
        for (int64_t r = 0; r < nq; r++)
          for (int64_t x = 0; x < dv; x++) {
            const int64_t at = r * out.t.stride[2] + x * out.t.stride[3];
            if (out.t.dtype == QKV_F16) assert_int_equal(result.half[at], qkv__narrow_f16(out.wide[at]));
            else if (out.t.dtype == QKV_BF16) assert_int_equal(result.half[at], qkv__narrow_bf16(out.wide[at]));
            else assert_memory_equal(&result.wide[at], &out.wide[at], sizeof(float));
          }
        compared++;
      }
    operand *all[] = {&q, &k, &v, &out, &bias, &result};
    for (int i = 0; i < 6; i++) free(all[i]->wide), free(all[i]->half);
  }
  assert_true(compared >= 81 * 4);
}

static void test_refusals(void **state) {
  double data[64] = {0};
  qkv_problem p = qkv_problem_default();
  char text[256];
  (void)state;
  p.batch = p.num_heads = p.seqlen_q = p.seqlen_kv = 1;
  p.head_dim = 4;
  p.q = p.k = p.v = qkv_bhsd(data, QKV_F16, 1, 1, 4);
  p.out = qkv_bhsd(data + 32, QKV_F64, 1, 1, 4);
  assert_int_equal(qkv_check(&p, text, sizeof text), QKV_BAD_DTYPE);
  assert_non_null(strstr(text, "f64"));
  p.out.dtype = QKV_I8;
  assert_int_equal(qkv_check(&p, text, sizeof text), QKV_UNSUPPORTED);
  p.out.dtype = QKV_U8;
  assert_int_equal(qkv_check(&p, text, sizeof text), QKV_BAD_DTYPE);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_conversions), cmocka_unit_test(test_results), cmocka_unit_test(test_refusals)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

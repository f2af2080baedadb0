/* ALiBi slopes and T5 buckets against published values and formulas, and as biases of attention. */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- ALiBi --------------------------------------------------------------------------------------------------------- */

static void test_slopes(void **state) {
  (void)state;
  static const double twelve[12] = {.5,       .25,       .125,      .0625,     .03125,    .015625,
                                    .0078125, .00390625, .70710678, .35355339, .17677670, .08838835};
  double found[300];
  float narrow[2 * 300];
  const qkv_tensor to = qkv_per_head(found, QKV_F64);
  assert_int_equal(qkv_alibi_slopes(12, 0, 12, &to), QKV_OK);
  for (int h = 0; h < 12; h++) {
    assert_true(within(found[h] - twelve[h], 0.5e-8));
  }
  for (int n = 1; n <= 300; n++) {
    int power = 1;
    while (2 * power <= n) {
      power *= 2;
    }
    memset(narrow, 0, sizeof narrow);
    const qkv_tensor f32 = qkv_strided(narrow, QKV_F32, 0, 2, 0, 0);
    assert_int_equal(qkv_alibi_slopes(n, 0, n, &to), QKV_OK);
    assert_int_equal(qkv_alibi_slopes(n, 0, n, &f32), QKV_OK);
    for (int h = 0; h < n; h++) {
      const long double e = h < power ? -8.L * (h + 1) / power : -8.L * (2 * (h - power) + 1) / (2 * power);
      const double exact = (double)exp2l(e);
      assert_true(within(found[h] - exact, 0x1p-52 * exact)); /* one unit: both are the exact number, rounded */
      assert_true(narrow[2 * h] == (float)found[h] && narrow[2 * h + 1] == 0);
    }
  }
  for (int from = 0; from < 20; from += 3) { /* a part of the heads */
    double part[3];
    const qkv_tensor some = qkv_per_head(part, QKV_F64);
    assert_int_equal(qkv_alibi_slopes(20, 0, 20, &to), QKV_OK);
    assert_int_equal(qkv_alibi_slopes(20, from, from + 3 <= 20 ? 3 : 2, &some), QKV_OK);
    assert_memory_equal(part, found + from, sizeof(double) * (from + 3 <= 20 ? 3 : 2));
  }
  assert_int_equal(qkv_alibi_slopes(0, 0, 0, &to), QKV_OK);
  assert_int_equal(qkv_alibi_slopes(4, 2, 3, &to), QKV_BAD_VALUE);
  assert_int_equal(qkv_alibi_slopes(4, 0, 5, &to), QKV_BAD_EXTENT);
  assert_int_equal(qkv_alibi_slopes(4, 0, 4, NULL), QKV_BAD_POINTER);
  const qkv_tensor wrong = qkv_per_head(found, QKV_F16);
  assert_int_equal(qkv_alibi_slopes(4, 0, 4, &wrong), QKV_BAD_DTYPE);
}

/* ---- Buckets ------------------------------------------------------------------------------------------------------- */

/* The formula of the published models, in the arithmetic given; a float is what they use. */
#define BUCKET(name, real, logarithm, slack)                                                                     \
  static int64_t name(int64_t distance, int causal, int64_t buckets, int64_t max_distance) {                     \
    int64_t bucket = 0, n = -distance;                                                                           \
    if (causal) {                                                                                                \
      n = n > 0 ? n : 0;                                                                                         \
    } else {                                                                                                     \
      buckets /= 2;                                                                                              \
      bucket = distance > 0 ? buckets : 0;                                                                       \
      n = n < 0 ? -n : n;                                                                                        \
    }                                                                                                            \
    const int64_t exact = buckets / 2;                                                                           \
    if (n < exact) {                                                                                             \
      return bucket + n;                                                                                         \
    }                                                                                                            \
    const real whole = logarithm((real)max_distance / (real)exact);                                              \
    const real part = logarithm((real)n / (real)exact) / whole * (real)(buckets - exact);                        \
    const int64_t far = exact + (int64_t)(part + (real)(slack));                                                 \
    return bucket + (far < buckets - 1 ? far : buckets - 1);                                                     \
  }
BUCKET(published, float, logf, 0)
BUCKET(exactly, long double, logl, 1e-13L) /* powers that are whole are not missed */

static int64_t bucket_of(const qkv_relative *r, int64_t distance) {
  int64_t bucket = -1;
  assert_int_equal(qkv_relative_bucket(r, distance, &bucket), QKV_OK);
  return bucket;
}

static void test_buckets(void **state) {
  (void)state;
  static const int64_t settings[][2] = {{32, 128}, {32, 256}, {64, 128}, {320, 800}, {16, 1000}, {4, 3}, {8, 5}, {30, 100},
                                        {33, 99},  {1024, 1100}, {6, 2147483647}, {6, 81}, {12, 93750}};
  for (size_t n = 0; n < sizeof settings / sizeof *settings; n++) {
    for (int causal = 0; causal < 2; causal++) {
      qkv_relative r = qkv_relative_default();
      r.causal = causal;
      r.num_buckets = settings[n][0];
      r.max_distance = settings[n][1];
      const int64_t exact = (causal ? r.num_buckets : r.num_buckets / 2) / 2;
      if (r.max_distance <= exact) {
        assert_int_equal(qkv_relative_check(&r, NULL, 0), QKV_BAD_EXTENT);
        continue;
      }
      for (int64_t k = -1500; k <= 1500; k += r.num_buckets > 100 ? 7 : 1) {
        const int64_t distance = n == 10 ? k * 1400000 + k : k, found = bucket_of(&r, distance);
        const int64_t expected = exactly(distance, causal, r.num_buckets, r.max_distance);
        if (found != expected) {
          fail_msg("buckets %d, max_distance %d, causal %d, distance %d: bucket %d, not %d", (int)r.num_buckets,
                   (int)r.max_distance, causal, (int)distance, (int)found, (int)expected);
        }
        if (n == 0) { /* T5's own setting: float makes no difference */
          assert_int_equal(found, published(distance, causal, 32, 128));
        }
      }
    }
  }
}

/* As the table in T5: eight exact distances, then ranges, mirrored for keys ahead. */
static void test_default_buckets(void **state) {
  (void)state;
  static const int64_t begin[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91};
  const qkv_relative r = qkv_relative_default();
  for (int64_t n = 0; n < 200; n++) {
    int64_t bucket = 15;
    while (begin[bucket] > n) {
      bucket--;
    }
    assert_int_equal(bucket_of(&r, -n), bucket);
    assert_int_equal(bucket_of(&r, n), n == 0 ? 0 : 16 + bucket);
  }
  assert_int_equal(bucket_of(&r, INT64_MIN), 15);
  assert_int_equal(bucket_of(&r, INT64_MAX), 31);
}

static qkv_relative relative_of(const array *table, const array *bias) {
  qkv_relative r = qkv_relative_default();
  r.batch = bias->n[0];
  r.num_heads = bias->n[1];
  r.seqlen_q = bias->n[2];
  r.seqlen_kv = bias->n[3];
  r.num_buckets = table->n[2];
  r.table = table->t;
  r.bias = bias->t;
  return r;
}

static void run(const qkv_relative *r) {
  char text[256];
  const qkv_status status = qkv_relative_forward(NULL, r);
  if (status != QKV_OK) {
    qkv_relative_check(r, text, sizeof text);
    fail_msg("status %d: %s", (int)status, text);
  }
}

static void test_bias(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(60); n++) {
    rng g = {79, (uint64_t)n, 0};
    const int f64 = rng_chance(&g, 30);
    const int32_t narrow[3] = {QKV_F32, QKV_F16, QKV_BF16};
    const int32_t from = f64 ? QKV_F64 : narrow[rng_below(&g, 3)], to = f64 ? QKV_F64 : narrow[rng_below(&g, 3)];
    array table = array_make(from, (int)rng_below(&g, LAYOUTS), 1, rng_range(&g, 1, 4), 2 * rng_range(&g, 2, 30), 1);
    array bias = array_make(to, (int)rng_below(&g, LAYOUTS), rng_range(&g, 1, 2), table.n[1], rng_range(&g, 0, 60),
                            rng_range(&g, 0, 400));
    array expected = array_make(to, DENSE, bias.n[0], bias.n[1], bias.n[2], bias.n[3]);
    array_random(&table, (uint64_t)n);
    qkv_relative r = relative_of(&table, &bias);
    r.causal = rng_chance(&g, 50);
    r.max_distance = table.n[2] + rng_range(&g, 0, 200);
    r.q_position = rng_range(&g, -300, 300);
    r.kv_position = rng_range(&g, -300, 300);
    run(&r);
    array_gaps(&bias, "case %d", (int)n);
    for (int64_t b = 0; b < bias.n[0]; b++) {
      for (int64_t h = 0; h < bias.n[1]; h++) {
        for (int64_t i = 0; i < bias.n[2]; i++) {
          for (int64_t j = 0; j < bias.n[3]; j++) {
            const int64_t bucket = exactly(r.kv_position + j - r.q_position - i, r.causal, r.num_buckets, r.max_distance);
            array_set(&expected, b, h, i, j, array_get(&table, 0, h, bucket, 0));
          }
        }
      }
    }
    array_same(&expected, &bias, "case %d", (int)n);
    array_free(&table);
    array_free(&bias);
    array_free(&expected);
  }
}

/* The stated order: four sums by key modulo 4 over entries, rows and keys, then (0 + 1) + (2 + 3). */
static void test_gradient(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(60); n++) {
    rng g = {80, (uint64_t)n, 0};
    const int f64 = rng_chance(&g, 30);
    const int32_t narrow[3] = {QKV_F32, QKV_F16, QKV_BF16};
    const int32_t from = f64 ? QKV_F64 : narrow[rng_below(&g, 3)], to = f64 ? QKV_F64 : narrow[rng_below(&g, 3)];
    array table = array_make(to, (int)rng_below(&g, LAYOUTS), 1, rng_range(&g, 1, 3), rng_range(&g, 4, 40), 1);
    array bias = array_make(from, (int)rng_below(&g, LAYOUTS), rng_range(&g, 1, 2), table.n[1], rng_range(&g, 0, 40),
                            rng_range(&g, 0, 300));
    array expected = array_make(to, DENSE, 1, table.n[1], table.n[2], 1);
    array_random(&bias, (uint64_t)n);
    array_random(&table, (uint64_t)n);
    array_copy(&expected, &table);
    qkv_relative r = relative_of(&table, &bias);
    r.causal = rng_chance(&g, 50);
    r.q_position = rng_range(&g, -100, 100);
    r.accumulate = rng_chance(&g, 50);
    if (rng_chance(&g, 30)) { /* an input may be broadcast */
      r.bias.stride[2] = 0;
    }
    for (int64_t h = 0; h < table.n[1]; h++) {
      double sum[40][4] = {{0}};
      for (int64_t b = 0; b < bias.n[0]; b++) {
        for (int64_t i = 0; i < bias.n[2]; i++) {
          for (int64_t j = 0; j < bias.n[3]; j++) {
            const int64_t bucket = exactly(j - r.q_position - i, r.causal, r.num_buckets, 128);
            sum[bucket][j % 4] += array_get(&bias, b, h, r.bias.stride[2] == 0 ? 0 : i, j);
          }
        }
      }
      for (int64_t k = 0; k < table.n[2]; k++) {
        const double total = (sum[k][0] + sum[k][1]) + (sum[k][2] + sum[k][3]);
        const double all = r.accumulate ? total + array_get(&table, 0, h, k, 0) : total;
        array_set(&expected, 0, h, k, 0, f64 ? all : (double)(float)all);
      }
    }
    assert_int_equal(qkv_relative_backward(NULL, &r), QKV_OK);
    array_same(&expected, &table, "case %d", (int)n);
    array_gaps(&table, "case %d", (int)n);
    array_free(&table);
    array_free(&bias);
    array_free(&expected);
  }
}

static qkv_status forward(const qkv_context *context, const void *r) { return qkv_relative_forward(context, r); }
static qkv_status backward(const qkv_context *context, const void *r) { return qkv_relative_backward(context, r); }

static void test_executors(void **state) {
  (void)state;
  array table = array_make(QKV_F32, DENSE, 1, 5, 32, 1), bias = array_make(QKV_F32, ODD, 2, 5, 300, 500);
  array_random(&table, 1);
  qkv_relative r = relative_of(&table, &bias);
  same_under_executors(forward, &r, &bias, "forward");
  array_random(&bias, 2);
  same_under_executors(backward, &r, &table, "backward");
  array_free(&table);
  array_free(&bias);
}

/* One row of all distances, seen through strides -1 and +1, gives attention the bits of the square matrix. */
static void test_attention_with_one_row(void **state) {
  (void)state;
  enum { H = 3, Q = 90, K = 130, D = 8 };
  array table = array_make(QKV_F32, DENSE, 1, H, 32, 1), square = array_make(QKV_F32, DENSE, 1, H, Q, K);
  array line = array_make(QKV_F32, DENSE, 1, H, 1, Q + K - 1), out[2], q = array_make(QKV_F32, DENSE, 1, H, Q, D);
  array k = array_make(QKV_F32, DENSE, 1, H, K, D), v = array_make(QKV_F32, DENSE, 1, H, K, D);
  array_random(&table, 1);
  array_random(&q, 2);
  array_random(&k, 3);
  array_random(&v, 4);
  qkv_relative full = relative_of(&table, &square), one = relative_of(&table, &line);
  full.q_position = K - Q;
  one.q_position = K - Q;
  one.kv_position = -(Q - 1);
  run(&full);
  run(&one);
  for (int n = 0; n < 2; n++) {
    out[n] = array_make(QKV_F32, DENSE, 1, H, Q, D);
    qkv_problem p = qkv_problem_default();
    p.batch = 1;
    p.num_heads = H;
    p.seqlen_q = Q;
    p.seqlen_kv = K;
    p.head_dim = D;
    p.q = q.t;
    p.k = k.t;
    p.v = v.t;
    p.out = out[n].t;
    p.bias = n == 0 ? square.t : qkv_strided((float *)line.t.data + Q - 1, QKV_F32, 0, Q + K - 1, -1, 1);
    assert_int_equal(qkv_forward(NULL, &p, NULL, 0), QKV_OK);
  }
  array_same(&out[0], &out[1], "through strides");
  array_free(&table);
  array_free(&square);
  array_free(&line);
  array_free(&q);
  array_free(&k);
  array_free(&v);
  array_free(&out[0]);
  array_free(&out[1]);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_slopes),   cmocka_unit_test(test_buckets),   cmocka_unit_test(test_default_buckets),
    cmocka_unit_test(test_bias),     cmocka_unit_test(test_gradient),  cmocka_unit_test(test_executors),
    cmocka_unit_test(test_attention_with_one_row),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }

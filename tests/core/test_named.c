#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* mmap's MAP_ANONYMOUS and MAP_NORESERVE */
#endif
/* Cases with known answers: what went wrong in other libraries, and the table of semantics, one test per line. */
#include "common.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const float minus_infinity = -INFINITY;

/* Contiguous f32 tensors of one shape. */
static qkv_problem simple(int64_t batch, int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys, int64_t dim,
                          int64_t dim_v, const float *q, const float *k, const float *v, float *out, float *lse) {
  qkv_problem p = qkv_problem_default();
  p.batch = batch;
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.seqlen_q = rows;
  p.seqlen_kv = keys;
  p.head_dim = dim;
  p.head_dim_v = dim_v;
  p.q = qkv_bhsd(q, QKV_F32, heads, rows, dim);
  p.k = qkv_bhsd(k, QKV_F32, kv_heads, keys, dim);
  p.v = qkv_bhsd(v, QKV_F32, kv_heads, keys, dim_v);
  p.out = qkv_bhsd(out, QKV_F32, heads, rows, dim_v);
  if (lse != NULL) {
    p.lse = qkv_bhs(lse, QKV_F32, heads, rows);
  }
  return p;
}

static void run_filled(const char *isa, const qkv_problem *p, float *out, size_t outs, float *lse, size_t lses) {
  memset(out, 0xff, outs * sizeof *out);
  if (lse != NULL) {
    memset(lse, 0xff, lses * sizeof *lse);
  }
  test_run(isa, p);
}

#define EVERY_ISA        for (int isa_index = 0; isa_index < test_isas; isa_index++)
#define EVERY_ALGORITHM  for (int32_t algorithm = QKV_FLASH; algorithm <= QKV_STANDARD; algorithm++)
#define ISA              (test_isa[isa_index])
#define COUNT(array)     (sizeof(array) / sizeof((array)[0]))
#define RUN(p, out, lse) run_filled(ISA, (p), (out), COUNT(out), (lse), COUNT(lse))

static void near_value(double computed, double expected, double tolerance) {
  if (!(fabs(computed - expected) <= tolerance)) {
    fail_msg("computed %.17g, expected %.17g within %g", computed, expected, tolerance);
  }
}

/* A window of two numbers of which none is a float: equality of floats without a warning. */
static void exactly(double computed, double expected) {
  if (!(computed >= expected && computed <= expected)) {
    fail_msg("computed %.17g, expected exactly %.17g", computed, expected);
  }
}

/* Which keys each row sees, read from the result alone: uniform weights, V = identity. seen[i * keys + j]. */
static void read_visible(const char *isa, qkv_problem p, unsigned char *seen) {
  int64_t rows = p.seqlen_q, keys = p.seqlen_kv;
  float *q = test_alloc((size_t)rows * sizeof *q), *k = test_alloc((size_t)keys * sizeof *k);
  float *v = test_alloc((size_t)(keys * keys) * sizeof *v), *out = test_alloc((size_t)(rows * keys) * sizeof *out);
  for (int64_t j = 0; j < keys; j++) {
    v[j * keys + j] = 1;
  }
  p.batch = p.num_heads = p.num_kv_heads = p.head_dim = 1;
  p.head_dim_v = keys;
  p.q = qkv_bhsd(q, QKV_F32, 1, rows, 1);
  p.k = qkv_bhsd(k, QKV_F32, 1, keys, 1);
  p.v = qkv_bhsd(v, QKV_F32, 1, keys, keys);
  p.out = qkv_bhsd(out, QKV_F32, 1, rows, keys);
  test_run(isa, &p);
  for (int64_t i = 0; i < rows; i++) {
    int count = 0;
    for (int64_t j = 0; j < keys; j++) {
      count += out[i * keys + j] > 0;
    }
    for (int64_t j = 0; j < keys; j++) {
      seen[i * keys + j] = out[i * keys + j] > 0;
      near_value(out[i * keys + j], seen[i * keys + j] ? 1.0 / count : 0, 1e-7);
    }
  }
  free(q);
  free(k);
  free(v);
  free(out);
}

/* rows: strings of '1' and '.' */
static void expect_visible(qkv_problem p, const char *const *rows) {
  unsigned char seen[256];
  EVERY_ISA {
    read_visible(ISA, p, seen);
    for (int64_t i = 0; i < p.seqlen_q; i++) {
      for (int64_t j = 0; j < p.seqlen_kv; j++) {
        if (seen[i * p.seqlen_kv + j] != (rows[i][j] == '1')) {
          fail_msg("isa %s: row %d key %d is %s", ISA, (int)i, (int)j, seen[i * p.seqlen_kv + j] ? "visible" : "invisible");
        }
      }
    }
  }
}

static qkv_problem shape_only(int64_t rows, int64_t keys, const qkv_mask *mask, int64_t count) {
  qkv_problem p = qkv_problem_default();
  p.seqlen_q = rows;
  p.seqlen_kv = keys;
  p.mask = mask;
  p.mask_count = count;
  return p;
}

/* ---- Rows that see nothing; bias as a mask ------------------------------------------------------------------------- */

static const float three_values[] = {1, 2, 3, 4, 5, 9};

static void test_row_without_keys(void **state) {
  (void)state;
  const float q[] = {1, 1, 1, 1}, k[] = {1, 2, 3};
  const uint8_t visible[] = {1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0};
  float out[8], lse[4];
  qkv_problem p = simple(1, 1, 1, 4, 3, 1, 2, q, k, three_values, out, lse);
  qkv_mask mask = qkv_dense(qkv_bhsd(visible, QKV_U8, 1, 4, 3), 0);
  p.mask = &mask;
  p.mask_count = 1;
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    for (int i = 1; i < 4; i += 2) {
      exactly(out[2 * i], 0);
      exactly(out[2 * i + 1], 0);
      assert_false(signbit(out[2 * i]));
      assert_true(isinf(lse[i]) && lse[i] < 0);
    }
    exactly(out[4], 1);
    exactly(out[5], 2);
    near_value(lse[2], 1, 1e-6);
  }
}

static void test_lowest_bias_is_a_mean(void **state) {
  (void)state;
  const float q[] = {1, 1, 1}, k[] = {1, 2, 3};
  const float bias[] = {-1e30f, -1e30f, -1e30f, -FLT_MAX, -FLT_MAX, -FLT_MAX, -INFINITY, -INFINITY, -INFINITY};
  float out[6], lse[3];
  qkv_problem p = simple(1, 1, 1, 3, 3, 1, 2, q, k, three_values, out, lse);
  p.bias = qkv_bhsd(bias, QKV_F32, 1, 3, 3);
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    for (int i = 0; i < 2; i++) {
      exactly(out[2 * i], 3);
      exactly(out[2 * i + 1], 5);
      assert_true(isfinite(lse[i]));
    }
    exactly(out[4], 0);
    exactly(out[5], 0);
    assert_true(isinf(lse[2]));
  }
}

static void test_finite_bias_is_no_mask(void **state) {
  (void)state;
  /* A key at the lowest float beside another has weight 0, but it is visible: its NaN counts. -inf hides it. */
  const float q[] = {1}, k[] = {1, 2};
  float v[] = {7, NAN}, bias[] = {0, -FLT_MAX}, out[1], lse[1];
  qkv_problem p = simple(1, 1, 1, 1, 2, 1, 1, q, k, v, out, lse);
  p.bias = qkv_bhsd(bias, QKV_F32, 1, 1, 2);
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    bias[1] = -FLT_MAX;
    RUN(&p, out, lse);
    assert_true(isnan(out[0]));
    bias[1] = -INFINITY;
    RUN(&p, out, lse);
    exactly(out[0], 7);
  }
}

/* ---- Sizes of scores ----------------------------------------------------------------------------------------------- */

static void test_large_negative_logits(void **state) {
  (void)state;
  const float q[] = {1}, identity[] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
  const double expected[] = {0.66524, 0.24473, 0.09003};
  float out[3], lse[1];
  EVERY_ALGORITHM EVERY_ISA {
    for (int far = 0; far < 2; far++) {
      float base = far ? -60000 : -100;
      const float k[] = {base, base - 1, base - 2}, zeros[3] = {0, 0, 0};
      qkv_problem p = simple(1, 1, 1, 1, 3, 1, 3, q, k, identity, out, lse);
      p.algorithm = algorithm;
      p.softmax_scale = 1;
      RUN(&p, out, lse);
      test_accurate(&p, "logits from %g", (double)base);
      for (int j = 0; j < 3; j++) {
        near_value(out[j], expected[j], far ? 1e-2 : 1e-5);
      }
      /* The same logits as a bias. */
      p.k = qkv_bhsd(zeros, QKV_F32, 1, 3, 1);
      p.bias = qkv_bhsd(k, QKV_F32, 1, 1, 3);
      RUN(&p, out, lse);
      test_accurate(&p, "bias from %g", (double)base);
    }
  }
}

static void test_huge_dot_product(void **state) {
  (void)state;
  float q[128], k[3 * 128], v[3] = {1, 2, 4}, out[1], lse[1];
  for (int x = 0; x < 128; x++) {
    q[x] = k[x] = k[128 + x] = k[256 + x] = 256;
  }
  EVERY_ALGORITHM EVERY_ISA {
    for (int64_t keys = 1; keys <= 3; keys += 2) {
      qkv_problem p = simple(1, 1, 1, 1, keys, 128, 1, q, k, v, out, lse);
      p.algorithm = algorithm;
      p.softmax_scale = 1;
      RUN(&p, out, lse);
      near_value(out[0], keys == 1 ? 1 : 7.0 / 3, keys == 1 ? 0 : 1e-6);
      near_value(lse[0], 8388608 + log((double)keys), 64); /* 128 roundings of the chain */
    }
  }
}

static void test_softcap_saturates(void **state) {
  (void)state;
  const float q[] = {1}, k[] = {4450, -10000, 0}, v[] = {1, 1, 1};
  float out[1], lse[1], scores[3];
  qkv_problem p = simple(1, 1, 1, 1, 3, 1, 1, q, k, v, out, lse);
  p.softmax_scale = 1;
  p.softcap = 50;
  qkv_tensor to = qkv_bhsd(scores, QKV_F32, 1, 1, 3);
  EVERY_ISA {
    qkv_context c = test_context(ISA);
    assert_int_equal(qkv_scores(&c, &p, QKV_SCORES_CAPPED, NULL, &to), QKV_OK);
    near_value(scores[0], 50, 1e-5);
    near_value(scores[1], -50, 1e-5);
    exactly(scores[2], 0);
    assert_int_equal(qkv_scores(&c, &p, QKV_SCORES_RAW, NULL, &to), QKV_OK);
    near_value(scores[0], 4450, 1e-2);
    near_value(scores[1], -10000, 1e-2);
    RUN(&p, out, lse);
    near_value(lse[0], 50, 1e-4);
  }
}

static void test_softcap_before_mask(void **state) {
  (void)state;
  /* Cap 1, scores [0, masked]: a mask inside the cap would give the masked key exp(-1) / (1 + exp(-1)) = 0.26894. */
  const float q[] = {1}, k[] = {0, 3}, identity[] = {1, 0, 0, 1};
  const uint8_t visible[] = {1, 0};
  float out[2], lse[1];
  qkv_mask mask = qkv_dense(qkv_bhsd(visible, QKV_U8, 1, 1, 2), 0);
  EVERY_ALGORITHM EVERY_ISA {
    qkv_problem p = simple(1, 1, 1, 1, 2, 1, 2, q, k, identity, out, lse);
    p.algorithm = algorithm;
    p.softcap = 1;
    p.mask = &mask;
    p.mask_count = 1;
    RUN(&p, out, lse);
    exactly(out[0], 1);
    exactly(out[1], 0);
    p.mask_count = 0;
    const float bias[] = {0, minus_infinity};
    p.bias = qkv_bhsd(bias, QKV_F32, 1, 1, 2);
    RUN(&p, out, lse);
    exactly(out[0], 1);
    exactly(out[1], 0);
  }
}

static void test_many_equal_logits(void **state) {
  (void)state;
  enum { N = 4096 };
  float *k = test_alloc(N * sizeof *k), *v = test_alloc(N * sizeof *v), *w = test_alloc(N * sizeof *w);
  const float q[] = {1};
  float out[1], lse[1];
  for (int j = 0; j < N; j++) {
    k[j] = 3;
    v[j] = 1;
  }
  qkv_problem p = simple(1, 1, 1, 1, N, 1, 1, q, k, v, out, lse);
  qkv_tensor to = qkv_bhsd(w, QKV_F32, 1, 1, N);
  EVERY_ISA {
    RUN(&p, out, lse);
    exactly(out[0], 1);
    near_value(lse[0], 3 + log(N), 4e-6);
    qkv_context c = test_context(ISA);
    assert_int_equal(qkv_scores(&c, &p, QKV_WEIGHTS, NULL, &to), QKV_OK);
    double sum = 0;
    for (int j = 0; j < N; j++) {
      sum += w[j];
    }
    near_value(sum, 1, 3e-6);
  }
  free(k);
  free(v);
  free(w);
}

static void test_smallest_weight(void **state) {
  (void)state;
  /* With a scale of ln 2 the scores are powers of two. A weight of 2^-125 (f64: 2^-1021) counts, anything below is 0. */
  const float q[] = {1}, v[] = {0, 0x1p100f};
  const double dq[] = {1}, dv[] = {0, 0x1p1000};
  float out[1], lse[1];
  double dout = -1;
  EVERY_ALGORITHM EVERY_ISA {
    for (int below = 0; below < 2; below++) {
      const float k[] = {0, below ? nextafterf(-125, -200) : -125};
      const double dk[] = {0, below ? nextafter(-1021, -2000) : -1021};
      qkv_problem p = simple(1, 1, 1, 1, 2, 1, 1, q, k, v, out, lse);
      p.algorithm = algorithm;
      p.softmax_scale = 0x1.62e42fefa39efp-1;
      RUN(&p, out, lse);
      exactly(out[0], below ? 0 : 0x1p-25);
      p.q = qkv_bhsd(dq, QKV_F64, 1, 1, 1);
      p.k = qkv_bhsd(dk, QKV_F64, 1, 2, 1);
      p.v = qkv_bhsd(dv, QKV_F64, 1, 2, 1);
      p.out = qkv_bhsd(&dout, QKV_F64, 1, 1, 1);
      test_run(ISA, &p);
      exactly(dout, below ? 0 : 0x1p-21);
    }
  }
}

static void test_visible_only_at_the_end(void **state) {
  (void)state;
  enum { N = 600 };
  float k[N], v[N], out[1], lse[1];
  const float q[] = {-1};
  uint8_t visible[N] = {0};
  for (int j = 0; j < N; j++) {
    k[j] = (float)j;
    v[j] = j < N - 10 ? NAN : (float)j;
    visible[j] = j >= N - 10;
  }
  qkv_mask mask = qkv_dense(qkv_bhsd(visible, QKV_U8, 1, 1, N), 0);
  qkv_problem p = simple(1, 1, 1, 1, N, 1, 1, q, k, v, out, lse);
  p.mask = &mask;
  p.mask_count = 1;
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    assert_true(isfinite(out[0]) && out[0] >= 590 && out[0] <= 599);
    test_accurate(&p, "10 keys at the end of 600");
  }
}

/* ---- Causal, windows, alignment ------------------------------------------------------------------------------------ */

static void test_causal_alignment(void **state) {
  (void)state;
  const qkv_mask end = qkv_causal(), start = qkv_causal_start();
  static const char *const two_five[] = {"1111.", "11111"};
  static const char *const five_two[] = {"..", "..", "..", "1.", "11"};
  static const char *const two_five_start[] = {"1....", "11..."};
  static const char *const five_two_start[] = {"1.", "11", "11", "11", "11"};
  static const char *const explicit_3[] = {"1111.", "11111"};
  static const char *const explicit_minus_1[] = {".....", "1...."};
  expect_visible(shape_only(2, 5, &end, 1), two_five);
  expect_visible(shape_only(5, 2, &end, 1), five_two);
  expect_visible(shape_only(2, 5, &start, 1), two_five_start);
  expect_visible(shape_only(5, 2, &start, 1), five_two_start);
  qkv_problem p = shape_only(2, 5, &end, 1);
  p.align = QKV_ALIGN_START;
  expect_visible(p, two_five_start);
  int32_t position = 3;
  p.align = QKV_ALIGN_EXPLICIT;
  p.q_position = &position;
  expect_visible(p, explicit_3);
  position = -1;
  expect_visible(p, explicit_minus_1);
}

static void test_start_aligned_single_query(void **state) {
  (void)state;
  float q[4] = {1, 2, 3, 4}, k[64], v[64], out[4], lse[1];
  for (int x = 0; x < 64; x++) {
    k[x] = (float)(x % 7) - 3;
    v[x] = (float)(x * x);
  }
  qkv_mask mask = qkv_causal_start();
  qkv_problem p = simple(1, 1, 1, 1, 16, 4, 4, q, k, v, out, lse);
  p.mask = &mask;
  p.mask_count = 1;
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    for (int x = 0; x < 4; x++) {
      exactly(out[x], v[x]);
    }
  }
}

static void test_windows(void **state) {
  (void)state;
  static const char *const three_keys[] = {"1....", "11...", "111..", ".111.", "..111"};
  static const char *const left_3[] = {"1....", "11...", "111..", "1111.", ".1111"};
  static const char *const self[] = {"1....", ".1...", "..1..", "...1.", "....1"};
  static const char *const left_1_right_2[] = {"111..", "1111.", ".1111", "..111", "...11"};
  static const char *const right_1[] = {"11...", "111..", "1111.", "11111", "11111"};
  static const char *const left_1[] = {"11111", "11111", ".1111", "..111", "...11"};
  static const char *const all[] = {"11111", "11111", "11111", "11111", "11111"};
  const struct {
    qkv_mask mask;
    const char *const *rows;
  } cases[] = {{qkv_window_keys(3), three_keys},   {qkv_window(3, 0), left_3},   {qkv_window(0, 0), self},
               {qkv_window(1, 2), left_1_right_2}, {qkv_window(-1, 1), right_1}, {qkv_window(1, -1), left_1},
               {qkv_window(-1, -1), all},          {qkv_window(4, 4), all}};
  for (size_t n = 0; n < COUNT(cases); n++) {
    expect_visible(shape_only(5, 5, &cases[n].mask, 1), cases[n].rows);
  }
}

static void test_causal_and_mask(void **state) {
  (void)state;
  const uint8_t bytes[] = {1, 0, 1, 1, 0}; /* by key, broadcast over rows */
  qkv_tensor by_key = qkv_strided(bytes, QKV_U8, 0, 0, 0, 1);
  const qkv_mask terms[] = {qkv_causal(), qkv_dense(by_key, 0)};
  static const char *const both[] = {"1....", "1....", "1.1..", "1.11.", "1.11."};
  expect_visible(shape_only(5, 5, terms, 2), both);
  const qkv_mask window_or_prefix[] = {qkv_causal(), qkv_window(1, 0), qkv_or(qkv_prefix(1))};
  static const char *const sink_window[] = {"1....", "11...", "111..", "1.11.", "1..11"};
  expect_visible(shape_only(5, 5, window_or_prefix, 3), sink_window);
}

static void test_documents(void **state) {
  (void)state;
  const int32_t ids[] = {4, 4, -1, 4, -1}, own[] = {-1, 4, 9};
  qkv_mask mask = qkv_documents(qkv_strided(ids, QKV_I32, 5, 0, 0, 1));
  static const char *const same[] = {"11.1.", "11.1.", "..1.1", "11.1.", "..1.1"};
  static const char *const last_three[] = {"..1.1", "11.1.", "..1.1"};
  static const char *const seven[] = {".....", ".....", "11.1.", "11.1.", "..1.1", "11.1.", "..1.1"};
  static const char *const own_ids[] = {"..1.1", "11.1.", "....."};
  expect_visible(shape_only(5, 5, &mask, 1), same);
  expect_visible(shape_only(3, 5, &mask, 1), last_three);
  expect_visible(shape_only(7, 5, &mask, 1), seven); /* no key at a negative position: nothing visible */
  mask.u = qkv_strided(own, QKV_I32, 3, 0, 1, 0);
  expect_visible(shape_only(3, 5, &mask, 1), own_ids);
}

static void test_dense_bytes(void **state) {
  (void)state;
  const uint8_t bytes[] = {0, 2, 255, 0x80};
  static const char *const rows[] = {".111", ".111"};
  static const char *const from_2[] = {"11.1", "11.1"};
  qkv_mask mask = qkv_dense(qkv_strided(bytes, QKV_U8, 0, 0, 0, 1), 0);
  expect_visible(shape_only(2, 4, &mask, 1), rows);
  mask = qkv_dense(qkv_strided(bytes, QKV_U8, 0, 0, 0, 1), 2);
  expect_visible(shape_only(2, 4, &mask, 1), from_2);
}

static void test_lengths_move_positions(void **state) {
  (void)state;
  const int32_t begin = 2, end = 5, queries = 2;
  const qkv_mask mask = qkv_causal();
  qkv_problem p = shape_only(3, 6, &mask, 1);
  p.kv_begin = &begin;
  p.kv_length = &end;
  p.q_length = &queries;
  static const char *const rows[] = {"..11..", "..111.", "......"};
  expect_visible(p, rows);
}

/* ---- Shapes -------------------------------------------------------------------------------------------------------- */

static void test_broadcast_bias_shapes(void **state) {
  (void)state;
  /* Axes of extent 1 with absurd strides must not matter: (1,1,L,1), (B,1,1,S), (1,H,L,S), mask (B,1,1,S). */
  enum { B = 2, H = 2, L = 3, S = 4 };
  const int64_t absurd = (int64_t)1 << 60;
  float q[B * H * L], k[B * H * S], v[B * H * S], out[B * H * L], lse[B * H * L], bias[H * L * S];
  for (int x = 0; x < B * H * S; x++) {
    k[x] = (float)(x % 5) - 2;
    v[x] = (float)x;
  }
  for (int x = 0; x < B * H * L; x++) {
    q[x] = (float)(x % 3) - 1;
  }
  for (int x = 0; x < H * L * S; x++) {
    bias[x] = (float)(x % 11) / 4;
  }
  qkv_problem p = simple(B, H, H, L, S, 1, 1, q, k, v, out, lse);
  const qkv_tensor biases[] = {qkv_strided(bias, QKV_F32, 0, 0, 1, 0), qkv_strided(bias, QKV_F32, S, 0, 0, 1),
                               qkv_strided(bias, QKV_F32, 0, L * S, S, 1)};
  EVERY_ISA {
    for (size_t n = 0; n < COUNT(biases); n++) {
      p.bias = biases[n];
      RUN(&p, out, lse);
      test_accurate(&p, "bias shape %d", (int)n);
    }
  }
  p.bias.data = NULL;
  uint8_t visible[B * S] = {1, 0, 1, 1, 0, 0, 1, 0};
  qkv_mask mask = qkv_dense(qkv_strided(visible, QKV_U8, S, 0, 0, 1), 0);
  p.mask = &mask;
  p.mask_count = 1;
  EVERY_ISA {
    RUN(&p, out, lse);
    test_accurate(&p, "mask (B,1,1,S)");
  }
  /* Extents of 1 themselves. */
  qkv_problem one = simple(1, 1, 1, 1, 1, 1, 1, q, k, v + 1, out, lse);
  one.q.stride[0] = one.q.stride[1] = one.q.stride[2] = one.q.stride[3] = absurd;
  one.k.stride[0] = one.k.stride[1] = one.k.stride[2] = one.k.stride[3] = -absurd;
  one.v.stride[0] = one.v.stride[1] = one.v.stride[2] = one.v.stride[3] = absurd;
  one.out.stride[0] = one.out.stride[1] = one.out.stride[2] = one.out.stride[3] = absurd;
  one.lse.stride[0] = one.lse.stride[1] = one.lse.stride[2] = absurd;
  one.bias = qkv_strided(bias, QKV_F32, absurd, absurd, absurd, absurd);
  EVERY_ISA {
    RUN(&one, out, lse);
    exactly(out[0], 1);
  }
}

static void test_bias_beyond_4_gib(void **state) {
  (void)state;
  enum { ROWS = 3, KEYS = 4 };
  const int64_t strides[] = {((int64_t)1 << 31) + 1024, ((int64_t)1 << 32) + 1024};
  if (sizeof(void *) < 8) {
    skip();
  }
  for (int n = 0; n < 2; n++) {
    size_t bytes = (size_t)(2 * strides[n] + KEYS) * sizeof(float);
    float *bias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bias == MAP_FAILED) {
      skip();
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < KEYS; j++) {
        bias[i * strides[n] + j] = j == i ? 0 : minus_infinity;
      }
    }
    const float q[ROWS] = {1, 1, 1}, k[KEYS] = {1, 1, 1, 1}, v[KEYS] = {5, 6, 7, 8};
    float out[ROWS], lse[ROWS];
    qkv_problem p = simple(1, 1, 1, ROWS, KEYS, 1, 1, q, k, v, out, lse);
    p.bias = qkv_strided(bias, QKV_F32, 0, 0, strides[n], 1);
    EVERY_ISA {
      RUN(&p, out, lse);
      for (int i = 0; i < ROWS; i++) {
        exactly(out[i], 5 + i);
      }
    }
    munmap(bias, bytes);
  }
}

static void test_grouped_heads(void **state) {
  (void)state;
  const float q[] = {1, 1, 1, 1}, k[] = {1, 1}, v[] = {10, 20};
  const float expected[] = {10, 10, 20, 20};
  float out[4], lse[4];
  qkv_problem p = simple(1, 4, 2, 1, 1, 1, 1, q, k, v, out, lse);
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    for (int h = 0; h < 4; h++) {
      exactly(out[h], expected[h]);
    }
  }
  p.num_kv_heads = 3;
  char text[256];
  assert_int_equal(qkv_check(&p, text, sizeof text), QKV_BAD_EXTENT);
  assert_non_null(strstr(text, "num_heads 4"));
  assert_non_null(strstr(text, "num_kv_heads 3"));
}

static void test_alibi_slopes(void **state) {
  (void)state;
  enum { B = 2, H = 2, N = 5 };
  float q[B * H * N] = {0}, k[B * H * N] = {0}, v[B * H * N], out[B * H * N], lse[B * H * N];
  const float slopes[B * H] = {0.5f, 0.25f, 1, 2};
  for (int x = 0; x < B * H * N; x++) {
    v[x] = (float)(x % N);
  }
  qkv_problem p = simple(B, H, H, N, N, 1, 1, q, k, v, out, lse);
  for (int per_entry = 0; per_entry < 2; per_entry++) {
    p.alibi_slopes = per_entry ? qkv_strided(slopes, QKV_F32, H, 1, 0, 0) : qkv_per_head(slopes, QKV_F32);
    EVERY_ISA {
      RUN(&p, out, lse);
      for (int b = 0; b < B; b++) {
        for (int h = 0; h < H; h++) {
          double slope = slopes[(per_entry ? b * H : 0) + h], sum = 0, mean = 0;
          for (int j = 0; j < N; j++) {
            double w = exp(-slope * abs(1 - j)); /* row 1 */
            sum += w;
            mean += w * j;
          }
          near_value(out[(b * H + h) * N + 1], mean / sum, 1e-6);
        }
      }
    }
  }
}

static void test_batch_with_lengths(void **state) {
  (void)state;
  enum { B = 3, N = 3 };
  const int32_t lengths[B] = {1, 0, 3};
  float q[B * N], k[B * N], v[B * N], out[B * N], lse[B * N];
  for (int x = 0; x < B * N; x++) {
    q[x] = k[x] = 0;
    v[x] = x % N < lengths[x / N] ? (float)(x + 1) : NAN;
  }
  qkv_problem p = simple(B, 1, 1, N, N, 1, 1, q, k, v, out, lse);
  p.kv_length = lengths;
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    p.q_length = NULL;
    RUN(&p, out, lse);
    for (int i = 0; i < N; i++) {
      exactly(out[i], 1);
      exactly(out[N + i], 0);
      assert_true(isinf(lse[N + i]) && lse[N + i] < 0);
      near_value(out[2 * N + i], 8, 1e-6);
    }
    p.q_length = lengths;
    RUN(&p, out, lse);
    for (int x = 0; x < B * N; x++) {
      bool exists = x % N < lengths[x / N];
      assert_true(exists ? out[x] > 0 : !(out[x] < 0 || out[x] > 0));
      assert_true(exists == (isfinite(lse[x]) != 0));
    }
  }
}

static void test_ragged(void **state) {
  (void)state;
  enum { B = 4, Q = 5, K = 12 };
  const int32_t cu_q[] = {0, 0, 3, 5, 5}, cu_k[] = {0, 4, 7, 9, 12};
  float q[Q] = {0}, k[K] = {0}, v[K], out[Q], lse[Q];
  for (int x = 0; x < K; x++) {
    v[x] = (float)(1 << x);
  }
  qkv_problem p = simple(B, 1, 1, Q, K, 1, 1, q, k, v, out, lse);
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_kv = cu_k;
  const qkv_mask causal = qkv_causal();
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    p.mask_count = 0;
    RUN(&p, out, lse);
    for (int i = 0; i < Q; i++) {
      near_value(out[i], i < 3 ? (16 + 32 + 64) / 3.0 : (128 + 256) / 2.0, 1e-4);
    }
    p.mask = &causal;
    p.mask_count = 1;
    RUN(&p, out, lse);
    const double expected[] = {16, 24, (16 + 32 + 64) / 3.0, 128, 192};
    for (int i = 0; i < Q; i++) {
      near_value(out[i], expected[i], 1e-4);
    }
  }
}

static void test_zero_extents(void **state) {
  (void)state;
  float q[6] = {1, 2, 3, 4, 5, 6}, out[6], lse[6];
  const float sinks[] = {0.5f};
  for (int32_t algorithm = QKV_FLASH; algorithm <= QKV_STANDARD; algorithm++) {
    EVERY_ISA {
      /* No keys: K and V may be NULL, outputs are defined. */
      qkv_problem p = simple(1, 1, 1, 3, 0, 2, 2, q, NULL, NULL, out, lse);
      p.algorithm = algorithm;
      RUN(&p, out, lse);
      for (int i = 0; i < 6; i++) {
        exactly(out[i], 0);
      }
      for (int i = 0; i < 3; i++) {
        assert_true(isinf(lse[i]) && lse[i] < 0);
      }
      p.sinks = qkv_per_head(sinks, QKV_F32);
      RUN(&p, out, lse);
      for (int i = 0; i < 3; i++) {
        exactly(out[2 * i], 0);
        near_value(lse[i], 0.5, 1e-7);
      }
      /* Nothing to write: everything may be NULL. */
      for (int which = 0; which < 3; which++) {
        p = simple(which != 0, which != 1, which != 1, which == 2 ? 0 : 3, 3, 2, 2, NULL, NULL, NULL, NULL, NULL);
        if (which == 2) {
          const float some[6] = {0};
          p.k = qkv_bhsd(some, QKV_F32, 1, 3, 2);
          p.v = p.k;
        }
        p.algorithm = algorithm;
        qkv_context c = test_context(ISA);
        assert_int_equal(qkv_forward(&c, &p, NULL, 0), QKV_OK);
      }
    }
  }
}

/* ---- Semantics ----------------------------------------------------------------------------------------------------- */

static void test_order_of_operations(void **state) {
  (void)state;
  const float q[] = {3}, k[] = {2, 1, 5}, identity[] = {1, 0, 0, 0, 1, 0, 0, 0, 1}, bias[] = {0.25f, -0.5f, 9};
  const float slopes[] = {0.125f}, sinks[] = {0.75f};
  float out[3], lse[1];
  int32_t position = 1;
  const qkv_mask mask = qkv_causal();
  qkv_problem p = simple(1, 1, 1, 1, 3, 1, 3, q, k, identity, out, lse);
  p.softmax_scale = 0.5;
  p.softcap = 2;
  p.bias = qkv_bhsd(bias, QKV_F32, 1, 1, 3);
  p.alibi_slopes = qkv_per_head(slopes, QKV_F32);
  p.sinks = qkv_per_head(sinks, QKV_F32);
  p.mask = &mask;
  p.mask_count = 1;
  p.align = QKV_ALIGN_EXPLICIT;
  p.q_position = &position;
  double s0 = 2 * tanh(0.5 * 6 / 2) + 0.25 - 0.125, s1 = 2 * tanh(0.5 * 3 / 2) - 0.5;
  double sum = exp(s0) + exp(s1) + exp(0.75);
  EVERY_ALGORITHM EVERY_ISA {
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    near_value(out[0], exp(s0) / sum, 1e-6);
    near_value(out[1], exp(s1) / sum, 1e-6);
    exactly(out[2], 0);
    near_value(lse[0], log(sum), 1e-6);
  }
}

static void test_visible_nan_stays_in_its_row(void **state) {
  (void)state;
  enum { N = 130, D = 8 };
  problem_case c;
  test_open(&c, 0, "f32 q%d k%d d%d causal lse seed:3", N, N, D);
  float *q = c.problem.q.data, *k = c.problem.k.data, *v = c.problem.v.data, *out = c.problem.out.data;
  EVERY_ALGORITHM EVERY_ISA {
    c.problem.algorithm = algorithm;
    for (int which = 0; which < 3; which++) {
      float *at = which == 0 ? &q[70 * D + 3] : which == 1 ? &k[70 * D + 3] : &v[70 * D + 3], old = *at;
      *at = NAN;
      problem_clear_outputs(&c);
      test_run(ISA, &c.problem);
      test_accurate(&c.problem, "isa %s: NaN in q, k, v [%d]", ISA, which);
      for (int i = 0; i < N; i++) {
        for (int x = 0; x < D; x++) {
          /* q: its row; k: the rows that see it; v: its column in these rows. */
          bool spoiled = which == 0 ? i == 70 : which == 1 ? i >= 70 : i >= 70 && x == 3;
          assert_int_equal(isnan(out[i * D + x]) != 0, spoiled);
        }
      }
      *at = old;
    }
  }
  problem_free(&c);
}

static void test_infinite_scores(void **state) {
  (void)state;
  /* +inf makes the row NaN; -inf by arithmetic has weight 0; a row of nothing else is empty. */
  const float q[] = {1}, v[] = {1, 2, 3};
  float out[1], lse[1];
  EVERY_ALGORITHM EVERY_ISA {
    const float k[3][3] = {{1, INFINITY, 0}, {0, -INFINITY, 0}, {-INFINITY, -INFINITY, -INFINITY}};
    for (int n = 0; n < 3; n++) {
      qkv_problem p = simple(1, 1, 1, 1, 3, 1, 1, q, k[n], v, out, lse);
      p.algorithm = algorithm;
      RUN(&p, out, lse);
      if (n == 0) {
        assert_true(isnan(out[0]) && isnan(lse[0]));
      } else {
        exactly(out[0], n == 1 ? 2 : 0);
        assert_int_equal(isinf(lse[0]) != 0, n == 2);
      }
    }
  }
}

static void test_lse(void **state) {
  (void)state;
  const float q[] = {1}, k[] = {0, 1, 2}, v[] = {1, 2, 3}, sinks[] = {1.5f};
  const double dq[] = {1}, dk[] = {0, 1, 2}, dv[] = {1, 2, 3};
  float out[1], lse[1], lse_of_f64 = 0;
  double dout = 0, dlse = 0, sum = 1 + exp(1) + exp(2), with_sink = sum + exp(1.5);
  EVERY_ALGORITHM EVERY_ISA {
    qkv_problem p = simple(1, 1, 1, 1, 3, 1, 1, q, k, v, out, lse);
    p.algorithm = algorithm;
    RUN(&p, out, lse);
    near_value(lse[0], log(sum), 1e-6);
    p.sinks = qkv_per_head(sinks, QKV_F32);
    RUN(&p, out, lse);
    near_value(lse[0], log(with_sink), 1e-6);
    near_value(out[0], (1 + 2 * exp(1) + 3 * exp(2)) / with_sink, 1e-6);
    p.q = qkv_bhsd(dq, QKV_F64, 1, 1, 1);
    p.k = qkv_bhsd(dk, QKV_F64, 1, 3, 1);
    p.v = qkv_bhsd(dv, QKV_F64, 1, 3, 1);
    p.out = qkv_bhsd(&dout, QKV_F64, 1, 1, 1);
    p.lse = qkv_bhs(&dlse, QKV_F64, 1, 1);
    test_run(ISA, &p);
    near_value(dlse, log(with_sink), 1e-14);
    near_value(dout, (1 + 2 * exp(1) + 3 * exp(2)) / with_sink, 1e-14);
    p.lse = qkv_bhs(&lse_of_f64, QKV_F32, 1, 1);
    test_run(ISA, &p);
    near_value(lse_of_f64, log(with_sink), 1e-6);
  }
}

static void test_ones_give_exactly_one(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 h2 q70 k600 d16/5 ones causal seed:1", "f64 q9 k1300 d8 ones seed:2",
                                      "f32 q70 k300 d16/5 standard ones window:9,3 seed:3"};
  EVERY_ISA {
    for (size_t n = 0; n < COUNT(texts); n++) {
      problem_case c;
      test_open(&c, 0, "%s", texts[n]);
      test_run(ISA, &c.problem);
      for (int64_t h = 0; h < c.problem.num_heads; h++) {
        for (int64_t i = 0; i < c.problem.seqlen_q; i++) {
          for (int64_t x = 0; x < c.problem.head_dim_v; x++) {
            exactly(problem_load(&c.problem.out, problem_offset(&c.problem, &c.problem.out, 'q', 0, h, i, x)), 1);
          }
        }
      }
      problem_free(&c);
    }
  }
}

static void test_uniform_attention(void **state) {
  (void)state;
  /* scale 0 means the default; uniform weights come from a query of zeros with stride 0. */
  const float zero = 0;
  float k[12], v[6] = {1, 2, 3, 4, 5, 6}, out[4], lse[4];
  for (int x = 0; x < 12; x++) {
    k[x] = (float)x;
  }
  qkv_problem p = simple(1, 1, 1, 4, 6, 2, 1, &zero, k, v, out, lse);
  p.q = qkv_strided(&zero, QKV_F32, 0, 0, 0, 0);
  EVERY_ISA {
    RUN(&p, out, lse);
    for (int i = 0; i < 4; i++) {
      near_value(out[i], 3.5, 1e-6);
      near_value(lse[i], log(6), 1e-6);
    }
  }
}

static void test_relative_bias_table(void **state) {
  (void)state;
  /* A bias with strides (-1, +1) over a table of 2n - 1 values: T5's relative bias without n^2 memory. */
  enum { N = 70 };
  float table[2 * N - 1], full[N * N];
  for (int x = 0; x < 2 * N - 1; x++) {
    table[x] = (float)((x * 37) % 50) / 16;
  }
  for (int i = 0; i < N; i++) {
    for (int j = 0; j < N; j++) {
      full[i * N + j] = table[N - 1 + j - i];
    }
  }
  problem_case c;
  test_open(&c, 0, "f32 q%d k%d d4 lse seed:9", N, N);
  test_copy copy;
  test_copy_make(&copy, &c.problem);
  c.problem.bias = qkv_strided(table + N - 1, QKV_F32, 0, 0, -1, 1);
  copy.p.bias = qkv_strided(full, QKV_F32, 0, 0, N, 1);
  EVERY_ISA {
    test_run(ISA, &c.problem);
    test_run(ISA, &copy.p);
    test_same(&c.problem, &copy.p, "isa %s", ISA);
  }
  test_copy_free(&copy);
  problem_free(&c);
}

static void test_describe(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 h2 q200 k200 d16 causal");
  char text[4096], value[128], cut[16];
  EVERY_ISA {
    qkv_context context = test_context(ISA);
    assert_int_equal(qkv_describe(&context, &c.problem, text, sizeof text), QKV_OK);
    assert_true(prove_fact(text, "isa", value, sizeof value));
    assert_int_equal(strncmp(value, ISA, strlen(ISA)), 0);
    assert_true(prove_fact(text, "algorithm", value, sizeof value));
    assert_non_null(strstr(value, "flash"));
    assert_int_equal(qkv_describe(&context, &c.problem, cut, sizeof cut), QKV_OK);
    assert_true(strlen(cut) < sizeof cut);
    assert_int_equal(strncmp(cut, text, strlen(cut)), 0);
  }
  problem_free(&c);
}

static void test_versions(void **state) {
  (void)state;
  assert_int_equal(qkv_version(), QKV_VERSION_MAJOR * 10000 + QKV_VERSION_MINOR * 100 + QKV_VERSION_PATCH);
  assert_int_equal(qkv_order(), 1);
#define EXPECT_TEXT(name, number, text) \
  assert_int_equal(name, number);       \
  assert_string_equal(qkv_status_text(number), text);
  QKV_STATUS_LIST(EXPECT_TEXT)
#undef EXPECT_TEXT
  assert_non_null(qkv_status_text(-12345));
  assert_non_null(qkv_status_text(99999));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_row_without_keys),
    cmocka_unit_test(test_lowest_bias_is_a_mean),
    cmocka_unit_test(test_finite_bias_is_no_mask),
    cmocka_unit_test(test_large_negative_logits),
    cmocka_unit_test(test_huge_dot_product),
    cmocka_unit_test(test_softcap_saturates),
    cmocka_unit_test(test_softcap_before_mask),
    cmocka_unit_test(test_many_equal_logits),
    cmocka_unit_test(test_smallest_weight),
    cmocka_unit_test(test_visible_only_at_the_end),
    cmocka_unit_test(test_causal_alignment),
    cmocka_unit_test(test_start_aligned_single_query),
    cmocka_unit_test(test_windows),
    cmocka_unit_test(test_causal_and_mask),
    cmocka_unit_test(test_documents),
    cmocka_unit_test(test_dense_bytes),
    cmocka_unit_test(test_lengths_move_positions),
    cmocka_unit_test(test_broadcast_bias_shapes),
    cmocka_unit_test(test_bias_beyond_4_gib),
    cmocka_unit_test(test_grouped_heads),
    cmocka_unit_test(test_alibi_slopes),
    cmocka_unit_test(test_batch_with_lengths),
    cmocka_unit_test(test_ragged),
    cmocka_unit_test(test_zero_extents),
    cmocka_unit_test(test_order_of_operations),
    cmocka_unit_test(test_visible_nan_stays_in_its_row),
    cmocka_unit_test(test_infinite_scores),
    cmocka_unit_test(test_lse),
    cmocka_unit_test(test_ones_give_exactly_one),
    cmocka_unit_test(test_uniform_attention),
    cmocka_unit_test(test_relative_bias_table),
    cmocka_unit_test(test_describe),
    cmocka_unit_test(test_versions),
};

TEST_MAIN(tests)

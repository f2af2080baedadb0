/* Gradients with known answers: what went wrong in other libraries, closed forms, and central differences of the forward pass. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gradients.h"
#include "rng.h"

static void near_value(double computed, double expected, double tolerance) {
  if (!(fabs(computed - expected) <= tolerance)) {
    fail_msg("computed %.17g, expected %.17g within %g", computed, expected, tolerance);
  }
}
static void exactly(double computed, double expected) {
  if (!(computed >= expected && computed <= expected)) {
    fail_msg("computed %.17g, expected exactly %.17g", computed, expected);
  }
}

/* Both passes on an instruction set; out and lse are filled with NaN before. */
static void run_both(const char *isa, sample *s) {
  problem_clear_outputs(&s->c);
  problem_gradients_clear(&s->g);
  test_run(isa, &s->c.problem);
  backward_run(isa, &s->c.problem, &s->g.g);
}

static bool finite_gradient(const qkv_problem *p, const qkv_gradients *g, int which) {
  int64_t n[4], at[4];
  problem_gradient_extents(p, g, which, n);
  for (at[0] = 0; at[0] < n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n[2]; at[2]++) {
        for (at[3] = 0; at[3] < n[3]; at[3]++) {
          if (problem_gradient_has(p, g, which, at) &&
              !isfinite(problem_load(problem_gradient(g, which), problem_gradient_offset(p, g, which, at)))) {
            return false;
          }
        }
      }
    }
  }
  return true;
}

/* ---- Faults of other libraries ------------------------------------------------------------------------------------- */

static void test_one_row_and_one_key(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f32 b2 h3 q1 k1 d16 seed:1");
  const qkv_problem *p = &s.c.problem;
  scale_values(p, &p->v, 'k', 3, 16, 3);
  EVERY_ISA {
    run_both(ISA, &s);
    expect_zeros(p, &s.g.g, PROBLEM_DQ, "one row, one key");
    expect_zeros(p, &s.g.g, PROBLEM_DK, "one row, one key");
    for (int n = 0; n < 2 * 3 * 16; n++) { /* P is 1 but for the round trip of a score below 20 through lse */
      double dout = ((const float *)s.g.g.dout.data)[n];
      near_value(((const float *)s.g.g.dv.data)[n], dout, fabs(dout) * 64 * 0x1p-24);
    }
  }
  sample_free(&s);
}

/* The last tile of keys is not full, and every score is near -100: P must be exp(s - lse), not exp(s) / exp(lse), which is 0 / 0. */
static void test_low_scores_in_a_tail(void **state) {
  (void)state;
  static const char *const dtypes[] = {"f32", "f64", "bf16"};
  for (size_t n = 0; n < COUNT(dtypes); n++) {
    sample s;
    sample_open(&s, PROBLEM_GUARD_END, "%s h2 q70 k70 d32 scale:1 seed:2", dtypes[n]);
    const qkv_problem *p = &s.c.problem;
    for (int64_t h = 0; h < 2; h++) {
      for (int64_t i = 0; i < 70; i++) {
        for (int64_t x = 0; x < 32; x++) { /* q k = -64 / 32 * 1.5625 + noise */
          problem_store(&p->q, problem_offset(p, &p->q, 'q', 0, h, i, x), 2);
          problem_store(&p->k, problem_offset(p, &p->k, 'k', 0, h, i, x), -1.5625 + (double)((i * 7 + x * 5) % 16) / 512);
        }
      }
    }
    EVERY_ISA {
      run_both(ISA, &s);
      for (int64_t i = 0; i < 70; i++) {
        assert_true(problem_load(&p->lse, problem_offset(p, &p->lse, 'q', 0, 1, i, 0)) < -88.7);
      }
      for (int which = PROBLEM_DQ; which <= PROBLEM_DV; which++) {
        assert_true(finite_gradient(p, &s.g.g, which));
      }
      backward_accurate(p, &s.g.g, NULL, "isa %s, %s, low scores", ISA, dtypes[n]);
    }
    sample_free(&s);
  }
}

static void test_only_the_bias(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 q64 k16 d24 bias want:b seed:1", "f32 b3 h4 q64 k16 d24 bias:b1h1 want:b seed:2",
                                      "f32 b2 h4/2 q70 k130 d8 causal bias:h1 want:b seed:3",
                                      "f64 b2 h2 q20 k30 d8 biasinf:q1 want:b seed:4"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    sample s;
    sample_open(&s, PROBLEM_GUARD_END, "%s", texts[n]);
    EVERY_ISA {
      run_both(ISA, &s);
      backward_accurate(&s.c.problem, &s.g.g, NULL, "isa %s, %s", ISA, texts[n]);
    }
    sample_free(&s);
  }
}

/* The gradient of a bias that serves all heads and entries has the bias's own shape: the sum over them. */
static void test_bias_for_all_heads(void **state) {
  (void)state;
  sample s;
  float own[20 * 30], each[3 * 2 * 20 * 30];
  sample_open(&s, 0, "f32 b3 h2 q20 k30 d8 causal bias:b1h1 seed:5");
  const qkv_problem *p = &s.c.problem;
  qkv_gradients g = s.g.g;
  EVERY_ISA {
    run_both(ISA, &s);
    g.dbias = qkv_strided(own, QKV_F32, 0, 0, 30, 1);
    backward_run(ISA, p, &g);
    g.dbias = qkv_bhsd(each, QKV_F32, 2, 20, 30);
    backward_run(ISA, p, &g);
    for (int n = 0; n < 20 * 30; n++) {
      float sum = 0; /* entries, then heads: the order of the text */
      for (int part = 0; part < 6; part++) {
        sum += each[part * 600 + n];
      }
      exactly((double)own[n], (double)sum);
      exactly((double)((const float *)s.g.g.dbias.data)[n], (double)sum);
    }
  }
  sample_free(&s);
}

/* (2, 32, 4, 128) of rows and heads with one key-value head (2, 32, 1, 128); dout is a transposed view. */
static void test_transposed_gradient(void **state) {
  (void)state;
  sample s, t;
  sample_open(&s, 0, "f32 b2 h4/1 q32 k32 d128 causal bshd seed:6");
  sample_open(&t, 0, "f32 b2 h4/1 q32 k32 d128 causal seed:6");
  const qkv_problem *p = &s.c.problem;
  float *dout = test_alloc((size_t)(2 * 4 * 32 * 128) * sizeof *dout);
  qkv_gradients g = s.g.g;
  g.dout = qkv_strided(dout, QKV_F32, 1, 2, 8, 8 * 32); /* columns outermost, entries innermost */
  for (int64_t e = 0; e < 2 * 4 * 32 * 128; e++) {
    const int64_t b = e / 128 / 32 / 4, h = e / 128 / 32 % 4, i = e / 128 % 32, x = e % 128;
    problem_store(&g.dout, problem_offset(p, &g.dout, 'q', b, h, i, x),
                  problem_load(&t.g.g.dout, problem_offset(&t.c.problem, &t.g.g.dout, 'q', b, h, i, x)));
  }
  EVERY_ISA {
    run_both(ISA, &t);
    test_run(ISA, p);
    backward_run(ISA, p, &g);
    backward_same(&t.c.problem, &t.g.g, p, &g, "isa %s, transposed dout", ISA);
    backward_accurate(p, &g, NULL, "isa %s, transposed dout", ISA);
  }
  free(dout);
  sample_free(&s);
  sample_free(&t);
}

/* q, k and v are slices of one buffer (entry, row, 3, head, feature), and so are their gradients. */
static void test_fused_buffer(void **state) {
  (void)state;
  enum { B = 2, N = 70, H = 3, D = 20, ROW = 3 * H * D };
  sample s;
  sample_open(&s, 0, "f32 b2 h3 q70 k70 d20 causal seed:7");
  const qkv_problem *p = &s.c.problem;
  float *data = test_alloc((size_t)(B * N * ROW) * sizeof *data),
        *gradient = test_alloc((size_t)(B * N * ROW) * sizeof *data);
  qkv_problem fused = *p;
  qkv_gradients g = s.g.g;
  qkv_tensor *inputs[] = {&fused.q, &fused.k, &fused.v}, *outputs[] = {&g.dq, &g.dk, &g.dv};
  for (int which = 0; which < 3; which++) {
    const qkv_tensor from = *inputs[which];
    *inputs[which] = qkv_strided(data + which * H * D, QKV_F32, N * ROW, D, ROW, 1);
    *outputs[which] = qkv_strided(gradient + which * H * D, QKV_F32, N * ROW, D, ROW, 1);
    for (int64_t e = 0; e < B * H * N * D; e++) {
      const int64_t b = e / D / N / H, h = e / D / N % H, i = e / D % N, x = e % D;
      problem_store(inputs[which], problem_offset(&fused, inputs[which], 'x', b, h, i, x),
                    problem_load(&from, problem_offset(p, &from, 'x', b, h, i, x)));
    }
  }
  EVERY_ISA {
    run_both(ISA, &s);
    memset(gradient, 0xff, (size_t)(B * N * ROW) * sizeof *gradient);
    backward_run(ISA, &fused, &g);
    backward_same(p, &s.g.g, &fused, &g, "isa %s, one fused buffer", ISA);
    for (int e = 0; e < B * N * ROW; e++) {
      assert_true(isfinite(gradient[e]));
    }
  }
  free(data);
  free(gradient);
  sample_free(&s);
}

static void test_segments_without_queries(void **state) {
  (void)state;
  const int32_t cu_q[] = {0, 0, 30, 30, 70}, cu_k[] = {0, 40, 80, 120, 120}; /* the last has queries, and no keys */
  sample s;
  sample_open(&s, PROBLEM_GUARD_END, "f32 b4 h4/2 q70 k120 d16 ragged causal sinks dlse seed:8");
  qkv_problem p = s.c.problem;
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_kv = cu_k;
  EVERY_ISA {
    test_run(ISA, &p);
    backward_run(ISA, &p, &s.g.g);
    backward_accurate(&p, &s.g.g, NULL, "isa %s, segments without queries", ISA);
    for (int64_t x = 0; x < 16; x++) {
      for (int64_t b = 0; b < 3; b += 2) { /* no query: 0, also in the first segment of all */
        exactly(problem_load(&s.g.g.dk, problem_offset(&p, &s.g.g.dk, 'k', b, 1, 39, x)), 0);
        exactly(problem_load(&s.g.g.dv, problem_offset(&p, &s.g.g.dv, 'k', b, 0, 0, x)), 0);
      }
      exactly(problem_load(&s.g.g.dq, problem_offset(&p, &s.g.g.dq, 'q', 3, 0, 5, x)), 0); /* no key */
    }
  }
  sample_free(&s);
}

/* Entries of a ragged batch have dbias up to the longest entry: 0 where there is no such row or key. */
static void test_bias_beyond_an_entry(void **state) {
  (void)state;
  const int32_t cu_q[] = {0, 5, 75}, cu_k[] = {0, 90, 100};
  sample s;
  float dbias[2 * 70 * 90];
  sample_open(&s, 0, "f32 b2 q75 k100 d8 ragged bias seed:9");
  qkv_problem p = s.c.problem;
  qkv_gradients g = s.g.g;
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_kv = cu_k;
  g.dbias = qkv_bhsd(dbias, QKV_F32, 1, 70, 90);
  float *bias = test_alloc(sizeof dbias);
  for (size_t e = 0; e < COUNT(dbias); e++) {
    bias[e] = (float)rng_normal_at(1, 1, e);
  }
  p.bias = qkv_bhsd(bias, QKV_F32, 1, 70, 90);
  EVERY_ISA {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      for (size_t e = 0; e < COUNT(dbias); e++) {
        dbias[e] = accumulate ? 3 : (float)NAN;
      }
      g.accumulate = accumulate ? QKV_DBIAS : 0;
      test_run(ISA, &p);
      backward_run(ISA, &p, &g);
      for (size_t e = 0; e < COUNT(dbias); e++) {
        const int64_t b = (int64_t)e / 90 / 70, i = (int64_t)e / 90 % 70, j = (int64_t)e % 90;
        bool has = i < cu_q[b + 1] - cu_q[b] && j < cu_k[b + 1] - cu_k[b];
        if (has) {
          assert_true(isfinite(dbias[e]));
        } else {
          exactly((double)dbias[e], accumulate ? 3 : 0);
        }
      }
    }
  }
  free(bias);
  sample_free(&s);
}

static void test_f32_bias_with_16_bits(void **state) {
  (void)state;
  static const char *const dtypes[] = {"bf16", "f16"};
  for (size_t n = 0; n < COUNT(dtypes); n++) {
    sample s;
    sample_open(&s, 0, "%s b2 h2 q40 k90 d24 causal bias dbias:f32 seed:12", dtypes[n]);
    assert_int_equal(s.c.problem.bias.dtype, s.c.problem.q.dtype);
    size_t count = (size_t)(2 * 2 * 40 * 90);
    float *bias = test_alloc(count * sizeof *bias);
    for (size_t e = 0; e < count; e++) {
      bias[e] = (float)problem_load(&s.c.problem.bias, (int64_t)e);
    }
    sample wide;
    sample_open(&wide, 0, "%s b2 h2 q40 k90 d24 causal bias dbias:f32 seed:12", dtypes[n]);
    wide.c.problem.bias = qkv_bhsd(bias, QKV_F32, 2, 40, 90);
    EVERY_ISA {
      run_both(ISA, &s);
      run_both(ISA, &wide);
      backward_same(&s.c.problem, &s.g.g, &wide.c.problem, &wide.g.g, "isa %s, f32 bias with %s", ISA, dtypes[n]);
      backward_accurate(&wide.c.problem, &wide.g.g, NULL, "isa %s, f32 bias with %s", ISA, dtypes[n]);
    }
    free(bias);
    sample_free(&s);
    sample_free(&wide);
  }
}

/* ---- Dropout ------------------------------------------------------------------------------------------------------- */

/* One key per row: dv is dout / (1 - p) where the row keeps it, so 1 / 0.9 and neither 1 / 0.1 nor 0.9. */
static void test_dropout_scales_by_what_is_kept(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f32 h2 q90 k90 d8 window:0,0 dropout:0.1 seed:9");
  const qkv_problem *p = &s.c.problem;
  EVERY_ISA {
    int dropped = 0;
    run_both(ISA, &s);
    for (int64_t h = 0; h < 2; h++) {
      for (int64_t i = 0; i < 90; i++) {
        bool kept = oracle_kept(p, 0, h, i, i);
        dropped += !kept;
        for (int64_t x = 0; x < 8; x++) {
          double dout = problem_load(&s.g.g.dout, problem_offset(p, &s.g.g.dout, 'q', 0, h, i, x));
          double v = problem_load(&p->v, problem_offset(p, &p->v, 'k', 0, h, i, x));
          near_value(problem_load(&p->out, problem_offset(p, &p->out, 'q', 0, h, i, x)), kept ? v / 0.9 : 0,
                     fabs(v) * 0x1p-21);
          near_value(problem_load(&s.g.g.dv, problem_offset(p, &s.g.g.dv, 'k', 0, h, i, x)), kept ? dout / 0.9 : 0,
                     fabs(dout) * 0x1p-14);
        }
      }
    }
    assert_in_range(dropped, 5, 40); /* 18 of 180 */
  }
  sample_free(&s);
}

static void test_rows_that_keep_nothing(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h2 q70 k3 d8 dropout:0.9 seed:1", "f64 h2 q40 k2 d8 dropout:0.75 seed:2",
                                      "f32 h2/1 q70 k130 d16 causal dropout:1 seed:3"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    sample s;
    sample_open(&s, PROBLEM_GUARD_END, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    EVERY_ISA {
      int64_t empty = 0;
      run_both(ISA, &s);
      backward_accurate(p, &s.g.g, NULL, "isa %s, %s", ISA, texts[n]);
      for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t i = 0; i < p->seqlen_q; i++) {
          bool keeps = false;
          for (int64_t j = 0; j < p->seqlen_kv; j++) {
            keeps = keeps || (oracle_sees(p, b, 1, i, j) && oracle_kept(p, b, 1, i, j));
          }
          empty += !keeps;
          for (int64_t x = 0; x < p->head_dim && !keeps; x++) {
            exactly(problem_load(&p->out, problem_offset(p, &p->out, 'q', b, 1, i, x)), 0);
            exactly(problem_load(&s.g.g.dq, problem_offset(p, &s.g.g.dq, 'q', b, 1, i, x)), 0);
          }
        }
      }
      assert_true(empty > 0);
      if (p->dropout >= 1) {
        expect_zeros(p, &s.g.g, PROBLEM_DQ, texts[n]);
        expect_zeros(p, &s.g.g, PROBLEM_DK, texts[n]);
        expect_zeros(p, &s.g.g, PROBLEM_DV, texts[n]);
      }
    }
    sample_free(&s);
  }
}

/* ---- Closed forms -------------------------------------------------------------------------------------------------- */

/* Scores 0 and ln 3: weights 1/4 and 3/4; with a sink of 0 they are 1/5, 3/5 and 1/5. */
static void test_two_keys(void **state) {
  (void)state;
  const double ln3 = log(3.0), q = 1, k[2] = {0, ln3}, v[2] = {2, 6}, dout = 1, dlse = 0.5, sink = 0;
  for (int with_sink = 0; with_sink < 2; with_sink++) {
    double out = 0, lse = 0, dq = 0, dk[2], dv[2], dbias[2], dsink = 0, dscale, w[2] = {0.25, 0.75};
    const double bias[2] = {0, 0};
    qkv_problem p = qkv_problem_default();
    p.batch = p.num_heads = p.seqlen_q = p.head_dim = 1;
    p.seqlen_kv = 2;
    p.softmax_scale = 1;
    p.q = qkv_bhsd(&q, QKV_F64, 1, 1, 1);
    p.k = qkv_bhsd(k, QKV_F64, 1, 2, 1);
    p.v = qkv_bhsd(v, QKV_F64, 1, 2, 1);
    p.out = qkv_bhsd(&out, QKV_F64, 1, 1, 1);
    p.lse = qkv_bhs(&lse, QKV_F64, 1, 1);
    p.bias = qkv_strided(bias, QKV_F64, 0, 0, 0, 1);
    qkv_gradients g = qkv_gradients_default();
    g.dout = qkv_bhsd(&dout, QKV_F64, 1, 1, 1);
    g.dlse = qkv_bhs(&dlse, QKV_F64, 1, 1);
    g.dq = qkv_bhsd(&dq, QKV_F64, 1, 1, 1);
    g.dk = qkv_bhsd(dk, QKV_F64, 1, 2, 1);
    g.dv = qkv_bhsd(dv, QKV_F64, 1, 2, 1);
    g.dbias = qkv_strided(dbias, QKV_F64, 0, 0, 0, 1);
    if (with_sink) {
      p.sinks = qkv_per_head(&sink, QKV_F64);
      g.dsinks = qkv_per_head(&dsink, QKV_F64);
      w[0] = 0.2;
      w[1] = 0.6;
    }
    EVERY_ISA {
      test_run(ISA, &p);
      backward_run(ISA, &p, &g);
      const double o = w[0] * v[0] + w[1] * v[1], tolerance = 1e-14;
      double ds[2], score_gradient = 0;
      near_value(out, o, tolerance);
      near_value(lse, with_sink ? log(5.0) : log(4.0), tolerance);
      for (int j = 0; j < 2; j++) {
        ds[j] = w[j] * (v[j] - o + dlse);
        score_gradient += ds[j] * k[j];
        near_value(dv[j], w[j], tolerance);
        near_value(dbias[j], ds[j], tolerance);
        near_value(dk[j], ds[j] * q, tolerance);
      }
      near_value(dq, score_gradient, tolerance);
      if (with_sink) {
        near_value(dsink, 0.2 * (0 - o + dlse), tolerance);
      }
      assert_int_equal(qkv_scale_gradient(&p, &g, &dscale), QKV_OK);
      near_value(dscale, score_gradient * q, tolerance);
    }
  }
}

/* A row that sees nothing but has a sink: lse is the sink, and all of its gradient goes there. */
static void test_only_a_sink(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f64 h2 q6 k3 d4 causal sinks dlse seed:7");
  const qkv_problem *p = &s.c.problem;
  const double none = -HUGE_VAL;
  problem_store(&p->sinks, 0, 0.75);
  problem_store(&p->sinks, p->sinks.stride[1], none);
  EVERY_ISA {
    run_both(ISA, &s);
    backward_accurate(p, &s.g.g, NULL, "isa %s, rows with a sink only", ISA);
    exactly(problem_load(&s.g.g.dsinks, s.g.g.dsinks.stride[1]), 0);
    for (int64_t i = 0; i < 3; i++) {
      exactly(problem_load(&s.g.g.dq, problem_offset(p, &s.g.g.dq, 'q', 0, 0, i, 0)), 0);
    }
  }
  sample_free(&s);
}

/* lse in f32 for f64, dlse and dsinks in the other type. */
static void test_types_of_small_tensors(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f64 b2 h2 q30 k40 d8 causal sinks:b dlse seed:10");
  qkv_problem p = s.c.problem;
  qkv_gradients g = s.g.g;
  float lse[2 * 2 * 30];
  p.lse = qkv_bhs(lse, QKV_F32, 2, 30);
  EVERY_ISA {
    test_run(ISA, &p);
    backward_run(ISA, &p, &g);
    backward_accurate(&p, &g, NULL, "isa %s, f64 with an f32 lse", ISA);
  }
  sample_free(&s);
}

/* Scores of -inf by arithmetic are visible, and weigh nothing: lse is -inf, and all gradients are 0 but dq, where 0 meets infinity. */
static void test_scores_of_minus_infinity(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 h2 q70 k66 d3 seed:1", "f32 h2/1 q70 k66 d3 causal bias dlse seed:2",
                                      "f64 h2 q9 k66 d3 bias dropout:0.5 seed:3"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < p->seqlen_q; i++) {
        for (int64_t x = 0; x < 3; x++) {
          int64_t at = problem_offset(p, &p->q, 'q', 0, h, i, x);
          problem_store(&p->q, at, 1 + fabs(problem_load(&p->q, at)));
        }
      }
    }
    for (int64_t e = 0; e < p->num_kv_heads * p->seqlen_kv * 3; e++) {
      problem_store(&p->k, e, -HUGE_VAL);
    }
    EVERY_ISA {
      run_both(ISA, &s);
      assert_true(isinf(problem_load(&p->lse, 0)));
      backward_accurate(p, &s.g.g, NULL, "isa %s, %s", ISA, texts[n]);
      for (int which = PROBLEM_DK; which <= PROBLEM_DBIAS; which++) {
        if (problem_gradient(&s.g.g, which)->data != NULL) {
          expect_zeros(p, &s.g.g, which, texts[n]);
        }
      }
    }
    sample_free(&s);
  }
}

static void test_empty_extents(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b0 h2 q3 k4 d5 seed:1", "f32 b2 h2 q0 k70 d5 bias sinks seed:2",
                                      "f32 b2 h2/1 q70 k0 d5 sinks dlse seed:3", "f32 b2 h0/0 q3 k4 d5 seed:4",
                                      "f64 b3 h2 q0 k0 d5 ragged seed:5"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    sample s;
    sample_open(&s, PROBLEM_GUARD_BEGIN, "%s", texts[n]);
    EVERY_ISA {
      run_both(ISA, &s);
      backward_accurate(&s.c.problem, &s.g.g, NULL, "isa %s, %s", ISA, texts[n]);
      for (int which = PROBLEM_DQ; which <= PROBLEM_DV; which++) {
        expect_zeros(&s.c.problem, &s.g.g, which, texts[n]);
      }
    }
    sample_free(&s);
  }
}

/* ---- Central differences ------------------------------------------------------------------------------------------- */

/* sum dout out + sum dlse lse over the rows that have a finite one; *error: what out and lse may be wrong by. */
static long double loss(const sample *s, double *error) {
  const qkv_problem *p = &s->c.problem;
  const qkv_gradients *g = &s->g.g;
  const int64_t dv = value_dim(p);
  oracle *o = error != NULL ? oracle_new(p) : NULL;
  oracle_value *out = test_alloc((size_t)dv * sizeof *out), lse = {0, 0, 0, 0};
  long double sum = 0;
  test_run(test_isa[0], p);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < (p->q_length != NULL ? p->q_length[b] : problem_rows(p, b)); i++) {
        if (error != NULL) {
          oracle_row(o, b, h, i, out, &lse);
        }
        for (int64_t x = 0; x < dv; x++) {
          double dout = problem_load(&g->dout, problem_offset(p, &g->dout, 'q', b, h, i, x));
          sum += (long double)dout * (long double)problem_load(&p->out, problem_offset(p, &p->out, 'q', b, h, i, x));
          *(error != NULL ? error : &lse.tail) += fabs(dout) * out[x].bound;
        }
        double value = problem_load(&p->lse, problem_offset(p, &p->lse, 'q', b, h, i, 0));
        if (g->dlse.data != NULL && isfinite(value)) {
          double dlse = problem_load(&g->dlse, problem_offset(p, &g->dlse, 'q', b, h, i, 0));
          sum += (long double)dlse * (long double)value;
          *(error != NULL ? error : &lse.tail) += fabs(dlse) * lse.bound;
        }
      }
    }
  }
  free(out);
  oracle_free(o);
  return sum;
}

/* The derivative of the loss by one stored number is `gradient`. D(h) = (loss(x + h) - loss(x - h)) / 2h is wrong by c h^2 and higher
 * powers, so D(h) - (D(2h) - D(h)) / 3 by much less than |D(2h) - D(h)|; errors of the losses add 2 * error / h at most. */
static void expect_derivative(const sample *s, const qkv_tensor *t, int64_t offset, double gradient, double bound,
                              double error, const char *text, const char *what) {
  const double x = problem_load(t, offset), h = 0x1p-13;
  long double difference[2];
  for (int n = 0; n < 2; n++) {
    long double value[2];
    for (int sign = 0; sign < 2; sign++) {
      problem_store(t, offset, x + (sign ? -1 : 1) * (n + 1) * h);
      value[sign] = loss(s, NULL);
    }
    difference[n] = (value[0] - value[1]) / (2 * (n + 1) * (long double)h);
  }
  problem_store(t, offset, x);
  double expected = (double)(difference[0] - (difference[1] - difference[0]) / 3);
  double tolerance = (double)fabsl(difference[1] - difference[0]) + 2 * error / h + bound;
  if (!(fabs(gradient - expected) <= tolerance)) {
    fail_msg("%s: gradient of %s[%d] is %.12g, the difference quotient %.12g within %g", text, what, (int)offset, gradient,
             expected, tolerance);
  }
}

static void differences_of(sample *s, const char *text) {
  const qkv_problem *p = &s->c.problem;
  const struct {
    int which;
    const qkv_tensor *t;
    char side;
    const char *name;
  } tensors[] = {{PROBLEM_DQ, &p->q, 'q', "q"},
                 {PROBLEM_DK, &p->k, 'k', "k"},
                 {PROBLEM_DV, &p->v, 'k', "v"},
                 {PROBLEM_DBIAS, &p->bias, 'b', "bias"},
                 {PROBLEM_DSINKS, &p->sinks, 'h', "sinks"}};
  double error = 0;
  loss(s, &error);
  backward_run(test_isa[0], p, &s->g.g);
  rng r = {s->c.spec.seed, 3, 0};
  for (size_t k = 0; k < COUNT(tensors); k++) {
    const int which = tensors[k].which;
    const qkv_tensor *gradient = problem_gradient(&s->g.g, which);
    int64_t n[4], at[4];
    problem_gradient_extents(p, &s->g.g, which, n);
    for (int tries = 0; tries < 6 && gradient->data != NULL && n[0] * n[1] * n[2] * n[3] > 0; tries++) {
      for (int axis = 0; axis < 4; axis++) {
        at[axis] = rng_below(&r, n[axis]);
      }
      if (!problem_gradient_has(p, &s->g.g, which, at)) {
        continue;
      }
      int64_t offset = problem_offset(p, tensors[k].t, tensors[k].side, at[0], at[1], at[2], at[3]);
      if (!(fabs(problem_load(tensors[k].t, offset)) < 1e6)) {
        continue; /* -inf, or the lowest number: it does not move */
      }
      double value = problem_load(gradient, problem_gradient_offset(p, &s->g.g, which, at));
      expect_derivative(s, tensors[k].t, offset, value, fabs(value) * 1e-9, error, text, tensors[k].name);
    }
  }
  /* The scale, where there is anything. */
  if (p->batch * p->num_heads * p->seqlen_q > 0 && s->g.g.dq.data != NULL) {
    double dscale, scale = p->softmax_scale;
    assert_int_equal(qkv_scale_gradient(p, &s->g.g, &dscale), QKV_OK);
    qkv_tensor t = qkv_strided(&s->c.problem.softmax_scale, QKV_F64, 0, 0, 0, 0);
    s->c.problem.softmax_scale = scale != 0 ? scale : 1 / sqrt((double)p->head_dim);
    expect_derivative(s, &t, 0, dscale, fabs(dscale) * 1e-9, error, text, "scale");
    s->c.problem.softmax_scale = scale;
  }
}

static void test_central_differences(void **state) {
  (void)state;
  int64_t count = test_scale(150);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    char text[PROBLEM_TEXT_BYTES];
    sample s;
    problem_random(11, (uint64_t)n, 4e3, &spec);
    spec.dtype = QKV_F64;
    memset(spec.tensor_dtype, 0, sizeof spec.tensor_dtype);
    memset(spec.gradient_dtype, 0, sizeof spec.gradient_dtype);
    memset(spec.summed, 0, sizeof spec.summed); /* a number of the bias is one of its gradient */
    spec.nan = PROBLEM_NO_NAN;
    spec.data = PROBLEM_PLAIN;
    spec.accumulate = false;
    spec.layout = spec.layout == PROBLEM_BROADCAST ? PROBLEM_ODD : spec.layout;
    problem_print(&spec, text, sizeof text);
    sample_build(&s, 0, &spec);
    if (s.c.problem.bias.data != NULL && s.c.problem.bias.dtype == QKV_F32) {
      s.g.g.dbias = qkv_strided(NULL, 0, 0, 0, 0, 0); /* too coarse for small steps */
    }
    if (s.c.problem.sinks.data != NULL && s.c.problem.sinks.dtype == QKV_F32) {
      s.g.g.dsinks = qkv_strided(NULL, 0, 0, 0, 0, 0);
    }
    differences_of(&s, text);
    sample_free(&s);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_one_row_and_one_key),
    cmocka_unit_test(test_low_scores_in_a_tail),
    cmocka_unit_test(test_only_the_bias),
    cmocka_unit_test(test_bias_for_all_heads),
    cmocka_unit_test(test_transposed_gradient),
    cmocka_unit_test(test_fused_buffer),
    cmocka_unit_test(test_segments_without_queries),
    cmocka_unit_test(test_bias_beyond_an_entry),
    cmocka_unit_test(test_f32_bias_with_16_bits),
    cmocka_unit_test(test_dropout_scales_by_what_is_kept),
    cmocka_unit_test(test_rows_that_keep_nothing),
    cmocka_unit_test(test_two_keys),
    cmocka_unit_test(test_only_a_sink),
    cmocka_unit_test(test_types_of_small_tensors),
    cmocka_unit_test(test_scores_of_minus_infinity),
    cmocka_unit_test(test_empty_extents),
    cmocka_unit_test(test_central_differences),
};

TEST_MAIN(tests)

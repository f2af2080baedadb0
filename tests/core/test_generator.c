/* Random problems and every size in use: against the oracle, and the same bits on every instruction set, executor, path and
 * cut into entries and heads. QKV_TEST_SEED changes the seed, QKV_TEST_SCALE (percent) the number. */
#include "common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

static const prove_options everything = {PROVE_FORWARD | PROVE_WAYS, NULL};

static uint64_t seed(void) {
  const char *text = getenv("QKV_TEST_SEED");
  return text != NULL ? strtoull(text, NULL, 10) : 0;
}

static void prove_or_fail(const problem_spec *spec, const prove_options *options) {
  prove_report report;
  if (prove_problem(spec, options, &report)) {
    return;
  }
  problem_spec small = *spec;
  char text[PROBLEM_TEXT_BYTES], first[sizeof report.text];
  memcpy(first, report.text, sizeof first);
  prove_shrink(&small, options, 200);
  if (prove_problem(&small, options, &report)) {
    small = *spec;
    memcpy(report.text, first, sizeof first);
  }
  problem_print(&small, text, sizeof text);
  fail_msg("%s\n  replay: qkv check --problem \"%s\"", report.text, text);
}

static void prove_text(unsigned what, const char *text) {
  const prove_options options = {what, NULL};
  problem_spec spec;
  char error[256];
  if (!problem_parse(text, &spec, error, sizeof error)) {
    fail_msg("%s", error);
  }
  prove_or_fail(&spec, &options);
}

static void test_random_problems(void **state) {
  (void)state;
  int64_t count = test_scale(400);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    problem_random(seed(), (uint64_t)n, n % 8 == 0 ? 2e6 : 2e5, &spec);
    prove_or_fail(&spec, &everything);
  }
}

static void test_texts_read_back(void **state) {
  (void)state;
  for (uint64_t n = 0; n < 2000; n++) {
    problem_spec spec, again;
    char text[PROBLEM_TEXT_BYTES], second[PROBLEM_TEXT_BYTES], error[256];
    problem_random(seed() + 1, n, 1e6, &spec);
    problem_print(&spec, text, sizeof text);
    if (!problem_parse(text, &again, error, sizeof error)) {
      fail_msg("%s: %s", text, error);
    }
    problem_print(&again, second, sizeof second);
    assert_string_equal(text, second);
    assert_true(problem_cost(&spec) <= 1e6);
  }
  static const char *const wrong[] = {
      "f31",       "h8/3",   "h2/0",      "q-1",       "d0",       "k1x",          "window",     "window:1",  "window:1,2,3",
      "or:causal", "prefix", "causal:1",  "bias:z1",   "bias:b2",  "scale:x",      "softcap:-1", "seed:",     "ragged:x",
      "alibi:h",   "q:f31",  "f64 k:f32", "out:f64",   "q1/2",     "b0 q3 ragged", "dropout",    "dropout:2", "dropout:-1",
      "want:",     "want:z", "dbias:k2",  "dsinks:q1", "dlse:f32", "f64 dq:f16",   "dv:f64",     "acc:1"};
  for (size_t n = 0; n < sizeof wrong / sizeof wrong[0]; n++) {
    problem_spec spec;
    char error[256] = "";
    if (problem_parse(wrong[n], &spec, error, sizeof error)) {
      fail_msg("'%s' was accepted", wrong[n]);
    }
    assert_true(strlen(error) > 0);
  }
}

static void test_head_dims(void **state) {
  (void)state;
  static const int dims[] = {1,  2,  3,  5,   7,   8,   15,  16,  17,  31,  32,  33,  46,  63,  64,
                             65, 80, 96, 104, 127, 128, 129, 160, 192, 255, 256, 257, 320, 512, 576};
  enum { COUNT = sizeof dims / sizeof dims[0] };
  for (int n = 0; n < COUNT; n++) {
    char text[PROBLEM_TEXT_BYTES];
    int other = dims[(n * 7 + 3) % COUNT];
    snprintf(text, sizeof text, "f32 h2/1 q%d k%d d%d causal lse seed:%d", 40 + n, 66 + n, dims[n], n);
    prove_text(PROVE_FORWARD | PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS | PROVE_FORCED, text);
    snprintf(text, sizeof text, "f32 h2/1 q%d k70 d%d/%d lse seed:%d", 1 + n % 12, dims[n], other, n);
    prove_text(PROVE_FORWARD | PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
    snprintf(text, sizeof text, "f64 q%d k67 d%d/%d window:30,2 lse seed:%d", 1 + n, other, dims[n], n);
    prove_text(PROVE_FORWARD | PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
    snprintf(text, sizeof text, "f32 q%d k67 d%d/%d standard lse seed:%d", 1 + n, other, dims[n], n);
    prove_text(PROVE_FORWARD | PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
  }
}

static void test_lengths(void **state) {
  (void)state;
  static const int q[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 257},
                   k[] = {0, 1, 2, 63, 64, 65, 127, 129, 511, 512, 513, 1025};
  static const char *const options[] = {"",        "causal",     "window:63,1",    "causal kvpos",
                                        "lengths", "nan causal", "standard causal"};
  int n = 0;
  for (size_t a = 0; a < sizeof q / sizeof q[0]; a++) {
    for (size_t b = 0; b < sizeof k / sizeof k[0]; b++) {
      char text[PROBLEM_TEXT_BYTES];
      snprintf(text, sizeof text, "%s q%d k%d d%d/%d %s lse seed:%d", n % 3 == 2 ? "f64" : "f32", q[a], k[b], 1 + n % 9,
               1 + n % 19, options[n % 7], n);
      prove_text(PROVE_FORWARD | PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
      n++;
    }
  }
}

static void test_head_counts(void **state) {
  (void)state;
  static const char *const heads[] = {"h12/12", "h32/8", "h28/4", "h8/1", "h9/3", "h71/1", "h1/1"};
  static const char *const shapes[] = {"q1 k130", "q2 k65", "q5 k70 causal", "q33 k33 window:4,4",
                                       "b2 q3 k600 sinks alibi lengths"};
  for (size_t a = 0; a < sizeof heads / sizeof heads[0]; a++) {
    for (size_t b = 0; b < sizeof shapes / sizeof shapes[0]; b++) {
      char text[PROBLEM_TEXT_BYTES];
      snprintf(text, sizeof text, "f32 %s %s d8 lse seed:%d", heads[a], shapes[b], (int)(a * 8 + b));
      prove_text(PROVE_FORWARD | (PROVE_WAYS & ~(unsigned)PROVE_FORCED), text);
    }
  }
}

/* ---- Scores and weights -------------------------------------------------------------------------------------------- */

static void judge_score(const oracle_value *expected, double computed, const char *text, const char *what,
                        const int64_t at[4]) {
  double ratio;
  if (!oracle_accepts(expected, computed, &ratio)) {
    fail_msg("%s: %s[%d,%d,%d,%d]: computed %.17g, expected %.17g, bound %g", text, what, (int)at[0], (int)at[1], (int)at[2],
             (int)at[3], computed, expected->value, expected->bound);
  }
}

static void test_scores(void **state) {
  (void)state;
  int64_t count = test_scale(120);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    char text[PROBLEM_TEXT_BYTES];
    problem_random(seed() + 2, (uint64_t)n, 5e4, &spec);
    spec.algorithm = QKV_FLASH;
    problem_print(&spec, text, sizeof text);
    problem_case c;
    assert_true(problem_build(&c, &spec, PROBLEM_GUARD_END));
    const qkv_problem *p = &c.problem;
    int64_t rows = 0;
    for (int64_t b = 0; b < p->batch; b++) {
      rows = problem_rows(p, b) > rows ? problem_rows(p, b) : rows;
    }
    size_t values = (size_t)(p->batch * p->num_heads * rows * p->seqlen_kv),
           size = problem_dtype_of(problem_arithmetic(&spec))->size;
    problem_buffer memory[3];
    qkv_tensor to[3];
    for (int k = 0; k < 3; k++) {
      assert_true(problem_buffer_make(&memory[k], values * size, PROBLEM_GUARD_END));
      memset(memory[k].begin, 0xff, values * size);
      to[k] = qkv_bhsd(memory[k].begin, problem_arithmetic(&spec), p->num_heads, rows, p->seqlen_kv);
    }
    const char *isa = test_isa[n % test_isas];
    qkv_context context = test_context(isa);
    assert_int_equal(qkv_scores(&context, p, QKV_SCORES_BIASED, NULL, &to[0]), QKV_OK);
    assert_int_equal(qkv_scores(&context, p, QKV_WEIGHTS, NULL, &to[1]), QKV_OK);
    oracle *o = oracle_new(p);
    oracle_value *out = test_alloc((size_t)p->head_dim_v * sizeof *out), lse, score, weight;
    assert_non_null(o);
    int64_t at[4];
    for (at[0] = 0; at[0] < p->batch; at[0]++) {
      for (at[1] = 0; at[1] < p->num_heads; at[1]++) {
        for (at[2] = 0; at[2] < problem_rows(p, at[0]); at[2]++) {
          oracle_row(o, at[0], at[1], at[2], out, &lse);
          for (at[3] = 0; at[3] < problem_keys(p, at[0]); at[3]++) {
            oracle_score(o, at[3], &score, &weight);
            int64_t offset = at[0] * to[0].stride[0] + at[1] * to[0].stride[1] + at[2] * to[0].stride[2] + at[3];
            judge_score(&score, problem_load(&to[0], offset), text, "score", at);
            judge_score(&weight, problem_load(&to[1], offset), text, "weight", at);
          }
        }
      }
    }
    /* A region is that part of the whole, bit for bit; without softcap, bias and slopes the stages are the same. */
    if (p->batch > 0 && p->num_heads > 1 && rows > 2 && p->cu_seqlens_q == NULL) {
      qkv_region region = {p->batch - 1, p->batch, 1, p->num_heads, 1, rows - 1};
      for (int32_t stage = QKV_SCORES_BIASED; stage <= QKV_WEIGHTS; stage++) {
        assert_int_equal(qkv_scores(&context, p, stage, &region, &to[2]), QKV_OK);
        for (int64_t h = 1; h < p->num_heads; h++) {
          for (int64_t i = 1; i < rows - 1; i++) {
            for (int64_t j = 0; j < p->seqlen_kv; j++) {
              const qkv_tensor *whole = &to[stage == QKV_WEIGHTS];
              int64_t from = (p->batch - 1) * whole->stride[0] + h * whole->stride[1] + i * whole->stride[2] + j;
              int64_t in_region = (h - 1) * to[2].stride[1] + (i - 1) * to[2].stride[2] + j;
              if (p->cu_seqlens_kv != NULL && j >= problem_keys(p, p->batch - 1)) {
                continue;
              }
              assert_true(compare_same_bits(whole, from, &to[2], in_region));
            }
          }
        }
      }
    }
    if ((spec.bias == PROBLEM_NO_BIAS || spec.bias == PROBLEM_BIAS) &&
        spec.nan != PROBLEM_VISIBLE_NAN) { /* no -inf that hides */
      qkv_problem bare = *p;
      bare.bias.data = bare.alibi_slopes.data = NULL;
      for (int32_t stage = QKV_SCORES_RAW; stage <= QKV_SCORES_CAPPED; stage++) {
        assert_int_equal(qkv_scores(&context, p, stage, NULL, &to[0]), QKV_OK);
        if (stage == QKV_SCORES_RAW && p->softcap > 0) {
          continue;
        }
        assert_int_equal(qkv_scores(&context, &bare, QKV_SCORES_BIASED, NULL, &to[2]), QKV_OK);
        for (int64_t b = 0; b < p->batch; b++) {
          for (int64_t h = 0; h < p->num_heads; h++) {
            for (int64_t i = 0; i < problem_rows(p, b); i++) {
              for (int64_t j = 0; j < problem_keys(p, b); j++) {
                int64_t offset = b * to[0].stride[0] + h * to[0].stride[1] + i * to[0].stride[2] + j;
                if (!compare_same_bits(&to[0], offset, &to[2], offset)) {
                  fail_msg("%s: stage %d is not the score of the problem without bias", text, (int)stage);
                }
              }
            }
          }
        }
      }
    }
    oracle_free(o);
    free(out);
    for (int k = 0; k < 3; k++) {
      problem_buffer_free(&memory[k]);
    }
    problem_free(&c);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_texts_read_back), cmocka_unit_test(test_random_problems), cmocka_unit_test(test_head_dims),
    cmocka_unit_test(test_lengths),         cmocka_unit_test(test_head_counts),     cmocka_unit_test(test_scores),
};

TEST_MAIN(tests)

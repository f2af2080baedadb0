/* Gradients under QKV_FAST: within the bound of FAST, the same bits for any executor, schedule and part of the batch, hidden values
 * that are not finite, and the canonical bits where types or CPU do not allow it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradients.h"

static const char *const tables[] = {"amx", "avx512_bf16"};
static const uint32_t schedules[] = {0, QKV_FORCE_SPLIT, QKV_FORCE_PASSES, QKV_FORCE_STAGE, QKV_NO_SKIP};

/* Whether the CPU has the table: its name is known, and what runs is it. */
static bool has(const char *table, const sample *s) {
  char text[4096], isa[64];
  const qkv_context context = test_context(table);
  return qkv_backward_describe(&context, &s->c.problem, &s->g.g, text, sizeof text) == QKV_OK &&
         prove_fact(text, "isa", isa, sizeof isa) && strcmp(isa, table) == 0;
}

static void fast_open(sample *s, const char *text) {
  sample_open(s, PROBLEM_GUARD_END, "%s", text);
  s->c.problem.arithmetic = QKV_FAST;
}

/* Every executor and schedule gives the bits of `expected`. */
static void same_bits(sample *s, const char *table, const qkv_gradients *expected, const char *text) {
  for (size_t f = 0; f < COUNT(schedules); f++) {
    executor e = executor_make(f % 2 ? EXECUTOR_SCATTERED : EXECUTOR_REVERSED, 1 + (int32_t)f, f);
    qkv_context context = executor_context(&e);
    context.isa_cap = table;
    context.flags = schedules[f];
    problem_gradients_clear(&s->g);
    assert_int_equal(qkv_backward(&context, &s->c.problem, &s->g.g, NULL, 0), QKV_OK);
    backward_same(&s->c.problem, expected, &s->c.problem, &s->g.g, "%s, flags %u, %s", table, (unsigned)schedules[f], text);
    assert_true(problem_gradients_gaps_intact(&s->g));
  }
}

static void judge(sample *s, const char *table, const char *text) {
  const qkv_problem *p = &s->c.problem;
  gradients_copy expected;
  const qkv_context context = test_context(table);
  problem_clear_outputs(&s->c);
  assert_int_equal(qkv_forward(&context, p, NULL, 0), QKV_OK);
  gradients_copy_make(&expected, p, &s->g.g);
  expected.g.accumulate = 0;
  backward_run(table, p, &expected.g);
  backward_accurate(p, &expected.g, NULL, "%s, %s", table, text);
  if (s->g.g.accumulate == 0) {
    same_bits(s, table, &expected.g, text);
    problem_gradients_clear(&s->g);
    qkv_gradients part = s->g.g;
    for (int64_t b = 0; b < p->batch; b++) { /* each entry alone */
      problem_view view;
      qkv_gradients g;
      problem_view_entry(&view, p, b, 0, p->num_kv_heads);
      problem_view_gradients(&g, p, &s->g.g, b, 0, p->num_kv_heads);
      part.dbias.data = g.dbias.data != NULL ? part.dbias.data : NULL;
      part.dsinks.data = g.dsinks.data != NULL ? part.dsinks.data : NULL;
      backward_run(table, &view.problem, &g);
    }
    backward_same(p, &expected.g, p, &part, "%s, entries alone, %s", table, text);
  }
  gradients_copy_free(&expected);
}

static void test_accuracy_and_bits(void **state) {
  (void)state;
  static const char *const texts[] = {
      "bf16 b2 h4/2 q150 k200 d64 causal seed:1",
      "bf16 h2 q70 k130 d33/20 out:f32 dout:f32 dq:f32 dk:f32 dv:f32 causal seed:2",
      "bf16 b2 h2 q65 k65 d8/40 bias sinks dlse softcap:20 seed:3",
      "bf16 b3 h2/1 q200 k300 d17 ragged lengths kvpos window:100,20 alibi out:f32 dlse seed:4",
      "bf16 h2 q90 k90 d128 dropout:0.1 causal bias:b1h1 seed:5",
      "bf16 b2 h2 q40 k600 d16 odd tile dense nan seed:6",
      "bf16 h4/1 q1 k500 d96 out:f32 dq:f32 seed:7",
      "bf16 h2 q130 k70 d64 tiny out:f32 dout:f32 dq:f32 dv:f32 seed:8",
      "bf16 h2 q70 k140 d64 visnan causal seed:14",
  };
  for (size_t t = 0; t < COUNT(tables); t++) {
    int count = 0;
    for (size_t n = 0; n < COUNT(texts); n++) {
      sample s;
      fast_open(&s, texts[n]);
      if (has(tables[t], &s)) {
        judge(&s, tables[t], texts[n]);
        count++;
      }
      sample_free(&s);
    }
    int64_t rounds = test_scale(60);
    for (int64_t n = 0; n < rounds; n++) {
      problem_spec spec;
      sample s;
      char text[PROBLEM_TEXT_BYTES];
      problem_random(21, (uint64_t)n, 1e5, &spec);
      if (spec.dtype == QKV_F64) {
        continue;
      }
      spec.dtype = QKV_BF16;
      spec.algorithm = QKV_FLASH;
      spec.tensor_dtype[0] = spec.tensor_dtype[1] = spec.tensor_dtype[2] = 0;
      problem_print(&spec, text, sizeof text);
      fast_open(&s, text);
      if (has(tables[t], &s)) {
        judge(&s, tables[t], text);
        count++;
      }
      sample_free(&s);
    }
    print_message("%s: %d problems by its instructions\n", tables[t], count);
  }
}

/* Other types, the baseline, and instruction sets without such products. */
static void test_elsewhere(void **state) {
  (void)state;
  static const char *const texts[] = {"f16 h2 q70 k90 d33 causal seed:1", "bf16 h2 q70 k90 d33 q:f32 causal bias seed:2",
                                      "bf16 h2 q70 k90 d33 standard dropout:0.2 seed:3",
                                      "bf16 h2 q70 k90 d33 causal seed:4"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    sample s;
    gradients_copy expected;
    sample_open(&s, 0, "%s", texts[n]);
    gradients_copy_make(&expected, &s.c.problem, &s.g.g);
    backward_run("reference", &s.c.problem, &expected.g);
    s.c.problem.arithmetic = QKV_FAST;
    for (int isa = 0; isa < test_isas; isa++) {
      backward_run(test_isa[isa], &s.c.problem, &s.g.g);
      backward_same(&s.c.problem, &expected.g, &s.c.problem, &s.g.g, "isa %s, FAST where it does not apply: %s",
                    test_isa[isa], texts[n]);
    }
    gradients_copy_free(&expected);
    sample_free(&s);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_accuracy_and_bits),
    cmocka_unit_test(test_elsewhere),
};

TEST_MAIN(tests)

/* Real threads: tasks of one call in scattered order, and several calls at a time on one problem. */
#include "common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const char *const texts[] = {"f32 b2 h4/2 q200 k700 d16 causal lse seed:1", "f32 h8/1 q1 k2100 d32 lse seed:2",
                                    "f32 b3 h2 q100 k900 d8 ragged lengths window:200,3 sinks lse seed:3",
                                    "f64 h2 q70 k1300 d5 tile dense bias lse seed:4",
                                    "f32 b2 h2 q90 k200 d16 standard causal softcap:4 lse seed:5"};
enum { TEXTS = sizeof texts / sizeof texts[0] };

static void test_threads_in_one_call(void **state) {
  (void)state;
  for (int n = 0; n < TEXTS; n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    test_copy expected;
    test_copy_make(&expected, &c.problem);
    test_run("reference", &expected.p);
    for (int isa = 0; isa < test_isas; isa++) {
      for (int32_t workers = 2; workers <= 4; workers++) {
        for (int split = 0; split < 2; split++) {
          executor e = executor_make(EXECUTOR_SCATTERED, workers, (uint64_t)n);
          qkv_context context = executor_context(&e);
          context.isa_cap = test_isa[isa];
          context.flags = split ? QKV_FORCE_SPLIT : 0;
          problem_clear_outputs(&c);
          assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_OK);
          test_same(&expected.p, &c.problem, "isa %s, %d threads, %s", test_isa[isa], (int)workers, texts[n]);
        }
      }
    }
    test_copy_free(&expected);
    problem_free(&c);
  }
}

typedef struct caller {
  const qkv_problem *shared;
  test_copy own;
  const char *isa;
  qkv_status status;
  pthread_t thread;
} caller;

static void *call(void *data) {
  caller *c = data;
  qkv_context context = test_context(c->isa);
  char text[4096];
  for (int n = 0; n < 3 && c->status == QKV_OK; n++) {
    c->status = qkv_forward(&context, &c->own.p, NULL, 0);
    if (c->status == QKV_OK) {
      c->status = qkv_describe(&context, c->shared, text, sizeof text);
    }
  }
  return NULL;
}

static void test_threads_with_calls_of_their_own(void **state) {
  (void)state;
  enum { CALLERS = 4 };
  for (int n = 0; n < TEXTS; n++) {
    problem_case c;
    caller callers[CALLERS];
    test_open(&c, 0, "%s", texts[n]);
    memset(callers, 0, sizeof callers);
    for (int k = 0; k < CALLERS; k++) {
      callers[k].shared = &c.problem;
      callers[k].isa = test_isa[k % test_isas];
      test_copy_make(&callers[k].own, &c.problem);
    }
    for (int k = 0; k < CALLERS; k++) {
      assert_int_equal(pthread_create(&callers[k].thread, NULL, call, &callers[k]), 0);
    }
    for (int k = 0; k < CALLERS; k++) {
      pthread_join(callers[k].thread, NULL);
    }
    for (int k = 0; k < CALLERS; k++) {
      assert_int_equal(callers[k].status, QKV_OK);
      test_same(&callers[0].own.p, &callers[k].own.p, "%s: callers 0 and %d", texts[n], k);
    }
    for (int k = 0; k < CALLERS; k++) {
      test_copy_free(&callers[k].own);
    }
    problem_free(&c);
  }
}

static void test_cancel(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 h4 q200 k300 d16 causal lse");
  const int32_t cancel = 1, go_on = 0;
  for (int isa = 0; isa < test_isas; isa++) {
    executor e = executor_make(EXECUTOR_THREADS, 3, 1);
    qkv_context context = executor_context(&e);
    context.isa_cap = test_isa[isa];
    context.cancel = &cancel;
    assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_CANCELLED);
    context.cancel = &go_on;
    assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_OK);
  }
  problem_free(&c);
}

/* Serial executors find work for many workers where there is some. */
static void test_tasks_are_many(void **state) {
  (void)state;
  static const char *const cases[] = {"f32 h8 q512 k512 d16 causal", "f32 h1 q1 k16384 d16", "f32 h2 q64 k8192 d16",
                                      "f32 b16 h8 q1 k512 d16"};
  for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", cases[n]);
    executor e = executor_make(EXECUTOR_SERIAL, 8, 1);
    qkv_context context = executor_context(&e);
    assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_OK);
    if (e.tasks < 8) {
      fail_msg("%s: %d tasks only", cases[n], (int)e.tasks);
    }
    problem_free(&c);
  }
}

/* The list of tasks, longest first, keeps 64 workers busy: what describe predicts from the work it really contains. */
static void test_balance(void **state) {
  (void)state;
  int32_t cu[41] = {0};
  qkv_mask causal = qkv_causal();
  qkv_context context = qkv_context_default();
  executor e = executor_make(EXECUTOR_SERIAL, 64, 1);
  context = executor_context(&e);
  for (int n = 0; n < 40; n++) cu[n + 1] = cu[n] + (n % 10 == 3 ? 4000 : 100 + 20 * n); /* short segments and long ones */
  for (int n = 0; n < 3; n++) {
    char text[2048];
    qkv_problem p = qkv_problem_default();
    p.batch = 1;
    p.num_heads = 8;
    p.seqlen_q = p.seqlen_kv = 4096;
    p.head_dim = n == 0 ? 64 : 128;
    p.mask = &causal;
    p.mask_count = 1;
    if (n == 2) {
      p.batch = 40;
      p.num_kv_heads = 2;
      p.head_dim = 64;
      p.seqlen_q = p.seqlen_kv = cu[40];
      p.cu_seqlens_q = p.cu_seqlens_kv = cu;
    }
    assert_int_equal(qkv_describe(&context, &p, text, sizeof text), QKV_OK);
    const char *balance = strstr(text, "balance: ");
    assert_non_null(balance);
    if (strtod(balance + 9, NULL) < 0.97) fail_msg("problem %d on 64 workers: %s", n, balance);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_threads_in_one_call),
    cmocka_unit_test(test_threads_with_calls_of_their_own),
    cmocka_unit_test(test_cancel),
    cmocka_unit_test(test_tasks_are_many),
    cmocka_unit_test(test_balance),
};

TEST_MAIN(tests)

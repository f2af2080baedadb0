/* The same bits for any number of threads, in any order, again and again; several calls at a time; an early end; and training. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradients.h"
#include "rng.h"

static const char *const texts[] = {
    "f32 h1 q200 k260 d16 causal seed:1", "f32 b2 h2/1 q130 k140 d16 bias:b1h1 sinks dlse seed:2",
    "f32 b3 h2 q100 k200 d8 ragged lengths window:200,3 sinks bias:q1 dropout:0.1 seed:3",
    "f64 h2 q70 k140 d5 tile dense bias seed:4", "bf16 h4/1 q70 k140 d8 standard causal softcap:4 seed:5"};
static const uint32_t schedules[] = {0, QKV_FORCE_SPLIT, QKV_FORCE_PASSES};

static void test_thirty_runs(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    gradients_copy expected;
    sample_open(&s, 0, "%s", texts[n]);
    gradients_copy_make(&expected, &s.c.problem, &s.g.g);
    backward_run("reference", &s.c.problem, &expected.g);
    EVERY_KERNEL {
      int64_t runs = test_scale(30);
      for (int64_t run = 0; run < runs; run++) {
        executor e =
            executor_make(run % 3 == 2 ? EXECUTOR_SCATTERED : EXECUTOR_THREADS, 1 + (int32_t)(run % 6), (uint64_t)run);
        qkv_context context = executor_context(&e);
        context.isa_cap = ISA;
        context.flags = schedules[run / 6 % (int64_t)COUNT(schedules)];
        problem_gradients_clear(&s.g);
        assert_int_equal(qkv_backward(&context, &s.c.problem, &s.g.g, NULL, 0), QKV_OK);
        backward_same(&s.c.problem, &expected.g, &s.c.problem, &s.g.g, "isa %s, run %d, %d threads, %s", ISA, (int)run,
                      (int)e.workers, texts[n]);
      }
    }
    gradients_copy_free(&expected);
    sample_free(&s);
  }
}

typedef struct caller {
  const qkv_problem *shared;
  gradients_copy own;
  const char *isa;
  uint32_t flags;
  qkv_status status;
  pthread_t thread;
} caller;

static void *call(void *data) {
  caller *c = data;
  qkv_context context = test_context(c->isa);
  char text[4096];
  context.flags = c->flags;
  for (int n = 0; n < 3 && c->status == QKV_OK; n++) {
    c->status = qkv_backward(&context, c->shared, &c->own.g, NULL, 0);
    if (c->status == QKV_OK) {
      c->status = qkv_backward_describe(&context, c->shared, &c->own.g, text, sizeof text);
    }
  }
  return NULL;
}

static void test_threads_with_calls_of_their_own(void **state) {
  (void)state;
  enum { CALLERS = 4 };
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    caller callers[CALLERS];
    sample_open(&s, 0, "%s", texts[n]);
    memset(callers, 0, sizeof callers);
    for (int k = 0; k < CALLERS; k++) {
      callers[k].shared = &s.c.problem;
      callers[k].isa = test_isa[k % test_isas];
      callers[k].flags = schedules[k % (int)COUNT(schedules)];
      gradients_copy_make(&callers[k].own, &s.c.problem, &s.g.g);
    }
    for (int k = 0; k < CALLERS; k++) {
      assert_int_equal(pthread_create(&callers[k].thread, NULL, call, &callers[k]), 0);
    }
    for (int k = 0; k < CALLERS; k++) {
      pthread_join(callers[k].thread, NULL);
    }
    for (int k = 0; k < CALLERS; k++) {
      assert_int_equal(callers[k].status, QKV_OK);
      backward_same(&s.c.problem, &callers[0].own.g, &s.c.problem, &callers[k].own.g, "%s: callers 0 and %d", texts[n], k);
    }
    for (int k = 0; k < CALLERS; k++) {
      gradients_copy_free(&callers[k].own);
    }
    sample_free(&s);
  }
}

/* ---- An early end -------------------------------------------------------------------------------------------------- */

static void test_cancelled_before(void **state) {
  (void)state;
  sample s;
  const int32_t cancel = 1, go_on = 0;
  sample_open(&s, PROBLEM_GUARD_END, "f32 h4 q200 k300 d16 causal bias:h1 sinks seed:1");
  EVERY_ISA {
    for (size_t f = 0; f < COUNT(schedules); f++) {
      executor e = executor_make(EXECUTOR_THREADS, 3, 1);
      qkv_context context = executor_context(&e);
      context.isa_cap = ISA;
      context.flags = schedules[f];
      context.cancel = &cancel;
      assert_int_equal(qkv_backward(&context, &s.c.problem, &s.g.g, NULL, 0), QKV_CANCELLED);
      context.cancel = &go_on;
      assert_int_equal(qkv_backward(&context, &s.c.problem, &s.g.g, NULL, 0), QKV_OK);
      backward_accurate(&s.c.problem, &s.g.g, NULL, "isa %s, after a cancelled call", ISA);
    }
  }
  sample_free(&s);
}

/* The n-th visible question to a callback sets the flag, on whatever thread it is. */
typedef struct alarm_clock {
  _Atomic int32_t left;
  int32_t cancel; /* written by one thread; read as the library does */
} alarm_clock;

static int32_t ringing(void *user, const qkv_tile *t, uint64_t *bits) {
  alarm_clock *a = user;
  (void)t;
  (void)bits;
  if (atomic_fetch_sub(&a->left, 1) == 1) {
    __atomic_store_n(&a->cancel, 1, __ATOMIC_RELAXED);
  }
  return QKV_TILE_ALL;
}

static void test_cancelled_in_the_midst(void **state) {
  (void)state;
  sample s;
  sample_open(&s, PROBLEM_GUARD_END, "f32 h4/2 q200 k300 d16 seed:1");
  qkv_problem p = s.c.problem;
  EVERY_KERNEL {
    for (size_t f = 0; f < COUNT(schedules); f++) {
      for (int32_t after = 1; after < 40; after += 4) {
        alarm_clock a = {after, 0};
        qkv_mask mask = qkv_tiles(ringing, &a);
        executor e = executor_make(after % 3 == 0 ? EXECUTOR_SHUFFLED : EXECUTOR_THREADS, 3, (uint64_t)after);
        qkv_context context = executor_context(&e);
        context.isa_cap = ISA;
        context.flags = schedules[f];
        context.cancel = &a.cancel;
        p.mask = &mask;
        p.mask_count = 1;
        qkv_status status = qkv_backward(&context, &p, &s.g.g, NULL, 0);
        assert_true(status == (a.cancel ? QKV_CANCELLED : QKV_OK) || status == QKV_OK);
      }
    }
  }
  sample_free(&s);
}

/* ---- Work for many workers ----------------------------------------------------------------------------------------- */

/* Batch 1 and one key-value head must keep two workers busy: more than one task, and a balance that allows it. */
static void test_work_is_divided(void **state) {
  (void)state;
  static const char *const cases[] = {"f32 h1 q2048 k2048 d64", "f32 h1 q2048 k2048 d64 causal",
                                      "f32 b2 h8/4 q512 k512 d64 causal", "f32 h8/1 q1024 k1024 d64 causal"};
  for (size_t n = 0; n < COUNT(cases); n++) {
    problem_case c; /* shapes and the mask; no data is needed */
    char text[4096], tasks[64], balance[64];
    test_open(&c, 0, "%s", cases[n]);
    for (int32_t workers = 2; workers <= 4; workers++) {
      executor e = executor_make(EXECUTOR_SERIAL, workers, 1);
      qkv_context context = executor_context(&e);
      assert_int_equal(qkv_backward_describe(&context, &c.problem, NULL, text, sizeof text), QKV_OK);
      assert_true(prove_fact(text, "tasks", tasks, sizeof tasks) && prove_fact(text, "balance", balance, sizeof balance));
      if (strtod(tasks, NULL) < workers || strtod(balance, NULL) < 0.9) {
        fail_msg("%s, %d workers: %s tasks, balance %s", cases[n], (int)workers, tasks, balance);
      }
    }
    problem_free(&c);
  }
}

/* ---- Training ------------------------------------------------------------------------------------------------------ */

enum { HEADS = 2, N = 80, D = 12, STEPS = 60, VALUES = HEADS * N * D };

typedef struct model {
  float q[VALUES], k[VALUES], v[VALUES], bias[N * N], sinks[HEADS], out[VALUES], lse[HEADS * N], target[VALUES];
  float dout[VALUES], dq[VALUES], dk[VALUES], dv[VALUES], dbias[N * N], dsinks[HEADS];
  double loss[STEPS];
} model;

static void step_down(float *x, const float *gradient, int count, float rate) {
  for (int n = 0; n < count; n++) {
    x[n] -= rate * gradient[n];
  }
}

/* Gradient steps towards a target through attention. */
static void train(model *m, const qkv_context *context, double dropout) {
  const float rate = 0.05f;
  qkv_mask causal = qkv_causal();
  qkv_problem p = qkv_problem_default();
  qkv_gradients g = qkv_gradients_default();
  for (int n = 0; n < VALUES; n++) {
    m->q[n] = (float)rng_normal_at(1, 1, (uint64_t)n);
    m->k[n] = (float)rng_normal_at(1, 2, (uint64_t)n);
    m->v[n] = (float)rng_normal_at(1, 3, (uint64_t)n) / 4;
    m->target[n] = sinf((float)n * 0.05f);
  }
  memset(m->bias, 0, sizeof m->bias);
  memset(m->sinks, 0, sizeof m->sinks);
  p.batch = 1;
  p.num_heads = HEADS;
  p.seqlen_q = p.seqlen_kv = N;
  p.head_dim = D;
  p.mask = &causal;
  p.mask_count = 1;
  p.dropout = dropout;
  p.q = qkv_bhsd(m->q, QKV_F32, HEADS, N, D);
  p.k = qkv_bhsd(m->k, QKV_F32, HEADS, N, D);
  p.v = qkv_bhsd(m->v, QKV_F32, HEADS, N, D);
  p.out = qkv_bhsd(m->out, QKV_F32, HEADS, N, D);
  p.lse = qkv_bhs(m->lse, QKV_F32, HEADS, N);
  p.bias = qkv_strided(m->bias, QKV_F32, 0, 0, N, 1);
  p.sinks = qkv_per_head(m->sinks, QKV_F32);
  g.dout = qkv_bhsd(m->dout, QKV_F32, HEADS, N, D);
  g.dq = qkv_bhsd(m->dq, QKV_F32, HEADS, N, D);
  g.dk = qkv_bhsd(m->dk, QKV_F32, HEADS, N, D);
  g.dv = qkv_bhsd(m->dv, QKV_F32, HEADS, N, D);
  g.dbias = qkv_strided(m->dbias, QKV_F32, 0, 0, N, 1);
  g.dsinks = qkv_per_head(m->dsinks, QKV_F32);
  for (int step = 0; step < STEPS; step++) {
    p.offset = (uint64_t)step;
    assert_int_equal(qkv_forward(context, &p, NULL, 0), QKV_OK);
    m->loss[step] = 0;
    for (int n = 0; n < VALUES; n++) {
      m->dout[n] = m->out[n] - m->target[n];
      m->loss[step] += 0.5 * (double)(m->dout[n] * m->dout[n]);
    }
    assert_int_equal(qkv_backward(context, &p, &g, NULL, 0), QKV_OK);
    step_down(m->q, m->dq, VALUES, rate);
    step_down(m->k, m->dk, VALUES, rate);
    step_down(m->v, m->dv, VALUES, rate);
    step_down(m->bias, m->dbias, N * N, rate);
    step_down(m->sinks, m->dsinks, HEADS, rate);
  }
}

static void test_training(void **state) {
  (void)state;
  static const double rates[] = {0, 0.1};
  for (size_t d = 0; d < COUNT(rates); d++) {
    model *first = test_alloc(sizeof *first), *other = test_alloc(sizeof *other);
    qkv_context serial = test_context(test_isa[0]);
    train(first, &serial, rates[d]);
    if (rates[d] <= 0 && !(first->loss[STEPS - 1] < 0.05 * first->loss[0])) {
      fail_msg("the loss went from %g to %g only", first->loss[0], first->loss[STEPS - 1]);
    }
    assert_true(first->loss[STEPS - 1] < first->loss[0]);
    EVERY_KERNEL {
      for (int32_t threads = 1; threads <= 2; threads++) {
        for (size_t f = 0; f < (isa_index == 0 ? COUNT(schedules) : 1); f++) {
          executor e = executor_make(EXECUTOR_THREADS, threads, 1);
          qkv_context context = executor_context(&e);
          context.isa_cap = ISA;
          context.flags = schedules[f];
          train(other, &context, rates[d]);
          if (memcmp(first->loss, other->loss, sizeof first->loss) != 0) {
            fail_msg("isa %s, %d threads, flags %u: another loss curve", ISA, (int)threads, (unsigned)schedules[f]);
          }
        }
      }
    }
    free(first);
    free(other);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_thirty_runs),      cmocka_unit_test(test_threads_with_calls_of_their_own),
    cmocka_unit_test(test_cancelled_before), cmocka_unit_test(test_cancelled_in_the_midst),
    cmocka_unit_test(test_work_is_divided),  cmocka_unit_test(test_training),
};

TEST_MAIN(tests)

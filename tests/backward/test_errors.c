#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* feenableexcept */
#endif
/* What happens when something is wrong: status, text, nothing written; memory that is short; and a floating-point state that is
 * not the usual one. */
#include <errno.h>
#include <fenv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "gradients.h"

static void expect_untouched(const sample *s, const char *what) {
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    const problem_buffer *b = &s->g.buffer[which];
    for (size_t n = 0; n < b->bytes; n++) {
      if (b->begin[n] != 0xff) {
        fail_msg("%s: %s was written", what, problem_gradient_name(which));
      }
    }
  }
}

/* ---- Each field broken in turn ------------------------------------------------------------------------------------- */

typedef struct breakage {
  qkv_status status;
  const char *text[3];
} breakage;

#define CASE(number, code, first, second, third, ...) \
  case number: {                                      \
    *b = (breakage){code, {first, second, third}};    \
    __VA_ARGS__;                                      \
    return true;                                      \
  }

/* The n-th way to break the problem of test_every_field: what must be said, in up to three pieces. False: no more. */
static bool break_it(int n, qkv_problem *p, qkv_gradients *g, breakage *b) {
  const int64_t far = (int64_t)1 << 61;
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "gradients.size", "0", NULL, g->size = 0)
    CASE(1, QKV_UNKNOWN_FIELD, "gradients.accumulate", "0x20", NULL, g->accumulate = 32)
    CASE(2, QKV_UNKNOWN_FIELD, "gradients.accumulate", "0x80000001", NULL, g->accumulate = INT32_MIN | 1)
    CASE(3, QKV_BAD_POINTER, "gradients.dout.data", "NULL", NULL, g->dout.data = NULL)
    CASE(4, QKV_BAD_DTYPE, "gradients.dout", "dtype", "0", g->dout.dtype = 0)
    CASE(5, QKV_BAD_DTYPE, "gradients.dout", "f64", NULL, g->dout.dtype = QKV_F64)
    CASE(6, QKV_BAD_DTYPE, "gradients.dlse", "u8", NULL, g->dlse.dtype = QKV_U8)
    CASE(7, QKV_BAD_DTYPE, "gradients.dlse", "bf16", NULL, g->dlse.dtype = QKV_BF16)
    CASE(8, QKV_BAD_DTYPE, "gradients.dq", "i32", NULL, g->dq.dtype = QKV_I32)
    CASE(9, QKV_UNSUPPORTED, "gradients.dk", "i8", NULL, g->dk.dtype = QKV_I8)
    CASE(10, QKV_BAD_DTYPE, "gradients.dv", "dtype", "99", g->dv.dtype = 99)
    CASE(11, QKV_BAD_DTYPE, "gradients.dbias", "f64", NULL, g->dbias.dtype = QKV_F64)
    CASE(12, QKV_BAD_DTYPE, "gradients.dsinks", "f16", NULL, g->dsinks.dtype = QKV_F16)
    CASE(13, QKV_UNKNOWN_FIELD, "gradients.dq.reserved", "1", NULL, g->dq.reserved = 1)
    CASE(14, QKV_UNKNOWN_FIELD, "gradients.dout.reserved", "-7", NULL, g->dout.reserved = -7)
    CASE(15, QKV_BAD_STRIDE, "gradients.dq", "strides", NULL, g->dq.stride[2] = 0)
    CASE(16, QKV_BAD_STRIDE, "gradients.dq", "strides", "7", g->dq.stride[2] = 7)
    CASE(17, QKV_BAD_STRIDE, "gradients.dk", "strides", NULL, g->dk.stride[1] = 0)
    CASE(18, QKV_BAD_STRIDE, "gradients.dv", "strides", NULL, g->dv.stride[0] = 0)
    CASE(19, QKV_BAD_STRIDE, "gradients.dv", "9223372036854775807", NULL, g->dv.stride[3] = INT64_MAX)
    CASE(20, QKV_BAD_STRIDE, "gradients.dout", "-9223372036854775808", NULL, g->dout.stride[1] = INT64_MIN)
    CASE(21, QKV_BAD_STRIDE, "gradients.dlse", "2305843009213693952", NULL, g->dlse.stride[2] = far)
    CASE(22, QKV_BAD_STRIDE, "gradients.dbias", "strides", NULL, g->dbias.stride[2] = 1)
    CASE(23, QKV_BAD_STRIDE, "gradients.dsinks", "-2305843009213693952", NULL, g->dsinks.stride[1] = -far)
    CASE(24, QKV_BAD_POINTER, "gradients.dbias", "bias.data", "NULL", p->bias.data = NULL)
    CASE(25, QKV_BAD_POINTER, "gradients.dsinks", "sinks.data", "NULL", p->sinks.data = NULL)
    CASE(26, QKV_BAD_OVERLAP, "gradients.dq", "q ", NULL, g->dq.data = p->q.data)
    CASE(27, QKV_BAD_OVERLAP, "gradients.dk", "k ", NULL, g->dk.data = (char *)p->k.data + 64)
    CASE(28, QKV_BAD_OVERLAP, "gradients.dv", "gradients.dout", NULL, g->dv.data = g->dout.data)
    CASE(29, QKV_BAD_OVERLAP, "gradients.dk", "gradients.dq", NULL, g->dq.data = g->dk.data)
    CASE(30, QKV_BAD_OVERLAP, "gradients.dsinks", "out", NULL, g->dsinks.data = p->out.data)
    CASE(31, QKV_BAD_OVERLAP, "gradients.dsinks", "sinks", NULL, g->dsinks.data = p->sinks.data)
    CASE(32, QKV_BAD_OVERLAP, "gradients.dbias", "bias", NULL, g->dbias.data = p->bias.data)
    CASE(33, QKV_BAD_OVERLAP, "gradients.dsinks", "gradients.dlse", NULL, g->dsinks.data = g->dlse.data)
    CASE(34, QKV_BAD_OVERLAP, "gradients.dsinks", "lse", NULL, g->dsinks.data = p->lse.data)
    CASE(35, QKV_BAD_POINTER, "lse.data", "NULL", NULL, p->lse.data = NULL)
    CASE(36, QKV_BAD_POINTER, "out.data", "NULL", NULL, p->out.data = NULL)
    CASE(37, QKV_BAD_DTYPE, "lse", "f64", NULL, p->lse.dtype = QKV_F64)
    CASE(38, QKV_BAD_POINTER, "q.data", "NULL", NULL, p->q.data = NULL)
    CASE(39, QKV_BAD_EXTENT, "num_heads 6", "num_kv_heads 4", NULL, p->num_kv_heads = 4)
    CASE(40, QKV_BAD_VALUE, "dropout", "-0.25", NULL, p->dropout = -0.25)
    CASE(41, QKV_BAD_VALUE, "dropout", "1.5", NULL, p->dropout = 1.5)
    CASE(42, QKV_BAD_VALUE, "dropout", "nan", NULL, p->dropout = (double)NAN)
    CASE(43, QKV_BAD_VALUE, "batch_origin", "-1", NULL, p->batch_origin = -1)
    CASE(44, QKV_BAD_VALUE, "head_origin", "-2", NULL, p->head_origin = -2)
    CASE(45, QKV_BAD_VALUE, "heads_total 5", "num_heads 6", NULL, p->heads_total = 5)
    CASE(46, QKV_BAD_VALUE, "head_origin 3", "heads_total 8", NULL, (p->head_origin = 3, p->heads_total = 8))
    CASE(47, QKV_BAD_VALUE, "softmax_scale", "inf", NULL, p->softmax_scale = (double)INFINITY)
  default: return false;
  }
}

static void test_every_field(void **state) {
  (void)state;
  sample s;
  char text[512];
  sample_open(&s, PROBLEM_GUARD_END, "f32 b2 h6/3 q70 k300 d16/8 bias sinks dlse causal");
  assert_int_equal(qkv_backward_check(&s.c.problem, &s.g.g, NULL, 0), QKV_OK);
  memset(text, 'x', sizeof text);
  assert_int_equal(qkv_backward_check(&s.c.problem, &s.g.g, text, sizeof text), QKV_OK);
  assert_string_equal(text, "");
  for (int n = 0;; n++) {
    qkv_problem p = s.c.problem;
    qkv_gradients g = s.g.g;
    breakage b;
    if (!break_it(n, &p, &g, &b)) {
      assert_true(n > 45);
      break;
    }
    memset(text, 'x', sizeof text);
    qkv_status status = qkv_backward_check(&p, &g, text, sizeof text);
    if (status != b.status) {
      fail_msg("case %d (%s %s): status %d (%s), expected %d", n, b.text[0], b.text[1], (int)status, status != 0 ? text : "",
               (int)b.status);
    }
    for (int k = 0; k < 3 && b.text[k] != NULL; k++) {
      if (strstr(text, b.text[k]) == NULL) {
        fail_msg("case %d: the text lacks '%s': %s", n, b.text[k], text);
      }
    }
    char small[12];
    memset(small, 'x', sizeof small);
    assert_int_equal(qkv_backward_check(&p, &g, small, 8), b.status);
    assert_true(memchr(small, 0, 8) != NULL && small[8] == 'x');
    assert_int_equal(qkv_backward_check(&p, &g, NULL, 0), b.status);
    /* These look at no data. */
    bool shape = b.status == QKV_BAD_EXTENT || b.status == QKV_BAD_VALUE || b.status == QKV_BAD_SIZE;
    size_t bytes = 77;
    double dscale = 77;
    status = qkv_backward_scratch(NULL, &p, &g, &bytes);
    if (status != b.status && (shape || status != QKV_OK)) {
      fail_msg("case %d: qkv_backward_scratch gives %d, not %d", n, (int)status, (int)b.status);
    }
    status = qkv_scale_gradient(&p, &g, &dscale);
    assert_int_equal(status, b.status);
    assert_true(dscale >= 77 && dscale <= 77);
    EVERY_ISA {
      qkv_context context = test_context(ISA);
      assert_int_equal(qkv_backward(&context, &p, &g, NULL, 0), b.status);
      status = qkv_backward_describe(&context, &p, &g, text, sizeof text);
      assert_true(status == b.status || (!shape && status == QKV_OK));
    }
    expect_untouched(&s, "a broken field");
  }
  sample_free(&s);
}

static void test_null_and_size(void **state) {
  (void)state;
  sample s;
  char text[4096];
  size_t bytes = 0, with_gradients = 0;
  double dscale;
  sample_open(&s, 0, "f32 h2 q70 k65 d16 causal seed:1");
  const qkv_problem *p = &s.c.problem;
  qkv_gradients *g = &s.g.g;
  assert_int_equal(qkv_backward(NULL, NULL, g, NULL, 0), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward(NULL, p, NULL, NULL, 0), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward_check(p, NULL, text, sizeof text), QKV_BAD_POINTER);
  assert_non_null(strstr(text, "gradients"));
  assert_int_equal(qkv_backward_check(NULL, g, text, sizeof text), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward_scratch(NULL, p, g, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward_scratch(NULL, NULL, g, &bytes), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward_describe(NULL, NULL, g, text, sizeof text), QKV_BAD_POINTER);
  assert_int_equal(qkv_backward_describe(NULL, p, g, NULL, 8), QKV_BAD_POINTER);
  assert_int_equal(qkv_scale_gradient(p, g, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_scale_gradient(p, NULL, &dscale), QKV_BAD_POINTER);
  qkv_gradients without = *g;
  without.dq = qkv_strided(NULL, 0, 0, 0, 0, 0);
  assert_int_equal(qkv_scale_gradient(p, &without, &dscale), QKV_BAD_POINTER);
  expect_untouched(&s, "NULL");
  /* Without gradients: what dq, dk and dv need. */
  assert_int_equal(qkv_backward_scratch(NULL, p, NULL, &bytes), QKV_OK);
  assert_int_equal(qkv_backward_scratch(NULL, p, g, &with_gradients), QKV_OK);
  assert_int_equal(bytes, with_gradients);
  assert_int_equal(qkv_backward_describe(NULL, p, NULL, text, sizeof text), QKV_OK);
  assert_true(prove_fact(text, "direction", text, sizeof text) && strcmp(text, "backward") == 0);
  assert_int_equal(qkv_backward_describe(NULL, p, g, text, 0), QKV_OK);
  /* Before there is any data: shapes are enough. */
  qkv_problem bare = *p;
  qkv_gradients shapes = *g;
  bare.q.data = bare.k.data = bare.v.data = bare.out.data = bare.lse.data = NULL;
  shapes.dout.data = NULL;
  assert_int_equal(qkv_backward_scratch(NULL, &bare, &shapes, &with_gradients), QKV_OK);
  assert_int_equal(bytes, with_gradients);
  /* A newer caller's struct: unknown bytes must be zero. An older caller's: what is missing is not wanted. */
  struct {
    qkv_gradients g;
    char more[24];
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.g = *g;
  newer.g.size = sizeof newer;
  assert_int_equal(qkv_backward(NULL, p, &newer.g, NULL, 0), QKV_OK);
  newer.more[20] = 1;
  assert_int_equal(qkv_backward_check(p, &newer.g, text, sizeof text), QKV_UNKNOWN_FIELD);
  problem_gradients_clear(&s.g);
  qkv_gradients older = *g;
  older.size = offsetof(qkv_gradients, dv);
  older.dbias.dtype = 99;
  assert_int_equal(qkv_backward(NULL, p, &older, NULL, 0), QKV_OK);
  assert_true(s.g.buffer[PROBLEM_DV].begin[0] == 0xff && s.g.buffer[PROBLEM_DK].begin[3] != 0xff);
  problem_gradients_clear(&s.g);
  /* Nothing is wanted: nothing happens. */
  older.size = offsetof(qkv_gradients, dq);
  assert_int_equal(qkv_backward(NULL, p, &older, NULL, 0), QKV_OK);
  expect_untouched(&s, "nothing wanted");
  sample_free(&s);
}

/* ---- Context and memory -------------------------------------------------------------------------------------------- */

typedef struct counting_allocator {
  int64_t calls, fail_at, live;
  size_t last_alignment;
} counting_allocator;

static void *counted_alloc(void *self, size_t bytes, size_t alignment) {
  counting_allocator *a = self;
  a->last_alignment = alignment;
  if (++a->calls == a->fail_at) {
    return NULL;
  }
  a->live++;
  if (alignment < sizeof(void *)) {
    alignment = sizeof(void *);
  }
  void *memory = NULL;
  if (posix_memalign(&memory, alignment, bytes + 1) != 0) {
    return NULL;
  }
  memset(memory, 0xff, bytes);
  return memory;
}
static void counted_release(void *self, void *memory) {
  counting_allocator *a = self;
  a->live--;
  free(memory);
}

static const char *const texts[] = {"f32 h2 q70 k200 d16 causal dlse seed:1", "f32 b2 h4/1 q1 k500 d16 sinks bias seed:2",
                                    "f64 h2 q70 k100 d16 standard bias:q1k1 seed:3",
                                    "bf16 h2 q70 k130 d16 odd bias tile dropout:0.2 ragged seed:4"};
static const uint32_t schedules[] = {0, QKV_FORCE_SPLIT, QKV_FORCE_PASSES, QKV_FORCE_STAGE};

static void test_allocation_fails(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    EVERY_ISA {
      for (size_t f = 0; f < COUNT(schedules); f++) {
        counting_allocator a = {0, 0, 0, 0};
        executor e = executor_make(EXECUTOR_SHUFFLED, 3, 5);
        qkv_context context = executor_context(&e);
        context.isa_cap = ISA;
        context.flags = schedules[f];
        context.alloc_self = &a;
        context.alloc = counted_alloc;
        context.release = counted_release;
        assert_int_equal(qkv_backward(&context, p, &s.g.g, NULL, 0), QKV_OK);
        assert_int_equal(a.live, 0);
        assert_true(a.calls <= 1); /* once per call */
        assert_true(a.calls == 0 || (a.last_alignment & (a.last_alignment - 1)) == 0);
        int64_t calls = a.calls;
        problem_gradients_clear(&s.g);
        for (int64_t k = 1; k <= calls; k++) {
          counting_allocator failing = {0, k, 0, 0};
          context.alloc_self = &failing;
          assert_int_equal(qkv_backward(&context, p, &s.g.g, NULL, 0), QKV_NO_MEMORY);
          assert_int_equal(failing.live, 0);
          expect_untouched(&s, "failed allocation");
        }
        size_t bytes = 0;
        counting_allocator none = {0, 1, 0, 0};
        context.alloc_self = &none;
        assert_int_equal(qkv_backward_scratch(&context, p, &s.g.g, &bytes), QKV_OK);
        void *scratch = test_alloc(bytes);
        assert_int_equal(qkv_backward(&context, p, &s.g.g, scratch, bytes), QKV_OK);
        assert_int_equal(none.calls, 0);
        free(scratch);
      }
    }
    sample_free(&s);
  }
}

static void test_scratch_bounds(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    gradients_copy expected;
    sample_open(&s, PROBLEM_GUARD_BEGIN, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    gradients_copy_make(&expected, p, &s.g.g);
    backward_run("reference", p, &expected.g);
    EVERY_KERNEL {
      for (size_t f = 0; f < COUNT(schedules); f++) {
        executor e = executor_make(EXECUTOR_SHUFFLED, f % 2 == 0 ? 1 : 3, 3);
        qkv_context context = executor_context(&e);
        context.isa_cap = ISA;
        context.flags = schedules[f];
        size_t bytes = 0;
        assert_int_equal(qkv_backward_scratch(&context, p, &s.g.g, &bytes), QKV_OK);
        problem_gradients_clear(&s.g);
        if (bytes > 0) {
          char dummy[1];
          void *scratch = test_alloc(bytes);
          assert_int_equal(qkv_backward(&context, p, &s.g.g, scratch, bytes - 1), QKV_SCRATCH_TOO_SMALL);
          assert_int_equal(qkv_backward(&context, p, &s.g.g, dummy, 0), QKV_SCRATCH_TOO_SMALL);
          expect_untouched(&s, "short scratch");
          free(scratch);
        }
        /* Exactly the size asked for, at any alignment, before a guard page and filled with NaN. */
        for (size_t shift = 0; shift < 70; shift += shift < 5 ? 1 : 13) {
          problem_buffer memory;
          assert_true(problem_buffer_make(&memory, bytes + shift, PROBLEM_GUARD_END));
          memset(memory.begin, 0xff, bytes + shift);
          assert_int_equal(qkv_backward(&context, p, &s.g.g, memory.begin, bytes), QKV_OK);
          for (size_t at = bytes; at < bytes + shift; at++) {
            assert_true(memory.begin[at] == 0xff);
          }
          problem_buffer_free(&memory);
          backward_same(p, &expected.g, p, &s.g.g, "isa %s, flags %u, scratch shifted by %d, %s", ISA,
                        (unsigned)schedules[f], (int)shift, texts[n]);
        }
      }
    }
    gradients_copy_free(&expected);
    sample_free(&s);
  }
}

/* Never less for a smaller length, and linear in the lengths: no matrix of scores. */
static void test_scratch_grows_with_the_sequence(void **state) {
  (void)state;
  static const int64_t lengths[] = {0, 1, 5, 63, 64, 65, 130, 511, 512, 513, 1024, 2000, 4100, 9000, 16384, 65536};
  static float value[4], result[4]; /* never touched: only the sizes count */
  for (int kind = 0; kind < 12; kind++) {
    executor e = executor_make(EXECUTOR_SERIAL, kind & 1 ? 4 : 1, 1);
    qkv_context context = executor_context(&e);
    context.flags = kind & 2 ? QKV_FORCE_SPLIT : kind & 4 ? QKV_FORCE_PASSES : 0;
    qkv_problem p = qkv_problem_default();
    qkv_gradients g = qkv_gradients_default();
    qkv_mask causal = qkv_causal();
    const int32_t dtype = kind % 3 == 0 ? QKV_F64 : kind % 3 == 1 ? QKV_F32 : QKV_BF16;
    p.batch = 1 + (kind & 1);
    p.num_heads = 4;
    p.num_kv_heads = 2;
    p.head_dim = 40;
    p.head_dim_v = 24;
    p.mask = &causal;
    p.mask_count = kind & 8 ? 1 : 0;
    p.q = p.k = p.v = qkv_strided(value, dtype, 0, 0, 0, 0);
    p.lse = qkv_strided(value, dtype == QKV_F64 ? QKV_F64 : QKV_F32, 0, 0, 0, 0);
    g.dout = qkv_strided(value, dtype, 0, 0, 0, 0);
    size_t table[COUNT(lengths)][COUNT(lengths)];
    for (size_t a = 0; a < COUNT(lengths); a++) {
      for (size_t b = 0; b < COUNT(lengths); b++) {
        p.seqlen_q = lengths[a];
        p.seqlen_kv = lengths[b];
        p.out = qkv_bhsd(result, dtype, 4, lengths[a], 24);
        const uintptr_t apart = (uintptr_t)1 << 40;
        g.dq = qkv_bhsd((void *)((uintptr_t)result + apart), dtype, 4, lengths[a], 40);
        g.dk = qkv_bhsd((void *)((uintptr_t)result + 2 * apart), dtype, 2, lengths[b], 40);
        g.dv = qkv_bhsd((void *)((uintptr_t)result + 3 * apart), dtype, 2, lengths[b], 24);
        assert_int_equal(qkv_backward_scratch(&context, &p, &g, &table[a][b]), QKV_OK);
        for (int side = 0; side < 2; side++) {
          if ((side == 0 ? a : b) > 0 && table[a - (side == 0)][b - (side == 1)] > table[a][b]) {
            fail_msg("kind %d, %d rows, %d keys: %zu bytes of scratch, but the next smaller length asks for %zu", kind,
                     (int)lengths[a], (int)lengths[b], table[a][b], table[a - (side == 0)][b - (side == 1)]);
          }
        }
      }
    }
    /* Four times the sequence: no more than four times what comes with it. */
    const size_t large = table[COUNT(lengths) - 1][COUNT(lengths) - 1],
                 quarter = table[COUNT(lengths) - 2][COUNT(lengths) - 2];
    if (large > 4 * quarter + 65536) {
      fail_msg("kind %d: %zu bytes for 65536, %zu for 16384", kind, large, quarter);
    }
    /* And at most eight numbers of f64 for each of q, k, v, out and their gradients. */
    if (large > (size_t)p.batch * 65536 * 8 * 8 * (size_t)(4 * (40 + 24) + 2 * (40 + 24))) {
      fail_msg("kind %d: %zu bytes for 65536", kind, large);
    }
  }
}

static void test_broken_context(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f32 h2 q70 k100 d16 seed:1");
  for (int n = 0; n < 7; n++) {
    qkv_context context = qkv_context_default();
    qkv_status expected = QKV_BAD_CONTEXT;
    counting_allocator a = {0, 0, 0, 0};
    context.alloc_self = &a;
    switch (n) {
    case 0: context.num_workers = -1; break;
    case 1: context.alloc = counted_alloc; break;
    case 2: context.release = counted_release; break;
    case 3: context.isa_cap = "pentium"; break;
    case 4:
      context.flags = 1u << 31;
      expected = QKV_UNKNOWN_FIELD;
      break;
    case 5:
      context.reserved = 1;
      expected = QKV_UNKNOWN_FIELD;
      break;
    default:
      context.size = 0;
      expected = QKV_BAD_SIZE;
      break;
    }
    size_t bytes;
    char text[1024];
    assert_int_equal(qkv_backward(&context, &s.c.problem, &s.g.g, NULL, 0), expected);
    assert_int_equal(qkv_backward_scratch(&context, &s.c.problem, &s.g.g, &bytes), expected);
    assert_int_equal(qkv_backward_describe(&context, &s.c.problem, &s.g.g, text, sizeof text), expected);
    expect_untouched(&s, "a broken context");
  }
  sample_free(&s);
}

/* ---- Floating-point state ------------------------------------------------------------------------------------------ */

static uint64_t control_word(void) {
#if defined(__SSE__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t control, flags;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  __asm__ volatile("mrs %0, fpsr" : "=r"(flags));
  return control << 32 | (flags & 0x9f);
#else
  return (uint64_t)fegetround() << 32 | (uint64_t)fetestexcept(FE_ALL_EXCEPT);
#endif
}

/* false: this host has no such state. */
static bool poison(int kind) {
  switch (kind) {
  case 0:
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ, DAZ */
    return true;
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)1 << 24)); /* FZ */
    return true;
#else
    return false;
#endif
  case 1: return fesetround(FE_UPWARD) == 0;
  case 2: return fesetround(FE_TOWARDZERO) == 0;
  case 3:
#if defined(__GLIBC__) && !defined(__aarch64__)
    feclearexcept(FE_ALL_EXCEPT);
    return feenableexcept(FE_ALL_EXCEPT) != -1;
#else
    return false;
#endif
  default: return feraiseexcept(FE_INEXACT | FE_OVERFLOW) == 0; /* flags that must survive */
  }
}
enum { KINDS = 5 };

static const char *const fp_texts[] = {"f32 h2 q70 k200 d17 tiny causal seed:1",
                                       "f32 h2 q70 k100 d17 big sinks alibi bias softcap:9 dlse seed:2",
                                       "f64 h4/1 q2 k300 d5 tiny dropout:0.3 seed:3",
                                       "f32 h2 q40 k100 d16 visnan seed:5",
                                       "f64 h2 q40 k100 d6 biasinf softcap:1 dense seed:6",
                                       "f16 h2 q70 k70 d16 tiny bias seed:7"};

static void test_floating_point_state(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(fp_texts); n += stride_of(COUNT(fp_texts))) {
    sample s;
    gradients_copy expected;
    double dscale[2];
    sample_open(&s, 0, "%s", fp_texts[n]);
    const qkv_problem *p = &s.c.problem;
    gradients_copy_make(&expected, p, &s.g.g);
    backward_run("reference", p, &expected.g);
    assert_int_equal(qkv_scale_gradient(p, &expected.g, &dscale[0]), QKV_OK);
    EVERY_ISA {
      for (int kind = 0; kind < KINDS; kind++) {
        for (size_t f = 0; f < (strcmp(ISA, "reference") == 0 ? 2 : COUNT(schedules)); f++) {
          executor e = executor_make(f % 2 ? EXECUTOR_THREADS : EXECUTOR_SERIAL, 2, 1);
          qkv_context context = executor_context(&e);
          context.isa_cap = ISA;
          context.flags = schedules[f];
          problem_gradients_clear(&s.g);
          char text[2048];
          size_t bytes;
          fenv_t before;
          fegetenv(&before);
          if (!poison(kind)) {
            fesetenv(&before);
            continue;
          }
          uint64_t word = control_word();
          int saved = errno = 12345;
          qkv_status statuses[5] = {qkv_backward(&context, p, &s.g.g, NULL, 0)};
          uint64_t words[5] = {control_word()};
          statuses[1] = qkv_backward_scratch(&context, p, &s.g.g, &bytes);
          words[1] = control_word();
          statuses[2] = qkv_backward_check(p, &s.g.g, text, sizeof text);
          words[2] = control_word();
          statuses[3] = qkv_backward_describe(&context, p, &s.g.g, text, sizeof text);
          words[3] = control_word();
          statuses[4] = qkv_scale_gradient(p, &s.g.g, &dscale[1]);
          words[4] = control_word();
          saved = errno;
          fesetenv(&before);
          for (int k = 0; k < 5; k++) {
            assert_int_equal(statuses[k], QKV_OK);
            if (words[k] != word) {
              fail_msg("isa %s, kind %d, call %d: control word 0x%llx became 0x%llx", ISA, kind, k, (unsigned long long)word,
                       (unsigned long long)words[k]);
            }
          }
          assert_int_equal(saved, 12345);
          backward_same(p, &expected.g, p, &s.g.g, "isa %s, floating-point state %d, %s", ISA, kind, fp_texts[n]);
          assert_true((isnan(dscale[0]) && isnan(dscale[1])) || memcmp(&dscale[0], &dscale[1], sizeof dscale[0]) == 0);
        }
      }
    }
    gradients_copy_free(&expected);
    sample_free(&s);
  }
}

/* A pool whose threads run in a state of their own: each task must bring the right one, and leave the thread's. */
typedef struct odd_pool {
  int kind;
  int64_t tasks, changed;
} odd_pool;

static void odd_parallel_for(void *self, void (*body)(void *arg, int64_t task, int32_t worker), void *arg, int64_t tasks) {
  odd_pool *pool = self;
  for (int64_t n = 0; n < tasks; n++) {
    fenv_t before;
    fegetenv(&before);
    poison(pool->kind);
    uint64_t word = control_word();
    body(arg, n, 0);
    pool->changed += control_word() != word;
    fesetenv(&before);
    pool->tasks++;
  }
}

static void test_floating_point_state_of_a_pool(void **state) {
  (void)state;
  int64_t tasks = 0; /* one task alone need not go through the pool */
  for (size_t n = 0; n < COUNT(fp_texts); n += stride_of(COUNT(fp_texts))) {
    sample s;
    gradients_copy expected;
    sample_open(&s, 0, "%s", fp_texts[n]);
    const qkv_problem *p = &s.c.problem;
    gradients_copy_make(&expected, p, &s.g.g);
    backward_run("reference", p, &expected.g);
    EVERY_ISA {
      for (int kind = 0; kind < KINDS; kind++) {
        odd_pool pool = {kind, 0, 0};
        qkv_context context = test_context(ISA);
        context.self = &pool;
        context.parallel_for = odd_parallel_for;
        context.flags = schedules[kind % (int)COUNT(schedules)];
        problem_gradients_clear(&s.g);
        fenv_t before;
        fegetenv(&before);
        bool there = poison(kind);
        fesetenv(&before);
        if (there) {
          assert_int_equal(qkv_backward(&context, p, &s.g.g, NULL, 0), QKV_OK);
          backward_same(p, &expected.g, p, &s.g.g, "isa %s, pool of state %d, %s", ISA, kind, fp_texts[n]);
          assert_int_equal(pool.changed, 0);
          tasks += pool.tasks;
        }
      }
    }
    gradients_copy_free(&expected);
    sample_free(&s);
  }
  assert_true(tasks > 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_every_field),
    cmocka_unit_test(test_null_and_size),
    cmocka_unit_test(test_allocation_fails),
    cmocka_unit_test(test_scratch_bounds),
    cmocka_unit_test(test_scratch_grows_with_the_sequence),
    cmocka_unit_test(test_broken_context),
    cmocka_unit_test(test_floating_point_state),
    cmocka_unit_test(test_floating_point_state_of_a_pool),
};

TEST_MAIN(tests)

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* feenableexcept */
#endif
/* What happens when something is wrong: status, text, nothing written; and a floating-point state that is not
 * the usual one. */
#include "common.h"

#include <errno.h>
#include <fenv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define EVERY_ISA for (int isa_index = 0; isa_index < test_isas; isa_index++)
#define ISA       (test_isa[isa_index])

static bool all_bytes(const problem_buffer *b, unsigned char byte) {
  for (size_t n = 0; n < b->bytes; n++) {
    if (b->begin[n] != byte) {
      return false;
    }
  }
  return true;
}

static void expect_untouched(const problem_case *c, const char *what) {
  if (!all_bytes(&c->buffer[PROBLEM_BUFFER_OUT], 0xff) || !all_bytes(&c->buffer[PROBLEM_BUFFER_LSE], 0xff)) {
    fail_msg("%s: an output was written", what);
  }
}

/* ---- Each field broken in turn ------------------------------------------------------------------------------------- */

static const int32_t negative_length[] = {-1, 5}, long_q_length[] = {70, 71}, long_kv_length[] = {300, 301},
                     begin_after_end[] = {301, 0}, lengths_of_two[] = {300, 300};
static const int32_t negative_position[] = {0, -3}, late_position[] = {0, INT32_MAX - 10},
                     far_position[] = {INT32_MAX - 5, 0};
static const int32_t cu_of_70[] = {0, 30, 70}, cu_not_from_0[] = {1, 30, 70}, cu_falling[] = {0, 80, 70},
                     cu_short[] = {0, 30, 60}, cu_rising[] = {0, 30, 71};
static qkv_mask broken[2];
static float some_floats[16];

static int32_t never_called(void *user, const qkv_tile *tile, uint64_t *bits) {
  (void)user;
  (void)tile;
  (void)bits;
  return QKV_TILE_NONE;
}

static void use_mask(qkv_problem *p, qkv_mask first) {
  broken[0] = first;
  broken[1] = qkv_causal();
  p->mask = broken;
  p->mask_count = 2;
}

/* The n-th way to break the problem "f32 b2 h6/3 q70 k300 d16/8 ...": what must be said, in up to three pieces. False: no
 * more. */
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

static bool break_it(int n, qkv_problem *p, breakage *b) {
  const int64_t far = (int64_t)1 << 61;
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "size", "0", NULL, p->size = 0)
    CASE(1, QKV_BAD_VALUE, "algorithm", "7", NULL, p->algorithm = 7)
    CASE(2, QKV_BAD_VALUE, "align", "-1", NULL, p->align = -1)
    CASE(3, QKV_BAD_VALUE, "arithmetic", "7", NULL, p->arithmetic = 7)
    CASE(4, QKV_BAD_EXTENT, "batch", "-2", NULL, p->batch = -2)
    CASE(5, QKV_BAD_EXTENT, "num_heads", "-6", NULL, p->num_heads = -6)
    CASE(6, QKV_BAD_EXTENT, "num_heads 6", "num_kv_heads 4", NULL, p->num_kv_heads = 4)
    CASE(7, QKV_BAD_EXTENT, "num_kv_heads", "-3", NULL, p->num_kv_heads = -3)
    CASE(8, QKV_BAD_EXTENT, "seqlen_q", "-1", NULL, p->seqlen_q = -1)
    CASE(9, QKV_BAD_EXTENT, "seqlen_kv", "-1", NULL, p->seqlen_kv = -1)
    CASE(10, QKV_BAD_EXTENT, "seqlen_kv", "4294967296", NULL, p->seqlen_kv = (int64_t)1 << 32)
    CASE(11, QKV_BAD_EXTENT, "head_dim", "0", NULL, p->head_dim = 0)
    CASE(12, QKV_BAD_EXTENT, "head_dim_v", "-8", NULL, p->head_dim_v = -8)
    CASE(13, QKV_BAD_POINTER, "q.data", "NULL", NULL, p->q.data = NULL)
    CASE(14, QKV_BAD_POINTER, "k.data", "NULL", NULL, p->k.data = NULL)
    CASE(15, QKV_BAD_POINTER, "v.data", "NULL", NULL, p->v.data = NULL)
    CASE(16, QKV_BAD_POINTER, "out.data", "NULL", NULL, p->out.data = NULL)
    CASE(17, QKV_BAD_DTYPE, "q", "dtype", "0", p->q.dtype = 0)
    CASE(18, QKV_BAD_DTYPE, "k", "dtype", "99", p->k.dtype = 99)
    CASE(19, QKV_BAD_DTYPE, "v", "f64", NULL, p->v.dtype = QKV_F64)
    CASE(20, QKV_BAD_DTYPE, "q", "i32", NULL, p->q.dtype = QKV_I32)
    CASE(21, QKV_UNSUPPORTED, "k", "i8", NULL, p->k.dtype = QKV_I8)
    CASE(22, QKV_UNSUPPORTED, "v", "i8", NULL, p->v.dtype = QKV_I8)
    CASE(23, QKV_BAD_DTYPE, "lse", "f64", NULL, p->lse.dtype = QKV_F64)
    CASE(24, QKV_BAD_DTYPE, "lse", "u8", NULL, p->lse.dtype = QKV_U8)
    CASE(25, QKV_UNKNOWN_FIELD, "q.reserved", "5", NULL, p->q.reserved = 5)
    CASE(26, QKV_UNKNOWN_FIELD, "out.reserved", "1", NULL, p->out.reserved = 1)
    CASE(27, QKV_BAD_STRIDE, "q", "2305843009213693952", NULL, p->q.stride[2] = far)
    CASE(28, QKV_BAD_STRIDE, "k", "-2305843009213693952", NULL, p->k.stride[1] = -far)
    CASE(29, QKV_BAD_STRIDE, "v", "9223372036854775807", NULL, p->v.stride[3] = INT64_MAX)
    CASE(30, QKV_BAD_STRIDE, "out", "strides", NULL, p->out.stride[2] = 0)
    CASE(31, QKV_BAD_STRIDE, "out", "strides", NULL, p->out.stride[2] = 7)
    CASE(32, QKV_BAD_STRIDE, "lse", "strides", NULL, p->lse.stride[1] = 0)
    CASE(33, QKV_BAD_STRIDE, "q", "-9223372036854775808", NULL, p->q.stride[0] = INT64_MIN)
    CASE(34, QKV_BAD_VALUE, "softmax_scale", "nan", NULL, p->softmax_scale = (double)NAN)
    CASE(35, QKV_BAD_VALUE, "softmax_scale", "inf", NULL, p->softmax_scale = (double)INFINITY)
    CASE(36, QKV_BAD_VALUE, "softmax_scale", "1e+300", NULL, p->softmax_scale = 1e300)
    CASE(37, QKV_BAD_VALUE, "softcap", "-2", NULL, p->softcap = -2)
    CASE(38, QKV_BAD_VALUE, "softcap", "inf", NULL, p->softcap = (double)INFINITY)
    CASE(39, QKV_BAD_VALUE, "softcap", "1e-300", NULL, p->softcap = 1e-300)
    CASE(40, QKV_BAD_MASK, "mask_count", "-1", NULL, p->mask_count = -1)
    CASE(41, QKV_BAD_POINTER, "mask", "NULL", NULL, (p->mask = NULL, p->mask_count = 2))
    CASE(42, QKV_BAD_MASK, "mask[0]", "kind", "0", use_mask(p, qkv_mask_term(0, 0, 0)))
    CASE(43, QKV_BAD_MASK, "mask[0]", "kind", "13", use_mask(p, qkv_mask_term(QKV_MASK_KINDS, 0, 0)))
    CASE(44, QKV_BAD_MASK, "mask[0]", "join", NULL, use_mask(p, qkv_or(qkv_causal())))
    CASE(45, QKV_BAD_MASK, "mask[1]", "join", "3", (use_mask(p, qkv_causal()), broken[1].join = 3))
    CASE(46, QKV_BAD_MASK, "mask[0]", "causal", "9", use_mask(p, qkv_mask_term(QKV_MASK_CAUSAL, 9, 0)))
    CASE(47, QKV_BAD_MASK, "mask[0]", "prefix", "-4", use_mask(p, qkv_prefix(-4)))
    CASE(48, QKV_BAD_MASK, "mask[0]", "dense", "-1",
         use_mask(p, qkv_dense(qkv_strided(some_floats, QKV_U8, 0, 0, 0, 0), -1)))
    CASE(49, QKV_BAD_POINTER, "mask[0]", "t.data", "NULL", use_mask(p, qkv_dense(qkv_strided(NULL, QKV_U8, 0, 0, 0, 1), 0)))
    CASE(50, QKV_BAD_DTYPE, "mask[0].t", "f32", "u8",
         use_mask(p, qkv_dense(qkv_strided(some_floats, QKV_F32, 0, 0, 0, 0), 0)))
    CASE(51, QKV_BAD_DTYPE, "mask[0].t", "u8", "i32",
         use_mask(p, qkv_documents(qkv_strided(some_floats, QKV_U8, 0, 0, 0, 0))))
    CASE(52, QKV_BAD_STRIDE, "mask[0].t", "strides", NULL,
         use_mask(p, qkv_documents(qkv_strided(some_floats, QKV_I32, 0, 0, 0, far))))
    CASE(53, QKV_BAD_POINTER, "mask[0]", "fn", "NULL", use_mask(p, qkv_tiles(NULL, NULL)))
    CASE(54, QKV_UNKNOWN_FIELD, "mask[0].reserved", "1", NULL,
         (use_mask(p, qkv_tiles(never_called, NULL)), broken[0].reserved = 1))
    CASE(55, QKV_BAD_DTYPE, "bias", "u8", NULL, p->bias.dtype = QKV_U8)
    CASE(56, QKV_BAD_DTYPE, "bias", "f64", NULL, p->bias.dtype = QKV_F64)
    CASE(57, QKV_BAD_STRIDE, "bias", "2305843009213693952", NULL, p->bias.stride[3] = far)
    CASE(58, QKV_BAD_DTYPE, "alibi_slopes", "dtype", NULL, p->alibi_slopes.dtype = QKV_I32)
    CASE(59, QKV_BAD_DTYPE, "sinks", "dtype", NULL, p->sinks.dtype = QKV_U8)
    CASE(60, QKV_BAD_STRIDE, "sinks", "2305843009213693952", NULL, p->sinks.stride[1] = far)
    CASE(61, QKV_BAD_LENGTHS, "q_length[0]", "-1", NULL, p->q_length = negative_length)
    CASE(62, QKV_BAD_LENGTHS, "q_length[1]", "71", "70", p->q_length = long_q_length)
    CASE(63, QKV_BAD_LENGTHS, "kv_length[0]", "-1", NULL, p->kv_length = negative_length)
    CASE(64, QKV_BAD_LENGTHS, "kv_length[1]", "301", "300", p->kv_length = long_kv_length)
    CASE(65, QKV_BAD_LENGTHS, "kv_begin[0]", "301", NULL, (p->kv_begin = begin_after_end, p->kv_length = lengths_of_two))
    CASE(66, QKV_BAD_LENGTHS, "kv_begin[0]", "-1", NULL, p->kv_begin = negative_length)
    CASE(67, QKV_BAD_LENGTHS, "kv_position[1]", "-3", NULL, p->kv_position = negative_position)
    CASE(68, QKV_BAD_LENGTHS, "kv_position", "2147483637", NULL, p->kv_position = late_position)
    CASE(69, QKV_BAD_LENGTHS, "position", "32 bits", NULL, (p->align = QKV_ALIGN_EXPLICIT, p->q_position = far_position))
    CASE(70, QKV_BAD_LENGTHS, "cu_seqlens_q[0]", "1", NULL, p->cu_seqlens_q = cu_not_from_0)
    CASE(71, QKV_BAD_LENGTHS, "cu_seqlens_q[2]", "70", "80", p->cu_seqlens_q = cu_falling)
    CASE(72, QKV_BAD_LENGTHS, "cu_seqlens_q[2]", "60", "seqlen_q 70", p->cu_seqlens_q = cu_short)
    CASE(73, QKV_BAD_LENGTHS, "cu_seqlens_q[2]", "71", "seqlen_q 70", p->cu_seqlens_q = cu_rising)
    CASE(74, QKV_BAD_LENGTHS, "cu_seqlens_kv[2]", "70", "seqlen_kv 300", p->cu_seqlens_kv = cu_of_70)
    CASE(75, QKV_BAD_OVERLAP, "out", "q", NULL, p->out.data = p->q.data)
    CASE(76, QKV_BAD_OVERLAP, "out", "k", NULL, p->out.data = (char *)p->k.data + 64)
    CASE(77, QKV_BAD_OVERLAP, "lse", "out", NULL, p->lse.data = p->out.data)
    CASE(78, QKV_BAD_OVERLAP, "lse", "v", NULL, p->lse.data = p->v.data)
    CASE(79, QKV_BAD_OVERLAP, "out", "bias", NULL, p->out.data = p->bias.data)
  default: return false;
  }
}

static void test_every_field(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, PROBLEM_GUARD_END, "f32 b2 h6/3 q70 k300 d16/8 bias alibi sinks lse causal");
  assert_int_equal(qkv_check(&c.problem, NULL, 0), QKV_OK);
  char text[512];
  memset(text, 'x', sizeof text);
  assert_int_equal(qkv_check(&c.problem, text, sizeof text), QKV_OK);
  assert_string_equal(text, "");
  for (int n = 0;; n++) {
    qkv_problem p = c.problem;
    breakage b;
    if (!break_it(n, &p, &b)) {
      assert_true(n > 75);
      break;
    }
    memset(text, 'x', sizeof text);
    qkv_status status = qkv_check(&p, text, sizeof text);
    if (status != b.status) {
      fail_msg("case %d (%s %s): status %d (%s), expected %d", n, b.text[0], b.text[1], (int)status, status != 0 ? text : "",
               (int)b.status);
    }
    for (int k = 0; k < 3 && b.text[k] != NULL; k++) {
      if (strstr(text, b.text[k]) == NULL) {
        fail_msg("case %d: the text lacks '%s': %s", n, b.text[k], text);
      }
    }
    /* A short buffer is never overrun, and always ended. */
    char small[12];
    memset(small, 'x', sizeof small);
    assert_int_equal(qkv_check(&p, small, 8), b.status);
    assert_true(memchr(small, 0, 8) != NULL && small[8] == 'x');
    assert_int_equal(qkv_check(&p, NULL, 0), b.status);
    /* These two do not look at the data, and may be asked before there is any. */
    bool shape =
        b.status == QKV_BAD_EXTENT || b.status == QKV_BAD_LENGTHS || b.status == QKV_BAD_VALUE || b.status == QKV_BAD_SIZE;
    size_t bytes = 77;
    status = qkv_scratch(NULL, &p, &bytes);
    if (status != b.status && (shape || status != QKV_OK)) {
      fail_msg("case %d: qkv_scratch gives %d, not %d", n, (int)status, (int)b.status);
    }
    EVERY_ISA {
      qkv_context context = test_context(ISA);
      assert_int_equal(qkv_forward(&context, &p, NULL, 0), b.status);
      status = qkv_describe(&context, &p, text, sizeof text);
      assert_true(status == b.status || (!shape && status == QKV_OK));
    }
    expect_untouched(&c, "a broken field");
  }
  problem_free(&c);
}

static void test_null_and_size(void **state) {
  (void)state;
  problem_case c;
  char text[256];
  size_t bytes;
  test_open(&c, 0, "f32 q3 k3 d4 lse");
  assert_int_equal(qkv_check(NULL, text, sizeof text), QKV_BAD_POINTER);
  assert_int_equal(qkv_forward(NULL, NULL, NULL, 0), QKV_BAD_POINTER);
  assert_int_equal(qkv_scratch(NULL, NULL, &bytes), QKV_BAD_POINTER);
  assert_int_equal(qkv_scratch(NULL, &c.problem, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_describe(NULL, NULL, text, sizeof text), QKV_BAD_POINTER);
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, NULL, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_merge(NULL, NULL, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_partial(NULL, &c.problem, NULL, NULL, 0), QKV_BAD_POINTER);
  assert_int_equal(qkv_finish(NULL, &c.problem, NULL), QKV_BAD_POINTER);
  expect_untouched(&c, "NULL");
  /* A newer caller's struct: unknown bytes must be zero. An older caller's: what is missing is the default. */
  struct {
    qkv_problem p;
    char more[24];
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.p = c.problem;
  newer.p.size = sizeof newer;
  assert_int_equal(qkv_forward(NULL, &newer.p, NULL, 0), QKV_OK);
  newer.more[20] = 1;
  assert_int_equal(qkv_check(&newer.p, text, sizeof text), QKV_UNKNOWN_FIELD);
  qkv_problem older = c.problem;
  older.size = offsetof(qkv_problem, cu_seqlens_q);
  older.cu_seqlens_q = (const int32_t *)(uintptr_t)8;
  older.cu_seqlens_kv = (const int32_t *)(uintptr_t)8;
  assert_int_equal(qkv_forward(NULL, &older, NULL, 0), QKV_OK);
  problem_free(&c);
}

/* ---- Context ------------------------------------------------------------------------------------------------------- */

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

static void test_allocation_fails(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 h2 q70 k700 d16 causal lse", "f32 h4/1 q1 k3000 d16 lse",
                                      "f64 h2 q70 k100 d16 standard lse", "f32 h2 q70 k700 d16 odd bias tile lse"};
  for (size_t n = 0; n < sizeof texts / sizeof texts[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    EVERY_ISA {
      counting_allocator a = {0, 0, 0, 0};
      qkv_context context = test_context(ISA);
      context.alloc_self = &a;
      context.alloc = counted_alloc;
      context.release = counted_release;
      assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_OK);
      assert_int_equal(a.live, 0);
      assert_true(a.calls <= 1); /* once per call */
      assert_true(a.calls == 0 || (a.last_alignment & (a.last_alignment - 1)) == 0);
      int64_t calls = a.calls;
      for (int64_t k = 1; k <= calls; k++) {
        counting_allocator failing = {0, k, 0, 0};
        context.alloc_self = &failing;
        problem_clear_outputs(&c);
        assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_NO_MEMORY);
        assert_int_equal(failing.live, 0);
        expect_untouched(&c, "failed allocation");
      }
      /* With scratch of the size asked for there is no allocation at all. */
      size_t bytes = 0;
      counting_allocator none = {0, 1, 0, 0};
      context.alloc_self = &none;
      assert_int_equal(qkv_scratch(&context, &c.problem, &bytes), QKV_OK);
      void *scratch = test_alloc(bytes);
      assert_int_equal(qkv_forward(&context, &c.problem, scratch, bytes), QKV_OK);
      assert_int_equal(none.calls, 0);
      free(scratch);
    }
    problem_free(&c);
  }
}

static void test_scratch_bounds(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 h2 q70 k700 d16 causal lse", "f32 h4/1 q1 k3000 d16 lse",
                                      "f64 h2 q70 k100 d16 standard lse", "f32 b2 h2 q70 k700 d16 ragged neg bias tile lse"};
  for (size_t n = 0; n < sizeof texts / sizeof texts[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    test_copy expected;
    test_copy_make(&expected, &c.problem);
    test_run("reference", &expected.p);
    EVERY_ISA {
      for (int workers = 1; workers <= 3; workers += 2) {
        executor e = executor_make(EXECUTOR_SHUFFLED, workers, 3);
        qkv_context context = executor_context(&e);
        context.isa_cap = ISA;
        size_t bytes = 0;
        assert_int_equal(qkv_scratch(&context, &c.problem, &bytes), QKV_OK);
        problem_clear_outputs(&c);
        if (bytes > 0) {
          char dummy[1];
          void *scratch = test_alloc(bytes);
          assert_int_equal(qkv_forward(&context, &c.problem, scratch, bytes - 1), QKV_SCRATCH_TOO_SMALL);
          assert_int_equal(qkv_forward(&context, &c.problem, dummy, 0), QKV_SCRATCH_TOO_SMALL);
          expect_untouched(&c, "short scratch");
          free(scratch);
        }
        /* Exactly the size asked for, at any alignment, between guard pages and filled with NaN. */
        for (size_t shift = 0; shift < 70; shift += shift < 9 ? 1 : 13) {
          problem_buffer memory;
          assert_true(problem_buffer_make(&memory, bytes + shift, PROBLEM_GUARD_END));
          memset(memory.begin, 0xff, bytes + shift);
          /* shift 0 ends at the guard page; larger ones begin earlier, and leave a gap that must stay. */
          assert_int_equal(qkv_forward(&context, &c.problem, memory.begin, bytes), QKV_OK);
          for (size_t at = bytes; at < bytes + shift; at++) {
            assert_true(memory.begin[at] == 0xff);
          }
          problem_buffer_free(&memory);
          test_same(&expected.p, &c.problem, "isa %s, %d workers, scratch shifted by %d", ISA, workers, (int)shift);
        }
      }
    }
    test_copy_free(&expected);
    problem_free(&c);
  }
}

static void test_scratch_is_monotone(void **state) {
  (void)state;
  static const char *const formats[] = {"f32 b2 h4/2 q%d k%d d16 causal", "f64 h2 q%d k%d d40/8 standard",
                                        "f32 b4 h4/1 q%d k%d d64 ragged", "f32 h1 q%d k%d d8 window:100,0"};
  static const int lengths[] = {0, 1, 5, 63, 64, 65, 130, 511, 512, 513, 1024, 1025, 2000, 4100, 9000};
  enum { COUNT = sizeof lengths / sizeof lengths[0] };
  for (size_t n = 0; n < sizeof formats / sizeof formats[0]; n++) {
    for (int32_t workers = 1; workers <= 4; workers += 3) {
      executor e = executor_make(EXECUTOR_SERIAL, workers, 1);
      qkv_context context = executor_context(&e);
      size_t table[COUNT][COUNT];
      for (int a = 0; a < COUNT; a++) {
        for (int b = 0; b < COUNT; b++) {
          char text[PROBLEM_TEXT_BYTES];
          snprintf(text, sizeof text, formats[n], lengths[a], lengths[b]);
          problem_spec spec;
          assert_true(problem_parse(text, &spec, NULL, 0));
          static float value[4], result[4]; /* never touched: only the sizes count */
          qkv_problem p = qkv_problem_default();
          int32_t cu_q[5], cu_k[5];
          for (int64_t x = 0; x <= spec.batch && x < 5; x++) {
            cu_q[x] = (int32_t)(spec.seqlen_q * x / (spec.batch > 0 ? spec.batch : 1));
            cu_k[x] = (int32_t)(spec.seqlen_kv * x / (spec.batch > 0 ? spec.batch : 1));
          }
          p.algorithm = spec.algorithm;
          p.batch = spec.batch;
          p.num_heads = spec.num_heads;
          p.num_kv_heads = spec.num_kv_heads;
          p.seqlen_q = spec.seqlen_q;
          p.seqlen_kv = spec.seqlen_kv;
          p.head_dim = spec.head_dim;
          p.head_dim_v = spec.head_dim_v;
          p.q = p.k = p.v = qkv_strided(value, spec.dtype, 0, 0, 0, 0);
          p.out = qkv_bhsd(result, spec.dtype, spec.num_heads, spec.seqlen_q, spec.head_dim_v);
          /* Far from the inputs, so that they do not overlap. */
          p.out.data = (void *)((uintptr_t)result + ((uintptr_t)1 << 32));
          p.cu_seqlens_q = spec.ragged_q ? cu_q : NULL;
          p.cu_seqlens_kv = spec.ragged_kv ? cu_k : NULL;
          char error[256];
          if (qkv_check(&p, error, sizeof error) != QKV_OK) {
            fail_msg("%s: %s", text, error);
          }
          assert_int_equal(qkv_scratch(&context, &p, &table[a][b]), QKV_OK);
          for (int c = 0; c < 2; c++) {
            if ((c == 0 ? a : b) > 0 && table[a - (c == 0)][b - (c == 1)] > table[a][b]) {
              fail_msg("%s, %d workers: %zu bytes of scratch, but the next smaller length asks for %zu", text, (int)workers,
                       table[a][b], table[a - (c == 0)][b - (c == 1)]);
            }
          }
        }
      }
    }
  }
}

static void test_broken_context(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 h2 q70 k100 d16 lse");
  for (int n = 0; n < 8; n++) {
    qkv_context context = qkv_context_default();
    qkv_status expected = QKV_BAD_CONTEXT;
    counting_allocator a = {0, 0, 0, 0};
    struct {
      qkv_context context;
      char more[16];
    } newer;
    memset(&newer, 0, sizeof newer);
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
    case 6:
      context.size = 0;
      expected = QKV_BAD_SIZE;
      break;
    default:
      newer.context = context;
      newer.context.size = sizeof newer;
      newer.more[15] = 1;
      expected = QKV_UNKNOWN_FIELD;
      break;
    }
    const qkv_context *use = n == 7 ? &newer.context : &context;
    size_t bytes;
    char text[1024];
    assert_int_equal(qkv_forward(use, &c.problem, NULL, 0), expected);
    assert_int_equal(qkv_scratch(use, &c.problem, &bytes), expected);
    assert_int_equal(qkv_describe(use, &c.problem, text, sizeof text), expected);
    expect_untouched(&c, "a broken context");
  }
  problem_free(&c);
}

/* ---- Regions and states -------------------------------------------------------------------------------------------- */

static void test_broken_regions(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b2 h2 q5 k7 d4 lse");
  float values[2 * 2 * 5 * 7];
  qkv_tensor to = qkv_bhsd(values, QKV_F32, 2, 5, 7);
  const qkv_region bad[] = {{-1, 1, 0, 1, 0, 1}, {0, 3, 0, 1, 0, 1}, {1, 0, 0, 1, 0, 1}, {0, 1, 0, 3, 0, 1},
                            {0, 1, 2, 1, 0, 1},  {0, 1, 0, 1, 0, 6}, {0, 1, 0, 1, 4, 3}, {0, 1, 0, 1, -1, 3}};
  memset(values, 0xa5, sizeof values);
  for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) {
    assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, &bad[n], &to), QKV_BAD_REGION);
  }
  const qkv_region nothing = {0, 0, 0, 0, 0, 0};
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, &nothing, &to), QKV_OK);
  assert_int_equal(qkv_scores(NULL, &c.problem, 0, NULL, &to), QKV_BAD_VALUE);
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_KEPT + 1, NULL, &to), QKV_BAD_VALUE);
  qkv_tensor wrong = to;
  wrong.dtype = QKV_F64;
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, NULL, &wrong), QKV_BAD_DTYPE);
  wrong = to;
  wrong.stride[2] = 0;
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, NULL, &wrong), QKV_BAD_STRIDE);
  wrong = to;
  wrong.data = NULL;
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, NULL, &wrong), QKV_BAD_POINTER);
  wrong = to;
  wrong.data = c.problem.q.data;
  assert_int_equal(qkv_scores(NULL, &c.problem, QKV_WEIGHTS, NULL, &wrong), QKV_BAD_OVERLAP);
  for (size_t n = 0; n < sizeof values; n++) {
    assert_int_equal(((unsigned char *)values)[n], 0xa5);
  }
  problem_free(&c);
}

static void test_broken_states(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 h2 q5 k1600 d4 kvpos lse seed:6");
  qkv_problem *p = &c.problem;
  int64_t nodes = 0;
  size_t bytes = 0, more = 0;
  assert_int_equal(qkv_state_bytes(p, 0, &nodes, &bytes), QKV_OK);
  assert_true(nodes >= 1 && nodes <= 25);
  assert_int_equal(qkv_state_bytes(p, nodes + 3, &nodes, &more), QKV_OK);
  assert_true(more > bytes);
  char *memory = test_alloc(more + 16);
  qkv_state s, other;
  assert_int_equal(qkv_state_init(p, nodes, memory, bytes - 1, &s), QKV_SCRATCH_TOO_SMALL);
  assert_int_equal(qkv_state_init(p, nodes, NULL, bytes, &s), QKV_BAD_POINTER);
  assert_int_equal(qkv_state_init(p, -1, memory, bytes, &s), QKV_BAD_STATE);
  assert_true(qkv_state_init(p, nodes, memory + 1, bytes, &s) != QKV_OK);
  /* Too few nodes for the result. */
  assert_int_equal(qkv_state_init(p, 1, memory, bytes, &s), QKV_OK);
  if (nodes > 1) {
    assert_int_equal(qkv_partial(NULL, p, &s, NULL, 0), QKV_STATE_FULL);
  }
  assert_int_equal(qkv_state_init(p, nodes, memory, bytes, &s), QKV_OK);
  assert_int_equal(qkv_partial(NULL, p, &s, NULL, 0), QKV_OK);
  /* A state that does not fit the problem, or the other state. */
  qkv_problem wider = *p;
  other = s;
  other.head_dim_v = 3;
  assert_int_equal(qkv_finish(NULL, p, &other), QKV_BAD_STATE);
  assert_int_equal(qkv_merge(NULL, &s, &other), QKV_BAD_STATE);
  other = s;
  other.rows++;
  assert_int_equal(qkv_finish(NULL, p, &other), QKV_BAD_STATE);
  other = s;
  other.dtype = QKV_F64;
  assert_int_equal(qkv_finish(NULL, p, &other), QKV_BAD_STATE);
  other = s;
  other.size = 4;
  assert_int_equal(qkv_finish(NULL, p, &other), QKV_BAD_SIZE);
  other = s;
  other.count = other.capacity + 1;
  assert_int_equal(qkv_finish(NULL, p, &other), QKV_BAD_STATE);
  assert_int_equal(qkv_merge(NULL, &s, &s), QKV_BAD_OVERLAP);
  wider.seqlen_q = 4;
  assert_int_equal(qkv_finish(NULL, &wider, &s), QKV_BAD_STATE);
  expect_untouched(&c, "a broken state");
  /* Merging needs room for the nodes of both. */
  char *room = test_alloc(more + 16);
  qkv_state from;
  assert_int_equal(qkv_state_init(p, nodes, room, more, &from), QKV_OK);
  assert_int_equal(qkv_partial(NULL, p, &from, NULL, 0), QKV_OK);
  assert_int_equal(qkv_merge(NULL, &s, &from), QKV_STATE_FULL);
  assert_int_equal(qkv_finish(NULL, p, &s), QKV_OK);
  test_accurate(p, "a state after errors");
  free(memory);
  free(room);
  problem_free(&c);
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

static void test_floating_point_state(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 h2 q70 k700 d17 tiny causal lse seed:1", "f32 h2 q70 k200 d17 big sinks alibi bias softcap:9 lse seed:2",
      "f64 h4/1 q2 k1300 d5 tiny lse seed:3",       "f32 h2 q70 k100 d16 standard lse seed:4",
      "f32 h2 q40 k100 d16 visnan lse seed:5",      "f64 h2 q40 k600 d6 biasinf softcap:1 dense lse seed:6"};
  for (size_t n = 0; n < sizeof texts / sizeof texts[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    test_copy expected;
    test_copy_make(&expected, &c.problem);
    test_run("reference", &expected.p);
    float *weights = test_alloc((size_t)(c.problem.num_heads * c.problem.seqlen_q * c.problem.seqlen_kv) * sizeof(double));
    qkv_tensor to = qkv_bhsd(weights, c.spec.dtype, c.problem.num_heads, c.problem.seqlen_q, c.problem.seqlen_kv);
    int64_t nodes;
    size_t bytes;
    assert_int_equal(qkv_state_bytes(&c.problem, 16, &nodes, &bytes), QKV_OK);
    void *memory[2] = {test_alloc(bytes), test_alloc(bytes)};
    qkv_state s[2];
    for (int k = 0; k < 2; k++) {
      assert_int_equal(qkv_state_init(&c.problem, 16, memory[k], bytes, &s[k]), QKV_OK);
    }
    EVERY_ISA {
      for (int kind = 0; kind < 5; kind++) {
        for (int split = 0; split < 2; split++) {
          executor e = executor_make(split ? EXECUTOR_THREADS : EXECUTOR_SERIAL, 2, 1);
          qkv_context context = executor_context(&e);
          context.isa_cap = ISA;
          problem_clear_outputs(&c);
          char text[2048];
          fenv_t before;
          fegetenv(&before);
          if (!poison(kind)) {
            fesetenv(&before);
            continue;
          }
          uint64_t word = control_word();
          int saved = errno = 12345;
          qkv_status statuses[6] = {qkv_forward(&context, &c.problem, NULL, 0), QKV_OK, QKV_OK, QKV_OK, QKV_OK, QKV_OK};
          uint64_t words[6] = {control_word(), word, word, word, word, word};
          if (split == 0) {
            statuses[1] = qkv_scores(&context, &c.problem, QKV_WEIGHTS, NULL, &to);
            words[1] = control_word();
            statuses[2] = qkv_describe(&context, &c.problem, text, sizeof text);
            words[2] = control_word();
            statuses[3] = qkv_check(&c.problem, text, sizeof text);
            words[3] = control_word();
            if (c.problem.algorithm == QKV_FLASH) {
              statuses[4] = qkv_partial(&context, &c.problem, &s[0], NULL, 0);
              words[4] = control_word();
              statuses[5] = qkv_merge(&context, &s[1], &s[0]);
              words[5] = control_word();
            }
          }
          saved = errno;
          fesetenv(&before);
          for (int k = 0; k < 6; k++) {
            assert_int_equal(statuses[k], QKV_OK);
            if (words[k] != word) {
              fail_msg("isa %s, kind %d, call %d: control word 0x%llx became 0x%llx", ISA, kind, k, (unsigned long long)word,
                       (unsigned long long)words[k]);
            }
          }
          assert_int_equal(saved, 12345);
          test_same(&expected.p, &c.problem, "isa %s, floating-point state %d, %s", ISA, kind, texts[n]);
          if (split == 0 && c.problem.algorithm == QKV_FLASH) {
            problem_clear_outputs(&c);
            fegetenv(&before);
            poison(kind);
            word = control_word();
            qkv_status status = qkv_finish(&context, &c.problem, &s[1]);
            uint64_t after = control_word();
            fesetenv(&before);
            assert_int_equal(status, QKV_OK);
            assert_true(after == word);
            test_same(&expected.p, &c.problem, "isa %s, floating-point state %d, states of %s", ISA, kind, texts[n]);
            assert_int_equal(qkv_state_init(&c.problem, 16, memory[1], bytes, &s[1]), QKV_OK);
          }
        }
      }
    }
    for (int k = 0; k < 2; k++) {
      free(memory[k]);
    }
    free(weights);
    test_copy_free(&expected);
    problem_free(&c);
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
  static const char *const texts[] = {"f32 h2 q170 k700 d17 tiny causal lse seed:1",
                                      "f64 h4/1 q70 k1300 d5 softcap:3 lse seed:3",
                                      "f32 h2 q170 k100 d16 standard bias lse seed:4"};
  for (size_t n = 0; n < sizeof texts / sizeof texts[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    test_copy expected;
    test_copy_make(&expected, &c.problem);
    test_run("reference", &expected.p);
    EVERY_ISA {
      for (int kind = 0; kind < 5; kind++) {
        odd_pool pool = {kind, 0, 0};
        qkv_context context = test_context(ISA);
        context.self = &pool;
        context.parallel_for = odd_parallel_for;
        context.flags = QKV_FORCE_SPLIT;
        problem_clear_outputs(&c);
        fenv_t before;
        fegetenv(&before);
        bool there = poison(kind);
        fesetenv(&before);
        if (there) {
          assert_int_equal(qkv_forward(&context, &c.problem, NULL, 0), QKV_OK);
          test_same(&expected.p, &c.problem, "isa %s, pool of state %d, %s", ISA, kind, texts[n]);
          assert_true(pool.tasks > 0);
          assert_int_equal(pool.changed, 0);
        }
      }
    }
    test_copy_free(&expected);
    problem_free(&c);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_every_field),          cmocka_unit_test(test_null_and_size),
    cmocka_unit_test(test_allocation_fails),     cmocka_unit_test(test_scratch_bounds),
    cmocka_unit_test(test_broken_context),       cmocka_unit_test(test_broken_regions),
    cmocka_unit_test(test_scratch_is_monotone),  cmocka_unit_test(test_broken_states),
    cmocka_unit_test(test_floating_point_state), cmocka_unit_test(test_floating_point_state_of_a_pool),
};

TEST_MAIN(tests)

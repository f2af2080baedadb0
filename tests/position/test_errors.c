/* What is wrong is said with the field's name and value, and nothing is written. */
#include "common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static void expect_text(const char *what, int n, const breakage *b, qkv_status found, const char *text) {
  if (found != b->status) {
    fail_msg("%s, case %d: status %d, not %d: %s", what, n, (int)found, (int)b->status, text);
  }
  for (int k = 0; k < 3; k++) {
    if (b->text[k] != NULL && strstr(text, b->text[k]) == NULL) {
      fail_msg("%s, case %d: \"%s\" does not say \"%s\"", what, n, text, b->text[k]);
    }
  }
}

static const int32_t late_starts[2] = {0, INT32_MAX - 3};
static const int32_t ids[16];
static const double bad_factors[2] = {1, -2};
static const int64_t far = (int64_t)1 << 61;

/* ---- Frequencies --------------------------------------------------------------------------------------------------- */

static bool break_frequencies(int n, qkv_frequencies *f, breakage *b) {
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "frequencies.size", "0", NULL, f->size = 0)
    CASE(1, QKV_UNKNOWN_FIELD, "reserved", "7", NULL, f->reserved = 7)
    CASE(2, QKV_BAD_VALUE, "scaling", "6", NULL, f->scaling = 6)
    CASE(3, QKV_BAD_EXTENT, "rotary_dim", "7", NULL, f->rotary_dim = 7)
    CASE(4, QKV_BAD_EXTENT, "rotary_dim", "0", NULL, f->rotary_dim = 0)
    CASE(5, QKV_BAD_EXTENT, "rotary_dim", "1048578", NULL, f->rotary_dim = (1 << 20) + 2)
    CASE(6, QKV_BAD_VALUE, "base", "0.5", NULL, f->base = 0.5)
    CASE(7, QKV_BAD_VALUE, "base", "nan", NULL, f->base = (double)NAN)
    CASE(8, QKV_BAD_VALUE, "base", "inf", NULL, f->base = (double)INFINITY)
    CASE(9, QKV_BAD_VALUE, "factor", "-2", NULL, (f->scaling = QKV_ROPE_LINEAR, f->factor = -2))
    CASE(10, QKV_BAD_VALUE, "factor", "0", NULL, f->scaling = QKV_ROPE_NTK)
    CASE(11, QKV_BAD_VALUE, "factor 3", "PLAIN", NULL, f->factor = 3)
    CASE(12, QKV_BAD_VALUE, "original_seqlen", "0", NULL, (f->scaling = QKV_ROPE_LLAMA3, f->factor = 8))
    CASE(13, QKV_BAD_VALUE, "original_seqlen 4096", "LINEAR", NULL,
         (f->scaling = QKV_ROPE_LINEAR, f->factor = 8, f->original_seqlen = 4096))
    CASE(14, QKV_BAD_VALUE, "seqlen", "-4", NULL,
         (f->scaling = QKV_ROPE_DYNAMIC_NTK, f->factor = 8, f->original_seqlen = 4096, f->seqlen = -4))
    CASE(15, QKV_BAD_VALUE, "beta_fast 1", "beta_slow 2", NULL,
         (f->scaling = QKV_ROPE_YARN, f->factor = 8, f->original_seqlen = 4096, f->beta_fast = 1, f->beta_slow = 2))
    CASE(16, QKV_BAD_VALUE, "beta_slow 3", "LLAMA3", NULL,
         (f->scaling = QKV_ROPE_LLAMA3, f->factor = 8, f->original_seqlen = 4096, f->beta_slow = 3))
    CASE(17, QKV_BAD_VALUE, "mscale 1", "mscale_all_dim 0", NULL,
         (f->scaling = QKV_ROPE_YARN, f->factor = 8, f->original_seqlen = 4096, f->mscale = 1))
    CASE(18, QKV_BAD_VALUE, "mscale_all_dim", "PLAIN", NULL, f->mscale_all_dim = 1)
    CASE(19, QKV_BAD_VALUE, "no_truncate", "PLAIN", NULL, f->no_truncate = 1)
    CASE(20, QKV_BAD_VALUE, "no_truncate", "2", NULL,
         (f->scaling = QKV_ROPE_YARN, f->factor = 8, f->original_seqlen = 4096, f->no_truncate = 2))
    CASE(21, QKV_BAD_VALUE, "base 1", "YARN", NULL,
         (f->scaling = QKV_ROPE_YARN, f->factor = 8, f->original_seqlen = 4096, f->base = 1))
    CASE(22, QKV_BAD_VALUE, "high_freq_factor 4", "low_freq_factor 5", NULL,
         (f->scaling = QKV_ROPE_LLAMA3, f->factor = 8, f->original_seqlen = 4096, f->low_freq_factor = 5))
    CASE(23, QKV_BAD_VALUE, "attention_factor", "-1", NULL, f->attention_factor = -1)
    CASE(24, QKV_BAD_VALUE, "factors[1]", "-2", NULL, (f->rotary_dim = 4, f->factors = bad_factors))
    CASE(25, QKV_BAD_VALUE, "frequency 0", "2^20", NULL, (f->scaling = QKV_ROPE_LINEAR, f->factor = 1e-7))
    CASE(26, QKV_BAD_VALUE, "factor 1e+100", "2^1000", NULL,
         (f->scaling = QKV_ROPE_NTK, f->factor = 1e100, f->rotary_dim = 4, f->base = 1e150))
    CASE(27, QKV_UNKNOWN_FIELD, "frequencies.size", "more", NULL, f->size = (uint32_t)sizeof *f + 8)
    default: return false;
  }
}

static void test_frequencies(void **state) {
  (void)state;
  breakage b;
  struct {
    qkv_frequencies f;
    int64_t more;
  } in;
  double table[QKV_FREQUENCIES_DOUBLES(64)];
  for (int n = 0;; n++) {
    char text[256];
    size_t bytes = 99;
    in.f = qkv_frequencies_default();
    in.f.rotary_dim = 64;
    in.more = 1;
    memset(table, 0xff, sizeof table);
    if (!break_frequencies(n, &in.f, &b)) {
      break;
    }
    expect_text("frequencies", n, &b, qkv_frequencies_check(&in.f, text, sizeof text), text);
    assert_int_equal(qkv_frequencies_bytes(&in.f, &bytes), b.status);
    assert_int_equal(bytes, 99);
    assert_int_equal(qkv_frequencies_fill(&in.f, table, sizeof table), b.status);
    for (size_t k = 0; k < sizeof table; k++) {
      assert_int_equal(((unsigned char *)table)[k], 0xff);
    }
  }
  in.f = qkv_frequencies_default();
  in.f.rotary_dim = 64;
  in.f.size += 8;
  in.more = 0;
  assert_int_equal(qkv_frequencies_fill(&in.f, table, sizeof table), QKV_OK); /* of a newer caller */
  assert_int_equal(qkv_frequencies_fill(&in.f, table, sizeof table - 1), QKV_SCRATCH_TOO_SMALL);
  assert_int_equal(qkv_frequencies_fill(&in.f, NULL, 0), QKV_BAD_POINTER);
  assert_int_equal(qkv_frequencies_fill(NULL, table, sizeof table), QKV_BAD_POINTER);
  assert_int_equal(qkv_frequencies_bytes(&in.f, NULL), QKV_BAD_POINTER);
}

/* ---- Rotary: batch 2, num_heads 2, seqlen 5, head_dim 8 ------------------------------------------------------------ */

static double table_of_8[QKV_FREQUENCIES_DOUBLES(8)], table_of_10[QKV_FREQUENCIES_DOUBLES(10)], no_table[50];

static bool break_rotary(int n, qkv_rotary *r, breakage *b) {
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "rotary.size", "1", NULL, r->size = 1)
    CASE(1, QKV_BAD_VALUE, "pairing", "2", NULL, r->pairing = 2)
    CASE(2, QKV_BAD_EXTENT, "batch", "-1", NULL, r->batch = -1)
    CASE(3, QKV_BAD_EXTENT, "num_heads", "-1", NULL, r->num_heads = -1)
    CASE(4, QKV_BAD_EXTENT, "seqlen", "4294967296", NULL, r->seqlen = (int64_t)1 << 32)
    CASE(5, QKV_BAD_EXTENT, "head_dim", "0", NULL, r->head_dim = 0)
    CASE(6, QKV_BAD_POINTER, "table", "NULL", NULL, r->table = NULL)
    CASE(7, QKV_BAD_VALUE, "table", "qkv_frequencies_fill", NULL, r->table = no_table)
    CASE(8, QKV_BAD_EXTENT, "rotary_dim 10", "head_dim 8", NULL, r->table = table_of_10)
    CASE(9, QKV_BAD_LENGTHS, "start", "2147483648", NULL, r->start = (int64_t)1 << 31)
    CASE(10, QKV_BAD_LENGTHS, "start", "2147483644..2147483648", NULL, r->start = INT32_MAX - 3)
    CASE(11, QKV_BAD_LENGTHS, "start", "entry 1", NULL, r->starts = late_starts)
    CASE(12, QKV_BAD_LENGTHS, "start ", "position_ids", NULL,
         (r->start = 1, r->position_ids = qkv_strided(ids, QKV_I32, 5, 0, 1, 0)))
    CASE(13, QKV_BAD_LENGTHS, "starts", "position_ids", NULL,
         (r->starts = ids, r->position_ids = qkv_strided(ids, QKV_I32, 5, 0, 1, 0)))
    CASE(14, QKV_BAD_DTYPE, "position_ids", "f32", "i32", r->position_ids = qkv_strided(ids, QKV_F32, 5, 0, 1, 0))
    CASE(15, QKV_BAD_POINTER, "x.data", "NULL", NULL, r->x.data = NULL)
    CASE(16, QKV_BAD_DTYPE, "x", "dtype 99", NULL, r->x.dtype = 99)
    CASE(17, QKV_BAD_DTYPE, "out", "i32", "f32, f64, f16 or bf16", r->out.dtype = QKV_I32)
    CASE(18, QKV_BAD_DTYPE, "x.dtype is f32", "out.dtype f64", NULL,
         (r->out = r->x, r->out.data = no_table, r->out.stride[0] = 0, r->batch = r->num_heads = r->seqlen = 1, r->out.dtype = QKV_F64))
    CASE(19, QKV_BAD_STRIDE, "x", "2305843009213693952", NULL, r->x.stride[2] = far)
    CASE(20, QKV_BAD_STRIDE, "out", "overlaps itself", NULL, r->out.stride[1] = 0)
    CASE(21, QKV_BAD_STRIDE, "x", "overlaps itself", NULL, (r->out.data = NULL, r->x.stride[1] = 0))
    CASE(22, QKV_BAD_OVERLAP, "out", "x", NULL, r->out.data = (float *)r->x.data + 1)
    CASE(23, QKV_UNKNOWN_FIELD, "x.reserved", "5", NULL, r->x.reserved = 5)
    CASE(24, QKV_UNKNOWN_FIELD, "out.reserved", "6", NULL, r->out.reserved = 6)
    CASE(25, QKV_UNKNOWN_FIELD, "position_ids.reserved", "4", NULL, r->position_ids.reserved = 4)
    CASE(26, QKV_UNSUPPORTED, "x", "i8", NULL, r->x.dtype = QKV_I8)
    CASE(27, QKV_BAD_OVERLAP, "out", "position_ids", NULL, r->position_ids = qkv_strided(r->out.data, QKV_I32, 5, 0, 1, 0))
    CASE(28, QKV_BAD_STRIDE, "x", "overlaps itself", NULL, (r->x.stride[1] = 0, r->out = r->x))
    default: return false;
  }
}

static void test_rotary(void **state) {
  (void)state;
  breakage b;
  char text[256] = "x";
  bool more = true;
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = 8;
  assert_int_equal(qkv_frequencies_fill(&f, table_of_8, sizeof table_of_8), QKV_OK);
  f.rotary_dim = 10;
  assert_int_equal(qkv_frequencies_fill(&f, table_of_10, sizeof table_of_10), QKV_OK);
  for (int n = -1; more; n++) {
    array x = array_make(QKV_F32, DENSE, 2, 2, 5, 8), out = array_make(QKV_F32, DENSE, 2, 2, 5, 8);
    qkv_rotary r = qkv_rotary_default();
    r.batch = r.num_heads = 2;
    r.seqlen = 5;
    r.head_dim = 8;
    r.table = table_of_8;
    r.x = x.t;
    r.out = out.t;
    if (n < 0) {
      assert_int_equal(qkv_rotary_check(&r, text, sizeof text), QKV_OK);
      assert_string_equal(text, "");
    } else {
      more = break_rotary(n, &r, &b);
    }
    if (n >= 0 && more) {
      expect_text("rotary", n, &b, qkv_rotary_check(&r, text, sizeof text), text);
      assert_int_equal(qkv_rotary_forward(NULL, &r), b.status);
      assert_int_equal(qkv_rotary_backward(NULL, &r), b.status);
      for (size_t k = 0; k < out.bytes; k++) {
        assert_true(out.memory[k] == 0xff && x.memory[k] == 0xff);
      }
    }
    array_free(&x);
    array_free(&out);
  }
  assert_int_equal(qkv_rotary_forward(NULL, NULL), QKV_BAD_POINTER);
  qkv_rotary r = qkv_rotary_default();
  r.head_dim = 8;
  r.table = table_of_8;
  assert_int_equal(qkv_rotary_forward(NULL, &r), QKV_OK); /* nothing to do */
  qkv_context context = qkv_context_default();
  context.num_workers = -1;
  assert_int_equal(qkv_rotary_forward(&context, &r), QKV_BAD_CONTEXT);
}

/* ---- Sinusoidal: batch 2, seqlen 5, d_model 8, f32, with a table of 3 rows ----------------------------------------- */

static bool break_sinusoidal(int n, qkv_sinusoidal *s, breakage *b) {
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "sinusoidal.size", "2", NULL, s->size = 2)
    CASE(1, QKV_UNKNOWN_FIELD, "sinusoidal.reserved", "1", NULL, s->reserved = 1)
    CASE(2, QKV_BAD_VALUE, "base", "0.25", NULL, s->base = 0.25)
    CASE(3, QKV_BAD_VALUE, "dropout", "1.5", NULL, s->dropout = 1.5)
    CASE(4, QKV_BAD_VALUE, "dropout", "nan", NULL, s->dropout = (double)NAN)
    CASE(5, QKV_BAD_VALUE, "batch_origin", "-1", NULL, s->batch_origin = -1)
    CASE(6, QKV_BAD_VALUE, "row_origin", "-2", NULL, s->row_origin = -2)
    CASE(7, QKV_BAD_EXTENT, "batch", "-3", NULL, s->batch = -3)
    CASE(8, QKV_BAD_EXTENT, "seqlen", "-4", NULL, s->seqlen = -4)
    CASE(9, QKV_BAD_EXTENT, "d_model", "0", NULL, s->d_model = 0)
    CASE(10, QKV_BAD_EXTENT, "table_rows", "-1", NULL, s->table_rows = -1)
    CASE(11, QKV_BAD_LENGTHS, "start", "-2147483649", NULL, s->start = (int64_t)INT32_MIN - 1)
    CASE(12, QKV_BAD_LENGTHS, "start", "entry 1", NULL, s->starts = late_starts)
    CASE(13, QKV_BAD_POINTER, "out.data", "NULL", NULL, s->x.data = s->out.data = NULL)
    CASE(14, QKV_BAD_DTYPE, "out.dtype", "u8", NULL, s->out.dtype = QKV_U8)
    CASE(15, QKV_BAD_DTYPE, "table", "f16", "f32 or f64", s->table.dtype = QKV_F16)
    CASE(16, QKV_BAD_POINTER, "table.data", "NULL", NULL, s->table.data = NULL)
    CASE(17, QKV_BAD_OVERLAP, "out", "table", NULL, s->table.data = s->out.data)
    CASE(18, QKV_BAD_OVERLAP, "out", "x", NULL, s->out.data = (float *)s->x.data + 3)
    CASE(19, QKV_BAD_STRIDE, "table", "9223372036854775807", NULL, s->table.stride[2] = INT64_MAX)
    CASE(20, QKV_BAD_STRIDE, "out", "overlaps itself", NULL, s->out.stride[2] = 7)
    default: return false;
  }
}

static void test_sinusoidal(void **state) {
  (void)state;
  breakage b;
  char text[256] = "x";
  bool more = true;
  for (int n = -1; more; n++) {
    array x = array_make(QKV_F32, DENSE, 2, 1, 5, 8), out = array_make(QKV_F32, DENSE, 2, 1, 5, 8);
    array table = array_make(QKV_F32, DENSE, 1, 1, 3, 8);
    qkv_sinusoidal s = qkv_sinusoidal_default();
    s.batch = 2;
    s.seqlen = 5;
    s.d_model = 8;
    s.x = x.t;
    s.out = out.t;
    s.table = table.t;
    s.table_rows = 3;
    if (n < 0) {
      assert_int_equal(qkv_sinusoidal_check(&s, text, sizeof text), QKV_OK);
      assert_string_equal(text, "");
    } else {
      more = break_sinusoidal(n, &s, &b);
    }
    if (n >= 0 && more) {
      expect_text("sinusoidal", n, &b, qkv_sinusoidal_check(&s, text, sizeof text), text);
      assert_int_equal(qkv_sinusoidal_forward(NULL, &s), b.status);
      for (size_t k = 0; k < out.bytes; k++) {
        assert_true(out.memory[k] == 0xff && x.memory[k] == 0xff);
      }
    }
    array_free(&x);
    array_free(&out);
    array_free(&table);
  }
}

static void test_sinusoidal_table(void **state) {
  (void)state;
  float rows[3 * 8];
  size_t bytes;
  qkv_sinusoidal s = qkv_sinusoidal_default();
  s.d_model = 8;
  s.table_rows = 3;
  s.table = qkv_strided(rows, QKV_F32, 0, 0, 8, 1);
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 0, 3), QKV_OK);
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 3, 3), QKV_OK);
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, -1, 3), QKV_BAD_REGION);
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 2, 1), QKV_BAD_REGION);
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 0, 4), QKV_BAD_REGION);
  assert_int_equal(qkv_sinusoidal_fill(NULL, NULL, 0, 0), QKV_BAD_POINTER);
  s.table.dtype = QKV_BF16;
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 0, 3), QKV_BAD_DTYPE);
  s.table.data = NULL;
  assert_int_equal(qkv_sinusoidal_fill(NULL, &s, 0, 3), QKV_BAD_POINTER);
  assert_int_equal(qkv_sinusoidal_table_bytes(3, 8, QKV_BF16, &bytes), QKV_BAD_DTYPE);
  assert_int_equal(qkv_sinusoidal_table_bytes(-3, 8, QKV_F32, &bytes), QKV_BAD_EXTENT);
  assert_int_equal(qkv_sinusoidal_table_bytes(3, 8, QKV_F32, NULL), QKV_BAD_POINTER);
  /* the gradient of x needs x */
  s = qkv_sinusoidal_default();
  s.batch = s.seqlen = 1;
  s.d_model = 8;
  s.out = qkv_strided(rows, QKV_F32, 0, 0, 8, 1);
  assert_int_equal(qkv_sinusoidal_forward(NULL, &s), QKV_OK);
  assert_int_equal(qkv_sinusoidal_backward(NULL, &s), QKV_BAD_POINTER);
}

/* ---- Relative: num_heads 2, seqlen_q 3, seqlen_kv 4 ---------------------------------------------------------------- */

static bool break_relative(int n, qkv_relative *r, breakage *b) {
  switch (n) {
    CASE(0, QKV_BAD_SIZE, "relative.size", "3", NULL, r->size = 3)
    CASE(1, QKV_UNKNOWN_FIELD, "relative.reserved", "1", NULL, r->reserved = 1)
    CASE(2, QKV_BAD_VALUE, "causal", "2", NULL, r->causal = 2)
    CASE(3, QKV_BAD_VALUE, "accumulate", "-1", NULL, r->accumulate = -1)
    CASE(4, QKV_BAD_EXTENT, "num_buckets", "3", NULL, r->num_buckets = 3)
    CASE(5, QKV_BAD_EXTENT, "num_buckets", "1025", NULL, r->num_buckets = 1025)
    CASE(6, QKV_BAD_EXTENT, "max_distance", "8", NULL, r->max_distance = 8)
    CASE(7, QKV_BAD_EXTENT, "max_distance", "16", NULL, (r->max_distance = 16, r->causal = 1))
    CASE(8, QKV_BAD_EXTENT, "batch", "-1", NULL, r->batch = -1)
    CASE(9, QKV_BAD_EXTENT, "num_heads", "-2", NULL, r->num_heads = -2)
    CASE(10, QKV_BAD_EXTENT, "seqlen_q", "-3", NULL, r->seqlen_q = -3)
    CASE(11, QKV_BAD_EXTENT, "seqlen_kv", "-4", NULL, r->seqlen_kv = -4)
    CASE(12, QKV_BAD_LENGTHS, "q_position", "2147483648", NULL, r->q_position = (int64_t)1 << 31)
    CASE(13, QKV_BAD_LENGTHS, "kv_position", "-2147483649", NULL, r->kv_position = -((int64_t)1 << 31) - 1)
    CASE(14, QKV_BAD_POINTER, "table.data", "NULL", NULL, r->table.data = NULL)
    CASE(15, QKV_BAD_POINTER, "bias.data", "NULL", NULL, r->bias.data = NULL)
    CASE(16, QKV_BAD_DTYPE, "table.dtype is f64", "bias.dtype f32", NULL, (r->table.dtype = QKV_F64, r->table.stride[2] = 1))
    CASE(17, QKV_BAD_DTYPE, "bias.dtype", "i32", NULL, r->bias.dtype = QKV_I32)
    CASE(18, QKV_BAD_OVERLAP, "bias", "table", NULL, r->bias.data = r->table.data)
    CASE(19, QKV_BAD_STRIDE, "bias", "overlaps itself", NULL, r->bias.stride[2] = 1)
    default: return false;
  }
}

static void test_relative(void **state) {
  (void)state;
  breakage b;
  char text[256] = "x";
  bool more = true;
  for (int n = -1; more; n++) {
    array table = array_make(QKV_F32, DENSE, 1, 2, 32, 1), bias = array_make(QKV_F32, DENSE, 1, 2, 3, 4);
    qkv_relative r = qkv_relative_default();
    r.num_heads = 2;
    r.seqlen_q = 3;
    r.seqlen_kv = 4;
    r.table = table.t;
    r.bias = bias.t;
    if (n < 0) {
      assert_int_equal(qkv_relative_check(&r, text, sizeof text), QKV_OK);
      assert_string_equal(text, "");
    } else {
      more = break_relative(n, &r, &b);
    }
    if (n >= 0 && more) {
      expect_text("relative", n, &b, qkv_relative_check(&r, text, sizeof text), text);
      assert_int_equal(qkv_relative_forward(NULL, &r), b.status);
      for (size_t k = 0; k < bias.bytes; k++) {
        assert_int_equal(bias.memory[k], 0xff);
      }
    }
    array_free(&table);
    array_free(&bias);
  }
  qkv_relative r = qkv_relative_default();
  int64_t bucket;
  assert_int_equal(qkv_relative_bucket(&r, 3, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_relative_bucket(NULL, 3, &bucket), QKV_BAD_POINTER);
  /* a table that the backward cannot write */
  float values[64] = {0};
  r.num_heads = 2;
  r.table = qkv_strided(values, QKV_F32, 0, 0, 1, 0);
  assert_int_equal(qkv_relative_forward(NULL, &r), QKV_OK);
  assert_int_equal(qkv_relative_backward(NULL, &r), QKV_BAD_STRIDE);
}

/* Parts of one buffer, as q and k of a fused projection, are apart though their ranges are not. */
static void test_fused_buffer(void **state) {
  (void)state;
  float fused[6 * 3 * 8] = {0};
  qkv_rotary r = qkv_rotary_default();
  r.batch = 1;
  r.num_heads = 1;
  r.seqlen = 6;
  r.head_dim = 8;
  r.table = table_of_8;
  r.x = qkv_strided(fused, QKV_F32, 0, 0, 24, 1);
  r.out = qkv_strided(fused + 8, QKV_F32, 0, 0, 24, 1);
  assert_int_equal(qkv_rotary_forward(NULL, &r), QKV_OK);
  r.out.data = fused + 7;
  assert_int_equal(qkv_rotary_forward(NULL, &r), QKV_BAD_OVERLAP);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_frequencies),      cmocka_unit_test(test_rotary),   cmocka_unit_test(test_sinusoidal),
    cmocka_unit_test(test_sinusoidal_table), cmocka_unit_test(test_relative), cmocka_unit_test(test_fused_buffer),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }

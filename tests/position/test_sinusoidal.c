/* Sinusoidal encodings against exact values, an oracle in long double, and the rules of the header. */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "exact.h"

enum { EXACT_SINES = sizeof exact_sines / sizeof exact_sines[0] };

/* Relative error of a sine or cosine in units of 2^-53, as docs/POSITIONS.md states it, and half a unit for the expected value. */
#define UNITS 3.5

static qkv_sinusoidal writes(array *out, int64_t start) {
  qkv_sinusoidal s = qkv_sinusoidal_default();
  s.batch = out->n[0];
  s.seqlen = out->n[2];
  s.d_model = out->n[3];
  s.start = start;
  s.out = out->t;
  return s;
}

static void run(const qkv_sinusoidal *s) {
  char text[256];
  const qkv_status status = qkv_sinusoidal_forward(NULL, s);
  if (status != QKV_OK) {
    qkv_sinusoidal_check(s, text, sizeof text);
    fail_msg("status %d: %s", (int)status, text);
  }
}

static void test_known_values(void **state) {
  (void)state;
  static const double known[5] = {.84147098, .54030231, .02511622, .99968454, .00063096};
  array out = array_make(QKV_F32, DENSE, 1, 1, 2, 5);
  qkv_sinusoidal s = writes(&out, 0);
  run(&s);
  for (int x = 0; x < 5; x++) {
    assert_true(array_get(&out, 0, 0, 0, x) == x % 2);
    assert_true(within(array_get(&out, 0, 0, 1, x) - known[x], 0.5e-8 + 0x1p-25));
  }
  array_free(&out);
}

static void test_exact_values(void **state) {
  (void)state;
  for (int n = 0; n < EXACT_SINES; n++) {
    const int64_t d = exact_sines[n].d, column = 2 * exact_sines[n].pair;
    array wide = array_make(QKV_F64, DENSE, 1, 1, 1, d), narrow = array_make(QKV_F32, DENSE, 1, 1, 1, d);
    for (int f32 = 0; f32 < 2; f32++) {
      qkv_sinusoidal s = writes(f32 ? &narrow : &wide, exact_sines[n].position);
      s.base = exact_sines[n].base;
      run(&s);
      for (int x = 0; x < 2 && column + x < d; x++) {
        const double exact = x ? exact_sines[n].cosine : exact_sines[n].sine, unit = f32 ? 0x1p-24 * (1 + 0x1p-20) : UNITS * 0x1p-53;
        const double found = array_get(f32 ? &narrow : &wide, 0, 0, 0, column + x);
        if (!within(found - exact, unit * fabs(exact))) {
          fail_msg("base %g, d_model %d, position %d, column %d: %a, not %a", exact_sines[n].base, (int)d,
                   (int)exact_sines[n].position, (int)column + x, found, exact);
        }
      }
    }
    array_free(&wide);
    array_free(&narrow);
  }
}

/* At moderate positions long double is exact enough: the angle's error is below position * 2^-62. */
static double expected_at(double base, int64_t d, int64_t column, int64_t position) {
  const long double angle = (long double)position * powl((long double)base, -(long double)(column - column % 2) / (long double)d);
  return (double)(column % 2 ? cosl(angle) : sinl(angle));
}

static void test_random_shapes(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(60); n++) {
    rng r = {77, (uint64_t)n, 0};
    const int64_t batch = rng_range(&r, 1, 3), rows = rng_range(&r, 1, 70), d = rng_range(&r, 1, 200);
    const double base = rng_chance(&r, 50) ? 0 : 1 + 1e5 * rng_uniform_at(5, 5, (uint64_t)n);
    const int f64 = rng_chance(&r, 40), how = (int)rng_below(&r, 3);
    array out = array_make(f64 ? QKV_F64 : QKV_F32, (int)rng_below(&r, LAYOUTS), batch, 1, rows, d);
    qkv_sinusoidal s = writes(&out, how < 2 ? rng_range(&r, -70000, 70000) : 0);
    int32_t starts[3], ids[3 * 70];
    s.base = base;
    for (int b = 0; b < 3; b++) {
      starts[b] = (int32_t)rng_range(&r, -1000, 1000);
    }
    for (int i = 0; i < 3 * 70; i++) {
      ids[i] = (int32_t)rng_range(&r, -100000, 100000);
    }
    if (how == 1) {
      s.starts = starts;
    }
    if (how == 2) {
      s.position_ids = qkv_strided(ids, QKV_I32, 70, 0, 1, 0);
    }
    run(&s);
    array_gaps(&out, "case %d", (int)n);
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t x = 0; x < d; x++) {
          const int64_t position = how == 2 ? ids[b * 70 + i] : s.start + (how == 1 ? starts[b] : 0) + i;
          const double exact = expected_at(base == 0 ? 10000 : base, d, x, position), found = array_get(&out, b, 0, i, x);
          const double bound = (f64 ? UNITS * 0x1p-53 : 0x1p-24) * fabs(exact) + fabs((double)position) * 0x1p-61;
          if (!within(found - exact, bound)) {
            fail_msg("case %d: (%d, %d, %d): position %d, base %g, d_model %d: %a, not %a", (int)n, (int)b, (int)i, (int)x,
                     (int)position, base, (int)d, found, exact);
          }
        }
      }
    }
    array_free(&out);
  }
}

/* PE(p + k) is PE(p) rotated by k w: the reason for the form of the encoding. */
static void test_relation(void **state) {
  (void)state;
  static const int64_t shifts[] = {1, 13, 1000, 1000000, -77};
  enum { D = 64, P = 5 };
  array at = array_make(QKV_F64, DENSE, 1, 1, 1, D), by = array_make(QKV_F64, DENSE, 1, 1, 1, D),
        sum = array_make(QKV_F64, DENSE, 1, 1, 1, D);
  for (int n = 0; n < 5; n++) {
    qkv_sinusoidal a = writes(&at, P), k = writes(&by, shifts[n]), b = writes(&sum, P + shifts[n]);
    run(&a);
    run(&k);
    run(&b);
    for (int x = 0; x < D; x += 2) {
      const double s = array_get(&at, 0, 0, 0, x), c = array_get(&at, 0, 0, 0, x + 1);
      const double ks = array_get(&by, 0, 0, 0, x), kc = array_get(&by, 0, 0, 0, x + 1);
      /* twice 3 units on each factor, 2 on each term and the sum, 3 on what is expected: all at most 1 */
      assert_true(within(array_get(&sum, 0, 0, 0, x) - (s * kc + c * ks), 18 * 0x1p-53));
      assert_true(within(array_get(&sum, 0, 0, 0, x + 1) - (c * kc - s * ks), 18 * 0x1p-53));
    }
  }
  array_free(&at);
  array_free(&by);
  array_free(&sum);
}

/* out = x + encoding: one rounding to f32 of the encoding, one of the sum, one to 16 bits. */
static void test_sum(void **state) {
  (void)state;
  enum { B = 2, N = 9, D = 71 };
  for (int tx = 0; tx < 4; tx++) {
    for (int to = 0; to < 4; to++) {
      if ((all_types[tx] == QKV_F64) != (all_types[to] == QKV_F64)) {
        continue;
      }
      array x = array_make(all_types[tx], ODD, B, 1, N, D), out = array_make(all_types[to], NEGATIVE, B, 1, N, D);
      array encoding = array_make(all_types[to] == QKV_F64 ? QKV_F64 : QKV_F32, DENSE, 1, 1, N, D);
      array expected = array_make(all_types[to], DENSE, B, 1, N, D);
      array_random(&x, 3);
      qkv_sinusoidal e = writes(&encoding, 1850), s = writes(&out, 1850);
      run(&e);
      s.x = x.t;
      run(&s);
      for (int b = 0; b < B; b++) {
        for (int i = 0; i < N; i++) {
          for (int c = 0; c < D; c++) {
            const double sum = array_get(&x, b, 0, i, c) + array_get(&encoding, 0, 0, i, c);
            array_set(&expected, b, 0, i, c, all_types[to] == QKV_F64 ? sum : (double)(float)sum);
          }
        }
      }
      array_same(&expected, &out, "%s to %s", type_name(all_types[tx]), type_name(all_types[to]));
      array_gaps(&out, "%s to %s", type_name(all_types[tx]), type_name(all_types[to]));
      if (tx == to) { /* in place, both ways to say it */
        for (int way = 0; way < 2; way++) {
          array in = array_make(all_types[tx], way ? SWAPPED : ODD, B, 1, N, D);
          array_copy(&in, &x);
          s.x = in.t;
          s.out = way ? in.t : (qkv_tensor){.data = NULL};
          run(&s);
          array_same(&expected, &in, "%s in place, way %d", type_name(all_types[tx]), way);
          array_gaps(&in, "%s in place, way %d", type_name(all_types[tx]), way);
          array_free(&in);
        }
      }
      array_free(&x);
      array_free(&out);
      array_free(&encoding);
      array_free(&expected);
    }
  }
}

/* A table changes nothing, whatever part of the positions it holds; it grows by its new rows. */
static void test_table(void **state) {
  (void)state;
  enum { B = 2, N = 150, D = 130 };
  for (int type = 0; type < 4; type++) {
    const int f64 = all_types[type] == QKV_F64;
    array x = array_make(all_types[type], DENSE, B, 1, N, D), out = array_make(all_types[type], DENSE, B, 1, N, D);
    array expected = array_make(all_types[type], DENSE, B, 1, N, D);
    array_random(&x, 4);
    qkv_sinusoidal s = writes(&expected, -20);
    s.x = x.t;
    run(&s);
    s.out = out.t;
    for (int wide = f64; wide < 2; wide++) {
      size_t bytes;
      assert_int_equal(qkv_sinusoidal_table_bytes(200, D, wide ? QKV_F64 : QKV_F32, &bytes), QKV_OK);
      assert_int_equal(bytes, 200 * D * (wide ? 8 : 4));
      array table = array_make(wide ? QKV_F64 : QKV_F32, wide ? ODD : DENSE, 1, 1, 200, D);
      s.table = table.t;
      for (int64_t rows = 0, more; rows <= 200; rows = more) {
        more = rows == 0 ? 40 : rows == 40 ? 41 : rows == 41 ? 200 : 201;
        s.table_rows = rows;
        memset(out.memory, 0xff, out.bytes);
        run(&s);
        array_same(&expected, &out, "%s, table of %d rows", type_name(all_types[type]), (int)rows);
        if (more <= 200) {
          s.table_rows = more;
          assert_int_equal(qkv_sinusoidal_fill(NULL, &s, rows, more), QKV_OK);
        }
      }
      array_gaps(&table, "table");
      array_free(&table);
      s.table = (qkv_tensor){.data = NULL};
      s.table_rows = 0;
    }
    array_free(&x);
    array_free(&out);
    array_free(&expected);
  }
}

/* It is read, not computed again. */
static void test_table_is_used(void **state) {
  (void)state;
  array out = array_make(QKV_F32, DENSE, 1, 1, 3, 4), table = array_make(QKV_F32, DENSE, 1, 1, 2, 4);
  array_random(&table, 1);
  qkv_sinusoidal s = writes(&out, 0);
  s.table = table.t;
  s.table_rows = 2;
  run(&s);
  for (int i = 0; i < 2; i++) {
    for (int x = 0; x < 4; x++) {
      assert_true(array_get(&out, 0, 0, i, x) == array_get(&table, 0, 0, i, x));
    }
  }
  array_free(&out);
  array_free(&table);
}

/* ---- Dropout ---- */

/* Philox4x32-10, written from the paper: state, two multipliers, two Weyl constants. */
static void philox(uint32_t c[4], uint32_t k[2]) {
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)c[0] * 0xd2511f53u, b = (uint64_t)c[2] * 0xcd9e8d57u;
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
    memcpy(c, next, sizeof next);
    k[0] += 0x9e3779b9u;
    k[1] += 0xbb67ae85u;
  }
}

static void test_philox(void **state) {
  (void)state;
  /* known answers of Random123 */
  uint32_t zero[4] = {0}, key[2] = {0}, ones[4] = {~0u, ~0u, ~0u, ~0u}, all[2] = {~0u, ~0u};
  uint32_t digits[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, of_pi[2] = {0xa4093822, 0x299f31d0};
  static const uint32_t expected[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                          {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                          {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
  philox(zero, key);
  philox(ones, all);
  philox(digits, of_pi);
  assert_memory_equal(zero, expected[0], 16);
  assert_memory_equal(ones, expected[1], 16);
  assert_memory_equal(digits, expected[2], 16);
}

static bool kept(const qkv_sinusoidal *s, int64_t b, int64_t i, int64_t x) {
  uint32_t c[4] = {0x80000000u + (uint32_t)(x / 4), (uint32_t)(s->row_origin + i), (uint32_t)(s->batch_origin + b),
                   (uint32_t)s->offset};
  uint32_t k[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)};
  philox(c, k);
  return c[x % 4] >= s->dropout * 4294967296.0;
}

static void test_dropout(void **state) {
  (void)state;
  static const double rates[] = {0.1, 0.5, 0.999, 1};
  enum { B = 2, N = 40, D = 70 };
  for (int type = 0; type < 4; type++) {
    const int f64 = all_types[type] == QKV_F64;
    array x = array_make(all_types[type], ODD, B, 1, N, D), plain = array_make(f64 ? QKV_F64 : QKV_F32, DENSE, B, 1, N, D);
    array out = array_make(all_types[type], SWAPPED, B, 1, N, D), dx = array_make(all_types[type], ODD, B, 1, N, D);
    array expected = array_make(all_types[type], DENSE, B, 1, N, D), gradient = array_make(all_types[type], DENSE, B, 1, N, D);
    array_random(&x, 6);
    qkv_sinusoidal s = writes(&plain, 3);
    s.x = x.t;
    run(&s);
    for (int rate = 0; rate < 4; rate++) {
      int64_t count = 0;
      s.dropout = rates[rate];
      s.seed = UINT64_C(0x0123456789abcdef) + (uint64_t)rate;
      s.offset = UINT64_C(0x5000000000) + 7;
      s.batch_origin = 5;
      s.row_origin = (int64_t)1 << 31;
      for (int b = 0; b < B; b++) {
        for (int i = 0; i < N; i++) {
          for (int c = 0; c < D; c++) {
            const double keep = 1 - s.dropout, r = s.dropout == 1 ? 0 : 1 / keep, v = array_get(&plain, b, 0, i, c);
            const double g = array_get(&x, b, 0, i, c);
            const bool k = kept(&s, b, i, c);
            count += k;
            array_set(&expected, b, 0, i, c, !k ? 0 : f64 ? v * r : (double)((float)v * (float)r));
            array_set(&gradient, b, 0, i, c, !k ? 0 : f64 ? g * r : (double)((float)g * (float)r));
          }
        }
      }
      s.out = out.t;
      run(&s);
      array_same(&expected, &out, "%s, dropout %g", type_name(all_types[type]), s.dropout);
      s.out = dx.t;
      assert_int_equal(qkv_sinusoidal_backward(NULL, &s), QKV_OK);
      array_same(&gradient, &dx, "%s, gradient under dropout %g", type_name(all_types[type]), s.dropout);
      /* five standard deviations of a sum of B N D draws */
      assert_true(within((double)count - B * N * D * (1 - s.dropout), 5 * sqrt(B * N * D * s.dropout * (1 - s.dropout))));
    }
    array_free(&x);
    array_free(&plain);
    array_free(&out);
    array_free(&dx);
    array_free(&expected);
    array_free(&gradient);
  }
}

/* Parts of a batch and of the rows, told their origin, give the bits of the whole. */
static void test_parts(void **state) {
  (void)state;
  enum { B = 3, N = 20, D = 33 };
  array x = array_make(QKV_F32, DENSE, B, 1, N, D), out = array_make(QKV_F32, DENSE, B, 1, N, D);
  array expected = array_make(QKV_F32, DENSE, B, 1, N, D);
  array_random(&x, 8);
  qkv_sinusoidal s = writes(&expected, 100);
  s.x = x.t;
  s.dropout = 0.3;
  s.seed = 9;
  run(&s);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = 0; i < N; i += 7) {
      qkv_sinusoidal part = s;
      part.batch = 1;
      part.seqlen = i + 7 < N ? 7 : N - i;
      part.start = s.start + i;
      part.batch_origin = b;
      part.row_origin = i;
      part.x.data = (float *)x.t.data + (b * N + i) * D;
      part.out = out.t;
      part.out.data = (float *)out.t.data + (b * N + i) * D;
      run(&part);
    }
  }
  array_same(&expected, &out, "in parts");
  array_free(&x);
  array_free(&out);
  array_free(&expected);
}

static void test_gradient_without_dropout(void **state) {
  (void)state;
  for (int type = 0; type < 4; type++) {
    array dy = array_make(all_types[type], ODD, 2, 1, 5, 67), dx = array_make(all_types[type], NEGATIVE, 2, 1, 5, 67);
    array_random(&dy, 1);
    qkv_sinusoidal s = writes(&dx, 12);
    s.x = dy.t;
    assert_int_equal(qkv_sinusoidal_backward(NULL, &s), QKV_OK);
    array_same(&dy, &dx, "%s", type_name(all_types[type]));
    array_gaps(&dx, "%s", type_name(all_types[type]));
    array_free(&dy);
    array_free(&dx);
  }
}

static qkv_status forward(const qkv_context *context, const void *s) { return qkv_sinusoidal_forward(context, s); }
static qkv_status backward(const qkv_context *context, const void *s) { return qkv_sinusoidal_backward(context, s); }

static void test_executors(void **state) {
  (void)state;
  array x = array_make(QKV_F32, ODD, 2, 1, 300, 200), out = array_make(QKV_F32, ODD, 2, 1, 300, 200);
  int32_t starts[2] = {0, -50};
  array_random(&x, 8);
  for (int n = 0; n < 2; n++) {
    qkv_sinusoidal s = writes(&out, 10);
    s.x = x.t;
    s.dropout = 0.25;
    s.starts = n ? starts : NULL;
    same_under_executors(forward, &s, &out, "forward");
    same_under_executors(backward, &s, &out, "backward");
    s.out = x.t;
    same_under_executors(forward, &s, &x, "in place");
  }
  array_free(&x);
  array_free(&out);
}

static void test_empty(void **state) {
  (void)state;
  qkv_sinusoidal s = qkv_sinusoidal_default();
  s.d_model = 4;
  run(&s);
  s.batch = 3;
  run(&s);
  s.batch = 0;
  s.seqlen = 3;
  run(&s);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_known_values),   cmocka_unit_test(test_exact_values), cmocka_unit_test(test_random_shapes),
    cmocka_unit_test(test_relation),       cmocka_unit_test(test_sum),          cmocka_unit_test(test_table),
    cmocka_unit_test(test_table_is_used),  cmocka_unit_test(test_philox),       cmocka_unit_test(test_dropout),
    cmocka_unit_test(test_parts),          cmocka_unit_test(test_executors),    cmocka_unit_test(test_empty),
    cmocka_unit_test(test_gradient_without_dropout),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }

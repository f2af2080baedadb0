/* Rotary embedding: frequencies against exact values, rotations against an oracle in long double, and what a rotation is. */
#include "common.h"

#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "exact.h"

enum { EXACT_SINES = sizeof exact_sines / sizeof exact_sines[0], SCALINGS = sizeof exact_scalings / sizeof exact_scalings[0] };

static double *table_of(const qkv_frequencies *f) {
  char text[256];
  size_t bytes = 0;
  if (qkv_frequencies_check(f, text, sizeof text) != QKV_OK) {
    fail_msg("%s", text);
  }
  assert_int_equal(qkv_frequencies_bytes(f, &bytes), QKV_OK);
  assert_int_equal(bytes, sizeof(double) * QKV_FREQUENCIES_DOUBLES(f->rotary_dim));
  double *table = malloc(bytes);
  assert_non_null(table);
  assert_int_equal(qkv_frequencies_fill(f, table, bytes), QKV_OK);
  return table;
}

static double *plain_table(int64_t rotary_dim, double base) {
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = rotary_dim;
  f.base = base;
  return table_of(&f);
}

static qkv_rotary turns(const array *x, const array *out, const double *table, int64_t start) {
  qkv_rotary r = qkv_rotary_default();
  r.batch = x->n[0];
  r.num_heads = x->n[1];
  r.seqlen = x->n[2];
  r.head_dim = x->n[3];
  r.table = table;
  r.start = start;
  r.x = x->t;
  if (out != NULL) {
    r.out = out->t;
  }
  return r;
}

static void run(const qkv_rotary *r) {
  char text[256];
  const qkv_status status = qkv_rotary_forward(NULL, r);
  if (status != QKV_OK) {
    qkv_rotary_check(r, text, sizeof text);
    fail_msg("status %d: %s", (int)status, text);
  }
}

static int64_t column_of(int pairing, int64_t pairs, int64_t pair, int second) {
  return pairing == QKV_ROTARY_HALF ? pair + second * pairs : 2 * pair + second;
}

/* (1, 0) turns to (cos, sin). */
static void unit_turn(const double *table, int64_t dim, int64_t pair, int64_t position, int32_t dtype, double *sine, double *cosine) {
  array x = array_make(dtype, DENSE, 1, 1, 1, dim);
  for (int64_t i = 0; i < dim; i++) {
    array_set(&x, 0, 0, 0, i, i < dim / 2);
  }
  qkv_rotary r = turns(&x, NULL, table, position);
  run(&r);
  *cosine = array_get(&x, 0, 0, 0, pair);
  *sine = array_get(&x, 0, 0, 0, pair + dim / 2);
  array_free(&x);
}

/* At positions up to +-2^31: in f64 to 3 units of 2^-53 (docs/POSITIONS.md) and 2 for the rotation, in f32 rounded right. */
static void test_exact_values(void **state) {
  (void)state;
  for (int n = 0; n < EXACT_SINES; n++) {
    if (exact_sines[n].d % 2 != 0) {
      continue;
    }
    double *table = plain_table(exact_sines[n].d, exact_sines[n].base);
    for (int f32 = 0; f32 < 2; f32++) {
      const double unit = f32 ? 0x1p-24 * (1 + 0x1p-20) : 5 * 0x1p-53, exact[2] = {exact_sines[n].sine, exact_sines[n].cosine};
      double found[2];
      unit_turn(table, exact_sines[n].d, exact_sines[n].pair, exact_sines[n].position, f32 ? QKV_F32 : QKV_F64, &found[0], &found[1]);
      for (int k = 0; k < 2; k++) {
        if (!within(found[k] - exact[k], unit * fabs(exact[k]))) {
          fail_msg("base %g, dim %d, pair %d, position %d: %a, not %a", exact_sines[n].base, (int)exact_sines[n].d,
                   (int)exact_sines[n].pair, (int)exact_sines[n].position, found[k], exact[k]);
        }
      }
    }
    free(table);
  }
}

/* Every scaling: the frequencies to a unit, and the phase at position 2^31 - 1, which needs many more bits than a double has. */
static void test_scalings(void **state) {
  (void)state;
  for (int n = 0; n < SCALINGS; n++) {
    const qkv_frequencies *f = &exact_scalings[n].f;
    double *table = table_of(f), factor = exact_scalings[n].attention_factor;
    assert_true(table[1] == (double)f->rotary_dim);
    if (!within(table[2] - factor, 4 * 0x1p-53 * factor)) {
      fail_msg("%s: attention factor %a, not %a", exact_scalings[n].name, table[2], factor);
    }
    for (int k = 0; k < 8; k++) {
      const double w = exact_scalings[n].at[k].frequency, exact[2] = {exact_scalings[n].at[k].sine, exact_scalings[n].at[k].cosine};
      const int64_t pair = exact_scalings[n].at[k].pair;
      double found[2];
      if (w == 0) {
        continue;
      }
      if (!within(table[4 + pair] - w, 0x1p-53 * w)) {
        fail_msg("%s: frequency %d is %a, not %a", exact_scalings[n].name, (int)pair, table[4 + pair], w);
      }
      unit_turn(table, f->rotary_dim, pair, INT32_MAX, QKV_F64, &found[0], &found[1]);
      for (int s = 0; s < 2; s++) {
        /* 3 for the sine, 1 for its product with a factor that is 4 off, 1 for the sum with a zero and the expected value */
        if (!within(found[s] - exact[s] * factor, 9 * 0x1p-53 * fabs(exact[s] * factor))) {
          fail_msg("%s: pair %d at 2^31 - 1: %a, not %a", exact_scalings[n].name, (int)pair, found[s], exact[s] * factor);
        }
      }
    }
    free(table);
  }
}

/* Scalings that must change nothing. */
static void test_idle_scalings(void **state) {
  (void)state;
  static const qkv_frequencies idle[] = {
      {.size = sizeof(qkv_frequencies), .rotary_dim = 96, .scaling = QKV_ROPE_LINEAR, .factor = 1},
      {.size = sizeof(qkv_frequencies), .rotary_dim = 96, .scaling = QKV_ROPE_NTK, .factor = 1},
      {.size = sizeof(qkv_frequencies), .rotary_dim = 96, .scaling = QKV_ROPE_DYNAMIC_NTK, .factor = 2.3, .original_seqlen = 777},
      {.size = sizeof(qkv_frequencies), .rotary_dim = 96, .scaling = QKV_ROPE_YARN, .factor = 1, .original_seqlen = 4096},
      {.size = sizeof(qkv_frequencies), .rotary_dim = 96, .scaling = QKV_ROPE_LLAMA3, .factor = 1, .original_seqlen = 8192},
  };
  double *plain = plain_table(96, 0), *table;
  for (size_t n = 0; n < sizeof idle / sizeof *idle; n++) {
    qkv_frequencies f = idle[n];
    if (f.scaling == QKV_ROPE_DYNAMIC_NTK) {
      f.seqlen = 500;
    }
    table = table_of(&f);
    if (f.scaling <= QKV_ROPE_DYNAMIC_NTK) {
      assert_memory_equal(plain, table, sizeof(double) * QKV_FREQUENCIES_DOUBLES(96));
    }
    for (int k = 4; k < 4 + 48; k++) { /* t w + (1 - t) w rounds */
      if (!within(table[k] - plain[k], 0x1p-52 * plain[k])) {
        fail_msg("scaling %d: table[%d] is %a, not %a", (int)f.scaling, k, table[k], plain[k]);
      }
    }
    free(table);
  }
  free(plain);
}

/* LongRoPE's way, and any frequencies at all: base 1 and their reciprocals. */
static void test_factors(void **state) {
  (void)state;
  static const double factors[3] = {1, 2.5, 64};
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = 6;
  f.factors = factors;
  f.attention_factor = 1.25;
  double *table = table_of(&f), *plain = plain_table(6, 0);
  assert_true(table[2] == 1.25);
  for (int i = 0; i < 3; i++) {
    assert_true(within(table[4 + i] - plain[4 + i] / factors[i], 0x1p-52 * table[4 + i]));
  }
  free(table);
  f.base = 1;
  table = table_of(&f);
  for (int i = 0; i < 3; i++) {
    assert_true(table[4 + i] == 1 / factors[i]);
  }
  free(table);
  free(plain);
}

/* The oracle's angle is off by position * 2^-62 at most. */
static void test_random_shapes(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(80); n++) {
    rng r = {78, (uint64_t)n, 0};
    const int64_t batch = rng_range(&r, 1, 3), heads = rng_range(&r, 1, 3), rows = rng_range(&r, 1, 40);
    const int64_t dim = 2 * rng_range(&r, 1, 70), head_dim = dim + (rng_chance(&r, 50) ? rng_range(&r, 0, 80) : 0);
    const int f64 = rng_chance(&r, 40), how = (int)rng_below(&r, 3), pairing = rng_chance(&r, 50);
    const double base = rng_chance(&r, 50) ? 0 : 1 + 1e6 * rng_uniform_at(6, 5, (uint64_t)n);
    const double u = f64 ? 0x1p-53 : 0x1p-24;
    array x = array_make(f64 ? QKV_F64 : QKV_F32, (int)rng_below(&r, LAYOUTS), batch, heads, rows, head_dim);
    array out = array_make(x.t.dtype, (int)rng_below(&r, LAYOUTS), batch, heads, rows, head_dim);
    double *table = plain_table(dim, base);
    int32_t starts[3], ids[3 * 40];
    array_random(&x, (uint64_t)n);
    qkv_rotary q = turns(&x, &out, table, how < 2 ? rng_range(&r, -100000, 100000) : 0);
    q.pairing = pairing;
    for (int b = 0; b < 3; b++) {
      starts[b] = (int32_t)rng_range(&r, -1000, 1000);
    }
    for (int i = 0; i < 3 * 40; i++) {
      ids[i] = (int32_t)rng_range(&r, -100000, 100000);
    }
    if (how == 1) {
      q.starts = starts;
    }
    if (how == 2) {
      q.position_ids = qkv_strided(ids + 39, QKV_I32, 40, 0, -1, 0);
    }
    run(&q);
    array_gaps(&out, "case %d", (int)n);
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t h = 0; h < heads; h++) {
        for (int64_t i = 0; i < rows; i++) {
          const int64_t position = how == 2 ? ids[39 + b * 40 - i] : q.start + (how == 1 ? starts[b] : 0) + i;
          for (int64_t k = 0; k < dim / 2; k++) {
            const int64_t c0 = column_of(pairing, dim / 2, k, 0), c1 = column_of(pairing, dim / 2, k, 1);
            const long double a = array_get(&x, b, h, i, c0), c = array_get(&x, b, h, i, c1);
            const long double w = powl((long double)(base == 0 ? 10000 : base), -(long double)(2 * k) / (long double)dim);
            const long double angle = (long double)position * w, s = sinl(angle), t = cosl(angle);
            const double exact[2] = {(double)(a * t - c * s), (double)(a * s + c * t)};
            const double found[2] = {array_get(&out, b, h, i, c0), array_get(&out, b, h, i, c1)};
            /* each term: 3 units for the sine, 1 for the product; the sum; the expected value; then the storage */
            const double terms = (double)(fabsl(a) + fabsl(c)), oracle_error = terms * fabs((double)position) * 0x1p-61;
            for (int e = 0; e < 2; e++) {
              if (!within(found[e] - exact[e], 6 * 0x1p-53 * terms + (f64 ? 0 : u * fabs(exact[e])) + oracle_error)) {
                fail_msg("case %d: (%d, %d, %d), pair %d at %d: %a, not %a", (int)n, (int)b, (int)h, (int)i, (int)k, (int)position,
                         found[e], exact[e]);
              }
            }
          }
          for (int64_t c = dim; c < head_dim; c++) {
            assert_true(array_get(&out, b, h, i, c) == array_get(&x, b, h, i, c));
          }
        }
      }
    }
    free(table);
    array_free(&x);
    array_free(&out);
  }
}

/* 16 bits are the f32 result rounded once, position 1857 among them, where phases in half precision are useless. */
static void test_types(void **state) {
  (void)state;
  enum { B = 2, H = 3, N = 7, D = 76, ROTARY = 70 };
  double *table = plain_table(ROTARY, 0);
  for (int pairing = 0; pairing < 2; pairing++) {
    for (int tx = 0; tx < 4; tx++) {
      for (int to = 0; to < 4; to++) {
        if (all_types[tx] == QKV_F64 || all_types[to] == QKV_F64) {
          continue;
        }
        array x = array_make(all_types[tx], ODD, B, H, N, D), wide = array_make(QKV_F32, DENSE, B, H, N, D);
        array out = array_make(all_types[to], SWAPPED, B, H, N, D), expected = array_make(all_types[to], DENSE, B, H, N, D);
        array_random(&x, 3);
        array_copy(&wide, &x);
        qkv_rotary r = turns(&wide, NULL, table, 1855);
        r.pairing = pairing;
        run(&r);
        array_copy(&expected, &wide);
        r.x = x.t;
        r.out = out.t;
        run(&r);
        array_same(&expected, &out, "%s to %s", type_name(all_types[tx]), type_name(all_types[to]));
        array_free(&x);
        array_free(&wide);
        array_free(&out);
        array_free(&expected);
      }
    }
  }
  free(table);
}

static void test_in_place(void **state) {
  (void)state;
  enum { B = 2, H = 2, N = 5, D = 150, ROTARY = 140 };
  double *table = plain_table(ROTARY, 500000);
  for (int type = 0; type < 4; type++) {
    for (int layout = 0; layout < LAYOUTS; layout++) {
      for (int pairing = 0; pairing < 2; pairing++) {
        array x = array_make(all_types[type], layout, B, H, N, D), out = array_make(all_types[type], DENSE, B, H, N, D);
        array_random(&x, 4);
        qkv_rotary r = turns(&x, &out, table, 77);
        r.pairing = pairing;
        run(&r);
        r.out = layout % 2 ? x.t : (qkv_tensor){.data = NULL};
        run(&r);
        array_same(&out, &x, "%s, layout %d, pairing %d", type_name(all_types[type]), layout, pairing);
        array_gaps(&x, "%s, layout %d, pairing %d", type_name(all_types[type]), layout, pairing);
        array_free(&x);
        array_free(&out);
      }
    }
  }
  free(table);
}

/* Ragged rows of several sequences: ids say where each token stands, and each has the bits it has in a batch. */
static void test_position_ids(void **state) {
  (void)state;
  enum { H = 2, D = 32 };
  static const int32_t ids[9] = {0, 1, 2, 3, 0, 1, 500, 501, 502};
  double *table = plain_table(D, 0);
  array x = array_make(QKV_F32, SWAPPED, 1, H, 9, D), out = array_make(QKV_F32, SWAPPED, 1, H, 9, D);
  array_random(&x, 5);
  qkv_rotary r = turns(&x, &out, table, 0);
  r.position_ids = qkv_strided(ids, QKV_I32, 0, 0, 1, 0);
  run(&r);
  for (int i = 0; i < 9; i++) {
    array row = array_make(QKV_F32, DENSE, 1, H, 1, D), one = array_make(QKV_F32, DENSE, 1, H, 1, D);
    for (int h = 0; h < H; h++) {
      for (int c = 0; c < D; c++) {
        array_set(&row, 0, h, 0, c, array_get(&x, 0, h, i, c));
        array_set(&one, 0, h, 0, c, array_get(&out, 0, h, i, c));
      }
    }
    qkv_rotary alone = turns(&row, NULL, table, ids[i]);
    run(&alone);
    array_same(&one, &row, "row %d", i);
    array_free(&row);
    array_free(&one);
  }
  free(table);
  array_free(&x);
  array_free(&out);
}

/* ---- What a rotation is -------------------------------------------------------------------------------------------- */

enum { B = 2, H = 2, N = 12, D = 40, ROTARY = 32 };

static double dot(const array *a, const array *b) {
  double sum = 0;
  for (int e = 0; e < a->n[0]; e++) {
    for (int h = 0; h < a->n[1]; h++) {
      for (int i = 0; i < a->n[2]; i++) {
        for (int c = 0; c < a->n[3]; c++) {
          sum += array_get(a, e, h, i, c) * array_get(b, e, h, i, c);
        }
      }
    }
  }
  return sum;
}

static void test_backward(void **state) {
  (void)state;
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = ROTARY;
  for (int scaled = 0; scaled < 2; scaled++) {
    f.attention_factor = scaled ? 1.3 : 0;
    double *table = table_of(&f);
    for (int pairing = 0; pairing < 2; pairing++) {
      array x = array_make(QKV_F64, DENSE, B, H, N, D), y = array_make(QKV_F64, DENSE, B, H, N, D);
      array dy = array_make(QKV_F64, ODD, B, H, N, D), dx = array_make(QKV_F64, NEGATIVE, B, H, N, D);
      array back = array_make(QKV_F64, DENSE, B, H, N, D);
      array_random(&x, 1);
      array_random(&dy, 2);
      qkv_rotary r = turns(&x, &y, table, 1000);
      r.pairing = pairing;
      run(&r);
      /* the adjoint: <dy, R x> = <R' dy, x>; both sums have B H N D terms below 4 * 4 * 1.3 * 2 */
      r.x = dy.t;
      r.out = dx.t;
      assert_int_equal(qkv_rotary_backward(NULL, &r), QKV_OK);
      array_gaps(&dx, "backward");
      assert_true(within(dot(&dy, &y) - dot(&dx, &x), (B * H * N * D + 10) * 0x1p-53 * B * H * N * D * 42));
      /* the bits of a rotation by the negative positions */
      int32_t ids[N];
      for (int i = 0; i < N; i++) {
        ids[i] = -(1000 + i);
      }
      r.start = 0;
      r.position_ids = qkv_strided(ids, QKV_I32, 0, 0, 1, 0);
      r.out = back.t;
      run(&r);
      array_same(&back, &dx, "by negative positions");
      /* the inverse, times the square of the factor */
      r.position_ids = (qkv_tensor){.data = NULL};
      r.start = 1000;
      r.x = y.t;
      assert_int_equal(qkv_rotary_backward(NULL, &r), QKV_OK);
      const double square = scaled ? 1.3 * 1.3 : 1;
      for (int i = 0; i < N; i++) {
        for (int c = 0; c < D; c++) {
          const double v = array_get(&x, 1, 1, i, c) * (c < ROTARY ? square : 1);
          /* two rotations, each 6 units of terms below 8 * 1.3 */
          assert_true(within(array_get(&back, 1, 1, i, c) - v, 2 * 6 * 0x1p-53 * 8 * 1.3 * 2 * square));
        }
      }
      array_free(&x);
      array_free(&y);
      array_free(&dy);
      array_free(&dx);
      array_free(&back);
    }
    free(table);
  }
}

static void test_norm(void **state) {
  (void)state;
  double *table = plain_table(ROTARY, 0);
  array x = array_make(QKV_F64, DENSE, B, H, N, D), y = array_make(QKV_F64, DENSE, B, H, N, D);
  array_random(&x, 1);
  qkv_rotary r = turns(&x, &y, table, 123456789);
  run(&r);
  const double before = dot(&x, &x), after = dot(&y, &y);
  /* each element within 6 units of at most twice its pair's norm; then two sums */
  assert_true(within(after - before, (24 + 2 * B * H * N * D) * 0x1p-53 * before));
  free(table);
  array_free(&x);
  array_free(&y);
}

/* <R_m q, R_n k> depends on m - n alone, anywhere. */
static void test_relative(void **state) {
  (void)state;
  static const int64_t shifts[] = {1, 77, 100000, 1 << 30, -3000};
  double *table = plain_table(D, 0);
  array q = array_make(QKV_F64, DENSE, 1, 1, 1, D), k = array_make(QKV_F64, DENSE, 1, 1, 1, D);
  array rq = array_make(QKV_F64, DENSE, 1, 1, 1, D), rk = array_make(QKV_F64, DENSE, 1, 1, 1, D);
  array_random(&q, 1);
  array_random(&k, 2);
  for (int pairing = 0; pairing < 2; pairing++) {
    double first = 0;
    for (int n = -1; n < 5; n++) {
      const int64_t shift = n < 0 ? 0 : shifts[n];
      qkv_rotary a = turns(&q, &rq, table, 42 + shift), b = turns(&k, &rk, table, 17 + shift);
      a.pairing = b.pairing = pairing;
      run(&a);
      run(&b);
      const double product = dot(&rq, &rk);
      if (n < 0) {
        first = product;
      } else {
        /* elements below 8, each within 6 units of 8; D products and a sum, twice */
        assert_true(within(product - first, 2 * D * (2 * 6 + D + 1) * 64 * 0x1p-53));
      }
    }
  }
  free(table);
  array_free(&q);
  array_free(&k);
  array_free(&rq);
  array_free(&rk);
}

static qkv_status forward(const qkv_context *context, const void *r) { return qkv_rotary_forward(context, r); }
static qkv_status backward(const qkv_context *context, const void *r) { return qkv_rotary_backward(context, r); }

static void test_executors(void **state) {
  (void)state;
  double *table = plain_table(64, 0);
  array x = array_make(QKV_F32, ODD, 3, 5, 200, 80), out = array_make(QKV_F32, ODD, 3, 5, 200, 80);
  array_random(&x, 8);
  qkv_rotary r = turns(&x, &out, table, 10);
  same_under_executors(forward, &r, &out, "forward");
  same_under_executors(backward, &r, &out, "backward");
  r.out = (qkv_tensor){.data = NULL};
  same_under_executors(forward, &r, &x, "in place");
  free(table);
  array_free(&x);
  array_free(&out);
}

/* The caller's rounding direction neither matters nor is changed. */
static void test_rounding_direction(void **state) {
  (void)state;
  double *table = plain_table(64, 0), other[QKV_FREQUENCIES_DOUBLES(64)];
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = 64;
  array x = array_make(QKV_F32, DENSE, 1, 2, 9, 64), out = array_make(QKV_F32, DENSE, 1, 2, 9, 64);
  array expected = array_make(QKV_F32, DENSE, 1, 2, 9, 64);
  array_random(&x, 8);
  qkv_rotary r = turns(&x, &expected, table, 10);
  run(&r);
  r.out = out.t;
  r.table = other;
  fesetround(FE_UPWARD);
  const qkv_status s = qkv_frequencies_fill(&f, other, sizeof other), t = qkv_rotary_forward(NULL, &r);
  const int after = fegetround();
  fesetround(FE_TONEAREST);
  assert_int_equal(s, QKV_OK);
  assert_int_equal(t, QKV_OK);
  assert_int_equal(after, FE_UPWARD);
  assert_memory_equal(table, other, sizeof other);
  array_same(&expected, &out, "rounding upward");
  free(table);
  array_free(&x);
  array_free(&out);
  array_free(&expected);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_exact_values),       cmocka_unit_test(test_scalings),  cmocka_unit_test(test_idle_scalings),
    cmocka_unit_test(test_factors),            cmocka_unit_test(test_types),     cmocka_unit_test(test_random_shapes),
    cmocka_unit_test(test_in_place),           cmocka_unit_test(test_backward),  cmocka_unit_test(test_position_ids),
    cmocka_unit_test(test_norm),               cmocka_unit_test(test_relative),  cmocka_unit_test(test_executors),
    cmocka_unit_test(test_rounding_direction),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }

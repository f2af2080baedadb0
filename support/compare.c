#include "compare.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle.h"
#include "problem_text.h"

/* The bits of a value, widened to 64, with one pattern for every NaN. */
static uint64_t canonical_bits(const qkv_tensor *t, int64_t offset) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  const char *at = (const char *)t->data + offset * (int64_t)d->size;
  if (isnan(d->load(at))) {
    return d->size == 8 ? UINT64_C(0x7ff8000000000000) : d->size == 4 ? UINT64_C(0x7fc00000) : UINT64_C(0x7fc0);
  }
  if (d->size == 8) {
    uint64_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
  }
  if (d->size == 2) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
  }
  uint32_t bits;
  memcpy(&bits, at, sizeof bits);
  return bits;
}

bool compare_same_bits(const qkv_tensor *a, int64_t offset_a, const qkv_tensor *b, int64_t offset_b) {
  return a->dtype == b->dtype && canonical_bits(a, offset_a) == canonical_bits(b, offset_b);
}

static int64_t value_dim(const qkv_problem *p) { return p->head_dim_v > 0 ? p->head_dim_v : p->head_dim; }

bool compare_outputs(const qkv_problem *a, const qkv_problem *b, compare_report *report) {
  memset(report, 0, sizeof *report);
  for (int which = 0; which < 2; which++) {
    const qkv_tensor *ta = which == 0 ? &a->out : &a->lse, *tb = which == 0 ? &b->out : &b->lse;
    if (ta->data == NULL || tb->data == NULL) {
      continue;
    }
    for (int64_t e = 0; e < a->batch; e++) {
      for (int64_t h = 0; h < a->num_heads; h++) {
        for (int64_t i = 0; i < problem_rows(a, e); i++) {
          for (int64_t x = 0; x < (which == 0 ? value_dim(a) : 1); x++) {
            int64_t at_a = problem_offset(a, ta, 'q', e, h, i, x), at_b = problem_offset(b, tb, 'q', e, h, i, x);
            report->values++;
            if (!compare_same_bits(ta, at_a, tb, at_b) && report->failures++ == 0) {
              snprintf(report->text, sizeof report->text,
                       "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]: %.17g (%a) and %.17g (%a)",
                       which == 0 ? "out" : "lse", e, h, i, x, problem_load(ta, at_a), problem_load(ta, at_a),
                       problem_load(tb, at_b), problem_load(tb, at_b));
            }
          }
        }
      }
    }
  }
  return report->failures == 0;
}

static void judge(compare_report *r, const char *name, const int64_t at[4], const oracle_value *expected, double computed) {
  double ratio;
  bool accepted = oracle_accepts(expected, computed, &ratio);
  r->values++;
  r->worst = ratio > r->worst ? ratio : r->worst;
  if (!accepted && r->failures++ == 0) {
    static const char *const kinds[] = {"", ", must not be finite", ", must be NaN", ""};
    snprintf(r->text, sizeof r->text,
             "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]: computed %.17g, expected %.17g%s, bound %.3g, ratio %.3g",
             name, at[0], at[1], at[2], at[3], computed, expected->value, kinds[expected->kind], expected->bound, ratio);
  }
}

bool compare_oracle(const qkv_problem *p, int64_t row_step, compare_report *report) {
  memset(report, 0, sizeof *report);
  int64_t dv = value_dim(p);
  oracle *o = oracle_new(p);
  oracle_value *out = calloc((size_t)dv, sizeof *out), lse;
  if (o == NULL || out == NULL) {
    report->failures = 1;
    snprintf(report->text, sizeof report->text, "no memory for the oracle");
    oracle_free(o);
    free(out);
    return false;
  }
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < problem_rows(p, b); i += row_step) {
        oracle_row(o, b, h, i, out, &lse);
        int64_t at[4] = {b, h, i, 0};
        for (at[3] = 0; at[3] < dv; at[3]++) {
          double computed = problem_load(&p->out, problem_offset(p, &p->out, 'q', b, h, i, at[3]));
          judge(report, "out", at, &out[at[3]], computed);
          /* Every store adds +0.0; a rounding to 16 bits after that may make a -0. */
          if (computed == 0 && signbit(computed) && problem_dtype_of(p->out.dtype)->size > 2 && report->failures++ == 0) {
            snprintf(report->text, sizeof report->text, "out[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is -0", b, h,
                     i, at[3]);
          }
        }
        if (p->lse.data != NULL) {
          at[3] = 0;
          oracle_value expected = lse;
          if (p->lse.dtype == QKV_F32 && p->q.dtype == QKV_F64) {
            expected.bound += 0x1p-24 * fabs(lse.value);
          }
          judge(report, "lse", at, &expected, problem_load(&p->lse, problem_offset(p, &p->lse, 'q', b, h, i, 0)));
        }
      }
    }
  }
  oracle_free(o);
  free(out);
  return report->failures == 0;
}

/* Calls `visit` for each element of gradient `which` that the problem has, in the order of the indices. */
typedef void gradient_visitor(void *self, int which, const int64_t at[4], int64_t index);
static void visit_gradient(const qkv_problem *p, const qkv_gradients *g, int which, gradient_visitor *visit, void *self) {
  int64_t n[4], at[4], index = 0;
  problem_gradient_extents(p, g, which, n);
  for (at[0] = 0; at[0] < n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n[2]; at[2]++) {
        for (at[3] = 0; at[3] < n[3]; at[3]++, index++) {
          if (problem_gradient_has(p, g, which, at)) {
            visit(self, which, at, index);
          }
        }
      }
    }
  }
}

typedef struct gradient_pair {
  const qkv_problem *a, *b;
  const qkv_gradients *ga, *gb;
  const oracle_gradients *expected;
  compare_report *report;
  uint64_t hash;
} gradient_pair;

static void same_element(void *self, int which, const int64_t at[4], int64_t index) {
  const gradient_pair *f = self;
  const qkv_tensor *ta = problem_gradient(f->ga, which), *tb = problem_gradient(f->gb, which);
  int64_t at_a = problem_gradient_offset(f->a, f->ga, which, at), at_b = problem_gradient_offset(f->b, f->gb, which, at);
  compare_report *r = f->report;
  (void)index;
  r->values++;
  if (!compare_same_bits(ta, at_a, tb, at_b) && r->failures++ == 0) {
    snprintf(r->text, sizeof r->text, "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]: %.17g (%a) and %.17g (%a)",
             problem_gradient_name(which), at[0], at[1], at[2], at[3], problem_load(ta, at_a), problem_load(ta, at_a),
             problem_load(tb, at_b), problem_load(tb, at_b));
  }
}

bool compare_gradients(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                       compare_report *report) {
  gradient_pair f = {a, b, ga, gb, NULL, report, 0};
  memset(report, 0, sizeof *report);
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    if (problem_gradient(ga, which)->data != NULL && problem_gradient(gb, which)->data != NULL) {
      visit_gradient(a, ga, which, same_element, &f);
    }
  }
  return report->failures == 0;
}

static void judge_element(void *self, int which, const int64_t at[4], int64_t index) {
  const gradient_pair *f = self;
  const qkv_tensor *t = problem_gradient(f->ga, which);
  compare_report *r = f->report;
  double computed = problem_load(t, problem_gradient_offset(f->a, f->ga, which, at));
  judge(r, problem_gradient_name(which), at, &f->expected->of[which][index], computed);
  bool narrowed = problem_dtype_of(t->dtype)->size < problem_dtype_of(f->a->q.dtype == QKV_F64 ? QKV_F64 : QKV_F32)->size;
  if (computed == 0 && signbit(computed) && !narrowed && r->failures++ == 0) {
    snprintf(r->text, sizeof r->text, "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is -0",
             problem_gradient_name(which), at[0], at[1], at[2], at[3]);
  }
}

bool compare_gradients_oracle(const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before,
                              compare_report *report) {
  oracle_gradients expected;
  gradient_pair f = {p, NULL, g, NULL, &expected, report, 0};
  memset(report, 0, sizeof *report);
  if (!oracle_gradients_make(&expected, p, g, before)) {
    report->failures = 1;
    snprintf(report->text, sizeof report->text, "no memory for the oracle");
    return false;
  }
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    if (expected.of[which] != NULL) {
      visit_gradient(p, g, which, judge_element, &f);
    }
  }
  oracle_gradients_free(&expected);
  return report->failures == 0;
}

static uint64_t hashed(uint64_t hash, const qkv_tensor *t, int64_t offset) {
  uint64_t bits = canonical_bits(t, offset);
  for (int n = 0; n < (int)problem_dtype_of(t->dtype)->size; n++) {
    hash = (hash ^ (bits >> (8 * n) & 0xff)) * UINT64_C(0x100000001b3);
  }
  return hash;
}
static const uint64_t hash_of_nothing = UINT64_C(0xcbf29ce484222325);

static void hash_element(void *self, int which, const int64_t at[4], int64_t index) {
  gradient_pair *f = self;
  (void)index;
  f->hash = hashed(f->hash, problem_gradient(f->ga, which), problem_gradient_offset(f->a, f->ga, which, at));
}

uint64_t compare_gradients_digest(const qkv_problem *p, const qkv_gradients *g) {
  gradient_pair f = {p, NULL, g, NULL, NULL, NULL, hash_of_nothing};
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    if (problem_gradient(g, which)->data != NULL) {
      visit_gradient(p, g, which, hash_element, &f);
    }
  }
  return f.hash;
}

uint64_t compare_digest(const qkv_problem *p) {
  uint64_t hash = hash_of_nothing;
  for (int which = 0; which < 2; which++) {
    const qkv_tensor *t = which == 0 ? &p->out : &p->lse;
    if (t->data == NULL) {
      continue;
    }
    for (int64_t b = 0; b < p->batch; b++) {
      for (int64_t h = 0; h < p->num_heads; h++) {
        for (int64_t i = 0; i < problem_rows(p, b); i++) {
          for (int64_t x = 0; x < (which == 0 ? value_dim(p) : 1); x++) {
            hash = hashed(hash, t, problem_offset(p, t, 'q', b, h, i, x));
          }
        }
      }
    }
  }
  return hash;
}

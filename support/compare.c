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

uint64_t compare_digest(const qkv_problem *p) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (int which = 0; which < 2; which++) {
    const qkv_tensor *t = which == 0 ? &p->out : &p->lse;
    if (t->data == NULL) {
      continue;
    }
    int bytes = (int)problem_dtype_of(t->dtype)->size;
    for (int64_t b = 0; b < p->batch; b++) {
      for (int64_t h = 0; h < p->num_heads; h++) {
        for (int64_t i = 0; i < problem_rows(p, b); i++) {
          for (int64_t x = 0; x < (which == 0 ? value_dim(p) : 1); x++) {
            uint64_t bits = canonical_bits(t, problem_offset(p, t, 'q', b, h, i, x));
            for (int n = 0; n < bytes; n++) {
              hash = (hash ^ (bits >> (8 * n) & 0xff)) * UINT64_C(0x100000001b3);
            }
          }
        }
      }
    }
  }
  return hash;
}

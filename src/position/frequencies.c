/* Frequencies of rotary embeddings and their scalings. Su et al., RoFormer, 2021 (arXiv:2104.09864); Chen et al., position
 * interpolation, 2023 (arXiv:2306.15595); NTK-aware and dynamic scaling and YaRN: Peng et al., 2023 (arXiv:2309.00071); Llama 3.1,
 * as in its reference code; LongRoPE: Ding et al., 2024 (arXiv:2402.13753). Everything that reaches a frequency is in pairs of
 * doubles: at position 2^31 an error of one double would be seen in f32. */
#include "position/frequencies.h"

#include <inttypes.h>

#include "base/fpstate.h"
#include "base/log2.h"
#include "base/order1.h"
#include "problem/tensor.h"
#include "qkv/position.h"

typedef qkv__pair pair;

enum { DIM_LIMIT = 1 << 20 };

/* ---- Checks ---- */

enum { LINEAR = 1 << QKV_ROPE_LINEAR, NTK = 1 << QKV_ROPE_NTK, DYNAMIC = 1 << QKV_ROPE_DYNAMIC_NTK, YARN = 1 << QKV_ROPE_YARN,
       LLAMA3 = 1 << QKV_ROPE_LLAMA3 };
static const char *const kinds[] = {"PLAIN", "LINEAR", "NTK", "DYNAMIC_NTK", "YARN", "LLAMA3"};
#define SMALLEST 0x1p-500
#define LARGEST  0x1p500

/* Fields by the scalings that read them, and defaults; 0: none, the caller must say. */
static qkv_status check_fields(const qkv__report *r, qkv_frequencies *f) {
  struct {
    const char *name;
    double *value;
    int64_t *integer;
    int kinds;
    double preset;
  } fields[] = {{"factor", &f->factor, NULL, LINEAR | NTK | DYNAMIC | YARN | LLAMA3, 0},
                {"original_seqlen", NULL, &f->original_seqlen, DYNAMIC | YARN | LLAMA3, 0},
                {"seqlen", NULL, &f->seqlen, DYNAMIC, 0},
                {"beta_fast", &f->beta_fast, NULL, YARN, 32},
                {"beta_slow", &f->beta_slow, NULL, YARN, 1},
                {"low_freq_factor", &f->low_freq_factor, NULL, LLAMA3, 1},
                {"high_freq_factor", &f->high_freq_factor, NULL, LLAMA3, 4}};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    const char *name = fields[i].name;
    double *x = fields[i].value;
    int64_t *n = fields[i].integer;
    if (!(fields[i].kinds >> f->scaling & 1)) {
      if (x ? *x != 0 : *n != 0)
        return qkv__fail(r, QKV_BAD_VALUE, "%s %g is given, but scaling QKV_ROPE_%s does not use it", name, x ? *x : (double)*n,
                         kinds[f->scaling]);
    } else if (x) {
      if (*x == 0) *x = fields[i].preset;
      if (!(*x >= SMALLEST && *x <= LARGEST))
        return qkv__fail(r, QKV_BAD_VALUE, "%s %g is not a positive number from 2^-500 to 2^500", name, *x);
    } else if (*n < 1 || *n > INT32_MAX)
      return qkv__fail(r, QKV_BAD_VALUE, "%s %" PRId64 " is not in 1..2147483647", name, *n);
  }
  return QKV_OK;
}

static qkv_status check_yarn(const qkv__report *r, const qkv_frequencies *f) {
  const int yarn = f->scaling == QKV_ROPE_YARN;
  if (!yarn && (f->mscale != 0 || f->mscale_all_dim != 0 || f->no_truncate != 0))
    return qkv__fail(r, QKV_BAD_VALUE, "%s is given, but scaling QKV_ROPE_%s does not use it",
                     f->no_truncate ? "no_truncate" : f->mscale != 0 ? "mscale" : "mscale_all_dim", kinds[f->scaling]);
  if (!yarn) return QKV_OK;
  if (f->no_truncate != 0 && f->no_truncate != 1)
    return qkv__fail(r, QKV_BAD_VALUE, "no_truncate %" PRId32 " is neither 0 nor 1", f->no_truncate);
  if (!(f->base > 1)) return qkv__fail(r, QKV_BAD_VALUE, "base %g must be above 1 for QKV_ROPE_YARN", f->base);
  if (f->beta_fast < f->beta_slow)
    return qkv__fail(r, QKV_BAD_VALUE, "beta_fast %g is less than beta_slow %g", f->beta_fast, f->beta_slow);
  if ((f->mscale != 0) != (f->mscale_all_dim != 0))
    return qkv__fail(r, QKV_BAD_VALUE, "mscale %g and mscale_all_dim %g: only one of them is given", f->mscale, f->mscale_all_dim);
  if (!(f->mscale >= 0 && f->mscale <= LARGEST && f->mscale_all_dim >= 0 && f->mscale_all_dim <= LARGEST))
    return qkv__fail(r, QKV_BAD_VALUE, "mscale %g and mscale_all_dim %g are not positive numbers up to 2^500", f->mscale,
                     f->mscale_all_dim);
  return QKV_OK;
}

static qkv_status check(const qkv__report *r, const qkv_frequencies *in, qkv_frequencies *f) {
  QKV_TRY(qkv__take_struct(r, "frequencies", in, f, sizeof *f));
  if (f->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "frequencies.reserved %" PRId32 " is not 0", f->reserved);
  if (f->scaling < QKV_ROPE_PLAIN || f->scaling > QKV_ROPE_LLAMA3)
    return qkv__fail(r, QKV_BAD_VALUE, "scaling %" PRId32 " is not a QKV_ROPE value", f->scaling);
  if (f->rotary_dim < 2 || f->rotary_dim % 2 || f->rotary_dim > DIM_LIMIT)
    return qkv__fail(r, QKV_BAD_EXTENT, "rotary_dim %" PRId64 " is not an even number in 2..%d", f->rotary_dim, (int)DIM_LIMIT);
  if (f->base == 0) f->base = 10000;
  if (!(f->base >= 1 && f->base <= LARGEST)) return qkv__fail(r, QKV_BAD_VALUE, "base %g is not in 1..2^500", f->base);
  QKV_TRY(check_fields(r, f));
  QKV_TRY(check_yarn(r, f));
  if (f->scaling == QKV_ROPE_LLAMA3 && !(f->high_freq_factor > f->low_freq_factor))
    return qkv__fail(r, QKV_BAD_VALUE, "high_freq_factor %g is not above low_freq_factor %g", f->high_freq_factor,
                     f->low_freq_factor);
  if (f->attention_factor != 0 && !(f->attention_factor >= SMALLEST && f->attention_factor <= LARGEST))
    return qkv__fail(r, QKV_BAD_VALUE, "attention_factor %g is not a positive number from 2^-500 to 2^500", f->attention_factor);
  for (int64_t i = 0; f->factors && i < f->rotary_dim / 2; i++)
    if (!(f->factors[i] >= SMALLEST && f->factors[i] <= LARGEST))
      return qkv__fail(r, QKV_BAD_VALUE, "factors[%" PRId64 "] %g is not a positive number from 2^-500 to 2^500", i,
                       f->factors[i]);
  return QKV_OK;
}

/* ---- The scalings ---- */

static pair times(pair a, double b) { return qkv__pair_mul(a, qkv__pair_of(b)); }
static pair over(pair a, double b) { return qkv__pair_div(a, qkv__pair_of(b)); }
static pair less(pair a, pair b) { return qkv__pair_add(a, (pair){-b.high, -b.low}); }

static pair log2_of(pair x) { return qkv__pair_add(qkv__log2_pair(x.high), qkv__pair_of(x.low / x.high * QKV_LOG2E)); }

static pair clamp(pair x) {
  const pair zero = {0, 0}, one = {1, 0};
  return x.high <= 0 ? zero : x.high > 1 || (x.high == 1 && x.low >= 0) ? one : x;
}

/* log2 of the base that NTK scaling gives; s^(d / (d - 2)) means nothing for d = 2, where the only frequency is 1. */
static pair ntk_base(const qkv_frequencies *f, pair log2_base) {
  const double d = (double)f->rotary_dim;
  pair s = {f->factor, 0};
  if (f->rotary_dim == 2) return log2_base;
  if (f->scaling == QKV_ROPE_DYNAMIC_NTK) {
    const double l0 = (double)f->original_seqlen, l = (double)QKV_MAX(f->seqlen, f->original_seqlen);
    s = less(over(times(s, l), l0), qkv__exact_sum(f->factor, -1));
  }
  return qkv__pair_add(log2_base, over(times(log2_of(s), d), d - 2));
}

/* YaRN: pairs below `low` turn more than beta_fast times within L0 and stay, from `high` on they turn less than beta_slow times and
 * are interpolated. */
typedef struct ramp {
  pair low, high;
} ramp;

/* The pair that turns `turns` times within L0, d log2(L0 / (2 pi turns)) / (2 log2(base)), not below -1 and not above d. */
static pair pair_that_turns(const qkv_frequencies *f, double turns) {
  const double d = (double)f->rotary_dim;
  const pair two_pi = {0x1.921fb54442d18p+2, 0x1.1a62633145c07p-52}, unit = qkv__log2_pair(f->base);
  const pair length = qkv__pair_div(qkv__pair_of((double)f->original_seqlen), times(two_pi, turns));
  const pair x = qkv__pair_div(times(log2_of(length), d), (pair){2 * unit.high, 2 * unit.low});
  return x.high < -1 ? qkv__pair_of(-1) : x.high > d ? qkv__pair_of(d) : x;
}

static pair whole(pair x, int up) { /* |x| < 2^31 */
  double n = qkv__rint(x.high);
  const double rest = (x.high - n) + x.low;
  n += up ? rest > 0 : -(rest < 0);
  return qkv__pair_of(n);
}

static ramp yarn_ramp(const qkv_frequencies *f) {
  const double last = (double)f->rotary_dim - 1;
  ramp y = {pair_that_turns(f, f->beta_fast), pair_that_turns(f, f->beta_slow)};
  if (!f->no_truncate) {
    y.low = whole(y.low, 0);
    y.high = whole(y.high, 1);
  }
  if (y.low.high < 0) y.low = qkv__pair_of(0);
  if (y.high.high > last || (y.high.high == last && y.high.low > 0)) y.high = qkv__pair_of(last);
  if (y.low.high == y.high.high && y.low.low == y.high.low) y.high = qkv__pair_add(y.high, qkv__pair_of(0.001));
  return y;
}

/* The part of a frequency that stays: t in t w + (1 - t) w / s. */
static pair kept_part(const qkv_frequencies *f, const ramp *y, int64_t i, pair w) {
  if (f->scaling == QKV_ROPE_YARN) {
    const pair x = qkv__pair_div(less(qkv__pair_of((double)i), y->low), less(y->high, y->low));
    return less(qkv__pair_of(1), clamp(x));
  }
  const pair turns = times((pair){w.high / 4, w.low / 4}, (double)f->original_seqlen); /* within L0 */
  const pair low = {f->low_freq_factor, 0}, high = {f->high_freq_factor, 0};
  return clamp(qkv__pair_div(less(turns, low), less(high, low)));
}

static pair scaled(const qkv_frequencies *f, const ramp *y, int64_t i, pair w) {
  if (f->scaling == QKV_ROPE_LINEAR) w = over(w, f->factor);
  if (f->scaling == QKV_ROPE_YARN || f->scaling == QKV_ROPE_LLAMA3) {
    const pair t = kept_part(f, y, i, w);
    w = qkv__pair_mul(w, qkv__pair_add(t, over(less(qkv__pair_of(1), t), f->factor)));
  }
  return f->factors ? over(w, f->factors[i]) : w;
}

static double yarn_mscale(double s, double mscale) { return s <= 1 ? 1 : 0.1 * mscale * (qkv__log2_64(s) * QKV_LN2) + 1; }

static double attention_factor(const qkv_frequencies *f) {
  if (f->attention_factor != 0) return f->attention_factor;
  if (f->scaling != QKV_ROPE_YARN) return 1;
  if (f->mscale != 0) return yarn_mscale(f->factor, f->mscale) / yarn_mscale(f->factor, f->mscale_all_dim);
  return yarn_mscale(f->factor, 1);
}

/* Checks, and unless table is NULL fills it. */
static qkv_status make(const qkv__report *r, const qkv_frequencies *in, double *table, size_t bytes) {
  static const pair half_pi = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54};
  qkv_frequencies f;
  QKV_TRY(check(r, in, &f));
  const int64_t pairs = f.rotary_dim / 2;
  pair log2_base = qkv__log2_pair(f.base);
  if (f.scaling == QKV_ROPE_NTK || f.scaling == QKV_ROPE_DYNAMIC_NTK) log2_base = ntk_base(&f, log2_base);
  if (!(log2_base.high >= -1000 && log2_base.high <= 1000))
    return qkv__fail(r, QKV_BAD_VALUE, "base %g with factor %g becomes 2^%.0f, beyond 2^1000", f.base, f.factor, log2_base.high);
  const ramp y = f.scaling == QKV_ROPE_YARN ? yarn_ramp(&f) : (ramp){{0, 0}, {1, 0}};
  for (int fill = 0; fill <= (table != NULL); fill++) { /* nothing is written before everything was looked at */
    qkv__sequence s = qkv__sequence_begin(log2_base, f.rotary_dim);
    if (fill && bytes < (size_t)QKV_FREQUENCIES_DOUBLES(f.rotary_dim) * sizeof *table)
      return qkv__fail(r, QKV_SCRATCH_TOO_SMALL, "table of %zu bytes is too small", bytes);
    if (fill) {
      table[0] = QKV__TABLE_MARK;
      table[QKV__TABLE_DIM] = (double)f.rotary_dim;
      table[QKV__TABLE_ATTENTION] = attention_factor(&f);
      table[3] = 0;
    }
    for (int64_t i = 0; i < pairs; i++, qkv__sequence_next(&s)) {
      const pair w = scaled(&f, &y, i, s.value);
      if (!(w.high <= 0x1p20))
        return qkv__fail(r, QKV_BAD_VALUE, "frequency %" PRId64 " becomes %g quarter turns per position, above 2^20", i, w.high);
      if (!fill) continue;
      const qkv__pieces to = qkv__table_pieces(table, pairs);
      table[QKV__TABLE_HEAD + i] = qkv__pair_mul(w, half_pi).high;
      qkv__pieces_set(&to, i, w);
    }
  }
  return QKV_OK;
}

qkv_status qkv_frequencies_check(const qkv_frequencies *frequencies, char *text, size_t bytes) {
  const qkv__report r = {text, bytes};
  qkv__fpstate fp;
  if (text && bytes) text[0] = 0;
  qkv__fp_enter(&fp);
  const qkv_status s = make(&r, frequencies, NULL, 0);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_frequencies_bytes(const qkv_frequencies *frequencies, size_t *bytes) {
  if (!bytes) return QKV_BAD_POINTER;
  const qkv_status s = qkv_frequencies_check(frequencies, NULL, 0);
  if (s == QKV_OK) *bytes = (size_t)QKV_FREQUENCIES_DOUBLES(frequencies->rotary_dim) * sizeof(double);
  return s;
}

qkv_status qkv_frequencies_fill(const qkv_frequencies *frequencies, double *table, size_t bytes) {
  const qkv__report none = {NULL, 0};
  qkv__fpstate fp;
  if (!table) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  const qkv_status s = make(&none, frequencies, table, bytes);
  qkv__fp_leave(&fp);
  return s;
}

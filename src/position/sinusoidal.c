/* Sinusoidal encoding: Vaswani et al., Attention is all you need, 2017 (arXiv:1706.03762), section 3.5. */
#include <inttypes.h>

#include "base/fpstate.h"
#include "base/philox.h"
#include "base/run.h"
#include "base/size.h"
#include "position/angle.h"
#include "position/elements.h"
#include "position/place.h"
#include "qkv/position.h"

enum { WIDTH_LIMIT = 1 << 24, PAIRS = QKV__RUN / 2 };

typedef struct call {
  qkv_sinusoidal s; /* out.data given */
  qkv__places places;
  qkv__sequence frequencies;      /* at the first column */
  int64_t rows, tasks_per_entry;  /* of a task */
  int64_t entries;                /* that stand at the same positions, and share the encoding */
  int backward, f64;
  uint64_t drop; /* random words below this drop; 0: no dropout */
  double r;      /* 1 / (1 - dropout), rounded to the arithmetic's type */
} call;

static qkv_status check_numbers(const qkv__report *r, call *k) {
  qkv_sinusoidal *s = &k->s;
  if (s->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "sinusoidal.reserved %" PRId32 " is not 0", s->reserved);
  if (s->base == 0) s->base = 10000;
  if (!(s->base >= 1 && s->base <= 0x1p500)) return qkv__fail(r, QKV_BAD_VALUE, "base %g is not in 1..2^500", s->base);
  if (!(s->dropout >= 0 && s->dropout <= 1)) return qkv__fail(r, QKV_BAD_VALUE, "dropout %g is not in 0..1", s->dropout);
  if (s->batch_origin < 0) return qkv__fail(r, QKV_BAD_VALUE, "batch_origin %" PRId64 " is negative", s->batch_origin);
  if (s->row_origin < 0) return qkv__fail(r, QKV_BAD_VALUE, "row_origin %" PRId64 " is negative", s->row_origin);
  return QKV_OK;
}

static qkv_status check(const qkv__report *r, const qkv_sinusoidal *in, call *k) {
  QKV_TRY(qkv__take_struct(r, "sinusoidal", in, &k->s, sizeof k->s));
  qkv_sinusoidal *s = &k->s;
  QKV_TRY(check_numbers(r, k));
  QKV_TRY(qkv__check_extent(r, "batch", s->batch, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "seqlen", s->seqlen, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "d_model", s->d_model, 1, WIDTH_LIMIT));
  QKV_TRY(qkv__check_extent(r, "table_rows", s->table_rows, 0, INT32_MAX));
  k->places = (qkv__places){s->start, s->starts, &s->position_ids};
  QKV_TRY(qkv__check_places(r, &k->places, s->batch, s->seqlen));
  const int64_t n[4] = {s->batch, 1, s->seqlen, s->d_model};
  QKV_TRY(qkv__check_in_place(r, &s->x, &s->out, n, !k->backward));
  k->f64 = s->out.dtype == QKV_F64;
  const qkv__named out = {"out", &s->out, {n[0], n[1], n[2], n[3]}};
  const qkv__named inputs[] = {{"table", &s->table, {1, 1, s->table_rows, s->d_model}},
                               {"position_ids", &s->position_ids, {s->batch, 1, s->seqlen, 1}}};
  if (s->table.data || s->table_rows)
    QKV_TRY(qkv__check_tensor(r, &inputs[0], k->f64 ? QKV__F64_BIT : QKV__F32_BIT | QKV__F64_BIT, 0));
  for (int i = 0; i < 2; i++) QKV_TRY(qkv__check_apart(r, &out, &inputs[i]));
  k->r = s->dropout == 1 ? 0 : 1 / (1 - s->dropout);
  k->drop = (uint64_t)(s->dropout * 0x1p32);
  return QKV_OK;
}

/* ---- Elements of a run of columns ---- */

/* Through memory: what stands there are floats, whatever a compiler thinks of two conversions. */
static void round_f32(double *v, int n) {
  float f[QKV__RUN];
  for (int i = 0; i < n; i++) f[i] = (float)v[i];
  for (int i = 0; i < n; i++) v[i] = f[i];
}

/* v = kept ? v * r : 0; v rounded to the arithmetic's type, and the product. */
static void drop_run(const call *k, double *v, int64_t b, int64_t i, int64_t column, int n) {
  const float r32 = (float)k->r;
  uint32_t counter[4] = {0, (uint32_t)k->s.row_origin + (uint32_t)i, (uint32_t)k->s.batch_origin + (uint32_t)b,
                         (uint32_t)k->s.offset};
  for (int x = 0; x < n; x += 4) {
    uint32_t word[4];
    counter[0] = UINT32_C(0x80000000) | (uint32_t)((column + x) / 4);
    qkv__philox(counter, k->s.seed, word);
    for (int y = 0; y < 4 && x + y < n; y++) {
      const float f = (float)v[x + y] * r32;
      v[x + y] = word[y] < k->drop ? 0 : k->f64 ? v[x + y] * k->r : f;
    }
  }
}

static int in_table(const call *k, double position) {
  return k->s.table.data && position >= 0 && position < (double)k->s.table_rows;
}

/* The encoding of a position in columns [column, column + n), of the arithmetic's type. */
static void encode(const call *k, double position, const qkv__pieces *f, int64_t column, double *to, int n) {
  const qkv_tensor *t = &k->s.table;
  if (in_table(k, position)) {
    qkv__loader(t->dtype)(to, qkv__at(t, qkv__dtype_bytes(t->dtype), 0, 0, (int64_t)position, column), t->stride[3], n);
  } else {
    const int pairs = (n + 1) / 2;
    double sine[PAIRS], cosine[PAIRS];
    qkv__sincos(position, f, 0, pairs, sine, cosine);
    for (int x = 0; x < pairs; x++) {
      to[2 * x] = sine[x];
      if (2 * x + 1 < n) to[2 * x + 1] = cosine[x];
    }
  }
  if (!k->f64) round_f32(to, n);
}

/* A run of columns of one row, for the entries that share its position. */
static void row_run(const call *k, int64_t b, int64_t i, const double *encoding, int64_t column, int n) {
  const qkv_sinusoidal *s = &k->s;
  const size_t xe = qkv__dtype_bytes(s->x.dtype), oe = qkv__dtype_bytes(s->out.dtype);
  double v[QKV__RUN];
  for (int64_t e = b; e < b + k->entries; e++) {
    if (s->x.data) {
      qkv__loader(s->x.dtype)(v, qkv__at(&s->x, xe, e, 0, i, column), s->x.stride[3], n);
      for (int x = 0; x < n && encoding; x++) v[x] += encoding[x];
    } else
      memcpy(v, encoding, (size_t)n * sizeof *v);
    if (k->drop) drop_run(k, v, e, i, column, n);
    qkv__storer(s->out.dtype)(qkv__at(&s->out, oe, e, 0, i, column), s->out.stride[3], v, n);
  }
}

static void task_body(void *arg, int64_t task, int32_t worker) {
  const call *k = arg;
  const qkv_sinusoidal *s = &k->s;
  const int64_t b = task / k->tasks_per_entry * k->entries, from = task % k->tasks_per_entry * k->rows;
  const int64_t to = QKV_MIN(from + k->rows, s->seqlen);
  double a[PAIRS], bb[PAIRS], c[PAIRS], encoding[QKV__RUN];
  const qkv__pieces f = {a, bb, c};
  qkv__sequence q = k->frequencies;
  int computes = 0;
  (void)worker;
  for (int64_t i = from; i < to && !k->backward; i++) computes |= !in_table(k, qkv__place(&k->places, b, i));
  for (int64_t column = 0; column < s->d_model; column += QKV__RUN) {
    const int n = (int)QKV_MIN(s->d_model - column, QKV__RUN);
    for (int x = 0; 2 * x < n && computes; x++, qkv__sequence_next(&q)) qkv__pieces_set(&f, x, q.value);
    for (int64_t i = from; i < to; i++) {
      if (!k->backward) encode(k, qkv__place(&k->places, b, i), &f, column, encoding, n);
      row_run(k, b, i, k->backward ? NULL : encoding, column, n);
    }
  }
}

static qkv_status run(const qkv_context *context, call *k) {
  const qkv_sinusoidal *s = &k->s;
  qkv_context c;
  QKV_TRY(qkv__check_context(context, &c, NULL, 0));
  if (!s->batch || !s->seqlen) return QKV_OK;
  if (!k->backward) k->frequencies = qkv__sequence_begin(qkv__log2_pair(s->base), s->d_model);
  k->entries = s->starts || s->position_ids.data ? 1 : s->batch;
  k->rows = qkv__task_rows(s->seqlen, (k->entries + 4) * s->d_model);
  k->tasks_per_entry = (s->seqlen + k->rows - 1) / k->rows;
  return qkv__run(&c, task_body, k, s->batch / k->entries * k->tasks_per_entry);
}

static qkv_status sinusoidal(const qkv_context *context, const qkv_sinusoidal *in, int backward) {
  const qkv__report none = {NULL, 0};
  call k = {.backward = backward};
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  qkv_status s = check(&none, in, &k);
  if (s == QKV_OK) s = run(context, &k);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_sinusoidal_check(const qkv_sinusoidal *in, char *text, size_t bytes) {
  const qkv__report r = {text, bytes};
  call k = {.backward = 0};
  qkv__fpstate fp;
  if (text && bytes) text[0] = 0;
  qkv__fp_enter(&fp);
  const qkv_status s = check(&r, in, &k);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_sinusoidal_forward(const qkv_context *context, const qkv_sinusoidal *in) { return sinusoidal(context, in, 0); }
qkv_status qkv_sinusoidal_backward(const qkv_context *context, const qkv_sinusoidal *in) { return sinusoidal(context, in, 1); }

/* ---- The table ---- */

qkv_status qkv_sinusoidal_table_bytes(int64_t table_rows, int64_t d_model, int32_t dtype, size_t *bytes) {
  int64_t n;
  if (!bytes) return QKV_BAD_POINTER;
  if (dtype != QKV_F32 && dtype != QKV_F64) return QKV_BAD_DTYPE;
  if (table_rows < 0 || table_rows > INT32_MAX || d_model < 1 || d_model > WIDTH_LIMIT) return QKV_BAD_EXTENT;
  if (!qkv__mul(table_rows * d_model, (int64_t)qkv__dtype_bytes(dtype), &n) || (uint64_t)n > SIZE_MAX / 2) return QKV_TOO_LARGE;
  *bytes = (size_t)n;
  return QKV_OK;
}

qkv_status qkv_sinusoidal_fill(const qkv_context *context, const qkv_sinusoidal *in, int64_t from, int64_t to) {
  const qkv__report none = {NULL, 0};
  qkv_sinusoidal s, rows = qkv_sinusoidal_default();
  QKV_TRY(qkv__take_struct(&none, "sinusoidal", in, &s, sizeof s));
  if (from < 0 || from > to || to > s.table_rows) return QKV_BAD_REGION;
  if (!s.table.data && from < to) return QKV_BAD_POINTER;
  if (s.table.data && s.table.dtype != QKV_F32 && s.table.dtype != QKV_F64) return QKV_BAD_DTYPE;
  rows.batch = 1;
  rows.seqlen = to - from;
  rows.d_model = s.d_model;
  rows.base = s.base;
  rows.start = from;
  rows.out = s.table;
  if (from < to) rows.out.data = qkv__at(&s.table, qkv__dtype_bytes(s.table.dtype), 0, 0, from, 0);
  return sinusoidal(context, &rows, 0);
}

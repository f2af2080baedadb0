/* Rotary embedding, forward and backward. */
#include <inttypes.h>

#include "base/fpstate.h"
#include "base/run.h"
#include "position/elements.h"
#include "position/frequencies.h"
#include "position/place.h"
#include "qkv/position.h"

typedef struct call {
  qkv_rotary r; /* out.data given */
  qkv__places places;
  qkv__pieces pieces;
  double attention_factor;
  int64_t dim, rows, tasks_per_entry; /* of rotation; of a task */
  int backward, in_place;
} call;

static qkv_status check(const qkv__report *r, const qkv_rotary *in, call *k) {
  QKV_TRY(qkv__take_struct(r, "rotary", in, &k->r, sizeof k->r));
  qkv_rotary *p = &k->r;
  if (p->pairing != QKV_ROTARY_HALF && p->pairing != QKV_ROTARY_INTERLEAVED)
    return qkv__fail(r, QKV_BAD_VALUE, "pairing %" PRId32 " is neither QKV_ROTARY_HALF nor QKV_ROTARY_INTERLEAVED", p->pairing);
  QKV_TRY(qkv__check_extent(r, "batch", p->batch, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "num_heads", p->num_heads, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "seqlen", p->seqlen, 0, INT32_MAX));
  QKV_TRY(qkv__check_extent(r, "head_dim", p->head_dim, 1, 1 << 20));
  if (!p->table) return qkv__fail(r, QKV_BAD_POINTER, "table is NULL");
  if (p->table[0] != QKV__TABLE_MARK)
    return qkv__fail(r, QKV_BAD_VALUE, "table[0] %g is not the mark of a table that qkv_frequencies_fill has filled", p->table[0]);
  if (p->table[QKV__TABLE_DIM] > (double)p->head_dim)
    return qkv__fail(r, QKV_BAD_EXTENT, "rotary_dim %.0f of the table is above head_dim %" PRId64, p->table[QKV__TABLE_DIM],
                     p->head_dim);
  k->dim = (int64_t)p->table[QKV__TABLE_DIM];
  k->attention_factor = p->table[QKV__TABLE_ATTENTION];
  k->pieces = qkv__table_pieces(p->table, k->dim / 2);
  k->places = (qkv__places){p->start, p->starts, &p->position_ids};
  QKV_TRY(qkv__check_places(r, &k->places, p->batch, p->seqlen));
  const int64_t n[4] = {p->batch, p->num_heads, p->seqlen, p->head_dim};
  QKV_TRY(qkv__check_in_place(r, &p->x, &p->out, n, 0));
  k->in_place = p->out.data == p->x.data;
  const qkv_tensor doubles = {(void *)(uintptr_t)p->table, {0, 0, 0, 1}, QKV_F64, 0};
  const qkv__named out = {"out", &p->out, {n[0], n[1], n[2], n[3]}};
  const qkv__named inputs[] = {{"table", &doubles, {1, 1, 1, QKV_FREQUENCIES_DOUBLES(k->dim)}},
                               {"position_ids", &p->position_ids, {p->batch, 1, p->seqlen, 1}}};
  for (int i = 0; i < 2; i++) QKV_TRY(qkv__check_apart(r, &out, &inputs[i]));
  return QKV_OK;
}

/* (a, b) = (a cos - b sin, a sin + b cos), n a multiple of LANES. */
enum { LANES = 8 };
static void rotate(double *a, double *b, const double *sine, const double *cosine, int n) {
  for (int i = 0; i < n; i += LANES) {
    double x[LANES], y[LANES];
    for (int k = 0; k < LANES; k++) {
      x[k] = a[i + k] * cosine[i + k] - b[i + k] * sine[i + k];
      y[k] = a[i + k] * sine[i + k] + b[i + k] * cosine[i + k];
    }
    memcpy(a + i, x, sizeof x);
    memcpy(b + i, y, sizeof y);
  }
}

static void turn_row(const call *k, int64_t b, int64_t i) {
  const qkv_rotary *p = &k->r;
  const int64_t pairs = k->dim / 2, xs = p->x.stride[3], os = p->out.stride[3];
  const int half = p->pairing == QKV_ROTARY_HALF;
  const size_t xe = qkv__dtype_bytes(p->x.dtype), oe = qkv__dtype_bytes(p->out.dtype);
  const qkv__load_fn load = qkv__loader(p->x.dtype);
  const qkv__store_fn store = qkv__storer(p->out.dtype);
  const double position = qkv__place(&k->places, b, i), factor = k->attention_factor;
  for (int64_t from = 0; from < pairs; from += QKV__RUN) {
    const int n = (int)QKV_MIN(pairs - from, QKV__RUN), whole = (n + LANES - 1) / LANES * LANES;
    double sine[QKV__RUN], cosine[QKV__RUN], first[QKV__RUN], second[QKV__RUN];
    for (int x = n; x < whole; x++) sine[x] = cosine[x] = first[x] = second[x] = 0;
    qkv__sincos(position, &k->pieces, from, n, sine, cosine);
    for (int x = 0; x < n; x++) {
      sine[x] *= k->backward ? -factor : factor;
      cosine[x] *= factor;
    }
    const int64_t c0 = half ? from : 2 * from, c1 = half ? from + pairs : 2 * from + 1, step = half ? 1 : 2;
    for (int64_t h = 0; h < p->num_heads; h++) {
      load(first, qkv__at(&p->x, xe, b, h, i, c0), xs * step, n);
      load(second, qkv__at(&p->x, xe, b, h, i, c1), xs * step, n);
      rotate(first, second, sine, cosine, whole);
      store(qkv__at(&p->out, oe, b, h, i, c0), os * step, first, n);
      store(qkv__at(&p->out, oe, b, h, i, c1), os * step, second, n);
    }
  }
  for (int64_t from = k->dim; from < p->head_dim && !k->in_place; from += QKV__RUN) {
    const int n = (int)QKV_MIN(p->head_dim - from, QKV__RUN);
    double rest[QKV__RUN];
    for (int64_t h = 0; h < p->num_heads; h++) {
      load(rest, qkv__at(&p->x, xe, b, h, i, from), xs, n);
      store(qkv__at(&p->out, oe, b, h, i, from), os, rest, n);
    }
  }
}

static void task_body(void *arg, int64_t task, int32_t worker) {
  const call *k = arg;
  const int64_t b = task / k->tasks_per_entry, from = task % k->tasks_per_entry * k->rows;
  (void)worker;
  for (int64_t i = from; i < QKV_MIN(from + k->rows, k->r.seqlen); i++) turn_row(k, b, i);
}

static qkv_status rotary(const qkv_context *context, const qkv_rotary *in, int backward) {
  const qkv__report none = {NULL, 0};
  qkv_context c;
  call k = {.backward = backward};
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check_context(context, &c, NULL, 0);
  if (s == QKV_OK) s = check(&none, in, &k);
  if (s == QKV_OK && k.r.num_heads > 0 && k.r.seqlen > 0) {
    k.rows = qkv__task_rows(k.r.seqlen, k.r.num_heads * k.r.head_dim);
    k.tasks_per_entry = (k.r.seqlen + k.rows - 1) / k.rows;
    s = qkv__run(&c, task_body, &k, k.r.batch * k.tasks_per_entry);
  }
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_rotary_check(const qkv_rotary *in, char *text, size_t bytes) {
  const qkv__report r = {text, bytes};
  call k;
  qkv__fpstate fp;
  if (text && bytes) text[0] = 0;
  qkv__fp_enter(&fp);
  const qkv_status s = check(&r, in, &k);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_rotary_forward(const qkv_context *context, const qkv_rotary *in) { return rotary(context, in, 0); }
qkv_status qkv_rotary_backward(const qkv_context *context, const qkv_rotary *in) { return rotary(context, in, 1); }

/* Every check of what a caller passes, the defaults, and the layout of the activations. */
#include "nn/layer.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/size.h"
#include "problem/problem.h"

enum { MARK = 1 }; /* table[1] of a qkv_rotary: rotary_dim */

/* ---- Layout ---- */

/* Elements from row to row: whole cache lines, an odd number of them, so that rows do not meet in the same sets of a cache. */
static int64_t pitch(const qkv__layer *l, int64_t columns) {
  const int64_t line = 64 / (int64_t)l->element;
  return ((columns + line - 1) / line | 1) * line;
}
static int64_t heads_columns(const qkv__layer *l, int side) {
  const int64_t *w = l->width;
  return l->self ? (side ? 0 : w[QKV__Q] + w[QKV__K] + w[QKV__V]) : side ? w[QKV__K] + w[QKV__V] : w[QKV__Q];
}

static void carve_heads(const qkv__layer *l, qkv__carver *c, qkv__heads *h) {
  char *memory[2] = {NULL, NULL};
  int64_t ld[2];
  for (int i = 0; i < 2; i++) {
    int64_t n = 0;
    ld[i] = pitch(l, heads_columns(l, i));
    if (i && l->self) break;
    c->overflow |= !qkv__mul(l->rows[i], ld[i], &n);
    memory[i] = qkv__carve(c, n, l->element);
  }
  if (!h) return;
  for (int part = 0; part < QKV__PARTS; part++) {
    const int i = part != QKV__Q, at = l->self ? 0 : i;
    const int64_t before = (l->self && part > QKV__Q ? l->width[QKV__Q] : 0) + (part == QKV__V ? l->width[QKV__K] : 0);
    char *data = memory[at] ? memory[at] + before * (int64_t)l->element : NULL;
    h->part[part] = qkv__rows_at(&l->side[i], data, l->m.dtype, ld[at]);
  }
}
static void carve_out(const qkv__layer *l, qkv__carver *c, qkv_tensor *out) {
  const int64_t ld = pitch(l, l->out_width);
  int64_t n = 0;
  c->overflow |= !qkv__mul(l->rows[0], ld, &n);
  char *memory = qkv__carve(c, n, l->element);
  if (out) *out = qkv__rows_at(&l->side[0], memory, l->m.dtype, ld);
}
static void carve_activations(const qkv__layer *l, qkv__carver *c, qkv__activations *a) {
  int64_t n = 0;
  carve_heads(l, c, a ? &a->heads : NULL);
  carve_out(l, c, a ? &a->out : NULL);
  c->overflow |= !qkv__mul(l->rows[0], l->p.num_heads, &n);
  char *lse = qkv__carve(c, n, l->element);
  if (a) a->lse = lse;
}

size_t qkv__heads_bytes(const qkv__layer *l) {
  qkv__carver c = {NULL, 0, 0};
  carve_heads(l, &c, NULL);
  return c.used;
}
qkv__heads qkv__heads_at(const qkv__layer *l, char *memory) {
  qkv__carver c = {memory, 0, 0};
  qkv__heads h;
  carve_heads(l, &c, &h);
  return h;
}
size_t qkv__out_bytes(const qkv__layer *l) {
  qkv__carver c = {NULL, 0, 0};
  carve_out(l, &c, NULL);
  return c.used;
}
qkv_tensor qkv__out_at(const qkv__layer *l, char *memory) {
  qkv__carver c = {memory, 0, 0};
  qkv_tensor out;
  carve_out(l, &c, &out);
  return out;
}
qkv__activations qkv__activations_at(const qkv__layer *l, char *memory) {
  qkv__carver c = {memory, 0, 0};
  qkv__activations a;
  carve_activations(l, &c, &a);
  return a;
}

qkv_tensor qkv__split_heads(const qkv_tensor *rows, int64_t head_dim) {
  qkv_tensor t = *rows;
  t.stride[1] = head_dim * rows->stride[3];
  return t;
}

qkv_problem qkv__problem_of(const qkv__layer *l, const qkv__activations *a, int lse) {
  qkv_problem p = l->p;
  p.q = qkv__split_heads(&a->heads.part[QKV__Q], p.head_dim);
  p.k = qkv__split_heads(&a->heads.part[QKV__K], p.head_dim);
  p.v = qkv__split_heads(&a->heads.part[QKV__V], p.head_dim_v);
  p.out = qkv__split_heads(&a->out, p.head_dim_v);
  if (lse) p.lse = qkv_bhs(a->lse, l->m.dtype, p.num_heads, p.seqlen_q);
  return p;
}

/* ---- Groups ---- */

int qkv__group_end(const qkv__layer *l, const qkv_projections *p, int part) {
  int end = part + 1;
  for (; end < QKV__PARTS; end++) {
    const qkv_tensor *a = qkv__weight(p, end - 1), *b = qkv__weight(p, end);
    if (end == QKV__K && !l->same_rows) break;
    if (!a->data || !b->data || a->stride[2] != b->stride[2] || a->stride[3] != b->stride[3]) break;
    if ((char *)b->data != (char *)a->data + l->width[end - 1] * a->stride[2] * (int64_t)l->element) break;
    const qkv__matrix both = qkv__group_weight(l, p, part, end + 1);
    if (!qkv__matrix_fits(&both)) break; /* of a transposed weight, the stride may be enough for one part only */
  }
  return end;
}

qkv__matrix qkv__group_weight(const qkv__layer *l, const qkv_projections *p, int from, int to) {
  const qkv_tensor *w = qkv__weight(p, from);
  int64_t rows = 0;
  for (int part = from; part < to; part++) rows += l->width[part];
  return (qkv__matrix){w->data, rows, qkv__input_width(l, from), w->stride[2], w->stride[3]};
}

/* ---- Checks ---- */

static qkv_status check_width(const qkv__report *r, const char *name, int64_t n, int64_t least) {
  if (n >= least && n <= INT32_MAX) return QKV_OK;
  return qkv__fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is not in %" PRId64 "..%" PRId32, name, n, least, INT32_MAX);
}

/* What was said of a part of the layer, with the part's name before it. */
static qkv_status blame(const qkv__report *r, const char *part, qkv_status status, const char *text) {
  return qkv__fail(r, status, "%s: %s", part, text[0] ? text : qkv_status_text(status));
}

/* The attention problem and gradients of its bias and sinks, without the layer's own tensors. In the backward those are inputs, so one
 * element for all passes for each of them. */
static qkv_status check_attention(const qkv__report *r, const qkv__layer *l) {
  static const double zero = 0;
  const qkv_tensor any = qkv_strided(&zero, l->m.dtype, 0, 0, 0, 0);
  qkv_problem p = l->p;
  qkv_gradients g = qkv_gradients_default();
  char text[512];
  p.q = p.k = p.v = p.out = p.lse = g.dout = any;
  g.dbias = l->g.dbias;
  g.dsinks = l->g.dsinks;
  g.accumulate = l->g.accumulate & (QKV_DBIAS | QKV_DSINKS);
  const qkv_status s = qkv_backward_check(&p, &g, text, sizeof text);
  return s == QKV_OK ? QKV_OK : blame(r, "attention", s, text);
}

static qkv_status take_attention(const qkv__report *r, qkv__layer *l) {
  const qkv_multihead *m = &l->m;
  QKV_TRY(qkv__take_struct(r, "attention", m->attention, &l->p, sizeof l->p));
  qkv_problem *p = &l->p;
  p->size = sizeof *p;
  const qkv_tensor *const own[] = {&p->q, &p->k, &p->v, &p->out, &p->lse};
  static const char *const names[] = {"q", "k", "v", "out", "lse"};
  for (int i = 0; i < 5; i++) {
    if (own[i]->data) return qkv__fail(r, QKV_BAD_POINTER, "attention: %s.data is given, but it lies in the activations", names[i]);
    if (own[i]->dtype && own[i]->dtype != m->dtype)
      return qkv__fail(r, QKV_BAD_DTYPE, "attention: %s.dtype is %s, but dtype is %s", names[i], qkv__dtype_name(own[i]->dtype),
                       qkv__dtype_name(m->dtype));
  }
  if (p->head_dim == 0) {
    if (p->num_heads < 1 || m->d_model % p->num_heads)
      return qkv__fail(r, QKV_BAD_EXTENT, "d_model %" PRId64 " is not a multiple of num_heads %" PRId64 ", and head_dim is 0",
                       m->d_model, p->num_heads);
    p->head_dim = m->d_model / p->num_heads;
  }
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  if (p->num_kv_heads == 0) p->num_kv_heads = p->num_heads;
  if (!l->self) return QKV_OK;
  if (p->seqlen_kv == 0) p->seqlen_kv = p->seqlen_q;
  if (p->seqlen_kv != p->seqlen_q)
    return qkv__fail(r, QKV_BAD_EXTENT, "attention: seqlen_kv %" PRId64 " is not seqlen_q %" PRId64 ", but d_kv is 0: self-attention",
                     p->seqlen_kv, p->seqlen_q);
  if (!p->cu_seqlens_kv) p->cu_seqlens_kv = p->cu_seqlens_q;
  if (!p->cu_seqlens_q && p->cu_seqlens_kv)
    return qkv__fail(r, QKV_BAD_LENGTHS, "attention: cu_seqlens_kv is given, but not cu_seqlens_q, and d_kv is 0: self-attention");
  return QKV_OK;
}

/* After check_attention. */
static qkv_status make_sides(const qkv__report *r, qkv__layer *l) {
  const qkv_problem *p = &l->p;
  const int32_t *const cu[2] = {p->cu_seqlens_q, p->cu_seqlens_kv};
  const int64_t seqlen[2] = {p->seqlen_q, p->seqlen_kv};
  for (int i = 0; i < 2; i++) {
    qkv__side *s = &l->side[i];
    const qkv_tensor *x = qkv__input(l, i);
    const int64_t batch = x->stride[0], row = x->stride[2];
    *s = (qkv__side){cu[i] ? 1 : p->batch, seqlen[i], p->batch, cu[i], i ? p->kv_begin : NULL, i ? p->kv_length : p->q_length, 0, 0};
    if (!qkv__mul(s->batch, s->seqlen, &l->rows[i]))
      return qkv__fail(r, QKV_TOO_LARGE, "attention: batch %" PRId64 " x %s %" PRId64 " does not fit 63 bits", s->batch,
                       i ? "seqlen_kv" : "seqlen_q", s->seqlen);
    s->sequence_major = s->batch > 1 && s->seqlen > 1 && batch > 0 && batch <= INT64_MAX / s->batch && row == s->batch * batch;
    for (int64_t e = 0; e < p->batch && (s->begin || s->end); e++) {
      const int64_t rows = s->cu ? s->cu[e + 1] - s->cu[e] : s->seqlen;
      s->partial |= qkv__entry_rows(s, e).count != rows;
    }
  }
  if (l->self && p->cu_seqlens_q)
    for (int64_t e = 0; e <= p->batch; e++)
      if (p->cu_seqlens_q[e] != p->cu_seqlens_kv[e])
        return qkv__fail(r, QKV_BAD_LENGTHS,
                         "attention: cu_seqlens_kv[%" PRId64 "] %" PRId32 " is not cu_seqlens_q[%" PRId64 "] %" PRId32
                         ", but d_kv is 0: self-attention",
                         e, p->cu_seqlens_kv[e], e, p->cu_seqlens_q[e]);
  l->same_rows = l->self;
  for (int64_t e = 0; e < p->batch && l->same_rows && (l->side[0].partial || l->side[1].partial); e++) {
    const qkv__segment a = qkv__entry_rows(&l->side[0], e), b = qkv__entry_rows(&l->side[1], e);
    l->same_rows = a.row == b.row && a.count == b.count;
  }
  return QKV_OK;
}

static int64_t longest(const qkv__side *s) {
  int64_t n = s->cu || !s->entries ? 0 : s->seqlen;
  for (int64_t e = 0; s->cu && e < s->entries; e++) n = QKV_MAX(n, s->cu[e + 1] - s->cu[e]);
  return n;
}

static qkv_status check_mask_extents(const qkv__report *r, const qkv__layer *l) {
  const int64_t rows = longest(&l->side[0]), keys = longest(&l->side[1]);
  if (l->m.mask_rows && l->m.mask_rows != rows)
    return qkv__fail(r, QKV_BAD_MASK, "mask_rows %" PRId64 " is not the number of rows, %" PRId64, l->m.mask_rows, rows);
  if (l->m.mask_keys && l->m.mask_keys != keys)
    return qkv__fail(r, QKV_BAD_MASK, "mask_keys %" PRId64 " is not the number of keys, %" PRId64, l->m.mask_keys, keys);
  return QKV_OK;
}

static qkv_status take_rotary(const qkv__report *r, qkv__layer *l, int i) {
  const char *const name = i ? "rotary_k" : "rotary_q";
  const qkv_rotary *in = i ? l->m.rotary_k : l->m.rotary_q;
  const qkv__side *s = &l->side[i];
  char text[512];
  if (!in) return QKV_OK;
  QKV_TRY(qkv__take_struct(r, name, in, &l->rotary[i], sizeof l->rotary[i]));
  qkv_rotary *t = &l->rotary[i];
  t->size = sizeof *t;
  l->has_rotary[i] = 1;
  if (t->batch || t->num_heads || t->seqlen || t->head_dim || t->x.data || t->out.data)
    return qkv__fail(r, QKV_BAD_VALUE, "%s: batch, num_heads, seqlen, head_dim, x and out must be 0: the layer fills them in", name);
  t->head_dim = l->p.head_dim;
  /* no heads: what is wrong with the rest is found without data. In a ragged batch, each entry counts by itself */
  const int packed = s->cu && t->position_ids.data;
  t->batch = packed ? 1 : l->p.batch;
  t->seqlen = packed || !s->cu ? s->seqlen : longest(s);
  const qkv_status status = qkv_rotary_check(t, text, sizeof text);
  return status == QKV_OK ? QKV_OK : blame(r, name, status, text);
}

/* ---- Tensors ---- */

/* The layer's own tensors and those that could lie over them. */
typedef struct list {
  qkv__named t[64];
  int output[64], count;
} list;

static void push(list *a, const char *name, const qkv_tensor *t, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int output) {
  if (!t->data) return;
  a->t[a->count] = (qkv__named){name, t, {n0, n1, n2, n3}};
  a->output[a->count++] = output;
}

static qkv_status push_checked(const qkv__report *r, list *a, const char *name, const qkv_tensor *t, int dtype, int64_t n0, int64_t n2,
                               int64_t n3, int needed, int output) {
  const qkv__named x = {name, t, {n0, 1, n2, n3}};
  const qkv__matrix matrix = {t->data, n2, n3, t->stride[2], t->stride[3]};
  if (!t->data && !needed) return QKV_OK;
  QKV_TRY(qkv__check_tensor(r, &x, 1 << dtype, output));
  if (n0 && n2 && n3 && n2 != 1 && !qkv__matrix_fits(&matrix))
    return qkv__fail(r, QKV_BAD_STRIDE,
                     "%s: stride %" PRId64 " of its %" PRId64 " rows and %" PRId64 " of its %" PRId64
                     " columns: one must be 1, the other at least the extent of its axis (and fit 31 bits)",
                     name, t->stride[2], n2, t->stride[3], n3);
  if (n2 == 1 && n3 > 1 && t->stride[3] < 1)
    return qkv__fail(r, QKV_BAD_STRIDE, "%s: stride %" PRId64 " of its columns is not positive", name, t->stride[3]);
  push(a, name, t, n0, 1, n2, n3, output);
  return QKV_OK;
}

static qkv_status push_vector(const qkv__report *r, list *a, const char *name, const qkv_tensor *t, int dtype, int64_t n, int output) {
  const qkv__named x = {name, t, {1, 1, 1, n}};
  if (!t->data) return QKV_OK;
  QKV_TRY(qkv__check_tensor(r, &x, 1 << dtype, output));
  push(a, name, t, 1, 1, 1, n, output);
  return QKV_OK;
}

static qkv_status push_projections(const qkv__report *r, list *a, const qkv__layer *l, const qkv_projections *p, int gradients) {
  static const char *const weights[2][4] = {
      {"projections.wq", "projections.wk", "projections.wv", "projections.wo"},
      {"gradients.projections.wq", "gradients.projections.wk", "gradients.projections.wv", "gradients.projections.wo"}};
  static const char *const biases[2][4] = {
      {"projections.bq", "projections.bk", "projections.bv", "projections.bo"},
      {"gradients.projections.bq", "gradients.projections.bk", "gradients.projections.bv", "gradients.projections.bo"}};
  for (int i = 0; i < 4; i++) {
    const qkv_tensor *w = i < QKV__PARTS ? qkv__weight(p, i) : &p->wo, *b = i < QKV__PARTS ? qkv__bias(p, i) : &p->bo;
    const int64_t rows = i < QKV__PARTS ? l->width[i] : l->m.d_out, columns = i < QKV__PARTS ? qkv__input_width(l, i) : l->out_width;
    QKV_TRY(push_checked(r, a, weights[gradients][i], w, l->m.dtype, 1, rows, columns, !gradients, gradients));
    QKV_TRY(push_vector(r, a, biases[gradients][i], b, l->m.dtype, rows, gradients));
  }
  return QKV_OK;
}

static qkv_status check_tensors(const qkv__report *r, const qkv__layer *l, int use) {
  const qkv_multihead *m = &l->m;
  const qkv__side *s = l->side;
  const int forward = use == QKV__FORWARD, backward = use == QKV__BACKWARD;
  list a = {.count = 0};
  QKV_TRY(push_checked(r, &a, "x", &m->x, m->dtype, s[0].batch, s[0].seqlen, m->d_model, 1, 0));
  if (!l->self) QKV_TRY(push_checked(r, &a, "x_kv", &m->x_kv, m->dtype, s[1].batch, s[1].seqlen, m->d_kv, 1, 0));
  QKV_TRY(push_projections(r, &a, l, &m->projections, 0));
  if (forward) QKV_TRY(push_checked(r, &a, "y", &m->y, m->dtype, s[0].batch, s[0].seqlen, m->d_out, 1, 1));
  const qkv_tensor block = qkv_strided(m->activations, QKV_U8, 0, 0, 0, 1);
  push(&a, "activations", &block, 1, 1, 1, (int64_t)l->activation_bytes, forward);
  push(&a, "attention: bias", &l->p.bias, l->p.batch, l->p.num_heads, longest(&s[0]), longest(&s[1]), 0);
  push(&a, "attention: alibi_slopes", &l->p.alibi_slopes, l->p.batch, l->p.num_heads, 1, 1, 0);
  push(&a, "attention: sinks", &l->p.sinks, l->p.batch, l->p.num_heads, 1, 1, 0);
  qkv_tensor tables[2];
  for (int i = 0; i < 2; i++) {
    if (!l->has_rotary[i]) continue;
    tables[i] = qkv_vector(l->rotary[i].table, QKV_F64);
    push(&a, i ? "rotary_k: table" : "rotary_q: table", &tables[i], 1, 1, 1,
         QKV_FREQUENCIES_DOUBLES((int64_t)l->rotary[i].table[MARK]), 0);
    push(&a, i ? "rotary_k: position_ids" : "rotary_q: position_ids", &l->rotary[i].position_ids, s[i].batch, 1, s[i].seqlen, 1, 0);
  }
  if (backward) {
    const qkv_multihead_gradients *g = &l->g;
    const qkv_tensor *d = &g->dbias;
    QKV_TRY(push_checked(r, &a, "gradients.dy", &g->dy, m->dtype, s[0].batch, s[0].seqlen, m->d_out, 1, 0));
    QKV_TRY(push_checked(r, &a, "gradients.dx", &g->dx, m->dtype, s[0].batch, s[0].seqlen, m->d_model, 0, 1));
    if (!l->self) QKV_TRY(push_checked(r, &a, "gradients.dx_kv", &g->dx_kv, m->dtype, s[1].batch, s[1].seqlen, m->d_kv, 0, 1));
    QKV_TRY(push_projections(r, &a, l, &g->projections, 1));
    int64_t n[4] = {l->p.batch, l->p.num_heads, longest(&s[0]), longest(&s[1])};
    for (int k = 0; k < 4; k++) /* an axis of stride 0 is summed over */
      if (d->stride[k] == 0) n[k] = QKV_MIN(n[k], 1);
    push(&a, "gradients.dbias", d, n[0], n[1], n[2], n[3], 1);
    d = &g->dsinks;
    push(&a, "gradients.dsinks", d, d->stride[0] ? n[0] : QKV_MIN(n[0], 1), d->stride[1] ? l->p.num_heads : 1, 1, 1, 1);
  }
  for (int i = 0; i < a.count; i++)
    for (int k = 0; k < i; k++)
      if (a.output[i] || a.output[k]) QKV_TRY(qkv__check_apart(r, &a.t[a.output[i] ? i : k], &a.t[a.output[i] ? k : i]));
  return QKV_OK;
}

static qkv_status check_activations(const qkv__report *r, const qkv__layer *l, int use) {
  const qkv_multihead *m = &l->m;
  if (!m->activations) {
    if (m->activation_bytes)
      return qkv__fail(r, QKV_BAD_POINTER, "activations is NULL, but activation_bytes is %zu", m->activation_bytes);
    if (use != QKV__FORWARD) return qkv__fail(r, QKV_BAD_POINTER, "activations is NULL");
    return QKV_OK;
  }
  if ((uintptr_t)m->activations % 8)
    return qkv__fail(r, QKV_BAD_POINTER, "activations %p is not aligned to 8 bytes", m->activations);
  if (m->activation_bytes < l->activation_bytes)
    return qkv__fail(r, QKV_SCRATCH_TOO_SMALL, "activation_bytes %zu is less than the %zu that are needed", m->activation_bytes,
                     l->activation_bytes);
  return QKV_OK;
}

qkv_status qkv__layer_check(const qkv_multihead *in, const qkv_multihead_gradients *gradients, int use, qkv__layer *l, char *text,
                            size_t bytes) {
  const qkv__report rr = {text, bytes}, *r = &rr;
  if (text && bytes) text[0] = 0;
  memset(l, 0, sizeof *l);
  QKV_TRY(qkv__take_struct(r, "multihead", in, &l->m, sizeof l->m));
  qkv_multihead *m = &l->m;
  if (m->dtype == 0) m->dtype = QKV_F32;
  if (m->dtype != QKV_F32 && m->dtype != QKV_F64)
    return qkv__fail(r, QKV_BAD_DTYPE, "dtype is %s, but f32 or f64 is needed here", qkv__dtype_name(m->dtype));
  if (m->gemm != QKV_GEMM_WHOLE && m->gemm != QKV_GEMM_TASKS)
    return qkv__fail(r, QKV_BAD_VALUE, "gemm %" PRId32 " is neither QKV_GEMM_WHOLE nor QKV_GEMM_TASKS", m->gemm);
  if (m->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "reserved %" PRId32 " is not 0", m->reserved);
  if (use == QKV__BACKWARD && !gradients) return qkv__fail(r, QKV_BAD_POINTER, "gradients is NULL");
  if (gradients) {
    QKV_TRY(qkv__take_struct(r, "gradients", gradients, &l->g, sizeof l->g));
    if (l->g.accumulate & ~(QKV_DX | QKV_DX_KV | QKV_DPROJECTIONS | QKV_DBIAS | QKV_DSINKS))
      return qkv__fail(r, QKV_UNKNOWN_FIELD, "gradients.accumulate 0x%" PRIx32 " has bits this version does not know",
                       (uint32_t)l->g.accumulate);
  }
  l->element = qkv__dtype_bytes(m->dtype);
  l->self = m->d_kv == 0;
  QKV_TRY(check_width(r, "d_model", m->d_model, 1));
  QKV_TRY(check_width(r, "d_kv", m->d_kv, 0));
  QKV_TRY(check_width(r, "d_out", m->d_out, 0));
  if (l->self) m->d_kv = m->d_model;
  if (m->d_out == 0) m->d_out = m->d_model;
  if (l->self && m->x_kv.data) return qkv__fail(r, QKV_BAD_POINTER, "x_kv.data is given, but d_kv is 0: self-attention");
  if (l->self && l->g.dx_kv.data) return qkv__fail(r, QKV_BAD_POINTER, "gradients.dx_kv.data is given, but d_kv is 0: self-attention");
  QKV_TRY(take_attention(r, l));
  QKV_TRY(check_attention(r, l));
  const qkv_problem *p = &l->p;
  const int64_t widths[] = {p->num_heads * p->head_dim, p->num_kv_heads * p->head_dim, p->num_kv_heads * p->head_dim_v,
                            p->num_heads * p->head_dim_v}; /* heads and dims are checked: each below 2^31 and 2^20 */
  static const char *const products[] = {"num_heads x head_dim", "num_kv_heads x head_dim", "num_kv_heads x head_dim_v",
                                         "num_heads x head_dim_v"};
  for (int i = 0; i < 4; i++) QKV_TRY(check_width(r, products[i], widths[i], 0));
  if (l->self) QKV_TRY(check_width(r, "rows of wq, wk and wv", widths[0] + widths[1] + widths[2], 0));
  memcpy(l->width, widths, sizeof l->width);
  l->out_width = widths[3];
  QKV_TRY(make_sides(r, l));
  QKV_TRY(check_mask_extents(r, l));
  for (int i = 0; i < 2; i++) QKV_TRY(take_rotary(r, l, i));

  qkv__carver c = {NULL, 0, 0};
  carve_activations(l, &c, NULL);
  if (c.overflow) return qkv__fail(r, QKV_TOO_LARGE, "the activations do not fit the address space");
  l->activation_bytes = c.used;
  if (use == QKV__MEASURES) return QKV_OK;
  QKV_TRY(check_activations(r, l, use));
  return use == QKV__VIEWS ? QKV_OK : check_tensors(r, l, use);
}

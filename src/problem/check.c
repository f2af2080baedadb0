/* Every check of what a caller passes, and the defaults. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/order1.h"
#include "base/size.h"
#include "mask/mask.h"
#include "problem/problem.h"
#include "problem/tensor.h"

size_t qkv__dtype_bytes(int32_t dtype) {
  static const unsigned char bytes[] = {0, 4, 8, 2, 2, 1, 4, 1};
  return dtype > 0 && dtype < (int32_t)sizeof bytes ? bytes[dtype] : 0;
}
const char *qkv__dtype_name(int32_t dtype) {
  static const char *const names[] = {"none", "f32", "f64", "bf16", "f16", "i8", "i32", "u8"};
  return dtype >= 0 && dtype < 8 ? names[dtype] : "unknown";
}

qkv_status qkv__check_context(const qkv_context *in, qkv_context *out, char *text, size_t bytes) {
  qkv__report rr = {text, bytes}, *r = &rr;
  memset(out, 0, sizeof *out);
  if (in) QKV_TRY(qkv__take_struct(r, "context", in, out, sizeof *out));
  out->size = sizeof *out;
  if (out->num_workers < 0) return qkv__fail(r, QKV_BAD_CONTEXT, "context.num_workers %" PRId32 " is negative", out->num_workers);
  if (out->num_workers == 0 || !out->parallel_for) out->num_workers = 1;
  if (!out->alloc != !out->release)
    return qkv__fail(r, QKV_BAD_CONTEXT, "context.alloc and context.release: only one of them is given");
  if (out->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "context.reserved %" PRId32 " is not 0", out->reserved);
  if (out->flags & ~127u)
    return qkv__fail(r, QKV_UNKNOWN_FIELD, "context.flags 0x%" PRIx32 " has bits this version does not know", out->flags);
  return QKV_OK;
}

/* ---- Lengths ---- */

static qkv_status check_cu(const qkv__report *r, const char *name, const int32_t *cu, int64_t batch, const char *extent_name,
                           int64_t extent) {
  if (cu[0] != 0) return qkv__fail(r, QKV_BAD_LENGTHS, "%s[0] is %" PRId32 ", not 0", name, cu[0]);
  for (int64_t b = 0; b < batch; b++)
    if (cu[b + 1] < cu[b])
      return qkv__fail(r, QKV_BAD_LENGTHS, "%s[%" PRId64 "] %" PRId32 " is less than %s[%" PRId64 "] %" PRId32, name, b + 1,
                  cu[b + 1], name, b, cu[b]);
  if (cu[batch] != extent)
    return qkv__fail(r, QKV_BAD_LENGTHS, "%s[%" PRId64 "] %" PRId32 " is not %s %" PRId64, name, batch, cu[batch], extent_name,
                extent);
  return QKV_OK;
}

static qkv_status check_entries(const qkv__report *r, const qkv__problem *q) {
  const qkv_problem *p = &q->p;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t rows = p->cu_seqlens_q ? p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b] : p->seqlen_q;
    int64_t keys = p->cu_seqlens_kv ? p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b] : p->seqlen_kv;
    if (p->q_length && (p->q_length[b] < 0 || p->q_length[b] > rows))
      return qkv__fail(r, QKV_BAD_LENGTHS, "q_length[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64, b, p->q_length[b], rows);
    if (p->kv_length && (p->kv_length[b] < 0 || p->kv_length[b] > keys))
      return qkv__fail(r, QKV_BAD_LENGTHS, "kv_length[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64, b, p->kv_length[b], keys);
    int64_t end = p->kv_length ? p->kv_length[b] : keys;
    if (p->kv_begin && (p->kv_begin[b] < 0 || p->kv_begin[b] > end))
      return qkv__fail(r, QKV_BAD_LENGTHS, "kv_begin[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64 " (the entry's kv_length)",
                  b, p->kv_begin[b], end);
    if (p->kv_position && p->kv_position[b] < 0)
      return qkv__fail(r, QKV_BAD_LENGTHS, "kv_position[%" PRId64 "] %" PRId32 " is negative", b, p->kv_position[b]);
    qkv__entry e;
    qkv__entry_of(q, b, &e);
    if (e.position_k + (e.b1 - e.b0) > INT32_MAX)
      return qkv__fail(r, QKV_BAD_LENGTHS,
                  "entry %" PRId64 ": kv_position %" PRId64 " and %" PRId64 " keys pass the position limit 2^31 - 1", b,
                  e.position_k, e.b1 - e.b0);
    if (e.position_q < INT32_MIN || e.position_q + e.nq > INT32_MAX)
      return qkv__fail(r, QKV_BAD_LENGTHS, "entry %" PRId64 ": query positions %" PRId64 "..%" PRId64 " do not fit 32 bits", b,
                  e.position_q, e.position_q + e.nq);
  }
  return QKV_OK;
}

void qkv__entry_of(const qkv__problem *q, int64_t b, qkv__entry *e) {
  const qkv_problem *p = &q->p;
  int64_t keys = p->seqlen_kv;
  e->b = b;
  e->batch_q = e->batch_kv = b;
  e->row0_q = e->row0_kv = 0;
  e->rows = p->seqlen_q;
  if (p->cu_seqlens_q) {
    e->batch_q = 0;
    e->row0_q = p->cu_seqlens_q[b];
    e->rows = p->cu_seqlens_q[b + 1] - e->row0_q;
  }
  if (p->cu_seqlens_kv) {
    e->batch_kv = 0;
    e->row0_kv = p->cu_seqlens_kv[b];
    keys = p->cu_seqlens_kv[b + 1] - e->row0_kv;
  }
  e->nq = p->q_length ? p->q_length[b] : e->rows;
  e->b1 = p->kv_length ? p->kv_length[b] : keys;
  e->b0 = p->kv_begin ? p->kv_begin[b] : 0;
  e->position_k = p->kv_position ? p->kv_position[b] : 0;
  e->start_q = e->position_k - e->b0;
  if (p->align == QKV_ALIGN_START)
    e->position_q = e->start_q;
  else if (p->align == QKV_ALIGN_EXPLICIT)
    e->position_q = p->q_position ? p->q_position[b] : 0;
  else
    e->position_q = e->position_k + (e->b1 - e->b0) - e->nq;
}

void qkv__row_of(const qkv__problem *q, int64_t index, qkv__entry *e, int64_t *h, int64_t *i) {
  const qkv_problem *p = &q->p;
  int64_t b = 0;
  *i = index % p->seqlen_q;
  *h = index / p->seqlen_q % p->num_heads;
  if (p->cu_seqlens_q) {
    while (p->cu_seqlens_q[b + 1] <= *i) b++;
    *i -= p->cu_seqlens_q[b];
  } else
    b = index / p->seqlen_q / p->num_heads;
  qkv__entry_of(q, b, e);
}

/* ---- The problem ---- */

static qkv_status check_extents(const qkv__report *r, qkv__problem *q) {
  qkv_problem *p = &q->p;
  const struct {
    const char *name;
    int64_t n, limit;
  } extents[] = {{"batch", p->batch, INT32_MAX},
                 {"num_heads", p->num_heads, INT32_MAX},
                 {"num_kv_heads", p->num_kv_heads, INT32_MAX},
                 {"seqlen_q", p->seqlen_q, INT32_MAX},
                 {"seqlen_kv", p->seqlen_kv, INT32_MAX},
                 {"head_dim", p->head_dim, 1 << 20},
                 {"head_dim_v", p->head_dim_v, 1 << 20}};
  for (size_t i = 0; i < sizeof extents / sizeof *extents; i++) {
    if (extents[i].n < 0) return qkv__fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is negative", extents[i].name, extents[i].n);
    if (extents[i].n > extents[i].limit)
      return qkv__fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is above the limit %" PRId64, extents[i].name, extents[i].n,
                  extents[i].limit);
  }
  if (p->head_dim == 0) return qkv__fail(r, QKV_BAD_EXTENT, "head_dim is 0; it must be at least 1");
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  if (p->num_kv_heads == 0) p->num_kv_heads = p->num_heads;
  if (p->num_kv_heads != 0 && p->num_heads % p->num_kv_heads != 0)
    return qkv__fail(r, QKV_BAD_EXTENT, "num_heads %" PRId64 " is not a multiple of num_kv_heads %" PRId64, p->num_heads,
                p->num_kv_heads);
  q->group = p->num_kv_heads ? p->num_heads / p->num_kv_heads : 1;
  if (q->group == 0) q->group = 1;
  int64_t rows;
  if (!qkv__mul(p->cu_seqlens_q ? 1 : p->batch, p->num_heads, &rows) || !qkv__mul(rows, p->seqlen_q, &rows))
    return qkv__fail(r, QKV_TOO_LARGE, "batch %" PRId64 " x num_heads %" PRId64 " x seqlen_q %" PRId64 " does not fit 63 bits",
                p->batch, p->num_heads, p->seqlen_q);
  q->rows = rows;
  return QKV_OK;
}

static qkv_status check_numbers(const qkv__report *r, qkv__problem *q) {
  qkv_problem *p = &q->p;
  if (!isfinite(p->softmax_scale)) return qkv__fail(r, QKV_BAD_VALUE, "softmax_scale %g is not finite", p->softmax_scale);
  if (!isfinite(p->softcap) || p->softcap < 0)
    return qkv__fail(r, QKV_BAD_VALUE, "softcap %g is not a finite number >= 0", p->softcap);
  if (p->softmax_scale == 0) p->softmax_scale = 1 / sqrt((double)p->head_dim);
  if (p->softcap == 0) {
    q->c = qkv__round(q, p->softmax_scale * QKV_LOG2E);
    q->g = 0;
  } else {
    q->c = qkv__round(q, p->softmax_scale / p->softcap);
    q->g = qkv__round(q, p->softcap * QKV_LOG2E);
  }
  if (!isfinite(q->c) || !isfinite(q->g))
    return qkv__fail(r, QKV_BAD_VALUE, "softmax_scale %g with softcap %g overflows %s", p->softmax_scale, p->softcap,
                q->f64 ? "f64" : "f32");
  if (!(p->dropout >= 0 && p->dropout <= 1)) return qkv__fail(r, QKV_BAD_VALUE, "dropout %g is not in 0..1", p->dropout);
  q->keep = qkv__round(q, 1 - p->dropout);
  q->r = p->dropout == 1 ? 0 : qkv__round(q, 1 / (1 - p->dropout));
  q->drop = (uint64_t)floor(p->dropout * 0x1p32);
  if (p->batch_origin < 0) return qkv__fail(r, QKV_BAD_VALUE, "batch_origin %" PRId64 " is negative", p->batch_origin);
  if (p->head_origin < 0) return qkv__fail(r, QKV_BAD_VALUE, "head_origin %" PRId64 " is negative", p->head_origin);
  if (p->heads_total == 0) p->heads_total = p->num_heads;
  if (p->heads_total < p->num_heads || p->head_origin > p->heads_total - p->num_heads)
    return qkv__fail(r, QKV_BAD_VALUE, "head_origin %" PRId64 " and num_heads %" PRId64 " are beyond heads_total %" PRId64,
                p->head_origin, p->num_heads, p->heads_total);
  return QKV_OK;
}

enum { INPUTS = 6 };
static void list_inputs(const qkv__problem *q, qkv__named *to) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch, bk = p->cu_seqlens_kv ? 1 : p->batch;
  const qkv__named in[INPUTS] = {{"q", &p->q, {bq, p->num_heads, p->seqlen_q, p->head_dim}},
                            {"k", &p->k, {bk, p->num_kv_heads, p->seqlen_kv, p->head_dim}},
                            {"v", &p->v, {bk, p->num_kv_heads, p->seqlen_kv, p->head_dim_v}},
                            {"bias", &p->bias, {p->batch, p->num_heads, q->max_rows, q->max_keys}},
                            {"alibi_slopes", &p->alibi_slopes, {p->batch, p->num_heads, 1, 1}},
                            {"sinks", &p->sinks, {p->batch, p->num_heads, 1, 1}}};
  memcpy(to, in, sizeof in);
}

static int data_types_of(const qkv__problem *q) { return q->f64 ? QKV__F64_BIT : QKV__F32_BIT | QKV__HALF_BITS; }

static void list_results(const qkv__problem *q, qkv__named *out, qkv__named *lse) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch;
  *out = (qkv__named){"out", &p->out, {bq, p->num_heads, p->seqlen_q, p->head_dim_v}};
  *lse = (qkv__named){"lse", &p->lse, {bq, p->num_heads, p->seqlen_q, 1}};
}

static qkv_status check_data(const qkv__report *r, const qkv__problem *q, int uses) {
  const qkv_problem *p = &q->p;
  const int main_type = q->f64 ? QKV__F64_BIT : QKV__F32_BIT, data_types = data_types_of(q), writes = !(uses & QKV__READS_OUT);
  qkv__named out, lse;
  list_results(q, &out, &lse);
  qkv__named in[INPUTS];
  list_inputs(q, in);
  for (int i = 0; i < INPUTS; i++) {
    const int needed = i < 2 ? uses & QKV__USES_QK : i == 2 ? uses & QKV__USES_V : 0;
    if (!needed && !in[i].t->data) continue;
    QKV_TRY(qkv__check_tensor(r, &in[i],
                     i < 3 ? data_types : i == 3 ? data_types | QKV__F32_BIT : QKV__F32_BIT | QKV__F64_BIT,
                     0));
  }
  if (!(uses & QKV__USES_OUT)) return QKV_OK;
  QKV_TRY(qkv__check_tensor(r, &out, data_types, writes));
  if (p->lse.data || !writes) QKV_TRY(qkv__check_tensor(r, &lse, main_type | QKV__F32_BIT, writes));
  if (!writes) return QKV_OK;
  QKV_TRY(qkv__check_apart(r, &out, &lse));
  for (int i = 0; i < INPUTS; i++) {
    QKV_TRY(qkv__check_apart(r, &out, &in[i]));
    QKV_TRY(qkv__check_apart(r, &lse, &in[i]));
  }
  return QKV_OK;
}

static qkv_status check_masks(const qkv__report *r, const qkv__problem *q) {
  const qkv_problem *p = &q->p;
  if (p->mask_count < 0) return qkv__fail(r, QKV_BAD_MASK, "mask_count %" PRId64 " is negative", p->mask_count);
  if (p->mask_count && !p->mask) return qkv__fail(r, QKV_BAD_POINTER, "mask is NULL, but mask_count is %" PRId64, p->mask_count);
  for (int64_t i = 0; i < p->mask_count; i++) {
    const qkv_mask *m = &p->mask[i];
    char name[48];
    snprintf(name, sizeof name, "mask[%" PRId64 "]", i);
    if (m->kind < 1 || m->kind >= QKV_MASK_KINDS)
      return qkv__fail(r, QKV_BAD_MASK, "%s.kind %" PRId32 " is not a mask kind", name, m->kind);
    if (m->join != QKV_AND && m->join != QKV_OR)
      return qkv__fail(r, QKV_BAD_MASK, "%s.join %" PRId32 " is neither QKV_AND nor QKV_OR", name, m->join);
    if (i == 0 && m->join == QKV_OR) return qkv__fail(r, QKV_BAD_MASK, "%s.join is QKV_OR, but there is no term before it", name);
    if (m->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "%s.reserved %" PRId64 " is not 0", name, m->reserved);
    const qkv__mask_kind *kind = &qkv__mask_kinds[m->kind];
    char part[64];
    qkv__named t = {part, &m->t, {0}}, u = {part, &m->u, {0}};
    qkv__mask_extents(p, q->max_rows, q->max_keys, m, t.n, u.n);
    snprintf(part, sizeof part, "%s.t", name);
    if (kind->t_types && m->t.data) QKV_TRY(qkv__check_tensor(r, &t, kind->t_types, 0));
    snprintf(part, sizeof part, "%s.u", name);
    if (kind->t_types && m->u.data) QKV_TRY(qkv__check_tensor(r, &u, kind->t_types, 0));
    char why[160] = "";
    qkv_status s = kind->check(p, m, why, sizeof why);
    if (s != QKV_OK) return qkv__fail(r, s, "%s.%s (%s mask)", name, why, kind->name);
  }
  return QKV_OK;
}

qkv_status qkv__check(const qkv_problem *in, int uses, qkv__problem *q, char *text, size_t bytes) {
  qkv__report rr = {text, bytes}, *r = &rr;
  if (text && bytes) text[0] = 0;
  memset(q, 0, sizeof *q);
  QKV_TRY(qkv__take_struct(r, "problem", in, &q->p, sizeof q->p));
  qkv_problem *p = &q->p;
  if (p->arithmetic != QKV_CANONICAL && p->arithmetic != QKV_FAST)
    return qkv__fail(r, QKV_BAD_VALUE, "arithmetic %" PRId32 " is neither QKV_CANONICAL nor QKV_FAST", p->arithmetic);
  if (p->algorithm != QKV_FLASH && p->algorithm != QKV_STANDARD)
    return qkv__fail(r, QKV_BAD_VALUE, "algorithm %" PRId32 " is neither QKV_FLASH nor QKV_STANDARD", p->algorithm);
  if (p->align < QKV_ALIGN_END || p->align > QKV_ALIGN_EXPLICIT)
    return qkv__fail(r, QKV_BAD_VALUE, "align %" PRId32 " is not a QKV_ALIGN value", p->align);
  if (p->align != QKV_ALIGN_EXPLICIT && p->q_position)
    return qkv__fail(r, QKV_BAD_VALUE, "q_position is given, but align is not QKV_ALIGN_EXPLICIT");
  QKV_TRY(check_extents(r, q));

  const qkv_tensor *main_tensors[4] = {&p->q, &p->k, &p->v, &p->out};
  const char *const main_names[4] = {"q", "k", "v", "out"};
  const int last = uses & QKV__USES_OUT ? 4 : 3;
  for (int i = 0; i < last; i++) q->f64 |= main_tensors[i]->dtype == QKV_F64;
  for (int i = 0; i < last; i++) /* f64 is all or none */
    if (q->f64 && main_tensors[i]->data && main_tensors[i]->dtype != QKV_F64 && qkv__dtype_bytes(main_tensors[i]->dtype))
      return qkv__fail(r, QKV_BAD_DTYPE, "%s.dtype is %s, but another of q, k, v, out is f64; all four are f64 or none",
                  main_names[i], qkv__dtype_name(main_tensors[i]->dtype));

  QKV_TRY(check_numbers(r, q));
  if (p->cu_seqlens_q) QKV_TRY(check_cu(r, "cu_seqlens_q", p->cu_seqlens_q, p->batch, "seqlen_q", p->seqlen_q));
  if (p->cu_seqlens_kv) QKV_TRY(check_cu(r, "cu_seqlens_kv", p->cu_seqlens_kv, p->batch, "seqlen_kv", p->seqlen_kv));
  if (!p->cu_seqlens_q) q->max_rows = p->batch ? p->seqlen_q : 0;
  if (!p->cu_seqlens_kv) q->max_keys = p->batch ? p->seqlen_kv : 0;
  for (int64_t b = 0; b < p->batch; b++) {
    if (p->cu_seqlens_q) q->max_rows = QKV_MAX(q->max_rows, p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b]);
    if (p->cu_seqlens_kv) q->max_keys = QKV_MAX(q->max_keys, p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b]);
  }
  QKV_TRY(check_entries(r, q));
  QKV_TRY(check_data(r, q, uses));
  QKV_TRY(check_masks(r, q));
  return QKV_OK;
}

/* The tensors of the gradients: two inputs, then the outputs in the order of QKV_D... */
enum { GRADIENT_INPUTS = 2, GRADIENTS = 7 };
static void list_gradients(const qkv__problem *q, const qkv_gradients *g, qkv__named *to) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch, bk = p->cu_seqlens_kv ? 1 : p->batch;
  const qkv__named all[GRADIENTS] = {
      {"gradients.dout", &g->dout, {bq, p->num_heads, p->seqlen_q, p->head_dim_v}},
      {"gradients.dlse", &g->dlse, {bq, p->num_heads, p->seqlen_q, 1}},
      {"gradients.dq", &g->dq, {bq, p->num_heads, p->seqlen_q, p->head_dim}},
      {"gradients.dk", &g->dk, {bk, p->num_kv_heads, p->seqlen_kv, p->head_dim}},
      {"gradients.dv", &g->dv, {bk, p->num_kv_heads, p->seqlen_kv, p->head_dim_v}},
      {"gradients.dbias", &g->dbias, {p->batch, p->num_heads, q->max_rows, q->max_keys}},
      {"gradients.dsinks", &g->dsinks, {p->batch, p->num_heads, 1, 1}}};
  memcpy(to, all, sizeof all);
  for (int i = 5; i < GRADIENTS; i++) /* an axis of stride 0 is summed over */
    for (int a = 0; a < 4; a++)
      if (to[i].t->stride[a] == 0 && to[i].n[a] > 1) to[i].n[a] = 1;
}

qkv_status qkv__check_gradients(const qkv_problem *problem, const qkv_gradients *in, int uses, qkv__problem *q,
                                qkv__gradients *out, char *text, size_t bytes) {
  const qkv__report rr = {text, bytes}, *r = &rr;
  memset(out, 0, sizeof *out);
  QKV_TRY(qkv__check(problem, uses ? uses | QKV__READS_OUT : 0, q, text, bytes));
  if (in)
    QKV_TRY(qkv__take_struct(r, "gradients", in, &out->g, sizeof out->g));
  else if (uses)
    return qkv__fail(r, QKV_BAD_POINTER, "gradients is NULL");
  qkv_gradients *g = &out->g;
  if (g->accumulate & ~(QKV_DQ | QKV_DK | QKV_DV | QKV_DBIAS | QKV_DSINKS))
    return qkv__fail(r, QKV_UNKNOWN_FIELD, "gradients.accumulate 0x%" PRIx32 " has bits this version does not know",
                (uint32_t)g->accumulate);
  qkv__named all[GRADIENTS], problem_tensors[INPUTS + 2];
  list_gradients(q, g, all);
  list_inputs(q, problem_tensors);
  list_results(q, &problem_tensors[INPUTS], &problem_tensors[INPUTS + 1]);
  if (!in) out->wanted = QKV_DQ | QKV_DK | QKV_DV;
  for (int i = GRADIENT_INPUTS; i < GRADIENTS; i++)
    if (all[i].t->data) out->wanted |= 1 << (i - GRADIENT_INPUTS);
  if ((out->wanted & QKV_DBIAS) && uses && !q->p.bias.data)
    return qkv__fail(r, QKV_BAD_POINTER, "gradients.dbias is given, but bias.data is NULL");
  if ((out->wanted & QKV_DSINKS) && uses && !q->p.sinks.data)
    return qkv__fail(r, QKV_BAD_POINTER, "gradients.dsinks is given, but sinks.data is NULL");
  for (int i = 0; i < GRADIENTS; i++) {
    const int types = i == 1 || i == 6 ? QKV__F32_BIT | QKV__F64_BIT : data_types_of(q);
    if (!all[i].t->data && (i > 0 || !uses)) continue;
    QKV_TRY(qkv__check_tensor(r, &all[i], types, i >= GRADIENT_INPUTS));
  }
  for (int i = GRADIENT_INPUTS; i < GRADIENTS; i++) {
    for (int k = 0; k < i; k++) QKV_TRY(qkv__check_apart(r, &all[i], &all[k]));
    for (int k = 0; k < INPUTS + 2; k++) QKV_TRY(qkv__check_apart(r, &all[i], &problem_tensors[k]));
  }
  return QKV_OK;
}

qkv_status qkv__check_region(const qkv__problem *q, const qkv_region *in, const qkv_tensor *to, qkv_region *out) {
  const qkv__report none = {NULL, 0};
  const qkv_region all = {0, q->p.batch, 0, q->p.num_heads, 0, q->max_rows};
  *out = in ? *in : all;
  if (out->batch_begin < 0 || out->batch_begin > out->batch_end || out->batch_end > all.batch_end) return QKV_BAD_REGION;
  if (out->head_begin < 0 || out->head_begin > out->head_end || out->head_end > all.head_end) return QKV_BAD_REGION;
  if (out->row_begin < 0 || out->row_begin > out->row_end || out->row_end > all.row_end) return QKV_BAD_REGION;
  if (!to) return QKV_BAD_POINTER;
  const qkv__named output = {
      "to", to, {out->batch_end - out->batch_begin, out->head_end - out->head_begin, out->row_end - out->row_begin, q->max_keys}};
  QKV_TRY(qkv__check_tensor(&none, &output, q->f64 ? QKV__F32_BIT | QKV__F64_BIT : QKV__F32_BIT, 1));
  qkv__named input[INPUTS];
  list_inputs(q, input);
  for (int i = 0; i < INPUTS; i++) QKV_TRY(qkv__check_apart(&none, &output, &input[i]));
  return QKV_OK;
}

qkv_status qkv__check_state(const qkv__problem *q, const qkv_state *s) {
  if (!s) return QKV_BAD_POINTER;
  if (s->size != sizeof *s) return QKV_BAD_SIZE;
  if (s->dtype != QKV_F32 && s->dtype != QKV_F64) return QKV_BAD_DTYPE;
  if (s->rows < 0 || s->head_dim_v < 1 || s->count < 0 || s->capacity < s->count) return QKV_BAD_STATE;
  if (s->capacity && (!s->nodes || (s->rows && !s->data))) return QKV_BAD_POINTER;
  for (int64_t i = 0; i < s->count; i++) {
    if (s->nodes[i].level < 0 || s->nodes[i].level > 22 || s->nodes[i].index < 0 ||
        s->nodes[i].index > (1 << 22) >> s->nodes[i].level)
      return QKV_BAD_STATE;
    if (i && (s->nodes[i - 1].index + 1) << s->nodes[i - 1].level > s->nodes[i].index << s->nodes[i].level)
      return QKV_BAD_STATE;
  }
  if (q && (s->rows != q->rows || s->head_dim_v != q->p.head_dim_v || (s->dtype == QKV_F64) != q->f64)) return QKV_BAD_STATE;
  return QKV_OK;
}

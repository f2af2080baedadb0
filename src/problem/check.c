/* Every check of what a caller passes, and the defaults. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/order1.h"
#include "base/size.h"
#include "mask/mask.h"
#include "problem/problem.h"

typedef struct report {
  char *text;
  size_t bytes;
} report;

static qkv_status fail(const report *r, qkv_status status, const char *format, ...) QKV_FORMAT(3, 4);
static qkv_status fail(const report *r, qkv_status status, const char *format, ...) {
  if (r->text && r->bytes) {
    va_list a;
    va_start(a, format);
    vsnprintf(r->text, r->bytes, format, a);
    va_end(a);
  }
  return status;
}

#define TRY(call)                                  \
  do {                                             \
    qkv_status try_status_ = (call);               \
    if (try_status_ != QKV_OK) return try_status_; \
  } while (0)

size_t qkv__dtype_bytes(int32_t dtype) {
  static const unsigned char bytes[] = {0, 4, 8, 2, 2, 1, 4, 1};
  return dtype > 0 && dtype < (int32_t)sizeof bytes ? bytes[dtype] : 0;
}
const char *qkv__dtype_name(int32_t dtype) {
  static const char *const names[] = {"none", "f32", "f64", "bf16", "f16", "i8", "i32", "u8"};
  return dtype >= 0 && dtype < 8 ? names[dtype] : "unknown";
}

/* A struct that may grow: the bytes this version does not know must be zero. Copies min(sizes) over zeros. */
static qkv_status take_struct(const report *r, const char *name, const void *in, void *out, size_t known) {
  uint32_t size;
  if (!in) return fail(r, QKV_BAD_POINTER, "%s is NULL", name);
  memcpy(&size, in, sizeof size);
  if (size < sizeof size || size > 65536)
    return fail(r, QKV_BAD_SIZE,
                "%s.size %" PRIu32 " is not the size of the struct; set it to sizeof, as the _default functions do", name,
                size);
  for (size_t i = known; i < size; i++)
    if (((const unsigned char *)in)[i])
      return fail(r, QKV_UNKNOWN_FIELD,
                  "%s.size %" PRIu32 " is more than the %zu bytes this version knows, and byte %zu is not zero", name, size,
                  known, i);
  memset(out, 0, known);
  memcpy(out, in, size < known ? size : known);
  return QKV_OK;
}

qkv_status qkv__check_context(const qkv_context *in, qkv_context *out, char *text, size_t bytes) {
  report rr = {text, bytes}, *r = &rr;
  memset(out, 0, sizeof *out);
  if (in) TRY(take_struct(r, "context", in, out, sizeof *out));
  out->size = sizeof *out;
  if (out->num_workers < 0) return fail(r, QKV_BAD_CONTEXT, "context.num_workers %" PRId32 " is negative", out->num_workers);
  if (out->num_workers == 0 || !out->parallel_for) out->num_workers = 1;
  if (!out->alloc != !out->release)
    return fail(r, QKV_BAD_CONTEXT, "context.alloc and context.release: only one of them is given");
  if (out->reserved) return fail(r, QKV_UNKNOWN_FIELD, "context.reserved %" PRId32 " is not 0", out->reserved);
  if (out->flags & ~127u)
    return fail(r, QKV_UNKNOWN_FIELD, "context.flags 0x%" PRIx32 " has bits this version does not know", out->flags);
  return QKV_OK;
}

/* ---- Tensors ---- */

enum {
  F32_BIT = 1 << QKV_F32,
  F64_BIT = 1 << QKV_F64,
  I32_BIT = 1 << QKV_I32,
  U8_BIT = 1 << QKV_U8,
  HALF_BITS = 1 << QKV_F16 | 1 << QKV_BF16
};

static const char *types_text(int set) {
  switch (set) {
  case F32_BIT: return "f32";
  case F64_BIT: return "f64";
  case F32_BIT | F64_BIT: return "f32 or f64";
  case F32_BIT | HALF_BITS: return "f32, f16 or bf16";
  case I32_BIT: return "i32";
  default: return "u8";
  }
}

typedef struct extent4 {
  int64_t n[4];
} extent4;

/* Lowest and highest byte offset an access can reach; 0 when the tensor has no elements. */
static int span_of(const qkv_tensor *t, const extent4 *e, int64_t *low, int64_t *high) {
  int64_t size = (int64_t)qkv__dtype_bytes(t->dtype), lo = 0, hi = 0;
  for (int a = 0; a < 4; a++) {
    int64_t s = t->stride[a], reach;
    if (e->n[a] <= 1) continue;
    if (s == INT64_MIN || !qkv__mul(e->n[a] - 1, s < 0 ? -s : s, &reach) || !qkv__mul(reach, size, &reach)) return 0;
    if (!qkv__add(s < 0 ? -lo : hi, reach, &reach) || reach > PTRDIFF_MAX - size) return 0;
    if (s < 0)
      lo = -reach;
    else
      hi = reach;
  }
  if (hi - size > PTRDIFF_MAX + lo) return 0;
  *low = lo;
  *high = hi + size;
  return 1;
}

static int is_empty(const extent4 *e) { return !e->n[0] || !e->n[1] || !e->n[2] || !e->n[3]; }

static qkv_status check_tensor(const report *r, const char *name, const qkv_tensor *t, const extent4 *e, int types,
                               int output) {
  int64_t low, high;
  if (t->reserved) return fail(r, QKV_UNKNOWN_FIELD, "%s.reserved %" PRId32 " is not 0", name, t->reserved);
  if (is_empty(e)) return QKV_OK;
  if (!t->data) return fail(r, QKV_BAD_POINTER, "%s.data is NULL", name);
  if (!qkv__dtype_bytes(t->dtype))
    return fail(r, QKV_BAD_DTYPE, "%s.dtype %" PRId32 " is not an element type", name, t->dtype);
  if (!(types >> t->dtype & 1)) {
    if (t->dtype == QKV_I8)
      return fail(r, QKV_UNSUPPORTED, "%s.dtype %s is not supported by this version", name, qkv__dtype_name(t->dtype));
    return fail(r, QKV_BAD_DTYPE, "%s.dtype is %s, but %s is needed here", name, qkv__dtype_name(t->dtype),
                types_text(types));
  }
  if (!span_of(t, e, &low, &high))
    return fail(r, QKV_BAD_STRIDE,
                "%s: extents %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " with strides %" PRId64 " %" PRId64 " %" PRId64
                " %" PRId64 " reach beyond the address space",
                name, e->n[0], e->n[1], e->n[2], e->n[3], t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
  if (output) { /* axes from the smallest stride up: each must step over all below it */
    int64_t reach = 0, done = 0;
    for (int step = 0; step < 4; step++) {
      int best = -1;
      int64_t s = 0;
      for (int a = 0; a < 4; a++) {
        int64_t x = t->stride[a] < 0 ? -t->stride[a] : t->stride[a];
        if (e->n[a] > 1 && !(done >> a & 1) && (best < 0 || x < s)) best = a, s = x;
      }
      if (best < 0) break;
      if (s <= reach)
        return fail(r, QKV_BAD_STRIDE,
                    "%s overlaps itself: extents %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " with strides %" PRId64
                    " %" PRId64 " %" PRId64 " %" PRId64,
                    name, e->n[0], e->n[1], e->n[2], e->n[3], t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
      reach += (e->n[best] - 1) * s;
      done |= 1 << best;
    }
  }
  return QKV_OK;
}

typedef struct named {
  const char *name;
  const qkv_tensor *t;
  extent4 e;
} named;

/* Whether two tensors of one address range are interleaved like the parts of a fused buffer: both have all larger strides in
 * multiples of a common pitch, and their places within the pitch are apart. */
static int interleaved(const named *a, const named *b, int64_t pitch) {
  const named *x[2] = {a, b};
  int64_t begin[2], length[2];
  for (int i = 0; i < 2; i++) {
    int64_t size = (int64_t)qkv__dtype_bytes(x[i]->t->dtype), low = 0, high = 0;
    for (int k = 0; k < 4; k++) {
      int64_t s = x[i]->t->stride[k] * size, reach = (x[i]->e.n[k] - 1) * s;
      if (x[i]->e.n[k] <= 1 || s % pitch == 0) continue;
      if (reach < 0)
        low += reach;
      else
        high += reach;
    }
    begin[i] = (int64_t)((uintptr_t)x[i]->t->data % (uint64_t)pitch) + low;
    begin[i] = (begin[i] % pitch + pitch) % pitch;
    length[i] = high - low + size;
  }
  int64_t ahead = (begin[1] - begin[0] + pitch) % pitch;
  return ahead >= length[0] && pitch - ahead >= length[1];
}

static qkv_status check_apart(const report *r, const named *a, const named *b) {
  int64_t al, ah, bl, bh;
  if (!a->t->data || !b->t->data || is_empty(&a->e) || is_empty(&b->e)) return QKV_OK;
  if (!span_of(a->t, &a->e, &al, &ah) || !span_of(b->t, &b->e, &bl, &bh)) return QKV_OK;
  uintptr_t a0 = (uintptr_t)a->t->data + (uintptr_t)al, a1 = (uintptr_t)a->t->data + (uintptr_t)ah;
  uintptr_t b0 = (uintptr_t)b->t->data + (uintptr_t)bl, b1 = (uintptr_t)b->t->data + (uintptr_t)bh;
  if (a1 <= b0 || b1 <= a0) return QKV_OK;
  for (int k = 0; k < 3; k++) {
    int64_t s = a->t->stride[k] * (int64_t)qkv__dtype_bytes(a->t->dtype);
    if (a->e.n[k] > 1 && s != 0 && interleaved(a, b, s < 0 ? -s : s)) return QKV_OK;
  }
  return fail(r, QKV_BAD_OVERLAP, "%s overlaps %s in memory", a->name, b->name);
}

/* ---- Lengths ---- */

static qkv_status check_cu(const report *r, const char *name, const int32_t *cu, int64_t batch, const char *extent_name,
                           int64_t extent) {
  if (cu[0] != 0) return fail(r, QKV_BAD_LENGTHS, "%s[0] is %" PRId32 ", not 0", name, cu[0]);
  for (int64_t b = 0; b < batch; b++)
    if (cu[b + 1] < cu[b])
      return fail(r, QKV_BAD_LENGTHS, "%s[%" PRId64 "] %" PRId32 " is less than %s[%" PRId64 "] %" PRId32, name, b + 1,
                  cu[b + 1], name, b, cu[b]);
  if (cu[batch] != extent)
    return fail(r, QKV_BAD_LENGTHS, "%s[%" PRId64 "] %" PRId32 " is not %s %" PRId64, name, batch, cu[batch], extent_name,
                extent);
  return QKV_OK;
}

static qkv_status check_entries(const report *r, const qkv__problem *q) {
  const qkv_problem *p = &q->p;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t rows = p->cu_seqlens_q ? p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b] : p->seqlen_q;
    int64_t keys = p->cu_seqlens_kv ? p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b] : p->seqlen_kv;
    if (p->q_length && (p->q_length[b] < 0 || p->q_length[b] > rows))
      return fail(r, QKV_BAD_LENGTHS, "q_length[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64, b, p->q_length[b], rows);
    if (p->kv_length && (p->kv_length[b] < 0 || p->kv_length[b] > keys))
      return fail(r, QKV_BAD_LENGTHS, "kv_length[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64, b, p->kv_length[b], keys);
    int64_t end = p->kv_length ? p->kv_length[b] : keys;
    if (p->kv_begin && (p->kv_begin[b] < 0 || p->kv_begin[b] > end))
      return fail(r, QKV_BAD_LENGTHS, "kv_begin[%" PRId64 "] %" PRId32 " is not in 0..%" PRId64 " (the entry's kv_length)",
                  b, p->kv_begin[b], end);
    if (p->kv_position && p->kv_position[b] < 0)
      return fail(r, QKV_BAD_LENGTHS, "kv_position[%" PRId64 "] %" PRId32 " is negative", b, p->kv_position[b]);
    qkv__entry e;
    qkv__entry_of(q, b, &e);
    if (e.position_k + (e.b1 - e.b0) > INT32_MAX)
      return fail(r, QKV_BAD_LENGTHS,
                  "entry %" PRId64 ": kv_position %" PRId64 " and %" PRId64 " keys pass the position limit 2^31 - 1", b,
                  e.position_k, e.b1 - e.b0);
    if (e.position_q < INT32_MIN || e.position_q + e.nq > INT32_MAX)
      return fail(r, QKV_BAD_LENGTHS, "entry %" PRId64 ": query positions %" PRId64 "..%" PRId64 " do not fit 32 bits", b,
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

static qkv_status check_extents(const report *r, qkv__problem *q) {
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
    if (extents[i].n < 0) return fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is negative", extents[i].name, extents[i].n);
    if (extents[i].n > extents[i].limit)
      return fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is above the limit %" PRId64, extents[i].name, extents[i].n,
                  extents[i].limit);
  }
  if (p->head_dim == 0) return fail(r, QKV_BAD_EXTENT, "head_dim is 0; it must be at least 1");
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  if (p->num_kv_heads == 0) p->num_kv_heads = p->num_heads;
  if (p->num_kv_heads != 0 && p->num_heads % p->num_kv_heads != 0)
    return fail(r, QKV_BAD_EXTENT, "num_heads %" PRId64 " is not a multiple of num_kv_heads %" PRId64, p->num_heads,
                p->num_kv_heads);
  q->group = p->num_kv_heads ? p->num_heads / p->num_kv_heads : 1;
  if (q->group == 0) q->group = 1;
  int64_t rows;
  if (!qkv__mul(p->cu_seqlens_q ? 1 : p->batch, p->num_heads, &rows) || !qkv__mul(rows, p->seqlen_q, &rows))
    return fail(r, QKV_TOO_LARGE, "batch %" PRId64 " x num_heads %" PRId64 " x seqlen_q %" PRId64 " does not fit 63 bits",
                p->batch, p->num_heads, p->seqlen_q);
  q->rows = rows;
  return QKV_OK;
}

static qkv_status check_numbers(const report *r, qkv__problem *q) {
  qkv_problem *p = &q->p;
  if (!isfinite(p->softmax_scale)) return fail(r, QKV_BAD_VALUE, "softmax_scale %g is not finite", p->softmax_scale);
  if (!isfinite(p->softcap) || p->softcap < 0)
    return fail(r, QKV_BAD_VALUE, "softcap %g is not a finite number >= 0", p->softcap);
  if (p->softmax_scale == 0) p->softmax_scale = 1 / sqrt((double)p->head_dim);
  if (p->softcap == 0) {
    q->c = qkv__round(q, p->softmax_scale * QKV_LOG2E);
    q->g = 0;
  } else {
    q->c = qkv__round(q, p->softmax_scale / p->softcap);
    q->g = qkv__round(q, p->softcap * QKV_LOG2E);
  }
  if (!isfinite(q->c) || !isfinite(q->g))
    return fail(r, QKV_BAD_VALUE, "softmax_scale %g with softcap %g overflows %s", p->softmax_scale, p->softcap,
                q->f64 ? "f64" : "f32");
  if (!(p->dropout >= 0 && p->dropout <= 1)) return fail(r, QKV_BAD_VALUE, "dropout %g is not in 0..1", p->dropout);
  q->keep = qkv__round(q, 1 - p->dropout);
  q->r = p->dropout == 1 ? 0 : qkv__round(q, 1 / (1 - p->dropout));
  q->drop = (uint64_t)floor(p->dropout * 0x1p32);
  if (p->batch_origin < 0) return fail(r, QKV_BAD_VALUE, "batch_origin %" PRId64 " is negative", p->batch_origin);
  if (p->head_origin < 0) return fail(r, QKV_BAD_VALUE, "head_origin %" PRId64 " is negative", p->head_origin);
  if (p->heads_total == 0) p->heads_total = p->num_heads;
  if (p->heads_total < p->num_heads || p->head_origin > p->heads_total - p->num_heads)
    return fail(r, QKV_BAD_VALUE, "head_origin %" PRId64 " and num_heads %" PRId64 " are beyond heads_total %" PRId64,
                p->head_origin, p->num_heads, p->heads_total);
  return QKV_OK;
}

enum { INPUTS = 6 };
static void list_inputs(const qkv__problem *q, named *to) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch, bk = p->cu_seqlens_kv ? 1 : p->batch;
  const named in[INPUTS] = {{"q", &p->q, {{bq, p->num_heads, p->seqlen_q, p->head_dim}}},
                            {"k", &p->k, {{bk, p->num_kv_heads, p->seqlen_kv, p->head_dim}}},
                            {"v", &p->v, {{bk, p->num_kv_heads, p->seqlen_kv, p->head_dim_v}}},
                            {"bias", &p->bias, {{p->batch, p->num_heads, q->max_rows, q->max_keys}}},
                            {"alibi_slopes", &p->alibi_slopes, {{p->batch, p->num_heads, 1, 1}}},
                            {"sinks", &p->sinks, {{p->batch, p->num_heads, 1, 1}}}};
  memcpy(to, in, sizeof in);
}

static int data_types_of(const qkv__problem *q) { return q->f64 ? F64_BIT : F32_BIT | HALF_BITS; }

static void list_results(const qkv__problem *q, named *out, named *lse) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch;
  *out = (named){"out", &p->out, {{bq, p->num_heads, p->seqlen_q, p->head_dim_v}}};
  *lse = (named){"lse", &p->lse, {{bq, p->num_heads, p->seqlen_q, 1}}};
}

static qkv_status check_data(const report *r, const qkv__problem *q, int uses) {
  const qkv_problem *p = &q->p;
  const int main_type = q->f64 ? F64_BIT : F32_BIT, data_types = data_types_of(q), writes = !(uses & QKV__READS_OUT);
  named out, lse;
  list_results(q, &out, &lse);
  named in[INPUTS];
  list_inputs(q, in);
  for (int i = 0; i < INPUTS; i++) {
    const int needed = i < 2 ? uses & QKV__USES_QK : i == 2 ? uses & QKV__USES_V : 0;
    if (!needed && !in[i].t->data) continue;
    TRY(check_tensor(r, in[i].name, in[i].t, &in[i].e,
                     i < 3 ? data_types : i == 3 ? data_types | F32_BIT : F32_BIT | F64_BIT,
                     0));
  }
  if (!(uses & QKV__USES_OUT)) return QKV_OK;
  TRY(check_tensor(r, out.name, out.t, &out.e, data_types, writes));
  if (p->lse.data || !writes) TRY(check_tensor(r, lse.name, lse.t, &lse.e, main_type | F32_BIT, writes));
  if (!writes) return QKV_OK;
  TRY(check_apart(r, &out, &lse));
  for (int i = 0; i < INPUTS; i++) {
    TRY(check_apart(r, &out, &in[i]));
    TRY(check_apart(r, &lse, &in[i]));
  }
  return QKV_OK;
}

static qkv_status check_masks(const report *r, const qkv__problem *q) {
  const qkv_problem *p = &q->p;
  if (p->mask_count < 0) return fail(r, QKV_BAD_MASK, "mask_count %" PRId64 " is negative", p->mask_count);
  if (p->mask_count && !p->mask) return fail(r, QKV_BAD_POINTER, "mask is NULL, but mask_count is %" PRId64, p->mask_count);
  for (int64_t i = 0; i < p->mask_count; i++) {
    const qkv_mask *m = &p->mask[i];
    char name[48];
    snprintf(name, sizeof name, "mask[%" PRId64 "]", i);
    if (m->kind < 1 || m->kind >= QKV_MASK_KINDS)
      return fail(r, QKV_BAD_MASK, "%s.kind %" PRId32 " is not a mask kind", name, m->kind);
    if (m->join != QKV_AND && m->join != QKV_OR)
      return fail(r, QKV_BAD_MASK, "%s.join %" PRId32 " is neither QKV_AND nor QKV_OR", name, m->join);
    if (i == 0 && m->join == QKV_OR) return fail(r, QKV_BAD_MASK, "%s.join is QKV_OR, but there is no term before it", name);
    if (m->reserved) return fail(r, QKV_UNKNOWN_FIELD, "%s.reserved %" PRId64 " is not 0", name, m->reserved);
    const qkv__mask_kind *kind = &qkv__mask_kinds[m->kind];
    extent4 te, ue;
    char part[64];
    qkv__mask_extents(p, q->max_rows, q->max_keys, m, te.n, ue.n);
    snprintf(part, sizeof part, "%s.t", name);
    if (kind->t_types && m->t.data) TRY(check_tensor(r, part, &m->t, &te, kind->t_types, 0));
    snprintf(part, sizeof part, "%s.u", name);
    if (kind->t_types && m->u.data) TRY(check_tensor(r, part, &m->u, &ue, kind->t_types, 0));
    char why[160] = "";
    qkv_status s = kind->check(p, m, why, sizeof why);
    if (s != QKV_OK) return fail(r, s, "%s.%s (%s mask)", name, why, kind->name);
  }
  return QKV_OK;
}

qkv_status qkv__check(const qkv_problem *in, int uses, qkv__problem *q, char *text, size_t bytes) {
  report rr = {text, bytes}, *r = &rr;
  if (text && bytes) text[0] = 0;
  memset(q, 0, sizeof *q);
  TRY(take_struct(r, "problem", in, &q->p, sizeof q->p));
  qkv_problem *p = &q->p;
  if (p->arithmetic != QKV_CANONICAL && p->arithmetic != QKV_FAST)
    return fail(r, QKV_BAD_VALUE, "arithmetic %" PRId32 " is neither QKV_CANONICAL nor QKV_FAST", p->arithmetic);
  if (p->algorithm != QKV_FLASH && p->algorithm != QKV_STANDARD)
    return fail(r, QKV_BAD_VALUE, "algorithm %" PRId32 " is neither QKV_FLASH nor QKV_STANDARD", p->algorithm);
  if (p->align < QKV_ALIGN_END || p->align > QKV_ALIGN_EXPLICIT)
    return fail(r, QKV_BAD_VALUE, "align %" PRId32 " is not a QKV_ALIGN value", p->align);
  if (p->align != QKV_ALIGN_EXPLICIT && p->q_position)
    return fail(r, QKV_BAD_VALUE, "q_position is given, but align is not QKV_ALIGN_EXPLICIT");
  TRY(check_extents(r, q));

  const qkv_tensor *main_tensors[4] = {&p->q, &p->k, &p->v, &p->out};
  const char *const main_names[4] = {"q", "k", "v", "out"};
  const int last = uses & QKV__USES_OUT ? 4 : 3;
  for (int i = 0; i < last; i++) q->f64 |= main_tensors[i]->dtype == QKV_F64;
  for (int i = 0; i < last; i++) /* f64 is all or none */
    if (q->f64 && main_tensors[i]->data && main_tensors[i]->dtype != QKV_F64 && qkv__dtype_bytes(main_tensors[i]->dtype))
      return fail(r, QKV_BAD_DTYPE, "%s.dtype is %s, but another of q, k, v, out is f64; all four are f64 or none",
                  main_names[i], qkv__dtype_name(main_tensors[i]->dtype));

  TRY(check_numbers(r, q));
  if (p->cu_seqlens_q) TRY(check_cu(r, "cu_seqlens_q", p->cu_seqlens_q, p->batch, "seqlen_q", p->seqlen_q));
  if (p->cu_seqlens_kv) TRY(check_cu(r, "cu_seqlens_kv", p->cu_seqlens_kv, p->batch, "seqlen_kv", p->seqlen_kv));
  if (!p->cu_seqlens_q) q->max_rows = p->batch ? p->seqlen_q : 0;
  if (!p->cu_seqlens_kv) q->max_keys = p->batch ? p->seqlen_kv : 0;
  for (int64_t b = 0; b < p->batch; b++) {
    if (p->cu_seqlens_q) q->max_rows = QKV_MAX(q->max_rows, p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b]);
    if (p->cu_seqlens_kv) q->max_keys = QKV_MAX(q->max_keys, p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b]);
  }
  TRY(check_entries(r, q));
  TRY(check_data(r, q, uses));
  TRY(check_masks(r, q));
  return QKV_OK;
}

/* The tensors of the gradients: two inputs, then the outputs in the order of QKV_D... */
enum { GRADIENT_INPUTS = 2, GRADIENTS = 7 };
static void list_gradients(const qkv__problem *q, const qkv_gradients *g, named *to) {
  const qkv_problem *p = &q->p;
  const int64_t bq = p->cu_seqlens_q ? 1 : p->batch, bk = p->cu_seqlens_kv ? 1 : p->batch;
  const named all[GRADIENTS] = {
      {"gradients.dout", &g->dout, {{bq, p->num_heads, p->seqlen_q, p->head_dim_v}}},
      {"gradients.dlse", &g->dlse, {{bq, p->num_heads, p->seqlen_q, 1}}},
      {"gradients.dq", &g->dq, {{bq, p->num_heads, p->seqlen_q, p->head_dim}}},
      {"gradients.dk", &g->dk, {{bk, p->num_kv_heads, p->seqlen_kv, p->head_dim}}},
      {"gradients.dv", &g->dv, {{bk, p->num_kv_heads, p->seqlen_kv, p->head_dim_v}}},
      {"gradients.dbias", &g->dbias, {{p->batch, p->num_heads, q->max_rows, q->max_keys}}},
      {"gradients.dsinks", &g->dsinks, {{p->batch, p->num_heads, 1, 1}}}};
  memcpy(to, all, sizeof all);
  for (int i = 5; i < GRADIENTS; i++) /* an axis of stride 0 is summed over */
    for (int a = 0; a < 4; a++)
      if (to[i].t->stride[a] == 0 && to[i].e.n[a] > 1) to[i].e.n[a] = 1;
}

qkv_status qkv__check_gradients(const qkv_problem *problem, const qkv_gradients *in, int uses, qkv__problem *q,
                                qkv__gradients *out, char *text, size_t bytes) {
  const report rr = {text, bytes}, *r = &rr;
  memset(out, 0, sizeof *out);
  TRY(qkv__check(problem, uses ? uses | QKV__READS_OUT : 0, q, text, bytes));
  if (in)
    TRY(take_struct(r, "gradients", in, &out->g, sizeof out->g));
  else if (uses)
    return fail(r, QKV_BAD_POINTER, "gradients is NULL");
  qkv_gradients *g = &out->g;
  if (g->accumulate & ~(QKV_DQ | QKV_DK | QKV_DV | QKV_DBIAS | QKV_DSINKS))
    return fail(r, QKV_UNKNOWN_FIELD, "gradients.accumulate 0x%" PRIx32 " has bits this version does not know",
                (uint32_t)g->accumulate);
  named all[GRADIENTS], problem_tensors[INPUTS + 2];
  list_gradients(q, g, all);
  list_inputs(q, problem_tensors);
  list_results(q, &problem_tensors[INPUTS], &problem_tensors[INPUTS + 1]);
  if (!in) out->wanted = QKV_DQ | QKV_DK | QKV_DV;
  for (int i = GRADIENT_INPUTS; i < GRADIENTS; i++)
    if (all[i].t->data) out->wanted |= 1 << (i - GRADIENT_INPUTS);
  if ((out->wanted & QKV_DBIAS) && uses && !q->p.bias.data)
    return fail(r, QKV_BAD_POINTER, "gradients.dbias is given, but bias.data is NULL");
  if ((out->wanted & QKV_DSINKS) && uses && !q->p.sinks.data)
    return fail(r, QKV_BAD_POINTER, "gradients.dsinks is given, but sinks.data is NULL");
  for (int i = 0; i < GRADIENTS; i++) {
    const int types = i == 1 || i == 6 ? F32_BIT | F64_BIT : data_types_of(q);
    if (!all[i].t->data && (i > 0 || !uses)) continue;
    TRY(check_tensor(r, all[i].name, all[i].t, &all[i].e, types, i >= GRADIENT_INPUTS));
  }
  for (int i = GRADIENT_INPUTS; i < GRADIENTS; i++) {
    for (int k = 0; k < i; k++) TRY(check_apart(r, &all[i], &all[k]));
    for (int k = 0; k < INPUTS + 2; k++) TRY(check_apart(r, &all[i], &problem_tensors[k]));
  }
  return QKV_OK;
}

qkv_status qkv__check_region(const qkv__problem *q, const qkv_region *in, const qkv_tensor *to, qkv_region *out) {
  const report none = {NULL, 0};
  const qkv_region all = {0, q->p.batch, 0, q->p.num_heads, 0, q->max_rows};
  *out = in ? *in : all;
  if (out->batch_begin < 0 || out->batch_begin > out->batch_end || out->batch_end > all.batch_end) return QKV_BAD_REGION;
  if (out->head_begin < 0 || out->head_begin > out->head_end || out->head_end > all.head_end) return QKV_BAD_REGION;
  if (out->row_begin < 0 || out->row_begin > out->row_end || out->row_end > all.row_end) return QKV_BAD_REGION;
  if (!to) return QKV_BAD_POINTER;
  const extent4 e = {
      {out->batch_end - out->batch_begin, out->head_end - out->head_begin, out->row_end - out->row_begin, q->max_keys}};
  TRY(check_tensor(&none, "to", to, &e, q->f64 ? F32_BIT | F64_BIT : F32_BIT, 1));
  const named output = {"to", to, e};
  named input[INPUTS];
  list_inputs(q, input);
  for (int i = 0; i < INPUTS; i++) TRY(check_apart(&none, &output, &input[i]));
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

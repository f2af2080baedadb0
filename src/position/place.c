#include "position/place.h"

#include <inttypes.h>

qkv_status qkv__check_extent(const qkv__report *r, const char *name, int64_t n, int64_t least, int64_t limit) {
  if (n >= least && n <= limit) return QKV_OK;
  return qkv__fail(r, QKV_BAD_EXTENT, "%s %" PRId64 " is not in %" PRId64 "..%" PRId64, name, n, least, limit);
}

qkv_status qkv__check_places(const qkv__report *r, const qkv__places *p, int64_t batch, int64_t seqlen) {
  const qkv__named ids = {"position_ids", p->ids, {batch, 1, seqlen, 1}};
  if (p->ids->data) {
    if (p->start || p->starts)
      return qkv__fail(r, QKV_BAD_LENGTHS, "%s is given, but position_ids is too", p->starts ? "starts" : "start");
    return qkv__check_tensor(r, &ids, QKV__I32_BIT, 0);
  }
  if (p->ids->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "position_ids.reserved %" PRId32 " is not 0", p->ids->reserved);
  if (p->start < INT32_MIN || p->start > INT32_MAX)
    return qkv__fail(r, QKV_BAD_LENGTHS, "start %" PRId64 " does not fit 32 bits", p->start);
  for (int64_t b = 0; b < (p->starts ? batch : 1); b++) {
    const int64_t first = p->start + (p->starts ? p->starts[b] : 0), last = first + QKV_MAX(seqlen, 1) - 1;
    if (first < INT32_MIN || last > INT32_MAX)
      return qkv__fail(r, QKV_BAD_LENGTHS, "start: positions %" PRId64 "..%" PRId64 " of entry %" PRId64 " do not fit 32 bits",
                       first, last, b);
  }
  return QKV_OK;
}

static int same_tensor(const qkv_tensor *a, const qkv_tensor *b, const int64_t *n) {
  if (a->data != b->data || a->dtype != b->dtype) return 0;
  for (int k = 0; k < 4; k++)
    if (n[k] > 1 && a->stride[k] != b->stride[k]) return 0;
  return 1;
}

qkv_status qkv__check_in_place(const qkv__report *r, const qkv_tensor *x, qkv_tensor *out, const int64_t *n, int write_only) {
  const qkv__named from = {"x", x, {n[0], n[1], n[2], n[3]}}, to = {"out", out, {n[0], n[1], n[2], n[3]}};
  const int in_place = !out->data && x->data, all = QKV__F32_BIT | QKV__F64_BIT | QKV__HALF_BITS;
  if (x->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "x.reserved %" PRId32 " is not 0", x->reserved);
  if (out->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "out.reserved %" PRId32 " is not 0", out->reserved);
  if (!write_only || x->data) QKV_TRY(qkv__check_tensor(r, &from, all, in_place));
  if (in_place) {
    *out = *x;
    return QKV_OK;
  }
  if (x->data && same_tensor(x, out, n)) return qkv__check_tensor(r, &from, all, 1);
  QKV_TRY(qkv__check_tensor(r, &to, all, 1));
  if (!x->data || !out->data) return QKV_OK;
  if ((x->dtype == QKV_F64) != (out->dtype == QKV_F64))
    return qkv__fail(r, QKV_BAD_DTYPE, "x.dtype is %s and out.dtype %s; both are f64 or none", qkv__dtype_name(x->dtype),
                     qkv__dtype_name(out->dtype));
  return qkv__check_apart(r, &to, &from);
}

#include "problem/tensor.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/size.h"
#include "problem/problem.h"

qkv_status qkv__fail(const qkv__report *r, qkv_status status, const char *format, ...) {
  if (r->text && r->bytes) {
    va_list a;
    va_start(a, format);
    vsnprintf(r->text, r->bytes, format, a);
    va_end(a);
  }
  return status;
}

qkv_status qkv__take_struct(const qkv__report *r, const char *name, const void *in, void *out, size_t known) {
  uint32_t size;
  if (!in) return qkv__fail(r, QKV_BAD_POINTER, "%s is NULL", name);
  memcpy(&size, in, sizeof size);
  if (size < sizeof size || size > 65536)
    return qkv__fail(r, QKV_BAD_SIZE,
                     "%s.size %" PRIu32 " is not the size of the struct; set it to sizeof, as the _default functions do", name,
                     size);
  for (size_t i = known; i < size; i++)
    if (((const unsigned char *)in)[i])
      return qkv__fail(r, QKV_UNKNOWN_FIELD,
                       "%s.size %" PRIu32 " is more than the %zu bytes this version knows, and byte %zu is not zero", name,
                       size, known, i);
  memset(out, 0, known);
  memcpy(out, in, size < known ? size : known);
  return QKV_OK;
}

static const char *types_text(int set) {
  switch (set) {
  case QKV__F32_BIT: return "f32";
  case QKV__F64_BIT: return "f64";
  case QKV__F32_BIT | QKV__F64_BIT: return "f32 or f64";
  case QKV__F32_BIT | QKV__HALF_BITS: return "f32, f16 or bf16";
  case QKV__F32_BIT | QKV__F64_BIT | QKV__HALF_BITS: return "f32, f64, f16 or bf16";
  case QKV__I32_BIT: return "i32";
  default: return "u8";
  }
}

static int is_empty(const qkv__named *t) { return !t->n[0] || !t->n[1] || !t->n[2] || !t->n[3]; }

/* Lowest and highest byte offset an access can reach; 0 when it is beyond the address space. */
static int span_of(const qkv__named *x, int64_t *low, int64_t *high) {
  int64_t size = (int64_t)qkv__dtype_bytes(x->t->dtype), lo = 0, hi = 0;
  for (int a = 0; a < 4; a++) {
    int64_t s = x->t->stride[a], reach;
    if (x->n[a] <= 1) continue;
    if (s == INT64_MIN || !qkv__mul(x->n[a] - 1, s < 0 ? -s : s, &reach) || !qkv__mul(reach, size, &reach)) return 0;
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

/* Axes from the smallest stride up: each must step over all below it. */
static int overlaps_itself(const qkv__named *x) {
  int64_t reach = 0, done = 0;
  for (int step = 0; step < 4; step++) {
    int best = -1;
    int64_t s = 0;
    for (int a = 0; a < 4; a++) {
      const int64_t stride = x->t->stride[a] < 0 ? -x->t->stride[a] : x->t->stride[a];
      if (x->n[a] > 1 && !(done >> a & 1) && (best < 0 || stride < s)) best = a, s = stride;
    }
    if (best < 0) break;
    if (s <= reach) return 1;
    reach += (x->n[best] - 1) * s;
    done |= 1 << best;
  }
  return 0;
}

qkv_status qkv__check_tensor(const qkv__report *r, const qkv__named *x, int types, int output) {
  const qkv_tensor *t = x->t;
  int64_t low, high;
  if (t->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "%s.reserved %" PRId32 " is not 0", x->name, t->reserved);
  if (is_empty(x)) return QKV_OK;
  if (!t->data) return qkv__fail(r, QKV_BAD_POINTER, "%s.data is NULL", x->name);
  if (!qkv__dtype_bytes(t->dtype))
    return qkv__fail(r, QKV_BAD_DTYPE, "%s.dtype %" PRId32 " is not an element type", x->name, t->dtype);
  if (!(types >> t->dtype & 1)) {
    if (t->dtype == QKV_I8)
      return qkv__fail(r, QKV_UNSUPPORTED, "%s.dtype %s is not supported by this version", x->name,
                       qkv__dtype_name(t->dtype));
    return qkv__fail(r, QKV_BAD_DTYPE, "%s.dtype is %s, but %s is needed here", x->name, qkv__dtype_name(t->dtype),
                     types_text(types));
  }
  const int beyond = !span_of(x, &low, &high);
  if (beyond || (output && overlaps_itself(x)))
    return qkv__fail(r, QKV_BAD_STRIDE,
                     "%s %s: extents %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " with strides %" PRId64 " %" PRId64
                     " %" PRId64 " %" PRId64,
                     x->name, beyond ? "reaches beyond the address space" : "overlaps itself", x->n[0], x->n[1], x->n[2],
                     x->n[3], t->stride[0], t->stride[1], t->stride[2], t->stride[3]);
  return QKV_OK;
}

/* Whether two tensors of one address range are interleaved like the parts of a fused buffer: both have all larger strides in
 * multiples of a common pitch, and their places within the pitch are apart. */
static int interleaved(const qkv__named *a, const qkv__named *b, int64_t pitch) {
  const qkv__named *x[2] = {a, b};
  int64_t begin[2], length[2];
  for (int i = 0; i < 2; i++) {
    int64_t size = (int64_t)qkv__dtype_bytes(x[i]->t->dtype), low = 0, high = 0;
    for (int k = 0; k < 4; k++) {
      int64_t s = x[i]->t->stride[k] * size, reach = (x[i]->n[k] - 1) * s;
      if (x[i]->n[k] <= 1 || s % pitch == 0) continue;
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

qkv_status qkv__check_apart(const qkv__report *r, const qkv__named *a, const qkv__named *b) {
  int64_t al, ah, bl, bh;
  if (!a->t->data || !b->t->data || is_empty(a) || is_empty(b)) return QKV_OK;
  if (!span_of(a, &al, &ah) || !span_of(b, &bl, &bh)) return QKV_OK;
  uintptr_t a0 = (uintptr_t)a->t->data + (uintptr_t)al, a1 = (uintptr_t)a->t->data + (uintptr_t)ah;
  uintptr_t b0 = (uintptr_t)b->t->data + (uintptr_t)bl, b1 = (uintptr_t)b->t->data + (uintptr_t)bh;
  if (a1 <= b0 || b1 <= a0) return QKV_OK;
  for (int k = 0; k < 4; k++) {
    int64_t s = a->t->stride[k] * (int64_t)qkv__dtype_bytes(a->t->dtype);
    if (a->n[k] > 1 && s != 0 && interleaved(a, b, s < 0 ? -s : s)) return QKV_OK;
  }
  return qkv__fail(r, QKV_BAD_OVERLAP, "%s overlaps %s in memory", a->name, b->name);
}

/* Element by element: any dtype and strides <-> rows of f32 or f64. Unit strides of 16 bits take the kernels' way. */
#include "stage/stage.h"

#include <string.h>

#include "base/half.h"
#include "problem/problem.h"

typedef void (*load_fn)(void *to, int64_t ld, const void *from, int64_t rs, int64_t cs, int64_t rows, int64_t columns);
typedef void (*store_fn)(void *to, int64_t rs, int64_t cs, const void *from, int64_t ld, int64_t rows, int64_t columns);

/* source type -> target type through a conversion */
#define LOAD(name, source, target, convert)                                                                        \
  static void name(void *to, int64_t ld, const void *from, int64_t rs, int64_t cs, int64_t rows, int64_t columns) { \
    for (int64_t i = 0; i < rows; i++) {                                                                           \
      target *t = (target *)to + i * ld;                                                                           \
      const source *f = (const source *)from + i * rs;                                                             \
      if (cs == 1)                                                                                                 \
        for (int64_t x = 0; x < columns; x++) t[x] = convert(f[x]);                                                \
      else                                                                                                         \
        for (int64_t x = 0; x < columns; x++) t[x] = convert(f[x * cs]);                                           \
    }                                                                                                              \
  }
#define STORE(name, source, target, convert)                                                                        \
  static void name(void *to, int64_t rs, int64_t cs, const void *from, int64_t ld, int64_t rows, int64_t columns) { \
    for (int64_t i = 0; i < rows; i++) {                                                                           \
      target *t = (target *)to + i * rs;                                                                           \
      const source *f = (const source *)from + i * ld;                                                             \
      for (int64_t x = 0; x < columns; x++) t[x * cs] = convert(f[x]);                                             \
    }                                                                                                              \
  }
LOAD(load_f32_f32, float, float, )
LOAD(load_f32_f64, float, double, )
LOAD(load_f64_f64, double, double, )
LOAD(load_bf16_f32, uint16_t, float, qkv__widen_bf16)
LOAD(load_f16_f32, uint16_t, float, qkv__widen_f16)
STORE(store_f32_f32, float, float, )
STORE(store_f64_f64, double, double, )
STORE(store_f32_bf16, float, uint16_t, qkv__narrow_bf16)
STORE(store_f32_f16, float, uint16_t, qkv__narrow_f16)

/* per dtype: load to f32 and to f64, store from f32 and from f64 */
static const struct {
  load_fn load[2];
  store_fn store[2];
} rows_of[] = {
    [QKV_F32] = {{load_f32_f32, load_f32_f64}, {store_f32_f32, 0}},
    [QKV_F64] = {{0, load_f64_f64}, {0, store_f64_f64}},
    [QKV_BF16] = {{load_bf16_f32, 0}, {store_f32_bf16, 0}},
    [QKV_F16] = {{load_f16_f32, 0}, {store_f32_f16, 0}},
};

static int is_f64(const qkv__kernel *k) { return k->real_bytes == 8; }

int qkv__stage_direct(const qkv__kernel *k, const qkv_tensor *t) {
  return t->dtype == (is_f64(k) ? QKV_F64 : QKV_F32) && t->stride[3] == 1;
}

void qkv__stage_load(const qkv__kernel *k, void *to, int64_t ld, const qkv_tensor *t, const void *from, int64_t rows,
                     int64_t columns) {
  if (qkv__stage_direct(k, t))
    for (int64_t i = 0; i < rows; i++)
      memcpy((char *)to + i * ld * k->real_bytes, (const char *)from + i * t->stride[2] * k->real_bytes, (size_t)(columns * k->real_bytes));
  else if ((t->dtype == QKV_F16 || t->dtype == QKV_BF16) && t->stride[3] == 1)
    k->widen(to, ld, from, t->stride[2], rows, columns, t->dtype == QKV_BF16);
  else
    rows_of[t->dtype].load[is_f64(k)](to, ld, from, t->stride[2], t->stride[3], rows, columns);
}

void qkv__stage_store(const qkv__kernel *k, const qkv_tensor *t, void *to, const void *from, int64_t ld, int64_t rows,
                      int64_t columns) {
  if ((t->dtype == QKV_F16 || t->dtype == QKV_BF16) && t->stride[3] == 1)
    k->narrow(to, t->stride[2], from, ld, rows, columns, t->dtype == QKV_BF16);
  else
    rows_of[t->dtype].store[is_f64(k)](to, t->stride[2], t->stride[3], from, ld, rows, columns);
}

double qkv__stage_value(const qkv_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const void *at = qkv__at(t, qkv__dtype_bytes(t->dtype), i0, i1, i2, i3);
  switch (t->dtype) {
  case QKV_F64: return *(const double *)at;
  case QKV_F16: return qkv__widen_f16(*(const uint16_t *)at);
  case QKV_BF16: return qkv__widen_bf16(*(const uint16_t *)at);
  default: return *(const float *)at;
  }
}

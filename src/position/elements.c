#include "position/elements.h"

#include <qkv/qkv.h>

#include "base/half.h"

/* Eight at a time where the stride is 1: compilers make vectors of loops of a fixed length. */
enum { LANES = 8 };

#define LOAD(name, type, convert)                                                      \
  static void name(double *to, const void *from, int64_t stride, int n) {              \
    const type *f = from;                                                              \
    int i = 0;                                                                         \
    if (stride == 1)                                                                   \
      for (; i + LANES <= n; i += LANES) {                                             \
        double run[LANES];                                                             \
        for (int k = 0; k < LANES; k++) run[k] = (double)convert(f[i + k]);            \
        memcpy(to + i, run, sizeof run);                                               \
      }                                                                                \
    for (; i < n; i++) to[i] = (double)convert(f[i * stride]);                         \
  }
#define STORE(name, type, convert)                                                     \
  static void name(void *to, int64_t stride, const double *from, int n) {              \
    type *t = to;                                                                      \
    int i = 0;                                                                         \
    if (stride == 1)                                                                   \
      for (; i + LANES <= n; i += LANES) {                                             \
        type run[LANES];                                                               \
        for (int k = 0; k < LANES; k++) run[k] = convert(from[i + k]);                 \
        memcpy(t + i, run, sizeof run);                                                \
      }                                                                                \
    for (; i < n; i++) t[i * stride] = convert(from[i]);                               \
  }
#define NARROW_F16(x)  qkv__narrow_f16((float)(x))
#define NARROW_BF16(x) qkv__narrow_bf16((float)(x))
LOAD(load_f32, float, )
LOAD(load_f64, double, )
LOAD(load_f16, uint16_t, qkv__widen_f16)
LOAD(load_bf16, uint16_t, qkv__widen_bf16)
STORE(store_f32, float, (float))
STORE(store_f64, double, )
STORE(store_f16, uint16_t, NARROW_F16)
STORE(store_bf16, uint16_t, NARROW_BF16)

static const struct {
  qkv__load_fn load;
  qkv__store_fn store;
} rows_of[] = {[QKV_F32] = {load_f32, store_f32},
               [QKV_F64] = {load_f64, store_f64},
               [QKV_BF16] = {load_bf16, store_bf16},
               [QKV_F16] = {load_f16, store_f16}};

qkv__load_fn qkv__loader(int32_t dtype) { return rows_of[dtype].load; }
qkv__store_fn qkv__storer(int32_t dtype) { return rows_of[dtype].store; }

#include "stage/stage.h"

typedef void (*load_fn)(void *to, int64_t ld, const void *from, int64_t row_stride, int64_t column_stride, int64_t rows,
                        int64_t columns);
typedef void (*store_fn)(void *to, int64_t row_stride, int64_t column_stride, const void *from, int64_t ld, int64_t rows,
                         int64_t columns);

/* from type -> to type, element by element */
#define LOAD(name, source, target)                                                                                  \
  static void name(void *to, int64_t ld, const void *from, int64_t rs, int64_t cs, int64_t rows, int64_t columns) { \
    for (int64_t i = 0; i < rows; i++) {                                                                            \
      target *t = (target *)to + i * ld;                                                                            \
      const source *f = (const source *)from + i * rs;                                                              \
      if (cs == 1)                                                                                                  \
        for (int64_t x = 0; x < columns; x++) t[x] = (target)f[x];                                                  \
      else                                                                                                          \
        for (int64_t x = 0; x < columns; x++) t[x] = (target)f[x * cs];                                             \
    }                                                                                                               \
  }
#define STORE(name, source, target)                                                                                 \
  static void name(void *to, int64_t rs, int64_t cs, const void *from, int64_t ld, int64_t rows, int64_t columns) { \
    for (int64_t i = 0; i < rows; i++) {                                                                            \
      target *t = (target *)to + i * rs;                                                                            \
      const source *f = (const source *)from + i * ld;                                                              \
      for (int64_t x = 0; x < columns; x++) t[x * cs] = (target)f[x];                                               \
    }                                                                                                               \
  }
LOAD(load_f32_f32, float, float)
LOAD(load_f32_f64, float, double)
LOAD(load_f64_f64, double, double)
STORE(store_f32_f32, float, float)
STORE(store_f64_f64, double, double)

/* per dtype: load to f32 and to f64, store from f32 and from f64 */
static const struct {
  load_fn load[2];
  store_fn store[2];
} rows_of[] = {
    [QKV_F32] = {{load_f32_f32, load_f32_f64}, {store_f32_f32, 0}},
    [QKV_F64] = {{0, load_f64_f64}, {0, store_f64_f64}},
};

int qkv__stage_direct(const qkv_tensor *t, int f64) { return t->dtype == (f64 ? QKV_F64 : QKV_F32) && t->stride[3] == 1; }

void qkv__stage_load(void *to, int64_t ld, int f64, const qkv_tensor *t, const void *from, int64_t rows, int64_t columns) {
  rows_of[t->dtype].load[f64](to, ld, from, t->stride[2], t->stride[3], rows, columns);
}
void qkv__stage_store(const qkv_tensor *t, void *to, const void *from, int64_t ld, int f64, int64_t rows, int64_t columns) {
  rows_of[t->dtype].store[f64](to, t->stride[2], t->stride[3], from, ld, rows, columns);
}

/* Columns of a row in runs of at most QKV__RUN: any element type and stride <-> doubles. */
#ifndef QKV_POSITION_ELEMENTS_H
#define QKV_POSITION_ELEMENTS_H

#include <stdint.h>

enum { QKV__RUN = 64 };

typedef void (*qkv__load_fn)(double *to, const void *from, int64_t stride, int n);
typedef void (*qkv__store_fn)(void *to, int64_t stride, const double *from, int n);

/* Exact; rounded once to f32 and f64, and to 16 bits from the f32. F32, F64, F16, BF16. */
qkv__load_fn qkv__loader(int32_t dtype);
qkv__store_fn qkv__storer(int32_t dtype);

#endif

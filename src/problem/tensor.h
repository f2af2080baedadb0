/* Checks of single arguments that name what is wrong: growing structs, tensors, overlap. */
#ifndef QKV_PROBLEM_TENSOR_H
#define QKV_PROBLEM_TENSOR_H

#include <qkv/qkv.h>

#include "base/port.h"

/* Where the text of an error goes; text may be NULL. */
typedef struct qkv__report {
  char *text;
  size_t bytes;
} qkv__report;
/* Writes the text and returns status. */
qkv_status qkv__fail(const qkv__report *r, qkv_status status, const char *format, ...) QKV_FORMAT(3, 4);

#define QKV_TRY(call)                              \
  do {                                             \
    qkv_status try_status_ = (call);               \
    if (try_status_ != QKV_OK) return try_status_; \
  } while (0)

/* A struct that may grow: the bytes this version does not know must be zero. Copies min(sizes) over zeros. */
qkv_status qkv__take_struct(const qkv__report *r, const char *name, const void *in, void *out, size_t known);

/* Sets of element types. */
enum {
  QKV__F32_BIT = 1 << QKV_F32,
  QKV__F64_BIT = 1 << QKV_F64,
  QKV__I32_BIT = 1 << QKV_I32,
  QKV__U8_BIT = 1 << QKV_U8,
  QKV__HALF_BITS = 1 << QKV_F16 | 1 << QKV_BF16
};

/* A tensor, its name and extents. */
typedef struct qkv__named {
  const char *name;
  const qkv_tensor *t;
  int64_t n[4];
} qkv__named;

/* Type, address range and, of an output, that no two elements share memory. A tensor without elements may be anything. */
qkv_status qkv__check_tensor(const qkv__report *r, const qkv__named *t, int types, int output);
/* That two tensors share no memory. Tensors without data or elements share none. */
qkv_status qkv__check_apart(const qkv__report *r, const qkv__named *a, const qkv__named *b);

#endif

/* An array in memory as the readers give it: up to four axes, strides in elements. */
#ifndef QKV_SUPPORT_ARRAY_H
#define QKV_SUPPORT_ARRAY_H

#include <stddef.h>
#include <stdint.h>

#include "qkv/qkv.h"

enum { ARRAY_RANK = 4 };

typedef struct array {
  int32_t dtype; /* QKV_F32, QKV_F64, QKV_I32 or QKV_U8 */
  int rank;
  int64_t shape[ARRAY_RANK];
  int64_t stride[ARRAY_RANK];
  void *data; /* 64-byte aligned, never NULL, also with no elements */
} array;

/* Bytes of an element of a qkv dtype; 0 for an unknown one. */
size_t array_element_size(int32_t dtype);

/* Elements of a shape, or -1 if they or their bytes do not fit in 63 bits. */
int64_t array_count(int rank, const int64_t *shape, size_t element_size);

/* Allocates a C-ordered array, its values unspecified. -1: no memory, or too large. */
int array_alloc(array *a, int32_t dtype, int rank, const int64_t *shape);
void array_free(array *a);

/* "(3, 4)", as Python writes it. */
void array_shape_text(int rank, const int64_t *shape, char *text, size_t bytes);

/* The array as a tensor of the four extents, as numpy broadcasts: axes are aligned at the right, missing ones and those of
 * extent 1 get stride 0. -1 if it does not fit. An extent of -1 fits any, and is set to the array's. */
int array_broadcast(const array *a, int64_t extent[ARRAY_RANK], qkv_tensor *tensor);

/* Exact. */
float array_widen_f16(uint16_t bits);
float array_widen_bf16(uint16_t bits);

/* Values from and to little-endian bytes, whatever the host's order is. */
uint16_t array_load_u16(const unsigned char *p);
uint32_t array_load_u32(const unsigned char *p);
uint64_t array_load_u64(const unsigned char *p);

/* The element types that files hold, and the type that each is read as. */
typedef enum array_source {
  ARRAY_FROM_F16,  /* -> F32 */
  ARRAY_FROM_BF16, /* -> F32 */
  ARRAY_FROM_F32,
  ARRAY_FROM_F64,
  ARRAY_FROM_I32,
  ARRAY_FROM_I64, /* -> I32, checked */
  ARRAY_FROM_U8,
  ARRAY_FROM_BOOL /* -> U8, 0 or 1 */
} array_source;
int32_t array_source_dtype(array_source source);
size_t array_source_size(array_source source);

/* Converts `count` little-endian elements at `bytes` to `to`. Returns -1, or the index of the first that does not fit. */
int64_t array_convert(array_source source, const unsigned char *bytes, int64_t count, void *to);

#endif

#include "array.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t array_element_size(int32_t dtype) {
  switch (dtype) {
  case QKV_F64: return 8;
  case QKV_F32:
  case QKV_I32: return 4;
  case QKV_F16:
  case QKV_BF16: return 2;
  case QKV_I8:
  case QKV_U8: return 1;
  default: return 0;
  }
}

int64_t array_count(int rank, const int64_t *shape, size_t element_size) {
  int64_t limit = INT64_MAX / (int64_t)element_size;
  if (limit > PTRDIFF_MAX / (ptrdiff_t)element_size) limit = PTRDIFF_MAX / (ptrdiff_t)element_size;
  int64_t count = 1;
  int zero = 0;
  /* An axis of extent 0 does not excuse the others: strides are products of them too. */
  for (int axis = 0; axis < rank; axis++) {
    if (shape[axis] < 0) return -1;
    if (shape[axis] == 0) {
      zero = 1;
      continue;
    }
    if (count > limit / shape[axis]) return -1;
    count *= shape[axis];
  }
  return zero ? 0 : count;
}

int array_alloc(array *a, int32_t dtype, int rank, const int64_t *shape) {
  size_t element_size = array_element_size(dtype);
  memset(a, 0, sizeof *a);
  if (element_size == 0 || rank < 0 || rank > ARRAY_RANK) return -1;
  int64_t count = array_count(rank, shape, element_size);
  if (count < 0 || (uint64_t)count > (SIZE_MAX - 64) / element_size) return -1;
  size_t bytes = ((size_t)count * element_size + 63) / 64 * 64;
  a->data = aligned_alloc(64, bytes > 0 ? bytes : 64);
  if (a->data == NULL) return -1;
  a->dtype = dtype;
  a->rank = rank;
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; axis--) {
    a->shape[axis] = shape[axis];
    a->stride[axis] = stride;
    stride *= shape[axis];
  }
  return 0;
}

void array_free(array *a) {
  free(a->data);
  memset(a, 0, sizeof *a);
}

void array_shape_text(int rank, const int64_t *shape, char *text, size_t bytes) {
  size_t used = 0;
  if (bytes == 0) return;
  text[0] = 0;
  for (int axis = 0; axis < rank && used < bytes; axis++) {
    int wrote = snprintf(text + used, bytes - used, "%s%lld", axis == 0 ? "(" : ", ", (long long)shape[axis]);
    if (wrote > 0) used += (size_t)wrote;
  }
  if (used < bytes) snprintf(text + used, bytes - used, "%s", rank == 0 ? "()" : rank == 1 ? ",)" : ")");
}

int array_broadcast(const array *a, int64_t extent[ARRAY_RANK], qkv_tensor *tensor) {
  *tensor = qkv_strided(a->data, a->dtype, 0, 0, 0, 0);
  for (int axis = 0; axis < a->rank; axis++) {
    int to = ARRAY_RANK - a->rank + axis;
    int64_t have = a->shape[axis];
    if (have == 1) continue;
    if (extent[to] < 0) extent[to] = have;
    if (have != extent[to]) return -1;
    tensor->stride[to] = a->stride[axis];
  }
  return 0;
}

uint16_t array_load_u16(const unsigned char *p) { return (uint16_t)(p[0] | (unsigned)p[1] << 8); }

uint32_t array_load_u32(const unsigned char *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t array_load_u64(const unsigned char *p) {
  return (uint64_t)array_load_u32(p) | (uint64_t)array_load_u32(p + 4) << 32;
}

float array_widen_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

float array_widen_f16(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits >> 15) << 31;
  uint32_t exponent = (bits >> 10) & 31;
  uint32_t fraction = bits & 1023;
  uint32_t wide;
  float value;
  if (exponent == 31) {
    wide = sign | UINT32_C(0x7f800000) | fraction << 13;
  } else if (exponent > 0) {
    wide = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    /* Zero or subnormal: fraction * 2^-24, exact in a float. */
    value = (float)fraction * 0x1p-24f;
    return sign ? -value : value;
  }
  memcpy(&value, &wide, sizeof value);
  return value;
}

int32_t array_source_dtype(array_source source) {
  switch (source) {
  case ARRAY_FROM_F64: return QKV_F64;
  case ARRAY_FROM_I32:
  case ARRAY_FROM_I64: return QKV_I32;
  case ARRAY_FROM_U8:
  case ARRAY_FROM_BOOL: return QKV_U8;
  default: return QKV_F32;
  }
}

size_t array_source_size(array_source source) {
  switch (source) {
  case ARRAY_FROM_F64:
  case ARRAY_FROM_I64: return 8;
  case ARRAY_FROM_F32:
  case ARRAY_FROM_I32: return 4;
  case ARRAY_FROM_F16:
  case ARRAY_FROM_BF16: return 2;
  default: return 1;
  }
}

int64_t array_convert(array_source source, const unsigned char *bytes, int64_t count, void *to) {
  uint32_t *to32 = to;
  uint64_t *to64 = to;
  unsigned char *to8 = to;
  float *to_float = to;
  int32_t *to_int = to;
  switch (source) {
  case ARRAY_FROM_F16:
    for (int64_t i = 0; i < count; i++) to_float[i] = array_widen_f16(array_load_u16(bytes + 2 * i));
    break;
  case ARRAY_FROM_BF16:
    for (int64_t i = 0; i < count; i++) to_float[i] = array_widen_bf16(array_load_u16(bytes + 2 * i));
    break;
  case ARRAY_FROM_F32:
  case ARRAY_FROM_I32:
    for (int64_t i = 0; i < count; i++) to32[i] = array_load_u32(bytes + 4 * i);
    break;
  case ARRAY_FROM_F64:
    for (int64_t i = 0; i < count; i++) to64[i] = array_load_u64(bytes + 8 * i);
    break;
  case ARRAY_FROM_I64:
    for (int64_t i = 0; i < count; i++) {
      int64_t value;
      uint64_t raw = array_load_u64(bytes + 8 * i);
      memcpy(&value, &raw, sizeof value);
      if (value < INT32_MIN || value > INT32_MAX) return i;
      to_int[i] = (int32_t)value;
    }
    break;
  case ARRAY_FROM_U8:
    if (count > 0) memcpy(to8, bytes, (size_t)count);
    break;
  case ARRAY_FROM_BOOL:
    for (int64_t i = 0; i < count; i++) to8[i] = bytes[i] != 0;
    break;
  }
  return -1;
}

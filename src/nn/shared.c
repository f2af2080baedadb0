/* The copies: see names.h. */
#include "nn/names.h"

#include "base/run.c"
#include "problem/tensor.c"

size_t qkv__dtype_bytes(int32_t dtype) {
  static const unsigned char bytes[] = {0, 4, 8, 2, 2, 1, 4, 1};
  return dtype > 0 && dtype < (int32_t)sizeof bytes ? bytes[dtype] : 0;
}
const char *qkv__dtype_name(int32_t dtype) {
  static const char *const names[] = {"none", "f32", "f64", "bf16", "f16", "i8", "i32", "u8"};
  return dtype >= 0 && dtype < 8 ? names[dtype] : "unknown";
}

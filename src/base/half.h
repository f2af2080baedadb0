/* 16-bit storage: f16 (IEEE binary16) and bf16, widened exactly; rounded to nearest even, overflow to infinity, NaN stays
 * NaN. Integer operations only, so that no mode of the CPU matters. */
#ifndef QKV_BASE_HALF_H
#define QKV_BASE_HALF_H

#include <stdint.h>
#include <string.h>

#include "base/port.h"

QKV_INLINE float qkv__float_of_bits(uint32_t b) {
  float f;
  memcpy(&f, &b, sizeof f);
  return f;
}
QKV_INLINE uint32_t qkv__bits_of_float(float f) {
  uint32_t b;
  memcpy(&b, &f, sizeof b);
  return b;
}

QKV_INLINE float qkv__widen_bf16(uint16_t h) { return qkv__float_of_bits((uint32_t)h << 16); }
QKV_INLINE uint16_t qkv__narrow_bf16(float f) {
  const uint32_t b = qkv__bits_of_float(f);
  if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)(b >> 16 | 0x40);
  return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

QKV_INLINE float qkv__widen_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  if (exponent == 31) return qkv__float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return qkv__float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float f = (float)fraction * 0x1p-24f; /* exact */
  return qkv__float_of_bits(sign | qkv__bits_of_float(f));
}
QKV_INLINE uint16_t qkv__narrow_f16(float f) {
  const uint32_t b = qkv__bits_of_float(f), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
  if (a >= 0x38800000) return (uint16_t)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
  if (a < 0x33000000) return (uint16_t)sign; /* below half of the smallest subnormal */
  const uint32_t shift = 126 - (a >> 23), fraction = (a & 0x7fffff) | 0x800000;
  const uint32_t kept = fraction >> shift, rest = fraction & (((uint32_t)1 << shift) - 1), half = (uint32_t)1 << (shift - 1);
  return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

#endif

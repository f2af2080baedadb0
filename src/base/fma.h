/* fma with one rounding, in hardware where the translation unit may use it. */
#ifndef QKV_BASE_FMA_H
#define QKV_BASE_FMA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/port.h"

/* The product of two floats is exact in double. Rounding its sum with c to odd (the inexact last bit set) keeps the final
 * rounding to float correct: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008. */
QKV_INLINE float qkv__soft_fmaf(float a, float b, float c) {
  double p = (double)a * (double)b, d = c, s = p + d;
  double t = s - p, e = (p - (s - t)) + (d - t);
  if (e != 0.0 && s - s == 0.0) {
    int64_t bits;
    memcpy(&bits, &s, sizeof bits);
    if (!(bits & 1)) bits += (e > 0.0) == (s > 0.0) ? 1 : -1;
    memcpy(&s, &bits, sizeof s);
  }
  return (float)s;
}

#if defined(__FMA__) || defined(__aarch64__) || defined(FP_FAST_FMAF)
QKV_INLINE float qkv__fma32(float a, float b, float c) { return fmaf(a, b, c); }
#else
QKV_INLINE float qkv__fma32(float a, float b, float c) { return qkv__soft_fmaf(a, b, c); }
#endif
QKV_INLINE double qkv__fma64(double a, double b, double c) { return fma(a, b, c); }

#endif

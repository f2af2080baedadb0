/* log2_64 of docs/NUMERICS.md: base-2 logarithm of a positive finite normal double, within 1.2 ulp from 2 on and 3.6
 * units of 2^-53 near 1. Plain multiplications and additions: neither libm nor an fma matters. NaN and +inf pass. */
#ifndef QKV_BASE_LOG2_H
#define QKV_BASE_LOG2_H

#include <stdint.h>
#include <string.h>

#include "base/order1.h"
#include "base/port.h"

QKV_INLINE double qkv__log2_64(double x) {
  if (!(x <= DBL_MAX)) return x;
  int64_t bits, e;
  double z, s, t, p = 0;
  memcpy(&bits, &x, sizeof bits);
  /* x = 2^e * z, sqrt(1/2) <= z < sqrt(2) */
  const int64_t from_root = bits - INT64_C(0x3fe6a09e667f3bcd);
  e = from_root >= 0 ? from_root / (INT64_C(1) << 52) : -((INT64_C(0xfffffffffffff) - from_root) / (INT64_C(1) << 52));
  bits -= e * (INT64_C(1) << 52);
  memcpy(&z, &bits, sizeof z);
  s = (z - 1) / (z + 1);
  t = s * s;
#define QKV__STEP(c) p = p * t + c;
  QKV_LOG2_64(QKV__STEP)
#undef QKV__STEP
  return (double)e + s * p;
}

#endif

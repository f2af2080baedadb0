/* Angles of positions: frequencies to about 100 bits, the angle p * w reduced without an error that matters, sine and cosine
 * (docs/POSITIONS.md). Plain additions and multiplications: neither libm nor an fma matters. */
#ifndef QKV_POSITION_ANGLE_H
#define QKV_POSITION_ANGLE_H

#include <stdint.h>
#include <string.h>

#include "base/port.h"

/* A number as a sum of two doubles, high the sum rounded. Each operation below is right to a few units of 2^-104. Dekker, "A
 * floating-point technique for extending the available precision", 1971; Knuth, The Art of Computer Programming 4.2.2. */
typedef struct qkv__pair {
  double high, low;
} qkv__pair;

QKV_INLINE qkv__pair qkv__pair_of(double x) { return (qkv__pair){x, 0}; }
/* exact; |a| >= |b| or a = 0 */
QKV_INLINE qkv__pair qkv__quick_sum(double a, double b) {
  const double s = a + b;
  return (qkv__pair){s, b - (s - a)};
}
/* exact */
QKV_INLINE qkv__pair qkv__exact_sum(double a, double b) {
  const double s = a + b, t = s - a;
  return (qkv__pair){s, (a - (s - t)) + (b - t)};
}
/* exact, for |a|, |b| < 2^500 */
QKV_INLINE qkv__pair qkv__exact_product(double a, double b) {
  const double p = a * b, ca = 0x1.0000002p27 * a, cb = 0x1.0000002p27 * b;
  const double ah = ca - (ca - a), bh = cb - (cb - b), al = a - ah, bl = b - bh;
  return (qkv__pair){p, ((ah * bh - p) + ah * bl + al * bh) + al * bl};
}
QKV_INLINE qkv__pair qkv__pair_add(qkv__pair a, qkv__pair b) {
  const qkv__pair s = qkv__exact_sum(a.high, b.high), t = qkv__exact_sum(a.low, b.low);
  const qkv__pair u = qkv__quick_sum(s.high, s.low + t.high);
  return qkv__quick_sum(u.high, u.low + t.low);
}
QKV_INLINE qkv__pair qkv__pair_mul(qkv__pair a, qkv__pair b) {
  const qkv__pair p = qkv__exact_product(a.high, b.high);
  return qkv__quick_sum(p.high, p.low + (a.high * b.low + a.low * b.high));
}
QKV_INLINE qkv__pair qkv__pair_div(qkv__pair a, qkv__pair b) {
  const double q = a.high / b.high;
  const qkv__pair p = qkv__exact_product(q, b.high);
  return qkv__quick_sum(q, (((a.high - p.high) - p.low) + a.low - q * b.low) / b.high);
}

qkv__pair qkv__log2_pair(double x);       /* 2^-1000 <= x <= 2^1000 */
qkv__pair qkv__exp2_pair(qkv__pair x);    /* |x| <= 1000 */
QKV_INLINE double qkv__rint(double x) { return (x + 0x1.8p52) - 0x1.8p52; } /* |x| < 2^51; ties to even */

/* 2/pi * base^(-2i/d), i ascending: the frequency of pair i in quarter turns per position. */
typedef struct qkv__sequence {
  qkv__pair value, ratio;
} qkv__sequence;
qkv__sequence qkv__sequence_begin(qkv__pair log2_base, int64_t d);
QKV_INLINE void qkv__sequence_next(qkv__sequence *s) { s->value = qkv__pair_mul(s->value, s->ratio); }

/* A frequency modulo 4 quarter turns in three pieces: a, a multiple of 2^-20, |a| <= 2; b, a multiple of 2^-42, |b| <= 2^-21;
 * c, the rest. Products of a and b with a position have at most 53 bits. |value| < 2^48. */
typedef struct qkv__pieces {
  double *a, *b, *c;
} qkv__pieces;
void qkv__pieces_set(const qkv__pieces *to, int64_t i, qkv__pair value);

/* sin and cos of p * the frequencies [from, from + n); p is an integer, |p| <= 2^31. */
void qkv__sincos(double p, const qkv__pieces *f, int64_t from, int n, double *sine, double *cosine);

#endif

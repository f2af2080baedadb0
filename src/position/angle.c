#include "position/angle.h"

#include "base/log2.h"

/* 2^k, -1022 <= k <= 1023 */
static double power_of_two(int64_t k) {
  const int64_t bits = (k + 1023) * (INT64_C(1) << 52);
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* 2^n e^r, r = (x - n) ln 2: the series of e^(r/32) - 1 up to the 13th power, then (1 + m)^2 - 1 = 2m + m^2 five times. */
qkv__pair qkv__exp2_pair(qkv__pair x) {
  static const qkv__pair ln2_32 = {0x1.62e42fefa39efp-6, 0x1.abc9e3b39803fp-61};
  const double n = qkv__rint(x.high), scale = power_of_two((int64_t)n);
  const qkv__pair r = qkv__pair_mul(qkv__quick_sum(x.high - n, x.low), ln2_32);
  qkv__pair m = qkv__pair_of(1);
  for (int k = 13; k > 1; k--) m = qkv__pair_add(qkv__pair_of(1), qkv__pair_div(qkv__pair_mul(m, r), qkv__pair_of(k)));
  m = qkv__pair_mul(m, r);
  for (int k = 0; k < 5; k++) m = qkv__pair_add((qkv__pair){2 * m.high, 2 * m.low}, qkv__pair_mul(m, m));
  m = qkv__pair_add(qkv__pair_of(1), m);
  return (qkv__pair){m.high * scale, m.low * scale};
}

/* One step of Halley's method from the double: log2 z = y + 2 log2(e) (z - 2^y) / (z + 2^y), to the third order. */
qkv__pair qkv__log2_pair(double x) {
  const double n = qkv__rint(qkv__log2_64(x)), z = x * power_of_two(-(int64_t)n), y = qkv__log2_64(z);
  const qkv__pair e = qkv__exp2_pair(qkv__pair_of(y));
  const double step = 2 * QKV_LOG2E * (((z - e.high) - e.low) / (z + e.high));
  const qkv__pair s = qkv__exact_sum(n, y);
  return qkv__quick_sum(s.high, s.low + step);
}

qkv__sequence qkv__sequence_begin(qkv__pair log2_base, int64_t d) {
  const qkv__pair twice = {-2 * log2_base.high, -2 * log2_base.low};
  return (qkv__sequence){{0x1.45f306dc9c883p-1, -0x1.6b01ec5417056p-55},
                         qkv__exp2_pair(qkv__pair_div(twice, qkv__pair_of((double)d)))};
}

void qkv__pieces_set(const qkv__pieces *to, int64_t i, qkv__pair value) {
  const double high = value.high - 4 * qkv__rint(value.high / 4);
  const double a = (high + 0x1.8p32) - 0x1.8p32, rest = high - a, b = (rest + 0x1.8p10) - 0x1.8p10;
  to->a[i] = a;
  to->b[i] = b;
  to->c[i] = (rest - b) + value.low;
}

/* tools/fit_sincos.py: in quarter turns t, |t| <= 1/2 + 2^-11, from the highest power down */
#define SINE(X) X(0x1.e3fc474149fccp-25) X(-0x1.e30090b100d42p-19) X(0x1.507830043719bp-13) X(-0x1.32d2cce31ca7dp-8) \
  X(0x1.466bc67758c52p-4) X(-0x1.4abbce625be46p-1)
#define COSINE(X) X(-0x1.b15d23ec0bdd1p-28) X(0x1.f9c879e0b445ap-22) X(-0x1.a6d1e6faf43f6p-16) X(0x1.e1f5067b559d6p-11) \
  X(-0x1.55d3c7e3c3021p-6) X(0x1.03c1f081b5a66p-2) X(-0x1.3bd3cc9be45dep+0)
#define HALF_PI 0x1.921fb54442d18p+0
#define STEP(k) p = p * u + k;

/* Loops of a fixed length, without branches: compilers make vectors of them. */
enum { LANES = 8 };
typedef struct block {
  double t[LANES], sine[LANES], cosine[LANES];
  uint64_t quadrant[LANES]; /* modulo 4 */
} block;

static inline uint64_t bits_of(double x) {
  uint64_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

static void reduce(block *o, double position, const double *a, const double *b, const double *c) {
  for (int i = 0; i < LANES; i++) {
    const double magic = 0x1.8p52; /* a sum with it ends in the bits of the integer */
    const double pa = position * a[i], ma = pa + magic, rest = (pa - (ma - magic)) + position * b[i], mb = rest + magic;
    o->t[i] = (rest - (mb - magic)) + position * c[i];
    o->quadrant[i] = bits_of(ma) + bits_of(mb);
  }
}

static void polynomials(block *o) {
  for (int i = 0; i < LANES; i++) {
    const double t = o->t[i], u = t * t;
    double p = 0;
    SINE(STEP)
    o->sine[i] = t * HALF_PI + t * u * p;
    p = 0;
    COSINE(STEP)
    o->cosine[i] = 1 + u * p;
  }
}

/* In odd quadrants sine and cosine change places; the sine is negative in 2 and 3, the cosine in 1 and 2. */
static void place(const block *o, double *sine, double *cosine) {
  uint64_t s[LANES], c[LANES];
  memcpy(s, o->sine, sizeof s);
  memcpy(c, o->cosine, sizeof c);
  for (int i = 0; i < LANES; i++) {
    const uint64_t q = o->quadrant[i], exchange = (s[i] ^ c[i]) & (0 - (q & 1));
    s[i] ^= exchange ^ (q & 2) << 62;
    c[i] ^= exchange ^ ((q + 1) & 2) << 62;
  }
  memcpy(sine, s, sizeof s);
  memcpy(cosine, c, sizeof c);
}

static void eight(double p, const double *a, const double *b, const double *c, double *sine, double *cosine) {
  block o;
  reduce(&o, p, a, b, c);
  polynomials(&o);
  place(&o, sine, cosine);
}

void qkv__sincos(double p, const qkv__pieces *f, int64_t from, int n, double *sine, double *cosine) {
  const double *a = f->a + from, *b = f->b + from, *c = f->c + from;
  int i = 0;
  for (; i + LANES <= n; i += LANES) eight(p, a + i, b + i, c + i, sine + i, cosine + i);
  if (i == n) return;
  double in[3][LANES] = {{0}}, out[2][LANES];
  for (int k = 0; i + k < n; k++) in[0][k] = a[i + k], in[1][k] = b[i + k], in[2][k] = c[i + k];
  eight(p, in[0], in[1], in[2], out[0], out[1]);
  for (int k = 0; i + k < n; k++) sine[i + k] = out[0][k], cosine[i + k] = out[1][k];
}

/* Verbs in plain C, four lanes, for every other machine: right, not fast. */
#include <string.h>

#include "base/fma.h"
#include "base/half.h"

#define VL   4
#define NR   2
#define FUSE 0
typedef struct vf {
  real x[VL];
} vf;
typedef struct vm {
  unsigned char x[VL];
} vm;
#define EACH for (int i = 0; i < VL; i++)
#ifdef QKV__F64
#define FMA1 qkv__fma64
typedef uint64_t bits_of_real;
#define EXPONENT(t) (((t) + 1023) << 52)
#else
#define FMA1        qkv__fma32
typedef uint32_t bits_of_real;
#define EXPONENT(t) (((t) + 127) << 23)
#endif

#define MAP(name, parameters, expression) \
  V vf name parameters {                  \
    vf r;                                 \
    EACH r.x[i] = expression;             \
    return r;                             \
  }
MAP(v_zero, (void), 0)
MAP(v_set1, (real x), x)
MAP(v_load, (const real *p), p[i])
MAP(v_loadu, (const real *p), p[i])
MAP(v_fma, (vf a, vf b, vf c), FMA1(a.x[i], b.x[i], c.x[i]))
MAP(v_add, (vf a, vf b), a.x[i] + b.x[i])
MAP(v_sub, (vf a, vf b), a.x[i] - b.x[i])
MAP(v_mul, (vf a, vf b), a.x[i] * b.x[i])
MAP(v_div, (vf a, vf b), a.x[i] / b.x[i])
MAP(v_fold, (vf s, vf m), s.x[i] > m.x[i] ? s.x[i] : m.x[i])
MAP(v_select, (vm m, vf a, vf b), m.x[i] ? a.x[i] : b.x[i])
#ifndef QKV__F64
MAP(v_load_f16, (const uint16_t *p), qkv__widen_f16(p[i]))
MAP(v_load_bf16, (const uint16_t *p), qkv__widen_bf16(p[i]))
#endif
#undef MAP
#define MAP(name, parameters, expression)      \
  V vm name parameters {                       \
    vm r;                                      \
    EACH r.x[i] = (unsigned char)(expression); \
    return r;                                  \
  }
MAP(v_gt, (vf a, vf b), a.x[i] > b.x[i])
MAP(v_eq, (vf a, vf b), a.x[i] == b.x[i])
MAP(v_or, (vm a, vm b), a.x[i] || b.x[i])
MAP(v_andnot, (vm a, vm b), !a.x[i] && b.x[i])
MAP(v_bits, (uint64_t word), word >> i & 1)
#undef MAP
V void v_store(real *p, vf x) { EACH p[i] = x.x[i]; }
V void v_storeu(real *p, vf x) { EACH p[i] = x.x[i]; }
#ifndef QKV__F64
V void v_store_f16(uint16_t *p, vf x) { EACH p[i] = qkv__narrow_f16(x.x[i]); }
V void v_store_bf16(uint16_t *p, vf x) { EACH p[i] = qkv__narrow_bf16(x.x[i]); }
#endif
V vf v_min0(vf x) { return v_select(v_gt(x, v_zero()), v_zero(), x); } /* NaN passes */
/* p * 2^n, n in the low bits of t; 0 where x < min; NaN stays */
V vf v_scale2(vf p, vf t, vf n, vf x, real min) {
  vf r;
  (void)n;
  EACH {
    bits_of_real b;
    real s;
    memcpy(&b, &t.x[i], sizeof b);
    b = EXPONENT(b);
    memcpy(&s, &b, sizeof s);
    r.x[i] = x.x[i] < min ? 0 : p.x[i] * s;
  }
  return r;
}
#define UL 4
typedef struct vu {
  uint32_t x[UL];
} vu;
V vu u_set1(uint32_t x) {
  vu r;
  for (int i = 0; i < UL; i++) r.x[i] = x;
  return r;
}
V vu u_load(const uint32_t *p) {
  vu r;
  memcpy(r.x, p, sizeof r.x);
  return r;
}
V vu u_xor(vu a, vu b) {
  for (int i = 0; i < UL; i++) a.x[i] ^= b.x[i];
  return a;
}
V void u_mul(uint32_t m, vu x, vu *high, vu *low) {
  for (int i = 0; i < UL; i++) {
    const uint64_t product = (uint64_t)m * x.x[i];
    high->x[i] = (uint32_t)(product >> 32);
    low->x[i] = (uint32_t)product;
  }
}
/* bit i: x[i] >= least */
V uint64_t u_at_least(vu x, uint32_t least) {
  uint64_t r = 0;
  for (int i = 0; i < UL; i++) r |= (uint64_t)(x.x[i] >= least) << i;
  return r;
}
#define v_pin(x) (void)0
V void v_transpose(vf r[VL]) {
  EACH for (int k = 0; k < i; k++) {
    real t = r[i].x[k];
    r[i].x[k] = r[k].x[i];
    r[k].x[i] = t;
  }
}

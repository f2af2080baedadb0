/* Verbs over 128-bit vectors: AArch64 Advanced SIMD. */
#include <arm_neon.h>

#ifdef QKV__F64
#define VL 2
typedef float64x2_t vf;
typedef uint64x2_t vm;
#define OP(name) name##q_f64
#else
#define VL       4
typedef float32x4_t vf;
typedef uint32x4_t vm;
#define OP(name) name##q_f32
#endif
#define NR   3
#define FUSE 0

#ifdef QKV__F64
V vf v_set1(real x) { return vdupq_n_f64(x); }
V vm v_or(vm a, vm b) { return vorrq_u64(a, b); }
V vm v_andnot(vm a, vm b) { return vbicq_u64(b, a); }
#else
V vf v_set1(real x) { return vdupq_n_f32(x); }
V vm v_or(vm a, vm b) { return vorrq_u32(a, b); }
V vm v_andnot(vm a, vm b) { return vbicq_u32(b, a); }
#endif
V vf v_zero(void) { return v_set1(0); }
V vf v_load(const real *p) { return OP(vld1)(p); }
V vf v_loadu(const real *p) { return OP(vld1)(p); }
V void v_store(real *p, vf x) { OP(vst1)(p, x); }
V void v_storeu(real *p, vf x) { OP(vst1)(p, x); }
V vf v_fma(vf a, vf b, vf c) { return OP(vfma)(c, a, b); }
V vf v_add(vf a, vf b) { return OP(vadd)(a, b); }
V vf v_sub(vf a, vf b) { return OP(vsub)(a, b); }
V vf v_mul(vf a, vf b) { return OP(vmul)(a, b); }
V vf v_div(vf a, vf b) { return OP(vdiv)(a, b); }
V vm v_gt(vf a, vf b) { return OP(vcgt)(a, b); }
V vm v_eq(vf a, vf b) { return OP(vceq)(a, b); }
V vf v_select(vm m, vf a, vf b) { return OP(vbsl)(m, a, b); }
V vf v_fold(vf s, vf m) { return v_select(v_gt(s, m), s, m); }
V vm v_bits(uint64_t word) {
#ifdef QKV__F64
  const uint64x2_t lane = {1, 2};
  return vtstq_u64(vdupq_n_u64(word), lane);
#else
  const uint32x4_t lane = {1, 2, 4, 8};
  return vtstq_u32(vdupq_n_u32((uint32_t)(word & 15)), lane);
#endif
}
V vf v_min0(vf x) { return v_select(v_gt(x, v_zero()), v_zero(), x); } /* NaN passes */
/* p * 2^n, n in the low bits of t; 0 where x < min; NaN stays */
V vf v_scale2(vf p, vf t, vf n, vf x, real min) {
  (void)n;
#ifdef QKV__F64
  const vf two_n = vreinterpretq_f64_s64(vshlq_n_s64(vaddq_s64(vreinterpretq_s64_f64(t), vdupq_n_s64(1023)), 52));
#else
  const vf two_n = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vreinterpretq_s32_f32(t), vdupq_n_s32(127)), 23));
#endif
  return v_select(OP(vclt)(x, v_set1(min)), v_zero(), v_mul(p, two_n));
}
#ifndef QKV__F64
V vf v_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
/* to nearest even; NaN stays */
V void v_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
V void v_store_bf16(uint16_t *p, vf x) {
  const uint32x4_t b = vreinterpretq_u32_f32(x), high = vshrq_n_u32(b, 16);
  const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
  const uint32x4_t even = vshrq_n_u32(vaddq_u32(b, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), even, vorrq_u32(high, vdupq_n_u32(0x40)))));
}
V vf v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
#endif
#define UL 4
typedef uint32x4_t vu;
V vu u_set1(uint32_t x) { return vdupq_n_u32(x); }
V vu u_load(const uint32_t *p) { return vld1q_u32(p); }
V vu u_xor(vu a, vu b) { return veorq_u32(a, b); }
V void u_mul(uint32_t m, vu x, vu *high, vu *low) {
  const uint32x4_t a = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(x), m)), b = vreinterpretq_u32_u64(vmull_high_n_u32(x, m));
  *low = vuzp1q_u32(a, b);
  *high = vuzp2q_u32(a, b);
}
/* bit i: x[i] >= least */
V uint64_t u_at_least(vu x, uint32_t least) {
  const uint32x4_t lane = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgeq_u32(x, vdupq_n_u32(least)), lane));
}
#define v_pin(x) __asm__("" : "+w"(x))

V void v_transpose(vf r[VL]) {
#ifdef QKV__F64
  const vf a = vtrn1q_f64(r[0], r[1]), b = vtrn2q_f64(r[0], r[1]);
  r[0] = a;
  r[1] = b;
#else
  const float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]), c = vtrn1q_f32(r[2], r[3]),
                    d = vtrn2q_f32(r[2], r[3]);
#define PAIR(op, x, y) vreinterpretq_f32_f64(op(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)))
  r[0] = PAIR(vtrn1q_f64, a, c);
  r[1] = PAIR(vtrn1q_f64, b, d);
  r[2] = PAIR(vtrn2q_f64, a, c);
  r[3] = PAIR(vtrn2q_f64, b, d);
#undef PAIR
#endif
}

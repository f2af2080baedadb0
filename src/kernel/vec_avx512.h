/* Verbs over 512-bit vectors: AVX-512 F, DQ, BW, VL. */
#include <immintrin.h>

#ifdef QKV__F64
#define VL 8
typedef __m512d vf;
typedef __mmask8 vm;
#define OP(name)          _mm512_##name##_pd
#define CMP_MASK(a, b, o) _mm512_cmp_pd_mask(a, b, o)
#else
#define VL                16
typedef __m512 vf;
typedef __mmask16 vm;
#define OP(name)          _mm512_##name##_ps
#define CMP_MASK(a, b, o) _mm512_cmp_ps_mask(a, b, o)
#endif
#define NR   2 /* vectors of a panel */
#define FUSE 1

V vf v_zero(void) { return OP(setzero)(); }
V vf v_set1(real x) { return OP(set1)(x); }
V vf v_load(const real *p) { return OP(load)(p); }
V vf v_loadu(const real *p) { return OP(loadu)(p); }
V void v_store(real *p, vf x) { OP(store)(p, x); }
V void v_storeu(real *p, vf x) { OP(storeu)(p, x); }
V vf v_fma(vf a, vf b, vf c) { return OP(fmadd)(a, b, c); }
V vf v_add(vf a, vf b) { return OP(add)(a, b); }
V vf v_sub(vf a, vf b) { return OP(sub)(a, b); }
V vf v_mul(vf a, vf b) { return OP(mul)(a, b); }
V vf v_div(vf a, vf b) { return OP(div)(a, b); }
V vf v_fold(vf s, vf m) { return OP(max)(s, m); } /* the second operand when unordered */
V vf v_min0(vf x) { return OP(min)(v_zero(), x); } /* NaN passes */
V vm v_gt(vf a, vf b) { return CMP_MASK(a, b, _CMP_GT_OQ); }
V vm v_eq(vf a, vf b) { return CMP_MASK(a, b, _CMP_EQ_OQ); }
V vm v_or(vm a, vm b) { return (vm)(a | b); }
V vm v_andnot(vm a, vm b) { return (vm)(~a & b); }
V vm v_bits(uint64_t word) { return (vm)word; }
V vf v_select(vm m, vf a, vf b) { return OP(mask_blend)(m, b, a); }
/* x = n + f, n the nearest integer, ties to even */
#define HAS_SPLIT
V vf v_split(vf x, vf *n) {
#ifdef QKV__F64
  const vf f = _mm512_reduce_pd(x, 8);
#else
  const vf f = _mm512_reduce_ps(x, 8);
#endif
  *n = v_sub(x, f);
  return f;
}
/* p * 2^n; 0 where x < min; NaN stays */
V vf v_scale2(vf p, vf t, vf n, vf x, real min) {
  (void)t;
  return OP(maskz_scalef)(CMP_MASK(x, v_set1(min), _CMP_NLT_UQ), p, n);
}
#ifndef QKV__F64
V vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
/* to nearest even; NaN stays */
V void v_store_f16(uint16_t *p, vf x) {
  _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V void v_store_bf16(uint16_t *p, vf x) {
  const __m512i b = _mm512_castps_si512(x), high = _mm512_srli_epi32(b, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i even = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __m512i r = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(r));
}
V vf v_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
#endif
/* Unsigned words, the even and the odd apart: each in the low half of 64 bits, with anything above. */
#define UL 16
typedef struct vu {
  __m512i even, odd;
} vu;
V vu u_set1(uint32_t x) {
  const vu r = {_mm512_set1_epi32((int)x), _mm512_set1_epi32((int)x)};
  return r;
}
V vu u_load(const uint32_t *p) {
  const __m512i x = _mm512_loadu_si512(p);
  const vu r = {x, _mm512_srli_epi64(x, 32)};
  return r;
}
V vu u_xor(vu a, vu b) {
  const vu r = {_mm512_xor_si512(a.even, b.even), _mm512_xor_si512(a.odd, b.odd)};
  return r;
}
V void u_mul(uint32_t m, vu x, vu *high, vu *low) {
  const __m512i mm = _mm512_set1_epi32((int)m);
  low->even = _mm512_mul_epu32(mm, x.even);
  low->odd = _mm512_mul_epu32(mm, x.odd);
  high->even = _mm512_shuffle_epi32(low->even, _MM_PERM_DDBB); /* a shift would wait for the port of the products */
  high->odd = _mm512_shuffle_epi32(low->odd, _MM_PERM_DDBB);
}
/* bit i: x[i] >= least */
V uint64_t u_at_least(vu x, uint32_t least) {
  const __m512i all = _mm512_mask_shuffle_epi32(x.even, 0xaaaa, x.odd, _MM_PERM_CCAA);
  return _mm512_cmpge_epu32_mask(all, _mm512_set1_epi32((int)least));
}
#define v_pin(x) __asm__("" : "+v"(x))

V void v_transpose(vf r[VL]) {
  vf t[VL];
#ifdef QKV__F64
  QKV_UNROLL_ALL for (int i = 0; i < 8; i++) {
    const vf x = r[i & ~1], y = r[i | 1];
    t[i] = i & 1 ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y);
  }
  /* t[2a + k]: rows 2a, 2a+1, column 2L + k in 128-bit lane L */
  QKV_UNROLL_ALL for (int k = 0; k < 2; k++) {
    const vf x = _mm512_shuffle_f64x2(t[k], t[2 + k], 0x88), y = _mm512_shuffle_f64x2(t[k], t[2 + k], 0xdd);
    const vf z = _mm512_shuffle_f64x2(t[4 + k], t[6 + k], 0x88), w = _mm512_shuffle_f64x2(t[4 + k], t[6 + k], 0xdd);
    r[k] = _mm512_shuffle_f64x2(x, z, 0x88);
    r[4 + k] = _mm512_shuffle_f64x2(x, z, 0xdd);
    r[2 + k] = _mm512_shuffle_f64x2(y, w, 0x88);
    r[6 + k] = _mm512_shuffle_f64x2(y, w, 0xdd);
  }
#else
  QKV_UNROLL_ALL for (int i = 0; i < 16; i++) {
    const int a = i & ~3, k = i & 3;
    const vf x = r[a + (k >> 1 << 1)], y = r[a + (k >> 1 << 1) + 1];
    t[i] = k & 1 ? _mm512_unpackhi_ps(x, y) : _mm512_unpacklo_ps(x, y);
  }
  QKV_UNROLL_ALL for (int i = 0; i < 16; i++) {
    const int a = i & ~3, k = i & 3;
    const __m512d x = _mm512_castps_pd(t[a + (k >> 1)]), y = _mm512_castps_pd(t[a + 2 + (k >> 1)]);
    r[i] = _mm512_castpd_ps(k & 1 ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  }
  /* r[4a + k]: rows 4a..4a+3, column 4L + k in 128-bit lane L */
  QKV_UNROLL_ALL for (int k = 0; k < 4; k++) {
    const vf x = _mm512_shuffle_f32x4(r[k], r[4 + k], 0x88), y = _mm512_shuffle_f32x4(r[k], r[4 + k], 0xdd);
    const vf z = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0x88), w = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0xdd);
    t[k] = _mm512_shuffle_f32x4(x, z, 0x88);
    t[8 + k] = _mm512_shuffle_f32x4(x, z, 0xdd);
    t[4 + k] = _mm512_shuffle_f32x4(y, w, 0x88);
    t[12 + k] = _mm512_shuffle_f32x4(y, w, 0xdd);
  }
  QKV_UNROLL_ALL for (int i = 0; i < 16; i++) r[i] = t[i];
#endif
}

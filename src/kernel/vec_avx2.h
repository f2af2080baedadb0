/* Verbs over 256-bit vectors: AVX2, FMA and F16C. */
#include <immintrin.h>

#ifdef QKV__F64
#define VL 4
typedef __m256d vf;
#define OP(name)     _mm256_##name##_pd
#define CMP(a, b, o) _mm256_cmp_pd(a, b, o)
#else
#define VL           8
typedef __m256 vf;
#define OP(name)     _mm256_##name##_ps
#define CMP(a, b, o) _mm256_cmp_ps(a, b, o)
#endif
typedef vf vm;      /* all ones or all zeros per lane */
#define NR        3 /* 4 x 3: 12 accumulators, 3 vectors and a broadcast are the 16 registers */
#define MR_OF(nr) ((nr) == 1 ? 8 : 4)
#define FUSE      0

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
V vm v_gt(vf a, vf b) { return CMP(a, b, _CMP_GT_OQ); }
V vm v_eq(vf a, vf b) { return CMP(a, b, _CMP_EQ_OQ); }
V vm v_or(vm a, vm b) { return OP(or)(a, b); }
V vm v_andnot(vm a, vm b) { return OP(andnot)(a, b); }
V vf v_select(vm m, vf a, vf b) { return OP(blendv)(b, a, m); }
V vm v_bits(uint64_t word) {
#ifdef QKV__F64
  const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8), all = _mm256_set1_epi64x((long long)word);
  return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(all, lane), lane));
#else
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), all = _mm256_set1_epi32((int)(uint32_t)(word & 255));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane));
#endif
}
/* p * 2^n, n in the low bits of t; 0 where x < min; NaN stays: a multiplication, since adding to the exponent of a NaN
 * makes numbers */
V vf v_scale2(vf p, vf t, vf n, vf x, real min) {
  (void)n;
#ifdef QKV__F64
  const __m256i e = _mm256_slli_epi64(_mm256_add_epi64(_mm256_castpd_si256(t), _mm256_set1_epi64x(1023)), 52);
  const vf y = _mm256_mul_pd(p, _mm256_castsi256_pd(e));
#else
  const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23);
  const vf y = _mm256_mul_ps(p, _mm256_castsi256_ps(e));
#endif
  return OP(and)(y, CMP(x, v_set1(min), _CMP_NLT_UQ));
}
#ifndef QKV__F64
V vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
/* to nearest even; NaN stays */
V void v_store_f16(uint16_t *p, vf x) {
  _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
V void v_store_bf16(uint16_t *p, vf x) {
  const __m256i b = _mm256_castps_si256(x), high = _mm256_srli_epi32(b, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i even = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i r = _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
  _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(packed));
}
V vf v_load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
}
#endif
/* Unsigned words, the even and the odd apart: each in the low half of 64 bits, with anything above. */
#define UL 8
typedef struct vu {
  __m256i even, odd;
} vu;
V vu u_set1(uint32_t x) {
  const vu r = {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)};
  return r;
}
V vu u_load(const uint32_t *p) {
  const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
  const vu r = {x, _mm256_srli_epi64(x, 32)};
  return r;
}
V vu u_xor(vu a, vu b) {
  const vu r = {_mm256_xor_si256(a.even, b.even), _mm256_xor_si256(a.odd, b.odd)};
  return r;
}
V void u_mul(uint32_t m, vu x, vu *high, vu *low) {
  const __m256i mm = _mm256_set1_epi32((int)m);
  low->even = _mm256_mul_epu32(mm, x.even);
  low->odd = _mm256_mul_epu32(mm, x.odd);
  high->even = _mm256_srli_epi64(low->even, 32);
  high->odd = _mm256_srli_epi64(low->odd, 32);
}
/* bit i: x[i] >= least */
V uint64_t u_at_least(vu x, uint32_t least) {
  const __m256i all = _mm256_blend_epi32(x.even, _mm256_slli_epi64(x.odd, 32), 0xaa);
  const __m256i yes = _mm256_cmpeq_epi32(_mm256_max_epu32(all, _mm256_set1_epi32((int)least)), all);
  return (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(yes));
}
/* clang turns a sum into the operand that was broadcast, and then has too few registers for a tile of 4 x 3. */
#if defined(__clang__)
#ifdef QKV__F64
#define v_accumulate(sum, a, b) __asm__("vfmadd231pd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#else
#define v_accumulate(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#endif
#endif
#define v_pin(x) __asm__("" : "+x"(x))

V void v_transpose(vf r[VL]) {
#ifdef QKV__F64
  const vf a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
  const vf c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
  r[0] = _mm256_permute2f128_pd(a, c, 0x20);
  r[1] = _mm256_permute2f128_pd(b, d, 0x20);
  r[2] = _mm256_permute2f128_pd(a, c, 0x31);
  r[3] = _mm256_permute2f128_pd(b, d, 0x31);
#else
  vf t[8];
  QKV_UNROLL_ALL for (int i = 0; i < 8; i++) {
    const int a = i & ~3, k = i & 3;
    const vf x = r[a + (k >> 1 << 1)], y = r[a + (k >> 1 << 1) + 1];
    t[i] = k & 1 ? _mm256_unpackhi_ps(x, y) : _mm256_unpacklo_ps(x, y);
  }
  QKV_UNROLL_ALL for (int i = 0; i < 8; i++) {
    const int a = i & ~3, k = i & 3;
    const __m256d x = _mm256_castps_pd(t[a + (k >> 1)]), y = _mm256_castps_pd(t[a + 2 + (k >> 1)]);
    r[i] = _mm256_castpd_ps(k & 1 ? _mm256_unpackhi_pd(x, y) : _mm256_unpacklo_pd(x, y));
  }
  QKV_UNROLL_ALL for (int k = 0; k < 4; k++) {
    t[k] = _mm256_permute2f128_ps(r[k], r[4 + k], 0x20);
    t[4 + k] = _mm256_permute2f128_ps(r[k], r[4 + k], 0x31);
  }
  QKV_UNROLL_ALL for (int i = 0; i < 8; i++) r[i] = t[i];
#endif
}

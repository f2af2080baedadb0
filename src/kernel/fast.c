/* See fast.h. Compiled once with QKV__FAST_AMX and once without. */
#include "kernel/fast.h"

#include <math.h>
#include <string.h>

#include "base/half.h"
#include "base/order1.h"
#include "base/port.h"

#define V QKV_INLINE
typedef float real;
#include "kernel/vec_avx512.h"

#define PADDED(n, to) (((n) + (to)-1) / (to) * (to))
#define NEG_INF ((float)-INFINITY)

/* ---- Products ---- */

#ifdef QKV__FAST_AMX
#define NAME "amx"
#define TABLE qkv__fast_amx

typedef struct config {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
} config;

/* Constant memory: GCC 12 takes the instruction to read 8 bytes, and would drop stores to the others. */
static const config tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static void enter(void) { _tile_loadconfig(&tiles); }
static void leave(void) { _tile_release(); }

/* Tiles 0..3 are 32 rows by 32 lanes of C, 4 and 5 of A, 6 and 7 of B. */
static void product(float *C, int64_t ldc, const uint16_t *A, int64_t lda, int64_t m, int64_t k, const uint32_t *B, int64_t ldb, int64_t n,
                    int add) {
  const size_t a = (size_t)lda * 2, b = (size_t)ldb * 4, c = (size_t)ldc * 4;
  for (int64_t i = 0; i < m; i += 32)
    for (int64_t v = 0; v < n; v += 32) {
      const uint16_t *A0 = A + i * lda, *A1 = A + (i + 16) * lda;
      float *C0 = C + i * ldc + v, *C1 = C + (i + 16) * ldc + v;
      const int two = i + 16 < m, wide = v + 16 < n;
      if (add) {
        _tile_loadd(0, C0, c);
        if (wide) _tile_loadd(1, C0 + VL, c);
        if (two) _tile_loadd(2, C1, c);
        if (two && wide) _tile_loadd(3, C1 + VL, c);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t x = 0; x < k; x += 32) {
        _tile_loadd(4, A0 + x, a);
        _tile_loadd(6, B + x / 2 * ldb + v, b);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
          _tile_loadd(7, B + x / 2 * ldb + v + VL, b);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (two) {
          _tile_loadd(5, A1 + x, a);
          _tile_dpbf16ps(2, 5, 6);
          if (wide) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, C0, c);
      if (wide) _tile_stored(1, C0 + VL, c);
      if (two) {
        _tile_stored(2, C1, c);
        if (wide) _tile_stored(3, C1 + VL, c);
      }
    }
}

#else
#define NAME "avx512_bf16"
#define TABLE qkv__fast_avx512_bf16

static void enter(void) {}
static void leave(void) {}

V void product_nr(const int nr, float *C, int64_t ldc, const uint16_t *A, int64_t lda, int64_t m, int64_t k, const uint32_t *B, int64_t ldb,
                  int add) {
  enum { MR = 8 };
  for (int64_t i = 0; i < m; i += MR) {
    const uint16_t *a = A + i * lda;
    vf acc[MR][NR];
    QKV_UNROLL_ALL for (int r = 0; r < MR; r++) QKV_UNROLL_ALL for (int c = 0; c < nr; c++)
        acc[r][c] = add ? v_load(C + (i + r) * ldc + c * VL) : v_zero();
    for (int64_t x = 0; x < k; x += 2) {
      __m512i b[NR];
      QKV_UNROLL_ALL for (int c = 0; c < nr; c++) {
        b[c] = _mm512_load_si512(B + x / 2 * ldb + c * VL);
        __asm__("" : "+v"(b[c]));
      }
      QKV_UNROLL_ALL for (int r = 0; r < MR; r++) {
        int pair;
        memcpy(&pair, a + r * lda + x, sizeof pair);
        const __m512i broadcast = _mm512_set1_epi32(pair);
        QKV_UNROLL_ALL for (int c = 0; c < nr; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)broadcast, (__m512bh)b[c]);
      }
    }
    QKV_UNROLL_ALL for (int r = 0; r < MR; r++) QKV_UNROLL_ALL for (int c = 0; c < nr; c++)
        v_store(C + (i + r) * ldc + c * VL, acc[r][c]);
  }
}
static void product(float *C, int64_t ldc, const uint16_t *A, int64_t lda, int64_t m, int64_t k, const uint32_t *B, int64_t ldb, int64_t n,
                    int add) {
  for (int64_t v = 0; v < n; v += 2 * VL)
    if (v + VL < n)
      product_nr(2, C + v, ldc, A, lda, m, k, B + v, ldb, add);
    else
      product_nr(1, C + v, ldc, A, lda, m, k, B + v, ldb, add);
}
#endif

/* ---- Layouts ---- */

static void pack(uint32_t *Qt, const uint16_t *rows, int64_t ld, int64_t n, int64_t d, int nv) {
  const int64_t w = nv * VL, pairs = PADDED(d, QKV__FAST_K) / 2;
  for (int64_t i0 = 0; i0 < w; i0 += VL) {
    int64_t x = 0;
    for (; 2 * (x + VL) <= d; x += VL) { /* 16 pairs of 16 rows: a transposition of words */
      vf t[VL];
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) {
        t[i] = i0 + i < n ? v_loadu((const float *)(const void *)(rows + (i0 + i) * ld + 2 * x)) : v_zero();
      }
      v_transpose(t);
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) v_store((float *)(void *)(Qt + (x + i) * w + i0), t[i]);
    }
    for (; x < pairs; x++)
      for (int64_t i = i0; i < i0 + VL; i++) {
        const uint32_t low = i < n && 2 * x < d ? rows[i * ld + 2 * x] : 0;
        const uint32_t high = i < n && 2 * x + 1 < d ? rows[i * ld + 2 * x + 1] : 0;
        Qt[x * w + i] = low | high << 16;
      }
  }
}

static void pad(uint16_t *to, const uint16_t *rows, int64_t ld, int64_t n, int64_t d) {
  const int64_t padded = PADDED(d, QKV__FAST_K);
  for (int64_t j = 0; j < QKV_BLOCK; j++) {
    if (j < n) memcpy(to + j * padded, rows + j * ld, (size_t)d * 2);
    memset(to + j * padded + (j < n ? d : 0), 0, (size_t)(padded - (j < n ? d : 0)) * 2);
  }
}

static int transpose(uint16_t *to, const uint16_t *rows, int64_t ld, int64_t n, int64_t dv) {
  const int64_t padded = PADDED(dv, QKV__FAST_M);
  __mmask32 odd = 0;
  for (int64_t j = 0; j < QKV_BLOCK; j += 32) { /* 32 keys: a row of pairs (2i, 2i + 1) per 16 columns, then words transposed */
    int64_t x = 0;
    for (; x + VL <= dv; x += VL) {
      vf t[VL];
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) {
        const int64_t a = j + 2 * i, b = a + 1;
        const __m256i zero = _mm256_setzero_si256();
        const __m256i va = a < n ? _mm256_loadu_si256((const __m256i *)(const void *)(rows + a * ld + x)) : zero;
        const __m256i vb = b < n ? _mm256_loadu_si256((const __m256i *)(const void *)(rows + b * ld + x)) : zero;
        __m512i word = _mm512_or_si512(_mm512_cvtepu16_epi32(va), _mm512_slli_epi32(_mm512_cvtepu16_epi32(vb), 16));
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(word, exponent), exponent);
        odd |= bad;
        word = _mm512_mask_mov_epi16(word, bad, _mm512_setzero_si512());
        t[i] = _mm512_castsi512_ps(word);
      }
      v_transpose(t);
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) v_storeu((float *)(void *)(to + (x + i) * QKV_BLOCK + j), t[i]);
    }
    for (; x < padded; x++)
      for (int64_t i = j; i < j + 32; i++) {
        uint16_t value = i < n && x < dv ? rows[i * ld + x] : 0;
        if ((value & 0x7f80) == 0x7f80) value = 0, odd = 1;
        to[x * QKV_BLOCK + i] = value;
      }
  }
  return odd != 0;
}

/* ---- Softmax ---- */

static void scale(float *S, double c, const float *m, float *M, int nv) {
  const int w = nv * VL;
  const vf cc = v_set1((float)c);
  for (int v = 0; v < nv; v++) {
    vf a = v_load(m + v * VL), b = a;
    QKV_UNROLL(4) for (int j = 0; j < QKV_BLOCK; j += 2) {
      float *s = S + j * w + v * VL;
      const vf x = v_mul(v_load(s), cc), y = v_mul(v_load(s + w), cc);
      v_store(s, x);
      v_store(s + w, y);
      a = v_fold(x, a);
      b = v_fold(y, b);
    }
    v_store(M + v * VL, v_fold(b, a));
  }
}

/* The bits of p >= 0, plus half of the last place of bf16. Any NaN becomes the default one first: the addition would turn a NaN with
 * another payload into a number. */
V __m512i half_up(vf p) {
  return _mm512_add_epi32(_mm512_min_epu32(_mm512_castps_si512(p), _mm512_set1_epi32(0x7fc00000)), _mm512_set1_epi32(0x8000));
}

/* A cubic for what is rounded to 8 bits: relative error 8e-5. */
V vf exp2_3(vf x) {
  vf n;
  const vf f = v_split(x, &n);
  vf p = v_fma(v_set1(.0551716685f), f, v_set1(.242611125f));
  p = v_fma(p, f, v_set1(.693260968f));
  p = v_fma(p, f, v_set1(.999928057f));
  return v_scale2(p, n, n, x, QKV_EXP2_MIN_F32);
}
V vf exp2_6(vf x) {
  vf n, p = v_zero();
  const vf f = v_split(x, &n);
#define STEP(c) p = v_fma(p, f, v_set1(c));
  QKV_EXP2_F32(STEP)
#undef STEP
  p = v_fma(p, f, v_set1(1));
  return v_scale2(p, n, n, x, QKV_EXP2_MIN_F32);
}

static void softmax(const float *S, uint32_t *P, float *m, const float *M, float *l, float *alpha, int nv) {
  const int w = nv * VL;
  const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
  for (int v = 0; v < nv; v++) {
    const vf to = v_load(M + v * VL), z = v_select(v_eq(to, v_set1(NEG_INF)), v_zero(), to);
    const vf al = exp2_6(v_sub(v_load(m + v * VL), z));
    vf a = v_zero(), b = v_zero();
    v_store(alpha + v * VL, al);
    v_store(m + v * VL, to);
    QKV_UNROLL(2) for (int j = 0; j < QKV_BLOCK; j += 2) {
      const float *s = S + j * w + v * VL;
      const __m512i e = half_up(exp2_3(v_sub(v_load(s), z))), o = half_up(exp2_3(v_sub(v_load(s + w), z)));
      const __m512i top = _mm512_and_si512(o, high);
      a = v_add(a, _mm512_castsi512_ps(_mm512_and_si512(e, high)));
      b = v_add(b, _mm512_castsi512_ps(top));
      _mm512_store_si512(P + j / 2 * w + v * VL, _mm512_or_si512(_mm512_srli_epi32(e, 16), top));
    }
    v_store(l + v * VL, v_fma(v_load(l + v * VL), al, v_add(a, b)));
  }
}

static void rescale(float *O, const float *alpha, int64_t dv, int nv) {
  const int w = nv * VL;
  for (int v = 0; v < nv; v++) {
    const vf al = v_load(alpha + v * VL);
    if (_mm512_cmp_ps_mask(al, v_set1(1), _CMP_NEQ_UQ) == 0) continue; /* no maximum has moved: nothing changes */
    QKV_UNROLL(4) for (int64_t x = 0; x < dv; x++) {
      float *o = O + x * w + v * VL;
      v_store(o, v_mul(v_load(o), al));
    }
  }
}

/* ---- Backward ---- */

static void round_rows(uint16_t *to, int64_t lt, const float *rows, int64_t ld, int64_t n, int64_t d) {
  for (int64_t j = 0; j < QKV_BLOCK; j++) {
    uint16_t *t = to + j * lt;
    int64_t x = 0;
    for (; j < n && x + VL <= d; x += VL) v_store_bf16(t + x, v_loadu(rows + j * ld + x));
    for (; j < n && x < d; x++) t[x] = qkv__narrow_bf16(rows[j * ld + x]);
    memset(t + x, 0, (size_t)(lt - x) * 2);
  }
}

static void pairs(uint32_t *to, int64_t lt, const uint16_t *rows, int64_t ld, int64_t d) {
  for (int64_t i = 0; i < QKV_BLOCK / 2; i++)
    for (int64_t x = 0; x < d; x += VL) {
      const __m256i even = _mm256_loadu_si256((const __m256i *)(const void *)(rows + 2 * i * ld + x));
      const __m256i odd = _mm256_loadu_si256((const __m256i *)(const void *)(rows + (2 * i + 1) * ld + x));
      _mm512_store_si512(to + i * lt + x, _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
    }
}

/* Pairs of keys, then words transposed. */
static void turn(uint16_t *to, const uint16_t *rows) {
  for (int64_t j = 0; j < QKV_BLOCK; j += 32)
    for (int64_t x = 0; x < QKV_BLOCK; x += VL) {
      vf t[VL];
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) {
        const uint16_t *pair = rows + (j + 2 * i) * QKV_BLOCK + x;
        const __m256i even = _mm256_loadu_si256((const __m256i *)(const void *)pair);
        const __m256i odd = _mm256_loadu_si256((const __m256i *)(const void *)(pair + QKV_BLOCK));
        t[i] = _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
      }
      v_transpose(t);
      QKV_UNROLL_ALL for (int i = 0; i < VL; i++) v_storeu((float *)(void *)(to + (x + i) * QKV_BLOCK + j), t[i]);
    }
}

static void multiply(float *S, double c) {
  const vf cc = v_set1((float)c);
  for (int i = 0; i < QKV_BLOCK * QKV_BLOCK; i += VL) v_store(S + i, v_mul(v_load(S + i), cc));
}

extern const qkv__fast TABLE;
const qkv__fast TABLE = {NAME, enter, leave, pack, pad, transpose, product, scale, softmax, rescale, round_rows, pairs, turn, multiply};

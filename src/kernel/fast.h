/* The kernels of QKV_FAST: products of bf16 pairs in instructions that keep f32 sums. Two instances of one file (fast.c): AVX512-BF16
 * dot products, and AMX tiles. What is not here (adjust, merge, finish) is the f32 kernel's.
 *
 * Layouts: a row operand A[m][k] is row-major bf16; a panel operand B[k / 2][w] has pairs, element 2i in the low and 2i + 1 in the
 * high half of a 32-bit word. Q^T and P^T are such panels; K and V^T are row operands. k is padded with zeros to a multiple of 32, m
 * to one of 16. Panels are as wide as those of the f32 kernel (two vectors of 16), or one vector. */
#ifndef QKV_KERNEL_FAST_H
#define QKV_KERNEL_FAST_H

#include <stdint.h>

enum { QKV__FAST_K = 32, QKV__FAST_M = 16 };

typedef struct qkv__fast {
  const char *isa;
  /* Around the other calls of a task: the tile registers. */
  void (*enter)(void);
  void (*leave)(void);
  /* Qt[padded d / 2][w] = pairs of rows[n][d] (row stride ld); lanes from n on are 0 */
  void (*pack)(uint32_t *Qt, const uint16_t *rows, int64_t ld, int64_t n, int64_t d, int nv);
  /* to[64][padded d] = rows[n][d], 0 around */
  void (*pad)(uint16_t *to, const uint16_t *rows, int64_t ld, int64_t n, int64_t d);
  /* to[padded dv][64] = rows[n][dv] transposed, 0 around and for what is not finite; returns whether there was such */
  int (*transpose)(uint16_t *to, const uint16_t *rows, int64_t ld, int64_t n, int64_t dv);
  /* C[m][n] = A[m][k] B[k / 2][n], of row strides ldc, lda, ldb; with `add`, added to what C holds. m and n are padded to 16 */
  void (*product)(float *C, int64_t ldc, const uint16_t *A, int64_t lda, int64_t m, int64_t k, const uint32_t *B, int64_t ldb, int64_t n,
                  int add);
  /* S[64][w] = S * c; M = fold into m */
  void (*scale)(float *S, double c, const float *m, float *M, int nv);
  /* z of M; alpha = exp2(m - z); m = M; p = exp2(S - z) rounded to bf16, as pairs in P[32][w]; l = fma(l, alpha, sum of p) */
  void (*softmax)(const float *S, uint32_t *P, float *m, const float *M, float *l, float *alpha, int nv);
  /* O[dv][w] = O * alpha */
  void (*rescale)(float *O, const float *alpha, int64_t dv, int nv);
  /* BACKWARD. to[64][d] = rows[n][d] (row stride ld) rounded to bf16, 0 around */
  void (*round)(uint16_t *to, int64_t lt, const float *rows, int64_t ld, int64_t n, int64_t d);
  /* to[32][lt] = pairs of rows 2i and 2i + 1 of rows[64][d] (row stride ld); d is padded to 16 */
  void (*pairs)(uint32_t *to, int64_t lt, const uint16_t *rows, int64_t ld, int64_t d);
  /* The transposes of S and D: to[64 rows][64 keys] of [64 keys][64 rows] */
  void (*turn)(uint16_t *to, const uint16_t *rows);
  /* S[64][64] = S * c */
  void (*multiply)(float *S, double c);
} qkv__fast;

#endif

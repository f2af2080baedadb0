/* The micro-kernel contract. One template (kernel.inc) is compiled per instruction set and type; isa.def lists the
 * results. Nothing here knows masks, dtypes, strides or schedules.
 *
 * A panel is `w` = nv * lanes query rows side by side: Q^T[head_dim][w], S^T[64][w], O^T[head_dim_v][w], m[w], l[w], in the
 * arithmetic's type (`real`), each row aligned to the vector. A block has at most 64 keys; of these, the keys in `runs` are
 * computed and the others are not touched. K is row-major with unit column stride. V is in strips of 8 columns: column x
 * of key j is V[x / 8 * strip + j * ldv + x % 8]. Row-major is strip 8; packed is strip 512 with ldv 8, where a tile
 * reads one after the other what it needs, and no pitch of the caller's can make its lines share a set of the cache. */
#ifndef QKV_KERNEL_KERNEL_H
#define QKV_KERNEL_KERNEL_H

#include <stdint.h>

#include "kernel/fast.h"

/* Key ranges [from, to) within a block, ascending. Each begins at a multiple of 8, and ends at one or at the block's end. */
typedef struct qkv__runs {
  int count, full; /* full: one run of 64 */
  struct {
    int from, to;
  } run[4];
} qkv__runs;

/* What happens to scores between Q K^T and softmax; NULL members are off. */
typedef struct qkv__adjust {
  double softcap_g;       /* g; 0: off */
  const void *bias;       /* real [64][w], natural units */
  const void *slope2;     /* real [w] */
  const double *position; /* [w], of the rows; with slope2 */
  double key_position;    /* of key 0 of the block */
  const uint64_t *bits;   /* [64]: bit r of bits[j]: row r sees key j; NULL: all do */
} qkv__adjust;

typedef struct qkv__kernel {
  const char *isa;
  int real_bytes;
  int lanes;  /* per vector */
  int max_nv; /* vectors per panel; narrower ones exist from 1 up */

  /* Qt[d][w] = rows[n][d] (row stride ld) * c, lanes from n on are 0. */
  void (*pack)(void *Qt, const void *rows, int64_t ld, int64_t n, int64_t d, int nv, double c);
  /* rows[n][d] (row stride ld) = Ot[d][w] + 0 */
  void (*unpack)(void *rows, int64_t ld, const void *Ot, int64_t n, int64_t d, int nv);
  /* S[j] = K[j] . Qt for the keys of runs; M = fold of S into m (M is not written if NULL). */
  void (*qk)(const void *Qt, int64_t d, const void *K, int64_t ldk, const qkv__runs *runs, void *S, const void *m, void *M,
             int nv);
  /* qk over a full block, and beside it X = exp2(X - z) and L = its sum over a full block of another panel of the same
   * nv. */
  void (*qk_exp)(const void *Qt, int64_t d, const void *K, int64_t ldk, void *S, const void *m, void *M, void *X,
                 const void *z, void *L, int nv);
  /* S adjusted in place, -inf where invisible; M = fold of it into m. */
  void (*adjust)(void *S, const qkv__runs *runs, const qkv__adjust *a, const void *m, void *M, int nv);
  /* rescale, exp2 and sum in one: z of M; alpha = exp2(m - z); m = M; S = exp2(S - z); L = its sum, ascending; l = fma(l,
   * alpha, L) */
  void (*softmax)(void *S, const qkv__runs *runs, void *m, const void *M, void *l, void *alpha, int nv);
  /* S = exp2(S - z); L = its sum, ascending. */
  void (*exp)(void *S, const qkv__runs *runs, const void *z, void *L, int nv);
  /* z = M with -inf replaced by 0; alpha = exp2(m - z); m = M */
  void (*rescale)(void *m, const void *M, void *z, void *alpha, int nv);
  /* l = fma(l, alpha, L) */
  void (*sum)(void *l, const void *alpha, const void *L, int nv);
  /* O = fma(O, alpha, sum of P[j] V[j]); alpha NULL: O = the sum. bits given: products of invisible slots are not formed. */
  void (*pv)(const void *P, const void *V, int64_t ldv, int64_t strip, int64_t dv, const qkv__runs *runs,
             const uint64_t *bits, void *O, const void *alpha, int nv);
  /* (O, m, l) = MERGE((O, m, l), (Ob, mb, lb)) */
  void (*merge)(void *O, void *m, void *l, const void *Ob, const void *mb, const void *lb, int64_t dv, int nv);
  /* FINISH: sink2[w] or NULL; O becomes the output, empty rows 0; m and l are those of the lse. */
  void (*finish)(void *O, void *m, void *l, const void *sink2, int64_t dv, int nv);
  /* rows[n][d] (row stride ld) = from[n][d] (row stride lf), f16 or bf16 widened; the f32 kernels only */
  void (*widen)(void *rows, int64_t ld, const uint16_t *from, int64_t lf, int64_t n, int64_t d, int is_bf16);
  /* to[n][d] (row stride lt) = rows[n][d] (row stride ld) rounded to f16 or bf16; the f32 kernels only */
  void (*narrow)(uint16_t *to, int64_t lt, const void *rows, int64_t ld, int64_t n, int64_t d, int is_bf16);
  /* strips = rows[n][d] (row stride ld): the packed form of V */
  void (*strips)(void *strips, const void *rows, int64_t ld, int64_t n, int64_t d);
  /* Whether all values are finite. */
  int (*finite)(const void *p, int64_t ld, int64_t rows, int64_t d);
} qkv__kernel;

/* The kernel of an arithmetic for this machine, at most `cap` (NULL: the best); NULL if cap names none. `reason` (may be NULL) says
 * why. With `fast` not NULL, QKV_FAST is wanted: *fast is its table, or NULL if this machine has none. */
const qkv__kernel *qkv__kernel_of(int f64, const char *cap, const qkv__fast **fast, const char **reason);

#endif

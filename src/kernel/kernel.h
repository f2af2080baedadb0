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

/* Dropout of a block: which random words belong to it (docs/NUMERICS.md, DROPOUT). */
typedef struct qkv__dropout {
  uint64_t drop; /* words below are dropped */
  uint32_t key[2], offset;
  uint32_t key_position;              /* of key 0 of the block */
  const uint32_t *position, *head;    /* [w]: counter words 1 and 2 of the rows */
} qkv__dropout;

/* From scores and dP to weights and dX: vectors of a panel's rows, counted from its first row. */
typedef struct qkv__grade {
  const qkv__adjust *adjust;
  const uint64_t *kept;   /* [64] as adjust->bits; NULL: no dropout */
  double r;               /* of dropout */
  const void *L2, *delta; /* real [w] */
  int before_cap;         /* dX is wanted; else dS */
} qkv__grade;

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
  /* bits[j], j of the runs: bit r is set where dropout keeps the weight of row r and key j. */
  void (*kept)(uint64_t *bits, const qkv__runs *runs, const qkv__dropout *d, int nv);
  /* S[j] = 0 where bits[j] are clear */
  void (*drop)(void *S, const qkv__runs *runs, const uint64_t *bits, int nv);
  /* (O, m, l) = MERGE((O, m, l), (Ob, mb, lb)) */
  void (*merge)(void *O, void *m, void *l, const void *Ob, const void *mb, const void *lb, int64_t dv, int nv);
  /* FINISH: sink2[w] or NULL; keep of dropout, or 1; O becomes the output, empty rows 0; m and l are those of the lse. */
  void (*finish)(void *O, void *m, void *l, const void *sink2, double keep, int64_t dv, int nv);
  /* rows[n][d] (row stride ld) = from[n][d] (row stride lf), f16 or bf16 widened; the f32 kernels only */
  void (*widen)(void *rows, int64_t ld, const uint16_t *from, int64_t lf, int64_t n, int64_t d, int is_bf16);
  /* to[n][d] (row stride lt) = rows[n][d] (row stride ld) rounded to f16 or bf16; the f32 kernels only */
  void (*narrow)(uint16_t *to, int64_t lt, const void *rows, int64_t ld, int64_t n, int64_t d, int is_bf16);
  /* strips = rows[n][d] (row stride ld): the packed form of V */
  void (*strips)(void *strips, const void *rows, int64_t ld, int64_t n, int64_t d);
  /* BACKWARD, of a block of at most 64 rows against one of at most 64 keys. Rows of K, Q, dout and of the sums of dq, dk, dv are
   * aligned and have a pitch of whole vectors, with zeros beyond the head dimension. S and D are [64 keys][64 rows]; where nv is given they
   * begin at the first row of a panel of nv vectors, and keys [from, to) are computed. */
  /* S[j] = K[j] . Qt */
  void (*scores)(const void *Qt, int64_t d, const void *K, int64_t ldk, int from, int to, void *S, int nv);
  /* S = P of S, D = dS of D = V . dOt, where nothing adjusts and all is visible; fuse: softmax beside the product */
  void (*grade_plain)(const void *dOt, int64_t dv, const void *V, int64_t ldv, int from, int to, void *S, void *D, const void *L2,
                      const void *delta, int fuse, int nv);
  /* S = Pv of S, D = dX of D */
  void (*grade)(void *S, void *D, int from, int to, const qkv__grade *g, int nv);
  /* C[i] (pitch ld) = C[i] + the chain over r0 <= r < r1 of A(i, r) B[r] (pitch ldb), for from <= i < to, `ld` columns. A is S or D, i
   * its row and r its column, or (transposed) the other way about. */
  void (*add)(void *C, int64_t ld, int from, int to, const void *A, int transposed, int r0, int r1, const void *B, int64_t ldb);
  /* The same for pairs in bits (bit row of bits[key]) alone: other products are not formed. */
  void (*add_seen)(void *C, int64_t ld, int from, int to, const void *A, int transposed, int r0, int r1, const void *B, int64_t ldb,
                   const uint64_t *bits);
  /* delta[w] = chain of dOt[x] Ot[x] */
  void (*delta)(void *delta, const void *dOt, const void *Ot, int64_t dv, int nv);
  /* total + the chain of Ps delta of n rows */
  double (*sink_sum)(double total, double sink2, const void *L2, const void *delta, int n);
  /* to[n][d] (pitch ld) = scale * from[n][d] (pitch lf) + 0, and old (pitch d; NULL: none) added */
  void (*gradient)(void *to, int64_t ld, const void *from, int64_t lf, int64_t n, int64_t d, double scale, const void *old);
  /* Whether all values are finite. */
  int (*finite)(const void *p, int64_t ld, int64_t rows, int64_t d);
} qkv__kernel;

/* The kernel of an arithmetic for this machine, at most `cap` (NULL: the best); NULL if cap names none. `reason` (may be NULL) says
 * why. With `fast` not NULL, QKV_FAST is wanted: *fast is its table, or NULL if this machine has none. */
const qkv__kernel *qkv__kernel_of(int f64, const char *cap, const qkv__fast **fast, const char **reason);

#endif

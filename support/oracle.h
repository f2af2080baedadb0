/* An independent answer for every problem: the plain formula in two passes over each row with libm, in double for f32
 * arithmetic and in long double for f64, together with a bound of the error that order 1 (docs/NUMERICS.md) may make. It
 * reads nothing but the problem struct and shares no code with the library. */
#ifndef QKV_SUPPORT_ORACLE_H
#define QKV_SUPPORT_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "qkv/qkv.h"

/* What a result must be. */
enum {
  ORACLE_VALUE,     /* within `bound` of `value` */
  ORACLE_NONFINITE, /* NaN or infinite: a visible value of v is */
  ORACLE_NAN,       /* NaN: a visible score is NaN or +inf */
  ORACLE_ANY        /* intermediate overflow, or a non-finite v with weight 0: not specified */
};

typedef struct oracle_value {
  double value; /* for f64 the rounded value; `tail` is the rest */
  double tail;
  double bound;
  int kind;
} oracle_value;

/* Positions, and the mask with lengths. */
int64_t oracle_key_position(const qkv_problem *p, int64_t b, int64_t j);
int64_t oracle_query_position(const qkv_problem *p, int64_t b, int64_t i, int32_t align);
/* Not the bias, and the bias too. */
bool oracle_visible(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j);
bool oracle_sees(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j);
/* Whether dropout keeps the weight. */
bool oracle_kept(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j);
/* Four random words of a counter of four: Philox4x32-10. */
void oracle_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/* Room for one row after another of one problem. NULL: no memory. The bound of a QKV_FAST problem is that of FAST where its
 * types and algorithm allow that, whatever this CPU does: the canonical result is within it. */
typedef struct oracle oracle;
oracle *oracle_new(const qkv_problem *p);
void oracle_free(oracle *o);
/* out: head_dim_v values; lse: one. Rows of one (b, h) one after another are fastest. */
void oracle_row(oracle *o, int64_t b, int64_t h, int64_t i, oracle_value *out, oracle_value *lse);
/* After oracle_row: the score as softmax sees it (natural units; -inf: invisible) and the weight of key j, with bounds. */
void oracle_score(const oracle *o, int64_t j, oracle_value *score, oracle_value *weight);

/* Gradients: the formula of the backward pass from the q, k, v, out and lse that the problem has, in the wider type, with a
 * bound of the error that BACKWARD of order 1 may make with them. So it is exact in what it asks for, and how far out and lse
 * themselves may be off is the business of oracle_row.
 *
 * oracle_gradients_make: all that `g` wants. before: what stood in the outputs that accumulate, in tensors of the same types;
 * NULL: as if none did. oracle_dq and oracle_dkv: of one row, and of one key, without a sweep over all. False: no memory. */
typedef struct oracle_gradients {
  oracle_value *of[7]; /* by PROBLEM_DQ ... PROBLEM_DSINKS, in the order of problem_gradient_extents; NULL: not wanted */
  int64_t extents[7][4];
} oracle_gradients;
bool oracle_gradients_make(oracle_gradients *to, const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before);
void oracle_gradients_free(oracle_gradients *to);
bool oracle_dq(oracle *o, const qkv_gradients *g, int64_t b, int64_t h, int64_t i, oracle_value *dq);
bool oracle_dkv(oracle *o, const qkv_gradients *g, int64_t b, int64_t kv_head, int64_t j, oracle_value *dk,
                oracle_value *dv);

/* Whether a computed number is what the oracle asks for; *ratio becomes error / bound where there is a bound. */
bool oracle_accepts(const oracle_value *expected, double computed, double *ratio);

#endif

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

/* Positions, and the mask with lengths; not the bias. */
int64_t oracle_key_position(const qkv_problem *p, int64_t b, int64_t j);
int64_t oracle_query_position(const qkv_problem *p, int64_t b, int64_t i, int32_t align);
bool oracle_visible(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j);

/* Room for one row after another of one problem. NULL: no memory. The bound of a QKV_FAST problem is that of FAST where its
 * types and algorithm allow that, whatever this CPU does: the canonical result is within it. */
typedef struct oracle oracle;
oracle *oracle_new(const qkv_problem *p);
void oracle_free(oracle *o);
/* out: head_dim_v values; lse: one. Rows of one (b, h) one after another are fastest. */
void oracle_row(oracle *o, int64_t b, int64_t h, int64_t i, oracle_value *out, oracle_value *lse);
/* After oracle_row: the score as softmax sees it (natural units; -inf: invisible) and the weight of key j, with bounds. */
void oracle_score(const oracle *o, int64_t j, oracle_value *score, oracle_value *weight);

/* Whether a computed number is what the oracle asks for; *ratio becomes error / bound where there is a bound. */
bool oracle_accepts(const oracle_value *expected, double computed, double *ratio);

#endif

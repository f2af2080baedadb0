/* qkv/position: where a token stands, told to attention. C11 and C++; see docs/POSITIONS.md for formulas and arithmetic.
 *
 *  - sinusoidal encodings, written or added to x, with dropout
 *  - rotary embeddings (RoPE) with the scalings of long-context models
 *  - ALiBi slopes for qkv_problem.alibi_slopes, and relative buckets (T5) for qkv_problem.bias
 *
 * The rules of qkv.h hold: all-zero is the default, strides count elements, the same bits on every machine and for any
 * executor, an error writes nothing, nothing is allocated. Positions are 32-bit integers, negative ones too; sines and
 * cosines are right at all of them, since the angle is reduced exactly.
 *
 *     double table[QKV_FREQUENCIES_DOUBLES(128)];
 *     qkv_frequencies f = qkv_frequencies_default();
 *     f.rotary_dim = 128; f.base = 500000;
 *     qkv_status s = qkv_frequencies_fill(&f, table, sizeof table);
 *
 *     qkv_rotary r = qkv_rotary_default();
 *     r.batch = 1; r.num_heads = 32; r.seqlen = n; r.head_dim = 128; r.table = table;
 *     r.x = qkv_bhsd(q, QKV_F32, 32, n, 128);
 *     if (!s) s = qkv_rotary_forward(NULL, &r);
 */
#ifndef QKV_POSITION_H
#define QKV_POSITION_H

#include <qkv/qkv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sinusoidal encoding ------------------------------------------------------------------------------------------- */

/* Column 2i of position p is sin(p / base^(2i / d_model)), column 2i+1 the cosine of the same angle; of an odd d_model the last
 * column is a sine. */
typedef struct qkv_sinusoidal {
  uint32_t size; /* sizeof(qkv_sinusoidal) */
  int32_t reserved;
  int64_t batch, seqlen, d_model; /* d_model >= 1 */
  double base;                    /* 0: 10000; else at least 1 */

  /* Position of row i of entry b: position_ids[b][i] if given; else start + starts[b] + i. */
  int64_t start;
  const int32_t *starts;   /* batch values; NULL: 0 */
  qkv_tensor position_ids; /* I32, stride[0] per entry, stride[2] per row; data NULL: none */

  /* (batch, -, seqlen, d_model), strides 0, 2 and 3. Each F32, F16 or BF16, or both F64. */
  qkv_tensor x;   /* data NULL: the encoding alone is written */
  qkv_tensor out; /* x plus encoding; data NULL: in place in x, as with the same tensor twice */

  /* A cache of the encoding: row p, stride[2], and column, stride[3], of positions 0 <= p < table_rows. The others are computed; the
   * bits are the same. F64, or F32 if the arithmetic is. data NULL: none. */
  qkv_tensor table;
  int64_t table_rows;

  /* Dropout of the sum, as in qkv_problem: which elements is a function of seed, offset, the global entry and row, and the
   * column. Words differ from those that attention uses under the same seed and offset. */
  double dropout;
  uint64_t seed, offset;
  int64_t batch_origin, row_origin; /* of entry 0 and row 0 */
} qkv_sinusoidal;

/* Checks as qkv_check does. */
QKV_API qkv_status qkv_sinusoidal_check(const qkv_sinusoidal *sinusoidal, char *text, size_t bytes);
/* out = dropout(x + encoding) */
QKV_API qkv_status qkv_sinusoidal_forward(const qkv_context *context, const qkv_sinusoidal *sinusoidal);
/* The gradient of x: x is the gradient of the forward's out, and out receives that of its x. */
QKV_API qkv_status qkv_sinusoidal_backward(const qkv_context *context, const qkv_sinusoidal *sinusoidal);
/* Bytes of a table of contiguous rows. */
QKV_API qkv_status qkv_sinusoidal_table_bytes(int64_t table_rows, int64_t d_model, int32_t dtype, size_t *bytes);
/* Writes rows from <= p < to of sinusoidal->table; a cache grows by its new rows. d_model, base, table and table_rows are
 * read. */
QKV_API qkv_status qkv_sinusoidal_fill(const qkv_context *context, const qkv_sinusoidal *sinusoidal, int64_t from, int64_t to);

/* ---- Rotary embedding ---------------------------------------------------------------------------------------------- */

/* How the frequencies w_i = base^(-2i / rotary_dim), i < rotary_dim / 2, are changed for longer sequences; s is `factor`, L0
 * original_seqlen. Formulas are in docs/POSITIONS.md. */
enum {
  QKV_ROPE_PLAIN = 0,
  QKV_ROPE_LINEAR = 1,      /* w / s: position interpolation */
  QKV_ROPE_NTK = 2,         /* base * s^(d / (d - 2)) */
  QKV_ROPE_DYNAMIC_NTK = 3, /* the same with s * L / L0 - (s - 1), where L = max(seqlen, L0) */
  QKV_ROPE_YARN = 4,        /* w / s and w, mixed by the turns of a pair within L0; attention_factor */
  QKV_ROPE_LLAMA3 = 5       /* w / s and w, mixed by wavelength */
};

/* Fields that the scaling does not use must be 0. */
typedef struct qkv_frequencies {
  uint32_t size;                            /* sizeof(qkv_frequencies) */
  int32_t scaling;                          /* QKV_ROPE_... */
  int64_t rotary_dim;                       /* even, >= 2; at most head_dim: partial rotation */
  double base;                              /* 0: 10000; else at least 1 (YARN: more than 1) */
  double factor;                            /* s, all but PLAIN: > 0 */
  int64_t original_seqlen;                  /* L0, DYNAMIC_NTK, YARN and LLAMA3: > 0 */
  int64_t seqlen;                           /* L, DYNAMIC_NTK */
  double beta_fast, beta_slow;              /* YARN, 0: 32 and 1 */
  double mscale, mscale_all_dim;            /* YARN, 0: not given; both or none */
  double low_freq_factor, high_freq_factor; /* LLAMA3, 0: 1 and 4 */
  double attention_factor;                  /* sines and cosines are multiplied by it; 0: YARN's own, else 1 */
  const double *factors;                    /* rotary_dim / 2 values > 0 that divide the frequencies besides (LongRoPE; with base 1
                                               any frequencies); NULL: none */
  int32_t no_truncate;                      /* YARN: the ends of the ramp are not rounded to whole pairs */
  int32_t reserved;
} qkv_frequencies;

/* A table of frequencies, filled once, then only read: table[0] a mark, table[1] rotary_dim, table[2] the attention factor,
 * table[3] 0, then for each pair its frequency in radians per position, rounded, for your information; then what the library
 * computes with. */
#define QKV_FREQUENCIES_DOUBLES(rotary_dim) (4 + (rotary_dim) / 2 * 4)
QKV_API qkv_status qkv_frequencies_check(const qkv_frequencies *frequencies, char *text, size_t bytes);
QKV_API qkv_status qkv_frequencies_bytes(const qkv_frequencies *frequencies, size_t *bytes);
/* table: at least that many bytes. */
QKV_API qkv_status qkv_frequencies_fill(const qkv_frequencies *frequencies, double *table, size_t bytes);

/* Which columns are a pair. HALF: i and i + rotary_dim / 2 (NeoX, Llama in Hugging Face's order). INTERLEAVED: 2i and 2i + 1
 * (GPT-J, Meta's Llama). */
enum { QKV_ROTARY_HALF = 0, QKV_ROTARY_INTERLEAVED = 1 };

/* The pair (a, b) of a row at position p becomes attention_factor * (a cos - b sin, a sin + b cos) of the angle p * w_i. */
typedef struct qkv_rotary {
  uint32_t size;   /* sizeof(qkv_rotary) */
  int32_t pairing; /* QKV_ROTARY_... */
  int64_t batch, num_heads, seqlen, head_dim;
  const double *table;     /* of qkv_frequencies_fill */
  int64_t start;           /* positions as in qkv_sinusoidal */
  const int32_t *starts;
  qkv_tensor position_ids; /* I32, stride[0] per entry, stride[2] per row */
  qkv_tensor x;            /* (batch, num_heads, seqlen, head_dim); F32, F16 or BF16, or both F64 */
  qkv_tensor out;          /* columns from rotary_dim on are those of x; data NULL: in place in x, as with the same tensor twice */
} qkv_rotary;

QKV_API qkv_status qkv_rotary_check(const qkv_rotary *rotary, char *text, size_t bytes);
QKV_API qkv_status qkv_rotary_forward(const qkv_context *context, const qkv_rotary *rotary);
/* The gradient of x: x is the gradient of the forward's out, and out receives that of its x. The inverse rotation, times
 * attention_factor. */
QKV_API qkv_status qkv_rotary_backward(const qkv_context *context, const qkv_rotary *rotary);

/* ---- Biases by distance -------------------------------------------------------------------------------------------- */

/* The slopes of ALiBi for heads head_origin <= h < head_origin + num_heads of heads_total, any number. slopes: stride[1] per head,
 * F32 or F64, as qkv_problem.alibi_slopes takes them. */
QKV_API qkv_status qkv_alibi_slopes(int64_t heads_total, int64_t head_origin, int64_t num_heads, const qkv_tensor *slopes);

/* A learned bias per head and bucket of the distance (T5): near distances have a bucket each, farther ones share buckets that
 * grow by a constant ratio, from max_distance on all share the last. bias[b][h][i][j] = table[bucket][h] of the distance
 * kv_position + j - (q_position + i). A bias of one row and seqlen_q + seqlen_kv - 1 keys, kv_position less by seqlen_q - 1, holds
 * every distance: begin at key seqlen_q - 1 with strides -1 per row and +1 per key, and attention needs no square matrix. */
typedef struct qkv_relative {
  uint32_t size;        /* sizeof(qkv_relative) */
  int32_t causal;       /* 0: half of the buckets are for keys behind the query; 1: all, and keys ahead are in bucket 0 */
  int64_t num_buckets;  /* 0: 32; at most 1024 */
  int64_t max_distance; /* 0: 128 */
  int64_t batch;        /* 0: 1 */
  int64_t num_heads, seqlen_q, seqlen_kv;
  int64_t q_position, kv_position; /* of row 0 and key 0 */
  qkv_tensor table;                /* stride[2] per bucket, stride[1] per head */
  qkv_tensor bias;                 /* (batch, num_heads, seqlen_q, seqlen_kv); each F32, F16 or BF16, or both F64 */
  int32_t accumulate;              /* backward: 1 adds to the table */
  int32_t reserved;
} qkv_relative;

QKV_API qkv_status qkv_relative_check(const qkv_relative *relative, char *text, size_t bytes);
/* The bucket of a distance: key minus query. */
QKV_API qkv_status qkv_relative_bucket(const qkv_relative *relative, int64_t distance, int64_t *bucket);
/* Writes bias. */
QKV_API qkv_status qkv_relative_forward(const qkv_context *context, const qkv_relative *relative);
/* bias is the gradient of the bias, any strides; table receives that of the table. Sums are in f64, in an order that does not depend
 * on the executor. */
QKV_API qkv_status qkv_relative_backward(const qkv_context *context, const qkv_relative *relative);

/* ---- Helpers, all inline ------------------------------------------------------------------------------------------- */

static inline qkv_sinusoidal qkv_sinusoidal_default(void) {
  qkv_sinusoidal s;
  memset(&s, 0, sizeof s);
  s.size = (uint32_t)sizeof s;
  return s;
}
static inline qkv_frequencies qkv_frequencies_default(void) {
  qkv_frequencies f;
  memset(&f, 0, sizeof f);
  f.size = (uint32_t)sizeof f;
  return f;
}
static inline qkv_rotary qkv_rotary_default(void) {
  qkv_rotary r;
  memset(&r, 0, sizeof r);
  r.size = (uint32_t)sizeof r;
  return r;
}
static inline qkv_relative qkv_relative_default(void) {
  qkv_relative r;
  memset(&r, 0, sizeof r);
  r.size = (uint32_t)sizeof r;
  return r;
}

#ifdef __cplusplus
}
#endif
#endif

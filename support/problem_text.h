/* The one text form of a problem, shared by the program, the tests, the benchmarks and the fuzzers:
 *
 *     f32 b2 h8/2 q100 k333 d64/80 causal window:128,0 seed:7
 *
 * Words may stand in any order and are separated by blanks; a text is complete without any of them.
 *
 *   f32 | f64 | bf16 | f16       element type of q, k, v, out; f64 means f64 arithmetic, the others f32 (and lse f32)
 *   q:TYPE k:TYPE v:TYPE out:TYPE kv:TYPE    another one for some of them
 *   bB hH[/HKV] qN kN dD[/DV]    extents (default b1 h1 q1 k1 d64; HKV = H, DV = D)
 *   standard                     the materialising algorithm
 *   start | pos                  queries aligned at the start | at random explicit positions, one per entry
 *   scale:X softcap:X
 *   bias[:AXES]                  random bias; AXES is a list of axes that are broadcast: b1 h1 q1 k1
 *   biasinf[:AXES]               the same, every fourth value -inf
 *   biaslow[:AXES]               the same, every fourth row the lowest finite number
 *   alibi[:b] sinks[:b]          per head, or per entry and head
 *   lengths                      random q_length, kv_begin and kv_length per entry, zero and full ones among them
 *   kvpos                        random kv_position per entry
 *   ragged[:q|:kv]               random cu_seqlens: q and k count the rows of all entries together
 *   [or:]MASK                    a term; `or:` joins it with the term before. MASK is one of causal, causal_start,
 *                                window:L,R (negative: no bound), prefix:N, documents, documents2 (queries have ids of
 *                                their own), dense[:FROM], tile (a callback), keys:A,B, queries:A,B, keylist, querylist
 *                                (random lists), chunk:N,B, columns:N,B, stride:N,STEPS (negative: any number), strides:STEPS
 *                                (a stride per entry or head), blocks:SIZE (a random block map)
 *   bhsd | bshd | odd | neg | broadcast    memory layout: padded odd strides, negative strides, stride 0 (inputs)
 *   plain | big | tiny | ones    data: bell-shaped; scores up to 1e5 and v up to 1e27; subnormal; v = 1
 *   nan | visnan                 NaN and Inf in every slot that no row sees or uses | in a few slots anywhere
 *   lse                          asks for the log-sum-exp
 *   dropout:P                    with a seed and an offset of its own
 *   origin                       the problem is a part of a larger one: random batch_origin, head_origin, heads_total
 *   dlse                         the log-sum-exp has a gradient coming in; this and what follows is for the backward pass
 *   want:LIST                    which gradients: letters of q k v b (bias) s (sinks); all that there are
 *   dbias:AXES dsinks:AXES       axes that the gradient is summed over, or `full`; those of bias and sinks
 *   acc                          some of the gradients are added to random numbers
 *   dout:TYPE dq:TYPE dk:TYPE dv:TYPE dbias:TYPE    element types other than those of out, q, k, v and bias
 *   seed:S                       every random number above is a function of S
 */
#ifndef QKV_SUPPORT_PROBLEM_TEXT_H
#define QKV_SUPPORT_PROBLEM_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qkv/sparse.h"

/* ---- Element types ------------------------------------------------------------------------------------------------- */

typedef struct problem_dtype {
  const char *name;
  int32_t code;
  size_t size;
  double (*load)(const void *from);
  void (*store)(void *to, double value);
  void (*store_nan)(void *to, uint64_t choice); /* NaN with odd payloads and signs, and infinities */
  double unit, step, largest;                   /* rounding: relative, of subnormal numbers, and the largest finite number */
  int big_v, tiny_qk, tiny_v;                   /* powers of two that scale the data `big` (steps of v) and `tiny` */
} problem_dtype;

/* The row of a dtype, or NULL. */
const problem_dtype *problem_dtype_of(int32_t code);
const problem_dtype *problem_dtype_named(const char *name);

/* ---- The text, parsed ---------------------------------------------------------------------------------------------- */

enum { PROBLEM_MAX_MASKS = 8, PROBLEM_TEXT_BYTES = 512 };
enum { PROBLEM_BHSD, PROBLEM_BSHD, PROBLEM_ODD, PROBLEM_NEG, PROBLEM_BROADCAST, PROBLEM_LAYOUTS };
enum { PROBLEM_PLAIN, PROBLEM_BIG, PROBLEM_TINY, PROBLEM_ONES, PROBLEM_DATA_KINDS };
enum { PROBLEM_NO_NAN, PROBLEM_NAN, PROBLEM_VISIBLE_NAN };
enum { PROBLEM_NO_BIAS, PROBLEM_BIAS, PROBLEM_BIAS_INF, PROBLEM_BIAS_LOW };
enum {
  PROBLEM_CAUSAL,
  PROBLEM_CAUSAL_START,
  PROBLEM_WINDOW,
  PROBLEM_PREFIX,
  PROBLEM_DOCUMENTS,
  PROBLEM_DOCUMENTS2,
  PROBLEM_DENSE,
  PROBLEM_TILE,
  PROBLEM_KEYS,
  PROBLEM_QUERIES,
  PROBLEM_KEYLIST,
  PROBLEM_QUERYLIST,
  PROBLEM_CHUNK,
  PROBLEM_COLUMNS,
  PROBLEM_STRIDE,
  PROBLEM_STRIDES,
  PROBLEM_BLOCKS,
  PROBLEM_MASKS
};

/* The tensors of qkv_gradients, and an index into what is kept for each. */
enum {
  PROBLEM_DOUT,
  PROBLEM_DLSE,
  PROBLEM_DQ,
  PROBLEM_DK,
  PROBLEM_DV,
  PROBLEM_DBIAS,
  PROBLEM_DSINKS,
  PROBLEM_GRADIENT_TENSORS
};

typedef struct problem_mask {
  int kind;
  bool join; /* with the term before */
  int64_t a, b;
} problem_mask;

typedef struct problem_spec {
  int32_t dtype, algorithm, align;
  int32_t tensor_dtype[4]; /* of q, k, v, out; 0: dtype */
  int64_t batch, num_heads, num_kv_heads, seqlen_q, seqlen_kv, head_dim, head_dim_v;
  double scale, softcap;
  int bias;
  bool bias_broadcast[4];
  bool alibi, alibi_batch, sinks, sinks_batch, lengths, kvpos, ragged_q, ragged_kv, lse;
  int layout, data, nan;
  int mask_count;
  problem_mask mask[PROBLEM_MAX_MASKS];
  double dropout;
  bool origin;
  bool dlse, accumulate;
  int want;                                         /* set of QKV_D...; 0: all */
  bool summed[2], summed_over[2][4];                /* dbias, dsinks: whether, and over which axes, the text says it */
  int32_t gradient_dtype[PROBLEM_GRADIENT_TENSORS]; /* 0: that of the tensor it belongs to */
  uint64_t seed;
} problem_spec;

problem_spec problem_spec_default(void);
/* On an error writes what is wrong, with the word, into `error`. */
bool problem_parse(const char *text, problem_spec *spec, char *error, size_t bytes);
/* Writes the text that gives the same spec. Cuts at `bytes`; PROBLEM_TEXT_BYTES are always enough. */
void problem_print(const problem_spec *spec, char *text, size_t bytes);
/* Checks what the words cannot say one by one. */
bool problem_valid(const problem_spec *spec, char *error, size_t bytes);
/* The index-th random problem of a seed: small extents, the neighbours of 64 and 512, the head counts and head dims that
 * are in use, all options. Its problem_cost is at most max_cost. */
void problem_random(uint64_t seed, uint64_t index, double max_cost, problem_spec *spec);
/* The same problem with other terms: one to four of the sparse kinds, some of those it had between them. */
void problem_random_sparse(uint64_t seed, uint64_t index, double max_cost, problem_spec *spec);
/* Of q (0), k, v and out (3). */
int32_t problem_tensor_dtype(const problem_spec *spec, int tensor);
/* Of one of PROBLEM_DOUT ... PROBLEM_DSINKS. */
int32_t problem_gradient_dtype(const problem_spec *spec, int which);
/* QKV_F32 or QKV_F64. */
int32_t problem_arithmetic(const problem_spec *spec);
/* Multiply-adds, without any mask. */
double problem_cost(const problem_spec *spec);

/* ---- A problem with its memory ------------------------------------------------------------------------------------- */

enum {
  PROBLEM_GUARD_END = 1,  /* each buffer ends at a page that may not be touched */
  PROBLEM_GUARD_BEGIN = 2 /* each buffer begins after a page that may not be touched */
};

typedef struct problem_buffer {
  void *memory; /* what was allocated, `mapped` bytes if that is not 0 */
  size_t mapped;
  unsigned char *begin;
  size_t bytes;
} problem_buffer;

/* What the callback of a `tile` term sees by: a function of absolute positions, the entry and the head. */
typedef struct problem_tile_user {
  uint64_t seed;
  int64_t batch_origin, head_origin;
} problem_tile_user;

enum {
  PROBLEM_BUFFER_Q,
  PROBLEM_BUFFER_K,
  PROBLEM_BUFFER_V,
  PROBLEM_BUFFER_OUT,
  PROBLEM_BUFFER_LSE,
  PROBLEM_BUFFER_BIAS,
  PROBLEM_BUFFER_ALIBI,
  PROBLEM_BUFFER_SINKS,
  PROBLEM_BUFFER_ARRAYS,                           /* five arrays of lengths, two of offsets */
  PROBLEM_BUFFER_MASK = PROBLEM_BUFFER_ARRAYS + 7, /* two per term */
  PROBLEM_BUFFERS = PROBLEM_BUFFER_MASK + 2 * PROBLEM_MAX_MASKS
};

/* Holds pointers into itself: not to be copied or moved. */
typedef struct problem_case {
  problem_spec spec;
  unsigned flags;
  qkv_problem problem;
  qkv_mask mask[PROBLEM_MAX_MASKS];
  problem_tile_user tile[PROBLEM_MAX_MASKS];
  qkv_block_map map[PROBLEM_MAX_MASKS];
  problem_buffer buffer[PROBLEM_BUFFERS];
} problem_case;

/* Makes tensors and arrays, inputs filled from the seed, outputs with bytes 0xff. False: no memory, nothing is held. */
bool problem_build(problem_case *c, const problem_spec *spec, unsigned flags);
/* Parses and builds. */
bool problem_open(problem_case *c, const char *text, unsigned flags, char *error, size_t bytes);
void problem_free(problem_case *c);
/* Fills out and lse with bytes 0xff again. */
void problem_clear_outputs(problem_case *c);
/* Whether the bytes of out and lse between their elements are still 0xff. */
bool problem_gaps_intact(const problem_case *c);

/* The gradients of a case with their memory: dout and dlse filled from the seed, dq, dk, dv, dbias and dsinks with bytes
 * 0xff, or with random numbers where they accumulate. Flags as for problem_build. The problem needs its lse. */
typedef struct problem_gradients {
  qkv_gradients g;
  const problem_case *of;
  problem_buffer buffer[PROBLEM_GRADIENT_TENSORS];
} problem_gradients;
bool problem_gradients_build(problem_gradients *g, const problem_case *c, unsigned flags);
void problem_gradients_free(problem_gradients *g);
/* Fills the outputs as at first. */
void problem_gradients_clear(problem_gradients *g);
bool problem_gradients_gaps_intact(const problem_gradients *g);

/* Memory with guard pages by the same flags; NULL begin when there is none. */
bool problem_buffer_make(problem_buffer *b, size_t bytes, unsigned flags);
void problem_buffer_free(problem_buffer *b);

/* ---- Looking into a problem ---------------------------------------------------------------------------------------- */

/* Rows of entry b: its part of a ragged batch, or the whole extent. */
int64_t problem_rows(const qkv_problem *p, int64_t b);
int64_t problem_keys(const qkv_problem *p, int64_t b);
/* Offsets in elements. side: 'q' for q, out and lse, 'k' for k and v. */
int64_t problem_offset(const qkv_problem *p, const qkv_tensor *t, char side, int64_t b, int64_t h, int64_t i, int64_t x);
/* One value of any float dtype. */
double problem_load(const qkv_tensor *t, int64_t offset);
void problem_store(const qkv_tensor *t, int64_t offset, double value);

/* A tensor of the gradients: PROBLEM_DOUT ... PROBLEM_DSINKS. */
const qkv_tensor *problem_gradient(const qkv_gradients *g, int which);
const char *problem_gradient_name(int which);
/* Its extents: rows and keys are the most of an entry, and of dbias and dsinks the axes that are summed over count 1. */
void problem_gradient_extents(const qkv_problem *p, const qkv_gradients *g, int which, int64_t extents[4]);
/* Whether entry at[0] has the row (or key, for dk and dv) of the index: a ragged batch has entries of different lengths. */
bool problem_gradient_has(const qkv_problem *p, const qkv_gradients *g, int which, const int64_t at[4]);
int64_t problem_gradient_offset(const qkv_problem *p, const qkv_gradients *g, int which, const int64_t at[4]);

/* One entry, or one group of heads of it, as a problem of its own that shares all memory with `p`. */
typedef struct problem_view {
  qkv_problem problem;
  qkv_mask mask[PROBLEM_MAX_MASKS];
  problem_tile_user tile[PROBLEM_MAX_MASKS];
  qkv_block_map map[PROBLEM_MAX_MASKS];
  int32_t cu_q[2], cu_kv[2], first_position;
} problem_view;
/* Entry b and key-value heads kv_head_begin <= kv_head < kv_head_end. Not to be moved. Terms with a callback other than that
 * of `tile` see batch 0. */
void problem_view_entry(problem_view *view, const qkv_problem *p, int64_t b, int64_t kv_head_begin, int64_t kv_head_end);
/* The same part of the gradients. dbias and dsinks are left out where they are summed over entries or heads outside. */
void problem_view_gradients(qkv_gradients *view, const qkv_problem *p, const qkv_gradients *g, int64_t b,
                            int64_t kv_head_begin, int64_t kv_head_end);

#endif

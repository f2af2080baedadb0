/* qkv: Transformer attention for CPUs. C11 and C++; see docs/SEMANTICS.md and docs/NUMERICS.md.
 *
 * One call does   out = softmax(scale * Q K^T, modified and masked) V   for every batch entry and head, in memory that
 * grows linearly with the sequence, with the same bits on every machine, thread count, batch and memory layout.
 *
 *     qkv_problem p = qkv_problem_default();
 *     p.batch = 1; p.num_heads = 32; p.num_kv_heads = 8; p.seqlen_q = p.seqlen_kv = n; p.head_dim = 128;
 *     p.q = qkv_bhsd(q, QKV_F32, 32, n, 128);   p.out = qkv_bhsd(out, QKV_F32, 32, n, 128);
 *     p.k = qkv_bhsd(k, QKV_F32,  8, n, 128);   p.v   = qkv_bhsd(v,   QKV_F32,  8, n, 128);
 *     qkv_mask causal = qkv_causal();           p.mask = &causal; p.mask_count = 1;
 *     qkv_status s = qkv_forward(NULL, &p, NULL, 0);
 *
 * General rules.
 *  - In every struct all-zero means default. A struct that begins with `size` may grow: set `size` to sizeof (the _default
 *    functions do). A larger struct of a newer caller is accepted if the bytes this library does not know are zero.
 *  - Strides count elements, not bytes; 0 and negative strides are legal for inputs. The stride of an axis of extent 1 is
 *    not read. Outputs must not overlap themselves, each other, or an input.
 *  - Each function is thread-safe: nothing is shared but what the caller passes. Structs and inputs are only read, and may
 *    be used by several calls at a time; outputs, scratch and states belong to one call at a time.
 *  - On an error nothing is written (but after QKV_CANCELLED the outputs are unspecified). No function prints, exits,
 *    aborts, or changes errno or the floating-point state of the caller.
 */
#ifndef QKV_QKV_H
#define QKV_QKV_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define QKV_VERSION_MAJOR 0
#define QKV_VERSION_MINOR 1
#define QKV_VERSION_PATCH 0

#if defined(QKV_BUILD_SHARED) && (defined(__GNUC__) || defined(__clang__))
#define QKV_API __attribute__((visibility("default")))
#elif defined(_WIN32) && defined(QKV_BUILD_SHARED)
#define QKV_API __declspec(dllexport)
#else
#define QKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status -------------------------------------------------------------------------------------------------------- */

/* 0 is success. 1xx: an argument is wrong. 2xx: not supported. 3xx: resources. 4xx: transport. 5xx: cancelled. The numbers
 * never change their meaning. */
typedef int32_t qkv_status;

#define QKV_STATUS_LIST(X)                                                                                    \
  X(QKV_OK, 0, "success")                                                                                     \
  X(QKV_BAD_POINTER, 101, "a required pointer is NULL")                                                       \
  X(QKV_BAD_SIZE, 102, "the size member of a struct is wrong")                                                \
  X(QKV_BAD_EXTENT, 103, "an extent is out of range or does not fit another")                                 \
  X(QKV_BAD_DTYPE, 104, "an element type is wrong here")                                                      \
  X(QKV_BAD_STRIDE, 105, "a stride is wrong: an output overlaps itself, or extent x stride x size overflows") \
  X(QKV_BAD_VALUE, 106, "a number is out of range or not finite")                                             \
  X(QKV_BAD_MASK, 107, "a mask term is wrong")                                                                \
  X(QKV_BAD_LENGTHS, 108, "lengths, offsets or positions of batch entries are wrong")                         \
  X(QKV_BAD_OVERLAP, 109, "an output overlaps an input or another output")                                    \
  X(QKV_BAD_STATE, 110, "a state does not fit the problem or the other state")                                \
  X(QKV_BAD_CONTEXT, 111, "the context is wrong")                                                             \
  X(QKV_BAD_REGION, 112, "a region of rows is out of range")                                                  \
  X(QKV_UNSUPPORTED, 201, "not supported by this version")                                                    \
  X(QKV_UNKNOWN_FIELD, 202, "a struct carries a field that this version does not know")                       \
  X(QKV_NO_MEMORY, 301, "out of memory")                                                                      \
  X(QKV_SCRATCH_TOO_SMALL, 302, "the scratch memory is too small")                                            \
  X(QKV_TOO_LARGE, 303, "a size does not fit the address space")                                              \
  X(QKV_STATE_FULL, 304, "the state has too few nodes for the result")                                        \
  X(QKV_TRANSPORT, 401, "the transport failed")                                                               \
  X(QKV_CANCELLED, 501, "cancelled by the caller")

enum {
#define QKV_STATUS_ENUM(name, number, text) name = number,
  QKV_STATUS_LIST(QKV_STATUS_ENUM)
#undef QKV_STATUS_ENUM
};

/* The English text of a status; never NULL. */
QKV_API const char *qkv_status_text(qkv_status status);
/* The library's version at run time: major * 10000 + minor * 100 + patch. */
QKV_API int32_t qkv_version(void);
/* The number of the arithmetic order (docs/NUMERICS.md): results of two builds have equal bits if their orders are equal. */
QKV_API int32_t qkv_order(void);

/* ---- Tensors ------------------------------------------------------------------------------------------------------- */

/* Element types. Arithmetic is in F64 if q, k, v and out are all F64, else in F32. Then q, k, v, out and bias may each be F32, F16
 * or BF16: 16-bit values are widened exactly, and results rounded once, to nearest even. F32 and F64 serve lse, slopes and sinks;
 * I32 and U8 serve masks; I8 is reserved for a later version. */
enum { QKV_F32 = 1, QKV_F64 = 2, QKV_BF16 = 3, QKV_F16 = 4, QKV_I8 = 5, QKV_I32 = 6, QKV_U8 = 7 };

/* Up to four axes: batch, head, row (position), column (feature, or key). `data` points at element (0,0,0,0). */
typedef struct qkv_tensor {
  void *data;
  int64_t stride[4]; /* in elements */
  int32_t dtype;     /* 0 only where data is NULL */
  int32_t reserved;  /* 0 */
} qkv_tensor;

/* ---- Masks --------------------------------------------------------------------------------------------------------- */

/* A mask is a list of terms: an AND of groups, a group being a term and the following terms with join = QKV_OR. No term:
 * everything is visible. Kinds: */
enum {
  QKV_MASK_CAUSAL = 1, /* pos_key <= pos_query; a = 0: by the problem's alignment, a = QKV_ALIGN_START: by START alignment */
  QKV_MASK_WINDOW = 2, /* pos_query - a <= pos_key <= pos_query + b; a negative bound is infinite. Not causal by itself */
  QKV_MASK_PREFIX = 3, /* pos_key < a */
  QKV_MASK_DOCUMENT = 4, /* same document: t = QKV_I32 ids by key (stride[0] per entry, stride[3] per key). The id of a query
                            is the one at its own position, or u's (stride[0] per entry, stride[2] per query row) if u.data
                            is given. A query at a position without a key sees nothing. Ids need not be sorted */
  QKV_MASK_DENSE = 5,    /* t = QKV_U8 (entry, head, row, key - a), non-zero is visible; keys before a are visible. Axes are
                            broadcast by stride 0 */
  QKV_MASK_TILE = 6,     /* fn answers for rectangles of at most 64 x 64 */
  QKV_MASK_KEYS = 7,     /* the key's position is in a set: a <= position < b, or t = QKV_I32 positions (stride[0] per entry, stride[1]
                            per head, stride[3] per position), `a` of them, ascending; unused places at the end hold -1 */
  QKV_MASK_QUERIES = 8,  /* the same of the query's position */
  QKV_MASK_CHUNK = 9,    /* |pos_query / a - pos_key / a| <= b, quotients rounded down: chunks of `a` positions, the own one and b on
                            each side */
  QKV_MASK_COLUMNS = 10, /* pos_key is one of the last b positions of a chunk of `a` */
  QKV_MASK_STRIDED = 11, /* pos_query - pos_key is a multiple of the stride `a`, at most b strides; a negative b is infinite. t: strides as
                            QKV_I32 (stride[0] per entry, stride[1] per head) in the place of a */
  QKV_MASK_BLOCKS = 12,  /* user is a qkv_block_map (qkv/sparse.h) */
  QKV_MASK_KINDS = 13
};
enum { QKV_AND = 0, QKV_OR = 1 };

/* A rectangle of one batch entry and query head, given to a callback. Rows and keys are indices within the entry. */
typedef struct qkv_tile {
  int64_t batch, head;
  int64_t row, rows;                  /* 1 <= rows <= 64 */
  int64_t key, keys;                  /* 1 <= keys <= 64 */
  int64_t row_position, key_position; /* positions of `row` and `key`; they count up by one */
} qkv_tile;

/* Answers QKV_TILE_NONE, QKV_TILE_ALL, or QKV_TILE_SOME after setting bit r of bits[k], for r < rows and k < keys, where row
 * + r sees key + k (bits[] is zero at entry; other bits are ignored). Called from several threads at a time, in any
 * order and any number of times; the answer for an element must not depend on the rectangle. */
enum { QKV_TILE_NONE = 0, QKV_TILE_ALL = 1, QKV_TILE_SOME = 2 };
typedef int32_t (*qkv_tile_fn)(void *user, const qkv_tile *tile, uint64_t *bits);

typedef struct qkv_mask {
  int32_t kind, join;
  int64_t a, b;
  qkv_tensor t, u;
  qkv_tile_fn fn;
  void *user;
  int64_t reserved; /* 0 */
} qkv_mask;

/* ---- Problem ------------------------------------------------------------------------------------------------------- */

/* FLASH: tiles, O(n) memory, the canonical order of arithmetic. STANDARD: the textbook baseline that holds the whole
 * (batch, heads, seqlen_q, seqlen_kv) score tensor; an order of its own. */
enum { QKV_FLASH = 0, QKV_STANDARD = 1 };

/* CANONICAL: the order of docs/NUMERICS.md, the same bits everywhere. FAST: where q, k and v are BF16 and the CPU multiplies bf16 in
 * hardware (AMX, AVX512-BF16), by these instructions, with weights rounded to bf16: several times faster, less accurate (the bound is
 * in docs/NUMERICS.md), the same bits for any thread count and batch but not on every CPU. Elsewhere FAST is CANONICAL; qkv_describe
 * says which. The first FAST call on Linux asks the system for the AMX registers, a right of the whole process. */
enum { QKV_CANONICAL = 0, QKV_FAST = 1 };

/* Where the queries of an entry stand, relative to its keys. Key j has position kv_position + j - kv_begin. Query i has
 *   END       i + kv_position + (kv_length - kv_begin) - q_length: the last query stands at the last key
 *   START     i + kv_position - kv_begin: query i stands at key i (what PyTorch's is_causal means)
 *   EXPLICIT  q_position + i
 * With more queries than keys, END puts the first queries before all keys (negative positions). */
enum { QKV_ALIGN_END = 0, QKV_ALIGN_START = 1, QKV_ALIGN_EXPLICIT = 2 };

typedef struct qkv_problem {
  uint32_t size;     /* sizeof(qkv_problem) */
  int32_t algorithm; /* QKV_FLASH or QKV_STANDARD */
  int32_t align;     /* QKV_ALIGN_... */
  int32_t arithmetic; /* QKV_CANONICAL or QKV_FAST */

  /* Extents. Query head h uses key-value head h / (num_heads / num_kv_heads). Any of them may be 0 but head_dim. */
  int64_t batch; /* entries, or segments of a ragged batch */
  int64_t num_heads;
  int64_t num_kv_heads; /* 0: num_heads; else a divisor of it */
  int64_t seqlen_q;     /* rows per entry; of a ragged batch, rows of all segments together */
  int64_t seqlen_kv;
  int64_t head_dim;   /* >= 1 */
  int64_t head_dim_v; /* 0: head_dim */

  qkv_tensor q;   /* (batch, num_heads, seqlen_q, head_dim) */
  qkv_tensor k;   /* (batch, num_kv_heads, seqlen_kv, head_dim) */
  qkv_tensor v;   /* (batch, num_kv_heads, seqlen_kv, head_dim_v) */
  qkv_tensor out; /* (batch, num_heads, seqlen_q, head_dim_v); all four F64, or none */
  qkv_tensor lse; /* (batch, num_heads, seqlen_q), stride[0..2]; natural log-sum-exp, sink included, -inf for a
                     row that sees nothing. F32, or F64 if q is. data NULL: not wanted */

  double softmax_scale; /* 0: 1/sqrt(head_dim) */
  double softcap;       /* > 0: scores become softcap * tanh(score / softcap); 0: off */

  const qkv_mask *mask; /* mask_count terms */
  int64_t mask_count;

  qkv_tensor bias;         /* (batch, num_heads, seqlen_q, seqlen_kv), added after softcap; -inf hides the key; broadcast by
                              stride 0; data NULL: none. Rows and keys are indices within the entry */
  qkv_tensor alibi_slopes; /* stride[0] per entry, stride[1] per head: score -= slope * |pos_query - pos_key|; NULL: none */
  qkv_tensor sinks;        /* stride[0] per entry, stride[1] per head: one more logit in the denominator; NULL: none */

  /* Per entry, `batch` values each; NULL: the default. Within an entry, keys kv_begin <= j < kv_length exist (kv_length
   * is an end), and queries i < q_length; rows from q_length on give 0 and lse -inf. */
  const int32_t *q_length;    /* seqlen_q */
  const int32_t *kv_begin;    /* 0: first key, for left padding; positions count from it */
  const int32_t *kv_length;   /* seqlen_kv */
  const int32_t *q_position;  /* with ALIGN_EXPLICIT: position of query 0, may be negative; 0 */
  const int32_t *kv_position; /* position of the first key, >= 0; 0 */

  /* Ragged batch: batch + 1 offsets from 0 to seqlen, ascending; entry b has the rows cu[b] <= row < cu[b+1] of tensors
   * whose batch stride is not used. Each side may be ragged or not. NULL: not ragged. Masks, bias and the arrays above
   * count from the entry's first row. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_kv;

  /* Dropout: after normalisation a weight becomes 0 with probability `dropout` (0 <= dropout <= 1; 0: none), the others are
   * multiplied by 1 / (1 - dropout); lse is without it. Which ones is a function of seed, offset (a counter of the caller's,
   * modulo 2^32), the global entry and head, and the two positions alone (docs/NUMERICS.md), so a call that computes a part of
   * a batch or of the heads says where its part begins. */
  double dropout;
  uint64_t seed, offset;
  int64_t batch_origin, head_origin; /* of entry 0 and of query head 0 */
  int64_t heads_total;               /* query heads of the whole; 0: num_heads */
} qkv_problem;

/* The gradients of a loss: what comes in, and which are wanted. qkv_backward reads dout and dlse, and q, k, v, out and lse of
 * the problem (as qkv_forward left them; foreign ones too, if they are right), and writes those of dq, dk, dv, dbias and
 * dsinks whose data is not NULL. Each has its own strides. Types: dout, dq, dk, dv as q, k, v, out: all F64, or each F32, F16 or
 * BF16; dbias the same; dlse and dsinks F32 or F64. Sums are formed in the arithmetic's type whatever the storage. dbias and
 * dsinks may have axes of stride 0: the gradient is summed over these. */
typedef struct qkv_gradients {
  uint32_t size;       /* sizeof(qkv_gradients) */
  int32_t accumulate;  /* set of QKV_D...: these are added to what is there, the others are overwritten */
  qkv_tensor dout;     /* (batch, num_heads, seqlen_q, head_dim_v) */
  qkv_tensor dlse;     /* (batch, num_heads, seqlen_q), stride[0..2]; data NULL: 0 */
  qkv_tensor dq;       /* (batch, num_heads, seqlen_q, head_dim) */
  qkv_tensor dk;       /* (batch, num_kv_heads, seqlen_kv, head_dim): summed over the query heads of its group */
  qkv_tensor dv;       /* (batch, num_kv_heads, seqlen_kv, head_dim_v) */
  qkv_tensor dbias;    /* (batch, num_heads, seqlen_q, seqlen_kv) as bias; of a ragged batch, rows and keys of the longest entry, and 0 beyond
                          an entry's own */
  qkv_tensor dsinks;   /* stride[0] per entry, stride[1] per head */
} qkv_gradients;
enum { QKV_DQ = 1, QKV_DK = 2, QKV_DV = 4, QKV_DBIAS = 8, QKV_DSINKS = 16 };

/* ---- Context ------------------------------------------------------------------------------------------------------- */

/* How a call runs; never what it computes. The caller's own struct, read during calls, shareable between threads. NULL:
 * serial, the best instruction set, malloc. */
typedef struct qkv_context {
  uint32_t size;       /* sizeof(qkv_context) */
  int32_t num_workers; /* number of different `worker` values parallel_for uses; 0: 1 */
  void *self;          /* passed to parallel_for */
  /* Calls body(arg, task, worker) once for each 0 <= task < tasks and returns after the last. Tasks are independent: any
   * order, any thread, one after another too. 0 <= worker < num_workers, different for tasks that run at the same time. */
  void (*parallel_for)(void *self, void (*body)(void *arg, int64_t task, int32_t worker), void *arg, int64_t tasks);
  /* Used once per call that got no scratch, or takes none (merge, finish, scores, describe). Alignment is a power of two.
   * Both or none. */
  void *alloc_self; /* passed to these */
  void *(*alloc)(void *alloc_self, size_t bytes, size_t alignment);
  void (*release)(void *alloc_self, void *memory);
  const char *isa_cap;   /* NULL: best; or "avx512", "avx2", "neon", "portable": at most this; "reference": scalar text;
                            for QKV_FAST also "amx", "avx512_bf16" */
  const int32_t *cancel; /* set it to non-zero from anywhere to end a call early with QKV_CANCELLED */
  uint32_t flags;        /* QKV_FORCE_...: for tests; the bits of the result never change */
  int32_t reserved;      /* 0 */
} qkv_context;

enum {
  QKV_FORCE_PARTIAL = 1, /* every tile takes the path of partly visible ones */
  QKV_FORCE_SELECT = 2,  /* partly visible tiles take the path for operands that are not finite */
  QKV_FORCE_STAGE = 4,   /* K and V are always copied before use */
  QKV_FORCE_SPLIT = 8,   /* keys are always divided among tasks; the backward runs as a wavefront */
  QKV_NO_SKIP = 16,      /* no part of a visible 64 x 64 tile is skipped */
  QKV_FORCE_FUSE = 32,   /* the kernels that do softmax beside products, also where they do not pay */
  QKV_FORCE_PASSES = 64  /* the backward runs in two passes */
};

/* ---- Calls --------------------------------------------------------------------------------------------------------- */

/* Checks a problem without running it. On an error writes what is wrong, naming the field and its values, as at most `bytes`
 * bytes with the final 0 into `text` (which may be NULL); on success an empty text. Reads the arrays of lengths and the
 * mask terms, no other data. Every function below checks the same, but tensors it does not use (all of them in qkv_scratch,
 * qkv_describe, qkv_visible and qkv_state_bytes) may have no data. */
QKV_API qkv_status qkv_check(const qkv_problem *problem, char *text, size_t bytes);

/* Bytes of scratch that qkv_forward and qkv_partial need. Never less for a smaller length: ask once for the largest. */
QKV_API qkv_status qkv_scratch(const qkv_context *context, const qkv_problem *problem, size_t *bytes);

/* Attention. scratch: at least qkv_scratch bytes, any alignment, or NULL (with bytes 0): one allocation, freed on return. */
QKV_API qkv_status qkv_forward(const qkv_context *context, const qkv_problem *problem, void *scratch, size_t bytes);

/* Gradients of attention: all of dq, dk, dv, dbias and dsinks that are given, from dout and dlse. Works for every problem that
 * qkv_forward takes, in memory that grows linearly with the sequence, with the same bits for any number of threads; scores
 * are computed again from lse. Rows that see no key and keys that no row sees get gradients of 0. Both algorithms have this one
 * backward; with QKV_FAST, where the forward is fast, its products are in bf16 too. scratch as for qkv_forward, of qkv_backward_scratch bytes. */
QKV_API qkv_status qkv_backward(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients,
                                void *scratch, size_t bytes);
/* As qkv_check, qkv_scratch and qkv_describe, for qkv_backward. gradients NULL: dq, dk and dv (check wants them given). */
QKV_API qkv_status qkv_backward_check(const qkv_problem *problem, const qkv_gradients *gradients, char *text, size_t bytes);
QKV_API qkv_status qkv_backward_scratch(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients,
                                        size_t *bytes);
QKV_API qkv_status qkv_backward_describe(const qkv_context *context, const qkv_problem *problem,
                                         const qkv_gradients *gradients, char *text, size_t bytes);
/* The gradient of softmax_scale, sum(q * dq) / softmax_scale, from a finished gradients->dq (not one that was added to
 * something else). Serial, in double. QKV_BAD_POINTER without dq. */
QKV_API qkv_status qkv_scale_gradient(const qkv_problem *problem, const qkv_gradients *gradients, double *dscale);

/* One line per fact, "name: value": algorithm, instruction set, alignment, tasks, scratch bytes, visible and computed pairs,
 * full / partial / skipped 64 x 64 tiles, balance. The work is O(visible tiles). Cuts the text at `bytes`. */
QKV_API qkv_status qkv_describe(const qkv_context *context, const qkv_problem *problem, char *text, size_t bytes);

/* The mask's answer for one rectangle, as a callback of QKV_MASK_TILE gives it: batch, head, row, rows, key, keys of
 * `tile` are read. Returns QKV_TILE_... in *answer; lengths count, a bias of -inf does not. */
QKV_API qkv_status qkv_visible(const qkv_problem *problem, const qkv_tile *tile, uint64_t *bits, int32_t *answer);

/* ---- Scores and weights of chosen rows ----------------------------------------------------------------------------- */

enum {
  QKV_SCORES_RAW = 1,    /* scale * q.k */
  QKV_SCORES_CAPPED = 2, /* after softcap */
  QKV_SCORES_BIASED = 3, /* after bias and ALiBi: what softmax sees; natural units */
  QKV_WEIGHTS = 4,       /* the weights before dropout; with a sink their sum is below 1 */
  QKV_KEPT = 5           /* 1 where dropout keeps the weight, 0 where it drops it or there is no such row or key; the mask does not
                            count */
};
typedef struct qkv_region {
  int64_t batch_begin, batch_end, head_begin, head_end, row_begin, row_end;
} qkv_region;

/* Writes `to`, extents (batch, head, row) of the region (indices count from its begin) x seqlen_kv keys. Invisible keys
 * give -inf, as a weight +0. region NULL: everything. to: F32, or F64 if q is. O(rows x keys) scalar work; v and out are
 * not used. */
QKV_API qkv_status qkv_scores(const qkv_context *context, const qkv_problem *problem, int32_t stage,
                              const qkv_region *region, const qkv_tensor *to);

/* ---- States: attention to a part of the keys ----------------------------------------------------------------------- */

/* The unfinished result of attending to some keys: a set of nodes of the binary tree over splits of 512 positions. Node
 * (level, index) stands for positions index * 512 * 2^level and the following 512 * 2^level. A node's memory is, for
 * `rows` rows (entry, head, query; in ragged batches head, row), O: head_dim_v values per row, then m (the maximum in
 * log2 units) and l (the sum), one value per row each, F32 or F64 as the arithmetic. */
typedef struct qkv_node {
  int64_t level, index;
} qkv_node;
typedef struct qkv_state {
  uint32_t size; /* sizeof(qkv_state) */
  int32_t dtype; /* QKV_F32 or QKV_F64 */
  int64_t rows, head_dim_v;
  int64_t count, capacity; /* nodes in use, room */
  qkv_node *nodes;         /* capacity entries, the used ones ascending by position */
  void *data;              /* capacity blocks of rows * (head_dim_v + 2) values, block i is nodes[i] */
} qkv_state;

/* Number of nodes that the problem's keys make, and bytes for a state with room for `capacity` nodes (0: for that
 * number). */
QKV_API qkv_status qkv_state_bytes(const qkv_problem *problem, int64_t capacity, int64_t *nodes, size_t *bytes);
/* Lays an empty state of `capacity` nodes (0: as above) into memory of at least that many bytes, aligned to 8. */
QKV_API qkv_status qkv_state_init(const qkv_problem *problem, int64_t capacity, void *memory, size_t bytes,
                                  qkv_state *state);
/* Attends to the problem's keys (QKV_UNSUPPORTED if algorithm is not FLASH) and leaves the result in `state`, whose old
 * content is dropped. out, lse and sinks are not used. Scratch as for qkv_forward. */
QKV_API qkv_status qkv_partial(const qkv_context *context, const qkv_problem *problem, qkv_state *state, void *scratch,
                               size_t bytes);
/* into = into merged with from. Needs into->capacity >= into->count + from->count. If no node of one overlaps a node of the
 * other (their keys were cut at multiples of 512 positions), any order of merges gives the bits of one call; otherwise both
 * are reduced to one root and the result is right to rounding. */
QKV_API qkv_status qkv_merge(const qkv_context *context, qkv_state *into, const qkv_state *from);
/* Applies the sinks, divides, and writes out and lse of the problem. The state is not changed. */
QKV_API qkv_status qkv_finish(const qkv_context *context, const qkv_problem *problem, const qkv_state *state);

/* ---- Helpers, all inline ------------------------------------------------------------------------------------------- */

static inline qkv_problem qkv_problem_default(void) {
  qkv_problem p;
  memset(&p, 0, sizeof p);
  p.size = (uint32_t)sizeof p;
  return p;
}
static inline qkv_gradients qkv_gradients_default(void) {
  qkv_gradients g;
  memset(&g, 0, sizeof g);
  g.size = (uint32_t)sizeof g;
  return g;
}
static inline qkv_context qkv_context_default(void) {
  qkv_context c;
  memset(&c, 0, sizeof c);
  c.size = (uint32_t)sizeof c;
  return c;
}
/* The constructors take inputs and outputs alike, and only keep the pointer. */
#if defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__)
#define QKV_KEEPS_POINTER __attribute__((access(none, 1)))
#else
#define QKV_KEEPS_POINTER
#endif
QKV_KEEPS_POINTER static inline qkv_tensor qkv_strided(const void *data, int32_t dtype, int64_t batch, int64_t head,
                                                       int64_t row, int64_t column) {
  qkv_tensor t;
  memset(&t, 0, sizeof t);
  t.data = (void *)(uintptr_t)data;
  t.dtype = dtype;
  t.stride[0] = batch;
  t.stride[1] = head;
  t.stride[2] = row;
  t.stride[3] = column;
  return t;
}
/* Contiguous (batch, head, seqlen, dim). */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_bhsd(const void *data, int32_t dtype, int64_t heads, int64_t seqlen,
                                                    int64_t dim) {
  return qkv_strided(data, dtype, heads * seqlen * dim, seqlen * dim, dim, 1);
}
/* Contiguous (batch, seqlen, head, dim); with cu_seqlens, packed rows of (head, dim). */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_bshd(const void *data, int32_t dtype, int64_t heads, int64_t seqlen,
                                                    int64_t dim) {
  return qkv_strided(data, dtype, seqlen * heads * dim, dim, heads * dim, 1);
}
/* Contiguous (batch, head, seqlen): lse. */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_bhs(const void *data, int32_t dtype, int64_t heads, int64_t seqlen) {
  return qkv_strided(data, dtype, heads * seqlen, seqlen, 1, 0);
}
/* One value per head: slopes, sinks. */
QKV_KEEPS_POINTER static inline qkv_tensor qkv_per_head(const void *data, int32_t dtype) {
  return qkv_strided(data, dtype, 0, 1, 0, 0);
}

static inline qkv_mask qkv_mask_term(int32_t kind, int64_t a, int64_t b) {
  qkv_mask m;
  memset(&m, 0, sizeof m);
  m.kind = kind;
  m.a = a;
  m.b = b;
  return m;
}
static inline qkv_mask qkv_causal(void) { return qkv_mask_term(QKV_MASK_CAUSAL, 0, 0); }
static inline qkv_mask qkv_causal_start(void) { return qkv_mask_term(QKV_MASK_CAUSAL, QKV_ALIGN_START, 0); }
/* Inclusive, self not counted: window(0, 0) is self only. Negative: no bound on that side. */
static inline qkv_mask qkv_window(int64_t left, int64_t right) { return qkv_mask_term(QKV_MASK_WINDOW, left, right); }
/* The last `keys` keys, self included: window(keys - 1, 0). */
static inline qkv_mask qkv_window_keys(int64_t keys) { return qkv_mask_term(QKV_MASK_WINDOW, keys - 1, 0); }
static inline qkv_mask qkv_prefix(int64_t keys) { return qkv_mask_term(QKV_MASK_PREFIX, keys, 0); }
static inline qkv_mask qkv_documents(qkv_tensor ids) {
  qkv_mask m = qkv_mask_term(QKV_MASK_DOCUMENT, 0, 0);
  m.t = ids;
  return m;
}
static inline qkv_mask qkv_dense(qkv_tensor bytes, int64_t first_key) {
  qkv_mask m = qkv_mask_term(QKV_MASK_DENSE, first_key, 0);
  m.t = bytes;
  return m;
}
static inline qkv_mask qkv_tiles(qkv_tile_fn fn, void *user) {
  qkv_mask m = qkv_mask_term(QKV_MASK_TILE, 0, 0);
  m.fn = fn;
  m.user = user;
  return m;
}
/* Positions from <= position < to; or `count` listed ones. Of keys: every query sees them. Of queries: they see every key. */
static inline qkv_mask qkv_keys(int64_t from, int64_t to) { return qkv_mask_term(QKV_MASK_KEYS, from, to); }
static inline qkv_mask qkv_queries(int64_t from, int64_t to) { return qkv_mask_term(QKV_MASK_QUERIES, from, to); }
static inline qkv_mask qkv_keys_of(qkv_tensor positions, int64_t count) {
  qkv_mask m = qkv_mask_term(QKV_MASK_KEYS, count, 0);
  m.t = positions;
  return m;
}
static inline qkv_mask qkv_queries_of(qkv_tensor positions, int64_t count) {
  qkv_mask m = qkv_mask_term(QKV_MASK_QUERIES, count, 0);
  m.t = positions;
  return m;
}
static inline qkv_mask qkv_chunk(int64_t size, int64_t neighbours) { return qkv_mask_term(QKV_MASK_CHUNK, size, neighbours); }
static inline qkv_mask qkv_columns(int64_t size, int64_t last) { return qkv_mask_term(QKV_MASK_COLUMNS, size, last); }
/* Every stride-th position, at most `steps` strides away; negative: any number. */
static inline qkv_mask qkv_stride(int64_t stride, int64_t steps) { return qkv_mask_term(QKV_MASK_STRIDED, stride, steps); }
/* A stride per head: a dilated window. */
static inline qkv_mask qkv_strides(qkv_tensor strides, int64_t steps) {
  qkv_mask m = qkv_mask_term(QKV_MASK_STRIDED, 0, steps);
  m.t = strides;
  return m;
}
/* Binds the term to the group before it: {a, qkv_or(b), c} is (a or b) and c. */
static inline qkv_mask qkv_or(qkv_mask m) {
  m.join = QKV_OR;
  return m;
}

#ifdef __cplusplus
}
#endif
#endif

/* qkv/sparse: block maps, what fills them, and the patterns of published models as lists of mask terms. C11 and C++; see
 * docs/SEMANTICS.md, section 3.
 *
 * A sparse pattern is a mask like any other: the kernels skip what no row sees. Terms without arrays are in qkv.h (windows, chunks,
 * strides, sets of keys and of queries); a block map says for each block of queries which blocks of keys it sees, per entry and head
 * or for all. Its memory is the caller's:
 *
 *     qkv_block_map map = qkv_block_map_default();
 *     map.block = 64; map.seqlen_q = map.seqlen_kv = n; map.batch = 1; map.num_heads = 16;
 *     qkv_block_random random = qkv_block_random_default();
 *     random.count = 3; random.window = 1; random.global_first = random.global_last = 1; random.seed = 7;
 *     size_t bytes;
 *     qkv_block_map_bytes(&map, random.count, &bytes);
 *     qkv_block_map_init(&map, random.count, malloc(bytes), bytes);
 *     qkv_random_blocks(&random, &map);
 *
 *     qkv_mask terms[QKV_BIGBIRD_TERMS];
 *     p.mask = terms; p.mask_count = qkv_bigbird_itc(64, 1, n, &map, terms);
 *
 * The rules of qkv.h hold.
 */
#ifndef QKV_SPARSE_H
#define QKV_SPARSE_H

#include <qkv/qkv.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Block maps ---------------------------------------------------------------------------------------------------- */

/* Blocks are of positions: block i of queries are the positions i * block and the following `block`, those of keys the same; the
 * last may be incomplete. Compressed rows: block i of queries of an entry and head sees the key blocks indices[n] for
 * row[i] <= n < row[i + 1], where row = indptr + (entry * num_heads + head) * (blocks of queries + 1). In any order, and a block that
 * is listed twice is seen once; but lists that are ascending, and said to be, are faster to look into when they are long. */
typedef struct qkv_block_map {
  uint32_t size;               /* sizeof(qkv_block_map) */
  int32_t block;               /* 16 to 256 */
  int64_t seqlen_q, seqlen_kv; /* positions of queries and keys that it was made for */
  int64_t batch, num_heads;    /* those of the problem; 1: all entries, all heads have the same */
  int32_t *indptr;
  int32_t *indices;
  int64_t capacity; /* of indices */
  int32_t sorted;   /* 1: all lists are ascending (duplicates are allowed) */
  int32_t reserved; /* 0 */
} qkv_block_map;

/* A problem takes a map whose seqlen_q and seqlen_kv are the ends of its positions (as if all keys and rows of its tensors existed);
 * a problem with kv_position or ALIGN_EXPLICIT, which may be a part of a longer sequence, also one that covers more. */
QKV_API qkv_status qkv_block_map_check(const qkv_block_map *map, char *text, size_t bytes);
/* Bytes of indptr and of indices with room for `count` blocks per block of queries. block, seqlen_q, seqlen_kv, batch and num_heads are
 * read. */
QKV_API qkv_status qkv_block_map_bytes(const qkv_block_map *map, int64_t count, size_t *bytes);
/* Lays the arrays of a map in which nothing is visible into memory of that many bytes, aligned to 4. */
QKV_API qkv_status qkv_block_map_init(qkv_block_map *map, int64_t count, void *memory, size_t bytes);
/* Makes all lists ascending, in place. */
QKV_API qkv_status qkv_block_map_sort(qkv_block_map *map);

/* ---- Random blocks ------------------------------------------------------------------------------------------------- */

/* `count` different blocks of keys for each block of queries and each head of the map, drawn from all that are not left out (all of
 * these, if they are fewer), each set of blocks with the same probability. Left out are blocks that other terms make visible: key blocks
 * at most `window` blocks from the query's own, and the first global_first and last global_last; these blocks of queries, which see
 * everything, get none. A function of the fields, the map's extents and the global numbers of entry and head alone. */
typedef struct qkv_block_random {
  uint32_t size;  /* sizeof(qkv_block_random) */
  int32_t causal; /* 1: only blocks before the query's own */
  int64_t count;
  int64_t window; /* -1: not even the own block is left out */
  int64_t global_first, global_last;
  int64_t seqlen; /* positions from here on take no part, as queries and as keys; 0: all do */
  uint64_t seed;
  int64_t batch_origin, head_origin; /* numbers of the map's first entry and head */
} qkv_block_random;

/* Fills the map. QKV_BAD_EXTENT if indices has too little room. */
QKV_API qkv_status qkv_random_blocks(const qkv_block_random *random, qkv_block_map *map);

/* ---- Selected blocks ----------------------------------------------------------------------------------------------- */

/* The `count` blocks of keys whose mean key has the largest score (product times softmax_scale) with the mean query of the block of
 * queries; of equal ones the first. Rows and keys are those that exist; products are formed in the problem's arithmetic. Causal: among
 * the blocks up to the query's own, which is always taken and counts; combine the map with qkv_causal(). */
typedef struct qkv_block_topk {
  uint32_t size;  /* sizeof(qkv_block_topk) */
  int32_t causal;
  int64_t count;
} qkv_block_topk;

/* Fills the map, whose batch and num_heads are the problem's, from its q and k. */
QKV_API qkv_status qkv_topk_blocks(const qkv_context *context, const qkv_problem *problem, const qkv_block_topk *topk,
                                   qkv_block_map *map);

/* ---- Helpers, all inline ------------------------------------------------------------------------------------------- */

static inline qkv_block_map qkv_block_map_default(void) {
  qkv_block_map m;
  memset(&m, 0, sizeof m);
  m.size = (uint32_t)sizeof m;
  return m;
}
static inline qkv_block_random qkv_block_random_default(void) {
  qkv_block_random r;
  memset(&r, 0, sizeof r);
  r.size = (uint32_t)sizeof r;
  return r;
}
static inline qkv_block_topk qkv_block_topk_default(void) {
  qkv_block_topk t;
  memset(&t, 0, sizeof t);
  t.size = (uint32_t)sizeof t;
  return t;
}
/* The term; it keeps the pointer. */
static inline qkv_mask qkv_blocks(const qkv_block_map *map) {
  qkv_mask m = qkv_mask_term(QKV_MASK_BLOCKS, 0, 0);
  m.user = (void *)(uintptr_t)map;
  return m;
}

/* ---- Published patterns: each writes its terms and returns their number -------------------------------------------- */

enum {
  QKV_LONGFORMER_TERMS = 4,
  QKV_BIGBIRD_TERMS = 6,
  QKV_SPARSE_TRANSFORMER_TERMS = 3,
  QKV_SINKS_WINDOW_TERMS = 3,
  QKV_PREFIX_LM_TERMS = 2
};

/* Longformer (Beltagy et al., 2020): window / 2 keys on each side and self, and the first `globals` positions see all and are seen by
 * all. Other global positions: terms 1 and 2 as qkv_or(qkv_keys_of(...)) and qkv_or(qkv_queries_of(...)). A dilated window, per
 * head: qkv_strides(dilations, window / 2). */
static inline int64_t qkv_longformer(int64_t window, int64_t globals, int causal, qkv_mask terms[QKV_LONGFORMER_TERMS]) {
  int64_t n = 0;
  terms[n++] = qkv_window(window / 2, window / 2);
  terms[n++] = qkv_or(qkv_keys(0, globals));
  terms[n++] = qkv_or(qkv_queries(0, globals));
  if (causal) terms[n++] = qkv_causal();
  return n;
}
/* BigBird, ITC (Zaheer et al., 2020): a window of three blocks, the first and the last global_blocks blocks of seqlen positions global,
 * and random blocks (NULL: none). A published generator's lists can be in the map. */
static inline int64_t qkv_bigbird_itc(int64_t block, int64_t global_blocks, int64_t seqlen, const qkv_block_map *random,
                                      qkv_mask terms[QKV_BIGBIRD_TERMS]) {
  int64_t n = 0, blocks = (seqlen + block - 1) / block, last = blocks > global_blocks ? (blocks - global_blocks) * block : 0;
  terms[n++] = qkv_chunk(block, 1);
  if (random) terms[n++] = qkv_or(qkv_blocks(random));
  terms[n++] = qkv_or(qkv_keys(0, global_blocks * block));
  terms[n++] = qkv_or(qkv_queries(0, global_blocks * block));
  if (global_blocks) {
    terms[n++] = qkv_or(qkv_keys(last, blocks * block));
    terms[n++] = qkv_or(qkv_queries(last, blocks * block));
  }
  return n;
}
/* BigBird, ETC: the sequence's seqlen positions, and behind them `globals` more that see all and are seen by all. */
static inline int64_t qkv_bigbird_etc(int64_t block, int64_t globals, int64_t seqlen, const qkv_block_map *random,
                                      qkv_mask terms[QKV_BIGBIRD_TERMS]) {
  int64_t n = 0;
  terms[n++] = qkv_chunk(block, 1);
  if (random) terms[n++] = qkv_or(qkv_blocks(random));
  terms[n++] = qkv_or(qkv_keys(seqlen, seqlen + globals));
  terms[n++] = qkv_or(qkv_queries(seqlen, seqlen + globals));
  return n;
}
/* Sparse Transformer (Child et al., 2019), both parts of a pattern in one head. Strided: the last `stride` keys and self, and every
 * stride-th key before. The parts alone: {causal, window(stride, 0)}, {causal, stride(stride, -1)}. */
static inline int64_t qkv_sparse_transformer_strided(int64_t stride, qkv_mask terms[QKV_SPARSE_TRANSFORMER_TERMS]) {
  terms[0] = qkv_causal();
  terms[1] = qkv_window(stride, 0);
  terms[2] = qkv_or(qkv_stride(stride, -1));
  return 3;
}
/* Fixed: keys of the own chunk of `stride`, and the last `summary` of every chunk. */
static inline int64_t qkv_sparse_transformer_fixed(int64_t stride, int64_t summary, qkv_mask terms[QKV_SPARSE_TRANSFORMER_TERMS]) {
  terms[0] = qkv_causal();
  terms[1] = qkv_chunk(stride, 0);
  terms[2] = qkv_or(qkv_columns(stride, summary));
  return 3;
}
/* StreamingLLM (Xiao et al., 2023): the first `sinks` keys and the last `keys`, self included. */
static inline int64_t qkv_sinks_window(int64_t sinks, int64_t keys, qkv_mask terms[QKV_SINKS_WINDOW_TERMS]) {
  terms[0] = qkv_causal();
  terms[1] = qkv_window_keys(keys);
  terms[2] = qkv_or(qkv_prefix(sinks));
  return 3;
}
/* Causal, and the first `prefix` keys for all. */
static inline int64_t qkv_prefix_lm(int64_t prefix, qkv_mask terms[QKV_PREFIX_LM_TERMS]) {
  terms[0] = qkv_causal();
  terms[1] = qkv_or(qkv_prefix(prefix));
  return 2;
}

#ifdef __cplusplus
}
#endif
#endif

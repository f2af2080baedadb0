/* A sparse pattern beside its definition: everything that must hold for the two. */
#ifndef QKV_TESTS_SPARSE_PATTERN_H
#define QKV_TESTS_SPARSE_PATTERN_H

#include "gradients.h"
#include "qkv/sparse.h"

/* Whether the query at position `query` sees the key at position `key`, by the definition that was published. seqlen is the number of
 * key positions of the problem. */
typedef struct where {
  int64_t batch, head, query, key, seqlen;
} where;
typedef bool (*definition)(const void *data, const where *w);

/* The problem of a text under `terms`, against a dense mask of bytes that `sees` says: qkv_visible for rectangles of all sizes; out and
 * lse and all gradients within the oracle's bounds, and with the bits of the dense mask, on every instruction set, with any executor
 * and forced path. */
void pattern_prove(const char *text, const qkv_mask *terms, int64_t count, definition sees, const void *data);
/* qkv_visible alone. */
void pattern_visible(const char *text, const qkv_mask *terms, int64_t count, definition sees, const void *data);

/* A map of the positions of a problem in memory of its own, with room for `count` blocks per block of queries; free(map.indptr). */
qkv_block_map pattern_map(const qkv_problem *p, int32_t block, int64_t num_heads, int64_t count);
/* Sets the blocks of queries and of keys of a definition: list i of entry b and head h holds the blocks that `sees` (of where.query
 * and where.key, which are then blocks) says. */
void pattern_fill(qkv_block_map *map, definition sees, const void *data);

#endif

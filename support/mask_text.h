/* Masks as text: `causal & window(255,0)`, `(window(64,64) | prefix(4)) & documents(ids.npy)`.
 *
 *   expression = conjunction { "|" conjunction }        lowest
 *   conjunction = operand { "&" operand }
 *   operand = "(" expression ")" | term
 *   term = "none"                     everything is visible
 *        | "causal" | "causal_start"  by the problem's alignment, by START alignment
 *        | "window" "(" left "," right ")"   inclusive, self not counted; a negative number or `inf`: no bound
 *        | "prefix" "(" n ")"         keys 0 to n-1
 *        | "documents" "(" FILE ")"   i4 ids: (keys) or (batch, keys)
 *        | "dense" "(" FILE [ "," first key ] ")"   bool or u1, broadcast to (batch, heads, rows, keys)
 *        | "lengths" "(" FILE ")"     i4 number of keys per batch entry: no mask, only ANDed to the whole
 *        | "keys" SET | "queries" SET   all queries see these keys | these queries see all keys
 *        | "chunk" "(" size [ "," neighbours ] ")"   the own chunk of positions, and so many on each side
 *        | "columns" "(" size "," last ")"           the last keys of each chunk
 *        | "stride" "(" stride or FILE [ "," steps ] ")"   every stride-th position, at most so many away; FILE: i4 per head
 *        | "blocks" "(" FILE "," block ")"           i4 lists of blocks (.., rows, places), -1 unused, or bool (.., rows, keys), in
 *                                                    blocks; before: heads, or batch and heads. Lists of two rows less are those of
 *                                                    all but the first and the last block
 *        | "random" "(" block "," count "," seed [ "," window "," global blocks ] ")"   as qkv_random_blocks; window -1
 *        | "topk" "(" block "," count ")"            as qkv_topk_blocks; causal if the whole expression is
 *        | "last_keys" "(" block "," n ")" | "last_queries" ...   of the last n blocks of the keys' positions
 *        | pattern                                   short for several terms:
 *   SET = "(" n ")" | "(" from "," to ")" | "(" FILE ")"   positions below n, from <= position < to, or listed: i4 (places) or
 *                                     (batch, places), negative: unused; or bool (keys) or (batch, keys)
 *   pattern = "global" SET                                    keys | queries
 *        | "longformer" "(" window "," globals ")"            window(w/2,w/2) | global(globals)
 *        | "bigbird" "(" block "," random "," global blocks "," seed ")"   chunk(block,1) | random | the first and last blocks, global
 *        | "strided" "(" stride ")"                           causal & (window(stride,0) | stride(stride))
 *        | "fixed" "(" stride "," summary ")"                 causal & (chunk(stride) | columns(stride,summary))
 *        | "sinks_window" "(" sinks "," keys ")"              causal & (window(keys-1,0) | prefix(sinks))
 *   FILE = FILE.npy or FILE.safetensors:NAME, in quotes if it contains , ( ) or spaces, or is a number
 *
 * The result is the library's form, an AND of OR-groups, by the distributive law. */
#ifndef QKV_SUPPORT_MASK_TEXT_H
#define QKV_SUPPORT_MASK_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "array.h"
#include "qkv/sparse.h"

enum { MASK_TEXT_TERMS = 64 }; /* at most, before and after distribution */

/* Extents that the files must fit. -1: not known yet; the first file that has the axis sets it. */
typedef struct mask_text_extents {
  int64_t batch, num_heads, seqlen_q, seqlen_kv;
} mask_text_extents;

/* What becomes a term once the problem is known. */
enum { MASK_TEXT_READY, MASK_TEXT_LAST, MASK_TEXT_LISTS, MASK_TEXT_RANDOM, MASK_TEXT_TOPK };

typedef struct mask_text_leaf {
  qkv_mask term;
  char *source; /* the FILE of a term that has one */
  array data;
  int pending;       /* MASK_TEXT_... */
  int64_t number[5]; /* arguments of a pending one */
  qkv_block_map map; /* its arrays are the leaf's */
} mask_text_leaf;

typedef struct mask_text {
  qkv_mask terms[MASK_TEXT_TERMS];      /* what qkv_problem.mask takes */
  const char *sources[MASK_TEXT_TERMS]; /* the FILE of each, NULL if it has none; of a block map, and of one to come, its text */
  int64_t count;
  array lengths;                          /* for qkv_problem.kv_length; data NULL: not given */
  mask_text_extents extents;              /* as given, with what the files said */
  mask_text_leaf leaves[MASK_TEXT_TERMS]; /* the terms as written, each once: they own the files' contents */
  int leaf_count;
} mask_text;

/* Loads FILE; array_load is one. */
typedef int (*mask_text_loader)(const char *source, array *a, char *error, size_t error_bytes);

enum {
  MASK_TEXT_BAD_EXPRESSION = -1,
  MASK_TEXT_BAD_FILE = -2 /* it cannot be read, or does not fit */
};

/* 0, or one of the above with a message of several lines: what is wrong, the expression, and a caret below the place. Either
 * way mask_text_free must follow. Copies of the terms are good until then. loader NULL: array_load. */
int mask_text_parse(const char *expression, const mask_text_extents *extents, mask_text_loader loader, mask_text *mask,
                    char *error, size_t error_bytes);
/* Makes the terms that the extents, the alignment and (topk) q and k of the problem decide: block maps. To be called once these are
 * set and before the terms are used; the mask is not to be moved afterwards. The terms' number and order stay. 0, or -1 with a
 * message. */
int mask_text_complete(mask_text *mask, const qkv_context *context, const qkv_problem *problem, char *error, size_t error_bytes);
/* Whether there is a term that q and k decide. */
int mask_text_needs_data(const mask_text *mask);
void mask_text_free(mask_text *mask);

/* The list as text that parses to it, cut at `bytes`; `sources` may be NULL, then files and block maps are called "...". Returns the
 * text's length uncut. */
size_t mask_text_print(const qkv_mask *terms, int64_t count, const char *const *sources, char *text, size_t bytes);

#endif

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
 *   FILE = FILE.npy or FILE.safetensors:NAME, in quotes if it contains , ( ) or spaces
 *
 * The result is the library's form, an AND of OR-groups, by the distributive law. */
#ifndef QKV_SUPPORT_MASK_TEXT_H
#define QKV_SUPPORT_MASK_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "array.h"

enum { MASK_TEXT_TERMS = 64 }; /* at most, before and after distribution */

/* Extents that the files must fit. -1: not known yet; the first file that has the axis sets it. */
typedef struct mask_text_extents {
  int64_t batch, num_heads, seqlen_q, seqlen_kv;
} mask_text_extents;

typedef struct mask_text_leaf {
  qkv_mask term;
  char *source; /* the FILE of a term that has one */
  array data;
} mask_text_leaf;

typedef struct mask_text {
  qkv_mask terms[MASK_TEXT_TERMS];      /* what qkv_problem.mask takes */
  const char *sources[MASK_TEXT_TERMS]; /* the FILE of each, NULL if it has none */
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
void mask_text_free(mask_text *mask);

/* The list as text that parses to it, cut at `bytes`; `sources` may be NULL, then files are called "...". Returns the text's
 * length uncut. */
size_t mask_text_print(const qkv_mask *terms, int64_t count, const char *const *sources, char *text, size_t bytes);

#endif

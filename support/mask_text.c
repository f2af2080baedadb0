#include "mask_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"
#include "text.h"

/* A formula on its way: an AND of groups, each a set of leaves (bit i is leaf i) that are ORed. No group: everything. */
typedef struct formula {
  uint64_t group[MASK_TEXT_TERMS];
  int count;
  size_t lengths; /* place of a lengths() in it, plus 1; 0: none */
} formula;

typedef struct parser {
  const char *text;
  size_t at;
  int depth;
  int bad_file;
  mask_text *mask;
  mask_text_loader loader;
  char *error;
  size_t error_bytes;
} parser;

enum { DEPTH = 64, SOURCE = 4096, DETAIL = 1024 };

#define TERMS                                                                                                         \
  "none, causal, causal_start, window(left,right), prefix(n), lengths(FILE), documents(FILE), dense(FILE), keys(n), " \
  "queries(n), "                                                                                                      \
  "global(n), chunk(size), columns(size,last), stride(n), blocks(FILE,block), random(block,count,seed), "             \
  "topk(block,count), "                                                                                               \
  "longformer(window,globals), bigbird(block,random,globals,seed), strided(n), fixed(n,summary), sinks_window(sinks,keys)"

/* ---- Messages ---------------------------------------------------------------------------------------------------- */

/* Says `what`, shows the expression and marks the character at `place`. */
static int fail(const parser *p, size_t place, const char *what) {
  size_t length = strlen(p->text);
  char *line = malloc(length + 1), *caret = malloc(length + 1);
  if (line == NULL || caret == NULL) {
    free(line);
    free(caret);
    return text_fail(p->error, p->error_bytes, "%s", what);
  }
  size_t columns = 0;
  for (size_t i = 0; i <= length; i++) {
    unsigned char c = (unsigned char)p->text[i];
    line[i] = c != 0 && (c < 32 || c == 127) ? ' ' : (char)c;
    /* A character of UTF-8 takes one column, at its first byte. */
    if (i < place && (c & 0xc0) != 0x80) caret[columns++] = ' ';
  }
  caret[columns] = 0;
  text_fail(p->error, p->error_bytes, "%s\n  %s\n  %s^", what, line, caret);
  free(line);
  free(caret);
  return -1;
}

static int too_many(const parser *p, size_t place) {
  char what[DETAIL];
  snprintf(what, sizeof what, "more than %d terms, once it is written as an AND of ORs", MASK_TEXT_TERMS);
  return fail(p, place, what);
}

/* Edit distance of short words, for "did you mean". */
static int distance(const char *a, const char *b) {
  enum { LONGEST = 24 };
  int row[LONGEST + 1], n = (int)strlen(b);
  if (strlen(a) > LONGEST || n > LONGEST) return LONGEST;
  for (int j = 0; j <= n; j++) row[j] = j;
  for (int i = 1; a[i - 1] != 0; i++) {
    int diagonal = row[0];
    row[0] = i;
    for (int j = 1; j <= n; j++) {
      int change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      int shorter = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
      row[j] = change < shorter ? change : shorter;
    }
  }
  return row[n];
}

/* ---- Formulas ---------------------------------------------------------------------------------------------------- */

/* Adds a group to the AND. A group that holds another is implied by it. */
static int add_group(const parser *p, size_t place, formula *f, uint64_t group) {
  int kept = 0;
  for (int i = 0; i < f->count; i++) {
    if ((f->group[i] & ~group) == 0) return 0;
  }
  for (int i = 0; i < f->count; i++) {
    if ((group & ~f->group[i]) != 0) f->group[kept++] = f->group[i];
  }
  f->count = kept;
  if (f->count == MASK_TEXT_TERMS) return too_many(p, place);
  f->group[f->count++] = group;
  return 0;
}

static int conjoin(const parser *p, size_t place, formula *f, const formula *g) {
  for (int i = 0; i < g->count; i++) {
    if (add_group(p, place, f, g->group[i]) != 0) return -1;
  }
  if (f->lengths == 0) f->lengths = g->lengths;
  return 0;
}

/* (a & b) | (c & d) = (a | c) & (a | d) & (b | c) & (b | d) */
static int disjoin(const parser *p, size_t place, formula *f, const formula *g) {
  size_t lengths = f->lengths != 0 ? f->lengths : g->lengths;
  if (lengths != 0) {
    return fail(p, lengths - 1, "lengths(...) can only be ANDed to the whole expression: keys beyond a length do not exist");
  }
  formula product = {{0}, 0, 0};
  for (int i = 0; i < f->count; i++) {
    for (int j = 0; j < g->count; j++) {
      if (add_group(p, place, &product, f->group[i] | g->group[j]) != 0) return -1;
    }
  }
  *f = product;
  return 0;
}

/* ---- Tokens ------------------------------------------------------------------------------------------------------ */

static char peek(parser *p) {
  while (p->text[p->at] == ' ' || p->text[p->at] == '\t' || p->text[p->at] == '\n' || p->text[p->at] == '\r') p->at++;
  return p->text[p->at];
}

/* The place of the next character that is no space. */
static size_t here(parser *p) {
  peek(p);
  return p->at;
}

static int take(parser *p, char c) {
  if (peek(p) != c) return 0;
  p->at++;
  return 1;
}

static int require(parser *p, char c, const char *what) { return take(p, c) ? 0 : fail(p, p->at, what); }

static int is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }

static size_t word(parser *p, char *text, size_t bytes) {
  size_t length = 0, begin = p->at;
  while (is_word(p->text[p->at])) p->at++;
  length = p->at - begin;
  size_t kept = length < bytes ? length : bytes - 1;
  memcpy(text, p->text + begin, kept);
  text[kept] = 0;
  return length;
}

static int parse_number(parser *p, int64_t *value, int infinite, const char *what) {
  peek(p);
  size_t begin = p->at;
  if (infinite && strncmp(p->text + p->at, "inf", 3) == 0 && !is_word(p->text[p->at + 3])) {
    p->at += 3;
    *value = -1;
    return 0;
  }
  int negative = take(p, '-');
  int64_t number = 0;
  size_t digits = p->at;
  for (; p->text[p->at] >= '0' && p->text[p->at] <= '9'; p->at++) {
    int digit = p->text[p->at] - '0';
    if (number > (INT64_MAX - digit) / 10) return fail(p, begin, "a number that fits in 63 bits was expected");
    number = number * 10 + digit;
  }
  if (p->at == digits) return fail(p, begin, what);
  if (negative && !infinite) return fail(p, begin, "a number that is not negative was expected");
  *value = negative && number > 0 ? -1 : number;
  return 0;
}

/* FILE, up to , or ) or in quotes. Spaces around an unquoted name do not belong to it. */
static int parse_source(parser *p, char *source, size_t bytes) {
  char quote = peek(p);
  size_t begin = p->at, length = 0;
  if (quote == '"' || quote == '\'') {
    begin = ++p->at;
    while (p->text[p->at] != 0 && p->text[p->at] != quote) p->at++;
    if (p->text[p->at] == 0) return fail(p, begin - 1, "this quote is not closed");
    length = p->at++ - begin;
  } else {
    while (p->text[p->at] != 0 && strchr(",()", p->text[p->at]) == NULL) p->at++;
    length = p->at - begin;
    while (length > 0 && strchr(" \t\r\n", p->text[begin + length - 1]) != NULL) length--;
  }
  if (length == 0) return fail(p, begin, "the name of a file was expected");
  if (length >= bytes) return fail(p, begin, "the name of this file is too long");
  memcpy(source, p->text + begin, length);
  source[length] = 0;
  return 0;
}

/* ---- Terms ------------------------------------------------------------------------------------------------------- */

static int load(parser *p, size_t place, const char *source, array *a) {
  char detail[DETAIL];
  if (p->loader(source, a, detail, sizeof detail) == 0) return 0;
  p->bad_file = 1;
  return fail(p, place, detail);
}

static int wrong_array(parser *p, size_t place, const char *source, const array *a, const char *wanted) {
  char shape[128], what[DETAIL];
  array_shape_text(a->rank, a->shape, shape, sizeof shape);
  snprintf(what, sizeof what, "%.600s: %s was expected, the file has %s %s", source, wanted,
           a->dtype == QKV_I32  ? "integers of shape"
           : a->dtype == QKV_U8 ? "bytes of shape"
                                : "floating-point numbers of shape",
           shape);
  p->bad_file = 1;
  return fail(p, place, what);
}

static int parse_documents(parser *p, mask_text_leaf *leaf) {
  char source[SOURCE], wanted[128];
  size_t place = here(p);
  mask_text_extents *extents = &p->mask->extents;
  if (parse_source(p, source, sizeof source) != 0) return -1;
  leaf->source = strdup(source);
  if (leaf->source == NULL) return fail(p, place, "out of memory");
  if (load(p, place, source, &leaf->data) != 0) return -1;
  const array *a = &leaf->data;
  int64_t keys = a->rank > 0 ? a->shape[a->rank - 1] : -1;
  int64_t extent[ARRAY_RANK] = {1, 1, extents->batch, extents->seqlen_kv < 0 ? keys : extents->seqlen_kv};
  qkv_tensor t;
  /* Ids do not broadcast along the keys. */
  int fits = a->rank >= 1 && a->rank <= 2 && a->dtype == QKV_I32 && array_broadcast(a, extent, &t) == 0 && keys == extent[3];
  if (!fits && extents->seqlen_kv >= 0) {
    snprintf(wanted, sizeof wanted, "integers of shape (%lld,) or (batch, %lld)", (long long)extents->seqlen_kv,
             (long long)extents->seqlen_kv);
  } else {
    snprintf(wanted, sizeof wanted, "integers of shape (keys,) or (batch, keys)");
  }
  if (!fits) return wrong_array(p, place, source, a, wanted);
  extents->batch = extent[2];
  extents->seqlen_kv = extent[3];
  /* The library wants the entry's stride on axis 0; broadcasting put it on the last but one. */
  leaf->term = qkv_documents(qkv_strided(a->data, QKV_I32, t.stride[2], 0, 0, t.stride[3]));
  return 0;
}

static int parse_dense(parser *p, mask_text_leaf *leaf) {
  char source[SOURCE], wanted[160];
  size_t place = here(p);
  int64_t first = 0;
  mask_text_extents *extents = &p->mask->extents;
  if (parse_source(p, source, sizeof source) != 0) return -1;
  if (take(p, ',') && parse_number(p, &first, 0, "the first key that the file covers was expected") != 0) return -1;
  leaf->source = strdup(source);
  if (leaf->source == NULL) return fail(p, place, "out of memory");
  if (load(p, place, source, &leaf->data) != 0) return -1;
  const array *a = &leaf->data;
  int64_t keys = extents->seqlen_kv;
  if (keys >= 0) keys = keys > first ? keys - first : 0;
  int64_t extent[ARRAY_RANK] = {extents->batch, extents->num_heads, extents->seqlen_q, keys};
  qkv_tensor t;
  if (a->rank < 1 || a->dtype != QKV_U8 || array_broadcast(a, extent, &t) != 0) {
    snprintf(wanted, sizeof wanted, "bool or u1 that broadcasts to (batch, heads, rows, keys) = (%lld, %lld, %lld, %lld)",
             (long long)extent[0], (long long)extent[1], (long long)extent[2], (long long)keys);
    /* Axes that nothing has fixed yet have no number to show. */
    if (extent[0] < 0 || extent[1] < 0 || extent[2] < 0 || keys < 0) {
      snprintf(wanted, sizeof wanted, "bool or u1 that broadcasts to (batch, heads, rows, keys)");
    }
    return wrong_array(p, place, source, a, wanted);
  }
  extents->batch = extent[0];
  extents->num_heads = extent[1];
  extents->seqlen_q = extent[2];
  if (keys < 0 && extent[3] >= 0) extents->seqlen_kv = extent[3] + first;
  leaf->term = qkv_dense(t, first);
  return 0;
}

/* Whether a whole number comes next, up to , or ). */
static int is_number(parser *p) {
  peek(p);
  size_t at = p->at;
  while (p->text[at] >= '0' && p->text[at] <= '9') at++;
  if (at == p->at) return 0;
  while (p->text[at] == ' ' || p->text[at] == '\t' || p->text[at] == '\n' || p->text[at] == '\r') at++;
  return p->text[at] == ',' || p->text[at] == ')' || p->text[at] == 0;
}

/* A number from `least` on; later ones after a comma. */
static int parse_argument(parser *p, int first, int64_t least, int64_t *value, const char *what) {
  char text[DETAIL];
  snprintf(text, sizeof text, "',' was expected, and %s", what);
  if (!first && require(p, ',', text) != 0) return -1;
  size_t place = here(p);
  snprintf(text, sizeof text, "%s was expected", what);
  if (parse_number(p, value, 0, text) != 0) return -1;
  if (*value >= least && *value <= INT32_MAX) return 0;
  snprintf(text, sizeof text, "%s must be from %lld to %lld", what, (long long)least, (long long)INT32_MAX);
  return fail(p, place, text);
}

static int parse_block(parser *p, int first, int64_t *value) {
  if (parse_argument(p, first, 16, value, "the size of a block") != 0) return -1;
  return *value <= 256 ? 0 : fail(p, p->at - 1, "a block has 16 to 256 positions");
}

/* What a pending leaf is printed as. */
static int set_source(const parser *p, size_t place, mask_text_leaf *leaf, const char *text) {
  leaf->source = strdup(text);
  return leaf->source != NULL ? 0 : fail(p, place, "out of memory");
}

static int compare_positions(const void *a, const void *b) {
  const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

/* Positions as the library wants them: (entries, places), ascending, -1 behind. From lists, or from a byte per key. */
static int64_t list_positions(const array *a, array *to) {
  const int64_t entries = a->rank == 2 ? a->shape[0] : 1, n = a->shape[a->rank - 1];
  int64_t most = 0;
  for (int pass = 0; pass < 2; pass++) { /* counts, then fills */
    for (int64_t b = 0; b < entries; b++) {
      int32_t *list = pass == 1 ? (int32_t *)to->data + b * most : NULL;
      int64_t count = 0;
      for (int64_t i = 0; i < n; i++) {
        const int64_t at = (a->rank == 2 ? b * a->stride[0] : 0) + i * a->stride[a->rank - 1];
        const int is_flag = a->dtype == QKV_U8;
        const int32_t position = is_flag ? (int32_t)i : ((const int32_t *)a->data)[at];
        if (is_flag ? ((const unsigned char *)a->data)[at] == 0 : position < 0) continue;
        if (pass == 1) list[count] = position;
        count++;
      }
      if (pass == 0) {
        most = count > most ? count : most;
        continue;
      }
      qsort(list, (size_t)count, sizeof *list, compare_positions);
      int64_t kept = 0;
      for (int64_t i = 0; i < count; i++) {
        if (kept == 0 || list[i] != list[kept - 1]) list[kept++] = list[i];
      }
      while (kept < most) list[kept++] = -1;
    }
    const int64_t shape[2] = {entries, most};
    if (pass == 0 && array_alloc(to, QKV_I32, 2, shape) != 0) return -1;
  }
  return most;
}

/* SET, of the kind that the leaf's term has. */
static int parse_set(parser *p, int32_t kind, mask_text_leaf *leaf) {
  int64_t from = 0, to;
  char source[SOURCE];
  size_t place = here(p);
  mask_text_extents *extents = &p->mask->extents;
  if (is_number(p)) {
    if (parse_argument(p, 1, 0, &to, "a number of positions") != 0) return -1;
    if (take(p, ',')) {
      from = to;
      if (parse_argument(p, 1, from, &to, "the end of the positions") != 0) return -1;
    }
    leaf->term = qkv_mask_term(kind, from, to);
    return 0;
  }
  array read;
  if (parse_source(p, source, sizeof source) != 0 || set_source(p, place, leaf, source) != 0) return -1;
  if (load(p, place, source, &read) != 0) return -1;
  int fits = read.rank >= 1 && read.rank <= 2 && (read.dtype == QKV_I32 || read.dtype == QKV_U8);
  const int64_t entries = fits && read.rank == 2 ? read.shape[0] : 1, last = fits ? read.shape[read.rank - 1] : 0;
  fits = fits && (entries == 1 || extents->batch < 0 || entries == extents->batch);
  fits = fits && (read.dtype == QKV_I32 || extents->seqlen_kv < 0 || last == extents->seqlen_kv);
  if (!fits) {
    int result =
        wrong_array(p, place, source, &read,
                    "positions, i4 of shape (places,) or (batch, places), or bool of shape (keys,) or (batch, keys),");
    array_free(&read);
    return result;
  }
  if (entries > 1) extents->batch = entries;
  if (read.dtype == QKV_U8) extents->seqlen_kv = last;
  const int64_t most = list_positions(&read, &leaf->data);
  array_free(&read);
  if (most < 0) return fail(p, place, "out of memory");
  leaf->term = qkv_mask_term(kind, most, 0);
  leaf->term.t = qkv_strided(leaf->data.data, QKV_I32, entries > 1 ? most : 0, 0, 0, 1);
  return 0;
}

static int parse_stride(parser *p, mask_text_leaf *leaf) {
  int64_t stride = 0, steps = -1;
  char source[SOURCE];
  size_t place = here(p);
  mask_text_extents *extents = &p->mask->extents;
  leaf->term = qkv_stride(0, -1);
  if (is_number(p)) {
    if (parse_argument(p, 1, 1, &stride, "the stride") != 0) return -1;
    leaf->term.a = stride;
  } else {
    if (parse_source(p, source, sizeof source) != 0 || set_source(p, place, leaf, source) != 0) return -1;
    if (load(p, place, source, &leaf->data) != 0) return -1;
    const array *a = &leaf->data;
    int fits = a->rank == 1 && a->dtype == QKV_I32 && (extents->num_heads < 0 || a->shape[0] == extents->num_heads);
    for (int64_t h = 0; fits && h < a->shape[0]; h++) fits = ((const int32_t *)a->data)[h * a->stride[0]] >= 1;
    if (!fits) return wrong_array(p, place, source, a, "strides from 1 on, i4 of shape (heads,),");
    extents->num_heads = a->shape[0];
    leaf->term.t = qkv_strided(a->data, QKV_I32, 0, a->stride[0], 0, 0);
  }
  if (take(p, ',') && parse_number(p, &steps, 1, "the number of strides was expected, or inf") != 0) return -1;
  leaf->term.b = steps;
  return 0;
}

static int parse_chunk(parser *p, int32_t kind, mask_text_leaf *leaf) {
  int64_t size, second = 0;
  if (parse_argument(p, 1, 1, &size, "the size of a chunk") != 0) return -1;
  if (kind == QKV_MASK_COLUMNS) {
    if (parse_argument(p, 0, 0, &second, "the number of keys of each chunk") != 0) return -1;
    if (second > size) return fail(p, p->at - 1, "a chunk has not so many keys");
  } else if (take(p, ',') && parse_argument(p, 1, 0, &second, "the number of chunks on each side") != 0) {
    return -1;
  }
  leaf->term = qkv_mask_term(kind, size, second);
  return 0;
}

static void print_source(const char *source, char *text, size_t bytes);

/* Lists of blocks, or bytes for blocks: shape (rows, n), (heads, rows, n) or (batch, heads, rows, n). */
static int parse_lists(parser *p, mask_text_leaf *leaf) {
  char source[SOURCE], quoted[SOURCE + 2], text[SOURCE + 64];
  size_t place = here(p);
  mask_text_extents *extents = &p->mask->extents;
  if (parse_source(p, source, sizeof source) != 0) return -1;
  if (parse_block(p, 0, &leaf->number[0]) != 0) return -1;
  print_source(source, quoted, sizeof quoted);
  snprintf(text, sizeof text, "blocks(%s,%lld)", quoted, (long long)leaf->number[0]);
  if (set_source(p, place, leaf, text) != 0 || load(p, place, source, &leaf->data) != 0) return -1;
  const array *a = &leaf->data;
  const int64_t heads = a->rank >= 3 ? a->shape[a->rank - 3] : 1, batch = a->rank == 4 ? a->shape[0] : 1;
  int fits = a->rank >= 2 && (a->dtype == QKV_I32 || a->dtype == QKV_U8);
  fits = fits && (heads == 1 || extents->num_heads < 0 || heads == extents->num_heads);
  fits = fits && (batch == 1 || extents->batch < 0 || batch == extents->batch);
  if (!fits)
    return wrong_array(
        p, place, source, a,
        "lists of blocks, i4 of shape ([[batch,] heads,] rows, places), or bool ([[batch,] heads,] rows, keys),");
  if (heads != 1) extents->num_heads = heads;
  if (batch != 1) extents->batch = batch;
  leaf->pending = MASK_TEXT_LISTS;
  leaf->term = qkv_mask_term(QKV_MASK_BLOCKS, 0, 0);
  return 0;
}

static int set_random(const parser *p, size_t place, mask_text_leaf *leaf, const int64_t number[5]) {
  char text[160];
  memcpy(leaf->number, number, sizeof leaf->number);
  snprintf(text, sizeof text, "random(%lld,%lld,%lld", (long long)number[0], (long long)number[1], (long long)number[2]);
  if (number[3] >= 0)
    snprintf(text + strlen(text), sizeof text - strlen(text), ",%lld,%lld", (long long)number[3], (long long)number[4]);
  snprintf(text + strlen(text), sizeof text - strlen(text), ")");
  leaf->pending = MASK_TEXT_RANDOM;
  leaf->term = qkv_mask_term(QKV_MASK_BLOCKS, 0, 0);
  return set_source(p, place, leaf, text);
}

static int parse_random(parser *p, mask_text_leaf *leaf) {
  int64_t number[5] = {0, 0, 0, -1, 0};
  size_t place = here(p);
  if (parse_block(p, 1, &number[0]) != 0) return -1;
  if (parse_argument(p, 0, 0, &number[1], "the number of random blocks") != 0) return -1;
  if (require(p, ',', "',' was expected, and the seed") != 0 || parse_number(p, &number[2], 0, "the seed was expected") != 0)
    return -1;
  if (take(p, ',')) {
    if (parse_argument(p, 1, 0, &number[3], "the blocks of the window on each side") != 0) return -1;
    if (parse_argument(p, 0, 0, &number[4], "the number of global blocks") != 0) return -1;
  }
  return set_random(p, place, leaf, number);
}

static int parse_topk(parser *p, mask_text_leaf *leaf) {
  char text[64];
  size_t place = here(p);
  if (parse_block(p, 1, &leaf->number[0]) != 0) return -1;
  if (parse_argument(p, 0, 1, &leaf->number[1], "the number of blocks to select") != 0) return -1;
  leaf->pending = MASK_TEXT_TOPK;
  leaf->term = qkv_mask_term(QKV_MASK_BLOCKS, 0, 0);
  snprintf(text, sizeof text, "topk(%lld,%lld)", (long long)leaf->number[0], (long long)leaf->number[1]);
  return set_source(p, place, leaf, text);
}

/* The last n blocks of the keys' positions: known with the problem. */
static int set_last(const parser *p, size_t place, int32_t kind, int64_t block, int64_t n, mask_text_leaf *leaf) {
  char text[80];
  snprintf(text, sizeof text, "%s(%lld,%lld)", kind == QKV_MASK_KEYS ? "last_keys" : "last_queries", (long long)block,
           (long long)n);
  leaf->pending = MASK_TEXT_LAST;
  leaf->number[0] = block;
  leaf->number[1] = n;
  leaf->term = qkv_mask_term(kind, 0, 0);
  return set_source(p, place, leaf, text);
}

static int parse_last(parser *p, int32_t kind, mask_text_leaf *leaf) {
  int64_t block, n;
  size_t place = here(p);
  if (parse_argument(p, 1, 1, &block, "the size of a block") != 0) return -1;
  if (parse_argument(p, 0, 0, &n, "the number of blocks") != 0) return -1;
  return set_last(p, place, kind, block, n, leaf);
}

static int parse_lengths(parser *p, size_t term) {
  char source[SOURCE], wanted[128];
  size_t place = here(p);
  mask_text_extents *extents = &p->mask->extents;
  array *a = &p->mask->lengths;
  if (parse_source(p, source, sizeof source) != 0) return -1;
  if (a->data != NULL) return fail(p, term, "lengths(...) is given twice");
  if (load(p, place, source, a) != 0) return -1;
  int fits = a->dtype == QKV_I32 && a->rank == 1 && (extents->batch < 0 || a->shape[0] == extents->batch);
  if (!fits) {
    if (extents->batch >= 0) {
      snprintf(wanted, sizeof wanted, "integers of shape (%lld,), one per batch entry,", (long long)extents->batch);
    } else {
      snprintf(wanted, sizeof wanted, "integers of shape (batch,)");
    }
    return wrong_array(p, place, source, a, wanted);
  }
  extents->batch = a->shape[0];
  return 0;
}

static int unknown_term(const parser *p, size_t place, const char *name) {
  static const char *const names[] = {"none",         "causal",     "causal_start", "window",  "prefix", "lengths",
                                      "documents",    "dense",      "keys",         "queries", "chunk",  "columns",
                                      "stride",       "blocks",     "random",       "topk",    "global", "last_keys",
                                      "last_queries", "longformer", "bigbird",      "strided", "fixed",  "sinks_window"};
  char what[DETAIL];
  const char *best = NULL;
  int closest = 4;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    int d = distance(name, names[i]);
    if (d < closest) {
      closest = d;
      best = names[i];
    }
  }
  if (best != NULL) {
    snprintf(what, sizeof what, "unknown term '%.40s'; did you mean '%s'?", name, best);
  } else {
    snprintf(what, sizeof what, "unknown term '%.40s'; there are " TERMS, name);
  }
  return fail(p, place, what);
}

static int same_leaf(const mask_text_leaf *a, const mask_text_leaf *b) {
  if (a->term.kind != b->term.kind || a->pending != b->pending) return 0;
  if (a->pending == MASK_TEXT_READY && (a->term.a != b->term.a || a->term.b != b->term.b)) return 0;
  if (a->source == NULL || b->source == NULL) return a->source == b->source;
  return strcmp(a->source, b->source) == 0;
}

static void free_leaf(mask_text_leaf *leaf) {
  free(leaf->source);
  free(leaf->map.indptr);
  array_free(&leaf->data);
  memset(leaf, 0, sizeof *leaf);
}

/* Takes the leaf over, or finds that it is there already. */
static int keep_leaf(const parser *p, size_t place, mask_text_leaf *leaf, formula *f) {
  mask_text *mask = p->mask;
  for (int i = 0; i < mask->leaf_count; i++) {
    if (!same_leaf(&mask->leaves[i], leaf)) continue;
    free_leaf(leaf);
    return add_group(p, place, f, UINT64_C(1) << i);
  }
  if (mask->leaf_count == MASK_TEXT_TERMS) {
    free_leaf(leaf);
    return too_many(p, place);
  }
  mask->leaves[mask->leaf_count] = *leaf;
  return add_group(p, place, f, UINT64_C(1) << mask->leaf_count++);
}

static int parse_arguments(parser *p, const char *name, mask_text_leaf *leaf) {
  int64_t left, right;
  char what[DETAIL];
  snprintf(what, sizeof what, "'(' was expected after %s", name);
  if (require(p, '(', what) != 0) return -1;
  if (strcmp(name, "window") == 0) {
    if (parse_number(p, &left, 1, "the number of keys to the left was expected, or inf") != 0) return -1;
    if (require(p, ',', "',' was expected, and the number of keys to the right") != 0) return -1;
    if (parse_number(p, &right, 1, "the number of keys to the right was expected, or inf") != 0) return -1;
    leaf->term = qkv_window(left, right);
  } else if (strcmp(name, "prefix") == 0) {
    if (parse_number(p, &left, 0, "a number of keys was expected") != 0) return -1;
    leaf->term = qkv_prefix(left);
  } else {
    static const struct {
      const char *name;
      int (*parse)(parser *p, mask_text_leaf *leaf);
      int (*parse_kind)(parser *p, int32_t kind, mask_text_leaf *leaf);
      int32_t kind;
    } kinds[] = {{"documents", parse_documents, NULL, 0},
                 {"dense", parse_dense, NULL, 0},
                 {"stride", parse_stride, NULL, 0},
                 {"blocks", parse_lists, NULL, 0},
                 {"random", parse_random, NULL, 0},
                 {"topk", parse_topk, NULL, 0},
                 {"keys", NULL, parse_set, QKV_MASK_KEYS},
                 {"queries", NULL, parse_set, QKV_MASK_QUERIES},
                 {"chunk", NULL, parse_chunk, QKV_MASK_CHUNK},
                 {"columns", NULL, parse_chunk, QKV_MASK_COLUMNS},
                 {"last_keys", NULL, parse_last, QKV_MASK_KEYS},
                 {"last_queries", NULL, parse_last, QKV_MASK_QUERIES}};
    size_t i = 0;
    while (strcmp(name, kinds[i].name) != 0) i++; /* parse_term knows the names */
    if ((kinds[i].parse != NULL ? kinds[i].parse(p, leaf) : kinds[i].parse_kind(p, kinds[i].kind, leaf)) != 0) return -1;
  }
  return require(p, ')', "')' was expected");
}

/* ---- Patterns: several terms ------------------------------------------------------------------------------------- */

static int has_name(const char *name, const char *const *names, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (strcmp(name, names[i]) == 0) return 1;
  }
  return 0;
}

/* f = f OR the leaf */
static int add_or(const parser *p, size_t place, mask_text_leaf *leaf, formula *f) {
  formula one = {{0}, 0, 0};
  if (keep_leaf(p, place, leaf, &one) != 0) return -1;
  if (f->count > 0) return disjoin(p, place, f, &one);
  *f = one;
  return 0;
}
static int add_term(const parser *p, size_t place, qkv_mask term, formula *f) {
  mask_text_leaf leaf;
  memset(&leaf, 0, sizeof leaf);
  leaf.term = term;
  return add_or(p, place, &leaf, f);
}
/* f = causal AND f */
static int add_causal(const parser *p, size_t place, formula *f) {
  formula causal = {{0}, 0, 0};
  if (add_term(p, place, qkv_causal(), &causal) != 0 || conjoin(p, place, &causal, f) != 0) return -1;
  *f = causal;
  return 0;
}

/* The set is read twice, since each leaf owns its data. */
static int parse_global(parser *p, size_t place, formula *f) {
  size_t begin = p->at;
  for (int i = 0; i < 2; i++) {
    mask_text_leaf leaf;
    memset(&leaf, 0, sizeof leaf);
    p->at = begin;
    if (parse_set(p, i == 0 ? QKV_MASK_KEYS : QKV_MASK_QUERIES, &leaf) != 0) {
      free_leaf(&leaf);
      return -1;
    }
    if (add_or(p, place, &leaf, f) != 0) return -1;
  }
  return 0;
}

static int add_global(const parser *p, size_t place, int64_t to, formula *f) {
  return add_term(p, place, qkv_keys(0, to), f) != 0 || add_term(p, place, qkv_queries(0, to), f) != 0 ? -1 : 0;
}

static int parse_bigbird(parser *p, size_t place, formula *f) {
  int64_t block, count, globals, seed;
  if (parse_block(p, 1, &block) != 0) return -1;
  if (parse_argument(p, 0, 0, &count, "the number of random blocks") != 0) return -1;
  if (parse_argument(p, 0, 0, &globals, "the number of global blocks at each end") != 0) return -1;
  if (globals > INT32_MAX / 256) return fail(p, p->at - 1, "that is more than all positions");
  if (require(p, ',', "',' was expected, and the seed") != 0 || parse_number(p, &seed, 0, "the seed was expected") != 0)
    return -1;
  const int64_t number[5] = {block, count, seed, 1, globals};
  mask_text_leaf leaf;
  memset(&leaf, 0, sizeof leaf);
  if (set_random(p, place, &leaf, number) != 0) return -1;
  if (add_term(p, place, qkv_chunk(block, 1), f) != 0 || add_or(p, place, &leaf, f) != 0) return -1;
  if (globals == 0) return 0;
  if (add_global(p, place, globals * block, f) != 0) return -1;
  for (int i = 0; i < 2; i++) {
    memset(&leaf, 0, sizeof leaf);
    if (set_last(p, place, i == 0 ? QKV_MASK_KEYS : QKV_MASK_QUERIES, block, globals, &leaf) != 0) return -1;
    if (add_or(p, place, &leaf, f) != 0) return -1;
  }
  return 0;
}

static const char *const patterns[] = {"global", "longformer", "bigbird", "strided", "fixed", "sinks_window"};

static int parse_pattern(parser *p, size_t place, const char *name, formula *f) {
  int64_t a, b;
  char what[DETAIL];
  snprintf(what, sizeof what, "'(' was expected after %s", name);
  if (require(p, '(', what) != 0) return -1;
  if (strcmp(name, "global") == 0) {
    if (parse_global(p, place, f) != 0) return -1;
  } else if (strcmp(name, "longformer") == 0) {
    if (parse_argument(p, 1, 0, &a, "the window") != 0 || parse_argument(p, 0, 0, &b, "the number of global positions") != 0)
      return -1;
    if (add_term(p, place, qkv_window(a / 2, a / 2), f) != 0 || add_global(p, place, b, f) != 0) return -1;
  } else if (strcmp(name, "bigbird") == 0) {
    if (parse_bigbird(p, place, f) != 0) return -1;
  } else if (strcmp(name, "strided") == 0) {
    if (parse_argument(p, 1, 1, &a, "the stride") != 0) return -1;
    if (add_term(p, place, qkv_window(a, 0), f) != 0 || add_term(p, place, qkv_stride(a, -1), f) != 0) return -1;
  } else if (strcmp(name, "fixed") == 0) {
    if (parse_argument(p, 1, 1, &a, "the stride") != 0 || parse_argument(p, 0, 0, &b, "the number of summary keys") != 0)
      return -1;
    if (b > a) return fail(p, p->at - 1, "a stride has not so many keys");
    if (add_term(p, place, qkv_chunk(a, 0), f) != 0 || add_term(p, place, qkv_columns(a, b), f) != 0) return -1;
  } else {
    if (parse_argument(p, 1, 0, &a, "the number of sinks") != 0 || parse_argument(p, 0, 1, &b, "the number of keys") != 0)
      return -1;
    if (add_term(p, place, qkv_window_keys(b), f) != 0 || add_term(p, place, qkv_prefix(a), f) != 0) return -1;
  }
  if (strcmp(name, "strided") == 0 || strcmp(name, "fixed") == 0 || strcmp(name, "sinks_window") == 0) {
    if (add_causal(p, place, f) != 0) return -1;
  }
  return require(p, ')', "')' was expected");
}

static int parse_term(parser *p, formula *f) {
  static const char *const with_arguments[] = {"window",  "prefix", "documents", "dense",       "keys",
                                               "queries", "chunk",  "columns",   "stride",      "blocks",
                                               "random",  "topk",   "last_keys", "last_queries"};
  char name[48];
  size_t place = p->at;
  if (word(p, name, sizeof name) == 0) {
    return fail(p, place, "a term was expected: " TERMS ", or '('");
  }
  if (strcmp(name, "none") == 0) return 0;
  if (strcmp(name, "lengths") == 0) {
    f->lengths = place + 1;
    if (require(p, '(', "'(' was expected after lengths") != 0 || parse_lengths(p, place) != 0) return -1;
    return require(p, ')', "')' was expected");
  }
  mask_text_leaf leaf;
  memset(&leaf, 0, sizeof leaf);
  if (strcmp(name, "causal") == 0) {
    leaf.term = qkv_causal();
  } else if (strcmp(name, "causal_start") == 0) {
    leaf.term = qkv_causal_start();
  } else if (has_name(name, patterns, sizeof patterns / sizeof patterns[0])) {
    return parse_pattern(p, place, name, f);
  } else if (has_name(name, with_arguments, sizeof with_arguments / sizeof with_arguments[0])) {
    if (parse_arguments(p, name, &leaf) != 0) {
      free_leaf(&leaf);
      return -1;
    }
  } else {
    return unknown_term(p, place, name);
  }
  return keep_leaf(p, place, &leaf, f);
}

/* ---- Expressions ------------------------------------------------------------------------------------------------- */

static int parse_expression(parser *p, formula *f);

static int parse_operand(parser *p, formula *f) {
  memset(f, 0, sizeof *f);
  peek(p);
  size_t place = p->at;
  if (!take(p, '(')) return parse_term(p, f);
  if (p->depth == DEPTH) return fail(p, place, "parentheses are nested too deeply");
  p->depth++;
  if (parse_expression(p, f) != 0) return -1;
  p->depth--;
  return require(p, ')', "'&', '|' or ')' was expected");
}

static int parse_conjunction(parser *p, formula *f) {
  if (parse_operand(p, f) != 0) return -1;
  while (peek(p) == '&') {
    size_t place = p->at++;
    formula right;
    /* && means the same, as in C. */
    if (p->text[p->at] == '&') p->at++;
    if (parse_operand(p, &right) != 0 || conjoin(p, place, f, &right) != 0) return -1;
  }
  return 0;
}

static int parse_expression(parser *p, formula *f) {
  if (parse_conjunction(p, f) != 0) return -1;
  while (peek(p) == '|') {
    size_t place = p->at++;
    formula right;
    if (p->text[p->at] == '|') p->at++;
    if (parse_conjunction(p, &right) != 0 || disjoin(p, place, f, &right) != 0) return -1;
  }
  return 0;
}

/* The groups as the library's list. */
static int flatten(const parser *p, const formula *f) {
  mask_text *mask = p->mask;
  for (int i = 0; i < f->count; i++) {
    int join = QKV_AND;
    for (int leaf = 0; leaf < mask->leaf_count; leaf++) {
      if ((f->group[i] >> leaf & 1) == 0) continue;
      if (mask->count == MASK_TEXT_TERMS) return too_many(p, 0);
      mask->terms[mask->count] = mask->leaves[leaf].term;
      if (mask->terms[mask->count].kind == QKV_MASK_BLOCKS) mask->terms[mask->count].user = &mask->leaves[leaf].map;
      mask->terms[mask->count].join = join;
      mask->sources[mask->count++] = mask->leaves[leaf].source;
      join = QKV_OR;
    }
  }
  return 0;
}

int mask_text_parse(const char *expression, const mask_text_extents *extents, mask_text_loader loader, mask_text *mask,
                    char *error, size_t error_bytes) {
  static const mask_text_extents unknown = {-1, -1, -1, -1};
  memset(mask, 0, sizeof *mask);
  mask->extents = extents != NULL ? *extents : unknown;
  parser p = {expression, 0, 0, 0, mask, loader != NULL ? loader : array_load, error, error_bytes};
  formula f;
  if (parse_expression(&p, &f) != 0) return p.bad_file ? MASK_TEXT_BAD_FILE : MASK_TEXT_BAD_EXPRESSION;
  if (peek(&p) != 0) return fail(&p, p.at, "'&', '|' or the end was expected");
  return flatten(&p, &f);
}

/* ---- What only the problem says ---------------------------------------------------------------------------------- */

/* Ends of the positions of queries and keys. */
static void ends_of(const qkv_problem *p, int64_t *end_q, int64_t *end_kv) {
  *end_kv = p->seqlen_kv;
  *end_q = p->align == QKV_ALIGN_END ? p->seqlen_kv : p->seqlen_q;
  for (int64_t b = 0; p->align == QKV_ALIGN_EXPLICIT && p->q_position != NULL && b < p->batch; b++) {
    if (p->q_position[b] + p->seqlen_q > *end_q) *end_q = p->q_position[b] + p->seqlen_q;
  }
}

/* Room for `count` blocks per block of queries. */
static int make_map(qkv_block_map *map, int64_t count, char *error, size_t error_bytes) {
  size_t bytes;
  void *memory;
  if (qkv_block_map_bytes(map, count, &bytes) != QKV_OK || (memory = malloc(bytes + 1)) == NULL) {
    return text_fail(error, error_bytes, "no memory for a map of %lld blocks for each block of queries", (long long)count);
  }
  qkv_block_map_init(map, count, memory, bytes);
  return 0;
}

/* The lists of a file. */
static int fill_lists(mask_text_leaf *leaf, char *error, size_t error_bytes) {
  const array *a = &leaf->data;
  qkv_block_map *map = &leaf->map;
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block, keys = (map->seqlen_kv + map->block - 1) / map->block;
  const int64_t file_rows = a->shape[a->rank - 2], places = a->shape[a->rank - 1];
  const int is_list = a->dtype == QKV_I32, skipped = is_list && file_rows == rows - 2 ? 1 : 0;
  if (file_rows != rows - 2 * skipped || (!is_list && places != keys)) {
    return text_fail(error, error_bytes,
                     "%s: the file is for %lld x %lld blocks, the problem has %lld x %lld of %d positions", leaf->source,
                     (long long)file_rows, (long long)(is_list ? keys : places), (long long)rows, (long long)keys,
                     (int)map->block);
  }
  const int64_t capacity = map->capacity;
  int64_t at = 0;
  int32_t *offset = map->indptr;
  for (int64_t n = 0; n < map->batch * map->num_heads; n++) {
    for (int64_t i = 0; i < rows; i++) {
      *offset++ = (int32_t)at;
      if (i < skipped || i >= rows - skipped) continue;
      int64_t row = (i - skipped) * a->stride[a->rank - 2];
      if (a->rank >= 3) row += n % map->num_heads * a->stride[a->rank - 3];
      if (a->rank == 4) row += n / map->num_heads * a->stride[0];
      for (int64_t k = 0; k < places; k++) {
        const int64_t from = row + k * a->stride[a->rank - 1];
        const int32_t block = is_list                                       ? ((const int32_t *)a->data)[from]
                              : ((const unsigned char *)a->data)[from] != 0 ? (int32_t)k
                                                                            : -1;
        if (block < 0) continue;
        if (block >= keys) {
          return text_fail(error, error_bytes, "%s: block %d is listed, there are %lld blocks of keys", leaf->source,
                           (int)block, (long long)keys);
        }
        if (at == capacity) return text_fail(error, error_bytes, "%s: the lists are too long", leaf->source);
        map->indices[at++] = block;
      }
    }
    *offset++ = (int32_t)at;
  }
  map->sorted = 0;
  if (qkv_block_map_sort(map) != QKV_OK) return text_fail(error, error_bytes, "%s: the lists are wrong", leaf->source);
  return 0;
}

/* Whether the whole expression is causal: a group is this term alone. */
static int is_causal(const mask_text *mask) {
  for (int64_t i = 0; i < mask->count; i++) {
    const int alone = mask->terms[i].join != QKV_OR && (i + 1 == mask->count || mask->terms[i + 1].join != QKV_OR);
    if (alone && mask->terms[i].kind == QKV_MASK_CAUSAL) return 1;
  }
  return 0;
}

static int complete_map(const mask_text *mask, mask_text_leaf *leaf, const qkv_context *context, const qkv_problem *p,
                        char *error, size_t error_bytes) {
  qkv_block_map *map = &leaf->map;
  const array *a = &leaf->data;
  const int is_lists = leaf->pending == MASK_TEXT_LISTS;
  *map = qkv_block_map_default();
  map->block = (int32_t)leaf->number[0];
  ends_of(p, &map->seqlen_q, &map->seqlen_kv);
  map->batch = is_lists ? (a->rank == 4 ? a->shape[0] : 1) : leaf->pending == MASK_TEXT_TOPK ? p->batch : 1;
  map->num_heads = is_lists ? (a->rank >= 3 ? a->shape[a->rank - 3] : 1) : p->num_heads;
  if (is_lists) {
    /* a list may name a block more than once: the room is that of the file */
    const int64_t rows = (map->seqlen_q + map->block - 1) / map->block;
    const int64_t offsets = map->batch * map->num_heads * (rows + 1);
    const int64_t count = array_count(a->rank, a->shape, sizeof(int32_t));
    map->indptr = count < 0 || count > INT32_MAX ? NULL : malloc((size_t)(offsets + count + 1) * sizeof *map->indptr);
    if (map->indptr == NULL) return text_fail(error, error_bytes, "%s: no memory for the block map", leaf->source);
    map->indices = map->indptr + offsets;
    map->capacity = count;
    return fill_lists(leaf, error, error_bytes);
  }
  if (make_map(map, leaf->number[1], error, error_bytes) != 0) return -1;
  qkv_status status;
  if (leaf->pending == MASK_TEXT_RANDOM) {
    qkv_block_random random = qkv_block_random_default();
    random.causal = is_causal(mask);
    random.count = leaf->number[1];
    random.seed = (uint64_t)leaf->number[2];
    random.window = leaf->number[3];
    random.global_first = random.global_last = leaf->number[4];
    status = qkv_random_blocks(&random, map);
  } else {
    qkv_block_topk topk = qkv_block_topk_default();
    qkv_problem without = *p; /* it has no mask yet */
    without.mask_count = 0;
    topk.causal = is_causal(mask);
    topk.count = leaf->number[1];
    status = qkv_topk_blocks(context, &without, &topk, map);
  }
  return status == QKV_OK ? 0 : text_fail(error, error_bytes, "%s: %s", leaf->source, qkv_status_text(status));
}

int mask_text_needs_data(const mask_text *mask) {
  for (int i = 0; i < mask->leaf_count; i++) {
    if (mask->leaves[i].pending == MASK_TEXT_TOPK) return 1;
  }
  return 0;
}

int mask_text_complete(mask_text *mask, const qkv_context *context, const qkv_problem *problem, char *error,
                       size_t error_bytes) {
  for (int i = 0; i < mask->leaf_count; i++) {
    mask_text_leaf *leaf = &mask->leaves[i];
    if (leaf->pending == MASK_TEXT_LAST) {
      const int64_t block = leaf->number[0], blocks = (problem->seqlen_kv + block - 1) / block;
      leaf->term.a = blocks > leaf->number[1] ? (blocks - leaf->number[1]) * block : 0;
      leaf->term.b = blocks * block;
      for (int64_t t = 0; t < mask->count; t++) {
        if (mask->sources[t] != leaf->source) continue;
        mask->terms[t].a = leaf->term.a;
        mask->terms[t].b = leaf->term.b;
      }
    } else if (leaf->pending != MASK_TEXT_READY) {
      free(leaf->map.indptr);
      memset(&leaf->map, 0, sizeof leaf->map);
      if (complete_map(mask, leaf, context, problem, error, error_bytes) != 0) return -1;
    }
  }
  return 0;
}

void mask_text_free(mask_text *mask) {
  for (int i = 0; i < mask->leaf_count; i++) free_leaf(&mask->leaves[i]);
  array_free(&mask->lengths);
  memset(mask, 0, sizeof *mask);
}

/* ---- Printing ---------------------------------------------------------------------------------------------------- */

static void print_source(const char *source, char *text, size_t bytes) {
  if (source == NULL) source = "...";
  const int plain = strpbrk(source, " \t,()\"'") == NULL && strspn(source, "0123456789") < strlen(source);
  const char *quote = plain ? "" : strchr(source, '"') == NULL ? "\"" : "'";
  snprintf(text, bytes, "%s%s%s", quote, source, quote);
}

static void print_term(const qkv_mask *term, const char *source, char *text, size_t bytes) {
  char file[SOURCE + 2], steps[24] = "";
  /* A block map, and positions that only the problem says, are called as they were written. */
  const int is_set = term->kind == QKV_MASK_KEYS || term->kind == QKV_MASK_QUERIES;
  const char *set = term->kind == QKV_MASK_KEYS ? "keys" : "queries";
  if (source != NULL && (term->kind == QKV_MASK_BLOCKS || (is_set && term->t.data == NULL))) {
    snprintf(text, bytes, "%s", source);
    return;
  }
  print_source(source, file, sizeof file);
  switch (term->kind) {
  case QKV_MASK_CAUSAL: snprintf(text, bytes, term->a == QKV_ALIGN_START ? "causal_start" : "causal"); break;
  case QKV_MASK_WINDOW: {
    char left[24] = "inf", right[24] = "inf";
    if (term->a >= 0) snprintf(left, sizeof left, "%lld", (long long)term->a);
    if (term->b >= 0) snprintf(right, sizeof right, "%lld", (long long)term->b);
    snprintf(text, bytes, "window(%s,%s)", left, right);
    break;
  }
  case QKV_MASK_PREFIX: snprintf(text, bytes, "prefix(%lld)", (long long)term->a); break;
  case QKV_MASK_DOCUMENT: snprintf(text, bytes, "documents(%s)", file); break;
  case QKV_MASK_DENSE:
    if (term->a != 0) {
      snprintf(text, bytes, "dense(%s,%lld)", file, (long long)term->a);
    } else {
      snprintf(text, bytes, "dense(%s)", file);
    }
    break;
  case QKV_MASK_TILE: snprintf(text, bytes, "tile(...)"); break;
  case QKV_MASK_KEYS:
  case QKV_MASK_QUERIES:
    if (term->t.data != NULL) {
      snprintf(text, bytes, "%s(%s)", set, file);
    } else {
      snprintf(text, bytes, "%s(%lld,%lld)", set, (long long)term->a, (long long)term->b);
    }
    break;
  case QKV_MASK_CHUNK: snprintf(text, bytes, "chunk(%lld,%lld)", (long long)term->a, (long long)term->b); break;
  case QKV_MASK_COLUMNS: snprintf(text, bytes, "columns(%lld,%lld)", (long long)term->a, (long long)term->b); break;
  case QKV_MASK_STRIDED:
    if (term->b >= 0) snprintf(steps, sizeof steps, ",%lld", (long long)term->b);
    if (term->t.data == NULL) snprintf(file, sizeof file, "%lld", (long long)term->a);
    snprintf(text, bytes, "stride(%s%s)", file, steps);
    break;
  case QKV_MASK_BLOCKS: snprintf(text, bytes, "blocks(...)"); break;
  default: snprintf(text, bytes, "kind_%d(%lld,%lld)", (int)term->kind, (long long)term->a, (long long)term->b); break;
  }
}

static size_t append(char *text, size_t bytes, size_t used, const char *piece) {
  size_t length = strlen(piece);
  if (used < bytes) snprintf(text + used, bytes - used, "%s", piece);
  return used + length;
}

size_t mask_text_print(const qkv_mask *terms, int64_t count, const char *const *sources, char *text, size_t bytes) {
  char piece[SOURCE + 64];
  size_t used = append(text, bytes, 0, count == 0 ? "none" : "");
  for (int64_t i = 0; i < count; i++) {
    int first = i == 0 || terms[i].join != QKV_OR, last = i + 1 == count || terms[i + 1].join != QKV_OR;
    used = append(text, bytes, used, i == 0 ? "" : first ? " & " : " | ");
    /* A lone group needs no parentheses, nor does a group of one. */
    int whole = 1;
    for (int64_t j = 1; j < count; j++) whole = whole && terms[j].join == QKV_OR;
    if (first && !last && !whole) used = append(text, bytes, used, "(");
    print_term(&terms[i], sources != NULL ? sources[i] : NULL, piece, sizeof piece);
    used = append(text, bytes, used, piece);
    if (last && !first && !whole) used = append(text, bytes, used, ")");
  }
  return used;
}

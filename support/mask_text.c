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
  static const char *const names[] = {"none", "causal", "causal_start", "window", "prefix", "lengths", "documents", "dense"};
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
    snprintf(what, sizeof what,
             "unknown term '%.40s'; there are none, causal, causal_start, window(left,right), prefix(n), lengths(FILE), "
             "documents(FILE), dense(FILE)",
             name);
  }
  return fail(p, place, what);
}

static int same_leaf(const mask_text_leaf *a, const mask_text_leaf *b) {
  if (a->term.kind != b->term.kind || a->term.a != b->term.a || a->term.b != b->term.b) return 0;
  if (a->source == NULL || b->source == NULL) return a->source == b->source;
  return strcmp(a->source, b->source) == 0;
}

static void free_leaf(mask_text_leaf *leaf) {
  free(leaf->source);
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
  } else if (strcmp(name, "documents") == 0) {
    if (parse_documents(p, leaf) != 0) return -1;
  } else {
    if (parse_dense(p, leaf) != 0) return -1;
  }
  return require(p, ')', "')' was expected");
}

static int parse_term(parser *p, formula *f) {
  char name[48];
  size_t place = p->at;
  if (word(p, name, sizeof name) == 0) {
    return fail(
        p, place,
        "a term was expected: none, causal, causal_start, window(left,right), prefix(n), lengths(FILE), documents(FILE), "
        "dense(FILE), or '('");
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
  } else if (strcmp(name, "window") == 0 || strcmp(name, "prefix") == 0 || strcmp(name, "documents") == 0 ||
             strcmp(name, "dense") == 0) {
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

void mask_text_free(mask_text *mask) {
  for (int i = 0; i < mask->leaf_count; i++) free_leaf(&mask->leaves[i]);
  array_free(&mask->lengths);
  memset(mask, 0, sizeof *mask);
}

/* ---- Printing ---------------------------------------------------------------------------------------------------- */

static void print_source(const char *source, char *text, size_t bytes) {
  if (source == NULL) source = "...";
  const char *quote = strpbrk(source, " \t,()\"'") == NULL ? "" : strchr(source, '"') == NULL ? "\"" : "'";
  snprintf(text, bytes, "%s%s%s", quote, source, quote);
}

static void print_term(const qkv_mask *term, const char *source, char *text, size_t bytes) {
  char file[SOURCE + 2];
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

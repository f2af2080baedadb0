/* Kinds of terms and the published patterns, each against its definition. */
#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t distance(const where *w) { return w->query > w->key ? w->query - w->key : w->key - w->query; }
static int64_t floor_of(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

/* ---- Sets of positions --------------------------------------------------------------------------------------------- */

/* Positions of two entries: three of the first, one of the second. */
static int32_t listed[2][4] = {{5, 64, 130, -1}, {63, -1, -1, -1}};

static bool is_listed(int64_t batch, int64_t position) {
  for (int n = 0; n < 4; n++) {
    if (listed[batch][n] >= 0 && listed[batch][n] == position) {
      return true;
    }
  }
  return false;
}
static bool sees_listed_key(const void *data, const where *w) {
  (void)data;
  return is_listed(w->batch, w->key);
}
static bool listed_query_sees(const void *data, const where *w) {
  (void)data;
  return is_listed(w->batch, w->query);
}
static bool longformer_of_lists(const void *data, const where *w) {
  (void)data;
  return distance(w) <= 20 || is_listed(w->batch, w->key) || is_listed(w->batch, w->query);
}
static bool causal_longformer_of_lists(const void *data, const where *w) {
  return w->key <= w->query && longformer_of_lists(data, w);
}

static void test_lists(void **state) {
  (void)state;
  const qkv_tensor t = qkv_strided(listed, QKV_I32, 4, 0, 0, 1);
  const qkv_mask keys = qkv_keys_of(t, 4), queries = qkv_queries_of(t, 4);
  const qkv_mask global[4] = {qkv_window(20, 20), qkv_or(keys), qkv_or(queries), qkv_causal()};
  pattern_prove("b2 h4/2 q200 k200 d8 lse seed:1", &keys, 1, sees_listed_key, NULL);
  pattern_prove("b2 h2 q200 k200 d8 lse seed:2", &queries, 1, listed_query_sees, NULL);
  pattern_prove("b2 h4/2 q200 k200 d8 lse dlse sinks seed:3", global, 3, longformer_of_lists, NULL);
  pattern_prove("f64 b2 h2 q200 k200 d8 lse seed:4", global, 4, causal_longformer_of_lists, NULL);
  pattern_visible("b2 h2 q60 k200 d1 seed:5", global, 4, causal_longformer_of_lists, NULL);
  pattern_visible("b2 h2 q200 k60 d1 pos kvpos seed:6", global, 4, causal_longformer_of_lists, NULL);
}

typedef struct range {
  int64_t from, to, window;
  int causal;
} range;
static bool in_global(const range *r, int64_t position) { return r->from <= position && position < r->to; }
static bool longformer(const void *data, const where *w) {
  const range *r = data;
  if (r->causal && w->key > w->query) {
    return false;
  }
  return distance(w) <= r->window / 2 || in_global(r, w->key) || in_global(r, w->query);
}

static void test_longformer(void **state) {
  (void)state;
  static const range ranges[] = {{0, 1, 32, 0}, {0, 2, 32, 0},   {0, 2, 32, 1},  {0, 64, 128, 0}, {0, 64, 128, 1},
                                 {0, 0, 64, 0}, {0, 1, 1000, 0}, {0, 500, 2, 1}, {0, 3, 0, 0},    {0, 65, 63, 0}};
  static const char *const texts[] = {"h4/2 q300 k300 d4 lse seed:1", "h2 q577 k577 d4 alibi lse seed:2",
                                      "b2 h2 q129 k129 d8 lengths bias softcap:3 lse seed:3"};
  for (size_t n = 0; n < COUNT(ranges); n++) {
    qkv_mask terms[QKV_LONGFORMER_TERMS];
    int64_t count = qkv_longformer(ranges[n].window, ranges[n].to, ranges[n].causal, terms);
    pattern_prove(texts[n % COUNT(texts)], terms, count, longformer, &ranges[n]);
    pattern_visible("b2 h2 q100 k333 d1 seed:7", terms, count, longformer, &ranges[n]);
    pattern_visible("b2 h2 q100 k70 d1 kvpos pos seed:8", terms, count, longformer, &ranges[n]);
    pattern_visible("b3 h2 q500 k700 d1 ragged lengths seed:9", terms, count, longformer, &ranges[n]);
  }
}

/* ---- Chunks, columns, strides -------------------------------------------------------------------------------------- */

typedef struct two {
  int64_t a, b;
} two;
static bool same_chunk(const void *data, const where *w) {
  const two *t = data;
  int64_t apart = floor_of(w->query, t->a) - floor_of(w->key, t->a);
  return apart <= t->b && -apart <= t->b;
}
static bool in_columns(const void *data, const where *w) {
  const two *t = data;
  return w->key % t->a >= t->a - t->b;
}
static bool strides_apart(const void *data, const where *w) {
  const two *t = data;
  return distance(w) % t->a == 0 && (t->b < 0 || distance(w) <= t->b * t->a);
}

static void test_chunks_columns_strides(void **state) {
  (void)state;
  static const two pairs[] = {{1, 0}, {7, 1}, {64, 0}, {64, 1}, {100, 2}, {1000, 0}, {3, 400}, {33, 33}};
  static const char *const places[] = {"b2 h2 q130 k200 d1 seed:1", "b2 h2 q200 k130 d1 seed:2",
                                       "b2 h2 q130 k130 d1 start lengths seed:3", "b3 h2 q90 k170 d1 pos kvpos seed:4",
                                       "b3 h2 q400 k500 d1 ragged lengths seed:5"};
  for (size_t n = 0; n < COUNT(pairs); n++) {
    const two *t = &pairs[n];
    const qkv_mask chunk = qkv_chunk(t->a, t->b), columns = qkv_columns(t->a, t->b < t->a ? t->b : t->a);
    const two clipped = {t->a, t->b < t->a ? t->b : t->a}, endless = {t->a, -1};
    const qkv_mask some = qkv_stride(t->a, t->b), all = qkv_stride(t->a, -1);
    for (size_t place = 0; place < COUNT(places); place++) {
      pattern_visible(places[place], &chunk, 1, same_chunk, t);
      pattern_visible(places[place], &columns, 1, in_columns, &clipped);
      pattern_visible(places[place], &some, 1, strides_apart, t);
      pattern_visible(places[place], &all, 1, strides_apart, &endless);
    }
    pattern_prove("h4/2 q150 k200 d4 lse seed:6", &chunk, 1, same_chunk, t);
    pattern_prove("h2 q150 k200 d4 lse seed:7", &columns, 1, in_columns, &clipped);
    pattern_prove("h2 q150 k200 d4 lse seed:8", &some, 1, strides_apart, t);
    pattern_prove("h2 q150 k200 d4 lse seed:9", &all, 1, strides_apart, &endless);
  }
}

/* A dilation per head, as Longformer has it: keys i + t * dilation with |t| <= window / 2. */
static int32_t dilations[4] = {1, 2, 5, 70};
static bool dilated(const void *data, const where *w) {
  const two *t = data;
  for (int64_t n = -t->a / 2; n <= t->a / 2; n++) {
    if (w->key == w->query + n * dilations[w->head]) {
      return true;
    }
  }
  return false;
}
static void test_dilated_windows(void **state) {
  (void)state;
  for (int64_t window = 0; window <= 40; window += 8) {
    const two t = {window, 0};
    const qkv_mask term = qkv_strides(qkv_strided(dilations, QKV_I32, 0, 1, 0, 0), window / 2);
    pattern_prove("b2 h4 q130 k130 d4 lse seed:1", &term, 1, dilated, &t);
    pattern_prove("h4/1 q70 k200 d4 lse seed:2", &term, 1, dilated, &t);
  }
}

/* Sparse Transformer. Strided: A1 = {max(0, i - l), ..., i}, A2 = {j <= i: (i - j) mod l = 0}. Fixed: A1 = {j <= i: floor(j / l) =
 * floor(i / l)}, A2 = {j <= i: j mod l in {l - c, ..., l - 1}}. */
static bool sparse_transformer_strided(const void *data, const where *w) {
  const two *t = data;
  return w->key <= w->query && (w->query - w->key <= t->a || (w->query - w->key) % t->a == 0);
}
static bool sparse_transformer_fixed(const void *data, const where *w) {
  const two *t = data;
  return w->key <= w->query && (w->key / t->a == floor_of(w->query, t->a) || w->key % t->a >= t->a - t->b);
}
static void test_sparse_transformer(void **state) {
  (void)state;
  static const two pairs[] = {{16, 1}, {32, 8}, {100, 3}, {128, 32}};
  for (size_t n = 0; n < COUNT(pairs); n++) {
    qkv_mask terms[QKV_SPARSE_TRANSFORMER_TERMS];
    int64_t count = qkv_sparse_transformer_strided(pairs[n].a, terms);
    pattern_prove("h4/2 q300 k300 d4 lse seed:1", terms, count, sparse_transformer_strided, &pairs[n]);
    count = qkv_sparse_transformer_fixed(pairs[n].a, pairs[n].b, terms);
    pattern_prove("h4/2 q200 k300 d4 lse seed:2", terms, count, sparse_transformer_fixed, &pairs[n]);
    pattern_visible("b2 h2 q50 k300 d1 seed:3", terms, count, sparse_transformer_fixed, &pairs[n]);
  }
}

static bool sinks_window(const void *data, const where *w) {
  const two *t = data;
  return w->key <= w->query && (w->key < t->a || w->query - w->key < t->b);
}
static bool prefix_lm(const void *data, const where *w) {
  const two *t = data;
  return w->key <= w->query || w->key < t->a;
}
static int32_t documents[2][200];
static bool same_document(const void *data, const where *w) {
  (void)data;
  return w->query >= 0 && documents[w->batch][w->query] == documents[w->batch][w->key];
}
static void test_streaming_prefix_documents(void **state) {
  (void)state;
  static const two pairs[] = {{4, 60}, {0, 1}, {1, 64}, {70, 3}, {300, 300}};
  for (size_t n = 0; n < COUNT(pairs); n++) {
    qkv_mask terms[QKV_SINKS_WINDOW_TERMS];
    int64_t count = qkv_sinks_window(pairs[n].a, pairs[n].b, terms);
    pattern_prove("h4/2 q200 k200 d4 lse seed:1", terms, count, sinks_window, &pairs[n]);
    count = qkv_prefix_lm(pairs[n].a, terms);
    pattern_prove("h4/2 q100 k200 d4 lse seed:2", terms, count, prefix_lm, &pairs[n]);
  }
  for (int i = 0; i < 200; i++) {
    documents[0][i] = i / 30;
    documents[1][i] = i / 64;
  }
  const qkv_mask term = qkv_documents(qkv_strided(documents, QKV_I32, 200, 0, 0, 1));
  pattern_prove("b2 h4/2 q200 k200 d8 lse seed:3", &term, 1, same_document, NULL);
}

/* ---- BigBird ------------------------------------------------------------------------------------------------------- */

typedef struct bigbird {
  const qkv_block_map *map;
  int64_t seqlen, block, globals;
} bigbird;

static bool drawn(const bigbird *b, const where *w) {
  const qkv_block_map *map = b->map;
  const int32_t *row =
      map->indptr + (w->batch * map->num_heads + w->head) * ((map->seqlen_q + map->block - 1) / map->block + 1);
  for (int32_t n = row[w->query / map->block]; n < row[w->query / map->block + 1]; n++) {
    if (map->indices[n] == w->key / map->block) {
      return true;
    }
  }
  return false;
}
/* ITC: the first and the last blocks see all and are seen by all; other blocks see the neighbours and the drawn ones. */
static bool bigbird_itc(const void *data, const where *w) {
  const bigbird *b = data;
  const int64_t blocks = (b->seqlen + b->block - 1) / b->block, q = w->query / b->block, k = w->key / b->block;
  if (q < b->globals || q >= blocks - b->globals || k < b->globals || k >= blocks - b->globals) {
    return true;
  }
  return (q - 1 <= k && k <= q + 1) || drawn(b, w);
}
/* ETC: B[i, :] = B[:, i] = 1 for the added tokens, B = A, which is ITC without global blocks, for the others. */
static bool bigbird_etc(const void *data, const where *w) {
  const bigbird *b = data;
  if (w->query >= b->seqlen || w->key >= b->seqlen) {
    return true;
  }
  const int64_t q = w->query / b->block, k = w->key / b->block;
  return (q - 1 <= k && k <= q + 1) || drawn(b, w);
}

static void test_bigbird(void **state) {
  (void)state;
  static const struct {
    int64_t seqlen;
    int32_t block;
    int64_t count, globals;
  } cases[] = {{300, 16, 3, 1}, {385, 64, 1, 1}, {520, 84, 2, 1},  {130, 64, 3, 1},
               {60, 64, 3, 1},  {250, 32, 0, 2}, {200, 16, 100, 0}};
  for (size_t n = 0; n < COUNT(cases); n++) {
    char text[128];
    problem_case c;
    snprintf(text, sizeof text, "h2 q%d k%d d4 lse seed:%d", (int)cases[n].seqlen, (int)cases[n].seqlen, (int)n);
    test_open(&c, 0, "%s", text);
    qkv_block_map map = pattern_map(&c.problem, cases[n].block, 2, cases[n].count);
    qkv_block_random random = qkv_block_random_default();
    random.count = cases[n].count;
    random.window = 1;
    random.global_first = random.global_last = cases[n].globals;
    random.seed = n;
    assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
    const bigbird b = {&map, cases[n].seqlen, cases[n].block, cases[n].globals};
    qkv_mask terms[QKV_BIGBIRD_TERMS];
    int64_t count = qkv_bigbird_itc(cases[n].block, cases[n].globals, cases[n].seqlen, &map, terms);
    pattern_prove(text, terms, count, bigbird_itc, &b);
    free(map.indptr);
    problem_free(&c);

    /* 40 more positions behind */
    snprintf(text, sizeof text, "h2 q%d k%d d4 lse seed:%d", (int)cases[n].seqlen + 40, (int)cases[n].seqlen + 40, (int)n);
    test_open(&c, 0, "%s", text);
    map = pattern_map(&c.problem, cases[n].block, 2, cases[n].count);
    random.global_first = random.global_last = 0;
    random.seqlen = cases[n].seqlen;
    assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
    count = qkv_bigbird_etc(cases[n].block, 40, cases[n].seqlen, &map, terms);
    pattern_prove(text, terms, count, bigbird_etc, &b);
    free(map.indptr);
    problem_free(&c);
  }
}

/* ---- Bands --------------------------------------------------------------------------------------------------------- */

/* At borders of chunks and tiles the band has its whole width, and not one key more. */
static void test_band_at_borders(void **state) {
  (void)state;
  static const int64_t widths[] = {2, 62, 64, 126, 128, 130, 510, 512, 514};
  for (size_t n = 0; n < COUNT(widths); n++) {
    const range r = {0, 0, widths[n], 0};
    const qkv_mask term = qkv_window(widths[n] / 2, widths[n] / 2);
    problem_case c;
    test_open(&c, 0, "h1 q1100 k1100 d1 seed:1");
    c.problem.mask = &term;
    c.problem.mask_count = 1;
    for (int64_t i = 0; i < 1100; i++) {
      for (int64_t side = -1; side <= 1; side += 2) {
        for (int64_t out = 0; out < 2; out++) {
          const int64_t key = i + side * (widths[n] / 2 + out);
          if (key < 0 || key >= 1100) {
            continue;
          }
          const qkv_tile t = {0, 0, i, 1, key, 1, 0, 0};
          uint64_t bits[64] = {0};
          int32_t answer;
          assert_int_equal(qkv_visible(&c.problem, &t, bits, &answer), QKV_OK);
          assert_int_equal(answer, out ? QKV_TILE_NONE : QKV_TILE_ALL);
        }
      }
    }
    problem_free(&c);
    if (n % 3 == 0) {
      pattern_prove("h1 q700 k700 d8 lse seed:2", &term, 1, longformer, &r);
    }
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_lists),
    cmocka_unit_test(test_longformer),
    cmocka_unit_test(test_chunks_columns_strides),
    cmocka_unit_test(test_dilated_windows),
    cmocka_unit_test(test_sparse_transformer),
    cmocka_unit_test(test_streaming_prefix_documents),
    cmocka_unit_test(test_bigbird),
    cmocka_unit_test(test_band_at_borders),
};

TEST_MAIN(tests)

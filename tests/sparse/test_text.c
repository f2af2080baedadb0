/* Sparse patterns as text, and files of them. */
#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mask_text.h"

enum { N = 300, HEADS = 2 };

/* Files by name. */
static int loader(const char *source, array *a, char *error, size_t error_bytes) {
  static const int64_t list_shape[2] = {2, 3}, flag_shape[1] = {N}, head_shape[1] = {HEADS}, map_shape[3] = {HEADS, 8, 2},
                       inner_shape[3] = {HEADS, 6, 2}, byte_shape[2] = {10, 10};
  memset(a, 0, sizeof *a);
  if (strcmp(source, "list") == 0) { /* no order, a hole, and one twice */
    static const int32_t values[6] = {70, -1, 2, 9, 9, 5};
    assert_int_equal(array_alloc(a, QKV_I32, 2, list_shape), 0);
    memcpy(a->data, values, sizeof values);
  } else if (strcmp(source, "flags") == 0) {
    assert_int_equal(array_alloc(a, QKV_U8, 1, flag_shape), 0);
    memset(a->data, 0, N);
    ((unsigned char *)a->data)[7] = ((unsigned char *)a->data)[N - 1] = 1;
  } else if (strcmp(source, "dilations") == 0) {
    static const int32_t values[HEADS] = {1, 3};
    assert_int_equal(array_alloc(a, QKV_I32, 1, head_shape), 0);
    memcpy(a->data, values, sizeof values);
  } else if (strcmp(source, "lists") == 0 || strcmp(source, "inner") == 0) { /* of blocks of 40: 8; or all but two */
    const int inner = source[0] == 'i';
    assert_int_equal(array_alloc(a, QKV_I32, 3, inner ? inner_shape : map_shape), 0);
    for (int64_t i = 0; i < HEADS * (inner ? 6 : 8) * 2; i++) {
      ((int32_t *)a->data)[i] = i % 5 == 0 ? -1 : (int32_t)(i * 3 % 8);
    }
  } else if (strcmp(source, "bytes") == 0) { /* of blocks of 30 */
    assert_int_equal(array_alloc(a, QKV_U8, 2, byte_shape), 0);
    for (int64_t i = 0; i < 100; i++) {
      ((unsigned char *)a->data)[i] = i % 3 == 0;
    }
  } else {
    snprintf(error, error_bytes, "%s: no such file", source);
    return -1;
  }
  return 0;
}

typedef struct listed {
  const char *source;
  int64_t block;
} listed;
static bool in_file(const void *data, const where *w) {
  const listed *l = data;
  array a;
  char error[64];
  bool seen = false;
  const int64_t q = w->query / l->block, k = w->key / l->block;
  assert_int_equal(loader(l->source, &a, error, sizeof error), 0);
  if (a.dtype == QKV_U8) {
    seen = ((unsigned char *)a.data)[q * 10 + k] != 0;
  } else {
    const int64_t rows = a.shape[1], row = rows == 6 ? q - 1 : q;
    for (int n = 0; n < 2 && row >= 0 && row < rows; n++) {
      seen = seen || ((int32_t *)a.data)[(w->head * rows + row) * 2 + n] == k;
    }
  }
  array_free(&a);
  return seen;
}
static bool in_list(int64_t batch, int64_t x) { return batch == 0 ? x == 70 || x == 2 : x == 9 || x == 5; }
static bool global_list(const void *data, const where *w) {
  (void)data;
  return in_list(w->batch, w->query) || in_list(w->batch, w->key);
}
static bool flagged_keys(const void *data, const where *w) {
  (void)data;
  return w->key == 7 || w->key == N - 1;
}
static bool dilated(const void *data, const where *w) {
  (void)data;
  int64_t apart = w->key > w->query ? w->key - w->query : w->query - w->key, by = w->head == 0 ? 1 : 3;
  return apart % by == 0 && apart / by <= 4;
}
static bool longformer(const void *data, const where *w) {
  (void)data;
  int64_t apart = w->key > w->query ? w->key - w->query : w->query - w->key;
  return w->key <= w->query && (apart <= 10 || w->key < 3 || w->query < 3);
}
static bool strided(const void *data, const where *w) {
  (void)data;
  return w->key <= w->query && (w->query - w->key <= 12 || (w->query - w->key) % 12 == 0);
}
static bool fixed(const void *data, const where *w) {
  (void)data;
  return w->key <= w->query && (w->query / 12 == w->key / 12 || w->key % 12 >= 10);
}
static bool sinks_window(const void *data, const where *w) {
  (void)data;
  return w->key <= w->query && (w->query - w->key < 9 || w->key < 4);
}
static bool last_keys(const void *data, const where *w) {
  (void)data;
  return w->key >= 192;
}

/* Parses, completes for the problem, and compares; also what it prints, once more. */
static void check(const char *expression, const char *printed, definition sees, const void *data) {
  const char *text = "b2 h2 q300 k300 d8 seed:1";
  static mask_text mask;
  const mask_text_extents extents = {2, HEADS, N, N};
  char error[4096], again[4096];
  problem_case c;
  test_open(&c, 0, "%s", text);
  snprintf(again, sizeof again, "%s", expression);
  for (int pass = 0; pass < 2; pass++) {
    if (mask_text_parse(again, &extents, loader, &mask, error, sizeof error) != 0) {
      fail_msg("%s: %s", again, error);
    }
    mask_text_print(mask.terms, mask.count, mask.sources, again, sizeof again);
    assert_string_equal(again, printed);
    if (mask_text_complete(&mask, NULL, &c.problem, error, sizeof error) != 0) {
      fail_msg("%s: %s", expression, error);
    }
    pattern_visible(text, mask.terms, mask.count, sees, data);
    mask_text_print(mask.terms, mask.count, mask.sources, again, sizeof again);
    assert_string_equal(again, printed);
    mask_text_free(&mask);
  }
  problem_free(&c);
}

static void test_terms(void **state) {
  (void)state;
  static const listed lists = {"lists", 40}, inner = {"inner", 40}, bytes = {"bytes", 30};
  check("global(list)", "keys(list) | queries(list)", global_list, NULL);
  check("keys( flags )", "keys(flags)", flagged_keys, NULL);
  check("stride(dilations,4)", "stride(dilations,4)", dilated, NULL);
  check("longformer(20,3) & causal", "(window(10,10) | keys(0,3) | queries(0,3)) & causal", longformer, NULL);
  check("strided(12)", "causal & (window(12,0) | stride(12))", strided, NULL);
  check("fixed(12,2)", "causal & (chunk(12,0) | columns(12,2))", fixed, NULL);
  check("sinks_window(4,9)", "causal & (window(8,0) | prefix(4))", sinks_window, NULL);
  check("last_keys(64,2)", "last_keys(64,2)", last_keys, NULL);
  check("blocks(lists,40)", "blocks(lists,40)", in_file, &lists);
  check("blocks(inner,40)", "blocks(inner,40)", in_file, &inner);
  check("blocks(\"bytes\",30)", "blocks(bytes,30)", in_file, &bytes);
}

/* Random and selected blocks are those of the library. */
static bool in_map(const void *data, const where *w) {
  const qkv_block_map *map = data;
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block,
                list = (map->batch > 1 ? w->batch : 0) * map->num_heads + w->head;
  const int32_t *offset = map->indptr + list * (rows + 1) + w->query / map->block;
  for (int32_t n = offset[0]; n < offset[1]; n++) {
    if (map->indices[n] == w->key / map->block) {
      return true;
    }
  }
  return false;
}
static bool in_map_causal(const void *data, const where *w) { return w->key <= w->query && in_map(data, w); }
static bool in_bigbird(const void *data, const where *w) {
  const int64_t q = w->query / 32, k = w->key / 32;
  return q == 0 || q == 9 || k == 0 || k == 9 || (q - 1 <= k && k <= q + 1) || in_map(data, w);
}

static void test_generated(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "b2 h2 q300 k300 d8 seed:1");
  qkv_block_map map = pattern_map(&c.problem, 32, HEADS, 4);
  map.batch = 1;
  qkv_block_random random = qkv_block_random_default();
  random.count = 2;
  random.seed = 9;
  random.window = -1;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
  check("random(32,2,9)", "random(32,2,9)", in_map, &map);
  random.causal = 1;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
  check("random(32,2,9) & causal", "random(32,2,9) & causal", in_map_causal, &map);
  random.causal = 0;
  random.window = 1;
  random.global_first = random.global_last = 1;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
  check("bigbird(32,2,1,9)",
        "chunk(32,1) | random(32,2,9,1,1) | keys(0,32) | queries(0,32) | last_keys(32,1) | last_queries(32,1)", in_bigbird,
        &map);
  qkv_block_topk topk = qkv_block_topk_default();
  topk.count = 4;
  topk.causal = 1;
  map.batch = 2;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_OK);
  check("causal & topk(32,4)", "causal & topk(32,4)", in_map_causal, &map);
  free(map.indptr);
  problem_free(&c);
}

static void test_wrong(void **state) {
  (void)state;
  static const struct {
    const char *text, *part;
  } cases[] = {{"random(64,3)", "the seed"},
               {"random(8,3,1)", "from 16"},
               {"random(512,3,1)", "16 to 256"},
               {"blocks(lists)", "the size of a block"},
               {"chunk(0)", "from 1"},
               {"columns(4,5)", "not so many"},
               {"fixed(4,5)", "not so many"},
               {"keys(5,3)", "from 5"},
               {"longformer(5)", "the number of global positions"},
               {"topk(64,0)", "from 1"},
               {"global(dilations", "')'"},
               {"keys(lists)", "(places,)"},
               {"stride(list)", "(heads,)"},
               {"blocks(flags,64)", "rows, places"},
               {"global(nothing)", "no such file"},
               {"longfomer(4,4)", "did you mean 'longformer'"}};
  for (size_t n = 0; n < COUNT(cases); n++) {
    static mask_text mask;
    const mask_text_extents extents = {2, HEADS, N, N};
    char error[4096];
    assert_true(mask_text_parse(cases[n].text, &extents, loader, &mask, error, sizeof error) != 0);
    if (strstr(error, cases[n].part) == NULL) {
      fail_msg("%s: %s\nexpected: %s", cases[n].text, error, cases[n].part);
    }
    mask_text_free(&mask);
  }
  /* a file for other lengths is refused with both sizes */
  static mask_text mask;
  const mask_text_extents extents = {2, HEADS, N, N};
  char error[4096];
  problem_case c;
  test_open(&c, 0, "b2 h2 q300 k300 d8 seed:1");
  assert_int_equal(mask_text_parse("blocks(bytes,64)", &extents, loader, &mask, error, sizeof error), 0);
  assert_int_equal(mask_text_complete(&mask, NULL, &c.problem, error, sizeof error), -1);
  assert_non_null(strstr(error, "10 x 10"));
  assert_non_null(strstr(error, "5 x 5"));
  mask_text_free(&mask);
  problem_free(&c);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_terms),
    cmocka_unit_test(test_generated),
    cmocka_unit_test(test_wrong),
};

TEST_MAIN(tests)

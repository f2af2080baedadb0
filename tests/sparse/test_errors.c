/* What is refused, and the text that says why. */
#include "pattern.h"

#include <stdlib.h>
#include <string.h>

static problem_case c;
static qkv_mask term;

static void expect(const char *name, qkv_status status, const char *first, const char *second) {
  char text[512];
  c.problem.mask = &term;
  c.problem.mask_count = 1;
  qkv_status got = qkv_check(&c.problem, text, sizeof text);
  if (got != status || strstr(text, first) == NULL || strstr(text, second) == NULL) {
    fail_msg("%s: status %d (%s), expected %d with '%s' and '%s'", name, (int)got, text, (int)status, first, second);
  }
  assert_int_equal(qkv_forward(NULL, &c.problem, NULL, 0), status);
}

static void test_terms(void **state) {
  (void)state;
  static int32_t list[4] = {3, 9, 9, -1}, falling[4] = {3, -1, 9, -1}, strides[2] = {4, 0};
  test_open(&c, 0, "b1 h2 q100 k100 d4");
  term = qkv_keys(5, 4);
  expect("keys", QKV_BAD_MASK, "mask[0].a 5", "b 4");
  term = qkv_queries(-1, 4);
  expect("queries", QKV_BAD_MASK, "-1", "queries mask");
  term = qkv_keys_of(qkv_strided(list, QKV_I32, 0, 0, 0, 1), 4);
  expect("keys twice", QKV_BAD_MASK, "mask[0].t", "position 9 comes after 9");
  term = qkv_queries_of(qkv_strided(falling, QKV_I32, 0, 0, 0, 1), 4);
  expect("a hole", QKV_BAD_MASK, "mask[0].t", "position 9 comes after -1");
  term = qkv_keys_of(qkv_strided(list, QKV_I32, 0, 0, 0, 1), -4);
  expect("a negative number", QKV_BAD_MASK, "-4", "negative");
  term = qkv_keys_of(qkv_strided(list, QKV_U8, 0, 0, 0, 1), 4);
  expect("bytes", QKV_BAD_DTYPE, "mask[0].t", "i32");
  term = qkv_keys_of(qkv_strided(list, QKV_I32, 0, 0, 0, INT64_MAX / 2), 4);
  expect("a stride", QKV_BAD_STRIDE, "mask[0].t", "address space");
  term = qkv_chunk(0, 1);
  expect("chunk", QKV_BAD_MASK, "a 0", "chunk");
  term = qkv_chunk(5, -1);
  expect("chunk", QKV_BAD_MASK, "b -1", "chunk");
  term = qkv_columns(5, 6);
  expect("columns", QKV_BAD_MASK, "a 5", "b 6");
  term = qkv_stride(0, 1);
  expect("stride", QKV_BAD_MASK, "a 0", "stride");
  term = qkv_strides(qkv_strided(strides, QKV_I32, 0, 1, 0, 0), 3);
  expect("strides", QKV_BAD_MASK, "head 1", "stride 0");
  term.a = 7;
  expect("strides", QKV_BAD_MASK, "a 7", "t too");
  problem_free(&c);
}

static void test_block_maps(void **state) {
  (void)state;
  test_open(&c, 0, "b2 h2 q100 k150 d4 start");
  qkv_block_map map = pattern_map(&c.problem, 32, 1, 8), good = map;
  term = qkv_blocks(NULL);
  expect("none", QKV_BAD_POINTER, "mask[0].user", "NULL");
  term = qkv_blocks(&map);
  expect("empty", QKV_OK, "", "");
  map.seqlen_q = 128;
  expect("made for other rows", QKV_BAD_MASK, "128 x 150", "100 x 150");
  map = good;
  map.seqlen_kv = 4096;
  expect("made for other keys", QKV_BAD_MASK, "100 x 4096", "100 x 150");
  map = good;
  map.num_heads = 3;
  map.seqlen_q = 10; /* the memory holds three such heads */
  expect("other heads", QKV_BAD_MASK, "3 heads", "2");
  map = good;
  map.block = 15;
  expect("a small block", QKV_BAD_EXTENT, "map.block 15", "16..256");
  map.block = 257;
  expect("a large block", QKV_BAD_EXTENT, "map.block 257", "16..256");
  map = good;
  map.size--;
  expect("size", QKV_BAD_SIZE, "map.size", "");
  map = good;
  map.reserved = 1;
  expect("reserved", QKV_UNKNOWN_FIELD, "map.reserved", "1");
  map = good;
  map.indptr = NULL;
  expect("indptr", QKV_BAD_POINTER, "map.indptr", "NULL");
  map = good;
  map.indptr[1] = -1;
  expect("a negative offset", QKV_BAD_MASK, "map.indptr[0]", "-1");
  map.indptr[1] = (int32_t)map.capacity + 1;
  expect("an offset beyond", QKV_BAD_MASK, "map.indptr[0]", "ascending");
  map.indptr[1] = map.indptr[2] = map.indptr[3] = map.indptr[4] = 2;
  map.indices[0] = 4;
  map.indices[1] = 5;
  expect("a block beyond", QKV_BAD_MASK, "map.indices[1] 5", "5 blocks");
  map.indices[1] = 0;
  expect("an order that is not there", QKV_BAD_MASK, "map.indices[1] 0", "sorted");
  map.sorted = 0;
  expect("no order", QKV_OK, "", "");
  map.indices = NULL;
  expect("indices", QKV_BAD_POINTER, "map.indices", "NULL");
  map = good;

  /* a part of a longer sequence may have a map that covers more; none that covers less */
  static int32_t kv_position[2] = {0, 50};
  map.seqlen_kv = 200;
  map.seqlen_q = 150;
  memset(map.indptr, 0, 6 * sizeof *map.indptr);
  c.problem.kv_position = kv_position;
  expect("the whole", QKV_OK, "", "");
  map.seqlen_kv = 300;
  map.seqlen_q = 160;
  expect("more", QKV_OK, "", "");
  map.seqlen_kv = 199;
  expect("less", QKV_BAD_MASK, "160 x 199", "150 x 200");
  free(map.indptr);
  problem_free(&c);
}

static void test_generators(void **state) {
  (void)state;
  test_open(&c, 0, "b1 h2 q200 k200 d4");
  size_t bytes;
  qkv_block_map map = pattern_map(&c.problem, 16, 2, 2);
  qkv_block_random random = qkv_block_random_default();
  assert_int_equal(qkv_random_blocks(NULL, &map), QKV_BAD_POINTER);
  assert_int_equal(qkv_random_blocks(&random, NULL), QKV_BAD_POINTER);
  random.count = 3;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_BAD_EXTENT); /* there is room for 2 */
  random.count = 2;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
  random.causal = 2;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_BAD_VALUE);
  random.causal = 0;
  random.window = -2;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_BAD_EXTENT);
  random.window = INT32_MAX;
  random.global_first = INT32_MAX;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_OK);
  random.size = 3;
  assert_int_equal(qkv_random_blocks(&random, &map), QKV_BAD_SIZE);
  assert_int_equal(qkv_block_map_bytes(&map, -1, &bytes), QKV_BAD_EXTENT);
  assert_int_equal(qkv_block_map_bytes(&map, 1, NULL), QKV_BAD_POINTER);
  assert_int_equal(qkv_block_map_bytes(NULL, 1, &bytes), QKV_BAD_POINTER);
  assert_int_equal(qkv_block_map_bytes(&map, INT64_MAX, &bytes), QKV_OK); /* there are 13 blocks */
  assert_int_equal(bytes, 4 * (2 * 14 + 2 * 13 * 13));
  assert_int_equal(qkv_block_map_init(&map, 2, map.indptr, 10), QKV_SCRATCH_TOO_SMALL);
  qkv_block_map large = map;
  large.num_heads = large.batch = INT32_MAX;
  large.seqlen_q = large.seqlen_kv = INT32_MAX;
  assert_int_equal(qkv_block_map_bytes(&large, 9, &bytes), QKV_TOO_LARGE);
  assert_int_equal(qkv_block_map_sort(NULL), QKV_BAD_POINTER);

  qkv_block_topk topk = qkv_block_topk_default();
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_BAD_EXTENT); /* count 0 */
  topk.count = 3;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_BAD_EXTENT); /* there is room for 2 */
  topk.count = 2;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_OK);
  map.num_heads = 1;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_BAD_EXTENT);
  map.num_heads = 2;
  map.seqlen_kv = 199;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_BAD_EXTENT);
  c.problem.k.data = NULL;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_BAD_POINTER);
  free(map.indptr);
  problem_free(&c);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_terms),
    cmocka_unit_test(test_block_maps),
    cmocka_unit_test(test_generators),
};

TEST_MAIN(tests)

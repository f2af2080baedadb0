#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

/* Bytes (batch, heads, rows, keys) of a definition; rows and keys that no entry has are 0. */
static qkv_mask dense_of(const qkv_problem *p, definition sees, const void *data) {
  int64_t rows = 0, keys = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    rows = problem_rows(p, b) > rows ? problem_rows(p, b) : rows;
    keys = problem_keys(p, b) > keys ? problem_keys(p, b) : keys;
  }
  unsigned char *bytes = test_alloc((size_t)(p->batch * p->num_heads * rows * keys));
  qkv_tensor t = qkv_bhsd(bytes, QKV_U8, p->num_heads, rows, keys);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < problem_rows(p, b); i++) {
        for (int64_t j = 0; j < problem_keys(p, b); j++) {
          const where w = {b, h, oracle_query_position(p, b, i, p->align), oracle_key_position(p, b, j), problem_keys(p, b)};
          bytes[b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + j] = sees(data, &w);
        }
      }
    }
  }
  return qkv_dense(t, 0);
}

/* The answers for rectangles must be those for the bytes. */
static void same_tiles(const char *text, const qkv_problem *p, const qkv_problem *dense) {
  rng r = {5, 0, 0};
  for (int n = 0; n < 400; n++) {
    qkv_tile t;
    memset(&t, 0, sizeof t);
    t.batch = rng_below(&r, p->batch);
    t.head = rng_below(&r, p->num_heads);
    int64_t rows = problem_rows(p, t.batch), keys = problem_keys(p, t.batch);
    if (rows == 0 || keys == 0) {
      continue;
    }
    t.row = rng_below(&r, rows);
    t.key = rng_below(&r, keys);
    t.rows = rng_range(&r, 1, rows - t.row < 64 ? rows - t.row : 64);
    t.keys = rng_range(&r, 1, keys - t.key < 64 ? keys - t.key : 64);
    uint64_t bits[2][64] = {{0}};
    int32_t answer[2];
    assert_int_equal(qkv_visible(p, &t, bits[0], &answer[0]), QKV_OK);
    assert_int_equal(qkv_visible(dense, &t, bits[1], &answer[1]), QKV_OK);
    if (answer[0] != answer[1] || memcmp(bits[0], bits[1], (size_t)t.keys * sizeof bits[0][0]) != 0) {
      fail_msg("%s: entry %d, head %d, rows %d + %d, keys %d + %d: answer %d, the definition's %d, or other bits", text,
               (int)t.batch, (int)t.head, (int)t.row, (int)t.rows, (int)t.key, (int)t.keys, (int)answer[0], (int)answer[1]);
    }
  }
}

static void same_count(const char *text, const qkv_problem *p, const qkv_problem *dense) {
  char described[2][4096], value[2][64];
  const qkv_problem *both[2] = {p, dense};
  for (int n = 0; n < 2; n++) {
    qkv_context c = test_context(test_isa[0]);
    assert_int_equal(qkv_describe(&c, both[n], described[n], sizeof described[n]), QKV_OK);
    assert_true(prove_fact(described[n], "pairs_visible", value[n], sizeof value[n]));
  }
  if (strcmp(value[0], value[1]) != 0) {
    fail_msg("%s: %s visible pairs are described, the definition has %s", text, value[0], value[1]);
  }
}

static void check_status(const char *text, const qkv_problem *p) {
  char message[512];
  if (qkv_check(p, message, sizeof message) != QKV_OK) {
    fail_msg("%s: %s", text, message);
  }
}

void pattern_visible(const char *text, const qkv_mask *terms, int64_t count, definition sees, const void *data) {
  problem_case c;
  test_open(&c, 0, "%s", text);
  qkv_problem sparse = c.problem, dense = c.problem;
  qkv_mask bytes = dense_of(&c.problem, sees, data);
  sparse.mask = terms;
  sparse.mask_count = count;
  dense.mask = &bytes;
  dense.mask_count = 1;
  check_status(text, &sparse);
  same_tiles(text, &sparse, &dense);
  same_count(text, &sparse, &dense);
  free(bytes.t.data);
  problem_free(&c);
}

/* How a call may run: none of it may change a bit. */
static const struct {
  executor_kind kind;
  int32_t workers;
  uint32_t flags;
} ways[] = {{EXECUTOR_SERIAL, 1, 0},
            {EXECUTOR_SHUFFLED, 3, QKV_FORCE_SPLIT},
            {EXECUTOR_REVERSED, 2, QKV_FORCE_PASSES | QKV_FORCE_STAGE},
            {EXECUTOR_SCATTERED, 2, QKV_NO_SKIP | QKV_FORCE_PARTIAL},
            {EXECUTOR_SERIAL, 1, QKV_FORCE_SELECT | QKV_FORCE_FUSE}};

void pattern_prove(const char *text, const qkv_mask *terms, int64_t count, definition sees, const void *data) {
  sample s;
  pattern_visible(text, terms, count, sees, data);
  sample_open(&s, 0, "%s", text);
  qkv_mask bytes = dense_of(&s.c.problem, sees, data);
  qkv_problem dense = s.c.problem;
  dense.mask = &bytes;
  dense.mask_count = 1;
  test_copy expected;
  gradients_copy expected_gradients;
  test_copy_make(&expected, &dense);
  test_run("reference", &expected.p);
  test_accurate(&expected.p, "%s", text);
  gradients_copy_make(&expected_gradients, &dense, &s.g.g);
  backward_run("reference", &expected.p, &expected_gradients.g);
  backward_accurate(&expected.p, &expected_gradients.g, NULL, "%s", text);

  qkv_problem sparse = s.c.problem;
  sparse.mask = terms;
  sparse.mask_count = count;
  EVERY_ISA {
    for (size_t n = 0; n < COUNT(ways); n++) {
      executor e = executor_make(ways[n].kind, ways[n].workers, n);
      qkv_context context = executor_context(&e);
      test_copy copy;
      gradients_copy gradients;
      context.isa_cap = ISA;
      context.flags = ways[n].flags;
      test_copy_make(&copy, &sparse);
      gradients_copy_make(&gradients, &sparse, &s.g.g);
      assert_int_equal(qkv_forward(&context, &copy.p, NULL, 0), QKV_OK);
      test_same(&expected.p, &copy.p, "%s, isa %s, way %d", text, ISA, (int)n);
      assert_int_equal(qkv_backward(&context, &copy.p, &gradients.g, NULL, 0), QKV_OK);
      backward_same(&expected.p, &expected_gradients.g, &copy.p, &gradients.g, "%s, isa %s, way %d", text, ISA, (int)n);
      gradients_copy_free(&gradients);
      test_copy_free(&copy);
      if (strcmp(ISA, "reference") == 0) {
        break;
      }
    }
  }
  gradients_copy_free(&expected_gradients);
  test_copy_free(&expected);
  free(bytes.t.data);
  sample_free(&s);
}

qkv_block_map pattern_map(const qkv_problem *p, int32_t block, int64_t num_heads, int64_t count) {
  qkv_block_map map = qkv_block_map_default();
  size_t bytes;
  map.block = block;
  map.seqlen_q = p->align == QKV_ALIGN_END ? p->seqlen_kv : p->seqlen_q;
  map.seqlen_kv = p->seqlen_kv;
  map.batch = num_heads > 1 ? p->batch : 1;
  map.num_heads = num_heads;
  assert_int_equal(qkv_block_map_bytes(&map, count, &bytes), QKV_OK);
  assert_int_equal(qkv_block_map_init(&map, count, test_alloc(bytes), bytes), QKV_OK);
  return map;
}

void pattern_fill(qkv_block_map *map, definition sees, const void *data) {
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block, keys = (map->seqlen_kv + map->block - 1) / map->block;
  int32_t at = 0, *offset = map->indptr;
  for (int64_t n = 0; n < map->batch * map->num_heads; n++) {
    for (int64_t i = 0; i < rows; i++) {
      *offset++ = at;
      for (int64_t j = 0; j < keys; j++) {
        const where w = {n / map->num_heads, n % map->num_heads, i, j, map->seqlen_kv};
        if (sees(data, &w)) {
          assert_true(at < map->capacity);
          map->indices[at++] = (int32_t)j;
        }
      }
    }
    *offset++ = at;
  }
}

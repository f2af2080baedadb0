/* qkv_visible against the oracle's predicate, and how much of what is computed is visible. */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

static void check_tile(const qkv_problem *p, const qkv_tile *t, const char *text) {
  uint64_t bits[64] = {0};
  int32_t answer = -1;
  assert_int_equal(qkv_visible(p, t, bits, &answer), QKV_OK);
  assert_in_range(answer, QKV_TILE_NONE, QKV_TILE_SOME);
  for (int64_t k = 0; k < t->keys; k++) {
    for (int64_t r = 0; r < t->rows; r++) {
      bool seen = answer == QKV_TILE_ALL || (answer == QKV_TILE_SOME && (bits[k] >> r & 1));
      if (seen != oracle_visible(p, t->batch, t->head, t->row + r, t->key + k)) {
        fail_msg("%s: entry %d, head %d, row %d + %d of %d, key %d + %d of %d is %s", text, (int)t->batch, (int)t->head,
                 (int)t->row, (int)r, (int)t->rows, (int)t->key, (int)k, (int)t->keys, seen ? "visible" : "invisible");
      }
    }
  }
}

static void check_problem(const problem_spec *spec, rng *r, int tiles) {
  problem_case c;
  char text[PROBLEM_TEXT_BYTES];
  problem_print(spec, text, sizeof text);
  assert_true(problem_build(&c, spec, PROBLEM_GUARD_END));
  const qkv_problem *p = &c.problem;
  for (int n = 0; n < tiles && p->batch > 0 && p->num_heads > 0; n++) {
    qkv_tile t;
    memset(&t, 0, sizeof t);
    t.batch = rng_below(r, p->batch);
    t.head = rng_below(r, p->num_heads);
    int64_t rows = problem_rows(p, t.batch), keys = problem_keys(p, t.batch);
    if (rows == 0 || keys == 0) {
      continue;
    }
    t.row = rng_below(r, rows);
    t.key = rng_below(r, keys);
    int64_t most_rows = rows - t.row < 64 ? rows - t.row : 64, most_keys = keys - t.key < 64 ? keys - t.key : 64;
    t.rows = rng_chance(r, 50) ? most_rows : rng_range(r, 1, most_rows);
    t.keys = rng_chance(r, 50) ? most_keys : rng_range(r, 1, most_keys);
    check_tile(p, &t, text);
  }
  problem_free(&c);
}

static void test_random_masks(void **state) {
  (void)state;
  rng r = {11, 0, 0};
  int64_t count = test_scale(800);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    problem_random(7, (uint64_t)n, 3e5, &spec);
    spec.nan = PROBLEM_NO_NAN;
    spec.head_dim = spec.head_dim_v = 1;
    check_problem(&spec, &r, 12);
  }
}

static void test_each_kind(void **state) {
  (void)state;
  static const char *const masks[] = {"causal",
                                      "causal_start",
                                      "window:0,0",
                                      "window:10,0",
                                      "window:0,10",
                                      "window:-1,5",
                                      "window:5,-1",
                                      "window:-1,-1",
                                      "prefix:0",
                                      "prefix:1",
                                      "prefix:100",
                                      "prefix:100000",
                                      "documents",
                                      "documents2",
                                      "dense",
                                      "dense:70",
                                      "dense:100000",
                                      "tile",
                                      ""};
  static const char *const places[] = {
      "", "start", "pos", "kvpos", "lengths", "lengths kvpos", "pos kvpos lengths", "ragged", "ragged lengths start"};
  rng r = {12, 0, 0};
  for (size_t a = 0; a < sizeof masks / sizeof masks[0]; a++) {
    for (size_t b = 0; b < sizeof places / sizeof places[0]; b++) {
      for (size_t join = 0; join < 3; join++) {
        char text[PROBLEM_TEXT_BYTES], error[256];
        const char *second = masks[(a * 5 + b) % (sizeof masks / sizeof masks[0])];
        snprintf(text, sizeof text, "b3 h2 q%d k%d d1 %s %s %s%s seed:%d", (int)(60 + 9 * b), (int)(100 + 7 * a), places[b],
                 masks[a], join == 2 && second[0] != 0 && masks[a][0] != 0 ? "or:" : "", join > 0 ? second : "",
                 (int)(a * 10 + b));
        problem_spec spec;
        if (!problem_parse(text, &spec, error, sizeof error)) {
          fail_msg("%s", error);
        }
        check_problem(&spec, &r, 12);
      }
    }
  }
}

static void test_bad_tiles(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "b2 h3 q70 k80 d1 causal");
  const qkv_tile good = {1, 2, 6, 64, 16, 64, 0, 0};
  check_tile(&c.problem, &good, "a tile at the corner");
  const qkv_tile bad[] = {
      {2, 0, 0, 1, 0, 1, 0, 0},  {-1, 0, 0, 1, 0, 1, 0, 0}, {0, 3, 0, 1, 0, 1, 0, 0},  {0, -1, 0, 1, 0, 1, 0, 0},
      {0, 0, 70, 1, 0, 1, 0, 0}, {0, 0, -1, 1, 0, 1, 0, 0}, {0, 0, 7, 64, 0, 1, 0, 0}, {0, 0, 0, 65, 0, 1, 0, 0},
      {0, 0, 0, 0, 0, 1, 0, 0},  {0, 0, 0, 1, 80, 1, 0, 0}, {0, 0, 0, 1, -1, 1, 0, 0}, {0, 0, 0, 1, 17, 64, 0, 0},
      {0, 0, 0, 1, 0, 65, 0, 0}, {0, 0, 0, 1, 0, 0, 0, 0},  {0, 0, 0, -5, 0, 1, 0, 0}, {0, 0, INT64_MAX, 1, 0, 1, 0, 0}};
  for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) {
    uint64_t bits[64];
    int32_t answer = -1;
    memset(bits, 0xa5, sizeof bits);
    if (qkv_visible(&c.problem, &bad[n], bits, &answer) == QKV_OK) {
      fail_msg("tile %d was accepted", (int)n);
    }
    assert_int_equal(answer, -1);
    assert_true(bits[0] == UINT64_C(0xa5a5a5a5a5a5a5a5));
  }
  problem_free(&c);
}

/* ---- Work ---------------------------------------------------------------------------------------------------------- */

static double fact(const char *text, const char *name) {
  char value[128];
  if (!prove_fact(text, name, value, sizeof value)) {
    fail_msg("qkv_describe has no line '%s':\n%s", name, text);
  }
  return strtod(value, NULL);
}

static double count_visible(const qkv_problem *p) {
  double visible = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < problem_rows(p, b); i++) {
        for (int64_t j = 0; j < problem_keys(p, b); j++) {
          visible += oracle_visible(p, b, h, i, j);
        }
      }
    }
  }
  return visible;
}

static void test_described_pairs(void **state) {
  (void)state;
  /* Computed pairs per visible pair. Skipping goes below the tile of 64 x 64. */
  static const struct {
    const char *text;
    double most;
  } cases[] = {{"q256 k256 d8", 1.0001},
               {"q1024 k1024 d8 causal", 1.05},
               {"q4096 k4096 d8 causal", 1.012},
               {"q2048 k2048 d8 causal window:512,0", 1.08},
               {"q2048 k2048 d8 window:128,128", 1.15},
               {"q1024 k1024 d8 causal window:31,0", 2.05},
               {"q2048 k2048 d8 causal window:128,0 or:prefix:64", 1.2},
               {"b3 q500 k700 d8 causal lengths seed:3", 1.5},
               {"b4 h2 q900 k1500 d8 causal ragged seed:3", 1.16}};
  for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
    problem_case c;
    test_open(&c, 0, "%s", cases[n].text);
    double visible = count_visible(&c.problem);
    for (int isa = 0; isa < test_isas; isa++) {
      if (strcmp(test_isa[isa], "reference") == 0) {
        continue;
      }
      qkv_context context = test_context(test_isa[isa]);
      char text[4096];
      assert_int_equal(qkv_describe(&context, &c.problem, text, sizeof text), QKV_OK);
      if (fact(text, "pairs_visible") != visible) {
        fail_msg("%s: %.0f visible pairs, described %.0f", cases[n].text, visible, fact(text, "pairs_visible"));
      }
      double computed = fact(text, "pairs_computed");
      if (!(computed >= visible && computed <= cases[n].most * visible)) {
        fail_msg("isa %s, %s: %.0f pairs computed for %.0f visible ones, ratio %.3f, at most %.3f", test_isa[isa],
                 cases[n].text, computed, visible, computed / visible, cases[n].most);
      }
    }
    problem_free(&c);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_random_masks),
    cmocka_unit_test(test_each_kind),
    cmocka_unit_test(test_bad_tiles),
    cmocka_unit_test(test_described_pairs),
};

TEST_MAIN(tests)

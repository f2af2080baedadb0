/* Block maps: what they say, and the generators that fill them. */
#include "pattern.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

static int64_t rows_of(const qkv_block_map *map) { return (map->seqlen_q + map->block - 1) / map->block; }
static int64_t keys_of(const qkv_block_map *map) { return (map->seqlen_kv + map->block - 1) / map->block; }
static const int32_t *list_of(const qkv_block_map *map, int64_t b, int64_t h, int64_t row, int64_t *count) {
  const int32_t *offset = map->indptr + (b * map->num_heads + h) * (rows_of(map) + 1) + row;
  *count = offset[1] - offset[0];
  return map->indices + offset[0];
}
static void same_maps(const qkv_block_map *a, const qkv_block_map *b, const char *what) {
  for (int64_t n = 0; n < a->batch * a->num_heads; n++) {
    for (int64_t i = 0; i < rows_of(a); i++) {
      int64_t count, other;
      const int32_t *x = list_of(a, n / a->num_heads, n % a->num_heads, i, &count);
      const int32_t *y = list_of(b, n / a->num_heads, n % a->num_heads, i, &other);
      if (count != other || memcmp(x, y, (size_t)count * sizeof *x) != 0) {
        fail_msg("%s: the lists of block %d of head %d differ", what, (int)i, (int)(n % a->num_heads));
      }
    }
  }
}

/* ---- What a map says ----------------------------------------------------------------------------------------------- */

/* A block is listed by a hash of its place: `percent` of all. */
typedef struct choice {
  int64_t percent, block;
  bool shared;
} choice;
static bool chosen(const void *data, const where *w) {
  const choice *c = data;
  uint64_t x = (uint64_t)(c->shared ? 0 : w->batch * 7 + w->head + 1) * 1000003 + (uint64_t)w->query * 2654435761u +
               (uint64_t)w->key * 97;
  x ^= x >> 13;
  x *= UINT64_C(0x9E3779B97F4A7C15);
  return (int64_t)(x >> 33) % 100 < c->percent;
}
/* The same of positions. */
static bool in_chosen(const void *data, const where *w) {
  const choice *c = data;
  where blocks = *w;
  if (w->query < 0) {
    return false;
  }
  blocks.query /= c->block;
  blocks.key /= c->block;
  return chosen(data, &blocks);
}

/* Lists in no order, with some blocks twice. */
static void disorder(qkv_block_map *map, qkv_block_map *to) {
  rng r = {9, 0, 0};
  int32_t at = 0, *offset = to->indptr;
  for (int64_t n = 0; n < map->batch * map->num_heads; n++) {
    for (int64_t i = 0; i < rows_of(map); i++) {
      int64_t count;
      const int32_t *x = list_of(map, n / map->num_heads, n % map->num_heads, i, &count);
      *offset++ = at;
      for (int64_t k = 0; k < 2 * count; k++) {
        to->indices[at + k] = x[k / 2];
      }
      for (int64_t k = 2 * count - 1; k > 0; k--) {
        int64_t other = rng_below(&r, k + 1);
        int32_t t = to->indices[at + k];
        to->indices[at + k] = to->indices[at + other];
        to->indices[at + other] = t;
      }
      at += (int32_t)(2 * count);
    }
    *offset++ = at;
  }
  to->sorted = 0;
}

static void test_blocks_of_all_sizes(void **state) {
  (void)state;
  static const int32_t blocks[] = {16, 17, 64, 84, 100, 256};
  static const char *const texts[] = {"b2 h2 q200 k200 d8 lse seed:1", "b2 h4/2 q90 k300 d8 lse sinks seed:2",
                                      "b2 h2 q200 k130 d8 start lse seed:3"};
  for (size_t n = 0; n < COUNT(blocks); n++) {
    for (int64_t percent = 0; percent <= 100; percent += 50) {
      const char *text = texts[(n + (size_t)percent / 50) % COUNT(texts)];
      const choice c = {percent, blocks[n], n % 2 == 1};
      problem_case p;
      test_open(&p, 0, "%s", text);
      const int64_t heads = c.shared ? 1 : p.problem.num_heads;
      qkv_block_map map = pattern_map(&p.problem, blocks[n], heads, 1000),
                    other = pattern_map(&p.problem, blocks[n], heads, 1000);
      pattern_fill(&map, chosen, &c);
      qkv_mask term = qkv_blocks(&map);
      pattern_prove(text, &term, 1, in_chosen, &c);
      size_t bytes;
      other.seqlen_kv += other.seqlen_kv + other.block; /* twice the room */
      assert_int_equal(qkv_block_map_bytes(&other, 1000, &bytes), QKV_OK);
      free(other.indptr);
      assert_int_equal(qkv_block_map_init(&other, 1000, test_alloc(bytes), bytes), QKV_OK);
      other.seqlen_kv = map.seqlen_kv;
      disorder(&map, &other);
      term = qkv_blocks(&other);
      pattern_prove(text, &term, 1, in_chosen, &c);
      assert_int_equal(qkv_block_map_sort(&other), QKV_OK);
      assert_int_equal(other.sorted, 1);
      pattern_visible(text, &term, 1, in_chosen, &c);
      free(map.indptr);
      free(other.indptr);
      problem_free(&p);
    }
  }
}

/* More queries than keys: the first stand before position 0, in no block. */
static void test_negative_positions(void **state) {
  (void)state;
  static const char *const text = "h2 q200 k130 d4 lse seed:1";
  const choice c = {100, 64, true};
  problem_case p;
  test_open(&p, 0, "%s", text);
  qkv_block_map map = pattern_map(&p.problem, 64, 1, 1000);
  pattern_fill(&map, chosen, &c);
  const qkv_mask term = qkv_blocks(&map);
  pattern_prove(text, &term, 1, in_chosen, &c);
  free(map.indptr);
  problem_free(&p);
}

/* Rows without keys: zeros, and a log-sum-exp of -inf; no gradient. */
static void test_no_blocks(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "b2 h2 q100 k100 d8 lse seed:1");
  qkv_block_map map = pattern_map(&s.c.problem, 32, 1, 4);
  const qkv_mask term = qkv_blocks(&map);
  s.c.problem.mask = &term;
  s.c.problem.mask_count = 1;
  EVERY_ISA {
    test_run(ISA, &s.c.problem);
    for (int64_t n = 0; n < 2 * 2 * 100 * 8; n++) {
      double x = problem_load(&s.c.problem.out, n);
      assert_true(x >= 0 && x <= 0);
    }
    for (int64_t n = 0; n < 2 * 2 * 100; n++) {
      assert_true(problem_load(&s.c.problem.lse, n) == (double)-INFINITY);
    }
    backward_run(ISA, &s.c.problem, &s.g.g);
    expect_zeros(&s.c.problem, &s.g.g, PROBLEM_DQ, "no blocks");
    expect_zeros(&s.c.problem, &s.g.g, PROBLEM_DK, "no blocks");
    expect_zeros(&s.c.problem, &s.g.g, PROBLEM_DV, "no blocks");
  }
  free(map.indptr);
  sample_free(&s);
}

/* A part of the keys, and a part of the queries, under the map of the whole. */
static void test_parts(void **state) {
  (void)state;
  const choice c = {40, 48, false};
  problem_case p;
  test_open(&p, 0, "h2 q700 k1300 d8 lse seed:1");
  qkv_block_map map = pattern_map(&p.problem, 48, 2, 1000);
  pattern_fill(&map, chosen, &c);
  const qkv_mask term = qkv_blocks(&map);
  test_copy whole, parts;
  test_copy_make(&whole, &p.problem);
  whole.p.mask = &term;
  whole.p.mask_count = 1;
  test_copy_make(&parts, &whole.p);
  test_run("reference", &whole.p);
  EVERY_ISA {
    qkv_context context = test_context(ISA);
    qkv_state state_of[2];
    void *memory[2];
    static const int32_t positions[2] = {0, 512}, q_position = 600;
    for (int n = 0; n < 2; n++) {
      qkv_problem part = whole.p;
      size_t bytes;
      int64_t nodes;
      part.align = QKV_ALIGN_EXPLICIT;
      part.q_position = &q_position;
      part.kv_position = &positions[n];
      part.seqlen_kv = n == 0 ? 512 : 1300 - 512;
      part.k.data = (float *)part.k.data + positions[n] * part.k.stride[2];
      part.v.data = (float *)part.v.data + positions[n] * part.v.stride[2];
      assert_int_equal(qkv_state_bytes(&part, 8, &nodes, &bytes), QKV_OK);
      memory[n] = test_alloc(bytes);
      assert_int_equal(qkv_state_init(&part, 8, memory[n], bytes, &state_of[n]), QKV_OK);
      assert_int_equal(qkv_partial(&context, &part, &state_of[n], NULL, 0), QKV_OK);
    }
    assert_int_equal(qkv_merge(&context, &state_of[0], &state_of[1]), QKV_OK);
    assert_int_equal(qkv_finish(&context, &parts.p, &state_of[0]), QKV_OK);
    test_same(&whole.p, &parts.p, "isa %s, two parts", ISA);
    free(memory[0]);
    free(memory[1]);
  }
  test_copy_free(&whole);
  test_copy_free(&parts);
  free(map.indptr);
  problem_free(&p);
}

/* ---- Random blocks ------------------------------------------------------------------------------------------------- */

/* The rule as docs/SEMANTICS.md has it, by sets of flags. */
static void draw_again(const qkv_block_random *r, const qkv_block_map *map, int64_t b, int64_t h, int64_t row, bool *drawn) {
  const int64_t seqlen = r->seqlen > 0 ? r->seqlen : map->seqlen_q, keys = (seqlen + map->block - 1) / map->block;
  int64_t open[4096], all = 0;
  memset(drawn, 0, (size_t)keys_of(map) * sizeof *drawn);
  if (row >= keys || row < r->global_first || row >= keys - r->global_last) {
    return;
  }
  for (int64_t j = 0; j < keys; j++) {
    const int64_t apart = j > row ? j - row : row - j;
    if (j >= r->global_first && j < keys - r->global_last && apart > r->window && !(r->causal && j >= row)) {
      open[all++] = j;
    }
  }
  const int64_t count = r->count < all ? r->count : all;
  for (int64_t n = 0; n < count; n++) {
    const uint32_t counter[4] = {(uint32_t)(n / 4), (uint32_t)row, (uint32_t)(r->head_origin + h),
                                 (uint32_t)(r->batch_origin + b)};
    const uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
    uint32_t words[4];
    oracle_philox(counter, key, words);
    const int64_t top = all - count + n, at = (int64_t)(((uint64_t)words[n % 4] * (uint64_t)(top + 1)) >> 32);
    drawn[drawn[open[at]] ? open[top] : open[at]] = true;
  }
}

static qkv_block_map random_map(int64_t seqlen, int32_t block, int64_t batch, int64_t heads, const qkv_block_random *r) {
  qkv_block_map map = qkv_block_map_default();
  size_t bytes;
  map.block = block;
  map.seqlen_q = map.seqlen_kv = seqlen;
  map.batch = batch;
  map.num_heads = heads;
  assert_int_equal(qkv_block_map_bytes(&map, r->count, &bytes), QKV_OK);
  assert_int_equal(qkv_block_map_init(&map, r->count, test_alloc(bytes), bytes), QKV_OK);
  assert_int_equal(qkv_random_blocks(r, &map), QKV_OK);
  return map;
}

static void test_random_blocks(void **state) {
  (void)state;
  rng r = {21, 0, 0};
  for (int n = 0; n < 300; n++) {
    qkv_block_random random = qkv_block_random_default();
    const int32_t block = (int32_t)rng_range(&r, 16, 128);
    const int64_t seqlen = rng_range(&r, 1, 3000), batch = rng_range(&r, 1, 2), heads = rng_range(&r, 1, 3);
    random.count = rng_range(&r, 0, 6);
    random.window = rng_range(&r, -1, 3);
    random.global_first = rng_range(&r, 0, 2);
    random.global_last = rng_range(&r, 0, 2);
    random.causal = rng_chance(&r, 30);
    random.seed = rng_next(&r);
    random.seqlen = rng_chance(&r, 30) ? rng_range(&r, 1, seqlen) : 0;
    random.head_origin = rng_range(&r, 0, 5);
    qkv_block_map map = random_map(seqlen, block, batch, heads, &random);
    for (int64_t list = 0; list < batch * heads; list++) {
      for (int64_t i = 0; i < rows_of(&map); i++) {
        bool drawn[4096];
        int64_t count, expected = 0;
        draw_again(&random, &map, list / heads, list % heads, i, drawn);
        const int32_t *x = list_of(&map, list / heads, list % heads, i, &count);
        for (int64_t j = 0; j < keys_of(&map); j++) {
          expected += drawn[j];
        }
        assert_int_equal(count, expected);
        for (int64_t k = 0; k < count; k++) {
          assert_true(drawn[x[k]]);
          assert_true(k == 0 || x[k - 1] < x[k]);
        }
      }
    }
    free(map.indptr);
  }
}

/* Heads and seeds differ; a part of the heads has the lists of the whole; late rows see late blocks, all equally often. */
static void test_random_relations(void **state) {
  (void)state;
  enum { HEADS = 8, BLOCKS = 128 };
  qkv_block_random random = qkv_block_random_default();
  random.count = 3;
  random.window = 1;
  random.global_first = random.global_last = 1;
  random.seed = 5;
  qkv_block_map map = random_map(BLOCKS * 64, 64, 1, HEADS, &random);
  random.seed = 6;
  qkv_block_map seeded = random_map(BLOCKS * 64, 64, 1, HEADS, &random);
  random.seed = 5;
  random.head_origin = 3;
  qkv_block_map part = random_map(BLOCKS * 64, 64, 1, 2, &random);
  qkv_block_map view = map;
  view.num_heads = 2;
  view.indptr += 3 * (BLOCKS + 1);
  same_maps(&part, &view, "heads 3 and 4");
  int64_t by_head = 0, by_seed = 0, times[BLOCKS] = {0}, late = 0, all = 0;
  for (int64_t i = 2; i < BLOCKS - 2; i++) {
    for (int64_t h = 0; h < HEADS; h++) {
      int64_t count, other;
      const int32_t *x = list_of(&map, 0, h, i, &count), *y = list_of(&map, 0, (h + 1) % HEADS, i, &other),
                    *z = list_of(&seeded, 0, h, i, &other);
      assert_int_equal(count, 3);
      by_head += memcmp(x, y, 3 * sizeof *x) != 0;
      by_seed += memcmp(x, z, 3 * sizeof *x) != 0;
      for (int k = 0; k < 3; k++) {
        times[x[k]]++;
        late += x[k] * 64 >= 1024;
        all++;
      }
    }
  }
  /* Of 317750 sets two are the same once in so many times. */
  assert_true(by_head > 980 && by_seed > 980);
  /* 14 % of the blocks are in the first 1024 positions. */
  assert_true(late > all * 8 / 10);
  double square = 0, mean = (double)all / (BLOCKS - 2);
  for (int64_t j = 1; j < BLOCKS - 1; j++) {
    square += ((double)times[j] - mean) * ((double)times[j] - mean) / mean;
  }
  /* Chi square of 125 degrees of freedom: 68 to 199 but once in 10^4. */
  assert_true(square > 60 && square < 215);
  free(map.indptr);
  free(seeded.indptr);
  free(part.indptr);
}

/* ---- Selected blocks ----------------------------------------------------------------------------------------------- */

/* The mean of a block of an entry: positions [block * size, ...) of those that exist; their number. */
static int64_t mean_of(const qkv_problem *p, const qkv_tensor *t, char side, int64_t b, int64_t h, int64_t block,
                       int64_t size, double *mean) {
  int64_t n = 0, rows = side == 'q' ? problem_rows(p, b) : problem_keys(p, b);
  for (int64_t x = 0; x < p->head_dim; x++) {
    mean[x] = 0;
  }
  for (int64_t i = 0; i < rows; i++) {
    int64_t position = side == 'q' ? oracle_query_position(p, b, i, p->align) : oracle_key_position(p, b, i);
    if (side == 'q' && p->q_length != NULL && i >= p->q_length[b]) {
      continue;
    }
    if (side == 'k' && ((p->kv_begin != NULL && i < p->kv_begin[b]) || (p->kv_length != NULL && i >= p->kv_length[b]))) {
      continue;
    }
    if (position < block * size || position >= (block + 1) * size) {
      continue;
    }
    n++;
    for (int64_t x = 0; x < p->head_dim; x++) {
      mean[x] += problem_load(t, problem_offset(p, t, side, b, h, i, x));
    }
  }
  for (int64_t x = 0; x < p->head_dim && n > 0; x++) {
    mean[x] /= (double)n;
  }
  return n;
}

static void check_topk(const char *text, int32_t block, int64_t count, int causal) {
  problem_case c;
  test_open(&c, 0, "%s", text);
  const qkv_problem *p = &c.problem;
  qkv_block_topk topk = qkv_block_topk_default();
  topk.count = count;
  topk.causal = causal;
  qkv_block_map first = qkv_block_map_default(), maps[PROVE_MAX_ISAS];
  EVERY_ISA {
    qkv_block_map *map = &maps[isa_index];
    executor e = executor_make(isa_index % 2 ? EXECUTOR_SCATTERED : EXECUTOR_REVERSED, 1 + isa_index, 3);
    qkv_context context = executor_context(&e);
    context.isa_cap = ISA;
    *map = first;
    map->block = block;
    size_t bytes;
    map->seqlen_q = p->align == QKV_ALIGN_END ? p->seqlen_kv : p->seqlen_q;
    map->seqlen_kv = p->seqlen_kv;
    map->batch = p->batch;
    map->num_heads = p->num_heads;
    assert_int_equal(qkv_block_map_bytes(map, count, &bytes), QKV_OK);
    assert_int_equal(qkv_block_map_init(map, count, test_alloc(bytes), bytes), QKV_OK);
    assert_int_equal(qkv_topk_blocks(&context, p, &topk, map), QKV_OK);
    same_maps(&maps[0], map, ISA);
  }
  /* against double: no block that was left out may score higher than one that was taken, by more than rounding */
  double q[64], k[64];
  const double scale = p->softmax_scale != 0 ? p->softmax_scale : 1 / sqrt((double)p->head_dim);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < rows_of(&maps[0]); i++) {
        int64_t n, able = 0;
        const int32_t *x = list_of(&maps[0], b, h, i, &n);
        double worst = INFINITY, best = -INFINITY, size = 0;
        if (mean_of(p, &p->q, 'q', b, h, i, block, q) == 0) {
          assert_int_equal(n, 0);
          continue;
        }
        for (int64_t j = 0; j < keys_of(&maps[0]) && !(causal && j > i); j++) {
          if (mean_of(p, &p->k, 'k', b, h * (p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads) / p->num_heads, j, block,
                      k) == 0) {
            continue;
          }
          double score = 0, sum = 0;
          bool taken = false;
          for (int64_t y = 0; y < p->head_dim; y++) {
            score += scale * q[y] * k[y];
            sum += fabs(scale * q[y] * k[y]);
          }
          size = sum > size ? sum : size;
          for (int64_t y = 0; y < n; y++) {
            taken = taken || x[y] == j;
          }
          able++;
          if (causal && j == i) {
            assert_true(taken);
          } else if (taken) {
            worst = score < worst ? score : worst;
          } else {
            best = score > best ? score : best;
          }
        }
        assert_int_equal(n, able < count ? able : count);
        /* means are rounded once, then times the constant, then a chain: (d + 4) units of the sum of magnitudes each */
        if (!(best <= worst + 2 * (double)(p->head_dim + 4) * size * 0x1p-24)) {
          fail_msg("%s, entry %d, head %d, block %d: a block of score %.9g was left out, one of %.9g taken", text, (int)b,
                   (int)h, (int)i, best, worst);
        }
      }
    }
  }
  EVERY_ISA { free(maps[isa_index].indptr); }
  problem_free(&c);
}

static void test_topk(void **state) {
  (void)state;
  for (int causal = 0; causal < 2; causal++) {
    check_topk("b2 h4/2 q700 k700 d16 seed:1", 32, 5, causal);
    check_topk("b2 h2 q100 k700 d7 seed:2", 64, 3, causal);
    check_topk("f64 h2 q333 k333 d16 odd seed:3", 16, 8, causal);
    check_topk("bf16 h2 q333 k333 d16 bshd seed:4", 50, 2, causal);
    check_topk("b3 h2 q300 k400 d8 lengths start seed:5", 32, 4, causal);
    check_topk("h1 q5000 k5000 d4 seed:6", 16, 3, causal);
    check_topk("h1 q100 k100 d4 seed:7", 32, 100, causal);
    check_topk("h1 q20 k20 d4 scale:-1 seed:8", 16, 1, causal);
  }
}

/* Equal keys: the first blocks. NaN counts as the least. */
static void test_topk_ties(void **state) {
  (void)state;
  enum { N = 640, D = 4, BLOCK = 64 };
  static float q[N * D], k[N * D];
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = 1;
  p.seqlen_q = p.seqlen_kv = N;
  p.head_dim = D;
  p.q = qkv_bhsd(q, QKV_F32, 1, N, D);
  p.k = qkv_bhsd(k, QKV_F32, 1, N, D);
  for (int n = 0; n < N * D; n++) {
    q[n] = k[n] = 1;
  }
  for (int n = 0; n < BLOCK * D; n++) {
    k[BLOCK * D + n] = NAN;
    k[7 * BLOCK * D + n] = 2;
  }
  qkv_block_map map = pattern_map(&p, BLOCK, 1, 4);
  qkv_block_topk topk = qkv_block_topk_default();
  topk.count = 4;
  assert_int_equal(qkv_topk_blocks(NULL, &p, &topk, &map), QKV_OK);
  for (int64_t i = 0; i < N / BLOCK; i++) {
    static const int32_t expected[] = {0, 2, 3, 7};
    int64_t count;
    const int32_t *x = list_of(&map, 0, 0, i, &count);
    assert_int_equal(count, 4);
    assert_memory_equal(x, expected, sizeof expected);
  }
  topk.causal = 1;
  assert_int_equal(qkv_topk_blocks(NULL, &p, &topk, &map), QKV_OK);
  for (int64_t i = 0; i < N / BLOCK; i++) {
    int64_t count;
    const int32_t *x = list_of(&map, 0, 0, i, &count);
    assert_int_equal(count, i < 3 ? i + 1 : 4);
    assert_int_equal(x[count - 1], i);
  }
  free(map.indptr);
}

/* The map of a call, used by the call. */
static void test_topk_attends(void **state) {
  (void)state;
  const char *text = "b2 h4/2 q300 k300 d8 lse seed:1";
  problem_case c;
  test_open(&c, 0, "%s", text);
  qkv_block_map map = pattern_map(&c.problem, 32, 4, 3);
  qkv_block_topk topk = qkv_block_topk_default();
  topk.count = 3;
  topk.causal = 1;
  assert_int_equal(qkv_topk_blocks(NULL, &c.problem, &topk, &map), QKV_OK);
  const qkv_mask terms[2] = {qkv_blocks(&map), qkv_causal()};
  c.problem.mask = terms;
  c.problem.mask_count = 2;
  for (int64_t i = 0; i < 300; i++) { /* every row sees at least itself */
    assert_true(oracle_query_position(&c.problem, 0, i, QKV_ALIGN_END) == i);
    const qkv_tile t = {1, 3, i, 1, i, 1, 0, 0};
    uint64_t bits[64];
    int32_t answer;
    assert_int_equal(qkv_visible(&c.problem, &t, bits, &answer), QKV_OK);
    assert_int_equal(answer, QKV_TILE_ALL);
  }
  free(map.indptr);
  problem_free(&c);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_blocks_of_all_sizes),
    cmocka_unit_test(test_negative_positions),
    cmocka_unit_test(test_no_blocks),
    cmocka_unit_test(test_parts),
    cmocka_unit_test(test_random_blocks),
    cmocka_unit_test(test_random_relations),
    cmocka_unit_test(test_topk),
    cmocka_unit_test(test_topk_ties),
    cmocka_unit_test(test_topk_attends),
};

TEST_MAIN(tests)

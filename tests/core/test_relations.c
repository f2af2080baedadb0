/* Problems that are the same but for their spelling, cut or layout have the same bits. */
#include "common.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define EVERY_ISA    for (int isa_index = 0; isa_index < test_isas; isa_index++)
#define ISA          (test_isa[isa_index])

static int64_t dim_v(const qkv_problem *p) { return p->head_dim_v > 0 ? p->head_dim_v : p->head_dim; }

/* Runs both on each instruction set and compares. */
static void same_everywhere(const qkv_problem *a, const qkv_problem *b, const char *what) {
  EVERY_ISA {
    test_run(ISA, a);
    test_run(ISA, b);
    test_same(a, b, "isa %s, %s", ISA, what);
  }
}

/* Data of its own, contiguous, for each of q, k, v. */
typedef struct own_data {
  qkv_tensor q, k, v;
} own_data;
static own_data copy_data(const qkv_problem *p) {
  own_data d = {test_dense_copy(p, &p->q, 'q', p->num_heads, p->head_dim),
                test_dense_copy(p, &p->k, 'k', p->num_kv_heads, p->head_dim),
                test_dense_copy(p, &p->v, 'k', p->num_kv_heads, dim_v(p))};
  return d;
}
static void free_data(own_data *d) {
  free(d->q.data);
  free(d->k.data);
  free(d->v.data);
}
static void use_data(qkv_problem *p, const own_data *d) {
  p->q = d->q;
  p->k = d->k;
  p->v = d->v;
}

static void map_values(const qkv_problem *p, const qkv_tensor *t, char side, int64_t heads, int64_t columns, double factor) {
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < (side == 'q' ? problem_rows(p, b) : problem_keys(p, b)); i++) {
        for (int64_t x = 0; x < columns; x++) {
          int64_t at = problem_offset(p, t, side, b, h, i, x);
          problem_store(t, at, factor * problem_load(t, at));
        }
      }
    }
  }
}

/* Both, but b's out must be `factor` times a's. */
static void expect_scaled(const qkv_problem *a, qkv_problem *b, double factor, const char *what) {
  EVERY_ISA {
    test_run(ISA, a);
    test_run(ISA, b);
    map_values(b, &b->out, 'q', b->num_heads, dim_v(b), 1 / factor);
    test_same(a, b, "isa %s, %s", ISA, what);
  }
}

/* ---- Layout, batch, threads, forced paths -------------------------------------------------------------------------- */

static const char *const varied[] = {
    "f32 b2 h4/2 q130 k200 d33/20 causal lse seed:1",
    "f32 b3 h2/1 q70 k70 d16 window:20,3 softcap:5 lengths kvpos lse seed:2",
    "f32 b2 h3 q65 k513 d8/65 bias alibi sinks dense documents lse seed:3",
    "f64 b2 h2/1 q66 k130 d9/7 causal or:prefix:5 biasinf:h1 lse seed:4",
    "f32 b4 h2 q150 k900 d17 ragged causal tile lse seed:5",
    "f32 h8/1 q1 k1100 d64 causal lse seed:6",
    "f32 b2 h12/4 q3 k640 d32 start causal window:90,90 sinks:b lse seed:7",
    "f32 b2 h2 q67 k129 d24 standard causal bias alibi:b sinks lse seed:8",
    "f64 b2 h2 q20 k600 d5 standard dense or:causal lengths lse seed:9",
};

static void test_layouts(void **state) {
  (void)state;
  static const char *const layouts[] = {"bshd", "odd", "neg"};
  for (size_t n = 0; n < COUNT(varied); n++) {
    problem_case a;
    test_open(&a, 0, "%s", varied[n]);
    for (size_t l = 0; l < COUNT(layouts); l++) {
      problem_case b;
      test_open(&b, 0, "%s %s", varied[n], layouts[l]);
      char what[PROBLEM_TEXT_BYTES];
      snprintf(what, sizeof what, "%s %s", varied[n], layouts[l]);
      same_everywhere(&a.problem, &b.problem, what);
      problem_free(&b);
    }
    problem_free(&a);
  }
}

static void test_alone_forced_executors(void **state) {
  (void)state;
  const prove_options options = {PROVE_FORWARD | PROVE_WAYS, NULL};
  for (size_t n = 0; n < COUNT(varied); n++) {
    problem_spec spec;
    prove_report report;
    assert_true(problem_parse(varied[n], &spec, NULL, 0));
    if (!prove_problem(&spec, &options, &report)) {
      fail_msg("%s: %s", varied[n], report.text);
    }
  }
}

static void test_ragged_is_padded(void **state) {
  (void)state;
  static const char *const options[] = {"causal", "window:30,5 sinks alibi", "softcap:3 documents kvpos", "causal standard"};
  for (size_t n = 0; n < COUNT(options); n++) {
    /* A ragged batch, and the same rows in a rectangle with lengths. */
    problem_case ragged;
    test_open(&ragged, 0, "f32 b4 h4/2 q300 k400 d12/7 ragged %s lse seed:%d", options[n], (int)n + 20);
    qkv_problem *p = &ragged.problem;
    int64_t rows = 0, keys = 0;
    int32_t q_length[4], kv_length[4];
    for (int64_t b = 0; b < 4; b++) {
      q_length[b] = (int32_t)problem_rows(p, b);
      kv_length[b] = (int32_t)problem_keys(p, b);
      rows = q_length[b] > rows ? q_length[b] : rows;
      keys = kv_length[b] > keys ? kv_length[b] : keys;
    }
    rows += 3;
    keys += 5;
    test_copy padded;
    qkv_problem shape = *p;
    shape.cu_seqlens_q = shape.cu_seqlens_kv = NULL;
    shape.seqlen_q = rows;
    shape.seqlen_kv = keys;
    shape.q_length = q_length;
    shape.kv_length = kv_length;
    test_copy_make(&padded, &shape);
    int64_t dv = dim_v(p);
    float *q = test_alloc((size_t)(4 * 4 * rows * p->head_dim) * 4),
          *k = test_alloc((size_t)(4 * 2 * keys * p->head_dim) * 4);
    float *v = test_alloc((size_t)(4 * 2 * keys * dv) * 4);
    padded.p.q = qkv_bhsd(q, QKV_F32, 4, rows, p->head_dim);
    padded.p.k = qkv_bhsd(k, QKV_F32, 2, keys, p->head_dim);
    padded.p.v = qkv_bhsd(v, QKV_F32, 2, keys, dv);
    /* Documents of `ragged` have room for its largest entry only. */
    int32_t *ids = NULL;
    qkv_mask mask[2];
    if (p->mask_count == 1 && p->mask[0].kind == QKV_MASK_DOCUMENT) {
      ids = test_alloc((size_t)(4 * keys) * 4);
      for (int64_t b = 0; b < 4; b++) {
        for (int64_t j = 0; j < kv_length[b]; j++) {
          ids[b * keys + j] = ((const int32_t *)p->mask[0].t.data)[b * p->mask[0].t.stride[0] + j];
        }
      }
      mask[0] = qkv_documents(qkv_strided(ids, QKV_I32, keys, 0, 0, 1));
      padded.p.mask = mask;
    }
    for (int64_t b = 0; b < 4; b++) {
      for (int64_t h = 0; h < 4; h++) {
        for (int64_t i = 0; i < q_length[b]; i++) {
          for (int64_t x = 0; x < p->head_dim; x++) {
            problem_store(&padded.p.q, problem_offset(&padded.p, &padded.p.q, 'q', b, h, i, x),
                          problem_load(&p->q, problem_offset(p, &p->q, 'q', b, h, i, x)));
          }
        }
        for (int64_t j = 0; j < kv_length[b] && h < 2; j++) {
          for (int64_t x = 0; x < p->head_dim; x++) {
            problem_store(&padded.p.k, problem_offset(&padded.p, &padded.p.k, 'k', b, h, j, x),
                          problem_load(&p->k, problem_offset(p, &p->k, 'k', b, h, j, x)));
          }
          for (int64_t x = 0; x < dv; x++) {
            problem_store(&padded.p.v, problem_offset(&padded.p, &padded.p.v, 'k', b, h, j, x),
                          problem_load(&p->v, problem_offset(p, &p->v, 'k', b, h, j, x)));
          }
        }
      }
    }
    EVERY_ISA {
      test_run(ISA, p);
      test_run(ISA, &padded.p);
      test_same(p, &padded.p, "isa %s, ragged and padded, %s", ISA, options[n]); /* the rows of `p` */
      for (int64_t b = 0; b < 4; b++) {
        for (int64_t i = q_length[b]; i < rows; i++) {
          double lse = problem_load(&padded.p.lse, problem_offset(&padded.p, &padded.p.lse, 'q', b, 1, i, 0));
          assert_true(isinf(lse) && lse < 0);
          for (int64_t x = 0; x < dv; x++) {
            double value = problem_load(&padded.p.out, problem_offset(&padded.p, &padded.p.out, 'q', b, 1, i, x));
            assert_true(!(value < 0 || value > 0) && !isnan(value));
          }
        }
      }
    }
    free(q);
    free(k);
    free(v);
    free(ids);
    test_copy_free(&padded);
    problem_free(&ragged);
  }
}

/* Rows [first, last) of a problem of one length per entry, with explicit positions. `positions` has room for the batch. */
static qkv_problem rows_of(const qkv_problem *p, int64_t first, int64_t last, int32_t *positions) {
  qkv_problem part = *p;
  for (int64_t b = 0; b < p->batch; b++) {
    positions[b] = (int32_t)(oracle_query_position(p, b, first, p->align));
  }
  part.align = QKV_ALIGN_EXPLICIT;
  part.q_position = positions;
  part.seqlen_q = last - first;
  const problem_dtype *d = problem_dtype_of(p->q.dtype);
  part.q.data = (char *)p->q.data + first * p->q.stride[2] * (int64_t)d->size;
  part.out.data = (char *)p->out.data + first * p->out.stride[2] * (int64_t)d->size;
  part.lse.data = (char *)p->lse.data + first * p->lse.stride[2] * (int64_t)d->size;
  if (p->bias.data != NULL) {
    part.bias.data = (char *)p->bias.data + first * p->bias.stride[2] * (int64_t)d->size;
  }
  return part;
}

static void test_chunks(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 b2 h4/2 q150 k150 d20/9 causal lse seed:1",
      "f32 h8/1 q200 k700 d16 causal window:600,0 sinks alibi softcap:4 lse seed:2",
      "f32 b2 h2 q140 k140 d8 kvpos causal bias tile documents lse seed:3",
      "f64 h4/2 q130 k600 d5/3 causal or:prefix:7 lse seed:4",
      "f32 h2 q100 k90 d8 causal standard lse seed:5",
  };
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    EVERY_ISA {
      test_copy parts;
      test_copy_make(&parts, &c.problem);
      test_run(ISA, &c.problem);
      for (int round = 0; round < 4; round++) {
        int64_t rows = c.problem.seqlen_q;
        rng r = {n, (uint64_t)round, 0};
        memset(parts.out, 0xff,
               (size_t)(c.problem.batch * c.problem.num_heads * rows * dim_v(&c.problem)) *
                   problem_dtype_of(c.spec.dtype)->size);
        for (int64_t first = 0; first < rows;) {
          /* One by one, all at once, and cuts anywhere. */
          int64_t step = round == 0   ? 1
                         : round == 1 ? 64
                                      : rng_range(&r, 1, 90),
                  last = first + step < rows ? first + step : rows;
          int32_t positions[4];
          qkv_problem part = rows_of(&parts.p, first, last, positions);
          test_run(ISA, &part);
          first = last;
        }
        test_same(&c.problem, &parts.p, "isa %s, chunks round %d of %s", ISA, round, texts[n]);
      }
      test_copy_free(&parts);
    }
    problem_free(&c);
  }
}

static void test_decode_with_a_growing_cache(void **state) {
  (void)state;
  /* Queries end with the keys: one new query with the first i + 1 keys is row i of the whole. */
  problem_case c;
  test_open(&c, 0, "f32 b2 h4/2 q140 k140 d16/10 causal window:100,0 lse seed:6");
  EVERY_ISA {
    test_copy parts;
    test_copy_make(&parts, &c.problem);
    test_run(ISA, &c.problem);
    for (int64_t i = 0; i < 140; i++) {
      qkv_problem part = parts.p;
      int32_t length[2] = {(int32_t)i + 1, (int32_t)i + 1};
      part.seqlen_q = 1;
      part.kv_length = length;
      part.q.data = (float *)part.q.data + i * part.q.stride[2];
      part.out.data = (float *)part.out.data + i * part.out.stride[2];
      part.lse.data = (float *)part.lse.data + i * part.lse.stride[2];
      test_run(ISA, &part);
    }
    test_same(&c.problem, &parts.p, "isa %s, decode step by step", ISA);
    test_copy_free(&parts);
  }
  problem_free(&c);
}

/* ---- Spellings of a mask ------------------------------------------------------------------------------------------- */

static int32_t oracle_callback(void *user, const qkv_tile *t, uint64_t *bits) {
  for (int64_t k = 0; k < t->keys; k++) {
    for (int64_t r = 0; r < t->rows; r++) {
      bits[k] |= (uint64_t)oracle_visible(user, t->batch, t->head, t->row + r, t->key + k) << r;
    }
  }
  return QKV_TILE_SOME;
}

static void test_mask_spellings(void **state) {
  (void)state;
  static const char *const masks[] = {"causal",
                                      "causal_start",
                                      "window:70,0",
                                      "window:5,9",
                                      "window:0,0",
                                      "window:-1,3",
                                      "prefix:70",
                                      "documents",
                                      "documents2",
                                      "dense:30",
                                      "tile",
                                      "causal window:64,64 or:prefix:3",
                                      "causal documents or:window:10,10 or:prefix:2",
                                      "dense tile or:causal",
                                      "causal start kvpos",
                                      "causal lengths",
                                      "window:100,20 pos kvpos lengths",
                                      "prefix:600 kvpos",
                                      "documents lengths kvpos",
                                      "documents2 pos",
                                      "q70 causal"};
  for (size_t n = 0; n < COUNT(masks); n++) {
    problem_case c;
    test_open(&c, 0, "f32 b2 h2 q200 k333 d6/5 lse seed:%d %s", (int)n, masks[n]);
    qkv_problem *p = &c.problem;
    size_t pairs = (size_t)(2 * 2 * p->seqlen_q * p->seqlen_kv), at = 0;
    uint8_t *bytes = test_alloc(pairs);
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t h = 0; h < 2; h++) {
        for (int64_t i = 0; i < p->seqlen_q; i++) {
          for (int64_t j = 0; j < p->seqlen_kv; j++) {
            bytes[at++] = oracle_visible(p, b, h, i, j);
          }
        }
      }
    }
    qkv_mask dense = qkv_dense(qkv_bhsd(bytes, QKV_U8, 2, p->seqlen_q, p->seqlen_kv), 0),
             tile = qkv_tiles(oracle_callback, p);
    test_copy other;
    test_copy_make(&other, p);
    other.p.mask_count = 1;
    other.p.mask = &dense;
    same_everywhere(p, &other.p, masks[n]);
    other.p.mask = &tile;
    same_everywhere(p, &other.p, masks[n]);
    test_copy_free(&other);
    free(bytes);
    problem_free(&c);
  }
}

static void test_bias_zero_and_sink_infinity_are_none(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b2 h4/2 q70 k200 d16 causal lse seed:2");
  test_copy other;
  test_copy_make(&other, &c.problem);
  const float zeros[4] = {0}, sinks[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  other.p.bias = qkv_strided(zeros, QKV_F32, 0, 0, 0, 0);
  same_everywhere(&c.problem, &other.p, "bias 0");
  other.p.bias.data = NULL;
  other.p.sinks = qkv_per_head(sinks, QKV_F32);
  same_everywhere(&c.problem, &other.p, "sink -inf");
  other.p.alibi_slopes = qkv_per_head(zeros, QKV_F32);
  same_everywhere(&c.problem, &other.p, "slope 0");
  test_copy_free(&other);
  problem_free(&c);
}

/* A bias of -inf and a mask are the same. */
static void test_infinite_bias_is_a_mask(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 h2 q130 k200 d8 biasinf lse seed:4");
  qkv_problem *p = &c.problem;
  uint8_t *bytes = test_alloc(2 * 130 * 200);
  float *bias = test_alloc(2 * 130 * 200 * sizeof(float));
  for (int64_t x = 0; x < 2 * 130 * 200; x++) {
    bias[x] = ((const float *)p->bias.data)[x];
    bytes[x] = !isinf(bias[x]);
    bias[x] = isinf(bias[x]) ? 1 : bias[x];
  }
  qkv_mask mask = qkv_dense(qkv_bhsd(bytes, QKV_U8, 2, 130, 200), 0);
  test_copy other;
  test_copy_make(&other, p);
  other.p.bias.data = bias;
  other.p.mask = &mask;
  other.p.mask_count = 1;
  same_everywhere(p, &other.p, "bias -inf");
  test_copy_free(&other);
  free(bytes);
  free(bias);
  problem_free(&c);
}

/* ---- Invisible keys ------------------------------------------------------------------------------------------------ */

static void test_invisible_keys(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k%d d12/9 causal lse seed:3",
                                      "f64 b2 h2 q40 k%d d5 window:90,4 sinks lse seed:4",
                                      "f32 b2 h4/2 q9 k%d d12/9 prefix:800 standard lse seed:5"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    enum { KEYS = 300, MORE = 200 };
    char text[PROBLEM_TEXT_BYTES];
    snprintf(text, sizeof text, texts[n], KEYS + MORE);
    problem_case c;
    test_open(&c, 0, "%s", text);
    qkv_problem *p = &c.problem;
    const int32_t length[2] = {KEYS, KEYS};
    size_t size = problem_dtype_of(c.spec.dtype)->size;
    /* The first 300 keys alone, and as the beginning of 500 of which kv_length hides the rest, NaN or not. */
    test_copy few, many;
    test_copy_make(&few, p);
    few.p.seqlen_kv = KEYS;
    test_copy_make(&many, p);
    many.p.kv_length = length;
    same_everywhere(&few.p, &many.p, "keys appended");
    own_data data = copy_data(p);
    use_data(&many.p, &data);
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t h = 0; h < p->num_kv_heads; h++) {
        memset((char *)data.k.data + (size_t)problem_offset(p, &data.k, 'k', b, h, KEYS, 0) * size, 0xff,
               MORE * (size_t)p->head_dim * size);
        memset((char *)data.v.data + (size_t)problem_offset(p, &data.v, 'k', b, h, KEYS, 0) * size, 0xff,
               MORE * (size_t)dim_v(p) * size);
      }
    }
    same_everywhere(&few.p, &many.p, "keys appended, NaN");
    free_data(&data);
    test_copy_free(&few);
    test_copy_free(&many);
    problem_free(&c);
  }
}

static void test_keys_in_front(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k812 d12/9 causal lse seed:3",
                                      "f64 b2 h2 q40 k812 d5 window:90,4 sinks alibi lse seed:4",
                                      "f32 b2 h2 q30 k812 d8 causal window:250,0 standard lse seed:5"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    qkv_problem *p = &c.problem;
    /* 512 keys of NaN and then 300: hidden by kv_begin, by a mask with the positions shifted, or not there at all. */
    const int32_t begin[2] = {512, 512}, position[2] = {1024 + 77, 1024 + 77}, before[2] = {512 + 77, 512 + 77};
    size_t size = problem_dtype_of(c.spec.dtype)->size;
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t h = 0; h < p->num_kv_heads; h++) {
        memset((char *)p->k.data + (size_t)problem_offset(p, &p->k, 'k', b, h, 0, 0) * size, 0xff,
               512 * (size_t)p->head_dim * size);
        memset((char *)p->v.data + (size_t)problem_offset(p, &p->v, 'k', b, h, 0, 0) * size, 0xff,
               512 * (size_t)dim_v(p) * size);
      }
    }
    test_copy without, with_begin, with_mask;
    test_copy_make(&without, p);
    without.p.seqlen_kv = 300;
    without.p.kv_position = position;
    without.p.k.data = (char *)p->k.data + 512 * (size_t)p->head_dim * size;
    without.p.v.data = (char *)p->v.data + 512 * (size_t)dim_v(p) * size;
    test_copy_make(&with_begin, p);
    with_begin.p.kv_begin = begin;
    with_begin.p.kv_position = position;
    same_everywhere(&without.p, &with_begin.p, "512 keys in front, kv_begin");
    uint8_t bytes[512] = {0}, all[812];
    memset(all, 1, sizeof all);
    memcpy(all, bytes, sizeof bytes);
    qkv_mask mask[4];
    memcpy(mask, p->mask, (size_t)p->mask_count * sizeof mask[0]);
    mask[p->mask_count] = qkv_dense(qkv_strided(all, QKV_U8, 0, 0, 0, 1), 0);
    test_copy_make(&with_mask, p);
    with_mask.p.mask = mask;
    with_mask.p.mask_count = p->mask_count + 1;
    with_mask.p.kv_position = before;
    same_everywhere(&without.p, &with_mask.p, "512 keys in front, masked");
    test_copy_free(&without);
    test_copy_free(&with_begin);
    test_copy_free(&with_mask);
    problem_free(&c);
  }
}

static void test_nan_in_invisible_slots(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 b2 h4/2 q70 k300 d12/9 causal lse seed:3",      "f32 h2 q130 k130 d33 window:9,0 odd lse seed:4",
      "f64 b2 h2 q40 k200 d5 dense biasinf lse seed:5",    "f32 b3 h2 q100 k200 d16 ragged lengths causal lse seed:6",
      "f32 h2 q90 k200 d16 tile bias standard lse seed:7", "f32 h4/1 q3 k700 d40 window:20,0 or:prefix:2 lse seed:8"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_case plain, poisoned;
    test_open(&plain, 0, "%s", texts[n]);
    test_open(&poisoned, PROBLEM_GUARD_END, "%s nan", texts[n]);
    same_everywhere(&plain.problem, &poisoned.problem, texts[n]);
    problem_free(&plain);
    problem_free(&poisoned);
  }
}

/* ---- Heads, columns, powers of two --------------------------------------------------------------------------------- */

static void test_grouped_is_multi_head(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h6/1 q70 k200 d12/9 causal lse seed:1", "f32 b2 h8/1 q1 k1200 d16 lse seed:2",
                                      "f32 h5/1 q3 k300 d16 standard lse seed:3"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    test_copy multi;
    test_copy_make(&multi, &c.problem);
    multi.p.num_kv_heads = c.problem.num_heads;
    multi.p.k.stride[1] = multi.p.v.stride[1] = 0;
    same_everywhere(&c.problem, &multi.p, texts[n]);
    test_copy_free(&multi);
    problem_free(&c);
  }
}

static void test_powers_of_two(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k600 d12/9 causal lse seed:1", "f64 h2 q9 k200 d17 sinks lse seed:2",
                                      "f32 h2 q70 k100 d17 softcap:2 bias standard lse seed:3"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s scale:0.25", texts[n]);
    qkv_problem *p = &c.problem;
    test_copy other;
    test_copy_make(&other, p);
    own_data data = copy_data(p);
    use_data(&other.p, &data);
    map_values(p, &data.v, 'k', p->num_kv_heads, dim_v(p), 0x1p20);
    expect_scaled(p, &other.p, 0x1p20, "v x 2^20");
    map_values(p, &data.v, 'k', p->num_kv_heads, dim_v(p), -0x1p-20);
    expect_scaled(p, &other.p, -1, "-v");
    map_values(p, &data.v, 'k', p->num_kv_heads, dim_v(p), -1);
    map_values(p, &data.q, 'q', p->num_heads, p->head_dim, 0x1p-7);
    other.p.softmax_scale = 32;
    same_everywhere(p, &other.p, "q x 2^-7, scale x 2^7");
    free_data(&data);
    test_copy_free(&other);
    problem_free(&c);
  }
}

static void test_head_dim_padded_with_zeros(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b2 h4/2 q70 k200 d20 scale:0.2 causal lse seed:1");
  qkv_problem *p = &c.problem;
  for (int64_t dim = 21; dim <= 68; dim += 11) {
    test_copy other;
    test_copy_make(&other, p);
    own_data data = {qkv_strided(test_alloc((size_t)(2 * 4 * 70 * dim) * 4), QKV_F32, 4 * 70 * dim, 70 * dim, dim, 1),
                     qkv_strided(test_alloc((size_t)(2 * 2 * 200 * dim) * 4), QKV_F32, 2 * 200 * dim, 200 * dim, dim, 1),
                     p->v};
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t h = 0; h < 4; h++) {
        for (int64_t x = 0; x < 20; x++) {
          for (int64_t i = 0; i < 70; i++) {
            problem_store(&data.q, problem_offset(p, &data.q, 'q', b, h, i, x),
                          problem_load(&p->q, problem_offset(p, &p->q, 'q', b, h, i, x)));
          }
          for (int64_t j = 0; j < 200; j++) {
            problem_store(&data.k, problem_offset(p, &data.k, 'k', b, h / 2, j, x),
                          problem_load(&p->k, problem_offset(p, &p->k, 'k', b, h / 2, j, x)));
          }
        }
      }
    }
    use_data(&other.p, &data);
    other.p.head_dim = dim;
    same_everywhere(p, &other.p, "zero-padded head_dim");
    free(data.q.data);
    free(data.k.data);
    test_copy_free(&other);
  }
  problem_free(&c);
}

static void test_columns_of_v(void **state) {
  (void)state;
  /* Backwards by a negative stride, and one by one. */
  problem_case c;
  test_open(&c, 0, "f32 b2 h4/2 q70 k200 d12/37 causal lse seed:1");
  qkv_problem *p = &c.problem;
  test_copy other;
  test_copy_make(&other, p);
  other.p.v.data = (float *)p->v.data + 36;
  other.p.v.stride[3] = -1;
  qkv_tensor out = other.p.out;
  EVERY_ISA {
    test_run(ISA, p);
    test_run(ISA, &other.p);
    qkv_problem mirrored = other.p;
    mirrored.out.data = (float *)out.data + 36;
    mirrored.out.stride[3] = -1;
    test_same(p, &mirrored, "isa %s, columns reversed", ISA);
  }
  other.p.head_dim_v = 1;
  other.p.v = p->v;
  EVERY_ISA {
    test_run(ISA, p);
    for (int64_t x = 0; x < 37; x++) {
      other.p.v.data = (float *)p->v.data + x;
      other.p.out.data = (float *)out.data + x;
      test_run(ISA, &other.p);
    }
    qkv_problem whole = other.p;
    whole.head_dim_v = 37;
    whole.out = out;
    test_same(p, &whole, "isa %s, columns alone", ISA);
  }
  test_copy_free(&other);
  problem_free(&c);
}

/* ---- States -------------------------------------------------------------------------------------------------------- */

enum { MAX_PARTS = 12, MAX_BATCH = 4 };

/* A problem of some of the keys: those at positions [from, to) of every entry. */
typedef struct part {
  qkv_problem p;
  int32_t begin[MAX_BATCH], end[MAX_BATCH], kv_position[MAX_BATCH], q_position[MAX_BATCH];
  qkv_state state;
  void *memory;
} part;

static void part_make(part *to, const qkv_problem *p, int64_t from, int64_t end) {
  to->p = *p;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t begin = p->kv_begin != NULL ? p->kv_begin[b] : 0,
            length = p->kv_length != NULL ? p->kv_length[b] : problem_keys(p, b);
    int64_t first = oracle_key_position(p, b, begin), last = first + length - begin;
    int64_t a = from > first ? from : first, z = end < last ? end : last;
    a = a < last ? a : last;
    z = z > a ? z : a;
    to->begin[b] = (int32_t)(begin + a - first);
    to->end[b] = (int32_t)(begin + z - first);
    to->kv_position[b] = (int32_t)a;
    to->q_position[b] = (int32_t)oracle_query_position(p, b, 0, p->align);
  }
  to->p.kv_begin = to->begin;
  to->p.kv_length = to->end;
  to->p.kv_position = to->kv_position;
  to->p.q_position = to->q_position;
  to->p.align = QKV_ALIGN_EXPLICIT;
}

static void state_make(part *to, const qkv_problem *p, int64_t capacity) {
  size_t bytes = 0;
  int64_t nodes = 0;
  assert_int_equal(qkv_state_bytes(p, capacity, &nodes, &bytes), QKV_OK);
  to->memory = test_alloc(bytes + 8);
  memset(to->memory, 0xff, bytes);
  assert_int_equal(qkv_state_init(p, capacity, to->memory, bytes, &to->state), QKV_OK);
  assert_true(to->state.capacity >= (capacity > 0 ? capacity : nodes));
}

static void part_run(part *to, const char *isa, int flags) {
  executor e = executor_make(EXECUTOR_SHUFFLED, 3, 5);
  qkv_context c = executor_context(&e);
  c.isa_cap = isa;
  c.flags = (uint32_t)flags;
  assert_int_equal(qkv_partial(&c, &to->p, &to->state, NULL, 0), QKV_OK);
}

static const char *const cut_texts[] = {
    "f32 h4/2 q20 k2600 d8/5 lse seed:1",
    "f32 b2 h2 q70 k2100 d6 kvpos causal sinks alibi lse seed:2",
    "f32 b3 h2/1 q1 k3000 d16 kvpos lengths window:1700,100 lse seed:3",
    "f64 h2 q66 k1600 d5/7 causal dense bias softcap:3 lse seed:4",
    "f32 b2 h2 q40 k1700 d8 documents2 or:prefix:40 lse seed:5",
    "f32 b3 h2 q90 k4000 d8 ragged causal lse seed:6",
    "f32 h2 q5 k2000 d8 big lse seed:7",
};

static void test_states_merge_to_one_call(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(cut_texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s", cut_texts[n]);
    qkv_problem *p = &c.problem;
    int64_t last = 0;
    for (int64_t b = 0; b < p->batch; b++) {
      int64_t end = oracle_key_position(p, b, problem_keys(p, b));
      last = end > last ? end : last;
    }
    int64_t splits = (last + 511) / 512;
    EVERY_ISA {
      for (int round = 0; round < 6; round++) {
        rng r = {n * 16 + (uint64_t)round, 1, 0};
        part *parts = test_alloc(MAX_PARTS * sizeof *parts);
        int64_t cuts[MAX_PARTS + 1], count = rng_range(&r, 1, splits < MAX_PARTS ? splits : MAX_PARTS - 1);
        cuts[0] = 0;
        for (int64_t k = 1; k < count; k++) {
          cuts[k] = 512 * (k + rng_range(&r, 0, (splits - count)) / count * 1);
          cuts[k] = cuts[k] > cuts[k - 1] ? cuts[k] : cuts[k - 1] + 512;
        }
        cuts[count] = INT32_MAX;
        for (int64_t k = 0; k < count; k++) {
          part_make(&parts[k], p, cuts[k], cuts[k + 1]);
          state_make(&parts[k], p, 64);
          part_run(&parts[k], ISA, round % 2 == 0 ? 0 : QKV_FORCE_SPLIT);
        }
        /* Merge two random ones until one is left: neighbours or not. */
        int64_t left = count;
        while (left > 1) {
          int64_t into = rng_below(&r, left), from = rng_below(&r, left - 1);
          from += from >= into;
          qkv_context context = test_context(ISA);
          assert_int_equal(qkv_merge(&context, &parts[into].state, &parts[from].state), QKV_OK);
          free(parts[from].memory);
          if (into == left - 1) {
            parts[from].state = parts[into].state; /* its state points into its memory, not into the struct */
            parts[from].memory = parts[into].memory;
          } else {
            parts[from].state = parts[left - 1].state;
            parts[from].memory = parts[left - 1].memory;
          }
          left--;
        }
        if (p->batch == 1) { /* the largest nodes that tile the whole range, ascending */
          int64_t nodes = 0;
          const qkv_state *s = &parts[0].state;
          assert_int_equal(qkv_state_bytes(p, 0, &nodes, NULL), QKV_OK);
          assert_int_equal(s->count, nodes);
          for (int64_t k = 0; k + 1 < s->count; k++) {
            assert_int_equal((s->nodes[k].index + 1) << s->nodes[k].level, s->nodes[k + 1].index << s->nodes[k + 1].level);
          }
        }
        test_copy merged;
        test_copy_make(&merged, p);
        qkv_context context = test_context(ISA);
        qkv_status status = qkv_finish(&context, &merged.p, &parts[0].state);
        assert_int_equal(status, QKV_OK);
        test_run(ISA, p);
        test_same(p, &merged.p, "isa %s, %d states of %s, round %d", ISA, (int)count, cut_texts[n], round);
        test_copy_free(&merged);
        free(parts[0].memory);
        free(parts);
      }
    }
    problem_free(&c);
  }
}

static void test_merge_with_empty(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b2 h2 q10 k1300 d8 causal lse seed:2");
  qkv_problem *p = &c.problem;
  EVERY_ISA {
    for (int order = 0; order < 3; order++) {
      part whole, nothing;
      part_make(&whole, p, 0, INT32_MAX);
      part_make(&nothing, p, 0, 0);
      state_make(&whole, p, 16);
      state_make(&nothing, p, 16);
      part_run(&whole, ISA, 0);
      if (order < 2) {
        part_run(&nothing, ISA, 0); /* no keys; in the third round no call at all: an initialised state is empty */
      }
      qkv_context context = test_context(ISA);
      qkv_state *into = order == 1 ? &nothing.state : &whole.state, *from = order == 1 ? &whole.state : &nothing.state;
      assert_int_equal(qkv_merge(&context, into, from), QKV_OK);
      test_copy merged;
      test_copy_make(&merged, p);
      assert_int_equal(qkv_finish(&context, &merged.p, into), QKV_OK);
      test_run(ISA, p);
      test_same(p, &merged.p, "isa %s, merge with empty %d", ISA, order);
      /* Finishing does not change a state. */
      memset(merged.out, 0xff, 2 * 2 * 10 * 8 * sizeof(float));
      assert_int_equal(qkv_finish(&context, &merged.p, into), QKV_OK);
      test_same(p, &merged.p, "isa %s, finished twice", ISA);
      test_copy_free(&merged);
      free(whole.memory);
      free(nothing.memory);
    }
  }
  problem_free(&c);
}

static void test_states_cut_elsewhere_are_accurate(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(cut_texts); n++) {
    problem_case c;
    test_open(&c, 0, "%s", cut_texts[n]);
    qkv_problem *p = &c.problem;
    const char *isa = test_isa[n % (size_t)test_isas];
    part parts[3];
    for (int k = 0; k < 3; k++) {
      static const int64_t cuts[] = {0, 700, 1333, INT32_MAX};
      part_make(&parts[k], p, cuts[k], cuts[k + 1]);
      state_make(&parts[k], p, 64);
      part_run(&parts[k], isa, 0);
    }
    qkv_context context = test_context(isa);
    assert_int_equal(qkv_merge(&context, &parts[2].state, &parts[0].state), QKV_OK);
    assert_int_equal(qkv_merge(&context, &parts[2].state, &parts[1].state), QKV_OK);
    problem_clear_outputs(&c);
    assert_int_equal(qkv_finish(&context, p, &parts[2].state), QKV_OK);
    test_accurate(p, "isa %s, cut at 700 and 1333: %s", isa, cut_texts[n]);
    for (int k = 0; k < 3; k++) {
      free(parts[k].memory);
    }
    problem_free(&c);
  }
}

/* A long window that begins in split 1 and spans more than three: the tree's lower nodes are empty. */
static void test_window_over_splits(void **state) {
  (void)state;
  const prove_options options = {PROVE_FORWARD | PROVE_WAYS, NULL};
  static const char *const texts[] = {"f32 h2/1 q33 k2700 d16 window:2000,0 lse seed:1",
                                      "f32 q3 k4200 d8 causal window:1900,0 kvpos lse seed:2",
                                      "f64 q2 k3600 d4 causal window:2900,0 lse seed:3"};
  for (size_t n = 0; n < COUNT(texts); n++) {
    problem_spec spec;
    prove_report report;
    assert_true(problem_parse(texts[n], &spec, NULL, 0));
    if (!prove_problem(&spec, &options, &report)) {
      fail_msg("%s: %s", texts[n], report.text);
    }
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_layouts),
    cmocka_unit_test(test_alone_forced_executors),
    cmocka_unit_test(test_ragged_is_padded),
    cmocka_unit_test(test_chunks),
    cmocka_unit_test(test_decode_with_a_growing_cache),
    cmocka_unit_test(test_mask_spellings),
    cmocka_unit_test(test_bias_zero_and_sink_infinity_are_none),
    cmocka_unit_test(test_infinite_bias_is_a_mask),
    cmocka_unit_test(test_invisible_keys),
    cmocka_unit_test(test_keys_in_front),
    cmocka_unit_test(test_nan_in_invisible_slots),
    cmocka_unit_test(test_grouped_is_multi_head),
    cmocka_unit_test(test_powers_of_two),
    cmocka_unit_test(test_head_dim_padded_with_zeros),
    cmocka_unit_test(test_columns_of_v),
    cmocka_unit_test(test_states_merge_to_one_call),
    cmocka_unit_test(test_merge_with_empty),
    cmocka_unit_test(test_states_cut_elsewhere_are_accurate),
    cmocka_unit_test(test_window_over_splits),
};

TEST_MAIN(tests)

/* Dropout: which weights are kept, however a problem is cut or spelled, and what becomes of the others in the forward pass. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "gradients.h"

/* Counter, key and words of Random123's known answers for philox4x32-10. */
static const struct {
  uint32_t counter[4], key[2], words[4];
} known[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static void test_known_answers(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(known); n++) {
    uint32_t words[4];
    qkv__philox(known[n].counter, (uint64_t)known[n].key[1] << 32 | known[n].key[0], words);
    assert_memory_equal(words, known[n].words, sizeof words);
    oracle_philox(known[n].counter, known[n].key, words);
    assert_memory_equal(words, known[n].words, sizeof words);
  }
}

/* ---- The mask that a call uses ------------------------------------------------------------------------------------- */

/* One row for each key it has, equal scores, and v the unit matrix: column j of out is 0 where key j is dropped or hidden. */
static void make_transparent(const qkv_problem *p) {
  scale_values(p, &p->q, 'q', p->num_heads, p->head_dim, 0);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_kv_heads; h++) {
      for (int64_t j = 0; j < problem_keys(p, b); j++) {
        for (int64_t x = 0; x < value_dim(p); x++) {
          problem_store(&p->v, problem_offset(p, &p->v, 'k', b, h, j, x), x == j);
        }
      }
    }
  }
}

static int64_t queries(const qkv_problem *p, int64_t b) { return p->q_length != NULL ? p->q_length[b] : problem_rows(p, b); }
static bool has_key(const qkv_problem *p, int64_t b, int64_t j) {
  return j >= (p->kv_begin != NULL ? p->kv_begin[b] : 0) &&
         j < (p->kv_length != NULL ? p->kv_length[b] : problem_keys(p, b));
}

/* Extents of the widest entry. */
static void widest(const qkv_problem *p, int64_t *rows, int64_t *keys) {
  *rows = *keys = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    *rows = problem_rows(p, b) > *rows ? problem_rows(p, b) : *rows;
    *keys = problem_keys(p, b) > *keys ? problem_keys(p, b) : *keys;
  }
}

/* What QKV_KEPT says of everything, contiguous; free(t.data). */
static qkv_tensor kept_of(const char *isa, const qkv_problem *p) {
  int64_t rows, keys;
  widest(p, &rows, &keys);
  const qkv_context c = test_context(isa);
  qkv_tensor t =
      qkv_bhsd(test_alloc((size_t)(p->batch * p->num_heads * rows * keys) * 4), QKV_F32, p->num_heads, rows, keys);
  assert_int_equal(qkv_scores(&c, p, QKV_KEPT, NULL, &t), QKV_OK);
  return t;
}
static bool kept_at(const qkv_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const float value = ((const float *)t->data)[b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + j];
  assert_true(value == 0 || value == 1);
  return value == 1;
}

/* The mask by QKV_KEPT, by what out shows on each instruction set, and by the oracle are the same. p is transparent. */
static void expect_masks(const qkv_problem *p, const char *what) {
  int64_t rows, keys;
  widest(p, &rows, &keys);
  qkv_tensor kept = kept_of(NULL, p);
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < keys; j++) {
          const bool exists = i < queries(p, b) && has_key(p, b, j);
          if (kept_at(&kept, b, h, i, j) != (exists && oracle_kept(p, b, h, i, j))) {
            fail_msg("%s: QKV_KEPT of entry %d head %d row %d key %d", what, (int)b, (int)h, (int)i, (int)j);
          }
        }
      }
    }
  }
  EVERY_ISA {
    test_run(ISA, p);
    for (int64_t b = 0; b < p->batch; b++) {
      for (int64_t h = 0; h < p->num_heads; h++) {
        for (int64_t i = 0; i < problem_rows(p, b); i++) {
          for (int64_t j = 0; j < problem_keys(p, b); j++) {
            const double out = problem_load(&p->out, problem_offset(p, &p->out, 'q', b, h, i, j));
            const bool sees = i < queries(p, b) && has_key(p, b, j) && oracle_sees(p, b, h, i, j);
            if ((out > 0) != (sees && kept_at(&kept, b, h, i, j)) || out < 0) {
              fail_msg("isa %s, %s: entry %d head %d row %d key %d, out %g", ISA, what, (int)b, (int)h, (int)i, (int)j, out);
            }
          }
        }
      }
    }
  }
  free(kept.data);
}

static void test_masks(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 b2 h4/2 q70 k150 d3/150 dropout:0.4 seed:1",
      "f32 b2 h4/2 q70 k150 d3/150 causal dropout:0.5 bshd origin seed:2",
      "f64 b2 h3/1 q67 k130 d2/130 causal dropout:0.3 odd kvpos origin seed:3",
      "f32 b3 h2 q90 k140 d4/140 tile lengths kvpos dropout:0.2 neg seed:4",
      "f32 b4 h4/1 q200 k160 d2/160 ragged causal or:tile kvpos dropout:0.6 seed:5",
      "f64 b3 h1 q40 k99 d2/99 tile pos kvpos dropout:0.7 seed:6",
      "f32 b2 h5/1 q7 k131 d2/131 window:60,9 alibi sinks start kvpos dropout:0.5 seed:7",
      "f32 b2 h2 q66 k131 d2/131 biasinf dense dropout:0.1 seed:8",
      "f32 b2 h4/2 q50 k150 d3/150 causal standard kvpos dropout:0.4 seed:9",
      "f64 b2 h2 q50 k100 d3/100 tile lengths standard dropout:0.4 seed:10",
      "bf16 b2 h2 q70 k90 d8/90 causal lengths dropout:0.5 seed:11",
      "f32 h8/1 q1 k190 d2/190 causal pos kvpos dropout:0.9 seed:12",
      "f32 b2 h2 q70 k90 d8/90 lengths kvpos seed:13", /* no dropout: all are kept */
      "f32 b2 h2 q70 k90 d8/90 causal dropout:1 seed:14",
  };
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    make_transparent(&c.problem);
    expect_masks(&c.problem, texts[n]);
    problem_free(&c);
  }
}

/* A word decides exactly: dropout at the word, and half a step above, keeps; a step of 2^-32 above drops. Counters and keys are
 * those of the known answers, as far as positions reach. */
static void test_words(void **state) {
  (void)state;
  enum { KEYS = 6 };
  const uint32_t first[] = {0, 0x1fffffff - KEYS, 0x043f6a88};
  for (size_t n = 0; n < COUNT(known); n++) {
    for (int32_t unaligned = 0; unaligned < 4; unaligned++) {
      problem_case c;
      test_open(&c, 0, "f32 b1 h1 q1 k%d d1/%d lse", KEYS, KEYS);
      qkv_problem *p = &c.problem;
      const int32_t kv_position = (int32_t)(4 * first[n]) + unaligned, q_position = (int32_t)known[n].counter[1];
      p->align = QKV_ALIGN_EXPLICIT;
      p->kv_position = &kv_position;
      p->q_position = &q_position;
      p->batch_origin = known[n].counter[2];
      p->heads_total = 1;
      p->offset = known[n].counter[3];
      p->seed = (uint64_t)known[n].key[1] << 32 | known[n].key[0];
      make_transparent(p);
      for (int32_t j = 0; j < KEYS; j++) {
        const uint32_t position = (uint32_t)(kv_position + j);
        const uint32_t counter[4] = {position >> 2, known[n].counter[1], known[n].counter[2], known[n].counter[3]};
        uint32_t words[4];
        oracle_philox(counter, known[n].key, words);
        const double at = words[position & 3] * 0x1p-32;
        for (int halves = 0; halves <= 2; halves++) {
          p->dropout = at + halves * 0x1p-33;
          qkv_tensor kept = kept_of(NULL, p);
          assert_int_equal(kept_at(&kept, 0, 0, 0, j), halves < 2);
          free(kept.data);
          EVERY_ISA {
            test_run(ISA, p);
            assert_int_equal(((const float *)p->out.data)[j] > 0, halves < 2);
          }
        }
      }
      problem_free(&c);
    }
  }
}

/* Seed and offset: all 64 bits of the one, 32 of the other. */
static void test_seed_and_offset(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b1 h1 q40 k70 d1 dropout:0.5 seed:3");
  qkv_problem p = c.problem;
  const size_t bytes = 40 * 70 * 4;
  qkv_tensor base = kept_of(NULL, &p), other;
  p.offset += (uint64_t)1 << 32;
  other = kept_of(NULL, &p);
  assert_memory_equal(base.data, other.data, bytes);
  free(other.data);
  const struct {
    uint64_t seed, offset;
  } changed[] = {{c.problem.seed ^ 1, c.problem.offset},
                 {c.problem.seed ^ (uint64_t)1 << 63, c.problem.offset},
                 {c.problem.seed, c.problem.offset + 1}};
  for (size_t n = 0; n < COUNT(changed); n++) {
    p.seed = changed[n].seed;
    p.offset = changed[n].offset;
    other = kept_of(NULL, &p);
    assert_memory_not_equal(base.data, other.data, bytes);
    free(other.data);
  }
  free(base.data);
  problem_free(&c);
}

/* QKV_KEPT of a region, in f64 too. */
static void test_kept_of_a_region(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f64 b3 h4 q9 k70 d1 lengths causal dropout:0.5 seed:6");
  qkv_tensor all = kept_of(NULL, &c.problem);
  const qkv_region part = {1, 3, 2, 3, 4, 9};
  for (int wide = 0; wide < 2; wide++) {
    qkv_tensor t = qkv_bhsd(test_alloc(2 * 1 * 5 * 70 * 8), wide ? QKV_F64 : QKV_F32, 1, 5, 70);
    assert_int_equal(qkv_scores(NULL, &c.problem, QKV_KEPT, &part, &t), QKV_OK);
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t i = 0; i < 5; i++) {
        for (int64_t j = 0; j < 70; j++) {
          assert_true(problem_load(&t, (b * 5 + i) * 70 + j) == kept_at(&all, b + 1, 2, i + 4, j));
        }
      }
    }
    free(t.data);
  }
  free(all.data);
  problem_free(&c);
}

/* The share that is kept, and that of two neighbours by key, row and head that are both kept: five standard deviations. */
static void test_share(void **state) {
  (void)state;
  enum { H = 2, N = 256 };
  static const double rates[] = {0.1, 0.5, 0.9};
  for (size_t n = 0; n < COUNT(rates); n++) {
    problem_case c;
    test_open(&c, 0, "f32 b1 h%d q%d k%d d1 dropout:%g seed:%d", H, N, N, rates[n], (int)n);
    qkv_tensor kept = kept_of(NULL, &c.problem);
    int64_t one = 0, both[3] = {0, 0, 0};
    for (int64_t h = 0; h < H; h++) {
      for (int64_t i = 0; i < N; i++) {
        for (int64_t j = 0; j < N; j++) {
          const bool k = kept_at(&kept, 0, h, i, j);
          one += k;
          both[0] += j % 2 == 0 && k && kept_at(&kept, 0, h, i, j + 1);
          both[1] += i % 2 == 0 && k && kept_at(&kept, 0, h, i + 1, j);
          both[2] += h == 0 && k && kept_at(&kept, 0, 1, i, j);
        }
      }
    }
    const double keep = 1 - rates[n], count = (double)H * N * N;
    assert_true(fabs((double)one - count * keep) < 5 * sqrt(count * keep * (1 - keep)));
    for (int m = 0; m < 3; m++) {
      const double pairs = count / 2, pair = keep * keep;
      assert_true(fabs((double)both[m] - pairs * pair) < 5 * sqrt(pairs * pair * (1 - pair)));
    }
    free(kept.data);
    problem_free(&c);
  }
}

/* ---- Cuts: the same weights are kept, and the same bits come out ---------------------------------------------------- */

static const char *const varied[] = {
    "f32 b2 h4/2 q130 k200 d33/20 causal dropout:0.3 lse seed:1",
    "f32 b3 h2/1 q70 k70 d16 window:20,3 softcap:5 lengths kvpos dropout:0.5 origin lse seed:2",
    "f32 b2 h3 q65 k513 d8/65 bias alibi sinks dense documents dropout:0.1 lse seed:3",
    "f64 b2 h2/1 q66 k130 d9/7 causal or:prefix:5 biasinf:h1 kvpos dropout:0.7 lse seed:4",
    "f32 b4 h2 q150 k900 d17 ragged causal tile dropout:0.2 lse seed:5",
    "f32 h8/1 q1 k1100 d64 causal dropout:0.4 lse seed:6",
    "f32 b2 h2 q67 k129 d24 standard causal bias alibi:b sinks dropout:0.5 lse seed:7",
    "f64 b2 h2 q20 k600 d5 standard dense or:causal lengths dropout:0.3 lse seed:8",
    "f32 b2 h2/1 q70 k200 d8 causal visnan dropout:0.5 lse seed:9",
    "bf16 b2 h2 q70 k140 d20/36 causal lengths sinks dropout:0.25 lse seed:10",
    "f32 b2 h3/1 q40 k300 d8 tile lengths kvpos nan dropout:0.5 lse seed:11",
    "f64 b2 h12/4 q3 k640 d32 start causal window:90,90 sinks:b kvpos dropout:0.8 lse seed:12",
    "f32 b1 h2/1 q200 k260 d64/64 causal dropout:0.5 lse seed:13", /* fused where softmax runs beside products */
};

static void test_every_way(void **state) {
  (void)state;
  const prove_options options = {PROVE_FORWARD | PROVE_WAYS, NULL};
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    problem_spec spec;
    prove_report report;
    assert_true(problem_parse(varied[n], &spec, NULL, 0));
    if (!prove_problem(&spec, &options, &report)) {
      fail_msg("%s: %s", varied[n], report.text);
    }
  }
}

static void test_layouts(void **state) {
  (void)state;
  static const char *const layouts[] = {"bshd", "odd", "neg"};
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    problem_case a;
    test_open(&a, 0, "%s", varied[n]);
    if (a.spec.nan == PROBLEM_VISIBLE_NAN) { /* which slots are NaN depends on the layout */
      problem_free(&a);
      continue;
    }
    for (size_t l = 0; l < COUNT(layouts); l++) {
      problem_case b;
      test_open(&b, 0, "%s %s", varied[n], layouts[l]);
      EVERY_ISA {
        test_run(ISA, &a.problem);
        test_run(ISA, &b.problem);
        test_same(&a.problem, &b.problem, "isa %s, %s %s", ISA, varied[n], layouts[l]);
      }
      problem_free(&b);
    }
    problem_free(&a);
  }
}

/* A tensor from (entry, head, row) on. */
static qkv_tensor from(const qkv_tensor *t, int64_t b, int64_t h, int64_t i) {
  qkv_tensor to = *t;
  if (t->data != NULL) {
    to.data = (char *)t->data +
              (b * t->stride[0] + h * t->stride[1] + i * t->stride[2]) * (int64_t)problem_dtype_of(t->dtype)->size;
  }
  return to;
}

/* Entries 1 and 2 and query heads 2 to 5 of a batch of 4 x 8, which itself is a part of something. */
static void test_part_of_batch_and_heads(void **state) {
  (void)state;
  static const char *const words[] = {"f32 dropout:0.5", "f64 dropout:0.3 origin kvpos", "f32 standard dropout:0.6 origin"};
  for (size_t n = 0; n < COUNT(words); n++) {
    problem_case c;
    test_open(&c, 0, "b4 h8/4 q20 k90 d5/6 causal lse %s seed:%d", words[n], (int)n);
    const qkv_problem *p = &c.problem;
    test_copy part;
    qkv_problem shape = *p;
    shape.batch = 2;
    shape.num_heads = 4;
    shape.num_kv_heads = 2;
    shape.batch_origin = p->batch_origin + 1;
    shape.head_origin = p->head_origin + 2;
    shape.heads_total = p->heads_total != 0 ? p->heads_total : p->num_heads;
    shape.kv_position = p->kv_position != NULL ? p->kv_position + 1 : NULL;
    shape.q = from(&p->q, 1, 2, 0);
    shape.k = from(&p->k, 1, 1, 0);
    shape.v = from(&p->v, 1, 1, 0);
    test_copy_make(&part, &shape);
    qkv_problem view = *p; /* the same part of the whole's result */
    view.batch = 2;
    view.num_heads = 4;
    view.num_kv_heads = 2;
    view.out = from(&p->out, 1, 2, 0);
    view.lse = from(&p->lse, 1, 2, 0);
    EVERY_ISA {
      test_run(ISA, p);
      test_run(ISA, &part.p);
      test_same(&view, &part.p, "isa %s, part of %s", ISA, words[n]);
    }
    qkv_tensor kept = kept_of(NULL, p), kept_part = kept_of(NULL, &part.p);
    for (int64_t b = 0; b < 2; b++) {
      for (int64_t h = 0; h < 4; h++) {
        assert_memory_equal((const float *)kept.data + ((b + 1) * 8 + h + 2) * 20 * 90,
                            (const float *)kept_part.data + (b * 4 + h) * 20 * 90, 20 * 90 * 4);
      }
    }
    free(kept.data);
    free(kept_part.data);
    test_copy_free(&part);
    problem_free(&c);
  }
}

/* Row by row against all at once, with the keys up to the row only. */
static void test_decode(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 b2 h4/2 q90 k150 d17/9 causal kvpos dropout:0.4 lse seed:1",
      "f64 b2 h2 q70 k70 d5 causal window:40,0 dropout:0.5 origin lse seed:2",
      "f32 b2 h6/2 q66 k580 d8 causal sinks alibi dropout:0.2 lse seed:3",
  };
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    const qkv_problem *p = &c.problem;
    test_copy rows;
    test_copy_make(&rows, p);
    EVERY_ISA {
      test_run(ISA, p);
      for (int64_t i = 0; i < p->seqlen_q; i++) {
        int32_t q_position[2], kv_length[2];
        qkv_problem step = rows.p;
        step.seqlen_q = 1;
        step.q = from(&rows.p.q, 0, 0, i);
        step.out = from(&rows.p.out, 0, 0, i);
        step.lse = from(&rows.p.lse, 0, 0, i);
        step.align = QKV_ALIGN_EXPLICIT;
        step.q_position = q_position;
        step.kv_length = kv_length;
        for (int64_t b = 0; b < 2; b++) {
          q_position[b] = (int32_t)oracle_query_position(p, b, i, p->align);
          kv_length[b] = (int32_t)(p->seqlen_kv - p->seqlen_q + i + 1);
        }
        test_run(ISA, &step);
      }
      test_same(p, &rows.p, "isa %s, row by row, %s", ISA, texts[n]);
    }
    test_copy_free(&rows);
    problem_free(&c);
  }
}

/* ---- States -------------------------------------------------------------------------------------------------------- */

enum { PARTS = 3 };
static const int64_t cuts[PARTS + 1] = {0, 512, 1024, 1300};

typedef struct owned_state {
  qkv_state s;
  void *memory;
} owned_state;
static void state_make(owned_state *to, const qkv_problem *p) {
  size_t bytes;
  assert_int_equal(qkv_state_bytes(p, 2 * PARTS, NULL, &bytes), QKV_OK);
  to->memory = test_alloc(bytes);
  assert_int_equal(qkv_state_init(p, 2 * PARTS, to->memory, bytes, &to->s), QKV_OK);
}

/* Keys [cuts[n], cuts[n + 1]) of a problem whose queries have explicit positions. kv_position is kept. */
static qkv_problem part_of(const qkv_problem *p, int n, int32_t *kv_position) {
  qkv_problem part = *p;
  part.seqlen_kv = cuts[n + 1] - cuts[n];
  part.k = from(&p->k, 0, 0, cuts[n]);
  part.v = from(&p->v, 0, 0, cuts[n]);
  for (int64_t b = 0; b < p->batch; b++) {
    kv_position[b] = (int32_t)cuts[n];
  }
  part.kv_position = kv_position;
  return part;
}

/* The nodes of the scalar text; their m and l are those without dropout. */
static void expect_state(const qkv_state *s, const qkv_problem *part) {
  const qkv_context context = test_context("reference");
  const size_t size = s->dtype == QKV_F64 ? 8 : 4;
  const size_t values = (size_t)(s->rows * s->head_dim_v) * size, sums = (size_t)s->rows * 2 * size;
  for (int without = 0; without < 2; without++) {
    owned_state other;
    qkv_problem p = *part;
    if (without) {
      p.dropout = 0;
    }
    state_make(&other, &p);
    assert_int_equal(qkv_partial(&context, &p, &other.s, NULL, 0), QKV_OK);
    assert_int_equal(s->count, other.s.count);
    for (int64_t k = 0; k < s->count; k++) {
      const size_t at = (size_t)k * (values + sums) + (without ? values : 0), bytes = without ? sums : values + sums;
      assert_memory_equal((const char *)s->data + at, (const char *)other.s.data + at, bytes);
    }
    free(other.memory);
  }
}

static void test_states(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k1300 d8/12 causal sinks dropout:0.4 lse seed:1",
                                      "f64 b1 h2 q5 k1300 d4 alibi window:900,9 dropout:0.6 origin lse seed:2",
                                      "f32 b1 h2/1 q6 k1300 d4 dropout:1 lse seed:3"};
  static const int orders[][PARTS] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    problem_case c;
    test_open(&c, 0, "%s", texts[n]);
    qkv_problem *p = &c.problem;
    int32_t q_position[2], kv_position[2];
    for (int64_t b = 0; b < p->batch; b++) {
      q_position[b] = (int32_t)oracle_query_position(p, b, 0, p->align);
    }
    p->align = QKV_ALIGN_EXPLICIT;
    p->q_position = q_position;
    test_copy merged;
    test_copy_make(&merged, p);
    EVERY_ISA {
      const qkv_context context = test_context(ISA);
      test_run(ISA, p);
      for (size_t o = 0; o < COUNT(orders); o++) {
        owned_state into = {{0}, NULL};
        for (int m = 0; m < PARTS; m++) {
          const qkv_problem part = part_of(p, orders[o][m], kv_position);
          owned_state s;
          state_make(&s, &part);
          assert_int_equal(qkv_partial(&context, &part, &s.s, NULL, 0), QKV_OK);
          expect_state(&s.s, &part);
          if (m == 0) {
            into = s;
          } else {
            assert_int_equal(qkv_merge(&context, &into.s, &s.s), QKV_OK);
            free(s.memory);
          }
        }
        assert_int_equal(qkv_finish(&context, &merged.p, &into.s), QKV_OK);
        test_same(p, &merged.p, "isa %s, merged in order %d, %s", ISA, (int)o, texts[n]);
        free(into.memory);
      }
    }
    test_copy_free(&merged);
    problem_free(&c);
  }
}

/* ---- Values -------------------------------------------------------------------------------------------------------- */

/* Both results after a run each. */
static void expect_same_as(const qkv_problem *p, qkv_problem other, const char *what) {
  test_copy copy;
  test_copy_make(&copy, &other);
  EVERY_ISA {
    test_run(ISA, p);
    test_run(ISA, &copy.p);
    test_same(p, &copy.p, "isa %s, %s", ISA, what);
  }
  test_copy_free(&copy);
}

/* Without dropout, seed and offset mean nothing; nor does a probability below 2^-32 whose complement rounds to 1 drop anything. */
static void test_nothing_is_dropped(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    problem_case c;
    test_open(&c, 0, "%s", varied[n]);
    c.problem.dropout = 0;
    qkv_problem other = c.problem;
    other.seed = other.offset = 0;
    expect_same_as(&c.problem, other, varied[n]);
    other = c.problem;
    other.dropout = 0x1p-60;
    expect_same_as(&c.problem, other, varied[n]);
    problem_free(&c);
  }
}

/* FAST is the canonical arithmetic where there is dropout, and describe says so. */
static void test_fast(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "bf16 b2 h4/2 q90 k200 d32/40 causal sinks dropout:0.3 lse seed:1");
  qkv_problem fast = c.problem;
  fast.arithmetic = QKV_FAST;
  expect_same_as(&c.problem, fast, "FAST");
  char text[2048], value[64];
  assert_int_equal(qkv_describe(NULL, &fast, text, sizeof text), QKV_OK);
  assert_true(prove_fact(text, "arithmetic", value, sizeof value));
  assert_string_equal(value, "f32");
  problem_free(&c);
}

/* The log-sum-exp is that without dropout. out of probability 1 is +0 everywhere, and a row that keeps nothing gives +0 too. */
static void test_lse_and_zeros(void **state) {
  (void)state;
  static const double rates[] = {0.3, 0.9, 1};
  int64_t empty[COUNT(rates)] = {0};
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    for (size_t m = 0; m < COUNT(rates); m++) {
      problem_case c;
      test_open(&c, 0, "%s", varied[n]);
      qkv_problem *p = &c.problem;
      if (c.spec.nan == PROBLEM_VISIBLE_NAN && rates[m] < 1) { /* a NaN that is dropped stays one */
        problem_free(&c);
        continue;
      }
      p->dropout = rates[m];
      test_copy plain;
      test_copy_make(&plain, p);
      plain.p.dropout = 0;
      EVERY_ISA {
        test_run(ISA, p);
        test_run(ISA, &plain.p);
        for (int64_t b = 0; b < p->batch; b++) {
          for (int64_t h = 0; h < p->num_heads; h++) {
            for (int64_t i = 0; i < problem_rows(p, b); i++) {
              assert_true(compare_same_bits(&p->lse, problem_offset(p, &p->lse, 'q', b, h, i, 0), &plain.p.lse,
                                            problem_offset(&plain.p, &plain.p.lse, 'q', b, h, i, 0)));
              bool keeps = false;
              for (int64_t j = 0; i < queries(p, b) && j < problem_keys(p, b) && !keeps; j++) {
                keeps = has_key(p, b, j) && oracle_sees(p, b, h, i, j) && oracle_kept(p, b, h, i, j);
              }
              if (keeps) {
                continue;
              }
              empty[m]++;
              for (int64_t x = 0; x < value_dim(p); x++) {
                const double value = problem_load(&p->out, problem_offset(p, &p->out, 'q', b, h, i, x));
                if (value != 0 || signbit(value)) {
                  fail_msg("isa %s, %s, dropout %g: out[%d %d %d %d] is %g", ISA, varied[n], rates[m], (int)b, (int)h,
                           (int)i, (int)x, value);
                }
              }
            }
          }
        }
      }
      test_copy_free(&plain);
      problem_free(&c);
    }
  }
  for (size_t m = 0; m < COUNT(rates); m++) {
    assert_true(empty[m] > 0);
  }
}

/* A row that sees one key: v / keep, rounded once, or 0. */
static void test_one_key(void **state) {
  (void)state;
  static const double rates[] = {0.1, 0.5, 0.75, 0.9};
  for (size_t n = 0; n < COUNT(rates); n++) {
    problem_case c;
    test_open(&c, 0, "f32 b1 h4 q60 k60 d4/3 window:0,0 dropout:%.17g lse seed:%d", rates[n], (int)n);
    const qkv_problem *p = &c.problem;
    const float keep = (float)(1 - rates[n]);
    int kept = 0, dropped = 0;
    EVERY_ISA {
      test_run(ISA, p);
      for (int64_t h = 0; h < 4; h++) {
        for (int64_t i = 0; i < 60; i++) {
          const bool keeps = oracle_kept(p, 0, h, i, i);
          kept += keeps;
          dropped += !keeps;
          for (int64_t x = 0; x < 3; x++) {
            const float v = (float)problem_load(&p->v, problem_offset(p, &p->v, 'k', 0, h, i, x));
            const float out = (float)problem_load(&p->out, problem_offset(p, &p->out, 'q', 0, h, i, x));
            assert_true(out == (keeps ? v / keep : 0));
          }
        }
      }
    }
    assert_true(kept > 0 && dropped > 0);
    problem_free(&c);
  }
}

/* ---- Errors -------------------------------------------------------------------------------------------------------- */

static void expect_refused(qkv_problem p, const char *field) {
  char text[256];
  assert_int_equal(qkv_check(&p, text, sizeof text), QKV_BAD_VALUE);
  assert_non_null(strstr(text, field));
  assert_int_equal(qkv_forward(NULL, &p, NULL, 0), QKV_BAD_VALUE);
}

static void test_errors(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f32 b2 h4 q3 k5 d2 dropout:0.5");
  static const double rates[] = {-0x1p-60, 1 + 0x1p-52, -INFINITY, INFINITY, NAN};
  for (size_t n = 0; n < COUNT(rates); n++) {
    qkv_problem p = c.problem;
    p.dropout = rates[n];
    expect_refused(p, "dropout");
  }
  qkv_problem p = c.problem;
  p.batch_origin = -1;
  expect_refused(p, "batch_origin -1");
  p = c.problem;
  p.head_origin = -2;
  expect_refused(p, "head_origin -2");
  p = c.problem;
  p.heads_total = 3;
  expect_refused(p, "heads_total 3");
  p = c.problem;
  p.heads_total = 6;
  p.head_origin = 3;
  expect_refused(p, "head_origin 3");
  problem_free(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_known_answers),
      cmocka_unit_test(test_masks),
      cmocka_unit_test(test_words),
      cmocka_unit_test(test_seed_and_offset),
      cmocka_unit_test(test_kept_of_a_region),
      cmocka_unit_test(test_share),
      cmocka_unit_test(test_every_way),
      cmocka_unit_test(test_layouts),
      cmocka_unit_test(test_part_of_batch_and_heads),
      cmocka_unit_test(test_decode),
      cmocka_unit_test(test_states),
      cmocka_unit_test(test_nothing_is_dropped),
      cmocka_unit_test(test_fast),
      cmocka_unit_test(test_lse_and_zeros),
      cmocka_unit_test(test_one_key),
      cmocka_unit_test(test_errors),
  };
  test_find_isas();
  return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Gradients of problems that are the same but for their spelling, cut, layout or a power of two, and what must hold between the
 * gradients of one problem. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradients.h"
#include "rng.h"

/* Both on each instruction set; the same bits. */
static void same_everywhere(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                            const char *what) {
  EVERY_KERNEL {
    backward_run(ISA, a, ga);
    backward_run(ISA, b, gb);
    backward_same(a, ga, b, gb, "isa %s, %s", ISA, what);
  }
}

static const char *const varied[] = {
    "f32 b2 h2/1 q130 k200 d33/20 causal seed:1",
    "f32 b3 h2/1 q70 k70 d16 window:20,3 softcap:5 lengths kvpos dlse seed:2",
    "f32 b2 h2 q65 k300 d8/40 bias alibi sinks dense documents seed:3",
    "f64 b2 h2/1 q66 k130 d9/7 causal or:prefix:5 biasinf:h1 dlse seed:4",
    "f32 b4 h2 q150 k400 d17 ragged causal tile seed:5",
    "f32 h8/1 q1 k1100 d64 causal seed:6",
    "f32 b2 h6/2 q3 k300 d32 start causal window:90,90 sinks:b seed:7",
    "f32 b2 h2 q67 k129 d24 standard causal bias:b1h1 alibi:b sinks dlse seed:8",
    "f32 b2 h3/1 q200 k70 d24 causal bias:q1 sinks dsinks:b1h1 seed:9",
    "bf16 b2 h2 q90 k140 d20 causal bias sinks dlse seed:10",
};

static void test_layouts(void **state) {
  (void)state;
  static const char *const layouts[] = {"bshd", "odd", "neg"};
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    sample a;
    sample_open(&a, 0, "%s", varied[n]);
    for (size_t l = 0; l < COUNT(layouts); l++) {
      sample b;
      char what[PROBLEM_TEXT_BYTES];
      sample_open(&b, 0, "%s %s", varied[n], layouts[l]);
      snprintf(what, sizeof what, "%s %s", varied[n], layouts[l]);
      same_everywhere(&a.c.problem, &a.g.g, &b.c.problem, &b.g.g, what);
      sample_free(&b);
    }
    sample_free(&a);
  }
}

static void test_alone_forced_executors(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(varied); n += stride_of(COUNT(varied))) {
    backward_prove_text(PROVE_WAYS, varied[n]);
  }
}

/* ---- Cuts of rows and batches -------------------------------------------------------------------------------------- */

/* Tensors of a problem and its gradients in memory of their own, for other extents. */
typedef struct repack {
  qkv_problem p;
  gradients_copy copy;
  void *memory[8];
  int count;
} repack;

static qkv_tensor keep(repack *r, qkv_tensor t) {
  r->memory[r->count++] = t.data;
  return t;
}

/* dtype: of every tensor that may have 16 bits; 0: as they are. */
static void repack_make(repack *r, const qkv_problem *from, const qkv_gradients *g, const qkv_problem *shape,
                        int32_t dtype) {
  memset(r, 0, sizeof *r);
  r->p = *shape;
  r->p.q = keep(r, repacked(from, &from->q, 'q', shape, from->num_heads, from->head_dim, dtype));
  r->p.k = keep(r, repacked(from, &from->k, 'k', shape, from->num_kv_heads, from->head_dim, dtype));
  r->p.v = keep(r, repacked(from, &from->v, 'k', shape, from->num_kv_heads, value_dim(from), dtype));
  r->p.out = keep(r, repacked(from, &from->out, 'q', shape, from->num_heads, value_dim(from), dtype));
  r->p.lse = keep(r, repacked(from, &from->lse, 'q', shape, from->num_heads, 1, 0));
  qkv_gradients incoming = *g;
  incoming.dout = keep(r, repacked(from, &g->dout, 'q', shape, from->num_heads, value_dim(from), dtype));
  if (g->dlse.data != NULL) {
    incoming.dlse = keep(r, repacked(from, &g->dlse, 'q', shape, from->num_heads, 1, 0));
  }
  if (dtype != 0) {
    qkv_tensor *outputs[] = {&incoming.dq, &incoming.dk, &incoming.dv, &incoming.dbias};
    for (size_t n = 0; n < COUNT(outputs); n++) {
      outputs[n]->dtype = outputs[n]->data != NULL ? dtype : 0;
    }
  }
  gradients_copy_make(&r->copy, shape, &incoming);
}

static void repack_free(repack *r) {
  gradients_copy_free(&r->copy);
  for (int n = 0; n < r->count; n++) {
    free(r->memory[n]);
  }
}

static void test_ragged_is_padded(void **state) {
  (void)state;
  static const char *const options[] = {"causal", "window:30,5 sinks:b alibi dlse", "softcap:3 kvpos", "causal standard"};
  for (size_t n = 0; n < COUNT(options); n++) {
    sample s;
    sample_open(&s, 0, "f32 b4 h4/2 q300 k400 d12/7 ragged %s seed:%d", options[n], (int)n + 20);
    const qkv_problem *p = &s.c.problem;
    int32_t q_length[4], kv_length[4];
    qkv_problem shape = *p;
    shape.seqlen_q = shape.seqlen_kv = 0;
    for (int64_t b = 0; b < 4; b++) {
      q_length[b] = (int32_t)problem_rows(p, b);
      kv_length[b] = (int32_t)problem_keys(p, b);
      shape.seqlen_q = q_length[b] > shape.seqlen_q ? q_length[b] : shape.seqlen_q;
      shape.seqlen_kv = kv_length[b] > shape.seqlen_kv ? kv_length[b] : shape.seqlen_kv;
    }
    shape.seqlen_q += 3;
    shape.seqlen_kv += 5;
    shape.cu_seqlens_q = shape.cu_seqlens_kv = NULL;
    shape.q_length = q_length;
    shape.kv_length = kv_length;
    repack padded;
    repack_make(&padded, p, &s.g.g, &shape, 0);
    same_everywhere(p, &s.g.g, &padded.p, &padded.copy.g, options[n]); /* the rows and keys of `p` */
    for (int64_t b = 0; b < 4; b++) {
      for (int64_t i = q_length[b]; i < shape.seqlen_q; i++) {
        const float *dq = (const float *)padded.copy.g.dq.data + problem_offset(&shape, &padded.copy.g.dq, 'q', b, 1, i, 0);
        assert_true(dq[0] <= 0 && dq[0] >= 0 && dq[11] <= 0 && dq[11] >= 0);
      }
      for (int64_t j = kv_length[b]; j < shape.seqlen_kv; j++) {
        const float *dv = (const float *)padded.copy.g.dv.data + problem_offset(&shape, &padded.copy.g.dv, 'k', b, 1, j, 0);
        assert_true(dv[0] <= 0 && dv[0] >= 0 && dv[6] <= 0 && dv[6] >= 0);
      }
    }
    repack_free(&padded);
    sample_free(&s);
  }
}

static void shift(qkv_tensor *t, int64_t elements) {
  if (t->data != NULL) {
    t->data = (char *)t->data + elements * (int64_t)problem_dtype_of(t->dtype)->size;
  }
}

/* Rows [first, last) of a problem of one length per entry, with explicit positions. `positions` has room for the batch. */
static void rows_of(qkv_problem *p, qkv_gradients *g, int64_t first, int64_t last, int32_t *positions) {
  for (int64_t b = 0; b < p->batch; b++) {
    positions[b] = (int32_t)oracle_query_position(p, b, first, p->align);
  }
  p->align = QKV_ALIGN_EXPLICIT;
  p->q_position = positions;
  p->seqlen_q = last - first;
  qkv_tensor *tensors[] = {&p->q, &p->out, &p->lse, &p->bias, &g->dout, &g->dlse, &g->dq, &g->dbias};
  for (size_t n = 0; n < COUNT(tensors); n++) {
    shift(tensors[n], first * tensors[n]->stride[2]);
  }
}

/* dq of a row needs that row alone. dk and dv, added up part by part, are those of the whole within three of its bounds: the parts'
 * errors together are within one, and rounding of the sums within another. */
static void test_cuts_of_the_rows(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q150 k150 d20/9 causal dlse seed:1",
                                      "f32 h8/1 q200 k300 d16 causal window:100,0 sinks alibi softcap:4 bias seed:2",
                                      "f64 h4/2 q130 k300 d5/3 causal or:prefix:7 seed:3"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    oracle_gradients expected;
    assert_true(oracle_gradients_make(&expected, p, &s.g.g, NULL));
    EVERY_KERNEL {
      for (int round = 0; round < 3; round++) {
        gradients_copy parts;
        rng r = {n, (uint64_t)round, 0};
        gradients_copy_make(&parts, p, &s.g.g);
        for (int64_t first = 0; first < p->seqlen_q;) {
          int64_t last = first + (round == 0 ? 64 : rng_range(&r, 1, 90));
          int32_t positions[4];
          qkv_problem part = *p;
          qkv_gradients g = parts.g;
          last = last < p->seqlen_q ? last : p->seqlen_q;
          rows_of(&part, &g, first, last, positions);
          g.accumulate = first > 0 ? QKV_DK | QKV_DV | QKV_DSINKS : 0;
          backward_run(ISA, &part, &g);
          first = last;
        }
        backward_run(ISA, p, &s.g.g);
        for (int which = PROBLEM_DK; which <= PROBLEM_DV; which++) {
          const qkv_tensor *t = problem_gradient(&parts.g, which);
          int64_t count = 1;
          for (int axis = 0; axis < 4; axis++) {
            count *= expected.extents[which][axis];
          }
          for (int64_t e = 0; e < count; e++) { /* contiguous, as the oracle's */
            const oracle_value *v = &expected.of[which][e];
            if (!(fabs(problem_load(t, e) - v->value - v->tail) <= 3 * v->bound)) {
              fail_msg("isa %s, parts of %s: %s[%d] is %.17g, not %.17g", ISA, texts[n], problem_gradient_name(which),
                       (int)e, problem_load(t, e), v->value);
            }
          }
          *(which == PROBLEM_DK ? &parts.g.dk : &parts.g.dv) = qkv_strided(NULL, 0, 0, 0, 0, 0);
        }
        parts.g.dsinks = qkv_strided(NULL, 0, 0, 0, 0, 0);
        backward_same(p, &s.g.g, p, &parts.g, "isa %s, rows of %s", ISA, texts[n]);
        gradients_copy_free(&parts);
      }
    }
    oracle_gradients_free(&expected);
    sample_free(&s);
  }
}

/* ---- Masks, bias, sinks, dropout by other words ---------------------------------------------------------------------- */

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
                                      "window:0,0",
                                      "prefix:70",
                                      "documents",
                                      "documents2",
                                      "dense:30",
                                      "tile",
                                      "causal window:64,64 or:prefix:3",
                                      "causal start kvpos",
                                      "causal lengths",
                                      "window:100,20 pos kvpos lengths",
                                      "documents lengths kvpos"};
  for (size_t n = 0; n < COUNT(masks); n += stride_of(COUNT(masks))) {
    sample s;
    sample_open(&s, 0, "f32 b2 h2 q130 k170 d6/5 dlse %s seed:%d", masks[n], (int)n);
    const qkv_problem *p = &s.c.problem;
    gradients_copy copy;
    qkv_problem other = *p;
    qkv_mask mask = qkv_tiles(oracle_callback, &s.c.problem);
    gradients_copy_make(&copy, p, &s.g.g);
    other.mask = &mask;
    other.mask_count = 1;
    same_everywhere(p, &s.g.g, &other, &copy.g, masks[n]);
    uint8_t *bytes = test_alloc((size_t)(2 * 2 * 130 * 170));
    for (int64_t e = 0; e < 2 * 2 * 130 * 170; e++) {
      bytes[e] = oracle_visible(p, e / 170 / 130 / 2, e / 170 / 130 % 2, e / 170 % 130, e % 170);
    }
    mask = qkv_dense(qkv_bhsd(bytes, QKV_U8, 2, 130, 170), 0);
    same_everywhere(p, &s.g.g, &other, &copy.g, masks[n]);
    /* A bias of -inf is a mask; its own gradient there is 0. */
    float *bias = test_alloc((size_t)(2 * 2 * 130 * 170) * sizeof *bias),
          *dbias = test_alloc((size_t)(2 * 2 * 130 * 170) * 4);
    for (int64_t e = 0; e < 2 * 2 * 130 * 170; e++) {
      bias[e] = bytes[e] ? 0 : -INFINITY;
    }
    other.mask_count = 0;
    other.bias = qkv_bhsd(bias, QKV_F32, 2, 130, 170);
    qkv_gradients with_bias = copy.g;
    with_bias.dbias = qkv_bhsd(dbias, QKV_F32, 2, 130, 170);
    same_everywhere(p, &s.g.g, &other, &with_bias, masks[n]);
    for (int64_t e = 0; e < 2 * 2 * 130 * 170; e++) {
      assert_true(bytes[e] || (dbias[e] <= 0 && dbias[e] >= 0));
    }
    free(bytes);
    free(bias);
    free(dbias);
    gradients_copy_free(&copy);
    sample_free(&s);
  }
}

static void test_nothing_by_name(void **state) {
  (void)state;
  static const float zero = 0, none = -INFINITY;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k200 d12/9 causal dlse seed:1", "f32 h2 q9 k300 d17 standard seed:2",
                                      "f32 b2 h2 q65 k65 d8 softcap:4 alibi ragged seed:3"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    float dbias = 0, dsinks[4];
    for (int which = 0; which < 3; which++) {
      gradients_copy copy;
      qkv_problem other = *p;
      gradients_copy_make(&copy, p, &s.g.g);
      switch (which) {
      case 0:
        other.bias = qkv_strided(&zero, QKV_F32, 0, 0, 0, 0);
        copy.g.dbias = qkv_strided(&dbias, QKV_F32, 0, 0, 0, 0);
        break;
      case 1:
        other.sinks = qkv_strided(&none, QKV_F32, 0, 0, 0, 0);
        copy.g.dsinks = qkv_per_head(dsinks, QKV_F32);
        break;
      default: /* without a threshold the seed has no meaning */
        other.seed = 77;
        other.offset = 5;
        other.batch_origin = 3;
        break;
      }
      same_everywhere(p, &s.g.g, &other, &copy.g, texts[n]);
      for (int64_t h = 0; h < p->num_heads && which == 1; h++) {
        assert_true(dsinks[h] <= 0 && dsinks[h] >= 0);
      }
      gradients_copy_free(&copy);
    }
    sample_free(&s);
  }
}

static void test_nan_in_invisible_slots(void **state) {
  (void)state;
  static const char *const texts[] = {
      "f32 b2 h4/2 q70 k300 d12/9 causal seed:3",      "f32 h2 q130 k130 d33 window:9,0 odd dlse seed:4",
      "f64 b2 h2 q40 k200 d5 dense biasinf seed:5",    "f32 b3 h2 q100 k200 d16 ragged lengths causal dlse seed:6",
      "f32 h2 q90 k200 d16 tile bias standard seed:7", "f32 h4/1 q3 k300 d40 window:20,0 or:prefix:2 sinks seed:8",
      "f32 h2 q100 k40 d16 causal softcap:2 seed:9",   "f16 h2 q80 k90 d16 causal lengths seed:10"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample plain, poisoned;
    sample_open(&plain, 0, "%s", texts[n]);
    sample_open(&poisoned, PROBLEM_GUARD_END, "%s nan", texts[n]);
    same_everywhere(&plain.c.problem, &plain.g.g, &poisoned.c.problem, &poisoned.g.g, texts[n]);
    for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
      if (problem_gradient(&plain.g.g, which)->data != NULL) {
        scale_gradient(&plain.c.problem, &plain.g.g, which, 0); /* NaN stays */
        expect_zeros(&plain.c.problem, &plain.g.g, which, texts[n]);
      }
    }
    sample_free(&plain);
    sample_free(&poisoned);
  }
}

/* Keys block by block of absolute positions: a shift by whole blocks changes nothing. */
static void test_shifted_positions(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k300 d12/9 causal kvpos seed:1",
                                      "f32 h2 q70 k300 d8 window:100,30 alibi bias seed:2"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    gradients_copy copy;
    qkv_problem other = *p;
    int32_t position[2];
    gradients_copy_make(&copy, p, &s.g.g);
    for (int64_t b = 0; b < p->batch; b++) {
      position[b] = (p->kv_position != NULL ? p->kv_position[b] : 0) + 64 * (int32_t)(5 + b);
    }
    other.kv_position = position;
    same_everywhere(p, &s.g.g, &other, &copy.g, texts[n]);
    gradients_copy_free(&copy);
    sample_free(&s);
  }
}

/* ---- Powers of two, zeros, heads, storage -------------------------------------------------------------------------- */

/* Runs both; b's gradients, each times its factor, must be a's. */
static void expect_scaled(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                          const double factor[PROBLEM_GRADIENT_TENSORS], const char *what) {
  EVERY_KERNEL {
    backward_run(ISA, a, ga);
    backward_run(ISA, b, gb);
    for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
      if (problem_gradient(gb, which)->data != NULL) {
        scale_gradient(b, gb, which, factor[which]);
      }
    }
    backward_same(a, ga, b, gb, "isa %s, %s", ISA, what);
  }
}

static void test_powers_of_two(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q70 k200 d12/9 causal bias sinks dlse seed:1",
                                      "f64 h2 q9 k200 d17 sinks seed:2",
                                      "f32 h2 q70 k100 d17 softcap:2 bias:q1 standard dlse seed:3"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    repack r;
    sample_open(&s, 0, "%s scale:0.25", texts[n]);
    const qkv_problem *p = &s.c.problem;
    const double up = 0x1p20, down = 0x1p-20;
    repack_make(&r, p, &s.g.g, p, 0);
    qkv_gradients *g = &r.copy.g;
    scale_values(p, &g->dout, 'q', p->num_heads, value_dim(p), up);
    if (g->dlse.data != NULL) {
      scale_values(p, &g->dlse, 'q', p->num_heads, 1, up);
    }
    expect_scaled(p, &s.g.g, &r.p, g, (const double[]){1, 1, down, down, down, down, down}, "dout x 2^20");
    /* v and out x 2^20 and dout x 2^-20: the same loss, but that dv is by v. */
    scale_values(p, &g->dout, 'q', p->num_heads, value_dim(p), down * down);
    if (g->dlse.data != NULL) {
      scale_values(p, &g->dlse, 'q', p->num_heads, 1, down);
    }
    scale_values(p, &r.p.v, 'k', p->num_kv_heads, value_dim(p), up);
    scale_values(p, &r.p.out, 'q', p->num_heads, value_dim(p), up);
    expect_scaled(p, &s.g.g, &r.p, g, (const double[]){1, 1, 1, 1, up, 1, 1}, "v x 2^20, dout x 2^-20");
    scale_values(p, &r.p.v, 'k', p->num_kv_heads, value_dim(p), -1);
    scale_values(p, &r.p.out, 'q', p->num_heads, value_dim(p), -1);
    scale_values(p, &g->dout, 'q', p->num_heads, value_dim(p), -1);
    expect_scaled(p, &s.g.g, &r.p, g, (const double[]){1, 1, 1, 1, -up, 1, 1}, "-v, -dout");
    scale_values(p, &r.p.q, 'q', p->num_heads, p->head_dim, 0x1p-7);
    r.p.softmax_scale = 32;
    expect_scaled(p, &s.g.g, &r.p, g, (const double[]){1, 1, 0x1p-7, 1, -up, 1, 1}, "q x 2^-7, scale x 2^7");
    repack_free(&r);
    sample_free(&s);
  }
}

/* Zeros after the last feature: dq and dk of the features that there were, and 0 after them. */
static void test_head_dim_padded_with_zeros(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f32 b2 h4/2 q70 k100 d20/7 scale:0.2 causal softcap:5 dlse seed:1");
  const qkv_problem *p = &s.c.problem;
  for (int64_t dim = 21; dim <= 68; dim += 11) {
    qkv_problem other = *p;
    gradients_copy copy;
    qkv_tensor *wide[] = {&other.q, &other.k};
    other.head_dim = dim;
    for (int which = 0; which < 2; which++) {
      const qkv_tensor *from = which == 0 ? &p->q : &p->k;
      int64_t heads = which == 0 ? 4 : 2, rows = which == 0 ? 70 : 100;
      float *to = test_alloc((size_t)(2 * heads * rows * dim) * sizeof *to);
      for (int64_t row = 0; row < 2 * heads * rows; row++) {
        memcpy(to + row * dim, (const float *)from->data + row * 20, 20 * sizeof *to);
      }
      *wide[which] = qkv_bhsd(to, QKV_F32, heads, rows, dim);
    }
    gradients_copy_make(&copy, &other, &s.g.g);
    same_everywhere(p, &s.g.g, &other, &copy.g, "zero-padded head_dim"); /* the features of `p` */
    for (int64_t row = 0; row < 2 * 4 * 70; row++) {
      for (int64_t x = 20; x < dim; x++) {
        float value = ((const float *)copy.g.dq.data)[row * dim + x];
        assert_true(value <= 0 && value >= 0);
      }
    }
    free(other.q.data);
    free(other.k.data);
    gradients_copy_free(&copy);
  }
  sample_free(&s);
}

/* Key-value heads shared by stride 0: the same dq, dbias and dsinks; dk and dv of the heads add up to those of the group, within
 * three of its bounds (as parts of the rows do). */
static void test_grouped_is_multi_head(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h6/1 q70 k100 d12/9 causal bias sinks:b dlse seed:1",
                                      "f32 b2 h8/2 q1 k300 d16 seed:2", "f64 h5/1 q70 k70 d16 standard dlse seed:3"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    const int64_t group = p->num_heads / p->num_kv_heads;
    oracle_gradients expected;
    assert_true(oracle_gradients_make(&expected, p, &s.g.g, NULL));
    EVERY_KERNEL {
      backward_run(ISA, p, &s.g.g);
      for (int64_t first = 0; first < p->num_kv_heads; first++) { /* one group of heads after another */
        problem_view view;
        qkv_gradients part;
        gradients_copy copy;
        problem_view_entry(&view, p, p->batch - 1, first, first + 1);
        problem_view_gradients(&part, p, &s.g.g, p->batch - 1, first, first + 1);
        qkv_problem multi = view.problem;
        multi.num_kv_heads = group;
        multi.k.stride[1] = multi.v.stride[1] = 0;
        gradients_copy_make(&copy, &multi, &part);
        backward_run(ISA, &multi, &copy.g);
        for (int which = PROBLEM_DK; which <= PROBLEM_DV; which++) {
          const qkv_tensor *t = problem_gradient(&copy.g, which);
          const int64_t *extents = expected.extents[which], size = extents[2] * extents[3];
          for (int64_t e = 0; e < size; e++) {
            const oracle_value *v = &expected.of[which][((p->batch - 1) * extents[1] + first) * size + e];
            double sum = 0;
            for (int64_t h = 0; h < group; h++) {
              sum += problem_load(t, h * size + e);
            }
            if (!(fabs(sum - v->value) <= 3 * v->bound)) {
              fail_msg("%s: %s[%d]: heads add up to %.17g, not %.17g", texts[n], problem_gradient_name(which), (int)e, sum,
                       v->value);
            }
          }
        }
        copy.g.dk = copy.g.dv = qkv_strided(NULL, 0, 0, 0, 0, 0);
        backward_same(&view.problem, &part, &multi, &copy.g, "isa %s, %s", ISA, texts[n]);
        gradients_copy_free(&copy);
      }
    }
    oracle_gradients_free(&expected);
    sample_free(&s);
  }
}

/* 16-bit storage: f32 on widened operands, rounded once; where it accumulates, after the sum. */
static void test_storage_is_rounding(void **state) {
  (void)state;
  static const char *const texts[] = {"bf16 b2 h4/2 q70 k130 d20/9 causal bias sinks dlse seed:1",
                                      "f16 h2 q70 k70 d33 softcap:3 bias:h1 seed:2",
                                      "f32 kv:f16 out:bf16 h2 q65 k70 d17 dq:f16 dv:bf16 seed:3",
                                      "f32 b2 h2 q70 k65 d16 bias dout:bf16 dk:f16 dbias:bf16 seed:4"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      sample s;
      repack r;
      sample_open(&s, 0, "%s%s", texts[n], accumulate ? " acc" : "");
      const qkv_problem *p = &s.c.problem;
      repack_make(&r, p, &s.g.g, p, QKV_F32);
      qkv_problem wide = r.p;
      void *bias = NULL;
      if (p->bias.data != NULL && p->bias.dtype != QKV_F32) {
        wide.bias.dtype = QKV_F32;
        size_t count = s.c.buffer[PROBLEM_BUFFER_BIAS].bytes / 2;
        wide.bias.data = bias = test_alloc(count * sizeof(float));
        for (size_t e = 0; e < count; e++) {
          problem_store(&wide.bias, (int64_t)e, problem_load(&p->bias, (int64_t)e));
        }
      }
      r.copy.g.accumulate = 0;
      EVERY_KERNEL {
        problem_gradients before;
        assert_true(problem_gradients_build(&before, &s.c, 0));
        problem_gradients_clear(&s.g);
        backward_run(ISA, p, &s.g.g);
        backward_run(ISA, &wide, &r.copy.g);
        for (int which = PROBLEM_DQ; which <= PROBLEM_DBIAS; which++) {
          const qkv_tensor *t = problem_gradient(&s.g.g, which), *f32 = problem_gradient(&r.copy.g, which);
          bool adds = s.g.g.accumulate >> (which - PROBLEM_DQ) & 1;
          int64_t extents[4], at[4];
          if (t->data == NULL) {
            continue;
          }
          problem_gradient_extents(p, &s.g.g, which, extents);
          qkv_tensor cell = *t;
          double memory;
          cell.data = &memory;
          for (at[0] = 0; at[0] < extents[0]; at[0]++) {
            for (at[1] = 0; at[1] < extents[1]; at[1]++) {
              for (at[2] = 0; at[2] < extents[2]; at[2]++) {
                for (at[3] = 0; at[3] < extents[3]; at[3]++) {
                  int64_t offset = problem_gradient_offset(p, &s.g.g, which, at);
                  float value = (float)problem_load(f32, problem_gradient_offset(p, &r.copy.g, which, at));
                  float old = adds ? (float)problem_load(problem_gradient(&before.g, which), offset) : 0;
                  value = adds ? old + value : value;
                  problem_store(&cell, 0, (double)value);
                  if (!compare_same_bits(&cell, 0, t, offset)) {
                    fail_msg("isa %s, %s: %s is %.17g, not %.17g rounded", ISA, texts[n], problem_gradient_name(which),
                             problem_load(t, offset), (double)value);
                  }
                }
              }
            }
          }
        }
        problem_gradients_free(&before);
      }
      free(bias);
      repack_free(&r);
      sample_free(&s);
    }
  }
}

/* ---- Which outputs ------------------------------------------------------------------------------------------------- */

static const char *const with_all[] = {"f32 b2 h4/2 q66 k70 d20/9 causal bias:h1 sinks dlse seed:1",
                                       "f64 b2 h2 q65 k70 d9 bias:b1 sinks:b softcap:3 ragged seed:2",
                                       "f32 h2 q66 k40 d33 bias dsinks:b1h1 sinks seed:3",
                                       "bf16 h4/1 q30 k70 d16 standard bias:q1k1 sinks seed:4"};

static qkv_tensor *output(qkv_gradients *g, int which) {
  qkv_tensor *tensors[] = {&g->dq, &g->dk, &g->dv, &g->dbias, &g->dsinks};
  return tensors[which - PROBLEM_DQ];
}

static void test_every_set_of_outputs(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(with_all); n += stride_of(COUNT(with_all))) {
    sample s;
    sample_open(&s, 0, "%s", with_all[n]);
    EVERY_KERNEL {
      backward_run(ISA, &s.c.problem, &s.g.g);
      for (int set = 0; set < 32; set++) {
        gradients_copy copy;
        qkv_gradients some;
        gradients_copy_make(&copy, &s.c.problem, &s.g.g);
        some = copy.g;
        for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
          if ((set >> (which - PROBLEM_DQ) & 1) == 0) {
            *output(&some, which) = qkv_strided(NULL, 0, 0, 0, 0, 0);
          }
        }
        backward_run(ISA, &s.c.problem, &some);
        backward_same(&s.c.problem, &s.g.g, &s.c.problem, &some, "isa %s, set %d of %s", ISA, set, with_all[n]);
        for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
          if ((set >> (which - PROBLEM_DQ) & 1) == 0) { /* left alone */
            assert_true(((const unsigned char *)problem_gradient(&copy.g, which)->data)[0] == 0xff);
          }
        }
        gradients_copy_free(&copy);
      }
    }
    sample_free(&s);
  }
}

/* Those in the set are added to what is there, once; the others overwrite. */
static void test_every_set_that_accumulates(void **state) {
  (void)state;
  for (size_t n = 0; n < COUNT(with_all); n += stride_of(COUNT(with_all))) {
    sample s;
    sample_open(&s, 0, "%s", with_all[n]);
    const qkv_problem *p = &s.c.problem;
    const bool wide = p->q.dtype == QKV_F64;
    EVERY_KERNEL {
      problem_gradients once;
      assert_true(problem_gradients_build(&once, &s.c, 0));
      backward_run(ISA, p, &once.g);
      for (int set = 0; set < 32; set += 1 + (n > 0) * 4) {
        backward_run(ISA, p, &s.g.g); /* what is there is the gradient itself */
        s.g.g.accumulate = set;
        backward_run(ISA, p, &s.g.g);
        s.g.g.accumulate = 0;
        for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
          const qkv_tensor *t = problem_gradient(&s.g.g, which);
          if (problem_dtype_of(t->dtype)->size == 2 || (wide && t->dtype == QKV_F32)) {
            continue; /* rounded; test_storage_is_rounding */
          }
          scale_gradient(p, &s.g.g, which, set >> (which - PROBLEM_DQ) & 1 ? 0.5 : 1);
        }
        qkv_gradients exact = s.g.g;
        if (wide) {
          exact.dsinks = qkv_strided(NULL, 0, 0, 0, 0, 0);
        }
        if (p->q.dtype != QKV_BF16) {
          backward_same(p, &once.g, p, &exact, "isa %s, adding to set %d, %s", ISA, set, with_all[n]);
        }
      }
      problem_gradients_free(&once);
    }
    sample_free(&s);
  }
}

/* ---- Within one problem -------------------------------------------------------------------------------------------- */

/* One visible key per row: out is its value, so nothing but v has a gradient. */
static void test_one_key_per_row(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h4/2 q130 k130 d20/9 window:0,0 seed:1", "f64 h2 q70 k70 d5 window:0,0 seed:2",
                                      "f32 h2 q200 k1 d16 softcap:3 bias alibi seed:3",
                                      "f32 h6/2 q90 k90 d33 big window:0,0 seed:4",
                                      "f32 b2 h2 q70 k300 d8 standard causal window:0,-1 seed:5"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    const int64_t group = p->num_heads / p->num_kv_heads;
    EVERY_KERNEL {
      backward_run(ISA, p, &s.g.g);
      expect_zeros(p, &s.g.g, PROBLEM_DQ, texts[n]);
      expect_zeros(p, &s.g.g, PROBLEM_DK, texts[n]);
      if (s.g.g.dbias.data != NULL) {
        expect_zeros(p, &s.g.g, PROBLEM_DBIAS, texts[n]);
      }
      backward_accurate(p, &s.g.g, NULL, "isa %s, %s", ISA, texts[n]);
    }
    /* dv is the sum of dout of the rows that see the key. P = exp(s - lse) is 1 but for the round trip of lse: 2^-10 is far above
     * its bound for the scores here, and far below a row too many or too few. */
    for (int64_t b = 0; b < p->batch && s.c.spec.data == PROBLEM_PLAIN; b++) {
      for (int64_t kv = 0; kv < p->num_kv_heads; kv++) {
        for (int64_t j = 0; j < problem_keys(p, b); j++) {
          for (int64_t x = 0; x < value_dim(p); x++) {
            double sum = 0, size = 0;
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
              for (int64_t i = 0; i < problem_rows(p, b); i++) {
                double dout = problem_load(&s.g.g.dout, problem_offset(p, &s.g.g.dout, 'q', b, h, i, x));
                sum += oracle_sees(p, b, h, i, j) ? dout : 0;
                size += oracle_sees(p, b, h, i, j) ? fabs(dout) : 0;
              }
            }
            double dv = problem_load(&s.g.g.dv, problem_offset(p, &s.g.g.dv, 'k', b, kv, j, x));
            if (!(fabs(dv - sum) <= 0x1p-10 * size)) {
              fail_msg("%s: dv is %g, not the sum of dout %g", texts[n], dv, sum);
            }
          }
        }
      }
    }
    sample_free(&s);
  }
}

static void test_what_nobody_sees(void **state) {
  (void)state;
  /* Segments without queries or without keys, rows before all keys, keys behind all rows. */
  static const char *const texts[] = {
      "f32 b4 h2 q40 k90 d8 ragged causal bias dlse seed:", "f64 b4 h4/2 q40 k90 d8 ragged:q seed:",
      "f32 b2 h2 q90 k30 d16 causal sinks dlse seed:", "f32 b4 h2 q40 k90 d8 ragged lengths seed:"};
  int empty_keys = 0, empty_rows = 0;
  for (size_t n = 0; n < COUNT(texts) * 4; n++) {
    sample s;
    sample_open(&s, PROBLEM_GUARD_BEGIN, "%s%d nan", texts[n / 4], (int)n);
    const qkv_problem *p = &s.c.problem;
    const int64_t group = p->num_heads / p->num_kv_heads;
    EVERY_KERNEL {
      problem_gradients_clear(&s.g);
      backward_run(ISA, p, &s.g.g);
      for (int64_t b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < p->num_heads; h++) {
          for (int64_t i = 0; i < problem_rows(p, b); i++) {
            bool sees = false;
            for (int64_t j = 0; j < problem_keys(p, b); j++) {
              sees = sees || oracle_sees(p, b, h, i, j);
            }
            double dq = problem_load(&s.g.g.dq, problem_offset(p, &s.g.g.dq, 'q', b, h, i, p->head_dim - 1));
            assert_true(sees || (dq <= 0 && dq >= 0));
            empty_rows += !sees;
          }
          for (int64_t j = 0; j < problem_keys(p, b) && h % group == 0; j++) {
            bool seen = false;
            for (int64_t f = 0; f < group * problem_rows(p, b); f++) {
              seen = seen || oracle_sees(p, b, h + f % group, f / group, j);
            }
            double dk = problem_load(&s.g.g.dk, problem_offset(p, &s.g.g.dk, 'k', b, h / group, j, 0));
            double dv = problem_load(&s.g.g.dv, problem_offset(p, &s.g.g.dv, 'k', b, h / group, j, value_dim(p) - 1));
            assert_true(seen || (dk <= 0 && dk >= 0 && dv <= 0 && dv >= 0));
            empty_keys += !seen;
          }
        }
      }
    }
    sample_free(&s);
  }
  assert_true(empty_keys > 0 && empty_rows > 0);
}

/* Without sinks and dlse the gradient of a row's scores, which is that of its bias, adds up to 0: a weight is a share. The bound is the
 * oracle's for each, and what out and lse are wrong by: sum_j P_j dP_j - delta and delta (1 - sum_j P_j). */
static void test_rows_of_the_scores_add_up_to_zero(void **state) {
  (void)state;
  static const char *const texts[] = {"f32 b2 h2 q70 k130 d20/9 causal bias seed:1", "f64 h2 q30 k200 d16 bias seed:2",
                                      "f32 h4/2 q65 k70 d33 bias alibi softcap:20 lengths seed:3",
                                      "f32 h2 q65 k90 d16 biasinf standard window:20,20 seed:4"};
  for (size_t n = 0; n < COUNT(texts); n += stride_of(COUNT(texts))) {
    sample s;
    sample_open(&s, 0, "%s", texts[n]);
    const qkv_problem *p = &s.c.problem;
    oracle_gradients expected;
    assert_true(oracle_gradients_make(&expected, p, &s.g.g, NULL));
    oracle *o = oracle_new(p);
    oracle_value *out = test_alloc((size_t)value_dim(p) * sizeof *out), lse;
    assert_non_null(o);
    const int64_t *extents = expected.extents[PROBLEM_DBIAS];
    EVERY_KERNEL {
      backward_run(ISA, p, &s.g.g);
      for (int64_t row = 0; row < extents[0] * extents[1] * extents[2]; row++) {
        int64_t b = row / extents[2] / extents[1], h = row / extents[2] % extents[1], i = row % extents[2];
        double sum = 0, bound = 0, delta = 0;
        for (int64_t j = 0; j < extents[3]; j++) {
          sum += problem_load(&s.g.g.dbias, problem_offset(p, &s.g.g.dbias, 'b', b, h, i, j));
          bound += expected.of[PROBLEM_DBIAS][row * extents[3] + j].bound;
        }
        oracle_row(o, b, h, i, out, &lse);
        for (int64_t x = 0; x < value_dim(p); x++) {
          double dout = problem_load(&s.g.g.dout, problem_offset(p, &s.g.g.dout, 'q', b, h, i, x));
          bound += fabs(dout) * out[x].bound;
          delta += fabs(dout * out[x].value);
        }
        bound += isfinite(lse.value) ? 2 * delta * expm1(lse.bound) : 0;
        if (!(fabs(sum) <= bound)) {
          fail_msg("isa %s, %s, row %d: dbias adds up to %g, bound %g", ISA, texts[n], (int)row, sum, bound);
        }
      }
    }
    free(out);
    oracle_free(o);
    oracle_gradients_free(&expected);
    sample_free(&s);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_layouts),
    cmocka_unit_test(test_alone_forced_executors),
    cmocka_unit_test(test_ragged_is_padded),
    cmocka_unit_test(test_cuts_of_the_rows),
    cmocka_unit_test(test_mask_spellings),
    cmocka_unit_test(test_nothing_by_name),
    cmocka_unit_test(test_nan_in_invisible_slots),
    cmocka_unit_test(test_shifted_positions),
    cmocka_unit_test(test_powers_of_two),
    cmocka_unit_test(test_head_dim_padded_with_zeros),
    cmocka_unit_test(test_grouped_is_multi_head),
    cmocka_unit_test(test_storage_is_rounding),
    cmocka_unit_test(test_every_set_of_outputs),
    cmocka_unit_test(test_every_set_that_accumulates),
    cmocka_unit_test(test_one_key_per_row),
    cmocka_unit_test(test_what_nobody_sees),
    cmocka_unit_test(test_rows_of_the_scores_add_up_to_zero),
};

TEST_MAIN(tests)

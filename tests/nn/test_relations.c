/* What must hold between results of the layer: executors, memory, rows that do not exist, chosen gradients. */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Everything a call wrote, one copy after another. */
static unsigned char *snapshot(const layer *l, size_t *bytes) {
  const layer_tensor *t[TENSORS + 1] = {&l->y};
  for (int i = 0; i < TENSORS; i++) t[i + 1] = &l->d[i];
  size_t n = l->m.activation_bytes + 2 * l->wide_bytes;
  for (int i = 0; i <= TENSORS; i++) n += t[i]->bytes;
  unsigned char *all = malloc(n + 1), *to = all;
  assert_non_null(all);
  for (int i = 0; i <= TENSORS; i++) {
    if (t[i]->memory) memcpy(to, t[i]->memory, t[i]->bytes);
    to += t[i]->memory ? t[i]->bytes : 0;
  }
  if (l->wide_weights[1]) memcpy(to, l->wide_weights[1], l->wide_bytes), to += l->wide_bytes;
  memcpy(to, l->activations, l->m.activation_bytes);
  *bytes = (size_t)(to - all) + l->m.activation_bytes;
  return all;
}

static void clear(layer *l) {
  layer_clear(l, &l->y);
  for (int i = 0; i < TENSORS; i++) layer_clear(l, &l->d[i]);
  memset(l->activations, 0xff, l->m.activation_bytes);
}

static void executors(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    layer_config c = layer_config_random(300 + seed);
    layer l;
    size_t n, m;
    c.gemm = QKV_GEMM_TASKS;
    if (seed % 5 == 0) c.rows = 600, c.keys = c.d_kv ? c.keys : 600;
    layer_open(&l, &c);
    clear(&l);
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    unsigned char *expected = snapshot(&l, &n);
    for (int kind = 0; kind < EXECUTOR_KINDS; kind++) {
      executor e = executor_make((executor_kind)kind, 3, seed);
      const qkv_context context = executor_context(&e);
      clear(&l);
      layer_forward(&l, &context);
      layer_backward(&l, &context);
      unsigned char *got = snapshot(&l, &m);
      assert_int_equal(n, m);
      if (memcmp(expected, got, n) != 0) fail_msg("executor %s gives other bits; %s", executor_name((executor_kind)kind), layer_text(&c));
      free(got);
    }
    free(expected);
    layer_close(&l);
  }
}

/* Rows that the lengths leave out hold NaN, in inputs and before in outputs; every result is what it was. */
static void rows_that_do_not_exist(void **state) {
  (void)state;
  int64_t dead = 0;
  for (uint64_t seed = 0; seed < 200; seed++) {
    layer_config c = layer_config_random(400 + seed);
    layer l;
    size_t n, m;
    layer_open(&l, &c);
    clear(&l);
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    unsigned char *expected = snapshot(&l, &n);
    clear(&l);
    for (int t = X; t <= XKV; t++)
      for (int64_t i = 0; i < layer_count(&l.in[t]); i++)
        if (!layer_alive(&l, t, i)) {
          layer_set(&l, &l.in[t], i, NAN);
          dead++;
        }
    for (int64_t e = 0; e < c.batch; e++) { /* dy of rows without an existing query */
      const int64_t first = l.p.cu_seqlens_q ? l.cu[0][e] : e * c.rows, end = l.p.cu_seqlens_q ? l.cu[0][e + 1] : first + c.rows;
      for (int64_t i = (first + l.q_length[e]) * l.dy.n[3]; i < end * l.dy.n[3]; i++) layer_set(&l, &l.dy, i, NAN);
    }
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    unsigned char *got = snapshot(&l, &m);
    /* activations of such rows are not written, and were the same before */
    if (n != m || memcmp(expected, got, n) != 0) fail_msg("rows that do not exist were used; %s", layer_text(&c));
    for (int64_t i = 0; i < layer_count(&l.y); i++) assert_false(isnan(layer_get(&l, &l.y, i)));
    for (int t = 0; t < TENSORS; t++)
      for (int64_t i = 0; i < layer_count(&l.d[t]); i++)
        if (isnan(layer_get(&l, &l.d[t], i))) fail_msg("gradient of %s is NaN; %s", layer_names[t], layer_text(&c));
    for (int64_t i = 0; i < layer_count(&l.d[X]); i++)
      if (!layer_alive(&l, X, i)) assert_true(layer_get(&l, &l.d[X], i) == 0);
    free(expected);
    free(got);
    layer_close(&l);
  }
  assert_true(dead > 1000);
}

/* Scratch and activations of exactly the size that was told, at any address, with guards around; and one byte less. */
static void memory(void **state) {
  (void)state;
  enum { GUARD = 64 };
  for (uint64_t seed = 0; seed < 60; seed++) {
    const layer_config c = layer_config_random(700 + seed);
    layer l;
    size_t n, m, bytes[3];
    layer_open(&l, &c);
    clear(&l);
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    unsigned char *expected = snapshot(&l, &n);
    qkv_multihead inference = l.m;
    inference.activations = NULL;
    inference.activation_bytes = 0;
    const qkv_multihead *const m_of[3] = {&l.m, &inference, &l.m};
    assert_int_equal(qkv_multihead_scratch(NULL, &l.m, &bytes[0]), QKV_OK);
    assert_int_equal(qkv_multihead_scratch(NULL, &inference, &bytes[1]), QKV_OK);
    assert_int_equal(qkv_multihead_backward_scratch(NULL, &l.m, &l.g, &bytes[2]), QKV_OK);
    assert_true(bytes[1] >= bytes[0] + l.m.activation_bytes);
    clear(&l);
    for (int call = 1; call < 4; call++) { /* inference, forward, backward: what they leave together is compared */
      const int which = call == 1 ? 1 : call == 2 ? 0 : 2;
      const size_t skip = seed % 8;
      unsigned char *block = malloc(bytes[which] + 2 * GUARD + skip), *scratch = block + GUARD + skip;
      assert_non_null(block);
      memset(block, 0xab, bytes[which] + 2 * GUARD + skip);
      for (int enough = 0; enough < 2; enough++) {
        const size_t given = bytes[which] - (enough ? 0 : 1);
        size_t before_n, after_n;
        unsigned char *before = snapshot(&l, &before_n);
        const qkv_status s = which == 2 ? qkv_multihead_backward(NULL, m_of[which], &l.g, scratch, given)
                                        : qkv_multihead_forward(NULL, m_of[which], scratch, given);
        assert_int_equal(s, enough ? QKV_OK : QKV_SCRATCH_TOO_SMALL);
        unsigned char *after = snapshot(&l, &after_n);
        if (!enough) assert_memory_equal(before, after, after_n);
        free(before);
        free(after);
      }
      for (size_t i = 0; i < GUARD + skip; i++) assert_int_equal(block[i], 0xab);
      for (size_t i = 0; i < GUARD; i++) assert_int_equal(scratch[bytes[which] + i], 0xab);
      free(block);
    }
    unsigned char *got = snapshot(&l, &m);
    if (n != m || memcmp(expected, got, n) != 0) fail_msg("scratch of the caller gives other bits; %s", layer_text(&c));
    free(expected);
    free(got);

    const size_t need = l.m.activation_bytes;
    unsigned char *block = malloc(need + 2 * GUARD);
    assert_non_null(block);
    memset(block, 0xab, need + 2 * GUARD);
    l.m.activations = block + GUARD + 8 * (seed % 4);
    layer_forward(&l, NULL);
    for (size_t i = 0; i < GUARD + 8 * (seed % 4); i++) assert_int_equal(block[i], 0xab);
    for (size_t i = GUARD + 8 * (seed % 4) + need; i < need + 2 * GUARD; i++) assert_int_equal(block[i], 0xab);
    free(block);
    l.m.activations = l.activations;
    layer_close(&l);
  }
}

static struct {
  int calls, live, fail;
} allocator;
static void *take(void *self, size_t bytes, size_t alignment) {
  (void)self, (void)alignment;
  allocator.calls++;
  if (allocator.fail) return NULL;
  allocator.live++;
  return malloc(bytes);
}
static void give(void *self, void *block) {
  (void)self;
  allocator.live--;
  free(block);
}

static void allocation_and_cancel(void **state) {
  (void)state;
  const layer_config c = layer_config_default();
  layer l;
  size_t n, m;
  const int32_t cancel = 1;
  layer_open(&l, &c);
  clear(&l);
  qkv_context context = qkv_context_default();
  context.alloc = take;
  context.release = give;
  unsigned char *before = snapshot(&l, &n);
  allocator.fail = 1;
  assert_int_equal(qkv_multihead_forward(&context, &l.m, NULL, 0), QKV_NO_MEMORY);
  assert_int_equal(qkv_multihead_backward(&context, &l.m, &l.g, NULL, 0), QKV_NO_MEMORY);
  unsigned char *after = snapshot(&l, &m);
  assert_memory_equal(before, after, n);
  free(before);
  free(after);
  memset(&allocator, 0, sizeof allocator);
  assert_int_equal(qkv_multihead_forward(&context, &l.m, NULL, 0), QKV_OK);
  assert_int_equal(allocator.calls, 1);
  assert_int_equal(qkv_multihead_backward(&context, &l.m, &l.g, NULL, 0), QKV_OK);
  assert_int_equal(allocator.calls, 2);
  assert_int_equal(allocator.live, 0);
  context.cancel = &cancel;
  for (int gemm = 0; gemm < 2; gemm++) {
    l.m.gemm = gemm;
    assert_int_equal(qkv_multihead_forward(&context, &l.m, NULL, 0), QKV_CANCELLED);
    assert_int_equal(qkv_multihead_backward(&context, &l.m, &l.g, NULL, 0), QKV_CANCELLED);
  }
  assert_int_equal(allocator.live, 0);
  layer_close(&l);
}

/* Sums in another order differ by their roundings: at most `chain` of them, relative to the largest gradient. */
static double allowed_of(const layer *l) {
  const layer_config *c = &l->c;
  double most = 4; /* what accumulates begins there */
  for (int t = 0; t < TENSORS; t++)
    for (int64_t i = 0; i < layer_count(&l->d[t]); i++) most = fmax(most, fabs(layer_get(l, &l->d[t], i)));
  return (double)(c->batch * (c->rows + c->keys) + c->d_model + c->d_kv + c->num_heads * (c->head_dim + c->head_dim_v) + 64) *
         (c->dtype == QKV_F64 ? 0x1p-53 : 0x1p-24) * most;
}

/* One gradient alone is what it is among all, and the others are not touched. */
static void chosen_gradients(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    const layer_config c = layer_config_random(800 + seed);
    layer l;
    layer_open(&l, &c);
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    const double allowed = allowed_of(&l);
    for (int only = 0; only < TENSORS; only++) {
      const int64_t n = layer_count(&l.d[only]);
      if (n == 0) continue;
      double *expected = malloc((size_t)n * sizeof *expected);
      assert_non_null(expected);
      for (int64_t i = 0; i < n; i++) expected[i] = layer_get(&l, &l.d[only], i);
      qkv_multihead_gradients g = qkv_multihead_gradients_default();
      qkv_projections *p = &g.projections;
      qkv_tensor *const to[TENSORS] = {&g.dx,  &g.dx_kv, &p->wq, &p->wk, &p->wv,   &p->wo,
                                       &p->bq, &p->bk,   &p->bv, &p->bo, &g.dbias, &g.dsinks};
      g.dy = l.g.dy;
      *to[only] = l.d[only].t;
      layer_clear(&l, &l.d[only]);
      size_t bytes;
      assert_int_equal(qkv_multihead_backward_scratch(NULL, &l.m, &g, &bytes), QKV_OK);
      void *scratch = malloc(bytes);
      assert_non_null(scratch);
      assert_int_equal(qkv_multihead_backward(NULL, &l.m, &g, scratch, bytes), QKV_OK);
      free(scratch);
      for (int64_t i = 0; i < n; i++)
        if (!(fabs(layer_get(&l, &l.d[only], i) - expected[i]) <= allowed))
          fail_msg("the gradient of %s alone is another; %s", layer_names[only], layer_text(&c));
      free(expected);
    }
    layer_close(&l);
  }
}

static void accumulation(void **state) {
  (void)state;
  int groups[TENSORS];
  for (int t = 0; t < TENSORS; t++) groups[t] = QKV_DPROJECTIONS;
  groups[X] = QKV_DX;
  groups[XKV] = QKV_DX_KV;
  groups[BIAS] = QKV_DBIAS;
  groups[SINKS] = QKV_DSINKS;
  for (uint64_t seed = 0; seed < 60; seed++) {
    const layer_config c = layer_config_random(900 + seed);
    layer l;
    double *expected[TENSORS];
    layer_open(&l, &c);
    layer_forward(&l, NULL);
    layer_backward(&l, NULL);
    const double allowed = allowed_of(&l);
    l.g.accumulate = 1 << seed % 5;
    for (int t = 0; t < TENSORS; t++) {
      const int64_t n = layer_count(&l.d[t]);
      expected[t] = malloc((size_t)(n + 1) * sizeof *expected[t]);
      assert_non_null(expected[t]);
      for (int64_t i = 0; i < n; i++) {
        const double old = (double)(i % 7 - 3);
        expected[t][i] = layer_get(&l, &l.d[t], i) + (groups[t] == l.g.accumulate ? old : 0);
        layer_set(&l, &l.d[t], i, groups[t] == l.g.accumulate ? old : NAN);
      }
    }
    layer_backward(&l, NULL);
    for (int t = 0; t < TENSORS; t++) {
      for (int64_t i = 0; i < layer_count(&l.d[t]); i++)
        if (!(fabs(layer_get(&l, &l.d[t], i) - expected[t][i]) <= allowed))
          fail_msg("%s with accumulate %d: element %d; %s", layer_names[t], (int)l.g.accumulate, (int)i, layer_text(&c));
      free(expected[t]);
    }
    layer_close(&l);
  }
}

/* The weights of chosen heads and rows, by the problem that lies in the activations. */
static void weights(void **state) {
  (void)state;
  layer_config c = layer_config_default();
  layer l;
  double w[2][3][5];
  c.causal = 1;
  c.num_heads = 4;
  c.rotary = HALF;
  layer_open(&l, &c);
  layer_forward(&l, NULL);
  qkv_problem p = qkv_problem_default();
  assert_int_equal(qkv_multihead_problem(&l.m, &p), QKV_OK);
  const qkv_region region = {1, 2, 1, 3, 2, 5};
  const qkv_tensor to = qkv_bhsd(w, QKV_F64, 2, 3, 5);
  assert_int_equal(qkv_scores(NULL, &p, QKV_WEIGHTS, &region, &to), QKV_OK);
  for (int h = 0; h < 2; h++)
    for (int i = 0; i < 3; i++) {
      double sum = 0, out = 0;
      for (int j = 0; j < 5; j++) {
        assert_true(j <= i + 2 ? w[h][i][j] > 0 : w[h][i][j] == 0);
        sum += w[h][i][j];
        out += w[h][i][j] * ((const double *)p.v.data)[p.v.stride[0] + (h + 1) / 2 * p.v.stride[1] + j * p.v.stride[2]];
      }
      const double is = ((const double *)p.out.data)[p.out.stride[0] + (h + 1) * p.out.stride[1] + (i + 2) * p.out.stride[2]];
      assert_true(fabs(sum - 1) < 1e-13 && fabs(out - is) < 1e-13);
    }
  char text[1024];
  assert_int_equal(qkv_describe(NULL, &p, text, sizeof text), QKV_OK);
  assert_non_null(strstr(text, "algorithm: flash"));
  qkv_problem empty;
  memset(&empty, 0, sizeof empty);
  assert_int_equal(qkv_multihead_problem(&l.m, &empty), QKV_BAD_SIZE);
  l.m.activations = NULL;
  l.m.activation_bytes = 0;
  assert_int_equal(qkv_multihead_problem(&l.m, &p), QKV_BAD_POINTER);
  layer_close(&l);
}

/* Parameters in one block: torch's order, no gaps, fused. */
static void parameters(void **state) {
  (void)state;
  for (int cross = 0; cross < 2; cross++)
    for (int biases = 0; biases < 2; biases++) {
      qkv_problem a = qkv_problem_default();
      qkv_multihead m = qkv_multihead_default();
      qkv_projections p;
      size_t bytes;
      m.attention = &a;
      m.d_model = 12;
      m.d_kv = cross ? 5 : 0;
      a.batch = 1;
      a.seqlen_q = a.seqlen_kv = 3;
      a.num_heads = 4;
      a.num_kv_heads = 2;
      assert_int_equal(qkv_projections_place(&m, biases, NULL, NULL, &bytes), QKV_OK);
      const int kv = cross ? 5 : 12, weights_in = 12 * 12 + 2 * 6 * kv;
      assert_int_equal(bytes, sizeof(float) * (size_t)(weights_in + 12 * 12 + (biases ? 12 + 6 + 6 + 12 : 0)));
      float *block = malloc(bytes);
      assert_non_null(block);
      assert_int_equal(qkv_projections_place(&m, biases, NULL, &p, NULL), QKV_BAD_POINTER);
      assert_int_equal(qkv_projections_place(&m, biases, block, &p, NULL), QKV_OK);
      assert_ptr_equal(p.wq.data, block);
      assert_ptr_equal(p.wk.data, block + 144);
      assert_ptr_equal(p.wv.data, block + 144 + 6 * kv);
      if (biases) {
        assert_ptr_equal(p.bq.data, block + weights_in);
        assert_ptr_equal(p.bk.data, block + weights_in + 12);
        assert_ptr_equal(p.bv.data, block + weights_in + 18);
        assert_ptr_equal(p.wo.data, block + weights_in + 24);
        assert_ptr_equal(p.bo.data, block + weights_in + 24 + 144);
      } else {
        assert_null(p.bq.data);
        assert_null(p.bo.data);
        assert_ptr_equal(p.wo.data, block + weights_in);
      }
      free(block);
    }
}

/* Nothing to do, in each way there is; what is written is the bias, or 0. */
static void empty(void **state) {
  (void)state;
  for (int gemm = 0; gemm < 2; gemm++)
    for (int which = 0; which < 4; which++) {
      layer_config c = layer_config_default();
      layer l;
      c.gemm = gemm;
      c.d_kv = 3;
      if (which == 0) c.batch = 0;
      if (which == 1) c.rows = 0;
      if (which == 2) c.keys = 0;
      if (which == 3) c.num_heads = c.num_kv_heads = 0;
      layer_open(&l, &c);
      clear(&l);
      layer_forward(&l, NULL);
      layer_backward(&l, NULL);
      for (int64_t i = 0; i < layer_count(&l.y); i++) assert_true(layer_get(&l, &l.y, i) == l.in[BO].value[i % l.y.n[3]]);
      for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < layer_count(&l.d[t]); i++)
          if (!(layer_get(&l, &l.d[t], i) == 0) && t != BO) fail_msg("gradient of %s is not 0; %s", layer_names[t], layer_text(&c));
      layer_close(&l);
    }
}

/* Sizes for a smaller batch or length are never larger. */
static void sizes(void **state) {
  (void)state;
  size_t last[3] = {0};
  for (int64_t n = 1; n <= 400; n += 7) {
    size_t now[3];
    qkv_problem a = qkv_problem_default();
    qkv_multihead m = qkv_multihead_default();
    m.attention = &a;
    m.d_model = 32;
    a.batch = 2;
    a.seqlen_q = n;
    a.num_heads = 4;
    assert_int_equal(qkv_multihead_activations(&m, &now[0]), QKV_OK);
    assert_int_equal(qkv_multihead_scratch(NULL, &m, &now[1]), QKV_OK);
    assert_int_equal(qkv_multihead_backward_scratch(NULL, &m, NULL, &now[2]), QKV_OK);
    for (int i = 0; i < 3; i++) {
      assert_true(now[i] >= last[i]);
      last[i] = now[i];
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(executors),  cmocka_unit_test(rows_that_do_not_exist), cmocka_unit_test(memory),
      cmocka_unit_test(weights),    cmocka_unit_test(allocation_and_cancel),  cmocka_unit_test(chosen_gradients),
      cmocka_unit_test(parameters), cmocka_unit_test(accumulation),           cmocka_unit_test(empty),
      cmocka_unit_test(sizes)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

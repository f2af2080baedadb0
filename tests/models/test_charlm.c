/* The model of examples/charlm: gradients against finite differences, threads, batches. */
#include <math.h>
#include <qkv/openmp.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "examples/models/blas.h"
#include "model.h"
#include "rng.h"

/* Heads x head_dim is not d_model, nothing is a multiple of anything else. */
static const lm_config small = {.vocabulary = 11, .context = 9, .d_model = 14, .d_ff = 21, .layers = 2, .heads = 4, .kv_heads = 2,
                                .head_dim = 5, .dropout = 0.25, .seed = 7};
enum { BATCH = 3, SEQLEN = 7, STEP = 5 };

static void draw_tokens(uint8_t *to, size_t count, int64_t vocabulary, uint64_t seed) {
  rng r = {seed, 0, 0};
  for (size_t i = 0; i < count; i++) to[i] = (uint8_t)rng_below(&r, vocabulary);
}

static double loss_f64(lm_f64 *m, const uint8_t *tokens, int backward) {
  char error[256] = "";
  double loss = 0;
  if (lm_loss_f64(m, tokens, BATCH, SEQLEN, STEP, backward, &loss, error, sizeof error)) fail_msg("%s", error);
  return loss;
}

/* Of each parameter, D(h) = (L(w + h) - L(w - h)) / 2h is the gradient but for a term in h^2, and rounding of L: so D(h/2) is off by
 * about a third of |D(h) - D(h/2)|, and (4 D(h/2) - D(h)) / 3 by less. L is a mean of sums of some thousand terms of order 1: 2^-44 is
 * 512 roundings, and the combination multiplies it by less than 8 / h. Dropout is a function of the step, so L is smooth. */
static void test_gradients(void **state) {
  (void)state;
  char error[256] = "";
  uint8_t tokens[BATCH * (SEQLEN + 1)];
  const qkv_context serial = qkv_context_default();
  lm_f64 m;
  draw_tokens(tokens, sizeof tokens, small.vocabulary, 1);
  if (lm_init_f64(&m, &small, BATCH, &serial, error, sizeof error)) fail_msg("%s", error);
  lm_fill_f64(&m, 3);
  for (int64_t i = 0; i < m.l.parameters; i++) m.parameters[i] += 0.1 * rng_normal_at(4, 1, (uint64_t)i); /* biases and norms too */
  loss_f64(&m, tokens, 1);
  const double h = 0x1p-12, rounding = 8 * 0x1p-44 / h;
  double largest = 0;
  int nonzero = 0;
  for (int t = 0; t < m.l.tensors; t++) {
    const lm_tensor *tensor = &m.l.tensor[t];
    for (int64_t i = 0; i < tensor->rows * tensor->columns; i++) {
      double *w = &m.parameters[tensor->offset + i], d[2];
      const double gradient = m.gradients[tensor->offset + i], old = *w;
      for (int k = 0; k < 2; k++) {
        const double step = k ? h / 2 : h;
        *w = old + step;
        const double above = loss_f64(&m, tokens, 0);
        *w = old - step;
        d[k] = (above - loss_f64(&m, tokens, 0)) / (2 * step);
      }
      *w = old;
      const double expected = (4 * d[1] - d[0]) / 3, bound = fabs(d[0] - d[1]) + rounding;
      if (!(fabs(gradient - expected) <= bound))
        fail_msg("%s[%lld]: gradient %.12g, finite differences %.12g, bound %.1e", tensor->name, (long long)i, gradient, expected, bound);
      if (fabs(gradient) > largest) largest = fabs(gradient);
      nonzero += fabs(gradient) > 1e4 * bound;
    }
  }
  /* The bounds say something: most gradients are much larger. */
  assert_true(largest > 0.01);
  assert_true(nonzero > m.l.parameters / 4);
  lm_free_f64(&m);
}

/* float follows double: the losses of a training step differ by rounding alone. */
static void test_types(void **state) {
  (void)state;
  char error[256] = "";
  uint8_t tokens[BATCH * (SEQLEN + 1)];
  const qkv_context serial = qkv_context_default();
  lm_f64 a;
  lm_f32 b;
  draw_tokens(tokens, sizeof tokens, small.vocabulary, 2);
  assert_int_equal(lm_init_f64(&a, &small, BATCH, &serial, error, sizeof error), 0);
  assert_int_equal(lm_init_f32(&b, &small, BATCH, &serial, error, sizeof error), 0);
  lm_fill_f64(&a, 3);
  lm_fill_f32(&b, 3);
  double first = 0, wide = 0, narrow = 0;
  for (int step = 1; step <= 30; step++) {
    const lm_step s = {step, 0.003, 0.9, 0.98, 0.1, 1};
    wide = loss_f64(&a, tokens, 1);
    assert_int_equal(lm_loss_f32(&b, tokens, BATCH, SEQLEN, STEP, 1, &narrow, error, sizeof error), 0);
    if (step == 1) first = wide;
    /* At first one forward pass in f32, of less than 2^10 roundings on the way to any value. */
    if (step == 1) assert_true(fabs(wide - narrow) < 0x1p-24 * 1024 * wide);
    lm_update_f64(&a, &s);
    lm_update_f32(&b, &s);
  }
  assert_true(wide < 0.7 * first); /* it learns these three lines by heart */
  assert_true(fabs(wide - narrow) < 0.01 * wide);
  lm_free_f64(&a);
  lm_free_f32(&b);
}

/* Losses and parameters after some steps of training, with one thread of the BLAS. */
static void train(int threads, int64_t batch, int steps, double *losses, float *parameters) {
  const lm_config c = {.vocabulary = 40, .context = 96, .d_model = 80, .d_ff = 200, .layers = 2, .heads = 6, .kv_heads = 3, .head_dim = 16,
                       .dropout = 0.1, .seed = 5};
  char error[256] = "";
  uint8_t *tokens = malloc((size_t)(batch * (c.context + 1)));
  qkv_context context = qkv_context_default();
  lm_f32 m;
  assert_non_null(tokens);
  if (threads > 1) qkv_openmp(&context, threads);
  assert_int_equal(lm_init_f32(&m, &c, batch, &context, error, sizeof error), 0);
  lm_fill_f32(&m, 1);
  for (int step = 1; step <= steps; step++) {
    const lm_step s = {step, 0.002, 0.9, 0.98, 0.1, 1};
    draw_tokens(tokens, (size_t)(batch * (c.context + 1)), c.vocabulary, (uint64_t)step);
    if (lm_loss_f32(&m, tokens, batch, c.context, step, 1, &losses[step - 1], error, sizeof error)) fail_msg("%s", error);
    lm_update_f32(&m, &s);
  }
  memcpy(parameters, m.parameters, (size_t)m.l.parameters * sizeof *parameters);
  lm_free_f32(&m);
  free(tokens);
}

/* Any number of threads: the same losses and the same parameters, bit for bit. */
static void test_threads(void **state) {
  (void)state;
  enum { STEPS = 4, FLOATS = 200000 };
  static float parameters[2][FLOATS];
  double losses[2][STEPS];
  for (int threads = 2; threads <= 5; threads++) {
    memset(parameters, 0, sizeof parameters);
    train(1, 7, STEPS, losses[0], parameters[0]);
    train(threads, 7, STEPS, losses[1], parameters[1]);
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    assert_memory_equal(parameters[0], parameters[1], sizeof parameters[0]);
    assert_true(losses[0][0] > losses[0][STEPS - 1] - 1 && parameters[0][100] != 0);
  }
}

/* The logits of a text do not see what follows, and are those of a batch. */
static void test_causal(void **state) {
  (void)state;
  char error[256] = "";
  uint8_t tokens[SEQLEN + 1];
  const double *logits;
  double before[11];
  const qkv_context serial = qkv_context_default();
  lm_f64 m;
  draw_tokens(tokens, sizeof tokens, small.vocabulary, 9);
  assert_int_equal(lm_init_f64(&m, &small, 1, &serial, error, sizeof error), 0);
  lm_fill_f64(&m, 3);
  assert_int_equal(lm_next_f64(&m, tokens, 4, &logits, error, sizeof error), 0);
  memcpy(before, logits, sizeof before);
  assert_int_equal(lm_next_f64(&m, tokens, SEQLEN, &logits, error, sizeof error), 0);
  for (int i = 0; i < 11; i++) assert_true(fabs(before[i] - m.logits[3 * 11 + i]) < 1e-12);
  int differs = 0;
  for (int i = 0; i < 11; i++) differs += fabs(before[i] - logits[i]) > 1e-3;
  assert_true(differs > 0);
  lm_free_f64(&m);
}

static void test_errors(void **state) {
  (void)state;
  static const struct {
    size_t field;
    int64_t value;
    const char *text;
  } cases[] = {{offsetof(lm_config, vocabulary), 257, "vocabulary is 257"}, {offsetof(lm_config, context), 0, "context is 0"},
               {offsetof(lm_config, layers), 17, "layers is 17"},           {offsetof(lm_config, kv_heads), 3, "kv_heads is 3, no divisor of heads, 4"},
               {offsetof(lm_config, head_dim), -1, "head_dim is -1"}};
  const qkv_context serial = qkv_context_default();
  char error[256];
  lm_f32 m;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    lm_config c = small;
    memcpy((char *)&c + cases[i].field, &cases[i].value, sizeof cases[i].value);
    error[0] = 0;
    assert_int_equal(lm_init_f32(&m, &c, 1, &serial, error, sizeof error), -1);
    if (!strstr(error, cases[i].text)) fail_msg("said: %s; wanted: %s", error, cases[i].text);
  }
}

int main(void) {
  blas_threads(1);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients), cmocka_unit_test(test_types), cmocka_unit_test(test_threads),
                                     cmocka_unit_test(test_causal), cmocka_unit_test(test_errors)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

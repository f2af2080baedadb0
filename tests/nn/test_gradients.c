/* Every gradient against finite differences of the plain computation. Those are in long double, of fourth order, at two steps h and 2 h:
 * the truncation is h^4 f'''''/30 and shows in the difference of the two (its 15-fold); rounding, N operations of u = 2^-64 each,
 * divided by h. The library's own rounding is far below: the bounds of test_forward.c are around 1e-13 in f64. */
#include "layer.h"

#include <math.h>
#include <stdlib.h>

static const double STEP = 0x1p-12;

static long double difference(layer *l, double *value, double h) {
  static const int at[4] = {-2, -1, 1, 2};
  static const double weight[4] = {1, -8, 8, -1};
  const double old = *value;
  long double sum = 0;
  for (int i = 0; i < 4; i++) {
    *value = old + at[i] * h; /* exact enough: h is a power of two, and old about 1 */
    const double taken = *value - old;
    assert_true(fabs(taken - at[i] * h) <= 1e-15);
    sum += weight[i] * layer_loss(l);
  }
  *value = old;
  return sum / (12 * (long double)h);
}

static double largest(const layer *l, const layer_tensor *d) {
  double most = 0;
  for (int64_t i = 0; i < layer_count(d); i++) most = fmax(most, fabs(layer_get(l, d, i)));
  return most;
}

/* Gradients of f64 within what differences can tell; f32 is compared with f64 below. */
static void check_gradients(const layer_config *c) {
  layer l;
  layer_open(&l, c);
  layer_forward(&l, NULL);
  layer_backward(&l, NULL);
  for (int t = 0; t < TENSORS; t++) {
    const int64_t n = layer_count(&l.in[t]), step = n > 40 ? n / 40 : 1;
    for (int64_t i = 0; i < n; i += step) {
      const double got = layer_get(&l, &l.d[t], i);
      const long double fine = difference(&l, &l.in[t].value[i], STEP), coarse = difference(&l, &l.in[t].value[i], 2 * STEP);
      const double allowed = (double)fabsl(fine - coarse) + 1e-11 * (1 + largest(&l, &l.d[t]));
      if (!(fabsl(got - fine) <= allowed))
        fail_msg("gradient of %s[%d] is %.15g, not %.15Lg (allowed: %g); %s", layer_names[t], (int)i, got, fine, allowed, layer_text(c));
      assert_true(fabsl(fine - coarse) <= 1e-6L * (1 + fabsl(fine))); /* else the differences say nothing */
    }
    layer_gaps(&l, &l.d[t], layer_names[t]);
  }
  layer_close(&l);
}

static void each_option(void **state) {
  (void)state;
  for (int cross = 0; cross < 2; cross++)
    for (int option = 0; option < 14; option++) {
      layer_config c = layer_config_default();
      c.rows = c.keys = 4;
      if (cross) c.d_kv = 5, c.keys = 3;
      switch (option) {
      case 0: break;
      case 1: c.num_heads = 4; break;
      case 2: c.causal = 1; break;
      case 3: c.window = 1; break;
      case 4: c.dropout = 0.3; break;
      case 5: c.softcap = 2; break;
      case 6: c.bias = c.sinks = 1; break;
      case 7: c.rotary = HALF; break;
      case 8: c.rotary = INTERLEAVED; break;
      case 9: c.rotary = BY_IDS; break;
      case 10: c.lengths = PADDED, c.rotary = HALF; break;
      case 11: c.lengths = LEFT_PADDED, c.rotary = BY_IDS; break;
      case 12: c.lengths = RAGGED, c.rotary = HALF; break;
      default: c.biases = 0, c.d_out = 3, c.head_dim_v = 3;
      }
      check_gradients(&c);
    }
}

static void layouts(void **state) {
  (void)state;
  for (int layout = 0; layout < LAYOUTS; layout++)
    for (int weights = 0; weights < WEIGHT_LAYOUTS; weights++) {
      layer_config c = layer_config_default();
      c.rows = c.keys = 3;
      c.layout = layout;
      c.weights = weights;
      c.lengths = weights;
      check_gradients(&c);
    }
}

static void drawn(void **state) {
  (void)state;
  const int64_t count = test_scale(60);
  for (int64_t i = 0; i < count; i++) {
    layer_config c = layer_config_random(5000 + (uint64_t)i);
    c.dtype = QKV_F64;
    if (c.rows > 9) c.rows = 9, c.keys = c.d_kv ? c.keys : 9;
    check_gradients(&c);
  }
}

/* The same layer in both types, of f32 values. What f32 loses is at most its roundings: a chain of N = all extents one behind the other,
 * each relative to the largest of what is summed; 1 + score^2 for what softmax and its derivative amplify. */
static void in_f32(void **state) {
  (void)state;
  const int64_t count = test_scale(200);
  double worst = 0;
  for (int64_t n = 0; n < count; n++) {
    layer_config c = layer_config_random(9000 + (uint64_t)n);
    layer narrow, wide;
    c.dtype = QKV_F32;
    layer_open(&narrow, &c);
    c.dtype = QKV_F64;
    layer_open(&wide, &c);
    for (int t = 0; t < TENSORS; t++)
      for (int64_t i = 0; i < layer_count(&wide.in[t]); i++) layer_set(&wide, &wide.in[t], i, layer_get(&narrow, &narrow.in[t], i));
    for (int64_t i = 0; i < layer_count(&wide.dy); i++) layer_set(&wide, &wide.dy, i, layer_get(&narrow, &narrow.dy, i));
    layer_forward(&narrow, NULL);
    layer_forward(&wide, NULL);
    layer_backward(&narrow, NULL);
    layer_backward(&wide, NULL);
    double everything = 1; /* the largest gradient: sums cancel, so each is measured by what it may be made of */
    for (int t = 0; t < TENSORS; t++) everything = fmax(everything, largest(&wide, &wide.d[t]));
    const double chain = (double)(c.batch * (c.rows + c.keys) + c.d_model + c.d_kv + c.num_heads * (c.head_dim + c.head_dim_v) + 64);
    for (int t = 0; t < TENSORS; t++)
      for (int64_t i = 0; i < layer_count(&wide.d[t]); i++) {
        const double a = layer_get(&narrow, &narrow.d[t], i), b = layer_get(&wide, &wide.d[t], i);
        const double ratio = fabs(a - b) / (chain * 0x1p-24 * everything);
        if (!(ratio <= 1)) fail_msg("f32 gradient of %s[%d] is %g, in f64 %g; %s", layer_names[t], (int)i, a, b, layer_text(&c));
        worst = fmax(worst, ratio);
      }
    layer_close(&narrow);
    layer_close(&wide);
  }
  print_message("largest difference of f32 from f64 / allowed: %.3f\n", worst);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(each_option), cmocka_unit_test(layouts), cmocka_unit_test(drawn),
                                     cmocka_unit_test(in_f32)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

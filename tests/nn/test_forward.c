/* The layer against the plain computation, within the bound that is computed beside it. */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double worst;

static void compare(const layer *l) {
  const int64_t n = layer_count(&l->y);
  long double *y = malloc((size_t)(n + 1) * sizeof *y);
  double *bound = malloc((size_t)(n + 1) * sizeof *bound);
  assert_true(y != NULL && bound != NULL);
  layer_naive(l, y, bound);
  for (int64_t i = 0; i < n; i++) {
    const double got = layer_get(l, &l->y, i), error = (double)fabsl(got - y[i]);
    if (!(error <= bound[i]))
      fail_msg("y[%d] is %.17g, not %.17g: off by %g, allowed %g; %s", (int)i, got, (double)y[i], error, bound[i], layer_text(&l->c));
    if (bound[i] > 0 && error / bound[i] > worst) worst = error / bound[i];
  }
  free(y);
  free(bound);
}

static void run(const layer_config *c) {
  layer l;
  layer_open(&l, c);
  layer_forward(&l, NULL);
  compare(&l);
  layer_gaps(&l, &l.y, "y");
  layer_close(&l);
}

static void named(void **state) {
  (void)state;
  for (int32_t dtype = QKV_F32; dtype <= QKV_F64; dtype++)
    for (int layout = 0; layout < LAYOUTS; layout++)
      for (int weights = 0; weights < WEIGHT_LAYOUTS; weights++)
        for (int lengths = 0; lengths < LENGTHS; lengths++) {
          layer_config c = layer_config_default();
          c.dtype = dtype;
          c.layout = layout;
          c.weights = weights;
          c.lengths = lengths;
          run(&c);
          c.d_kv = 7;
          c.keys = 3;
          c.rotary = HALF;
          run(&c);
        }
}

static void drawn(void **state) {
  (void)state;
  const int64_t count = test_scale(400);
  for (int64_t i = 0; i < count; i++) {
    const layer_config c = layer_config_random(1000 + (uint64_t)i);
    run(&c);
  }
  print_message("largest error / bound: %.3f\n", worst);
}

/* Pieces of products: more rows than one has. */
static void many_rows(void **state) {
  (void)state;
  for (int gemm = 0; gemm < 2; gemm++) {
    layer_config c = layer_config_default();
    c.dtype = QKV_F32;
    c.gemm = gemm;
    c.rows = c.keys = 600;
    c.batch = 1;
    c.causal = 1;
    run(&c);
    c.lengths = PADDED;
    c.batch = 2;
    run(&c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(named), cmocka_unit_test(drawn), cmocka_unit_test(many_rows)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}

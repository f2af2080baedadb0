/* Random problems with sparse terms: everything that can be proved of them. */
#include "pattern.h"

#include <stdlib.h>

static uint64_t seed(void) {
  const char *text = getenv("QKV_TEST_SEED");
  return text != NULL ? strtoull(text, NULL, 10) : 41;
}

static void prove(uint64_t index, double cost, unsigned what) {
  problem_spec spec;
  problem_random_sparse(seed(), index, cost, &spec);
  const prove_options options = {what, NULL};
  prove_report report;
  if (prove_problem(&spec, &options, &report)) {
    return;
  }
  char text[PROBLEM_TEXT_BYTES];
  prove_shrink(&spec, &options, 100);
  prove_problem(&spec, &options, &report);
  problem_print(&spec, text, sizeof text);
  fail_msg("%s\n  replay: qkv check --problem \"%s\"", report.text, text);
}

static void test_forward(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(250); n++) {
    prove((uint64_t)n, 1e5, PROVE_FORWARD | PROVE_WAYS);
  }
}

static void test_backward(void **state) {
  (void)state;
  for (int64_t n = 0; n < test_scale(150); n++) {
    prove((uint64_t)n + 10000, 4e4, PROVE_BACKWARD | PROVE_WAYS);
  }
}

/* Texts of these problems come back. */
static void test_texts(void **state) {
  (void)state;
  for (uint64_t n = 0; n < 500; n++) {
    problem_spec spec, again;
    char text[PROBLEM_TEXT_BYTES], other[PROBLEM_TEXT_BYTES], error[256];
    problem_random_sparse(3, n, 1e6, &spec);
    problem_print(&spec, text, sizeof text);
    if (!problem_parse(text, &again, error, sizeof error)) {
      fail_msg("%s: %s", text, error);
    }
    problem_print(&again, other, sizeof other);
    assert_string_equal(text, other);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_texts),
    cmocka_unit_test(test_forward),
    cmocka_unit_test(test_backward),
};

TEST_MAIN(tests)

/* Golden digests: a 64-bit hash of the outputs of some hundred problems, committed, so that machines that never meet are
 * compared.
 *
 *   test_digest --write FILE    writes the file from the scalar reference. Only when the order number changes, or
 *                               problems are added
 */
#include "common.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGESTS = 300 };

static const char *const by_hand[] = {
    "f32 h2/1 q3 k70 d64 causal lse seed:1",
    "f32 h1 q2 k1600 d16 window:1400,0 lse seed:2",
    "f64 h1 q2 k1600 d3/5 causal lse seed:3",
    "f32 h2 q9 k70 d8 softcap:5 bias alibi sinks lse seed:4",
    "f64 h2 q9 k70 d8 softcap:5 bias alibi sinks lse seed:5",
    "f32 h2 q9 k140 d8 big lse seed:6",
    "f32 h2 q9 k140 d8 tiny lse seed:7",
    "f32 h2 q9 k140 d8 standard causal lse seed:8",
    "f64 h2 q9 k140 d8 standard softcap:1 lse seed:9",
    "f32 b3 h2 q20 k200 d4 ragged lengths kvpos causal lse seed:10",
    "f32 h2 q9 k70 d5 biasinf lse seed:11",
    "f32 h2 q9 k70 d5 biaslow lse seed:12",
    "f32 h1 q1 k4200 d8 kvpos lse seed:13",
    "f32 h2 q65 k65 d128 causal lse seed:14",
    "f32 h1 q5 k20 d256/40 softcap:0.5 big lse seed:15",
    "f16 h2/1 q9 k140 d33/20 causal bias lse seed:16",
    "bf16 h2/1 q9 k140 d33/20 causal bias lse seed:17",
    "f32 h2/1 q9 k140 d16 kv:f16 out:bf16 window:50,3 lse seed:18",
    "f16 h2 q9 k70 d7 q:f32 big standard lse seed:19",
};
enum { BY_HAND = sizeof by_hand / sizeof by_hand[0] };

static void digest_text(int n, char text[PROBLEM_TEXT_BYTES]) {
  if (n < BY_HAND) {
    snprintf(text, PROBLEM_TEXT_BYTES, "%s", by_hand[n]);
    return;
  }
  problem_spec spec;
  problem_random(1, (uint64_t)n, 3e4, &spec);
  /* No words that concern the backward pass alone. */
  spec.dlse = spec.accumulate = false;
  spec.want = 0;
  memset(spec.summed, 0, sizeof spec.summed);
  memset(spec.gradient_dtype, 0, sizeof spec.gradient_dtype);
  problem_print(&spec, text, PROBLEM_TEXT_BYTES);
}

static bool digest_of(const char *isa, const char *text, uint64_t *digest, char *error, size_t bytes) {
  problem_case c;
  if (!problem_open(&c, text, 0, error, bytes)) {
    return false;
  }
  qkv_context context = test_context(isa);
  qkv_status status = qkv_forward(&context, &c.problem, NULL, 0);
  if (status != QKV_OK) {
    snprintf(error, bytes, "%s", qkv_status_text(status));
  } else {
    *digest = compare_digest(&c.problem);
  }
  problem_free(&c);
  return status == QKV_OK;
}

static int write_digests(const char *path) {
  FILE *file = fopen(path, "w");
  if (file == NULL) {
    fprintf(stderr, "%s: cannot be written\n", path);
    return 1;
  }
  fprintf(file, "# Digests of order %d, by the scalar reference: test_digest --write FILE\n", (int)qkv_order());
  for (int n = 0; n < DIGESTS; n++) {
    char text[PROBLEM_TEXT_BYTES], error[256];
    uint64_t digest = 0;
    digest_text(n, text);
    if (!digest_of("reference", text, &digest, error, sizeof error)) {
      fprintf(stderr, "%s: %s\n", text, error);
      fclose(file);
      return 1;
    }
    fprintf(file, "%016" PRIx64 " %s\n", digest, text);
  }
  return fclose(file) == 0 ? 0 : 1;
}

static void test_digests(void **state) {
  (void)state;
  const char *path = getenv("QKV_TEST_DIGESTS");
  FILE *file = fopen(path != NULL ? path : QKV_DIGESTS, "r");
  char line[PROBLEM_TEXT_BYTES + 32];
  int count = 0, wrong = 0;
  if (file == NULL) {
    fail_msg("%s cannot be read", path != NULL ? path : QKV_DIGESTS);
  }
  while (fgets(line, sizeof line, file) != NULL) {
    char *text, error[256];
    uint64_t expected = strtoull(line, &text, 16), digest = 0;
    if (line[0] == '#' || *text != ' ') {
      continue;
    }
    text[strcspn(text, "\n")] = 0;
    count++;
    for (int isa = 0; isa < test_isas; isa++) {
      if (!digest_of(test_isa[isa], text + 1, &digest, error, sizeof error)) {
        print_error("isa %s: %s: %s\n", test_isa[isa], text + 1, error);
        wrong++;
      } else if (digest != expected) {
        print_error("isa %s: digest %016" PRIx64 ", not %016" PRIx64 ": %s\n", test_isa[isa], digest, expected, text + 1);
        wrong++;
      }
    }
  }
  fclose(file);
  if (wrong > 0) {
    fail_msg("%d digests differ", wrong);
  }
  assert_true(count >= DIGESTS);
}

/* The data of a problem are part of its digest: an element of each kind, by value. */
static void test_data_of_problems(void **state) {
  (void)state;
  problem_case c;
  test_open(&c, 0, "f64 h2 q3 k4 d5 bias alibi sinks seed:42");
  const qkv_problem *p = &c.problem;
  const struct {
    const qkv_tensor *t;
    int64_t at;
    double value;
  } expected[] = {{&p->q, 7, 0x1.12c32c7c2129p+1}, {&p->k, 8, -0x1.14af2e7c0b0dp+1}, {&p->v, 9, 0x1.586bea83a6cp-1},
                  {&p->bias, 10, -0x1.69abfp+0},   {&p->alibi_slopes, 1, 0x1.fp-2},  {&p->sinks, 1, 0x1.07d47ca8c42ap+2}};
  for (size_t n = 0; n < sizeof expected / sizeof expected[0]; n++) {
    double found = problem_load(expected[n].t, expected[n].at);
    if (!(found >= expected[n].value && found <= expected[n].value)) {
      fail_msg("value %d is %a, not %a", (int)n, found, expected[n].value);
    }
  }
  problem_free(&c);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_digests),
    cmocka_unit_test(test_data_of_problems),
};

int main(int argc, char **argv) {
  test_find_isas();
  if (argc == 3 && strcmp(argv[1], "--write") == 0) {
    return write_digests(argv[2]);
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Golden digests of gradients: a 64-bit hash of those of some hundred problems, committed, so that machines that never meet are
 * compared. tests/variants compares other builds and processors with the same file.
 *
 *   test_backward_digest --write FILE    writes the file from the scalar reference. Only when the order number changes, or
 *                                        problems are added
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradients.h"

enum { DIGESTS = 200 };

static const char *const by_hand[] = {
    "f32 h2/1 q3 k70 d64 causal seed:1",
    "f64 h1 q66 k130 d3/5 causal dlse seed:2",
    "f32 h2 q70 k70 d8 softcap:5 bias alibi sinks dlse seed:3",
    "f64 h2 q9 k70 d8 softcap:5 bias:b1h1 alibi sinks seed:4",
    "f32 h2 q9 k140 d8 big seed:5",
    "f32 h2 q9 k140 d8 tiny seed:6",
    "f32 h2 q70 k140 d8 standard causal dropout:0.1 seed:7",
    "f32 b3 h2 q80 k200 d4 ragged lengths kvpos causal dropout:0.5 origin seed:8",
    "f32 h2 q9 k70 d5 biasinf dbias:h1 seed:9",
    "f32 h2 q65 k65 d128 causal seed:10",
    "f16 h2/1 q9 k140 d33/20 causal bias seed:11",
    "bf16 h2/1 q9 k140 d33/20 causal bias seed:12",
    "f32 h2/1 q9 k140 d16 kv:f16 out:bf16 window:50,3 dq:bf16 seed:13",
    "f32 b2 h4/2 q70 k30 d8 sinks dsinks:b1h1 bias dbias:b1h1q1k1 acc seed:14",
};
enum { BY_HAND = sizeof by_hand / sizeof by_hand[0] };

static void digest_text(int n, char text[PROBLEM_TEXT_BYTES]) {
  problem_spec spec;
  if (n < BY_HAND) {
    assert_true(problem_parse(by_hand[n], &spec, NULL, 0));
  } else {
    problem_random(2, (uint64_t)n, 1e4, &spec);
  }
  spec.lse = true;
  problem_print(&spec, text, PROBLEM_TEXT_BYTES);
}

static bool digest_of(const char *isa, const char *text, uint64_t *digest, char *error, size_t bytes) {
  problem_case c;
  problem_gradients g;
  if (!problem_open(&c, text, 0, error, bytes)) {
    return false;
  }
  if (!problem_gradients_build(&g, &c, 0)) {
    snprintf(error, bytes, "no memory");
    problem_free(&c);
    return false;
  }
  qkv_context context = test_context(isa);
  qkv_status status = qkv_forward(&context, &c.problem, NULL, 0);
  status = status == QKV_OK ? qkv_backward(&context, &c.problem, &g.g, NULL, 0) : status;
  if (status != QKV_OK) {
    snprintf(error, bytes, "%s", qkv_status_text(status));
  } else {
    *digest = compare_gradients_digest(&c.problem, &g.g);
  }
  problem_gradients_free(&g);
  problem_free(&c);
  return status == QKV_OK;
}

static int write_digests(const char *path) {
  FILE *file = fopen(path, "w");
  if (file == NULL) {
    fprintf(stderr, "%s: cannot be written\n", path);
    return 1;
  }
  fprintf(file, "# Digests of gradients of order %d, by the scalar reference: test_backward_digest --write FILE\n",
          (int)qkv_order());
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
  FILE *file = fopen(QKV_DIGESTS, "r");
  char line[PROBLEM_TEXT_BYTES + 32];
  int count = 0, wrong = 0;
  if (file == NULL) {
    fail_msg("%s cannot be read", QKV_DIGESTS);
  }
  while (fgets(line, sizeof line, file) != NULL) {
    char *text, error[256];
    uint64_t expected = strtoull(line, &text, 16), digest = 0;
    if (line[0] == '#' || *text != ' ') {
      continue;
    }
    text[strcspn(text, "\n")] = 0;
    count++;
    EVERY_ISA {
      if (!digest_of(ISA, text + 1, &digest, error, sizeof error)) {
        print_error("isa %s: %s: %s\n", ISA, text + 1, error);
        wrong++;
      } else if (digest != expected) {
        print_error("isa %s: digest %016" PRIx64 ", not %016" PRIx64 ": %s\n", ISA, digest, expected, text + 1);
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

/* The data are part of a digest: an element of each kind, by value. */
static void test_data_of_gradients(void **state) {
  (void)state;
  sample s;
  sample_open(&s, 0, "f64 h2 q3 k4 d5 sinks dlse dropout:0.25 origin acc want:qkv seed:42");
  const qkv_gradients *g = &s.g.g;
  const qkv_problem *p = &s.c.problem;
  const struct {
    const qkv_tensor *t;
    int64_t at;
    double value;
  } expected[] = {{&g->dout, 7, -0x1.89ab75b569fcp+0},
                  {&g->dlse, 4, 0x1.7998ebf78b14p-1},
                  {&g->dq, 3, -0x1.478ffbe492cp-1},
                  {&g->dk, 3, -0x1.104db17b34d5p+1}};
  assert_true(p->seed == UINT64_C(0xd075d74436e46f35) && p->offset == UINT64_C(0x5c1c23f2cccdfe44));
  assert_int_equal(p->batch_origin, 2508870065);
  assert_int_equal(p->head_origin, 12);
  assert_int_equal(p->heads_total, 14);
  assert_int_equal(g->accumulate, QKV_DQ | QKV_DK);
  for (size_t n = 0; n < COUNT(expected); n++) {
    double found = problem_load(expected[n].t, expected[n].at);
    if (!(found >= expected[n].value && found <= expected[n].value)) {
      fail_msg("value %d is %a, not %a", (int)n, found, expected[n].value);
    }
  }
  sample_free(&s);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_digests),
    cmocka_unit_test(test_data_of_gradients),
};

int main(int argc, char **argv) {
  test_find_isas();
  if (argc == 3 && strcmp(argv[1], "--write") == 0) {
    return write_digests(argv[2]);
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}

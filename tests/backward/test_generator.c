/* Combinations of features, random problems and every size in use: gradients against the oracle, against a second reading of the
 * text of the arithmetic, and the same bits on every instruction set, executor, path and cut into entries and heads.
 * QKV_TEST_SEED changes the seed, QKV_TEST_SCALE (percent) the number. */
#include "gradients.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"
#include "second.h"

static uint64_t seed(void) {
  const char *text = getenv("QKV_TEST_SEED");
  return text != NULL ? strtoull(text, NULL, 10) : 0;
}

/* ---- Every pair of features ---------------------------------------------------------------------------------------- */

/* One word or more of each line at a time. Every two of different lines meet in a problem. */
enum { LEVELS = 8 };
static const char *const features[][LEVELS] = {
    {"f32", "f64", "f16", "bf16", "f32 kv:f16 out:bf16"},
    {"", "standard"},
    {"h1", "h2", "h4/2", "h3/1"},
    {"b1", "b2", "b3"},
    {"q1 k70", "q70 k65", "q65 k130", "q66 k20", "q9 k520"},
    {"d8", "d16/24", "d33/20", "d64/8", "d5/3"},
    {"", "start", "pos"},
    {"", "causal", "window:20,3", "causal or:prefix:5", "documents", "documents2 dense", "dense:30", "tile"},
    {"", "bias", "biasinf:h1", "biaslow:b1q1", "bias:b1h1", "biasinf:k1"},
    {"", "dbias:full", "dbias:b1h1", "dbias:h1q1", "dbias:q1k1", "dbias:b1h1q1k1"},
    {"", "alibi", "alibi:b"},
    {"", "sinks", "sinks:b"},
    {"", "dsinks:b1h1", "dsinks:full", "dsinks:h1"},
    {"", "softcap:3", "softcap:30"},
    {"", "scale:0.3", "scale:-0.7"},
    {"", "lengths"},
    {"", "kvpos"},
    {"", "ragged", "ragged:q", "ragged:kv"},
    {"", "dropout:0.1", "dropout:0.5 origin", "dropout:1"},
    {"", "dlse"},
    {"", "bshd", "odd", "neg", "broadcast"},
    {"", "nan", "visnan"},
    {"", "big", "tiny", "ones"},
    {"", "acc"},
    {"", "want:q", "want:kv", "want:bs", "want:qk", "want:v"},
    {"", "dout:f32 dq:f16 dk:bf16 dv:f32 dbias:f16", "dout:f16 dq:f32 dk:f32 dv:bf16 dbias:f32"},
};
enum { FEATURES = sizeof features / sizeof features[0] };

static int levels(int feature) {
  int n = 0;
  while (n < LEVELS && features[feature][n] != NULL) {
    n++;
  }
  return n;
}

typedef struct pairs {
  bool met[FEATURES][LEVELS][FEATURES][LEVELS];
  int64_t left;
} pairs;

/* How many pairs of this level with those chosen (a level, or -1) have not met. */
static int gain(const pairs *p, const int *chosen, int feature, int level) {
  int n = 0;
  for (int other = 0; other < FEATURES; other++) {
    n += other != feature && chosen[other] >= 0 && !p->met[feature][level][other][chosen[other]];
  }
  return n;
}

/* A row of levels that begins with a pair that has not met, completed by the level with the most new pairs each. */
static void choose(pairs *p, rng *r, int chosen[FEATURES]) {
  for (int f = 0; f < FEATURES; f++) {
    chosen[f] = -1;
  }
  bool found = false;
  for (int a = 0; a < FEATURES && !found; a++) {
    for (int la = 0; la < levels(a) && !found; la++) {
      for (int b = a + 1; b < FEATURES && !found; b++) {
        for (int lb = 0; lb < levels(b) && !found; lb++) {
          if (!p->met[a][la][b][lb]) {
            chosen[a] = la;
            chosen[b] = lb;
            found = true;
          }
        }
      }
    }
  }
  int first = (int)rng_below(r, FEATURES);
  for (int n = 0; n < FEATURES; n++) {
    int f = (first + n) % FEATURES, best = -1, most = -1, start = (int)rng_below(r, levels(f));
    for (int k = 0; k < levels(f) && chosen[f] < 0; k++) {
      int level = (start + k) % levels(f), new = gain(p, chosen, f, level);
      if (new > most) {
        most = new;
        best = level;
      }
    }
    chosen[f] = chosen[f] < 0 ? best : chosen[f];
  }
  for (int a = 0; a < FEATURES; a++) {
    for (int b = 0; b < FEATURES; b++) {
      if (a != b && !p->met[a][chosen[a]][b][chosen[b]]) {
        p->met[a][chosen[a]][b][chosen[b]] = true;
        p->left--;
      }
    }
  }
}

static void test_every_pair_of_features(void **state) {
  (void)state;
  pairs *p = test_alloc(sizeof *p);
  rng r = {seed(), 7, 0};
  int64_t count = 0, most = test_scale(300);
  for (int a = 0; a < FEATURES; a++) {
    for (int b = 0; b < FEATURES; b++) {
      p->left += a != b ? levels(a) * levels(b) : 0;
    }
  }
  for (; p->left > 0 && count < most; count++) {
    int chosen[FEATURES];
    char text[PROBLEM_TEXT_BYTES] = "";
    size_t used = 0;
    choose(p, &r, chosen);
    for (int f = 0; f < FEATURES; f++) {
      if (f + 1 == FEATURES && chosen[0] == 1) {
        continue; /* f64 has no other types */
      }
      used += (size_t)snprintf(text + used, sizeof text - used, "%s ", features[f][chosen[f]]);
    }
    snprintf(text + used, sizeof text - used, "seed:%d", (int)count);
    backward_prove_text(PROVE_WAYS, text);
  }
  if (p->left == 0) {
    print_message("%d problems\n", (int)count);
  }
  free(p);
}

/* ---- Random problems and sizes ------------------------------------------------------------------------------------- */

static void test_random_problems(void **state) {
  (void)state;
  int64_t count = test_scale(200);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    problem_random(seed() + 3, (uint64_t)n, n % 16 == 0 ? 1e6 : 1e5, &spec);
    backward_prove(&spec, n % 2 == 0 ? PROVE_WAYS : PROVE_WAYS & ~(unsigned)PROVE_FORCED);
  }
}

static void test_second_reading(void **state) {
  (void)state;
  int64_t count = test_scale(400);
  for (int64_t n = 0; n < count; n++) {
    problem_spec spec;
    sample s;
    problem_gradients again;
    char text[PROBLEM_TEXT_BYTES];
    problem_random(seed() + 4, (uint64_t)n, 3e4, &spec);
    sample_build(&s, 0, &spec);
    assert_true(problem_gradients_build(&again, &s.c, 0));
    problem_print(&spec, text, sizeof text);
    backward_run("reference", &s.c.problem, &s.g.g);
    assert_true(second_backward(&s.c.problem, &again.g));
    backward_same(&s.c.problem, &s.g.g, &s.c.problem, &again.g, "reference and second reading: %s", text);
    problem_gradients_free(&again);
    sample_free(&s);
  }
}

static void test_head_dims(void **state) {
  (void)state;
  static const int dims[] = {1,  2,  3,  5,   7,   8,   15,  16,  17,  31,  32,  33,  46,  63,  64,
                             65, 80, 96, 104, 127, 128, 129, 160, 192, 255, 256, 257, 320, 512, 576};
  for (size_t n = 0; n < COUNT(dims); n += stride_of(COUNT(dims))) {
    char text[PROBLEM_TEXT_BYTES];
    int other = dims[(n * 7 + 3) % COUNT(dims)], at = (int)n;
    const char *dtype = n % 3 == 0 ? "f64" : n % 3 == 1 ? "f32" : "bf16";
    snprintf(text, sizeof text, "f32 h2/1 q%d k%d d%d causal seed:%d", 5 + at % 12, 64 + at % 5, dims[n], at);
    backward_prove_text(PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS | (n % 4 == 0 ? PROVE_FORCED : 0), text);
    snprintf(text, sizeof text, "%s q%d k20 d%d/%d softcap:4 dlse seed:%d", dtype, 1 + at, dims[n], other, at);
    backward_prove_text(PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
  }
}

static void test_lengths(void **state) {
  (void)state;
  static const int q[] = {1, 2, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257};
  static const int k[] = {0, 1, 2, 63, 64, 65, 127, 129, 513};
  static const char *const options[] = {"",
                                        "causal",
                                        "window:63,1",
                                        "causal kvpos",
                                        "lengths",
                                        "nan causal",
                                        "dropout:0.3 bias causal",
                                        "sinks dlse softcap:2",
                                        "alibi kvpos"};
  int n = 0;
  for (size_t a = 0; a < COUNT(q); a++) {
    for (size_t b = 0; b < COUNT(k); b++) {
      char text[PROBLEM_TEXT_BYTES];
      snprintf(text, sizeof text, "%s q%d k%d d%d/%d %s seed:%d", n % 3 == 2 ? "f64" : "f32", q[a], k[b], 1 + n % 9,
               1 + n % 11, options[n % (int)COUNT(options)], n);
      if (n % (int)stride_of(COUNT(q) * COUNT(k)) == 0) {
        backward_prove_text(PROVE_ISAS | PROVE_ORACLE | PROVE_GUARDS, text);
      }
      n++;
    }
  }
}

static void test_head_counts(void **state) {
  (void)state;
  static const char *const heads[] = {"h12/12", "h32/8", "h28/4", "h8/1", "h9/3", "h71/1", "h1/1"};
  static const char *const shapes[] = {"q1 k130", "q5 k70 causal bias:h1", "q33 k33 window:4,4 dropout:0.2 origin",
                                       "b2 q3 k200 sinks alibi lengths"};
  for (size_t a = 0; a < COUNT(heads); a += stride_of(COUNT(heads))) {
    for (size_t b = 0; b < COUNT(shapes); b++) {
      char text[PROBLEM_TEXT_BYTES];
      snprintf(text, sizeof text, "f32 %s %s d8 seed:%d", heads[a], shapes[b], (int)(a * 8 + b));
      backward_prove_text(PROVE_WAYS & ~(unsigned)PROVE_FORCED, text);
    }
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_every_pair_of_features),
    cmocka_unit_test(test_random_problems),
    cmocka_unit_test(test_second_reading),
    cmocka_unit_test(test_head_dims),
    cmocka_unit_test(test_lengths),
    cmocka_unit_test(test_head_counts),
};

TEST_MAIN(tests)

/* What the core tests share. Every helper fails the running test with the text of the problem, which `qkv check --problem`
 * replays. */
#ifndef QKV_TESTS_CORE_COMMON_H
#define QKV_TESTS_CORE_COMMON_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>

#include "compare.h"
#include "executor.h"
#include "oracle.h"
#include "problem_text.h"
#include "prove.h"
#include "qkv/qkv.h"

#if defined(__GNUC__) || defined(__clang__)
#define TEST_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define TEST_PRINTF(string, first)
#endif

/* The instruction sets that run here, the best first and "reference" last; capped by the environment's QKV_TEST_ISA. */
extern const char *test_isa[PROVE_MAX_ISAS];
extern int test_isas;
/* n, or the share of it that the environment's QKV_TEST_SCALE (percent) asks for, at least 1. */
int64_t test_scale(int64_t n);

qkv_context test_context(const char *isa);
/* Builds the problem of a text. */
TEST_PRINTF(3, 4) void test_open(problem_case *c, unsigned flags, const char *format, ...);
/* Runs a problem; the status must be QKV_OK. */
void test_run(const char *isa, const qkv_problem *p);
/* out and lse must have the same bits. */
TEST_PRINTF(3, 4) void test_same(const qkv_problem *a, const qkv_problem *b, const char *format, ...);
/* The result must be within the oracle's bound. */
TEST_PRINTF(2, 3) void test_accurate(const qkv_problem *p, const char *format, ...);

/* A copy of a problem with outputs of its own, contiguous and filled with NaN. */
typedef struct test_copy {
  qkv_problem p;
  void *out, *lse;
} test_copy;
void test_copy_make(test_copy *copy, const qkv_problem *p);
void test_copy_free(test_copy *copy);

/* A contiguous (batch, head, row, column) copy of an input; free(t.data). */
qkv_tensor test_dense_copy(const qkv_problem *p, const qkv_tensor *t, char side, int64_t heads, int64_t columns);

/* Zeroed memory; fails the test if there is none. */
void *test_alloc(size_t bytes);

/* Runs a group of tests and returns the number of failures. */
#define TEST_MAIN(tests)                                \
  int main(void) {                                      \
    test_find_isas();                                   \
    return cmocka_run_group_tests((tests), NULL, NULL); \
  }
void test_find_isas(void);

#endif

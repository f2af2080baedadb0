/* What the backward tests share. Every helper fails the running test with the text of the problem, which `qkv check --problem`
 * replays. */
#ifndef QKV_TESTS_BACKWARD_GRADIENTS_H
#define QKV_TESTS_BACKWARD_GRADIENTS_H

#include "common.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define EVERY_ISA    for (int isa_index = 0; isa_index < test_isas; isa_index++)
/* But the scalar reference, which is slow: the generator proves that it has the bits of the others. */
#define EVERY_KERNEL for (int isa_index = 0; isa_index < (test_isas > 1 ? test_isas - 1 : 1); isa_index++)
#define ISA          (test_isa[isa_index])

/* A problem with its gradients; the forward pass is done. Not to be moved. */
typedef struct sample {
  problem_case c;
  problem_gradients g;
} sample;
/* Of a text, which need not ask for lse. */
TEST_PRINTF(3, 4) void sample_open(sample *s, unsigned flags, const char *format, ...);
void sample_build(sample *s, unsigned flags, const problem_spec *spec);
void sample_free(sample *s);

/* Runs the backward pass; the status must be QKV_OK. */
void backward_run(const char *isa, const qkv_problem *p, const qkv_gradients *g);
/* The gradients must have the same bits. */
TEST_PRINTF(5, 6)
void backward_same(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                   const char *format, ...);
/* The gradients must be within the oracle's bound. before: what stood in those that accumulate, or NULL. */
TEST_PRINTF(4, 5)
void backward_accurate(const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before, const char *format, ...);
/* All that can be proved of a problem's backward pass; `what` as for prove_problem. A problem that fails is made smaller. */
void backward_prove(const problem_spec *spec, unsigned what);
void backward_prove_text(unsigned what, const char *text);

/* Gradients with outputs of their own, contiguous and filled with NaN, for a problem of p's extents. dout and dlse, which outputs
 * there are, their dtypes and the axes that are summed over are those of g. */
typedef struct gradients_copy {
  qkv_gradients g;
  void *memory[PROBLEM_GRADIENT_TENSORS];
} gradients_copy;
void gradients_copy_make(gradients_copy *copy, const qkv_problem *p, const qkv_gradients *g);
void gradients_copy_free(gradients_copy *copy);

/* A contiguous copy of a tensor of problem `from` for the extents of problem `to`, which has at least its rows; zeros elsewhere.
 * dtype: 0: that of t. side: 'q' or 'k'. free(t.data). */
qkv_tensor repacked(const qkv_problem *from, const qkv_tensor *t, char side, const qkv_problem *to, int64_t heads,
                    int64_t columns, int32_t dtype);
/* Multiplies each value of a tensor of p. */
void scale_values(const qkv_problem *p, const qkv_tensor *t, char side, int64_t heads, int64_t columns, double factor);
/* Multiplies each value of gradient `which`. */
void scale_gradient(const qkv_problem *p, const qkv_gradients *g, int which, double factor);
/* How far to go from one of `count` cases to the next: 1, or more where QKV_TEST_SCALE asks for less than a half of them. */
size_t stride_of(size_t count);
int64_t value_dim(const qkv_problem *p);
/* Fails unless every element of the gradient is 0. */
void expect_zeros(const qkv_problem *p, const qkv_gradients *g, int which, const char *what);

#endif

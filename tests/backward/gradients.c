#include "gradients.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t stride_of(size_t count) {
  size_t some = (size_t)test_scale(2 * (int64_t)count) + 1;
  return some < count ? (count + some - 1) / some : 1;
}

int64_t value_dim(const qkv_problem *p) { return p->head_dim_v > 0 ? p->head_dim_v : p->head_dim; }

void sample_build(sample *s, unsigned flags, const problem_spec *spec) {
  problem_spec with_lse = *spec;
  with_lse.lse = true;
  if (!problem_build(&s->c, &with_lse, flags) || !problem_gradients_build(&s->g, &s->c, flags)) {
    fail_msg("no memory");
  }
  test_run(test_isa[0], &s->c.problem);
}

void sample_open(sample *s, unsigned flags, const char *format, ...) {
  char text[PROBLEM_TEXT_BYTES], error[256];
  problem_spec spec;
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (!problem_parse(text, &spec, error, sizeof error)) {
    fail_msg("%s", error);
  }
  sample_build(s, flags, &spec);
}

void sample_free(sample *s) {
  problem_gradients_free(&s->g);
  problem_free(&s->c);
}

void backward_run(const char *isa, const qkv_problem *p, const qkv_gradients *g) {
  qkv_context c = test_context(isa);
  qkv_status status = qkv_backward(&c, p, g, NULL, 0);
  if (status != QKV_OK) {
    char text[256];
    qkv_backward_check(p, g, text, sizeof text);
    fail_msg("isa %s: status %d, %s: %s", isa, (int)status, qkv_status_text(status), text);
  }
}

void backward_same(const qkv_problem *a, const qkv_gradients *ga, const qkv_problem *b, const qkv_gradients *gb,
                   const char *format, ...) {
  compare_report report;
  if (!compare_gradients(a, ga, b, gb, &report)) {
    char text[PROBLEM_TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fail_msg("%s: %s", text, report.text);
  }
}

void backward_accurate(const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before, const char *format, ...) {
  compare_report report;
  if (!compare_gradients_oracle(p, g, before, &report)) {
    char text[PROBLEM_TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fail_msg("%s: %s", text, report.text);
  }
}

void backward_prove(const problem_spec *spec, unsigned what) {
  const prove_options options = {PROVE_BACKWARD | what, NULL};
  prove_report report;
  if (prove_problem(spec, &options, &report)) {
    return;
  }
  problem_spec small = *spec;
  char text[PROBLEM_TEXT_BYTES], first[sizeof report.text];
  memcpy(first, report.text, sizeof first);
  prove_shrink(&small, &options, 200);
  if (prove_problem(&small, &options, &report)) {
    small = *spec;
    memcpy(report.text, first, sizeof first);
  }
  problem_print(&small, text, sizeof text);
  fail_msg("%s\n  replay: qkv check --problem \"%s\"", report.text, text);
}

void backward_prove_text(unsigned what, const char *text) {
  problem_spec spec;
  char error[256];
  if (!problem_parse(text, &spec, error, sizeof error)) {
    fail_msg("%s", error);
  }
  backward_prove(&spec, what);
}

void gradients_copy_make(gradients_copy *copy, const qkv_problem *p, const qkv_gradients *g) {
  memset(copy, 0, sizeof *copy);
  copy->g = *g;
  qkv_tensor *tensors[PROBLEM_GRADIENT_TENSORS] = {&copy->g.dout, &copy->g.dlse,  &copy->g.dq,    &copy->g.dk,
                                                   &copy->g.dv,   &copy->g.dbias, &copy->g.dsinks};
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    qkv_tensor *t = tensors[which];
    if (t->data == NULL) {
      continue;
    }
    int64_t n[4];
    problem_gradient_extents(p, g, which, n);
    if (which < PROBLEM_DBIAS) { /* rows of a ragged batch together */
      bool kv = which == PROBLEM_DK || which == PROBLEM_DV;
      bool ragged = (kv ? p->cu_seqlens_kv : p->cu_seqlens_q) != NULL;
      n[0] = ragged ? 1 : p->batch;
      n[2] = kv ? p->seqlen_kv : p->seqlen_q;
    }
    size_t bytes = (size_t)(n[0] * n[1] * n[2] * n[3]) * problem_dtype_of(t->dtype)->size;
    copy->memory[which] = test_alloc(bytes);
    memset(copy->memory[which], 0xff, bytes);
    t->data = copy->memory[which];
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
      bool summed = which >= PROBLEM_DBIAS && n[axis] == 1;
      t->stride[axis] = summed ? 0 : stride;
      stride *= n[axis];
    }
  }
}

void gradients_copy_free(gradients_copy *copy) {
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    free(copy->memory[which]);
  }
}

qkv_tensor repacked(const qkv_problem *from, const qkv_tensor *t, char side, const qkv_problem *to, int64_t heads,
                    int64_t columns, int32_t dtype) {
  bool ragged = (side == 'q' ? to->cu_seqlens_q : to->cu_seqlens_kv) != NULL;
  int64_t rows = side == 'q' ? to->seqlen_q : to->seqlen_kv, batch = ragged ? 1 : to->batch;
  dtype = dtype != 0 ? dtype : t->dtype;
  void *memory = test_alloc((size_t)(batch * heads * rows * columns) * problem_dtype_of(dtype)->size);
  qkv_tensor made = qkv_bhsd(memory, dtype, heads, rows, columns);
  for (int64_t b = 0; b < from->batch; b++) {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < (side == 'q' ? problem_rows(from, b) : problem_keys(from, b)); i++) {
        for (int64_t x = 0; x < columns; x++) {
          problem_store(&made, problem_offset(to, &made, side, b, h, i, x),
                        problem_load(t, problem_offset(from, t, side, b, h, i, x)));
        }
      }
    }
  }
  return made;
}

void scale_values(const qkv_problem *p, const qkv_tensor *t, char side, int64_t heads, int64_t columns, double factor) {
  for (int64_t b = 0; b < p->batch; b++) {
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < (side == 'q' ? problem_rows(p, b) : problem_keys(p, b)); i++) {
        for (int64_t x = 0; x < columns; x++) {
          int64_t at = problem_offset(p, t, side, b, h, i, x);
          problem_store(t, at, factor * problem_load(t, at));
        }
      }
    }
  }
}

/* Calls `visit` with each offset of a gradient. */
static void every_element(const qkv_problem *p, const qkv_gradients *g, int which,
                          void (*visit)(const qkv_tensor *t, int64_t offset, double factor, const char *what), double factor,
                          const char *what) {
  int64_t n[4], at[4];
  problem_gradient_extents(p, g, which, n);
  for (at[0] = 0; at[0] < n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n[2]; at[2]++) {
        for (at[3] = 0; at[3] < n[3]; at[3]++) {
          if (problem_gradient_has(p, g, which, at)) {
            visit(problem_gradient(g, which), problem_gradient_offset(p, g, which, at), factor, what);
          }
        }
      }
    }
  }
}

static void scale_element(const qkv_tensor *t, int64_t offset, double factor, const char *what) {
  (void)what;
  problem_store(t, offset, factor * problem_load(t, offset));
}
void scale_gradient(const qkv_problem *p, const qkv_gradients *g, int which, double factor) {
  every_element(p, g, which, scale_element, factor, NULL);
}

static void zero_element(const qkv_tensor *t, int64_t offset, double factor, const char *what) {
  double value = problem_load(t, offset);
  (void)factor;
  if (!(value >= 0 && value <= 0)) {
    fail_msg("%s: element %d is %g, not 0", what, (int)offset, value);
  }
}
void expect_zeros(const qkv_problem *p, const qkv_gradients *g, int which, const char *what) {
  char text[256];
  snprintf(text, sizeof text, "%s: %s", what, problem_gradient_name(which));
  every_element(p, g, which, zero_element, 0, text);
}

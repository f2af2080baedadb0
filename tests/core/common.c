#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *test_isa[PROVE_MAX_ISAS];
int test_isas;

void test_find_isas(void) {
  const char *only = getenv("QKV_TEST_ISA");
  test_isas = prove_isas(test_isa);
  if (only != NULL) {
    int kept = 0;
    for (int n = 0; n < test_isas; n++) {
      if (strcmp(test_isa[n], only) == 0 || strcmp(test_isa[n], "reference") == 0) {
        test_isa[kept++] = test_isa[n];
      }
    }
    if (kept < 2 && strcmp(only, "reference") != 0) {
      fprintf(stderr, "QKV_TEST_ISA: %s does not run here\n", only);
      exit(1);
    }
    test_isas = kept;
  }
  if (test_isas == 0) {
    fprintf(stderr, "no instruction set runs here: qkv_describe names none\n");
    exit(1);
  }
}

int64_t test_scale(int64_t n) {
  const char *percent = getenv("QKV_TEST_SCALE");
  if (percent != NULL) {
    n = (int64_t)((double)n * strtod(percent, NULL) / 100);
  }
  return n > 1 ? n : 1;
}

qkv_context test_context(const char *isa) {
  qkv_context c = qkv_context_default();
  c.isa_cap = isa;
  return c;
}

void test_open(problem_case *c, unsigned flags, const char *format, ...) {
  char text[PROBLEM_TEXT_BYTES], error[256];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (!problem_open(c, text, flags, error, sizeof error)) {
    fail_msg("%s", error);
  }
}

void test_run(const char *isa, const qkv_problem *p) {
  qkv_context c = test_context(isa);
  qkv_status status = qkv_forward(&c, p, NULL, 0);
  if (status != QKV_OK) {
    char text[256];
    qkv_check(p, text, sizeof text);
    fail_msg("isa %s: status %d, %s: %s", isa, (int)status, qkv_status_text(status), text);
  }
}

void test_same(const qkv_problem *a, const qkv_problem *b, const char *format, ...) {
  compare_report report;
  if (!compare_outputs(a, b, &report)) {
    char text[PROBLEM_TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fail_msg("%s: %s", text, report.text);
  }
}

void test_accurate(const qkv_problem *p, const char *format, ...) {
  compare_report report;
  if (!compare_oracle(p, 1, &report)) {
    char text[PROBLEM_TEXT_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fail_msg("%s: %s", text, report.text);
  }
}

void *test_alloc(size_t bytes) {
  void *memory = calloc(bytes + 1, 1);
  if (memory == NULL) {
    fail_msg("no memory");
  }
  return memory;
}

void test_copy_make(test_copy *copy, const qkv_problem *p) {
  copy->p = *p;
  int32_t lse = p->q.dtype == QKV_F64 ? QKV_F64 : QKV_F32;
  size_t size = problem_dtype_of(p->out.dtype)->size, lse_size = problem_dtype_of(lse)->size;
  int64_t dv = p->head_dim_v > 0 ? p->head_dim_v : p->head_dim;
  size_t rows = (size_t)((p->cu_seqlens_q != NULL ? 1 : p->batch) * p->num_heads * p->seqlen_q);
  copy->out = test_alloc(rows * (size_t)dv * size);
  copy->lse = test_alloc(rows * lse_size);
  memset(copy->out, 0xff, rows * (size_t)dv * size);
  memset(copy->lse, 0xff, rows * lse_size);
  copy->p.out = qkv_bhsd(copy->out, p->out.dtype, p->num_heads, p->seqlen_q, dv);
  copy->p.lse = qkv_bhs(copy->lse, lse, p->num_heads, p->seqlen_q);
}

void test_copy_free(test_copy *copy) {
  free(copy->out);
  free(copy->lse);
}

qkv_tensor test_dense_copy(const qkv_problem *p, const qkv_tensor *t, char side, int64_t heads, int64_t columns) {
  bool ragged = (side == 'q' && p->cu_seqlens_q != NULL) || (side == 'k' && p->cu_seqlens_kv != NULL);
  int64_t rows = side == 'q' ? p->seqlen_q : p->seqlen_kv, batch = ragged ? 1 : p->batch;
  void *memory = test_alloc((size_t)(batch * heads * rows * columns) * problem_dtype_of(t->dtype)->size);
  qkv_tensor to = qkv_bhsd(memory, t->dtype, heads, rows, columns);
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t n = side == 'q' ? problem_rows(p, b) : problem_keys(p, b);
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t i = 0; i < n; i++) {
        for (int64_t x = 0; x < columns; x++) {
          problem_store(&to, problem_offset(p, &to, side, b, h, i, x),
                        problem_load(t, problem_offset(p, t, side, b, h, i, x)));
        }
      }
    }
  }
  return to;
}

#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int32_t all_types[4] = {QKV_F32, QKV_F64, QKV_F16, QKV_BF16};

const char *type_name(int32_t dtype) { return problem_dtype_of(dtype)->name; }

array array_make(int32_t dtype, int layout, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  static const int order[LAYOUTS][4] = {{3, 2, 1, 0}, {3, 1, 2, 0}, {3, 2, 1, 0}, {2, 3, 1, 0}}; /* fastest axis first */
  array a = {.n = {batch, heads, rows, columns}};
  const size_t size = problem_dtype_of(dtype)->size;
  const int gaps = layout == ODD || layout == NEGATIVE;
  int64_t pitch = gaps ? 2 : 1, origin = 0;
  a.t.dtype = dtype;
  for (int k = 0; k < 4; k++) {
    const int axis = order[layout][k];
    const int64_t sign = layout == NEGATIVE && k % 2 == 0 ? -1 : 1;
    a.t.stride[axis] = sign * pitch;
    if (sign < 0 && a.n[axis] > 0) {
      origin += (a.n[axis] - 1) * pitch;
    }
    pitch = pitch * (a.n[axis] > 0 ? a.n[axis] : 1) + (gaps ? 3 : 0);
  }
  a.bytes = (size_t)(pitch + 1) * size;
  a.memory = malloc(a.bytes);
  assert_non_null(a.memory);
  memset(a.memory, 0xff, a.bytes);
  a.t.data = a.memory + (size_t)origin * size;
  return a;
}

void array_free(array *a) { free(a->memory); }

static void *at(const array *a, int64_t b, int64_t h, int64_t i, int64_t x) {
  const int64_t *s = a->t.stride;
  return (unsigned char *)a->t.data + (b * s[0] + h * s[1] + i * s[2] + x * s[3]) * (int64_t)problem_dtype_of(a->t.dtype)->size;
}

double array_get(const array *a, int64_t b, int64_t h, int64_t i, int64_t x) {
  return problem_dtype_of(a->t.dtype)->load(at(a, b, h, i, x));
}

void array_set(array *a, int64_t b, int64_t h, int64_t i, int64_t x, double value) {
  problem_dtype_of(a->t.dtype)->store(at(a, b, h, i, x), value);
}

#define EACH(a)                                 \
  for (int64_t b = 0; b < (a)->n[0]; b++)       \
    for (int64_t h = 0; h < (a)->n[1]; h++)     \
      for (int64_t i = 0; i < (a)->n[2]; i++)   \
        for (int64_t x = 0; x < (a)->n[3]; x++)

void array_random(array *a, uint64_t seed) {
  uint64_t count = 0;
  EACH(a) array_set(a, b, h, i, x, rng_normal_at(seed, 1, count++));
}

void array_copy(array *to, const array *from) { EACH(to) array_set(to, b, h, i, x, array_get(from, b, h, i, x)); }

void array_same(const array *a, const array *b_array, const char *format, ...) {
  const size_t size = problem_dtype_of(a->t.dtype)->size;
  assert_int_equal(a->t.dtype, b_array->t.dtype);
  EACH(a) if (memcmp(at(a, b, h, i, x), at(b_array, b, h, i, x), size) != 0) {
    const double u = array_get(a, b, h, i, x), v = array_get(b_array, b, h, i, x);
    char text[256];
    va_list list;
    if (u != u && v != v) {
      continue;
    }
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fail_msg("%s: (%d, %d, %d, %d) is %a, not %a", text, (int)b, (int)h, (int)i, (int)x, v, u);
  }
}

void array_gaps(const array *a, const char *format, ...) {
  const size_t size = problem_dtype_of(a->t.dtype)->size;
  unsigned char *seen = calloc(a->bytes, 1);
  assert_non_null(seen);
  EACH(a) memset(seen + ((unsigned char *)at(a, b, h, i, x) - a->memory), 1, size);
  for (size_t n = 0; n < a->bytes; n++) {
    if (!seen[n] && a->memory[n] != 0xff) {
      char text[256];
      va_list list;
      va_start(list, format);
      vsnprintf(text, sizeof text, format, list);
      va_end(list);
      fail_msg("%s: byte %zu between the elements was written", text, n);
    }
  }
  free(seen);
}

void same_under_executors(position_call call, const void *arguments, array *result, const char *what) {
  unsigned char *expected = malloc(result->bytes), *before = malloc(result->bytes);
  assert_true(expected != NULL && before != NULL);
  memcpy(before, result->memory, result->bytes); /* of a call in place */
  assert_int_equal(call(NULL, arguments), QKV_OK);
  memcpy(expected, result->memory, result->bytes);
  for (int kind = 0; kind < EXECUTOR_KINDS; kind++) {
    executor e = executor_make((executor_kind)kind, 3, 5);
    qkv_context context = executor_context(&e);
    memcpy(result->memory, before, result->bytes);
    assert_int_equal(call(&context, arguments), QKV_OK);
    if (memcmp(expected, result->memory, result->bytes) != 0) {
      fail_msg("%s: executor %s gives other bits", what, executor_name((executor_kind)kind));
    }
  }
  free(before);
  free(expected);
}

/* What the tests of positions share: tensors of four axes in any layout and type, read and written as doubles. */
#ifndef QKV_TESTS_POSITION_COMMON_H
#define QKV_TESTS_POSITION_COMMON_H

#include "../core/common.h"
#include "qkv/position.h"
#include "rng.h"

enum { DENSE, SWAPPED, ODD, NEGATIVE, LAYOUTS }; /* (b, h, row, column); (b, row, h, column); with gaps; backwards with gaps */

typedef struct array {
  qkv_tensor t;
  int64_t n[4];
  unsigned char *memory; /* bytes of 0xff where no element is */
  size_t bytes;
} array;

extern const int32_t all_types[4]; /* F32, F64, F16, BF16 */
const char *type_name(int32_t dtype);

array array_make(int32_t dtype, int layout, int64_t batch, int64_t heads, int64_t rows, int64_t columns);
void array_free(array *a);
double array_get(const array *a, int64_t b, int64_t h, int64_t i, int64_t x);
void array_set(array *a, int64_t b, int64_t h, int64_t i, int64_t x, double value);
/* Bell-shaped values. */
void array_random(array *a, uint64_t seed);
/* Values of `from`, rounded if need be. */
void array_copy(array *to, const array *from);
/* Fails the test unless all elements have the same bits, in any layouts. */
TEST_PRINTF(3, 4) void array_same(const array *a, const array *b, const char *format, ...);
/* Fails the test if memory between the elements was written. */
TEST_PRINTF(2, 3) void array_gaps(const array *a, const char *format, ...);

/* Runs something under every executor and compares its result with that of a call without a context. */
typedef qkv_status (*position_call)(const qkv_context *context, const void *arguments);
void same_under_executors(position_call call, const void *arguments, array *result, const char *what);

/* |x| <= bound, which a NaN is not. */
static inline bool within(double x, double bound) { return x <= bound && -x <= bound; }

#endif

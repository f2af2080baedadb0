/* Checked sizes. Each function returns 0 and leaves *r alone when the result does not fit. */
#ifndef QKV_BASE_SIZE_H
#define QKV_BASE_SIZE_H

#include <stddef.h>
#include <stdint.h>

static inline int qkv__mul(int64_t a, int64_t b, int64_t *r) { /* a, b >= 0 */
  if (b != 0 && a > INT64_MAX / b) return 0;
  *r = a * b;
  return 1;
}
static inline int qkv__add(int64_t a, int64_t b, int64_t *r) { /* a, b >= 0 */
  if (a > INT64_MAX - b) return 0;
  *r = a + b;
  return 1;
}

/* One piece of code measures and carves the scratch: with base NULL it only adds up. */
typedef struct qkv__carver {
  char *base;
  size_t used;
  int overflow;
} qkv__carver;

enum { QKV_CARVE_ALIGN = 64 };

static inline void *qkv__carve(qkv__carver *c, int64_t count, size_t element) {
  size_t n = (size_t)count;
  if (count < 0 || (uint64_t)count > SIZE_MAX / 2 || (element != 0 && n > (SIZE_MAX / 4) / element)) {
    c->overflow = 1;
    return NULL;
  }
  n = (n * element + QKV_CARVE_ALIGN - 1) / QKV_CARVE_ALIGN * QKV_CARVE_ALIGN;
  if (n > SIZE_MAX / 2 - c->used) {
    c->overflow = 1;
    return NULL;
  }
  void *p = c->base ? c->base + c->used : NULL;
  c->used += n;
  return p;
}

#endif

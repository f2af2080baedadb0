/* The textbook baseline: the whole score tensor in memory, softmax in place, then the values. Three passes over all
 * tasks. */
#ifndef QKV_ATTENTION_STANDARD_H
#define QKV_ATTENTION_STANDARD_H

#include "schedule/schedule.h"

typedef struct qkv__standard {
  qkv__engine g;
  int64_t tasks; /* one per panel */
  int64_t keys;  /* rows of a panel's scores: the most keys of an entry, and room for a block that begins within */
  char *scores;  /* [tasks][keys][w] */
  char *sums;    /* [tasks][2][w]: m, l */
  char *worker_memory;
  size_t worker_bytes;
} qkv__standard;

/* With memory NULL only adds up. Returns the bytes, SIZE_MAX if they do not fit. */
size_t qkv__standard_layout(qkv__standard *s, int workers, void *memory);
qkv_status qkv__standard_run(const qkv_context *c, qkv__standard *s);

#endif

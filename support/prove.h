/* Everything that must hold for one problem text: result and gradients against the oracle, and the same bits on every
 * instruction set, with any executor, thread count and forced path, and for each batch entry and key-value head alone. */
#ifndef QKV_SUPPORT_PROVE_H
#define QKV_SUPPORT_PROVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "problem_text.h"

enum { PROVE_MAX_ISAS = 8 };

/* The instruction sets that run here, the scalar reference last. Returns their number. */
int prove_isas(const char *names[PROVE_MAX_ISAS]);
/* The value of the line `name: value` of qkv_describe, copied; false if there is none. */
bool prove_fact(const char *text, const char *name, char *value, size_t bytes);

enum {
  PROVE_ISAS = 1,      /* every instruction set */
  PROVE_EXECUTORS = 2, /* executors and thread counts */
  PROVE_FORCED = 4,    /* QKV_FORCE_... on every instruction set */
  PROVE_SPLIT = 8,     /* entries and heads alone */
  PROVE_ORACLE = 16,
  PROVE_GUARDS = 32, /* guard pages around all memory */
  PROVE_WAYS = 63,   /* these; and of which call: */
  PROVE_FORWARD = 64,
  PROVE_BACKWARD = 128, /* the gradients, of what the scalar reference gives as out and lse */
  PROVE_ALL = 255
};

typedef struct prove_options {
  unsigned what;
  const char *isa; /* only this and the reference; NULL: all */
} prove_options;

typedef struct prove_report {
  bool passed;
  double worst;   /* error / bound of the reference */
  int64_t runs;   /* calls of qkv_forward and qkv_backward */
  char text[512]; /* what failed first */
} prove_report;

bool prove_problem(const problem_spec *spec, const prove_options *options, prove_report *report);

/* Makes a failing problem smaller while it keeps failing: extents halved, options dropped. At most `tries` attempts. */
void prove_shrink(problem_spec *spec, const prove_options *options, int tries);

#endif

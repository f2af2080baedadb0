#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem_text.h"

#define LN2 0.693147180559945309417232121458176568L

struct oracle {
  const qkv_problem *p;
  int32_t arithmetic;
  int64_t dv, capacity, keys; /* keys of the entry at hand */
  int64_t entry, kv_head;     /* whose panel is loaded; -1: none */
  bool fast; /* QKV_FAST may apply */
  double unit, step, largest, flush, exp_ulp, tanh_ulp;
  double out_unit, out_step, out_largest; /* of 16-bit results; 0: none */
  void *memory;
  void *k, *v, *q, *s, *eta, *w, *e, *mean, *size, *error, *most, *least, *peak;
  int *column_kind;
  unsigned char *sees;
  /* of the last row */
  bool wild;
  int kind;
  double max, sum, low, sums;
};

/* ---- Positions and visibility -------------------------------------------------------------------------------------- */

static int64_t first_key(const qkv_problem *p, int64_t b) { return p->kv_begin != NULL ? p->kv_begin[b] : 0; }
static int64_t end_key(const qkv_problem *p, int64_t b) {
  return p->kv_length != NULL ? p->kv_length[b] : problem_keys(p, b);
}
static int64_t first_position(const qkv_problem *p, int64_t b) { return p->kv_position != NULL ? p->kv_position[b] : 0; }
static int64_t query_count(const qkv_problem *p, int64_t b) {
  return p->q_length != NULL ? p->q_length[b] : problem_rows(p, b);
}

int64_t oracle_key_position(const qkv_problem *p, int64_t b, int64_t j) {
  return first_position(p, b) + j - first_key(p, b);
}

int64_t oracle_query_position(const qkv_problem *p, int64_t b, int64_t i, int32_t align) {
  switch (align) {
  case QKV_ALIGN_START: return i + first_position(p, b) - first_key(p, b);
  case QKV_ALIGN_EXPLICIT: return i + (p->q_position != NULL ? p->q_position[b] : 0);
  default: return i + first_position(p, b) + (end_key(p, b) - first_key(p, b)) - query_count(p, b);
  }
}

static int32_t document_id(const qkv_tensor *t, int64_t b, int64_t at, int axis) {
  int64_t offset = (b != 0 ? b * t->stride[0] : 0) + (at != 0 ? at * t->stride[axis] : 0);
  return ((const int32_t *)t->data)[offset];
}

static bool term_sees(const qkv_problem *p, const qkv_mask *m, int64_t b, int64_t h, int64_t i, int64_t j) {
  int64_t query = oracle_query_position(p, b, i, p->align), key = oracle_key_position(p, b, j);
  switch (m->kind) {
  case QKV_MASK_CAUSAL: return key <= (m->a == QKV_ALIGN_START ? oracle_query_position(p, b, i, QKV_ALIGN_START) : query);
  case QKV_MASK_WINDOW: return (m->a < 0 || query - key <= m->a) && (m->b < 0 || key - query <= m->b);
  case QKV_MASK_PREFIX: return key < m->a;
  case QKV_MASK_DOCUMENT: {
    int32_t id = document_id(&m->t, b, j, 3);
    if (m->u.data != NULL) {
      return document_id(&m->u, b, i, 2) == id;
    }
    int64_t own = query - first_position(p, b) + first_key(p, b); /* the key at the query's position */
    return own >= first_key(p, b) && own < end_key(p, b) && document_id(&m->t, b, own, 3) == id;
  }
  case QKV_MASK_DENSE: {
    if (j < m->a) {
      return true;
    }
    const int64_t at[4] = {b, h, i, j - m->a};
    int64_t offset = 0;
    for (int axis = 0; axis < 4; axis++) {
      offset += at[axis] != 0 ? at[axis] * m->t.stride[axis] : 0;
    }
    return ((const uint8_t *)m->t.data)[offset] != 0;
  }
  default: {
    uint64_t bits[64] = {0};
    const qkv_tile tile = {b, h, i, 1, j, 1, query, key};
    int32_t answer = m->fn(m->user, &tile, bits);
    return answer == QKV_TILE_ALL || (answer == QKV_TILE_SOME && (bits[0] & 1) != 0);
  }
  }
}

bool oracle_visible(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (i >= query_count(p, b) || j < first_key(p, b) || j >= end_key(p, b)) {
    return false;
  }
  for (int64_t n = 0; n < p->mask_count;) {
    bool any = false;
    do {
      any = any || term_sees(p, &p->mask[n], b, h, i, j);
      n++;
    } while (n < p->mask_count && p->mask[n].join == QKV_OR);
    if (!any) {
      return false;
    }
  }
  return true;
}

static int64_t per_head_offset(const qkv_problem *p, const qkv_tensor *t, int64_t b, int64_t h) {
  return problem_offset(p, t, 'h', b, h, 0, 0);
}

/* ---- Rows in two precisions ---------------------------------------------------------------------------------------- */

#define REAL      double
#define ROW(name) double_##name
#define EXP       exp
#define LOG       log
#define TANH      tanh
#define FABS      fabs
#define SQRT      sqrt
#include "oracle_row.inc"
#undef REAL
#undef ROW
#undef EXP
#undef LOG
#undef TANH
#undef FABS
#undef SQRT

#define REAL      long double
#define ROW(name) long_##name
#define EXP       expl
#define LOG       logl
#define TANH      tanhl
#define FABS      fabsl
#define SQRT      sqrtl
#include "oracle_row.inc"

oracle *oracle_new(const qkv_problem *p) {
  oracle *o = calloc(1, sizeof *o);
  if (o == NULL) {
    return NULL;
  }
  o->p = p;
  o->arithmetic = p->q.dtype == QKV_F64 ? QKV_F64 : QKV_F32;
  o->dv = p->head_dim_v > 0 ? p->head_dim_v : p->head_dim;
  o->entry = o->kv_head = -1;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t n = problem_keys(p, b);
    o->capacity = n > o->capacity ? n : o->capacity;
  }
  bool wide = o->arithmetic == QKV_F64;
  /* Where long double is no wider than double the oracle's own rounding counts as much as that of the library. */
  o->unit = wide ? 0x1p-53 + (double)(LDBL_EPSILON / 2) : 0x1p-24;
  o->step = wide ? 0x1p-1074 : 0x1p-149;
  o->largest = wide ? DBL_MAX : (double)FLT_MAX;
  o->flush = wide ? 0x1p-1020 : 0x1p-124;
  o->exp_ulp = wide ? 2 : 1.2;
  o->tanh_ulp = wide ? 8 : 5.2;
  o->fast = p->arithmetic == QKV_FAST && p->algorithm == QKV_FLASH && p->q.dtype == QKV_BF16 && p->k.dtype == QKV_BF16 &&
            p->v.dtype == QKV_BF16;
  if (o->fast) { /* its instructions take subnormal numbers for zero */
    o->step = (double)FLT_MIN;
  }
  const problem_dtype *out = problem_dtype_of(p->out.dtype);
  if (out != NULL && out->size == 2) {
    o->out_unit = out->unit;
    o->out_step = out->step;
    o->out_largest = out->largest;
  }
  size_t real = wide ? sizeof(long double) : sizeof(double);
  size_t keys = (size_t)o->capacity, d = (size_t)p->head_dim, dv = (size_t)o->dv;
  const struct {
    void **to;
    size_t count;
  } parts[] = {{&o->k, keys * d}, {&o->v, keys * dv}, {&o->q, d},     {&o->s, keys},  {&o->eta, keys},
               {&o->w, keys},     {&o->e, keys},      {&o->mean, dv}, {&o->size, dv}, {&o->error, dv},
               {&o->most, dv},    {&o->least, dv},    {&o->peak, dv}};
  size_t total = 0;
  for (size_t n = 0; n < sizeof parts / sizeof parts[0]; n++) {
    total += parts[n].count * real;
  }
  char *memory = o->memory = calloc(total + dv * sizeof(int) + keys + 1, 1);
  if (memory == NULL) {
    free(o);
    return NULL;
  }
  for (size_t n = 0; n < sizeof parts / sizeof parts[0]; n++) {
    *parts[n].to = memory;
    memory += parts[n].count * real;
  }
  o->column_kind = (int *)(void *)memory;
  o->sees = (unsigned char *)(memory + dv * sizeof(int));
  return o;
}

void oracle_free(oracle *o) {
  if (o != NULL) {
    free(o->memory);
    free(o);
  }
}

void oracle_row(oracle *o, int64_t b, int64_t h, int64_t i, oracle_value *out, oracle_value *lse) {
  const qkv_problem *p = o->p;
  int64_t kv_heads = p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads, kv_head = h / (p->num_heads / kv_heads);
  bool wide = o->arithmetic == QKV_F64;
  if (b != o->entry || kv_head != o->kv_head) {
    o->entry = b;
    o->kv_head = kv_head;
    o->keys = problem_keys(p, b);
    if (wide) {
      long_panel(o, b, kv_head);
    } else {
      double_panel(o, b, kv_head);
    }
  }
  if (wide) {
    long_run(o, b, h, i, out, lse);
  } else {
    double_run(o, b, h, i, out, lse);
  }
}

void oracle_score(const oracle *o, int64_t j, oracle_value *score, oracle_value *weight) {
  if (o->arithmetic == QKV_F64) {
    long_score(o, j, score, weight);
  } else {
    double_score(o, j, score, weight);
  }
}

bool oracle_accepts(const oracle_value *expected, double computed, double *ratio) {
  *ratio = 0;
  switch (expected->kind) {
  case ORACLE_NAN: return isnan(computed);
  case ORACLE_NONFINITE: return !isfinite(computed);
  case ORACLE_ANY: return true;
  default: break;
  }
  if (isinf(expected->value)) {
    return computed == expected->value;
  }
  if (!isfinite(computed)) {
    *ratio = INFINITY;
    return false;
  }
  double error = fabs((computed - expected->value) - expected->tail);
  if (error == 0) {
    return true;
  }
  *ratio = expected->bound > 0 ? error / expected->bound : INFINITY;
  return *ratio <= 1;
}

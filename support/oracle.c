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
  bool fast;                  /* QKV_FAST may apply */
  double unit, step, largest, flush, exp_ulp, tanh_ulp;
  double out_unit, out_step, out_largest; /* of 16-bit results; 0: none */
  void *memory;
  void *k, *v, *q, *s, *eta, *w, *e, *mean, *size, *error, *most, *least, *peak;
  void *dout, *tanh, *tanh_error; /* of a row: for its gradient */
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

/* Whether a position is in a set: a range, or places of a list. */
static bool in_positions(const qkv_mask *m, int64_t b, int64_t h, int64_t position) {
  if (m->t.data == NULL) {
    return position >= m->a && position < m->b;
  }
  int64_t first = (b != 0 ? b * m->t.stride[0] : 0) + (h != 0 ? h * m->t.stride[1] : 0);
  for (int64_t n = 0; n < m->a; n++) {
    int32_t listed = ((const int32_t *)m->t.data)[first + (n != 0 ? n * m->t.stride[3] : 0)];
    if (listed >= 0 && listed == position) {
      return true;
    }
  }
  return false;
}

static int64_t quotient_below(int64_t a, int64_t b) { return (int64_t)floor((double)a / (double)b); } /* of 32-bit numbers */

static bool map_lists(const qkv_block_map *map, int64_t b, int64_t h, int64_t query, int64_t key) {
  if (query < 0) {
    return false;
  }
  int64_t lists = (map->seqlen_q + map->block - 1) / map->block + 1;
  b = map->batch == 1 ? 0 : b;
  h = map->num_heads == 1 ? 0 : h;
  const int32_t *row = map->indptr + (b * map->num_heads + h) * lists + query / map->block;
  for (int32_t n = row[0]; n < row[1]; n++) {
    if ((int64_t)map->indices[n] * map->block <= key && key < ((int64_t)map->indices[n] + 1) * map->block) {
      return true;
    }
  }
  return false;
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
  case QKV_MASK_KEYS: return in_positions(m, b, h, key);
  case QKV_MASK_QUERIES: return in_positions(m, b, h, query);
  case QKV_MASK_CHUNK: return llabs(quotient_below(query, m->a) - quotient_below(key, m->a)) <= m->b;
  case QKV_MASK_COLUMNS: return (key + m->b) / m->a > key / m->a;
  case QKV_MASK_STRIDED: {
    int64_t stride = m->a, steps = llabs(query - key);
    if (m->t.data != NULL) {
      stride = ((const int32_t *)m->t.data)[(b != 0 ? b * m->t.stride[0] : 0) + (h != 0 ? h * m->t.stride[1] : 0)];
    }
    return steps % stride == 0 && (m->b < 0 || steps / stride <= m->b);
  }
  case QKV_MASK_BLOCKS: return map_lists(m->user, b, h, query, key);
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

bool oracle_sees(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return oracle_visible(p, b, h, i, j) &&
         !(p->bias.data != NULL && problem_load(&p->bias, problem_offset(p, &p->bias, 'b', b, h, i, j)) == -HUGE_VAL);
}

/* ---- Dropout ------------------------------------------------------------------------------------------------------- */

void oracle_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
  uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
  for (int round = 0; round < 10; round++) {
    uint64_t first = UINT64_C(0xD2511F53) * c[0], second = UINT64_C(0xCD9E8D57) * c[2];
    c[0] = (uint32_t)(second >> 32) ^ c[1] ^ k[0];
    c[2] = (uint32_t)(first >> 32) ^ c[3] ^ k[1];
    c[1] = (uint32_t)second;
    c[3] = (uint32_t)first;
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  memcpy(words, c, sizeof c);
}

bool oracle_kept(const qkv_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!(p->dropout > 0)) {
    return true;
  }
  uint64_t heads = (uint64_t)(p->heads_total > 0 ? p->heads_total : p->num_heads);
  uint64_t head = ((uint64_t)p->batch_origin + (uint64_t)b) * heads + (uint64_t)p->head_origin + (uint64_t)h;
  int64_t key_position = oracle_key_position(p, b, j);
  const uint32_t counter[4] = {(uint32_t)((uint64_t)key_position >> 2), (uint32_t)oracle_query_position(p, b, i, p->align),
                               (uint32_t)head, (uint32_t)p->offset};
  const uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)};
  uint32_t words[4];
  oracle_philox(counter, key, words);
  return (double)words[key_position & 3] >= floor(p->dropout * 0x1p32);
}

static int64_t per_head_offset(const qkv_problem *p, const qkv_tensor *t, int64_t b, int64_t h) {
  return problem_offset(p, t, 'h', b, h, 0, 0);
}

/* ---- Rows in two precisions ---------------------------------------------------------------------------------------- */

/* Sums of products, `columns` to a row of the bank, with what their bounds are made from; and how many there are. */
typedef struct tally {
  int64_t terms, chains, last;
  bool wild;
} tally;
typedef struct bank {
  int64_t rows, columns;
  void *value, *error, *size;
  tally *tally;
  bool one_chain; /* all terms are one chain, not one for each block */
} bank;

#define REAL      double
#define ROW(name) double_##name
#define EXP       exp
#define LOG       log
#define TANH      tanh
#define FABS      fabs
#define SQRT      sqrt
#include "oracle_row.inc"

#include "oracle_gradient.inc"
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

#include "oracle_gradient.inc"

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
  } parts[] = {{&o->k, keys * d}, {&o->v, keys * dv}, {&o->q, d},       {&o->s, keys},
               {&o->eta, keys},   {&o->w, keys},      {&o->e, keys},    {&o->mean, dv},
               {&o->size, dv},    {&o->error, dv},    {&o->most, dv},   {&o->least, dv},
               {&o->peak, dv},    {&o->dout, dv},     {&o->tanh, keys}, {&o->tanh_error, keys}};
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

static int64_t kv_head_count(const qkv_problem *p) { return p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads; }

/* Loads K and V unless they are there. */
static void use_panel(oracle *o, int64_t b, int64_t kv_head) {
  if (b != o->entry || kv_head != o->kv_head) {
    o->entry = b;
    o->kv_head = kv_head;
    o->keys = problem_keys(o->p, b);
    if (o->arithmetic == QKV_F64) {
      long_panel(o, b, kv_head);
    } else {
      double_panel(o, b, kv_head);
    }
  }
}

void oracle_row(oracle *o, int64_t b, int64_t h, int64_t i, oracle_value *out, oracle_value *lse) {
  const qkv_problem *p = o->p;
  use_panel(o, b, h / (p->num_heads / kv_head_count(p)));
  if (o->arithmetic == QKV_F64) {
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

/* ---- Gradients ----------------------------------------------------------------------------------------------------- */

static void bank_free(bank *b) {
  free(b->value);
  free(b->tally);
}

static bool bank_make(bank *b, bool wide, int64_t rows, int64_t columns, bool one_chain) {
  size_t count = (size_t)rows * (size_t)columns, real = wide ? sizeof(long double) : sizeof(double);
  b->rows = rows;
  b->columns = columns;
  b->one_chain = one_chain;
  b->value = calloc(3 * count + 1, real);
  b->tally = calloc((size_t)rows + 1, sizeof *b->tally);
  b->error = (char *)b->value + count * real;
  b->size = (char *)b->value + 2 * count * real;
  return b->value != NULL && b->tally != NULL;
}

static void bank_clear(bank *b, bool wide) {
  memset(b->value, 0, 3 * (size_t)b->rows * (size_t)b->columns * (wide ? sizeof(long double) : sizeof(double)));
  memset(b->tally, 0, (size_t)b->rows * sizeof *b->tally);
}

static void settle(const oracle *o, const bank *from, int64_t row, int64_t column, bool scaled, const qkv_tensor *t,
                   const double *old, oracle_value *to) {
  if (o->arithmetic == QKV_F64) {
    long_settle(o, from, row, column, scaled ? long_scale(o->p) : 1, t, old, to);
  } else {
    double_settle(o, from, row, column, scaled ? double_scale(o->p) : 1, t, old, to);
  }
}

/* A sweep over the whole problem: the banks of one row or one key-value head at a time, or of all. */
typedef struct sweep {
  oracle *o;
  const qkv_gradients *g, *before;
  oracle_gradients *to;
  bank banks[PROBLEM_GRADIENT_TENSORS];
} sweep;

static bank *bank_of(sweep *s, int which) { return s->to->of[which] != NULL ? &s->banks[which] : NULL; }

/* Element `at` of a gradient from its bank. */
static void finish_element(sweep *s, int which, const int64_t at[4], int64_t row, int64_t column) {
  const qkv_problem *p = s->o->p;
  const int64_t *n = s->to->extents[which];
  double old = 0;
  bool adds = s->before != NULL && (s->g->accumulate >> (which - PROBLEM_DQ) & 1) != 0;
  if (!problem_gradient_has(p, s->g, which, at)) {
    return;
  }
  if (adds) {
    old = problem_load(problem_gradient(s->before, which), problem_gradient_offset(p, s->before, which, at));
  }
  settle(s->o, &s->banks[which], row, column, which == PROBLEM_DQ || which == PROBLEM_DK, problem_gradient(s->g, which),
         adds ? &old : NULL, &s->to->of[which][((at[0] * n[1] + at[1]) * n[2] + at[2]) * n[3] + at[3]]);
}

static void sweep_row(sweep *s, int64_t b, int64_t h, int64_t i) {
  oracle *o = s->o;
  bank *dq = bank_of(s, PROBLEM_DQ), *dk = bank_of(s, PROBLEM_DK), *dv = bank_of(s, PROBLEM_DV);
  bank *dbias = bank_of(s, PROBLEM_DBIAS), *dsinks = bank_of(s, PROBLEM_DSINKS);
  const int64_t *bias_extents = s->to->extents[PROBLEM_DBIAS], *n = s->to->extents[PROBLEM_DSINKS];
  int64_t sink_row = (n[0] > 1 ? b : 0) * n[1] + (n[1] > 1 ? h : 0);
  bool wide = o->arithmetic == QKV_F64;
  if (dq != NULL) {
    bank_clear(dq, wide);
  }
  if (i < query_count(o->p, b)) {
    if (wide) {
      long_backward(o, s->g, b, h, i, dq, dk, dv, dbias, bias_extents, dsinks, sink_row);
    } else {
      double_backward(o, s->g, b, h, i, dq, dk, dv, dbias, bias_extents, dsinks, sink_row);
    }
  }
  for (int64_t x = 0; x < o->p->head_dim && dq != NULL; x++) {
    finish_element(s, PROBLEM_DQ, (const int64_t[4]){b, h, i, x}, 0, x);
  }
}

static void sweep_kv_head(sweep *s, int64_t b, int64_t kv_head) {
  const qkv_problem *p = s->o->p;
  const int64_t group = p->num_heads / kv_head_count(p);
  use_panel(s->o, b, kv_head);
  for (int which = PROBLEM_DK; which <= PROBLEM_DV; which++) {
    if (bank_of(s, which) != NULL) {
      bank_clear(bank_of(s, which), s->o->arithmetic == QKV_F64);
    }
  }
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    for (int64_t i = 0; i < problem_rows(p, b); i++) {
      sweep_row(s, b, h, i);
    }
  }
  for (int which = PROBLEM_DK; which <= PROBLEM_DV; which++) {
    for (int64_t j = 0; j < s->o->keys && s->to->of[which] != NULL; j++) {
      for (int64_t x = 0; x < s->banks[which].columns; x++) {
        finish_element(s, which, (const int64_t[4]){b, kv_head, j, x}, j, x);
      }
    }
  }
}

static bool sweep_make(sweep *s) {
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    int64_t *n = s->to->extents[which], count, rows = which == PROBLEM_DQ ? 1 : which < PROBLEM_DBIAS ? s->o->capacity : 0;
    problem_gradient_extents(s->o->p, s->g, which, n);
    count = n[0] * n[1] * n[2] * n[3];
    if (problem_gradient(s->g, which)->data == NULL || count == 0) {
      continue;
    }
    s->to->of[which] = calloc((size_t)count, sizeof *s->to->of[which]);
    if (s->to->of[which] == NULL ||
        !bank_make(&s->banks[which], s->o->arithmetic == QKV_F64, which < PROBLEM_DBIAS ? rows : count,
                   which < PROBLEM_DBIAS ? n[3] : 1, which == PROBLEM_DBIAS)) {
      return false;
    }
  }
  return true;
}

bool oracle_gradients_make(oracle_gradients *to, const qkv_problem *p, const qkv_gradients *g, const qkv_gradients *before) {
  sweep s;
  memset(&s, 0, sizeof s);
  memset(to, 0, sizeof *to);
  s.o = oracle_new(p);
  s.g = g;
  s.before = before;
  s.to = to;
  bool made = s.o != NULL && sweep_make(&s);
  for (int64_t b = 0; b < p->batch && made; b++) {
    for (int64_t kv_head = 0; kv_head < kv_head_count(p); kv_head++) {
      sweep_kv_head(&s, b, kv_head);
    }
  }
  for (int which = PROBLEM_DBIAS; which <= PROBLEM_DSINKS && made; which++) {
    const int64_t *n = to->extents[which];
    int64_t at[4], row = 0;
    for (at[0] = 0; at[0] < n[0] && to->of[which] != NULL; at[0]++) {
      for (at[1] = 0; at[1] < n[1]; at[1]++) {
        for (at[2] = 0; at[2] < n[2]; at[2]++) {
          for (at[3] = 0; at[3] < n[3]; at[3]++) {
            finish_element(&s, which, at, row++, 0);
          }
        }
      }
    }
  }
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    bank_free(&s.banks[which]);
  }
  oracle_free(s.o);
  if (!made) {
    oracle_gradients_free(to);
  }
  return made;
}

void oracle_gradients_free(oracle_gradients *to) {
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    free(to->of[which]);
  }
  memset(to, 0, sizeof *to);
}

bool oracle_dq(oracle *o, const qkv_gradients *g, int64_t b, int64_t h, int64_t i, oracle_value *dq) {
  const qkv_problem *p = o->p;
  bool wide = o->arithmetic == QKV_F64;
  bank sums = {0};
  bool made = bank_make(&sums, wide, 1, p->head_dim, false);
  if (made && i < query_count(p, b)) {
    use_panel(o, b, h / (p->num_heads / kv_head_count(p)));
    if (wide) {
      long_backward(o, g, b, h, i, &sums, NULL, NULL, NULL, NULL, NULL, 0);
    } else {
      double_backward(o, g, b, h, i, &sums, NULL, NULL, NULL, NULL, NULL, 0);
    }
  }
  for (int64_t x = 0; x < p->head_dim && made; x++) {
    settle(o, &sums, 0, x, true, &g->dq, NULL, &dq[x]);
  }
  bank_free(&sums);
  return made;
}

bool oracle_dkv(oracle *o, const qkv_gradients *g, int64_t b, int64_t kv_head, int64_t j, oracle_value *dk,
                oracle_value *dv) {
  const qkv_problem *p = o->p;
  const int64_t group = p->num_heads / kv_head_count(p);
  bool wide = o->arithmetic == QKV_F64;
  bank keys = {0}, values = {0};
  bool made = bank_make(&keys, wide, 1, p->head_dim, false) && bank_make(&values, wide, 1, o->dv, false);
  use_panel(o, b, kv_head);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group && made; h++) {
    for (int64_t i = 0; i < query_count(p, b); i++) {
      if (wide) {
        long_backward_key(o, g, b, h, i, j, &keys, &values);
      } else {
        double_backward_key(o, g, b, h, i, j, &keys, &values);
      }
    }
  }
  for (int64_t x = 0; x < p->head_dim && made; x++) {
    settle(o, &keys, 0, x, true, &g->dk, NULL, &dk[x]);
  }
  for (int64_t x = 0; x < o->dv && made; x++) {
    settle(o, &values, 0, x, false, &g->dv, NULL, &dv[x]);
  }
  bank_free(&keys);
  bank_free(&values);
  return made;
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

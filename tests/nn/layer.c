#include "layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const layer_names[TENSORS] = {"x", "x_kv", "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "bias", "sinks"};

layer_config layer_config_default(void) {
  return (layer_config){.dtype = QKV_F64,
                        .batch = 2,
                        .rows = 5,
                        .keys = 5,
                        .d_model = 6,
                        .num_heads = 2,
                        .num_kv_heads = 2,
                        .head_dim = 4,
                        .head_dim_v = 4,
                        .biases = 15,
                        .seed = 1};
}

layer_config layer_config_random(uint64_t seed) {
  rng r = {seed, 77, 0};
  layer_config c = layer_config_default();
  c.seed = seed;
  c.dtype = rng_next(&r) % 2 ? QKV_F32 : QKV_F64;
  c.gemm = rng_next(&r) % 2 ? QKV_GEMM_TASKS : QKV_GEMM_WHOLE;
  c.batch = 1 + (int64_t)(rng_next(&r) % 3);
  c.rows = 1 + (int64_t)(rng_next(&r) % (rng_next(&r) % 8 ? 9 : 300));
  const int cross = rng_next(&r) % 2;
  c.keys = cross ? 1 + (int64_t)(rng_next(&r) % 9) : c.rows;
  c.d_model = 1 + (int64_t)(rng_next(&r) % 9);
  c.d_kv = cross ? 1 + (int64_t)(rng_next(&r) % 9) : 0;
  c.d_out = rng_next(&r) % 2 ? 0 : 1 + (int64_t)(rng_next(&r) % 9);
  c.num_kv_heads = 1 + (int64_t)(rng_next(&r) % 3);
  c.num_heads = c.num_kv_heads * (1 + (int64_t)(rng_next(&r) % 3));
  c.head_dim = 1 + (int64_t)(rng_next(&r) % 7);
  c.head_dim_v = rng_next(&r) % 2 ? c.head_dim : 1 + (int64_t)(rng_next(&r) % 7);
  c.layout = (int)(rng_next(&r) % LAYOUTS);
  c.weights = (int)(rng_next(&r) % WEIGHT_LAYOUTS);
  c.lengths = (int)(rng_next(&r) % LENGTHS);
  c.rotary = c.head_dim > 1 ? (int)(rng_next(&r) % ROTARIES) : NO_ROTARY;
  c.biases = (int)(rng_next(&r) % 16);
  c.causal = rng_next(&r) % 2;
  c.window = (int)(rng_next(&r) % 6);
  c.bias = rng_next(&r) % 3 == 0;
  c.sinks = rng_next(&r) % 3 == 0;
  c.softcap = rng_next(&r) % 3 ? 0 : 5;
  c.dropout = rng_next(&r) % 3 ? 0 : 0.25;
  c.scale = rng_next(&r) % 3 ? 0 : 0.7;
  return c;
}

const char *layer_text(const layer_config *c) {
  static char text[512];
  snprintf(text, sizeof text,
           "%s gemm %d, batch %d, %d rows, %d keys, d_model %d, d_kv %d, d_out %d, heads %d/%d x %d/%d, layout %d, weights %d, lengths %d, "
           "rotary %d, biases %d, causal %d, window %d, bias %d, sinks %d, softcap %g, dropout %g, scale %g, seed %d",
           c->dtype == QKV_F64 ? "f64" : "f32", (int)c->gemm, (int)c->batch, (int)c->rows, (int)c->keys, (int)c->d_model, (int)c->d_kv,
           (int)c->d_out, (int)c->num_heads, (int)c->num_kv_heads, (int)c->head_dim, (int)c->head_dim_v, c->layout, c->weights, c->lengths,
           c->rotary, c->biases, c->causal, c->window, c->bias, c->sinks, c->softcap, c->dropout, c->scale, (int)c->seed);
  return text;
}

/* ---- Memory ---- */

static size_t element(const layer *l) { return l->c.dtype == QKV_F64 ? 8 : 4; }
int64_t layer_count(const layer_tensor *t) { return t->n[0] * t->n[1] * t->n[2] * t->n[3]; }

static char *address(const layer *l, const layer_tensor *t, int64_t index) {
  int64_t at = 0;
  for (int k = 3; k >= 0; k--) {
    at += index % t->n[k] * t->t.stride[k];
    index /= t->n[k];
  }
  return (char *)t->t.data + at * (int64_t)element(l);
}

double layer_get(const layer *l, const layer_tensor *t, int64_t index) {
  const void *at = address(l, t, index);
  return l->c.dtype == QKV_F64 ? *(const double *)at : (double)*(const float *)at;
}
void layer_set(const layer *l, layer_tensor *t, int64_t index, double value) {
  void *at = address(l, t, index);
  if (l->c.dtype == QKV_F64)
    *(double *)at = value;
  else
    *(float *)at = (float)value;
}

/* Strides from the fastest axis up, with `gap` elements behind each. */
static void place(const layer *l, layer_tensor *t, const int *order, int64_t gap) {
  int64_t pitch = 1;
  for (int k = 0; k < 4; k++) {
    t->t.stride[order[k]] = pitch;
    pitch = pitch * t->n[order[k]] + (k < 3 ? gap : 0);
  }
  t->bytes = (size_t)pitch * element(l);
  t->memory = malloc(t->bytes + 1);
  assert_non_null(t->memory);
  memset(t->memory, 0xff, t->bytes);
  t->t.data = t->memory;
  t->t.dtype = l->c.dtype;
}

static void shape(layer_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  t->n[0] = a, t->n[1] = b, t->n[2] = c, t->n[3] = d;
}

static const int orders[LAYOUTS][4] = {{3, 2, 1, 0}, {3, 0, 1, 2}, {2, 3, 1, 0}, {3, 2, 1, 0}};

static void place_rows(const layer *l, layer_tensor *t) { place(l, t, orders[l->c.layout], l->c.layout == GAPS ? 3 : 0); }
static void place_weight(const layer *l, layer_tensor *t) {
  place(l, t, orders[l->c.weights == FUSED_TRANSPOSED ? TRANSPOSED : BATCH_MAJOR], l->c.weights == WEIGHT_GAPS ? 2 : 0);
}

/* wq, wk and wv, or in cross-attention wk and wv, as one matrix. */
static void fuse(layer *l, layer_tensor *t, int which) {
  const int first = l->c.d_kv ? WK : WQ, transposed = l->c.weights == FUSED_TRANSPOSED;
  const int64_t columns = t[first].n[3];
  int64_t rows = 0, done = 0;
  if (l->c.weights != FUSED && !transposed) return;
  for (int i = first; i <= WV; i++) rows += t[i].n[2];
  l->wide_bytes = (size_t)(rows * columns) * element(l);
  l->wide_weights[which] = malloc(l->wide_bytes + 1);
  assert_non_null(l->wide_weights[which]);
  memset(l->wide_weights[which], 0xff, l->wide_bytes);
  for (int i = first; i <= WV; i++) {
    free(t[i].memory);
    t[i].memory = NULL;
    t[i].t.stride[2] = transposed ? 1 : columns;
    t[i].t.stride[3] = transposed ? rows : 1;
    t[i].t.data = l->wide_weights[which] + (size_t)(done * t[i].t.stride[2]) * element(l);
    done += t[i].n[2];
  }
}

static void make_values(layer *l, layer_tensor *t, int stream, double size) {
  const int64_t n = layer_count(t);
  t->value = malloc((size_t)(n + 1) * sizeof *t->value);
  assert_non_null(t->value);
  for (int64_t i = 0; i < n; i++) {
    const double v = size * rng_normal_at(l->c.seed, (uint64_t)stream, (uint64_t)i);
    t->value[i] = l->c.dtype == QKV_F64 ? v : (double)(float)v;
    layer_set(l, t, i, t->value[i]);
  }
}

void layer_clear(layer *l, layer_tensor *t) {
  for (int64_t i = 0; i < layer_count(t); i++) layer_set(l, t, i, NAN);
  if (t->memory) memset(t->memory, 0xff, t->bytes);
}

void layer_gaps(const layer *l, const layer_tensor *t, const char *what) {
  if (!t->memory) return;
  unsigned char *seen = calloc(t->bytes + 1, 1);
  assert_non_null(seen);
  for (int64_t i = 0; i < layer_count(t); i++) memset(seen + ((unsigned char *)address(l, t, i) - t->memory), 1, element(l));
  for (size_t i = 0; i < t->bytes; i++)
    if (!seen[i] && t->memory[i] != 0xff) fail_msg("%s: byte %zu between elements was written; %s", what, i, layer_text(&l->c));
  free(seen);
}

/* ---- Open, close ---- */

static int32_t *integers(int64_t n) {
  int32_t *a = calloc((size_t)n + 1, sizeof *a);
  assert_non_null(a);
  return a;
}

static void make_lengths(layer *l) {
  const layer_config *c = &l->c;
  const int ragged = c->lengths == RAGGED || c->lengths == RAGGED_PADDED, self = c->d_kv == 0;
  l->q_length = integers(c->batch);
  l->kv_length = integers(c->batch);
  l->kv_begin = integers(c->batch);
  for (int i = 0; i < 2; i++) l->cu[i] = integers(c->batch);
  for (int64_t e = 0; e < c->batch; e++) {
    int32_t rows = (int32_t)c->rows, keys = (int32_t)c->keys;
    if (ragged) { /* the first is the longest */
      rows = e ? (int32_t)(rng_at(c->seed, 5, (uint64_t)e) % (uint64_t)(rows + 1)) : rows;
      keys = self ? rows : e ? (int32_t)(rng_at(c->seed, 6, (uint64_t)e) % (uint64_t)(keys + 1)) : keys;
    }
    l->cu[0][e + 1] = l->cu[0][e] + rows;
    l->cu[1][e + 1] = l->cu[1][e] + keys;
    const int partial = c->lengths == PADDED || c->lengths == LEFT_PADDED || c->lengths == RAGGED_PADDED;
    l->q_length[e] = partial ? (int32_t)(rng_at(c->seed, 7, (uint64_t)e) % (uint64_t)(rows + 1)) : rows;
    l->kv_length[e] = partial ? (int32_t)(rng_at(c->seed, 8, (uint64_t)e) % (uint64_t)(keys + 1)) : keys;
    if (self && partial && c->seed % 2) l->kv_length[e] = l->q_length[e]; /* as a padded batch has it */
    if (c->lengths == LEFT_PADDED) {
      l->q_length[e] = rows;
      l->kv_begin[e] = (int32_t)(rng_at(c->seed, 9, (uint64_t)e) % (uint64_t)(l->kv_length[e] + 1));
    }
  }
  if (ragged) {
    l->p.cu_seqlens_q = l->cu[0];
    l->p.cu_seqlens_kv = l->cu[1];
    l->p.seqlen_q = l->cu[0][c->batch];
    l->p.seqlen_kv = l->cu[1][c->batch];
  }
  if (c->lengths == PADDED || c->lengths == RAGGED_PADDED || c->lengths == LEFT_PADDED) {
    l->p.q_length = l->q_length;
    l->p.kv_length = l->kv_length;
  }
  if (c->lengths == LEFT_PADDED) l->p.kv_begin = l->kv_begin;
}

static int64_t rotary_dim(const layer_config *c) { return c->head_dim / 2 * 2; }

static void make_rotary(layer *l) {
  const layer_config *c = &l->c;
  if (!c->rotary) return;
  const size_t bytes = QKV_FREQUENCIES_DOUBLES(rotary_dim(c)) * sizeof(double);
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = rotary_dim(c);
  f.base = 100;
  l->table = malloc(bytes);
  assert_non_null(l->table);
  assert_int_equal(qkv_frequencies_fill(&f, l->table, bytes), QKV_OK);
  l->starts = integers(c->batch);
  for (int64_t e = 0; e < c->batch; e++) l->starts[e] = (int32_t)(2 * e + 1);
  for (int i = 0; i < 2; i++) {
    const int64_t rows = i ? l->p.seqlen_kv : l->p.seqlen_q, batch = l->p.cu_seqlens_q ? 1 : c->batch;
    qkv_rotary *r = &l->rotary[i];
    *r = qkv_rotary_default();
    r->table = l->table;
    r->pairing = c->rotary == INTERLEAVED ? QKV_ROTARY_INTERLEAVED : QKV_ROTARY_HALF;
    l->ids[i] = integers(batch * rows);
    for (int64_t k = 0; k < batch * rows; k++) l->ids[i][k] = (int32_t)(rng_at(c->seed, 11, (uint64_t)k) % 20) - 5;
    if (c->rotary == BY_IDS)
      r->position_ids = qkv_strided(l->ids[i], QKV_I32, rows, 0, 1, 0);
    else {
      r->start = 3;
      r->starts = l->starts;
    }
  }
  l->m.rotary_q = &l->rotary[0];
  l->m.rotary_k = &l->rotary[1];
}

void layer_open(layer *l, const layer_config *config) {
  memset(l, 0, sizeof *l);
  l->c = *config;
  const layer_config *c = &l->c;
  qkv_problem *p = &l->p;
  *p = qkv_problem_default();
  p->batch = c->batch;
  p->seqlen_q = c->rows;
  p->seqlen_kv = c->keys;
  p->num_heads = c->num_heads;
  p->num_kv_heads = c->num_kv_heads;
  p->head_dim = c->head_dim;
  p->head_dim_v = c->head_dim_v;
  p->softcap = c->softcap;
  p->softmax_scale = c->scale;
  p->dropout = c->dropout;
  p->seed = 0x123456789abcdefu;
  p->offset = 4;
  if (c->causal) l->mask[p->mask_count++] = qkv_causal();
  if (c->window) l->mask[p->mask_count++] = qkv_window(c->window, -1);
  p->mask = l->mask;
  make_lengths(l);

  l->m = qkv_multihead_default();
  qkv_multihead *m = &l->m;
  m->dtype = c->dtype;
  m->gemm = c->gemm;
  m->d_model = c->d_model;
  m->d_kv = c->d_kv;
  m->d_out = c->d_out;
  m->attention = p;
  const int64_t batch = p->cu_seqlens_q ? 1 : c->batch, kv = c->d_kv ? c->d_kv : c->d_model, out = c->d_out ? c->d_out : c->d_model;
  const int64_t widths[4] = {c->num_heads * c->head_dim, c->num_kv_heads * c->head_dim, c->num_kv_heads * c->head_dim_v, out};
  shape(&l->y, batch, 1, p->seqlen_q, out);
  shape(&l->dy, batch, 1, p->seqlen_q, out);
  place_rows(l, &l->y);
  place_rows(l, &l->dy);
  for (int which = 0; which < 2; which++) { /* tensors, and their gradients in the same layout */
    layer_tensor *t = which ? l->d : l->in;
    shape(&t[X], batch, 1, p->seqlen_q, c->d_model);
    place_rows(l, &t[X]);
    if (c->d_kv) {
      shape(&t[XKV], batch, 1, p->seqlen_kv, c->d_kv);
      place_rows(l, &t[XKV]);
    }
    for (int i = 0; i < 4; i++) {
      shape(&t[WQ + i], 1, 1, widths[i], i == 0 ? c->d_model : i < 3 ? kv : c->num_heads * c->head_dim_v);
      place_weight(l, &t[WQ + i]);
      if (!(c->biases >> i & 1)) continue;
      shape(&t[BQ + i], 1, 1, 1, widths[i]);
      place(l, &t[BQ + i], orders[BATCH_MAJOR], 0);
    }
    fuse(l, t, which);
    if (c->bias) {
      shape(&t[BIAS], 1, c->num_heads, c->rows, c->keys); /* the same for all entries */
      place(l, &t[BIAS], orders[BATCH_MAJOR], 0);
      t[BIAS].t.stride[0] = 0;
    }
    if (c->sinks) {
      shape(&t[SINKS], 1, c->num_heads, 1, 1);
      place(l, &t[SINKS], orders[BATCH_MAJOR], 0);
      t[SINKS].t.stride[0] = 0;
    }
  }
  static const double sizes[TENSORS] = {1, 1, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3, 1, 1};
  for (int i = 0; i < TENSORS; i++) make_values(l, &l->in[i], 100 + i, sizes[i]);
  make_values(l, &l->dy, 99, 1);
  qkv_tensor *const in[TENSORS] = {&m->x, &m->x_kv, &m->projections.wq, &m->projections.wk, &m->projections.wv, &m->projections.wo,
                                   &m->projections.bq, &m->projections.bk, &m->projections.bv, &m->projections.bo, &p->bias, &p->sinks};
  qkv_multihead_gradients *g = &l->g;
  *g = qkv_multihead_gradients_default();
  qkv_tensor *const d[TENSORS] = {&g->dx, &g->dx_kv, &g->projections.wq, &g->projections.wk, &g->projections.wv, &g->projections.wo,
                                  &g->projections.bq, &g->projections.bk, &g->projections.bv, &g->projections.bo, &g->dbias, &g->dsinks};
  for (int i = 0; i < TENSORS; i++) {
    if (layer_count(&l->in[i]) == 0) continue;
    *in[i] = l->in[i].t;
    *d[i] = l->d[i].t;
  }
  m->y = l->y.t;
  g->dy = l->dy.t;
  make_rotary(l);
  size_t bytes;
  assert_int_equal(qkv_multihead_activations(m, &bytes), QKV_OK);
  l->activations = malloc(bytes + 8);
  assert_non_null(l->activations);
  memset(l->activations, 0xff, bytes);
  m->activations = l->activations;
  m->activation_bytes = bytes;
}

void layer_close(layer *l) {
  for (int i = 0; i < TENSORS; i++) {
    free(l->in[i].memory);
    free(l->in[i].value);
    free(l->d[i].memory);
  }
  free(l->y.memory);
  free(l->dy.memory);
  free(l->dy.value);
  for (int i = 0; i < 2; i++) {
    free(l->wide_weights[i]);
    free(l->ids[i]);
    free(l->cu[i]);
  }
  free(l->table);
  free(l->starts);
  free(l->q_length);
  free(l->kv_length);
  free(l->kv_begin);
  free(l->activations);
}

/* ---- The plain computation ---- */

/* A value and a bound of the library's error in it. */
typedef struct number {
  long double v;
  double e;
} number;

/* Row i of an entry, in the tensors' (batch, row). */
static int64_t row_of(const layer *l, int side, int64_t e, int64_t i) {
  if (l->p.cu_seqlens_q) return l->cu[side][e] + i;
  return e * (side ? l->p.seqlen_kv : l->p.seqlen_q) + i;
}
static int64_t rows_in(const layer *l, int side, int64_t e) {
  return l->p.cu_seqlens_q ? l->cu[side][e + 1] - l->cu[side][e] : side ? l->p.seqlen_kv : l->p.seqlen_q;
}

int layer_alive(const layer *l, int tensor, int64_t index) {
  const layer_tensor *t = &l->in[tensor];
  const int64_t row = index / t->n[3];
  for (int64_t e = 0; e < l->c.batch; e++) {
    for (int64_t i = 0; i < rows_in(l, 0, e); i++)
      if (tensor == X && row_of(l, 0, e, i) == row) {
        if (i < l->q_length[e]) return 1;
        return l->c.d_kv == 0 && i >= l->kv_begin[e] && i < l->kv_length[e];
      }
    for (int64_t i = 0; i < rows_in(l, 1, e); i++)
      if (tensor == XKV && row_of(l, 1, e, i) == row) return i >= l->kv_begin[e] && i < l->kv_length[e];
  }
  return 0;
}

/* Row `row` of x times the weight's transpose, plus the bias. A sum of n products in any order is off by at most (n + 1) u of the sum of
 * their magnitudes. */
static void project(const double *x, const layer_tensor *w, const layer_tensor *b, double u, number *to) {
  const int64_t n = w->n[3];
  for (int64_t o = 0; o < w->n[2]; o++) {
    long double sum = layer_count(b) ? b->value[o] : 0, size = fabsl(sum);
    for (int64_t k = 0; k < n; k++) {
      const long double term = (long double)x[k] * w->value[o * n + k];
      sum += term;
      size += fabsl(term);
    }
    to[o] = (number){sum, (double)((n + 2) * u * size)};
  }
}

static void turn(const layer *l, int side, int64_t e, int64_t i, int64_t heads, double u, number *x) {
  const layer_config *c = &l->c;
  const int64_t dim = rotary_dim(c);
  if (!c->rotary) return;
  const long double position = c->rotary == BY_IDS ? l->ids[side][row_of(l, side, e, i)] : 3 + l->starts[e] + i;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t k = 0; k < dim / 2; k++) {
      const long double angle = position * powl(100, -2 * (long double)k / dim), s = sinl(angle), z = cosl(angle);
      number *a = &x[h * c->head_dim + (c->rotary == INTERLEAVED ? 2 * k : k)];
      number *b = c->rotary == INTERLEAVED ? a + 1 : a + dim / 2;
      const number p = *a, q = *b;
      const double error = (p.e + q.e) + 8 * u * (double)(fabsl(p.v) + fabsl(q.v)); /* sine and cosine to 2 u, products, sum */
      *a = (number){p.v * z - q.v * s, error};
      *b = (number){p.v * s + q.v * z, error};
    }
}

static int sees(const layer *l, int64_t e, int64_t i, int64_t j) {
  const int64_t keys = l->kv_length[e] - l->kv_begin[e], at = i + keys - l->q_length[e], key = j - l->kv_begin[e];
  return !(l->c.causal && key > at) && !(l->c.window && key < at - l->c.window);
}

/* The bits of dropout of an entry: (head, row, key). */
static float *kept(const layer *l, int64_t e, int64_t rows, int64_t keys) {
  static const double zero = 0;
  if (l->c.dropout == 0) return NULL;
  qkv_problem p = qkv_problem_default();
  p.batch = 1;
  p.num_heads = l->c.num_heads;
  p.head_dim = 1;
  p.seqlen_q = rows;
  p.seqlen_kv = keys;
  p.q_length = &l->q_length[e];
  p.kv_begin = &l->kv_begin[e];
  p.kv_length = &l->kv_length[e];
  p.dropout = l->p.dropout;
  p.seed = l->p.seed;
  p.offset = l->p.offset;
  p.batch_origin = e;
  p.q = p.k = p.v = qkv_strided(&zero, QKV_F32, 0, 0, 0, 0);
  float *bits = malloc((size_t)(p.num_heads * rows * keys + 1) * sizeof *bits);
  const qkv_tensor to = qkv_bhsd(bits, QKV_F32, p.num_heads, rows, keys);
  assert_non_null(bits);
  assert_int_equal(qkv_scores(NULL, &p, QKV_KEPT, NULL, &to), QKV_OK);
  return bits;
}

/* Row i of an entry, head h: attention over keys k and v of all heads. */
static void attend(const layer *l, int64_t e, int64_t h, int64_t i, const number *q, const number *k, const number *v, const float *bits,
                   double u, number *out) {
  const layer_config *c = &l->c;
  const int64_t d = c->head_dim, dv = c->head_dim_v, g = h / (c->num_heads / c->num_kv_heads), keys = rows_in(l, 1, e);
  const long double scale = c->scale != 0 ? c->scale : 1 / sqrtl((long double)d);
  const double keep = 1 - c->dropout;
  number *s = malloc((size_t)(keys + 1) * sizeof *s);
  long double most = c->sinks ? l->in[SINKS].value[h] : -INFINITY, sum = 0;
  double error = c->sinks ? 4 * u * fabs(l->in[SINKS].value[h]) : 0;
  int64_t count = 0;
  assert_non_null(s);
  for (int64_t j = l->kv_begin[e]; j < l->kv_length[e]; j++) {
    long double dot = 0, size = 0;
    double from_inputs = 0;
    s[j].v = -INFINITY;
    if (!sees(l, e, i, j)) continue;
    for (int64_t x = 0; x < d; x++) {
      const number a = q[h * d + x], b = k[(j * c->num_kv_heads + g) * d + x];
      dot += a.v * b.v;
      size += fabsl(a.v * b.v);
      from_inputs += (double)fabsl(a.v) * b.e + (double)fabsl(b.v) * a.e + a.e * b.e;
    }
    number t = {scale * dot, (double)fabsl(scale) * (from_inputs + (double)(d + 6) * u * (double)size)}; /* the rest: docs/NUMERICS.md */
    if (c->softcap > 0) t = (number){c->softcap * tanhl(t.v / c->softcap), t.e + 10 * u * (double)fabsl(t.v)};
    if (c->bias) {
      const long double b = l->in[BIAS].value[(h * c->rows + i) * c->keys + j];
      t = (number){t.v + b, t.e + 2 * u * (double)(fabsl(b) + fabsl(t.v + b))};
    }
    s[j] = t;
    most = t.v > most ? t.v : most;
    error = t.e > error ? t.e : error;
    count++;
  }
  for (int64_t j = l->kv_begin[e]; j < l->kv_length[e]; j++) sum += expl(s[j].v - most);
  if (c->sinks) sum += expl(l->in[SINKS].value[h] - most);
  for (int64_t x = 0; x < dv; x++) {
    number o = {0, 0};
    double size = 0;
    for (int64_t j = l->kv_begin[e]; j < l->kv_length[e]; j++) {
      if (s[j].v == -INFINITY) continue;
      if (bits && bits[(h * rows_in(l, 0, e) + i) * keys + j] == 0) continue;
      const number b = v[(j * c->num_kv_heads + g) * dv + x];
      const double p = (double)(expl(s[j].v - most) / sum) / keep, far = (double)fabsl(s[j].v - most);
      /* a weight: errors of its score and of the others', exp2, differences of maxima, the sum, the division, dropout's factor */
      const double off = p * expm1(s[j].e + error + u * ((double)count + 64 + 3 * far + (double)fabsl(most)));
      o.v += expl(s[j].v - most) / sum / keep * b.v;
      o.e += p * b.e + off * ((double)fabsl(b.v) + b.e);
      size += p * (double)fabsl(b.v);
    }
    o.e += (double)(count + 8) * u * size;
    out[h * dv + x] = o;
  }
  free(s);
}

void layer_naive(const layer *l, long double *y, double *bound) {
  const layer_config *c = &l->c;
  const double u = c->dtype == QKV_F64 ? 0x1p-53 : 0x1p-24;
  const int64_t nq = c->num_heads * c->head_dim, nk = c->num_kv_heads * c->head_dim, nv = c->num_kv_heads * c->head_dim_v;
  const int64_t no = c->num_heads * c->head_dim_v, dout = l->y.n[3];
  const layer_tensor *in = l->in, *x = &in[X], *kv = c->d_kv ? &in[XKV] : x;
  for (int64_t n = 0; n < layer_count(&l->y); n++) {
    y[n] = 0;
    if (bound) bound[n] = 0;
  }
  for (int64_t e = 0; e < c->batch; e++) {
    const int64_t rows = rows_in(l, 0, e), keys = rows_in(l, 1, e);
    number *q = malloc((size_t)(nq + no + keys * (nk + nv) + 1) * sizeof *q), *out = q + nq, *k = out + no, *v = k + keys * nk;
    float *bits = kept(l, e, rows, keys);
    assert_non_null(q);
    for (int64_t j = l->kv_begin[e]; j < l->kv_length[e]; j++) {
      const double *row = kv->value + row_of(l, 1, e, j) * kv->n[3];
      project(row, &in[WK], &in[BK], u, k + j * nk);
      project(row, &in[WV], &in[BV], u, v + j * nv);
      turn(l, 1, e, j, c->num_kv_heads, u, k + j * nk);
    }
    for (int64_t i = 0; i < l->q_length[e]; i++) {
      project(x->value + row_of(l, 0, e, i) * c->d_model, &in[WQ], &in[BQ], u, q);
      turn(l, 0, e, i, c->num_heads, u, q);
      for (int64_t h = 0; h < c->num_heads; h++) attend(l, e, h, i, q, k, v, bits, u, out);
      for (int64_t o = 0; o < dout; o++) {
        long double sum = layer_count(&in[BO]) ? in[BO].value[o] : 0;
        double size = (double)fabsl(sum), error = 0;
        for (int64_t z = 0; z < no; z++) {
          const long double w = in[WO].value[o * no + z];
          sum += out[z].v * w;
          size += (double)fabsl(out[z].v * w) + out[z].e * (double)fabsl(w);
          error += out[z].e * (double)fabsl(w);
        }
        y[row_of(l, 0, e, i) * dout + o] = sum;
        if (bound) bound[row_of(l, 0, e, i) * dout + o] = 1.01 * (error + (double)(no + 2) * u * size);
      }
    }
    free(bits);
    free(q);
  }
}

long double layer_loss(const layer *l) {
  const int64_t n = layer_count(&l->y);
  long double *y = malloc((size_t)(n + 1) * sizeof *y), sum = 0;
  assert_non_null(y);
  layer_naive(l, y, NULL);
  for (int64_t i = 0; i < n; i++) sum += y[i] * l->dy.value[i];
  free(y);
  return sum;
}

/* ---- Calls ---- */

void layer_forward(const layer *l, const qkv_context *context) {
  char text[512];
  if (qkv_multihead_check(&l->m, text, sizeof text) != QKV_OK) fail_msg("%s; %s", text, layer_text(&l->c));
  assert_int_equal(qkv_multihead_forward(context, &l->m, NULL, 0), QKV_OK);
}
void layer_backward(const layer *l, const qkv_context *context) {
  char text[512];
  if (qkv_multihead_backward_check(&l->m, &l->g, text, sizeof text) != QKV_OK) fail_msg("%s; %s", text, layer_text(&l->c));
  assert_int_equal(qkv_multihead_backward(context, &l->m, &l->g, NULL, 0), QKV_OK);
}

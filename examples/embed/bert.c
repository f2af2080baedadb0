#include "bert.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/models/blas.h"
#include "safetensors.h"
#include "text.h"

enum { PIECE = 128 }; /* rows of a task: as many as make the packing of weights cheap, as few as leave tasks for all threads */
static const float EPSILON = 1e-12f; /* of layer norm */

/* ---- Weights ---- */

/* A tensor of f32; extents of -1 are set to the file's. NULL after a message. */
static float *read_tensor(const safetensors *file, const char *path, const char *name, int rank, int64_t *extent, char *error, size_t n) {
  const safetensors_entry *entry = safetensors_find(file, name);
  array a;
  if (!entry) return text_fail(error, n, "%s: there is no tensor '%s'", path, name), NULL;
  if (safetensors_read(file, entry, &a, error, n)) return NULL;
  int fits = a.dtype == QKV_F32 && a.rank == rank;
  for (int i = 0; i < rank && fits; i++) fits = extent[i] == -1 ? a.shape[i] > 0 && a.shape[i] <= INT32_MAX : a.shape[i] == extent[i];
  if (!fits) {
    char have[128], want[128];
    array_shape_text(a.rank, a.shape, have, sizeof have);
    array_shape_text(rank, extent, want, sizeof want);
    array_free(&a);
    return text_fail(error, n, "%s: tensor '%s' is %s of %s, wanted is F32 of %s", path, name, entry->dtype, have, want), NULL;
  }
  for (int i = 0; i < rank; i++) extent[i] = a.shape[i];
  return a.data;
}

typedef struct reader {
  const safetensors *file;
  const char *path, *prefix; /* of names */
  char *error;
  size_t error_bytes;
  int failed;
} reader;

static float *read_part(reader *r, const char *name, int64_t rows, int64_t columns) {
  char full[256];
  int64_t extent[2] = {rows, columns};
  if (r->failed) return NULL;
  snprintf(full, sizeof full, "%s%s", r->prefix, name);
  float *data = read_tensor(r->file, r->path, full, columns ? 2 : 1, extent, r->error, r->error_bytes);
  r->failed = !data;
  return data;
}

/* The attention problem and the layer, without data. */
static qkv_multihead layer_of(const bert *m, qkv_problem *p) {
  qkv_multihead h = qkv_multihead_default();
  p->num_heads = m->num_heads;
  h.attention = p;
  h.d_model = m->d_model;
  h.gemm = QKV_GEMM_TASKS;
  return h;
}

static void read_projections(reader *r, const bert *m, bert_layer *l) {
  static const char *const names[] = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"};
  qkv_problem p = qkv_problem_default();
  p.batch = p.seqlen_q = 1;
  const qkv_multihead h = layer_of(m, &p);
  qkv_projections to;
  size_t bytes;
  if (r->failed) return;
  if (qkv_projections_place(&h, 1, NULL, NULL, &bytes) || !(l->projections = malloc(bytes)) ||
      qkv_projections_place(&h, 1, l->projections, &to, NULL)) {
    r->failed = text_fail(r->error, r->error_bytes, "%s: no memory for a layer of %lld columns and %lld heads", r->path,
                          (long long)m->d_model, (long long)m->num_heads);
    return;
  }
  float *const weights[] = {to.wq.data, to.wk.data, to.wv.data, to.wo.data}, *const biases[] = {to.bq.data, to.bk.data, to.bv.data, to.bo.data};
  for (int i = 0; i < 4; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s.weight", names[i]);
    float *weight = read_part(r, name, m->d_model, m->d_model);
    snprintf(name, sizeof name, "%s.bias", names[i]);
    float *bias = read_part(r, name, m->d_model, 0);
    if (bias) {
      memcpy(weights[i], weight, (size_t)(m->d_model * m->d_model) * sizeof *weight);
      memcpy(biases[i], bias, (size_t)m->d_model * sizeof *bias);
    }
    free(weight);
    free(bias);
  }
}

static void read_layer(reader *r, bert *m, bert_layer *l) {
  read_projections(r, m, l);
  l->attention_norm[0] = read_part(r, "attention.output.LayerNorm.weight", m->d_model, 0);
  l->attention_norm[1] = read_part(r, "attention.output.LayerNorm.bias", m->d_model, 0);
  l->up = read_part(r, "intermediate.dense.weight", m->d_ff, m->d_model);
  l->up_bias = read_part(r, "intermediate.dense.bias", m->d_ff, 0);
  l->down = read_part(r, "output.dense.weight", m->d_model, m->d_ff);
  l->down_bias = read_part(r, "output.dense.bias", m->d_model, 0);
  l->norm[0] = read_part(r, "output.LayerNorm.weight", m->d_model, 0);
  l->norm[1] = read_part(r, "output.LayerNorm.bias", m->d_model, 0);
}

int bert_load(bert *m, const char *path, int64_t num_heads, char *error, size_t n) {
  memset(m, 0, sizeof *m);
  m->num_heads = num_heads;
  safetensors *file = safetensors_open(path, error, n);
  if (!file) return -1;
  reader r = {file, path, "", error, n, 0};
  int64_t words[] = {-1, -1}, positions[] = {-1, -1}, up[] = {-1, -1};
  m->words = read_tensor(file, path, "embeddings.word_embeddings.weight", 2, words, error, n);
  m->vocabulary = words[0];
  m->d_model = positions[1] = up[1] = words[1];
  if (m->words) m->position = read_tensor(file, path, "embeddings.position_embeddings.weight", 2, positions, error, n);
  m->positions = positions[0];
  r.failed = !m->position;
  if (!r.failed && (num_heads < 1 || m->d_model % num_heads))
    r.failed = text_fail(error, n, "%s: %lld columns cannot be divided among %lld heads", path, (long long)m->d_model, (long long)num_heads);
  m->type = read_part(&r, "embeddings.token_type_embeddings.weight", 2, m->d_model);
  m->norm[0] = read_part(&r, "embeddings.LayerNorm.weight", m->d_model, 0);
  m->norm[1] = read_part(&r, "embeddings.LayerNorm.bias", m->d_model, 0);
  if (!r.failed) { /* only its size is wanted here */
    float *first = read_tensor(file, path, "encoder.layer.0.intermediate.dense.weight", 2, up, error, n);
    m->d_ff = up[0];
    r.failed = !first;
    free(first);
  }
  while (!r.failed) {
    char prefix[64], name[128];
    snprintf(prefix, sizeof prefix, "encoder.layer.%d.", (int)m->num_layers);
    snprintf(name, sizeof name, "%sattention.self.query.weight", prefix);
    if (!safetensors_find(file, name)) break;
    if (m->num_layers == BERT_LAYERS)
      r.failed = text_fail(error, n, "%s: more than %d layers", path, BERT_LAYERS);
    else {
      r.prefix = prefix;
      read_layer(&r, m, &m->layer[m->num_layers++]);
    }
  }
  safetensors_close(file);
  if (r.failed) bert_free(m);
  return r.failed ? -1 : 0;
}

void bert_free(bert *m) {
  for (int i = 0; i < BERT_LAYERS; i++) {
    bert_layer *l = &m->layer[i];
    float *const all[] = {l->projections, l->attention_norm[0], l->attention_norm[1], l->norm[0], l->norm[1],
                          l->up,          l->up_bias,           l->down,              l->down_bias};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
  }
  float *const all[] = {m->words, m->position, m->type, m->norm[0], m->norm[1], m->work};
  for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
  memset(m, 0, sizeof *m);
}

/* ---- Layers ---- */

/* x = norm(x + y), n values. */
static void add_norm(float *x, const float *y, float *const norm[2], int64_t n) {
  double mean = 0, square = 0;
  for (int64_t i = 0; i < n; i++) mean += x[i] += y[i];
  mean /= (double)n;
  for (int64_t i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean);
  const float shift = (float)mean, factor = (float)(1 / sqrt(square / (double)n + (double)EPSILON));
  for (int64_t i = 0; i < n; i++) x[i] = (x[i] - shift) * factor * norm[0][i] + norm[1][i];
}

static float gelu(float x) { return x * 0.5f * (1 + erff(x * 0.70710678f)); }

/* c = a w^T + bias: rows x n, from rows x k. */
static void linear(float *c, const float *a, const float *w, const float *bias, int64_t rows, int64_t n, int64_t k) {
  for (int64_t i = 0; i < rows; i++) memcpy(c + i * n, bias, (size_t)n * sizeof *c);
  cblas_sgemm(BLAS_ROW_MAJOR, BLAS_NO_TRANS, BLAS_TRANS, (int)rows, (int)n, (int)k, 1, a, (int)k, w, (int)k, 1, c, (int)n);
}

/* A batch on its way through the layers. */
typedef struct pass {
  const bert *m;
  const bert_layer *l;
  const int32_t *const *tokens;
  const int32_t *length;
  float *const *out;
  const int64_t *first; /* row of each sentence */
  int64_t pieces, all;  /* of a sentence, at most; of a ragged batch all rows are one sentence of `all` rows, else 0 */
  float *x, *y, *inner; /* rows x d_model, the same, workers x PIECE x d_ff */
} pass;

static void embed_task(void *arg, int64_t b, int32_t worker) {
  const pass *s = arg;
  const bert *m = s->m;
  const int64_t d = m->d_model;
  (void)worker;
  for (int64_t i = 0; i < s->length[b]; i++) {
    float *x = s->x + (s->first[b] + i) * d;
    const float *word = m->words + s->tokens[b][i] * d, *position = m->position + i * d;
    for (int64_t c = 0; c < d; c++) x[c] = word[c] + m->type[c];
    add_norm(x, position, m->norm, d);
  }
}

/* What follows attention, y: x = norm(x + y), then x = norm(x + MLP(x)). */
static void layer_task(void *arg, int64_t task, int32_t worker) {
  const pass *s = arg;
  const int64_t d = s->m->d_model, f = s->m->d_ff, b = task / s->pieces, at = task % s->pieces * PIECE, from = s->first[b] + at;
  const int64_t left = (s->all ? s->all : s->length[b]) - at, rows = left < PIECE ? left : PIECE;
  if (rows <= 0) return;
  float *x = s->x + from * d, *y = s->y + from * d, *inner = s->inner + worker * PIECE * f;
  for (int64_t i = 0; i < rows; i++) add_norm(x + i * d, y + i * d, s->l->attention_norm, d);
  linear(inner, x, s->l->up, s->l->up_bias, rows, f, d);
  for (int64_t i = 0; i < rows * f; i++) inner[i] = gelu(inner[i]);
  linear(y, inner, s->l->down, s->l->down_bias, rows, d, f);
  for (int64_t i = 0; i < rows; i++) add_norm(x + i * d, y + i * d, s->l->norm, d);
}

/* The mean of a sentence's rows, divided by its norm. */
static void pool_task(void *arg, int64_t b, int32_t worker) {
  const pass *s = arg;
  const int64_t d = s->m->d_model;
  float *out = s->out[b];
  double square = 0;
  (void)worker;
  for (int64_t c = 0; c < d; c++) {
    double sum = 0;
    for (int64_t i = 0; i < s->length[b]; i++) sum += s->x[(s->first[b] + i) * d + c];
    out[c] = (float)(sum / s->length[b]);
    square += (double)out[c] * out[c];
  }
  for (int64_t c = 0; c < d; c++) out[c] = (float)(out[c] / sqrt(square));
}

static void for_all(const qkv_context *c, void (*task)(void *, int64_t, int32_t), pass *s, int64_t tasks) {
  if (c->parallel_for)
    c->parallel_for(c->self, task, s, tasks);
  else
    for (int64_t i = 0; i < tasks; i++) task(s, i, 0);
}

int bert_embed(bert *m, const qkv_context *context, int layout, int32_t batch, const int32_t *const *tokens, const int32_t *length,
               float *const *out, char *error, size_t n) {
  const int64_t d = m->d_model, workers = context->num_workers > 1 ? context->num_workers : 1;
  int32_t longest = 0;
  int status = 0;
  int64_t *first = malloc((size_t)batch * sizeof *first);
  int32_t *cu = malloc(((size_t)batch + 1) * sizeof *cu);
  if (!first || !cu) {
    status = text_fail(error, n, "no memory for %d sentences", (int)batch);
    goto end;
  }
  cu[0] = 0;
  for (int32_t b = 0; b < batch; b++) {
    if (length[b] > longest) longest = length[b];
    cu[b + 1] = cu[b] + length[b];
  }
  for (int32_t b = 0; b < batch; b++) first[b] = layout == BERT_RAGGED ? cu[b] : (int64_t)b * longest;

  const int64_t rows = layout == BERT_RAGGED ? cu[batch] : (int64_t)batch * longest;
  pass s = {.m = m, .tokens = tokens, .length = length, .out = out, .first = first, .all = layout == BERT_RAGGED ? rows : 0};
  s.pieces = ((s.all ? s.all : longest) + PIECE - 1) / PIECE;
  const size_t floats = (size_t)(2 * rows * d + workers * PIECE * m->d_ff);
  if (floats > m->work_floats) {
    free(m->work);
    m->work_floats = 0;
    if (!(m->work = malloc(floats * sizeof *m->work))) {
      status = text_fail(error, n, "no memory for %lld rows", (long long)rows);
      goto end;
    }
    m->work_floats = floats;
  }
  s.x = m->work;
  s.y = s.x + rows * d;
  s.inner = s.y + rows * d;

  qkv_problem p = qkv_problem_default();
  qkv_multihead h = layer_of(m, &p);
  p.batch = batch;
  p.seqlen_q = layout == BERT_RAGGED ? rows : longest;
  if (layout == BERT_RAGGED)
    p.cu_seqlens_q = cu;
  else
    p.q_length = p.kv_length = length;
  h.x = qkv_bsd(s.x, QKV_F32, p.seqlen_q, d);
  h.y = qkv_bsd(s.y, QKV_F32, p.seqlen_q, d);

  for_all(context, embed_task, &s, batch);
  for (int64_t i = 0; i < m->num_layers && status == 0; i++) {
    s.l = &m->layer[i];
    qkv_status q = qkv_projections_place(&h, 1, s.l->projections, &h.projections, NULL);
    if (!q) q = qkv_multihead_forward(context, &h, NULL, 0);
    if (q) {
      char text[256];
      qkv_multihead_check(&h, text, sizeof text);
      status = text_fail(error, n, "%s: %s", qkv_status_text(q), text);
    }
    if (!q) for_all(context, layer_task, &s, (s.all ? 1 : batch) * s.pieces);
  }
  if (status == 0) for_all(context, pool_task, &s, batch);
end:
  free(first);
  free(cu);
  return status;
}

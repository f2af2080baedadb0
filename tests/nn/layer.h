/* A layer to test, in any layout, and a plain computation of it in long double that shares nothing with the library but the bits of
 * dropout. */
#ifndef QKV_TESTS_NN_LAYER_H
#define QKV_TESTS_NN_LAYER_H

#include "../core/common.h"
#include "qkv/nn.h"
#include "rng.h"

/* (batch, row, column); (row, batch, column); (batch, column, row), a transpose; the first with gaps behind rows and entries. */
enum { BATCH_MAJOR, SEQUENCE_MAJOR, TRANSPOSED, GAPS, LAYOUTS };
/* Weights: in_proj's rows together and row-major; apart; all transposed and together; with gaps behind rows, apart. */
enum { FUSED, SEPARATE, FUSED_TRANSPOSED, WEIGHT_GAPS, WEIGHT_LAYOUTS };
enum { FULL, PADDED, LEFT_PADDED, RAGGED, RAGGED_PADDED, LENGTHS };
enum { NO_ROTARY, HALF, INTERLEAVED, BY_IDS, ROTARIES };

typedef struct layer_config {
  int32_t dtype, gemm;
  int64_t batch, rows, keys; /* of an entry; of a ragged batch the longest */
  int64_t d_model, d_kv, d_out, num_heads, num_kv_heads, head_dim, head_dim_v;
  int layout, weights, lengths, rotary;
  int biases; /* bits: q, k, v, o */
  int causal, window; /* window > 0: keys back */
  int bias, sinks;
  double softcap, dropout, scale;
  uint64_t seed;
} layer_config;

enum { X, XKV, WQ, WK, WV, WO, BQ, BK, BV, BO, BIAS, SINKS, TENSORS };
extern const char *const layer_names[TENSORS];

/* A tensor: its values, dense (entry or head, row, column) in double, and the same in the layout's memory, whose other bytes are 0xff. */
typedef struct layer_tensor {
  int64_t n[4]; /* batch, head, row, column; all 0: the layer has no such tensor */
  double *value;
  qkv_tensor t;
  unsigned char *memory;
  size_t bytes;
} layer_tensor;

typedef struct layer {
  layer_config c;
  qkv_multihead m;
  qkv_problem p;
  qkv_mask mask[2];
  qkv_rotary rotary[2];
  qkv_multihead_gradients g; /* of every tensor */
  double *table;
  int32_t *ids[2], *starts, *lengths; /* lengths: q_length, kv_begin, kv_length, cu_q, cu_kv */
  int32_t *q_length, *kv_begin, *kv_length, *cu[2];
  layer_tensor in[TENSORS], d[TENSORS], y, dy;
  unsigned char *wide_weights[2]; /* memory of fused weights and of their gradients */
  size_t wide_bytes;
  void *activations;
} layer;

layer_config layer_config_default(void);
layer_config layer_config_random(uint64_t seed);
const char *layer_text(const layer_config *c);
/* Made so that m and g point into *l: it must not be moved. */
void layer_open(layer *l, const layer_config *c);
void layer_close(layer *l);
/* One value of a tensor, in its memory. */
double layer_get(const layer *l, const layer_tensor *t, int64_t index);
void layer_set(const layer *l, layer_tensor *t, int64_t index, double value);
int64_t layer_count(const layer_tensor *t);
/* Whether the row that holds this element of x, x_kv or y exists. */
int layer_alive(const layer *l, int tensor, int64_t index);
/* Fails if bytes between the elements were written. */
void layer_gaps(const layer *l, const layer_tensor *t, const char *what);
/* Results become what memory was at first. */
void layer_clear(layer *l, layer_tensor *t);

/* y of the values, dense as l->y; a bound of the library's error in it for the dtype's unit roundoff, if not NULL. */
void layer_naive(const layer *l, long double *y, double *bound);
/* sum of y and dy. */
long double layer_loss(const layer *l);

void layer_forward(const layer *l, const qkv_context *context);
void layer_backward(const layer *l, const qkv_context *context);

#endif

/* A decoder-only Transformer over characters, with its gradients: embedding and sinusoidal positions, layers of
 *
 *     x += attention(norm(x))        grouped queries, causal, dropout: libqkv-nn
 *     x += MLP(norm(x))              SiLU
 *
 * then norm and the transposed embedding. Written once, in model.inc, for float and double: float trains, double shows that the
 * gradients are right.
 *
 * Every sum has an order that does not depend on the number of threads. So the losses do not either, if the BLAS has one thread. */
#ifndef QKV_EXAMPLES_CHARLM_MODEL_H
#define QKV_EXAMPLES_CHARLM_MODEL_H

#include <qkv/nn.h>
#include <stddef.h>
#include <stdint.h>

enum { LM_LAYERS = 16 }; /* at most */

typedef struct lm_config {
  int64_t vocabulary, context; /* context: characters that a prediction sees, at most */
  int64_t d_model, d_ff, layers;
  int64_t heads, kv_heads, head_dim;
  double dropout; /* of attention's weights and of the embedding */
  uint64_t seed;  /* of dropout */
} lm_config;

/* Parameters are one block. A tensor is a piece of it, rows x columns. */
typedef struct lm_tensor {
  char name[40];
  int64_t offset, rows, columns;
  double deviation; /* of the initial values; 0: all are `value` */
  double value;
  int decay; /* takes part in weight decay */
} lm_tensor;
enum { LM_LAYER_TENSORS = 16, LM_TENSORS = 1 + LM_LAYERS * LM_LAYER_TENSORS + 2 };

typedef struct lm_layer_offsets {
  int64_t norm1[2], projections, norm2[2], up, up_bias, down, down_bias; /* norm: factor, shift */
} lm_layer_offsets;
typedef struct lm_layout {
  int64_t embedding, norm[2];
  lm_layer_offsets layer[LM_LAYERS];
  int64_t parameters;
  int tensors;
  lm_tensor tensor[LM_TENSORS];
} lm_layout;

/* 0, or -1 with a message that names what is wrong in the configuration. */
int lm_lay_out(const lm_config *c, lm_layout *l, char *error, size_t error_bytes);

typedef struct lm_step {
  int64_t number; /* from 1 */
  double rate, beta1, beta2, decay;
  double clip; /* gradients are scaled to a norm of at most this; 0: not */
} lm_step;

#define LM_REAL float
#define LM(name) name##_f32
#include "model_types.inc"
#undef LM_REAL
#undef LM

#define LM_REAL double
#define LM(name) name##_f64
#include "model_types.inc"
#undef LM_REAL
#undef LM

#endif

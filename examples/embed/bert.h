/* An encoder of the BERT family that makes sentence embeddings: token, position and type embeddings; layers of attention and MLP,
 * each followed by layer norm of its sum with its input; the mean over the tokens, of length 1. */
#ifndef QKV_EXAMPLES_BERT_H
#define QKV_EXAMPLES_BERT_H

#include <qkv/nn.h>
#include <stddef.h>
#include <stdint.h>

enum { BERT_LAYERS = 48 }; /* at most */

typedef struct bert_layer {
  float *projections; /* one block, so that q, k and v are one product */
  float *attention_norm[2], *norm[2]; /* factor, shift */
  float *up, *up_bias, *down, *down_bias;
} bert_layer;

typedef struct bert {
  int64_t vocabulary, positions, d_model, d_ff, num_heads, num_layers;
  float *words, *position, *type, *norm[2];
  bert_layer layer[BERT_LAYERS];
  float *work; /* activations, grown to the largest batch */
  size_t work_floats;
} bert;

/* Reads the weights; sizes are those of the tensors. 0, or -1 with a message. */
int bert_load(bert *m, const char *path, int64_t num_heads, char *error, size_t error_bytes);
void bert_free(bert *m);

/* How the sentences of a batch lie in memory: as long as the longest, of which the lengths tell the rest, or one behind another. */
enum { BERT_PADDED = 0, BERT_RAGGED = 1 };

/* Embeddings of `batch` sentences of length[b] tokens, 1 <= length[b] <= positions: out[b], d_model values each. */
int bert_embed(bert *m, const qkv_context *context, int layout, int32_t batch, const int32_t *const *tokens, const int32_t *length,
               float *const *out, char *error, size_t error_bytes);

#endif

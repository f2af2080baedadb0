/* A multi-head attention layer, forward and backward: grouped heads, causal, rotary positions, biases. Gradient descent teaches it to
 * copy the row before each row, and the weights of one row show how it does that. All parameters lie in one block, so the optimizer is
 * one loop. */
#include <qkv/nn.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, ROWS = 32, D_MODEL = 48, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 8, VALUES = BATCH * ROWS * D_MODEL, STEPS = 200 };
static float x[VALUES], y[VALUES], dy[VALUES], target[VALUES], weights[HEADS * ROWS];

static float number(int i, int a, int b) { return (float)(i * a % b - b / 2) / (float)b; }

static int failed(const qkv_multihead *m, const qkv_multihead_gradients *g, qkv_status s) {
  char text[256];
  qkv_multihead_backward_check(m, g, text, sizeof text);
  return printf("%s: %s\n", qkv_status_text(s), text), 1;
}

int main(void) {
  const float rate = 4;
  double table[QKV_FREQUENCIES_DOUBLES(HEAD_DIM)], first = 0, loss = 0;
  qkv_frequencies f = qkv_frequencies_default();
  f.rotary_dim = HEAD_DIM;
  qkv_frequencies_fill(&f, table, sizeof table);
  qkv_rotary rotary = qkv_rotary_default();
  rotary.table = table;

  qkv_mask causal = qkv_causal();
  qkv_problem a = qkv_problem_default();
  a.batch = BATCH;
  a.seqlen_q = ROWS;
  a.num_heads = HEADS;
  a.num_kv_heads = KV_HEADS;
  a.head_dim = HEAD_DIM;
  a.mask = &causal;
  a.mask_count = 1;
  qkv_multihead m = qkv_multihead_default();
  m.attention = &a;
  m.d_model = D_MODEL;
  m.rotary_q = m.rotary_k = &rotary;
  m.x = qkv_bsd(x, QKV_F32, ROWS, D_MODEL);
  m.y = qkv_bsd(y, QKV_F32, ROWS, D_MODEL);
  qkv_multihead_gradients g = qkv_multihead_gradients_default();
  g.dy = qkv_bsd(dy, QKV_F32, ROWS, D_MODEL);

  /* memory: parameters and their gradients, activations, one scratch for both calls */
  size_t bytes, forward, backward;
  qkv_projections_place(&m, 1, NULL, NULL, &bytes);
  float *parameters = malloc(bytes), *gradients = malloc(bytes);
  qkv_multihead_activations(&m, &m.activation_bytes);
  m.activations = malloc(m.activation_bytes);
  if (!parameters || !gradients || !m.activations) return 1;
  qkv_projections_place(&m, 1, parameters, &m.projections, NULL);
  qkv_projections_place(&m, 1, gradients, &g.projections, NULL);
  qkv_multihead_scratch(NULL, &m, &forward);
  qkv_multihead_backward_scratch(NULL, &m, &g, &backward);
  const size_t scratch_bytes = forward > backward ? forward : backward;
  void *scratch = malloc(scratch_bytes);
  if (!scratch) return 1;

  const int count = (int)(bytes / sizeof *parameters);
  for (int i = 0; i < count; i++) parameters[i] = number(i, 7919, 2111) / 4;
  for (int i = 0; i < VALUES; i++) {
    x[i] = 2 * number(i, 6947, 3119);
    target[i] = i % (ROWS * D_MODEL) < D_MODEL ? 0 : x[i - D_MODEL];
  }
  for (int step = 0; step <= STEPS; step++) {
    qkv_status s = qkv_multihead_forward(NULL, &m, scratch, scratch_bytes);
    loss = 0;
    for (int i = 0; i < VALUES; i++) { /* mean of squares */
      const float error = y[i] - target[i];
      loss += (double)error * error / VALUES;
      dy[i] = 2 * error / VALUES;
    }
    if (step == 0) first = loss;
    if (step % 50 == 0) printf("step %2d  loss %.6f\n", step, loss);
    if (!s) s = qkv_multihead_backward(NULL, &m, &g, scratch, scratch_bytes);
    if (s) return failed(&m, &g, s);
    for (int i = 0; i < count; i++) parameters[i] -= rate * gradients[i];
  }

  qkv_problem p = qkv_problem_default();
  const qkv_region last_row = {1, 2, 0, HEADS, ROWS - 1, ROWS}; /* of entry 1, all heads */
  const qkv_tensor to = qkv_bhsd(weights, QKV_F32, HEADS, 1, ROWS);
  qkv_status s = qkv_multihead_problem(&m, &p);
  if (!s) s = qkv_scores(NULL, &p, QKV_WEIGHTS, &last_row, &to);
  if (s) return failed(&m, &g, s);
  printf("weight that the last row gives the row before it, by head:");
  for (int h = 0; h < HEADS; h++) printf(" %.2f", (double)weights[h * ROWS + ROWS - 2]);
  printf("\n");
  free(scratch);
  free(m.activations);
  free(gradients);
  free(parameters);
  return !(loss < first / 4);
}

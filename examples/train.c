/* Training through attention: q, k and v are moved along their gradients until out is a given target. */
#include <qkv/qkv.h>
#include <stdio.h>

enum { HEADS = 2, ROWS = 100, DIM = 16, VALUES = HEADS * ROWS * DIM, STEPS = 60 };
static float x[3][VALUES], dx[3][VALUES]; /* q, k, v and their gradients */
static float out[VALUES], target[VALUES], dout[VALUES], lse[HEADS * ROWS];

static float number(int i, int a, int b) { return (float)(i * a % b - b / 2) / (float)b; }

int main(void) {
  const float rate = 1000;
  double first = 0, loss = 0;
  for (int i = 0; i < VALUES; i++) {
    x[0][i] = number(i, 7919, 211);
    x[1][i] = number(i, 6947, 311);
    x[2][i] = number(i, 5381, 401);
    target[i] = number(i / (DIM * 5), 3571, 97);
  }
  qkv_mask causal = qkv_causal();
  qkv_problem p = qkv_problem_default();
  p.batch = 1;
  p.num_heads = HEADS;
  p.seqlen_q = p.seqlen_kv = ROWS;
  p.head_dim = DIM;
  p.q = qkv_bhsd(x[0], QKV_F32, HEADS, ROWS, DIM);
  p.k = qkv_bhsd(x[1], QKV_F32, HEADS, ROWS, DIM);
  p.v = qkv_bhsd(x[2], QKV_F32, HEADS, ROWS, DIM);
  p.out = qkv_bhsd(out, QKV_F32, HEADS, ROWS, DIM);
  p.lse = qkv_bhs(lse, QKV_F32, HEADS, ROWS); /* the backward needs it */
  p.mask = &causal;
  p.mask_count = 1;
  qkv_gradients g = qkv_gradients_default();
  g.dout = qkv_bhsd(dout, QKV_F32, HEADS, ROWS, DIM);
  g.dq = qkv_bhsd(dx[0], QKV_F32, HEADS, ROWS, DIM);
  g.dk = qkv_bhsd(dx[1], QKV_F32, HEADS, ROWS, DIM);
  g.dv = qkv_bhsd(dx[2], QKV_F32, HEADS, ROWS, DIM);

  for (int step = 0; step <= STEPS; step++) {
    qkv_status s = qkv_forward(NULL, &p, NULL, 0);
    loss = 0;
    for (int i = 0; i < VALUES; i++) { /* mean of squares */
      const float error = out[i] - target[i];
      loss += (double)error * error / VALUES;
      dout[i] = 2 * error / VALUES;
    }
    if (step == 0) first = loss;
    if (step % 20 == 0) printf("step %2d  loss %.6f\n", step, loss);
    if (!s) s = qkv_backward(NULL, &p, &g, NULL, 0);
    if (s) {
      char text[256];
      qkv_backward_check(&p, &g, text, sizeof text);
      return printf("%s: %s\n", qkv_status_text(s), text), 1;
    }
    for (int t = 0; t < 3; t++)
      for (int i = 0; i < VALUES; i++) x[t][i] -= rate * dx[t][i];
  }
  return !(loss < first / 4);
}

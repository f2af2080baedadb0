/* Three sequences of different lengths in one call: packed rows without padding, and cu_seqlens that say where each begins.
 * Each sequence gets the bits it gets alone. */
#include <qkv/qkv.h>
#include <stdio.h>
#include <string.h>

enum { SEQUENCES = 3, ROWS = 100, HEADS = 2, DIM = 8 };
static const int32_t cu_seqlens[SEQUENCES + 1] = {0, 1, 71, ROWS}; /* lengths 1, 70, 29 */
static float q[ROWS * HEADS * DIM], k[ROWS * HEADS * DIM], v[ROWS * HEADS * DIM];
static float packed[ROWS * HEADS * DIM], alone[ROWS * HEADS * DIM];

static qkv_problem problem(int64_t batch, int64_t first, int64_t rows, float *out) {
  static const qkv_mask causal = {.kind = QKV_MASK_CAUSAL};
  qkv_problem p = qkv_problem_default();
  p.batch = batch;
  p.num_heads = HEADS;
  p.seqlen_q = p.seqlen_kv = rows;
  p.head_dim = DIM;
  p.q = qkv_bshd(q + first * HEADS * DIM, QKV_F32, HEADS, rows, DIM);
  p.k = qkv_bshd(k + first * HEADS * DIM, QKV_F32, HEADS, rows, DIM);
  p.v = qkv_bshd(v + first * HEADS * DIM, QKV_F32, HEADS, rows, DIM);
  p.out = qkv_bshd(out + first * HEADS * DIM, QKV_F32, HEADS, rows, DIM);
  p.mask = &causal;
  p.mask_count = 1;
  return p;
}

int main(void) {
  for (int i = 0; i < ROWS * HEADS * DIM; i++) {
    q[i] = (float)(i * 7919 % 211 - 105) / 60;
    k[i] = (float)(i * 6947 % 311 - 155) / 90;
    v[i] = (float)(i * 5381 % 401 - 200) / 200;
  }
  qkv_problem p = problem(SEQUENCES, 0, ROWS, packed);
  p.cu_seqlens_q = p.cu_seqlens_kv = cu_seqlens;
  qkv_status s = qkv_forward(NULL, &p, NULL, 0);
  for (int i = 0; i < SEQUENCES && !s; i++) {
    p = problem(1, cu_seqlens[i], cu_seqlens[i + 1] - cu_seqlens[i], alone);
    s = qkv_forward(NULL, &p, NULL, 0);
  }
  if (s) return printf("%s\n", qkv_status_text(s)), 1;
  const int same = !memcmp(packed, alone, sizeof packed);
  printf("%d sequences in one call: %s as alone\n", (int)SEQUENCES, same ? "the same bits" : "NOT the same bits");
  return !same;
}

/* On all cores, by the OpenMP runtime of this program; the library itself starts no thread. One thread or many: the same
 * bits. */
#include <qkv/openmp.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 6, N = 500, DIM = 32, SIZE = HEADS * N * DIM };
static float q[SIZE], k[SIZE], v[SIZE], out[2][SIZE];

int main(void) {
  for (int i = 0; i < SIZE; i++) {
    q[i] = (float)(i * 7919LL % 211 - 105) / 60;
    k[i] = (float)(i * 6947LL % 311 - 155) / 90;
    v[i] = (float)(i * 5381LL % 401 - 200) / 200;
  }
  qkv_problem p = qkv_problem_default();
  p.batch = 1;
  p.num_heads = HEADS;
  p.seqlen_q = p.seqlen_kv = N;
  p.head_dim = DIM;
  p.q = qkv_bhsd(q, QKV_F32, HEADS, N, DIM);
  p.k = qkv_bhsd(k, QKV_F32, HEADS, N, DIM);
  p.v = qkv_bhsd(v, QKV_F32, HEADS, N, DIM);
  p.out = qkv_bhsd(out[0], QKV_F32, HEADS, N, DIM);
  qkv_status s = qkv_forward(NULL, &p, NULL, 0); /* serial */

  qkv_context context = qkv_context_default();
  qkv_openmp(&context, 0);
  p.out = qkv_bhsd(out[1], QKV_F32, HEADS, N, DIM);
  if (!s) s = qkv_forward(&context, &p, NULL, 0);
  if (s) return printf("%s\n", qkv_status_text(s)), 1;
  const int same = !memcmp(out[0], out[1], sizeof out[0]);
  printf("%d thread(s): %s as one\n", (int)context.num_workers, same ? "the same bits" : "NOT the same bits");
  return !same;
}

/* One call: causal attention of 32 query heads on 8 key-value heads. */
#include <qkv/qkv.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  enum { n = 200, q_size = 32 * n * 128, kv_size = 8 * n * 128 };
  float *q = calloc(q_size, sizeof *q), *out = calloc(q_size, sizeof *out);
  float *k = calloc(kv_size, sizeof *k), *v = calloc(kv_size, sizeof *v);
  if (!q || !k || !v || !out) return 1;
  for (int i = 0; i < q_size; i++) q[i] = (float)(i % 37 - 18) / 9;
  for (int i = 0; i < kv_size; i++) k[i] = (float)(i % 41 - 20) / 10, v[i] = 1;

  qkv_problem p = qkv_problem_default();
  p.batch = 1; p.num_heads = 32; p.num_kv_heads = 8; p.seqlen_q = p.seqlen_kv = n; p.head_dim = 128;
  p.q = qkv_bhsd(q, QKV_F32, 32, n, 128);   p.out = qkv_bhsd(out, QKV_F32, 32, n, 128);
  p.k = qkv_bhsd(k, QKV_F32,  8, n, 128);   p.v   = qkv_bhsd(v,   QKV_F32,  8, n, 128);
  qkv_mask causal = qkv_causal();           p.mask = &causal; p.mask_count = 1;
  qkv_status s = qkv_forward(NULL, &p, NULL, 0);
  if (s) { char text[256]; qkv_check(&p, text, sizeof text); fprintf(stderr, "%s\n", text); return 1; }

  /* The weights of a row sum to 1, and V is 1 everywhere: every result is 1, to the bit. */
  int wrong = 0;
  for (int i = 0; i < q_size; i++) wrong += out[i] != 1;
  printf("%d results, %d of them not 1\n", (int)q_size, wrong);
  free(q), free(k), free(v), free(out);
  return wrong != 0;
}

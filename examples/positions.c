/* Positions: a sinusoidal encoding added to embeddings, rotated queries and keys, and what rotation is for: attention that depends on
 * distances alone. */
#include <qkv/position.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, N = 200, DIM = 64 };
static float q[HEADS * N * DIM], k[KV_HEADS * N * DIM], v[KV_HEADS * N * DIM], embedding[N * DIM];
static float rq[2][HEADS * N * DIM], rk[2][KV_HEADS * N * DIM], out[2][HEADS * N * DIM], one[HEADS * DIM];
static double table[QKV_FREQUENCIES_DOUBLES(DIM)];

/* Rows first ... first + rows - 1 of x, the first of them at position `start`, into `to`. */
static qkv_status rotate(const float *x, float *to, int64_t heads, int64_t rows, int64_t first, int64_t start) {
  qkv_rotary r = qkv_rotary_default();
  r.batch = 1;
  r.num_heads = heads;
  r.seqlen = rows;
  r.head_dim = DIM;
  r.table = table;
  r.start = start;
  r.x = qkv_bhsd(x + first * DIM, QKV_F32, heads, N, DIM);
  r.out = qkv_bhsd(to, QKV_F32, heads, rows, DIM);
  return qkv_rotary_forward(NULL, &r);
}

int main(void) {
  for (int i = 0; i < HEADS * N * DIM; i++) q[i] = (float)(i * 7919LL % 211 - 105) / 60;
  for (int i = 0; i < KV_HEADS * N * DIM; i++) {
    k[i] = (float)(i * 6947LL % 311 - 155) / 90;
    v[i] = (float)(i * 5381LL % 401 - 200) / 200;
  }

  qkv_sinusoidal s = qkv_sinusoidal_default();
  s.batch = 1;
  s.seqlen = N;
  s.d_model = DIM;
  s.x = qkv_strided(embedding, QKV_F32, 0, 0, DIM, 1); /* in place: no out */
  qkv_status status = qkv_sinusoidal_forward(NULL, &s);
  if (!status) printf("encoding of position 1: %.6f %.6f %.6f ...\n", embedding[DIM], embedding[DIM + 1], embedding[DIM + 2]);

  qkv_frequencies f = qkv_frequencies_default(); /* those of Llama 3.1 */
  f.rotary_dim = DIM;
  f.base = 500000;
  f.scaling = QKV_ROPE_LLAMA3;
  f.factor = 8;
  f.original_seqlen = 8192;
  if (!status) status = qkv_frequencies_fill(&f, table, sizeof table);

  /* The same sequence at positions 0 and 100000: other queries and keys, the same distances. */
  const qkv_mask causal = qkv_causal();
  for (int n = 0; n < 2 && !status; n++) {
    status = rotate(q, rq[n], HEADS, N, 0, n * 100000);
    if (!status) status = rotate(k, rk[n], KV_HEADS, N, 0, n * 100000);
    qkv_problem p = qkv_problem_default();
    p.batch = 1;
    p.num_heads = HEADS;
    p.num_kv_heads = KV_HEADS;
    p.seqlen_q = p.seqlen_kv = N;
    p.head_dim = DIM;
    p.q = qkv_bhsd(rq[n], QKV_F32, HEADS, N, DIM);
    p.k = qkv_bhsd(rk[n], QKV_F32, KV_HEADS, N, DIM);
    p.v = qkv_bhsd(v, QKV_F32, KV_HEADS, N, DIM);
    p.out = qkv_bhsd(out[n], QKV_F32, HEADS, N, DIM);
    p.mask = &causal;
    p.mask_count = 1;
    if (!status) status = qkv_forward(NULL, &p, NULL, 0);
  }
  if (!status) status = rotate(q, one, HEADS, 1, 77, 77); /* a token alone */
  if (status) return printf("%s\n", qkv_status_text(status)), 1;

  double difference = 0;
  for (int i = 0; i < HEADS * N * DIM; i++) {
    const double d = (double)out[0][i] - (double)out[1][i], size = d < 0 ? -d : d;
    if (!(size <= difference)) difference = size;
  }
  int same = 1;
  for (int h = 0; h < HEADS; h++) same = same && !memcmp(&one[h * DIM], &rq[0][(h * N + 77) * DIM], DIM * sizeof(float));
  printf("moved by 100000 positions, out differs by %.1e at most\n", difference);
  printf("token 77 alone: %s as in the sequence\n", same ? "the same bits" : "NOT the same bits");
  return !same || !(difference < 1e-4);
}

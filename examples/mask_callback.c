/* A mask by a function: the last 8 tokens and, further back, every 16th. The function answers for rectangles of at most
 * 64 x 64, so nothing of size seqlen x seqlen is held, and where it answers NONE nothing is computed. The same mask as bytes
 * gives the same bits. */
#include <qkv/qkv.h>
#include <stdio.h>
#include <string.h>

enum { N = 300, DIM = 16 };
static float q[N * DIM], k[N * DIM], v[N * DIM], by_function[N * DIM], by_bytes[N * DIM];
static unsigned char bytes[N * N];

static int sees(int64_t query, int64_t key) {
  const int64_t distance = query - key;
  return distance >= 0 && (distance < 8 || distance % 16 == 0);
}

static int32_t strided(void *user, const qkv_tile *t, uint64_t *bits) {
  int some = 0;
  (void)user;
  if (t->key_position > t->row_position + t->rows - 1) return QKV_TILE_NONE; /* all keys come after all queries */
  for (int64_t j = 0; j < t->keys; j++)
    for (int64_t r = 0; r < t->rows; r++)
      if (sees(t->row_position + r, t->key_position + j)) {
        bits[j] |= (uint64_t)1 << r;
        some = 1;
      }
  return some ? QKV_TILE_SOME : QKV_TILE_NONE;
}

static qkv_status attend(qkv_mask mask, float *out) {
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = 1;
  p.seqlen_q = p.seqlen_kv = N;
  p.head_dim = DIM;
  p.q = qkv_bhsd(q, QKV_F32, 1, N, DIM);
  p.k = qkv_bhsd(k, QKV_F32, 1, N, DIM);
  p.v = qkv_bhsd(v, QKV_F32, 1, N, DIM);
  p.out = qkv_bhsd(out, QKV_F32, 1, N, DIM);
  p.mask = &mask;
  p.mask_count = 1;
  return qkv_forward(NULL, &p, NULL, 0);
}

int main(void) {
  for (int i = 0; i < N * DIM; i++) {
    q[i] = (float)(i * 7919 % 211 - 105) / 60;
    k[i] = (float)(i * 6947 % 311 - 155) / 90;
    v[i] = (float)(i * 5381 % 401 - 200) / 200;
  }
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) bytes[i * N + j] = (unsigned char)sees(i, j);
  qkv_status s = attend(qkv_tiles(strided, NULL), by_function);
  if (!s) s = attend(qkv_dense(qkv_strided(bytes, QKV_U8, 0, 0, N, 1), 0), by_bytes);
  if (s) return printf("%s\n", qkv_status_text(s)), 1;
  const int same = !memcmp(by_function, by_bytes, sizeof by_bytes);
  printf("mask by function: %s as by bytes\n", same ? "the same bits" : "NOT the same bits");
  return !same;
}

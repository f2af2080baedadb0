/* Keys in two parts: attend to each part alone, merge, finish. As the cut is at a multiple of 512 positions, the result has
 * the bits of one call over all keys, in whichever order the parts are merged. */
#include <qkv/qkv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, ROWS = 3, KEYS = 1500, CUT = 1024, DIM = 16 };
static float q[HEADS * ROWS * DIM], k[KV_HEADS * KEYS * DIM], v[KV_HEADS * KEYS * DIM];
static float whole[HEADS * ROWS * DIM], merged[HEADS * ROWS * DIM];
static const int32_t last_rows = KEYS - ROWS; /* the queries are the last tokens: position of the first of them */
static const qkv_mask causal = {.kind = QKV_MASK_CAUSAL};

/* A problem over keys [from, to). Positions are explicit: a part does not know where the sequence ends. */
static qkv_problem part(int64_t from, int64_t to, const int32_t *from_position) {
  qkv_problem p = qkv_problem_default();
  p.batch = 1;
  p.num_heads = HEADS;
  p.num_kv_heads = KV_HEADS;
  p.seqlen_q = ROWS;
  p.seqlen_kv = to - from;
  p.head_dim = DIM;
  p.q = qkv_bhsd(q, QKV_F32, HEADS, ROWS, DIM);
  p.k = qkv_bhsd(k + from * DIM, QKV_F32, KV_HEADS, KEYS, DIM);
  p.v = qkv_bhsd(v + from * DIM, QKV_F32, KV_HEADS, KEYS, DIM);
  p.mask = &causal;
  p.mask_count = 1;
  p.align = QKV_ALIGN_EXPLICIT;
  p.q_position = &last_rows;
  p.kv_position = from_position;
  return p;
}

/* A state of `p` with room for `room` nodes (0: those of p itself). */
static qkv_status attend(const qkv_problem *p, int64_t room, qkv_state *state, void **memory) {
  size_t bytes;
  qkv_status s = qkv_state_bytes(p, room, NULL, &bytes);
  if (s) return s;
  *memory = malloc(bytes);
  if (!*memory) return QKV_NO_MEMORY;
  s = qkv_state_init(p, room, *memory, bytes, state);
  return s ? s : qkv_partial(NULL, p, state, NULL, 0);
}

int main(void) {
  for (int i = 0; i < HEADS * ROWS * DIM; i++) q[i] = (float)(i * 7919 % 211 - 105) / 60;
  for (int i = 0; i < KV_HEADS * KEYS * DIM; i++) {
    k[i] = (float)(i * 6947 % 311 - 155) / 90;
    v[i] = (float)(i * 5381 % 401 - 200) / 200;
  }
  const int32_t zero = 0, cut = CUT;
  qkv_problem all = part(0, KEYS, &zero), left = part(0, CUT, &zero), right = part(CUT, KEYS, &cut);
  all.out = qkv_bhsd(whole, QKV_F32, HEADS, ROWS, DIM);
  qkv_status s = qkv_forward(NULL, &all, NULL, 0);
  if (s) return printf("one call: %s\n", qkv_status_text(s)), 1;

  qkv_state a, b;
  void *memory_a = NULL, *memory_b = NULL;
  s = attend(&left, 0, &a, &memory_a);
  if (!s) s = attend(&right, 8, &b, &memory_b);
  if (s) return printf("parts: %s\n", qkv_status_text(s)), 1;
  printf("left has %d node(s), right %d\n", (int)a.count, (int)b.count);
  s = qkv_merge(NULL, &b, &a);
  all.out = qkv_bhsd(merged, QKV_F32, HEADS, ROWS, DIM);
  if (!s) s = qkv_finish(NULL, &all, &b);
  if (s) return printf("merge and finish: %s\n", qkv_status_text(s)), 1;
  free(memory_a);
  free(memory_b);
  const int same = !memcmp(whole, merged, sizeof whole);
  printf("two parts merged: %s as one call\n", same ? "the same bits" : "NOT the same bits");
  return !same;
}

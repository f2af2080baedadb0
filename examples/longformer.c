/* Longformer: a window, and global tokens with projections of their own. Some pairs of query and key are scored with (q, k, v), others
 * with (q_global, k_global, v_global), and each row has one softmax over both: attend twice, each time to the pairs of one kind, merge
 * the states, finish. Two readings of the paper are shown, which differ in the masks alone. */
#include <math.h>
#include <qkv/sparse.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 700, GLOBALS = 3, WINDOW = 64, DIM = 16 };
static float local[3][N * DIM], global[3][N * DIM], out[N * DIM]; /* q, k, v by the one and the other projections */

static qkv_problem problem(float projected[3][N * DIM], const qkv_mask *terms, int64_t count) {
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = 1;
  p.seqlen_q = p.seqlen_kv = N;
  p.head_dim = DIM;
  p.q = qkv_bhsd(projected[0], QKV_F32, 1, N, DIM);
  p.k = qkv_bhsd(projected[1], QKV_F32, 1, N, DIM);
  p.v = qkv_bhsd(projected[2], QKV_F32, 1, N, DIM);
  p.out = qkv_bhsd(out, QKV_F32, 1, N, DIM);
  p.mask = terms;
  p.mask_count = count;
  return p;
}

/* Whether the pair is scored by the global projections, by the local ones (-1), or not at all (0). */
static int kind_of_pair(int through_global, int i, int j) {
  if (i < GLOBALS) return 1;
  if (j < GLOBALS) return through_global ? 1 : -1;
  return abs(i - j) <= WINDOW / 2 ? -1 : 0;
}

static double error_of_row(int through_global, int i) {
  double score[N], most = -INFINITY, sum = 0, o[DIM] = {0}, error = 0;
  for (int j = 0; j < N; j++) {
    const int kind = kind_of_pair(through_global, i, j);
    float(*x)[N * DIM] = kind > 0 ? global : local;
    score[j] = kind ? 0 : -INFINITY;
    for (int c = 0; c < DIM && kind; c++) score[j] += (double)x[0][i * DIM + c] * (double)x[1][j * DIM + c] / sqrt(DIM);
    if (score[j] > most) most = score[j];
  }
  for (int j = 0; j < N; j++) {
    const double weight = exp(score[j] - most);
    sum += weight;
    for (int c = 0; c < DIM && weight > 0; c++)
      o[c] += weight * (double)(kind_of_pair(through_global, i, j) > 0 ? global : local)[2][j * DIM + c];
  }
  for (int c = 0; c < DIM; c++) error = fmax(error, fabs(o[c] / sum - (double)out[i * DIM + c]));
  return error;
}

int main(void) {
  for (int x = 0; x < 3; x++)
    for (int i = 0; i < N * DIM; i++) {
      local[x][i] = (float)((i + 11 * x) * 7919LL % 211 - 105) / 60;
      global[x][i] = (float)((i + 5 * x) * 6947LL % 311 - 155) / 90;
    }
  /* The published code: rows of global tokens use the global projections, all other rows the local ones. */
  const qkv_mask local_rows[] = {qkv_window(WINDOW / 2, WINDOW / 2), qkv_or(qkv_keys(0, GLOBALS)), qkv_queries(GLOBALS, N)};
  const qkv_mask global_rows[] = {qkv_queries(0, GLOBALS)};
  /* Every pair with a global token uses the global projections. */
  const qkv_mask local_pairs[] = {qkv_window(WINDOW / 2, WINDOW / 2), qkv_keys(GLOBALS, N), qkv_queries(GLOBALS, N)};
  const qkv_mask global_pairs[] = {qkv_keys(0, GLOBALS), qkv_or(qkv_queries(0, GLOBALS))};

  for (int through_global = 0; through_global < 2; through_global++) {
    const qkv_problem parts[2] = {problem(local, through_global ? local_pairs : local_rows, 3),
                                  problem(global, through_global ? global_pairs : global_rows, through_global ? 2 : 1)};
    qkv_state state[2];
    void *memory[2] = {NULL, NULL};
    double error = 0;
    qkv_status s = QKV_OK;
    for (int n = 0; n < 2 && !s; n++) {
      size_t bytes;
      int64_t nodes;
      s = qkv_state_bytes(&parts[n], 0, &nodes, &bytes);
      if (!s) s = qkv_state_bytes(&parts[n], 2 * nodes, NULL, &bytes); /* the first takes the nodes of both */
      memory[n] = s ? NULL : malloc(bytes);
      if (!s) s = memory[n] ? qkv_state_init(&parts[n], 2 * nodes, memory[n], bytes, &state[n]) : QKV_NO_MEMORY;
      if (!s) s = qkv_partial(NULL, &parts[n], &state[n], NULL, 0);
    }
    if (!s) s = qkv_merge(NULL, &state[0], &state[1]);
    if (!s) s = qkv_finish(NULL, &parts[0], &state[0]);
    free(memory[0]);
    free(memory[1]);
    if (s) return printf("%s\n", qkv_status_text(s)), 1;
    for (int i = 0; i < N; i++) error = fmax(error, error_of_row(through_global, i));
    printf("%s: largest error %.1e\n", through_global ? "global projections for pairs" : "global projections for rows ",
           error);
    if (!(error < 1e-5)) return 1;
  }
  return 0;
}

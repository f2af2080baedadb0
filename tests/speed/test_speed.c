/* A floor under the speed of the kernels: the share of the FMA peak measured right before and after each run, best of several. It
 * is far below what the kernels reach (docs/PERFORMANCE.md) and far above what a miscompiled tile does: accumulators in memory
 * give a fifth. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qkv/qkv.h>

#include "machine.h"

enum { SEQLEN = 1024, ROUNDS = 40 };
static const double FLOOR = 0.45;


/* Best share of the peak of one core. */
static double share(const char *isa, int64_t head_dim, const float *data, float *out) {
  qkv_context c = qkv_context_default();
  qkv_problem p = qkv_problem_default();
  double best = 0;
  c.isa_cap = isa;
  p.batch = p.num_heads = p.num_kv_heads = 1;
  p.seqlen_q = p.seqlen_kv = SEQLEN;
  p.head_dim = head_dim;
  p.q = p.k = p.v = qkv_bhsd(data, QKV_F32, 1, SEQLEN, head_dim);
  p.out = qkv_bhsd(out, QKV_F32, 1, SEQLEN, head_dim);
  for (int i = 0; i < ROUNDS; i++) {
    const double before = machine_peak_gflops(QKV_F32, isa), start = machine_now();
    if (qkv_forward(&c, &p, NULL, 0) != QKV_OK) return -1;
    const double seconds = machine_now() - start, after = machine_peak_gflops(QKV_F32, isa);
    const double s = 4.0 * SEQLEN * SEQLEN * (double)head_dim / seconds / 1e9 / ((before + after) / 2);
    if (s > best) best = s;
  }
  return best;
}

int main(void) {
  static const char *const isas[] = {"avx512", "avx2", "neon"};
  int passed = 0, failed = 0;
  float *data = malloc(SEQLEN * 128 * sizeof *data), *out = malloc(SEQLEN * 128 * sizeof *out);
  if (!data || !out) return 1;
  for (int i = 0; i < SEQLEN * 128; i++) data[i] = (float)(i * 2654435761u % 1000) / 1000 - 0.5f;
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    if (machine_peak_gflops(QKV_F32, isas[i]) <= 0) {
      printf("%s: not on this CPU\n", isas[i]);
      continue;
    }
    for (int64_t d = 64; d <= 128; d *= 2) {
      const double s = share(isas[i], d, data, out);
      printf("%s, head_dim %d: %.1f %% of the FMA peak (floor %.0f %%)\n", isas[i], (int)d, 100 * s, 100 * FLOOR);
      if (s >= FLOOR) passed++;
      else failed++;
    }
  }
  free(data);
  free(out);
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

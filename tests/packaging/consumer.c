#include <qkv/qkv.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  if (qkv_version() != QKV_VERSION_MAJOR * 10000 + QKV_VERSION_MINOR * 100 + QKV_VERSION_PATCH || qkv_order() < 1) {
    printf("library version %d, order %d\n", (int)qkv_version(), (int)qkv_order());
    return 1;
  }

  /* Equal scores: the result is the mean of the rows of V. */
  float q[2] = {0, 0}, k[6] = {1, 2, 3, 4, 5, 6}, v[6] = {1, 2, 3, 4, 5, 9}, out[2] = {0, 0};
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = p.seqlen_q = 1;
  p.seqlen_kv = 3;
  p.head_dim = 2;
  p.q = qkv_bhsd(q, QKV_F32, 1, 1, 2);
  p.k = qkv_bhsd(k, QKV_F32, 1, 3, 2);
  p.v = qkv_bhsd(v, QKV_F32, 1, 3, 2);
  p.out = qkv_bhsd(out, QKV_F32, 1, 1, 2);
  qkv_status status = qkv_forward(NULL, &p, NULL, 0);
  if (status != QKV_OK || out[0] != 3.0f || out[1] != 5.0f) {
    printf("%s: %g %g\n", qkv_status_text(status), out[0], out[1]);
    return 1;
  }

  char text[200] = "";
  p.num_heads = 6;
  p.num_kv_heads = 4;
  if (qkv_check(&p, text, sizeof text) != QKV_BAD_EXTENT || !strstr(text, "num_kv_heads")) {
    printf("a bad problem gave '%s'\n", text);
    return 1;
  }
  return 0;
}

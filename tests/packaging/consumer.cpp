#include <qkv/qkv.h>

#include <cstdio>
#include <string>
#include <vector>

int main() {
  const int64_t heads = 2, n = 5, d = 3;
  std::vector<float> q(heads * n * d), k(n * d, 1.0f), v(n * d), out(heads * n * d, -1.0f);
  for (int64_t j = 0; j < n * d; j++) v[j] = static_cast<float>(j / d);
  qkv_mask self = qkv_window(0, 0);
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_kv_heads = 1;
  p.num_heads = heads;
  p.seqlen_q = p.seqlen_kv = n;
  p.head_dim = d;
  p.q = qkv_bhsd(q.data(), QKV_F32, heads, n, d);
  p.k = qkv_bhsd(k.data(), QKV_F32, 1, n, d);
  p.v = qkv_bhsd(v.data(), QKV_F32, 1, n, d);
  p.out = qkv_bhsd(out.data(), QKV_F32, heads, n, d);
  p.mask = &self;
  p.mask_count = 1;
  qkv_status status = qkv_forward(nullptr, &p, nullptr, 0);
  if (status != QKV_OK) {
    std::printf("%s\n", std::string(qkv_status_text(status)).c_str());
    return 1;
  }
  // Each query sees only its own key.
  for (int64_t h = 0; h < heads; h++)
    for (int64_t j = 0; j < n * d; j++)
      if (out[h * n * d + j] != v[j]) {
        std::printf("head %d, element %d: %g\n", static_cast<int>(h), static_cast<int>(j), out[h * n * d + j]);
        return 1;
      }
  return 0;
}

/* The known answers of docs/NUMERICS.md, section 13, on every instruction set of this machine. */
#include <qkv/qkv.h>
#include <math.h>
#include <stdio.h>

/* out, out, lse: problem A, then rows (0,0) (0,1) (0,2) (1,0) (1,1) (1,2) of problem B */
static const double expected[2][21] = {
  {0x1.490d7ep-14, -0x1.02f742p-5, 0x1.eb0f04p+2, 0x1.190b76p-4, -0x1.a9be96p-3, 0x1.576e2p+2, 0x1.aa1eb8p-3,
   -0x1.d61dc4p-3, 0x1.3e02cp+2, 0x1.089a52p-5, 0x1.1ad9dap-7, 0x1.3b7736p+2, 0x1.f2081cp-8, -0x1.c8b388p-5,
   0x1.b8f878p+2, -0x1.556feap-7, 0x1.1b53ep-5, 0x1.bf1876p+2, -0x1.1a6cdap-5, 0x1.a4f7b8p-6, 0x1.aa436cp+2},
  {0x1.490aabf04ac58p-14, -0x1.02f745e08db6bp-5, 0x1.eb0f050c29a67p+2, 0x1.190b68a43a19dp-4, -0x1.a9be96460b58bp-3,
   0x1.576e1f2da6714p+2, 0x1.aa1eaf2c006ep-3, -0x1.d61dc8ba664dbp-3, 0x1.3e02bf54f9e7p+2, 0x1.089a57f072fcap-5,
   0x1.1ad9ebd74a32cp-7, 0x1.3b773600460efp+2, 0x1.f20810da6885p-8, -0x1.c8b3832815845p-5, 0x1.b8f8785b190aap+2,
   -0x1.556ff477b3c8cp-7, 0x1.1b53e202b166cp-5, 0x1.bf1875eeb865ap+2, -0x1.1a6cd7667424p-5, 0x1.a4f7b6810793p-6,
   0x1.aa436c153f9d4p+2}};

static union array {
  float f32[6600];
  double f64[6600];
} q, k, v, bias, out, lse;

static void put(int wide, union array *to, int t, double x) {
  if (wide) to->f64[t] = x;
  else to->f32[t] = (float)x;
}
static double get(int wide, const union array *from, int t) { return wide ? from->f64[t] : (double)from->f32[t]; }

static int compare(int wide, const char *isa, int first, int rows) {
  int wrong = 0;
  for (int i = 0; i < 3 * rows; i++) {
    const double x = i % 3 < 2 ? get(wide, &out, i / 3 * 2 + i % 3) : get(wide, &lse, i / 3);
    if (x != expected[wide][3 * first + i]) {
      printf("%s, %s: row %d, number %d: %a instead of %a\n", wide ? "f64" : "f32", isa, first + i / 3, i % 3, x,
             expected[wide][3 * first + i]);
      wrong++;
    }
  }
  return wrong;
}

static int run(int wide, const char *isa) {
  const int32_t type = wide ? QKV_F64 : QKV_F32, kv_position = 100;
  const double slopes[2] = {1. / 64, 1. / 512}, sinks[2] = {0.5, 1.5};
  const qkv_mask mask[2] = {qkv_causal(), qkv_window(700, 0)};
  for (int t = 0; t < 24; t++) put(wide, &q, t, (7919 * t % 211 - 105) / 64.);
  for (int t = 0; t < 4400; t++) put(wide, &k, t, (6947 * t % 311 - 155) / 64.);
  for (int t = 0; t < 2200; t++) put(wide, &v, t, (5381 * t % 401 - 200) / 128.);
  for (int t = 0; t < 6600; t++) put(wide, &bias, t, t % 29 == 0 ? (double)-INFINITY : (4217 * t % 97 - 48) / 32.);

  qkv_context c = qkv_context_default();
  c.isa_cap = isa;
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = p.num_kv_heads = p.seqlen_q = 1;
  p.seqlen_kv = 1100;
  p.head_dim = 4;
  p.head_dim_v = 2;
  p.q = qkv_bhsd(&q, type, 1, 1, 4);
  p.k = qkv_bhsd(&k, type, 1, 1100, 4);
  p.v = qkv_bhsd(&v, type, 1, 1100, 2);
  p.out = qkv_bhsd(&out, type, 1, 1, 2);
  p.lse = qkv_bhs(&lse, type, 1, 1);
  qkv_status s = qkv_forward(&c, &p, NULL, 0);
  if (s) return printf("A: %s\n", qkv_status_text(s)), 1;
  int wrong = compare(wide, isa, 0, 1);

  p.num_heads = 2;
  p.seqlen_q = 3;
  p.q = qkv_bhsd(&q, type, 2, 3, 4);
  p.out = qkv_bhsd(&out, type, 2, 3, 2);
  p.lse = qkv_bhs(&lse, type, 2, 3);
  p.bias = qkv_bhsd(&bias, type, 2, 3, 1100);
  p.alibi_slopes = qkv_per_head(slopes, QKV_F64);
  p.sinks = qkv_per_head(sinks, QKV_F64);
  p.softcap = 5;
  p.kv_position = &kv_position;
  p.mask = mask;
  p.mask_count = 2;
  s = qkv_forward(&c, &p, NULL, 0);
  if (s) return printf("B: %s\n", qkv_status_text(s)), 1;
  return wrong + compare(wide, isa, 1, 6);
}

int main(void) {
  static const char *const isas[] = {"avx512", "avx2", "neon", "portable", "reference"};
  int wrong = 0, tried = 0;
  for (int i = 0; i < 5; i++) {
    qkv_context c = qkv_context_default();
    qkv_problem p = qkv_problem_default();
    p.head_dim = 1;
    c.isa_cap = isas[i];
    if (qkv_describe(&c, &p, NULL, 0) != QKV_OK) continue; /* not built for this machine */
    tried++;
    wrong += run(0, isas[i]) + run(1, isas[i]);
  }
  printf("order %d, %d instruction set(s), %d number(s) differ\n", (int)qkv_order(), tried, wrong);
  return wrong != 0;
}

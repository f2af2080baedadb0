#include "second.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "oracle.h"
#include "problem_text.h"

#define LOG2E 0x1.71547652b82fep+0

static int64_t dim_v(const qkv_problem *p) { return p->head_dim_v > 0 ? p->head_dim_v : p->head_dim; }
static double softmax_scale(const qkv_problem *p) {
  return p->softmax_scale != 0 ? p->softmax_scale : 1 / sqrt((double)p->head_dim);
}
static int64_t query_count(const qkv_problem *p, int64_t b) {
  return p->q_length != NULL ? p->q_length[b] : problem_rows(p, b);
}
static int64_t element(const int64_t extents[4], const int64_t at[4]) {
  int64_t index = 0;
  for (int axis = 0; axis < 4; axis++) {
    index = index * extents[axis] + (extents[axis] > 1 ? at[axis] : 0);
  }
  return index;
}

#define REAL     float
#define NAME(x)  f32_##x
#define FMA      fmaf
#define RINT     rintf
#define LDEXP    ldexpf
#define LARGEST  FLT_MAX
#define EXP2_MIN (-125.f)
#define EXP2     0x1.416b26p-13f, 0x1.5f082ep-10f, 0x1.3b2de0p-7f, 0x1.c6af7cp-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f
#define TANH_MAX 8.f
#define TANH_N   0x1.06bad6p-26f, 0x1.7015b2p-16f, 0x1.d47f18p-9f, 0x1.136414p-3f
#define TANH_Q   0x1.cae992p-21f, 0x1.662b48p-12f, 0x1.acd998p-6f, 0x1.df075cp-2f
#include "second.inc"
#undef REAL
#undef NAME
#undef FMA
#undef RINT
#undef LDEXP
#undef LARGEST
#undef EXP2_MIN
#undef EXP2
#undef TANH_MAX
#undef TANH_N
#undef TANH_Q

#define REAL     double
#define NAME(x)  f64_##x
#define FMA      fma
#define RINT     rint
#define LDEXP    ldexp
#define LARGEST  DBL_MAX
#define EXP2_MIN (-1021.)
#define EXP2                                                                                                          \
  0x1.e957882ab3a0bp-32, 0x1.e61afc51358e4p-28, 0x1.b525344b8da06p-24, 0x1.62bfc7d3a7f8ep-20, 0x1.ffcbfc5ebb9e9p-17,  \
      0x1.4309130ebfe67p-13, 0x1.5d87fe789ff8ep-10, 0x1.3b2ab6fba01aep-7, 0x1.c6b08d704a127p-5, 0x1.ebfbdff82c5a4p-3, \
      0x1.62e42fefa39efp-1
#define TANH_MAX 17.75
#define TANH_N                                                                                                       \
  0x1.1e5b0270bf272p-75, 0x1.ed40713843376p-61, 0x1.def1cf206ab08p-49, 0x1.35675262fb9ccp-38, 0x1.5a6f09ed47b81p-29, \
      0x1.757fb3e30560ap-21, 0x1.8c44fa1ac5e9ep-14, 0x1.8913780c45244p-8, 0x1.3736d3dc5821dp-3
#define TANH_Q                                                                                                       \
  0x1.0f2fcff9b80a4p-67, 0x1.1ecd4df66a708p-54, 0x1.31913071109c4p-43, 0x1.fd737c53c29bdp-34, 0x1.88f1962e9254bp-25, \
      0x1.29a7d993cf84ep-17, 0x1.b4e0bcb2057f9p-11, 0x1.1a0ad371481ebp-5, 0x1.f0f0bf4381661p-2
#include "second.inc"

bool second_backward(const qkv_problem *p, const qkv_gradients *g) {
  return p->q.dtype == QKV_F64 ? f64_backward(p, g) : f32_backward(p, g);
}

/* The constants of order 1 (docs/NUMERICS.md), in one place for kernels and reference. The coefficients come from
 * tools/fit_constants.py. */
#ifndef QKV_BASE_ORDER1_H
#define QKV_BASE_ORDER1_H

enum { QKV_ORDER = 1, QKV_BLOCK = 64, QKV_SPLIT = 512 };

#define QKV_LOG2E 0x1.71547652b82fep+0
#define QKV_LN2   0x1.62e42fefa39efp-1

/* exp2_c: from the highest power down to the first; the zeroth is exactly 1. */
#define QKV_EXP2_F32(X) \
  X(0x1.416b26p-13f) X(0x1.5f082ep-10f) X(0x1.3b2de0p-7f) X(0x1.c6af7cp-5f) X(0x1.ebfbdcp-3f) X(0x1.62e430p-1f)
#define QKV_EXP2_MIN_F32 (-125.f)
#define QKV_ROUND_F32    0x1.8p23f /* adding and subtracting it rounds to an integer */

#define QKV_TANH_MAX_F32  8.f
#define QKV_TANH_N_F32(X) X(0x1.06bad6p-26f) X(0x1.7015b2p-16f) X(0x1.d47f18p-9f) X(0x1.136414p-3f)
#define QKV_TANH_Q_F32(X) X(0x1.cae992p-21f) X(0x1.662b48p-12f) X(0x1.acd998p-6f) X(0x1.df075cp-2f)

#define QKV_EXP2_F64(X)                                                                                 \
  X(0x1.e957882ab3a0bp-32)                                                                              \
  X(0x1.e61afc51358e4p-28) X(0x1.b525344b8da06p-24) X(0x1.62bfc7d3a7f8ep-20) X(0x1.ffcbfc5ebb9e9p-17)   \
      X(0x1.4309130ebfe67p-13) X(0x1.5d87fe789ff8ep-10) X(0x1.3b2ab6fba01aep-7) X(0x1.c6b08d704a127p-5) \
          X(0x1.ebfbdff82c5a4p-3) X(0x1.62e42fefa39efp-1)
#define QKV_EXP2_MIN_F64 (-1021.)
#define QKV_ROUND_F64    0x1.8p52

#define QKV_TANH_MAX_F64 17.75
#define QKV_TANH_N_F64(X)                                                                             \
  X(0x1.1e5b0270bf272p-75)                                                                            \
  X(0x1.ed40713843376p-61) X(0x1.def1cf206ab08p-49) X(0x1.35675262fb9ccp-38) X(0x1.5a6f09ed47b81p-29) \
      X(0x1.757fb3e30560ap-21) X(0x1.8c44fa1ac5e9ep-14) X(0x1.8913780c45244p-8) X(0x1.3736d3dc5821dp-3)
#define QKV_TANH_Q_F64(X)                                                                             \
  X(0x1.0f2fcff9b80a4p-67)                                                                            \
  X(0x1.1ecd4df66a708p-54) X(0x1.31913071109c4p-43) X(0x1.fd737c53c29bdp-34) X(0x1.88f1962e9254bp-25) \
      X(0x1.29a7d993cf84ep-17) X(0x1.b4e0bcb2057f9p-11) X(0x1.1a0ad371481ebp-5) X(0x1.f0f0bf4381661p-2)

/* log2_64: from the highest power down to the zeroth, in plain multiplications and additions. */
#define QKV_LOG2_64(X)                                                                                                    \
  X(0x1.b9f72fa43ab21p-3)                                                                                                 \
  X(0x1.c3f2007c71e77p-3) X(0x1.0ca41d66dca3ap-2) X(0x1.484aebb8a9137p-2) X(0x1.a617630720ceap-2) X(0x1.2776c50ebd38dp-1) \
      X(0x1.ec709dc3a0629p-1) X(0x1.71547652b82fep+1)

#endif

/* What the CPU and the operating system offer. */
#ifndef QKV_BASE_CPU_H
#define QKV_BASE_CPU_H
#include <stdint.h>
enum {
  QKV__CPU_KNOWN = 1,
  QKV__CPU_AVX2 = 2,
  QKV__CPU_AVX512 = 4,
  QKV__CPU_NEON = 8,
  /* Additions and conversions have pipes of their own beside the multipliers (AMD Zen): exp2 costs least spread among
   * products. Where they share the pipes (Intel), it only disturbs them. Measured; no bit depends on it. */
  QKV__CPU_ADD_PIPES = 16,
  QKV__CPU_AVX512_BF16 = 32,
  QKV__CPU_AMX = 64 /* only of qkv__cpu_fast */
};
/* The library's only global state: one word, found once, the same whoever finds it. */
uint32_t qkv__cpu(void);
/* The same and AMX, which Linux gives to a process on request. */
uint32_t qkv__cpu_fast(void);
#endif

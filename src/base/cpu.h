/* What the CPU and the operating system offer. */
#ifndef QKV_BASE_CPU_H
#define QKV_BASE_CPU_H
#include <stdint.h>
enum { QKV__CPU_KNOWN = 1, QKV__CPU_AVX2 = 2, QKV__CPU_AVX512 = 4, QKV__CPU_NEON = 8 };
/* The library's only global state: one word, found once, the same whoever finds it. */
uint32_t qkv__cpu(void);
#endif

#include "base/cpu.h"

#include "base/port.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
static uint32_t find(void) {
  unsigned a, b, c, d, low, high;
  uint32_t found = QKV__CPU_KNOWN;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return found;
  if (b == 0x68747541) found |= QKV__CPU_ADD_PIPES; /* "Auth", of AuthenticAMD */
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const unsigned fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx || !fma || !f16c) return found;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6) return found; /* the system saves xmm and ymm */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  if (b >> 5 & 1) found |= QKV__CPU_AVX2;
  const unsigned need = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
  if ((found & QKV__CPU_AVX2) && (low & 0xe0) == 0xe0 && (b & need) == need) found |= QKV__CPU_AVX512;
  if ((found & QKV__CPU_AVX512) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1)) found |= QKV__CPU_AVX512_BF16;
  return found;
}
static uint32_t find_amx(void) {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d, low, high;
  if (!(qkv__cpu() & QKV__CPU_AVX512)) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x60000) != 0x60000 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* AMX-BF16, AMX-TILE */
  long result = 158;                              /* arch_prctl(ARCH_REQ_XCOMP_PERM, tile data) */
  __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
  return result == 0 ? QKV__CPU_AMX : 0;
#else
  return 0;
#endif
}
#elif defined(__aarch64__)
static uint32_t find(void) { return QKV__CPU_KNOWN | QKV__CPU_NEON; }
static uint32_t find_amx(void) { return 0; }
#else
static uint32_t find(void) { return QKV__CPU_KNOWN; }
static uint32_t find_amx(void) { return 0; }
#endif

uint32_t qkv__cpu_fast(void) {
  static uint32_t word;
  uint32_t w = QKV_LOAD_RELAXED(&word);
  if (!w) {
    w = qkv__cpu() | find_amx();
    QKV_STORE_RELAXED(&word, w);
  }
  return w;
}

uint32_t qkv__cpu(void) {
  static uint32_t word;
  uint32_t w = QKV_LOAD_RELAXED(&word);
  if (!w) {
    w = find();
    QKV_STORE_RELAXED(&word, w);
  }
  return w;
}

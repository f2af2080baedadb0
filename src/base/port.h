/* The one place for what C11 does not say: attributes, compiler checks, pins. */
#ifndef QKV_BASE_PORT_H
#define QKV_BASE_PORT_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__FAST_MATH__)
#error "qkv promises bits: build it without -ffast-math"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "qkv promises bits: float expressions must be evaluated in float (x87 code is not supported)"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define QKV_INLINE           static inline __attribute__((always_inline, unused))
#define QKV_NOINLINE         static __attribute__((noinline))
#define QKV_MAYBE_UNUSED     __attribute__((unused))
#define QKV_FORMAT(a, b)     __attribute__((format(printf, a, b)))
#define QKV_UNROLL_TEXT(x)   #x
#define QKV_UNROLL_PRAGMA(n) QKV_UNROLL_TEXT(GCC unroll n)
#define QKV_UNROLL(n)        _Pragma(QKV_UNROLL_PRAGMA(n))
/* Loops over the registers of a tile: their bounds are constants once everything is inlined. */
#if defined(__clang__)
#define QKV_UNROLL_ALL _Pragma("clang loop unroll(full)")
#else
#define QKV_UNROLL_ALL _Pragma("GCC unroll 16")
#endif
#define QKV_LOAD_RELAXED(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define QKV_STORE_RELAXED(p, x) __atomic_store_n((p), (x), __ATOMIC_RELAXED)
#define QKV_HAS_ATOMICS         1 /* without, nothing that needs the following is run */
#define QKV_LOAD_ACQUIRE(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define QKV_STORE_RELEASE(p, x) __atomic_store_n((p), (x), __ATOMIC_RELEASE)
#define QKV_TAKE(p)             (__atomic_exchange_n((p), 1, __ATOMIC_ACQUIRE) == 0) /* 0 becomes 1; whether it was 0 */
#if defined(__x86_64__) || defined(__i386__)
#define QKV_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define QKV_PAUSE() __asm__ volatile("yield")
#else
#define QKV_PAUSE() (void)0
#endif
#define QKV_CTZ64(x)            __builtin_ctzll(x)
#define QKV_CLZ64(x)            __builtin_clzll(x)
#define QKV_POPCOUNT64(x)       __builtin_popcountll(x)
#else
#define QKV_HAS_ATOMICS         0
#define QKV_LOAD_ACQUIRE(p)     (*(p))
#define QKV_STORE_RELEASE(p, x) (*(p) = (x))
#define QKV_TAKE(p)             (*(p) ? 0 : (*(p) = 1))
#define QKV_PAUSE()             (void)0
#define QKV_INLINE   static inline
#define QKV_NOINLINE static
#define QKV_MAYBE_UNUSED
#define QKV_FORMAT(a, b)
#define QKV_UNROLL(n)
#define QKV_UNROLL_ALL
#define QKV_LOAD_RELAXED(p)     (*(volatile const int32_t *)(p))
#define QKV_STORE_RELAXED(p, x) (*(volatile int32_t *)(p) = (x))
static inline int qkv_ctz64_(uint64_t x) {
  int n = 0;
  for (; !(x & 1); x >>= 1) n++;
  return n;
}
static inline int qkv_clz64_(uint64_t x) {
  int n = 0;
  for (; !(x >> 63); x <<= 1) n++;
  return n;
}
static inline int qkv_popcount64_(uint64_t x) {
  int n = 0;
  for (; x; x &= x - 1) n++;
  return n;
}
#define QKV_CTZ64(x)            qkv_ctz64_(x)
#define QKV_CLZ64(x)            qkv_clz64_(x)
#define QKV_POPCOUNT64(x)       qkv_popcount64_(x)
#endif

/* Lets other threads of this processor run. */
#if !defined(__STDC_NO_THREADS__) && defined(__has_include)
#if __has_include(<threads.h>)
#include <threads.h>
#define QKV_YIELD() thrd_yield()
#endif
#endif
#ifndef QKV_YIELD
#define QKV_YIELD() (void)0
#endif

#define QKV_MIN(a, b) ((a) < (b) ? (a) : (b))
#define QKV_MAX(a, b) ((a) > (b) ? (a) : (b))

#endif

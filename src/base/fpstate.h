/* The floating-point state of the arithmetic: round to nearest, no flush to zero, no traps. Entered by every public call
 * and every task; the caller's state, flags included, comes back at the end. */
#ifndef QKV_BASE_FPSTATE_H
#define QKV_BASE_FPSTATE_H

#include <stdint.h>

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
typedef struct {
  uint32_t csr;
} qkv__fpstate;
static inline void qkv__fp_enter(qkv__fpstate *s) {
  s->csr = _mm_getcsr();
  if ((s->csr & ~0x3Fu) != 0x1F80u) _mm_setcsr(0x1F80u);
}
static inline void qkv__fp_leave(const qkv__fpstate *s) {
  if (_mm_getcsr() != s->csr) _mm_setcsr(s->csr);
}
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
typedef struct {
  uint64_t control, status;
} qkv__fpstate;
static inline void qkv__fp_enter(qkv__fpstate *s) {
  __asm__ volatile("mrs %0, fpcr" : "=r"(s->control));
  __asm__ volatile("mrs %0, fpsr" : "=r"(s->status));
  if (s->control != 0) __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
}
static inline void qkv__fp_leave(const qkv__fpstate *s) {
  if (s->control != 0) __asm__ volatile("msr fpcr, %0" ::"r"(s->control));
  __asm__ volatile("msr fpsr, %0" ::"r"(s->status));
}
#else
#include <fenv.h>
typedef struct {
  fenv_t env;
} qkv__fpstate;
static inline void qkv__fp_enter(qkv__fpstate *s) {
  feholdexcept(&s->env);
  fesetround(FE_TONEAREST);
}
static inline void qkv__fp_leave(const qkv__fpstate *s) { fesetenv(&s->env); }
#endif

#endif

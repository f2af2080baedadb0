/* Run-time choice among the rows of isa.def. */
#include <string.h>

#include "base/cpu.h"
#include "kernel/kernel.h"

#define QKV__ISA(name, need, kernel, fast, want) extern const qkv__kernel qkv__kernel_##kernel##_f32, qkv__kernel_##kernel##_f64;
#include "kernel/isa.def"
#undef QKV__ISA
extern const qkv__fast qkv__fast_amx, qkv__fast_avx512_bf16;

static const struct {
  const char *name;
  uint32_t need, want;
  const qkv__kernel *kernel[2];
  const qkv__fast *fast;
} rows[] = {
#define QKV__ISA(name, need, kernel, fast, want) \
  {#name, need, want, {&qkv__kernel_##kernel##_f32, &qkv__kernel_##kernel##_f64}, fast},
#include "kernel/isa.def"
#undef QKV__ISA
};

const qkv__kernel *qkv__kernel_of(int f64, const char *cap, const qkv__fast **fast, const char **reason) {
  const char *why = "the best of this CPU";
  const uint32_t cpu = fast ? qkv__cpu_fast() : qkv__cpu();
  int capped = cap != NULL;
  if (fast) *fast = NULL;
  if (cap && !strcmp(cap, "reference")) cap = "portable"; /* for what the reference does not do itself: states */
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const int named = cap && !strcmp(cap, rows[i].name);
    if (capped && !named) continue;
    if (capped) why = "isa_cap asks for it";
    capped = 0;
    if (rows[i].fast && !fast && !named) continue; /* the same canonical kernel comes below */
    if ((cpu & rows[i].need) == rows[i].need && (named || (cpu & rows[i].want) == rows[i].want)) {
      if (reason) *reason = why;
      if (fast && !f64) *fast = rows[i].fast;
      return rows[i].kernel[f64 != 0];
    }
    if (cap) why = "isa_cap is more than this CPU has";
  }
  return NULL;
}

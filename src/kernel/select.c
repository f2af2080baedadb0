/* Run-time choice among the kernels of isa.def. */
#include <string.h>

#include "base/cpu.h"
#include "kernel/kernel.h"

#define QKV__ISA(name, need) extern const qkv__kernel qkv__kernel_##name##_f32, qkv__kernel_##name##_f64;
#include "kernel/isa.def"
#undef QKV__ISA

static const struct {
  const char *name;
  uint32_t need;
  const qkv__kernel *kernel[2];
} rows[] = {
#define QKV__ISA(name, need) {#name, need, {&qkv__kernel_##name##_f32, &qkv__kernel_##name##_f64}},
#include "kernel/isa.def"
#undef QKV__ISA
};

const qkv__kernel *qkv__kernel_of(int f64, const char *cap, const char **reason) {
  const char *why = "the best of this CPU";
  int capped = cap != NULL;
  if (cap && !strcmp(cap, "reference")) cap = "portable"; /* for what the reference does not do itself: states */
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (capped && strcmp(cap, rows[i].name) != 0) continue;
    if (capped) why = "isa_cap asks for it";
    capped = 0;
    if ((qkv__cpu() & rows[i].need) == rows[i].need) {
      if (reason) *reason = why;
      return rows[i].kernel[f64 != 0];
    }
    why = cap ? "isa_cap is more than this CPU has" : "the best of this CPU";
  }
  return NULL;
}

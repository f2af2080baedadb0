/* What this machine is and how fast it could be: names, caches, free memory, the peak of multiply-adds, read bandwidth, and
 * the extra memory of a call. Measured values are those of this moment: measure them beside what they are compared with. */
#ifndef QKV_CLI_MACHINE_H
#define QKV_CLI_MACHINE_H

#include <qkv/qkv.h>

/* Seconds of a monotonic clock, and those that this thread has run: without the time that other processes took. */
double machine_now(void);
double machine_thread_now(void);

/* Seconds that a hypervisor gave to others while this machine's processors had work, all processors together; 0: unknown. */
double machine_stolen(void);

/* Model name with family, model and stepping (or the ARM implementer and part), as the operating system tells them. */
void machine_describe(char *cpu, size_t n);
/* Processors that this process may use; at least 1. */
int machine_cpus(void);

typedef struct machine_cache {
  int level;
  char type; /* 'd' data, 'i' instructions, 'u' both */
  size_t bytes;
  int shared_by; /* processors that share one of them */
} machine_cache;
/* The caches of the first processor, at most `capacity`; returns their number, 0 if the system does not tell. */
int machine_caches(machine_cache *cache, int capacity);

/* Bytes of memory in the machine, and bytes a program may still take without swapping (a control group's limit counts).
 * 0: unknown. */
uint64_t machine_memory_total(void);
uint64_t machine_memory_free(void);

/* GFLOP/s of independent multiply-adds of one core in QKV_F32 or QKV_F64 with "avx512", "avx2", "neon" or "portable"
 * (scalar, also "reference"): the best of several runs of about a millisecond. 0 for a set this processor lacks. */
double machine_peak_gflops(int dtype, const char *isa);
/* The same for bf16 products with f32 sums: "avx512_bf16" (dot products of pairs) or "amx" (tiles, for which the system is
 * asked). */
double machine_peak_bf16(const char *isa);
/* Either of them (QKV_F32, QKV_F64, QKV_BF16) with the mean of the runs: what a longer run is to be compared with, since the
 * clock varies with what ran before. Of one thread its own time; of several, all flops over the time of the slowest. */
typedef struct machine_rate {
  double best, mean;
} machine_rate;
machine_rate machine_peak(int dtype, const char *isa, int threads);
/* The best instruction set of the list above that this processor has. */
const char *machine_best_isa(void);

/* The kinds of processor that goals are stated for: AVX-512 of AMD with two 512-bit multiply-adds a cycle (Zen 5) or one
 * (Zen 4), AVX2 alone, and all others. Measures where the names do not tell. */
enum { MACHINE_AVX512_TWO, MACHINE_AVX512_ONE, MACHINE_AVX2, MACHINE_OTHER, MACHINE_KINDS };
int machine_kind(void);

/* GB/s of reading memory that no cache holds, with so many threads; 0 if there is no memory for it. Takes about a second. */
double machine_read_gbps(int threads);

/* Memory for large arrays: fresh pages of zeros, huge pages for much of it where the system has them. NULL: none left. */
void *machine_map(size_t bytes);
void machine_unmap(void *memory, size_t bytes);

/* Extra memory of a call. Between begin and end, the context's alloc and release are the meter's and count what is asked
 * for; `scratch` is what the caller handed to the call, fresh from machine_map. end also looks at how far the process's
 * resident memory rose, and returns the larger. Make a small call before, so that code and stacks of threads are there
 * already. One meter at a time in a process. */
void machine_meter_begin(qkv_context *context);
size_t machine_meter_end(qkv_context *context, size_t scratch);

#endif

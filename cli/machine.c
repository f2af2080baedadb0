#define _GNU_SOURCE /* sched_getaffinity, madvise */
#include "machine.h"

#include <ctype.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#endif

double machine_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double machine_thread_now(void) {
  struct timespec t;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0) return machine_now();
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* First line of a small file without its end; 0 if it cannot be read. */
static int first_line(const char *path, char *text, size_t n) {
  FILE *f = fopen(path, "r");
  if (!f) return 0;
  int ok = fgets(text, (int)n, f) != NULL;
  fclose(f);
  if (ok) text[strcspn(text, "\n")] = 0;
  return ok;
}

/* The value of "key<spaces>: value" in /proc/cpuinfo or /proc/meminfo; 0 if there is none. */
static int proc_value(const char *path, const char *key, char *text, size_t n) {
  FILE *f = fopen(path, "r");
  if (!f) return 0;
  char line[512];
  int found = 0;
  size_t length = strlen(key);
  while (!found && fgets(line, sizeof line, f)) {
    char *colon = strchr(line, ':');
    if (!colon || strncmp(line, key, length) != 0) continue;
    char *end = line + length;
    while (isspace((unsigned char)*end)) end++;
    if (end != colon) continue;
    char *value = colon + 1;
    while (isspace((unsigned char)*value)) value++;
    value[strcspn(value, "\n")] = 0;
    snprintf(text, n, "%s", value);
    found = 1;
  }
  fclose(f);
  return found;
}

double machine_stolen(void) {
  FILE *f = fopen("/proc/stat", "r");
  unsigned long long steal = 0;
  if (!f) return 0;
  int found = fscanf(f, "cpu %*u %*u %*u %*u %*u %*u %*u %llu", &steal);
  fclose(f);
  long tick = sysconf(_SC_CLK_TCK);
  return found == 1 && tick > 0 ? (double)steal / (double)tick : 0;
}

void machine_describe(char *cpu, size_t n) {
  char name[256] = "", family[32], model[32], stepping[32], line[512];
  const char *info = "/proc/cpuinfo";
  if (!proc_value(info, "model name", name, sizeof name) && !proc_value(info, "Model", name, sizeof name) &&
      !first_line("/proc/device-tree/model", name, sizeof name)) {
    snprintf(name, sizeof name, "unknown CPU");
  }
  char *to = name; /* vendors pad the name with blanks */
  for (char *from = name; *from; from++) {
    if (*from != ' ' || (to > name && to[-1] != ' ')) *to++ = *from;
  }
  while (to > name && to[-1] == ' ') to--;
  *to = 0;
  if (proc_value(info, "cpu family", family, sizeof family) && proc_value(info, "model", model, sizeof model) &&
      proc_value(info, "stepping", stepping, sizeof stepping)) {
    snprintf(line, sizeof line, "%s (family %s, model %s, stepping %s)", name, family, model, stepping);
  } else if (proc_value(info, "CPU implementer", family, sizeof family) &&
             proc_value(info, "CPU part", model, sizeof model)) {
    snprintf(line, sizeof line, "%s (implementer %s, part %s)", name, family, model);
  } else {
    snprintf(line, sizeof line, "%s", name);
  }
  snprintf(cpu, n, "%s", line);
}

int machine_cpus(void) {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int)n : 1;
}

/* Number of processors in a list such as 0-3,8. */
static int list_count(const char *list) {
  int count = 0;
  while (*list) {
    char *end;
    long a = strtol(list, &end, 10), b = a;
    if (end == list) break;
    if (*end == '-') b = strtol(end + 1, &end, 10);
    count += (int)(b - a + 1);
    list = *end == ',' ? end + 1 : end;
  }
  return count > 0 ? count : 1;
}

int machine_caches(machine_cache *cache, int capacity) {
  int count = 0;
  for (int i = 0; count < capacity; i++) {
    char path[128], text[256];
    const char *dir = "/sys/devices/system/cpu/cpu0/cache/index";
    snprintf(path, sizeof path, "%s%d/level", dir, i);
    if (!first_line(path, text, sizeof text)) break;
    machine_cache c = {atoi(text), 'u', 0, 1};
    snprintf(path, sizeof path, "%s%d/type", dir, i);
    if (first_line(path, text, sizeof text)) c.type = text[0] == 'D' ? 'd' : text[0] == 'I' ? 'i' : 'u';
    snprintf(path, sizeof path, "%s%d/size", dir, i);
    if (first_line(path, text, sizeof text)) {
      char *end;
      c.bytes = (size_t)strtoull(text, &end, 10);
      c.bytes <<= *end == 'K' ? 10 : *end == 'M' ? 20 : 0;
    }
    snprintf(path, sizeof path, "%s%d/shared_cpu_list", dir, i);
    if (first_line(path, text, sizeof text)) c.shared_by = list_count(text);
    cache[count++] = c;
  }
  return count;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static uint64_t meminfo(const char *key) {
  char text[64];
  return proc_value("/proc/meminfo", key, text, sizeof text) ? strtoull(text, NULL, 10) * 1024 : 0;
}

uint64_t machine_memory_total(void) {
  uint64_t bytes = meminfo("MemTotal");
  if (bytes) return bytes;
  long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
}

static int file_number(const char *dir, const char *name, uint64_t *value) {
  char path[1024], text[64];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  if (!first_line(path, text, sizeof text) || !isdigit((unsigned char)text[0])) return 0;
  *value = strtoull(text, NULL, 10);
  return 1;
}

/* What the limit of one control group leaves; UINT64_MAX: no limit. File pages that can be dropped do not count as taken. */
static uint64_t group_left(const char *dir, int version) {
  uint64_t limit = 0, taken = 0, inactive = 0;
  if (!file_number(dir, version == 2 ? "memory.max" : "memory.limit_in_bytes", &limit)) return UINT64_MAX;
  if (!file_number(dir, version == 2 ? "memory.current" : "memory.usage_in_bytes", &taken)) return UINT64_MAX;
  char path[1024], line[256];
  snprintf(path, sizeof path, "%s/memory.stat", dir);
  const char *key = version == 2 ? "inactive_file " : "total_inactive_file ";
  FILE *f = fopen(path, "r");
  while (f && fgets(line, sizeof line, f)) {
    if (strncmp(line, key, strlen(key)) == 0) inactive = strtoull(line + strlen(key), NULL, 10);
  }
  if (f) fclose(f);
  taken = taken > inactive ? taken - inactive : 0;
  return limit > taken ? limit - taken : 0;
}

uint64_t machine_memory_free(void) {
  uint64_t bytes = meminfo("MemAvailable");
  if (!bytes) bytes = meminfo("MemFree");
  FILE *f = fopen("/proc/self/cgroup", "r");
  char line[700], dir[900];
  while (f && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    int version = name[1] == 0 ? 2 : 1;
    if (version == 1 && strcmp(name + 1, "memory") != 0) continue;
    const char *root = version == 2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (;;) { /* every group above counts too */
      snprintf(dir, sizeof dir, "%s%s", root, path);
      uint64_t left = group_left(dir, version);
      if (left < bytes) bytes = left;
      char *slash = strrchr(path, '/');
      if (!slash || path[0] == 0) break;
      *slash = 0;
    }
  }
  if (f) fclose(f);
  return bytes;
}

void *machine_map(size_t bytes) {
  if (bytes == 0) bytes = 1;
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
  if (bytes >= (size_t)8 << 20) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return p;
}

void machine_unmap(void *memory, size_t bytes) {
  if (memory) munmap(memory, bytes ? bytes : 1);
}

/* The meter is the process's: a context has one `self`, and that is the executor's. */
static struct {
  atomic_size_t now, peak;
  uint64_t resident;
  int resident_known;
  void *(*alloc)(void *self, size_t bytes, size_t alignment);
  void (*release)(void *self, void *memory);
} meter;

/* Each block's length, for release; the block itself follows at the next page. */
typedef struct {
  void *map;
  size_t mapped, asked;
} meter_head;

static void *meter_alloc(void *self, size_t bytes, size_t alignment) {
  (void)self;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), step = alignment > page ? alignment : page;
  if (bytes > SIZE_MAX - 2 * step) return NULL;
  size_t mapped = bytes + 2 * step;
  /* A fresh mapping each time: the resident size then shows what is really touched. */
  unsigned char *map = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return NULL;
  unsigned char *block = map + step - (uintptr_t)map % step;
  if ((size_t)(block - map) < sizeof(meter_head)) block += step;
  meter_head head = {map, mapped, bytes};
  memcpy(block - sizeof head, &head, sizeof head);
  size_t now = atomic_fetch_add(&meter.now, bytes) + bytes, peak = atomic_load(&meter.peak);
  while (now > peak && !atomic_compare_exchange_weak(&meter.peak, &peak, now)) continue;
  return block;
}

static void meter_release(void *self, void *memory) {
  (void)self;
  if (!memory) return;
  meter_head head;
  memcpy(&head, (unsigned char *)memory - sizeof head, sizeof head);
  atomic_fetch_sub(&meter.now, head.asked);
  munmap(head.map, head.mapped);
}

static uint64_t status_bytes(const char *key) {
  char text[64];
  return proc_value("/proc/self/status", key, text, sizeof text) ? strtoull(text, NULL, 10) * 1024 : 0;
}

void machine_meter_begin(qkv_context *context) {
  atomic_store(&meter.now, 0);
  atomic_store(&meter.peak, 0);
  meter.alloc = context->alloc;
  meter.release = context->release;
  context->alloc = meter_alloc;
  context->release = meter_release;
  meter.resident_known = 0;
  FILE *f = fopen("/proc/self/clear_refs", "w"); /* 5 sets the high-water mark back to the present size */
  if (f) {
    meter.resident_known = fputs("5", f) >= 0;
    if (fclose(f) != 0) meter.resident_known = 0;
  }
  meter.resident = status_bytes("VmRSS");
  if (meter.resident == 0) meter.resident_known = 0;
}

size_t machine_meter_end(qkv_context *context, size_t scratch) {
  uint64_t high = meter.resident_known ? status_bytes("VmHWM") : 0;
  context->alloc = meter.alloc;
  context->release = meter.release;
  size_t asked = atomic_load(&meter.peak) + scratch;
  /* The kernel counts resident pages in batches per thread, and huge pages come whole: a small difference tells nothing. */
  uint64_t risen = high > meter.resident ? high - meter.resident : 0, noise = (uint64_t)3 << 20;
  return risen > asked + noise ? (size_t)risen : asked;
}

/* ---- Peak of multiply-adds --------------------------------------------------------------------------------------- */

/* Loops of independent multiply-adds, written in assembly because a compiler would fold or reorder them. 24 accumulators
 * cover latency 4 to 6 on two pipes; AVX2 has 16 registers, and 12 accumulators are enough for its latency 4. The operands
 * are zero, so that no denormal slows them. Each function returns the flops it did. */
#define REPEAT_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define REPEAT_24(X) REPEAT_12(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86 1
#define LOW_16                                                                                                        \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15"
#define ALL_26           LOW_16, "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm30", "xmm31"
#define ZERO_512         "vpxord %%zmm30, %%zmm30, %%zmm30\n vpxord %%zmm31, %%zmm31, %%zmm31\n"
#define ZERO_256         "vxorps %%xmm14, %%xmm14, %%xmm14\n vxorps %%xmm15, %%xmm15, %%xmm15\n"
#define PS_512(i)        "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #i "\n"
#define PD_512(i)        "vfmadd231pd %%zmm30, %%zmm31, %%zmm" #i "\n"
#define PS_256(i)        "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define PD_256(i)        "vfmadd231pd %%ymm14, %%ymm15, %%ymm" #i "\n"
#define SS(i)            "vfmadd231ss %%xmm14, %%xmm15, %%xmm" #i "\n"
#define SD(i)            "vfmadd231sd %%xmm14, %%xmm15, %%xmm" #i "\n"
#define LOOP(zero, body) zero "1:\n" body "dec %0\n jnz 1b\n vzeroupper\n"

#define X86_PEAK(name, isa, zero, body, flops, clobbers)                 \
  __attribute__((target(isa), noinline)) static double name(int64_t n) { \
    double total = (double)n * (flops);                                  \
    __asm__ volatile(LOOP(zero, body) : "+r"(n) : : "cc", clobbers);     \
    return total;                                                        \
  }
X86_PEAK(avx512_f32, "avx512f", ZERO_512, REPEAT_24(PS_512), 24 * 2 * 16, ALL_26)
X86_PEAK(avx512_f64, "avx512f", ZERO_512, REPEAT_24(PD_512), 24 * 2 * 8, ALL_26)
X86_PEAK(avx2_f32, "avx2,fma", ZERO_256, REPEAT_12(PS_256), 12 * 2 * 8, LOW_16)
X86_PEAK(avx2_f64, "avx2,fma", ZERO_256, REPEAT_12(PD_256), 12 * 2 * 4, LOW_16)
X86_PEAK(scalar_f32, "avx,fma", ZERO_256, REPEAT_12(SS), 12 * 2, LOW_16)
X86_PEAK(scalar_f64, "avx,fma", ZERO_256, REPEAT_12(SD), 12 * 2, LOW_16)

/* Pairs of bf16. Tiles 0 to 3 are the sums of two tiles of rows and two of columns: enough for their latency. */
#define DOT_512(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #i "\n"
X86_PEAK(avx512_bf16, "avx512f,avx512bf16", ZERO_512, REPEAT_24(DOT_512), 24 * 4 * 16, ALL_26)

__attribute__((target("amx-tile,amx-bf16"), noinline)) static double amx_bf16(int64_t n) {
  static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  } tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  double total = (double)n * 4 * 2 * 16 * 16 * 32;
  __asm__ volatile("ldtilecfg %1\n"
                   "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
                   "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7\n"
                   "1:\n"
                   "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
                   "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n"
                   "dec %0\n jnz 1b\n"
                   "tilerelease\n"
                   : "+r"(n)
                   : "m"(tiles)
                   : "cc");
  return total;
}

static int have_bf16(void) {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
static int have_amx(void) {
#ifdef __linux__
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & 0x60000) == 0x60000 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 0;
#endif
}
static int is_amd(void) {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541; /* "Auth" of AuthenticAMD */
}

#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_ARM 1
#define VECTORS                                                                                                       \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", \
      "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31"
#define FMLA_4S(i)     "fmla v" #i ".4s, v30.4s, v31.4s\n"
#define FMLA_2D(i)     "fmla v" #i ".2d, v30.2d, v31.2d\n"
#define FMADD_S(i)     "fmadd s" #i ", s30, s31, s" #i "\n"
#define FMADD_D(i)     "fmadd d" #i ", d30, d31, d" #i "\n"
#define CLEAR(i)       "movi v" #i ".2d, #0\n"
#define ARM_LOOP(body) REPEAT_24(CLEAR) CLEAR(30) CLEAR(31) "1:\n" body "subs %0, %0, #1\n b.ne 1b\n"
#define ARM_PEAK(name, body, flops)                               \
  __attribute__((noinline)) static double name(int64_t n) {       \
    double total = (double)n * (flops);                           \
    __asm__ volatile(ARM_LOOP(body) : "+r"(n) : : "cc", VECTORS); \
    return total;                                                 \
  }
ARM_PEAK(neon_f32, REPEAT_24(FMLA_4S), 24 * 2 * 4)
ARM_PEAK(neon_f64, REPEAT_24(FMLA_2D), 24 * 2 * 2)
ARM_PEAK(scalar_f32, REPEAT_24(FMADD_S), 24 * 2)
ARM_PEAK(scalar_f64, REPEAT_24(FMADD_D), 24 * 2)
#endif

/* Where there is no assembly: eight chains in C; volatile keeps the values unknown. */
#define C_PEAK(name, type, function)                                                         \
  static double name(int64_t n) {                                                            \
    volatile type seed = 0;                                                                  \
    type x = seed, y = seed, a[8];                                                           \
    for (int i = 0; i < 8; i++) a[i] = seed;                                                 \
    for (int64_t r = 0; r < n; r++) {                                                        \
      a[0] = function(x, y, a[0]), a[1] = function(x, y, a[1]), a[2] = function(x, y, a[2]); \
      a[3] = function(x, y, a[3]), a[4] = function(x, y, a[4]), a[5] = function(x, y, a[5]); \
      a[6] = function(x, y, a[6]), a[7] = function(x, y, a[7]);                              \
    }                                                                                        \
    for (int i = 0; i < 8; i++) seed = seed + a[i];                                          \
    return (double)n * 16;                                                                   \
  }
C_PEAK(c_f32, float, fmaf)
C_PEAK(c_f64, double, fma)

typedef double (*peak_fn)(int64_t n);

static peak_fn peak_loop(int dtype, const char *isa) {
  int wide = dtype == QKV_F64;
  int scalar = strcmp(isa, "portable") == 0 || strcmp(isa, "reference") == 0;
#ifdef HAVE_X86
  __builtin_cpu_init();
  int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strcmp(isa, "avx512") == 0 && __builtin_cpu_supports("avx512f")) return wide ? avx512_f64 : avx512_f32;
  if (strcmp(isa, "avx2") == 0 && fma) return wide ? avx2_f64 : avx2_f32;
  if (scalar && fma) return wide ? scalar_f64 : scalar_f32;
#endif
#ifdef HAVE_ARM
  if (strcmp(isa, "neon") == 0) return wide ? neon_f64 : neon_f32;
  if (scalar) return wide ? scalar_f64 : scalar_f32;
#endif
  return scalar ? wide ? c_f64 : c_f32 : NULL;
}

static peak_fn bf16_loop(const char *isa) {
#ifdef HAVE_X86
  __builtin_cpu_init();
  if (strcmp(isa, "avx512_bf16") == 0 && have_bf16()) return avx512_bf16;
  if (strcmp(isa, "amx") == 0 && have_amx()) return amx_bf16;
#endif
  (void)isa;
  return NULL;
}

machine_rate machine_peak(int dtype, const char *isa, int threads) {
  peak_fn loop = dtype == QKV_BF16 ? bf16_loop(isa) : peak_loop(dtype, isa);
  enum { RUNS = 8 };
  machine_rate rate = {0, 0};
  if (!loop) return rate;
  int64_t n = 1000;
  double seconds = 0;
  while (seconds < 2e-4) { /* grow until a run is long against the clock; this also brings the core out of its sleep */
    double t = machine_now();
    loop(n);
    seconds = machine_now() - t;
    if (seconds < 2e-4) n *= 2;
  }
  if (threads < 1) threads = 1;
#ifndef _OPENMP
  threads = 1;
#endif
  /* A team of threads takes a while to start. */
  n = (int64_t)((double)n * (threads > 1 ? 3e-3 : 1e-3) / seconds) + 1;
  double all_flops = 0, all_seconds = 0;
  for (int r = 0; r < RUNS; r++) {
    double flops = 0, t = threads == 1 ? machine_thread_now() : machine_now();
    if (threads == 1) {
      flops = loop(n);
    } else {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : flops)
      for (int i = 0; i < threads; i++) flops += loop(n);
#endif
    }
    t = (threads == 1 ? machine_thread_now() : machine_now()) - t;
    if (t <= 0) continue;
    all_flops += flops;
    all_seconds += t;
    if (flops / t / 1e9 > rate.best) rate.best = flops / t / 1e9;
  }
  if (all_seconds > 0) rate.mean = all_flops / all_seconds / 1e9;
  return rate;
}

double machine_peak_gflops(int dtype, const char *isa) { return machine_peak(dtype, isa, 1).best; }
double machine_peak_bf16(const char *isa) { return machine_peak(QKV_BF16, isa, 1).best; }

int machine_kind(void) {
#ifdef HAVE_X86
  const char *isa = machine_best_isa();
  if (strcmp(isa, "avx2") == 0) return MACHINE_AVX2;
  if (strcmp(isa, "avx512") == 0 && is_amd()) {
    double wide = machine_peak_gflops(QKV_F32, "avx512"), narrow = machine_peak_gflops(QKV_F32, "avx2");
    return wide > 1.5 * narrow ? MACHINE_AVX512_TWO : MACHINE_AVX512_ONE;
  }
#endif
  return MACHINE_OTHER;
}

const char *machine_best_isa(void) {
  static const char *const name[] = {"avx512", "avx2", "neon"};
  for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
    if (peak_loop(QKV_F32, name[i])) return name[i];
  }
  return "portable";
}

/* ---- Read bandwidth ---------------------------------------------------------------------------------------------- */

/* Reads a range, by 16-byte loads where the compiler has such a type, and returns a sum that depends on all of it. */
#if defined(__GNUC__) || defined(__clang__)
typedef uint64_t chunk __attribute__((vector_size(16)));
static uint64_t read_all(const unsigned char *from, size_t bytes) {
  const chunk *p = (const chunk *)(const void *)from;
  chunk a = {0, 0}, b = a, c = a, d = a;
  for (size_t i = 0; i + 4 <= bytes / sizeof *p; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  a += b;
  c += d;
  a += c;
  return a[0] + a[1];
}
#else
static uint64_t read_all(const unsigned char *from, size_t bytes) {
  const uint64_t *p = (const uint64_t *)(const void *)from;
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (size_t i = 0; i + 4 <= bytes / sizeof *p; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  return a + b + c + d;
}
#endif

double machine_read_gbps(int threads) {
  machine_cache cache[16];
  int caches = machine_caches(cache, 16);
  size_t bytes = (size_t)512 << 20, most = (size_t)2 << 30;
  for (int i = 0; i < caches; i++) {
    if (cache[i].bytes * 2 > bytes) bytes = cache[i].bytes * 2;
  }
  if (bytes > most) bytes = most;
  uint64_t left = machine_memory_free();
  if (left && left / 4 < bytes) bytes = (size_t)(left / 4);
  if (threads < 1) threads = 1;
#ifndef _OPENMP
  threads = 1;
#endif
  size_t part = bytes / (size_t)threads / 4096 * 4096;
  if (part == 0) return 0;
  bytes = part * (size_t)threads;
  unsigned char *memory = machine_map(bytes);
  if (!memory) return 0;
  double best = 0, begin = machine_now();
  uint64_t sum = 0;
  /* The first round writes, so that each page exists and lies near the thread that reads it. Where pages come slowly, as in
   * some virtual machines, less memory has to do. */
  size_t ready = part, piece = (size_t)8 << 20;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(min : ready)
#endif
  for (int i = 0; i < threads; i++) {
    size_t done = 0;
    while (done < part && (done < 4 * piece || machine_now() - begin < 0.4)) {
      size_t now = part - done < piece ? part - done : piece;
      memset(memory + (size_t)i * part + done, 1, now);
      done += now;
    }
    if (done < ready) ready = done;
  }
  begin = machine_now();
  for (int round = 0; round < 2 || (round < 20 && machine_now() - begin < 0.3); round++) {
    double t = machine_now();
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : sum)
#endif
    for (int i = 0; i < threads; i++) {
      sum += read_all(memory + (size_t)i * part, ready);
    }
    t = machine_now() - t;
    double rate = t > 0 ? (double)ready * threads / t / 1e9 : 0;
    if (rate > best) best = rate;
  }
  volatile uint64_t keep = sum; /* the reads must not be dropped */
  (void)keep;
  machine_unmap(memory, bytes);
  return best;
}

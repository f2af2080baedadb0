/* qkv info: this machine and this library. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "machine.h"

static void help(void) {
  fputs("Usage: qkv info [OPTION]...\n"
        "\n"
        "Tell about this machine and this library: the processor, the instruction set chosen and why,\n"
        "caches, memory, the measured peak of multiply-adds of one core and the measured bandwidth of\n"
        "reading memory, the version, the number of the arithmetic order and the compiler.\n"
        "\n"
        "      --no-measure       leave out what takes a second to measure\n"
        "      --json             print the facts as JSON\n",
        stdout);
  cli_print_common_options();
  cli_print_exit_status();
}

static const char *compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

static void format_bytes(double bytes, char *text, size_t size) {
  static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    unit++;
  }
  snprintf(text, size, "%.4g %s", bytes, units[unit]);
}

static const char *cache_kind(char type) { return type == 'd' ? "data" : type == 'i' ? "instructions" : "unified"; }

enum { MAX_CACHES = 16 };

typedef struct facts {
  char cpu[256], isa[64], reason[512], version[32];
  int cpus, cache_count;
  machine_cache caches[MAX_CACHES];
  double memory_total, memory_free;
  double peak_f32, peak_f64, read_one, read_all; /* 0: not measured */
} facts;

static int print_json(const facts *f) {
  cJSON *object = cJSON_CreateObject();
  cJSON_AddStringToObject(object, "version", f->version);
  cJSON_AddNumberToObject(object, "order", qkv_order());
  cJSON_AddStringToObject(object, "compiler", compiler());
  cJSON_AddStringToObject(object, "cpu", f->cpu);
  cJSON_AddNumberToObject(object, "cpus", f->cpus);
  cJSON_AddStringToObject(object, "isa", f->isa);
  cJSON_AddStringToObject(object, "isa_reason", f->reason);
  cJSON *caches = cJSON_AddArrayToObject(object, "caches");
  for (int i = 0; i < f->cache_count; i++) {
    cJSON *cache = cJSON_CreateObject();
    cJSON_AddNumberToObject(cache, "level", f->caches[i].level);
    cJSON_AddStringToObject(cache, "kind", cache_kind(f->caches[i].type));
    cJSON_AddNumberToObject(cache, "bytes", (double)f->caches[i].bytes);
    cJSON_AddNumberToObject(cache, "shared_by", f->caches[i].shared_by);
    cJSON_AddItemToArray(caches, cache);
  }
  cJSON_AddNumberToObject(object, "memory_bytes", f->memory_total);
  cJSON_AddNumberToObject(object, "memory_free_bytes", f->memory_free);
  if (f->peak_f32 > 0) cJSON_AddNumberToObject(object, "peak_gflops_f32", f->peak_f32);
  if (f->peak_f64 > 0) cJSON_AddNumberToObject(object, "peak_gflops_f64", f->peak_f64);
  if (f->read_one > 0) cJSON_AddNumberToObject(object, "read_gbps_one_thread", f->read_one);
  if (f->read_all > 0) cJSON_AddNumberToObject(object, "read_gbps_all_threads", f->read_all);
  return cli_print_json(object);
}

static void print_text(const facts *f) {
  char bytes[32];
  printf("version: %s\n", f->version);
  printf("order: %d\n", (int)qkv_order());
  printf("compiler: %s\n", compiler());
  printf("cpu: %s\n", f->cpu);
  printf("cpus: %d\n", f->cpus);
  printf("isa: %s\n", f->isa);
  if (f->reason[0] != 0) printf("isa_reason: %s\n", f->reason);
  for (int i = 0; i < f->cache_count; i++) {
    const machine_cache *c = &f->caches[i];
    format_bytes((double)c->bytes, bytes, sizeof bytes);
    printf("cache: level %d %s, %s, shared by %d\n", c->level, cache_kind(c->type), bytes, c->shared_by);
  }
  format_bytes(f->memory_total, bytes, sizeof bytes);
  if (f->memory_total > 0) printf("memory: %s\n", bytes);
  format_bytes(f->memory_free, bytes, sizeof bytes);
  if (f->memory_free > 0) printf("memory_free: %s\n", bytes);
  if (f->peak_f32 > 0) printf("peak_f32: %.1f GFLOP/s, one core\n", f->peak_f32);
  if (f->peak_f64 > 0) printf("peak_f64: %.1f GFLOP/s, one core\n", f->peak_f64);
  if (f->read_one > 0) printf("read: %.1f GB/s, one thread\n", f->read_one);
  if (f->read_all > 0) printf("read: %.1f GB/s, %d threads\n", f->read_all, f->cpus);
}

int qkv_cli_info(int argc, char **argv) {
  enum { OPT_JSON = CLI_OPTION, OPT_NO_MEASURE };
  static const struct option options[] = {
      {"json", no_argument, NULL, OPT_JSON}, {"no-measure", no_argument, NULL, OPT_NO_MEASURE}, CLI_COMMON_OPTIONS};
  int option, json = 0, measure = 1;
  while ((option = cli_getopt(argc, argv, options, help)) != -1) {
    if (option == CLI_DONE) return CLI_OK;
    if (option == '?') return CLI_USAGE;
    if (option == OPT_JSON) json = 1;
    if (option == OPT_NO_MEASURE) measure = 0;
  }
  if (optind < argc) return cli_usage("unexpected argument '%s'", argv[optind]);

  static facts f;
  qkv_status status;
  const char *cap;
  memset(&f, 0, sizeof f);
  if (cli_choose_isa(NULL, &cap) != CLI_OK) return CLI_USAGE;
  char *text = cli_describe_isa(cap, &status);
  if (text == NULL) return cli_status_failure(status, NULL);
  cli_fact(text, "isa", f.isa, sizeof f.isa);
  cli_fact(text, "isa_reason", f.reason, sizeof f.reason);
  free(text);

  int32_t version = qkv_version();
  snprintf(f.version, sizeof f.version, "%d.%d.%d", (int)(version / 10000), (int)(version / 100 % 100),
           (int)(version % 100));
  machine_describe(f.cpu, sizeof f.cpu);
  f.cpus = machine_cpus();
  f.cache_count = machine_caches(f.caches, MAX_CACHES);
  f.memory_total = (double)machine_memory_total();
  f.memory_free = (double)machine_memory_free();
  if (measure) {
    f.peak_f32 = machine_peak_gflops(QKV_F32, f.isa);
    f.peak_f64 = machine_peak_gflops(QKV_F64, f.isa);
    f.read_one = machine_read_gbps(1);
    if (f.cpus > 1) f.read_all = machine_read_gbps(f.cpus);
  }
  if (json) return print_json(&f);
  print_text(&f);
  return CLI_OK;
}

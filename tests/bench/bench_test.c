/* The verb bench and what it measures with. Linked with --wrap=qkv_forward and --wrap=qkv_backward: a test can spoil
 * results, or interrupt a run. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli.h"
#include "machine.h"
#include "npy.h"

static char folder[] = "/tmp/qkv-bench-XXXXXX";

/* ---- A library with a fault --------------------------------------------------------------------------------------- */

static int spoil;            /* the last row of each result is wrong */
static int leave_unwritten;  /* the last row of each result is not written */
static int64_t interrupt_at; /* a call of this length brings SIGINT; 0: never */
static int spoil_dq, spoil_dk, spoil_dv; /* the last row of each */
static int dv_unwritten;
static size_t hoard; /* bytes that a backward pass takes besides */
static int interrupt_backward;
static int refuse_others; /* than problems with a dropout of 0.25 */

qkv_status __real_qkv_forward(const qkv_context *c, const qkv_problem *p, void *scratch, size_t bytes);
qkv_status __wrap_qkv_forward(const qkv_context *c, const qkv_problem *p, void *scratch, size_t bytes);

qkv_status __wrap_qkv_forward(const qkv_context *c, const qkv_problem *p, void *scratch, size_t bytes) {
  if (interrupt_at > 0 && p->seqlen_q == interrupt_at) raise(SIGINT);
  if (refuse_others && p->dropout != 0.25) return QKV_UNSUPPORTED;
  qkv_status status = __real_qkv_forward(c, p, scratch, bytes);
  if (status == QKV_OK && (spoil || leave_unwritten) && p->out.dtype == QKV_F32) {
    int64_t dim = p->head_dim_v ? p->head_dim_v : p->head_dim;
    float *last = (float *)p->out.data + (p->num_heads - 1) * p->out.stride[1] + (p->seqlen_q - 1) * p->out.stride[2];
    if (spoil) last[dim / 2] += 1e-3F;
    if (leave_unwritten) memset(last, 0xff, sizeof *last);
  }
  return status;
}

qkv_status __real_qkv_backward(const qkv_context *c, const qkv_problem *p, const qkv_gradients *g, void *scratch,
                               size_t bytes);
qkv_status __wrap_qkv_backward(const qkv_context *c, const qkv_problem *p, const qkv_gradients *g, void *scratch,
                               size_t bytes);

static float *last_row(const qkv_tensor *t, int64_t heads, int64_t rows) {
  return (float *)t->data + (heads - 1) * t->stride[1] + (rows - 1) * t->stride[2];
}

qkv_status __wrap_qkv_backward(const qkv_context *c, const qkv_problem *p, const qkv_gradients *g, void *scratch,
                               size_t bytes) {
  if (interrupt_backward) raise(SIGINT);
  if (refuse_others && p->dropout != 0.25) return QKV_UNSUPPORTED;
  void *hidden = hoard > 0 ? machine_map(hoard) : NULL;
  if (hidden) memset(hidden, 1, hoard);
  qkv_status status = __real_qkv_backward(c, p, g, scratch, bytes);
  machine_unmap(hidden, hoard);
  if (status != QKV_OK || g->dq.dtype != QKV_F32) return status;
  if (spoil_dq) last_row(&g->dq, p->num_heads, p->seqlen_q)[0] += 1e-3F;
  if (spoil_dk) last_row(&g->dk, p->num_kv_heads, p->seqlen_kv)[0] += 1e-3F;
  if (spoil_dv) last_row(&g->dv, p->num_kv_heads, p->seqlen_kv)[0] += 1e-3F;
  if (dv_unwritten) memset(last_row(&g->dv, p->num_kv_heads, p->seqlen_kv), 0xff, sizeof(float));
  return status;
}

/* ---- Running the verb ---------------------------------------------------------------------------------------------- */

static const char *path_of(const char *name) {
  static char text[4][256];
  static int next;
  char *to = text[next++ % 4];
  snprintf(to, sizeof text[0], "%s/%s", folder, name);
  return to;
}

static char *read_file(const char *name) {
  FILE *f = fopen(path_of(name), "rb");
  if (!f) return NULL;
  char *text = calloc(1, 1 << 20);
  assert_non_null(text);
  assert_true(fread(text, 1, (1 << 20) - 1, f) < (1 << 20) - 1);
  fclose(f);
  return text;
}

/* Runs `qkv bench ...` in a process of its own, its output in out and err of the folder; returns the exit status. */
static int run_bench(const char *first, ...) {
  char *argv[40] = {(char *)(uintptr_t) "bench"};
  int argc = 1;
  va_list list;
  va_start(list, first);
  for (const char *a = first; a; a = va_arg(list, const char *)) argv[argc++] = (char *)(uintptr_t)a;
  va_end(list);
  fflush(NULL);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    if (!freopen(path_of("out"), "w", stdout) || !freopen(path_of("err"), "w", stderr)) _exit(99);
    int status = qkv_cli_bench(argc, argv);
    fflush(NULL);
    _exit(status);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

static void assert_said(const char *file, const char *what) {
  char *text = read_file(file);
  assert_non_null(text);
  if (!strstr(text, what)) fail_msg("'%s' is not in %s:\n%s", what, file, text);
  free(text);
}

static cJSON *read_json(const char *name) {
  char *text = read_file(name);
  assert_non_null(text);
  cJSON *json = cJSON_Parse(text);
  if (!json) fail_msg("no JSON: %s", text);
  free(text);
  return json;
}

static void write_json(const char *name, const cJSON *json) {
  FILE *f = fopen(name, "w");
  assert_non_null(f);
  char *text = cJSON_Print(json);
  fputs(text, f);
  cJSON_free(text);
  assert_int_equal(fclose(f), 0);
}

static double number(const cJSON *row, const char *name) {
  const cJSON *x = cJSON_GetObjectItemCaseSensitive(row, name);
  if (!cJSON_IsNumber(x)) fail_msg("no number %s", name);
  return x->valuedouble;
}

static int length(const cJSON *json, const char *name) {
  const cJSON *x = cJSON_GetObjectItemCaseSensitive(json, name);
  assert_true(cJSON_IsArray(x));
  return cJSON_GetArraySize(x);
}

/* ---- Tests --------------------------------------------------------------------------------------------------------- */

static void test_machine(void **state) {
  (void)state;
  char cpu[256];
  machine_describe(cpu, sizeof cpu);
  assert_true(strlen(cpu) > 0);
  char cut[4];
  machine_describe(cut, sizeof cut);
  assert_true(strlen(cut) <= 3);
  assert_true(machine_cpus() >= 1);
  assert_true(machine_memory_total() > 0);
  assert_true(machine_memory_free() > 0 && machine_memory_free() <= machine_memory_total());
  machine_cache cache[2];
  assert_in_range(machine_caches(cache, 2), 0, 2);

  assert_true(machine_peak_gflops(QKV_F32, "bogus") == 0);
  double scalar = machine_peak_gflops(QKV_F32, "portable"), best = machine_peak_gflops(QKV_F32, machine_best_isa());
  assert_true(scalar > 0.01);
  assert_true(best > 0.7 * scalar);
  assert_true(machine_peak_gflops(QKV_F64, machine_best_isa()) > 0.01);
}

static int meter_sees; /* memory that nobody asked the context for */

static void test_meter(void **state) {
  (void)state;
  qkv_context context = qkv_context_default();
  machine_meter_begin(&context);
  unsigned char *a = context.alloc(context.alloc_self, 1000, 64), *b = context.alloc(context.alloc_self, 3000, 65536);
  assert_non_null(a);
  assert_non_null(b);
  assert_int_equal((uintptr_t)a % 64, 0);
  assert_int_equal((uintptr_t)b % 65536, 0);
  memset(a, 1, 1000);
  memset(b, 1, 3000);
  context.release(context.alloc_self, a);
  context.release(context.alloc_self, b);
  a = context.alloc(context.alloc_self, 2000, 64);
  context.release(context.alloc_self, a);
  assert_int_equal(machine_meter_end(&context, 500), 4500);
  assert_null(context.alloc);
  assert_null(context.release);

  /* Memory that nobody asked the context for shows too, where the system lets the high-water mark be set back. */
  machine_meter_begin(&context);
  size_t bytes = (size_t)48 << 20;
  void *hidden = machine_map(bytes);
  assert_non_null(hidden);
  memset(hidden, 1, bytes);
  machine_unmap(hidden, bytes);
  size_t seen = machine_meter_end(&context, 0);
  assert_true(seen == 0 || (seen > bytes / 2 && seen < 2 * bytes));
  meter_sees = seen > 0;
}

static void test_rows(void **state) {
  (void)state;
  assert_int_equal(run_bench("--seqlen", "64,100", "--heads", "4", "--kv-heads", "2", "--head-dim", "16/24", "--mask",
                             "causal,none", "--algorithm", "standard,flash", "--repeat", "1", "--json", path_of("rows"),
                             NULL),
                   0);
  assert_said("out", "standard  agrees with float64");
  assert_said("out", "flash     agrees with float64");
  cJSON *json = read_json("rows");
  assert_int_equal(length(json, "rows"), 8);
  assert_int_equal(length(json, "skipped") + length(json, "wrong"), 0);
  assert_true(strlen(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "machine"), "cpu")->valuestring) > 0);
  for (int i = 0; i < 8; i++) {
    const cJSON *row = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rows"), i);
    double n = number(row, "seqlen_q"), seconds = number(row, "seconds"), gflops = number(row, "gflops");
    int causal = strcmp(cJSON_GetObjectItem(row, "mask")->valuestring, "causal") == 0;
    int standard = strcmp(cJSON_GetObjectItem(row, "algorithm")->valuestring, "standard") == 0;
    assert_true(n == 64 || n == 100);
    assert_true(number(row, "seqlen_kv") == n);
    assert_true(number(row, "num_heads") == 4 && number(row, "num_kv_heads") == 2);
    assert_true(number(row, "head_dim") == 16 && number(row, "head_dim_v") == 24);
    assert_true(number(row, "threads") == 1 && number(row, "batch") == 1);
    assert_string_equal(cJSON_GetObjectItem(row, "dtype")->valuestring, "f32");
    assert_string_equal(cJSON_GetObjectItem(row, "direction")->valuestring, "fwd");
    assert_true(strlen(cJSON_GetObjectItem(row, "isa")->valuestring) > 0);
    /* Useful operations are those of visible pairs. */
    double flops = 4 * (causal ? n * (n + 1) / 2 : n * n) * 2 * (16 + 24);
    assert_true(seconds > 0 && gflops * seconds * 1e9 > 0.999 * flops && gflops * seconds * 1e9 < 1.001 * flops);
    double share = number(row, "peak_share"), peak = number(row, "peak_gflops");
    assert_true(share > 0 && peak > 0 && share * peak > 0.999 * gflops && share * peak < 1.001 * gflops);
    assert_true(!standard || number(row, "extra_bytes") >= 4 * n * n * 4);
    assert_true(number(row, "error") <= number(row, "error_bound"));
  }
  cJSON_Delete(json);
}

static void test_types(void **state) {
  (void)state;
  assert_int_equal(run_bench("--seqlen", "33", "--seqlen-kv", "65", "--head-dim", "8", "--dtype", "f32,f64", "--isa",
                             "portable,reference", "--mask", "causal & window(9,0)", "--threads", "2", "--repeat", "1",
                             "--json", path_of("types"), NULL),
                   0);
  cJSON *json = read_json("types");
  assert_int_equal(length(json, "rows"), 4);
  cJSON_Delete(json);
  assert_said("out", "n_kv");
}

/* 16-bit storage, and fast arithmetic where this CPU has it. */
static void test_half(void **state) {
  (void)state;
  assert_int_equal(run_bench("--seqlen", "70", "--head-dim", "40", "--dtype", "f16,bf16", "--arithmetic", "canonical,fast",
                             "--mask", "none,causal", "--repeat", "1", "--json", path_of("types"), NULL),
                   0);
  cJSON *json = read_json("types");
  const cJSON *row;
  int fast = 0, canonical = 0;
  cJSON_ArrayForEach(row, cJSON_GetObjectItem(json, "rows")) {
    int is_fast = strcmp(cJSON_GetObjectItem(row, "arithmetic")->valuestring, "fast") == 0;
    fast += is_fast;
    canonical += !is_fast;
    assert_true(number(row, "peak_gflops") > 0 && number(row, "error") <= number(row, "error_bound"));
    if (is_fast) assert_string_equal(cJSON_GetObjectItem(row, "dtype")->valuestring, "bf16");
  }
  assert_int_equal(canonical, 4);
  int have = machine_peak_bf16("amx") > 0;
  assert_true(have ? fast == 2 : fast == 0 || fast == 2);
  assert_int_equal(length(json, "skipped"), 4 - fast);
  assert_said("out", "fast arithmetic is for bf16");
  cJSON_Delete(json);
}

/* What qkv_backward_scratch says of such a problem. */
static size_t backward_scratch(int64_t n, int causal) {
  float data[1] = {0};
  qkv_problem p = qkv_problem_default();
  qkv_mask mask = qkv_causal();
  size_t bytes = 0;
  p.batch = 1;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.seqlen_q = p.seqlen_kv = n;
  p.head_dim = 16;
  p.head_dim_v = 24;
  p.q = qkv_bhsd(data, QKV_F32, 4, n, 16);
  p.k = qkv_bhsd(data, QKV_F32, 2, n, 16);
  p.v = qkv_bhsd(data, QKV_F32, 2, n, 24);
  p.out = qkv_bhsd(data, QKV_F32, 4, n, 24);
  p.lse = qkv_bhs(data, QKV_F32, 4, n);
  p.mask = &mask;
  p.mask_count = causal;
  assert_int_equal(qkv_backward_scratch(NULL, &p, NULL, &bytes), QKV_OK);
  return bytes;
}

static void test_backward(void **state) {
  (void)state;
  assert_int_equal(run_bench("--seqlen", "64,100", "--heads", "4", "--kv-heads", "2", "--head-dim", "16/24", "--mask",
                             "causal,none", "--direction", "fwd,bwd", "--dropout", "0,0.25", "--repeat", "1", "--json",
                             path_of("rows"), NULL),
                   0);
  assert_said("out", "flash     agrees with float64");
  assert_said("out", "backward  agrees with float64");
  cJSON *json = read_json("rows");
  assert_int_equal(length(json, "rows"), 16);
  int backward = 0, dropped = 0;
  const cJSON *row;
  cJSON_ArrayForEach(row, cJSON_GetObjectItem(json, "rows")) {
    double n = number(row, "seqlen_q"), done = number(row, "gflops") * number(row, "seconds") * 1e9;
    int causal = strcmp(cJSON_GetObjectItem(row, "mask")->valuestring, "causal") == 0;
    int bwd = strcmp(cJSON_GetObjectItem(row, "direction")->valuestring, "bwd") == 0;
    double flops = 4 * (causal ? n * (n + 1) / 2 : n * n) * 2 * (bwd ? 3 * 16 + 2 * 24 : 16 + 24);
    assert_true(done > 0.999 * flops && done < 1.001 * flops);
    assert_true(number(row, "error") <= number(row, "error_bound"));
    if (bwd) assert_true(number(row, "extra_bytes") == (double)backward_scratch((int64_t)n, causal));
    backward += bwd;
    dropped += number(row, "dropout") == 0.25;
  }
  assert_true(backward == 8 && dropped == 8);
  cJSON_Delete(json);

  refuse_others = 1;
  int refused = run_bench("--seqlen", "64", "--head-dim", "8", "--direction", "fwd,bwd", "--repeat", "1", NULL);
  int taken = run_bench("--seqlen", "64", "--head-dim", "8", "--direction", "fwd,bwd", "--dropout", "0.25", "--repeat", "1",
                        NULL);
  refuse_others = 0;
  assert_true(refused == 1 && taken == 0);

  /* Other types and threads; and what has no backward pass of its own. */
  assert_int_equal(run_bench("--seqlen", "33", "--seqlen-kv", "70", "--head-dim", "8", "--dtype", "f64,f16,bf16",
                             "--direction", "bwd", "--mask", "causal", "--threads", "2", "--algorithm", "standard,flash",
                             "--repeat", "1", "--json", path_of("types"), NULL),
                   0);
  assert_said("out", "the backward pass is the same for standard and flash");
  json = read_json("types");
  assert_int_equal(length(json, "rows"), 3);
  assert_int_equal(length(json, "skipped"), 3);
  cJSON_Delete(json);
  assert_int_equal(
      run_bench("--seqlen", "40", "--head-dim", "8", "--mask", "none", "--direction", "bwd", "--repeat", "1", NULL), 0);
  assert_said("out", "backward, 2 heads, head_dim 8, f32, no mask, 1 thread, ");
}

static void test_wrong_gradients_get_no_numbers(void **state) {
  (void)state;
  static const struct {
    int *fault;
    const char *said;
  } cases[] = {{&spoil_dq, "WRONG: dq: batch 0, head 1, row 63, column 0 is"},
               {&spoil_dk, "WRONG: dk: batch 0, head 1, row 63, column 0 is"},
               {&spoil_dv, "WRONG: dv: batch 0, head 1, row 63, column 0 is"},
               {&dv_unwritten, "WRONG: dv: batch 0, head 1, row 63 was not written, or is no number"},
               {&spoil, "WRONG: batch 0, head 1, row 63"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    *cases[i].fault = 1;
    int status =
        run_bench("--seqlen", "64", "--head-dim", "16", "--mask", "none", "--direction", "bwd", "--repeat", "1", NULL);
    *cases[i].fault = 0;
    assert_int_equal(status, 1);
    assert_said("out", cases[i].said);
    assert_said("err", "1 of 1 results are wrong");
  }
  /* More memory than it tells. */
  hoard = (size_t)48 << 20;
  int status =
      run_bench("--seqlen", "64", "--head-dim", "16", "--mask", "none", "--direction", "bwd", "--repeat", "1", NULL);
  hoard = 0;
  assert_int_equal(status, meter_sees);
  if (meter_sees) assert_said("out", "of extra memory, and qkv_backward_describe says");
  interrupt_backward = 1;
  status = run_bench("--seqlen", "64", "--head-dim", "16", "--mask", "none", "--direction", "bwd", "--repeat", "1", NULL);
  interrupt_backward = 0;
  assert_int_equal(status, 128 + SIGINT);
}

/* Rows of the suite, and the gate against results that are kept. */
static void test_suite(void **state) {
  (void)state;
  const char *rows = "16 queries";
  char name[256];
  snprintf(name, sizeof name, "%s", path_of("kept.json"));
  assert_int_equal(run_bench("--suite", "--quick", "--only", rows, "--json", name, NULL), 0);
  cJSON *json = read_json("kept.json");
  assert_int_equal(length(json, "rows"), 2);
  assert_true(cJSON_IsString(cJSON_GetObjectItem(json, "commit")) && cJSON_IsString(cJSON_GetObjectItem(json, "compiler")));
  assert_true(cJSON_IsString(cJSON_GetObjectItem(json, "date")) && cJSON_IsString(cJSON_GetObjectItem(json, "cpu")));
  for (int i = 0; i < 2; i++) {
    cJSON *row = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rows"), i);
    assert_true(number(row, "median") > 0 && number(row, "best") >= number(row, "median"));
    assert_true(number(row, "share_best") > 0 && number(row, "seqlen_q") == 16);
  }
  for (int faster = 0; faster < 2; faster++) { /* what is kept becomes slower, and faster than anything can be */
    for (int i = 0; i < 2; i++) {
      cJSON *row = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rows"), i);
      cJSON_SetNumberValue(cJSON_GetObjectItem(row, "share_median"), faster ? 400 : 1);
    }
    write_json(name, json);
    assert_int_equal(run_bench("--suite", "--quick", "--only", rows, "--gate", folder, NULL), faster);
    assert_said("out", faster ? "2 lost more than 10 points" : "0 lost more than 10 points");
    assert_said("out", "kept.json");
  }
  cJSON_Delete(json);
  spoil = 1;
  int status = run_bench("--suite", "--quick", "--only", rows, NULL);
  spoil = 0;
  assert_int_equal(status, 1);
  assert_said("out", "WRONG");
  assert_int_equal(run_bench("--suite", "--quick", "--only", "f32 backward, n =", "--json", name, NULL), 0);
  json = read_json("kept.json");
  assert_int_equal(length(json, "rows"), 2);
  for (int i = 0; i < 2; i++) {
    const cJSON *row = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rows"), i);
    assert_string_equal(cJSON_GetObjectItem(row, "direction")->valuestring, "bwd");
    assert_true(number(row, "seqlen_q") == 1024 && number(row, "share_best") > 0);
  }
  cJSON_Delete(json);
  assert_int_equal(run_bench("--suite", "--quick", "--only", "dropout 0.1", "--json", name, NULL), 0);
  json = read_json("kept.json");
  assert_int_equal(length(json, "rows"), 1);
  cJSON *dropout = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "rows"), 0);
  assert_true(number(dropout, "dropout") == 0.1 && number(dropout, "must") == 25);
  cJSON_SetNumberValue(cJSON_GetObjectItem(dropout, "median"), -60); /* less than half the time with than without */
  write_json(name, json);
  cJSON_Delete(json);
  assert_int_equal(run_bench("--suite", "--quick", "--only", "dropout 0.1", "--gate", folder, NULL), 1);
  assert_said("out", "1 lost more than 10 points");
  assert_int_equal(run_bench("--suite", "--only", "no such row", NULL), 2);
  assert_int_equal(run_bench("--suite", "--only", rows, "--gate", "/nowhere/at/all", NULL), 1);
}

static void test_wrong_results_get_no_numbers(void **state) {
  (void)state;
  for (int kind = 0; kind < 2; kind++) {
    spoil = kind == 0;
    leave_unwritten = kind == 1;
    int status =
        run_bench("--seqlen", "64", "--head-dim", "16", "--mask", "none", "--repeat", "1", "--json", path_of("wrong"), NULL);
    spoil = leave_unwritten = 0;
    assert_int_equal(status, 1);
    assert_said("out", "WRONG");
    assert_said("out", "row 63");
    assert_said("err", "1 of 1 results are wrong");
    cJSON *json = read_json("wrong");
    assert_int_equal(length(json, "rows"), 0);
    assert_int_equal(length(json, "wrong"), 1);
    assert_null(cJSON_GetObjectItem(cJSON_GetArrayItem(cJSON_GetObjectItem(json, "wrong"), 0), "seconds"));
    cJSON_Delete(json);
  }
}

static void test_interrupt_leaves_what_is_complete(void **state) {
  (void)state;
  interrupt_at = 130;
  int status = run_bench("--seqlen", "64,130,65", "--head-dim", "8", "--mask", "none", "--repeat", "1", "--json",
                         path_of("stopped"), NULL);
  interrupt_at = 0;
  assert_int_equal(status, 128 + SIGINT);
  assert_said("out", "agrees with float64");
  assert_said("err", "interrupted; 1 of 3 rows are complete");
  cJSON *json = read_json("stopped");
  assert_int_equal(length(json, "rows"), 1);
  assert_true(cJSON_IsTrue(cJSON_GetObjectItem(json, "interrupted")));
  cJSON_Delete(json);
}

static void test_skips_what_does_not_fit(void **state) {
  (void)state;
  assert_int_equal(run_bench("--seqlen", "64,2000000", "--heads", "1", "--head-dim", "1", "--mask", "none", "--algorithm",
                             "standard", "--repeat", "1", "--json", path_of("skipped"), NULL),
                   0);
  assert_said("out", "skipped: the scores of standard at n = 2000000 would take 14.6 TiB");
  cJSON *json = read_json("skipped");
  assert_int_equal(length(json, "rows"), 1);
  assert_int_equal(length(json, "skipped"), 1);
  cJSON_Delete(json);
}

static void test_inputs_repeat(void **state) {
  (void)state;
  const int64_t shape[3] = {2, 40, 8};
  array a;
  assert_int_equal(array_alloc(&a, QKV_F32, 3, shape), 0);
  for (int i = 0; i < 2 * 40 * 8; i++) ((float *)a.data)[i] = (float)(i * 37 % 101) / 50 - 1;
  char error[256];
  char name[256];
  snprintf(name, sizeof name, "%s", path_of("input.npy"));
  assert_int_equal(npy_write(name, &a, error, sizeof error), 0);
  assert_int_equal(run_bench("--input-q", name, "--input-k", name, "--input-v", name, "--seqlen", "20,100", "--mask",
                             "causal", "--compare", "--repeat", "1", NULL),
                   0);
  assert_said("out", "a longer n continues from their start");
  assert_said("out", "standard / flash");
  ((float *)a.data)[5] = (float)strtod("nan", NULL);
  assert_int_equal(npy_write(name, &a, error, sizeof error), 0);
  assert_int_equal(run_bench("--input-q", name, "--input-k", name, "--input-v", name, NULL), 1);
  assert_said("err", "not finite");
  array_free(&a);
}

static void test_charts(void **state) {
  (void)state;
  if (system("command -v gnuplot >/dev/null 2>&1") != 0) skip();
  assert_int_equal(run_bench("--seqlen", "64,128", "--head-dim", "8", "--mask", "none", "--repeat", "1", "--compare",
                             "--chart", "--plot", path_of("chart.svg"), "--plot", path_of("chart.png"), NULL),
                   0);
  assert_said("out", "extra memory of a call");
  assert_said("chart.svg", "<svg");
  char *png = read_file("chart.png");
  assert_non_null(png);
  assert_memory_equal(png, "\x89PNG", 4);
  free(png);
}

static void test_usage(void **state) {
  (void)state;
  static const char *const bad[][3] = {{"--seqlen", "64,,128", "empty"},
                                       {"--seqlen", "0", "--seqlen"},
                                       {"--seqlen", "6x", "6x"},
                                       {"--dtype", "f8", "none of f32, f64, f16, bf16"},
                                       {"--arithmetic", "exact", "none of canonical, fast"},
                                       {"--gate", "/tmp", "--gate goes with --suite"},
                                       {"--suite", "--compare", "a grid of its own"},
                                       {"--algorithm", "fast", "none of flash, standard"},
                                       {"--isa", "mmx", "mmx"},
                                       {"--head-dim", "64/0", "--head-dim"},
                                       {"--mask", "causl", "causl"},
                                       {"--direction", "sideways", "none of fwd, bwd"},
                                       {"--dropout", "0.1,1.5", "1.5 is no probability: 0 to 1"},
                                       {"--dropout", "rarely", "'rarely' is not a number"},
                                       {"--suite", "--direction=bwd", "a grid of its own"},
                                       {"--compare", "--direction=bwd", "the same backward pass"},
                                       {"--plot", "chart.pdf", ".svg or .png"},
                                       {"--input-q", "q.npy", "together"},
                                       {"--nothing", "x", "--nothing"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(run_bench(bad[i][0], bad[i][1], NULL), 2);
    assert_said("err", bad[i][2]);
  }
  assert_int_equal(run_bench("--heads", "3", "--kv-heads", "2", "--seqlen", "8", NULL), 1);
  assert_said("out", "3 query heads are no multiple of 2 key-value heads");
  assert_int_equal(run_bench("--seqlen", "8", "--json", "/nowhere/at/all", NULL), 1);
  assert_said("err", "/nowhere/at/all");
  assert_int_equal(run_bench("--help", NULL), 0);
  assert_said("out", "--compare");
}

static int make_folder(void **state) {
  (void)state;
  return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
  (void)state;
  static const char *const name[] = {"out",     "err",     "rows",      "types",     "wrong",
                                     "stopped", "skipped", "input.npy", "chart.svg", "chart.png", "kept.json"};
  for (size_t i = 0; i < sizeof name / sizeof *name; i++) unlink(path_of(name[i]));
  return rmdir(folder); /* fails if a temporary file was left behind */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_machine),
      cmocka_unit_test(test_meter),
      cmocka_unit_test(test_rows),
      cmocka_unit_test(test_types),
      cmocka_unit_test(test_half),
      cmocka_unit_test(test_backward),
      cmocka_unit_test(test_wrong_gradients_get_no_numbers),
      cmocka_unit_test(test_suite),
      cmocka_unit_test(test_wrong_results_get_no_numbers),
      cmocka_unit_test(test_interrupt_leaves_what_is_complete),
      cmocka_unit_test(test_skips_what_does_not_fit),
      cmocka_unit_test(test_inputs_repeat),
      cmocka_unit_test(test_charts),
      cmocka_unit_test(test_usage),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}

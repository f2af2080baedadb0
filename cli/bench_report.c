/* qkv bench: tables, JSON and charts. */
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "bench.h"
#include "machine.h"
#include "plot.h"
#include "text.h"

/* ---- The table --------------------------------------------------------------------------------------------------- */

void bench_size_text(double bytes, char *text, size_t n) {
  static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int u = 0;
  while (bytes >= 1000 && u < 4) {
    bytes /= 1024;
    u++;
  }
  snprintf(text, n, u == 0 || bytes >= 100 ? "%.0f %s" : bytes >= 10 ? "%.1f %s" : "%.2f %s", bytes, unit[u]);
}

static void time_text(double seconds, char *text, size_t n) {
  static const char *const unit[] = {"s", "ms", "us"};
  int u = seconds >= 1 ? 0 : seconds >= 1e-3 ? 1 : 2;
  double value = seconds * (u == 0 ? 1 : u == 1 ? 1e3 : 1e6);
  snprintf(text, n, value >= 100 ? "%.0f %s" : value >= 10 ? "%.1f %s" : "%.2f %s", value, unit[u]);
}

static void key_text(const cell *c, int key, char *text, size_t n) {
  long long a = 0, second = 0;
  switch (key) {
  case KEY_N: a = second = c->seqlen_q; break;
  case KEY_KV: a = second = c->seqlen_kv; break;
  case KEY_BATCH: a = second = c->batch; break;
  case KEY_HEADS: a = c->num_heads, second = c->num_kv_heads; break;
  case KEY_DIM: a = c->head_dim, second = c->head_dim_v; break;
  case KEY_THREADS: a = second = c->threads; break;
  case KEY_DIRECTION: snprintf(text, n, "%s", direction_name(c->backward)); return;
  case KEY_DROPOUT: snprintf(text, n, "%g", c->dropout); return;
  case KEY_DTYPE: snprintf(text, n, "%s", dtype_name(c->dtype)); return;
  case KEY_ARITHMETIC: snprintf(text, n, "%s", arithmetic_name(c->arithmetic)); return;
  case KEY_MASK: snprintf(text, n, "%s", c->mask); return;
  case KEY_ALGORITHM: snprintf(text, n, "%s", algorithm_name(c->algorithm)); return;
  default: snprintf(text, n, "%s", c->isa); return;
  }
  if (a == second) {
    snprintf(text, n, "%lld", a);
  } else {
    snprintf(text, n, "%lld/%lld", a, second);
  }
}

void bench_plan_columns(const bench *b, column k[KEYS]) {
  static const char *const title[KEYS] = {"n",          "n_kv", "direction", "batch",   "heads",     "head_dim", "dtype",
                                          "arithmetic", "mask", "dropout",   "threads", "algorithm", "isa"};
  int same_lengths = 1;
  for (size_t i = 0; i < b->count; i++) same_lengths &= b->r[i].c.seqlen_q == b->r[i].c.seqlen_kv;
  for (int x = 0; x < KEYS; x++) {
    char first[256], text[256];
    k[x] = (column){title[x], (int)strlen(title[x]), 0};
    for (size_t i = 0; i < b->count; i++) {
      key_text(&b->r[i].c, x, text, sizeof text);
      if (i == 0) snprintf(first, sizeof first, "%s", text);
      if (strcmp(first, text) != 0) k[x].varies = 1;
      if ((int)strlen(text) > k[x].width) k[x].width = (int)strlen(text);
    }
  }
  if (!same_lengths) k[KEY_N].title = "n_q", k[KEY_N].width = k[KEY_N].width > 3 ? k[KEY_N].width : 3;
  k[KEY_N].varies = 1;
  k[KEY_KV].varies = !same_lengths;
  if (b->o.compare) k[KEY_ALGORITHM].varies = 0;
}

/* What all cells have in common: "3/1 heads, head_dim 64, f32, causal, 2 threads, avx512". */
void bench_common_text(const bench *b, const column k[KEYS], char *text, size_t n) {
  text[0] = 0;
  for (int x = KEY_DIRECTION; x < KEYS && b->count; x++) {
    const cell *c = &b->r[0].c;
    char value[256];
    key_text(c, x, value, sizeof value);
    if (k[x].varies || (x == KEY_BATCH && c->batch == 1) || (x == KEY_ALGORITHM && b->o.compare)) continue;
    if (x == KEY_ARITHMETIC && c->arithmetic == QKV_CANONICAL) continue;
    if ((x == KEY_DIRECTION && !c->backward) || (x == KEY_DROPOUT && c->dropout == 0)) continue;
    if (x == KEY_ALGORITHM && !k[KEY_DIRECTION].varies && c->backward) continue; /* it has one */
    size_t used = strlen(text);
    const char *comma = used ? ", " : "";
    if (x == KEY_HEADS && c->num_heads != c->num_kv_heads) {
      snprintf(text + used, n - used, "%s%lld query heads on %lld key-value head%s", comma, (long long)c->num_heads,
               (long long)c->num_kv_heads, c->num_kv_heads == 1 ? "" : "s");
    } else if (x == KEY_HEADS || x == KEY_THREADS) {
      int one = strcmp(value, "1") == 0;
      snprintf(text + used, n - used, "%s%s %s%s", comma, value, x == KEY_HEADS ? "head" : "thread", one ? "" : "s");
    } else if (x == KEY_DIRECTION) {
      snprintf(text + used, n - used, "%sbackward", comma);
    } else if (x == KEY_BATCH || x == KEY_DIM || x == KEY_DROPOUT) {
      snprintf(text + used, n - used, "%s%s %s", comma, k[x].title, value);
    } else if (x == KEY_MASK && strcmp(value, "none") == 0) {
      snprintf(text + used, n - used, "%sno mask", comma);
    } else {
      snprintf(text + used, n - used, "%s%s", comma, value);
    }
  }
}

static int is_text(int key) {
  return key == KEY_DIRECTION || key == KEY_DTYPE || key == KEY_ARITHMETIC || key == KEY_MASK || key == KEY_ALGORITHM ||
         key == KEY_ISA;
}

/* The key columns of a cell, or their titles if c is NULL. */
static void print_keys(const column k[KEYS], const cell *c) {
  for (int x = 0; x < KEYS; x++) {
    char text[256];
    if (!k[x].varies) continue;
    snprintf(text, sizeof text, "%s", k[x].title);
    if (c) key_text(c, x, text, sizeof text);
    printf(is_text(x) ? "%-*s  " : "%*s  ", k[x].width, text);
  }
}

void bench_print_titles(const bench *b, const column k[KEYS]) {
  if (b->o.compare) {
    int width = 0;
    for (int x = 0; x < KEYS; x++) width += k[x].varies ? k[x].width + 2 : 0;
    printf("%*s%20s    %20s    %s\n", width, "", "standard", "flash", "standard / flash");
    print_keys(k, NULL);
    printf("%9s  %9s    %9s  %9s    %7s  %7s\n", "time", "memory", "time", "memory", "time", "memory");
  } else {
    print_keys(k, NULL);
    printf("%9s  %8s  %8s  %9s  %8s  %8s\n", "time", "GFLOP/s", "of peak", "memory", "error", "allowed");
  }
}

/* The reason in place of numbers. */
static void print_note(const result *r) {
  if (r->outcome == WRONG) {
    int color = cli_color(stdout);
    printf("%sWRONG%s: %s", color ? "\033[1;31m" : "", color ? "\033[0m" : "", r->note);
  } else if (r->outcome == SKIPPED) {
    printf("skipped: %s", r->note);
  } else {
    printf("not done");
  }
}

static void print_row(const column k[KEYS], const result *r) {
  char time[32], size[32];
  print_keys(k, &r->c);
  if (r->outcome == DONE) {
    time_text(r->seconds, time, sizeof time);
    bench_size_text((double)r->extra_bytes, size, sizeof size);
    printf("%9s  %8.1f  %6.1f %%  %9s  %8.1e  %8.1e", time, r->gflops, 100 * r->gflops / r->peak_gflops, size, r->error,
           r->bound);
  } else {
    print_note(r);
  }
  putchar('\n');
  fflush(stdout);
}

/* One line for standard and flash of the same problem; each may be missing. */
static void print_pair(const column k[KEYS], const result *standard, const result *flash) {
  const result *side[2] = {standard, flash};
  const cell *c = standard ? &standard->c : &flash->c;
  print_keys(k, c);
  for (int s = 0; s < 2; s++) {
    char time[32] = "-", size[32] = "-";
    if (side[s] && side[s]->outcome == DONE) {
      time_text(side[s]->seconds, time, sizeof time);
      bench_size_text((double)side[s]->extra_bytes, size, sizeof size);
    }
    printf("%9s  %9s    ", time, size);
  }
  if (standard && flash && standard->outcome == DONE && flash->outcome == DONE) {
    printf("%6.1fx  %6.*fx", standard->seconds / flash->seconds,
           (double)standard->extra_bytes < 100 * (double)flash->extra_bytes,
           (double)standard->extra_bytes / (flash->extra_bytes ? (double)flash->extra_bytes : 1));
  }
  putchar('\n');
  for (int s = 0; s < 2; s++) {
    if (side[s] && (side[s]->outcome == WRONG || side[s]->outcome == SKIPPED)) {
      printf("    %s ", algorithm_name(side[s]->c.algorithm));
      print_note(side[s]);
      putchar('\n');
    }
  }
  fflush(stdout);
}

/* The line or lines that are complete once cell i is. */
void bench_print_complete(const bench *b, const column k[KEYS], size_t i) {
  if (!b->o.compare) {
    print_row(k, &b->r[i]);
    return;
  }
  if (i + 1 < b->count && bench_same_cell(&b->r[i].c, &b->r[i + 1].c, BUT_ALGORITHM)) {
    if (b->r[i + 1].outcome != PLANNED || !cli_interrupted()) return;
  }
  const result *side[2] = {NULL, NULL};
  for (size_t j = 0; j <= i; j++) {
    if (bench_same_cell(&b->r[j].c, &b->r[i].c, BUT_ALGORITHM)) side[b->r[j].c.algorithm == QKV_STANDARD ? 0 : 1] = &b->r[j];
  }
  print_pair(k, side[0], side[1]);
}

/* What was checked and how near the results came to what they are allowed: standard, flash, the backward pass. */
void bench_print_checks(const bench *b) {
  for (int pass = 0; pass < 3; pass++) {
    const result *worst = NULL;
    size_t results = 0, rows = 0, wide = 0;
    for (size_t i = 0; i < b->count; i++) {
      const result *r = &b->r[i];
      if (r->outcome != DONE || pass != (r->c.backward ? 2 : r->c.algorithm == QKV_FLASH)) continue;
      results++;
      rows += (size_t)r->rows_checked;
      wide += r->c.dtype == QKV_F64;
      if (!worst || r->error * worst->bound > worst->error * r->bound) worst = r;
    }
    if (!worst) continue;
    printf("%-8s  agrees with %s: %zu rows%s of %zu result%s compared, worst error %.1e where %.1e is allowed\n",
           pass_name(&worst->c),
           wide == results ? "long double"
           : wide          ? "float64 and long double"
                           : "float64",
           rows, pass == 2 ? " and keys" : "", results, results == 1 ? "" : "s", worst->error, worst->bound);
  }
}

void bench_progress(const bench *b, size_t i) {
  if (!isatty(STDERR_FILENO)) return;
  if (i >= b->count) {
    fputs("\r\033[K", stderr);
  } else {
    const cell *c = &b->r[i].c;
    fprintf(stderr, "\r\033[K[%zu/%zu] %s n = %lld, head_dim %lld, %s, %d thread%s ...", i + 1, b->count,
            pass_name(c), (long long)c->seqlen_kv, (long long)c->head_dim, c->mask, c->threads,
            c->threads == 1 ? "" : "s");
  }
  fflush(stderr);
}

/* ---- Files and charts -------------------------------------------------------------------------------------------- */

cJSON *bench_machine_json(const bench *b) {
  cJSON *m = cJSON_CreateObject();
  char cpu[256];
  machine_describe(cpu, sizeof cpu);
  cJSON_AddStringToObject(m, "cpu", cpu);
  cJSON_AddNumberToObject(m, "cpus", machine_cpus());
  machine_cache cache[16];
  int caches = machine_caches(cache, 16);
  cJSON *list = cJSON_AddArrayToObject(m, "caches");
  for (int i = 0; i < caches; i++) {
    cJSON *x = cJSON_CreateObject();
    cJSON_AddNumberToObject(x, "level", cache[i].level);
    cJSON_AddStringToObject(x, "type", cache[i].type == 'd' ? "data" : cache[i].type == 'i' ? "instruction" : "unified");
    cJSON_AddNumberToObject(x, "bytes", (double)cache[i].bytes);
    cJSON_AddNumberToObject(x, "shared_by", cache[i].shared_by);
    cJSON_AddItemToArray(list, x);
  }
  cJSON_AddNumberToObject(m, "memory_bytes", (double)machine_memory_total());
  struct utsname u;
  if (uname(&u) == 0) {
    char system[sizeof u.sysname + sizeof u.release + sizeof u.machine + 3];
    snprintf(system, sizeof system, "%s %s %s", u.sysname, u.release, u.machine);
    cJSON_AddStringToObject(m, "system", system);
  }
  /* The highest that was measured beside the rows, of one core. */
  cJSON *peak = cJSON_AddObjectToObject(m, "peak_gflops_per_core");
  int cores = machine_cpus();
  for (size_t i = 0; i < b->count; i++) {
    const result *r = &b->r[i];
    if (r->outcome != DONE) continue;
    char name[40];
    /* 16-bit storage is widened to f32. */
    snprintf(name, sizeof name, "%s_%s", r->c.isa, r->c.dtype == QKV_F64 ? "f64" : "f32");
    if (r->c.arithmetic == QKV_FAST) {
      snprintf(name, sizeof name, "%s", strcmp(r->c.isa, "amx") == 0 ? "amx_bf16" : r->c.isa);
    }
    double one = r->peak_gflops / (r->c.threads < cores ? r->c.threads : cores);
    cJSON *old = cJSON_GetObjectItemCaseSensitive(peak, name);
    if (!old) {
      cJSON_AddNumberToObject(peak, name, one);
    } else if (old->valuedouble < one) {
      cJSON_SetNumberValue(old, one);
    }
  }
  cJSON_AddNumberToObject(m, "qkv_version", qkv_version());
  cJSON_AddNumberToObject(m, "order", qkv_order());
  return m;
}

cJSON *bench_row_json(const result *r) {
  const cell *c = &r->c;
  cJSON *x = cJSON_CreateObject();
  cJSON_AddNumberToObject(x, "batch", (double)c->batch);
  cJSON_AddNumberToObject(x, "seqlen_q", (double)c->seqlen_q);
  cJSON_AddNumberToObject(x, "seqlen_kv", (double)c->seqlen_kv);
  cJSON_AddNumberToObject(x, "num_heads", (double)c->num_heads);
  cJSON_AddNumberToObject(x, "num_kv_heads", (double)c->num_kv_heads);
  cJSON_AddNumberToObject(x, "head_dim", (double)c->head_dim);
  cJSON_AddNumberToObject(x, "head_dim_v", (double)c->head_dim_v);
  cJSON_AddStringToObject(x, "dtype", dtype_name(c->dtype));
  cJSON_AddStringToObject(x, "arithmetic", arithmetic_name(c->arithmetic));
  cJSON_AddStringToObject(x, "mask", c->mask);
  cJSON_AddNumberToObject(x, "threads", c->threads);
  cJSON_AddStringToObject(x, "algorithm", algorithm_name(c->algorithm));
  cJSON_AddStringToObject(x, "isa", c->isa);
  cJSON_AddStringToObject(x, "direction", direction_name(c->backward));
  cJSON_AddNumberToObject(x, "dropout", c->dropout);
  if (r->outcome == DONE) {
    cJSON_AddNumberToObject(x, "seconds", r->seconds);
    cJSON_AddNumberToObject(x, "gflops", r->gflops);
    cJSON_AddNumberToObject(x, "peak_gflops", r->peak_gflops);
    cJSON_AddNumberToObject(x, "peak_share", r->peak_gflops > 0 ? r->gflops / r->peak_gflops : 0);
    cJSON_AddNumberToObject(x, "extra_bytes", (double)r->extra_bytes);
    cJSON_AddNumberToObject(x, "runs", r->runs);
    cJSON_AddNumberToObject(x, "rows_checked", r->rows_checked);
    cJSON_AddNumberToObject(x, "error", r->error);
    cJSON_AddNumberToObject(x, "error_bound", r->bound);
  } else {
    cJSON_AddStringToObject(x, r->outcome == WRONG ? "wrong" : "skipped", r->note);
  }
  return x;
}

void bench_print_item(FILE *f, cJSON *item) {
  char *text = cJSON_PrintUnformatted(item);
  fputs(text ? text : "null", f);
  cJSON_free(text);
  cJSON_Delete(item);
}

/* One row a line, so that two files can be compared by eye and by diff. */
int bench_write_json(bench *b, char *error, size_t n) {
  FILE *f = b->json.stream;
  fputs("{\"machine\": ", f);
  bench_print_item(f, bench_machine_json(b));
  static const char *const list[] = {"rows", "skipped", "wrong"};
  static const int outcome[] = {DONE, SKIPPED, WRONG};
  for (int x = 0; x < 3; x++) {
    int any = 0;
    fprintf(f, ",\n \"%s\": [", list[x]);
    for (size_t i = 0; i < b->count; i++) {
      if (b->r[i].outcome != outcome[x]) continue;
      fputs(any ? ",\n  " : "\n  ", f);
      bench_print_item(f, bench_row_json(&b->r[i]));
      any = 1;
    }
    fputc(']', f);
  }
  fprintf(f, ",\n \"interrupted\": %s}\n", cli_interrupted() ? "true" : "false");
  return output_commit(&b->json, error, n);
}

/* Minutes of measuring shall not end in a name that cannot be written, or in a chart without gnuplot. */
int bench_open_files(bench *b) {
  char error[512];
  output probe;
  if ((b->o.chart || b->o.plots) && !plot_available()) {
    return cli_failure("%s needs gnuplot (Debian package gnuplot-nox)", b->o.chart ? "--chart" : "--plot");
  }
  for (int i = 0; i < b->o.plots; i++) {
    if (output_open(&probe, b->o.plot[i], error, sizeof error) != 0) return cli_failure("--plot: %s", error);
    output_discard(&probe);
  }
  if (b->o.json && output_open(&b->json, b->o.json, error, sizeof error) != 0) return cli_failure("--json: %s", error);
  return 0;
}

/* Series are the cells that differ in length only. */
int bench_draw(const bench *b, const column k[KEYS], const char *path, char *error, size_t n) {
  plot_series *s = NULL;
  size_t count = 0;
  double *values = grow(NULL, 3 * (b->count + 1) * sizeof *values), *next = values;
  unsigned char *used = grow(NULL, b->count + 1);
  memset(used, 0, b->count + 1);
  int by_keys = k[KEY_KV].varies;
  for (size_t i = 0; i < b->count; i++) {
    if (used[i] || b->r[i].outcome != DONE) continue;
    s = grow(s, (count + 1) * sizeof *s);
    plot_series *now = &s[count++];
    memset(now, 0, sizeof *now);
    for (int x = KEY_DIRECTION; x < KEYS; x++) {
      char text[256];
      if (!k[x].varies && !(x == KEY_ALGORITHM && b->o.compare)) continue;
      key_text(&b->r[i].c, x, text, sizeof text);
      size_t length = strlen(now->label);
      snprintf(now->label + length, sizeof now->label - length, "%s%s%s%s", length ? ", " : "", is_text(x) ? "" : k[x].title,
               is_text(x) ? "" : " ", text);
    }
    if (!now->label[0]) snprintf(now->label, sizeof now->label, "%s", pass_name(&b->r[i].c));
    size_t members = 0;
    for (size_t j = i; j < b->count; j++) {
      members += b->r[j].outcome == DONE && bench_same_cell(&b->r[i].c, &b->r[j].c, BUT_SEQLEN);
    }
    double *x = next, *seconds = x + members, *bytes = seconds + members;
    next = bytes + members;
    now->x = x;
    now->seconds = seconds;
    now->bytes = bytes;
    for (size_t j = i; j < b->count; j++) {
      if (b->r[j].outcome != DONE || !bench_same_cell(&b->r[i].c, &b->r[j].c, BUT_SEQLEN)) continue;
      used[j] = 1;
      size_t at = now->count++;
      double here = (double)(by_keys ? b->r[j].c.seqlen_kv : b->r[j].c.seqlen_q);
      for (; at > 0 && x[at - 1] > here; at--) { /* ascending, whatever the order of the list */
        x[at] = x[at - 1];
        seconds[at] = seconds[at - 1];
        bytes[at] = bytes[at - 1];
      }
      x[at] = here;
      seconds[at] = b->r[j].seconds;
      bytes[at] = (double)b->r[j].extra_bytes;
    }
  }
  char title[256];
  bench_common_text(b, k, title, sizeof title);
  plot p = {title, by_keys ? "keys n_kv" : "sequence length n", s, count};
  int status = 0;
  if (count == 0) {
    status = text_fail(error, n, "no row was measured: nothing to draw");
  } else if (path) {
    status = plot_file(&p, path, error, n);
  } else {
    status = plot_terminal(&p, stdout, cli_columns(), cli_color(stdout), error, n);
  }
  free(s);
  free(values);
  free(used);
  return status;
}

/* qkv bench --suite --gate: has a row become slower? */
#include <dirent.h>
#include <math.h>
#include <string.h>

#include "bench_suite.h"
#include "machine.h"

/* Points of the share of the peak, the allowance for what differs from one run of the suite to the next. */
static const double ALLOWED = 10;
/* A CPU without kept results is asked for less: nobody has measured it, and the row may never have held there. */
static const double ALLOWED_UNSEEN = 25;
/* Peaks or runs that differ by more than this, in %, are those of a disturbed machine, and so is one that loses more than
 * that part of its time to its hypervisor. */
static const double DISTURBED = 30, STOLEN = 5;
/* What two threads of multiply-adds reach on two free processors, at least. */
static const double PARALLEL = 1.9;
enum { ATTEMPTS = 3 };

/* ---- Stored results ---------------------------------------------------------------------------------------------- */

static cJSON *read_json(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  size_t used = 0, room = 1 << 16, got;
  char *text = grow(NULL, room);
  while ((got = fread(text + used, 1, room - used - 1, f)) > 0) {
    used += got;
    if (used + 1 == room) text = grow(text, room *= 2);
  }
  fclose(f);
  text[used] = 0;
  cJSON *json = cJSON_Parse(text);
  free(text);
  return json;
}

static const char *text_of(const cJSON *x, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(x, name);
  return cJSON_IsString(item) ? item->valuestring : "";
}
static double number_of(const cJSON *x, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(x, name);
  return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

/* The file of this CPU, its name in `path`; NULL if the directory has none. *failed: a message was printed. */
static cJSON *results_of_this_cpu(const char *directory, char *path, size_t n, int *failed) {
  char cpu[256];
  cJSON *found = NULL;
  machine_describe(cpu, sizeof cpu);
  DIR *d = opendir(directory);
  *failed = !d;
  if (!d) {
    cli_failure("--gate: %s: cannot be read as a directory", directory);
    return NULL;
  }
  for (struct dirent *e; !found && (e = readdir(d)) != NULL;) {
    size_t length = strlen(e->d_name);
    if (length < 5 || strcmp(e->d_name + length - 5, ".json") != 0) continue;
    snprintf(path, n, "%s/%s", directory, e->d_name);
    cJSON *json = read_json(path);
    if (!json) {
      *failed = 1;
      cli_failure("--gate: %s: no JSON", path);
      break;
    }
    /* Other results may lie beside those of the suite. */
    const cJSON *rows = cJSON_GetObjectItemCaseSensitive(json, "rows");
    if (strcmp(text_of(json, "cpu"), cpu) == 0 && text_of(cJSON_GetArrayItem(rows, 0), "row")[0]) {
      found = json;
    } else {
      cJSON_Delete(json);
    }
  }
  closedir(d);
  return found;
}

static const cJSON *stored_row(const cJSON *json, const row *r, const char *isa) {
  const cJSON *x;
  cJSON_ArrayForEach(x, cJSON_GetObjectItemCaseSensitive(json, "rows")) {
    int same = strcmp(text_of(x, "row"), r->name) == 0 && strcmp(text_of(x, "isa"), isa) == 0;
    if (same && number_of(x, "d") == (double)r->dim) return x;
  }
  return NULL;
}

/* ---- The gate ---------------------------------------------------------------------------------------------------- */

/* So much more time, as a rate in % of the one without. */
static double rate_of(double extra) { return 100 / (1 + extra / 100); }

/* The best of now is compared with the median of then: a lucky run of then must not fail an ordinary one of now.
 * What a row is compared by, more is better: the share of the peak of its cell, or of f32's rate. NAN: it is not compared.
 * What it must reach is stated in the row's own measure. */
static double now_of(const suite *s, const row *r, int stored) {
  if (r->of < 0 || s->cell[r->of].runs == 0 || isnan(r->best)) return (double)NAN;
  switch (r->measure) {
  case RATE: return r->best;
  case POINTS_LESS: return stored ? suite_best_share(&s->cell[r->of]) : -r->best;
  /* Where processors of this machine are not free, or none of their own, there is nothing to learn. */
  case TIMES: return r->alone < PARALLEL ? (double)NAN : 100 * r->best / s->cell[r->of].r.c.threads;
  case SHARE: return suite_best_share(&s->cell[r->of]);
  case EXTRA: return rate_of(r->best);
  case FASTER: return 100 * r->best;
  default: return (double)NAN;
  }
}
static double before_of(const suite *s, const row *r, const cJSON *stored) {
  if (r->measure == TIMES) {
    int good = stored && number_of(stored, "alone") >= PARALLEL;
    return 100 * (good ? number_of(stored, "median") : r->must) / s->cell[r->of].r.c.threads;
  }
  if (r->measure == FASTER) return 100 * (stored ? number_of(stored, "median") : r->must);
  if (r->measure == EXTRA) return rate_of(stored ? number_of(stored, "median") : r->must);
  if (stored) return number_of(stored, r->measure == RATE ? "median" : "share_median");
  return r->measure == POINTS_LESS ? -r->must : r->must;
}

/* In %; 0 if the machine is at rest. */
static double disturbance(const suite *s, const row *r) {
  const int index[2] = {r->of, r->beside};
  double spread = 0, elapsed = machine_now() - s->begin;
  for (int i = 0; i < 2; i++) {
    if (index[i] < 0) continue;
    const series *c = &s->cell[index[i]];
    spread = fmax(spread, fmax(suite_peak_spread(c), suite_share_spread(c)));
  }
  double stolen = elapsed > 0 ? 100 * (machine_stolen() - s->stolen) / elapsed : 0;
  if (spread <= DISTURBED) spread = 0;
  return stolen > STOLEN ? fmax(spread, stolen) : spread;
}

/* Measures the cells of a row again; more runs can only make the best better. */
static int repeat(suite *s, row *r) {
  char error[256];
  int index[2] = {r->of, r->beside};
  for (int i = 0; i < 2; i++) {
    if (index[i] >= 0) s->cell[index[i]].r.outcome = PLANNED;
  }
  if (suite_run_cells(s, index, r->beside >= 0 ? 2 : 1, 4, error, sizeof error) != QKV_OK) {
    cli_failure("%s", error);
    return 0;
  }
  suite_value(s, r);
  return 1;
}

int suite_gate(suite *s, const char *directory) {
  char path[1024] = "";
  int failed, compared = 0, lost = 0;
  cJSON *json = results_of_this_cpu(directory, path, sizeof path, &failed);
  if (failed) return -1;
  printf("\n");
  for (int i = 0; i < s->rows && !cli_interrupted(); i++) {
    row *r = &s->row[i];
    if (r->of < 0) continue;
    const cJSON *stored = stored_row(json, r, s->cell[r->of].r.c.isa);
    double before = before_of(s, r, stored), now = now_of(s, r, stored != NULL), allowed = stored ? ALLOWED : ALLOWED_UNSEEN;
    if (isnan(before) || isnan(now)) continue;
    compared++;
    int attempt = 0;
    for (; before - now > allowed && attempt < ATTEMPTS && !cli_interrupted(); attempt++) {
      if (!repeat(s, r)) {
        cJSON_Delete(json);
        return -1;
      }
      now = now_of(s, r, stored != NULL);
    }
    if (attempt == 0) continue;
    double spread = disturbance(s, r);
    allowed += spread;
    int bad = before - now > allowed;
    lost += bad;
    printf("%s: %s, head_dim %lld: %.1f, before %.1f (%s)", bad ? "LOST" : "slow at first", r->name, (long long)r->dim, now,
           before, stored ? "stored" : "must");
    if (spread > 0) printf("; the machine is disturbed by %.0f %%: %.0f points are let through", spread, allowed);
    printf("\n");
  }
  printf("gate: %d rows compared with %s, %d lost more than %.0f points\n", compared,
         json ? path : "what they must reach", lost, ALLOWED);
  cJSON_Delete(json);
  return lost;
}

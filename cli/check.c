/* qkv check: random problems against float64 and against each other. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "support/problem_text.h"
#include "support/prove.h"

enum {
  OPTION_SEED = CLI_OPTION,
  OPTION_COUNT,
  OPTION_PROBLEM,
  OPTION_ISA,
  OPTION_DIRECTION,
  OPTION_TIME,
  OPTION_COST,
  OPTION_JSON
};

static void help(void) {
  printf("Usage: qkv check [OPTION]...\n"
         "Compare attention and its gradients on random problems with float64, each within its own error bound, and bit\n"
         "for bit between instruction sets, thread counts, orders of tasks, forced paths, and batch entries and heads\n"
         "alone. A problem that fails is made smaller and printed as a command that replays it. The last line is\n"
         "`N passed, N failed`.\n"
         "\n"
         "  --seed S          seed of the random problems (0)\n"
         "  --count N         number of problems (300)\n"
         "  --time SECONDS    stop after this time, whatever the count\n"
         "  --cost N          multiply-adds of the largest problem, about (2e6)\n"
         "  --problem \"TEXT\"  this problem instead of random ones, for example\n"
         "                    \"f32 b2 h8/2 q100 k333 d64/80 causal window:128,0 seed:7\"\n"
         "  --isa NAME        only this instruction set and the scalar reference\n"
         "  --direction LIST  fwd, bwd: the forward pass, the backward pass (fwd,bwd)\n"
         "  --json            print one JSON object instead of lines\n");
  cli_print_common_options();
  cli_print_exit_status();
}

typedef struct totals {
  const char *direction; /* as given; NULL: both */
  int64_t passed, failed, runs;
  double worst;
  char worst_problem[PROBLEM_TEXT_BYTES];
  cJSON *failures; /* NULL: print lines */
} totals;

static void report_failure(totals *t, const problem_spec *spec, const prove_options *options, const prove_report *report) {
  problem_spec small = *spec;
  prove_report again;
  char text[PROBLEM_TEXT_BYTES];
  prove_shrink(&small, options, 400);
  if (prove_problem(&small, options, &again)) { /* it fails now and then only */
    small = *spec;
    again = *report;
  }
  problem_print(&small, text, sizeof text);
  if (t->failures == NULL) {
    printf("FAILED %s\n  replay: qkv check%s%s%s%s --problem \"%s\"\n", again.text, options->isa != NULL ? " --isa " : "",
           options->isa != NULL ? options->isa : "", t->direction != NULL ? " --direction " : "",
           t->direction != NULL ? t->direction : "", text);
    return;
  }
  cJSON *failure = cJSON_CreateObject();
  cJSON_AddStringToObject(failure, "problem", text);
  cJSON_AddStringToObject(failure, "what", again.text);
  cJSON_AddItemToArray(t->failures, failure);
}

static void check_one(totals *t, const problem_spec *spec, const prove_options *options) {
  prove_report report;
  bool passed = prove_problem(spec, options, &report);
  t->runs += report.runs;
  if (report.worst > t->worst) {
    t->worst = report.worst;
    problem_print(spec, t->worst_problem, sizeof t->worst_problem);
  }
  if (passed) {
    t->passed++;
  } else {
    t->failed++;
    report_failure(t, spec, options, &report);
  }
}

static bool isa_runs(const char *isa) {
  const char *isas[PROVE_MAX_ISAS];
  for (int n = prove_isas(isas); n > 0; n--) {
    if (strcmp(isas[n - 1], isa) == 0) {
      return true;
    }
  }
  return false;
}

/* PROVE_FORWARD and PROVE_BACKWARD of a list; 0: another word. */
static unsigned directions_of(const char *list) {
  unsigned found = 0;
  for (const char *word = list;;) {
    size_t length = strcspn(word, ",");
    unsigned one = length == 3 && strncmp(word, "fwd", 3) == 0   ? PROVE_FORWARD
                   : length == 3 && strncmp(word, "bwd", 3) == 0 ? PROVE_BACKWARD
                                                                 : 0;
    if (one == 0) {
      return 0;
    }
    found |= one;
    if (word[length] == 0) {
      return found;
    }
    word += length + 1;
  }
}

int qkv_cli_check(int argc, char **argv) {
  static const struct option options[] = {
      {"seed", required_argument, NULL, OPTION_SEED},
      {"count", required_argument, NULL, OPTION_COUNT},
      {"problem", required_argument, NULL, OPTION_PROBLEM},
      {"isa", required_argument, NULL, OPTION_ISA},
      {"direction", required_argument, NULL, OPTION_DIRECTION},
      {"time", required_argument, NULL, OPTION_TIME},
      {"cost", required_argument, NULL, OPTION_COST},
      {"json", no_argument, NULL, OPTION_JSON},
      CLI_COMMON_OPTIONS,
  };
  int64_t seed = 0, count = 300;
  double seconds = 0, cost = 2e6;
  const char *problem = NULL, *isa = NULL, *direction = NULL;
  bool json = false;
  for (int c; (c = cli_getopt(argc, argv, options, help)) != -1;) {
    int status = CLI_OK;
    switch (c) {
    case CLI_DONE: return CLI_OK;
    case OPTION_SEED: status = cli_parse_int(cli_option_name(), optarg, 0, INT64_MAX, &seed); break;
    case OPTION_COUNT: status = cli_parse_int(cli_option_name(), optarg, 0, INT64_MAX, &count); break;
    case OPTION_TIME: status = cli_parse_real(cli_option_name(), optarg, &seconds); break;
    case OPTION_COST: status = cli_parse_real(cli_option_name(), optarg, &cost); break;
    case OPTION_PROBLEM: problem = optarg; break;
    case OPTION_ISA: isa = optarg; break;
    case OPTION_DIRECTION: direction = optarg; break;
    case OPTION_JSON: json = true; break;
    default: return CLI_USAGE;
    }
    if (status != CLI_OK) {
      return status;
    }
  }
  if (optind < argc) {
    return cli_usage("'%s' is not expected here", argv[optind]);
  }
  isa = cli_isa_cap(isa);
  if (isa != NULL && !isa_runs(isa)) {
    return cli_usage("--isa %s: this instruction set does not run here", isa);
  }
  if (!(cost >= 1)) {
    return cli_usage("--cost %g is less than 1", cost);
  }
  unsigned directions = direction != NULL ? directions_of(direction) : PROVE_FORWARD | PROVE_BACKWARD;
  if (directions == 0) {
    return cli_usage("--direction: '%s' is no list of fwd and bwd", direction);
  }
  prove_options how = {PROVE_WAYS | directions, isa};
  totals t;
  memset(&t, 0, sizeof t);
  t.direction = direction;
  t.failures = json ? cJSON_CreateArray() : NULL;
  double start = cli_seconds();
  const int32_t *interrupted = cli_interrupts();
  if (problem != NULL) {
    problem_spec spec;
    char error[256];
    if (!problem_parse(problem, &spec, error, sizeof error)) {
      cJSON_Delete(t.failures);
      return cli_usage("--problem: %s", error);
    }
    check_one(&t, &spec, &how);
  } else {
    bool progress = isatty(STDERR_FILENO) != 0;
    double shown = start;
    for (int64_t n = 0; n < count && !*interrupted && (seconds <= 0 || cli_seconds() - start < seconds); n++) {
      problem_spec spec;
      problem_random((uint64_t)seed, (uint64_t)n, cost, &spec);
      check_one(&t, &spec, &how);
      if (progress && cli_seconds() - shown > 0.2) {
        shown = cli_seconds();
        fprintf(stderr, "\r%lld of %lld, %lld failed ", (long long)(n + 1), (long long)count, (long long)t.failed);
      }
    }
    if (progress) {
      fprintf(stderr, "\r\033[K");
    }
  }
  const char *isas[PROVE_MAX_ISAS];
  int isa_count = prove_isas(isas);
  if (json) {
    cJSON *object = cJSON_CreateObject(), *names = cJSON_AddArrayToObject(object, "isas");
    for (int n = 0; n < isa_count; n++) {
      cJSON_AddItemToArray(names, cJSON_CreateString(isas[n]));
    }
    cJSON_AddNumberToObject(object, "order", qkv_order());
    cJSON_AddNumberToObject(object, "seed", (double)seed);
    cJSON_AddNumberToObject(object, "passed", (double)t.passed);
    cJSON_AddNumberToObject(object, "failed", (double)t.failed);
    cJSON_AddNumberToObject(object, "runs", (double)t.runs);
    cJSON_AddNumberToObject(object, "worst_ratio", t.worst);
    cJSON_AddStringToObject(object, "worst_problem", t.worst_problem);
    cJSON_AddItemToObject(object, "failures", t.failures);
    int status = cli_print_json(object);
    if (status != CLI_OK) {
      return status;
    }
  } else {
    printf("instruction sets:");
    for (int n = 0; n < isa_count; n++) {
      printf(" %s", isas[n]);
    }
    printf("\nruns: %lld in %.1f s\n", (long long)t.runs, cli_seconds() - start);
    printf("largest error / bound: %.3f%s%s\n", t.worst, t.worst_problem[0] != 0 ? "  " : "", t.worst_problem);
    printf("%lld passed, %lld failed\n", (long long)t.passed, (long long)t.failed);
  }
  if (cli_interrupted()) {
    return cli_interrupted_failure("the rest was not checked");
  }
  return t.failed > 0 ? CLI_FAILURE : CLI_OK;
}

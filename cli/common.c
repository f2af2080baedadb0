#include "cli.h"

#include <errno.h>
#include <langinfo.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "file.h"

/* ---- Messages ---------------------------------------------------------------------------------------------------- */

static const char *verb_name = "";

void cli_set_verb(const char *verb) { verb_name = verb; }

static void message(const char *format, va_list list) {
  fflush(stdout);
  fprintf(stderr, "qkv%s%s: ", verb_name[0] != 0 ? " " : "", verb_name);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
}

int cli_failure(const char *format, ...) {
  va_list list;
  va_start(list, format);
  message(format, list);
  va_end(list);
  return CLI_FAILURE;
}

int cli_usage(const char *format, ...) {
  va_list list;
  va_start(list, format);
  message(format, list);
  va_end(list);
  fprintf(stderr, "Try 'qkv%s%s --help' for more information.\n", verb_name[0] != 0 ? " " : "", verb_name);
  return CLI_USAGE;
}

void cli_warning(const char *format, ...) {
  va_list list;
  va_start(list, format);
  message(format, list);
  va_end(list);
}

int cli_status_failure(qkv_status status, const qkv_problem *problem) {
  char text[512] = "";
  if (problem != NULL && qkv_check(problem, text, sizeof text) != QKV_OK && text[0] != 0) return cli_failure("%s", text);
  return cli_failure("%s", qkv_status_text(status));
}

int cli_backward_failure(qkv_status status, const qkv_problem *problem, const qkv_gradients *gradients) {
  char text[512] = "";
  if (qkv_backward_check(problem, gradients, text, sizeof text) != QKV_OK && text[0] != 0) return cli_failure("%s", text);
  return cli_failure("%s", qkv_status_text(status));
}

/* ---- Options ----------------------------------------------------------------------------------------------------- */

static const char *current_option = "";

const char *cli_option_name(void) { return current_option; }

static void remember_option(const struct option *options, int value) {
  static char text[64];
  current_option = "";
  for (; options->name != NULL; options++) {
    if (options->val != value) continue;
    snprintf(text, sizeof text, "--%s", options->name);
    current_option = text;
    return;
  }
}

int cli_getopt(int argc, char **argv, const struct option *options, void (*help)(void)) {
  /* The colon makes a missing argument distinguishable; the messages are ours. */
  opterr = 0;
  int value = getopt_long(argc, argv, ":hV", options, NULL);
  switch (value) {
  case 'h': help(); return CLI_DONE;
  case 'V': cli_print_version(); return CLI_DONE;
  case ':': cli_usage("option '%s' needs an argument", argv[optind - 1]); return '?';
  case '?':
    if (optopt >= CLI_OPTION || (optopt != 0 && strchr("hV", optopt) != NULL)) {
      cli_usage("option '%s' takes no argument", argv[optind - 1]);
    } else if (optopt != 0) {
      cli_usage("unknown option '-%c'", optopt);
    } else {
      cli_usage("unknown or ambiguous option '%s'", argv[optind - 1]);
    }
    return '?';
  default: remember_option(options, value); return value;
  }
}

void cli_print_common_options(void) {
  fputs("  -h, --help             print this help and exit\n"
        "  -V, --version          print the version and exit\n",
        stdout);
}

void cli_print_exit_status(void) {
  fputs("\nExit status:\n"
        "  0  success\n"
        "  1  failure: a file, the problem or the machine\n"
        "  2  wrong usage: an option or an expression\n",
        stdout);
}

void cli_print_version(void) {
  int32_t version = qkv_version();
  printf("qkv %d.%d.%d\n", (int)(version / 10000), (int)(version / 100 % 100), (int)(version % 100));
  printf("Arithmetic order %d.\n", (int)qkv_order());
  puts("License MIT. There is no warranty, to the extent permitted by law.");
}

int cli_parse_int(const char *option, const char *text, int64_t low, int64_t high, int64_t *value) {
  char *end;
  errno = 0;
  long long number = strtoll(text, &end, 10);
  if (end == text || *end != 0) return cli_usage("%s: '%s' is not an integer", option, text);
  if (errno == ERANGE || number < low || number > high) {
    if (high == INT64_MAX) return cli_usage("%s: %s is out of range: at least %lld", option, text, (long long)low);
    return cli_usage("%s: %s is out of range: %lld to %lld", option, text, (long long)low, (long long)high);
  }
  *value = number;
  return CLI_OK;
}

int cli_parse_unsigned(const char *option, const char *text, uint64_t *value) {
  char *end;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != 0) {
    return cli_usage("%s: '%s' is not an integer of at least 0", option, text);
  }
  if (errno == ERANGE) return cli_usage("%s: %s is out of range: 0 to 2^64 - 1", option, text);
  *value = number;
  return CLI_OK;
}

int cli_parse_real(const char *option, const char *text, double *value) {
  char *end;
  double number = strtod(text, &end);
  if (end == text || *end != 0) return cli_usage("%s: '%s' is not a number", option, text);
  if (!isfinite(number)) return cli_usage("%s: %s is not finite", option, text);
  *value = number;
  return CLI_OK;
}

static int range_end(const char **text, int64_t missing, int64_t *value) {
  char *end;
  errno = 0;
  if (**text == ':' || **text == 0) {
    *value = missing;
    return 0;
  }
  long long number = strtoll(*text, &end, 10);
  if (end == *text || number < 0 || errno == ERANGE) return -1;
  *text = end;
  *value = number;
  return 0;
}

int cli_parse_range(const char *option, const char *text, int64_t *begin, int64_t *end) {
  const char *at = text;
  int wrong = *text == 0 || range_end(&at, 0, begin) != 0;
  if (!wrong && *at == 0 && *begin < INT64_MAX) {
    *end = *begin + 1;
  } else if (!wrong && *at == ':') {
    at++;
    wrong = range_end(&at, INT64_MAX, end) != 0 || *at != 0 || *begin > *end;
  } else {
    wrong = 1;
  }
  return wrong ? cli_usage("%s: '%s' is not a range A:B with 0 <= A <= B", option, text) : CLI_OK;
}

int cli_parse_align(const char *option, const char *text, int32_t *align, int32_t *position) {
  char *end;
  *position = 0;
  if (strcmp(text, "end") == 0) {
    *align = QKV_ALIGN_END;
    return CLI_OK;
  }
  if (strcmp(text, "start") == 0) {
    *align = QKV_ALIGN_START;
    return CLI_OK;
  }
  errno = 0;
  long long number = strtoll(text, &end, 10);
  if (end == text || *end != 0 || errno == ERANGE || number < INT32_MIN || number > INT32_MAX) {
    return cli_usage("%s: '%s' is neither end, start nor the position of query 0", option, text);
  }
  *align = QKV_ALIGN_EXPLICIT;
  *position = (int32_t)number;
  return CLI_OK;
}

const char *cli_isa_cap(const char *option) {
  if (option != NULL) return option;
  const char *name = getenv("QKV_ISA");
  return name != NULL && name[0] != 0 ? name : NULL;
}

int cli_choose_isa(const char *option, const char **cap) {
  qkv_status status;
  *cap = cli_isa_cap(option);
  char *text = cli_describe_isa(*cap, &status);
  free(text);
  if (text != NULL) return CLI_OK;
  return cli_usage("%s: '%s' is no instruction set", option != NULL ? "--isa" : "QKV_ISA", *cap != NULL ? *cap : "");
}

/* ---- Signals ----------------------------------------------------------------------------------------------------- */

static int32_t cancel_flag;
static volatile sig_atomic_t signal_number;

static void on_signal(int number) {
  if (signal_number != 0) {
    output_remove_all();
    _exit(128 + number);
  }
  signal_number = number;
  *(volatile int32_t *)&cancel_flag = 1;
}

const int32_t *cli_interrupts(void) {
  static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
  static int installed;
  if (!installed) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
      struct sigaction old;
      /* A signal that the parent made ignored (nohup) stays so. */
      if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN) continue;
      sigaction(numbers[i], &action, NULL);
    }
    installed = 1;
  }
  return &cancel_flag;
}

int cli_interrupted(void) { return (int)signal_number; }

int cli_interrupted_failure(const char *consequence) {
  cli_failure("interrupted; %s", consequence);
  return 128 + (signal_number != 0 ? (int)signal_number : SIGINT);
}

/* ---- Facts ------------------------------------------------------------------------------------------------------- */

static char *describe(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients, int backward,
                      qkv_status *status) {
  size_t bytes = 4096;
  for (;;) {
    char *text = malloc(bytes);
    if (text == NULL) {
      *status = QKV_NO_MEMORY;
      return NULL;
    }
    *status = backward ? qkv_backward_describe(context, problem, gradients, text, bytes)
                       : qkv_describe(context, problem, text, bytes);
    if (*status != QKV_OK) {
      free(text);
      return NULL;
    }
    if (strlen(text) + 1 < bytes) return text;
    free(text);
    bytes *= 2;
  }
}

char *cli_describe(const qkv_context *context, const qkv_problem *problem, qkv_status *status) {
  return describe(context, problem, NULL, 0, status);
}

char *cli_backward_describe(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients,
                            qkv_status *status) {
  return describe(context, problem, gradients, 1, status);
}

char *cli_describe_isa(const char *isa_cap, qkv_status *status) {
  static float in[3], out[1];
  qkv_problem p = qkv_problem_default();
  qkv_context c = qkv_context_default();
  p.batch = p.num_heads = p.num_kv_heads = p.seqlen_q = p.seqlen_kv = p.head_dim = 1;
  p.q = qkv_bhsd(&in[0], QKV_F32, 1, 1, 1);
  p.k = qkv_bhsd(&in[1], QKV_F32, 1, 1, 1);
  p.v = qkv_bhsd(&in[2], QKV_F32, 1, 1, 1);
  p.out = qkv_bhsd(out, QKV_F32, 1, 1, 1);
  c.isa_cap = isa_cap;
  return cli_describe(&c, &p, status);
}

/* The next line `name: value` at *text, which moves on; 0 at the end. Lines of another form are skipped. */
static int next_fact(const char **text, const char **name, size_t *name_length, const char **value, size_t *value_length) {
  while (**text != 0) {
    const char *line = *text;
    size_t length = strcspn(line, "\n");
    *text = line + length + (line[length] == '\n');
    const char *colon = memchr(line, ':', length);
    if (colon == NULL) continue;
    *name = line;
    *name_length = (size_t)(colon - line);
    *value = colon + 1;
    while (**value == ' ') ++*value;
    *value_length = (size_t)(line + length - *value);
    return 1;
  }
  return 0;
}

int cli_fact(const char *text, const char *name, char *value, size_t bytes) {
  const char *found_name, *found_value;
  size_t name_length, value_length;
  value[0] = 0;
  while (next_fact(&text, &found_name, &name_length, &found_value, &value_length)) {
    if (name_length != strlen(name) || memcmp(name, found_name, name_length) != 0) continue;
    snprintf(value, bytes, "%.*s", (int)value_length, found_value);
    return 1;
  }
  return 0;
}

double cli_fact_number(const char *text, const char *name) {
  char value[64];
  return cli_fact(text, name, value, sizeof value) ? strtod(value, NULL) : 0;
}

void cli_facts_to_json(const char *text, cJSON *object) {
  const char *name, *value;
  size_t name_length, value_length;
  while (next_fact(&text, &name, &name_length, &value, &value_length)) {
    char key[128], content[1024], *end;
    snprintf(key, sizeof key, "%.*s", (int)name_length, name);
    snprintf(content, sizeof content, "%.*s", (int)value_length, value);
    double number = strtod(content, &end);
    if (end != content && *end == 0 && isfinite(number)) {
      cJSON_AddNumberToObject(object, key, number);
    } else {
      cJSON_AddStringToObject(object, key, content);
    }
  }
}

int cli_print_json(cJSON *object) {
  char *text = cJSON_Print(object);
  cJSON_Delete(object);
  if (text == NULL) return cli_failure("out of memory");
  puts(text);
  cJSON_free(text);
  return CLI_OK;
}

/* ---- The machine around ------------------------------------------------------------------------------------------ */

double cli_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int cli_is_utf8(void) { return strcmp(nl_langinfo(CODESET), "UTF-8") == 0; }

int cli_color(FILE *stream) {
  const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
  if (no_color != NULL && no_color[0] != 0) return 0;
  if (terminal == NULL || strcmp(terminal, "dumb") == 0) return 0;
  return isatty(fileno(stream));
}

int cli_columns(void) {
  struct winsize size;
  if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char *columns = getenv("COLUMNS");
  int number = columns != NULL ? atoi(columns) : 0;
  return number > 0 ? number : 80;
}

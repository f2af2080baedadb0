/* What the verbs of the program `qkv` share. A verb is one file with one function qkv_cli_<verb>(argc, argv), argv[0] being
 * the verb's name; it returns the exit status. */
#ifndef QKV_CLI_H
#define QKV_CLI_H

#include <getopt.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cjson/cJSON.h>

#include "qkv/qkv.h"

enum { CLI_OK = 0, CLI_FAILURE = 1, CLI_USAGE = 2 };

int qkv_cli_run(int argc, char **argv);
int qkv_cli_bench(int argc, char **argv);
int qkv_cli_check(int argc, char **argv);
int qkv_cli_mask(int argc, char **argv);
int qkv_cli_info(int argc, char **argv);

#if defined(__GNUC__) || defined(__clang__)
#define CLI_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define CLI_PRINTF(string, first)
#endif

/* Messages on standard error: `qkv VERB: text`. They return the exit status that fits, so that `return cli_failure(...)`
 * does. The usage form adds a line that points to --help. */
void cli_set_verb(const char *verb);
int cli_failure(const char *format, ...) CLI_PRINTF(1, 2);
int cli_usage(const char *format, ...) CLI_PRINTF(1, 2);
void cli_warning(const char *format, ...) CLI_PRINTF(1, 2);
/* The message of a failed call of the library, from qkv_check (qkv_backward_check) or the status. */
int cli_status_failure(qkv_status status, const qkv_problem *problem);
int cli_backward_failure(qkv_status status, const qkv_problem *problem, const qkv_gradients *gradients);

/* getopt_long with messages in our form. Returns '?' after a message: the verb then returns CLI_USAGE. Options without a
 * letter have values from CLI_OPTION on; those that every verb has are in CLI_COMMON_OPTIONS and are answered by
 * cli_getopt itself: --version here, --help by `help`, and it returns CLI_DONE. */
enum { CLI_OPTION = 256, CLI_DONE = 255 };
#define CLI_COMMON_OPTIONS \
  {"help", no_argument, NULL, 'h'}, {"version", no_argument, NULL, 'V'}, { NULL, 0, NULL, 0 }
int cli_getopt(int argc, char **argv, const struct option *options, void (*help)(void));
/* The name of the option that cli_getopt returned last, with its dashes, for messages. */
const char *cli_option_name(void);

/* The lines every --help ends with. */
void cli_print_common_options(void);
void cli_print_exit_status(void);
void cli_print_version(void);

/* Numbers of options. 0, or CLI_USAGE after a message. */
int cli_parse_int(const char *option, const char *text, int64_t low, int64_t high, int64_t *value);
int cli_parse_unsigned(const char *option, const char *text, uint64_t *value);
int cli_parse_real(const char *option, const char *text, double *value);
/* A:B, or A for A:A+1, or A: and :B with the missing end 0 or INT64_MAX; 0 <= A <= B. */
int cli_parse_range(const char *option, const char *text, int64_t *begin, int64_t *end);
/* end, start, or a number (explicit position of query 0). */
int cli_parse_align(const char *option, const char *text, int32_t *align, int32_t *position);

/* The cap of the instruction set: `option` if not NULL, else the environment's QKV_ISA, else NULL. */
const char *cli_isa_cap(const char *option);
/* The same with a check of the name: 0, or CLI_USAGE after a message. */
int cli_choose_isa(const char *option, const char **cap);

/* From the first call on, SIGINT, SIGTERM and SIGHUP set a flag instead of ending the program; it is the value for
 * qkv_context.cancel. A second signal removes unfinished output files and ends the program. */
const int32_t *cli_interrupts(void);
/* The signal that came, 0 if none did; 128 + it is the exit status, which the second function returns after a message. */
int cli_interrupted(void);
int cli_interrupted_failure(const char *consequence);

/* What qkv_describe says, in memory to free; NULL after *status was set to an error. */
char *cli_describe(const qkv_context *context, const qkv_problem *problem, qkv_status *status);
/* The same by qkv_backward_describe. */
char *cli_backward_describe(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients,
                            qkv_status *status);
/* The same of a problem so small that only the choice of the instruction set is of interest. */
char *cli_describe_isa(const char *isa_cap, qkv_status *status);
/* The value of the line `name: value` of such a text: copied, cut at `bytes`; 0 if there is none. */
int cli_fact(const char *text, const char *name, char *value, size_t bytes);
/* The same as a number; 0 if there is none. */
double cli_fact_number(const char *text, const char *name);
/* Adds each line of the text to a JSON object: numbers as numbers, the rest as text. */
void cli_facts_to_json(const char *text, cJSON *object);
/* Prints an object and frees it. Returns the exit status. */
int cli_print_json(cJSON *object);

double cli_seconds(void); /* a monotonic clock */
int cli_is_utf8(void);
int cli_color(FILE *stream); /* a terminal, and neither NO_COLOR nor a dumb one */
int cli_columns(void);       /* width of the terminal, 80 if there is none */

#endif

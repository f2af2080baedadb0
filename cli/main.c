#include <locale.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

static const struct verb {
  const char *name, *summary;
  int (*main)(int argc, char **argv);
} verbs[] = {
    {"run", "compute attention on files", qkv_cli_run},
    {"bench", "measure speed and memory over a grid of problems", qkv_cli_bench},
    {"check", "compare random problems with float64, and every path with every other", qkv_cli_check},
    {"mask", "show what a mask makes visible, and what it saves", qkv_cli_mask},
    {"info", "tell about this machine and this library", qkv_cli_info},
};
enum { VERBS = sizeof verbs / sizeof verbs[0] };

static void help(void) {
  puts("Usage: qkv VERB [OPTION]...\n"
       "  or:  qkv --help | --version\n"
       "\n"
       "Transformer attention on this computer's processor: every kind of mask, memory that\n"
       "grows linearly with the sequence, the same bits on every machine.\n"
       "\n"
       "Verbs:");
  for (int i = 0; i < VERBS; i++) printf("  %-22s %s\n", verbs[i].name, verbs[i].summary);
  puts("\nOptions:");
  cli_print_common_options();
  puts("\n'qkv VERB --help' tells the options of a verb.\n"
       "\n"
       "Environment:\n"
       "  QKV_ISA                the best instruction set to use: avx512, avx2, neon, portable or\n"
       "                         reference, where no option --isa says it\n"
       "  NO_COLOR               if set, terminal output has no colors");
  cli_print_exit_status();
  puts("\nExamples:\n"
       "  qkv run --q q.npy --k k.npy --v v.npy --mask causal --out o.npy\n"
       "  qkv mask 'causal & window(255,0)' --seqlen 4096\n"
       "  qkv check --count 200");
}

/* Data may still be on its way when the verb returns: a full disk must not end in success. */
static int close_output(int status) {
  int failed = ferror(stdout);
  failed |= fclose(stdout) != 0;
  if (failed && status == CLI_OK) {
    fputs("qkv: cannot write to standard output\n", stderr);
    return CLI_FAILURE;
  }
  return status;
}

static int dispatch(int argc, char **argv) {
  int at = 1;
  if (at < argc && strcmp(argv[at], "--") == 0) {
    at++;
  } else if (at < argc && (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0)) {
    help();
    return CLI_OK;
  } else if (at < argc && (strcmp(argv[at], "--version") == 0 || strcmp(argv[at], "-V") == 0)) {
    cli_print_version();
    return CLI_OK;
  } else if (at < argc && argv[at][0] == '-') {
    return cli_usage("unknown option '%s'", argv[at]);
  }
  if (at >= argc) return cli_usage("a verb is missing");
  for (int i = 0; i < VERBS; i++) {
    if (strcmp(argv[at], verbs[i].name) != 0) continue;
    cli_set_verb(verbs[i].name);
    return verbs[i].main(argc - at, argv + at);
  }
  return cli_usage("unknown verb '%s'", argv[at]);
}

int main(int argc, char **argv) {
  /* The terminal's character set; numbers keep their point. */
  setlocale(LC_CTYPE, "");
  return close_output(dispatch(argc, argv));
}

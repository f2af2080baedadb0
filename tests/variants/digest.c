/* Compares results with committed digests: digest [--isa NAME] FILE [GRADIENTS]. A line of a file is a digest, 16 hexadecimal
 * digits, and the text of a problem; # begins a comment. Digests of the second file are those of the problem's gradients. Every
 * instruction set that runs here is used, or the one given, which must run here. Needs nothing but the library and support/, so
 * that it goes wherever a C compiler goes. */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "problem_text.h"
#include "prove.h"

typedef struct totals {
  const char *file;
  bool backward; /* the file is one of gradients */
  long line, equal, wrong;
} totals;

static qkv_status digest_gradients(const qkv_context *context, const problem_case *c, uint64_t *digest) {
  problem_gradients g;
  if (!problem_gradients_build(&g, c, 0)) {
    return QKV_NO_MEMORY;
  }
  qkv_status status = qkv_backward(context, &c->problem, &g.g, NULL, 0);
  if (status == QKV_OK) {
    *digest = compare_gradients_digest(&c->problem, &g.g);
  }
  problem_gradients_free(&g);
  return status;
}

static void compare_line(totals *t, const char *isa, uint64_t expected, const char *text) {
  problem_case c;
  char error[256];
  qkv_context context = qkv_context_default();
  context.isa_cap = isa;
  if (!problem_open(&c, text, 0, error, sizeof error)) {
    printf("%s:%ld: %s\n", t->file, t->line, error);
    t->wrong++;
    return;
  }
  qkv_status status = qkv_forward(&context, &c.problem, NULL, 0);
  uint64_t found = status == QKV_OK ? compare_digest(&c.problem) : 0;
  if (status == QKV_OK && t->backward) {
    status = digest_gradients(&context, &c, &found);
  }
  if (status == QKV_OK && found == expected) {
    t->equal++;
  } else {
    t->wrong++;
    printf("%s:%ld: %s gives %016" PRIx64 " (%s) for: %s\n", t->file, t->line, isa, found, qkv_status_text(status), text);
  }
  problem_free(&c);
}

static int compare_file(const char *file, bool backward, const char *isa) {
  totals t = {file, backward, 0, 0, 0};
  char line[PROBLEM_TEXT_BYTES + 64];
  FILE *in = fopen(file, "r");
  if (in == NULL) {
    fprintf(stderr, "digest: %s: %s\n", file, strerror(errno));
    return 2;
  }
  while (fgets(line, sizeof line, in) != NULL) {
    t.line++;
    line[strcspn(line, "#\n")] = 0;
    if (line[strspn(line, " \t")] == 0) {
      continue;
    }
    char *text;
    errno = 0;
    uint64_t expected = strtoull(line, &text, 16);
    if (errno != 0 || text != line + 16 || *text != ' ') {
      fprintf(stderr, "digest: %s:%ld: a line is a digest of 16 hexadecimal digits, a blank, and a problem\n", file, t.line);
      fclose(in);
      return 2;
    }
    compare_line(&t, isa, expected, text + 1);
  }
  fclose(in);
  printf("%s: %ld digests%s equal, %ld not\n", isa, t.equal, backward ? " of gradients" : "", t.wrong);
  return t.wrong != 0 || t.equal == 0;
}

int main(int argc, char **argv) {
  const char *wanted = NULL, *isas[PROVE_MAX_ISAS];
  int result = 0, runs = 0, count = prove_isas(isas), first = 1;
  if (argc > 2 && strcmp(argv[1], "--isa") == 0) {
    wanted = argv[2];
    first = 3;
  }
  if (argc - first < 1 || argc - first > 2) {
    fprintf(stderr, "usage: digest [--isa NAME] FILE [GRADIENTS]\n");
    return 2;
  }
  for (int n = 0; n < count; n++) {
    if (wanted != NULL && strcmp(wanted, isas[n]) != 0) {
      continue;
    }
    for (int file = first; file < argc; file++) {
      int one = compare_file(argv[file], file > first, isas[n]);
      result = one > result ? one : result;
    }
    runs++;
  }
  if (runs == 0) {
    fprintf(stderr, "digest: the instruction set %s does not run here\n", wanted != NULL ? wanted : "wanted");
    return 1;
  }
  return result;
}

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "file.h"
#include "text.h"
#include "training.h"

int curve_write(const training *t, const char *path, char *error, size_t n) {
  output o;
  int64_t next = 0;
  if (output_open(&o, path, error, n)) return -1;
  fprintf(o.stream, "step\ttraining\tvalidation\n");
  while (next < t->validation_count && t->validations[2 * next] < 1) next++;
  for (int64_t i = 0; i < t->done; i++) {
    fprintf(o.stream, "%lld\t%.17g\t", (long long)i + 1, t->losses[i]);
    if (next < t->validation_count && (int64_t)t->validations[2 * next] == i + 1)
      fprintf(o.stream, "%.17g\n", t->validations[2 * next++ + 1]);
    else
      fputc('\n', o.stream);
  }
  return output_commit(&o, error, n);
}

static void quoted(FILE *f, const char *text) {
  fputc('\'', f);
  for (; *text; text++) {
    if (*text == '\'') fputc('\'', f);
    fputc(*text, f);
  }
  fputc('\'', f);
}

static void script(FILE *f, const training *t, const corpus *text, int characters) {
  const int64_t mean = t->done >= 100 ? t->done / 100 : 1; /* steps of a point of the training's line */
  fprintf(f, "$train << EOD\n");
  for (int64_t i = 0; i + mean <= t->done; i += mean) {
    double sum = 0;
    for (int64_t k = 0; k < mean; k++) sum += t->losses[i + k];
    fprintf(f, "%.17g %.17g\n", (double)i + 0.5 * (double)(mean + 1), sum / (double)mean);
  }
  fprintf(f, "EOD\n$validation << EOD\n");
  for (int64_t i = 0; i < t->validation_count; i++) fprintf(f, "%.17g %.17g\n", t->validations[2 * i], t->validations[2 * i + 1]);
  fprintf(f, "EOD\nset xrange [0:%lld]\nset xlabel 'step'\nset key top right\n", (long long)(t->done > 0 ? t->done : 1));
  if (!characters) {
    fprintf(f, "set ylabel 'nats per character'\nset border 3 linecolor rgb '#444444'\nset tics nomirror\n"
               "set grid linecolor rgb '#dddddd' linetype 1\n");
    fprintf(f,
            "plot $train with lines linewidth 2 linecolor rgb '#0072b2' title 'training, with dropout', $validation with linespoints "
            "linewidth 2 pointtype 7 pointsize 0.6 linecolor rgb '#d55e00' title 'validation', %.17g with lines dashtype 2 linecolor rgb "
            "'#666666' title 'bigram entropy of the text'\n",
            text->bigram_entropy);
  } else {
    fprintf(f,
            "set title 'nats per character'\nplot $train with points pointtype 't' title 'training', $validation with points pointtype "
            "'V' title 'validation', %.17g with points pointtype '-' title 'bigram entropy'\n",
            text->bigram_entropy);
  }
}

int curve_plot(const training *t, const corpus *text, const char *path, char *error, size_t n) {
  char name[] = "/tmp/charlm-XXXXXX", command[64];
  output o = {0};
  const size_t length = path ? strlen(path) : 0;
  const int svg = length > 4 && !strcmp(path + length - 4, ".svg"), png = length > 4 && !strcmp(path + length - 4, ".png");
  if (path && !svg && !png) return text_fail(error, n, "%s: the name of a chart must end in .svg or .png", path);
  const int fd = mkstemp(name);
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (!f) return text_fail(error, n, "%s: %s", name, strerror(errno));
  if (path && output_open(&o, path, error, n)) {
    fclose(f);
    unlink(name);
    return -1;
  }
  fprintf(f, svg   ? "set terminal svg size 900,440 font 'Helvetica,14' background rgb 'white'\n"
             : png ? "set terminal pngcairo size 1350,660 fontscale 1.2 background rgb 'white'\n"
                   : "set terminal dumb size 79,22 mono\n");
  if (path) {
    fprintf(f, "set output ");
    quoted(f, o.temporary ? o.temporary : path);
    fputc('\n', f);
  }
  script(f, t, text, !path);
  int status = fclose(f) ? -1 : 0;
  snprintf(command, sizeof command, "gnuplot '%s'", name);
  fflush(NULL);
  if (status == 0) status = system(command);
  unlink(name);
  if (status) {
    if (path) output_discard(&o);
    return text_fail(error, n, status > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 127
                                   ? "gnuplot could not be run; it draws the chart (Debian package gnuplot-nox)"
                                   : "gnuplot failed");
  }
  return path ? output_commit(&o, error, n) : 0;
}

#include "plot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "file.h"
#include "text.h"

/* Colours that people with colour blindness tell apart too, darkest first. */
static const char *const colour_of[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666"};
#define COLOURS (sizeof colour_of / sizeof *colour_of)

/* A string in gnuplot's single quotes. */
static void quoted(FILE *f, const char *text) {
  fputc('\'', f);
  for (; *text; text++) {
    if (*text == '\'') fputc('\'', f);
    fputc(*text == '\n' ? ' ' : *text, f);
  }
  fputc('\'', f);
}

/* One panel: column 2 (seconds) or 3 (bytes) of the data blocks. */
static void panel(FILE *f, const plot *p, int column, int characters, int key) {
  fprintf(f, "set title '%s'\n", column == 2 ? "time of a call" : "extra memory of a call");
  fprintf(f, "set format y '%s'\n", column == 2 ? "%.0s %cs" : "%.0b %BB");
  fprintf(f, "set logscale y %d\n", column == 2 ? 10 : 2);
  /* Memory spans many powers of two: a mark at each 8th-fold keeps the labels apart. */
  fprintf(f, column == 2 ? "set ytics autofreq\n" : "set ytics 8\n");
  fprintf(f, key ? "set key top left reverse Left noenhanced samplen 2\n" : "unset key\n");
  int any = 0;
  for (size_t i = 0; i < p->count; i++) {
    if (p->series[i].count == 0) continue;
    fprintf(f, "%s $s%zu using 1:%d with %s", any ? "," : "plot", i, column,
            p->series[i].count > 1 ? "linespoints" : "points");
    if (characters) {
      fprintf(f, " pointtype '%c'", (int)('A' + i % 26));
    } else {
      fprintf(f, " linewidth 2.5 pointtype %d pointsize 0.9 linecolor rgb '%s' dashtype %zu", i % 2 ? 9 : 7,
              colour_of[i % COLOURS], 1 + i / COLOURS);
    }
    fprintf(f, " title ");
    quoted(f, p->series[i].label);
    any = 1;
  }
  fputc('\n', f);
}

static void script(FILE *f, const plot *p, int characters, int stacked) {
  double low = 0, high = 0;
  for (size_t i = 0; i < p->count; i++) {
    fprintf(f, "$s%zu << EOD\n", i);
    for (size_t j = 0; j < p->series[i].count; j++) {
      double x = p->series[i].x[j];
      if (low == 0 || x < low) low = x;
      if (x > high) high = x;
      /* A logarithm has no place for a call that needs no memory: it lies at one byte. */
      double bytes = p->series[i].bytes[j] > 1 ? p->series[i].bytes[j] : 1;
      fprintf(f, "%.17g %.17g %.17g\n", x, p->series[i].seconds[j], bytes);
    }
    fprintf(f, "EOD\n");
  }
  fprintf(f, "set logscale x 2\nset xrange [%.17g:%.17g]\nset format x '%%.0f'\n", low / 1.25, high * 1.25);
  fprintf(f, "set xlabel ");
  quoted(f, p->x_label);
  fputc('\n', f);
  if (!characters) {
    fprintf(f, "set border 3 linecolor rgb '#444444'\nset tics nomirror\nset grid linecolor rgb '#dddddd' linetype 1\n");
    fprintf(f, "set lmargin 10\nset rmargin 3\n");
  }
  if (p->title[0]) {
    fprintf(f, "set multiplot layout %s title ", stacked ? "2,1" : "1,2");
    quoted(f, p->title);
    fprintf(f, " noenhanced\n");
  } else {
    fprintf(f, "set multiplot layout %s\n", stacked ? "2,1" : "1,2");
  }
  panel(f, p, 2, characters, 1);
  panel(f, p, 3, characters, 0);
  fprintf(f, "unset multiplot\n");
}

/* Runs the script of that name; what gnuplot says goes into a new string. Returns the exit status, or -1. */
static int run(const char *name, char **said) {
  char command[128];
  snprintf(command, sizeof command, "exec gnuplot '%s' 2>&1", name);
  fflush(NULL);
  FILE *pipe = popen(command, "r");
  if (!pipe) return -1;
  size_t used = 0, room = 1 << 16, got;
  char *text = malloc(room);
  while (text && (got = fread(text + used, 1, room - used - 1, pipe)) > 0) {
    used += got;
    if (room - used < 2) {
      char *more = realloc(text, room *= 2);
      if (!more) free(text);
      text = more;
    }
  }
  if (text) text[used] = 0;
  int status = pclose(pipe);
  *said = text;
  return status >= 0 && WIFEXITED(status) && text ? WEXITSTATUS(status) : -1;
}

/* A temporary script; 0 without one. */
static FILE *open_script(char *name, size_t n) {
  (void)n;
  snprintf(name, n, "/tmp/qkv-plot-XXXXXX");
  int fd = mkstemp(name);
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (!f && fd >= 0) {
    close(fd);
    unlink(name);
  }
  return f;
}

/* Ends the script, runs it, removes it; reports a failure. */
static int finish(FILE *f, const char *name, char **said, char *error, size_t n) {
  *said = NULL;
  int status = ferror(f) ? -1 : 0;
  if (fclose(f) != 0 || status != 0) {
    snprintf(error, n, "%s: %s", name, strerror(errno));
    unlink(name);
    return -1;
  }
  status = run(name, said);
  unlink(name);
  if (status == 0) return 0;
  if (status == 127 || status < 0) {
    snprintf(error, n, "gnuplot could not be run; it draws the charts (Debian package gnuplot-nox)");
  } else { /* gnuplot shows the line, a mark under it, and then its complaint */
    char *line = *said, *last = line;
    for (; line && *line; line += strcspn(line, "\n"), line += *line == '\n') {
      if (*line != '\n' && *line != ' ' && *line != '^') last = line;
    }
    snprintf(error, n, "gnuplot: %.*s", last ? (int)strcspn(last, "\n") : 0, last ? last : "");
  }
  free(*said);
  *said = NULL;
  return -1;
}

static int ends_with(const char *text, const char *end) {
  size_t a = strlen(text), b = strlen(end);
  return a > b && strcmp(text + a - b, end) == 0;
}

int plot_file_type_known(const char *path) { return ends_with(path, ".svg") || ends_with(path, ".png"); }

int plot_file(const plot *p, const char *path, char *error, size_t n) {
  char name[64], *said;
  output o;
  if (!plot_file_type_known(path)) return text_fail(error, n, "%s: the name of a chart must end in .svg or .png", path);
  if (output_open(&o, path, error, n) != 0) return -1;
  FILE *f = open_script(name, sizeof name);
  if (!f) {
    text_fail(error, n, "/tmp: %s", strerror(errno));
    output_discard(&o);
    return -1;
  }
  if (ends_with(path, ".svg")) {
    fprintf(f, "set terminal svg size 1000,440 font 'Helvetica,14' background rgb 'white'\n");
  } else {
    fprintf(f, "set terminal pngcairo size 1500,660 fontscale 1.2 linewidth 1.4 background rgb 'white'\n");
  }
  /* gnuplot takes a name that begins with | for a command. */
  const char *to = o.temporary ? o.temporary : path;
  fprintf(f, "set output '%s'.", to[0] == '|' ? "./" : "");
  quoted(f, to);
  fputc('\n', f);
  script(f, p, 0, 0);
  fprintf(f, "unset output\n");
  if (finish(f, name, &said, error, n) != 0) {
    output_discard(&o);
    return -1;
  }
  free(said);
  return output_commit(&o, error, n);
}

int plot_available(void) {
  fflush(NULL);
  return system("command -v gnuplot >/dev/null 2>&1") == 0;
}

int plot_terminal(const plot *p, FILE *to, int columns, int colour, char *error, size_t n) {
  char name[64], *said;
  if (columns < 40) columns = 40;
  if (columns > 160) columns = 160;
  int stacked = columns < 100;
  FILE *f = open_script(name, sizeof name);
  if (!f) {
    snprintf(error, n, "/tmp: %s", strerror(errno));
    return -1;
  }
  fprintf(f, "set terminal dumb size %d,%d %s\n", columns, stacked ? 40 : 22, colour ? "ansi" : "mono");
  script(f, p, 1, stacked);
  if (finish(f, name, &said, error, n)) return -1;
  char *text = said;
  while (*text == '\f' || *text == '\n') text++;
  /* Blanks at the ends of lines serve nobody. */
  for (char *line = text; *line;) {
    size_t length = strcspn(line, "\n"), shown = length;
    while (shown > 0 && line[shown - 1] == ' ') shown--;
    fprintf(to, "%.*s\n", (int)shown, line);
    line += length;
    if (*line) line++;
  }
  free(said);
  return 0;
}

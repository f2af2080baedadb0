/* Charts of measurements, drawn by gnuplot: time and extra memory against the sequence's length, both axes logarithmic. */
#ifndef QKV_CLI_PLOT_H
#define QKV_CLI_PLOT_H

#include <stddef.h>
#include <stdio.h>

/* One line of a chart: `count` points, ascending in x. */
typedef struct plot_series {
  char label[128];
  size_t count;
  const double *x, *seconds, *bytes;
} plot_series;

typedef struct plot {
  const char *title; /* one line; may be "" */
  const char *x_label;
  const plot_series *series;
  size_t count;
} plot;

/* Writes PATH, whose name ends in .svg or .png, under a temporary name first. 0, or -1 with one line in `error`. */
int plot_file(const plot *p, const char *path, char *error, size_t n);
/* 1 if plot_file knows the ending of the name. */
int plot_file_type_known(const char *path);
/* 1 if gnuplot is there. */
int plot_available(void);
/* The same in characters, `columns` wide. */
int plot_terminal(const plot *p, FILE *to, int columns, int colour, char *error, size_t n);

#endif

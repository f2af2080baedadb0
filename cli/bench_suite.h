/* What bench_suite.c and bench_gate.c share. */
#ifndef QKV_CLI_BENCH_SUITE_H
#define QKV_CLI_BENCH_SUITE_H

#include "bench.h"

enum { SUITE_CELLS = 96, SUITE_ROWS = 96, SUITE_GROUPS = 16, SUITE_RUNS = 24 };

/* A cell with its runs. */
typedef struct {
  bench b; /* its data */
  result r;
  prepared t;
  int group, left_out, calls, runs; /* calls: of a run */
  double share[SUITE_RUNS], gflops[SUITE_RUNS], peak[SUITE_RUNS], seconds[SUITE_RUNS]; /* of a call */
  int clean[SUITE_RUNS]; /* the peaks before and after agree with each other and in themselves */
  double peak_low, peak_high, waited;
} series;

enum {
  SHARE,
  POINTS_LESS, /* of the share of `beside` */
  RATE,        /* in % of that of `beside` */
  TIMES,
  MICROSECONDS,
  SPREAD,
  EXTRA, /* time, in % of that of `beside` */
  FASTER /* times the rate of `beside`, whatever the peaks are */
};

/* A row of the table: a value of cell `of`, for some measures with cell `beside`, measured in turn. -1: none. */
typedef struct {
  char name[64], verdict[384];
  int measure, group, of, beside, first, last; /* first to last: of SPREAD */
  int64_t dim;
  double must, goal; /* NAN: none */
  double median, best;
  double alone; /* TIMES: that of multiply-adds */
} row;

typedef struct {
  series cell[SUITE_CELLS];
  row row[SUITE_ROWS];
  int cells, rows, groups, kind, quick;
  int long_group[SUITE_GROUPS]; /* takes seconds a run */
  int64_t seed;
  double begin, stolen; /* when the suite began, and what was stolen until then */
  output json;
} suite;

/* Measures cells in turn, so many rounds, and adds to their runs. */
qkv_status suite_run_cells(suite *s, const int *index, int count, int rounds, char *error, size_t n);
/* Median and best of a row from the runs of its cells. */
void suite_value(const suite *s, row *r);
double suite_best_share(const series *c);
/* By how much the peaks beside the runs of a cell differ, or the shares of the runs, in % of the highest. */
double suite_peak_spread(const series *c);
double suite_share_spread(const series *c);

/* Compares with the results of this CPU in a directory, else with what a row must reach. Measures a row again before it
 * counts. Returns the number of rows that lost too much, or -1 after a message. */
int suite_gate(suite *s, const char *directory);

#endif

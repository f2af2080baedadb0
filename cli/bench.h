/* What the parts of qkv bench share: bench.c has the options and the grid, bench_measure.c runs and checks one cell,
 * bench_report.c prints tables and writes files, bench_suite.c and bench_gate.c are the rows that goals are stated for. */
#ifndef QKV_CLI_BENCH_H
#define QKV_CLI_BENCH_H

#include <stdlib.h>

#include "array.h"
#include "cli.h"
#include "file.h"
#include "machine.h"
#include "mask_text.h"
#include "problem_text.h"

typedef struct {
  int64_t batch, seqlen_q, seqlen_kv, num_heads, num_kv_heads, head_dim, head_dim_v;
  int32_t dtype, algorithm, arithmetic;
  int threads, backward;
  double dropout;
  const char *mask;
  char isa[16]; /* the one that runs */
} cell;

enum { PLANNED, DONE, SKIPPED, WRONG };

typedef struct {
  cell c;
  int outcome;
  char note[320]; /* why it was skipped, or what was wrong */
  double seconds, gflops, peak_gflops;
  int runs;
  size_t extra_bytes;
  int rows_checked; /* of a backward pass keys too */
  double error, bound; /* of the element whose error is the largest part of its bound */
} result;

typedef struct {
  int64_t *value;
  size_t count;
} numbers;

typedef struct {
  char **text;
  size_t count;
} words;

typedef struct {
  int64_t batch, seed, repeat;
  numbers seqlen_q, seqlen_kv, heads, kv_heads, threads;
  words head_dim, dtype, arithmetic, mask, algorithm, isa, direction, dropout;
  const char *json, *plot[8], *input[3], *gate, *only;
  int plots, chart, compare, suite, quick;
} options;

/* The tensors of a cell; those after out for a backward pass only. */
enum { DATA_Q, DATA_K, DATA_V, DATA_OUT, DATA_LSE, DATA_DOUT, DATA_DQ, DATA_DK, DATA_DV, TENSORS };

typedef struct {
  options o;
  array file[3]; /* q, k, v of --input-*; data NULL: random numbers */
  result *r;
  size_t count, room;
  output json;
  /* The tensors of the last cell, kept for the next one of the same shape. */
  cell shape;
  void *memory[TENSORS];
  size_t bytes[TENSORS];
} bench;

static inline const char *algorithm_name(int32_t algorithm) { return algorithm == QKV_STANDARD ? "standard" : "flash"; }
static inline const char *arithmetic_name(int32_t arithmetic) { return arithmetic == QKV_FAST ? "fast" : "canonical"; }
static inline const char *direction_name(int backward) { return backward ? "bwd" : "fwd"; }
/* What a cell runs, in words. */
static inline const char *pass_name(const cell *c) { return c->backward ? "backward" : algorithm_name(c->algorithm); }
static inline const char *dtype_name(int32_t dtype) { return problem_dtype_of(dtype)->name; }
static inline double load_value(int32_t dtype, const void *data, int64_t index) {
  const problem_dtype *d = problem_dtype_of(dtype);
  return d->load((const char *)data + index * (int64_t)d->size);
}

/* realloc that ends the program when there is no memory. */
static inline void *grow(void *memory, size_t bytes) {
  void *more = realloc(memory, bytes ? bytes : 1);
  if (!more) {
    cli_failure("out of memory");
    exit(CLI_FAILURE);
  }
  return more;
}

/* Whether two cells are the same but for what `but` names. */
enum { BUT_ALGORITHM = 1, BUT_SEQLEN = 2 };
int bench_same_cell(const cell *a, const cell *c, int but);

/* The instruction set that a cap (NULL: none) leads to, into c->isa; a note if the cell cannot run as it says. */
void bench_resolve_isa(const char *wanted, cell *c, char *note, size_t n);

/* ---- bench_measure.c --------------------------------------------------------------------------------------------- */

/* Reads the three files of --input-* and gives them four axes. 0 or an exit status. */
int bench_read_inputs(bench *b);
void bench_drop_data(bench *b);
/* Measures one cell: it becomes DONE, SKIPPED or WRONG. Another status than QKV_OK and QKV_CANCELLED is an error that ends
 * the bench; QKV_BAD_MASK is one of the expression. */
qkv_status bench_measure(bench *b, result *r, char *error, size_t n);

/* A cell that is ready to run. */
typedef struct {
  qkv_context context;
  qkv_problem problem;
  qkv_gradients gradients; /* of a backward cell, whose forward pass is done */
  int backward;
  mask_text *mask;
  void *scratch;
  size_t scratch_bytes;
  double flops; /* useful ones of a run */
} prepared;
/* The parts of bench_measure. What bench_prepare made belongs to bench_release, also after an error; the cell is SKIPPED if
 * it does not fit into memory. */
qkv_status bench_prepare(bench *b, result *r, prepared *t, char *error, size_t n);
void bench_release(prepared *t);
/* One run: the forward or the backward pass. */
qkv_status bench_run(const prepared *t);
/* The peak that the cell is compared with, of so many threads. */
machine_rate bench_peak(const cell *c, int threads);
/* Compares rows of the result, and of gradients rows and keys, for so many multiply-adds or at least four. 0: wrong, and
 * r->note says where. */
int bench_check(const prepared *t, int64_t seed, double work, result *r);

/* ---- bench_report.c ---------------------------------------------------------------------------------------------- */

/* What tells cells apart. The column of one that is the same everywhere is left out of the table and named above it. */
enum {
  KEY_N,
  KEY_KV,
  KEY_DIRECTION,
  KEY_BATCH,
  KEY_HEADS,
  KEY_DIM,
  KEY_DTYPE,
  KEY_ARITHMETIC,
  KEY_MASK,
  KEY_DROPOUT,
  KEY_THREADS,
  KEY_ALGORITHM,
  KEY_ISA,
  KEYS
};

typedef struct {
  const char *title;
  int width, varies;
} column;

void bench_size_text(double bytes, char *text, size_t n);
void bench_plan_columns(const bench *b, column k[KEYS]);
/* What all cells have in common, in words. */
void bench_common_text(const bench *b, const column k[KEYS], char *text, size_t n);
void bench_print_titles(const bench *b, const column k[KEYS]);
/* The line or lines that are complete once cell i is. */
void bench_print_complete(const bench *b, const column k[KEYS], size_t i);
/* What was checked, and how near the results came to what they are allowed. */
void bench_print_checks(const bench *b);
/* Which cell is running, where standard error is a terminal; i = b->count: takes that away. */
void bench_progress(const bench *b, size_t i);
/* Opens the file of --json and looks whether charts will be possible. 0 or an exit status. */
int bench_open_files(bench *b);
int bench_write_json(bench *b, char *error, size_t n);
cJSON *bench_machine_json(const bench *b);
cJSON *bench_row_json(const result *r);
/* Prints an object in one line and deletes it. */
void bench_print_item(FILE *f, cJSON *item);
/* Charts into a file, or the terminal if path is NULL. */
int bench_draw(const bench *b, const column k[KEYS], const char *path, char *error, size_t n);

/* ---- bench_suite.c, bench_gate.c --------------------------------------------------------------------------------- */

/* The rows of docs/PERFORMANCE.md; with o->gate compared with the results of this CPU there. An exit status. */
int bench_suite(const options *o);

#endif

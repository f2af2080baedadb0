/* What the parts of qkv run share: run.c has options, input and the forward pass, run_gradients.c the backward pass. */
#ifndef QKV_CLI_RUN_H
#define QKV_CLI_RUN_H

#include "array.h"
#include "cli.h"
#include "file.h"
#include "mask_text.h"
#include "picture.h"

enum { MESSAGE = 6144 };

/* What comes from a file. */
typedef struct source {
  const char *option; /* as in messages */
  const char *tensor; /* its name in a .safetensors file */
  const char *file;
  array data;
} source;

enum { Q, K, V, BIAS, SLOPES, SINKS, KV_LENGTHS, Q_LENGTHS, MASK, DOUT, DLSE, SOURCES };

/* What goes to a .npy file. */
typedef struct target {
  const char *option, *name;
  const char *path; /* NULL: not wanted */
  array data;       /* of weights and the dropout mask only the rows in work */
  output file;
} target;

/* The gradients last, in the order of QKV_D... */
enum { OUT, LSE, WEIGHTS, DROPOUT_MASK, DQ, DK, DV, DBIAS, DSINKS, TARGETS };

typedef struct job {
  source in[SOURCES];
  target to[TARGETS];
  const char *input, *mask_expression, *isa, *picture_path;
  int bshd, json;
  int32_t algorithm, align, position;
  int64_t threads, batch_entry, head, row_begin, row_end;
  const char *dropout_needed; /* by an option that makes no sense without */
  int dropout_given;

  mask_text mask;
  qkv_mask terms[MASK_TEXT_TERMS + 1];
  int64_t term_count;
  int32_t *positions;
  uint16_t *bf16[3]; /* q, k, v for fast arithmetic */
  qkv_problem problem;
  qkv_gradients gradients;
  qkv_context context;
  heat_map map;
  char *facts, *backward_facts;
  double pairs; /* visible ones */
  double seconds, gflops, backward_seconds, backward_gflops, dscale;
} job;

/* ---- run.c ------------------------------------------------------------------------------------------------------- */

/* The message of a file that holds something else than `wanted`. */
int run_wrong_shape(const source *s, const char *wanted);
int run_is_real(const array *a);
/* The axes of q, k, v or what has the same: (batch, heads, rows, columns), and the tensor. */
int run_place(const job *j, const source *s, int64_t extent[4], qkv_tensor *tensor);
/* One value per head, or per entry and head. */
int run_per_head(const job *j, const source *s, qkv_tensor *tensor);
/* What broadcasts to (batch, num_heads, seqlen_q, seqlen_kv). */
int run_broadcast(const job *j, const source *s, const char *what, qkv_tensor *tensor);
int run_allocate(array *a, int32_t dtype, int rank, const int64_t *shape, const char *what);

/* ---- run_gradients.c --------------------------------------------------------------------------------------------- */

int run_wants_gradients(const job *j);
/* What is missing or superfluous: of the options, and once the input is there. */
int run_check_gradient_options(const job *j);
int run_check_gradient_input(const job *j);
/* The tensors of dout, dlse and of the gradients. The problem has out and lse. */
int run_set_gradients(job *j);
/* Runs the backward pass; the forward pass has run. */
int run_backward(job *j);
void run_report_backward(const job *j, cJSON *object); /* object NULL: as lines of text */

#endif

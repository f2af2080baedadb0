/* qkv run: attention on files. */
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"
#include "machine.h"
#include "npy.h"
#include "problem_text.h"
#include "qkv/openmp.h"
#include "safetensors.h"

static void help(void) {
  fputs("Usage: qkv run --q FILE --k FILE --v FILE [OPTION]... --out FILE\n"
        "  or:  qkv run --input FILE.safetensors [OPTION]... --out FILE\n"
        "\n"
        "Compute attention, out = softmax(scale * Q K^T, modified and masked) V, on arrays in files, and\n"
        "the gradients of a loss, if those of out are given.\n"
        "\n"
        "A FILE to read is a .npy file or FILE.safetensors:NAME. Floating-point arrays are f16 (widened\n"
        "to f32), f32 or f64, in .safetensors bf16 too; integers are i32 or i64. Files to write are .npy\n"
        "files, f32, or f64 if the input is; they appear complete or not at all.\n"
        "\n"
        "Input:\n"
        "      --q FILE           queries (batch, num_heads, seqlen_q, head_dim); without the first\n"
        "                         axis, or the first two, they count as 1\n"
        "      --k FILE           keys (batch, num_kv_heads, seqlen_kv, head_dim)\n"
        "      --v FILE           values (batch, num_kv_heads, seqlen_kv, head_dim_v)\n"
        "      --layout LAYOUT    order of the axes of q, k, v and out: bhsd (the default) or bshd\n"
        "      --input FILE       a .safetensors file with tensors q, k, v and, if they are there, bias,\n"
        "                         mask (bool), slopes, sinks, kv_lengths, q_lengths, dout, dlse; an\n"
        "                         option for one of them goes before\n"
        "      --bias FILE        added to the scores: broadcasts to (batch, num_heads, seqlen_q,\n"
        "                         seqlen_kv); -inf hides a key\n"
        "      --alibi FILE       ALiBi slopes: (num_heads,) or (batch, num_heads)\n"
        "      --sinks FILE       one more logit in the denominator: (num_heads,) or (batch, num_heads)\n"
        "      --kv-lengths FILE  number of keys of each batch entry: (batch,)\n"
        "      --q-lengths FILE   number of queries of each batch entry: (batch,)\n"
        "\n"
        "Problem:\n"
        "      --mask EXPR        terms joined by & and | (& binds tighter) and parentheses: none, causal,\n"
        "                         causal_start, window(LEFT,RIGHT), prefix(N), lengths(FILE),\n"
        "                         documents(FILE), dense(FILE), longformer(WINDOW,GLOBALS) and more, see\n"
        "                         qkv mask --help; the default is none\n"
        "      --align ALIGN      where the queries stand: end (the last query at the last key, the\n"
        "                         default), start (query 0 at key 0), or the position of query 0\n"
        "      --scale X          multiplies the scores; the default is 1/sqrt(head_dim)\n"
        "      --softcap X        scores become X * tanh(score / X); the default is 0, off\n"
        "      --algorithm NAME   flash (the default) or standard, the textbook's that holds all scores\n"
        "      --arithmetic NAME  canonical (the default), or fast: by the CPU's bf16 products where it\n"
        "                         has them, if q, k and v are bf16; less accurate\n"
        "      --dropout P        a weight becomes 0 with probability P, the others are divided by 1 - P\n"
        "      --seed S           of dropout; the default is 0\n"
        "      --offset N         of dropout, a counter modulo 2^32; the default is 0\n"
        "\n"
        "Run:\n"
        "      --threads N        the default is the number of processors\n"
        "      --isa NAME         at most this instruction set: avx512, avx2, neon, portable, reference\n"
        "\n"
        "Output:\n"
        "      --out FILE         the result, with the axes of q\n"
        "      --lse FILE         the log-sum-exp of each row: (batch, num_heads, seqlen_q)\n"
        "      --weights FILE     the weights of one head: (rows, seqlen_kv)\n"
        "      --picture FILE     the same as a picture, .png or .svg, on a logarithmic scale\n"
        "      --dropout-mask FILE  bytes (rows, seqlen_kv): 1 where dropout keeps the weight, 0 where it\n"
        "                         drops it, whatever the mask says. Weights are those before dropout\n"
        "      --rows A:B         rows of these; A included, B not; the default is all\n"
        "      --head H           their head; the default is 0\n"
        "      --batch B          their batch entry; the default is 0\n"
        "      --json             print the facts as JSON\n",
        stdout);
  fputs("\n"
        "Gradients, by a backward pass that follows the forward pass:\n"
        "      --dout FILE        to read: the gradient of out, with its axes\n"
        "      --dlse FILE        to read: the gradient of the log-sum-exp; the default is 0\n"
        "      --dq FILE, --dk FILE, --dv FILE\n"
        "                         gradients of q, k and v, with their axes\n"
        "      --dbias FILE       gradient of the bias, summed over the axes that were broadcast: the\n"
        "                         shape is that of --bias\n"
        "      --dsinks FILE      gradient of the sinks, of the shape of --sinks\n",
        stdout);
  cli_print_common_options();
  cli_print_exit_status();
  fputs("  130  interrupted; no file was written\n"
        "\n"
        "Examples:\n"
        "  qkv run --q q.npy --k k.npy --v v.npy --mask causal --out o.npy --lse lse.npy\n"
        "  qkv run --input layer.safetensors --mask '(window(64,64) | prefix(4)) & documents(ids.npy)' --out o.npy\n"
        "  qkv run --q q.npy --k k.npy --v v.npy --mask causal --picture map.png --head 2 --rows 0:512\n"
        "  qkv run --q q.npy --k k.npy --v v.npy --dout do.npy --dq dq.npy --dk dk.npy --dv dv.npy\n",
        stdout);
}

/* ---- Options ----------------------------------------------------------------------------------------------------- */

enum {
  OPT_SOURCE = CLI_OPTION, /* and the following, one per source */
  OPT_TARGET = OPT_SOURCE + SOURCES, /* one per target */
  OPT_INPUT = OPT_TARGET + TARGETS,
  OPT_MASK,
  OPT_ALIGN,
  OPT_SCALE,
  OPT_SOFTCAP,
  OPT_LAYOUT,
  OPT_ALGORITHM,
  OPT_ARITHMETIC,
  OPT_THREADS,
  OPT_ISA,
  OPT_DROPOUT,
  OPT_SEED,
  OPT_OFFSET,
  OPT_PICTURE,
  OPT_ROWS,
  OPT_HEAD,
  OPT_BATCH,
  OPT_JSON
};

static const struct option options[] = {{"q", required_argument, NULL, OPT_SOURCE + Q},
                                        {"k", required_argument, NULL, OPT_SOURCE + K},
                                        {"v", required_argument, NULL, OPT_SOURCE + V},
                                        {"bias", required_argument, NULL, OPT_SOURCE + BIAS},
                                        {"alibi", required_argument, NULL, OPT_SOURCE + SLOPES},
                                        {"sinks", required_argument, NULL, OPT_SOURCE + SINKS},
                                        {"kv-lengths", required_argument, NULL, OPT_SOURCE + KV_LENGTHS},
                                        {"q-lengths", required_argument, NULL, OPT_SOURCE + Q_LENGTHS},
                                        {"dout", required_argument, NULL, OPT_SOURCE + DOUT},
                                        {"dlse", required_argument, NULL, OPT_SOURCE + DLSE},
                                        {"input", required_argument, NULL, OPT_INPUT},
                                        {"mask", required_argument, NULL, OPT_MASK},
                                        {"align", required_argument, NULL, OPT_ALIGN},
                                        {"scale", required_argument, NULL, OPT_SCALE},
                                        {"softcap", required_argument, NULL, OPT_SOFTCAP},
                                        {"layout", required_argument, NULL, OPT_LAYOUT},
                                        {"algorithm", required_argument, NULL, OPT_ALGORITHM},
                                        {"arithmetic", required_argument, NULL, OPT_ARITHMETIC},
                                        {"threads", required_argument, NULL, OPT_THREADS},
                                        {"isa", required_argument, NULL, OPT_ISA},
                                        {"dropout", required_argument, NULL, OPT_DROPOUT},
                                        {"seed", required_argument, NULL, OPT_SEED},
                                        {"offset", required_argument, NULL, OPT_OFFSET},
                                        {"out", required_argument, NULL, OPT_TARGET + OUT},
                                        {"lse", required_argument, NULL, OPT_TARGET + LSE},
                                        {"weights", required_argument, NULL, OPT_TARGET + WEIGHTS},
                                        {"dropout-mask", required_argument, NULL, OPT_TARGET + DROPOUT_MASK},
                                        {"dq", required_argument, NULL, OPT_TARGET + DQ},
                                        {"dk", required_argument, NULL, OPT_TARGET + DK},
                                        {"dv", required_argument, NULL, OPT_TARGET + DV},
                                        {"dbias", required_argument, NULL, OPT_TARGET + DBIAS},
                                        {"dsinks", required_argument, NULL, OPT_TARGET + DSINKS},
                                        {"picture", required_argument, NULL, OPT_PICTURE},
                                        {"rows", required_argument, NULL, OPT_ROWS},
                                        {"head", required_argument, NULL, OPT_HEAD},
                                        {"batch", required_argument, NULL, OPT_BATCH},
                                        {"json", no_argument, NULL, OPT_JSON},
                                        CLI_COMMON_OPTIONS};

static int parse_option(job *j, int option) {
  const char *name = cli_option_name();
  switch (option) {
  case OPT_INPUT: j->input = optarg; return CLI_OK;
  case OPT_MASK: j->mask_expression = optarg; return CLI_OK;
  case OPT_ALIGN: return cli_parse_align(name, optarg, &j->align, &j->position);
  case OPT_SCALE: return cli_parse_real(name, optarg, &j->problem.softmax_scale);
  case OPT_SOFTCAP: return cli_parse_real(name, optarg, &j->problem.softcap);
  case OPT_LAYOUT:
    j->bshd = strcmp(optarg, "bshd") == 0;
    if (j->bshd || strcmp(optarg, "bhsd") == 0) return CLI_OK;
    return cli_usage("%s: '%s' is neither bhsd nor bshd", name, optarg);
  case OPT_ALGORITHM:
    j->algorithm = strcmp(optarg, "standard") == 0 ? QKV_STANDARD : QKV_FLASH;
    if (j->algorithm == QKV_STANDARD || strcmp(optarg, "flash") == 0) return CLI_OK;
    return cli_usage("%s: '%s' is neither flash nor standard", name, optarg);
  case OPT_ARITHMETIC:
    j->problem.arithmetic = strcmp(optarg, "fast") == 0 ? QKV_FAST : QKV_CANONICAL;
    if (j->problem.arithmetic == QKV_FAST || strcmp(optarg, "canonical") == 0) return CLI_OK;
    return cli_usage("%s: '%s' is neither canonical nor fast", name, optarg);
  case OPT_THREADS: return cli_parse_int(name, optarg, 1, 4096, &j->threads);
  case OPT_ISA: j->isa = optarg; return CLI_OK;
  case OPT_DROPOUT:
    j->dropout_given = 1;
    if (cli_parse_real(name, optarg, &j->problem.dropout) != CLI_OK) return CLI_USAGE;
    if (j->problem.dropout >= 0 && j->problem.dropout <= 1) return CLI_OK;
    return cli_usage("%s: %s is no probability: 0 to 1", name, optarg);
  case OPT_SEED: j->dropout_needed = "--seed"; return cli_parse_unsigned(name, optarg, &j->problem.seed);
  case OPT_OFFSET: j->dropout_needed = "--offset"; return cli_parse_unsigned(name, optarg, &j->problem.offset);
  case OPT_PICTURE: j->picture_path = optarg; return CLI_OK;
  case OPT_ROWS: return cli_parse_range(name, optarg, &j->row_begin, &j->row_end);
  case OPT_HEAD: return cli_parse_int(name, optarg, 0, INT64_MAX, &j->head);
  case OPT_BATCH: return cli_parse_int(name, optarg, 0, INT64_MAX, &j->batch_entry);
  case OPT_JSON: j->json = 1; return CLI_OK;
  default: break;
  }
  if (option >= OPT_TARGET) {
    j->to[option - OPT_TARGET].path = optarg;
  } else {
    j->in[option - OPT_SOURCE].file = optarg;
  }
  return CLI_OK;
}

static int check_options(const job *j) {
  if (j->input == NULL) {
    for (int i = Q; i <= V; i++) {
      if (j->in[i].file == NULL) return cli_usage("%s is missing (or --input)", j->in[i].option);
    }
  }
  /* The picture is the last one. */
  const char *paths[TARGETS + 1], *names[TARGETS + 1];
  int given = 0;
  for (int a = 0; a <= TARGETS; a++) {
    paths[a] = a < TARGETS ? j->to[a].path : j->picture_path;
    names[a] = a < TARGETS ? j->to[a].option : "--picture";
    given += paths[a] != NULL;
    for (int b = 0; b < a; b++) {
      if (paths[a] != NULL && paths[b] != NULL && strcmp(paths[a], paths[b]) == 0 && strncmp(paths[a], "/dev/", 5) != 0) {
        return cli_usage("%s and %s name the same file, %s", names[b], names[a], paths[a]);
      }
    }
  }
  int status = run_check_gradient_options(j);
  if (status != CLI_OK) return status;
  if (given == 0) return cli_usage("--out is missing");
  const char *needed = j->to[DROPOUT_MASK].path != NULL ? j->to[DROPOUT_MASK].option : j->dropout_needed;
  if (needed != NULL && !j->dropout_given) return cli_usage("%s goes with --dropout", needed);
  char error[MESSAGE];
  if (j->picture_path != NULL && picture_check_name(j->picture_path, error, sizeof error) != 0) {
    return cli_usage("--picture: %s", error);
  }
  return CLI_OK;
}

/* ---- Input ------------------------------------------------------------------------------------------------------- */

static int load_input(job *j) {
  char error[MESSAGE];
  int status = CLI_OK;
  for (int i = 0; i < SOURCES && status == CLI_OK; i++) {
    source *s = &j->in[i];
    if (s->file != NULL && array_load(s->file, &s->data, error, sizeof error) != 0) {
      status = cli_failure("%s: %s", s->option, error);
    }
  }
  if (status != CLI_OK || j->input == NULL) return status;
  safetensors *file = safetensors_open(j->input, error, sizeof error);
  if (file == NULL) return cli_failure("--input: %s", error);
  for (int i = 0; i < SOURCES && status == CLI_OK; i++) {
    source *s = &j->in[i];
    if (s->file != NULL) continue;
    const safetensors_entry *entry = safetensors_find(file, s->tensor);
    if (entry == NULL && i <= V) status = cli_failure("--input: %s: no tensor '%s'", j->input, s->tensor);
    if (entry == NULL) continue;
    s->file = s->tensor;
    if (safetensors_read(file, entry, &s->data, error, sizeof error) != 0) status = cli_failure("--input: %s", error);
  }
  safetensors_close(file);
  return status;
}

int run_wrong_shape(const source *s, const char *wanted) {
  char shape[128];
  array_shape_text(s->data.rank, s->data.shape, shape, sizeof shape);
  return cli_failure("%s: %s: %s was expected, the file has %s of shape %s", s->option, s->file, wanted,
                     s->data.dtype == QKV_I32  ? "integers"
                     : s->data.dtype == QKV_U8 ? "bytes"
                                               : "floating-point numbers",
                     shape);
}

int run_is_real(const array *a) { return a->dtype == QKV_F32 || a->dtype == QKV_F64; }

/* The axes of q, k or v: (batch, heads, rows, columns), and the tensor. */
int run_place(const job *j, const source *s, int64_t extent[4], qkv_tensor *tensor) {
  const array *a = &s->data;
  if (!run_is_real(a) || a->rank < 2) {
    return run_wrong_shape(s, j->bshd ? "floating-point numbers of shape (batch, rows, heads, columns)"
                                  : "floating-point numbers of shape (batch, heads, rows, columns)");
  }
  int64_t stride[4] = {0, 0, 0, 0};
  for (int axis = 0; axis < 4; axis++) extent[axis] = 1;
  for (int axis = 0; axis < a->rank; axis++) {
    int to = 4 - a->rank + axis;
    /* Two axes are rows and columns in either layout. */
    if (j->bshd && a->rank > 2 && (to == 1 || to == 2)) to = 3 - to;
    extent[to] = a->shape[axis];
    stride[to] = a->stride[axis];
  }
  *tensor = qkv_strided(a->data, a->dtype, stride[0], stride[1], stride[2], stride[3]);
  return CLI_OK;
}

static int same_extent(const char *axis, const source *a, int64_t in_a, const source *b, int64_t in_b) {
  if (in_a == in_b) return CLI_OK;
  return cli_failure("%s: %s: %s %lld does not fit %s: %s, which has %lld", b->option, b->file, axis, (long long)in_b,
                     a->option, a->file, (long long)in_a);
}

static int set_tensors(job *j) {
  qkv_problem *p = &j->problem;
  const source *q = &j->in[Q], *k = &j->in[K], *v = &j->in[V];
  int64_t eq[4], ek[4], ev[4];
  int status = run_place(j, q, eq, &p->q);
  if (status == CLI_OK) status = run_place(j, k, ek, &p->k);
  if (status == CLI_OK) status = run_place(j, v, ev, &p->v);
  if (status == CLI_OK && eq[3] == 0) status = run_wrong_shape(q, "a head_dim of at least 1");
  if (status == CLI_OK && ev[3] == 0) status = run_wrong_shape(v, "a head_dim_v of at least 1");
  if (status == CLI_OK) status = same_extent("batch", q, eq[0], k, ek[0]);
  if (status == CLI_OK) status = same_extent("head_dim", q, eq[3], k, ek[3]);
  if (status == CLI_OK) status = same_extent("batch", k, ek[0], v, ev[0]);
  if (status == CLI_OK) status = same_extent("num_kv_heads", k, ek[1], v, ev[1]);
  if (status == CLI_OK) status = same_extent("seqlen_kv", k, ek[2], v, ev[2]);
  if (status != CLI_OK) return status;
  if (ek[1] == 0 && eq[1] != 0) return run_wrong_shape(k, "at least one head");
  p->batch = eq[0];
  p->num_heads = eq[1];
  p->num_kv_heads = ek[1];
  p->seqlen_q = eq[2];
  p->seqlen_kv = ek[2];
  p->head_dim = eq[3];
  p->head_dim_v = ev[3];
  return CLI_OK;
}

/* One value per head, or per entry and head. */
int run_per_head(const job *j, const source *s, qkv_tensor *tensor) {
  const array *a = &s->data;
  char wanted[128];
  if (a->data == NULL) return CLI_OK;
  int64_t extent[4] = {1, 1, j->problem.batch, j->problem.num_heads};
  qkv_tensor t;
  if (!run_is_real(a) || a->rank < 1 || a->rank > 2 || a->shape[a->rank - 1] != j->problem.num_heads ||
      array_broadcast(a, extent, &t) != 0) {
    snprintf(wanted, sizeof wanted, "floating-point numbers of shape (%lld,) or (%lld, %lld)",
             (long long)j->problem.num_heads, (long long)j->problem.batch, (long long)j->problem.num_heads);
    return run_wrong_shape(s, wanted);
  }
  *tensor = qkv_strided(a->data, a->dtype, t.stride[2], t.stride[3], 0, 0);
  return CLI_OK;
}

static int set_lengths(const job *j, const source *s, const int32_t **lengths) {
  const array *a = &s->data;
  char wanted[96];
  if (a->data == NULL) return CLI_OK;
  if (a->dtype != QKV_I32 || a->rank != 1 || a->shape[0] != j->problem.batch) {
    snprintf(wanted, sizeof wanted, "integers of shape (%lld,), one per batch entry,", (long long)j->problem.batch);
    return run_wrong_shape(s, wanted);
  }
  *lengths = a->data;
  return CLI_OK;
}

int run_broadcast(const job *j, const source *s, const char *what, qkv_tensor *tensor) {
  const qkv_problem *p = &j->problem;
  int64_t extent[4] = {p->batch, p->num_heads, p->seqlen_q, p->seqlen_kv};
  char wanted[192];
  if (array_broadcast(&s->data, extent, tensor) == 0) return CLI_OK;
  snprintf(wanted, sizeof wanted, "%s that broadcast to (%lld, %lld, %lld, %lld)", what, (long long)extent[0],
           (long long)extent[1], (long long)extent[2], (long long)extent[3]);
  return run_wrong_shape(s, wanted);
}

static int set_mask(job *j) {
  qkv_problem *p = &j->problem;
  char error[MESSAGE];
  mask_text_extents extents = {p->batch, p->num_heads, p->seqlen_q, p->seqlen_kv};
  if (j->mask_expression != NULL) {
    int result = mask_text_parse(j->mask_expression, &extents, NULL, &j->mask, error, sizeof error);
    if (result == MASK_TEXT_BAD_FILE) return cli_failure("--mask: %s", error);
    if (result != 0) return cli_usage("--mask: %s", error);
    if (j->mask.lengths.data != NULL) {
      if (p->kv_length != NULL) return cli_usage("--mask: lengths(...) is given, and %s too", j->in[KV_LENGTHS].file);
      p->kv_length = j->mask.lengths.data;
    }
    if (mask_text_complete(&j->mask, &j->context, p, error, sizeof error) != 0) return cli_failure("--mask: %s", error);
    memcpy(j->terms, j->mask.terms, sizeof j->mask.terms);
    j->term_count = j->mask.count;
  }
  if (j->in[MASK].data.data != NULL) {
    qkv_tensor t;
    if (j->in[MASK].data.dtype != QKV_U8) return run_wrong_shape(&j->in[MASK], "bool or u8");
    if (run_broadcast(j, &j->in[MASK], "bool or u8", &t) != CLI_OK) return CLI_FAILURE;
    j->terms[j->term_count++] = qkv_dense(t, 0);
  }
  p->mask = j->terms;
  p->mask_count = j->term_count;
  return CLI_OK;
}

/* The readers widen bf16 to f32; fast arithmetic takes it as it was. */
static int set_bf16(job *j) {
  const problem_dtype *bf16 = problem_dtype_of(QKV_BF16);
  qkv_tensor *tensor[3] = {&j->problem.q, &j->problem.k, &j->problem.v};
  for (int i = Q; i <= V; i++) {
    const source *s = &j->in[i];
    int64_t count = array_count(s->data.rank, s->data.shape, sizeof(float));
    if (s->data.dtype != QKV_F32) return run_wrong_shape(s, "bf16 for --arithmetic fast");
    j->bf16[i] = malloc(((size_t)count + 1) * sizeof *j->bf16[i]);
    if (j->bf16[i] == NULL) return cli_failure("out of memory");
    for (int64_t x = 0; x < count; x++) {
      double value = (double)((const float *)s->data.data)[x];
      bf16->store(&j->bf16[i][x], value);
      if (bf16->load(&j->bf16[i][x]) != value && !isnan(value)) {
        return cli_failure("%s: %s: --arithmetic fast needs bf16, and %.9g is none", s->option, s->file, value);
      }
    }
    tensor[i]->data = j->bf16[i];
    tensor[i]->dtype = QKV_BF16;
  }
  return CLI_OK;
}

static int set_problem(job *j) {
  qkv_problem *p = &j->problem;
  p->algorithm = j->algorithm;
  p->align = j->align;
  int status = set_tensors(j);
  if (status == CLI_OK && j->in[BIAS].data.data != NULL) {
    status = run_is_real(&j->in[BIAS].data) ? run_broadcast(j, &j->in[BIAS], "floating-point numbers", &p->bias)
                                        : run_wrong_shape(&j->in[BIAS], "floating-point numbers");
  }
  if (status == CLI_OK) status = run_per_head(j, &j->in[SLOPES], &p->alibi_slopes);
  if (status == CLI_OK) status = run_per_head(j, &j->in[SINKS], &p->sinks);
  if (status == CLI_OK) status = set_lengths(j, &j->in[KV_LENGTHS], &p->kv_length);
  if (status == CLI_OK) status = set_lengths(j, &j->in[Q_LENGTHS], &p->q_length);
  if (status == CLI_OK && j->align == QKV_ALIGN_EXPLICIT) {
    j->positions = malloc(((size_t)p->batch + 1) * sizeof *j->positions);
    if (j->positions == NULL) return cli_failure("out of memory");
    for (int64_t b = 0; b < p->batch; b++) j->positions[b] = j->position;
    p->q_position = j->positions;
  }
  if (status == CLI_OK) status = set_mask(j);
  if (status == CLI_OK && p->arithmetic == QKV_FAST) status = set_bf16(j);
  return status;
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

int run_allocate(array *a, int32_t dtype, int rank, const int64_t *shape, const char *what) {
  char text[128];
  if (array_alloc(a, dtype, rank, shape) == 0) return CLI_OK;
  array_shape_text(rank, shape, text, sizeof text);
  return cli_failure("no memory for %s of shape %s", what, text);
}

static int set_outputs(job *j) {
  qkv_problem *p = &j->problem;
  const array *q = &j->in[Q].data;
  int64_t shape[4], lse_shape[4] = {p->batch, p->num_heads, p->seqlen_q, 1};
  memcpy(shape, q->shape, sizeof shape);
  shape[q->rank - 1] = p->head_dim_v;
  int32_t dtype = q->dtype;
  int status = run_allocate(&j->to[OUT].data, dtype, q->rank, shape, "out");
  if (status != CLI_OK) return status;
  source out = {"--out", "out", "out", j->to[OUT].data};
  int64_t extent[4];
  run_place(j, &out, extent, &p->out);
  if (j->to[LSE].path == NULL && !run_wants_gradients(j)) return CLI_OK;
  /* Without the batch axis, or batch and head axes, if q has none. */
  int missing = 4 - q->rank;
  status = run_allocate(&j->to[LSE].data, dtype, 3 - missing, lse_shape + missing, "lse");
  if (status == CLI_OK) p->lse = qkv_bhs(j->to[LSE].data.data, dtype, p->num_heads, p->seqlen_q);
  return status;
}

static int check_region(job *j) {
  const qkv_problem *p = &j->problem;
  if (j->to[WEIGHTS].path == NULL && j->to[DROPOUT_MASK].path == NULL && j->picture_path == NULL) return CLI_OK;
  if (j->head >= p->num_heads)
    return cli_failure("--head %lld: there are %lld heads", (long long)j->head, (long long)p->num_heads);
  if (j->batch_entry >= p->batch) {
    return cli_failure("--batch %lld: there are %lld batch entries", (long long)j->batch_entry, (long long)p->batch);
  }
  if (j->row_end == INT64_MAX) j->row_end = p->seqlen_q > j->row_begin ? p->seqlen_q : j->row_begin;
  if (j->row_end > p->seqlen_q) {
    return cli_failure("--rows %lld:%lld: there are %lld rows", (long long)j->row_begin, (long long)j->row_end,
                       (long long)p->seqlen_q);
  }
  if (j->picture_path != NULL && (j->row_begin == j->row_end || p->seqlen_kv == 0)) {
    return cli_failure("--picture: there are no weights to show");
  }
  return CLI_OK;
}

static int open_outputs(job *j) {
  char error[MESSAGE];
  for (int i = 0; i < TARGETS; i++) {
    target *r = &j->to[i];
    if (r->path != NULL && output_open(&r->file, r->path, error, sizeof error) != 0) {
      return cli_failure("%s: %s", r->option, error);
    }
  }
  return CLI_OK;
}

static int open_map(job *j, int64_t rows) {
  int64_t keys = j->problem.seqlen_kv;
  /* An SVG has an element per run of cells. */
  int64_t most = strcmp(j->picture_path + strlen(j->picture_path) - 4, ".svg") == 0 ? 192 : 1024;
  /* Down to a tenth of what each key has if all are equal. */
  double floor = fmin(0.1 / (double)keys, 0.01);
  return heat_map_create(&j->map, rows, keys, most, most, floor) == 0 ? CLI_OK : cli_failure("no memory for the picture");
}

/* Some rows of qkv_scores, from `row` on, to their file, to the picture, or both. */
static void write_rows(job *j, const target *r, int64_t row, int64_t rows, const array *part) {
  int64_t keys = j->problem.seqlen_kv;
  if (r == &j->to[DROPOUT_MASK]) {
    for (int64_t x = 0; x < rows * keys; x++) {
      double kept = part->dtype == QKV_F64 ? ((const double *)part->data)[x] : (double)((const float *)part->data)[x];
      const uint8_t byte = kept != 0;
      npy_write_values(r->file.stream, QKV_U8, &byte, 1);
    }
    return;
  }
  if (r->path != NULL) npy_write_values(r->file.stream, part->dtype, part->data, rows * keys);
  for (int64_t i = 0; i < rows && j->picture_path != NULL; i++) {
    if (part->dtype == QKV_F64) {
      heat_map_add_f64(&j->map, row - j->row_begin + i, (const double *)part->data + i * keys);
    } else {
      heat_map_add_f32(&j->map, row - j->row_begin + i, (const float *)part->data + i * keys);
    }
  }
}

/* The weights or the dropout mask of one head, some rows at a time. */
static int write_scores(job *j, int which) {
  const qkv_problem *p = &j->problem;
  target *r = &j->to[which];
  const int drawn = which == WEIGHTS && j->picture_path != NULL;
  int64_t rows = j->row_end - j->row_begin, keys = p->seqlen_kv, chunk = 256;
  if (r->path == NULL && !drawn) return CLI_OK;
  if (chunk > rows) chunk = rows;
  int64_t shape[2] = {chunk, keys}, whole[2] = {rows, keys};
  array *part = &r->data;
  int status = run_allocate(part, j->to[OUT].data.dtype, 2, shape, r->name);
  if (status != CLI_OK) return status;
  if (r->path != NULL) npy_write_header(r->file.stream, which == DROPOUT_MASK ? QKV_U8 : part->dtype, 2, whole);
  if (drawn) status = open_map(j, rows);
  for (int64_t row = j->row_begin; row < j->row_end && status == CLI_OK; row += chunk) {
    int64_t n = chunk < j->row_end - row ? chunk : j->row_end - row;
    qkv_region region = {j->batch_entry, j->batch_entry + 1, j->head, j->head + 1, row, row + n};
    qkv_tensor to = qkv_strided(part->data, part->dtype, 0, 0, keys, 1);
    const int32_t stage = which == DROPOUT_MASK ? QKV_KEPT : QKV_WEIGHTS;
    qkv_status s = cli_interrupted() ? QKV_CANCELLED : qkv_scores(&j->context, p, stage, &region, &to);
    if (s == QKV_CANCELLED) {
      status = cli_interrupted_failure("no file was written");
    } else if (s != QKV_OK) {
      status = cli_status_failure(s, p);
    } else {
      write_rows(j, r, row, n, part);
    }
  }
  return status;
}

static int write_picture(job *j) {
  char error[MESSAGE], title[256];
  if (j->picture_path == NULL) return CLI_OK;
  heat_map_finish(&j->map);
  snprintf(title, sizeof title, "attention weights, head %lld, rows %lld to %lld", (long long)j->head,
           (long long)j->row_begin, (long long)j->row_end - 1);
  j->map.image.title = title;
  j->map.image.x_label = "key";
  j->map.image.y_label = "query";
  int result = picture_write(&j->map.image, j->picture_path, picture_scale(&j->map.image, 768), error, sizeof error);
  j->map.image.title = NULL;
  return result == 0 ? CLI_OK : cli_failure("--picture: %s", error);
}

/* Everything is complete under temporary names before the first file gets its own. */
static int commit_outputs(job *j) {
  char error[MESSAGE];
  for (int i = 0; i < TARGETS; i++) {
    target *r = &j->to[i];
    if (r->path == NULL) continue;
    if (i != WEIGHTS && i != DROPOUT_MASK) npy_write_array(r->file.stream, &r->data);
    if (output_finish(&r->file, error, sizeof error) != 0) return cli_failure("%s", error);
  }
  if (cli_interrupted()) return cli_interrupted_failure("no file was written");
  int status = write_picture(j);
  for (int i = 0; i < TARGETS && status == CLI_OK; i++) {
    if (output_commit(&j->to[i].file, error, sizeof error) != 0) status = cli_failure("%s", error);
  }
  return status;
}

/* ---- Run --------------------------------------------------------------------------------------------------------- */

static void mask_as_text(const job *j, char *text, size_t bytes) {
  const char *sources[MASK_TEXT_TERMS + 1];
  memcpy(sources, j->mask.sources, sizeof j->mask.sources);
  for (int64_t i = j->mask.count; i < j->term_count; i++) sources[i] = j->in[MASK].file;
  mask_text_print(j->terms, j->term_count, sources, text, bytes);
}

static int compute(job *j) {
  const qkv_problem *p = &j->problem;
  qkv_status s;
  j->facts = cli_describe(&j->context, p, &s);
  if (j->facts == NULL) return cli_status_failure(s, p);
  double begin = cli_seconds();
  s = qkv_forward(&j->context, p, NULL, 0);
  j->seconds = cli_seconds() - begin;
  if (s == QKV_CANCELLED) return cli_interrupted_failure("no file was written");
  if (s != QKV_OK) return cli_status_failure(s, p);
  /* A multiply and an add per feature of the score and of the value, for each visible pair. */
  j->pairs = cli_fact_number(j->facts, "pairs_visible");
  double useful = 2 * (double)(p->head_dim + p->head_dim_v) * j->pairs;
  j->gflops = j->seconds > 0 ? useful / j->seconds * 1e-9 : 0;
  return CLI_OK;
}

static int report(const job *j) {
  char mask[4096], shape[128];
  mask_as_text(j, mask, sizeof mask);
  if (j->json) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "mask", mask);
    cli_facts_to_json(j->facts, object);
    cJSON_AddNumberToObject(object, "seconds", j->seconds);
    cJSON_AddNumberToObject(object, "gflops", j->gflops);
    run_report_backward(j, object);
    for (int i = 0; i < TARGETS; i++) {
      if (j->to[i].path != NULL) cJSON_AddStringToObject(object, j->to[i].name, j->to[i].path);
    }
    if (j->picture_path != NULL) cJSON_AddStringToObject(object, "picture", j->picture_path);
    return cli_print_json(object);
  }
  printf("mask: %s\n", mask);
  fputs(j->facts, stdout);
  if (j->facts[0] != 0 && j->facts[strlen(j->facts) - 1] != '\n') putchar('\n');
  printf("time: %.6f s\n", j->seconds);
  printf("rate: %.2f GFLOP/s of useful operations\n", j->gflops);
  run_report_backward(j, NULL);
  for (int i = 0; i < TARGETS; i++) {
    const target *r = &j->to[i];
    if (r->path == NULL) continue;
    printf("%s: %s", r->name, r->path);
    if (i == OUT || i >= DQ) {
      array_shape_text(r->data.rank, r->data.shape, shape, sizeof shape);
      printf(" %s %s", shape, r->data.dtype == QKV_F64 ? "f64" : "f32");
    }
    putchar('\n');
  }
  if (j->picture_path != NULL) printf("picture: %s\n", j->picture_path);
  return CLI_OK;
}

static int work(job *j) {
  int status = check_options(j);
  if (status == CLI_OK) status = cli_choose_isa(j->isa, &j->context.isa_cap);
  if (status == CLI_OK) status = load_input(j);
  if (status == CLI_OK) status = run_check_gradient_input(j);
  if (status == CLI_OK) status = set_problem(j);
  if (status == CLI_OK) status = check_region(j);
  if (status == CLI_OK) status = set_outputs(j);
  if (status != CLI_OK) return status;
  qkv_status s = qkv_check(&j->problem, NULL, 0);
  if (s != QKV_OK) return cli_status_failure(s, &j->problem);
  status = run_set_gradients(j);
  if (status != CLI_OK) return status;

  qkv_openmp(&j->context, (int)(j->threads > 0 ? j->threads : machine_cpus()));
  j->context.cancel = cli_interrupts();
  status = open_outputs(j);
  if (status == CLI_OK) status = compute(j);
  if (status == CLI_OK) status = run_backward(j);
  if (status == CLI_OK) status = write_scores(j, WEIGHTS);
  if (status == CLI_OK) status = write_scores(j, DROPOUT_MASK);
  if (status == CLI_OK) status = commit_outputs(j);
  if (status == CLI_OK) status = report(j);
  return status;
}

int qkv_cli_run(int argc, char **argv) {
  static const char *const names[SOURCES][2] = {{"--q", "q"},
                                                {"--k", "k"},
                                                {"--v", "v"},
                                                {"--bias", "bias"},
                                                {"--alibi", "slopes"},
                                                {"--sinks", "sinks"},
                                                {"--kv-lengths", "kv_lengths"},
                                                {"--q-lengths", "q_lengths"},
                                                {"--input", "mask"},
                                                {"--dout", "dout"},
                                                {"--dlse", "dlse"}};
  static const char *const target_names[TARGETS][2] = {{"--out", "out"},
                                                       {"--lse", "lse"},
                                                       {"--weights", "weights"},
                                                       {"--dropout-mask", "dropout_mask"},
                                                       {"--dq", "dq"},
                                                       {"--dk", "dk"},
                                                       {"--dv", "dv"},
                                                       {"--dbias", "dbias"},
                                                       {"--dsinks", "dsinks"}};
  static job j; /* several kilobytes of terms */
  memset(&j, 0, sizeof j);
  j.problem = qkv_problem_default();
  j.context = qkv_context_default();
  j.row_end = INT64_MAX;
  for (int i = 0; i < SOURCES; i++) {
    j.in[i].option = names[i][0];
    j.in[i].tensor = names[i][1];
  }
  for (int i = 0; i < TARGETS; i++) {
    j.to[i].option = target_names[i][0];
    j.to[i].name = target_names[i][1];
  }
  int option;
  while ((option = cli_getopt(argc, argv, options, help)) != -1) {
    if (option == CLI_DONE) return CLI_OK;
    if (option == '?' || parse_option(&j, option) != CLI_OK) return CLI_USAGE;
  }
  if (optind < argc) return cli_usage("unexpected argument '%s'", argv[optind]);

  int status = work(&j);
  for (int i = 0; i < TARGETS; i++) output_discard(&j.to[i].file);
  heat_map_free(&j.map);
  free(j.facts);
  free(j.backward_facts);
  free(j.positions);
  for (int i = Q; i <= V; i++) free(j.bf16[i]);
  for (int i = 0; i < TARGETS; i++) array_free(&j.to[i].data);
  mask_text_free(&j.mask);
  for (int i = 0; i < SOURCES; i++) array_free(&j.in[i].data);
  return status;
}

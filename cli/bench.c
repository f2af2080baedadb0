/* qkv bench: a grid of problems, each timed, compared with the peak of this machine measured beside it, and checked. */
#include <string.h>

#include "bench.h"
#include "machine.h"
#include "mask_text.h"
#include "plot.h"

/* ---- Options ----------------------------------------------------------------------------------------------------- */

static void print_help(void) {
  puts("Usage: qkv bench [OPTION]...\n"
       "\n"
       "Time attention for every combination of the lists below. A row of the table has the best\n"
       "time of several runs; useful GFLOP/s, which are 2 (head_dim + head_dim_v) for each pair of\n"
       "a query and a key that it sees, backward 2 (3 head_dim + 2 head_dim_v); their share of the\n"
       "peak of multiply-adds, measured beside the runs; the extra memory of a call; and the error:\n"
       "rows of each result, of gradients rows and keys, are compared with float64 and with the\n"
       "error that rounding may make there. A wrong result gets no numbers.\n"
       "\n"
       "The grid; a LIST is separated by commas:\n"
       "  --seqlen LIST          sequence lengths (default 512,4096)\n"
       "  --seqlen-kv LIST       other numbers of keys; the last query stands at the last key\n"
       "  --batch N              batch entries (default 1)\n"
       "  --heads LIST           query heads (default 2)\n"
       "  --kv-heads LIST        key-value heads, divisors of the query heads (default: as many)\n"
       "  --head-dim LIST        head dims; D/DV gives v a dim of its own (default 64,128)\n"
       "  --dtype LIST           f32, f64, f16, bf16, of q, k, v and out (default f32)\n"
       "  --arithmetic LIST      canonical, fast (default canonical); fast is for bf16\n"
       "  --mask LIST            none, or expressions as of qkv mask (default none,causal)\n"
       "  --threads LIST         threads (default 1)\n"
       "  --algorithm LIST       flash, standard (default flash)\n"
       "  --isa LIST             avx512, avx2, neon, portable, reference, for fast arithmetic amx,\n"
       "                         avx512_bf16 (default: the best)\n"
       "  --direction LIST       fwd, bwd: the forward pass, the backward pass alone, from the out\n"
       "                         and log-sum-exp of one forward pass (default fwd)\n"
       "  --dropout LIST         probabilities that a weight is dropped (default 0)\n"
       "\n"
       "Data and time:\n"
       "  --input-q FILE, --input-k FILE, --input-v FILE\n"
       "                         q, k and v from .npy files (batch, heads, seqlen, dim), repeated\n"
       "                         beyond their length, in place of random numbers; they set\n"
       "                         --heads, --kv-heads and --head-dim\n"
       "  --seed N               seed of the random numbers (default 1)\n"
       "  --repeat N             at least N runs of each (default 3) and at least 0.3 seconds, but\n"
       "                         no further run after 3 seconds\n"
       "\n"
       "The suite, in place of the grid:\n"
       "  --suite                the rows that goals are stated for: value, goal, and whether it\n"
       "                         holds on this processor\n"
       "  --quick                fewer runs, and no length above 16384\n"
       "  --only TEXT            only the rows that have TEXT in their name\n"
       "  --gate DIR             also compare the rows with the results that DIR has of this CPU\n"
       "                         (DIR/*.json, written by --suite --json), or with what they must\n"
       "                         reach; exit status 1 if one lost more than 10 points\n"
       "\n"
       "Output:\n"
       "  --compare              standard and flash side by side, with their ratios\n"
       "  --chart                charts of time and memory in the terminal\n"
       "  --plot FILE            the same by gnuplot; FILE ends in .svg or .png; may be repeated\n"
       "  --json FILE            {\"machine\": {...}, \"rows\": [{...}, ...]}\n"
       "\n"
       "Ctrl-C ends the run; table, files and charts then hold the rows that are complete.\n"
       "\n"
       "Options:");
  cli_print_common_options();
  cli_print_exit_status();
  puts("\nExamples:\n"
       "  qkv bench --seqlen 1024,4096,16384 --heads 8 --head-dim 128 --threads 1,2 --json rows.json\n"
       "  qkv bench --seqlen 512,1024,2048,4096 --mask causal --compare --chart\n"
       "  qkv bench --heads 8 --kv-heads 2 --mask 'none,causal,causal & window(255,0)'\n"
       "  qkv bench --dtype f32,f16,bf16 --arithmetic canonical,fast\n"
       "  qkv bench --direction fwd,bwd --mask causal --threads 1,2\n"
       "  qkv bench --suite --json suite.json");
}

/* Splits at commas outside of parentheses; blanks at both ends of an item go. */
static int parse_words(const char *option, const char *text, words *w) {
  w->count = 0;
  for (const char *p = text;; p++) {
    const char *end = p;
    for (int depth = 0; *end && (*end != ',' || depth > 0); end++) depth += (*end == '(') - (*end == ')');
    const char *first = p, *last = end;
    while (first < last && *first == ' ') first++;
    while (last > first && last[-1] == ' ') last--;
    if (first == last) return cli_usage("%s %s: an item of the list is empty", option, text);
    w->text = grow(w->text, (w->count + 1) * sizeof *w->text);
    w->text[w->count] = grow(NULL, (size_t)(last - first) + 1);
    memcpy(w->text[w->count], first, (size_t)(last - first));
    w->text[w->count++][last - first] = 0;
    p = end;
    if (!*p) return 0;
  }
}

static int parse_numbers(const char *option, const char *text, int64_t low, int64_t high, numbers *n) {
  words w = {NULL, 0};
  int status = parse_words(option, text, &w);
  if (status) return status;
  n->count = 0;
  n->value = grow(n->value, w.count * sizeof *n->value);
  for (size_t i = 0; i < w.count && !status; i++)
    status = cli_parse_int(option, w.text[i], low, high, &n->value[n->count++]);
  for (size_t i = 0; i < w.count; i++) free(w.text[i]);
  free(w.text);
  return status;
}

static int allowed(const char *option, const words *w, const char *const *name) {
  for (size_t i = 0; i < w->count; i++) {
    size_t j = 0;
    char list[160] = "";
    while (name[j] && strcmp(name[j], w->text[i]) != 0) {
      snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", j ? ", " : "", name[j]);
      j++;
    }
    if (!name[j]) return cli_usage("%s: '%s' is none of %s", option, w->text[i], list);
  }
  return 0;
}

static int check_dropout(const options *o) {
  int status = 0;
  for (size_t i = 0; i < o->dropout.count && !status; i++) {
    double p = 0;
    status = cli_parse_real("--dropout", o->dropout.text[i], &p);
    if (!status && !(p >= 0 && p <= 1)) {
      status = cli_usage("--dropout: %s is no probability: 0 to 1", o->dropout.text[i]);
    }
  }
  return status;
}

/* D or D/DV. */
static int parse_dims(const char *option, const char *text, int64_t *d, int64_t *dv) {
  char part[64];
  const char *slash = strchr(text, '/');
  size_t length = slash ? (size_t)(slash - text) : strlen(text);
  snprintf(part, sizeof part, "%.*s", length < sizeof part ? (int)length : (int)sizeof part - 1, text);
  int status = cli_parse_int(option, part, 1, 1 << 20, d);
  *dv = *d;
  if (!status && slash) status = cli_parse_int(option, slash + 1, 1, 1 << 20, dv);
  return status;
}

enum {
  OPT_SEQLEN = CLI_OPTION,
  OPT_SEQLEN_KV,
  OPT_BATCH,
  OPT_HEADS,
  OPT_KV_HEADS,
  OPT_HEAD_DIM,
  OPT_DTYPE,
  OPT_ARITHMETIC,
  OPT_MASK,
  OPT_THREADS,
  OPT_ALGORITHM,
  OPT_ISA,
  OPT_DIRECTION,
  OPT_DROPOUT,
  OPT_REPEAT,
  OPT_SEED,
  OPT_INPUT_Q,
  OPT_INPUT_K,
  OPT_INPUT_V,
  OPT_COMPARE,
  OPT_CHART,
  OPT_JSON,
  OPT_PLOT,
  OPT_SUITE,
  OPT_QUICK,
  OPT_ONLY,
  OPT_GATE
};

/* 0, -1 when the program has nothing more to do, or an exit status. */
static int parse_options(int argc, char **argv, options *o) {
  static const struct option option[] = {{"seqlen", required_argument, NULL, OPT_SEQLEN},
                                         {"seqlen-kv", required_argument, NULL, OPT_SEQLEN_KV},
                                         {"batch", required_argument, NULL, OPT_BATCH},
                                         {"heads", required_argument, NULL, OPT_HEADS},
                                         {"kv-heads", required_argument, NULL, OPT_KV_HEADS},
                                         {"head-dim", required_argument, NULL, OPT_HEAD_DIM},
                                         {"dtype", required_argument, NULL, OPT_DTYPE},
                                         {"arithmetic", required_argument, NULL, OPT_ARITHMETIC},
                                         {"mask", required_argument, NULL, OPT_MASK},
                                         {"threads", required_argument, NULL, OPT_THREADS},
                                         {"algorithm", required_argument, NULL, OPT_ALGORITHM},
                                         {"isa", required_argument, NULL, OPT_ISA},
                                         {"direction", required_argument, NULL, OPT_DIRECTION},
                                         {"dropout", required_argument, NULL, OPT_DROPOUT},
                                         {"repeat", required_argument, NULL, OPT_REPEAT},
                                         {"seed", required_argument, NULL, OPT_SEED},
                                         {"input-q", required_argument, NULL, OPT_INPUT_Q},
                                         {"input-k", required_argument, NULL, OPT_INPUT_K},
                                         {"input-v", required_argument, NULL, OPT_INPUT_V},
                                         {"compare", no_argument, NULL, OPT_COMPARE},
                                         {"chart", no_argument, NULL, OPT_CHART},
                                         {"json", required_argument, NULL, OPT_JSON},
                                         {"plot", required_argument, NULL, OPT_PLOT},
                                         {"suite", no_argument, NULL, OPT_SUITE},
                                         {"quick", no_argument, NULL, OPT_QUICK},
                                         {"only", required_argument, NULL, OPT_ONLY},
                                         {"gate", required_argument, NULL, OPT_GATE},
                                         CLI_COMMON_OPTIONS};
  static const char *const dtypes[] = {"f32", "f64", "f16", "bf16", NULL};
  static const char *const arithmetics[] = {"canonical", "fast", NULL};
  static const char *const algorithms[] = {"flash", "standard", NULL};
  static const char *const directions[] = {"fwd", "bwd", NULL};
  static const char *const isas[] = {"avx512",    "avx2", "neon",        "portable",
                                     "reference", "amx",  "avx512_bf16", NULL};
  const int64_t most = INT32_MAX;
  o->batch = o->seed = 1;
  o->repeat = 3;
  int letter, status = 0;
  while (!status && (letter = cli_getopt(argc, argv, option, print_help)) != -1) {
    const char *name = cli_option_name();
    switch (letter) {
    case OPT_SEQLEN: status = parse_numbers(name, optarg, 1, most, &o->seqlen_q); break;
    case OPT_SEQLEN_KV: status = parse_numbers(name, optarg, 1, most, &o->seqlen_kv); break;
    case OPT_BATCH: status = cli_parse_int(name, optarg, 1, most, &o->batch); break;
    case OPT_HEADS: status = parse_numbers(name, optarg, 1, most, &o->heads); break;
    case OPT_KV_HEADS: status = parse_numbers(name, optarg, 1, most, &o->kv_heads); break;
    case OPT_HEAD_DIM: status = parse_words(name, optarg, &o->head_dim); break;
    case OPT_DTYPE: status = parse_words(name, optarg, &o->dtype); break;
    case OPT_ARITHMETIC: status = parse_words(name, optarg, &o->arithmetic); break;
    case OPT_MASK: status = parse_words(name, optarg, &o->mask); break;
    case OPT_THREADS: status = parse_numbers(name, optarg, 1, 4096, &o->threads); break;
    case OPT_ALGORITHM: status = parse_words(name, optarg, &o->algorithm); break;
    case OPT_ISA: status = parse_words(name, optarg, &o->isa); break;
    case OPT_REPEAT: status = cli_parse_int(name, optarg, 1, 1000000, &o->repeat); break;
    case OPT_SEED: status = cli_parse_int(name, optarg, 0, INT64_MAX, &o->seed); break;
    case OPT_INPUT_Q:
    case OPT_INPUT_K:
    case OPT_INPUT_V: o->input[letter - OPT_INPUT_Q] = optarg; break;
    case OPT_COMPARE: o->compare = 1; break;
    case OPT_CHART: o->chart = 1; break;
    case OPT_SUITE: o->suite = 1; break;
    case OPT_QUICK: o->quick = 1; break;
    case OPT_ONLY: o->only = optarg; break;
    case OPT_GATE: o->gate = optarg; break;
    case OPT_JSON: o->json = optarg; break;
    case OPT_PLOT:
      if (o->plots == sizeof o->plot / sizeof *o->plot) {
        status = cli_usage("%s %s: too many of them", name, optarg);
        break;
      }
      o->plot[o->plots++] = optarg;
      if (!plot_file_type_known(optarg)) status = cli_usage("%s %s: the name must end in .svg or .png", name, optarg);
      break;
    case OPT_DIRECTION: status = parse_words(name, optarg, &o->direction); break;
    case OPT_DROPOUT: status = parse_words(name, optarg, &o->dropout); break;
    case CLI_DONE: return -1;
    default: status = CLI_USAGE;
    }
  }
  if (status) return status;
  if (optind < argc) return cli_usage("unexpected argument '%s'", argv[optind]);
  int files = !!o->input[0] + !!o->input[1] + !!o->input[2];
  if (files != 0 && files != 3) return cli_usage("--input-q, --input-k and --input-v must be given together");
  if (files && (o->heads.count || o->kv_heads.count || o->head_dim.count)) {
    return cli_usage("the files of --input-q, -k and -v set --heads, --kv-heads and --head-dim: leave those out");
  }
  if (o->suite) {
    if (files || o->seqlen_q.count || o->seqlen_kv.count || o->heads.count || o->kv_heads.count || o->head_dim.count ||
        o->dtype.count || o->arithmetic.count || o->mask.count || o->threads.count || o->algorithm.count || o->isa.count ||
        o->direction.count || o->dropout.count || o->compare || o->chart || o->plots) {
      return cli_usage("--suite has a grid of its own: only --quick, --only, --gate, --json and --seed go with it");
    }
    return 0;
  }
  if (o->quick || o->only || o->gate) {
    return cli_usage("%s goes with --suite", o->quick ? "--quick" : o->only ? "--only" : "--gate");
  }
  if (!o->seqlen_q.count) status = parse_numbers("--seqlen", "512,4096", 1, most, &o->seqlen_q);
  if (!status && !o->heads.count) status = parse_numbers("--heads", "2", 1, most, &o->heads);
  if (!status && !o->threads.count) status = parse_numbers("--threads", "1", 1, 4096, &o->threads);
  if (!status && !o->head_dim.count && !files) status = parse_words("--head-dim", "64,128", &o->head_dim);
  if (!status && !o->arithmetic.count) status = parse_words("--arithmetic", "canonical", &o->arithmetic);
  if (!status && !o->dtype.count) {
    int fast = o->arithmetic.count == 1 && strcmp(o->arithmetic.text[0], "fast") == 0;
    status = parse_words("--dtype", fast ? "bf16" : "f32", &o->dtype);
  }
  if (!status && !o->mask.count) status = parse_words("--mask", "none,causal", &o->mask);
  if (!status && !o->algorithm.count) {
    status = parse_words("--algorithm", o->compare ? "standard,flash" : "flash", &o->algorithm);
  }
  if (!status) status = allowed("--dtype", &o->dtype, dtypes);
  if (!status) status = allowed("--arithmetic", &o->arithmetic, arithmetics);
  if (!status) status = allowed("--algorithm", &o->algorithm, algorithms);
  if (!status) status = allowed("--isa", &o->isa, isas);
  if (!status && !o->direction.count) status = parse_words("--direction", "fwd", &o->direction);
  if (!status) status = allowed("--direction", &o->direction, directions);
  for (size_t i = 0; i < o->direction.count && !status; i++) {
    if (o->compare && strcmp(o->direction.text[i], "bwd") == 0) {
      status = cli_usage("--compare: standard and flash have the same backward pass: leave --direction bwd out");
    }
  }
  if (!status && !o->dropout.count) status = parse_words("--dropout", "0", &o->dropout);
  if (!status) status = check_dropout(o);
  return status;
}

/* ---- The grid ---------------------------------------------------------------------------------------------------- */

static result *add(bench *b, const cell *c) {
  if (b->count == b->room) b->r = grow(b->r, (b->room = b->room * 2 + 16) * sizeof *b->r);
  result *r = &b->r[b->count++];
  memset(r, 0, sizeof *r);
  r->c = *c;
  return r;
}

void bench_resolve_isa(const char *wanted, cell *c, char *note, size_t n) {
  static const double zero[64];
  double out[64];
  char arithmetic[32] = "";
  qkv_context context = qkv_context_default();
  context.isa_cap = cli_isa_cap(wanted);
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = p.seqlen_q = p.seqlen_kv = 1;
  p.head_dim = 64;
  p.algorithm = c->algorithm;
  p.arithmetic = c->arithmetic;
  p.q = p.k = p.v = qkv_bhsd(zero, c->dtype, 1, 1, 64);
  p.out = qkv_bhsd(out, c->dtype, 1, 1, 64);
  qkv_status status;
  char *text = c->backward ? cli_backward_describe(&context, &p, NULL, &status) : cli_describe(&context, &p, &status);
  if (!text && status == QKV_BAD_CONTEXT && !wanted) {
    snprintf(note, n, "QKV_ISA=%s is no instruction set of this build", context.isa_cap ? context.isa_cap : "");
  } else if (!text && status != QKV_BAD_CONTEXT) {
    snprintf(note, n, "%s", qkv_status_text(status));
  } else if (text && !cli_fact(text, "isa", c->isa, sizeof c->isa)) {
    snprintf(c->isa, sizeof c->isa, "%s", wanted ? wanted : machine_best_isa());
  }
  if (text) cli_fact(text, "arithmetic", arithmetic, sizeof arithmetic);
  free(text);
  if (!note[0] && c->arithmetic == QKV_FAST && strncmp(arithmetic, "fast", 4) != 0) {
    if (c->dtype != QKV_BF16 || c->algorithm == QKV_STANDARD) {
      snprintf(note, n, "fast arithmetic is for bf16 and flash");
    } else {
      snprintf(note, n, "this processor or build has no %s for fast arithmetic", wanted ? wanted : "bf16 products");
    }
  }
  if (wanted && strcmp(wanted, c->isa) != 0) {
    int fast_only = strcmp(wanted, "amx") == 0 || strcmp(wanted, "avx512_bf16") == 0;
    if (!note[0] && fast_only && c->arithmetic != QKV_FAST) {
      snprintf(note, n, "%s is for fast arithmetic", wanted);
    } else if (!note[0]) {
      snprintf(note, n, "this processor or build has no %s", wanted);
    }
    snprintf(c->isa, sizeof c->isa, "%s", wanted);
  }
}

/* Every combination, the last list of this order fastest, so that rows to compare are neighbours. */
enum {
  BY_DIRECTION,
  BY_DTYPE,
  BY_ARITHMETIC,
  BY_ISA,
  BY_HEADS,
  BY_KV_HEADS,
  BY_DIM,
  BY_MASK,
  BY_DROPOUT,
  BY_THREADS,
  BY_SEQLEN,
  BY_SEQLEN_KV,
  BY_ALGORITHM,
  LISTS
};

/* Errors of an expression show before anything is measured; those of a file's shape can depend on the lengths. */
static int check_masks(const options *o) {
  char error[512];
  int status = 0;
  mask_text *mask = grow(NULL, sizeof *mask);
  for (size_t i = 0; i < o->mask.count && !status; i++) {
    const mask_text_extents any = {-1, -1, -1, -1};
    if (mask_text_parse(o->mask.text[i], &any, NULL, mask, error, sizeof error) != 0)
      status = cli_usage("--mask: %s", error);
    mask_text_free(mask);
  }
  free(mask);
  return status;
}

static int plan(bench *b) {
  const options *o = &b->o;
  const size_t length[LISTS] = {o->direction.count, o->dtype.count,    o->arithmetic.count, o->isa.count, o->heads.count,
                                o->kv_heads.count,  o->head_dim.count, o->mask.count,       o->dropout.count,
                                o->threads.count,   o->seqlen_q.count, o->seqlen_kv.count,  o->algorithm.count};
  size_t at[LISTS] = {0};
  for (int list = 0; list >= 0;) {
    cell c;
    char note[160] = "";
    memset(&c, 0, sizeof c);
    c.batch = o->batch;
    c.dtype = problem_dtype_named(o->dtype.text[at[BY_DTYPE]])->code;
    c.arithmetic = strcmp(o->arithmetic.text[at[BY_ARITHMETIC]], "fast") == 0 ? QKV_FAST : QKV_CANONICAL;
    c.algorithm = strcmp(o->algorithm.text[at[BY_ALGORITHM]], "standard") == 0 ? QKV_STANDARD : QKV_FLASH;
    c.backward = strcmp(o->direction.text[at[BY_DIRECTION]], "bwd") == 0;
    c.mask = o->mask.text[at[BY_MASK]];
    c.dropout = strtod(o->dropout.text[at[BY_DROPOUT]], NULL);
    c.threads = (int)o->threads.value[at[BY_THREADS]];
    c.seqlen_q = o->seqlen_q.value[at[BY_SEQLEN]];
    c.seqlen_kv = o->seqlen_kv.count ? o->seqlen_kv.value[at[BY_SEQLEN_KV]] : c.seqlen_q;
    if (b->file[0].data) {
      c.num_heads = b->file[0].shape[1];
      c.num_kv_heads = b->file[1].shape[1];
      c.head_dim = b->file[0].shape[3];
      c.head_dim_v = b->file[2].shape[3];
    } else {
      c.num_heads = o->heads.value[at[BY_HEADS]];
      c.num_kv_heads = o->kv_heads.count ? o->kv_heads.value[at[BY_KV_HEADS]] : c.num_heads;
      int status = parse_dims("--head-dim", o->head_dim.text[at[BY_DIM]], &c.head_dim, &c.head_dim_v);
      if (status) return status;
    }
    bench_resolve_isa(o->isa.count ? o->isa.text[at[BY_ISA]] : NULL, &c, note, sizeof note);
    if (c.num_heads % c.num_kv_heads != 0) {
      snprintf(note, sizeof note, "%lld query heads are no multiple of %lld key-value heads", (long long)c.num_heads,
               (long long)c.num_kv_heads);
    }
    if (!note[0] && c.backward && c.algorithm == QKV_STANDARD) {
      snprintf(note, sizeof note, "the backward pass is the same for standard and flash");
    }
    result *r = add(b, &c);
    if (note[0]) {
      r->outcome = SKIPPED;
      snprintf(r->note, sizeof r->note, "%s", note);
    }
    for (list = LISTS - 1; list >= 0 && ++at[list] >= length[list]; list--) at[list] = 0;
  }
  return 0;
}

int bench_same_cell(const cell *a, const cell *c, int but) {
  return a->batch == c->batch && a->num_heads == c->num_heads && a->num_kv_heads == c->num_kv_heads &&
         a->head_dim == c->head_dim && a->head_dim_v == c->head_dim_v && a->dtype == c->dtype &&
         a->arithmetic == c->arithmetic && a->threads == c->threads && strcmp(a->mask, c->mask) == 0 &&
         strcmp(a->isa, c->isa) == 0 && a->backward == c->backward && a->dropout == c->dropout &&
         ((but & BUT_ALGORITHM) || a->algorithm == c->algorithm) &&
         ((but & BUT_SEQLEN) || (a->seqlen_q == c->seqlen_q && a->seqlen_kv == c->seqlen_kv));
}

/* ---- The verb ---------------------------------------------------------------------------------------------------- */

static void free_words(words *w) {
  for (size_t i = 0; i < w->count; i++) free(w->text[i]);
  free(w->text);
}

static void free_bench(bench *b) {
  options *o = &b->o;
  numbers *n[] = {&o->seqlen_q, &o->seqlen_kv, &o->heads, &o->kv_heads, &o->threads};
  words *w[] = {&o->head_dim, &o->dtype, &o->arithmetic, &o->mask, &o->algorithm, &o->isa, &o->direction, &o->dropout};
  for (size_t i = 0; i < sizeof n / sizeof *n; i++) free(n[i]->value);
  for (size_t i = 0; i < sizeof w / sizeof *w; i++) free_words(w[i]);
  for (int t = 0; t < 3; t++) {
    if (b->file[t].data) array_free(&b->file[t]);
  }
  bench_drop_data(b);
  output_discard(&b->json);
  free(b->r);
}

int qkv_cli_bench(int argc, char **argv) {
  bench b;
  char error[512];
  memset(&b, 0, sizeof b);
  cli_set_verb("bench");
  int status = parse_options(argc, argv, &b.o);
  if (status == 0 && b.o.suite) return bench_suite(&b.o);
  if (status == 0) status = check_masks(&b.o);
  if (status == 0) status = bench_read_inputs(&b);
  if (status == 0) status = plan(&b);
  if (status == 0) status = bench_open_files(&b);
  if (status != 0) {
    free_bench(&b);
    return status < 0 ? CLI_OK : status;
  }
  column k[KEYS];
  char common[512];
  size_t done = 0, wrong = 0, repeated = 0;
  bench_plan_columns(&b, k);
  bench_common_text(&b, k, common, sizeof common);
  machine_describe(error, sizeof error);
  printf("%s\n", error);
  if (common[0]) printf("%s\n", common);
  for (size_t i = 0; i < b.count; i++) repeated += b.file[0].data && b.r[i].c.seqlen_kv > b.file[1].shape[2];
  if (b.file[0].data) {
    printf("input: %s and its k, v, %lld rows%s\n", b.o.input[0], (long long)b.file[0].shape[2],
           repeated ? "; a longer n continues from their start" : "");
  }
  putchar('\n');
  bench_print_titles(&b, k);
  fflush(stdout);

  cli_interrupts();
  for (size_t i = 0; i < b.count && !cli_interrupted(); i++) {
    result *r = &b.r[i];
    if (r->outcome == PLANNED) {
      bench_progress(&b, i);
      qkv_status code = bench_measure(&b, r, error, sizeof error);
      bench_progress(&b, b.count);
      if (code == QKV_CANCELLED || (code == QKV_OK && r->outcome == PLANNED)) break;
      if (code != QKV_OK) {
        status = code == QKV_BAD_MASK ? cli_usage("--mask: %s", error) : cli_failure("%s", error);
        break;
      }
    }
    done += r->outcome == DONE;
    wrong += r->outcome == WRONG;
    bench_print_complete(&b, k, i);
  }
  if (done) {
    putchar('\n');
    bench_print_checks(&b);
  }
  if (b.o.chart && done) {
    putchar('\n');
    fflush(stdout);
    if (bench_draw(&b, k, NULL, error, sizeof error) != 0) status = cli_failure("--chart: %s", error);
  }
  fflush(stdout);
  if (b.o.json && bench_write_json(&b, error, sizeof error) != 0) status = cli_failure("--json: %s", error);
  for (int i = 0; i < b.o.plots && done; i++) {
    if (bench_draw(&b, k, b.o.plot[i], error, sizeof error) != 0) status = cli_failure("--plot: %s", error);
  }
  if (status == 0 && wrong) status = cli_failure("%zu of %zu results are wrong", wrong, wrong + done);
  if (cli_interrupted()) {
    snprintf(error, sizeof error, "%zu of %zu rows are complete", done, b.count);
    status = cli_interrupted_failure(error);
  } else if (status == 0 && done == 0) {
    status = cli_failure("no row could be measured");
  }
  free_bench(&b);
  return status;
}

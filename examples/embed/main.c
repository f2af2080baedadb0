/* embed: sentence embeddings by all-MiniLM-L6-v2 and its kin, from token ids. */
#include <errno.h>
#include <math.h>
#include <qkv/openmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bert.h"
#include "examples/models/blas.h"
#include "file.h"
#include "npy.h"
#include "text.h"

static const char usage[] =
    "Usage: embed --model FILE --ids FILE [OPTION]...\n"
    "\n"
    "Compute sentence embeddings by a BERT encoder with mean pooling (all-MiniLM-L6-v2), and print for\n"
    "each sentence the one whose embedding is nearest.\n"
    "\n"
    "      --model FILE    the weights, model.safetensors as Hugging Face's transformers writes it\n"
    "      --ids FILE      token ids, a line per sentence, as the model's tokenizer gives them, with\n"
    "                      [CLS] and [SEP]\n"
    "      --text FILE     the sentences, a line each, to be printed\n"
    "      --out FILE.npy  the embeddings: (sentences, d_model) of f32, each of length 1\n"
    "      --check FILE.npy  compare with embeddings of another program: exit status 1 if a component\n"
    "                      differs by more than 1e-5, or another sentence is the nearest\n"
    "      --heads N       of the model, whose weights do not tell; the default is 12\n"
    "      --batch N       sentences at a time, of similar length; the default is 32\n"
    "      --ragged        sentences lie one behind another, without padding\n"
    "      --threads N     the default is 1\n"
    "      --repeat N      compute N times, and print the best time\n"
    "      --help          this text\n"
    "\n"
    "Exit status: 0, or 1 if --check found a difference, or 2 after an error.\n";

static const double LIMIT = 1e-5;

static int fail(const char *format, const char *what) {
  fputs("embed: ", stderr);
  fprintf(stderr, format, what);
  fputc('\n', stderr);
  return 2;
}

typedef struct options {
  const char *model, *ids, *text, *out, *check;
  int64_t heads, batch, threads, repeat;
  int layout;
} options;

/* 0, or the exit status of an error, or -1: the help was printed. */
static int parse(options *o, int argc, char **argv) {
  *o = (options){.heads = 12, .batch = 32, .threads = 1, .repeat = 1};
  const struct {
    const char *name, **text;
    int64_t *number, most;
  } known[] = {{"--model", &o->model, NULL, 0},         {"--ids", &o->ids, NULL, 0},        {"--text", &o->text, NULL, 0},
               {"--out", &o->out, NULL, 0},             {"--check", &o->check, NULL, 0},    {"--heads", NULL, &o->heads, 1024},
               {"--batch", NULL, &o->batch, 4096},      {"--threads", NULL, &o->threads, 1024}, {"--repeat", NULL, &o->repeat, 1000000}};
  for (int i = 1; i < argc; i++) {
    size_t k = 0;
    if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return fputs(usage, stdout), -1;
    if (!strcmp(argv[i], "--ragged")) {
      o->layout = BERT_RAGGED;
      continue;
    }
    while (k < sizeof known / sizeof *known && strcmp(argv[i], known[k].name)) k++;
    if (k == sizeof known / sizeof *known) return fail("there is no option '%s'; see embed --help", argv[i]);
    if (i + 1 == argc) return fail("%s needs a value", argv[i]);
    const char *value = argv[++i];
    if (known[k].text) {
      *known[k].text = value;
    } else {
      char *end;
      errno = 0;
      *known[k].number = strtoll(value, &end, 10);
      if (errno || end == value || *end || *known[k].number < 1 || *known[k].number > known[k].most) {
        fprintf(stderr, "embed: %s %s: wanted is a number from 1 to %lld\n", known[k].name, value, (long long)known[k].most);
        return 2;
      }
    }
  }
  if (!o->model) return fail("%s is needed; see embed --help", "--model");
  if (!o->ids) return fail("%s is needed; see embed --help", "--ids");
  return 0;
}

/* ---- Sentences ---- */

typedef struct sentences {
  int32_t count;
  int32_t *tokens, *length; /* all tokens, one sentence behind another */
  const int32_t **first;
} sentences;

static void sentences_free(sentences *s) {
  free(s->tokens);
  free(s->length);
  free(s->first);
}

static int read_ids(sentences *s, const char *path, const bert *m, char *error, size_t n) {
  file_view view;
  memset(s, 0, sizeof *s);
  if (file_view_open(&view, path, error, n)) return -1;
  size_t lines = 1, used = 0;
  for (size_t i = 0; i < view.size; i++) lines += view.bytes[i] == '\n';
  s->tokens = malloc((view.size + 1) * sizeof *s->tokens); /* a token has a byte at least */
  s->length = malloc(lines * sizeof *s->length);
  s->first = malloc(lines * sizeof *s->first);
  int status = s->tokens && s->length && s->first ? 0 : text_fail(error, n, "%s: no memory for it", path);
  for (size_t at = 0; at < view.size && status == 0; at++) { /* a line */
    const size_t begin = used;
    const int line = (int)s->count + 1;
    while (at < view.size && view.bytes[at] != '\n' && status == 0) {
      int64_t id = 0;
      size_t digits = 0;
      for (; at < view.size && view.bytes[at] >= '0' && view.bytes[at] <= '9'; at++, digits++)
        if (id < m->vocabulary) id = id * 10 + view.bytes[at] - '0';
      if (digits && id >= m->vocabulary)
        status = text_fail(error, n, "%s:%d: a token id of %lld or more, the model has %lld", path, line, (long long)id,
                           (long long)m->vocabulary);
      else if (digits)
        s->tokens[used++] = (int32_t)id;
      else if (view.bytes[at] == ' ' || view.bytes[at] == '\t' || view.bytes[at] == '\r')
        at++;
      else
        status = text_fail(error, n, "%s:%d: a byte that is neither digit nor blank", path, line);
    }
    if (status == 0 && (used == begin || (int64_t)(used - begin) > m->positions))
      status = text_fail(error, n, "%s:%d: %zu tokens; a sentence has 1 to %lld", path, line, used - begin, (long long)m->positions);
    s->first[s->count] = s->tokens + begin;
    s->length[s->count++] = (int32_t)(used - begin);
  }
  file_view_close(&view);
  if (status == 0 && s->count == 0) status = text_fail(error, n, "%s: no sentence", path);
  return status;
}

/* Longest first: sentences of similar length share a batch, and the batch that needs most memory comes first. */
typedef struct place {
  int32_t index, length;
} place;
static int by_length(const void *a, const void *b) {
  const place *x = a, *y = b;
  return x->length != y->length ? (x->length < y->length) - (x->length > y->length) : (x->index > y->index) - (x->index < y->index);
}

static int embed_all(bert *m, const qkv_context *context, const options *o, const sentences *s, float *to, char *error, size_t n) {
  const size_t count = (size_t)s->count;
  place *order = malloc(count * sizeof *order);
  const int32_t **tokens = malloc(count * sizeof *tokens);
  int32_t *length = malloc(count * sizeof *length);
  float **out = malloc(count * sizeof *out);
  int status = order && tokens && length && out ? 0 : text_fail(error, n, "no memory for %d sentences", (int)s->count);
  if (status == 0) {
    for (int32_t i = 0; i < s->count; i++) order[i] = (place){i, s->length[i]};
    qsort(order, count, sizeof *order, by_length);
    for (int32_t i = 0; i < s->count; i++) {
      tokens[i] = s->first[order[i].index];
      length[i] = order[i].length;
      out[i] = to + order[i].index * m->d_model;
    }
  }
  for (int32_t from = 0; from < s->count && status == 0; from += (int32_t)o->batch) {
    const int32_t batch = s->count - from < o->batch ? s->count - from : (int32_t)o->batch;
    status = bert_embed(m, context, o->layout, batch, tokens + from, length + from, out + from, error, n);
  }
  free(order);
  free(tokens);
  free(length);
  free(out);
  return status;
}

/* ---- Results ---- */

/* The other sentence with the largest cosine; embeddings have length 1. -1 if there is none. */
static int32_t nearest(const float *e, int32_t count, int64_t d, int32_t of, double *cosine) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; i++) {
    double dot = 0;
    for (int64_t c = 0; c < d; c++) dot += (double)e[i * d + c] * e[of * d + c];
    if (i != of && (best < 0 || dot > *cosine)) {
      best = i;
      *cosine = dot;
    }
  }
  return best;
}

static int print_nearest(const char *path, const float *e, int32_t count, int64_t d, char *error, size_t n) {
  file_view view = {NULL, 0, 0};
  const char **line = NULL;
  int *length = NULL, status = 0;
  if (path) {
    int32_t lines = 0;
    if (file_view_open(&view, path, error, n)) return -1;
    line = malloc((size_t)count * sizeof *line);
    length = malloc((size_t)count * sizeof *length);
    for (size_t at = 0; line && length && at < view.size; at++) {
      const size_t begin = at;
      while (at < view.size && view.bytes[at] != '\n') at++;
      if (lines < count) {
        line[lines] = (const char *)view.bytes + begin;
        length[lines] = (int)(at - begin);
      }
      lines++;
    }
    if (!line || !length || lines != count)
      status = text_fail(error, n, "%s: %d lines for %d sentences", path, (int)lines, (int)count);
  }
  for (int32_t i = 0; i < count && status == 0; i++) {
    double cosine = 0;
    const int32_t other = nearest(e, count, d, i, &cosine);
    if (other < 0) continue;
    if (line)
      printf("%.3f  %.*s\n       %.*s\n", cosine, length[i], line[i], length[other], line[other]);
    else
      printf("%.3f  sentence %d, nearest %d\n", cosine, (int)i + 1, (int)other + 1);
  }
  free(line);
  free(length);
  if (path) file_view_close(&view);
  return status;
}

/* 0: equal within the limit; 1: not; -1: an error. */
static int check(const char *path, const float *e, int32_t count, int64_t d, char *error, size_t n) {
  array a;
  double worst = 0;
  int32_t others = 0;
  if (npy_read(path, &a, error, n)) return -1;
  if (a.dtype != QKV_F32 || a.rank != 2 || a.shape[0] != count || a.shape[1] != d || a.stride[1] != 1 || a.stride[0] != d) {
    char shape[128];
    array_shape_text(a.rank, a.shape, shape, sizeof shape);
    array_free(&a);
    return text_fail(error, n, "%s: %s, wanted is f32 of (%d, %lld)", path, shape, (int)count, (long long)d);
  }
  const float *expected = a.data;
  for (int64_t i = 0; i < count * d; i++) {
    const double difference = fabs((double)e[i] - (double)expected[i]);
    if (!(difference <= worst)) worst = difference; /* a NaN stays */
    if (isnan(worst)) break;
  }
  for (int32_t i = 0; i < count; i++) {
    double cosine;
    others += nearest(e, count, d, i, &cosine) != nearest(expected, count, d, i, &cosine);
  }
  array_free(&a);
  const int equal = worst <= LIMIT && others == 0;
  printf("%s: largest difference of a component %.1e (limit %.0e), another nearest sentence for %d of %d: %s\n", path, worst, LIMIT,
         (int)others, (int)count, equal ? "equal" : "NOT EQUAL");
  return !equal;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  char error[512];
  options o;
  bert m;
  sentences s;
  int status = parse(&o, argc, argv);
  if (status) return status < 0 ? 0 : status;
  if (bert_load(&m, o.model, o.heads, error, sizeof error)) return fail("%s", error);
  if (read_ids(&s, o.ids, &m, error, sizeof error)) {
    sentences_free(&s);
    bert_free(&m);
    return fail("%s", error);
  }
  qkv_context context = qkv_context_default();
  qkv_openmp(&context, (int)o.threads);
  /* The products are divided among the threads of the executor, so the BLAS needs none of its own. */
  if (blas_threads(1)) fputs("embed: this BLAS has no known function for its number of threads\n", stderr);

  int64_t tokens = 0;
  for (int32_t i = 0; i < s.count; i++) tokens += s.length[i];
  float *e = malloc((size_t)(s.count * m.d_model) * sizeof *e);
  double best = 0;
  status = e ? 0 : text_fail(error, sizeof error, "no memory for %d embeddings", (int)s.count);
  for (int64_t i = 0; i < o.repeat && status == 0; i++) {
    const double begin = now();
    status = embed_all(&m, &context, &o, &s, e, error, sizeof error);
    const double seconds = now() - begin;
    if (i == 0 || seconds < best) best = seconds;
  }
  if (status == 0 && (o.text || !o.check)) status = print_nearest(o.text, e, s.count, m.d_model, error, sizeof error);
  if (status == 0 && o.out) {
    const array a = {QKV_F32, 2, {s.count, m.d_model}, {m.d_model, 1}, e};
    status = npy_write(o.out, &a, error, sizeof error);
  }
  if (status == 0) {
    printf("%d sentences, %lld tokens, %d thread(s), %s: %.1f ms, %.0f sentences/s\n", (int)s.count, (long long)tokens, (int)o.threads,
           o.layout == BERT_RAGGED ? "ragged" : "padded", 1e3 * best, s.count / best);
    if (o.check) status = check(o.check, e, s.count, m.d_model, error, sizeof error);
  }
  free(e);
  sentences_free(&s);
  bert_free(&m);
  if (status == 0 && fflush(stdout)) return fail("standard output: %s", strerror(errno));
  return status < 0 ? fail("%s", error) : status;
}

/* charlm: trains a small decoder-only Transformer on a text, and writes in its manner. */
#include <errno.h>
#include <math.h>
#include <qkv/openmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "examples/models/blas.h"
#include "rng.h"
#include "text.h"
#include "training.h"

static const char usage[] =
    "Usage: charlm [OPTION]...\n"
    "\n"
    "Train a small decoder-only Transformer to predict the next character of a text, whose last tenth is\n"
    "kept for validation. With --generate, write in the manner of the text.\n"
    "\n"
    "Text and training:\n"
    "      --text FILE        the text; may be given several times. The default are the licences in\n"
    "                         /usr/share/common-licenses\n"
    "      --steps N          the default is 1500\n"
    "      --batch N          pieces of text in a step; the default is 16\n"
    "      --context N        characters of a piece, which a prediction sees at most; the default is 128\n"
    "      --layers N         the default is 4\n"
    "      --d-model N        a multiple of 32, the size of a head; every two heads share their keys and\n"
    "                         values if their number is even; the default is 128\n"
    "      --rate X           the learning rate at its largest; the default is 0.003\n"
    "      --dropout X        of attention's weights and of the embedding; the default is 0.1\n"
    "      --seed N           of the initial parameters, the pieces of text, dropout and what is\n"
    "                         generated; the default is 1\n"
    "      --threads N        the default is the number of processors; the losses do not depend on it\n"
    "\n"
    "Files:\n"
    "      --checkpoint FILE  written at each validation, at the end, and after Ctrl-C (.safetensors)\n"
    "      --resume FILE      go on from a checkpoint, bit for bit as if it had not been interrupted; of\n"
    "                         the options above it takes --text, --steps and --threads\n"
    "      --curve FILE       the losses, a line per step\n"
    "      --plot FILE        the losses as a chart, .svg or .png, by gnuplot; - for the terminal\n"
    "\n"
    "Text to write:\n"
    "      --generate N       characters; with --resume and without --text nothing is trained\n"
    "      --prompt TEXT      what they follow; the default is \"The \"\n"
    "      --temperature X    0: always the most likely character; the default is 0.7\n"
    "\n"
    "      --help             this text\n"
    "\n"
    "Ctrl-C ends the training after the present step, with checkpoint, curve and chart; a second one at\n"
    "once. Exit status: 0, 2 after an error, 130 after Ctrl-C.\n";

static const char *const licences[] = {"Apache-2.0", "Artistic", "BSD",      "CC0-1.0", "GFDL-1.2", "GFDL-1.3", "GPL-1",
                                       "GPL-2",      "GPL-3",    "LGPL-2",   "LGPL-2.1", "LGPL-3",   "MPL-1.1",  "MPL-2.0"};
enum { LICENCES = sizeof licences / sizeof *licences, TEXTS = 256, HEAD_DIM = 32, EVERY = 100, WARM_UP = 50 };

typedef struct options {
  const char *text[TEXTS];
  int texts;
  int64_t steps, batch, context, layers, d_model, seed, threads, generate;
  double rate, dropout, temperature;
  const char *checkpoint, *resume, *curve, *plot, *prompt;
  int steps_given;
  const char *fixed; /* an option that --resume does not take */
} options;

static int fail(const char *text) {
  fprintf(stderr, "charlm: %s\n", text);
  return 2;
}

/* ---- Options ---- */

static int read_number(const char *name, const char *value, int64_t least, int64_t most, int64_t *to) {
  char *end;
  errno = 0;
  *to = strtoll(value, &end, 10);
  if (!errno && end != value && !*end && *to >= least && *to <= most) return 0;
  fprintf(stderr, "charlm: %s %s: wanted is a number from %lld to %lld\n", name, value, (long long)least, (long long)most);
  return 2;
}
static int read_real(const char *name, const char *value, double least, double below, double *to) {
  char *end;
  *to = strtod(value, &end);
  if (end != value && !*end && *to >= least && *to < below) return 0;
  fprintf(stderr, "charlm: %s %s: wanted is a number from %g to below %g\n", name, value, least, below);
  return 2;
}

/* 0, or the exit status of an error, or -1: the help was printed. */
static int parse(options *o, int argc, char **argv) {
  *o = (options){.steps = 1500, .batch = 16, .context = 128, .layers = 4, .d_model = 128, .seed = 1, .rate = 0.003, .dropout = 0.1,
                 .temperature = 0.7, .prompt = "The "};
  const struct {
    const char *name;
    int64_t least, most, *to;
  } numbers[] = {{"--steps", 1, 10000000, &o->steps},   {"--batch", 1, 4096, &o->batch},       {"--context", 1, 65536, &o->context},
                 {"--layers", 1, LM_LAYERS, &o->layers}, {"--d-model", HEAD_DIM, 4096, &o->d_model}, {"--seed", 0, INT32_MAX, &o->seed},
                 {"--threads", 1, 1024, &o->threads},   {"--generate", 1, INT32_MAX, &o->generate}};
  const struct {
    const char *name;
    double least, below, *to;
  } reals[] = {{"--rate", 1e-9, 10, &o->rate}, {"--dropout", 0, 1, &o->dropout}, {"--temperature", 0, 100, &o->temperature}};
  const struct {
    const char *name, **to;
  } names[] = {{"--checkpoint", &o->checkpoint}, {"--resume", &o->resume}, {"--curve", &o->curve}, {"--plot", &o->plot},
               {"--prompt", &o->prompt}};
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
    int status = -1; /* not known yet */
    if (!strcmp(name, "--help") || !strcmp(name, "-h")) return fputs(usage, stdout), -1;
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
      if (!strcmp(name, numbers[k].name)) {
        status = value ? read_number(name, value, numbers[k].least, numbers[k].most, numbers[k].to) : 1;
        if (k == 0)
          o->steps_given = 1;
        else if (k < 6)
          o->fixed = name;
      }
    for (size_t k = 0; k < sizeof reals / sizeof *reals; k++)
      if (!strcmp(name, reals[k].name)) {
        status = value ? read_real(name, value, reals[k].least, reals[k].below, reals[k].to) : 1;
        if (k < 2) o->fixed = name;
      }
    for (size_t k = 0; k < sizeof names / sizeof *names; k++)
      if (!strcmp(name, names[k].name)) {
        status = value ? 0 : 1;
        *names[k].to = value;
      }
    if (!strcmp(name, "--text")) {
      status = value ? 0 : 1;
      if (value && o->texts == TEXTS) return fail("too many --text");
      if (value) o->text[o->texts++] = value;
    }
    if (status < 0) return fprintf(stderr, "charlm: there is no option '%s'; see charlm --help\n", name), 2;
    if (!value) return fprintf(stderr, "charlm: %s needs a value\n", name), 2;
    if (status > 0) return status;
    i++;
  }
  if (o->d_model % HEAD_DIM) return fail("--d-model must be a multiple of 32");
  if (o->resume && o->fixed) return fprintf(stderr, "charlm: %s cannot be given with --resume: the checkpoint has it\n", o->fixed), 2;
  return 0;
}

/* ---- Training ---- */

static volatile sig_atomic_t interrupted;
static void on_signal(int number) {
  (void)number;
  interrupted = 1;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The mean loss on the validation text, in windows one behind another. */
static int validate(training *t, const corpus *text, double *loss, char *error, size_t n) {
  const int64_t length = text->count - text->training, context = t->c.context, windows = (length - 1) / context;
  const int64_t room = t->batch * (context + 1);
  uint8_t *tokens = malloc((size_t)room);
  double sum = 0;
  int status = tokens ? 0 : text_fail(error, n, "no memory for a batch");
  for (int64_t w = 0; w < windows && status == 0; w += t->batch) {
    const int64_t batch = windows - w < t->batch ? windows - w : t->batch;
    double part;
    for (int64_t b = 0; b < batch; b++)
      memcpy(tokens + b * (context + 1), text->tokens + text->training + (w + b) * context, (size_t)(context + 1));
    status = lm_loss_f32(&t->m, tokens, batch, context, -1, 0, &part, error, n);
    if (status == 0) sum += part * (double)batch;
  }
  free(tokens);
  *loss = sum / (double)windows;
  return status;
}

/* Up in a line, then down in a half cosine to a tenth. */
static double rate_at(const training *t, int64_t step) {
  if (step <= WARM_UP) return t->rate * (double)step / WARM_UP;
  const double part = (double)(step - WARM_UP) / (double)(t->steps > WARM_UP ? t->steps - WARM_UP : 1);
  return t->rate * (0.55 + 0.45 * cos(3.14159265358979323846 * part));
}

static void progress(const training *t, int terminal, double loss, double validation, double seconds, int64_t steps) {
  const double speed = (double)(steps * t->batch * t->c.context) / seconds;
  const int64_t left = (int64_t)((double)(t->steps - t->done) * seconds / (double)steps + 0.5);
  fprintf(stderr, "%sstep %lld/%lld  loss %.3f  validation %.3f  %.1f k characters/s  %lld:%02lld left%s", terminal ? "\r\033[K" : "",
          (long long)t->done, (long long)t->steps, loss, validation, 1e-3 * speed, (long long)(left / 60), (long long)(left % 60),
          terminal ? "" : "\n");
}

static int train(training *t, const corpus *text, const options *o, char *error, size_t n) {
  const int64_t length = t->c.context + 1, first = t->done;
  const int terminal = isatty(2);
  uint8_t *tokens = malloc((size_t)(t->batch * length));
  double begin = now(), smooth = 0, validation = t->validation_count ? t->validations[2 * t->validation_count - 1] : 0;
  int status = tokens ? 0 : text_fail(error, n, "no memory for a batch");
  if (status == 0 && t->validation_count == 0) {
    status = validate(t, text, &validation, error, n) || training_add_validation(t, 0, validation);
    begin = now();
  }
  while (status == 0 && t->done < t->steps && !interrupted) {
    const lm_step step = {t->done + 1, rate_at(t, t->done + 1), 0.9, 0.98, 0.1, 1};
    double loss;
    for (int64_t b = 0; b < t->batch; b++) {
      const uint64_t at = rng_at(t->seed, 1000, (uint64_t)(t->done * t->batch + b)) % (uint64_t)(text->training - length + 1);
      memcpy(tokens + b * length, text->tokens + at, (size_t)length);
    }
    status = lm_loss_f32(&t->m, tokens, t->batch, t->c.context, step.number, 1, &loss, error, n);
    if (status) break;
    if (!isfinite(loss)) {
      status = text_fail(error, n, "the loss of step %lld is not finite; try a smaller --rate than %g", (long long)step.number, t->rate);
      break;
    }
    lm_update_f32(&t->m, &step);
    t->losses[t->done++] = loss;
    const int64_t steps = t->done - first;
    smooth += (loss - smooth) / (double)(steps < 20 ? steps : 20);
    const int at_end = t->done == t->steps, check = at_end || t->done % EVERY == 0;
    if (check) {
      status = validate(t, text, &validation, error, n);
      if (status == 0 && training_add_validation(t, t->done, validation)) status = text_fail(error, n, "no memory for losses");
      if (status == 0 && o->checkpoint) status = checkpoint_save(t, o->checkpoint, error, n);
    }
    if (status == 0 && (terminal || check)) progress(t, terminal, smooth, validation, now() - begin, steps);
  }
  if (terminal) fputc('\n', stderr);
  if (status == 0 && interrupted && t->done < t->steps && o->checkpoint) status = checkpoint_save(t, o->checkpoint, error, n);
  if (status == 0 && t->done > first) {
    printf("%lld steps in %.1f s, %d thread(s), %lld parameters\n", (long long)(t->done - first), now() - begin,
           (int)t->m.context.num_workers, (long long)t->m.l.parameters);
    printf("nats per character: bigram entropy of the text %.3f, bigram model on the validation text %.3f\n", text->bigram_entropy,
           text->bigram_loss);
    if (!interrupted) printf("validation loss: %.3f\n", validation);
  }
  free(tokens);
  return status;
}

/* ---- Writing ---- */

static int generate(training *t, const options *o, char *error, size_t n) {
  const int64_t context = t->c.context;
  const size_t length = strlen(o->prompt);
  rng r = {(uint64_t)o->seed, 2000, 0};
  uint8_t *tokens = malloc(length + (size_t)context + 1);
  int64_t have = 0;
  int status = tokens ? 0 : text_fail(error, n, "no memory for the prompt");
  for (size_t i = 0; i < length && status == 0; i++) {
    const int token = t->v.token[(unsigned char)o->prompt[i]];
    if (token < 0) status = text_fail(error, n, "--prompt: the text has no character '%c' (byte %d)", o->prompt[i], o->prompt[i] & 255);
    tokens[have++] = (uint8_t)token;
  }
  if (status == 0 && have == 0) status = text_fail(error, n, "--prompt needs a character at least");
  if (status == 0) fputs(o->prompt, stdout);
  for (int64_t i = 0; i < o->generate && status == 0 && !interrupted; i++) {
    const float *logits;
    double p[256], sum = 0;
    const int64_t seen = have < context ? have : context;
    memmove(tokens, tokens + have - seen, (size_t)seen);
    have = seen;
    status = lm_next_f32(&t->m, tokens, have, &logits, error, n);
    if (status) break;
    int64_t next = 0;
    for (int64_t c = 1; c < t->v.count; c++)
      if (logits[c] > logits[next]) next = c;
    if (o->temperature > 0) {
      const double most = logits[next];
      for (int64_t c = 0; c < t->v.count; c++) sum += p[c] = exp((logits[c] - most) / o->temperature);
      double left = sum * rng_uniform_at(r.seed, r.stream, (uint64_t)i);
      for (next = 0; next < t->v.count - 1 && left >= p[next]; next++) left -= p[next];
    }
    tokens[have++] = (uint8_t)next;
    fputc(t->v.byte[next], stdout);
    fflush(stdout);
  }
  if (status == 0) fputc('\n', stdout);
  free(tokens);
  return status;
}

/* ---- Main ---- */

static int read_text(const options *o, corpus *text, char *error, size_t n) {
  static char paths[LICENCES][64];
  const char *list[LICENCES];
  if (o->texts) return corpus_read(text, o->text, o->texts, error, n);
  int there = 0;
  for (int i = 0; i < LICENCES; i++) {
    snprintf(paths[i], sizeof paths[i], "/usr/share/common-licenses/%s", licences[i]);
    if (access(paths[i], R_OK) == 0) list[there++] = paths[i];
  }
  if (!there) return text_fail(error, n, "there are no licences in /usr/share/common-licenses; give a text with --text FILE");
  return corpus_read(text, list, there, error, n);
}

static int start(training *t, const options *o, const corpus *text, const qkv_context *context, char *error, size_t n) {
  const int64_t heads = o->d_model / HEAD_DIM;
  memset(t, 0, sizeof *t);
  t->c = (lm_config){.vocabulary = text->v.count, .context = o->context, .d_model = o->d_model, .d_ff = 4 * o->d_model, .layers = o->layers,
                     .heads = heads, .kv_heads = heads % 2 ? heads : heads / 2, .head_dim = HEAD_DIM, .dropout = o->dropout,
                     .seed = (uint64_t)o->seed};
  t->v = text->v;
  t->text_count = text->count;
  t->batch = o->batch;
  t->steps = o->steps;
  t->seed = (uint64_t)o->seed;
  t->rate = o->rate;
  if (training_init(t, context, error, n)) return -1;
  lm_fill_f32(&t->m, t->seed);
  return 0;
}

static int work(training *t, corpus *text, const options *o, char *error, size_t n) {
  qkv_context context = qkv_context_default();
  const int only_writes = o->resume && o->generate && !o->texts && !o->steps_given;
  qkv_openmp(&context, o->threads ? (int)o->threads : omp_get_num_procs());
  /* The executor divides all work, products too; a BLAS with threads of its own would make sums depend on their number. */
  if (blas_threads(1)) fputs("charlm: this BLAS has no known function for its number of threads; losses may depend on it\n", stderr);
  if (!only_writes && read_text(o, text, error, n)) return -1;
  if (o->resume ? checkpoint_load(t, o->resume, o->steps_given ? o->steps : 0, &context, error, n)
                : start(t, o, text, &context, error, n))
    return -1;
  if (!only_writes) {
    if (t->text_count != text->count || t->v.count != text->v.count || memcmp(t->v.byte, text->v.byte, (size_t)t->v.count))
      return text_fail(error, n, "%s was trained on another text, of %lld characters; this one has %lld", o->resume,
                       (long long)t->text_count, (long long)text->count);
    if (text->count - text->training <= t->c.context)
      return text_fail(error, n, "--context %lld: the validation text has only %lld characters", (long long)t->c.context,
                       (long long)(text->count - text->training));
    if (train(t, text, o, error, n)) return -1;
  }
  if (o->curve && curve_write(t, o->curve, error, n)) return -1;
  if (o->plot && !only_writes && curve_plot(t, text, strcmp(o->plot, "-") ? o->plot : NULL, error, n)) return -1;
  return o->generate && !interrupted ? generate(t, o, error, n) : 0;
}

int main(int argc, char **argv) {
  char error[512] = "";
  options o;
  training t = {0};
  corpus text = {0};
  int status = parse(&o, argc, argv);
  if (status) return status < 0 ? 0 : status;
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  status = work(&t, &text, &o, error, sizeof error) ? fail(error) : interrupted ? 130 : 0;
  training_free(&t);
  corpus_free(&text);
  if (fflush(stdout)) {
    snprintf(error, sizeof error, "standard output: %s", strerror(errno));
    return fail(error);
  }
  return status;
}

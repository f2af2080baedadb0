#include "prove.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "executor.h"

bool prove_fact(const char *text, const char *name, char *value, size_t bytes) {
  size_t length = strlen(name);
  for (const char *line = text; line != NULL && *line != 0;) {
    const char *end = strchr(line, '\n');
    if (strncmp(line, name, length) == 0 && strncmp(line + length, ": ", 2) == 0) {
      const char *from = line + length + 2;
      size_t n = end != NULL ? (size_t)(end - from) : strlen(from);
      n = n < bytes ? n : bytes - 1;
      memcpy(value, from, n);
      value[n] = 0;
      return true;
    }
    line = end != NULL ? end + 1 : NULL;
  }
  return false;
}

int prove_isas(const char *names[PROVE_MAX_ISAS]) {
  static const char *const known[] = {"avx512", "avx2", "neon", "portable", "reference"};
  static const float zeros[4];
  static float result;
  int count = 0;
  qkv_problem p = qkv_problem_default();
  p.batch = p.num_heads = p.seqlen_q = p.seqlen_kv = p.head_dim = 1;
  p.q = p.k = p.v = qkv_bhsd(zeros, QKV_F32, 1, 1, 1);
  p.out = qkv_bhsd(&result, QKV_F32, 1, 1, 1);
  for (size_t n = 0; n < sizeof known / sizeof known[0]; n++) {
    qkv_context c = qkv_context_default();
    c.isa_cap = known[n];
    char text[4096], isa[64];
    if (qkv_describe(&c, &p, text, sizeof text) == QKV_OK && prove_fact(text, "isa", isa, sizeof isa) &&
        strncmp(isa, known[n], strlen(known[n])) == 0) {
      names[count++] = known[n];
    }
  }
  return count;
}

/* ---- One problem --------------------------------------------------------------------------------------------------- */

typedef struct proof {
  problem_case c;
  qkv_problem forward;  /* without lse, if the text does not ask for it */
  qkv_problem expected; /* the problem with out and lse in memory of their own */
  void *out, *lse;
  problem_gradients g, expected_g;
  bool backward;          /* what runs at the moment */
  problem_buffer scratch; /* as large as the largest so far */
  prove_report *report;
} proof;

static bool fails(prove_report *r, const char *who, const char *what) {
  if (r->passed) {
    snprintf(r->text, sizeof r->text, "%s: %s", who, what);
  }
  r->passed = false;
  return false;
}

static void *copy(const problem_buffer *b) {
  void *to = malloc(b->bytes + 1);
  if (to != NULL && b->bytes > 0) {
    memcpy(to, b->begin, b->bytes);
  }
  return to;
}

static bool keep_expected(proof *f) {
  const problem_buffer *out = &f->c.buffer[PROBLEM_BUFFER_OUT], *lse = &f->c.buffer[PROBLEM_BUFFER_LSE];
  f->expected = f->forward;
  f->out = copy(out);
  f->lse = copy(lse);
  if (f->out == NULL || f->lse == NULL) {
    return fails(f->report, "test", "no memory");
  }
  f->expected.out.data = (char *)f->out + ((unsigned char *)f->c.problem.out.data - out->begin);
  if (f->forward.lse.data != NULL) {
    f->expected.lse.data = (char *)f->lse + ((unsigned char *)f->c.problem.lse.data - lse->begin);
  }
  return true;
}

/* Forward if g is NULL. */
static qkv_status call(const qkv_context *context, const qkv_problem *p, const qkv_gradients *g, void *scratch,
                       size_t bytes) {
  return g != NULL ? qkv_backward(context, p, g, scratch, bytes) : qkv_forward(context, p, scratch, bytes);
}

/* Memory of `bytes` beside the guard page, filled with NaN; NULL: none. */
static unsigned char *take_scratch(proof *f, size_t bytes) {
  problem_buffer *b = &f->scratch;
  if (b->begin == NULL || b->bytes < bytes) {
    problem_buffer_free(b);
    if (!problem_buffer_make(b, bytes, f->c.flags)) {
      return NULL;
    }
  }
  unsigned char *begin = f->c.flags & PROBLEM_GUARD_BEGIN ? b->begin : b->begin + b->bytes - bytes;
  memset(begin, 0xff, bytes);
  return begin;
}

/* Runs with scratch of exactly the size asked for, or with none now and then. */
static qkv_status run(proof *f, const qkv_context *context, const qkv_problem *p, const qkv_gradients *g) {
  size_t bytes = 0;
  f->report->runs++;
  if (f->report->runs % 4 == 0) {
    return call(context, p, g, NULL, 0);
  }
  qkv_status status = g != NULL ? qkv_backward_scratch(context, p, g, &bytes) : qkv_scratch(context, p, &bytes);
  if (status != QKV_OK) {
    return status;
  }
  unsigned char *scratch = take_scratch(f, bytes);
  return scratch != NULL ? call(context, p, g, scratch, bytes) : QKV_NO_MEMORY;
}

/* The gradients of `part`, all of them if that is NULL. */
static bool judge(proof *f, const char *who, qkv_status status, const qkv_gradients *part) {
  char what[128];
  compare_report report;
  snprintf(what, sizeof what, "%s%s", f->backward ? "backward, " : "", who);
  if (status != QKV_OK) {
    return fails(f->report, what, qkv_status_text(status));
  }
  const qkv_problem *p = &f->c.problem;
  if (f->backward ? !compare_gradients(p, &f->expected_g.g, p, part != NULL ? part : &f->g.g, &report)
                  : !compare_outputs(&f->expected, p, &report)) {
    return fails(f->report, what, report.text);
  }
  if (!(f->backward ? problem_gradients_gaps_intact(&f->g) : problem_gaps_intact(&f->c))) {
    return fails(f->report, what, "memory between the elements of an output was written");
  }
  return true;
}

static void clear(proof *f) {
  if (f->backward) {
    problem_gradients_clear(&f->g);
  } else {
    problem_clear_outputs(&f->c);
  }
}

static bool one_run(proof *f, const qkv_context *context, const char *who) {
  clear(f);
  qkv_status status = f->backward ? run(f, context, &f->c.problem, &f->g.g) : run(f, context, &f->forward, NULL);
  return judge(f, who, status, NULL);
}

static bool with_executors(proof *f, const char *isa) {
  static const struct {
    executor_kind kind;
    int32_t workers;
  } cases[] = {{EXECUTOR_REVERSED, 3}, {EXECUTOR_SHUFFLED, 64}, {EXECUTOR_THREADS, 2},
               {EXECUTOR_THREADS, 3},  {EXECUTOR_SCATTERED, 4}, {EXECUTOR_SERIAL, 5}};
  for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
    executor e = executor_make(cases[n].kind, cases[n].workers, f->c.spec.seed);
    qkv_context context = executor_context(&e);
    context.isa_cap = isa;
    char who[96];
    snprintf(who, sizeof who, "isa %s, executor %s, %d workers", isa, executor_name(cases[n].kind), (int)cases[n].workers);
    if (!one_run(f, &context, who)) {
      return false;
    }
  }
  return true;
}

static bool with_flags(proof *f, const char *isa) {
  static const uint32_t flags[] = {QKV_FORCE_PARTIAL,
                                   QKV_FORCE_PARTIAL | QKV_FORCE_SELECT,
                                   QKV_FORCE_STAGE,
                                   QKV_FORCE_SPLIT,
                                   QKV_NO_SKIP,
                                   QKV_FORCE_FUSE,
                                   QKV_FORCE_FUSE | QKV_FORCE_STAGE,
                                   63,
                                   QKV_FORCE_PASSES,
                                   QKV_FORCE_PASSES | QKV_FORCE_PARTIAL | QKV_FORCE_SELECT | QKV_FORCE_STAGE};
  const size_t forward = 8; /* the last of them concern the backward pass alone */
  for (size_t n = 0; n < (f->backward ? sizeof flags / sizeof flags[0] : forward); n++) {
    executor e = executor_make(EXECUTOR_SHUFFLED, 4, f->c.spec.seed);
    qkv_context context = executor_context(&e);
    context.isa_cap = isa;
    context.flags = flags[n];
    char who[96];
    snprintf(who, sizeof who, "isa %s, flags %u", isa, (unsigned)flags[n]);
    if (!one_run(f, &context, who)) {
      return false;
    }
  }
  return true;
}

/* Each entry, or each key-value head of each entry, in a call of its own. */
static bool alone(proof *f, const char *isa, bool heads) {
  const qkv_problem *p = &f->c.problem;
  const int64_t step = heads ? 1 : p->num_kv_heads;
  qkv_context context = qkv_context_default();
  qkv_gradients part = f->g.g;
  context.isa_cap = isa;
  clear(f);
  qkv_status status = QKV_OK;
  for (int64_t b = 0; b < p->batch && status == QKV_OK; b++) {
    for (int64_t h = 0; h < p->num_kv_heads && status == QKV_OK; h += step) {
      problem_view view;
      qkv_gradients g;
      if (f->backward) {
        problem_view_entry(&view, p, b, h, h + step);
        problem_view_gradients(&g, p, &f->g.g, b, h, h + step);
        part.dbias.data = g.dbias.data != NULL ? part.dbias.data : NULL;
        part.dsinks.data = g.dsinks.data != NULL ? part.dsinks.data : NULL;
        status = run(f, &context, &view.problem, &g);
      } else {
        problem_view_entry(&view, &f->forward, b, h, h + step);
        status = run(f, &context, &view.problem, NULL);
      }
    }
  }
  char who[96];
  snprintf(who, sizeof who, "isa %s, each entry %salone", isa, heads ? "and head " : "");
  return judge(f, who, status, &part);
}

static bool every_way(proof *f, const prove_options *options) {
  qkv_context context = qkv_context_default();
  const char *isas[PROVE_MAX_ISAS];
  int count = prove_isas(isas);
  if (options->isa != NULL) {
    isas[0] = options->isa;
    count = 1;
  }
  for (int n = 0; n < count; n++) {
    if (strcmp(isas[n], "reference") == 0) {
      continue; /* that is what is expected */
    }
    context.isa_cap = isas[n];
    char who[96];
    snprintf(who, sizeof who, "isa %s", isas[n]);
    if ((options->what & PROVE_ISAS) && !one_run(f, &context, who)) {
      return false;
    }
    if ((options->what & PROVE_FORCED) && !with_flags(f, isas[n])) {
      return false;
    }
  }
  const char *best = count > 0 ? isas[0] : "reference";
  if ((options->what & PROVE_EXECUTORS) && !with_executors(f, best)) {
    return false;
  }
  return !(options->what & PROVE_SPLIT) ||
         (alone(f, best, true) && (!f->backward || f->c.problem.batch < 2 || alone(f, best, false)));
}

static bool judge_oracle(proof *f, bool accepted, const char *who, const compare_report *report) {
  f->report->worst = report->worst > f->report->worst ? report->worst : f->report->worst;
  return accepted || fails(f->report, who, report->text);
}

/* By the reference, which leaves out and lse. */
static bool prove_forward(proof *f, const prove_options *options, bool only_run) {
  qkv_context context = qkv_context_default();
  compare_report report;
  context.isa_cap = "reference";
  qkv_status status = run(f, &context, &f->c.problem, NULL);
  if (status != QKV_OK) {
    return fails(f->report, "isa reference", qkv_status_text(status));
  }
  if (only_run) {
    return true;
  }
  if (!problem_gaps_intact(&f->c)) {
    return fails(f->report, "isa reference", "memory between the elements of an output was written");
  }
  if ((options->what & PROVE_ORACLE) &&
      !judge_oracle(f, compare_oracle(&f->forward, 1, &report), "isa reference against the oracle", &report)) {
    return false;
  }
  return keep_expected(f) && every_way(f, options);
}

static bool prove_backward(proof *f, const prove_options *options) {
  qkv_context context = qkv_context_default();
  const qkv_problem *p = &f->c.problem;
  char text[256];
  compare_report report;
  context.isa_cap = "reference";
  f->backward = true;
  if (!problem_gradients_build(&f->g, &f->c, f->c.flags) || !problem_gradients_build(&f->expected_g, &f->c, f->c.flags)) {
    return fails(f->report, "test", "no memory");
  }
  if (qkv_backward_check(p, &f->g.g, text, sizeof text) != QKV_OK) {
    return fails(f->report, "qkv_backward_check", text);
  }
  qkv_status status = run(f, &context, p, &f->expected_g.g);
  if (status != QKV_OK) {
    return fails(f->report, "backward, isa reference", qkv_status_text(status));
  }
  if (!problem_gradients_gaps_intact(&f->expected_g)) {
    return fails(f->report, "backward, isa reference", "memory between the elements of an output was written");
  }
  if ((options->what & PROVE_ORACLE) && !judge_oracle(f, compare_gradients_oracle(p, &f->expected_g.g, &f->g.g, &report),
                                                      "backward, isa reference against the oracle", &report)) {
    return false;
  }
  return every_way(f, options);
}

static bool prove(proof *f, const prove_options *options, bool lse) {
  const bool backward = (options->what & PROVE_BACKWARD) != 0;
  char text[256];
  f->forward = f->c.problem;
  if (!lse) {
    f->forward.lse = qkv_strided(NULL, 0, 0, 0, 0, 0);
  }
  if (qkv_check(&f->forward, text, sizeof text) != QKV_OK) {
    return fails(f->report, "qkv_check", text);
  }
  return prove_forward(f, options, (options->what & PROVE_FORWARD) == 0) && (!backward || prove_backward(f, options));
}

bool prove_problem(const problem_spec *spec, const prove_options *options, prove_report *report) {
  proof *f = calloc(1, sizeof *f);
  memset(report, 0, sizeof *report);
  report->passed = true;
  if (f == NULL) {
    return fails(report, "test", "no memory");
  }
  f->report = report;
  unsigned flags = (options->what & PROVE_GUARDS) == 0 ? 0 : spec->seed & 1 ? PROBLEM_GUARD_BEGIN : PROBLEM_GUARD_END;
  problem_spec with_lse = *spec; /* the backward pass reads it */
  with_lse.lse = spec->lse || (options->what & PROVE_BACKWARD) != 0;
  bool passed = problem_build(&f->c, &with_lse, flags) ? prove(f, options, spec->lse) : fails(report, "test", "no memory");
  problem_buffer_free(&f->scratch);
  problem_gradients_free(&f->g);
  problem_gradients_free(&f->expected_g);
  problem_free(&f->c);
  free(f->out);
  free(f->lse);
  free(f);
  return passed;
}

/* ---- Shrinking ----------------------------------------------------------------------------------------------------- */

static void drop_mask(problem_spec *s, int n) {
  for (int k = n; k + 1 < s->mask_count; k++) {
    s->mask[k] = s->mask[k + 1];
  }
  s->mask_count--;
  s->mask[0].join = false;
}

/* The which-th smaller neighbour. False: there is none of that number; an unchanged spec is no step. */
static bool smaller(problem_spec *s, int which) {
  int64_t *extents[] = {&s->batch, &s->seqlen_q, &s->seqlen_kv, &s->head_dim, &s->head_dim_v};
  if (which < 15) {
    int64_t *n = extents[which % 5], least = which % 5 >= 3 ? 1 : 0;
    *n = which < 5 ? *n / 2 : which < 10 ? *n - 1 : *n < 64 ? *n : *n / 64 * 64;
    *n = *n > least ? *n : least;
    return true;
  }
  switch (which - 15) {
  case 0: s->num_heads = s->num_kv_heads; return true;
  case 1:
    if (s->num_kv_heads > 1) {
      s->num_heads /= s->num_kv_heads;
      s->num_kv_heads = 1;
    }
    return true;
  case 2: s->layout = PROBLEM_BHSD; return true;
  case 3: s->data = PROBLEM_PLAIN; return true;
  case 4: s->nan = PROBLEM_NO_NAN; return true;
  case 5: s->bias = PROBLEM_NO_BIAS; return true;
  case 6: s->alibi = false; return true;
  case 7: s->sinks = false; return true;
  case 8: s->lengths = false; return true;
  case 9: s->kvpos = false; return true;
  case 10: s->ragged_q = false; return true;
  case 11: s->ragged_kv = false; return true;
  case 12: s->lse = false; return true;
  case 13: s->scale = 0; return true;
  case 14: s->softcap = 0; return true;
  case 15: s->align = QKV_ALIGN_END; return true;
  case 16: s->algorithm = QKV_FLASH; return true;
  case 17: s->seed = s->seed > 20 ? s->seed % 20 : s->seed; return true;
  case 18:
    s->dtype = QKV_F32;
    memset(s->tensor_dtype, 0, sizeof s->tensor_dtype);
    memset(s->gradient_dtype, 0, sizeof s->gradient_dtype);
    return true;
  case 19: memset(s->gradient_dtype, 0, sizeof s->gradient_dtype); return true;
  case 20: s->dropout = 0; return true;
  case 21: s->origin = false; return true;
  case 22: s->dlse = false; return true;
  case 23: s->accumulate = false; return true;
  case 24: memset(s->summed, 0, sizeof s->summed); return true;
  case 25:
  case 26:
  case 27:
  case 28:
  case 29: s->want = 1 << (which - 15 - 25); return true; /* one gradient alone */
  default: break;
  }
  which -= 15 + 30;
  if (which < s->mask_count) {
    drop_mask(s, which);
    return true;
  }
  which -= s->mask_count;
  if (which < s->mask_count) {
    s->mask[which].a /= 2;
    return true;
  }
  which -= s->mask_count;
  if (which < s->mask_count) {
    s->mask[which].b /= 2;
    return true;
  }
  return false;
}

void prove_shrink(problem_spec *spec, const prove_options *options, int tries) {
  bool shrunk = true;
  while (shrunk) {
    shrunk = false;
    for (int which = 0; tries > 0; which++) {
      problem_spec candidate = *spec;
      char before[PROBLEM_TEXT_BYTES], after[PROBLEM_TEXT_BYTES];
      if (!smaller(&candidate, which)) {
        break;
      }
      problem_print(spec, before, sizeof before);
      problem_print(&candidate, after, sizeof after);
      prove_report report;
      if (strcmp(before, after) == 0 || !problem_valid(&candidate, NULL, 0)) {
        continue;
      }
      tries--;
      if (!prove_problem(&candidate, options, &report)) {
        *spec = candidate;
        shrunk = true;
      }
    }
  }
}

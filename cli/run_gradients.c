/* qkv run: the backward pass. */
#include <string.h>

#include "run.h"

int run_wants_gradients(const job *j) {
  for (int i = DQ; i <= DSINKS; i++) {
    if (j->to[i].path != NULL) return 1;
  }
  return 0;
}

/* ---- What goes with what ----------------------------------------------------------------------------------------- */

static const char *first_wanted(const job *j) {
  int i = DQ;
  while (i < DSINKS && j->to[i].path == NULL) i++;
  return j->to[i].option;
}

int run_check_gradient_options(const job *j) {
  if (!run_wants_gradients(j)) {
    for (int i = DOUT; i <= DLSE; i++) {
      if (j->in[i].file == NULL) continue;
      return cli_usage("%s: no gradient is asked for: --dq, --dk, --dv, --dbias or --dsinks is missing", j->in[i].option);
    }
    return CLI_OK;
  }
  /* Another file may have the others. */
  return j->input != NULL ? CLI_OK : run_check_gradient_input(j);
}

int run_check_gradient_input(const job *j) {
  static const int pairs[][2] = {{DBIAS, BIAS}, {DSINKS, SINKS}};
  if (!run_wants_gradients(j)) return CLI_OK;
  if (j->in[DOUT].file == NULL) {
    if (j->input == NULL) return cli_usage("%s needs --dout", first_wanted(j));
    return cli_failure("%s needs --dout: %s: no tensor 'dout'", first_wanted(j), j->input);
  }
  for (int i = 0; i < 2; i++) {
    const target *r = &j->to[pairs[i][0]];
    const source *s = &j->in[pairs[i][1]];
    if (r->path == NULL || s->file != NULL) continue;
    if (j->input == NULL) return cli_usage("%s needs %s", r->option, s->option);
    return cli_failure("%s needs %s: %s: no tensor '%s'", r->option, s->option, j->input, s->tensor);
  }
  return CLI_OK;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* A dtype that the library refuses, told in the names of files. */
static int check_type(const job *j, const source *s) {
  const int wide = j->in[Q].data.dtype == QKV_F64;
  if ((s->data.dtype == QKV_F64) == wide) return CLI_OK;
  return cli_failure("%s: %s: f%d was expected, as --q: %s has, the file has f%d", s->option, s->file, wide ? 64 : 32,
                     j->in[Q].file, wide ? 32 : 64);
}

static int set_dout(job *j) {
  const source *s = &j->in[DOUT];
  int64_t extent[4], out[4];
  char shape[128], wanted[192];
  qkv_tensor unused;
  const source like = {"--out", "out", "out", j->to[OUT].data};
  run_place(j, &like, out, &unused);
  int status = run_place(j, s, extent, &j->gradients.dout);
  if (status != CLI_OK) return status;
  if (memcmp(extent, out, sizeof out) != 0) {
    array_shape_text(like.data.rank, like.data.shape, shape, sizeof shape);
    snprintf(wanted, sizeof wanted, "floating-point numbers of shape %s, that of out,", shape);
    return run_wrong_shape(s, wanted);
  }
  return check_type(j, s);
}

static int set_dlse(job *j) {
  const qkv_problem *p = &j->problem;
  const source *s = &j->in[DLSE];
  const array *a = &s->data, *lse = &j->to[LSE].data;
  if (a->data == NULL) return CLI_OK;
  int64_t extent[3] = {1, 1, 1}, stride[3] = {0, 0, 0}, want[3] = {p->batch, p->num_heads, p->seqlen_q};
  char shape[128], wanted[192];
  if (run_is_real(a) && a->rank >= 1 && a->rank <= 3) {
    for (int axis = 0; axis < a->rank; axis++) {
      extent[3 - a->rank + axis] = a->shape[axis];
      stride[3 - a->rank + axis] = a->stride[axis];
    }
    if (memcmp(extent, want, sizeof want) == 0) {
      j->gradients.dlse = qkv_strided(a->data, a->dtype, stride[0], stride[1], stride[2], 0);
      return CLI_OK;
    }
  }
  array_shape_text(lse->rank, lse->shape, shape, sizeof shape);
  snprintf(wanted, sizeof wanted, "floating-point numbers of shape %s, one per row,", shape);
  return run_wrong_shape(s, wanted);
}

/* An array of the shape of what it is the gradient of. */
static int make(job *j, int which, const source *of, int32_t dtype, source *made) {
  target *r = &j->to[which];
  int status = run_allocate(&r->data, dtype, of->data.rank, of->data.shape, r->name);
  *made = (source){r->option, r->name, r->path, r->data};
  return status;
}

int run_set_gradients(job *j) {
  qkv_gradients *g = &j->gradients;
  qkv_tensor *placed[3] = {&g->dq, &g->dk, &g->dv};
  const int32_t dtype = j->in[Q].data.dtype;
  int64_t extent[4];
  source made;
  if (!run_wants_gradients(j)) return CLI_OK;
  *g = qkv_gradients_default();
  int status = set_dout(j);
  if (status == CLI_OK) status = set_dlse(j);
  for (int i = 0; i < 3 && status == CLI_OK; i++) {
    if (j->to[DQ + i].path == NULL) continue;
    status = make(j, DQ + i, &j->in[Q + i], dtype, &made);
    if (status == CLI_OK) status = run_place(j, &made, extent, placed[i]);
  }
  /* Axes that broadcast have stride 0, here as in the bias: that is where sums are formed. */
  if (status == CLI_OK && j->to[DBIAS].path != NULL) {
    status = make(j, DBIAS, &j->in[BIAS], dtype, &made);
    if (status == CLI_OK) status = run_broadcast(j, &made, "floating-point numbers", &g->dbias);
  }
  if (status == CLI_OK && j->to[DSINKS].path != NULL) {
    status = make(j, DSINKS, &j->in[SINKS], j->in[SINKS].data.dtype, &made);
    if (status == CLI_OK) status = run_per_head(j, &made, &g->dsinks);
  }
  if (status != CLI_OK) return status;
  qkv_status s = qkv_backward_check(&j->problem, g, NULL, 0);
  return s == QKV_OK ? CLI_OK : cli_backward_failure(s, &j->problem, g);
}

/* ---- Run --------------------------------------------------------------------------------------------------------- */

int run_backward(job *j) {
  const qkv_problem *p = &j->problem;
  qkv_status s;
  if (!run_wants_gradients(j)) return CLI_OK;
  j->backward_facts = cli_backward_describe(&j->context, p, &j->gradients, &s);
  if (j->backward_facts == NULL) return cli_backward_failure(s, p, &j->gradients);
  double begin = cli_seconds();
  s = qkv_backward(&j->context, p, &j->gradients, NULL, 0);
  j->backward_seconds = cli_seconds() - begin;
  if (s == QKV_OK && j->to[DQ].path != NULL) s = qkv_scale_gradient(p, &j->gradients, &j->dscale);
  if (s == QKV_CANCELLED) return cli_interrupted_failure("no file was written");
  if (s != QKV_OK) return cli_backward_failure(s, p, &j->gradients);
  /* For each visible pair the products that make the score, dP, dq, dk and dv. */
  double useful = 2 * (double)(3 * p->head_dim + 2 * p->head_dim_v) * j->pairs;
  j->backward_gflops = j->backward_seconds > 0 ? useful / j->backward_seconds * 1e-9 : 0;
  return CLI_OK;
}

void run_report_backward(const job *j, cJSON *object) {
  if (j->backward_facts == NULL) return;
  if (object != NULL) {
    cJSON *backward = cJSON_AddObjectToObject(object, "backward");
    cli_facts_to_json(j->backward_facts, backward);
    cJSON_AddNumberToObject(backward, "seconds", j->backward_seconds);
    cJSON_AddNumberToObject(backward, "gflops", j->backward_gflops);
    if (j->to[DQ].path != NULL) cJSON_AddNumberToObject(backward, "dscale", j->dscale);
    return;
  }
  for (const char *line = j->backward_facts; *line != 0;) {
    size_t length = strcspn(line, "\n");
    if (strncmp(line, "direction:", 10) != 0) printf("backward_%.*s\n", (int)length, line);
    line += length + (line[length] == '\n');
  }
  printf("backward_time: %.6f s\n", j->backward_seconds);
  printf("backward_rate: %.2f GFLOP/s of useful operations\n", j->backward_gflops);
  if (j->to[DQ].path != NULL) printf("dscale: %.9g\n", j->dscale);
}

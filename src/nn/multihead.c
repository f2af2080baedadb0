/* The public calls of the layer. */
#include <string.h>

#include "base/fpstate.h"
#include "base/size.h"
#include "nn/layer.h"
#include "base/run.h"
#include "problem/problem.h"

typedef struct call {
  qkv__layer l;
  qkv__runner r;
  const qkv_context *context; /* the caller's, for libqkv */
  size_t own, core, bytes;    /* scratch: of the layer, of attention; together, as told to the caller */
  qkv__memory memory;
  qkv__activations a;
  /* backward */
  qkv__heads dheads;
  qkv_tensor dattention; /* of attention's output */
  int wanted;            /* set of QKV_DQ, ...: what attention has to give */
} call;

static int wants_any(const qkv_tensor *const *t, int count) {
  for (int i = 0; i < count; i++)
    if (t[i]->data) return 1;
  return 0;
}

/* The gradients of q, k and v that those of inputs and parameters need. */
static int wanted_of(const qkv__layer *l) {
  const qkv_multihead_gradients *g = &l->g;
  int wanted = (g->dbias.data ? QKV_DBIAS : 0) | (g->dsinks.data ? QKV_DSINKS : 0);
  for (int part = 0; part < QKV__PARTS; part++) {
    const qkv_tensor *const needs[] = {qkv__weight(&g->projections, part), qkv__bias(&g->projections, part),
                                       part == QKV__Q || l->self ? &g->dx : &g->dx_kv};
    if (wants_any(needs, 3)) wanted |= part == QKV__Q ? QKV_DQ : part == QKV__K ? QKV_DK : QKV_DV;
  }
  return wanted;
}

static qkv_gradients core_gradients(const call *k) {
  const qkv__layer *l = &k->l;
  qkv_gradients g = qkv_gradients_default();
  const qkv_tensor none = {0};
  g.accumulate = l->g.accumulate & (QKV_DBIAS | QKV_DSINKS);
  g.dout = qkv__split_heads(&k->dattention, l->p.head_dim_v);
  g.dq = k->wanted & QKV_DQ ? qkv__split_heads(&k->dheads.part[QKV__Q], l->p.head_dim) : none;
  g.dk = k->wanted & QKV_DK ? qkv__split_heads(&k->dheads.part[QKV__K], l->p.head_dim) : none;
  g.dv = k->wanted & QKV_DV ? qkv__split_heads(&k->dheads.part[QKV__V], l->p.head_dim_v) : none;
  g.dbias = l->g.dbias;
  g.dsinks = l->g.dsinks;
  return g;
}

/* The backward's own scratch: gradients of q, k and v, and of attention's output. */
static void carve(call *k, qkv__carver *c) {
  char *heads = qkv__carve(c, 1, qkv__heads_bytes(&k->l)), *out = qkv__carve(c, 1, qkv__out_bytes(&k->l));
  k->dheads = qkv__heads_at(&k->l, heads);
  k->dattention = qkv__out_at(&k->l, out);
}

/* Checks everything and measures the scratch. */
static qkv_status prepare(const qkv_context *context, const qkv_multihead *m, const qkv_multihead_gradients *g, int use, int backward,
                          call *k) {
  const qkv__report none = {NULL, 0};
  memset(k, 0, sizeof *k);
  k->context = context;
  if (context) QKV_TRY(qkv__take_struct(&none, "context", context, &k->r.c, sizeof k->r.c));
  QKV_TRY(qkv__layer_check(m, g, use, &k->l, NULL, 0));
  k->r.dtype = k->l.m.dtype;
  k->r.tasks = k->l.m.gemm == QKV_GEMM_TASKS;
  k->a = qkv__activations_at(&k->l, k->l.m.activations);
  const qkv_problem p = qkv__problem_of(&k->l, &k->a, backward || k->l.m.activations);
  if (backward) {
    /* Attention's scratch depends on which gradients are given, and they have no place yet: one where no object is. */
    qkv__carver c = {(char *)(UINTPTR_MAX / 2 + 1), 0, 0};
    k->wanted = g ? wanted_of(&k->l) : QKV_DQ | QKV_DK | QKV_DV;
    carve(k, &c);
    if (c.overflow) return QKV_TOO_LARGE;
    k->own = c.used;
    const qkv_gradients gradients = core_gradients(k);
    QKV_TRY(qkv_backward_scratch(context, &p, &gradients, &k->core));
  } else {
    k->own = k->l.m.activations ? 0 : k->l.activation_bytes;
    QKV_TRY(qkv_scratch(context, &p, &k->core));
  }
  if (k->core > SIZE_MAX / 2 - k->own) return QKV_TOO_LARGE;
  k->bytes = k->own + k->core;
  return QKV_OK;
}

/* ---- Parts of a call ---- */

static qkv__matrix transposed(qkv__matrix m) {
  return (qkv__matrix){m.data, m.columns, m.rows, m.column_stride, m.row_stride};
}
static qkv__matrix matrix_of(const qkv_tensor *t, int64_t rows, int64_t columns) {
  return (qkv__matrix){t->data, rows, columns, t->stride[2], t->stride[3]};
}

/* Rotates q and k, or their gradients back, in place. */
static qkv_status rotate(const call *k, const qkv__heads *heads, int backward) {
  for (int i = 0; i < 2; i++) {
    const qkv__side *s = &k->l.side[i];
    qkv_rotary t = k->l.rotary[i];
    qkv_status (*const turn)(const qkv_context *, const qkv_rotary *) = backward ? qkv_rotary_backward : qkv_rotary_forward;
    if (!k->l.has_rotary[i] || (backward && !(k->wanted & (i ? QKV_DK : QKV_DQ)))) continue;
    t.num_heads = i ? k->l.p.num_kv_heads : k->l.p.num_heads;
    t.x = qkv__split_heads(&heads->part[i], t.head_dim);
    if (!s->partial && (!s->cu || t.position_ids.data)) {
      QKV_TRY(turn(k->context, &t));
      continue;
    }
    for (int64_t e = 0; e < s->entries; e++) { /* the rows that exist, counted within the entry */
      const qkv__segment g = qkv__entry_rows(s, e);
      qkv_rotary one = t;
      if (!g.count) continue;
      one.batch = 1;
      one.seqlen = g.count;
      one.x.data = qkv__at(&t.x, k->l.element, g.batch, 0, g.row, 0);
      if (t.position_ids.data)
        one.position_ids.data = qkv__at(&t.position_ids, sizeof(int32_t), g.batch, 0, g.row, 0);
      else {
        one.start += (t.starts ? t.starts[e] : 0) + g.row - (s->cu ? s->cu[e] : 0);
        one.starts = NULL;
      }
      QKV_TRY(turn(k->context, &one));
    }
  }
  return QKV_OK;
}

static qkv_status project_inputs(const call *k) {
  const qkv__layer *l = &k->l;
  const qkv_projections *w = &l->m.projections;
  for (int part = 0, end; part < QKV__PARTS; part = end) {
    qkv__fill fill[QKV__PARTS];
    int biases = 0;
    end = qkv__group_end(l, w, part);
    for (int i = part; i < end; i++) {
      const qkv_tensor *b = qkv__bias(w, i);
      fill[i - part] = (qkv__fill){l->width[i], b->data ? b : NULL};
      biases |= b->data != NULL;
    }
    QKV_TRY(qkv__rows_product(&k->r, qkv__side_of(l, part), &k->a.heads.part[part], qkv__input(l, part),
                              transposed(qkv__group_weight(l, w, part, end)), 0, fill, biases ? end - part : 0));
  }
  return QKV_OK;
}

static qkv_status project_output(const call *k) {
  const qkv__layer *l = &k->l;
  const qkv_projections *w = &l->m.projections;
  const qkv__fill fill = {l->m.d_out, &w->bo};
  if (l->side[0].partial) QKV_TRY(qkv__zero_rows(&k->r, &l->side[0], &l->m.y, l->m.d_out));
  return qkv__rows_product(&k->r, &l->side[0], &l->m.y, &k->a.out, transposed(matrix_of(&w->wo, l->m.d_out, l->out_width)), 0, &fill,
                           w->bo.data != NULL);
}

static qkv_status forward(const call *k, void *core) {
  const qkv_problem p = qkv__problem_of(&k->l, &k->a, k->l.m.activations != NULL);
  QKV_TRY(project_inputs(k));
  QKV_TRY(rotate(k, &k->a.heads, 0));
  QKV_TRY(qkv_forward(k->context, &p, core, k->core));
  return project_output(k);
}

/* Gradients of attention's output and of wo, bo. */
static qkv_status output_gradients(const call *k) {
  const qkv__layer *l = &k->l;
  const qkv_projections *d = &l->g.projections;
  const int add = (l->g.accumulate & QKV_DPROJECTIONS) != 0;
  if (k->wanted)
    QKV_TRY(qkv__rows_product(&k->r, &l->side[0], &k->dattention, &l->g.dy, matrix_of(&l->m.projections.wo, l->m.d_out, l->out_width),
                              0, NULL, 0));
  if (d->wo.data)
    QKV_TRY(qkv__sum_product(&k->r, &l->side[0], matrix_of(&d->wo, l->m.d_out, l->out_width), &l->g.dy, &k->a.out, add));
  return d->bo.data ? qkv__column_sums(&k->r, &l->side[0], &d->bo, l->m.d_out, &l->g.dy, add) : QKV_OK;
}

/* Gradients of the input projections' weights and biases. */
static qkv_status projection_gradients(const call *k) {
  const qkv__layer *l = &k->l;
  const qkv_projections *d = &l->g.projections;
  const int add = (l->g.accumulate & QKV_DPROJECTIONS) != 0;
  for (int part = 0, end; part < QKV__PARTS; part = end) {
    end = qkv__group_end(l, d, part);
    if (qkv__weight(d, part)->data)
      QKV_TRY(qkv__sum_product(&k->r, qkv__side_of(l, part), qkv__group_weight(l, d, part, end), &k->dheads.part[part],
                               qkv__input(l, part), add));
  }
  for (int part = 0; part < QKV__PARTS; part++)
    if (qkv__bias(d, part)->data)
      QKV_TRY(qkv__column_sums(&k->r, qkv__side_of(l, part), qkv__bias(d, part), l->width[part], &k->dheads.part[part], add));
  return QKV_OK;
}

static qkv_status input_gradients(const call *k) {
  const qkv__layer *l = &k->l;
  for (int i = 0; i < (l->self ? 1 : 2); i++) {
    const qkv_tensor *dx = i ? &l->g.dx_kv : &l->g.dx;
    const int last = l->self ? QKV__PARTS : i ? QKV__PARTS : QKV__K;
    int add = (l->g.accumulate & (i ? QKV_DX_KV : QKV_DX)) != 0;
    if (!dx->data) continue;
    if (!add && (l->side[i].partial || (l->self && l->side[1].partial)))
      QKV_TRY(qkv__zero_rows(&k->r, &l->side[i], dx, i ? l->m.d_kv : l->m.d_model));
    for (int part = i, end; part < last; part = end) {
      end = QKV_MIN(last, qkv__group_end(l, &l->m.projections, part));
      QKV_TRY(qkv__rows_product(&k->r, qkv__side_of(l, part), dx, &k->dheads.part[part],
                                qkv__group_weight(l, &l->m.projections, part, end), add, NULL, 0));
      add = 1;
    }
  }
  return QKV_OK;
}

static qkv_status backward(const call *k, void *core) {
  const qkv_problem p = qkv__problem_of(&k->l, &k->a, 1);
  const qkv_gradients g = core_gradients(k);
  QKV_TRY(output_gradients(k));
  if (!k->wanted) return QKV_OK;
  QKV_TRY(qkv_backward(k->context, &p, &g, core, k->core));
  QKV_TRY(rotate(k, &k->dheads, 1));
  QKV_TRY(projection_gradients(k));
  return input_gradients(k);
}

/* ---- Calls ---- */

static qkv_status measure(const qkv_context *context, const qkv_multihead *m, const qkv_multihead_gradients *g, int is_backward,
                          size_t *bytes) {
  call k;
  qkv__fpstate fp;
  if (!bytes) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  const qkv_status s = prepare(context, m, g, QKV__MEASURES, is_backward, &k);
  if (s == QKV_OK) *bytes = k.bytes + QKV__MEMORY_SLACK;
  qkv__fp_leave(&fp);
  return s;
}

static qkv_status execute(const qkv_context *context, const qkv_multihead *m, const qkv_multihead_gradients *g, int is_backward,
                          void *scratch, size_t bytes) {
  call k;
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, m, g, is_backward ? QKV__BACKWARD : QKV__FORWARD, is_backward, &k);
  if (s == QKV_OK) s = qkv__memory_take(&k.r.c, scratch, bytes, k.bytes, &k.memory);
  if (s == QKV_OK) {
    char *core = k.memory.base + k.own;
    if (is_backward) {
      qkv__carver c = {k.memory.base, 0, 0};
      carve(&k, &c);
    } else if (!k.l.m.activations)
      k.a = qkv__activations_at(&k.l, k.memory.base);
    s = is_backward ? backward(&k, core) : forward(&k, core);
    qkv__memory_release(&k.r.c, &k.memory);
  }
  qkv__fp_leave(&fp);
  return s;
}

static qkv_status check(const qkv_multihead *m, const qkv_multihead_gradients *g, int use, qkv__layer *l, char *text, size_t bytes) {
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  const qkv_status s = qkv__layer_check(m, g, use, l, text, bytes);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_multihead_check(const qkv_multihead *m, char *text, size_t bytes) {
  qkv__layer l;
  return check(m, NULL, QKV__FORWARD, &l, text, bytes);
}

qkv_status qkv_multihead_backward_check(const qkv_multihead *m, const qkv_multihead_gradients *g, char *text, size_t bytes) {
  qkv__layer l;
  return check(m, g, QKV__BACKWARD, &l, text, bytes);
}

qkv_status qkv_multihead_activations(const qkv_multihead *m, size_t *bytes) {
  qkv__layer l;
  if (!bytes) return QKV_BAD_POINTER;
  QKV_TRY(check(m, NULL, QKV__MEASURES, &l, NULL, 0));
  *bytes = l.activation_bytes;
  return QKV_OK;
}

qkv_status qkv_multihead_scratch(const qkv_context *context, const qkv_multihead *m, size_t *bytes) {
  return measure(context, m, NULL, 0, bytes);
}

qkv_status qkv_multihead_forward(const qkv_context *context, const qkv_multihead *m, void *scratch, size_t bytes) {
  return execute(context, m, NULL, 0, scratch, bytes);
}

qkv_status qkv_multihead_backward_scratch(const qkv_context *context, const qkv_multihead *m, const qkv_multihead_gradients *g,
                                          size_t *bytes) {
  return measure(context, m, g, 1, bytes);
}

qkv_status qkv_multihead_backward(const qkv_context *context, const qkv_multihead *m, const qkv_multihead_gradients *g, void *scratch,
                                  size_t bytes) {
  return execute(context, m, g, 1, scratch, bytes);
}

qkv_status qkv_multihead_problem(const qkv_multihead *m, qkv_problem *problem) {
  const qkv__report none = {NULL, 0};
  qkv__layer l;
  qkv_problem old;
  QKV_TRY(qkv__take_struct(&none, "problem", problem, &old, sizeof old));
  QKV_TRY(check(m, NULL, QKV__VIEWS, &l, NULL, 0));
  const qkv__activations a = qkv__activations_at(&l, l.m.activations);
  qkv_problem p = qkv__problem_of(&l, &a, 1);
  p.size = old.size;
  memcpy(problem, &p, QKV_MIN(old.size, sizeof p));
  return QKV_OK;
}

qkv_status qkv_projections_place(const qkv_multihead *m, int32_t biases, void *memory, qkv_projections *to, size_t *bytes) {
  qkv__layer l;
  QKV_TRY(check(m, NULL, QKV__MEASURES, &l, NULL, 0));
  if (to && !memory) return QKV_BAD_POINTER;
  qkv_projections p;
  char *at = memory;
  int64_t elements = 0;
  memset(&p, 0, sizeof p);
  qkv_tensor *const tensors[] = {&p.wq, &p.wk, &p.wv, &p.bq, &p.bk, &p.bv, &p.wo, &p.bo};
  const int64_t in = l.m.d_model, kv = l.m.d_kv, *w = l.width;
  const int64_t n[][2] = {{w[0], in}, {w[1], kv}, {w[2], kv}, {1, w[0]}, {1, w[1]}, {1, w[2]}, {l.m.d_out, l.out_width}, {1, l.m.d_out}};
  for (int i = 0; i < 8; i++) {
    const int vector = (i >= 3 && i < 6) || i == 7;
    int64_t count = 0;
    if (vector && !biases) continue;
    if (!qkv__mul(n[i][0], n[i][1], &count) || !qkv__add(elements, count, &elements) || (uint64_t)elements > SIZE_MAX / 2 / l.element)
      return QKV_TOO_LARGE;
    if (at) *tensors[i] = vector ? qkv_vector(at, l.m.dtype) : qkv_matrix(at, l.m.dtype, n[i][1]);
    if (at) at += (size_t)count * l.element;
  }
  if (to) *to = p;
  if (bytes) *bytes = (size_t)elements * l.element;
  return QKV_OK;
}

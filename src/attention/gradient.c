#include "attention/gradient.h"

#include <math.h>
#include <string.h>

#include "base/order1.h"
#include "stage/stage.h"

static size_t real_bytes(const qkv__backward *j) { return (size_t)j->g.k->real_bytes; }
static void put(const qkv__backward *j, void *to, int64_t i, double x) {
  if (j->g.p->f64)
    ((double *)to)[i] = x;
  else
    ((float *)to)[i] = (float)x;
}
static void *at(const qkv__backward *j, void *p, int64_t i) { return (char *)p + (size_t)i * real_bytes(j); }
static uint64_t ones(int n) { return n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1; }

void qkv__backward_init(qkv__backward *j) {
  const qkv__kernel *k = j->g.k;
  j->ld = qkv__padded(j->g.p->p.head_dim, k->lanes);
  j->ldv = qkv__padded(j->g.p->p.head_dim_v, k->lanes);
  j->panels = 0;
  for (int row = 0; row < QKV_BLOCK;) {
    const int nv = QKV_MIN(k->max_nv, (QKV_BLOCK - row) / k->lanes);
    j->panel_row[j->panels] = row;
    j->panel_nv[j->panels++] = nv;
    row += nv * k->lanes;
  }
  j->panel_row[j->panels] = QKV_BLOCK;
}

void qkv__row_block_carve(const qkv__backward *j, qkv__carver *c, int with_dq, qkv__row_block *q) {
  const qkv_problem *p = &j->g.p->p;
  const size_t size = real_bytes(j);
  q->Q = qkv__carve(c, QKV_BLOCK * j->ld, size);
  q->dO = qkv__carve(c, QKV_BLOCK * j->ldv, size);
  q->Qt = qkv__carve(c, QKV_BLOCK * p->head_dim, size);
  q->dOt = qkv__carve(c, QKV_BLOCK * p->head_dim_v, size);
  q->dQ = with_dq ? qkv__carve(c, QKV_BLOCK * j->ld, size) : NULL;
  q->L2 = qkv__carve(c, QKV_BLOCK, size);
  q->delta = qkv__carve(c, QKV_BLOCK, size);
  q->slope2 = p->alibi_slopes.data ? qkv__carve(c, QKV_BLOCK, size) : NULL;
  q->position = qkv__carve(c, QKV_BLOCK, sizeof *q->position);
  if (!j->g.fast) return;
  q->Qp = qkv__carve(c, QKV_BLOCK / 2 * qkv__padded(p->head_dim, QKV__FAST_K), sizeof *q->Qp);
  q->dOp = qkv__carve(c, QKV_BLOCK / 2 * qkv__padded(p->head_dim_v, QKV__FAST_K), sizeof *q->dOp);
  q->Qr = qkv__carve(c, QKV_BLOCK / 2 * j->ld, sizeof *q->Qr);
  q->dOr = qkv__carve(c, QKV_BLOCK / 2 * j->ldv, sizeof *q->dOr);
}

void qkv__gradient_carve(const qkv__backward *j, qkv__carver *c, qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  const size_t size = real_bytes(j);
  const int64_t widest = QKV_BLOCK * QKV_MAX(p->head_dim, p->head_dim_v);
  w->S = qkv__carve(c, QKV_BLOCK * QKV_BLOCK, size);
  w->D = qkv__carve(c, QKV_BLOCK * QKV_BLOCK, size);
  w->K = qkv__carve(c, QKV_BLOCK * j->ld, size);
  w->V = qkv__carve(c, QKV_BLOCK * j->ldv, size);
  w->rows = qkv__carve(c, widest, size);
  w->old = qkv__carve(c, widest, size);
  w->Ot = qkv__carve(c, widest, size);
  w->bias_rows = p->bias.data ? qkv__carve(c, QKV_BLOCK * QKV_BLOCK, size) : NULL;
  w->bias = p->bias.data ? qkv__carve(c, QKV_BLOCK * QKV_BLOCK, size) : NULL;
  if (!j->g.fast) return;
  const int64_t d = qkv__padded(p->head_dim, QKV__FAST_K), dv = qkv__padded(p->head_dim_v, QKV__FAST_K);
  w->half = qkv__carve(c, QKV_BLOCK * QKV_MAX(QKV_BLOCK, QKV_MAX(d, dv)), sizeof *w->half);
  w->turned = qkv__carve(c, QKV_BLOCK * QKV_BLOCK, sizeof *w->turned);
  w->Kb = qkv__carve(c, QKV_BLOCK * d, sizeof *w->Kb);
  w->Vb = qkv__carve(c, QKV_BLOCK * dv, sizeof *w->Vb);
  w->Kr = qkv__carve(c, QKV_BLOCK / 2 * j->ld, sizeof *w->Kr);
}

void qkv__gradient_clear(const qkv__backward *j, qkv__gradient_work *w) {
  memset(w->K, 0, (size_t)(QKV_BLOCK * j->ld) * real_bytes(j));
  memset(w->V, 0, (size_t)(QKV_BLOCK * j->ldv) * real_bytes(j));
}

/* Rows of a tensor of (batch, head, row) as contiguous rows of pitch ld, zeros around. */
static void load_rows(const qkv__backward *j, void *to, int64_t ld, const qkv_tensor *t, int64_t batch, int64_t head, int64_t row, int rows,
                      int64_t d) {
  const void *from = qkv__at(t, qkv__dtype_bytes(t->dtype), batch, head, row, 0);
  if (rows < QKV_BLOCK || ld != d) memset(to, 0, (size_t)(QKV_BLOCK * ld) * real_bytes(j));
  qkv__stage_load(j->g.k, to, ld, t, from, rows, d);
}

/* [64][d] of pitch ld into the panels of a block */
static void pack(const qkv__backward *j, void *to, void *rows, int64_t ld, int n, int64_t d, double c) {
  for (int i = 0; i < j->panels; i++)
    j->g.k->pack(at(j, to, j->panel_row[i] * d), at(j, rows, j->panel_row[i] * ld), ld, QKV_MAX(n - j->panel_row[i], 0), d,
                 j->panel_nv[i], c);
}

/* One value of lse or dlse, rounded to the arithmetic's type. */
static double value_of(const qkv__backward *j, const qkv_tensor *t, const qkv__entry *e, int64_t head, int64_t row) {
  const void *p = qkv__at(t, qkv__dtype_bytes(t->dtype), e->batch_q, head, e->row0_q + row, 0);
  return t->dtype == QKV_F64 ? qkv__round(j->g.p, *(const double *)p) : (double)*(const float *)p;
}

static void add_lse(const qkv__backward *j, const qkv__entry *e, qkv__row_block *q) {
  const qkv_problem *p = &j->g.p->p;
  const qkv_tensor *dlse = &j->to->g.dlse;
  q->empty = 0;
  for (int i = 0; i < QKV_BLOCK; i++) {
    const double lse = i < q->rows ? value_of(j, &p->lse, e, q->head, q->row + i) : 0;
    q->empty |= lse == (double)-INFINITY;
    if (j->g.p->f64) {
      ((double *)q->L2)[i] = lse * QKV_LOG2E;
      if (i < q->rows && dlse->data) ((double *)q->delta)[i] -= value_of(j, dlse, e, q->head, q->row + i);
    } else {
      ((float *)q->L2)[i] = (float)lse * (float)QKV_LOG2E;
      if (i < q->rows && dlse->data) ((float *)q->delta)[i] -= (float)value_of(j, dlse, e, q->head, q->row + i);
    }
  }
}

static void load_delta(const qkv__backward *j, const qkv__entry *e, qkv__row_block *q, qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  const int64_t dv = p->head_dim_v;
  load_rows(j, w->rows, dv, &p->out, e->batch_q, q->head, e->row0_q + q->row, q->rows, dv);
  pack(j, w->Ot, w->rows, dv, q->rows, dv, 1);
  for (int i = 0; i < j->panels; i++)
    j->g.k->delta(at(j, q->delta, j->panel_row[i]), at(j, q->dOt, j->panel_row[i] * dv), at(j, w->Ot, j->panel_row[i] * dv), dv,
                  j->panel_nv[i]);
  add_lse(j, e, q);
}

static void place(const qkv__entry *e, int64_t head, int64_t row, qkv__row_block *q) {
  q->head = head;
  q->row = row;
  q->rows = (int)QKV_MIN(QKV_BLOCK, e->nq - row);
}

void qkv__row_block_sums(const qkv__backward *j, const qkv__entry *e, int64_t head, int64_t row, qkv__row_block *q,
                         qkv__gradient_work *w) {
  const int64_t dv = j->g.p->p.head_dim_v;
  place(e, head, row, q);
  load_rows(j, q->dO, j->ldv, &j->to->g.dout, e->batch_q, head, e->row0_q + row, q->rows, dv);
  pack(j, q->dOt, q->dO, j->ldv, q->rows, dv, 1);
  load_delta(j, e, q, w);
}

/* Whether it does not matter if values are finite: nothing is hidden, and no other arithmetic would have to take over. */
static int needs_no_check(const qkv__backward *j) { return !j->g.p->p.mask_count && !j->g.p->p.bias.data && !j->g.fast; }

/* Both forms of 64 rows that the bf16 products take. */
static void pack_fast(const qkv__backward *j, uint32_t *along, uint32_t *across, int64_t pitch, const void *rows, int n, int64_t d,
                      qkv__gradient_work *w) {
  const int64_t padded = qkv__padded(d, QKV__FAST_K);
  j->g.fast->round(w->half, padded, rows, pitch, n, d);
  j->g.fast->pack(along, w->half, padded, QKV_BLOCK, d, QKV_BLOCK / j->g.k->lanes);
  j->g.fast->pairs(across, pitch, w->half, padded, pitch);
}

void qkv__row_block_load(const qkv__backward *j, const qkv__entry *e, int64_t head, int64_t row, qkv__row_block *q,
                         qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  qkv__row_block_sums(j, e, head, row, q, w);
  load_rows(j, q->Q, j->ld, &p->q, e->batch_q, head, e->row0_q + row, q->rows, p->head_dim);
  pack(j, q->Qt, q->Q, j->ld, q->rows, p->head_dim, j->g.p->c);
  q->finite = needs_no_check(j) || (j->g.k->finite(q->Q, j->ld, q->rows, p->head_dim) &&
                                                    j->g.k->finite(q->dO, j->ldv, q->rows, p->head_dim_v));
  if (j->g.fast) {
    pack_fast(j, q->Qp, q->Qr, j->ld, q->Q, q->rows, p->head_dim, w);
    pack_fast(j, q->dOp, q->dOr, j->ldv, q->dO, q->rows, p->head_dim_v, w);
  }
  if (q->slope2) {
    const double slope2 = qkv__parameter(&p->alibi_slopes, e->b, head) * QKV_LOG2E;
    for (int i = 0; i < QKV_BLOCK; i++) put(j, q->slope2, i, slope2);
  }
  for (int i = 0; i < QKV_BLOCK; i++) q->position[i] = (double)(e->position_q + row + i);
  if (q->dQ) memset(q->dQ, 0, (size_t)(QKV_BLOCK * j->ld) * real_bytes(j));
}

void qkv__key_block_load(const qkv__backward *j, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__key_block *k,
                         qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  const qkv__kernel *kernel = j->g.k;
  const size_t size = real_bytes(j), bytes_k = qkv__dtype_bytes(p->k.dtype), bytes_v = qkv__dtype_bytes(p->v.dtype);
  const int staged = (j->g.flags & QKV_FORCE_STAGE) != 0;
  const void *K = qkv__at(&p->k, bytes_k, e->batch_kv, kv_head, e->row0_kv + key, 0);
  const void *V = qkv__at(&p->v, bytes_v, e->batch_kv, kv_head, e->row0_kv + key, 0);
  k->key = key;
  k->keys = keys;
  k->K = w->K;
  k->V = w->V;
  k->ldk = j->ld;
  k->ldv = j->ldv;
  /* in place if whole vectors can be read, and not at a pitch where the rows push each other out of the first cache */
  if (qkv__stage_direct(kernel, &p->k) && !staged && p->head_dim == j->ld && (uintptr_t)K % 64 == 0 &&
      (size_t)p->k.stride[2] * size % 64 == 0 && (size_t)p->k.stride[2] * size % 2048) {
    k->K = K;
    k->ldk = p->k.stride[2];
  } else
    qkv__stage_load(kernel, w->K, j->ld, &p->k, K, keys, p->head_dim);
  if (qkv__stage_direct(kernel, &p->v) && !staged && (size_t)p->v.stride[2] * size % 2048) {
    k->V = V;
    k->ldv = p->v.stride[2];
  } else
    qkv__stage_load(kernel, w->V, j->ldv, &p->v, V, keys, p->head_dim_v);
  k->finite = needs_no_check(j) || kernel->finite(k->K, k->ldk, keys, p->head_dim);
  if (!j->g.fast) return;
  k->finite &= kernel->finite(k->V, k->ldv, keys, p->head_dim_v);
  if (!k->finite) return;
  const int64_t d = qkv__padded(p->head_dim, QKV__FAST_K);
  j->g.fast->round(w->Kb, d, k->K, k->ldk, keys, p->head_dim);
  j->g.fast->round(w->Vb, qkv__padded(p->head_dim_v, QKV__FAST_K), k->V, k->ldv, keys, p->head_dim_v);
  j->g.fast->pairs(w->Kr, j->ld, w->Kb, d, j->ld);
}

/* ---- A tile ---- */

enum { GROUP = 8, GROUPS = QKV_BLOCK / GROUP };

/* What of a tile is computed: rows that see something, for each group of 8 keys; widened to whole panels where scores are formed. */
typedef struct tile {
  int whole, some, selecting; /* all pairs; bits count; products of invisible pairs must not be formed */
  uint64_t bits[QKV_BLOCK];
  uint64_t seen[GROUPS];
} tile;

static int look(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, tile *t) {
  const uint32_t forced = j->g.flags & (QKV_FORCE_PARTIAL | QKV_FORCE_SELECT);
  const uint64_t all = ones(q->rows);
  const qkv__rows r = {j->g.p, e, q->head, q->row, q->rows};
  const int32_t answer = j->g.p->p.mask_count ? qkv__mask_tile(&r, k->key, k->keys, t->bits) : QKV_TILE_ALL;
  if (answer == QKV_TILE_NONE) return 0;
  t->some = answer == QKV_TILE_SOME || forced;
  t->selecting = (t->some || j->g.p->p.bias.data) && (!q->finite || !k->finite || (forced & QKV_FORCE_SELECT));
  if (answer == QKV_TILE_ALL)
    for (int i = 0; i < k->keys; i++) t->bits[i] = all;
  for (int i = 0; i < GROUPS; i++) {
    t->seen[i] = 0;
    for (int n = i * GROUP; n < QKV_MIN(k->keys, (i + 1) * GROUP); n++) {
      t->bits[n] &= all;
      t->seen[i] |= t->bits[n];
    }
    if (i * GROUP < k->keys && (j->g.flags & QKV_NO_SKIP)) t->seen[i] = all;
  }
  t->whole = !t->some;
  return 1;
}

/* Bias of rows of a panel, keys major; hides where it is -inf, if bits are needed at all. */
static void load_bias(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, int row, int n,
                      int nv, tile *t, qkv__gradient_work *w) {
  const qkv_tensor *b = &j->g.p->p.bias;
  const int width = nv * j->g.k->lanes;
  qkv__stage_load(j->g.k, w->bias_rows, QKV_BLOCK, b, qkv__at(b, qkv__dtype_bytes(b->dtype), e->b, q->head, q->row + row, k->key), n,
                  k->keys);
  j->g.k->pack(w->bias, w->bias_rows, QKV_BLOCK, n, k->keys, nv, 1);
  if (!t->selecting) return;
  for (int i = 0; i < k->keys; i++)
    for (int r = 0; r < n; r++) {
      const int64_t x = i * width + r;
      const double value = j->g.p->f64 ? ((const double *)w->bias)[x] : (double)((const float *)w->bias)[x];
      if (value == (double)-INFINITY) t->bits[i] &= ~((uint64_t)1 << (row + r));
    }
}

static void kept_bits(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, int row, int from,
                      int to, int nv, uint64_t *kept) {
  const qkv_problem *p = &j->g.p->p;
  uint32_t position[QKV_BLOCK], head[QKV_BLOCK];
  const qkv__dropout d = {j->g.p->drop, {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)}, (uint32_t)p->offset,
                          (uint32_t)qkv__position_of_key(e, k->key), position, head};
  const qkv__runs runs = {1, 0, {{from, to}}};
  for (int i = 0; i < nv * j->g.k->lanes; i++) {
    position[i] = (uint32_t)(e->position_q + q->row + row + i);
    head[i] = qkv__dropout_word(p, e->b, q->head);
  }
  j->g.k->kept(kept, &runs, &d, nv);
}

/* Rows [row0, row1) of S and D for keys [from, to) become 0. */
static void clear(const qkv__backward *j, qkv__gradient_work *w, int row0, int row1, int from, int to) {
  for (int i = from; i < to; i++) {
    memset(at(j, w->S, i * QKV_BLOCK + row0), 0, (size_t)(row1 - row0) * real_bytes(j));
    memset(at(j, w->D, i * QKV_BLOCK + row0), 0, (size_t)(row1 - row0) * real_bytes(j));
  }
}

/* What the rows of one panel see. */
typedef struct view {
  int row, nv;
  uint64_t bits[QKV_BLOCK], kept[QKV_BLOCK];
  qkv__adjust adjust;
  qkv__grade grade;
} view;

static int is_modified(const qkv_problem *p) { return p->softcap > 0 || p->bias.data || p->alibi_slopes.data; }

static void view_of(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, int panel,
                    int before_cap, tile *t, qkv__gradient_work *w, view *v) {
  const qkv_problem *p = &j->g.p->p;
  const int row = v->row = j->panel_row[panel], nv = v->nv = j->panel_nv[panel];
  if (p->bias.data) load_bias(j, e, q, k, row, QKV_MIN(q->rows - row, nv * j->g.k->lanes), nv, t, w);
  for (int x = 0; t->some && x < k->keys; x++) v->bits[x] = t->bits[x] >> row;
  v->adjust.softcap_g = p->softcap > 0 ? j->g.p->g : 0;
  v->adjust.bias = w->bias;
  v->adjust.slope2 = q->slope2 ? at(j, q->slope2, row) : NULL;
  v->adjust.position = q->position + row;
  v->adjust.key_position = (double)qkv__position_of_key(e, k->key);
  v->adjust.bits = t->some ? v->bits : NULL;
  v->grade.adjust = is_modified(p) || t->some ? &v->adjust : NULL;
  v->grade.kept = p->dropout > 0 ? v->kept : NULL;
  v->grade.r = j->g.p->r;
  v->grade.L2 = at(j, q->L2, row);
  v->grade.delta = at(j, q->delta, row);
  v->grade.before_cap = before_cap;
}

/* S and dP of keys [from, to) become weights and dX. */
static void grade(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, int from, int to, view *v,
                  qkv__gradient_work *w) {
  if (v->grade.kept) kept_bits(j, e, q, k, v->row, from, to, v->nv, v->kept);
  j->g.k->grade(at(j, w->S, v->row), at(j, w->D, v->row), from, to, &v->grade, v->nv);
}

/* Pv in S and dX (or dS) in D of the pairs that the tile computes, 0 elsewhere. */
static void weights(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, int before_cap,
                    tile *t, qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  const qkv__kernel *kernel = j->g.k;
  const int plain = t->whole && !is_modified(p) && p->dropout == 0 && !q->empty;
  for (int i = 0; i < j->panels && j->panel_row[i] < q->rows; i++) {
    view v;
    view_of(j, e, q, k, i, before_cap, t, w, &v);
    const int row = v.row, width = v.nv * kernel->lanes;
    const uint64_t own = ones(QKV_MIN(q->rows - row, width)) << row;
    void *S = at(j, w->S, row), *D = at(j, w->D, row);
    void *Qt = at(j, q->Qt, row * p->head_dim), *dOt = at(j, q->dOt, row * p->head_dim_v);
    for (int group = 0; group * GROUP < k->keys;) {
      const int from = group * GROUP, computed = (t->seen[group] & own) != 0;
      while (group * GROUP < k->keys && ((t->seen[group] & own) != 0) == computed) group++;
      const int to = QKV_MIN(group * GROUP, k->keys);
      if (!computed) {
        clear(j, w, row, row + width, from, to);
        continue;
      }
      kernel->scores(Qt, p->head_dim, k->K, k->ldk, from, to, S, v.nv);
      if (plain) {
        kernel->grade_plain(dOt, p->head_dim_v, k->V, k->ldv, from, to, S, D, v.grade.L2, v.grade.delta, j->g.fuse, v.nv);
        continue;
      }
      kernel->scores(dOt, p->head_dim_v, k->V, k->ldv, from, to, D, v.nv);
      grade(j, e, q, k, from, to, &v, w);
    }
  }
}

/* The five products in bf16. Rows and keys that do not exist are 0 in one operand of each. */
static void fast_tile(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k, tile *t,
                      qkv__gradient_work *w) {
  const qkv_problem *p = &j->g.p->p;
  const qkv__fast *fast = j->g.fast;
  const int64_t d = qkv__padded(p->head_dim, QKV__FAST_K), dv = qkv__padded(p->head_dim_v, QKV__FAST_K);
  fast->product(w->S, QKV_BLOCK, w->Kb, d, QKV_BLOCK, d, q->Qp, QKV_BLOCK, QKV_BLOCK, 0);
  fast->product(w->D, QKV_BLOCK, w->Vb, dv, QKV_BLOCK, dv, q->dOp, QKV_BLOCK, QKV_BLOCK, 0);
  fast->multiply(w->S, j->g.p->c);
  for (int i = 0; i < j->panels && j->panel_row[i] < q->rows; i++) {
    view v;
    view_of(j, e, q, k, i, 1, t, w, &v);
    grade(j, e, q, k, 0, k->keys, &v, w);
  }
  if (k->dV) {
    fast->round(w->half, QKV_BLOCK, w->S, QKV_BLOCK, k->keys, QKV_BLOCK);
    fast->product(k->dV, j->ldv, w->half, QKV_BLOCK, QKV_BLOCK, QKV_BLOCK, q->dOr, j->ldv, j->ldv, 1);
  }
  if (!k->dK && !q->dQ) return;
  fast->round(w->half, QKV_BLOCK, w->D, QKV_BLOCK, k->keys, QKV_BLOCK);
  if (k->dK) fast->product(k->dK, j->ld, w->half, QKV_BLOCK, QKV_BLOCK, QKV_BLOCK, q->Qr, j->ld, j->ld, 1);
  if (!q->dQ) return;
  fast->turn(w->turned, w->half);
  fast->product(q->dQ, j->ld, w->turned, QKV_BLOCK, QKV_BLOCK, QKV_BLOCK, w->Kr, j->ld, j->ld, 1);
}

/* dV or dK += A^T B */
static void add_to_keys(const qkv__backward *j, const qkv__row_block *q, const qkv__key_block *k, const tile *t, void *C, int64_t ld,
                        const void *A, const void *B) {
  if (t->selecting)
    j->g.k->add_seen(C, ld, 0, k->keys, A, 0, 0, q->rows, B, ld, t->bits);
  else if (t->whole)
    j->g.k->add(C, ld, 0, k->keys, A, 0, 0, q->rows, B, ld);
  else
    for (int i = 0; i * GROUP < k->keys; i++) {
      if (!t->seen[i]) continue;
      const int low = QKV_CTZ64(t->seen[i]) / GROUP * GROUP, high = QKV_MIN(q->rows, (63 - QKV_CLZ64(t->seen[i])) / GROUP * GROUP + GROUP);
      j->g.k->add(C, ld, i * GROUP, QKV_MIN(k->keys, (i + 1) * GROUP), A, 0, low, high, B, ld);
    }
}

/* dQ += D^T K */
static void add_to_rows(const qkv__backward *j, const qkv__row_block *q, const qkv__key_block *k, const tile *t, const void *D) {
  if (t->selecting)
    j->g.k->add_seen(q->dQ, j->ld, 0, q->rows, D, 1, 0, k->keys, k->K, k->ldk, t->bits);
  else if (t->whole)
    j->g.k->add(q->dQ, j->ld, 0, q->rows, D, 1, 0, k->keys, k->K, k->ldk);
  else
    for (int row = 0; row < q->rows; row += GROUP) {
      int low = -1, high = 0;
      for (int i = 0; i * GROUP < k->keys; i++)
        if (t->seen[i] >> row & ones(GROUP)) {
          if (low < 0) low = i * GROUP;
          high = QKV_MIN(k->keys, (i + 1) * GROUP);
        }
      if (low >= 0) j->g.k->add(q->dQ, j->ld, row, QKV_MIN(q->rows, row + GROUP), D, 1, low, high, k->K, k->ldk);
    }
}

void qkv__gradient_tile(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k,
                        qkv__gradient_work *w) {
  tile t;
  if (!look(j, e, q, k, &t)) return;
  if (j->g.fast && q->finite && k->finite) {
    fast_tile(j, e, q, k, &t, w);
    return;
  }
  weights(j, e, q, k, 1, &t, w);
  if (k->dV) add_to_keys(j, q, k, &t, k->dV, j->ldv, w->S, q->dO);
  if (k->dK) add_to_keys(j, q, k, &t, k->dK, j->ld, w->D, q->Q);
  if (q->dQ) add_to_rows(j, q, k, &t, w->D);
}

int qkv__gradient_scores(const qkv__backward *j, const qkv__entry *e, const qkv__row_block *q, const qkv__key_block *k,
                         qkv__gradient_work *w) {
  tile t;
  if (!look(j, e, q, k, &t)) return 0;
  weights(j, e, q, k, 0, &t, w);
  for (int i = 0; i < q->rows; i++)
    for (int x = 0; x < k->keys; x++)
      memcpy(at(j, w->S, i * QKV_BLOCK + x), at(j, w->D, x * QKV_BLOCK + i), real_bytes(j));
  return 1;
}

void qkv__gradient_store(const qkv__backward *j, const qkv_tensor *t, int accumulate, void *to, const void *from, int64_t ld, int64_t n,
                         int64_t d, double scale, qkv__gradient_work *w) {
  const int direct = qkv__stage_direct(j->g.k, t);
  if (!from) {
    from = w->Ot;
    ld = d;
    memset(w->Ot, 0, (size_t)(n * d) * real_bytes(j));
  }
  if (accumulate) qkv__stage_load(j->g.k, w->old, d, t, to, n, d);
  j->g.k->gradient(direct ? to : w->rows, direct ? t->stride[2] : d, from, ld, n, d, scale, accumulate ? w->old : NULL);
  if (!direct) qkv__stage_store(j->g.k, t, to, w->rows, d, n, d);
}

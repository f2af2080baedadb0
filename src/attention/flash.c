#include "attention/flash.h"

#include "base/order1.h"

/* A panel on its way through the keys. */
typedef struct lane {
  qkv__panel panel;
  qkv__tree tree;
  qkv__tree_node node; /* the split being filled; node.at.index is -1 before the first */
  int fresh;           /* nothing accumulated in node.O yet */
  int64_t next;        /* no key before this one is visible */
} lane;

/* A block of keys of one panel between its scores and its values. */
typedef struct step {
  lane *of;
  int keys, partial, selecting;
  int64_t key;
  qkv__runs runs;
  uint64_t bits[64];
  qkv__values V;
  void *S, *z, *alpha;
} step;

typedef struct worker {
  lane *lanes;
  qkv__stage stage;
  step steps[2];
  void *M, *L;
  void *K, *V[2]; /* staged blocks */
  uint32_t *P;    /* of QKV_FAST: weights of a block */
} worker;

static void carve(const qkv__engine *g, const qkv__schedule *s, qkv__carver *c, worker *w) {
  const qkv_problem *p = &g->p->p;
  const size_t size = (size_t)g->k->real_bytes;
  const int64_t width = g->w;
  w->lanes = qkv__carve(c, s->panels, sizeof *w->lanes);
  for (int64_t i = 0; i < s->panels; i++) {
    lane none, *l = w->lanes ? &w->lanes[i] : &none;
    qkv__panel_carve(g, c, &l->panel, 1);
    for (int64_t n = 0; n < s->spares; n++) {
      qkv__tree_node *spare = &l->tree.spare[n];
      spare->O = qkv__carve(c, qkv__padded(p->head_dim_v, g->fast ? QKV__FAST_M : 1) * width, size);
      spare->m = qkv__carve(c, width, size);
      spare->l = qkv__carve(c, width, size);
    }
    l->tree.spares = (int)s->spares;
  }
  qkv__stage_carve(g, c, &w->stage);
  for (int i = 0; i < 2; i++) {
    w->steps[i].S = qkv__carve(c, QKV_BLOCK * width, size);
    w->steps[i].z = qkv__carve(c, width, size);
    w->steps[i].alpha = qkv__carve(c, width, size);
    w->V[i] = qkv__carve(c, qkv__packed_values(p->head_dim_v), size);
  }
  w->M = qkv__carve(c, width, size);
  w->L = qkv__carve(c, width, size);
  w->K = qkv__carve(c, QKV_BLOCK * qkv__padded(p->head_dim, g->fast ? QKV__FAST_K : 1), size);
  w->P = g->fast ? qkv__carve(c, QKV_BLOCK / 2 * width, 4) : NULL;
}

size_t qkv__flash_worker_bytes(const qkv__engine *g, const qkv__schedule *s) {
  qkv__carver c = {NULL, 0, 0};
  worker w;
  carve(g, s, &c, &w);
  return c.overflow ? SIZE_MAX : c.used;
}

static void begin_split(const qkv__engine *g, lane *l, int64_t split) {
  if (l->node.at.index >= 0) qkv__tree_push(&l->tree, l->node, g->k, g->p->p.head_dim_v, l->panel.nv);
  l->node = qkv__tree_take(&l->tree);
  l->node.at.level = 0;
  l->node.at.index = split;
  qkv__clear_sums(g, &l->node, l->panel.w);
  l->fresh = 1;
}

/* The weights of a step are in S. */
static void values(const qkv__engine *g, const qkv__entry *e, step *s) {
  lane *l = s->of;
  if (g->p->p.dropout > 0) qkv__panel_drop(g, e, &l->panel, s->key, &s->runs, s->S);
  g->k->pv(s->S, s->V.rows, s->V.ld, s->V.strip, g->p->p.head_dim_v, &s->runs, s->selecting ? s->bits : NULL, l->node.O,
           l->fresh ? NULL : s->alpha, l->panel.nv);
  l->fresh = 0;
  s->of = NULL;
}

static void flush(const qkv__engine *g, const qkv__entry *e, worker *w, step *s) {
  if (!s->of) return;
  g->k->exp(s->S, &s->runs, s->z, w->L, s->of->panel.nv);
  g->k->sum(s->of->node.l, s->alpha, w->L, s->of->panel.nv);
  values(g, e, s);
}

/* Begins the split that the block lies in, if its panel is not there yet. */
static void enter_split(const qkv__engine *g, const qkv__entry *e, worker *w, step *before, step *now) {
  lane *l = now->of;
  const int64_t split = qkv__position_of_key(e, now->key) / QKV_SPLIT;
  if (l->node.at.index == split) return;
  if (before->of == l) flush(g, e, w, before);
  begin_split(g, l, split);
}

/* Scores, softmax and values of `now` by the instructions of QKV_FAST. Blocks are whole: keys beyond the end are hidden. */
static void advance_fast(const qkv__engine *g, const qkv__entry *e, worker *w, step *now, const uint16_t *K, int64_t ldk, int64_t kv_head,
                         int not_finite) {
  const qkv_problem *p = &g->p->p;
  lane *l = now->of;
  const int nv = l->panel.nv;
  qkv__adjust a;
  if (!now->partial && now->keys < QKV_BLOCK) {
    qkv__panel_all_bits(&l->panel, now->keys, now->bits);
    now->partial = 1;
  }
  now->runs.count = now->runs.full = 1;
  now->runs.run[0].from = 0;
  now->runs.run[0].to = QKV_BLOCK;
  uint64_t *bits = now->partial ? now->bits : NULL;
  const int adjusts = qkv__panel_adjust(g, e, &l->panel, now->key, now->keys, bits, &w->stage, &a);
  if (not_finite && p->bias.data) {
    if (!bits) qkv__panel_all_bits(&l->panel, now->keys, bits = now->bits);
    qkv__panel_hide(g, &l->panel, &w->stage, now->keys, bits);
  }
  g->fast->product(now->S, l->panel.w, K, ldk, QKV_BLOCK, qkv__padded(p->head_dim, QKV__FAST_K), l->panel.Qt, l->panel.w, l->panel.w, 0);
  g->fast->scale(now->S, g->p->c, l->node.m, w->M, nv);
  if (adjusts) g->k->adjust(now->S, &now->runs, &a, l->node.m, w->M, nv);
  g->fast->softmax(now->S, w->P, l->node.m, w->M, l->node.l, now->alpha, nv);
  if (!l->fresh) g->fast->rescale(l->node.O, now->alpha, p->head_dim_v, nv);
  g->fast->product(l->node.O, l->panel.w, w->V[0], QKV_BLOCK, qkv__padded(p->head_dim_v, QKV__FAST_M), QKV_BLOCK, w->P, l->panel.w, l->panel.w,
                   !l->fresh);
  if (not_finite) qkv__add_not_finite(g, e, kv_head, now->key, now->keys, &l->panel, bits, w->P, l->node.O);
  l->fresh = 0;
  now->of = NULL;
}

/* Scores, softmax and values of `now`; or, fused, the scores of `now` and beside them the softmax of `before`, then its
 * values. */
static void advance(const qkv__engine *g, const qkv__entry *e, worker *w, step *before, step *now, const void *K,
                    int64_t ldk) {
  const qkv_problem *p = &g->p->p;
  const qkv__kernel *k = g->k;
  lane *l = now->of;
  const int nv = l->panel.nv;
  qkv__adjust a;
  const int adjusts =
      qkv__panel_adjust(g, e, &l->panel, now->key, now->keys, now->partial ? now->bits : NULL, &w->stage, &a);
  if (now->selecting && p->bias.data) qkv__panel_hide(g, &l->panel, &w->stage, now->keys, now->bits);
  if (!g->fuse) {
    k->qk(l->panel.Qt, p->head_dim, K, ldk, &now->runs, now->S, l->node.m, adjusts ? NULL : w->M, nv);
    if (adjusts) k->adjust(now->S, &now->runs, &a, l->node.m, w->M, nv);
    k->softmax(now->S, &now->runs, l->node.m, w->M, l->node.l, now->alpha, nv);
    values(g, e, now);
    return;
  }
  const int fused = before->of && before->runs.full && now->runs.full && before->of->panel.nv == nv;
  if (fused)
    k->qk_exp(l->panel.Qt, p->head_dim, K, ldk, now->S, l->node.m, w->M, before->S, before->z, w->L, nv);
  else {
    if (before->of) k->exp(before->S, &before->runs, before->z, w->L, before->of->panel.nv);
    k->qk(l->panel.Qt, p->head_dim, K, ldk, &now->runs, now->S, l->node.m, adjusts ? NULL : w->M, nv);
  }
  if (adjusts) k->adjust(now->S, &now->runs, &a, l->node.m, w->M, nv);
  k->rescale(l->node.m, w->M, now->z, now->alpha, nv);
  if (before->of) {
    k->sum(before->of->node.l, before->alpha, w->L, before->of->panel.nv);
    values(g, e, before);
  }
}

static void run(const qkv__flash *f, int64_t index, worker *w) {
  const qkv__engine *g = &f->g;
  const qkv_problem *p = &g->p->p;
  qkv__task t;
  qkv__schedule_task(g, &f->s, index, &t);
  const qkv__entry *e = &t.e;
  if (t.first && !f->state) qkv__store_dead_rows(g, e, t.kv_head);
  const int64_t panels = (t.f1 - t.f0 + g->w - 1) / g->w;

  /* the keys of this task */
  int64_t begin = e->b0, end = e->b1;
  if (f->state) {
    const qkv_node n = f->state->nodes[t.node];
    begin = QKV_MAX(begin, qkv__key_of_position(e, (n.index << n.level) * QKV_SPLIT));
    end = QKV_MIN(end, qkv__key_of_position(e, ((n.index + 1) << n.level) * QKV_SPLIT));
  }

  if (g->fast) g->fast->enter();
  for (int64_t i = 0; i < panels; i++) {
    lane *l = &w->lanes[i];
    const int64_t row = t.f0 + i * g->w;
    qkv__panel_load(g, e, t.kv_head, row, QKV_MIN(g->w, t.f1 - row), &l->panel, &w->stage);
    l->node.at.index = -1;
    l->tree.depth = 0;
    l->next = begin < end ? qkv__panel_next(g, e, &l->panel, begin, end) : end;
  }

  int turn = 0, staged = 0;
  w->steps[0].of = w->steps[1].of = NULL;
  for (int64_t key = begin; key < end;) {
    int64_t at = end;
    for (int64_t i = 0; i < panels; i++) at = QKV_MIN(at, w->lanes[i].next);
    if (at >= end) break;
    /* the block that holds key `at`, within this task's keys */
    const int64_t position = qkv__position_of_key(e, at) / QKV_BLOCK * QKV_BLOCK;
    key = QKV_MAX(begin, qkv__key_of_position(e, position));
    const int64_t key_end = QKV_MIN(end, qkv__key_of_position(e, position + QKV_BLOCK));
    const int keys = (int)(key_end - key);
    const void *K = NULL;
    int64_t ldk = 0;
    qkv__values V = {0};
    int finite = -1;
    for (int64_t i = 0; i < panels; i++) {
      lane *l = &w->lanes[i];
      if (l->next >= key_end) continue;
      step *now = &w->steps[turn], *before = &w->steps[!turn];
      const int32_t seen = qkv__panel_visible(g, e, &l->panel, key, keys, now->bits, &now->runs);
      l->next = key_end < end ? qkv__panel_next(g, e, &l->panel, key_end, end) : end;
      if (seen == QKV_TILE_NONE) continue;
      if (!K && g->fast) {
        const uint16_t *rows;
        ldk = qkv__block_keys_fast(g, e, t.kv_head, key, keys, &w->stage, w->K, &rows);
        finite = !qkv__block_values_fast(g, e, t.kv_head, key, keys, &w->stage, w->V[0]);
        K = rows;
      } else if (!K) {
        ldk = qkv__block_keys(g, e, t.kv_head, key, keys, w->K, &K);
        qkv__block_values(g, e, t.kv_head, key, keys, panels, w->V[staged], &V);
        staged = !staged;
      }
      now->partial = seen == QKV_TILE_SOME;
      now->of = l;
      now->key = key;
      now->keys = keys;
      enter_split(g, e, w, before, now);
      if (g->fast) {
        advance_fast(g, e, w, now, K, ldk, t.kv_head, !finite);
        continue;
      }
      if ((now->partial || p->bias.data) && finite < 0) finite = qkv__values_finite(g, &V, keys);
      now->selecting = (now->partial || p->bias.data) && (!finite || (g->flags & QKV_FORCE_SELECT));
      if (now->selecting && !now->partial) qkv__panel_all_bits(&l->panel, keys, now->bits);
      now->V = V;
      advance(g, e, w, before, now, K, ldk);
      if (g->fuse) turn = !turn;
    }
    key = key_end;
  }
  flush(g, e, w, &w->steps[!turn]);
  if (g->fast) g->fast->leave();

  for (int64_t i = 0; i < panels; i++) {
    lane *l = &w->lanes[i];
    if (l->node.at.index >= 0) qkv__tree_push(&l->tree, l->node, g->k, p->head_dim_v, l->panel.nv);
    qkv__tree_root(&l->tree, g->k, p->head_dim_v, l->panel.nv);
    qkv__tree_node root = l->tree.depth ? l->tree.stack[0] : qkv__tree_take(&l->tree);
    if (!l->tree.depth) qkv__clear_node(g, &root, l->panel.w);
    if (f->state)
      qkv__panel_to_state(g, e, &l->panel, &root, f->state, t.node, &w->stage);
    else
      qkv__panel_finish(g, e, &l->panel, &root, &w->stage);
  }
}

void qkv__flash_task(void *arg, int64_t index, int32_t worker_index) {
  const qkv__flash *f = arg;
  qkv__carver c = {f->worker_memory + (size_t)worker_index * f->worker_bytes, 0, 0};
  worker w;
  if (f->s.grain == 1) {
    carve(&f->g, &f->s, &c, &w);
    run(f, index, &w);
    return;
  }
  const int64_t end = QKV_MIN((index + 1) * f->s.grain, f->s.row_tasks);
  for (int64_t i = index * f->s.grain; i < end; i++) {
    c.used = 0;
    carve(&f->g, &f->s, &c, &w); /* the trees begin full of spare nodes */
    run(f, i, &w);
  }
}

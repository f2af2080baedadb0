#include "attention/panel.h"

#include <math.h>
#include <string.h>

#include "base/half.h"
#include "base/log2.h"
#include "base/order1.h"
#include "stage/stage.h"

static size_t real_bytes(const qkv__engine *g) { return (size_t)g->k->real_bytes; }
static void put(const qkv__engine *g, void *to, int64_t i, double x) {
  if (g->p->f64)
    ((double *)to)[i] = x;
  else
    ((float *)to)[i] = (float)x;
}
static double get(const qkv__engine *g, const void *from, int64_t i) {
  return g->p->f64 ? ((const double *)from)[i] : (double)((const float *)from)[i];
}

void qkv__panel_carve(const qkv__engine *g, qkv__carver *c, qkv__panel *panel, int with_q) {
  qkv__panel none, *to = panel ? panel : &none;
  to->segment = qkv__carve(c, g->w, sizeof *to->segment);
  to->Qt = with_q ? qkv__carve(c, qkv__padded(g->p->p.head_dim, g->fast ? QKV__FAST_K : 1) * g->w, real_bytes(g)) : NULL;
  to->slope2 = g->p->p.alibi_slopes.data ? qkv__carve(c, g->w, real_bytes(g)) : NULL;
  to->sink2 = g->p->p.sinks.data ? qkv__carve(c, g->w, real_bytes(g)) : NULL;
  to->position = qkv__carve(c, g->w, sizeof *to->position);
  to->drop_position = g->p->p.dropout > 0 ? qkv__carve(c, g->w, sizeof *to->drop_position) : NULL;
  to->drop_head = g->p->p.dropout > 0 ? qkv__carve(c, g->w, sizeof *to->drop_head) : NULL;
}

void qkv__stage_carve(const qkv__engine *g, qkv__carver *c, qkv__stage *s) {
  qkv__stage none, *to = s ? s : &none;
  to->rows = qkv__carve(c, QKV_MAX(g->p->p.head_dim, g->p->p.head_dim_v) * g->w, real_bytes(g));
  to->raw = g->fast ? qkv__carve(c, QKV_MAX(g->p->p.head_dim, g->p->p.head_dim_v) * QKV_MAX(QKV_BLOCK, g->w), 2) : NULL;
  to->bias_rows = g->p->p.bias.data ? qkv__carve(c, (int64_t)QKV_BLOCK * g->w, real_bytes(g)) : NULL;
  to->bias = g->p->p.bias.data ? qkv__carve(c, (int64_t)QKV_BLOCK * g->w, real_bytes(g)) : NULL;
}

/* 16-bit rows without unit stride, side by side. */
static void gather(uint16_t *to, const qkv_tensor *t, const void *from, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t x = 0; x < columns; x++)
      to[i * columns + x] = ((const uint16_t *)from)[i * t->stride[2] + x * t->stride[3]];
}

static void pack_fast(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, qkv__stage *s) {
  const qkv_problem *p = &g->p->p;
  for (int i = 0; i < panel->segments; i++) {
    const qkv__segment *t = &panel->segment[i];
    const uint16_t *from = (const uint16_t *)(const void *)qkv__at(&p->q, 2, e->batch_q, t->head, e->row0_q + t->row, 0);
    if (panel->segments == 1 && p->q.stride[3] == 1) {
      g->fast->pack(panel->Qt, from, p->q.stride[2], panel->lanes, p->head_dim, panel->nv);
      return;
    }
    gather(s->raw + t->lane * p->head_dim, &p->q, from, t->rows, p->head_dim);
  }
  g->fast->pack(panel->Qt, s->raw, p->head_dim, panel->lanes, p->head_dim, panel->nv);
}

int64_t qkv__padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

void qkv__panel_load(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t f, int64_t n, qkv__panel *panel,
                     qkv__stage *s) {
  const qkv_problem *p = &g->p->p;
  const size_t size = real_bytes(g);
  panel->nv = (int)((n + g->k->lanes - 1) / g->k->lanes);
  panel->w = panel->nv * g->k->lanes;
  panel->lanes = (int)n;
  panel->segments = 0;
  for (int lane = 0; lane < n;) {
    qkv__segment *t = &panel->segment[panel->segments++];
    t->head = kv_head * g->p->group + (f + lane) / e->nq;
    t->row = (f + lane) % e->nq;
    t->rows = (int)QKV_MIN(e->nq - t->row, n - lane);
    t->lane = lane;
    for (int i = 0; i < t->rows; i++, lane++) {
      panel->position[lane] = (double)(e->position_q + t->row + i);
      if (panel->drop_head) {
        panel->drop_position[lane] = (uint32_t)(e->position_q + t->row + i);
        panel->drop_head[lane] = qkv__dropout_word(p, e->b, t->head);
      }
      if (panel->slope2) put(g, panel->slope2, lane, qkv__parameter(&p->alibi_slopes, e->b, t->head) * QKV_LOG2E);
      if (panel->sink2) put(g, panel->sink2, lane, qkv__parameter(&p->sinks, e->b, t->head) * QKV_LOG2E);
    }
  }
  for (int lane = panel->lanes; lane < panel->w; lane++) {
    panel->position[lane] = 0;
    if (panel->drop_head) panel->drop_position[lane] = panel->drop_head[lane] = 0;
    if (panel->slope2) put(g, panel->slope2, lane, 0);
    if (panel->sink2) put(g, panel->sink2, lane, (double)-INFINITY);
  }
  if (!panel->Qt) return;
  if (g->fast) {
    pack_fast(g, e, panel, s);
    return;
  }
  const void *rows = s->rows;
  int64_t ld = p->head_dim;
  for (int i = 0; i < panel->segments; i++) {
    const qkv__segment *t = &panel->segment[i];
    const void *from = qkv__at(&p->q, qkv__dtype_bytes(p->q.dtype), e->batch_q, t->head, e->row0_q + t->row, 0);
    if (panel->segments == 1 && qkv__stage_direct(g->k, &p->q)) {
      rows = from;
      ld = p->q.stride[2];
    } else
      qkv__stage_load(g->k, (char *)s->rows + (size_t)(t->lane * p->head_dim) * size, p->head_dim, &p->q, from, t->rows,
                      p->head_dim);
  }
  g->k->pack(panel->Qt, rows, ld, n, p->head_dim, panel->nv, g->p->c);
}

static uint64_t ones(int n) { return n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1; }

static void whole(int keys, qkv__runs *runs) {
  runs->count = 1;
  runs->full = keys == QKV_BLOCK;
  runs->run[0].from = 0;
  runs->run[0].to = keys;
}

void qkv__panel_all_bits(const qkv__panel *panel, int keys, uint64_t *bits) {
  for (int j = 0; j < QKV_BLOCK; j++) bits[j] = j < keys ? ones(panel->lanes) : 0;
}

int32_t qkv__panel_visible(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int keys,
                           uint64_t *bits, qkv__runs *runs) {
  int32_t answer = QKV_TILE_ALL;
  whole(keys, runs);
  if (g->p->p.mask_count) {
    uint64_t part[64];
    for (int i = 0; i < panel->segments; i++) {
      const qkv__segment *t = &panel->segment[i];
      const qkv__rows r = {g->p, e, t->head, t->row, t->rows};
      const int32_t a = qkv__mask_tile(&r, key, keys, part);
      if (panel->segments == 1 && a != QKV_TILE_SOME) {
        answer = a;
        break;
      }
      if (i == 0) memset(bits, 0, 64 * sizeof *bits);
      answer = QKV_TILE_SOME;
      if (a == QKV_TILE_NONE) continue;
      for (int j = 0; j < keys; j++) bits[j] |= ((a == QKV_TILE_ALL ? ~(uint64_t)0 : part[j]) & ones(t->rows)) << t->lane;
    }
  }
  if (answer == QKV_TILE_ALL && (g->flags & (QKV_FORCE_PARTIAL | QKV_FORCE_SELECT))) {
    qkv__panel_all_bits(panel, keys, bits);
    answer = QKV_TILE_SOME;
  }
  if (answer != QKV_TILE_SOME) return answer;
  /* runs of eights with something visible */
  uint64_t all = ones(panel->lanes), any = 0;
  int n = 0, open = 0;
  for (int j = 0; j < keys; j += 8) {
    uint64_t seen = 0;
    for (int i = j; i < keys && i < j + 8; i++) {
      seen |= bits[i];
      all &= bits[i];
    }
    any |= seen;
    if (seen && !open) runs->run[n++].from = j;
    if (seen) runs->run[n - 1].to = QKV_MIN(j + 8, keys);
    open = seen != 0;
  }
  if (!any) return QKV_TILE_NONE;
  const int every = all == ones(panel->lanes) && !(g->flags & (QKV_FORCE_PARTIAL | QKV_FORCE_SELECT));
  if (every || (g->flags & QKV_NO_SKIP)) {
    whole(keys, runs);
    return every ? QKV_TILE_ALL : answer;
  }
  runs->count = n;
  runs->full = n == 1 && runs->run[0].from == 0 && runs->run[0].to == QKV_BLOCK;
  return answer;
}

int64_t qkv__panel_next(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int64_t end) {
  int64_t best = end;
  if (!g->p->p.mask_count) return key;
  for (int i = 0; i < panel->segments && best > key; i++) {
    const qkv__rows r = {g->p, e, panel->segment[i].head, panel->segment[i].row, panel->segment[i].rows};
    best = QKV_MIN(best, qkv__mask_next(&r, key, end));
  }
  return best;
}

int qkv__panel_adjust(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int keys,
                      const uint64_t *bits, qkv__stage *s, qkv__adjust *a) {
  const qkv_problem *p = &g->p->p;
  if (!bits && p->softcap == 0 && !p->bias.data && !p->alibi_slopes.data) return 0;
  a->softcap_g = p->softcap > 0 ? g->p->g : 0;
  a->bias = NULL;
  a->slope2 = panel->slope2;
  a->position = panel->position;
  a->key_position = (double)qkv__position_of_key(e, key);
  a->bits = bits;
  if (p->bias.data) {
    const void *rows = s->bias_rows;
    int64_t ld = QKV_BLOCK;
    for (int i = 0; i < panel->segments; i++) {
      const qkv__segment *t = &panel->segment[i];
      const void *from = qkv__at(&p->bias, qkv__dtype_bytes(p->bias.dtype), e->b, t->head, t->row, key);
      if (panel->segments == 1 && qkv__stage_direct(g->k, &p->bias)) {
        rows = from;
        ld = p->bias.stride[2];
      } else
        qkv__stage_load(g->k, (char *)s->bias_rows + (size_t)(t->lane * QKV_BLOCK) * real_bytes(g), QKV_BLOCK, &p->bias,
                        from, t->rows, keys);
    }
    g->k->pack(s->bias, rows, ld, panel->lanes, keys, panel->nv, 1);
    a->bias = s->bias;
  }
  return 1;
}

void qkv__panel_hide(const qkv__engine *g, const qkv__panel *panel, const qkv__stage *s, int keys, uint64_t *bits) {
  for (int j = 0; j < keys; j++)
    for (int i = 0; i < panel->lanes; i++)
      if (get(g, s->bias, j * panel->w + i) == (double)-INFINITY) bits[j] &= ~((uint64_t)1 << i);
}

void qkv__panel_drop(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, const qkv__runs *runs,
                     void *weights) {
  const qkv_problem *p = &g->p->p;
  const qkv__dropout d = {g->p->drop, {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)}, (uint32_t)p->offset,
                          (uint32_t)qkv__position_of_key(e, key), panel->drop_position, panel->drop_head};
  uint64_t kept[QKV_BLOCK];
  g->k->kept(kept, runs, &d, panel->nv);
  g->k->drop(weights, runs, kept, panel->nv);
}

static void store_lse(const qkv__engine *g, const qkv__entry *e, int64_t head, int64_t row, double value) {
  const qkv_tensor *t = &g->p->p.lse;
  void *at = qkv__at(t, qkv__dtype_bytes(t->dtype), e->batch_q, head, e->row0_q + row, 0);
  if (t->dtype == QKV_F64)
    *(double *)at = value;
  else
    *(float *)at = (float)value;
}

void qkv__panel_finish(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, qkv__tree_node *n,
                       qkv__stage *s) {
  const qkv_problem *p = &g->p->p;
  g->k->finish(n->O, n->m, n->l, panel->sink2, g->p->keep, p->head_dim_v, panel->nv);
  const int direct = panel->segments == 1 && qkv__stage_direct(g->k, &p->out);
  if (!direct) g->k->unpack(s->rows, p->head_dim_v, n->O, panel->lanes, p->head_dim_v, panel->nv);
  for (int i = 0; i < panel->segments; i++) {
    const qkv__segment *t = &panel->segment[i];
    void *to = qkv__at(&p->out, qkv__dtype_bytes(p->out.dtype), e->batch_q, t->head, e->row0_q + t->row, 0);
    if (direct)
      g->k->unpack(to, p->out.stride[2], n->O, panel->lanes, p->head_dim_v, panel->nv);
    else
      qkv__stage_store(g->k, &p->out, to, (char *)s->rows + (size_t)(t->lane * p->head_dim_v) * real_bytes(g), p->head_dim_v,
                       t->rows, p->head_dim_v);
    if (p->lse.data)
      for (int r = 0; r < t->rows; r++) {
        const double m = get(g, n->m, t->lane + r), l = get(g, n->l, t->lane + r);
        store_lse(g, e, t->head, t->row + r, l == 0 ? (double)-INFINITY : (m + qkv__log2_64(l)) * QKV_LN2 + 0.0);
      }
  }
}

void qkv__store_dead_rows(const qkv__engine *g, const qkv__entry *e, int64_t kv_head) {
  const qkv_problem *p = &g->p->p;
  for (int64_t h = kv_head * g->p->group; h < (kv_head + 1) * g->p->group; h++)
    for (int64_t i = e->nq; i < e->rows; i++) {
      for (int64_t x = 0; x < p->head_dim_v; x++) {
        void *at = qkv__at(&p->out, qkv__dtype_bytes(p->out.dtype), e->batch_q, h, e->row0_q + i, x);
        memset(at, 0, qkv__dtype_bytes(p->out.dtype));
      }
      if (p->lse.data) store_lse(g, e, h, i, (double)-INFINITY);
    }
}

void qkv__clear_node(const qkv__engine *g, qkv__tree_node *n, int w) {
  memset(n->O, 0, (size_t)(g->p->p.head_dim_v * w) * real_bytes(g));
  qkv__clear_sums(g, n, w);
}
void qkv__clear_sums(const qkv__engine *g, qkv__tree_node *n, int w) {
  for (int i = 0; i < w; i++) {
    put(g, n->m, i, (double)-INFINITY);
    put(g, n->l, i, 0);
  }
}

/* First row of a segment within a state. */
static int64_t state_row(const qkv__engine *g, const qkv__entry *e, const qkv__segment *t) {
  const qkv_problem *p = &g->p->p;
  return (e->batch_q * p->num_heads + t->head) * p->seqlen_q + e->row0_q + t->row;
}
static char *state_values(const qkv_state *s, int64_t index, size_t size) {
  return (char *)s->data + (size_t)(index * s->rows * (s->head_dim_v + 2)) * size;
}

void qkv__panel_to_state(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, const qkv__tree_node *n,
                         const qkv_state *s, int64_t index, qkv__stage *w) {
  const size_t size = real_bytes(g);
  const int64_t dv = s->head_dim_v;
  char *O = state_values(s, index, size), *m = O + (size_t)(s->rows * dv) * size, *l = m + (size_t)s->rows * size;
  g->k->unpack(w->rows, dv, n->O, panel->lanes, dv, panel->nv);
  for (int i = 0; i < panel->segments; i++) {
    const qkv__segment *t = &panel->segment[i];
    const int64_t row = state_row(g, e, t);
    memcpy(O + (size_t)(row * dv) * size, (char *)w->rows + (size_t)(t->lane * dv) * size, (size_t)(t->rows * dv) * size);
    for (int r = 0; r < t->rows; r++) {
      put(g, m, row + r, get(g, n->m, t->lane + r) + 0.0);
      put(g, l, row + r, get(g, n->l, t->lane + r));
    }
  }
}

void qkv__panel_from_state(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, qkv__tree_node *n,
                           const qkv_state *s, int64_t index, qkv__stage *w) {
  const size_t size = real_bytes(g);
  const int64_t dv = s->head_dim_v;
  const char *O = state_values(s, index, size), *m = O + (size_t)(s->rows * dv) * size, *l = m + (size_t)s->rows * size;
  for (int i = panel->lanes; i < panel->w; i++) {
    put(g, n->m, i, (double)-INFINITY);
    put(g, n->l, i, 0);
  }
  for (int i = 0; i < panel->segments; i++) {
    const qkv__segment *t = &panel->segment[i];
    const int64_t row = state_row(g, e, t);
    memcpy((char *)w->rows + (size_t)(t->lane * dv) * size, O + (size_t)(row * dv) * size, (size_t)(t->rows * dv) * size);
    memcpy((char *)n->m + (size_t)t->lane * size, m + (size_t)row * size, (size_t)t->rows * size);
    memcpy((char *)n->l + (size_t)t->lane * size, l + (size_t)row * size, (size_t)t->rows * size);
  }
  g->k->pack(n->O, w->rows, dv, panel->lanes, dv, panel->nv, 1);
}

int64_t qkv__block_keys(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, void *memory,
                        const void **rows) {
  const qkv_tensor *t = &g->p->p.k;
  const void *from = qkv__at(t, qkv__dtype_bytes(t->dtype), e->batch_kv, kv_head, e->row0_kv + key, 0);
  if (qkv__stage_direct(g->k, t) && !(g->flags & QKV_FORCE_STAGE)) {
    *rows = from;
    return t->stride[2];
  }
  qkv__stage_load(g->k, memory, g->p->p.head_dim, t, from, keys, g->p->p.head_dim);
  *rows = memory;
  return g->p->p.head_dim;
}

enum { STRIP = 8, PAD = 16 };

int64_t qkv__packed_values(int64_t head_dim_v) { return ((head_dim_v + STRIP - 1) / STRIP * STRIP + PAD) * QKV_BLOCK; }

void qkv__block_values(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, int64_t panels,
                       void *memory, qkv__values *v) {
  const qkv_tensor *t = &g->p->p.v;
  const size_t size = qkv__dtype_bytes(t->dtype);
  const int64_t dv = g->p->p.head_dim_v;
  const char *from = qkv__at(t, size, e->batch_kv, kv_head, e->row0_kv + key, 0);
  const int direct = qkv__stage_direct(g->k, t);
  /* at such a pitch the 64 lines of a tile fall into two sets of the first cache, or one, and push each other out */
  if (direct && !(panels >= 4 && t->stride[2] * (int64_t)size % 2048 == 0) && !(g->flags & QKV_FORCE_STAGE)) {
    v->rows = from;
    v->ld = t->stride[2];
    v->strip = STRIP;
    return;
  }
  v->rows = memory;
  if (direct) {
    v->ld = STRIP;
    v->strip = STRIP * QKV_BLOCK;
    g->k->strips(memory, from, t->stride[2], keys, dv);
    return;
  }
  v->ld = (dv + STRIP - 1) / STRIP * STRIP;
  if (v->ld * g->k->real_bytes % 512 == 0) v->ld += PAD;
  v->strip = STRIP;
  qkv__stage_load(g->k, memory, v->ld, t, from, keys, dv);
}

int64_t qkv__block_keys_fast(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__stage *s,
                             void *memory, const uint16_t **rows) {
  const qkv_tensor *t = &g->p->p.k;
  const int64_t d = g->p->p.head_dim;
  const uint16_t *from = (const uint16_t *)(const void *)qkv__at(t, 2, e->batch_kv, kv_head, e->row0_kv + key, 0);
  int64_t ld = t->stride[2];
  if (t->stride[3] == 1 && d % QKV__FAST_K == 0 && keys == QKV_BLOCK && !(g->flags & QKV_FORCE_STAGE)) {
    *rows = from;
    return ld;
  }
  if (t->stride[3] != 1) {
    gather(s->raw, t, from, keys, d);
    from = s->raw;
    ld = d;
  }
  g->fast->pad(memory, from, ld, keys, d);
  *rows = memory;
  return qkv__padded(d, QKV__FAST_K);
}

int qkv__block_values_fast(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__stage *s,
                           void *memory) {
  const qkv_tensor *t = &g->p->p.v;
  const int64_t dv = g->p->p.head_dim_v;
  const uint16_t *from = (const uint16_t *)(const void *)qkv__at(t, 2, e->batch_kv, kv_head, e->row0_kv + key, 0);
  if (t->stride[3] == 1) return g->fast->transpose(memory, from, t->stride[2], keys, dv);
  gather(s->raw, t, from, keys, dv);
  return g->fast->transpose(memory, s->raw, dv, keys, dv);
}

void qkv__add_not_finite(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, const qkv__panel *panel,
                         const uint64_t *bits, const uint32_t *P, float *O) {
  const qkv_tensor *t = &g->p->p.v;
  for (int j = 0; j < keys; j++)
    for (int64_t x = 0; x < g->p->p.head_dim_v; x++) {
      const uint16_t v = *(const uint16_t *)(const void *)qkv__at(t, 2, e->batch_kv, kv_head, e->row0_kv + key + j, x);
      if ((v & 0x7f80) != 0x7f80) continue;
      for (int i = 0; i < panel->lanes; i++)
        if (!bits || (bits[j] >> i & 1)) {
          const uint16_t p = (uint16_t)(P[j / 2 * panel->w + i] >> (j & 1 ? 16 : 0));
          O[x * panel->w + i] += qkv__widen_bf16(p) * qkv__widen_bf16(v);
        }
    }
}

int qkv__values_finite(const qkv__engine *g, const qkv__values *v, int keys) {
  const int64_t dv = g->p->p.head_dim_v;
  if (v->strip == STRIP) return g->k->finite(v->rows, v->ld, keys, dv);
  for (int64_t x = 0; x < dv; x += STRIP)
    if (!g->k->finite((const char *)v->rows + (size_t)(x / STRIP * v->strip) * real_bytes(g), v->ld, keys,
                      QKV_MIN(STRIP, dv - x)))
      return 0;
  return 1;
}

void qkv__fill(const qkv__engine *g, void *v, int n, double x) {
  for (int i = 0; i < n; i++) put(g, v, i, x);
}

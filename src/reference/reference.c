/* Order 1, row by row, in the words of docs/NUMERICS.md. Compiled twice: f32, and with QKV__F64 f64. */
#include "reference/reference.h"

#include <math.h>
#include <string.h>

#include "base/fma.h"
#include "base/half.h"
#include "base/log2.h"
#include "base/order1.h"
#include "base/philox.h"
#include "qkv/sparse.h"

#ifdef QKV__F64
typedef double real;
#define NAME(x)  qkv__reference_##x##_f64
#define FMA      qkv__fma64
#define REAL_MAX DBL_MAX
#define EXP2     QKV_EXP2_F64
#define EXP2_MIN QKV_EXP2_MIN_F64
#define TANH_MAX QKV_TANH_MAX_F64
#define TANH_N   QKV_TANH_N_F64
#define TANH_Q   QKV_TANH_Q_F64
#else
typedef float real;
#define NAME(x)  qkv__reference_##x##_f32
#define FMA      qkv__fma32
#define REAL_MAX FLT_MAX
#define EXP2     QKV_EXP2_F32
#define EXP2_MIN QKV_EXP2_MIN_F32
#define TANH_MAX QKV_TANH_MAX_F32
#define TANH_N   QKV_TANH_N_F32
#define TANH_Q   QKV_TANH_Q_F32
#endif

enum { LEVELS = 32 };
static const real NEG_INF = (real)-INFINITY;

/* ---- Functions ---- */

static real exp2_c(real x) {
  if (x < EXP2_MIN) return 0;
  if (x != x) return x;
  const real n = rint(x), f = x - n;
  real p = 0;
#define STEP(c) p = FMA(p, f, c);
  EXP2(STEP)
#undef STEP
  p = FMA(p, f, 1);
  return (real)ldexp(p, (int)n);
}

static real tanh_c(real x) {
  if (x > TANH_MAX) return 1;
  if (x < -TANH_MAX) return -1;
  const real y = x * x;
  real n = 0, q = 0;
#define STEP(c) n = FMA(n, y, c);
  TANH_N(STEP)
#undef STEP
  n = FMA(n, y, 1);
#define STEP(c) q = FMA(q, y, c);
  TANH_Q(STEP)
#undef STEP
  q = FMA(q, y, 1);
  return x * n / q;
}

/* ---- One row ---- */

typedef struct row {
  const qkv__problem *p;
  const qkv__entry *e;
  int64_t h, kv, i, position; /* position of the query */
} row;

static row make_row(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i) {
  row r = {p, e, h, h / p->group, i, e->position_q + i};
  return r;
}

/* STORAGE: widened exactly */
static real load(const qkv_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const void *at = qkv__at(t, qkv__dtype_bytes(t->dtype), i0, i1, i2, i3);
  switch (t->dtype) {
  case QKV_F64: return (real) * (const double *)at;
  case QKV_F16: return qkv__widen_f16(*(const uint16_t *)at);
  case QKV_BF16: return qkv__widen_bf16(*(const uint16_t *)at);
  default: return *(const float *)at;
  }
}
static real load_bias(const row *r, int64_t j) { return load(&r->p->p.bias, r->e->b, r->h, r->i, j); }

/* Whether a position is in the set of a term of keys or queries. */
static int in_set(const row *r, const qkv_mask *m, int64_t at) {
  if (!m->t.data) return m->a <= at && at < m->b;
  for (int64_t n = 0; n < m->a; n++)
    if (*(const int32_t *)(const void *)qkv__at(&m->t, 4, r->e->b, r->h, 0, n) == at) return at >= 0;
  return 0;
}

static int block_listed(const row *r, const qkv_block_map *map, int64_t at) {
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block;
  const int64_t list = (map->batch > 1 ? r->e->b : 0) * map->num_heads + (map->num_heads > 1 ? r->h : 0);
  if (r->position < 0) return 0;
  const int32_t *from = map->indptr + list * (rows + 1) + r->position / map->block;
  for (int32_t n = from[0]; n < from[1]; n++)
    if (map->indices[n] == at / map->block) return 1;
  return 0;
}

static int64_t remainder_of(int64_t a, int64_t b) { return (a % b + b) % b; }

static int term_visible(const row *r, const qkv_mask *m, int64_t j) {
  const qkv__entry *e = r->e;
  const int64_t at = e->position_k + j - e->b0, start = e->position_k + r->i - e->b0;
  switch (m->kind) {
  case QKV_MASK_CAUSAL: return at <= (m->a == QKV_ALIGN_START ? start : r->position);
  case QKV_MASK_WINDOW: return (m->a < 0 || r->position - at <= m->a) && (m->b < 0 || at - r->position <= m->b);
  case QKV_MASK_PREFIX: return at < m->a;
  case QKV_MASK_DOCUMENT: {
    const int64_t own = r->position - e->position_k + e->b0;
    const int32_t id = *(const int32_t *)(const void *)qkv__at(&m->t, 4, e->b, 0, 0, j);
    if (m->u.data) return id == *(const int32_t *)(const void *)qkv__at(&m->u, 4, e->b, 0, r->i, 0);
    return own >= e->b0 && own < e->b1 && id == *(const int32_t *)(const void *)qkv__at(&m->t, 4, e->b, 0, 0, own);
  }
  case QKV_MASK_DENSE: return j < m->a || *(const unsigned char *)qkv__at(&m->t, 1, e->b, r->h, r->i, j - m->a) != 0;
  case QKV_MASK_KEYS: return in_set(r, m, at);
  case QKV_MASK_QUERIES: return in_set(r, m, r->position);
  case QKV_MASK_CHUNK: {
    const int64_t chunks = at / m->a - (r->position - remainder_of(r->position, m->a)) / m->a;
    return -m->b <= chunks && chunks <= m->b;
  }
  case QKV_MASK_COLUMNS: return at % m->a >= m->a - m->b;
  case QKV_MASK_STRIDED: {
    const int64_t stride = m->t.data ? *(const int32_t *)(const void *)qkv__at(&m->t, 4, e->b, r->h, 0, 0) : m->a;
    const int64_t apart = at > r->position ? at - r->position : r->position - at;
    return apart % stride == 0 && (m->b < 0 || apart / stride <= m->b);
  }
  case QKV_MASK_BLOCKS: return block_listed(r, m->user, at);
  default: {
    const qkv_tile t = {e->b, r->h, r->i, 1, j, 1, r->position, at};
    uint64_t bits[64] = {0};
    const int32_t answer = m->fn(m->user, &t, bits);
    return answer == QKV_TILE_ALL || (answer != QKV_TILE_NONE && (bits[0] & 1));
  }
  }
}

/* visible(i,j) = mask(i,j) and bias(i,j) != -inf */
static int visible(const row *r, int64_t j) {
  const qkv_problem *p = &r->p->p;
  for (int64_t t = 0; t < p->mask_count;) {
    int any = 0;
    do {
      any = any || term_visible(r, &p->mask[t], j);
      t++;
    } while (t < p->mask_count && p->mask[t].join == QKV_OR);
    if (!any) return 0;
  }
  return !(p->bias.data && load_bias(r, j) == NEG_INF);
}

/* SCORE up to a stage, in log2 units (RAW under a softcap: in units of the cap) */
static real score(const row *r, int64_t j, int32_t stage) {
  const qkv_problem *p = &r->p->p;
  const qkv__entry *e = r->e;
  real a = 0;
  for (int64_t x = 0; x < p->head_dim; x++) {
    const real qc = load(&p->q, e->batch_q, r->h, e->row0_q + r->i, x) * (real)r->p->c;
    a = FMA(qc, load(&p->k, e->batch_kv, r->kv, e->row0_kv + j, x), a);
  }
  if (stage == QKV_SCORES_RAW) return a;
  if (p->softcap > 0) a = (real)r->p->g * tanh_c(a);
  if (stage == QKV_SCORES_CAPPED) return a;
  if (p->bias.data) {
    const real b = load_bias(r, j);
    real t = b * (real)QKV_LOG2E;
    if (b - b == 0 && t - t != 0) t = t > 0 ? REAL_MAX : -REAL_MAX; /* finite, but the product overflowed */
    a = a + t;
  }
  if (p->alibi_slopes.data) {
    const real slope2 = (real)(qkv__parameter(&p->alibi_slopes, e->b, r->h) * QKV_LOG2E);
    const int64_t at = e->position_k + j - e->b0, distance = r->position > at ? r->position - at : at - r->position;
    a = FMA(-slope2, (real)distance, a);
  }
  return a;
}

/* ---- DROPOUT ---- */

static int kept(const row *r, int64_t j) {
  const qkv_problem *p = &r->p->p;
  const int64_t at = r->e->position_k + j - r->e->b0;
  const uint64_t head =
      ((uint64_t)p->batch_origin + (uint64_t)r->e->b) * (uint64_t)p->heads_total + (uint64_t)p->head_origin + (uint64_t)r->h;
  const uint32_t counter[4] = {(uint32_t)(at >> 2), (uint32_t)r->position, (uint32_t)head, (uint32_t)p->offset};
  uint32_t word[4];
  if (p->dropout == 0) return 1;
  qkv__philox(counter, p->seed, word);
  return word[at & 3] >= r->p->drop;
}

/* ---- Nodes ---- */

typedef struct node {
  real m, l, *O;
} node;

static int is_empty(const node *n) { return n->l == 0; }

/* MERGE: into = MERGE(into, from) */
static void merge(node *into, const node *from, int64_t dv) {
  if (is_empty(from)) return;
  if (is_empty(into)) {
    into->m = from->m;
    into->l = from->l;
    memcpy(into->O, from->O, (size_t)dv * sizeof(real));
    return;
  }
  const int from_high = from->m > into->m;
  const real w = exp2_c(from_high ? into->m - from->m : from->m - into->m);
  into->l = from_high ? FMA(into->l, w, from->l) : FMA(from->l, w, into->l);
  for (int64_t x = 0; x < dv; x++) into->O[x] = from_high ? FMA(into->O[x], w, from->O[x]) : FMA(from->O[x], w, into->O[x]);
  if (from_high) into->m = from->m;
}

/* TREE: a binary counter over absolute split indices. level[h] is in use where bit h of count is set. */
typedef struct tree {
  int64_t count, dv;
  node level[LEVELS], carry;
} tree;

static void clear(node *n, int64_t dv) {
  n->m = NEG_INF;
  n->l = 0;
  for (int64_t x = 0; x < dv; x++) n->O[x] = 0;
}

static void tree_init(tree *t, int64_t dv, real *memory) {
  t->count = 0;
  t->dv = dv;
  for (int h = 0; h < LEVELS; h++) {
    t->level[h].O = memory + h * dv;
    clear(&t->level[h], dv);
  }
  t->carry.O = memory + LEVELS * dv;
}

/* Adds t->carry as the next node of level h; count is a multiple of 2^h. */
static void tree_add(tree *t, int h) {
  int up = h;
  for (; t->count >> up & 1; up++) {
    merge(&t->level[up], &t->carry, t->dv); /* left, right */
    node swap = t->level[up];
    t->level[up] = t->carry;
    t->carry = swap;
    clear(&t->level[up], t->dv);
  }
  node swap = t->level[up];
  t->level[up] = t->carry;
  t->carry = swap;
  t->count += (int64_t)1 << h;
}

/* Counts skipped splits up to `split`. */
static void tree_skip(tree *t, int64_t split) {
  while (t->count < split) {
    int h = 0;
    while (t->count && !(t->count >> h & 1)) h++;
    if (t->count == 0 || split - t->count < (int64_t)1 << h) {
      t->count = split; /* only empty nodes below */
      break;
    }
    clear(&t->carry, t->dv);
    tree_add(t, h);
  }
}

/* The root, in t->carry. */
static void tree_root(tree *t) {
  clear(&t->carry, t->dv);
  for (int h = 0; h < LEVELS; h++) {
    merge(&t->level[h], &t->carry, t->dv);
    node swap = t->level[h];
    t->level[h] = t->carry;
    t->carry = swap;
    clear(&t->level[h], t->dv);
  }
}

/* ---- SPLIT ---- */

/* Block [j0, j1) of keys into n, which holds the blocks before it. */
static void block(const row *r, int64_t j0, int64_t j1, node *n) {
  const qkv_problem *p = &r->p->p;
  real s[QKV_BLOCK], w[QKV_BLOCK], M = n->m, L = 0;
  int seen[QKV_BLOCK], any = 0;
  for (int64_t j = j0; j < j1; j++) {
    seen[j - j0] = visible(r, j);
    if (!seen[j - j0]) continue;
    any = 1;
    s[j - j0] = score(r, j, QKV_SCORES_BIASED);
    if (s[j - j0] > M) M = s[j - j0];
  }
  if (!any) return; /* a block in which row i sees nothing does not touch row i */
  const real z = M == NEG_INF ? 0 : M, al = exp2_c(n->m - z);
  for (int64_t j = 0; j < j1 - j0; j++) {
    w[j] = seen[j] ? exp2_c(s[j] - z) : 0;
    L = L + w[j];
  }
  n->l = FMA(n->l, al, L);
  for (int64_t j = 0; j < j1 - j0; j++)
    if (seen[j] && !kept(r, j0 + j)) w[j] = 0;
  for (int64_t x = 0; x < p->head_dim_v; x++) {
    real B = 0;
    for (int64_t j = 0; j < j1 - j0; j++)
      if (seen[j]) B = FMA(w[j], load(&p->v, r->e->batch_kv, r->kv, r->e->row0_kv + j0 + j, x), B);
    n->O[x] = FMA(n->O[x], al, B);
  }
  n->m = M;
}

static void split(const row *r, int64_t index, node *n) {
  const qkv__entry *e = r->e;
  clear(n, r->p->p.head_dim_v);
  for (int64_t at = index * QKV_SPLIT; at < (index + 1) * QKV_SPLIT; at += QKV_BLOCK) {
    int64_t j0 = at - e->position_k + e->b0, j1 = j0 + QKV_BLOCK;
    j0 = QKV_MAX(j0, e->b0);
    j1 = QKV_MIN(j1, e->b1);
    if (j0 < j1) block(r, j0, j1, n);
  }
}

/* Root over the splits first <= s < last, in t->carry. */
static void splits(const row *r, int64_t first, int64_t last, tree *t) {
  const qkv__entry *e = r->e;
  if (e->b0 < e->b1) {
    first = QKV_MAX(first, e->position_k / QKV_SPLIT);
    last = QKV_MIN(last, (e->position_k + e->b1 - e->b0 - 1) / QKV_SPLIT + 1);
    for (int64_t s = first; s < last; s++) {
      tree_skip(t, s);
      split(r, s, &t->carry);
      tree_add(t, 0);
    }
  }
  tree_root(t);
}

/* ---- FINISH ---- */

static void store_lse(const row *r, double value) {
  const qkv_tensor *t = &r->p->p.lse;
  if (!t->data) return;
  char *at = qkv__at(t, qkv__dtype_bytes(t->dtype), r->e->batch_q, r->h, r->e->row0_q + r->i, 0);
  if (t->dtype == QKV_F64)
    *(double *)(void *)at = value;
  else
    *(float *)(void *)at = (float)value;
}
/* rounded once */
static void store(const qkv_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, real value) {
  void *at = qkv__at(t, qkv__dtype_bytes(t->dtype), i0, i1, i2, i3);
  switch (t->dtype) {
  case QKV_F64: *(double *)at = value; break;
  case QKV_F16: *(uint16_t *)at = qkv__narrow_f16((float)value); break;
  case QKV_BF16: *(uint16_t *)at = qkv__narrow_bf16((float)value); break;
  default: *(float *)at = (float)value;
  }
}
static void store_out(const row *r, int64_t x, real value) {
  store(&r->p->p.out, r->e->batch_q, r->h, r->e->row0_q + r->i, x, value);
}
static void store_empty(const row *r, double lse) {
  for (int64_t x = 0; x < r->p->p.head_dim_v; x++) store_out(r, x, 0);
  store_lse(r, lse);
}

static void sink(const row *r, node *n) {
  const qkv_problem *p = &r->p->p;
  if (!p->sinks.data) return;
  const real sink2 = (real)(qkv__parameter(&p->sinks, r->e->b, r->h) * QKV_LOG2E);
  const real M = sink2 > n->m ? sink2 : n->m, z = M == NEG_INF ? 0 : M, a = exp2_c(n->m - z);
  n->l = FMA(n->l, a, exp2_c(sink2 - z));
  for (int64_t x = 0; x < p->head_dim_v; x++) n->O[x] = n->O[x] * a;
  n->m = M;
}

static double lse_of(const node *n) {
  return n->l == 0 ? (double)NEG_INF : ((double)n->m + qkv__log2_64((double)n->l)) * QKV_LN2;
}

static void finish(const row *r, node *n) {
  sink(r, n);
  if (is_empty(n)) {
    store_empty(r, (double)NEG_INF);
    return;
  }
  const real keep = (real)r->p->keep, l = n->l * keep;
  for (int64_t x = 0; x < r->p->p.head_dim_v; x++) store_out(r, x, keep == 0 ? 0 : n->O[x] / l + 0);
  store_lse(r, lse_of(n) + 0.0);
}

/* ---- STANDARD: one maximum per row, chains per 64 keys, no splits ---- */

static void standard(const row *r, node *n, real *s) {
  const qkv_problem *p = &r->p->p;
  const qkv__entry *e = r->e;
  real M = NEG_INF;
  clear(n, p->head_dim_v);
  for (int64_t j = e->b0; j < e->b1; j++) {
    const int seen = visible(r, j);
    s[j - e->b0] = seen ? score(r, j, QKV_SCORES_BIASED) : NEG_INF;
    if (s[j - e->b0] > M) M = s[j - e->b0];
  }
  const real z = M == NEG_INF ? 0 : M;
  n->m = M;
  for (int64_t j0 = e->b0; j0 < e->b1;) {
    const int64_t at = e->position_k + j0 - e->b0, j1 = QKV_MIN(e->b1, j0 + QKV_BLOCK - at % QKV_BLOCK);
    real L = 0;
    for (int64_t j = j0; j < j1; j++) {
      s[j - e->b0] = exp2_c(s[j - e->b0] - z);
      L = L + s[j - e->b0];
    }
    n->l = n->l + L;
    for (int64_t j = j0; j < j1; j++)
      if (!kept(r, j)) s[j - e->b0] = 0;
    for (int64_t x = 0; x < p->head_dim_v; x++) {
      real B = 0;
      for (int64_t j = j0; j < j1; j++)
        if (visible(r, j)) B = FMA(s[j - e->b0], load(&p->v, e->batch_kv, r->kv, e->row0_kv + j, x), B);
      n->O[x] = n->O[x] + B;
    }
    j0 = j1;
  }
}

/* ---- BACKWARD ---- */

/* What a row has for all its keys. */
typedef struct backward {
  real lse, L2, delta; /* delta less dlse */
} backward;

static backward backward_of(const row *r, const qkv_gradients *g) {
  const qkv_problem *p = &r->p->p;
  const qkv__entry *e = r->e;
  const int64_t i = e->row0_q + r->i;
  backward b = {load(&p->lse, e->batch_q, r->h, i, 0), 0, 0};
  b.L2 = b.lse * (real)QKV_LOG2E;
  for (int64_t x = 0; x < p->head_dim_v; x++)
    b.delta = FMA(load(&g->dout, e->batch_q, r->h, i, x), load(&p->out, e->batch_q, r->h, i, x), b.delta);
  if (g->dlse.data) b.delta = b.delta - load(&g->dlse, e->batch_q, r->h, i, 0);
  return b;
}

/* What a row and a key that it sees have. */
typedef struct pair {
  real Pv, dS, dX;
} pair;

static pair pair_of(const row *r, const qkv_gradients *g, const backward *b, int64_t j) {
  const qkv_problem *p = &r->p->p;
  const qkv__entry *e = r->e;
  pair to;
  const real x = score(r, j, QKV_SCORES_BIASED) - b->L2, P = b->lse == NEG_INF ? 0 : exp2_c(x > 0 ? 0 : x);
  real dP = 0;
  for (int64_t c = 0; c < p->head_dim_v; c++)
    dP = FMA(load(&g->dout, e->batch_q, r->h, e->row0_q + r->i, c), load(&p->v, e->batch_kv, r->kv, e->row0_kv + j, c), dP);
  const int keeps = kept(r, j);
  const real t = keeps ? FMA(dP, (real)r->p->r, -b->delta) : -b->delta;
  to.Pv = keeps ? P * (real)r->p->r : 0;
  to.dS = P * t;
  to.dX = to.dS;
  if (p->softcap > 0) {
    const real T = tanh_c(score(r, j, QKV_SCORES_RAW));
    to.dX = to.dS * FMA(-T, T, 1);
  }
  return to;
}

/* Stores value, or fl(old + value). */
static void store_gradient(const qkv_gradients *g, int what, const qkv_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3,
                           real value) {
  if (g->accumulate & what) value = load(t, i0, i1, i2, i3) + value;
  store(t, i0, i1, i2, i3, value);
}

/* ---- What the library calls ---- */

size_t NAME(work)(const qkv__problem *p) {
  return ((size_t)(LEVELS + 2) * (size_t)p->p.head_dim_v + (size_t)(p->p.algorithm == QKV_STANDARD ? p->max_keys : 0)) *
         sizeof(real);
}

void NAME(row)(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, void *work) {
  const row r = make_row(p, e, h, i);
  tree t;
  if (i >= e->nq) {
    store_empty(&r, (double)NEG_INF);
    return;
  }
  tree_init(&t, p->p.head_dim_v, work);
  if (p->p.algorithm == QKV_STANDARD)
    standard(&r, &t.carry, (real *)work + (LEVELS + 2) * p->p.head_dim_v);
  else
    splits(&r, 0, INT64_MAX, &t);
  finish(&r, &t.carry);
}

void NAME(node)(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, qkv_node at, void *O, void *m, void *l,
                void *work) {
  const row r = make_row(p, e, h, i);
  tree t;
  tree_init(&t, p->p.head_dim_v, work);
  if (i < e->nq)
    splits(&r, at.index << at.level, (at.index + 1) << at.level, &t);
  else
    tree_root(&t);
  for (int64_t x = 0; x < p->p.head_dim_v; x++) ((real *)O)[x] = t.carry.O[x] + 0;
  *(real *)m = t.carry.m + 0;
  *(real *)l = t.carry.l;
}

void NAME(finish)(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, const qkv_state *s, int64_t index,
                  void *work) {
  const row r = make_row(p, e, h, i);
  const int64_t dv = p->p.head_dim_v;
  tree t;
  if (i >= e->nq) {
    store_empty(&r, (double)NEG_INF);
    return;
  }
  tree_init(&t, dv, work);
  for (int64_t k = 0; k < s->count; k++) {
    const real *data = (const real *)s->data + k * s->rows * (dv + 2);
    tree_skip(&t, s->nodes[k].index << s->nodes[k].level);
    memcpy(t.carry.O, data + index * dv, (size_t)dv * sizeof(real));
    t.carry.m = data[s->rows * dv + index];
    t.carry.l = data[s->rows * (dv + 1) + index];
    tree_add(&t, (int)s->nodes[k].level);
  }
  tree_root(&t);
  finish(&r, &t.carry);
}

void NAME(scores)(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, int32_t stage, void *to, int64_t stride,
                  int wide, void *work) {
  const row r = make_row(p, e, h, i);
  real L2 = 0;
  if (stage == QKV_WEIGHTS && i < e->nq) { /* the row's lse, then P as the backward pass has it */
    qkv__problem q = *p;
    tree t;
    q.p.head_dim_v = 0; /* m and l do not need V */
    const row s = make_row(&q, e, h, i);
    tree_init(&t, 0, work);
    splits(&s, 0, INT64_MAX, &t);
    sink(&s, &t.carry);
    L2 = (real)lse_of(&t.carry) * (real)QKV_LOG2E;
  }
  for (int64_t j = 0; j < p->max_keys; j++) {
    const int seen = i < e->nq && j >= e->b0 && j < e->b1 && visible(&r, j);
    double value;
    if (stage == QKV_KEPT)
      value = i < e->nq && j >= e->b0 && j < e->b1 && kept(&r, j);
    else if (stage == QKV_WEIGHTS) {
      if (!seen || L2 == NEG_INF)
        value = 0;
      else {
        const real x = score(&r, j, QKV_SCORES_BIASED) - L2;
        value = (double)exp2_c(x > 0 ? 0 : x);
      }
    } else if (!seen)
      value = (double)NEG_INF;
    else
      value = (double)score(&r, j, stage) * (stage == QKV_SCORES_RAW && p->p.softcap > 0 ? p->p.softcap : QKV_LN2) + 0.0;
    if (wide)
      ((double *)to)[j * stride] = value;
    else
      ((float *)to)[j * stride] = (float)value;
  }
}

enum { COLUMNS = 64 }; /* of a gradient, formed at a time */

void NAME(dq)(const qkv__problem *p, const qkv__gradients *to, const qkv__entry *e, int64_t h, int64_t i) {
  const qkv_gradients *g = &to->g;
  const row r = make_row(p, e, h, i);
  const int64_t d = p->p.head_dim;
  if (!g->dq.data) return;
  for (int64_t c = 0; c < d; c += COLUMNS) {
    const int64_t columns = QKV_MIN(COLUMNS, d - c);
    real total[COLUMNS] = {0};
    const backward b = i < e->nq ? backward_of(&r, g) : (backward){0, 0, 0};
    for (int64_t j0 = e->b0; i < e->nq && j0 < e->b1;) { /* key blocks */
      const int64_t at = e->position_k + j0 - e->b0, j1 = QKV_MIN(e->b1, j0 + QKV_BLOCK - at % QKV_BLOCK);
      real B[COLUMNS] = {0};
      for (int64_t j = j0; j < j1; j++) {
        if (!visible(&r, j)) continue;
        const real dX = pair_of(&r, g, &b, j).dX;
        for (int64_t x = 0; x < columns; x++) B[x] = FMA(dX, load(&p->p.k, e->batch_kv, r.kv, e->row0_kv + j, c + x), B[x]);
      }
      for (int64_t x = 0; x < columns; x++) total[x] = total[x] + B[x];
      j0 = j1;
    }
    const real scale = (real)qkv__round(p, p->p.softmax_scale);
    for (int64_t x = 0; x < columns; x++)
      store_gradient(g, QKV_DQ, &g->dq, e->batch_q, h, e->row0_q + i, c + x, scale * total[x] + 0);
  }
}

/* Columns [c, c + columns) of key j's sum: of dX and q, or of Pv and dout. */
static void sum_of_key(const qkv__problem *p, const qkv_gradients *g, const qkv__entry *e, int64_t kv, int64_t j, int of_value, int64_t c,
                       int64_t columns, real *total) {
  const qkv_tensor *t = of_value ? &g->dout : &p->p.q;
  for (int64_t x = 0; x < columns; x++) total[x] = 0;
  if (j < e->b0 || j >= e->b1) return;
  for (int64_t h = kv * p->group; h < (kv + 1) * p->group; h++)
    for (int64_t i0 = 0; i0 < e->nq; i0 += QKV_BLOCK) { /* query blocks */
      real B[COLUMNS] = {0};
      for (int64_t i = i0; i < QKV_MIN(e->nq, i0 + QKV_BLOCK); i++) {
        const row r = make_row(p, e, h, i);
        if (!visible(&r, j)) continue;
        const backward b = backward_of(&r, g);
        const pair of = pair_of(&r, g, &b, j);
        for (int64_t x = 0; x < columns; x++)
          B[x] = FMA(of_value ? of.Pv : of.dX, load(t, e->batch_q, h, e->row0_q + i, c + x), B[x]);
      }
      for (int64_t x = 0; x < columns; x++) total[x] = total[x] + B[x];
    }
}

void NAME(dkv)(const qkv__problem *p, const qkv__gradients *to, const qkv__entry *e, int64_t kv, int64_t j) {
  const qkv_gradients *g = &to->g;
  const real scale = (real)qkv__round(p, p->p.softmax_scale);
  real total[COLUMNS];
  for (int64_t c = 0; g->dk.data && c < p->p.head_dim; c += COLUMNS) {
    const int64_t columns = QKV_MIN(COLUMNS, p->p.head_dim - c);
    sum_of_key(p, g, e, kv, j, 0, c, columns, total);
    for (int64_t x = 0; x < columns; x++)
      store_gradient(g, QKV_DK, &g->dk, e->batch_kv, kv, e->row0_kv + j, c + x, scale * total[x] + 0);
  }
  for (int64_t c = 0; g->dv.data && c < p->p.head_dim_v; c += COLUMNS) {
    const int64_t columns = QKV_MIN(COLUMNS, p->p.head_dim_v - c);
    sum_of_key(p, g, e, kv, j, 1, c, columns, total);
    for (int64_t x = 0; x < columns; x++) store_gradient(g, QKV_DV, &g->dv, e->batch_kv, kv, e->row0_kv + j, c + x, total[x] + 0);
  }
}

/* The copies of index i on an axis of a gradient: all indices if it is summed over the axis. */
typedef struct copies {
  int64_t from, to;
} copies;
static copies copies_of(const qkv_tensor *t, int axis, int64_t i, int64_t extent) {
  const copies all = {0, extent}, one = {i, QKV_MIN(i + 1, extent)};
  return t->stride[axis] == 0 ? all : one;
}

void NAME(dbias)(const qkv__problem *p, const qkv__gradients *to, int64_t b, int64_t h, int64_t i, int64_t j) {
  const qkv_gradients *g = &to->g;
  const qkv_tensor *t = &g->dbias;
  const copies entries = copies_of(t, 0, b, p->p.batch), heads = copies_of(t, 1, h, p->p.num_heads);
  real total = 0;
  for (int64_t bb = entries.from; bb < entries.to; bb++)
    for (int64_t hh = heads.from; hh < heads.to; hh++) {
      qkv__entry e;
      qkv__entry_of(p, bb, &e);
      const copies rows = copies_of(t, 2, i, e.nq), keys = copies_of(t, 3, j, e.b1);
      for (int64_t ii = rows.from; ii < rows.to; ii++) {
        const row r = make_row(p, &e, hh, ii);
        const backward of = backward_of(&r, g);
        for (int64_t jj = QKV_MAX(keys.from, e.b0); jj < keys.to; jj++)
          if (visible(&r, jj)) total = total + pair_of(&r, g, &of, jj).dS;
      }
    }
  store_gradient(g, QKV_DBIAS, t, b, h, i, j, total + 0);
}

void NAME(dsinks)(const qkv__problem *p, const qkv__gradients *to, int64_t b, int64_t h) {
  const qkv_gradients *g = &to->g;
  const qkv_tensor *t = &g->dsinks;
  const copies entries = copies_of(t, 0, b, p->p.batch), heads = copies_of(t, 1, h, p->p.num_heads);
  real total = 0;
  for (int64_t bb = entries.from; bb < entries.to; bb++)
    for (int64_t hh = heads.from; hh < heads.to; hh++) {
      qkv__entry e;
      qkv__entry_of(p, bb, &e);
      const real sink2 = (real)(qkv__parameter(&p->p.sinks, bb, hh) * QKV_LOG2E);
      for (int64_t i0 = 0; i0 < e.nq; i0 += QKV_BLOCK) {
        real B = 0;
        for (int64_t i = i0; i < QKV_MIN(e.nq, i0 + QKV_BLOCK); i++) {
          const row r = make_row(p, &e, hh, i);
          const backward of = backward_of(&r, g);
          const real x = sink2 - of.L2, Ps = of.lse == NEG_INF || sink2 == NEG_INF ? 0 : exp2_c(x > 0 ? 0 : x);
          B = FMA(Ps, of.delta, B);
        }
        total = total + B;
      }
    }
  store_gradient(g, QKV_DSINKS, t, b, h, 0, 0, 0 - total + 0);
}

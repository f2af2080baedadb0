/* Selected blocks: means of blocks of queries against means of blocks of keys, by the kernels of attention. */
#include <math.h>
#include <string.h>

#include "attention/panel.h"
#include "attention/state.h"
#include "base/fpstate.h"
#include "base/order1.h"
#include "base/run.h"
#include "base/size.h"
#include "sparse/map.h"
#include "stage/stage.h"

/* A block on its way into a list. */
typedef struct chosen {
  double score;
  int32_t block;
} chosen;

typedef struct call {
  qkv_context c;
  qkv__problem p;
  qkv__engine g;
  qkv_block_topk t;
  qkv_block_map *map;
  int64_t rows, keys, count, panels; /* blocks of queries and keys, places per list, panels of blocks of queries */
  char *means;                       /* of keys: [entry][kv head][keys][head_dim] */
  int32_t *found;                    /* [entry][head][rows]: lengths of the lists, which stand at places i * count */
  char *worker_memory;
  size_t worker_bytes;
} call;

typedef struct worker {
  void *rows, *means, *Qt, *S; /* [block][head_dim], [w][head_dim], [head_dim][w], [64][w] */
  double *sum;                 /* [head_dim] */
  chosen *list;                /* [w][count], the best first */
  int64_t *length;             /* [w] */
} worker;

static void carve_worker(const call *k, qkv__carver *c, worker *w) {
  const size_t size = (size_t)k->g.k->real_bytes;
  const int64_t d = k->p.p.head_dim;
  w->rows = qkv__carve(c, k->map->block * d, size);
  w->means = qkv__carve(c, k->g.w * d, size);
  w->Qt = qkv__carve(c, k->g.w * d, size);
  w->S = qkv__carve(c, QKV_BLOCK * k->g.w, size);
  w->sum = qkv__carve(c, d, sizeof *w->sum);
  w->list = qkv__carve(c, k->g.w * k->count, sizeof *w->list);
  w->length = qkv__carve(c, k->g.w, sizeof *w->length);
}

static worker worker_of(const call *k, int32_t index) {
  qkv__carver c = {k->worker_memory + (size_t)index * k->worker_bytes, 0, 0};
  worker w;
  carve_worker(k, &c, &w);
  return w;
}

/* to[head_dim] = the mean of n rows: a sum in double, rounded once. */
static void mean_of(const call *k, const qkv_tensor *t, int64_t batch, int64_t head, int64_t row, int64_t n, void *to,
                    worker *w) {
  const int64_t d = k->p.p.head_dim;
  qkv__stage_load(k->g.k, w->rows, d, t, qkv__at(t, qkv__dtype_bytes(t->dtype), batch, head, row, 0), n, d);
  for (int64_t x = 0; x < d; x++) w->sum[x] = 0;
  for (int64_t i = 0; i < n; i++)
    for (int64_t x = 0; x < d; x++)
      w->sum[x] += k->p.f64 ? ((const double *)w->rows)[i * d + x] : (double)((const float *)w->rows)[i * d + x];
  for (int64_t x = 0; x < d; x++)
    if (k->p.f64)
      ((double *)to)[x] = w->sum[x] / (double)n;
    else
      ((float *)to)[x] = (float)(w->sum[x] / (double)n);
}

/* The indices [from, to) whose positions, counted from `position` at index `first`, are in the block, between first and end. */
static int64_t part_of(const call *k, int64_t block, int64_t position, int64_t first, int64_t end, int64_t *from) {
  const int64_t size = k->map->block;
  *from = QKV_MAX(first, block * size - position + first);
  return QKV_MIN(end, (block + 1) * size - position + first);
}

static char *means_at(const call *k, int64_t b, int64_t kv_head, int64_t block) {
  return k->means +
         (size_t)(((b * k->p.p.num_kv_heads + kv_head) * k->keys + block) * k->p.p.head_dim) * (size_t)k->g.k->real_bytes;
}

/* Means of all key blocks of an entry and key-value head; 0 where no key exists. */
static void keys_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const int64_t kv_head = task % k->p.p.num_kv_heads;
  worker w = worker_of(k, index);
  qkv__entry e;
  qkv__entry_of(&k->p, task / k->p.p.num_kv_heads, &e);
  for (int64_t i = 0; i < k->keys; i++) {
    int64_t from;
    const int64_t to = part_of(k, i, e.position_k, e.b0, e.b1, &from);
    char *mean = means_at(k, e.b, kv_head, i);
    if (from < to)
      mean_of(k, &k->p.p.k, e.batch_kv, kv_head, e.row0_kv + from, to - from, mean, &w);
    else
      memset(mean, 0, (size_t)k->p.p.head_dim * (size_t)k->g.k->real_bytes);
  }
}

/* Puts a block into a list that is kept from the best score down; blocks come ascending, so that equal ones stay behind. */
static void add(const call *k, chosen *list, int64_t *length, double score, int64_t block) {
  int64_t at = *length;
  if (at == k->count) {
    if (!(score > list[at - 1].score)) return;
    at--;
  } else
    ++*length;
  for (; at > 0 && score > list[at - 1].score; at--) list[at] = list[at - 1];
  list[at].score = score;
  list[at].block = (int32_t)block;
}

/* Lists of up to w blocks of queries of a head. */
static void rows_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const qkv_problem *p = &k->p.p;
  const int64_t d = p->head_dim, head = task / k->panels % p->num_heads, first = task % k->panels * k->g.w;
  const int64_t n = QKV_MIN(k->g.w, k->rows - first), nv = (n + k->g.k->lanes - 1) / k->g.k->lanes,
                width = nv * k->g.k->lanes;
  worker w = worker_of(k, index);
  qkv__entry e;
  qkv__entry_of(&k->p, task / k->panels / p->num_heads, &e);
  int32_t *found = k->found + (e.b * p->num_heads + head) * k->rows + first;
  int64_t own[64], end = 0; /* a block's own key block; -1: it has no rows */
  const int64_t key_end = e.b0 < e.b1 ? (e.position_k + e.b1 - e.b0 - 1) / k->map->block + 1 : 0;
  memset(w.means, 0, (size_t)(n * d) * (size_t)k->g.k->real_bytes);
  for (int64_t i = 0; i < n; i++) {
    int64_t from;
    const int64_t to = part_of(k, first + i, e.position_q, 0, e.nq, &from);
    own[i] = from < to ? first + i : -1;
    w.length[i] = 0;
    if (from >= to) continue;
    mean_of(k, &p->q, e.batch_q, head, e.row0_q + from, to - from,
            (char *)w.means + (size_t)(i * d) * (size_t)k->g.k->real_bytes, &w);
    end = k->t.causal ? QKV_MIN(first + i + 1, key_end) : key_end;
  }
  k->g.k->pack(w.Qt, w.means, d, n, d, (int)nv, k->p.c);
  for (int64_t block = e.b0 < e.b1 ? e.position_k / k->map->block : end; block < end; block += QKV_BLOCK) {
    const int64_t keys = QKV_MIN(QKV_BLOCK, end - block);
    const qkv__runs runs = {1, keys == QKV_BLOCK, {{0, (int)keys}}};
    k->g.k->qk(w.Qt, d, means_at(k, e.b, head / k->p.group, block), d, &runs, w.S, NULL, NULL, (int)nv);
    for (int64_t j = 0; j < keys; j++)
      for (int64_t i = 0; i < n; i++) {
        double score = k->p.f64 ? ((const double *)w.S)[j * width + i] : (double)((const float *)w.S)[j * width + i];
        if (own[i] < 0 || (k->t.causal && block + j > own[i])) continue;
        if (score != score) score = (double)-INFINITY;
        if (k->t.causal && block + j == own[i]) continue; /* below */
        add(k, w.list + i * k->count, &w.length[i], score, block + j);
      }
  }
  for (int64_t i = 0; i < n; i++) {
    int32_t *to = k->map->indices + ((e.b * p->num_heads + head) * k->rows + first + i) * k->count;
    const int has_own = k->t.causal && own[i] >= e.position_k / k->map->block && own[i] < key_end && e.b0 < e.b1;
    const int64_t others = QKV_MIN(w.length[i], k->count - (has_own ? 1 : 0));
    for (int64_t x = 0; x < others; x++) to[x] = w.list[i * k->count + x].block;
    if (has_own) to[others] = (int32_t)own[i];
    found[i] = (int32_t)(others + has_own);
    qkv__map_sort(to, found[i]);
  }
}

/* Closes the gaps between lists. */
static void compact(const call *k) {
  int32_t at = 0;
  for (int64_t n = 0; n < k->map->batch * k->map->num_heads; n++) {
    int32_t *row = k->map->indptr + n * (k->rows + 1);
    for (int64_t i = 0; i < k->rows; i++) {
      const int64_t list = n * k->rows + i;
      row[i] = at;
      memmove(k->map->indices + at, k->map->indices + list * k->count, (size_t)k->found[list] * sizeof *k->map->indices);
      at += k->found[list];
    }
    row[k->rows] = at;
  }
  k->map->sorted = 1;
}

static qkv_status prepare(const qkv_context *context, const qkv_problem *problem, const qkv_block_topk *topk,
                          qkv_block_map *map, call *k) {
  const qkv__report none = {NULL, 0};
  memset(k, 0, sizeof *k);
  QKV_TRY(qkv__check_context(context, &k->c, NULL, 0));
  QKV_TRY(qkv__check(problem, QKV__USES_QK, &k->p, NULL, 0));
  QKV_TRY(qkv__take_struct(&none, "topk", topk, &k->t, sizeof k->t));
  QKV_TRY(qkv__map_check_extents(&none, map));
  if (k->t.causal != 0 && k->t.causal != 1) return QKV_BAD_VALUE;
  if (k->t.count < 1 || map->batch != k->p.p.batch || map->num_heads != k->p.p.num_heads) return QKV_BAD_EXTENT;
  for (int64_t b = 0; b < map->batch; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    if (e.position_q + e.nq > map->seqlen_q || e.position_k + e.b1 - e.b0 > map->seqlen_kv) return QKV_BAD_EXTENT;
  }
  if (!qkv__engine_make(&k->c, &k->p, &k->g)) return QKV_BAD_CONTEXT;
  k->map = map;
  k->rows = qkv__map_rows(map);
  k->keys = qkv__map_keys(map);
  k->count = QKV_MIN(k->t.count, k->keys);
  k->panels = (k->rows + k->g.w - 1) / k->g.w;
  int64_t places;
  if (!qkv__mul(map->batch * map->num_heads, k->rows * k->count, &places) || places > INT32_MAX) return QKV_TOO_LARGE;
  if (places > map->capacity) return QKV_BAD_EXTENT;
  return (map->batch > 0 && map->num_heads > 0 && !map->indptr) || (places > 0 && !map->indices) ? QKV_BAD_POINTER : QKV_OK;
}

static qkv_status run(call *k) {
  const qkv_problem *p = &k->p.p;
  qkv__carver one = {NULL, 0, 0}, all = {NULL, 0, 0};
  qkv__memory memory;
  worker w;
  int64_t lists, means, elements;
  carve_worker(k, &one, &w);
  k->worker_bytes = one.used;
  if (one.overflow || !qkv__mul(p->batch * p->num_heads, k->rows, &lists) ||
      !qkv__mul(p->batch * p->num_kv_heads, k->keys, &means) || !qkv__mul(means, p->head_dim, &elements))
    return QKV_TOO_LARGE;
  qkv_status s = QKV_OK;
  for (int pass = 0; pass < 2 && s == QKV_OK; pass++) { /* adds up, then lays out */
    all.used = 0;
    k->found = qkv__carve(&all, lists, sizeof *k->found);
    k->means = qkv__carve(&all, elements, (size_t)k->g.k->real_bytes);
    k->worker_memory = qkv__carve(&all, k->c.num_workers, k->worker_bytes);
    if (all.overflow) return QKV_TOO_LARGE;
    if (pass == 0) s = qkv__memory_take(&k->c, NULL, 0, all.used, &memory);
    if (pass == 0 && s == QKV_OK) all.base = memory.base;
  }
  if (s != QKV_OK) return s;
  s = qkv__run(&k->c, keys_task, k, p->batch * p->num_kv_heads);
  if (s == QKV_OK) s = qkv__run(&k->c, rows_task, k, p->batch * p->num_heads * k->panels);
  if (s == QKV_OK) compact(k);
  qkv__memory_release(&k->c, &memory);
  return s;
}

qkv_status qkv_topk_blocks(const qkv_context *context, const qkv_problem *problem, const qkv_block_topk *topk,
                           qkv_block_map *map) {
  call k;
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, problem, topk, map, &k);
  if (s == QKV_OK) s = run(&k);
  qkv__fp_leave(&fp);
  return s;
}

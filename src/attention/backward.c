/* The public calls of the backward pass, and its three schedules. All give the same bits, since each total is one fold in a fixed order
 * (docs/NUMERICS.md, BACKWARD): dq over key blocks, dk and dv over heads and row blocks.
 *   OWNER      a task has a whole key-value head: five products
 *   WAVEFRONT  a key-value head is a grid of row chunks x key chunks. A worker takes a key chunk and goes down its row chunks, always
 *              behind the key chunk to the left, so that each row chunk meets the key chunks ascending: five products, many workers
 *   PASSES     tasks over key chunks form dk and dv, tasks over rows dq: seven products
 * Which one runs may depend on the number of workers, as the bits do not. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "attention/gradient.h"
#include "attention/state.h"
#include "base/fma.h"
#include "base/fpstate.h"
#include "base/order1.h"
#include "base/run.h"
#include "reference/reference.h"
#include "stage/stage.h"

enum {
  SUPERBLOCK_MEMORY = 640 << 10, /* of the row blocks that share a pass over keys: they stay in the second-level cache */
  MAX_SUPERBLOCK = 8,
  MAX_CHUNK_ROWS = 2, /* row blocks of a cell of the wavefront, */
  MAX_CHUNK_KEYS = 4, /* and key blocks; of PASSES too */
  PATIENCE = 1 << 20, /* looks of a worker of the wavefront for a cell that is ready, while others are at work */
  YIELD_EVERY = 64    /* of these looks gives way to threads that may hold what is waited for */
};

enum { OWNER, WAVEFRONT, PASSES, REFERENCE };
static const char *const schedule_names[] = {"owner", "wavefront", "passes", "rows"};

typedef struct call {
  qkv_context c;
  qkv__problem p;
  qkv__gradients to;
  qkv__backward b;
  int schedule;
  int64_t units;         /* entries x key-value heads */
  int64_t row_blocks, key_blocks; /* of the longest entry; row blocks of one head */
  int64_t superblock;    /* row blocks of one pass over keys */
  int64_t chunk, chunk_rows;      /* key blocks of a key chunk, row blocks of a row chunk */
  int64_t row_chunks, key_chunks; /* of the longest entry; row chunks of all heads of a group */
  double wavefront;               /* share of the workers' time that it uses well */
  int64_t key_tasks, row_tasks;   /* of PASSES */
  int64_t dbias_rows, dbias_tasks, dsinks_tasks;
  /* scratch */
  char *worker_memory;
  size_t worker_bytes;
  int64_t *first_rows, *first_keys; /* [batch + 1]: row blocks of a head, key blocks before each entry */
  qkv__row_block *blocks; /* of rows, all of the call */
  char *block_memory;
  size_t block_bytes;     /* of each */
  char *dK, *dV;          /* totals of the wavefront */
  int32_t *done, *taken;  /* per key chunk: row chunks that are through, and whether a worker is at it */
  int64_t all_rows, all_keys; /* blocks, over entries */
  size_t bytes;
} call;

typedef struct worker {
  qkv__gradient_work w;
  qkv__row_block rows[MAX_SUPERBLOCK];
  char *dK, *dV;  /* totals of a key task */
  char *dbias;
} worker;

static int64_t blocks_of(int64_t rows) { return (rows + QKV_BLOCK - 1) / QKV_BLOCK; }
/* Key blocks by position: the first and the last may be incomplete. */
static int64_t first_block(const qkv__entry *e) { return e->position_k / QKV_BLOCK; }
static int64_t key_blocks_of(const qkv__entry *e) {
  return e->b1 > e->b0 ? (e->position_k + e->b1 - e->b0 - 1) / QKV_BLOCK - first_block(e) + 1 : 0;
}
static int64_t keys_in(const qkv__problem *p, const qkv__entry *e) {
  return p->p.cu_seqlens_kv ? p->p.cu_seqlens_kv[e->b + 1] - p->p.cu_seqlens_kv[e->b] : p->p.seqlen_kv;
}
static size_t real_bytes(const call *k) { return (size_t)k->b.g.k->real_bytes; }
static int is_cancelled(const call *k) { return k->c.cancel && QKV_LOAD_RELAXED(k->c.cancel); }
static int wants(const call *k, int what) { return (k->to.wanted & what) != 0; }

/* ---- Layout ---- */

static void carve_worker(const call *k, qkv__carver *c, worker *w) {
  const size_t size = real_bytes(k);
  /* a key task's totals: a whole head, or the largest chunk */
  const int64_t keys = k->schedule == OWNER ? k->key_blocks : k->schedule == PASSES ? QKV_MIN(k->key_blocks, MAX_CHUNK_KEYS) : 0;
  memset(w, 0, sizeof *w);
  qkv__gradient_carve(&k->b, c, &w->w);
  for (int64_t i = 0; i < k->superblock; i++) qkv__row_block_carve(&k->b, c, 1, &w->rows[i]);
  w->dK = wants(k, QKV_DK) ? qkv__carve(c, keys * QKV_BLOCK * k->b.ld, size) : NULL;
  w->dV = wants(k, QKV_DV) ? qkv__carve(c, keys * QKV_BLOCK * k->b.ldv, size) : NULL;
  w->dbias = wants(k, QKV_DBIAS) ? qkv__carve(c, k->dbias_rows * k->p.max_keys, size) : NULL;
}

static worker worker_of(const call *k, int32_t index) {
  qkv__carver c = {k->worker_memory + (size_t)index * k->worker_bytes, 0, 0};
  worker w;
  carve_worker(k, &c, &w);
  qkv__gradient_clear(&k->b, &w.w);
  return w;
}

/* Memory of one schedule. With memory NULL only adds up. */
static size_t layout_of(call *k, void *memory) {
  qkv__carver c = {memory, 0, 0}, one = {NULL, 0, 0};
  worker w;
  carve_worker(k, &one, &w);
  k->worker_bytes = one.used;
  k->worker_memory = qkv__carve(&c, k->c.num_workers, one.used);
  if (k->schedule == WAVEFRONT) {
    qkv__carver block = {NULL, 0, 0};
    qkv__row_block rows;
    int64_t n = 0, keys = 0;
    qkv__row_block_carve(&k->b, &block, wants(k, QKV_DQ), &rows);
    k->block_bytes = block.used;
    k->first_rows = qkv__carve(&c, k->p.p.batch + 1, sizeof *k->first_rows);
    k->first_keys = qkv__carve(&c, k->p.p.batch + 1, sizeof *k->first_keys);
    c.overflow |= !qkv__mul(k->all_rows, k->p.p.num_heads, &n) || !qkv__mul(k->all_keys, k->p.p.num_kv_heads * QKV_BLOCK, &keys);
    if (c.overflow) return SIZE_MAX;
    k->blocks = qkv__carve(&c, n, sizeof *k->blocks);
    k->block_memory = qkv__carve(&c, n, block.used);
    k->dK = wants(k, QKV_DK) ? qkv__carve(&c, keys, (size_t)k->b.ld * real_bytes(k)) : NULL;
    k->dV = wants(k, QKV_DV) ? qkv__carve(&c, keys, (size_t)k->b.ldv * real_bytes(k)) : NULL;
    k->done = qkv__carve(&c, k->units * k->key_blocks, sizeof *k->done);
    k->taken = qkv__carve(&c, k->units * k->key_blocks, sizeof *k->taken);
  }
  return c.overflow || one.overflow || c.used > SIZE_MAX / 4 ? SIZE_MAX : c.used;
}

/* The share of the workers' time that a schedule uses well: the wavefront of a full mask; heads of any length. */
static double owner_efficiency(const call *k) {
  enum { MAX = 256 };
  double load[MAX] = {0}, sum = 0, largest = 0, most = 0;
  const int workers = k->c.num_workers;
  if (workers > MAX) return (double)k->units / (double)((k->units + workers - 1) / workers * workers);
  for (int64_t b = 0; b < k->p.p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    const double work = (double)blocks_of(e.nq) * (double)key_blocks_of(&e);
    largest = work > largest ? work : largest;
    sum += work * (double)k->p.p.num_kv_heads;
  }
  if (sum == 0 || largest * 8 * workers <= sum) return 1; /* many small ones */
  for (int64_t unit = 0; unit < k->units; unit++) {
    qkv__entry e;
    int least = 0;
    qkv__entry_of(&k->p, unit / k->p.p.num_kv_heads, &e);
    for (int i = 1; i < workers; i++) least = load[i] < load[least] ? i : least;
    load[least] += (double)blocks_of(e.nq) * (double)key_blocks_of(&e);
    most = load[least] > most ? load[least] : most;
  }
  return sum / most / workers;
}
/* The same of the wavefront with key chunks of `chunk` blocks, all heads as long as the longest. Behind a mask the first key chunks are
 * taken to have more rows than the last, as with a causal one. */
static double wavefront_efficiency(const call *k, int64_t chunk) {
  enum { MAX = 256 };
  double load[MAX] = {0}, sum = 0, most = 0;
  const int workers = k->c.num_workers;
  const int64_t chunks = (k->key_blocks + chunk - 1) / chunk;
  if (workers > MAX || !chunks || !k->row_chunks) return 0;
  const double cells = (double)k->units * (double)k->row_chunks * (double)chunks / workers, lag = cells / (cells + workers - 1);
  if (k->units * chunks > 16 * (int64_t)workers) return lag;
  for (int64_t t = 0; t < chunks; t++)
    for (int64_t unit = 0; unit < k->units; unit++) {
      const double blocks = (double)QKV_MIN(chunk, k->key_blocks - t * chunk);
      const double work = k->p.p.mask_count ? blocks * ((double)(chunks - t) - 0.5) : blocks;
      int least = 0;
      for (int i = 1; i < workers; i++) least = load[i] < load[least] ? i : least;
      load[least] += work;
      sum += work;
      most = load[least] > most ? load[least] : most;
    }
  return sum / most / workers * lag;
}

/* The set of schedules that a call with these workers, heads and gradients may take, whatever the lengths are. */
static int eligible(const call *k) {
  if (k->b.g.flags & QKV_FORCE_PASSES) return 1 << PASSES;
  if (k->b.g.flags & QKV_FORCE_SPLIT) return 1 << WAVEFRONT;
  if (!wants(k, QKV_DQ) || !wants(k, QKV_DK | QKV_DV)) return 1 << PASSES; /* nothing is formed twice */
  if (k->c.num_workers == 1) return 1 << OWNER;
  return 1 << PASSES | (QKV_HAS_ATOMICS ? 1 << WAVEFRONT : 0) | (k->units >= k->c.num_workers ? 1 << OWNER : 0);
}

static void choose(call *k) {
  const double efficiency[] = {
      [OWNER] = owner_efficiency(k), [WAVEFRONT] = k->wavefront * 0.98, [PASSES] = 5.0 / 7 * 0.97};
  k->schedule = REFERENCE;
  for (int i = OWNER; i <= PASSES; i++)
    if ((eligible(k) >> i & 1) && (k->schedule == REFERENCE || efficiency[i] > efficiency[k->schedule])) k->schedule = i;
}

/* The most that any of them needs: never less for a shorter length. */
static size_t most_bytes(call *k) {
  const int chosen = k->schedule;
  size_t most = 0;
  for (int i = OWNER; i <= PASSES; i++)
    if (eligible(k) >> i & 1) {
      k->schedule = i;
      most = QKV_MAX(most, layout_of(k, NULL));
    }
  k->schedule = chosen;
  layout_of(k, NULL);
  return most;
}

/* Elements of a gradient's axis: one where it is summed over. */
static int64_t own(int64_t stride, int64_t extent) { return stride ? extent : QKV_MIN(1, extent); }

static void measure(call *k) {
  const qkv_problem *p = &k->p.p;
  const size_t size = real_bytes(k);
  k->units = p->batch * p->num_kv_heads;
  k->row_blocks = k->key_blocks = k->all_rows = k->all_keys = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    k->row_blocks = QKV_MAX(k->row_blocks, blocks_of(e.nq));
    k->key_blocks = QKV_MAX(k->key_blocks, key_blocks_of(&e));
    k->all_rows += blocks_of(e.nq);
    k->all_keys += key_blocks_of(&e);
  }
  const size_t block = QKV_BLOCK * size * (size_t)(2 * k->b.ld + k->b.ldv + p->head_dim + p->head_dim_v);
  k->superblock = 1;
  while (k->superblock < MAX_SUPERBLOCK && 2 * (size_t)k->superblock * block <= SUPERBLOCK_MEMORY) k->superblock *= 2;
  while (k->superblock > 1 && k->superblock / 2 >= k->row_blocks) k->superblock /= 2;
  /* less, to give each worker its share */
  k->chunk_rows = MAX_CHUNK_ROWS;
  while (k->chunk_rows > 1 && k->p.group * k->row_blocks < 8 * k->c.num_workers * k->chunk_rows) k->chunk_rows /= 2;
  k->row_chunks = k->p.group * ((k->row_blocks + k->chunk_rows - 1) / k->chunk_rows);
  k->chunk = 1;
  k->wavefront = 0;
  for (int64_t i = MAX_CHUNK_KEYS; i > 0; i--) {
    const double efficiency = wavefront_efficiency(k, i);
    if (efficiency > k->wavefront + 0.01) {
      k->wavefront = efficiency;
      k->chunk = i;
    }
  }
  k->key_chunks = (k->key_blocks + k->chunk - 1) / k->chunk;
  const int64_t supers = (k->row_blocks + k->superblock - 1) / k->superblock;
  k->key_tasks = wants(k, QKV_DK | QKV_DV) ? k->units * QKV_MAX(1, k->key_chunks) : 0;
  k->row_tasks = wants(k, QKV_DQ) ? k->units * k->p.group * QKV_MAX(1, supers) : 0;
  const qkv_tensor *t = &k->to.g.dbias;
  k->dbias_rows = t->stride[2] || !t->stride[3] ? QKV_BLOCK : 1; /* see dbias_task */
  k->dbias_tasks = wants(k, QKV_DBIAS) ? own(t->stride[0], p->batch) * own(t->stride[1], p->num_heads) *
                                             own(t->stride[2], blocks_of(k->p.max_rows)) * QKV_MIN(1, k->p.max_keys)
                                       : 0;
  t = &k->to.g.dsinks;
  k->dsinks_tasks = wants(k, QKV_DSINKS) ? own(t->stride[0], p->batch) * own(t->stride[1], p->num_heads) : 0;
}

static qkv_status prepare(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients, int uses, call *k) {
  memset(k, 0, sizeof *k);
  qkv_status s = qkv__check_context(context, &k->c, NULL, 0);
  if (s == QKV_OK) s = qkv__check_gradients(problem, gradients, uses, &k->p, &k->to, NULL, 0);
  if (s != QKV_OK) return s;
  if (!qkv__engine_make(&k->c, &k->p, &k->b.g)) return QKV_BAD_CONTEXT;
  k->b.to = &k->to;
  qkv__backward_init(&k->b);
  measure(k);
  if (k->c.isa_cap && !strcmp(k->c.isa_cap, "reference"))
    k->schedule = REFERENCE;
  else {
    choose(k);
    k->bytes = layout_of(k, NULL);
    if (k->bytes == SIZE_MAX) return QKV_TOO_LARGE;
  }
  return QKV_OK;
}

/* ---- Storing ---- */

static void store(const call *k, const qkv_tensor *t, int what, int64_t batch, int64_t head, int64_t row, const void *from, int64_t ld,
                  int64_t n, int64_t d, double scale, worker *w) {
  if (n <= 0 || !t->data) return;
  void *to = qkv__at(t, qkv__dtype_bytes(t->dtype), batch, head, row, 0);
  qkv__gradient_store(&k->b, t, k->to.g.accumulate & what, to, from, ld, n, d, scale, &w->w);
}

static double scale_of(const call *k) { return qkv__round(&k->p, k->p.p.softmax_scale); }

static void store_rows(const call *k, const qkv__entry *e, const qkv__row_block *q, worker *w) {
  store(k, &k->to.g.dq, QKV_DQ, e->batch_q, q->head, e->row0_q + q->row, q->dQ, k->b.ld, q->rows, k->p.p.head_dim, scale_of(k), w);
}

static void store_keys(const call *k, const qkv__entry *e, int64_t kv_head, const qkv__key_block *b, worker *w) {
  store(k, &k->to.g.dk, QKV_DK, e->batch_kv, kv_head, e->row0_kv + b->key, b->dK, k->b.ld, b->keys, k->p.p.head_dim, scale_of(k), w);
  store(k, &k->to.g.dv, QKV_DV, e->batch_kv, kv_head, e->row0_kv + b->key, b->dV, k->b.ldv, b->keys, k->p.p.head_dim_v, 1, w);
}

/* Rows from nq on, and keys outside b0..b1. */
static void store_dead_rows(const call *k, const qkv__entry *e, int64_t kv_head, worker *w) {
  for (int64_t h = kv_head * k->p.group; h < (kv_head + 1) * k->p.group; h++)
    for (int64_t i = e->nq; i < e->rows; i += QKV_BLOCK)
      store(k, &k->to.g.dq, QKV_DQ, e->batch_q, h, e->row0_q + i, NULL, 0, QKV_MIN(QKV_BLOCK, e->rows - i), k->p.p.head_dim, 1, w);
}
static void store_dead_keys(const call *k, const qkv__entry *e, int64_t kv_head, worker *w) {
  const int64_t keys = keys_in(&k->p, e);
  for (int64_t i = 0; i < keys; i += QKV_BLOCK) {
    const int64_t end = QKV_MIN(keys, i + QKV_BLOCK), before = QKV_MIN(end, e->b0), after = QKV_MAX(i, e->b1);
    store(k, &k->to.g.dk, QKV_DK, e->batch_kv, kv_head, e->row0_kv + i, NULL, 0, before - i, k->p.p.head_dim, 1, w);
    store(k, &k->to.g.dv, QKV_DV, e->batch_kv, kv_head, e->row0_kv + i, NULL, 0, before - i, k->p.p.head_dim_v, 1, w);
    store(k, &k->to.g.dk, QKV_DK, e->batch_kv, kv_head, e->row0_kv + after, NULL, 0, end - after, k->p.p.head_dim, 1, w);
    store(k, &k->to.g.dv, QKV_DV, e->batch_kv, kv_head, e->row0_kv + after, NULL, 0, end - after, k->p.p.head_dim_v, 1, w);
  }
}

/* ---- Cells ---- */

/* Key block `index` of an entry, with its totals at a place of their own. */
static void place_keys(const qkv__entry *e, int64_t index, char *dK, char *dV, qkv__key_block *b) {
  const int64_t position = (first_block(e) + index) * QKV_BLOCK;
  b->key = QKV_MAX(e->b0, qkv__key_of_position(e, position));
  b->keys = (int)(QKV_MIN(e->b1, qkv__key_of_position(e, position + QKV_BLOCK)) - b->key);
  b->dK = dK;
  b->dV = dV;
}

/* Row blocks of one head, neighbours, against key blocks [from, to), whose totals begin at dK and dV (NULL: not wanted). */
static void cell(const call *k, const qkv__entry *e, int64_t kv_head, const qkv__row_block *rows, int64_t count, int64_t from, int64_t to,
                 char *dK, char *dV, worker *w) {
  const size_t size = real_bytes(k);
  const qkv__rows r = {&k->p, e, rows[0].head, rows[0].row, rows[count - 1].row + rows[count - 1].rows - rows[0].row};
  int64_t key = QKV_MAX(e->b0, qkv__key_of_position(e, (first_block(e) + from) * QKV_BLOCK));
  const int64_t end = QKV_MIN(e->b1, qkv__key_of_position(e, (first_block(e) + to) * QKV_BLOCK));
  if (k->b.g.fast) k->b.g.fast->enter();
  while (key < end) {
    if (k->p.p.mask_count) key = qkv__mask_next(&r, key, end);
    if (key >= end) break;
    const int64_t index = qkv__position_of_key(e, key) / QKV_BLOCK - first_block(e);
    qkv__key_block b;
    place_keys(e, index, dK ? dK + (size_t)((index - from) * QKV_BLOCK * k->b.ld) * size : NULL,
               dV ? dV + (size_t)((index - from) * QKV_BLOCK * k->b.ldv) * size : NULL, &b);
    qkv__key_block_load(&k->b, e, kv_head, b.key, b.keys, &b, &w->w);
    for (int64_t i = 0; i < count; i++) qkv__gradient_tile(&k->b, e, &rows[i], &b, &w->w);
    key = b.key + b.keys;
  }
  if (k->b.g.fast) k->b.g.fast->leave();
}

/* ---- OWNER and PASSES ---- */

/* All rows of a group against key blocks [from, to); with dq, which needs all key blocks, its rows too. */
static void keys_task(const call *k, int64_t unit, int64_t from, int64_t to, int with_dq, worker *w) {
  const int64_t kv_head = unit % k->p.p.num_kv_heads;
  qkv__entry e;
  qkv__entry_of(&k->p, unit / k->p.p.num_kv_heads, &e);
  if (from == 0) store_dead_keys(k, &e, kv_head, w);
  if (with_dq) store_dead_rows(k, &e, kv_head, w);
  to = QKV_MIN(to, key_blocks_of(&e));
  const int64_t n = QKV_MAX(0, to - from) * QKV_BLOCK;
  if (w->dK) memset(w->dK, 0, (size_t)(n * k->b.ld) * real_bytes(k));
  if (w->dV) memset(w->dV, 0, (size_t)(n * k->b.ldv) * real_bytes(k));
  for (int64_t h = kv_head * k->p.group; h < (kv_head + 1) * k->p.group; h++)
    for (int64_t row = 0; row < e.nq && (n || with_dq) && !is_cancelled(k); row += k->superblock * QKV_BLOCK) {
      qkv__row_block rows[MAX_SUPERBLOCK];
      int64_t count = 0;
      for (; count < k->superblock && row + count * QKV_BLOCK < e.nq; count++) {
        rows[count] = w->rows[count];
        if (!with_dq) rows[count].dQ = NULL;
        qkv__row_block_load(&k->b, &e, h, row + count * QKV_BLOCK, &rows[count], &w->w);
      }
      if (n) cell(k, &e, kv_head, rows, count, from, to, w->dK, w->dV, w);
      for (int64_t i = 0; i < count && with_dq; i++) store_rows(k, &e, &rows[i], w);
    }
  for (int64_t i = from; i < to; i++) {
    qkv__key_block b;
    place_keys(&e, i, w->dK ? w->dK + (size_t)((i - from) * QKV_BLOCK * k->b.ld) * real_bytes(k) : NULL,
               w->dV ? w->dV + (size_t)((i - from) * QKV_BLOCK * k->b.ldv) * real_bytes(k) : NULL, &b);
    store_keys(k, &e, kv_head, &b, w);
  }
}

static void owner_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  worker w = worker_of(k, index);
  keys_task(k, task, 0, k->key_blocks, 1, &w);
}

/* dq of one superblock. */
static void rows_task(const call *k, int64_t task, worker *w) {
  const int64_t supers = k->row_tasks / (k->units * k->p.group);
  const int64_t super = supers - 1 - task % supers, h = task / supers % k->p.p.num_heads;
  const int64_t kv_head = h / k->p.group;
  qkv__entry e;
  qkv__entry_of(&k->p, task / supers / k->p.p.num_heads, &e);
  if (super == 0 && h % k->p.group == 0) store_dead_rows(k, &e, kv_head, w);
  int64_t count = 0;
  for (; count < k->superblock; count++) {
    const int64_t row = (super * k->superblock + count) * QKV_BLOCK;
    if (row >= e.nq) break;
    qkv__row_block_load(&k->b, &e, h, row, &w->rows[count], &w->w);
  }
  if (count && e.b0 < e.b1) cell(k, &e, kv_head, w->rows, count, 0, key_blocks_of(&e), NULL, NULL, w);
  for (int64_t i = 0; i < count; i++) store_rows(k, &e, &w->rows[i], w);
}

static void passes_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  worker w = worker_of(k, index);
  if (task < k->key_tasks) {
    const int64_t chunks = k->key_tasks / k->units, chunk = task % chunks;
    keys_task(k, task / chunks, chunk * k->chunk, (chunk + 1) * k->chunk, 0, &w);
  } else
    rows_task(k, task - k->key_tasks, &w);
}

/* ---- WAVEFRONT ---- */

static qkv__row_block *row_block_at(const call *k, int64_t b, int64_t head, int64_t index, int fresh) {
  const int64_t n = k->first_rows[b + 1] - k->first_rows[b], at = k->first_rows[b] * k->p.p.num_heads + head * n + index;
  if (fresh) {
    qkv__carver c = {k->block_memory + (size_t)at * k->block_bytes, 0, 0};
    qkv__row_block_carve(&k->b, &c, wants(k, QKV_DQ), &k->blocks[at]);
  }
  return &k->blocks[at];
}
/* Totals of key block `index`, of pitch `ld`. */
static char *totals_at(const call *k, char *all, int64_t ld, int64_t b, int64_t kv_head, int64_t index) {
  const int64_t n = k->first_keys[b + 1] - k->first_keys[b];
  return all ? all + (size_t)((k->first_keys[b] * k->p.p.num_kv_heads + kv_head * n + index) * QKV_BLOCK * ld) * real_bytes(k) : NULL;
}

/* Row chunks of an entry's group, and those of one head. */
static int64_t row_chunks_of(const call *k, const qkv__entry *e, int64_t *of_head) {
  *of_head = (blocks_of(e->nq) + k->chunk_rows - 1) / k->chunk_rows;
  return *of_head * k->p.group;
}

static void wavefront_cell(const call *k, const qkv__entry *e, int64_t kv_head, int64_t chunk, int64_t step, worker *w) {
  int64_t of_head;
  row_chunks_of(k, e, &of_head);
  const int64_t from = chunk * k->chunk, to = QKV_MIN(from + k->chunk, key_blocks_of(e));
  const int64_t h = kv_head * k->p.group + step / of_head, first = step % of_head * k->chunk_rows, blocks = blocks_of(e->nq);
  qkv__row_block rows[MAX_CHUNK_ROWS];
  int64_t count = 0;
  for (; count < k->chunk_rows && first + count < blocks; count++) rows[count] = *row_block_at(k, e->b, h, first + count, 0);
  char *dK = totals_at(k, k->dK, k->b.ld, e->b, kv_head, from), *dV = totals_at(k, k->dV, k->b.ldv, e->b, kv_head, from);
  if (step == 0) {
    const size_t n = (size_t)((to - from) * QKV_BLOCK) * real_bytes(k);
    if (dK) memset(dK, 0, n * (size_t)k->b.ld);
    if (dV) memset(dV, 0, n * (size_t)k->b.ldv);
  }
  cell(k, e, kv_head, rows, count, from, to, dK, dV, w);
}

/* Row chunks, before any cell. */
static void load_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const int64_t unit = task / k->row_chunks, step = task % k->row_chunks, kv_head = unit % k->p.p.num_kv_heads;
  qkv__entry e;
  int64_t of_head;
  qkv__entry_of(&k->p, unit / k->p.p.num_kv_heads, &e);
  if (step >= row_chunks_of(k, &e, &of_head) || !key_blocks_of(&e)) return;
  worker w = worker_of(k, index);
  const int64_t h = kv_head * k->p.group + step / of_head, first = step % of_head * k->chunk_rows;
  for (int64_t i = first; i < QKV_MIN(first + k->chunk_rows, blocks_of(e.nq)); i++)
    qkv__row_block_load(&k->b, &e, h, i * QKV_BLOCK, row_block_at(k, e.b, h, i, 1), &w.w);
}

/* Goes down key chunk `chunk` of a unit as far as the chunk to its left has been. Returns the row chunks that are left to do, and in
 * *moved whether it did any. */
static int64_t follow(const call *k, int64_t unit, int64_t chunk, int *moved, worker *w) {
  int32_t *done = &k->done[unit * k->key_chunks + chunk], *taken = &k->taken[unit * k->key_chunks + chunk];
  qkv__entry e;
  int64_t of_head;
  qkv__entry_of(&k->p, unit / k->p.p.num_kv_heads, &e);
  const int64_t steps = chunk * k->chunk < key_blocks_of(&e) ? row_chunks_of(k, &e, &of_head) : 0;
  const int64_t left = steps - QKV_LOAD_ACQUIRE(done);
  if (left == 0 || (chunk && QKV_LOAD_ACQUIRE(done - 1) == steps - left) || !QKV_TAKE(taken)) return left;
  int32_t step = QKV_LOAD_ACQUIRE(done);
  for (; step < steps && (!chunk || QKV_LOAD_ACQUIRE(done - 1) > step) && !is_cancelled(k); *moved = 1) {
    wavefront_cell(k, &e, unit % k->p.p.num_kv_heads, chunk, step, w);
    QKV_STORE_RELEASE(done, ++step);
  }
  QKV_STORE_RELEASE(taken, 0);
  return steps - step;
}

/* One of as many tasks as there are workers; any of them alone does everything. A worker without a cell to do looks again while
 * others are at work, since these make cells ready, but not for ever: it is not needed. */
static void wavefront_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  worker w = worker_of(k, index);
  (void)task;
  for (int patience = PATIENCE; patience > 0 && !is_cancelled(k);) {
    int moved = 0;
    int64_t left = 0;
    for (int64_t i = 0; i < k->units * k->key_chunks; i++) left += follow(k, i % k->units, i / k->units, &moved, &w);
    if (!left) return;
    patience = moved ? PATIENCE : patience - 1;
    if (patience % YIELD_EVERY) QKV_PAUSE();
    else QKV_YIELD();
  }
}

/* Tasks of units: key chunks, then row chunks; what no cell has touched is 0. */
static void store_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const int64_t parts = QKV_MAX(1, k->key_chunks) + QKV_MAX(1, k->row_chunks), unit = task / parts, kv_head = unit % k->p.p.num_kv_heads;
  int64_t part = task % parts;
  worker w = worker_of(k, index);
  qkv__entry e;
  qkv__entry_of(&k->p, unit / k->p.p.num_kv_heads, &e);
  if (part < QKV_MAX(1, k->key_chunks)) {
    if (part == 0) store_dead_keys(k, &e, kv_head, &w);
    for (int64_t i = part * k->chunk; i < QKV_MIN((part + 1) * k->chunk, key_blocks_of(&e)); i++) {
      qkv__key_block b;
      place_keys(&e, i, e.nq ? totals_at(k, k->dK, k->b.ld, e.b, kv_head, i) : NULL,
                 e.nq ? totals_at(k, k->dV, k->b.ldv, e.b, kv_head, i) : NULL, &b);
      store_keys(k, &e, kv_head, &b, &w);
    }
    return;
  }
  part -= QKV_MAX(1, k->key_chunks);
  if (part == 0) store_dead_rows(k, &e, kv_head, &w);
  int64_t chunks;
  if (part >= row_chunks_of(k, &e, &chunks)) return;
  for (int64_t i = part % chunks * k->chunk_rows; i < QKV_MIN(blocks_of(e.nq), (part % chunks + 1) * k->chunk_rows); i++) {
    qkv__row_block *q = row_block_at(k, e.b, kv_head * k->p.group + part / chunks, i, 0), none;
    if (!key_blocks_of(&e)) {
      memset(&none, 0, sizeof none);
      none.head = kv_head * k->p.group + part / chunks;
      none.row = i * QKV_BLOCK;
      none.rows = (int)QKV_MIN(QKV_BLOCK, e.nq - none.row);
      q = &none;
    }
    store_rows(k, &e, q, &w);
  }
}

/* ---- dbias and dsinks ---- */

/* Indices of an axis of a gradient: its own, or all of those it is summed over. */
typedef struct range {
  int64_t from, to;
} range;
static range range_of(int64_t stride, int64_t index, int64_t extent) {
  const range own = {index, index + 1}, all = {0, extent};
  return stride ? own : all;
}

static void add_scores(const call *k, char *total, int64_t row_step, int64_t key_step, const void *dS, int rows, int keys) {
  for (int i = 0; i < rows; i++)
    for (int x = 0; x < keys; x++)
      if (k->p.f64)
        ((double *)(void *)total)[i * row_step + x * key_step] += ((const double *)dS)[i * QKV_BLOCK + x];
      else
        ((float *)(void *)total)[i * row_step + x * key_step] += ((const float *)dS)[i * QKV_BLOCK + x];
}

/* Elements of 64 rows, or of all rows together where these are summed. Where keys and rows are summed, the scores of a block of
 * rows are kept, to be added row by row. */
static void dbias_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const qkv_problem *p = &k->p.p;
  const qkv_tensor *t = &k->to.g.dbias;
  const int64_t row_tasks = t->stride[2] ? blocks_of(k->p.max_rows) : 1, heads = t->stride[1] ? p->num_heads : 1;
  const int64_t block = task % row_tasks, head = task / row_tasks % heads, batch = task / row_tasks / heads;
  const range entries = range_of(t->stride[0], batch, p->batch), hs = range_of(t->stride[1], head, p->num_heads);
  const int kept = !t->stride[2] && !t->stride[3];
  const int64_t key_step = kept || t->stride[3] ? 1 : 0, pitch = key_step ? k->p.max_keys : 1, row_step = kept || t->stride[2] ? pitch : 0;
  const size_t size = real_bytes(k), bytes = (size_t)(kept || t->stride[2] ? QKV_BLOCK : 1) * (size_t)pitch * size;
  union {
    double d;
    float f;
  } sum = {0};
  worker w = worker_of(k, index);
  memset(w.dbias, 0, bytes);
  for (int64_t b = entries.from; b < entries.to; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    for (int64_t h = hs.from; h < hs.to; h++) {
      const range blocks = range_of(t->stride[2], block, blocks_of(e.nq));
      for (int64_t i = blocks.from; i < blocks.to && i * QKV_BLOCK < e.nq; i++) {
        qkv__row_block *q = &w.rows[0];
        qkv__row_block_load(&k->b, &e, h, i * QKV_BLOCK, q, &w.w);
        const qkv__rows r = {&k->p, &e, h, q->row, q->rows};
        for (int64_t key = e.b0; key < e.b1;) {
          if (p->mask_count) key = qkv__mask_next(&r, key, e.b1);
          if (key >= e.b1) break;
          qkv__key_block keys = {0};
          const int n = (int)QKV_MIN(QKV_BLOCK, e.b1 - key);
          qkv__key_block_load(&k->b, &e, h / k->p.group, key, n, &keys, &w.w);
          if (qkv__gradient_scores(&k->b, &e, q, &keys, &w.w))
            add_scores(k, w.dbias + (size_t)(key * key_step) * size, row_step, key_step, w.w.S, q->rows, n);
          key += n;
        }
        if (kept) {
          for (int64_t x = 0; x < QKV_BLOCK * pitch; x++) add_scores(k, (char *)&sum, 0, 0, w.dbias + (size_t)x * size, 1, 1);
          memset(w.dbias, 0, bytes);
        }
      }
    }
  }
  const int64_t rows = t->stride[2] ? QKV_MIN(QKV_BLOCK, k->p.max_rows - block * QKV_BLOCK) : 1, columns = t->stride[3] ? k->p.max_keys : 1;
  const int64_t piece = QKV_BLOCK * QKV_MAX(p->head_dim, p->head_dim_v); /* what work memory holds */
  for (int64_t i = 0; i < rows; i++)
    for (int64_t x = 0; x < columns; x += piece)
      qkv__gradient_store(&k->b, t, k->to.g.accumulate & QKV_DBIAS,
                          qkv__at(t, qkv__dtype_bytes(t->dtype), batch, head, block * QKV_BLOCK + i, x),
                          kept ? (char *)&sum : w.dbias + (size_t)(i * pitch + x) * size, pitch, 1, QKV_MIN(piece, columns - x), 1, &w.w);
}

static void dsinks_task(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const qkv_problem *p = &k->p.p;
  const qkv_tensor *t = &k->to.g.dsinks;
  const int64_t heads = t->stride[1] ? p->num_heads : 1, head = task % heads, batch = task / heads;
  const range entries = range_of(t->stride[0], batch, p->batch), hs = range_of(t->stride[1], head, p->num_heads);
  worker w = worker_of(k, index);
  double total = 0;
  for (int64_t b = entries.from; b < entries.to; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    for (int64_t h = hs.from; h < hs.to; h++)
      for (int64_t row = 0; row < e.nq; row += QKV_BLOCK) {
        qkv__row_block_sums(&k->b, &e, h, row, &w.rows[0], &w.w);
        total = k->b.g.k->sink_sum(total, qkv__parameter(&p->sinks, b, h) * QKV_LOG2E, w.rows[0].L2, w.rows[0].delta, w.rows[0].rows);
      }
  }
  void *to = qkv__at(t, qkv__dtype_bytes(t->dtype), batch, head, 0, 0);
  double value = 0 - total + 0.0;
  if (k->to.g.accumulate & QKV_DSINKS)
    value = qkv__round(&k->p, qkv__round(&k->p, qkv__parameter(t, batch, head)) + value);
  if (t->dtype == QKV_F64)
    *(double *)to = value;
  else
    *(float *)to = (float)value;
}

/* ---- The reference as an engine ---- */

static void reference_rows(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  qkv__entry e;
  int64_t h, i;
  (void)index;
  qkv__row_of(&k->p, task, &e, &h, &i);
  (k->p.f64 ? qkv__reference_dq_f64 : qkv__reference_dq_f32)(&k->p, &k->to, &e, h, i);
}
static void reference_keys(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const qkv_problem *p = &k->p.p;
  const int64_t kv_head = task / p->seqlen_kv % p->num_kv_heads;
  int64_t key = task % p->seqlen_kv, b = task / p->seqlen_kv / p->num_kv_heads;
  qkv__entry e;
  (void)index;
  if (p->cu_seqlens_kv) {
    for (b = 0; p->cu_seqlens_kv[b + 1] <= key;) b++;
    key -= p->cu_seqlens_kv[b];
  }
  qkv__entry_of(&k->p, b, &e);
  (k->p.f64 ? qkv__reference_dkv_f64 : qkv__reference_dkv_f32)(&k->p, &k->to, &e, kv_head, key);
}
static void reference_dbias(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const qkv_tensor *t = &k->to.g.dbias;
  const int64_t keys = t->stride[3] ? k->p.max_keys : 1, rows = t->stride[2] ? k->p.max_rows : 1, heads = t->stride[1] ? k->p.p.num_heads : 1;
  (void)index;
  (k->p.f64 ? qkv__reference_dbias_f64 : qkv__reference_dbias_f32)(&k->p, &k->to, task / keys / rows / heads, task / keys / rows % heads,
                                                                   task / keys % rows, task % keys);
}
static void reference_dsinks(void *arg, int64_t task, int32_t index) {
  const call *k = arg;
  const int64_t heads = k->to.g.dsinks.stride[1] ? k->p.p.num_heads : 1;
  (void)index;
  (k->p.f64 ? qkv__reference_dsinks_f64 : qkv__reference_dsinks_f32)(&k->p, &k->to, task / heads, task % heads);
}

static qkv_status run_reference(call *k) {
  const qkv_problem *p = &k->p.p;
  const int64_t keys = (p->cu_seqlens_kv ? 1 : p->batch) * p->num_kv_heads * p->seqlen_kv;
  const qkv_tensor *t = &k->to.g.dbias;
  const int64_t elements = wants(k, QKV_DBIAS) ? own(t->stride[0], p->batch) * own(t->stride[1], p->num_heads) *
                                                     own(t->stride[2], k->p.max_rows) * own(t->stride[3], k->p.max_keys)
                                               : 0;
  qkv_status s = wants(k, QKV_DQ) ? qkv__run(&k->c, reference_rows, k, k->p.rows) : QKV_OK;
  if (s == QKV_OK && wants(k, QKV_DK | QKV_DV)) s = qkv__run(&k->c, reference_keys, k, keys);
  if (s == QKV_OK) s = qkv__run(&k->c, reference_dbias, k, elements);
  if (s == QKV_OK) s = qkv__run(&k->c, reference_dsinks, k, k->dsinks_tasks);
  return s;
}

/* ---- Calls ---- */

static void count_blocks(call *k) {
  int64_t rows = 0, keys = 0;
  for (int64_t b = 0; b < k->p.p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(&k->p, b, &e);
    k->first_rows[b] = rows;
    k->first_keys[b] = keys;
    rows += blocks_of(e.nq);
    keys += key_blocks_of(&e);
  }
  k->first_rows[k->p.p.batch] = rows;
  k->first_keys[k->p.p.batch] = keys;
}

static qkv_status run(call *k) {
  qkv_status s = QKV_OK;
  if (k->schedule == REFERENCE) return run_reference(k);
  if (!wants(k, QKV_DQ | QKV_DK | QKV_DV))
    ;
  else if (k->schedule == OWNER)
    s = qkv__run(&k->c, owner_task, k, k->units);
  else if (k->schedule == PASSES)
    s = qkv__run(&k->c, passes_task, k, k->key_tasks + k->row_tasks);
  else {
    const int64_t chunks = k->units * k->key_chunks;
    count_blocks(k);
    if (chunks) {
      memset(k->done, 0, (size_t)chunks * sizeof *k->done);
      memset(k->taken, 0, (size_t)chunks * sizeof *k->taken);
      s = qkv__run(&k->c, load_task, k, k->units * k->row_chunks);
      if (s == QKV_OK) s = qkv__run(&k->c, wavefront_task, k, k->c.num_workers);
    }
    if (s == QKV_OK) s = qkv__run(&k->c, store_task, k, k->units * (QKV_MAX(1, k->key_chunks) + QKV_MAX(1, k->row_chunks)));
  }
  if (s == QKV_OK) s = qkv__run(&k->c, dbias_task, k, k->dbias_tasks);
  if (s == QKV_OK) s = qkv__run(&k->c, dsinks_task, k, k->dsinks_tasks);
  return s == QKV_OK && is_cancelled(k) ? QKV_CANCELLED : s; /* long tasks end early */
}

enum { USES = QKV__USES_QK | QKV__USES_V | QKV__USES_OUT };

qkv_status qkv_backward_check(const qkv_problem *problem, const qkv_gradients *gradients, char *text, size_t bytes) {
  qkv__problem p;
  qkv__gradients g;
  qkv__fpstate fp;
  qkv__fp_enter(&fp);
  const qkv_status s = qkv__check_gradients(problem, gradients, USES, &p, &g, text, bytes);
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_backward_scratch(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients, size_t *bytes) {
  call k;
  qkv__fpstate fp;
  if (!bytes) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, problem, gradients, 0, &k);
  if (s == QKV_OK) {
    const size_t most = k.schedule == REFERENCE ? 0 : most_bytes(&k);
    if (most == SIZE_MAX) s = QKV_TOO_LARGE;
    else *bytes = most + QKV__MEMORY_SLACK;
  }
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_backward(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients, void *scratch,
                        size_t bytes) {
  call k;
  qkv__fpstate fp;
  qkv__memory m;
  qkv__fp_enter(&fp);
  qkv_status s = prepare(context, problem, gradients, USES, &k);
  if (s == QKV_OK) s = qkv__memory_take(&k.c, scratch, bytes, scratch && k.schedule != REFERENCE ? most_bytes(&k) : k.bytes, &m);
  if (s == QKV_OK) {
    if (k.schedule != REFERENCE) layout_of(&k, m.base);
    s = run(&k);
    qkv__memory_release(&k.c, &m);
  }
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_backward_describe(const qkv_context *context, const qkv_problem *problem, const qkv_gradients *gradients, char *text,
                                 size_t bytes) {
  call k;
  qkv__fpstate fp;
  if (!text && bytes) return QKV_BAD_POINTER;
  qkv__fp_enter(&fp);
  const qkv_status s = prepare(context, problem, gradients, 0, &k);
  if (s == QKV_OK) {
    const double efficiency = k.schedule == OWNER ? owner_efficiency(&k) : k.schedule == WAVEFRONT ? k.wavefront : 1;
    const int share = (int)(efficiency * 10000 + 0.5);
    const size_t scratch = (k.schedule == REFERENCE ? 0 : most_bytes(&k)) + QKV__MEMORY_SLACK;
    const int64_t tasks = k.schedule == OWNER    ? k.units
                          : k.schedule == PASSES ? k.key_tasks + k.row_tasks
                                                 : k.units * k.key_chunks * k.row_chunks;
    snprintf(text, bytes,
             "direction: backward\narithmetic: %s\norder: %d\nisa: %s\nschedule: %s\nproducts: %d\nworkers: %" PRId32 "\n"
             "tasks: %" PRId64 "\nrows_per_task: %" PRId64 "\nscratch_bytes: %zu\nbalance: %d.%04d\n",
             k.b.g.fast ? "fast bf16" : k.p.f64 ? "f64" : "f32", k.b.g.fast ? 0 : QKV_ORDER,
             k.schedule == REFERENCE ? "reference" : k.b.g.fast ? k.b.g.fast->isa : k.b.g.k->isa, schedule_names[k.schedule],
             k.schedule == PASSES && wants(&k, QKV_DQ) && wants(&k, QKV_DK | QKV_DV) ? 7 : 5, k.c.num_workers, tasks,
             k.schedule == WAVEFRONT ? k.chunk_rows * QKV_BLOCK : k.superblock * QKV_BLOCK, scratch, share / 10000,
             share % 10000);
  }
  qkv__fp_leave(&fp);
  return s;
}

qkv_status qkv_scale_gradient(const qkv_problem *problem, const qkv_gradients *gradients, double *dscale) {
  qkv__problem p;
  qkv__gradients g;
  qkv__fpstate fp;
  double total = 0;
  qkv__fp_enter(&fp);
  qkv_status s = qkv__check_gradients(problem, gradients, USES, &p, &g, NULL, 0);
  if (s == QKV_OK && (!dscale || !(g.wanted & QKV_DQ))) s = QKV_BAD_POINTER;
  for (int64_t b = 0; s == QKV_OK && b < p.p.batch; b++) {
    qkv__entry e;
    qkv__entry_of(&p, b, &e);
    for (int64_t h = 0; h < p.p.num_heads; h++)
      for (int64_t i = 0; i < e.nq; i++)
        for (int64_t x = 0; x < p.p.head_dim; x++)
          total = qkv__fma64(qkv__stage_value(&p.p.q, e.batch_q, h, e.row0_q + i, x),
                             qkv__stage_value(&g.g.dq, e.batch_q, h, e.row0_q + i, x), total);
  }
  if (s == QKV_OK) *dscale = total / p.p.softmax_scale;
  qkv__fp_leave(&fp);
  return s;
}

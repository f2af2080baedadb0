/* A panel: up to w query rows that share a key-value head, side by side in the lanes of a kernel. Rows are counted head
 * by head within the group: row f of a (entry, kv head) is query f % nq of the group's head f / nq. Loading, visibility,
 * score modifiers and storing of panels; flash, standard and states are loops over this. */
#ifndef QKV_ATTENTION_PANEL_H
#define QKV_ATTENTION_PANEL_H

#include "attention/tree.h"
#include "base/size.h"
#include "kernel/kernel.h"
#include "mask/mask.h"

/* Neighbouring lanes of one head. */
typedef struct qkv__segment {
  int64_t head, row;
  int rows, lane;
} qkv__segment;

typedef struct qkv__panel {
  int nv, w, lanes, segments; /* w = nv vectors, of which `lanes` rows are real */
  qkv__segment *segment;      /* [max w] */
  void *Qt;
  void *slope2, *sink2; /* [w], if the problem has them */
  double *position;     /* [w] */
  uint32_t *drop_position, *drop_head; /* [w]: the rows' part of dropout's counters, if there is dropout */
} qkv__panel;

/* Work memory of one panel step. */
typedef struct qkv__stage {
  void *rows;      /* [w][max(head_dim, head_dim_v)] */
  void *bias_rows; /* [w][64] */
  void *bias;      /* [64][w] */
  uint16_t *raw;   /* [64 or w][max(head_dim, head_dim_v)], of QKV_FAST: rows without unit stride */
} qkv__stage;

/* What a call works with. */
typedef struct qkv__engine {
  const qkv__problem *p;
  const qkv__kernel *k;
  const qkv__fast *fast; /* QKV_FAST and possible; or NULL */
  uint32_t flags;
  int w;    /* of the widest panel */
  int fuse; /* softmax of one panel beside the scores of the next */
} qkv__engine;

void qkv__panel_carve(const qkv__engine *g, qkv__carver *c, qkv__panel *panel, int with_q);
void qkv__stage_carve(const qkv__engine *g, qkv__carver *c, qkv__stage *s);

/* Rows f .. f + n of (entry, kv head); n <= g->w. Packs Q if the panel has room for it. */
void qkv__panel_load(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t f, int64_t n, qkv__panel *panel,
                     qkv__stage *s);

/* Keys [key, key + keys) of one block: QKV_TILE_NONE; ALL; SOME with bits per lane. runs says which keys to compute. */
int32_t qkv__panel_visible(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int keys,
                           uint64_t *bits, qkv__runs *runs);
/* The first key >= key that a row of the panel may see, at most end. */
int64_t qkv__panel_next(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int64_t end);

/* Score modifiers of a block. Returns 0 if there is nothing to adjust (bits NULL and no modifier). */
int qkv__panel_adjust(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, int keys,
                      const uint64_t *bits, qkv__stage *s, qkv__adjust *a);

/* Bits of a block that every row sees. */
void qkv__panel_all_bits(const qkv__panel *panel, int keys, uint64_t *bits);
/* Clears the bits that a bias of -inf hides; the bias is the one qkv__panel_adjust left in s. */
void qkv__panel_hide(const qkv__engine *g, const qkv__panel *panel, const qkv__stage *s, int keys, uint64_t *bits);

/* Dropout of the weights of a block. */
void qkv__panel_drop(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, int64_t key, const qkv__runs *runs,
                     void *weights);

/* FINISH of (O, m, l) and store to out and lse. */
void qkv__panel_finish(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, qkv__tree_node *n, qkv__stage *s);
/* Node `index` of a state: rows of the panel. */
void qkv__panel_to_state(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, const qkv__tree_node *n,
                         const qkv_state *s, int64_t index, qkv__stage *w);
void qkv__panel_from_state(const qkv__engine *g, const qkv__entry *e, const qkv__panel *panel, qkv__tree_node *n,
                           const qkv_state *s, int64_t index, qkv__stage *w);
/* Rows from nq on: 0 and -inf. */
void qkv__store_dead_rows(const qkv__engine *g, const qkv__entry *e, int64_t kv_head);
/* An empty node of width w; or only its m and l. */
void qkv__clear_node(const qkv__engine *g, qkv__tree_node *n, int w);
void qkv__clear_sums(const qkv__engine *g, qkv__tree_node *n, int w);
/* v[0..n) = x */
void qkv__fill(const qkv__engine *g, void *v, int n, double x);

/* Keys of a block as the kernels want them: in place, or copied into `memory` [64][head_dim]. Returns the row stride. */
int64_t qkv__block_keys(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, void *memory,
                        const void **rows);
/* Values of a block that `panels` panels use: in place, or packed into `memory` of qkv__packed_values elements. */
typedef struct qkv__values {
  const void *rows;
  int64_t ld, strip;
} qkv__values;
int64_t qkv__packed_values(int64_t head_dim_v);
void qkv__block_values(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, int64_t panels,
                       void *memory, qkv__values *v);
/* The same for QKV_FAST: K[64][padded head_dim]; V^T, and the rows it was made from. Returns the row stride of K. */
int64_t qkv__block_keys_fast(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__stage *s,
                             void *memory, const uint16_t **rows);
int qkv__block_values_fast(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, qkv__stage *s,
                           void *memory);
/* Adds what qkv__block_values_fast left out, the values of a block that are not finite, to the rows that see them. P: pairs. */
void qkv__add_not_finite(const qkv__engine *g, const qkv__entry *e, int64_t kv_head, int64_t key, int keys, const qkv__panel *panel,
                         const uint64_t *bits, const uint32_t *P, float *O);
int64_t qkv__padded(int64_t n, int64_t to);
int qkv__values_finite(const qkv__engine *g, const qkv__values *v, int keys);

#endif

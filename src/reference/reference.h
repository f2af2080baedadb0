/* The arithmetic of docs/NUMERICS.md in scalar C: executable specification, oracle of the kernels, and teaching text. It
 * shares the checked problem and the constants with the rest of the library, and nothing else. Chosen by isa_cap
 * "reference". */
#ifndef QKV_REFERENCE_REFERENCE_H
#define QKV_REFERENCE_REFERENCE_H

#include "problem/problem.h"

/* Row i of head h of an entry; `work` is qkv__reference_work bytes, aligned to 64. */
#define QKV__REFERENCE_DECLARE(F)                                                                                           \
  size_t qkv__reference_work_##F(const qkv__problem *p);                                                                    \
  /* Attends and writes out and lse: order 1 (FLASH), or the order of STANDARD. */                                          \
  void qkv__reference_row_##F(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, void *work);                \
  /* The node (level, index) of the tree: O[head_dim_v], m, l. */                                                           \
  void qkv__reference_node_##F(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, qkv_node node, void *O,    \
                               void *m, void *l, void *work);                                                               \
  /* Root of nodes ascending by position, then FINISH. */                                                                   \
  void qkv__reference_finish_##F(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, const qkv_state *s,      \
                                 int64_t row, void *work);                                                                  \
  /* One value per key: SCORES of docs/NUMERICS.md. `to` is a row of stride `stride`, f32 or (wide) f64. */                 \
  void qkv__reference_scores_##F(const qkv__problem *p, const qkv__entry *e, int64_t h, int64_t i, int32_t stage, void *to, \
                                 int64_t stride, int wide, void *work);                                                     \
  /* BACKWARD, each stored in its tensors where they are wanted: dq of a row; dk and dv of key j (index within the entry) of a  \
   * key-value head; one element of dbias and of dsinks (index 0 on the axes they are summed over). */                      \
  void qkv__reference_dq_##F(const qkv__problem *p, const qkv__gradients *g, const qkv__entry *e, int64_t h, int64_t i);     \
  void qkv__reference_dkv_##F(const qkv__problem *p, const qkv__gradients *g, const qkv__entry *e, int64_t kv, int64_t j);   \
  void qkv__reference_dbias_##F(const qkv__problem *p, const qkv__gradients *g, int64_t b, int64_t h, int64_t i, int64_t j); \
  void qkv__reference_dsinks_##F(const qkv__problem *p, const qkv__gradients *g, int64_t b, int64_t h);
QKV__REFERENCE_DECLARE(f32)
QKV__REFERENCE_DECLARE(f64)
#undef QKV__REFERENCE_DECLARE

#endif

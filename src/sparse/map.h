/* Block maps inside the library. */
#ifndef QKV_SPARSE_MAP_H
#define QKV_SPARSE_MAP_H

#include "problem/problem.h"
#include "problem/tensor.h"
#include "qkv/sparse.h"

QKV_INLINE int64_t qkv__map_rows(const qkv_block_map *m) { return (m->seqlen_q + m->block - 1) / m->block; }
QKV_INLINE int64_t qkv__map_keys(const qkv_block_map *m) { return (m->seqlen_kv + m->block - 1) / m->block; }
/* indptr of an entry and head. */
QKV_INLINE int32_t *qkv__map_row(const qkv_block_map *m, int64_t b, int64_t head) {
  return m->indptr + ((m->batch > 1 ? b : 0) * m->num_heads + (m->num_heads > 1 ? head : 0)) * (qkv__map_rows(m) + 1);
}

/* Extents; or all, the lists too. */
qkv_status qkv__map_check_extents(const qkv__report *r, const qkv_block_map *map);
qkv_status qkv__map_check(const qkv__report *r, const qkv_block_map *map);
/* Sorts a list ascending. */
void qkv__map_sort(int32_t *list, int64_t n);

#endif

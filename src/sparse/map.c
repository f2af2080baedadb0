/* Memory, order and checks of block maps. */
#include "sparse/map.h"

#include <inttypes.h>
#include <string.h>

#include "base/size.h"

qkv_status qkv__map_check_extents(const qkv__report *r, const qkv_block_map *map) {
  if (!map) return qkv__fail(r, QKV_BAD_POINTER, "map is NULL");
  if (map->size != sizeof *map)
    return qkv__fail(r, QKV_BAD_SIZE,
                     "map.size %" PRIu32 " is not the size of the struct; set it to sizeof, as qkv_block_map_default does",
                     map->size);
  if (map->reserved) return qkv__fail(r, QKV_UNKNOWN_FIELD, "map.reserved %" PRId32 " is not 0", map->reserved);
  if (map->block < 16 || map->block > 256)
    return qkv__fail(r, QKV_BAD_EXTENT, "map.block %" PRId32 " is not in 16..256", map->block);
  if (map->seqlen_q < 0 || map->seqlen_q > INT32_MAX || map->seqlen_kv < 0 || map->seqlen_kv > INT32_MAX)
    return qkv__fail(r, QKV_BAD_EXTENT, "map.seqlen_q %" PRId64 ", map.seqlen_kv %" PRId64 ": not in 0..2^31 - 1",
                     map->seqlen_q, map->seqlen_kv);
  if (map->batch < 0 || map->batch > INT32_MAX || map->num_heads < 0 || map->num_heads > INT32_MAX)
    return qkv__fail(r, QKV_BAD_EXTENT, "map.batch %" PRId64 ", map.num_heads %" PRId64 ": not in 0..2^31 - 1", map->batch,
                     map->num_heads);
  return QKV_OK;
}

qkv_status qkv__map_check(const qkv__report *r, const qkv_block_map *map) {
  QKV_TRY(qkv__map_check_extents(r, map));
  const int64_t rows = qkv__map_rows(map), keys = qkv__map_keys(map);
  int64_t lists;
  if (!qkv__mul(map->batch * map->num_heads, rows + 1, &lists) || lists > PTRDIFF_MAX / (int64_t)sizeof *map->indptr)
    return qkv__fail(r, QKV_TOO_LARGE,
                     "map: batch %" PRId64 ", num_heads %" PRId64 " and seqlen_q %" PRId64 " are more than memory holds",
                     map->batch, map->num_heads, map->seqlen_q);
  if (lists && !map->indptr) return qkv__fail(r, QKV_BAD_POINTER, "map.indptr is NULL");
  for (int64_t n = 0; n < map->batch * map->num_heads; n++) {
    const int32_t *row = map->indptr + n * (rows + 1);
    for (int64_t i = 0; i < rows; i++) {
      if (row[i] < 0 || row[i + 1] < row[i] || row[i + 1] > map->capacity)
        return qkv__fail(r, QKV_BAD_MASK,
                         "map.indptr[%" PRId64 "] %" PRId32 " and %" PRId32 " are no ascending places of the %" PRId64
                         " indices",
                         n * (rows + 1) + i, row[i], row[i + 1], map->capacity);
      if (row[i] < row[i + 1] && !map->indices) return qkv__fail(r, QKV_BAD_POINTER, "map.indices is NULL");
      for (int32_t k = row[i]; k < row[i + 1]; k++) {
        const int32_t block = map->indices[k];
        if (block < 0 || block >= keys)
          return qkv__fail(r, QKV_BAD_MASK,
                           "map.indices[%" PRId32 "] %" PRId32 " is not one of the %" PRId64 " blocks of keys", k, block,
                           keys);
        if (map->sorted && k > row[i] && block < map->indices[k - 1])
          return qkv__fail(r, QKV_BAD_MASK,
                           "map.indices[%" PRId32 "] %" PRId32 " comes after %" PRId32 ", but map.sorted is set", k, block,
                           map->indices[k - 1]);
      }
    }
  }
  return QKV_OK;
}

qkv_status qkv_block_map_check(const qkv_block_map *map, char *text, size_t bytes) {
  const qkv__report r = {text, bytes};
  if (text && bytes) text[0] = 0;
  return qkv__map_check(&r, map);
}

/* Numbers of offsets, and of places for blocks. */
static qkv_status sizes_of(const qkv_block_map *map, int64_t count, int64_t *offsets, int64_t *places) {
  const qkv__report none = {NULL, 0};
  int64_t lists, all;
  QKV_TRY(qkv__map_check_extents(&none, map));
  if (count < 0) return QKV_BAD_EXTENT;
  count = QKV_MIN(count, qkv__map_keys(map));
  lists = map->batch * map->num_heads; /* each fits 31 bits */
  if (!qkv__mul(lists, qkv__map_rows(map) + 1, offsets) || !qkv__mul(lists, qkv__map_rows(map) * count, places) ||
      !qkv__add(*offsets, *places, &all) || all > PTRDIFF_MAX / (int64_t)sizeof *map->indices || *places > INT32_MAX)
    return QKV_TOO_LARGE;
  return QKV_OK;
}

qkv_status qkv_block_map_bytes(const qkv_block_map *map, int64_t count, size_t *bytes) {
  int64_t offsets, places;
  if (!bytes) return QKV_BAD_POINTER;
  QKV_TRY(sizes_of(map, count, &offsets, &places));
  *bytes = (size_t)(offsets + places) * sizeof *map->indices;
  return QKV_OK;
}

qkv_status qkv_block_map_init(qkv_block_map *map, int64_t count, void *memory, size_t bytes) {
  int64_t offsets, places;
  QKV_TRY(sizes_of(map, count, &offsets, &places));
  if (bytes < (size_t)(offsets + places) * sizeof *map->indices) return QKV_SCRATCH_TOO_SMALL;
  if (!memory || (uintptr_t)memory % sizeof *map->indices) return QKV_BAD_POINTER;
  map->indptr = memory;
  map->indices = map->indptr + offsets;
  map->capacity = places;
  map->sorted = 1;
  memset(map->indptr, 0, (size_t)offsets * sizeof *map->indptr);
  return QKV_OK;
}

/* ---- Order ---- */

static void sift(int32_t *list, int64_t root, int64_t n) {
  for (int64_t child; (child = 2 * root + 1) < n; root = child) {
    if (child + 1 < n && list[child + 1] > list[child]) child++;
    if (list[child] <= list[root]) return;
    const int32_t t = list[root];
    list[root] = list[child];
    list[child] = t;
  }
}

void qkv__map_sort(int32_t *list, int64_t n) {
  for (int64_t i = n / 2; i-- > 0;) sift(list, i, n);
  for (int64_t i = n - 1; i > 0; i--) {
    const int32_t t = list[0];
    list[0] = list[i];
    list[i] = t;
    sift(list, 0, i);
  }
}

qkv_status qkv_block_map_sort(qkv_block_map *map) {
  const qkv__report none = {NULL, 0};
  if (map && map->size == sizeof *map && map->sorted) return QKV_OK;
  QKV_TRY(qkv__map_check(&none, map));
  const int64_t rows = qkv__map_rows(map);
  for (int64_t n = 0; n < map->batch * map->num_heads; n++) {
    const int32_t *row = map->indptr + n * (rows + 1);
    for (int64_t i = 0; i < rows; i++) qkv__map_sort(map->indices + row[i], row[i + 1] - row[i]);
  }
  map->sorted = 1;
  return QKV_OK;
}

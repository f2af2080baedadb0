/* Blocks of keys that blocks of queries see, listed in a block map. */
#include <inttypes.h>
#include <stdio.h>

#include "mask/mask.h"
#include "sparse/map.h"

static const qkv_block_map *map_of(const qkv_mask *m) { return m->user; }

int qkv__mask_blocks_heads(const qkv_mask *m) { return map_of(m)->num_heads > 1; }

/* The ends of the positions that a problem's entries have, as if all their rows and keys existed. */
static void ends_of(const qkv_problem *p, int64_t *end_q, int64_t *end_kv) {
  *end_q = *end_kv = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    const int64_t rows = p->cu_seqlens_q ? p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b] : p->seqlen_q;
    const int64_t keys = p->cu_seqlens_kv ? p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b] : p->seqlen_kv;
    const int64_t first = p->kv_position ? p->kv_position[b] : 0;
    const int64_t query_end = p->align == QKV_ALIGN_END     ? first + keys
                              : p->align == QKV_ALIGN_START ? first + rows
                                                            : (p->q_position ? p->q_position[b] : 0) + rows;
    *end_q = QKV_MAX(*end_q, query_end);
    *end_kv = QKV_MAX(*end_kv, first + keys);
  }
}

static int fits(int64_t size, int64_t end, int may_be_more) { return size == end || (may_be_more && size > end); }

qkv_status qkv__mask_blocks_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  const qkv_block_map *map = map_of(m);
  char text[120] = "";
  int64_t end_q, end_kv;
  if (!map) {
    snprintf(why, bytes, "user, the block map, is NULL");
    return QKV_BAD_POINTER;
  }
  const qkv_status s = qkv_block_map_check(map, text, sizeof text);
  if (s != QKV_OK) {
    snprintf(why, bytes, "user: %s", text);
    return s;
  }
  if ((map->batch != 1 && map->batch != p->batch) || (map->num_heads != 1 && map->num_heads != p->num_heads)) {
    snprintf(why, bytes,
             "user: a map of %" PRId64 " entries and %" PRId64 " heads; the problem has %" PRId64 " and %" PRId64,
             map->batch, map->num_heads, p->batch, p->num_heads);
    return QKV_BAD_MASK;
  }
  ends_of(p, &end_q, &end_kv);
  if (p->batch && (!fits(map->seqlen_q, end_q, p->kv_position || p->align == QKV_ALIGN_EXPLICIT) ||
                   !fits(map->seqlen_kv, end_kv, p->kv_position != NULL))) {
    snprintf(why, bytes,
             "user: a map for %" PRId64 " x %" PRId64 " positions; the problem has %" PRId64 " x %" PRId64
             " (queries x keys)",
             map->seqlen_q, map->seqlen_kv, end_q, end_kv);
    return QKV_BAD_MASK;
  }
  return QKV_OK;
}

/* The list of a block of queries. */
typedef struct list {
  const int32_t *at, *end;
} list;

/* The place of the first block >= c; of a list in no order, its begin. */
static const int32_t *place_of(const qkv_block_map *map, list l, int32_t c) {
  if (!map->sorted) return l.at;
  while (l.at < l.end) {
    const int32_t *middle = l.at + (l.end - l.at) / 2;
    if (*middle < c)
      l.at = middle + 1;
    else
      l.end = middle;
  }
  return l.at;
}

/* Which of the blocks c0 ... c1 are listed, as bits; at most 5, as a tile has 64 keys. */
static uint32_t hits(const qkv_block_map *map, list l, int32_t c0, int32_t c1) {
  uint32_t hit = 0;
  for (const int32_t *x = place_of(map, l, c0); x < l.end; x++) {
    if (c0 <= *x && *x <= c1)
      hit |= (uint32_t)1 << (*x - c0);
    else if (map->sorted)
      break;
  }
  return hit;
}

int32_t qkv__mask_blocks_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const qkv_block_map *map = map_of(m);
  const int64_t block = map->block, position = r->e->position_q + r->row, first = qkv__position_of_key(r->e, key);
  const int64_t c0 = first / block, c1 = (first + keys - 1) / block, last = position + r->rows - 1;
  const int32_t *row = qkv__map_row(map, r->e->b, r->head);
  const uint32_t all = ((uint32_t)1 << (c1 - c0 + 1)) - 1;
  int none = 1, every = position >= 0; /* a query before position 0 is in no block */
  if (last < 0) return QKV_TILE_NONE;
  const int64_t i0 = QKV_MAX(position, 0) / block, i1 = last / block;
  if (bits && i0 != i1)
    for (int64_t k = 0; k < keys; k++) bits[k] = 0;
  for (int64_t i = i0; i <= i1; i++) {
    const list l = {map->indices + row[i], map->indices + row[i + 1]};
    const uint32_t hit = hits(map, l, (int32_t)c0, (int32_t)c1);
    none &= !hit;
    every &= hit == all;
    if (!bits) {
      if (!none && !every) return QKV_TILE_SOME;
      continue;
    }
    if (i0 == i1 && every) return QKV_TILE_ALL;
    if (i0 == i1 && none) return QKV_TILE_NONE;
    const int64_t from = QKV_MAX(i * block - position, 0), to = QKV_MIN((i + 1) * block - position, r->rows);
    const uint64_t rows = ~(uint64_t)0 >> (64 - (to - from)) << from;
    for (int64_t c = c0; c <= c1; c++)
      for (int64_t k = QKV_MAX(c * block - first, 0); k < QKV_MIN((c + 1) * block - first, keys); k++)
        bits[k] = (i0 == i1 ? 0 : bits[k]) | (hit >> (c - c0) & 1 ? rows : 0);
  }
  return none ? QKV_TILE_NONE : every ? QKV_TILE_ALL : QKV_TILE_SOME;
}

int64_t qkv__mask_blocks_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const qkv_block_map *map = map_of(m);
  const int64_t block = map->block, position = r->e->position_q + r->row, first = qkv__position_of_key(r->e, key);
  const int64_t last = position + r->rows - 1, c0 = first / block;
  const int32_t *row = qkv__map_row(map, r->e->b, r->head);
  int64_t best = INT64_MAX;
  for (int64_t i = QKV_MAX(position, 0) / block; i * block <= last && best > c0; i++) {
    const list l = {map->indices + row[i], map->indices + row[i + 1]};
    for (const int32_t *x = place_of(map, l, (int32_t)c0); x < l.end; x++) {
      if (*x >= c0) best = QKV_MIN(best, *x);
      if (map->sorted || best == c0) break;
    }
  }
  return best == INT64_MAX ? best : qkv__key_of_position(r->e, QKV_MAX(first, best * block));
}

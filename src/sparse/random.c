/* Random blocks: Floyd's draw of a set (Bentley, Floyd: A sample of brilliance, CACM 1987) from Philox words. Word n of block i of
 * queries comes from the counter (n / 4, i, head, entry) under the seed: the draws of a block do not depend on any other's. */
#include "base/philox.h"
#include "sparse/map.h"

/* Key blocks that may be drawn: [first, last) without [gap, gap_end). */
typedef struct candidates {
  int64_t first, last, gap, gap_end;
} candidates;

static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

static candidates candidates_of(const qkv_block_random *r, const qkv_block_map *map, int64_t row) {
  const int64_t seqlen_q = r->seqlen ? QKV_MIN(r->seqlen, map->seqlen_q) : map->seqlen_q;
  const int64_t seqlen_kv = r->seqlen ? QKV_MIN(r->seqlen, map->seqlen_kv) : map->seqlen_kv;
  const int64_t rows = (seqlen_q + map->block - 1) / map->block, keys = (seqlen_kv + map->block - 1) / map->block;
  const int64_t first = QKV_MIN(r->global_first, keys), last = QKV_MAX(first, keys - r->global_last);
  candidates c = {first, r->causal ? clamp(row, first, last) : last, 0, 0};
  if (row >= rows || row < r->global_first || row >= rows - r->global_last) c.last = c.first;
  c.gap = clamp(row - r->window, c.first, c.last);
  c.gap_end = clamp(row + r->window + 1, c.gap, c.last);
  return c;
}

static int64_t block_of(const candidates *c, int64_t index) {
  const int64_t block = c->first + index;
  return block < c->gap ? block : block + c->gap_end - c->gap;
}

/* Floor of n * word / 2^32: each of n values with the same probability, to n / 2^32. */
static int64_t draw(const qkv_block_random *r, int64_t row, int64_t head, int64_t b, int64_t index, int64_t n) {
  const uint32_t counter[4] = {(uint32_t)(index / 4), (uint32_t)row, (uint32_t)(r->head_origin + head),
                               (uint32_t)(r->batch_origin + b)};
  uint32_t word[4];
  qkv__philox(counter, r->seed, word);
  return (int64_t)((uint64_t)word[index % 4] * (uint64_t)n >> 32);
}

/* Writes the ascending list of a block of queries; returns its length. */
static int64_t fill(const qkv_block_random *r, const qkv_block_map *map, int64_t row, int64_t head, int64_t b, int32_t *to) {
  const candidates c = candidates_of(r, map, row);
  const int64_t all = c.last - c.first - (c.gap_end - c.gap), count = QKV_MIN(r->count, all);
  for (int64_t n = 0; n < count; n++) {
    const int64_t top = all - count + n; /* one of 0 ... top, or top itself if it is there already */
    int64_t drawn = draw(r, row, head, b, n, top + 1), place = 0;
    int32_t block = (int32_t)block_of(&c, drawn);
    for (int64_t i = 0; i < n; i++)
      if (to[i] == block) {
        block = (int32_t)block_of(&c, top);
        break;
      }
    for (place = n; place > 0 && to[place - 1] > block; place--) to[place] = to[place - 1];
    to[place] = block;
  }
  return count;
}

qkv_status qkv_random_blocks(const qkv_block_random *in, qkv_block_map *map) {
  const qkv__report none = {NULL, 0};
  qkv_block_random r;
  QKV_TRY(qkv__take_struct(&none, "random", in, &r, sizeof r));
  QKV_TRY(qkv__map_check_extents(&none, map));
  if (r.causal != 0 && r.causal != 1) return QKV_BAD_VALUE;
  if (r.count < 0 || r.window < -1 || r.window > INT32_MAX || r.global_first < 0 || r.global_last < 0 ||
      r.global_first > INT32_MAX || r.global_last > INT32_MAX || r.seqlen < 0)
    return QKV_BAD_EXTENT;
  if (r.batch_origin < 0 || r.head_origin < 0) return QKV_BAD_VALUE;
  const int64_t rows = qkv__map_rows(map), lists = map->batch * map->num_heads;
  if (lists && !map->indptr) return QKV_BAD_POINTER;
  int64_t needed = 0; /* that of a list depends on its row alone */
  for (int64_t i = 0; i < rows && lists; i++) {
    const candidates c = candidates_of(&r, map, i);
    needed += QKV_MIN(r.count, c.last - c.first - (c.gap_end - c.gap));
    if (needed > map->capacity / lists || needed * lists > INT32_MAX) return QKV_BAD_EXTENT;
  }
  if (needed && !map->indices) return QKV_BAD_POINTER;
  int32_t at = 0;
  for (int64_t n = 0; n < lists; n++) {
    int32_t *row = map->indptr + n * (rows + 1);
    for (int64_t i = 0; i < rows; i++) {
      row[i] = at;
      at += (int32_t)fill(&r, map, i, n % map->num_heads, n / map->num_heads, map->indices + at);
    }
    row[rows] = at;
  }
  map->sorted = 1;
  return QKV_OK;
}

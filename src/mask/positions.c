/* Sets of positions: ranges and ascending lists. */
#include <inttypes.h>
#include <stdio.h>

#include "mask/mask.h"

static uint32_t at(const qkv__positions *s, int64_t i) { return *(const uint32_t *)(const void *)(s->list + i * s->stride); }

static qkv__positions list_of(const qkv_mask *m, int64_t b, int64_t head) {
  const qkv__positions s = {0, (int64_t)INT32_MAX + 1, qkv__at(&m->t, 4, b, head, 0, 0), m->a, m->t.stride[3] * 4};
  return s;
}

qkv__positions qkv__positions_of(const qkv_mask *m, const qkv__rows *r) {
  const qkv__positions range = {m->a, m->b, NULL, 0, 0};
  return m->t.data ? list_of(m, r->e->b, r->head) : range;
}

/* Unused places, which hold negative numbers, are the largest as unsigned ones. */
static qkv_status check_list(const qkv__positions *s, int64_t b, int64_t head, char *why, size_t bytes) {
  for (int64_t i = 1; i < s->count; i++)
    if (at(s, i) <= at(s, i - 1) && at(s, i) <= INT32_MAX) {
      snprintf(why, bytes,
               "t of entry %" PRId64 ", head %" PRId64 ": position %" PRIu32 " comes after %" PRId32 ", not ascending", b,
               head, at(s, i), (int32_t)at(s, i - 1));
      return QKV_BAD_MASK;
    }
  return QKV_OK;
}

qkv_status qkv__positions_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  if (!m->t.data) {
    if (0 <= m->a && m->a <= m->b) return QKV_OK;
    snprintf(why, bytes, "a %" PRId64 ", b %" PRId64 " is not a range of positions", m->a, m->b);
    return QKV_BAD_MASK;
  }
  if (m->a < 0 || m->b) {
    snprintf(why, bytes, "a %" PRId64 ", the number of positions in t, is negative, or b %" PRId64 " is not 0", m->a, m->b);
    return QKV_BAD_MASK;
  }
  const int64_t entries = m->t.stride[0] ? p->batch : QKV_MIN(1, p->batch),
                heads = m->t.stride[1] ? p->num_heads : QKV_MIN(1, p->num_heads);
  for (int64_t b = 0; b < entries; b++)
    for (int64_t h = 0; h < heads; h++) {
      const qkv__positions s = list_of(m, b, h);
      const qkv_status status = check_list(&s, b, h, why, bytes);
      if (status != QKV_OK) return status;
    }
  return QKV_OK;
}

/* Index of the first place of the list with a position >= `position`. */
static int64_t place_of(const qkv__positions *s, int64_t position) {
  int64_t low = 0, high = s->count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if ((int64_t)at(s, middle) < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

int64_t qkv__positions_next(const qkv__positions *s, int64_t position) {
  position = QKV_MAX(position, s->from);
  if (s->list) {
    const int64_t i = place_of(s, position);
    position = i < s->count ? (int64_t)at(s, i) : INT64_MAX;
  }
  return position < s->to ? position : INT64_MAX;
}

uint64_t qkv__positions_bits(const qkv__positions *s, int64_t first, int64_t n) {
  uint64_t bits = 0;
  if (!s->list) {
    const int64_t from = QKV_MAX(s->from - first, 0), to = QKV_MIN(s->to - first, n);
    return from < to ? ~(uint64_t)0 >> (64 - (to - from)) << from : 0;
  }
  for (int64_t i = place_of(s, QKV_MAX(first, 0)); i < s->count && (int64_t)at(s, i) < first + n; i++)
    bits |= (uint64_t)1 << ((int64_t)at(s, i) - first);
  return bits;
}

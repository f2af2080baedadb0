/* The key's position is in a set: every query sees it. */
#include "mask/mask.h"

qkv_status qkv__mask_keys_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  return qkv__positions_check(p, m, why, bytes);
}

int32_t qkv__mask_keys_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  const qkv__positions s = qkv__positions_of(m, r);
  const uint64_t seen = qkv__positions_bits(&s, qkv__position_of_key(r->e, key), keys);
  if (!seen) return QKV_TILE_NONE;
  if (seen == ~(uint64_t)0 >> (64 - keys)) return QKV_TILE_ALL;
  if (bits)
    for (int64_t k = 0; k < keys; k++) bits[k] = 0 - (seen >> k & 1);
  return QKV_TILE_SOME;
}

int64_t qkv__mask_keys_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  const qkv__positions s = qkv__positions_of(m, r);
  const int64_t next = qkv__positions_next(&s, qkv__position_of_key(r->e, key));
  return next < INT64_MAX ? qkv__key_of_position(r->e, next) : INT64_MAX;
}

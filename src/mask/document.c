/* Query and key carry the same id. */
#include <stdio.h>

#include "mask/mask.h"

static int32_t id_of_key(const qkv_mask *m, const qkv__entry *e, int64_t key) {
  return *(const int32_t *)(const void *)qkv__at(&m->t, 4, e->b, 0, 0, key);
}
/* 0 if the query has no id: it stands where no key is. */
static int id_of_query(const qkv_mask *m, const qkv__entry *e, int64_t row, int32_t *id) {
  if (m->u.data) {
    *id = *(const int32_t *)(const void *)qkv__at(&m->u, 4, e->b, 0, row, 0);
    return 1;
  }
  int64_t key = qkv__key_of_position(e, e->position_q + row);
  if (key < e->b0 || key >= e->b1) return 0;
  *id = id_of_key(m, e, key);
  return 1;
}

qkv_status qkv__mask_document_check(const qkv_problem *p, const qkv_mask *m, char *why, size_t bytes) {
  if (m->t.data || !p->seqlen_kv || !p->batch) return QKV_OK;
  snprintf(why, bytes, "t.data, the ids, is NULL");
  return QKV_BAD_POINTER;
}

int32_t qkv__mask_document_tile(const qkv_mask *m, const qkv__rows *r, int64_t key, int64_t keys, uint64_t *bits) {
  int32_t first = 0, id = 0;
  int same = 1, some = 0;
  for (int64_t i = 0; i < r->rows && same; i++) {
    int has = id_of_query(m, r->e, r->row + i, &id);
    if (i == 0 && has)
      first = id, some = 1;
    else if (has != some || id != first)
      same = 0;
  }
  if (same) { /* all rows of one document, or of none: the usual case */
    int64_t in = 0;
    if (!some) return QKV_TILE_NONE;
    for (int64_t k = 0; k < keys; k++) in += id_of_key(m, r->e, key + k) == first;
    if (in == 0) return QKV_TILE_NONE;
    if (in == keys) return QKV_TILE_ALL;
  }
  if (bits) {
    for (int64_t k = 0; k < keys; k++) bits[k] = 0;
    for (int64_t i = 0; i < r->rows; i++)
      if (id_of_query(m, r->e, r->row + i, &id))
        for (int64_t k = 0; k < keys; k++) bits[k] |= (uint64_t)(id_of_key(m, r->e, key + k) == id) << i;
  }
  return QKV_TILE_SOME;
}

int64_t qkv__mask_document_next(const qkv_mask *m, const qkv__rows *r, int64_t key) {
  int32_t low = INT32_MAX, high = INT32_MIN, id;
  int any = 0;
  for (int64_t i = 0; i < r->rows; i++)
    if (id_of_query(m, r->e, r->row + i, &id)) {
      any = 1;
      low = QKV_MIN(low, id);
      high = QKV_MAX(high, id);
    }
  if (!any) return INT64_MAX;
  for (; key < r->e->b1; key++) {
    id = id_of_key(m, r->e, key);
    if (low <= id && id <= high) return key;
  }
  return INT64_MAX;
}

/* The table that qkv_frequencies_fill makes. */
#ifndef QKV_POSITION_FREQUENCIES_H
#define QKV_POSITION_FREQUENCIES_H

#include "position/angle.h"

#define QKV__TABLE_MARK 0x1.71766b706f731p+7 /* changes with the layout */
enum { QKV__TABLE_DIM = 1, QKV__TABLE_ATTENTION = 2, QKV__TABLE_HEAD = 4 };

/* Where the pieces of `pairs` frequencies are. They are only read, but for the one who fills the table. */
QKV_INLINE qkv__pieces qkv__table_pieces(const double *table, int64_t pairs) {
  double *a = (double *)(uintptr_t)table + QKV__TABLE_HEAD + pairs;
  return (qkv__pieces){a, a + pairs, a + 2 * pairs};
}

#endif

/* Loaders and storers: any dtype and strides <-> contiguous rows of the arithmetic's type. A dtype is one row of the
 * table in stage.c. */
#ifndef QKV_STAGE_STAGE_H
#define QKV_STAGE_STAGE_H

#include <qkv/qkv.h>

#include "kernel/kernel.h"

/* Rows the kernels can read in place: the arithmetic's type, and unit stride along a row. */
int qkv__stage_direct(const qkv__kernel *k, const qkv_tensor *t);
/* to[rows][columns] (row stride ld) of the arithmetic's type = from[rows][columns] */
void qkv__stage_load(const qkv__kernel *k, void *to, int64_t ld, const qkv_tensor *t, const void *from, int64_t rows,
                     int64_t columns);
/* The reverse. */
void qkv__stage_store(const qkv__kernel *k, const qkv_tensor *t, void *to, const void *from, int64_t ld, int64_t rows,
                      int64_t columns);

/* One value of any float type, widened. */
double qkv__stage_value(const qkv_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3);

#endif

/* Arrays of numpy: .npy files, version 1.0, 2.0 and 3.0. */
#ifndef QKV_SUPPORT_NPY_H
#define QKV_SUPPORT_NPY_H

#include <stddef.h>
#include <stdio.h>

#include "array.h"

/* Reads little-endian f2 (widened to F32), f4, f8, i4, i8 (to I32, checked), u1 and bool (to U8) of rank 0 to 4, in C or
 * Fortran order. 0, or -1 with a message that names the file. */
int npy_read(const char *path, array *a, char *error, size_t error_bytes);
/* The same from memory; `name` is for messages. */
int npy_parse(const char *name, const unsigned char *bytes, size_t size, array *a, char *error, size_t error_bytes);

/* Writes version 1.0, C order, little-endian. Errors stay in the stream (ferror). */
void npy_write_header(FILE *stream, int32_t dtype, int rank, const int64_t *shape);
void npy_write_values(FILE *stream, int32_t dtype, const void *values, int64_t count);
/* Header and values of an array of any strides. */
void npy_write_array(FILE *stream, const array *a);
/* A whole file, under a temporary name until it is complete. */
int npy_write(const char *path, const array *a, char *error, size_t error_bytes);

#endif

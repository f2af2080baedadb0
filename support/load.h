/* An array by the name that a user gives: FILE.npy, FILE.safetensors:NAME. */
#ifndef QKV_SUPPORT_LOAD_H
#define QKV_SUPPORT_LOAD_H

#include "array.h"

/* A file of any other name is read as .npy. 0, or -1 with a message that names the file. */
int array_load(const char *source, array *a, char *error, size_t error_bytes);

#endif

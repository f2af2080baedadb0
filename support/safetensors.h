/* Files of named tensors: .safetensors. */
#ifndef QKV_SUPPORT_SAFETENSORS_H
#define QKV_SUPPORT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "array.h"

enum { SAFETENSORS_RANK = 16, SAFETENSORS_DTYPE = 16 };

typedef struct safetensors_entry {
  const char *name;
  char dtype[SAFETENSORS_DTYPE]; /* as in the file: "F32", "BF16", ... */
  int rank;
  int64_t shape[SAFETENSORS_RANK];
  uint64_t begin, end; /* bytes, from the end of the header */
} safetensors_entry;

typedef struct safetensors safetensors;

/* Opens a file and checks its whole header: every tensor lies inside the file, overlaps no other, and has as many bytes as
 * its shape needs. NULL after a message that names the file. */
safetensors *safetensors_open(const char *path, char *error, size_t error_bytes);
/* The same on memory, which must outlive the result; `name` is for messages. */
safetensors *safetensors_parse(const char *name, const unsigned char *bytes, size_t size, char *error, size_t error_bytes);
void safetensors_close(safetensors *file);

/* The tensors, by ascending place in the file. */
size_t safetensors_count(const safetensors *file);
const safetensors_entry *safetensors_at(const safetensors *file, size_t index);
/* NULL: no tensor of that name. */
const safetensors_entry *safetensors_find(const safetensors *file, const char *name);

/* Reads a tensor of rank 0 to 4 and dtype F64, F32, F16, BF16 (the last two widened to F32), I32, I64 (to I32, checked), U8
 * or BOOL (to U8). 0, or -1 with a message. */
int safetensors_read(const safetensors *file, const safetensors_entry *entry, array *a, char *error, size_t error_bytes);

#endif

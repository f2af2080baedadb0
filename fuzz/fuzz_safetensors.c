/* Any bytes as a .safetensors file: no crash, and every tensor that the header check let through is read or refused. */
#include <stdint.h>
#include <stdlib.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  char error[512];
  safetensors *file = safetensors_parse("input", bytes, size, error, sizeof error);
  if (file == NULL) return 0;
  for (size_t i = 0; i < safetensors_count(file); i++) {
    const safetensors_entry *entry = safetensors_at(file, i);
    array a;
    if (safetensors_find(file, entry->name) != entry) abort();
    if (safetensors_read(file, entry, &a, error, sizeof error) == 0) array_free(&a);
  }
  safetensors_close(file);
  return 0;
}

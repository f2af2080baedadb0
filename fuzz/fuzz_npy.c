/* Any bytes as a .npy file: no crash; what is read is written and read again to the same. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  char error[512];
  array a, b;
  if (npy_parse("input", bytes, size, &a, error, sizeof error) != 0) return 0;
  char *first = NULL, *second = NULL;
  size_t first_size = 0, second_size = 0;
  FILE *stream = open_memstream(&first, &first_size);
  if (stream == NULL) abort();
  npy_write_array(stream, &a);
  fclose(stream);
  if (npy_parse("written", (const unsigned char *)first, first_size, &b, error, sizeof error) != 0) abort();
  stream = open_memstream(&second, &second_size);
  if (stream == NULL) abort();
  npy_write_array(stream, &b);
  fclose(stream);
  if (first_size != second_size || memcmp(first, second, first_size) != 0) abort();
  free(first);
  free(second);
  array_free(&a);
  array_free(&b);
  return 0;
}

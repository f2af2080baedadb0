/* Any text as a mask: no crash; what is understood is printed and understood again as as many terms. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "mask_text.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* Every file exists: the type and shape are taken from its name. */
static int loader(const char *source, array *a, char *error, size_t error_bytes) {
  static const int64_t shape[4] = {2, 1, 4, 8};
  (void)error;
  (void)error_bytes;
  int first = (unsigned char)source[0];
  int rank = first % 5;
  int32_t dtype = first % 2 ? QKV_I32 : QKV_U8;
  if (array_alloc(a, dtype, rank, shape + 4 - rank) != 0) abort();
  memset(a->data, 1, (size_t)array_count(rank, shape + 4 - rank, 8) * array_element_size(dtype));
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  static mask_text first, second;
  char error[4096];
  char *text = malloc(size + 1);
  if (text == NULL) abort();
  if (size > 0) memcpy(text, bytes, size);
  text[size] = 0;
  if (mask_text_parse(text, NULL, loader, &first, error, sizeof error) == 0) {
    size_t length = mask_text_print(first.terms, first.count, first.sources, NULL, 0);
    char *printed = malloc(length + 1);
    if (printed == NULL) abort();
    if (mask_text_print(first.terms, first.count, first.sources, printed, length + 1) != length) abort();
    if (strlen(printed) != length) abort();
    /* A name with both kinds of quotes cannot be written. */
    int writable = strchr(text, '\'') == NULL || strchr(text, '"') == NULL;
    if (writable && mask_text_parse(printed, &first.extents, loader, &second, error, sizeof error) != 0) abort();
    if (writable && second.count != first.count) abort();
    if (writable) mask_text_free(&second);
    free(printed);
  }
  mask_text_free(&first);
  free(text);
  return 0;
}

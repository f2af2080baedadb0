#include "load.h"

#include <stdlib.h>
#include <string.h>

#include "npy.h"
#include "safetensors.h"
#include "text.h"

/* The length of the file's name in FILE.safetensors:NAME, 0 if `source` is of another form. */
static size_t safetensors_path(const char *source) {
  static const char suffix[] = ".safetensors";
  for (const char *colon = strchr(source, ':'); colon != NULL; colon = strchr(colon + 1, ':')) {
    size_t length = (size_t)(colon - source);
    if (length >= sizeof suffix - 1 && memcmp(colon - (sizeof suffix - 1), suffix, sizeof suffix - 1) == 0) return length;
  }
  return 0;
}

int array_load(const char *source, array *a, char *error, size_t error_bytes) {
  memset(a, 0, sizeof *a);
  size_t length = safetensors_path(source);
  if (length == 0) {
    static const char suffix[] = ".safetensors";
    size_t whole = strlen(source);
    if (whole >= sizeof suffix - 1 && strcmp(source + whole - (sizeof suffix - 1), suffix) == 0) {
      return text_fail(error, error_bytes, "%s: name the tensor: %s:NAME", source, source);
    }
    return npy_read(source, a, error, error_bytes);
  }
#if QKV_HAVE_CJSON
  char *path = malloc(length + 1);
  if (path == NULL) return text_fail(error, error_bytes, "%s: out of memory", source);
  memcpy(path, source, length);
  path[length] = 0;
  int result = -1;
  safetensors *file = safetensors_open(path, error, error_bytes);
  if (file != NULL) {
    const safetensors_entry *entry = safetensors_find(file, source + length + 1);
    if (entry == NULL) {
      text_fail(error, error_bytes, "%s: no tensor '%s'", path, source + length + 1);
    } else {
      result = safetensors_read(file, entry, a, error, error_bytes);
    }
    safetensors_close(file);
  }
  free(path);
  return result;
#else
  return text_fail(error, error_bytes, "%s: this program was built without the reader of .safetensors", source);
#endif
}

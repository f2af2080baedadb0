#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "file.h"
#include "text.h"

/* The format's own limit of a header. */
static const uint64_t HEADER_LIMIT = 100000000;

struct safetensors {
  char *name; /* of the file */
  file_view view;
  const unsigned char *data;
  uint64_t data_bytes;
  cJSON *header;
  safetensors_entry *entries;
  size_t count;
};

/* Bytes of an element, 0 for a dtype that is not known here. */
static unsigned element_bytes(const char *dtype) {
  static const struct {
    const char *name;
    unsigned bytes;
  } sizes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
               {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    if (strcmp(dtype, sizes[i].name) == 0) return sizes[i].bytes;
  }
  return 0;
}

static int find_source(const char *dtype, array_source *source) {
  static const struct {
    const char *name;
    array_source source;
  } known[] = {{"F32", ARRAY_FROM_F32}, {"F64", ARRAY_FROM_F64}, {"F16", ARRAY_FROM_F16}, {"BF16", ARRAY_FROM_BF16},
               {"I32", ARRAY_FROM_I32}, {"I64", ARRAY_FROM_I64}, {"U8", ARRAY_FROM_U8},   {"BOOL", ARRAY_FROM_BOOL}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(dtype, known[i].name) != 0) continue;
    *source = known[i].source;
    return 0;
  }
  return -1;
}

/* A JSON number that is an integer which a double holds exactly. */
static int read_integer(const cJSON *item, uint64_t *value) {
  if (!cJSON_IsNumber(item)) return -1;
  double number = item->valuedouble;
  if (!(number >= 0 && number <= 9007199254740991.0) || number != (double)(uint64_t)number) return -1;
  *value = (uint64_t)number;
  return 0;
}

static int read_entry(const safetensors *file, const cJSON *item, safetensors_entry *entry, char *error,
                      size_t error_bytes) {
  const char *name = item->string;
  entry->name = name;
  const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
  const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
  const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
  if (!cJSON_IsObject(item) || !cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets)) {
    return text_fail(error, error_bytes, "%s: tensor '%s': needs dtype, shape and data_offsets", file->name, name);
  }
  if (strlen(dtype->valuestring) >= sizeof entry->dtype) {
    return text_fail(error, error_bytes, "%s: tensor '%s': unknown dtype", file->name, name);
  }
  strcpy(entry->dtype, dtype->valuestring);

  const cJSON *axis;
  cJSON_ArrayForEach(axis, shape) {
    uint64_t extent;
    if (entry->rank == SAFETENSORS_RANK) {
      return text_fail(error, error_bytes, "%s: tensor '%s': rank above %d", file->name, name, SAFETENSORS_RANK);
    }
    if (read_integer(axis, &extent) != 0) {
      return text_fail(error, error_bytes, "%s: tensor '%s': shape is not a list of non-negative integers", file->name,
                       name);
    }
    entry->shape[entry->rank++] = (int64_t)extent;
  }

  if (cJSON_GetArraySize(offsets) != 2 || read_integer(cJSON_GetArrayItem(offsets, 0), &entry->begin) != 0 ||
      read_integer(cJSON_GetArrayItem(offsets, 1), &entry->end) != 0 || entry->begin > entry->end) {
    return text_fail(error, error_bytes, "%s: tensor '%s': data_offsets is not [begin, end]", file->name, name);
  }
  if (entry->end > file->data_bytes) {
    return text_fail(error, error_bytes,
                     "%s: truncated: tensor '%s' ends at byte %" PRIu64 " of the data, the file has %" PRIu64, file->name,
                     name, entry->end, file->data_bytes);
  }
  unsigned bytes = element_bytes(entry->dtype);
  if (bytes > 0) {
    int64_t count = array_count(entry->rank, entry->shape, bytes);
    if (count < 0) {
      return text_fail(error, error_bytes, "%s: tensor '%s': its shape does not fit the address space", file->name, name);
    }
    if ((uint64_t)count * bytes != entry->end - entry->begin) {
      return text_fail(error, error_bytes,
                       "%s: tensor '%s': shape and dtype %s make %" PRIu64 " bytes, data_offsets %" PRIu64, file->name, name,
                       entry->dtype, (uint64_t)count * bytes, entry->end - entry->begin);
    }
  }
  return 0;
}

static int compare_places(const void *a, const void *b) {
  const safetensors_entry *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  if (x->end != y->end) return x->end < y->end ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static int check_names(const safetensors *file, char *error, size_t error_bytes) {
  const char **names = malloc((file->count + 1) * sizeof *names);
  if (names == NULL) return text_fail(error, error_bytes, "%s: out of memory", file->name);
  for (size_t i = 0; i < file->count; i++) names[i] = file->entries[i].name;
  qsort(names, file->count, sizeof *names, compare_names);
  int result = 0;
  for (size_t i = 1; i < file->count && result == 0; i++) {
    if (strcmp(names[i - 1], names[i]) == 0) {
      result = text_fail(error, error_bytes, "%s: tensor '%s' appears twice", file->name, names[i]);
    }
  }
  free(names);
  return result;
}

static int parse_header(safetensors *file, const char *text, size_t size, char *error, size_t error_bytes) {
  const char *end = NULL;
  if (text[0] != '{') return text_fail(error, error_bytes, "%s: the header does not begin with '{'", file->name);
  file->header = cJSON_ParseWithLengthOpts(text, size, &end, 0);
  if (file->header == NULL) {
    return text_fail(error, error_bytes, "%s: the header is not valid JSON, at byte %zu of it", file->name,
                     end != NULL ? (size_t)(end - text) : (size_t)0);
  }
  /* The format pads the header with spaces. */
  while (end < text + size && *end == ' ') end++;
  if (end != text + size) {
    return text_fail(error, error_bytes, "%s: the header has something after its JSON, at byte %zu of it", file->name,
                     (size_t)(end - text));
  }

  size_t items = 0;
  const cJSON *item;
  cJSON_ArrayForEach(item, file->header) items++;
  file->entries = calloc(items + 1, sizeof *file->entries);
  if (file->entries == NULL) return text_fail(error, error_bytes, "%s: out of memory", file->name);
  cJSON_ArrayForEach(item, file->header) {
    if (strcmp(item->string, "__metadata__") == 0) continue;
    if (read_entry(file, item, &file->entries[file->count], error, error_bytes) != 0) return -1;
    file->count++;
  }

  qsort(file->entries, file->count, sizeof *file->entries, compare_places);
  uint64_t used = 0;
  for (size_t i = 0; i < file->count; i++) {
    const safetensors_entry *entry = &file->entries[i];
    if (entry->begin < used && entry->begin != entry->end) {
      return text_fail(error, error_bytes, "%s: tensor '%s' overlaps another", file->name, entry->name);
    }
    if (entry->end > used) used = entry->end;
  }
  return check_names(file, error, error_bytes);
}

static int parse(safetensors *file, const unsigned char *bytes, size_t size, char *error, size_t error_bytes) {
  if (size < 8) {
    return text_fail(error, error_bytes, "%s: truncated: %zu bytes are less than any .safetensors header", file->name, size);
  }
  uint64_t header_bytes = array_load_u64(bytes);
  if (header_bytes > size - 8) {
    return text_fail(error, error_bytes,
                     "%s: the header claims %" PRIu64 " bytes, but the file has only %zu after its length", file->name,
                     header_bytes, size - 8);
  }
  if (header_bytes > HEADER_LIMIT) {
    return text_fail(error, error_bytes, "%s: a header of %" PRIu64 " bytes, the limit is %" PRIu64, file->name,
                     header_bytes, HEADER_LIMIT);
  }
  if (header_bytes == 0) return text_fail(error, error_bytes, "%s: the header is empty", file->name);
  file->data = bytes + 8 + header_bytes;
  file->data_bytes = size - 8 - header_bytes;
  return parse_header(file, (const char *)bytes + 8, (size_t)header_bytes, error, error_bytes);
}

static safetensors *create(const char *name, char *error, size_t error_bytes) {
  safetensors *file = calloc(1, sizeof *file);
  char *copy = strdup(name);
  if (file == NULL || copy == NULL) {
    free(file);
    free(copy);
    text_fail(error, error_bytes, "%s: out of memory", name);
    return NULL;
  }
  file->name = copy;
  return file;
}

safetensors *safetensors_parse(const char *name, const unsigned char *bytes, size_t size, char *error, size_t error_bytes) {
  safetensors *file = create(name, error, error_bytes);
  if (file != NULL && parse(file, bytes, size, error, error_bytes) != 0) {
    safetensors_close(file);
    return NULL;
  }
  return file;
}

safetensors *safetensors_open(const char *path, char *error, size_t error_bytes) {
  safetensors *file = create(path, error, error_bytes);
  if (file == NULL) return NULL;
  if (file_view_open(&file->view, path, error, error_bytes) != 0 ||
      parse(file, file->view.bytes, file->view.size, error, error_bytes) != 0) {
    safetensors_close(file);
    return NULL;
  }
  return file;
}

void safetensors_close(safetensors *file) {
  if (file == NULL) return;
  cJSON_Delete(file->header);
  free(file->entries);
  file_view_close(&file->view);
  free(file->name);
  free(file);
}

size_t safetensors_count(const safetensors *file) { return file->count; }

const safetensors_entry *safetensors_at(const safetensors *file, size_t index) {
  return index < file->count ? &file->entries[index] : NULL;
}

const safetensors_entry *safetensors_find(const safetensors *file, const char *name) {
  for (size_t i = 0; i < file->count; i++) {
    if (strcmp(file->entries[i].name, name) == 0) return &file->entries[i];
  }
  return NULL;
}

int safetensors_read(const safetensors *file, const safetensors_entry *entry, array *a, char *error, size_t error_bytes) {
  array_source source;
  memset(a, 0, sizeof *a);
  if (find_source(entry->dtype, &source) != 0) {
    return text_fail(error, error_bytes,
                     "%s: tensor '%s': dtype %s is not supported (F64, F32, F16, BF16, I32, I64, U8 and BOOL are)",
                     file->name, entry->name, entry->dtype);
  }
  if (entry->rank > ARRAY_RANK) {
    return text_fail(error, error_bytes, "%s: tensor '%s': rank %d, at most %d is supported", file->name, entry->name,
                     entry->rank, ARRAY_RANK);
  }
  if (array_alloc(a, array_source_dtype(source), entry->rank, entry->shape) != 0) {
    return text_fail(error, error_bytes, "%s: tensor '%s': no memory for it", file->name, entry->name);
  }
  int64_t count = (int64_t)((entry->end - entry->begin) / array_source_size(source));
  int64_t bad = array_convert(source, file->data + entry->begin, count, a->data);
  if (bad >= 0) {
    array_free(a);
    return text_fail(error, error_bytes, "%s: tensor '%s': element %lld does not fit in 32 bits", file->name, entry->name,
                     (long long)bad);
  }
  return 0;
}

#include "npy.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "text.h"

/* ---- The header: a Python dictionary ----------------------------------------------------------------------------- */

typedef struct header {
  char descr[16];
  int fortran_order;
  int rank;
  int64_t shape[ARRAY_RANK];
  int have_descr, have_order, have_shape;
} header;

typedef struct parser {
  const char *name;
  const char *text;
  size_t size, at;
  char *error;
  size_t error_bytes;
} parser;

static int expected(const parser *p, const char *what) {
  return text_fail(p->error, p->error_bytes, "%s: header: expected %s at character %zu", p->name, what, p->at);
}

static void skip_space(parser *p) {
  while (p->at < p->size && strchr(" \t\r\n", p->text[p->at]) != NULL && p->text[p->at] != 0) p->at++;
}

static int accept(parser *p, char c) {
  skip_space(p);
  if (p->at >= p->size || p->text[p->at] != c) return 0;
  p->at++;
  return 1;
}

static int accept_word(parser *p, const char *word) {
  size_t length = strlen(word);
  skip_space(p);
  if (p->size - p->at < length || memcmp(p->text + p->at, word, length) != 0) return 0;
  p->at += length;
  return 1;
}

static int parse_string(parser *p, char *value, size_t bytes, const char *what) {
  skip_space(p);
  char quote = p->at < p->size ? p->text[p->at] : 0;
  if (quote != '\'' && quote != '"') return expected(p, what);
  p->at++;
  size_t length = 0;
  while (p->at < p->size && p->text[p->at] != quote) {
    unsigned char c = (unsigned char)p->text[p->at++];
    if (length + 1 < bytes) value[length++] = c >= 32 && c < 127 ? (char)c : '?';
  }
  value[length] = 0;
  if (p->at >= p->size) return expected(p, "a closing quote");
  p->at++;
  return 0;
}

static int parse_shape(parser *p, header *h) {
  if (!accept(p, '(')) return expected(p, "'(' of the shape");
  h->rank = 0;
  int rank = 0;
  while (!accept(p, ')')) {
    skip_space(p);
    int64_t value = 0;
    size_t begin = p->at;
    while (p->at < p->size && p->text[p->at] >= '0' && p->text[p->at] <= '9') {
      int digit = p->text[p->at++] - '0';
      if (value > (INT64_MAX - digit) / 10) {
        return text_fail(p->error, p->error_bytes, "%s: an extent of the shape does not fit in 63 bits", p->name);
      }
      value = value * 10 + digit;
    }
    if (p->at == begin) return expected(p, "a non-negative integer or ')'");
    if (p->at < p->size && p->text[p->at] == 'L') p->at++; /* as Python 2 wrote it */
    if (rank < ARRAY_RANK) h->shape[rank] = value;
    rank++;
    if (accept(p, ',')) continue;
    if (!accept(p, ')')) return expected(p, "',' or ')'");
    break;
  }
  if (rank > ARRAY_RANK) {
    return text_fail(p->error, p->error_bytes, "%s: rank %d, at most %d is supported", p->name, rank, ARRAY_RANK);
  }
  h->rank = rank;
  return 0;
}

static int parse_header(parser *p, header *h) {
  memset(h, 0, sizeof *h);
  if (!accept(p, '{')) return expected(p, "'{'");
  while (!accept(p, '}')) {
    char key[32];
    size_t begin = p->at;
    if (parse_string(p, key, sizeof key, "a quoted key or '}'") != 0) return -1;
    if (!accept(p, ':')) return expected(p, "':'");
    if (strcmp(key, "descr") == 0) {
      skip_space(p);
      if (p->at < p->size && p->text[p->at] == '[') {
        return text_fail(p->error, p->error_bytes, "%s: a structured dtype is not supported", p->name);
      }
      if (parse_string(p, h->descr, sizeof h->descr, "a quoted dtype") != 0) return -1;
      h->have_descr = 1;
    } else if (strcmp(key, "fortran_order") == 0) {
      if (accept_word(p, "True")) {
        h->fortran_order = 1;
      } else if (accept_word(p, "False")) {
        h->fortran_order = 0;
      } else {
        return expected(p, "True or False");
      }
      h->have_order = 1;
    } else if (strcmp(key, "shape") == 0) {
      if (parse_shape(p, h) != 0) return -1;
      h->have_shape = 1;
    } else {
      return text_fail(p->error, p->error_bytes, "%s: header: unknown key '%s' at character %zu", p->name, key, begin);
    }
    if (accept(p, ',')) continue;
    if (!accept(p, '}')) return expected(p, "',' or '}'");
    break;
  }
  skip_space(p);
  if (p->at < p->size) return expected(p, "the end of the header");
  const char *missing = !h->have_descr ? "descr" : !h->have_order ? "fortran_order" : !h->have_shape ? "shape" : NULL;
  if (missing != NULL) return text_fail(p->error, p->error_bytes, "%s: header: no '%s'", p->name, missing);
  return 0;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static int find_source(const char *name, const char *descr, array_source *source, char *error, size_t error_bytes) {
  static const struct {
    const char *kind;
    array_source source;
  } known[] = {{"f2", ARRAY_FROM_F16}, {"f4", ARRAY_FROM_F32}, {"f8", ARRAY_FROM_F64}, {"i4", ARRAY_FROM_I32},
               {"i8", ARRAY_FROM_I64}, {"u1", ARRAY_FROM_U8},  {"b1", ARRAY_FROM_BOOL}};
  const char *kind = descr[0] != 0 && strchr("<>|=", descr[0]) != NULL ? descr + 1 : descr;
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(kind, known[i].kind) != 0) continue;
    *source = known[i].source;
    if (array_source_size(*source) == 1 || descr[0] == '<') return 0;
    if (descr[0] == '>') {
      return text_fail(error, error_bytes, "%s: dtype '%s' is big-endian, which is not supported; in numpy: a.astype('<%s')",
                       name, descr, kind);
    }
    return text_fail(error, error_bytes, "%s: dtype '%s' does not say its byte order; '<%s' is supported", name, descr,
                     kind);
  }
  return text_fail(error, error_bytes, "%s: dtype '%s' is not supported (f2, f4, f8, i4, i8, u1 and bool are)", name, descr);
}

int npy_parse(const char *name, const unsigned char *bytes, size_t size, array *a, char *error, size_t error_bytes) {
  static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
  memset(a, 0, sizeof *a);
  if (size > 0 && memcmp(bytes, magic, size < sizeof magic ? size : sizeof magic) != 0) {
    return text_fail(error, error_bytes, "%s: not a .npy file: it does not begin with \\x93NUMPY", name);
  }
  if (size < 10) return text_fail(error, error_bytes, "%s: truncated: %zu bytes are less than any .npy header", name, size);
  int major = bytes[6], minor = bytes[7];
  if (major < 1 || major > 3 || minor != 0) {
    return text_fail(error, error_bytes, "%s: .npy version %d.%d is not supported (1.0, 2.0 and 3.0 are)", name, major,
                     minor);
  }
  size_t preamble = major == 1 ? 10 : 12;
  if (size < preamble) {
    return text_fail(error, error_bytes, "%s: truncated: %zu bytes are less than any .npy header", name, size);
  }
  size_t header_bytes = major == 1 ? array_load_u16(bytes + 8) : array_load_u32(bytes + 8);
  if (header_bytes > size - preamble) {
    return text_fail(error, error_bytes, "%s: the header claims %zu bytes, but the file has only %zu after the preamble",
                     name, header_bytes, size - preamble);
  }

  header h;
  parser p = {name, (const char *)bytes + preamble, header_bytes, 0, error, error_bytes};
  if (parse_header(&p, &h) != 0) return -1;
  array_source source = ARRAY_FROM_F32;
  if (find_source(name, h.descr, &source, error, error_bytes) != 0) return -1;

  char shape[128];
  array_shape_text(h.rank, h.shape, shape, sizeof shape);
  int32_t dtype = array_source_dtype(source);
  size_t element_size = array_source_size(source), result_size = array_element_size(dtype);
  int64_t count = array_count(h.rank, h.shape, element_size > result_size ? element_size : result_size);
  if (count < 0) return text_fail(error, error_bytes, "%s: shape %s does not fit the address space", name, shape);
  size_t need = (size_t)count * element_size, have = size - preamble - header_bytes;
  if (have < need) {
    return text_fail(error, error_bytes, "%s: truncated: shape %s of dtype '%s' needs %zu bytes of data, the file has %zu",
                     name, shape, h.descr, need, have);
  }
  if (array_alloc(a, dtype, h.rank, h.shape) != 0) {
    return text_fail(error, error_bytes, "%s: no memory for shape %s", name, shape);
  }
  int64_t bad = array_convert(source, bytes + preamble + header_bytes, count, a->data);
  if (bad >= 0) {
    array_free(a);
    return text_fail(error, error_bytes, "%s: element %lld does not fit in 32 bits", name, (long long)bad);
  }
  if (h.fortran_order) {
    int64_t stride = 1;
    for (int axis = 0; axis < h.rank; axis++) {
      a->stride[axis] = stride;
      stride *= h.shape[axis];
    }
  }
  return 0;
}

int npy_read(const char *path, array *a, char *error, size_t error_bytes) {
  file_view view;
  memset(a, 0, sizeof *a);
  if (file_view_open(&view, path, error, error_bytes) != 0) return -1;
  int result = npy_parse(path, view.bytes, view.size, a, error, error_bytes);
  file_view_close(&view);
  return result;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

void npy_write_header(FILE *stream, int32_t dtype, int rank, const int64_t *shape) {
  const char *descr = dtype == QKV_F64 ? "<f8" : dtype == QKV_I32 ? "<i4" : dtype == QKV_U8 ? "|u1" : "<f4";
  char axes[128], text[256];
  array_shape_text(rank, shape, axes, sizeof axes);
  int length = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, axes);
  /* Preamble, dictionary and newline fill a multiple of 64 bytes: the data can be mapped. */
  int total = (10 + length + 1 + 63) / 64 * 64, rest = total - 10;
  const unsigned char preamble[10] = {
      0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)(rest & 255), (unsigned char)(rest >> 8)};
  fwrite(preamble, 1, sizeof preamble, stream);
  fprintf(stream, "%-*s\n", rest - 1, text);
}

void npy_write_values(FILE *stream, int32_t dtype, const void *values, int64_t count) {
  enum { CHUNK = 8192 };
  unsigned char buffer[CHUNK];
  size_t size = array_element_size(dtype);
  const unsigned char *from = values;
  while (count > 0) {
    int64_t n = count < (int64_t)(CHUNK / size) ? count : (int64_t)(CHUNK / size);
    for (int64_t i = 0; i < n; i++, from += size) {
      unsigned char *to = buffer + (size_t)i * size;
      uint64_t bits = from[0];
      if (size == 4) {
        uint32_t word;
        memcpy(&word, from, sizeof word);
        bits = word;
      } else if (size == 8) {
        memcpy(&bits, from, sizeof bits);
      }
      for (size_t byte = 0; byte < size; byte++) to[byte] = (unsigned char)(bits >> 8 * byte);
    }
    if (fwrite(buffer, size, (size_t)n, stream) != (size_t)n) return;
    count -= n;
  }
}

void npy_write_array(FILE *stream, const array *a) {
  int64_t shape[ARRAY_RANK] = {1, 1, 1, 1}, stride[ARRAY_RANK] = {0, 0, 0, 0};
  for (int axis = 0; axis < a->rank; axis++) {
    shape[ARRAY_RANK - a->rank + axis] = a->shape[axis];
    stride[ARRAY_RANK - a->rank + axis] = a->stride[axis];
  }
  npy_write_header(stream, a->dtype, a->rank, a->shape);
  size_t size = array_element_size(a->dtype);
  if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0 || shape[3] == 0) return; /* the others may be anything */
  for (int64_t i = 0; i < shape[0]; i++) {
    for (int64_t j = 0; j < shape[1]; j++) {
      for (int64_t k = 0; k < shape[2]; k++) {
        const char *row = (const char *)a->data + (i * stride[0] + j * stride[1] + k * stride[2]) * (int64_t)size;
        if (stride[3] == 1 || shape[3] <= 1) {
          npy_write_values(stream, a->dtype, row, shape[3]);
        } else {
          for (int64_t l = 0; l < shape[3]; l++) npy_write_values(stream, a->dtype, row + l * stride[3] * (int64_t)size, 1);
        }
      }
    }
  }
}

int npy_write(const char *path, const array *a, char *error, size_t error_bytes) {
  output o;
  if (output_open(&o, path, error, error_bytes) != 0) return -1;
  npy_write_array(o.stream, a);
  return output_commit(&o, error, error_bytes);
}

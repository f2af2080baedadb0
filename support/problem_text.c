#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* mmap's MAP_ANONYMOUS */
#endif
#include "problem_text.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "oracle.h"
#include "rng.h"

/* ---- Element types ------------------------------------------------------------------------------------------------- */

static double load_f32(const void *from) {
  float x;
  memcpy(&x, from, sizeof x);
  return (double)x;
}
static void store_f32(void *to, double value) {
  float x = (float)value;
  memcpy(to, &x, sizeof x);
}
static void store_nan_f32(void *to, uint64_t choice) {
  static const uint32_t bits[] = {0x7fc00001u, 0xffffffffu, 0x7fc00000u, 0x7f800001u, 0xffa5a5a5u, 0x7f800000u, 0xff800000u};
  memcpy(to, &bits[choice % 7], sizeof bits[0]);
}
static double load_f64(const void *from) {
  double x;
  memcpy(&x, from, sizeof x);
  return x;
}
static void store_f64(void *to, double value) { memcpy(to, &value, sizeof value); }
static void store_nan_f64(void *to, uint64_t choice) {
  static const uint64_t bits[] = {0x7ff8000000000001u, 0xffffffffffffffffu, 0x7ff8000000000000u, 0x7ff0000000000001u,
                                  0xfff5a5a5a5a5a5a5u, 0x7ff0000000000000u, 0xfff0000000000000u};
  memcpy(to, &bits[choice % 7], sizeof bits[0]);
}

/* A 16-bit format of `fraction` bits: sign, exponent, fraction. */
static double load_16(const void *from, int fraction) {
  uint16_t h;
  memcpy(&h, from, sizeof h);
  int top = (1 << (15 - fraction)) - 1, bias = top >> 1, exponent = h >> fraction & top, low = h & ((1 << fraction) - 1);
  double x = exponent == top ? low != 0 ? (double)NAN : (double)INFINITY
             : exponent == 0 ? ldexp(low, 1 - bias - fraction)
                             : ldexp((1 << fraction) + low, exponent - bias - fraction);
  return h & 0x8000 ? -x : x;
}
static void store_16(void *to, double value, int fraction) {
  int top = (1 << (15 - fraction)) - 1, bias = top >> 1, e;
  uint32_t bits = 0;
  double x = fabs(value);
  if (isnan(value)) {
    bits = (uint32_t)top << fraction | 1u << (fraction - 1);
  } else if (x > 0) {
    frexp(x, &e);
    e = isinf(x) ? bias + 1 : e - 1 < 1 - bias ? 1 - bias : e - 1; /* x = a fraction below 2, times 2^e */
    double units = isinf(x) ? ldexp(1, fraction) : nearbyint(ldexp(x, fraction - e));
    /* A carry out of the fraction goes into the exponent, and from the largest number to infinity. */
    bits = (uint32_t)(units + ldexp(e + bias - 1, fraction));
    bits = bits > (uint32_t)top << fraction ? (uint32_t)top << fraction : bits;
  }
  uint16_t h = (uint16_t)(bits | (signbit(value) ? 0x8000u : 0));
  memcpy(to, &h, sizeof h);
}
static double load_f16(const void *from) { return load_16(from, 10); }
static void store_f16(void *to, double value) { store_16(to, value, 10); }
static void store_nan_f16(void *to, uint64_t choice) {
  static const uint16_t bits[] = {0x7e01, 0xffff, 0x7e00, 0x7c01, 0xfda5, 0x7c00, 0xfc00};
  memcpy(to, &bits[choice % 7], sizeof bits[0]);
}
static double load_bf16(const void *from) { return load_16(from, 7); }
static void store_bf16(void *to, double value) { store_16(to, value, 7); }
static void store_nan_bf16(void *to, uint64_t choice) {
  static const uint16_t bits[] = {0x7fc1, 0xffff, 0x7fc0, 0x7f81, 0xffa5, 0x7f80, 0xff80};
  memcpy(to, &bits[choice % 7], sizeof bits[0]);
}

static const problem_dtype dtypes[] = {
    {"f32", QKV_F32, 4, load_f32, store_f32, store_nan_f32, 0x1p-24, 0x1p-150, (double)FLT_MAX, 30, -70, -140},
    {"f64", QKV_F64, 8, load_f64, store_f64, store_nan_f64, 0x1p-53, 0x1p-1074, DBL_MAX, 30, -530, -1060},
    {"bf16", QKV_BF16, 2, load_bf16, store_bf16, store_nan_bf16, 0x1p-8, 0x1p-134, 0x1.fep127, 30, -64, -128},
    {"f16", QKV_F16, 2, load_f16, store_f16, store_nan_f16, 0x1p-11, 0x1p-25, 65504, 3, -9, -20},
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

const problem_dtype *problem_dtype_of(int32_t code) {
  for (int n = 0; n < DTYPES; n++) {
    if (dtypes[n].code == code) {
      return &dtypes[n];
    }
  }
  return NULL;
}
const problem_dtype *problem_dtype_named(const char *name) {
  for (int n = 0; n < DTYPES; n++) {
    if (strcmp(dtypes[n].name, name) == 0) {
      return &dtypes[n];
    }
  }
  return NULL;
}

/* ---- Words --------------------------------------------------------------------------------------------------------- */

static const char *const layout_names[PROBLEM_LAYOUTS] = {"bhsd", "bshd", "odd", "neg", "broadcast"};
static const char *const data_names[PROBLEM_DATA_KINDS] = {"plain", "big", "tiny", "ones"};
static const char *const nan_names[] = {"", "nan", "visnan"};
static const char *const bias_names[] = {"", "bias", "biasinf", "biaslow"};
static const char axis_names[] = "bhqk";
static const char *const tensor_names[4] = {"q", "k", "v", "out"};
static const char *const gradient_names[PROBLEM_GRADIENT_TENSORS] = {"dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks"};
static const char want_letters[] = "qkvbs"; /* bit n of a set of QKV_D... */

/* Numbers after the colon: how many are needed, and allowed. */
static const struct {
  const char *name;
  int least, most;
} mask_words[PROBLEM_MASKS] = {
    {"causal", 0, 0}, {"causal_start", 0, 0}, {"window", 2, 2}, {"prefix", 1, 1},  {"documents", 0, 0}, {"documents2", 0, 0},
    {"dense", 0, 1},  {"tile", 0, 0},         {"keys", 2, 2},   {"queries", 2, 2}, {"keylist", 0, 0},   {"querylist", 0, 0},
    {"chunk", 2, 2},  {"columns", 2, 2},      {"stride", 2, 2}, {"strides", 1, 1}, {"blocks", 1, 1},
};

static bool complain(char *error, size_t bytes, const char *format, ...) {
  if (error != NULL && bytes > 0) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, bytes, format, list);
    va_end(list);
  }
  return false;
}

int32_t problem_tensor_dtype(const problem_spec *s, int tensor) {
  return s->tensor_dtype[tensor] != 0 ? s->tensor_dtype[tensor] : s->dtype;
}

int32_t problem_gradient_dtype(const problem_spec *s, int which) {
  static const int tensors[PROBLEM_GRADIENT_TENSORS] = {3, 0, 0, 1, 2, 0, 0};
  switch (which) {
  case PROBLEM_DLSE:
  case PROBLEM_DSINKS: return s->seed >> (4 + which) & 1 ? QKV_F64 : QKV_F32;
  case PROBLEM_DBIAS: return s->gradient_dtype[which] != 0 ? s->gradient_dtype[which] : s->dtype;
  default: return s->gradient_dtype[which] != 0 ? s->gradient_dtype[which] : problem_tensor_dtype(s, tensors[which]);
  }
}

int32_t problem_arithmetic(const problem_spec *s) { return s->dtype == QKV_F64 ? QKV_F64 : QKV_F32; }

problem_spec problem_spec_default(void) {
  problem_spec s;
  memset(&s, 0, sizeof s);
  s.dtype = QKV_F32;
  s.batch = s.num_heads = s.num_kv_heads = s.seqlen_q = s.seqlen_kv = 1;
  s.head_dim = s.head_dim_v = 64;
  return s;
}

static bool parse_int(const char **at, int64_t *value) {
  char *end;
  if (**at != '-' && (**at < '0' || **at > '9')) {
    return false;
  }
  errno = 0;
  long long x = strtoll(*at, &end, 10);
  if (end == *at || errno != 0) {
    return false;
  }
  *value = x;
  *at = end;
  return true;
}

/* "N" or "N/M". */
static bool parse_pair(const char *text, int64_t *first, int64_t *second) {
  if (!parse_int(&text, first)) {
    return false;
  }
  *second = *first;
  if (*text == '/') {
    text++;
    if (!parse_int(&text, second)) {
      return false;
    }
  }
  return *text == 0;
}

static bool parse_double(const char *text, double *value) {
  char *end;
  *value = strtod(text, &end);
  return end != text && *end == 0 && isfinite(*value);
}

static int find(const char *const *names, int count, const char *word) {
  for (int n = 0; n < count; n++) {
    if (names[n][0] != 0 && strcmp(names[n], word) == 0) {
      return n;
    }
  }
  return -1;
}

static bool parse_mask(problem_spec *s, char *name, const char *numbers, bool join) {
  for (int kind = 0; kind < PROBLEM_MASKS; kind++) {
    if (strcmp(name, mask_words[kind].name) != 0) {
      continue;
    }
    problem_mask m = {kind, join, 0, 0};
    int64_t *to[2] = {&m.a, &m.b};
    int count = 0;
    while (numbers != NULL && count < 2) {
      if (!parse_int(&numbers, to[count++])) {
        return false;
      }
      if (*numbers == 0) {
        numbers = NULL;
      } else if (*numbers++ != ',') {
        return false;
      }
    }
    if (numbers != NULL || count < mask_words[kind].least || count > mask_words[kind].most ||
        s->mask_count == PROBLEM_MAX_MASKS || (join && s->mask_count == 0)) {
      return false;
    }
    s->mask[s->mask_count++] = m;
    return true;
  }
  return false;
}

/* Letters of axes, each followed by 1. */
static bool parse_axes(const char *text, bool axes[4]) {
  memset(axes, 0, 4 * sizeof axes[0]);
  for (; *text != 0; text += 2) {
    const char *axis = strchr(axis_names, *text);
    if (axis == NULL || text[1] != '1') {
      return false;
    }
    axes[axis - axis_names] = true;
  }
  return true;
}

/* The part of a word after the colon. */
static bool parse_gradient(problem_spec *s, int which, const char *rest) {
  const problem_dtype *dtype = problem_dtype_named(rest);
  if (dtype != NULL && which != PROBLEM_DLSE && which != PROBLEM_DSINKS) {
    s->gradient_dtype[which] = dtype->code;
    return true;
  }
  if (which < PROBLEM_DBIAS) {
    return false;
  }
  int n = which - PROBLEM_DBIAS;
  s->summed[n] = true;
  return parse_axes(strcmp(rest, "full") == 0 ? "" : rest, s->summed_over[n]) &&
         (which == PROBLEM_DBIAS || (!s->summed_over[n][2] && !s->summed_over[n][3]));
}

static bool parse_want(problem_spec *s, const char *letters) {
  s->want = 0;
  for (; *letters != 0; letters++) {
    const char *at = strchr(want_letters, *letters);
    if (at == NULL) {
      return false;
    }
    s->want |= 1 << (at - want_letters);
  }
  return s->want != 0;
}

static bool parse_word(problem_spec *s, char *word) {
  const problem_dtype *dtype = problem_dtype_named(word);
  if (dtype != NULL) {
    s->dtype = dtype->code;
    return true;
  }
  int n;
  if ((n = find(layout_names, PROBLEM_LAYOUTS, word)) >= 0) {
    s->layout = n;
    return true;
  }
  if ((n = find(data_names, PROBLEM_DATA_KINDS, word)) >= 0) {
    s->data = n;
    return true;
  }
  if ((n = find(nan_names, 3, word)) >= 0) {
    s->nan = n;
    return true;
  }
  const struct {
    const char *name;
    bool *flag;
  } flags[] = {{"lengths", &s->lengths}, {"kvpos", &s->kvpos}, {"lse", &s->lse},
               {"origin", &s->origin},   {"dlse", &s->dlse},   {"acc", &s->accumulate}};
  for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
    if (strcmp(word, flags[f].name) == 0) {
      *flags[f].flag = true;
      return true;
    }
  }
  if (strcmp(word, "standard") == 0) {
    s->algorithm = QKV_STANDARD;
    return true;
  }
  if (strcmp(word, "start") == 0 || strcmp(word, "pos") == 0) {
    s->align = word[0] == 's' ? QKV_ALIGN_START : QKV_ALIGN_EXPLICIT;
    return true;
  }
  bool join = strncmp(word, "or:", 3) == 0;
  if (join) {
    word += 3;
  }
  char *colon = strchr(word, ':');
  const char *rest = NULL;
  if (colon != NULL) {
    *colon = 0;
    rest = colon + 1;
  }
  if (parse_mask(s, word, rest, join)) {
    return true;
  }
  if (join) {
    return false;
  }
  if (strcmp(word, "ragged") == 0) {
    s->ragged_q = rest == NULL || strcmp(rest, "q") == 0;
    s->ragged_kv = rest == NULL || strcmp(rest, "kv") == 0;
    return s->ragged_q || s->ragged_kv;
  }
  if (rest != NULL && (n = find(gradient_names, PROBLEM_GRADIENT_TENSORS, word)) >= 0) {
    return parse_gradient(s, n, rest);
  }
  dtype = rest != NULL ? problem_dtype_named(rest) : NULL;
  if (dtype != NULL) {
    for (int t = 0; t < 4; t++) {
      if (strcmp(word, tensor_names[t]) == 0 || (strcmp(word, "kv") == 0 && (t == 1 || t == 2))) {
        s->tensor_dtype[t] = dtype->code;
        rest = NULL;
      }
    }
    return rest == NULL;
  }
  if (strcmp(word, "alibi") == 0 || strcmp(word, "sinks") == 0) {
    bool *flag = word[0] == 'a' ? &s->alibi : &s->sinks;
    bool *per_entry = word[0] == 'a' ? &s->alibi_batch : &s->sinks_batch;
    *flag = true;
    *per_entry = rest != NULL;
    return rest == NULL || strcmp(rest, "b") == 0;
  }
  if ((n = find(bias_names, 4, word)) >= 0) {
    s->bias = n;
    return parse_axes(rest != NULL ? rest : "", s->bias_broadcast);
  }
  if (rest != NULL) {
    if (strcmp(word, "scale") == 0) {
      return parse_double(rest, &s->scale);
    }
    if (strcmp(word, "softcap") == 0) {
      return parse_double(rest, &s->softcap);
    }
    if (strcmp(word, "dropout") == 0) {
      return parse_double(rest, &s->dropout);
    }
    if (strcmp(word, "want") == 0) {
      return parse_want(s, rest);
    }
    if (strcmp(word, "seed") == 0) {
      char *end;
      s->seed = strtoull(rest, &end, 10);
      return *rest >= '0' && *rest <= '9' && *end == 0;
    }
    return false;
  }
  int64_t ignored;
  switch (word[0]) {
  case 'b': return parse_pair(word + 1, &s->batch, &ignored) && strchr(word, '/') == NULL;
  case 'h': return parse_pair(word + 1, &s->num_heads, &s->num_kv_heads);
  case 'q': return parse_pair(word + 1, &s->seqlen_q, &ignored) && strchr(word, '/') == NULL;
  case 'k': return parse_pair(word + 1, &s->seqlen_kv, &ignored) && strchr(word, '/') == NULL;
  case 'd': return parse_pair(word + 1, &s->head_dim, &s->head_dim_v);
  default: return false;
  }
}

bool problem_valid(const problem_spec *s, char *error, size_t bytes) {
  const struct {
    const char *name;
    int64_t value, least;
  } extents[] = {{"b", s->batch, 0},     {"h", s->num_heads, 0}, {"h/", s->num_kv_heads, 0}, {"q", s->seqlen_q, 0},
                 {"k", s->seqlen_kv, 0}, {"d", s->head_dim, 1},  {"d/", s->head_dim_v, 1}};
  for (size_t n = 0; n < sizeof extents / sizeof extents[0]; n++) {
    if (extents[n].value < extents[n].least || extents[n].value > 1 << 30) {
      return complain(error, bytes, "problem text: extent %s is %" PRId64 ", out of range", extents[n].name,
                      extents[n].value);
    }
  }
  if (s->num_kv_heads == 0 ? s->num_heads != 0 : s->num_heads % s->num_kv_heads != 0) {
    return complain(error, bytes, "problem text: h%" PRId64 "/%" PRId64 " is not a whole number of heads per group",
                    s->num_heads, s->num_kv_heads);
  }
  for (int t = 0; t < 4; t++) {
    if ((problem_tensor_dtype(s, t) == QKV_F64) != (s->dtype == QKV_F64)) {
      return complain(error, bytes, "problem text: %s: all of q, k, v, out are f64 or none", tensor_names[t]);
    }
  }
  for (int t = 0; t < PROBLEM_GRADIENT_TENSORS; t++) {
    if (s->gradient_dtype[t] != 0 && (s->gradient_dtype[t] == QKV_F64) != (s->dtype == QKV_F64)) {
      return complain(error, bytes, "problem text: %s: f64 is for f64 arithmetic, and nothing else is", gradient_names[t]);
    }
  }
  if (!(s->dropout >= 0 && s->dropout <= 1)) {
    return complain(error, bytes, "problem text: dropout %g is not in 0..1", s->dropout);
  }
  if (s->batch == 0 && ((s->ragged_q && s->seqlen_q != 0) || (s->ragged_kv && s->seqlen_kv != 0))) {
    return complain(error, bytes, "problem text: a ragged batch of 0 entries has no rows");
  }
  for (int n = 0; n < s->mask_count; n++) {
    const problem_mask *m = &s->mask[n];
    const bool is_set = m->kind == PROBLEM_KEYS || m->kind == PROBLEM_QUERIES;
    const bool is_size = m->kind == PROBLEM_CHUNK || m->kind == PROBLEM_COLUMNS || m->kind == PROBLEM_STRIDE;
    if ((is_set && (m->a < 0 || m->b < m->a)) || (is_size && (m->a < 1 || m->a > INT32_MAX)) ||
        (m->kind == PROBLEM_CHUNK && m->b < 0) || (m->kind == PROBLEM_COLUMNS && (m->b < 0 || m->b > m->a)) ||
        (m->kind == PROBLEM_BLOCKS && (m->a < 16 || m->a > 256))) {
      return complain(error, bytes, "problem text: %s:%" PRId64 ",%" PRId64 " is out of range", mask_words[m->kind].name,
                      m->a, m->b);
    }
  }
  if (s->softcap < 0 || s->scale != s->scale) {
    return complain(error, bytes, "problem text: softcap %g is negative", s->softcap);
  }
  return true;
}

bool problem_parse(const char *text, problem_spec *spec, char *error, size_t bytes) {
  problem_spec s = problem_spec_default();
  for (;;) {
    text += strspn(text, " \t\r\n");
    size_t length = strcspn(text, " \t\r\n");
    if (length == 0) {
      break;
    }
    char word[80];
    if (length >= sizeof word) {
      return complain(error, bytes, "problem text: the word '%.40s...' is too long", text);
    }
    memcpy(word, text, length);
    word[length] = 0;
    if (!parse_word(&s, word)) {
      return complain(error, bytes, "problem text: '%.*s' is not understood", (int)length, text);
    }
    text += length;
  }
  if (!problem_valid(&s, error, bytes)) {
    return false;
  }
  *spec = s;
  return true;
}

/* ---- Printing ------------------------------------------------------------------------------------------------------ */

typedef struct printer {
  char *text;
  size_t bytes, used;
} printer;

static void put(printer *to, const char *format, ...) {
  va_list list;
  va_start(list, format);
  size_t left = to->used < to->bytes ? to->bytes - to->used : 0;
  int n = vsnprintf(left > 0 ? to->text + to->used : NULL, left, format, list);
  to->used += n > 0 ? (size_t)n : 0;
  va_end(list);
}

/* The shortest of three forms that reads back as the same number. */
static void put_double(printer *to, const char *name, double x) {
  char text[40];
  for (int digits = 6; digits <= 17; digits += 5) {
    snprintf(text, sizeof text, "%.*g", digits == 16 ? 17 : digits, x);
    if (strtod(text, NULL) == x) {
      break;
    }
  }
  put(to, " %s:%s", name, text);
}

static void put_axes(printer *to, const char *name, const bool axes[4], const char *none) {
  bool first = true;
  put(to, " %s", name);
  for (int axis = 0; axis < 4; axis++) {
    if (axes[axis]) {
      put(to, "%s%c1", first ? ":" : "", axis_names[axis]);
      first = false;
    }
  }
  put(to, "%s", first ? none : "");
}

static void put_gradients(printer *to, const problem_spec *s) {
  if (s->dlse) {
    put(to, " dlse");
  }
  if (s->want != 0) {
    put(to, " want:");
    for (int n = 0; want_letters[n] != 0; n++) {
      put(to, s->want >> n & 1 ? "%c" : "", want_letters[n]);
    }
  }
  for (int n = 0; n < 2; n++) {
    if (s->summed[n]) {
      put_axes(to, gradient_names[PROBLEM_DBIAS + n], s->summed_over[n], ":full");
    }
  }
  if (s->accumulate) {
    put(to, " acc");
  }
  for (int t = 0; t < PROBLEM_GRADIENT_TENSORS; t++) {
    if (s->gradient_dtype[t] != 0) {
      put(to, " %s:%s", gradient_names[t], problem_dtype_of(s->gradient_dtype[t])->name);
    }
  }
}

void problem_print(const problem_spec *s, char *text, size_t bytes) {
  printer to = {text, bytes, 0};
  const problem_dtype *dtype = problem_dtype_of(s->dtype);
  put(&to, "%s b%" PRId64 " h%" PRId64, dtype != NULL ? dtype->name : "?", s->batch, s->num_heads);
  if (s->num_kv_heads != s->num_heads) {
    put(&to, "/%" PRId64, s->num_kv_heads);
  }
  put(&to, " q%" PRId64 " k%" PRId64 " d%" PRId64, s->seqlen_q, s->seqlen_kv, s->head_dim);
  if (s->head_dim_v != s->head_dim) {
    put(&to, "/%" PRId64, s->head_dim_v);
  }
  for (int t = 0; t < 4; t++) {
    if (problem_tensor_dtype(s, t) != s->dtype) {
      put(&to, " %s:%s", tensor_names[t], problem_dtype_of(s->tensor_dtype[t])->name);
    }
  }
  if (s->algorithm == QKV_STANDARD) {
    put(&to, " standard");
  }
  if (s->align != QKV_ALIGN_END) {
    put(&to, s->align == QKV_ALIGN_START ? " start" : " pos");
  }
  if (s->scale != 0) {
    put_double(&to, "scale", s->scale);
  }
  if (s->softcap != 0) {
    put_double(&to, "softcap", s->softcap);
  }
  if (s->bias != PROBLEM_NO_BIAS) {
    put_axes(&to, bias_names[s->bias], s->bias_broadcast, "");
  }
  if (s->alibi) {
    put(&to, s->alibi_batch ? " alibi:b" : " alibi");
  }
  if (s->sinks) {
    put(&to, s->sinks_batch ? " sinks:b" : " sinks");
  }
  if (s->lengths) {
    put(&to, " lengths");
  }
  if (s->kvpos) {
    put(&to, " kvpos");
  }
  if (s->ragged_q || s->ragged_kv) {
    put(&to, " ragged%s", s->ragged_q && s->ragged_kv ? "" : s->ragged_q ? ":q" : ":kv");
  }
  for (int n = 0; n < s->mask_count; n++) {
    const problem_mask *m = &s->mask[n];
    put(&to, " %s%s", m->join ? "or:" : "", mask_words[m->kind].name);
    if (mask_words[m->kind].least > 0 || m->a != 0) {
      put(&to, ":%" PRId64, m->a);
    }
    if (mask_words[m->kind].least > 1) {
      put(&to, ",%" PRId64, m->b);
    }
  }
  if (s->layout != PROBLEM_BHSD) {
    put(&to, " %s", layout_names[s->layout]);
  }
  if (s->data != PROBLEM_PLAIN) {
    put(&to, " %s", data_names[s->data]);
  }
  if (s->nan != PROBLEM_NO_NAN) {
    put(&to, " %s", nan_names[s->nan]);
  }
  if (s->lse) {
    put(&to, " lse");
  }
  if (s->dropout != 0) {
    put_double(&to, "dropout", s->dropout);
  }
  if (s->origin) {
    put(&to, " origin");
  }
  put_gradients(&to, s);
  put(&to, " seed:%" PRIu64, s->seed);
}

/* ---- Random problems ----------------------------------------------------------------------------------------------- */

double problem_cost(const problem_spec *s) {
  return (double)s->batch * (double)s->num_heads * (double)s->seqlen_q * (double)s->seqlen_kv *
         (double)(s->head_dim + s->head_dim_v);
}

static int64_t random_length(rng *r) {
  static const int64_t special[] = {1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 257, 511, 512, 513, 575, 1023, 1024, 1025};
  int64_t kind = rng_below(r, 100);
  if (kind < 3) {
    return 0;
  }
  if (kind < 50) {
    return special[rng_below(r, sizeof special / sizeof special[0])];
  }
  return kind < 75 ? rng_range(r, 1, 20) : kind < 92 ? rng_range(r, 1, 200) : rng_range(r, 200, 1700);
}

static int64_t random_dim(rng *r) {
  static const int64_t dims[] = {1,  2,  3,  5,   7,   15,  16,  17,  31,  32,  33,  46,  63,  64,
                                 65, 80, 96, 104, 127, 128, 129, 160, 192, 255, 256, 257, 320, 512};
  return dims[rng_chance(r, 70) ? rng_below(r, 18) : rng_below(r, sizeof dims / sizeof dims[0])];
}

static problem_mask random_mask(rng *r, const problem_spec *s) {
  static const int kinds[] = {PROBLEM_CAUSAL, PROBLEM_CAUSAL,    PROBLEM_CAUSAL_START, PROBLEM_WINDOW, PROBLEM_WINDOW,
                              PROBLEM_PREFIX, PROBLEM_DOCUMENTS, PROBLEM_DOCUMENTS2,   PROBLEM_DENSE,  PROBLEM_TILE};
  problem_mask m = {kinds[rng_below(r, 10)], false, 0, 0};
  int64_t n = s->seqlen_kv + 2;
  switch (m.kind) {
  case PROBLEM_WINDOW:
    m.a = rng_chance(r, 20) ? -1 : rng_below(r, rng_chance(r, 50) ? 10 : n);
    m.b = rng_chance(r, 20) ? -1 : rng_chance(r, 50) ? 0 : rng_below(r, rng_chance(r, 50) ? 10 : n);
    break;
  case PROBLEM_PREFIX: m.a = rng_below(r, rng_chance(r, 50) ? 10 : n); break;
  case PROBLEM_DENSE: m.a = rng_chance(r, 60) ? 0 : rng_below(r, n); break;
  default: break;
  }
  return m;
}

static problem_mask random_sparse_mask(rng *r, const problem_spec *s) {
  static const int64_t sizes[] = {1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 100, 128, 1000};
  const int64_t n = s->seqlen_kv + 2, size = sizes[rng_below(r, 14)];
  problem_mask m = {(int)rng_range(r, PROBLEM_KEYS, PROBLEM_BLOCKS), false, 0, 0};
  switch (m.kind) {
  case PROBLEM_KEYS:
  case PROBLEM_QUERIES:
    m.a = rng_chance(r, 60) ? 0 : rng_below(r, n);
    m.b = m.a + rng_below(r, rng_chance(r, 60) ? 5 : n);
    break;
  case PROBLEM_CHUNK:
    m.a = size;
    m.b = rng_below(r, 4);
    break;
  case PROBLEM_COLUMNS:
    m.a = size;
    m.b = rng_below(r, size + 1);
    break;
  case PROBLEM_STRIDE:
    m.a = size;
    m.b = rng_chance(r, 30) ? -1 : rng_below(r, 40);
    break;
  case PROBLEM_STRIDES: m.a = rng_chance(r, 30) ? -1 : rng_below(r, 40); break;
  case PROBLEM_BLOCKS: m.a = rng_range(r, 16, rng_chance(r, 70) ? 70 : 256); break;
  default: break;
  }
  return m;
}

/* Dropout, and what concerns the backward pass. */
static void random_rest(rng *r, problem_spec *s) {
  static const double rates[] = {0.1, 0.1, 0.5, 0.25, 0.9, 1, 0x1p-40, 1 - 0x1p-20};
  if (rng_chance(r, 25)) {
    s->dropout = rates[rng_below(r, sizeof rates / sizeof rates[0])];
  }
  s->origin = rng_chance(r, s->dropout != 0 ? 50 : 5);
  s->dlse = rng_chance(r, 35);
  s->accumulate = rng_chance(r, 15);
  if (rng_chance(r, 20)) {
    s->want = (int)rng_range(r, 1, 31);
  }
  for (int n = 0; n < 2; n++) {
    s->summed[n] = (n == 0 ? s->bias != PROBLEM_NO_BIAS : s->sinks) && rng_chance(r, 40);
    for (int axis = 0; axis < (n == 0 ? 4 : 2) && s->summed[n]; axis++) {
      s->summed_over[n][axis] = rng_chance(r, 40);
    }
  }
  if (s->dtype != QKV_F64 && rng_chance(r, 20)) {
    static const int32_t types[] = {QKV_F16, QKV_BF16, QKV_F32};
    static const int tensors[] = {PROBLEM_DOUT, PROBLEM_DQ, PROBLEM_DK, PROBLEM_DV, PROBLEM_DBIAS};
    for (int t = 0; t < 5; t++) {
      s->gradient_dtype[tensors[t]] = rng_chance(r, 50) ? types[rng_below(r, 3)] : 0;
    }
  }
}

void problem_random(uint64_t seed, uint64_t index, double max_cost, problem_spec *spec) {
  static const int64_t heads[][2] = {{1, 1}, {1, 1},   {2, 2},  {2, 1},  {4, 2}, {3, 1},
                                     {6, 3}, {12, 12}, {32, 8}, {28, 4}, {8, 1}, {9, 3}};
  rng state = {seed, index, 0}, *r = &state;
  problem_spec s = problem_spec_default();
  s.dtype = rng_chance(r, 70) || rng_chance(r, 50) ? QKV_F32 : QKV_F64;
  s.seed = rng_next(r) % 1000000;
  s.batch = rng_chance(r, 60) ? 1 : rng_range(r, 1, 4);
  const int64_t *pair = heads[rng_below(r, sizeof heads / sizeof heads[0])];
  s.num_heads = pair[0];
  s.num_kv_heads = pair[1];
  s.seqlen_q = rng_chance(r, 20) ? 1 : random_length(r);
  s.seqlen_kv = rng_chance(r, 25) ? s.seqlen_q : random_length(r);
  s.head_dim = random_dim(r);
  s.head_dim_v = rng_chance(r, 70) ? s.head_dim : random_dim(r);
  if (rng_chance(r, 2)) {
    *(rng_chance(r, 50) ? &s.batch : &s.num_heads) = 0;
    s.num_kv_heads = s.num_heads == 0 ? 0 : s.num_kv_heads;
  }
  while (problem_cost(&s) > max_cost) {
    switch (rng_below(r, 5)) {
    case 0: s.batch = (s.batch + 1) / 2; break;
    case 1:
      pair = heads[rng_below(r, 7)];
      if (pair[0] < s.num_heads) {
        s.num_heads = pair[0];
        s.num_kv_heads = pair[1];
      }
      break;
    case 2: s.seqlen_q = rng_chance(r, 50) ? (s.seqlen_q + 1) / 2 : rng_range(r, 1, 20); break;
    case 3: s.seqlen_kv = rng_chance(r, 70) ? (s.seqlen_kv * 2 + 2) / 3 : random_length(r); break;
    default:
      if (rng_chance(r, 50)) {
        s.head_dim = (s.head_dim + 1) / 2;
      }
      s.head_dim_v = (s.head_dim_v + 1) / 2;
      break;
    }
  }
  s.algorithm = rng_chance(r, 15) ? QKV_STANDARD : QKV_FLASH;
  s.align = rng_chance(r, 60) ? QKV_ALIGN_END : rng_chance(r, 50) ? QKV_ALIGN_START : QKV_ALIGN_EXPLICIT;
  s.data = rng_chance(r, 75) ? PROBLEM_PLAIN : (int)rng_range(r, PROBLEM_BIG, PROBLEM_ONES);
  s.layout = rng_chance(r, 45) ? PROBLEM_BHSD : (int)rng_range(r, PROBLEM_BSHD, PROBLEM_BROADCAST);
  s.nan = rng_chance(r, 65) ? PROBLEM_NO_NAN : rng_chance(r, 70) ? PROBLEM_NAN : PROBLEM_VISIBLE_NAN;
  if (rng_chance(r, 15)) {
    s.scale = (double)rng_range(r, 1, 64) / 64;
  }
  if (rng_chance(r, 15)) {
    s.softcap = (double)rng_range(r, 1, 200) / 4;
  }
  if (rng_chance(r, 25)) {
    s.bias = rng_chance(r, 50) ? PROBLEM_BIAS : rng_chance(r, 60) ? PROBLEM_BIAS_INF : PROBLEM_BIAS_LOW;
    for (int axis = 0; axis < 4; axis++) {
      s.bias_broadcast[axis] = rng_chance(r, 30);
    }
  }
  s.alibi = rng_chance(r, 12);
  s.alibi_batch = s.alibi && rng_chance(r, 40);
  s.sinks = rng_chance(r, 15);
  s.sinks_batch = s.sinks && rng_chance(r, 40);
  s.lengths = rng_chance(r, 20);
  s.kvpos = rng_chance(r, 20);
  if (rng_chance(r, 15) && s.batch > 0) {
    int which = (int)rng_below(r, 4);
    s.ragged_q = which != 1;
    s.ragged_kv = which != 2;
  }
  s.lse = rng_chance(r, 60);
  int64_t masks = rng_chance(r, 25) ? 0 : rng_chance(r, 60) ? 1 : rng_range(r, 2, 4);
  while (s.mask_count < masks) {
    s.mask[s.mask_count] = random_mask(r, &s);
    s.mask[s.mask_count].join = s.mask_count > 0 && rng_chance(r, 45);
    s.mask_count++;
  }
  if (s.dtype == QKV_F32 && rng_chance(r, 20)) {
    static const int32_t types[] = {QKV_F16, QKV_BF16, QKV_F32};
    s.dtype = types[rng_below(r, 3)];
    for (int t = 0; t < 4 && rng_chance(r, 50); t++) {
      int32_t type = types[rng_below(r, 3)];
      s.tensor_dtype[t] = type != s.dtype ? type : 0;
    }
  }
  random_rest(r, &s);
  *spec = s;
}

void problem_random_sparse(uint64_t seed, uint64_t index, double max_cost, problem_spec *spec) {
  rng r = {~seed, index, 0};
  problem_random(seed, index, max_cost, spec);
  const problem_spec before = *spec;
  spec->mask_count = 0;
  for (int64_t n = rng_range(&r, 1, 4); n > 0; n--) {
    const bool old = before.mask_count > spec->mask_count && rng_chance(&r, 30);
    problem_mask m = old ? before.mask[spec->mask_count] : random_sparse_mask(&r, spec);
    m.join = spec->mask_count > 0 && rng_chance(&r, 60);
    spec->mask[spec->mask_count++] = m;
  }
}

/* ---- Memory -------------------------------------------------------------------------------------------------------- */

bool problem_buffer_make(problem_buffer *b, size_t bytes, unsigned flags) {
  memset(b, 0, sizeof *b);
  b->bytes = bytes;
  if (flags == 0) {
    b->memory = malloc(bytes + 64);
    b->begin = b->memory;
    if (b->memory != NULL) {
      b->begin += 64 - (uintptr_t)b->memory % 64;
    }
    return b->memory != NULL;
  }
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t inside = (bytes + page - 1) / page * page;
  void *memory = mmap(NULL, inside + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return false;
  }
  unsigned char *first = memory;
  b->memory = memory;
  b->mapped = inside + 2 * page;
  memset(first + page, 0xff, inside);
  if (mprotect(first, page, PROT_NONE) != 0 || mprotect(first + page + inside, page, PROT_NONE) != 0) {
    problem_buffer_free(b);
    return false;
  }
  b->begin = flags & PROBLEM_GUARD_BEGIN ? first + page : first + page + inside - bytes;
  return true;
}

void problem_buffer_free(problem_buffer *b) {
  if (b->mapped > 0) {
    munmap(b->memory, b->mapped);
  } else {
    free(b->memory);
  }
  memset(b, 0, sizeof *b);
}

/* ---- Looking in ---------------------------------------------------------------------------------------------------- */

int64_t problem_rows(const qkv_problem *p, int64_t b) {
  return p->cu_seqlens_q != NULL ? (int64_t)p->cu_seqlens_q[b + 1] - p->cu_seqlens_q[b] : p->seqlen_q;
}
int64_t problem_keys(const qkv_problem *p, int64_t b) {
  return p->cu_seqlens_kv != NULL ? (int64_t)p->cu_seqlens_kv[b + 1] - p->cu_seqlens_kv[b] : p->seqlen_kv;
}

int64_t problem_offset(const qkv_problem *p, const qkv_tensor *t, char side, int64_t b, int64_t h, int64_t i, int64_t x) {
  const int32_t *cu = side == 'q' ? p->cu_seqlens_q : side == 'k' ? p->cu_seqlens_kv : NULL;
  if (cu != NULL) {
    i += cu[b];
    b = 0;
  }
  /* The stride of an axis of extent 1 has no meaning, and may be any number. */
  return (b != 0 ? b * t->stride[0] : 0) + (h != 0 ? h * t->stride[1] : 0) + (i != 0 ? i * t->stride[2] : 0) +
         (x != 0 ? x * t->stride[3] : 0);
}

double problem_load(const qkv_tensor *t, int64_t offset) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  return d->load((const char *)t->data + offset * (int64_t)d->size);
}
void problem_store(const qkv_tensor *t, int64_t offset, double value) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  d->store((char *)t->data + offset * (int64_t)d->size, value);
}

/* ---- The callback of `tile` ---------------------------------------------------------------------------------------- */

static bool tile_sees(const problem_tile_user *u, int64_t b, int64_t h, int64_t pos_q, int64_t pos_k) {
  uint64_t who = (uint64_t)((b + u->batch_origin) * 64 + h + u->head_origin);
  uint64_t q = (uint64_t)(pos_q + (1 << 20)), k = (uint64_t)pos_k;
  switch (u->seed % 3) {
  case 0: return rng_at(u->seed, who, q << 32 | k) & 1;              /* noise */
  case 1: return (q + (k >> 3) + who) % 3 != 0;                      /* stripes */
  default: return rng_at(u->seed, who, (q >> 6) << 32 | k >> 6) & 1; /* blocks */
  }
}

static int32_t tile_fn(void *user, const qkv_tile *t, uint64_t *bits) {
  int64_t count = 0;
  for (int64_t k = 0; k < t->keys; k++) {
    for (int64_t r = 0; r < t->rows; r++) {
      if (tile_sees(user, t->batch, t->head, t->row_position + r, t->key_position + k)) {
        bits[k] |= (uint64_t)1 << r;
        count++;
      }
    }
  }
  return count == 0 ? QKV_TILE_NONE : count == t->rows * t->keys ? QKV_TILE_ALL : QKV_TILE_SOME;
}

/* ---- Building ------------------------------------------------------------------------------------------------------ */

enum {
  STREAM_Q,
  STREAM_K,
  STREAM_V,
  STREAM_BIAS,
  STREAM_ALIBI,
  STREAM_SINKS,
  STREAM_ARRAYS,
  STREAM_LAYOUT,
  STREAM_NAN,
  STREAM_MASK,
  STREAM_DROPOUT,
  STREAM_DOUT,
  STREAM_DLSE,
  STREAM_OLD,
  STREAM_GRADIENTS = STREAM_OLD + PROBLEM_GRADIENT_TENSORS
};

/* A stride that must not be read: with any use of it an address leaves every buffer. */
#define UNUSED_STRIDE ((int64_t)0x123456789abc)

typedef struct shape {
  int64_t n[4];
} shape;

static size_t dtype_size(int32_t dtype) {
  const problem_dtype *d = problem_dtype_of(dtype);
  return d != NULL ? d->size : dtype == QKV_I32 ? 4 : 1;
}

/* Lays a tensor of shape `n` out in a new buffer, filled with bytes 0xff. An axis with fixed[axis] has stride 0. */
static bool lay_in(problem_buffer *buffer, unsigned flags, uint64_t choice, qkv_tensor *t, int32_t dtype, shape n,
                   int layout, const bool fixed[4]) {
  shape m = n;
  bool zero[4] = {false, false, false, false};
  for (int axis = 0; axis < 4; axis++) {
    zero[axis] = fixed != NULL && fixed[axis];
    if (layout == PROBLEM_BROADCAST && axis < 3 && (choice >> (8 + axis) & (axis == 2 ? 3 : 1)) == 0) {
      zero[axis] = true;
    }
    if (zero[axis] && m.n[axis] > 1) {
      m.n[axis] = 1;
    }
  }
  bool rows_outside = layout == PROBLEM_BSHD || (layout == PROBLEM_ODD && (choice & 1));
  int64_t pad = layout == PROBLEM_ODD ? 1 : 0;
  int64_t s[4];
  s[3] = pad ? 1 + (int64_t)(choice >> 1 & 1) * 2 : 1;
  int inner = rows_outside ? 1 : 2, outer = rows_outside ? 2 : 1;
  s[inner] = m.n[3] * s[3] + 3 * pad;
  s[outer] = m.n[inner] * s[inner] + 5 * pad;
  s[0] = m.n[outer] * s[outer] + 7 * pad;
  int64_t last = 0;
  bool empty = false;
  for (int axis = 0; axis < 4; axis++) {
    empty = empty || m.n[axis] == 0;
    last += m.n[axis] > 0 ? (m.n[axis] - 1) * s[axis] : 0;
  }
  size_t size = dtype_size(dtype), bytes = empty ? 0 : (size_t)(last + 1) * size;
  if (!problem_buffer_make(buffer, bytes, flags)) {
    return false;
  }
  memset(buffer->begin, 0xff, bytes);
  *t = qkv_strided(buffer->begin, dtype, s[0], s[1], s[2], s[3]);
  for (int axis = 0; axis < 4; axis++) {
    if (layout == PROBLEM_NEG) {
      t->stride[axis] = -t->stride[axis];
    }
    if (zero[axis]) {
      t->stride[axis] = 0;
    } else if (n.n[axis] == 1 && layout == PROBLEM_ODD) {
      t->stride[axis] = UNUSED_STRIDE;
    }
  }
  if (layout == PROBLEM_NEG && !empty) {
    t->data = buffer->begin + (size_t)last * size;
  }
  return true;
}

static bool lay(problem_case *c, int index, qkv_tensor *t, int32_t dtype, shape n, int layout, const bool fixed[4]) {
  uint64_t choice = rng_at(c->spec.seed, STREAM_LAYOUT, (uint64_t)index);
  return lay_in(&c->buffer[index], c->flags, choice, t, dtype, n, layout, fixed);
}

static int64_t plain_offset(const qkv_tensor *t, const int64_t at[4]) {
  int64_t offset = 0;
  for (int axis = 0; axis < 4; axis++) {
    offset += at[axis] != 0 ? at[axis] * t->stride[axis] : 0;
  }
  return offset;
}

static double pick_value(const problem_spec *s, const problem_dtype *d, uint64_t stream, uint64_t index, const shape *n,
                         const int64_t at[4]) {
  double x = rng_normal_at(s->seed, stream, index);
  switch (s->data) {
  case PROBLEM_BIG: {
    /* Scores near 1e4 and more; rows of v between 1 and 2^90. */
    uint64_t row = rng_at(s->seed, stream + 100, (uint64_t)((at[0] * n->n[1] + at[1]) * n->n[2] + at[2]));
    return stream == STREAM_V ? ldexp(x, (int)(row % 4) * d->big_v) : ldexp(x, (int)(row % 6));
  }
  case PROBLEM_TINY: return ldexp(x, stream == STREAM_V ? d->tiny_v : d->tiny_qk);
  case PROBLEM_ONES: return stream == STREAM_V ? 1 : x;
  default: return x;
  }
}

static void fill(const problem_spec *s, const qkv_tensor *t, uint64_t stream, shape n) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  uint64_t index = 0;
  int64_t at[4];
  for (at[0] = 0; at[0] < n.n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n.n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n.n[2]; at[2]++) {
        for (at[3] = 0; at[3] < n.n[3]; at[3]++) {
          d->store((char *)t->data + plain_offset(t, at) * (int64_t)d->size, pick_value(s, d, stream, index++, &n, at));
        }
      }
    }
  }
}

static void fill_bias(const problem_spec *s, const qkv_tensor *t, shape n) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  double lowest = -d->largest;
  uint64_t index = 0;
  int64_t at[4];
  for (at[0] = 0; at[0] < n.n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n.n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n.n[2]; at[2]++) {
        uint64_t row = rng_at(s->seed, STREAM_BIAS + 100, index);
        for (at[3] = 0; at[3] < n.n[3]; at[3]++) {
          double x = 2 * rng_normal_at(s->seed, STREAM_BIAS, index);
          if (s->bias == PROBLEM_BIAS_INF && (rng_at(s->seed, STREAM_BIAS + 200, index) & 3) == 0) {
            x = -HUGE_VAL;
          } else if (s->bias == PROBLEM_BIAS_LOW && (row & 3) == 0) {
            x = lowest;
          }
          index++;
          d->store((char *)t->data + plain_offset(t, at) * (int64_t)d->size, x);
        }
      }
    }
  }
}

/* Slopes 2^-1, 2^-2, ... with a few bits of noise; sinks near the scores, every sixth -inf. */
static void fill_per_head(const problem_spec *s, const qkv_tensor *t, bool slopes) {
  for (int64_t b = 0; b < s->batch; b++) {
    for (int64_t h = 0; h < s->num_heads; h++) {
      uint64_t w = rng_at(s->seed, slopes ? STREAM_ALIBI : STREAM_SINKS, (uint64_t)(t->stride[0] != 0 ? b * 64 + h : h));
      double x = slopes       ? (1 + (double)(w & 15) / 16) * ldexp(1, -(int)(h % 8) - 1)
                 : w % 6 == 0 ? -HUGE_VAL
                              : 3 * rng_normal_at(w, 0, 0);
      problem_store(t, (s->batch > 1 ? b * t->stride[0] : 0) + (s->num_heads > 1 ? h * t->stride[1] : 0), x);
    }
  }
}

static int32_t *new_array(problem_case *c, int which, int64_t count) {
  problem_buffer *b = &c->buffer[PROBLEM_BUFFER_ARRAYS + which];
  return problem_buffer_make(b, (size_t)count * sizeof(int32_t), c->flags) ? (int32_t *)(void *)b->begin : NULL;
}

/* `entries` + 1 ascending offsets from 0 to `total`, empty entries among them. */
static void fill_offsets(rng *r, int32_t *to, int64_t entries, int64_t total) {
  to[0] = 0;
  for (int64_t b = 1; b < entries; b++) {
    to[b] = rng_chance(r, 15) ? 0 : (int32_t)rng_below(r, total + 1);
  }
  to[entries] = (int32_t)total;
  for (int64_t a = 1; a < entries; a++) { /* insertion sort */
    for (int64_t b = a; b > 0 && to[b] < to[b - 1]; b--) {
      int32_t x = to[b];
      to[b] = to[b - 1];
      to[b - 1] = x;
    }
  }
}

static bool build_arrays(problem_case *c) {
  const problem_spec *s = &c->spec;
  qkv_problem *p = &c->problem;
  rng state = {s->seed, STREAM_ARRAYS, 0}, *r = &state;
  int32_t *a;
  if (s->ragged_q) {
    p->cu_seqlens_q = a = new_array(c, 0, s->batch + 1);
    if (a == NULL) {
      return false;
    }
    fill_offsets(r, a, s->batch, s->seqlen_q);
  }
  if (s->ragged_kv) {
    p->cu_seqlens_kv = a = new_array(c, 1, s->batch + 1);
    if (a == NULL) {
      return false;
    }
    fill_offsets(r, a, s->batch, s->seqlen_kv);
  }
  if (s->lengths) {
    int32_t *ql = new_array(c, 2, s->batch), *begin = new_array(c, 3, s->batch), *end = new_array(c, 4, s->batch);
    if (ql == NULL || begin == NULL || end == NULL) {
      return false;
    }
    for (int64_t b = 0; b < s->batch; b++) {
      int64_t rows = problem_rows(p, b), keys = problem_keys(p, b), kind = rng_below(r, 10);
      ql[b] = (int32_t)(kind == 0 ? 0 : kind < 4 ? rows : rng_range(r, 0, rows));
      kind = rng_below(r, 10);
      end[b] = (int32_t)(kind == 0 ? 0 : kind < 4 ? keys : rng_range(r, 0, keys));
      begin[b] = (int32_t)(rng_chance(r, 40) ? 0 : rng_range(r, 0, rng_chance(r, 80) ? end[b] / 2 : end[b]));
    }
    p->q_length = ql;
    p->kv_begin = begin;
    p->kv_length = end;
  }
  if (s->kvpos) {
    p->kv_position = a = new_array(c, 5, s->batch);
    if (a == NULL) {
      return false;
    }
    for (int64_t b = 0; b < s->batch; b++) {
      int64_t kind = rng_below(r, 4);
      a[b] = (int32_t)(kind == 0 ? 512 * rng_below(r, 5) : kind == 1 ? 64 * rng_below(r, 20) : rng_below(r, 1500));
    }
  }
  if (s->align == QKV_ALIGN_EXPLICIT) {
    p->q_position = a = new_array(c, 6, s->batch);
    if (a == NULL) {
      return false;
    }
    for (int64_t b = 0; b < s->batch; b++) {
      int64_t first = p->kv_position != NULL ? p->kv_position[b] : 0;
      a[b] = (int32_t)(first + rng_range(r, -20, problem_keys(p, b) + 10));
    }
  }
  return true;
}

/* Over the entries: of problem_rows or problem_keys. */
static int64_t most_of(const qkv_problem *p, int64_t (*extent)(const qkv_problem *, int64_t)) {
  int64_t most = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t n = extent(p, b);
    most = n > most ? n : most;
  }
  return most;
}

/* The ends of the positions that the tensors reach. */
static void ends_of(const qkv_problem *p, int64_t *end_q, int64_t *end_kv) {
  *end_q = *end_kv = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    const int64_t first = p->kv_position != NULL ? p->kv_position[b] : 0, keys = first + problem_keys(p, b);
    int64_t queries = first + problem_rows(p, b);
    if (p->align == QKV_ALIGN_END) {
      queries = keys;
    } else if (p->align == QKV_ALIGN_EXPLICIT) {
      queries = problem_rows(p, b) + (p->q_position != NULL ? p->q_position[b] : 0);
    }
    *end_q = queries > *end_q ? queries : *end_q;
    *end_kv = keys > *end_kv ? keys : *end_kv;
  }
}

/* Lists of random blocks: some empty, some of all blocks, sorted or in no order with duplicates. */
static bool build_map(problem_case *c, int n, uint64_t seed) {
  const problem_spec *s = &c->spec;
  qkv_block_map *map = &c->map[n];
  const int index = PROBLEM_BUFFER_MASK + 2 * n;
  *map = qkv_block_map_default();
  map->block = (int32_t)s->mask[n].a;
  ends_of(&c->problem, &map->seqlen_q, &map->seqlen_kv);
  map->batch = (seed & 3) == 0 && s->batch > 0 ? s->batch : 1;
  map->num_heads = (seed & 12) != 0 && s->num_heads > 0 ? s->num_heads : 1;
  map->sorted = seed >> 4 & 1;
  const int64_t rows = (map->seqlen_q + map->block - 1) / map->block, keys = (map->seqlen_kv + map->block - 1) / map->block;
  const int64_t lists = map->batch * map->num_heads;
  int32_t *list = malloc((size_t)(lists * rows * (keys + 2) + 1) * sizeof *list);
  if (list == NULL || !problem_buffer_make(&c->buffer[index], (size_t)(lists * (rows + 1)) * sizeof *list, c->flags)) {
    free(list);
    return false;
  }
  map->indptr = (int32_t *)(void *)c->buffer[index].begin;
  int32_t at = 0;
  for (int64_t x = 0; x < lists * (rows + 1); x++) {
    map->indptr[x] = at;
    if (x % (rows + 1) == rows || keys == 0) {
      continue;
    }
    const uint64_t w = rng_at(seed, 4, (uint64_t)x);
    const uint64_t percent = w % 4 == 0 ? 0 : w % 4 == 1 ? 100 : 20;
    for (int64_t j = 0; j < keys; j++) {
      if (rng_at(seed, 5, (uint64_t)(x * keys + j)) % 100 < percent) {
        list[at++] = (int32_t)(map->sorted ? j : keys - 1 - j);
      }
    }
    if (!map->sorted && at > map->indptr[x]) {
      list[at] = list[map->indptr[x]];
      at++;
    }
  }
  map->capacity = at;
  const bool made = problem_buffer_make(&c->buffer[index + 1], (size_t)at * sizeof *list, c->flags);
  if (made) {
    map->indices = (int32_t *)(void *)c->buffer[index + 1].begin;
    memcpy(map->indices, list, (size_t)at * sizeof *list);
  }
  free(list);
  return made;
}

/* Ascending positions near those of the keys, and unused places. */
static bool build_list(problem_case *c, int n, uint64_t seed, qkv_tensor *t, int64_t *places) {
  const problem_spec *s = &c->spec;
  int layout = s->layout == PROBLEM_ODD || s->layout == PROBLEM_NEG ? s->layout : PROBLEM_BHSD;
  const bool fixed[4] = {(seed & 3) == 0, (seed & 12) != 0, false, false};
  *places = 1 + (int64_t)(seed >> 8 & 7);
  const shape n4 = {{s->batch, s->num_heads, 1, *places}};
  if (!lay(c, PROBLEM_BUFFER_MASK + 2 * n, t, QKV_I32, n4, layout, fixed)) {
    return false;
  }
  int64_t at[4] = {0, 0, 0, 0};
  for (at[0] = 0; at[0] < s->batch; at[0]++) {
    for (at[1] = 0; at[1] < s->num_heads; at[1]++) {
      /* The same for all that share the memory. */
      const uint64_t own = rng_at(seed, 6, (uint64_t)((fixed[0] ? 0 : at[0]) * 64 + (fixed[1] ? 0 : at[1])));
      int64_t position = c->problem.kv_position != NULL && !fixed[0] ? c->problem.kv_position[at[0]] : 0;
      for (at[3] = 0; at[3] < *places; at[3]++) {
        position += (int64_t)(rng_at(own, 7, (uint64_t)at[3]) % (at[3] % 3 == 0 ? 60 : 3)) + (at[3] > 0);
        ((int32_t *)t->data)[plain_offset(t, at)] = at[3] < (int64_t)(own % 9) ? (int32_t)position : -1;
      }
    }
  }
  return true;
}

static bool build_strides(problem_case *c, int n, uint64_t seed, qkv_tensor *t) {
  const problem_spec *s = &c->spec;
  const bool fixed[4] = {(seed & 3) != 0, (seed & 12) == 0, false, false};
  const shape n4 = {{s->batch, s->num_heads, 1, 1}};
  if (!lay(c, PROBLEM_BUFFER_MASK + 2 * n, t, QKV_I32, n4, PROBLEM_BHSD, fixed)) {
    return false;
  }
  int64_t at[4] = {0, 0, 0, 0};
  for (at[0] = 0; at[0] < s->batch; at[0]++) {
    for (at[1] = 0; at[1] < s->num_heads; at[1]++) {
      const uint64_t own = rng_at(seed, 8, (uint64_t)((fixed[0] ? 0 : at[0]) * 64 + (fixed[1] ? 0 : at[1])));
      ((int32_t *)t->data)[plain_offset(t, at)] = 1 + (int32_t)(own % (own >> 8 & 1 ? 6 : 100));
    }
  }
  return true;
}

static bool build_mask(problem_case *c, int n) {
  const problem_spec *s = &c->spec;
  const problem_mask *m = &s->mask[n];
  int64_t rows = most_of(&c->problem, problem_rows), keys = most_of(&c->problem, problem_keys);
  int index = PROBLEM_BUFFER_MASK + 2 * n;
  uint64_t seed = rng_at(s->seed, STREAM_MASK, (uint64_t)n);
  qkv_mask *to = &c->mask[n];
  int layout = s->layout == PROBLEM_ODD || s->layout == PROBLEM_NEG ? s->layout : PROBLEM_BHSD;
  switch (m->kind) {
  case PROBLEM_CAUSAL: *to = qkv_causal(); break;
  case PROBLEM_CAUSAL_START: *to = qkv_causal_start(); break;
  case PROBLEM_WINDOW: *to = qkv_window(m->a, m->b); break;
  case PROBLEM_PREFIX: *to = qkv_prefix(m->a); break;
  case PROBLEM_TILE:
    c->tile[n] = (problem_tile_user){seed, 0, 0};
    *to = qkv_tiles(tile_fn, &c->tile[n]);
    break;
  case PROBLEM_KEYS: *to = qkv_keys(m->a, m->b); break;
  case PROBLEM_QUERIES: *to = qkv_queries(m->a, m->b); break;
  case PROBLEM_CHUNK: *to = qkv_chunk(m->a, m->b); break;
  case PROBLEM_COLUMNS: *to = qkv_columns(m->a, m->b); break;
  case PROBLEM_STRIDE: *to = qkv_stride(m->a, m->b); break;
  case PROBLEM_KEYLIST:
  case PROBLEM_QUERYLIST: {
    qkv_tensor t;
    int64_t places;
    if (!build_list(c, n, seed, &t, &places)) {
      return false;
    }
    *to = m->kind == PROBLEM_KEYLIST ? qkv_keys_of(t, places) : qkv_queries_of(t, places);
    break;
  }
  case PROBLEM_STRIDES: {
    qkv_tensor t;
    if (!build_strides(c, n, seed, &t)) {
      return false;
    }
    *to = qkv_strides(t, m->a);
    break;
  }
  case PROBLEM_BLOCKS:
    if (!build_map(c, n, seed)) {
      return false;
    }
    *to = qkv_blocks(&c->map[n]);
    break;
  case PROBLEM_DENSE: {
    bool fixed[4] = {(seed & 3) == 0, (seed & 12) != 0, (seed & 48) == 0, false};
    qkv_tensor t;
    shape n4 = {{s->batch, s->num_heads, rows, keys > m->a ? keys - m->a : 0}};
    if (!lay(c, index, &t, QKV_U8, n4, layout, fixed)) {
      return false;
    }
    int64_t at[4];
    uint64_t count = 0;
    for (at[0] = 0; at[0] < n4.n[0]; at[0]++) {
      for (at[1] = 0; at[1] < n4.n[1]; at[1]++) {
        for (at[2] = 0; at[2] < n4.n[2]; at[2]++) {
          for (at[3] = 0; at[3] < n4.n[3]; at[3]++) {
            uint64_t w = rng_at(seed, 0, count++);
            /* Runs of equal bytes, so that whole tiles agree now and then. */
            bool run = (seed >> 8 & 1) && (rng_at(seed, 1, (uint64_t)(at[2] >> 6) << 20 | (uint64_t)at[3] >> 6) & 1);
            ((uint8_t *)t.data)[plain_offset(&t, at)] = run ? 0xfe : w & 1 ? (uint8_t)(w >> 8) : 0;
          }
        }
      }
    }
    *to = qkv_dense(t, m->a);
    break;
  }
  default: { /* documents */
    qkv_tensor t, u = qkv_strided(NULL, 0, 0, 0, 0, 0);
    shape per_key = {{s->batch, 1, 1, keys}}, per_row = {{s->batch, 1, rows, 1}};
    bool fixed[4] = {(seed & 7) == 0, false, false, false};
    if (!lay(c, index, &t, QKV_I32, per_key, layout, fixed) ||
        (m->kind == PROBLEM_DOCUMENTS2 && !lay(c, index + 1, &u, QKV_I32, per_row, layout, NULL))) {
      return false;
    }
    int64_t length = 1 + (int64_t)(seed >> 16 & 127);
    for (int64_t b = 0; b < s->batch; b++) {
      for (int64_t j = 0; j < keys; j++) {
        bool sorted = seed >> 8 & 1;
        int64_t at[4] = {b, 0, 0, j};
        ((int32_t *)t.data)[plain_offset(&t, at)] =
            (int32_t)(sorted ? (j + 7 * b) / length : (int64_t)(rng_at(seed, 2, (uint64_t)(j / 5)) % 3) - 1);
      }
      for (int64_t i = 0; i < rows && u.data != NULL; i++) {
        int64_t at[4] = {b, 0, i, 0};
        ((int32_t *)u.data)[plain_offset(&u, at)] = (int32_t)((int64_t)(rng_at(seed, 3, (uint64_t)(i / 7)) % 4) - 1);
      }
    }
    *to = qkv_documents(t);
    to->u = u;
    break;
  }
  }
  if (m->join) {
    *to = qkv_or(*to);
  }
  return true;
}

/* Puts NaN and Inf into every element of a buffer that is not marked as used. */
static void poison(const problem_buffer *b, uint64_t seed, const qkv_tensor *t, const unsigned char *used) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  for (size_t e = 0; e < b->bytes / d->size; e++) {
    if (!used[e]) {
      d->store_nan(b->begin + e * d->size, rng_at(seed, STREAM_NAN, e));
    }
  }
}

static void mark_in(const problem_buffer *b, const qkv_tensor *t, int64_t offset, unsigned char *used) {
  int64_t size = (int64_t)dtype_size(t->dtype);
  used[((const unsigned char *)t->data - b->begin) / size + offset] = 1;
}
static void mark(const problem_case *c, int index, const qkv_tensor *t, int64_t offset, unsigned char *used) {
  mark_in(&c->buffer[index], t, offset, used);
}

static bool poison_invisible(problem_case *c) {
  const qkv_problem *p = &c->problem;
  const int buffers[4] = {PROBLEM_BUFFER_Q, PROBLEM_BUFFER_K, PROBLEM_BUFFER_V, PROBLEM_BUFFER_BIAS};
  const qkv_tensor *tensor[4] = {&p->q, &p->k, &p->v, &p->bias};
  unsigned char *used[4] = {NULL, NULL, NULL, NULL};
  bool done = false;
  for (int n = 0; n < 4; n++) {
    used[n] = calloc(c->buffer[buffers[n]].bytes + 1, 1);
    if (used[n] == NULL) {
      goto out;
    }
  }
  int64_t group = p->num_kv_heads > 0 ? p->num_heads / p->num_kv_heads : 1;
  for (int64_t b = 0; b < p->batch; b++) {
    int64_t rows = problem_rows(p, b), keys = problem_keys(p, b);
    for (int64_t h = 0; h < p->num_heads; h++) {
      for (int64_t i = 0; i < rows; i++) {
        bool sees = false;
        for (int64_t j = 0; j < keys; j++) {
          if (!oracle_visible(p, b, h, i, j)) {
            continue;
          }
          int64_t at = problem_offset(p, &p->bias, 'b', b, h, i, j);
          if (p->bias.data != NULL) {
            mark(c, PROBLEM_BUFFER_BIAS, &p->bias, at, used[3]);
            if (problem_load(&p->bias, at) == -HUGE_VAL) {
              continue;
            }
          }
          sees = true;
          for (int64_t x = 0; x < p->head_dim; x++) {
            mark(c, PROBLEM_BUFFER_K, &p->k, problem_offset(p, &p->k, 'k', b, h / group, j, x), used[1]);
          }
          for (int64_t x = 0; x < p->head_dim_v; x++) {
            mark(c, PROBLEM_BUFFER_V, &p->v, problem_offset(p, &p->v, 'k', b, h / group, j, x), used[2]);
          }
        }
        for (int64_t x = 0; x < p->head_dim && sees; x++) {
          mark(c, PROBLEM_BUFFER_Q, &p->q, problem_offset(p, &p->q, 'q', b, h, i, x), used[0]);
        }
      }
    }
  }
  for (int n = 0; n < 4; n++) {
    if (tensor[n]->data != NULL) {
      poison(&c->buffer[buffers[n]], c->spec.seed, tensor[n], used[n]);
    }
  }
  done = true;
out:
  for (int n = 0; n < 4; n++) {
    free(used[n]);
  }
  return done;
}

static void poison_visible(problem_case *c) {
  const int buffers[4] = {PROBLEM_BUFFER_Q, PROBLEM_BUFFER_K, PROBLEM_BUFFER_V, PROBLEM_BUFFER_BIAS};
  const qkv_tensor *tensor[4] = {&c->problem.q, &c->problem.k, &c->problem.v, &c->problem.bias};
  rng state = {c->spec.seed, STREAM_NAN, 0}, *r = &state;
  for (int64_t count = rng_range(r, 1, 3); count > 0; count--) {
    int n = (int)rng_below(r, 4);
    if (tensor[n]->data == NULL || c->buffer[buffers[n]].bytes == 0) {
      continue;
    }
    const problem_dtype *d = problem_dtype_of(tensor[n]->dtype);
    int64_t e = rng_below(r, (int64_t)(c->buffer[buffers[n]].bytes / d->size));
    d->store_nan(c->buffer[buffers[n]].begin + e * (int64_t)d->size, rng_next(r));
  }
}

static void build_dropout(const problem_spec *s, qkv_problem *p) {
  p->dropout = s->dropout;
  if (s->dropout != 0) {
    p->seed = rng_at(s->seed, STREAM_DROPOUT, 0);
    p->offset = rng_at(s->seed, STREAM_DROPOUT, 1);
  }
  if (s->origin) {
    uint64_t w = rng_at(s->seed, STREAM_DROPOUT, 2);
    p->batch_origin = (int64_t)(w & 1 ? w >> 8 & 7 : w >> 32);
    p->head_origin = (int64_t)(w >> 4 & 15);
    p->heads_total = p->head_origin + s->num_heads + (int64_t)(w >> 2 & 3);
  }
}

static bool build(problem_case *c) {
  const problem_spec *s = &c->spec;
  qkv_problem *p = &c->problem;
  *p = qkv_problem_default();
  p->algorithm = s->algorithm;
  p->align = s->align;
  p->batch = s->batch;
  p->num_heads = s->num_heads;
  p->num_kv_heads = s->num_kv_heads;
  p->seqlen_q = s->seqlen_q;
  p->seqlen_kv = s->seqlen_kv;
  p->head_dim = s->head_dim;
  p->head_dim_v = s->head_dim_v;
  p->softmax_scale = s->scale;
  p->softcap = s->softcap;
  build_dropout(s, p);
  if (!build_arrays(c)) {
    return false;
  }
  int64_t bq = s->ragged_q ? 1 : s->batch, bk = s->ragged_kv ? 1 : s->batch;
  shape q = {{bq, s->num_heads, s->seqlen_q, s->head_dim}}, k = {{bk, s->num_kv_heads, s->seqlen_kv, s->head_dim}};
  shape v = {{bk, s->num_kv_heads, s->seqlen_kv, s->head_dim_v}}, out = {{bq, s->num_heads, s->seqlen_q, s->head_dim_v}};
  shape lse = {{bq, s->num_heads, s->seqlen_q, 1}};
  int out_layout = s->layout == PROBLEM_BROADCAST ? PROBLEM_BHSD : s->layout == PROBLEM_NEG ? PROBLEM_BSHD : s->layout;
  if (!lay(c, PROBLEM_BUFFER_Q, &p->q, problem_tensor_dtype(s, 0), q, s->layout, NULL) ||
      !lay(c, PROBLEM_BUFFER_K, &p->k, problem_tensor_dtype(s, 1), k, s->layout, NULL) ||
      !lay(c, PROBLEM_BUFFER_V, &p->v, problem_tensor_dtype(s, 2), v, s->layout, NULL) ||
      !lay(c, PROBLEM_BUFFER_OUT, &p->out, problem_tensor_dtype(s, 3), out, out_layout, NULL) ||
      (s->lse && !lay(c, PROBLEM_BUFFER_LSE, &p->lse, problem_arithmetic(s), lse, out_layout, NULL))) {
    return false;
  }
  p->lse.stride[3] = 0;
  fill(s, &p->q, STREAM_Q, q);
  fill(s, &p->k, STREAM_K, k);
  fill(s, &p->v, STREAM_V, v);
  if (s->bias != PROBLEM_NO_BIAS) {
    shape n = {{s->batch, s->num_heads, most_of(&c->problem, problem_rows), most_of(&c->problem, problem_keys)}};
    /* f64 and the 16-bit types take a bias in f32 too. */
    int32_t dtype = s->dtype != QKV_F32 && (s->seed & 4) == 0 ? QKV_F32 : s->dtype;
    if (!lay(c, PROBLEM_BUFFER_BIAS, &p->bias, dtype, n, s->layout, s->bias_broadcast)) {
      return false;
    }
    fill_bias(s, &p->bias, n);
  }
  for (int which = 0; which < 2; which++) { /* slopes, sinks: F32 or F64 whatever the arithmetic is */
    bool on = which == 0 ? s->alibi : s->sinks;
    bool shared[4] = {!(which == 0 ? s->alibi_batch : s->sinks_batch), false, false, false};
    shape n = {{s->batch, s->num_heads, 1, 1}};
    qkv_tensor *t = which == 0 ? &p->alibi_slopes : &p->sinks;
    if (on) {
      if (!lay(c, PROBLEM_BUFFER_ALIBI + which, t, s->seed >> which & 1 ? QKV_F64 : QKV_F32, n, PROBLEM_BHSD, shared)) {
        return false;
      }
      fill_per_head(s, t, which == 0);
    }
  }
  for (int n = 0; n < s->mask_count; n++) {
    if (!build_mask(c, n)) {
      return false;
    }
  }
  p->mask = s->mask_count > 0 ? c->mask : NULL;
  p->mask_count = s->mask_count;
  /* Batch strides of ragged sides, and strides of axes that a tensor does not have, are not read. */
  if (s->ragged_q) {
    p->q.stride[0] = p->out.stride[0] = p->lse.stride[0] = UNUSED_STRIDE;
  }
  if (s->ragged_kv) {
    p->k.stride[0] = p->v.stride[0] = UNUSED_STRIDE;
  }
  if (s->nan == PROBLEM_NAN) {
    return poison_invisible(c);
  }
  if (s->nan == PROBLEM_VISIBLE_NAN) {
    poison_visible(c);
  }
  return true;
}

bool problem_build(problem_case *c, const problem_spec *spec, unsigned flags) {
  memset(c, 0, sizeof *c);
  c->spec = *spec;
  c->flags = flags;
  if (!build(c)) {
    problem_free(c);
    return false;
  }
  return true;
}

bool problem_open(problem_case *c, const char *text, unsigned flags, char *error, size_t bytes) {
  problem_spec spec;
  if (!problem_parse(text, &spec, error, bytes)) {
    return false;
  }
  return problem_build(c, &spec, flags) || complain(error, bytes, "problem text: no memory for '%s'", text);
}

void problem_free(problem_case *c) {
  for (int n = 0; n < PROBLEM_BUFFERS; n++) {
    problem_buffer_free(&c->buffer[n]);
  }
  memset(c, 0, sizeof *c);
}

void problem_clear_outputs(problem_case *c) {
  for (int n = PROBLEM_BUFFER_OUT; n <= PROBLEM_BUFFER_LSE; n++) {
    if (c->buffer[n].bytes > 0) {
      memset(c->buffer[n].begin, 0xff, c->buffer[n].bytes);
    }
  }
}

/* Whether the elements that are not marked still have their bytes 0xff. */
static bool unused_intact(const problem_buffer *b, size_t size, const unsigned char *used) {
  for (size_t e = 0; e < b->bytes / size; e++) {
    for (size_t byte = 0; byte < size && !used[e]; byte++) {
      if (b->begin[e * size + byte] != 0xff) {
        return false;
      }
    }
  }
  return true;
}

bool problem_gaps_intact(const problem_case *c) {
  const qkv_problem *p = &c->problem;
  bool intact = true;
  for (int n = PROBLEM_BUFFER_OUT; n <= PROBLEM_BUFFER_LSE; n++) {
    const qkv_tensor *t = n == PROBLEM_BUFFER_OUT ? &p->out : &p->lse;
    const problem_buffer *b = &c->buffer[n];
    unsigned char *used = t->data != NULL ? calloc(b->bytes + 1, 1) : NULL;
    if (used == NULL) {
      continue;
    }
    for (int64_t e = 0; e < p->batch; e++) {
      for (int64_t h = 0; h < p->num_heads; h++) {
        for (int64_t i = 0; i < problem_rows(p, e); i++) {
          for (int64_t x = 0; x < (n == PROBLEM_BUFFER_OUT ? p->head_dim_v : 1); x++) {
            mark(c, n, t, problem_offset(p, t, 'q', e, h, i, x), used);
          }
        }
      }
    }
    intact = intact && unused_intact(b, dtype_size(t->dtype), used);
    free(used);
  }
  return intact;
}

/* ---- Gradients ----------------------------------------------------------------------------------------------------- */

const qkv_tensor *problem_gradient(const qkv_gradients *g, int which) {
  const qkv_tensor *all[PROBLEM_GRADIENT_TENSORS] = {&g->dout, &g->dlse, &g->dq, &g->dk, &g->dv, &g->dbias, &g->dsinks};
  return all[which];
}

const char *problem_gradient_name(int which) { return gradient_names[which]; }

void problem_gradient_extents(const qkv_problem *p, const qkv_gradients *g, int which, int64_t extents[4]) {
  const qkv_tensor *t = problem_gradient(g, which);
  int64_t dv = p->head_dim_v > 0 ? p->head_dim_v : p->head_dim,
          kv_heads = p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads;
  extents[0] = p->batch;
  extents[1] = which == PROBLEM_DK || which == PROBLEM_DV ? kv_heads : p->num_heads;
  extents[2] = which == PROBLEM_DSINKS                      ? 1
               : which == PROBLEM_DK || which == PROBLEM_DV ? most_of(p, problem_keys)
                                                            : most_of(p, problem_rows);
  switch (which) {
  case PROBLEM_DOUT:
  case PROBLEM_DV: extents[3] = dv; break;
  case PROBLEM_DQ:
  case PROBLEM_DK: extents[3] = p->head_dim; break;
  case PROBLEM_DBIAS: extents[3] = most_of(p, problem_keys); break;
  default: extents[3] = 1; break;
  }
  for (int axis = 0; axis < 4 && which >= PROBLEM_DBIAS; axis++) {
    extents[axis] = t->stride[axis] == 0 && extents[axis] > 1 ? 1 : extents[axis];
  }
}

bool problem_gradient_has(const qkv_problem *p, const qkv_gradients *g, int which, const int64_t at[4]) {
  const qkv_tensor *t = problem_gradient(g, which);
  if (which == PROBLEM_DSINKS || (which == PROBLEM_DBIAS && t->stride[0] == 0)) {
    return true; /* of dbias: some entry has it */
  }
  if (which == PROBLEM_DBIAS) {
    return at[2] < problem_rows(p, at[0]) && at[3] < problem_keys(p, at[0]);
  }
  return at[2] < (which == PROBLEM_DK || which == PROBLEM_DV ? problem_keys(p, at[0]) : problem_rows(p, at[0]));
}

int64_t problem_gradient_offset(const qkv_problem *p, const qkv_gradients *g, int which, const int64_t at[4]) {
  const char side = which >= PROBLEM_DBIAS ? 'b' : which == PROBLEM_DK || which == PROBLEM_DV ? 'k' : 'q';
  return problem_offset(p, problem_gradient(g, which), side, at[0], at[1], at[2], at[3]);
}

/* Whether qkv_backward writes it, and whether it adds to what is there. */
static bool is_wanted(const problem_spec *s, int which) {
  int bit = 1 << (which - PROBLEM_DQ);
  bool there = which == PROBLEM_DBIAS ? s->bias != PROBLEM_NO_BIAS : which != PROBLEM_DSINKS || s->sinks;
  return there && (s->want == 0 || (s->want & bit) != 0);
}

void problem_gradients_clear(problem_gradients *g) {
  const problem_case *c = g->of;
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    const qkv_tensor *t = problem_gradient(&g->g, which);
    if (t->data == NULL || g->buffer[which].bytes == 0) {
      continue;
    }
    memset(g->buffer[which].begin, 0xff, g->buffer[which].bytes);
    if ((g->g.accumulate >> (which - PROBLEM_DQ) & 1) == 0) {
      continue;
    }
    int64_t n[4], at[4];
    uint64_t index = 0;
    problem_gradient_extents(&c->problem, &g->g, which, n);
    for (at[0] = 0; at[0] < n[0]; at[0]++) {
      for (at[1] = 0; at[1] < n[1]; at[1]++) {
        for (at[2] = 0; at[2] < n[2]; at[2]++) {
          for (at[3] = 0; at[3] < n[3]; at[3]++) {
            if (problem_gradient_has(&c->problem, &g->g, which, at)) {
              problem_store(t, problem_gradient_offset(&c->problem, &g->g, which, at),
                            rng_normal_at(c->spec.seed, (uint64_t)(STREAM_OLD + which), index));
            }
            index++;
          }
        }
      }
    }
  }
}

bool problem_gradients_gaps_intact(const problem_gradients *g) {
  const problem_case *c = g->of;
  bool intact = true;
  for (int which = PROBLEM_DQ; which < PROBLEM_GRADIENT_TENSORS; which++) {
    const qkv_tensor *t = problem_gradient(&g->g, which);
    const problem_buffer *b = &g->buffer[which];
    unsigned char *used = t->data != NULL ? calloc(b->bytes + 1, 1) : NULL;
    if (used == NULL) {
      continue;
    }
    int64_t n[4], at[4];
    problem_gradient_extents(&c->problem, &g->g, which, n);
    for (at[0] = 0; at[0] < n[0]; at[0]++) {
      for (at[1] = 0; at[1] < n[1]; at[1]++) {
        for (at[2] = 0; at[2] < n[2]; at[2]++) {
          at[3] = 0;
          /* Rows and keys of dbias that only longer entries have are elements of the tensor too. */
          if (n[3] == 0 || (which != PROBLEM_DBIAS && !problem_gradient_has(&c->problem, &g->g, which, at))) {
            continue;
          }
          const int64_t first = problem_gradient_offset(&c->problem, &g->g, which, at), step = n[3] > 1 ? t->stride[3] : 0;
          for (int64_t x = 0; x < n[3]; x++) {
            mark_in(b, t, first + x * step, used);
          }
        }
      }
    }
    intact = intact && unused_intact(b, dtype_size(t->dtype), used);
    free(used);
  }
  return intact;
}

static void fill_incoming(const problem_spec *s, const qkv_tensor *t, uint64_t stream, shape n) {
  const problem_dtype *d = problem_dtype_of(t->dtype);
  uint64_t index = 0;
  int64_t at[4];
  for (at[0] = 0; at[0] < n.n[0]; at[0]++) {
    for (at[1] = 0; at[1] < n.n[1]; at[1]++) {
      for (at[2] = 0; at[2] < n.n[2]; at[2]++) {
        uint64_t row = rng_at(s->seed, stream + 100, (uint64_t)((at[0] * n.n[1] + at[1]) * n.n[2] + at[2]));
        int power = s->data == PROBLEM_BIG ? (int)(row % 6) : s->data == PROBLEM_TINY && (s->seed & 1) ? d->tiny_v : 0;
        for (at[3] = 0; at[3] < n.n[3]; at[3]++) {
          d->store((char *)t->data + plain_offset(t, at) * (int64_t)d->size,
                   ldexp(rng_normal_at(s->seed, stream, index++), power));
        }
      }
    }
  }
}

/* NaN in dout and dlse of rows that do not exist, or that see nothing; with sinks these matter to dsinks. Or in a slot
 * anywhere. */
static bool poison_incoming(problem_gradients *g) {
  const problem_case *c = g->of;
  const qkv_problem *p = &c->problem;
  for (int which = PROBLEM_DOUT; which <= PROBLEM_DLSE; which++) {
    const qkv_tensor *t = problem_gradient(&g->g, which);
    const problem_buffer *b = &g->buffer[which];
    if (t->data == NULL || b->bytes == 0) {
      continue;
    }
    if (c->spec.nan == PROBLEM_VISIBLE_NAN) {
      rng r = {c->spec.seed, STREAM_GRADIENTS, (uint64_t)which};
      const problem_dtype *d = problem_dtype_of(t->dtype);
      if (rng_chance(&r, 40)) {
        int64_t e = rng_below(&r, (int64_t)(b->bytes / d->size));
        d->store_nan(b->begin + (size_t)e * d->size, rng_next(&r));
      }
      continue;
    }
    unsigned char *used = calloc(b->bytes + 1, 1);
    if (used == NULL) {
      return false;
    }
    int64_t n[4], at[4];
    problem_gradient_extents(p, &g->g, which, n);
    for (at[0] = 0; at[0] < n[0]; at[0]++) {
      int64_t rows = p->q_length != NULL ? p->q_length[at[0]] : problem_rows(p, at[0]);
      for (at[1] = 0; at[1] < n[1]; at[1]++) {
        for (at[2] = 0; at[2] < rows; at[2]++) {
          bool counts = p->sinks.data != NULL;
          for (int64_t j = 0; j < problem_keys(p, at[0]) && !counts; j++) {
            counts = oracle_sees(p, at[0], at[1], at[2], j);
          }
          for (at[3] = 0; at[3] < n[3] && counts; at[3]++) {
            mark_in(b, t, problem_gradient_offset(p, &g->g, which, at), used);
          }
        }
      }
    }
    poison(b, c->spec.seed, t, used);
    free(used);
  }
  return true;
}

static bool build_gradients(problem_gradients *g, unsigned flags) {
  const problem_case *c = g->of;
  const problem_spec *s = &c->spec;
  const qkv_problem *p = &c->problem;
  g->g = qkv_gradients_default();
  int64_t bq = s->ragged_q ? 1 : s->batch, bk = s->ragged_kv ? 1 : s->batch;
  const shape shapes[PROBLEM_GRADIENT_TENSORS] = {
      {{bq, s->num_heads, s->seqlen_q, s->head_dim_v}},
      {{bq, s->num_heads, s->seqlen_q, 1}},
      {{bq, s->num_heads, s->seqlen_q, s->head_dim}},
      {{bk, s->num_kv_heads, s->seqlen_kv, s->head_dim}},
      {{bk, s->num_kv_heads, s->seqlen_kv, s->head_dim_v}},
      {{s->batch, s->num_heads, most_of(&c->problem, problem_rows), most_of(&c->problem, problem_keys)}},
      {{s->batch, s->num_heads, 1, 1}}};
  qkv_tensor *tensors[PROBLEM_GRADIENT_TENSORS] = {&g->g.dout, &g->g.dlse,  &g->g.dq,    &g->g.dk,
                                                   &g->g.dv,   &g->g.dbias, &g->g.dsinks};
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    bool input = which <= PROBLEM_DLSE;
    if (input ? which == PROBLEM_DLSE && !s->dlse : !is_wanted(s, which)) {
      continue;
    }
    /* 0 and negative strides are for inputs. */
    int layout = input || s->layout <= PROBLEM_ODD ? s->layout : s->layout == PROBLEM_NEG ? PROBLEM_BSHD : PROBLEM_BHSD;
    bool fixed[4] = {false, false, false, false};
    if (which == PROBLEM_DBIAS) {
      memcpy(fixed, s->summed[0] ? s->summed_over[0] : s->bias_broadcast, sizeof fixed);
    } else if (which == PROBLEM_DSINKS) {
      fixed[0] = s->summed[1] ? s->summed_over[1][0] : !s->sinks_batch;
      fixed[1] = s->summed[1] && s->summed_over[1][1];
      layout = PROBLEM_BHSD;
    }
    qkv_tensor *t = tensors[which];
    uint64_t choice = rng_at(s->seed, STREAM_LAYOUT, (uint64_t)(PROBLEM_BUFFERS + which));
    if (!lay_in(&g->buffer[which], flags, choice, t, problem_gradient_dtype(s, which), shapes[which], layout, fixed)) {
      return false;
    }
    if (input) {
      fill_incoming(s, t, which == PROBLEM_DOUT ? STREAM_DOUT : STREAM_DLSE, shapes[which]);
    } else if (s->accumulate && (rng_at(s->seed, STREAM_GRADIENTS, 100) >> which & 1)) {
      g->g.accumulate |= 1 << (which - PROBLEM_DQ);
    }
    bool ragged = which >= PROBLEM_DBIAS ? false : which == PROBLEM_DK || which == PROBLEM_DV ? s->ragged_kv : s->ragged_q;
    if (ragged) {
      t->stride[0] = UNUSED_STRIDE;
    }
  }
  g->g.dlse.stride[3] = 0;
  problem_gradients_clear(g);
  return p->batch == 0 || s->nan == PROBLEM_NO_NAN || poison_incoming(g);
}

bool problem_gradients_build(problem_gradients *g, const problem_case *c, unsigned flags) {
  memset(g, 0, sizeof *g);
  g->of = c;
  if (!build_gradients(g, flags)) {
    problem_gradients_free(g);
    return false;
  }
  return true;
}

void problem_gradients_free(problem_gradients *g) {
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    problem_buffer_free(&g->buffer[which]);
  }
  memset(g, 0, sizeof *g);
}

/* ---- One entry alone ----------------------------------------------------------------------------------------------- */

static void advance(qkv_tensor *t, int64_t elements) {
  if (t->data != NULL) {
    t->data = (char *)t->data + elements * (int64_t)dtype_size(t->dtype);
  }
}

static int64_t step(int64_t index, int64_t stride) { return index != 0 ? index * stride : 0; }

void problem_view_entry(problem_view *view, const qkv_problem *p, int64_t b, int64_t kv_head_begin, int64_t kv_head_end) {
  qkv_problem *v = &view->problem;
  *v = *p;
  int64_t kv_heads = p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads;
  int64_t group = kv_heads > 0 ? p->num_heads / kv_heads : 1, head = kv_head_begin * group;
  v->batch = 1;
  v->num_kv_heads = kv_head_end - kv_head_begin;
  v->num_heads = v->num_kv_heads * group;
  v->batch_origin += b;
  v->head_origin += head;
  v->heads_total = p->heads_total > 0 ? p->heads_total : p->num_heads;
  v->seqlen_q = problem_rows(p, b);
  v->seqlen_kv = problem_keys(p, b);
  v->head_dim_v = p->head_dim_v > 0 ? p->head_dim_v : p->head_dim;
  qkv_tensor *q_side[3] = {&v->q, &v->out, &v->lse}, *k_side[2] = {&v->k, &v->v};
  for (int n = 0; n < 3; n++) {
    advance(q_side[n], problem_offset(p, q_side[n], 'q', b, head, 0, 0));
  }
  for (int n = 0; n < 2; n++) {
    advance(k_side[n], problem_offset(p, k_side[n], 'k', b, kv_head_begin, 0, 0));
  }
  qkv_tensor *others[3] = {&v->bias, &v->alibi_slopes, &v->sinks};
  for (int n = 0; n < 3; n++) {
    advance(others[n], step(b, others[n]->stride[0]) + step(head, others[n]->stride[1]));
  }
  const int32_t **arrays[5] = {&v->q_length, &v->kv_begin, &v->kv_length, &v->q_position, &v->kv_position};
  for (int n = 0; n < 5; n++) {
    *arrays[n] = *arrays[n] != NULL ? *arrays[n] + b : NULL;
  }
  view->cu_q[0] = view->cu_kv[0] = 0;
  view->cu_q[1] = (int32_t)v->seqlen_q;
  view->cu_kv[1] = (int32_t)v->seqlen_kv;
  v->cu_seqlens_q = p->cu_seqlens_q != NULL ? view->cu_q : NULL;
  v->cu_seqlens_kv = p->cu_seqlens_kv != NULL ? view->cu_kv : NULL;
  for (int64_t n = 0; n < p->mask_count && n < PROBLEM_MAX_MASKS; n++) {
    qkv_mask *m = &view->mask[n];
    *m = p->mask[n];
    const bool by_head = m->kind != QKV_MASK_DOCUMENT && m->t.data != NULL;
    advance(&m->t, step(b, m->t.stride[0]) + (by_head ? step(head, m->t.stride[1]) : 0));
    advance(&m->u, step(b, m->u.stride[0]));
    if (m->kind == QKV_MASK_TILE && m->fn == tile_fn) {
      view->tile[n] = *(const problem_tile_user *)m->user;
      view->tile[n].batch_origin += b;
      view->tile[n].head_origin += head;
      m->user = &view->tile[n];
    }
    if (m->kind == QKV_MASK_BLOCKS) {
      qkv_block_map *map = &view->map[n];
      *map = *(const qkv_block_map *)m->user;
      const int64_t rows = (map->seqlen_q + map->block - 1) / map->block;
      map->indptr += ((map->batch > 1 ? b : 0) * map->num_heads + (map->num_heads > 1 ? head : 0)) * (rows + 1);
      map->num_heads = map->num_heads > 1 ? v->num_heads : 1;
      map->batch = 1;
      m->user = map;
      /* The entry may be shorter than what the map was made for: it is a part. */
      view->first_position = 0;
      v->kv_position = v->kv_position != NULL ? v->kv_position : &view->first_position;
    }
  }
  v->mask = p->mask_count > 0 ? view->mask : NULL;
}

void problem_view_gradients(qkv_gradients *view, const qkv_problem *p, const qkv_gradients *g, int64_t b,
                            int64_t kv_head_begin, int64_t kv_head_end) {
  int64_t kv_heads = p->num_kv_heads > 0 ? p->num_kv_heads : p->num_heads;
  int64_t group = kv_heads > 0 ? p->num_heads / kv_heads : 1, head = kv_head_begin * group;
  bool whole_batch = p->batch == 1, all_heads = kv_head_end - kv_head_begin == kv_heads;
  *view = *g;
  qkv_tensor *tensors[PROBLEM_GRADIENT_TENSORS] = {&view->dout, &view->dlse,  &view->dq,    &view->dk,
                                                   &view->dv,   &view->dbias, &view->dsinks};
  for (int which = 0; which < PROBLEM_GRADIENT_TENSORS; which++) {
    bool kv = which == PROBLEM_DK || which == PROBLEM_DV;
    qkv_tensor *t = tensors[which];
    if (which < PROBLEM_DBIAS) {
      advance(t, problem_offset(p, t, kv ? 'k' : 'q', b, kv ? kv_head_begin : head, 0, 0));
    } else if ((t->stride[0] == 0 && !whole_batch) || (t->stride[1] == 0 && !all_heads)) {
      *t = qkv_strided(NULL, 0, 0, 0, 0, 0);
    } else {
      advance(t, step(b, t->stride[0]) + step(head, t->stride[1]));
    }
  }
}

#include "training.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "safetensors.h"
#include "text.h"

int training_add_validation(training *t, int64_t step, double loss) {
  if (t->validation_count == t->validation_room) {
    const int64_t room = t->validation_room * 2 + 16;
    double *more = realloc(t->validations, (size_t)(2 * room) * sizeof *more);
    if (!more) return -1;
    t->validations = more;
    t->validation_room = room;
  }
  t->validations[2 * t->validation_count] = (double)step;
  t->validations[2 * t->validation_count++ + 1] = loss;
  return 0;
}

int training_init(training *t, const qkv_context *context, char *error, size_t n) {
  t->losses = malloc((size_t)(t->steps + 1) * sizeof *t->losses);
  if (!t->losses) return text_fail(error, n, "no memory for the losses of %lld steps", (long long)t->steps);
  return lm_init_f32(&t->m, &t->c, t->batch, context, error, n);
}

void training_free(training *t) {
  lm_free_f32(&t->m);
  free(t->losses);
  free(t->validations);
  memset(t, 0, sizeof *t);
}

/* ---- Checkpoints ---- */

/* Integers of a checkpoint, in this order. A seed has 31 bits. */
enum { VOCABULARY, CONTEXT, D_MODEL, D_FF, LAYERS, HEADS, KV_HEADS, HEAD_DIM, BATCH, STEPS, DONE, SEED, TEXT_COUNT, SETTINGS };

static const char *const groups[] = {"parameter.", "moment1.", "moment2."};
static float *group_of(const lm_f32 *m, int group) { return group == 0 ? m->parameters : group == 1 ? m->moment1 : m->moment2; }

static void put(FILE *f, const void *values, size_t size, int64_t count) {
  const unsigned char *p = values;
  const uint16_t one = 1;
  if (*(const unsigned char *)&one == 1) { /* little-endian already */
    fwrite(values, size, (size_t)count, f);
    return;
  }
  for (int64_t i = 0; i < count; i++, p += size)
    for (size_t b = size; b-- > 0;) fputc(p[b], f);
}

typedef struct header {
  FILE *f;
  uint64_t bytes; /* of data so far */
} header;
static void entry(header *h, const char *prefix, const char *name, const char *dtype, size_t size, int64_t rows, int64_t columns) {
  const uint64_t bytes = (uint64_t)(rows * columns) * size;
  fprintf(h->f, "%c\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64 ",%" PRId64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
          h->bytes ? ',' : '{', prefix, name, dtype, rows, columns, h->bytes, h->bytes + bytes);
  h->bytes += bytes;
}

int checkpoint_save(const training *t, const char *path, char *error, size_t n) {
  const int32_t settings[SETTINGS] = {
      [VOCABULARY] = (int32_t)t->c.vocabulary, [CONTEXT] = (int32_t)t->c.context, [D_MODEL] = (int32_t)t->c.d_model,
      [D_FF] = (int32_t)t->c.d_ff,             [LAYERS] = (int32_t)t->c.layers,   [HEADS] = (int32_t)t->c.heads,
      [KV_HEADS] = (int32_t)t->c.kv_heads,     [HEAD_DIM] = (int32_t)t->c.head_dim, [BATCH] = (int32_t)t->batch,
      [STEPS] = (int32_t)t->steps,             [DONE] = (int32_t)t->done,         [SEED] = (int32_t)t->seed,
      [TEXT_COUNT] = (int32_t)t->text_count};
  const double rates[2] = {t->rate, t->c.dropout};
  const lm_layout *l = &t->m.l;
  char *text = NULL;
  size_t length = 0;
  output o;
  header h = {open_memstream(&text, &length), 0};
  if (!h.f) return text_fail(error, n, "%s: no memory for its header", path);
  entry(&h, "", "rates", "F64", 8, 1, 2);
  entry(&h, "", "losses", "F64", 8, 1, t->done);
  entry(&h, "", "validations", "F64", 8, t->validation_count, 2);
  entry(&h, "", "settings", "I32", 4, 1, SETTINGS);
  for (int g = 0; g < 3; g++)
    for (int i = 0; i < l->tensors; i++) entry(&h, groups[g], l->tensor[i].name, "F32", 4, l->tensor[i].rows, l->tensor[i].columns);
  entry(&h, "", "vocabulary", "U8", 1, 1, t->v.count);
  fputc('}', h.f);
  while (fflush(h.f) == 0 && length % 8) fputc(' ', h.f);
  if (fclose(h.f) || length % 8) {
    free(text);
    return text_fail(error, n, "%s: no memory for its header", path);
  }
  if (output_open(&o, path, error, n)) {
    free(text);
    return -1;
  }
  const uint64_t header_bytes = length;
  put(o.stream, &header_bytes, 8, 1);
  fwrite(text, 1, length, o.stream);
  free(text);
  put(o.stream, rates, 8, 2);
  put(o.stream, t->losses, 8, t->done);
  put(o.stream, t->validations, 8, 2 * t->validation_count);
  put(o.stream, settings, 4, SETTINGS);
  for (int g = 0; g < 3; g++) put(o.stream, group_of(&t->m, g), 4, l->parameters);
  put(o.stream, t->v.byte, 1, t->v.count);
  return output_commit(&o, error, n);
}

/* A tensor of a checkpoint, rows x columns; an extent of -1 fits any. */
static int read_entry(const safetensors *file, const char *path, const char *prefix, const char *name, int32_t dtype, int64_t rows,
                      int64_t columns, array *a, char *error, size_t n) {
  char full[64];
  snprintf(full, sizeof full, "%s%s", prefix, name);
  const safetensors_entry *e = safetensors_find(file, full);
  if (!e) return text_fail(error, n, "%s: no checkpoint of charlm: there is no tensor '%s'", path, full);
  if (safetensors_read(file, e, a, error, n)) return -1;
  if (a->dtype == dtype && a->rank == 2 && (rows == -1 || a->shape[0] == rows) && (columns == -1 || a->shape[1] == columns)) return 0;
  array_free(a);
  return text_fail(error, n, "%s: no checkpoint of charlm: tensor '%s' has another type or shape", path, full);
}

static int load(training *t, const safetensors *file, const char *path, int64_t steps, const qkv_context *context, char *error, size_t n) {
  array a;
  if (read_entry(file, path, "", "settings", QKV_I32, 1, SETTINGS, &a, error, n)) return -1;
  int32_t s[SETTINGS];
  memcpy(s, a.data, sizeof s);
  array_free(&a);
  t->c = (lm_config){.vocabulary = s[VOCABULARY], .context = s[CONTEXT], .d_model = s[D_MODEL], .d_ff = s[D_FF], .layers = s[LAYERS],
                     .heads = s[HEADS], .kv_heads = s[KV_HEADS], .head_dim = s[HEAD_DIM], .seed = (uint64_t)s[SEED]};
  t->batch = s[BATCH];
  t->steps = steps ? steps : s[STEPS];
  t->done = s[DONE];
  t->seed = (uint64_t)s[SEED];
  t->text_count = s[TEXT_COUNT];
  if (t->batch < 1 || t->done < 0 || t->batch > 65536 || t->steps < 1)
    return text_fail(error, n, "%s: no checkpoint of charlm: its settings are out of range", path);
  if (t->steps < t->done) t->steps = t->done;
  if (read_entry(file, path, "", "rates", QKV_F64, 1, 2, &a, error, n)) return -1;
  t->rate = ((const double *)a.data)[0];
  t->c.dropout = ((const double *)a.data)[1];
  array_free(&a);
  if (read_entry(file, path, "", "vocabulary", QKV_U8, 1, t->c.vocabulary, &a, error, n)) return -1;
  if (a.shape[1] <= 256) vocabulary_set(&t->v, a.data, a.shape[1]);
  array_free(&a);
  if (training_init(t, context, error, n)) return -1;
  if (read_entry(file, path, "", "losses", QKV_F64, 1, t->done, &a, error, n)) return -1;
  memcpy(t->losses, a.data, (size_t)t->done * sizeof *t->losses);
  array_free(&a);
  if (read_entry(file, path, "", "validations", QKV_F64, -1, 2, &a, error, n)) return -1;
  int status = 0;
  for (int64_t i = 0; i < a.shape[0] && status == 0; i++)
    status = training_add_validation(t, (int64_t)((const double *)a.data)[2 * i], ((const double *)a.data)[2 * i + 1]);
  array_free(&a);
  if (status) return text_fail(error, n, "%s: no memory for its losses", path);
  for (int g = 0; g < 3; g++)
    for (int i = 0; i < t->m.l.tensors; i++) {
      const lm_tensor *p = &t->m.l.tensor[i];
      if (read_entry(file, path, groups[g], p->name, QKV_F32, p->rows, p->columns, &a, error, n)) return -1;
      memcpy(group_of(&t->m, g) + p->offset, a.data, (size_t)(p->rows * p->columns) * sizeof(float));
      array_free(&a);
    }
  return 0;
}

int checkpoint_load(training *t, const char *path, int64_t steps, const qkv_context *context, char *error, size_t n) {
  memset(t, 0, sizeof *t);
  safetensors *file = safetensors_open(path, error, n);
  if (!file) return -1;
  const int status = load(t, file, path, steps, context, error, n);
  safetensors_close(file);
  if (status) training_free(t);
  return status;
}

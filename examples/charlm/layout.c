#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model.h"
#include "text.h"

static int64_t add(lm_layout *l, const char *prefix, const char *name, int64_t rows, int64_t columns, double deviation, double value) {
  lm_tensor *t = &l->tensor[l->tensors++];
  snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
  t->offset = l->parameters;
  t->rows = rows;
  t->columns = columns;
  t->deviation = deviation;
  t->value = value;
  t->decay = deviation > 0;
  l->parameters += rows * columns;
  return t->offset;
}

int lm_lay_out(const lm_config *c, lm_layout *l, char *error, size_t n) {
  const struct {
    const char *name;
    int64_t value, most;
  } extents[] = {{"vocabulary", c->vocabulary, 256}, {"context", c->context, 65536},   {"d_model", c->d_model, 16384},
                 {"d_ff", c->d_ff, 65536},           {"layers", c->layers, LM_LAYERS}, {"heads", c->heads, 256},
                 {"kv_heads", c->kv_heads, 256},     {"head_dim", c->head_dim, 1024}};
  memset(l, 0, sizeof *l);
  for (size_t i = 0; i < sizeof extents / sizeof *extents; i++)
    if (extents[i].value < 1 || extents[i].value > extents[i].most)
      return text_fail(error, n, "%s is %lld; it must be 1 to %lld", extents[i].name, (long long)extents[i].value,
                       (long long)extents[i].most);
  if (c->heads % c->kv_heads)
    return text_fail(error, n, "kv_heads is %lld, no divisor of heads, %lld", (long long)c->kv_heads, (long long)c->heads);
  if (!(c->dropout >= 0 && c->dropout < 1)) return text_fail(error, n, "dropout is %g; it must be 0 or more and less than 1", c->dropout);

  const int64_t d = c->d_model, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, f = c->d_ff;
  const double in = 1 / sqrt((double)d), depth = sqrt(2 * (double)c->layers); /* what residual branches add stays of order 1 */
  l->embedding = add(l, "", "embedding", c->vocabulary, d, in, 0);
  for (int i = 0; i < c->layers; i++) {
    lm_layer_offsets *o = &l->layer[i];
    char prefix[24];
    snprintf(prefix, sizeof prefix, "layer.%d.", i);
    o->norm1[0] = add(l, prefix, "norm1.weight", 1, d, 0, 1);
    o->norm1[1] = add(l, prefix, "norm1.bias", 1, d, 0, 0);
    /* In the order of qkv_projections_place. */
    o->projections = add(l, prefix, "wq", q, d, in, 0);
    add(l, prefix, "wk", kv, d, in, 0);
    add(l, prefix, "wv", kv, d, in, 0);
    add(l, prefix, "bq", 1, q, 0, 0);
    add(l, prefix, "bk", 1, kv, 0, 0);
    add(l, prefix, "bv", 1, kv, 0, 0);
    add(l, prefix, "wo", d, q, 1 / sqrt((double)q) / depth, 0);
    add(l, prefix, "bo", 1, d, 0, 0);
    o->norm2[0] = add(l, prefix, "norm2.weight", 1, d, 0, 1);
    o->norm2[1] = add(l, prefix, "norm2.bias", 1, d, 0, 0);
    o->up = add(l, prefix, "up.weight", f, d, in, 0);
    o->up_bias = add(l, prefix, "up.bias", 1, f, 0, 0);
    o->down = add(l, prefix, "down.weight", d, f, 1 / sqrt((double)f) / depth, 0);
    o->down_bias = add(l, prefix, "down.bias", 1, d, 0, 0);
  }
  l->norm[0] = add(l, "", "norm.weight", 1, d, 0, 1);
  l->norm[1] = add(l, "", "norm.bias", 1, d, 0, 0);
  return 0;
}

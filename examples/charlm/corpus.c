#include "corpus.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "text.h"

void vocabulary_set(vocabulary *v, const uint8_t *bytes, int64_t count) {
  v->count = count;
  for (int i = 0; i < 256; i++) v->token[i] = -1;
  for (int64_t i = 0; i < count; i++) {
    v->byte[i] = bytes[i];
    v->token[bytes[i]] = (int)i;
  }
}

static void count_pairs(const uint8_t *tokens, int64_t count, double pairs[256][256], double firsts[256]) {
  memset(pairs, 0, 256 * sizeof *pairs);
  memset(firsts, 0, 256 * sizeof *firsts);
  for (int64_t i = 0; i + 1 < count; i++) {
    pairs[tokens[i]][tokens[i + 1]]++;
    firsts[tokens[i]]++;
  }
}

static int measure(corpus *c) {
  double(*pairs)[256] = malloc(256 * sizeof *pairs), firsts[256];
  if (!pairs) return -1;
  count_pairs(c->tokens, c->count, pairs, firsts);
  for (int a = 0; a < c->v.count; a++)
    for (int b = 0; b < c->v.count; b++)
      if (pairs[a][b] > 0) c->bigram_entropy -= pairs[a][b] * log(pairs[a][b] / firsts[a]);
  c->bigram_entropy /= (double)(c->count - 1);
  count_pairs(c->tokens, c->training, pairs, firsts);
  for (int64_t i = c->training; i + 1 < c->count; i++) {
    const int a = c->tokens[i], b = c->tokens[i + 1];
    c->bigram_loss -= log((pairs[a][b] + 1) / (firsts[a] + (double)c->v.count));
  }
  c->bigram_loss /= (double)(c->count - c->training - 1);
  free(pairs);
  return 0;
}

int corpus_read(corpus *c, const char *const *paths, int files, char *error, size_t n) {
  memset(c, 0, sizeof *c);
  for (int i = 0; i < files; i++) {
    file_view view;
    if (file_view_open(&view, paths[i], error, n)) return -1;
    uint8_t *more = realloc(c->tokens, (size_t)c->count + view.size + 1);
    if (more) {
      c->tokens = more;
      if (view.size) memcpy(more + c->count, view.bytes, view.size);
      c->count += (int64_t)view.size;
    }
    file_view_close(&view);
    if (!more) return text_fail(error, n, "%s: no memory for it", paths[i]);
  }
  if (c->count < 1000) return text_fail(error, n, "the text has %lld characters; it needs 1000", (long long)c->count);
  uint8_t bytes[256];
  int64_t kinds = 0;
  int seen[256] = {0};
  for (int64_t i = 0; i < c->count; i++) seen[c->tokens[i]] = 1;
  for (int i = 0; i < 256; i++)
    if (seen[i]) bytes[kinds++] = (uint8_t)i;
  vocabulary_set(&c->v, bytes, kinds);
  for (int64_t i = 0; i < c->count; i++) c->tokens[i] = (uint8_t)c->v.token[c->tokens[i]];
  c->training = c->count - c->count / 10;
  return measure(c) ? text_fail(error, n, "no memory for pairs of characters") : 0;
}

void corpus_free(corpus *c) {
  free(c->tokens);
  memset(c, 0, sizeof *c);
}

/* The text to learn from, as tokens: the bytes that occur in it, numbered. The last tenth is for validation. */
#ifndef QKV_EXAMPLES_CHARLM_CORPUS_H
#define QKV_EXAMPLES_CHARLM_CORPUS_H

#include <stddef.h>
#include <stdint.h>

typedef struct vocabulary {
  int64_t count;
  uint8_t byte[256]; /* of token */
  int token[256];    /* of byte; -1: it does not occur */
} vocabulary;

typedef struct corpus {
  vocabulary v;
  uint8_t *tokens;
  int64_t count, training; /* tokens; of them the first ones */
  /* In nats per character. Entropy of a character given the one before, both as counted in the whole text; and the loss on the
   * validation text of the model that predicts by the counts of the training text, plus one each. */
  double bigram_entropy, bigram_loss;
} corpus;

void vocabulary_set(vocabulary *v, const uint8_t *bytes, int64_t count);
/* The files, one behind another. 0, or -1 with a message. */
int corpus_read(corpus *c, const char *const *paths, int count, char *error, size_t error_bytes);
void corpus_free(corpus *c);

#endif

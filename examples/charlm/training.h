/* The state of a training: model, optimizer, and the losses so far. A checkpoint holds all of it, so that one that is resumed goes
 * on bit for bit as if it had not been interrupted. */
#ifndef QKV_EXAMPLES_CHARLM_TRAINING_H
#define QKV_EXAMPLES_CHARLM_TRAINING_H

#include "corpus.h"
#include "model.h"

typedef struct training {
  lm_config c;
  vocabulary v;
  int64_t text_count; /* characters of the text */
  int64_t batch, steps, done;
  uint64_t seed;
  double rate;
  double *losses;      /* `done` values, room for `steps` */
  double *validations; /* pairs of step and loss */
  int64_t validation_count, validation_room;
  lm_f32 m;
} training;

int training_add_validation(training *t, int64_t step, double loss);
/* Allocates room for losses and the model, of t's configuration. 0, or -1 with a message. */
int training_init(training *t, const qkv_context *context, char *error, size_t error_bytes);
void training_free(training *t);

/* A .safetensors file. */
int checkpoint_save(const training *t, const char *path, char *error, size_t error_bytes);
/* Fills t, model included. `steps`: train to this step; 0: as the checkpoint says. */
int checkpoint_load(training *t, const char *path, int64_t steps, const qkv_context *context, char *error, size_t error_bytes);

/* The losses as text, a line per step, in full precision. */
int curve_write(const training *t, const char *path, char *error, size_t error_bytes);
/* Drawn by gnuplot: into a file that ends in .svg or .png, or as characters to standard output for path NULL. */
int curve_plot(const training *t, const corpus *text, const char *path, char *error, size_t error_bytes);

#endif

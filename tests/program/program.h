/* What tests of the program share: to run it in the present directory, and to make and read its files. */
#ifndef QKV_TESTS_PROGRAM_H
#define QKV_TESTS_PROGRAM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "array.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

/* ---- Running the program ----------------------------------------------------------------------------------------- */

enum { MAX_ARGUMENTS = 64 };
extern char *out_text, *err_text; /* of the last run */

/* Arguments of a line: words are separated by single spaces; a word in ^ ^ may hold spaces. */
void split(const char *line, char **arguments, char *copy, size_t bytes);
pid_t start(char **arguments, const char *out_path);
int finish(pid_t child, const char *out_path);
/* Both, with the standard output in that file. The exit status. */
int run_to(const char *out_path, const char *line);
int run(const char *line);
/* Fails unless the program ends with that status and says the message. */
void expect(const char *line, int status, const char *message);
void expect_ok(const char *line);

/* ---- Files ------------------------------------------------------------------------------------------------------- */

char *read_text(const char *path);
int exists(const char *path);
/* No temporary file is left over. The other removes those of a run that was ended. */
void expect_no_leftovers(void);
void remove_leftovers(void);
void expect_same_file(const char *a, const char *b);
void write_bytes(const char *path, const void *bytes, size_t size);

float random_value(void);
array random_array(int rank, const int64_t *shape);
array int_array(int rank, const int64_t *shape, const int32_t *values);
void write_array(const char *path, const array *a);
array read_array(const char *path);
void write_raw_npy(const char *path, const char *dictionary, const void *data, size_t size);
/* Contiguous arrays of f32, and of u8, which become bools. */
void write_safetensors(const char *path, const array *const *arrays, const char *const *names, int count);
/* (batch, heads, rows, columns) with the two middle axes exchanged in memory. */
array exchanged(const array *a);
/* An element of f32 with four axes. */
float at(const array *a, int64_t b, int64_t h, int64_t i, int64_t x);

#endif

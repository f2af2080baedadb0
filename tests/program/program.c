#include "program.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "npy.h"

/* ---- Running the program ----------------------------------------------------------------------------------------- */

char *out_text, *err_text;

char *read_text(const char *path) {
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  assert_int_equal(fseek(f, 0, SEEK_END), 0);
  long size = ftell(f);
  rewind(f);
  char *text = malloc((size_t)size + 1);
  assert_non_null(text);
  assert_int_equal(fread(text, 1, (size_t)size, f), size);
  text[size] = 0;
  fclose(f);
  return text;
}

pid_t start(char **arguments, const char *out_path) {
  pid_t child = fork();
  assert_true(child >= 0);
  if (child > 0) return child;
  int out = open(out_path, O_WRONLY | O_CREAT | O_TRUNC, 0666), err = open("stderr", O_WRONLY | O_CREAT | O_TRUNC, 0666);
  /* Whoever runs the tests may ignore signals (a shell's background job does). */
  signal(SIGINT, SIG_DFL);
  if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(126);
  setenv("LC_ALL", "C", 1);
  unsetenv("QKV_ISA");
  execv(QKV_PROGRAM, arguments);
  _exit(127);
}

int finish(pid_t child, const char *out_path) {
  int status;
  pid_t ended;
  do ended = waitpid(child, &status, 0);
  while (ended < 0 && errno == EINTR);
  assert_int_equal(ended, child);
  free(out_text);
  free(err_text);
  struct stat info;
  out_text = stat(out_path, &info) == 0 && S_ISREG(info.st_mode) ? read_text(out_path) : calloc(1, 1);
  err_text = read_text("stderr");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Words are separated by single spaces; a word in ^ ^ may hold spaces. */
void split(const char *line, char **arguments, char *copy, size_t bytes) {
  int count = 0;
  assert_true(strlen(line) < bytes);
  strcpy(copy, line);
  arguments[count++] = (char *)(uintptr_t)QKV_PROGRAM;
  for (char *at = copy; *at != 0;) {
    assert_true(count + 1 < MAX_ARGUMENTS);
    char stop = *at == '^' ? '^' : ' ';
    if (stop == '^') at++;
    arguments[count++] = at;
    while (*at != 0 && *at != stop) at++;
    if (*at != 0) *at++ = 0;
    while (*at == ' ') at++;
  }
  arguments[count] = NULL;
}

int run_to(const char *out_path, const char *line) {
  char copy[2048], *arguments[MAX_ARGUMENTS];
  split(line, arguments, copy, sizeof copy);
  return finish(start(arguments, out_path), out_path);
}

int run(const char *line) { return run_to("stdout", line); }

void expect(const char *line, int status, const char *message) {
  int got = run(line);
  if (got != status) fail_msg("'%s' ended with %d, not %d:\n%s%s", line, got, status, out_text, err_text);
  if (strstr(err_text, message) == NULL) fail_msg("'%s' said:\n%snot: %s", line, err_text, message);
}

void expect_ok(const char *line) {
  expect(line, 0, "");
  assert_string_equal(err_text, "");
}

int exists(const char *path) {
  struct stat info;
  return lstat(path, &info) == 0;
}

/* Temporary files that are left over are a failure, or removed. */
static void each_leftover(int removes) {
  DIR *directory = opendir(".");
  assert_non_null(directory);
  const struct dirent *entry;
  while ((entry = readdir(directory)) != NULL) {
    if (strstr(entry->d_name, ".tmp") == NULL) continue;
    if (!removes) fail_msg("%s is left over", entry->d_name);
    remove(entry->d_name);
  }
  closedir(directory);
}

void expect_no_leftovers(void) { each_leftover(0); }

/* Tests give this name to what must not be written. */
void remove_leftovers(void) {
  each_leftover(1);
  remove("x.npy");
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

static uint32_t random_state = 12345;

float random_value(void) {
  random_state = random_state * 1664525 + 1013904223;
  return (float)(int32_t)random_state * 0x1p-30f;
}

void write_array(const char *path, const array *a) {
  char error[512];
  if (npy_write(path, a, error, sizeof error) != 0) fail_msg("%s", error);
}

array random_array(int rank, const int64_t *shape) {
  array a;
  assert_int_equal(array_alloc(&a, QKV_F32, rank, shape), 0);
  int64_t count = array_count(rank, shape, 4);
  for (int64_t i = 0; i < count; i++) ((float *)a.data)[i] = random_value();
  return a;
}

array int_array(int rank, const int64_t *shape, const int32_t *values) {
  array a;
  assert_int_equal(array_alloc(&a, QKV_I32, rank, shape), 0);
  memcpy(a.data, values, (size_t)array_count(rank, shape, 4) * 4);
  return a;
}

array read_array(const char *path) {
  char error[512];
  array a;
  if (npy_read(path, &a, error, sizeof error) != 0) fail_msg("%s", error);
  return a;
}

void write_bytes(const char *path, const void *bytes, size_t size) {
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, size, f), size);
  assert_int_equal(fclose(f), 0);
}

void write_raw_npy(const char *path, const char *dictionary, const void *data, size_t size) {
  unsigned char bytes[4096];
  size_t length = strlen(dictionary);
  assert_true(10 + length + size <= sizeof bytes);
  memcpy(bytes, "\x93NUMPY\1\0", 8);
  bytes[8] = (unsigned char)(length & 255);
  bytes[9] = (unsigned char)(length >> 8);
  memcpy(bytes + 10, dictionary, length);
  if (size > 0) memcpy(bytes + 10 + length, data, size);
  write_bytes(path, bytes, 10 + length + size);
}

void write_safetensors(const char *path, const array *const *arrays, const char *const *names, int count) {
  char header[4096] = "{", shape[128];
  size_t used = 1, offset = 0;
  for (int i = 0; i < count; i++) {
    const array *a = arrays[i];
    size_t size = array_element_size(a->dtype), bytes = (size_t)array_count(a->rank, a->shape, size) * size;
    size_t length = 0;
    for (int axis = 0; axis < a->rank; axis++) {
      length += (size_t)snprintf(shape + length, sizeof shape - length, axis == 0 ? "%d" : ",%d", (int)a->shape[axis]);
    }
    used += (size_t)snprintf(header + used, sizeof header - used,
                             "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", i == 0 ? "" : ",",
                             names[i], a->dtype == QKV_U8 ? "BOOL" : "F32", shape, offset, offset + bytes);
    offset += bytes;
  }
  used += (size_t)snprintf(header + used, sizeof header - used, "}");
  assert_true(used < sizeof header);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  for (int byte = 0; byte < 8; byte++) fputc((int)(used >> 8 * byte & 255), f);
  fputs(header, f);
  for (int i = 0; i < count; i++) {
    npy_write_values(f, arrays[i]->dtype, arrays[i]->data, array_count(arrays[i]->rank, arrays[i]->shape, 1));
  }
  assert_int_equal(fclose(f), 0);
}

array exchanged(const array *a) {
  int64_t shape[4] = {a->shape[0], a->shape[2], a->shape[1], a->shape[3]};
  array t = *a;
  memcpy(t.shape, shape, sizeof shape);
  t.stride[1] = a->stride[2];
  t.stride[2] = a->stride[1];
  return t;
}

float at(const array *a, int64_t b, int64_t h, int64_t i, int64_t x) {
  return ((const float *)a->data)[b * a->stride[0] + h * a->stride[1] + i * a->stride[2] + x * a->stride[3]];
}

void expect_same_file(const char *a, const char *b) {
  struct stat in_a, in_b;
  assert_int_equal(stat(a, &in_a), 0);
  assert_int_equal(stat(b, &in_b), 0);
  assert_int_equal(in_a.st_size, in_b.st_size);
  char *text_a = read_text(a), *text_b = read_text(b);
  assert_memory_equal(text_a, text_b, (size_t)in_a.st_size);
  free(text_a);
  free(text_b);
}

/* Files: whole ones to read, and outputs that appear complete or not at all. */
#ifndef QKV_SUPPORT_FILE_H
#define QKV_SUPPORT_FILE_H

#include <stddef.h>
#include <stdio.h>

/* The bytes of a file, mapped if it is a regular one, else (a pipe) read to its end. */
typedef struct file_view {
  const unsigned char *bytes;
  size_t size;
  int mapped;
} file_view;
int file_view_open(file_view *view, const char *path, char *error, size_t error_bytes);
void file_view_close(file_view *view);

/* A file being written, under a temporary name in the same directory. A path that exists and is no regular file
 * (/dev/stdout) is written directly. After output_open, exactly one of output_discard and output_commit must follow. */
typedef struct output {
  FILE *stream;
  char *path;      /* NULL: not open */
  char *temporary; /* NULL: written directly */
  int slot;
} output;
int output_open(output *o, const char *path, char *error, size_t error_bytes);
/* Ends the writing and reports its errors; the file still has the temporary name. */
int output_finish(output *o, char *error, size_t error_bytes);
/* Finishes, if not done, and gives the file its name. On an error the file is discarded. */
int output_commit(output *o, char *error, size_t error_bytes);
/* Removes the temporary file. Does nothing to an output that is not open. */
void output_discard(output *o);
/* Removes the temporary files of all open outputs: for a signal handler that ends the program. */
void output_remove_all(void);

#endif

#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

static int read_all(file_view *view, int descriptor) {
  unsigned char *bytes = NULL;
  size_t size = 0, room = 0;
  for (;;) {
    if (size == room) {
      room = room ? room * 2 : (size_t)1 << 16;
      unsigned char *larger = room > size ? realloc(bytes, room) : NULL;
      if (larger == NULL) {
        free(bytes);
        errno = ENOMEM;
        return -1;
      }
      bytes = larger;
    }
    ssize_t got = read(descriptor, bytes + size, room - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      free(bytes);
      return -1;
    }
    if (got == 0) break;
    size += (size_t)got;
  }
  view->bytes = bytes;
  view->size = size;
  view->mapped = 0;
  return 0;
}

int file_view_open(file_view *view, const char *path, char *error, size_t error_bytes) {
  memset(view, 0, sizeof *view);
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return text_fail(error, error_bytes, "%s: cannot open: %s", path, strerror(errno));
  struct stat info;
  int failed = fstat(descriptor, &info) != 0;
  if (!failed && S_ISDIR(info.st_mode)) {
    errno = EISDIR;
    failed = 1;
  } else if (!failed && S_ISREG(info.st_mode) && info.st_size > 0 && (uintmax_t)info.st_size <= SIZE_MAX) {
    void *memory = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (memory == MAP_FAILED) {
      failed = 1;
    } else {
      view->bytes = memory;
      view->size = (size_t)info.st_size;
      view->mapped = 1;
    }
  } else if (!failed) {
    failed = read_all(view, descriptor) != 0;
  }
  int reason = errno;
  close(descriptor);
  if (failed) return text_fail(error, error_bytes, "%s: cannot read: %s", path, strerror(reason));
  return 0;
}

void file_view_close(file_view *view) {
  if (view->mapped) {
    munmap((void *)(uintptr_t)view->bytes, view->size);
  } else {
    free((void *)(uintptr_t)view->bytes);
  }
  memset(view, 0, sizeof *view);
}

/* Names of temporary files for output_remove_all, which may run in a signal handler. */
enum { SLOTS = 16 };
static char *volatile temporary_names[SLOTS];

void output_remove_all(void) {
  for (int slot = 0; slot < SLOTS; slot++) {
    if (temporary_names[slot] != NULL) unlink(temporary_names[slot]);
  }
}

static void forget(output *o) {
  if (o->slot >= 0) temporary_names[o->slot] = NULL;
  free(o->path);
  free(o->temporary);
  memset(o, 0, sizeof *o);
  o->slot = -1;
}

/* Creates NAME.PID-N.tmp with the permissions that the caller's umask gives. */
static int open_temporary(output *o) {
  size_t room = strlen(o->path) + 48;
  o->temporary = malloc(room);
  if (o->temporary == NULL) {
    errno = ENOMEM;
    return -1;
  }
  for (int attempt = 0; attempt < 1000; attempt++) {
    snprintf(o->temporary, room, "%s.%ld-%d.tmp", o->path, (long)getpid(), attempt);
    int descriptor = open(o->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor >= 0 || errno != EEXIST) return descriptor;
  }
  return -1;
}

int output_open(output *o, const char *path, char *error, size_t error_bytes) {
  struct stat info;
  memset(o, 0, sizeof *o);
  o->slot = -1;
  int exists = stat(path, &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) return text_fail(error, error_bytes, "%s: cannot write: is a directory", path);
  /* The file behind a symbolic link is replaced, not the link. */
  o->path = exists ? realpath(path, NULL) : NULL;
  if (o->path == NULL) o->path = strdup(path);
  if (o->path == NULL) return text_fail(error, error_bytes, "%s: out of memory", path);
  int descriptor;
  if (exists && !S_ISREG(info.st_mode)) {
    descriptor = open(o->path, O_WRONLY | O_CLOEXEC);
  } else if (exists && access(o->path, W_OK) != 0) {
    descriptor = -1;
  } else {
    descriptor = open_temporary(o);
  }
  if (descriptor >= 0 && o->temporary != NULL) {
    for (int slot = 0; slot < SLOTS && o->slot < 0; slot++) {
      if (temporary_names[slot] == NULL) o->slot = slot;
    }
    if (o->slot >= 0) temporary_names[o->slot] = o->temporary;
  }
  if (descriptor >= 0) o->stream = fdopen(descriptor, "wb");
  if (o->stream == NULL) {
    int reason = errno;
    if (descriptor >= 0) {
      close(descriptor);
      if (o->temporary != NULL) unlink(o->temporary);
    }
    forget(o);
    return text_fail(error, error_bytes, "%s: cannot write: %s", path, strerror(reason));
  }
  return 0;
}

int output_finish(output *o, char *error, size_t error_bytes) {
  if (o->stream == NULL) return 0;
  errno = 0;
  int failed = fflush(o->stream) != 0;
  failed |= ferror(o->stream) != 0;
  int reason = errno;
  if (fclose(o->stream) != 0 && !failed) {
    failed = 1;
    reason = errno;
  }
  o->stream = NULL;
  if (!failed) return 0;
  return text_fail(error, error_bytes, "%s: cannot write: %s", o->path, reason ? strerror(reason) : "write error");
}

int output_commit(output *o, char *error, size_t error_bytes) {
  if (o->path == NULL) return 0;
  if (output_finish(o, error, error_bytes) != 0) {
    output_discard(o);
    return -1;
  }
  if (o->temporary != NULL && rename(o->temporary, o->path) != 0) {
    text_fail(error, error_bytes, "%s: cannot rename to it: %s", o->path, strerror(errno));
    output_discard(o);
    return -1;
  }
  forget(o);
  return 0;
}

void output_discard(output *o) {
  if (o->path == NULL) return;
  if (o->stream != NULL) fclose(o->stream);
  o->stream = NULL;
  if (o->temporary != NULL) unlink(o->temporary);
  forget(o);
}

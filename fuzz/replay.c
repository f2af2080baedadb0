/* A main for the fuzz targets without a fuzzer: runs each file named, and each file of each directory named. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static int replay_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
    fprintf(stderr, "cannot read %s\n", path);
    if (file != NULL) fclose(file);
    return -1;
  }
  long size = ftell(file);
  rewind(file);
  /* Exactly the file's bytes: a memory checker sees one read too many. */
  uint8_t *bytes = size >= 0 ? malloc(size > 0 ? (size_t)size : 1) : NULL;
  int failed = bytes == NULL || fread(bytes, 1, (size_t)size, file) != (size_t)size;
  fclose(file);
  if (!failed) LLVMFuzzerTestOneInput(bytes, (size_t)size);
  free(bytes);
  return failed ? -1 : 0;
}

static int replay(const char *path, long *count) {
  struct stat info;
  if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) {
    ++*count;
    return replay_file(path);
  }
  DIR *directory = opendir(path);
  if (directory == NULL) return -1;
  int result = 0;
  const struct dirent *entry;
  while (result == 0 && (entry = readdir(directory)) != NULL) {
    char name[4096];
    if (entry->d_name[0] == '.') continue;
    snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
    result = replay(name, count);
  }
  closedir(directory);
  return result;
}

int main(int argc, char **argv) {
  long count = 0;
  for (int i = 1; i < argc; i++) {
    if (replay(argv[i], &count) != 0) return 1;
  }
  printf("%ld inputs\n", count);
  return count > 0 ? 0 : 1;
}

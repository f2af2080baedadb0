/* test_position_digest [--write] FILE */
#include <stdio.h>
#include <string.h>

#include "digest.h"

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "--write") == 0) {
    return position_digest_write(argv[2]);
  }
  if (argc != 2) {
    fprintf(stderr, "usage: %s [--write] FILE\n", argv[0]);
    return 2;
  }
  return position_digest_compare(argv[1]);
}

# A consumer in Fortran 2003 over bind(C), no binding of ours.
. "$(dirname "$0")/common.sh"
need gfortran
need pkg-config
use_installed
fresh fortran
cat >sizes.c <<'END'
#include <stdio.h>
#include <qkv/qkv.h>
int main(void) {
  printf("%zu\n", sizeof(qkv_problem));
  return 0;
}
END
$CC -std=c11 $(pkg-config --cflags qkv) sizes.c -o sizes
gfortran -std=f2008 -Wall -Wextra -Werror -Wno-compare-reals "$SOURCE/tests/packaging/consumer.f90" -o consumer $(pkg-config --libs qkv)
./consumer "$(./sizes)"

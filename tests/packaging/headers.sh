# Each header on its own, twice in a row, in C11 and in C++17, by every compiler that is here.
. "$(dirname "$0")/common.sh"
need g++
fresh headers
for header in "$PREFIX"/include/qkv/*.h; do
  name=$(basename "$header")
  printf '#include <qkv/%s>\n#include <qkv/%s>\n' "$name" "$name" >use.c
  cp use.c use.cpp
  $CC -std=c11 $WARN -fopenmp -I"$PREFIX/include" -c use.c -o use.o || fail "$name in C11"
  g++ -std=c++17 $WARN -fopenmp -I"$PREFIX/include" -c use.cpp -o use.o || fail "$name in C++17"
  if command -v clang >/dev/null 2>&1; then
    clang -std=c11 $WARN -fopenmp -I"$PREFIX/include" -c use.c -o use.o || fail "$name in C11 by clang"
    clang++ -std=c++17 $WARN -fopenmp -I"$PREFIX/include" -c use.cpp -o use.o || fail "$name in C++17 by clang"
  else
    echo "SKIPPED: no clang, so the headers were not compiled by it"
  fi
done

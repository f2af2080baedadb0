# What the library exports is src/symbols.txt, the header declares the same, and the static library defines no global
# name that could meet one of its user's.
. "$(dirname "$0")/common.sh"
need nm
need objdump
fresh symbols
check() { # name list shared static headers
  sort -u "$2" >listed
  nm -D --defined-only "$3" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u >exported
  diff listed exported || fail "$1.so does not export what ${2#"$SOURCE/"} lists (<: listed, >: exported)"
  cat $5 | sed -n 's/^QKV_API .*[ *]\(qkv_[a-z0-9_]*\)(.*/\1/p' | sort -u >declared
  diff listed declared || fail "the headers do not declare what ${2#"$SOURCE/"} lists (<: listed, >: declared)"
  nm -g --defined-only "$4" | awk 'NF == 3 { print $3 }' | sort >global
  if grep -v '^qkv_' global; then fail "global names in $1.a that do not begin with qkv_"; fi
  [ -z "$(uniq -d global)" ] || fail "defined twice in $1.a: $(uniq -d global)"
}
check libqkv "$SOURCE/src/symbols.txt" "$SHARED" "$STATIC" "$(find "$SOURCE/include/qkv" -name '*.h' ! -name nn.h)"
if [ -n "${NN_SHARED:-}" ]; then
  mv global core
  check libqkv-nn "$SOURCE/src/nn/symbols.txt" "$NN_SHARED" "$NN_STATIC" "$SOURCE/include/qkv/nn.h"
  [ -z "$(comm -12 core global)" ] || fail "libqkv.a and libqkv-nn.a both define $(comm -12 core global)"
  objdump -t "$NN_STATIC" | awk '/ \.(data|bss|tdata|tbss)/ && !/ \.data\.rel\.ro/ && / O /' >writable
  [ ! -s writable ] || fail "libqkv-nn has writable data: $(cat writable)"
fi
# Writable data would be state shared between callers; the CPU word is the one exception. Compilers put the function's name or a
# number to that of a static variable.
objdump -t "$STATIC" | awk '/ \.(data|bss|tdata|tbss)/ && !/ \.data\.rel\.ro/ && / O / { print $NF }' |
  sed 's/\.[0-9]*$//; s/.*\.//' | sort -u >writable
sort -u "$SOURCE/tests/packaging/writable.txt" >allowed
diff allowed writable || fail "writable data of the library is not what writable.txt lists (<: listed, >: found)"
# An object of a kernel instance has one global name: a second, inline one could be the copy that the linker takes for all.
for object in $(find "$BUILD/src/CMakeFiles" -path '*qkv_kernel_*' -name '*.o'); do
  count=$(nm -g --defined-only "$object" | wc -l)
  [ "$count" -eq 1 ] || fail "${object#"$BUILD/"} has $count global names: $(nm -g --defined-only "$object" | awk '{ print $3 }' | tr '\n' ' ')"
done

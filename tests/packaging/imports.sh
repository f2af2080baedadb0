# The library calls nothing that prints, exits, locks or opens files: what it takes from outside is a short committed list.
. "$(dirname "$0")/common.sh"
need nm
fresh imports
# Compilers and linkers add the names left out here.
used() {
  nm -D --undefined-only "$1" | awk '$1 == "U" { sub(/@.*/, "", $2); print $2 }' |
    grep -Ev '^(__stack_chk_fail|__(asan|ubsan|tsan)_.*|__memcpy_chk|__memset_chk)$' | sort -u || true
}
used "$SHARED" >used
sort -u "$SOURCE/tests/packaging/imports.txt" >allowed
comm -13 allowed used >extra
[ ! -s extra ] || fail "libqkv.so takes what imports.txt does not allow: $(tr '\n' ' ' <extra)"
if [ -n "${NN_SHARED:-}" ]; then # of libqkv what is public, and two functions of a BLAS
  used "$NN_SHARED" >used
  { cat allowed "$SOURCE/src/symbols.txt"; echo cblas_sgemm; echo cblas_dgemm; } | sort -u >more
  comm -13 more used >extra
  [ ! -s extra ] || fail "libqkv-nn.so takes what it may not: $(tr '\n' ' ' <extra)"
fi

# Memory comes from one place, the default of the context's alloc.
for object in $(find "$BUILD/src/CMakeFiles" -name '*.o'); do
  case $object in */base/run.c.o) continue ;; esac
  if nm -u "$object" | grep -E ' (malloc|calloc|realloc|aligned_alloc|posix_memalign|free)$'; then
    fail "${object#"$BUILD/"} allocates; only base/run.c may"
  fi
done

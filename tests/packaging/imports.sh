# The library calls nothing that prints, exits, locks or opens files: what it takes from outside is a short committed list.
. "$(dirname "$0")/common.sh"
need nm
fresh imports
# Compilers and linkers add the names left out here.
nm -D --undefined-only "$SHARED" | awk '$1 == "U" { sub(/@.*/, "", $2); print $2 }' |
  grep -Ev '^(__stack_chk_fail|__(asan|ubsan|tsan)_.*|__memcpy_chk|__memset_chk)$' | sort -u >used || true
sort -u "$SOURCE/tests/packaging/imports.txt" >allowed
comm -13 allowed used >extra
[ ! -s extra ] || fail "libqkv.so takes what imports.txt does not allow: $(tr '\n' ' ' <extra)"

# Memory comes from one place, the default of the context's alloc.
for object in $(find "$BUILD/src/CMakeFiles" -name '*.o'); do
  case $object in */base/run.c.o) continue ;; esac
  if nm -u "$object" | grep -E ' (malloc|calloc|realloc|aligned_alloc|posix_memalign|free)$'; then
    fail "${object#"$BUILD/"} allocates; only base/run.c may"
  fi
done

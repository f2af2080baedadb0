# Installs into one place and moves the tree to another: whatever is used by the other tests must not remember the first.
. "$(dirname "$0")/common.sh"
rm -rf "$WORK/prefix" "$PREFIX"
"$CMAKE" --install "$BUILD" --prefix "$WORK/prefix" >"$WORK/install.log" || fail "cmake --install: $(cat "$WORK/install.log")"
mv "$WORK/prefix" "$PREFIX"
cd "$PREFIX"

for file in include/qkv/qkv.h "$LIBDIR/libqkv.so" "$LIBDIR/libqkv.so.0" "$LIBDIR/libqkv.a" "$LIBDIR/pkgconfig/qkv.pc" \
  "$LIBDIR/cmake/qkv/qkv-config.cmake" "$LIBDIR/cmake/qkv/qkv-config-version.cmake" share/man/man3/qkv.3 \
  share/doc/qkv/LICENSE; do
  [ -f "$file" ] || fail "$file was not installed"
done
if [ -n "${NN_SHARED:-}" ]; then
  for file in include/qkv/nn.h "$LIBDIR/libqkv-nn.so" "$LIBDIR/libqkv-nn.so.0" "$LIBDIR/libqkv-nn.a" "$LIBDIR/pkgconfig/qkv-nn.pc" \
    "$LIBDIR/cmake/qkv/qkv-nn-targets.cmake"; do
    [ -f "$file" ] || fail "$file was not installed"
  done
elif [ -f include/qkv/nn.h ]; then
  fail "include/qkv/nn.h was installed without its library"
fi
leaks=$(grep -rlF -e "$WORK/prefix" -e "$SOURCE/" include "$LIBDIR/pkgconfig" "$LIBDIR/cmake" || true)
[ -z "$leaks" ] || fail "these files name the place they were built or installed in: $leaks"

if [ -f "$BUILD/cli/qkv" ]; then
  for file in bin/qkv share/man/man1/qkv.1 share/bash-completion/completions/qkv; do
    [ -f "$file" ] || fail "$file was not installed"
  done
  bin/qkv --version | grep -q "$VERSION" || fail "the installed program does not report version $VERSION"
else
  echo "SKIPPED: the program was not built, so its installation was not checked"
fi

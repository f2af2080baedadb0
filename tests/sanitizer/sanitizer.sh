# Builds everything with -fsanitize=$1 into a folder of its own, and runs the core tests there.
set -eu
build=$WORK/$(printf %s "$1" | tr , _)
mkdir -p "$build"
if ! "$CMAKE" -S "$SOURCE" -B "$build" -G Ninja -DCMAKE_C_COMPILER="$CC" -DCMAKE_BUILD_TYPE=Release -DQKV_SANITIZE="$1" \
  -DQKV_NESTED_TESTS=OFF -DQKV_INSTALL=OFF >"$build/log" 2>&1 || ! "$CMAKE" --build "$build" >>"$build/log" 2>&1; then
  cat "$build/log"
  echo "FAILED: the build with -fsanitize=$1"
  exit 1
fi
ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
UBSAN_OPTIONS=print_stacktrace=1
QKV_TEST_SCALE=${QKV_TEST_SCALE:-10}
export ASAN_OPTIONS UBSAN_OPTIONS QKV_TEST_SCALE
case $1 in
  # The runtime of OpenMP, which the program uses, is not built for this sanitizer: its barriers would look like races. The tests
  # of the core have threads of their own.
  thread) only='^core\.' ;;
  *) only='.' ;;
esac
exec "$CTEST" --test-dir "$build" --output-on-failure --no-tests=error -L core -R "$only"

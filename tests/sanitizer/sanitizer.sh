# Builds everything with -fsanitize=$1 into a folder of its own, and runs the library's tests there.
set -eu
case $1 in
  address,undefined)
    # -O2 takes minutes to compile the checks of the unrolled kernels.
    level=-Og only='.' scale=10
    ;;
  thread)
    # The program stays out: the runtime of OpenMP is not built for this sanitizer, its barriers would look like races. The
    # tests named here have threads of their own.
    level=-O2 only='^(core\.(threads|generator)|backward\.threads)$' scale=2
    ;;
esac
build=$WORK/$(printf %s "$1" | tr , _)
mkdir -p "$build"
if ! "$CMAKE" -S "$SOURCE" -B "$build" -G Ninja -DCMAKE_C_COMPILER="$CC" -DCMAKE_C_FLAGS_RELEASE=$level -DQKV_SANITIZE="$1" \
  -DQKV_NESTED_TESTS=OFF -DQKV_INSTALL=OFF >"$build/log" 2>&1 || ! "$CMAKE" --build "$build" -j 1 >>"$build/log" 2>&1; then
  cat "$build/log"
  echo "FAILED: the build with -fsanitize=$1"
  exit 1
fi
ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
UBSAN_OPTIONS=print_stacktrace=1
QKV_TEST_SCALE=${QKV_TEST_SCALE:-$scale}
export ASAN_OPTIONS UBSAN_OPTIONS QKV_TEST_SCALE
exec "$CTEST" --test-dir "$build" --output-on-failure --no-tests=error -L 'core|backward|position|sparse|nn' -R "$only" -E '^models\.'

# variant.sh NAME COMPILER ISA EMULATOR [CMAKE OPTION]...: builds library and digest program so, and compares the digests on
# instruction set ISA (any: on all that run here) and, under an emulator, in portable C too.
set -eu
name=$1 compiler=$2 isa=$3 emulator=$4
shift 4
digests=$SOURCE/tests/core/digests.txt gradients=$SOURCE/tests/backward/digests.txt
fail() { echo "FAILED: $*"; exit 1; }
need() { command -v "$1" >/dev/null 2>&1 || fail "this test needs $1"; }
need "$compiler"
[ "$emulator" = none ] || need "$emulator"

build=$WORK/$name
mkdir -p "$build"
if ! "$CMAKE" -S "$SOURCE" -B "$build" -G Ninja -DQKV_BUILD_PROGRAM=OFF -DQKV_BUILD_TESTS=OFF -DQKV_BUILD_DIGEST=ON \
  -DQKV_INSTALL=OFF "$@" >"$build/log" 2>&1 || ! "$CMAKE" --build "$build" -j 1 >>"$build/log" 2>&1; then
  cat "$build/log"
  fail "the build of this variant"
fi
if [ "$emulator" = none ]; then
  exec "$build/tests/variants/digest" "$digests" "$gradients"
fi
for one in $isa portable; do
  "$emulator" -L "/usr/$name-linux-gnu" "$build/tests/variants/digest" --isa "$one" "$digests" "$gradients"
done

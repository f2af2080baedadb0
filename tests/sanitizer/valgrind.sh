# The program under valgrind: invalid accesses, uninitialised values, lost memory. Valgrind knows AVX2 but no AVX-512, and the
# program's own choice of instruction set follows the CPU that valgrind shows it.
set -eu
command -v valgrind >/dev/null 2>&1 || { echo "FAILED: this test needs valgrind"; exit 1; }
mkdir -p "$WORK/valgrind"
cd "$WORK/valgrind"
run() {
  echo "qkv $*"
  valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect --track-fds=no \
    "$program" "$@" >log 2>&1 || { status=$?; cat log; echo "FAILED: qkv $* under valgrind, exit status $status"; exit 1; }
}
program=$1
run --version
run mask 'causal & window(20,0)' --seqlen 200
run check --seed 1 --count 3 --cost 1e5

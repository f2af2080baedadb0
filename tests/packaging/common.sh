# Read by the other scripts: stops at the first error, and knows how to say what failed.
set -eu
fail() { printf 'FAILED: %s\n' "$*"; exit 1; }
need() { command -v "$1" >/dev/null 2>&1 || fail "this test needs $1"; }
# A folder of the script's own.
fresh() { rm -rf "$WORK/$1"; mkdir -p "$WORK/$1"; cd "$WORK/$1"; }
use_installed() {
  PKG_CONFIG_PATH=$PREFIX/$LIBDIR/pkgconfig
  LD_LIBRARY_PATH=$PREFIX/$LIBDIR
  export PKG_CONFIG_PATH LD_LIBRARY_PATH
}
WARN='-Wall -Wextra -Wpedantic -Werror'

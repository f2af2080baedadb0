# A consumer in C, found by pkg-config, against the shared and the static library.
. "$(dirname "$0")/common.sh"
need pkg-config
use_installed
fresh c
[ "$(pkg-config --modversion qkv)" = "$VERSION" ] || fail "qkv.pc has version $(pkg-config --modversion qkv), not $VERSION"
$CC -std=c11 $WARN $(pkg-config --cflags qkv) "$SOURCE/tests/packaging/consumer.c" -o shared $(pkg-config --libs qkv)
./shared
$CC -std=c11 $WARN -static $(pkg-config --static --cflags qkv) "$SOURCE/tests/packaging/consumer.c" -o static \
  $(pkg-config --static --libs qkv)
env -u LD_LIBRARY_PATH ./static

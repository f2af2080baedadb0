# A consumer of qkv-nn: by pkg-config and by find_package, shared and static.
. "$(dirname "$0")/common.sh"
need pkg-config
use_installed
fresh nn
consumer=$SOURCE/examples/multihead.c
[ "$(pkg-config --modversion qkv-nn)" = "$VERSION" ] || fail "qkv-nn.pc has version $(pkg-config --modversion qkv-nn), not $VERSION"
$CC -std=c11 $WARN $(pkg-config --cflags qkv-nn) "$consumer" -o shared $(pkg-config --libs qkv-nn)
./shared
# Either of the two may be static; the BLAS stays shared. Archives are taken by their names.
static() { # program archives
  $CC -std=c11 $WARN $(pkg-config --static --cflags qkv-nn) "$consumer" -o "$1" $(pkg-config --static --libs qkv-nn | sed "$2")
}
static both 's/-lqkv-nn /-l:libqkv-nn.a /; s/-lqkv /-l:libqkv.a /'
env -u LD_LIBRARY_PATH ./both
static mixed 's/-lqkv-nn /-l:libqkv-nn.a /'
./mixed
static other 's/-lqkv /-l:libqkv.a /'
./other

cp "$consumer" .
cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES C)
find_package(qkv REQUIRED COMPONENTS nn)
find_package(qkv OPTIONAL_COMPONENTS nothing)
if(NOT qkv_FOUND OR qkv_nothing_FOUND)
  message(FATAL_ERROR "an optional component that is not there is not an error, and not found")
endif()
add_executable(shared multihead.c)
target_link_libraries(shared PRIVATE qkv::nn)
add_executable(static multihead.c)
target_link_libraries(static PRIVATE qkv::nn_static)
END
"$CMAKE" -S . -B build -DCMAKE_C_COMPILER="$CC" -DCMAKE_PREFIX_PATH="$PREFIX" >log 2>&1 || fail "$(cat log)"
"$CMAKE" --build build >log 2>&1 || fail "$(cat log)"
for program in shared static; do build/$program || fail "$program"; done
sed 's/COMPONENTS nn)/COMPONENTS nothing)/' CMakeLists.txt >wrong
mkdir refused
mv wrong refused/CMakeLists.txt
if "$CMAKE" -S refused -B refused/build -DCMAKE_C_COMPILER="$CC" -DCMAKE_PREFIX_PATH="$PREFIX" >log 2>&1; then
  fail "find_package(qkv COMPONENTS nothing) was accepted"
fi
grep -q "no component 'nothing'" log || fail "the component that is missing is not named: $(cat log)"

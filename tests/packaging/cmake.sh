# A consumer that uses find_package, with both imported targets; and a version that must be refused.
. "$(dirname "$0")/common.sh"
fresh cmake
cp "$SOURCE/tests/packaging/consumer.c" .
cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES C)
find_package(qkv ${WANTED} REQUIRED)
add_executable(shared consumer.c)
target_link_libraries(shared PRIVATE qkv::qkv)
add_executable(static consumer.c)
target_link_libraries(static PRIVATE qkv::static)
END
"$CMAKE" -S . -B build -DCMAKE_C_COMPILER="$CC" -DCMAKE_PREFIX_PATH="$PREFIX" -DWANTED="$VERSION" >log 2>&1 || fail "$(cat log)"
"$CMAKE" --build build >log 2>&1 || fail "$(cat log)"
build/shared
build/static
if "$CMAKE" -S . -B refused -DCMAKE_C_COMPILER="$CC" -DCMAKE_PREFIX_PATH="$PREFIX" -DWANTED=99.0 >log 2>&1; then
  fail "find_package(qkv 99.0) accepted version $VERSION"
fi

# The same tree as a subdirectory of another project adds neither tests nor flags of its own.
fresh subproject
cp "$SOURCE/tests/packaging/consumer.c" .
cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(outer LANGUAGES C)
add_subdirectory("${QKV_SOURCE}" qkv)
add_executable(consumer consumer.c)
target_link_libraries(consumer PRIVATE qkv::qkv)
get_target_property(options consumer COMPILE_OPTIONS)
if(options OR TARGET qkv_program OR CMAKE_C_STANDARD)
  message(FATAL_ERROR "the library changed its including project")
endif()
END
"$CMAKE" -S . -B build -G Ninja -DCMAKE_C_COMPILER="$CC" -DQKV_SOURCE="$SOURCE" >log 2>&1 || fail "$(cat log)"

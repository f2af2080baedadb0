# Flags of everything in this tree. They are directory options, so a project that includes this one keeps its own.

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
  # The order of operations is part of the result: no a*b+c becomes an fma but where the source says so, and flags of an
  # including project must not loosen it. The last only spares the errno branch of sqrt and its kind.
  add_compile_options(-fno-fast-math -ffp-contract=off -fno-math-errno)
  add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^s390" AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
    # Here -std=c11 alone evaluates float in double, for history's sake; the machine itself has float.
    add_compile_options(-fexcess-precision=fast)
  endif()
  if(QKV_WERROR)
    add_compile_options(-Werror)
  endif()
elseif(MSVC)
  add_compile_options(/fp:precise /W3)
endif()

if(QKV_SANITIZE)
  add_compile_options(-fsanitize=${QKV_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${QKV_SANITIZE})
endif()

# Adds a directory that may not be there (a release of the library alone has no tests).
function(qkv_add_directory directory)
  if(EXISTS "${PROJECT_SOURCE_DIR}/${directory}/CMakeLists.txt")
    add_subdirectory("${PROJECT_SOURCE_DIR}/${directory}" "${PROJECT_BINARY_DIR}/${directory}")
  endif()
endfunction()

# Toolchain file: another processor on a Debian host, run under qemu. QKV_CROSS names it as the compiler's package does: aarch64,
# s390x (a big-endian one), riscv64.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES QKV_CROSS)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${QKV_CROSS})
set(CMAKE_C_COMPILER ${QKV_CROSS}-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH /usr/${QKV_CROSS}-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-${QKV_CROSS} -L /usr/${QKV_CROSS}-linux-gnu)

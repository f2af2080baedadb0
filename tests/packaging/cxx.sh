# A consumer in C++17.
. "$(dirname "$0")/common.sh"
need g++
need pkg-config
use_installed
fresh cxx
g++ -std=c++17 $WARN $(pkg-config --cflags qkv) "$SOURCE/tests/packaging/consumer.cpp" -o consumer $(pkg-config --libs qkv)
./consumer

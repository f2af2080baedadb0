# ./run on a machine without tools and without apt-get: it names what it looked for, and neither fails otherwise nor builds.
. "$(dirname "$0")/common.sh"
fresh bare
mkdir bin
for tool in sh dirname basename id mktemp rm nproc getconf cat sed mkdir; do
  path=$(command -v "$tool") && ln -s "$path" "bin/$tool"
done
for verb in build test demo bench; do
  if PATH="$PWD/bin" "$SOURCE/run" $verb >log 2>&1; then fail "./run $verb succeeded without tools"; fi
  for name in cc cmake ninja build-essential; do
    grep -q "$name" log || fail "./run $verb does not name $name: $(cat log)"
  done
done
PATH="$PWD/bin" "$SOURCE/run" help | grep -q usage: || fail "./run help"
if "$SOURCE/run" tset >log 2>&1; then fail "./run accepted the verb 'tset'"; fi
grep -q "'tset'" log || fail "./run does not name the wrong verb: $(cat log)"

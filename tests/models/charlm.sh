#!/bin/sh
# The program charlm: losses do not depend on threads, an interrupted training that is resumed gives the same ones, and messages
# name what is wrong.
set -u
charlm=$1 docs=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

fail() {
  echo "FAILED: $*"
  failed=1
}
expect() { # exit status, text, arguments
  want=$1 text=$2
  shift 2
  said=$("$charlm" "$@" 2>&1)
  got=$?
  case $said in *"$text"*) found=1 ;; *) found=0 ;; esac
  if [ "$got" -ne "$want" ] || [ $found = 0 ]; then
    fail "charlm $*: exit status $got, wanted is $want; it must say: $text"
    echo "$said"
  fi
}

# The model of the full run, 30 steps of it with smaller batches.
text=
if [ ! -r /usr/share/common-licenses/GPL-3 ]; then
  echo "no licences in /usr/share/common-licenses: the text is that of the docs"
  text="--text $docs/NUMERICS.md --text $docs/SEMANTICS.md"
fi
for threads in 1 2; do
  # shellcheck disable=SC2086 # a list of words
  "$charlm" $text --steps 30 --batch 4 --threads $threads --curve "$work/curve.$threads" || fail "30 steps with $threads threads"
done
cmp "$work/curve.1" "$work/curve.2" || fail "one and two threads give other losses"
[ "$(wc -l <"$work/curve.1")" -eq 31 ] || fail "the curve has other than 30 steps"
awk 'NR == 2 { first = $2 } END { exit !($2 < first - 0.5 && $3 < first - 0.5) }' "$work/curve.1" || fail "30 steps did not lower the loss"

# A small model: interrupted, resumed with another number of threads.
small="--text $docs/NUMERICS.md --layers 2 --d-model 64 --context 40 --batch 2 --dropout 0.2 --seed 9"
# shellcheck disable=SC2086
"$charlm" $small --steps 800 --threads 1 --curve "$work/whole" >"$work/log" 2>&1 || fail "a small training"
# shellcheck disable=SC2086
"$charlm" $small --steps 800 --threads 1 --curve "$work/part" --checkpoint "$work/c.safetensors" >>"$work/log" 2>&1 &
pid=$!
tries=0
while [ ! -e "$work/c.safetensors" ] && [ $tries -lt 600 ]; do
  sleep 0.1
  tries=$((tries + 1))
done
kill -INT $pid
wait $pid
got=$?
[ $got -eq 130 ] || fail "exit status $got after Ctrl-C, wanted is 130"
done=$(($(wc -l <"$work/part") - 1))
echo "interrupted after step $done"
{ [ $done -ge 100 ] && [ $done -lt 800 ]; } || fail "interrupted after step $done"
"$charlm" --text "$docs/NUMERICS.md" --resume "$work/c.safetensors" --threads 2 --curve "$work/resumed" --checkpoint "$work/end.safetensors" \
  --plot "$work/chart.svg" >>"$work/log" 2>&1 || fail "the resumed training"
cmp "$work/whole" "$work/resumed" || fail "an interrupted training gives other losses"
grep -q '<svg' "$work/chart.svg" || fail "no chart"
tail -n +2 "$work/part" | cmp -n "$(tail -n +2 "$work/part" | wc -c)" - "$work/whole" -i 0:"$(head -1 "$work/whole" | wc -c)" ||
  fail "the losses before the interruption are others"

# Writing: the same each time, as long as asked.
"$charlm" --resume "$work/end.safetensors" --generate 50 --prompt "the " --threads 1 >"$work/one" || fail "writing"
"$charlm" --resume "$work/end.safetensors" --generate 50 --prompt "the " --threads 2 >"$work/two" || fail "writing"
cmp "$work/one" "$work/two" || fail "two threads write another text"
[ "$(wc -c <"$work/one")" -eq 55 ] || fail "$(wc -c <"$work/one") bytes written, wanted are 55"
expect 0 "the " --resume "$work/end.safetensors" --generate 5 --prompt "the " --temperature 0

printf 'short' >"$work/short"
head -c 2000 "$docs/NUMERICS.md" >"$work/other"
head -c 5000 "$work/c.safetensors" >"$work/cut.safetensors"
printf '\002\0\0\0\0\0\0\0{}' >"$work/empty.safetensors"
expect 0 "Usage: charlm" --help
expect 2 "no option '--step'" --step 3
expect 2 "--steps needs a value" --steps
expect 2 "--steps 0: wanted is a number from 1" --steps 0
expect 2 "--rate x: wanted is a number" --rate x
expect 2 "--dropout 1: wanted is a number from 0 to below 1" --dropout 1
expect 2 "--d-model must be a multiple of 32" --d-model 33
expect 2 "--layers 17: wanted is a number from 1 to 16" --layers 17
expect 2 "$work/none" --text "$work/none"
expect 2 "the text has 5 characters; it needs 1000" --text "$work/short"
expect 2 "the validation text has only 200 characters" --text "$work/other" --context 200
expect 2 "cannot be given with --resume" --resume "$work/c.safetensors" --batch 4
expect 2 "was trained on another text" --resume "$work/c.safetensors" --text "$work/other"
expect 2 "cut.safetensors: " --resume "$work/cut.safetensors" --text "$work/other"
expect 2 "no checkpoint of charlm: there is no tensor 'settings'" --resume "$work/empty.safetensors" --text "$work/other"
expect 2 "the text has no character" --resume "$work/end.safetensors" --generate 5 --prompt "$(printf '\001')"
expect 2 "must end in .svg or .png" --resume "$work/end.safetensors" --text "$docs/NUMERICS.md" --plot "$work/chart.gif"
[ $failed = 0 ] || cat "$work/log"
exit $failed

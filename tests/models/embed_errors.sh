#!/bin/sh
# embed's messages name what is wrong, and its comparison finds a difference.
set -u
embed=$1 model=$2 sample=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

expect() { # exit status, text, arguments
  want=$1 text=$2
  shift 2
  said=$("$embed" "$@" 2>&1)
  got=$?
  case $said in *"$text"*) found=1 ;; *) found=0 ;; esac
  if [ "$got" -ne "$want" ] || [ $found = 0 ]; then
    echo "embed $*: exit status $got, wanted is $want; it must say: $text"
    echo "$said"
    failed=1
  fi
}

printf '101 102\n101 30522 102\n' >"$work/large"
printf '101 102\n\n101 102\n' >"$work/empty"
printf '101 x\n' >"$work/letter"
yes 7 | head -513 | tr '\n' ' ' >"$work/long"
printf '101 9999999999999999999999 102\n' >"$work/huge"
: >"$work/nothing"
printf 'one line\n' >"$work/text"
head -c 1000000 "$model" >"$work/cut.safetensors"

expect 0 "Usage: embed" --help
expect 2 "--model is needed" --ids "$sample/ids.txt"
expect 2 "--ids is needed" --model "$model"
expect 2 "no option '--modle'" --modle "$model"
expect 2 "--ids needs a value" --model "$model" --ids
expect 2 "--threads 0: wanted is a number from 1" --threads 0
expect 2 "$work/none.safetensors" --model "$work/none.safetensors" --ids "$sample/ids.txt"
expect 2 "cut.safetensors: truncated" --model "$work/cut.safetensors" --ids "$sample/ids.txt"
expect 2 "384 columns cannot be divided among 7 heads" --model "$model" --ids "$sample/ids.txt" --heads 7
expect 2 "large:2: a token id of 30522 or more, the model has 30522" --model "$model" --ids "$work/large"
expect 2 "huge:1: a token id of" --model "$model" --ids "$work/huge"
expect 2 "empty:2: 0 tokens; a sentence has 1 to 512" --model "$model" --ids "$work/empty"
expect 2 "long:1: 513 tokens; a sentence has 1 to 512" --model "$model" --ids "$work/long"
expect 2 "letter:1: a byte that is neither digit nor blank" --model "$model" --ids "$work/letter"
expect 2 "nothing: no sentence" --model "$model" --ids "$work/nothing"
expect 2 "text: 1 lines for 50 sentences" --model "$model" --ids "$sample/ids.txt" --text "$work/text"

# A sentence with one token changed has another embedding.
sed '7s/ [0-9]* 102$/ 2000 102/' "$sample/ids.txt" >"$work/changed"
expect 1 "NOT EQUAL" --model "$model" --ids "$work/changed" --check "$sample/embeddings.npy"
# So has another number of heads.
expect 1 "NOT EQUAL" --model "$model" --ids "$sample/ids.txt" --heads 6 --check "$sample/embeddings.npy"
# What was written is what was compared.
expect 0 "50 sentences" --model "$model" --ids "$sample/ids.txt" --ragged --out "$work/e.npy"
expect 0 "0.0e+00 (limit 1e-05), another nearest sentence for 0 of 50: equal" --model "$model" --ids "$sample/ids.txt" --ragged \
  --check "$work/e.npy"
exit $failed

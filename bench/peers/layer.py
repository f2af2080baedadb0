#!/usr/bin/env python3
"""A layer of qkv-nn beside its parts and torch.nn.MultiheadAttention, on one core.

    ./run bench --layer [--seqlen LIST] [--turns N]

Without numpy and torch it goes on in the Python environment of the race, build/peers-venv, which it makes if need be.
Self-attention, f32, batch 1, with biases, no mask; for each length the least time of the thread of

    layer        qkv_multihead_forward, activations kept
    sgemm        cblas_sgemm of the sizes of its two products, alone, by the BLAS that it uses
    attention    qkv_forward on the layer's own q, k and v, alone
    torch        torch.nn.MultiheadAttention, need_weights=False, and the same with the gradients of everything
    backward     qkv_multihead_backward, all gradients

sgemm / (layer - attention) is the share of the BLAS's speed at which the projections run if all else cost nothing; it and `rest`, the
part of the layer's time that neither explains, are held against the goals. All take turns. Results are compared; a wrong one ends it."""
import argparse
import ctypes as C
import os
import sys
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before any of them is loaded

try:
    import numpy as np
    import torch
except ImportError:
    import race
    if __name__ != "__main__" or str(race.VENV) == sys.prefix:
        raise
    python = str(race.prepare())
    os.execv(python, [python, *sys.argv])

import nn_ctypes as nn  # noqa: E402
from race import BUILD  # noqa: E402

LEAST_SHARE, MOST_REST = 0.95, 0.03
ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112


class Layer:
    def __init__(self, library, n, d_model, heads, rng):
        def normal(*shape, size=1.0):
            return (size * rng.standard_normal(shape)).astype(np.float32)

        self.library, self.n, self.d_model, self.heads = library, n, d_model, heads
        self.x, self.y, self.dy, self.dx = normal(1, n, d_model), normal(1, n, d_model), normal(1, n, d_model), normal(1, n, d_model)
        self.w_in, self.b_in = normal(3 * d_model, d_model, size=d_model ** -0.5), normal(3 * d_model)
        self.w_out, self.b_out = normal(d_model, d_model, size=d_model ** -0.5), normal(d_model)
        self.attention = nn.Problem(size=C.sizeof(nn.Problem), batch=1, num_heads=heads, seqlen_q=n)
        self.m = nn.Multihead(size=C.sizeof(nn.Multihead), d_model=d_model, attention=C.pointer(self.attention), x=nn.rows(self.x),
                              y=nn.rows(self.y))
        self.g = nn.MultiheadGradients(size=C.sizeof(nn.MultiheadGradients), dy=nn.rows(self.dy), dx=nn.rows(self.dx))
        self.d = [np.empty_like(a) for a in (self.w_in, self.b_in, self.w_out, self.b_out)]
        for p, (w_in, b_in, w_out, b_out) in ((self.m.projections, (self.w_in, self.b_in, self.w_out, self.b_out)),
                                              (self.g.projections, self.d)):
            cut = [slice(i * d_model, (i + 1) * d_model) for i in range(3)]
            p.wq, p.wk, p.wv = (nn.matrix(w_in[c]) for c in cut)
            p.bq, p.bk, p.bv = (nn.tensor(b_in[c]) for c in cut)
            p.wo, p.bo = nn.matrix(w_out), nn.tensor(b_out)
        self.memory = library.activations(self.m)
        self.scratch = library.scratch(self.m, self.g)
        self.forward()
        self.problem = library.problem(self.m)
        self.result = np.empty((n, 3 * d_model), np.float32)

    def forward(self):
        self.library.forward(self.m, self.scratch)

    def backward(self):
        self.library.backward(self.m, self.g, self.scratch)

    def attend(self):
        if self.library.core.qkv_forward(None, C.byref(self.problem), *nn.block(self.scratch)):
            sys.exit("layer: qkv_forward")

    def sgemm(self, w):
        rows, columns = w.shape
        self.library.lib.cblas_sgemm(ROW_MAJOR, NO_TRANS, TRANS, self.n, rows, columns, C.c_float(1), C.c_void_p(self.x.ctypes.data),
                                     columns, C.c_void_p(w.ctypes.data), columns, C.c_float(0), C.c_void_p(self.result.ctypes.data), rows)

    def products(self):
        self.sgemm(self.w_in)
        self.sgemm(self.w_out)


class Torch:
    def __init__(self, layer):
        torch.set_num_threads(1)
        self.module = torch.nn.MultiheadAttention(layer.d_model, layer.heads, batch_first=True)
        with torch.no_grad():
            for p, value in zip((self.module.in_proj_weight, self.module.in_proj_bias, self.module.out_proj.weight,
                                 self.module.out_proj.bias), (layer.w_in, layer.b_in, layer.w_out, layer.b_out)):
                p.copy_(torch.from_numpy(value))
        self.x = torch.from_numpy(layer.x).requires_grad_()
        self.dy = torch.from_numpy(layer.dy)

    def forward(self):
        with torch.no_grad():
            self.y = self.module(self.x, self.x, self.x, need_weights=False)[0]

    def both(self):
        self.x.grad = None
        self.module.zero_grad()
        self.module(self.x, self.x, self.x, need_weights=False)[0].backward(self.dy)


def same(name, a, b):
    if not np.abs(a - b).max() <= 1e-4 * np.abs(b).max():
        sys.exit(f"layer: {name} is not torch's: they differ by {np.abs(a - b).max():g} of {np.abs(b).max():g}")


def run(n, o, library):
    layer = Layer(library, n, o.d_model, o.heads, np.random.default_rng(1))
    calls = {"layer": layer.forward, "sgemm": layer.products, "attention": layer.attend, "backward": layer.backward}
    peer = Torch(layer)
    calls["torch"], calls["torch forward and backward"] = peer.forward, peer.both
    layer.backward()
    peer.forward()
    peer.both()
    same("y", layer.y, peer.y.numpy())
    for name, a, b in (("dx", layer.dx, peer.x.grad), ("dw_in", layer.d[0], peer.module.in_proj_weight.grad),
                       ("db_in", layer.d[1], peer.module.in_proj_bias.grad), ("dw_out", layer.d[2], peer.module.out_proj.weight.grad),
                       ("db_out", layer.d[3], peer.module.out_proj.bias.grad)):
        same(name, a, b.numpy())
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(o.turns):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - begin)

    d = o.d_model
    products, pairs = 8 * n * d * d, 4 * n * n * d
    work = {"layer": products + pairs, "sgemm": products, "attention": pairs, "torch": products + pairs,
            "backward": 2 * products + 2.5 * pairs, "torch forward and backward": 3 * products + 3.5 * pairs}
    print(f"seqlen {n}, d_model {d}, {o.heads} heads")
    for name, seconds in best.items():
        print(f"  {name:28s} {1e3 * seconds:9.2f} ms  {work[name] / seconds / 1e9:7.1f} GFLOP/s")
    share = best["sgemm"] / max(best["layer"] - best["attention"], 1e-9)
    rest = (best["layer"] - best["attention"] - best["sgemm"]) / best["layer"]
    good = share >= LEAST_SHARE and rest <= MOST_REST
    print(f"  projections at {100 * share:.1f} % of sgemm's speed (goal {100 * LEAST_SHARE:.0f}), rest {100 * rest:.1f} % of the layer "
          f"(goal {100 * MOST_REST:.0f} at most){'' if good else ': MISSED'}")
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--core", default=str(BUILD / "src" / "libqkv.so"), help="libqkv.so (default: that of build/)")
    p.add_argument("--nn", default=str(BUILD / "src" / "nn" / "libqkv-nn.so"), help="libqkv-nn.so (default: that of build/)")
    p.add_argument("--seqlen", default="512,4096", help="lengths, separated by commas (default 512,4096); the last is held to the goals")
    p.add_argument("--d-model", type=int, default=768)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--turns", type=int, default=7)
    o = p.parse_args()
    library = nn.Library(o.core, o.nn)
    good = [run(int(n), o, library) for n in o.seqlen.split(",")]
    return 0 if good[-1] else 1


if __name__ == "__main__":
    sys.exit(main())

"""qkv-nn against torch.nn.MultiheadAttention: results and gradients of random weights, in float32 and float64.

usage: test_torch.py libqkv.so libqkv-nn.so

Tolerance. Both compute the same expression and round differently. `exact` is torch in float64 (for float64, the difference of the two
themselves counts); torch's own float32 error against it is what one careful implementation makes of the problem. Every element must be
within N u S of exact: u the unit roundoff, N the operations on the longest path (products of d_model, head_dim, keys, and rows for
weights' gradients, twice: forward and back), S the largest magnitude in the tensor's own sum, taken as the largest element of the
gradient plus the largest of what it is made of. A wrong sign, scale, transpose or mask is 10^4 times larger."""
import ctypes as C
import itertools
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
import nn_ctypes as nn  # noqa: E402
from nn_ctypes import matrix, rows, tensor  # noqa: E402


class Case:
    def __init__(self, seed, dtype, cross, mask, bias, batch_first, sizes):
        self.dtype, self.cross, self.mask, self.bias, self.batch_first = dtype, cross, mask, bias, batch_first
        self.batch, self.rows, self.keys, self.d_model, self.d_kv, self.heads = sizes
        if not cross:
            self.keys, self.d_kv = self.rows, self.d_model
        torch.manual_seed(seed)
        self.module = torch.nn.MultiheadAttention(self.d_model, self.heads, bias=bias, kdim=self.d_kv, vdim=self.d_kv,
                                                  batch_first=batch_first, dtype=dtype)
        with torch.no_grad():
            for p in self.module.parameters():  # biases are zero otherwise
                if p.dim() == 1:
                    p.normal_(0, 0.3)
        shape = lambda n, d: (self.batch, n, d) if batch_first else (n, self.batch, d)
        self.x = torch.randn(shape(self.rows, self.d_model), dtype=dtype, requires_grad=True)
        self.x_kv = torch.randn(shape(self.keys, self.d_kv), dtype=dtype, requires_grad=True) if cross else self.x
        self.dy = torch.randn(shape(self.rows, self.d_model), dtype=dtype)
        self.dense = torch.rand(self.rows, self.keys) < 0.4  # true hides, in torch
        self.dense[:, 0] = False
        self.lengths = np.array([self.keys - 2 * b if self.keys > 2 * b else 1 for b in range(self.batch)], np.int32)

    def text(self):
        return (f"{self.dtype} {'cross' if self.cross else 'self'} mask={self.mask} bias={self.bias} batch_first={self.batch_first} "
                f"batch {self.batch} rows {self.rows} keys {self.keys} d_model {self.d_model} d_kv {self.d_kv} heads {self.heads}")

    def torch_run(self, dtype):
        """y and the gradients by torch, computed in dtype."""
        module = torch.nn.MultiheadAttention(self.d_model, self.heads, bias=self.bias, kdim=self.d_kv, vdim=self.d_kv,
                                             batch_first=self.batch_first, dtype=dtype)
        module.load_state_dict({n: t.to(dtype) for n, t in self.module.state_dict().items()})
        x = self.x.detach().to(dtype).requires_grad_()
        x_kv = self.x_kv.detach().to(dtype).requires_grad_() if self.cross else x
        options = {}
        if self.mask == "causal":
            options["attn_mask"] = torch.triu(torch.ones(self.rows, self.keys, dtype=torch.bool), diagonal=1)
        elif self.mask == "dense":
            options["attn_mask"] = self.dense
        elif self.mask == "lengths":
            options["key_padding_mask"] = torch.arange(self.keys)[None, :] >= torch.from_numpy(self.lengths)[:, None]
        y, weights = module(x, x_kv, x_kv, average_attn_weights=False, **options)
        y.backward(self.dy.to(dtype))
        result = {"y": y, "dx": x.grad, "weights": weights}
        if self.cross:
            result["dx_kv"] = x_kv.grad
        for name, p in module.named_parameters():
            result["d" + name] = p.grad
        return {n: t.detach().numpy().astype(np.float64) for n, t in result.items()}

    def qkv_run(self, library):
        e, kv, heads, d = self.d_model, self.d_kv, self.heads, self.d_model // self.heads
        state = {n: np.ascontiguousarray(t.detach().numpy()) for n, t in self.module.state_dict().items()}
        real = np.float64 if self.dtype == torch.float64 else np.float32
        keep = []

        def new(shape):
            keep.append(np.full(shape, np.nan, real))
            return keep[-1]

        a = nn.Problem(size=C.sizeof(nn.Problem), batch=self.batch, num_heads=heads, seqlen_q=self.rows, seqlen_kv=self.keys)
        mask = nn.Mask()
        if self.mask == "causal":
            mask.kind, a.align = 1, 1  # query i stands at key i
        elif self.mask == "dense":
            visible = np.ascontiguousarray(~self.dense.numpy()).astype(np.uint8)
            keep.append(visible)
            mask.kind, mask.t = 5, tensor(visible, 0, 0, self.keys, 1)
        elif self.mask == "lengths":
            a.kv_length = self.lengths.ctypes.data_as(C.POINTER(C.c_int32))
        if mask.kind:
            a.mask, a.mask_count = C.pointer(mask), 1
        m = nn.Multihead(size=C.sizeof(nn.Multihead), dtype=nn.DTYPES[np.dtype(real)], d_model=e, d_kv=kv if self.cross else 0,
                      attention=C.pointer(a), mask_rows=self.rows, mask_keys=self.keys)
        x, dy = self.x.detach().numpy(), self.dy.numpy()
        y, dx = new(x.shape), new(x.shape)
        m.x, m.y = rows(x, self.batch_first), rows(y, self.batch_first)
        g = nn.MultiheadGradients(size=C.sizeof(nn.MultiheadGradients), dy=rows(dy, self.batch_first), dx=rows(dx, self.batch_first))
        result = {"y": y, "dx": dx}
        if self.cross:
            x_kv = self.x_kv.detach().numpy()
            result["dx_kv"] = dx_kv = new(x_kv.shape)
            m.x_kv, g.dx_kv = rows(x_kv, self.batch_first), rows(dx_kv, self.batch_first)
        for p, which in ((m.projections, "value"), (g.projections, "gradient")):
            def give(name):
                if which == "value":
                    return state[name]
                result["d" + name] = new(state[name].shape)
                return result["d" + name]
            if "in_proj_weight" in state:
                w = give("in_proj_weight")
                parts = w[:e], w[e:2 * e], w[2 * e:]
            else:
                parts = give("q_proj_weight"), give("k_proj_weight"), give("v_proj_weight")
            p.wq, p.wk, p.wv = (matrix(w) for w in parts)
            p.wo = matrix(give("out_proj.weight"))
            if self.bias:
                b = give("in_proj_bias")
                p.bq, p.bk, p.bv, p.bo = tensor(b[:e]), tensor(b[e:2 * e]), tensor(b[2 * e:]), tensor(give("out_proj.bias"))
        memory = library.activations(m)
        library.forward(m)
        library.backward(m, g)
        problem = library.problem(m)
        result["weights"] = w = new((self.batch, heads, self.rows, self.keys))
        to = tensor(w, heads * self.rows * self.keys, self.rows * self.keys, self.keys, 1)
        if library.core.qkv_scores(None, C.byref(problem), 4, None, C.byref(to)):
            sys.exit(f"FAILED: qkv_scores; {self.text()}")
        del memory, keep
        return result


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    library = nn.Library(*sys.argv[1:])
    sizes = [(2, 7, 5, 12, 10, 3), (1, 33, 70, 48, 24, 4), (3, 130, 65, 64, 32, 8)]
    worst, cases = 0.0, 0
    for seed, (dtype, cross, mask, bias, batch_first, size) in enumerate(itertools.product(
            (torch.float32, torch.float64), (False, True), ("none", "causal", "dense", "lengths"), (True, False), (True, False),
            sizes)):
        case = Case(seed, dtype, cross, mask, bias, batch_first, size)
        exact, got = case.torch_run(torch.float64), case.qkv_run(library)
        if set(exact) != set(got):
            sys.exit(f"FAILED: torch has {sorted(exact)}, qkv {sorted(got)}; {case.text()}")
        u = 2.0 ** -53 if dtype == torch.float64 else 2.0 ** -24
        chain = 2 * (case.d_model + case.d_kv + case.d_model // case.heads + case.keys + case.batch * case.rows)
        scale = 1 + max(np.abs(a).max() for n, a in exact.items() if n in ("dx", "dx_kv"))
        for name, reference in exact.items():
            s = np.abs(reference).max() + (scale if name.startswith("d") else 1)
            ratio = np.abs(got[name] - reference).max() / (chain * u * s)
            worst = max(worst, ratio)
            if not ratio <= 1:
                sys.exit(f"FAILED: {name} differs by {np.abs(got[name] - reference).max():g}, {ratio:.3g} times what rounding allows; "
                         f"{case.text()}")
        cases += 1
    print(f"{cases} layers equal to torch {torch.__version__}'s; largest difference / allowed: {worst:.3f}")


main()

"""The contestants. Each class runs one cell at a time:

    version()          what is being measured
    open(cell, q, k, v, dout)  prepares a call on arrays (head, seqlen, dim) of float32, float16, or uint16 that holds
                       bfloat16; dout, the gradient of the result, is given for a backward pass: then the forward pass is
                       part of open, and the call computes the gradients alone
    call()             the call that is timed
    outputs()          what the last call computed, arrays (head, seqlen, dim) of float32: the result, or dq, dk and dv
    close()

A peer that cannot do a cell raises Unsupported with the reason, one that is not installed Missing from its constructor.
output_bytes is what call() allocates for the result itself; beside_bytes what it needs but open() already holds.
"""
import ctypes as C
import glob
import mmap
import os
import platform

import numpy as np


class Missing(Exception):
    pass


class Unsupported(Exception):
    pass


def widen(array):
    """float32 from float32, float16, or the bits of bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def aligned(shape, dtype):
    """Memory at the beginning of a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip:skip + size].view(dtype).reshape(shape)


def fresh(size):
    """Memory that no page stands behind yet, so that what a call touches of it is seen: (memory, address)."""
    memory = mmap.mmap(-1, max(size, 1))
    if size >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, np.frombuffer(memory, np.uint8).ctypes.data


class Peer:
    directions = ("fwd",)
    keep = ()  # attributes that the constructor made
    output_bytes = 0
    beside_bytes = 0
    warm_up = True  # a tiny problem first, so that what a library does once is not counted

    def __init__(self, options):
        self.options = options

    def outputs(self):
        return [self.output()]

    def close(self):
        """Forgets the cell; what the constructor made stays."""
        for name in set(vars(self)) - {"options", *self.keep}:
            delattr(self, name)


# ---- qkv -----------------------------------------------------------------------------------------------------------------

class Qkv(Peer):
    algorithm, arithmetic = 0, 0
    directions = ("fwd", "bwd")
    keep = ("qkv", "executor")

    def __init__(self, options):
        import qkv_ctypes
        super().__init__(options)
        self.qkv = qkv_ctypes.Library(options["qkv"])
        self.executor = C.CDLL(options["executor"])
        sizes = (C.c_size_t * 5)()
        self.executor.qkv_peer_sizes(sizes)
        mine = [C.sizeof(t) for t in (qkv_ctypes.Tensor, qkv_ctypes.Mask, qkv_ctypes.Problem, qkv_ctypes.Context,
                                      qkv_ctypes.Gradients)]
        if list(sizes) != mine:
            raise Missing(f"qkv: qkv_ctypes.py does not fit the header: {mine} bytes, not {list(sizes)}")

    def version(self):
        return f"qkv {self.qkv.version}"

    def open(self, cell, q, k, v, dout=None):
        import qkv_ctypes as X
        dtype = {"f32": X.F32, "bf16": X.BF16, "f16": X.F16}[cell["dtype"]]
        if self.arithmetic == X.FAST and dtype != X.BF16:
            raise Unsupported("QKV_FAST is for bf16")
        self.out = aligned(q.shape, q.dtype)
        self.out[:] = 0
        self.problem = p = X.Problem(size=C.sizeof(X.Problem), algorithm=self.algorithm, arithmetic=self.arithmetic)
        p.batch = 1
        p.num_heads, p.num_kv_heads = q.shape[0], k.shape[0]
        p.seqlen_q, p.seqlen_kv, p.head_dim = q.shape[1], k.shape[1], q.shape[2]
        p.q, p.k, p.v, p.out = (X.bhsd(a, dtype) for a in (q, k, v, self.out))
        if cell["causal"]:
            self.mask = X.Mask(kind=X.MASK_CAUSAL)
            p.mask, p.mask_count = C.pointer(self.mask), 1
        self.context = X.Context()
        self.executor.qkv_peer_context(C.byref(self.context), cell["threads"])
        if self.arithmetic == X.FAST:
            facts = self.qkv.describe(self.context, p)
            if not facts["arithmetic"].startswith("fast"):
                raise Unsupported("this CPU has no bf16 dot instructions: the same as qkv")
            self.note = facts["isa"]
        self.arrays = q, k, v, dout
        self.gradients = None
        if dout is not None:
            self.lse = aligned(q.shape[:2], np.float32)
            p.lse = X.bhs(self.lse, X.F32)
        self.size = self.qkv.scratch(self.context, p)
        self.memory, self.scratch = fresh(self.size)
        if dout is not None:
            self.call()
            self.made = [aligned(a.shape, a.dtype) for a in (q, k, v)]
            self.gradients = g = X.Gradients(size=C.sizeof(X.Gradients))
            for array in self.made:
                array[:] = 0
            g.dout, g.dq, g.dk, g.dv = (X.bhsd(a, dtype) for a in (dout, *self.made))
            self.size = self.qkv.backward_scratch(self.context, p, g)
            self.memory, self.scratch = fresh(self.size)

    def call(self):
        if self.gradients is None:
            self.qkv.forward(self.context, self.problem, self.scratch, self.size)
        else:
            self.qkv.backward(self.context, self.problem, self.gradients, self.scratch, self.size)

    def outputs(self):
        return [widen(a) for a in ([self.out] if self.gradients is None else self.made)]


class QkvFast(Qkv):
    arithmetic = 1


class QkvStandard(Qkv):
    directions = ("fwd",)  # the backward pass is that of flash
    algorithm = 1


# ---- PyTorch -------------------------------------------------------------------------------------------------------------

class Torch(Peer):
    keep = ("torch",)

    def __init__(self, options):
        super().__init__(options)
        try:
            import torch
        except ImportError as e:
            raise Missing(f"torch: {e}") from e
        self.torch = torch

    def version(self):
        return f"torch {self.torch.__version__}, {self.torch.backends.cpu.get_cpu_capability()}"

    def tensors(self, cell, arrays):
        torch = self.torch
        torch.set_num_threads(cell["threads"])
        result = []
        for a in arrays:
            t = torch.from_numpy(a.view(np.int16) if a.dtype == np.uint16 else a)
            result.append((t.view(torch.bfloat16) if a.dtype == np.uint16 else t).unsqueeze(0))
        self.output_bytes = arrays[0].nbytes
        return result

    def output(self):
        return self.out[0].to(self.torch.float32).numpy()


class TorchFlash(Torch):
    """Its backward pass is timed as autograd runs it, on the graph of one forward pass."""
    directions = ("fwd", "bwd")
    backend = "FLASH_ATTENTION"

    def open(self, cell, q, k, v, dout=None):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.backends = getattr(SDPBackend, self.backend)
        self.kernel = sdpa_kernel
        self.q, self.k, self.v = self.tensors(cell, (q, k, v))
        self.options_of_call = {"is_causal": cell["causal"], "enable_gqa": q.shape[0] != k.shape[0]}
        self.dout = None
        if dout is not None:
            self.dout, = self.tensors(cell, (dout,))
            self.output_bytes = q.nbytes + k.nbytes + v.nbytes
            for t in (self.q, self.k, self.v):
                t.requires_grad_()
            self.out = self.attention()

    def attention(self):
        with self.kernel(self.backends):
            return self.torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, **self.options_of_call)

    def call(self):
        if self.dout is not None:
            self.made = None
            self.made = self.torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout, retain_graph=True)
            return
        self.out = None
        with self.torch.inference_mode():
            self.out = self.attention()

    def outputs(self):
        return [t[0].to(self.torch.float32).numpy() for t in ([self.out] if self.dout is None else self.made)]


class TorchMath(TorchFlash):
    backend = "MATH"


class TorchFlex(Torch):
    """Compiled by Inductor for each cell, which takes seconds and a C++ compiler."""
    warm_up = False

    def open(self, cell, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        torch = self.torch
        self.q, self.k, self.v = self.tensors(cell, (q, k, v))
        n = q.shape[1]
        mask = None
        if cell["causal"]:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
        torch._dynamo.reset()
        self.options_of_call = {"block_mask": mask, "enable_gqa": q.shape[0] != k.shape[0]}
        self.function = torch.compile(flex_attention, fullgraph=True, dynamic=False)
        self.call()

    def call(self):
        self.out = None
        with self.torch.no_grad():
            self.out = self.function(self.q, self.k, self.v, **self.options_of_call)


# ---- ONNX Runtime --------------------------------------------------------------------------------------------------------

class OnnxRuntime(Peer):
    keep = ("ort", "onnx")

    def __init__(self, options):
        super().__init__(options)
        try:
            import onnx
            import onnxruntime
        except ImportError as e:
            raise Missing(f"onnxruntime: {e}") from e
        self.ort, self.onnx = onnxruntime, onnx

    def version(self):
        return f"onnxruntime {self.ort.__version__}, Attention of opset 23"

    def open(self, cell, q, k, v):
        ort, helper, types = self.ort, self.onnx.helper, self.onnx.TensorProto
        dtype = {"f32": types.FLOAT, "f16": types.FLOAT16, "bf16": types.BFLOAT16}[cell["dtype"]]
        values = {"q": q, "k": k, "v": v}
        info = {name: helper.make_tensor_value_info(name, dtype, [1, *a.shape]) for name, a in (*values.items(), ("y", q))}
        node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=int(cell["causal"]))
        graph = helper.make_graph([node], "attention", [info[name] for name in values], [info["y"]])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = cell["threads"]
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as e:
            raise Unsupported(f"no Attention of {cell['dtype']} on the CPU") from e
        self.result = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, *q.shape), q.dtype))
        self.inputs = [ort.OrtValue.ortvalue_from_numpy(a[None]) for a in values.values()]
        self.binding = self.session.io_binding()
        for name, value in zip(values, self.inputs):
            self.binding.bind_ortvalue_input(name, value)
        self.binding.bind_ortvalue_output("y", self.result)

    def call(self):
        self.session.run_with_iobinding(self.binding)

    def output(self):
        return self.result.numpy()[0].astype(np.float32)


# ---- ggml ----------------------------------------------------------------------------------------------------------------

class GgmlInit(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class GgmlPlan(C.Structure):
    _fields_ = [("work_size", C.c_size_t), ("work_data", C.c_void_p), ("n_threads", C.c_int), ("threadpool", C.c_void_p),
                ("abort_callback", C.c_void_p), ("abort_callback_data", C.c_void_p), ("use_ref", C.c_bool),
                ("later_versions", C.c_uint64 * 8)]


class Ggml(Peer):
    """ggml_flash_attn_ext. ggml takes q, and gives the result, in f32 whatever the type of k and v; its causal mask is an
    f16 tensor (seqlen, seqlen)."""
    F32, F16, BF16 = 0, 1, 30
    keep = ("base", "cpu", "path")

    def __init__(self, options):
        super().__init__(options)
        self.path, cpu = self.find(options.get("ggml"))
        try:
            base = self.base = C.CDLL(self.path, C.RTLD_GLOBAL)
            self.cpu = C.CDLL(cpu, C.RTLD_GLOBAL)
        except OSError as e:
            raise Missing(f"ggml: {e}") from e
        pointer = C.c_void_p
        base.ggml_init.argtypes, base.ggml_init.restype = [GgmlInit], pointer
        base.ggml_free.argtypes = [pointer]
        base.ggml_new_tensor_3d.argtypes, base.ggml_new_tensor_3d.restype = [pointer, C.c_int] + [C.c_int64] * 3, pointer
        base.ggml_get_data.argtypes, base.ggml_get_data.restype = [pointer], pointer
        base.ggml_flash_attn_ext.argtypes = [pointer] * 5 + [C.c_float] * 3
        base.ggml_flash_attn_ext.restype = pointer
        base.ggml_new_graph.argtypes, base.ggml_new_graph.restype = [pointer], pointer
        base.ggml_build_forward_expand.argtypes = [pointer, pointer]
        self.cpu.ggml_graph_plan.argtypes, self.cpu.ggml_graph_plan.restype = [pointer, C.c_int, pointer], GgmlPlan
        self.cpu.ggml_graph_compute.argtypes = [pointer, C.POINTER(GgmlPlan)]
        self.cpu.ggml_cpu_init()

    @staticmethod
    def find(path):
        if not path:
            try:
                import importlib.util
                spec = importlib.util.find_spec("llama_cpp")
            except ImportError:
                spec = None
            if not spec:
                raise Missing("ggml: not installed; --ggml FOLDER names the folder of libggml-base and libggml-cpu")
            path = os.path.join(os.path.dirname(spec.origin), "lib")
        suffix = "dylib" if platform.system() == "Darwin" else "so"
        found = [sorted(glob.glob(os.path.join(path, f"lib{name}.{suffix}*"))) for name in ("ggml-base", "ggml-cpu")]
        if not all(found):
            raise Missing(f"ggml: no libggml-base.{suffix} and libggml-cpu.{suffix} in {path}")
        return found[0][0], found[1][0]

    def version(self):
        try:
            self.base.ggml_version.restype = C.c_char_p
            text = "ggml " + self.base.ggml_version().decode()
        except AttributeError:
            text = "ggml"
        sets = [name for name in ("avx2", "avx512", "avx512_bf16", "amx_int8", "neon", "sve")
                if getattr(self.cpu, f"ggml_cpu_has_{name}", lambda: 0)()]
        return f"{text}, built for {'+'.join(sets) or 'no vectors'}"

    def fill(self, array, kind):
        n, rows, dim = array.shape
        tensor = self.base.ggml_new_tensor_3d(self.ggml, kind, dim, rows, n)
        C.memmove(self.base.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        return tensor

    def open(self, cell, q, k, v):
        base = self.base
        kind = {"f32": self.F32, "f16": self.F16, "bf16": self.BF16}[cell["dtype"]]
        heads, n, dim = self.shape = q.shape
        mask = None
        if cell["causal"]:
            rows = np.arange(-(-n // 64) * 64)[:, None]
            mask = np.where(np.arange(n)[None] <= rows, np.float16(0), np.float16(-np.inf))[None]
            self.beside_bytes = mask.nbytes
        q = np.ascontiguousarray(widen(q))
        size = 2 * q.nbytes + k.nbytes + v.nbytes + self.beside_bytes + (4 << 20)
        self.ggml = base.ggml_init(GgmlInit(size, None, False))
        if not self.ggml:
            raise MemoryError("ggml_init")
        tensors = [self.fill(q, self.F32), self.fill(k, kind), self.fill(v, kind)]
        tensors.append(self.fill(np.ascontiguousarray(mask), self.F16) if mask is not None else None)
        result = base.ggml_flash_attn_ext(self.ggml, *tensors, 1 / dim ** 0.5, 0, 0)
        self.data = base.ggml_get_data(result)
        C.memset(self.data, 0, q.nbytes)
        self.graph = base.ggml_new_graph(self.ggml)
        base.ggml_build_forward_expand(self.graph, result)
        self.plan = self.cpu.ggml_graph_plan(self.graph, cell["threads"], None)
        self.memory, self.plan.work_data = fresh(self.plan.work_size)

    def call(self):
        status = self.cpu.ggml_graph_compute(self.graph, self.plan)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")

    def output(self):
        heads, n, dim = self.shape
        flat = np.ctypeslib.as_array(C.cast(self.data, C.POINTER(C.c_float)), (n, heads, dim))
        return flat.transpose(1, 0, 2).copy()

    def close(self):
        if "ggml" in self.__dict__:
            self.base.ggml_free(self.ggml)
        super().close()


# ---- numpy ---------------------------------------------------------------------------------------------------------------

class Numpy(Peer):
    """The textbook in numpy: what one writes without a library. It holds all scores."""

    def version(self):
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"numpy {np.__version__}, {blas.get('name')} {blas.get('version')}"

    def open(self, cell, q, k, v):
        if cell["dtype"] != "f32":
            raise Unsupported("numpy has no fast product of 16-bit types")
        heads, n, dim = q.shape
        group = heads // k.shape[0]
        self.q = (q * np.float32(1 / dim ** 0.5)).reshape(k.shape[0], group * n, dim)
        self.k, self.v, self.shape = k.transpose(0, 2, 1), v, q.shape
        self.hidden = np.triu(np.ones((n, n), bool), 1) if cell["causal"] else None
        self.beside_bytes = self.hidden.nbytes if self.hidden is not None else 0
        self.output_bytes = q.nbytes

    def call(self):
        self.out = None
        heads, n, dim = self.shape
        s = self.q @ self.k
        if self.hidden is not None:
            s.reshape(heads, n, n)[:, self.hidden] = -np.inf
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        total = s.sum(-1, keepdims=True)
        self.out = s @ self.v
        self.out /= total

    def output(self):
        return self.out.reshape(self.shape)


# The names are those of race.py's columns.
PEERS = {
    "qkv": Qkv,
    "qkv-fast": QkvFast,
    "qkv-standard": QkvStandard,
    "torch-flash": TorchFlash,
    "torch-math": TorchMath,
    "torch-flex": TorchFlex,
    "onnxruntime": OnnxRuntime,
    "ggml": Ggml,
    "numpy": Numpy,
}

"""The part of include/qkv/qkv.h that the race needs, by ctypes."""
import ctypes as C

F32, F64, BF16, F16 = 1, 2, 3, 4
FLASH, STANDARD = 0, 1
CANONICAL, FAST = 0, 1
MASK_CAUSAL = 1


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("stride", C.c_int64 * 4), ("dtype", C.c_int32), ("reserved", C.c_int32)]


class Mask(C.Structure):
    _fields_ = [("kind", C.c_int32), ("join", C.c_int32), ("a", C.c_int64), ("b", C.c_int64), ("t", Tensor), ("u", Tensor),
                ("fn", C.c_void_p), ("user", C.c_void_p), ("reserved", C.c_int64)]


class Problem(C.Structure):
    _fields_ = ([("size", C.c_uint32)] + [(name, C.c_int32) for name in ("algorithm", "align", "arithmetic")] +
                [(name, C.c_int64) for name in ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_kv", "head_dim",
                                                "head_dim_v")] +
                [(name, Tensor) for name in ("q", "k", "v", "out", "lse")] +
                [("softmax_scale", C.c_double), ("softcap", C.c_double), ("mask", C.POINTER(Mask)),
                 ("mask_count", C.c_int64)] +
                [(name, Tensor) for name in ("bias", "alibi_slopes", "sinks")] +
                [(name, C.POINTER(C.c_int32)) for name in ("q_length", "kv_begin", "kv_length", "q_position", "kv_position",
                                                           "cu_seqlens_q", "cu_seqlens_kv")] +
                [("dropout", C.c_double)] + [(name, C.c_uint64) for name in ("seed", "offset")] +
                [(name, C.c_int64) for name in ("batch_origin", "head_origin", "heads_total")])


class Gradients(C.Structure):
    _fields_ = ([("size", C.c_uint32), ("accumulate", C.c_int32)] +
                [(name, Tensor) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")])


class Context(C.Structure):
    _fields_ = [("size", C.c_uint32), ("num_workers", C.c_int32), ("self", C.c_void_p), ("parallel_for", C.c_void_p),
                ("alloc_self", C.c_void_p), ("alloc", C.c_void_p), ("release", C.c_void_p), ("isa_cap", C.c_char_p),
                ("cancel", C.c_void_p), ("flags", C.c_uint32), ("reserved", C.c_int32)]


def bhsd(array, dtype):
    """Contiguous (head, seqlen, dim); the array must outlive the tensor."""
    heads, seqlen, dim = array.shape
    return Tensor(array.ctypes.data, (C.c_int64 * 4)(heads * seqlen * dim, seqlen * dim, dim, 1), dtype, 0)


def bhs(array, dtype):
    """Contiguous (head, seqlen): the log-sum-exp."""
    heads, seqlen = array.shape
    return Tensor(array.ctypes.data, (C.c_int64 * 4)(heads * seqlen, seqlen, 1, 0), dtype, 0)


class Library:
    def __init__(self, path):
        self.lib = lib = C.CDLL(path)
        context, problem, gradients = C.POINTER(Context), C.POINTER(Problem), C.POINTER(Gradients)
        lib.qkv_status_text.restype = C.c_char_p
        lib.qkv_status_text.argtypes = [C.c_int32]
        lib.qkv_check.argtypes = [problem, C.c_char_p, C.c_size_t]
        lib.qkv_scratch.argtypes = [context, problem, C.POINTER(C.c_size_t)]
        lib.qkv_forward.argtypes = [context, problem, C.c_void_p, C.c_size_t]
        lib.qkv_backward_check.argtypes = [problem, gradients, C.c_char_p, C.c_size_t]
        lib.qkv_backward_scratch.argtypes = [context, problem, gradients, C.POINTER(C.c_size_t)]
        lib.qkv_backward.argtypes = [context, problem, gradients, C.c_void_p, C.c_size_t]
        lib.qkv_describe.argtypes = [context, problem, C.c_char_p, C.c_size_t]
        version = lib.qkv_version()
        self.version = f"{version // 10000}.{version // 100 % 100}.{version % 100}"

    def require(self, status, problem, gradients=None):
        if status != 0:
            text = C.create_string_buffer(512)
            if gradients is None:
                self.lib.qkv_check(problem, text, len(text))
            else:
                self.lib.qkv_backward_check(problem, gradients, text, len(text))
            raise RuntimeError(f"{self.lib.qkv_status_text(status).decode()}: {text.value.decode()}")

    def scratch(self, context, problem):
        size = C.c_size_t()
        self.require(self.lib.qkv_scratch(context, problem, size), problem)
        return size.value

    def forward(self, context, problem, scratch, size):
        status = self.lib.qkv_forward(context, problem, scratch, size)
        if status != 0:
            self.require(status, problem)

    def backward_scratch(self, context, problem, gradients):
        size = C.c_size_t()
        self.require(self.lib.qkv_backward_scratch(context, problem, gradients, size), problem, gradients)
        return size.value

    def backward(self, context, problem, gradients, scratch, size):
        status = self.lib.qkv_backward(context, problem, gradients, scratch, size)
        if status != 0:
            self.require(status, problem, gradients)

    def describe(self, context, problem):
        text = C.create_string_buffer(4096)
        self.require(self.lib.qkv_describe(context, problem, text, len(text)), problem)
        return dict(line.split(": ", 1) for line in text.value.decode().splitlines())

"""The part of include/qkv/nn.h that tests and races need, by ctypes."""
import ctypes as C

import numpy as np

from qkv_ctypes import F32, F64, Mask, Problem, Tensor  # noqa: F401 (users take them from here)

DTYPES = {np.dtype(np.float32): F32, np.dtype(np.float64): F64, np.dtype(np.uint8): 7}


class Projections(C.Structure):
    _fields_ = [(name, Tensor) for name in ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")]


class Multihead(C.Structure):
    _fields_ = ([("size", C.c_uint32)] + [(name, C.c_int32) for name in ("dtype", "gemm", "reserved")] +
                [(name, C.c_int64) for name in ("d_model", "d_kv", "d_out")] + [("attention", C.POINTER(Problem))] +
                [(name, C.c_int64) for name in ("mask_rows", "mask_keys")] + [(name, C.c_void_p) for name in ("rotary_q", "rotary_k")] +
                [("projections", Projections)] + [(name, Tensor) for name in ("x", "x_kv", "y")] +
                [("activations", C.c_void_p), ("activation_bytes", C.c_size_t)])


class MultiheadGradients(C.Structure):
    _fields_ = ([("size", C.c_uint32), ("accumulate", C.c_int32)] + [(name, Tensor) for name in ("dy", "dx", "dx_kv")] +
                [("projections", Projections)] + [(name, Tensor) for name in ("dbias", "dsinks")])


def tensor(array, batch=0, head=0, row=0, column=1):
    """Strides in elements; the array must outlive the tensor."""
    return Tensor(array.ctypes.data, (C.c_int64 * 4)(batch, head, row, column), DTYPES[array.dtype], 0)


def rows(array, batch_first=True):
    """(batch, row, column), or (row, batch, column) as torch has it without batch_first."""
    s = [stride // array.itemsize for stride in array.strides]
    return tensor(array, s[0] if batch_first else s[1], 0, s[1] if batch_first else s[0], s[2])


def matrix(array):
    return tensor(array, 0, 0, array.strides[0] // array.itemsize, array.strides[1] // array.itemsize)


class Library:
    """libqkv-nn, and libqkv for what is the core's."""

    def __init__(self, core, nn):
        self.core, self.lib = C.CDLL(core, mode=C.RTLD_GLOBAL), C.CDLL(nn)
        self.core.qkv_status_text.restype = C.c_char_p

    def require(self, status, layer, gradients=None):
        if status == 0:
            return
        text = C.create_string_buffer(512)
        if gradients is None:
            self.lib.qkv_multihead_check(C.byref(layer), text, C.c_size_t(len(text)))
        else:
            self.lib.qkv_multihead_backward_check(C.byref(layer), C.byref(gradients), text, C.c_size_t(len(text)))
        raise RuntimeError(f"{self.core.qkv_status_text(status).decode()}: {text.value.decode()}")

    def size(self, function, layer, *arguments):
        size = C.c_size_t()
        self.require(getattr(self.lib, function)(*arguments, C.byref(size)), layer)
        return size.value

    def activations(self, layer):
        """Memory that the layer points to from now on; keep it."""
        size = self.size("qkv_multihead_activations", layer, C.byref(layer))
        memory = np.empty(size + 64, np.uint8)
        layer.activations, layer.activation_bytes = memory.ctypes.data + -memory.ctypes.data % 64, size
        return memory

    def forward(self, layer, scratch=None):
        self.require(self.lib.qkv_multihead_forward(None, C.byref(layer), *block(scratch)), layer)

    def backward(self, layer, gradients, scratch=None):
        self.require(self.lib.qkv_multihead_backward(None, C.byref(layer), C.byref(gradients), *block(scratch)), layer, gradients)

    def scratch(self, layer, gradients=None):
        """Enough for forward, and for backward if there are gradients."""
        size = self.size("qkv_multihead_scratch", layer, None, C.byref(layer))
        if gradients is not None:
            size = max(size, self.size("qkv_multihead_backward_scratch", layer, None, C.byref(layer), C.byref(gradients)))
        return np.empty(size, np.uint8)

    def problem(self, layer):
        problem = Problem(size=C.sizeof(Problem))
        self.require(self.lib.qkv_multihead_problem(C.byref(layer), C.byref(problem)), layer)
        return problem


def block(memory):
    return (None, C.c_size_t(0)) if memory is None else (C.c_void_p(memory.ctypes.data), C.c_size_t(memory.nbytes))

#!/usr/bin/env python3
"""Writes the seed inputs of the fuzz targets, corpus/<target>/, beside this file."""
import json
import os
import struct

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")


def write(target, name, data):
    os.makedirs(os.path.join(HERE, target), exist_ok=True)
    with open(os.path.join(HERE, target, name), "wb") as f:
        f.write(data)


def npy(dictionary, data=b"", version=1, length=None):
    text = dictionary.encode()
    length = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", length) + text + data


def dictionary(descr, shape, order="False"):
    return "{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n" % (descr, order, shape)


eight = bytes(range(8))
for descr in ("'<f2'", "'<f4'", "'<f8'", "'<i4'", "'|u1'", "'|b1'"):
    write("npy", "dtype_" + descr.strip("'<|"), npy(dictionary(descr, "(2, 1)"), eight * 2))
write("npy", "i8", npy(dictionary("'<i8'", "(1,)"), struct.pack("<q", -5)))
write("npy", "i8_wide", npy(dictionary("'<i8'", "(1,)"), struct.pack("<q", 1 << 40)))
write("npy", "fortran", npy(dictionary("'|u1'", "(2, 4)", "True"), eight))
write("npy", "version2", npy(dictionary("'|u1'", "(2, 4)"), eight, version=2))
write("npy", "version3", npy(dictionary("'|u1'", "(8,)"), eight, version=3))
write("npy", "scalar", npy(dictionary("'<f8'", "()"), eight))
write("npy", "empty", npy(dictionary("'<f8'", "(0, 3)")))
write("npy", "rank4", npy(dictionary("'<f4'", "(1, 1, 1, 2)"), eight))
write("npy", "rank5", npy(dictionary("'<f4'", "(1, 1, 1, 1, 2)"), eight))
write("npy", "huge", npy(dictionary("'<f4'", "(4294967296, 4294967296)"), eight))
write("npy", "huge_and_zero", npy(dictionary("'<f4'", "(0, 9223372036854775807, 2)"), eight))
write("npy", "digits", npy(dictionary("'<f4'", "(99999999999999999999999,)"), eight))
write("npy", "truncated", npy(dictionary("'<f4'", "(3,)"), eight))
write("npy", "header_too_long", npy(dictionary("'<f4'", "(2,)"), eight, length=60000))
write("npy", "header_cut", npy(dictionary("'<f4'", "(2,)"), eight, length=30))
write("npy", "big_endian", npy(dictionary("'>f4'", "(2,)"), eight))
write("npy", "structured", npy(dictionary("[('a', '<f4')]", "(2,)"), eight))
write("npy", "python2", npy("{\"shape\":(2L),'fortran_order':False,'descr':'<f4'}", eight))
write("npy", "preamble", b"\x93NUMPY\x01\x00\x10")
write("npy", "nothing", b"")


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


good = {"__metadata__": {"format": "pt"}, "q": tensor("F32", [1, 2], 0, 8), "k": tensor("BF16", [2, 2], 8, 16),
        "m": tensor("BOOL", [8], 16, 24), "l": tensor("I64", [1], 24, 32)}
write("safetensors", "good", safetensors(good, eight * 4))
write("safetensors", "padded", safetensors(json.dumps(good).encode() + b"     ", eight * 4))
write("safetensors", "scalar", safetensors({"s": tensor("F64", [], 0, 8)}, eight))
write("safetensors", "empty_tensor", safetensors({"s": tensor("F16", [0, 4], 0, 0)}))
write("safetensors", "other_dtype", safetensors({"s": tensor("F8_E5M2", [8], 0, 8), "t": tensor("X9", [8], 0, 8)}, eight))
write("safetensors", "overlap", safetensors({"a": tensor("U8", [5], 0, 5), "b": tensor("U8", [5], 3, 8)}, eight))
write("safetensors", "outside", safetensors({"a": tensor("U8", [9], 0, 9)}, eight))
write("safetensors", "backward", safetensors({"a": tensor("U8", [4], 4, 0)}, eight))
write("safetensors", "size", safetensors({"a": tensor("F32", [3], 0, 8)}, eight))
write("safetensors", "huge", safetensors({"a": tensor("F32", [1 << 40, 1 << 40], 0, 8)}, eight))
write("safetensors", "fraction", safetensors({"a": tensor("F32", [1.5], 0, 8)}, eight))
write("safetensors", "twice", safetensors(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                                          b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', eight))
write("safetensors", "rank17", safetensors({"a": tensor("U8", [1] * 17, 0, 1)}, eight))
write("safetensors", "no_json", safetensors(b"{\"a\": [1, 2", eight))
write("safetensors", "deep_json", safetensors(b"{\"a\":" * 2000, eight))
write("safetensors", "list", safetensors(b"[1, 2]", eight))
write("safetensors", "null_byte", safetensors(b"{\"a\\u0000b\":1}\0", eight))
write("safetensors", "length", safetensors(b"{}", eight, length=1 << 60))
write("safetensors", "short", b"\x02\0\0")

masks = {
    "causal": "causal", "window": "causal & window(255,0)", "both": "(window(64,64) | prefix(4)) & documents(ids.npy)",
    "infinite": "window(inf, -1) | causal_start", "dense": "dense(b.npy, 3) & lengths(a.npy)", "quoted": "dense('b ,(.npy')",
    "tensor": "documents(f.safetensors:ids)", "distribute": "causal & prefix(1) | window(0,0) & prefix(2) | none & causal",
    "many": "|".join("prefix(%d)" % i for i in range(64)), "too_many": "&".join("prefix(%d)" % i for i in range(65)),
    "explode": "|".join("prefix(%d)&prefix(%d)" % (2 * i, 2 * i + 1) for i in range(12)), "deep": "(" * 63 + "causal" + ")" * 63,
    "deeper": "(" * 500, "typo": "causl & window(1,2)", "open": "window(255,", "number": "prefix(123456789012345678901234567890)",
    "lengths_or": "causal | (lengths(a.npy) & prefix(3))", "utf8": "dense('bä.npy') & ü", "empty": "", "operators": "&|&|((",
}
for name, text in masks.items():
    write("mask_text", name, text.encode())

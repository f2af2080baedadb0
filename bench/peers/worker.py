"""One contestant in a process of its own. Reads a JSON request per line from stdin and answers each with one line.

    {"do": "hello"}                            -> version
    {"do": "open", "cell": {...}, "folder", "rows", "file"}
        loads q, k, v and, for a backward pass, dout; makes the first call, writes these rows of what it computed, each
        (which, head, row), to the file -> seconds, extra_bytes, note
    {"do": "turn", "seconds": s}               -> seconds (the best of as many calls as fit), calls
    {"do": "close"}

An answer has "error" if the request failed, and "kind": missing, unsupported or failed.
"""
import ctypes
import gc
import json
import os
import sys
import time

import numpy as np

import peers

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def memory(name):
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(name)


class Meter:
    """Memory that a call takes and did not have: the process's peak over what it held before."""

    def __enter__(self):
        self.bytes = self.before = None
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")
            self.before = memory("VmRSS")
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *_):
        if self.before is not None:
            self.bytes = memory("VmHWM") - self.before


def load(folder, name, shape, dtype):
    array = peers.aligned(shape, dtype)
    with open(os.path.join(folder, name), "rb") as f:
        if f.readinto(memoryview(array).cast("B")) != array.nbytes:
            raise OSError(f"{folder}/{name} is too short")
    return array


class Worker:
    def __init__(self, name, options):
        self.name, self.options, self.peer, self.warm = name, options, None, set()

    def hello(self, _):
        self.peer = peers.PEERS[self.name](self.options)
        return {"version": self.peer.version()}

    def start(self, cell, *arrays):
        self.peer.close()
        self.peer.open(cell, *arrays)

    def open(self, request):
        cell = request["cell"]
        if cell["direction"] not in self.peer.directions:
            raise peers.Unsupported("no backward pass of its own")
        dtype = TYPES[cell["dtype"]]
        shapes = {"q": (cell["heads"], cell["seqlen"], cell["head_dim"])}
        shapes["k"] = shapes["v"] = (cell["kv_heads"], cell["seqlen"], cell["head_dim"])
        if cell["direction"] == "bwd":
            shapes["dout"] = shapes["q"]
        arrays = [load(request["folder"], name, shape, dtype) for name, shape in shapes.items()]
        kind = cell["direction"], cell["dtype"], cell["head_dim"], cell["causal"]
        if self.peer.warm_up and kind not in self.warm:
            self.start({**cell, "seqlen": 64}, *[np.ascontiguousarray(a[:, :64]) for a in arrays])
            self.peer.call()
            self.warm.add(kind)
        self.start(cell, *arrays)
        with Meter() as meter:
            seconds = time.perf_counter()
            self.peer.call()
            seconds = time.perf_counter() - seconds
        outputs = self.peer.outputs()
        np.save(request["file"], np.stack([outputs[which][h, i] for which, h, i in request["rows"]]))
        extra = None
        if meter.bytes is not None:
            extra = max(meter.bytes - self.peer.output_bytes, 0) + self.peer.beside_bytes
        return {"seconds": seconds, "extra_bytes": extra, "note": getattr(self.peer, "note", None)}

    def turn(self, request):
        best, calls = float("inf"), 0
        begin = now = time.perf_counter()
        while calls == 0 or now - begin + (now - begin) / calls < request["seconds"]:
            self.peer.call()
            last, now = now, time.perf_counter()
            best, calls = min(best, now - last), calls + 1
        return {"seconds": best, "calls": calls}

    def close(self, _):
        self.peer.close()
        gc.collect()
        return {}


def main():
    # Answers go to a copy of stdout: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    verbs = {"hello": worker.hello, "open": worker.open, "turn": worker.turn, "close": worker.close}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request["do"]](request)
        except peers.Missing as e:
            answer = {"error": str(e), "kind": "missing"}
        except peers.Unsupported as e:
            answer = {"error": str(e), "kind": "unsupported"}
        except Exception as e:
            lines = str(e).strip().splitlines()
            answer = {"error": f"{type(e).__name__}: {lines[0] if lines else ''}"[:200], "kind": "failed"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

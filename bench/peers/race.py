#!/usr/bin/env python3
"""The race of qkv against other attention on the CPU: see ./run bench --peers --help."""
import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build"
VENV = BUILD / "peers-venv"
WORK = BUILD / "peers"

PEERS = ("qkv", "qkv-fast", "qkv-standard", "torch-flash", "torch-math", "torch-flex", "onnxruntime", "ggml", "numpy")
USUAL = ("qkv", "qkv-fast", "qkv-standard", "torch-flash", "torch-math", "onnxruntime", "ggml")
STANDARD = ("qkv-standard", "torch-math", "numpy")  # the textbook: these hold all scores at a time
HOLDS_SCORES = (*STANDARD, "onnxruntime")
BACKWARD = ("qkv", "qkv-fast", "torch-flash", "torch-math")  # these have a backward pass
DIRECTIONS = ("fwd", "bwd")
DTYPES = ("f32", "bf16", "f16")

# A result is wrong if an element is off by more than this times sum_j p_j |v_j|, or for a gradient the like: the sum of what
# is added up in it, each as large as it can be. Rounding the weights and the result to the storage type costs a peer up to
# 2^-8 in bf16 and 2^-11 in f16; f32 has room for a fast exp.
TOLERANCE = {"f32": 2.0 ** -15, "bf16": 2.0 ** -6, "f16": 2.0 ** -8}


def die(text):
    sys.exit(f"race: {text}")


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- Options -------------------------------------------------------------------------------------------------------------

def parse(argv):
    def words(allowed):
        def read(text):
            result = tuple(part.strip() for part in text.split(","))
            for word in result:
                if word not in allowed:
                    raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(allowed)}")
            return result
        return read

    def numbers(text):
        result = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
        if not all(result):
            raise argparse.ArgumentTypeError(f"'{text}' is not a list of positive numbers")
        return result

    def heads(text):
        result = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:/(\d+))?\s*", part)
            pair = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if not all(pair) or pair[0] % pair[1]:
                raise argparse.ArgumentTypeError(f"'{part}' is not HEADS or HEADS/KV_HEADS, a multiple of it")
            result.append(pair)
        return tuple(result)

    def seconds(text):
        try:
            value = float(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e6:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
        return value

    def picture(text):
        if not text.endswith((".svg", ".png")):
            raise argparse.ArgumentTypeError(f"'{text}' must end in .svg or .png")
        return text

    p = argparse.ArgumentParser(
        prog="./run bench --peers", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="Race qkv against PyTorch, ONNX Runtime and ggml: the same inputs and threads, each peer in a process\n"
                    "of its own, taking turns; the minimum counts. Rows of every result are compared with float64; a\n"
                    "wrong one gets no number. The first use makes a Python environment in build/peers-venv.",
        epilog="Columns\n"
               "  qkv           flash, canonical arithmetic        torch-flash  scaled_dot_product_attention, flash\n"
               "  qkv-fast      the same with QKV_FAST, bf16       torch-math   the same, math: holds all scores\n"
               "  qkv-standard  the textbook: holds all scores     torch-flex   flex_attention, compiled (5 s a cell)\n"
               "  onnxruntime   Attention, opset 23                ggml         ggml_flash_attn_ext\n"
               "  numpy         the textbook in numpy, f32\n"
               "\n"
               "ggml is not installed by this script: build/peers-venv/bin/pip install llama-cpp-python compiles it, or\n"
               "--ggml names the folder of its shared libraries. A peer that is missing is a column that says so.\n"
               "\n"
               "Files: build/peers/race.txt, race.json and race.svg, from the last run.\n"
               "\n"
               "Examples\n"
               "  ./run bench --peers --quick\n"
               "  ./run bench --peers --dtype bf16 --seqlen 4096 --threads 1,2 --also torch-flex\n"
               "  ./run bench --peers --direction bwd\n"
               "  ./run bench --peers --budget 1800 --save")
    p.add_argument("--quick", action="store_true", help="a small grid in about a minute: lengths 512 and 2048, one thread")
    grid = p.add_argument_group("the grid; a LIST is separated by commas")
    grid.add_argument("--direction", metavar="LIST", type=words(DIRECTIONS), default=("fwd",),
                      help="fwd, bwd: the forward pass, the backward pass alone (default fwd). The backward pass has "
                           "columns of qkv and PyTorch, and by default f32 and bf16, lengths 1024 to 4096, heads 8/8")
    grid.add_argument("--dtype", metavar="LIST", type=words(DTYPES), help="f32, bf16, f16 (default all)")
    grid.add_argument("--head-dim", metavar="LIST", type=numbers, help="(default 64,128)")
    grid.add_argument("--seqlen", metavar="LIST", type=numbers, help="(default 512,1024,2048,4096,8192)")
    grid.add_argument("--heads", metavar="LIST", type=heads,
                      help="HEADS or HEADS/KV_HEADS (default 8/8,32/8; without this option 32/8 goes up to 2048)")
    grid.add_argument("--mask", metavar="LIST", type=words(("none", "causal")), help="none, causal (default both)")
    grid.add_argument("--threads", metavar="LIST", type=numbers,
                      help="(default 1,2; without this option 2 threads take lengths 1024 and 4096 of 8/8 alone)")
    grid.add_argument("--only", metavar="LIST", type=words(PEERS), help=f"columns (default {','.join(USUAL)})")
    grid.add_argument("--also", metavar="LIST", type=words(PEERS), default=(), help="columns besides these")
    grid.add_argument("--standard-to", metavar="N", type=int, default=4096,
                      help="longest sequence for peers that hold all scores (default 4096)")
    clock = p.add_argument_group("time")
    clock.add_argument("--budget", metavar="SECONDS", type=seconds,
                       help="time to spend, about (default 600, with --quick 60): it sets the number of turns; cells that "
                            "no time is left for are listed. Short cells come first")
    clock.add_argument("--turns", metavar="N", type=int, default=12, help="turns of a peer at a cell, at most (default 12)")
    clock.add_argument("--turn", metavar="SECONDS", type=seconds, default=0.1,
                       help="one turn: as many calls as fit, at least one (default 0.1)")
    clock.add_argument("--seed", metavar="N", type=int, default=1, help="of the inputs, normal numbers (default 1)")
    where = p.add_argument_group("files")
    where.add_argument("--ggml", metavar="FOLDER", default=os.environ.get("QKV_GGML"),
                       help="folder of libggml-base.so and libggml-cpu.so (or the environment's QKV_GGML)")
    where.add_argument("--json", metavar="FILE", action="append", default=[], help="the JSON once more")
    where.add_argument("--plot", metavar="FILE", action="append", type=picture, default=[],
                       help="the chart once more; FILE ends in .svg or .png")
    where.add_argument("--save", action="store_true", help="the JSON as bench/results/peers-<cpu>-<date>.json too")
    o = p.parse_args(argv)
    for name in ("turns", "standard_to"):
        if getattr(o, name) < 1:
            p.error(f"argument --{name.replace('_', '-')}: must be at least 1")
    if o.seed < 0:
        p.error("argument --seed: must not be negative")
    if o.ggml and not pathlib.Path(o.ggml).is_dir():
        p.error(f"argument --ggml: there is no folder {o.ggml}")
    for file in (*o.json, *o.plot):
        if not pathlib.Path(file).resolve().parent.is_dir():
            p.error(f"{file}: there is no such folder")
    usual = USUAL if "fwd" in o.direction else BACKWARD
    o.peers = tuple(name for name in PEERS if name == "qkv" or name in (o.only or usual) or name in o.also)
    o.budget = o.budget or (60 if o.quick else 600)
    return o


def lengths(o, direction):
    if o.quick:
        return 512, 2048
    return (512, 1024, 2048, 4096, 8192) if direction == "fwd" else (1024, 2048, 4096)


def grid(o):
    cells = []
    few = not o.threads and not o.quick
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    axes = itertools.product(o.direction, o.threads or ((1,) if o.quick or cpus < 2 else (1, 2)), o.dtype or DTYPES,
                             o.head_dim or (64, 128), o.heads or (((8, 8),) if o.quick else ((8, 8), (32, 8))),
                             o.mask or ("none", "causal"))
    for direction, threads, dtype, head_dim, (heads, kv_heads), mask in axes:
        backward = direction == "bwd"
        if backward and ((not o.dtype and dtype == "f16") or (not o.heads and heads != kv_heads)):
            continue
        for seqlen in o.seqlen or lengths(o, direction):
            if few and not backward and threads > 1 and (heads != kv_heads or not (o.seqlen or seqlen in (1024, 4096))):
                continue
            if not o.heads and heads != kv_heads and seqlen > 2048:
                continue
            pairs = seqlen * (seqlen + 1) / 2 if mask == "causal" else seqlen * seqlen
            cells.append({"direction": direction, "dtype": dtype, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads,
                          "seqlen": seqlen, "causal": mask == "causal", "threads": threads,
                          "flops": (10 if backward else 4) * pairs * head_dim * heads})
    return cells


def name_of(cell):
    mask, more = "causal" if cell["causal"] else "no mask", "s" if cell["threads"] > 1 else ""
    return (f"{'backward, ' if cell['direction'] == 'bwd' else ''}{cell['dtype']} {cell['heads']}/{cell['kv_heads']} heads, "
            f"head_dim {cell['head_dim']}, seqlen {cell['seqlen']}, {mask}, {cell['threads']} thread{more}")


# ---- Environment ---------------------------------------------------------------------------------------------------------

def clean_environment(threads=None):
    env = dict(os.environ)
    # These force kernels of old processors upon numpy.
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH", "PYTHONHOME"):
        env.pop(name, None)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if threads:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = str(threads)
    return env


def requirements():
    lines = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64"):
        lines = [line + "+cpu" if line.startswith("torch==") else line for line in lines]
    return lines


def prepare():
    """The virtual environment with all peers that pip can get; those it cannot are tried again at the next run."""
    python = VENV / "bin" / "python"
    if not python.exists():
        say(f"race: making {VENV.relative_to(ROOT)}")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode != 0:
            shutil.rmtree(VENV, ignore_errors=True)
            die("python3 -m venv failed (on Debian it needs the package python3-venv)")
    stamp = VENV / "installed.txt"
    installed = stamp.read_text().splitlines() if stamp.exists() else []
    for line in requirements():
        if line in installed:
            continue
        say(f"race: installing {line}")
        log = VENV / "pip.log"
        with open(log, "w") as f:
            done = subprocess.run([str(python), "-m", "pip", "install", "--disable-pip-version-check", line], stdout=f,
                                  stderr=subprocess.STDOUT, env=clean_environment())
        if done.returncode == 0:
            installed.append(line)
            stamp.write_text("\n".join(installed) + "\n")
            continue
        errors = [text for text in log.read_text().splitlines() if text.startswith("ERROR")] or ["see the log"]
        hint = ""
        if "+cpu" in line:
            hint = ". PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL names a place that has PyTorch's CPU builds"
        say(f"race: pip could not install {line}: {errors[-1]} ({log.relative_to(ROOT)}){hint}")
        if line.startswith("numpy"):
            die("without numpy there is no race")
    return python


def executor():
    source, library = HERE / "executor.c", WORK / "libqkv_peer_executor.so"
    headers = [ROOT / "include" / "qkv" / name for name in ("qkv.h", "openmp.h")]
    if not library.exists() or library.stat().st_mtime < max(f.stat().st_mtime for f in (source, *headers)):
        command = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-fopenmp", "-shared", "-fPIC", f"-I{ROOT / 'include'}",
                   str(source), "-o", str(library)]
        if subprocess.run(command).returncode != 0:
            die(f"could not compile {source.relative_to(ROOT)}")
    return library


def machine():
    """Facts of qkv info: the processor, its peak, the compiler of the library."""
    program = BUILD / "cli" / "qkv"
    facts = {}
    if program.exists():
        text = subprocess.run([str(program), "info"], capture_output=True, text=True).stdout
        for line in text.splitlines():
            name, colon, value = line.partition(": ")
            if colon and name in ("version", "order", "compiler", "cpu", "cpus", "isa", "memory", "peak_f32", "read"):
                facts.setdefault(name, value)
    try:
        model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    facts.setdefault("cpu", model[1] if model else platform.processor() or platform.machine())
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["python"] = platform.python_version()
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    facts["commit"] = git.stdout.strip() or "unknown"
    return facts


# ---- Workers -------------------------------------------------------------------------------------------------------------

class Failed(Exception):
    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


class Worker:
    """A peer's process with a number of threads. It is started when first used, and again after a crash."""

    def __init__(self, python, name, threads, options):
        self.python, self.name, self.threads, self.options = python, name, threads, options
        self.process, self.version, self.missing = None, None, None

    def start(self):
        self.log = open(WORK / f"{self.name}.log", "a")
        self.process = subprocess.Popen(
            [str(self.python), str(HERE / "worker.py"), self.name, json.dumps(self.options)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=clean_environment(self.threads))
        self.version = self.ask_process({"do": "hello"})["version"]

    def ask_process(self, request):
        limit = 600
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], limit)
            line = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self.stop()
            raise Failed("failed", f"its process ended, or did not answer in {limit} s (build/peers/{self.name}.log)")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["kind"], answer["error"])
        return answer

    def ready(self):
        if self.process is None and not self.missing:
            try:
                self.start()
            except Failed as e:
                self.stop()
                self.missing = str(e)

    def ask(self, request):
        self.ready()
        if self.missing:
            raise Failed("missing", self.missing)
        return self.ask_process(request)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            for pipe in (self.process.stdin, self.process.stdout, self.log):
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
            self.process.wait()
            self.process = None


# ---- Inputs and the answer -----------------------------------------------------------------------------------------------

def store(array, dtype):
    import numpy as np
    if dtype == "f32":
        return array
    if dtype == "f16":
        return array.astype(np.float16)
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def make_inputs(cell, seed, folder):
    """The same numbers for every type, rounded to it; returns them widened: q, k, v, and dout for a backward pass."""
    import numpy as np
    import peers
    random = np.random.default_rng([seed, cell["seqlen"], cell["head_dim"], cell["heads"], cell["kv_heads"]])
    result = []
    names = [("q", cell["heads"]), ("k", cell["kv_heads"]), ("v", cell["kv_heads"]), ("dout", cell["heads"])]
    for name, heads in names if cell["direction"] == "bwd" else names[:3]:
        stored = store(random.standard_normal((heads, cell["seqlen"], cell["head_dim"]), np.float32), cell["dtype"])
        stored.tofile(os.path.join(folder, name))
        result.append(peers.widen(stored))
    return result


def chosen(heads, n):
    """Some of the heads and of the rows: the first, the last, and some between."""
    import numpy as np
    fixed = [i for i in (0, 1, 63, 64, n // 2, n - 2, n - 1) if 0 <= i < n]
    return (sorted({0, heads // 2 - (heads > 2), heads - 1}),
            [int(i) for i in sorted({*fixed, *np.random.default_rng(7).integers(0, n, 9)})])


def answers(cell, inputs):
    """Rows spread over the heads, what they must be by float64, and the scale of their errors."""
    import numpy as np
    if cell["direction"] == "bwd":
        return gradient_answers(cell, inputs)
    q, k, v = inputs
    heads, n, dim = q.shape
    places, values, scales = [], [], []
    some_heads, some_rows = chosen(heads, n)
    for h, i in itertools.product(some_heads, some_rows):
        g = h // (heads // k.shape[0])
        seen = i + 1 if cell["causal"] else n
        s = k[g, :seen].astype(np.float64) @ q[h, i].astype(np.float64) / math.sqrt(dim)
        p = np.exp(s - s.max())
        p /= p.sum()
        visible = v[g, :seen].astype(np.float64)
        places.append((0, h, i))
        values.append(p @ visible)
        scales.append(p @ np.abs(visible))
    return places, np.stack(values), np.stack(scales)


def gradient_answers(cell, inputs):
    """dq of some rows, and dk and dv of some keys, of some key-value heads. dq_i = factor sum_j dS_ij k_j with dS = P (dP -
    delta): the scale of its errors takes magnitudes, and |dout| |v| + |dout| |out| in the place of dP - delta."""
    import numpy as np
    q, k, v, dout = inputs
    heads, n, dim = q.shape
    group, factor, block = heads // k.shape[0], 1 / math.sqrt(dim), 256
    some_heads, some = chosen(k.shape[0], n)
    places, values, scales = [], [], []
    for g in some_heads:
        wide_k, wide_v = k[g].astype(np.float64), v[g].astype(np.float64)
        dk, dv, size_k, size_v = np.zeros((4, len(some), dim))
        for h in range(g * group, (g + 1) * group):
            for begin in range(0, n, block):
                rows = np.arange(begin, min(begin + block, n))
                wide_q, do = q[h, rows].astype(np.float64), dout[h, rows].astype(np.float64)
                s = wide_q @ wide_k.T * factor
                if cell["causal"]:
                    s[np.arange(n)[None] > rows[:, None]] = -np.inf
                p = np.exp(s - s.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                out = p @ wide_v
                ds = p * (do @ wide_v.T - (do * out).sum(1, keepdims=True))
                size = p * (np.abs(do) @ np.abs(wide_v).T + np.abs(do * out).sum(1, keepdims=True))
                here = [i for i in some if begin <= i < begin + len(rows)]
                for i in here if h in (g * group, (g + 1) * group - 1) else []:
                    places.append((0, h, i))
                    values.append(ds[i - begin] @ wide_k * factor)
                    scales.append(size[i - begin] @ np.abs(wide_k) * factor)
                dk += ds[:, some].T @ wide_q * factor
                size_k += size[:, some].T @ np.abs(wide_q) * factor
                dv += p[:, some].T @ do
                size_v += p[:, some].T @ np.abs(do)
        for which, gradient, size in ((1, dk, size_k), (2, dv, size_v)):
            places += [(which, g, j) for j in some]
            values += list(gradient)
            scales += list(size)
    return places, np.stack(values), np.stack(scales)


# ---- One cell ------------------------------------------------------------------------------------------------------------

def memory_free():
    try:
        return int(re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())[1]) * 1024
    except (OSError, TypeError):
        return math.inf


def run_cell(cell, o, workers, folder, seconds, known):
    """Opens the cell with each peer, checks it, and lets them take turns for about so many seconds."""
    import numpy as np
    begin = time.monotonic()
    inputs = make_inputs(cell, o.seed, folder)
    key = tuple(value for name, value in cell.items() if name != "threads")
    if key not in known:
        known[key] = answers(cell, inputs)
    rows, value, scale = known[key]
    file = os.path.join(folder, "rows.npy")
    results = {}
    for name in o.peers:
        if name in STANDARD and cell["seqlen"] > o.standard_to:
            results[name] = {"status": "left out", "reason": f"it holds all scores: --standard-to {o.standard_to}"}
            continue
        tables = 3 if cell["direction"] == "fwd" else 6
        if name in HOLDS_SCORES and tables * 4 * cell["heads"] * cell["seqlen"] ** 2 > memory_free():
            results[name] = {"status": "left out", "reason": "it holds all scores: too little memory"}
            continue
        try:
            answer = workers[name, cell["threads"]].ask({"do": "open", "cell": cell, "folder": folder, "rows": rows,
                                                         "file": file})
            error = np.abs(np.load(file) - value) / scale
            worst = float(error.max()) if np.isfinite(error).all() else math.inf
            if worst > TOLERANCE[cell["dtype"]]:
                results[name] = {"status": "wrong", "reason": f"error {worst:.2g} of the sum, allowed "
                                                              f"{TOLERANCE[cell['dtype']]:.2g}"}
                workers[name, cell["threads"]].ask({"do": "close"})
                continue
            results[name] = {"status": "ok", "seconds": answer["seconds"], "calls": 1, "error": worst,
                             "extra_bytes": answer["extra_bytes"]}
            if answer["note"]:
                results[name]["note"] = answer["note"]
        except Failed as e:
            results[name] = {"status": e.kind, "reason": str(e)}
    # A peer that is far behind by its first call is not worth many turns.
    running = [name for name in results if results[name]["status"] == "ok"]
    best = min((results[name]["seconds"] for name in running), default=0)
    racing = [name for name in running if results[name]["seconds"] < max(4 * best, 0.5)]
    longest = 0
    for turn in range(o.turns):
        start = time.monotonic()
        if turn >= 1 and start - begin + longest > seconds:
            break
        shift = turn % max(len(racing), 1)
        for name in racing[shift:] + racing[:shift]:
            # The threads of the one before go to sleep first.
            time.sleep(0.01 if cell["threads"] == 1 else 0.03)
            result = results[name]
            try:
                answer = workers[name, cell["threads"]].ask({"do": "turn", "seconds": o.turn})
            except Failed as e:
                results[name] = {"status": e.kind, "reason": str(e)}
                continue
            result["seconds"] = min(result["seconds"], answer["seconds"])
            result["calls"] += answer["calls"]
        racing = [name for name in racing if results[name]["status"] == "ok"]
        longest = max(longest, time.monotonic() - start)
    for name in running:
        if results[name]["status"] == "ok":
            results[name]["gflops"] = cell["flops"] / results[name]["seconds"] * 1e-9
            try:
                workers[name, cell["threads"]].ask({"do": "close"})
            except Failed:
                pass  # the next cell starts it again
    return results


# ---- Tables --------------------------------------------------------------------------------------------------------------

def short(value, digits=3):
    """About so many significant digits, never an exponent."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def size(value):
    if value is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024


WORD = {"missing": "missing", "unsupported": "-", "wrong": "WRONG", "failed": "FAILED", "left out": "."}


def print_rows(rows, out):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        out((" ".join(text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths)))).rstrip())


def labels(cell):
    heads = f"{cell['heads']}/{cell['kv_heads']}"
    return [cell["direction"], cell["dtype"], str(cell["head_dim"]), heads, str(cell["seqlen"]),
            "causal" if cell["causal"] else "none", str(cell["threads"])]


LABELS = ["pass", "type", "dim", "heads", "seqlen", "mask", "thr"]


def order(entry):
    cell = entry["cell"]
    return (DIRECTIONS.index(cell["direction"]), cell["threads"], DTYPES.index(cell["dtype"]), cell["head_dim"],
            -cell["kv_heads"], cell["heads"], cell["causal"], cell["seqlen"])


def report(race, out):
    """All tables, line by line, to out()."""
    done = sorted(race["cells"], key=order)
    names = [name for name in race["peers"] if name != "qkv"]
    others = [name for name in names if not name.startswith("qkv")]
    if not done:
        out("no cell was run")
        return
    out(f"{race['machine']['cpu']}, {race['date']}, commit {race['machine']['commit']}")
    for name, peer in race["peers"].items():
        out(f"  {name:13} {peer.get('version') or peer.get('missing') or 'left out'}")
    out("")
    out("Time of qkv / time of the peer: below 1 qkv is faster. ms and GFLOP/s are qkv's; hidden pairs do not count.")
    out("")
    rows = [LABELS + ["ms", "GFLOP/s"] + names]
    for entry in done:
        mine = entry["results"]["qkv"]
        line = labels(entry["cell"])
        ok = mine["status"] == "ok"
        line += [short(mine["seconds"] * 1e3), f"{mine['gflops']:.0f}"] if ok else ["", WORD[mine["status"]]]
        for name in names:
            peer = entry["results"][name]
            both = mine["status"] == peer["status"] == "ok"
            line.append(f"{mine['seconds'] / peer['seconds']:.2f}" if both else
                        "ok" if peer["status"] == "ok" else WORD[peer["status"]])
        rows.append(line)
    print_rows(rows, out)

    fast = [e for e in done if e["results"].get("qkv-fast", {}).get("status") == "ok"]
    if fast and others:
        out("")
        out("bf16 with QKV_FAST: time of qkv-fast / time of the peer.")
        out("")
        rows = [LABELS + ["ms", "GFLOP/s"] + others]
        for entry in fast:
            mine = entry["results"]["qkv-fast"]
            line = labels(entry["cell"]) + [short(mine["seconds"] * 1e3), f"{mine['gflops']:.0f}"]
            for name in others:
                peer = entry["results"][name]
                line.append(f"{mine['seconds'] / peer['seconds']:.2f}" if peer["status"] == "ok" else WORD[peer["status"]])
            rows.append(line)
        print_rows(rows, out)

    # Memory hardly depends on threads and masks: one line for each shape and type.
    out("")
    out("Extra memory of a call, beyond inputs and result (ggml's mask is counted).")
    out("")
    rows = [LABELS[:-1] + ["qkv"] + names]
    for entry in done:
        cell = entry["cell"]
        if cell["threads"] == done[0]["cell"]["threads"]:
            results = [entry["results"][name] for name in ("qkv", *names)]
            rows.append(labels(cell)[:-1] +
                        [size(r["extra_bytes"]) if r["status"] == "ok" else WORD[r["status"]] for r in results])
    print_rows(rows, out)

    out("")
    out("Summary. Ahead: the best qkv of the cell (qkv-fast for bf16) needs less time than the peer.")
    out("")
    rows = [["peer", "ahead", "of", "ratio, mean", "best", "worst", "largest error: f32", "bf16", "f16"]]
    behind = []
    for name in race["peers"]:
        ratios, errors = [], {dtype: 0 for dtype in DTYPES}
        for entry in done:
            peer = entry["results"][name]
            if peer["status"] != "ok":
                continue
            errors[entry["cell"]["dtype"]] = max(errors[entry["cell"]["dtype"]], peer["error"])
            mine = [entry["results"][x]["seconds"] for x in ("qkv", "qkv-fast")
                    if entry["results"].get(x, {}).get("status") == "ok"]
            if mine and name in others:
                ratios.append(min(mine) / peer["seconds"])
                if ratios[-1] >= 1:
                    behind.append((ratios[-1], name, entry["cell"]))
        line = [name] + [""] * 5
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            line = [name, str(sum(r < 1 for r in ratios)), str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}",
                    f"{max(ratios):.2f}"]
        rows.append(line + [f"{errors[dtype]:.1e}" if errors[dtype] else "" for dtype in DTYPES])
    print_rows(rows, out)
    out("")
    out("Errors are |result - float64| / sum p|v| (of gradients: the like), over the rows that were compared.")

    if behind:
        out("")
        out(f"Not ahead in {len(behind)}:")
        for ratio, name, cell in sorted(behind, key=lambda b: -b[0])[:20]:
            out(f"  {ratio:5.2f}  {name:12} {name_of(cell)}")
        if len(behind) > 20:
            out(f"  and {len(behind) - 20} more")

    reasons = {}
    for entry in done:
        for name, result in entry["results"].items():
            if result["status"] not in ("ok", "missing", "left out"):
                reasons.setdefault((name, result["status"], result["reason"]), []).append(entry["cell"])
    if reasons or race["not_run"]:
        out("")
        out("No number:")
        for (name, status, reason), cells in reasons.items():
            where = f"{len(cells)} cells" if len(cells) > 1 else name_of(cells[0])
            out(f"  {name:12} {status}: {reason} ({where})")
        for cell in race["not_run"]:
            out(f"  {'all':12} not run, no time left: {name_of(cell)}")
    out("")
    out("Marks: - not supported, . left out (all scores at a time), missing not installed.")


# ---- Chart ---------------------------------------------------------------------------------------------------------------

STYLE = {"qkv": ("#0072b2", 7), "qkv-fast": ("#56b4e9", 7), "qkv-standard": ("#0072b2", 6), "torch-flash": ("#d55e00", 9),
         "torch-math": ("#d55e00", 8), "torch-flex": ("#e69f00", 11), "onnxruntime": ("#009e73", 5), "ggml": ("#cc79a7", 13),
         "numpy": ("#666666", 4)}


def gnuplot(race, path, direction):
    """GFLOP/s over the length: a panel for each type, head dim and mask of the first heads and threads."""
    first = next(e["cell"] for e in sorted(race["cells"], key=order) if e["cell"]["direction"] == direction)
    chosen = [e for e in race["cells"]
              if all(e["cell"][x] == first[x] for x in ("direction", "threads", "heads", "kv_heads"))]
    types = [t for t in DTYPES if any(e["cell"]["dtype"] == t for e in chosen)]
    columns = sorted({(e["cell"]["head_dim"], e["cell"]["causal"]) for e in chosen})
    lengths = sorted({e["cell"]["seqlen"] for e in chosen})
    shown = [name for name in race["peers"]
             if any(e["results"][name]["status"] == "ok" for e in chosen)]
    rates = [r["gflops"] for e in chosen for r in e["results"].values() if r["status"] == "ok"]
    if not rates:
        return None
    low, high = min(rates) * 0.8, max(rates) * 1.25
    lines, panels = [], []
    for row, dtype in enumerate(types):
        for column, (dim, causal) in enumerate(columns):
            plots = []
            for name in shown:
                points = sorted((e["cell"]["seqlen"], e["results"][name]["gflops"]) for e in chosen
                                if (e["cell"]["dtype"], e["cell"]["head_dim"], e["cell"]["causal"]) == (dtype, dim, causal)
                                and e["results"][name]["status"] == "ok")
                if points:
                    block = f"$d{len(panels)}_{len(plots)}"
                    lines += [f"{block} << EOD"] + [f"{x} {y:.6g}" for x, y in points] + ["EOD"]
                    colour, point = STYLE[name]
                    dash = 2 if name in STANDARD else 1
                    plots.append(f"{block} with linespoints lw 2 ps 0.7 pt {point} dt {dash} lc rgb '{colour}' notitle")
            panels.append((row, column, f"{dtype}, head_dim {dim}, {'causal' if causal else 'no mask'}", plots))
    width, height = max(70 + 280 * len(columns), 960), 120 + 210 * len(types)
    kind = "svg" if str(path).endswith(".svg") else "pngcairo"
    font = "font 'Helvetica,12' background rgb 'white'" if kind == "svg" else "font 'Sans,10'"
    title = (f"GFLOP/s of attention{', backward' * (direction == 'bwd')}, {first['heads']}/{first['kv_heads']} heads, "
             f"{first['threads']} thread{'s' * (first['threads'] > 1)}: {race['machine']['cpu']}").replace("'", "")
    top, bottom, left = 50 / height, 70 / height, 60 / width
    lines += [f"set terminal {kind} size {width},{height} {font}", f"set output '{str(path)}'",
              "set multiplot", f"set label 1 '{title}' at screen 0.5,{1 - 18 / height:.4f} center noenhanced font ',14'",
              "set logscale x 2", "set logscale y 10", f"set xrange [{lengths[0] / 1.3}:{lengths[-1] * 1.3}]",
              f"set yrange [{low:.4g}:{high:.4g}]", "set border 3 lc rgb '#444444'",
              "set grid lc rgb '#dddddd' lt 1", "set ytics nomirror add (20, 50, 200, 500, 2000)",
              "set xtics nomirror (" + ", ".join(f"'{x // 1024}k' {x}" if x % 1024 == 0 else str(x) for x in lengths) + ")"]
    w, h = (1 - left - 10 / width) / len(columns), (1 - top - bottom) / len(types)
    for row, column, name, plots in panels:
        if plots:
            x, y = left + column * w, 1 - top - (row + 1) * h
            lines += [f"set lmargin at screen {x:.4f}", f"set rmargin at screen {x + w * 0.88:.4f}",
                      f"set bmargin at screen {y + h * 0.12:.4f}", f"set tmargin at screen {y + h * 0.86:.4f}",
                      f"set title '{name}' offset 0,-0.6 noenhanced", "plot " + ", ".join(plots), "unset label 1"]
    lines += ["unset title", "unset border", "unset tics", "unset grid", "unset xlabel", "set yrange [1:10]",
              f"set lmargin at screen {left:.4f}", "set rmargin at screen 0.99", "set bmargin at screen 0.005",
              f"set tmargin at screen {52 / height:.4f}", "set key center center horizontal reverse Left noenhanced",
              "plot " + ", ".join(f"0 with linespoints lw 2 ps 0.7 pt {STYLE[n][1]} dt {2 if n in STANDARD else 1} "
                                  f"lc rgb '{STYLE[n][0]}' title '{n}'" for n in shown), "unset multiplot", "unset output"]
    return "\n".join(lines) + "\n"


def draw(race, path):
    """The backward pass beside a forward one gets a chart of its own, whose name ends in -bwd."""
    if not race["cells"] or not shutil.which("gnuplot"):
        say("race: no chart: " + ("no cell was run" if not race["cells"] else "there is no gnuplot"))
        return
    for number, direction in enumerate(d for d in DIRECTIONS if any(e["cell"]["direction"] == d for e in race["cells"])):
        path = pathlib.Path(path)
        file = path if number == 0 else path.with_stem(f"{path.stem}-{direction}")
        script = gnuplot(race, file, direction)
        if script is None:
            continue
        done = subprocess.run(["gnuplot", "-"], input=script, text=True, capture_output=True)
        if done.returncode != 0:
            say(f"race: gnuplot could not draw {file}: {done.stderr.strip()}")


# ---- Files ---------------------------------------------------------------------------------------------------------------

def write_json(race, path):
    """One cell a line."""
    head = {name: value for name, value in race.items() if name != "cells"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n'
    text += ",\n".join("  " + json.dumps(entry) for entry in sorted(race["cells"], key=order)) + "\n ]\n}\n"
    pathlib.Path(path).write_text(text)


def saved_name(race):
    cpu = re.sub(r"\((R|TM)\)|, stepping \d+", "", race["machine"]["cpu"])
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")
    backward = "backward-" * all(e["cell"]["direction"] == "bwd" for e in race["cells"])
    return ROOT / "bench" / "results" / f"peers-{backward}{cpu}-{race['date'][:10]}.json"


# ---- The race ------------------------------------------------------------------------------------------------------------

def race(o, python):
    sys.path.insert(0, str(HERE))
    library = next((p for p in (BUILD / "src" / "libqkv.so", BUILD / "src" / "libqkv.dylib") if p.exists()), None)
    if library is None:
        die("there is no build/src/libqkv.so; ./run bench --peers builds it")
    options = {"qkv": str(library), "executor": str(executor()), "ggml": o.ggml and str(pathlib.Path(o.ggml).resolve())}
    cells = sorted(grid(o), key=lambda c: c["flops"])
    workers = {(name, t): Worker(python, name, t, options) for name in o.peers for t in {c["threads"] for c in cells}}
    result = {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "machine": machine(),
              "load": os.getloadavg()[0], "seed": o.seed, "budget": o.budget, "peers": {name: {} for name in o.peers},
              "not_run": [], "cells": []}
    if result["load"] > 0.5:
        say(f"race: this machine has other work to do (load {result['load']:.1f}): the numbers will not be its best")
    say(f"race: {len(cells)} cells, {len(o.peers)} peers, about {o.budget:.0f} s")
    begin, known = time.monotonic(), {}
    try:
        for worker in workers.values():
            worker.ready()
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            for number, cell in enumerate(cells):
                left = begin + o.budget - time.monotonic()
                # The last cells are the longest ones and may go a little over.
                if left < -0.1 * o.budget:
                    result["not_run"] = cells[number:]
                    break
                # Each cell may take its share of the time that is left. Long cells get fewer turns than short ones.
                share = cell["flops"] ** 0.7 / sum(c["flops"] ** 0.7 for c in cells[number:])
                results = run_cell(cell, o, workers, folder, max(left, 0) * share, known)
                result["cells"].append({"cell": cell, "results": results})
                say(f"[{number + 1}/{len(cells)}] {name_of(cell)}: " + ", ".join(
                    f"{name} {short(r['seconds'] * 1e3)} ms" for name, r in results.items() if r["status"] == "ok"))
    except KeyboardInterrupt:
        say("race: stopped; what follows has the cells that are complete")
        result["not_run"] = cells[len(result["cells"]):]
    for worker in workers.values():
        if worker.version:
            result["peers"][worker.name]["version"] = worker.version
        if worker.missing:
            result["peers"][worker.name]["missing"] = worker.missing
        worker.stop()
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result


def main():
    o = parse(sys.argv[1:])
    if pathlib.Path(sys.prefix).resolve() != VENV.resolve():
        python = prepare()
        os.execve(python, [str(python), str(HERE / "race.py"), *sys.argv[1:]], clean_environment())
    WORK.mkdir(parents=True, exist_ok=True)
    for log in WORK.glob("*.log"):
        log.unlink()
    result = race(o, VENV / "bin" / "python")
    lines = []
    report(result, lines.append)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (WORK / "race.txt").write_text(text)
    files = [WORK / "race.json", *o.json]
    if o.save:
        files.append(saved_name(result))
        files[-1].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_json(result, file)
    for picture in [WORK / "race.svg", *o.plot]:
        draw(result, picture)
    say(f"race: {result['seconds']:.0f} s; " + ", ".join(os.path.relpath(f) for f in [WORK / "race.txt", *files,
                                                                                  WORK / "race.svg", *o.plot]))
    wrong = any(r["status"] in ("wrong", "failed") for e in result["cells"] for n, r in e["results"].items()
                if n.startswith("qkv"))
    sys.exit(1 if wrong or not result["cells"] else 0)


if __name__ == "__main__":
    main()

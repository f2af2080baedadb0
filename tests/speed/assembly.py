"""Looks at the machine code of the tiles: the loops that do the work must hold their accumulators in registers and call
nothing.

usage: assembly.py OBJDUMP COMPILE_COMMANDS [COMPILER]

The objects are those of the build that wrote the JSON file; with COMPILER, its commands are run anew with that compiler.
Looked at are the innermost loops of the kernels below that have at least the multiply-adds of one step of the widest tile. A
vector moved to or from the stack inside such a loop is a spill. Fails, too, if a kernel has no such loop."""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

# Kernels, and the least multiply-adds of a loop: one step is 8 rows x 2 vectors for AVX-512, 4 x 3 for AVX2.
KERNELS = {
    "avx512": (16, ["k_qk", "k_pv", "k_qk_exp_64", "k_qk_exp_128"]),
    "avx2": (12, ["k_qk", "k_pv"]),
}
# Spills that are let through, as a share of a loop's multiply-adds: the constants of exp2 beside the products need more
# registers than there are.
LET_THROUGH = {("avx512", "k_qk_exp_64"): 1 / 8}

LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
SYMBOL = re.compile(r"^[0-9a-f]+ <([^>]+)>:$")
TARGET = re.compile(r"^([0-9a-f]+)(\s|$)")
STACK = re.compile(r"\((%rsp|%rbp)[,)]")
VECTOR = re.compile(r"%[xyz]mm")


def functions(objdump, path):
    """Name -> [(address, mnemonic, operands)]."""
    text = subprocess.run([objdump, "-d", "--no-show-raw-insn", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    result, now = {}, None
    for line in text.splitlines():
        symbol, instruction = SYMBOL.match(line), LINE.match(line)
        if symbol:
            now = result.setdefault(symbol.group(1), [])
        elif instruction and now is not None:
            now.append((int(instruction.group(1), 16), instruction.group(2), instruction.group(3)))
    return result


def loops(code):
    """The innermost loops: from the target of a jump back to the jump, with no other such jump between."""
    at = {address: i for i, (address, _, _) in enumerate(code)}
    back = []
    for i, (address, name, operands) in enumerate(code):
        target = TARGET.match(operands) if name.startswith("j") else None
        if target and int(target.group(1), 16) <= address and int(target.group(1), 16) in at:
            back.append((at[int(target.group(1), 16)], i))
    return [code[a : b + 1] for a, b in back if not any(a <= c and d < b for c, d in back)]


def is_spill(name, operands, frame):
    # %rbp is a register like others unless the function sets it up as its frame.
    place = STACK.search(operands)
    return bool(place) and VECTOR.search(operands) and (place.group(1) == "%rsp" or frame)


def compile_anew(command, folder, compiler, to):
    words = list(command)
    words[0] = compiler
    words[words.index("-o") + 1] = to
    subprocess.run(words, check=True, cwd=folder)
    return to


def check(objdump, isa, compiler, path):
    """The number of kernels that failed."""
    least, kernels = KERNELS[isa]
    code, failures = functions(objdump, path), 0
    for kernel in kernels:
        # A compiler may split a function into parts or clones: k_qk.part.0, k_qk.constprop.0
        parts = [body for name, body in code.items() if name == kernel or name.startswith(kernel + ".")]
        limit = LET_THROUGH.get((isa, kernel), 0)
        found, most, spills, calls, bad = 0, 0, 0, 0, []
        for body in parts:
            frame = any(name == "mov" and operands == "%rsp,%rbp" for _, name, operands in body)
            for loop in loops(body):
                fmas = sum(name.startswith("vfmadd") for _, name, _ in loop)
                if fmas < least:
                    continue
                found += 1
                most = max(most, fmas)
                spilled = [line for line in loop if is_spill(line[1], line[2], frame)]
                called = [line for line in loop if line[1].startswith("call")]
                spills += len(spilled)
                calls += len(called)
                bad += called + (spilled if len(spilled) > limit * fmas else [])
        good = found > 0 and not bad
        failures += not good
        for address, name, operands in bad:
            print(f"{compiler} {isa} {kernel}: {address:x}: {name} {operands}")
        print(f"{compiler} {isa} {kernel}: {found} loops of {least} or more multiply-adds (the largest has {most}), "
              f"{spills} spills, {calls} calls{'' if good else ': FAILED'}")
    return failures


def main():
    objdump, commands, *compiler = sys.argv[1:]
    with open(commands, encoding="utf-8") as file:
        commands = json.load(file)
    failures = checked = 0
    with tempfile.TemporaryDirectory() as folder:
        for isa, (_, kernels) in KERNELS.items():
            for entry in commands:
                command = shlex.split(entry["command"])
                output = command[command.index("-o") + 1]
                if f"qkv_kernel_{isa}_f32.dir" not in output:
                    continue
                path = os.path.join(entry["directory"], output)
                if compiler:
                    path = compile_anew(command, entry["directory"], compiler[0], os.path.join(folder, isa + ".o"))
                name = os.path.basename(compiler[0] if compiler else command[0])
                failures += check(objdump, isa, "clang" if "clang" in name else "gcc", path)
                checked += len(kernels)
    print(f"{checked - failures} passed, {failures} failed")
    return failures != 0 or checked == 0


if __name__ == "__main__":
    sys.exit(main())

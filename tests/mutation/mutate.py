#!/usr/bin/env python3
"""Plants faults into copies of the library, one at a time, and demands that the tests find each of them.

    mutate.py --build BUILD --source SOURCE --work DIR [--short] [--only NAME] [--list]

BUILD is a built tree with the tests and compile_commands.json. A fault is a replacement of text that must occur exactly
once in its file; only the objects that it concerns are compiled again, linked with the others of BUILD into another libqkv,
and the test programs run with that one preloaded. A fault that no test finds makes the exit status 1, and so does one
whose text is not there any more: then the list below needs care.
"""
import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

KERNEL = ["kernel_portable_f32"]  # the template once: its instances are compared with the scalar reference
CHECKS = ["digest", "named", "mask", "errors", "relations", "threads", "generator"]  # fastest first
BACKWARD = ["backward/test_backward_" + name for name in ("digest", "named", "dropout", "errors", "relations", "threads", "generator")]


class Fault:
    """Text `old` of `file`, with any white space between its words, becomes `new`. units: parts of names of objects to
    compile again; none: that of the file. isa: a flag of /proc/cpuinfo without which the fault cannot run. short: part of
    the quick run. checks: the programs that are to find it, the fastest first."""

    def __init__(self, name, file, old, new, units=None, isa=None, short=False, checks=None):
        self.name, self.file, self.old, self.new = name, file, old, new
        self.units, self.isa, self.short = units, isa, short
        self.checks = checks or ["test_" + name for name in CHECKS]


F = Fault


def B(name, *arguments, **options):
    return Fault("backward: " + name, *arguments, checks=BACKWARD, **options)


FAULTS = [
    # ---- softmax and states
    F("alpha by one unit in the last place", "kernel/kernel.inc",
      "const vf al = v_exp2(v_sub(v_load(mp), z));",
      "const vf al = v_mul(v_exp2(v_sub(v_load(mp), z)), v_set1((real)(1 + 0x1p-23)));", KERNEL, short=True),
    F("the same beside products", "kernel/kernel.inc",
      "v_store((real *)alpha + c * VL, v_exp2(v_sub(v_load((real *)m + c * VL), zz)));",
      ("v_store((real *)alpha + c * VL, v_mul(v_exp2(v_sub(v_load((real *)m + c * VL), zz)), "
       "v_set1((real)(1 + 0x1p-23))));"), ["kernel_avx512_f32"], isa="avx512f"),
    F("the guard z of a row without a maximum", "kernel/kernel.inc",
      "z = v_select(v_eq(to, v_set1(NEG_INF)), v_zero(), to); const vf al",
      "z = to; const vf al", KERNEL, short=True),
    F("l rounded before it is added", "kernel/kernel.inc",
      "v_store(lp, v_fma(v_load(lp), al, exp_column((real *)S + c * VL, nv * VL, runs, z)));",
      "v_store(lp, v_add(v_mul(v_load(lp), al), exp_column((real *)S + c * VL, nv * VL, runs, z)));", KERNEL),
    F("reciprocal instead of division", "kernel/kernel.inc",
      "v_add(v_div(x, ll), v_zero())",
      "v_add(v_mul(x, v_div(v_set1(1), ll)), v_zero())", KERNEL, short=True),
    F("sink twice", "kernel/kernel.inc",
      "ll = v_fma(ll, a, v_exp2(v_sub(s2, z)));",
      "ll = v_add(v_fma(ll, a, v_exp2(v_sub(s2, z))), v_exp2(v_sub(s2, z)));", KERNEL, short=True),
    F("sink without rescaling O", "kernel/kernel.inc", "if (sink2) x = v_mul(x, a);", "", KERNEL),
    F("an empty row divided", "kernel/kernel.inc",
      "v_store(o, v_select(empty, v_zero(), v_add(v_div(x, ll), v_zero())));",
      "v_store(o, v_add(v_div(x, ll), v_zero()));", KERNEL),
    F("merge towards the lower maximum", "kernel/kernel.inc",
      "v_or(v_andnot(eb, v_gt(mB, ma)), ea)",
      "v_or(v_andnot(eb, v_gt(ma, mB)), ea)", KERNEL, short=True),
    F("a coefficient of exp2", "base/order1.h", "X(0x1.c6af7cp-5f)", "X(0x1.c6af7ep-5f)", KERNEL),
    F("the smallest weight", "base/order1.h",
      "#define QKV_EXP2_MIN_F32 (-125.f)",
      "#define QKV_EXP2_MIN_F32 (-124.f)", KERNEL),
    F("the range of tanh", "base/order1.h", "#define QKV_TANH_MAX_F32 8.f", "#define QKV_TANH_MAX_F32 7.f", KERNEL),
    F("lse in two products", "attention/panel.c",
      "(m + qkv__log2_64(l)) * QKV_LN2",
      "(m * QKV_LN2 + qkv__log2_64(l) * QKV_LN2)"),
    # ---- tree
    F("order of merges", "attention/tree.c",
      ("qkv__tree_ancestor(t->stack[t->depth - 2].at, t->stack[t->depth - 1].at) < qkv__tree_ancestor("
       "t->stack[t->depth - 1].at, n.at)"),
      ("qkv__tree_ancestor(t->stack[t->depth - 2].at, t->stack[t->depth - 1].at) < 0 * qkv__tree_ancestor("
       "t->stack[t->depth - 1].at, n.at)"), short=True),
    F("merges as early as possible", "attention/tree.c",
      ("qkv__tree_ancestor(t->stack[t->depth - 2].at, t->stack[t->depth - 1].at) < qkv__tree_ancestor("
       "t->stack[t->depth - 1].at, n.at)"),
      ("qkv__tree_ancestor(t->stack[t->depth - 2].at, t->stack[t->depth - 1].at) < 99 + qkv__tree_ancestor("
       "t->stack[t->depth - 1].at, n.at)")),
    F("splits by index instead of position", "attention/flash.c",
      "qkv__position_of_key(e, now->key) / QKV_SPLIT",
      "now->key / QKV_SPLIT"),
    F("sibling of a node", "attention/state.c", "now.index & 1 ? i - 1 : i;", "now.index & 1 ? i : i;"),
    # ---- scores
    F("a tail key", "kernel/kernel.inc",
      "for (; j < to; j++) qk_tile(1,",
      "for (; j + 1 < to; j++) qk_tile(1,", KERNEL, short=True),
    F("a tail column of V", "kernel/kernel.inc",
      "for (; x < dv; x++) pv_tile(1,",
      "for (; x + 1 < dv; x++) pv_tile(1,", KERNEL),
    F("a tail feature of Q", "kernel/kernel.inc",
      "? ((const real *)rows)[(i0 + i) * ld + x] * (real)c : 0;",
      "&& x + 1 < d ? ((const real *)rows)[(i0 + i) * ld + x] * (real)c : 0;", KERNEL),
    F("bias does not saturate", "kernel/kernel.inc",
      "t = v_select(v_gt(t, max), max, v_select(v_gt(min, t), min, t));",
      "", KERNEL),
    F("bias by fma", "kernel/kernel.inc", "s = v_add(s, t);", "s = v_fma(b, v_set1((real)QKV_LOG2E), s);", KERNEL),
    F("distance off by one", "kernel/kernel.inc", "(a->key_position + j));", "(a->key_position + j + 1));", KERNEL),
    F("ALiBi rounded twice", "kernel/kernel.inc",
      "s = v_fma(v_sub(v_zero(), v_load((const real *)a->slope2 + c * VL)), v_loadu(distance), s);",
      "s = v_sub(s, v_mul(v_load((const real *)a->slope2 + c * VL), v_loadu(distance)));", KERNEL),
    F("slopes by the key-value head", "attention/panel.c",
      "qkv__parameter(&p->alibi_slopes, e->b, t->head)",
      "qkv__parameter(&p->alibi_slopes, e->b, kv_head)"),
    F("wrong map of grouped heads", "attention/panel.c",
      "t->head = kv_head * g->p->group + (f + lane) / e->nq;",
      "t->head = kv_head + (f + lane) / e->nq * g->p->p.num_kv_heads;", short=True),
    # ---- values that are not finite
    F("NaN beside an invisible slot", "kernel/kernel.inc", "return rest == 0;", "return 1;", KERNEL, short=True),
    F("selection without effect", "kernel/kernel.inc",
      "acc[i][c] = v_select(seen, v_fma(v_set1(Vp[j * ldv + i]), p, acc[i][c]), acc[i][c]);",
      ("acc[i][c] = v_select(seen, v_fma(v_set1(Vp[j * ldv + i]), p, acc[i][c]), v_fma(v_set1(Vp[j * ldv + "
       "i]), p, acc[i][c]));"), KERNEL),
    F("-inf of a bias not hidden", "attention/panel.c", "bits[j] &= ~((uint64_t)1 << i);", "bits[j] &= ~(uint64_t)0;"),
    # ---- masks
    F("causal off by one", "mask/causal.c",
      "return qkv__mask_band(r, key, keys, INT64_MIN / 4, diagonal(m, r), bits);",
      "return qkv__mask_band(r, key, keys, INT64_MIN / 4, diagonal(m, r) - 1, bits);", short=True),
    F("causal skips the last key", "mask/causal.c",
      "<= diagonal(m, r) + r->rows - 1",
      "< diagonal(m, r) + r->rows - 1"),
    F("window off by one", "mask/window.c",
      "INT64_MIN / 4 : position - m->a;",
      "INT64_MIN / 4 : position - m->a + 1;", short=True),
    F("window skips too far", "mask/window.c",
      "QKV_MAX(low, qkv__position_of_key(r->e, key))",
      "QKV_MAX(low + 1, qkv__position_of_key(r->e, key))"),
    F("prefix off by one", "mask/prefix.c", "first + k < m->a ?", "first + k <= m->a ?"),
    F("a full tile that is not", "mask/mask.c",
      "if (low + rows - 1 <= first && last <= high)",
      "if (low <= first && last <= high)"),
    F("or that is and", "mask/mask.c", "bits[k] |= more[k];", "bits[k] &= more[k];", short=True),
    F("and that is or", "mask/mask.c", "bits[k] &= more[k];", "bits[k] |= more[k];"),
    F("dense bytes compared with 1", "mask/dense.c",
      "(byte[i * m->t.stride[2]] != 0)",
      "(byte[i * m->t.stride[2]] == 1)"),
    F("a query without a key has a document", "mask/document.c",
      "if (key < e->b0 || key >= e->b1) return 0;",
      "if (key < e->b0 || key >= e->b1) key = e->b0;"),
    F("a run of visible keys cut", "attention/panel.c",
      "runs->run[n - 1].to = QKV_MIN(j + 8, keys);",
      "runs->run[n - 1].to = QKV_MIN(j + 7, keys);"),
    # ---- shapes
    F("rows beyond q_length", "attention/panel.c",
      "if (p->lse.data) store_lse(g, e, h, i, (double)-INFINITY);",
      "if (p->lse.data) store_lse(g, e, h, i, 0);"),
    F("column stride of staged rows", "stage/stage.c", "t[x] = convert(f[x * cs]);", "t[x] = convert(f[x]);"),
    F("a length is not checked", "problem/check.c", "p->kv_length[b] > keys)", "p->kv_length[b] > keys + 1)"),
    F("an overlap is not checked", "problem/tensor.c",
      "if (a1 <= b0 || b1 <= a0) return QKV_OK;",
      "if (a0 <= a1) return QKV_OK;"),
    # ---- floating-point state
    F("tasks in the state of the executor's thread", "base/run.c",
      "qkv__fp_enter(&fp);\n  j->body",
      "fp.csr = 0x1f80;\n  j->body", isa="sse2"),
    F("flags not restored", "base/fpstate.h",
      "if (_mm_getcsr() != s->csr) _mm_setcsr(s->csr);",
      "(void)s;", ["core.dir"], isa="sse2"),
    # ---- the scalar text itself
    F("reference: block sums in one chain", "reference/reference.c",
      "n->l = FMA(n->l, al, L);",
      "n->l = n->l * al + L;", ["reference_f32"]),
    F("reference: tree", "reference/reference.c",
      "for (; t->count >> up & 1; up++)",
      "for (; t->count >> up & 1 && up < 1; up++)", ["reference_f32"]),
    F("standard: sums of blocks", "attention/standard.c",
      "qkv__fill(g, at.w.one, at.w.panel.w, 1);",
      "qkv__fill(g, at.w.one, at.w.panel.w, 0.5);"),
    # ---- gradients
    B("delta without dlse", "attention/gradient.c",
      "((float *)q->delta)[i] -= (float)value_of(j, dlse, e, q->head, q->row + i);", ";", short=True),
    B("delta from v instead of out", "attention/gradient.c",
      "load_rows(j, w->rows, dv, &p->out, e->batch_q,", "load_rows(j, w->rows, dv, &j->to->g.dout, e->batch_q,"),
    B("a weight above 1", "kernel/backward.inc",
      "v_exp2(v_min0(v_sub(s, L2)))", "v_exp2(v_sub(s, L2))", KERNEL),
    B("a weight above 1 in a full tile", "kernel/backward.inc",
      "v_store(S, v_exp2(v_min0(v_sub(v_load(S), L2))));", "v_store(S, v_exp2(v_sub(v_load(S), L2)));", KERNEL),
    B("rows that see nothing", "kernel/backward.inc",
      "v_select(none, v_zero(), v_exp2(v_min0(v_sub(s, L2))))", "v_exp2(v_min0(v_sub(s, L2)))", KERNEL),
    B("dP by two roundings", "kernel/backward.inc", "t = v_fma(t, r, minus);", "t = v_add(v_mul(t, r), minus);", KERNEL),
    B("slope of the cap by two roundings", "kernel/backward.inc",
      "v_fma(v_sub(v_zero(), T), T, v_set1(1))", "v_sub(v_set1(1), v_mul(T, T))", KERNEL),
    B("slope of the cap left out", "attention/gradient.c",
      "v->grade.before_cap = before_cap;", "v->grade.before_cap = 0;", short=True),
    B("bias behind the slope of the cap", "attention/gradient.c", "weights(j, e, q, k, 0, &t, w);", "weights(j, e, q, k, 1, &t, w);"),
    B("weights of hidden keys", "kernel/backward.inc",
      "weight = where_seen(a, j, c, w, weight, v_zero());", "", KERNEL, short=True),
    B("scores of hidden keys", "kernel/backward.inc", "x = where_seen(a, j, c, w, x, v_zero());", "", KERNEL),
    B("kept weights not scaled", "kernel/backward.inc",
      "v_select(kept, v_mul(P, r), v_zero())", "v_select(kept, P, v_zero())", KERNEL),
    B("dropped weights in dv", "kernel/backward.inc", "weight = v_select(kept, v_mul(P, r), v_zero());", "weight = v_mul(P, r);", KERNEL),
    B("dropped weights in dP", "kernel/backward.inc", "t = v_select(kept, t, minus);", "", KERNEL),
    B("dropout without the origin of heads", "problem/problem.h",
      "(uint64_t)p->head_origin + (uint64_t)h", "(uint64_t)h", ["attention/gradient.c"]),
    B("dropout by index instead of position", "attention/gradient.c",
      "position[i] = (uint32_t)(e->position_q + q->row + row + i);", "position[i] = (uint32_t)(q->row + row + i);"),
    B("products of hidden keys", "kernel/backward.inc", "if (bits[key] >> row & 1)", "", KERNEL),
    B("a tail of rows", "kernel/backward.inc", "for (; i_ < to; i_++) call(1)", "for (; i_ + 1 < to; i_++) call(1)", KERNEL, short=True),
    B("a tail of features", "kernel/backward.inc",
      "for (; x < d; x++) { const real g", "for (; x + 1 < d; x++) { const real g", KERNEL),
    B("old values not added", "kernel/backward.inc", "t[x] = o ? o[x] + g : g;", "t[x] = g;", KERNEL),
    B("scale of dk in dv", "attention/backward.c",
      "b->dV, k->b.ldv, b->keys, k->p.p.head_dim_v, 1, w);", "b->dV, k->b.ldv, b->keys, k->p.p.head_dim_v, scale_of(k), w);", short=True),
    B("key blocks by index instead of position", "attention/backward.c",
      "const int64_t position = (first_block(e) + index) * QKV_BLOCK;",
      "const int64_t position = index * QKV_BLOCK + e->position_k;"),
    B("keys that do not exist", "attention/backward.c", "if (from == 0) store_dead_keys(k, &e, kv_head, w);", ""),
    B("rows that do not exist", "attention/backward.c", "if (with_dq) store_dead_rows(k, &e, kv_head, w);", ""),
    B("dbias of one head for all", "attention/backward.c",
      "hs = range_of(t->stride[1], head, p->num_heads); const int kept",
      "hs = {head, head + 1}; const int kept"),
    B("a wavefront that does not wait", "attention/backward.c",
      "(!chunk || QKV_LOAD_ACQUIRE(done - 1) > step)", "(!chunk || QKV_LOAD_ACQUIRE(done - 1) >= 0)"),
    B("an overlap of gradients is not checked", "problem/check.c",
      "for (int k = 0; k < i; k++) QKV_TRY(qkv__check_apart(r, &all[i], &all[k]));", ""),
    B("reference: dq in one chain", "reference/reference.c",
      "const int64_t at = e->position_k + j0 - e->b0, j1 = QKV_MIN(e->b1, j0 + QKV_BLOCK - at % QKV_BLOCK); real B[COLUMNS] = {0};",
      "const int64_t at = 0, j1 = at + e->b1; real B[COLUMNS] = {0};", ["reference_f32"]),
    B("reference: sign of dsinks", "reference/reference.c", "0 - total + 0);", "total + 0);", ["reference_f32"]),
]


def cpu_flags():
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return set(file.read().split())
    except OSError:
        return set()


class Tree:
    def __init__(self, build, source, work, cc):
        self.build, self.source, self.work, self.cc = build, source, work, cc
        with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
            entries = json.load(file)
        inside = os.path.join(source, "src") + os.sep
        self.units = {}
        for entry in entries:
            if entry["file"].startswith(inside):
                words = shlex.split(entry["command"])
                self.units[words[words.index("-o") + 1]] = entry
        if not self.units:
            sys.exit(f"mutate: {build}/compile_commands.json has no file of {inside}")
        self.copy = os.path.join(work, "src")

    def reset(self):
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(os.path.join(self.source, "src"), self.copy)

    def object_of(self, output):
        return os.path.join(self.build, output)

    def affected(self, fault):
        if fault.units:
            found = [o for o in self.units if any(u in o for u in fault.units)]
        else:
            found = [o for o, e in self.units.items() if e["file"].endswith("/src/" + fault.file)]
        return found

    def plant(self, fault):
        """The library with the fault; a text instead if that is not possible."""
        path = os.path.join(self.source, "src", fault.file)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        places = list(re.finditer(r"\s+".join(re.escape(word) for word in fault.old.split()), text))
        if len(places) != 1:
            return None, f"its text occurs {len(places)} times in src/{fault.file}"
        start, end = places[0].span()
        target = os.path.join(self.copy, fault.file)
        with open(target, "w", encoding="utf-8") as file:
            file.write(text[:start] + fault.new + text[end:])
        try:
            replaced = {}
            for number, output in enumerate(self.affected(fault)):
                entry = self.units[output]
                words = shlex.split(entry["command"])
                words = [w.replace(os.path.join(self.source, "src"), self.copy) for w in words]
                replaced[output] = os.path.join(self.work, f"object{number}.o")
                words[words.index("-o") + 1] = replaced[output]
                words.append("-w")
                done = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True)
                if done.returncode != 0:
                    return None, "it does not compile: " + done.stderr.strip()[:400]
            if not replaced:
                return None, "no object is made from it"
            library = os.path.join(self.work, "libqkv.so")
            words = shlex.split(self.cc) + ["-shared", "-Wl,-soname," + self.soname(), "-o", library]
            script = os.path.join(self.build, "libqkv.map")
            if os.path.exists(script):
                words.append("-Wl,--version-script=" + script)
            words += [replaced.get(o, self.object_of(o)) for o in self.units] + ["-lm"]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != 0:
                return None, "it does not link: " + done.stderr.strip()[:400]
            return library, None
        finally:
            shutil.copyfile(path, target)

    def soname(self):
        for name in sorted(os.listdir(os.path.join(self.build, "src"))):
            if name.startswith("libqkv.so.") and name.count(".") == 2:
                return name
        return "libqkv.so.0"

    def found_by(self, library, checks):
        """The first test that fails with this library, or None."""
        env = dict(os.environ, LD_PRELOAD=library, QKV_TEST_SCALE="40")
        for check in checks:
            program = os.path.join(self.build, "tests", check)
            try:
                done = subprocess.run([program], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=200)
            except subprocess.TimeoutExpired:
                return check + " (no end)"
            if done.returncode != 0:
                return check if done.returncode > 0 else f"{check} (signal {-done.returncode})"
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--short", action="store_true", help="a quick selection")
    parser.add_argument("--only", help="faults whose name contains this")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    faults = [f for f in FAULTS if (not options.short or f.short) and (not options.only or options.only in f.name)]
    if options.list:
        print("\n".join(f.name for f in faults))
        return 0
    os.makedirs(options.work, exist_ok=True)
    tree = Tree(os.path.abspath(options.build), os.path.abspath(options.source), os.path.abspath(options.work), options.cc)
    tree.reset()
    flags = cpu_flags()
    bad = 0
    # The same way without a fault: a red test here would make every fault look found.
    for checks in {tuple(f.checks[:4] if options.short else f.checks) for f in faults}:
        found = tree.found_by(os.path.join(tree.build, "src", tree.soname()), checks)
        if found is not None:
            sys.exit(f"mutate: {found} fails without any fault")
    for fault in faults:
        begin = time.time()
        if fault.isa and fault.isa not in flags:
            print(f"skipped  {fault.name}: no {fault.isa} here")
            continue
        library, why = tree.plant(fault)
        if library is None:
            print(f"STALE    {fault.name}: {why}")
            bad += 1
            continue
        test = tree.found_by(library, fault.checks[:4] if options.short else fault.checks)
        if test is None:
            print(f"MISSED   {fault.name}")
            bad += 1
        else:
            print(f"found    {fault.name}: {test}, {time.time() - begin:.1f} s")
        sys.stdout.flush()
    shutil.rmtree(tree.copy, ignore_errors=True)
    print(f"{len(faults)} faults planted, {bad} missed or stale")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes exact.h: values to compare with, computed to 60 digits and rounded once.

    python3 tests/position/make_exact.py > tests/position/exact.h

Needs mpmath. The scalings are those of the papers and of Hugging Face's
modeling_rope_utils, written down here once more.
"""
from mpmath import ceil, cos, floor, log, mp, mpf, pi, sin

mp.dps = 60
POSITIONS = [0, 1, 2, 7, 100, 1857, 4095, 65537, 1000000, 16777217, 2 ** 31 - 1, -1, -1000000, -2 ** 31]

def number(x):
    return float(x).hex()

def sines():
    """base, d, pair, position, sin, cos"""
    for base, d, pairs in ((10000, 128, (0, 1, 17, 63)), (500000, 128, (1, 31, 63)), (10000, 5, (0, 1, 2)),
                           (1000000, 2, (0,)), (2, 64, (3, 31))):
        for i in pairs:
            for p in POSITIONS:
                a = p * mpf(base) ** (-mpf(2 * i) / d)
                yield '{%g, %d, %d, %d, %s, %s}' % (base, d, i, p, number(sin(a)), number(cos(a)))

def plain(base, d):
    return [mpf(base) ** (-mpf(2 * i) / d) for i in range(d // 2)]

def linear(base, d, s):
    return [w / mpf(s) for w in plain(base, d)], 1

def ntk(base, d, s):
    return plain(base * mpf(s) ** (mpf(d) / (d - 2)), d), 1

def dynamic(base, d, s, l0, l):
    s = mpf(s) * max(l, l0) / l0 - (mpf(s) - 1)
    return plain(base * s ** (mpf(d) / (d - 2)), d), 1

def mscale(s, m=1):
    return 1 if s <= 1 else m * log(s) / 10 + 1

def yarn(base, d, s, l0, fast=32, slow=1, truncate=True, m=0, m_all=0):
    def dim(turns):
        return d * log(l0 / (turns * 2 * pi)) / (2 * log(base))
    low, high = dim(mpf(fast)), dim(mpf(slow))
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += mpf('0.001')
    out = []
    for i, w in enumerate(plain(base, d)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        out.append(w / mpf(s) * ramp + w * (1 - ramp))
    return out, mscale(mpf(s), mpf(m)) / mscale(mpf(s), mpf(m_all)) if m else mscale(mpf(s))

def llama3(base, d, s, l0, lo=1, hi=4):
    out = []
    for w in plain(base, d):
        length = 2 * pi / w
        if length < mpf(l0) / hi:
            out.append(w)
        elif length > mpf(l0) / lo:
            out.append(w / mpf(s))
        else:
            smooth = (l0 / length - mpf(lo)) / (mpf(hi) - mpf(lo))
            out.append((1 - smooth) * w / mpf(s) + smooth * w)
    return out, 1

# name, initialisers of qkv_frequencies, result
SCALINGS = [
    ('linear', '.scaling = QKV_ROPE_LINEAR, .rotary_dim = 128, .factor = 2.5', linear(10000, 128, 2.5)),
    ('linear, faster', '.scaling = QKV_ROPE_LINEAR, .rotary_dim = 8, .factor = 0x1p-10', linear(10000, 8, mpf(2) ** -10)),
    ('ntk', '.scaling = QKV_ROPE_NTK, .rotary_dim = 64, .factor = 4', ntk(10000, 64, 4)),
    ('dynamic', '.scaling = QKV_ROPE_DYNAMIC_NTK, .rotary_dim = 128, .factor = 2, .original_seqlen = 4096, .seqlen = 10000',
     dynamic(10000, 128, 2, 4096, 10000)),
    ('dynamic, short', '.scaling = QKV_ROPE_DYNAMIC_NTK, .rotary_dim = 80, .factor = 3, .original_seqlen = 4096, .seqlen = 100',
     dynamic(10000, 80, 3, 4096, 100)),
    ('yarn of Llama 2 at 16', '.scaling = QKV_ROPE_YARN, .rotary_dim = 128, .factor = 16, .original_seqlen = 4096',
     yarn(10000, 128, 16, 4096)),
    ('yarn of gpt-oss', '.scaling = QKV_ROPE_YARN, .rotary_dim = 64, .base = 150000, .factor = 32, .original_seqlen = 4096, '
     '.no_truncate = 1', yarn(150000, 64, 32, 4096, truncate=False)),
    ('yarn of DeepSeek-V3', '.scaling = QKV_ROPE_YARN, .rotary_dim = 64, .factor = 40, .original_seqlen = 4096, .mscale = 0.707, '
     '.mscale_all_dim = 1', yarn(10000, 64, 40, 4096, m=0.707, m_all=1)),
    ('yarn, other betas', '.scaling = QKV_ROPE_YARN, .rotary_dim = 96, .base = 1e6, .factor = 4, .original_seqlen = 32768, '
     '.beta_fast = 16, .beta_slow = 2', yarn(1000000, 96, 4, 32768, 16, 2)),
    ('yarn, short', '.scaling = QKV_ROPE_YARN, .rotary_dim = 64, .factor = 2, .original_seqlen = 100', yarn(10000, 64, 2, 100)),
    ('llama 3.1', '.scaling = QKV_ROPE_LLAMA3, .rotary_dim = 128, .base = 500000, .factor = 8, .original_seqlen = 8192',
     llama3(500000, 128, 8, 8192)),
    ('llama 3.2 1B', '.scaling = QKV_ROPE_LLAMA3, .rotary_dim = 64, .base = 500000, .factor = 32, .original_seqlen = 8192, '
     '.high_freq_factor = 4', llama3(500000, 64, 32, 8192)),
]

def scalings():
    """name, parameters, attention factor, then for some pairs: pair, frequency, and sine and cosine at 2^31 - 1"""
    for name, fields, (ws, factor) in SCALINGS:
        n = len(ws)
        rows = []
        for i in sorted({0, 1, n // 4, n // 3, n // 2, 2 * n // 3, 3 * n // 4, n - 1}):
            a = (2 ** 31 - 1) * ws[i]
            rows.append('{%d, %s, %s, %s}' % (i, number(ws[i]), number(sin(a)), number(cos(a))))
        rows += ['{0, 0, 0, 0}'] * (8 - len(rows))
        rows = ',\n    '.join(rows)
        yield '{"%s",\n   {.size = sizeof(qkv_frequencies),\n    %s},\n   %s,\n   {%s}}' % (name, fields, number(factor), rows)

print('/* Made by make_exact.py. */')
print('static const struct {\n  double base;\n  int64_t d, pair, position;\n  double sine, cosine;\n} exact_sines[] = {')
print('  ' + ',\n  '.join(sines()) + '};')
print('static const struct {\n  const char *name;\n  qkv_frequencies f;\n  double attention_factor;\n  struct {\n'
      '    int64_t pair;\n    double frequency, sine, cosine; /* at 2^31 - 1 */\n  } at[8];\n} exact_scalings[] = {')
print('  ' + ',\n  '.join(scalings()) + '};')

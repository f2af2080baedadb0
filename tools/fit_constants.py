#!/usr/bin/env python3
"""Derive the constants of qkv's elementary functions, and measure them.

    python3 tools/fit_constants.py

prints every constant as a C hexadecimal floating literal together with its
measured error.  Needs Python 3 and mpmath; deterministic; under a minute.

  exp2  2^x = 2^n * p(x-n), n = rint(x); p(f) = 1 + c1 f + ... + cD f^D, by fma
  tanh  y = fl(x*x); tanh x = fl(fl(x*N(y)) / Q(y)), N(0) = Q(0) = 1, by fma;
        +-1 beyond |x| > T
  log2  l = 2^e * z, z in [sqrt(1/2), sqrt(2)); s = (z-1)/(z+1); t = s*s;
        log2 l = e + s*P(t), in plain * and + (no fma)

Method.  Each fit is a linear least squares problem in the coefficients (for
tanh linearised, N - F*Q over the previous F*Q), iterated with Lawson's weights
(w *= |residual|), which tends to the minimax fit.  The coefficients are then
rounded to the target format one by one, lowest degree first because its
rounding matters most, and those not yet rounded are refitted each time.

Measurement.  `fit` is the error of the rounded coefficients in exact
arithmetic; `total` replays the evaluation bit for bit (correctly rounded at 24
or 53 bits) on 20000 pseudo-random arguments, so it is a lower bound of the
worst case.  u = 2^-24 (float) or 2^-53 (double); all errors are relative.
"""
import random

from mpmath import mp, mpf, cos, fdot, fsum, ldexp, log, lu_solve, matrix, pi, \
    tanh, atanh, sqrt, fadd, fsub, fmul, fdiv, nint, floor, expm1

mp.prec = 200
LN2 = log(mpf(2))
HALF = mpf(1) / 2
SMAX = (sqrt(mpf(2)) - 1) / (sqrt(mpf(2)) + 1)           # largest |s| of log2
SAMPLES = 20000

# ---- formats ---------------------------------------------------------------
def rnd(x, p):
    """x correctly rounded to p bits (none here is near the subnormals)."""
    return fadd(x, 0, prec=p)

def fma(a, b, c, p):
    return fadd(fmul(a, b, exact=True), c, prec=p)

def lit(x, p):
    """C hexadecimal literal of a p-bit number."""
    if p == 53:
        return float(x).hex()
    mantissa, exponent = float(x).hex().split('p')
    assert mantissa.endswith('0000000')
    return mantissa[:-7] + 'p' + exponent + 'f'

def horner1(c, v, p):
    """1 + c[0] v + c[1] v^2 + ..., by fma from the last coefficient down."""
    r = c[-1]
    for a in reversed([mpf(1)] + c[:-1]):
        r = fma(r, v, a, p)
    return r

def poly(c, v):
    r = mpf(0)
    for a in reversed(c):
        r = r * v + a
    return r

def poly1(c, v):
    return 1 + v * poly(c, v)

# ---- fitting ---------------------------------------------------------------
def chebyshev(a, b, k):
    """k points of (a, b], dense at both ends, never exactly 0."""
    return [a + (b - a) * (1 - cos(pi * (i - mpf(1) / 3) / k)) / 2
            for i in range(1, k + 1)] + [mpf(b)]

def least_squares(rows, rhs, w, fixed):
    """c minimising sum w (row.c - rhs)^2, with c[j] = fixed[j] where set."""
    free = [j for j, v in enumerate(fixed) if v is None]
    held = [j for j, v in enumerate(fixed) if v is not None]
    rest = [b - fsum(r[j] * fixed[j] for j in held) for r, b in zip(rows, rhs)]
    cols = [[r[j] for r in rows] for j in free]
    wcols = [[a * q for a, q in zip(c, w)] for c in cols]
    n = len(free)
    m, v = matrix(n, n), matrix(n, 1)
    for j in range(n):
        v[j] = fdot(wcols[j], rest)
        for k in range(j, n):
            m[j, k] = m[k, j] = fdot(wcols[j], cols[k])
    out = list(fixed)
    for j, x in zip(free, lu_solve(m, v)):
        out[j] = x
    return out

def fit(rows, rhs, bits, scale=None):
    """Lawson fit of row.c = rhs, then sequential rounding to `bits`.

    scale(c), for the rational case, lists what each row is divided by."""
    n = len(rows[0])
    fixed = [None] * n
    c, w = None, [mpf(1)] * len(rows)

    def step():
        s = scale(c) if scale else [1] * len(rows)
        a = [[x / q for x in r] for r, q in zip(rows, s)]
        b = [x / q for x, q in zip(rhs, s)]
        out = least_squares(a, b, w, fixed)
        return out, [abs(fdot(r, out) - x) for r, x in zip(a, b)]

    for i in range(14):
        c, res = step()
        if i >= 3:
            top = max(res)
            w = [q * (e / top + mpf('0.02')) for q, e in zip(w, res)]
            top = max(w)
            w = [q / top for q in w]
    order = range(n)
    if scale:                                           # N and Q in turn
        order = [j for k in range(n // 2) for j in (k, k + n // 2)]
    for j in order:
        fixed[j] = rnd(c[j], bits)
        for _ in range(0 if None not in fixed else 3 if scale else 1):
            c = step()[0]
    return fixed

def worst(points, error):
    return max(((abs(error(x)), x) for x in points), key=lambda t: t[0])

# ---- the three functions -----------------------------------------------------
def exp2_fit(degree, bits):
    fs = chebyshev(-HALF, HALF, 150)
    rows = [[f ** k / mpf(2) ** f for k in range(1, degree + 1)] for f in fs]
    return fit(rows, [-expm1(-f * LN2) for f in fs], bits)

def exp2_fit_error(c):
    return worst(chebyshev(-HALF, HALF, 500),
                 lambda f: poly1(c, f) / mpf(2) ** f - 1)[0]

def exp2_eval(c, x, p):
    n = int(nint(x))
    return ldexp(horner1(c, x - n, p), n)

def tanh_fit(top, degree, bits):
    xs = chebyshev(mpf(0), mpf(top), 140)
    ys = [x * x for x in xs]
    fs = [tanh(x) / x for x in xs]
    ks = range(1, degree + 1)
    rows = [[y ** k for k in ks] + [-f * y ** k for k in ks]
            for y, f in zip(ys, fs)]

    def scale(c):
        return [f * (poly1(c[degree:], y) if c else 1) for y, f in zip(ys, fs)]
    return fit(rows, [f - 1 for f in fs], bits, scale)

def tanh_fit_error(c, top):
    d = len(c) // 2
    return worst(chebyshev(mpf(0), mpf(top), 600), lambda x: x / tanh(x)
                 * poly1(c[:d], x * x) / poly1(c[d:], x * x) - 1)[0]

def tanh_eval(c, x, p):
    d = len(c) // 2
    y = fmul(x, x, prec=p)
    a = fmul(x, horner1(c[:d], y, p), prec=p)
    return fdiv(a, horner1(c[d:], y, p), prec=p)

def log2_fit(degree, bits):
    ts = chebyshev(mpf(0), SMAX ** 2, 150)
    gs = [2 * atanh(sqrt(t)) / (sqrt(t) * LN2) for t in ts]
    rows = [[t ** k / g for k in range(degree + 1)] for t, g in zip(ts, gs)]
    return fit(rows, [mpf(1)] * len(ts), bits)

def log2_fit_error(c):
    return worst(chebyshev(mpf(0), SMAX, 400),
                 lambda s: s * poly(c, s * s) * LN2 / (2 * atanh(s)) - 1)[0]

def log2_eval(c, l, p):
    e = int(floor(log(l) / LN2 + HALF))
    z = ldexp(l, -e)
    s = fdiv(fsub(z, 1, prec=p), fadd(z, 1, prec=p), prec=p)
    t = fmul(s, s, prec=p)
    r = c[-1]
    for a in reversed(c[:-1]):
        r = fadd(fmul(r, t, prec=p), a, prec=p)
    return fadd(e, fmul(s, r, prec=p), prec=p)

# ---- report ------------------------------------------------------------------
def show(title, c, bits, fit_error, total, at):
    u = mpf(2) ** -bits
    print('%s\n    fit %.3f u, total %.3f u at %s'
          % (title, fit_error / u, total / u, lit(at, bits)))
    for a in c:
        print('    ' + lit(a, bits))

def uniform(a, b, bits, seed):
    r = random.Random(seed)
    return [rnd(mpf(r.uniform(a, b)), bits) for _ in range(SAMPLES)]

def report_exp2(title, c, bits):
    total, at = worst(uniform(-4, 1, bits, 1), lambda x:
                      exp2_eval(c, x, bits) / mpf(2) ** x - 1)
    show(title, c, bits, exp2_fit_error(c), total, at)

def report_tanh(title, c, top, bits):
    xs = uniform(0, top, bits, 2)
    total, at = worst(xs, lambda x: tanh_eval(c, x, bits) / tanh(x) - 1)
    show(title + ', T = %s; N then Q' % top, c, bits, tanh_fit_error(c, top),
         total, at)
    print('    at T, 1 - tanh is %.2f u; largest value %s' % (
        (1 - tanh(mpf(top))) * mpf(2) ** bits,
        lit(max(tanh_eval(c, x, bits) for x in xs), bits)))

def report_log2(title, c, bits):
    near = uniform(0.7072, 1.4142, bits, 3)
    far = [ldexp(z, 1 + i % 60) for i, z in enumerate(near)]
    total, at = worst(near, lambda l: log2_eval(c, l, bits) * LN2 / log(l) - 1)
    show(title, c, bits, log2_fit_error(c), total, at)

    def ulps(l):
        v = log(l) / LN2
        return (log2_eval(c, l, bits) - v) / mpf(2) ** (
            int(floor(log(v) / LN2)) + 1 - bits)
    e, at = worst([l for l in far if l >= 2], ulps)
    print('    results >= 1: %.3f ulp at %s' % (e, lit(at, bits)))

def parse(text):
    return [mpf(float.fromhex(t)) for t in text.split()]

# The float constants in use, from an earlier fit; measured here, not replaced.
EXP2_F32 = parse('0x1.62e430p-1 0x1.ebfbdcp-3 0x1.c6af7cp-5 0x1.3b2de0p-7 '
                 '0x1.5f082ep-10 0x1.416b26p-13')
TANH_F32 = parse('0x1.136414p-3 0x1.d47f18p-9 0x1.7015b2p-16 0x1.06bad6p-26 '
                 '0x1.df075cp-2 0x1.acd998p-6 0x1.662b48p-12 0x1.cae992p-21')

def main():
    for name, v in (('ln 2', LN2), ('log2 e', 1 / LN2)):
        print('%s: %s %s' % (name, lit(rnd(v, 53), 53), lit(rnd(v, 24), 24)))
    report_exp2('exp2 float, the constants in use', EXP2_F32, 24)
    report_exp2('exp2 float, refitted for comparison', exp2_fit(6, 24), 24)
    report_exp2('exp2 double', exp2_fit(11, 53), 53)
    report_tanh('tanh float, the constants in use', TANH_F32, 8, 24)
    report_tanh('tanh float, refitted for comparison', tanh_fit(8, 4, 24),
                8, 24)
    report_tanh('tanh double', tanh_fit(17.75, 9, 53), 17.75, 53)
    report_log2('log2 double', log2_fit(7, 53), 53)

if __name__ == '__main__':
    main()

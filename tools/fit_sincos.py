#!/usr/bin/env python3
"""Derive the constants of the positions' sine and cosine, and measure them.

    python3 tools/fit_sincos.py

prints every constant as a C hexadecimal floating literal together with its
measured error.  Needs Python 3 and mpmath; deterministic; under a minute.
Method and units are those of fit_constants.py; the evaluation is that of
docs/POSITIONS.md: plain multiplications and additions, no fma.

  t in quarter turns, |t| <= T = 1/2 + 2^-11, u = fl(t*t)
  sin(t pi/2) = fl(fl(t * s0) + fl(fl(t * u) * P(u))), P = s1 + s2 u + ...
  cos(t pi/2) = fl(1 + fl(u * Q(u))),                  Q = c1 + c2 u + ...
"""
from mpmath import cos, fadd, fmul, mp, mpf, pi, sin

from fit_constants import chebyshev, fit, lit, poly, rnd, uniform, worst

TOP = mpf(1) / 2 + mpf(2) ** -11
SIN, COS = 6, 7                                # coefficients after s0; of Q

def sin_fit():
    ts = chebyshev(mpf(0), TOP, 150)
    s0 = rnd(pi / 2, 53)
    rows = [[t ** (2 * k + 1) / sin(t * pi / 2) for k in range(1, SIN + 1)]
            for t in ts]
    # What s0 leaves of pi/2 cannot be mended near 0: it is not asked for.
    rhs = [1 - t * (pi / 2) / sin(t * pi / 2) for t in ts]
    return [s0] + fit(rows, rhs, 53)

def cos_fit():
    ts = chebyshev(mpf(0), TOP, 150)
    rows = [[t ** (2 * k) / cos(t * pi / 2) for k in range(1, COS + 1)]
            for t in ts]
    return fit(rows, [1 - 1 / cos(t * pi / 2) for t in ts], 53)

def horner(c, u):
    r = c[-1]
    for a in reversed(c[:-1]):
        r = fadd(fmul(r, u, prec=53), a, prec=53)
    return r

def sin_eval(s, t):
    u = fmul(t, t, prec=53)
    return fadd(fmul(t, s[0], prec=53),
                fmul(fmul(t, u, prec=53), horner(s[1:], u), prec=53), prec=53)

def cos_eval(c, t):
    u = fmul(t, t, prec=53)
    return fadd(1, fmul(u, horner(c, u), prec=53), prec=53)

def show(title, c, fit_error, total, at):
    u = mpf(2) ** -53
    print('%s\n    fit %.3f u, total %.3f u at %s'
          % (title, fit_error / u, total / u, lit(at, 53)))
    for a in c:
        print('    ' + lit(a, 53))

def main():
    # Half of the arguments are uniform, half down to 2^-40.
    ts = [t for t in uniform(-float(TOP), float(TOP), 53, 4) if t != 0]
    ts += [t * mpf(2) ** -(i % 40) for i, t in enumerate(ts)]
    s, c = sin_fit(), cos_fit()
    points = chebyshev(mpf(0), TOP, 500)
    show('sine', s,
         worst(points, lambda t: (t * poly(s, t * t)) / sin(t * pi / 2) - 1)[0],
         *worst(ts, lambda t: sin_eval(s, t) / sin(t * pi / 2) - 1))
    show('cosine', c,
         worst(points, lambda t: (1 + t * t * poly(c, t * t))
               / cos(t * pi / 2) - 1)[0],
         *worst(ts, lambda t: cos_eval(c, t) / cos(t * pi / 2) - 1))
    for name, v in (('2/pi', 2 / pi), ('ln 2', mp.log(2)),
                    ('1/ln 2', 1 / mp.log(2)), ('2 pi', 2 * pi)):
        high = rnd(v, 53)
        print('%s = %s + %s' % (name, lit(high, 53), lit(rnd(v - high, 53), 53)))

if __name__ == '__main__':
    main()

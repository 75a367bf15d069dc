"""Derives the polynomial coefficients of ``jcuts/codegen/vecmath`` (needs ``mpmath``; not needed at run time).

The fits minimise the weighted error ``w(x) * (p(x) - f(x))``, where w makes it a relative error of the final function.
Remez exchange in multiple precision.  Coefficients are then rounded to the target format one at a time, lowest
power first, and the rest is fitted again after each, so that the others absorb the rounding of one.

    python benchmarks/vecmath/fit_polynomials.py f32  # every fit of one format: coefficients and largest weighted error
    python benchmarks/vecmath/fit_polynomials.py f64 asin  # those whose name starts so
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp

mp.mp.prec = 240
Real = Callable[[mp.mpf], mp.mpf]


def rounded(value: mp.mpf, fmt: str) -> mp.mpf:
    """The nearest float of format ``f32``, ``f64`` or ``exact`` (unchanged)."""
    if fmt == "exact" or value == 0:
        return mp.mpf(value)
    bits = {"f32": 24, "f64": 53}[fmt]
    exponent = int(mp.floor(mp.log(abs(value), 2)))
    unit = mp.mpf(2) ** (exponent - bits + 1)
    return mp.nint(value / unit) * unit


def horner(coefficients: list[mp.mpf], x: mp.mpf) -> mp.mpf:
    total = mp.mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def chebyshev_nodes(lo: mp.mpf, hi: mp.mpf, count: int) -> list[mp.mpf]:
    middle, half = (lo + hi) / 2, (hi - lo) / 2
    return [middle - half * mp.cos(mp.pi * k / (count - 1)) for k in range(count)]


def remez(f: Real, w: Real, lo: mp.mpf, hi: mp.mpf, powers: list[int]) -> tuple[list[mp.mpf], mp.mpf]:
    """Minimax coefficients of ``sum c_k x^k, k in powers`` and the largest weighted error."""
    size = len(powers) + 1
    grid = chebyshev_nodes(lo, hi, max(400, 24 * size))
    fg, wg = [f(x) for x in grid], [w(x) for x in grid]
    pg = [[x**p for p in powers] for x in grid]
    nodes = [round(k * (len(grid) - 1) / (size - 1)) for k in range(size)]
    best: tuple[list[mp.mpf], mp.mpf] = ([], mp.inf)
    for _ in range(30):
        a, b = mp.matrix(size, size), mp.matrix(size, 1)
        for row, k in enumerate(nodes):
            for col in range(size - 1):
                a[row, col] = wg[k] * pg[k][col]
            a[row, size - 1] = (-1) ** row
            b[row] = wg[k] * fg[k]
        solution = mp.lu_solve(a, b)
        c = [solution[k] for k in range(size - 1)]
        error = [wg[k] * (mp.fdot(c, pg[k]) - fg[k]) for k in range(len(grid))]
        worst = max(abs(e) for e in error)
        if worst < best[1]:
            best = (c, worst)
        if worst <= abs(solution[size - 1]) * mp.mpf("1.01"):
            break
        nodes = _alternation(error, size)
        if len(nodes) != size:
            break
    return best


def _alternation(error: list[mp.mpf], size: int) -> list[int]:
    """Grid indices of ``size`` alternating extrema of the error, the largest among neighbours of one sign."""
    runs: list[int] = []
    for k, e in enumerate(error):
        if runs and (error[runs[-1]] > 0) == (e > 0):
            if abs(e) > abs(error[runs[-1]]):
                runs[-1] = k
        else:
            runs.append(k)
    while len(runs) > size:
        runs.pop(0 if abs(error[runs[0]]) < abs(error[runs[-1]]) else -1)
    return runs


def minimax(
    f: Real, w: Real, lo: float, hi: float, powers: list[int], fmt: str, lead: dict[int, float] | None = None
) -> tuple[list[mp.mpf], mp.mpf]:
    """Remez with coefficients representable in ``fmt``; ``lead`` fixes some (e.g. ``{0: 1.0}``).

    Returns: coefficients in the order of ``powers`` (fixed ones included) and the weighted error of the rounded fit.
    """
    lo_, hi_ = mp.mpf(lo), mp.mpf(hi)
    fixed = {k: mp.mpf(v) for k, v in (lead or {}).items()}
    free = [k for k in powers if k not in fixed]
    while free:
        known = dict(fixed)

        def rest(x: mp.mpf, known: dict[int, mp.mpf] = known) -> mp.mpf:
            return f(x) - sum(c * x**k for k, c in known.items())

        c, _ = remez(rest, w, lo_, hi_, free)
        if fmt == "exact":
            fixed.update(zip(free, c, strict=True))
            break
        fixed[free[0]] = rounded(c[0], fmt)
        free = free[1:]
        if fmt == "f64" and len(fixed) >= 4 and free:  # the tail's rounding no longer matters
            c, _ = remez(lambda x: f(x) - sum(v * x**k for k, v in fixed.items()), w, lo_, hi_, free)
            fixed.update({k: rounded(v, fmt) for k, v in zip(free, c, strict=True)})
            break
    worst = max(abs(w(x) * (sum(v * x**k for k, v in fixed.items()) - f(x))) for x in chebyshev_nodes(lo_, hi_, 1001))
    return [fixed[k] for k in powers], worst


@dataclass(frozen=True)
class Fit:
    """p(x) = sum c_k x^k near f on [lo, hi]; degree per format; w makes the error relative to the final function."""

    f: Real
    w: Real
    lo: float
    hi: float
    degree: dict[str, int]
    lead: tuple[float, ...] = ()


def series_safe(f: Real, at_zero: float, slope: float = 0.0) -> Real:
    """f with its limit (and slope) near zero, where the quotient that defines it is 0/0."""
    return lambda x: f(x) if abs(x) > mp.mpf(10) ** -18 else mp.mpf(at_zero) + slope * x


def odd(f: Real) -> Real:
    """From an odd f: (f(x) - x) / x^3 as a function of z = x^2."""

    def g(z: mp.mpf) -> mp.mpf:
        x = mp.sqrt(z)
        return (f(x) - x) / (x * z)

    return g


def odd_weight(f: Real) -> Real:
    """Makes the error of ``odd`` relative to f."""
    return lambda z: z * mp.sqrt(z) / f(mp.sqrt(z)) if z > mp.mpf(10) ** -18 else z


def erfinv_of_w(w: mp.mpf) -> mp.mpf:
    """erf_inv(x) / x where w = -log(1 - x^2)."""
    x = mp.sqrt(-mp.expm1(-w)) if w > mp.mpf(10) ** -18 else mp.mpf(10) ** -9
    return mp.erfinv(x) / x


def erf_ratio(z: mp.mpf) -> mp.mpf:
    """erf(x)/x - 1 where z = x^2."""
    return (mp.erf(mp.sqrt(z)) / mp.sqrt(z) if z > mp.mpf(10) ** -30 else 2 / mp.sqrt(mp.pi)) - 1


def eighth_root_erfc(y: mp.mpf) -> mp.mpf:
    return mp.erfc(y) ** mp.mpf(0.125)


def erfcx_reduced(pole: float) -> Real:
    """G(t) with exp(y^2) erfc(y) = G(t) / (y + pole), t = (y - pole) / (y + pole)."""

    def g(t: mp.mpf) -> mp.mpf:
        y = pole * (1 + t) / (1 - t)
        return mp.exp(y * y) * mp.erfc(y) * (y + pole)

    return g


ROOT_HALF = mp.sqrt(mp.mpf(1) / 2)
ROOT_TWO = mp.sqrt(2)
S_MAX = (ROOT_TWO - 1) / (ROOT_TWO + 1)
FITS: dict[str, Fit] = {
    # 1 + r + r^2 (...), the same polynomial for exp and expm1
    "EXP": Fit(
        series_safe(lambda r: (mp.expm1(r) - r) / r**2, 0.5, 1 / 6),
        lambda r: r**2 / mp.expm1(r) if r else mp.mpf(0),
        -0.3468,
        0.3468,
        {"f32": 5, "f64": 10},
    ),
    "EXP2": Fit(lambda r: mp.power(2, r), lambda r: mp.power(2, -r), -0.5005, 0.5005, {"f32": 6, "f64": 12}, (1.0,)),
    "LOG": Fit(
        series_safe(lambda f: (mp.log1p(f) - f + f * f / 2) / f**3, 1 / 3, -0.25),
        lambda f: f**3 / mp.log1p(f) if f else mp.mpf(0),
        ROOT_HALF - 1,
        ROOT_TWO - 1,
        {"f32": 7},
    ),
    # 2 atanh(s) = 2 s + s^3 (...), z = s^2
    "ATANH2": Fit(
        lambda z: 2 * odd(mp.atanh)(z) if z > mp.mpf(10) ** -18 else mp.mpf(2) / 3,
        lambda z: z,
        0.0,
        S_MAX**2,
        {"f32": 3, "f64": 6},
    ),
    # the same beyond its first term: (2 atanh(s) - 2 s - 2/3 s^3) / s^5
    "ATANH2_TAIL": Fit(
        lambda z: (2 * odd(mp.atanh)(z) - mp.mpf(2) / 3) / z if z > mp.mpf(10) ** -12 else mp.mpf(2) / 5 + z * 2 / 7,
        lambda z: z**2,
        0.0,
        S_MAX**2,
        {"f32": 3, "f64": 9},
    ),
    "SIN": Fit(
        lambda z: odd(mp.sin)(z) if z > mp.mpf(10) ** -18 else -mp.mpf(1) / 6,
        odd_weight(mp.sin),
        0.0,
        0.6185,
        {"f32": 2, "f64": 5},
    ),
    # cos r = 1 - z/2 + z^2 (...)
    "COS": Fit(
        lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2 if z > mp.mpf(10) ** -18 else mp.mpf(1) / 24,
        lambda z: z**2 / mp.cos(mp.sqrt(z)),
        0.0,
        0.6185,
        {"f32": 2, "f64": 5},
    ),
    "SINH": Fit(
        lambda z: odd(mp.sinh)(z) if z > mp.mpf(10) ** -18 else mp.mpf(1) / 6,
        odd_weight(mp.sinh),
        0.0,
        1.0,
        {"f32": 3, "f64": 7},
    ),
    "ASIN": Fit(
        lambda z: odd(mp.asin)(z) if z > mp.mpf(10) ** -18 else mp.mpf(1) / 6,
        odd_weight(mp.asin),
        0.0,
        0.2501,
        {"f32": 4, "f64": 12},
    ),
    "ATAN": Fit(
        lambda z: odd(mp.atan)(z) if z > mp.mpf(10) ** -18 else -mp.mpf(1) / 3,
        odd_weight(mp.atan),
        0.0,
        (ROOT_TWO - 1) ** 2 * mp.mpf("1.001"),
        {"f32": 4, "f64": 11},
    ),
    # erf x = x + x (...) (the constant term is 2/sqrt(pi) - 1), for |x| < 0.9 (float32) or 1 (float64)
    "ERF_F32": Fit(erf_ratio, lambda z: 1 / (1 + erf_ratio(z)), 0.0, 0.81, {"f32": 5}),
    "ERF_F64": Fit(erf_ratio, lambda z: 1 / (1 + erf_ratio(z)), 0.0, 1.0, {"f64": 12}),
    # erfc y = p(y)^8, absolute error of erf
    "ERF_TAIL": Fit(eighth_root_erfc, lambda y: 8 * eighth_root_erfc(y) ** 7, 0.9, 3.95, {"f32": 7}),
    "ERFC_F32": Fit(
        erfcx_reduced(2.0), lambda t: 1 / erfcx_reduced(2.0)(t), -0.601, (10.2 - 2.0) / (10.2 + 2.0), {"f32": 8}
    ),
    "ERFC_F64": Fit(
        erfcx_reduced(3.75), lambda t: 1 / erfcx_reduced(3.75)(t), -0.7648, (27.5 - 3.75) / (27.5 + 3.75), {"f64": 20}
    ),
    # erf_inv(x) / x, in u = w - 2.5 (f32) or w - 3.125 (f64), then in sqrt(w) - 3, then sqrt(w) - 5
    "ERFINV_F32_0": Fit(
        lambda u: erfinv_of_w(u + mp.mpf(5) / 2), lambda u: 1 / erfinv_of_w(u + mp.mpf(5) / 2), -2.5, 2.5, {"f32": 9}
    ),
    "ERFINV_F32_1": Fit(
        lambda u: erfinv_of_w((u + 3) ** 2), lambda u: 1 / erfinv_of_w((u + 3) ** 2), -0.765, 1.0, {"f32": 9}
    ),
    "ERFINV_F64_0": Fit(
        lambda u: erfinv_of_w(u + mp.mpf(25) / 8),
        lambda u: 1 / erfinv_of_w(u + mp.mpf(25) / 8),
        -3.125,
        3.125,
        {"f64": 23},
    ),
    "ERFINV_F64_1": Fit(
        lambda u: erfinv_of_w((u + 3.25) ** 2), lambda u: 1 / erfinv_of_w((u + 3.25) ** 2), -0.751, 0.751, {"f64": 20}
    ),
    "ERFINV_F64_2": Fit(
        lambda u: erfinv_of_w((u + 5) ** 2), lambda u: 1 / erfinv_of_w((u + 5) ** 2), -1.001, 1.05, {"f64": 19}
    ),
}


def show(name: str, coefficients: list[mp.mpf], worst: mp.mpf, fmt: str) -> None:
    text = ", ".join(f"{float(c):.9g}" if fmt == "f32" else repr(float(c)) for c in coefficients)
    print(f"{name} = ({text})  # weighted error 2^{float(mp.log(worst, 2)):.1f}", flush=True)


def main(fmt: str, prefix: str = "") -> None:
    for name, fit in FITS.items():
        if name.startswith(prefix) and fmt in fit.degree:
            powers = list(range(fit.degree[fmt] + 1))
            c, worst = minimax(fit.f, fit.w, fit.lo, fit.hi, powers, fmt, dict(enumerate(fit.lead)))
            show(name, c, worst, fmt)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Derives the polynomial coefficients of ``jcuts/codegen/vecmath`` (needs ``mpmath``; not needed at run time).

Two fits, both of the *weighted* error ``w(x) * (p(x) - f(x))``, where w makes it a relative error of the final function:

* ``minimax``: Remez exchange for a polynomial, in multiple precision.  Coefficients are then rounded to the target
  format one at a time, lowest power first, and the rest is fitted again after each, so that the rounding of one
  coefficient is absorbed by the others.
* ``rational``: p/q by iteratively reweighted least squares (Lawson) on Chebyshev nodes.

    python benchmarks/vecmath_fit.py            # lists the fits
    python benchmarks/vecmath_fit.py exp_f32    # prints one: coefficients, interval, largest weighted error
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import mpmath as mp
import numpy as np

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
    grid = [x for x in chebyshev_nodes(lo, hi, max(400, 24 * size))]
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


def rational(
    f: Real, w: Real, lo: float, hi: float, top: int, bottom: int, fmt: str, p0: float | None = None
) -> tuple[list[mp.mpf], list[mp.mpf], mp.mpf]:
    """p/q with q(0) = 1 (and p(0) = p0 where given) by Lawson's reweighting of the linearised problem."""
    nodes = chebyshev_nodes(mp.mpf(lo), mp.mpf(hi), 12 * (top + bottom + 2))
    fs, ws = [f(x) for x in nodes], [w(x) for x in nodes]
    weight = [mp.mpf(1)] * len(nodes)
    q_old = [mp.mpf(1)] * len(nodes)
    first = 0 if p0 is None else 1
    base = mp.mpf(p0 or 0)
    best: tuple[list[mp.mpf], list[mp.mpf], mp.mpf] = ([], [], mp.inf)
    for _ in range(60):
        a, b = mp.matrix(len(nodes), top + 1 - first + bottom), mp.matrix(len(nodes), 1)
        for row, x in enumerate(nodes):
            s = mp.sqrt(weight[row]) * ws[row] / abs(q_old[row])
            for col in range(top + 1 - first):
                a[row, col] = s * x ** (col + first)
            for col in range(bottom):
                a[row, top + 1 - first + col] = -s * fs[row] * x ** (col + 1)
            b[row] = s * (fs[row] - base)
        c = mp.lu_solve(a, b)
        p = ([base] if first else []) + [c[k] for k in range(top + 1 - first)]
        q = [mp.mpf(1)] + [c[top + 1 - first + k] for k in range(bottom)]
        q_old = [horner(q, x) for x in nodes]
        error = [abs(ws[k] * (horner(p, x) / q_old[k] - fs[k])) for k, x in enumerate(nodes)]
        if max(error) < best[2]:
            best = (p, q, max(error))
        total = sum(wt * e for wt, e in zip(weight, error, strict=True))
        weight = [wt * e * len(nodes) / total for wt, e in zip(weight, error, strict=True)]
    p, q = [[rounded(v, fmt) for v in part] for part in best[:2]]
    worst = max(abs(w(x) * (horner(p, x) / horner(q, x) - f(x))) for x in chebyshev_nodes(mp.mpf(lo), mp.mpf(hi), 1001))
    return p, q, worst


def show(name: str, coefficients: list[mp.mpf], worst: mp.mpf, fmt: str) -> None:
    kind = np.float32 if fmt == "f32" else np.float64
    text = ", ".join(repr(float(kind(float(c)))) if fmt == "f64" else f"{float(c):.9g}" for c in coefficients)
    print(f"{name}: 2**{float(mp.log(worst, 2)):.2f}\n    ({text})")

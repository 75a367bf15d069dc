"""XLA's own mistakes, proved in NumPy: reductions and windows that lose a NaN.

jaxlib 0.10 and 0.11 on a CPU: a maximum or minimum over large arrays is found with instructions that return their
second operand where one is NaN.  `jax.lax` documents that a NaN wins.  Where a kernel of jcuts keeps it, the acceptance
rule compares it with float64 (`jcuts.tune.verify.float64_eval`, which looks for NaNs apart); this is the proof that XLA
is wrong.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jcuts.trace import jaxapi

REDUCTIONS = ("reduce_max", "reduce_min")
WINDOWS = ("reduce_window_max", "reduce_window_min")


def nan_unlike(wanted: Sequence[Sequence[np.ndarray]], got: Sequence[np.ndarray]) -> int:
    """How many elements of float results are NaN here and in none of ``wanted``, or in all of them and not here."""
    count = 0
    for k, c in enumerate(got):
        if c.dtype.kind not in "biu":
            here, *theirs = (
                np.isnan(v if v.dtype.kind == "c" else v.astype(np.float64)) for v in (c, *(w[k] for w in wanted))
            )
            count += int(np.logical_and.reduce([here != one for one in theirs]).sum())
    return count


def lost_nans(closed: Any, inputs: Sequence[np.ndarray]) -> dict[str, int]:
    """Runs a program's equations one by one in XLA; for each kind of reduction, how many results should be NaN
    according to NumPy, on the operands that XLA itself computed, and are not.
    """
    found: Counter[str] = Counter()
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, inputs, strict=True))
    for eqn in closed.jaxpr.eqns:
        args = [a.val if jaxapi.is_literal(a) else env[a] for a in eqn.invars]
        results = jaxapi.bind_eqn(eqn, args)
        env.update(zip(eqn.outvars, results, strict=True))
        name = eqn.primitive.name
        if name not in (*REDUCTIONS, *WINDOWS) or eqn.outvars[0].aval.dtype.kind in "biu":
            continue
        here = np.isnan(np.asarray(args[0]).astype(np.float64))
        should = here.any(axis=tuple(eqn.params["axes"])) if name in REDUCTIONS else in_windows(here, eqn.params)
        lost = should & ~np.isnan(np.asarray(results[0]).astype(np.float64))
        if lost.any():
            found[name] += int(lost.sum())
    return dict(found)


def in_windows(flags: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """For every window, whether a flag in it is set (padding and holes are not)."""
    base = params["base_dilation"]
    spread = np.zeros([max(0, (e - 1) * b + 1) for e, b in zip(flags.shape, base, strict=True)], bool)
    spread[tuple(slice(None, None, b) for b in base)] = flags
    spread = np.pad(spread, [(max(0, low), max(0, high)) for low, high in params["padding"]])
    keep = [
        slice(max(0, -low), e - max(0, -high)) for e, (low, high) in zip(spread.shape, params["padding"], strict=True)
    ]
    spread = spread[tuple(keep)]
    sizes, steps, holes = (params[k] for k in ("window_dimensions", "window_strides", "window_dilation"))
    reach = [(w - 1) * h + 1 for w, h in zip(sizes, holes, strict=True)]
    out = np.zeros([max(0, (e - r) // s + 1) for e, r, s in zip(spread.shape, reach, steps, strict=True)], bool)
    if not out.size:
        return out
    for place in itertools.product(*(range(w) for w in sizes)):
        window = tuple(
            slice(p * h, p * h + (e - 1) * s + 1, s) for p, h, s, e in zip(place, holes, steps, out.shape, strict=True)
        )
        out |= spread[window]
    return out

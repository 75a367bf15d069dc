"""Rematerialises widening conversions: kernels convert the narrow value (`cvt.f32.bf16`), none stores the wide one.

    y = f32(c);  m = sum(y) / n;  z = (y - m) * s      becomes      m = sum(f32(c)) / n;  z = (f32(c) - m) * s

Mixed precision keeps activations in 16 bits and computes norms in float32; automatic differentiation saves the
float32 values, with twice the bytes.  Each kernel that reads such a value gets a conversion of its own, so that the
16-bit value is what passes through memory.

Kernels end at operations that are neither element-wise nor reductions (`rematerialize.Crossing`), and at sums over
long columns, whose result no block knows before all are done.  What is only summed stays with the value: the statistics
of a norm are part of the kernel that makes it.  Where there are such sums, other readers get copies even if nothing
lies between: what they make may belong to the kernel behind the sums (`fusion.sink_outputs`).  No value changes.
"""

from __future__ import annotations

from typing import Any

from jcuts.rewrite.backward.rematerialize import Crossing, is_widening
from jcuts.rewrite.backward.separate_sums import is_column_sum
from jcuts.trace import jaxapi

Kernel = tuple[int, int]
"""Borders of both kinds before an equation; `SUMMED` for the second where a value is only summed."""
SUMMED = -1


def rematerialize_conversions(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Gives every kernel its own widening conversions; returns the program and the number of copies."""
    crossing = Crossing(closed)
    widened = {
        eqn.outvars[0]: eqn for eqn in closed.jaxpr.eqns if is_widening(eqn) and eqn.outvars[0] not in crossing.results
    }
    if not widened:
        return closed, 0
    kernels = _kernels(crossing)
    copies: dict[tuple[Any, Kernel], Any] = {}
    eqns: list[Any] = []
    for number, eqn in enumerate(closed.jaxpr.eqns):
        fresh: dict[Any, Any] = {}
        for value in dict.fromkeys(a for a in eqn.invars if not jaxapi.is_literal(a) and a in widened):
            here = kernels[number][0], SUMMED
            is_summed = any(kernels[u] == here or is_column_sum(closed.jaxpr.eqns[u]) for u in crossing.users[value])
            if not crossing.is_cheap(eqn) or _is_same(kernels[number], kernels[crossing.made[value]], is_summed):
                continue
            key = value, (kernels[number][0], SUMMED - number) if is_summed else kernels[number]  # one of each reader
            if key not in copies:
                copies[key] = jaxapi.new_var(value.aval)
                eqns.append(widened[value].replace(outvars=[copies[key]]))
            fresh[value] = copies[key]
        invars = [a if jaxapi.is_literal(a) else fresh.get(a, a) for a in eqn.invars]
        eqns.append(eqn.replace(invars=invars) if fresh else eqn)
    return (jaxapi.dce(jaxapi.with_eqns(closed, eqns)), len(copies)) if copies else (closed, 0)


def _is_same(reader: Kernel, maker: Kernel, is_summed: bool) -> bool:
    """Whether one kernel may have both equations. Args: is_summed: whether sums of the value are part of it."""
    return reader == (maker[0], SUMMED) or (reader == maker and not is_summed)


def _kernels(crossing: Crossing) -> list[Kernel]:
    """The kernel of every equation."""
    summed = _only_summed(crossing)
    after: list[int] = []
    for eqn in crossing.eqns:
        before = [after[crossing.made[a]] for a in eqn.invars if not jaxapi.is_literal(a) and a in crossing.made]
        after.append(max(before, default=0) + is_column_sum(eqn))
    pairs = enumerate(zip(crossing.level, after, strict=True))
    return [(level, SUMMED if number in summed else sums) for number, (level, sums) in pairs]


def _only_summed(crossing: Crossing) -> set[int]:
    """Element-wise equations whose values end in sums over long columns, all of them."""
    found: set[int] = set()
    for number in range(len(crossing.eqns) - 1, -1, -1):
        eqn = crossing.eqns[number]
        users = crossing.users.get(eqn.outvars[0], []) if len(eqn.outvars) == 1 else []
        ends = users and all(u in found or is_column_sum(crossing.eqns[u]) for u in users)
        if ends and crossing.is_cheap(eqn) and eqn.outvars[0] not in crossing.results:
            found.add(number)
    return found

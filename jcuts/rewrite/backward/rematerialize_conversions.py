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

from dataclasses import dataclass
from typing import Any

from jcuts.rewrite.backward.rematerialize import Crossing, is_widening
from jcuts.rewrite.backward.separate_sums import is_column_sum
from jcuts.trace import jaxapi


@dataclass(frozen=True)
class _Place:
    """Which kernel an equation may be part of.

    Attributes:
        level: borders before it (`rematerialize.Crossing`).
        sums: sums over long columns before it.
        summed: whether its value is only summed over long columns.
    """

    level: int
    sums: int
    summed: bool

    def is_with(self, maker: _Place) -> bool:
        """Whether the kernel that makes a value has this reader of it: its mean, and the deviation from that."""
        return self.level == maker.level and self.sums <= maker.sums + self.summed


def rematerialize_conversions(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Gives every kernel its own widening conversions; returns the program and the number of copies."""
    crossing = Crossing(closed, inside=("stop_gradient",))
    widened = {eqn.outvars[0]: eqn for eqn in crossing.eqns if is_widening(eqn)}
    widened = {value: eqn for value, eqn in widened.items() if value not in crossing.results}
    if not widened:
        return closed, 0
    places = _places(crossing)
    copies: dict[tuple[Any, ...], Any] = {}
    eqns: list[Any] = []
    for number, eqn in enumerate(crossing.eqns):
        fresh: dict[Any, Any] = {}
        place, read = places[number], eqn.invars if crossing.is_cheap(eqn) else ()
        for value in dict.fromkeys(a for a in read if not jaxapi.is_literal(a) and a in widened):
            is_summed = not place.summed and _is_summed(crossing, places, value, place.level)
            if place.is_with(places[crossing.made[value]]) and not is_summed:
                continue
            key = (value, number) if is_summed else (value, place)
            if key not in copies:
                copies[key] = jaxapi.new_var(value.aval)
                eqns.append(widened[value].replace(outvars=[copies[key]]))
            fresh[value] = copies[key]
        eqns.append(jaxapi.substituted(eqn, fresh) if fresh else eqn)
    return (jaxapi.dce(jaxapi.with_eqns(closed, eqns)), len(copies)) if copies else (closed, 0)


def _is_summed(crossing: Crossing, places: list[_Place], value: Any, level: int) -> bool:
    """Whether sums over long columns are made of a value on a level."""
    readers = [n for n in crossing.users[value] if crossing.level[n] == level]
    return any(places[n].summed or is_column_sum(crossing.eqns[n]) for n in readers)


def _places(crossing: Crossing) -> list[_Place]:
    """The place of every equation."""
    summed = _only_summed(crossing)
    sums: list[int] = []
    for eqn in crossing.eqns:
        before = [sums[crossing.made[a]] for a in eqn.invars if not jaxapi.is_literal(a) and a in crossing.made]
        sums.append(max(before, default=0) + is_column_sum(eqn))
    return [_Place(level, sums[n], n in summed) for n, level in enumerate(crossing.level)]


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

"""Rematerialises residuals from arrays that are in memory anyway: masks of ReLUs from their results, operands of
concatenations as slices of these.

    y = max(x, 0);  m = x > 0    ...  select(m, dy, 0)       becomes      ...  select(y > 0, dy, 0)
    c = concat(a, b)             ...  f(a)                   becomes      ...  f(c[:, :width of a])

Automatic differentiation keeps what its rules name.  A ReLU's mask is a byte per element from the forward pass to the
backward one, although its result is kept for the filter gradient of the next layer: the operand exceeds the threshold
exactly where the result does (a NaN in neither).  A densely connected block keeps every concatenation of its layers,
each of which is a part of the last one.

Readers behind a product or another border of kernels (`rematerialize.Crossing`) get copies of their own.  Masks are
made of results that are read no earlier than the mask.  Slices are read where what they are cut from lives as long, or
has fewer bytes than all that is read from it.  No value changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jcuts.rewrite.backward.rematerialize import MASK, Crossing, is_large
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

CONCATENATE = "concatenate"
GREATER = "gt"
MAXIMUM = "max"


@dataclass(frozen=True)
class _Stored:
    """Another way to a value. Attributes: source: what is in memory. made_of: the value from it."""

    source: Any
    made_of: Callable[[Any], Any]


class _Readers(Crossing):
    """Values that cross, by the level at which their readers' results are wanted: a copy that another rewrite made for
    the backward pass may be made of nothing but forward values.
    """

    def __init__(self, closed: jaxapi.Closed) -> None:
        super().__init__(closed)
        self.wanted = list(self.level)
        for number in reversed(range(len(self.eqns))):
            results = self.eqns[number].outvars
            uses = [self._wanted_by(u) for v in results for u in self.users[v]]
            if uses and not self.is_border(self.eqns[number]) and not self.results.intersection(results):
                self.wanted[number] = max(self.level[number], min(uses))

    def _wanted_by(self, number: int) -> int:
        return self.level[number] - 1 if self.is_border(self.eqns[number]) else self.wanted[number]

    def is_behind(self, number: int, value: Any, stored: Any) -> bool:
        """Whether an element-wise reader of a value is wanted behind an operation of another kind than those that make
        the value and what is stored, and follows the latter.
        """
        level = max(self.level[self.made[v]] for v in (value, stored))
        return self.is_cheap(self.eqns[number]) and self.wanted[number] > level and number > self.made[stored]

    def levels_behind(self, value: Any, stored: Any) -> set[int]:
        """Levels at which such readers are wanted."""
        return {self.wanted[u] for u in self.users[value] if self.is_behind(u, value, stored)}

    def last(self, value: Any) -> int:
        """The level of a value's last reader: that of a product counts as the level of what reads its result."""
        return max((self.wanted[u] for u in self.users[value]), default=0)


def stored_residuals(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces residuals that far readers read by parts of what is stored; the program and the number of values."""
    crossing = _Readers(closed)
    slices = _slices(crossing)
    found = slices | _masks(crossing, slices)
    if not found:
        return closed, 0
    eqns: list[Any] = []
    copies: dict[tuple[int, Any], Any] = {}
    for number, eqn in enumerate(crossing.eqns):
        level = crossing.wanted[number]
        wanted = dict.fromkeys(a for a in eqn.invars if not jaxapi.is_literal(a) and a in found)
        fresh = {}
        for value in wanted:
            stored = found[value]
            if not crossing.is_behind(number, value, stored.source):
                continue
            if (level, value) not in copies:
                copies[level, value] = jaxapi.new_var(value.aval)
                eqns.append(jaxapi.call_eqn(stored.made_of, [stored.source], [copies[level, value]]))
            fresh[value] = copies[level, value]
        if fresh:
            eqn = jaxapi.substituted(eqn, fresh)
        eqns.append(eqn)
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), len(found)


# Masks ---------------------------------------------------------------------------------------------------------------


def _masks(crossing: _Readers, slices: dict[Any, _Stored]) -> dict[Any, _Stored]:
    """Args: slices: results that are read as parts of others."""
    results = {}  # (operand, threshold) -> of its ReLU
    for eqn in crossing.eqns:
        if jaxapi.primitive_name(eqn) == MAXIMUM:
            for operand, number in (eqn.invars, eqn.invars[::-1]):
                if not jaxapi.is_literal(operand) and (threshold := _threshold(number)) is not None:
                    results[operand, threshold] = eqn.outvars[0]
    found = {}
    for eqn in crossing.eqns:
        if jaxapi.primitive_name(eqn) != GREATER or jaxapi.is_literal(eqn.invars[0]):
            continue
        (mask,), threshold = eqn.outvars, _threshold(eqn.invars[1])
        result = results.get((eqn.invars[0], threshold))
        if result is None or not is_large(mask) or mask in crossing.results or str(mask.aval.dtype) != MASK:
            continue
        stored = _compared(slices.get(result, _Stored(result, lambda y: y)), eqn.invars[1].val)
        levels = crossing.levels_behind(mask, stored.source)
        if levels and crossing.is_kept(result) and crossing.last(stored.source) >= max(levels):
            found[mask] = stored
    return found


def _compared(stored: _Stored, threshold: Any) -> _Stored:
    def mask(source: Any) -> Any:
        result = stored.made_of(source)
        return result > np.asarray(threshold, result.dtype)

    return _Stored(stored.source, mask)


def _threshold(atom: Any) -> tuple[str, float | int] | None:
    """A real number that is the same for all elements, with its type; None for anything else."""
    if not jaxapi.is_literal(atom) or np.ndim(atom.val) or str(atom.aval.dtype).startswith("complex"):
        return None
    return str(atom.aval.dtype), np.asarray(atom.val).item()


# Slices --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Where a value lies in a concatenation. Attributes: whole: the latter. first: position along its dimension."""

    whole: Any
    dimension: int
    first: int


def _slices(crossing: _Readers) -> dict[Any, _Stored]:
    parts: dict[Any, _Part] = {}
    for eqn in reversed(crossing.eqns):  # the last concatenation of a chain first
        if jaxapi.primitive_name(eqn) != CONCATENATE:
            continue
        (whole,), dimension, place = eqn.outvars, eqn.params["dimension"], 0
        around = parts.get(whole)
        for operand in eqn.invars:
            if not jaxapi.is_literal(operand) and is_large(operand):
                if around is None:
                    parts[operand] = _Part(whole, dimension, place)
                elif around.dimension == dimension:
                    parts[operand] = _Part(around.whole, dimension, around.first + place)
            place += operand.aval.shape[dimension]
    by_whole = defaultdict(list)
    for value, part in parts.items():
        if value in crossing.made and value not in crossing.results and crossing.levels_behind(value, part.whole):
            by_whole[part.whole].append(value)
    return {
        v: _cut(v, parts[v])
        for whole, values in by_whole.items()
        if _is_smaller(crossing, whole, values)
        for v in values
    }


def _is_smaller(crossing: _Readers, whole: Any, values: list[Any]) -> bool:
    """Whether a concatenation takes no more memory than the operands that it stands for."""
    until = max(max(crossing.levels_behind(value, whole)) for value in values)
    return crossing.last(whole) >= until or jaxapi.nbytes(whole) < sum(map(jaxapi.nbytes, values))


def _cut(value: Any, part: _Part) -> _Stored:
    limit = part.first + value.aval.shape[part.dimension]
    return _Stored(part.whole, lambda c: lax.slice_in_dim(c, part.first, limit, axis=part.dimension))

"""Copies element-wise operations to the column sums that read them (rematerialisation), where their operands are kept.

    d = f(x, g);  sum(d);  sum(d * h(x));  k(d)     becomes     sum(f(x, g));  sum(f(x, g) * h(x));  k(f(x, g))

The gradient of a batch norm needs sums of values that its own gradient is made of, once the sums are known.  Left as it
is a kernel writes those values, and a second and a third read them.  With copies the sums are one kernel that reads x
and g, and the gradient is another (`fusion.greedy` and `fusion.sink_outputs` make them so).

Only sums over long columns (`LEAST_POINTS`) of values that are in memory for nobody else, made of at most
`MOST_OPERANDS` arrays of their size.  Where the latest of these is what a product or convolution makes, the sums belong
into its epilogue (`fusion.match_column_sums`).  No value changes.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.rewrite.backward.rematerialize import ELEMENTWISE, MOST_OPERATIONS, Crossing
from jcuts.rewrite.hoist_vectors import LAYOUTS
from jcuts.trace import jaxapi

SUM = "reduce_sum"
PRODUCTS = ("dot_general", "conv_general_dilated")
LEAST_POINTS = 8192
"""Of a column: fewer stay in the registers of a block, whose kernel needs no copies (`lower.reduction.column_norm`)."""
CROP = "slice"
"""Reads a part of what another kernel makes, as a gradient without its padding."""
MOST_OPERANDS = 2
"""Arrays that a copy reads, at most: as many as are written and read without it."""


def separate_sums(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Gives column sums copies of what they sum; returns the program and the number of these sums."""
    values = _Values(closed)
    eqns: list[Any] = []
    count = 0
    for eqn in closed.jaxpr.eqns:
        cone = values.cone(eqn) if is_column_sum(eqn) else ()
        count += bool(cone)
        copies: dict[Any, Any] = {}
        for number in cone:
            source = closed.jaxpr.eqns[number]
            made = [jaxapi.new_var(v.aval) for v in source.outvars]
            eqns.append(source.replace(invars=_replaced(source.invars, copies), outvars=made))
            copies |= dict(zip(source.outvars, made, strict=True))
        eqns.append(eqn.replace(invars=_replaced(eqn.invars, copies)) if cone else eqn)
    return (jaxapi.dce(jaxapi.with_eqns(closed, eqns)), count) if count else (closed, 0)


def _replaced(atoms: Any, copies: dict[Any, Any]) -> list[Any]:
    return [a if jaxapi.is_literal(a) else copies.get(a, a) for a in atoms]


def is_column_sum(eqn: Any) -> bool:
    """Whether an equation sums long columns: over all dimensions but the last."""
    if jaxapi.primitive_name(eqn) != SUM or jaxapi.is_literal(eqn.invars[0]):
        return False
    shape = eqn.invars[0].aval.shape
    return tuple(eqn.params["axes"]) == tuple(range(len(shape) - 1)) and math.prod(shape[:-1]) > LEAST_POINTS


class _Values:
    """What the values of a flat program are made of, and who reads them."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        self._crossing = crossing = Crossing(closed)
        self.eqns, self.made, self.users, self.results = crossing.eqns, crossing.made, crossing.users, crossing.results

    def cone(self, sums: Any) -> tuple[int, ...]:
        """The equations to copy for a sum, in order; none where copies save nothing."""
        shape = sums.invars[0].aval.shape
        found: set[int] = set()
        operands: set[Any] = set()
        stack = [sums.invars[0]]
        while stack:
            value = stack.pop()
            number = self.made.get(value)
            if number is None or not self._is_member(number, shape) or self._is_stored(value, shape):
                operands.add(value)  # as large as what is summed: only layouts of vectors are followed besides
            elif number not in found:
                found.add(number)
                cropped = jaxapi.primitive_name(self.eqns[number]) == CROP
                stack += [a for a in self.eqns[number].invars if cropped or self._is_followed(a, shape)]
        large = [v for n in found for v in self.eqns[n].outvars if _is_large(v, shape)]
        if not any(self._others(v, found, sums) for v in large) or len(found) > MOST_OPERATIONS:
            return ()
        if len(operands) > MOST_OPERANDS or any(map(self._is_kept, large)) or self._is_behind_product(operands):
            return ()
        return tuple(sorted(found))

    def _is_member(self, number: int, shape: tuple[int, ...]) -> bool:
        """Whether an equation is repeated: element-wise, or the layout of a vector along the columns."""
        eqn = self.eqns[number]
        if jaxapi.primitive_name(eqn) in LAYOUTS:
            return not any(_is_large(a, shape) for a in eqn.invars)
        return jaxapi.primitive_name(eqn) in {*ELEMENTWISE, CROP} and eqn.outvars[0].aval.shape == shape

    def _is_stored(self, value: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value is in memory for kernels behind another product or the like."""
        return _is_large(value, shape) and bool(self._crossing.far(value))

    def _is_followed(self, atom: Any, shape: tuple[int, ...]) -> bool:
        number = None if jaxapi.is_literal(atom) else self.made.get(atom)
        return _is_large(atom, shape) or (number is not None and self._is_member(number, shape))

    def _root(self, value: Any) -> int:
        """The latest equation behind a value that is neither element-wise nor a layout."""
        number = self.made[value]
        while self._is_member(number, value.aval.shape):
            before = [
                self.made[a] for a in self.eqns[number].invars if _is_large(a, value.aval.shape) and a in self.made
            ]
            if not before:
                break
            number = max(before)
        return number

    def _others(self, value: Any, members: set[int], sums: Any) -> bool:
        """Whether something else than the sum needs a value."""
        return any(n not in members and self.eqns[n] is not sums for n in self.users.get(value, ()))

    def _is_kept(self, value: Any) -> bool:
        """Whether a value is in memory in any case: a result, or what neither a sum nor an element-wise one reads."""
        shape = value.aval.shape
        return value in self.results or any(
            jaxapi.primitive_name(self.eqns[n]) != SUM and not self._is_member(n, shape)
            for n in self.users.get(value, ())
        )

    def _is_behind_product(self, operands: set[Any]) -> bool:
        """Whether the last of some values to be made is a product's or a dense convolution's."""
        last = max((self._root(v) for v in operands if v in self.made), default=None)
        if last is None or jaxapi.primitive_name(self.eqns[last]) not in PRODUCTS:
            return False
        params = self.eqns[last].params
        return params.get("feature_group_count", 1) == 1 and params.get("batch_group_count", 1) == 1


def _is_large(atom: Any, shape: tuple[int, ...]) -> bool:
    return not jaxapi.is_literal(atom) and atom.aval.shape == shape

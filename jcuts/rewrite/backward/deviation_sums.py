"""Replaces sums of deviations from the mean by zero (algebraic simplification), without a pass over the values.

    s = sum(x);  m = s / n;  sum(c * (x - m))        becomes        c * (0 * m)

The gradient of a variance (`jnp.var`, the statistics of a batch norm) has such a sum for its mean: automatic
differentiation sums over all rows what is zero but for rounding.  Left alone it is a pass over the activation and a
second one that waits for it; rewritten, the gradient is element-wise behind the sums of the operation before.

Not `s - n * m`: that is the rounding error of m where n m is contracted into a fused multiply-add, and zero where it is
not, so that a kernel's answer has no correct digit of XLA's.  Only sums over true means are taken.  0 * m keeps
infinities and NaN: they are in m.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jcuts.rewrite.hoist_vectors import LAYOUTS
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

SUM = "reduce_sum"
TYPES = ("float32", "float64")

Step = Callable[[Any, Any], Any]


class _Sums:
    """A flat program's sums over some dimensions, and what its values are made of."""

    def __init__(self, closed: jaxapi.Closed) -> None:
        self.made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
        self.sums = {
            (eqn.invars[0], tuple(eqn.params["axes"])): eqn.outvars[0]
            for eqn in closed.jaxpr.eqns
            if jaxapi.primitive_name(eqn) == SUM and not jaxapi.is_literal(eqn.invars[0])
        }

    def deviation(self, atom: Any, axes: tuple[int, ...]) -> tuple[Any, list[tuple[Step, Any]]] | None:
        """Mean of the deviations that a value is a multiple of, and the factors; None for any other value.

        Args: atom: the value; axes: those that it is summed over; factors are equal along them.
        """
        steps: list[tuple[Step, Any]] = []
        shape = atom.aval.shape
        while (eqn := None if jaxapi.is_literal(atom) else self.made.get(atom)) is not None:
            name = jaxapi.primitive_name(eqn)
            if name == "neg":
                steps.append((lambda x, _: -x, None))
                atom = eqn.invars[0]
            elif name in ("mul", "div"):
                left, right = eqn.invars
                if self.is_vector(right, axes):
                    steps.append((jnp.multiply if name == "mul" else jnp.divide, right))
                    atom = left
                elif name == "mul" and self.is_vector(left, axes):
                    steps.append((jnp.multiply, left))
                    atom = right
                else:
                    return None
            elif name == "sub":
                x, mean = eqn.invars
                total = None if jaxapi.is_literal(x) or x.aval.shape != shape else self.sums.get((x, axes))
                if total is None or not self.is_mean(mean, total, x, axes):
                    return None
                return mean, steps
            else:
                return None
        return None

    def is_vector(self, atom: Any, axes: tuple[int, ...]) -> bool:
        """Whether a value is the same along some dimensions."""
        if jaxapi.is_literal(atom) or all(atom.aval.shape[d] == 1 for d in axes if atom.aval.ndim):
            return True
        return self.narrow(atom, axes) is not None

    def narrow(self, atom: Any, axes: tuple[int, ...]) -> tuple[Any, tuple[int, ...]] | None:
        """What a broadcast along some dimensions is made of, and the dimensions of the result that it lies in."""
        eqn = self.made.get(atom)
        if eqn is None or jaxapi.primitive_name(eqn) != "broadcast_in_dim":
            return None
        source, places = eqn.invars[0], tuple(int(d) for d in eqn.params["broadcast_dimensions"])
        shape = () if jaxapi.is_literal(source) else source.aval.shape
        alike = all(size == 1 for size, place in zip(shape, places, strict=True) if place in axes)
        return (source, places) if alike else None

    def is_mean(self, atom: Any, total: Any, x: Any, axes: tuple[int, ...]) -> bool:
        """Whether a value is the mean that a sum gives: divided by the number of its terms."""
        if not self.is_vector(atom, axes):
            return False
        count = math.prod(x.aval.shape[d] for d in axes)
        divided = False
        while not jaxapi.is_literal(atom) and atom is not total:
            eqn = self.made.get(atom)
            if eqn is None:
                return False
            name = jaxapi.primitive_name(eqn)
            if name == "div" and not divided and self.value(eqn.invars[1]) == count:
                divided = True
            elif name not in LAYOUTS:
                return False
            atom = eqn.invars[0]
        return divided and atom is total

    def value(self, atom: Any) -> float | None:
        """A number that a literal is, or a broadcast of one."""
        while not jaxapi.is_literal(atom):
            eqn = self.made.get(atom)
            if eqn is None or jaxapi.primitive_name(eqn) not in LAYOUTS:
                return None
            atom = eqn.invars[0]
        return float(atom.val) if jnp.ndim(atom.val) == 0 else None


def deviation_sums(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces sums of deviations from the mean; returns the program and the number of these sums."""
    sums = _Sums(closed)
    eqns, count = [], 0
    for eqn in closed.jaxpr.eqns:
        made = _replaced(eqn, sums) if jaxapi.primitive_name(eqn) == SUM else None
        count += made is not None
        eqns.append(eqn if made is None else made)
    if not count:
        return closed, 0
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count


def _replaced(eqn: Any, sums: _Sums) -> Any:
    """The equation of a sum of deviations without a reduction; None for other sums."""
    axes = tuple(eqn.params["axes"])
    operand, result = eqn.invars[0], eqn.outvars[0].aval
    if str(result.dtype) not in TYPES or not axes:
        return None
    found = sums.deviation(operand, axes)
    if found is None:
        return None
    mean, steps = found
    operands: list[Any] = []

    def reader(atom: Any) -> Callable[[Any], Any]:
        """Gives a factor in the shape of the result, from the operands of the call."""
        if atom is None or jaxapi.is_literal(atom):
            return lambda xs: None if atom is None else atom.val
        narrow = None
        if atom.aval.ndim and any(atom.aval.shape[d] != 1 for d in axes):
            narrow = sums.narrow(atom, axes)
            assert narrow is not None  # `deviation` asked
            if jaxapi.is_literal(narrow[0]):
                return lambda xs: narrow[0].val
        source = atom if narrow is None else narrow[0]
        places = tuple(range(source.aval.ndim)) if narrow is None else narrow[1]
        kept = [place for place in places if place not in axes]
        wide = [1] * operand.aval.ndim
        for size, place in zip(source.aval.shape, places, strict=True):
            wide[place] = size
        shape = [wide[d] for d in range(operand.aval.ndim) if d not in axes]
        operands.append(source)
        number = len(operands) - 1
        return lambda xs: jnp.reshape(xs[number], shape if source.aval.ndim and kept else ())

    mean_of = reader(mean)
    factors = [(step, reader(atom)) for step, atom in steps]

    def narrow_sum(*xs: Any) -> Any:
        value = 0 * mean_of(xs)
        for step, factor in reversed(factors):
            value = step(value, factor(xs))
        return jnp.broadcast_to(value, result.shape)

    return jaxapi.call_eqn(narrow_sum, operands, eqn.outvars)

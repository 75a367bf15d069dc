"""Symbolic evaluation of a softmax's backward equations: polynomials in P, dP, the row sum s and rowsum(P * dP).

Autodiff writes the gradient of a softmax in several ways; all are dS = P (dP - rowsum(P dP)).  Here every value behind
the exponentials E = s P and the gradients dP is a sum of monomials

    coefficient * P^i * dP^j * s^k * R^l          s: sum of a row of E;  R = rowsum(P dP)

as long as operations keep it one: arithmetic, and sums over the softmax's axis, where rowsum(P) = 1.  A value with one
number per row has neither P nor dP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.trace import jaxapi

Monomial = tuple[int, int, int, int]
"""Exponents of P, dP, s and R."""
Terms = Mapping[Monomial, float]
ONE: Monomial = (0, 0, 0, 0)
WEIGHT: Monomial = (1, 0, 0, 0)
GRADIENT: Monomial = (0, 1, 0, 0)
SUM: Monomial = (0, 0, 1, 0)
PRODUCT: Monomial = (1, 1, 0, 0)
REMOVED: Monomial = (1, 0, 0, 1)
"""P * rowsum(P dP), what a softmax's gradient subtracts from P dP."""
MOST_TERMS = 8
MOST_POWER = 4
CLOSE = 100_000
"""Coefficients are equal if they differ by at most this part of them: they are products of float32 numbers."""
SAME = ("convert_element_type", "stop_gradient", "copy", "copy_p")
MOVED = ("broadcast_in_dim", "reshape", "expand_dims", "squeeze")


@dataclass(frozen=True)
class Rows:
    """Shapes of a softmax: all of it, and of one value per row (without, and with its axis).

    Attributes:
        shape: of the scores. axis: of the softmax.
    """

    shape: tuple[int, ...]
    axis: int

    @property
    def flat(self) -> tuple[int, ...]:
        """Shape of one value per row."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def kept(self) -> tuple[int, ...]:
        """The same with a dimension of 1."""
        return (*self.shape[: self.axis], 1, *self.shape[self.axis + 1 :])

    def is_row(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape is that of one value per row, whatever dimensions of 1 it has."""
        return without_ones(shape) == without_ones(self.flat)

    def is_broadcast(self, shape: tuple[int, ...], out: tuple[int, ...], dimensions: Sequence[int]) -> bool:
        """Whether a broadcast of one value per row keeps the order of the rows."""
        moved = [int(to) for to, extent in zip(dimensions, shape, strict=True) if extent != 1]
        wide = out == self.shape
        return moved == [d for d, extent in enumerate(out) if extent != 1 and not (wide and d == self.axis)]


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of more than one element."""
    return tuple(extent for extent in shape if extent != 1)


class SoftmaxAlgebra:
    """Values of equations as polynomials. Args: rows: of the softmax; known: variable -> its polynomial."""

    def __init__(self, rows: Rows, known: Mapping[Any, Terms]) -> None:
        self.rows = rows
        self.known: dict[Any, Terms] = dict(known)

    def evaluate(self, eqn: Any) -> bool:
        """Evaluates an equation; whether its result is known now."""
        if len(eqn.outvars) != 1:
            return False
        if eqn.outvars[0] not in self.known:
            made = self._value(eqn)
            if made is None or len(made) > MOST_TERMS:
                return False
            self.known[eqn.outvars[0]] = made
        return True

    def is_(self, atom: Any, wanted: Terms) -> bool:
        """Whether a value is this polynomial."""
        found = None if jaxapi.is_literal(atom) else self.known.get(atom)
        if found is None or found.keys() != wanted.keys():
            return False
        return all(CLOSE * abs(found[m] - c) <= abs(c) for m, c in wanted.items())

    def _value(self, eqn: Any) -> Terms | None:
        name, out = jaxapi.primitive_name(eqn), eqn.outvars[0].aval
        if not any(not jaxapi.is_literal(a) and a in self.known for a in eqn.invars):
            return None
        if name == "reduce_sum":
            return self._summed(eqn)
        if name in MOVED:
            return self._moved(eqn)
        if name not in OPERATIONS or getattr(out.dtype, "kind", "") not in "fV":
            return None
        if out.shape != self.rows.shape and not self.rows.is_row(out.shape):
            return None
        operands = [self._operand(a, out.shape) for a in eqn.invars]
        return None if any(o is None for o in operands) else OPERATIONS[name](operands, eqn.params)

    def _operand(self, atom: Any, shape: tuple[int, ...]) -> Terms | None:
        if jaxapi.is_literal(atom):
            return {ONE: float(atom.val)} if getattr(atom.val, "size", 1) == 1 else None
        fitting = atom.aval.shape == shape or (shape == self.rows.shape and atom.aval.shape == self.rows.kept)
        return self.known.get(atom) if fitting else None

    def _summed(self, eqn: Any) -> Terms | None:
        (source,) = eqn.invars
        terms, shape = self.known[source], source.aval.shape
        axes = tuple(int(axis) for axis in eqn.params["axes"] if shape[axis] != 1)
        if self.rows.is_row(shape):
            return None if axes else terms
        if shape != self.rows.shape or axes != (self.rows.axis,):
            return None
        found: dict[Monomial, float] = {}
        for (p, g, s, r), coefficient in terms.items():
            if (p, g) not in ((1, 0), (1, 1)):
                return None
            made = (0, 0, s, r + g)
            found[made] = found.get(made, 0.0) + coefficient
        return found

    def _moved(self, eqn: Any) -> Terms | None:
        """Of changes of layout: those between the shapes of one value per row, and its broadcast."""
        (source, *_), out = eqn.invars, eqn.outvars[0].aval.shape
        shape, rows = source.aval.shape, self.rows
        if not rows.is_row(shape) or not (rows.is_row(out) or out == rows.shape):
            return None
        name, dimensions = jaxapi.primitive_name(eqn), eqn.params.get("dimensions")
        if name == "broadcast_in_dim":
            if not rows.is_broadcast(shape, out, eqn.params["broadcast_dimensions"]):
                return None
        elif not rows.is_row(out) or (name == "reshape" and dimensions is not None):
            return None
        return self.known[source]


def _sum(operands: list[Terms], signs: tuple[float, ...]) -> Terms:
    found: dict[Monomial, float] = {}
    for terms, sign in zip(operands, signs, strict=True):
        for monomial, coefficient in terms.items():
            found[monomial] = found.get(monomial, 0.0) + sign * coefficient
    return {m: c for m, c in found.items() if c != 0.0}


def _product(a: Terms, b: Terms) -> Terms:
    found: dict[Monomial, float] = {}
    for (p, g, s, r), x in a.items():
        for (p2, g2, s2, r2), y in b.items():
            made = (p + p2, g + g2, s + s2, r + r2)
            found[made] = found.get(made, 0.0) + x * y
    return found


def _power(terms: Terms, exponent: int) -> Terms | None:
    if len(terms) != 1:
        return None
    (((p, g, s, r), c),) = terms.items()
    if not 1 <= abs(exponent) <= MOST_POWER or not c or not math.isfinite(c):
        return None
    factor = math.prod([c] * abs(exponent))
    factor = factor if exponent > 0 or not factor else 1 / factor
    return {(p * exponent, g * exponent, s * exponent, r * exponent): factor}


def _quotient(operands: list[Terms], params: Any) -> Terms | None:
    inverse = _power(operands[1], -1)
    return None if inverse is None else _product(operands[0], inverse)


OPERATIONS: Mapping[str, Callable[[list[Any], Any], Terms | None]] = {
    "add": lambda x, p: _sum(x, (1.0, 1.0)),
    "add_any": lambda x, p: _sum(x, (1.0, 1.0)),
    "sub": lambda x, p: _sum(x, (1.0, -1.0)),
    "neg": lambda x, p: _sum(x, (-1.0,)),
    "mul": lambda x, p: _product(*x),
    "div": _quotient,
    "square": lambda x, p: _product(x[0], x[0]),
    "integer_pow": lambda x, p: _power(x[0], int(p["y"])),
    **dict.fromkeys(SAME, lambda x, p: x[0]),
}
"""Operations that keep polynomials."""

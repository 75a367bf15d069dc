"""Quasi-affine index expressions over loop axes: the representation of all addresses, guards and iotas.

An `Index` is ``const + sum(coef * atom)`` where an atom is a loop axis, a floor division or a remainder of another
`Index`, or a value that the kernel computes at run time (a gathered row number).  Expressions are immutable,
hashable and kept in a canonical order, so that equal addresses compare equal: merging loads of the same address
(thesis 3.3.1) is a dictionary look-up.

Ranges are half of the simplifier: ``(32*i + j) // 32`` is ``i`` exactly when ``0 <= j < 32``.  A caller that knows the
axes' extents passes them as ``ranges`` (axis name -> extent, the axis runs over ``0 .. extent-1``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jcuts.base.errors import IRError

Ranges = Mapping[str, int]
FLATTENED = 1 << 14
"""Offsets of multi-dimensional indices that are kept: regions of a network address tensors of the same shapes alike."""
AXES = 1 << 10
"""Loop axes whose expression is kept."""


@dataclass(frozen=True, order=False)
class Atom:
    """One non-constant factor of an index: ``kind`` is 'axis', 'div', 'mod' or 'value'."""

    kind: str
    name: str = ""
    inner: Index | None = None
    modulus: int = 0
    value: int = -1

    def key(self) -> tuple[object, ...]:
        """Total order used for the canonical form."""
        found = self.__dict__.get("_key")
        if found is None:
            inner = self.inner.key() if self.inner is not None else ()
            found = self.__dict__["_key"] = (self.kind, self.name, self.modulus, self.value, inner)
        return found

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:  # dictionaries of nodes and of terms ask for it many times
            found = self.__dict__["_hash"] = hash((self.kind, self.name, self.inner, self.modulus, self.value))
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Atom, (self.kind, self.name, self.inner, self.modulus, self.value)  # hashes differ between processes

    def __str__(self) -> str:
        if self.kind == "axis":
            return self.name
        if self.kind == "value":
            return f"%{self.value}"
        return f"(({self.inner}) {'//' if self.kind == 'div' else '%'} {self.modulus})"


@dataclass(frozen=True)
class Index:
    """Quasi-affine expression: ``const + sum(coef * atom)``, terms sorted by `Atom.key`, no zero coefficient."""

    const: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    # -- construction ---------------------------------------------------------------------------------------
    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((self.const, self.terms))
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self.const, self.terms)  # hashes differ between processes

    @staticmethod
    @functools.lru_cache(maxsize=AXES)
    def axis(name: str) -> Index:
        """The loop axis ``name``."""
        return Index(0, ((Atom("axis", name), 1),))

    @staticmethod
    def value(number: int) -> Index:
        """The run-time integer computed by DFG node ``number``."""
        return Index(0, ((Atom("value", value=number), 1),))

    def key(self) -> tuple[object, ...]:
        """A sortable, hashable image of the expression."""
        return (self.const, tuple((atom.key(), coef) for atom, coef in self.terms))

    # -- arithmetic -----------------------------------------------------------------------------------------
    def __add__(self, other: Index | int) -> Index:
        if not isinstance(other, Index):  # jaxprs of derivatives carry numpy integers
            return Index(self.const + int(other), self.terms)
        if not self.terms or not other.terms:
            return Index(self.const + other.const, self.terms or other.terms)
        return _collect(self.const + other.const, self.terms + other.terms)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other)

    def __rsub__(self, other: int) -> Index:
        return (-self) + other

    def __mul__(self, factor: int) -> Index:
        factor = int(factor)
        if factor == 0:
            return Index()
        return Index(self.const * factor, tuple((atom, coef * factor) for atom, coef in self.terms))

    __rmul__ = __mul__

    def floordiv(self, divisor: int, ranges: Ranges) -> Index:
        """``self // divisor`` (rounding down), simplified by the axes' ranges."""
        divisor = int(divisor)
        if divisor <= 0:
            raise IRError(f"floor division of an index by {divisor}")
        if divisor == 1:
            return self
        whole, rest = _split(self, divisor)
        low, high = rest.bounds(ranges)
        if low is not None and high is not None and low // divisor == high // divisor:
            return whole + low // divisor
        shift = rest.const // divisor
        rest = rest + (-shift * divisor)
        return whole + Index(shift, ((Atom("div", inner=rest, modulus=divisor), 1),))

    def mod(self, divisor: int, ranges: Ranges) -> Index:
        """``self % divisor`` (result in ``0 .. divisor-1``), simplified by the axes' ranges."""
        divisor = int(divisor)
        if divisor <= 0:
            raise IRError(f"remainder of an index by {divisor}")
        if divisor == 1:
            return Index()
        _, rest = _split(self, divisor)
        low, high = rest.bounds(ranges)
        if low is not None and high is not None and low // divisor == high // divisor:
            return rest + (-(low // divisor) * divisor)
        rest = Index(rest.const % divisor, rest.terms)
        return Index(0, ((Atom("mod", inner=rest, modulus=divisor), 1),))

    # -- queries --------------------------------------------------------------------------------------------
    @property
    def is_const(self) -> bool:
        """True for a plain number."""
        return not self.terms

    def axes(self) -> frozenset[str]:
        """Every loop axis that occurs anywhere in the expression."""
        found: set[str] = set()
        for atom, _ in self.terms:
            if atom.kind == "axis":
                found.add(atom.name)
            elif atom.inner is not None:
                found |= atom.inner.axes()
        return frozenset(found)

    def values(self) -> frozenset[int]:
        """Every DFG node whose run-time value occurs anywhere in the expression."""
        found: set[int] = set()
        for atom, _ in self.terms:
            if atom.kind == "value":
                found.add(atom.value)
            elif atom.inner is not None:
                found |= atom.inner.values()
        return frozenset(found)

    def stride(self, axis: str) -> int | None:
        """Change per step of ``axis``; None where the axis occurs inside a division or remainder."""
        result = 0
        for atom, coef in self.terms:
            if atom.kind == "axis" and atom.name == axis:
                result += coef
            elif atom.inner is not None and axis in atom.inner.axes():
                return None
        return result

    def bounds(self, ranges: Ranges) -> tuple[int | None, int | None]:
        """Interval of the expression (smallest and largest value), or None where unknown."""
        low: int | None = self.const
        high: int | None = self.const
        for atom, coef in self.terms:
            a_low, a_high = _atom_bounds(atom, ranges)
            if coef < 0:
                a_low, a_high = a_high, a_low
            low = None if low is None or a_low is None else low + coef * a_low
            high = None if high is None or a_high is None else high + coef * a_high
        return low, high

    def substitute(self, replace: Mapping[str, Index], ranges: Ranges) -> Index:
        """Replaces axes by expressions (whose axes' extents are in ``ranges``) and simplifies again."""
        return self._rebuild(lambda atom: replace.get(atom.name), ranges)

    def _rebuild(self, axis: Callable[[Atom], Index | None], ranges: Ranges) -> Index:
        total = Index(self.const)
        for atom, coef in self.terms:
            if atom.kind == "axis":
                new = axis(atom)
                part = new if new is not None else Index(0, ((atom, 1),))
            elif atom.inner is not None:
                inner = atom.inner._rebuild(axis, ranges)
                part = inner.floordiv(atom.modulus, ranges) if atom.kind == "div" else inner.mod(atom.modulus, ranges)
            else:
                part = Index(0, ((atom, 1),))
            total = total + part * coef
        return total

    def renumber(self, numbers: Mapping[int, int]) -> Index:
        """Replaces run-time value numbers (when a graph is copied)."""
        terms = []
        for atom, coef in self.terms:
            if atom.kind == "value":
                atom = Atom("value", value=numbers[atom.value])
            elif atom.inner is not None:
                atom = Atom(atom.kind, inner=atom.inner.renumber(numbers), modulus=atom.modulus)
            terms.append((atom, coef))
        return _collect(self.const, tuple(terms))

    # -- text -----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        parts = [f"{coef}*{atom}" if coef != 1 else str(atom) for atom, coef in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    def to_json(self) -> object:
        """A number, or ``[const, [coef, atom], ...]``."""
        if self.is_const:
            return self.const
        return [self.const, *([coef, _atom_json(atom)] for atom, coef in self.terms)]

    @staticmethod
    def from_json(data: object) -> Index:
        """The inverse of `to_json`."""
        if isinstance(data, int):
            return Index(data)
        if not isinstance(data, list) or not data:
            raise IRError(f"not an index expression: {data!r}")
        terms = tuple((_atom_from_json(atom), coef) for coef, atom in data[1:])
        return Index(data[0], terms)


@functools.lru_cache(maxsize=FLATTENED)
def flatten(index: tuple[Index, ...], shape: tuple[int, ...]) -> Index:
    """Row-major element offset of a multi-dimensional index."""
    if len(index) != len(shape):
        raise IRError(f"index of rank {len(index)} into a shape of rank {len(shape)}")
    total, stride = Index(), 1
    for part, extent in zip(reversed(index), reversed(shape), strict=True):
        total = total + part * stride
        stride *= extent
    return total


def unflatten(offset: Index, shape: tuple[int, ...], ranges: Ranges) -> tuple[Index, ...]:
    """The inverse of `flatten` for an offset that is inside the shape."""
    parts: list[Index] = []
    stride = 1
    for place, extent in enumerate(reversed(shape)):
        part = offset.floordiv(stride, ranges)
        if place < len(shape) - 1:
            part = part.mod(extent, ranges)
        parts.append(part if extent != 1 else Index())
        stride *= max(extent, 1)
    return tuple(reversed(parts))


def _collect(const: int, terms: tuple[tuple[Atom, int], ...]) -> Index:
    merged: dict[Atom, int] = {}
    for atom, coef in terms:
        merged[atom] = merged.get(atom, 0) + coef
    merged = {atom: coef for atom, coef in merged.items() if coef}
    if any(atom.kind == "mod" for atom in merged):
        merged, const = _rejoin(merged, const)
    return Index(const, tuple(sorted(merged.items(), key=_term_key) if len(merged) > 1 else merged.items()))


def _term_key(term: tuple[Atom, int]) -> tuple[object, ...]:
    return term[0].key()


def _rejoin(merged: dict[Atom, int], const: int) -> tuple[dict[Atom, int], int]:
    """``d*(e // d) + e % d`` is ``e``: what a reshape and its inverse leave behind."""
    for atom, coef in list(merged.items()):
        if atom.kind != "mod" or merged.get(atom) != coef:
            continue
        for partner, partner_coef in list(merged.items()):
            if partner.kind != "div" or partner.modulus != atom.modulus or partner_coef != coef * atom.modulus:
                continue
            assert atom.inner is not None and partner.inner is not None
            gap = partner.inner - atom.inner
            if not gap.is_const or gap.const % atom.modulus:
                continue
            del merged[atom], merged[partner]
            whole = (
                _collect(const, (*merged.items(), *(atom.inner * coef).terms))
                + atom.inner.const * coef
                + (gap.const // atom.modulus) * atom.modulus * coef
            )
            return dict(whole.terms), whole.const
    return merged, const


def _split(expr: Index, divisor: int) -> tuple[Index, Index]:
    """``expr == divisor * whole + rest``, with every multiple of the divisor moved into ``whole``."""
    whole_terms, rest_terms = [], []
    for atom, coef in expr.terms:
        (whole_terms if coef % divisor == 0 else rest_terms).append((atom, coef))
    whole = Index(0, tuple((atom, coef // divisor) for atom, coef in whole_terms))
    return whole, Index(expr.const, tuple(rest_terms))


def _atom_bounds(atom: Atom, ranges: Ranges) -> tuple[int | None, int | None]:
    if atom.kind == "axis":
        extent = ranges.get(atom.name)
        return (0, max(extent - 1, 0)) if extent is not None else (None, None)
    if atom.kind == "value" or atom.inner is None:
        return None, None
    low, high = atom.inner.bounds(ranges)
    if atom.kind == "div":
        return (None if low is None else low // atom.modulus, None if high is None else high // atom.modulus)
    if low is not None and high is not None and low >= 0 and high < atom.modulus:
        return low, high
    return 0, atom.modulus - 1


def _atom_json(atom: Atom) -> object:
    if atom.kind == "axis":
        return atom.name
    if atom.kind == "value":
        return atom.value
    assert atom.inner is not None
    return [atom.kind, atom.inner.to_json(), atom.modulus]


def _atom_from_json(data: object) -> Atom:
    if isinstance(data, str):
        return Atom("axis", data)
    if isinstance(data, int):
        return Atom("value", value=data)
    if not isinstance(data, list) or len(data) != 3:
        raise IRError(f"not an index atom: {data!r}")
    return Atom(data[0], inner=Index.from_json(data[1]), modulus=data[2])

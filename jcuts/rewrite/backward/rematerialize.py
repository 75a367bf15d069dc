"""Rematerialises element-wise residuals: a backward pass computes them from what they were made of, not from memory.

    h = x @ w;  t = tanh(p(h));  y = h * t  ...  g * (1 - t * t)      the last t becomes tanh(p(h)) once more

Automatic differentiation keeps every value that its rules need: five of them for a GELU, all made of one h.  Each is
written by the forward kernel and read by the backward one.  Where what they are made of has fewer bytes, these are kept
instead, and the element-wise operations are repeated in the kernel that reads them, whose arithmetic units wait for
memory anyway (`jax.checkpoint` with a policy that saves products does the same by hand).  Of an exact GELU three
functions of an h are kept, and h itself is not: it is kept in their place.

A value crosses where a product, or another operation that is neither element-wise nor a reduction, lies between it and
its reader.  Values that a product reads are in memory in any case, and stay what they are; so does the first value of
a chain that crosses, which the others are made of.

A mask (of a ReLU) has a quarter of the bytes of its operand, and is computed again only where a kernel reads that
operand anyway, as the gradient of a norm does.

No value changes: the copies are the same operations on the same operands.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from jcuts.rewrite.hoist_vectors import ELEMENTWISE as VECTOR_OPS
from jcuts.rewrite.hoist_vectors import LAYOUTS
from jcuts.trace import jaxapi

MASKS = {"and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or"}
"""Comparisons, and what combines them."""
ELEMENTWISE = VECTOR_OPS | MASKS | {"add_any", "clamp", "cos", "erf", "erfc", "log1p", "select_n", "sign", "sin"}
TYPES = ("float32", "bfloat16", "float16")
MASK = "bool"
CONVERSION = "convert_element_type"
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
LEAST_BYTES = 1 << 16
"""Smaller values stay: they cost nothing where they are."""
MOST_OPERATIONS = 24
"""Element-wise operations that are repeated for one value, at most."""


class Crossing:
    """Values of a flat program that cross from one kernel to another, and what they are made of.

    Args: inside: names of further operations that kernels do not end at.
    """

    def __init__(self, closed: jaxapi.Closed, inside: tuple[str, ...] = ()) -> None:
        jaxpr = closed.jaxpr
        self.inside = (*REDUCTIONS, *inside)
        self.eqns = jaxpr.eqns
        self.made = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.users: dict[Any, list[int]] = defaultdict(list)
        for number, eqn in enumerate(jaxpr.eqns):
            for atom in {a for a in eqn.invars if not jaxapi.is_literal(a)}:
                self.users[atom].append(number)
        self.results = {v for v in jaxpr.outvars if not jaxapi.is_literal(v)}
        self.level: list[int] = []
        for eqn in jaxpr.eqns:
            before = [self.level[self.made[a]] for a in eqn.invars if not jaxapi.is_literal(a) and a in self.made]
            self.level.append(max(before, default=0) + self.is_border(eqn))

    @staticmethod
    def is_cheap(eqn: Any) -> bool:
        """Whether an equation may be repeated: element-wise, or a broadcast or reshape of something small."""
        name = jaxapi.primitive_name(eqn)
        if name in LAYOUTS:
            return all(jaxapi.is_literal(a) or not is_large(a) for a in eqn.invars)
        return name in ELEMENTWISE

    def is_border(self, eqn: Any) -> bool:
        """Whether kernels end at an equation: neither element-wise nor a reduction, which rows are read once for."""
        return not self.is_cheap(eqn) and jaxapi.primitive_name(eqn) not in self.inside

    def is_kept(self, value: Any) -> bool:
        """Whether a value is in memory in any case: an argument, a result, or what a product or the like reads."""
        if value not in self.made or value in self.results:
            return True
        return any(self.is_border(self.eqns[u]) for u in self.users[value])

    def far(self, value: Any) -> list[int]:
        """Element-wise readers behind an operation of another kind."""
        level = self.level[self.made[value]] if value in self.made else 0
        return [u for u in self.users[value] if self.level[u] > level and self.is_cheap(self.eqns[u])]

    def far_levels(self, value: Any) -> set[int]:
        """Levels of those readers: kernels that read the value from memory."""
        return {self.level[u] for u in self.far(value)}

    def sources(self) -> dict[Any, Any]:
        """The one large value that an element-wise value is made of, for all that are made of one.

        Where several values would be stored that are made of one that is not, it is stored in their place.
        """
        instead: dict[Any, list[Any]] = defaultdict(list)
        found = self._sources(set(), instead)
        common = {self._last_common(one, values): values for one, values in instead.items() if len(values) > 1}
        shared = {one for one, values in common.items() if sum(map(jaxapi.nbytes, values)) > jaxapi.nbytes(one)}
        if not shared:
            return found
        other = self._sources(shared, instead)
        return other if self._stored_bytes(other, shared) < self._stored_bytes(found, set()) else found

    def _last_common(self, source: Any, values: list[Any]) -> Any:
        """The last value that all of some values are made of, and of which they are made without their source."""
        cones = [{v for n in self.cone(value, source) for v in self.eqns[n].outvars} for value in values]
        for one in sorted(set.intersection(*cones), key=lambda v: -self.made[v]):
            if one not in values and is_large(one) and not any(self._reaches(v, source, one) for v in values):
                return one
        return source

    def _reaches(self, value: Any, source: Any, around: Any) -> bool:
        """Whether a value is made of a source, or of an argument, on a way around another value."""
        todo, seen = [value], set()
        while todo:
            for atom in self.eqns[self.made[todo.pop()]].invars:
                if jaxapi.is_literal(atom) or not is_large(atom) or atom is around or atom in seen:
                    continue
                if atom is source or atom not in self.made:
                    return True
                seen.add(atom)
                todo.append(atom)
        return False

    def _stored_bytes(self, sources: dict[Any, Any], shared: set[Any]) -> int:
        """Bytes of element-wise values in memory, where those with sources are computed again as far as that may be."""
        again = {v for v, one in sources.items() if len(self.cone(v, one)) <= MOST_OPERATIONS}
        stored = {v for v in self.made if is_large(v) and not self.is_kept(v) and self.far(v) and v not in again}
        return sum(map(jaxapi.nbytes, stored | shared))

    def _sources(self, shared: set[Any], instead: dict[Any, list[Any]]) -> dict[Any, Any]:
        """Args: shared: what is stored for others. instead: filled: values that are stored in place of one's."""
        found: dict[Any, Any] = {}
        narrow: set[Any] = set()  # stored in place of what is converted from them
        for eqn in self.eqns:
            if not self.is_cheap(eqn) or jaxapi.primitive_name(eqn) in LAYOUTS:
                continue
            large = {a for a in eqn.invars if not jaxapi.is_literal(a) and is_large(a) and not self.is_wide(a)}
            source = {found.get(a, a) for a in large}
            (value,) = eqn.outvars
            if len(source) != 1 or self.is_kept(value) or value in shared:
                continue
            if is_widening(eqn) and self.far(value):
                source = large
                narrow |= large
            (one,) = source
            if one in narrow or one in shared or self.is_stored(one) or not self.far(value):
                found[value] = one
            else:  # it is stored itself, and others are made of it
                instead[one].append(value)
        return found

    def is_stored(self, value: Any) -> bool:
        """Whether a value is written to memory: another kernel reads it."""
        return self.is_kept(value) or bool(self.far(value))

    def is_wide(self, value: Any) -> bool:
        """Whether a value is a small one, broadcast."""
        return (
            value in self.made
            and self.is_cheap(eqn := self.eqns[self.made[value]])
            and (jaxapi.primitive_name(eqn) in LAYOUTS)
        )

    def cone(self, value: Any, source: Any) -> list[int]:
        """The equations that make a value from its source."""
        numbers: set[int] = set()
        todo = [value]
        while todo:
            number = self.made[todo.pop()]
            if number in numbers:
                continue
            numbers.add(number)
            for atom in self.eqns[number].invars:
                if not jaxapi.is_literal(atom) and is_large(atom) and atom is not source:
                    todo.append(atom)
        return sorted(numbers)


def is_large(value: Any) -> bool:
    """Whether a value has bytes that count."""
    return jaxapi.nbytes(value) >= LEAST_BYTES


def is_widening(eqn: Any) -> bool:
    """Whether an equation converts many values to a floating type of more bytes."""
    if jaxapi.primitive_name(eqn) != CONVERSION or jaxapi.is_literal(eqn.invars[0]):
        return False
    (source,), (value,) = eqn.invars, eqn.outvars
    if not {str(source.aval.dtype), str(value.aval.dtype)} <= set(TYPES) or not is_large(source):
        return False
    return source.aval.dtype.itemsize < value.aval.dtype.itemsize


def rematerialize(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces residuals by copies of what makes them; returns the program and the number of values replaced."""
    crossing = Crossing(closed)
    cones: dict[Any, list[int]] = {}
    read_at: dict[Any, set[int]] = defaultdict(set)  # source -> levels of kernels that read it
    masks = []
    for value, source in crossing.sources().items():
        read_at[source] |= crossing.far_levels(source)
        levels = crossing.far_levels(value)
        if not is_large(value) or not levels or len(cone := crossing.cone(value, source)) > MOST_OPERATIONS:
            continue
        if str(value.aval.dtype) in TYPES:
            cones[value] = cone
            read_at[source] |= levels
        elif str(value.aval.dtype) == MASK:
            masks.append((value, source, levels, cone))
    cones |= {value: cone for value, source, levels, cone in masks if levels <= read_at[source]}
    return (_with_copies(closed, cones, crossing), len(cones)) if cones else (closed, 0)


def _with_copies(closed: jaxapi.Closed, cones: dict[Any, list[int]], crossing: Crossing) -> jaxapi.Closed:
    """The program in which far readers have copies, readers of one level the same."""
    eqns: list[Any] = []
    copies: dict[tuple[int, Any], Any] = {}
    for number, eqn in enumerate(closed.jaxpr.eqns):
        level = crossing.level[number]
        wanted = dict.fromkeys(a for a in eqn.invars if not jaxapi.is_literal(a) and a in cones)
        for value in wanted if crossing.is_cheap(eqn) else ():
            if level <= crossing.level[crossing.made[value]]:
                continue
            for one in cones[value]:
                old = crossing.eqns[one]
                if (level, old.outvars[0]) in copies:
                    continue
                new = [jaxapi.new_var(v.aval) for v in old.outvars]
                inputs = [a if jaxapi.is_literal(a) else copies.get((level, a), a) for a in old.invars]
                eqns.append(old.replace(invars=inputs, outvars=new))
                copies.update(((level, v), n) for v, n in zip(old.outvars, new, strict=True))
        if crossing.is_cheap(eqn):
            fresh = {v: copies[level, v] for v in wanted if (level, v) in copies}
            if fresh:
                eqn = jaxapi.substituted(eqn, fresh)
        eqns.append(eqn)
    return jaxapi.dce(jaxapi.with_eqns(closed, eqns))

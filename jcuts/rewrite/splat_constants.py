"""Splat constants: arrays that hold one number everywhere (a bias of zeros, a gain of ones) become that scalar.

    x + [0 0 0]  ->  x + 0

XLA keeps such arrays as broadcasts, and materialises them in every call for kernels that take arrays: seven launches of
ResNet50 in bfloat16 at batch 1.  No value changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jcuts.rewrite.matmul_patterns import Program
from jcuts.trace import jaxapi

ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "max", "min"})
BROADCAST = "broadcast_in_dim"
MOST = 1 << 16
"""Elements of the largest array that is looked at: vectors of layers, not their weights."""
NUMBERS = (0, 1)
"""Which numbers: each makes kernels of its own, so that layers with many would no longer share theirs."""


def splat_constants(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Replaces splat constants by scalars where the operation accepts scalars; the same program otherwise."""
    program = Program(closed)
    found: dict[Any, Any] = {}

    def number(atom: Any) -> Any:
        if jaxapi.is_literal(atom) or atom not in program.consts:
            return None
        if atom not in found:
            found[atom] = _number(program.consts[atom], atom.aval)
        return found[atom]

    replaced = {id(eqn): [made] for eqn in closed.jaxpr.eqns if (made := _with_numbers(eqn, number)) is not eqn}
    return program.with_eqns(replaced) if replaced else closed


def _with_numbers(eqn: Any, number: Any) -> Any:
    """The equation with scalar literals for splat constants, where it accepts them; else the same."""
    name = jaxapi.primitive_name(eqn)
    if name == BROADCAST and len(eqn.invars) == 1:
        value = number(eqn.invars[0])
        return eqn if value is None else eqn.replace(invars=[value], params={**eqn.params, "broadcast_dimensions": ()})
    if name not in ELEMENTWISE:
        return eqn
    for at, atom in enumerate(eqn.invars):
        other, value = eqn.invars[1 - at], number(atom)
        # what is left has the shape of the result, and lies as that does
        if value is not None and not jaxapi.is_literal(other) and _is_like(other.aval, eqn.outvars[0].aval):
            return eqn.replace(invars=[value, other] if at == 0 else [other, value])
    return eqn


def numbers_of(closed: jaxapi.Closed) -> str:
    """The scalar of every splat constant of a program, as text; '' where there is none."""
    pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    found = {place: _number(value, var.aval) for place, (var, value) in enumerate(pairs)}
    return ", ".join(f"{place}: {literal.val}" for place, literal in found.items() if literal is not None)


def _number(value: Any, aval: Any) -> Any:
    """The number that an array holds everywhere, as a literal; None for other arrays and numbers."""
    if jaxapi.is_tracer(value) or not 1 < getattr(aval, "size", 0) <= MOST or not isinstance(aval.dtype, np.dtype):
        return None
    if aval.dtype.kind in "cb" or not _is_whole(aval):
        return None
    flat = np.asarray(value).reshape(-1)
    first = flat[:1]
    bits = first.tobytes()
    if bits not in (np.asarray(n, aval.dtype).tobytes() for n in NUMBERS):
        return None
    if flat[-1:].tobytes() != bits or flat.tobytes() != bits * flat.size:
        return None
    return jaxapi.new_literal(first[0], jaxapi.ShapedArray((), aval.dtype, weak_type=getattr(aval, "weak_type", False)))


def _is_like(one: Any, other: Any) -> bool:
    return one.shape == other.shape and getattr(one, "sharding", None) == getattr(other, "sharding", None)


def _is_whole(aval: Any) -> bool:
    """Whether the type says nothing of devices."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return all(part is None for part in spec)

"""Value range analysis (interval arithmetic) of the scalar expressions of a flat jaxpr: what is certainly finite.

A learning rate is a number of the program, or a schedule: sums, products, minima, cosines and powers of the step
count.  Rewrites that leave out products with zero need to know that the other factor is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jcuts.trace import jaxapi

Range = tuple[float, float]
"""Least and greatest value; both finite, and the value is no NaN."""
PASSES = ("broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient", "convert_element_type")
MOST_DEPTH = 64
"""Equations behind one another that are followed; a longer expression has no range."""


def _product(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Range, b: Range) -> Range | None:
    return None if b[0] <= 0 <= b[1] else _product(a, (1 / b[1], 1 / b[0]))


def _power(base: Range, exponent: Range) -> Range | None:
    if base[0] <= 0:
        return None
    ends = [x**y for x in base for y in exponent]
    return min(ends), max(ends)


def _whole_power(base: Range, exponent: Range) -> Range | None:
    number = int(exponent[0])
    if number < 0:
        return None
    ends = [x**number for x in base]
    return (min(*ends, 0.0), max(*ends, 0.0)) if base[0] <= 0 <= base[1] else (min(ends), max(ends))


def _root(a: Range) -> Range | None:
    return None if a[0] < 0 else (math.sqrt(a[0]), math.sqrt(a[1]))


RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "integer_pow": _whole_power,
    "sqrt": _root,
    "neg": lambda a: (-a[1], -a[0]),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp": lambda low, a, high: (min(max(a[0], low[0]), high[0]), min(max(a[1], low[1]), high[1])),
    "select_n": lambda _, *cases: (min(c[0] for c in cases), max(c[1] for c in cases)),
    "exp": lambda a: (math.exp(a[0]), math.exp(a[1])),
    "cos": lambda _: (-1.0, 1.0),
    "sin": lambda _: (-1.0, 1.0),
}
"""By primitive: the range of a result from those of the operands."""


def value_range(atom: Any, made: dict[Any, Any], depth: int = 0) -> Range | None:
    """The range of a scalar (or of a scalar, broadcast); None where it may be NaN or infinite, or is not known.

    Ends are computed in float64, not rounded outward: they say that a value is finite, not what it is.

    Args: made: the equation that makes each value.
    """
    if jaxapi.is_literal(atom):
        value = np.asarray(atom.val)
        return _within_type((float(value), float(value)), atom.aval) if value.ndim == 0 else None
    eqn = made.get(atom)
    if eqn is None or depth > MOST_DEPTH:
        return _range_of_type(atom.aval)
    name = jaxapi.primitive_name(eqn)
    operands = [value_range(a, made, depth + 1) for a in eqn.invars] if name in (*PASSES, *RULES) else [None]
    operands += [(float(eqn.params["y"]), float(eqn.params["y"]))] if name == "integer_pow" else []
    if any(operand is None for operand in operands):
        return _range_of_type(atom.aval)
    try:
        found = operands[0] if name in PASSES else RULES[name](*operands)
    except OverflowError:
        return _range_of_type(atom.aval)
    return _range_of_type(atom.aval) if found is None else _within_type(found, atom.aval)


def _range_of_type(aval: Any) -> Range | None:
    """All values of an integer type or of bool; None of floating-point types, which have infinities."""
    if aval.dtype == jnp.bool_:
        return 0.0, 1.0
    if not jnp.issubdtype(aval.dtype, jnp.integer):
        return None
    limits = jnp.iinfo(aval.dtype)
    return float(limits.min), float(limits.max)


def _within_type(found: Range, aval: Any) -> Range | None:
    """A range that a type can hold: integers wrap around beyond theirs, floating-point values become infinite."""
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        whole = _range_of_type(aval)
        return found if whole is None or whole[0] <= found[0] <= found[1] <= whole[1] else whole
    limit = float(jnp.finfo(aval.dtype).max) / 2  # half: roundings of the ends do not matter
    return found if all(math.isfinite(end) and abs(end) <= limit for end in found) else None

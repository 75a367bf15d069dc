"""Pre-rounds constant float32 weights to TF32 and stores them K-major, as ``wgmma`` takes them.

    x . w  ->  x . v^T,    v = round(w^T)       conv(x, w)  ->  conv(x, v),  v = round(w) as (O, H, W, I)

At the default precision XLA's libraries round both operands to TF32 (10 bits after the point, to nearest) in every
call; constants can be rounded once, which changes nothing in what such a product computes.  ``wgmma`` kernels
(`codegen.cuda.gemm.wgmma_mainloop`) then read weights without rounding: `rounded_constants` says which ones.  Nothing
else is rounded: not arguments, not other types, not products of a higher precision, and not small ones or those of a
few rows, which libraries may compute without tensor cores.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax
import numpy as np

from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT, Program
from jcuts.trace import jaxapi

LEAST_POINTS = 1 << 18
"""Outputs from which on weights are rounded: those of `schedule.gpu.gemm.wgmma`."""
LEAST_PRODUCTS = 1 << 27
"""Multiply-adds from which on they are."""
FEW_ROWS = 33
"""Rows from which on weights of few outputs are rounded, where k fills a line."""
FEW_PRODUCTS = 1 << 22
"""Multiply-adds from which on those are."""
LEAST_COLUMNS = 17
"""Output channels from which on there are such kernels."""
PIECE = 4
"""k of a copy."""
LINE = 32
"""k of a line of shared memory."""
HALF = 16
"""What channels of taps are multiples of."""
LOW = np.uint32(0x1FFF)
"""The bits of a float32 that TF32 lacks."""

Order = tuple[int, ...]


def tf32_weights(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rounds and transposes the constant weights of large matmuls; returns the program and their number."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = order_of(eqn)
        weights = None if order is None or jaxapi.is_literal(eqn.invars[1]) else program.consts.get(eqn.invars[1])
        if order is None or not _is_array(weights):
            continue
        plain = order == tuple(range(len(order)))
        if plain and is_rounded(weights):
            continue
        made = _rounded(weights, order)
        if made is not None:
            replaced[id(eqn)] = [turned(eqn, program.constant(made, made.dtype), order)]
    return (program.with_eqns(replaced), len(replaced)) if replaced else (closed, 0)


def rounded_constants(closed: jaxapi.Closed) -> frozenset[Any]:
    """The constants that are K-major weights of large matmuls and hold TF32 numbers only."""
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    found = set()
    for eqn in closed.jaxpr.eqns:
        order = order_of(eqn)
        if order is None or order != tuple(range(len(order))) or jaxapi.is_literal(eqn.invars[1]):
            continue
        atom = eqn.invars[1]
        if atom not in found and _is_array(consts.get(atom)) and is_rounded(consts[atom]):
            found.add(atom)
    return frozenset(found)


def round_tf32(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest TF32 number, ties to even; non-finite values stay.

    >>> round_tf32(np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12])).tolist()
    [1.0, 1.001953125, 1.0]
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    up = (LOW >> np.uint32(1)) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(values), ((bits + up) & ~LOW).view(np.float32), values)


# -- which, and how -------------------------------------------------------------------------------------------------
def order_of(eqn: Any) -> Order | None:
    """The dimension order that makes the right operand K-major (columns, k); None for other equations.

    Also None for GEMMs with few outputs and small K, for which no kernel takes rounded weights.
    """
    name = jaxapi.primitive_name(eqn)
    if name not in (DOT, CONVOLUTION) or any(str(v.aval.dtype) != "float32" for v in (*eqn.invars, *eqn.outvars)):
        return None
    if not _is_default(eqn.params["precision"]) or str(eqn.params["preferred_element_type"]) not in ("None", "float32"):
        return None
    order = _order_of_dot(eqn) if name == DOT else _order_of_filter(eqn)
    if order is None:
        return None
    shape = eqn.invars[1].aval.shape
    columns, terms, points = shape[order[0]], math.prod(shape[d] for d in order[1:]), eqn.outvars[0].aval.size
    enough = points >= LEAST_POINTS and points * terms >= LEAST_PRODUCTS
    if terms >= LINE:
        enough = enough or (points >= FEW_ROWS * columns and points * terms >= FEW_PRODUCTS)
    return order if enough and columns >= LEAST_COLUMNS and terms % PIECE == 0 else None


def _order_of_dot(eqn: Any) -> Order | None:
    (mine, theirs), (batch, _) = eqn.params["dimension_numbers"]
    free = [d for d in range(eqn.invars[1].aval.ndim) if d not in theirs]
    rank = eqn.invars[0].aval.ndim
    if batch or len(free) != 1 or sorted(mine) != list(range(rank - len(mine), rank)):
        return None
    return (free[0], *(right for _, right in sorted(zip(mine, theirs, strict=True))))


def _order_of_filter(eqn: Any) -> Order | None:
    p, shape = eqn.params, eqn.invars[1].aval.shape
    numbers, last = p["dimension_numbers"], len(shape) - 1
    if p["feature_group_count"] != 1 or p["batch_group_count"] != 1 or any(n != 1 for n in p["lhs_dilation"]):
        return None
    if numbers.lhs_spec[1] != last or numbers.out_spec[1] != last:
        return None
    spec = numbers.rhs_spec
    taps = math.prod(shape[d] for d in spec[2:])
    if shape[spec[1]] % (HALF if taps > 1 else PIECE):
        return None
    return (spec[0], *spec[2:], spec[1])


def _is_default(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or part == jax.lax.Precision.DEFAULT for part in parts)


def turned(eqn: Any, weights: Any, order: Order) -> Any:
    """The matmul with weights in this dimension order."""
    params = dict(eqn.params)
    if jaxapi.primitive_name(eqn) == DOT:
        (mine, _), batch = params["dimension_numbers"]
        params["dimension_numbers"] = ((tuple(sorted(mine)), tuple(range(1, len(order)))), batch)
    else:
        numbers, last = params["dimension_numbers"], len(order) - 1
        params["dimension_numbers"] = type(numbers)(numbers.lhs_spec, (0, last, *range(1, last)), numbers.out_spec)
    return eqn.replace(invars=[eqn.invars[0], weights], params=params)


# -- values ---------------------------------------------------------------------------------------------------------
_known: dict[tuple[int, Order], tuple[weakref.ref[Any], Any]] = {}
"""What was found out about arrays that never change: weights in an order, and whether they are rounded already."""


def is_rounded(values: Any) -> bool:
    """Whether all values of a float32 array are TF32 numbers (NaN and infinities are not)."""

    def found() -> bool:
        array = np.asarray(values)
        bits = np.ascontiguousarray(array).view(np.uint32)
        return not (bits.reshape(-1)[:PIECE] & LOW).any() and not (bits & LOW).any() and bool(np.isfinite(array).all())

    return _remembered(values, (), found)


def _rounded(values: Any, order: Order) -> Any:
    """Weights in this order, rounded; None where they are not finite, or are not when they are rounded."""

    def found() -> Any:
        made = round_tf32(np.ascontiguousarray(np.asarray(values).transpose(order)))
        return jaxapi.constant(made) if np.isfinite(made).all() else None

    return _remembered(values, order, found)


def _remembered(values: Any, order: Order, find: Any) -> Any:
    if not isinstance(values, jax.Array):  # NumPy arrays may change
        return find()
    key = (id(values), order)
    known = _known.get(key)
    if known is None or known[0]() is not values:
        known = (weakref.ref(values, lambda _, known=_known: known.pop(key, None)), find())
        _known[key] = known
    return known[1]


def _is_array(value: Any) -> bool:
    if isinstance(value, jax.Array) and not jaxapi.is_tracer(value):
        return len(value.sharding.device_set) == 1 and value.is_fully_addressable
    return isinstance(value, np.ndarray)

"""Algebraic commutation of sum pooling with a 1x1 convolution or matmul, applied where it reduces work.

    dot(pool(x) / n, w)   ->  pool(dot(x, w)) / n      fewer channels to pool (an inception block's pooled branch)
    pool(dot(x, w))       ->  dot(pool(x), w)          fewer points to multiply at (a dense net's transition)

``pool`` sums over windows of space, ``dot`` (or a convolution of one point) over channels: each is linear and leaves
the other's dimensions alone, so padding, strides and dilations of the window do not matter.  They are exchanged where
the matmul then has no more output points and the intermediate is smaller.  In the first form the matmul reads the same
input as its siblings in the block, and `horizontal_matmul` can join them.
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT, Program, is_point_by_point, new_value
from jcuts.trace import jaxapi

FLOATS = ("float32", "float64", "bfloat16")
"""Not float16: the sum of a window of products may overflow where a mean times weights did not."""
POOL = "reduce_window_sum"
DIVIDE = "div"


def commute_pool_matmul(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """The program with pools and matmuls exchanged where that is less work, and the number of exchanges."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    count = 0
    for eqn in closed.jaxpr.eqns:
        found = _product_first(eqn, program) or _pool_first(eqn, program)
        if found is not None and not set(found) & set(replaced):
            replaced.update(found)
            count += 1
    return (program.with_eqns(replaced), count) if count else (closed, 0)


def _product_first(product: Any, program: Program) -> dict[int, list[Any]] | None:
    """dot(pool(x) / n, w) -> pool(dot(x, w)) / n, n a number, or one per point of space."""
    channel = _channel(product)
    if channel is None:
        return None
    pool = program.maker(product.invars[0], POOL)
    division = None if pool is not None else program.maker(product.invars[0], DIVIDE)
    if division is not None and _is_per_point(division, channel):
        pool = program.maker(division.invars[0], POOL)
    if pool is None or not _keeps(pool, channel):
        return None
    x, result = pool.invars[0], product.outvars[0].aval
    before, after = _points(x.aval, channel), _points(result, channel)
    if before > after or result.shape[channel] >= x.aval.shape[channel]:
        return None
    made = new_value(_with(x.aval.shape, channel, result.shape[channel]), result)
    # A division may repeat what was pooled along dimensions of 1.
    shape = _with(pool.outvars[0].aval.shape, channel, result.shape[channel])
    pooled = product.outvars[0] if division is None else new_value(shape, result)
    eqns = [
        product.replace(invars=[x, *product.invars[1:]], outvars=[made]),
        pool.replace(invars=[made], outvars=[pooled]),
    ]
    gone = {id(pool): []}
    if division is not None:
        eqns.append(division.replace(invars=[pooled, division.invars[1]], outvars=product.outvars))
        gone[id(division)] = []
    return {**gone, id(product): eqns}


def _pool_first(pool: Any, program: Program) -> dict[int, list[Any]] | None:
    """pool(dot(x, w)) -> dot(pool(x), w), where fewer values then lie between the two."""
    if jaxapi.primitive_name(pool) != POOL:
        return None
    product = program.product(pool.invars[0])
    channel = None if product is None else _channel(product)
    if product is None or channel is None or not _keeps(pool, channel):
        return None
    x, result = product.invars[0], pool.outvars[0].aval
    before, after = _points(x.aval, channel), _points(result, channel)
    if after >= before or after * x.aval.shape[channel] > before * result.shape[channel]:
        return None
    pooled = new_value(_with(result.shape, channel, x.aval.shape[channel]), x.aval)
    eqns = [
        pool.replace(invars=[x], outvars=[pooled]),
        product.replace(invars=[pooled, *product.invars[1:]], outvars=pool.outvars),
    ]
    return {id(product): [], id(pool): eqns}


def _channel(product: Any) -> int | None:
    """The channel dimension that a matmul contracts and that its result has in the same position; None otherwise."""
    name = jaxapi.primitive_name(product)
    if name not in (CONVOLUTION, DOT) or product.params.get("out_sharding") is not None:
        return None
    x, result = product.invars[0].aval, product.outvars[0].aval
    if jaxapi.is_literal(product.invars[0]) or str(x.dtype) not in FLOATS or x.dtype != result.dtype or not x.size:
        return None
    if name == DOT:
        last = x.ndim - 1
        plain = product.params["dimension_numbers"] in ((((last,), (n,)), ((), ())) for n in (0, 1))
        return last if plain and product.invars[1].aval.ndim == 2 else None
    numbers = product.params["dimension_numbers"]
    return numbers.lhs_spec[1] if is_point_by_point(product) and numbers.lhs_spec == numbers.out_spec else None


def _keeps(pool: Any, channel: int) -> bool:
    """Whether a window has one channel, and changes nothing along it."""
    p = pool.params
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(p[name][channel] == 1 for name in ones) and tuple(p["padding"][channel]) == (0, 0)


def _is_per_point(division: Any, channel: int) -> bool:
    """Whether a divisor is a scalar or one number per point (no channel dimension)."""
    divisor = division.invars[1].aval
    return divisor.ndim == 0 or (divisor.ndim == division.outvars[0].aval.ndim and divisor.shape[channel] == 1)


def _points(aval: Any, channel: int) -> int:
    return math.prod(_with(aval.shape, channel, 1))


def _with(shape: tuple[int, ...], channel: int, size: int) -> tuple[int, ...]:
    return (*shape[:channel], size, *shape[channel + 1 :])

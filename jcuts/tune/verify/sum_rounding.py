"""Rounding-error model of sums: the error scales with the partial sums, which may be much larger than the result.

For a sum v of K terms t, M = sum |t|, and roundings of up to ``a`` eps each:

| sum | largest error that is simulated |
|---|---|
| products, convolutions, reductions, windows, scattered additions: any order | a eps max(sqrt(K) abs(v), M) |
| running sums, whose order is theirs; prefixes S | a eps sqrt(K) max(abs(S_1), ..., abs(S_k)) |
| running log-sum-exp: relative in the sum is absolute in its logarithm | a eps (sqrt(K) + abs(v)) |
| everything else, products of many factors for one | a eps sqrt(K) abs(v) |

Partial sums may overflow although the result does not: in some order of summation one is as large as the positive terms
together, (M + v) / 2, or as the negative ones, (M - v) / 2.  So may those of the finite terms of an infinite sum, which
is not a number then where they overflow to the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

SUMS = frozenset(
    {
        "conv_general_dilated",
        "cumsum",
        "dot_general",
        "reduce_sum",
        "reduce_window_sum",
        "scatter-add",
    }
)


@dataclass(frozen=True)
class RoundingSpread:
    """Spread of an implementation's result around the exact one.

    Attributes:
        size: error in units of (amplitude * eps), of each element.
        above, below: the largest partial sum of finite terms in any order, and minus the least one; None where nothing
            is summed.
    """

    size: Any
    above: Any = None
    below: Any = None


def terms(eqn: Any) -> int:
    """How many terms (or factors) are put together into one element of the equation's first result; 1: elementwise."""
    name, p = eqn.primitive.name, eqn.params
    shape: Any = eqn.invars[0].aval.shape if eqn.invars else ()
    if name == "dot_general":
        (contract, _), _ = p["dimension_numbers"]
        return max(1, math.prod(shape[k] for k in contract))
    if name == "conv_general_dilated":
        taps = eqn.invars[1].aval.shape
        return max(1, math.prod(taps) // max(1, taps[p["dimension_numbers"].rhs_spec[0]]))
    if name.startswith(("reduce_window", "select_and_")):
        return max(1, math.prod(p["window_dimensions"]))
    if name.startswith("cum"):
        return max(1, int(shape[p["axis"]]))
    if name.startswith("scatter"):  # every index may be the same one
        return 1 + math.prod(eqn.invars[1].aval.shape[:-1])
    if name.startswith(("reduce_", "argm")) and "axes" in p:
        return max(1, math.prod(shape[k] for k in p["axes"]))
    made = max(1, math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 1)
    return max(1, max((math.prod(getattr(v.aval, "shape", ())) for v in eqn.invars), default=1) // made)


def spread(eqn: Any, values: list[Any], result: Any, bind: Callable[[list[Any]], Any]) -> RoundingSpread:
    """The errors of one result.

    Args:
        eqn: the equation; values, result: its operands and the result, in float64.
        bind: evaluates the equation on other operands.
    """
    name, count = eqn.primitive.name, math.sqrt(terms(eqn))
    if name == "cumlogsumexp":
        return RoundingSpread(count + lax.abs(result))
    if name not in SUMS or jnp.issubdtype(result.dtype, np.complexfloating):
        return RoundingSpread(count * lax.abs(result))
    finite = [jnp.where(jnp.isfinite(v), v, 0) if jnp.issubdtype(v.dtype, np.floating) else v for v in values]
    whole = bind([lax.abs(v) if jnp.issubdtype(v.dtype, np.floating) else v for v in finite])
    left = lax.cond(
        jnp.isfinite(result).all(), lambda: result, lambda: jnp.where(jnp.isfinite(result), result, bind(finite))
    )
    if name == "cumsum":
        p = eqn.params
        size = count * lax.cummax(lax.abs(result), axis=p["axis"], reverse=p["reverse"])
    else:
        size = jnp.maximum(count * lax.abs(result), whole)
    return RoundingSpread(size, 0.5 * (whole + left), 0.5 * (whole - left))


def overflowed(value: Any, of: RoundingSpread, most: Any, choice: Any) -> Any:
    """The value, or what is left of it where a partial sum exceeds ``most`` in some order.

    Args: choice: random uint64; its lowest bits pick: the value, +inf, -inf, or NaN (both happen).
    """
    if of.above is None:
        return value
    high, low = of.above > most, of.below > most
    pick = choice & np.uint64(3)
    value = jnp.where(high & (pick == 1), jnp.where(jnp.isneginf(value), jnp.nan, jnp.inf), value)
    value = jnp.where(low & (pick == 2), jnp.where(jnp.isposinf(value), jnp.nan, -jnp.inf), value)
    return jnp.where(high & low & (pick == 3), jnp.nan, value)

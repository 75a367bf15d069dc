"""Accurate float64 replacements for functions that XLA computes with errors above a few ulp, for the reference.

A reference with XLA's errors would show them as errors of a more accurate candidate.  jaxlib 0.10 and 0.11 on a CPU:

| operation | XLA's error | where |
|---|---|---|
| ``log1p`` | 115 ulp | x near 1/sqrt(2) - 1 |
| ``atanh`` (from ``log1p``) | 73 ulp | abs(x) near sqrt(2) - 1 |
| ``erfc`` (from ``exp(-x*x)``) | 130 ulp | x > 5 |
| ``erf_inv`` | 15 ulp | abs(x) > 0.5 |
| ``exp2`` (``exp(x ln 2)``) | 6 ulp | abs(x) > 10 |
| grouped convolution | NaN | a zero filter is multiplied with infinities of other groups |
| convolution with one tap | (none) | a product needs no algorithm to be looked for, which takes seconds on a GPU |
| convolution of few taps, for a GPU | (none) | the same, for a sum of products (`has_few_taps`) |
| integer ``x / x``, ``x % x`` | 1, 0 | x = 0, inside fusions; -1 and x elsewhere |

Every function of floats takes float64 arguments and works under `jax.enable_x64`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

MOST_TAPS = 49
"""Of a convolution that is taken for a sum of products."""
SPLIT = 2.0**27 + 1.0
"""Veltkamp's constant: halves of 26 bits, whose products are exact."""


@dataclass(frozen=True)
class Rule:
    """Replacement rule of an equation: its accurate evaluation, and which equations need it."""

    function: Callable[..., Any]
    applies: Callable[[Any], bool]


def log1p(x: Any) -> Any:
    """log(1 + x) = log u + (x - (u - 1)) / u with u = 1 + x rounded, where log u is no small number."""
    u = 1.0 + x
    return jnp.where((x < -0.25) & (x > -1.0), lax.log(u) + (x - (u - 1.0)) / u, lax.log1p(x))


def atanh(x: Any) -> Any:
    """(log(1 + y) - log(1 - y)) / 2 with y = |x|: both terms have one sign."""
    y = lax.abs(x)
    return jnp.copysign(jnp.where(y < 1e-3, lax.atanh(y), 0.5 * (log1p(y) - log1p(-y))), x)


def exp2(x: Any) -> Any:
    """2^n exp(f ln 2), n the nearest integer: f = x - n is exact, and so is the product with 2^n."""
    n = jnp.clip(lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), -1200.0, 1200.0)
    whole = jnp.where(jnp.isfinite(x), n, 0.0).astype(np.int32)
    return jnp.where(jnp.isfinite(x), jnp.ldexp(lax.exp((x - n) * math.log(2.0)), whole), lax.exp2(x))


def erfc(x: Any) -> Any:
    """XLA's erfc has exp(-s), s = x^2 rounded, as a factor: times 1 - (x^2 - s)."""
    square = x * x
    scaled = SPLIT * x
    high = scaled - (scaled - x)
    low = x - high
    rest = ((high * high - square) + 2.0 * high * low) + low * low
    return jnp.where((x > 1.0) & (x < 30.0), lax.erfc(x) * (1.0 - rest), lax.erfc(x))


def erf_inv(x: Any) -> Any:
    """One Newton step on erf y = |x|, for larger values on erfc y = 1 - |x| (exact), from XLA's answer."""
    goal = lax.abs(x)
    y = lax.erf_inv(goal)
    miss = jnp.where(goal < 0.5, goal - lax.erf(y), erfc(y) - (1.0 - goal))
    better = y + miss * (0.5 * math.sqrt(math.pi)) * lax.exp(y * y)
    return jnp.where((goal < 1.0) & (goal > 1e-3), jnp.copysign(better, x), lax.erf_inv(x))


def grouped_convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
    """A convolution with feature groups as a sum over taps of products of one group each; padding adds nothing."""
    p = eqn.params
    numbers, groups = p["dimension_numbers"], int(p["feature_group_count"])
    x = lax.transpose(lhs, numbers.lhs_spec)
    w = lax.transpose(rhs, numbers.rhs_spec)
    out_shape = [eqn.outvars[0].aval.shape[k] for k in numbers.out_spec]
    space = out_shape[2:]
    x = lax.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    taps = w.shape[2:]
    count = math.prod(taps)
    w = lax.reshape(w, (groups, w.shape[0] // groups, w.shape[1], count))
    places, valid = [], []  # for every tap and output position along a dimension: which input, if any
    for d, extent in enumerate(space):
        tap = np.array(np.unravel_index(np.arange(count), taps)[d])[:, None]
        place = np.arange(extent) * p["window_strides"][d] + tap * p["rhs_dilation"][d] - p["padding"][d][0]
        step = p["lhs_dilation"][d]
        valid.append((place % step == 0) & (place >= 0) & (place // step < x.shape[3 + d]))
        places.append(np.where(valid[-1], place // step, 0))

    def add(total: Any, now: Any) -> tuple[Any, None]:
        weight, where, inside = now
        source, mask = x, np.bool_(True)
        for d in range(len(space)):
            source = jnp.take(source, where[d], axis=3 + d)
            mask = mask & lax.expand_dims(inside[d], tuple(k for k in range(len(space)) if k != d))
        # groups first: [groups, outputs of a group, batch, space]
        term = lax.dot_general(weight, source, (((2,), (2,)), ((0,), (1,))))
        return total + jnp.where(mask, term, 0.0), None

    start = jnp.zeros((groups, w.shape[1], x.shape[0], *space), x.dtype)
    steps = (jnp.moveaxis(w, 3, 0), [jnp.asarray(v) for v in places], [jnp.asarray(v) for v in valid])
    total, _ = lax.scan(add, start, steps)
    total = lax.reshape(jnp.moveaxis(total, 2, 0), tuple(out_shape))
    return lax.transpose(total, tuple(int(k) for k in np.argsort(numbers.out_spec)))


def pointwise_convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
    """A convolution with one tap as a matrix product."""
    numbers = eqn.params["dimension_numbers"]
    for d, stride in zip(numbers.lhs_spec[2:], eqn.params["window_strides"], strict=True):
        lhs = lax.slice_in_dim(lhs, 0, lhs.shape[d], stride, axis=d)
    w = lax.transpose(rhs, numbers.rhs_spec)
    w = lax.reshape(w, w.shape[:2])
    found = lax.dot_general(lhs, w, (((numbers.lhs_spec[1],), (1,)), ((), ())))
    kept = [d for d in range(lhs.ndim) if d != numbers.lhs_spec[1]]  # dimensions of the product; then come channels
    places = zip(numbers.out_spec, numbers.lhs_spec, strict=True)
    place = {o: len(kept) if i == numbers.lhs_spec[1] else kept.index(i) for o, i in places}
    return lax.transpose(found, tuple(place[k] for k in range(lhs.ndim)))


def dense_convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
    """A convolution of few taps as a sum of matrix products, one for each tap."""
    p = eqn.params
    numbers = p["dimension_numbers"]
    x = lax.transpose(lhs, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    w = lax.transpose(rhs, (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    sides = [(low, high, step - 1) for (low, high), step in zip(p["padding"], p["lhs_dilation"], strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)])
    space = [eqn.outvars[0].aval.shape[k] for k in numbers.out_spec[2:]]
    steps = (1, *p["window_strides"], 1)
    sizes = (x.shape[0], *((n - 1) * s + 1 for n, s in zip(space, p["window_strides"], strict=True)), x.shape[-1])
    taps = np.stack(np.unravel_index(np.arange(math.prod(w.shape[:-2])), w.shape[:-2]), axis=-1)

    def add(total: Any, now: Any) -> tuple[Any, None]:
        weight, start = now
        part = lax.dynamic_slice(x, [start[d] for d in range(x.ndim)], sizes)
        part = lax.slice(part, (0,) * part.ndim, part.shape, steps)
        return total + lax.dot_general(part, weight, (((part.ndim - 1,), (0,)), ((), ()))), None

    starts = jnp.asarray(np.pad(taps * np.asarray(p["rhs_dilation"]), ((0, 0), (1, 1))), np.int32)
    start = jnp.zeros((x.shape[0], *space, w.shape[-1]), x.dtype)
    total, _ = lax.scan(add, start, (lax.reshape(w, (len(taps), *w.shape[-2:])), starts))
    place = {numbers.out_spec[0]: 0, numbers.out_spec[1]: total.ndim - 1}
    place |= {k: d + 1 for d, k in enumerate(numbers.out_spec[2:])}
    return lax.transpose(total, tuple(place[k] for k in range(total.ndim)))


def has_few_taps(eqn: Any) -> bool:
    """Whether a convolution is fit for `dense_convolution`: for a GPU, where an algorithm is looked for otherwise."""
    p = eqn.params
    filters, result = eqn.invars[1].aval.shape, eqn.outvars[0].aval
    one = int(p["feature_group_count"]) == 1 and int(p.get("batch_group_count", 1)) == 1
    taps = math.prod(filters[d] for d in p["dimension_numbers"].rhs_spec[2:])
    floats = jnp.issubdtype(result.dtype, np.floating)
    return floats and one and 0 < taps <= MOST_TAPS and math.prod(result.shape) > 0


def convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
    """A convolution by groups, or with one tap."""
    return (grouped_convolution if _grouped(eqn) else pointwise_convolution)(eqn, lhs, rhs)


def integer_div(x: Any, y: Any) -> Any:
    """x / y, all bits set where y = 0."""
    zero = y == 0
    return jnp.where(zero, ~jnp.zeros((), y.dtype), lax.div(x, jnp.where(zero, jnp.ones((), y.dtype), y)))


def integer_rem(x: Any, y: Any) -> Any:
    """The remainder of x / y, x where y = 0."""
    zero = y == 0
    return jnp.where(zero, x, lax.rem(x, jnp.where(zero, jnp.ones((), y.dtype), y)))


def _integers(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, np.integer)


def _wide(eqn: Any) -> bool:
    """XLA's own float64, not a float32 function widened: the latter's errors are far below those judged."""
    return eqn.invars[0].aval.dtype == np.float64


def _grouped(eqn: Any) -> bool:
    p = eqn.params
    floats = jnp.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
    return floats and int(p["feature_group_count"]) > 1 and int(p.get("batch_group_count", 1)) == 1


def _pointwise(eqn: Any) -> bool:
    p = eqn.params
    spec, filters = p["dimension_numbers"].rhs_spec, eqn.invars[1].aval.shape
    floats = jnp.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
    plain = all(d == 1 for d in p["lhs_dilation"]) and all(tuple(pair) == (0, 0) for pair in p["padding"])
    one = int(p["feature_group_count"]) == 1 and int(p.get("batch_group_count", 1)) == 1
    return floats and plain and one and all(filters[d] == 1 for d in spec[2:])


def _of_one(function: Callable[[Any], Any]) -> Rule:
    return Rule(lambda _, x: function(x), _wide)


RULES: dict[str, Rule] = {
    "log1p": _of_one(log1p),
    "atanh": _of_one(atanh),
    "exp2": _of_one(exp2),
    "erfc": _of_one(erfc),
    "erf_inv": _of_one(erf_inv),
    "conv_general_dilated": Rule(convolution, lambda eqn: _grouped(eqn) or _pointwise(eqn)),
    "div": Rule(lambda _, x, y: integer_div(x, y), _integers),
    "rem": Rule(lambda _, x, y: integer_rem(x, y), _integers),
}

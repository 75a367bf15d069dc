"""Random steps that read and write at positions known at run time, running sums, and special values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.random_programs.draw import FLOATS, NUMBERS, Draw, Unsuitable, step


def _indices(d: Draw, shape: tuple[int, ...], extent: int, dtype: str = "") -> Any:
    dtype = dtype or d.one(("int32", "int32", "uint8", "int64") if d.kind.x64 else ("int32", "int32", "int8", "uint32"))
    low = 0 if dtype.startswith("u") else -3
    # Signed only: XLA's constant folding and its compiled code clamp huge unsigned positions to opposite ends.
    if d.chance(0.5) and not d.kind.smooth and low:
        return d.fresh(shape, dtype)
    return jnp.asarray(d.rng.integers(low, min(extent + 3, 120), size=shape)).astype(dtype)


def _inside(index: Any, extent: int) -> Any:
    last = jnp.asarray(min(extent - 1, 120), index.dtype)
    return lax.clamp(jnp.asarray(0, index.dtype), index, last)


def _limited(d: Draw, out: Any) -> None:
    if out.size > 2 * d.limit:
        raise Unsuitable
    d.add(out)


# -- gathers ----------------------------------------------------------------------------------------------------------
@step("gather", 1)
def take(d: Draw) -> None:
    """Rows by index, inside and outside the bounds, in every mode."""
    x = d.any(rank=(1, 4))
    axis = d.number(0, x.ndim - 1)
    index = _indices(d, d.one(((3,), (1,), (2, 4), (7,), ())), x.shape[axis])
    mode = d.one(("fill", "clip", "wrap", None, "promise_in_bounds"))
    if mode == "promise_in_bounds":
        index = _inside(index, x.shape[axis])
    fill = d.one((None, None, 0, 1)) if mode == "fill" else None
    _limited(d, jnp.take(x, index, axis, mode=mode, fill_value=fill))


@step("gather", 0.7)
def index_two(d: Draw) -> None:
    """x[i, :, j] or x[i, j]: indexed along two dimensions."""
    x = d.any(rank=(2, 4))
    a, b = (int(k) for k in sorted(d.rng.choice(x.ndim, 2, replace=False)))
    where: list[Any] = [slice(None)] * x.ndim
    where[a], where[b] = (_indices(d, (5,), x.shape[k]) for k in (a, b))
    mode = d.one(("fill", "clip", None, "promise_in_bounds"))
    if mode == "promise_in_bounds":
        for k in (a, b):
            where[k] = _inside(where[k], x.shape[k])
    _limited(d, x.at[tuple(where)].get(mode=mode))


@step("gather", 0.5)
def along_axis(d: Draw) -> None:
    """take_along_axis: one position per row, as a loss picks its labels."""
    x = d.any(rank=(1, 3))
    axis = d.number(0, x.ndim - 1)
    shape = list(x.shape)
    shape[axis] = d.one((1, 1, 3))
    index = _inside(_indices(d, tuple(shape), x.shape[axis], "int32"), x.shape[axis])
    _limited(d, jnp.take_along_axis(x, index, axis, mode=d.one((None, "clip", "promise_in_bounds"))))


@step("gather", 0.7)
def embedding(d: Draw) -> None:
    """Rows of a table for every token, with positions added."""
    words, width = d.one((7, 19, 50)), d.one((1, 8, 16, 19))
    table = d.weights((words, width), d.dtype(FLOATS))
    tokens = _indices(d, d.one(((5,), (2, 6), (3, 1))), words, "int32")
    out = table[tokens] if d.chance(0.5) else jnp.take(table, _inside(tokens, words), axis=0, mode="clip")
    if d.chance(0.6):
        out = out + d.weights((tokens.shape[-1], width), table.dtype.name)
    d.add(out)


@step("gather", 1)
def dynamic_slice(d: Draw) -> None:
    """A window at run-time positions, clamped."""
    x = d.any(rank=(1, 4))
    sizes = [d.number(1, e) for e in x.shape]
    starts = [_indices(d, (), x.shape[0])]
    starts += [_indices(d, (), e, starts[0].dtype.name) for e in x.shape[1:]]
    d.add(lax.dynamic_slice(x, starts, sizes))


@step("gather", 0.6)
def dynamic_update(d: Draw) -> None:
    """A window replaced at run-time positions, clamped: the step of a key-value cache."""
    x = d.any(rank=(1, 4))
    sizes = tuple(d.number(1, e) for e in x.shape)
    starts = [_indices(d, (), x.shape[0], "int32") for _ in x.shape]
    d.add(lax.dynamic_update_slice(x, d.fresh(sizes, x.dtype.name), starts))


# -- running reductions -----------------------------------------------------------------------------------------------
@step("reduction", 0.8)
def cumulative(d: Draw) -> None:
    """Running sum, product, extreme and logsumexp, forwards and backwards."""
    how = d.one((lax.cumsum, lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp))
    x = d.float(rank=(1, 4)) if how is lax.cumlogsumexp else d.any(NUMBERS, rank=(1, 4))
    axis = d.number(0, x.ndim - 1)
    if how is lax.cumprod and x.dtype.name in FLOATS:
        # What underflows or overflows on the way to an ordinary product depends on the order of the factors.
        part = jnp.asarray(min(0.25, 8 / x.shape[axis]), x.dtype)
        x = lax.add(lax.mul(lax.tanh(x), part), jnp.asarray(1, x.dtype))
    d.add(how(x, axis, reverse=d.chance(0.4)))


@step("reduction", 0.5)
def ties(d: Draw) -> None:
    """Position and value of an extreme among few different values: the first one wins, NaN before all."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(NUMBERS, rank=(1, 4))
    if x.dtype.name in FLOATS:
        low, high = (jnp.asarray(v, x.dtype) for v in (-1, 1))
        x = lax.round(lax.clamp(low, x, high), lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        x = lax.rem(x, lax.full_like(x, 3))
    axis = d.number(0, x.ndim - 1)
    d.add(d.one((lax.argmax, lax.argmin))(x, axis, np.dtype(np.int32)))
    if d.chance(0.5):
        d.add(d.one((lax.reduce_max, lax.reduce_min))(x, (axis,)))


# -- special values ---------------------------------------------------------------------------------------------------
def _special(dtype: str) -> list[Any]:
    if dtype in FLOATS:
        info = jnp.finfo(dtype)
        tiny, most = float(info.smallest_normal), float(info.max)
        return [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, tiny / 4, most, -most, 1.0, -1.0, 0.5]
    if dtype == "bool":
        return [True, False]
    info = jnp.iinfo(dtype)
    return [int(info.min), int(info.max), int(info.min) + 1, 0, 1, 2, int(info.bits), int(info.bits) - 1]


@step("special", 2)
def special_operand(d: Draw) -> None:
    """An operation with a constant array of special values: division by zero, oversized shifts, NaN, -0."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(rank=(1, 4))
    dtype = x.dtype.name
    values = np.array(_special(dtype)).astype(x.dtype)
    shape = x.shape if d.chance(0.5) else x.shape[-1:]
    y = jnp.asarray(values[d.rng.integers(0, len(values), size=shape)])
    if dtype == "bool":
        names = ["and", "or", "xor", "max", "min"]
    elif dtype in FLOATS:
        names = ["add", "sub", "mul", "div", "max", "min", "rem", "eq", "lt", "ge"]
    else:
        names = ["add", "sub", "mul", "div", "rem", "max", "min", "shl", "shr", "sar", "eq", "lt", "ge"]
    name = d.one(names)
    if y.shape != x.shape:
        y = lax.broadcast_in_dim(y, x.shape, (x.ndim - 1,))
    if name in ("div", "sub", "rem") and d.chance(0.4):
        x, y = y, x
    function = {
        "add": lax.add,
        "sub": lax.sub,
        "mul": lax.mul,
        "div": lax.div,
        "rem": lax.rem,
        "max": lax.max,
        "min": lax.min,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "shl": lax.shift_left,
        "shr": lax.shift_right_logical,
        "sar": lax.shift_right_arithmetic,
        "eq": lax.eq,
        "lt": lax.lt,
        "ge": lax.ge,
    }[name]
    d.add(function(x, y))


@step("special", 1)
def special_elements(d: Draw) -> None:
    """Some elements replaced by special values; a sum, extreme or function then meets them."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.float(rank=(1, 3))
    values = np.array(_special(x.dtype.name)).astype(x.dtype)
    mask = d.rng.random(x.shape) < 0.15
    y = lax.select(jnp.asarray(mask), jnp.asarray(values[d.rng.integers(0, len(values), size=x.shape)]), x)
    axis = (d.number(0, x.ndim - 1),)
    d.add(
        d.one(
            (
                lambda v: v,
                lambda v: lax.reduce_max(v, axis),
                lambda v: lax.reduce_min(v, axis),
                lax.sign,
                lax.tanh,
                lax.is_finite,
                lambda v: jnp.nan_to_num(v, posinf=1.0, neginf=-1.0),
                lax.abs,
                lax.neg,
            )
        )(y)
    )


# -- what is left to XLA ----------------------------------------------------------------------------------------------
@step("unsupported")
def foreign(d: Draw) -> None:
    """Sorts, scatters."""
    x = d.any(NUMBERS, rank=(1, 3))
    if d.chance(0.5):
        d.add(lax.sort(x, dimension=d.number(0, x.ndim - 1)))
        return
    index = _indices(d, (4,), x.shape[0])
    how = d.one(("add", "add", "set", "max", "min", "multiply"))
    if how == "set":  # which of several writes wins is undefined
        index = jnp.asarray(d.rng.permutation(max(4, x.shape[0]))[:4].astype(np.int32))
    update = d.fresh((4, *x.shape[1:]), x.dtype.name)
    d.add(getattr(x.at[index], how)(d.tame(update)))

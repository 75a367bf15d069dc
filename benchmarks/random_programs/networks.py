"""Random steps that are made of many operations at once: what networks, optimisers and data pipelines are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.random_programs.draw import FLOATS, INTEGERS, Draw, Unsuitable, step


def _rows(d: Draw, most: int = 24) -> tuple[Any, int]:
    """A floating matrix of few rows, and its width."""
    rows, width = d.one((1, 3, 5, 8, 13, most)), d.one((2, 4, 6, 8, 16, 18))
    return d.tame(d.fresh((rows, width), d.dtype(FLOATS))), width


# -- networks ---------------------------------------------------------------------------------------------------------
@step("network", 1.5)
def attention(d: Draw) -> None:
    """Scaled products, a mask, softmax in the values' type or in float32, a weighted sum."""
    heads, rows, width = d.one((1, 2, 3)), d.one((1, 4, 7, 16, 19)), d.one((4, 5, 8, 16))
    dtype = d.dtype(FLOATS)
    q, k, v = (d.tame(d.fresh((heads, rows, width), dtype)) for _ in range(3))
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * jnp.asarray(width**-0.5, dtype)
    which = d.number(0, 2)
    if which == 0:  # causal
        seen = lax.broadcasted_iota(np.int32, (rows, rows), 0) >= lax.broadcasted_iota(np.int32, (rows, rows), 1)
        scores = jnp.where(seen, scores, jnp.asarray(d.one((-np.inf, -1e4)), dtype))
    elif which == 1:
        scores = scores + d.weights((rows, rows), dtype)
    if d.chance(0.4):
        weights = jax.nn.softmax(scores.astype(np.float32), axis=-1).astype(dtype)
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    d.add(jnp.einsum("hqk,hkd->hqd", weights, v))


@step("network")
def gated(d: Draw) -> None:
    """RMS norm, two products of which one is a gate, a third one, the residual."""
    x, width = _rows(d)
    inner = d.one((3, 8, 17, 32))
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.asarray(1e-3, x.dtype))
    y = x * scale * d.weights((width,), x.dtype.name)
    gate = d.one((jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid))
    hidden = gate(y @ d.weights((width, inner), x.dtype.name)) * (y @ d.weights((width, inner), x.dtype.name))
    d.add(x + hidden @ d.weights((inner, width), x.dtype.name))


@step("network")
def rotary(d: Draw) -> None:
    """Pairs of columns turned by an angle that grows with the row."""
    x, width = _rows(d)
    half = width // 2
    angle = jnp.outer(jnp.arange(x.shape[0]), 10.0 ** -jnp.linspace(0, 2, half)).astype(np.float32)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = (x[:, :half], x[:, half : 2 * half]) if d.chance(0.5) else (x[:, 0 : 2 * half : 2], x[:, 1 : 2 * half : 2])
    parts = [a * cos - b * sin, b * cos + a * sin]
    d.add(jnp.concatenate(parts, axis=1) if d.chance(0.5) else jnp.stack(parts, axis=-1).reshape(x.shape[0], 2 * half))


@step("network")
def block(d: Draw) -> None:
    """Convolution, batch norm (of the batch or with constants), activation, pooling; a depthwise one in between."""
    size, c = d.one((5, 7, 8, 12)), d.one((2, 3, 8))
    x = d.tame(d.fresh((d.one((1, 2)), size, size, c), d.dtype(FLOATS)))
    dtype, out = x.dtype.name, d.one((4, 6, 16))
    numbers = ("NHWC", "HWIO", "NHWC")
    stride = d.one((1, 2))
    y = lax.conv_general_dilated(
        x, d.weights((3, 3, c, out), dtype), (stride, stride), "SAME", dimension_numbers=numbers
    )
    if d.chance(0.5):
        y = lax.conv_general_dilated(
            y, d.weights((3, 3, 1, out), dtype), (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=out
        )
    if d.chance(0.5):
        mean = jnp.mean(y, (0, 1, 2))
        y = (y - mean) * lax.rsqrt(jnp.var(y, (0, 1, 2)) + jnp.asarray(1e-3, y.dtype))
    else:
        y = (y - d.weights((out,), dtype)) * jnp.abs(d.weights((out,), dtype))
    y = d.one((jax.nn.relu, jax.nn.silu, jnp.tanh))(y)
    if d.chance(0.5):
        y = lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    d.add(jnp.mean(y, (1, 2)) if d.chance(0.3) else y)


@step("network")
def loss(d: Draw) -> None:
    """Cross entropy of labels, picked or as one-hot rows, smoothed."""
    x, width = _rows(d)
    labels = jnp.asarray(d.rng.integers(0, width, size=x.shape[0]).astype(np.int32))
    logs = jax.nn.log_softmax(x, axis=-1)
    if d.chance(0.5):
        d.add(-jnp.take_along_axis(logs, labels[:, None], axis=1)[:, 0])
    else:
        soft = jax.nn.one_hot(labels, width, dtype=x.dtype) * jnp.asarray(0.875, x.dtype) + jnp.asarray(0.01, x.dtype)
        d.add(-jnp.sum(logs * soft, axis=-1))
    if d.chance(0.4):
        d.add(jnp.mean(d.pool[-1]))


@step("network")
def optimiser(d: Draw) -> None:
    """One step of Adam: two running means, a square root, a quotient; all three are results."""
    x = d.float(rank=(1, 3))
    g = d.tame(d.fresh(x.shape, x.dtype.name))
    m, v = (d.tame(d.fresh(x.shape, x.dtype.name)) for _ in range(2))
    one = [jnp.asarray(c, x.dtype) for c in (0.875, 0.125, 0.96875, 0.03125, 1e-2, 1e-3)]
    m = m * one[0] + g * one[1]
    v = jnp.abs(v) * one[2] + jnp.square(g) * one[3]
    for value in (m, v, x - one[4] * m / (jnp.sqrt(v) + one[5])):
        d.add(value)


@step("network")
def recurrence(d: Draw) -> None:
    """A gated recurrent layer: a loop over rows with products inside."""
    if d.depth:
        raise Unsuitable
    rows, width, units = d.one((2, 5, 9)), d.one((3, 8)), d.one((4, 8, 11))
    x = d.tame(d.fresh((rows, 2, width), d.dtype(FLOATS)))
    dtype = x.dtype.name
    into, back = d.weights((width, 3 * units), dtype), d.weights((units, 3 * units), dtype)

    def cell(h: Any, row: Any) -> tuple[Any, Any]:
        a, b = row @ into, h @ back
        r, z = jnp.split(jax.nn.sigmoid(a[:, : 2 * units] + b[:, : 2 * units]), 2, axis=1)
        n = jnp.tanh(a[:, 2 * units :] + r * b[:, 2 * units :])
        h = (jnp.asarray(1, dtype) - z) * n + z * h
        return h, h

    h, all_h = lax.scan(cell, jnp.zeros((2, units), dtype), x, reverse=d.chance(0.3))
    d.add(h)
    d.add(all_h)


@step("network")
def einsum(d: Draw) -> None:
    """Products of two or three operands by letters; repeated, summed and kept dimensions."""
    sizes = {letter: d.one((1, 2, 3, 5, 8, 17)) for letter in "abcd"}
    spec = d.one(("ab,bc->ac", "abc,cd->abd", "abc,abd->acd", "ab,ab->a", "abc,bc->ca", "ab,bc,cd->ad", "aab->b"))
    dtype = d.dtype()
    if dtype == "bool":
        raise Unsuitable
    operands = [d.fresh(tuple(sizes[k] for k in part), dtype) for part in spec.split("->")[0].split(",")]
    d.add(jnp.einsum(spec, *(d.tame(v) for v in operands)))


@step("network", 0.7)
def distances(d: Draw) -> None:
    """Squared distances of rows to centres, and the nearest one."""
    x, width = _rows(d)
    centres = d.weights((d.one((2, 5, 9)), width), x.dtype.name)
    squares = jnp.sum(jnp.square(x[:, None, :] - centres[None]), axis=-1)
    d.add(squares)
    if not d.kind.smooth:
        d.add(jnp.argmin(squares, axis=1))


@step("network", 0.7)
def resized(d: Draw) -> None:
    """An image with other extents: nearest or linear."""
    x = d.tame(d.fresh((d.one((4, 7, 9)), d.one((3, 8)), 3), d.dtype(("float32", "float64"))))
    d.add(jax.image.resize(x, (d.one((3, 8, 13)), d.one((5, 8)), 3), d.one(("nearest", "linear"))))


# -- integers ---------------------------------------------------------------------------------------------------------
@step("network", 0.8)
def quantised(d: Draw) -> None:
    """A product of int8 matrices from rounded, saturated floats, scaled back."""
    if d.kind.smooth:
        raise Unsuitable
    x, width = _rows(d)
    q = jnp.clip(jnp.round(x.astype(np.float32) * np.float32(d.one((16, 40)))), -128, 127).astype(np.int8)
    w = jnp.asarray(d.rng.integers(-128, 128, size=(width, d.one((3, 8, 16)))).astype(np.int8))
    y = lax.dot_general(q, w, (((1,), (0,)), ((), ())), preferred_element_type=np.dtype(np.int32))
    d.add(y)
    d.add((y.astype(np.float32) * np.float32(2**-9)).astype(x.dtype))


@step("network", 0.8)
def hashed(d: Draw) -> None:
    """Multiplications that wrap around, shifts and exclusive or: a mixing function, its remainder as a table index."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(("uint32", "int32"), rank=(1, 3)).astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    d.add(x)
    if d.chance(0.5):
        d.add(d.weights((7,), d.dtype(FLOATS))[(x % np.uint32(7)).astype(np.int32)])


@step("network", 0.8)
def floored(d: Draw) -> None:
    """Python's // and % of integers and floats: corrections by the signs of operands and remainder."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any((*INTEGERS, "float32"), rank=(1, 3))
    y = d.one((3, 7, 10)) if d.chance(0.5) else d.fresh(x.shape, x.dtype.name)
    if x.dtype.name == "float32":
        x, y = jnp.clip(x, -16, 16), jnp.abs(jnp.asarray(y, x.dtype)) + np.float32(0.5)
    else:
        y = jnp.asarray(y, x.dtype)
    d.add(x // y if d.chance(0.5) else x % y)


@step("network", 0.7)
def counted(d: Draw) -> None:
    """How many values lie below each bound, bins as sums of comparisons, and their share."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any((*FLOATS, *INTEGERS), rank=(1, 3))
    bounds = jnp.sort(d.weights((d.one((2, 5)),), x.dtype.name))
    below = jnp.sum(x.reshape(-1, 1) < bounds[None], axis=0, dtype=np.int32)
    d.add(below)
    d.add(below.astype(np.float32) / np.float32(x.size))


# -- left to XLA, with kernels around ---------------------------------------------------------------------------------
@step("library")
def ordered(d: Draw) -> None:
    """Largest elements with their places; rows sorted by a key."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any((*FLOATS, *INTEGERS), rank=(1, 3))
    if d.chance(0.5) and not x.dtype.name.startswith("u"):
        values, places = lax.top_k(x, d.number(1, min(4, x.shape[-1])))
        d.add(values)
        d.add(places)
        return
    other = d.fresh(x.shape, d.dtype())
    for value in lax.sort((x, other), dimension=x.ndim - 1, num_keys=1, is_stable=True):
        d.add(value)


@step("library")
def folded(d: Draw) -> None:
    """A reduction of one's own, of two operands; a parallel prefix of a recurrence."""
    x = d.float(rank=(1, 3))
    if d.chance(0.5) and not d.kind.smooth:
        count = lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)

        def largest(a: Any, b: Any) -> Any:
            better = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(better, b[0], a[0]), jnp.where(better, b[1], a[1])

        clean = jnp.nan_to_num(x, nan=0.0)
        start = (jnp.asarray(-np.inf, x.dtype), np.int32(2**31 - 1))
        for value in lax.reduce((clean, count), start, largest, (x.ndim - 1,)):
            d.add(value)
        return
    decay = jax.nn.sigmoid(x)

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    d.add(lax.associative_scan(join, (decay, d.tame(x)), axis=d.number(0, x.ndim - 1))[1])


@step("library", 0.7)
def complexes(d: Draw) -> None:
    """A product of complex numbers, real again."""
    x = d.tame(d.fresh(d.any(rank=(1, 3)).shape, d.dtype(("float32", "float64"))))
    z = lax.complex(x, jnp.tanh(x) + jnp.asarray(0.5, x.dtype))
    z = z * lax.conj(z) if d.chance(0.3) else z * (z + jnp.asarray(1j, z.dtype))
    d.add(lax.real(z))
    d.add(lax.imag(z))


@step("library", 0.7)
def drawn(d: Draw) -> None:
    """Random numbers of a fixed key: noise, dropout."""
    x = d.float(rank=(1, 3))
    key = jax.random.key(d.number(0, 99))
    if d.chance(0.5):
        keep = jax.random.bernoulli(key, 0.75, x.shape)
        d.add(jnp.where(keep, x / jnp.asarray(0.75, x.dtype), jnp.zeros((), x.dtype)))
    else:
        d.add(x + jax.random.uniform(key, x.shape, np.float32).astype(x.dtype))


@step("library", 0.7)
def cached(d: Draw) -> None:
    """A loop that writes a row of a buffer and reads what is there: a cache of keys."""
    if d.depth:
        raise Unsuitable
    x, width = _rows(d, 9)
    query = d.tame(d.fresh((width,), x.dtype.name))

    def turn(i: Any, state: Any) -> Any:
        rows, total = state
        rows = lax.dynamic_update_slice(rows, x[i][None] * jnp.asarray(0.5, x.dtype), (i, 0))
        return rows, total + jnp.tanh(rows @ query)

    start = (jnp.zeros_like(x), jnp.zeros(x.shape[0], x.dtype))
    for value in lax.fori_loop(0, x.shape[0], turn, start):
        d.add(value)

"""The micro-benchmarks of `run.py`: memory-bound operations, each with the bytes that it must move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: unique.
        function: of the arrays.
        shapes: (shape, dtype name) per argument; 'int32 < n' means indices below n.
        read: share of each argument's bytes that must be read (gathers read rows, not the table); None: all of it.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    read: tuple[float, ...] | None = None

    def arguments(self, seed: int) -> list[np.ndarray]:
        """Fresh random arguments."""
        rng = np.random.default_rng(seed)
        found = []
        for shape, kind in self.shapes:
            if kind.startswith("int32 <"):
                found.append(rng.integers(0, int(kind.split("<")[1]), shape).astype(np.int32))
            else:
                values = rng.standard_normal(shape, dtype=np.float32)
                found.append(values.astype(jnp.dtype(kind)))
        return found

    def moved(self) -> int:
        """Fewest bytes through memory: every argument once, every result once."""
        sizes = [math.prod(s) * (4 if k.startswith("int32") else jnp.dtype(k).itemsize) for s, k in self.shapes]
        shares = self.read or (1.0,) * len(sizes)
        avals = [jax.ShapeDtypeStruct(s, jnp.int32 if k.startswith("int32") else jnp.dtype(k)) for s, k in self.shapes]
        out = jax.tree.leaves(jax.eval_shape(self.function, *avals))
        return int(sum(a * b for a, b in zip(sizes, shares, strict=True)) + sum(o.size * o.dtype.itemsize for o in out))


def _convolved(stride: int, x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        feature_group_count=x.shape[-1],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )


def _depthwise(stride: int) -> Callable[..., Any]:
    def function(x: Any, w: Any, b: Any) -> Any:
        return jnp.clip(_convolved(stride, x, w) + b, 0.0, 6.0).astype(x.dtype)

    return function


def _dense(x: Any, w: Any, b: Any) -> Any:
    return jnp.maximum(x @ w + b, 0)


def _convolution(stride: int) -> Callable[..., Any]:
    def function(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.maximum(y + b, 0)

    return function


def _chain(x: Any, y: Any, b: Any) -> Any:
    return jnp.maximum(x * 1.5 + y, 0.0) * b + jnp.abs(x)


def _gelu(x: Any, b: Any) -> Any:
    return jax.nn.gelu(x + b, approximate=True)


def _layer_norm(x: Any, g: Any, b: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5) * g + b).astype(x.dtype)


def _max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _average_pool(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9.0


def _input_gradient(stride: int, extent: int) -> Callable[..., Any]:
    def function(w: Any, g: Any) -> Any:
        x = jax.ShapeDtypeStruct((g.shape[0], extent, extent, g.shape[-1]), g.dtype)
        return jax.linear_transpose(lambda x: _convolved(stride, x, w), x)(g)[0]

    return function


def _filter_gradient(stride: int) -> Callable[..., Any]:
    def function(x: Any, g: Any) -> Any:
        w = jax.ShapeDtypeStruct((3, 3, 1, x.shape[-1]), x.dtype)
        return jax.linear_transpose(lambda w: _convolved(stride, x, w), w)(g)[0]

    return function


def _max_pool_gradient(x: Any, g: Any) -> Any:
    return jax.vjp(_max_pool, x)[1](g)[0]


def _average_pool_gradient(g: Any) -> Any:
    return jax.linear_transpose(_average_pool, g)(g)[0]


def _statistics(x: Any) -> Any:
    """Batch norm's: mean and variance of every channel over batch and space."""
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(axes, keepdims=True)
    return mean.reshape(-1), jnp.square(wide - mean).mean(axes)


def _moments(x: Any) -> Any:
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide.sum(axes), jnp.square(wide).sum(axes)


def _tables(indices: Any, *tables: Any) -> Any:
    """One row of every table per line of indices, side by side."""
    return jnp.concatenate([jnp.take(t, indices[:, k], axis=0, mode="clip") for k, t in enumerate(tables)], axis=1)


DEPTHWISE = ((64, 112, 32), (64, 56, 144), (64, 28, 192), (64, 14, 576), (64, 7, 960))
PRODUCTS = (
    (3136, 64, 256),
    (3136, 144, 24),
    (784, 512, 128),
    (196, 1024, 256),
    (49, 960, 320),
    (12544, 32, 16),
    (384, 768, 768),
    (384, 768, 3072),
    (384, 3072, 768),
    (1, 1280, 1000),
    (49, 511, 61),
    (50176, 256, 64),
    (200704, 64, 256),
    (3072, 1024, 4096),
    (4096, 4096, 4096),
)
"""(rows, terms, columns) of matrix products: 1x1 convolutions of networks at batch 1, transformers, large ones."""
CONVOLUTIONS = (
    (1, 56, 64, 1, 1, 256),
    (1, 7, 960, 1, 1, 320),
    (1, 56, 64, 3, 1, 64),
    (1, 28, 128, 3, 1, 128),
    (1, 14, 256, 3, 1, 256),
    (1, 7, 512, 3, 1, 512),
    (1, 28, 128, 3, 1, 32),
    (1, 56, 128, 3, 2, 128),
    (1, 35, 64, 5, 1, 96),
    (64, 56, 64, 3, 1, 64),
    (64, 28, 128, 3, 1, 128),
)
"""(batch, height and width, channels, taps, stride, features) of dense convolutions."""
DTYPES = ("float32", "bfloat16")


def cases() -> list[Case]:
    """All of them, small and large sizes."""
    found = []
    for rows, columns in ((256, 1024), (16384, 4096)):
        for dtype in ("float32", "bfloat16"):
            size = f"{rows}x{columns} {dtype}"
            full, line = ((rows, columns), dtype), ((columns,), dtype)
            found += [
                Case(f"chain {size}", _chain, (full, full, line)),
                Case(f"gelu {size}", _gelu, (full, line)),
                Case(f"softmax {size}", lambda x: jax.nn.softmax(x, axis=-1), (full,)),
                Case(f"layer norm {size}", _layer_norm, (full, ((columns,), "float32"), ((columns,), "float32"))),
                Case(f"row sum {size}", lambda x: x.sum(-1), (full,)),
                Case(f"column sum {size}", lambda x: x.sum(0), (full,)),
                Case(f"transpose {size}", lambda x: x.T + 1, (full,)),
            ]
    found.append(Case("full sum 16384x4096 float32", lambda x: x.sum(), (((16384, 4096), "float32"),)))
    found.append(Case("column sum 802816x32 float32", lambda x: x.sum(0), (((802816, 32), "float32"),)))
    found += _products()
    for dtype in DTYPES:
        found += _windows(dtype)
        for shape in ((64, 112, 112, 32), (64, 56, 56, 144), (64, 14, 14, 576)):
            size = f"{'x'.join(map(str, shape))} {dtype}"
            found.append(Case(f"batch statistics {size}", _statistics, ((shape, dtype),)))
            found.append(Case(f"sum and squares {size}", _moments, ((shape, dtype),)))
        rows = tuple((((20_000 + 1000 * k), 64), dtype) for k in range(26))
        share = tuple(2048 / shape[0] for shape, _ in rows)
        found.append(
            Case(f"26 tables, 2048 rows of 64 {dtype}", _tables, (((2048, 26), "int32 < 20000"), *rows), (1.0, *share))
        )
    found.append(
        Case("softmax of columns 4096x4096 float32", lambda x: jax.nn.softmax(x, 0), (((4096, 4096), "float32"),))
    )
    found.append(
        Case("softmax of columns 128x65536 float32", lambda x: jax.nn.softmax(x, 0), (((128, 65536), "float32"),))
    )
    for rows, columns in ((16384, 4096), (512, 512)):
        full = (((rows, columns), "float32"),)
        found.append(Case(f"running sum of rows {rows}x{columns} float32", lambda x: jnp.cumsum(x, 1), full))
        found.append(Case(f"running sum of columns {rows}x{columns} float32", lambda x: jnp.cumsum(x, 0), full))
    for count, width in ((2048, 64), (262144, 128)):
        table = 1_000_000
        found.append(
            Case(
                f"embedding {count} rows of {width}",
                lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
                (((table, width), "float32"), ((count,), f"int32 < {table}")),
                (count / table, 1.0),
            )
        )
    return found


def _products() -> list[Case]:
    """Matrix products with bias and ReLU, at XLA's default precision."""
    found = []
    for m, k, n in PRODUCTS:
        shapes = (((m, k), "float32"), ((k, n), "float32"), ((n,), "float32"))
        found.append(Case(f"gemm {m}x{k}x{n} float32", _dense, shapes))
    for m, k, n in (*PRODUCTS[6:9], *PRODUCTS[-2:]):
        shapes = (((m, k), "bfloat16"), ((k, n), "bfloat16"), ((n,), "bfloat16"))
        found.append(Case(f"gemm {m}x{k}x{n} bfloat16", _dense, shapes))
    for n, h, c, taps, stride, k in CONVOLUTIONS:
        shapes = (((n, h, h, c), "float32"), ((taps, taps, c, k), "float32"), ((k,), "float32"))
        size = f"{taps}x{taps}/{stride} {n}x{h}x{h}x{c} to {k} float32"
        found.append(Case(f"dense convolution {size}", _convolution(stride), shapes))
    return found


def _windows(dtype: str) -> list[Case]:
    """Depthwise convolution and pooling, forwards and backwards."""
    found = []
    for n, h, c in (*DEPTHWISE, (1, 56, 144)):
        shapes = (((n, h, h, c), dtype), ((3, 3, 1, c), dtype), ((c,), dtype))
        found.append(Case(f"depthwise 3x3/1 {n}x{h}x{h}x{c} {dtype}", _depthwise(1), shapes))
    for n, h, c in ((64, 112, 96), (64, 56, 144), (64, 14, 576)):
        shapes = (((n, h, h, c), dtype), ((3, 3, 1, c), dtype), ((c,), dtype))
        found.append(Case(f"depthwise 3x3/2 {n}x{h}x{h}x{c} {dtype}", _depthwise(2), shapes))
    for stride, sizes in ((1, DEPTHWISE), (2, ((64, 112, 96), (64, 56, 144)))):
        for n, h, c in sizes:
            x, g, w = ((n, h, h, c), dtype), ((n, h // stride, h // stride, c), dtype), ((3, 3, 1, c), dtype)
            size = f"3x3/{stride} {n}x{h}x{h}x{c} {dtype}"
            found.append(Case(f"depthwise input gradient {size}", _input_gradient(stride, h), (w, g)))
            found.append(Case(f"depthwise filter gradient {size}", _filter_gradient(stride), (x, g)))
    x, g = ((64, 112, 112, 64), dtype), ((64, 56, 56, 64), dtype)
    found.append(Case(f"max pool 3x3/2 64x112x112x64 {dtype}", _max_pool, (x,)))
    found.append(Case(f"max pool gradient 3x3/2 64x112x112x64 {dtype}", _max_pool_gradient, (x, g)))
    even = (((64, 35, 35, 288), dtype),)
    found.append(Case(f"average pool 3x3/1 64x35x35x288 {dtype}", _average_pool, even))
    found.append(Case(f"average pool gradient 3x3/1 64x35x35x288 {dtype}", _average_pool_gradient, even))
    return found

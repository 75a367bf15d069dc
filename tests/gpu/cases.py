"""Functions of every family that has a kernel form on a GPU, small and awkward in shape: (function, arguments)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ops.cases import conv

Case = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Standard normal values (integers in -9..9 for integer types)."""
    rng = np.random.default_rng(seed + 7 * len(shape) + sum(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if np.dtype(jnp.dtype(dtype)).kind in "iu":
        return rng.integers(0 if dtype.startswith("u") else -9, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def _pool(reduce: Any, start: float, window: tuple[int, ...], strides: tuple[int, ...], padding: str) -> Any:
    return lambda x: lax.reduce_window(x, start, reduce, window, strides, padding)


def _layer_norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * g + b


def batch_statistics(x: Any) -> Any:
    """Mean and variance of columns."""
    mean = x.mean(0, keepdims=True)
    return mean[0] * 2, jnp.square(x - mean).mean(0)


def _batch_norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(x - mean).mean((0, 1, 2), keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * g + b, mean.reshape(-1), variance.reshape(-1)


def _log_softmax_loss(x: Any) -> Any:
    return -jax.nn.log_softmax(x, axis=-1).sum(-1)


def _input_gradient(extent: int, **options: Any) -> Any:
    def fn(w: Any, g: Any) -> Any:
        x = jax.ShapeDtypeStruct((g.shape[0], extent, extent + 1, g.shape[-1]), g.dtype)
        return jax.linear_transpose(lambda x: conv(x, w, groups=g.shape[-1], **options), x)(g)[0]

    return fn


def _filter_gradient(size: tuple[int, int], **options: Any) -> Any:
    def fn(x: Any, g: Any) -> Any:
        w = jax.ShapeDtypeStruct((*size, 1, g.shape[-1]), g.dtype)
        return jax.linear_transpose(lambda w: conv(x, w, groups=x.shape[-1], **options), w)(g)[0]

    return fn


def _pool_gradient(reduce: Any, start: float, size: int, stride: int, padding: str) -> Any:
    pool = _pool(reduce, start, (1, size, size, 1), (1, stride, stride, 1), padding)
    return lambda x, g: jax.vjp(pool, x)[1](g)[0]


def attention() -> Any:
    """Softmax of scaled products of queries and keys, times values: (batch, length, heads, depth)."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return fn


def attention_backward(
    side: str, mask: Any = lambda scores, m: scores, rounded: Any = lambda x, dtype: x.astype(dtype)
) -> Any:
    """dQ (``side`` is queries) or dV and dK (keys) with recomputed weights, of (batch, length, heads, depth).

    ``rounded`` is done to what the results' products read.
    """

    def fn(q: Any, k: Any, v: Any, grad: Any, lse: Any, delta: Any, m: Any = None) -> Any:
        scale, wide = np.float32(q.shape[-1] ** -0.5), jnp.promote_types(q.dtype, np.float32)
        scores = mask(jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide) * scale, m)
        weights = jnp.exp(scores - lse)
        moved = jnp.einsum("bqhd,bkhd->bhqk", grad, v, preferred_element_type=wide)
        change = rounded(weights * (moved - delta) * scale, q.dtype)
        if side == "queries":
            return jnp.einsum("bhqk,bkhd->bqhd", change, k)
        values = jnp.einsum("bhqk,bqhd->bkhd", rounded(weights, q.dtype), grad)
        return values, jnp.einsum("bhqk,bqhd->bkhd", change, q)

    return fn


CASES: dict[str, Case] = {
    "chain": (lambda x, b: jnp.maximum(x * b + 1, 0) * x, (normal(9, 52), normal(52))),
    "chain odd": (lambda x, b: jnp.exp(x) / (b + 3), (normal(9, 53), normal(9, 1))),
    "one element": (lambda x: x + 1, (normal(1),)),
    "scalar": (lambda x: x * 2 + 1, (normal(),)),
    "long odd": (lambda x: x * x + 1, (normal(100_003),)),
    "two results": (lambda x, y: (x + y, (x - y).reshape(-1)), (normal(33, 12), normal(33, 12, seed=1))),
    "transpose": (lambda x: x.T * 2, (normal(70, 36),)),
    "permute": (lambda x: jnp.transpose(x, (2, 0, 1)) + 1, (normal(5, 12, 8),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y * 2], 1), (normal(6, 10), normal(6, 14))),
    "pad and slice": (lambda x: jnp.pad(x, ((1, 2), (3, 1)))[1:, 2:] * 3, (normal(10, 13),)),
    "reverse": (lambda x: x[::-1, ::2] + 1, (normal(8, 24),)),
    "iota": (lambda x: x + lax.iota(jnp.float32, 24), (normal(7, 24),)),
    "embedding": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), (normal(50, 16), normal(30, dtype="int32"))),
    "tables": (
        lambda i, *t: jnp.concatenate([jnp.take(x, i[:, k], axis=0, mode="clip") for k, x in enumerate(t)], 1),
        (normal(30, 5, dtype="int32"), *(normal(40 + k, 16, seed=k) for k in range(5))),
    ),
    "stack of rows": (
        lambda x, y, z: jnp.concatenate([x, y * 2, z + 1], 0),
        tuple(normal(4, 12, seed=k) for k in range(3)),
    ),
    "gather fill": (lambda t, i: t.at[i].get(mode="fill", fill_value=7), (normal(5, 12), normal(30, dtype="int32"))),
    "max pool": (_pool(lax.max, -np.inf, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), (normal(2, 13, 13, 12),)),
    "average pool": (_pool(lax.add, 0.0, (1, 2, 3, 1), (1, 1, 1, 1), "VALID"), (normal(2, 9, 10, 5),)),
    "depthwise": (lambda x, w: jax.nn.relu6(conv(x, w, groups=20)), (normal(2, 12, 12, 20), normal(3, 3, 1, 20))),
    "depthwise stride": (
        lambda x, w, b: conv(x, w, groups=12, strides=(2, 2)) + b,
        (normal(2, 15, 15, 12), normal(3, 3, 1, 12), normal(12)),
    ),
    "depthwise odd": (lambda x, w: conv(x, w, groups=7), (normal(1, 11, 9, 7), normal(5, 3, 1, 7))),
    "depthwise input gradient": (_input_gradient(11), (normal(3, 3, 1, 20), normal(2, 11, 12, 20))),
    "depthwise input gradient stride": (
        _input_gradient(11, strides=(2, 2)),
        (normal(3, 3, 1, 12), normal(2, 6, 6, 12)),
    ),
    "depthwise filter gradient": (_filter_gradient((3, 3)), (normal(2, 14, 14, 20), normal(2, 14, 14, 20, seed=1))),
    "depthwise filter gradient stride": (
        _filter_gradient((3, 5), strides=(2, 2)),
        (normal(3, 11, 13, 7), normal(3, 6, 7, 7)),
    ),
    "depthwise filter gradient long": (
        _filter_gradient((3, 3)),
        (normal(6, 28, 28, 12), normal(6, 28, 28, 12, seed=1)),
    ),
    "max pool gradient": (
        _pool_gradient(lax.max, -np.inf, 3, 2, "SAME"),
        (np.round(normal(1, 16, 20, 8)), normal(1, 8, 10, 8)),
    ),
    "max pool gradient apart": (
        _pool_gradient(lax.max, -np.inf, 2, 2, "VALID"),
        (np.round(normal(2, 9, 8, 5)), normal(2, 4, 4, 5)),
    ),
    "max pool gradient one by one": (
        _pool_gradient(lax.max, -np.inf, 3, 1, "SAME"),
        (np.round(normal(1, 7, 8, 6)), normal(1, 7, 8, 6)),
    ),
    "average pool gradient": (_pool_gradient(lax.add, 0.0, 3, 2, "SAME"), (normal(2, 12, 13, 12), normal(2, 6, 7, 12))),
    "row sum": (lambda x: x.sum(1), (normal(37, 300),)),
    "row max odd": (lambda x: x.max(1) * 2, (normal(37, 77),)),
    "short rows": (lambda x: x.sum(-1), (normal(50, 9, 6),)),
    "full sum": (lambda x: (x * x).sum(), (normal(100, 1000),)),
    "full sum odd": (lambda x: jnp.abs(x).sum() + 1, (normal(100_003),)),
    "column sum": (lambda x: x.sum(0), (normal(3000, 24),)),
    "column max": (lambda x, b: x.max((0, 1)) + b, (normal(20, 30, 52), normal(52))),
    "few terms": (lambda x: x.sum(1), (normal(40, 3, 12),)),
    "middle": (lambda x: x.sum(1), (normal(6, 400, 20),)),
    "argmax": (lambda x: jnp.argmax(x, -1), (normal(40, 300),)),
    "argmin columns": (lambda x: jnp.argmin(x, 0), (normal(40, 30),)),
    "all": (lambda x: (x > -2).all(1), (normal(40, 30),)),
    "statistics": (lambda x: (x.sum(0), (x * x).sum(0)), (normal(2000, 32),)),
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), (normal(37, 260),)),
    "softmax odd": (lambda x: jax.nn.softmax(x, axis=-1), (normal(5, 1001),)),
    "softmax long": (lambda x: jax.nn.softmax(x, axis=-1), (normal(3, 40_000),)),
    "softmax columns": (lambda x: jax.nn.softmax(x, axis=0), (normal(70, 36),)),
    "softmax middle": (lambda x: jax.nn.softmax(x, axis=1), (normal(3, 37, 21),)),
    "softmax columns long": (lambda x: jax.nn.softmax(x, axis=0), (normal(5000, 12),)),
    "batch statistics": (lambda x: (x.mean((0, 1)), x.var((0, 1))), (normal(9, 30, 20) + 3,)),
    "batch statistics long": (batch_statistics, (normal(7001, 24) + 3,)),
    "batch norm": (_batch_norm, (normal(4, 33, 31, 12) * 2 + 5, normal(12), normal(12, seed=1))),
    "log softmax": (_log_softmax_loss, (normal(37, 100),)),
    "layer norm": (_layer_norm, (normal(37, 192), normal(192), normal(192))),
    "running sum": (lambda x: jnp.cumsum(x * 2, 1) + 1, (normal(9, 300),)),
    "running sum odd": (lambda x: jnp.cumsum(x, 1), (normal(3, 1003),)),
    "running sum reverse": (lambda x: lax.cumsum(x, 0, reverse=True), (normal(4096),)),
    "running sum of columns": (lambda x: jnp.cumsum(x, 0), (normal(130, 40),)),
    "running sum of columns long": (lambda x: lax.cumsum(x, 0, reverse=True) * 2, (normal(4003, 24),)),
    "running sum in the middle": (lambda x: jnp.cumsum(x, 1), (normal(5, 600, 7),)),
    "running maximum": (lambda x: lax.cummax(x, 1), (normal(5, 70),)),
    "running product": (lambda x: lax.cumprod(1 + x / 50, 0), (normal(300, 12),)),
    "running logsumexp": (lambda x: lax.cumlogsumexp(x, 0), (normal(30, 20),)),
    "global pool": (lambda x: x.mean((1, 2)), (normal(3, 7, 7, 40),)),
    "moments": (lambda x: (x.mean((2, 3)), x.var((2, 3))), (normal(3, 6, 14, 14),)),
    "group norm": (
        lambda x: (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + 1e-3),
        (normal(12, 5, 64),),
    ),
}

DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")


def typed(dtype: str) -> dict[str, Case]:
    """Cases for one storage type."""
    x, y = normal(6, 40, dtype=dtype), normal(6, 40, dtype=dtype, seed=1)
    found: dict[str, Case] = {
        "add and compare": (lambda a, b: jnp.where(a > b, a + b, a - b), (x, y)),
        "max of rows": (lambda a: a.max(1), (x,)),
        "sum of columns": (lambda a: a.sum(0, dtype=a.dtype), (x,)),
        "convert": (lambda a: (a.astype(jnp.float32) * 2, a.astype(jnp.int32) + 1), (x,)),
        "transpose": (lambda a: a.T, (x,)),
        "running maximum": (lambda a: lax.cummax(a, 1), (x,)),
        "running sum of columns": (lambda a: lax.cumsum(a, 0), (x,)),
    }
    if np.dtype(jnp.dtype(dtype)).kind not in "iu":
        found["softmax"] = (lambda a: jax.nn.softmax(a), (x,))
        found["softmax of columns"] = (lambda a: jax.nn.softmax(a, 0), (x,))
        image, small = normal(2, 8, 8, 8, dtype=dtype), normal(2, 4, 4, 8, dtype=dtype)
        found["filter gradient"] = (_filter_gradient((3, 3)), (image, normal(2, 8, 8, 8, dtype=dtype, seed=1)))
        found["pool gradient"] = (_pool_gradient(lax.max, -np.inf, 2, 2, "VALID"), (image, small))
        found["special"] = (lambda a: jnp.tanh(a) + jax.nn.sigmoid(a) * jnp.exp(-jnp.abs(a)), (x,))
    else:
        found["divide"] = (lambda a, b: (lax.div(a, b), lax.rem(a, b)), (x, y))
    return found


MATRIX_TYPES = ("float32", "bfloat16", "float16", "float64")


WIDE = (
    "product, bias, ReLU",
    "product, residual of many rows",
    "products of a batch",
    "product, convolution 3x3",
)
"""Those that matrix units have for float64, too."""


def products(dtype: str) -> dict[str, Case]:
    """Matrix products and convolutions for matrix units, with what follows them."""
    names = ("NHWC", "HWIO", "NHWC")
    left, right, bias = normal(196, 256, dtype=dtype), normal(256, 96, dtype=dtype, seed=1), normal(96, dtype=dtype)
    image, taps = normal(1, 14, 14, 64, dtype=dtype), normal(3, 3, 64, 96, dtype=dtype, seed=1)

    def conv(x: Any, w: Any, b: Any) -> Any:
        return jnp.clip(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names) + b, 0, 6)

    found: dict[str, Case] = {
        "product, bias, ReLU": (lambda x, w, b: jax.nn.relu(x @ w + b), (left, right, bias)),
        "product, residual": (lambda x, w, r: x @ w + r, (left, right, normal(196, 96, dtype=dtype, seed=2))),
        "product, residual of many rows": (
            lambda x, w, r: jax.nn.relu(x @ w + r),
            tuple(normal(*s, dtype=dtype) for s in ((8448, 64), (64, 256), (8448, 256))),
        ),
        "product of one row": (lambda x, w: x @ w, (left[:1], right)),
        "products of a batch": (
            lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
            (normal(2, 64, 4, 32, dtype=dtype), normal(2, 72, 4, 32, dtype=dtype, seed=1)),
        ),
        "product, convolution 3x3": (conv, (image, taps, bias)),
        "product, norm in float32": (
            lambda x, w, b, s, t: jax.nn.relu(((x @ w + b).astype(jnp.float32) * s + t).astype(x.dtype)),
            (left, right, bias, normal(96), normal(96, seed=1)),
        ),
        "patch, first layer": (conv, _first_layer(dtype)),
    }
    if dtype == "float32":
        highest = jax.lax.Precision.HIGHEST

        def exact(x: Any, w: Any, b: Any) -> Any:
            made = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names, precision=highest)
            return jax.nn.relu(made + b)

        found["product, highest"] = (
            lambda x, w, b: jax.nn.relu(jnp.dot(x, w, precision=highest) + b),
            (left, right, bias),
        )
        found["product, highest, convolution 3x3"] = (exact, (image, taps, bias))
    if dtype == "float64":
        return {name: found[name] for name in WIDE}
    return found


def _first_layer(dtype: str) -> tuple[np.ndarray, ...]:
    return normal(2, 37, 46, 3, dtype=dtype), normal(7, 7, 3, 40, dtype=dtype), normal(40, dtype=dtype)


ELEMENTARY = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "erf",
    "erfc",
    "erf_inv",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "sqrt",
    "rsqrt",
    "cbrt",
    "floor",
    "ceil",
    "round",
    "sign",
    "abs",
    "neg",
    "square",
    "is_finite",
)

"""One `OpCase` per primitive or family: its entry feeds every generic test of tests/ops/test_cases.py.

To cover a new primitive add one entry.  ``inputs`` are texts: ``"f32[3,37]"``, with a kind of values after a colon:
``normal`` (the default), ``positive``, ``unit`` (inside -1..1), ``above`` (1..9), ``small`` (integers -4..4), ``index``
(integers -2..9), ``full`` (any integer), ``special`` (normal with NaN, infinities, zeros of both signs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "b": np.bool_,
    **{f"{s}{n}": getattr(np, f"{w}int{n}") for s, w in (("i", ""), ("u", "u")) for n in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class OpCase:
    """A primitive with operands and parameters.

    Attributes:
        name: unique; primitive: what the equation under test is called; call: the function of the operands.
        inputs: operands as texts (see above). reduction: terms summed per result, for the tolerance.
        exact: results equal XLA's bit by bit (only moves or discrete values). golden: its program has a golden file.
        refused: part of the reason where the rule must decline, else empty.
    """

    name: str
    primitive: str
    call: Callable[..., Any]
    inputs: tuple[str, ...]
    reduction: int = 1
    exact: bool = False
    golden: bool = False
    refused: str = ""


def make(text: str, seed: int = 0) -> np.ndarray:
    """The array that an input text stands for."""
    text, _, kind = text.partition(":")
    name, _, dims = text.rstrip("]").partition("[")
    shape = tuple(int(d) for d in dims.split(",") if d)
    dtype = np.dtype(DTYPES[name])
    random = np.random.default_rng([seed, *map(ord, text + kind)])
    if dtype.kind in "iu" or kind == "small":
        low, high = {"": (-9, 9), "small": (-4, 4), "index": (-2, 9), "above": (1, 9)}.get(kind, (0, 0))
        if kind == "full":
            limits = np.iinfo(dtype)
            values = random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
            ends = random.choice([limits.min, limits.max], shape)
            return np.where(random.random(shape) < 0.2, ends, values).astype(dtype)
        return random.integers(max(low, 0) if dtype.kind == "u" else low, high, shape, endpoint=True).astype(dtype)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    values = random.standard_normal(shape)
    if kind == "positive":
        values = np.abs(values) + 0.01
    elif kind == "unit":
        values = np.tanh(values)
    elif kind == "above":
        values = 1 + np.abs(values) * 3
    elif kind == "special":
        odd = [np.nan, np.inf, -np.inf, 0.0, -0.0]
        values = np.where(random.random(shape) < 0.4, random.choice(odd, shape), values)
    return values.astype(dtype)


def _lane(name: str, call: Callable[..., Any], kinds: tuple[str, ...], dtypes: str, **more: Any) -> list[OpCase]:
    """An element operation in several types; the shape leaves a remainder of every lane count."""
    return [OpCase(f"{name}-{d}", name, call, tuple(f"{d}[3,37]:{k}" for k in kinds), **more) for d in dtypes.split()]


_INTS = "i32 u8"
_UNARY = {
    "exp": "",
    "exp2": "",
    "expm1": "",
    "log": "positive",
    "log1p": "positive",
    "tanh": "",
    "logistic": "",
    "erf": "",
    "erfc": "",
    "erf_inv": "unit",
    "sin": "",
    "cos": "",
    "tan": "",
    "asin": "unit",
    "acos": "unit",
    "atan": "",
    "sinh": "",
    "cosh": "",
    "asinh": "",
    "acosh": "above",
    "atanh": "unit",
    "sqrt": "positive",
    "rsqrt": "positive",
    "cbrt": "",
    "square": "",
}
_BINARY = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min}

CASES: list[OpCase] = [
    # -- element operations
    *(c for n, k in _UNARY.items() for c in _lane(n, getattr(lax, n), (k,), "f32" if k else "f32 bf16")),
    *(c for n in ("neg", "abs") for c in _lane(n, getattr(lax, n), ("special",), "f16 f64", exact=True)),
    *(c for n in ("floor", "ceil", "sign") for c in _lane(n, getattr(lax, n), ("special",), "f32 bf16", exact=True)),
    *_lane("round", lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), ("",), "f32 f64", exact=True),
    OpCase(
        "round-even", "round", lambda x: lax.round(x * 2, lax.RoundingMethod.TO_NEAREST_EVEN), ("f32[41]",), exact=True
    ),
    OpCase("is_finite-f32", "is_finite", lax.is_finite, ("f32[3,37]:special",), exact=True),
    *(c for n, f in _BINARY.items() for c in _lane(n, f, ("", ""), "f32 bf16")),
    *(c for n, f in _BINARY.items() for c in _lane(n, f, ("full", "full"), _INTS, exact=True)),
    *_lane("rem", lax.rem, ("", "above"), "f32 f64", exact=True),
    *_lane("rem", lax.rem, ("full", "small"), "i32 i64 u8", exact=True),
    *_lane("pow", lax.pow, ("positive", ""), "f32 f64"),
    OpCase("pow-f32-i32", "pow", lax.pow, ("f32[3,37]:positive", "i32[3,37]:small")),
    OpCase("pow-scalar-f32-i32", "pow", lambda x, y: lax.pow(x, y) + 1, ("f32[]:positive", "i32[]:small")),
    *_lane("atan2", lax.atan2, ("", ""), "f32 f64"),
    *_lane("nextafter", lax.nextafter, ("special", ""), "f32 f64", exact=True),
    *(
        c
        for n in ("eq", "ne", "lt", "le", "gt", "ge")
        for c in _lane(n, getattr(lax, n), ("special", "special"), "f32 bf16", exact=True)
    ),
    *(c for n in ("eq", "lt") for c in _lane(n, getattr(lax, n), ("full", "full"), "i32 u8", exact=True)),
    OpCase("and-i32", "and", lax.bitwise_and, ("i32[3,37]:full", "i32[3,37]:full"), exact=True),
    OpCase("or-u8", "or", lax.bitwise_or, ("u8[3,37]:full", "u8[3,37]:full"), exact=True),
    OpCase("xor-b", "xor", lax.bitwise_xor, ("b[3,37]", "b[3,37]"), exact=True),
    OpCase("not-b", "not", lax.bitwise_not, ("b[3,37]",), exact=True),
    OpCase("not-i64", "not", lax.bitwise_not, ("i64[3,37]:full",), exact=True),
    *(
        OpCase(f"{n}-{d}", n, getattr(lax, n), (f"{d}[3,37]:full", f"{d}[3,37]:{k}"), exact=True)
        for n in ("shift_left", "shift_right_logical", "shift_right_arithmetic")
        for d in ("i32", "u8")
        for k in ("full",)
    ),
    OpCase("population_count-i32", "population_count", lax.population_count, ("i32[37]:full",), exact=True),
    OpCase("clz-u8", "clz", lax.clz, ("u8[37]:full",), exact=True),
    OpCase("integer_pow-f32", "integer_pow", lambda x: lax.integer_pow(x, 5), ("f32[3,37]",)),
    OpCase("integer_pow-negative", "integer_pow", lambda x: lax.integer_pow(x, -3), ("f32[3,37]:above",)),
    OpCase("select_n-f32", "select_n", lax.select_n, ("b[3,37]", "f32[3,37]:special", "f32[3,37]"), exact=True),
    OpCase(
        "select_n-cases",
        "select_n",
        lambda w, *x: lax.select_n(w % 3, *x),
        ("i32[19]:above", "f32[19]", "f32[19]", "f32[19]"),
        exact=True,
    ),
    OpCase(
        "clamp-f32", "clamp", lambda x: lax.clamp(jnp.float32(-0.5), x, jnp.float32(0.7)), ("f32[3,37]",), exact=True
    ),
    *(
        OpCase(
            f"convert-{s}-{t}",
            "convert_element_type",
            lambda x, t=t: lax.convert_element_type(x, DTYPES[t]),
            (f"{s}[3,37]:{'special' if s[0] in 'bf' and s != 'b' else ''}",),
            exact=True,
        )
        for s, t in (
            ("f32", "bf16"),
            ("bf16", "f32"),
            ("f32", "f16"),
            ("f16", "f64"),
            ("f32", "i32"),
            ("f32", "u8"),
            ("i32", "f32"),
            ("b", "f32"),
            ("f64", "i64"),
            ("u8", "i16"),
            ("i32", "b"),
        )
    ),
    OpCase(
        "reduce_precision",
        "reduce_precision",
        lambda x: lax.reduce_precision(x, 8, 7),
        ("f32[3,37]:special",),
        exact=True,
    ),
    # -- layout
    OpCase(
        "broadcast_in_dim",
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (3, 5, 7), (0, 2)),
        ("f32[3,7]",),
        exact=True,
        golden=True,
    ),
    OpCase("reshape", "reshape", lambda x: lax.reshape(x, (7, 12)), ("f32[6,14]",), exact=True),
    OpCase("squeeze", "squeeze", lambda x: lax.squeeze(x, (1,)), ("f32[6,1,14]",), exact=True),
    OpCase("expand_dims", "broadcast_in_dim", lambda x: lax.expand_dims(x, (1,)), ("f32[6,14]",), exact=True),
    OpCase("transpose", "transpose", lambda x: lax.transpose(x, (2, 0, 1)), ("f32[3,5,18]",), exact=True, golden=True),
    OpCase("transpose-u8", "transpose", lambda x: lax.transpose(x, (1, 0)), ("u8[33,18]:full",), exact=True),
    OpCase("rev", "rev", lambda x: lax.rev(x, (1,)), ("f32[3,37]",), exact=True),
    OpCase("slice", "slice", lambda x: lax.slice(x, (1, 2), (5, 31), (2, 3)), ("f32[6,33]",), exact=True),
    OpCase(
        "pad",
        "pad",
        lambda x: lax.pad(x, jnp.float32(2.5), ((1, 2, 0), (0, -1, 2))),
        ("f32[4,9]",),
        exact=True,
        golden=True,
    ),
    OpCase(
        "concatenate",
        "concatenate",
        lambda *x: lax.concatenate(x, 1),
        ("f32[3,5]", "f32[3,17]", "f32[3,1]"),
        exact=True,
        golden=True,
    ),
    OpCase("iota", "iota", lambda x: x + lax.broadcasted_iota(jnp.int32, (3, 21), 1), ("i32[3,21]",), exact=True),
    # -- indices known at run time
    OpCase(
        "dynamic_slice",
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (3, 9)),
        ("f32[6,20]", "i32[]:index"),
        exact=True,
        golden=True,
    ),
    OpCase(
        "gather", "gather", lambda x, i: jnp.take(x, i, axis=0, mode="fill"), ("f32[7,19]", "i32[11]:index"), exact=True
    ),
    OpCase(
        "gather-clip",
        "gather",
        lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
        ("f32[5,6]", "i32[21]:index"),
        exact=True,
    ),
    # -- reductions
    *(
        OpCase(
            f"reduce_sum-{d}-{'_'.join(map(str, a))}",
            "reduce_sum",
            lambda x, a=a: lax.reduce_sum_p.bind(x, axes=a, out_sharding=None),
            (f"{d}[5,6,37]",),
            reduction=37,
            golden=(d == "f32" and a == (2,)),
        )
        for d in ("f32", "bf16")
        for a in ((2,), (0,), (0, 2))
    ),
    OpCase("reduce_sum-i32", "reduce_sum", lambda x: x.sum(1, dtype=x.dtype), ("i32[6,37]:full",), exact=True),
    *(
        OpCase(f"{n}-{d}", n, lambda x, f=f: f(x, 1), (f"{d}[6,37]",), exact=True)
        for n, f in (("reduce_max", jnp.max), ("reduce_min", jnp.min))
        for d in ("f32", "bf16", "i32", "u8")
    ),
    OpCase("reduce_prod", "reduce_prod", lambda x: jnp.prod(x, 0), ("f32[6,37]:above",), reduction=6),
    OpCase("reduce_and", "reduce_and", lambda x: jnp.all(x, 1), ("b[6,37]",), exact=True),
    OpCase("reduce_or", "reduce_or", lambda x: jnp.any(x, 0), ("b[6,37]",), exact=True),
    OpCase("reduce_xor", "reduce_xor", lambda x: lax.reduce_xor_p.bind(x, axes=(0,)), ("i32[6,37]:full",), exact=True),
    OpCase("argmax", "argmax", lambda x: lax.argmax(x, 1, jnp.int32), ("f32[6,37]:small",), exact=True, golden=True),
    OpCase("argmin-nan", "argmin", lambda x: lax.argmin(x, 0, jnp.int32), ("f32[6,37]:special",), exact=True),
    # -- windows
    *(
        OpCase(
            f"{n}-pool",
            n,
            lambda x, f=f, i=i: lax.reduce_window(x, np.float32(i), f, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
            ("f32[2,9,8,5]",),
            reduction=9,
            golden=n == "reduce_window_max",
        )
        for n, f, i in (
            ("reduce_window_max", lax.max, -np.inf),
            ("reduce_window_sum", lax.add, 0.0),
            ("reduce_window_min", lax.min, np.inf),
        )
    ),
    *(
        OpCase(
            f"{n}-gradient",
            "select_and_scatter_add",
            lambda x, g, f=f, i=i, k=k, s=s, p=p: pool_gradient(f, i, k, s, p, x, g),
            shapes,
            reduction=9,
        )
        for n, f, i, k, s, p, shapes in (
            ("max-pool", lax.max, -np.inf, (1, 3, 3, 1), (1, 2, 2, 1), "SAME", ("f32[2,9,8,5]", "f32[2,5,4,5]")),
            ("max-pool-ties", lax.max, -np.inf, (3, 2), (1, 2), "VALID", ("f32[9,8]:small", "f32[7,4]")),
            ("max-pool-special", lax.max, -np.inf, (3, 3), (2, 1), "SAME", ("f32[9,8]:special", "f32[5,8]")),
            ("min-pool", lax.min, np.inf, (1, 2, 3), (1, 2, 3), "SAME", ("f32[3,9,8]:small", "f32[3,5,3]")),
            ("max-pool-bf16", lax.max, -np.inf, (3, 3), (2, 2), "SAME", ("bf16[9,8]:small", "bf16[5,4]")),
            ("max-pool-f64", lax.max, -np.inf, (2,), (2,), "VALID", ("f64[9]", "f64[4]")),
        )
    ),
    OpCase(  # windows that do not overlap: a sum of one value starts from 0, too, and is never -0
        "max-pool-apart-gradient",
        "select_and_scatter_add",
        lambda x, g: pool_gradient(lax.max, -np.inf, (2, 2), (2, 2), "VALID", x, g),
        ("f32[8,6]", "f32[4,3]:special"),
        exact=True,
    ),
    # -- contractions
    OpCase("dot-2d", "dot_general", lambda a, b: lax.dot(a, b), ("f32[7,19]", "f32[19,33]"), reduction=19, golden=True),
    OpCase("dot-f64", "dot_general", lambda a, b: lax.dot(a, b), ("f64[7,19]", "f64[19,9]"), reduction=19),
    OpCase("dot-bf16", "dot_general", lambda a, b: lax.dot(a, b), ("bf16[7,19]", "bf16[19,9]"), reduction=19),
    OpCase("dot-i32", "dot_general", lambda a, b: lax.dot(a, b), ("i32[7,19]", "i32[19,9]"), exact=True),
    OpCase(
        "dot-batched",
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((1,), (2,)), ((0,), (0,)))),
        ("f32[3,8,5]", "f32[3,6,8]"),
        reduction=8,
    ),
    OpCase(
        "dot-two-dims",
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((0, 2), (1, 0)), ((), ()))),
        ("f32[4,5,6]", "f32[6,4,7]"),
        reduction=24,
    ),
    OpCase(
        "dot-transposed",
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ()))),
        ("f32[9,16]", "f32[20,16]"),
        reduction=16,
    ),
    # -- convolutions
    OpCase(
        "conv-nhwc",
        "conv_general_dilated",
        lambda x, w: conv(x, w, strides=(2, 1)),
        ("f32[2,7,8,3]", "f32[3,3,3,20]"),
        reduction=27,
        golden=True,
    ),
    OpCase(
        "conv-nchw",
        "conv_general_dilated",
        lambda x, w: conv(x, w, layout=("NCHW", "OIHW", "NCHW")),
        ("f32[2,3,7,8]", "f32[10,3,3,3]"),
        reduction=27,
    ),
    OpCase(
        "conv-depthwise",
        "conv_general_dilated",
        lambda x, w: conv(x, w, groups=18),
        ("f32[2,7,8,18]", "f32[3,3,1,18]"),
        reduction=9,
        golden=True,
    ),
    OpCase(
        "conv-grouped",
        "conv_general_dilated",
        lambda x, w: conv(x, w, groups=2),
        ("f32[1,6,6,4]", "f32[3,3,2,6]"),
        reduction=18,
    ),
    OpCase(
        "conv-dilated",
        "conv_general_dilated",
        lambda x, w: conv(x, w, dilation=(2, 2)),
        ("f32[1,9,9,3]", "f32[3,3,3,5]"),
        reduction=27,
    ),
    OpCase(
        "conv-transposed",
        "conv_general_dilated",
        lambda x, w: conv(x, w, lhs=(2, 2), padding=((1, 2), (2, 1))),
        ("f32[1,4,5,3]", "f32[3,3,3,5]"),
        reduction=27,
    ),
    OpCase(
        "conv-1d",
        "conv_general_dilated",
        lambda x, w: conv(x, w, strides=(2,), layout=("NWC", "WIO", "NWC")),
        ("f32[2,15,4]", "f32[4,4,6]"),
        reduction=16,
    ),
    OpCase(
        "conv-3d",
        "conv_general_dilated",
        lambda x, w: conv(x, w, strides=(1, 1, 1), layout=("NDHWC", "DHWIO", "NDHWC")),
        ("f32[1,4,5,5,2]", "f32[2,3,3,2,4]"),
        reduction=36,
    ),
    OpCase(
        "conv-filter-gradient",
        "conv_general_dilated",
        lambda x, g: filter_gradient((3, 3), (1, 1), x, g),
        ("f32[2,6,7,5]", "f32[2,6,7,5]"),
        reduction=84,
    ),
    OpCase(
        "conv-filter-gradient-stride",
        "conv_general_dilated",
        lambda x, g: filter_gradient((3, 2), (2, 1), x, g),
        ("f32[2,6,7,3]", "f32[2,3,7,6]"),
        reduction=42,
    ),
    OpCase(
        "conv-batch-groups",
        "conv_general_dilated",
        lambda x, w: conv(x, w, batch_groups=2),
        ("f32[6,6,7,3]", "f32[3,3,3,10]"),
        reduction=27,
    ),
    OpCase(
        "conv-grouped-filter-gradient",
        "conv_general_dilated",
        lambda x, g: filter_gradient((3, 2), (2, 1), x, g, groups=3),
        ("f32[2,6,7,6]", "f32[2,3,7,15]"),
        reduction=42,
    ),
    OpCase(
        "reshape-permuted",
        "reshape",
        lambda x: lax.reshape(x, (4, 15), dimensions=(2, 0, 1)) * 2,
        ("f32[3,4,5]",),
        exact=True,
    ),
    OpCase(
        "conv-bf16", "conv_general_dilated", lambda x, w: conv(x, w), ("bf16[1,6,6,4]", "bf16[3,3,4,5]"), reduction=36
    ),
    # -- cumulative
    OpCase("cumsum", "cumsum", lambda x: lax.cumsum(x, 1), ("f32[5,9,11]",), reduction=9),
    OpCase("cumsum-line", "cumsum", lambda x: lax.cumsum(x, 0), ("f32[37]",), reduction=37),
    OpCase("cumsum-last", "cumsum", lambda x: lax.cumsum(x, 1, reverse=True), ("i16[3,17]",), exact=True),
    OpCase("cumprod", "cumprod", lambda x: lax.cumprod(x, 0), ("f64[6,5]",), reduction=6),
    OpCase("cummax", "cummax", lambda x: lax.cummax(x, 1, reverse=True), ("f32[4,19]",), exact=True),
    OpCase("cummin-fused", "cummin", lambda x: lax.cummin(x * 2, 0) + 1, ("f32[7,9]",)),
    OpCase("cumlogsumexp", "cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0), ("f32[9,5]",), reduction=9),
    # -- refusals
    OpCase("no-rule", "sort", lambda x: lax.sort(x), ("f32[9]",), refused="no op rule"),
    OpCase("complex", "mul", lambda x: lax.complex(x, x) * 2, ("f32[9]",), refused="complex64 has no kernel meaning"),
    OpCase("empty", "neg", lambda x: -x, ("f32[0,3]",), refused="without elements"),
    OpCase(
        "update-slice",
        "dynamic_update_slice",
        lambda x, y: lax.dynamic_update_slice(x, y, (1,)),
        ("f32[9]", "f32[2]"),
        refused="in place",
    ),
    OpCase(
        "int-conv", "conv_general_dilated", lambda x, w: conv(x, w), ("i32[1,6,6,3]", "i32[3,3,3,4]"), refused="int32"
    ),
    OpCase(
        "big-window",
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (5000,), (1,), "VALID"),
        ("f32[6000]",),
        refused="5000 points",
    ),
    OpCase("long-pow", "integer_pow", lambda x: lax.integer_pow(x, 5000), ("f32[9]",), refused="5000"),
    OpCase(
        "odd-precision",
        "reduce_precision",
        lambda x: lax.reduce_precision(x, 6, 9),
        ("f32[9]",),
        refused="storage format",
    ),
    OpCase("many-operands", "concatenate", lambda x: lax.concatenate([x] * 17, 0), ("f32[2]",), refused="17 operands"),
    OpCase(
        "window-gather",
        "gather",
        lambda x, i: lax.gather(
            x, i, lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,)), (2,)
        ),
        ("f32[9]", "i32[3,1]:index"),
        refused="kept as a window",
    ),
]


def conv(
    x: Any,
    w: Any,
    *,
    strides: tuple[int, ...] = (1, 1),
    padding: Any = "SAME",
    lhs: Any = None,
    dilation: Any = None,
    layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
    groups: int = 1,
    batch_groups: int = 1,
) -> Any:
    """A convolution with the parameters that cases vary."""
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        lhs_dilation=lhs,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )


def pool_gradient(
    reduce: Any, start: float, window: tuple[int, ...], strides: tuple[int, ...], padding: str, x: Any, g: Any
) -> Any:
    """The gradient of pooling over ``x``."""
    start = np.asarray(start, x.dtype)[()]
    return jax.vjp(lambda x: lax.reduce_window(x, start, reduce, window, strides, padding), x)[1](g)[0]


def filter_gradient(size: tuple[int, int], strides: tuple[int, int], x: Any, g: Any, *, groups: int = 0) -> Any:
    """The gradient of a convolution with regard to its filter. Args: groups: of features, 0: depthwise."""
    groups = groups or x.shape[-1]
    w = jax.ShapeDtypeStruct((*size, x.shape[-1] // groups, g.shape[-1]), x.dtype)
    return jax.linear_transpose(lambda w: conv(x, w, strides=strides, groups=groups), w)(g)[0]

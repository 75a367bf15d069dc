"""Random steps on whole arrays: elements, layout, reductions, windows, contractions, convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.random_programs.draw import FLOATS, INTEGERS, NUMBERS, Draw, Unsuitable, step

FREE = {
    "floor": lax.floor,
    "ceil": lax.ceil,
    "sin": lax.sin,
    "cos": lax.cos,
    "tanh": lax.tanh,
    "erf": lax.erf,
    "logistic": lax.logistic,
    "atan": lax.atan,
    "asinh": lax.asinh,
    "cbrt": lax.cbrt,
    "sign": lax.sign,
}
TAMED = {
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "erfc": lax.erfc,
    "tan": lax.tan,
    "square": lax.square,
}
POSITIVE = {"log": lax.log, "log1p": lax.log1p, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt}
UNIT = {"asin": lax.asin, "acos": lax.acos, "atanh": lax.atanh, "erf_inv": lax.erf_inv}


# -- element operations -----------------------------------------------------------------------------------------------
@step("elementwise", 3)
def unary_float(d: Draw) -> None:
    """One function of a float."""
    x = d.float()
    group = d.number(0, 4)
    if group <= 1:
        names = sorted(FREE) if not d.kind.smooth else ["sin", "cos", "tanh", "erf", "logistic", "atan", "asinh"]
        name = d.one(names)
        d.add(FREE[name](d.tame(x) if name in ("sin", "cos") else x))
    elif group == 2:
        d.add(TAMED[d.one(sorted(TAMED))](d.tame(x)))
    elif group == 3:
        d.add(POSITIVE[d.one(sorted(POSITIVE))](d.positive(x)))
    elif d.chance(0.8):
        bounded = lax.mul(lax.tanh(x), jnp.asarray(0.875, x.dtype)) if d.chance(0.8) else x
        d.add(UNIT[d.one(sorted(UNIT))](bounded))
    else:
        d.add(lax.acosh(lax.add(lax.abs(x), jnp.asarray(1.5, x.dtype))))


@step("elementwise", 1.5)
def unary_any(d: Draw) -> None:
    """One function of a number of any type."""
    x = d.any(NUMBERS)
    options: list[Any] = [lax.neg, lax.square]
    if not d.kind.smooth:
        options.append(lax.sign)
    if not x.dtype.name.startswith("u"):
        options.append(lax.abs)
    if x.dtype.name in INTEGERS:
        options += [lax.bitwise_not, lax.population_count, lax.clz]
    else:
        options += [lambda v: lax.is_finite(v) if not d.kind.smooth else lax.neg(v)]
        if not d.kind.smooth:
            options += [
                lambda v: lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN),
                lambda v: lax.round(v, lax.RoundingMethod.AWAY_FROM_ZERO),
            ]
    d.add(d.one(options)(x))


@step("elementwise", 4)
def binary(d: Draw) -> None:
    """Two numbers of one type; sometimes a scalar literal."""
    x = d.any(NUMBERS)
    dtype = x.dtype.name
    y = d.fresh(x.shape, dtype)
    if d.chance(0.25):
        low = 0 if dtype.startswith("u") else -3
        y = jnp.asarray(d.one((0.5, -1.5, 3.0, 0.1, -0.0, 1e-3)) if dtype in FLOATS else d.number(low, 9), dtype)
        y = lax.broadcast(y, x.shape) if d.chance(0.3) else y
    names = ["add", "add", "sub", "mul", "mul", "max", "min", "div"]
    if dtype in FLOATS:
        names += ["atan2", "pow"]
        if not d.kind.smooth:
            names += ["rem", "nextafter"]
    else:
        names += ["rem", "and", "or", "xor", "shl", "shr", "sar"]
    name = d.one(names)
    if y.shape != x.shape:
        y = lax.broadcast_in_dim(y, x.shape, ())
    if name == "pow":
        d.add(lax.pow(d.positive(x), d.tame(y)))
        return
    if name in ("div", "rem", "atan2") and dtype in FLOATS and d.chance(0.7):
        y = d.positive(y)
    if name == "rem" and dtype in FLOATS:  # a large quotient leaves a random remainder
        bound = jnp.asarray(16, x.dtype)
        d.add(lax.rem(lax.clamp(-bound, x, bound), lax.add(lax.abs(y), jnp.asarray(0.5, x.dtype))))
        return
    if name == "nextafter" and dtype not in ("float32", "float64"):
        raise Unsuitable
    function = {
        "add": lax.add,
        "sub": lax.sub,
        "mul": lax.mul,
        "max": lax.max,
        "min": lax.min,
        "div": lax.div,
        "rem": lax.rem,
        "atan2": lax.atan2,
        "nextafter": lax.nextafter,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "shl": lax.shift_left,
        "shr": lax.shift_right_logical,
        "sar": lax.shift_right_arithmetic,
    }[name]
    d.add(function(x, y))


@step("elementwise", 0.7)
def logic(d: Draw) -> None:
    """Bool operations."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(("bool",))
    y = d.fresh(x.shape, "bool")
    d.add(
        d.one((lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.max, lax.min, lambda a, _: lax.bitwise_not(a)))(
            x, y
        )
    )


@step("elementwise", 2)
def compare_select(d: Draw) -> None:
    """A comparison, mostly used by a selection."""
    x = d.any()
    y = d.fresh(x.shape, x.dtype.name)
    which = d.one((lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge))(x, y)
    if d.chance(0.2) and not d.kind.smooth:
        d.add(which)
        return
    a = d.fresh(x.shape, d.dtype())
    b = d.fresh(x.shape, a.dtype.name) if d.chance(0.7) else lax.full_like(a, d.number(0, 3) if a.dtype != bool else 1)
    d.add(lax.select(which, a, b))


@step("elementwise", 0.4)
def select_many(d: Draw) -> None:
    """select_n with an int32 selector."""
    x = d.any()
    count = d.number(2, 4)
    which = lax.clamp(np.int32(0), lax.convert_element_type(d.fresh(x.shape, "int32"), np.int32), np.int32(count - 1))
    cases = [x, *(d.fresh(x.shape, x.dtype.name) for _ in range(count - 1))]
    d.add(lax.select_n(which, *cases))


@step("elementwise", 0.8)
def clamp(d: Draw) -> None:
    """Scalar or array bounds."""
    x = d.any(NUMBERS)
    if d.chance(0.6):
        low, high = (jnp.asarray(v, x.dtype) for v in (d.number(0, 1), d.number(2, 5)))
    else:
        low, high = d.fresh(x.shape, x.dtype.name), d.fresh(x.shape, x.dtype.name)
    d.add(lax.clamp(low, x, high))


@step("elementwise", 1.5)
def convert(d: Draw) -> None:
    """Another type; now and then rounded to fewer bits."""
    x = d.any()
    if x.dtype.name in ("float32", "float64") and d.chance(0.25):
        d.add(lax.reduce_precision(x, *d.one(((8, 7), (5, 10), (8, 23)))))
        return
    d.add(lax.convert_element_type(x, d.dtype()))


@step("elementwise", 0.8)
def integer_pow(d: Draw) -> None:
    """A small integer power."""
    x = d.any(NUMBERS)
    low = -3 if x.dtype.name in FLOATS else 0
    d.add(lax.integer_pow(d.tame(x), d.number(low, 5)))


# -- layout -----------------------------------------------------------------------------------------------------------
@step("layout")
def reshape(d: Draw) -> None:
    """Other extents, same elements."""
    x = d.any(rank=(1, 5))
    factors: list[int] = []
    size = x.size
    for prime in (2, 3, 5, 7, 11, 13, 17, 19, 31):
        while size % prime == 0:
            factors.append(prime)
            size //= prime
    factors += [size] if size > 1 else []
    shape = [1] * d.number(1, 4)
    for f in factors:
        shape[d.number(0, len(shape) - 1)] *= f
    d.add(lax.reshape(x, tuple(shape)))


@step("layout", 0.4)
def rank(d: Draw) -> None:
    """Dimensions of extent 1 removed or added; a copy."""
    x = d.any(rank=(0, 4))
    ones = tuple(k for k, e in enumerate(x.shape) if e == 1)
    how = d.number(0, 2)
    if how == 0 and ones:
        d.add(lax.squeeze(x, ones))
    elif how == 1:
        d.add(lax.expand_dims(x, (d.number(0, x.ndim),)))
    else:
        d.add(jnp.copy(x))


@step("layout")
def transpose(d: Draw) -> None:
    """A permutation."""
    x = d.any(rank=(2, 5))
    d.add(lax.transpose(x, tuple(int(k) for k in d.rng.permutation(x.ndim))))


@step("layout", 0.7)
def rev(d: Draw) -> None:
    """Some dimensions backwards."""
    x = d.any(rank=(1, 5))
    d.add(lax.rev(x, tuple(k for k in range(x.ndim) if d.chance(0.5)) or (x.ndim - 1,)))


@step("layout")
def broadcast(d: Draw) -> None:
    """New dimensions and repeated ones."""
    x = d.any(rank=(0, 3), size=400)
    rank = x.ndim + d.number(1, 2)
    dims = tuple(sorted(int(k) for k in d.rng.choice(rank, x.ndim, replace=False)))
    shape = [d.one((1, 2, 3, 5)) for _ in range(rank)]
    for k, at in enumerate(dims):
        shape[at] = x.shape[k] if x.shape[k] != 1 else d.one((1, 3))
    if np.prod(shape) > d.limit:
        raise Unsuitable
    d.add(lax.broadcast_in_dim(x, tuple(shape), dims))


@step("layout")
def slice_(d: Draw) -> None:
    """A strided slice."""
    x = d.any(rank=(1, 5))
    starts, limits, strides = [], [], []
    for extent in x.shape:
        start = d.number(0, extent - 1) if d.chance(0.6) else 0
        starts.append(start)
        limits.append(d.number(start + 1, extent) if d.chance(0.6) else extent)
        strides.append(d.one((1, 1, 1, 2, 3)))
    d.add(lax.slice(x, starts, limits, strides))


@step("layout")
def pad(d: Draw) -> None:
    """Edges of both signs and interior padding."""
    x = d.any(rank=(1, 4))
    config = []
    for extent in x.shape:
        interior = d.one((0, 0, 0, 1, 2))
        low, high = d.number(-1, 3), d.number(-1, 3)
        if extent + (extent - 1) * interior + low + high < 1:
            low = high = 1
        config.append((low, high, interior))
    if np.prod([e + (e - 1) * i + a + b for e, (a, b, i) in zip(x.shape, config, strict=True)]) > 2 * d.limit:
        raise Unsuitable
    value = jnp.asarray(d.one((0, 1, -2)) if not x.dtype.name.startswith(("u", "b")) else 1, x.dtype)
    scalars = [v for v in d.pool if v.ndim == 0 and v.dtype == x.dtype]
    d.add(lax.pad(x, scalars[-1] if scalars and d.chance(0.5) else value, config))


@step("layout")
def concatenate(d: Draw) -> None:
    """Two to four values one after another."""
    x = d.any(rank=(1, 4))
    dim = d.number(0, x.ndim - 1)
    parts = [x]
    for _ in range(d.number(1, 3)):
        shape = list(x.shape)
        shape[dim] = d.one((1, 2, 5, x.shape[dim]))
        parts.append(d.fresh(tuple(shape), x.dtype.name))
    d.rng.shuffle(parts)  # type: ignore[arg-type]
    if sum(p.size for p in parts) > 2 * d.limit:
        raise Unsuitable
    d.add(lax.concatenate(parts, dim))


@step("layout", 0.6)
def iota(d: Draw) -> None:
    """Counts along a dimension."""
    dtype = d.dtype(NUMBERS)
    shape = d.any(rank=(1, 4)).shape if d.chance(0.6) else d.shape(d.number(1, 3))
    d.add(lax.broadcasted_iota(jnp.dtype(dtype), shape, d.number(0, len(shape) - 1)))


@step("layout", 0.6)
def split(d: Draw) -> None:
    """Several results of one equation, all of them used later."""
    x = d.any(rank=(1, 4))
    dim = d.number(0, x.ndim - 1)
    if x.shape[dim] < 2:
        raise Unsuitable
    cut = d.number(1, x.shape[dim] - 1)
    for part in lax.split(x, (cut, x.shape[dim] - cut), dim):
        d.add(part)


# -- reductions -------------------------------------------------------------------------------------------------------
def _axes(d: Draw, x: Any) -> tuple[int, ...]:
    found = tuple(k for k in range(x.ndim) if d.chance(0.5))
    return found or (d.number(0, x.ndim - 1),)


@step("reduction", 2)
def reduce(d: Draw) -> None:
    """Sum, maximum, minimum, product over any dimensions."""
    x = d.any(NUMBERS, rank=(1, 5))
    axes = _axes(d, x)
    how = d.one(("sum", "sum", "max", "min", "prod"))
    if how == "prod" and x.dtype.name in FLOATS:  # as in `lookups.cumulative`
        part = jnp.asarray(min(0.25, 8 / np.prod([x.shape[k] for k in axes])), x.dtype)
        x = lax.add(lax.mul(lax.tanh(x), part), jnp.asarray(1, x.dtype))
    function = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min, "prod": lax.reduce_prod}[how]
    d.add(function(x, axes))


@step("reduction", 0.7)
def reduce_bits(d: Draw) -> None:
    """and, or, xor of bool or integers."""
    x = d.any(("bool", *INTEGERS), rank=(1, 5))
    d.add(d.one((lax.reduce_and, lax.reduce_or, lax.reduce_xor))(x, _axes(d, x)))


@step("reduction", 0.8)
def arg(d: Draw) -> None:
    """Position of the extreme; rounded or integer values tie."""
    if d.kind.smooth:
        raise Unsuitable
    x = d.any(NUMBERS, rank=(1, 5))
    if x.dtype.name in FLOATS and d.chance(0.5):
        x = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    index = d.one(("int32", "int32", "uint8", "int64") if d.kind.x64 else ("int32", "int32", "uint32", "int8"))
    axis = d.number(0, x.ndim - 1)
    if x.shape[axis] > 255 or (x.shape[axis] > 127 and index != "uint8"):
        index = "int32"
    d.add(d.one((lax.argmax, lax.argmin))(x, axis, jnp.dtype(index)))


@step("pattern")
def softmax(d: Draw) -> None:
    """Softmax, log-softmax or logsumexp along an axis or two."""
    x = d.float(rank=(1, 4))
    axis: Any = d.number(0, x.ndim - 1)
    if x.ndim > 2 and d.chance(0.3):
        axis = (0, x.ndim - 1)
    form = d.number(0, 3)
    if form == 0:
        d.add(jax.nn.softmax(x, axis))
    elif form == 1:
        d.add(jax.nn.log_softmax(x, axis))
    elif form == 2:
        d.add(jax.nn.logsumexp(x, axis, keepdims=d.chance(0.5)))
    else:
        shifted = jnp.exp(x - jnp.max(x, axis, keepdims=True))
        d.add(shifted / jnp.sum(shifted, axis, keepdims=True))


@step("pattern")
def norm(d: Draw) -> None:
    """Mean, variance and normalisation, with or without scale and shift."""
    x = d.float(rank=(1, 4))
    axes = _axes(d, x)
    mean = jnp.mean(x, axes, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axes, keepdims=True) if d.chance(0.6) else jnp.var(x, axes, keepdims=True)
    out = (x - mean) * lax.rsqrt(var + jnp.asarray(1e-3, x.dtype))
    if d.chance(0.6):
        out = out * d.weights((x.shape[-1],), x.dtype.name) + d.weights((x.shape[-1],), x.dtype.name)
    d.add(out)
    if d.chance(0.4):
        d.add(mean)
    if d.chance(0.3):
        d.add(var)


@step("pattern")
def activation(d: Draw) -> None:
    """Library functions with derivatives of their own, and a residual."""
    x = d.float(rank=(1, 4))
    if d.kind.smooth:
        y = d.one((jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus))(x)
    else:
        y = d.one(
            (jax.nn.relu, jax.nn.relu6, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu, jax.nn.hard_swish)
        )(x)
    d.add(x + y if d.chance(0.4) else y)


@step("pattern", 0.7)
def shared(d: Draw) -> None:
    """One value with several users that all stay results."""
    x = d.float(rank=(1, 4))
    y = lax.mul(lax.tanh(x), x)
    axes = _axes(d, x)
    d.add(lax.reduce_sum(y, axes))
    d.add(lax.add(y, x))
    if d.chance(0.5):
        d.add(lax.reduce_max(lax.abs(y), axes))


# -- windows, contractions, convolutions ------------------------------------------------------------------------------
@step("window")
def pool(d: Draw) -> None:
    """reduce_window: strides, padding, dilation."""
    x = d.any(NUMBERS, rank=(1, 4))
    window = tuple(d.one((1, 2, 3, 5)) if e > 1 else 1 for e in x.shape)
    strides = tuple(d.one((1, 1, 2, 3)) for _ in x.shape)
    dilation = tuple(1 if d.kind.smooth else d.one((1, 1, 1, 2)) for _ in x.shape)
    padding: Any = d.one(("SAME", "VALID", None))
    if padding is None:
        padding = tuple((d.number(0, w - 1), d.number(0, w - 1)) for w in window)
    how, init = d.one(((lax.add, 0), (lax.max, "low"), (lax.min, "high")))
    if init == "low":
        init = -np.inf if x.dtype.name in FLOATS else jnp.iinfo(x.dtype).min
    elif init == "high":
        init = np.inf if x.dtype.name in FLOATS else jnp.iinfo(x.dtype).max
    base = tuple(1 if d.kind.smooth else d.one((1, 1, 1, 1, 1, 1, 2)) for _ in x.shape)
    d.add(lax.reduce_window(x, np.asarray(init, x.dtype), how, window, strides, padding, base, dilation))


@step("contraction", 2)
def dot(d: Draw) -> None:
    """dot_general with any batch, contracting and free dimensions in any order."""
    x = d.any(NUMBERS, rank=(1, 4))
    dtype = x.dtype.name
    order = [int(k) for k in d.rng.permutation(x.ndim)]
    contract = order[: d.number(1, min(2, x.ndim))]
    batch = order[len(contract) : len(contract) + d.one((0, 0, 1, 2))]
    free = [d.one((1, 2, 5, 8, 17, 33)) for _ in range(d.one((0, 1, 1, 1, 2)))]
    roles = [("c", k) for k in contract] + [("b", k) for k in batch] + [("f", n) for n in free]
    d.rng.shuffle(roles)  # type: ignore[arg-type]
    shape = tuple(n if role == "f" else x.shape[n] for role, n in roles)
    kept = [e for k, e in enumerate(x.shape) if k not in contract]
    if np.prod(shape, dtype=int) > 8_000 or np.prod([*kept, *free], dtype=int) > 8_000:
        raise Unsuitable
    y = d.weights(shape, dtype) if d.chance(0.4) else d.fresh(shape, dtype)
    place = {role: {k: i for i, (r, k) in enumerate(roles) if r == role} for role in "cb"}
    numbers = (
        (tuple(contract), tuple(place["c"][k] for k in contract)),
        (tuple(batch), tuple(place["b"][k] for k in batch)),
    )
    wanted = "float32" if dtype in ("bfloat16", "float16") and d.chance(0.4) else None
    if dtype in ("int8", "uint8") and d.chance(0.6):
        wanted = "int32" if dtype == "int8" else "uint32"
    if d.chance(0.3):
        x, y = y, x
        numbers = ((numbers[0][1], numbers[0][0]), (numbers[1][1], numbers[1][0]))
    precision = d.one((None, None, lax.Precision.HIGHEST))
    d.add(lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=wanted and jnp.dtype(wanted)))


@step("contraction")
def dense(d: Draw) -> None:
    """A layer: weights, bias, activation."""
    x = d.float(rank=(1, 3))
    units = d.one((1, 3, 8, 16, 19, 40))
    y = jnp.dot(x, d.weights((x.shape[-1], units), x.dtype.name)) + d.weights((units,), x.dtype.name)
    d.add(d.one((jax.nn.relu, jnp.tanh, lambda v: v))(y))


@step("convolution", 3)
def convolution(d: Draw) -> None:
    """1-D to 3-D, NHWC and NCHW, strides, padding, dilation, groups, depthwise."""
    space = d.one((1, 1, 2, 2, 2, 3))
    dtype = d.dtype(FLOATS)
    extents = tuple(d.one((1, 3, 4, 5, 7, 9)) if space == 3 else d.one((3, 5, 8, 11, 13)) for _ in range(space))
    groups = d.one((1, 1, 1, 2, 3))
    c_in = groups * d.one((1, 2, 3, 5))
    c_out = groups * d.one((1, 2, 5, 8))
    if d.chance(0.3):
        groups = c_in = c_out = d.one((2, 5, 8, 17))
        c_out *= d.one((1, 1, 2))
    batch = d.one((1, 2, 3))
    first = d.chance(0.4)  # channels first
    letters = "DHW"[3 - space :]
    spec = (
        ("NC" + letters, "OI" + letters, "NC" + letters)
        if first
        else ("N" + letters + "C", letters + "IO", "N" + letters + "C")
    )
    shape = (batch, c_in, *extents) if first else (batch, *extents, c_in)
    if np.prod(shape, dtype=int) > 2 * d.limit:
        raise Unsuitable
    taps = tuple(d.one((1, 2, 3, 3, 5)) for _ in range(space))
    kernel = (c_out, c_in // groups, *taps) if first else (*taps, c_in // groups, c_out)
    strides = tuple(d.one((1, 1, 2, 3)) for _ in range(space))
    dilation = tuple(d.one((1, 1, 1, 2)) for _ in range(space))
    stretched = tuple(d.one((1, 1, 1, 1, 2)) for _ in range(space))
    padding: Any = d.one(("SAME", "VALID", None))
    if padding is None or any(s > 1 for s in stretched):
        padding = tuple((d.number(-1, t), d.number(0, t)) for t in taps)
    edges = [0] * space if isinstance(padding, str) else [sum(p) for p in padding]
    sizes = zip(extents, stretched, taps, dilation, edges, strict=True)
    out = [(e - 1) * s - (t - 1) * r + edge for e, s, t, r, edge in sizes]
    if padding != "SAME" and min(out) < 0:
        raise Unsuitable
    x = d.fresh(shape, dtype)
    y = lax.conv_general_dilated(x, d.weights(kernel, dtype), strides, padding, stretched, dilation, spec, groups)
    if d.chance(0.6):
        bias = d.weights((c_out,), dtype)
        y = y + (bias.reshape((c_out,) + (1,) * space) if first else bias)
    if d.chance(0.4):
        y = jax.nn.relu(y)
    d.add(y)


@step("convolution", 1)
def transposed_convolution(d: Draw) -> None:
    """The convolution that doubles extents: strides become dilation of the input."""
    space = d.one((1, 2, 2))
    x = d.fresh((d.one((1, 2)), *(d.one((2, 4, 5)) for _ in range(space)), d.one((1, 3, 8))), d.dtype(FLOATS))
    taps = tuple(d.one((1, 2, 3, 4)) for _ in range(space))
    kernel = d.weights((*taps, x.shape[-1], d.one((1, 2, 5))), x.dtype.name)
    strides = tuple(d.one((1, 2, 2, 3)) for _ in range(space))
    letters = "HW"[2 - space :]
    spec = ("N" + letters + "C", letters + "IO", "N" + letters + "C")
    d.add(lax.conv_transpose(x, kernel, strides, d.one(("SAME", "VALID")), dimension_numbers=spec))

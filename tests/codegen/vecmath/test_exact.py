"""Exact lane operations against jax.jit, bit for bit."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import IRError
from jcuts.codegen.llvm import lanes
from jcuts.codegen.vecmath.exact import emit_exact, exact_supported
from tests.codegen.vecmath.harness import compile_loop, storage

pytestmark = pytest.mark.usefixtures("xla_as_shipped")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
ALL = (*SIGNED, *UNSIGNED, "float16", "bfloat16", *FLOATS, "bool")
RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _sixty_four_bits_and_quiet_numpy():
    with jax.enable_x64(True), np.errstate(all="ignore"):
        yield


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bits, every NaN as one pattern."""
    array = np.asarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8)
    raw = array.view(np.dtype(f"u{array.dtype.itemsize}")).copy()
    if array.dtype.kind not in "iu":
        raw[np.isnan(array.astype(np.float64))] = np.iinfo(raw.dtype).max
    return raw


def check(ours: np.ndarray, theirs: np.ndarray, *args: np.ndarray) -> None:
    wrong = np.flatnonzero(bits(ours) != bits(np.asarray(theirs)))
    shown = [(*(a[k] for a in args), ours[k], np.asarray(theirs)[k]) for k in wrong[:5]]
    assert wrong.size == 0, f"{wrong.size} of {ours.size} differ (arguments, ours, XLA): {shown}"


def integers(dtype: str, random: int = 40) -> np.ndarray:
    info = np.iinfo(dtype)
    edges = [0, 1, 2, 3, 5, 7, info.bits - 1, info.bits, info.bits + 1, info.max, info.max - 1, info.min, info.min + 1]
    edges += [-1, -2, -3, -7, -info.bits] if info.min else []
    small = RNG.integers(max(info.min, -100), 100, random // 2)
    every = RNG.integers(info.min, info.max, random, dtype)
    return np.concatenate([np.array(edges, dtype), every, small.astype(dtype)])


def floats(dtype: str, random: int = 60) -> np.ndarray:
    """Ordinary and special floats; no denormals (XLA flushes them, this process does not)."""
    info = np.finfo(dtype)
    edges = [0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 0.49999997, 1e9, 2.0**23 + 1, info.max, info.tiny, np.inf, np.nan]
    edges += [7.5, 127.9, 128.0, 255.5, 300.0, 32768.0, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 1e19, 2e19]
    values = np.concatenate([edges, np.negative(edges), RNG.normal(size=random) * 10.0 ** RNG.uniform(-6, 6, random)])
    return values.astype(dtype)


def values(dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.array([False, True])
    if dtype in ("float16", "bfloat16"):
        return floats("float32").astype(storage(dtype))
    return floats(dtype) if dtype in FLOATS else integers(dtype)


def pairs(dtype: str) -> list[np.ndarray]:
    x = values(dtype)
    return [grid.ravel() for grid in np.meshgrid(x, x)]


def run(name: str, dtype: str, args: list[np.ndarray], out: str | None = None, width: int | None = 8, **params):
    function = compile_loop(
        lambda b, a: emit_exact(b, name, a, dtype, **params), [dtype] * len(args), out or dtype, width
    )
    return function(*args)


BINARY_INT = ("div", "rem", "max", "min", "shift_left", "shift_right_logical", "shift_right_arithmetic", "add", "mul")


@pytest.mark.parametrize("dtype", (*SIGNED, *UNSIGNED))
def test_integer_pairs(dtype: str) -> None:
    args = pairs(dtype)
    every = jax.jit(lambda *a: [getattr(lax, name)(*a) for name in BINARY_INT])(*args)
    for name, theirs in zip(BINARY_INT, every, strict=True):
        check(run(name, dtype, args), theirs, *args)
        if name in ("div", "rem"):
            check(run(name, dtype, args, width=None), theirs, *args)


@pytest.mark.parametrize("dtype", (*SIGNED, *UNSIGNED))
def test_integer_unary(dtype: str) -> None:
    x = integers(dtype)
    names = ("neg", "sign", "population_count", "clz", *(("abs",) if dtype in SIGNED else ()))
    powers = (0, 1, 2, 3, 7)
    every = jax.jit(lambda v: [getattr(lax, name)(v) for name in names])(x)
    for name, theirs in zip(names, every, strict=True):
        check(run(name, dtype, [x]), theirs, x)
    for y, theirs in zip(powers, jax.jit(lambda v: [lax.integer_pow(v, p) for p in powers])(x), strict=True):
        check(run("integer_pow", dtype, [x], y=y), theirs, x)
    with pytest.raises(IRError, match="no negative powers") as caught:
        run("integer_pow", dtype, [x], y=-1)
    assert (caught.value.dtype, caught.value.y) == (dtype, -1)


@pytest.mark.parametrize("width", (4, None))
def test_division_of_32_bit_integers_is_exact_near_multiples(width: int | None) -> None:
    for dtype in ("int32", "uint32"):
        b = RNG.integers(1, 2**31, 20_000).astype(dtype)
        q = RNG.integers(0, np.iinfo(dtype).max // b.astype(np.int64) + 1)
        a = (b.astype(np.int64) * q + RNG.integers(-1, 1, b.size)).clip(0).astype(dtype)
        assert np.array_equal(run("div", dtype, [a, b], width=width), a // b)
        assert np.array_equal(run("rem", dtype, [a, b], width=width), a % b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_pairs(dtype: str) -> None:
    args = pairs(dtype)
    names = ("max", "min", "rem", "div")
    every = jax.jit(lambda *a: [getattr(lax, name)(*a) for name in names])(*args)
    for name, result in zip(names, every, strict=True):
        theirs = np.asarray(result)
        for width in (8, None):
            ours = run(name, dtype, args, width=width)
            visible = np.abs(ours.astype(np.float64)) >= np.finfo(dtype).tiny
            check(np.where(visible, ours, 0), np.where(visible, theirs, 0), *args)
            assert np.all(np.abs(theirs[~visible & ~np.isnan(theirs)]) <= np.finfo(dtype).tiny)
    zeros = [a[(args[0] == 0) & (args[1] == 0)] for a in args]
    for name in ("max", "min"):
        check(run(name, dtype, zeros), jax.jit(getattr(lax, name))(*zeros), *zeros)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_rem_is_fmod(dtype: str) -> None:
    """Quotients up to and beyond what one FMA resolves; signs of zero."""
    x = (RNG.normal(size=4000) * 10.0 ** RNG.uniform(-5, 30, 4000)).astype(dtype)
    y = (RNG.normal(size=4000) * 10.0 ** RNG.uniform(-5, 12, 4000)).astype(dtype)
    x[:500] = (y[:500] * RNG.integers(1, 1000, 500)).astype(dtype)
    check(run("rem", dtype, [x, y]), np.fmod(x, y), x, y)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nextafter(dtype: str) -> None:
    args = pairs(dtype)
    check(run("nextafter", dtype, args), np.nextafter(*args), *args)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_unary(dtype: str) -> None:
    x = floats(dtype)
    names = ("floor", "ceil", "abs", "neg", "sign")
    every = jax.jit(lambda v: [getattr(lax, name)(v) for name in names])(x)
    for name, theirs in zip(names, every, strict=True):
        for width in (16, 1, None):
            check(run(name, dtype, [x], width=width), theirs, x)
    for method in (lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN):
        theirs = jax.jit(lambda v, m=method: lax.round(v, m))(x)
        check(run("round", dtype, [x], method=int(method)), theirs, x)
    check(run("is_finite", dtype, [x], "bool"), jax.jit(lax.is_finite)(x), x)
    for y in (-3, -2, -1, 0, 1, 2, 3, 5, 10):
        theirs = np.asarray(jax.jit(lambda v, y=y: lax.integer_pow(v, y))(x))
        ours = run("integer_pow", dtype, [x], y=y)
        tiny = np.abs(ours) < np.finfo(dtype).tiny * 2  # XLA flushes products on the way to a reciprocal
        tiny |= np.abs(x.astype(np.float64)) ** abs(y) < np.finfo(dtype).tiny
        check(np.where(tiny, 0, ours), np.where(tiny, 0, theirs), x)


@pytest.mark.parametrize("dtype", ("float32", "int32", "uint8"))
def test_clamp(dtype: str) -> None:
    x, other = pairs(dtype)
    low, high = np.roll(other, 3), np.roll(other, 17)
    theirs = jax.jit(lax.clamp)(low, x, high)
    check(run("clamp", dtype, [low, x, high]), theirs, low, x, high)


@pytest.mark.parametrize("source", ALL)
def test_conversions(source: str) -> None:
    x = values(source)
    if source == "float32":
        x = np.concatenate([x, RNG.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)])
        x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0) | np.isnan(x)]
    every = jax.jit(lambda v: [lax.convert_element_type(v, storage(target)) for target in ALL])(x)
    for target, result in zip(ALL, every, strict=True):
        theirs = np.asarray(result)
        ours = run("convert", source, [x], target, 16, target=target)
        if source == "float64" and target in ("float32", "float16", "bfloat16"):
            tiny = np.abs(x) < np.finfo(np.float32).tiny * 2
            ours, theirs = np.where(tiny, 0, ours).astype(ours.dtype), np.where(tiny, 0, theirs).astype(theirs.dtype)
        check(ours, theirs, x)


def test_sixteen_bit_floats_round_to_even_and_keep_nan() -> None:
    patterns = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    check(run("convert", "float32", [patterns], "bfloat16", target="bfloat16"), patterns.astype(ml_dtypes.bfloat16))
    check(run("convert", "float32", [patterns], "float16", target="float16"), patterns.astype(np.float16))
    every = np.arange(2**16, dtype=np.uint16)
    for name in ("float16", "bfloat16"):
        halves = every.view(storage(name))
        check(run("convert", name, [halves], "float32", target="float32"), halves.astype(np.float32))


def test_what_is_not_there_is_refused() -> None:
    assert not exact_supported("clz", "float32")
    assert exact_supported("clz", "uint8")
    with pytest.raises(IRError, match="no exact code for clz on float32") as caught:
        run("clz", "float32", [np.zeros(1, np.float32)])
    assert caught.value.function == "clz"
    with pytest.raises(IRError, match="takes 2 arguments, not 1"):
        run("max", "int8", [np.zeros(1, np.int8)])
    with pytest.raises(IRError, match="no register form"):
        lanes.element_type("complex64")

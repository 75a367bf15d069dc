"""Test-input generator: inputs of every recipe from a seed, special values included; .npy files of any dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from jcuts.base.errors import UsageError
from jcuts.tune.problem import Input, Problem

FINITE = " finite"
"""What recipes hold whose values are never NaN or infinite."""
DIVISOR = " divisor"
"""What recipes hold whose values divide what is then multiplied: no tiny ones, whose quotients overflow before that."""
TF32 = " tf32"
"""How recipes end whose values are TF32 numbers."""
KEPT = np.uint32(0xFFFFE000)
"""The bits that a TF32 number has of a float32."""
NORMAL = "normal"
SPECIAL = "special"
HUGE = "huge"
SCALARS = "special scalars"
"""Special values in scalars alone, where these stand beside larger operands: one such scalar makes NaN, infinities or
zeros of all results, which then say nothing of the other operands.  Booleans select their other branch.
"""
SPECIALS = (SPECIAL, SCALARS)
LEAST_SEEDS = 3
MOST_SEEDS = 16
WANTED_SAMPLES = 64
LARGE = 1 << 22
"""Elements of an output from which one normal set says enough."""
PERIOD = (1 << 20) - 3
"""Random values that a larger input repeats: a prime, which no extent of it is a multiple of by chance."""


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name, ml_dtypes' included.

    Raises:
        UsageError: no such dtype.
    """
    try:
        return np.dtype(getattr(ml_dtypes, name, None) or name)
    except TypeError:
        raise UsageError(f"dtype {name!r} is unknown", dtype=name) from None


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a real floating type, ml_dtypes' included."""
    return dtype.kind == "f" or (dtype.kind == "V" and hasattr(ml_dtypes, dtype.name))


def flushed(array: np.ndarray) -> np.ndarray:
    """The array as arithmetic sees it that takes denormal operands for zeros of their sign (XLA's does on a CPU);
    itself where it has none.
    """
    if not is_float(array.dtype):
        return array
    wide = array.astype(np.float64) if array.dtype.kind == "V" else array
    small = (np.abs(wide) < float(ml_dtypes.finfo(array.dtype).smallest_normal)) & (wide != 0)
    if not small.any():
        return array
    found = array.copy()
    found[small] = np.copysign(0.0, wide[small]).astype(array.dtype)
    return found


def save(path: Path, array: np.ndarray) -> None:
    """Writes an array; dtypes that the .npy format lacks are written as the integers behind them."""
    # ascontiguousarray makes a scalar one-dimensional; the caller's spec has the shape.
    flat = np.ascontiguousarray(array)
    np.save(path, flat.view(f"u{flat.itemsize}") if flat.dtype.kind == "V" else flat, allow_pickle=False)


def load(path: Path | str, shape: Sequence[int], dtype: str, *, short: bool = False) -> np.ndarray:
    """Reads what `save` (or numpy.save) wrote.

    Args:
        short: gives the values that a large array repeats, flat, where the file holds no more than those.
    Raises:
        UsageError: the file holds another number of elements or another type.
    """
    array = np.load(path, allow_pickle=False)
    wanted = dtype_of(dtype)
    if wanted.kind == "V" and array.dtype.itemsize == wanted.itemsize:
        array = array.view(wanted)
    size = math.prod(shape)
    repeats = array.size == PERIOD < size
    if (array.size != size and not repeats) or array.dtype != wanted:
        raise UsageError(
            f"{path} holds {array.dtype}{list(array.shape)}, expected {wanted}{list(shape)}",
            path=str(path),
            found=str(array.dtype),
        )
    if repeats:
        return array if short else whole(array, shape)
    return np.asarray(array.reshape(tuple(shape)), order="C")


def whole(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of this shape, from itself or from the values that it repeats."""
    return array if array.shape == tuple(shape) else np.resize(array, tuple(shape))


def seed_kinds(problem: Problem) -> list[str]:
    """Which sets of inputs a problem is checked on.

    At least 3 normal ones (one where an output is large, and XLA's own error known from enough numbers of every
    output); up to 16 for tiny outputs, until it is known from about 64 numbers (one number may be exact by luck).  Then
    one with special values and one with huge ones, and one with special scalars (`SCALARS`) where there are any beside
    larger operands; one set is enough if nothing is random.
    """
    if not any(i.recipe != "given" for i in problem.inputs):
        return [NORMAL]
    sizes = [max(1, math.prod(o.shape)) for o in problem.outputs]
    smallest = min(sizes)
    least = 1 if max(sizes) >= LARGE and smallest >= WANTED_SAMPLES else LEAST_SEEDS
    count = min(MOST_SEEDS, max(least, math.ceil(WANTED_SAMPLES / smallest)))
    return [NORMAL] * count + [SPECIAL, HUGE] + [SCALARS] * any(_scalars_apart(problem))


def _scalars_apart(problem: Problem) -> list[bool]:
    """Which operands are scalars with a set of their own: floats beside larger ones, booleans that select a branch."""
    floats = [spec.recipe.startswith(("normal", "positive")) for spec in problem.inputs]
    sizes = [math.prod(spec.shape) for spec in problem.inputs]
    larger = any(f and size > 1 for f, size in zip(floats, sizes, strict=True))
    return [
        size == 1 and ((f and larger) or _selects(spec))
        for spec, f, size in zip(problem.inputs, floats, sizes, strict=True)
    ]


def _selects(spec: Input) -> bool:
    """Whether an operand is a boolean that is to select one of two branches (recipe ``integers 0..0`` or ``1..1``)."""
    return spec.dtype == "bool" and spec.integer_range() is not None


def make_inputs(problem: Problem, kind: str, seed: int, *, short: bool = False) -> list[np.ndarray]:
    """One set of inputs.

    Args:
        problem: gives shapes, dtypes and recipes; ``given`` inputs are read from their files, unchanged.
        kind: ``normal``; ``special``: NaN, infinities, -0, denormals, integer extremes sprinkled in; ``huge``:
            magnitudes near overflow; ``special scalars``: special values in scalars alone, and booleans select the
            other branch.
        seed: of the generator; equal seeds give equal values in every process.
        short: of a large input only the values that it repeats, flat (`whole` repeats them).
    """
    rng = np.random.default_rng([seed, {NORMAL: 0, SPECIAL: 1, HUGE: 2, SCALARS: 3}[kind]])
    reduction = max(o.reduction for o in problem.outputs)
    apart = _scalars_apart(problem)
    made = []
    for spec, scalar in zip(problem.inputs, apart, strict=True):
        own = NORMAL if kind in SPECIALS and scalar != (kind == SCALARS) else kind
        made.append(_make(spec, own, rng, reduction, problem.degree))
    return made if short else [whole(x, i.shape) for x, i in zip(made, problem.inputs, strict=True)]


def timing_inputs(problem: Problem) -> list[np.ndarray]:
    """One set of inputs whose values matter to nobody: the same few random ones over and over."""
    found = []
    for spec in problem.inputs:
        if spec.recipe == "given":
            found += [_make(spec, NORMAL, np.random.default_rng(0), 1)]
        else:
            count = min(PERIOD, max(1, math.prod(spec.shape)))
            found.append(np.resize(_repeated(spec.dtype, spec.recipe)[:count], spec.shape))
    return found


@functools.lru_cache(maxsize=8)
def _repeated(dtype: str, recipe: str) -> np.ndarray:
    return _make(Input((PERIOD,), dtype, recipe), NORMAL, np.random.default_rng(0), 1)


def _make(spec: Input, kind: str, rng: np.random.Generator, reduction: int, degree: int = 1) -> np.ndarray:
    if spec.recipe != "given" and math.prod(spec.shape) > PERIOD:
        return _make(replace(spec, shape=(PERIOD,)), kind, rng, reduction, degree)
    dtype = dtype_of(spec.dtype)
    if spec.recipe == "given":
        assert spec.npy is not None  # Input checked it
        return load(spec.npy, spec.shape, spec.dtype)
    if _selects(spec):
        low, _ = spec.integer_range() or (0, 0)
        return np.full(spec.shape, low != (kind == SCALARS), dtype)
    if spec.recipe == "bool" or dtype.kind == "b":
        return (rng.random(spec.shape) < 0.5).astype(dtype)
    if dtype.kind in "iu":
        return _integers(spec, dtype, kind, rng)
    if dtype.kind == "c":
        parts = [_floats(spec, np.dtype(f"f{dtype.itemsize // 2}"), kind, rng, reduction, degree) for _ in range(2)]
        return np.asarray(parts[0] + 1j * parts[1], dtype)
    if not is_float(dtype):
        raise UsageError(f"no recipe makes values of dtype {spec.dtype!r}", dtype=spec.dtype)
    made = _floats(spec, dtype, kind, rng, reduction, degree)
    if not spec.recipe.endswith(TF32):
        return made
    if dtype != np.float32:
        raise UsageError(f"recipe {spec.recipe!r} is for float32, not {spec.dtype}", dtype=spec.dtype)
    return (np.ascontiguousarray(made).view(np.uint32) & KEPT).view(np.float32)


def _integers(spec: Input, dtype: np.dtype, kind: str, rng: np.random.Generator) -> np.ndarray:
    info = _iinfo(dtype)
    low, high = spec.integer_range() or (int(info.min), int(info.max))
    low, high = max(low, int(info.min)), min(high, int(info.max))
    wide = rng.integers(low, high, size=spec.shape, endpoint=True, dtype=np.uint64 if high > 2**63 - 1 else np.int64)
    out = np.asarray(wide).astype(dtype)
    if spec.integer_range() is None:  # small numbers meet (ties, divisors); large ones wrap around
        small = rng.integers(max(low, -8), min(high, 8), size=spec.shape, endpoint=True).astype(dtype)
        out = np.where(rng.random(spec.shape) < 0.5, small, out)
    if kind != NORMAL:
        extremes = [v for v in (low, high, low + 1, high - 1, 0, 1, -1) if low <= v <= high]
        _sprinkle(out, np.array(extremes, dtype), rng, out.size // 4)
    return np.asarray(out, dtype)


def _iinfo(dtype: np.dtype) -> np.iinfo | ml_dtypes.iinfo:
    try:
        return np.iinfo(dtype)
    except ValueError:
        return ml_dtypes.iinfo(dtype)


def _floats(
    spec: Input, dtype: np.dtype, kind: str, rng: np.random.Generator, reduction: int, degree: int = 1
) -> np.ndarray:
    values = rng.standard_normal(spec.shape)
    positive = spec.recipe.startswith("positive")
    if positive:
        values = np.abs(values) + 0.1
    values /= spec.divisor
    low, high = spec.integer_range() or (None, None)
    if low is not None and high is not None:  # floats that hold integers
        values = rng.integers(low, high, size=spec.shape, endpoint=True).astype(np.float64)
    out = np.asarray(values).astype(dtype)
    if kind == NORMAL or low is not None:
        return out
    info = ml_dtypes.finfo(dtype)
    tiny, most, least = float(info.smallest_normal), float(info.max), float(info.smallest_subnormal)
    # A long sum with one NaN in it is NaN: leave most of them alone.  Huge values are so many that they meet in
    # products of both signs: with one product, what clips results (a ReLU) decides whether its scale is seen at all.
    few = max(8, out.size // 64) if kind == HUGE else 8
    count = max(1, out.size // 8 if reduction <= 16 else min(few, out.size // 16))
    if kind in SPECIALS:
        # Overflowing conversions are meant: some small floats lack infinities.
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, least, -least, tiny / 2, -tiny / 2, tiny, 1.0, -1.0, 0.5]
        if FINITE in spec.recipe:
            special = [v for v in special if math.isfinite(v)]
        if DIVISOR in spec.recipe:
            special = [v for v in special if not 0.0 < abs(v) <= tiny]
        if positive:
            special = [v for v in special if not (v < 0 or math.copysign(1.0, v) < 0)]
    else:
        # Elementwise operations see the very ends of the range.  Sums and products must not overflow on the way:
        # whether they do depends on their order and on fused multiply-adds.
        end = (most / (64.0 * reduction if reduction > 1 else 1.0)) ** (1.0 / max(1, degree))
        special = [end, end / 2, end / 4, math.sqrt(end), *([] if positive else [-end, -end / 2, -math.sqrt(end)])]
        if reduction > 1:  # terms of equal size would cancel, and leave what a fused multiply-add rounds off
            shares = rng.uniform(0.5, 1.0, (-(-count // len(special)), len(special)))
            special = (shares * special).ravel().tolist()
    _sprinkle(out, np.array(special).astype(dtype), rng, count)
    return out


def _sprinkle(out: np.ndarray, special: np.ndarray, rng: np.random.Generator, count: int) -> None:
    if out.size == 0:
        return
    where = rng.integers(0, out.size, size=max(1, count))
    # In an order of their own for each operand: a scalar has a single one, and it is not always the first.
    what = rng.permutation(np.resize(rng.permutation(len(special)), len(where)))
    out.reshape(-1)[where] = special[what]

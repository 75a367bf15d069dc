"""The acceptance rule: how far a candidate may be from float64, given how far XLA is.

For one output let r be the float64 reference, x XLA's result, c the candidate's, eps the spacing of the output's dtype
at 1, K the reduction length, tiny the smallest normal number, and err(a) = max(0, |a - r| - tiny).

1.  *Classes.*  NaN, +inf, -inf and finite positions of c equal those of x.  Where x and r (rounded to the dtype) are
    of different classes, c may have either.  Where x is not finite although r is, XLA's arithmetic overflowed on the
    way to a finite result; what is then found depends on the order of sums and on fused multiply-adds, and c is free.
    Where abs(r) (1 + 4 eps sqrt(K)) reaches the largest finite number, c may be that infinity, or within
    8 eps sqrt(K) abs(r) of r.
2.  *Zeros.*  Where x = r = c = 0 and x and r have one sign, c has it too (elementwise outputs: K = 1).  Not where
    simulated rounding moves it off zero: the sign of a number that rounds to zero in some of the runs is no one's.
3.  *Output.*  With s the root mean square of r over all normal input sets,
        max_i err(c_i) / max(|r_i|, s)  <=  tolerance * max_i err(x_i) / max(|r_i|, s)  +  4 eps sqrt(K).
    XLA's own error is taken over all normal input sets together: on one it may be small by luck.
4.  *Magnitudes.*  An output-wide scale hides relative errors of small elements.  Elements are banded by exponent of r
    (8 binades, at least 16 different numbers: copies of one number tell of XLA's error once, and there it may be small
    by luck; where r = 0 there is no magnitude, rule 3 stands alone); in each band, with R its largest |r|,
        max err(c)  <=  4 tolerance * max err(x)  +  4 eps sqrt(K) R.
    Neighbours in a band may differ in condition: an element that simulated rounding of one ulp moves as far is no
    one's fault (a sum that cancels among numbers that are small by themselves, on which XLA was lucky).
5.  *Special inputs* (NaN, infinities, -0, denormals; huge values): rules 1, 2, and rule 3 with 4 tolerance.
6.  *Discrete outputs* (integers, booleans, argmax, comparisons): equal to x bit by bit.

Where runs of the reference with simulated rounding (`tune.widen`) disagree by more than rounding explains, the float64
margin does not exceed rounding: there c must lie between the values seen (x's among them), within the floor
4 eps sqrt(K) of the largest of them, and rules 1-6 do not apply.  Integers wrap around: a range of them that reaches an
end of their type (where a conversion of a float saturated) goes on at the other one, and bounds nothing.  Half of these
runs take denormal inputs for zeros, as XLA's arithmetic does on a CPU: what depends on the difference is bound to
neither.

Where the program computes in float64 itself, float64 is no wider than what it judges: x - r is not XLA's error, most
often it is 0 because both made the same roundings.  There XLA's error is what rounding does to float64 arithmetic: the
largest distance from r of runs in which every float64 operation (no narrower one) is off by up to an ulp.
err(x) is the larger of this ``uncertainty`` and |x - r|; err(c) stays as it is.

On GPUs the default precision of float32 products lets operands be rounded to TF32, and XLA's autotuning decides by time
whether they are: the same function is more or less precise from one run, or one batch size, to the next.  Where XLA
took an algorithm that does not round, how far rounded operands move the reference counts as ``uncertainty`` too, and
where products are exponentiated (attention): what simulated rounding of float32 explains is little beside that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.tune import slabs
from jcuts.tune.bands import Pool, rms
from jcuts.tune.problem import Output
from jcuts.tune.values import NORMAL, dtype_of, is_float

FLOOR_ULP = 4.0
NOISE_ULP = 4.0
"""Amplitude of the simulated rounding behind `Expected.low` and ``high``."""
CATASTROPHE = 4.0
FLIP_FLOORS = 16.0


@dataclass(frozen=True)
class Expected:
    """What one output must look like on one set of inputs.

    Attributes:
        kind: ``normal``, ``special`` or ``huge`` (see `tune.values`).
        xla: XLA's result in the output's dtype.
        reference: the float64 result (integers and booleans as they are).
        low, high: the least and the largest value of the reference under simulated rounding; both None where the
            subset has nothing discrete.  -inf and inf mean that even its class (NaN, inf, finite) varied.
        uncertainty: how far rounding of float64 operations moves the reference; None where there are none.
    """

    kind: str
    xla: np.ndarray
    reference: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    uncertainty: np.ndarray | None = None

    @functools.cached_property
    def known(self) -> _Known:
        """What every candidate is compared with, made once for all of them (float outputs)."""
        x, r = np.asarray(self.xla).reshape(-1), _flat(self.reference)
        unsure = None if self.uncertainty is None else _flat(self.uncertainty)
        errors = np.empty(r.shape)

        def fill(slab: slice) -> bool:
            """XLA's errors; whether all is finite."""
            wide = x[slab].astype(np.float64)
            size = np.abs(wide - r[slab])
            errors[slab] = size if unsure is None else np.maximum(size, unsure[slab])
            return bool(np.isfinite(wide).all() and np.isfinite(r[slab].astype(x.dtype)).all())

        with np.errstate(all="ignore"):
            if all(slabs.each(r.size, fill)):
                return _Known(x, r, errors, None, None, None)
        class_x, class_r = np.empty(r.shape, np.int8), np.empty(r.shape, np.int8)
        kept = np.empty(r.shape, bool)

        def sort(slab: slice) -> None:
            class_x[slab] = _classes(x[slab].astype(np.float64))
            class_r[slab] = _classes(r[slab].astype(x.dtype).astype(np.float64))
            kept[slab] = (class_x[slab] == 0) & np.isfinite(r[slab])
            if unsure is None:
                errors[slab][class_x[slab] != 0] = 0.0
            else:
                np.copyto(errors[slab], unsure[slab], where=class_x[slab] != 0)

        with np.errstate(all="ignore"):
            slabs.each(r.size, sort)
        return _Known(x, r, errors, class_x, class_r, kept)


@dataclass(frozen=True, eq=False)
class _Known:
    """One set, flattened: XLA's result, the reference, XLA's error, classes (None: both are all finite)."""

    result: np.ndarray
    r: np.ndarray
    errors: np.ndarray
    class_x: np.ndarray | None
    class_r: np.ndarray | None
    kept: np.ndarray | None
    """Where rules 3 to 5 apply to a result of XLA's own classes; None: everywhere."""

    @functools.cached_property
    def x(self) -> np.ndarray:
        """XLA's result in float64."""
        return self.result.astype(np.float64)

    def held(self, values: np.ndarray) -> np.ndarray:
        """The values where rules 3 to 5 apply."""
        return values if self.kept is None else values[self.kept]

    @functools.cached_property
    def held_r(self) -> np.ndarray:
        """The reference there."""
        return self.held(self.r)

    @functools.cached_property
    def held_errors(self) -> np.ndarray:
        """XLA's errors there."""
        return self.held(self.errors)


def _flat(array: np.ndarray) -> np.ndarray:
    """Flattened, in float64; no copy of what is: nobody writes into it."""
    return np.asarray(array).astype(np.float64, copy=False).reshape(-1)


@dataclass(frozen=True)
class Accuracy:
    """Errors of one output in units of eps: the candidate's, XLA's, and the limit that the first must keep."""

    candidate: float
    xla: float
    limit: float


def check_output(
    index: int, spec: Output, expected: Sequence[Expected], got: Sequence[np.ndarray], tolerance: float
) -> Accuracy:
    """Applies the rule to one output.

    Args:
        index: position of the output, for messages.
        spec: shape, dtype, reduction length, exactness.
        expected, got: one entry per set of inputs.
        tolerance: multiple of XLA's own error that is allowed (2.0).
    Returns: the errors on the normal input sets.
    Raises:
        AccuracyRejected: with the rule, the numbers, and the first offending position.
    """
    dtype = dtype_of(spec.dtype)
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        if have.shape != want.xla.shape or have.dtype != want.xla.dtype:
            raise AccuracyRejected(
                f"output {index} is {have.dtype}{list(have.shape)}, XLA's is {want.xla.dtype}{list(want.xla.shape)}",
                output=index,
                seed=number,
                rule="shape",
            )
    if spec.exact or not (is_float(dtype) or dtype.kind == "c"):
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            _check_exact(index, number, want, have)
        return Accuracy(0.0, 0.0, 0.0)
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
        expected = [_real_parts(e) for e in expected]
        got = [_parts(g) for g in got]
    return _check_floats(index, spec, dtype, expected, got, tolerance)


def _parts(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return np.stack([np.real(array), np.imag(array)], axis=-1)


def _real_parts(e: Expected) -> Expected:
    bounds = (None, None) if e.low is None else (_parts(e.low), _parts(e.high))
    unsure = None if e.uncertainty is None else _parts(e.uncertainty)
    return Expected(e.kind, _parts(e.xla), _parts(e.reference), *bounds, unsure)


# Discrete outputs ----------------------------------------------------------------------------------------------------


def _check_exact(index: int, seed: int, want: Expected, have: np.ndarray) -> None:
    same = have == want.xla
    if have.dtype.kind not in "biu":
        same |= np.isnan(have) & np.isnan(want.xla)
        same &= np.signbit(have) == np.signbit(want.xla)
        same |= np.isnan(have) & np.isnan(want.xla)
    if same.all():
        return
    reference = want.reference.astype(have.dtype)
    seen = [want.xla, reference]
    if want.low is not None and want.high is not None:
        seen += [want.low.astype(have.dtype), want.high.astype(have.dtype)]
    low, high = np.minimum.reduce(seen), np.maximum.reduce(seen)
    settled = np.logical_and.reduce([s == want.xla for s in seen])
    wrong = ~same & (settled | (((have < low) | (have > high)) & ~_at_an_end(low, high)))
    if wrong.any():
        where = _first(wrong)
        raise AccuracyRejected(
            f"output {index} must equal XLA's: {int(wrong.sum())} of {have.size} elements differ, the first at "
            f"{where} is {have[where]} instead of {want.xla[where]}",
            output=index,
            seed=seed,
            rule="exact",
            count=int(wrong.sum()),
            position=list(where),
            candidate=str(have[where]),
            xla=str(want.xla[where]),
        )


def _at_an_end(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where a range of integers reaches the largest one, or the least, which negation makes of the largest."""
    if low.dtype.kind not in "iu":
        return np.zeros(low.shape, bool)
    info = np.iinfo(low.dtype)
    return (high == info.max) | ((low <= info.min + 1) if low.dtype.kind == "i" else False)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


# Float outputs -------------------------------------------------------------------------------------------------------


def _classes(values: np.ndarray) -> np.ndarray:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    if np.isfinite(values).all():
        return np.zeros(values.shape, np.int8)
    return np.select([np.isnan(values), np.isposinf(values), np.isneginf(values)], [1, 2, 3], 0).astype(np.int8)


@dataclass
class _Set:
    """The elements of one set of inputs that are held to the rules: r, errors, how far rounding by an ulp moves r."""

    kind: str
    reference: np.ndarray
    candidate_error: np.ndarray
    xla_error: np.ndarray
    moved: np.ndarray | None = None
    """How far rounding by an ulp moves r, where that is known."""
    whole: _Known | None = None
    """Set where every element is held to the rules."""


def _check_floats(
    index: int, spec: Output, dtype: np.dtype, expected: Sequence[Expected], got: Sequence[np.ndarray], tolerance: float
) -> Accuracy:
    info = ml_dtypes.finfo(dtype)
    eps, tiny = float(info.eps), float(info.smallest_normal)
    floor = FLOOR_ULP * eps * math.sqrt(spec.reduction)
    with np.errstate(all="ignore"):
        pairs = list(enumerate(zip(expected, got, strict=True)))
        # Ordinary inputs first: what is wrong on them is the better message.
        normal = [
            _prepare(index, number, spec, want, have, dtype, floor)
            for number, (want, have) in pairs
            if want.kind == NORMAL
        ]
        pool, errors = _pool(normal, tiny), _joined([s.candidate_error for s in normal])
        e_c, e_x = pool.relative(errors), pool.xla
        accuracy = Accuracy(e_c / eps, e_x / eps, (tolerance * e_x + floor) / eps)
        if not e_c <= tolerance * e_x + floor:
            raise _too_far(index, "output", e_c, e_x, tolerance * e_x + floor, eps)
        if any(s.moved is not None for s in normal):
            moved = [np.zeros(s.reference.shape) if s.moved is None else s.moved for s in normal]
            errors = np.where(errors <= np.concatenate(moved), 0.0, errors)
        for top, c, x in pool.by_magnitude(errors):
            limit = CATASTROPHE * tolerance * x + floor * top
            if not c <= limit:
                raise _too_far(index, "magnitude", c, x, limit, eps, magnitude=top)
        for number, (want, have) in pairs:
            if want.kind == NORMAL:
                continue
            part = _prepare(index, number, spec, want, have, dtype, floor)
            own = _pool([part], tiny)
            c, x = own.relative(part.candidate_error), max(own.xla, e_x)
            limit = CATASTROPHE * tolerance * x + floor
            if not c <= limit:
                raise _too_far(index, part.kind, c, x, limit, eps, seed=number)
    return accuracy


@functools.lru_cache(maxsize=3)
def _usual_pool(known: tuple[_Known, ...], tiny: float) -> Pool:
    """The pool of sets that are compared as a whole: one for all candidates (of a problem: normal, special, huge)."""
    errors = _joined([_less(k.held_errors, tiny) for k in known])
    return Pool(_joined([k.held_r for k in known]), errors, tiny)


def _pool(sets: Sequence[_Set], tiny: float) -> Pool:
    whole = tuple(s.whole for s in sets if s.whole is not None)
    if len(whole) == len(sets) > 0:
        return _usual_pool(whole, tiny)
    errors = [s.xla_error if s.whole is None else _less(s.xla_error, tiny) for s in sets]
    return Pool(_joined([s.reference for s in sets]), _joined(errors), tiny)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0)


def _prepare(
    index: int, seed: int, spec: Output, want: Expected, have: np.ndarray, dtype: np.dtype, floor: float
) -> _Set:
    """Rules 1 and 2 on one set of inputs; the errors of what is left for rules 3-5."""
    info = ml_dtypes.finfo(dtype)
    tiny, most = float(info.smallest_normal), float(info.max)
    known = want.known
    x, r = known.x, known.r
    if want.low is None and spec.reduction > 1 and _is_alike(have, known):
        # The usual case: no class differs, and zeros have no sign to keep.
        return _Set(want.kind, known.held_r, _errors(have, known, tiny), known.held_errors, whole=known)
    c = _flat(have)
    free = np.zeros(r.shape, bool)
    moved, reached = np.zeros(r.shape, bool), None
    if want.low is not None and want.high is not None:
        low, high = _flat(want.low), _flat(want.high)
        moved = (low < 0) | (high > 0)
        reached = np.maximum(high - r, r - low) / NOISE_ULP
        finite = r[np.isfinite(r)]
        reach = floor * np.maximum(np.abs(r), max(rms(finite), tiny))
        varied = (low == -np.inf) & (high == np.inf)
        free = varied | (high - low > FLIP_FLOORS * reach)
        # A range that runs from next to nothing to something large ends no sharper than the large values are rounded.
        reach = np.maximum(reach, floor * np.maximum(*(np.where(np.isfinite(b), np.abs(b), 0.0) for b in (low, high))))
        outside = (c < np.minimum(low, x) - reach) | (c > np.maximum(high, x) + reach) | np.isnan(c)
        bad = free & ~varied & outside & ~np.isnan(x)
        if bad.any():
            raise _at(index, seed, "range", bad, want, have, "lies outside every value that rounding can explain")
    class_c = _classes(c)
    class_x, class_r = (np.zeros(r.shape, np.int8) if k is None else k for k in (known.class_x, known.class_r))
    free |= (class_x != 0) & (class_r == 0)
    edge = np.isfinite(r) & (np.abs(r) * (1.0 + floor) >= most)  # r rounds to the largest number or to infinity
    beyond = (class_c >= 2) & (np.signbit(c) == np.signbit(r))
    below = (class_c == 0) & (np.abs(c - r) <= 2.0 * floor * np.abs(r))
    bad = (class_c != class_x) & (class_c != class_r) & ~free & ~(edge & (beyond | below))
    if bad.any():
        raise _at(index, seed, "class", bad, want, have, "differs from XLA's in being NaN, infinite or finite")
    if spec.reduction == 1:
        zero = (c == 0) & (x == 0) & (r == 0) & (np.signbit(x) == np.signbit(r)) & ~free & ~moved
        bad = zero & (np.signbit(c) != np.signbit(x))
        if bad.any():
            raise _at(index, seed, "zero", bad, want, have, "is a zero of the other sign")
    kept = ~free & (class_c == 0) & (class_x == 0) & np.isfinite(r)
    errors = (_beyond((c - r)[kept], tiny), _beyond(known.errors[kept], tiny))
    return _Set(want.kind, r[kept], *errors, None if reached is None else reached[kept])


def _is_alike(have: np.ndarray, known: _Known) -> bool:
    """Whether a result is finite, NaN, +inf and -inf just where XLA's is."""
    flat = have.reshape(-1)

    def alike(slab: slice) -> bool:
        c = flat[slab].astype(np.float64)
        if known.class_x is None:
            return bool(np.isfinite(c).all())
        return bool(np.array_equal(_classes(c), known.class_x[slab]))

    return all(slabs.each(flat.size, alike))


def _errors(have: np.ndarray, known: _Known, tiny: float) -> np.ndarray:
    """err(c) wherever the rules look."""
    flat, errors = have.reshape(-1), np.empty(known.r.shape)

    def fill(slab: slice) -> None:
        errors[slab] = _beyond(flat[slab].astype(np.float64) - known.r[slab], tiny)

    slabs.each(flat.size, fill)
    return known.held(errors)


def _less(errors: np.ndarray, tiny: float) -> np.ndarray:
    """`_beyond` of many."""
    found = np.empty(errors.shape)

    def fill(slab: slice) -> None:
        found[slab] = _beyond(errors[slab], tiny)

    slabs.each(errors.size, fill)
    return found


def _beyond(difference: np.ndarray, tiny: float) -> np.ndarray:
    """max(0, |difference| - tiny)."""
    size = np.abs(difference)
    size -= tiny
    return np.maximum(size, 0.0, out=size)


def _too_far(index: int, rule: str, c: float, x: float, limit: float, eps: float, **values: object) -> AccuracyRejected:
    unit = float(values["magnitude"]) if "magnitude" in values else 1.0  # type: ignore[arg-type]
    ulp = eps * unit if unit > 0 else eps
    return AccuracyRejected(
        f"output {index}: error {c / ulp:.3g} ulp against float64 exceeds the limit of {limit / ulp:.3g} ulp "
        f"(XLA's own error is {x / ulp:.3g} ulp; rule: {rule})",
        output=index,
        rule=rule,
        error_ulp=c / ulp,
        xla_error_ulp=x / ulp,
        limit_ulp=limit / ulp,
        **values,
    )


def _at(
    index: int, seed: int, rule: str, bad: np.ndarray, want: Expected, have: np.ndarray, what: str
) -> AccuracyRejected:
    where = _first(bad.reshape(have.shape))
    return AccuracyRejected(
        f"output {index} at {where} ({int(bad.sum())} of {bad.size} elements) {what}: {have[where]}, XLA has "
        f"{want.xla[where]}, float64 {want.reference[where]}",
        output=index,
        seed=seed,
        kind=want.kind,
        rule=rule,
        count=int(bad.sum()),
        position=list(where),
        candidate=str(have[where]),
        xla=str(want.xla[where]),
        reference=str(want.reference[where]),
    )

"""Rules 1 to 5 of `tune.verify.acceptance`: checks of floating-point outputs on all sets of inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jcuts.base.errors import AccuracyRejected
from jcuts.tune.problem import Output
from jcuts.tune.verify import blocked_numpy
from jcuts.tune.verify.expected import FlatReference, OutputReference, classes, first, flat
from jcuts.tune.verify.inputs import HUGE, NORMAL
from jcuts.tune.verify.magnitude_bands import ErrorBands, rms
from jcuts.tune.verify.tolerances import ELEMENT_FACTOR, FLIP_FLOORS, FLOOR_ULP, NOISE_ULP, SATURATED


@dataclass(frozen=True)
class Accuracy:
    """Errors of one output in units of eps: the candidate's, XLA's, and the candidate's limit."""

    candidate: float
    xla: float
    limit: float


@dataclass
class _Set:
    """The checked elements of one set of inputs: r, errors, and the effect of an ulp of rounding on r."""

    kind: str
    reference: np.ndarray
    candidate_error: np.ndarray
    xla_error: np.ndarray
    moved: np.ndarray | None = None
    """How far rounding by an ulp moves r, where that is known."""
    whole: FlatReference | None = None
    """Set where every element is held to the rules."""


def check_floats(
    index: int,
    spec: Output,
    dtype: np.dtype,
    expected: Sequence[OutputReference],
    got: Sequence[np.ndarray],
    tolerance: float,
) -> Accuracy:
    """Applies the rules for floats to one output, real and imaginary parts as two numbers.

    Args: index, spec, expected, got, tolerance: as of `check.check_output`; dtype: of the numbers.
    Returns: the errors on the normal input sets.
    Raises: AccuracyRejected: with the rule, the numbers, and the first offending position.
    """
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
            limit = ELEMENT_FACTOR * tolerance * x + floor * top
            if not c <= limit:
                raise _too_far(index, "magnitude", c, x, limit, eps, magnitude=top)
        for number, (want, have) in pairs:
            if want.kind == NORMAL:
                continue
            part = _prepare(index, number, spec, want, have, dtype, floor)
            own = _pool([part], tiny)
            errors = _errors_of_clipped(part) if part.kind == HUGE else part.candidate_error
            c, x = own.relative(errors), max(own.xla, e_x)
            limit = ELEMENT_FACTOR * tolerance * x + floor
            if not c <= limit:
                raise _too_far(index, part.kind, c, x, limit, eps, seed=number)
    return accuracy


def _errors_of_clipped(part: _Set) -> np.ndarray:
    """Errors on huge inputs, without those of elements between the ends of a saturated output (rule 5)."""
    r, errors = part.reference, part.candidate_error
    if r.size == 0:
        return errors
    low, high = r.min(), r.max()
    if not min(np.count_nonzero(r == low), np.count_nonzero(r == high)) >= max(2, SATURATED * r.size):
        return errors
    return np.where((r > low) & (r < high) & (errors <= high - low), 0.0, errors)


@functools.lru_cache(maxsize=3)
def _common_bands(known: tuple[FlatReference, ...], tiny: float) -> ErrorBands:
    """The pool of sets that are compared as a whole: one for all candidates (of a problem: normal, special, huge)."""
    errors = _joined([_less(k.held_errors, tiny) for k in known])
    return ErrorBands(_joined([k.held_r for k in known]), errors, tiny)


def _pool(sets: Sequence[_Set], tiny: float) -> ErrorBands:
    whole = tuple(s.whole for s in sets if s.whole is not None)
    if len(whole) == len(sets) > 0:
        return _common_bands(whole, tiny)
    errors = [s.xla_error if s.whole is None else _less(s.xla_error, tiny) for s in sets]
    return ErrorBands(_joined([s.reference for s in sets]), _joined(errors), tiny)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0)


def _prepare(
    index: int, seed: int, spec: Output, want: OutputReference, have: np.ndarray, dtype: np.dtype, floor: float
) -> _Set:
    """Rules 1 and 2 on one set of inputs; the errors of what is left for rules 3-5."""
    info = ml_dtypes.finfo(dtype)
    tiny, most = float(info.smallest_normal), float(info.max)
    known = want.known
    x, r = known.x, known.r
    if want.low is None and spec.reduction > 1 and _is_alike(have, known):
        # The usual case: no class differs, and zeros have no sign to keep.
        return _Set(want.kind, known.held_r, _errors(have, known, tiny), known.held_errors, whole=known)
    c = flat(have)
    free = np.zeros(r.shape, bool)
    moved, reached = np.zeros(r.shape, bool), None
    if want.low is not None and want.high is not None:
        low, high = flat(want.low), flat(want.high)
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
        # The other side of a tie, to the bit: a jump of `reduce_precision` may be smaller than what bounds ranges.
        free |= (low < high) & np.isfinite(c) & ((c == low) | (c == high))
    class_c = classes(c)
    class_x, class_r = (np.zeros(r.shape, np.int8) if k is None else k for k in (known.class_x, known.class_r))
    free |= (class_x != 0) & (class_r == 0)
    edge = np.isfinite(r) & (np.abs(r) * (1.0 + floor) >= most)  # r rounds to the largest number or to infinity
    beyond = (class_c >= 2) & (np.signbit(c) == np.signbit(r))
    below = (class_c == 0) & (np.abs(c - r) <= 2.0 * floor * np.abs(r))
    bad = (class_c != class_x) & (class_c != class_r) & ~free & ~(edge & (beyond | below))
    instead = np.zeros(r.shape, bool)
    if want.rounded is not None:
        rounded = flat(want.rounded)
        class_s = classes(rounded.astype(have.dtype).astype(np.float64))
        bad &= class_c != class_s
        instead = (class_c == 0) & (class_s == 0) & (class_x != 0) & (class_r != 0)
        r = np.where(instead, rounded, r)
    if bad.any():
        raise _at(index, seed, "class", bad, want, have, "differs from XLA's in being NaN, infinite or finite")
    if spec.reduction == 1:
        zero = (c == 0) & (x == 0) & (r == 0) & (np.signbit(x) == np.signbit(r)) & ~free & ~moved
        bad = zero & (np.signbit(c) != np.signbit(x))
        if bad.any():
            raise _at(index, seed, "zero", bad, want, have, "is a zero of the other sign")
    kept = ~free & (class_c == 0) & ((class_x == 0) | instead) & np.isfinite(r)
    errors = (_beyond((c - r)[kept], tiny), _beyond(known.errors[kept], tiny))
    return _Set(want.kind, r[kept], *errors, None if reached is None else reached[kept])


def _is_alike(have: np.ndarray, known: FlatReference) -> bool:
    """Whether a result is finite, NaN, +inf and -inf just where XLA's is."""
    values = have.reshape(-1)

    def alike(slab: slice) -> bool:
        c = values[slab].astype(np.float64)
        if known.class_x is None:
            return bool(np.isfinite(c).all())
        return bool(np.array_equal(classes(c), known.class_x[slab]))

    return all(blocked_numpy.parallel_blocks(values.size, alike))


def _errors(have: np.ndarray, known: FlatReference, tiny: float) -> np.ndarray:
    """err(c) wherever the rules look."""
    values, errors = have.reshape(-1), np.empty(known.r.shape)

    def fill(slab: slice) -> None:
        errors[slab] = _beyond(values[slab].astype(np.float64) - known.r[slab], tiny)

    blocked_numpy.parallel_blocks(values.size, fill)
    return known.checked_values(errors)


def _less(errors: np.ndarray, tiny: float) -> np.ndarray:
    """`_beyond` of many."""
    found = np.empty(errors.shape)

    def fill(slab: slice) -> None:
        found[slab] = _beyond(errors[slab], tiny)

    blocked_numpy.parallel_blocks(errors.size, fill)
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
    index: int, seed: int, rule: str, bad: np.ndarray, want: OutputReference, have: np.ndarray, what: str
) -> AccuracyRejected:
    where = first(bad.reshape(have.shape))
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

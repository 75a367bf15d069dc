"""Expected output on one set of inputs: XLA's result, the float64 reference, and the uncertainty of the reference."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from jcuts.tune.verify import blocked_numpy


@dataclass(frozen=True)
class OutputReference:
    """Reference of one output on one set of inputs.

    Attributes:
        kind: ``normal``, ``special`` or ``huge`` (see `tune.verify.inputs`).
        xla: XLA's result in the output's dtype.
        reference: the float64 result (integers and booleans as they are).
        low, high: the least and the largest value of the reference under simulated rounding; both None where the
            subset has nothing discrete.  -inf and inf mean that even its class (NaN, inf, finite) varied.
        uncertainty: how far rounding of float64 operations moves the reference; None where there are none.
        rounded: the reference with operands of products rounded to TF32, where that changes the class of an element.
    """

    kind: str
    xla: np.ndarray
    reference: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    uncertainty: np.ndarray | None = None
    rounded: np.ndarray | None = None

    @functools.cached_property
    def known(self) -> FlatReference:
        """What every candidate is compared with, made once for all of them (float outputs)."""
        x, r = np.asarray(self.xla).reshape(-1), flat(self.reference)
        unsure = None if self.uncertainty is None else flat(self.uncertainty)
        errors = np.empty(r.shape)

        def fill(slab: slice) -> bool:
            """XLA's errors; whether all is finite."""
            wide = x[slab].astype(np.float64)
            size = np.abs(wide - r[slab])
            errors[slab] = size if unsure is None else np.maximum(size, unsure[slab])
            return bool(np.isfinite(wide).all() and np.isfinite(r[slab].astype(x.dtype)).all())

        with np.errstate(all="ignore"):
            if all(blocked_numpy.parallel_blocks(r.size, fill)):
                return FlatReference(x, r, errors, None, None, None)
        class_x, class_r = np.empty(r.shape, np.int8), np.empty(r.shape, np.int8)
        kept = np.empty(r.shape, bool)

        def sort(slab: slice) -> None:
            class_x[slab] = classes(x[slab].astype(np.float64))
            class_r[slab] = classes(r[slab].astype(x.dtype).astype(np.float64))
            kept[slab] = (class_x[slab] == 0) & np.isfinite(r[slab])
            if unsure is None:
                errors[slab][class_x[slab] != 0] = 0.0
            else:
                np.copyto(errors[slab], unsure[slab], where=class_x[slab] != 0)

        with np.errstate(all="ignore"):
            blocked_numpy.parallel_blocks(r.size, sort)
        return FlatReference(x, r, errors, class_x, class_r, kept)


@dataclass(frozen=True, eq=False)
class FlatReference:
    """One set of inputs, flattened: XLA's result, the reference, XLA's error, classes (None: all finite in both)."""

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

    def checked_values(self, values: np.ndarray) -> np.ndarray:
        """The values where rules 3 to 5 apply."""
        return values if self.kept is None else values[self.kept]

    @functools.cached_property
    def held_r(self) -> np.ndarray:
        """The reference there."""
        return self.checked_values(self.r)

    @functools.cached_property
    def held_errors(self) -> np.ndarray:
        """XLA's errors there."""
        return self.checked_values(self.errors)


def flat(array: np.ndarray) -> np.ndarray:
    """Flattened, in float64; no copy of what is: nobody writes into it."""
    return np.asarray(array).astype(np.float64, copy=False).reshape(-1)


def classes(values: np.ndarray) -> np.ndarray:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    if np.isfinite(values).all():
        return np.zeros(values.shape, np.int8)
    return np.select([np.isnan(values), np.isposinf(values), np.isneginf(values)], [1, 2, 3], 0).astype(np.int8)


def first(mask: np.ndarray) -> tuple[int, ...]:
    """Position of the first element that is set."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))

"""Error statistics by magnitude (exponent bands) of an output's elements, for the acceptance rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from jcuts.tune.verify import blocked_numpy

BAND_BINADES = 8
BAND_LEAST = 16


class ErrorBands:
    """Reference values in exponent bands with XLA's errors; candidates' errors are compared with it, one after the
    other.

    Args:
        reference: finite numbers r, float64.
        xla_error: XLA's error in each of them.
        tiny: least scale of an output.
    """

    def __init__(self, reference: np.ndarray, xla_error: np.ndarray, tiny: float) -> None:
        self._size, self._scale = np.empty(reference.shape), np.empty(reference.shape)
        blocked_numpy.parallel_blocks(reference.size, lambda s: np.abs(reference[s], out=self._size[s]))
        least = max(rms(self._size), tiny)
        blocked_numpy.parallel_blocks(reference.size, lambda s: np.maximum(self._size[s], least, out=self._scale[s]))
        self._xla_error = xla_error
        self.xla = self.relative(xla_error)

    def relative(self, error: np.ndarray) -> float:
        """max_i error_i / max(|r_i|, s), with s the root mean square of r."""
        return blocked_numpy.parallel_max(error.size, lambda s: float(np.max(error[s] / self._scale[s], initial=0.0)))

    def by_magnitude(self, error: np.ndarray) -> list[tuple[float, float, float]]:
        """For each group of bands: the largest |r|, the largest of these errors, the largest of XLA's errors."""
        band, groups, tops, most_x = self._bands
        most = _maxima(error, band, len(tops))
        return [(float(tops[g].max()), float(most[g].max()), float(most_x[g].max())) for g in groups]

    @functools.cached_property
    def _bands(self) -> tuple[np.ndarray, list[list[int]], np.ndarray, np.ndarray]:
        band, count = _band_numbers(self._size)
        tops = _maxima(self._size, band, count)
        tops[0] = 0.0  # where r = 0 there is no magnitude
        groups: list[list[int]] = []
        pending: list[int] = []
        names = np.flatnonzero(tops)
        for position, name in enumerate(names):
            pending.append(int(name))
            # Too few to know XLA's error: they join the next band.
            if position + 1 == len(names) or _are_many(self._size, band, pending):
                groups.append(pending)
                pending = []
        return band, groups, tops, _maxima(self._xla_error, band, count)


def rms(values: np.ndarray) -> float:
    """Root mean square, of numbers whose squares may overflow."""
    flat = values.reshape(-1)
    most = blocked_numpy.parallel_max(flat.size, lambda s: float(np.max(np.abs(flat[s]), initial=0.0)))
    if not most > 0:
        return 0.0

    def squares(slab: slice) -> float:
        scaled = flat[slab] / most
        return float(np.sum(np.multiply(scaled, scaled, out=scaled)))  # a dot product would start threads of its own

    return most * math.sqrt(math.fsum(blocked_numpy.parallel_blocks(flat.size, squares)) / max(1, flat.size))


def _maxima(values: np.ndarray, band: np.ndarray, count: int) -> np.ndarray:
    def most(slab: slice) -> np.ndarray:
        found = np.zeros(count)
        np.maximum.at(found, band[slab], values[slab])
        return found

    return (
        np.maximum.reduce(blocked_numpy.parallel_blocks(values.size, most), initial=0.0)
        if values.size
        else np.zeros(count)
    )


def _band_numbers(size: np.ndarray) -> tuple[np.ndarray, int]:
    """Band of each number, larger for larger numbers (0 for the number 0), and one more than the largest band."""
    band = np.empty(size.shape, np.int16)

    def fill(slab: slice) -> None:
        # The exponent of `frexp`, of a number in [0.5, 1) * 2**exponent, divided by 8.
        bits = np.ascontiguousarray(size[slab], np.float64).view(np.int64) >> 52
        bits -= 1022
        bits >>= BAND_BINADES.bit_length() - 1
        bits += 1 + 1022 // BAND_BINADES + 1
        bits[size[slab] == 0] = 0
        band[slab] = bits

    blocked_numpy.parallel_blocks(size.size, fill)
    return band, 2 + 2 * (1024 // BAND_BINADES + 1)


def _are_many(size: np.ndarray, band: np.ndarray, names: Sequence[int]) -> bool:
    """Whether these bands hold at least `BAND_LEAST` different numbers."""

    def different(slab: slice) -> list[float]:
        return np.unique(size[slab][np.isin(band[slab], names)])[:BAND_LEAST].tolist()

    step = 1 << 14  # a look at the first elements is enough for most
    found: set[float] = set()
    for start in range(0, min(size.size, 4 * step), step):
        found.update(different(slice(start, start + step)))
        if len(found) >= BAND_LEAST:
            return True
    return len(found.union(*blocked_numpy.parallel_blocks(size.size, different))) >= BAND_LEAST

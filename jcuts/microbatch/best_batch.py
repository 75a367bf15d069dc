"""Load balancing over heterogeneous devices (makespan minimisation): how many samples of a batch each device gets.

    minimise  max over devices g of sum over sizes b of t_{g,b} x_{g,b}
    subject to  sum over g, b of b x_{g,b} = B,   sum over b of x_{g,b} <= 1,   x in {0, 1}          (paper III-E)

Exact for any table, also for times that are not convex or that jump: the least limit on the time under which sizes add
up to B is found by bisection over the measured times, and whether they add up by sums of sets.  A device that can only
delay the others gets nothing.  Of splits with the same maximum the one with fewest devices is taken, then the one with
the least time in total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.microbatch.errors import NoSplitError
from jcuts.microbatch.timings import TICK, check_batch

NEVER = 2**62


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds that one device takes for a batch of each size (forward and backward pass, say).

    Attributes:
        seconds: size -> time.
        interpolated: sizes whose time was not measured but lies between two that were.
    """

    name: str
    seconds: Mapping[int, float]
    interpolated: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for size, seconds in self.seconds.items():
            check_batch(size)
            if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and 0 < seconds < 1e6):
                raise UsageError(f"{self.name}: {size} samples in {seconds!r} s cannot be", size=size, seconds=seconds)

    def filled(self, sizes: Sequence[int]) -> DeviceTimes:
        """The same with linearly interpolated times of ``sizes`` between measured ones.

        Nothing is made up outside the measured range.
        """
        known = sorted(self.seconds)
        if not known:
            return self
        added = {
            size: float(np.interp(size, known, [self.seconds[s] for s in known]))
            for size in sizes
            if size not in self.seconds and known[0] <= size <= known[-1]
        }
        return DeviceTimes(self.name, {**self.seconds, **added}, self.interpolated | frozenset(added))


@dataclass(frozen=True)
class Split:
    """A batch over devices.

    Attributes:
        sizes: samples of each device, 0 for those left out.
        seconds: time of the slowest.
        each: time of every device (0 where left out).
        even: time of the even split over all devices, None where its sizes have no times.
        alone: the least time of one device with the whole batch, None where none has one.
        interpolated: devices whose time for their size was not measured.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    each: tuple[float, ...]
    even: float | None
    alone: float | None
    interpolated: tuple[str, ...]

    @property
    def used(self) -> int:
        """Number of devices that get samples."""
        return sum(size > 0 for size in self.sizes)


def best_batch_size(
    batch: int, devices: Sequence[DeviceTimes | Mapping[int, float]], *, multiple: int = 1, interpolate: bool = False
) -> Split:
    """Splits a batch over devices.

    Args:
        batch: samples in all, B.
        devices: times of every device, one entry per device (equal devices are listed as often as there are).
        multiple: sizes are multiples of it (the paper: of a power of two); must divide the batch.
        interpolate: use sizes between measured ones; the result says where.
    Raises: NoSplitError if no sizes with known times add up to the batch; UsageError for bad arguments.

    >>> fast, slow = {8: 0.010, 16: 0.020, 24: 0.030}, {8: 0.030, 16: 0.060}
    >>> best_batch_size(32, [fast, slow]).sizes
    (24, 8)
    """
    check_batch(batch)
    check_batch(multiple)
    if batch % multiple:
        raise UsageError(f"sizes that are multiples of {multiple} do not add up to {batch}", multiple=multiple)
    if not devices:
        raise UsageError("there is no device to give the batch to")
    times = [
        device if isinstance(device, DeviceTimes) else DeviceTimes(f"device {k}", dict(device))
        for k, device in enumerate(devices)
    ]
    if interpolate:
        times = [device.filled(range(multiple, batch + 1, multiple)) for device in times]
    options = [
        {
            size // multiple: max(1, round(seconds / TICK))
            for size, seconds in sorted(device.seconds.items())
            if size <= batch and size % multiple == 0
        }
        for device in times
    ]
    units = batch // multiple
    found = _least_maximum(units, options)
    if found is None:
        known = "; ".join(f"{device.name}: {sorted(device.seconds)}" for device in times)
        raise NoSplitError(
            f"no sizes (multiples of {multiple}) with known times add up to {batch}: {known}", batch=batch
        )
    shares = _fewest(units, [{s: t for s, t in device.items() if t <= found} for device in options])
    each = tuple(device[share] * TICK if share else 0.0 for device, share in zip(options, shares, strict=True))
    names = tuple(device.name for device in times)
    sizes = tuple(share * multiple for share in shares)
    guessed = tuple(d.name for d, size in zip(times, sizes, strict=True) if size in d.interpolated)
    alone = [device.seconds[batch] for device in times if batch in device.seconds]
    return Split(names, sizes, max(each), each, _even(batch, times, multiple), min(alone, default=None), guessed)


def _least_maximum(units: int, options: Sequence[Mapping[int, int]]) -> int | None:
    """The least limit on every device's time under which shares add up to ``units``."""
    limits = sorted({ticks for device in options for ticks in device.values()})

    def reaches(limit: int) -> bool:
        sums = 1  # bit n: n units can be dealt
        for device in options:
            more = sums
            for share, ticks in device.items():
                if ticks <= limit:
                    more |= sums << share
            sums = more & ((2 << units) - 1)
        return bool(sums >> units & 1)

    low, high = 0, len(limits)
    while low < high:  # a larger limit never loses a sum
        middle = (low + high) // 2
        if reaches(limits[middle]):
            high = middle
        else:
            low = middle + 1
    return limits[low] if low < len(limits) else None


def _fewest(units: int, options: Sequence[Mapping[int, int]]) -> list[int]:
    """Shares that add up to ``units`` (they exist): fewest devices, then least time in total."""
    one = sum(max(device.values(), default=0) for device in options) + 1  # more than all times together
    cost = np.full(units + 1, NEVER, object if one * (len(options) + 1) >= NEVER else np.int64)
    cost[0] = 0
    picks = []
    for device in options:
        best, pick = cost.copy(), np.zeros(units + 1, np.int64)
        for share, ticks in device.items():
            sums = np.minimum(cost[: units + 1 - share], NEVER - one - ticks) + (one + ticks)
            better = np.flatnonzero(sums < best[share:]) + share
            best[better] = sums[better - share]
            pick[better] = share
        cost = best
        picks.append(pick)
    shares, left = [], units
    for pick in reversed(picks):
        shares.append(int(pick[left]))
        left -= shares[-1]
    return shares[::-1]


def _even(batch: int, times: Sequence[DeviceTimes], multiple: int) -> float | None:
    """Time of equal sizes; where the batch does not divide, the first devices get a multiple more."""
    units, more = divmod(batch // multiple, len(times))
    sizes = [(units + (k < more)) * multiple for k in range(len(times))]
    if any(size and size not in device.seconds for size, device in zip(sizes, times, strict=True)):
        return None
    return max(device.seconds[size] for size, device in zip(sizes, times, strict=True) if size)

"""Adaptive sampling of micro-batch sizes and output-channel slices: which ones, beside a policy's, are worth measuring.

The largest power of two that fits a limit may leave nearly half of it unused.  An algorithm that at the next measured
size would beat the best division but exceeds the limit may fit at a size in between, or on slices of the output
channels.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.timings import MicroConfig, Table, unsliced

MOST = 3
"""Sizes, or algorithms to slice, that are proposed at once."""


def sizes_between(table: Table, batch: int, limit: int | None, *, precision: str | None = None) -> tuple[int, ...]:
    """Further sizes worth measuring between those of a table, the most promising first; none without a limit.

    For an algorithm that fits at size s and does not at t, the next measured one, workspaces in between are taken to be
    on a line:

        size = s + floor((t - s) (limit - M(s)) / (M(t) - M(s)))

    It is promising if T(t) / t is less than the best division's time per sample.
    Args: as of `microbatch.batch_division_dp.divide`.
    """
    if limit is None:
        return ()
    try:
        best = batch_division_dp.divide(table, batch, limit, precision=precision).seconds / batch
    except NoDivisionError:
        best = float("inf")
    found: dict[int, float] = {}
    for micros in _series(table, batch, precision).values():
        for small, large in itertools.pairwise(micros):
            if not small.workspace <= limit < large.workspace or large.seconds / large.batch >= best:
                continue
            room = (limit - small.workspace) / (large.workspace - small.workspace)
            size = small.batch + int((large.batch - small.batch) * room)
            size -= size % table.unit
            if size > small.batch and size not in table.sizes:
                found[size] = min(found.get(size, float("inf")), large.seconds / large.batch)
    return tuple(sorted(found, key=lambda size: (found[size], size))[:MOST])


@dataclass(frozen=True)
class Slicing:
    """An algorithm that exceeds a limit at a size, but may fit in slices of the output channels.

    Attributes:
        micro: as it was measured, in one call.
        slices: how many may do, the fewest first.
        limit: bytes.
    """

    micro: MicroConfig
    slices: tuple[int, ...]
    limit: int

    @property
    def text(self) -> str:
        """Name that distinguishes it from others of its size."""
        return f"{self.micro.algorithm} {self.micro.math} {self.limit}"


def worth_slicing(
    table: Table, batch: int, limit: int | None, *, algorithms: Collection[str], precision: str | None = None
) -> tuple[Slicing, ...]:
    """Measured algorithms that would fit a limit in slices, the most promising first; none without a limit.

    Transforms keep their filters' share F of the workspace in every micro-batch, and pay for it in time, however small
    that is.  Of s slices each has 1/s of it; images are transformed again for every slice; a slice of the result is
    packed (R bytes of a sample's result).  With C channels, K outputs and a workspace M(n) = F + n S of n samples:

        M(n, s) = F / s + n S (C + K / s) / (C + K) + n R / s        T(n, s) = T(n) (1 + (s - 1) C / (C + K))

    It is promising if T(n, s) / n is less than the best division's time per sample.  Where other slices of an algorithm
    took longer than that, so will these.
    Args: algorithms: names that may be sliced; others as of `microbatch.batch_division_dp.divide`.
    """
    c = table.convolution
    if limit is None or not c.slices:
        return ()
    try:
        best = batch_division_dp.divide(table, batch, limit, precision=precision).seconds / batch
    except NoDivisionError:
        best = float("inf")
    images, packed = c.channels / (c.channels + c.outputs), c.result_bytes
    late = _lateness(table, images)
    found: dict[Slicing, float] = {}
    for micros in _series(table, batch, precision).values():
        if micros[0].algorithm not in algorithms or len(micros) < 2:
            continue
        for micro in micros:
            if micro.workspace <= limit or (micro.batch % table.unit and micro.batch != batch):
                continue
            own, result = micro.batch * _per_sample(micro, micros), (micro.batch > 1) * micro.batch * packed
            for position, s in enumerate(c.slices):
                if (micro.workspace - own + result) / s + own * (images + (1 - images) / s) <= limit:
                    seconds = micro.seconds * (1 + (s - 1) * images) / micro.batch
                    seconds *= late.get((micro.algorithm, micro.math), 1.0)
                    if seconds < best:
                        found[Slicing(micro, c.slices[position:], limit)] = seconds
                    break
    return tuple(sorted(found, key=lambda one: (found[one], one.text))[:MOST])


def _lateness(table: Table, images: float) -> dict[tuple[str, str], float]:
    """By how much slices of algorithms took longer than the model says, at least 1; the best of each."""
    whole = {(m.algorithm, m.math, m.batch): m.seconds for m in table.micros}
    found: dict[tuple[str, str], float] = {}
    for micro in table.micros:
        algorithm, slices = unsliced(micro.algorithm)
        one = whole.get((algorithm, micro.math, micro.batch))
        if slices > 1 and one is not None:
            ratio = max(1.0, micro.seconds / (one * (1 + (slices - 1) * images)))
            found[algorithm, micro.math] = min(ratio, found.get((algorithm, micro.math), ratio))
    return found


def _per_sample(micro: MicroConfig, micros: Sequence[MicroConfig]) -> float:
    """Bytes of a workspace that one more sample takes, from the largest size on; from half of it on at the largest."""
    last = micros[-1]
    other = min(micros[:-1], key=lambda m: abs(2 * m.batch - last.batch)) if micro is last else micro
    return min(micro.workspace / micro.batch, max(0.0, (last.workspace - other.workspace) / (last.batch - other.batch)))


def _series(table: Table, batch: int, precision: str | None) -> dict[tuple[str, str], list[MicroConfig]]:
    """Of every algorithm and math all that is known for sizes up to a batch, ascending."""
    found: dict[tuple[str, str], list[MicroConfig]] = defaultdict(list)
    for micro in sorted(table.candidates(batch, precision=precision), key=lambda micro: micro.batch):
        if unsliced(micro.algorithm)[1] == 1:
            found[micro.algorithm, micro.math].append(micro)
    return found

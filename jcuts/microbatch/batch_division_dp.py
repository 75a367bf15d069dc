"""Workspace reuse (WR): the fastest division of a batch under a workspace limit per kernel, by dynamic programming.

    T(0) = 0,   T(b) = min over sizes s <= b of T_mu(s) + T(b - s)

``T_mu(s)`` is the fastest micro-configuration of s samples within the limit (paper III-B).  Where micro-batches must
start at multiples of a table's unit, b - s is such a multiple: only the last micro-batch is free in size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.timings import TICK, Division, MicroConfig, Table

NEVER = 2**61
"""Key of what cannot be had (or would take minutes); sums of two stay below 2^63."""


def divide(
    table: Table, batch: int, limit: int | None = None, *, policy: str = "all", precision: str | None = None
) -> Division:
    """The fastest division of a batch; of equally fast ones one with fewest parts.

    Args: limit: bytes of workspace, or None; policy: sizes that may be used; precision: least exactness.
    Raises: NoDivisionError if no sizes within the limit add up to the batch; UsageError for bad arguments.
    """
    best = fastest(table.candidates(batch, limit=limit, policy=policy, precision=precision))
    keys, choice = _solve(best, batch, table.unit)
    if keys[batch] >= NEVER:
        raise no_division(table, batch, limit, policy, precision)
    parts, left = [], batch
    while left:
        part = best[choice[left]]
        parts.append(part)
        left -= part.batch
    return Division.of(parts, table.unit)


def times(
    table: Table, batch: int, limit: int | None = None, *, policy: str = "all", precision: str | None = None
) -> NDArray[np.float64]:
    """Seconds of the fastest division of b samples for every b = 0 ... batch (infinite where there is none)."""
    best = fastest(table.candidates(batch, limit=limit, policy=policy, precision=precision))
    keys, _ = _solve(best, batch, table.unit)
    return np.where(keys < NEVER, (keys // (batch + 1)) * TICK, np.inf)


def undivided(table: Table, batch: int, limit: int | None = None, *, precision: str | None = None) -> Division | None:
    """The fastest single call for the whole batch under the limit (a library's own choice), or None."""
    best = fastest(table.candidates(batch, limit=limit, policy="undivided", precision=precision))
    return Division((best[0],)) if best else None


def fastest(micros: list[MicroConfig]) -> list[MicroConfig]:
    """The fastest micro-configuration of each size, sizes ascending; ties by smallest workspace, then by name."""
    found: dict[int, MicroConfig] = {}
    for micro in micros:
        known = found.get(micro.batch)
        if known is None or _rank(micro) < _rank(known):
            found[micro.batch] = micro
    return [found[size] for size in sorted(found)]


def no_division(table: Table, batch: int, limit: int | None, policy: str, precision: str | None) -> NoDivisionError:
    """The error for a batch without a division; it names a limit that would do, if any."""
    spaces = sorted({m.workspace for m in table.candidates(batch, policy=policy, precision=precision)})
    low, high = 0, len(spaces)
    while low < high:  # a larger limit never loses a division
        middle = (low + high) // 2
        best = fastest(table.candidates(batch, limit=spaces[middle], policy=policy, precision=precision))
        if _solve(best, batch, table.unit)[0][batch] < NEVER:
            high = middle
        else:
            low = middle + 1
    least = spaces[low] if low < len(spaces) else None
    need = f"the least that does is {least} B" if least is not None else f"measured sizes are {table.sizes}"
    return NoDivisionError(
        f"{table.convolution}: no division of {batch} samples within {limit} B (policy {policy}): {need}",
        limit=limit,
        least=least,
        batch=batch,
    )


def scaled(micro: MicroConfig, batch: int) -> int:
    """A part's contribution to a key: keys order by time, then by number of parts.

    Raises: UsageError if the times are too long to be added in 64 bits.
    """
    key = micro.ticks * (batch + 1) + 1
    if key >= NEVER:
        raise UsageError(
            f"{micro.seconds} s is too long to be added exactly over a batch of {batch}", seconds=micro.seconds
        )
    return key


def _rank(micro: MicroConfig) -> tuple[int, int, str, str]:
    return (micro.ticks, micro.workspace, micro.algorithm, micro.math)


def _solve(best: list[MicroConfig], batch: int, unit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(key of the best division of b samples, index in ``best`` of its first part) for b = 0 ... batch."""
    keys = np.full(batch + 1, NEVER, np.int64)
    choice = np.zeros(batch + 1, np.int64)
    keys[0] = 0
    begins = keys.copy()  # what another micro-batch may follow
    sizes = np.array([micro.batch for micro in best], np.int64)
    costs = np.array([scaled(micro, batch) for micro in best], np.int64)
    for b in range(int(sizes[0]) if len(best) else batch + 1, batch + 1):
        count = int(np.searchsorted(sizes, b, side="right"))
        sums = begins[b - sizes[:count]] + costs[:count]
        first = int(sums.argmin())
        if sums[first] < NEVER:
            keys[b], choice[b] = sums[first], first
            begins[b] = keys[b] if b % unit == 0 else NEVER
    return keys, choice

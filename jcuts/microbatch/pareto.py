"""Pareto front of a batch's divisions in time and workspace (the paper's *desirable sets*).

The paper (III-C) prunes sets of configurations, smallest batch first:

    C(b) = D(union over sizes s <= b, c_mu in C_mu(s), c in C(b - s) of {c_mu} + c)
    D(C) = {c in C: for all c' in C: T(c) < T(c') or M(c) < M(c')}      (one is kept of equals)

A workspace is a maximum over parts, so C(b) is the staircase of F_b(m), the least time of b samples with workspaces up
to m, and the recursion can be evaluated at all m together:

    F_b(m) = min over s <= b of T_mu(s, m) + F_{b-s}(m),    T_mu(s, m) = min of T over C_mu(s) with M <= m

One array operation per b; the steps of F_B are the front.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jcuts.microbatch.batch_division_dp import NEVER, fastest, no_division, scaled
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.timings import Division, MicroConfig, Table

BLOCK = 512
"""Workspaces that are looked at together: bounds the memory of large batches."""


def desirable(
    table: Table, batch: int, limit: int | None = None, *, policy: str = "all", precision: str | None = None
) -> tuple[Division, ...]:
    """The desirable set of a batch: ascending workspace, strictly descending time.

    No division within the limit is both faster and smaller than all of these, so no optimum over networks is lost.
    The last is the fastest division (that of `wr.divide`), the first the fastest of those with least workspace.
    Args: as of `microbatch.batch_division_dp.divide`.
    Raises: NoDivisionError if the set is empty; UsageError for bad arguments.
    """
    micros = _front_per_size(table.candidates(batch, limit=limit, policy=policy, precision=precision))
    spaces = sorted({micro.workspace for micro in micros})
    found: list[Division] = []
    best = NEVER
    for begin in range(0, len(spaces), BLOCK):
        block = np.array(spaces[begin : begin + BLOCK], np.int64)
        keys, divisions = _staircase(micros, batch, block, table.unit)
        for column, key in enumerate(keys.tolist()):
            if key // (batch + 1) < best // (batch + 1):
                best = key
                found.append(divisions(column))
    if not found:
        raise no_division(table, batch, limit, policy, precision)
    return tuple(found)


def desirable_or_none(table: Table, batch: int, limit: int | None = None, **options: str) -> tuple[Division, ...]:
    """As `desirable`, but an empty tuple where no division fits."""
    try:
        return desirable(table, batch, limit, **options)
    except NoDivisionError:
        return ()


def _front_per_size(micros: list[MicroConfig]) -> list[MicroConfig]:
    """Micro-configurations that no other of their size beats in both; ascending size, then workspace."""
    found = []
    for size in sorted({micro.batch for micro in micros}):
        low = NEVER
        mine = [micro for micro in micros if micro.batch == size]
        for micro in sorted(mine, key=lambda m: (m.workspace, m.ticks, m.algorithm, m.math)):
            if micro.ticks < low:
                found.append(micro)
                low = micro.ticks
    return found


def _staircase(micros: list[MicroConfig], batch: int, spaces: NDArray[np.int64], unit: int):
    """(F_batch at every workspace, function: column -> its division)."""
    sizes = sorted({micro.batch for micro in micros})
    costs = np.full((len(sizes), len(spaces)), NEVER, np.int64)
    for micro in micros:  # descending times per size: later ones overwrite earlier ones where they fit
        row = sizes.index(micro.batch)
        costs[row, np.searchsorted(spaces, micro.workspace) :] = scaled(micro, batch)
    array = np.array(sizes, np.int64)
    keys = np.full((batch + 1, len(spaces)), NEVER, np.int64)
    choice = np.zeros((batch + 1, len(spaces)), np.int32)
    keys[0] = 0
    columns = np.arange(len(spaces))
    for b in range(sizes[0], batch + 1):
        if b % unit and b != batch:
            continue  # nothing may follow
        count = int(np.searchsorted(array, b, side="right"))
        sums = keys[b - array[:count]] + costs[:count]
        first = sums.argmin(axis=0)
        keys[b] = np.minimum(sums[first, columns], NEVER)
        choice[b] = first

    def division(column: int) -> Division:
        fitting = [micro for micro in micros if micro.workspace <= spaces[column]]
        best = {micro.batch: micro for micro in fastest(fitting)}
        parts, left = [], batch
        while left:
            part = best[sizes[choice[left, column]]]
            parts.append(part)
            left -= part.batch
        return Division.of(parts, unit)

    return keys[batch], division

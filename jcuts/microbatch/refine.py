"""Micro-batch sizes between those of a policy that a limit makes worth measuring.

Of powers of two, the largest that fits a limit may leave nearly half of it unused.  An algorithm that would beat the
best division at the next measured size, but for its workspace, may fit at a size in between.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from jcuts.microbatch import wr
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.table import Micro, Table

MOST = 3
"""Sizes that are proposed at once."""


def sizes_between(table: Table, batch: int, limit: int | None, *, precision: str | None = None) -> tuple[int, ...]:
    """Sizes worth measuring beside those of a table, the most promising first; none without a limit.

    For an algorithm that fits at size s and does not at t, the next measured one, workspaces in between are taken to be
    on a line:

        size = s + floor((t - s) (limit - M(s)) / (M(t) - M(s)))

    It is promising if T(t) / t is less than the best division's time per sample.
    Args: as of `wr.divide`.
    """
    if limit is None:
        return ()
    try:
        best = wr.divide(table, batch, limit, precision=precision).seconds / batch
    except NoDivisionError:
        best = float("inf")
    series: dict[tuple[str, str], list[Micro]] = defaultdict(list)
    for micro in table.candidates(batch, precision=precision):
        series[micro.algorithm, micro.math].append(micro)
    found: dict[int, float] = {}
    for micros in series.values():
        ordered = sorted(micros, key=lambda micro: micro.batch)
        for small, large in itertools.pairwise(ordered):
            if not small.workspace <= limit < large.workspace or large.seconds / large.batch >= best:
                continue
            room = (limit - small.workspace) / (large.workspace - small.workspace)
            size = small.batch + int((large.batch - small.batch) * room)
            size -= size % table.unit
            if size > small.batch and size not in table.sizes:
                found[size] = min(found.get(size, float("inf")), large.seconds / large.batch)
    return tuple(sorted(found, key=lambda size: (found[size], size))[:MOST])

"""Offline analysis: from a benchmark database to the batch divisions of a network's convolutions under WR or WD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.best_batch import DeviceTimes
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.errors import MissingTimesError
from jcuts.microbatch.network import Network, Use, peak
from jcuts.microbatch.pareto import desirable
from jcuts.microbatch.shared_workspace_ilp import NetworkDivision, divide_network
from jcuts.microbatch.timings import TICK, Division, Table, check_bytes


@dataclass(frozen=True)
class Row:
    """One convolution of an analysis.

    Attributes:
        division: its micro-batches.
        undivided: what one call would be under the same limit; None: nothing fits.
        share: the limit that ``undivided`` obeys [B], None for no limit.
        unlimited: the fastest single call.
        desirable: the Pareto front that the division was chosen from (under WR the one within the limit).
    """

    use: Use
    division: Division
    undivided: Division | None
    unlimited: Division | None
    share: int | None
    desirable: tuple[Division, ...]


@dataclass(frozen=True)
class Analysis:
    """Batch divisions of a network's convolutions on one device.

    Attributes:
        method: "WR" or "WD".
        limit: bytes per kernel (WR) or per network (WD), or None.
        constraint: of WD.
        proven: the choice is an optimum (WR: always).
    """

    network: Network
    device: Device
    method: str
    limit: int | None
    policy: str
    constraint: str | None
    rows: tuple[Row, ...]
    proven: bool = True

    @property
    def seconds(self) -> float:
        """Time of all kernels."""
        return sum(row.division.ticks for row in self.rows) * TICK

    @property
    def undivided(self) -> float | None:
        """Time of all convolutions as single calls under the same limits; None if one of them has no algorithm
        there.
        """
        found = [row.undivided.ticks for row in self.rows if row.undivided]
        return sum(found) * TICK if len(found) == len(self.rows) else None

    @property
    def total(self) -> int:
        """Sum of the workspaces [B]."""
        return sum(row.division.workspace for row in self.rows)

    @property
    def peak(self) -> int:
        """Peak of live workspace bytes over the program's steps."""
        return peak([row.division.workspace for row in self.rows], self.network.lives)

    @property
    def undivided_total(self) -> int:
        """Sum of the workspaces of single calls under the same limits [B]."""
        return sum(row.undivided.workspace for row in self.rows if row.undivided)

    @property
    def unlimited_total(self) -> int:
        """Sum of the workspaces of the fastest single calls without a limit [B]."""
        return sum(row.unlimited.workspace for row in self.rows if row.unlimited)


def analyse(
    network: Network,
    database: Database,
    device: Device,
    *,
    limit: int | None = None,
    total: int | None = None,
    policy: str = "all",
    constraint: str = "paper",
) -> Analysis:
    """Divides every kernel of a network.

    Args:
        limit: workspace per kernel: WR.  total: workspace per network: WD.  Neither: WR without a limit.
        policy: micro-batch sizes that may be used, of those in the database.
        constraint: of WD, "paper" or "liveness".
    Raises: UsageError for both limits, or a bad one; NoDivisionError; ForeignDeviceError; MissingTimesError.
    """
    if limit is not None and total is not None:
        raise UsageError("give a limit per kernel (WR) or a total per network (WD), not both", limit=limit, total=total)
    check_bytes("limit", limit)
    check_bytes("total", total)
    tables = tables_of(network, database, device)
    most = limit if total is None else total  # no workspace of a network's share is larger than the share of all
    sets = _once(network, lambda use, t: desirable(t, use.batch, most, policy=policy, precision=use.precision), tables)
    proven = True
    if total is None:
        chosen: Sequence[Division] = [found[-1] for found in sets]
        share = limit
    else:
        shares: NetworkDivision = divide_network(
            sets, total, constraint=constraint, lives=network.lives, held=network.held
        )
        chosen, proven = shares.divisions, shares.proven
        share = total // len(network.uses) if constraint == "paper" and network.uses else total
    plain = _once(
        network, lambda use, t: batch_division_dp.undivided(t, use.batch, share, precision=use.precision), tables
    )
    free = _once(network, lambda use, t: batch_division_dp.undivided(t, use.batch, precision=use.precision), tables)
    rows = tuple(
        Row(use, division, one, fast, share, found)
        for use, division, one, fast, found in zip(network.uses, chosen, plain, free, sets, strict=True)
    )
    method = "WR" if total is None else "WD"
    return Analysis(network, device, method, most, policy, None if total is None else constraint, rows, proven)


def tables_of(network: Network, database: Database, device: Device) -> list[Table]:
    """The measured table of every use; equal convolutions are read once.

    Raises: ForeignDeviceError, MissingTimesError, CacheError.
    """
    found: dict[str, Table] = {}
    for use in network.uses:
        key = use.convolution.key
        if key not in found:
            found[key] = database.table(device, use.convolution)
    return [found[use.convolution.key] for use in network.uses]


def network_times(
    network: Network,
    database: Database,
    device: Device,
    batch: int,
    *,
    limit: int | None = None,
    policy: str = "all",
) -> DeviceTimes:
    """A device's time for the network's convolutions at every batch size up to ``batch``, each optimally divided (WR).

    Sizes that some kernel cannot make up are left out.
    Raises: MissingTimesError if no size is left; ForeignDeviceError; CacheError.
    """
    tables = tables_of(network, database, device)
    resized = network.at_batch(batch)
    each = _once(
        resized, lambda use, t: batch_division_dp.times(t, batch, limit, policy=policy, precision=use.precision), tables
    )
    sums = np.sum(each, axis=0) if each else np.zeros(batch + 1)
    seconds = {b: float(sums[b]) for b in range(1, batch + 1) if 0 < sums[b] < np.inf}
    if not seconds:
        raise MissingTimesError(f"{network.name}: no batch size up to {batch} has times of all kernels on {device}")
    return DeviceTimes(device.name, seconds)


def _once(network: Network, solve: Callable, tables: Sequence[Table]) -> list:
    """``solve(use, table)`` for every use, but once for equal ones (networks repeat their layers)."""
    found: dict[tuple[str, int, str | None], object] = {}
    made = []
    for use, table in zip(network.uses, tables, strict=True):
        key = (use.convolution.key, use.batch, use.precision)
        if key not in found:
            found[key] = solve(use, table)
        made.append(found[key])
    return made

"""Offline analysis: from a benchmark database to the batch divisions of a network's convolutions under WR or WD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.best_batch import DeviceTimes
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.errors import MissingTimesError, NoDivisionError
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
        true_half, pseudo_half: of 16-bit storage the best division by arithmetic in 16 bits alone, and by sums in
            float32 alone (TRUE_HALF and PSEUDO_HALF of the paper), under the same limit and policy; None: nothing fits.
    """

    use: Use
    division: Division
    undivided: Division | None
    unlimited: Division | None
    share: int | None
    desirable: tuple[Division, ...]
    true_half: Division | None = None
    pseudo_half: Division | None = None


@dataclass(frozen=True)
class Analysis:
    """Batch divisions of a network's convolutions on one device.

    Attributes:
        method: "WR" or "WD".
        limit: bytes per kernel (WR) or per network (WD), or None.
        with_held: the limit holds what is live beside the workspaces, too.
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
    with_held: bool = False

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
    def memory(self) -> int:
        """Peak over the convolutions of workspaces and of what is live beside them [B]; 0 where that is not known."""
        held = self.network.held
        return peak([row.division.workspace for row in self.rows], self.network.lives, held) if held else 0

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
    memory: int | None = None,
    policy: str = "all",
    constraint: str = "paper",
) -> Analysis:
    """Divides every kernel of a network.

    Args:
        limit: workspace per kernel: WR.  total: workspace per network: WD.  memory: of the network's activations,
            weights and workspaces together: WD under liveness, in which a convolution may take what its step leaves.
            None of them: WR without a limit.
        policy: micro-batch sizes that may be used, of those in the database.
        constraint: of WD, "paper" or "liveness".
    Raises: UsageError for several limits, a bad one, or memory of a network that says nothing of what is live;
    NoDivisionError; ForeignDeviceError; MissingTimesError.
    """
    given = {"limit": limit, "total": total, "memory": memory}
    for name, value in given.items():
        check_bytes(name, value)
    if sum(value is not None for value in given.values()) > 1:
        raise UsageError("give a limit per kernel (WR), or a total or memory per network (WD), not several", **given)
    if memory is not None:
        if len(network.held) != len(network.uses):
            raise UsageError(f"network {network.name} does not say what is live beside its workspaces: use a total")
        total, constraint = memory, "liveness"
    tables = tables_of(network, database, device)
    most = limit if total is None else total  # no workspace of a network's share is larger than the share of all
    sets = _once(network, lambda use, t: desirable(t, use.batch, most, policy=policy, precision=use.precision), tables)
    proven = True
    if total is None:
        chosen: Sequence[Division] = [found[-1] for found in sets]
        share = limit
    else:
        shares: NetworkDivision = divide_network(
            sets, total, constraint=constraint, lives=network.lives, held=() if memory is None else network.held
        )
        chosen, proven = shares.divisions, shares.proven
        share = total // len(network.uses) if constraint == "paper" and network.uses else total
    plain = _once(
        network, lambda use, t: batch_division_dp.undivided(t, use.batch, share, precision=use.precision), tables
    )
    free = _once(network, lambda use, t: batch_division_dp.undivided(t, use.batch, precision=use.precision), tables)
    halves = _once(network, lambda use, t: half_divisions(t, use.batch, share, policy=policy), tables)
    rows = tuple(
        Row(use, division, one, fast, share, found, *half)
        for use, division, one, fast, found, half in zip(network.uses, chosen, plain, free, sets, halves, strict=True)
    )
    method = "WR" if total is None else "WD"
    how = None if total is None else constraint
    return Analysis(network, device, method, most, policy, how, rows, proven, with_held=memory is not None)


def half_divisions(
    table: Table, batch: int, limit: int | None, *, policy: str = "all"
) -> tuple[Division | None, Division | None]:
    """The best divisions of a float16 convolution by TRUE_HALF and by PSEUDO_HALF alone (004, III-D and table I).

    Returns: (arithmetic in float16, sums in float32), each None where nothing fits the limit, both of other types.
    """
    found: list[Division | None] = []
    for arithmetic in ("float16", "float32"):
        kept = tuple(m for m in table.micros if m.math.startswith(arithmetic))
        try:
            wanted = replace(table, micros=kept if table.convolution.dtype == "float16" else ())
            found.append(batch_division_dp.divide(wanted, batch, limit, policy=policy, precision="float16"))
        except (NoDivisionError, UsageError):
            found.append(None)
    return found[0], found[1]


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

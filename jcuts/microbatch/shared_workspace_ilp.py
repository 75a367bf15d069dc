"""Workspace division (WD): one limit for the workspaces of a whole network, solved exactly.

    minimise  sum over kernels k, configurations c of T_k(c) x_{k,c}
    subject to  exactly one c per kernel (x in {0, 1})  and
        "paper":     sum of all M_k(c) x_{k,c} <= M                             (III-C, Eq. 1-4)
        "liveness":  at every step, sum of the M_k(c) x_{k,c} live there <= M - what is held there anyway

A compiler that reuses buffers by liveness gives kernels that run one after the other the same bytes: the paper's
constraint then overstates memory, and the liveness-aware one is what the device's peak obeys.  Where no two workspaces
are ever live together it gives every kernel all of M, and WD is WR with the limit M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.microbatch import liveness_knapsack, multiple_choice_knapsack
from jcuts.microbatch.errors import NoDivisionError
from jcuts.microbatch.network import cliques, peak
from jcuts.microbatch.timings import TICK, Division, check_bytes

CONSTRAINTS = ("paper", "liveness")


@dataclass(frozen=True)
class NetworkDivision:
    """Result of WD: the divisions of a network's convolutions.

    Attributes:
        divisions: one per kernel, in program order.
        total: sum of their workspaces [B].
        peak: most that are live at one step [B], without what is held anyway.
        bound: no choice takes less [s].
        proven: these take the least (see `multiple_choice_knapsack.Chosen`).
        variables: configurations that were to choose from.
    """

    divisions: tuple[Division, ...]
    total: int
    peak: int
    bound: float
    proven: bool
    variables: int

    @property
    def ticks(self) -> int:
        """Time of all kernels [ps]."""
        return sum(division.ticks for division in self.divisions)

    @property
    def seconds(self) -> float:
        """Time of all kernels [s]."""
        return self.ticks * TICK


def divide_network(
    sets: Sequence[Sequence[Division]],
    total: int,
    *,
    constraint: str = "paper",
    lives: Sequence[tuple[int, int]] | None = None,
    held: tuple[int, ...] = (),
) -> NetworkDivision:
    """The fastest choice of one division per convolution under one limit for the network.

    Args:
        sets: per kernel, in program order, the configurations to choose from: its desirable set (`desirable`).
        total: limit M [B].
        constraint: "paper" or "liveness".
        lives: (first, last) step at which each workspace is live; None: kernel k alone at step k.
        held: bytes that are live anyway at each step ("liveness" only).
    Raises: NoDivisionError if even the smallest workspaces exceed the limit; UsageError for bad arguments.
    """
    check_bytes("total", total)
    if constraint not in CONSTRAINTS:
        raise UsageError(f"constraint {constraint!r} is unknown: choose one of {CONSTRAINTS}", constraint=constraint)
    lives = tuple((k, k) for k in range(len(sets))) if lives is None else tuple(lives)
    if len(lives) != len(sets) or any(not 0 <= begin <= end for begin, end in lives):
        raise UsageError(f"{len(sets)} kernels need as many lives (begin <= end), not {lives}", lives=lives)
    for k, choices in enumerate(sets):
        if not choices:
            raise UsageError(f"kernel {k} has no configurations", kernel=k)
    costs = [np.array([division.ticks for division in choices], np.int64) for choices in sets]
    weights = [np.array([division.workspace for division in choices], np.int64) for choices in sets]
    if constraint == "paper":
        found = multiple_choice_knapsack.choose(costs, weights, total)
    else:
        found = liveness_knapsack.solve_clique_knapsack(costs, weights, cliques(lives, held, total))
    if found is None:
        smallest = [int(w.min()) for w in weights]
        least = sum(smallest) if constraint == "paper" else peak(smallest, lives, held)
        raise NoDivisionError(
            f"{len(sets)} kernels need at least {least} B of workspace ({constraint}), {total} B are allowed",
            limit=total,
            least=least,
        )
    divisions = tuple(choices[j] for choices, j in zip(sets, found.items, strict=True))
    spaces = [division.workspace for division in divisions]
    return NetworkDivision(
        divisions, sum(spaces), peak(spaces, lives), found.bound * TICK, found.proven, sum(map(len, sets))
    )

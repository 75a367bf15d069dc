"""One ``wgmma`` schedule as data, and the DSMEM buffers of its cluster reduction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcuts.arch.sm_limits import SM_90
from jcuts.estimate import batch
from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu.gemm.problem import STEP
from jcuts.schedule.gpu.machine import WARP, scheduled

GROUP = 4 * WARP
"""Threads of a warpgroup."""
HIGH = 64
"""Rows of a wgmma instruction."""
LINE = 128
"""Bytes of a line along K."""
FOUR = 16
"""Bytes of what a lane has of a tile of results: four floats."""
BARRIER = 8
"""Bytes of an mbarrier in shared memory, which divide its address."""
KINDS = 3
"""Barriers of a stage of a producer/consumer ring: full, fenced, empty."""
SHARED = SM_90.smem_per_block_bytes
"""Most bytes of shared memory of a block."""


def can_swap_lanes(tile: int, columns: int) -> bool:
    """Whether lanes can exchange results of tiles of so many columns, of so many in all, for four columns a store."""
    return tile % 16 == 0 and columns % 4 == 0


def cluster_slices(high: int, wide: int, step: int, sharers: int) -> tuple[int, int]:
    """Into how many parts ``high`` rows and ``wide`` columns of tiles fall, for at most so many sharers.

    Args: step: tiles side by side that stay together.

    >>> cluster_slices(2, 4, 2, 4), cluster_slices(1, 4, 1, 2), cluster_slices(2, 2, 2, 8)
    ((2, 2), (1, 2), (2, 1))
    """
    ways = [
        (down, aside)
        for down in range(1, high + 1)
        for aside in range(1, wide // step + 1)
        if high % down == 0 and wide % (step * aside) == 0 and down * aside <= sharers
    ]
    return max(ways, key=lambda way: (way[0] * way[1], way[0]))


def dsmem_bytes(high: int, wide: int, step: int, sharers: int, lanes: int) -> int:
    """Bytes of shared memory in which a block gets what all blocks of its cluster have for it.

    >>> dsmem_bytes(1, 24, 2, 4, 128)
    49152
    """
    down, aside = cluster_slices(high, wide, step, sharers)
    return sharers * (high * wide // (down * aside)) * lanes * FOUR


def dsmem_tile_bytes(rows: int, columns: int, sharers: int, lanes: int) -> int:
    """The same for a warpgroup's tile of so many rows and columns of float32."""
    wide = columns // 8
    return dsmem_bytes(rows // HIGH, wide, 1 if wide % 2 else 2, sharers, lanes)


def dsmem_is_separate(kept: Any, room: Any) -> Any:
    """Whether a block has shared memory for what is pushed into it behind all that it keeps. Args: bytes of both."""
    return kept + room + BARRIER <= SHARED


def smem_with_dsmem(kept: Any, room: Any) -> Any:
    """Bytes of shared memory of a block that is pushed into: where there is no more room, in the place of operands."""
    return batch.where(dsmem_is_separate(kept, room), kept + room, batch.maximum(kept, room)) + BARRIER


@dataclass(frozen=True)
class WgmmaTile:
    """One schedule of a ``wgmma`` GEMM (see `codegen.cuda.gemm.wgmma_tile` for what the kernel makes of it).

    Attributes:
        rows, columns: outputs of a block's tile.
        terms: k per k-tile.
        groups: warpgroups along rows, along columns.
        stages: k-tiles in shared memory.
        flight: float32 k-tiles in flight in registers.
        split: split-K over the grid.
        cluster: blocks that split K and add up through DSMEM.
        rounded: whether A comes from registers and B needs no rounding.
        spread: whether copies are issued between the k-steps.
        steps: k-steps of one commit group; 0 where all steps of a tile are one.
        cached: whether A is copied through the L1 cache.
        push: whether blocks of a cluster store their partial sums into each other's shared memory.
        early: whether epilogue operands are prefetched.
        held: which matrices of the epilogue are staged in shared memory.
        paired: whether lanes exchange results before the epilogue, for stores twice as wide.
    """

    rows: int
    columns: int
    terms: int
    groups: tuple[int, int]
    stages: int
    flight: int = 0
    split: int = 1
    cluster: int = 1
    rounded: int = 0
    spread: int = 0
    steps: int = 1
    cached: int = 0
    push: int = 0
    early: int = 0
    held: int = 0
    paired: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return GROUP * math.prod(self.groups)

    @property
    def group(self) -> int:
        """k-steps that are one group of instructions: those of float32, the only ones that choose."""
        return self.steps or self.terms * 4 // STEP

    @property
    def room(self) -> int:
        """Bytes in which blocks of a cluster store into each other's memory."""
        along, across = self.groups
        return dsmem_tile_bytes(self.rows // along, self.columns // across, self.cluster, self.threads)

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("flight", self.flight, 0), ("split", self.split, 1), ("cluster", self.cluster, 1))
        found += (("rounded", self.rounded, 0), ("spread", self.spread, 0), ("steps", self.group, 1))
        found += (("cached", self.cached, 0), ("push", self.push, 0), ("early", self.early, 0))
        found += (("held", self.held, 0), ("paired", self.paired, 0))
        more = tuple((name, count) for name, count, least in found if count > least)
        tile = (self.rows, self.columns, self.terms)
        params = (("tile", tile), ("groups", self.groups), ("stages", self.stages), *more)
        return scheduled(program, "product", self.threads, *params)


@dataclass(frozen=True)
class WgmmaTiles:
    """Schedules of one GEMM as arrays, for vectorised pricing.

    Attributes: those of `WgmmaTile`; the last four are the same for all schedules, and the others of them 0.
    """

    rows: Any
    columns: Any
    terms: Any
    groups: tuple[Any, int]
    stages: Any
    flight: Any
    split: Any
    cluster: Any
    push: Any
    rounded: int
    steps: int
    early: int
    paired: int = 0

    @classmethod
    def of_rows(
        cls, found: Sequence[tuple[int, ...]], *, rounded: int, steps: int, early: int, push: int
    ) -> WgmmaTiles:
        """From (rows, columns, warpgroups along rows, terms, stages, flight, split, cluster) of each.

        Args: push: whether blocks of clusters store into each other's shared memory.
        """
        rows, columns, along, terms, stages, flight, split, cluster = np.array(found, np.int64).reshape(-1, 8).T
        pushes = push * (cluster > 1).astype(np.int64)
        return cls(rows, columns, terms, (along, 1), stages, flight, split, cluster, pushes, rounded, steps, early)

    @property
    def threads(self) -> Any:
        """Of a block."""
        return GROUP * math.prod(self.groups)

    @property
    def group(self) -> Any:
        """k-steps that are one group of instructions."""
        return self.steps or self.terms * 4 // STEP

    @property
    def room(self) -> Any:
        """Bytes in which blocks of a cluster store into each other's memory."""
        along, across = self.groups
        return batch.per_distinct(
            dsmem_tile_bytes, self.rows // along, self.columns // across, self.cluster, self.threads
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[WgmmaTile]:
        return (self.tile(place) for place in range(len(self)))

    def take(self, places: Any) -> WgmmaTiles:
        """The schedules at these places, or where a mask is set."""
        rows, columns, terms, along = (each[places] for each in (self.rows, self.columns, self.terms, self.groups[0]))
        stages, flight, split = (each[places] for each in (self.stages, self.flight, self.split))
        cluster, push, rest = self.cluster[places], self.push[places], (self.rounded, self.steps, self.early)
        return WgmmaTiles(rows, columns, terms, (along, 1), stages, flight, split, cluster, push, *rest)

    def tile(self, place: int) -> WgmmaTile:
        """One of the schedules."""
        arrays = self.rows, self.columns, self.terms, self.groups[0], self.stages, self.flight, self.split
        rows, columns, terms, along, stages, flight, split = (int(each[place]) for each in arrays)
        return WgmmaTile(
            rows,
            columns,
            terms,
            (along, self.groups[1]),
            stages,
            flight,
            split,
            int(self.cluster[place]),
            self.rounded,
            steps=self.steps,
            push=int(self.push[place]),
            early=self.early,
        )

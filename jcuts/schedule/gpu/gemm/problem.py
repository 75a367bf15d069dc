"""A matrix product as the schedules see it (`GemmProblem`), and schedules of it for ``mma.sync`` (`MmaTile`).

Plain data: what a schedule takes is counted by `schedule.gpu.gemm.cost`, and which schedules fit is decided where they
are enumerated (`schedule.gpu.gemm.mma`, `schedule.gpu.gemm.wgmma`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.column_sums import match_column_sums
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, WIDE, B, K, gemm_operands
from jcuts.schedule.gpu.gemm import smem_layout_f64
from jcuts.schedule.gpu.machine import WARP, GpuMachine, scheduled

STEP = 32
"""Bytes of terms per instruction of a matrix unit."""


@dataclass(frozen=True)
class MmaTile:
    """One schedule of an ``mma.sync`` (or SIMT) GEMM.

    Attributes:
        rows, columns: outputs of a block's tile.
        terms: k per k-tile.
        warps: warps along rows, along columns, along K.
        stages: stages of the shared-memory ring.
        split: split-K over the grid.
        cluster: blocks that split K and add up through DSMEM.
        early: whether epilogue operands are prefetched.
        fma: whether the kernel is SIMT (``fma.rn.f32``), not ``mma``.
    """

    rows: int
    columns: int
    terms: int
    warps: tuple[int, int, int]
    stages: int
    split: int
    cluster: int = 1
    early: int = 0
    fma: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * math.prod(self.warps)

    def of(self, program: Program) -> Program:
        """The scheduled program."""
        found = (("split", self.split), ("cluster", self.cluster))
        more = tuple((name, count) for name, count in found if count > 1) + ((("early", 1),) if self.early else ())
        more += (("fma", 1),) if self.fma else ()
        tile = (self.rows, self.columns, self.terms)
        params = (("tile", tile), ("warps", self.warps), ("stages", self.stages), *more)
        return scheduled(program, "product", self.threads, *params)


@dataclass(frozen=True)
class MmaTiles:
    """Schedules of one GEMM as arrays, for vectorised pricing. Attributes are those of `MmaTile`, of all schedules."""

    rows: Any
    columns: Any
    terms: Any
    warps: tuple[Any, Any, Any]
    stages: Any
    split: Any
    cluster: Any
    fma: int = 0

    @property
    def threads(self) -> Any:
        """Of a block."""
        return WARP * math.prod(self.warps)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: Any) -> MmaTiles:
        """The schedules at these places, or where a mask is set."""
        along, across, deep = (each[places] for each in self.warps)
        rows, columns, terms = (each[places] for each in (self.rows, self.columns, self.terms))
        stages, split, cluster = (each[places] for each in (self.stages, self.split, self.cluster))
        return MmaTiles(rows, columns, terms, (along, across, deep), stages, split, cluster, self.fma)

    def tile(self, place: int) -> MmaTile:
        """One of the schedules."""
        rows, columns, terms, *warps, stages, split, cluster = (
            int(each[place])
            for each in (self.rows, self.columns, self.terms, *self.warps, self.stages, self.split, self.cluster)
        )
        along, across, deep = warps
        return MmaTile(rows, columns, terms, (along, across, deep), stages, split, cluster, fma=self.fma)


@dataclass(frozen=True)
class GemmTile:
    """What the schedules of all tiled GEMMs have in common, whichever instruction multiplies.

    Attributes:
        rows, columns: outputs of a block's tile. terms: k per k-tile. threads: of a block.
        stages: stages of the shared-memory ring.
        split: split-K over the grid. cluster: blocks that split K and add up through DSMEM.
        fma: whether the kernel is SIMT (``fma.rn.f32``).
    """

    rows: int
    columns: int
    terms: int
    threads: int
    stages: int
    split: int = 1
    cluster: int = 1
    fma: bool = False


def gemm_tile(program: Program) -> GemmTile:
    """The tile of a scheduled GEMM."""
    params: Any = dict(program.params)
    rows, columns, terms = params["tile"]
    split, cluster = params.get("split", 1), params.get("cluster", 1)
    return GemmTile(rows, columns, terms, params["threads"], params["stages"], split, cluster, "fma" in params)


def column_sum_registers(sums: int, columns: Any) -> Any:
    """Registers of a lane beside its accumulators: column sums of its warp's columns, a quarter of which it has.

    The first one takes the place of the accumulators that are not needed any more.
    """
    return max(0, sums - 1) * columns // 4


class GemmProblem:
    """The extents, operands and traffic of one matrix product on one GPU.

    Attributes:
        batch, rows, columns, terms: extents of the batch, M, N and K. sides: operands A and B. item: bytes of an
            element of either.
        fma: whether products are fused multiply-adds; double: whether they are float64.
        total, step: bytes of an accumulator; of the K extent of one instruction.
        moved, results, partial: bytes of all operands and results; of results and what the epilogue reads; of the
            accumulators of all results.
        stored: the results that the epilogue stores. sums: partial results per row tile and column, of column sums.
        adds_words: whether the epilogue adds a matrix of a 4-byte type.
    """

    def __init__(self, program: Program, machine: GpuMachine, fma: int = 0) -> None:
        """Args: fma: whether products are fused multiply-adds."""
        phase = program.phases[0]
        extents = phase.ranges()
        self.machine, self.sides = machine, gemm_operands(program)
        self.batch, self.rows, self.columns = (extents.get(name, 1) for name in (B, ROWS, COLUMNS))
        self.terms, self.item = extents[K], self.sides[0].item
        self.fma, self.double = fma, self.sides[0].dtype == WIDE
        self.total, self.step = (
            (8, smem_layout_f64.LINE) if self.double else (4, STEP)
        )  # bytes: a total, terms of a step
        made, sums = {s.buffer for s in phase.stores}, match_column_sums(program)
        self.stored = [b for b in program.outputs if b.name in made] or list(program.outputs)
        self.sums = 0 if sums is None else sums.partials
        self.moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
        self.results = float(sum(b.bytes for b in self.stored))
        used = {n.buffer for n in phase.exit.nodes if n.op == "load"}
        self.results += sum(b.bytes for b in program.inputs if b.name in used)
        added = [b for b in program.inputs if b.name in used and b.size >= self.stored[0].size]
        self.adds_words = any(ITEM_SIZE[b.dtype] == 4 for b in added)
        self.partial = float(sum(self.total * b.size for b in self.stored[:1]))

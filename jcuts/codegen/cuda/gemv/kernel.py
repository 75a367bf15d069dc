"""Split-K GEMV kernel: ``ld.global.nc.v4`` of W, FMAs in float32, ``shfl.sync`` and shared memory, DSMEM in a cluster.

A thread multiplies a register tile of a few columns and a few k, and all rows of x where it has a few (small batches:
a weight is loaded once and multiplied once per row); the threads of a block that lie along K add up their sums by
shuffles and through shared memory, as in `reduction.column`.  A warp lies along n where the columns of W are neighbours
in memory, else along k (``k_major``), so that it reads whole lines in both layouts.  Where K is split over the blocks
of a cluster, the first block adds up the sums of all in a fixed order (``mapa``, ``ld.shared::cluster``) and runs the
epilogue: one launch, no scratch memory, no atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter
from jcuts.codegen.cuda.ptx import cluster as ptx_cluster
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.mma import cluster_barrier, mapa
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, write_word
from jcuts.codegen.cuda.reduction.column import GROUP, ColumnReductionKernel, ColumnShape, shape_of
from jcuts.codegen.cuda.reduction.split import column_program
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.gemm import ROWS

WORD = 4
"""Bytes of a partial sum."""


@dataclass(frozen=True)
class GemvTile(ColumnShape):
    """Mapping of a thread block onto columns and k; further attributes as `ColumnShape`.

    Attributes:
        is_k_major: neighbouring threads have neighbouring k, else neighbouring columns.
        cluster: blocks that have the same columns and a slice of K each.
    """

    is_k_major: bool = False
    cluster: int = 1


def gemv_program(program: Program) -> Program:
    """The program of one launch: K counted in register tiles, an axis ``s`` for the slice of a cluster's block."""
    cluster = int(str(dict(program.params).get("cluster", 1)))
    return column_program(replace(program, params=(*program.params, ("split", cluster))) if cluster > 1 else program)


def gemv_tile(program: Program) -> GemvTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape, params, phase = shape_of(program), dict(program.params), program.phases[0]
    if shape.across * shape.deep != shape.threads or shape.across & (shape.across - 1) or shape.threads % WARP:
        raise CompileRejected(f"{program.name}: {shape.across} threads along the columns, {shape.threads} in a block")
    if len(phase.accs) != 1 or phase.accs[0].dtype != "float32":
        raise CompileRejected(f"{program.name}: a GEMV has one float32 sum per row and column")
    if any(a.unroll not in (1, a.extent) or (a.unroll > 1 and a.name != ROWS) for a in phase.axes[:-1]):
        raise CompileRejected(f"{program.name}: a thread of a GEMV has all rows or one")
    groups = next((a.extent for a in phase.axes if a.name == GROUP), 1)
    more = {f.name: getattr(shape, f.name) for f in fields(shape)}
    return GemvTile(**more, is_k_major="k_major" in params, cluster=groups if "cluster" in params else 1)


class GemvKernel(ColumnReductionKernel):
    """Emits one thread of the split-K GEMV."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: GemvTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        """Args: as of `TileKernel`."""
        self.tile = tile
        super().__init__(builder, program, tile, buffers, pointers, integers, symbol, shared)

    def _thread_place(self) -> tuple[L.Value, L.Value]:
        if not self.tile.is_k_major:
            return super()._thread_place()
        deep = L.I32(self.tile.deep)
        return self.builder.udiv(self.thread, deep), self.builder.urem(self.thread, deep)

    def _shuffle_distances(self) -> list[int]:
        if not self.tile.is_k_major:
            return super()._shuffle_distances()
        return [d for d in (16, 8, 4, 2, 1) if d < self.tile.deep]

    def _partial_line(self, distances: list[int]) -> tuple[int, L.Value, L.Value | None]:
        if not self.tile.is_k_major:
            return super()._partial_line(distances)
        builder, lanes = self.builder, min(WARP, self.tile.deep)
        writes = builder.icmp_signed("==", builder.urem(self.y, L.I32(lanes)), L.I32(0))
        return self.tile.deep // lanes, builder.udiv(self.y, L.I32(lanes)), writes

    def _finish(self, body: RegisterTileEmitter) -> None:
        end, mine = self._block_totals(body)
        if self.tile.cluster == 1:
            end._finish()
            return
        builder, rank = self.builder, self.outer[GROUP]
        slots = [slot for (slot,) in end.slots.values()]
        line = self.tile.across * self.lane.unroll
        place = allocate_static(builder, f"{self.symbol}_cluster", len(slots) * line * WORD)
        place = builder.add(place, builder.mul(mine, L.I32(WORD)))
        writes = builder.icmp_signed("<", self.thread, L.I32(line))
        for row, slot in enumerate(slots):
            write_word(builder, place, row * line * WORD, builder.load(slot), WORD, writes)
        cluster_barrier(builder)
        with builder.if_then(builder.icmp_signed("==", rank, L.I32(0))):
            blocks = [mapa(builder, place, number) for number in range(self.tile.cluster)]
            for row, slot in enumerate(slots):
                sums = [ptx_cluster.ld_shared_f32(builder, block, row * line * WORD) for block in blocks]
                builder.store(functools.reduce(builder.fadd, sums), slot)
            end._finish()
        cluster_barrier(builder)  # no block may end while the first one reads its shared memory

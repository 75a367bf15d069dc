"""Project stage of two fused GEMMs: the second GEMM, accumulated in registers over chunks of the hidden dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jcuts.codegen.cuda.b2b_gemm.expand_gemm import EIGHT
from jcuts.codegen.cuda.b2b_gemm.loads import RowPlaces
from jcuts.codegen.cuda.b2b_gemm.project_epilogue import store_epilogue
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, SmemTile, TileLoader
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.patterns.gemm import TYPES
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, GemmPairTile

Stage = Callable[[L.Value, L.Value], None]
"""Emits a part of an iteration, for the chunk that begins at (hidden column), whose number is odd or not (i32)."""
RowFragments = Callable[[int, int, L.Value], list[L.Value]]
"""Reads an A fragment: number of the 16 rows, step along K in the chunk, whether the chunk's number is odd (i32)."""


class ProjectGemm:
    """The second GEMM: fragments of a chunk's hidden columns times a chunk of weights (``mma.sync``)."""

    def __init__(
        self, frame: M.Frame, shape: GemmPairTile, thread: L.Value, weights: L.Value, buffers: Mapping[str, Buffer]
    ) -> None:
        """Args: weights: shared-memory address of the second GEMM's weights."""
        self.frame, self.shape, self.buffers, self.builder = frame, shape, buffers, frame.builder
        builder, block = self.builder, shape.block
        self.lane, warp = builder.and_(thread, L.I32(WARP - 1)), builder.lshr(thread, L.I32(5))
        self.row = builder.mul(builder.udiv(warp, L.I32(shape.project[1])), L.I32(ROW_TILE * shape.m_fragments_out))
        self.column = builder.mul(builder.urem(warp, L.I32(shape.project[1])), L.I32(shape.n_per_warp))
        side, columns = block.weights[1], shape.n_per_warp * shape.project[1]
        ragged = block.expanded_channels % shape.chunk != 0
        self.tile = SmemTile(side, block.out_channels, columns, shape.chunk, shape.n_per_warp, 0, ragged)
        self.copier = TileLoader(frame, self.tile, shape.threads, thread, L.I32(0), weights)
        rounded = buffers[side.buffer].tf32
        self.fragments = FragmentReader(builder, self.tile, weights, self.column, self.lane, rounded)

    @property
    def n_fragments(self) -> int:
        """Number of 8-column fragments of a warp's results."""
        shape = self.shape
        if shape.project[1] > 1 or self.tile.scalar_fragments:
            return shape.n_per_warp // EIGHT
        return -(-shape.block.out_channels // EIGHT)

    def over_chunks(self, ahead: Stage, before: Stage, rows: RowFragments) -> Totals:
        """The loop over chunks.

        Args: ahead: starts the copies of a later chunk's operands; before: computes a chunk's A operand, into shared
            memory; rows: reads it.
        """
        builder, shape = self.builder, self.shape
        entry = builder.block
        loop, after = builder.append_basic_block("pieces"), builder.append_basic_block("pieces.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number = builder.phi(L.I32)
        number.add_incoming(L.I32(0), entry)
        carried = [
            [[builder.phi(L.F32) for _ in range(4)] for _ in range(self.n_fragments)]
            for _ in range(shape.m_fragments_out)
        ]
        following = builder.add(number, L.I32(1))
        more = builder.icmp_signed("<", following, L.I32(shape.channel_chunks))
        odd, first = builder.and_(number, L.I32(1)), builder.mul(number, L.I32(shape.chunk))
        if shape.channel_chunks > 1:
            with builder.if_then(more):
                ahead(builder.add(first, L.I32(shape.chunk)), builder.xor(odd, L.I32(1)))
        stage = builder.mul(odd, L.I32(shape.operand_bytes[2]))
        self.copier.start(first, stage, builder.sub(L.I32(shape.block.expanded_channels), first))
        ptx_mma.cp_async_commit(builder)
        before(first, odd)
        ptx_mma.cp_async_wait(builder, 0)
        ptx_mma.barrier(builder)
        sums = self._accumulate(stage, odd, rows, [[list(tile) for tile in row] for row in carried])
        number.add_incoming(following, builder.block)
        for row, made in zip(carried, sums, strict=True):
            for tile, values in zip(row, made, strict=True):
                for phi, value in zip(tile, values, strict=True):
                    phi.add_incoming(L.F32(0.0), entry)
                    phi.add_incoming(value, builder.block)
        builder.cbranch(more, loop, after)
        builder.position_at_end(after)
        return sums

    def _accumulate(self, stage: L.Value, odd: L.Value, rows: RowFragments, sums: Totals) -> Totals:
        """Adds a chunk's products to the accumulators."""
        builder, shape = self.builder, self.shape
        kind = TYPES[shape.block.dtype]
        for step in range(shape.chunk // shape.step):
            columns = self.fragments.read(stage, step * shape.step)[: self.n_fragments]
            for i in range(shape.m_fragments_out):
                row = rows(i, step, odd)
                for j, column in enumerate(columns):
                    sums[i][j] = ptx_mma.mma_sync(builder, kind, row, column, sums[i][j])
        return sums

    def store(self, place: RowPlaces, totals: Totals) -> None:
        """Runs the exit graph on the accumulators and stores the results."""
        store_epilogue(self.frame, self.shape, place, self.tile, self.buffers, self.lane, self.row, self.column, totals)

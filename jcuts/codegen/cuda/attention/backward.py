"""Attention backward on tensor cores (``mma.sync``): recomputed weights, dQ per tile of queries or dK and dV per tile
of keys.

This is the *attention_backward* form (FlashAttention-2).  The operands of a block's rows stay in shared memory, or
their fragments in registers; tiles of the columns' operands stream through a ring of shared memory (``cp.async``).  Of
a tile, both products of rows and columns (scores, dO V^T) are accumulators, element-wise operations make P and dS of
them there, and these become A operands of the results' products without moving between lanes, as in `flash`.  The row
statistics lse and delta are loads of the element-wise graphs.  Blocks own their rows: there are no atomic additions,
and results do not depend on the order of blocks.

Where a mask of positions makes all weights of a warp's tile 0 (a causal mask's upper triangle), the warp leaves it out,
as long as its operands are bounded (`masked_tiles`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from jcuts.codegen.cuda.attention.block_walk import checked_tile, counted_loop, head_frame, next_stage
from jcuts.codegen.cuda.attention.kv_tiles import LineReader, TileCopier
from jcuts.codegen.cuda.attention.masked_tiles import (
    are_bounded,
    is_masked,
    loads_are_bounded,
    rows_are_bounded,
    unless,
)
from jcuts.codegen.cuda.attention.online_softmax import tiles_of
from jcuts.codegen.cuda.attention.score_mod import Tile, TilePlace, apply_to_tiles, mask_columns
from jcuts.codegen.cuda.gemm.epilogue import epilogue
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, GemmOperand
from jcuts.lower.patterns.masked_tiles import masked_backward
from jcuts.schedule.gpu.attention.backward_tile import BackwardTile, CopiedTile, backward_tile
from jcuts.schedule.gpu.attention.tile import EIGHT, SIXTEEN, STEP

Fragments = list[list[list[L.Value]]]
"""A operands: [16 rows][step][4 registers]."""


def backward_shape(program: Program) -> BackwardTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    return checked_tile(program, backward_tile(program), "tiles")


class AttentionBackwardKernel:
    """Emits one thread of the attention backward kernel."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: BackwardTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.buffers = builder, program, tile, buffers
        self.attention, self.thread, self.shared = tile.attention, integers["thread"], shared
        self.masked = masked_backward(self.attention) if tile.skips else None
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        self.band = builder.mul(builder.lshr(self.thread, L.I32(5)), L.I32(tile.high))
        _, groups = tile.blocks
        block = integers["block"]
        self.group = builder.urem(block, L.I32(groups))
        self.row = builder.add(builder.mul(self.group, L.I32(tile.rows)), self.band)
        head = builder.udiv(block, L.I32(groups))
        self.frame = head_frame(builder, self.attention.batch, head, self.row, pointers)

    def emit(self) -> None:
        """The whole tile of rows."""
        builder, shape = self.builder, self.shape
        rows, columns = shape.row_tiles, shape.column_tiles
        starts = (0, rows[0].bytes, shape.row_bytes, shape.row_bytes + columns[0].bytes)
        made = [
            TileCopier(self.frame, tile, tile.operand, self.thread, self.shared, first)
            for tile, first in zip((*rows, *columns), starts, strict=True)
        ]
        self.copiers = made[2:]
        for copier in made[:2]:
            copier.start(self.group, L.I32(0))
        ahead = max(1, shape.stages - 1)
        for number in range(ahead):
            if number < shape.tiles:
                self._start(L.I32(number), L.I32(number * shape.stage))
            ptx_mma.cp_async_commit(builder)
        self.rounds = self.attention.kind == "tf32"
        ptx_mma.cp_async_wait(builder, ahead - 1)
        for copier in made[:2] if self.rounds else ():
            copier.round(L.I32(0))
        self.rows = [self._reader(tile, first, self.band, True) for tile, first in zip(rows, starts[:2], strict=True)]
        self.columns = [
            self._reader(tile, first, L.I32(0), shape.rounded) for tile, first in zip(columns, starts[2:], strict=True)
        ]
        self.held: list[Fragments] = []
        if shape.held:
            ptx_mma.barrier(builder)
            self.held = [
                [[reader.rows(band, step) for step in range(tile.steps)] for band in range(shape.high // SIXTEEN)]
                for reader, tile in zip(self.rows, rows, strict=True)
            ]
        self.rows_bounded = self._rows_are_bounded()
        outs = self._walk(ahead)
        for phase, tile, out in zip(self.attention.results, self._factors(columns), outs, strict=True):
            self._finish(phase, tile, out)

    def _reader(self, tile: CopiedTile, start: int, line: L.Value, rounded: bool) -> LineReader:
        builder, pitch = self.builder, tile.pitch(tile.operand)
        first = builder.add(builder.add(self.shared, L.I32(start)), builder.mul(line, L.I32(pitch)))
        return LineReader(builder, first, pitch, tile.operand.item, self.lane, rounded=rounded)

    def _factors(self, sides: tuple[CopiedTile, CopiedTile] | list[LineReader]) -> list:
        """Of the columns' (scores, gradient) side those that the results' products read, in their order."""
        return [sides[0]] if len(self.attention.results) == 1 else [sides[1], sides[0]]

    def _start(self, tile: L.Value, stage: L.Value) -> None:
        for copier in self.copiers:
            copier.start(tile, stage)

    # -- the walk over the columns --------------------------------------------------------------------------------
    def _walk(self, ahead: int) -> list[Tile]:
        """The loop over column tiles: both products, P and dS, the results' products."""
        builder, shape = self.builder, self.shape
        bands = shape.high // SIXTEEN
        sizes = [bands * tile.padded // EIGHT * 4 for tile in self._factors(shape.column_tiles)]

        def results(values: list[L.Value]) -> list[Tile]:
            ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
            return [tiles_of(values[a:b], bands, 4) for a, b in itertools.pairwise(ends)]

        def body(number: L.Value, values: list[L.Value]) -> list[L.Value]:
            reading, writing, loads = values[:3]
            bounded = self._arrived(ahead - 1, reading, loads)
            loads = self._loads_are_bounded(builder.add(number, L.I32(1)))  # not waited for until the next tile
            if shape.stages > 1:
                self._next(builder.add(number, L.I32(ahead)), writing)
            outs = self._tile(number, reading, values[3:], results, bounded)
            if shape.stages == 1:
                ptx_mma.barrier(builder)
                self._next(builder.add(number, L.I32(1)), reading)
            after = [next_stage(builder, at, shape.stage, shape.stages) for at in (reading, writing)]
            return [*after, loads, *outs]

        first = self._loads_are_bounded(L.I32(0))
        start = [L.I32(0), L.I32(ahead % shape.stages * shape.stage), first, *[L.F32(0.0)] * sum(sizes)]
        return results(counted_loop(builder, "columns", shape.tiles, start, body)[3:])

    def _arrived(self, under_way: int, stage: L.Value, loads: L.Value) -> L.Value:
        """Waits (``cp.async.wait_group``, block barrier) until the tile of this stage is visible to all threads; gives
        whether its operands, and what its columns load, are bounded, if that matters.

        Args: loads: whether what this thread loads for the tile is.
        """
        builder = self.builder
        ptx_mma.cp_async_wait(builder, under_way)
        if self.shape.rounded:
            for copier in self.copiers:
                copier.round(stage)
        if self.masked is None:
            ptx_mma.barrier(builder)
            return L.I1(0)
        words = [word for copier in self.copiers for word in copier.words(stage)]
        bounded = are_bounded(builder, self.attention.kind, words, self.masked.operands)
        return ptx_mma.barrier_and(builder, builder.and_(bounded, loads))

    def _loads_are_bounded(self, tile: L.Value) -> L.Value:
        """Whether what a thread's columns of a tile load is bounded."""
        builder, shape, masked = self.builder, self.shape, self.masked
        holds: L.Value = L.I1(1)
        if masked is None or not masked.column_loads:
            return holds
        for across in range(0, shape.columns, shape.threads):
            mine = builder.add(self.thread, L.I32(across))
            if across + shape.threads > shape.columns:
                mine = builder.urem(mine, L.I32(shape.columns))
            column = builder.add(builder.mul(tile, L.I32(shape.columns)), mine)
            extents = {COLUMNS: self.attention.columns}
            found = loads_are_bounded(
                self.frame, masked.column_loads, self.buffers, {COLUMNS: column}, extents, masked.loads
            )
            holds = builder.and_(holds, found)
        return holds

    def _rows_are_bounded(self) -> L.Value:
        """Whether the operands of a warp's rows are bounded, and what these load."""
        shape, masked, attention = self.shape, self.masked, self.attention
        if masked is None:
            return L.I1(0)
        if not shape.held:
            ptx_mma.barrier(self.builder)
        words = (
            word
            for side, tile in enumerate(shape.row_tiles)
            for band in range(shape.high // SIXTEEN)
            for step in range(tile.steps)
            for word in (self.held[side][band][step] if shape.held else self.rows[side].rows(band, step))
        )
        rows = self.row, shape.high, attention.rows
        return rows_are_bounded(self.frame, masked, attention.kind, words, self.buffers, rows, self.lane)

    def _next(self, tile: L.Value, stage: L.Value) -> None:
        """Starts the copies of a tile, if there is one."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("<", tile, L.I32(self.shape.tiles))):
            self._start(tile, stage)
        ptx_mma.cp_async_commit(builder)

    # -- a tile of columns ----------------------------------------------------------------------------------------
    def _tile(
        self,
        number: L.Value,
        stage: L.Value,
        sums: list[L.Value],
        results: Callable[[list[L.Value]], list[Tile]],
        bounded: L.Value,
    ) -> list[L.Value]:
        """The accumulators with a tile's part; as they were where all weights of a warp's tile are masked.

        Args: sums: the accumulators. results: the same by result. bounded: as of `_arrived`.
        """
        builder, shape, attention = self.builder, self.shape, self.attention
        first = builder.mul(number, L.I32(shape.columns))
        ranges = (
            shape.blocks[1] * shape.rows - shape.high + EIGHT,
            shape.tiles * shape.columns - shape.columns + EIGHT,
        )
        place = TilePlace(self.row, first, self.lane, (attention.rows, attention.columns), ranges)

        def added() -> list[L.Value]:
            weights = self._elements(attention.weights, [self._product(0, stage)], {}, place)
            outs = results(sums)
            if len(outs) == 2:
                self._accumulate(outs[0], weights, self.columns[1], stage)
            kept = {attention.weights.stores[0].buffer: 1}
            change = self._elements(attention.change, [self._product(1, stage), weights], kept, place)
            self._accumulate(outs[-1], change, self.columns[0], stage)
            return [v for out in outs for row in out for four in row for v in four]

        if self.masked is None:
            return added()
        places, sizes = {ROWS: self.row, COLUMNS: first}, {ROWS: shape.high, COLUMNS: shape.columns}
        nothing = is_masked(builder, self.masked.positions, places, sizes)
        nothing = builder.and_(nothing, builder.and_(bounded, self.rows_bounded))
        return unless(builder, nothing, sums, added)

    def _product(self, side: int, stage: L.Value) -> Tile:
        """Rows times columns: of the scores (side 0), or dO V^T."""
        builder, shape, kind = self.builder, self.shape, self.attention.kind
        bands, pairs = shape.high // SIXTEEN, shape.columns // SIXTEEN
        steps, reader = shape.column_tiles[side].steps, self.columns[side]
        found = [[[L.F32(0.0)] * 4 for _ in range(2 * pairs)] for _ in range(bands)]

        def fragments(step: int) -> tuple[list[list[L.Value]], list[list[list[L.Value]]]]:
            left = [self.held[side][i][step] if self.held else self.rows[side].rows(i, step) for i in range(bands)]
            return left, [reader.columns(stage, pair, step) for pair in range(pairs)]

        near = fragments(0)
        for step in range(steps):
            left, right = near
            if step + 1 < steps:
                near = fragments(step + 1)
            for pair, two in enumerate(right):
                for i, band in enumerate(left):
                    for j, one in enumerate(two):
                        at = 2 * pair + j
                        found[i][at] = ptx_mma.mma_sync(builder, kind, band, one, found[i][at])
        return found

    def _elements(self, phase: Phase, tiles: list[Tile], kept: dict[str, int], place: TilePlace) -> Tile:
        """The element-wise operations of a phase; zeros in columns beyond the last."""
        found = apply_to_tiles(self.frame, phase, self.buffers, tiles, kept, place, coarse_exp=True)
        ragged = self.attention.columns % self.shape.columns
        return mask_columns(self.builder, found, place, L.F32(0.0)) if ragged else found

    def _accumulate(self, out: Tile, factor: Tile, reader: LineReader, stage: L.Value) -> None:
        """Adds P or dS times the columns' operand to the accumulators."""
        builder, kind = self.builder, self.attention.kind
        terms = STEP // self.attention.scores.item
        for first in range(0, self.shape.columns, terms):
            left = [score_fragment(builder, kind, band, first // EIGHT) for band in factor]
            for column in range(0, EIGHT * len(out[0]), SIXTEEN):
                for j, right in enumerate(reader.terms(stage, first, column)):
                    at = column // EIGHT + j
                    for i, fragment in enumerate(left):
                        out[i][at] = ptx_mma.mma_sync(builder, kind, fragment, right, out[i][at])

    # -- the end --------------------------------------------------------------------------------------------------
    def _finish(self, phase: Phase, tile: CopiedTile, out: Tile) -> None:
        """The epilogue of a result."""
        shape, operand = self.shape, tile.operand
        frame = replace(self.frame, variables={**self.frame.variables, ROWS: self.row, COLUMNS: L.I32(0)})
        side = GemmOperand("", operand.dtype, Index(), (), COLUMNS, operand.item != 4, 1, STEP, 1)
        left = replace(side, dtype="float32", outer=ROWS, along_terms=True)
        rows = SmemTile(left, self.attention.rows, shape.rows, STEP, shape.high)
        tiles = (rows, SmemTile(side, operand.length, tile.padded, STEP, tile.padded))
        epilogue(frame, phase, tiles, self.buffers, self.lane, out)


def score_fragment(builder: GpuBuilder, kind: str, band: list[list[L.Value]], eight: int) -> list[L.Value]:
    """Accumulators of 16 rows and of 8 (TF32) or 16 columns from tile ``eight`` on as an A operand."""
    one = band[eight]
    if kind == "tf32":
        return [ptx_mma.to_tf32(builder, builder.bitcast(v, L.I32)) for v in (one[0], one[2], one[1], one[3])]
    text = f"cvt.rn.{kind}x2.f32 $0, $1, $2;"
    pairs = [(four[k], four[k + 1]) for four in (one, band[eight + 1]) for k in (0, 2)]
    return [asm(builder, text, L.I32, [high, low]) for low, high in pairs]

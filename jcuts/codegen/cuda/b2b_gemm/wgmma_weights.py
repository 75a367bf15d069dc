"""Producer side of the ``wgmma`` back-to-back GEMM: chunks of both weights into swizzled stages of shared memory.

16-bit weights, and pre-rounded ones along K, come by ``cp.async``.  Other float32 goes through registers, where it is
rounded (``cvt.rn.tf32``) and, where neighbours in memory are columns, transposed in squares of 4x4: ``wgmma`` reads
TF32 K-major only.

The first GEMM's accumulators are the A fragments of the second one as they are.  Of 16-bit types the layouts agree.  Of
TF32 a lane has accumulator columns 2t and 2t + 1 of eight, and its A fragment k = t and t + 4: so hidden column t (t +
4) is put on line 2t (2t + 1) of the first weight's tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jcuts.codegen.cuda.gemm.smem_tile import ThreadCopy, TileLoader
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import (
    SQUARE,
    Tf32RoundingLoader,
    TransposingLoader,
    Wanted,
    WgmmaSmemTile,
)
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import recomputed
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile

PIECES = wgmma.LINE // wgmma.PIECE
"""Squares of a line of K: lanes of a store's pass have all of one line, which meet every bank once."""

BATCH = 2
"""Accesses of a thread (squares, or pieces of lines) that wait in registers at once."""
COPIES = 4
"""Copies of a thread (``cp.async``) whose addresses are in registers at once."""


@dataclass(frozen=True)
class ExpandWeightTile(WgmmaSmemTile):
    """Chunk of the first weight: hidden columns on the lines whose accumulators are their A fragments."""

    @property
    def n_tiles_per_lane_group(self) -> int:
        """Tiles of 8 columns are not interleaved: k of the second GEMM lie in order."""
        return 1

    def place(self, builder: GpuBuilder, line: L.Value, column: L.Value) -> L.Value:
        """Byte offset in the tile of an element of a line."""
        if self.side.item == 4:
            pair = builder.shl(builder.and_(line, L.I32(SQUARE - 1)), L.I32(1))
            half = builder.and_(builder.lshr(line, L.I32(2)), L.I32(1))
            line = builder.or_(builder.or_(builder.and_(line, L.I32(~7)), pair), half)
        return super().place(builder, line, column)

    def square_line(self, row: int) -> int:
        """Lines from the first of four neighbouring columns to another."""
        return 2 * row if self.side.item == 4 else row


class SquareLoader(TransposingLoader):
    """Transposing loader of a whole chunk, any multiple of 4 columns by any number of lines of K."""

    def _find(self, threads: int, thread: L.Value, start: L.Value, shared: L.Value) -> None:
        builder, shape, side = self.builder, self.shape, self.shape.side
        across = shape.size // SQUARE
        total = across * shape.terms // SQUARE
        for first in range(0, total, threads):
            condition = None if first + threads <= total else builder.icmp_unsigned("<", thread, L.I32(total - first))
            number = builder.add(thread, L.I32(first)) if first else thread
            rest = builder.udiv(number, L.I32(PIECES))
            row = builder.mul(builder.urem(rest, L.I32(across)), L.I32(SQUARE))
            piece = builder.and_(number, L.I32(PIECES - 1))
            piece = builder.add(piece, builder.mul(builder.udiv(rest, L.I32(across)), L.I32(PIECES)))
            term = builder.mul(piece, L.I32(SQUARE))
            into = builder.add(shared, shape.place(builder, row, term))
            outer = self._inside(builder.add(start, row))
            constant = side.outer_offset.const * side.item
            self.places.append(ThreadCopy(self._source(outer, term), constant, into, 0, outer, term, condition))

    def wanted(self, first: L.Value, left: L.Value) -> Iterator[Wanted]:
        """Accesses of every square: its lines of columns, one per k; zeros where `sources` has none, beyond the last
        k.
        """
        builder, side = self.builder, self.shape.side
        alive: dict[tuple[L.Value, int], L.Value] = {}
        for piece, source, there in self.sources(first, left):
            for line in range(SQUARE):
                exists = self._line_exists(alive, piece.term, line, left)
                live = exists if there is None else there if exists is None else builder.and_(there, exists)
                yield (source, piece.constant + line * side.step * side.item), live, piece.condition


class HiddenColumns(TileLoader):
    """Loader of the first weight, whose chunks follow each other along the columns; all k of each at once."""

    column: L.Value = L.I32(0)

    def _inside(self, outer: L.Value) -> L.Value:
        return outer

    def sources(self, first: L.Value, left: L.Value) -> Iterator[tuple[ThreadCopy, L.Value, L.Value | None]]:
        """As of `TileLoader.sources`, of the chunk that begins at ``column``; zeros beyond the last column."""
        builder, shape = self.builder, self.shape
        step = shape.side.index.stride(shape.side.outer)
        assert step is not None
        moved = builder.mul(builder.sext(self.column, L.I64), L.I64(step * shape.side.item))
        known: dict[L.Value, L.Value] = {}
        for piece, source, live in super().sources(first, left):
            if shape.extent % shape.size:
                if piece.outer not in known:
                    column = builder.add(piece.outer, self.column)
                    known[piece.outer] = builder.icmp_signed("<", column, L.I32(shape.extent))
                live = known[piece.outer] if live is None else builder.and_(live, known[piece.outer])
            yield piece, builder.add(source, moved), live


class ExpandCopies(HiddenColumns):
    """The first weight, copied as it is."""


class ExpandRounding(HiddenColumns, Tf32RoundingLoader):
    """The first weight, rounded on the way."""


class ExpandSquares(HiddenColumns, SquareLoader):
    """The first weight, rounded and transposed on the way."""


LOADERS = (
    (ExpandCopies, ExpandRounding, ExpandSquares),
    (TileLoader, Tf32RoundingLoader, SquareLoader),
)
"""Of the first and the second weight: copied, rounded, transposed."""


def weight_tiles(tile: B2bWgmmaTile) -> tuple[ExpandWeightTile, WgmmaSmemTile]:
    """Shared-memory tiles of a chunk of both weights."""
    (up, down), block = tile.sides, tile.block
    terms, chunk, results = tile.weight_terms(0), tile.chunk, tile.results
    first = ExpandWeightTile(up, block.expanded_channels, chunk, terms, chunk, 0, block.in_channels % terms != 0)
    ragged = block.expanded_channels % chunk != 0
    return first, WgmmaSmemTile(down, block.out_channels, results, chunk, results, 0, ragged)


class WeightProducer:
    """Loads chunks of one weight: ``begin`` issues loads, what it returns fills a stage that has been released."""

    def __init__(self, frame: M.Frame, tile: B2bWgmmaTile, number: int, thread: L.Value, ring: L.Value) -> None:
        """Args: number: 0 or 1, of the weight; thread: among the producers; ring: address of the first stage."""
        self.frame, self.tile, self.number, self.thread, self.ring = frame, tile, number, thread, ring
        self.is_copied = tile.is_copied(number)
        self.smem = weight_tiles(tile)[number]
        self.kind = LOADERS[number][0 if self.is_copied else 2 if self.smem.is_transposed else 1]

    def begin(self, column: L.Value) -> Callable[[L.Value], None]:
        """Loads the chunk that begins at a hidden column. Returns: what stores it in a stage (byte offset)."""
        builder, block = self.frame.builder, self.tile.block
        if self.number:
            first, left = column, builder.sub(L.I32(block.expanded_channels), column)
        else:
            first, left = L.I32(0), L.I32(block.in_channels)
        loader = self._loader(column)
        count = len(loader.places)
        if not isinstance(loader, Tf32RoundingLoader):

            def copy(stage: L.Value) -> None:
                for start in range(0, count, COPIES):
                    part = self._loader(column)
                    part.places = part.places[start : start + COPIES]
                    part.start(first, stage, left)

            return copy
        words = _loaded(loader, 0, first, left)

        def finish(stage: L.Value) -> None:
            loader.store(words, stage)
            for start in range(BATCH, count, BATCH):
                # a branch that is always taken: ptxas issues no loads over it, for which there would be no registers
                known = recomputed(builder, self.thread)
                with builder.if_then(builder.icmp_unsigned("<", known, L.I32(self.tile.producer_threads))):
                    later = self._loader(column)
                    assert isinstance(later, Tf32RoundingLoader)
                    later.store(_loaded(later, start, first, left), stage)
            wgmma.proxy_fence(builder)

        return finish

    def _loader(self, column: L.Value) -> TileLoader:
        """A loader whose addresses are computed anew: producers have time for them, but no registers."""
        thread = recomputed(self.frame.builder, self.thread)
        loader = self.kind(self.frame, self.smem, self.tile.producer_threads, thread, L.I32(0), self.ring)
        if isinstance(loader, HiddenColumns):
            loader.column = column
        if isinstance(loader, Tf32RoundingLoader):
            loader.ordered = True
        return loader


def _loaded(loader: Tf32RoundingLoader, start: int, first: L.Value, left: L.Value) -> list[L.Value]:
    """Issues the loads of a batch of a thread's accesses, to which the loader is confined."""
    loader.places = loader.places[start : start + BATCH]
    return loader.load(first, left)

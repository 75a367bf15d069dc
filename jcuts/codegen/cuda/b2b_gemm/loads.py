"""Loaders of two fused GEMMs: input rows, chunks of weights (``cp.async``)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COPY, gemm_operands
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, WORD, GemmPairTile

ACCESS = 16
"""Bytes of the widest access."""


class RowPlaces(Protocol):
    """Where the rows of a block's tile are; of each a predicate that it exists (None: always)."""

    def of_input(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of the input."""
        ...

    def in_patch(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of what the expand GEMM writes."""
        ...

    def of_output(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of the result, 0 where it does not exist."""
        ...


class InputLoader:
    """Copies input rows into lines of shared memory, with zeros for k and rows that do not exist."""

    def __init__(self, frame: M.Frame, shape: GemmPairTile, place: RowPlaces, thread: L.Value, shared: L.Value) -> None:
        self.frame, self.shape, self.place, self.thread, self.shared = frame, shape, place, thread, shared
        self.builder: GpuBuilder = frame.builder
        terms = shape.block.in_channels
        self.width = copy_width(terms, shape.item)
        self.along = shape.padded_in_channels // self.width
        self.lines = shape.m_fragments_in * shape.expand[0] * ROW_TILE

    def start(self) -> None:
        """Starts this thread's copies."""
        builder, shape, terms = self.builder, self.shape, self.shape.block.in_channels
        assert shape.block.expand is not None
        base = self.frame.pointers[gemm_operands(shape.block.expand)[0].buffer]
        for target, line, part, where in self._pieces():
            pixel, live = self.place.of_input(line)
            if shape.padded_in_channels > terms:
                held = builder.icmp_unsigned("<", part, L.I32(terms))
                live = held if live is None else builder.and_(live, held)
            place = builder.add(builder.mul(pixel, L.I32(terms)), part)
            if live is not None:
                place = builder.select(live, place, L.I32(0))
            source = builder.add(base, builder.mul(builder.sext(place, L.I64), L.I64(shape.item)))
            ptx_mma.cp_async(builder, (target, 0), (source, 0), shape.item * self.width, live, where)

    def round(self) -> None:
        """Rounds what this thread has copied, float32, to TF32."""
        builder = self.builder
        for target, _, _, where in self._pieces():
            with builder.if_then(where) if where is not None else nullcontext():
                if WORD * self.width == ACCESS:
                    words = [builder.bitcast(x, L.I32) for x in ptx_mma.ld_shared_v4_f32(builder, target, 0)]
                else:
                    words = [ptx_mma.ld_shared_b32(builder, target, WORD * k) for k in range(self.width)]
                ptx_mma.write_words(builder, target, 0, [ptx_mma.to_tf32(builder, w) for w in words])

    def _pieces(self) -> list[tuple[L.Value, L.Value, L.Value, L.Value | None]]:
        """(shared address, line, its element, predicate) of every copy of this thread."""
        builder, shape = self.builder, self.shape
        found = []
        pieces = self.lines * self.along
        for first in range(0, pieces, shape.threads):
            piece = builder.add(self.thread, L.I32(first)) if first else self.thread
            where = None
            if first + shape.threads > pieces:
                where = builder.icmp_unsigned("<", piece, L.I32(pieces))
            line = builder.udiv(piece, L.I32(self.along))
            part = builder.mul(builder.urem(piece, L.I32(self.along)), L.I32(self.width))
            place = builder.add(builder.mul(line, L.I32(shape.input_pitch)), part)
            found.append((builder.add(self.shared, builder.mul(place, L.I32(shape.item))), line, part, where))
        return found


def copy_width(count: int, item: int) -> int:
    """Widest copy, in elements, that divides a size."""
    return next(size // item for size in COPY if count % (size // item) == 0)


class WeightLoader(TileLoader):
    """Copies all k of some columns of weights, with zeros for columns that do not exist."""

    def _inside(self, outer: L.Value) -> L.Value:
        return outer

    def fetch(self, first: L.Value, stage: L.Value, left: L.Value) -> None:
        """Starts the copies of the columns from ``first`` on. Args: left: k that remain."""
        builder, shape = self.builder, self.shape
        side = shape.side
        step = side.index.stride(side.outer)
        assert step is not None
        moved = builder.mul(builder.sext(first, L.I64), L.I64(step * side.item))
        known: dict[L.Value, L.Value] = {}
        for piece, source, live in self.sources(L.I32(0), left):
            if shape.extent % shape.size:
                if piece.outer not in known:
                    column = builder.add(piece.outer, first)
                    known[piece.outer] = builder.icmp_signed("<", column, L.I32(shape.extent))
                live = known[piece.outer] if live is None else builder.and_(live, known[piece.outer])
            places = (builder.add(piece.into, stage), piece.moved), (builder.add(source, moved), piece.constant)
            ptx_mma.cp_async(builder, *places, side.width * side.item, live, piece.condition, self.cached)

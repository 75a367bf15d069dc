"""Loaders of the fused inverted residual: input pixels, channel chunks, weights (``cp.async``)."""

from __future__ import annotations

from contextlib import nullcontext

from jcuts.codegen.cuda.gemm.smem_tile import TileLoader
from jcuts.codegen.cuda.inverted_residual.tile_coords import TileCoordinates
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COPY, gemm_operands
from jcuts.schedule.gpu.inverted_residual.tile import ROW_TILE, WORD, InvertedResidualTile

ACCESS = 16
"""Bytes of the widest access."""


class InputLoader:
    """Copies input pixels into lines of shared memory, with zeros for channels and pixels that do not exist."""

    def __init__(
        self, frame: M.Frame, shape: InvertedResidualTile, place: TileCoordinates, thread: L.Value, shared: L.Value
    ) -> None:
        self.frame, self.shape, self.place, self.thread, self.shared = frame, shape, place, thread, shared
        self.builder: GpuBuilder = frame.builder
        terms = shape.block.in_channels
        self.width = _width(terms, shape.item)
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


class ChannelChunkLoader:
    """Copies a chunk of an operand's channels into a patch, pixel by pixel; zeros for channels that do not exist."""

    def __init__(
        self, frame: M.Frame, shape: InvertedResidualTile, place: TileCoordinates, thread: L.Value, patch: L.Value
    ) -> None:
        self.frame, self.shape, self.place, self.thread, self.patch = frame, shape, place, thread, patch

    def start(self, first: L.Value, skipped: L.Value) -> None:
        """Starts this thread's copies. Args: first: channel; skipped: byte offset of the patch."""
        builder, shape = self.frame.builder, self.shape
        channels, base = shape.block.expanded_channels, self.frame.pointers[shape.block.window.image_buffer]
        width = _width(channels, shape.item)
        along = shape.chunk // width
        pieces = shape.pixels * along
        for start in range(0, pieces, shape.threads):
            piece = builder.add(self.thread, L.I32(start)) if start else self.thread
            where = None
            if start + shape.threads > pieces:
                where = builder.icmp_unsigned("<", piece, L.I32(pieces))
            pixel, part = builder.udiv(piece, L.I32(along)), builder.urem(piece, L.I32(along))
            part = builder.mul(part, L.I32(width))
            number, live = self.place.of_input(pixel)
            line, inside = self.place.in_patch(pixel)
            if inside is not None:
                where = inside if where is None else builder.and_(where, inside)
            channel = builder.add(first, part)
            if channels % shape.chunk:
                real = builder.icmp_signed("<", channel, L.I32(channels))
                live = real if live is None else builder.and_(live, real)
            source = builder.add(builder.mul(number, L.I32(channels)), channel)
            source = builder.mul(builder.sext(source, L.I64), L.I64(shape.item))
            target = builder.add(builder.mul(line, L.I32(shape.patch_pitch)), part)
            target = builder.add(builder.add(self.patch, skipped), builder.mul(target, L.I32(shape.item)))
            ptx_mma.cp_async(builder, (target, 0), (builder.add(base, source), 0), shape.item * width, live, where)


def _width(count: int, item: int) -> int:
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


def clear(builder: GpuBuilder, start: L.Value, size: int, thread: L.Value, threads: int) -> None:
    """Zeroes shared memory. Args: size: bytes, a multiple of 16."""
    place = builder.add(start, builder.mul(thread, L.I32(ACCESS)))
    zeros = [L.I32(0)] * (ACCESS // WORD)
    for first in range(0, size, ACCESS * threads):
        where = None
        if first + ACCESS * threads > size:
            where = builder.icmp_unsigned("<", thread, L.I32((size - first) // ACCESS))
        ptx_mma.write_words(builder, place, first, zeros, where)

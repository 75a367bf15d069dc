"""Loads of the fused inverted residual without an expand GEMM: chunks of an operand's channels into patches."""

from __future__ import annotations

from jcuts.codegen.cuda.b2b_gemm.loads import ACCESS, copy_width
from jcuts.codegen.cuda.inverted_residual.tile_coords import TileCoordinates
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.b2b_gemm.pair_tile import WORD
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile


class DirectLoad:
    """Replacement of the expand GEMM where there is none: chunks of an operand's channels, copied one ahead."""

    def __init__(
        self, frame: M.Frame, shape: InvertedResidualTile, place: TileCoordinates, thread: L.Value, patch: L.Value
    ) -> None:
        self.shape, self.builder = shape, frame.builder
        self.copier = ChannelChunkLoader(frame, shape, place, thread, patch)

    def start(self) -> None:
        """No copy: the patches must be cleared first."""

    def arrived(self) -> None:
        """Called when this thread has cleared its part of the patches."""
        ptx_mma.barrier(self.builder)
        self.ahead(L.I32(0), L.I32(0))
        ptx_mma.cp_async_commit(self.builder)
        ptx_mma.cp_async_wait(self.builder, 0)

    def hold(self) -> None:
        """No-op: nothing stays in registers."""

    def ahead(self, first: L.Value, odd: L.Value) -> None:
        """Prefetches the channel chunk that begins at ``first``."""
        self.copier.start(first, self.source(odd))

    def source(self, odd: L.Value) -> L.Value:
        """Byte offset of a chunk's patch."""
        return self.builder.mul(odd, L.I32(self.shape.sizes[3]))

    def compute(self, first: L.Value, odd: L.Value) -> None:
        """No-op: the copy has put the chunk into the patch."""


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
        width = copy_width(channels, shape.item)
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


def clear(builder: GpuBuilder, start: L.Value, size: int, thread: L.Value, threads: int) -> None:
    """Zeroes shared memory. Args: size: bytes, a multiple of 16."""
    place = builder.add(start, builder.mul(thread, L.I32(ACCESS)))
    zeros = [L.I32(0)] * (ACCESS // WORD)
    for first in range(0, size, ACCESS * threads):
        where = None
        if first + ACCESS * threads > size:
            where = builder.icmp_unsigned("<", thread, L.I32((size - first) // ACCESS))
        ptx_mma.write_words(builder, place, first, zeros, where)

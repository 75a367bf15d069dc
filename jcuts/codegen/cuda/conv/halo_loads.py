"""Halo loader and fragment reader of implicit GEMM: runs of activation pixels, swizzled, read by every filter tap.

A pixel's channels fill a line of 128 bytes (or 64), whose pieces of 16 are swizzled by the number of the line (of two
lines): eight neighbouring lines have no bank conflicts.  A lane reads line ``pixel + offset of the tap`` of its row,
or, where that tap lies outside the image, a line of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.lower.patterns.conv_window import ConvWindow
from jcuts.lower.patterns.gemm import ROWS, K


def _pieces(window: ConvWindow) -> int:
    """16-byte pieces of a line."""
    return window.bytes // wgmma.PIECE


def _swizzled(builder: GpuBuilder, window: ConvWindow, line: L.Value, piece: L.Value) -> L.Value:
    """Swizzled position of a 16-byte piece in its line (XOR with the line's number)."""
    turn = builder.lshr(line, L.I32(1)) if window.narrow else line
    return builder.and_(builder.xor(turn, piece), L.I32(_pieces(window) - 1))


class HaloLoader:
    """Copies runs of pixels (halos) into shared memory (``cp.async``): eight neighbouring threads (or four) per
    line.
    """

    def __init__(
        self, frame: M.Frame, window: ConvWindow, span: int, threads: int, thread: L.Value, into: L.Value
    ) -> None:
        """Args: span: lines of a run; into: address of the first run's place in shared memory."""
        builder = self.builder = frame.builder
        self.frame, self.window, self.span, self.threads = frame, window, span, threads
        pieces = _pieces(window)
        self.abreast = threads // pieces
        self.count = -(-span // self.abreast)
        self.line = builder.lshr(thread, L.I32(pieces.bit_length() - 1))
        column = builder.and_(thread, L.I32(pieces - 1))
        self.channel = builder.mul(column, L.I32(wgmma.PIECE // window.side.item))
        piece = _swizzled(builder, window, self.line, column)
        place = builder.add(builder.mul(self.line, L.I32(window.bytes)), builder.mul(piece, L.I32(wgmma.PIECE)))
        self.into = builder.add(into, place)

    def first(self, row: L.Value) -> L.Value:
        """The first pixel of a run, for a tile that begins at an output; it may lie outside the array."""
        frame = replace(self.frame, variables={**self.frame.variables, ROWS: row}, cache={})
        return self.builder.add(M.index(frame, self.window.pixel), L.I32(self.window.first))

    def all(self, first: L.Value, chunk: L.Value, stage: L.Value) -> None:
        """Starts all copies of a run."""
        for number in range(self.count):
            self.start(first, chunk, stage, L.I32(number), None)

    def part(
        self, first: L.Value, chunk: L.Value, stage: L.Value, slot: L.Value, slots: int, where: L.Value
    ) -> Iterator[None]:
        """Starts the copies of one of ``slots`` slots of a run, one at a time (none beyond the last)."""
        each = -(-self.count // slots)
        start = self.builder.mul(slot, L.I32(each)) if each > 1 else slot
        for number in range(each):
            self.start(first, chunk, stage, self.builder.add(start, L.I32(number)) if number else start, where)
            yield

    def start(self, first: L.Value, chunk: L.Value, stage: L.Value, number: L.Value, where: L.Value | None) -> None:
        """Starts this thread's copy, the given number of lines further on; predicated by the run's end and
        ``where``.
        """
        builder, window = self.builder, self.window
        item, far = window.side.item, builder.mul(number, L.I32(self.abreast))
        line = builder.add(self.line, far)
        inside = builder.icmp_unsigned("<", line, L.I32(self.span))
        where = inside if where is None else builder.and_(where, inside)
        pixel = builder.add(first, line)
        live = builder.icmp_unsigned("<", pixel, L.I32(window.pixels))
        channel = builder.add(self.channel, builder.mul(chunk, L.I32(window.channels_per_tile)))
        if window.channels % window.channels_per_tile:
            live = builder.and_(live, builder.icmp_signed("<", channel, L.I32(window.channels)))
        place = builder.add(builder.mul(pixel, L.I32(window.stride)), channel)
        if window.begin:
            place = builder.add(place, L.I32(window.begin))
        source = builder.mul(builder.sext(place, L.I64), L.I64(item))
        source = builder.add(self.frame.pointers[window.side.buffer], source)
        target = builder.add(builder.add(self.into, stage), builder.mul(far, L.I32(window.bytes)))
        ptx_mma.cp_async(builder, (target, 0), (source, 0), wgmma.PIECE, live, where)


class HaloFragments:
    """A fragments of one warp's rows (16 of every 64) at the pixels of the current tap (``ldmatrix``)."""

    def __init__(self, frame: M.Frame, window: ConvWindow, tiles: int, into: L.Value, zeros: L.Value) -> None:
        """Args: tiles: of 64 rows; into: address of the first run; zeros: of a line of zeros."""
        self.builder, self.frame, self.window, self.tiles = frame.builder, frame, window, tiles
        self.into, self.zeros = into, zeros
        self.lines: list[L.Value] = []
        self.masks: list[L.Value | None] = []
        self.places: list[L.Value] = []

    def begin(self, tile: L.Value, warp: L.Value, lane: L.Value) -> None:
        """Computes the line addresses of a tile. Args: tile: its first output; warp: first row of the warp in it."""
        builder, window = self.builder, self.window
        start = self._at(tile, 0)
        self.half = builder.lshr(lane, L.I32(4))
        row = builder.add(builder.add(tile, warp), builder.and_(lane, L.I32(15)))
        self.lines, self.masks = [], []
        for number in range(self.tiles):
            mine = builder.add(row, L.I32(number * wgmma.ROWS)) if number else row
            last = L.I32(window.rows - 1)
            mine = builder.select(builder.icmp_signed("<", mine, last), mine, last)
            self.lines.append(builder.sub(self._at(mine, 0), start))
            self.masks.append(self._mask(mine))

    def _at(self, row: L.Value, tap: int) -> L.Value:
        return M.index(self._frame(row, tap), Index(0, self.window.pixel.terms))

    def _frame(self, row: L.Value, tap: int) -> M.Frame:
        where = {**self.frame.variables, ROWS: row, K: L.I32(tap * self.window.channels)}
        return replace(self.frame, variables=where, cache={})

    def _mask(self, row: L.Value) -> L.Value | None:
        """Bit mask of the taps of an output that lie inside the image; None if all always do."""
        builder, total = self.builder, None
        for tap in range(self.window.taps):
            inside = M.condition(self._frame(row, tap), self.window.side.guards)
            if inside is None:
                return None
            bit = builder.select(inside, L.I32(1 << tap if tap < 31 else -(1 << 31)), L.I32(0))
            total = bit if total is None else builder.or_(total, bit)
        return total

    def select_tap(self, tap: L.Value, stage: L.Value) -> None:
        """Moves to the tap at the given byte offset in the run."""
        builder, window = self.builder, self.window
        offset = builder.mul(builder.urem(tap, L.I32(window.across)), L.I32(window.aside))
        if window.across < window.taps:
            down = builder.mul(builder.udiv(tap, L.I32(window.across)), L.I32(window.down))
            offset = builder.add(offset, down)
        base = builder.add(self.into, stage)
        self.places = []
        for line, mask in zip(self.lines, self.masks, strict=True):
            mine = builder.add(line, offset)
            piece = _swizzled(builder, window, mine, self.half)
            place = builder.add(builder.mul(mine, L.I32(window.bytes)), builder.shl(piece, L.I32(4)))
            place = builder.add(base, place)
            if mask is not None:
                there = builder.and_(builder.lshr(mask, tap), L.I32(1))
                place = builder.select(builder.icmp_signed("!=", there, L.I32(0)), place, self.zeros)
            self.places.append(place)

    def read(self, stage: L.Value, step: int) -> list[list[L.Value]]:
        """Fragment registers per 64 rows of the warpgroup, of one k-step of the tap; see `OperandFragments`."""
        builder = self.builder
        inside = step * ptx_mma.STEP
        places = [builder.xor(place, L.I32(inside)) if inside else place for place in self.places]
        return [ptx_mma.ldmatrix_x4(builder, place, 0) for place in places]

"""K/V tiles of flash attention: ``cp.async`` loader (global to shared) and fragment reader.

The tiles' lines are as the operands lie in memory.  The score accumulators become the A operand of the second GEMM
without moving between lanes: of float32, k ``t`` of eight is key ``2t``, k ``t + 4`` key ``2t + 1``, and values are
read in that order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

from jcuts.codegen.cuda.attention.masked_tiles import unless
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.attention import Operand
from jcuts.schedule.gpu.attention.tile import EIGHT, FOUR, SIXTEEN, STEP, FlashTile

WORD = 4
"""Bytes of a register."""
WIDEST = 16
"""Bytes of the widest copy, or of what a lane hands over at once."""


class CopyShape(Protocol):
    """Lines of a tile in shared memory, and the threads that copy them."""

    @property
    def keys(self) -> int:
        """Lines of the tile."""
        ...

    @property
    def threads(self) -> int:
        """Threads of the block."""
        ...

    def line(self, operand: Operand) -> int:
        """Elements of a line, zero padding included."""
        ...

    def pitch(self, operand: Operand) -> int:
        """Bytes from one line to the next."""
        ...


@dataclass(frozen=True, eq=False)
class _Piece:
    """One copy of a thread: addresses of the first tile, byte strides per tile, and predicates.

    Attributes:
        source: global address of the first tile's element.
        constant: bytes to add to it.
        into: shared-memory address.
        moved: bytes to add to it.
        line: its key in the tile.
        above: keys to add.
        inside: whether it is no padding.
        condition: whether the thread has it; None if all have.
    """

    source: L.Value
    constant: int
    into: L.Value
    moved: int
    line: L.Value
    above: int
    inside: L.Value | None
    condition: L.Value | None


class TileCopier:
    """Copies tiles of keys or of values into shared memory (``cp.async``)."""

    def __init__(
        self, frame: M.Frame, shape: CopyShape, operand: Operand, thread: L.Value, shared: L.Value, first: int
    ) -> None:
        """Args: shared: address of the first stage; first: bytes before the tile in a stage."""
        self.builder, self.shape, self.operand = frame.builder, shape, operand
        self.pieces = self._find(frame, thread, self.builder.add(shared, L.I32(first)))

    def _find(self, frame: M.Frame, thread: L.Value, shared: L.Value) -> list[_Piece]:
        builder, shape, operand = self.builder, self.shape, self.operand
        item, width, pitch = operand.item, operand.width, shape.pitch(operand)
        length = shape.line(operand)
        along = length // width
        count, threads = shape.keys * along, shape.threads
        base = _base(frame, operand)
        found: list[_Piece] = []
        for number in range(-(-count // threads)):
            begin = number * threads
            whole = begin + threads <= count
            condition = None if whole else builder.icmp_unsigned("<", thread, L.I32(count - begin))
            if number and threads % along == 0:
                lines = begin // along
                far = found[0].constant + lines * operand.step * item
                more = replace(found[0], constant=far, moved=lines * pitch, above=lines, condition=condition)
                found.append(more)
                continue
            piece = builder.add(thread, L.I32(begin)) if begin else thread
            line, column = builder.udiv(piece, L.I32(along)), builder.urem(piece, L.I32(along))
            column = builder.mul(column, L.I32(width))
            place = builder.add(builder.mul(line, L.I32(operand.step)), column)
            source = builder.add(base, builder.mul(builder.sext(place, L.I64), L.I64(item)))
            into = builder.add(builder.mul(line, L.I32(pitch)), builder.mul(column, L.I32(item)))
            inside = None
            if length > operand.length:
                inside = builder.icmp_unsigned("<", column, L.I32(operand.length))
            found.append(_Piece(source, 0, builder.add(shared, into), 0, line, 0, inside, condition))
        return found

    def start(self, tile: L.Value, stage: L.Value) -> None:
        """Starts the copies of a tile, zeros for keys beyond the last. Args: stage: bytes into the ring."""
        builder, shape, operand = self.builder, self.shape, self.operand
        first = builder.mul(tile, L.I32(shape.keys))
        offset = builder.mul(builder.sext(first, L.I64), L.I64(operand.step * operand.item))
        left = builder.sub(L.I32(operand.extent), first)
        for piece in self.pieces:
            live = piece.inside
            if operand.extent % shape.keys:
                line = builder.add(piece.line, L.I32(piece.above)) if piece.above else piece.line
                there = builder.icmp_signed("<", line, left)
                live = there if live is None else builder.and_(live, there)
            target = (builder.add(piece.into, stage), piece.moved)
            source = (builder.add(piece.source, offset), piece.constant)
            ptx_mma.cp_async(builder, target, source, operand.width * operand.item, live, piece.condition)

    def round(self, stage: L.Value) -> None:
        """Rounds what this thread has copied into a stage to TF32, in place."""
        builder, words = self.builder, self.operand.width
        for piece in self.pieces:
            place = builder.add(piece.into, stage)
            if piece.condition is None:
                self._rounded(place, piece.moved, words)
            else:
                with builder.if_then(piece.condition):
                    self._rounded(place, piece.moved, words)

    def words(self, stage: L.Value) -> list[L.Value]:
        """The words that this thread has copied into a stage; 0 where it has copied nothing."""
        builder, count = self.builder, self.operand.width * self.operand.item // WORD
        found: list[L.Value] = []
        for piece in self.pieces:
            place = builder.add(piece.into, stage)
            read = functools.partial(_words, builder, place, piece.moved, count)
            if piece.condition is None:
                found += read()
            else:
                found += unless(builder, builder.not_(piece.condition), [L.I32(0)] * count, read)
        return found

    def _rounded(self, place: L.Value, moved: int, words: int) -> None:
        builder = self.builder
        found = _words(builder, place, moved, words)
        ptx_mma.write_words(builder, place, moved, [ptx_mma.to_tf32(builder, w) for w in found])


def _words(builder: GpuBuilder, place: L.Value, moved: int, count: int) -> list[L.Value]:
    if count == 1:
        return [ptx_mma.ld_shared_b32(builder, place, moved)]
    return ptx_mma.read_words(builder, place, moved, count)


def _base(frame: M.Frame, operand: Operand) -> L.Value:
    """Address (i64) of a head's first query, key or value."""
    builder = frame.builder
    place = builder.sext(M.index(frame, operand.base), L.I64)
    return builder.add(frame.pointers[operand.buffer], builder.mul(place, L.I64(operand.item)))


def queries(frame: M.Frame, shape: FlashTile, row: L.Value, lane: L.Value) -> list[list[list[L.Value]]]:
    """A warp's fragments of the queries [16 rows][step][4 registers]; rows beyond the last are clamped to it, lower
    halves that hold no row (`FlashTile.lane_rows`) are 0.

    Args: row: the warp's first one.
    """
    builder, operand = frame.builder, shape.attention.query
    base = _base(frame, operand)
    words = operand.length * operand.item // WORD
    term = builder.and_(lane, L.I32(3))
    last = L.I32(operand.extent - 1)
    found = []
    for first in range(0, shape.warp[0], SIXTEEN):
        sources = []
        for half in range(0, EIGHT * shape.lane_rows, EIGHT):
            mine = builder.add(builder.add(row, builder.lshr(lane, L.I32(2))), L.I32(first + half))
            if operand.extent % shape.rows:
                mine = builder.select(builder.icmp_signed("<", mine, last), mine, last)
            place = builder.mul(builder.sext(mine, L.I64), L.I64(operand.step * operand.item))
            place = builder.add(place, builder.sext(builder.mul(term, L.I32(WORD)), L.I64))
            sources.append(builder.add(base, place))
        steps = []
        for step in range(shape.steps):
            fragment = []
            for four in (0, FOUR):
                word = step * STEP // WORD + four
                for half in range(2):
                    if word >= words or half >= len(sources):
                        fragment.append(L.I32(0))
                        continue
                    (value,) = ptx_mma.load_words(builder, (sources[half], WORD * word), 1, None)
                    fragment.append(ptx_mma.to_tf32(builder, value) if operand.item == WORD else value)
            steps.append(fragment)
        found.append(steps)
    return found


class LineReader:
    """Reads a warp's fragments of a tile in shared memory whose lines are columns of one product, or terms of another.

    Of A operands the lines are rows.
    """

    def __init__(
        self, builder: GpuBuilder, first: L.Value, pitch: int, item: int, lane: L.Value, *, rounded: bool
    ) -> None:
        """Args: first: address of the warp's first line; pitch: bytes of a line; rounded: whether it holds TF32
        numbers.
        """
        self.builder, self.pitch, self.item, self.rounded = builder, pitch, item, rounded
        low = builder.and_(lane, L.I32(7))
        eight = builder.and_(builder.lshr(lane, L.I32(3)), L.I32(1))
        sixteen = builder.lshr(lane, L.I32(4))
        self.column = self._place(first, builder.add(low, builder.shl(sixteen, L.I32(3))), eight, WIDEST)
        self.row = self._place(first, builder.add(low, builder.shl(eight, L.I32(3))), sixteen, WIDEST)
        if item == WORD:
            line = builder.mul(builder.and_(lane, L.I32(3)), L.I32(2))
            self.term = self._place(first, line, builder.mul(builder.lshr(lane, L.I32(2)), L.I32(2)), item)
        else:
            self.term = self._place(
                first, builder.add(low, builder.shl(eight, L.I32(3))), builder.mul(sixteen, L.I32(EIGHT)), item
            )

    def _place(self, first: L.Value, line: L.Value, column: L.Value, size: int) -> L.Value:
        builder = self.builder
        place = builder.add(builder.mul(line, L.I32(self.pitch)), builder.mul(column, L.I32(size)))
        return builder.add(first, place)

    def rows(self, sixteen: int, step: int) -> list[L.Value]:
        """Four registers of 16 rows, of one step along the lines (A operand)."""
        offset = sixteen * SIXTEEN * self.pitch + step * STEP
        return self._units(ptx_mma.ldmatrix_x4(self.builder, self.row, offset, transposed=False))

    def columns(self, stage: L.Value, sixteen: int, step: int) -> list[list[L.Value]]:
        """Two registers per 8 of 16 columns, of one step along the lines."""
        offset = sixteen * SIXTEEN * self.pitch + step * STEP
        words = ptx_mma.ldmatrix_x4(self.builder, self.builder.add(self.column, stage), offset, transposed=False)
        words = self._units(words)
        return [words[:2], words[2:]]

    def terms(self, stage: L.Value, first: int, column: int) -> list[list[L.Value]]:
        """Two registers per 8 features of 16, of a step of 8 (float32) or 16 lines from ``first`` on.

        Features of float32 take turns: even ones of 16, odd ones.
        """
        place, offset = self.builder.add(self.term, stage), first * self.pitch + column * self.item
        if self.item == WORD:
            near = ptx_mma.read_pair(self.builder, place, offset)
            far = ptx_mma.read_pair(self.builder, place, offset + self.pitch)
            words = self._units([near[0], far[0], near[1], far[1]])
        else:
            words = ptx_mma.ldmatrix_x4(self.builder, place, offset, transposed=True)
        return [words[:2], words[2:]]

    def _units(self, words: list[L.Value]) -> list[L.Value]:
        if self.item != WORD or self.rounded:
            return words
        return [ptx_mma.to_tf32(self.builder, w) for w in words]

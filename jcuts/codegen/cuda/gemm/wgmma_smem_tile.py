"""Swizzled (128B) shared-memory tile for ``wgmma``, and loaders that round float32 to TF32 or transpose on the way.

``wgmma`` truncates float32 operands that it reads from shared memory, so threads take them through registers: load,
round to nearest, store one k-tile later (`Tf32RoundingLoader`).  It reads float32 K-major only: where neighbours in
memory are rows, threads load squares of 4x4 elements and store them transposed (`TransposingLoader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jcuts.codegen.cuda.gemm.smem_tile import SmemTile, ThreadCopy, TileLoader
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import COLUMNS

SQUARE = 4  # words of a piece
SPAN = 32  # rows, and terms, of a warp's squares


@dataclass(frozen=True)
class WgmmaSmemTile(SmemTile):
    """A tile in the 128B-swizzled layout of `codegen.cuda.ptx.wgmma`: its k fill one 128-byte line, or several (its
    *parts*).
    """

    @property
    def by_terms(self) -> bool:
        """Whether a line holds k of one row (K-major); else it holds 64 rows of one k (16-bit types only)."""
        return self.side.along_terms or self.side.item == 4

    @property
    def is_transposed(self) -> bool:
        """Whether lines in shared memory run across those in global memory."""
        return self.by_terms and not self.side.along_terms

    @property
    def pitch(self) -> int:
        """Bytes of a line."""
        return wgmma.LINE

    @property
    def scalar_fragments(self) -> bool:
        """Never: ``wgmma`` reads it by descriptor."""
        return False

    @property
    def part(self) -> int:
        """Bytes of one line of k for all rows."""
        return self.size * wgmma.LINE

    @property
    def block(self) -> int:
        """Byte offset from 64 rows to the next 64."""
        return (wgmma.ROWS if self.by_terms else self.terms) * wgmma.LINE

    @property
    def bytes(self) -> int:
        """Bytes of the tile in shared memory."""
        parts = self.terms * self.side.item // wgmma.LINE
        return parts * self.part if self.by_terms else -(-self.size // wgmma.ROWS) * self.block

    @property
    def n_tiles_per_lane_group(self) -> int:
        """Tiles of 8 columns whose columns are interleaved, so that a lane's results are that many contiguous pairs."""
        if self.side.outer != COLUMNS or not self.by_terms:
            return 1
        return 4 if self.side.item == 2 and self.warp % 32 == 0 else 2 if self.warp % 16 == 0 else 1

    @property
    def m_fragment_stride(self) -> int:
        """Row offset between consecutive fragments of a warp's results."""
        return wgmma.ROWS

    def step(self, number: int) -> int:
        """Byte offset of a k-step."""
        if not self.by_terms:
            return number * (ptx_mma.STEP // self.side.item) * wgmma.LINE
        part, inside = divmod(number * ptx_mma.STEP, wgmma.LINE)
        return part * self.part + inside

    def place(self, builder: GpuBuilder, line: L.Value, column: L.Value) -> L.Value:
        """Byte offset in the tile of an element of a line."""
        byte = builder.mul(column, L.I32(self.side.item))
        if self.n_tiles_per_lane_group > 1:
            line = self._turn(builder, line)
        piece = builder.xor(builder.lshr(byte, L.I32(4)), line)
        found = builder.add(builder.mul(line, L.I32(wgmma.LINE)), builder.shl(builder.and_(piece, L.I32(7)), L.I32(4)))
        if self.side.width * self.side.item < wgmma.PIECE:
            found = builder.add(found, builder.and_(byte, L.I32(wgmma.PIECE - 1)))
        if not self.by_terms or self.terms * self.side.item > wgmma.LINE:
            far = self.part if self.by_terms else self.block
            found = builder.add(found, builder.mul(builder.lshr(byte, L.I32(7)), L.I32(far)))
        return found

    def moved(self, lines: int) -> int | None:
        """Byte offset of a shift by some lines; None if it depends on the position (swizzle)."""
        return lines * wgmma.LINE if lines % (8 * self.n_tiles_per_lane_group) == 0 else None

    def square_line(self, row: int) -> int:
        """Lines from the first of four neighbouring columns (of a 4x4 square) to another."""
        return row if self.n_tiles_per_lane_group == 1 else 8 * (row >> 1) + (row & 1)

    def _turn(self, builder: GpuBuilder, line: L.Value) -> L.Value:
        """Line of a column where 8-column tiles are interleaved: 8 * t + 2 * q + e for column 2 * beside * q + 2 * t +
        e.
        """
        bits = self.n_tiles_per_lane_group.bit_length() - 1
        tile = builder.and_(builder.lshr(line, L.I32(1)), L.I32(self.n_tiles_per_lane_group - 1))
        pair = builder.and_(builder.lshr(line, L.I32(1 + bits)), L.I32(3))
        found = builder.add(builder.shl(tile, L.I32(3)), builder.shl(pair, L.I32(1)))
        return builder.or_(found, builder.and_(line, L.I32(~(8 * self.n_tiles_per_lane_group - 1) | 1)))

    def words(self, threads: int) -> int:
        """Registers of a thread's part of a float32 tile."""
        return (
            -(-self.size * self.terms // (SQUARE * SQUARE * threads)) * SQUARE * SQUARE
            if self.is_transposed
            else (-(-self.pieces // threads) * self.side.width)
        )


Wanted = tuple[tuple[L.Value, int], L.Value | None, L.Value | None]
"""What a thread asks for at once: global address (register, bytes to add), whether it is there, whether it asks."""


class Tf32RoundingLoader(TileLoader):
    """Loads float32 tiles through registers and rounds them to TF32 (``cvt.rna.tf32.f32``)."""

    shape: WgmmaSmemTile
    ordered = False
    """Whether no load is issued before a barrier that comes first (`load_words`)."""

    def load(self, first: L.Value, left: L.Value) -> list[L.Value]:
        """Issues the global loads of one tile. Args and zeros as of `TileLoader.start`. Returns: words of this
        thread.
        """
        builder, found = self.builder, []
        for source, live, condition in self.wanted(first, left):
            if condition is not None:
                live = condition if live is None else builder.and_(live, condition)
            found += ptx_mma.load_words(builder, source, self.shape.side.width, live, ordered=self.ordered)
        return found

    def wanted(self, first: L.Value, left: L.Value) -> Iterator[Wanted]:
        """The accesses of one tile."""
        for piece, source, live in self.sources(first, left):
            yield (source, piece.constant), live, piece.condition

    def store(self, words: list[L.Value], stage: L.Value) -> None:
        """Rounds the words of a tile and stores them in a stage of shared memory (byte offset from the first)."""
        width = self.shape.side.width
        rounded = [ptx_mma.to_tf32(self.builder, w) for w in words]
        for number, piece in enumerate(self.places):
            target = self.builder.add(piece.into, stage)
            mine = rounded[width * number : width * (number + 1)]
            ptx_mma.write_words(self.builder, target, piece.moved, mine, piece.condition)


class TransposingLoader(Tf32RoundingLoader):
    """The same for M/N-major operands: K-major after a 4x4 transpose in registers.

    Lanes of a warp: 8 squares side by side, 4 along K; so that loads are whole lines and stores have no bank conflicts.
    """

    def _find(self, threads: int, thread: L.Value, start: L.Value, shared: L.Value) -> None:
        builder, shape, side = self.builder, self.shape, self.shape.side
        digits = [builder.and_(builder.lshr(thread, L.I32(bit)), L.I32(1)) for bit in (0, 3, 4)]
        if shape.n_tiles_per_lane_group > 1:  # squares that differ in bit 1 lie half the banks apart
            digits = [digits[1], digits[0], digits[2]]
        beside = builder.or_(builder.shl(digits[2], L.I32(2)), builder.or_(builder.shl(digits[1], L.I32(1)), digits[0]))
        near = builder.and_(builder.lshr(thread, L.I32(1)), L.I32(3))
        total = shape.size * shape.terms // SQUARE**2
        across = shape.terms // (SQUARE * SQUARE)  # warps side by side along the terms: a power of two
        for number in range(-(-total // threads)):
            first = number * threads
            condition = None if first + threads <= total else builder.icmp_unsigned("<", thread, L.I32(total - first))
            far = first // (across * SPAN) * SPAN
            if number and shape.extent % shape.size == 0:
                known = self.places[0]
                far_bytes = known.constant + far * side.item
                self.places.append(replace(known, constant=far_bytes, moved=far * wgmma.LINE, condition=condition))
                continue
            rest = builder.lshr(thread, L.I32(5))
            chunk = builder.add(builder.shl(builder.and_(rest, L.I32(across - 1)), L.I32(2)), near)
            row = builder.lshr(rest, L.I32(across.bit_length() - 1))
            row = builder.add(builder.shl(row, L.I32(3)), beside)
            row = builder.add(builder.mul(row, L.I32(SQUARE)), L.I32(far))
            term = builder.mul(chunk, L.I32(SQUARE))
            into = builder.add(shared, shape.place(builder, row, term))
            outer = self._inside(builder.add(start, row))
            constant = side.outer_offset.const * side.item
            self.places.append(ThreadCopy(self._source(outer, term), constant, into, 0, outer, term, condition))

    def wanted(self, first: L.Value, left: L.Value) -> Iterator[Wanted]:
        """Accesses of every 4x4 square: its lines of rows, one per k."""
        side = self.shape.side
        alive: dict[tuple[L.Value, int], L.Value] = {}
        for piece, source, _ in self.sources(first, left):
            for line in range(SQUARE):
                live = self._line_exists(alive, piece.term, line, left)
                yield (source, piece.constant + line * side.step * side.item), live, piece.condition

    def _line_exists(
        self, alive: dict[tuple[L.Value, int], L.Value], term: L.Value, line: int, left: L.Value
    ) -> L.Value | None:
        """Whether a square's line is one of the ``left`` k; None: always. Args: alive: conditions made before."""
        if not self.shape.ragged:
            return None
        key = (term, line)
        if key not in alive:
            alive[key] = self.builder.icmp_signed("<", self.builder.add(term, L.I32(line)), left)
        return alive[key]

    def store(self, words: list[L.Value], stage: L.Value) -> None:
        """Rounds the words of a tile and stores them, transposed, in a stage of shared memory."""
        builder = self.builder
        rounded = [ptx_mma.to_tf32(builder, w) for w in words]
        for number, piece in enumerate(self.places):
            target = builder.add(piece.into, stage)
            square = rounded[SQUARE * SQUARE * number : SQUARE * SQUARE * (number + 1)]
            for row in range(SQUARE):  # pieces of the lines of neighbouring rows
                line = self.shape.square_line(row)
                place = builder.xor(target, L.I32((line & 7) << 4)) if line & 7 else target
                offset = piece.moved + line * wgmma.LINE
                ptx_mma.write_words(builder, place, offset, square[row::SQUARE], piece.condition)

"""One GEMM operand: ``cp.async`` tile loader, padded shared-memory layout, ``ldmatrix``/``ld.shared`` fragment reader.

A tile lies in shared memory as the operand lies in memory: K-major (lines along K, one per row or column) or M/N-major
(lines of rows, one per k).  Lines are padded so that a warp's reads have no bank conflicts.

Ragged sizes: rows beyond the operand's last one are clamped to it (their results are never stored); k beyond the last
become zeros in both operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.lower.patterns.gemm import GemmOperand, K

PAIR = 2  # neighbouring elements that a lane takes from a line of rows


@dataclass(frozen=True)
class SmemTile:
    """Shared-memory tile of one operand.

    Attributes:
        side: the operand (`lower.patterns.gemm`).
        extent: rows (or columns) of the whole operand.
        size: rows (or columns) of the block's tile.
        terms: k per tile.
        warp: rows (or columns) of one warp.
        first: byte offset of the tile in a stage of shared memory.
        ragged: whether the last k-tile is not full.
        apart: whether the k of one tile may lie in several runs of the operand (several taps of a convolution).
    """

    side: GemmOperand
    extent: int
    size: int
    terms: int
    warp: int
    first: int = 0
    ragged: bool = False
    apart: bool = False

    @property
    def lines(self) -> int:
        """Lines of the tile in shared memory."""
        return self.size if self.side.along_terms else self.terms

    @property
    def length(self) -> int:
        """Elements of a line."""
        return self.terms if self.side.along_terms else self.size

    @property
    def pitch(self) -> int:
        """Bytes from one line to the next: 16 more than a multiple of 32 words for matrices, 32 for single words."""
        words = 8 if self.scalar_fragments else 4
        length = self.length * self.side.item // 4
        return 4 * (length + (words - length) % (32 if self.scalar_fragments else 8))

    @property
    def scalar_fragments(self) -> bool:
        """Whether fragments are read word by word (M/N-major float32), not by ``ldmatrix``."""
        return not self.side.along_terms and self.side.item == 4

    @property
    def bytes(self) -> int:
        """Bytes of the tile in shared memory."""
        return self.lines * self.pitch

    @property
    def pieces(self) -> int:
        """Number of copies that fill the tile."""
        return self.lines * (self.length // self.side.width)

    @property
    def n_tiles_per_lane_group(self) -> int:
        """Tiles of 8 columns whose columns are interleaved, so that a lane's results are contiguous."""
        return 2 if self.scalar_fragments else 1

    @property
    def m_fragment_stride(self) -> int:
        """Row offset between consecutive fragments of a warp's results."""
        return 16

    def place(self, builder: GpuBuilder, line: L.Value, column: L.Value) -> L.Value:
        """Byte offset in the tile of an element of a line."""
        return builder.add(builder.mul(line, L.I32(self.pitch)), builder.mul(column, L.I32(self.side.item)))

    def moved(self, lines: int) -> int | None:
        """Byte offset of a shift by some lines; None if it depends on the position (swizzle)."""
        return lines * self.pitch


@dataclass(frozen=True, eq=False)
class ThreadCopy:
    """One asynchronous copy (``cp.async``) of a thread.

    Attributes:
        source: global address of the first k-tile's element (i64).
        constant: bytes to add to it.
        into: shared-memory address (i32).
        moved: bytes to add to it.
        outer: its row (or column) in the operand (i32).
        term: its first k in the tile (i32).
        condition: whether the thread has this copy; None if all have.
    """

    source: L.Value
    constant: int
    into: L.Value
    moved: int
    outer: L.Value
    term: L.Value
    condition: L.Value | None


class TileLoader:
    """Copies the k-tiles of one operand; a thread has the same elements of every tile.

    Attributes:
        cached: whether 16-byte copies go through the L1 cache (``cp.async.ca`` instead of ``.cg``).
    """

    cached = False

    def __init__(
        self, frame: M.Frame, shape: SmemTile, threads: int, thread: L.Value, start: L.Value, shared: L.Value
    ) -> None:
        """Args: start: the block's first row (or column)."""
        self.builder, self.frame, self.shape = frame.builder, frame, shape
        self.places: list[ThreadCopy] = []
        self._find(threads, thread, start, self.builder.add(shared, L.I32(shape.first)))

    def _find(self, threads: int, thread: L.Value, start: L.Value, shared: L.Value) -> None:
        """Computes the thread's copy addresses; ``shared``: address of the tile in the first stage."""
        builder, shape, side = self.builder, self.shape, self.shape.side
        along = shape.length // side.width
        for number in range(-(-shape.pieces // threads)):
            first = number * threads
            full = first + threads <= shape.pieces
            condition = None if full else builder.icmp_unsigned("<", thread, L.I32(shape.pieces - first))
            known = self._moved(first // along) if number and threads % along == 0 else None
            if known is not None:
                self.places.append(replace(known, condition=condition))
                continue
            piece = builder.add(thread, L.I32(first)) if first else thread
            line, column = builder.udiv(piece, L.I32(along)), builder.urem(piece, L.I32(along))
            column = builder.mul(column, L.I32(side.width))
            into = builder.add(shared, shape.place(builder, line, column))
            outer, term = (line, column) if side.along_terms else (column, line)
            outer = self._inside(builder.add(start, outer))
            constant = side.outer_offset.const * side.item
            self.places.append(ThreadCopy(self._source(outer, term), constant, into, 0, outer, term, condition))

    def _moved(self, lines: int) -> ThreadCopy | None:
        """The first copy shifted by some lines, where its address shifts by a constant."""
        shape, piece = self.shape, self.places[0]
        side, moved = shape.side, shape.moved(lines)
        if moved is None:
            return None
        if not side.along_terms:
            term = self.builder.add(piece.term, L.I32(lines))
            far = piece.constant + lines * side.step * side.item
            return replace(piece, constant=far, moved=moved, term=term)
        step = side.index.stride(side.outer)
        if step is None or side.guards or shape.extent % shape.size:
            return None
        return replace(piece, constant=piece.constant + lines * step * side.item, moved=moved)

    def _inside(self, outer: L.Value) -> L.Value:
        """A row (or the first of a few columns) that there is."""
        shape, builder = self.shape, self.builder
        if shape.extent % shape.size == 0:
            return outer
        last = L.I32(shape.extent - (1 if shape.side.along_terms else shape.side.width))
        return builder.select(builder.icmp_signed("<", outer, last), outer, last)

    def _at(self, outer: L.Value | None, term: L.Value) -> M.Frame:
        """Frame with rows, columns and k set to these values."""
        side, frame = self.shape.side, self.frame
        variables = {**frame.variables, K: term, **({} if outer is None else {side.outer: outer})}
        return replace(frame, variables=variables, cache={})

    def _source(self, outer: L.Value, term: L.Value) -> L.Value:
        """Address (i64) of an element of the first tile, without the constant part of its index."""
        builder, side = self.builder, self.shape.side
        place = M.index(self._at(outer, term), Index(0, side.outer_offset.terms))
        place = builder.add(place, builder.mul(term, L.I32(side.step)))
        return builder.add(self.frame.pointers[side.buffer], _bytes(builder, place, side.item))

    def start(self, first: L.Value, stage: L.Value, left: L.Value) -> None:
        """Issues the copies of one tile.

        Args: first: its first k in the block's split; stage: bytes into shared memory; left: k from it on (i32).
        """
        for _ in self.copies(first, stage, left):
            pass

    def copies(self, first: L.Value, stage: L.Value, left: L.Value, where: L.Value | None = None) -> Iterator[None]:
        """Issues the copies of a tile, one at a time.

        Args: as of `start`; where: a condition under which it reads, else it writes zeros.
        """
        builder, size = self.builder, self.shape.side.width * self.shape.side.item
        for piece, source, live in self.sources(first, left):
            target = builder.add(piece.into, stage)
            if where is not None:
                live = where if live is None else builder.and_(live, where)
            places = (target, piece.moved), (source, piece.constant)
            ptx_mma.cp_async(builder, *places, size, live, piece.condition, self.cached)
            yield

    @property
    def has_constant_stride(self) -> bool:
        """Whether consecutive k-tiles lie a constant address distance apart."""
        side = self.shape.side
        return side.index.stride(K) is not None and not side.guards

    def shared_address_loader(self, first: L.Value, left: L.Value) -> Callable[[int, int], None]:
        """A loader for several tiles at once that computes their addresses once.

        Args: as of `start`. Returns: a function of a tile's number and of its place in shared memory [B].
        """
        builder, shape = self.builder, self.shape
        side, size = shape.side, shape.side.width * shape.side.item
        far = (side.index.stride(K) or 0) * shape.terms * side.item
        places = [(piece, builder.add(source, L.I64(piece.constant))) for piece, source, _ in self.sources(first, left)]
        alive: dict[tuple[L.Value, int], L.Value] = {}

        def start(number: int, stage: int) -> None:
            for piece, source in places:
                key = piece.term, number
                if shape.ragged and key not in alive:
                    term = builder.add(piece.term, L.I32(number * shape.terms)) if number else piece.term
                    alive[key] = builder.icmp_signed("<", term, left)
                target = piece.into, piece.moved + stage
                ptx_mma.cp_async(
                    builder, target, (source, number * far), size, alive.get(key), piece.condition, self.cached
                )

        return start

    def sources(self, first: L.Value, left: L.Value) -> Iterator[tuple[ThreadCopy, L.Value, L.Value | None]]:
        """Per copy of a tile: the global address without its constant, and its predicate (None: always)."""
        builder, shape = self.builder, self.shape
        side = shape.side
        offset = _bytes(builder, M.index(self._at(None, first), side.k_offset), side.item)
        alive: dict[L.Value, L.Value] = {}
        own: dict[L.Value, tuple[L.Value, L.Value]] = {}
        for piece in self.places:
            term = first
            if shape.apart:  # a thread's terms are all as many behind the first
                if piece.term not in own:
                    own[piece.term] = self._own(first, piece.term)
                term, offset = own[piece.term]
            live = M.condition(self._at(piece.outer, term), side.guards)
            if shape.ragged:
                if piece.term not in alive:
                    alive[piece.term] = builder.icmp_signed("<", piece.term, left)
                live = alive[piece.term] if live is None else builder.and_(live, alive[piece.term])
            yield piece, builder.add(piece.source, offset), live

    def _own(self, first: L.Value, behind: L.Value) -> tuple[L.Value, L.Value]:
        """First k of a copy, and its byte offset relative to one contiguous run of all k before it."""
        builder, side = self.builder, self.shape.side
        term = builder.add(first, behind)
        place = M.index(self._at(None, term), side.k_offset)
        place = builder.sub(place, builder.mul(behind, L.I32(side.step)))
        return term, _bytes(builder, place, side.item)


def _bytes(builder: GpuBuilder, place: L.Value, item: int) -> L.Value:
    return builder.mul(builder.sext(place, L.I64), L.I64(item))


class FragmentReader:
    """Reads a warp's fragments of one operand from shared memory."""

    def __init__(
        self,
        builder: GpuBuilder,
        shape: SmemTile,
        shared: L.Value,
        warp: L.Value,
        lane: L.Value,
        rounded: bool = False,
    ) -> None:
        """``warp``: the first row (or column) of the warp in the block's tile; ``rounded``: it holds TF32 numbers."""
        self.builder, self.shape, self.rounded = builder, shape, rounded
        left, pitch, item = shape.side.outer == "m", shape.pitch, shape.side.item
        low = builder.and_(lane, L.I32(7))
        eight = builder.and_(builder.lshr(lane, L.I32(3)), L.I32(1))
        sixteen = builder.lshr(lane, L.I32(4))
        if shape.scalar_fragments:
            line = builder.and_(lane, L.I32(3))
            column = builder.mul(builder.lshr(lane, L.I32(2)), L.I32(PAIR))
        elif shape.side.along_terms:  # matrices: rows, then terms, of the left operand; the other way of the right one
            row, term = (eight, sixteen) if left else (sixteen, eight)
            line = builder.add(low, builder.shl(row, L.I32(3)))
            column = builder.mul(term, L.I32(16 // item))
        else:
            row, term = (eight, sixteen) if left else (sixteen, eight)
            line = builder.add(low, builder.shl(term, L.I32(3)))
            column = builder.shl(row, L.I32(3))
        first = builder.mul(warp, L.I32(pitch if shape.side.along_terms else item))
        place = builder.add(builder.mul(line, L.I32(pitch)), builder.mul(column, L.I32(item)))
        self.place = builder.add(builder.add(shared, L.I32(shape.first)), builder.add(place, first))

    @property
    def steps(self) -> int:
        """k of one instruction."""
        return ptx_mma.STEP // self.shape.side.item

    def advance(self, terms: int) -> int:
        """Byte offset from one k to another in the tile."""
        return terms * (self.shape.side.item if self.shape.side.along_terms else self.shape.pitch)

    def read(self, stage: L.Value, term: int) -> list[list[L.Value]]:
        """Registers per 16 rows (left: 4 of one tile; right: 2 each of two tiles), rounded to the instruction's operand
        type.
        """
        builder, shape = self.builder, self.shape
        side, left = shape.side, shape.side.outer == "m"
        place, first = builder.add(self.place, stage), self.advance(term)
        found: list[list[L.Value]] = []
        for row in range(0, shape.warp, 16):
            offset = first + row * (shape.pitch if side.along_terms else side.item)
            if shape.scalar_fragments:
                near = ptx_mma.read_pair(builder, place, offset)
                far = ptx_mma.read_pair(builder, place, offset + 4 * shape.pitch)
                words = [*near, *far]
                words = words if left else [near[0], far[0], near[1], far[1]]
            else:
                words = ptx_mma.ldmatrix_x4(builder, place, offset, transposed=not side.along_terms)
            if side.item == 4 and not self.rounded:
                words = [ptx_mma.to_tf32(builder, w) for w in words]
            found += [words] if left else [words[:2], words[2:]]
        return found


def lane_rows(shape: SmemTile) -> tuple[int, list[list[int]]]:
    """Which rows of a warp's tile a lane's results belong to: (factor of ``lane / 4``, offsets per 16 rows)."""
    if shape.scalar_fragments:
        return PAIR, [[row, row + 1] for row in range(0, shape.warp, 16)]
    return 1, [[row, row + 8] for row in range(0, shape.warp, shape.m_fragment_stride)]


def lane_columns(shape: SmemTile) -> tuple[int, list[list[int]]]:
    """The same for columns: (factor of ``lane % 4``, offsets of the two results per tile of 8)."""
    if shape.scalar_fragments:  # tiles of even and of odd columns take turns
        return 2 * PAIR, [[group + odd, group + 2 + odd] for group in range(0, shape.warp, 16) for odd in (0, 1)]
    many = shape.n_tiles_per_lane_group
    pairs = [group + 2 * tile for group in range(0, shape.warp, 8 * many) for tile in range(many)]
    return 2 * many, [[first, first + 1] for first in pairs]

"""Copies of the skinny GEMM: ``cp.async`` of 16 bytes per lane into the ring of its warp, and ``mma`` fragments.

The order of k in an ``mma`` is free as long as both operands agree, that of W's columns is free, too.  So a lane
multiplies neighbouring elements as they lie, and no thread waits for another warp:

* x, and W[n, k]: lane ``4 g + t`` has the k of 16 bytes beginning at ``16 t`` bytes of row ``g``, which it has copied
  itself.  The first two words are what it gives to one ``mma``, the others to the next.
* W[k, n]: it has the columns of 16 bytes beginning at ``16 g`` bytes (or of 8), of the same k as x.  Neighbouring
  columns become rows ``g`` and ``g + 8`` of an ``mma``; of 16-bit elements ``prmt`` puts two k into a word.  Accesses
  of 16 bytes are coalesced by eight lanes, and eight neighbouring lanes of an ``mma`` have four k: so other lanes copy
  than multiply.  Lane ``8 t + c`` copies the ``c``-th 16 bytes of whole segments of rows; ``swizzled`` places let both
  the copies and the reads (``ld.shared``) of eight lanes touch all banks once, and ``bar.warp.sync`` stands between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.skinny_gemm.tile import WORDS
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import GemmOperand, K
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.machine import ACCESS
from jcuts.schedule.gpu.skinny_gemm.schedules import LANES, LINE_BYTES, M_TILE, N_TILE, WORD

Words = list[list[L.Value]]
"""Registers of a tile of k: [access of 16 bytes][4]."""
Place = tuple[L.Value, int]
"""An address: register, bytes to add."""
Terms = tuple[L.Value, L.Value]
"""First k of a block's slice of the product, and of a lane in the slice."""
Live = Callable[[int], "L.Value | None"]
"""Whether the k so many behind the lane's first one is there (None: always)."""
WHOLE_LINES = ".L2::128B"
"""Has the L2 cache read all of a line whose other part the next tile of k takes."""
HALVES = ("0x5410", "0x7632")
"""Selectors of ``prmt``: the lower halves of two words, the upper ones."""


class LaneCopies:
    """A lane's copies of one operand: tiles of k one behind the other.

    Attributes:
        term: the lane's first k in the block's slice.
        slot: address of the lane's place in the first access of its warp's ring.
        places: the address (register, bytes to add) of every group of accesses at the lane's first k.
        step: bytes from one k to the next.
        cached: whether the L1 cache keeps what is read, for the block's other warps.
    """

    def __init__(self, frame: M.Frame, side: GemmOperand, ks: Terms, slot: L.Value, *, cached: bool) -> None:
        """Args: ks: first k of the block's slice, the lane's in it."""
        self.builder, self.frame, self.side, self.cached = frame.builder, frame, side, cached
        self.step, self.size = side.step * side.item, side.width * side.item
        self.places: list[Place] = []
        self.term, self.slot = ks[1], slot
        first = self.builder.sext(self.builder.add(*ks), L.I64)
        self._skipped = self.builder.mul(first, L.I64(self.step))

    def address(self, outer: L.Value) -> L.Value:
        """Address (i64) of the lane's first k in a row (or column)."""
        builder, side = self.builder, self.side
        variables = {**self.frame.variables, K: L.I32(0), side.outer: outer}
        place = M.index(replace(self.frame, variables=variables, cache={}), side.outer_offset)
        place = builder.mul(builder.sext(place, L.I64), L.I64(side.item))
        return builder.add(builder.add(self.frame.pointers[side.buffer], place), self._skipped)

    def moved(self, terms: L.Value) -> list[Place]:
        """The places so many k (i32) further."""
        builder = self.builder
        far = builder.mul(builder.sext(terms, L.I64), L.I64(self.step))
        found: dict[L.Value, L.Value] = {}
        for register, _ in self.places:
            if register not in found:
                found[register] = builder.add(register, far)
        return [(found[register], constant) for register, constant in self.places]

    def accesses(self, places: Sequence[Place], first: int) -> Iterator[tuple[Place, int, int]]:
        """Of one tile: where an access reads at the lane's first k, its k behind that, and bytes into the ring's tile.

        Args: places: of its step (`moved`); first: k of the tile behind the lane's first one.
        """
        raise NotImplementedError

    def start(self, places: Sequence[Place], first: int, live: Live, target: Place) -> int:
        """Starts the copies of one tile. Returns: bytes of shared memory from the first access behind the last one.

        Args: as of `accesses`; target: of the first access.
        """
        for place, term, into in self.accesses(places, first):
            self._copy(place, term * self.step, live(term), (target[0], target[1] + into))
        return self.lines_of(places) * LINE_BYTES

    def lines_of(self, places: Sequence[Place]) -> int:
        """Accesses of a lane to a tile, each of `LINE_BYTES` of its warp."""
        raise NotImplementedError

    def _copy(self, place: Place, far: int, live: L.Value | None, target: Place) -> None:
        source = (place[0], place[1] + far)
        hint = "" if self.cached else WHOLE_LINES
        ptx_mma.cp_async(self.builder, target, source, self.size, live, cached=self.cached, hint=hint)


class KContiguousCopies(LaneCopies):
    """Of x, and of W[n, k]: 16 bytes along k of each of several rows (columns)."""

    def add_lines(self, first: L.Value, offsets: Sequence[int], extent: int, whole: bool) -> None:
        """Rows (columns) at offsets from a first one; beyond the last one it is read. Args: whole: there is none."""
        builder, stride = self.builder, self.side.index.stride(self.side.outer)
        base = self.address(first) if whole and stride is not None else None
        for offset in offsets:
            if base is not None and stride is not None:
                self.places.append((base, offset * stride * self.side.item))
                continue
            outer, last = builder.add(first, L.I32(offset)), L.I32(extent - 1)
            inside = outer if whole else builder.select(builder.icmp_signed("<", outer, last), outer, last)
            self.places.append((self.address(inside), 0))

    def accesses(self, places: Sequence[Place], first: int) -> Iterator[tuple[Place, int, int]]:
        """See `LaneCopies.accesses`: one per line."""
        side = self.side
        for line, place in enumerate(places):
            for begin in range(0, ACCESS // side.item, side.width):
                yield place, first + begin, line * LINE_BYTES + begin * side.item

    def lines_of(self, places: Sequence[Place]) -> int:
        """See `LaneCopies.lines_of`."""
        return len(places)


class NContiguousCopies(LaneCopies):
    """Of W[k, n]: 16 bytes along n of some of a tile's k, of several groups of columns.

    Attributes:
        lines: accesses of the warp to a group and a tile of k.
        stride: k of a lane from one such access to the next.
    """

    def __init__(self, frame: M.Frame, side: GemmOperand, ks: Terms, slot: L.Value, segment: int) -> None:
        """Args: as of `LaneCopies`; segment: bytes of a row that a group has."""
        super().__init__(frame, side, ks, slot, cached=False)
        self.stride = LINE // segment
        self.lines = ACCESS // side.item // self.stride

    def add_groups(self, first: L.Value, offsets: Sequence[int], extent: int, whole: bool) -> None:
        """Groups of columns at offsets from the lane's first one; those beyond the last are read there."""
        builder, side = self.builder, self.side
        width = self.size // side.item
        base = self.address(first) if whole else None
        for offset in offsets:
            for begin in range(offset, offset + ACCESS // side.item, width):
                if base is not None:
                    self.places.append((base, begin * side.item))
                    continue
                outer, last = builder.add(first, L.I32(begin)), L.I32(extent - width)
                inside = builder.select(builder.icmp_signed("<", outer, last), outer, last)
                self.places.append((self.address(inside), 0))

    def accesses(self, places: Sequence[Place], first: int) -> Iterator[tuple[Place, int, int]]:
        """See `LaneCopies.accesses`: one per group and k of the lane."""
        each = ACCESS // self.size
        for number, place in enumerate(places):
            group, part = divmod(number, each)
            for line in range(self.lines):
                yield place, first + line * self.stride, (group * self.lines + line) * LINE_BYTES + part * self.size

    def lines_of(self, places: Sequence[Place]) -> int:
        """See `LaneCopies.lines_of`."""
        return len(places) * self.size // ACCESS * self.lines


class SegmentLanes:
    """Which lanes copy and which read 16 bytes of W[k, n], and where these lie in the accesses of a warp.

    Attributes:
        term: the first k of a tile that the lane copies.
        chunk: which 16 bytes of a segment it copies.
        slot: bytes of the place that it copies them to.
        sources: bytes of the places where it reads what it multiplies, one after the other.
    """

    def __init__(self, builder: GpuBuilder, lane: L.Value, vector: int, segment: int) -> None:
        """Args: lane: of the thread; vector: elements of 16 bytes; segment: bytes of a row that a group has."""
        chunks, halves = segment // ACCESS, LINE // segment
        deep, part = builder.lshr(lane, L.I32(3)), builder.and_(lane, L.I32(LINE // ACCESS - 1))
        self.chunk = builder.and_(part, L.I32(chunks - 1))
        self.term = builder.mul(deep, L.I32(vector))
        if halves > 1:
            self.term = builder.add(self.term, builder.udiv(part, L.I32(chunks)))
        self.slot = self._swizzled(builder, deep, part)
        line, place = builder.lshr(lane, L.I32(2)), builder.and_(lane, L.I32(LANES - 1))
        first = self._swizzled(builder, place, builder.udiv(line, L.I32(halves)))
        self.sources = [first]
        if halves > 1:
            behind = builder.mul(builder.and_(line, L.I32(halves - 1)), L.I32(ACCESS // halves))
            first = builder.add(first, behind)
            self.sources = [builder.xor(first, L.I32(half * segment)) for half in range(halves)]

    @staticmethod
    def _swizzled(builder: GpuBuilder, deep: L.Value, part: L.Value) -> L.Value:
        """Place of 16 bytes: by their k (0 to 3), and which they are of its 128."""
        part = builder.xor(part, builder.shl(deep, L.I32(1)))
        return builder.shl(builder.add(builder.shl(deep, L.I32(3)), part), L.I32(4))


def weight_fragments(
    builder: GpuBuilder, side: GemmOperand, words: Words, lane_columns: int
) -> list[list[list[L.Value]]]:
    """Fragments of W as the A operand of ``mma``: [16 columns][k-step][4], not rounded.

    Args: words: of a tile of k, by access of 16 bytes; lane_columns: neighbouring columns of W[k, n] that a lane has.
    """
    if side.along_terms:
        pairs = zip(words[::2], words[1::2], strict=True)
        return [[[a[k], b[k], a[k + 1], b[k + 1]] for k in (0, 2)] for a, b in pairs]
    vector, each = ACCESS // side.item, lane_columns * side.item // WORD
    of_one_k = [access[k : k + each] for access in words for k in range(0, WORDS, each)]
    found = []
    for start in range(0, len(of_one_k), vector):
        lines = of_one_k[start : start + vector]
        if side.item < WORD:
            lines = [_two_terms(builder, a, b) for a, b in zip(lines[::2], lines[1::2], strict=True)]
        for column in range(0, lane_columns, 2):
            found.append([[x[c] for x in lines[k : k + 2] for c in (column, column + 1)] for k in (0, 2)])
    return found


def _two_terms(builder: GpuBuilder, first: Sequence[L.Value], second: Sequence[L.Value]) -> list[L.Value]:
    """Two k of every column in a word, of two lines of 16-bit columns."""
    pairs = [(a, b, how) for a, b in zip(first, second, strict=True) for how in HALVES]
    return [asm(builder, f"prmt.b32 $0, $1, $2, {how};", L.I32, [a, b]) for a, b, how in pairs]


def fragment_columns(side: GemmOperand, columns: int, lane_columns: int) -> tuple[int, list[tuple[int, int]]]:
    """Columns of a lane's results in a warp: (factor of ``lane / 4``, offsets of both rows of every ``mma``)."""
    if side.along_terms:
        return 1, [(first, first + N_TILE) for first in range(0, columns, M_TILE)]
    groups = range(0, columns, N_TILE * lane_columns)
    pairs = [(group + column, group + column + 1) for group in groups for column in range(0, lane_columns, 2)]
    return lane_columns, pairs

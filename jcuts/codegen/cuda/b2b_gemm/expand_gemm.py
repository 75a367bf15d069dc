"""Expand stage of two fused GEMMs: the first GEMM of a chunk of hidden columns, its epilogue into shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jcuts.codegen.cuda.b2b_gemm.loads import InputLoader, RowPlaces, WeightLoader
from jcuts.codegen.cuda.b2b_gemm.mid_epilogue import MidEpilogue
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, SmemTile, lane_columns
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.patterns.gemm import COLUMNS, TYPES
from jcuts.schedule.gpu.b2b_gemm.pair_tile import ROW_TILE, STEP, GemmPairTile

EIGHT = 8
Run = tuple[int, list[list[E.Lanes]]]
"""Neighbouring columns of a lane: offset of the first, and of each the values of all rows."""


class ExpandGemm:
    """Expand GEMM: fragments of input pixels times a chunk of weights, with its epilogue."""

    def __init__(
        self,
        frame: M.Frame,
        shape: GemmPairTile,
        place: RowPlaces,
        thread: L.Value,
        places: tuple[L.Value, L.Value, L.Value],
        buffers: Mapping[str, Buffer],
    ) -> None:
        """Args: places: of weights, input pixels and patch in shared memory."""
        weights, pixels, self.patch = places
        self.frame, self.shape, self.builder = frame, shape, frame.builder
        builder, block, side = self.builder, shape.block, shape.block.weights[0]
        assert side is not None and block.expand is not None
        self.kind = TYPES[block.dtype]
        self.lane, warp = builder.and_(thread, L.I32(WARP - 1)), builder.lshr(thread, L.I32(5))
        row = builder.mul(builder.udiv(warp, L.I32(shape.expand[1])), L.I32(ROW_TILE * shape.m_fragments_in))
        width = shape.chunk // shape.expand[1]
        self.column = builder.mul(builder.urem(warp, L.I32(shape.expand[1])), L.I32(width))
        self.tile = SmemTile(
            side,
            block.expanded_channels,
            shape.chunk,
            shape.padded_in_channels,
            width,
            0,
            block.in_channels % shape.step != 0,
        )
        self.pixels = InputLoader(frame, shape, place, thread, pixels)
        self.copier = WeightLoader(frame, self.tile, shape.threads, thread, L.I32(0), weights)
        rounded = buffers[side.buffer].tf32
        self.fragments = FragmentReader(builder, self.tile, weights, self.column, self.lane, rounded)
        self.left = left_fragments(builder, self.lane, pixels, row, shape.item * shape.input_pitch)
        quad = builder.add(row, builder.lshr(self.lane, L.I32(2)))
        rows = [place.in_patch(builder.add(quad, L.I32(EIGHT * n))) for n in range(2 * shape.m_fragments_in)]
        self.rows = [row for row, _ in rows[:1]] if shape.is_linear else [row for row, _ in rows]
        self.inside: L.Value | None = None
        if any(inside is not None for _, inside in rows):
            self.inside = L.I32(0)
            for number, (_, inside) in enumerate(rows):
                bit = builder.zext(L.I1(1) if inside is None else inside, L.I32)
                self.inside = builder.or_(self.inside, builder.shl(bit, L.I32(number)))
        self.chain = MidEpilogue(frame, block.expand.phases[0], COLUMNS, block.expanded_channels, shape.chunk, buffers)
        self.held: list[list[list[L.Value]]] | None = None

    def start(self) -> None:
        """Starts the copies of the input and of the first weight chunk."""
        self.pixels.start()
        self.ahead(L.I32(0), L.I32(0))

    def ahead(self, first: L.Value, odd: L.Value) -> None:
        """Prefetches the channel chunk that begins at ``first``."""
        stage = self.builder.mul(odd, L.I32(self.shape.operand_bytes[1]))
        self.copier.fetch(first, stage, L.I32(self.shape.block.in_channels))

    def arrived(self) -> None:
        """Called when this thread's copies of the input have arrived."""
        if not self.shape.held and self.kind == "tf32":
            self.pixels.round()

    def hold(self) -> None:
        """Loads the input from shared memory into registers, where it stays."""
        self.held = [self._pixels(step) for step in range(self.shape.padded_in_channels // self.shape.step)]

    def source(self, odd: L.Value) -> L.Value:
        """Byte offset of a chunk's patch."""
        return L.I32(0)

    def compute(self, first: L.Value, odd: L.Value) -> None:
        """Computes the chunk of hidden columns from ``first`` on, with the epilogue, into the patch."""
        builder = self.builder
        sums = self._products(builder.mul(odd, L.I32(self.shape.operand_bytes[1])))
        factor, offsets = lane_columns(self.tile)
        mine = builder.add(self.column, builder.mul(builder.and_(self.lane, L.I32(3)), L.I32(factor)))
        runs = _runs(offsets)
        values = self.chain.apply(
            builder.add(first, mine),
            factor,
            [
                [(offset, [row[j][2 * half + k] for row in sums for half in (0, 1)]) for offset, (j, k) in run]
                for run in runs
            ],
        )
        columns = [run[0][0] for run in runs]
        self.store(first, odd, mine, [*zip(columns, values, strict=True)])

    def _products(self, stage: L.Value) -> Totals:
        """The sums of a chunk, whose weights are in a stage (byte offset)."""
        builder, shape = self.builder, self.shape
        sums: Totals = [[[L.F32(0.0)] * 4 for _ in range(self.tile.warp // EIGHT)] for _ in range(shape.m_fragments_in)]
        for step in range(shape.padded_in_channels // shape.step):
            rows = self.held[step] if self.held is not None else self._pixels(step)
            columns = self.fragments.read(stage, step * shape.step)
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    sums[i][j] = ptx_mma.mma_sync(builder, self.kind, row, column, sums[i][j])
        return sums

    def store(self, first: L.Value, odd: L.Value, mine: L.Value, runs: Sequence[Run]) -> None:
        """Stores a chunk's values. Args: mine: this lane's first column in the chunk; runs: of neighbouring columns."""
        builder, shape = self.builder, self.shape
        targets = []
        for place in self.rows:
            target = builder.add(builder.mul(place, L.I32(shape.patch_pitch)), mine)
            targets.append(builder.add(self.patch, builder.mul(target, L.I32(shape.item))))
        bits = None  # one register for all rows: what is made of it must not be computed before the loop
        if self.inside is not None:
            bits = asm(builder, "mov.b32 $0, $1;", L.I32, [self.inside], effects=True)
        for number in range(2 * shape.m_fragments_in):
            target, offset = (
                (targets[0], EIGHT * number * shape.patch_pitch) if shape.is_linear else (targets[number], 0)
            )
            inside = None
            if bits is not None:
                inside = builder.icmp_unsigned("!=", builder.and_(bits, L.I32(1 << number)), L.I32(0))
            for column, found in runs:
                words = self.chain.words([values[number] for values in found])
                ptx_mma.write_words(builder, target, shape.item * (offset + column), words, inside)

    def _pixels(self, step: int) -> list[list[L.Value]]:
        """A fragments of the input pixels."""
        shape, found = self.shape, []
        for row in range(shape.m_fragments_in):
            offset = shape.item * row * ROW_TILE * shape.input_pitch + step * STEP
            words = ptx_mma.ldmatrix_x4(self.builder, self.left, offset)
            rounds = shape.held and self.kind == "tf32"
            found.append([ptx_mma.to_tf32(self.builder, w) for w in words] if rounds else words)
        return found


def left_fragments(builder: GpuBuilder, lane: L.Value, shared: L.Value, row: L.Value, pitch: int) -> L.Value:
    """``ldmatrix`` address of this lane in an A fragment: rows, eight rows further, then both 16 bytes of k further.

    Args: pitch: bytes from one line to the next.
    """
    line = builder.add(row, builder.and_(lane, L.I32(15)))
    place = builder.mul(line, L.I32(pitch))
    return builder.add(builder.add(shared, place), builder.mul(builder.lshr(lane, L.I32(4)), L.I32(16)))


def _runs(offsets: list[list[int]]) -> list[list[tuple[int, tuple[int, int]]]]:
    """A lane's columns as runs of 2 or 4 contiguous ones: (offset, (fragment, which of its two))."""
    columns = sorted((offset, (j, k)) for j, two in enumerate(offsets) for k, offset in enumerate(two))
    found: list[list[tuple[int, tuple[int, int]]]] = []
    for column in columns:
        if not found or column[0] != found[-1][-1][0] + 1:
            found.append([])
        found[-1].append(column)
    return found

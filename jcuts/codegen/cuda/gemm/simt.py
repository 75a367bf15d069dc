"""SIMT GEMM with ``fma.rn.f32``: float32 products of more than TF32 precision (``precision`` HIGH, HIGHEST).

Tiles, copies and epilogue are those of `mma_mainloop`.  A lane owns the results that it would have of the tensor cores,
two rows by two columns of every 16x8: it reads as many rows and columns of both operands from shared memory, one k
ahead (or the four k of a 16-byte read), and multiplies each row by each column.  Lines of rows (or columns) give a lane
neighbours, as `lane_rows` and `lane_columns` of `smem_tile` say.  Every product is rounded once, together with the sum
before it.

What limits it on an H200, which runs 4096^3 at 46 of 67 TFLOP/s (0.91 of the vendor's kernel): a quarter of the
multiply-adds find two operands in one register bank and take two cycles; the order in which ptxas puts them decides
that.  Warps of 64x64 read 24 values for 128 products; of 64x32, 16 for 64, which keeps shared memory busy all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernelTile, product_shape
from jcuts.codegen.cuda.gemm.register_double_buffer import DoubleBufferedMmaKernel, Later, MainloopStep, Values
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, SmemTile
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program

STEP = 4
"""k that a lane reads at once: 16 bytes along K."""
LATE = 2
"""Stages with which warps turn to a tile only when they have read all of the one before."""


@dataclass(frozen=True)
class FmaShape(MmaKernelTile):
    """Block tile of the SIMT GEMM; attributes as `MmaKernelTile`."""

    @property
    def prefetch_distance(self) -> int:
        """k-tiles whose copies are issued before the first multiplication.

        A tile's memory is given away when all warps have turned to the next but one, not to the next: they turn while
        they still read the tile at hand (not where there is no room for that, `LATE`).
        """
        return self.stages - (1 if self.stages == LATE else 2)


def fma_shape(program: Program) -> FmaShape:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape = product_shape(program)
    return FmaShape(**{f.name: getattr(shape, f.name) for f in fields(shape)})


class SimtFragments(FragmentReader):
    """Reads a lane's rows (or columns) of one operand from shared memory.

    Its `Values` are [k][two of every tile of 16 rows, or of 8 columns].

    Attributes:
        grain: k per read: as many as 16 bytes hold where the operand lies along K, else one.
    """

    def __init__(
        self,
        builder: GpuBuilder,
        shape: SmemTile,
        shared: L.Value,
        warp: L.Value,
        lane: L.Value,
    ) -> None:
        """``warp``: the first row (or column) of the warp in the block's tile."""
        self.builder, self.shape = builder, shape
        self.left = shape.side.outer == "m"
        self.grain = STEP if shape.side.along_terms else 1
        first = builder.lshr(lane, L.I32(2)) if self.left else builder.and_(lane, L.I32(3))
        together = (2 if shape.scalar_fragments else 1) if self.left else (4 if shape.scalar_fragments else 2)
        first = builder.add(warp, builder.mul(first, L.I32(together)))
        pitch = shape.side.item if shape.scalar_fragments else shape.pitch
        self.place = builder.add(builder.add(shared, L.I32(shape.first)), builder.mul(first, L.I32(pitch)))

    @property
    def steps(self) -> int:
        """k of a step."""
        return STEP

    def reads(self, place: L.Value, term: int) -> list[Callable[[], Values]]:
        """Reads, one after the other, of a lane's values at one k of the stage (or at it and the following ones)."""
        shape, place = self.shape, self.builder.add(self.place, place)
        if shape.side.along_terms:
            size, apart = (16, 8) if self.left else (8, 1)
            starts = [tile + k * apart for tile in range(0, shape.warp, size) for k in range(2)]
            item = shape.side.item
            return [partial(self._along, place, start * shape.pitch + term * item) for start in starts]
        tiles = range(0, shape.warp, 16)
        return [partial(self._across, place, term * shape.pitch + tile * shape.side.item) for tile in tiles]

    def _along(self, place: L.Value, offset: int) -> Values:
        return [[value] for value in self._vector(place, offset, self.grain)]

    def _across(self, place: L.Value, offset: int) -> Values:
        found = self._vector(place, offset, 2 if self.left else 4)
        return [found if self.left else [found[0], found[2], found[1], found[3]]]  # tiles of even and of odd columns

    def _vector(self, place: L.Value, offset: int, count: int) -> list[L.Value]:
        words = ptx_mma.read_words(self.builder, place, offset, count)
        return [self.builder.bitcast(word, L.F32) for word in words]


def _lanes(readers: list[FragmentReader]) -> list[SimtFragments]:
    return [r for r in readers if isinstance(r, SimtFragments)]


def _joined(parts: list[Values]) -> Values:
    return [[value for part in parts for value in part[term]] for term in range(len(parts[0]))]


def _swizzle_lane(builder: GpuBuilder, lane: L.Value) -> L.Value:
    """The lane number with bits 1 and 2 exchanged.

    Of lanes k^1 and k^2 one then has the same row as k, one the same column: where neighbours ask for the same bytes,
    shared memory answers in fewer passes (1 to 4 % of the time of products and convolutions on an H200).
    """
    kept = builder.and_(lane, L.I32(0b11001))
    up = builder.shl(builder.and_(lane, L.I32(0b00010)), L.I32(1))
    down = builder.lshr(builder.and_(lane, L.I32(0b00100)), L.I32(1))
    return builder.or_(kept, builder.or_(up, down))


class SimtGemmKernel(DoubleBufferedMmaKernel):
    """Emits one thread of the SIMT GEMM."""

    reader = SimtFragments
    terms, zero = STEP, L.F32(0.0)

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: MmaKernelTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        """Args: as of `MmaKernel`."""
        super().__init__(builder, program, tile, buffers, pointers, integers, symbol, shared)
        self.lane = _swizzle_lane(builder, self.lane)

    def _begin(self, readers: list[FragmentReader], places: Sequence[L.Value]) -> list[Values]:
        both = zip(_lanes(readers), places, strict=True)
        return [_joined([read() for read in reader.reads(place, 0)]) for reader, place in both]

    def _stepper(self, readers: list[FragmentReader]) -> MainloopStep:
        return partial(self._step, _lanes(readers))

    def _step(
        self,
        readers: list[SimtFragments],
        places: Sequence[L.Value],
        first: int,
        near: list[Values],
        sums: Totals,
        later: Later | None = None,
    ) -> list[Values]:
        turn = STEP - 1 if later is not None and self.shape.stages == LATE else 0
        held, coming = list(near), [list[Values]() for _ in readers]
        behind: list[list[Callable[[], Values]]] = []
        for k in range(STEP):
            if k == turn:
                starts, term = (places, first + STEP) if later is None else (later(), 0)
                behind = [r.reads(place, term) for r, place in zip(readers, starts, strict=True)]
            for number, reader in enumerate(readers):
                if reader.grain == 1:
                    reads = behind[number] if k + 1 == STEP else reader.reads(places[number], first + k + 1)
                else:  # as many with each term from the turn on
                    share = -(-len(behind[number]) // (STEP - turn)) if k >= turn else 0
                    reads = behind[number][share * (k - turn) : share * (k - turn + 1)] if share else []
                coming[number] += [read() for read in reads]
            self._products([h[k % r.grain] for h, r in zip(held, readers, strict=True)], sums)
            for number, reader in enumerate(readers):
                if (k + 1) % reader.grain == 0:
                    held[number], coming[number] = _joined(coming[number]), []
        return held

    def _products(self, values: list[list[L.Value]], sums: Totals) -> None:
        """Outer product of rows and columns in serpentine order: neighbours share an operand register."""
        rows, columns = values
        for number, row in enumerate(rows):
            order = range(len(columns))
            for column in reversed(order) if number % 2 else order:
                tile, at = sums[number // 2][column // 2], number % 2 * 2 + column % 2
                tile[at] = L.fma(self.builder, row, columns[column], tile[at])

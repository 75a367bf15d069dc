"""float64 GEMM on tensor cores: ``mma`` of float64 (m16n8k8, below capability 9.0 m8n8k4), from capability 8.0 on.

The ``cp.async`` pipeline and the epilogue are those of `mma_mainloop`.  A k-step is eight k.  Where the instruction
has k t and t + 4 in one lane, a lane takes the neighbours 2t and 2t + 1 of both operands, as one read of 16 bytes;
a permutation of K that both operands share leaves the sum as it is.  Reads are free of bank conflicts: along K a tile
lies in shared memory by parts of eight k, 64 bytes per line, so that two lines fill all banks; lines of rows are 16
bytes more than a multiple of 64 apart.

A warp has at least four accumulator tiles of 16x8.  ptxas (13.0 and 13.5) lets an instruction follow another one with
the same accumulators without a scoreboard; within a loop body it keeps them 64 cycles apart, but 30 to 35 from a loop's
last instruction to the next iteration's first, which is too early on an H200: kernels of two tiles whose order it had
changed gave wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernelTile, product_shape
from jcuts.codegen.cuda.gemm.register_double_buffer import DoubleBufferedMmaKernel, Later, MainloopStep, Values
from jcuts.codegen.cuda.gemm.smem_tile import PAIR, FragmentReader, SmemTile
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.gemm import S
from jcuts.schedule.gpu.gemm.smem_layout_f64 import ITEM, LEAST, LINE, TERMS, bytes_of, k_step_bytes, pitch_of

EIGHT = 8
"""Columns of a tile, and half of its rows."""


@dataclass(frozen=True)
class DoubleTile(SmemTile):
    """Shared-memory tile of a float64 operand."""

    @property
    def scalar_fragments(self) -> bool:
        """Lanes read neighbouring rows (or columns) of one k, not neighbouring k."""
        return not self.side.along_terms

    @property
    def pitch(self) -> int:
        """Bytes from one line to the next."""
        return LINE if self.side.along_terms else pitch_of(self.length)

    @property
    def bytes(self) -> int:
        """Bytes of the tile in shared memory."""
        return bytes_of(self.side, self.size, self.terms)

    def place(self, builder: GpuBuilder, line: L.Value, column: L.Value) -> L.Value:
        """Byte offset in the tile of an element of a line."""
        if not self.side.along_terms:
            return super().place(builder, line, column)
        part = builder.mul(builder.lshr(column, L.I32(3)), L.I32(k_step_bytes(self.size)))
        return builder.add(part, super().place(builder, line, builder.and_(column, L.I32(TERMS - 1))))

    def advance(self, terms: int) -> int:
        """Byte offset from one k to another, a number of k-steps further."""
        return terms // TERMS * k_step_bytes(self.size) if self.side.along_terms else terms * self.pitch


@dataclass(frozen=True)
class DoubleShape(MmaKernelTile):
    """Block tile of the float64 kernel; attributes as `MmaKernelTile`."""

    @property
    def split_k_smem(self) -> int:
        """Shared memory [B] of the split-K reduction between warps and blocks."""
        return 2 * super().split_k_smem


def double_shape(program: Program) -> DoubleShape:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape = product_shape(program)
    tiles = [DoubleTile(**{f.name: getattr(t, f.name) for f in fields(t)}) for t in (shape.left, shape.right)]
    given = {f.name: getattr(shape, f.name) for f in fields(shape)}
    given |= {"left": tiles[0], "right": replace(tiles[1], first=tiles[0].bytes)}
    steps = shape.left.terms // TERMS // shape.warps[2]
    few = shape.left.warp * shape.right.warp < LEAST
    split = S in program.phases[0].ranges()
    if few or split or shape.left.terms % (TERMS * shape.warps[2]) or (steps > 1 and steps % 2):
        raise CompileRejected(f"{program.name}: no product of float64 of tiles {dict(program.params)['tile']}")
    return DoubleShape(**given)


class F64Fragments(FragmentReader):
    """Reads a warp's fragments of one operand: four values per 16 rows, two per 8 columns."""

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
        outer, term = builder.lshr(lane, L.I32(2)), builder.shl(builder.and_(lane, L.I32(3)), L.I32(1))
        if shape.scalar_fragments:
            line, column = term, builder.add(warp, builder.mul(outer, L.I32(PAIR)))
        else:
            line, column = builder.add(warp, outer), term
        place = builder.add(builder.mul(line, L.I32(shape.pitch)), builder.mul(column, L.I32(ITEM)))
        self.place = builder.add(builder.add(shared, L.I32(shape.first)), place)

    @property
    def steps(self) -> int:
        """k of one instruction."""
        return TERMS

    def advance(self, terms: int) -> int:
        """Byte offset from one k to another in the tile."""
        assert isinstance(self.shape, DoubleTile)
        return self.shape.advance(terms)

    def reads(self, stage: L.Value, term: int) -> list[Callable[[], Values]]:
        """Shared-memory reads of a k-step's registers, 16 rows or columns at a time (one tile of rows, two of
        columns).
        """
        place, first = self.builder.add(self.place, stage), self.advance(term)
        return [partial(self._sixteen, place, first, tile) for tile in range(0, self.shape.warp, 2 * EIGHT)]

    def _sixteen(self, place: L.Value, first: int, tile: int) -> Values:
        shape = self.shape
        if shape.scalar_fragments:
            near, far = (self._two(place, first + k * shape.pitch + tile * ITEM) for k in range(2))
            return [[*near, *far]] if self.left else [[near[k], far[k]] for k in range(2)]
        two = [self._two(place, first + (tile + k * EIGHT) * shape.pitch) for k in range(2)]
        return [[two[0][0], two[1][0], two[0][1], two[1][1]]] if self.left else two

    def _two(self, place: L.Value, offset: int) -> list[L.Value]:
        return ptx_mma.read_doubles(self.builder, place, offset)


class F64MmaKernel(DoubleBufferedMmaKernel):
    """Emits one thread of the float64 ``mma`` GEMM."""

    reader = F64Fragments
    terms, zero = TERMS, L.F64(0.0)

    def _begin(self, readers: list[FragmentReader], places: Sequence[L.Value]) -> list[Values]:
        both = zip(_doubles(readers), places, strict=True)
        return [_joined([read() for read in reader.reads(place, 0)]) for reader, place in both]

    def _stepper(self, readers: list[FragmentReader]) -> MainloopStep:
        return partial(self._step, _doubles(readers))

    def _step(
        self,
        readers: list[F64Fragments],
        places: Sequence[L.Value],
        first: int,
        near: list[Values],
        sums: Totals,
        later: Later | None = None,
    ) -> list[Values]:
        """As `MainloopStep`.  For the longer operand the next step's fragments reuse registers that are already
        consumed.
        """
        starts, term = (places, first + TERMS) if later is None else (later(), 0)
        behind = [reader.reads(place, term) for reader, place in zip(readers, starts, strict=True)]
        down = len(behind[0]) >= len(behind[1])
        made = [_joined([read() for read in behind[1]])] if down else [_joined([read() for read in behind[0]])]
        rows, columns = near
        found: list[Values] = []
        for number, read in enumerate(behind[0 if down else 1]):
            here = range(number, number + 1) if down else range(len(rows))
            across = range(len(columns)) if down else range(2 * number, 2 * number + 2)
            for i in here:
                for j in across:
                    sums[i][j][:] = ptx_mma.mma_f64(self.builder, rows[i], columns[j], sums[i][j])
            found.append(read())
        return [_joined(found), *made] if down else [*made, _joined(found)]


def _doubles(readers: list[FragmentReader]) -> list[F64Fragments]:
    return [r for r in readers if isinstance(r, F64Fragments)]


def _joined(parts: list[Values]) -> Values:
    return [tile for part in parts for tile in part]

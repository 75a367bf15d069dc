"""Batched weight transpose with TF32 rounding: many matrices in one launch, a 64x64 tile of one of them per block.

This is the *weights* form.  A block finds its matrix by a binary search on its number, reads a tile along the columns,
rounds it, and writes it along K by way of shared memory.  Lines there are one word longer, so that a warp has no bank
conflicts in either direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.horizontal import binary_dispatch
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import allocate_static
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.weight_transpose import SIDE, THREADS, WeightTranspose, transposes_of

PITCH = SIDE + 1
"""Words from one row of the tile to the next: one more than its columns, so that a column meets every bank."""
WORD = 4
LINES = THREADS // SIDE
LOW = 0x1FFF
"""The bits of a float32 that TF32 lacks."""
INFINITE = 0x7F800000
"""The bits of an infinity."""


@dataclass(frozen=True)
class TurnShape:
    """The matrices of one launch of the batched weight transpose.

    Attributes:
        parts: the matrices.
        first: number of the first tile of each.
    """

    parts: tuple[WeightTranspose, ...]
    first: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Tiles of all matrices."""
        return self.first[-1] + self.parts[-1].tiles


def turn_shape(program: Program) -> TurnShape:
    """The matrices of a batched weight-transpose program. Raises CompileRejected for any other program."""
    parts, params = transposes_of(program), dict(program.params)
    if not parts or params.get("threads") != THREADS:
        raise CompileRejected(f"{program.name}: not a program that turns weights by {THREADS} threads")
    counts = [0, *itertools.accumulate(part.tiles for part in parts)]
    return TurnShape(tuple(parts), tuple(counts[:-1]))


class WeightTransposeKernel:
    """Emits one thread of the batched weight transpose."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: TurnShape,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.shape, self.pointers = builder, tile, pointers
        self.block, self.thread = integers["block"], integers["thread"]
        self.base = allocate_static(builder, f"{symbol}_tile", SIDE * PITCH * WORD)

    def emit(self) -> None:
        """The tile of this block."""
        builder = self.builder
        source, target, terms, columns, first = self._part()
        across = builder.udiv(builder.add(columns, L.I32(SIDE - 1)), L.I32(SIDE))
        tile = builder.sub(self.block, first)
        term = builder.mul(builder.udiv(tile, across), L.I32(SIDE))
        column = builder.mul(builder.urem(tile, across), L.I32(SIDE))
        near, far = builder.urem(self.thread, L.I32(SIDE)), builder.udiv(self.thread, L.I32(SIDE))

        here = builder.add(column, near)
        inside = builder.icmp_signed("<", here, columns)
        words = []
        for line in range(0, SIDE, LINES):
            row = builder.add(term, builder.add(far, L.I32(line)))
            live = builder.and_(inside, builder.icmp_signed("<", row, terms))
            place = self._place(source, builder.add(builder.mul(row, columns), here))
            words += ptx_mma.load_words(builder, (place, 0), 1, live)
        mine = self._shared(far, near)
        for line, word in zip(range(0, SIDE, LINES), words, strict=True):
            self._write_shared(mine, line * PITCH * WORD, self._rounded(word))
        ptx_mma.barrier(builder)

        here = builder.add(term, near)
        inside = builder.icmp_signed("<", here, terms)
        mine = self._shared(near, far)
        for line in range(0, SIDE, LINES):
            row = builder.add(column, builder.add(far, L.I32(line)))
            live = builder.and_(inside, builder.icmp_signed("<", row, columns))
            place = self._place(target, builder.add(builder.mul(row, terms), here))
            word = ptx_mma.ld_shared_b32(builder, mine, line * WORD)
            text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }"
            asm(builder, text, ir.VoidType(), [place, word, builder.zext(live, L.I32)], effects=True)

    def _part(self) -> tuple[L.Value, ...]:
        """Operand, result, K extent, columns and first tile of this block's matrix."""
        builder, shape = self.builder, self.shape
        leaves: list[tuple[ir.Block, tuple[L.Value, ...]]] = []

        def leaf(number: int) -> None:
            part = shape.parts[number]
            numbers = (L.I32(n) for n in (part.terms, part.columns, shape.first[number]))
            leaves.append((builder.block, (self.pointers[part.operand], self.pointers[part.result], *numbers)))

        binary_dispatch(builder, self.block, shape.first, leaf)
        found = []
        for number, value in enumerate(leaves[0][1]):
            phi = builder.phi(value.type)
            for block, values in leaves:
                phi.add_incoming(values[number], block)
            found.append(phi)
        return tuple(found)

    def _place(self, array: L.Value, element: L.Value) -> L.Value:
        """Address of an element."""
        builder = self.builder
        return builder.add(array, builder.mul(builder.zext(element, L.I64), L.I64(WORD)))

    def _shared(self, line: L.Value, place: L.Value) -> L.Value:
        """Address in the tile."""
        builder = self.builder
        element = builder.add(builder.mul(line, L.I32(PITCH)), place)
        return builder.add(self.base, builder.mul(element, L.I32(WORD)))

    def _write_shared(self, place: L.Value, offset: int, word: L.Value) -> None:
        text = f"st.shared.b32 [$0{f'+{offset}' if offset else ''}], $1;"
        asm(self.builder, text, ir.VoidType(), [place, word], effects=True)

    def _rounded(self, word: L.Value) -> L.Value:
        """To the nearest TF32 number, ties to even; NaN and infinities stay."""
        builder = self.builder
        odd = builder.and_(builder.lshr(word, L.I32(LOW.bit_length())), L.I32(1))
        up = builder.add(word, builder.add(odd, L.I32(LOW >> 1)))
        near = builder.and_(up, L.I32(~LOW))
        finite = builder.icmp_unsigned("<", builder.and_(word, L.I32(0x7FFFFFFF)), L.I32(INFINITE))
        return builder.select(finite, near, word)

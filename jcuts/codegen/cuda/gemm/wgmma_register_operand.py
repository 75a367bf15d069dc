"""A operand of ``wgmma`` from registers: ``ldmatrix`` fragments, float32 rounded to TF32 on the way, 16-bit as they
are.

Used where the B operand needs no rounding (16-bit floats, or weights that hold TF32 numbers, `Buffer.tf32`): both
operands are copied as they are, and ``wgmma`` reads B from shared memory.  A warp reads its 16 rows of A as matrices
(a lane gets the word of row ``lane / 4``, k ``lane % 4`` of each), rounds, and multiplies.  The instructions of one
k-step (or two) are a commit group; `AHEAD` steps may be in flight, and the fragments of as many stay in registers
until the ``wgmma`` has read them.  Or all k-steps of a tile are one group: then a tile's fragments are read while the
one before is multiplied, which takes twice the registers and waits least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.prologue import Prologue
from jcuts.codegen.cuda.gemm.wgmma_smem_tile import WgmmaSmemTile
from jcuts.codegen.cuda.gemm.wgmma_tile import AHEAD
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.lower.patterns.gemm import TYPES


class OperandFragments(Protocol):
    """An A operand whose fragments are read from shared memory with ``ldmatrix``, at any row addresses."""

    def read(self, stage: L.Value, step: int) -> list[list[L.Value]]:
        """Registers per 64 rows of the warpgroup, of one k-step of the tile in a stage."""
        ...


class RegisterOperandA:
    """A fragments of one warp's rows."""

    def __init__(self, builder: GpuBuilder, tile: WgmmaSmemTile, shared: L.Value, warp: L.Value, lane: L.Value) -> None:
        """Args: warp: its first row in the block's tile."""
        self.builder, self.tile = builder, tile
        row = builder.add(warp, builder.and_(lane, L.I32(15)))
        piece = builder.xor(builder.lshr(lane, L.I32(4)), builder.and_(lane, L.I32(7)))
        place = builder.add(builder.mul(row, L.I32(wgmma.LINE)), builder.shl(piece, L.I32(4)))
        self.place = builder.add(builder.add(shared, L.I32(tile.first)), place)

    def read(self, stage: L.Value, step: int) -> list[list[L.Value]]:
        """Registers per 64 rows of the warpgroup, of one k-step of the tile in a stage."""
        builder, tile = self.builder, self.tile
        part, inside = divmod(tile.step(step), tile.part)
        place = builder.add(self.place, stage)
        if inside:
            place = builder.xor(place, L.I32(inside))
        starts = range(0, tile.warp // wgmma.ROWS * tile.block, tile.block)
        return [ptx_mma.ldmatrix_x4(builder, place, part * tile.part + start) for start in starts]


def wgmma_from_registers(
    builder: GpuBuilder,
    rows: OperandFragments,
    right: L.Value,
    columns: WgmmaSmemTile,
    reading: L.Value,
    number: L.Value,
    before: Prologue | None,
    totals: Totals,
    beside: list[Iterator[None]],
    together: int,
    most: int | None = None,
) -> Totals:
    """Issues the ``wgmma``s of the tile in a stage with A from registers, k-step by k-step.

    Args: right: descriptor of the right operand's tile there; reading: bytes from the first stage; number: of the
        tile in the block's K; before: prologue of the left operand, before rounding; beside: copies, each
        of which is started behind some step; together: steps that are one group; most: steps, where there are fewer
        than the tile has (what is left is no group of its own).
    """
    terms = builder.mul(number, L.I32(columns.terms)) if before is not None else None
    kind, wide = TYPES[columns.side.dtype], columns.side.item == 4
    steps = columns.terms * columns.side.item // ptx_mma.STEP
    whole = together == steps  # fragments of the next tile are read while this one is multiplied
    most = most if most != steps else None
    steps = most or steps
    for first in range(0, steps, together):
        if not whole:
            wgmma.wgmma_wait_group(builder, AHEAD // together)
        pairs: list[list[tuple[list[L.Value], L.Value]]] = []
        last = min(first + together, steps)
        for step in range(first, last):
            second = wgmma.advance_descriptor(builder, right, columns.step(step))
            fragments = rows.read(reading, step)
            if before is not None:
                fragments = before.apply(fragments, terms, step)
            pairs = pairs or [[] for _ in fragments]
            for row, words in zip(pairs, fragments, strict=True):
                row.append(([ptx_mma.to_tf32(builder, word) for word in words] if wide else words, second))
        totals = wgmma.wgmma_async(builder, kind, pairs, (False, not columns.by_terms), totals)
        for part in beside[first * len(beside) // steps : last * len(beside) // steps]:
            next(part)
    if whole or most:  # what the tile before has read may be written from the next barrier on
        wgmma.wgmma_wait_group(builder, -(-steps // together))
    return totals

"""Tile coordinates of the back-to-back GEMM: rows of a block, which of them exist."""

from __future__ import annotations

from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile


class RowCoordinates:
    """Rows of a block's tile (`b2b_gemm.loads.RowPlaces`)."""

    def __init__(self, builder: GpuBuilder, shape: B2bGemmTile, block: L.Value) -> None:
        self.builder, self.shape = builder, shape
        self.first = builder.mul(block, L.I32(shape.rows))

    def of_input(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of the input, and a predicate that it exists (None: always)."""
        row, rows = self.builder.add(self.first, pixel), self.shape.block.rows
        return row, self.builder.icmp_signed("<", row, L.I32(rows)) if rows % self.shape.rows else None

    def in_patch(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of the hidden tile: all exist, those beyond the last row are computed from zeros and never stored."""
        return pixel, None

    def of_output(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Row of the result (0 where it does not exist), and a predicate that it exists (None: always)."""
        row, inside = self.of_input(pixel)
        return row if inside is None else self.builder.select(inside, row, L.I32(0)), inside

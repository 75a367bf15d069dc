"""Tile coordinates of the fused inverted residual: first image, output tile, halo of input pixels, image borders."""

from __future__ import annotations

from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.llvm import lanes as L
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile


class TileCoordinates:
    """Coordinates of the block's tile: first image, outputs, and the pixels that are expanded for it (halo)."""

    def __init__(self, builder: GpuBuilder, shape: InvertedResidualTile, block: L.Value) -> None:
        self.builder, self.shape = builder, shape
        _, down, across = shape.counts
        tile = builder.urem(block, L.I32(down * across)) if down * across > 1 else L.I32(0)
        group = builder.udiv(block, L.I32(down * across))
        self.image = builder.mul(group, L.I32(shape.images))
        self.output = (
            builder.mul(builder.udiv(tile, L.I32(across)), L.I32(shape.rows)),
            builder.mul(builder.urem(tile, L.I32(across)), L.I32(shape.columns)),
        )
        window = shape.block.window
        self.shift: list[L.Value] = []
        self.origin: list[L.Value] = []
        for output, step, start, span, extent in zip(
            self.output, window.step, window.start, shape.span, window.image[1:3], strict=True
        ):
            begin = builder.add(builder.mul(output, L.I32(step)), L.I32(start))
            above = builder.select(builder.icmp_signed(">", begin, L.I32(0)), begin, L.I32(0))
            last = L.I32(extent - span)
            origin = builder.select(builder.icmp_signed("<", above, last), above, last)
            self.origin.append(origin)
            self.shift.append(builder.sub(origin, begin))

    def split(self, number: L.Value, size: tuple[int, int]) -> tuple[L.Value, L.Value, L.Value]:
        """(image, row, column) of a pixel's number in images of a size."""
        builder, (rows, columns) = self.builder, size
        rest = builder.udiv(number, L.I32(columns))
        column = builder.urem(number, L.I32(columns))
        if self.shape.images == 1:
            return L.I32(0), rest, column
        return builder.udiv(rest, L.I32(rows)), builder.urem(rest, L.I32(rows)), column

    def in_patch(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Position of an expanded pixel in the patch, and a predicate that it exists (None: always)."""
        builder, shape = self.builder, self.shape
        image, row, column = self.split(pixel, shape.span)
        row, column = builder.add(row, self.shift[0]), builder.add(column, self.shift[1])
        inside = None
        if shape.pixels % (16 * shape.expand[0]) and shape.block.expand is not None:
            inside = builder.icmp_unsigned("<", pixel, L.I32(shape.pixels))
        for place, size, leaves in zip((row, column), shape.patch, shape.has_outside_pixels, strict=True):
            if leaves:
                holds = builder.icmp_unsigned("<", place, L.I32(size))
                inside = holds if inside is None else builder.and_(inside, holds)
        line = builder.add(builder.mul(image, L.I32(shape.patch[0])), row)
        return builder.add(builder.mul(line, L.I32(shape.patch[1])), column), inside

    def of_input(self, pixel: L.Value) -> tuple[L.Value, L.Value | None]:
        """Position of an expanded pixel in the input, and a predicate that it exists (None: always)."""
        builder, shape = self.builder, self.shape
        images, rows, columns, _ = shape.block.window.image
        image, row, column = self.split(pixel, shape.span)
        image = builder.add(self.image, image)
        row, column = builder.add(row, self.origin[0]), builder.add(column, self.origin[1])
        inside = None
        if shape.pixels % (16 * shape.expand[0]) and shape.block.expand is not None:
            inside = builder.icmp_unsigned("<", pixel, L.I32(shape.pixels))
        if images % shape.images:
            holds = builder.icmp_signed("<", image, L.I32(images))
            inside = holds if inside is None else builder.and_(inside, holds)
        line = builder.add(builder.mul(image, L.I32(rows)), row)
        return builder.add(builder.mul(line, L.I32(columns)), column), inside

    def of_output(self, pixel: L.Value) -> tuple[L.Value, L.Value]:
        """Position of a tile's output pixel in the result (0 where it does not exist), and a predicate that it
        exists.
        """
        builder, shape = self.builder, self.shape
        (images, *_), (rows, columns) = shape.block.window.image, shape.block.window.outputs
        image, row, column = self.split(pixel, (shape.rows, shape.columns))
        image = builder.add(self.image, image)
        row, column = builder.add(row, self.output[0]), builder.add(column, self.output[1])
        inside = builder.icmp_unsigned("<", pixel, L.I32(shape.outputs))
        for place, extent in ((image, images), (row, rows), (column, columns)):
            inside = builder.and_(inside, builder.icmp_signed("<", place, L.I32(extent)))
        line = builder.add(builder.mul(image, L.I32(rows)), row)
        number = builder.add(builder.mul(line, L.I32(columns)), column)
        return builder.select(inside, number, L.I32(0)), inside

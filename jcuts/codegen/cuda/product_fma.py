"""Products by fused multiply-adds: float32 where more than TF32 is asked for (``precision`` HIGH, HIGHEST).

Tiles, copies and exit are those of `product`.  A lane's results are those that it would have of matrix units, two rows
by two columns of every 16x8: it takes as many rows and columns of both operands from shared memory, four terms at a
time, and multiplies each row by each column.  Along terms it takes them by 16 bytes; lines of rows (or columns) have
its neighbours, whose tiles `product_tiles.rows_of` and ``columns_of`` deal out.  Every product is rounded once, with
the sum of the terms before it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import tensor
from jcuts.codegen.cuda.builder import GpuBuilder
from jcuts.codegen.cuda.product import ProductEmitter, ProductShape, product_shape
from jcuts.codegen.cuda.product_exit import Totals
from jcuts.codegen.cuda.product_tiles import Fragments, TileShape
from jcuts.dfg.program import Program

STEP = 4
"""Terms that a lane takes at once: 16 bytes along terms."""


@dataclass(frozen=True)
class FmaShape(ProductShape):
    """A block's work, as `ProductShape`."""


def fma_shape(program: Program) -> FmaShape:
    """The work that a schedule gives to a block. Raises CompileRejected where its numbers do not fit each other."""
    shape = product_shape(program)
    return FmaShape(**{f.name: getattr(shape, f.name) for f in fields(shape)})


class Values(Fragments):
    """Reads a lane's rows (or columns) of one operand."""

    def __init__(
        self, builder: GpuBuilder, shape: TileShape, shared: L.Value, warp: L.Value, lane: L.Value,
    ) -> None:  # fmt: skip
        """``warp``: the first row (or column) of the warp in the block's tile."""
        self.builder, self.shape = builder, shape
        self.left = shape.side.outer == "m"
        first = builder.lshr(lane, L.I32(2)) if self.left else builder.and_(lane, L.I32(3))
        together = (2 if shape.lone else 1) if self.left else (4 if shape.lone else 2)
        first = builder.add(warp, builder.mul(first, L.I32(together)))
        pitch = shape.side.item if shape.lone else shape.pitch
        self.place = builder.add(builder.add(shared, L.I32(shape.first)), builder.mul(first, L.I32(pitch)))

    @property
    def steps(self) -> int:
        """Terms that are read at once."""
        return STEP

    def read(self, stage: L.Value, term: int) -> list[list[list[L.Value]]]:
        """Floats [tile of 16 rows, or of 8 columns][which of the lane's two][term]."""
        place = self.builder.add(self.place, stage)
        return self._along(place, term) if self.shape.side.along_terms else self._across(place, term)

    def _along(self, place: L.Value, term: int) -> list[list[list[L.Value]]]:
        shape = self.shape
        size, apart = (16, 8) if self.left else (8, 1)
        return [
            [self._vector(place, (tile + k * apart) * shape.pitch + term * shape.side.item, STEP) for k in range(2)]
            for tile in range(0, shape.warp, size)
        ]

    def _across(self, place: L.Value, term: int) -> list[list[list[L.Value]]]:
        shape, found = self.shape, []
        for tile in range(0, shape.warp, 16):
            start = tile * shape.side.item
            lines = [
                self._vector(place, (term + k) * shape.pitch + start, 2 if self.left else 4) for k in range(STEP)
            ]
            pairs = [(0, 1)] if self.left else [(0, 2), (1, 3)]  # tiles of even and of odd columns
            found += [[[line[k] for line in lines] for k in pair] for pair in pairs]
        return found

    def _vector(self, place: L.Value, offset: int, count: int) -> list[L.Value]:
        words = tensor.read_words(self.builder, place, offset, count)
        return [self.builder.bitcast(word, L.F32) for word in words]


class FmaEmitter(ProductEmitter):
    """Emits the work of one thread."""

    reader = Values

    def _multiply(self, readers: list[Fragments], reading: L.Value, sums: Totals) -> None:
        """One tile of terms, four of them after the other; a loop, or all reads would be asked for before products."""
        builder, shape = self.builder, self.shape
        steps = shape.left.terms // STEP // shape.warps[2]
        places = [reading, reading]
        if shape.warps[2] > 1:
            places = [builder.add(reading, builder.mul(self.deep, L.I32(r.advance(steps * STEP)))) for r in readers]
        together = 2 if steps % 2 == 0 else 1
        count = tensor.asm(builder, f"mov.u32 $0, {steps // together};", L.I32, [], effects=True)  # not to be unrolled
        before, loop = builder.block, builder.append_basic_block("steps")
        after = builder.append_basic_block("steps.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(start: L.Value) -> L.Value:
            found = builder.phi(start.type)
            found.add_incoming(start, before)
            return found

        starts = [L.I32(0), *places, *(value for row in sums for tile in row for value in tile)]
        phis = [carried(start) for start in starts]
        number, places, values = phis[0], phis[1:3], iter(phis[3:])
        for tile in (tile for row in sums for tile in row):
            tile[:] = [next(values) for _ in tile]
        for step in range(together):
            self._step(readers, places, step * STEP, sums)
        moved = [builder.add(p, L.I32(r.advance(together * STEP))) for p, r in zip(places, readers, strict=True)]
        following = builder.add(number, L.I32(1))
        made = [following, *moved, *(value for row in sums for tile in row for value in tile)]
        for phi, value in zip(phis, made, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)

    def _step(self, readers: list[Fragments], places: list[L.Value], term: int, sums: Totals) -> None:
        rows, columns = (r.read(p, term) for r, p in zip(readers, places, strict=True))
        for k in range(STEP):
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    for number, total in enumerate(sums[i][j]):
                        sums[i][j][number] = L.fma(self.builder, row[number // 2][k], column[number % 2][k], total)

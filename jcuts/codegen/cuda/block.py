"""The *block* form: an inverted residual (product, depthwise convolution, product) in one kernel.

A thread block computes a tile of outputs (`region.block_tiles`).  It copies the input pixels that the tile's windows
cover into shared memory, rounds them to TF32 once, and goes through the channels between the products in pieces:

1. expand: fragments of pixels times a piece of weights, what follows in registers, into the *patch*;
2. windows: a thread sums a strip of one channel's windows from the patch; what follows; rounded, into shared memory;
3. project: fragments of those times a piece of weights, added up in registers.

Weights of the next piece are on their way meanwhile.  Pixels outside the image are zeros that nobody writes again.
"""

from __future__ import annotations

from collections.abc import Mapping

from jcuts.base.errors import CompileRejected
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda import tensor
from jcuts.codegen.cuda.block_chain import Chain
from jcuts.codegen.cuda.block_exit import leave
from jcuts.codegen.cuda.block_inputs import ColumnCopier, PixelCopier, clear
from jcuts.codegen.cuda.block_place import Place
from jcuts.codegen.cuda.block_windows import Windows
from jcuts.codegen.cuda.builder import GpuBuilder
from jcuts.codegen.cuda.product_exit import Totals
from jcuts.codegen.cuda.product_tiles import Copier, Fragments, TileShape, columns_of
from jcuts.codegen.cuda.shared import WARP
from jcuts.dfg.program import Buffer, Program
from jcuts.region.block_tiles import ROW_TILE, STEP, WORD, BlockShape, shape_of
from jcuts.region.products import COLUMNS

EIGHT = 8


def block_shape(program: Program) -> BlockShape:
    """The work that a schedule gives to a thread block. Raises CompileRejected where its numbers do not fit."""
    shape, params = shape_of(program), dict(program.params)
    if shape is None or not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no block of tiles {params['tile']} by warps {params['expand']}")
    return shape


class BlockEmitter:
    """Emits the work of one thread."""

    def __init__(
        self, builder: GpuBuilder, program: Program, shape: BlockShape, buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value], integers: Mapping[str, L.Value], symbol: str,
    ) -> None:  # fmt: skip
        self.builder, self.program, self.shape, self.buffers = builder, program, shape, buffers
        self.thread = integers["thread"]
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        warp = builder.lshr(self.thread, L.I32(5))
        self.place = Place(builder, shape, integers["block"])
        self.frame = M.Frame(builder, {}, pointers, {}, {})
        shared = tensor.dynamic_shared(builder, f"{symbol}_shared")
        inputs, up, down, patch, _ = shape.sizes
        self.ring = up, down
        self.inputs = shared
        weights = builder.add(shared, L.I32(inputs))
        self.patch = builder.add(weights, L.I32(2 * (up + down)))
        self.deep = builder.add(self.patch, L.I32(patch))
        self.row = builder.mul(builder.udiv(warp, L.I32(shape.expand[1])), L.I32(ROW_TILE * shape.high))
        width = shape.chunk // shape.expand[1]
        self.column = builder.mul(builder.urem(warp, L.I32(shape.expand[1])), L.I32(width))
        self.out_row = builder.mul(builder.udiv(warp, L.I32(shape.project[1])), L.I32(ROW_TILE * shape.tall))
        self.out_column = builder.mul(builder.urem(warp, L.I32(shape.project[1])), L.I32(shape.broad))
        block = shape.block
        first, second = block.weights
        ragged = block.terms % STEP != 0, block.channels % shape.chunk != 0
        self.up = TileShape(first, block.channels, shape.chunk, shape.terms, width, 0, ragged[0])
        columns = shape.broad * shape.project[1]
        self.down = TileShape(second, block.columns, columns, shape.chunk, shape.broad, 0, ragged[1])
        self.rise = ColumnCopier(self.frame, self.up, shape.threads, self.thread, L.I32(0), weights)
        base = builder.add(weights, L.I32(2 * up))
        self.fall = Copier(self.frame, self.down, shape.threads, self.thread, L.I32(0), base)
        rounded = [program.buffer(side.buffer).tf32 for side in (first, second)]
        self.up_fragments = Fragments(builder, self.up, weights, self.column, self.lane, rounded[0])
        self.down_fragments = Fragments(builder, self.down, base, self.out_column, self.lane, rounded[1])
        self.left = _left(builder, self.lane, self.inputs, self.row, shape.input_pitch)
        self.right = _left(builder, self.lane, self.deep, self.out_row, shape.deep_pitch)
        self.rows = [
            self.place.in_patch(builder.add(self.row, builder.add(L.I32(16 * i + 8 * h), self._quad())))
            for i in range(shape.high)
            for h in (0, 1)
        ]
        self.chain = Chain(self.frame, block.expand.phases[0], COLUMNS, block.channels, shape.chunk, buffers)
        self.windows = Windows(self.frame, shape, self.thread, self.patch, self.deep, buffers)

    def _quad(self) -> L.Value:
        return self.builder.lshr(self.lane, L.I32(2))

    def emit(self) -> None:
        """The tile."""
        builder, shape = self.builder, self.shape
        pixels = PixelCopier(self.frame, shape, self.place, self.thread, self.inputs)
        pixels.start()
        self._rise(L.I32(0), L.I32(0))
        tensor.commit(builder)
        _, _, _, patch, deep = shape.sizes
        clear(builder, self.patch, patch + deep, self.thread, shape.threads)
        tensor.wait(builder, 0)
        if not shape.held:
            pixels.round()
        tensor.barrier(builder)
        held = [self._pixels(step) for step in range(shape.terms // STEP)] if shape.held else None
        totals = self._loop(held)
        leave(self.frame, shape, self.place, self.down, self.buffers, self.lane, self.out_row, self.out_column, totals)

    # -- copies -------------------------------------------------------------------------------------------------
    def _rise(self, first: L.Value, stage: L.Value) -> None:
        self.rise.fetch(first, stage, L.I32(self.shape.block.terms))

    def _loop(self, held: list[list[list[L.Value]]] | None) -> Totals:
        """All pieces of channels."""
        builder, shape = self.builder, self.shape
        up, down = self.ring
        before = builder.block
        loop, after = builder.append_basic_block("pieces"), builder.append_basic_block("pieces.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number = builder.phi(L.I32)
        number.add_incoming(L.I32(0), before)
        carried = [[[builder.phi(L.F32) for _ in range(4)] for _ in range(self._wide)] for _ in range(shape.tall)]
        following = builder.add(number, L.I32(1))
        more = builder.icmp_signed("<", following, L.I32(shape.pieces))
        odd, first = builder.and_(number, L.I32(1)), builder.mul(number, L.I32(shape.chunk))
        mine_up, mine_down = (builder.mul(odd, L.I32(size)) for size in (up, down))
        if shape.pieces > 1:
            with builder.if_then(more):
                other = builder.sub(L.I32(up), mine_up)
                self._rise(builder.add(first, L.I32(shape.chunk)), other)
        self.fall.start(first, mine_down, builder.sub(L.I32(shape.block.channels), first))
        tensor.commit(builder)
        filters = self.windows.filters(first)
        self._expand(first, mine_up, held)
        tensor.barrier(builder)
        self.windows.compute(first, filters)
        tensor.wait(builder, 0)
        tensor.barrier(builder)
        sums = self._project(mine_down, [[list(tile) for tile in row] for row in carried])
        number.add_incoming(following, builder.block)
        for row, made in zip(carried, sums, strict=True):
            for tile, values in zip(row, made, strict=True):
                for phi, value in zip(tile, values, strict=True):
                    phi.add_incoming(L.F32(0.0), before)
                    phi.add_incoming(value, builder.block)
        builder.cbranch(more, loop, after)
        builder.position_at_end(after)
        return sums

    # -- products -----------------------------------------------------------------------------------------------
    @property
    def _wide(self) -> int:
        """Fragments of 8 columns of a warp's results that there are."""
        shape = self.shape
        if shape.project[1] > 1 or self.down.lone:
            return shape.broad // EIGHT
        return -(-shape.block.columns // EIGHT)

    def _pixels(self, step: int) -> list[list[L.Value]]:
        """Fragments of the input pixels."""
        shape, found = self.shape, []
        for row in range(shape.high):
            offset = WORD * (row * ROW_TILE * shape.input_pitch + step * STEP)
            words = tensor.read_matrices(self.builder, self.left, offset)
            found.append([tensor.to_tf32(self.builder, w) for w in words] if shape.held else words)
        return found

    def _expand(self, first: L.Value, stage: L.Value, held: list[list[list[L.Value]]] | None) -> None:
        """A piece of channels of all pixels, with what follows, into the patch."""
        builder, shape = self.builder, self.shape
        wide = self.up.warp // EIGHT
        sums: Totals = [[[L.F32(0.0)] * 4 for _ in range(wide)] for _ in range(shape.high)]
        for step in range(shape.terms // STEP):
            rows = held[step] if held is not None else self._pixels(step)
            columns = self.up_fragments.read(stage, step * STEP)
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    sums[i][j] = tensor.multiply(builder, "tf32", row, column, sums[i][j])
        factor, offsets = columns_of(self.up)
        mine = builder.add(self.column, builder.mul(builder.and_(self.lane, L.I32(3)), L.I32(factor)))
        runs = _runs(offsets)
        values = self.chain.apply(
            builder.add(first, mine), factor,
            [[(offset, [row[j][2 * half + k] for row in sums for half in (0, 1)]) for offset, (j, k) in run]
             for run in runs],
        )  # fmt: skip
        for number, (place, inside) in enumerate(self.rows):
            target = builder.add(self.patch, builder.mul(
                builder.add(builder.mul(place, L.I32(shape.patch_pitch)), mine), L.I32(WORD)))  # fmt: skip
            for run, found in zip(runs, values, strict=True):
                words = [builder.bitcast(column[number], L.I32) for column in found]
                tensor.write_words(builder, target, WORD * run[0][0], words, inside)

    def _project(self, stage: L.Value, sums: Totals) -> Totals:
        """What a piece of channels adds to the results."""
        builder, shape = self.builder, self.shape
        for step in range(shape.chunk // STEP):
            columns = self.down_fragments.read(stage, step * STEP)[: self._wide]
            for i in range(shape.tall):
                offset = WORD * (i * ROW_TILE * shape.deep_pitch + step * STEP)
                row = tensor.read_matrices(builder, self.right, offset)
                for j, column in enumerate(columns):
                    sums[i][j] = tensor.multiply(builder, "tf32", row, column, sums[i][j])
        return sums


Run = list[tuple[int, tuple[int, int]]]


def _runs(offsets: list[list[int]]) -> list[Run]:
    """A lane's columns in runs of 2 or 4 neighbours: (offset, (fragment, which of its two))."""
    columns = sorted((offset, (j, k)) for j, two in enumerate(offsets) for k, offset in enumerate(two))
    found: list[Run] = []
    for column in columns:
        if not found or column[0] != found[-1][-1][0] + 1:
            found.append([])
        found[-1].append(column)
    return found


def _left(builder: GpuBuilder, lane: L.Value, shared: L.Value, row: L.Value, pitch: int) -> L.Value:
    """Where this lane's line of a fragment's matrices begins: rows, eight more, then both with the next four terms."""
    line = builder.add(row, builder.and_(lane, L.I32(15)))
    place = builder.mul(line, L.I32(WORD * pitch))
    return builder.add(builder.add(shared, place), builder.mul(builder.lshr(lane, L.I32(4)), L.I32(16)))

"""Convolution with few input channels (a network's first layer) on ``mma.sync``, reading its operand from an image
patch.

This is the *patch* form.  A block copies the patch of the image that a tile of outputs needs
(`schedule.gpu.conv.few_channels_tile`) into shared memory, with zeros outside the image, and keeps the filters
there, rounded to TF32.  Fragments of the A operand are read from the patch where they lie: no im2col matrix is
built.  Beyond the last k the filters are zeros and, since the patch may hold infinities, the pixels too.  With two
stages the next tile's patch is copied during the multiplications.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.conv.few_channels_loads import FilterLoader, ImageLoader
from jcuts.codegen.cuda.gemm.epilogue import Totals, epilogue
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, TYPES, GemmOperand
from jcuts.schedule.gpu.conv.few_channels_tile import FOUR, LINES, TILE, WORD, FewChannelTile, shape_of

EIGHT = 8  # rows of outputs of a fragment's half, columns of a fragment


def patch_shape(program: Program) -> FewChannelTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    shape, params = shape_of(program), dict(program.params)
    if not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no patches of {params['tile']} outputs by warps {params['warps']}")
    return shape


class FewChannelConvKernel:
    """Emits one thread of the few-channel convolution."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: FewChannelTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.buffers = builder, program, tile, buffers
        self.phase, thread = program.phases[0], integers["thread"]
        self.thread = thread
        self.shared = shared
        self.lane = builder.and_(thread, L.I32(WARP - 1))
        _, groups = tile.blocks
        block = integers["block"]
        column = builder.mul(builder.udiv(block, L.I32(groups)), L.I32(tile.columns))
        self.first = builder.mul(builder.urem(block, L.I32(groups)), L.I32(tile.share))
        self.frame = M.Frame(builder, {COLUMNS: column}, pointers, self.phase.ranges(), {})
        self.copier = ImageLoader(self.frame, tile, self.shared)
        self.filters = FilterLoader(self.frame, tile, thread, builder.add(self.shared, L.I32(tile.stages * tile.patch)))
        warp = builder.lshr(thread, L.I32(5))
        _, wide, across = tile.warps
        high, long, broad = tile.warp
        self.row = builder.mul(builder.udiv(warp, L.I32(wide * across)), L.I32(high))
        self.pixel = builder.mul(builder.urem(builder.udiv(warp, L.I32(across)), L.I32(wide)), L.I32(long))
        self.column = builder.mul(builder.urem(warp, L.I32(across)), L.I32(broad))

    def emit(self) -> None:
        """Computes all output tiles of the block."""
        builder, shape = self.builder, self.shape
        self._start(self.first, L.I32(0))
        self.filters.copy()
        readers = self._patterns()
        columns = self._columns()
        count: L.Value = L.I32(shape.share)
        if shape.tiles % shape.share:
            left = builder.sub(L.I32(shape.tiles), self.first)
            count = builder.select(builder.icmp_signed("<", left, count), left, count)
        if shape.share == 1:
            self._arrived()
            self._finish(self.first, self._sums(readers, columns, self._begin(self.first, L.I32(0))))
            return
        before = builder.block
        loop, after = builder.append_basic_block("tiles"), builder.append_basic_block("tiles.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        number = builder.phi(L.I32)
        number.add_incoming(L.I32(0), before)
        following = builder.add(number, L.I32(1))
        more = builder.icmp_signed("<", following, count)
        tile = builder.add(self.first, number)
        stage = self._stage(number)
        self._arrived()
        if shape.stages == 2:
            self._next(more, tile, following)
        totals = self._sums(readers, columns, self._begin(tile, stage))
        if shape.stages == 1:
            ptx_mma.barrier(builder)
            self._next(more, tile, following)
        self._finish(tile, totals)
        number.add_incoming(following, builder.block)
        builder.cbranch(more, loop, after)
        builder.position_at_end(after)

    # -- copies -------------------------------------------------------------------------------------------------
    def _stage(self, number: L.Value) -> L.Value:
        if self.shape.stages == 1:
            return L.I32(0)
        return self.builder.mul(self.builder.and_(number, L.I32(1)), L.I32(self.shape.patch))

    def _begin(self, tile: L.Value, stage: L.Value) -> L.Value:
        """Offset of a tile's first line from the first patch."""
        if not self.shape.half_word_lines:
            return stage
        middle = self.copier.middle(self._places(tile))
        return self.builder.add(stage, self.builder.mul(middle, L.I32(self.shape.patches.item)))

    def _start(self, tile: L.Value, stage: L.Value) -> None:
        self.copier.start(self._places(tile), self._begin(tile, stage), _opaque(self.builder, self.thread))
        ptx_mma.cp_async_commit(self.builder)

    def _next(self, more: L.Value, tile: L.Value, following: L.Value) -> None:
        """Prefetches the next tile's patch, if there is one."""
        with self.builder.if_then(more):
            self._start(self.builder.add(tile, L.I32(1)), self._stage(following))

    def _arrived(self) -> None:
        ptx_mma.cp_async_wait(self.builder, 0)
        ptx_mma.barrier(self.builder)

    def _places(self, tile: L.Value) -> dict[str, L.Value]:
        """Coordinates of a tile: first row and output, image."""
        builder, found = self.builder, self.shape.patches
        down, across = self.shape.counts
        place = builder.mul(builder.urem(tile, L.I32(across)), L.I32(self.shape.pixels))
        variables = {**self.frame.variables, ROWS: place}
        rest = builder.udiv(tile, L.I32(across))
        if found.vertical is not None:
            row = builder.urem(rest, L.I32(down))
            variables[found.vertical.name] = builder.mul(row, L.I32(self.shape.rows))
        rest = builder.udiv(rest, L.I32(down))
        for axis in reversed(found.others):
            variables[axis.name] = rest if axis is found.others[0] else builder.urem(rest, L.I32(axis.extent))
            rest = builder.udiv(rest, L.I32(axis.extent))
        return variables

    # -- products -------------------------------------------------------------------------------------------------
    def _patterns(self) -> dict[tuple[int, ...], L.Value]:
        """For every pattern of four k the address of this lane's k, for its first pixel and the first stage."""
        builder, shape, item = self.builder, self.shape, self.shape.patches.item
        down, across = shape.patches.step
        pixel = builder.mul(builder.lshr(self.lane, L.I32(2)), L.I32(shape.fragment_row_stride))
        place = builder.mul(builder.add(self.pixel, pixel), L.I32(across))
        place = builder.add(place, builder.mul(self.row, L.I32(down * shape.pitch)))
        place = builder.add(self.shared, builder.mul(builder.add(place, L.I32(shape.early)), L.I32(item)))
        term = builder.and_(self.lane, L.I32(3))
        found: dict[tuple[int, ...], L.Value] = {}
        for four in shape.k_offsets:
            pattern = tuple(t - four[0] for t in four)
            if pattern in found:
                continue
            if len({b - a for a, b in itertools.pairwise(pattern)}) == 1:
                moved = builder.mul(term, L.I32(item * pattern[1]))
            else:
                moved = L.I32(0)
                for number in (1, 2, 3):
                    holds = builder.icmp_signed("==", term, L.I32(number))
                    moved = builder.select(holds, L.I32(item * pattern[number]), moved)
            found[pattern] = builder.add(place, moved)
        return found

    def _columns(self) -> L.Value:
        """Address of this lane's first two filters of its first k."""
        builder, shape = self.builder, self.shape
        line = builder.mul(builder.and_(self.lane, L.I32(3)), L.I32(WORD * shape.filters_pitch))
        column = builder.add(self.column, builder.mul(builder.lshr(self.lane, L.I32(2)), L.I32(2)))
        return builder.add(self.filters.into, builder.add(line, builder.mul(column, L.I32(WORD))))

    def _sums(self, patterns: dict[tuple[int, ...], L.Value], columns: L.Value, stage: L.Value) -> Totals:
        """Mainloop: accumulators of this warp [row, then 16 outputs][8 columns][4], fragments read one k-step ahead."""
        builder, shape = self.builder, self.shape
        high, long, broad = shape.warp
        count, kind = high * long // TILE, TYPES[shape.patches.dtype]
        sums: Totals = [[[L.F32(0.0)] * 4 for _ in range(broad // EIGHT)] for _ in range(count)]
        places = (
            {p: builder.add(v, stage) for p, v in patterns.items()}
            if shape.stages > 1 or shape.half_word_lines
            else patterns
        )
        near = (self._left(places, 0), self._right(columns, 0))
        for step in range(shape.steps):
            rows, filters = near
            if step + 1 < shape.steps:
                near = (self._left(places, step + 1), self._right(columns, step + 1))
            for i, row in enumerate(rows):
                for j, column in enumerate(filters):
                    sums[i][j] = ptx_mma.mma_sync(builder, kind, row, column, sums[i][j])
        return sums

    def _left(self, patterns: dict[tuple[int, ...], L.Value], step: int) -> list[list[L.Value]]:
        """A fragments: four registers per 16 outputs, row by row of the warp's tile."""
        builder, shape = self.builder, self.shape
        high, long, _ = shape.warp
        down, across = shape.patches.step
        lower, many = 1 if shape.fragment_row_stride == 2 else EIGHT, WORD // shape.patches.item
        found = []
        for row in range(high):
            for pixel in range(0, long, TILE):
                words = []
                for half in (0, 1):
                    for more in (0, lower):
                        offset = row * down * shape.pitch + (pixel + more) * across
                        fours = range((2 * step + half) * many, (2 * step + half + 1) * many)
                        terms = [self._term(patterns, four, offset) for four in fours]
                        words.append(terms[0] if many == 1 else ptx_mma.pack_b16x2(builder, *terms))
                found.append(words)
        return found

    def _term(self, patterns: dict[tuple[int, ...], L.Value], four: int, offset: int) -> L.Value:
        """This lane's k of a four, of the pixel that is so many elements behind its first one."""
        builder, shape = self.builder, self.shape
        item, real = shape.patches.item, shape.real(four)
        kind = L.I32 if item == WORD else ir.IntType(16)
        if real == 0:
            return kind(0)
        places = shape.k_offsets[four]
        address = patterns[tuple(t - places[0] for t in places)]
        offset = item * (places[0] + offset)
        if item == WORD:
            value = ptx_mma.to_tf32(builder, ptx_mma.ld_shared_b32(builder, address, offset))
        else:
            value = ptx_mma.ld_shared_b16(builder, address, offset)
        if real == FOUR:
            return value
        term = builder.and_(self.lane, L.I32(3))
        return builder.select(builder.icmp_signed("<", term, L.I32(real)), value, kind(0))

    def _right(self, place: L.Value, step: int) -> list[list[L.Value]]:
        """B fragments: two registers per 8 columns; even and odd columns of 16 are interleaved."""
        shape = self.shape
        found = []
        for column in range(0, shape.warp[2], TILE):
            offset = WORD * (step * LINES * shape.filters_pitch + column)
            near = ptx_mma.read_pair(self.builder, place, offset)
            far = ptx_mma.read_pair(self.builder, place, offset + WORD * FOUR * shape.filters_pitch)
            found += [[near[0], far[0]], [near[1], far[1]]]
        return found

    # -- the exit -------------------------------------------------------------------------------------------------
    def _finish(self, tile: L.Value, totals: Totals) -> None:
        """Runs the epilogue on a thread's accumulators, one row of outputs after the other."""
        builder, shape, found = self.builder, self.shape, self.shape.patches
        high, long, broad = shape.warp
        variables = self._places(tile)
        lane = _opaque(builder, self.lane)
        variables[ROWS] = builder.add(variables[ROWS], self.pixel)
        variables[COLUMNS] = builder.add(variables[COLUMNS], self.column)
        tiles = (
            SmemTile(_side(ROWS, shape.fragment_row_stride == 1), found.outputs, shape.pixels, LINES, long),
            SmemTile(_side(COLUMNS, False), found.columns, shape.columns, LINES, broad),
        )
        frame = replace(self.frame, variables=variables)
        if found.vertical is not None:
            name = found.vertical.name
            variables[name] = builder.add(variables[name], self.row)
            frame.ranges = {**frame.ranges, name: shape.counts[0] * shape.rows - high + 1}
        epilogue(frame, self.phase, tiles, self.buffers, lane, totals, found.vertical)


def _opaque(builder: GpuBuilder, value: L.Value) -> L.Value:
    """The value through opaque PTX, so that nothing computed from it is hoisted out of a loop (register pressure)."""
    return asm(builder, "mov.b32 $0, $1;", L.I32, [value], effects=True)


def _side(outer: str, along_terms: bool) -> GemmOperand:
    """Operand description for `gemm.epilogue`: how a lane's results are distributed."""
    return GemmOperand("", "float32", Index(), (), outer, along_terms, 1, LINES, 1)

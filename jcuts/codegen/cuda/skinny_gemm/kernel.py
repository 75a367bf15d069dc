"""Skinny GEMM kernel: ``mma.sync`` with W as its 16-row operand, a ``cp.async`` ring per warp, K split over warps.

Of a product of 2 to 16 rows the usual tile wastes most rows of the tensor core's 16 or 64, and memory decides.  Here
the operands change places: 16 columns of W are the rows of an ``mma.m16n8k8`` (TF32) or ``m16n8k16`` (16-bit floats),
up to 8 rows of x its columns.  A lane copies 16 bytes of W at a time into the ring of its warp in shared memory and
multiplies them as they are (`loads`): a ring of ``flight`` tiles of k per warp keeps copies on the way, with no barrier
of the block in the loop and no ``ldmatrix``.  The warps of a block along K leave their sums in shared memory, then
threads add them up in a fixed order and run the epilogue; blocks of a cluster by DSMEM, as in `gemv.kernel`, or split
over the grid (`gemm.split_k`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.gemm.epilogue import Totals
from jcuts.codegen.cuda.gemm.epilogue_prefetch import prefetch_epilogue_operands
from jcuts.codegen.cuda.gemm.register_double_buffer import CarriedLoop
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import cluster as ptx_cluster
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP, warp_barrier, write_word
from jcuts.codegen.cuda.skinny_gemm.loads import (
    KContiguousCopies,
    LaneCopies,
    Live,
    NContiguousCopies,
    Place,
    SegmentLanes,
    Words,
    fragment_columns,
    weight_fragments,
)
from jcuts.codegen.cuda.skinny_gemm.tile import WORDS, SkinnyTile
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.kernel_ir.register_tiling import points
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, TYPES, B, S
from jcuts.schedule.gpu.machine import ACCESS
from jcuts.schedule.gpu.skinny_gemm.schedules import LANES, LINE_BYTES, M_TILE, N_TILE, WORD


class SkinnyGemmKernel:
    """Emits one thread of the skinny GEMM."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: SkinnyTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        """Args: as of `TileKernel`."""
        if tile.cluster > 1 and builder.capability < (9, 0):
            raise CompileRejected(f"{program.name}: clusters of blocks need compute capability 9.0")
        self.builder, self.tile, self.buffers, self.shared = builder, tile, buffers, shared
        self.phase, self.thread, self.pointers = program.phases[0], integers["thread"], pointers
        lane, warp = builder.and_(self.thread, L.I32(WARP - 1)), builder.lshr(self.thread, L.I32(5))
        self.line, self.part = builder.lshr(lane, L.I32(2)), builder.and_(lane, L.I32(LANES - 1))
        self.across, self.deep = builder.urem(warp, L.I32(tile.warps[0])), builder.udiv(warp, L.I32(tile.warps[0]))
        self.rank = builder.urem(integers["block"], L.I32(tile.cluster))
        self.variables = self._places(builder.udiv(integers["block"], L.I32(tile.cluster)))
        self.frame = M.Frame(builder, self.variables, pointers, self.phase.ranges(), {})
        self.kind = TYPES[tile.left.dtype]

    def emit(self) -> None:
        """The output tile: mainloop, sums over warps and blocks, epilogue."""
        sums = self.mainloop()
        ptx_mma.barrier(self.builder)
        self._store_partials(sums)
        ptx_mma.barrier(self.builder)
        self._finish()

    def _places(self, block: L.Value) -> dict[str, L.Value]:
        """First row and column of the block, batch, split of K."""
        builder, tile = self.builder, self.tile
        along = L.I32(tile.blocks_along)
        column, rest = builder.urem(block, along), builder.udiv(block, along)
        found = {ROWS: L.I32(0), COLUMNS: builder.mul(column, L.I32(tile.columns))}
        for axis in reversed([a for a in self.phase.axes if a.name in (S, B)]):
            found[axis.name], rest = builder.urem(rest, L.I32(axis.extent)), builder.udiv(rest, L.I32(axis.extent))
        return found

    # -- sums ---------------------------------------------------------------------------------------------------
    def mainloop(self) -> Totals:
        """Accumulators of this warp [16 columns][8 rows][4]."""
        builder, tile = self.builder, self.tile
        self.slice = builder.mul(self.rank, L.I32(tile.share * tile.terms))
        if S in self.variables:
            self.slice = builder.mul(self.variables[S], L.I32(tile.share * tile.terms))
        warp = builder.mul(builder.lshr(self.thread, L.I32(5)), L.I32(tile.flight * tile.stage))
        self.ring = builder.add(self.shared, warp)
        operands = self._operands()
        lives = [self._live(L.I32(0), o.term) for o in operands]
        for number in range(tile.flight):
            self._start(operands, [o.places for o in operands], lives, number)
        self._prefetch_epilogue()
        wide = tile.warp_columns // M_TILE
        sums: Totals = [[[L.F32(0.0)] * 4 for _ in range(tile.rows // N_TILE)] for _ in range(wide)]
        loop = CarriedLoop(builder, "terms", [L.I32(0)], [], sums)
        sums, done = loop.sums, builder.add(loop.numbers[0], L.I32(1))
        places = [o.moved(builder.mul(done, L.I32(tile.terms))) for o in operands]
        lives = [self._live(done, o.term) for o in operands]
        again = builder.icmp_signed("<", done, L.I32(tile.share))
        for number in range(tile.flight):
            ptx_mma.cp_async_wait(builder, tile.flight - 1)
            if not tile.right.along_terms:  # other lanes have copied
                warp_barrier(builder)
            self._multiply(self._read(number), sums)
            if not tile.right.along_terms:  # they have read
                warp_barrier(builder)
            self._start(operands, places, lives, number, again)
        loop.close([done], [], sums, again)
        return sums

    def _prefetch_epilogue(self) -> None:
        """Bias and residual on their way while K is summed: the kernel is over soon after its last copies."""
        tile = self.tile
        sides = zip((tile.left, tile.right), tile.extents, (tile.extents[0], tile.columns), strict=True)
        rows, columns = (SmemTile(side, extent, size, tile.terms, size) for side, extent, size in sides)
        thread, rank = (self.thread, tile.threads), (self.rank, tile.cluster)
        prefetch_epilogue_operands(self.frame, self.phase, (rows, columns), thread, rank)

    def _operands(self) -> list[LaneCopies]:
        """The lane's copies of x and of W; the places of the ring where it reads what it multiplies."""
        builder, tile = self.builder, self.tile
        lane, mine = builder.and_(self.thread, L.I32(WARP - 1)), builder.mul(self.deep, L.I32(tile.flight * tile.depth))
        slot = builder.add(self.ring, builder.mul(lane, L.I32(ACCESS)))
        ks = (self.slice, builder.add(mine, builder.mul(self.part, L.I32(tile.vector))))
        self.sources = [[slot], [slot]]
        x = KContiguousCopies(self.frame, tile.left, ks, slot, cached=True)
        x.add_lines(self.line, range(0, tile.rows, N_TILE), tile.extents[0], tile.extents[0] % N_TILE == 0)
        whole, extent = tile.extents[1] % tile.columns == 0, tile.extents[1]
        first = builder.add(self.variables[COLUMNS], builder.mul(self.across, L.I32(tile.warp_columns)))
        if tile.right.along_terms:
            w = KContiguousCopies(self.frame, tile.right, ks, slot, cached=False)
            w.add_lines(builder.add(first, self.line), range(0, tile.warp_columns, N_TILE), extent, whole)
            return [x, w]
        lanes = SegmentLanes(builder, lane, tile.vector, tile.segment)
        self.sources[1] = [builder.add(self.ring, source) for source in lanes.sources]
        ks = (self.slice, builder.add(mine, lanes.term))
        slot = builder.add(self.ring, lanes.slot)
        lines = NContiguousCopies(self.frame, tile.right, ks, slot, tile.segment)
        first = builder.add(first, builder.mul(lanes.chunk, L.I32(tile.vector)))
        lines.add_groups(first, range(0, tile.warp_columns, tile.group), extent, whole)
        return [x, lines]

    def _live(self, step: L.Value, first: L.Value) -> Live:
        """Whether a k of a step is one of the block's; beyond the last one zeros are multiplied.

        Args: first: the first k of the lane in the slice; the result asks for one so many behind it.
        """
        builder, tile = self.builder, self.tile
        slices = tile.terms * tile.share
        if tile.total % slices == 0:  # all steps are full
            return lambda term: None
        left = builder.sub(L.I32(tile.total), self.slice)
        left = builder.sub(left, builder.mul(step, L.I32(tile.terms)))

        @functools.cache
        def live(term: int) -> L.Value:
            return builder.icmp_signed("<", first, builder.sub(left, L.I32(term)))

        return live

    def _start(
        self,
        operands: list[LaneCopies],
        places: list[list[Place]],
        lives: list[Live],
        number: int,
        where: L.Value | None = None,
    ) -> None:
        """Starts the copies of a tile of k, into its stage. Args: where: whether there is a further step."""
        far = number * self.tile.stage
        with self.builder.if_then(where) if where is not None else nullcontext():
            for operand, addresses, live in zip(operands, places, lives, strict=True):
                far += operand.start(addresses, number * self.tile.depth, live, (operand.slot, far))
        ptx_mma.cp_async_commit(self.builder)

    def _read(self, number: int) -> Words:
        """The lane's registers of a stage: accesses of x, then of W, whose parts of 16 bytes may lie apart."""
        tile, words = self.tile, []
        first, lines = number * tile.stage, tile.rows // N_TILE
        for line in range(tile.stage // LINE_BYTES):
            sources = self.sources[line >= lines]
            each = WORDS // len(sources)
            parts = [ptx_mma.read_words(self.builder, s, first + line * LINE_BYTES, each) for s in sources]
            words.append([word for part in parts for word in part])
        return words

    def _multiply(self, words: Words, sums: Totals) -> None:
        """A tile of k: two steps of ``mma``."""
        builder, tile = self.builder, self.tile
        count = tile.rows // N_TILE
        x = [self._rounded(w, tile.left.buffer) for w in words[:count]]
        for i, fragment in enumerate(weight_fragments(builder, tile.right, words[count:], tile.lane_columns)):
            for step, registers in enumerate(fragment):
                weights = self._rounded(registers, tile.right.buffer)
                for j, row in enumerate(x):
                    sums[i][j] = ptx_mma.mma_sync(builder, self.kind, weights, row[2 * step : 2 * step + 2], sums[i][j])

    def _rounded(self, words: list[L.Value], buffer: str) -> list[L.Value]:
        if self.kind != "tf32" or self.buffers[buffer].tf32:
            return words
        return [ptx_mma.to_tf32(self.builder, w) for w in words]

    # -- across warps and blocks ----------------------------------------------------------------------------------
    def _store_partials(self, sums: Totals) -> None:
        """A warp's sums into shared memory: [warp along K][row][column]."""
        builder, tile = self.builder, self.tile
        factor, offsets = fragment_columns(tile.right, tile.warp_columns, tile.lane_columns)
        row = builder.add(builder.mul(self.deep, L.I32(tile.rows)), builder.mul(self.part, L.I32(2)))
        column = builder.mul(self.across, L.I32(tile.warp_columns))
        column = builder.add(column, builder.mul(self.line, L.I32(factor)))
        place = builder.add(builder.mul(row, L.I32(tile.pitch)), column)
        place = builder.add(self.shared, builder.mul(place, L.I32(WORD)))
        for j, odd in ((j, odd) for j in range(tile.rows // N_TILE) for odd in (0, 1)):
            far = (j * N_TILE + odd) * tile.pitch
            values = {at: sums[i][j][2 * high + odd] for i, pair in enumerate(offsets) for high, at in enumerate(pair)}
            each = min(WORDS, factor)  # neighbouring columns in one store
            for at in sorted(values)[::each]:
                words = [builder.bitcast(values[at + k], L.I32) for k in range(each)]
                ptx_mma.write_words(builder, place, WORD * (far + at), words)

    def _finish(self) -> None:
        """Totals over the warps along K, of a cluster over its blocks, and the epilogue, which the first block runs."""
        builder, tile = self.builder, self.tile
        many = tile.rows_per_thread
        columns, busy = L.I32(tile.columns), tile.columns * tile.extents[0] // many
        live = builder.icmp_signed("<", self.thread, L.I32(busy))
        thread = builder.select(live, self.thread, L.I32(busy - 1))
        column, row = builder.urem(thread, columns), builder.mul(builder.udiv(thread, columns), L.I32(many))
        place = builder.add(builder.mul(row, L.I32(tile.pitch)), column)
        place = builder.add(self.shared, builder.mul(place, L.I32(WORD)))
        totals = []
        for number in range(many):
            offsets = [WORD * tile.pitch * (deep * tile.rows + number) for deep in range(tile.warps[1])]
            parts = [builder.bitcast(ptx_mma.ld_shared_b32(builder, place, o), L.F32) for o in offsets]
            totals.append(functools.reduce(builder.fadd, parts))
        if tile.cluster == 1:
            self._epilogue(totals, row, column, live)
            return
        mine = builder.add(builder.mul(row, columns), column)
        mine = builder.add(builder.add(self.shared, L.I32(tile.totals)), builder.mul(mine, L.I32(WORD)))
        for number, value in enumerate(totals):
            write_word(builder, mine, number * tile.columns * WORD, value, WORD, live)
        ptx_mma.cluster_barrier(builder)
        with builder.if_then(builder.icmp_signed("==", self.rank, L.I32(0))):
            blocks = [ptx_mma.mapa(builder, mine, number) for number in range(tile.cluster)]
            for number in range(many):
                offset = number * tile.columns * WORD
                totals[number] = functools.reduce(
                    builder.fadd, [ptx_cluster.ld_shared_f32(builder, block, offset) for block in blocks]
                )
            self._epilogue(totals, row, column, live)
        ptx_mma.cluster_barrier(builder)  # no block may end while the first one reads its shared memory

    def _epilogue(self, totals: list[L.Value], row: L.Value, column: L.Value, live: L.Value) -> None:
        """Runs the exit graph on the sums of neighbouring rows of one column."""
        builder, extent = self.builder, self.tile.extents[1]
        column = builder.add(self.variables[COLUMNS], column)
        if extent % self.tile.columns:
            inside = builder.icmp_signed("<", column, L.I32(extent))
            live, column = builder.and_(live, inside), builder.select(inside, column, L.I32(extent - 1))
        counts = tuple((a.name, len(totals) if a.name == ROWS else 1) for a in self.phase.axes)
        phase = replace(self.phase, axes=tuple(replace(a, unroll=1) for a in self.phase.axes))
        variables = {**self.variables, ROWS: row, COLUMNS: column}
        end = RegisterTileEmitter(
            builder, phase, TileVariant(counts), self.buffers, self.pointers, variables, {ROWS: len(totals)}
        )
        end.live = live
        for point, value in zip(points(end.axes), totals, strict=True):
            with builder.goto_entry_block():
                slot = builder.alloca(L.F32)
            builder.store(value, slot)
            end.slots[0, point, 0] = [slot]
        end._finish()

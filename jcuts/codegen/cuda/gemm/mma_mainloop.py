"""GEMM on tensor cores with ``mma.sync``: a multistage ``cp.async`` pipeline, ``ldmatrix`` fragments, fused epilogue.

The *product* form (schedule parameter ``cuda``).  A block computes ``rows x columns`` outputs.  Its threads copy tiles
of both operands into a ring of ``stages`` stages in shared memory, ``stages - 1`` k-tiles ahead; warps read fragments,
round float32 to TF32 and multiply.  Warps divide the tile's rows and columns and, where the third number of ``warps``
is more than 1, the k-steps of every k-tile (slice-K); the blocks of a ``cluster`` divide the k-tiles (split-K through
DSMEM).  Partial accumulators are added up by `split_k_reduce`; the exit graph then runs on them in registers
(`epilogue`).

The program is that of `lower.patterns.gemm`; split-K over the grid is an axis ``s`` of the outputs (`split_k`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm import epilogue_prefetch
from jcuts.codegen.cuda.gemm.column_reduction import ColumnReducer
from jcuts.codegen.cuda.gemm.epilogue import Totals, epilogue
from jcuts.codegen.cuda.gemm.epilogue_bulk_copy import EpilogueStaging
from jcuts.codegen.cuda.gemm.smem_tile import FragmentReader, SmemTile, TileLoader
from jcuts.codegen.cuda.gemm.split_k_reduce import reduce_across_warps_and_cluster
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.column_sums import SUMS
from jcuts.lower.patterns.gemm import (
    COLUMNS,
    ROWS,
    TYPES,
    B,
    K,
    S,
    gemm_operands,
    k_extent,
    k_tiles_per_split,
    prologue,
)

GROUP = 8  # tiles of rows whose blocks run side by side, so that they find the same columns in the L2 cache


@dataclass(frozen=True)
class MmaKernelTile:
    """Block tile and pipeline of the ``mma.sync`` GEMM.

    Attributes:
        left, right: shared-memory tiles of the operands.
        warps: warps along rows, along columns, along K (slice-K).
        stages: stages of the shared-memory ring.
        share: k-tiles per block.
        terms: K extent of the whole GEMM.
        cluster: blocks that split K among them and add up through DSMEM.
        sums: partial results per column of the tile, of column sums in the epilogue.
    """

    left: SmemTile
    right: SmemTile
    warps: tuple[int, int, int]
    stages: int
    share: int
    terms: int
    cluster: int
    sums: int = field(default=0, kw_only=True)

    @property
    def stage(self) -> int:
        """Bytes of one pipeline stage (a k-tile of both operands)."""
        return self.left.bytes + self.right.bytes

    @property
    def prefetch_distance(self) -> int:
        """k-tiles whose copies are issued before the first multiplication."""
        return self.stages - 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * math.prod(self.warps)

    @property
    def split_k_smem(self) -> int:
        """Shared memory [B] of the split-K reduction between warps and blocks."""
        alone = self.warps[2] == self.cluster == 1
        return 0 if alone else 4 * self.left.size * self.right.size * self.warps[2]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return max(self.stage * self.stages, self.split_k_smem, self.column_smem)

    @property
    def column_smem(self) -> int:
        """Shared memory [B] in which the warps along the rows combine their column sums."""
        return 4 * self.sums * self.warps[0] * self.right.size

    @property
    def sums_fit(self) -> bool:
        """Whether every warp has whole columns of its rows, as column sums need them."""
        return not self.sums or self.warps[2] == self.cluster == 1

    @property
    def alignment(self) -> int:
        """Alignment [B] of the shared memory."""
        return 128

    @property
    def kind(self) -> str:
        """Operand type of the ``mma`` instruction."""
        return TYPES[self.left.side.dtype]


def product_shape(program: Program) -> MmaKernelTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    params, phase = dict(program.params), program.phases[0]
    rows, columns, terms = three(params["tile"])
    along, across, deep = three(params["warps"])
    extents = phase.ranges()
    total, cluster = k_extent(program), int(str(params.get("cluster", 1)))
    share, ranks = k_tiles_per_split(extents[K], terms, cluster)
    left, right = gemm_operands(program)
    ragged = total % (terms * share * (cluster if S not in extents else 1)) != 0
    first = SmemTile(left, extents[ROWS], rows, terms, rows // max(1, along), 0, ragged)
    second = SmemTile(right, extents[COLUMNS], columns, terms, columns // max(1, across), first.bytes, ragged)
    sums, stages = int(str(params.get(SUMS, 0))), int(str(params["stages"]))
    shape = MmaKernelTile(first, second, (along, across, deep), stages, share, total, cluster, sums=sums)
    step = ptx_mma.STEP // left.item * deep
    fits = rows == along * first.warp and columns == across * second.warp and terms % step == 0
    fits = fits and first.warp % 16 == 0 and second.warp % 16 == 0 and shape.stages >= 2
    fits = fits and all(t.length % t.side.width == 0 for t in (first, second))
    fits = fits and ranks == cluster and (cluster == 1 or S not in extents) and prologue(program) is None
    fits = fits and shape.sums_fit and not (sums and S in extents)
    fits = fits and all(t.side.run % terms == 0 or t.side.run == extents[K] for t in (first, second))
    if not fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no product of tiles {params['tile']} by warps {params['warps']}")
    return shape


def three(value: object) -> tuple[int, int, int]:
    """A schedule parameter of three numbers."""
    x, y, z = (int(v) for v in value)  # type: ignore[attr-defined]
    return x, y, z


def block_count(program: Program, shape: MmaKernelTile) -> int:
    """Blocks of the grid."""
    others = shape.cluster * math.prod(a.extent for a in program.phases[0].axes if a.name in (S, B))
    return others * -(-shape.left.extent // shape.left.size) * -(-shape.right.extent // shape.right.size)


class MmaKernel:
    """Emits one thread of the ``mma.sync`` GEMM; the base of all tensor-core GEMM and convolution kernels."""

    keeper: EpilogueStaging | None = None
    reader: type[FragmentReader] = FragmentReader

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
        self.builder, self.program, self.shape, self.buffers = builder, program, tile, buffers
        self.phase, self.thread = program.phases[0], integers["thread"]
        self.shared = shared
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        along, across, _ = tile.warps
        warp = builder.lshr(self.thread, L.I32(5))
        self.deep = builder.udiv(warp, L.I32(along * across))
        self.flat = builder.urem(warp, L.I32(along * across))
        self.row_warp, self.column_warp = self._warp_places(across)
        self.rank, block = L.I32(0), integers["block"]
        if tile.cluster > 1:
            if builder.capability < (9, 0):
                raise CompileRejected(f"{program.name}: clusters of blocks need compute capability 9.0")
            self.rank, block = builder.urem(block, L.I32(tile.cluster)), builder.udiv(block, L.I32(tile.cluster))
        self.variables = self._places(block)
        ranges = self.phase.ranges()
        self.frame = M.Frame(builder, self.variables, pointers, ranges, {})

    def emit(self) -> None:
        """The output tile: mainloop, split-K reduction, epilogue."""
        totals = self.mainloop()
        if self.shape.warps[2] == self.shape.cluster == 1:
            self.epilogue(totals, L.I32(0), L.I32(0))
        else:
            self.split_k_reduce(totals)

    # -- where the block stands ---------------------------------------------------------------------------------
    def _warp_places(self, across: int) -> tuple[L.Value, L.Value]:
        """First row and column of the warp in the block's tile."""
        builder, shape = self.builder, self.shape
        row = builder.mul(builder.udiv(self.flat, L.I32(across)), L.I32(shape.left.warp))
        return row, builder.mul(builder.urem(self.flat, L.I32(across)), L.I32(shape.right.warp))

    def _places(self, block: L.Value) -> dict[str, L.Value]:
        """First row and column of the block, batch, split of K."""
        builder, shape = self.builder, self.shape
        rows = -(-shape.left.extent // shape.left.size)
        columns = -(-shape.right.extent // shape.right.size)
        found: dict[str, L.Value] = {}
        others = [a for a in self.phase.axes if a.name in (S, B)]
        rest, tile = block, block
        if others:
            tile, rest = builder.urem(block, L.I32(rows * columns)), builder.udiv(block, L.I32(rows * columns))
        for axis in reversed(others):
            found[axis.name] = rest if axis is others[0] else builder.urem(rest, L.I32(axis.extent))
            rest = builder.udiv(rest, L.I32(axis.extent))
        if columns == 1:
            row, column = tile, L.I32(0)
        elif rows <= GROUP:
            row, column = builder.urem(tile, L.I32(rows)), builder.udiv(tile, L.I32(rows))
        else:
            first = builder.mul(builder.udiv(tile, L.I32(GROUP * columns)), L.I32(GROUP))
            inside = builder.urem(tile, L.I32(GROUP * columns))
            height: L.Value = L.I32(GROUP)
            if rows % GROUP:
                left = builder.sub(L.I32(rows), first)
                height = builder.select(builder.icmp_signed("<", left, height), left, height)
            row, column = builder.add(first, builder.urem(inside, height)), builder.udiv(inside, height)
        found[ROWS] = builder.mul(row, L.I32(shape.left.size))
        found[COLUMNS] = builder.mul(column, L.I32(shape.right.size))
        return found

    # -- sums ---------------------------------------------------------------------------------------------------
    def mainloop(self) -> Totals:
        """Accumulators of this warp [tile of 16 rows][tile of 8 columns][4]."""
        builder, shape = self.builder, self.shape
        rows, columns = self.variables[ROWS], self.variables[COLUMNS]
        copiers = [
            TileLoader(self.frame, tile, shape.threads, self.thread, start, self.shared)
            for tile, start in ((shape.left, rows), (shape.right, columns))
        ]
        readers = [
            self.reader(builder, tile, self.shared, warp, self.lane)
            for tile, warp in ((shape.left, self.row_warp), (shape.right, self.column_warp))
        ]
        count, ahead = shape.share, shape.prefetch_distance
        left: L.Value = L.I32(shape.terms)
        skipped = builder.mul(self.rank, L.I32(count * shape.left.terms))
        if S in self.variables:
            left = builder.sub(left, builder.mul(self.variables[S], L.I32(count * shape.left.terms)))
        for number in range(ahead):
            if number < count:
                first = builder.add(skipped, L.I32(number * shape.left.terms))
                for copier in copiers:
                    copier.start(first, L.I32(number * shape.stage), builder.sub(left, first))
            ptx_mma.cp_async_commit(builder)
        self.prefetch_epilogue()
        return self._loop(copiers, readers, left, skipped)

    def prefetch_epilogue(self) -> None:
        """Prefetches epilogue operands where the schedule says so, after the operands' first copies."""
        if dict(self.program.params).get("early"):
            shape = self.shape
            thread, rank = (self.thread, shape.threads), (self.rank, shape.cluster)
            epilogue_prefetch.prefetch_epilogue_operands(
                self.frame, self.phase, (shape.left, shape.right), thread, rank
            )

    def _loop(
        self, copiers: list[TileLoader], readers: list[FragmentReader], left: L.Value, skipped: L.Value
    ) -> Totals:
        builder, shape = self.builder, self.shape
        count, ahead = shape.share, shape.prefetch_distance
        before = builder.block
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(kind: L.Type, start: L.Value) -> L.Value:
            found = builder.phi(kind)
            found.add_incoming(start, before)
            return found

        number = carried(L.I32, L.I32(0))
        reading, writing = carried(L.I32, L.I32(0)), carried(L.I32, L.I32(ahead * shape.stage))
        tiles = (shape.left.warp // 16, shape.right.warp // 8)
        totals = [[[carried(L.F32, L.F32(0.0)) for _ in range(4)] for _ in range(tiles[1])] for _ in range(tiles[0])]
        sums = [[list(t) for t in row] for row in totals]
        ptx_mma.cp_async_wait(builder, ahead - 1)
        ptx_mma.barrier(builder)
        self._copy_ahead(copiers, number, writing, left, skipped)
        self._multiply(readers, reading, sums)
        for phi, value in (
            (number, builder.add(number, L.I32(1))),
            (reading, self.next_stage(reading)),
            (writing, self.next_stage(writing)),
            *(
                (p, s)
                for row, made in zip(totals, sums, strict=True)
                for t, u in zip(row, made, strict=True)
                for p, s in zip(t, u, strict=True)
            ),
        ):
            phi.add_incoming(value, builder.block)
            if phi is number:
                following = value
        builder.cbranch(builder.icmp_signed("<", following, L.I32(count)), loop, after)
        builder.position_at_end(after)
        return sums

    def _copy_ahead(
        self, copiers: list[TileLoader], number: L.Value, writing: L.Value, left: L.Value, skipped: L.Value
    ) -> None:
        """Issues the copies of the k-tile ``stages - 1`` ahead, if there is one; the commit group may be empty."""
        builder, shape = self.builder, self.shape
        count, ahead = shape.share, shape.prefetch_distance
        if count > ahead:
            with builder.if_then(builder.icmp_signed("<", number, L.I32(count - ahead))):
                done = builder.mul(builder.add(number, L.I32(ahead)), L.I32(shape.left.terms))
                done = builder.add(done, skipped)
                rest = builder.sub(left, done)
                for copier in copiers:
                    copier.start(done, writing, rest)
        ptx_mma.cp_async_commit(builder)

    def next_stage(self, stage: L.Value) -> L.Value:
        """The following stage of the ring."""
        builder, shape = self.builder, self.shape
        moved = builder.add(stage, L.I32(shape.stage))
        return builder.select(builder.icmp_signed("==", moved, L.I32(shape.stage * shape.stages)), L.I32(0), moved)

    def _multiply(self, readers: list[FragmentReader], reading: L.Value, sums: Totals) -> None:
        """One k-tile, fragments read one k-step ahead."""
        builder, shape = self.builder, self.shape
        left, right = readers
        steps = shape.left.terms // left.steps // shape.warps[2]
        places = [reading, reading]
        if shape.warps[2] > 1:
            mine = [builder.mul(self.deep, L.I32(r.advance(steps * r.steps))) for r in readers]
            places = [builder.add(reading, m) for m in mine]
        near = (left.read(places[0], 0), right.read(places[1], 0))
        for step in range(steps):
            rows, columns = near
            if step + 1 < steps:
                term = (step + 1) * left.steps
                near = (left.read(places[0], term), right.read(places[1], term))
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    sums[i][j] = ptx_mma.mma_sync(builder, shape.kind, row, column, sums[i][j])

    # -- the exit -------------------------------------------------------------------------------------------------
    def split_k_reduce(self, totals: Totals) -> None:
        """Sums the partial accumulators of warps and blocks that split K; each then runs the epilogue on its slice of
        the tile.
        """
        builder, shape = self.builder, self.shape
        lane = builder.add(builder.mul(self.flat, L.I32(WARP)), self.lane)
        lanes = WARP * shape.warps[0] * shape.warps[1]
        deep, rank = (self.deep, shape.warps[2]), (self.rank, shape.cluster)
        reduce_across_warps_and_cluster(
            builder,
            totals,
            self.shared,
            lanes,
            lane,
            deep,
            rank,
            shape.right.n_tiles_per_lane_group,
            shape.left.m_fragment_stride,
            self.epilogue,
        )

    def row_slot(self) -> L.Value:
        """Number of the warp among those along the rows."""
        return self.builder.udiv(self.flat, L.I32(self.shape.warps[1]))

    def column_sums_place(self) -> tuple[L.Value, bool]:
        """Shared memory of column sums, and whether operands may lie there."""
        return self.shared, True

    def epilogue(self, totals: Totals, row: L.Value, column: L.Value) -> None:
        """Runs the exit graph on a thread's accumulators, the first of them at this place in the warp's tile."""
        builder, shape = self.builder, self.shape
        variables = {
            **self.variables,
            ROWS: builder.add(builder.add(self.variables[ROWS], self.row_warp), row),
            COLUMNS: builder.add(builder.add(self.variables[COLUMNS], self.column_warp), column),
        }
        frame = replace(self.frame, variables=variables)
        if self.keeper is not None:
            self.keeper.warp = (self.row_warp, self.column_warp)
        paired, reducer = bool(dict(self.program.params).get("paired", 0)), ColumnReducer.of(self)
        tiles, keeper = (shape.left, shape.right), reducer or self.keeper
        lane_column = epilogue(frame, self.phase, tiles, self.buffers, self.lane, totals, None, keeper, paired)
        if reducer is not None:
            reducer.finish(self.frame, self.variables[ROWS], self.variables[COLUMNS], lane_column)

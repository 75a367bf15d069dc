"""Products of a stage on tensor cores: ``mma.sync`` with weights in registers over all steps, K split over the warps.

Every warp has a range of the terms: before the first step it loads the fragments of its weights for all columns of the
block, and keeps them.  In a step it loads its terms of all rows (`mma_operands`), multiplies, and leaves its sums in
shared memory; behind a barrier every thread adds up those of its points in a fixed order and finishes them.  What a
point needs besides sums is in registers by then, or on its way (`point_values`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.ptx.shuffle import WARP, read_word
from jcuts.codegen.cuda.recurrence.mma_operands import StageOperands, Words, lanes_of
from jcuts.codegen.cuda.recurrence.point_values import PointValues
from jcuts.codegen.cuda.recurrence.tile import digits
from jcuts.codegen.cuda.reduction.column import new_slots
from jcuts.codegen.cuda.toolchain.target import AMPERE
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Buffer, Phase
from jcuts.kernel_ir.register_tiling import Extent, points
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.residency import sums_name
from jcuts.schedule.gpu.recurrence.stage_product import HALF_TILE, N_TILE, WORD, WORDS, MmaStage

Sums = dict[tuple[int, int, int], list[L.Value]]
"""Of (load of rows, tile of columns, tile of rows): the four sums of a lane, of 8 columns and 16 rows, or 16 and 8."""


class StageMma:
    """Emits one thread of a stage's products: `prepare` before the first step, `emit` in every step."""

    def __init__(
        self,
        builder: GpuBuilder,
        phase: Phase,
        stage: MmaStage,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        shared: Mapping[str, L.Value],
    ) -> None:
        """Args: integers: numbers of the block and of the thread; shared: addresses (i32) of what lies in shared
        memory, the stage's sums among it.
        """
        if builder.capability < AMPERE:
            raise CompileRejected(f"phase {stage.number}: its `mma.sync` needs compute capability 8.0")
        self.builder, self.phase, self.stage = builder, phase, stage
        self.buffers, self.pointers, self.shared = buffers, pointers, shared
        self.block, self.thread = integers["block"], integers["thread"]
        self.first = builder.mul(self.block, L.I32(stage.across))
        warp, lane = builder.udiv(self.thread, L.I32(WARP)), builder.urem(self.thread, L.I32(WARP))
        self.lanes = lanes_of(builder, stage, lane, warp)
        self.operands = StageOperands(builder, stage, buffers, pointers, shared, self.lanes)
        self.sums = shared[sums_name(stage.number)]
        self.values = PointValues(builder, buffers)

    def prepare(self) -> None:
        """Loads the fragments of the weights, which stay in registers over all steps, and what the first step's points
        need besides sums.
        """
        self.weights = self.operands.weights(self.first)
        with self._if_any_column():
            self.values.prepare([end for end, _ in self._points(L.I32(0))])

    def emit(self, step: L.Value) -> None:
        """A step."""
        builder = self.builder
        with self._if_any_column():
            ends = self._points(step)
            self.values.load_ahead([end for end, _ in ends])
            self.values.load_inputs([end for end, _ in self._points(self._following(step))])
            self._write(self._products(step), self.sums)
            ptx_mma.barrier(builder)
            for number, (end, place) in enumerate(ends):
                self._total(end, place)
                end._finish()
                self.values.keep_results(number, end)

    def _if_any_column(self) -> AbstractContextManager[object]:
        """Code for blocks that have columns."""
        blocks = -(-self.stage.product.lane.extent // self.stage.across)
        if blocks >= self.stage.blocks:
            return nullcontext()
        return self.builder.if_then(self.builder.icmp_signed("<", self.block, L.I32(blocks)))

    def _points(self, step: L.Value) -> list[tuple[RegisterTileEmitter, L.Value]]:
        threads = self.stage.warps * WARP
        return [self._point(number * threads, step) for number in range(-(-self.stage.points // threads))]

    def _following(self, step: L.Value) -> L.Value:
        """The next step, as far as there is one."""
        last = L.I32(self.stage.product.steps - 1)
        following = self.builder.add(step, L.I32(1))
        return self.builder.select(self.builder.icmp_signed("<", following, last), following, last)

    def _products(self, step: L.Value) -> Sums:
        """The sums of the warp's terms; as many rows as registers hold are on their way before one is multiplied."""
        sums, lefts = Sums(), range(len(self.stage.tiles))
        for tiles, groups in self.stage.pieces:
            loaded = {(left, t): self.operands.rows(left, t, groups, step) for t in tiles for left in lefts}
            for group in groups:
                for (left, tile), words in loaded.items():
                    self._multiply(sums, left, tile, group, words[group])
        return sums

    def _multiply(self, sums: Sums, left: int, tile: int, group: int, halves: list[Words]) -> None:
        """A group of terms of 16 rows."""
        rows = [self.operands.rounded(words, self.stage.product.lefts[left].buffer) for words in halves]
        zeros = [L.I32(0)] * WORDS
        if self.stage.is_turned:
            for half, words in enumerate(rows):
                for pair in range(self.stage.pairs[left]):
                    lower = self.weights[left, 2 * pair][group]
                    upper = self.weights[left, 2 * pair + 1][group] if 2 * pair + 1 < self.stage.tiles[left] else zeros
                    self._two_steps(sums, (left, pair, 2 * tile + half), (lower, upper), words)
            return
        lower, upper = [*rows, zeros][:2]
        for column in range(self.stage.tiles[left]):
            self._two_steps(sums, (left, column, tile), (lower, upper), self.weights[left, column][group])

    def _two_steps(self, sums: Sums, key: tuple[int, int, int], tall: tuple[Words, Words], wide: Words) -> None:
        """Args: tall: words of the lower and upper eight of the operand with 16 rows; wide: of the other one."""
        lower, upper = tall
        for at in range(0, WORDS, 2):
            fragment = [lower[at], upper[at], lower[at + 1], upper[at + 1]]
            total = sums.get(key, [L.F32(0.0)] * WORDS)
            kind = self.stage.product.kind
            sums[key] = ptx_mma.mma_sync(self.builder, kind, fragment, wide[at : at + 2], total)

    def _write(self, sums: Sums, there: L.Value) -> None:
        """The warp's sums into shared memory: [tile of columns][row][column]. Args: there: the first warp's place."""
        builder, stage, line = self.builder, self.stage, N_TILE * WORD
        if stage.is_turned:  # a lane has two rows of a column
            place = builder.add(
                builder.mul(self.lanes.part, L.I32(2 * line)), builder.mul(self.lanes.line, L.I32(WORD))
            )
        else:
            place = builder.add(
                builder.mul(self.lanes.line, L.I32(line)), builder.mul(self.lanes.part, L.I32(2 * WORD))
            )
        place = builder.add(there, builder.add(place, builder.mul(self.lanes.warp, L.I32(stage.warp_bytes))))
        for (left, column, row), found in sums.items():
            words, before = [builder.bitcast(value, L.I32) for value in found], sum(stage.tiles[:left])
            for upper in range(2):
                both = words[2 * upper : 2 * upper + 2]
                if stage.is_turned and 2 * column + upper < stage.tiles[left]:
                    at = (before + 2 * column + upper) * stage.tile_bytes + row * HALF_TILE * line
                    for odd, word in enumerate(both):
                        ptx_mma.write_words(builder, place, at + odd * line, [word])
                elif not stage.is_turned and 2 * row + upper < stage.halves:
                    at = (before + column) * stage.tile_bytes + (2 * row + upper) * HALF_TILE * line
                    ptx_mma.write_words(builder, place, at, both)

    def _point(self, begin: int, step: L.Value) -> tuple[RegisterTileEmitter, L.Value]:
        """The emitter of a point of this thread, and where its sums of the first warp lie.

        Threads along the columns are neighbours, then come the rows. Args: begin: the point of the first thread.
        """
        builder, stage, lane = self.builder, self.stage, self.stage.product.lane
        point = builder.add(self.thread, L.I32(begin))
        live = builder.icmp_signed("<", point, L.I32(stage.points))
        point = builder.select(live, point, L.I32(0))
        row, mine = builder.udiv(point, L.I32(stage.width)), builder.urem(point, L.I32(stage.width))
        column, last = builder.add(self.first, mine), L.I32(lane.extent - 1)
        if stage.blocks * stage.width > lane.extent:
            inside = builder.icmp_signed("<=", column, last)
            live, column = builder.and_(live, inside), builder.select(inside, column, last)
        variables = {**digits(builder, row, stage.product.axes), lane.name: column, STEP: step}
        one = TileVariant(tuple((a.name, 1) for a in self.phase.axes))
        end = RegisterTileEmitter(builder, self.phase, one, self.buffers, self.pointers, variables, {})
        end.live, end.in_place, end.shared = live, True, self.shared
        tile = builder.mul(builder.udiv(mine, L.I32(N_TILE)), L.I32(stage.tile_bytes))
        place = builder.add(builder.mul(row, L.I32(N_TILE)), builder.urem(mine, L.I32(N_TILE)))
        return end, builder.add(self.sums, builder.add(tile, builder.mul(place, L.I32(WORD))))

    def _total(self, end: RegisterTileEmitter, place: L.Value) -> None:
        """Adds up a point's sums of all warps, neighbours first."""
        builder, stage = self.builder, self.stage
        (alone,) = points([Extent(a.name, 1) for a in self.phase.axes])
        for left in range(len(stage.tiles)):
            for number, acc in enumerate(stage.members(left)):
                tile, column = divmod(number * stage.width, N_TILE)
                at = (sum(stage.tiles[:left]) + tile) * stage.tile_bytes + column * WORD
                offsets = [at + warp * stage.warp_bytes for warp in range(stage.warps)]
                parts = [read_word(builder, place, offset, L.F32, WORD) for offset in offsets]
                while len(parts) > 1:
                    pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
                    parts = [builder.fadd(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
                end.slots[acc, alone, 0] = new_slots(builder, (parts[0],))

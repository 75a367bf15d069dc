"""Fragments of a stage's ``mma.sync``, straight from memory: weights before the first step, carried rows in every step.

The order of terms is free as long as both operands have the same: a lane of a quad takes the 16 bytes that it loads at
once (`ld.global.v4`) for two steps of ``mma``, the first two words for one and the others for the next.  Carried rows
are written by other blocks in this launch, so they are read by plain ``ld.global``, never by ``ld.global.nc``; so are
weights, which ptxas might load again in every step otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder
from jcuts.codegen.cuda.recurrence.tile import digits
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Guard, Node
from jcuts.kernel_ir.program import Buffer
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.stage_product import HALF_TILE, LANES, N_TILE, WORDS, MmaStage

Words = list[L.Value]
"""Four registers of a lane: two steps of ``mma``."""


@dataclass(frozen=True)
class Lanes:
    """The thread's place. Attributes: line, part: in the warp, row or column of a fragment, and number in its quad.
    warp: its number in the block. term: the first term that the thread loads.
    """

    line: L.Value
    part: L.Value
    warp: L.Value
    term: L.Value


class StageOperands:
    """Loads of both operands of a stage, as registers of ``mma``."""

    def __init__(
        self,
        builder: GpuBuilder,
        stage: MmaStage,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        shared: Mapping[str, L.Value],
        lanes: Lanes,
    ) -> None:
        """Args: shared: addresses (i32) of buffers that lie in shared memory."""
        self.builder, self.stage, self.buffers, self.lanes = builder, stage, buffers, lanes
        self.pointers, self.shared = pointers, shared
        self.red = stage.product.red

    def weights(self, first: L.Value) -> dict[tuple[int, int], list[Words]]:
        """Of every tile of columns, [group]: the words of a lane. Args: first: the first column of the block."""
        found: dict[tuple[int, int], list[Words]] = {}
        for left, tiles in enumerate(self.stage.tiles):
            for tile in range(tiles):
                found[left, tile] = [self._weights(left, tile, group, first) for group in range(self.stage.share)]
        return found

    def rows(self, left: int, tile: int, groups: range, step: L.Value) -> dict[int, list[Words]]:
        """Of a tile of 16 rows, group -> [lower and upper rows, as far as there are]: the words of a lane."""
        halves = range(2 * tile, min(2 * tile + 2, self.stage.halves))
        frames = [self._row_frame(half, step) for half in halves]
        load = self.stage.product.lefts[left]
        return {group: [self.carried(frame, load, group) for frame in frames] for group in groups}

    def carried(self, frame: M.Frame, load: Node, group: int) -> Words:
        """The words of a row that the thread multiplies in a group; zeros beyond the last term."""
        assert load.index is not None
        index, item = load.index + group * self.stage.group, self.stage.product.item
        width = min(M.max_vector_width(frame, item, index, self.stage.vector), self._even(self.red.extent))
        parts = []
        for start in range(0, self.stage.vector, width):
            guards = (self._inside(group, start),)
            parts += M.load_words(frame, load.buffer, item, index + start, width, guards, 0)
        return self._packed(parts)

    def rounded(self, words: Words, buffer: str) -> Words:
        """Words of float32 as TF32."""
        if self.stage.product.kind != "tf32" or self.buffers[buffer].tf32:
            return words
        return [ptx_mma.to_tf32(self.builder, word) for word in words]

    def _row_frame(self, half: int, step: L.Value) -> M.Frame:
        """Of the row of a lane in a block of eight; beyond the last one, of that."""
        builder, product = self.builder, self.stage.product
        row = builder.add(self.lanes.line, L.I32(half * HALF_TILE))
        if (half + 1) * HALF_TILE > product.rows:
            last = L.I32(product.rows - 1)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
        return self._frame({**digits(builder, row, product.axes), STEP: step})

    def _frame(self, variables: Mapping[str, L.Value]) -> M.Frame:
        product = self.stage.product
        reach = ((self.stage.warps - 1) * self.stage.share + 1) * self.stage.group - self.stage.vector + 1
        ranges = {axis.name: axis.extent for axis in (*product.axes, product.lane)}
        ranges |= {self.red.name: reach, STEP: product.steps}
        multiples = {self.red.name: self.stage.vector}
        places = {**variables, self.red.name: self.lanes.term}
        return M.Frame(self.builder, places, self.pointers, ranges, multiples, in_place=True, shared=self.shared)

    def _inside(self, group: int, place: int) -> Guard:
        """Whether there is a term, so many behind the first one of a lane in a group."""
        return Guard(Index.axis(self.red.name) + group * self.stage.group + place, None, self.red.extent - 1)

    def _even(self, extent: int) -> int:
        """The largest power of two that divides the terms, at most those of an access."""
        return min(self.stage.vector, extent & -extent)

    def _weights(self, left: int, tile: int, group: int, first: L.Value) -> Words:
        """A lane's words of its column; zeros beyond the last term and the last product."""
        builder, stage, item = self.builder, self.stage, self.stage.product.item
        members, width, lane = stage.members(left), stage.width, stage.product.lane
        begin = tile * N_TILE
        mine = members[begin // width : -(-(begin + N_TILE) // width)]  # the products that the tile has columns of
        total: Words = []
        for place, number in enumerate(mine):
            _, load = stage.product.weights[number]
            assert load.index is not None
            only = None
            if width < N_TILE:
                only = builder.icmp_signed("==", builder.udiv(self.lanes.line, L.I32(width)), L.I32(place))
            column = builder.urem(self.lanes.line, L.I32(width)) if width < N_TILE else self.lanes.line
            column = builder.add(builder.add(first, L.I32(begin % width)), column)
            last = L.I32(lane.extent - 1)
            column = builder.select(builder.icmp_signed("<", column, last), column, last)
            frame = self._frame({lane.name: column})
            parts = []
            for start in range(stage.vector):
                term = Index.axis(self.red.name) + (group * stage.group + start)
                index = load.index.substitute({self.red.name: term}, frame.ranges)
                parts += M.load_words(frame, load.buffer, item, index, 1, (self._inside(group, start),), 0, only)
            words = self.rounded(self._packed(parts), load.buffer)
            total = [builder.or_(a, b) for a, b in zip(total, words, strict=True)] if total else words
        return total

    def _packed(self, parts: Words) -> Words:
        """Words of halves that were loaded one by one."""
        if len(parts) == WORDS:
            return parts
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [ptx_mma.pack_b16x2(self.builder, low, high) for low, high in pairs]


def lanes_of(builder: GpuBuilder, stage: MmaStage, lane: L.Value, warp: L.Value) -> Lanes:
    """The place of a lane of a warp."""
    part = builder.and_(lane, L.I32(LANES - 1))
    term = builder.add(builder.mul(warp, L.I32(stage.share * stage.group)), builder.mul(part, L.I32(stage.vector)))
    return Lanes(builder.udiv(lane, L.I32(LANES)), part, warp, term)

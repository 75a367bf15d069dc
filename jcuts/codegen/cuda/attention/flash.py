"""Flash attention: S = QK^T, online softmax and PV of a tile of queries in one pass over the keys (``mma.sync``).

This is the *attention* form.  A block's warps keep their queries' fragments in registers.  Tiles of keys and values
stream through a ring of shared memory (``cp.async``); the scores of a tile exist as accumulators only: score
modification happens there (`score_mod`), then the row maximum is reduced over four lanes (``shfl``), and exponentials
of the differences are multiplied by V.  Where a tile has a larger score than all before, the running sums are rescaled:
they are those of exponentials relative to the largest score yet, as exact as if it were known before.  A row whose
scores are all -inf gives 0 / 0.

Where a mask of positions leaves a warp no weight in a tile, the warp leaves it out: it would add 0, as long as its
operands are bounded (`masked_tiles`).

Warps that split the keys of a tile merge their softmax states through shared memory at the end (`FlashTile.warps`).
Blocks of a cluster that have a slice of the keys each (`FlashTile.cluster`) leave them in distributed shared memory, of
which the first block merges them, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jcuts.codegen.cuda.attention.block_walk import checked_tile, counted_loop, head_frame, next_stage
from jcuts.codegen.cuda.attention.kv_tiles import WIDEST, LineReader, TileCopier, queries
from jcuts.codegen.cuda.attention.masked_tiles import are_bounded, is_masked, rows_are_bounded, unless
from jcuts.codegen.cuda.attention.online_softmax import (
    OnlineSoftmaxState,
    is_negligible,
    load_state,
    merge_states,
    quad_reduce,
    scaled,
    softmax,
    store_row_values,
    store_state,
)
from jcuts.codegen.cuda.attention.score_mod import Tile, TilePlace, apply_score_mod, load_columns, place_of
from jcuts.codegen.cuda.gemm.epilogue import epilogue
from jcuts.codegen.cuda.gemm.smem_tile import SmemTile
from jcuts.codegen.cuda.ptx import mma as ptx_mma
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Buffer, Program
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, GemmOperand
from jcuts.lower.patterns.masked_tiles import masked_forward
from jcuts.schedule.gpu.attention.tile import EIGHT, FOUR, SIXTEEN, STEP, FlashTile, shape_of


def attention_shape(program: Program) -> FlashTile:
    """The block tile of a schedule. Raises CompileRejected where its parameters are inconsistent."""
    return checked_tile(program, shape_of(program), "attention of tiles")


class FlashAttentionKernel:
    """Emits one thread of the flash-attention kernel."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: FlashTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        self.builder, self.program, self.shape, self.buffers = builder, program, tile, buffers
        self.attention, self.thread = tile.attention, integers["thread"]
        self.shared = shared
        self.masked = masked_forward(self.attention) if tile.skips else None
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        warp = builder.lshr(self.thread, L.I32(5))
        self.part = builder.udiv(warp, L.I32(tile.warps[0]))
        self.band = builder.urem(warp, L.I32(tile.warps[0]))
        _, groups = tile.blocks
        block, self.rank = integers["block"], L.I32(0)
        if tile.cluster > 1:
            self.rank = builder.urem(block, L.I32(tile.cluster))
            block = builder.udiv(block, L.I32(tile.cluster))
        head = builder.udiv(block, L.I32(groups))
        row = builder.mul(builder.urem(block, L.I32(groups)), L.I32(tile.rows))
        self.row = builder.add(row, builder.mul(self.band, L.I32(tile.warp[0])))
        self.frame = head_frame(builder, self.attention.batch, head, self.row, pointers)

    def emit(self) -> None:
        """The whole tile of queries."""
        builder, shape = self.builder, self.shape
        key, value = self.attention.key, self.attention.value
        behind = shape.keys * shape.pitch(key)
        self.copiers = [
            TileCopier(self.frame, shape, operand, self.thread, self.shared, first)
            for operand, first in ((key, 0), (value, behind))
        ]
        for number in range(shape.ahead):
            self._start(L.I32(number), L.I32(number * shape.stage))
            ptx_mma.cp_async_commit(builder)
        first = builder.mul(self.part, L.I32(shape.warp[1]))
        self.keys, self.values = (
            LineReader(
                builder,
                builder.add(builder.add(self.shared, L.I32(behind)), builder.mul(first, L.I32(shape.pitch(operand)))),
                shape.pitch(operand),
                operand.item,
                self.lane,
                rounded=shape.rounded,
            )
            for operand, behind in ((key, 0), (value, behind))
        )
        self.queries = queries(self.frame, shape, self.row, self.lane)
        self.rows_bounded = self._rows_are_bounded()
        state = self._walk()
        if shape.warps[1] == shape.cluster == 1:
            self._finish(state)
        else:
            self.merge_split_keys(state)

    def _start(self, number: L.Value, stage: L.Value) -> None:
        tile = self._tile_number(number)
        for copier in self.copiers:
            copier.start(tile, stage)

    def _tile_number(self, number: L.Value) -> L.Value:
        """The tile of keys that is the block's ``number``-th."""
        builder, shape = self.builder, self.shape
        return number if shape.cluster == 1 else builder.add(number, builder.mul(self.rank, L.I32(shape.walked)))

    # -- the walk over the keys ---------------------------------------------------------------------------------
    def _walk(self) -> OnlineSoftmaxState:
        """The loop over key tiles: QK^T, online softmax, PV."""
        builder, shape, ahead = self.builder, self.shape, self.shape.ahead

        def body(number: L.Value, values: list[L.Value]) -> list[L.Value]:
            (reading, writing), state, loaded = values[:2], values[2:last], values[last:]
            bounded = self._arrived(ahead - 1, reading)
            if shape.stages > 1:
                self._next(builder.add(number, L.I32(ahead)), writing)
            following = loaded
            if loaded and shape.walked > 1:
                following = self._load_columns(self._followed(number))
            state = self._tile(number, reading, OnlineSoftmaxState.of(state, shape), bounded, loaded)
            if shape.stages == 1:
                ptx_mma.barrier(builder)
                self._next(builder.add(number, L.I32(1)), reading)
            after = [next_stage(builder, at, shape.stage, shape.stages) for at in (reading, writing)]
            return [*after, *state, *following]

        start = [L.I32(0), L.I32(ahead % shape.stages * shape.stage), *OnlineSoftmaxState.none(shape).values()]
        last = len(start)
        start += self._load_columns(L.I32(0)) if shape.lane_rows == 1 else []
        return OnlineSoftmaxState.of(counted_loop(builder, "keys", shape.walked, start, body)[2:last], shape)

    def _followed(self, number: L.Value) -> L.Value:
        """The number of the block's next tile, or of its last."""
        builder, last = self.builder, L.I32(self.shape.walked - 1)
        there = builder.icmp_signed("<", number, last)
        return builder.select(there, builder.add(number, L.I32(1)), last)

    def _load_columns(self, number: L.Value) -> list[L.Value]:
        """Issues the loads of the block's ``number``-th tile that the score modification makes per key."""
        return load_columns(self.frame, self.shape, self.buffers, self._place(number))

    def _arrived(self, under_way: int, stage: L.Value) -> L.Value:
        """Waits (``cp.async.wait_group``, block barrier) until the tile of this stage is visible to all threads; gives
        whether its keys and values are bounded, if that matters.
        """
        builder = self.builder
        ptx_mma.cp_async_wait(builder, under_way)
        if self.shape.rounded:
            for copier in self.copiers:
                copier.round(stage)
        if self.masked is None:
            ptx_mma.barrier(builder)
            return L.I1(0)
        words = [word for copier in self.copiers for word in copier.words(stage)]
        return ptx_mma.barrier_and(builder, are_bounded(builder, self.attention.kind, words, self.masked.operands))

    def _next(self, number: L.Value, stage: L.Value) -> None:
        """Starts the copies of the block's ``number``-th tile, if there is one."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("<", number, L.I32(self.shape.walked))):
            self._start(number, stage)
        ptx_mma.cp_async_commit(builder)

    # -- a tile of keys -----------------------------------------------------------------------------------------
    def _scores(self, stage: L.Value) -> Tile:
        """QK^T of a tile."""
        builder, shape = self.builder, self.shape
        bands, pairs = shape.warp[0] // SIXTEEN, shape.warp[1] // SIXTEEN
        found = [[[L.F32(0.0)] * 4 for _ in range(2 * pairs)] for _ in range(bands)]
        near = [self.keys.columns(stage, pair, 0) for pair in range(pairs)]
        for step in range(shape.steps):
            now = near
            if step + 1 < shape.steps:
                near = [self.keys.columns(stage, pair, step + 1) for pair in range(pairs)]
            for pair, two in enumerate(now):
                for i, band in enumerate(self.queries):
                    for j, right in enumerate(two):
                        at = 2 * pair + j
                        found[i][at] = ptx_mma.mma_sync(builder, self.attention.kind, band[step], right, found[i][at])
        return [[four[: 2 * shape.lane_rows] for four in row] for row in found]

    def _tile(
        self,
        number: L.Value,
        stage: L.Value,
        state: OnlineSoftmaxState,
        bounded: L.Value,
        loaded: Sequence[L.Value],
    ) -> list[L.Value]:
        """The state after a tile of keys; the same where a warp's keys are masked.

        Args: bounded: as of `_arrived`; loaded: what the score modification has loaded per key (`load_columns`).
        """

        def added() -> list[L.Value]:
            scores = self._modified(number, self._scores(stage), loaded)
            made, weights = softmax(self.builder, state, scores)
            self._values(stage, weights, made.out)
            return made.values()

        if self.masked is None:
            return added()
        first = {ROWS: self.row, COLUMNS: self._first_key(number)}
        sizes = {ROWS: self.shape.warp[0], COLUMNS: self.shape.warp[1]}
        nothing = is_masked(self.builder, self.masked.positions, first, sizes)
        for more in (bounded, self.rows_bounded, is_negligible(self.builder, state, self.masked.score)):
            nothing = self.builder.and_(nothing, more)
        return unless(self.builder, nothing, state.values(), added)

    def _rows_are_bounded(self) -> L.Value:
        """Whether a warp's queries are bounded, and what its rows load."""
        if self.masked is None:
            return L.I1(0)
        words = (word for band in self.queries for step in band for word in step)
        rows = self.row, self.shape.warp[0], self.attention.rows
        kind = self.attention.kind
        return rows_are_bounded(self.frame, self.masked, kind, words, self.buffers, rows, self.lane)

    def _first_key(self, number: L.Value) -> L.Value:
        """The first key of a warp's part of a tile."""
        builder, shape = self.builder, self.shape
        first = builder.mul(self._tile_number(number), L.I32(shape.keys))
        return builder.add(first, builder.mul(self.part, L.I32(shape.warp[1])))

    def _place(self, number: L.Value) -> TilePlace:
        """Where a warp's scores of a tile lie."""
        return place_of(self.shape, (self.row, self._first_key(number)), self.lane)

    def _modified(self, number: L.Value, scores: Tile, loaded: Sequence[L.Value]) -> Tile:
        """Score modification of a tile's scores."""
        return apply_score_mod(self.frame, self.shape, self.buffers, scores, self._place(number), loaded)

    def _values(self, stage: L.Value, weights: list[list[L.Value]], out: Tile) -> None:
        """PV: adds weights times values to the accumulators."""
        builder, shape = self.builder, self.shape
        keys, kind = STEP // self.attention.value.item, self.attention.kind
        if shape.lane_rows == 1:
            weights = [half for row in weights for half in (row, [L.F32(0.0)] * len(row))]
        for first in range(0, shape.warp[1], keys):
            left = [self._left(weights[2 * i], weights[2 * i + 1], first // EIGHT) for i in range(len(out))]
            for column in range(0, shape.padded_head_dim, SIXTEEN):
                for j, right in enumerate(self.values.terms(stage, first, column)):
                    at = column // EIGHT + j
                    for i, fragment in enumerate(left):
                        held = len(out[i][at])
                        four = [*out[i][at], *[L.F32(0.0)] * (FOUR - held)]
                        out[i][at] = ptx_mma.mma_sync(builder, kind, fragment, right, four)[:held]

    def _left(self, upper: list[L.Value], lower: list[L.Value], eight: int) -> list[L.Value]:
        """Weights of 8 or 16 keys as an A fragment of the PV GEMM."""
        builder, kind = self.builder, self.attention.kind
        if kind == "tf32":
            found = [upper[2 * eight], lower[2 * eight], upper[2 * eight + 1], lower[2 * eight + 1]]
            return [ptx_mma.to_tf32(builder, builder.bitcast(v, L.I32)) for v in found]
        text = f"cvt.rn.{kind}x2.f32 $0, $1, $2;"
        pairs = [(row[2 * e], row[2 * e + 1]) for e in (eight, eight + 1) for row in (upper, lower)]
        return [asm(builder, text, L.I32, [high, low]) for low, high in pairs]

    # -- the end ------------------------------------------------------------------------------------------------
    def merge_split_keys(self, state: OnlineSoftmaxState) -> None:
        """Merges the softmax states of warps and blocks that split the keys: the first warp takes what the others store
        in shared memory.
        """
        builder, shape = self.builder, self.shape
        ptx_mma.cp_async_wait(builder, 0)
        ptx_mma.barrier(builder)
        holds, lane = self._holds_rows()
        place = builder.add(builder.mul(self.band, L.I32(shape.exchange_bytes)), builder.mul(lane, L.I32(WIDEST)))
        place = builder.add(self.shared, place)
        every = shape.warps[0] * shape.exchange_bytes
        others = shape.warps[1] - 1
        if others:
            with builder.if_then(builder.and_(holds, builder.icmp_signed(">", self.part, L.I32(0)))):
                mine = builder.mul(builder.sub(self.part, L.I32(1)), L.I32(every))
                store_state(builder, state, builder.add(place, mine))
            ptx_mma.barrier(builder)
        first = builder.icmp_signed("==", self.part, L.I32(0))
        with builder.if_then(first):
            for other in range(others):
                state = merge_states(builder, state, load_state(builder, shape, place, other * every))
            if shape.cluster > 1:
                with builder.if_then(holds):
                    store_state(builder, state, builder.add(place, L.I32(others * every)))
            else:
                self._finish(state)
        if shape.cluster > 1:
            first = builder.and_(first, builder.icmp_signed("==", self.rank, L.I32(0)))
            self._merge_cluster(builder.add(place, L.I32(others * every)), first)

    def _holds_rows(self) -> tuple[L.Value, L.Value]:
        """Whether a lane's rows exist, and the lane whose state it reads: of the others, which read with it."""
        builder, shape = self.builder, self.shape
        if shape.lane_rows > 1:
            return L.I1(1), self.lane
        holds = builder.icmp_signed("<", self.lane, L.I32(FOUR * self.attention.rows))
        return holds, builder.select(holds, self.lane, L.I32(0))

    def _merge_cluster(self, place: L.Value, first: L.Value) -> None:
        """Merges the states that the blocks of a cluster have stored. Args: first: whether the thread does."""
        builder, shape = self.builder, self.shape
        ptx_mma.cluster_barrier(builder)
        with builder.if_then(first):
            state = load_state(builder, shape, place)
            for rank in range(1, shape.cluster):
                there = ptx_mma.mapa(builder, place, rank)
                state = merge_states(builder, state, load_state(builder, shape, there, cluster=True))
            self._finish(state)
        ptx_mma.cluster_barrier(builder)  # no block may end while the first one reads its shared memory

    def _finish(self, state: OnlineSoftmaxState) -> None:
        """Divides by the sums of exponentials and runs the epilogue of the PV GEMM."""
        builder, shape, attention = self.builder, self.shape, self.attention
        sums = [quad_reduce(builder, total, lambda b, x, y: b.fadd(x, y)) for total in state.sums]
        ones = [builder.fdiv(L.F32(1.0), total) for total in sums]
        self._statistics(state.largest, sums)
        lower = [L.F32(0.0)] * (FOUR - 2 * shape.lane_rows)
        totals = [[[*two, *lower] for two in row] for row in scaled(builder, state.out, ones)]
        variables = {**self.frame.variables, ROWS: self.row, COLUMNS: L.I32(0)}
        frame = replace(self.frame, variables=variables)
        value = attention.value
        side = GemmOperand("", value.dtype, Index(), (), COLUMNS, value.item != 4, 1, STEP, 1)
        rows = SmemTile(
            replace(side, dtype="float32", outer=ROWS, along_terms=True),
            attention.rows,
            shape.rows,
            STEP,
            shape.warp[0],
        )
        tiles = (rows, SmemTile(side, value.length, shape.padded_head_dim, STEP, shape.padded_head_dim))
        epilogue(frame, attention.result, tiles, self.buffers, self.lane, totals)

    def _statistics(self, largest: list[L.Value], sums: list[L.Value]) -> None:
        """Stores what the program keeps of a row's maximum and sum (logsumexp): one lane of the four that share it."""
        attention, shape, builder = self.attention, self.shape, self.builder
        if attention.statistics is None:
            return
        row = builder.add(self.row, builder.lshr(self.lane, L.I32(2)))
        ranges = {**self.frame.ranges, ROWS: shape.blocks[1] * shape.rows - shape.warp[0] + EIGHT}
        frame = replace(self.frame, variables={**self.frame.variables, ROWS: row}, ranges=ranges, cache={}, values={})
        mine = builder.icmp_signed("==", builder.and_(self.lane, L.I32(3)), L.I32(0))
        for number, values in enumerate(zip(largest, sums, strict=True)):
            band, half = divmod(number, shape.lane_rows)
            down = band * SIXTEEN + half * EIGHT
            store_row_values(frame, attention, self.buffers, down, values, mine)

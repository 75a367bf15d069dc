"""The *attention* form: scores, softmax and values of a tile of queries, in one pass over the keys.

A block's warps keep their queries' fragments in registers.  Tiles of keys and values stream through a ring of shared
memory; the scores of a tile exist as accumulators only: what the program does with a score happens there, then rows
find their largest score (in four lanes), take exponentials of the differences, and multiply them by the values.  Where
a tile has a larger score than all before, what has been added up so far shrinks accordingly: sums are those of
exponentials relative to the largest score yet, as exact as if it were known before.  A row whose scores are all -inf
gives 0 / 0.

Warps that share the keys of a tile meet in shared memory in the end (`AttentionShape.warps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import memory as M
from jcuts.codegen.cuda import special, tensor
from jcuts.codegen.cuda.attention_chain import LEAST, Tile, chained
from jcuts.codegen.cuda.attention_tiles import TileCopier, TileReader, queries
from jcuts.codegen.cuda.builder import GpuBuilder, asm
from jcuts.codegen.cuda.product_exit import finish
from jcuts.codegen.cuda.product_tiles import TileShape
from jcuts.codegen.cuda.shared import WARP, shuffle
from jcuts.dfg.index import Index
from jcuts.dfg.program import Buffer, Program
from jcuts.region.attention_tiles import EIGHT, SIXTEEN, STATE, STEP, AttentionShape, shape_of
from jcuts.region.products import COLUMNS, ROWS, Side


def attention_shape(program: Program) -> AttentionShape:
    """The work that a schedule gives to a block. Raises CompileRejected where its numbers do not fit each other."""
    shape = shape_of(program)
    if isinstance(shape, Refusal):
        raise CompileRejected(f"{program.name}: {shape}")
    params = dict(program.params)
    if not shape.fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no attention of tiles {params['tile']} by warps {params['warps']}")
    return shape


@dataclass
class State:
    """What a warp has: largest scores and sums per lane's rows, sums of values."""

    largest: list[L.Value]
    sums: list[L.Value]
    out: Tile

    def values(self) -> list[L.Value]:
        """All of it."""
        return [*self.largest, *self.sums, *(v for row in self.out for tile in row for v in tile)]


class AttentionEmitter:
    """Emits the work of one thread."""

    def __init__(
        self, builder: GpuBuilder, program: Program, shape: AttentionShape, buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value], integers: Mapping[str, L.Value], symbol: str,
    ) -> None:  # fmt: skip
        self.builder, self.program, self.shape, self.buffers = builder, program, shape, buffers
        self.attention, self.thread = shape.attention, integers["thread"]
        self.shared = tensor.dynamic_shared(builder, f"{symbol}_shared")
        self.lane = builder.and_(self.thread, L.I32(WARP - 1))
        warp = builder.lshr(self.thread, L.I32(5))
        self.part = builder.udiv(warp, L.I32(shape.warps[0]))
        self.band = builder.urem(warp, L.I32(shape.warps[0]))
        _, groups = shape.blocks
        block = integers["block"]
        head = builder.udiv(block, L.I32(groups))
        row = builder.mul(builder.urem(block, L.I32(groups)), L.I32(shape.rows))
        self.row = builder.add(row, builder.mul(self.band, L.I32(shape.warp[0])))
        variables: dict[str, L.Value] = {ROWS: self.row}
        for axis in reversed(self.attention.batch):
            first = axis is self.attention.batch[0]
            variables[axis.name] = head if first else builder.urem(head, L.I32(axis.extent))
            head = builder.udiv(head, L.I32(axis.extent))
        ranges = {a.name: a.extent for a in self.attention.batch}
        self.frame = M.Frame(builder, variables, pointers, ranges, {})

    def emit(self) -> None:
        """The whole tile of queries."""
        builder, shape = self.builder, self.shape
        key, value = self.attention.key, self.attention.value
        behind = shape.keys * shape.pitch(key)
        self.copiers = [
            TileCopier(self.frame, shape, operand, self.thread, self.shared, first)
            for operand, first in ((key, 0), (value, behind))
        ]
        ahead = max(1, shape.stages - 1)
        for number in range(ahead):
            if number < shape.tiles:
                self._start(L.I32(number), L.I32(number * shape.stage))
            tensor.commit(builder)
        self.reader = TileReader(
            builder, shape, self.shared, builder.mul(self.part, L.I32(shape.warp[1])), self.lane
        )  # fmt: skip
        self.queries = queries(self.frame, shape, self.row, self.lane)
        state = self._walk(ahead)
        if shape.warps[1] == 1:
            self._finish(state)
            return
        self._meet(state)

    def _start(self, tile: L.Value, stage: L.Value) -> None:
        for copier in self.copiers:
            copier.start(tile, stage)

    # -- the walk over the keys ---------------------------------------------------------------------------------
    def _walk(self, ahead: int) -> State:
        builder, shape = self.builder, self.shape
        before = builder.block
        loop, after = builder.append_basic_block("keys"), builder.append_basic_block("keys.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        carried = []

        def phi(kind: L.Type, start: L.Value) -> L.Value:
            found = builder.phi(kind)
            found.add_incoming(start, before)
            carried.append(found)
            return found

        number, reading = phi(L.I32, L.I32(0)), phi(L.I32, L.I32(0))
        writing = phi(L.I32, L.I32(ahead % shape.stages * shape.stage))
        bands, tiles = shape.warp[0] // SIXTEEN, shape.features // EIGHT
        state = State(
            [phi(L.F32, LEAST) for _ in range(2 * bands)],
            [phi(L.F32, L.F32(0.0)) for _ in range(2 * bands)],
            [[[phi(L.F32, L.F32(0.0)) for _ in range(4)] for _ in range(tiles)] for _ in range(bands)],
        )
        tensor.wait(builder, ahead - 1)
        if shape.rounded:
            for copier in self.copiers:
                copier.round(reading)
        tensor.barrier(builder)
        following = builder.add(number, L.I32(1))
        if shape.stages > 1:
            self._next(builder.add(number, L.I32(ahead)), writing)
            tensor.commit(builder)
        made = self._tile(number, reading, state)
        if shape.stages == 1:
            tensor.barrier(builder)
            self._next(following, reading)
            tensor.commit(builder)
        moved = [following, self._after(reading), self._after(writing), *made.values()]
        for variable, value in zip(carried, moved, strict=True):
            variable.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, L.I32(shape.tiles)), loop, after)
        builder.position_at_end(after)
        return made

    def _next(self, tile: L.Value, stage: L.Value) -> None:
        builder = self.builder
        with builder.if_then(builder.icmp_signed("<", tile, L.I32(self.shape.tiles))):
            self._start(tile, stage)

    def _after(self, stage: L.Value) -> L.Value:
        builder, shape = self.builder, self.shape
        if shape.stages == 1:
            return stage
        moved = builder.add(stage, L.I32(shape.stage))
        return builder.select(builder.icmp_signed("==", moved, L.I32(shape.stage * shape.stages)), L.I32(0), moved)

    def _tile(self, number: L.Value, stage: L.Value, state: State) -> State:
        """One tile of keys: scores, exponentials, values."""
        builder, shape = self.builder, self.shape
        first = builder.mul(number, L.I32(shape.keys))
        first = builder.add(first, builder.mul(self.part, L.I32(shape.warp[1])))
        scores = chained(self.frame, shape, self.buffers, self._scores(stage), (self.row, first), self.lane)
        halves = [(band, first) for band in scores for first in (0, 2)]
        rows = [[value for tile in band for value in tile[first : first + 2]] for band, first in halves]
        largest, sums, factors, weights = [], [], [], []
        for r, row in enumerate(rows):
            most = self._quad(_pairwise(builder, row, self._most), self._most)
            most = self._most(state.largest[r], most)
            base = _finite(builder, most)
            factor = special.weight(builder, builder.fsub(state.largest[r], base))
            taken = [special.weight(builder, builder.fsub(s, base)) for s in row]
            total = _pairwise(builder, taken, builder.fadd)
            largest.append(most)
            factors.append(factor)
            weights.append(taken)
            sums.append(builder.fadd(builder.fmul(state.sums[r], factor), total))
        out = [
            [[builder.fmul(v, factors[2 * i + k // 2]) for k, v in enumerate(tile)] for tile in row]
            for i, row in enumerate(state.out)
        ]
        self._values(stage, weights, out)
        return State(largest, sums, out)

    def _scores(self, stage: L.Value) -> Tile:
        builder, shape = self.builder, self.shape
        bands, pairs = shape.warp[0] // SIXTEEN, shape.warp[1] // SIXTEEN
        found = [[[L.F32(0.0)] * 4 for _ in range(2 * pairs)] for _ in range(bands)]
        near = [self.reader.keys(stage, pair, 0) for pair in range(pairs)]
        for step in range(shape.steps):
            now = near
            if step + 1 < shape.steps:
                near = [self.reader.keys(stage, pair, step + 1) for pair in range(pairs)]
            for pair, two in enumerate(now):
                for i, band in enumerate(self.queries):
                    for j, right in enumerate(two):
                        at = 2 * pair + j
                        found[i][at] = tensor.multiply(builder, self.attention.kind, band[step], right, found[i][at])
        return found

    def _values(self, stage: L.Value, weights: list[list[L.Value]], out: Tile) -> None:
        """Adds weights times values. Args: weights: of every row of the lane, [8 keys][2]."""
        builder, shape = self.builder, self.shape
        keys = STEP // self.attention.value.item
        for first in range(0, shape.warp[1], keys):
            left = [
                self._left(weights[2 * i], weights[2 * i + 1], first // EIGHT) for i in range(len(out))
            ]  # fmt: skip
            for column in range(0, shape.features, SIXTEEN):
                for j, right in enumerate(self.reader.values(stage, first, column)):
                    at = column // EIGHT + j
                    for i, fragment in enumerate(left):
                        out[i][at] = tensor.multiply(builder, self.attention.kind, fragment, right, out[i][at])

    def _left(self, upper: list[L.Value], lower: list[L.Value], eight: int) -> list[L.Value]:
        """Weights of 8 or 16 keys as a fragment of the left operand."""
        builder, kind = self.builder, self.attention.kind
        if kind == "tf32":
            found = [upper[2 * eight], lower[2 * eight], upper[2 * eight + 1], lower[2 * eight + 1]]
            return [tensor.to_tf32(builder, builder.bitcast(v, L.I32)) for v in found]
        text = f"cvt.rn.{kind}x2.f32 $0, $1, $2;"
        pairs = [(row[2 * e], row[2 * e + 1]) for e in (eight, eight + 1) for row in (upper, lower)]
        return [asm(builder, text, L.I32, [high, low]) for low, high in pairs]

    # -- rows ---------------------------------------------------------------------------------------------------
    def _most(self, a: L.Value, b: L.Value) -> L.Value:
        return asm(self.builder, "max.NaN.f32 $0, $1, $2;", L.F32, [a, b])

    def _quad(self, value: L.Value, join) -> L.Value:  # type: ignore[no-untyped-def]
        """What the four lanes of a row have together."""
        for distance in (1, 2):
            value = join(value, shuffle(self.builder, value, distance))
        return value

    # -- the end ------------------------------------------------------------------------------------------------
    def _meet(self, state: State) -> None:
        """Warps that have shared the keys: all but the first put down what they have, the first one takes it."""
        builder, shape = self.builder, self.shape
        tensor.wait(builder, 0)
        tensor.barrier(builder)
        place = builder.mul(builder.sub(self.part, L.I32(1)), L.I32(shape.warps[0] * shape.state))
        place = builder.add(builder.add(place, builder.mul(self.band, L.I32(shape.state))), self.shared)
        mine = builder.add(place, builder.mul(self.lane, L.I32(16)))
        fours = [tile for row in state.out for tile in row]
        rest = [*state.largest, *state.sums]
        fours += [rest[k : k + 4] for k in range(0, len(rest), 4)]
        with builder.if_then(builder.icmp_signed(">", self.part, L.I32(0))):
            for number, four in enumerate(fours):
                tensor.write_four(builder, mine, number * 16 * WARP, four)
        tensor.barrier(builder)
        with builder.if_then(builder.icmp_signed("==", self.part, L.I32(0))):
            for other in range(shape.warps[1] - 1):
                start = builder.add(self.shared, builder.mul(self.band, L.I32(shape.state)))
                start = builder.add(start, builder.mul(self.lane, L.I32(16)))
                state = self._joined(state, start, other * shape.warps[0] * shape.state)
            self._finish(state)

    def _joined(self, state: State, place: L.Value, offset: int) -> State:
        """This warp's sums with those of another one."""
        builder = self.builder

        def four(number: int) -> list[L.Value]:
            return tensor.read_four(builder, place, offset + number * 16 * WARP)

        count, rows = sum(map(len, state.out)), len(state.sums)
        rest = [v for k in range(rows * STATE // 4) for v in four(count + k)]
        largest, sums, mine, theirs = [], [], [], []
        for r in range(rows):
            most = self._most(state.largest[r], rest[r])
            base = _finite(builder, most)
            mine.append(special.weight(builder, builder.fsub(state.largest[r], base)))
            theirs.append(special.weight(builder, builder.fsub(rest[r], base)))
            largest.append(most)
            sums.append(builder.fadd(builder.fmul(state.sums[r], mine[r]), builder.fmul(rest[rows + r], theirs[r])))
        out: Tile = []
        for i, row in enumerate(state.out):
            out.append([])
            for j, tile in enumerate(row):
                other = four(i * len(row) + j)
                rows_of = [2 * i + k // 2 for k in range(4)]
                out[-1].append([
                    builder.fadd(builder.fmul(v, mine[r]), builder.fmul(w, theirs[r]))
                    for v, w, r in zip(tile, other, rows_of, strict=True)
                ])  # fmt: skip
        return State(largest, sums, out)

    def _finish(self, state: State) -> None:
        """Divides by the sums of exponentials; then what follows the second product."""
        builder, shape, attention = self.builder, self.shape, self.attention
        ones = [builder.fdiv(L.F32(1.0), self._quad(total, builder.fadd)) for total in state.sums]
        totals = [
            [[builder.fmul(v, ones[2 * i + k // 2]) for k, v in enumerate(tile)] for tile in row]
            for i, row in enumerate(state.out)
        ]
        variables = {**self.frame.variables, ROWS: self.row, COLUMNS: L.I32(0)}
        frame = replace(self.frame, variables=variables)
        value = attention.value
        side = Side("", value.dtype, Index(), (), COLUMNS, value.item != 4, 1, STEP, 1)
        rows = TileShape(replace(side, dtype="float32", outer=ROWS, along_terms=True), attention.rows, shape.rows, STEP,
                         shape.warp[0])  # fmt: skip
        tiles = (rows, TileShape(side, value.length, shape.features, STEP, shape.features))
        finish(frame, attention.result, tiles, self.buffers, self.lane, totals)


def _pairwise(builder: GpuBuilder, values: list[L.Value], join) -> L.Value:  # type: ignore[no-untyped-def]
    """All values joined as a tree."""
    while len(values) > 1:
        values = [join(*values[k : k + 2]) if k + 1 < len(values) else values[k] for k in range(0, len(values), 2)]
    return values[0]


def _finite(builder: GpuBuilder, most: L.Value) -> L.Value:
    """The largest score, 0 where there is none yet but -inf: exponentials of -inf are 0 then, not of a NaN."""
    return builder.select(builder.fcmp_ordered("==", most, LEAST), L.F32(0.0), most)

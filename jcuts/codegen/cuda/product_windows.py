"""Convolutions by warp groups whose pixels stay in shared memory for all taps of the filter.

A block's outputs are neighbours, and so are nearly all pixels that they read (`region.group_windows`): a run of them is
copied once for 32 channels, not once per tap, and read through registers where each tap lies (`group_pixels`); the
weights of a tap and its channels go through a ring as those of every product, or, where the whole filter has its place
in shared memory, stay there.  A block goes on with ``rounds`` tiles of outputs one after the other: copies of the next
tile are under way while the one before is finished.

float32 with rounded weights (see `product_groups`), and 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen import lanes as L
from jcuts.codegen.cuda import group_fragments, tensor, wgmma
from jcuts.codegen.cuda.builder import asm
from jcuts.codegen.cuda.group_pixels import PixelCopies, PixelRows
from jcuts.codegen.cuda.group_shape import AHEAD, MOST_TOTALS, WARPS, GroupShape, readable
from jcuts.codegen.cuda.group_tiles import GroupTile
from jcuts.codegen.cuda.product import three
from jcuts.codegen.cuda.product_exit import Totals
from jcuts.codegen.cuda.product_groups import GroupEmitter
from jcuts.codegen.cuda.product_tiles import Copier
from jcuts.codegen.cuda.shared import WARP
from jcuts.dfg.program import Program
from jcuts.region.gpu_held import Held
from jcuts.region.group_windows import Window, has_weights, in_line, window
from jcuts.region.products import COLUMNS, ROWS, sides

RESIDENT = 2
"""Tiles of terms between a copy of pixels and their use, where the weights stay in shared memory."""


@dataclass(frozen=True)
class WindowShape(GroupShape):
    """A block's work.

    Attributes:
        window, span: how pixels are read; lines of a run of them. kept: runs in shared memory.
        rounds: tiles of outputs of a block. unrolled: whether every tap has code of its own.
    """

    window: Window
    span: int
    kept: int
    rounds: int
    unrolled: bool

    @property
    def stage(self) -> int:
        """Bytes of the weights of one tap."""
        return self.right.bytes

    @property
    def resident(self) -> bool:
        """Whether all weights of the block stay in shared memory."""
        return self.stages == self.share

    @property
    def ahead(self) -> int:
        """Tiles of terms whose copies are started before the first is multiplied."""
        return RESIDENT if self.resident else self.stages - 2

    @property
    def together(self) -> int:
        """Steps of a round of the loop."""
        if not self.unrolled:
            return super().together
        return self.window.taps * (2 if self.whole and self.window.taps % 2 else 1)

    @property
    def run(self) -> int:
        """Bytes of a run of pixels."""
        return self.span * wgmma.LINE

    @property
    def ring(self) -> int:
        """Bytes of the weights in shared memory."""
        return self.stage * self.stages

    @property
    def tiles(self) -> int:
        """Bytes in shared memory: weights, runs of pixels, zeros."""
        return self.ring + self.run * self.kept + wgmma.LINE

    @property
    def columns(self) -> int:
        """Tiles of columns."""
        return -(-self.right.extent // self.right.size)

    @property
    def high_blocks(self) -> int:
        """Blocks along the rows."""
        tiles = -(-self.left.extent // self.left.size)
        return -(-tiles // self.rounds)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.high_blocks * self.columns


def window_shape(program: Program) -> WindowShape:
    """The work that a schedule gives to a block. Raises CompileRejected where its numbers do not fit each other."""
    params, extents = dict(program.params), program.phases[0].ranges()
    rows, columns, terms = three(params["tile"])
    along, across = (int(str(v)) for v in params["groups"])  # type: ignore[attr-defined]
    left, right = sides(program)
    found = window(program)
    if found is None or not has_weights(program):
        raise CompileRejected(f"{program.name}: no convolution with rounded weights whose pixels can be kept")
    ragged, right = found.channels % found.line != 0, in_line(right, found.taps * found.channels)
    first = GroupTile(left, extents[ROWS], rows, terms, rows // max(1, along), 0, ragged)
    second = GroupTile(right, extents[COLUMNS], columns, terms, columns // max(1, across), 0, ragged)
    stages, kept = int(str(params["stages"])), int(str(params["pixels"]))
    steps, rounds = int(str(params.get("steps", 1))), int(str(params.get("rounds", 1)))
    shape = WindowShape(
        first, second, (WARPS * along, across, 1), stages, found.steps, found.taps * found.channels, 1, flight=0,
        rounded=True, vectors=0, spread=bool(params.get("spread", 0)), steps=steps, cached=False, push=False,
        held=Held(), window=found, span=found.span(rows), kept=kept, rounds=rounds,
        unrolled=bool(params.get("unrolled", 0)),
    )  # fmt: skip
    fits = rows == along * first.warp and columns == across * second.warp and terms == found.line
    fits = fits and first.warp % wgmma.ROWS == 0 and second.warp % 8 == 0 and second.warp <= wgmma.WIDEST
    fits = fits and first.warp * second.warp <= MOST_TOTALS * WARP * WARPS
    fits = (
        fits
        and (1 <= steps <= AHEAD or (shape.whole and shape.share % 2 == 0))
        and terms * left.item // tensor.STEP % steps == 0
    )
    fits = fits and readable(second, across) and not (shape.unrolled and shape.share % shape.together)
    fits = fits and 3 <= stages <= shape.share and shape.ahead <= found.taps and rounds >= 1
    fits = fits and (kept == 2 or (kept == found.chunks == rounds == 1))
    fits = fits and {"flight", "split", "cluster", "push", "early", "cached"}.isdisjoint(params)
    if not fits or shape.threads != int(str(params["threads"])):
        raise CompileRejected(f"{program.name}: no convolution of tiles {params['tile']} by groups {params['groups']}")
    return shape


class WindowEmitter(GroupEmitter):
    """Emits the work of one thread."""

    shape: WindowShape
    rows: PixelRows  # type: ignore[assignment]

    def emit(self) -> None:
        """All tiles of the block."""
        builder, shape = self.builder, self.shape
        self._prepare()
        begin = [L.I32(0), L.I32(shape.ahead * shape.stage), L.I32(0)]
        if shape.rounds == 1:
            self._start(self.variables[ROWS])
            self._finish(_Steps(self, begin), self.variables[ROWS])
            return
        first = self.variables[ROWS]
        self._start(first)
        before = builder.block
        loop, after = builder.append_basic_block("tiles"), builder.append_basic_block("tiles.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        carried = [builder.phi(L.I32) for _ in range(4)]
        row, *places = carried
        for phi, value in zip(carried, (first, *begin), strict=True):
            phi.add_incoming(value, before)
        steps = _Steps(self, places)
        self._finish(steps, row)
        for phi, value in zip(carried, (self.following(row), *steps.places), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(self.there(self.following(row)), loop, after)
        builder.position_at_end(after)
        tensor.wait(builder, 0)

    # -- where the block stands ---------------------------------------------------------------------------------
    def _places(self, block: L.Value) -> dict[str, L.Value]:
        builder, shape = self.builder, self.shape
        if shape.rounds == 1:
            return super()._places(block)
        row, column = builder.udiv(block, L.I32(shape.columns)), builder.urem(block, L.I32(shape.columns))
        return {
            ROWS: builder.mul(row, L.I32(shape.left.size)), COLUMNS: builder.mul(column, L.I32(shape.right.size))
        }  # fmt: skip

    def following(self, row: L.Value) -> L.Value:
        """The first row of the block's next tile."""
        return self.builder.add(row, L.I32(self.shape.high_blocks * self.shape.left.size))

    def there(self, row: L.Value) -> L.Value:
        """Whether there is a tile that begins at a row."""
        return self.builder.icmp_signed("<", row, L.I32(self.shape.left.extent))

    # -- copies -------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        """What all tiles have in common."""
        builder, shape = self.builder, self.shape
        runs = builder.add(self.shared, L.I32(shape.ring))
        zeros = builder.add(self.shared, L.I32(shape.tiles - wgmma.LINE))
        self.bases = [L.I64(0), self._descriptor(shape.right, self.column_warp)]
        self.weights = Copier(
            self.frame, shape.right, shape.threads, self.thread, self.variables[COLUMNS], self.shared
        )  # fmt: skip
        self.pixels = PixelCopies(self.frame, shape.window, shape.span, shape.threads, self.thread, runs)
        self.rows = PixelRows(self.frame, shape.window, shape.left.warp // wgmma.ROWS, runs, zeros)  # type: ignore[assignment]
        with builder.if_then(builder.icmp_unsigned("<", self.thread, L.I32(wgmma.LINE // 4))):
            place = builder.add(zeros, builder.shl(self.thread, L.I32(2)))
            tensor.write_words(builder, place, 0, [L.I32(0)])

    def _start(self, row: L.Value) -> None:
        """Copies that are under way before the first tile of outputs is multiplied."""
        builder, shape = self.builder, self.shape
        self.pixels.all(self.pixels.first(row), L.I32(0), L.I32(0))
        for number in range(shape.share if shape.resident else shape.ahead):
            tap, chunk = number % shape.window.taps, number // shape.window.taps
            for _ in self.filters(L.I32(tap), L.I32(chunk), L.I32(number * shape.stage), None):
                pass
            if not shape.resident:
                tensor.commit(builder)
        for _ in range(shape.ahead if shape.resident else 0):
            tensor.commit(builder)

    def filters(self, tap: L.Value, chunk: L.Value, stage: L.Value, where: L.Value | None) -> Iterator[None]:
        """Starts one copy of a tile of weights at a time."""
        builder, found = self.builder, self.shape.window
        channel = builder.mul(chunk, L.I32(found.line))
        term = builder.add(builder.mul(tap, L.I32(found.channels)), channel)
        return self.weights.copies(term, stage, builder.sub(L.I32(found.channels), channel), where)

    # -- a tile -------------------------------------------------------------------------------------------------
    def _finish(self, steps: _Steps, row: L.Value) -> None:
        totals = steps.emit(row)
        if self.shape.rounds > 1:
            lane = asm(self.builder, "mov.b32 $0, $1;", L.I32, [self.lane], effects=True)  # not kept over the loop
            kept, self.lane = self.lane, lane
            self.variables = {**self.variables, ROWS: row}
            self.frame = replace(self.frame, variables=self.variables, cache={})
            self._exit(totals, L.I32(0), L.I32(0))
            self.lane = kept
        else:
            tensor.wait(self.builder, 0)
            self._exit(totals, L.I32(0), L.I32(0))

    def products(
        self, number: L.Value, reading: L.Value, totals: Totals, beside: list[Iterator[None]]
    ) -> Totals:  # fmt: skip
        """Starts the products of a tap's tile of terms; see `GroupEmitter.products`."""
        builder, shape = self.builder, self.shape
        right = builder.add(self.bases[1], builder.zext(builder.lshr(reading, L.I32(4)), L.I64))
        return group_fragments.multiply(
            builder, self.rows, right, shape.right, reading, number, None, totals, beside, shape.steps  # type: ignore[arg-type]
        )  # fmt: skip


class _Steps:
    """The loop over the terms of a tile of outputs: for every line of channels all taps."""

    def __init__(self, emitter: WindowEmitter, places: Sequence[L.Value]) -> None:
        """Args: places: bytes to the weights of the first step, to the place that is written next, to the run."""
        self.emitter, self.builder, self.places = emitter, emitter.builder, list(places)
        self.runs = (L.I32(0), L.I1(0), L.I32(0))

    def emit(self, row: L.Value) -> Totals:
        """All steps of the tile that begins at a row; `places` are then those of the next tile."""
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        emitter.rows.begin(row, emitter.row_warp, emitter.lane)
        mine, more, other = emitter.pixels.first(row), L.I1(0), L.I32(0)
        if shape.rounds > 1:
            more, other = emitter.there(emitter.following(row)), emitter.pixels.first(emitter.following(row))
        self.runs = mine, more, other
        before = builder.block
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.done")
        builder.branch(loop)
        builder.position_at_end(loop)

        def carried(kind: L.Type, start: L.Value) -> L.Value:
            phi = builder.phi(kind)
            phi.add_incoming(start, before)
            return phi

        high, wide = shape.left.warp // wgmma.ROWS, shape.right.warp // 8
        state = [carried(L.I32, place) for place in (*[L.I32(0)] * 3, *self.places)]
        totals = [[[carried(L.F32, L.F32(0.0)) for _ in range(4)] for _ in range(wide)] for _ in range(high)]
        phis = [*state, *_flat(totals)]
        for number in range(shape.together):
            known = number % shape.window.taps if shape.unrolled else None
            state, totals = self._step(state, totals, known)
        for phi, value in zip(phis, [*state, *_flat(totals)], strict=True):
            phi.add_incoming(value, builder.block)
        last = shape.share // shape.together * shape.together
        builder.cbranch(builder.icmp_signed("<", state[0], L.I32(last)), loop, after)
        builder.position_at_end(after)
        for _ in range(shape.share % shape.together):
            state, totals = self._step(state, totals)
        self.places = state[3:]
        return wgmma.finished(builder, totals)

    def _step(self, state: list[L.Value], totals: Totals, known: int | None = None) -> tuple[list[L.Value], Totals]:
        """The products of one tap's line of channels.

        Args: state: numbers of step, tap and chunk, and `places`; known: the tap's number, where the code is its own.
        """
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        number, tap, chunk, reading, writing, run = state
        tap = tap if known is None else L.I32(known)
        if not shape.resident or known == 0:
            self._arrived()
        elif known is None:  # nothing new comes but with the next run
            with builder.if_then(builder.icmp_signed("==", tap, L.I32(0))):
                self._arrived()
        emitter.rows.turn(tap, run)
        beside = self._beside(tap, chunk, writing, run)
        totals = emitter.products(number, reading, totals, beside if shape.spread else [])
        for copy in [] if shape.spread else beside:
            next(copy)
        tensor.commit(builder)
        last = builder.icmp_signed("==", tap, L.I32(shape.window.taps - 1))
        following = [
            builder.add(number, L.I32(1)), builder.select(last, L.I32(0), builder.add(tap, L.I32(1))),
            builder.add(chunk, builder.select(last, L.I32(1), L.I32(0))), emitter.next_stage(reading),
            emitter.next_stage(writing), builder.select(last, self._other(run), run),
        ]  # fmt: skip
        return following, totals

    def _arrived(self) -> None:
        """Waits for the copies of a step, and for all threads of the block."""
        tensor.wait(self.builder, self.emitter.shape.ahead - 1)
        wgmma.proxy_fence(self.builder)
        tensor.barrier(self.builder)

    def _other(self, run: L.Value) -> L.Value:
        """The place of the next run of pixels."""
        builder, shape = self.builder, self.emitter.shape
        return builder.sub(L.I32(shape.run), run) if shape.kept == 2 else run

    def _beside(
        self, tap: L.Value, chunk: L.Value, writing: L.Value, run: L.Value
    ) -> list[Iterator[None]]:  # fmt: skip
        """Copies of a step: weights of a later one, a part of the next run."""
        emitter, builder, shape = self.emitter, self.builder, self.emitter.shape
        mine, more, other = self.runs
        made: list[Iterator[None]] = []
        found = shape.window
        if not shape.resident:
            later = builder.add(tap, L.I32(shape.ahead))
            wraps = builder.icmp_signed(">=", later, L.I32(found.taps))
            later = builder.select(wraps, builder.sub(later, L.I32(found.taps)), later)
            next_ = builder.add(chunk, builder.select(wraps, L.I32(1), L.I32(0)))
            inside = builder.icmp_signed("<", next_, L.I32(found.chunks))
            if shape.rounds > 1:
                next_, inside = builder.select(inside, next_, L.I32(0)), builder.or_(inside, more)
            made += [emitter.filters(later, next_, writing, inside)] * len(emitter.weights.places)
        if shape.kept == 2:
            slots = found.taps - shape.ahead + 1
            inside = builder.icmp_signed("<", builder.add(chunk, L.I32(1)), L.I32(found.chunks))
            first = builder.select(inside, mine, other)
            later = builder.select(inside, builder.add(chunk, L.I32(1)), L.I32(0))
            where = builder.or_(inside, more)
            parts = emitter.pixels.part(first, later, self._other(run), tap, slots, where)
            made += [parts] * -(-emitter.pixels.count // slots)
        return made


def _flat(totals: Totals) -> list[L.Value]:
    return [value for rows in totals for tile in rows for value in tile]

"""Persistent recurrence kernel: all steps of a scan in one cooperative launch, ``red.release``/``ld.acquire`` between
the stages of a step.

Every block has the same columns of a phase's result in every step.  A product is one of a column reduction
(`reduction.column`): threads divide its terms, add up by shuffles and through shared memory, and finish the step's
element-wise operations on what they have summed, the gates of a cell side by side.  Carried values lie in two copies
in global memory, which the L2 cache holds, or pass with flags (`flag_exchange`) in place of a grid barrier; a block
that is alone has them in shared memory.  Operands that are the same in every step stay in shared memory or registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from jcuts.codegen.cuda.elementwise.thread_tile import RegisterTileEmitter, TileVariant
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.global_memory import Flagged
from jcuts.codegen.cuda.ptx.grid_barrier import grid_barrier
from jcuts.codegen.cuda.ptx.mma import barrier
from jcuts.codegen.cuda.recurrence.flag_exchange import FlagExchange
from jcuts.codegen.cuda.recurrence.split import SYNC
from jcuts.codegen.cuda.recurrence.stage_columns import StageColumns
from jcuts.codegen.cuda.recurrence.stage_mma import StageMma
from jcuts.codegen.cuda.recurrence.tile import RecurrenceTile, column_phase, digits
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.lower.recurrence.program import STEP
from jcuts.schedule.gpu.recurrence.residency import Resident, residents
from jcuts.schedule.gpu.recurrence.stage_product import columns_of, is_short, mma_stages

MOST_UNROLLED = 4
"""Points of a thread that are straight-line code."""


class RecurrenceKernel:
    """Emits one thread of the persistent recurrence."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: RecurrenceTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        """Args: as of `TileKernel`."""
        self.builder, self.program, self.tile = builder, program, tile
        self.pointers, self.symbol = pointers, symbol
        self.block, self.thread = integers["block"], integers["thread"]
        self.steps = next(g.extent for g in program.grid if g.axis == STEP)
        self.carried = frozenset(s.buffer for p in program.phases for s in p.stores if s.buffer.startswith("s"))
        places = tile.layout(program)[0]
        still = residents(program, tile.blocks)
        self.kept = still[: 0 if tile.held else tile.resident]
        self.held = {one.operand for one in still} if tile.held else frozenset()
        self.buffers = {**buffers, **{one.buffer.name: one.buffer for one in self.kept}}
        self.shared = {name: builder.add(shared, L.I32(place)) for name, place in places.items()}
        taken = tile.exchanged(program)
        self.exchange = (
            FlagExchange(builder, taken, tile.replicas, tile.threads, self.block, self.thread, pointers, self.shared)
            if taken
            else None
        )
        self.flagged: Mapping[str, Flagged] = {}
        self.products: dict[int, tuple[StageColumns, L.Value | None]] = {}
        self.on_tensor_cores = {
            stage.number: StageMma(
                builder, program.phases[stage.number], stage, self.buffers, pointers, integers, self.shared
            )
            for stage in mma_stages(program, tile.blocks, tile.threads)
        }

    def emit(self) -> None:
        """All steps."""
        builder = self.builder
        phases = list(enumerate(self.program.phases))
        first = [(n, p) for n, p in phases if p.once]
        each = [(n, p) for n, p in phases if not p.once and not p.last]
        for number, phase in first:
            self._phase(number, phase, L.I32(0))
        for one in self.kept:
            self._fill_shared(one)
        if first or self.kept:
            barrier(builder)
        for number, phase in each:
            if number in self.on_tensor_cores:
                self.on_tensor_cores[number].prepare()
            elif not is_short(phase):
                self.products[number] = self._columns(number, phase)
        stages = self._stages([p for _, p in each])
        # A number of steps that the compiler does not know: it would unroll a few of them.
        steps = asm(builder, "mov.u32 $0, $1;", L.I32, [L.I32(self.steps)], effects=True)
        before = builder.block
        loop, done = builder.append_basic_block("step"), builder.append_basic_block("steps.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(L.I32, STEP)
        step.add_incoming(L.I32(0), before)
        passed = builder.mul(step, L.I32(len(set(stages))))
        if self.exchange is not None:
            self.exchange.gather(step)
            self.flagged = self.exchange.stores(step)
        for (number, phase), stage, following in zip(each, stages, [*stages[1:], -1], strict=True):
            self._phase(number, phase, step)
            if following != stage and self.exchange is None:
                self._wait(builder.add(passed, L.I32(stage + 1)))
        after = builder.add(step, L.I32(1))
        step.add_incoming(after, builder.block)
        builder.cbranch(builder.icmp_signed("<", after, steps), loop, done)
        builder.position_at_end(done)
        last = [phase for _, phase in phases if phase.last]
        if self.exchange is not None and last:
            self.exchange.gather(L.I32(self.steps))
            self._wait(L.I32(1))
        for number, phase in phases:
            if phase.last:
                self._phase(number, phase, L.I32(self.steps - 1))

    def _stages(self, phases: list[Phase]) -> list[int]:
        """The stage of every phase: one that reads what was written since the last barrier begins another.

        What is carried does not count: a step reads another copy than it writes.
        """
        found: list[int] = []
        written: set[str] = set()
        for phase in phases:
            reads = {node.buffer for g in (phase.body, phase.exit) for node in g.nodes if node.op == "load"}
            behind = bool(reads & written)
            found.append(behind + (found[-1] if found else 0))
            written = (set() if behind else written) | {s.buffer for s in phase.stores} - self.carried
        return found

    def _wait(self, barriers: L.Value) -> None:
        """Until every block is behind its stage. Args: barriers: that the loop has passed then."""
        if self.tile.is_alone:
            barrier(self.builder)
            return
        arrived = self.builder.mul(barriers, L.I32(self.tile.blocks))
        grid_barrier(self.builder, self.pointers[SYNC], arrived, self.thread)

    # -- phases -------------------------------------------------------------------------------------------------------
    def _phase(self, number: int, phase: Phase, step: L.Value) -> None:
        if number in self.on_tensor_cores:
            self.on_tensor_cores[number].emit(step)
            return
        if is_short(phase):
            self._points(phase, step)
            return
        products, has_any = self.products[number]
        products.flagged = self.flagged
        with self.builder.if_then(has_any) if has_any is not None else nullcontext():
            products.step(step)

    def _columns(self, number: int, phase: Phase) -> tuple[StageColumns, L.Value | None]:
        """A phase's products, and whether the block has any (i1; None: every block has)."""
        builder = self.builder
        kept = [one for one in self.kept if one.phase == number]
        made, shape = column_phase(self.program, phase, self.tile, kept)
        axes = made.phases[0].axes
        lane, across = axes[-1], columns_of(phase, self.tile.blocks)
        integers = {a.name: L.I32(0) for a in axes}
        integers |= {lane.name: builder.mul(self.block, L.I32(across)), "thread": self.thread}
        blocks = -(-lane.extent // across)
        has_any = builder.icmp_signed("<", self.block, L.I32(blocks)) if blocks < self.tile.blocks else None
        symbol = f"{self.symbol}_{number}"
        found = StageColumns(builder, made, shape, self.buffers, self.pointers, integers, symbol, self.shared)
        if self.held:
            found.hold(self.held)
        return found, has_any

    def _fill_shared(self, one: Resident) -> None:
        """The block's slice of an operand, by all threads."""
        builder, tile, phase = self.builder, self.tile, self.program.phases[one.phase]
        lane = phase.axes[-1]
        count = one.terms * one.columns

        def copy(place: L.Value) -> None:
            column = builder.add(builder.mul(self.block, L.I32(one.columns)), builder.urem(place, L.I32(one.columns)))
            last = L.I32(lane.extent - 1)
            inside = builder.select(builder.icmp_signed("<", column, last), column, last)
            terms = digits(builder, builder.udiv(place, L.I32(one.columns)), phase.reds)
            variables = {**terms, lane.name: inside, "e": place}
            frame = M.Frame(builder, variables, self.pointers, {}, {}, shared=self.shared)
            size = M.item_size(one.buffer.dtype)
            words = M.load(frame, one.operand, size, one.index, 1, (), 0)
            M.store(frame, one.buffer.name, size, Index.axis("e"), words)

        self._strided(self.thread, tile.threads, count, copy)

    def _strided(self, first: L.Value, step: int, count: int, work: Callable[[L.Value], None]) -> None:
        """``work`` for all numbers below ``count`` from ``first`` on in steps, one after the other."""
        builder = self.builder
        rounds = -(-count // step)
        if rounds <= MOST_UNROLLED:
            for turn in range(rounds):
                place = builder.add(first, L.I32(turn * step))
                with builder.if_then(builder.icmp_signed("<", place, L.I32(count))):
                    work(place)
            return
        before = builder.block
        loop, done = builder.append_basic_block("strided"), builder.append_basic_block("strided.done")
        builder.cbranch(builder.icmp_signed("<", first, L.I32(count)), loop, done)
        builder.position_at_end(loop)
        place = builder.phi(L.I32, "place")
        place.add_incoming(first, before)
        work(place)
        after = builder.add(place, L.I32(step))
        place.add_incoming(after, builder.block)
        builder.cbranch(builder.icmp_signed("<", after, L.I32(count)), loop, done)
        builder.position_at_end(done)

    def _points(self, phase: Phase, step: L.Value) -> None:
        """Points without a product, or with a short one, one thread each."""
        builder, together = self.builder, self.tile.blocks * self.tile.threads
        count = math.prod(a.extent for a in phase.axes if a.name != STEP)
        first = builder.add(builder.mul(self.block, L.I32(self.tile.threads)), self.thread)
        self._strided(first, together, count, lambda point: self._point(phase, step, point))

    def _point(self, phase: Phase, step: L.Value, point: L.Value) -> None:
        places = digits(self.builder, point, [a for a in phase.axes if a.name != STEP])
        one = RegisterTileEmitter(
            self.builder,
            phase,
            TileVariant(tuple((a.name, 1) for a in phase.axes)),
            self.buffers,
            self.pointers,
            {**places, STEP: step},
            {},
        )
        one.in_place, one.shared, one.flagged = True, self.shared, self.flagged
        one.emit()

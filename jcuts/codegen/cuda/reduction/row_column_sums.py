"""Row reductions that also sum columns: a thread block walks over rows and keeps its column sums in registers.

This is the *team_columns* form, the usual scheme of a layer norm's backward pass.  Teams of threads reduce rows as in
`reduction.row`, one row after the other; every thread adds up what is summed at its columns in registers.  Then the
teams of a block combine their sums through shared memory, and one partial sum per column and block goes to global
memory, which a column reduction adds up in a second launch.  No atomics: the order of all additions is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter, store_all
from jcuts.codegen.cuda.graph.predication import mask_accumulators, predicate_loads
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx.builder import GpuBuilder, asm
from jcuts.codegen.cuda.ptx.shuffle import WARP, allocate_static, read_word, write_word
from jcuts.codegen.cuda.reduction.row import K, RowReductionKernel, RowReductionTile
from jcuts.codegen.cuda.reduction.split import Split, combine_columns, renumbered
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index, unflatten
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Buffer, Phase, Program, Red, Store
from jcuts.lower.patterns.column_sums import SUMS
from jcuts.lower.patterns.row_column_sums import TEMPLATE, TYPE, split_phases
from jcuts.schedule.gpu.launch_shapes import row_groups

GROUP = "s"
"""Axis of the blocks' groups of rows."""
MEMBER = "f"
"""Axis of a group's rows."""
WORD = ITEM_SIZE[TYPE]


def split_row_column_sums(program: Program) -> Split:
    """The kernel of the rows with partial column sums per block, and the column reduction that adds these up."""
    params = dict(program.params)
    if program.template != TEMPLATE or params[SUMS] != len(program.phases[-1].accs):
        raise CompileRejected(f"{program.name}: no row reductions with column sums")
    found = split_phases(program)
    share, groups = row_groups(program)
    phase, columns = found.sums, found.columns
    partials = [Buffer(f"part{k}", acc.dtype, (groups, columns), "out") for k, acc in enumerate(phase.accs)]
    ranges = {phase.axes[0].name: columns, GROUP: groups, MEMBER: share}
    row = Index.axis(GROUP) * share + Index.axis(MEMBER)
    guard = Guard(row, None, found.row_count - 1)
    extents = tuple(r.extent for r in phase.reds)
    places = dict(zip((r.name for r in phase.reds), unflatten(row, extents, ranges), strict=True))
    body, numbers = predicate_loads(phase.body, places, guard, ranges)
    accs = renumbered(phase, numbers) if guard.always(ranges) else mask_accumulators(body, phase.accs, numbers, guard)
    made = Graph()
    place = Index.axis(GROUP) * columns + Index.axis(phase.axes[0].name)
    stores = tuple(
        Store(p.name, place, made.add(Node("acc", p.dtype, attrs=(("number", k),)))) for k, p in enumerate(partials)
    )
    axes, reds = (Axis(GROUP, groups), phase.axes[0]), (Red(MEMBER, share),)
    first = Phase(f"{phase.name}.first", axes, reds, accs, body, made, stores)
    read = {n.buffer for p in (*found.rows.phases, first) for g in (p.body, p.exit) for n in g.nodes if n.op == "load"}
    written = {s.buffer for p in found.rows.phases for s in p.stores}
    buffers = (
        *(b for b in program.inputs if b.name in read),
        *(b for b in program.outputs if b.name in written),
        *partials,
        *program.locals,
    )
    rows = replace(program, name=f"{program.name}_first", buffers=buffers, phases=(*found.rows.phases, first))
    return [rows, combine_columns(_sums_alone(program, phase), partials, phase.accs, place, groups)], partials


def _sums_alone(program: Program, phase: Phase) -> Program:
    """The column sums as a reduction of their own, for its second kernel: what its exit graph reads and its results."""
    made = {s.buffer for s in phase.stores}
    outputs = tuple(b for b in program.outputs if b.name in made)
    return replace(program, buffers=(*program.inputs, *outputs), phases=(phase,), template="reduction")


class RowColumnSumsKernel(RowReductionKernel):
    """Emits one thread of row reductions that sum columns as well."""

    def __init__(
        self,
        builder: GpuBuilder,
        program: Program,
        tile: RowReductionTile,
        buffers: Mapping[str, Buffer],
        pointers: Mapping[str, L.Value],
        integers: Mapping[str, L.Value],
        symbol: str,
        shared: L.Value,
    ) -> None:
        found = split_phases(program)
        self.sums, self.row_number = found.sums, found.row
        self.share, self.groups = row_groups(program)
        self.group, self.member = integers["group"], integers["member"]
        self.teams = tile.threads // tile.team
        self.first = builder.add(builder.mul(self.group, L.I32(self.share)), self.member)
        self.totals: dict[tuple[int, int], list[L.Value]] = {}
        own = {"row": self.first, "lane": integers["lane"]}
        super().__init__(builder, found.rows, tile, buffers, pointers, own, symbol, shared)
        if not self.resident:
            raise CompileRejected(f"{program.name}: rows of {self.length} that do not stay in registers")

    def _places(self, phase: Phase, offset: int, ranges: Mapping[str, int]) -> dict[str, Index]:
        if phase is not self.sums:
            return super()._places(phase, offset, ranges)
        return {phase.axes[-1].name: Index.axis(K) + offset, GROUP: Index(), MEMBER: self.row_number}

    def emit(self) -> None:
        """All rows of the block, then its column sums."""
        builder = self.builder
        for number, acc in enumerate(self.sums.accs):
            for place in range(self.pieces * self.shape.vector):
                with builder.goto_entry_block():
                    slots = [builder.alloca(kind) for kind in acc_types(acc)]
                for slot, start in zip(slots, acc_start(acc, False), strict=True):
                    builder.store(start, slot)
                self.totals[number, place] = slots
        before, end = builder.block, builder.add(self.first, L.I32(self.share))
        loop, after = builder.append_basic_block("rows"), builder.append_basic_block("rows.done")
        is_whole = self.groups * self.share == self.rows
        if is_whole or self.shape.team < WARP:  # teams of one warp go on together
            builder.branch(loop)
        else:
            last, is_whole = L.I32(self.rows), True
            end = builder.select(builder.icmp_signed("<", end, last), end, last)
            builder.cbranch(builder.icmp_signed("<", self.first, last), loop, after)
        builder.position_at_end(loop)
        row = builder.phi(L.I32, "row")
        row.add_incoming(self.first, before)
        self._start_row(row, is_whole)
        super().emit()
        self._add_row()
        if self.shape.team > WARP and sum(len(p.accs) for p in self.program.phases) == 1:
            asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)  # the next row's sum has the same shared memory
        following = builder.add(row, L.I32(self.teams))
        row.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
        builder.position_at_end(after)
        if self.teams == 1:
            self._store_totals()
        else:
            self._combine_teams()

    def _points(self) -> list[tuple[int, int]]:
        """(place, distance) of a thread's columns from its first one."""
        vector = self.shape.vector
        return [(c * vector + j, c * self.step + j) for c in range(self.pieces) for j in range(vector)]

    def _add_row(self) -> None:
        """Adds what is summed at the thread's columns of the row at hand."""
        builder, emitter, phase = self.builder, self.emitter, self.sums
        wanted = [acc.values[0] for acc in phase.accs]
        tail = self.length % self.step != 0
        terms = []
        for place, offset in self._points():
            values = self._copy(emitter, phase, phase.body, wanted, offset, tail, {})
            terms += [(number, place, self._unmasked(value)) for number, value in enumerate(values)]
        emitter.vectorize_loads(value for _, _, value in terms)
        for number, place, value in terms:
            slots = self.totals[number, place]
            before = builder.load(slots[0])
            accumulate(emitter, phase.accs[number], slots, (value,))
            if self.live is not None:
                builder.store(builder.select(self.live, builder.load(slots[0]), before), slots[0])

    def _unmasked(self, number: int) -> int:
        """A summed value without the condition that its row exists: `live` is that condition."""
        node = self.graph.nodes[number]
        known = node.op == "select" and self.graph.nodes[node.args[0]]
        return node.args[1] if known and known.op == "const" and known.value else number

    # -- after the last row -------------------------------------------------------------------------------------
    def _inside(self, frame: M.Frame, offset: int) -> L.Value | None:
        """Whether the row has the thread's column at a distance; None where it always does."""
        return M.condition(frame, (Guard(Index.axis(K) + offset, None, self.length - 1),))

    def _sums_frame(self, column: L.Value, limit: int, multiple: int) -> M.Frame:
        variables, ranges = {K: column, GROUP: self.group}, {K: limit, GROUP: self.groups}
        return M.Frame(self.builder, variables, self.pointers, ranges, {K: multiple})

    def _store_totals(self) -> None:
        """The one team of a block stores its sums."""
        vector = self.shape.vector
        frame = self._sums_frame(self._thread_start(), self.step - vector + 1, vector)
        emitter = Emitter(frame, Graph(), self.buffers)
        for piece in range(self.pieces):
            frame.live = self._inside(frame, piece * self.step)
            rows = []
            for number, store in enumerate(self.sums.stores):
                for j in range(vector):
                    total = self.builder.load(self.totals[number, piece * vector + j][0])
                    node = self._given(emitter, ("total", number, piece * vector + j), E.Lanes(total, TYPE))
                    address = Index.axis(GROUP) * self.length + Index.axis(K) + piece * self.step + j
                    rows.append((store.buffer, address, node))
            store_all(emitter, rows)

    def _combine_teams(self) -> None:
        """The teams' sums meet in shared memory, a plane after the other; a thread per column adds them in order."""
        builder, threads = self.builder, self.shape.threads
        line = self.length * WORD
        place = allocate_static(builder, f"{self.symbol}_columns", self.teams * line)
        frame = self._sums_frame(self._thread_start(), self.step - self.shape.vector + 1, self.shape.vector)
        own = builder.add(builder.mul(self.member, L.I32(self.length)), self._thread_start())
        own = builder.add(place, builder.mul(own, L.I32(WORD)))
        thread = builder.add(builder.mul(self.member, L.I32(self.shape.team)), self.lane)
        for number, store in enumerate(self.sums.stores):
            if number:
                asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
            for slot, offset in self._points():
                total = builder.load(self.totals[number, slot][0])
                write_word(builder, own, WORD * offset, total, WORD, self._inside(frame, offset))
            asm(builder, "bar.sync 0;", ir.VoidType(), effects=True)
            for base in range(0, self.length, threads):
                column = builder.add(thread, L.I32(base)) if base else thread
                with builder.if_then(builder.icmp_signed("<", column, L.I32(self.length))):
                    where = builder.add(place, builder.mul(column, L.I32(WORD)))
                    total = read_word(builder, where, 0, L.F32, WORD)
                    for team in range(1, self.teams):
                        total = builder.fadd(total, read_word(builder, where, team * line, L.F32, WORD))
                    here = self._sums_frame(column, self.length, 1)
                    address = Index.axis(GROUP) * self.length + Index.axis(K)
                    M.store(here, store.buffer, WORD, address, [builder.bitcast(total, L.I32)])

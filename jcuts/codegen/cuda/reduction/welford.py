"""Welford statistics of columns: mean and sum of squared deviations in one pass (see `lower.reduction.welford`).

This is the *moments* form.  A thread takes ``chunks`` points of its columns at a time.  With n points so far, their
mean m and squared deviations M, c more points at distances d from m make

    m' = m + sum(d) / (n + c),   M' = M + sum(d**2) - sum(d)**2 / (n + c)

(at most half of the sum of squares cancels, but for the first points: these are seen from one of them, and at most a
fraction of 1 - 1/c does).  Threads of a column combine their statistics by shuffles and through shared memory.  A plain
sum goes along: where a column has infinities m becomes NaN at the next point, and the mean is that sum over n.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.graph.predication import drop_guard
from jcuts.codegen.cuda.reduction.column_norm import ColumnSoftmaxKernel, Totals
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard
from jcuts.kernel_ir.program import Phase
from jcuts.lower.reduction.welford import GROUP, match_welford


class WelfordKernel(ColumnSoftmaxKernel):
    """Emits one thread of a program whose first two phases are statistics."""

    def emit(self) -> None:
        """The pass over the data, then what follows from it."""
        first = self.program.phases[0]
        split = first.axes[0].name == GROUP
        terms = int(str(dict(self.program.params).get("terms", self.length)))
        number = Index.axis(GROUP) * self.length + Index.axis(first.reds[0].name)
        bare = tuple(drop_guard(p, Guard(number, None, terms - 1)) for p in self.program.phases[:2])
        found = match_welford(replace(self.program, phases=(*bare, *self.program.phases[2:])))
        if found is None:
            raise CompileRejected(f"{self.program.name}: no statistics in its first two phases")
        self.kind = E.register_type(first.accs[0].dtype)
        mine: L.Value = L.I32(self.length)
        if split:
            left = self.builder.sub(L.I32(terms), self.builder.mul(self.variables[GROUP], mine))
            mine = self.builder.select(self.builder.icmp_signed("<", left, mine), left, mine)
        moments = self._pass(bare[0], first, mine, split, terms)
        totals = self._team_reduce([[self.kind] * 4], dict(moments), lambda _, a, b: self._join(a, b))
        self._results(found.centre, totals)
        for phase in self.program.phases[2:]:
            self._map_phase(phase)

    def _results(self, centre: str, totals: Totals) -> None:
        """The program's two sums of every column: n * m, and M + n * (m - c)**2."""
        builder = self.builder
        sums: Totals = {}
        for key, (mean, _, count, plain) in totals.items():
            finite = builder.fcmp_ordered("==", builder.fsub(mean, mean), ir.Constant(self.kind, 0.0))
            sums[key] = (builder.select(finite, builder.fmul(mean, count), plain),)
        self._column_results(self.program.phases[0], sums)
        self.reductions += 1
        squares: Totals = {}
        for (number, column), (mean, deviations, count, _) in totals.items():
            gone = builder.fsub(mean, self.scalars[centre, column].value)
            squares[number, column] = (L.fma(builder, builder.fmul(gone, gone), count, deviations),)
        self._column_results(self.program.phases[1], squares)
        self.reductions += 1

    # -- the pass -----------------------------------------------------------------------------------------------
    def _pass(self, bare: Phase, whole: Phase, mine: L.Value, split: bool, terms: int) -> Totals:
        """Moments of this thread's points; ``mine``: points of the block's columns."""
        builder, chunks = self.builder, self.layout.chunks
        zero = ir.Constant(self.kind, 0.0)
        self.slots = [[self._slot(self.kind, zero) for _ in range(3)] for _ in range(self.layout.vector)]
        self.count = self._slot(self.kind, zero)
        step = self.step * chunks
        full = builder.udiv(mine, L.I32(step))
        end = builder.mul(full, L.I32(step))
        if self.length >= step:
            before = builder.block
            head, loop, after = (builder.append_basic_block(f"points.{n}") for n in ("head", "loop", "done"))
            builder.branch(head)
            builder.position_at_end(head)
            base = builder.phi(L.I32, "base")
            base.add_incoming(L.I32(0), before)
            builder.cbranch(builder.icmp_signed("<", base, end), loop, after)
            builder.position_at_end(loop)
            self._chunk(bare, base, self.length - (chunks - 1) * self.step, None, chunks)
            base.add_incoming(builder.add(base, L.I32(step)), builder.block)
            builder.branch(head)
            builder.position_at_end(after)
        if terms % step:
            pieces = chunks if split else -(-(self.length % step) // self.step)
            reach = self.length if split else self.length // step * step + self.step
            with builder.if_then(builder.icmp_signed("<", end, mine)):
                self._chunk(whole, end, reach, mine, pieces)
        count = builder.load(self.count)
        found: Totals = {}
        for v, made in enumerate(self.slots):
            mean, squares, plain = (builder.load(x) for x in made)
            found[0, v] = (mean, squares, count, plain)
        return found

    def _chunk(self, phase: Phase, base: L.Value, reach: int, limit: L.Value | None, pieces: int) -> None:
        """Adds ``pieces`` points of every column; with a ``limit`` only those before it."""
        builder = self.builder
        place = builder.add(base, self._thread_start())
        emitter = Emitter(self._frame(place, max(1, reach)), Graph(), self.buffers)
        numbers: dict[tuple[int, int], int] = {}
        (value,) = phase.accs[0].values
        for piece in range(pieces):
            for column in range(self.layout.vector):
                self.at, offset = column, piece * self.step
                made = self._copy(emitter, phase, phase.body, [value], offset, limit is not None, {})
                numbers[piece, column] = made[0]
        emitter.vectorize_loads(numbers.values())
        inside: list[L.Value] | None = None
        if limit is None:
            count: L.Value = ir.Constant(self.kind, float(pieces))
        else:
            inside = [
                builder.icmp_signed("<", builder.add(place, L.I32(piece * self.step)), limit) for piece in range(pieces)
            ]
            count = self._sum([builder.uitofp(i, self.kind) for i in inside])
        found = emitter.emit(list(numbers.values()))
        values = dict(zip(numbers, (x.value for x in found), strict=True))
        zero = ir.Constant(self.kind, 0.0)
        before = builder.load(self.count)
        total = builder.fadd(before, count)
        share = builder.fdiv(ir.Constant(self.kind, 1.0), self._at_least_one(total))
        empty = builder.fcmp_ordered("==", before, zero)
        for column, slots in enumerate(self.slots):
            points = [values[piece, column] for piece in range(pieces)]
            # A thread's first point stands for a mean: it is one of the points, so that little cancels below.
            mean = builder.select(empty, points[0], builder.load(slots[0]))
            gone = [builder.fsub(p, mean) for p in points]
            if inside is not None:
                gone = [builder.select(i, g, zero) for i, g in zip(inside, gone, strict=True)]
                points = [builder.select(i, p, zero) for i, p in zip(inside, points, strict=True)]
            moved, squares = self._sum(gone), builder.load(slots[1])
            for g in gone:
                squares = L.fma(builder, g, g, squares)
            step = builder.fmul(moved, share)
            builder.store(builder.fadd(mean, step), slots[0])
            builder.store(L.fma(builder, builder.fneg(moved), step, squares), slots[1])
            builder.store(builder.fadd(builder.load(slots[2]), self._sum(points)), slots[2])
        builder.store(total, self.count)

    def _sum(self, values: list[L.Value]) -> L.Value:
        while len(values) > 1:
            pairs = [self.builder.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[len(values) - len(values) % 2 :]
        return values[0]

    def _at_least_one(self, count: L.Value) -> L.Value:
        if isinstance(count, ir.Constant):
            return count
        builder, one = self.builder, ir.Constant(self.kind, 1.0)
        return builder.select(builder.fcmp_ordered("<", count, one), one, count)

    def _join(self, a: tuple[L.Value, ...], b: tuple[L.Value, ...]) -> tuple[L.Value, ...]:
        """Merges the moments of two sets of points; either may be empty."""
        builder = self.builder
        (mean, squares, count, plain), (other, more, added, others) = a, b
        total = builder.fadd(count, added)
        share = builder.fdiv(added, self._at_least_one(total))
        gone = builder.fsub(other, mean)
        between = builder.fmul(builder.fmul(gone, gone), builder.fmul(count, share))
        squares = builder.fadd(builder.fadd(squares, more), between)
        return L.fma(builder, gone, share, mean), squares, total, builder.fadd(plain, others)

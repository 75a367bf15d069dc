"""Online softmax of long rows: maximum and sum of exponentials in one pass (see `lower.reduction.online_softmax`).

This is the *team* form with the parameter ``online``.  A thread keeps a running maximum m and the sum s of exp(v - m).
With ``chunks`` accesses of values v at a time

    m' = max(m, v...),   s' = s exp(m - m') + sum(exp(v - m'))

so that there is one factor per group of loads.  Two threads' (m, s) merge in the same way, by ``shfl.sync`` and shared
memory: the sum with the smaller maximum is scaled, which both of them compute from the same numbers.  While m' is -inf
exponentials are taken of v - 0, so that a thread without points, or with points of -inf alone, has the sum 0.

The row is then read a second time for what needs both, from its end on: what was read last is in the caches still.
With the parameter ``streaming`` results are written by ``st.global.cs``, so that they do not displace rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llvmlite import ir

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.accumulators import acc_start, acc_types, accumulate
from jcuts.codegen.cuda.graph.node_emitter import Emitter
from jcuts.codegen.cuda.ptx import global_memory as M
from jcuts.codegen.cuda.ptx import sfu_math
from jcuts.codegen.cuda.reduction.row import RowReductionKernel
from jcuts.codegen.llvm import elementwise as E
from jcuts.codegen.llvm import lanes as L
from jcuts.kernel_ir.program import Phase
from jcuts.lower.reduction.online_softmax import OnlineSoftmax, match_online_softmax

Slots = dict[tuple[int, int], list[L.Value]]
"""Variables of the plain accumulators: (phase, accumulator) -> its values."""


class OnlineSoftmaxKernel(RowReductionKernel):
    """Emits one thread of a row program whose maximum and sum of exponentials are one pass."""

    def emit(self) -> None:
        """The pass over the row, then what follows from it."""
        found = match_online_softmax(self.program)
        if found is None:
            raise CompileRejected(f"{self.program.name}: no maximum and sum of exponentials of rows")
        self.resident = False
        for number, phase in enumerate(self.program.phases):
            if number == found.first:
                self._one_pass(found)
            elif number != found.second:
                self._phase(phase)

    def _frame(self, k: L.Value, k_range: int) -> M.Frame:
        return replace(super()._frame(k, k_range), is_streaming="streaming" in dict(self.program.params))

    @contextmanager
    def _iterations(self) -> Iterator[tuple[Emitter, list[int], bool]]:
        with super()._iterations() as made:
            yield made
        self.is_backwards = not self.is_backwards

    # -- the pass -----------------------------------------------------------------------------------------------
    def _one_pass(self, found: OnlineSoftmax) -> None:
        """Both reductions, and their results."""
        first, second = phases = self.program.phases[found.first], self.program.phases[found.second]
        for phase in self.program.phases[found.first : found.second]:
            if not phase.reds:
                self._keep(phase)
        self.dtype = first.accs[found.maximum].dtype
        self.kind = E.register_type(self.dtype)
        self.running = self._slot(self.kind, self._constant(float("-inf")))
        self.total = self._slot(self.kind, self._constant(0.0))
        slots: Slots = {}
        for place, phase in enumerate(phases):
            for number, acc in enumerate(phase.accs):
                if (place, number) != (0, found.maximum) and (place == 0 or number not in found.sums):
                    starts = zip(acc_types(acc), acc_start(acc, False), strict=True)
                    slots[place, number] = [self._slot(kind, start) for kind, start in starts]
        with self._iterations() as (emitter, offsets, tail):
            self._chunk(found, phases, emitter, offsets, tail, slots)
        builder = self.builder
        state = builder.load(self.running), builder.load(self.total)
        maximum, total = self._across_team(state, found.maximum, self._merge)
        self._results(first, slots, 0, {found.maximum: maximum})
        gone = self._exp(builder.fsub(maximum, self.scalars[found.centre, self.at].value))
        is_finite = builder.fcmp_ordered("==", builder.fsub(maximum, maximum), self._constant(0.0))
        total = builder.select(is_finite, total, gone)
        self._results(second, slots, 1, dict.fromkeys(found.sums, total))

    def _chunk(
        self,
        found: OnlineSoftmax,
        phases: Sequence[Phase],
        emitter: Emitter,
        offsets: Sequence[int],
        tail: bool,
        slots: Slots,
    ) -> None:
        """Adds the points of one iteration to the running maximum and sum, and to the plain accumulators."""
        terms: list[tuple[int, tuple[int, int], tuple[int, ...]]] = []
        for offset in offsets:
            for j in range(self.shape.vector):
                for place, phase in enumerate(phases):
                    mine = [n for n in range(len(phase.accs)) if (place, n) in {*slots, (0, found.maximum)}]
                    wanted = [value for n in mine for value in phase.accs[n].values]
                    values = iter(self._copy(emitter, phase, phase.body, wanted, offset + j, tail, {}))
                    terms += [(offset, (place, n), tuple(next(values) for _ in phase.accs[n].values)) for n in mine]
        emitter.vectorize_loads(v for _, _, values in terms for v in values)
        points: list[int] = []
        others: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        for offset, (place, number), values in terms:
            acc = phases[place].accs[number]
            values = self._mask_tail(emitter, acc, values, offset) if tail else values
            if (place, number) in slots:
                others.append(((place, number), values))
            else:
                points += values
        self._add([lanes.value for lanes in emitter.emit(points)])
        for (place, number), values in others:
            accumulate(emitter, phases[place].accs[number], slots[place, number], values)

    def _add(self, points: list[L.Value]) -> None:
        """Adds points to the running maximum and sum."""
        builder = self.builder
        before = builder.load(self.running)
        maximum = self._larger(before, self._tree(points, self._larger))
        base = self._or_zero(maximum)
        total = self._tree([self._exp(builder.fsub(p, base)) for p in points], builder.fadd)
        factor = self._exp(builder.fsub(before, base))
        builder.store(L.fma(builder, builder.load(self.total), factor, total), self.total)
        builder.store(maximum, self.running)

    def _merge(self, a: tuple[L.Value, ...], b: tuple[L.Value, ...]) -> tuple[L.Value, ...]:
        """Maximum and sum of two sets of points; the same bits whichever comes first."""
        builder = self.builder
        (one, sum_of_one), (other, sum_of_other) = a, b
        is_less = builder.fcmp_ordered("<", one, other)
        less, sum_of_less = builder.select(is_less, one, other), builder.select(is_less, sum_of_one, sum_of_other)
        maximum, sum_of_more = self._larger(one, other), builder.select(is_less, sum_of_other, sum_of_one)
        factor = self._exp(builder.fsub(less, self._or_zero(maximum)))
        return maximum, L.fma(builder, sum_of_less, factor, sum_of_more)

    def _results(self, phase: Phase, slots: Slots, place: int, known: dict[int, L.Value]) -> None:
        """The exit graph of one of the two reductions. Args: known: accumulators that the pass has made."""
        accs = {}
        for number, acc in enumerate(phase.accs):
            value = known.get(number)
            if value is None:
                mine = tuple(self.builder.load(slot) for slot in slots[place, number])
                value = self._team_reduce(acc, mine, number)[-1]
            accs[number] = E.Lanes(value, acc.index_dtype or acc.dtype)
        self._row_results(phase, accs)
        self.reductions += 1

    # -- arithmetic ---------------------------------------------------------------------------------------------
    def _constant(self, value: float) -> L.Value:
        return ir.Constant(self.kind, value)

    def _larger(self, a: L.Value, b: L.Value) -> L.Value:
        """The maximum, NaN where either is."""
        return E.combine(self.builder, "max", self.dtype, (a,), (b,))[0]

    def _or_zero(self, maximum: L.Value) -> L.Value:
        """A maximum, 0 in place of -inf: what exponents are taken from."""
        is_empty = self.builder.fcmp_ordered("==", maximum, self._constant(float("-inf")))
        return self.builder.select(is_empty, self._constant(0.0), maximum)

    def _exp(self, x: L.Value) -> L.Value:
        if sfu_math.supported("exp", self.dtype):
            return sfu_math.emit(self.builder, "exp", self.dtype, [x])
        return E.apply(self.builder, "exp", self.dtype, [E.Lanes(x, self.dtype)], {}).value

    @staticmethod
    def _tree(values: list[L.Value], combine: Callable[[L.Value, L.Value], L.Value]) -> L.Value:
        """Values combined pairwise."""
        while len(values) > 1:
            pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[len(values) - len(values) % 2 :]
        return values[0]

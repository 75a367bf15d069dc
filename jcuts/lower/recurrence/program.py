"""Lowers a scan to one program: a serial axis over the steps, carried values in local buffers of two copies.

    step t reads copy t % 2 of what is carried and writes the other; stacked results are written where they belong.

The phases of a step are those of `recurrence.stages`: each computes, for all points, values that its products and sums
allow, products that run over the same extents side by side (the gates of a cell).  Before the first step a phase fills
the carried values, behind the last one others copy them to the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph, Guard, Scalar
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.lower.builder import Builder, NotLowered, acc_node, axes_of, make_buffers, op_rule
from jcuts.lower.recurrence.stages import Stages, extents_of, fresh_roots, stages_of
from jcuts.lower.tensor_graph import OpNode, TensorGraph, build_graph
from jcuts.ops.registry import IndexTuple
from jcuts.trace import jaxapi

TEMPLATE = "recurrence"
STEP = "t"
"""The serial axis."""
TERM = "k"
"""Prefix of the axes that products run over."""


@dataclass(frozen=True)
class Source:
    """Where a step's value lies: in a buffer, ``offset`` elements behind its beginning."""

    buffer: str
    offset: Index


@dataclass
class StepBuilder(Builder):
    """Builds graphs of a step: what is carried, scanned or kept is loaded, products of the stage are accumulators.

    Attributes:
        sources: tensors that lie in memory. numbers: tensors that are known numbers in this loop.
        roots: equations whose results the phase accumulates. terms: builds what is accumulated, in the phase's body.
        accs: accumulators of a product at an index.
    """

    sources: dict[int, Source] = field(default_factory=dict)
    numbers: dict[int, Scalar] = field(default_factory=dict)
    roots: frozenset[int] = frozenset()
    terms: StepBuilder | None = None
    accs: list[Acc] = field(default_factory=list)

    def _value(self, tensor: int, index: IndexTuple, guards: tuple[Guard, ...], fill: Scalar) -> int:
        info = self.graph.tensors[tensor]
        if tensor in self.sources:
            source, every = self.sources[tensor], tuple(dict.fromkeys((*self.guards, *guards)))
            address = source.offset + flatten(index, info.type.shape)
            return self.target.load(source.buffer, address, info.type.dtype, every, fill)
        if tensor in self.numbers:
            return self._select(guards, self.target.const(self.numbers[tensor], info.type.dtype), fill, info.type.dtype)
        node = self.graph.producer(tensor)
        if node is not None and node.number in self.roots:
            every = tuple(dict.fromkeys((*self.guards, *guards)))
            made = self._accumulated(node, index, every)[node.outputs.index(tensor)]
            return self._select(guards, made, fill, info.type.dtype)
        return super()._value(tensor, index, guards, fill)

    def _accumulated(self, root: OpNode, index: IndexTuple, guards: tuple[Guard, ...]) -> Sequence[int]:
        """Results of a product at an index; nothing is read for it where a guard fails."""
        spec, terms = op_rule(root).reduce, self.terms
        assert spec is not None and terms is not None
        numbers = tuple(Index.axis(f"{TERM}{n}") if extent != 1 else Index() for n, (_, extent) in enumerate(spec.reds))
        first, terms.guards = len(self.accs), guards
        for acc, values in zip(spec.accs, spec.term(terms.context(root), index, numbers), strict=True):  # type: ignore[arg-type]
            self.accs.append(Acc(acc.combine, acc.dtype, tuple(values), acc.index_dtype))
        values = [self.target.add(acc_node(first + n, acc)) for n, acc in enumerate(self.accs[first:])]
        return spec.finish(self.context(root), values, index)  # type: ignore[arg-type]


def lower_recurrence(graph: TensorGraph, node: OpNode, eqn: Any, inner: TensorGraph, name: str) -> Program | Refusal:
    """The unscheduled program of a scan, or why there is none.

    Args: graph, node: of the function around it, and the scan in it. eqn: the scan. inner: its body's graph.
    """
    ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
    outside = [v for v in (*body.jaxpr.outvars, *body.jaxpr.invars) if jaxapi.is_literal(v)]
    if body.jaxpr.constvars or outside or not eqn.params["length"]:
        return Refusal("scan", "a step that gives on a number, or closes over one")
    outputs = [inner.of_var[v] for v in body.jaxpr.outvars]
    stages = stages_of(inner, outputs)
    if isinstance(stages, Refusal):
        return stages
    try:
        return _Lowering(graph, node, eqn, inner, body, stages).program(name)
    except NotLowered as declined:
        return declined.refusal


def lower_scans(closed: jaxapi.Closed) -> list[Program | Refusal]:
    """The unscheduled programs of a flat jaxpr's scans, in their order, or why one has none."""
    graph = build_graph(closed.jaxpr)
    found: list[Program | Refusal] = []
    for number, eqn in enumerate(closed.jaxpr.eqns):
        if jaxapi.primitive_name(eqn) == "scan":
            ((_, _, body),) = jaxapi.inner_jaxprs(eqn)
            found.append(lower_recurrence(graph, graph.nodes[number], eqn, build_graph(body.jaxpr), f"scan_{number}"))
    return found


class _Lowering:
    """A scan on its way to a program."""

    def __init__(
        self, graph: TensorGraph, node: OpNode, eqn: Any, inner: TensorGraph, body: jaxapi.Closed, stages: Stages
    ) -> None:
        self.graph, self.inner, self.stages = graph, inner, stages
        self.operands, self.results = node.inputs, node.outputs
        fixed, self.carries = jaxapi.scan_constants(eqn), jaxapi.scan_carries(eqn)
        self.before = self.operands[fixed : fixed + self.carries]
        self.steps = eqn.params["length"]
        turn = Index.axis(STEP)
        self.turn = Index(self.steps - 1) - turn if eqn.params["reverse"] else turn
        self.ranges = {STEP: self.steps}
        subset = frozenset({node.number})
        self.ins, self.outs, self.buffers = make_buffers(graph, subset, graph.subset_outputs(subset))
        numbers = [inner.of_var[v] for v in body.jaxpr.invars]
        self.after = [inner.of_var[v] for v in body.jaxpr.outvars]
        self.sources: dict[int, Source] = {}
        self.numbers: dict[int, Scalar] = {}
        for place, (tensor, operand) in enumerate(zip(numbers, self.operands, strict=True)):
            known = graph.tensors[operand].scalar
            if place < fixed and known is not None:
                self.numbers[tensor] = known
            elif place < fixed:
                self.sources[tensor] = Source(self.ins[operand], Index())
            elif place < fixed + self.carries:
                self.sources[tensor] = Source(f"s{place - fixed}", self._copy(turn, tensor))
            else:
                size = inner.tensors[tensor].type.size
                self.sources[tensor] = Source(self.ins[operand], self.turn * size)

    def _copy(self, turn: Index, tensor: int) -> Index:
        """Offset of the copy that a step reads of what is carried."""
        return turn.mod(2, self.ranges) * self.inner.tensors[tensor].type.size

    def program(self, name: str) -> Program:
        """The program."""
        phases = [self._fill(k) for k in range(self.carries)]
        kept = sorted(self.stages.kept - self.sources.keys())
        local = [Buffer(f"v{n}", self._type(t).dtype, self._type(t).shape, "local") for n, t in enumerate(kept)]
        written: dict[int, list[tuple[str, Index]]] = {t: [(b.name, Index())] for t, b in zip(kept, local, strict=True)}
        for k, tensor in enumerate(self.after):
            size = self._type(tensor).size
            if k < self.carries:
                place = (f"s{k}", self._copy(Index.axis(STEP) + 1, tensor))
                local.append(Buffer(f"s{k}", self._type(tensor).dtype, (2, *self._type(tensor).shape), "local"))
            elif self.results[k] in self.outs:
                place = (self.outs[self.results[k]], self.turn * size)
            else:
                continue
            written.setdefault(tensor, []).append(place)
        for stage in range(1 + max((self.stages.of.get(t, 0) for t in written), default=0)):
            mine = [t for t in written if self.stages.of.get(t, 0) == stage]
            for group in self._groups(mine):
                phases.append(self._phase(f"stage{stage}", group, written))
            for tensor in mine:
                if tensor in kept:
                    self.sources[tensor] = Source(written[tensor][0][0], Index())
        phases += [self._result(k) for k in range(self.carries) if self.results[k] in self.outs]
        grid = (Grid(STEP, self.steps, self.steps),)
        asked = [p for node in self.inner.nodes if (p := op_rule(node).info.get("precision"))]
        params = tuple(("precision", p) for p in sorted(asked)[:1])
        return Program(name, (*self.buffers, *local), grid, (STEP,), tuple(phases), 1, TEMPLATE, params)

    def _type(self, tensor: int) -> Any:
        return self.inner.tensors[tensor].type

    def _groups(self, tensors: Sequence[int]) -> list[list[int]]:
        """Values of one phase: of the same shape, from products that run over the same extents."""
        found: dict[object, list[int]] = {}
        for tensor in tensors:
            roots = fresh_roots(self.inner, self.stages, tensor)
            extents = extents_of(roots[0]) if roots else None
            found.setdefault((self._type(tensor).shape, extents), []).append(tensor)
        return list(found.values())

    def _phase(self, name: str, tensors: list[int], written: dict[int, list[tuple[str, Index]]]) -> Phase:
        shape = self._type(tensors[0]).shape
        axes, index, ranges = axes_of(shape)
        roots = {r.number: r for t in tensors for r in fresh_roots(self.inner, self.stages, t)}
        extents = extents_of(next(iter(roots.values()))) if roots else ()
        reds = tuple(Red(f"{TERM}{n}", extent) for n, extent in enumerate(extents) if extent != 1)
        if roots and not reds:
            reds = (Red(f"{TERM}0", 1),)
        members = frozenset(node.number for node in self.inner.nodes)
        terms = StepBuilder(self.inner, members, sources=self.sources, numbers=self.numbers)
        terms.start({**self.ranges, **ranges, **{r.name: r.extent for r in reds}})
        builder = replace(terms, roots=frozenset(roots), terms=terms, accs=[])
        builder.start({**self.ranges, **ranges})
        stores = [
            Store(buffer, offset + flatten(index, shape), builder.value(tensor, index))
            for tensor in tensors
            for buffer, offset in written[tensor]
        ]
        if reds:  # blocks and threads lie along the last axis
            axes = tuple(sorted(axes, key=lambda axis: axis.extent))
        return Phase(
            name,
            (Axis(STEP, self.steps), *axes),
            reds,
            tuple(builder.accs),
            terms.target,
            builder.target,
            tuple(stores),
        )

    def _fill(self, number: int) -> Phase:
        """The carried value before the first step."""
        operand = self.before[number]
        axes, index, _ = axes_of(self.graph.tensors[operand].type.shape)
        graph, kind = Graph(), self.graph.tensors[operand].type
        scalar = self.graph.tensors[operand].scalar
        place = flatten(index, kind.shape)
        value = (
            graph.const(scalar, kind.dtype)
            if scalar is not None
            else graph.load(self.ins[operand], place, kind.dtype, (), 0)
        )
        return Phase("fill", axes, (), (), Graph(), graph, (Store(f"s{number}", place, value),), once=(STEP,))

    def _result(self, number: int) -> Phase:
        """The carried value behind the last step."""
        kind = self._type(self.after[number])
        axes, index, _ = axes_of(kind.shape)
        graph, place = Graph(), flatten(index, kind.shape)
        value = graph.load(f"s{number}", place + self.steps % 2 * kind.size, kind.dtype, (), 0)
        out = self.outs[self.results[number]]
        return Phase("result", axes, (), (), Graph(), graph, (Store(out, place, value),), last=(STEP,))

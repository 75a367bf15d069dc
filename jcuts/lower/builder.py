"""Builds a region's data-flow graph by inlining: from a result point back through the op rules to loads.

Producers are inlined into their users (register-level fusion, thesis 3.2.4): the graph of one result point holds every
element-wise operation of the region, and loads at the addresses that the rules compute.  What a rule cannot express
raises `NotLowered`, which carries the reason and which `lower.region.lower_region` catches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jcuts.base.errors import IRError, Refusal
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph, Guard, Node, Scalar
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Program
from jcuts.lower.patterns.strided_concat import StridedConcat
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.ops.registry import FLOATS, IndexTuple, Op, TensorType

MAX_NODES = 600  # per-point graph nodes: larger graphs compile slowly and spill


class NotLowered(Exception):
    """Carries a refusal out of the recursive descent, to `lower.region.lower_region`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def built_or_refused(
    graph: TensorGraph, subset: frozenset[int], build: Callable[[], Program | Refusal]
) -> Program | Refusal:
    """What ``build`` makes of a region, or the refusal of one of its equations, or of the recursive descent."""
    for number in sorted(subset):
        refusal = graph.nodes[number].refusal
        if refusal is not None:
            return refusal
    try:
        return build()
    except NotLowered as declined:
        return declined.refusal


@dataclass
class Builder:
    """Builds graphs for the subset; one instance per program.

    ``anchors`` are tensors whose value at one known index is already a node of the current graph (the accumulator and
    what was computed from it); ``locals`` are tensors kept in local buffers: name, the index at which they are kept,
    and the address there; ``past_pieces``: concatenations of equal pieces are read from where the pieces are
    (`lower.patterns.strided_concat`), where kernels that only move points branch once for all their threads instead.
    """

    graph: TensorGraph
    subset: frozenset[int]
    inputs: dict[int, str] = field(default_factory=dict)
    locals: dict[int, tuple[str, IndexTuple, Index]] = field(default_factory=dict)
    ranges: dict[str, int] = field(default_factory=dict)
    target: Graph = field(default_factory=Graph)
    anchors: dict[int, tuple[IndexTuple, int]] = field(default_factory=dict)
    memo: dict[object, int] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    past_pieces: bool = False

    def start(self, ranges: dict[str, int]) -> None:
        """Begins a new graph over the given axes."""
        self.ranges, self.target = ranges, Graph()
        self.anchors, self.memo, self.guards = {}, {}, ()

    def value(self, tensor: int, index: IndexTuple, guards: tuple[Guard, ...] = (), fill: Scalar = 0) -> int:
        """The value of a tensor at an index; ``fill`` where a guard fails."""
        info = self.graph.tensors[tensor]
        live = tuple(dict.fromkeys(g for g in guards if not g.always(self.ranges)))
        if any(g.never(self.ranges) for g in live):
            return self.target.const(fill, info.type.dtype)
        key = (tensor, index, live, fill if live else None, repr(fill) if live else "", self.guards)
        if key not in self.memo:
            if len(self.target.nodes) > MAX_NODES:
                raise NotLowered(Refusal("subset", f"more than {MAX_NODES} values per point"))
            self.memo[key] = self._value(tensor, index, live, fill)
        return self.memo[key]

    def _value(self, tensor: int, index: IndexTuple, guards: tuple[Guard, ...], fill: Scalar) -> int:
        info = self.graph.tensors[tensor]
        if info.scalar is not None:
            return self._select(guards, self.target.const(info.scalar, info.type.dtype), fill, info.type.dtype)
        if tensor in self.anchors:
            where, node = self.anchors[tensor]
            if where != index or guards:
                raise NotLowered(
                    Refusal("subset", "a fused value is needed at another point than where it is computed")
                )
            return node
        if tensor in self.locals:
            name, where, address = self.locals[tensor]
            if where != index or guards:
                raise NotLowered(
                    Refusal("subset", "a value kept in cache is needed at another point than where it was computed")
                )
            kept = local_dtype(info.type.dtype)
            value = self.target.load(name, address, kept)
            return (
                value if kept == info.type.dtype else self.target.apply("convert", info.type.dtype, value, source=kept)
            )
        node = self.graph.producer(tensor)
        if node is None or node.number not in self.subset:
            if node is None and tensor not in self.inputs and info.scalar is None:
                raise IRError(f"tensor {tensor} is no input of the subset")
            every = tuple(dict.fromkeys((*self.guards, *guards)))
            address = flatten(index, info.type.shape)
            return self.target.load(self.inputs[tensor], address, info.type.dtype, every, fill)
        op = node.op
        assert op is not None
        if op.pull is None:
            raise NotLowered(Refusal(node.prim, "a reduction that other operations of the subset recompute per point"))
        saved = self.guards
        self.guards = tuple(dict.fromkeys((*saved, *guards)))
        if node.pieces is not None and self._reads_pieces(node.pieces):
            result = self.value(node.pieces.source, node.pieces.place(index, self.ranges))
        else:
            result = op.pull(_OpContext(self, node), index)
        self.guards = saved
        return self._select(guards, result, fill, info.type.dtype)

    def _reads_pieces(self, pieces: StridedConcat) -> bool:
        """Whether to read a strided concatenation at its source: its slices are in the region, and none has a known
        value yet.
        """
        cut = {t for number in pieces.slices for t in self.graph.nodes[number].outputs}
        known = self.anchors.keys() | self.locals.keys()
        return self.past_pieces and pieces.slices <= self.subset and not cut & known

    def _select(self, guards: tuple[Guard, ...], value: int, fill: Scalar, dtype: str) -> int:
        if not guards or self._is_guarded(value, guards, fill):
            return value
        condition = self.guard_node(guards)
        return self.target.apply("select", dtype, condition, value, self.target.const(fill, dtype))

    def _is_guarded(self, value: int, guards: tuple[Guard, ...], fill: Scalar) -> bool:
        """Whether a value is read under these guards and is ``fill`` where one fails: a slice of an operand."""
        node = self.target.nodes[value]
        if node.op != "load" or node.value is None or not set(guards) <= set(node.guards):
            return False
        alike = repr(complex(node.value)) == repr(complex(fill))  # 0 and 0.0, but not -0.0
        return alike and (node.value == fill or node.value != node.value)  # integers beyond 2^53; nan

    def guard_node(self, guards: tuple[Guard, ...]) -> int:
        """A bool value: all guards hold."""
        live = tuple(g for g in guards if not g.always(self.ranges))
        return self.target.add(Node("guard", "bool", guards=live)) if live else self.target.const(True, "bool")

    def to_local_dtype(self, value: int) -> int:
        """A value of the current graph as a local buffer holds it."""
        dtype = self.target.nodes[value].dtype
        return value if local_dtype(dtype) == dtype else self.target.apply("widen", local_dtype(dtype), value)

    def context(self, node: OpNode) -> _OpContext:
        """The interface that the op rule of ``node`` builds its graph through."""
        return _OpContext(self, node)


def local_dtype(dtype: str) -> str:
    """The type of a local buffer: 16-bit floats are kept as registers carry them.

    A value that one phase rounds and another computes again unrounded would differ by a rounding error of the storage
    type, which softmax puts into an exponential.
    """
    return "float32" if dtype in ("bfloat16", "float16") else dtype


@dataclass
class _OpContext:
    builder: Builder
    node: OpNode

    @property
    def ranges(self) -> dict[str, int]:
        return self.builder.ranges

    def input(self, number: int, index: IndexTuple, guards: tuple[Guard, ...] = (), fill: Scalar = 0) -> int:
        return self.builder.value(self.node.inputs[number], index, guards, fill)

    def input_type(self, number: int) -> TensorType:
        return self.builder.graph.tensors[self.node.inputs[number]].type

    def apply(self, op: str, dtype: str, *args: int, **attrs: object) -> int:
        if op == "copy":
            return args[0]
        target = self.builder.target
        if op == "mul" and self.node.prim == "mul" and dtype in FLOATS and dtype != "bfloat16":
            for place, (flag, other) in enumerate(((args[0], args[1]), (args[1], args[0]))):
                node = target.nodes[flag]
                made = self.builder.graph.producer(self.node.inputs[place]) if place < len(self.node.inputs) else None
                direct = made is not None and made.prim == "convert_element_type"
                if direct and node.op == "convert" and target.nodes[node.args[0]].dtype == "bool":
                    # XLA multiplies by a converted bool with a selection (NaN times False is 0), but not in bfloat16,
                    # not where something stands between the conversion and the product, and not in contractions.
                    return target.apply("select", dtype, node.args[0], other, target.const(0.0, dtype))
        return target.apply(op, dtype, *args, **attrs)

    def const(self, value: Scalar, dtype: str) -> int:
        return self.builder.target.const(value, dtype)

    def index_value(self, index: Index, dtype: str) -> int:
        return self.builder.target.add(Node("index", dtype, index=index))

    def guard_value(self, guards: tuple[Guard, ...]) -> int:
        return self.builder.guard_node(guards)

    def known(self, number: int) -> Scalar | None:
        return self.builder.graph.tensors[self.node.inputs[number]].scalar


def op_rule(node: OpNode) -> Op:
    assert node.op is not None
    return node.op


def make_buffers(
    graph: TensorGraph, subset: frozenset[int], outputs: list[int]
) -> tuple[dict[int, str], dict[int, str], list[Buffer]]:
    """Names and buffers of the operands and results."""
    ins = {tensor: f"in{k}" for k, tensor in enumerate(graph.subset_inputs(subset))}
    outs = {tensor: f"out{k}" for k, tensor in enumerate(outputs)}
    roles = ((ins, "in"), (outs, "out"))
    tensors = [(name, graph.tensors[t], role) for names, role in roles for t, name in names.items()]
    return ins, outs, [Buffer(name, t.type.dtype, t.type.shape, role, t.tf32) for name, t, role in tensors]


def axes_of(shape: tuple[int, ...], prefix: str = "d") -> tuple[tuple[Axis, ...], IndexTuple, dict[str, int]]:
    """One axis per dimension (dimensions of extent 1 need none)."""
    axes = tuple(Axis(f"{prefix}{k}", extent) for k, extent in enumerate(shape) if extent != 1)
    index = tuple(Index.axis(f"{prefix}{k}") if extent != 1 else Index() for k, extent in enumerate(shape))
    return axes, index, {axis.name: axis.extent for axis in axes}


def acc_node(number: int, acc: Acc):
    """The exit graph's view of accumulator ``number`` (for argmax and argmin: the position)."""
    return Node("acc", acc.index_dtype or acc.dtype, attrs=(("number", number),))


def propagate_indices(
    graph: TensorGraph, after: frozenset[int], root: OpNode, index: IndexTuple, ranges: dict[str, int]
) -> dict[int, IndexTuple]:
    """Index of every later tensor's point that belongs to the root's point ``index``."""
    places = dict.fromkeys(root.outputs, index)
    for number in sorted(after):
        node = graph.nodes[number]
        op = op_rule(node)
        if op.push is None:
            continue
        for position, tensor in enumerate(node.inputs):
            if tensor not in places:
                continue
            if op.family != "elementwise" and position != 0:
                continue
            if op.family == "elementwise" and graph.tensors[tensor].type.shape != op.outputs[0].shape:
                continue
            for made in node.outputs:
                places.setdefault(made, op.push(places[tensor], ranges))
    return places


def descendants(graph: TensorGraph, subset: frozenset[int], start: int) -> frozenset[int]:
    found: set[int] = set()
    for number in sorted(subset):
        if number <= start:
            continue
        for tensor in graph.nodes[number].inputs:
            made = graph.tensors[tensor].producer
            if made == start or made in found:
                found.add(number)
    return frozenset(found)

"""Def-use graph of a flat jaxpr: tensors, equations with their op rules, producers and users.

Reads jaxpr objects by attribute only (``eqn.primitive.name``, ``var.aval``), so that this package does not import JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.node import Scalar
from jcuts.lower.equation_key import NotPlain, intern_key, plain
from jcuts.lower.patterns.strided_concat import StridedConcat, match_strided_concat
from jcuts.ops import Equation, Op, TensorType, describe


@dataclass
class Tensor:
    """A tensor of the graph (an SSA value of the jaxpr).

    ``producer``: an equation number or None; ``scalar``: its value if it is a literal; ``tf32``: see `Buffer`.
    """

    number: int
    type: TensorType
    producer: int | None = None
    output: int = 0
    scalar: Scalar | None = None
    users: list[int] = field(default_factory=list)
    escapes: bool = False
    name: str = ""
    constant: bool = False
    tf32: bool = False


@dataclass
class OpNode:
    """An equation: its op, or a refusal.

    ``pieces``: a concatenation as strided slices of one tensor, if it is that; ``kind``: primitive and parameters as a
    key, None where they have none.
    """

    number: int
    prim: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    op: Op | None
    refusal: Refusal | None
    where: str = ""
    pieces: StridedConcat | None = None
    kind: Hashable | None = None


def _tensor_key(tensor: Tensor) -> Hashable:
    scalar = None if tensor.scalar is None else (type(tensor.scalar).__name__, repr(tensor.scalar))
    return tensor.type.shape, tensor.type.dtype, scalar, tensor.tf32


@dataclass
class TensorGraph:
    """Def-use graph of a flat jaxpr: all tensors and equations, equations in program order."""

    tensors: list[Tensor]
    nodes: list[OpNode]
    of_var: dict[Any, int]

    @functools.cached_property
    def tensor_keys(self) -> list[int]:
        """Interned shape, type, value and TF32 flag of every tensor: equal numbers for equal ones of all graphs."""
        return [intern_key(_tensor_key(tensor)) for tensor in self.tensors]

    @functools.cached_property
    def node_keys(self) -> list[int | None]:
        """Interned `OpNode.kind` of every equation; None where it has none, or a refusal."""
        return [None if n.kind is None or n.refusal is not None else intern_key(n.kind) for n in self.nodes]

    @functools.cached_property
    def touched(self) -> list[tuple[int, ...]]:
        """Operands and results of every equation."""
        return [(*node.inputs, *node.outputs) for node in self.nodes]

    @functools.cached_property
    def producers(self) -> list[int]:
        """Equation that defines every tensor; -1 for none."""
        return [-1 if tensor.producer is None else tensor.producer for tensor in self.tensors]

    def producer(self, tensor: int) -> OpNode | None:
        """The equation that defines a tensor."""
        number = self.tensors[tensor].producer
        return None if number is None else self.nodes[number]

    def ancestors(self, members: frozenset[int], start: int) -> frozenset[int]:
        """Transitive producers of an equation within ``members``."""
        found: set[int] = set()
        stack = [start]
        while stack:
            for tensor in self.nodes[stack.pop()].inputs:
                made = self.tensors[tensor].producer
                if made is not None and made in members and made not in found:
                    found.add(made)
                    stack.append(made)
        return frozenset(found)

    def edges(self) -> set[tuple[int, int]]:
        """(producer, user) pairs of equation numbers."""
        return {
            (tensor.producer, user) for tensor in self.tensors if tensor.producer is not None for user in tensor.users
        }

    def subset_inputs(self, subset: frozenset[int]) -> list[int]:
        """Tensors that a region reads from outside (literals left out), in first-use order."""
        seen: dict[int, None] = {}
        for number in sorted(subset):
            for tensor in self.nodes[number].inputs:
                made = self.tensors[tensor].producer
                if self.tensors[tensor].scalar is None and (made is None or made not in subset):
                    seen.setdefault(tensor)
        return list(seen)

    def subset_outputs(self, subset: frozenset[int]) -> list[int]:
        """Tensors of a region with users outside it, in program order."""
        found = []
        for number in sorted(subset):
            for tensor in self.nodes[number].outputs:
                info = self.tensors[tensor]
                if info.escapes or not subset.issuperset(info.users):
                    found.append(tensor)
        return found


MOST_JOINED = 16
"""Operands of a concatenation whose points a kernel may tell apart by guards."""
MOST_SWITCHED = 64
"""As many where a kernel can branch once for all its threads' points (`schedule.gpu.elementwise.schedules`)."""


def build_graph(
    jaxpr: Any,
    where: Callable[[Any], str] = lambda eqn: "",
    scalars: dict[Any, Scalar] | None = None,
    joined: int = MOST_JOINED,
    tf32: Collection[Any] = (),
) -> TensorGraph:
    """Builds the def-use graph of a flat jaxpr.

    Args: jaxpr: anything with ``constvars, invars, eqns, outvars``; where: equation -> "file:line (function)"; scalars:
        values of variables that are known numbers (closed-over Python scalars); joined: operands of the largest
        concatenation that is not left to XLA; tf32: values that are known to hold TF32 numbers only.
    """
    tensors: list[Tensor] = []
    of_var: dict[Any, int] = {}
    scalars = scalars or {}

    def new(var: Any, producer: int | None, output: int = 0) -> int:
        aval = var.aval
        tensor = Tensor(len(tensors), TensorType(tuple(getattr(aval, "shape", ())), _dtype(aval)), producer, output)
        tensor.tf32 = not hasattr(var, "val") and var in tf32
        tensors.append(tensor)
        return tensor.number

    def number_of(var: Any) -> int:
        if hasattr(var, "val"):  # a literal: not hashable by value, so never shared
            number = new(var, None)
            value = var.val
            if tensors[number].type.shape == ():
                tensors[number].scalar = _scalar(value, tensors[number].type.dtype)
            return number
        if var not in of_var:
            of_var[var] = new(var, None)
            if var in scalars:
                tensors[of_var[var]].scalar = _scalar(scalars[var], tensors[of_var[var]].type.dtype)
        return of_var[var]

    for var in jaxpr.constvars:
        tensors[number_of(var)].constant = True
    for var in jaxpr.invars:
        number_of(var)
    nodes: list[OpNode] = []
    for number, eqn in enumerate(jaxpr.eqns):
        inputs = tuple(number_of(v) for v in eqn.invars)
        outputs = tuple(new(v, number, k) for k, v in enumerate(eqn.outvars))
        for var, tensor in zip(eqn.outvars, outputs, strict=True):
            of_var[var] = tensor
        for tensor in set(inputs):
            tensors[tensor].users.append(number)
        found = _describe(eqn, [tensors[t].type for t in inputs], [tensors[t].type for t in outputs])
        if len(inputs) > joined and eqn.primitive.name == "concatenate":
            found = Refusal("concatenate", f"{len(inputs)} operands would need as many guards per point")
        op, refusal = (None, found) if isinstance(found, Refusal) else (found, None)
        nodes.append(OpNode(number, eqn.primitive.name, inputs, outputs, op, refusal, where(eqn)))
        nodes[-1].kind = _kind(eqn)
        if eqn.primitive.name == "concatenate" and op is not None:
            nodes[-1].pieces = _pieces(jaxpr, nodes, [tensors[t] for t in inputs], int(eqn.params["dimension"]))
    for var in jaxpr.outvars:
        if not hasattr(var, "val"):
            tensors[number_of(var)].escapes = True
    return TensorGraph(tensors, nodes, of_var)


def _pieces(jaxpr: Any, nodes: Sequence[OpNode], operands: Sequence[Tensor], dim: int) -> StridedConcat | None:
    made = [t.producer for t in operands if t.producer is not None and nodes[t.producer].prim == "slice"]
    if len(made) < len(operands):
        return None
    cuts = [(number, nodes[number].inputs[0], jaxpr.eqns[number].params) for number in made]
    return match_strided_concat(cuts, [t.type.shape for t in operands], dim)


def _kind(eqn: Any) -> Hashable | None:
    try:
        return (eqn.primitive.name, plain(eqn.params))
    except NotPlain:
        return None


def _describe(eqn: Any, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> Op | Refusal:
    name = eqn.primitive.name
    if getattr(eqn, "effects", None):
        return Refusal(name, "has side effects")
    return describe(Equation(name, tuple(inputs), tuple(outputs), eqn.params))


def _dtype(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    return "token" if dtype is None else str(getattr(dtype, "name", dtype))


def _scalar(value: Any, dtype: str) -> Scalar | None:
    item = value.item() if hasattr(value, "item") else value
    if dtype == "bool":
        return bool(item)
    if dtype.startswith(("int", "uint")):
        return int(item)
    if dtype in ("float64", "float32", "bfloat16", "float16"):
        return float(item)
    return None

"""A jaxpr as XLA sees it: calls inlined, ``shard_map`` and loops of one turn expanded in place.

Neither is a boundary in a compiled program: what a body makes is the caller's buffer from when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.plan.cost.jaxpr import inner
from jcuts.plan.cost.primitive_kinds import CALLS, COLLECTIVES, REPEATS
from jcuts.trace import jaxapi


class Value:
    """An SSA value of one inlined instance of a jaxpr."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass
class Node:
    """An equation after inlining: values instead of variables.

    arguments: its operands, None for literals, also for those that were given to the call around it; inputs: the same
    without literals.  fixed, axes: of a node that stays whole, positions of its body's inputs that are constants, and
    sizes of mesh axes.
    """

    name: str
    equation: Any
    arguments: list[Value | None]
    outputs: list[Value]
    fixed: frozenset[int] = frozenset()
    axes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = [v for v in self.arguments if v is not None]


@dataclass(frozen=True)
class Alias:
    """The equation of a node whose result is its operand seen otherwise (of a literal: nothing)."""

    @dataclass(frozen=True)
    class _Primitive:
        name: str = "copy"

    primitive: _Primitive = _Primitive()
    invars: tuple[()] = ()
    outvars: tuple[()] = ()

    @property
    def params(self) -> dict[str, Any]:
        """No parameters."""
        return {}


def view(source: Value | None, result: Value) -> Node:
    """A node whose result is its operand seen otherwise."""
    return Node("copy", Alias(), [source], [result])


def inlined(jaxpr: Any, given: Sequence[Value | None]) -> tuple[list[Node], list[Value | None]]:
    """Inlines calls: (nodes, results); loops, conditionals and ``shard_map`` stay whole."""
    values: dict[Any, Value | None] = dict(zip(jaxpr.invars, given, strict=True))
    values |= {v: Value(v.aval) for v in jaxpr.constvars}
    read = lambda v: None if hasattr(v, "val") else values[v]  # noqa: E731
    nodes: list[Node] = []
    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        name = equation.primitive.name
        if name in CALLS:
            body = inner(equation)[0][0]
            inside, results = inlined(body, inputs[len(inputs) - len(body.invars) :])
            nodes += inside
            values |= dict(zip(equation.outvars, results, strict=True))
            continue
        outputs = [Value(v.aval) for v in equation.outvars]
        values |= dict(zip(equation.outvars, outputs, strict=True))
        nodes.append(Node(name, equation, inputs, outputs))
    return nodes, [read(v) for v in jaxpr.outvars]


def expanded(
    nodes: list[Node],
    results: Sequence[Value | None],
    constants: Iterable[Value] = (),
    axes: Mapping[str, int] | None = None,
) -> tuple[list[Node], list[Value | None]]:
    """Expands ``shard_map``, loops of one turn and conditionals on constants, at any depth: (nodes, results).

    A body's operand is a view of the caller's value (of one device's part, of the only slice of a stack), and the
    caller's result a view of the body's.
    """
    return used(_expanded(nodes, set(constants), dict(axes or {})), results), list(results)


def body_of(node: Node, jaxpr: Any) -> tuple[list[Node], list[Value | None], list[Value]]:
    """The program inside of a node that stays whole: (nodes, results, inputs)."""
    given = [Value(v.aval) for v in jaxpr.invars]
    constants = [v for i, v in enumerate(given) if i in node.fixed]
    return *expanded(*inlined(jaxpr, given), constants, node.axes), given


def _expanded(nodes: list[Node], constants: set[Value], axes: dict[str, int]) -> list[Node]:
    flat: list[Node] = []
    for node in nodes:
        if is_constant(node, constants, axes):
            constants |= set(node.outputs)
        if not inner(node.equation):
            flat.append(_folded(node, constants, axes))
            continue
        body = inner(node.equation)[0][0]
        outer = node.arguments[-len(body.invars) :] if body.invars else []  # a conditional's predicate comes before
        if not is_expanded(node, constants):
            same = {i for i, v in enumerate(outer) if v is None or v in constants}
            fixed = same & set(range(invariants(node.equation, len(outer))))
            flat.append(replace(node, fixed=frozenset(fixed), axes=axes))
            continue
        inside = [Value(v.aval) for v in body.invars]
        flat += [view(v, own) for v, own in zip(outer, inside, strict=True)]
        constants |= {own for v, own in zip(outer, inside, strict=True) if v in constants or v is None}
        made, returned = inlined(body, inside)
        flat += _expanded(made, constants, axes | _axis_sizes(node.equation))
        flat += [view(v, own) for v, own in zip(returned, node.outputs, strict=True)]
        constants |= {own for v, own in zip(returned, node.outputs, strict=True) if v in constants or v is None}
    return flat


def _folded(node: Node, constants: set[Value], axes: dict[str, int]) -> Node:
    """A node after constant folding: a ``select_n`` on a constant is a view of the only case that is no constant."""
    if node.name == "select_n":
        predicate, *cases = node.arguments
        computed = [v for v in cases if v is not None and v not in constants]
        if (predicate is None or predicate in constants) and len(computed) == 1:
            return view(computed[0], node.outputs[0])
    return replace(node, axes=axes) if node.name in COLLECTIVES else node


def invariants(equation: Any, count: int) -> int:
    """How many of a body's first inputs stay what the caller gives: a loop's carry and slices do not."""
    if equation.primitive.name == "cond":
        return count
    return jaxapi.scan_constants(equation) if equation.primitive.name == "scan" else 0


def used(nodes: list[Node], results: Sequence[Value | None]) -> list[Node]:
    """The nodes that a result depends on, without dead code: what a turn hands to a next one that never comes."""
    wanted = {v for v in results if v is not None}
    found: list[Node] = []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            found.append(node)
            wanted |= set(node.inputs)
    return found[::-1]


def _axis_sizes(equation: Any) -> dict[str, int]:
    """Sizes of the mesh axes that a ``shard_map`` brings in scope."""
    return dict(equation.params["mesh"].shape) if equation.primitive.name == "shard_map" else {}


def is_constant(node: Node, constants: set[Value], axes: dict[str, int]) -> bool:
    """Whether XLA folds a node: one number or copies of it, made of constants, or the position along a mesh axis of
    one device."""
    if inner(node.equation):
        return False
    if any(getattr(v.aval, "size", 2) > 1 for v in node.outputs):
        return node.name in REPEATS and all(v in constants for v in node.inputs)
    if node.name == "axis_index":
        return axes.get(node.equation.params["axis_name"], 0) == 1
    return all(v in constants for v in node.inputs)


def is_kept_loop(equation: Any) -> bool:
    """Whether an equation is a ``scan`` that stays a loop (XLA unrolls one of a single iteration)."""
    return equation.primitive.name == "scan" and equation.params["length"] > 1


def is_expanded(node: Node, constants: set[Value]) -> bool:
    """Whether a node's body is part of the program around it (of a conditional on a constant, its largest branch)."""
    if node.name == "cond":
        return node.arguments[0] is None or node.arguments[0] in constants
    return node.name == "shard_map" or (node.name == "scan" and not is_kept_loop(node.equation))


def is_conditional(node: Node) -> bool:
    """Whether a node runs one of several programs, which make its results."""
    return node.name == "cond"

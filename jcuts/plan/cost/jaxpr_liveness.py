"""Buffer liveness of a jaxpr as XLA would fuse it: which values are buffers, and how many bytes are live at once.

Where `plan.cost.jaxpr` counts equation by equation, calls are inlined here and element-wise chains have no buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcuts.plan.cost.jaxpr import bytes_of, inner, trace
from jcuts.plan.cost.primitive_kinds import HEAVY, REDUCTIONS


@dataclass(frozen=True)
class Footprint:
    """Bytes per device of one call: arguments, results, of which ``aliased`` reuse donated arguments, and
    temporaries."""

    arguments: float
    results: float
    aliased: float
    temporary: float

    @property
    def peak(self) -> float:
        """arguments + results - aliased + temporary, as ``compiled.memory_analysis()`` adds up."""
        return self.arguments + self.results - self.aliased + self.temporary


def footprint(function: Callable, *arguments: Any, donated: Sequence[int] = ()) -> Footprint:
    """Memory that a call needs per device, from liveness over its jaxpr.

    Values that fuse are never buffers: an elementwise result, a broadcast, a reshape.  A loop's carry is one buffer.
    Inside ``shard_map`` shapes are per device; outside, a value is divided as the ``shard_map`` that it enters or
    leaves says, and elementwise results as their operands.

    Args: donated: positions of arguments whose buffers results may take.
    Raises: NotJaxError if the function cannot be traced.
    """
    closed = trace(function, arguments)
    given = [Value(v.aval) for v in closed.invars]
    nodes, outs = inlined(closed, given)
    share = shares(nodes)
    sizes = [bytes_of(v) * share.get(v, 1.0) for v in given]
    results = [(v, bytes_of(v) * share.get(v, 1.0)) for v in outs if v is not None]
    ends = np.cumsum([0, *(len(jax.tree.leaves(argument)) for argument in arguments)])
    free = sum(sum(sizes[ends[i] : ends[i + 1]]) for i in donated)
    total = sum(size for _, size in results)
    return Footprint(sum(sizes), total, min(free, total), _peak(nodes, given, outs, share))


VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "pcast",
        "pvary",
        "optimization_barrier",
        "name",
        "stop_gradient",
        "transpose",
        "sharding_constraint",
        "psum",
        "psum2",
        "psum_invariant",
    }
)
"""Results that are their operand seen otherwise (a transpose becomes the layout that its producer writes; an all-reduce
works in place)."""

BUFFERS = HEAVY - {"transpose", "dynamic_slice", "concatenate"}
DEAR = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "pow",
        "rsqrt",
        "sqrt",
        "div",
        "lgamma",
        "digamma",
    }
)
CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat",
        "checkpoint",
        "remat2",
        "custom_lin",
    }
)


class Value:
    """An SSA value of one inlined instance of a jaxpr."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass
class Node:
    """An equation after inlining: values instead of variables (literals are left out)."""

    name: str
    equation: Any
    inputs: list[Value]
    outputs: list[Value]


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
        nodes.append(Node(name, equation, [v for v in inputs if v is not None], outputs))
    return nodes, [read(v) for v in jaxpr.outvars]


def owners(nodes: list[Node], results: Sequence[Value | None]) -> dict[Value, Value | None]:
    """Maps every value to the one that owns its buffer (itself, or what it is a view of), or to None if it is fused
    away.
    """
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    kept = {v for v in results if v is not None}
    owner: dict[Value, Value | None] = {}
    for node in nodes:
        for v in node.outputs:
            mine = users.get(v, [])
            if node.name in VIEWS:
                source = node.inputs[0] if node.inputs else None
                owner[v] = owner.get(source, source) if source is not None else None
            elif node.name in ("broadcast_in_dim", "iota", "axis_index"):
                owner[v] = None
            elif node.name in BUFFERS or inner(node.equation) or v in kept:
                owner[v] = v
            else:
                # Cheap results are computed again in each consumer; dear ones are kept when there are several.
                again = len(mine) <= 1 or node.name not in DEAR
                owner[v] = None if again and not any(opaque_node(user) for user in mine) else v
    return owner


def opaque_node(node: Node) -> bool:
    """Whether a node needs its operands as buffers (a reduction fuses with the producer of its operand)."""
    return (node.name in BUFFERS and node.name not in REDUCTIONS) or bool(inner(node.equation))


def is_kept_loop(equation: Any) -> bool:
    """Whether an equation is a ``scan`` that stays a loop (XLA unrolls one of a single iteration)."""
    return equation.primitive.name == "scan" and equation.params["length"] > 1


def stacked_outputs(loop: Any) -> list[int]:
    """Positions of a ``scan``'s stacked results (per iteration), as opposed to its carry."""
    # Carries keep their shape; stacked results gain an axis (versions of JAX spell the counts differently).
    pairs = zip(loop.outvars, inner(loop)[0][0].outvars, strict=True)
    return [i for i, (outer, turn) in enumerate(pairs) if outer.aval.shape != turn.aval.shape]


def copied(
    loop: Any, nodes: list[Node], given: Sequence[Value], outs: Sequence[Value | None], owner: dict[Value, Value | None]
) -> tuple[list[Value], list[Value]]:
    """Values that one iteration of a ``scan`` copies: (slices of its inputs, results into its stacked outputs).

    An elementwise kernel reads a slice where it lies, and writes its result into the stack.  Products, loops and
    conditionals take and give whole buffers: a slice that one of them reads is first copied out, and what one of them
    makes or reads is afterwards copied in, as is what the turn was given.  So what an inner loop has stacked up is
    copied into the outer one's stack, and out of it for the backward pass (as the HLO of XLA's CPU and GPU compilers
    has it; ``xla_gpu_enable_dynamic_slice_fusion``, which would spare products the copy, is off by default).
    """
    pairs = zip(loop.invars, given, strict=True)
    over = {v for outer, v in pairs if outer.aval.shape != v.aval.shape}
    whole = {owner.get(v, v) for node in nodes if opaque_node(node) for v in node.inputs}
    source = {v: node for node in nodes for v in node.outputs}
    slices = [v for v in given if v in over and v in whole]
    results, seen = [], set()
    for position in stacked_outputs(loop):
        v = outs[position]
        if v is None:
            continue
        base = owner.get(v, v)
        base = v if base is None else base
        made = source.get(base)
        if made is None or opaque_node(made) or base in whole or base in seen:
            results.append(v)
        seen.add(base)
    return slices, results


def shares(nodes: list[Node]) -> dict[Value, float]:
    """Fraction of each value per device, where a ``shard_map`` determines it; elementwise neighbours are
    sharded alike.
    """
    share: dict[Value, float] = {}
    for node in nodes:
        if node.name == "shard_map":
            body = inner(node.equation)[0][0]
            outer = list(node.equation.invars)
            values = iter(node.inputs)
            for v, inside in zip(outer, body.invars, strict=True):
                if not hasattr(v, "val"):
                    value = next(values)
                    share.setdefault(value, bytes_of(inside) / max(bytes_of(value), 1.0))
            for value, inside in zip(node.outputs, body.outvars, strict=True):
                share.setdefault(value, bytes_of(inside) / max(bytes_of(value), 1.0))
    for _ in range(2):
        for node in nodes:
            same = (
                [v for v in (*node.inputs, *node.outputs) if v.aval.shape == node.outputs[0].aval.shape]
                if node.outputs
                else []
            )
            known = [share[v] for v in same if v in share]
            if known and node.name not in BUFFERS and not inner(node.equation):
                for v in same:
                    share.setdefault(v, min(known))
    return share


def _live(jaxpr: Any, loop: Any = None) -> float:
    """Peak bytes of a program's temporaries; its inputs and results are accounted by the caller, but for the copies
    that a turn of ``loop`` makes."""
    given = [Value(v.aval) for v in jaxpr.invars]
    nodes, outs = inlined(jaxpr, given)
    return _peak(nodes, given, outs, shares(nodes), loop)


def _peak(
    nodes: list[Node], given: list[Value], outs: Sequence[Value | None], share: dict[Value, float], loop: Any = None
) -> float:
    owner = owners(nodes, outs)
    outside = set(given)
    kept = {owner.get(v, v) for v in outs if v is not None}
    slices: set[Value] = set()
    if loop is not None:
        inward, outward = copied(loop, nodes, given, outs, owner)
        slices = set(inward)
        kept -= {owner.get(v, v) for v in outward}
    last: dict[Value, int] = {}
    roots: dict[Value, set[Value]] = {}  # what a value that fuses away is computed from
    for position, node in enumerate(nodes):
        mine: set[Value] = set()
        for v in node.inputs:
            base = owner.get(v, v)
            mine |= roots.get(v, set()) if base is None else {base}
        for base in mine:
            last[base] = position
        for v in node.outputs:
            if owner[v] is None:
                roots[v] = mine
    sizes: dict[Value, float] = {}
    alive = peak = 0.0
    for position, node in enumerate(nodes):
        opaque = opaque_node(node)
        if opaque and slices:  # copied out of what the loop runs over
            read = {owner.get(v, v) for v in node.inputs}
            for v in [v for v in slices if v in read and v not in sizes]:
                sizes[v] = bytes_of(v)
                alive += sizes[v]
        if not opaque:  # elementwise work writes into an operand that dies here; products and loops hold both
            for v in [v for v in sizes if last[v] <= position]:
                alive -= sizes.pop(v)
        for v in node.outputs:
            if owner[v] is v and v not in kept and v not in outside:
                sizes[v] = bytes_of(v) * share.get(v, 1.0)
                alive += sizes[v]
                last.setdefault(v, position)
        peak = max(peak, alive + _inside(node))
        if opaque:
            for v in [v for v in sizes if last[v] <= position]:
                alive -= sizes.pop(v)
    return peak


def _inside(node: Node) -> float:
    """Bytes that a node's own program needs beside its operands and results.

    A loop of more than one turn holds its carry twice, where the body still reads the old while it writes the new.
    """
    if not is_kept_loop(node.equation):
        return max((_live(body) for body, _ in inner(node.equation)), default=0.0)
    return _twice(node.equation) + _live(inner(node.equation)[0][0], node.equation)


def _twice(loop: Any) -> float:
    """Bytes of a ``scan``'s carry that one turn does not update in place: an elementwise result that nothing follows
    which reads the old value does (a sum of gradients)."""
    body, stacks = inner(loop)[0][0], set(stacked_outputs(loop))
    given = [Value(v.aval) for v in body.invars]
    nodes, outs = inlined(body, given)
    owner = owners(nodes, outs)
    made = {v: position for position, node in enumerate(nodes) for v in node.outputs}
    last: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        last |= {owner.get(v, v) or v: position for v in node.inputs}
    carries = [v for i, v in enumerate(outs) if i not in stacks]
    # A scan's operands: what every turn reads, then the carry, then what it runs over, which has an axis more.
    same = sum(outer.aval.shape == v.aval.shape for outer, v in zip(loop.invars, given, strict=True))
    extra = 0.0
    for old, new in zip(given[same - len(carries) : same], carries, strict=True):
        if new is None or new is old:
            continue
        position = made.get(owner.get(new, new) or new, -1)
        updated = position >= 0 and not opaque_node(nodes[position]) and last.get(old, -1) <= position
        extra += 0.0 if updated and old in _sources(nodes, position, owner) else bytes_of(new)
    return extra


def _sources(nodes: list[Node], position: int, owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that a node's kernel reads, through what fuses into it."""
    found: set[Value] = set()
    wanted = set(nodes[position].inputs)
    for node in reversed(nodes[:position]):
        if any(v in wanted and owner.get(v, v) is None for v in node.outputs):
            wanted |= set(node.inputs)
    for v in wanted:
        base = owner.get(v, v)
        if base is not None:
            found.add(base)
    return found

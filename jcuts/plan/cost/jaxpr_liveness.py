"""Buffer liveness of a jaxpr as XLA would fuse it: which values are buffers, and how many bytes are live at once.

Where `plan.cost.jaxpr` counts equation by equation, calls are inlined here and element-wise chains have no buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jcuts.plan.cost.expanded_jaxpr import (
    Node,
    Value,
    body_of,
    expanded,
    inlined,
    is_kept_loop,
    scalars_last,
)
from jcuts.plan.cost.jaxpr import bytes_of, inner, trace
from jcuts.plan.cost.primitive_kinds import BUFFERS, EXPENSIVE, REDUCTIONS, VIEWS
from jcuts.trace import jaxapi


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


def footprint(
    function: Callable, *arguments: Any, donated: Sequence[int] = (), backend: Literal["gpu", "cpu"] = "gpu"
) -> Footprint:
    """Memory that a call needs per device, from liveness over its jaxpr.

    Values that fuse are never buffers: an elementwise result, a broadcast, a reshape.  A loop's carry is one buffer.
    Inside ``shard_map`` shapes are per device; outside, a value is divided as the ``shard_map`` that it enters or
    leaves says, and elementwise results as their operands.

    Args: donated: positions of arguments whose buffers results may take; backend: whose compiler is asked (XLA's CPU
        compiler writes transposed operands of products once more, and schedules a loss last).
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
    nodes, outs = expanded(nodes, outs)
    return Footprint(sum(sizes), total, min(free, total), _peak(nodes, given, outs, share, backend))


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
                # Cheap results are computed again in each consumer; expensive ones are kept when there are several.
                again = len(mine) <= 1 or node.name not in EXPENSIVE
                owner[v] = None if again and not any(opaque_node(user) for user in mine) else v
    return owner


def opaque_node(node: Node) -> bool:
    """Whether a node needs its operands as buffers (a reduction or a gather fuses with the producer of its operand)."""
    return node.name in BUFFERS - REDUCTIONS - {"gather"} or bool(inner(node.equation))


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
    carries = jaxapi.scan_carries(loop)
    over = set(given[jaxapi.scan_constants(loop) + carries :])
    whole = {owner.get(v, v) for node in nodes if opaque_node(node) for v in node.inputs}
    source = {v: node for node in nodes for v in node.outputs}
    slices = [v for v in given if v in over and v in whole]
    results, seen = [], set()
    for v in outs[carries:]:
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
            for value, inside in zip(node.operands(), body.invars, strict=True):
                if value is not None:
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


def _live(node: Node, jaxpr: Any, backend: str) -> float:
    """Peak bytes of the temporaries of a node's program; its inputs and results are accounted by the caller, but for
    the copies that a turn of a loop makes, and for the results of a conditional."""
    nodes, outs, given = body_of(node, jaxpr)
    loop = node.equation if is_kept_loop(node.equation) else None
    return _peak(nodes, given, outs, {}, backend, loop, is_conditional(node))


def _peak(
    nodes: list[Node],
    given: list[Value],
    outs: Sequence[Value | None],
    share: dict[Value, float],
    backend: str,
    loop: Any = None,
    results: bool = False,
) -> float:
    nodes = scalars_last(nodes, outs) if backend == "cpu" else nodes
    owner = owners(nodes, outs)
    outside = set(given)
    kept = {owner.get(v, v) for v in outs if v is not None}
    slices: set[Value] = set()
    if loop is not None:
        inward, outward = copied(loop, nodes, given, outs, owner)
        slices = set(inward)
        kept -= {owner.get(v, v) for v in outward}
    last = last_uses(nodes, owner)
    if results:  # made here, and the caller's from then on
        last |= dict.fromkeys((v for v in kept if v is not None), len(nodes))
        kept = set()
    flat = flattened(nodes, owner)
    fused = {v for node in nodes if not opaque_node(node) for v in node.outputs if owner[v] is v}
    twice = two_layouts(nodes, owner) & fused if backend == "cpu" else set()
    sizes: dict[Value, float] = {}
    alive = peak = 0.0
    for position, node in enumerate(nodes):
        read = {owner.get(v, v) for v in node.inputs}
        if opaque_node(node):  # copied out of what the loop runs over
            for v in [v for v in slices if v in read and v not in sizes]:
                sizes[v] = bytes_of(v)
                alive += sizes[v]
        dying = [v for v in sizes if last[v] <= position]
        made = [v for v in node.outputs if owner[v] is v and v not in kept and v not in outside]
        before, reused = alive, 0.0
        for v in made:
            sizes[v] = bytes_of(v) * share.get(v, 1.0) * (2 if v in twice else 1)
            alive += sizes[v]
            last.setdefault(v, position)
            if not opaque_node(node) and v not in flat and any(is_same_array(v, old) for old in dying):
                reused += sizes[v]
        inside = transposed_copies(node, owner, fused) if backend == "cpu" else 0.0
        inside += before - alive if is_conditional(node) else 0.0
        peak = max(peak, alive - reused, alive + inside + _inside(node, backend))
        for v in [v for v in sizes if last[v] <= position]:
            alive -= sizes.pop(v)
    return peak


def last_uses(nodes: list[Node], owner: dict[Value, Value | None]) -> dict[Value, int]:
    """The position of the last node that reads each buffer, itself or through what fuses into it."""
    last: dict[Value, int] = {}
    roots: dict[Value, set[Value]] = {}  # what a value that fuses away is computed from
    for position, node in enumerate(nodes):
        mine: set[Value] = set()
        for v in node.inputs:
            base = owner.get(v, v)
            mine |= roots.get(v, set()) if base is None else {base}
        last |= dict.fromkeys(mine, position)
        roots |= {v: mine for v in node.outputs if owner[v] is None}
    return last


def is_conditional(node: Node) -> bool:
    """Whether a node runs one of several programs, which make its results."""
    return node.name == "cond"


def is_same_array(new: Value, old: Value) -> bool:
    """Whether a fused kernel may write ``new`` where ``old`` lay: XLA shares buffers of one shape and type alone."""
    return new.aval.shape == old.aval.shape and new.aval.dtype == old.aval.dtype


def flattened(nodes: list[Node], owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that a product reads as a matrix of another shape.

    A product's operand with several free or several contracted dimensions is reshaped to two of them; the fused kernel
    that makes it ends in that reshape, so that it cannot write into an operand of its own.
    """
    found: set[Value] = set()
    for node in nodes:
        if node.name != "dot_general":
            continue
        contracted, batch = node.equation.params["dimension_numbers"]
        for v, over, along in zip(node.inputs, contracted, batch, strict=False):
            base = owner.get(v, v)
            if base is not None and max(len(over), v.aval.ndim - len(over) - len(along)) > 1:
                found.add(base)
    return found


def _inside(node: Node, backend: str) -> float:
    """Bytes that a node's own program needs beside its operands and results.

    A loop of more than one turn holds its carry twice, where the body still reads the old while it writes the new.
    """
    inside = max((_live(node, body, backend) for body, _ in inner(node.equation)), default=0.0)
    return inside + (_twice(node) if is_kept_loop(node.equation) else 0.0)


def is_transposed(v: Any, contracted: Sequence[int]) -> bool:
    """Whether a product contracts other dimensions of an operand than its last."""
    return bool(contracted) and min(contracted) < v.aval.ndim - len(contracted)


def transposed_copies(node: Node, owner: dict[Value, Value | None], fused: set[Value]) -> float:
    """Bytes of a product's operands that XLA's CPU compiler copies first: its kernels contract the last dimensions.

    A fused kernel writes its result transposed instead.
    """
    if node.name != "dot_general":
        return 0.0
    pairs = zip(node.inputs, node.equation.params["dimension_numbers"][0], strict=False)
    return sum(bytes_of(v) for v, over in pairs if is_transposed(v, over) and owner.get(v, v) not in fused)


def two_layouts(nodes: list[Node], owner: dict[Value, Value | None]) -> set[Value]:
    """Buffers that one product reads as they are and another transposed: if fused kernels make them, two write them."""
    found: dict[bool, set[Value]] = {False: set(), True: set()}
    for node in nodes:
        if node.name == "dot_general":
            for v, over in zip(node.inputs, node.equation.params["dimension_numbers"][0], strict=False):
                base = owner.get(v, v)
                if base is not None:
                    found[is_transposed(v, over)].add(base)
    return found[False] & found[True]


def _twice(node: Node) -> float:
    """Bytes of a ``scan``'s carry that one turn does not update in place: an elementwise result that nothing follows
    which reads the old value does (a sum of gradients)."""
    loop = node.equation
    first, count = jaxapi.scan_constants(loop), jaxapi.scan_carries(loop)
    nodes, outs, given = body_of(node, inner(loop)[0][0])
    owner = owners(nodes, outs)
    made = {v: position for position, node in enumerate(nodes) for v in node.outputs}
    last: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        last |= {owner.get(v, v) or v: position for v in node.inputs}
    extra = 0.0
    for old, new in zip(given[first : first + count], outs[:count], strict=True):
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

"""Stacks that loops read and write slice by slice: copies of slices, initial zeros, transposed layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.plan.cost.expanded_jaxpr import Node, Value, body_of, is_conditional, is_kept_loop
from jcuts.plan.cost.jaxpr import inner
from jcuts.plan.cost.primitive_kinds import VIEWS
from jcuts.plan.cost.program_memory.buffer_ownership import opaque_node
from jcuts.trace import jaxapi


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


def stacks_of_zeros(
    nodes: list[Node], owner: dict[Value, Value | None], kept: set[Value | None]
) -> dict[int, list[tuple[Value, str]]]:
    """Stacks that loops write their results into, by the position at which they are filled with zeros.

    XLA's GPU scheduler fills them before the conditional that the loop's carry waits for.  It has one constant for all
    zeros of a shape and type in a computation: if anything reads the zeros after the loop (a ``where`` on gradients),
    they stay, and the stacks are copies.  Changes ``owner``: such zeros become buffers.
    """
    zeros: dict[tuple[Any, Any], list[Value]] = {}
    read: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        read |= dict.fromkeys(node.inputs, position)
        if node.name == "broadcast_in_dim" and not node.inputs and getattr(node.equation.invars[0], "val", 1) == 0:
            zeros.setdefault((node.outputs[0].aval.shape, node.outputs[0].aval.dtype), []).append(node.outputs[0])
    made: dict[int, list[tuple[Value, str]]] = {}
    taken: set[Value] = set()
    conditional = None
    for position, node in enumerate(nodes):
        conditional = position if is_conditional(node) else conditional
        if not is_kept_loop(node.equation):
            continue
        here = made.setdefault(position if conditional is None else conditional, [])
        for v in node.outputs[jaxapi.scan_carries(node.equation) :]:
            same = zeros.get((v.aval.shape, v.aval.dtype), [])
            if any(read.get(zero, -1) > position for zero in same) and same[0] not in taken:
                taken.add(same[0])
                owner |= dict.fromkeys(same, same[0])
                here.append((same[0], "broadcast_in_dim"))
            if owner[v] is v and v not in kept:
                here.append((v, "scan"))
    return made


def transposed_stacks(loop: Node) -> set[Value]:
    """A loop's stacked results of which a turn writes a transposed value.

    XLA keeps the layout of the value, and copies the stack into the layout of the slices that the next loop reads.
    """
    count = jaxapi.scan_carries(loop.equation)
    nodes, outs, _ = body_of(loop, inner(loop.equation)[0][0])
    return {v for v, own in zip(loop.outputs[count:], outs[count:], strict=True) if _is_transpose(own, nodes)}


def _is_transpose(v: Value | None, nodes: list[Node]) -> bool:
    """Whether a value is a transposed operand, also out of a conditional."""
    maker = next((node for node in nodes if v in node.outputs), None)
    if maker is None or v is None:
        return False
    if is_conditional(maker):
        inside, outs, _ = body_of(maker, inner(maker.equation)[0][0])
        return _is_transpose(outs[maker.outputs.index(v)], inside)
    if maker.name in VIEWS - {"transpose"}:
        return bool(maker.inputs) and _is_transpose(maker.inputs[0], nodes)
    return maker.name == "transpose"

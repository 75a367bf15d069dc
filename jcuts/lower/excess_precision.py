"""Excess precision: removes float32 -> bfloat16 -> float32 round trips behind a sum; an epilogue rounds once, when it
stores.

    half(float(half(sum) + b) * s + t)     is computed as     half((sum + b) * s + t),  the last two as one operation

XLA's fusions do the same (``xla_allow_excess_precision``, its default); what `jax.lax.reduce_precision` rounds stays
rounded, there and here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.layer_fusion import TEMPLATE as LAYER_FUSION
from jcuts.lower.patterns.inverted_residual import TEMPLATE as BLOCK

HALF = "bfloat16"
WIDE = "float32"


def drop_bf16_round_trips(program: Program) -> Program:
    """The program without bfloat16 round trips in its exit graphs; the same object where there are none.

    Of several phases those of a block or of a chain of layers: others hand on what is not stored.
    """
    if len(program.phases) != 1 and program.template not in (BLOCK, LAYER_FUSION):
        return program
    phases = tuple(_eased(p) if p.reds and _has_round_trip(p.exit) else p for p in program.phases)
    changed = any(a is not b for a, b in zip(phases, program.phases, strict=True))
    return replace(program, phases=phases) if changed else program


def _eased(phase: Phase) -> Phase:
    nodes = phase.exit.nodes
    uses = Counter(a for node in nodes for a in node.args) + Counter(store.value for store in phase.stores)
    made, numbers = Graph(), {}
    for number, node in enumerate(nodes):
        args = tuple(numbers[a] for a in node.args)
        if _is_exact_upcast(node, nodes):
            node = replace(node, op="widen", attrs=())
        product = next((a for a in node.args if nodes[a].op == "mul" and uses[a] == 1), None)
        if node.op == "add" and node.dtype == WIDE and product is not None:
            other = node.args[1] if node.args[0] == product else node.args[0]
            node = replace(node, op="fma")
            args = (*(numbers[a] for a in nodes[product].args), numbers[other])
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(replace(g, index=g.index.renumber(numbers)) for g in node.guards)
        numbers[number] = made.add(replace(node, args=args, index=index, guards=guards))
    stores = tuple(replace(s, value=numbers[s.value], address=s.address.renumber(numbers)) for s in phase.stores)
    kept = Graph()
    needed = made.copy_into(kept, [s.value for s in stores], {}, phase.ranges())
    stores = tuple(replace(s, value=value) for s, value in zip(stores, needed, strict=True))
    return replace(phase, exit=kept, stores=stores)


def _has_round_trip(graph: Graph) -> bool:
    """Whether some value that was computed as bfloat16 is converted to float32."""
    return any(_is_exact_upcast(node, graph.nodes) and graph.nodes[node.args[0]].op != "load" for node in graph.nodes)


def _is_exact_upcast(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether it is a conversion to float32 whose preceding rounding may be dropped."""
    return node.op == "convert" and node.dtype == WIDE and nodes[node.args[0]].dtype == HALF and not node.declared

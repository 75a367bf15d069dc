"""Layer fusion: chains of contractions, convolutions and windows in one kernel program, a phase per layer.

    conv -> conv, 3x3 -> 1x1, 1x1 -> depthwise -> 1x1, GEMM -> GEMM, conv -> pool, pool -> conv

The program states the meaning: every layer is the phase that `lower.region` makes of it with its prologue and epilogue,
and passes its one result on through a local buffer as large as the whole tensor.  A schedule cuts the last layer into
tiles and keeps of each intermediate result what one tile needs, its halo included (`lower.patterns.layer_windows`).

Source: thesis 3.2.4 (fusion of two complex operations at shared-memory level); Alwani et al., Fused-layer CNN
accelerators (2016).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Buffer, Phase, Program
from jcuts.lower.builder import descendants, make_buffers, op_rule
from jcuts.lower.patterns.layer_windows import match_layers, movable_axes
from jcuts.lower.region import MAX_RECOMPUTED_OPS, lower_region
from jcuts.lower.tensor_graph import TensorGraph

TEMPLATE = "layer_fusion"
LAYERS = frozenset({"contraction", "convolution", "window"})
"""Families of operations that are layers."""
MOST_LAYERS = 3
Members = frozenset[int]


def lower_layers(
    graph: TensorGraph, subset: Members, name: str = "kernel", cheap: float = MAX_RECOMPUTED_OPS
) -> Program | Refusal:
    """The unscheduled program of a chain of layers, or a refusal with the reason why it is none.

    Args: cheap: of `lower.region.lower_region`.
    """
    stages = layer_stages(graph, subset)
    if isinstance(stages, Refusal):
        return stages
    parts = []
    for members in stages:
        program = lower_region(graph, members, name, cheap)
        if isinstance(program, Refusal):
            return program
        parts.append((members, program))
    joined = join_stages(graph, parts, TEMPLATE, name)
    if isinstance(joined, Refusal):
        return joined
    links = match_layers(joined)
    if isinstance(links, Refusal):
        return links
    if not movable_axes(joined, links):
        return Refusal("layers", "every tile of the last layer needs all of a result before it")
    asked = [p for _, program in parts if (p := dict(program.params).get("precision"))]
    return replace(joined, params=tuple(("precision", p) for p in asked[:1]))


def lower_region_or_layers(graph: TensorGraph, subset: Members, cheap: float = MAX_RECOMPUTED_OPS) -> Program | Refusal:
    """The program of a region; of a chain of layers where `lower.region` refuses it, with that refusal otherwise."""
    found = lower_region(graph, subset, cheap=cheap)
    if isinstance(found, Program):
        return found
    layers = lower_layers(graph, subset, cheap=cheap)
    return found if isinstance(layers, Refusal) else layers


def layer_stages(graph: TensorGraph, subset: Members) -> list[Members] | Refusal:
    """The equations of every layer: its root, what computes operands for it alone, and what follows it."""
    if any(graph.nodes[n].op is None for n in subset):
        return Refusal("subset", "an equation that no kernel has")
    roots = [n for n in sorted(subset) if op_rule(graph.nodes[n]).is_root]
    if not 2 <= len(roots) <= MOST_LAYERS:
        return Refusal("subset", f"{len(roots)} layers, not 2 to {MOST_LAYERS}")
    rules = [op_rule(graph.nodes[n]) for n in roots]
    if any(op.family not in LAYERS for op in rules) or not any(op.is_complex for op in rules):
        return Refusal("subset", "no chain of contractions, convolutions and windows")
    after = [descendants(graph, subset, n) for n in roots]
    if any(late not in found for found, late in zip(after[:-1], roots[1:], strict=True)):
        return Refusal("subset", "layers that do not follow each other")
    layer = {n: k for k, n in enumerate(roots)}
    for number in sorted(subset - set(roots), reverse=True):
        late = [k for k, found in enumerate(after) if number in found]
        users = {u for t in graph.nodes[number].outputs for u in graph.tensors[t].users if u in layer}
        if not late and not users:
            return Refusal("subset", "an operation beside the layers")
        layer[number] = max(late) if late else min(layer[u] for u in users)
    return [frozenset(n for n, k in layer.items() if k == own) for own in range(len(roots))]


def join_stages(
    graph: TensorGraph, parts: Sequence[tuple[Members, Program]], template: str, name: str = "kernel"
) -> Program | Refusal:
    """One program of several regions, each of which produces the one tensor that only the next one reads."""
    union = frozenset(m for members, _ in parts for m in members)
    results = graph.subset_outputs(union)
    ins, outs, buffers = make_buffers(graph, union, results)
    names = {**ins, **outs}
    for number, ((members, _), (after, _)) in enumerate(itertools.pairwise(parts)):
        made = graph.subset_outputs(members)
        if len(made) != 1 or made[0] in outs or not set(graph.tensors[made[0]].users) <= members | after:
            return Refusal("subset", "a value between the layers is needed elsewhere")
        kind = graph.tensors[made[0]].type
        names[made[0]] = f"mid{number}"
        buffers.append(Buffer(f"mid{number}", kind.dtype, kind.shape, "local"))
    phases = []
    for members, program in parts:
        if len(program.phases) != 1:
            return Refusal("subset", "a layer of several phases")
        mine = {f"in{k}": names[t] for k, t in enumerate(graph.subset_inputs(members))}
        mine.update((f"out{k}", names[t]) for k, t in enumerate(graph.subset_outputs(members)))
        phases.append(_rename_buffers(program.phases[0], mine))
    return Program(name, tuple(buffers), (), (), tuple(phases), 1, template)


def _rename_buffers(phase: Phase, names: Mapping[str, str]) -> Phase:
    """The phase with other buffers."""

    def graph(old: Graph) -> Graph:
        return Graph([replace(node, buffer=names[node.buffer]) if node.buffer else node for node in old.nodes])

    stores = tuple(replace(s, buffer=names[s.buffer]) for s in phase.stores)
    return replace(phase, body=graph(phase.body), exit=graph(phase.exit), stores=stores)

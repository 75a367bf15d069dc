"""Element-wise regions that stand between two kernels of a chain, joined with those that only they read.

    product -> { slice } -> { rotary embedding } -> attention     becomes     product -> { slice, rotary } -> attention

Alone such a region gains nothing on XLA's code, which is as short; left to XLA it ends the chain in front of it (launch
fusion, `xla.chains`).  The greedy partition keeps slices apart, which XLA reads for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import NodeSet
from jcuts.fusion.move_epilogue import Cover, only_reader
from jcuts.kernel_ir.program import Program
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import TensorGraph
from jcuts.ops.gather import UPDATE


def join_elementwise(
    graph: TensorGraph, cover: Sequence[tuple[NodeSet, Program]], has_form: Callable[[Program], bool]
) -> Cover:
    """The partition with every element-wise region in the one that alone reads it, where that is element-wise, too.

    Args: has_form: whether a program can be a kernel here.
    """
    found, count = dict(cover), -1
    while len(found) != count:  # what was read by two regions may be read by one now
        count = len(found)
        for members in sorted(found, key=min, reverse=True):
            reader = only_reader(graph, members, found) if is_elementwise(graph, members) else None
            if reader is None or reader == members or not is_elementwise(graph, reader):
                continue
            program = lower_region(graph, members | reader)
            if not isinstance(program, Refusal) and has_form(program):
                del found[members], found[reader]
                found[members | reader] = program
    return sorted(found.items(), key=lambda item: max(item[0]))


def chain_gaps(graph: TensorGraph, regions: Iterable[NodeSet]) -> set[NodeSet]:
    """Element-wise regions that read what another region makes, and are read by one or by an update in place."""
    every = list(regions)
    plain = {members for members in every if is_elementwise(graph, members)}
    kernels = frozenset().union(*(members for members in every if members not in plain))
    found: set[NodeSet] = set()
    for members in plain:
        read = {graph.tensors[t].producer for t in graph.subset_inputs(members)}
        users = {u for t in graph.subset_outputs(members) for u in graph.tensors[t].users} - members
        updates = {u for u in users if graph.nodes[u].prim == UPDATE}
        if read & kernels and users & (kernels | updates):
            found.add(members)
    return found


def is_elementwise(graph: TensorGraph, members: NodeSet) -> bool:
    """Whether no operation of a region collects several elements into one (a reduction, a window, a product)."""
    return all((op := graph.nodes[m].op) is not None and not op.is_root for m in members)

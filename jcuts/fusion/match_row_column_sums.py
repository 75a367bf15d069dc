"""Finds row reductions that can take over column reductions: of values that they make, or of an operand that they read.

    dx = layer norm's gradient(x, g);    sum over rows of g * xhat (made beside dx),    sum over rows of g

A layer norm's scale and offset have such gradients.  `fusion.greedy` joins the regions after all others, so that the
rows are a region already; nothing that is summed is then written to memory, and no operand is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jcuts.fusion.dag import NodeSet
from jcuts.lower.reduction.row_column_sums import reduces_rows_of, sums_columns_of
from jcuts.lower.tensor_graph import OpNode, TensorGraph


def row_hosts(graph: TensorGraph, regions: Mapping[int, NodeSet]) -> Iterable[tuple[int, list[int]]]:
    """Regions that only sum columns, each with the regions of row reductions that make or read what it reads.

    Args: regions: equations of each region by its number.
    Returns: numbers; hosts that make what is summed come first: they save its write as well.
    """
    rows = {number: members for number, members in regions.items() if _has(graph, members, reduces_rows_of)}
    made = {t: number for number, members in rows.items() for m in members for t in graph.nodes[m].outputs}
    for number, members in regions.items():
        roots = [node for m in members if (node := graph.nodes[m]).op is not None and node.op.is_root]
        if not roots or not all(sums_columns_of(root) for root in roots):
            continue
        size = max(graph.tensors[t].type.size for root in roots for t in root.inputs)
        large = [t for t in graph.subset_inputs(members) if graph.tensors[t].type.size == size]
        makers = [made[t] for t in large if t in made]
        users = {user for t in large for user in graph.tensors[t].users}
        readers = [host for host, others in rows.items() if users & others]
        found = [host for host in dict.fromkeys((*makers, *readers)) if host != number]
        if found:
            yield number, found


def _has(graph: TensorGraph, members: NodeSet, test: Callable[[OpNode], bool]) -> bool:
    """Whether a region has a reduction of some kind."""
    return any((op := graph.nodes[m].op) is not None and op.is_root and test(graph.nodes[m]) for m in members)

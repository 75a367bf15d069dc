"""Memo of lowered regions by their structure: isomorphic regions (repeated layers) are lowered once.

Fusion lowers a region for every merge that it tries; networks repeat their blocks, and variants of a program have most
blocks in common.  Two regions are the same here if they have equal equations (primitive, parameters, types) on tensors
that correspond, in the same order: then they lower to the same program, since its operands and results are named by
position.  `region_key` says so in numbers of the region's own; it has none for equations whose parameters are not plain
values (functions, jaxprs).
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Program
from jcuts.lower.tensor_graph import TensorGraph

MOST = 8192
"""Regions that are kept; those of a large network's planning are some ten thousand, most of them small."""


def region_key(graph: TensorGraph, subset: frozenset[int]) -> bytes | None:
    """The structure of a region; None where an equation's parameters have no key."""
    members, nodes, kinds, touches = sorted(subset), graph.nodes, graph.node_keys, graph.touched
    touched = sorted({t for n in members for t in touches[n]})
    rank = {tensor: place for place, tensor in enumerate(touched)}
    place = {number: k for k, number in enumerate(members)}
    parts: list[int] = [len(members)]
    for number in members:
        node, kind = nodes[number], kinds[number]
        if kind is None or (node.pieces is not None and node.pieces.slices <= subset):
            return None
        parts += (kind, len(node.inputs), *[rank[t] for t in touches[number]])
    types, producers = graph.tensor_keys, graph.producers
    parts += [types[t] for t in touched]
    parts += [place.get(producers[t], -1) for t in touched]
    parts += [rank[t] for t in graph.subset_outputs(subset)]
    return array("q", parts).tobytes()


class RegionMemo:
    """Programs and refusals by `region_key`, the least recently used ones leave first."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.found = most, OrderedDict[Hashable, Program | Refusal]()
        self.lock = threading.Lock()
        self.last: tuple[TensorGraph, frozenset[int], bytes | None] | None = None

    def _structure(self, graph: TensorGraph, subset: frozenset[int]) -> bytes | None:
        """`region_key`; the last one again where the same region is looked up under other options."""
        last = self.last
        if last is None or last[0] is not graph or last[1] is not subset:
            last = self.last = graph, subset, region_key(graph, subset)
        return last[2]

    def lowered(
        self, graph: TensorGraph, subset: frozenset[int], options: Hashable, lower: Callable[[], Program | Refusal]
    ) -> Program | Refusal:
        """What ``lower`` gives, or gave for an isomorphic region. Args: options: what else the result depends on."""
        structure = self._structure(graph, subset)
        if structure is None:
            return lower()
        key = (structure, options)
        with self.lock:
            known = self.found.get(key)
            if known is not None:
                self.found.move_to_end(key)
                return known
        made = lower()
        with self.lock:
            self.found[key] = made
            while len(self.found) > self.most:
                self.found.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forgets all."""
        with self.lock:
            self.found.clear()
            self.last = None

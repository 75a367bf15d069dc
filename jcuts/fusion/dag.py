"""Graph algorithms of partitioning: convex and connected node sets, acyclic quotient graphs, on bit masks.

Nodes are integers and edges are pairs; nothing is known about operations.  Sets of nodes are bit masks over topological
positions, so that graphs of thousands of nodes stay fast.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jcuts.base.errors import IRError, Refusal

NodeSet = frozenset[int]


@dataclass(frozen=True)
class Dag:
    """A directed acyclic graph of operations.

    Attributes:
        nodes: the operations.
        edges: ``(producer, consumer)`` pairs.
        inputs: per node, names of values that come from outside the graph (arguments, constants): two nodes that
            name the same one share an input even though no node produces it.

    Raises: IRError if an edge names an unknown node or the graph has a cycle.
    """

    nodes: frozenset[int]
    edges: frozenset[tuple[int, int]]
    inputs: Mapping[int, frozenset[Hashable]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for edge in self.edges:
            if edge[0] not in self.nodes or edge[1] not in self.nodes or edge[0] == edge[1]:
                raise IRError(f"edge {edge} does not join two nodes of the graph", edge=edge)
        if len(self.order) != len(self.nodes):
            left = sorted(self.nodes - set(self.order))
            raise IRError(f"the graph has a cycle among the nodes {left[:10]}", nodes=left)

    @staticmethod
    def of(
        nodes: Iterable[int],
        edges: Iterable[tuple[int, int]],
        inputs: Mapping[int, Iterable[Hashable]] | None = None,
    ) -> Dag:
        """Builds a graph from any iterables."""
        shared = {node: frozenset(names) for node, names in (inputs or {}).items()}
        return Dag(frozenset(nodes), frozenset(edges), shared)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order, the same on every run.

        Ready nodes whose producers came last go first: branches stay together, which keeps frontiers narrow.
        """
        consumers: dict[int, list[int]] = {node: [] for node in self.nodes}
        missing = dict.fromkeys(self.nodes, 0)
        for producer, consumer in sorted(self.edges):
            consumers[producer].append(consumer)
            missing[consumer] += 1
        stack = sorted((node for node in self.nodes if not missing[node]), reverse=True)
        order: list[int] = []
        while stack:
            node = stack.pop()
            order.append(node)
            for consumer in reversed(consumers[node]):
                missing[consumer] -= 1
                if not missing[consumer]:
                    stack.append(consumer)
        return tuple(order)

    @cached_property
    def position(self) -> dict[int, int]:
        """Topological position of every node; also its bit in a mask."""
        return {node: place for place, node in enumerate(self.order)}

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Per position: mask of its direct producers."""
        masks = [0] * len(self.order)
        for producer, consumer in self.edges:
            masks[self.position[consumer]] |= 1 << self.position[producer]
        return tuple(masks)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Per position: mask of its direct consumers."""
        masks = [0] * len(self.order)
        for producer, consumer in self.edges:
            masks[self.position[producer]] |= 1 << self.position[consumer]
        return tuple(masks)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per position: mask of everything it depends on."""
        masks: list[int] = []
        for direct in self.before:
            mask = direct
            for place in bits(direct):
                mask |= masks[place]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Per position: mask of everything that depends on it."""
        masks = [0] * len(self.order)
        for place in range(len(self.order) - 1, -1, -1):
            mask = self.after[place]
            for consumer in bits(mask):
                mask |= masks[consumer]
            masks[place] = mask
        return tuple(masks)

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """Per position: mask of the nodes that share an input with it (a node's result or an outside input)."""
        readers: dict[Hashable, int] = {}
        for place, direct in enumerate(self.before):
            for producer in bits(direct):
                readers[producer] = readers.get(producer, 0) | 1 << place
        for node, names in self.inputs.items():
            for name in names:
                key = ("input", name)
                readers[key] = readers.get(key, 0) | 1 << self.position[node]
        masks = [0] * len(self.order)
        for group in readers.values():
            for place in bits(group):
                masks[place] |= group & ~(1 << place)
        return tuple(masks)

    def mask(self, subset: Iterable[int]) -> int:
        """Bit mask of some nodes.  Raises: IRError for an unknown node."""
        mask = 0
        for node in subset:
            if node not in self.position:
                raise IRError(f"node {node} is not in the graph", node=node)
            mask |= 1 << self.position[node]
        return mask

    def subset(self, mask: int) -> NodeSet:
        """The nodes of a bit mask."""
        return frozenset(self.order[place] for place in bits(mask))


def bits(mask: int) -> Iterable[int]:
    """Positions of the ones, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Sequence[int], mask: int) -> int:
    """The union of ``masks[i]`` over the ones of ``mask``."""
    found = 0
    for place in bits(mask):
        found |= masks[place]
    return found


def outside_between(dag: Dag, mask: int) -> int:
    """Nodes outside a set that depend on it and on which it depends; none if and only if the set is convex."""
    return union(dag.descendants, mask) & union(dag.ancestors, mask) & ~mask


def is_convex(dag: Dag, subset: Iterable[int]) -> bool:
    """Whether no path leaves the subset and re-enters it: otherwise it could not run as one kernel."""
    return not outside_between(dag, dag.mask(subset))


def is_connected(dag: Dag, subset: Iterable[int], *, horizontal: bool = False) -> bool:
    """Whether the subset is connected by edges (with ``horizontal``: or by inputs that its nodes share)."""
    mask = dag.mask(subset)
    if not mask:
        return False
    found = mask & -mask
    while True:
        grown = found | (neighbours(dag, found, horizontal=horizontal) & mask)
        if grown == found:
            return found == mask
        found = grown


def neighbours(dag: Dag, mask: int, *, horizontal: bool = False) -> int:
    """Nodes outside a set that are adjacent to it by an edge (or, with ``horizontal``, by a shared input)."""
    found = union(dag.before, mask) | union(dag.after, mask)
    if horizontal:
        found |= union(dag.siblings, mask)
    return found & ~mask


def depend_on_each_other(dag: Dag, one: Iterable[int], other: Iterable[int]) -> bool:
    """Whether two disjoint sets need each other's results: each may be convex, yet they have no execution order."""
    a, b = dag.mask(one), dag.mask(other)
    return bool(union(dag.descendants, a) & b) and bool(union(dag.descendants, b) & a)


def check_subset(dag: Dag, subset: Iterable[int], *, horizontal: bool = False) -> Refusal | None:
    """None if the nodes may form one subset (non-empty, connected, convex), else the reason."""
    nodes = frozenset(subset)
    name = "{" + ", ".join(map(str, sorted(nodes))) + "}"
    if not nodes:
        return Refusal(name, "a subset has at least one node")
    if not is_connected(dag, nodes, horizontal=horizontal):
        joined = "edges or shared inputs" if horizontal else "edges"
        return Refusal(name, f"its nodes are not connected by {joined}")
    between = outside_between(dag, dag.mask(nodes))
    if between:
        return Refusal(
            name, f"not convex: node {dag.order[next(iter(bits(between)))]} lies on a path between its nodes"
        )
    return None


def quotient_edges(dag: Dag, cover: Sequence[NodeSet]) -> set[tuple[int, int]]:
    """Edges between the subsets of a cover, as pairs of indices into it.

    Raises: IRError if some node is in no subset or in several.
    """
    owner: dict[int, int] = {}
    for index, subset in enumerate(cover):
        for node in subset:
            if node in owner or node not in dag.nodes:
                raise IRError(f"node {node} is in two subsets of the cover, or unknown", node=node)
            owner[node] = index
    if len(owner) != len(dag.nodes):
        left = sorted(dag.nodes - set(owner))
        raise IRError(f"the cover leaves out the nodes {left[:10]}", nodes=left)
    return {(owner[a], owner[b]) for a, b in dag.edges if owner[a] != owner[b]}


def quotient_order(dag: Dag, cover: Sequence[NodeSet]) -> list[NodeSet] | None:
    """The subsets of a cover in an order in which they can run, or None if the quotient graph has a cycle."""
    edges = quotient_edges(dag, cover)
    first = [min(dag.position[node] for node in subset) for subset in cover]
    consumers: list[list[int]] = [[] for _ in cover]
    missing = [0] * len(cover)
    for a, b in edges:
        consumers[a].append(b)
        missing[b] += 1
    ready = [(first[i], i) for i in range(len(cover)) if not missing[i]]
    heapq.heapify(ready)
    order: list[NodeSet] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(cover[index])
        for consumer in consumers[index]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, (first[consumer], consumer))
    return order if len(order) == len(cover) else None


def is_acyclic_cover(dag: Dag, cover: Sequence[NodeSet]) -> bool:
    """Whether the subsets of a cover can run one after another."""
    return quotient_order(dag, cover) is not None


def quotient_cycle(dag: Dag, cover: Sequence[NodeSet]) -> list[NodeSet] | None:
    """A shortest cycle of the quotient graph (the strongest cut), or None.  The same one on every run."""
    edges = quotient_edges(dag, cover)
    consumers: list[list[int]] = [[] for _ in cover]
    for a, b in sorted(edges):
        consumers[a].append(b)
    best: list[int] | None = None
    for start in range(len(cover)):
        found = _cycle_through(start, consumers, None if best is None else len(best) - 1)
        if found is not None:
            best = found
            if len(best) == 2:
                break
    return None if best is None else [cover[i] for i in best]


def _cycle_through(start: int, consumers: list[list[int]], longest: int | None) -> list[int] | None:
    """Shortest cycle through ``start`` of at most ``longest`` nodes, by breadth-first search."""
    parent = {start: -1}
    layer, depth = [start], 1
    while layer and (longest is None or depth <= longest):
        following: list[int] = []
        for node in layer:
            for consumer in consumers[node]:
                if consumer == start:
                    path = [node]
                    while parent[path[-1]] != -1:
                        path.append(parent[path[-1]])
                    return path[::-1]
                if consumer not in parent:
                    parent[consumer] = node
                    following.append(consumer)
        layer, depth = following, depth + 1
    return None

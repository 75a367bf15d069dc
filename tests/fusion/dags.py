"""Random graphs and brute force for the region tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

from hypothesis import strategies as st

from jcuts.fusion.dag import Dag


@st.composite
def random_dags(draw: st.DrawFn, max_nodes: int = 8) -> Dag:
    """Graphs on shuffled node numbers, so that numbers say nothing about the order."""
    count = draw(st.integers(1, max_nodes))
    names = draw(st.permutations([7 * i + 3 for i in range(count)]))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    flags = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    edges = [(names[i], names[j]) for (i, j), flag in zip(pairs, flags, strict=True) if flag]
    return Dag.of(names, edges)


def sparse_dag(rng: random.Random, count: int, fan_in: int = 2, reach: int = 6) -> Dag:
    """A graph like a network: every node reads one or two of the last few."""
    edges = set()
    for node in range(1, count):
        for _ in range(rng.randint(1, fan_in)):
            edges.add((max(0, node - rng.randint(1, reach)), node))
    return Dag.of(range(count), edges)


def reaches(dag: Dag, source: int, target: int) -> bool:
    """Whether a path leads from one node to another: plain search, no masks."""
    stack, seen = [source], set()
    while stack:
        node = stack.pop()
        for a, b in dag.edges:
            if a == node and b not in seen:
                seen.add(b)
                stack.append(b)
    return target in seen


def partitions(items: list[int]) -> Iterator[list[frozenset[int]]]:
    """Every partition of a list."""
    if not items:
        yield []
        return
    head, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            for tail in partitions(left):
                yield [frozenset({head, *others}), *tail]


def runs_in_some_order(dag: Dag, cover: list[frozenset[int]]) -> bool:
    """Acyclicity of the quotient graph by repeatedly taking a subset whose producers are done."""
    left, done = list(cover), set()
    while left:
        ready = [s for s in left if all(a in done or a in s for a, b in dag.edges if b in s)]
        if not ready:
            return False
        for subset in ready:
            left.remove(subset)
            done |= subset
    return True


def brute_force(dag: Dag, costs: Mapping[frozenset[int], float]) -> float:
    """Least time over every acyclic exact cover by candidates."""
    return min(
        sum(costs[s] for s in cover)
        for cover in partitions(sorted(dag.nodes))
        if all(s in costs for s in cover) and runs_in_some_order(dag, cover)
    )

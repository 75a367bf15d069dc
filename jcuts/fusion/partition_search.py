"""Partition search by merging: Algorithm 1 of the thesis, literally, and its equivalent that grows single regions.

The time of a partition is the sum over its subsets.  So a merge X + Y improves a partition exactly if ``cost(X | Y) <
cost(X) + cost(Y)``, whatever the other subsets are: growing *subsets* finds every subset that Algorithm 1 can build,
without the exponentially many partitions.  `fusion.exact_cover` then picks the best combination.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jcuts.base.errors import ModelError, Refusal
from jcuts.fusion.dag import Dag, NodeSet, bits, is_acyclic_cover, neighbours, quotient_edges, quotient_order
from jcuts.fusion.exact_cover import exact_partition

Partition = frozenset[NodeSet]
Mergeable = Callable[[NodeSet], "bool | Refusal"]
Cost = Callable[[NodeSet], float]


@dataclass(frozen=True)
class Limits:
    """Limits that keep the search fast on large graphs.

    Attributes:
        max_size: nodes of one subset.
        max_subsets: subsets that are kept besides the singletons.
        max_evaluations: calls of ``cost`` for merged subsets.
        beam: subsets kept per size and first node, those that save most.
    """

    max_size: int = 32
    max_subsets: int = 20_000
    max_evaluations: int = 40_000
    beam: int = 12

    def __post_init__(self) -> None:
        for name in ("max_size", "max_subsets", "max_evaluations", "beam"):
            if getattr(self, name) < 1:
                raise ModelError(f"Limits.{name}={getattr(self, name)} must be at least 1", field=name)


UNLIMITED = Limits(max_size=1 << 30, max_subsets=1 << 60, max_evaluations=1 << 60, beam=1 << 60)


@dataclass(frozen=True)
class GrowthResult:
    """Result of growing candidate regions.

    Attributes:
        costs: every kept subset (all singletons among them) and its time in seconds.
        refusals: merges that ``mergeable`` declined, with its reason.
        rejected: merges that were evaluated and do not beat their parts, with their time.
        truncated: whether a limit cut the search short.
    """

    costs: dict[NodeSet, float]
    refusals: dict[NodeSet, Refusal] = field(default_factory=dict)
    rejected: dict[NodeSet, float] = field(default_factory=dict)
    truncated: bool = False


@dataclass(frozen=True)
class Search:
    """Result of a partition search: the best partition in execution order, and its time."""

    best: list[NodeSet]
    seconds: float
    partitions: tuple[Partition, ...] = ()


def algorithm_1(
    dag: Dag, mergeable: Mergeable, cost: Cost, *, horizontal: bool = False, max_partitions: int = 100_000
) -> Search:
    """Algorithm 1 of the thesis, word for word: keeps whole partitions, so only for small graphs.

    R starts with the partition of singletons.  Of every unmarked partition P in R, every two consecutive subsets X and
    Y are merged; the new partition Q joins R if it performs better than P.  In the end the best partition of R is
    chosen.  Evaluate(Q) sums the memoised time of its subsets.

    Args:
        mergeable: whether a set of nodes has a rule as one kernel.
        cost: seconds of a subset.
        horizontal: also treat subsets that share an input as consecutive (an extension of the thesis).
        max_partitions: more than so many partitions in R are an error.
    Raises: ModelError if R grows beyond ``max_partitions``.
    Source: thesis 3.1, Algorithm 1.
    """
    seconds = _memoised(cost)

    def evaluate(partition: Partition) -> float:
        return sum(seconds(subset) for subset in _sorted(dag, partition))

    first: Partition = frozenset(frozenset({node}) for node in dag.nodes)
    times: dict[Partition, float] = {first: evaluate(first)}
    unmarked = [first]
    while unmarked:
        parent = unmarked.pop()
        for x, y in _consecutive(dag, parent, horizontal):
            merged = x | y
            child = (parent - {x, y}) | {merged}
            if child in times or not _allowed(mergeable(merged)) or not is_acyclic_cover(dag, _sorted(dag, child)):
                continue
            # the other subsets are the same in both: comparing the changed ones avoids their rounding
            if seconds(merged) < seconds(x) + seconds(y):
                times[child] = evaluate(child)
                unmarked.append(child)
                if len(times) > max_partitions:
                    raise ModelError(
                        f"Algorithm 1 found more than {max_partitions} partitions: use search() on graphs this large",
                        max_partitions=max_partitions,
                    )
    best = min(times, key=lambda p: (times[p], len(p), [sorted(s) for s in _sorted(dag, p)]))
    order = quotient_order(dag, _sorted(dag, best))
    return Search(order or [], times[best], tuple(times))


def search(
    dag: Dag, mergeable: Mergeable, cost: Cost, *, limits: Limits | None = None, horizontal: bool = False
) -> Search:
    """The subset form of Algorithm 1: grow candidate regions, then solve the set partitioning of least time.

    With ``limits=UNLIMITED`` its best partition takes as long as that of ``algorithm_1``.
    """
    growth = grow_subsets(dag, mergeable, cost, limits=limits, horizontal=horizontal)
    best = exact_partition(dag, growth.costs)
    return Search(best, sum(growth.costs[subset] for subset in best))


def grow_subsets(
    dag: Dag,
    mergeable: Mergeable,
    cost: Cost,
    *,
    limits: Limits | None = None,
    horizontal: bool = False,
) -> GrowthResult:
    """Every region that Algorithm 1 could build by merges that each beat their parts.

    Two kept subsets are merged if an edge joins them (or, with ``horizontal``, a shared input), neither depends on a
    result of the other that depends on it, their union is convex and ``mergeable``, and

        cost(X | Y) < cost(X) + cost(Y).

    Works by size, so that all parts are known before their union.  ``cost`` and ``mergeable`` are called once per set.

    Args: limits: keeps large graphs fast; per size and first node only the ``beam`` subsets that save most are kept.
    Returns: a `GrowthResult`; every singleton is in it, whether it is mergeable or not.
    """
    limit = limits or Limits()
    state = _Growing(dag, mergeable, _memoised(cost), limit, horizontal)
    for place in range(len(dag.order)):
        state.keep(1 << place, state.seconds(frozenset({dag.order[place]})))
    for size in range(2, min(limit.max_size, len(dag.order)) + 1):
        level = state.level(size)
        # a merge needs two parts no larger than all but one of its nodes: two empty halves of sizes end the growth
        if not level and 2 * state.largest < size + 1:
            break
        for mask, seconds in level:
            state.keep(mask, seconds)
        if state.exhausted():
            state.truncated = True
            break
    else:
        state.truncated = state.truncated or len(dag.order) > limit.max_size
    costs = {dag.subset(mask): seconds for mask, seconds in state.kept.items()}
    return GrowthResult(costs, state.refusals, state.rejected, state.truncated)


class _Growing:
    """The table of kept subsets, as masks."""

    def __init__(self, dag: Dag, mergeable: Mergeable, seconds: Cost, limit: Limits, horizontal: bool) -> None:
        self.dag, self.mergeable, self.seconds, self.limit, self.horizontal = dag, mergeable, seconds, limit, horizontal
        self.kept: dict[int, float] = {}
        self.up: dict[int, int] = {}
        self.down: dict[int, int] = {}
        self.near: dict[int, int] = {}
        self.by_size: dict[int, list[int]] = {}
        # kept subsets by size and by each of their nodes: finding partners must not scan everything
        self.by_node: dict[tuple[int, int], list[int]] = {}
        self.refusals: dict[NodeSet, Refusal] = {}
        self.rejected: dict[NodeSet, float] = {}
        self.illegal: set[int] = set()
        self.evaluations = 0
        self.largest = 1
        self.truncated = False

    def keep(self, mask: int, seconds: float) -> None:
        size = mask.bit_count()
        self.kept[mask] = seconds
        self.largest = max(self.largest, size)
        self.by_size.setdefault(size, []).append(mask)
        self.near[mask] = neighbours(self.dag, mask, horizontal=self.horizontal)
        if size == 1:
            place = mask.bit_length() - 1
            self.up[mask], self.down[mask] = self.dag.ancestors[place], self.dag.descendants[place]
        for place in bits(mask):
            self.by_node.setdefault((size, place), []).append(mask)

    def exhausted(self) -> bool:
        singletons = len(self.dag.order)
        return self.evaluations >= self.limit.max_evaluations or len(self.kept) - singletons >= self.limit.max_subsets

    def level(self, size: int) -> list[tuple[int, float]]:
        """All unions of ``size`` nodes that beat their parts, thinned to the beam."""
        found: dict[int, float] = {}
        for larger in range(size - 1, (size - 1) // 2, -1):
            for x in self.by_size.get(larger, ()):
                for y in self.partners(x, size - larger):
                    mask = x | y
                    if mask in found or mask in self.illegal:
                        continue
                    seconds = self.try_merge(x, y, mask)
                    if seconds is not None:
                        found[mask] = seconds
                    if self.evaluations >= self.limit.max_evaluations:
                        self.truncated = True
                        return self.thin(found)
        return self.thin(found)

    def partners(self, x: int, size: int) -> list[int]:
        """Kept subsets of ``size`` nodes next to ``x``, without overlap, each once."""
        seen: dict[int, None] = {}
        for place in bits(self.near[x]):
            for y in self.by_node.get((size, place), ()):
                if not x & y:
                    seen[y] = None
        return list(seen)

    def try_merge(self, x: int, y: int, mask: int) -> float | None:
        up, down = self.up[x] | self.up[y], self.down[x] | self.down[y]
        if up & down & ~mask:
            self.illegal.add(mask)
            return None
        # both parts wait for each other: no partition holds the two, so Algorithm 1 never merges them
        if self.down[x] & y and self.down[y] & x:
            return None
        subset = self.dag.subset(mask)
        seconds = self.rejected.get(subset)
        if seconds is None:
            verdict = self.mergeable(subset)
            if not _allowed(verdict):
                self.illegal.add(mask)
                if isinstance(verdict, Refusal):
                    self.refusals[subset] = verdict
                return None
            self.evaluations += 1
            seconds = self.seconds(subset)
        if seconds < self.kept[x] + self.kept[y]:
            self.rejected.pop(subset, None)
            self.up[mask], self.down[mask] = up, down
            return seconds
        self.rejected[subset] = seconds
        return None

    def thin(self, found: dict[int, float]) -> list[tuple[int, float]]:
        groups: dict[int, list[tuple[float, int]]] = {}
        for mask, seconds in found.items():
            saving = sum(self.kept[1 << place] for place in bits(mask)) - seconds
            groups.setdefault(mask & -mask, []).append((-saving, mask))
        kept: list[tuple[int, float]] = []
        room = self.limit.max_subsets - (len(self.kept) - len(self.dag.order))
        for first in sorted(groups):
            group = sorted(groups[first])
            self.truncated = self.truncated or len(group) > self.limit.beam
            kept += [(mask, found[mask]) for _, mask in group[: self.limit.beam]]
        self.truncated = self.truncated or len(kept) > room
        return kept[:room]


def _memoised(cost: Cost) -> Cost:
    known: dict[NodeSet, float] = {}

    def seconds(subset: NodeSet) -> float:
        if subset not in known:
            value = float(cost(subset))
            if not value >= 0:
                raise ModelError(
                    f"cost of the subset {sorted(subset)} is {value}: it must be seconds >= 0", value=value
                )
            known[subset] = value
        return known[subset]

    return seconds


def _allowed(verdict: bool | Refusal) -> bool:
    return not isinstance(verdict, Refusal) and bool(verdict)


def _sorted(dag: Dag, partition: Partition) -> list[NodeSet]:
    return sorted(partition, key=lambda subset: min(dag.position[node] for node in subset))


def _consecutive(dag: Dag, partition: Partition, horizontal: bool) -> list[tuple[NodeSet, NodeSet]]:
    """Pairs of subsets joined by an edge (or by a shared input), in a fixed order."""
    cover = _sorted(dag, partition)
    pairs = {(min(a, b), max(a, b)) for a, b in quotient_edges(dag, cover)}
    if horizontal:
        masks = [dag.mask(subset) for subset in cover]
        near = [neighbours(dag, mask, horizontal=True) for mask in masks]
        pairs |= {(a, b) for a in range(len(cover)) for b in range(a + 1, len(cover)) if near[a] & masks[b]}
    return [(cover[a], cover[b]) for a, b in sorted(pairs)]

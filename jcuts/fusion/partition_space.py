"""Cost-driven operator fusion: candidate regions, measured lazily, and the partition of least total time.

Algorithm 1 in its subset form (`fusion.partition_search`) over *atoms*, with exact set partitioning
(`fusion.exact_cover`).  An atom is a chain of element operations between which no cut can pay: each feeds only the
next, which has no fewer points, and the greedy grouping (`fusion.greedy`) kept them together.

Measuring every region would take minutes, so regions are measured only where the result can change the answer:

1. The greedy cover is measured.
2. Every other subset gets its estimate (`schedule.cpu.time_estimate`) times the ratio of measured to estimated seconds
   of its kind of kernel so far.  If the cover of least time then holds subsets without a measurement that
   promise to save at least `WORTH` of what they replace, those are measured, the most promising first; repeat.
3. The answer is the best cover among measured subsets: never worse than the greedy one by these measurements.

Source: thesis 3.1, Algorithm 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import Dag, NodeSet, is_convex
from jcuts.fusion.exact_cover import exact_partition
from jcuts.fusion.greedy import MAX_SUBSET, Grouping
from jcuts.fusion.partition_search import Limits, grow_subsets
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.schedule.cpu.time_estimate import seconds, traffic_seconds

WORTH = 0.10
"""Predicted saving, as a share of the time of the subsets to be replaced, that is worth a measurement."""

TOTAL = 0.01
"""And as a share of the whole graph's time."""

LIMITS = Limits(max_size=12, max_subsets=1_500, max_evaluations=1_500, beam=3)


@dataclass
class Space:
    """Candidate regions of one graph, with their estimated or measured times.

    Attributes:
        graph: the tensor graph; greedy: the cover that `find.group` made.
        programs: unscheduled program of every subset that can be a kernel (sets of equation numbers).
        estimates: estimated seconds of every subset, also of equations that are left to XLA.
        truncated: whether the limits cut the search short.
    """

    graph: TensorGraph
    greedy: list[NodeSet]
    atoms: list[NodeSet]
    dag: Dag
    programs: dict[NodeSet, Program] = field(default_factory=dict)
    estimates: dict[NodeSet, float] = field(default_factory=dict)
    truncated: bool = False

    def predicted_seconds(self, measured: Mapping[NodeSet, float]) -> dict[NodeSet, float]:
        """Seconds of every region: measured, or estimated and scaled by the error seen for its kind and its parts.

            scale(S) = sqrt(median of measured / estimated over kernels of S's kind  *  the same ratio of the measured
                            subset that has S's heaviest operation)

        The first says what this kind usually takes, the second whether this operation is a slow one: a slow fused
        kernel may be slow because it is fused, or because its reduction is slow by itself.
        """
        ratio = {s: time / self.estimates[s] for s, time in measured.items() if s in self.programs}
        kinds: dict[str, list[float]] = {}
        for subset, value in ratio.items():
            kinds.setdefault(self._kind(subset), []).append(value)
        general = statistics.median(ratio.values()) if ratio else 1.0
        usual = {kind: statistics.median(found) for kind, found in kinds.items()}
        holder = {n: subset for subset in sorted(ratio, key=lambda s: (-len(s), min(s))) for n in subset}
        found: dict[NodeSet, float] = {}
        for subset, estimate in self.estimates.items():
            if subset in measured:
                found[subset] = measured[subset]
                continue
            kind = usual.get(self._kind(subset), general)
            own = holder.get(self._heaviest(subset))
            found[subset] = estimate * (kind if own is None else math.sqrt(kind * ratio[own]))
        return found

    def next_to_measure(self, measured: Mapping[NodeSet, float], limit: int) -> list[NodeSet]:
        """Unmeasured regions that could improve the best measured partition, most promising first.

        Args: measured: seconds of subsets (kernel or XLA's own code, whatever is allowed and faster); limit: how many.
        Returns: at most ``limit`` subsets, in groups that replace the same part of the cover together.
        """
        predicted = self.predicted_seconds(measured)
        current = self.best_measured_partition(measured)
        hoped = self._cover(predicted)
        found: list[tuple[float, list[NodeSet]]] = []
        for old, new in _partition_differences(current, hoped):
            before, after = sum(predicted[s] for s in old), sum(predicted[s] for s in new)
            fresh = [s for s in new if s not in measured and s in self.programs]
            if fresh and before - after >= WORTH * before:
                found.append((after - before, fresh))
        least = TOTAL * sum(predicted[s] for s in current)
        found = [(gain, fresh) for gain, fresh in found if -gain >= least]
        found.sort(key=lambda item: (item[0], min(min(s) for s in item[1])))
        picked: list[NodeSet] = []
        for _, fresh in found:
            if len(picked) + len(fresh) <= limit:
                picked += fresh
        return picked

    def best_measured_partition(self, measured: Mapping[NodeSet, float]) -> list[NodeSet]:
        """The best partition among measured regions and those of the greedy one, in execution order."""
        known = {*self.greedy, *measured, *(a for a in self.atoms if a not in self.programs)}
        predicted = self.predicted_seconds(measured)
        return self._cover({s: predicted[s] for s in self.estimates if s in known})

    def estimated_cover(self) -> list[NodeSet]:
        """The best partition by estimate alone."""
        return self._cover(self.estimates)

    def _heaviest(self, subset: NodeSet) -> int:
        """The dominant operation of a region: its reduction, else its last one."""
        roots = [n for n in subset if (op := self.graph.nodes[n].op) is not None and op.is_root]
        return max(roots or subset)

    def _kind(self, subset: NodeSet) -> str:
        program = self.programs.get(subset)
        return "xla" if program is None else program.template

    def _cover(self, costs: Mapping[NodeSet, float]) -> list[NodeSet]:
        by_atoms = {self._as_atoms(subset): subset for subset in costs}
        return [by_atoms[s] for s in exact_partition(self.dag, {a: costs[s] for a, s in by_atoms.items()})]

    def _as_atoms(self, subset: NodeSet) -> frozenset[int]:
        return frozenset(self._atom_of[n] for n in subset)

    @cached_property
    def _atom_of(self) -> dict[int, int]:
        return {n: min(atom) for atom in self.atoms for n in atom}


def explore(graph: TensorGraph, grouping: Grouping, limits: Limits = LIMITS) -> Space:
    """Grows the candidate regions of a graph from the greedy grouping's atoms."""
    greedy = [members for members, _ in grouping.subsets]
    covered = {n for members in greedy for n in members}
    greedy += [frozenset({n.number}) for n in graph.nodes if n.number not in covered]
    atoms = _atoms(graph, greedy)
    dag = _dag_of(graph, atoms)
    space = Space(graph, greedy, atoms, dag)
    members_of = {min(atom): atom for atom in atoms}
    refusals: dict[NodeSet, Refusal] = {}
    space.programs.update(grouping.subsets)

    def expand(numbers: NodeSet) -> NodeSet:
        return frozenset(n for number in numbers for n in members_of[number])

    def mergeable(numbers: NodeSet) -> bool | Refusal:
        members = expand(numbers)
        if members in space.programs:
            return True
        if members not in refusals:
            if len(members) > MAX_SUBSET:
                refusals[members] = Refusal("subset", f"more than {MAX_SUBSET} equations")
            else:
                found = lower_region(graph, members)
                if not isinstance(found, Refusal):
                    space.programs[members] = found
                    return True
                refusals[members] = found
        return refusals[members]

    def cost(numbers: NodeSet) -> float:
        members = expand(numbers)
        if members not in space.estimates:
            usable = mergeable(numbers) is True
            space.estimates[members] = (
                seconds(space.programs[members]) if usable else traffic_seconds(_bytes(graph, members))
            )
        return space.estimates[members]

    growth = grow_subsets(dag, mergeable, cost, limits=limits)
    kept = {expand(numbers) for numbers in growth.costs}
    for members in greedy:
        cost(frozenset(min(atom) for atom in atoms if atom <= members))
        kept.add(members)
    space.estimates = {s: t for s, t in space.estimates.items() if s in kept}
    space.programs = {s: p for s, p in space.programs.items() if s in kept}
    space.truncated = growth.truncated
    return space


def _atoms(graph: TensorGraph, greedy: Sequence[NodeSet]) -> list[NodeSet]:
    """Atoms: chains of element-wise operations that no cut would improve (see the module)."""
    group_of = {n: k for k, members in enumerate(greedy) for n in members}
    plain = _dag_of(graph, [frozenset({node.number}) for node in graph.nodes])
    atom_of = {node.number: frozenset({node.number}) for node in graph.nodes}
    for node in graph.nodes:
        user = _only_user(graph, node)
        if user is None or group_of[user.number] != group_of[node.number]:
            continue
        if not (_is_simple(node) and _is_simple(user)) or not _as_many_points(graph, node, user):
            continue
        union = atom_of[node.number] | atom_of[user.number]
        if is_convex(plain, union) and not isinstance(lower_region(graph, union), Refusal):
            atom_of.update(dict.fromkeys(union, union))
    return sorted(set(atom_of.values()), key=min)


def _only_user(graph: TensorGraph, node: OpNode) -> OpNode | None:
    users = {user for tensor in node.outputs for user in graph.tensors[tensor].users}
    if len(users) != 1 or any(graph.tensors[tensor].escapes for tensor in node.outputs):
        return None
    return graph.nodes[users.pop()]


def _is_simple(node: OpNode) -> bool:
    return node.op is not None and not node.op.is_root and node.op.pull is not None


def _as_many_points(graph: TensorGraph, node: OpNode, user: OpNode) -> bool:
    """Whether fusion does not recompute ``node`` more often than alone."""
    assert node.op is not None
    made = sum(graph.tensors[t].type.size for t in node.outputs)
    return node.op.cost == 0 or made >= sum(graph.tensors[t].type.size for t in user.outputs)


def _dag_of(graph: TensorGraph, atoms: Sequence[NodeSet]) -> Dag:
    owner = {n: min(atom) for atom in atoms for n in atom}
    edges = {(owner[a], owner[b]) for a, b in graph.edges() if owner[a] != owner[b]}
    return Dag.of(owner.values(), edges)


def _bytes(graph: TensorGraph, members: NodeSet) -> float:
    tensors = [*graph.subset_inputs(members), *graph.subset_outputs(members)]
    return float(sum(t.size * ITEM_SIZE.get(t.dtype, 4) for t in (graph.tensors[k].type for k in tensors)))


def _partition_differences(old: Sequence[NodeSet], new: Sequence[NodeSet]) -> list[tuple[list[NodeSet], list[NodeSet]]]:
    """Minimal exchangeable differences of two partitions: (old regions, new regions) pairs."""
    gone, come = [s for s in old if s not in set(new)], [s for s in new if s not in set(old)]
    owner = {n: k for k, subset in enumerate(gone) for n in subset}
    leader = list(range(len(gone)))

    def find(k: int) -> int:
        while leader[k] != k:
            k = leader[k]
        return k

    for subset in come:
        first, *rest = {owner[n] for n in subset}
        for other in rest:
            leader[find(other)] = find(first)
    parts: dict[int, tuple[list[NodeSet], list[NodeSet]]] = {}
    for k, subset in enumerate(gone):
        parts.setdefault(find(k), ([], []))[0].append(subset)
    for subset in come:
        parts[find(owner[min(subset)])][1].append(subset)
    return [parts[k] for k in sorted(parts)]

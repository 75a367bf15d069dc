"""Cost-driven operator fusion: candidate regions, measured lazily, and the partition of least total time.

Algorithm 1 in its subset form (`fusion.partition_search`) over *atoms*, with exact set partitioning
(`fusion.exact_cover`).  An atom is a chain of element operations between which no cut can pay: each feeds only the
next, which has no fewer points, and the greedy grouping (`fusion.greedy`) kept them together.

Measuring every region would take minutes, so regions are measured only where the result can change the answer:

1. The incumbent is measured: the greedy cover; on a GPU as prologue and epilogue moves and blocks have changed it.
2. Every other subset gets its estimate (`TimeModel`) times the ratio of measured to estimated seconds of its kind of
   kernel so far.  If the cover of least time then holds subsets without a measurement that
   promise to save at least `WORTH` of what they replace, those are measured, the most promising first; repeat.
3. The answer is the best cover among measured subsets: never worse than the incumbent by these measurements.

On a GPU most of what XLA keeps has no time of its own: XLA fuses it into what surrounds it.  Such equations are
*fixed*: they cost nothing, so that a kernel that takes one over has to be no slower than the kernel without it.

Source: thesis 3.1, Algorithm 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from jcuts.base.errors import Refusal
from jcuts.fusion.dag import Dag, NodeSet, is_convex
from jcuts.fusion.exact_cover import exact_partition
from jcuts.fusion.greedy import MAX_SUBSET
from jcuts.fusion.match_b2b_gemm import lower_region_or_b2b_gemm
from jcuts.fusion.move_epilogue import CHEAP
from jcuts.fusion.partition_search import Limits, grow_subsets
from jcuts.fusion.region_group import only_reader
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.layer_fusion import TEMPLATE as LAYERS
from jcuts.lower.layer_fusion import lower_region_or_layers
from jcuts.lower.region import MAX_RECOMPUTED_OPS, lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph
from jcuts.schedule.cpu import time_estimate as cpu_time
from jcuts.schedule.gpu import time_estimate as gpu_time
from jcuts.schedule.gpu.machine import GpuMachine

WORTH = 0.10
"""Predicted saving, as a share of the time of the subsets to be replaced, that is worth a measurement."""
TOTAL = 0.01
"""And as a share of the whole graph's time."""
LIMITS = Limits(max_size=12, max_subsets=1_500, max_evaluations=1_500, beam=3)
Part = tuple[NodeSet, Program]


@dataclass(frozen=True)
class TimeModel:
    """Predicted seconds of subsets on one platform, from counts: no schedule is looked for.

    Attributes:
        kernel: unscheduled program -> seconds with a good schedule, > 0.
        library: bytes that equations move -> seconds of XLA's code for them, > 0.
    """

    kernel: Callable[[Program], float]
    library: Callable[[float], float]

    @classmethod
    def on_gpu(cls, machine: GpuMachine) -> TimeModel:
        """Of a GPU (`schedule.gpu.time_estimate`)."""
        return cls(partial(gpu_time.seconds, machine=machine), partial(gpu_time.traffic_seconds, machine=machine))


ON_CPU = TimeModel(cpu_time.seconds, cpu_time.traffic_seconds)
"""Of this CPU (`schedule.cpu.time_estimate`)."""


@dataclass(frozen=True)
class SpaceOptions:
    """What the search of a platform looks at.

    Attributes:
        model: predicts seconds. limits: keep the search fast. lower: the program of a region, or why it is none.
        cheap: cost of an operation that a contraction or window may repeat for every use.
        horizontal: whether subsets that share an input are merged, too.
        joint: whether equal exchanges are judged, and measured, together: a network has them in every block.
    """

    model: TimeModel = ON_CPU
    limits: Limits = LIMITS
    cheap: float = MAX_RECOMPUTED_OPS
    lower: Callable[..., Program | Refusal] = lower_region
    horizontal: bool = False
    joint: bool = False

    @classmethod
    def on_gpu(cls, machine: GpuMachine) -> SpaceOptions:
        """Of a GPU."""
        lower = partial(lower_region_or_b2b_gemm, machine=machine)
        return cls(TimeModel.on_gpu(machine), cheap=CHEAP, lower=lower, horizontal=True, joint=True)


CPU_OPTIONS = SpaceOptions(lower=lower_region_or_layers)


@dataclass(frozen=True)
class Incumbent:
    """The partition that a search starts from.

    Attributes:
        subsets: its regions with their programs; every other equation is left to XLA, each by itself.
        others: measured regions that are not in it: parts of a region, or what contains several.
        alone: those of ``subsets`` that XLA keeps without a measurement, but has nothing to fuse with: measured if
            that may decide.
        fixed: those of ``subsets`` whose time is unknown: they cost nothing, as do equations beside them.  None: all
            that is unknown is predicted.
    """

    subsets: Sequence[Part]
    others: Sequence[Part] = ()
    alone: frozenset[NodeSet] = frozenset()
    fixed: frozenset[NodeSet] | None = None


@dataclass
class Space:
    """Candidate regions of one graph, with their estimated or measured times.

    Attributes:
        graph: the tensor graph; greedy: the cover that the search starts from (`Incumbent`), every equation in it.
        programs: unscheduled program of every subset that can be a kernel (sets of equation numbers).
        estimates: estimated seconds of every subset, also of equations that are left to XLA.
        fixed, alone: of ``greedy``, see `Incumbent`.
        truncated: whether the limits cut the search short.
    """

    graph: TensorGraph
    greedy: list[NodeSet]
    atoms: list[NodeSet]
    dag: Dag
    options: SpaceOptions = CPU_OPTIONS
    programs: dict[NodeSet, Program] = field(default_factory=dict)
    estimates: dict[NodeSet, float] = field(default_factory=dict)
    fixed: frozenset[NodeSet] = frozenset()
    alone: frozenset[NodeSet] = frozenset()
    truncated: bool = False

    def predicted_seconds(self, measured: Mapping[NodeSet, float]) -> dict[NodeSet, float]:
        """Seconds of every region: measured, or estimated and scaled by the error seen for its kind and its parts.

            scale(S) = sqrt(median of measured / estimated over kernels of S's kind  *  the same ratio of the measured
                            subset that has S's heaviest operation)

        The first says what this kind usually takes, the second whether this operation is a slow one: a slow fused
        kernel may be slow because it is fused, or because its reduction is slow by itself.  Of fused layers the first
        counts alone: what makes a layer slow by itself, a large result, they do not have; before any was measured, the
        scale of the regions of the incumbent that S meets, all together.
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
            if self._kind(subset) == LAYERS:
                met = [s for s in self.greedy if s & subset and s in ratio]
                own = None
                if LAYERS not in usual and met:
                    kind = sum(map(measured.__getitem__, met)) / sum(map(self.estimates.__getitem__, met))
            found[subset] = estimate * (kind if own is None else math.sqrt(kind * ratio[own]))
        return found

    def next_to_measure(self, measured: Mapping[NodeSet, float], limit: int) -> list[NodeSet]:
        """Unmeasured regions that could improve the best measured partition, most promising first.

        Args: measured: seconds of subsets (kernel or XLA's own code, whatever is allowed and faster); limit: how many.
        Returns: at most ``limit`` subsets (equal ones of a ``joint`` search count once), in groups that replace the
            same part of the cover together.
        """
        predicted = self.predicted_seconds(measured)
        current = self.best_measured_partition(measured)
        hoped = self._cover(predicted)
        alike: dict[Hashable, list[tuple[float, list[NodeSet]]]] = {}
        for number, (old, new) in enumerate(_partition_differences(current, hoped)):
            before, after = sum(predicted[s] for s in old), sum(predicted[s] for s in new)
            fresh = [s for s in new if s not in measured and s in self.programs]
            if not fresh or before - after < WORTH * before:
                continue
            fresh += [s for s in old if s not in measured and s in self.alone]
            key = tuple(self.programs[s].digest for s in fresh) if self.options.joint else number
            alike.setdefault(key, []).append((after - before, fresh))
        least = TOTAL * sum(predicted[s] for s in current)
        found = [(sum(gain for gain, _ in same), [fresh for _, fresh in same]) for same in alike.values()]
        found = [(gain, same) for gain, same in found if -gain >= least]
        found.sort(key=lambda item: (item[0], min(min(s) for s in item[1][0])))
        picked: list[NodeSet] = []
        asked = 0
        for _, same in found:
            if asked + len(same[0]) <= limit:
                asked += len(same[0])
                picked += [s for fresh in same for s in fresh]
        return picked

    def best_measured_partition(self, measured: Mapping[NodeSet, float]) -> list[NodeSet]:
        """The best partition among measured regions and those of the greedy one, in execution order."""
        known = {*self.greedy, *measured, *(a for a in self.atoms if a not in self.programs)}
        costs = self.known_seconds(measured)
        return self._cover({s: costs[s] for s in self.estimates if s in known})

    def known_seconds(self, measured: Mapping[NodeSet, float]) -> dict[NodeSet, float]:
        """`predicted_seconds`, but nothing for what the incumbent leaves to XLA and nobody measured."""
        unknown = self.alone - measured.keys()
        return {s: 0.0 if s in unknown else time for s, time in self.predicted_seconds(measured).items()}

    def forget(self, subset: NodeSet) -> None:
        """Takes a subset out that turns out to have no kernel; parts of the incumbent and atoms stay."""
        if subset not in self.greedy:
            self.programs.pop(subset, None)
        if subset not in self.greedy and subset not in self.atoms:
            self.estimates.pop(subset, None)

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


def explore(graph: TensorGraph, incumbent: Incumbent, options: SpaceOptions = CPU_OPTIONS) -> Space:
    """Grows the candidate regions of a graph from the incumbent's atoms."""
    greedy = [members for members, _ in incumbent.subsets]
    covered = {n for members in greedy for n in members}
    rest = [frozenset({n.number}) for n in graph.nodes if n.number not in covered]
    fixed = frozenset() if incumbent.fixed is None else incumbent.fixed.union(rest)
    greedy += rest
    other = [members for members, _ in incumbent.others]
    atoms = _atoms(graph, greedy, other, options.cheap)
    dag = _dag_of(graph, atoms, shared=options.horizontal)
    space = Space(graph, greedy, atoms, dag, options, fixed=fixed, alone=incumbent.alone)
    members_of = {min(atom): atom for atom in atoms}
    unpaid = {min(atom) for atom in atoms if atom in fixed}
    refusals: dict[NodeSet, Refusal] = {}
    space.programs.update((*incumbent.others, *incumbent.subsets))

    def expand(numbers: NodeSet) -> NodeSet:
        return frozenset(n for number in numbers for n in members_of[number])

    def mergeable(numbers: NodeSet) -> bool | Refusal:
        members = expand(numbers)
        if members in space.programs:
            return True
        if len(numbers) > 1 and numbers <= unpaid:  # no kernel for them costs less than nothing
            return False
        if members not in refusals:
            if len(members) > MAX_SUBSET:
                refusals[members] = Refusal("subset", f"more than {MAX_SUBSET} equations")
            else:
                found = options.lower(graph, members, cheap=options.cheap)
                if not isinstance(found, Refusal):
                    space.programs[members] = found
                    return True
                refusals[members] = found
        return refusals[members]

    def cost(numbers: NodeSet) -> float:
        members = expand(numbers)
        if members not in space.estimates:
            if members in fixed:
                time = 0.0
            elif mergeable(numbers) is True:
                time = options.model.kernel(space.programs[members])
            else:
                time = options.model.library(_bytes(graph, members))
            space.estimates[members] = time
        return space.estimates[members]

    growth = grow_subsets(dag, mergeable, cost, limits=options.limits, horizontal=options.horizontal)
    kept = {expand(numbers) for numbers in growth.costs}
    for members in (*greedy, *other):
        cost(frozenset(min(atom) for atom in atoms if atom <= members))
        kept.add(members)
    for members in _chained_regions(graph, greedy, fixed):
        numbers = frozenset(min(atom) for atom in atoms if atom <= members)
        if expand(numbers) == members and mergeable(numbers) is True:
            cost(numbers)
            kept.add(members)
    space.estimates = {s: t for s, t in space.estimates.items() if s in kept}
    space.programs = {s: p for s, p in space.programs.items() if s in kept}
    space.truncated = growth.truncated
    return space


def _chained_regions(graph: TensorGraph, greedy: Sequence[NodeSet], fixed: frozenset[NodeSet]) -> list[NodeSet]:
    """Two or three regions of the incumbent in a row, each the only reader of the one before: candidates of layers."""
    regions = [members for members in greedy if members not in fixed]
    readers = {members: only_reader(graph, members, regions) for members in regions}
    after = {members: reader for members, reader in readers.items() if reader is not None}
    return [*(a | b for a, b in after.items()), *(a | b | after[b] for a, b in after.items() if b in after)]


def _atoms(graph: TensorGraph, greedy: Sequence[NodeSet], other: Sequence[NodeSet], cheap: float) -> list[NodeSet]:
    """Atoms: chains of element-wise operations that no cut would improve (see the module), in one subset of each."""
    group_of: dict[int, list[int]] = {node.number: [] for node in graph.nodes}
    for k, members in enumerate((*greedy, *other)):
        for n in members:
            group_of[n].append(k)
    plain = _dag_of(graph, [frozenset({node.number}) for node in graph.nodes])
    atom_of = {node.number: frozenset({node.number}) for node in graph.nodes}
    for node in graph.nodes:
        user = _only_user(graph, node)
        if user is None or group_of[user.number] != group_of[node.number]:
            continue
        if not (_is_simple(node) and _is_simple(user)) or not _as_many_points(graph, node, user):
            continue
        union = atom_of[node.number] | atom_of[user.number]
        if is_convex(plain, union) and not isinstance(lower_region(graph, union, cheap=cheap), Refusal):
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


def _dag_of(graph: TensorGraph, atoms: Sequence[NodeSet], *, shared: bool = False) -> Dag:
    """The graph of atoms. Args: shared: with the arguments and constants of more than one element that they read."""
    owner = {n: min(atom) for atom in atoms for n in atom}
    edges = {(owner[a], owner[b]) for a, b in graph.edges() if owner[a] != owner[b]}
    outside: dict[int, list[int]] = {}
    for atom in atoms if shared else ():
        reads = (graph.tensors[t] for t in graph.subset_inputs(atom))
        outside[min(atom)] = [t.number for t in reads if t.producer is None and t.type.size > 1]
    return Dag.of(owner.values(), edges, outside)


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

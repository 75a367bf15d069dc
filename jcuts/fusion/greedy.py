"""Greedy operator fusion: groups the equations of a flat jaxpr, in program order, into regions of one kernel each.

An equation joins the region of a producer whenever the union is a legal kernel (`lower.builder` accepts it), is convex,
and leaves the quotient graph acyclic.  Every merge removes an intermediate tensor's write and read and repeats no work
that `lower.builder` has not priced, so a legal merge is taken without a cost model; where measurement later disagrees,
the region competes with XLA's own fusion as a whole (``mode="mixed"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jcuts.base.errors import Refusal
from jcuts.fusion.match_column_sums import Cone, column_sum_cones, statistics
from jcuts.fusion.match_row_column_sums import row_hosts
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.row_column_sums import TEMPLATE as ROW_COLUMN_SUMS
from jcuts.lower.reduction.column_norm import is_long_column_norm
from jcuts.lower.reduction.column_sums import lower_region_or_column_sums
from jcuts.lower.reduction.row_column_sums import lower_row_column_sums
from jcuts.lower.region import lower_region
from jcuts.lower.tensor_graph import OpNode, TensorGraph

MAX_SUBSET = 128


@dataclass
class FusionGroup:
    """A region under construction."""

    number: int
    members: frozenset[int]
    roots: int
    program: Program | None = None


@dataclass
class Grouping:
    """Result of grouping: regions with their unscheduled programs, and why equations were left out or not merged."""

    subsets: list[tuple[frozenset[int], Program]] = field(default_factory=list)
    left_out: dict[int, Refusal] = field(default_factory=dict)
    refused_merges: dict[tuple[int, int], Refusal] = field(default_factory=dict)


class GreedyFusion:
    """Greedy fusion of one tensor graph.

    Args:
        fuel: bounds the merges (``JCUTS_FUEL``: bisecting a miscompile).
        column_sums: on a GPU: contractions take over column reductions of their results (`fusion.match_column_sums`),
            row reductions those of what they read and make (`fusion.match_row_column_sums`), and norms of long columns
            stay apart (`lower.reduction.column_norm`).
    """

    def __init__(
        self,
        graph: TensorGraph,
        fuse: bool = True,
        fuel: Callable[[], bool] = lambda: True,
        column_sums: bool = False,
    ) -> None:
        self.graph, self.fuse, self.fuel, self.column_sums = graph, fuse, fuel, column_sums
        self.lower = lower_region_or_column_sums if column_sums else lower_region
        self.result = Grouping()
        self.of: dict[int, int] = {}
        self.clusters: dict[int, FusionGroup] = {}
        self.memo: dict[frozenset[int], Program | Refusal] = {}
        self.readers: dict[int, tuple[int, ...]] = {}
        # A topological order of the quotient graph: clusters, and equations that are in none.
        self.order = [node.number for node in graph.nodes]
        self.place = {number: place for place, number in enumerate(self.order)}

    def run(self) -> Grouping:
        """Groups all equations."""
        for node in self.graph.nodes:
            self._start(node)
        if self.fuse:
            for cone in column_sum_cones(self.graph) if self.column_sums else ():
                self._join_cone(cone)
            for group in statistics(self.graph) if self.column_sums else ():
                self._join_statistics(group)
            for node in self.graph.nodes:
                if node.number in self.of:
                    self._join_producers(node)
            self._join_siblings()
            if self.column_sums:
                self._join_rows()
        for cluster in sorted(self.clusters.values(), key=lambda c: max(c.members)):
            program = self._build(cluster.members)
            if isinstance(program, Refusal):
                for member in cluster.members:
                    self.result.left_out[member] = program
            else:
                self.result.subsets.append((cluster.members, program))
        return self.result

    def _start(self, node: OpNode) -> None:
        if node.refusal is not None:
            self.result.left_out[node.number] = node.refusal
            return
        assert node.op is not None
        alone = self._build(frozenset({node.number}))
        if isinstance(alone, Refusal):
            self.result.left_out[node.number] = alone
            return
        self.of[node.number] = node.number
        self.clusters[node.number] = FusionGroup(node.number, frozenset({node.number}), int(node.op.is_root), alone)

    def _build(self, subset: frozenset[int]) -> Program | Refusal:
        if subset not in self.memo:
            self.memo[subset] = self.lower(self.graph, subset)
        return self.memo[subset]

    def _producers(self, node: OpNode) -> list[int]:
        """Clusters that feed a node: those with a reduction first, latest first."""
        found: dict[int, None] = {}
        joined = [self.graph.nodes[m].pieces for m in self.clusters[self.of[node.number]].members]
        for tensor in (*node.inputs, *(p.source for p in joined if p is not None)):
            made = self.graph.tensors[tensor].producer
            if made is not None and made in self.of and self.of[made] != self.of[node.number]:
                found.setdefault(self.of[made])
        return sorted(found, key=lambda c: (self.clusters[c].roots > 0, max(self.clusters[c].members)), reverse=True)

    def _join_producers(self, node: OpNode) -> None:
        tried: set[int] = set()
        while True:
            mine = self.of[node.number]
            for other in self._producers(node):
                if other in tried:
                    continue
                tried.add(other)
                if self._try_merge(other, mine, node):
                    break
            else:
                return

    def _join_cone(self, cone: Cone) -> None:
        """Merges a reduction, with what lies between, into the region of its contraction."""
        if any(n not in self.of for n in (cone.contraction, cone.reduction, *cone.before, *cone.behind)):
            return
        nodes, root = self.graph.nodes, cone.contraction
        for number in cone.before:
            if self.of[number] != self.of[root] and not self._try_merge(self.of[root], self.of[number], nodes[number]):
                return
        last = cone.reduction
        for number in reversed(cone.behind):
            if self.of[number] not in (self.of[root], self.of[last]):
                self._try_merge(self.of[number], self.of[last], nodes[last])
        if self.of[last] != self.of[root]:
            self._try_merge(self.of[root], self.of[last], nodes[last])

    def _join_statistics(self, group: Sequence[int]) -> None:
        """Merges the equations of a mean and a variance where one pass gives both (Welford)."""
        if any(self.of.get(n) != n for n in group):  # part of another region
            return
        program = self._build(frozenset(group))
        if isinstance(program, Refusal) or len(program.phases) == 1 or is_long_column_norm(program):
            return
        first = group[0]
        for number in group[1:]:
            self._try_merge(self.of[first], number, self.graph.nodes[number], growing=True)

    def _join_siblings(self) -> None:
        """Horizontal fusion of reductions over the same dimensions: of one tensor (a sum and a sum of squares), and, on
        GPUs, of tensors that one region makes (the sums in the gradient of a batch norm).
        """
        self._join_alike(lambda tensor: tensor)
        if self.column_sums:
            self._join_alike(self._maker)

    def _maker(self, tensor: int) -> tuple[str, int] | None:
        """The region that makes a tensor."""
        made = self.graph.tensors[tensor].producer
        return None if made is None or made not in self.of else ("region", self.of[made])

    def _join_alike(self, source: Callable[[int], object]) -> None:
        """Merges regions that reduce tensors of equal source and shape over the same dimensions."""
        alike: dict[object, list[int]] = {}
        for number, cluster in sorted(self.clusters.items()):
            if cluster.roots == 0 or cluster.program is None or cluster.program.template != "reduction":
                continue
            for member in sorted(cluster.members):
                op = self.graph.nodes[member].op
                assert op is not None
                if op.is_root:
                    read = self.graph.subset_inputs(cluster.members)
                    if not read:  # reductions of constants and iotas
                        break
                    large = source(max(read, key=lambda t: self.graph.tensors[t].type.size))
                    if large is not None:
                        alike.setdefault((large, op.inputs[0].shape, op.info.get("axes")), []).append(number)
                    break
        for numbers in alike.values():
            for number in numbers[1:]:
                self._try_merge(numbers[0], number, self.graph.nodes[max(self.clusters[number].members)], "reduction")

    def _join_rows(self) -> None:
        """Merges column reductions into the regions of row reductions that make or read what they sum."""
        regions = {number: cluster.members for number, cluster in sorted(self.clusters.items())}
        for number, hosts in list(row_hosts(self.graph, regions)):
            for host in hosts:
                union = self.clusters[host].members | self.clusters[number].members
                if union not in self.memo or isinstance(self.memo[union], Refusal):
                    self.memo[union] = lower_row_column_sums(self.graph, union)
                if self._try_merge(host, number, self.graph.nodes[max(self.clusters[number].members)], ROW_COLUMN_SUMS):
                    break

    def _try_merge(self, first: int, second: int, node: OpNode, template: str = "", *, growing: bool = False) -> bool:
        a, b = self.clusters[first], self.clusters[second]
        union = a.members | b.members
        between = self._reached_between(first, second) if len(union) <= MAX_SUBSET else None
        if between is None:
            return False
        program = self._build(union)
        if template and isinstance(program, Program) and program.template != template:
            program = Refusal("subset", f"together they are no {template}")
        if self.column_sums and not growing and isinstance(program, Program) and is_long_column_norm(program):
            program = Refusal("subset", "several passes over columns that are longer than a block's registers hold")
        if isinstance(program, Refusal):
            producer = max(a.members)
            self.result.refused_merges[producer, node.number] = program
            return False
        if not self.fuel():
            return False
        merged = FusionGroup(first, union, a.roots + b.roots, program)
        read = (*self._readers_of(first), *self._readers_of(second))
        del self.clusters[second]
        self.clusters[first] = merged
        self.readers[first] = tuple({reader for reader in read if reader not in union})
        self._reorder(first, second, between)
        for member in union:
            self.of[member] = first
        return True

    def _reached_between(self, first: int, second: int) -> set[int] | None:
        """What the earlier of two clusters reaches before the later one; None where a path through it joins the two.

        Such a merge would create a cycle.  Equations that jcuts leaves out count as nodes of their own, so that the
        union is convex as well.  Only what lies between the two in the topological order is looked at (Pearce and
        Kelly, A dynamic topological sort algorithm, 2006).
        """
        low, high = sorted((first, second), key=self.place.__getitem__)
        last = self.place[high]
        stack, seen, of, place, readers = [low], set[int](), self.of, self.place, self.readers
        while stack:
            key = stack.pop()
            for reader in readers[key] if key in readers else self._readers_of(key):
                found = of.get(reader, reader)
                if found in seen:
                    continue
                if found == high:
                    if key != low:
                        return None
                elif place[found] < last:
                    seen.add(found)
                    stack.append(found)
        return seen

    def _reorder(self, first: int, second: int, reached: set[int]) -> None:
        """Puts a merged cluster behind all that it does not reach, in the topological order."""
        low, high = sorted((self.place[first], self.place[second]))
        self.order[low], self.place[second] = second, low  # it is no cluster any more; its place stays taken
        self.order[high], self.place[first] = first, high
        if not reached:
            return
        begin = min(self.place[key] for key in reached)
        segment = self.order[begin:high]
        made = [*(k for k in segment if k not in reached), first, *(k for k in segment if k in reached)]
        self.order[begin : high + 1] = made
        self.place.update(zip(made, range(begin, high + 1), strict=True))

    def _readers_of(self, key: int) -> tuple[int, ...]:
        """Equations that read the results of a cluster, or of an equation in none, outside it."""
        found = self.readers.get(key)
        if found is None:
            cluster = self.clusters.get(key)
            members = cluster.members if cluster is not None else frozenset({key})
            outputs = (t for m in members for t in self.graph.nodes[m].outputs)
            found = tuple({u for t in outputs for u in self.graph.tensors[t].users if u not in members})
            self.readers[key] = found
        return found


def group(
    graph: TensorGraph, *, fuse: bool = True, fuel: Callable[[], bool] = lambda: True, column_sums: bool = False
) -> Grouping:
    """Regions of a tensor graph, in execution order.

    Args: fuse: False: one operation per kernel; fuel, column_sums: of `GreedyFusion`.
    """
    return GreedyFusion(graph, fuse, fuel, column_sums).run()

"""Heterogeneous clusters: every data-parallel replica lies in one group of equal nodes, the batch is split by speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.plan.cost.training_step import PARTS, estimate
from jcuts.plan.search.plan import Plan, Plans
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training


@dataclass(frozen=True)
class Split:
    """An uneven split: samples of the global batch per group, the step's seconds and its parts (of the slowest
    group)."""

    samples: tuple[int, ...]
    seconds: float
    parts: dict[str, float]


def allocate(count: int, slots: Sequence[float]) -> list[int]:
    """Deals ``count`` micro-batches to workers so that the last to finish finishes earliest.

        minimise max_i n_i slots_i,  sum n_i = count,  n_i >= 1

    Greedy (give the next to whoever would finish it first) is optimal for identical jobs on uniform machines.
    Raises: UsageError if there are fewer micro-batches than workers.

    >>> allocate(10, [1.0, 1.0, 2.0])
    [4, 4, 2]
    """
    if count < len(slots):
        raise UsageError(f"{count} micro-batches cannot feed {len(slots)} replicas", count=count, replicas=len(slots))
    dealt = [1] * len(slots)
    heap = [(2 * slot, i) for i, slot in enumerate(slots)]
    heapq.heapify(heap)
    for _ in range(count - len(slots)):
        _, i = heapq.heappop(heap)
        dealt[i] += 1
        heapq.heappush(heap, ((dealt[i] + 1) * slots[i], i))
    return dealt


def split(model: Model, cluster: Cluster, plan: Plan, work: Training) -> Split | None:
    """Costs a plan on a cluster of unequal groups (None if replicas do not fit into whole groups).

    Every replica of tensor x pipeline x context GPUs lies within one group; groups get micro-batches by their slot
    time. Gradients, optimiser and overhead are those of the whole cluster; the rest is the slowest group's.
    """
    size = plan.tensor * plan.pipeline * plan.context
    replicas = [group.nodes * group.gpus // size for group in cluster.groups]
    if sum(replicas) != plan.data or any(group.nodes * group.gpus % size for group in cluster.groups):
        return None
    total = work.batch // plan.micro
    alone = [replace(cluster, groups=(group,)) for group in cluster.groups]
    slots = [_slot(model, part, plan, work) for part in alone]
    workers = [slot for slot, n in zip(slots, replicas, strict=True) for _ in range(n)]
    if total < len(workers):
        return None
    dealt = allocate(total, workers)
    whole = estimate(model, cluster, Plans.of([plan]), work)
    shared = {part: float(getattr(whole.time, part)[0]) for part in ("gradients", "optimizer", "overhead")}
    worst: dict[str, float] = {}
    samples, position = [], 0
    for part, n in zip(alone, replicas, strict=True):
        mine = dealt[position : position + n]
        position += n
        samples.append(sum(mine) * plan.micro)
        if not mine:
            continue
        busiest = replace(work, batch=max(mine) * plan.micro)
        found = estimate(model, part, Plans.of([replace(plan, data=1, expert=1, zero=0)]), busiest).time
        parts = {name: float(getattr(found, name)[0]) for name in PARTS} | shared
        if sum(parts.values()) > sum(worst.values()):
            worst = parts
    return Split(tuple(samples), float(np.sum(list(worst.values()))), worst)


def _slot(model: Model, cluster: Cluster, plan: Plan, work: Training) -> float:
    """Seconds that one more micro-batch costs a replica."""
    plans = Plans.of([replace(plan, data=1, expert=1, zero=0)])
    one, two = (
        estimate(model, cluster, plans, replace(work, batch=plan.micro * n)).time
        for n in (plan.pipeline * 2, plan.pipeline * 2 + 1)
    )
    rest = ("gradients", "optimizer", "overhead")
    return float(sum(getattr(two, part)[0] - getattr(one, part)[0] for part in PARTS if part not in rest))

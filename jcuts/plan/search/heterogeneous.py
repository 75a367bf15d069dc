"""Heterogeneous clusters: every data-parallel replica lies in one group of equal nodes, the batch is split by speed,
and nodes that would only slow the step down are left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.cost.memory import training_memory
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.cost.training_step import PARTS, Estimate, estimate
from jcuts.plan.search.no_plan import Nearest, NoPlanError, nearest_of, no_plan
from jcuts.plan.search.plan import TIERS, Plan, Plans
from jcuts.plan.search.plan_space import Space, chunks
from jcuts.plan.search.ranked import Ranked, shortage, total_memory
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

KEPT = 64
"""Plans per set of groups whose batch is dealt out micro-batch by micro-batch; the others are bounded from below."""

TINY = np.finfo(np.float32).tiny
"""Seconds: a micro-batch takes some time."""

SHARED = ("gradients", "optimizer", "overhead")
"""Parts of a step that all groups do together."""


@dataclass(frozen=True)
class Split:
    """An uneven split: samples of the global batch per replica, the step's seconds and its parts (of the slowest
    group)."""

    samples: tuple[tuple[int, ...], ...]
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Found:
    """What a search of an uneven cluster found: ``ranked`` fastest first, ``considered`` plans, ``fitting`` ones."""

    ranked: list[Ranked]
    considered: int
    fitting: int


def allocate(count: int, slots: Sequence[float], fixed: Sequence[float] | None = None) -> list[int]:
    """Deals ``count`` micro-batches to workers so that the last to finish finishes earliest.

        minimise max over n_i > 0 of fixed_i + n_i slots_i,   sum n_i = count,   n_i >= 0

    Greedy (give the next to whoever would finish it first) is optimal for identical jobs on uniform machines; a worker
    that would only delay the rest gets none.

    >>> allocate(10, [1.0, 1.0, 2.0])
    [4, 4, 2]
    >>> allocate(3, [1.0, 9.0])
    [3, 0]
    """
    fixed = fixed or [0.0] * len(slots)
    dealt = [0] * len(slots)
    heap = [(start + slot, i) for i, (start, slot) in enumerate(zip(fixed, slots, strict=True))]
    heapq.heapify(heap)
    for _ in range(count):
        _, i = heapq.heappop(heap)
        dealt[i] += 1
        heapq.heappush(heap, (fixed[i] + (dealt[i] + 1) * slots[i], i))
    return dealt


def search(model: Model, cluster: Cluster, work: Training, space: Space) -> Found:
    """Searches every set of groups, and every plan of a replica that lies within one group.

    A replica takes tensor x pipeline x context GPUs; each group has as many as fit, and each gets micro-batches by its
    speed, none if it would only delay the step.  A set of one group is an even cluster of its own.

    Raises: NoPlanError if no plan fits on any set of groups.
    """
    made: list[Ranked] = []
    considered = fitting = 0
    nearest: Nearest | None = None
    for chosen in _subsets(len(cluster.groups)):
        part = replace(cluster, groups=tuple(cluster.groups[i] for i in chosen))
        found: list[tuple[float, Plan]] = []
        for plans, replicas in _plans(model, part, work, space):
            considered += len(plans)
            short = shortage(part, training_memory(model, part, plans, sizes(model, plans, work.autodiff), work))
            fits = np.asarray(~short.any(0))
            fitting += int(np.count_nonzero(fits))
            if not fits.any():
                nearest = nearest_of(part, plans, short, nearest)
                continue
            good = plans.take(fits)
            bound = _bounds(model, part, good, replicas, work)
            order = np.argsort(bound, kind="stable")[:KEPT]
            found = sorted([*found, *((float(bound[i]), good.plan(i)) for i in order)], key=lambda e: e[0])[:KEPT]
        for _, plan in found:
            ranked = _ranked(model, cluster, chosen, plan, work)
            if ranked is not None:
                made.append(ranked)
    if not made:
        if nearest is None:
            raise NoPlanError(
                f"{model.name} on {cluster.name}: no plan divides: batch {work.batch} is in micro-batches that no "
                "group of nodes can take whole replicas of: change the batch",
                short={},
                change="batch",
            )
        raise no_plan(model, cluster, work, space, nearest, considered)
    return Found(sorted(made, key=lambda ranked: ranked.order), considered, fitting)


def _subsets(groups: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, groups + 1):
        yield from itertools.combinations(range(groups), count)


def _plans(model: Model, part: Cluster, work: Training, space: Space) -> Iterator[tuple[Plans, list[int]]]:
    """(plans of one replica size, replicas per group) of some groups; every group has at least one replica."""
    least = min(group.nodes * group.gpus for group in part.groups)
    for size in range(1, least + 1):
        replicas = [group.nodes * group.gpus // size for group in part.groups]
        if size > part.gpus_per_node and size % part.gpus_per_node:
            continue  # a replica over parts of nodes
        for plans in chunks(model, part, size, work, space, replicas=sum(replicas)):
            yield plans, replicas


def _bounds(model: Model, part: Cluster, plans: Plans, replicas: Sequence[int], work: Training) -> NDArray[np.float64]:
    """Seconds that no split of the batch undercuts: micro-batches may be divided, and nobody waits for a whole one."""
    whole = estimate(model, part, plans, work)
    shared = sum(getattr(whole.time, name) for name in SHARED)
    speed = np.zeros(len(plans))
    start = np.full(len(plans), np.inf)
    for group, count in zip(part.groups, replicas, strict=True):
        fixed, slot = _linear(model, replace(part, groups=(group,)), plans, work)
        speed += count / slot
        start = np.minimum(start, fixed)
    return shared + start + work.batch / plans["micro"] / speed


def _alone(plans: Plans) -> Plans:
    """One replica of each plan."""
    single = {name: np.ones_like(plans["data"]) for name in ("data", "expert", "table", "row")}
    return Plans(**(plans.columns | single | {"zero": np.zeros_like(plans["data"])}))


def _linear(
    model: Model, part: Cluster, plans: Plans, work: Training
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(seconds that a replica takes however little it does, seconds per micro-batch) without what is shared."""
    fixed, slot = np.zeros(len(plans)), np.zeros(len(plans))
    for micro in np.unique(plans["micro"]).tolist():
        here = plans["micro"] == micro
        alone = _alone(plans.take(here))
        one, two = (_own(estimate(model, part, alone, replace(work, batch=micro * n))) for n in (1, 2))
        slot[here] = np.maximum(two - one, TINY)
        fixed[here] = np.maximum(one - slot[here], 0.0)
    return fixed, slot


def _own(found: Estimate) -> NDArray[np.float64]:
    return np.sum([getattr(found.time, part) for part in PARTS if part not in SHARED], axis=0)


def split(model: Model, cluster: Cluster, plan: Plan, work: Training) -> Split | None:
    """Costs a plan on unequal groups (None if micro-batches do not add up to the batch, or a group has no replica).

    Gradients, optimiser and overhead are those of all GPUs; the rest is the slowest group's.
    """
    size = plan.tensor * plan.pipeline * plan.context
    replicas = [group.nodes * group.gpus // size for group in cluster.groups]
    if work.batch % plan.micro or not all(replicas):
        return None
    plans = Plans.of([plan])
    alone = [replace(cluster, groups=(group,)) for group in cluster.groups]
    lines = [_linear(model, part, plans, work) for part in alone]
    fixed = [float(line[0][0]) for line, n in zip(lines, replicas, strict=True) for _ in range(n)]
    slots = [float(line[1][0]) for line, n in zip(lines, replicas, strict=True) for _ in range(n)]
    dealt = allocate(work.batch // plan.micro, slots, fixed)
    used = replace(plan, data=max(sum(n > 0 for n in dealt), 1), expert=1, table=1, row=1)
    whole = estimate(model, cluster, Plans.of([used]), replace(work, batch=max(dealt) * plan.micro * used.data))
    shared = {part: float(getattr(whole.time, part)[0]) for part in SHARED}
    worst: dict[str, float] = {}
    samples, position = [], 0
    for part, n in zip(alone, replicas, strict=True):
        mine = dealt[position : position + n]
        position += n
        samples.append(tuple(count * plan.micro for count in mine))
        if not max(mine):
            continue
        busiest = replace(work, batch=max(mine) * plan.micro)
        found = estimate(model, part, _alone(plans), busiest).time
        parts = {name: float(getattr(found, name)[0]) for name in PARTS} | shared
        if sum(parts.values()) > sum(worst.values()):
            worst = parts
    return Split(tuple(samples), float(np.sum(list(worst.values()))), worst)


def _ranked(model: Model, cluster: Cluster, chosen: Sequence[int], plan: Plan, work: Training) -> Ranked | None:
    """A plan on some groups with its batch dealt out; None if a group that was chosen gets nothing (another set of
    groups has that plan) or the split does not fit."""
    part = replace(cluster, groups=tuple(cluster.groups[i] for i in chosen))
    found = split(model, part, plan, work)
    if found is None or not all(max(mine) for mine in found.samples):
        return None
    busy = [count for mine in found.samples for count in mine if count]
    used = replace(plan, data=len(busy), expert=1, table=1, row=1)
    plans, fullest = Plans.of([used]), replace(work, batch=max(busy) * len(busy))
    memory = training_memory(model, part, plans, sizes(model, plans, work.autodiff), fullest)
    if shortage(part, memory).any():
        return None
    samples = [0] * len(cluster.groups)
    for i, mine in zip(chosen, found.samples, strict=True):
        samples[i] = sum(mine)
    names = ("parameters", "gradients", "optimizer", "activations", "working")
    return Ranked(
        used,
        found.seconds,
        found.parts,
        {tier: float(memory.tier(k)[0]) for k, tier in enumerate(TIERS)},
        {name: float(getattr(memory, name)[0]) for name in names},
        float(total_memory(part, plans, memory)[0]),
        tuple(samples),
    )


def even(model: Model, cluster: Cluster, plan: Plan, work: Training) -> float:
    """Seconds of a plan whose batch is split evenly over all replicas: what the uneven split is compared with.

    Raises: UsageError if the batch is no multiple of the replicas' micro-batches.
    """
    if work.batch % (plan.data * plan.micro):
        raise UsageError(f"batch {work.batch} is not a multiple of {plan.data} replicas of {plan.micro} samples")
    times = [
        float(estimate(model, replace(cluster, groups=(group,)), Plans.of([plan]), work).time.total[0])
        for group in cluster.groups
    ]
    return max(times)

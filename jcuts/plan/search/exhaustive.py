"""Exhaustive search over plans, vectorised in NumPy: ranking, Pareto front, and why the neighbouring plans lost."""

from __future__ import annotations

import time as clock
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import JcutsError
from jcuts.plan.cost.memory import training_memory
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.cost.training_step import estimate
from jcuts.plan.search import heterogeneous
from jcuts.plan.search.neighbours import Rejected, explain_neighbours
from jcuts.plan.search.no_plan import Nearest, nearest_of, no_plan
from jcuts.plan.search.plan import KIND, TIERS, Plans
from jcuts.plan.search.plan_space import CLASSES, Space, chunks
from jcuts.plan.search.ranked import LEAST, RESOLUTION, Ranked, cost_arrays, shortage, total_memory
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

KEPT = 64
"""Plans of each chunk that stay candidates (the fastest of their kind; the Pareto front is kept besides)."""

AXES = KIND.index("micro") + 1
"""Settings of a kind that are sizes: axes and micro-batch."""

LOOKED_AT = 4096
"""Fastest plans of each chunk among which the kinds are told apart."""


SAVED = 0.1
"""Share of memory, on a GPU or over all tiers, that a slower plan of the same axes and micro-batch must save to be
listed beside the faster one."""


@dataclass(frozen=True)
class Result:
    """Result of a search: ``ranked`` fastest first, one plan of each kind; ``considered`` plans, of which ``fitting``
    fit."""

    ranked: tuple[Ranked, ...]
    pareto: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    considered: int
    fitting: int
    seconds: float
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def plans_per_second(self) -> float:
        """Plans considered per second of wall time (one thread)."""
        return self.considered / self.seconds if self.seconds else 0.0

    @property
    def best(self) -> Ranked:
        """The fastest plan."""
        return self.ranked[0]


def search(
    model: Model,
    cluster: Cluster,
    work: Training,
    *,
    gpus: int | None = None,
    space: Space | None = None,
    top: int = 10,
    explain: int = 12,
) -> Result:
    """Costs every plan of ``space`` and ranks those that fit (``Ranked.order``).

    Args: gpus: how many of the cluster's GPUs to use (default: all); top: plans to return; explain: rejected
    neighbours.
    Raises: UsageError for a GPU count that cannot be had; NoPlanError if nothing fits, with what is short, by how much,
        and the nearest feasible change.
    """
    space = space or Space()
    cluster = cluster.resized(gpus or cluster.gpus)
    if len(cluster.groups) > 1:
        return _uneven(model, cluster, work, space, top)
    begun = clock.perf_counter()
    kept: list[Ranked] = []
    front: list[Ranked] = []
    considered = fitting = 0
    reasons: dict[str, int] = {}
    nearest: Nearest | None = None
    limit = max(KEPT, top)
    for plans in chunks(model, cluster, cluster.gpus, work, space):
        considered += len(plans)
        short = shortage(cluster, training_memory(model, cluster, plans, sizes(model, plans, work.autodiff), work))
        for row, name in enumerate(TIERS):
            count = int(np.count_nonzero(short[row]))
            if count:
                reasons[f"{name} memory"] = reasons.get(f"{name} memory", 0) + count
        fits = np.asarray(~short.any(0))
        if not fits.any():
            nearest = nearest_of(cluster, plans, short, nearest)
            continue
        fitting += int(np.count_nonzero(fits))
        good = plans.take(fits)
        found = estimate(model, cluster, good, work)
        total = found.time.total
        quick = _fastest(good, total, found.memory.gpu, total_memory(cluster, good, found.memory), limit)
        edge = _front(total, found.memory.gpu)
        chosen = np.unique(np.concatenate([quick, edge]))
        costed = cost_arrays(model, cluster, good.take(chosen), work)
        by_index = dict(zip(chosen.tolist(), costed, strict=True))
        kept += [by_index[i] for i in quick.tolist()]
        front += [by_index[i] for i in edge.tolist()]
        kept = distinct(kept)[:limit]
    if not kept:
        raise no_plan(model, cluster, work, space, nearest, considered)
    seconds = clock.perf_counter() - begun
    rejected = explain_neighbours(model, cluster, work, kept[0], space, explain)
    return Result(tuple(kept[:top]), tuple(pareto(front)), rejected, considered, fitting, seconds, reasons)


def _fastest(plans: Plans, total: NDArray, gpu: NDArray, memory: NDArray, limit: int) -> NDArray[np.intp]:
    """Positions of the ``limit`` fastest plans, one of each kind, ties by memory (arrays over plans); see ``_apart``.

    Of more equally fast plans than are looked at, those that use the least memory.
    """
    most = min(LOOKED_AT, len(total)) - 1
    last = np.partition(total, most)[most]
    near = np.flatnonzero(total <= last * (1 + 2 / RESOLUTION))
    time = np.round(np.log(np.maximum(total[near], LEAST)) * RESOLUTION)
    space = np.round(np.log(np.maximum(memory[near], LEAST)) * RESOLUTION)
    away = np.sum([plans[name][near] > 0 for name in CLASSES], axis=0)
    near = near[np.lexsort((plans["chunks"][near], space, away, time))][: most + 1]
    _, first = np.unique(plans.codes(near, KIND), return_index=True)
    near = near[np.sort(first)]
    chosen = _apart(plans.codes(near, KIND[:AXES]).tolist(), gpu[near].tolist(), memory[near].tolist())
    return near[chosen[:limit]]


def _apart(mesh: Sequence[Hashable], gpu: Sequence[float], total: Sequence[float]) -> list[int]:
    """Positions, of plans fastest first, of those that take less memory than every faster one of their mesh: ``SAVED``
    less on a GPU or over all tiers."""
    made: list[int] = []
    least: dict[Hashable, tuple[float, float]] = {}
    for position, (key, mine, whole) in enumerate(zip(mesh, gpu, total, strict=True)):
        before = least.get(key, (np.inf, np.inf))
        if mine < (1 - SAVED) * before[0] or whole < (1 - SAVED) * before[1]:
            made.append(position)
            least[key] = (min(mine, before[0]), min(whole, before[1]))
    return made


def distinct(plans: Iterable[Ranked]) -> list[Ranked]:
    """The best plan of each kind (``Ranked.kind``), best first: variants of one plan are not listed beside it, nor are
    slower plans of its axes and micro-batch that hardly save memory (``_apart``)."""
    kinds: dict[tuple, Ranked] = {}
    for one in sorted(plans, key=lambda ranked: ranked.order):
        kinds.setdefault(one.kind, one)
    made = list(kinds.values())
    gpu, total = [r.memory["gpu"] for r in made], [r.total_memory for r in made]
    return [made[i] for i in _apart([r.kind[:AXES] for r in made], gpu, total)]


def _front(seconds: NDArray, memory: NDArray) -> NDArray[np.intp]:
    """Positions that nothing beats in both time and memory."""
    order = np.lexsort((memory, seconds))
    lowest = np.minimum.accumulate(memory[order])
    keep = np.concatenate([[True], memory[order][1:] < lowest[:-1]])
    return order[keep]


def pareto(plans: Iterable[Ranked]) -> list[Ranked]:
    """Pareto front of plans in time, memory per GPU and number of GPUs, fastest first.

    A plan is dropped if another is at least as good in all three and better in one.
    """
    made: list[Ranked] = []
    for one in sorted(plans, key=lambda r: (r.seconds, r.memory["gpu"], r.plan.gpus)):
        if not any(r.memory["gpu"] <= one.memory["gpu"] and r.plan.gpus <= one.plan.gpus for r in made):
            made.append(one)
    return made


def over_gpu_counts(
    model: Model, cluster: Cluster, work: Training, counts: Sequence[int], *, space: Space | None = None
) -> list[Ranked]:
    """Pareto front over GPU counts: searches each count and keeps what no plan beats in time, memory and GPUs.

    Counts that the cluster does not have, or on which nothing fits, are left out.  Fastest first.
    """
    found: list[Ranked] = []
    for count in counts:
        try:
            found += search(model, cluster, work, gpus=count, space=space, top=1, explain=0).pareto
        except JcutsError:
            continue
    return pareto(found)


def gpu_counts(cluster: Cluster) -> list[int]:
    """GPU counts to compare: parts of a node by halves, then whole nodes by halves, all of the cluster last."""
    group, *others = cluster.groups
    if others:
        return [cluster.gpus]
    made = {group.gpus >> shift for shift in range(group.gpus.bit_length()) if group.gpus % (1 << shift) == 0}
    made |= {
        group.gpus * (group.nodes >> shift)
        for shift in range(group.nodes.bit_length())
        if group.nodes % (1 << shift) == 0
    }
    return sorted(made - {0})


def _uneven(model: Model, cluster: Cluster, work: Training, space: Space, top: int) -> Result:
    """Searches a cluster of unequal nodes: the batch is split by speed, and nodes may be left out."""
    begun = clock.perf_counter()
    found = heterogeneous.search(model, cluster, work, space)
    seconds = clock.perf_counter() - begun
    return Result(
        tuple(distinct(found.ranked)[:top]),
        tuple(pareto(found.ranked)),
        (),
        found.considered,
        found.fitting,
        seconds,
    )

"""Infeasible searches: which plan comes nearest to fitting, what it is short of, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import JcutsError
from jcuts.plan.cost.memory import training_memory
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.search.plan import TIERS, Plan, Plans
from jcuts.plan.search.plan_space import Space, arrangements, chunks
from jcuts.plan.search.ranked import shortage
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

FAR = 10**15
"""Distance of plans that do not fit the GPU."""


class NoPlanError(JcutsError):
    """No plan fits: ``short`` says by how many bytes per tier the nearest one fails, ``change`` what would help."""


@dataclass(frozen=True)
class Nearest:
    """The plan that comes nearest to fitting: its shortage per tier in bytes, and as the sum of shares of each tier's
    capacity (``lacks``), by which plans are compared."""

    plan: Plan
    short: NDArray[np.float64]
    lacks: float


def nearest_of(cluster: Cluster, plans: Plans, short: NDArray[np.float64], before: Nearest | None) -> Nearest:
    """The nearest of some plans and the nearest ``before`` them.

    Distance: each tier's shortage over its capacity, added up, so that 6 GiB of a disk count less than 6 GiB of a GPU;
    a plan that fits the GPU comes before any that does not, for disks and host memory can be had.
    """
    size = np.array([max(capacity, 1.0) for capacity in cluster.capacities])
    lacks = (short / size[:, None]).sum(0) + np.where(short[0] > 0, FAR, 0)
    i = int(np.argmin(lacks))
    if before is not None and before.lacks <= lacks[i]:
        return before
    return Nearest(plans.plan(i), short[:, i], float(lacks[i]))


def no_plan(
    model: Model, cluster: Cluster, work: Training, space: Space, nearest: Nearest | None, considered: int
) -> NoPlanError:
    """The error for an empty result: what is short by how much, and the smallest changes found that help."""
    if nearest is None:
        options = len(arrangements(model, cluster.gpus, space))
        return NoPlanError(
            f"{model.name} on {cluster.gpus} GPUs of {cluster.name}: no plan divides: "
            f"batch {work.batch}, {model.layers} layers, "
            f"{model.tensor_limit} heads ({options} arrangements of the GPUs tried): change the batch or the GPU count",
            short={},
            change="batch or GPU count",
        )
    short = nearest.short
    lacks = {TIERS[i]: float(short[i]) for i in range(3) if short[i]}
    change = _change(model, cluster, work, space, short)
    text = ", ".join(
        f"{name} memory by {value / GIB:,.1f} GiB" + (" per GPU" if name == "gpu" else " per node")
        for name, value in lacks.items()
    )
    return NoPlanError(
        f"{model.name} does not fit on {cluster.gpus} GPUs of {cluster.name} ({considered} plans tried): "
        f"the nearest plan, "
        f"{nearest.plan.describe()}, is short of {text}; {change}",
        short=lacks,
        plan=nearest.plan,
        change=change,
    )


def _change(model: Model, cluster: Cluster, work: Training, space: Space, short: NDArray[np.float64]) -> str:
    """The nearest changes that make a plan possible: another tier, more host memory or storage, more GPUs, a larger
    batch on them; tried in this order."""

    def fits(where: Cluster, allowed: Space, load: Training) -> bool:
        for plans in chunks(model, where, where.gpus, load, allowed):
            memory = training_memory(model, where, plans, sizes(model, plans, load.autodiff), load)
            if (~shortage(where, memory).any(0)).any():
                return True
        return False

    tiers = tuple(name for name in TIERS[1:] if cluster.tier(TIERS.index(name)) is not None)
    if set(tiers) - set(space.offload):
        wider = replace(space, offload=tiers)
        if fits(cluster, wider, work):
            return f"it fits with tensors offloaded to {' and '.join(tiers)}"
    found = []
    if not short[0]:
        found += [
            f"with {(cluster.capacities[i] + short[i]) / GIB:,.1f} GiB of {TIERS[i]} per node"
            for i in (1, 2)
            if short[i]
        ]
    grown = _more_gpus(model, cluster, work, space, fits)
    if found or grown:
        return "it fits " + ", or ".join([" and ".join(found)] * bool(found) + [grown] * bool(grown))
    return "no number of GPUs up to 64 times as many helps: use a smaller model or a shorter sequence"


def _more_gpus(model: Model, cluster: Cluster, work: Training, space: Space, fits: Callable[..., bool]) -> str:
    """The smallest power-of-two multiple of the nodes that fits, up to 64 (empty: none)."""
    quick = replace(space, zero=(0, 1, 3), schedules=("1f1b",), micro=1)
    group, *others = cluster.groups
    if others:
        return ""
    for factor in (2, 4, 8, 16, 32, 64):
        grown = replace(cluster, groups=(replace(group, nodes=group.nodes * factor),))
        if fits(grown, quick, work):
            return f"on {grown.gpus} GPUs"
        larger = replace(work, batch=work.batch * factor)
        if fits(grown, quick, larger):
            return f"on {grown.gpus} GPUs with a batch of {larger.batch}"
    return ""

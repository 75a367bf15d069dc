"""Costed plans: a plan with its predicted step time and memory, the order in which plans are ranked, and what rules a
plan out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import UsageError
from jcuts.plan.cost.memory import Memory
from jcuts.plan.cost.training_step import PARTS, estimate
from jcuts.plan.search.plan import KIND, RECOMPUTE, TIERS, Plan, Plans
from jcuts.plan.search.plan_space import CLASSES
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

RESOLUTION = 10**8
"""Times whose logarithms agree to 1/RESOLUTION are equal: sums of the same parts differ in their last bits only."""

LEAST = np.finfo(np.float64).tiny
"""Smallest quantity whose logarithm is taken."""


@dataclass(frozen=True)
class Ranked:
    """A costed plan.

    Attributes:
        parts: seconds, which add up to ``seconds``. memory: bytes per GPU (host and storage: per node).
        total_memory: bytes of all tiers of the whole cluster together.
        split: samples of the global batch per group of nodes, when groups differ (empty: an even split).
    """

    plan: Plan
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    gpu_parts: dict[str, float]
    total_memory: float = 0.0
    split: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self) | {"policy": self.plan.policy, "gpus": self.plan.gpus}

    @property
    def order(self) -> tuple:
        """Sort key: time, then tensor classes off the GPU (what need not move stays), then total memory, then
        simplicity (fewer mechanisms), then the settings themselves."""
        plan = self.plan
        away, *rest = machinery(plan)
        return (rounded(self.seconds), away, rounded(self.total_memory), *rest, plan.group, astuple(plan))

    @property
    def kind(self) -> tuple:
        """What makes plans different to a reader: axes, micro-batch, schedule, recomputation, tiers.  Plans that differ
        in chunks per stage, group, ZeRO stage or sequence parallelism alone are variants of one kind."""
        return tuple(getattr(self.plan, name) for name in KIND)


def machinery(plan: Plan) -> tuple[int, ...]:
    """Mechanisms that a plan needs, for ties: tensor classes off the GPU, recomputation, sequence parallelism, ZeRO
    stage, chunks per stage."""
    away = sum(getattr(plan, name) != "gpu" for name in CLASSES)
    return (away, RECOMPUTE.index(plan.recompute), int(plan.sequence_parallel), plan.zero, plan.chunks)


def rounded(value: float) -> int:
    """A positive quantity for comparison: equal for values that differ by rounding alone."""
    return round(math.log(max(value, LEAST)) * RESOLUTION)


def total_memory(cluster: Cluster, plans: Plans, memory: Memory) -> NDArray[np.float64]:
    """Bytes of all tiers together, over all GPUs and nodes of each plan."""
    gpus = plans["data"] * plans["tensor"] * plans["pipeline"] * plans["context"]
    nodes = np.ceil(gpus / cluster.gpus_per_node)
    return gpus * memory.gpu + nodes * (memory.host + memory.storage)


def shortage(cluster: Cluster, memory: Memory) -> NDArray[np.float64]:
    """Bytes that each tier is short by, rows GPU, host, storage; 0 where a plan fits."""
    return np.stack([np.maximum(memory.tier(i) - capacity, 0.0) for i, capacity in enumerate(cluster.capacities)])


def cost_plans(model: Model, cluster: Cluster, plans: Iterable[Plan], work: Training) -> list[Ranked]:
    """Costs given plans, whether they fit or not.  Raises: UsageError for a plan that does not divide the model or
    batch."""
    plans = list(plans)
    for plan in plans:
        reason = indivisible(model, plan, work)
        if reason:
            raise UsageError(f"{plan.describe()}: {reason}", plan=plan)
    return cost_arrays(model, cluster, Plans.of(plans), work)


def cost_arrays(model: Model, cluster: Cluster, plans: Plans, work: Training) -> list[Ranked]:
    """Costs plans that are known to divide the model and the batch."""
    found = estimate(model, cluster, plans, work)
    total, everything = found.time.total, total_memory(cluster, plans, found.memory)
    names = ("parameters", "gradients", "optimizer", "activations", "working")
    return [
        Ranked(
            plans.plan(i),
            float(total[i]),
            {part: float(getattr(found.time, part)[i]) for part in PARTS},
            {tier: float(found.memory.tier(k)[i]) for k, tier in enumerate(TIERS)},
            {name: float(getattr(found.memory, name)[i]) for name in names},
            float(everything[i]),
        )
        for i in range(len(plans))
    ]


def indivisible(model: Model, plan: Plan, work: Training) -> str:
    """Why a plan does not divide the model or the batch (empty: it does)."""
    if work.batch % (plan.data * plan.micro):
        return f"batch {work.batch} is not a multiple of data {plan.data} x micro {plan.micro}"
    if plan.pipeline * plan.chunks > model.layers:
        return f"{model.layers} layers are fewer than {plan.pipeline * plan.chunks} stage chunks"
    if model.tensor_limit % plan.tensor:
        if model.tensor_limit == 1:
            return f"tensor {plan.tensor}: {model.name} has no tensor axis that the planner could divide"
        return f"tensor {plan.tensor} does not divide {model.tensor_limit} heads"
    if model.experts % plan.expert:
        if model.experts == 1:
            return f"expert {plan.expert}: {model.name} has no expert axis that the planner could divide"
        return f"expert {plan.expert} does not divide {model.experts} experts"
    if plan.table * plan.row > 1 and not model.tables:
        return f"table {plan.table}, row {plan.row}: {model.name} has no embedding tables to divide"
    if plan.table > max(len(model.tables), 1):
        return f"table {plan.table}: {model.name} has {len(model.tables)} embedding tables"
    if model.context_limit % plan.context:
        return f"context {plan.context} does not divide the sequence"
    if (
        plan.schedule == "interleaved"
        and plan.pipeline > 1
        and (work.batch // (plan.data * plan.micro)) % plan.pipeline
    ):
        return "interleaving needs micro-batches in multiples of the stages"
    return ""

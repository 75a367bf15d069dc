"""Exhaustive search over plans, vectorised in NumPy: ranking, Pareto front, and why the neighbouring plans lost."""

from __future__ import annotations

import time as clock
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from jcuts.base.errors import JcutsError, UsageError
from jcuts.plan.cost.memory import Memory, training_memory
from jcuts.plan.cost.sharded_sizes import sizes
from jcuts.plan.cost.training_step import PARTS, estimate
from jcuts.plan.search import heterogeneous
from jcuts.plan.search.plan import RECOMPUTE, TIERS, Plan, Plans
from jcuts.plan.search.plan_space import Space, arrangements, chunks
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

KEPT = 64
"""Plans of each chunk that stay candidates (the fastest; the Pareto front is kept besides)."""


class NoPlanError(JcutsError):
    """No plan fits: ``short`` says by how many bytes per tier the nearest one fails, ``change`` what would help."""


@dataclass(frozen=True)
class Ranked:
    """A costed plan.  ``parts`` are seconds and add up to ``seconds``; ``memory`` is bytes per GPU (host and storage:
    per node)."""

    plan: Plan
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    gpu_parts: dict[str, float]
    split: tuple[int, ...] = ()
    """Samples of the global batch per group of nodes, when GPUs differ."""

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self) | {"policy": self.plan.policy, "gpus": self.plan.gpus}


@dataclass(frozen=True)
class Rejected:
    """A neighbour of the chosen plan and why it lost."""

    plan: Plan
    changed: str
    reason: str


@dataclass(frozen=True)
class Result:
    """Result of a search: ``ranked`` fastest first; ``considered`` plans, of which ``fitting`` fit."""

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


def shortage(cluster: Cluster, memory: Memory) -> NDArray[np.float64]:
    """Bytes that each tier is short by, rows GPU, host, storage; 0 where a plan fits."""
    capacities = [cluster.gpu.memory] + [tier.capacity if tier else 0.0 for tier in (cluster.host, cluster.storage)]
    return np.stack([np.maximum(memory.tier(i) - capacities[i], 0.0) for i in range(3)])


def cost_plans(model: Model, cluster: Cluster, plans: Iterable[Plan], work: Training) -> list[Ranked]:
    """Costs given plans, whether they fit or not.  Raises: UsageError for a plan that does not divide the model or
    batch."""
    plans = list(plans)
    for plan in plans:
        reason = _indivisible(model, plan, work)
        if reason:
            raise UsageError(f"{plan.describe()}: {reason}", plan=plan)
    return _ranked(model, cluster, Plans.of(plans), work)


def _ranked(model: Model, cluster: Cluster, plans: Plans, work: Training) -> list[Ranked]:
    found = estimate(model, cluster, plans, work)
    total = found.time.total
    names = ("parameters", "gradients", "optimizer", "activations", "working")
    return [
        Ranked(
            plans.plan(i),
            float(total[i]),
            {part: float(getattr(found.time, part)[i]) for part in PARTS},
            {tier: float(found.memory.tier(k)[i]) for k, tier in enumerate(TIERS)},
            {name: float(getattr(found.memory, name)[i]) for name in names},
        )
        for i in range(len(plans))
    ]


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
    """Costs every plan of ``space`` and ranks those that fit.

    Args: gpus: how many of the cluster's GPUs to use (default: all); top: plans to return; explain: rejected
    neighbours.
    Raises: UsageError for a GPU count that cannot be had; NoPlanError if nothing fits, with what is short, by how much,
        and the nearest feasible change.
    """
    space = space or Space()
    cluster = cluster.resized(gpus or cluster.gpus)
    begun = clock.perf_counter()
    kept: list[Ranked] = []
    front: list[Ranked] = []
    considered = fitting = 0
    reasons: dict[str, int] = {}
    nearest: tuple[float, Plan, NDArray] | None = None
    for plans in chunks(model, cluster, cluster.gpus, work, space):
        considered += len(plans)
        short = shortage(cluster, training_memory(model, cluster, plans, sizes(model, plans, work.autodiff), work))
        for row, name in enumerate(TIERS):
            count = int(np.count_nonzero(short[row]))
            if count:
                reasons[f"{name} memory"] = reasons.get(f"{name} memory", 0) + count
        fits = np.asarray(~short.any(0))
        if not fits.any():
            total = short.sum(0)
            i = int(np.argmin(total))
            if nearest is None or total[i] < nearest[0]:
                nearest = (float(total[i]), plans.plan(i), short[:, i])
            continue
        fitting += int(np.count_nonzero(fits))
        good = plans.take(fits)
        found = estimate(model, cluster, good, work)
        total = found.time.total
        quick = np.argsort(total, kind="stable")[: max(KEPT, top)]
        edge = _front(total, found.memory.gpu)
        chosen = np.unique(np.concatenate([quick, edge]))
        costed = _ranked(model, cluster, good.take(chosen), work)
        by_index = dict(zip(chosen.tolist(), costed, strict=True))
        kept += [by_index[i] for i in quick.tolist()]
        front += [by_index[i] for i in edge.tolist()]
        kept = _distinct(sorted(kept, key=_order))[: max(KEPT, top)]
    if not kept:
        raise _nothing(model, cluster, work, space, nearest, considered)
    if cluster.heterogeneous:
        kept = _split(model, cluster, work, kept)
    seconds = clock.perf_counter() - begun
    best = kept[0]
    rejected = _neighbours(model, cluster, work, best, explain)
    return Result(tuple(kept[:top]), tuple(pareto(front)), rejected, considered, fitting, seconds, reasons)


def _order(ranked: Ranked) -> tuple:
    """Time first; among equals the plan with fewer mechanisms, then the one that uses less memory."""
    plan = ranked.plan
    away = sum(getattr(plan, name) != "gpu" for name in ("parameters", "gradients", "optimizer", "activations"))
    machinery = (away, RECOMPUTE.index(plan.recompute), plan.sequence_parallel, plan.zero, plan.chunks)
    return (round(ranked.seconds, 9), *machinery, ranked.memory["gpu"], plan.describe())


def _distinct(plans: list[Ranked]) -> list[Ranked]:
    """Drops plans that differ from a better-placed one only in a setting without effect (equal axes, micro-batch and
    time)."""
    seen: set[tuple] = set()
    made = []
    for one in plans:
        plan = one.plan
        key = (f"{one.seconds:.6e}", plan.data, plan.tensor, plan.pipeline, plan.context, plan.expert, plan.micro)
        if key not in seen:
            seen.add(key)
            made.append(one)
    return made


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


def _split(model: Model, cluster: Cluster, work: Training, kept: list[Ranked]) -> list[Ranked]:
    """Costs candidates again with the batch split by the groups' speeds; those that cannot be split are out."""
    made = []
    for ranked in kept:
        split = heterogeneous.split(model, cluster, ranked.plan, work)
        if split is not None:
            made.append(replace(ranked, seconds=split.seconds, parts=split.parts, split=split.samples))
    if not made:
        raise NoPlanError(
            f"cluster {cluster.name}: no plan's replicas fit into whole groups of equal nodes", short={}, change=""
        )
    return sorted(made, key=_order)


def _indivisible(model: Model, plan: Plan, work: Training) -> str:
    """Why a plan does not divide (empty: it does)."""
    if work.batch % (plan.data * plan.micro):
        return f"batch {work.batch} is not a multiple of data {plan.data} x micro {plan.micro}"
    if plan.pipeline * plan.chunks > model.layers:
        return f"{model.layers} layers are fewer than {plan.pipeline * plan.chunks} stage chunks"
    if model.tensor_limit % plan.tensor:
        return f"tensor {plan.tensor} does not divide {model.tensor_limit} heads"
    if model.experts % plan.expert:
        return f"expert {plan.expert} does not divide {model.experts} experts"
    if model.context_limit % plan.context:
        return f"context {plan.context} does not divide the sequence"
    if (
        plan.schedule == "interleaved"
        and plan.pipeline > 1
        and (work.batch // (plan.data * plan.micro)) % plan.pipeline
    ):
        return "interleaving needs micro-batches in multiples of the stages"
    return ""


def neighbours(plan: Plan) -> list[tuple[str, Plan]]:
    """Plans one step away: a factor 2 moved between two axes, the micro-batch, or one setting changed."""
    made: list[tuple[str, Plan]] = []
    axes = ("data", "tensor", "pipeline", "context")
    for up in axes:
        for down in axes:
            if up != down and getattr(plan, down) % 2 == 0:
                change = {up: getattr(plan, up) * 2, down: getattr(plan, down) // 2}
                data = change.get("data", plan.data)
                expert = plan.expert if data % plan.expert == 0 else 1
                made.append((f"{up} x2, {down} /2", replace(plan, **change, expert=expert, schedule="1f1b", chunks=1)))
    made.append(("micro x2", replace(plan, micro=plan.micro * 2, group=1)))
    if plan.micro % 2 == 0:
        made.append(("micro /2", replace(plan, micro=plan.micro // 2, group=1)))
    for name, values in (
        ("recompute", ("none", "selective", "full")),
        ("zero", (0, 1, 2, 3)),
        ("parameters", TIERS),
        ("optimizer", TIERS),
        ("activations", TIERS),
    ):
        for value in values:
            if name == "zero" and plan.data * plan.context == 1:
                continue  # nothing to shard over
            if value != getattr(plan, name):
                made.append((f"{name} {value}", replace(plan, **{name: value})))
    if plan.pipeline > 1:
        for schedule, count in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
            if schedule != plan.schedule:
                made.append((f"schedule {schedule}", replace(plan, schedule=schedule, chunks=count)))
    if plan.tensor > 1:
        made.append(
            (
                "sequence parallelism " + ("off" if plan.sequence_parallel else "on"),
                replace(plan, sequence_parallel=not plan.sequence_parallel),
            )
        )
    return made


def _neighbours(model: Model, cluster: Cluster, work: Training, best: Ranked, limit: int) -> tuple[Rejected, ...]:
    """Neighbours with the reason each lost: it does not divide, does not fit, or is slower, and by which part."""
    made: list[tuple[float, Rejected]] = []
    for changed, plan in neighbours(best.plan):
        reason = _indivisible(model, plan, work)
        if reason:
            made.append((np.inf, Rejected(plan, changed, reason)))
            continue
        if any(
            getattr(plan, name) == tier and cluster.tier(TIERS.index(tier)) is None
            for name in ("parameters", "gradients", "optimizer", "activations")
            for tier in TIERS[1:]
        ):
            made.append((np.inf, Rejected(plan, changed, "the cluster has no such tier")))
            continue
        plans = Plans.of([plan])
        found = estimate(model, cluster, plans, work)
        short = shortage(cluster, found.memory)[:, 0]
        seconds = float(found.time.total[0])
        if short.any():
            lacks = ", ".join(f"{TIERS[i]} memory short by {short[i] / 2**30:.1f} GiB" for i in range(3) if short[i])
            made.append((1e9 + float(short.sum()), Rejected(plan, changed, lacks)))
            continue
        parts = {part: float(getattr(found.time, part)[0]) - best.parts[part] for part in PARTS}
        worst = max(parts, key=lambda part: parts[part])
        if seconds > best.seconds * (1 + 1e-9):
            reason = f"{seconds / best.seconds - 1:+.1%}: {worst} {parts[worst]:+.3g} s"
        elif seconds < best.seconds * (1 - 1e-9) and not best.split:
            reason = f"{seconds / best.seconds - 1:+.1%}, but outside of what was searched"
        else:
            reason = (
                "equal time; takes more memory or machinery" if not best.split else "equal before the batch is split"
            )
        made.append((seconds, Rejected(plan, changed, reason)))
    return tuple(rejected for _, rejected in sorted(made, key=lambda entry: entry[0])[:limit])


def _nothing(
    model: Model,
    cluster: Cluster,
    work: Training,
    space: Space,
    nearest: tuple[float, Plan, NDArray] | None,
    considered: int,
) -> NoPlanError:
    """The error for an empty result: what is short by how much, and the smallest change found that helps."""
    if nearest is None:
        options = len(arrangements(model, cluster.gpus, space))
        return NoPlanError(
            f"{model.name} on {cluster.gpus} GPUs of {cluster.name}: no plan divides: "
            f"batch {work.batch}, {model.layers} layers, "
            f"{model.tensor_limit} heads ({options} arrangements of the GPUs tried): change the batch or the GPU count",
            short={},
            change="batch or GPU count",
        )
    _, plan, short = nearest
    lacks = {TIERS[i]: float(short[i]) for i in range(3) if short[i]}
    change = _change(model, cluster, work, space)
    text = ", ".join(
        f"{name} memory by {value / 2**30:.1f} GiB" + (" per GPU" if name == "gpu" else " per node")
        for name, value in lacks.items()
    )
    return NoPlanError(
        f"{model.name} does not fit on {cluster.gpus} GPUs of {cluster.name} ({considered} plans tried): "
        f"the nearest plan, "
        f"{plan.describe()}, is short of {text}; {change}",
        short=lacks,
        plan=plan,
        change=change,
    )


def _change(model: Model, cluster: Cluster, work: Training, space: Space) -> str:
    """The nearest change that makes a plan possible: another tier, more GPUs, or a smaller batch; tried in this
    order."""

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
    quick = replace(space, zero=(0, 1, 3), schedules=("1f1b",), micro=1)
    if len(cluster.groups) == 1:
        group = cluster.groups[0]
        for factor in (2, 4, 8, 16, 32, 64):
            grown = replace(cluster, groups=(replace(group, nodes=group.nodes * factor),))
            if fits(grown, quick, work):
                return f"it fits on {grown.gpus} GPUs"
            larger = replace(work, batch=work.batch * factor)
            if fits(grown, quick, larger):
                return f"it fits on {grown.gpus} GPUs with a batch of {larger.batch}"
    return "no number of GPUs up to 64 times as many helps: use a smaller model or a shorter sequence"

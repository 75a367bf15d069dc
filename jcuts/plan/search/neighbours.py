"""Local comparison of plans: neighbours that differ in one setting, and why each of them is not chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jcuts.plan.cost.training_step import PARTS, estimate
from jcuts.plan.search.plan import RECOMPUTE, TIERS, Plan, Plans
from jcuts.plan.search.plan_space import CLASSES, Space
from jcuts.plan.search.ranked import Ranked, indivisible, machinery, rounded, shortage, total_memory
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

LATE = 10**9
"""Sort key (seconds) behind every plan that fits."""

AXES = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True)
class Rejected:
    """A neighbour of the chosen plan and why it lost.

    ``gain``: the share of the step's time that the neighbour saves (negative: it costs that much; None: it cannot run).
    """

    plan: Plan
    changed: str
    reason: str
    gain: float | None = None


def neighbours(plan: Plan, batch: int, *, tables: bool = False, experts: bool = False) -> list[tuple[str, Plan]]:
    """Plans one step away: a factor 2 moved between two axes, the micro-batch, or one setting changed.

    ``tables``, ``experts``: the model has embedding tables, or experts, to lay over the data axis in another way.

    One thing changes at a time: the scheduling policy (all micro-batches share a visit to a layer, or one, or between)
    stays the same policy when the number of micro-batches changes.
    """
    made: list[tuple[str, Plan]] = []
    for up in AXES:
        for down in AXES:
            if up != down and getattr(plan, down) % 2 == 0:
                change = {up: getattr(plan, up) * 2, down: getattr(plan, down) // 2}
                made.append((f"{up} x2, {down} /2", _regrouped(plan, batch, **change)))
    made += _on_the_data_axis(plan, *(("table", "row") if tables else ()), *(("expert",) if experts else ()))
    made.append(("micro x2", _regrouped(plan, batch, micro=plan.micro * 2)))
    if plan.micro % 2 == 0:
        made.append(("micro /2", _regrouped(plan, batch, micro=plan.micro // 2)))
    for name, values in (("recompute", RECOMPUTE), ("zero", (0, 1, 2, 3)), *((name, TIERS) for name in CLASSES)):
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
        switched = not plan.sequence_parallel
        made.append((f"sequence parallelism {'on' if switched else 'off'}", replace(plan, sequence_parallel=switched)))
    count = micro_batches(plan, batch)
    if plan.streams and count > 1:
        for name, group in (("activation-resident", 1), ("parameter-resident", count)):
            if group != plan.group:
                made.append((f"policy {name}", replace(plan, group=group)))
    return made


def _on_the_data_axis(plan: Plan, *names: str) -> list[tuple[str, Plan]]:
    """Twice and half the size of axes that lie on the data axis, and a factor 2 moved between tables and rows."""
    changes = [{name: getattr(plan, name) * 2} for name in names]
    changes += [{name: getattr(plan, name) // 2} for name in names if getattr(plan, name) % 2 == 0]
    if "table" in names:
        changes += [
            {up: getattr(plan, up) * 2, down: getattr(plan, down) // 2}
            for up, down in (("table", "row"), ("row", "table"))
            if getattr(plan, down) % 2 == 0
        ]
        over = plan.table * plan.row
        changes += [{"row": over, "table": 1}] * (plan.table > 2)
    made = []
    for change in changes:
        sizes = {name: change.get(name, getattr(plan, name)) for name in ("table", "row", "expert")}
        if plan.data % (sizes["table"] * sizes["row"]) or plan.data % sizes["expert"]:
            continue
        factors = {name: (size, getattr(plan, name)) for name, size in change.items()}
        label = ", ".join(
            f"{n} x{new // old}" if new > old else f"{n} /{old // new}" for n, (new, old) in factors.items()
        )
        made.append((label, replace(plan, **change)))
    return made


def micro_batches(plan: Plan, batch: int) -> int:
    """Micro-batches per step and data-parallel group."""
    return max(batch // (plan.data * plan.micro), 1)


def _regrouped(plan: Plan, batch: int, **change: int) -> Plan:
    """A plan with other sizes: the same policy, a schedule that its pipeline has, an expert axis that divides."""
    before = micro_batches(plan, batch)
    data = change.get("data", plan.data)
    expert = plan.expert if data % plan.expert == 0 else 1
    tables = {} if data % (plan.table * plan.row) == 0 else {"table": 1, "row": 1}
    if change.get("pipeline", plan.pipeline) == 1 or plan.pipeline == 1:
        change |= {"chunks": 1}
        tables |= {"schedule": "1f1b"}
    made = replace(plan, expert=expert, **change, **tables)
    count = micro_batches(made, batch)
    same = 1 if plan.group == 1 else count if plan.group == before else max(1, round(count**0.5))
    return replace(made, group=min(same, count))


def explain_neighbours(
    model: Model, cluster: Cluster, work: Training, best: Ranked, space: Space, limit: int | None
) -> tuple[Rejected, ...]:
    """The neighbours of a plan, fastest first, with the reason that each lost: it does not divide, does not fit, or is
    slower, and by which parts of the step.  A setting without effect on time and memory (selective recomputation of a
    model without an attention core) is no neighbour.

    Args: limit: neighbours to return (None: all).
    """
    made: list[tuple[float, Rejected]] = []
    near = neighbours(best.plan, work.batch, tables=bool(model.tables), experts=model.experts > 1)
    for changed, plan in near:
        reason = indivisible(model, plan, work)
        if reason:
            made.append((np.inf, Rejected(plan, changed, reason)))
            continue
        missing = {getattr(plan, name) for name in CLASSES} - {"gpu"}
        missing = {tier for tier in missing if cluster.tier(TIERS.index(tier)) is None}
        if missing:
            made.append((np.inf, Rejected(plan, changed, f"the cluster has no [{sorted(missing)[0]}]")))
            continue
        plans = Plans.of([plan])
        found = estimate(model, cluster, plans, work)
        short = shortage(cluster, found.memory)[:, 0]
        seconds = float(found.time.total[0])
        if short.any():
            lacks = ", ".join(f"{TIERS[i]} memory short by {short[i] / GIB:.1f} GiB" for i in range(3) if short[i])
            made.append((LATE + float(short.sum()), Rejected(plan, changed, lacks)))
            continue
        parts = {part: float(getattr(found.time, part)[0]) for part in PARTS}
        held = {tier: float(found.memory.tier(k)[0]) for k, tier in enumerate(TIERS)}
        if parts == best.parts and held == best.memory:
            continue
        memory = float(total_memory(cluster, plans, found.memory)[0])
        reason = compare(best, plan, seconds, parts, memory, space)
        made.append((seconds, Rejected(plan, changed, reason, 1 - seconds / best.seconds)))
    return tuple(rejected for _, rejected in sorted(made, key=lambda entry: entry[0])[:limit])


def compare(best: Ranked, plan: Plan, seconds: float, parts: dict[str, float], memory: float, space: Space) -> str:
    """One sentence: how much slower a plan is than ``best`` and which parts of the step make it so; for equal times,
    what it takes more of."""
    more = {part: value - best.parts[part] for part, value in parts.items()}
    change = _percent(seconds / best.seconds - 1)
    if rounded(seconds) > rounded(best.seconds):
        return f"{change}: {_largest(more)}"
    if rounded(seconds) < rounded(best.seconds):
        bound = outside(plan, space)
        saved = _largest({part: -value for part, value in more.items()}, sign="-")
        return f"{change}: {saved}" + (f"; not searched: {bound}" if bound else "")
    if rounded(memory) > rounded(best.total_memory):
        return f"equal time; {_size(memory - best.total_memory)} more memory over all tiers"
    if rounded(memory) < rounded(best.total_memory):
        return f"equal time; {_size(best.total_memory - memory)} less memory over all tiers"
    return f"equal time and memory{_machinery(best.plan, plan)}"


def _size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if 20 * count >= GIB else f"{count / 2**20:,.3g} MiB"


def _machinery(best: Plan, plan: Plan) -> str:
    """What a plan needs more of than one as fast and as small (empty: nothing)."""
    names = ("more tensor classes off the GPU", "more recomputation", "sequence parallelism", "a higher ZeRO stage")
    names += ("more chunks per stage",)
    pairs = zip(names, machinery(best), machinery(plan), strict=True)
    return next((f"; {name}" for name, mine, other in pairs if other > mine), "")


def _percent(change: float) -> str:
    if change >= TIMES:
        return f"{1 + change:.3g} times as long"
    return f"{change:+.1%}" if abs(change) * 2000 >= 1 else f"{100 * change:+.2g}%"


def _largest(parts: dict[str, float], sign: str = "+") -> str:
    """The largest part of a difference, and where they are at least a fifth of it the second and the largest part of
    the opposite sign, which it is offset against."""
    first, second, *_, last = sorted(parts, key=lambda part: -parts[part])
    shown = [first] + ([second] if parts[second] > NOTABLE * parts[first] else [])
    if -parts[last] > NOTABLE * parts[first]:
        shown.append(last)
    opposite = "-" if sign == "+" else "+"
    return ", ".join(f"{part} {sign if parts[part] > 0 else opposite}{_time(abs(parts[part]))}" for part in shown)


TIMES = 4.0
"""Relative difference from which on a factor says more than a percentage."""

NOTABLE = 0.2
"""Share of the largest part of a difference from which on another part is named beside it."""


def _time(seconds: float) -> str:
    for unit, per_second in (("s", 1), ("ms", 1000), ("us", 10**6)):
        value = seconds * per_second
        if abs(value) >= 1 or unit == "us":
            break
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def outside(plan: Plan, space: Space) -> str:
    """The bound of a search space that leaves a plan out (empty: the plan is inside)."""
    for name in ("tensor", "pipeline", "context", "expert", "micro"):
        most = getattr(space, name)
        if most is not None and getattr(plan, name) > most:
            return f"{name} is at most {most}"
    if plan.chunks > space.chunks:
        return f"chunks is at most {space.chunks}"
    for name, allowed in (("schedule", space.schedules), ("recompute", space.recompute), ("zero", space.zero)):
        if getattr(plan, name) not in allowed and not (name == "schedule" and plan.pipeline == 1):
            return f"{name} is one of {', '.join(map(str, allowed))}"
    for name in CLASSES:
        if getattr(plan, name) not in ("gpu", *space.offload):
            return f"nothing is offloaded to {getattr(plan, name)}"
    return ""

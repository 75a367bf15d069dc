"""HTML report of a planning run: ranked plans with breakdown bars, and a timeline per device and tier."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jcuts.plan.html_parts import COLOURS, PASSES, Span, bar, document, legend, placement, svg, table
from jcuts.plan.search.exhaustive import Result
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.ranked import Ranked
from jcuts.plan.search.stage_layout import of_training
from jcuts.plan.search.tier_placement import Placement
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

MEMORY = {
    "parameters": "#2f6fb0",
    "gradients": "#3cba9f",
    "optimizer": "#5b8c5a",
    "activations": "#e8b04a",
    "working": "#999999",
    "reserved": "#444444",
}


def timeline(ranked: Ranked, work: Training, *, most: int = 24) -> list[Span]:
    """One step on every stage, the optimiser, and each tier that the plan uses.

    Each stage does its passes in the order of its schedule, each when the neighbour has handed its input on.  More
    micro-batches than ``most`` are drawn in equal bundles, whose first micro-batch is handed on when it is done; the
    chunks of an interleaved stage are one pass, handed on after its share.  The whole is drawn to the priced length.
    Tier lanes show the transfers beside the computation that hides them.
    """
    plan, parts = ranked.plan, ranked.parts
    stages = min(plan.pipeline, 16)
    count = work.batch // (plan.data * plan.micro)
    bundles = min(count, max(most, stages))
    tail = parts["gradients"] + parts["optimizer"] + parts["overhead"] + parts["tiers"]
    body = ranked.seconds - tail
    times = _schedule(
        plan.schedule, stages, bundles, 3 if plan.recompute == "full" else 2, count / bundles * plan.chunks
    )
    scale = body / max(end for _, _, _, end in times)
    spans: list[Span] = []
    for stage in range(stages):
        lane, at = f"stage {stage + 1}", 0.0
        for where, label, start, end in times:
            if where != stage:
                continue
            if start * scale - at > 1e-9 * ranked.seconds:
                spans.append(Span(lane, at, start * scale, "idle", "idle"))
            spans.append(Span(lane, start * scale, end * scale, label.split()[0], label))
            at = end * scale
        if body - at > 1e-9 * ranked.seconds:
            spans.append(Span(lane, at, body, "idle", "idle"))
    at = body
    for part in ("tiers", "gradients", "optimizer", "overhead"):
        if parts[part]:
            spans += [Span(f"stage {stage + 1}", at, at + parts[part], part, part) for stage in range(stages)]
            at += parts[part]
    for tier in ("host", "storage"):
        used = [name for name in ("parameters", "gradients", "activations") if getattr(plan, name) == tier]
        if used:
            spans.append(Span(tier, 0.0, body + parts["tiers"], "tiers", "streams " + ", ".join(used)))
        if plan.optimizer == tier:
            end = body + parts["tiers"] + parts["gradients"]
            spans.append(Span(tier, end, end + parts["optimizer"], "optimizer", "optimiser state in and out"))
    return spans


def _schedule(
    name: str, stages: int, count: int, backward: float, shares: float
) -> list[tuple[int, str, float, float]]:
    """(stage, pass, start, end) of every pass; a forward pass takes 1, a backward pass ``backward``.

    A pass may begin when the neighbour is ``1 / shares`` through the pass that feeds it.
    """
    orders = [_order(name, stages, stage, count) for stage in range(stages)]
    begun: dict[tuple[str, int, int], float] = {}
    free, done = [0.0] * stages, [0] * stages
    made = []
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            if done[stage] == len(orders[stage]):
                continue
            kind, index = orders[stage][done[stage]]
            length = 1.0 if kind == "forward" else backward
            before = stage - 1 if kind == "forward" else stage + 1
            start = free[stage]
            if 0 <= before < stages:
                if (kind, before, index) not in begun:
                    continue
                start = max(start, begun[kind, before, index] + length / shares)
            begun[kind, stage, index] = start
            free[stage], done[stage] = start + length, done[stage] + 1
            made.append((stage, f"{kind} {index + 1}", start, start + length))
    return made


def _order(schedule: str, stages: int, stage: int, count: int) -> list[tuple[str, int]]:
    """Passes of one stage in the order they run."""
    if schedule == "gpipe":
        return [("forward", i) for i in range(count)] + [("backward", i) for i in range(count)]
    warm = min(stages - stage - 1, count)
    order = [("forward", i) for i in range(warm)]
    for i in range(count - warm):
        order += [("forward", warm + i), ("backward", i)]
    return order + [("backward", i) for i in range(count - warm, count)]


def page(
    model: Model,
    cluster: Cluster,
    work: Training,
    result: Result,
    *,
    plans: int = 10,
    placed: Placement | None = None,
) -> str:
    """A self-contained HTML page (no scripts, no external files)."""
    e = html.escape
    best = result.best
    shown = result.ranked[:plans]
    used = [part for part in COLOURS if any(ranked.parts[part] > 0 for ranked in shown)]
    intro = (
        f"Batch {work.batch} {e(model.sample)}s; {model.total_parameters:.4g} parameters; "
        f"{result.considered:,} plans considered in {result.seconds:.2f} s ({result.plans_per_second:,.0f} a second), "
        f"{result.fitting:,} fit."
    )
    sections = [
        (
            "Plans",
            f"<p>{legend(used, COLOURS)}<br>Memory: {legend(MEMORY, MEMORY)}</p>{_plans(shown, cluster)}"
            "<p>d data, t tensor, p pipeline, c context, e expert, b micro-batch; P parameters, G gradients, "
            "O optimiser, A activations; hover for every setting.</p>",
        ),
        ("Timeline of the best plan", _timeline_section(best, work)),
    ]
    if placed:
        sections.append(("Placement of the best plan", placement(of_training(best.plan, placed, model.layers))))
    lost = [(_described(r.plan, r.changed), e(r.reason)) for r in result.rejected]
    front = [
        (
            _described(r.plan, r.plan.short()),
            f"{r.seconds:.4g}",
            f"{r.memory['gpu'] / GIB:.1f}",
            str(r.plan.gpus),
        )
        for r in result.pareto[:40]
    ]
    sections += [
        ("Why the neighbours lost", table(("change", "reason"), lost)),
        (
            "Pareto list: time, memory, GPUs",
            table(("plan", "s/step", "GiB/GPU", "GPUs"), front, right=(1, 2, 3)),
        ),
    ]
    return document(f"{model.name} on {best.plan.gpus} GPUs of {cluster.name}", intro, sections, cluster)


def _described(plan: Plan, text: str) -> str:
    return f'<span title="{html.escape(plan.describe())}">{html.escape(text)}</span>'


def _timeline_section(best: Ranked, work: Training) -> str:
    """The best plan's timeline and what it shows."""
    spans = timeline(best, work)
    drawn = len({span.label for span in spans if span.kind == "forward"})
    count = work.batch // (best.plan.data * best.plan.micro)
    note = f"{count} micro-batch{'es' if count > 1 else ''} of {best.plan.micro}" + (
        f", drawn as {drawn} bundles" if drawn < count else ""
    )
    if best.plan.pipeline > 16:
        note += f"; the first 16 of {best.plan.pipeline} stages"
    if best.plan.schedule == "interleaved":
        note += f"; the {best.plan.chunks} chunks of a stage are drawn as one"
    kinds = list(dict.fromkeys(span.kind for span in spans))
    return (
        f"<p>{html.escape(note)}. Passes include recomputation and the communication of their axes.<br>"
        f"{legend(kinds, COLOURS | PASSES)}</p>{svg(spans)}"
    )


def _plans(shown: Sequence[Ranked], cluster: Cluster) -> str:
    """The ranked plans with bars of time, to one scale, and of memory."""
    slowest = max(ranked.seconds for ranked in shown)
    columns = ("#", "plan", "s/step", "where the time goes", "GiB/GPU", f"of {cluster.gpu.memory / GIB:.4g} GiB")
    rows = [_row(position, ranked, slowest, cluster) for position, ranked in enumerate(shown, 1)]
    return table((*columns, "host, disk<br>GiB/node"), rows, right=(0, 2, 4, 6))


def _row(position: int, ranked: Ranked, slowest: float, cluster: Cluster) -> tuple[str, ...]:
    times = {name: f"{name}: {value:.4g} s ({value / ranked.seconds:.1%})" for name, value in ranked.parts.items()}
    amounts = ranked.gpu_parts | {"reserved": cluster.gpu.reserved}
    sizes = {name: f"{name}: {amount / GIB:.2f} GiB" for name, amount in amounts.items()}
    plan = ranked.plan
    policy = "" if plan.policy == "resident" else f"<br><small>{html.escape(plan.policy)}</small>"
    return (
        str(position),
        _described(plan, plan.short()) + policy,
        f"{ranked.seconds:.4g}",
        bar(ranked.parts, slowest, COLOURS, times, frame=" time"),
        f"{ranked.memory['gpu'] / GIB:.1f}",
        bar(amounts, cluster.gpu.memory, MEMORY, sizes, frame=" frame"),
        f"{ranked.memory['host'] / GIB:,.0f}, {ranked.memory['storage'] / GIB:,.0f}",
    )

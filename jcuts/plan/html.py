"""The HTML page of a planning run: ranked plans with breakdown bars, and a timeline per device and tier."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.plan.blocks import Model
from jcuts.plan.cluster import Cluster
from jcuts.plan.search import Ranked, Result
from jcuts.plan.workload import Training

COLOURS = {
    "compute": "#2f6fb0",
    "recompute": "#7fb0dd",
    "tensor": "#d9822b",
    "context": "#e8b04a",
    "expert": "#b5651d",
    "pipeline": "#8e5ea2",
    "gradients": "#3cba9f",
    "launch": "#999999",
    "bubble": "#dddddd",
    "tiers": "#c45850",
    "optimizer": "#5b8c5a",
    "overhead": "#444444",
}


@dataclass(frozen=True)
class Span:
    """Something that a lane does from ``start`` to ``end`` (seconds)."""

    lane: str
    start: float
    end: float
    kind: str
    label: str


def timeline(ranked: Ranked, work: Training, *, most: int = 8) -> list[Span]:
    """One step on every stage, the optimiser, and each tier that the plan uses.

    Forward and backward of each micro-batch in the order of the schedule (1F1B; GPipe: all forward first; interleaving
    is drawn as 1F1B with its smaller bubble).  More micro-batches than ``most`` are drawn in equal bundles.  Tier lanes
    show the transfers beside the computation that hides them.
    """
    plan, parts = ranked.plan, ranked.parts
    stages = min(plan.pipeline, 16)
    count = work.batch // (plan.data * plan.micro)
    bundles = max(1, min(count, max(most, stages)))
    tail = parts["gradients"] + parts["optimizer"] + parts["overhead"] + parts["tiers"]
    body = ranked.seconds - tail
    # The slots that fit the priced bubble: (bundles + warm) slots, where warm/bundles = bubble/steady.
    steady = body - parts["bubble"]
    slot = steady / bundles
    delay = parts["bubble"] / max(stages - 1, 1) if stages > 1 else 0.0
    forward = slot / (4 if plan.recompute == "full" else 3)
    spans: list[Span] = []
    for stage in range(stages):
        lane = f"stage {stage + 1}"
        offset = stage * delay / 2
        free = offset
        order = _order(plan.schedule, stages, stage, bundles)
        for kind, index in order:
            length = forward if kind == "forward" else slot - forward
            spans.append(
                Span(lane, free, free + length, "compute" if kind == "forward" else "recompute", f"{kind} {index + 1}")
            )
            free += length
        spans.append(Span(lane, free, body, "bubble", "idle")) if body - free > 1e-9 * ranked.seconds else None
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


def _order(schedule: str, stages: int, stage: int, count: int) -> list[tuple[str, int]]:
    """Passes of one stage in the order they run."""
    if schedule == "gpipe":
        return [("forward", i) for i in range(count)] + [("backward", i) for i in range(count)]
    warm = min(stages - stage - 1, count)
    order = [("forward", i) for i in range(warm)]
    for i in range(count - warm):
        order += [("forward", warm + i), ("backward", i)]
    return order + [("backward", i) for i in range(count - warm, count)]


def page(model: Model, cluster: Cluster, work: Training, result: Result, *, plans: int = 10) -> str:
    """A self-contained page (no scripts, no outside files)."""
    e = html.escape
    title = f"{model.name} on {result.best.plan.gpus} GPUs of {cluster.name}"
    rows = "".join(
        _row(position, ranked, result.best.seconds) for position, ranked in enumerate(result.ranked[:plans], 1)
    )
    front = "".join(
        f"<tr><td>{e(r.plan.describe())}</td><td>{r.seconds:.4g}</td>"
        f"<td>{r.memory['gpu'] / 2**30:.1f}</td><td>{r.plan.gpus}</td></tr>"
        for r in result.pareto[:40]
    )
    lost = "".join(f"<tr><td>{e(r.changed)}</td><td>{e(r.reason)}</td></tr>" for r in result.rejected)
    legend = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{e(title)}</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222 }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .25em .6em; border-bottom: 1px solid #eee }}
.bar {{ display: flex; height: 14px; min-width: 220px }} .key {{ margin-right: 1em }}
.key i {{ display: inline-block; width: 12px; height: 12px; margin-right: .3em }}
svg text {{ font: 11px system-ui, sans-serif }}
</style></head><body>
<h1>{e(title)}</h1>
<p>Batch {work.batch} {e(model.sample)}s; {model.total_parameters:.4g} parameters;
{result.considered:,} plans considered in
{result.seconds:.2f} s ({result.plans_per_second:,.0f} per second), {result.fitting:,} fit.</p>
<p>{legend}</p>
<h2>Plans</h2>
<table><tr><th>#</th><th>plan</th><th>policy</th><th>s/step</th><th>GiB/GPU</th>
<th>where the time goes</th></tr>{rows}</table>
<h2>Timeline of the best plan</h2>{_svg(timeline(result.best, work))}
<h2>Pareto list: time, memory, GPUs</h2>
<table><tr><th>plan</th><th>s/step</th><th>GiB/GPU</th><th>GPUs</th></tr>{front}</table>
<h2>Why the neighbours lost</h2><table><tr><th>change</th><th>reason</th></tr>{lost}</table>
</body></html>
"""


def _row(position: int, ranked: Ranked, best: float) -> str:
    width = 100 * best / ranked.seconds if ranked.seconds else 0
    pieces = "".join(
        f'<span title="{name}: {value:.4g} s" '
        f'style="width:{100 * value / ranked.seconds:.2f}%;background:{COLOURS[name]}"></span>'
        for name, value in ranked.parts.items()
        if value > 0
    )
    return (
        f"<tr><td>{position}</td><td>{html.escape(ranked.plan.describe())}</td><td>{html.escape(ranked.plan.policy)}</td>"
        f"<td>{ranked.seconds:.4g}</td><td>{ranked.memory['gpu'] / 2**30:.1f}</td>"
        f'<td><div class="bar" data-share="{width:.1f}">{pieces}</div></td></tr>'
    )


def _svg(spans: Sequence[Span], width: int = 1080, height: int = 22) -> str:
    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max(span.end for span in spans)
    left = 70
    scale = (width - left) / end
    parts = []
    for row, lane in enumerate(lanes):
        y = row * (height + 4)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(lane)}</text>')
        for span in spans:
            if span.lane == lane:
                x, w = left + span.start * scale, max((span.end - span.start) * scale, 0.5)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{COLOURS[span.kind]}" '
                    f'stroke="white" stroke-width="0.5">'
                    f"<title>{html.escape(span.label)}: {span.start:.4g} to {span.end:.4g} s</title></rect>"
                )
    total = len(lanes) * (height + 4)
    parts.append(
        f'<text x="{left}" y="{total + 14}">0</text>'
        f'<text x="{width}" y="{total + 14}" text-anchor="end">{end:.4g} s</text>'
    )
    return f'<svg width="{width}" height="{total + 20}" role="img">{"".join(parts)}</svg>'

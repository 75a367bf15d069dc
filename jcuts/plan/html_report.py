"""HTML report of a planning run: ranked plans with breakdown bars, and a timeline per device and tier."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jcuts.plan.search.exhaustive import Result
from jcuts.plan.search.ranked import Ranked
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

COLOURS = {
    "compute": "#2f6fb0",
    "recompute": "#7fb0dd",
    "tensor": "#d9822b",
    "context": "#e8b04a",
    "expert": "#b5651d",
    "pipeline": "#8e5ea2",
    "embedding": "#c977b5",
    "gradients": "#3cba9f",
    "launch": "#999999",
    "bubble": "#dddddd",
    "tiers": "#c45850",
    "optimizer": "#5b8c5a",
    "overhead": "#444444",
}
PASSES = {"forward": "#2f6fb0", "backward": "#173f6b", "idle": "#dddddd"}
"""Colours of the timeline beside those of the parts."""
MEMORY = {
    "parameters": "#2f6fb0",
    "gradients": "#3cba9f",
    "optimizer": "#5b8c5a",
    "activations": "#e8b04a",
    "working": "#999999",
    "reserved": "#444444",
}


@dataclass(frozen=True)
class Span:
    """An activity of a timeline lane, from ``start`` to ``end`` (seconds)."""

    lane: str
    start: float
    end: float
    kind: str
    label: str


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


def page(model: Model, cluster: Cluster, work: Training, result: Result, *, plans: int = 10) -> str:
    """A self-contained HTML page (no scripts, no external files)."""
    e = html.escape
    best = result.best
    title = f"{model.name} on {best.plan.gpus} GPUs of {cluster.name}"
    shown = result.ranked[:plans]
    slowest = max(ranked.seconds for ranked in shown)
    used = [part for part in COLOURS if any(ranked.parts[part] > 0 for ranked in shown)]
    rows = "".join(_row(position, ranked, slowest, cluster) for position, ranked in enumerate(shown, 1))
    front = "".join(
        f'<tr><td title="{e(r.plan.describe())}">{e(r.plan.short())}</td><td class="n">{r.seconds:.4g}</td>'
        f'<td class="n">{r.memory["gpu"] / GIB:.1f}</td><td class="n">{r.plan.gpus}</td></tr>'
        for r in result.pareto[:40]
    )
    lost = "".join(
        f'<tr><td title="{e(r.plan.describe())}">{e(r.changed)}</td><td>{e(r.reason)}</td></tr>'
        for r in result.rejected
    )
    sources = "".join(f"<tr><td>{e(key)}</td><td>{e(str(text))}</td></tr>" for key, text in cluster.sources.items())
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
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{e(title)}</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .25em .6em; border-bottom: 1px solid #eee; vertical-align: top }}
.n {{ text-align: right; white-space: nowrap }}
.bar {{ display: flex; height: 14px; margin-top: 4px }} .time {{ width: 260px }} .memory {{ width: 150px }}
.frame {{ background: #f3f3f3; width: 140px }}
.key {{ margin-right: 1em; white-space: nowrap }}
.key i {{ display: inline-block; width: 12px; height: 12px; margin-right: .3em }}
svg {{ max-width: 100%; height: auto }} svg text {{ font: 11px system-ui, sans-serif }}
</style></head><body>
<h1>{e(title)}</h1>
<p>Batch {work.batch} {e(model.sample)}s; {model.total_parameters:.4g} parameters;
{result.considered:,} plans considered in
{result.seconds:.2f} s ({result.plans_per_second:,.0f} per second), {result.fitting:,} fit.</p>
<h2>Plans</h2>
<p>{_legend(used, COLOURS)}<br>Memory: {_legend(MEMORY, MEMORY)}</p>
<table><tr><th>#</th><th>plan</th><th class="n">s/step</th><th>where the time goes</th>
<th class="n">GiB/GPU</th><th>of {cluster.gpu.memory / GIB:.4g} GiB</th><th class="n">host, disk<br>GiB/node</th></tr>
{rows}</table>
<p>d data, t tensor, p pipeline, c context, e expert, b micro-batch; P parameters, G gradients, O optimiser,
A activations; hover for every setting.</p>
<h2>Timeline of the best plan</h2><p>{e(note)}. Passes include recomputation and the
communication of their axes.<br>{_legend(kinds, COLOURS | PASSES)}</p>{_svg(spans)}
<h2>Why the neighbours lost</h2><table><tr><th>change</th><th>reason</th></tr>{lost}</table>
<h2>Pareto list: time, memory, GPUs</h2>
<table><tr><th>plan</th><th class="n">s/step</th><th class="n">GiB/GPU</th><th class="n">GPUs</th></tr>{front}</table>
<h2>Where the constants are from</h2><table>{sources}</table>
</body></html>
"""


def _legend(names: Iterable[str], colours: Mapping[str, str]) -> str:
    return "".join(f'<span class="key"><i style="background:{colours[name]}"></i>{name}</span>' for name in names)


def _row(position: int, ranked: Ranked, slowest: float, cluster: Cluster) -> str:
    pieces = "".join(
        f'<span title="{name}: {value:.4g} s ({value / ranked.seconds:.1%})" '
        f'style="width:{100 * value / slowest:.2f}%;background:{COLOURS[name]}"></span>'
        for name, value in ranked.parts.items()
        if value > 0
    )
    amounts = ranked.gpu_parts | {"reserved": cluster.gpu.reserved}
    held = "".join(
        f'<span title="{name}: {amount / GIB:.2f} GiB" '
        f'style="width:{100 * amount / cluster.gpu.memory:.2f}%;background:{MEMORY[name]}"></span>'
        for name, amount in amounts.items()
    )
    plan = ranked.plan
    policy = "" if plan.policy == "resident" else f"<br><small>{html.escape(plan.policy)}</small>"
    return (
        f'<tr><td class="n">{position}</td>'
        f'<td title="{html.escape(plan.describe())}">{html.escape(plan.short())}{policy}</td>'
        f'<td class="n">{ranked.seconds:.4g}</td><td class="time"><div class="bar">{pieces}</div></td>'
        f'<td class="n">{ranked.memory["gpu"] / GIB:.1f}</td>'
        f'<td class="memory"><div class="bar frame">{held}</div></td>'
        f'<td class="n">{ranked.memory["host"] / GIB:,.0f}, {ranked.memory["storage"] / GIB:,.0f}</td></tr>'
    )


def _svg(spans: Sequence[Span], width: int = 1080, height: int = 22) -> str:
    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max(span.end for span in spans)
    left = 70
    scale = (width - left) / end
    colours = COLOURS | PASSES
    parts = []
    total = len(lanes) * (height + 4)
    for tick in range(5):
        x = left + tick / 4 * (width - left)
        anchor = "start" if tick == 0 else "end" if tick == 4 else "middle"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{total + 2}" stroke="#bbb" stroke-dasharray="2 3"/>'
            f'<text x="{x:.1f}" y="{total + 14}" text-anchor="{anchor}">{end * tick / 4:.4g}{" s" * (tick == 4)}</text>'
        )
    for row, lane in enumerate(lanes):
        y = row * (height + 4)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(lane)}</text>')
        for span in spans:
            if span.lane == lane:
                x, w = left + span.start * scale, max((span.end - span.start) * scale, 0.5)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{colours[span.kind]}" '
                    f'stroke="white" stroke-width="0.5">'
                    f"<title>{html.escape(span.label)}: {span.start:.4g} to {span.end:.4g} s</title></rect>"
                )
                if span.kind in ("forward", "backward") and w > 22:
                    parts.append(
                        f'<text x="{x + w / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="white" '
                        f'pointer-events="none">{span.label.replace("forward ", "F").replace("backward ", "B")}</text>'
                    )
    return f'<svg viewBox="0 0 {width} {total + 20}" width="{width}" role="img">{"".join(parts)}</svg>'

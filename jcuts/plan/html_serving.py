"""HTML report of a serving plan: alternatives, layout, and timelines of prefill and of a decoding step per device and
tier.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from jcuts.plan.cost.inference import ServingCost
from jcuts.plan.html_parts import COLOURS, PASSES, Span, bar, document, legend, placement, svg, table
from jcuts.plan.search.serving import Demand, Served
from jcuts.plan.search.stage_layout import of_serving
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model

MEMORY = {
    "weights": "#2f6fb0",
    "KV cache": "#3cba9f",
    "hidden states": "#e8b04a",
    "working": "#999999",
    "reserved": "#444444",
}
MOST = 24
"""Visits of a stage that are drawn apart; more are drawn in equal bundles."""

STAGES = 16
"""Pipeline stages that are drawn."""


def timeline(cost: ServingCost, *, decoding: bool) -> list[Span]:
    """Prefill, or one decoding step in the steady state, on every stage of a replica and each tier in use.

    Groups of micro-batches visit the stages one behind the other.  A visit lasts as long as the longest of its
    computation with messages and of its transfers, which run beside it (``cost.inference.serve_many``); what a stage
    waits for is idle time.  When decoding, a group's next token starts when it has left the last stage.
    """
    plan, parts = cost.plan, cost.parts
    groups = -(-plan.count // plan.group)
    p = plan.pipeline
    if decoding:
        compute, messages, moved = parts["gpu per step"], parts["messages per step"], parts["weights per step"]
        moved += parts["cache per step"]
        slots = max(groups, p)
        visit = cost.step / slots
    else:
        compute, messages, moved = (parts[f"prefill {name}"] for name in ("compute", "messages", "transfers"))
        slots = groups + p - 1
        visit = cost.prefill / slots
    bundles = min(groups, MOST)
    share = groups / bundles  # visits in a bundle
    spans: list[Span] = []
    for stage in range(min(p, STAGES)):
        # The steady state of decoding wraps round: what began before the step ends in it.
        starts = [(stage + bundle * share) % slots if decoding else stage + bundle * share for bundle in range(bundles)]
        spans += _lane(f"stage {stage + 1}", starts, share, (compute / bundles, messages / bundles), visit, slots)
    lanes = [(plan.weights, "weights and what else moves", moved)] if moved else []
    if decoding and parts["host per step"]:
        lanes.append(("host", "attention on the host", parts["host per step"]))
    for lane, label, seconds in lanes:
        for bundle in range(bundles):
            start = bundle * share * visit
            spans.append(Span(lane, start, start + seconds / bundles, "tiers", f"{label}, visit {bundle + 1}"))
    return spans


def _lane(
    lane: str, starts: Sequence[float], share: float, busy: tuple[float, float], visit: float, slots: int
) -> list[Span]:
    """One stage's visits with their computation, messages and waits; from 0 to the end of all slots."""
    spans: list[Span] = []
    end = slots * visit
    at = 0.0
    for number, start in sorted(enumerate(starts, 1), key=lambda entry: entry[1]):
        begin, stop = start * visit, min((start + share) * visit, end)
        if begin - at > end / 10**6:
            spans.append(Span(lane, at, begin, "idle", "idle"))
        middle = min(begin + busy[0], stop)
        spans.append(Span(lane, begin, middle, "compute", f"visit {number}"))
        after = min(middle + busy[1], stop)
        if after > middle:
            spans.append(Span(lane, middle, after, "tensor", f"messages of visit {number}"))
        if stop - after > end / 10**6:
            spans.append(Span(lane, after, stop, "idle", f"visit {number} waits for transfers"))
        at = stop
    if end - at > end / 10**6:
        spans.append(Span(lane, at, end, "idle", "idle"))
    return spans


def page(model: Model, cluster: Cluster, demand: Demand, found: Served, *, plans: int = 10) -> str:
    """A self-contained HTML page (no scripts, no external files)."""
    best = found.ranked[0]
    intro = (
        f"{demand.prompt} tokens in, {demand.generate} out per sequence; {model.total_parameters:.4g} parameters; "
        f"{found.considered:,} plans considered in {found.seconds:.2f} s, {found.fitting:,} fit."
    )
    said = f"Memory: {legend(MEMORY, MEMORY)}"
    sections = [
        (
            "Plans",
            f"<p>{said}</p>{_plans(found.ranked[:plans], cluster, demand)}<p>d data, t tensor (weight partitioning), "
            "p pipeline; PR parameter-resident, AR activation-resident; batch: micro-batches in flight per replica x "
            "sequences; first: until every sequence has its first token, token: between further ones.</p>",
        ),
        ("Layout of the best plan", placement(of_serving(best, model.layers))),
        ("Prefill", _section(best, decoding=False)),
    ]
    if demand.generate:
        sections.append(("One decoding step", _section(best, decoding=True)))
    return document(f"Serving {model.name} on {cluster.gpus} GPUs of {cluster.name}", intro, sections, cluster)


def _section(best: ServingCost, *, decoding: bool) -> str:
    """A timeline and what it shows."""
    plan = best.plan
    groups = -(-plan.count // plan.group)
    note = f"{groups} group{'s' * (groups > 1)} of {plan.group} micro-batch{'es' * (plan.group > 1)} of {plan.micro}"
    if groups > MOST:
        note += f", drawn as {MOST} bundles"
    if plan.pipeline > STAGES:
        note += f"; the first {STAGES} of {plan.pipeline} stages"
    note += "; messages: reductions of the tensor axis and what goes to the next stage"
    if decoding:
        note += f"; one token of every sequence; {plan.generate - 1} such steps take {best.decode:.4g} s"
    spans = timeline(best, decoding=decoding)
    kinds = list(dict.fromkeys(span.kind for span in spans))
    names = {"tensor": "messages", "tiers": "transfers"}
    colours = {names.get(kind, kind): (COLOURS | PASSES)[kind] for kind in kinds}
    return f"<p>{html.escape(note)}.<br>{legend(colours, colours)}</p>{svg(spans)}"


def _plans(shown: Sequence[ServingCost], cluster: Cluster, demand: Demand) -> str:
    """The plans with their speed, latencies and a bar of what fills a GPU's memory."""
    speeds = ("tokens/s", "first [s]", "token [ms]") if demand.generate else ("sequences/s", "time [s]")
    rows = []
    for position, cost in enumerate(shown, 1):
        plan = cost.plan
        there = {"weights": plan.weights_on_gpu, "KV cache": plan.cache == "gpu"}
        there |= {"hidden states": plan.activations == "gpu", "working": 1}
        held = {name: cost.held[name] * share for name, share in there.items()} | {"reserved": cluster.gpu.reserved}
        sizes = {name: f"{name}: {amount / GIB:.2f} GiB" for name, amount in held.items()}
        times = (f"{cost.prefill:.4g}", f"{cost.step * 1000:.4g}") if demand.generate else (f"{cost.prefill:.4g}",)
        rows.append(
            (
                str(position),
                html.escape(plan.short()),
                f"{plan.count} x {plan.micro}",
                f"{cost.tokens_per_second:.4g}",
                *times,
                f"{cost.memory['gpu'] / GIB:.1f}",
                bar(held, cluster.gpu.memory, MEMORY, sizes, frame=" frame"),
                html.escape(plan.places(generates=demand.generate > 0)),
                html.escape(cost.bound),
            )
        )
    columns = ("#", "plan", "batch", *speeds, "GiB/GPU", f"of {cluster.gpu.memory / GIB:.4g} GiB", "weights, cache")
    return table((*columns, "bound by"), rows, right=(0, *range(3, 4 + len(speeds))))

"""Tables of ``jcuts plan``: ranked plans with breakdown bars and reasons, a given plan, a Pareto front, a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jcuts.cli import printing
from jcuts.plan.search.exhaustive import Result
from jcuts.plan.search.fixed import Fixed
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.ranked import CLASSES, Ranked
from jcuts.plan.search.stage_layout import COLUMNS, Layout, of_training
from jcuts.plan.search.tier_placement import Placement
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import Training

BAR = {
    "compute": "blue",
    "recompute": "cyan",
    "tensor": "yellow",
    "context": "bright_yellow",
    "expert": "dark_orange",
    "pipeline": "magenta",
    "embedding": "bright_magenta",
    "gradients": "green",
    "launch": "white",
    "bubble": "bright_black",
    "tiers": "red",
    "optimizer": "bright_green",
    "overhead": "grey50",
}

WIDE = 100
"""Columns of a terminal from which on bars have their full width."""


def bar(ranked: Ranked, width: int = 24) -> Text:
    """A bar whose pieces are the parts of a step."""
    made, used = Text(), 0.0
    drawn = 0
    for name, value in ranked.parts.items():
        used += value / ranked.seconds * width
        cells = round(used) - drawn
        made.append("█" * cells, style=BAR[name])
        drawn += cells
    return made


def _plans(console: Console, title: str, plans: Sequence[Ranked]) -> Table:
    """Plans with time, memory and a bar that never breaks."""
    width = 24 if console.width >= WIDE else 12
    rows: list[Any] = [
        [
            ranked.plan.short(),
            printing.duration(ranked.seconds),
            f"{ranked.memory['gpu'] / GIB:.1f}",
            "/".join(f"{ranked.memory[k] / GIB:.0f}" for k in ("host", "storage")),
            bar(ranked, width),
        ]
        for ranked in plans
    ]
    made = printing.table(title, ("plan", "step", "GPU", "host/disk", "time goes to"), rows, right=(1, 2, 3))
    made.columns[4].no_wrap = True
    made.columns[4].min_width = width
    return made


def legend(ranked: Ranked, label: str, width: int) -> Text:
    """The parts of a step with their times, largest first; each stays on one line of ``width`` columns."""
    made = Text(label)
    used = len(label)
    for name, value in sorted(ranked.parts.items(), key=lambda part: -part[1]):
        if value > ranked.seconds / 500:
            shown = f"{name} {printing.duration(value)} ({value / ranked.seconds:.1%})"
            broken = used + len(shown) + 3 > width
            used = len(shown) + 2 if broken else used + len(shown) + 3
            made.append("\n" if broken else " ").append("█", style=BAR[name]).append(f" {shown}")
    return made


def abbreviations(plans: Sequence[Plan], width: int) -> str:
    """The abbreviations that are in use, in lines of ``width`` columns."""
    axes = {"data": "d", "tensor": "t", "pipeline": "p", "context": "c", "expert": "e"}
    shown = [f"{short} {name}" for name, short in axes.items() if any(getattr(p, name) > 1 for p in plans)]
    shown.append("b micro-batch")
    moved = [name for name in CLASSES if any(getattr(p, name) != "gpu" for p in plans)]
    shown += [f"{name[0].upper()} {name}" for name in moved]
    return printing.phrases(["GiB per GPU", "and per node in host memory and storage; " + shown[0], *shown[1:]], width)


def show(
    model: Model, cluster: Cluster, work: Training, result: Result, placed: Placement | None, *, top: int, explain: int
) -> None:
    """The ranked plans, where the best one's time goes, and why its neighbours lost."""
    console = printing.console()
    best, plans = result.best, result.ranked[:top]
    title = f"{model.name} ({model.total_parameters:.3g} parameters), batch {work.batch}, "
    title += f"{best.plan.gpus} GPUs of {cluster.name}"
    console.print(_plans(console, title, plans))
    console.print(legend(best, "best plan:", console.width))
    console.print(abbreviations([ranked.plan for ranked in plans], console.width))
    console.print(
        f"{result.considered:,} plans in {result.seconds:.2f} s ({result.plans_per_second:,.0f}/s), "
        f"{result.fitting:,} fit; best policy: {best.plan.policy}"
    )
    if best.split:
        left_out = f"; {best.split.count(0)} of {len(best.split)} left out" if 0 in best.split else ""
        console.print(f"batch split over groups of nodes: {', '.join(map(str, best.split))} samples{left_out}")
    if explain and result.rejected:
        rows = [(r.changed, r.reason) for r in result.rejected[:explain]]
        console.print(printing.table("why the neighbours lost", ("change", "reason"), rows))
    if placed:
        waits = f" (waits {printing.duration(placed.exposed)} per step)" if placed.exposed else ""
        show_layout(console, of_training(best.plan, placed, model.layers), f"placement of the best plan{waits}")


def show_layout(console: Console, layout: Layout, title: str) -> None:
    """Which GPUs have which layers, and where each class of their tensors lies."""
    made = printing.table(title, COLUMNS, layout.rows(brief=True), right=(5,))
    made.columns[2].no_wrap = True
    console.print(made)
    console.print(layout.note())


def show_fixed(model: Model, cluster: Cluster, work: Training, fixed: Fixed, best: Ranked | None, explain: int) -> None:
    """A given plan: its time and memory, what to change first, and the best plan beside it.  ``best``: None if no plan
    fits."""
    console = printing.console()
    title = f"{model.name} as given, batch {work.batch}, {fixed.ranked.plan.gpus} GPUs of {cluster.name}"
    console.print(_plans(console, title, [fixed.ranked]))
    console.print(legend(fixed.ranked, "time:", console.width))
    memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fixed.ranked.gpu_parts.items())
    console.print(
        f"GiB per GPU: {memory}, reserved {cluster.gpu.reserved / GIB:.1f}; of {cluster.gpu.memory / GIB:.1f}"
    )
    if fixed.assumed:
        console.print(f"assumed, since --fix does not say: {fixed.assumed}")
    if fixed.short:
        console.print(f"does not fit: short of {fixed.short}")
    rows = [(r.changed, r.reason) for r in fixed.changes[: explain or None]]
    console.print(printing.table("what to change first", ("change", "what it does"), rows))
    if best is not None:
        gain = fixed.ranked.seconds / best.seconds
        console.print(
            f"best of all plans: {best.plan.short()}: {printing.duration(best.seconds)} per step, {gain:.2f}x as fast, "
            f"{best.memory['gpu'] / GIB:.1f} GiB per GPU"
        )


def show_front(model: Model, cluster: Cluster, work: Training, front: Sequence[Ranked]) -> None:
    """The Pareto front over GPU counts: per count the fastest, and up to three that take a third less memory each."""
    rows = []
    for count in sorted({ranked.plan.gpus for ranked in front}):
        most, shown = float("inf"), 0
        for ranked in sorted((r for r in front if r.plan.gpus == count), key=lambda r: r.seconds):
            if 3 * ranked.memory["gpu"] <= 2 * most and shown < 4:
                most, shown = ranked.memory["gpu"], shown + 1
                spent = count * ranked.seconds
                rows.append(
                    (
                        str(count),
                        printing.duration(ranked.seconds),
                        f"{most / GIB:.1f}",
                        printing.duration(spent),
                        ranked.plan.short(),
                    )
                )
    title = f"{model.name}, batch {work.batch}, {cluster.name}: no plan beats these in time, memory and GPUs"
    columns = ("GPUs", "step", "GiB/GPU", "GPU time", "plan")
    printing.console().print(printing.table(title, columns, rows, right=(0, 1, 2, 3)))


def show_step(name: str, cluster: Cluster, found: Any, bytes_per_gpu: float) -> None:
    """A whole training step, priced as it is.  Args: found: ``spmd_step.StepTime``."""
    console = printing.console()
    console.print(
        f"{name} is a whole training step: priced as it is, per device of the mesh that it has itself (no mesh: one "
        f"GPU), on {cluster.name}"
    )
    parts = {"matrix products": found.products, "kernels": found.kernels, "gaps between kernels": found.gaps}
    parts |= found.collectives
    rows = [(key, printing.duration(value), f"{value / found.seconds:.1%}") for key, value in parts.items() if value]
    title = f"step {printing.duration(found.seconds)}, {bytes_per_gpu / GIB:.2f} GiB of {cluster.gpu.memory / GIB:.1f}"
    title += ": does not fit" if bytes_per_gpu > cluster.gpu.memory else ""
    console.print(printing.table(title, ("part", "time", "share"), rows, right=(1, 2)))
    console.print(
        "to plan mesh, schedule and tiers, give the loss function that the step differentiates: "
        "(loss, parameters, *inputs)"
    )

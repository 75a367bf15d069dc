"""Inference plans of ``jcuts plan --serve``: meshes, scheduling policies and tiers, ranked under latency targets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.cli import plan_report, printing
from jcuts.cli.output_files import write, write_text
from jcuts.plan import html_serving
from jcuts.plan.cost.inference import ServingCost
from jcuts.plan.search import serving
from jcuts.plan.search.plan import TIERS
from jcuts.plan.search.stage_layout import Layout, of_serving
from jcuts.plan.spec.cluster import GIB, Cluster
from jcuts.plan.spec.layers import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that go with ``--serve``."""
    parser.add_argument(
        "--serve",
        nargs=2,
        type=int,
        metavar=("PROMPT", "GENERATE"),
        help="plan inference, not training: tokens in and out per sequence (0 out: a forward pass)",
    )
    group = parser.add_argument_group("with --serve")
    group.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of --micro sequences in all")
    group.add_argument("--weights", choices=TIERS, help="tier that all weights live in (default: search)")
    group.add_argument("--activations", choices=TIERS, help="tier where hidden states wait (default: search)")
    group.add_argument("--token-latency", type=float, metavar="MS", help="milliseconds per generated token at most")
    group.add_argument("--first-token", type=float, metavar="MS", help="milliseconds to the first token at most")
    group.add_argument("--rank", choices=("throughput", "latency"), default="throughput", help="what comes first")


def run(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Ranks serving configurations."""
    prompt, generate = arguments.serve
    if prompt < 1 or generate < 0:
        raise UsageError(f"--serve {prompt} {generate}: tokens in must be positive, tokens out at least 0")
    for name in ("fix", "pareto"):
        if getattr(arguments, name):
            raise UsageError(f"--{name} is for training: it does not go with --serve")
    for name in ("micro_batches", "token_latency", "first_token"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be positive")
    milliseconds = {
        name: getattr(arguments, name) / 1000 for name in ("token_latency", "first_token") if getattr(arguments, name)
    }
    demand = serving.Demand(
        prompt,
        generate,
        micro=arguments.micro,
        batches=arguments.micro_batches,
        weights=arguments.weights,
        activations=arguments.activations,
        rank=arguments.rank,
        **milliseconds,
    )
    cluster = cluster.resized(arguments.gpus or cluster.gpus)
    found = serving.search(model, cluster, demand, top=arguments.top)
    layout = of_serving(found.ranked[0], model.layers) if arguments.place else None
    if arguments.html:
        write_text(arguments.html, html_serving.page(model, cluster, demand, found))
    if arguments.json:
        write(arguments.json, _document(model, cluster, demand, found, layout))
    if arguments.json != "-":
        _show(model, cluster, demand, found)
        if layout:
            plan_report.show_layout(printing.console(), layout, "placement of the best plan")
    return 0


def _document(
    model: Model, cluster: Cluster, demand: serving.Demand, found: serving.Served, layout: Layout | None
) -> dict[str, Any]:
    return {
        "model": model.name,
        "cluster": cluster.name,
        "demand": asdict(demand),
        "parameters": model.total_parameters,
        "considered": found.considered,
        "fitting": found.fitting,
        "search_seconds": found.seconds,
        "plans": [cost.to_json() for cost in found.ranked],
        "placement": layout.to_json() if layout else None,
        "sources": cluster.sources,
    }


def _show(model: Model, cluster: Cluster, demand: serving.Demand, found: serving.Served) -> None:
    """The plans as a table; in a narrow terminal, what does not stay on the GPU is a line under the plan's name."""
    generates = demand.generate > 0
    console = printing.console()
    rows = [_row(cost, generates) for cost in found.ranked]
    columns = ["plan", "batch", *(["tokens/s", "first", "token"] if generates else ["seq/s", "time"]), "GiB"]
    right = tuple(range(2, len(columns)))
    columns += ["weights", "bound"]
    if console.width < plan_report.WIDE:
        columns.remove("weights")
        below = [f"weights {row[-2]}".removeprefix("weights GPU").removeprefix("; ") for row in rows]
        rows = [
            (f"{row[0]}\n{line}".strip(), *row[1:-2], row[-1].removesuffix(" link"))
            for row, line in zip(rows, below, strict=True)
        ]
    title = f"{model.name}: {demand.prompt} tokens in, {demand.generate} out, {cluster.gpus} GPUs of {cluster.name}"
    made = printing.table(title, columns, rows, right=right)
    for column in (made.columns[1], made.columns[-1]):
        column.no_wrap = True
    console.print(made)
    console.print(printing.phrases(_abbreviations(found.ranked, generates), console.width))
    console.print(f"{found.considered:,} plans in {found.seconds:.2f} s, {found.fitting:,} fit")


def _abbreviations(ranked: Sequence[ServingCost], generates: bool) -> list[str]:
    """The abbreviations that are in use."""
    axes = {"data": "d data", "tensor": "t tensor (weight partitioning)", "pipeline": "p pipeline"}
    policies = {"PR": "PR parameter-resident", "AR": "AR activation-resident"}
    shown = [said for name, said in axes.items() if any(getattr(cost.plan, name) > 1 for cost in ranked)]
    shown += [said for name, said in policies.items() if any(name in cost.plan.policy for cost in ranked)]
    shown += ["batch: micro-batches in flight per replica x sequences", "GiB per GPU"]
    if generates:
        shown += ["first: until every sequence has its first token", "token: between further ones"]
    return shown


def _row(cost: ServingCost, generates: bool) -> tuple[str, ...]:
    plan = cost.plan
    speed = cost.tokens_per_second
    times = (cost.prefill, cost.step) if generates else (cost.prefill,)
    return (
        plan.short(),
        f"{plan.count} x {plan.micro}",
        f"{speed:.3g}" if speed < 1000 else f"{speed:,.0f}",
        *map(printing.duration, times),
        f"{cost.memory['gpu'] / GIB:.1f}",
        plan.places(generates=generates),
        cost.bound,
    )

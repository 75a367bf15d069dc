"""Rank mesh, schedule and offload plans of a model on a cluster by predicted step time and memory."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from rich.text import Text

from jcuts.base.errors import UsageError
from jcuts.cli import printing
from jcuts.plan import html_report
from jcuts.plan.cost import inference
from jcuts.plan.search import tier_placement
from jcuts.plan.search.exhaustive import Result, search
from jcuts.plan.search.plan import RECOMPUTE, SCHEDULES
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.ranked import Ranked
from jcuts.plan.spec import cluster as clusters
from jcuts.plan.spec import model as models
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import SOFTWARE, Training

HELP = "choose mesh, schedule and memory tiers for a model on a cluster"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts plan``."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE|MODULE:FUNCTION",
        help="preset, TOML file, or a Python function that returns (function, parameters, *inputs)",
    )
    parser.add_argument("--cluster", required=True, metavar="NAME|FILE", help="preset or TOML file")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to use (default: all of the cluster)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per optimiser step (default: the model's)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens per sample (default: the model's)")
    parser.add_argument("--flash", action="store_true", help="use flash attention: one kernel, scores are not stored")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="plans to show")
    parser.add_argument("--explain", type=int, default=5, metavar="K", help="rejected neighbours to show, with reasons")
    parser.add_argument(
        "--software",
        choices=tuple(SOFTWARE),
        default="jax",
        help="numeric formats of the software: jax (32-bit parameters, cast in every micro-batch; activations as its "
        "autodiff stores them; default), megatron, lean",
    )
    parser.add_argument(
        "--micro", type=int, metavar="N", help="largest micro-batch (default: 64 sequences, or any number of images)"
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=list(RECOMPUTE))
    parser.add_argument(
        "--offload",
        nargs="*",
        choices=("host", "storage"),
        default=["host", "storage"],
        help="tiers to which tensors may be offloaded (no value: none)",
    )
    parser.add_argument("--place", action="store_true", help="place tensors of the best plan by integer programming")
    parser.add_argument(
        "--serve", nargs=2, type=int, metavar=("PROMPT", "GENERATE"), help="plan inference, not training"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - is standard output, instead of tables"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline per device and tier")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts plan``."""
    for name in ("top", "explain", "micro", "batch", "gpus"):
        value = getattr(arguments, name)
        if value is not None and value < (0 if name == "explain" else 1):
            raise UsageError(f"--{name} {value} must be positive", **{name: value})
    model = _model(arguments)
    cluster = clusters.load(arguments.cluster)
    if arguments.serve:
        for name in ("html", "place", "gpus"):
            if getattr(arguments, name):
                raise UsageError(f"--{name} does not go with --serve, which plans inference on one GPU")
        return _serve(arguments, model, cluster)
    work = Training(arguments.batch or model.batch, **SOFTWARE[arguments.software])  # type: ignore[arg-type]
    space = Space(
        micro=arguments.micro or (64 if model.sample == "sequence" else work.batch),
        schedules=tuple(arguments.schedules),
        recompute=tuple(arguments.recompute),
        offload=tuple(arguments.offload),
    )
    result = search(
        model, cluster, work, gpus=arguments.gpus, space=space, top=max(arguments.top, 1), explain=arguments.explain
    )
    placed = tier_placement.refine(model, cluster, result.best.plan, work) if arguments.place else None
    if arguments.html:
        Path(arguments.html).write_text(html_report.page(model, cluster, work, result), encoding="utf-8")
    if arguments.json:
        write(arguments.json, _document(model, cluster, work, result, placed))
    if arguments.json != "-":
        _show(model, cluster, work, result, placed, arguments)
    return 0


def _model(arguments: argparse.Namespace) -> Model:
    name = arguments.model
    if ":" not in name:
        return models.load(name, sequence=arguments.sequence, flash=arguments.flash)
    from jcuts.plan.cost import traced_model

    if arguments.sequence:
        raise UsageError("--sequence is for presets and TOML files: a function's example inputs have their own")
    if arguments.flash:
        raise UsageError(
            "--flash is for presets and TOML files: with a function, its own attention decides what is stored"
        )
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module.removesuffix(".py")), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name}: {error}", model=name) from error
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:  # not callable, or not without arguments
        raise UsageError(
            f"--model {name} must be a function of no arguments that returns (function, parameters, *inputs): {error}",
            model=name,
        ) from error
    example = factory()
    if not isinstance(example, tuple) or len(example) < 3 or not callable(example[0]):
        raise UsageError(
            f"--model {name} must return (function, parameters, *inputs), where inputs begin with the batch axis"
        )
    return traced_model.model(*example, name=function)


def _document(model: Model, cluster: Cluster, work: Training, result: Result, placed: Any) -> dict[str, Any]:
    return {
        "model": model.name,
        "cluster": cluster.name,
        "batch": work.batch,
        "parameters": model.total_parameters,
        "considered": result.considered,
        "fitting": result.fitting,
        "search_seconds": result.seconds,
        "plans_per_second": result.plans_per_second,
        "not_fitting": result.reasons,
        "plans": [ranked.to_json() for ranked in result.ranked],
        "pareto": [ranked.to_json() for ranked in result.pareto],
        "rejected": [{"changed": r.changed, "reason": r.reason, "plan": r.plan.to_json()} for r in result.rejected],
        "placement": placed.__dict__ if placed else None,
        "sources": cluster.sources,
    }


def write(target: str, document: Any) -> None:
    """JSON into a file; ``-`` is standard output."""
    text = json.dumps(document, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


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


def _show(
    model: Model, cluster: Cluster, work: Training, result: Result, placed: Any, arguments: argparse.Namespace
) -> None:
    console = printing.console()
    rows: list[Any] = []
    for ranked in result.ranked[: arguments.top]:
        below = "/".join(f"{ranked.memory[k] / 2**30:.0f}" for k in ("host", "storage"))
        rows.append(
            [
                ranked.plan.short(),
                printing.duration(ranked.seconds),
                f"{ranked.memory['gpu'] / 2**30:.1f}",
                below,
                bar(ranked),
            ]
        )
    title = f"{model.name} ({model.total_parameters:.3g} parameters), batch {work.batch}, "
    title += f"{result.best.plan.gpus} GPUs of {cluster.name}"
    console.print(
        printing.table(title, ("plan", "step", "GPU", "host/disk", "where the time goes"), rows, right=(1, 2, 3))
    )
    legend = Text("best plan: ")
    for name, value in result.best.parts.items():
        if value > 0.002 * result.best.seconds:
            legend.append("█ ", style=BAR[name]).append(
                f"{name} {printing.duration(value)} ({value / result.best.seconds:.1%})  "
            )
    console.print(legend)
    console.print(
        "GiB per GPU, and per node in host memory and storage; d data, t tensor, p pipeline, c context, "
        "e expert, b micro-batch; "
        "P parameters, G gradients, O optimiser, A activations"
    )
    console.print(
        f"{result.considered:,} plans in {result.seconds:.2f} s ({result.plans_per_second:,.0f}/s), "
        f"{result.fitting:,} fit; "
        f"best policy: {result.best.plan.policy}"
    )
    if result.best.split:
        console.print(f"batch split over groups of nodes: {', '.join(map(str, result.best.split))} samples")
    if arguments.explain and result.rejected:
        console.print(
            printing.table(
                "why the neighbours lost",
                ("change", "reason"),
                [(r.changed, r.reason) for r in result.rejected[: arguments.explain]],
            )
        )
    if placed:
        shown = [
            (name, *(f"{where.get(tier, 0):.0%}" for tier in ("gpu", "host", "storage")))
            for name, where in placed.fractions.items()
        ]
        console.print(
            printing.table(
                f"placement (waits {printing.duration(placed.exposed)} per step)" if placed.exposed else "placement",
                ("tensors", "gpu", "host", "storage"),
                shown,
                right=(1, 2, 3),
            )
        )


def _serve(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    prompt, generate = arguments.serve
    found = inference.search(model, cluster, inference.space(model, cluster, prompt, generate))[: arguments.top]
    if not found:
        raise UsageError(
            f"{model.name} cannot be served on one GPU of {cluster.name}: no way fits its memory", model=model.name
        )
    if arguments.json:
        write(arguments.json, [cost.to_json() for cost in found])
    if arguments.json != "-":
        rows = [
            (
                f"{c.plan.weights_on_gpu:.0%}",
                c.plan.weights,
                c.plan.cache,
                f"{c.plan.micro} x {c.plan.count}",
                f"{c.tokens_per_second:.2f}",
                printing.duration(c.prefill),
                printing.duration(c.decode),
                f"{c.memory['gpu'] / 2**30:.1f}",
            )
            for c in found
        ]
        printing.console().print(
            printing.table(
                f"{model.name}: {prompt} tokens in, {generate} out, on one GPU of {cluster.name}",
                ("weights on GPU", "rest", "cache", "batch", "tokens/s", "prefill", "decode", "GiB/GPU"),
                rows,
                right=(0, 4, 5, 6, 7),
            )
        )
    return 0

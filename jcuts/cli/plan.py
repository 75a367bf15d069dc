"""Rank mesh, schedule and offload plans of a model on a cluster by predicted step time and memory."""

from __future__ import annotations

import argparse
from typing import Any

from jcuts.base.errors import NotJaxError, UsageError
from jcuts.cli import plan_model, plan_report, plan_serve, printing
from jcuts.cli.output_files import check_writable, write, write_text
from jcuts.plan import html_report
from jcuts.plan.search import fixed, tier_placement
from jcuts.plan.search.exhaustive import Result, gpu_counts, over_gpu_counts, search
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import RECOMPUTE, SCHEDULES
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.stage_layout import of_training
from jcuts.plan.spec import cluster as clusters
from jcuts.plan.spec import model as models
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model
from jcuts.plan.spec.workload import SOFTWARE, Training

HELP = "choose mesh, schedule and memory tiers for a model on a cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts plan``."""
    parser.add_argument(
        "--model",
        metavar="NAME|FILE|MODULE:FUNCTION",
        help="preset (--list), TOML file, or a Python function, as mine:net or folder/mine.py:net, that returns "
        "(function, parameters, *inputs)",
    )
    parser.add_argument("--cluster", metavar="NAME|FILE", help="preset (--list) or TOML file")
    parser.add_argument("--list", action="store_true", help="list the models and clusters that come with jcuts")
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
        "--micro", type=int, metavar="N", help="largest micro-batch (default: any that divides the batch)"
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
    parser.add_argument(
        "--fix",
        metavar="SETTINGS",
        help="price this plan and say what to change first: data=4,tensor=2,zero=1,policy=ar (fields of a plan; policy "
        "is ar or pr)",
    )
    parser.add_argument(
        "--pareto", action="store_true", help="compare GPU counts: what no plan beats in time, memory and GPUs"
    )
    parser.add_argument(
        "--place",
        action="store_true",
        help="show which GPUs have which layers, and which tier each layer's tensors (of a training plan by integer "
        "programming)",
    )
    plan_serve.add_arguments(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - is standard output, instead of tables"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline per device and tier")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts plan``."""
    if arguments.list:
        list_presets()
        return 0
    for name in ("model", "cluster"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: jcuts plan --list shows what there is")
    for name in ("top", "explain", "micro", "batch", "gpus"):
        value = getattr(arguments, name)
        if value is not None and value < (0 if name == "explain" else 1):
            raise UsageError(f"--{name} {value} must be positive", **{name: value})
    _check_together(arguments)
    for target in (arguments.html, arguments.json):
        check_writable(target)
    cluster = clusters.load(arguments.cluster)
    made = _model(arguments, cluster)
    if made is None:
        return 0
    if arguments.serve:
        return plan_serve.run(arguments, made, cluster)
    return _train(arguments, made, cluster)


def _check_together(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that would be without effect beside another."""
    for one, others in (("fix", ("pareto", "html", "place")), ("pareto", ("html", "place"))):
        for other in others:
            if getattr(arguments, one) and getattr(arguments, other):
                raise UsageError(f"--{other} does not go with --{one}: its result is a table or --json")


def _train(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    work = Training(arguments.batch or model.batch, **SOFTWARE[arguments.software])  # type: ignore[arg-type]
    space = Space(
        micro=arguments.micro,
        schedules=tuple(arguments.schedules),
        recompute=tuple(arguments.recompute),
        offload=tuple(arguments.offload),
    )
    cluster = cluster.resized(arguments.gpus or cluster.gpus)
    if arguments.fix is not None:
        return _fix(arguments, model, cluster, work, space)
    if arguments.pareto:
        counts = [n for n in gpu_counts(cluster) if n <= cluster.gpus]
        front = over_gpu_counts(model, cluster, work, counts, space=space)
        if not front:
            raise NoPlanError(
                f"{model.name} does not fit on any of {counts} GPUs of {cluster.name}", short={}, change=""
            )
        if arguments.json:
            write(arguments.json, [ranked.to_json() for ranked in front])
        if arguments.json != "-":
            plan_report.show_front(model, cluster, work, front)
        return 0
    result = search(model, cluster, work, space=space, top=arguments.top, explain=arguments.explain)
    placed = tier_placement.refine(model, cluster, result.best.plan, work) if arguments.place else None
    if arguments.html:
        write_text(arguments.html, html_report.page(model, cluster, work, result, placed=placed))
    if arguments.json:
        write(arguments.json, _document(model, cluster, work, result, placed))
    if arguments.json != "-":
        plan_report.show(model, cluster, work, result, placed, top=arguments.top, explain=arguments.explain)
    return 0


def _fix(arguments: argparse.Namespace, model: Model, cluster: Cluster, work: Training, space: Space) -> int:
    plan, assumed = fixed.parse(arguments.fix, cluster.gpus, work.batch)
    found = fixed.price(model, cluster, work, plan, space=space, assumed=assumed)
    try:
        best = search(model, cluster, work, space=space, top=1, explain=0).best
    except NoPlanError:
        best = None
    if arguments.json:
        document = found.ranked.to_json() | {"short": found.short, "assumed": found.assumed}
        document |= {"changes": [{"changed": r.changed, "reason": r.reason, "gain": r.gain} for r in found.changes]}
        write(arguments.json, document | {"best": best.to_json() if best else None})
    if arguments.json != "-":
        plan_report.show_fixed(model, cluster, work, found, best, arguments.explain)
    return 0


def list_presets() -> None:
    """The models and clusters that come with jcuts."""
    console = printing.console()
    rows = [
        (name, f"{made.total_parameters:.3g}", str(made.layers), str(made.batch), f"{made.forward_flops:.3g}")
        for name in models.presets()
        for made in (models.load(name),)
    ]
    columns = ("model", "parameters", "layers", "batch", "FLOP/sample")
    console.print(printing.table("models", columns, rows, right=(1, 2, 3, 4)))
    list_clusters()
    console.print("also: a TOML file (docs/planner.md), or a Python function, as --model folder/mine.py:net")


def list_clusters() -> None:
    """The clusters that come with jcuts."""
    rows = []
    for name in clusters.presets():
        found = clusters.load(name)
        rows.append((name, str(found.gpus), found.gpu.name, f"{found.gpu.memory / clusters.GIB:.0f}"))
    printing.console().print(printing.table("clusters", ("name", "GPUs", "GPU", "GiB"), rows, right=(1, 3)))


def _model(arguments: argparse.Namespace, cluster: Cluster) -> Model | None:
    """The model; None for a whole training step, which is priced as it is and shown."""
    name = arguments.model
    if not plan_model.is_function(name):
        return plan_model.from_name(name, sequence=arguments.sequence, flash=arguments.flash)
    from jcuts.plan.cost import spmd_step, traced_model
    from jcuts.plan.cost.program_memory import jaxpr_liveness

    if arguments.sequence:
        raise UsageError("--sequence is for presets and TOML files: a function's example inputs have their own")
    if arguments.flash:
        raise UsageError(
            "--flash is for presets and TOML files: with a function, its own attention decides what is stored"
        )
    example = plan_model.example(name)
    function, parameters, *inputs = example
    try:
        whole = plan_model.guarded(name, traced_model.is_training_step, function, parameters, inputs)
        if not whole:
            return plan_model.guarded(name, traced_model.model, *example, name=name.rpartition(":")[2])
        for option in ("serve", "fix", "pareto", "place", "html"):
            if getattr(arguments, option):
                raise UsageError(
                    f"--{option} plans a model; {name} is a whole training step, which has its mesh and schedule "
                    "already: give the loss function that it differentiates",
                    model=name,
                )
        step_of_arrays, arrays = traced_model.arrays_only(function, parameters)
        step = spmd_step.step_time(step_of_arrays, arrays, *inputs, cluster=cluster)
        held = jaxpr_liveness.footprint(step_of_arrays, arrays, *inputs).peak + cluster.gpu.reserved
    except NotJaxError as error:
        raise UsageError(f"--model {name}: {error.message.splitlines()[0]}", model=name) from error
    if arguments.json:
        write(arguments.json, {"model": name, "training_step": vars(step) | {"seconds": step.seconds}, "bytes": held})
    if arguments.json != "-":
        plan_report.show_step(name, cluster, step, held)
    return None


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
        "placement": placed.__dict__ | of_training(result.best.plan, placed, model.layers).to_json()
        if placed
        else None,
        "sources": cluster.sources,
    }

"""Inference plans of ``jcuts plan --serve``: prefill and decoding of a decoder on a cluster."""

from __future__ import annotations

import argparse

from jcuts.base.errors import UsageError
from jcuts.cli import printing
from jcuts.cli.output_files import write
from jcuts.plan.cost import inference
from jcuts.plan.spec.cluster import Cluster
from jcuts.plan.spec.layers import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``--serve``."""
    parser.add_argument(
        "--serve", nargs=2, type=int, metavar=("PROMPT", "GENERATE"), help="plan inference, not training"
    )


def run(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Ranks serving configurations."""
    for name in ("html", "place", "gpus"):
        if getattr(arguments, name):
            raise UsageError(f"--{name} does not go with --serve, which plans inference on one GPU")
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

"""Data against model parallelism for the course report's MLP: steps measured by `training.run`, and as priced.

    python benchmarks/mlp/parallelism.py --out DIR [--count 9000] [--hidden 1000] [--dry]

The report's future work (4.3, 5).  Data parallelism sums all gradients, model parallelism the logits of a mini-batch.
Measured: processes of one machine, float64.  Priced: the same two steps by `jcuts.plan.cost.spmd_step` on a cluster,
and `jcuts plan`'s ranking of plans for `plan_model.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh  # noqa: E402

from benchmarks.mlp import network, training  # noqa: E402
from benchmarks.mlp.digits import IMAGES, load_digits, write_digits  # noqa: E402
from benchmarks.mlp.jax_network import AXIS, STEPS  # noqa: E402
from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.network import CLASSES, INPUTS, Params, Training  # noqa: E402
from jcuts.plan.cost import spmd_step  # noqa: E402
from jcuts.plan.spec import cluster as clusters  # noqa: E402

CLUSTER = "h200-x4-measured"
PROCESSES = (1, 2, 4)
"""Counts that divide 1,000 hidden units."""


def parameters(hidden: int) -> int:
    """Weights and biases."""
    return hidden * (INPUTS + 1) + CLASSES * (hidden + 1)


def summed_bytes(kind: str, how: Training, size: int = 8) -> int:
    """Bytes that each process gives to a step's all-reduce: gradients, or a mini-batch's logits."""
    return size * (parameters(how.hidden) if kind == "data" else how.batch * CLASSES)


def priced(kind: str, how: Training, devices: int, cluster: str = CLUSTER) -> dict[str, Any]:
    """Seconds of one float32 step on a cluster, by `spmd_step.step_time`: all of it, products, kernels, collectives."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = Params(shape(how.hidden, INPUTS), shape(how.hidden), shape(CLASSES, how.hidden), shape(CLASSES))
    step = STEPS[kind](how, AbstractMesh((devices,), (AXIS,)))
    batch = shape(how.batch, INPUTS), shape(how.batch, CLASSES), shape(how.batch)
    found = spmd_step.step_time(step, params, *batch, cluster=clusters.load(cluster))
    return {
        "seconds": found.seconds,
        "products": found.products,
        "kernels": found.kernels,
        "collectives": dict(found.collectives),
    }


def measured(kind: str, how: Training, counts: Sequence[int], digits: Path, work: Path) -> dict[str, Any]:
    """By number of processes, seconds per step and the largest difference from NumPy."""
    data = load_digits(digits)
    reference = network.train(data.x, data.y, how)
    steps = how.epochs * len(list(network.batches(len(data.x), how.batch)))
    found: dict[str, Any] = {}
    for count in counts:
        job = training.Job(digits, {1: how}, parallelism=kind)
        trained = training.run(job, count, work / f"{kind}_{count}")[1]
        seconds = max(f["seconds"]["training"] for f in trained.facts) / steps
        difference = network.largest(network.differences(trained.params[0], reference))
        found[str(count)] = {"seconds": seconds, "difference": difference}
        print(f"{kind} parallel, {count} processes: {1e3 * seconds:.2f} ms per step, {difference:.1e}", flush=True)
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Measures and prices both, and writes ``parallelism.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=9000, help="digits to generate")
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument("--dry", action="store_true", help="tiny sizes")
    args = parser.parse_args(given)
    count = 90 if args.dry else args.count
    how = replace(network.GRADING[1], epochs=args.epochs, hidden=8 if args.dry else args.hidden)
    how = replace(how, batch=32) if args.dry else how
    folder = args.out / f"digits_{count}"
    if not (folder / IMAGES).exists():
        write_digits(folder, count)
    result = {
        kind: {
            "summed_bytes": summed_bytes(kind, how),
            "measured": measured(kind, how, args.processes, folder, args.out / "work"),
            "priced": {str(n): priced(kind, how, n) for n in PROCESSES if n > 1},
        }
        for kind in STEPS
    }
    settings = {"hidden": how.hidden, "batch": how.batch, "cluster": CLUSTER}
    written(args.out / "parallelism.json", described() | settings | result)


if __name__ == "__main__":
    main()

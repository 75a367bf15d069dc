"""The course report's optimisation history as an ablation: `VARIANTS` of one training, each with one cost less.

    python benchmarks/mlp/history.py --out DIR [--count 9000] [--hidden 1000] [--dry]

The report (4.2) went from 92.2 to 26.7 s by allocating device memory once, keeping data on the device and avoiding
copies.  In JAX the same costs are: weights that go to the host and back in every step, mini-batches that are copied in
every step, operations that are dispatched one by one with an array allocated for each, and weights whose memory an
update does not take over.  Every variant trains the same weights, float64, one process.  Beside it the shares of the
step's operations, each compiled and timed alone (the report's Table 3).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.mlp import network  # noqa: E402
from benchmarks.mlp.digits import CLASSES, draw_digits  # noqa: E402
from benchmarks.mlp.jax_network import make_step, one_device_step, weighted_batches  # noqa: E402
from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.network import Params, Training, initial  # noqa: E402
from benchmarks.networks.interleaved_timing import back_to_back, quartiles  # noqa: E402

TURNS = 3
Parts = list[tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Variant:
    """How a training runs.

    Attributes: weights_stay: on the device, between steps; data_stay: mini-batches are copied before the first step,
        not in every one; step: "eager" (operation by operation), "jit", "donated" or "jcuts".
    """

    weights_stay: bool
    data_stay: bool
    step: str


VARIANTS = {
    "every step: weights to the host and back, batch copied, operation by operation": Variant(False, False, "eager"),
    "weights stay on the device": Variant(True, False, "eager"),
    "data on the device before the loop": Variant(True, True, "eager"),
    "one jit": Variant(True, True, "jit"),
    "weights donated": Variant(True, True, "donated"),
    "jcuts.optimize, donated": Variant(True, True, "jcuts"),
}


def step_of(kind: str, how: Training, **options: Any) -> Callable[..., Any]:
    """The step of a variant. Args: options: of `jcuts.optimize`."""
    if kind == "jcuts":
        return make_step(how, "jcuts", **options)
    if kind == "donated":
        return make_step(how)
    return jax.jit(one_device_step(how)) if kind == "jit" else one_device_step(how)


def trained(variant: Variant, parts: Parts, how: Training, step: Callable[..., Any]) -> Params:
    """Weights after all epochs, on the host."""
    data: list[Any] = jax.device_put(parts) if variant.data_stay else parts
    params = Params(*map(jnp.asarray, initial(how.hidden, parts[0][0].shape[1])))
    for _ in range(how.epochs):
        for part in data:
            if not variant.weights_stay:
                params = Params(*(jnp.array(np.array(p)) for p in params))
            params = step(params, *(part if variant.data_stay else map(jnp.array, part)))
    return Params(*map(np.asarray, jax.block_until_ready(params)))


def study(parts: Parts, how: Training, turns: int = TURNS, **options: Any) -> dict[str, Any]:
    """By variant: seconds (median, quartiles) and the largest difference from NumPy."""
    reference = initial(how.hidden, parts[0][0].shape[1])
    for _ in range(how.epochs):
        for x, y, _ in parts:
            grads = network.gradients(reference, x, y, how.reg)
            reference = Params(*(p - how.learning_rate * g for p, g in zip(reference, grads, strict=True)))
    steps = {name: step_of(variant.step, how, **options) for name, variant in VARIANTS.items()}
    found = {name: trained(VARIANTS[name], parts, how, step) for name, step in steps.items()}  # compiles
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(turns):
        for name in list(VARIANTS) if turn % 2 else list(VARIANTS)[::-1]:
            start = time.perf_counter()
            trained(VARIANTS[name], parts, how, steps[name])
            samples[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": quartiles(samples[name]),
            "difference": network.largest(network.differences(found[name], reference)),
        }
        for name in VARIANTS
    }


def operations(rows: int, hidden: int, inputs: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """The operations of a step: function, operands, calls per step."""
    rng = np.random.default_rng(0)
    x, h, z = (jnp.asarray(rng.random((rows, n))) for n in (inputs, hidden, CLASSES))
    w0, w1, b0 = jnp.asarray(rng.random((hidden, inputs))), jnp.asarray(rng.random((CLASSES, hidden))), h[0]

    def product(form: str) -> Callable[..., Any]:
        return partial(jnp.einsum, form)

    return {
        "GEMM, X W0'": (product("nk,mk->nm"), (x, w0), 1),
        "GEMM, H W1'": (product("nk,mk->nm"), (h, w1), 1),
        "GEMM, D1 W1": (product("nk,km->nm"), (z, w1), 1),
        "GEMM, D1' H": (product("nk,nm->km"), (z, h), 1),
        "GEMM, D0' X": (product("nk,nm->km"), (h, x), 1),
        "bias and sigmoid": (lambda a, b: jax.nn.sigmoid(a + b), (h, b0), 1),
        "derivative of sigmoid": (lambda a, b: a * b * (1 - b), (h, h), 1),
        "bias and softmax": (lambda a, b: jax.nn.softmax(a + b), (z, z[0]), 1),
        "sums for biases": (lambda a, b: (a.sum(0), b.sum(0)), (h, z), 1),
        "update of W and b": (lambda a, b, c: (a - 0.1 * a, b - 0.1 * b, c - 0.1 * c), (w0, w1, b0), 1),
    }


def shares(rows: int, hidden: int, inputs: int, turns: int) -> dict[str, dict[str, float]]:
    """By operation, seconds per step of it alone (median) and its share of their sum."""
    found: dict[str, float] = {}
    for name, (fn, operands, count) in operations(rows, hidden, inputs).items():
        call = partial(jax.jit(fn), *operands)
        back_to_back(call, 2)
        found[name] = count * quartiles([back_to_back(call, 3) for _ in range(turns)])[0]
    total = sum(found.values())
    return {name: {"seconds": seconds, "share": seconds / total} for name, seconds in found.items()}


def main(given: Sequence[str] | None = None) -> None:
    """Runs the ablation and writes ``history.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=9000, help="digits of an epoch")
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, nothing tuned")
    args = parser.parse_args(given)
    with jax.enable_x64(True):
        result = measured(args)
    written(args.out / "history.json", described() | result)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """What the command asks for."""
    how = replace(network.GRADING[1], epochs=1, hidden=8 if args.dry else args.hidden, batch=40 if args.dry else 800)
    images, labels = draw_digits(100 if args.dry else args.count)
    x, y = images.reshape(len(images), -1).astype(np.float64), np.eye(CLASSES)[labels]
    parts = weighted_batches(x, y, how.batch, 1)
    tuning: dict[str, Any] = {"tune": "off", "mode": "fusion"} if args.dry else {"tune_seconds": args.tune_seconds}
    found = study(parts, how, 1 if args.dry else TURNS, **tuning)
    for name, row in found.items():
        print(f"{row['seconds'][0]:8.3f} s  {row['difference']:.1e}  {name}")
    alone = shares(how.batch, how.hidden, x.shape[1], 2 if args.dry else 9)
    settings = {"samples": len(x), "hidden": how.hidden, "batch": how.batch, "epochs": how.epochs}
    return settings | {"variants": found, "operations": alone}


if __name__ == "__main__":
    main()

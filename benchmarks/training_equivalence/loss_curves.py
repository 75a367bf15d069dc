"""Loss curves of equal training runs: `jax.jit`, `jcuts.optimize`, and `jax.jit` from parameters moved by one ulp.

    python benchmarks/training_equivalence/loss_curves.py --out DIR [--network NAME ...] [--steps 300] [--perturbed 2]

All runs of a network begin with the same parameters and take the same batches in the same order; in perturbed ones
every parameter is moved to one of its neighbours in float32 at the beginning, so that they show how far runs that are
equally right drift apart.  The distance of two runs at the end is that of mean losses of the last third.  Writes a JSON
file per network, and ``loss_curves.svg``: losses, and below them distances from `jax.jit`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.compiled_program import own_arguments  # noqa: E402
from benchmarks.networks.line_chart import Panel, line_chart  # noqa: E402
from benchmarks.training_equivalence import network_processes, training_networks  # noqa: E402
from benchmarks.training_equivalence.training_networks import Network, Training  # noqa: E402

POOL = 512
"""Most batches of a run, which it goes through over and over: so many that none is learnt by heart."""
PERTURBED = "jax.jit, 1 ulp off"


def moved(tree: Any, seed: int) -> Any:
    """Parameters, each moved to its next larger or next smaller number at random."""
    import jax
    import numpy as np

    rng = np.random.default_rng(seed)

    def neighbour(x: Any) -> Any:
        values = np.asarray(x)
        towards = np.where(rng.random(values.shape) < 0.5, -np.inf, np.inf).astype(values.dtype)
        return jax.numpy.asarray(np.nextafter(values, towards))

    return jax.tree.map(neighbour, tree)


def losses(run: Training, steps: int) -> tuple[list[float], float]:
    """Losses of a run, and the seconds of its steps after the first."""
    import jax

    found = [jax.block_until_ready(run.step()[-1])]
    start = time.perf_counter()
    found += [run.step()[-1] for _ in range(steps - 1)]
    jax.block_until_ready(found)
    return [float(x) for x in found], time.perf_counter() - start


def last(curve: Sequence[float]) -> Sequence[float]:
    """The last third of a curve."""
    return curve[-max(1, len(curve) // 3) :]


def distance(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Difference of two curves: largest, median of the last third, of the last third's means; where they part.

    All are relative to the other curve's mean loss of the last third.
    """
    off, end = [abs(a - b) for a, b in zip(one, other, strict=True)], statistics.fmean(last(other))
    return {
        "largest": max(off) / end,
        "late": statistics.median(last(off)) / end,
        "end": abs(statistics.fmean(last(one)) - end) / end,
        "first step over 1e-3": next((k + 1 for k, d in enumerate(off) if d > 1e-3 * end), None),
    }


def measure(network: Network, options: argparse.Namespace) -> dict[str, Any]:
    """The runs of one network, in this process."""
    form = network.form(dry=options.dry)
    batches = training_networks.batches(form, min(POOL, options.steps))
    plain = training_networks.program("jax.jit", form)
    ours = training_networks.program("jcuts", form, options.mode, options.tune)
    curves, seconds = {}, {}
    for name, call in (("jax.jit", plain), ("jcuts", ours)):
        curves[name], seconds[name] = losses(Training(call, form, own_arguments(form), batches), options.steps)
    said = training_networks.chosen(ours, form.arguments)
    for seed in range(1, options.perturbed + 1):
        begin = own_arguments(form)
        begin = (*begin[: form.first], moved(begin[form.first], seed), *begin[form.first + 1 :])
        curves[f"{PERTURBED} ({seed})"], _ = losses(Training(plain, form, begin, batches), options.steps)
    base = curves["jax.jit"]
    return {
        "steps": options.steps,
        "jcuts": said,
        "seconds per step": {name: s / max(1, options.steps - 1) for name, s in seconds.items()},
        "loss": {name: {"begin": c[0], "end": statistics.fmean(last(c))} for name, c in curves.items()},
        "distance": {name: distance(c, base) for name, c in curves.items() if name != "jax.jit"},
        "curves": curves,
    }


def chart(found: dict[str, dict[str, Any]]) -> str:
    """Losses of all networks overlaid, and below them distances from `jax.jit`."""
    above, below = [], []
    for name, row in found.items():
        curves = row["curves"]
        others = [(n, [abs(a - b) for a, b in zip(c, curves["jax.jit"], strict=True)]) for n, c in curves.items()]
        above.append(Panel(f"{name}: loss", list(curves.items())))
        below.append(Panel(f"{name}: |loss - loss of jax.jit|", [o for o in others if o[0] != "jax.jit"], True))
    return line_chart("Equal training runs in float32", [above, below])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = network_processes.parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--perturbed", type=int, default=2, help="runs of jax.jit with moved parameters (%(default)s)")
    found = network_processes.run(__file__, parser, measure, argv)
    measured = {name: row for name, row in found.items() if "curves" in row}
    for name, row in measured.items():
        off = {n: f"{d['largest']:.1e}, late {d['late']:.1e}, end {d['end']:.1e}" for n, d in row["distance"].items()}
        ends = row["loss"]["jax.jit"]
        print(f"{name}: {row['jcuts']['chosen']}; loss {ends['begin']:.3f} to {ends['end']:.3f}; {off}")
    if measured:
        options = parser.parse_args(argv)
        (options.out / "loss_curves.svg").write_text(chart(measured), encoding="utf-8")
    return int(len(measured) < len(found))


if __name__ == "__main__":
    sys.exit(main())

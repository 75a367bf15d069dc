"""Convolutions of few outputs, as networks have them at batch 1: float32, constant weights, clusters of two kinds.

    python benchmarks/gpu_small_filters.py --out results --most 10 --budget 100

Clusters that copy a tile per tap (`region.gpu_groups`) against those that keep pixels (`region.gpu_window_clusters`),
in a sweep over tiles, clusters and stages wider than the ranking; columns as of `gpu_small.py`.  Needs a GPU of compute
capability 9.0; compiles in parallel first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import lax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_constants import Layer  # noqa: E402
from benchmarks.gpu_groups import build  # noqa: E402
from benchmarks.gpu_small import best_tiles, measure, product  # noqa: E402

LAYERS = (
    (1, 14, 256, 256, (3, 3)), (1, 7, 512, 512, (3, 3)), (1, 28, 128, 128, (3, 3)), (1, 56, 64, 64, (3, 3)),
    (1, 14, 128, 32, (3, 3)), (1, 17, 192, 192, (1, 7)), (1, 8, 448, 384, (3, 3)), (1, 35, 96, 96, (3, 3)),
    (1, 28, 128, 32, (3, 3)), (1, 35, 48, 64, (5, 5)), (1, 17, 160, 160, (7, 1)), (16, 14, 256, 256, (3, 3)),
    (16, 7, 512, 512, (3, 3)),
)  # fmt: skip
"""(batch, height and width, channels, features, filter) of ResNet50, DenseNet121 and InceptionV3."""


def layer(batch: int, size: int, channels: int, features: int, taps: tuple[int, int]) -> Layer:
    """A layer whose weights lie along terms, with a bias and ReLU."""

    def function(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
        return jnp.maximum(y + b, 0.0)

    shapes = ((batch, size, size, channels), (features, *taps, channels), (features,))
    name = f"{taps[0]}x{taps[1]} {batch}x{size}x{size}x{channels} to {features}"
    return Layer(name, function, tuple((s, "float32") for s in shapes))


def schedules(case: Layer, most: int) -> list[Any]:
    """Programs of a layer: so many of either kind, the best by their counted cycles."""
    from jcuts.region import gpu_groups, gpu_window_clusters
    from jcuts.region.gpu_tiles import GpuMachine
    from jcuts.region.group_windows import window

    made = product(case)
    counter, kept = gpu_groups.GroupCounter(made, GpuMachine(132)), window(made)
    found = [tiling.of(made) for tiling in best_tiles(counter, most)]
    if kept is not None:
        clusters: dict[tuple[int, ...], Any] = {}
        tilings = list(gpu_window_clusters.tilings(counter, kept))
        for tiling in sorted(tilings, key=lambda t: gpu_window_clusters.cycles(counter, kept, t)):
            stays = tiling.stages == kept.steps // tiling.cluster
            clusters.setdefault((tiling.rows, tiling.columns, tiling.cluster, stays, tiling.unrolled), tiling)
        found += [tiling.of(made) for tiling in list(clusters.values())[: 2 * most]]
    ranked = [p for p, _ in gpu_groups.products(made, GpuMachine(132))]
    return list({p.digest: p for p in (*ranked[:2], *found)}.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks import gpu_run
    from benchmarks.gpu_judged import options_of

    parser = options_of(__doc__, "gpu_small_filters", most=8, schedules="schedules of a kind per layer", budget=100.0)
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    cases = [layer(*shape) for shape in LAYERS]
    work = [(case, None, schedules(case, options.most)) for case in cases if gpu_run.wanted(case, options.only)]
    build([p for _, _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        measure(work, folder, options.out / "gpu_small_filters.json", [], (start, options.budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())

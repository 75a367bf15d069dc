"""Convolutions of few outputs, as networks have them at batch 1, with constant weights.

    python benchmarks/gpu_kernels/small_convs.py --out results --most 10 --budget 100
    python benchmarks/gpu_kernels/small_convs.py --out results --most 10 --budget 100 --bfloat16

float32: clusters that copy a tile per tap (`region.gpu_groups`) against those that keep pixels
(`region.gpu_window_clusters`).  bfloat16: both families of the ranking.  In either case a sweep over tiles, clusters
and stages wider than the ranking; columns as of `small_batch_gemm.py`.  ``--ranking RESULTS`` needs no GPU: how far the
best of the first 1, 2, 3, 4, 6, 8 schedules of today's ranking is behind the best that was measured.  Else a GPU of
compute capability 9.0 is needed; compiles in parallel first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.small_batch_gemm import best_tiles, measure, product  # noqa: E402
from benchmarks.gpu_kernels.tf32_weights import Layer  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

LAYERS = (
    (1, 14, 256, 256, (3, 3)),
    (1, 7, 512, 512, (3, 3)),
    (1, 28, 128, 128, (3, 3)),
    (1, 56, 64, 64, (3, 3)),
    (1, 14, 128, 32, (3, 3)),
    (1, 17, 192, 192, (1, 7)),
    (1, 8, 448, 384, (3, 3)),
    (1, 35, 96, 96, (3, 3)),
    (1, 28, 128, 32, (3, 3)),
    (1, 35, 48, 64, (5, 5)),
    (1, 17, 160, 160, (7, 1)),
    (16, 14, 256, 256, (3, 3)),
    (16, 7, 512, 512, (3, 3)),
)
"""(batch, height and width, channels, features, filter) of ResNet50, DenseNet121 and InceptionV3."""
HALVES = (
    (1, 56, 64, 64, (3, 3)),
    (1, 28, 128, 128, (3, 3)),
    (1, 14, 256, 256, (3, 3)),
    (1, 7, 512, 512, (3, 3)),
    (1, 56, 64, 256, (1, 1)),
    (1, 56, 256, 64, (1, 1)),
    (1, 28, 128, 512, (1, 1)),
    (1, 28, 512, 128, (1, 1)),
    (1, 14, 256, 1024, (1, 1)),
    (1, 14, 1024, 256, (1, 1)),
    (1, 7, 512, 2048, (1, 1)),
    (1, 7, 2048, 512, (1, 1)),
    (1, 14, 128, 32, (3, 3)),
    (1, 7, 128, 32, (3, 3)),
    (1, 28, 128, 32, (3, 3)),
    (1, 7, 896, 128, (1, 1)),
    (1, 14, 768, 128, (1, 1)),
)
"""Those of bfloat16: ResNet50 and DenseNet121."""
TRIED = (1, 2, 3, 4, 6, 8)


def layer(batch: int, size: int, channels: int, features: int, taps: tuple[int, int], dtype: str = "float32") -> Case:
    """A layer whose weights lie along terms, with a bias and ReLU."""

    def function(x: Any, w: Any, b: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
        return jnp.maximum(y + b, 0)

    shapes = ((batch, size, size, channels), (features, *taps, channels), (features,))
    name = f"{taps[0]}x{taps[1]} {batch}x{size}x{size}x{channels} to {features}"
    half = dtype != "float32"
    made = Case if half else Layer
    return made(f"{name} {dtype}" if half else name, function, tuple((s, dtype) for s in shapes))


def halves(case: Case, most: int) -> list[Any]:
    """Programs of a layer of bfloat16: the ranking, and so many schedules of few blocks."""
    from jcuts.schedule.gpu import contraction
    from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
    from jcuts.schedule.gpu.machine import GpuMachine

    made = product(case)
    counter = WgmmaProblem(made, GpuMachine.named("H200"))
    found = [p for p, _ in contraction.contraction_schedules(made, GpuMachine.named("H200"))]
    found += [tiling.of(made) for tiling in best_tiles(counter.small_grid if counter.few else counter, most)]
    return list({p.digest: p for p in found}.values())


def schedules(case: Case, most: int) -> list[Any]:
    """Programs of a layer: so many of either kind, the best by their counted cycles."""
    from jcuts.lower.patterns.conv_window import match_conv_window
    from jcuts.schedule.gpu import contraction
    from jcuts.schedule.gpu.conv import implicit_gemm_cluster
    from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
    from jcuts.schedule.gpu.machine import GpuMachine

    made = product(case)
    counter, kept = WgmmaProblem(made, GpuMachine.named("H200")), match_conv_window(made)
    found = [tiling.of(made) for tiling in best_tiles(counter, most)]
    if kept is not None:
        clusters: dict[tuple[int, ...], Any] = {}
        tilings = list(implicit_gemm_cluster.cluster_tiles(counter, kept))
        for tiling in sorted(tilings, key=lambda t: implicit_gemm_cluster.cycles(counter, kept, t)):
            stays = tiling.stages == kept.k_tiles // tiling.cluster
            clusters.setdefault((tiling.rows, tiling.columns, tiling.cluster, stays, tiling.unrolled), tiling)
        found += [tiling.of(made) for tiling in list(clusters.values())[: 2 * most]]
    ranked = [p for p, _ in contraction.contraction_schedules(made, GpuMachine.named("H200"))]
    return list({p.digest: p for p in (*ranked[:2], *found)}.values())


def behind(path: Path) -> dict[str, list[float]]:
    """How far the best of the first schedules of today's ranking is behind the best, of those that a file has times of.

    Returns: case -> times over the best one, for every number of `TRIED`.
    """
    from jcuts.schedule.gpu import contraction
    from jcuts.schedule.gpu.machine import GpuMachine

    def known(params: Any) -> str:
        return json.dumps({k: v for k, v in params if k not in ("cuda", "threads", "rounded")}, sort_keys=True)

    cases = {c.name: c for c in (*(layer(*s) for s in LAYERS), *(layer(*s, "bfloat16") for s in HALVES))}
    found: dict[str, list[float]] = {}
    for row in json.loads(path.read_text()):
        times = {known(p["params"].items()): p["median"] for n, p in row["programs"].items() if n.isdigit()}
        order = sorted(
            contraction.contraction_schedules(product(cases[row["case"]]), GpuMachine.named("H200")),
            key=lambda pair: -pair[1],
        )
        ranked = [times[name] for program, _ in order if (name := known(program.params)) in times]
        found[row["case"]] = [min(ranked[:n]) / min(times.values()) for n in TRIED]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.paired_timing import options_of

    parser = options_of(__doc__, "gpu_small_filters", most=8, schedules="schedules of a kind per layer", budget=100.0)
    parser.add_argument("--bfloat16", action="store_true", help="layers of bfloat16")
    parser.add_argument("--ranking", type=Path, help="only compare the ranking with the times of this file")
    options = parser.parse_args(arguments)
    if options.ranking:
        found = behind(options.ranking)
        found["geometric mean"] = list(np.exp(np.mean(np.log(list(found.values())), axis=0)))
        for name, values in found.items():
            print(f"{name:40}" + " ".join(f"{x:6.3f}" for x in values))
        return 0
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    half = options.bfloat16
    cases = [layer(*shape, "bfloat16") for shape in HALVES] if half else [layer(*shape) for shape in LAYERS]
    chosen = [case for case in cases if run.wanted(case, options.only)]
    work = [(case, None, (halves if half else schedules)(case, options.most)) for case in chosen]
    build([p for _, _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        measure(work, folder, options.out / "gpu_small_filters.json", [], (start, options.budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())

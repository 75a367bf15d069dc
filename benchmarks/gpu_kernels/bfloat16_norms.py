"""Layers of networks that compute in bfloat16, with their norms in float32: kernels against XLA.

    python benchmarks/gpu_kernels/bfloat16_norms.py --out results --most 6 --budget 100

A layer is a convolution (or product) whose result goes through a float32 norm with known statistics and an activation,
as keras' networks have it; some have such a norm before the product, too.  Needs a GPU of compute capability 9.0;
compiles in parallel first.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402

CONVOLUTIONS = (
    (56, 64, 64, (3, 3), 1),
    (28, 128, 128, (3, 3), 1),
    (14, 256, 256, (3, 3), 1),
    (7, 512, 512, (3, 3), 1),
    (56, 128, 32, (3, 3), 1),
    (28, 128, 32, (3, 3), 1),
    (14, 128, 32, (3, 3), 1),
    (147, 32, 64, (3, 3), 1),
    (73, 80, 192, (3, 3), 1),
    (17, 192, 192, (1, 7), 1),
    (17, 160, 160, (7, 1), 1),
    (35, 96, 96, (3, 3), 1),
    (8, 448, 384, (3, 3), 1),
    (149, 32, 32, (3, 3), 1),
)
"""(height and width, channels, features, filter, stride) of ResNet50, DenseNet121, InceptionV3."""
INCEPTION = (
    (149, 32, 32, (3, 3), 1, "VALID"),
    (147, 32, 64, (3, 3), 1, "SAME"),
    (73, 80, 192, (3, 3), 1, "VALID"),
    (299, 3, 32, (3, 3), 2, "VALID"),
    (35, 288, 384, (3, 3), 2, "VALID"),
    (35, 48, 64, (5, 5), 1, "SAME"),
    (35, 96, 96, (3, 3), 1, "SAME"),
    (35, 64, 96, (3, 3), 1, "SAME"),
)
"""The same with padding, of InceptionV3: its first layers, and those with few channels."""
JOINED = ((1225, 192, 208), (1225, 288, 240), (289, 768, 768), (289, 768, 640), (64, 2048, 1344))
"""Products as `PRODUCTS`: InceptionV3's siblings, joined."""
POOLS = ((35, 400, 32), (17, 1216, 192), (8, 3072, 192))
"""(height and width, channels of a pixel, those that are averaged over 3x3): pooled branches behind such products."""
PRODUCTS = ((3136, 64, 256), (784, 512, 128), (196, 1024, 256), (784, 128, 512), (12544, 16, 96), (289, 768, 192))
"""(rows of an image, terms, columns)."""
NORMS = ((3136, 96, 128), (3136, 224, 128), (784, 256, 128), (784, 480, 128), (196, 768, 128))
"""The same of products behind a norm: DenseNet121."""
TYPES = {"h": "bfloat16", "f": "float32"}


def norm(x: Any, s: Any, t: Any) -> Any:
    """A batch norm with known statistics, in float32, and ReLU."""
    return jnp.maximum((x.astype(jnp.float32) * s + t).astype(x.dtype), 0)


def _case(name: str, function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], types: str) -> Case:
    return Case(name, function, tuple((s, TYPES[t]) for s, t in zip(shapes, types, strict=True)))


def layers(batch: int) -> list[Case]:
    """All layers, those that tell most first."""
    found = []
    for h, c, k, taps, stride, padding in INCEPTION:
        found.append(_convolution(batch, h, c, k, taps, stride, padding))
    for rows, k, n in JOINED:
        found.append(_product(batch, rows, k, n))
    for h, c, k in POOLS:
        shapes = ((batch, h, h, c), (1, h, h, 1), (k,), (k,))
        found.append(_case(f"bfloat16 pool {batch}x{h}x{h}x{k} of {c}", _pooled, shapes, "hhff"))
    for rows, k, n in NORMS:
        shapes = ((batch * rows, k), (k, n), (k,), (k,), (n,), (n,))
        found.append(
            _case(
                f"bfloat16 norm {batch * rows}x{k}x{n}",
                lambda x, w, s, t, u, v: norm(norm(x, s, t) @ w, u, v),
                shapes,
                "hhffff",
            )
        )
    for h, c, k, taps, stride in CONVOLUTIONS:
        found.append(_convolution(batch, h, c, k, taps, stride, "SAME"))
    for rows, k, n in PRODUCTS:
        found.append(_product(batch, rows, k, n))
    return list({case.name: case for case in found}.values())


def _convolution(batch: int, h: int, c: int, k: int, taps: tuple[int, int], stride: int, padding: str) -> Case:
    def convolved(x: Any, w: Any, s: Any, t: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        return norm(lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=names), s, t)

    shapes = ((batch, h, h, c), (*taps, c, k), (k,), (k,))
    name = f"bfloat16 convolution {taps[0]}x{taps[1]} {batch}x{h}x{h}x{c} to {k}"
    return _case(name, convolved, shapes, "hhff")


def _product(batch: int, rows: int, k: int, n: int) -> Case:
    shapes = ((batch * rows, k), (k, n), (n,), (n,))
    return _case(f"bfloat16 product {batch * rows}x{k}x{n}", lambda x, w, s, t: norm(x @ w, s, t), shapes, "hhff")


def _pooled(x: Any, count: Any, s: Any, t: Any) -> Any:
    """Averages of the last channels, with a norm behind them."""
    part = lax.slice_in_dim(x, x.shape[3] - s.size, x.shape[3], axis=3)
    return norm(lax.reduce_window(part, x.dtype.type(0), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / count, s, t)


def schedules(case: Case, most: int) -> list[Any]:
    """The best programs by the ranking; of what keeps pixels, and of what does not, a few each."""
    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.fusion.move_epilogue import CHEAP
    from jcuts.kernel_ir.program import Program
    from jcuts.lower.region import lower_region
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.schedule.gpu import candidates as gpu_candidates
    from jcuts.trace.inline import inline

    graph = build_graph(simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case)))).jaxpr)
    program = lower_region(graph, frozenset(range(len(graph.nodes))), cheap=CHEAP)
    if not isinstance(program, Program):
        raise SystemExit(f"{case.name}: {program}")
    ranked = [p for p, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine.named("H200"), 4 * most)]
    kept = [p for p in ranked if "pixels" in dict(p.params)]
    others = [p for p in ranked if "pixels" not in dict(p.params)]
    return kept[: math.ceil(most / 2)] + others[: most - min(len(kept), math.ceil(most / 2))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.paired_timing import options_of
    from benchmarks.gpu_kernels.wgmma_tiles import build, race

    parser = options_of(__doc__, "gpu_halves", most=6, schedules="schedules per layer", budget=100.0)
    parser.add_argument("--batch", type=int, default=64, help="images")
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    cases = [case for case in layers(options.batch) if run.wanted(case, options.only)]
    work = [(case, schedules(case, options.most)) for case in cases]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "gpu_halves.json", options.budget, start, graphs=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

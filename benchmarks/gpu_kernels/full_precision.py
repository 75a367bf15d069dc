"""Products and convolutions of float32 with ``precision`` HIGHEST and of float64, against XLA's, errors beside.

    python benchmarks/gpu_kernels/full_precision.py --out results --most 8 --budget 200

Needs a GPU (``--build``: only compiles, for capability 9.0). Kernels compile in parallel first; then every case as in
`run.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
GEMMS = ((4096, 4096, 4096), (3072, 1024, 4096), (384, 768, 3072), (12544, 256, 1024), (50176, 128, 512))
"""Rows, terms, columns."""
CONVOLUTIONS = ((64, 56, 64, 64), (64, 28, 128, 128), (64, 14, 256, 256), (64, 7, 512, 512), (16, 35, 96, 96))
"""Images, pixels along each side, channels, features of 3x3 convolutions."""


def cases() -> list[Any]:
    """All of them, with bias and ReLU."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from benchmarks.gpu_kernels.cases import Case

    def dense(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(jnp.dot(x, w, precision="highest") + b)

    def convolved(x: Any, w: Any, b: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        made = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names, precision="highest")
        return jax.nn.relu(made + b)

    found = []
    for kind, name in (("float32", "highest"), ("float64", "float64")):
        for m, k, n in GEMMS:
            shapes = (((m, k), kind), ((k, n), kind), ((n,), kind))
            found.append(Case(f"gemm {m}x{k}x{n} {name}", dense, shapes))
        for images, side, channels, features in CONVOLUTIONS:
            sizes = ((images, side, side, channels), (3, 3, channels, features), (features,))
            shapes = tuple((size, kind) for size in sizes)
            found.append(Case(f"conv3x3 {images}x{side}x{side}x{channels} to {features} {name}", convolved, shapes))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.paired_timing import options_of
    from benchmarks.gpu_kernels.wgmma_tiles import build, race
    from jcuts.schedule.gpu import candidates as gpu_candidates

    options = options_of(
        __doc__, "gpu_exact", most=8, schedules="schedules per case", budget=200.0, what="case"
    ).parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work = []
    for case in cases():
        if run.wanted(case, options.only) and (program := run.program_of(case)[0]) is not None:
            found = gpu_candidates.candidates(program, gpu_candidates.GpuMachine.named("H200"), options.most)
            work.append((case, [p for p, _ in found]))
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "gpu_exact.json", options.budget, start, hidden=("cuda", "threads"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Networks' first convolutions, with bias and activation: schedules of the patch form against XLA.

    python benchmarks/gpu_kernels/few_channel_convs.py --out results --most 14 --budget 50

Needs a GPU. Kernels compile in parallel first; then every layer as in `run.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OTHERS = 1  # candidates of other forms


def layers() -> list[Any]:
    """ResNet50 and DenseNet121, InceptionV3, MobileNetV2 and EfficientNet; 64 images and one."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from benchmarks.gpu_kernels.cases import Case

    def layer(end: Callable[..., Any], padding: Any) -> Callable[..., Any]:
        names = ("NHWC", "HWIO", "NHWC")
        return lambda x, w, b: end(lax.conv_general_dilated(x, w, (2, 2), padding, dimension_numbers=names) + b)

    def relu6(x: Any) -> Any:
        return jnp.clip(x, 0.0, 6.0)

    found = []
    for name, size, taps, columns, padding, end in (
        ("ResNet50", 224, 7, 64, ((3, 3), (3, 3)), jax.nn.relu),
        ("MobileNetV2", 224, 3, 32, "SAME", relu6),
        ("InceptionV3", 299, 3, 32, "VALID", jax.nn.relu),
    ):
        for batch in (64, 1):
            shapes = ((batch, size, size, 3), (taps, taps, 3, columns), (columns,))
            made = Case(f"{name}, batch {batch}", layer(end, padding), tuple((s, "float32") for s in shapes))
            found.append(made)
            if size % 2 == 0 and batch > 1:
                short = tuple((s, "bfloat16") for s in shapes)
                found.append(Case(f"{name} bfloat16, batch {batch}", layer(end, padding), short))
    return sorted(found, key=lambda case: ("bfloat16" in case.name, case.name.endswith(" 1")))


def schedules(case: Any, most: int) -> list[Any]:
    """The best share of tiles of every tile, as ranked; then candidates of other forms."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv
    from jcuts.schedule.gpu import candidates as gpu_candidates
    from jcuts.schedule.gpu.conv import few_channels

    program = program_of(case)[0]
    if program is None:
        return []
    made = as_few_channel_conv(program)
    if made is None:
        return []
    machine = gpu_candidates.GpuMachine.named("H200")
    best: dict[Any, Any] = {}
    for shape in few_channels.shapes(made, machine):
        count = few_channels.cycles(made, shape, machine)
        key = (shape.rows, shape.pixels, shape.columns, shape.warps, shape.stages)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    ranked = sorted(best.values(), key=lambda found: found[0])
    chosen = [p for p, _ in few_channels.products(program, machine, most)]
    names = {p.digest for p in chosen}
    more = [few_channels.apply_tile(made, shape) for _, shape in ranked]
    chosen += [p for p in more if p.digest not in names][: max(0, most - len(chosen))]
    others = [p for p, _ in gpu_candidates.candidates(program, machine, 20) if dict(p.params)["cuda"] != "patch"]
    return chosen + others[:OTHERS]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.wgmma_tiles import build, race

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_first_layers"))
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels (a folder of --out)")
    parser.add_argument("--only", default="", help="only layers whose name contains one of these")
    parser.add_argument("--most", type=int, default=14, help="schedules per layer")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.kernels or options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work = [(case, schedules(case, options.most)) for case in layers() if run.wanted(case, options.only)]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "gpu_first_layers.json", options.budget, start)
    return 0


if __name__ == "__main__":
    sys.exit(main())

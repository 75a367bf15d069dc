"""1x1 convolutions of large batches that are bound by memory, with and without a matrix that is added before ReLU.

    python benchmarks/gpu_kernels/residual_epilogue.py --out results --budget 150

ResNet50's at batch 64, float32 with rounded weights: XLA (as a convolution and as a product), the first schedules of
the ranking, and tiles with all ways of an exit (``held``, ``early``; `region.gpu_held`); two of them with weights as
arguments and in bfloat16.  "copy" reads the added matrix and writes a result of its size.  Inputs are rotated: the L2
cache is cold.  Needs a GPU of compute capability 9.0; compiles in parallel first.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.paired_timing import in_turn, judged, listed  # noqa: E402
from benchmarks.gpu_kernels.tf32_weights import TF32  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

SIZES = ((200704, 64, 256), (50176, 128, 512), (12544, 256, 1024), (3136, 512, 2048))
"""(rows, terms, columns)."""
IMAGES = 64
TILES = ((64, 64, 1), (64, 128, 1), (128, 64, 2), (128, 128, 2), (64, 256, 1))
"""(rows, columns, groups along the rows) that are tried beside the ranking's."""
BEFORE = {
    "200704x64x256 residual": ((256, 96, 32, (2, 1), 3), (128, 128, 32, (2, 1), 3)),
    "50176x128x512 residual": ((256, 96, 32, (2, 1), 3), (128, 128, 32, (2, 1), 4)),
    "12544x256x1024 residual": ((128, 128, 32, (2, 1), 6),),
    "3136x512x2048 residual": ((64, 128, 32, (1, 1), 4),),
}
"""What was chosen before there were such exits: rows, columns, terms, groups, stages."""
MOST = (64, 128, 1)
"""The one with several numbers of stages."""
EXITS = ((0, 0), (0, 1), (1, 0), (2, 0), (3, 1))
"""(held, early)."""
FED = ((128, 128, 2, 4), (192, 128, 3, 4), (128, 64, 2, 4), (192, 64, 3, 4), (256, 64, 2, 4), (128, 64, 2, 2))
"""(rows, columns, groups, warps that copy) of blocks that go on from tile to tile."""


@dataclass(frozen=True)
class Layer(Case):
    """A layer whose weights (argument 1) are numbers of TF32, where they are ``rounded``."""

    rounded: bool = True
    added: bool = True

    def arguments(self, seed: int) -> list[np.ndarray]:
        found = super().arguments(seed)
        if self.rounded:
            found[1] = (found[1].view(np.uint32) & TF32).view(np.float32)
        return found


def _dense(along: bool, added: bool) -> Any:
    numbers = (((1,), (1 if along else 0,)), ((), ()))

    def layer(x: Any, w: Any, b: Any, *r: Any) -> Any:
        y = lax.dot_general(x, w, numbers) + b
        return jnp.maximum(y + r[0] if added else y, 0)

    return layer


def _convolution(along: bool, added: bool) -> Any:
    """The same as XLA gets it from a network."""
    numbers = ("NHWC", "OHWI" if along else "HWIO", "NHWC")

    def layer(x: Any, w: Any, b: Any, *r: Any) -> Any:
        side = round((x.shape[0] // IMAGES) ** 0.5)
        image = (IMAGES, side, side, -1)
        kernel = w[:, None, None, :] if along else w[None, None]
        y = lax.conv_general_dilated(x.reshape(image), kernel, (1, 1), "VALID", dimension_numbers=numbers) + b
        return jnp.maximum(y + r[0].reshape(image) if added else y, 0).reshape(x.shape[0], -1)

    return layer


def layers() -> list[Layer]:
    """All of them."""
    found = []
    for added in (True, False):
        for m, k, n in SIZES:
            shapes = ((m, k), (n, k), (n,), *(((m, n),) if added else ()))
            name = f"{m}x{k}x{n} {'residual' if added else 'alone'}"
            found.append(Layer(name, _dense(True, added), tuple((s, "float32") for s in shapes), added=added))
    for m, k, n in SIZES[::2]:
        shapes = ((m, k), (k, n), (n,), (m, n))
        for dtype in ("float32", "bfloat16"):
            name = f"{m}x{k}x{n} residual {dtype} arguments"
            found.append(Layer(name, _dense(False, True), tuple((s, dtype) for s in shapes), rounded=False))
    return found


def schedules(case: Layer, most: int, tiles: Sequence[Sequence[int]]) -> list[Any]:
    """The first schedules of the ranking, and tiles with every exit."""
    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.base.errors import CompileRejected
    from jcuts.codegen.cuda.gemm.wgmma_tile import group_shape
    from jcuts.lower.patterns.gemm import as_gemm, gemm_operands, k_tiles_per_split
    from jcuts.lower.region import lower_region
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.schedule.gpu.candidates import GpuMachine
    from jcuts.schedule.gpu.contraction import contraction_schedules
    from jcuts.schedule.gpu.gemm import mma as gemm_mma
    from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
    from jcuts.trace.inline import inline

    graph = build_graph(simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case)))).jaxpr)
    made = as_gemm(lower_region(graph, frozenset(range(len(graph.nodes)))))  # type: ignore[arg-type]
    assert made is not None, case.name
    if case.rounded:
        right = gemm_operands(made)[1].buffer
        made = replace(made, buffers=tuple(replace(b, tf32=b.name == right) for b in made.buffers))
    item = gemm_operands(made)[0].item
    terms = 128 // item
    share, _ = k_tiles_per_split(case.shapes[0][0][1], terms, 1)
    found = [p for p, _ in contraction_schedules(made, GpuMachine.named("H200"))][:most]
    if case.rounded:
        found += [WgmmaTile(*tile, rounded=1).of(made) for tile in BEFORE.get(case.name, ())]
    else:
        for program, _ in gemm_mma.mma_schedules(made, GpuMachine.named("H200"), 1):
            found += [program, replace(program, params=(*program.params, ("early", 1)))]
    if case.rounded and tiles is not TILES:
        return found + fed(case, made)
    for tile, (held, early) in ((t, e) for t in tiles for e in EXITS):
        rows, columns, groups = tile
        if not case.added and (held in (1, 3) or early):
            continue
        through = item == 4 and not case.rounded
        depths = ((2, 1),) if through else ((share, 0),) if share <= 2 else ((4, 0), (3, 0))[: 2 if tile == MOST else 1]
        for stages, flight in depths:
            spread = case.rounded and share > stages and columns < 256
            tiling = WgmmaTile(
                rows,
                columns,
                terms,
                (groups, 1),
                stages,
                flight,
                early=early,
                held=held,
                rounded=int(case.rounded),
                spread=int(spread),
                steps=2 if spread else 1,
            )
            program = tiling.of(made)
            try:
                shape = group_shape(program)
            except CompileRejected:
                continue
            if shape.shared <= 227 << 10 and program.digest not in {p.digest for p in found}:
                found.append(program)
    return found


def fed(case: Layer, made: Any) -> list[Any]:
    """Blocks that go on from tile to tile; what is added comes by stages, too, or as lanes ask for it."""
    from jcuts.base.errors import CompileRejected
    from jcuts.codegen.cuda.warp_specialized.tile import fed_shape
    from jcuts.schedule.gpu.warp_specialized.schedules import MOST_SHARED, MOST_STAGES, STAGES, WarpSpecializedTile

    (rows, _), (columns, _) = case.shapes[0][0], case.shapes[1][0]
    found = []
    for high, wide, groups, carriers in FED:
        rounds = -(-(-(-rows // high) * -(-columns // wide)) // 132)
        for early, beside in ((1, 0), (0, 1), (1, 1)) if case.added else ((0, 0),):
            for stages in range(MOST_STAGES, STAGES - 1, -1):
                program = WarpSpecializedTile(high, wide, groups, stages, carriers, 0, rounds, early, beside).of(made)
                try:
                    fits = fed_shape(program).shared <= MOST_SHARED
                except CompileRejected:
                    fits = False
                if fits:
                    found.append(program)
                    break
    return found


def measured(case: Layer, programs: Sequence[Any], folder: Path) -> dict[str, Any]:
    """One layer: XLA, a copy, and all programs, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.xla.cpu_ffi_call import call_kernel

    row: dict[str, Any] = {"case": case.name, "bytes": case.moved(), "programs": {}, "rejected": {}}
    count = int(min(run.MOST_SETS, max(4, -(-run.ROTATED // case.moved()))))
    first = tuple(jnp.asarray(a) for a in case.arguments(0))
    sets = [tuple(jax.block_until_ready(jnp.roll(a, k)) for a in first) for k in range(count)]
    functions: dict[str, Callable[..., Any]] = {
        "xla": case.function,
        "xla convolution": _convolution(case.rounded, case.added),
    }
    if case.added:
        functions["copy"] = lambda x, w, b, r: jnp.maximum(r + b, 0)
    params: dict[str, Any] = {}
    for number, program in enumerate(programs):
        path = folder / f"{program.digest}.kernel"
        if path.exists():
            kernel, name = read_kernel(path), str(number)
            params[name] = {k: v for k, v in program.params if k not in ("cuda", "threads")}
            functions[name] = lambda *xs, k=kernel: call_kernel(k, *run.operands_of(k, xs))
    with jax.enable_x64(True):
        wide = jax.jit(case.function)(*(a.astype(jnp.float64) for a in first))
    compiled: dict[str, Any] = {}
    lowered = {name: jax.jit(run.chain(f, count)).lower(sets) for name, f in functions.items()}
    for name in ("xla", "xla convolution"):  # alone: they are tuned meanwhile
        compiled[name] = lowered.pop(name).compile()
    judged(row, compiled, lowered, params, sets, wide)
    return row


def show(row: dict[str, Any]) -> None:
    """A table of one layer."""
    from benchmarks.gpu_kernels.run import CEILING

    print(f"{row['case']:44} bound {row['bytes'] / CEILING * 1e6:8.2f}")
    listed(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_residual"))
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels (default: in --out)")
    parser.add_argument("--only", default="", help="only layers whose name contains one of these")
    parser.add_argument("--most", type=int, default=6, help="schedules of the ranking per layer")
    parser.add_argument("--fed", action="store_true", help="warps that copy instead of all ways of an exit")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(arguments)
    folder = options.kernels or options.out / "kernels"
    for made in (options.out, folder):
        made.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    cases = [case for case in layers() if run.wanted(case, options.only) and (case.rounded or not options.fed)]
    work = [(case, schedules(case, options.most, () if options.fed else TILES)) for case in cases]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    in_turn(
        (
            (case.name, functools.partial(measured, case, programs, folder))
            for case, programs in ([] if options.build else work)
        ),
        show,
        options.out / "gpu_residual.json",
        options.budget,
        start,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""float32 products and convolutions whose weights are constants: kernels that take rounded weights as they are.

    python benchmarks/gpu_kernels/tf32_weights.py --out results --most 10 --budget 150

Every layer twice: with weights as networks have them (XLA, and the best schedule that rounds both operands), and with
rounded weights along terms, as the rewrite `rounds` leaves them (XLA, and schedules of `rounded`).  Needs a GPU of
compute capability 9.0; compiles in parallel first.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
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
from benchmarks.gpu_kernels.paired_timing import in_turn, judged, listed, options_of  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

GEMMS = (
    (4096, 4096, 4096),
    (3072, 1024, 4096),
    (384, 768, 768),
    (384, 768, 3072),
    (384, 3072, 768),
    (50176, 256, 128),
    (12544, 1024, 256),
    (200704, 64, 256),
    (50176, 128, 512),
    (12544, 768, 128),
    (50176, 512, 128),
    (3136, 512, 2048),
    (200704, 256, 64),
    (3136, 768, 128),
)
"""(rows, terms, columns): square and transformer ones, 1x1 convolutions of ResNet50 and DenseNet121 at batch 64."""
CONVOLUTIONS = (
    (56, 64, 64, (3, 3), 1),
    (28, 128, 128, (3, 3), 1),
    (14, 256, 256, (3, 3), 1),
    (7, 512, 512, (3, 3), 1),
    (28, 128, 32, (3, 3), 1),
    (14, 128, 32, (3, 3), 1),
    (17, 192, 192, (1, 7), 1),
    (35, 96, 96, (3, 3), 1),
    (8, 448, 384, (3, 3), 1),
    (56, 128, 32, (3, 3), 1),
    (17, 192, 192, (7, 1), 1),
    (35, 48, 64, (5, 5), 1),
    (56, 128, 128, (3, 3), 2),
    (56, 256, 512, (1, 1), 2),
    (28, 512, 1024, (1, 1), 2),
    (14, 1024, 2048, (1, 1), 2),
)
"""(height and width, channels, features, filter, stride) at batch 64: ResNet50, DenseNet121, InceptionV3."""
ADDED = ((12544, 256, 1024), (3136, 512, 2048), (50176, 128, 512))
"""(rows, terms, columns) of 1x1 convolutions to whose results a matrix is added: ResNet50 at batch 64."""
NORMS = ((200704, 128, 128), (50176, 256, 128), (12544, 768, 128), (3136, 896, 128))
"""(rows, terms, columns) of 1x1 convolutions behind a norm with known statistics and ReLU: DenseNet121 at batch 64."""
BATCH = 64
TF32 = np.uint32(0xFFFFE000)
"""The bits that a TF32 number has of a float32."""


@dataclass(frozen=True)
class Layer(Case):
    """A layer whose weights (argument 1) are numbers of TF32."""

    def arguments(self, seed: int) -> list[np.ndarray]:
        found = super().arguments(seed)
        found[1] = (found[1].view(np.uint32) & TF32).view(np.float32)
        return found


def _dense(along: bool) -> Any:
    numbers = (((1,), (1 if along else 0,)), ((), ()))
    return lambda x, w, b: jnp.maximum(lax.dot_general(x, w, numbers) + b, 0.0)


def _added(along: bool) -> Any:
    numbers = (((1,), (1 if along else 0,)), ((), ()))
    return lambda x, w, b, r: jnp.maximum(lax.dot_general(x, w, numbers) + b + r, 0.0)


def _norm(along: bool) -> Any:
    dense = _dense(along)
    return lambda x, w, b, s, t: dense(jnp.maximum(x * s + t, 0.0), w, b)


def _convolution(along: bool, stride: int) -> Any:
    numbers = ("NHWC", "OHWI" if along else "HWIO", "NHWC")
    return lambda x, w, b: jnp.maximum(
        lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers) + b, 0.0
    )


def layers(along: bool) -> list[Layer]:
    """All layers. Args: along: weights lie along terms."""
    how, found = ("along terms" if along else "as they are"), []
    for h, c, k, taps, stride in CONVOLUTIONS:
        shapes = ((BATCH, h, h, c), (k, *taps, c) if along else (*taps, c, k), (k,))
        name = f"convolution {taps[0]}x{taps[1]} {BATCH}x{h}x{h}x{c} to {k} stride {stride} {how}"
        found.append(Layer(name, _convolution(along, stride), tuple((s, "float32") for s in shapes)))
    for m, k, n in GEMMS:
        shapes = ((m, k), (n, k) if along else (k, n), (n,))
        found.append(Layer(f"gemm {m}x{k}x{n} {how}", _dense(along), tuple((s, "float32") for s in shapes)))
    for m, k, n in ADDED:
        shapes = ((m, k), (n, k) if along else (k, n), (n,), (m, n))
        found.append(Layer(f"added {m}x{k}x{n} {how}", _added(along), tuple((s, "float32") for s in shapes)))
    for m, k, n in NORMS:
        shapes = ((m, k), (n, k) if along else (k, n), (n,), (k,), (k,))
        found.append(Layer(f"norm {m}x{k}x{n} {how}", _norm(along), tuple((s, "float32") for s in shapes)))
    return sorted(found, key=lambda case: "4096x4096" not in case.name)


def schedules(case: Case, most: int, along: bool, tiles: Sequence[Sequence[Any]]) -> list[Any]:
    """The best programs by the ranking, with rounded weights, or without; and those of the other family."""
    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.fusion.move_epilogue import CHEAP
    from jcuts.kernel_ir.program import Program
    from jcuts.lower.patterns.gemm import as_gemm, gemm_operands, prologue
    from jcuts.lower.region import lower_region
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.schedule.gpu.candidates import GpuMachine
    from jcuts.schedule.gpu.conv import implicit_gemm
    from jcuts.schedule.gpu.gemm import mma as gemm_mma
    from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
    from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
    from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
    from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized_schedules
    from jcuts.trace.inline import inline

    graph = build_graph(simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case)))).jaxpr)
    program = lower_region(graph, frozenset(range(len(graph.nodes))), cheap=CHEAP)
    made = as_gemm(program) if isinstance(program, Program) else None
    if made is None:
        raise SystemExit(f"{case.name}: no product: {program}")
    if prologue(made) is not None and not along:
        return []
    machine = GpuMachine.named("H200")
    if along:
        right = gemm_operands(made)[1].buffer
        made = replace(made, buffers=tuple(replace(b, tf32=b.name == right) for b in made.buffers))
    if along and tiles:  # numbers of `GroupTiling` from the third on, or by name those of `FedTiling`
        return [
            warp_specialized_schedules.WarpSpecializedTile(**numbers).of(made)
            for numbers in tiles
            if isinstance(numbers, dict)
        ] + [
            WgmmaTile(rows, columns, terms, (groups, 1), stages, 0, split, cluster, 1, *how).of(made)
            for rows, columns, terms, groups, stages, split, cluster, *how in (t for t in tiles if isinstance(t, list))
        ]
    counter = WgmmaProblem(made, machine)
    fed = [p for p, _ in warp_specialized_schedules.candidates(counter, made, most)] if along else []
    found = [p for p, _ in implicit_gemm.candidates(counter, made, most)] if along else []
    if found:  # taps that share their pixels, beside the best that do not
        return found + fed + [p for p, _ in gemm_wgmma.wgmma_schedules(counter, 1)][:2]
    found = [p for p, _ in gemm_wgmma.wgmma_schedules(counter, most)]
    if along:  # and what stages and groups make of the best
        more = [p for p, _ in gemm_wgmma.wgmma_schedules(counter, most, alike=True)]
        found += [p for p in more if p.digest not in {f.digest for f in found}][: most // 2]
    return found + fed + ([] if along else [p for p, _ in gemm_mma.mma_schedules(made, machine, 1)])


def measured(pair: tuple[Case, Case], programs: Sequence[Sequence[Any]], folder: Path) -> dict[str, Any]:
    """One layer: XLA with weights as they are ("xla") and along terms ("xla along"), and all programs, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.xla.cpu_ffi_call import call_kernel

    along, plain = pair
    row: dict[str, Any] = {"case": along.name.removesuffix(" along terms"), "programs": {}, "rejected": {}}
    count = int(min(run.MOST_SETS, max(4, -(-run.ROTATED // along.moved()))))
    x, w, *more = (jnp.asarray(a) for a in along.arguments(0))
    across = w.T if w.ndim == 2 else w.transpose(1, 2, 3, 0)
    sets = [tuple(jax.block_until_ready(jnp.roll(a, k)) for a in (x, w, across, *more)) for k in range(count)]
    functions = {
        "xla": lambda x, w, v, *more: plain.function(x, v, *more),
        "xla along": lambda x, w, v, *more: along.function(x, w, *more),
    }
    params: dict[str, Any] = {}
    for kind, ranked in zip(("rounded", "plain"), programs, strict=True):
        for number, program in enumerate(ranked):
            path, name = folder / f"{program.digest}.kernel", f"{kind} {number}"
            if not path.exists():
                continue
            kernel = read_kernel(path)
            params[name] = {k: v for k, v in program.params if k not in ("cuda", "threads")}
            functions[name] = lambda x, w, v, b, *more, k=kernel, kind=kind: call_kernel(
                k, *run.operands_of(k, (x, w if kind == "rounded" else v, *more, b))
            )
    with jax.enable_x64(True):
        wide = jax.jit(along.function)(*(a.astype(jnp.float64) for a in (x, w, *more)))
    compiled: dict[str, Any] = {}
    lowered = {name: jax.jit(run.chain(f, count)).lower(sets) for name, f in functions.items()}
    for name in ("xla", "xla along"):  # alone: they are tuned meanwhile
        compiled[name] = lowered.pop(name).compile()
    judged(row, compiled, lowered, params, sets, wide)
    return row


def show(row: dict[str, Any]) -> None:
    """A table of one layer."""
    found = row["programs"]
    best = {
        kind: min((p["median"] for n, p in found.items() if n.startswith(kind)), default=float("nan"))
        for kind in ("xla", "rounded", "plain")
    }
    print(
        f"{row['case']:44} XLA {best['xla'] * 1e6:8.2f}  rounded {best['rounded'] * 1e6:8.2f}  both rounded there "
        f"{best['plain'] * 1e6:8.2f}  {best['xla'] / best['rounded']:.2f}x"
    )
    listed(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = options_of(
        __doc__,
        "gpu_constants",
        most=8,
        budget=150.0,
        schedules="schedules with rounded weights per layer (and half of it)",
    )
    parser.add_argument("--plain", type=int, default=1, help="schedules that round both operands per layer")
    parser.add_argument(
        "--tiles",
        type=Path,
        help="JSON: part of a layer's name -> [rows, columns, terms, groups, "
        "stages, split, cluster, spread, steps, cached], or numbers of `FedTiling` by name, of "
        "every schedule wanted",
    )
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tiles = json.loads(options.tiles.read_text()) if options.tiles else {}
    work = []
    for pair in zip(layers(True), layers(False), strict=True):
        asked = [t for part, listed in tiles.items() if part in pair[0].name for t in listed]
        if run.wanted(pair[0], options.only) and (not tiles or asked):
            found = [schedules(pair[0], options.most, True, asked), schedules(pair[1], options.plain, False, ())]
            work.append((pair, found))
    parts = options.only.split(",")  # layers in the order in which they are named
    work.sort(key=lambda item: next((n for n, part in enumerate(parts) if part in item[0][0].name), 0))
    build([p for _, found in work for programs in found for p in programs], folder, options.workers, start)
    in_turn(
        (
            (pair[0].name, functools.partial(measured, pair, found, folder))
            for pair, found in ([] if options.build else work)
        ),
        show,
        options.out / "gpu_constants.json",
        options.budget,
        start,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""MobileNetV2's inverted residual blocks in one kernel against XLA, weights rounded once as `rounds` leaves them.

    python benchmarks/gpu_kernels/inverted_residual.py --out results --most 8 --budget 150

XLA has weights as networks have them and as `rounds` leaves them, with and without CUDA graphs. With ``--halves``
operands are bfloat16 (nothing is rounded), and a norm in float32 follows each sum. Needs a GPU. Kernels compile in
parallel first.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

BLOCKS = (
    (56, 24, 144, 1, 24),
    (56, 24, 144, 2, 32),
    (28, 32, 192, 1, 32),
    (112, 16, 96, 2, 24),
    (14, 96, 576, 1, 96),
    (28, 32, 192, 2, 64),
    (14, 64, 384, 1, 64),
    (14, 64, 384, 1, 96),
    (14, 96, 576, 2, 160),
    (7, 160, 960, 1, 160),
    (7, 160, 960, 1, 320),
    (112, 0, 32, 1, 16),
    (112, 0, 32, 1, 64),
    (112, 0, 64, 2, 128),
    (56, 0, 128, 1, 128),
    (28, 0, 256, 1, 256),
)
"""(height and width, channels, expanded, stride, features) of MobileNetV2's blocks at 224x224; without channels of
their own: its first one, and MobileNet's."""


def _shifted(x: Any, b: Any) -> Any:
    return x + b


def _normed(x: Any, b: Any) -> Any:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * b + b).astype(x.dtype)


def function(stride: int, along: bool, residual: bool, alone: bool, halves: bool = False) -> Callable[..., Any]:
    """A block. Args: along: filters of the products are (O, H, W, I); alone: nothing is expanded."""
    after = _normed if halves else _shifted
    numbers = ("NHWC", "OHWI" if along else "HWIO", "NHWC")

    def product(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def block(x: Any, *more: Any) -> Any:
        *first, f, c, v, d = more
        wide = x if alone else jax.nn.relu6(after(product(x, first[0]), first[1]))
        names = ("NHWC", "HWIO", "NHWC")
        deep = lax.conv_general_dilated(
            wide, f, (stride, stride), "SAME", dimension_numbers=names, feature_group_count=wide.shape[-1]
        )
        found = after(product(jax.nn.relu6(after(deep, c)), v), d)
        return found + x if residual else found

    return block


def cases(batch: int, halves: bool = False) -> list[tuple[Case, Case]]:
    """Every block with weights along terms, and as networks have them."""
    found = []
    for size, channels, wide, stride, features in BLOCKS:
        residual = stride == 1 and channels == features
        pair = []
        for along in (True, False):
            shapes: list[tuple[int, ...]] = [(batch, size, size, channels or wide)]
            if channels:
                shapes += [(wide, 1, 1, channels) if along else (1, 1, channels, wide), (wide,)]
            shapes += [(3, 3, 1, wide), (wide,)]
            shapes += [(features, 1, 1, wide) if along else (1, 1, wide, features), (features,)]
            name = f"{batch}x{size}x{size}x" + (f"{channels} to {wide}" if channels else f"{wide}")
            name += f" stride {stride} to {features}"
            made = function(stride, along, residual, not channels, halves)
            kinds = ("bfloat16" if halves and len(s) == 4 else "float32" for s in shapes)
            pair.append(Case(name, made, tuple(zip(shapes, kinds, strict=True))))
        found.append((pair[0], pair[1]))
    return found


def products(arguments: int) -> tuple[int, ...]:
    """Which of so many arguments are weights of products."""
    return (1, 5) if arguments == 7 else (3,)


def operands(case: Case) -> list[np.ndarray]:
    """Values whose sums are of the size of 1; weights of both products are TF32 numbers, or bfloat16."""
    from jcuts.rewrite.tf32_weights import round_tf32

    found = case.arguments(0)
    for place in products(len(found)):
        scaled = found[place].astype(np.float32) / np.float32(np.sqrt(found[place].shape[-1]))
        found[place] = round_tf32(scaled).astype(found[place].dtype)
    found[-4] = (found[-4].astype(np.float32) / np.float32(3)).astype(found[-4].dtype)
    return found


def program_of(case: Case, rounded: bool) -> Any:
    """The unscheduled program of a block."""
    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.fusion import greedy
    from jcuts.fusion.match_inverted_residual import inverted_residual_groups
    from jcuts.lower.excess_precision import drop_bf16_round_trips
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    closed = simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case))))
    graph = build_graph(closed.jaxpr)
    found = inverted_residual_groups(graph, greedy.group(graph).subsets, lambda program: True)
    if len(found) != 1 or len(found[0].members) != len(graph.nodes):
        raise SystemExit(f"{case.name}: no block: {found}")
    shapes = {case.shapes[place][0] for place in products(len(case.shapes))}
    program = drop_bf16_round_trips(found[0].program)
    return replace(program, buffers=tuple(replace(b, tf32=rounded and b.shape in shapes) for b in program.buffers))


def schedules(case: Case, most: int, rounded: bool) -> list[Any]:
    """The best by the ranking, then the best of other numbers of warps and pieces."""
    from jcuts.lower.patterns.inverted_residual import InvertedResidual, match_inverted_residual
    from jcuts.schedule.gpu.candidates import GpuMachine
    from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules

    program, machine = program_of(case, rounded), GpuMachine.named("H200")
    found = match_inverted_residual(program)
    assert isinstance(found, InvertedResidual)
    chosen = [p for p, _ in inverted_residual_schedules.products(program, machine, -(-most // 2))]
    names = {p.digest for p in chosen}
    best: dict[Any, Any] = {}
    for shape in inverted_residual_schedules.shapes(found, machine):
        count, key = inverted_residual_schedules.cycles(shape, machine), (shape.chunk, shape.threads)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    more = [
        inverted_residual_schedules.of(program, shape) for _, shape in sorted(best.values(), key=lambda item: item[0])
    ]
    return chosen + [p for p in more if p.digest not in names][: most - len(chosen)]


def measured(pair: tuple[Case, Case], programs: Sequence[Any], folder: Path, most: int) -> dict[str, Any]:
    """One block: XLA with weights as they are ("xla") and along terms, and all programs, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.jit import end_to_end_benchmark
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.xla.cpu_ffi_call import call_kernel

    along, plain = pair
    row: dict[str, Any] = {
        "case": along.name,
        "bytes": along.moved(),
        "bound": along.moved() / run.CEILING,
        "programs": {},
        "rejected": {},
    }
    count = int(min(most, max(4, -(-run.ROTATED // along.moved()))))
    found = [jnp.asarray(a) for a in operands(along)]
    places = products(len(found))
    turned = [found[place].transpose(1, 2, 3, 0) for place in places]
    sets = [tuple(jax.block_until_ready(jnp.roll(a, k)) for a in (*found, *turned)) for k in range(count)]
    many = len(found)

    def as_they_are(*xs: Any) -> Any:
        mine = list(xs[:many])
        for place, weights in zip(places, xs[many:], strict=True):
            mine[place] = weights
        return plain.function(*mine)

    functions: dict[str, Any] = {"xla": as_they_are, "xla along": lambda *xs: along.function(*xs[:many])}
    params: dict[str, Any] = {}
    for number, program in enumerate(programs):
        path, name = folder / f"{program.digest}.kernel", f"block {number}"
        if path.exists():
            kernel = read_kernel(path)
            params[name] = {k: p for k, p in program.params if k != "cuda"}
            functions[name] = lambda *xs, k=kernel: call_kernel(k, *run.operands_of(k, xs[:many]))
    with jax.enable_x64(True):
        wide = jax.jit(along.function)(*(a.astype(jnp.float64) for a in found))
    lowered = {name: jax.jit(run.chain(g, count)).lower(sets) for name, g in functions.items()}
    compiled: dict[str, Any] = {}
    for name in ("xla", "xla along"):  # alone: they are tuned meanwhile
        low = lowered.pop(name)
        compiled[name] = low.compile()
        for option, values in end_to_end_benchmark.OPTIONS["cuda"].items():
            try:
                compiled[f"{name} {option}"] = low.compile(compiler_options=values)
                break
            except Exception as error:
                row["rejected"][f"{name} {option}"] = str(error)[:200]
    judged(row, compiled, lowered, params, sets, wide)
    return row


def show(row: dict[str, Any]) -> None:
    """A table of one block."""
    found = row["programs"]
    best = {
        kind: min((p["median"] for n, p in found.items() if n.startswith(kind)), default=float("nan"))
        for kind in ("xla", "block")
    }
    print(
        f"{row['case']:44} XLA {best['xla'] * 1e6:8.2f}  block {best['block'] * 1e6:8.2f}  bound "
        f"{row['bound'] * 1e6:6.2f}  {best['xla'] / best['block']:.2f}x"
    )
    listed(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_blocks"))
    parser.add_argument("--kernels", type=Path, help="folder for compiled kernels (a folder of --out)")
    parser.add_argument("--only", default="", help="only blocks whose name contains one of these")
    parser.add_argument("--batches", default="64", help="separated by commas")
    parser.add_argument("--most", type=int, default=8, help="schedules per block")
    parser.add_argument("--sets", type=int, default=12, help="sets of operands that executions take turns with")
    parser.add_argument("--halves", action="store_true", help="bfloat16, norms in float32")
    parser.add_argument("--plain", action="store_true", help="weights are not known to be rounded")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    options = parser.parse_args(arguments)
    folder = options.kernels or options.out / "kernels"
    for path in (options.out, folder):
        path.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    pairs = [pair for batch in options.batches.split(",") for pair in cases(int(batch), options.halves)]
    work = [
        (pair, schedules(pair[0], options.most, not options.plain and not options.halves))
        for pair in pairs
        if run.wanted(pair[0], options.only)
    ]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    in_turn(
        (
            (pair[0].name, functools.partial(measured, pair, programs, folder, options.sets))
            for pair, programs in ([] if options.build else work)
        ),
        show,
        options.out / "gpu_blocks.json",
        options.budget,
        start,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

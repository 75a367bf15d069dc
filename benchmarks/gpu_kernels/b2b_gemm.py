"""MLPs of ConvNeXt, Swin and narrow networks: one back-to-back GEMM kernel against two GEMM kernels and XLA.

    python benchmarks/gpu_kernels/b2b_gemm.py --out results --most 12 --budget 400

On a GPU of compute capability 9.0 these are schedules by ``wgmma`` and by ``mma.sync``, by the ranking of both.  With
``--halves`` operands are bfloat16, with float32 between a sum and its rounding.  Needs a GPU.  Kernels compile in
parallel first (``--build``: only that).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.paired_timing import in_turn, judged, listed, options_of  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

LAYERS = (
    ("ConvNeXt-T 56x56", 64 * 56 * 56, 96, 384, 96),
    ("ConvNeXt-T 28x28", 64 * 28 * 28, 192, 768, 192),
    ("ConvNeXt-T 14x14", 64 * 14 * 14, 384, 1536, 384),
    ("ConvNeXt-T 56x56, one image", 56 * 56, 96, 384, 96),
    ("Swin-B 56x56", 64 * 56 * 56, 128, 512, 128),
    ("Swin-B 28x28", 64 * 28 * 28, 256, 1024, 256),
    ("64 wide", 65536, 64, 64, 64),
    ("64 wide, 256 hidden", 65536, 64, 256, 64),
)
"""(name, rows, columns, hidden columns, results)."""
PARTS = 3
"""Schedules of each GEMM of the pair."""


@dataclass(frozen=True)
class Work:
    """An MLP with the programs of one kernel, and those of each of two kernels."""

    case: Case
    whole: Sequence[Any]
    parts: tuple[Sequence[Any], Sequence[Any]]

    @property
    def programs(self) -> list[Any]:
        """All of them."""
        return [*self.whole, *self.parts[0], *self.parts[1]]


def mlp(kind: str) -> Callable[..., Any]:
    """GELU between two GEMMs, a layer scale and the residual behind them. Args: kind: type of operands."""

    def dot(x: Any, w: Any) -> Any:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum("mk,kn->mn", x, w, preferred_element_type=wide)

    def function(x: Any, w: Any, b: Any, v: Any, c: Any, g: Any) -> Any:
        rounded = x.dtype if x.dtype == jnp.float64 else kind
        hidden = jax.nn.gelu(dot(x, w) + b, approximate=False).astype(rounded)
        return (x + (dot(hidden, v) + c) * g).astype(rounded)

    return function


def cases(kind: str) -> list[Case]:
    """Every MLP."""
    found = []
    for name, rows, columns, hidden, results in LAYERS:
        shapes = (rows, columns), (columns, hidden), (hidden,), (hidden, results), (results,), (results,)
        kinds = (kind, kind, "float32", kind, "float32", "float32")
        found.append(Case(name, mlp(kind), tuple(zip(shapes, kinds, strict=True))))
    return found


def work_of(case: Case, most: int) -> Work:
    """The best schedules by the ranking, of the whole and of both parts."""
    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.fusion import greedy
    from jcuts.kernel_ir.program import Program
    from jcuts.lower.patterns.b2b_gemm import lower_b2b_gemm
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.schedule.gpu.candidates import GpuMachine, candidates
    from jcuts.trace.inline import inline

    graph = build_graph(simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case)))).jaxpr)
    machine = GpuMachine.named("H200")
    first, second = (program for _, program in greedy.group(graph).subsets)
    whole = lower_b2b_gemm(graph, frozenset(node.number for node in graph.nodes))
    found = [[p for p, _ in candidates(program, machine, n)] for program, n in ((first, PARTS), (second, PARTS))]
    programs = [p for p, _ in candidates(whole, machine, most)] if isinstance(whole, Program) else []
    return Work(case, programs, (found[0], found[1]))


def operands(case: Case) -> list[Any]:
    """Values whose sums are of the size of 1."""
    found = [jnp.asarray(a) for a in case.arguments(0)]
    for place in (1, 3):
        scale = jnp.sqrt(jnp.float32(found[place].shape[0]))
        found[place] = (found[place].astype(jnp.float32) / scale).astype(found[place].dtype)
    return found


def measured(work: Work, folder: Path, most: int) -> dict[str, Any]:
    """One MLP: XLA, one kernel and two, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.xla.cpu_ffi_call import call_kernel

    case = work.case
    bound = case.moved() / run.CEILING
    row: dict[str, Any] = {"case": case.name, "bytes": case.moved(), "bound": bound, "programs": {}, "rejected": {}}
    found = operands(case)
    count = int(min(most, max(4, -(-run.ROTATED // case.moved()))))
    sets = [tuple(jax.block_until_ready(jnp.roll(a, k)) for a in found) for k in range(count)]

    def kernels(programs: Sequence[Any]) -> list[tuple[Any, Any]]:
        paths = [(p, folder / f"{p.digest}.kernel") for p in programs]
        return [(p, read_kernel(path)) for p, path in paths if path.exists()]

    def one(kernel: Any, *xs: Any) -> Any:
        return call_kernel(kernel, *run.operands_of(kernel, xs))

    def two(first: Any, second: Any, x: Any, w: Any, b: Any, v: Any, c: Any, g: Any) -> Any:
        (hidden,) = one(first, x, w, b)
        return one(second, hidden, v, c, g, x)

    functions: dict[str, Any] = {"xla": case.function}
    params: dict[str, Any] = {}
    for number, (program, kernel) in enumerate(kernels(work.whole)):
        functions[f"b2b {number}"] = functools.partial(one, kernel)
        params[f"b2b {number}"] = {k: p for k, p in program.params if k != "cuda"}
    for p, first in kernels(work.parts[0]):
        for q, second in kernels(work.parts[1]):
            name = f"two {len(functions)}"
            functions[name] = functools.partial(two, first, second)
            params[name] = {"first": dict(p.params), "second": dict(q.params)}
    with jax.enable_x64(True):
        wide = jax.jit(case.function)(*(a.astype(jnp.float64) for a in found))
    lowered = {name: jax.jit(run.chain(g, count)).lower(sets) for name, g in functions.items()}
    compiled = {"xla": lowered.pop("xla").compile()}  # alone: it is tuned meanwhile
    judged(row, compiled, lowered, params, sets, wide)
    return row


def show(row: dict[str, Any]) -> None:
    """A table of one MLP."""
    best = {
        kind: min((p["median"] for n, p in row["programs"].items() if n.startswith(kind)), default=float("nan"))
        for kind in ("xla", "two", "b2b")
    }
    times = "  ".join(f"{kind} {time * 1e6:8.2f}" for kind, time in best.items())
    print(f"{row['case']:30} {times}  bound {row['bound'] * 1e6:6.2f}")
    listed(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = options_of(__doc__, "gpu_b2b", most=12, schedules="schedules of one kernel", budget=400.0)
    parser.add_argument("--sets", type=int, default=8, help="sets of operands that executions take turns with")
    parser.add_argument("--halves", action="store_true", help="bfloat16")
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    found = [case for case in cases("bfloat16" if options.halves else "float32") if run.wanted(case, options.only)]
    work = [work_of(case, options.most) for case in found]
    build([p for w in work for p in w.programs], folder, options.workers, start)
    in_turn(
        ((w.case.name, functools.partial(measured, w, folder, options.sets)) for w in ([] if options.build else work)),
        show,
        options.out / f"gpu_b2b{'_halves' if options.halves else ''}.json",
        options.budget,
        start,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Products of few rows, as networks have them at batch 1: float32 with constant weights, inside CUDA graphs.

    python benchmarks/gpu_kernels/small_batch_gemm.py --out results --most 14 --budget 100

XLA with weights as networks have them and along terms; schedules of rounded weights, those of
the ranking and those of a wide sweep over tiles, clusters and stages.  Every schedule is timed as jitted chains on
rotated operands ("median", as XLA is), and alone, as a CUDA graph of launches ("alone"; "warm": on operands in the L2
cache).  ``--fixed`` also times one tiling over sums of different lengths: what a tile of terms takes, and what a launch
takes without them.  Needs a GPU of compute capability 9.0; compiles in parallel first.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.tf32_weights import Layer  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

SECONDS = 0.05
"""Of samples of one program."""
EXITS: dict[str, Callable[..., Any]] = {
    "bias": lambda y, b: y + b,
    "relu": lambda y, b: jnp.maximum(y + b, 0.0),
    "gelu": lambda y, b: jax.nn.gelu(y + b, approximate=False),
    "residual": lambda y, b, r: y + b + r,
    "residual relu": lambda y, b, r: jnp.maximum(y + b + r, 0.0),
}
LAYERS = (
    ("bias", 384, 768, 768),
    ("residual", 384, 3072, 768),
    ("residual relu", 49, 512, 2048),
    ("relu", 196, 1024, 256),
    ("gelu", 384, 768, 3072),
    ("norm", 196, 768, 128),
    ("residual relu", 3136, 64, 256),
    ("relu", 49, 2048, 512),
    ("bias", 384, 768, 2304),
    ("residual relu", 196, 256, 1024),
    ("norm", 784, 256, 128),
    ("relu", 784, 512, 128),
    ("residual", 384, 768, 768),
    ("residual relu", 784, 128, 512),
    ("relu", 3136, 256, 64),
    ("norm", 49, 896, 128),
)
"""(what follows, or a norm and ReLU before, rows, terms, columns): BERT-base with 384 tokens, ResNet50, DenseNet121."""
ROWS_OF_EIGHT = (
    ("gelu", 3072, 768, 3072),
    ("residual", 3072, 3072, 768),
    ("bias", 3072, 768, 2304),
    ("residual", 3072, 768, 768),
)
"""Products of BERT-base with 8 sequences of 384 tokens."""
FIXED = (
    (64, 192, 32, 1, 6, 1, 1, 192, 768),
    (64, 192, 32, 1, 6, 1, 1, 768, 768),
    (64, 192, 32, 1, 6, 1, 1, 3072, 768),
    (64, 192, 32, 1, 6, 1, 4, 768, 768),
    (64, 192, 32, 1, 6, 1, 4, 3072, 768),
    (64, 64, 32, 1, 6, 1, 1, 192, 768),
    (64, 64, 32, 1, 6, 1, 1, 768, 768),
    (64, 64, 32, 1, 6, 1, 4, 768, 768),
    (64, 64, 32, 1, 1, 1, 1, 32, 768),
    (64, 192, 32, 1, 1, 1, 1, 32, 768),
    (128, 96, 32, 2, 6, 1, 1, 192, 768),
    (128, 96, 32, 2, 6, 1, 4, 768, 768),
    (128, 96, 32, 2, 6, 1, 1, 768, 768),
)
"""Rows, columns, terms, groups, stages, split, cluster of tilings; terms and columns of a product of 384 rows."""


def function(kind: str, along: bool) -> Callable[..., Any]:
    """A layer. Args: along: weights lie along terms."""
    numbers = (((1,), (1 if along else 0,)), ((), ()))
    if kind == "norm":
        return lambda x, w, s, t: lax.dot_general(jnp.maximum(x * s + t, 0.0), w, numbers)
    return lambda x, w, *more: EXITS[kind](lax.dot_general(x, w, numbers), *more)


def layer(kind: str, m: int, k: int, n: int, along: bool) -> Layer:
    """A layer with shapes."""
    more: tuple[tuple[int, ...], ...] = ((k,), (k,)) if kind == "norm" else ((n,),)
    if kind.startswith("residual"):
        more += ((m, n),)
    shapes = ((m, k), (n, k) if along else (k, n), *more)
    return Layer(f"{kind} {m}x{k}x{n}", function(kind, along), tuple((s, "float32") for s in shapes))


def product(case: Case) -> Any:
    """The program of a layer whose weights are rounded, where they are float32."""
    from dataclasses import replace

    from benchmarks.gpu_kernels.run import small_arguments
    from jcuts.fusion.move_epilogue import CHEAP
    from jcuts.lower.patterns.gemm import as_gemm, gemm_operands
    from jcuts.lower.region import lower_region as built
    from jcuts.lower.tensor_graph import build_graph
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    graph = build_graph(simplify(inline(jax.make_jaxpr(case.function)(*small_arguments(case)))).jaxpr)
    made = as_gemm(built(graph, frozenset(range(len(graph.nodes))), cheap=CHEAP))  # type: ignore[arg-type]
    assert made is not None
    right = gemm_operands(made)[1].buffer
    wide = case.shapes[0][1] == "float32"
    return replace(made, buffers=tuple(replace(b, tf32=wide and b.name == right) for b in made.buffers))


def best_tiles(counter: Any, most: int) -> list[Any]:
    """The best tiling of every tile and cluster by its counted cycles, so many of them."""
    from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma

    found: dict[tuple[int, ...], Any] = {}
    for tiling in sorted(gemm_wgmma.tilings(counter), key=counter.cycles):
        if tiling.split == 1:
            found.setdefault((tiling.rows, tiling.columns, tiling.cluster), tiling)
    return list(found.values())[:most]


def sweep(counter: Any, most: int) -> list[Any]:
    """Tilings of a product, the best by their counted cycles, and what else could be done with the first ones."""
    from dataclasses import replace

    chosen = best_tiles(counter, most)
    more: list[Any] = []
    for tiling in chosen[:3]:
        ways = [{"steps": 1}, {"steps": 2}, {"early": 0}, {"terms": 64, "stages": max(1, tiling.stages // 2)}]
        if tiling.cluster > 1:
            ways.append({"push": 0})
        if tiling.stages > 4:
            ways.append({"stages": 4})
        if tiling.stages < counter.share(tiling):
            ways.append({"spread": 1})
        more += [replace(tiling, **way) for way in ways]
    return [tiling for tiling in chosen + more if counter.fits(tiling)]


def schedules(case: Layer, most: int) -> list[Any]:
    """Programs of a layer: those of the sweep, and those of the ranking of both families."""
    from jcuts.schedule.gpu.gemm import mma as gemm_mma
    from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
    from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
    from jcuts.schedule.gpu.machine import GpuMachine

    made = product(case)
    counter = WgmmaProblem(made, GpuMachine.named("H200"))
    found = [tiling.of(made) for tiling in sweep(counter, most)]
    found += [p for p, _ in gemm_wgmma.wgmma_schedules(counter)]
    if not counter.before:
        found += [p for p, _ in gemm_mma.mma_schedules(made, GpuMachine.named("H200"), 1)]
    return list({p.digest: p for p in found}.values())


def fixed() -> list[tuple[Layer, list[Any]]]:
    """Products of few and many terms by the same tilings."""
    from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile

    found: dict[tuple[int, int], list[Any]] = {}
    for rows, columns, terms, groups, stages, split, cluster, total, wide in FIXED:
        for steps, push in ((1, 0), (0, 0), (0, 1)) if cluster > 1 else ((1, 0), (0, 0)):
            tiling = WgmmaTile(rows, columns, terms, (groups, 1), stages, 0, split, cluster, 1, steps=steps, push=push)
            found.setdefault((total, wide), []).append(tiling)
    pairs = []
    for (total, wide), listed in found.items():
        case = layer("bias", 384, total, wide, True)
        pairs.append((case, [t.of(product(case)) for t in listed]))
    return pairs


def measured(case: Case, plain: Layer | None, programs: Sequence[Any], folder: Path) -> dict[str, Any]:
    """One layer: XLA and all programs, in turns."""
    from benchmarks.gpu_kernels import run
    from jcuts.jit.end_to_end_benchmark import OPTIONS
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.tune.measure.cuda_driver import device
    from jcuts.tune.measure.gpu_launch import GpuLauncher, median, screen
    from jcuts.tune.measure.gpu_timing import ChainBenchmark
    from jcuts.xla.cpu_ffi_call import call_kernel

    arguments = case.arguments(0)
    graphs = OPTIONS["cuda"]["graphs"]
    entries: dict[str, tuple[Any, dict[str, Any]]] = {}
    params, launchers, places = {}, {}, [0]
    for number, program in enumerate(programs):
        path, name = folder / f"{program.digest}.kernel", f"{number}"
        if not path.exists():
            continue
        kernel = read_kernel(path)
        params[name] = {k: v for k, v in program.params if k not in ("cuda", "threads", "rounded")}
        order = run.operands_of(kernel, arguments)  # the same of all
        places = [next(i for i, a in enumerate(arguments) if a is o) for o in order]
        launchers[name] = GpuLauncher(kernel, device())
        entries[name] = (lambda *xs, k=kernel, p=tuple(places): call_kernel(k, *(xs[i] for i in p)), graphs)
    row: dict[str, Any] = {"case": case.name, "programs": {}, "rejected": {}}
    with jax.enable_x64(True):
        wide = np.asarray(jax.jit(case.function)(*(a.astype(np.float64) for a in arguments)))
    scale, errors = float(np.sqrt(np.mean(wide * wide))), {}
    compiled: dict[str, Any] = {}
    bench = ChainBenchmark(case.function, arguments)
    turned = None
    if plain is not None:  # alone: their algorithms are timed meanwhile
        others = [arguments[0], np.ascontiguousarray(arguments[1].T), *arguments[2:]]
        turned = ChainBenchmark(plain.function, others)
        compiled |= bench.compiled({"xla along": (case.function, graphs)})
        turned.add("xla", turned.compiled({"xla": (plain.function, graphs)})["xla"])
        errors["xla"] = float(np.abs(np.asarray(jax.jit(case.function)(*arguments)) - wide).max()) / scale
    limit = 4 * errors.get("xla", 1e-3 if arguments[0].dtype == np.float32 else 1e-2) + 1e-5
    compiled |= bench.compiled(entries)
    for name, program in compiled.items():
        try:
            if name in launchers:
                got = np.asarray(jax.jit(entries[name][0])(*arguments))
                errors[name] = float(np.abs(got - wide).max()) / scale
                if not errors[name] <= limit:
                    row["rejected"][name] = f"error {errors[name]:.3g}, at most {limit:.3g}: {params[name]}"
                    continue
            bench.add(name, program)
        except Exception as error:
            row["rejected"][name] = f"{type(error).__name__}: {str(error)[:300]}: {params.get(name)}"
    times = bench.race(SECONDS)
    if turned is not None:
        times |= turned.race(SECONDS)
    alone: dict[str, dict[str, float]] = {}
    there = [[addresses[i] for i in places] for addresses in bench.addresses()]
    for what, sets in (("alone", there), ("warm", there[:1])):
        some = {name: one for name, one in launchers.items() if name in times}
        found = screen(some, [arguments[i] for i in places], there=sets)
        alone[what] = {name: median(samples) for name, samples in found.items()}
    for name, samples in times.items():
        values = np.asarray(samples.seconds)
        row["programs"][name] = {
            "params": params.get(name, {}),
            "error": errors.get(name),
            "median": float(np.median(values)),
            "least": float(values.min()),
            **{what: found.get(name) for what, found in alone.items()},
        }
    return row


def show(row: dict[str, Any]) -> None:
    """A table of one layer."""
    found = row["programs"]
    library = min((p["median"] for n, p in found.items() if not n.isdigit()), default=float("nan"))
    best = min((p["median"] for n, p in found.items() if n.isdigit()), default=float("nan"))
    print(f"{row['case']:32} XLA {library * 1e6:8.2f}  kernel {best * 1e6:8.2f}  {library / best:.2f}x")
    for name, p in sorted(found.items(), key=lambda item: item[1]["median"]):
        alone = " ".join(f"{p[what] * 1e6:8.2f}" if p[what] else " " * 8 for what in ("alone", "warm"))
        print(f"    {p['median'] * 1e6:8.2f} {alone} {name} {p['params'] or ''}")
    for name, why in row["rejected"].items():
        print(f"    {name} rejected: {why[:200]}")


def measure(
    work: Sequence[tuple[Case, Layer | None, Sequence[Any]]],
    folder: Path,
    out: Path,
    rows: list[dict[str, Any]],
    clock: tuple[float, float],
) -> None:
    """All layers, shown and written after each one. Args: rows: what is written first; clock: its start, seconds."""
    start, budget = clock
    for case, plain, programs in work:
        if time.perf_counter() - start > budget:
            print(f"{case.name}: out of time")
            continue
        try:
            rows.append(measured(case, plain, programs, folder))
            show(rows[-1])
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}")
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
        out.write_text(json.dumps(rows, indent=1))


def floor() -> dict[str, float]:
    """What a link of a chain takes that computes next to nothing: XLA's."""
    from jcuts.jit.end_to_end_benchmark import OPTIONS
    from jcuts.tune.measure.gpu_timing import compare

    x = np.ones(1024, np.float32)
    entries = {"xla": (lambda x: x + 1, {}), "xla graphs": (lambda x: x + 1, OPTIONS["cuda"]["graphs"])}
    _, samples, _ = compare(entries, [x], seconds=0.1, announce=lambda _: None)
    return {name: float(np.median(found.seconds)) for name, found in samples.items()}


def clusters_at_once(folder: Path) -> dict[str, int]:
    """How many clusters of so many blocks the device has at once, one block per multiprocessor, or two."""
    import ctypes

    from jcuts.codegen.cuda.toolchain.image import Image
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.tune.measure.cuda_driver import device

    class Attribute(ctypes.Structure):
        _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))

    class Config(ctypes.Structure):
        _fields_ = (
            ("sizes", ctypes.c_uint * 6),
            ("shared", ctypes.c_uint),
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.POINTER(Attribute)),
            ("count", ctypes.c_uint),
        )

    driver, found = device(), {}
    image = Image.unpack(read_kernel(next(folder.glob("*.kernel"))).object_code)
    kernel = driver.function(image.cubin, image.launches[0].symbol)
    driver.call("cuFuncSetAttribute", kernel, ctypes.c_int(8), ctypes.c_int(200 << 10))
    for blocks, shared in itertools.product(range(1, 9), (200 << 10, 100 << 10)):
        attribute = Attribute(id=4, value=(ctypes.c_uint * 16)(blocks, 1, 1))
        sizes = (ctypes.c_uint * 6)(blocks * 64, 1, 1, image.launches[0].block[0], 1, 1)
        config = Config(sizes, shared, driver.stream, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        driver.call("cuOccupancyMaxActiveClusters", ctypes.byref(count), kernel, ctypes.byref(config))
        found[f"{blocks} blocks, {shared >> 10} KiB"] = count.value
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.paired_timing import options_of

    parser = options_of(__doc__, "gpu_small", most=12, schedules="tiles of the sweep per layer", budget=100.0)
    parser.add_argument("--fixed", action="store_true", help="also sums of different lengths")
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    work: list[tuple[Layer, Layer | None, list[Any]]] = []
    for shape in (*ROWS_OF_EIGHT, *LAYERS):
        case, plain = (layer(*shape, along) for along in (True, False))
        if run.wanted(case, options.only):
            work.append((case, plain, schedules(case, options.most)))
    if options.fixed:
        work[1:1] = [(case, None, programs) for case, programs in fixed()]
    build([p for _, _, programs in work for p in programs], folder, options.workers, start)
    if options.build:
        return 0
    rows: list[dict[str, Any]] = [{"floor": floor()}]
    try:
        rows[0]["clusters"] = clusters_at_once(folder)
    except Exception as error:
        print(f"clusters: {type(error).__name__}: {error}")
    print(rows[0])
    measure(work, folder, options.out / "gpu_small.json", rows, (start, options.budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())

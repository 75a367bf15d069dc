"""Is pruning by the estimate safe on a GPU?  Schedules sampled without the model, all measured.

    python benchmarks/pruning_gpu.py --out results --candidates 500           # with a GPU
    python benchmarks/pruning_gpu.py --out results --candidates 20 --compile-only --capability 9.0     # without

For each operation, schedules are drawn at random from the whole space of its form (vector, register tile, threads,
shape of the block, order of the axes, unrolling and splitting of reductions, team and pieces of rows), and all that the
enumeration makes are added.  Everything is compiled in parallel, checked against the first kernel, and timed by CUDA
events on rotated inputs, as the tuner screens.  Reported per operation:

    score   the enumeration's ranking (`region.gpu`): rank and loss of its first choice, loss of what the tuner keeps
    pul     `estimate.launches` with the assembler's resource report: the same over everything measured
    bound   kernels that were faster than the bound allows (never, or the model is wrong), and the tightest
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX only traces; kernels run through the driver

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from gpu_compile import Built, Compiler  # noqa: E402
from jax import lax  # noqa: E402

from jcuts.arch.load import load_gpu  # noqa: E402
from jcuts.base import knobs  # noqa: E402
from jcuts.base.errors import NativeError  # noqa: E402
from jcuts.base.fingerprint import versions  # noqa: E402
from jcuts.codegen.cuda.image import Image  # noqa: E402
from jcuts.dfg.program import Phase, Program  # noqa: E402
from jcuts.estimate.launches import least_seconds  # noqa: E402
from jcuts.region import gpu, gpu_score  # noqa: E402
from jcuts.region.schedule import collapsed  # noqa: E402
from jcuts.tune import driver  # noqa: E402
from jcuts.tune import gpu as runs  # noqa: E402
from jcuts.tune.kernelfile import read_kernel  # noqa: E402
from tests import programs  # noqa: E402

SMS = 132
THREADS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
HOPELESS = 4.0
ROUNDS = 5
CHECKED = 1 << 16  # bytes of each result, at both ends, that are compared


def conv(x: Any, w: Any, b: Any, stride: int = 1) -> Any:
    """Depthwise convolution with bias and ReLU6."""
    y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                 feature_group_count=x.shape[-1])  # fmt: skip
    return jnp.clip(y + b, 0.0, 6.0)


def _norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * g + b


def _pool(reduce: Any, start: float, stride: int) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, start, reduce, (1, 3, 3, 1), (1, stride, stride, 1), "SAME")


OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "depthwise 56x56x144": (conv, ((32, 56, 56, 144), (3, 3, 1, 144), (144,))),
    "depthwise/2 112x112x64": (lambda x, w, b: conv(x, w, b, 2), ((16, 112, 112, 64), (3, 3, 1, 64), (64,))),
    "max pool/2 112x112x64": (_pool(lax.max, -np.inf, 2), ((16, 112, 112, 64),)),
    "average pool 35x35x288": (_pool(lax.add, 0.0, 1), ((32, 35, 35, 288),)),
    "scale, shift, ReLU": (lambda x, a, b: jnp.maximum(x * a + b, 0), ((64, 28, 28, 512), (512,), (512,))),
    "bias, GELU": (lambda x, b: jax.nn.gelu(x + b), ((4096, 4096), (4096,))),
    "transpose 4096x3072": (lambda x: x.T * 2.0, ((4096, 3072),)),
    "NHWC to NCHW": (lambda x: jnp.transpose(x, (0, 3, 1, 2)) + 1.0, ((32, 56, 56, 64),)),
    "softmax 16384x1000": (lambda x: jax.nn.softmax(x), ((16384, 1000),)),
    "layer norm 16384x1024": (_norm, ((16384, 1024), (1024,), (1024,))),
    "row sum 8192x2048": (lambda x: x.sum(1), ((8192, 2048),)),
    "full sum 2^24": (lambda x: x.sum(), ((1 << 24,),)),
    "column sum 65536x256": (lambda x: x.sum(0), ((65536, 256),)),
    "depthwise 14x14x576": (conv, ((64, 14, 14, 576), (3, 3, 1, 576), (576,))),
}


# -- sampling ---------------------------------------------------------------------------------------------------------
def random_schedule(program: Program, rng: random.Random) -> Program | None:
    """A schedule drawn without the model; None where what was drawn is impossible."""
    phase = program.phases[0]
    if len(program.phases) > 1 or (phase.reds and gpu._along_rows(phase) and _terms(phase) > gpu.TAPS):
        return _random_team(program, rng)
    plain = collapsed(program)
    phase = plain.phases[0]
    if not phase.reds or _terms(phase) <= gpu.TAPS:
        return _random_point(plain, rng)
    return _random_columns(plain, rng)


def _terms(phase: Phase) -> int:
    return math.prod(r.extent for r in phase.reds)


def _random_point(plain: Program, rng: random.Random) -> Program | None:
    phase = plain.phases[0]
    axes = list(phase.axes)
    if rng.random() < 0.15:
        rng.shuffle(axes)
    unroll = {}
    for axis in axes:
        unroll[axis.name] = rng.choice([1, 2, 4, 8, 16] if axis is axes[-1] else [1, 1, 1, 2, 3, 4, 5, 7, 8])
        if unroll[axis.name] > axis.extent:
            return None
    tile = math.prod(unroll.values())
    if tile + tile * _terms(phase) / 2 > 4 * gpu.REGISTERS:
        return None
    reds = tuple(replace(r, unroll=r.extent, chains=1) for r in phase.reds)
    ordered = tuple(replace(a, unroll=unroll[a.name]) for a in axes)
    threads = rng.choice(THREADS)
    more: tuple[tuple[str, object], ...] = ()
    if len(axes) > 1 and rng.random() < 0.4:
        along = rng.choice([2, 4, 8, 16, 32])
        other = rng.choice(axes[:-1])
        if threads % along == 0 and threads // along >= 2:
            more = (("block", ((other.name, along), (axes[-1].name, threads // along))),)
    scheduled = replace(plain, phases=(replace(phase, axes=ordered, reds=reds),))
    return gpu.scheduled(scheduled, "point", threads, *more)


def _random_columns(plain: Program, rng: random.Random) -> Program | None:
    phase = plain.phases[0]
    lane = phase.axes[-1]
    vector = rng.choice([1, 2, 4, 8])
    if lane.extent % vector:
        return None
    deep = rng.choice([1, 2, 4, 8, 16, 32])
    reds = tuple(
        replace(r, unroll=min(deep, r.extent) if k == len(phase.reds) - 1 else 1) for k, r in enumerate(phase.reds)
    )
    axes = tuple(replace(a, unroll=vector if a is lane else 1) for a in phase.axes)
    split = round(2 ** rng.uniform(0, 12))
    more = (("split", split),) if split > 1 else ()
    scheduled = replace(plain, phases=(replace(phase, axes=axes, reds=reds),))
    return gpu.scheduled(scheduled, "point", rng.choice(THREADS), *more)


def _random_team(program: Program, rng: random.Random) -> Program | None:
    _, length = gpu._row_shape(program)
    vector, team, chunks = rng.choice([1, 2, 4, 8]), rng.choice(gpu.TEAMS), rng.randint(1, 16)
    if length % vector or vector * chunks > 2 * gpu.RESIDENT:
        return None
    threads = team if team > 32 else team * rng.choice([k for k in (1, 2, 4, 8, 16, 32) if team * k % 32 == 0])
    phase = program.phases[0]
    more: tuple[tuple[str, object], ...] = ()
    if len(program.phases) == 1 and not any(acc.index_dtype for acc in phase.accs):
        split = round(2 ** rng.uniform(-6, 12))
        if 1 < split < length // vector:
            more = (("split", split),)
    shape = (("team", team), ("vector", vector), ("chunks", chunks))
    return gpu.scheduled(program, "team", threads, *shape, *more)


Times = dict[str, tuple[float, float]]
"""Digest -> least and median time [s]."""


# -- one operation ----------------------------------------------------------------------------------------------------
class Study:
    """One operation: its program, what was enumerated, what was sampled."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        self.name = name
        fn, shapes = OPERATIONS[name]
        traced = programs.trace(fn, *(np.zeros(s, np.float32) for s in shapes))
        self.program = traced.program()
        self.operand_shapes = [b.shape for b in self.program.inputs]
        machine = gpu.GpuMachine(SMS)
        self.ranked = gpu.candidates(self.program, machine, 1 << 20)
        here = knobs.current()
        self.kept = len(gpu.candidates(self.program, machine, here.max_candidates, here.top_percent))
        self.all = {p.digest: p for p, _ in self.ranked}
        rng = random.Random(f"{seed} {name}")
        tries = sampled = 0
        while sampled < count and tries < 60 * count:
            tries += 1
            found = random_schedule(self.program, rng)
            if found is not None and found.digest not in self.all:
                self.all[found.digest] = found
                sampled += 1
        self.sampled = sampled

    def operands(self) -> list[np.ndarray]:
        """Random operands in the program's order."""
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape, np.float32) for shape in self.operand_shapes]

    def measure(self, kernels: dict[str, Any], device: Any) -> tuple[Times, dict[str, int], float]:
        """Least and median time [s] of every kernel that is right, what was dropped, and the noise of a repetition."""
        inputs = self.operands()
        dropped = {"wrong": 0, "failed": 0, "hopeless": 0}
        right = _Results(device, next(iter(kernels.values())), inputs)
        most = max(kernel.scratch_bytes for kernel in kernels.values())
        rotation = runs.Rotation(device, next(iter(kernels.values())), inputs, most)
        graphs: dict[str, Any] = {}
        seen: dict[str, list[float]] = {}
        best = math.inf
        try:
            for digest, kernel in kernels.items():
                launcher = runs.GpuLauncher(kernel, device)
                try:
                    if not right.same(launcher):
                        dropped["wrong"] += 1
                        continue
                    graph = device.graph(lambda launcher=launcher: _chain(launcher, rotation))
                except NativeError as error:
                    if runs.lost(error) or driver.is_lost(error):
                        raise
                    dropped["failed"] += 1
                    continue
                seen[digest] = [graph.seconds() / runs.CHAIN]
                best = min(best, seen[digest][0])
                if seen[digest][0] <= HOPELESS * best:
                    graphs[digest] = graph
                else:  # timed once, and kept with that time
                    dropped["hopeless"] += 1
                    graph.close()
            good = {d: g for d, g in graphs.items() if seen[d][0] <= HOPELESS * best}
            for digest in good:
                seen[digest] = []  # the first run was cold
            for _ in range(ROUNDS):
                for digest, graph in good.items():
                    seen[digest].append(graph.seconds() / runs.CHAIN)
            times = {d: (min(values), statistics.median(values)) for d, values in seen.items()}
            first = min(good, key=lambda d: times[d][1])
            again = statistics.median(good[first].seconds() / runs.CHAIN for _ in range(ROUNDS))
        finally:
            for graph in graphs.values():
                graph.close()
            rotation.free()
            right.free()
        return times, dropped, abs(again / times[first][1] - 1)


def _chain(launcher: runs.GpuLauncher, rotation: runs.Rotation) -> None:
    for number in range(runs.CHAIN):
        launcher.launch(rotation.sets[number % len(rotation.sets)], rotation.scratch)


class _Results:
    """Compares results with those of the first kernel, at both ends of every result."""

    def __init__(self, device: Any, kernel: Any, inputs: Sequence[np.ndarray]) -> None:
        self.device, self.kernel = device, kernel
        self.operands = [device.allocate(x.nbytes) for x in inputs]
        for address, value in zip(self.operands, inputs, strict=True):
            device.upload(address, value)
        self.sizes = [4 * math.prod(shape) for shape, _ in kernel.outputs]
        self.results = [device.allocate(size) for size in self.sizes]
        self.scratch: list[int] = []
        self.want: list[np.ndarray] | None = None

    def same(self, launcher: runs.GpuLauncher) -> bool:
        """Runs a kernel; whether its results are the first one's."""
        device = self.device
        scratch = device.allocate(max(1, launcher.kernel.scratch_bytes))
        try:
            for address, size in zip(self.results, self.sizes, strict=True):
                device.fill(address, 0xFF, size)
            launcher.launch([*self.operands, *self.results], scratch)
            device.synchronize()
            got = [part for a, s in zip(self.results, self.sizes, strict=True) for part in self._ends(a, s)]
        finally:
            device.release(scratch)
        if self.want is None:
            self.want = got
        return all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(got, self.want, strict=True))

    def _ends(self, address: int, size: int) -> Iterator[np.ndarray]:
        length = min(CHECKED, size)
        yield self.device.download(address, length).view(np.float32)
        yield self.device.download(address + size - length, length).view(np.float32)

    def free(self) -> None:
        """Gives the memory back."""
        for address in (*self.operands, *self.results):
            self.device.release(address)


# -- what it shows ----------------------------------------------------------------------------------------------------
def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        _, place, count = np.unique(array, return_inverse=True, return_counts=True)
        ends = np.cumsum(count)
        return ((ends - count + ends - 1) / 2)[place]

    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def row_of(study: Study, times: Times, kernels: dict[str, Any], arch: Any, resident: float) -> dict[str, Any]:
    """Ranks, losses and violations of one operation."""
    taken = {d: _taken(kernels[d]) for d in times}
    scores = {d: gpu_score.score_of(study.all[d], taken[d], arch) for d in times}
    moved = sum(b.bytes for b in (*study.program.inputs, *study.program.outputs))  # these operations use all of them
    limit = least_seconds(moved, arch, resident=resident)
    order = sorted(median for _, median in times.values())
    best = order[0]

    def seen(digests: Sequence[str]) -> dict[str, Any]:
        first = times[digests[0]][1]
        top = max(1, round(0.01 * len(digests)))
        return {
            "first_rank": order.index(first) + 1, "first_loss": first / best - 1,
            "loss_top_1_percent": min(times[d][1] for d in digests[:top]) / best - 1, "top_1_percent": top,
            "loss_top_8": min(times[d][1] for d in digests[:8]) / best - 1,
        }  # fmt: skip

    enumerated = [p.digest for p, _ in study.ranked if p.digest in times]
    values = {p.digest: s for p, s in study.ranked}
    by_pul = sorted(times, key=lambda d: (-scores[d].pul, d))
    kept = enumerated[: study.kept]
    return {
        "operation": study.name, "measured": len(times), "sampled_without_model": study.sampled,
        "enumerated": len(study.ranked), "best_us": best * 1e6, "worst_us": order[-1] * 1e6,
        "median_us": order[len(order) // 2] * 1e6,
        "best": _describe(study.all[min(times, key=lambda d: times[d][1])]),
        "best_is_enumerated": min(times, key=lambda d: times[d][1]) in values,
        "score": {
            **seen(enumerated), "kept": len(kept), "loss_kept": min(times[d][1] for d in kept) / best - 1,
            "loss_enumerated": min(times[d][1] for d in enumerated) / best - 1,
            "spearman": spearman([-values[d] for d in enumerated], [times[d][1] for d in enumerated]),
            "first": _describe(study.all[enumerated[0]]),
        },
        "pul": {
            **seen(by_pul), "spearman": spearman([-scores[d].pul for d in by_pul], [times[d][1] for d in by_pul]),
            "exceeded": sum(scores[d].seconds > times[d][0] for d in times), "first": _describe(study.all[by_pul[0]]),
        },
        "bound": {
            "bytes": moved, "seconds": limit, "violations": sum(least < limit for least, _ in times.values()),
            "tightest": limit / min(least for least, _ in times.values()),
            "best_over_copy_ceiling": best / (moved / 4.19e12),
        },
    }  # fmt: skip


def _taken(kernel: Any) -> list[gpu_score.Taken]:
    return [
        (math.prod(x.grid), math.prod(x.block), x.resources.registers, x.resources.shared + x.shared)
        for x in Image.unpack(kernel.object_code).launches
    ]


def _describe(program: Program) -> str:
    params = ", ".join(f"{k}={v}" for k, v in program.params)
    phase = program.phases[0]
    tile = "x".join(str(x.unroll) for x in (*phase.axes, *phase.reds))
    return f"{params}; tile {tile}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--candidates", type=int, default=500, help="sampled without the model, per operation")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", default="H200", help="name of the GPU's data file")
    parser.add_argument("--budget", type=float, default=0.0, help="measure no further operation after so many seconds")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--capability", default="9.0", help="where --compile-only cannot ask the GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    arch = load_gpu(options.gpu)
    device = None if options.compile_only else driver.device()
    capability = tuple(int(x) for x in options.capability.split("."))
    if device is not None:
        capability = (device.attribute(75), device.attribute(76))
    studies = [Study(name, options.candidates, options.seed) for name in options.operations]
    built: dict[str, Built] = {}
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "gpu": arch.name, "versions": versions(), "candidates": options.candidates,
        "rows": [],
    }  # fmt: skip
    everything: dict[str, Any] = {}
    with Compiler(options.out / "kernels", (capability[0], capability[1]), options.jobs) as compiler:
        waiting = [(study, compiler.start(study.all.values())) for study in studies]
        for study, wait in waiting:  # while one operation is timed, the next ones compile
            if options.budget and time.perf_counter() - start > options.budget:
                result["rows"].append({"operation": study.name, "skipped": "out of time"})
                continue
            found = wait()
            built.update(found)
            if device is None:
                continue
            row, times = measured(study, found, device, arch)
            result["rows"].append(row)
            everything[study.name] = times
            _show(row)
            (options.out / "pruning_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / "pruning_gpu_times.json").write_text(json.dumps(everything) + "\n")
    result.update(
        compiled=sum(b.path is not None for b in built.values()),
        refused_for_local_memory=sum(b.stack > 0 for b in built.values()),
        refused_for_other_reasons=sorted({b.reason[:160] for b in built.values() if b.reason and not b.stack})[:10],
        seconds=round(time.perf_counter() - start, 1),
    )
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}), flush=True)
    (options.out / "pruning_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row.get("bound", {}).get("violations") for row in result["rows"]))


def measured(study: Study, built: dict[str, Built], device: Any, arch: Any) -> tuple[dict[str, Any], list[Any]]:
    """The row of one operation, and [least us, median us, schedule, launches] of every kernel."""
    began = time.perf_counter()
    kernels = {d: read_kernel(b.path) for d, b in built.items() if b.path is not None}
    times, dropped, noise = study.measure(kernels, device)
    one = sum(b.bytes for b in (*study.program.inputs, *study.program.outputs))
    sets = min(runs.CHAIN, max(2, int(runs.COLD * device.l2_bytes // one) + 1))
    row = row_of(study, times, kernels, arch, device.l2_bytes / sets)
    row.update(dropped=dropped, noise=noise, seconds=round(time.perf_counter() - began, 1))
    return row, [
        [round(times[d][0] * 1e6, 3), round(times[d][1] * 1e6, 3), _describe(study.all[d]), _taken(kernels[d])]
        for d in times
    ]


def _show(row: dict[str, Any]) -> None:
    score, pul, bound = row["score"], row["pul"], row["bound"]
    parts = [
        f"{row['operation']:24} {row['measured']:4} best {row['best_us']:7.2f} us",
        f"({bound['best_over_copy_ceiling']:.2f} of a copy)",
        f"score: rank {score['first_rank']:3} loss {score['first_loss']:6.1%} kept {score['kept']}",
        f"{score['loss_kept']:6.1%} rho {score['spearman']:5.2f}",
        f"pul: rank {pul['first_rank']:3} loss {pul['first_loss']:6.1%} top 1% {pul['loss_top_1_percent']:6.1%}",
        f"rho {pul['spearman']:5.2f}  violations {bound['violations']} (tightest {bound['tightest']:.2f})",
        f"noise {row['noise']:.1%}  {row['seconds']} s  {row['dropped']}",
    ]
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

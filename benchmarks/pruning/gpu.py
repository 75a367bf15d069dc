"""Is pruning by the estimate safe on a GPU?  Schedules drawn without the model, all measured.

    python benchmarks/pruning/gpu.py --out results --candidates 510 --budget 180 --lane 0/2    # with a GPU
    python benchmarks/pruning/gpu.py --out results --candidates 20 --pretend "full sum 2^24"   # without
    python benchmarks/pruning/gpu_ranking.py results/pruning_gpu_0.json                           # what it shows

For each operation (`gpu_operations`), schedules are drawn at random from all that its forms can express
(`gpu_space`), and what the tuner would measure is added.  Kernels compile in parallel and are measured as they
come: results are compared with XLA's on the CPU, and timed by CUDA events on rotated inputs, as the tuner screens.
One JSON tells everything of every schedule; operations that are in it are not measured again.  A kernel that hangs or
breaks the context is left out, and the rest goes on in a new process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.gpu_kernels.parallel_compile import _compile, _path  # noqa: E402
from benchmarks.pruning.gpu_operations import OPERATIONS  # noqa: E402
from jcuts.base.errors import NativeError  # noqa: E402
from jcuts.base.fingerprint import versions  # noqa: E402
from jcuts.codegen.cuda.toolchain.image import Image  # noqa: E402
from jcuts.tune.kernel_file import read_kernel  # noqa: E402
from jcuts.tune.measure import cuda_driver  # noqa: E402
from jcuts.tune.measure import gpu_launch as runs  # noqa: E402
from jcuts.tune.verify.inputs import dtype_of  # noqa: E402

CAPABILITY = (9, 0)
HOPELESS = 3.0
"""Times the best from which on a kernel is timed once."""
NEAR = 1.35
"""Times the best up to which a kernel is timed in turns with the others."""
ROUNDS = 5
CHECKED = 1 << 16
"""Bytes of each result, at both ends, that are compared."""
PATIENCE_S = 15.0
"""A kernel that takes longer hangs."""
MORE = 1.5
"""Schedules per one that is wanted: some spill, and are refused."""
BROKEN = 9
"""Exit status of a process whose context is lost."""


# -- in the compiling processes ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prepared:
    """Schedules of one operation: (digest, JSON, record); what the tuner would measure; what is right."""

    schedules: list[tuple[str, str, dict[str, Any]]]
    kept: list[str]
    scratch: int
    results: list[tuple[np.ndarray, np.ndarray, float]]


def prepare(name: str, count: int, seed: int, again: Sequence[tuple[str, int]] = ()) -> Prepared:
    """Draws the schedules of an operation and computes its results (first and last elements, root mean square).

    Args: again: files of earlier runs, and how many of the fastest schedules of each are measured again.
    """
    from benchmarks.pruning import gpu_space as space
    from benchmarks.pruning.gpu_ranking import rows_of
    from jcuts.schedule.gpu.kernel_time import kernel_time

    operation = OPERATIONS[name]
    found, kept, scores = space.pool(operation.program, count, f"{seed} {name}")
    for path, most in again:
        for row in rows_of(Path(path)):
            fastest = sorted(row["schedules"], key=lambda entry: entry["us"][1])[:most]
            made = [space.rebuilt(operation.program, e) for e in fastest] if row["operation"] == name else []
            known = {p.digest for p in found}
            found = [*(p for p in made if p is not None and p.digest not in known), *found]
    schedules = []
    for program in found:
        entry = space.record(program) | {
            "predicted_us": kernel_time(program, space.MACHINE).seconds * 1e6,
            "score": scores.get(program.digest),
        }
        schedules.append((program.digest, json.dumps(program.to_json()), entry))
    results = []
    for value in operation.results():
        flat = value.reshape(-1)
        ends = CHECKED // (2 if operation.dtype == "bfloat16" else 4)
        results.append((flat[:ends].copy(), flat[-ends:].copy(), float(np.sqrt(np.mean(np.square(flat))))))
    return Prepared(schedules, kept, max(map(space.scratch_of, found)), results)


# -- between them and the GPU -----------------------------------------------------------------------------------------
@dataclass
class Work:
    """One operation on its way: compiled kernels arrive in ``ready``, as (digest, reason, stack)."""

    name: str
    prepared: Future[Prepared]
    ready: queue.Queue[tuple[str, str, int]] = field(default_factory=queue.Queue)
    enough: bool = False


class Feeder(threading.Thread):
    """Gives schedules to the compiling processes, one operation after the other, and never too many at once."""

    def __init__(self, pool: ProcessPoolExecutor, work: Sequence[Work], folder: Path, most: int) -> None:
        super().__init__(daemon=True)
        self.pool, self.work, self.folder = pool, work, folder
        self.room = threading.Semaphore(most)

    def run(self) -> None:
        for work in self.work:
            if work.prepared.exception() is not None:
                continue
            for digest, text, _ in work.prepared.result().schedules:
                self.room.acquire()
                if work.enough:
                    self.room.release()
                    work.ready.put((digest, "not needed", 0))
                    continue
                task = (text, str(_path(self.folder, digest, CAPABILITY)), CAPABILITY)
                try:
                    self.pool.submit(_compile, task).add_done_callback(
                        lambda done, work=work, digest=digest: self._done(work, digest, done)
                    )
                except RuntimeError:  # the study is over
                    return

    def _done(self, work: Work, digest: str, done: Future[tuple[str, int]]) -> None:
        self.room.release()
        if not done.cancelled():
            error = done.exception()
            reason, stack = done.result() if error is None else (str(error), 0)
            work.ready.put((digest, reason, stack))


# -- on the GPU -------------------------------------------------------------------------------------------------------
class Watch(threading.Thread):
    """Ends the process where a kernel takes too long, and writes down which."""

    def __init__(self, skipped: Path) -> None:
        super().__init__(daemon=True)
        self.skipped, self.at, self.since = skipped, "", 0.0

    def run(self) -> None:
        while True:
            time.sleep(1.0)
            if self.at and time.perf_counter() - self.since > PATIENCE_S:
                self.lost("hangs")

    def begin(self, digest: str) -> None:
        """A kernel runs from now on; '' for none."""
        self.since, self.at = time.perf_counter(), digest

    def lost(self, why: str) -> None:
        """Nothing works here any more."""
        with self.skipped.open("a") as out:
            out.write(f"{self.at} {why}\n")
        print(f"{self.at}: {why}", flush=True)
        os._exit(BROKEN)


class Study:
    """One operation on the GPU: operands, results, and what the kernels took."""

    def __init__(self, name: str, prepared: Prepared, device: Any, watch: Watch, launcher: Callable[..., Any]) -> None:
        self.name, self.prepared, self.device, self.watch, self.launcher = name, prepared, device, watch, launcher
        self.tolerance = OPERATIONS[name].tolerance
        self.operands = OPERATIONS[name].operands
        self.rotation: runs.RotatedOperands | None = None
        self.graphs: dict[str, Any] = {}
        self.seen: dict[str, list[float]] = {}
        self.launches: dict[str, Any] = {}
        self.dropped = {"wrong": [], "failed": []}
        self.best = math.inf

    def add(self, digest: str, kernel: Any) -> None:
        """Runs a kernel, compares its results, times it once or twice."""
        self.watch.begin(digest)
        try:
            self._add(digest, kernel)
        except NativeError as error:
            if runs.is_context_lost(error) or cuda_driver.is_lost(error):
                self.watch.lost(str(error)[:200])
            self.dropped["failed"].append([digest[:16], str(error)[:120]])
        finally:
            self.watch.begin("")

    def _add(self, digest: str, kernel: Any) -> None:
        device = self.device
        if self.rotation is None:
            self.rotation = runs.RotatedOperands(device, kernel, self.operands, self.prepared.scratch)
        launcher, places = self.launcher(kernel, device), self.rotation.sets[0]
        results = places[len(self.operands) :]
        sizes = [math.prod(s) * dtype_of(d).itemsize for s, d in kernel.outputs]
        for address, size in zip(results, sizes, strict=True):
            device.fill(address, 0xFF, size)
        launcher.launch(places, self.rotation.scratch)
        device.synchronize()
        off = self._off(kernel, results, sizes)
        if not off <= self.tolerance:
            self.dropped["wrong"].append([digest[:16], off])
            return
        graph = device.graph(lambda: self._chain(launcher))
        seconds = graph.seconds() / runs.CHAIN  # cold
        if seconds <= 2 * HOPELESS * self.best:
            seconds = graph.seconds() / runs.CHAIN
        self.seen[digest] = [seconds]
        self.launches[digest] = [
            [math.prod(x.grid), math.prod(x.block), x.resources.registers, x.resources.shared + x.shared]
            for x in Image.unpack(kernel.object_code).launches
        ]
        self.best = min(self.best, seconds)
        if seconds <= HOPELESS * self.best:
            self.graphs[digest] = graph
        else:
            graph.close()

    def _off(self, kernel: Any, results: Sequence[int], sizes: Sequence[int]) -> float:
        """Largest difference from what is right, in parts of the results' root mean square."""
        worst = 0.0
        for address, size, (_, dtype), (first, last, scale) in zip(
            results, sizes, kernel.outputs, self.prepared.results, strict=True
        ):
            length = min(CHECKED, size)
            for start, want in ((address, first), (address + size - length, last)):
                got = self.device.download(start, length).view(dtype_of(dtype)).astype(np.float32)
                off = np.abs(got - want) / (scale + np.abs(want))
                worst = max(worst, float(off.max()) if np.isfinite(off).all() else math.inf)
        return worst

    def _chain(self, launcher: Any) -> None:
        assert self.rotation is not None
        for number in range(runs.CHAIN):
            launcher.launch(self.rotation.sets[number % len(self.rotation.sets)], self.rotation.scratch)

    def finish(self) -> dict[str, Any]:
        """Times what is near the best in turns; the row of the operation."""
        near = {d: g for d, g in self.graphs.items() if self.seen[d][0] <= NEAR * self.best}
        for digest in near:
            self.seen[digest] = []
        for _ in range(ROUNDS):
            for digest, graph in near.items():
                self.watch.begin(digest)
                self.seen[digest].append(graph.seconds() / runs.CHAIN)
        self.watch.begin("")
        times = {d: (min(values), statistics.median(values)) for d, values in self.seen.items()}
        first = min(near, key=lambda d: times[d][1])
        again = statistics.median(near[first].seconds() / runs.CHAIN for _ in range(ROUNDS))
        assert self.rotation is not None
        row = {
            "operation": self.name,
            "sets": len(self.rotation.sets),
            "l2": self.device.l2_bytes,
            "noise": abs(again / times[first][1] - 1),
            "dropped": self.dropped,
            "kept": [d[:16] for d in self.prepared.kept],
            "schedules": [
                entry | {"us": [round(t * 1e6, 3) for t in times[d]], "launches": self.launches[d]}
                for d, _, entry in self.prepared.schedules
                if d in times
            ],
        }
        for graph in self.graphs.values():
            graph.close()
        self.rotation.free()
        return row


class Pretended:
    """A device that runs nothing, for trying the study without a GPU: every kernel is right."""

    ordinal, stream, l2_bytes = 0, 0, 60 << 20

    def __init__(self) -> None:
        self.end, self.memory = 256, dict[int, np.ndarray]()
        self.random = np.random.default_rng(0)

    def allocate(self, size: int) -> int:
        start, self.end = self.end, self.end + -(-max(1, size) // 256) * 256
        return start

    def free_bytes(self) -> int:
        return 1 << 36

    def download(self, address: int, size: int) -> np.ndarray:
        return self.memory[address][:size]

    def graph(self, work: Callable[[], None]) -> Any:
        work()
        return self

    def seconds(self) -> float:
        return runs.CHAIN * float(self.random.uniform(1e-4, 5e-4))

    def nothing(self, *_: Any) -> None:
        """Also `release`, `fill`, `upload`, `copy`, `synchronize`, `close`."""

    release = fill = upload = copy = synchronize = close = nothing

    def launcher(self, study: Prepared) -> Callable[..., Any]:
        """Of kernels that leave what is right."""
        device = self

        class Launcher:
            def __init__(self, kernel: Any, _: Any) -> None:
                self.kernel = kernel

            def launch(self, places: Sequence[int], scratch: int) -> None:
                for address, (shape, name), (first, last, _) in zip(
                    places[-len(self.kernel.outputs) :], self.kernel.outputs, study.results, strict=True
                ):
                    kind = dtype_of(name)
                    size = math.prod(shape) * kind.itemsize
                    device.memory[address] = first.astype(kind).view(np.uint8)
                    if size > CHECKED:
                        device.memory[address + size - CHECKED] = last.astype(kind).view(np.uint8)

        return Launcher


# -- all of it --------------------------------------------------------------------------------------------------------
def measured(
    work: Work, device: Any, watch: Watch, folder: Path, wanted: int, skipped: set[str], left: Callable[[], float]
) -> dict[str, Any]:
    """The row of one operation, its kernels measured as they come. Args: left: seconds that there are."""
    prepared = work.prepared.result()
    launcher = device.launcher(prepared) if isinstance(device, Pretended) else runs.GpuLauncher
    study = Study(work.name, prepared, device, watch, launcher)
    began, refused, spilled = time.perf_counter(), list[str](), 0
    for _ in prepared.schedules:
        try:
            digest, reason, stack = work.ready.get(timeout=max(0.1, left()))
        except queue.Empty:
            break
        if reason:
            spilled += stack > 0
            if not stack and reason != "not needed":
                refused.append(reason[:120])
        elif digest not in skipped and not work.enough:
            study.add(digest, read_kernel(_path(folder, digest, CAPABILITY)))
            work.enough = len(study.seen) >= wanted and digest not in prepared.kept
    work.enough = True
    row = study.finish() if study.seen else {"operation": work.name, "schedules": [], "dropped": study.dropped}
    return row | {
        "spilled": spilled,
        "refused": sorted(set(refused))[:8],
        "refusals": len(refused),
        "seconds": round(time.perf_counter() - began, 1),
    }


def show(row: dict[str, Any], clock: float) -> None:
    """One line of an operation."""
    found = row["schedules"]
    best = min((s["us"][1] for s in found), default=math.nan)
    wrong = {k: len(v) for k, v in row["dropped"].items()}
    print(
        f"{clock:6.1f} s  {row['operation']:34} {len(found):4} measured, best {best:8.2f} us, "
        f"{row['spilled']} spilled, {row['refusals']} refused, {wrong}, "
        f"noise {row.get('noise', 0):.1%}, {row['seconds']} s",
        flush=True,
    )


def study(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Measures operations one after the other."""
    start = time.perf_counter()

    def left() -> float:
        return options.budget - (time.perf_counter() - start) if options.budget else 1e9

    out, skip = options.out / f"pruning_gpu_{options.tag}.json", options.out / f"skipped_{options.tag}.txt"
    skipped = {line.split()[0] for line in skip.read_text().splitlines()} if skip.exists() else set[str]()
    whole: dict[str, Any] = (
        json.loads(out.read_text())
        if out.exists()
        else {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "rows": []}
    )
    known = {row["operation"] for row in whole["rows"]}
    names = [name for name in names if name not in known]
    options.kernels.mkdir(parents=True, exist_ok=True)
    watch = Watch(skip)
    watch.start()
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    count = int(MORE * options.candidates)
    again = [(str(path), options.fastest) for path in options.again]
    every = [Work(n, pool.submit(prepare, n, count, options.seed, again)) for n in names]
    Feeder(pool, every, options.kernels, 3 * options.jobs).start()
    device: Any = Pretended() if options.pretend else cuda_driver.device()
    for work in every:
        if left() < 4.0:
            print(f"{work.name}: out of time")
            break
        try:
            row = measured(work, device, watch, options.kernels, options.candidates, skipped, left)
        except Exception as error:  # the others are of use without it
            print(f"{work.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            work.enough = True
            continue
        show(row, time.perf_counter() - start)
        whole["rows"].append(row)
        out.write_text(json.dumps(whole))
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):  # nobody waits for what is out of time
        process.kill()
    os._exit(0)


def names_of(options: argparse.Namespace) -> list[str]:
    """The operations that are asked for: those of the lane."""
    part, lanes = (int(x) for x in options.lane.split("/"))
    return list(options.operations or OPERATIONS)[part::lanes]


def guarded(arguments: Sequence[str], budget: float) -> int:
    """The study in processes of its own, until one ends as it should."""
    start = time.perf_counter()
    for _ in range(6):
        more = ["--budget", str(round(budget - (time.perf_counter() - start), 1))] if budget else []
        command = [sys.executable, __file__, "--inside", *arguments, *more]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(timeout=budget + 20.0 if budget else None)
        except subprocess.TimeoutExpired:
            status = 0
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what compiled for it
        if status != BROKEN or (budget and time.perf_counter() - start > budget - 15.0):
            return status
    return 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", help="all by default")
    parser.add_argument("--candidates", type=int, default=510, help="schedules that are measured, per operation")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--kernels", type=Path, default=Path("/tmp/pruning_kernels"))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--again", type=Path, nargs="*", default=(), help="results whose fastest are measured as well")
    parser.add_argument("--fastest", type=int, default=3, help="how many of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lane", default="0/1", help="k/n: every n-th operation from the k-th on")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds; what is left undone is not started")
    parser.add_argument("--pretend", action="store_true", help="no GPU: times are random")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    found.tag = found.lane.split("/")[0]
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    if options.inside:
        return study(options, names_of(options))
    return guarded(given, options.budget)


if __name__ == "__main__":
    raise SystemExit(main())

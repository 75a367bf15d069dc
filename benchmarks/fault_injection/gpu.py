"""Faults while tuning on a GPU: is the user's process unharmed, and its result right?

    python benchmarks/fault_injection/gpu.py --out results                     # with a GPU, about 3 minutes
    python benchmarks/fault_injection/gpu.py --out results --cpu --kills 4     # the same harness with CPU kernels

    candidates   kernels that hang, trap, access illegal memory, write beside a result or into an operand, or are wrong
    neighbour    a second process computes on the GPU while the first tunes a kernel that hangs
    two          two processes tune the same thing at the same time
    kill         kill -9 at a random moment, then the same program again on what is left
    memory       the user's data leave so many MiB; then the same program with the memory free again
    preallocate  the user's process holds three quarters of the memory, as JAX does by default

Every workload is a process of its own: it puts data on the device, tunes, then checks that its earlier data, a new
computation and the chosen kernel are right.  ``OUT/gpu_faults.json`` has one row per run and the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fault_injection.cpu import descendants, gone  # noqa: E402

TIMEOUT_S = 150.0
TUNE_TIMEOUT_S = "10"
BAD = ("hangs", "illegal", "trap", "wrong", "beside", "clobbers")
ON_CPU = {"hangs": "forever", "illegal": "segfault", "trap": "abort", "beside": "out of bounds"}
LEAVE_MIB = (100, 600, 1500)
"""Free memory that is left: too little for another context, for the worker's data, and enough for both."""
ALONE = ("memory", "preallocate")
FAULTS = ("candidates", "neighbour", "two", "kill", "memory", "preallocate")


# -- workloads, each in its own process -------------------------------------------------------------------------------
def run_objects(round_: str, kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Tunes x * x + 1 with kernels written for this and runs the one chosen for ``mode="fusion"``."""
    from dataclasses import replace

    import jax
    import numpy as np

    from jcuts.base.settings import Settings
    from jcuts.tune.choice import LIBRARY
    from jcuts.tune.parent.tuner import TuningBudget, default_store, tune
    from jcuts.tune.worker.requests import KERNEL_KINDS
    from jcuts.xla.cpu_ffi_call import call_kernel

    if options.cpu:
        from tests.tune import objects as cpu_objects

        problem = cpu_objects.problem(*(ON_CPU.get(k, k) for k in kinds), name=round_)
    else:
        from jcuts.xla import devices as xla_devices
        from tests.gpu import objects

        gpu = xla_devices.this()
        made = objects.problem(kinds, gpu.identity(), f"sm_{gpu.capability[0]}{gpu.capability[1]}")
        problem = replace(made, identity=f"{made.identity} {round_}")
    x = np.random.default_rng(0).standard_normal(problem.inputs[0].shape).astype(np.float32)
    mine = jax.device_put(x)
    doubled = np.asarray(mine * 2)
    left = grab(options.grab) if options.grab else None
    start = time.perf_counter()
    store = default_store()
    choice = tune([problem], store, settings=Settings(mode="fusion"), effort=TuningBudget(seconds=0.05, finalists=2))[
        problem.digest
    ]
    seconds = time.perf_counter() - start
    unharmed = np.array_equal(np.asarray(mine * 2), doubled) and float(jax.jit(lambda a: a.sum())(np.ones(64))) == 64
    if choice.winner == LIBRARY:
        y = jax.jit(lambda a: a * a + 1)(x)
    else:
        kernel = KERNEL_KINDS["object"](problem.candidate(choice.winner))
        (y,) = jax.jit(lambda a: call_kernel(kernel, a))(x)
    return {
        "right": bool(np.allclose(y, x * x + 1, rtol=1e-6)),
        "unharmed": bool(unharmed),
        "tuning_s": round(seconds, 2),
        "winner": choice.winner,
        "origin": choice.origin,
        "postponed": choice.is_postponed,
        "left_mib": left,
        "rejected": {r.label: f"{r.error}: {r.message[:160]}" for r in choice.rejections},
        "logged": store.errors,
    }


def run_optimize(round_: str, _: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Optimises a small function, different in every round, and compares it with `jax.jit`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jcuts

    width = 256 + 4 * (sum(map(ord, round_)) % 64)

    def function(x: Any, g: Any) -> Any:
        return jax.nn.softmax(jnp.maximum(x * g + 0.5, 0.0), axis=-1)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2048, width), (width,))]
    doubled = np.asarray(args[0] * 2)
    left = grab(options.grab) if options.grab else None
    start = time.perf_counter()
    run = jcuts.optimize(function)
    got = np.asarray(run(*args))
    seconds = time.perf_counter() - start
    report = run.explain(*args)
    text = str(report)
    return {
        "right": bool(np.allclose(got, np.asarray(jax.jit(function)(*args)), rtol=1e-4, atol=1e-7)),
        "unharmed": bool(np.array_equal(np.asarray(args[0] * 2), doubled)),
        "tuning_s": round(seconds, 2),
        "origins": [s.origin for s in report.subsets],
        "why": [s.why for s in report.subsets if s.why][:2],
        "postponed": "not enough free memory" in text,
        "left_mib": left,
        "explains": "" if report.subsets else text[-600:],
    }


WORKLOADS: dict[str, Callable[[str, list[str], argparse.Namespace], dict[str, Any]]] = {
    "objects": run_objects,
    "optimize": run_optimize,
}


def grab(leave_mib: int) -> int:
    """This process takes the device's memory but for so many MiB, as a user's data would; MiB left in the end."""
    from jcuts.base.errors import NativeError
    from jcuts.tune.measure import cuda_driver

    device = cuda_driver.device()
    piece = 256 << 20
    while (size := min(piece, device.free_bytes() - (leave_mib << 20))) >= 1 << 20:
        try:
            device.allocate(size)
        except NativeError:
            piece //= 2
    return device.free_bytes() >> 20


def neighbour(seconds: float) -> dict[str, Any]:
    """Computes the same thing again and again; the longest call, and whether every result was right."""
    import jax
    import jax.numpy as jnp

    x = jnp.full((1024, 1024), 1.0)
    step = jax.jit(lambda a: (a @ a).sum() / 1024**3)
    float(step(x))
    print("ready", flush=True)
    longest, calls, right = 0.0, 0, True
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        right &= abs(float(step(x)) - 1.0) < 1e-5
        longest = max(longest, time.perf_counter() - start)
        calls += 1
    return {"right": right, "unharmed": True, "calls": calls, "longest_call_s": round(longest, 3)}


# -- the faults -------------------------------------------------------------------------------------------------------
class Bench:
    """Starts workloads, breaks things around them, and keeps one row per run."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.count = 0
        self.end = time.monotonic() + options.budget if options.budget else float("inf")

    def fresh(self) -> Path:
        with self.lock:
            self.count += 1
            place = self.folder / f"place{self.count}"
        (place / "tmp").mkdir(parents=True)
        return place

    def start(
        self, place: Path, round_: str, kinds: str = "right", workload: str = "objects", *more: str, **env: str
    ) -> subprocess.Popen[str]:
        """A workload process with cache, lock and temporary files in a place of its own."""
        full = {
            "JCUTS_TUNE_SECONDS": "inf",
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JCUTS_CACHE_DIR": str(place / "cache"),
            "TMPDIR": str(place / "tmp"),
            "JCUTS_TUNE_TIMEOUT_S": TUNE_TIMEOUT_S,
            "JCUTS_COMPILE_WORKERS": "2",
            "JCUTS_MAX_CANDIDATES": "4",
            **env,
        }
        if self.options.cpu:
            full["JAX_PLATFORMS"] = "cpu"
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--run",
            round_,
            "--kinds",
            kinds,
            "--workload",
            workload,
            *(["--cpu"] if self.options.cpu else []),
            *more,
        ]
        return subprocess.Popen(
            command, env=full, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def judge(self, fault: str, process: subprocess.Popen[str], **more: Any) -> dict[str, Any]:
        """Waits for a run that must end well."""
        start = time.monotonic()
        row: dict[str, Any] = {"fault": fault, "right": False, "unharmed": False, **more}
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
            row["status"] = process.returncode
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if process.returncode == 0 and lines:
                row.update(json.loads(lines[-1]))
            else:
                row["stderr"] = err[-1500:]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            row["status"] = "hung"
        row["seconds"] = round(time.monotonic() - start, 1)
        self.add(row)
        return row

    def add(self, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows.append(row)
        good = row["right"] and row["unharmed"] and not row.get("problem")
        print("ok  " if good else "BAD ", json.dumps(row)[: 240 if good else 2500], flush=True)

    # Each of these gives jobs that may run at the same time.
    def candidates(self) -> list[Callable[[], None]]:
        def one(fault: str, kinds: str, winner: str) -> None:
            row = self.judge(fault, self.start(self.fresh(), fault, kinds), wanted=winner)
            if row.get("winner") != winner:
                self.add({**row, "problem": f"chose {row.get('winner')} instead of {winner}"})

        jobs = [lambda k=k: one(f"candidate {k}", f"right,{k}", "right") for k in BAD]
        jobs += [lambda k=k: one(f"only {k}", k, "xla") for k in BAD]
        return [*jobs, lambda: one("all bad candidates and a right one", ",".join([*BAD, "right"]), "right")]

    def neighbour(self) -> list[Callable[[], None]]:
        def one() -> None:
            other = self.start(self.fresh(), "neighbour", "", "objects", "--neighbour", "15")
            assert other.stdout is not None
            other.stdout.readline()
            self.judge("a neighbour's hanging candidate", self.start(self.fresh(), "hang", "hangs,illegal,right"))
            self.judge("computing beside a hanging candidate", other)

        return [one]

    def two(self) -> list[Callable[[], None]]:
        def one(workload: str) -> None:
            place = self.fresh()
            pair = [self.start(place, "two", "right,wrong,illegal", workload) for _ in range(2)]
            rows = [self.judge(f"two processes, {workload}", process) for process in pair]
            if len({r.get("winner") for r in rows}) > 1:
                self.add({**rows[0], "problem": "the two chose differently"})

        return [lambda: one("objects"), lambda: one("optimize")]

    def kill(self) -> list[Callable[[], None]]:
        options = self.options
        rng = random.Random(options.seed)
        start = time.monotonic()
        self.judge("before the kills", self.start(self.fresh(), "before", "right,wrong"))
        whole = time.monotonic() - start

        def one(number: int, share: float) -> None:
            place = self.fresh()
            workload = "optimize" if number % 4 == 3 else "objects"
            victim = self.start(place, f"kill{number}", "right,wrong,illegal", workload)
            time.sleep(share * whole)
            family, running = descendants(victim.pid), victim.poll() is None
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            left = sum(not gone(pid) for pid in family)
            self.judge(
                "again after kill -9",
                self.start(place, f"kill{number}", "right,wrong,illegal", workload),
                killed_at_s=round(share * whole, 2),
                was_running=running,
                children=len(family),
                **({"problem": f"{left} processes left behind"} if left else {}),
            )

        moments = [rng.random() for _ in range(options.kills)]
        return [lambda n=n, s=s: one(n, s) for n, s in enumerate(moments)]

    # These need the GPU for themselves.
    def memory(self) -> list[Callable[[], None]]:
        def one(leave: int) -> None:
            place = self.fresh()
            for workload in ("objects", "optimize"):
                for grabbed in (("--grab", str(leave)), ()):
                    process = self.start(place, f"memory {leave}", "right,wrong", workload, *grabbed)
                    fault = f"{leave} MiB left, {workload}" if grabbed else "the same with memory free again"
                    row = self.judge(fault, process)
                    origins = [row.get("origin"), *row.get("origins", [])]
                    if not grabbed and (row.get("postponed") or "library" in origins):
                        self.add({**row, "problem": "a shortage of memory was remembered"})

        return [] if self.options.cpu else [lambda leave=leave: one(leave) for leave in self.options.leave]

    def preallocate(self) -> list[Callable[[], None]]:
        def one() -> None:
            env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
            self.judge("JAX's default preallocation", self.start(self.fresh(), "full", "right", "optimize", **env))

        return [] if self.options.cpu else [one]


def free_mib(options: argparse.Namespace) -> int | None:
    """Free memory of the GPU, asked by a process of its own."""
    if options.cpu:
        return None
    code = "from jcuts.tune.measure import cuda_driver; print(cuda_driver.device().free_bytes() >> 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all runs."""
    runs = [r for r in rows if not r.get("problem")]
    kills = [r for r in runs if r["fault"] == "again after kill -9"]
    return {
        "runs": len(runs),
        "right": sum(r["right"] for r in runs),
        "unharmed": sum(r["unharmed"] for r in runs),
        "problems": [[r["fault"], r["problem"]] for r in rows if r.get("problem")],
        "kills": len(kills),
        "killed_while_running": sum(r["was_running"] for r in kills),
        "by_fault": dict(Counter(r["fault"] for r in runs)),
        "longest_neighbour_call_s": max((r.get("longest_call_s", 0.0) for r in runs), default=0.0),
    }


def main() -> int:
    """Runs the faults that were asked for; status 1 if any run ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--lanes", type=int, default=6, help="workloads at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.0, help="start nothing new after so many seconds")
    parser.add_argument("--leave", type=int, nargs="*", default=list(LEAVE_MIB), help="MiB left in the memory fault")
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--cpu", action="store_true", help="CPU kernels: tries the harness where there is no GPU")
    parser.add_argument("--workload", choices=WORKLOADS, default="objects", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="right", help=argparse.SUPPRESS)
    parser.add_argument("--grab", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.neighbour:
        print(json.dumps(neighbour(options.neighbour)))
        return 0
    if options.run is not None:
        print(json.dumps(WORKLOADS[options.workload](options.run, options.kinds.split(","), options)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jcuts-gpu-faults-") as folder:
        bench = Bench(Path(folder), options)
        before = free_mib(options)
        wanted = [name for name in FAULTS if name in options.only.split(",")]
        together = [
            job for name in wanted[:] if name not in ("memory", "preallocate") for job in getattr(bench, name)()
        ]
        alone = [job for name in wanted if name in ("memory", "preallocate") for job in getattr(bench, name)()]
        for jobs, lanes in ((alone, 1), (together, options.lanes)):
            with ThreadPoolExecutor(lanes) as pool:
                list(pool.map(lambda job: job() if time.monotonic() < bench.end else None, jobs))
        found = {
            **summary(bench.rows),
            "seconds": round(time.monotonic() - start, 1),
            "free_mib_before": before,
            "free_mib_after": free_mib(options),
        }
    (options.out / "gpu_faults.json").write_text(json.dumps({**found, "rows": bench.rows}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(found["right"] < found["runs"] or found["unharmed"] < found["runs"] or bool(found["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())

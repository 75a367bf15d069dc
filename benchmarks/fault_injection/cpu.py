"""Faults while tuning: does the user still get the right result?  Prints one line of figures per fault.

    python benchmarks/fault_injection/cpu.py                         # kernels written for this test, good and bad
    python benchmarks/fault_injection/cpu.py --workload optimize     # jcuts.optimize end to end
    python benchmarks/fault_injection/cpu.py --kills 10 --only kill  # part of it

Every run of the workload is a process of its own with a cache folder of its own; it ends with RIGHT or WRONG, having
compared what tuning chose with a reference.  Faults: kill -9 at random points, two processes at once, a truncated
database, a full disk, a read-only cache, candidates that hang, crash, or are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TIMEOUT_S = 300.0


# The workload, in its own process ------------------------------------------------------------------------------------


def run_objects(round_: str, kinds: str) -> bool:
    """Tunes x * x + 1 with the given kernels and runs the one chosen for ``mode="fusion"``."""
    import numpy as np

    from jcuts.base.settings import Settings
    from jcuts.tune.choice import LIBRARY
    from jcuts.tune.measure.cpu_launch import Launcher
    from jcuts.tune.parent.tuner import TuningBudget, default_store, tune
    from jcuts.tune.worker.requests import KERNEL_KINDS
    from tests.tune import objects

    problems = [objects.problem(*kinds.split(","), name=f"{round_}.{i}") for i in range(2)]
    store = default_store()
    effort = TuningBudget(seconds=0.05, finalists=2)
    found = tune(problems, store, settings=Settings(mode="fusion"), effort=effort)
    x = np.random.default_rng(0).standard_normal(objects.SIZE).astype(np.float32)
    right = True
    for problem in problems:
        choice = found[problem.digest]
        print("chose", choice.winner, choice.origin, len(choice.rejections))
        if choice.winner == LIBRARY:
            continue
        kernel = KERNEL_KINDS["object"](problem.candidate(choice.winner))
        (y,) = Launcher(kernel).run([x])
        right &= bool(np.allclose(y, x * x + 1, rtol=1e-6))
    for error in store.errors:
        print("logged:", error)
    return right


def run_optimize(round_: str, _: str) -> bool:
    """Optimises a small network, different in every round, and compares it with `jax.jit`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jcuts

    number = zlib.crc32(round_.encode())
    width, height = 32 + number % 64, 20 + number // 64 % 16

    def network(x, w, k):
        y = jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
        )
        y = jnp.minimum(jnp.maximum(y + 0.1, 0.0), 6.0)
        return jax.nn.softmax(jnp.tanh(y @ w), axis=-1)

    rng = np.random.default_rng(0)
    shapes = ((2, height, 28, 32), (32, width), (3, 3, 1, 32))
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    os.environ.setdefault("JCUTS_FIRST_CALL_SECONDS", "inf")  # faults are to meet the call that tunes
    got = np.asarray(jcuts.optimize(network)(*args))
    return bool(np.allclose(got, np.asarray(jax.jit(network)(*args)), rtol=1e-4, atol=1e-6))


WORKLOADS = {"objects": run_objects, "optimize": run_optimize}


# The faults ----------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Counts of one fault."""

    name: str
    runs: int = 0
    right: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, what: str, count: int = 1) -> None:
        self.notes[what] = self.notes.get(what, 0) + count

    def judge(self, process: subprocess.Popen[str]) -> bool:
        """Waits for a run that must end well; True if it did."""
        self.runs += 1
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.note("hung")
            return False
        right = process.returncode == 0 and out.rstrip().endswith("RIGHT")
        self.right += right
        self.note("lines logged", out.count("logged:"))
        if not right:
            print(f"--- {self.name}: exit status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}", file=sys.stderr)
        return right

    def __str__(self) -> str:
        notes = ", ".join(f"{count} {what}" for what, count in self.notes.items() if count)
        return f"{self.name:34s} right {self.right}/{self.runs}   {self.seconds:6.1f} s   {notes}"


class Bench:
    """Starts workloads and breaks things around them."""

    def __init__(self, workload: str, seed: int, folder: Path) -> None:
        self.workload, self.folder = workload, folder
        self.rng = random.Random(seed)
        self.count = 0

    def start(
        self, cache: Path, round_: str, kinds: str = "right,slow,wrong", **kwargs: object
    ) -> subprocess.Popen[str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {
            "JCUTS_TUNE_SECONDS": "inf",
            **os.environ,
            "JCUTS_CACHE_DIR": str(cache),
            "JCUTS_TUNE_TIMEOUT_S": "5",
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, __file__, "--workload", self.workload, "--run", round_, "--kinds", kinds]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)  # type: ignore[call-overload]

    def fresh(self) -> Path:
        self.count += 1
        return self.folder / f"cache{self.count}"

    def kill(self, kills: int) -> Figures:
        """kill -9 at a random moment, then the same program again on what is left."""
        figures = Figures("kill -9 at a random point")
        cache = self.fresh()
        for name in ("first", "second"):  # the first also fills the operating system's caches
            start = time.monotonic()
            figures.judge(self.start(cache, name))
            whole = time.monotonic() - start
        hits = 0
        for i in itertools.count():
            if hits >= kills or i >= 3 * kills:
                break
            victim = self.start(cache, f"kill{i}")
            time.sleep(self.rng.uniform(0.0, whole))
            family = descendants(victim.pid)
            hit = victim.poll() is None
            hits += hit
            if not hit:
                whole *= 0.9  # the machine has become quicker: later points would miss as well
            figures.note("killed while running", hit)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            figures.note("workers left behind", sum(not gone(pid) for pid in family))
            figures.judge(self.start(cache, f"kill{i}"))
        figures.note("databases moved aside", len(list(cache.glob("*.aside-*"))))
        return figures

    def two(self, times: int) -> Figures:
        """Two processes that tune the same thing at the same time."""
        figures = Figures("two processes, the same function")
        for i in range(times):
            cache = self.fresh()
            pair = [self.start(cache, f"two{i}") for _ in range(2)]
            for process in pair:
                figures.judge(process)
        return figures

    def truncated(self, times: int) -> Figures:
        """The database cut at a random length."""
        figures = Figures("truncated database")
        cache = self.fresh()
        figures.judge(self.start(cache, "cut"))
        database = cache / "tuning.db"
        for _ in range(times):
            if database.exists():
                size = database.stat().st_size
                os.truncate(database, self.rng.randrange(size))
            figures.judge(self.start(cache, "cut"))
        figures.note("databases moved aside", len([p for p in cache.glob("*.aside-*") if "journal" not in p.name]))
        return figures

    def full(self, times: int) -> Figures:
        """No space: a tiny file system if one can be mounted, else a limit on file sizes."""
        with tiny_disk(self.folder / "disk") as disk:
            figures = Figures("full disk (tmpfs)" if disk else "full disk (file size limit)")
            for i in range(times):
                if disk:
                    # From nothing at all to a few pages: the write fails at another place each time.
                    fill(disk, leave=self.rng.randrange(0, 60_000))
                    figures.judge(self.start(disk / "cache", f"full{i}"))
                    (disk / "ballast").unlink()
                else:
                    limit = self.rng.randrange(1, 60_000)
                    cap = lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
                    figures.judge(self.start(self.fresh(), f"full{i}", preexec_fn=cap))
        return figures

    def unwritable(self, times: int) -> Figures:
        """A cache folder that cannot be made."""
        figures = Figures("unusable cache folder")
        blocker = self.folder / "file"
        blocker.touch()
        for i in range(times):
            figures.judge(self.start(blocker / "cache", f"unwritable{i}"))
        return figures

    def candidates(self) -> Figures:
        """Kernels that hang, crash, or are wrong, each beside a right one."""
        figures = Figures("bad candidates")
        if self.workload != "objects":
            figures.note("skipped: this workload makes its own candidates")
            return figures
        from tests.tune import objects

        bad = [kind for kind in objects.KINDS if kind not in ("right", "slow")]
        for kind in bad:
            figures.judge(self.start(self.fresh(), f"bad {kind}", f"right,{kind}"))
            figures.judge(self.start(self.fresh(), f"only {kind}", kind))
        figures.judge(self.start(self.fresh(), "all", ",".join([*bad, "right"])))
        return figures


def descendants(pid: int) -> list[int]:
    """Process ids below a process (Linux)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found - {pid})
        found |= more


def gone(pid: int, patience: float = 10.0) -> bool:
    """Whether a process ends within some seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def tiny_disk(path: Path) -> Iterator[Path | None]:
    """A file system of 512 KiB, or None where mounting is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=False)


def fill(disk: Path, *, leave: int) -> None:
    """Fills a file system up to some bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with contextlib.suppress(OSError), open(disk / "ballast", "wb") as ballast:
        ballast.write(bytes(max(0, free - leave)))


def main() -> int:
    """Runs the faults that were asked for; status 1 if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="objects")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--times", type=int, default=5, help="repetitions of the other faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["kill", "two", "truncated", "full", "unwritable", "candidates"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="right", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        print("RIGHT" if WORKLOADS[arguments.workload](arguments.run, arguments.kinds) else "WRONG")
        return 0
    status = 0
    with tempfile.TemporaryDirectory(prefix="jcuts-faults-") as folder:
        bench = Bench(arguments.workload, arguments.seed, Path(folder))
        faults = {
            "kill": lambda: bench.kill(arguments.kills),
            "two": lambda: bench.two(arguments.times),
            "truncated": lambda: bench.truncated(arguments.times),
            "full": lambda: bench.full(arguments.times),
            "unwritable": lambda: bench.unwritable(arguments.times),
            "candidates": bench.candidates,
        }
        print(f"workload {arguments.workload}, seed {arguments.seed}")
        for name, fault in faults.items():
            if arguments.only in (None, name):
                start = time.monotonic()
                figures = fault()
                figures.seconds = time.monotonic() - start
                print(figures, flush=True)
                status |= figures.right != figures.runs or bool(figures.notes.get("workers left behind"))
    return status


if __name__ == "__main__":
    raise SystemExit(main())

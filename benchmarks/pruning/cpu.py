"""Is pruning by the estimate safe?  Candidates drawn without the model, all compiled, all timed.

    python benchmarks/pruning/cpu.py [--candidates 520] [--jobs 16] [--json out.json] [OPERATION ...]

First everything is compiled in parallel processes into a cache of object code that a second run finds.  Then every
operation is timed in a process of its own on a pinned core (`--timers` of them at once): each kernel once, those not
hopelessly slow again, and those near the best in rounds of shuffled order, so that a slow moment of the machine hits
all alike.  A time is the least of all runs; a kernel's noise is how far the leasts of even and of odd rounds lie apart.
The JSON is written after every operation; `--resume` keeps what it holds.

Reported per operation: the model's first choice among everything measured, the best of those that the product would
have measured (its own limits, `JCUTS_MAX_CANDIDATES` and `JCUTS_TOP_PERCENT`), how score and time correlate, and in how
many kernels a measured time was below its bound (never, or the model is wrong).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HOPELESS = 4.0  # times the least time: one run is enough, unless it was so short that an interruption decides
SHORT = 2e-3  # seconds
NEAR = 1.3  # times the least time: measured in rounds
SLICE = 4e-4  # seconds of runs per kernel and round
ROUNDS = 6


def compile_one(text: str) -> str:
    """Compiles a program into the object cache, unless it is there; '' or why not (runs in a worker)."""
    from jcuts.base.errors import JcutsError
    from jcuts.codegen.cpu.compile import compile_program, kernel_digest
    from jcuts.codegen.cpu.target import host_target
    from jcuts.kernel_ir.program import Program
    from jcuts.xla import object_cache

    program = Program.from_json(text)
    try:
        if object_cache.fetch(kernel_digest(program, host_target())) is None:
            object_cache.store(compile_program(program, host_target()))
    except JcutsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(texts: list[str], jobs: int) -> dict[str, str]:
    """Why programs did not compile, by their text."""
    failed: dict[str, str] = {}
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as workers:
        chunk = max(1, min(16, len(texts) // (8 * jobs) + 1))
        for number, (text, why) in enumerate(zip(texts, workers.map(compile_one, texts, chunksize=chunk), strict=True)):
            if why:
                failed[text] = why
            if number % 500 == 499:
                print(f"  compiled {number + 1} of {len(texts)}, {time.perf_counter() - start:.0f} s", flush=True)
    return failed


@dataclass
class Timed:
    """A linked kernel and the least times of its rounds [s]."""

    address: int
    tiles: int
    scratch: int
    screened: float = 0.0
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The least time that was ever seen."""
        return min([self.screened, *self.rounds])

    @property
    def noise(self) -> float:
        """How far the leasts of even and of odd rounds lie apart, relative."""
        even, odd = min(self.rounds[::2]), min(self.rounds[1::2])
        return abs(even - odd) / min(even, odd)


def aligned(array: Any) -> Any:
    """A copy that starts at a cache line, as XLA's buffers do: elsewhere every wide load would straddle two."""
    import numpy as np

    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Bench:
    """The operands of one operation, and one thread that runs kernels on them."""

    def __init__(self, operands: list[Any], outputs: list[tuple[tuple[int, ...], str]], scratch: int) -> None:
        import numpy as np

        from jcuts.xla import native_library

        self.run = native_library.load().jcuts_bench
        self.results = [aligned(np.zeros(shape, dtype)) for shape, dtype in outputs]
        self.buffers = [aligned(a) for a in operands] + self.results
        self.pointers = (ctypes.c_void_p * len(self.buffers))(*[b.ctypes.data for b in self.buffers])
        self.room = np.zeros(scratch + 192, np.uint8)
        self.scratch = (self.room.ctypes.data + 63) // 64 * 64

    def least(self, kernel: Timed, runs: int) -> float:
        """Least time of some runs [s]."""
        out = (ctypes.c_double * runs)()
        self.run(kernel.address, self.pointers, kernel.tiles, self.scratch, kernel.scratch, 1, runs, out)
        return min(out)

    def computes(self, kernel: Timed, expected: list[Any]) -> bool:
        """Whether one run from poisoned results gives what is expected (schedules change the order of sums only)."""
        import numpy as np

        for result in self.results:
            result.fill(np.nan)
        kernel.screened = self.least(kernel, 1)
        return all(
            np.allclose(r, e, rtol=1e-3, atol=1e-3 * float(np.abs(e).max()))
            for r, e in zip(self.results, expected, strict=True)
        )


def time_all(kernels: list[Timed], kept: list[bool], bench: Bench, expected: list[Any], seed: str) -> list[bool]:
    """Times every kernel; returns which computed the right result (the others have no rounds)."""
    right = [bench.computes(kernel, expected) for kernel in kernels]
    fine = [kernel for kernel, good in zip(kernels, right, strict=True) if good]
    best = min(kernel.screened for kernel in fine)
    for kernel in fine:  # whoever was interrupted gets another chance
        if kernel.screened < HOPELESS * best or kernel.screened < SHORT:
            kernel.screened = min(kernel.screened, bench.least(kernel, 2))
    best = min(kernel.screened for kernel in fine)
    chosen = [kernel for kernel, wanted in zip(kernels, kept, strict=True) if wanted]
    near = [k for k in fine if k.screened <= NEAR * best or (any(k is c for c in chosen) and k.screened < 9 * best)]
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        rng.shuffle(near)
        for kernel in near:
            bench.least(kernel, 1)  # its own code and the operands come back into the caches
            kernel.rounds.append(bench.least(kernel, max(2, min(40, int(SLICE / kernel.screened)))))
    return right


def spearman(x: list[float], y: list[float]) -> float:
    """Rank correlation of Spearman; ties share their mean rank."""
    import numpy as np

    def ranks(values: list[float]) -> Any:
        _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        last = np.cumsum(count)
        return (last - (count - 1) / 2)[place]

    if len(x) < 2:
        return float("nan")
    a, b = ranks(x), ranks(y)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else float("nan")


def kendall(x: list[float], y: list[float]) -> float:
    """Rank correlation tau-b of Kendall."""
    import numpy as np

    a, b = np.asarray(x), np.asarray(y)
    upper = np.triu_indices(len(a), 1)
    p, q = np.sign(a[:, None] - a[None, :])[upper], np.sign(b[:, None] - b[None, :])[upper]
    ties = np.sqrt(float((p != 0).sum()) * float((q != 0).sum()))
    return float((p * q).sum() / ties) if ties else float("nan")


def study(job: tuple[str, int, int, frozenset[str]]) -> dict[str, Any]:
    """Everything measured for one operation: (name, candidates, seed, digests of programs that did not compile)."""
    import numpy as np

    from jcuts.arch.detect import describe_cpu
    from jcuts.schedule.bound import roofline_bound
    from jcuts.xla import jit_linker
    from jcuts.xla.kernel_cache import kernel_for

    name, count, seed, failed = job
    everything, operands, reference = pool_of(name, count, seed)
    pool = [c for c in everything if c.program.digest not in failed]
    core = describe_cpu(cores=1)
    compiled = [kernel_for(c.program) for c in pool]
    kernels = [Timed(jit_linker.link(k.object_code, k.symbol), k.tiles, k.scratch_bytes) for k in compiled]
    bench = Bench(operands, list(compiled[0].outputs), max(k.scratch_bytes for k in compiled))
    expected = [np.asarray(x) for x in _tuple(reference(*operands))]
    right = time_all(kernels, [c.kept >= 0 for c in pool], bench, expected, name)
    rows = [
        (c, k, roofline_bound(c.program, core).seconds) for c, k, fine in zip(pool, kernels, right, strict=True) if fine
    ]
    rows.sort(key=lambda row: row[1].seconds)
    best = rows[0][1].seconds
    kept = [(place, row) for place, row in enumerate(rows) if row[0].kept >= 0]
    first_place, first = next((place, row) for place, row in kept if row[0].kept == 0)
    kept_place, kept_best = kept[0]
    pair = next((row for place, row in kept if row[0].kept < 2))
    scored = [row for row in rows if row[0].score > 0]
    times, scores = [r[1].seconds for r in scored], [-r[0].score for r in scored]
    noise = [k.noise for _, k, _ in rows if k.rounds]
    sources = [c.source for c, _, _ in rows]
    return {
        "operation": name,
        "measured": len(rows),
        "drawn": sources.count("drawn"),
        "enumerated": sources.count("enumerated"),
        "failed": len(everything) - len(pool),
        "wrong": right.count(False),
        "kept": len(kept),
        "best_us": best * 1e6,
        "best_source": rows[0][0].source,
        "median_us": statistics.median(r[1].seconds for r in rows) * 1e6,
        "worst_us": rows[-1][1].seconds * 1e6,
        "first_rank": first_place + 1,
        "first_loss": first[1].seconds / best - 1,
        "kept_rank": kept_place + 1,
        "kept_loss": kept_best[1].seconds / best - 1,
        "pair_loss": pair[1].seconds / best - 1,
        "spearman": spearman(scores, times),
        "kendall": kendall(scores, times),
        "noise_median": statistics.median(noise),
        "noise_p95": float(np.quantile(noise, 0.95)),
        "bound_violations": sum(k.seconds < b for _, k, b in rows),
        "bound_over_best": max(b for *_, b in rows) / best,
        "candidates": [_row(*row) for row in rows],
    }


def judged_again(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """The figures of one operation with the model as it is now, from the times that were measured.

    Candidates that the model keeps now and that were not timed are counted as ``untimed``.
    """
    count = row["measured"] + row["failed"] + row["wrong"]
    pool = {c.program.digest[:8]: c for c in pool_of(row["operation"], count, seed)[0]}
    kept = {c.kept: digest for digest, c in pool.items() if c.kept >= 0}
    timed = {c[0]: c for c in row["candidates"]}
    order = [c[0] for c in row["candidates"]]
    found = [kept[k] for k in sorted(kept) if kept[k] in timed]
    if not found:
        return row
    best = row["best_us"]
    places = {digest: order.index(digest) for digest in found}
    scored = [(pool[d].score, timed[d][5]) for d in order if d in pool]
    rows = [
        [d, c[1], pool[d].kept if d in pool else -1, float(f"{pool[d].score:.4g}") if d in pool else None, *c[4:]]
        for d, c in timed.items()
    ]
    return {
        **row,
        "kept": len(found),
        "untimed": len(kept) - len(found),
        "candidates": rows,
        "first_rank": places[found[0]] + 1,
        "first_loss": timed[found[0]][5] / best - 1,
        "kept_rank": min(places.values()) + 1,
        "kept_loss": max(0.0, min(timed[d][5] for d in found) / best - 1),
        "pair_loss": max(0.0, min(timed[d][5] for d in found[:2]) / best - 1),
        "spearman": spearman([-s for s, _ in scored], [t for _, t in scored]),
        "kendall": kendall([-s for s, _ in scored], [t for _, t in scored]),
    }


def pool_of(name: str, count: int, seed: int) -> tuple[list[Any], list[Any], Any]:
    """The candidates of an operation, its operands and its function: the same in every process."""
    from benchmarks.pruning import cpu_space as space

    plain, operands, reference = space.unscheduled(space.OPERATIONS[name])
    return space.candidates(plain, space.machine(), count, f"{seed}:{name}"), operands, reference


def pin(cores: Any) -> None:
    """A worker takes the next core for itself."""
    os.sched_setaffinity(0, {cores.get()})


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _row(candidate: Any, kernel: Timed, bound: float) -> list[Any]:
    """digest, d(rawn) or e(numerated), place among the kept, score, bound, least time and median of rounds [us]."""
    median = statistics.median(kernel.rounds) * 1e6 if kernel.rounds else None
    numbers = (candidate.score, bound * 1e6, kernel.seconds * 1e6, median)
    return [
        candidate.program.digest[:8],
        candidate.source[0],
        candidate.kept,
        *(None if n is None else float(f"{n:.4g}") for n in numbers),
    ]


COLUMNS = ["digest", "source", "kept", "score", "bound_us", "least_us", "median_us"]
HEAD = (
    "| operation | measured (drawn) | best us | worst | first: rank | loss | kept | loss of best kept | of first 2 | "
    "Spearman | Kendall | noise | bound broken |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {row['operation']} | {row['measured']} ({row['drawn']}) | {row['best_us']:.1f} | {row['worst_us']:.0f} | "
        f"{row['first_rank']} | {row['first_loss']:.1%} | {row['kept']} | {row['kept_loss']:.1%} | "
        f"{row['pair_loss']:.1%} | {row['spearman']:.2f} | {row['kendall']:.2f} | "
        f"{row['noise_median']:.1%} | {row['bound_violations']} |"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*")
    parser.add_argument("--candidates", type=int, default=520, help="least pool of an operation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache, time nothing")
    parser.add_argument("--timers", type=int, default=1, help="operations that are timed at once, a core each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "jcuts_pruning")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="with --resume: judge its times by the model of today")
    parser.add_argument("--resume", action="store_true", help="keep the operations that the JSON holds")
    options = parser.parse_args()
    os.environ["JCUTS_CACHE_DIR"] = str(options.cache)
    os.environ.setdefault("JCUTS_CACHE_MAX_MB", "8192")

    from benchmarks.pruning import cpu_space as space
    from jcuts.base.fingerprint import versions
    from jcuts.kernel_ir.program import Program
    from jcuts.schedule.cpu.bound import host_arch

    head = {"date": time.strftime("%Y-%m-%d"), "cpu": host_arch().name, "versions": versions(), "seed": options.seed}
    rows: list[dict[str, Any]] = []
    if options.resume and options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
        if options.again:
            rows = [judged_again(row, options.seed) for row in rows]
            options.json.write_text(json.dumps(document(head, rows), separators=(",", ":")) + "\n")
    done = {row["operation"] for row in rows}
    wanted = [] if options.again else options.operations or list(space.OPERATIONS)
    names = [n for n in wanted if n not in done]
    if not names:
        print(f"{HEAD}\n" + "\n".join(map(line, rows)) + f"\n{json.dumps(summary(rows))}")
        return 0
    begin = time.perf_counter()
    texts = [c.program.to_text() for n in names for c in pool_of(n, options.candidates, options.seed)[0]]
    print(f"{len(texts)} candidates of {len(names)} operations on {head['cpu']}, {options.jobs} compilers", flush=True)
    why = compile_all(texts, options.jobs)
    failed = frozenset(Program.from_json(text).digest for text in why)
    print(f"compiled in {time.perf_counter() - begin:.0f} s; {len(failed)} failed", flush=True)
    if options.compile_only:
        return 0
    print(HEAD, flush=True)

    spawn = multiprocessing.get_context("spawn")
    cores = spawn.Queue()
    for core in sorted(os.sched_getaffinity(0), reverse=True)[: options.timers]:
        cores.put(core)
    with concurrent.futures.ProcessPoolExecutor(options.timers, spawn, initializer=pin, initargs=(cores,)) as workers:
        jobs = [workers.submit(study, (name, options.candidates, options.seed, failed)) for name in names]
        for job in concurrent.futures.as_completed(jobs):
            rows.append(job.result())
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                rows.sort(key=lambda row: list(space.OPERATIONS).index(row["operation"]))
                options.json.write_text(json.dumps(document(head, rows), separators=(",", ":")) + "\n")
    print(f"\n{HEAD}\n" + "\n".join(map(line, rows)))
    print(json.dumps(summary(rows)))
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return 0


def document(head: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON holds."""
    return {**head, "summary": summary(rows), "columns": COLUMNS, "rows": rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all operations."""
    losses = [row["kept_loss"] for row in rows]
    return {
        "operations": len(rows),
        **{key: sum(row[key] for row in rows) for key in ("measured", "drawn", "failed", "wrong", "bound_violations")},
        "kept_loss_median": statistics.median(losses),
        "kept_loss_worst": max(losses),
        "first_loss_median": statistics.median(row["first_loss"] for row in rows),
        "first_rank_share_median": statistics.median(row["first_rank"] / row["measured"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())

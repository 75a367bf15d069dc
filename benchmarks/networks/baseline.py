"""Baselines of plain XLA: `jax.jit` and the best combination of compiler options, one row per process.

    python benchmarks/networks/baseline.py --out DIR [ROW ...]       rows as NAME:BATCH:FORM:DTYPE; all by default

Every row is measured by a child process and written as one JSON file, so that an interrupted run loses at most one
row and the next run goes on after the last.  Nothing of this repository's package is imported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.compiler_flags import DRY_SETS, FLAG_SETS  # noqa: E402

KEEP = 0.99
"""A flag set stays in the combination where it takes at most this share of the time without it."""
TURNS = 9
PLAIN = "plain"
BEST = "best"


# -- rows -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """What is measured: workload, batch, calling form, type of numbers, batch-norm statistics."""

    name: str
    batch: int
    form: str
    dtype: str
    statistics: str = "trained"

    @classmethod
    def parse(cls, text: str, statistics: str) -> Row:
        """A row from ``NAME:BATCH:FORM[:DTYPE]``."""
        name, batch, form, *dtype = text.split(":")
        return cls(name, int(batch), form, dtype[0] if dtype else "float32", statistics)

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}:{self.form}:{self.dtype}"

    @property
    def file(self) -> str:
        """Name of the row's file."""
        return f"{self}".replace(":", "_") + ("" if self.statistics == "trained" else f"_{self.statistics}") + ".json"


def all_rows(statistics: str) -> list[Row]:
    """Every workload at every batch, form and type; with fresh statistics only those that have any."""
    from benchmarks.networks.workloads import WORKLOADS

    return [
        Row(spec.name, batch, form, dtype, statistics)
        for spec in WORKLOADS.values()
        if statistics == "trained" or spec.has_statistics
        for batch in spec.batches
        for form in spec.forms
        for dtype in spec.dtypes
    ]


# -- one compiled program -------------------------------------------------------------------------------------------
@dataclass
class Compiled:
    """A program compiled under some options, with the arguments of its next call and the times so far [s]."""

    call: Callable[..., Any]
    form: Any
    arguments: tuple[Any, ...]
    first_call: dict[str, float]
    memory: dict[str, int]
    stream: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def step(self) -> Any:
        """One call; carried (donated) arguments of the next one are its results."""
        result = self.call(*self.arguments)
        self.arguments = self.form.following(self.arguments, result)
        return result

    def time_stream(self, count: int) -> None:
        """Times calls back to back: a stream of calls, then one wait."""
        import jax

        start = time.perf_counter()
        for _ in range(count):
            result = self.step()
        jax.block_until_ready(result)
        self.stream.append((time.perf_counter() - start) / count)

    def time_waited(self, count: int) -> None:
        """Times calls of which each is waited for."""
        import jax

        for _ in range(count):
            start = time.perf_counter()
            jax.block_until_ready(self.step())
            self.waited.append(time.perf_counter() - start)


def compiled(form: Any, options: dict[str, object]) -> Compiled:
    """Compiles and calls once. Carried arguments are copied before, so that the workload's own stay alive."""
    import jax
    import jax.numpy as jnp

    end = form.first + form.carried
    carried = jax.tree.map(jnp.copy, form.arguments[form.first : end])
    arguments = (*form.arguments[: form.first], *carried, *form.arguments[end:])
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    lowered = jax.jit(form.function, donate_argnums=form.donated).lower(*arguments)
    traced = time.perf_counter()
    executable = lowered.compile(compiler_options=options or None)
    ready = time.perf_counter()
    made = Compiled(executable, form, arguments, {}, memory_of(executable))
    jax.block_until_ready(made.step())
    end_time = time.perf_counter()
    made.first_call = {"trace": traced - start, "compile": ready - traced, "total": end_time - start}
    return made


def memory_of(executable: Any) -> dict[str, int]:
    """Bytes by `memory_analysis`; ``peak`` counts a donated argument and the result in its place once."""
    analysis = executable.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    found = {n: int(getattr(analysis, f"{n}_size_in_bytes", 0)) for n in names}
    reported = int(getattr(analysis, "peak_memory_in_bytes", 0) or 0)
    total = found["argument"] + found["output"] + found["temp"] - found["alias"]
    return found | {"peak_reported": reported, "peak": total}


# -- timing ---------------------------------------------------------------------------------------------------------
def quantile(values: Sequence[float], share: float) -> float:
    """A quantile, linear between the two nearest values."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def interleaved(programs: dict[str, Compiled], seconds: float, turns: int = TURNS) -> dict[str, dict[str, Any]]:
    """Times programs in turns that change their order; medians with quartiles [s].

    Args: seconds: budget of a program; half of it for streams, half for calls that are waited for.
    """
    for p in programs.values():
        p.stream, p.waited = [], []
        p.time_waited(3)
        p.stream, p.waited = [], [min(p.waited)]
    counts = {n: max(2, min(200, int(seconds / 2 / turns / p.waited[0]))) for n, p in programs.items()}
    for p in programs.values():
        p.waited = []
    order = list(programs)
    for turn in range(turns):
        for name in order if turn % 2 == 0 else reversed(order):
            programs[name].time_stream(counts[name])
            programs[name].time_waited(counts[name])
    return {n: summary(p) for n, p in programs.items()}


def summary(p: Compiled) -> dict[str, Any]:
    """Back to back: median and quartiles over turns. Waited: p50, p90, p99 over calls."""
    stream = {"median": 0.5, "q1": 0.25, "q3": 0.75}
    waited = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "back_to_back": {n: quantile(p.stream, q) for n, q in stream.items()} | {"turns": len(p.stream)},
        "waited": {n: quantile(p.waited, q) for n, q in waited.items()} | {"calls": len(p.waited)},
    }


def ratio(times: dict[str, dict[str, Any]], name: str, base: str) -> float:
    """Time of one program over another's, back to back."""
    return times[name]["back_to_back"]["median"] / times[base]["back_to_back"]["median"]


# -- best flags -----------------------------------------------------------------------------------------------------
def tried(form: Any, options: dict[str, object], base: Compiled, seconds: float) -> tuple[dict[str, Any], bool]:
    """(what a set of options gives in turns with a base, or its refusal; whether it helps)."""
    try:
        program = compiled(form, options)
    except Exception as error:  # whatever the compiler or the device says is the result
        text = f"{type(error).__name__}: {error}"[:500]
        refused = any(word in text for word in ("No such compile option", "INVALID_ARGUMENT", "incompatible function"))
        return {"options": options, "refused" if refused else "failed": text}, False
    times = interleaved({PLAIN: base, "with": program}, seconds, turns=5)
    share = ratio(times, "with", PLAIN)
    record = {
        "options": options,
        "over_base": share,
        "seconds": times["with"]["back_to_back"]["median"],
        "base_seconds": times[PLAIN]["back_to_back"]["median"],
        "first_call_seconds": program.first_call["total"],
    }
    return record, share <= KEEP


def search(
    form: Any, plain: Compiled, sets: dict[str, dict[str, object]], seconds: float, deadline: float
) -> dict[str, Any]:
    """Greedy search: every set alone against plain, then the helpful ones are added, the best first."""
    alone: dict[str, Any] = {}
    helpful = []
    for name, options in sets.items():
        if time.monotonic() > deadline:
            alone[name] = {"options": options, "skipped": "no time left"}
            continue
        alone[name], good = tried(form, options, plain, seconds)
        if good:
            helpful.append(name)
    helpful.sort(key=lambda n: alone[n]["over_base"])
    chosen, options, steps, base = [], {}, [], plain
    for name in helpful:
        if any(options.get(k, v) != v for k, v in sets[name].items()):
            continue  # another value of an option that is already chosen
        together = {**options, **sets[name]}
        if not chosen:
            good = True
        elif time.monotonic() > deadline:
            break
        else:
            record, good = tried(form, together, base, seconds)
            steps.append({"added": name, **record, "kept": good})
        if good:
            chosen, options = [*chosen, name], together
            base = compiled(form, options)
    return {"alone": alone, "steps": steps, "chosen": chosen, "options": options}


# -- one row --------------------------------------------------------------------------------------------------------
def measure(row: Row, *, dry: bool, seconds: float, budget: float) -> dict[str, Any]:
    """Measures one row in this process."""
    deadline = time.monotonic() + 0.6 * budget
    import jax
    import jaxlib

    from benchmarks.networks.workloads import WORKLOADS

    spec = WORKLOADS[row.name]
    program = spec.build(row.batch, dtype=row.dtype, tiny=dry, fresh=row.statistics == "fresh")
    form = program.form(closed=row.form == "closed")
    plain = compiled(form, {})
    device = jax.devices()[0]
    sets = DRY_SETS if device.platform == "cpu" else FLAG_SETS
    found = search(form, plain, sets, seconds / 4, deadline)
    programs = {PLAIN: plain}
    if found["options"]:
        programs[BEST] = compiled(form, found["options"])
    times = interleaved(programs, seconds, 3 if dry else TURNS)
    result = {
        "row": str(row),
        "workload": row.name,
        "group": spec.group,
        "kind": spec.kind,
        "batch": row.batch,
        "form": row.form,
        "dtype": row.dtype,
        "statistics": row.statistics,
        "dry": dry,
        "flags": found,
        "programs": {
            n: times[n] | {"first_call_seconds": p.first_call, "memory_bytes": p.memory} for n, p in programs.items()
        },
        "device": {"kind": device.device_kind, "platform": device.platform, "stats": device_memory(device)},
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()},
        "environment": {k: os.environ[k] for k in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE") if k in os.environ},
        "host": {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    assert "jcuts" not in sys.modules
    return result


def device_memory(device: Any) -> dict[str, int]:
    """What the device's allocator counted."""
    stats = device.memory_stats() or {}
    return {k: int(stats[k]) for k in ("peak_bytes_in_use", "bytes_limit") if k in stats}


def write(path: Path, data: dict[str, Any]) -> None:
    """Writes a file at once, so that a killed process leaves none that is half written."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


# -- driver ---------------------------------------------------------------------------------------------------------
def drive(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """One child process per row that has no file yet; gives the number of rows that failed."""
    failed = 0
    options.out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        target = options.out / row.file
        if target.exists():
            print(f"{row}: already measured", flush=True)
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--child", "--out", str(options.out), str(row)]
        command += ["--seconds", str(options.seconds), "--budget", str(options.budget)]
        command += ["--statistics", row.statistics, *(["--dry"] if options.dry else [])]
        log = target.with_suffix(".log")
        start = time.monotonic()
        with log.open("w", encoding="utf-8") as stream:
            try:
                code = subprocess.run(
                    command, stdout=stream, stderr=stream, timeout=options.budget, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        good = code == 0 and target.exists()
        failed += not good
        print(
            f"{row}: {'measured' if good else f'failed ({code}), see {log}'}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="NAME:BATCH:FORM[:DTYPE]; without any, all")
    parser.add_argument("--out", type=Path, help="folder of the rows, one JSON file each")
    parser.add_argument("--statistics", choices=("trained", "fresh"), default="trained", help="of batch norms")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing per program")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds per row, then its process is ended")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU: finds typos, not times")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--child", action="store_true", help="measure the one row in this process")
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    rows = [Row.parse(r, options.statistics) for r in options.rows] or all_rows(options.statistics)
    if options.list:
        print("\n".join(map(str, rows)))
        return 0
    if options.out is None:
        parser.error("--out DIR is needed")
    if options.child:
        data = measure(rows[0], dry=options.dry, seconds=options.seconds, budget=options.budget)
        write(options.out / rows[0].file, data)
        return 0
    return min(1, drive(rows, options))


if __name__ == "__main__":
    sys.exit(main())

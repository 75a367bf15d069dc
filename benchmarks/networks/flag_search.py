"""Greedy search for a workload's best XLA compiler options: every set alone, then the helpful ones together.

The result is kept in ``flags_<workload>.json`` after every set, so that a search can be interrupted and goes on there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.networks import compiler_flags, interleaved_timing
from benchmarks.networks.compiled_program import Compiled, compiled
from benchmarks.networks.row_driver import read, write
from benchmarks.networks.workload_row import Row, headline

KEEP = 0.99
"""A flag set stays in the combination where it takes at most this share of the time without it."""
KEEP_ACROSS = 0.97
"""The same where both times are of different processes."""
DIFFERENCE = 0.3
"""Largest relative difference of results from plain XLA's (random weights, low precision, greedy decoding)."""
SLOW_COMPILE = 75
"""Exit status of a process that ended itself because a flag set took too long to compile."""
REFUSALS = ("No such compile option", "INVALID_ARGUMENT", "incompatible function")


@dataclass(frozen=True)
class Limits:
    """Limits of a search. Args: trial: seconds of timing per program; total: no set is begun after so many seconds;
    compile: a set that compiles longer is recorded as such, and its process ended."""

    trial: float = 0.4
    total: float = 15.0
    compile: float = 45.0


def path_of(out: Path, row: Row) -> Path:
    """The file of a workload's flags."""
    return out / f"flags_{row.name}.json"


def searches(row: Row) -> list[tuple[Row, tuple[str, ...]]]:
    """What is searched for a workload: rows (float32, weights closed over where it can) and groups of flag sets.

    Launching is searched at the smallest batch, kernels at the headline batch.
    """
    from benchmarks.networks.workloads import WORKLOADS

    spec = WORKLOADS[row.name]
    small, usual = (
        Row(spec.name, b, spec.forms[-1], spec.dtypes[0]) for b in (min(spec.batches), headline(spec.batches))
    )
    if small == usual:
        return [(usual, ("launch", "kernels"))]
    return [(small, ("launch",)), (usual, ("kernels",))]


def chosen(flags: dict[str, Any]) -> dict[str, Any]:
    """All that the searches of a workload chose, together, and what every set gave alone."""
    sets: dict[str, compiler_flags.Options] = {}
    alone: dict[str, Any] = {}
    own = False
    for record in flags.get("searches", {}).values():
        alone |= record["alone"]
        sets |= {name: record["alone"][name]["options"] for name in record.get("chosen", ())}
    across = {n: r["over_base"] for n, r in alone.items() if r.get("process") == "own" and "over_base" in r}
    if across and across[best := min(across, key=across.__getitem__)] <= KEEP_ACROSS:
        sets[best] = alone[best]["options"]
        own = True
    names, options = compiler_flags.together(sets)
    gave = {name: r.get("over_base") or reason(r) for name, r in alone.items()}
    return {"chosen": names, "options": options, "own_process": own, "over_plain": gave}


def reason(record: dict[str, Any]) -> str:
    """Why a set has no time."""
    if "compile_over_seconds" in record:
        return f"compiled for more than {record['compile_over_seconds']:g} s"
    return next((f"{w}: {record[w]}" for w in ("refused", "failed", "wrong", "skipped") if w in record), "")


def finished(flags: dict[str, Any], row: Row, *, more: bool = False) -> bool:
    """Whether a row has been searched. Args: more: sets that time did not suffice for count as open."""
    record = flags.get("searches", {}).get(str(row), {})
    return record.get("finished", False) and not (more and any("skipped" in r for r in record["alone"].values()))


def tried_at(flags: dict[str, Any], row: Row) -> list[str]:
    """Names of the sets that have been tried at a row."""
    alone = flags.get("searches", {}).get(str(row), {}).get("alone", {})
    return [name for name, record in alone.items() if "skipped" not in record]


def close(path: Path, row: Row, why: dict[str, str]) -> None:
    """Ends a search that cannot be done."""
    flags = {"record": "flags", "workload": row.name, "searches": {}} | read(path)
    record = {"alone": {}} | flags["searches"].get(str(row), {})
    flags["searches"][str(row)] = record | why | {"finished": True}
    write(path, flags)


def add(path: Path, row: Row, name: str, why: dict[str, str]) -> None:
    """Records a set whose process failed."""
    flags = read(path)
    options = compiler_flags.FLAG_SETS.get(name, {})
    flags["searches"][str(row)]["alone"][name] = {"options": options, **why, "process": "own"}
    write(path, flags)


# -- in the process of the search -----------------------------------------------------------------------------------
@dataclass
class Search:
    """A search at one row. Args: path: the workload's file; cache: folder of shared autotuning."""

    row: Row
    path: Path
    limits: Limits
    cache: Path | None

    def __post_init__(self) -> None:
        self.flags = read(self.path)
        self.record = self.flags.setdefault("searches", {}).setdefault(str(self.row), {})
        self.record.setdefault("alone", {})
        self.begin = time.monotonic()

    def save(self) -> None:
        """Writes what is known."""
        write(self.path, {"record": "flags", "workload": self.row.name, **self.flags})

    def late(self) -> bool:
        """Whether no more sets are begun."""
        return time.monotonic() - self.begin > self.limits.total

    def cache_of(self, name: str) -> Path | None:
        """The folder of shared autotuning, where a set may use it."""
        return None if name in compiler_flags.UNSHARED else self.cache

    @contextlib.contextmanager
    def watched(self, name: str, options: compiler_flags.Options) -> Iterator[None]:
        """Ends this process where a set compiles too long (a compilation cannot be stopped), and records it."""

        def over() -> None:
            self.record["alone"][name] = {"options": options, "compile_over_seconds": self.limits.compile}
            self.save()
            os._exit(SLOW_COMPILE)

        timer = threading.Timer(self.limits.compile, over)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def tried(
        self, form: Any, name: str, options: compiler_flags.Options, base: Compiled
    ) -> tuple[dict[str, Any], Compiled | None]:
        """(what a set of options gives in turns with a base, or its refusal; its program where it helps)."""
        try:
            with self.watched(name, options):
                program = compiled(form, options, self.cache_of(name))
            off = program.difference(base)
            if off > DIFFERENCE:
                return {"options": options, "wrong": f"results differ by {off:.2g}"}, None
            times = timed({"base": base.step, "with": program.step}, self.limits.trial)
        except Exception as error:  # whatever the compiler or the device says is the result
            return {"options": options, **refusal(error)}, None
        share = interleaved_timing.ratio(times, "with", "base")
        record = {
            "options": options,
            "over_base": round(share, 4),
            "seconds": times["with"]["back_to_back"]["median"],
            "base_seconds": times["base"]["back_to_back"]["median"],
            "compile_seconds": round(program.first_call["compile"], 2),
            "difference": off,
        }
        return record, program if share <= KEEP else None

    def run(self, form: Any, plain: Compiled, sets: dict[str, compiler_flags.Options]) -> Compiled | None:
        """Searches what is not known yet; the program of the combination, or None where nothing helps."""
        alone, best = self.record["alone"], ("", None)
        for name, options in sets.items():
            if name in alone and "skipped" not in alone[name]:
                continue
            if self.late():
                alone[name] = {"options": options, "skipped": "no time left"}
                continue
            alone[name], program = self.tried(form, name, options, plain)
            if program and (not best[0] or alone[name]["over_base"] < alone[best[0]]["over_base"]):
                best = (name, program)  # only one is kept: programs hold memory
            self.save()
        self.record["plain_seconds"] = timed({"plain": plain.step}, self.limits.trial)["plain"]["back_to_back"][
            "median"
        ]
        program = self.combine(form, plain, sets, best)
        self.record["finished"] = True
        self.save()
        return program

    def combine(
        self, form: Any, plain: Compiled, sets: dict[str, compiler_flags.Options], best: tuple[str, Compiled | None]
    ) -> Compiled | None:
        """Adds the helpful sets, the best first, as long as each helps beside those before."""
        alone = self.record["alone"]
        helpful = [n for n in sets if alone[n].get("over_base", 1.0) <= KEEP]
        helpful.sort(key=lambda n: alone[n]["over_base"])
        names, options, steps, program = [], {}, [], None
        for name in helpful:
            if any(options.get(k, v) != v for k, v in sets[name].items()):
                continue  # another value of an option that is already chosen
            if not names:
                found = best[1] if best[0] == name else compiled(form, sets[name], self.cache_of(name))
            elif self.late():
                break
            else:
                record, found = self.tried(form, f"with {name}", {**options, **sets[name]}, program or plain)
                steps.append({"added": name, **record, "kept": found is not None})
            if found is not None:
                names, options, program = [*names, name], {**options, **sets[name]}, found
        self.record |= {"steps": steps, "chosen": names, "options": options}
        return program

    def try_in_own_process(self, form: Any, name: str, options: compiler_flags.Options) -> None:
        """Tries a set that changes autotuning, before anything else is compiled; against plain XLA's time of before."""
        try:
            with self.watched(name, options):
                program = compiled(form, options)
            spent = timed({"with": program.step}, self.limits.trial)["with"]["back_to_back"]["median"]
            share = round(spent / self.record["plain_seconds"], 4)
            found = {"over_base": share, "seconds": spent, "compile_seconds": round(program.first_call["compile"], 2)}
        except Exception as error:
            found = refusal(error)
        self.record["alone"][name] = {"options": options, **found, "process": "own"}
        self.save()


def timed(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, dict[str, Any]]:
    """A trial: enough to tell 1 %."""
    return interleaved_timing.interleaved(calls, seconds, turns=5)


def refusal(error: Exception) -> dict[str, str]:
    """What the compiler or the device says: an option that does not exist, or a failure."""
    text = f"{type(error).__name__}: {error}"[:500]
    return {"refused" if any(word in text for word in REFUSALS) else "failed": text}

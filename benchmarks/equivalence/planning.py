"""What one entry of the corpus comes to, in a process of its own: its plans, candidates and the texts of its code."""

from __future__ import annotations

import functools
import gzip
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.equivalence import corpus, seams
from benchmarks.equivalence.normal_form import digest, normal, ranges, runs

MODES = ("fusion", "mixed", "no_fusion")
NETWORK_MODES = ("mixed", "fusion")
CODED = 2
"""Candidates of each region whose code is recorded."""
MOST_CODED = {"cpu": 3, "gpu": 6}
"""Programs of one function whose code is recorded."""
MOST_OF_NETWORK = {"cpu": 20, "gpu": 40}
"""Programs of one network whose code is recorded."""
SPREAD = {"cpu": 3, "gpu": 4}
"""Schedules from best to last of a program that all schedules are recorded of; the best of each kind come on top."""
EVERY = {"cpu": 48, "gpu": 1 << 20}
"""Most schedules of such a program."""


@functools.cache
def entries() -> dict[str, Any]:
    return corpus.entries()


class Notes:
    """What one entry comes to: functions, programs as readable lines, rankings, and programs to make code of."""

    def __init__(self, target: str, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.functions: dict[str, Any] = {}
        self.programs: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.ways: dict[str, str] = {}
        self.ranked: dict[str, list[list[Any]]] = {}
        self.first: dict[str, str] = {}

    def program(self, program: Any) -> str:
        """Notes a program; returns what it is known by."""
        key = seams.program_digest(program)
        if key not in self.programs:
            self.programs[key] = seams.described(program)
            self.kinds[key] = seams.kind_of(program)
            self.ways[key] = " ".join((seams.kind_of(program), *sorted(seams.parameters(program))))
        return key

    def coded(self, program: Any) -> str:
        """Notes a program whose code may be recorded."""
        key = self.program(program)
        path = self.folder / f"{key}.json"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(seams.program_text(program))
            part.replace(path)
        return key

    def ranking(self, program: Any, ranked: Sequence[tuple[Any, float]]) -> str:
        """Notes a program's candidates."""
        key = self.program(program)
        if key not in self.ranked:
            self.ranked[key] = [[self.program(p), f"{score:.10g}"] for p, score in ranked]
            for p, _ in ranked:
                if self.ways[self.program(p)] not in self.first:
                    self.first[self.ways[self.program(p)]] = self.coded(p)
        return key


def plan_entry(task: tuple[str, str, str]) -> dict[str, Any]:
    """Everything but code of one entry. Args: task: entry, target, folder for programs."""
    name, target, folder = task
    start = time.process_time()
    notes = Notes(target, Path(folder))
    with seams.acting_as(target):
        for part, made in entries()[name]().items():
            if seams.is_program(made) or not (isinstance(made, tuple) or hasattr(made, "jaxpr")):
                notes.functions[name + part] = _schedules(made, notes)
            else:
                notes.functions[name + part] = _function(made, notes, name.startswith("network/"))
    jax.clear_caches()
    return {
        "entry": name,
        "functions": notes.functions,
        "programs": notes.programs,
        "kinds": notes.kinds,
        "ways": notes.ways,
        "ranked": notes.ranked,
        "first": notes.first,
        "seconds": time.process_time() - start,
    }


def _schedules(program: Any, notes: Notes) -> dict[str, Any]:
    """A program with all its schedules; ``program`` is the reason where there is none."""
    if not seams.is_program(program):
        return {"refused": str(program)}
    ranked = seams.every_schedule(program, notes.target, EVERY[_unit(notes.target)])
    kinds: dict[str, int] = {}
    for k, (made, _) in enumerate(ranked):
        kinds.setdefault(notes.ways[notes.program(made)], k)
    count = SPREAD[_unit(notes.target)]
    spread = (round(k * (len(ranked) - 1) / (count - 1)) for k in range(count)) if ranked else ()
    places = dict.fromkeys([*kinds.values(), *spread])
    return {
        "program": notes.program(program),
        "schedules": [[notes.program(p), f"{score:.10g}"] for p, score in ranked],
        "code": [notes.coded(ranked[k][0]) for k in places],
    }


def _function(made: Any, notes: Notes, is_network: bool) -> dict[str, Any]:
    """A function: for each plan its regions."""
    fn, arguments, x64 = (None, (), True) if hasattr(made, "jaxpr") else made
    found: dict[str, Any] = {"plans": {}}
    coded: list[list[str]] = []
    seams.begin()
    with jax.enable_x64(x64):
        try:
            closed = made if fn is None else seams.trace(fn, arguments)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {_first(error)}"}
        every = seams.settings_of(closed, notes.target, NETWORK_MODES if is_network else MODES)
        found["identity"] = seams.identity(closed)
        for name, settings in every.items():
            try:
                planned = seams.plan(closed, settings, notes.target)
            except Exception as error:
                text = seams.refusal_of(error)
                if text is None:
                    raise
                found["plans"][name] = {"refused": normal(text)}
                continue
            found["plans"][name] = _noted(planned, notes, coded)
    turns = (keys[k] for k in range(max(map(len, coded), default=0)) for keys in coded if k < len(keys))
    most = MOST_OF_NETWORK if is_network else MOST_CODED
    found["code"] = list(dict.fromkeys(turns))[: most[_unit(notes.target)]]
    return found


def _noted(planned: dict[str, Any], notes: Notes, coded: list[list[str]]) -> dict[str, Any]:
    levels = []
    for level in planned["levels"]:
        regions = [_region(r, notes, coded) for r in level["regions"]]
        levels.append({**level, "equations": runs(level["equations"]), "regions": regions})
    return {"levels": levels, "asked": [_region(r, notes, coded) for r in planned["asked"]]}


def _region(region: dict[str, Any], notes: Notes, coded: list[list[str]]) -> list[Any]:
    """Equations, operations, share of candidates, program, chosen program, programs that write into larger arrays."""
    key = notes.ranking(region["program"], region["ranked"])
    best = [p for p, _ in region["ranked"][:CODED]]
    chosen = region["chosen"]
    first = [*best[:1], *region["placed"], *((chosen,) if chosen is not None else ()), *best[1:]]
    one = [notes.coded(p) for p in first]
    if one not in coded:
        coded.append(one)
    return [
        ranges(region["members"]),
        runs(region["operations"]),
        digest(region["identity"]),
        region["share"],
        key,
        "" if chosen is None else notes.program(chosen),
        [notes.program(p) for p in region["placed"]],
    ]


def _unit(target: str) -> str:
    return "cpu" if target == "cpu" else "gpu"


def _first(error: Exception) -> str:
    return normal((str(error).splitlines() or [""])[0])


def make_code(task: tuple[str, str, str, str]) -> tuple[str, dict[str, str], float]:
    """Digests of a program's texts. Args: task: what it is known by, target, folder of programs, folder for texts."""
    key, target, folder, kept = task
    start = time.process_time()
    program = seams.program_from((Path(folder) / f"{key}.json").read_text())
    try:
        texts = {name: normal(text) for name, text in seams.code_of(program, target).items()}
    except Exception as error:
        text = seams.refusal_of(error)
        if text is None:
            raise
        texts = {"refused": normal(text)}
    if kept:
        for name, text in texts.items():
            with gzip.open(Path(kept) / f"{key}.{name}.gz", "wt", encoding="utf-8", compresslevel=6) as file:
                file.write(text)
    found = {n: text if n == "refused" else f"{digest(text)} {text.count(chr(10))}" for n, text in texts.items()}
    return key, found, time.process_time() - start

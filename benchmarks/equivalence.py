"""Proof that a change of the code base changes nothing that jcuts does: regions, candidates and code, recorded.

    python benchmarks/equivalence.py record --out BEFORE        # before the change: CPU, sm_90, sm_80; no GPU needed
    python benchmarks/equivalence.py record --out AFTER         # after it, on the same machine
    python benchmarks/equivalence.py compare BEFORE AFTER       # every difference; exit status 1 if there is any

For every function of `equivalence_corpus` and every target the record has

    regions      which equations form each region, for each mode and each form that a first call would plan, and the
                 regions that the search tries on its way; nothing is measured: times are made up from programs
    candidates   the schedules of each region's program in order, with their scores
    code         of the first candidates, and for cases of templates of schedules from best to last: what the code
                 generators write, and what numba's compilers make of it (LLVM IR; PTX)

Programs are known by a digest of their JSON, code by a digest of its text in which names that say nothing are numbered
(`normal`).  ``OUT/cpu.json.gz`` and so on are the records; with ``--keep-text`` the texts stay in ``OUT/text_cpu`` and
so on, and `compare` shows where they part.  Records of different machines or versions of the compilers differ, and
`compare` says so.  Names of jcuts are in `equivalence_seams` alone.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "benchmarks")) if p not in sys.path]
TARGETS = ("cpu", "sm_90", "sm_80")
PACKAGES = ("jax", "jaxlib", "numba", "llvmlite", "numpy", "keras", "numba-cuda", "nvidia-nvvm")
MODES = ("fusion", "mixed", "no_fusion")
NETWORK_MODES = ("mixed", "fusion")
CODED = 2
"""Candidates of each region whose code is recorded."""
MOST_CODED, MOST_OF_NETWORK = {"cpu": 3, "gpu": 6}, {"cpu": 20, "gpu": 40}
"""Programs of one function, and of one network, whose code is recorded."""
SPREAD = {"cpu": 3, "gpu": 4}
"""Schedules from best to last of a program that all schedules are recorded of; the best of each kind come on top."""
EVERY = {"cpu": 48, "gpu": 1 << 20}
"""Most schedules of such a program."""
XLA = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
"""Devices for meshes; XLA's own code only makes weights here, and is never recorded."""
SHOWN = 400
"""Characters of a line of differences."""


# -- names that say nothing -------------------------------------------------------------------------------------------
_DROPPED = re.compile(r"^(?:; ModuleID =|source_filename =|//).*$\n?", re.MULTILINE)
_NAMES = re.compile(
    r"(?P<mangled>(?:cfunc\.)?_ZN[\w$.]+)"  # numba's: modules, functions, how many there were before
    r"|(?P<constant>\.const\.[\w$.<>]+)"
    r"|(?P<symbol>\bjcuts_\w+)"  # some are of a digest that holds hashes of sources
    r"|(?P<path>(?:/[\w.+-]+)+\.py\b)|(?P<module>\bjcuts(?:\.\w+)+)|(?P<address>\b0x[0-9a-f]{9,16}\b(?=>))"
)


def normal(text: str) -> str:
    """A text of code in which mangled names, digests, modules and paths are numbered as they occur.

    >>> normal("call @_ZN5numba3abcB2v12E(i32 1)") == normal("call @_ZN5numba3abdB3v112E(i32 1)")
    True
    """
    known: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        kind = str(found.lastgroup)
        return known.setdefault(found.group(), f"<{kind} {len(known)}>")

    return _NAMES.sub(numbered, _DROPPED.sub("", text))


def digest(text: str) -> str:
    """A short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


# -- planning, in a process of its own --------------------------------------------------------------------------------
@functools.cache
def _entries() -> dict[str, Any]:
    import equivalence_corpus

    return equivalence_corpus.entries()


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
        import equivalence_seams as seams

        key = seams.program_digest(program)
        if key not in self.programs:
            self.programs[key] = seams.described(program)
            self.kinds[key] = seams.kind_of(program)
            self.ways[key] = " ".join((seams.kind_of(program), *sorted(seams.parameters(program))))
        return key

    def coded(self, program: Any) -> str:
        """Notes a program whose code may be recorded."""
        import equivalence_seams as seams

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
    import equivalence_seams as seams
    import jax

    name, target, folder = task
    start = time.process_time()
    notes = Notes(target, Path(folder))
    with seams.acting_as(target):
        for part, made in _entries()[name]().items():
            if seams.is_program(made) or not (isinstance(made, tuple) or hasattr(made, "jaxpr")):
                notes.functions[name + part] = _schedules(made, notes)
            else:
                notes.functions[name + part] = _function(made, notes, name.startswith("network/"))
    jax.clear_caches()
    return {"entry": name, "functions": notes.functions, "programs": notes.programs, "kinds": notes.kinds,
            "ways": notes.ways, "ranked": notes.ranked, "first": notes.first,
            "seconds": time.process_time() - start}  # fmt: skip


def _schedules(program: Any, notes: Notes) -> dict[str, Any]:
    """A program with all its schedules; ``program`` is the reason where there is none."""
    import equivalence_seams as seams

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
    import equivalence_seams as seams
    import jax

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
        levels.append({**level, "equations": _runs(level["equations"]), "regions": regions})
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
        _ranges(region["members"]), _runs(region["operations"]), digest(region["identity"]), region["share"], key,
        "" if chosen is None else notes.program(chosen), [notes.program(p) for p in region["placed"]],
    ]  # fmt: skip


def _unit(target: str) -> str:
    return "cpu" if target == "cpu" else "gpu"


def _first(error: Exception) -> str:
    return normal((str(error).splitlines() or [""])[0])


def _ranges(numbers: Sequence[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5,9``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _runs(names: Sequence[str]) -> str:
    """``add add mul`` as ``add*2 mul``."""
    found: list[list[Any]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1][1] += 1
        else:
            found.append([name, 1])
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in found)


# -- code, in a process of its own ------------------------------------------------------------------------------------
def make_code(task: tuple[str, str, str, str]) -> tuple[str, dict[str, str], float]:
    """Digests of a program's texts. Args: task: what it is known by, target, folder of programs, folder for texts."""
    import equivalence_seams as seams

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


# -- record -----------------------------------------------------------------------------------------------------------
def record(options: argparse.Namespace) -> int:
    """Records every target that is asked for."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="equivalence-") as scratch:
        _environment(Path(scratch))
        import equivalence_seams as seams

        names = [n for n in _entries() if any(part in n for part in options.only.split(","))]
        for target in options.parts.split(","):
            why = seams.why_not(target)
            if why:
                raise SystemExit(f"{target}: {why}")
            _record(target, names, options, Path(scratch) / f"programs_{target}")
    return 0


def _environment(scratch: Path) -> None:
    """The same for every process, whatever the user's: no GPU, four devices for meshes, a cache of its own."""
    for name in [name for name in os.environ if name.startswith(("JCUTS_", "XLA_")) and name != "JCUTS_NATIVE"]:
        del os.environ[name]
    os.environ.update(
        JAX_PLATFORMS="cpu", XLA_FLAGS=XLA, KERAS_BACKEND="jax",
        JCUTS_CACHE_DIR=str(scratch / "cache"), TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=os.pathsep.join(sys.path[:2]),
    )  # fmt: skip


def _record(target: str, names: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    folder.mkdir()
    kept = options.out / f"text_{target}"
    if options.keep_text:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = _gathered(pool, plan_entry, [(name, target, str(folder)) for name in names], f"{target} plans")
        planned = time.perf_counter()
        slowest = sorted(made, key=lambda m: -m["seconds"])[:5]
        made.sort(key=lambda m: names.index(m["entry"]))
        found = _merged(target, made)
        keys = dict.fromkeys(key for function in found["functions"].values() for key in function.get("code", ()))
        keys |= dict.fromkeys(_others(made, {found["ways"][key] for key in keys}))
        tasks = [(key, target, str(folder), str(kept) if options.keep_text else "") for key in keys]
        codes = _gathered(pool, make_code, tasks, f"{target} code")
    found["code"] = {key: texts for key, texts, _ in sorted(codes)}
    found["counts"] = counts(found)
    path = options.out / f"{target}.json.gz"
    with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.write(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
    done = time.perf_counter()
    longest = ", ".join(f"{m['entry']} {m['seconds']:.0f} s" for m in slowest)
    print(json.dumps({"target": target, **found["counts"]}, indent=1))
    spent = sum(m["seconds"] for m in made), sum(seconds for _, _, seconds in codes)
    print(f"{target}: plans {planned - start:.0f} s ({spent[0]:.0f} s of processors), code {done - planned:.0f} s "
          f"({spent[1]:.0f}), {path.stat().st_size / 1e6:.1f} MB; "
          f"slowest plans: {longest}", flush=True)  # fmt: skip


def _others(made: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Programs of kinds of schedules that no function's code shows: of each kind those of the first two entries."""
    found: dict[str, list[str]] = {}
    for one in made:
        for way, key in one["first"].items():
            if way not in known and key not in found.get(way, ()):
                found.setdefault(way, []).append(key)
    return [key for keys in found.values() for key in keys[:2]]


def _gathered(pool: ProcessPoolExecutor, work: Any, tasks: Sequence[Any], what: str) -> list[Any]:
    """Results of all tasks, in the order in which they are done; the first error ends the process."""
    waiting = {pool.submit(work, task): task for task in tasks}
    found, told = [], time.perf_counter()
    for future in as_completed(waiting):
        try:
            found.append(future.result())
        except Exception:
            pool.shutdown(wait=False, cancel_futures=True)
            traceback.print_exc()
            raise SystemExit(f"{what}: {waiting[future][0]} failed") from None
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            print(f"{what}: {len(found)} of {len(tasks)}", flush=True)
    return found


def _merged(target: str, made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"header": header(target)}
    for table in ("functions", "programs", "kinds", "ways", "ranked"):
        found[table] = {}
        for one in made:
            for key, value in one[table].items():
                if found[table].setdefault(key, value) != value:
                    raise SystemExit(f"{target}: {table} {key} of {one['entry']} is not what it was elsewhere:\n"
                                     f"  {value}\n  {found[table][key]}")  # fmt: skip
    return found


def header(target: str) -> dict[str, Any]:
    """What records depend on, beside jcuts."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    import llvmlite.binding as llvm

    cpu = {"name": llvm.get_host_cpu_name(), "features": digest(llvm.get_host_cpu_features().flatten()),
           "cores": len(os.sched_getaffinity(0))}  # fmt: skip
    return {"format": 1, "target": target, "python": platform.python_version(), "versions": versions, "cpu": cpu}


def _regions(function: dict[str, Any]) -> Iterator[list[Any]]:
    for plan in function.get("plans", {}).values():
        yield from (region for level in plan.get("levels", ()) for region in level["regions"])


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """How much a record has."""
    functions, kinds = found["functions"], found["kinds"]
    plans = [plan for f in functions.values() for plan in f.get("plans", {}).values()]
    ranked = [c for candidates in found["ranked"].values() for c, _ in candidates]
    ranked += [c for f in functions.values() for c, _ in f.get("schedules", ())]
    made = {key: code for key, code in found["code"].items() if "refused" not in code}
    return {
        "functions": len(functions), "refused functions": sum("refused" in f for f in functions.values()),
        "functions with code": sum(any(key in made for key in f.get("code", ())) for f in functions.values()),
        "plans": len(plans), "regions": sum(1 for f in functions.values() for _ in _regions(f)),
        "regions tried": sum(len(p.get("asked", ())) for p in plans),
        "distinct regions": len({region[2] for f in functions.values() for region in _regions(f)}),
        "programs with candidates": len(found["ranked"]), "candidates": len(ranked),
        "distinct candidates": len(set(ranked)), "programs with code": len(made),
        "code texts": sum(len(code) for code in made.values()), "code refused": len(found["code"]) - len(made),
        "code by template": dict(sorted(Counter(kinds[key] for key in made).items())),
        "kinds of schedules with code": len({found["ways"][key] for key in made}),
        "kinds of schedules": len({found["ways"][key] for key in set(ranked)}),
        "candidates by template": dict(sorted(Counter(kinds[key] for key in set(ranked)).items())),
    }  # fmt: skip


# -- compare ----------------------------------------------------------------------------------------------------------
def load(path: Path) -> dict[str, Any]:
    """A record."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def compare(options: argparse.Namespace) -> int:
    """Prints every difference; the exit status."""
    before, after = options.before, options.after
    files = sorted({p.name for folder in (before, after) for p in folder.glob("*.json.gz")})
    total = 0
    for name in files:
        target = name.removesuffix(".json.gz")
        if not all((folder / name).exists() for folder in (before, after)):
            print(f"{target}: recorded in only one of the two")
            total += 1
            continue
        one, other = load(before / name), load(after / name)
        if one["header"] != other["header"]:
            print(f"{target}: not the same machine or versions:\n  {one['header']}\n  {other['header']}")
        found = list(differences(one, other, before / f"text_{target}", after / f"text_{target}"))
        for line in found:
            print(f"{target}: {line[:SHOWN]}" if "\n" not in line else f"{target}: {line}")
        total += len(found)
        same = other["counts"]
        print(f"{target}: {len(found)} differences in {same['functions']} functions, {same['regions']} regions, "
              f"{same['candidates']} candidates, {same['code texts']} code texts")  # fmt: skip
    if not files:
        raise SystemExit("there are no records in these folders")
    return int(total > 0)


def differences(one: dict[str, Any], other: dict[str, Any], texts: Path, other_texts: Path) -> Iterator[str]:
    """Every difference of two records of a target, as text."""
    shown = {**one["programs"], **other["programs"]}
    for name, a, b in _pairs(one["functions"], other["functions"]):
        if a is None or b is None:
            yield f"function {name} is only {'before' if b is None else 'after'}"
        elif a != b:
            yield from (f"function {name}: {text}" for text in _of_function(a, b, shown))
    for key, a, b in _pairs(one["ranked"], other["ranked"]):
        if a is not None and b is not None and a != b:
            yield f"candidates of {shown[key]}: {_of_candidates(a, b, shown)}"
    for key in sorted(one["programs"].keys() & other["programs"].keys()):
        if (a := one["programs"][key]) != (b := other["programs"][key]):
            yield f"program {key} reads otherwise: {a} / {b}"
    for key, a, b in _pairs(one["code"], other["code"]):
        if a is None or b is None:
            yield f"code of {shown[key]} is only {'before' if b is None else 'after'}"
            continue
        for what in sorted(a.keys() | b.keys()):
            if a.get(what) != b.get(what):
                yield (f"code of {shown[key]}: {what} {a.get(what)} / {b.get(what)}"
                       + _text_difference(texts / f"{key}.{what}.gz", other_texts / f"{key}.{what}.gz"))  # fmt: skip


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    return ((key, one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other]))


def _of_function(a: dict[str, Any], b: dict[str, Any], shown: dict[str, str]) -> Iterator[str]:
    for what in ("refused", "identity", "program"):
        if a.get(what) != b.get(what):
            yield f"{what}: {a.get(what)} / {b.get(what)}"
    if a.get("schedules") != b.get("schedules"):
        yield f"schedules: {_of_candidates(a.get('schedules', []), b.get('schedules', []), shown)}"
    if a.get("code") != b.get("code"):
        coded = ([[key, ""] for key in x.get("code", ())] for x in (a, b))
        yield f"programs whose code is recorded: {_of_candidates(*coded, shown)}"
    for name, p, q in _pairs(a.get("plans", {}), b.get("plans", {})):
        if p is None or q is None:
            yield f"plan {name!r} is only {'before' if q is None else 'after'}"
            continue
        if p == q:
            continue
        if p.get("refused") != q.get("refused"):
            yield f"plan {name!r}: refused: {p.get('refused')} / {q.get('refused')}"
        levels, others = p.get("levels", []), q.get("levels", [])
        if len(levels) != len(others):
            yield f"plan {name!r}: {len(levels)} / {len(others)} levels"
        for k, (x, y) in enumerate(zip(levels, others, strict=False)):
            for what in ("identity", "equations", "left"):
                if x[what] != y[what]:
                    yield f"plan {name!r}, level {k}, {what}: {x[what]} / {y[what]}"
            yield from (f"plan {name!r}, level {k}, {t}" for t in _of_regions(x["regions"], y["regions"], shown))
        yield from (f"plan {name!r}, tried {t}" for t in _of_regions(p.get("asked", []), q.get("asked", []), shown))


def _of_regions(one: list[Any], other: list[Any], shown: dict[str, str]) -> Iterator[str]:
    if one == other:
        return
    rest = list(other)
    missing = []
    for region in one:
        if region in rest:
            rest.remove(region)
        else:
            missing.append(region)
    if not missing and not rest:
        yield "regions are in another order"
    for what, regions in (("before", missing), ("after", rest)):
        for members, operations, _, share, program, chosen, placed in regions:
            yield (f"region only {what}: equations {members} ({operations}), {share} candidates, {shown[program]}, "
                   f"chosen {shown.get(chosen, 'XLA')}, placed {[shown[p] for p in placed]}")  # fmt: skip


def _of_candidates(one: list[Any], other: list[Any], shown: dict[str, str]) -> str:
    """Where two rankings part."""
    k = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    at = [f"{shown[x[k][0]]} {x[k][1]}" if k < len(x) else "none" for x in (one, other)]
    same = Counter(x[0] for x in one) == Counter(x[0] for x in other)
    what = "the same ones in another order or with other scores" if same else "other ones"
    return f"{len(one)} / {len(other)}, {what}, the first at place {k}: {at[0]} / {at[1]}"


def _text_difference(one: Path, other: Path) -> str:
    """The first lines in which two texts differ, where both were kept."""
    if not (one.exists() and other.exists()):
        return ""
    texts = []
    for path in (one, other):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts.append(file.read().splitlines())
    lines = list(difflib.unified_diff(*texts, "before", "after", n=1, lineterm=""))[:24]
    return "".join(f"\n    {line[:160]}" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="record what jcuts does")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--only", default="", help="entries whose names contain one of these (with commas)")
    one.add_argument("--jobs", type=int, default=2)
    one.add_argument("--parts", default=",".join(TARGETS), help="targets (with commas)")
    one.add_argument("--keep-text", action="store_true", help="keep the texts of code, to see where they differ")
    other = commands.add_parser("compare", help="every difference of two records")
    other.add_argument("before", type=Path)
    other.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    return record(options) if options.command == "record" else compare(options)


if __name__ == "__main__":
    sys.exit(main())

"""Baselines of plain XLA: `jax.jit` and the best combination of compiler options, one row per process.

    python benchmarks/networks/baseline.py --out DIR [ROW ...]       rows as NAME:BATCH:FORM:DTYPE; all by default
    python benchmarks/networks/baseline.py --out DIR --seconds-total 540     what a sitting of 9 minutes can finish

Every row is measured by a child process and written as one JSON file, so that an interrupted run loses at most one
row and the next run goes on after the last.  Compiler options are searched once per workload
(`flags_<workload>.json`) and used for all its rows.  Nothing of this repository's package is imported.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import compiler_flags, flag_search, jaxpr_roofline  # noqa: E402
from benchmarks.networks.compiled_program import Compiled, compiled  # noqa: E402
from benchmarks.networks.interleaved_timing import TURNS, interleaved  # noqa: E402
from benchmarks.networks.row_driver import Driver, read, script, write  # noqa: E402
from benchmarks.networks.workload_row import Row, all_rows  # noqa: E402

PLAIN = "plain"
BEST = "best"
CLOSED_LIMIT = 1.5 * 2**30
"""Bytes of weights that a program can close over: a serialised program has at most 2 GiB."""
DRY_BATCH = 2
"""Largest batch of a dry run, whatever the row says."""
FIRST_NEED = 45.0
"""Seconds that a row of an unknown workload is taken to need, and what a search needs beside its sets."""


# -- one row, in its process ----------------------------------------------------------------------------------------
class Skipped(Exception):
    """A row that this machine cannot measure, and why."""


def built(row: Row, dry: bool) -> Any:
    """The calling form of a row."""
    import jax

    from benchmarks.networks.workloads import WORKLOADS

    spec = WORKLOADS[row.name]
    batch = min(row.batch, DRY_BATCH) if dry else row.batch
    try:
        program = spec.build(batch, dtype=row.dtype, tiny=dry, fresh=row.statistics == "fresh")
    except ModuleNotFoundError as missing:
        raise Skipped(f"needs {missing.name}") from missing
    weights = sum(x.nbytes for x in jax.tree.leaves(program.weights))
    if row.form == "closed" and weights > CLOSED_LIMIT:
        raise Skipped(f"{weights / 2**30:.1f} GiB of weights cannot be closed over: a program has at most 2 GiB")
    return program.form(closed=row.form == "closed")


def autotune_folder(out: Path) -> Path | None:
    """Folder of the autotuning that rows on one kind of device and version of XLA share; None on a CPU."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    folder = out / "autotuning" / f"{device.device_kind.replace(' ', '_')}_{jaxlib.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def entries(folder: Path | None) -> int:
    """Fusions whose autotuning is in a folder."""
    return 0 if folder is None else sum(p.is_file() for p in folder.rglob("*"))


def environment() -> dict[str, Any]:
    """Device, versions, host and date of this process."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    kept = {k: int(stats[k]) for k in ("peak_bytes_in_use", "bytes_limit") if k in stats}
    return {
        "device": {"kind": device.device_kind, "platform": device.platform, "stats": kept},
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()},
        "environment": {k: os.environ[k] for k in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE") if k in os.environ},
        "host": {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def described(row: Row, dry: bool) -> dict[str, Any]:
    """What a row is."""
    from benchmarks.networks.workloads import WORKLOADS

    spec = WORKLOADS[row.name]
    names = {"workload": row.name, "group": spec.group, "kind": spec.kind, "batch": row.batch, "form": row.form}
    return {
        "record": "baseline",
        "row": str(row),
        **names,
        "dtype": row.dtype,
        "statistics": row.statistics,
        "dry": dry,
    }


def result(row: Row, form: Any, programs: dict[str, Compiled], options: argparse.Namespace) -> dict[str, Any]:
    """Times programs of a row in turns, and counts its roofline."""
    import jax

    times = interleaved({n: p.step for n, p in programs.items()}, options.seconds, 3 if options.dry else TURNS)
    traced = jax.make_jaxpr(form.function)(*form.arguments)
    around = environment()
    assert "jcuts" not in sys.modules
    return {
        **described(row, options.dry),
        "programs": {
            n: times[n] | {"first_call_seconds": p.first_call, "memory_bytes": p.memory, "xla_cost": p.cost}
            for n, p in programs.items()
        },
        "roofline": jaxpr_roofline.roofline(jaxpr_roofline.count(traced), around["device"]["kind"]),
        **around,
    }


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one row in this process; the best program by its workload's flags, where they are known."""
    form, folder = built(row, options.dry), autotune_folder(options.out)
    found = flag_search.chosen(read(flag_search.path_of(options.out, row)))
    before = entries(folder)
    programs = {PLAIN: compiled(form, {}, folder)}
    new = entries(folder) - before
    if found["options"] and not found["own_process"]:
        programs[BEST] = compiled(form, found["options"], cache_of(found, folder))
    return result(row, form, programs, options) | {
        "flags": used(row, options),
        "autotuned": {"before": before, "new": new},
    }


def measure_best(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Adds the best program to a row whose flags change autotuning: alone in its process."""
    found = flag_search.chosen(read(flag_search.path_of(options.out, row)))
    form = built(row, options.dry)
    best = result(row, form, {BEST: compiled(form, found["options"])}, options)
    old = read(options.out / row.file)
    return {**old, "programs": {**old["programs"], **best["programs"]}, "best_process": "own"}


def cache_of(found: dict[str, Any], folder: Path | None) -> Path | None:
    """The folder of shared autotuning, where the chosen flags may use it."""
    return None if compiler_flags.UNSHARED & set(found["chosen"]) else folder


def used(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """What a row says of its flags: where they were searched, what is chosen, what each gave; None if not searched."""
    flags = read(flag_search.path_of(options.out, row))
    if not flags.get("searches"):
        return None
    file = flag_search.path_of(options.out, row).name
    return {"file": file, "searched_at": list(flags["searches"]), **flag_search.chosen(flags)}


def search(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """Searches flags at a row; measures the row itself, with the programs at hand, where no other search is open."""
    import jax

    form, folder = built(row, options.dry), autotune_folder(options.out)
    before = entries(folder)
    plain = compiled(form, {}, folder)
    new = entries(folder) - before
    made = flag_search.Search(row, flag_search.path_of(options.out, row), limits(options), folder)
    by_name = dict(zip(("launch", "kernels", "autotuning"), compiler_flags.groups(jax.default_backend()), strict=True))
    todo = flag_search.searches(row)
    sets = {n: o for r, names in todo if r == row for group in names for n, o in by_name[group].items()}
    program = made.run(form, plain, sets)
    found = flag_search.chosen(made.flags)
    if not all(flag_search.finished(made.flags, r) for r, _ in todo) or (options.out / row.file).exists():
        return None
    programs = {PLAIN: plain}
    if found["options"] and not found["own_process"]:
        same = program is not None and program.options == found["options"]
        programs[BEST] = program if same else compiled(form, found["options"], cache_of(found, folder))
    return result(row, form, programs, options) | {
        "flags": used(row, options),
        "autotuned": {"before": before, "new": new},
    }


def limits(options: argparse.Namespace) -> flag_search.Limits:
    """Limits of a search by the command line."""
    return flag_search.Limits(options.trial, options.search_seconds, options.compile_limit)


def in_child(row: Row, options: argparse.Namespace) -> None:
    """What a child process does; writes the row's file."""
    import jax

    path = flag_search.path_of(options.out, row)
    try:
        if options.child == "search":
            data = search(row, options)
        elif options.child == "try":
            sets = compiler_flags.groups(jax.default_backend())[2]
            made = flag_search.Search(row, path, limits(options), None)
            data = made.try_in_own_process(built(row, options.dry), options.set, sets[options.set])
        else:
            data = (measure_best if options.child == "best" else measure)(row, options)
    except Skipped as why:
        data = {**described(row, options.dry), "skipped": str(why)}
        if options.child == "search":
            flag_search.close(path, row, {"skipped": str(why)})
    if data is not None:
        write(options.out / row.file, data)


# -- driver ---------------------------------------------------------------------------------------------------------
def command_of(row: Row, options: argparse.Namespace, child: str, *more: str) -> list[str]:
    """Command line of a child process."""
    names = ("out", "seconds", "trial", "search-seconds", "compile-limit")
    words = [w for n in names for w in (f"--{n}", getattr(options, n.replace("-", "_")))]
    words += ["--statistics", row.statistics]
    return script("baseline.py", "--child", child, *words, *(["--dry"] if options.dry else []), *more, row)


def first_need(options: argparse.Namespace) -> float:
    """Seconds that a row is taken to need where nothing is known of its workload."""
    return 5.0 if options.dry else FIRST_NEED


def search_flags(row: Row, options: argparse.Namespace, driver: Driver) -> bool:
    """Runs what is open of the search of a row's workload; whether its flags are known then."""
    path = flag_search.path_of(options.out, row)
    for at, _ in flag_search.searches(row):
        while not flag_search.finished(read(path), at, more=options.more_flags):
            known = len(flag_search.tried_at(read(path), at))
            need = first_need(options) + options.search_seconds
            outcome = driver.run(f"search_{at.stem}", command_of(at, options, "search"), need)
            print(
                f"search_{at.stem}: {len(flag_search.tried_at(read(path), at))} sets, {outcome.seconds:.0f} s",
                flush=True,
            )
            if outcome.good and read(options.out / at.file):
                driver.keep(options.out / at.file, outcome, "search_process_seconds")
            if outcome.code == flag_search.SLOW_COMPILE and len(flag_search.tried_at(read(path), at)) > known:
                continue  # a set compiled too long and is recorded; the others go on
            if not outcome.good and not outcome.failure:
                return False
            if outcome.failure:
                flag_search.close(path, at, outcome.failure)
            options.more_flags = (
                options.more_flags and outcome.good and known < len(flag_search.tried_at(read(path), at))
            )
    return True


def try_autotuning(row: Row, options: argparse.Namespace, driver: Driver) -> None:
    """Tries the sets that change autotuning, each in a process of its own."""
    path = flag_search.path_of(options.out, row)
    at = flag_search.searches(row)[-1][0]
    for name in compiler_flags.DRY_AUTOTUNING if options.dry else compiler_flags.AUTOTUNING:
        record = read(path).get("searches", {}).get(str(at), {})
        if name in record.get("alone", {}) or "plain_seconds" not in record:
            continue
        need = first_need(options) + 0.5 * options.compile_limit
        outcome = driver.run(f"{name}_{at.stem}", command_of(at, options, "try", "--set", name), need)
        print(f"{name}_{at.stem}: {outcome.seconds:.0f} s", flush=True)
        if outcome.failure and outcome.code != flag_search.SLOW_COMPILE:
            flag_search.add(path, at, name, outcome.failure)


def is_open(row: Row, options: argparse.Namespace) -> bool:
    """Whether a row is to be measured: it has no file, or its flags have become known since, or it is retried."""
    record = read(options.out / row.file)
    if "failed" in record:
        return options.retry
    known = any(r.get("finished") for r in read(flag_search.path_of(options.out, row)).get("searches", {}).values())
    return not record or ("programs" in record and record["flags"] is None and known)


def drive(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """One child process per row that has no file yet; gives the number of rows that failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(options.out, options.seconds_total, options.budget)
    for row in rows:
        if driver.left() <= 0:
            break
        target = options.out / row.file
        if not is_open(row, options):
            print(f"{row}: already measured", flush=True)
            continue
        if not options.no_search:
            if not search_flags(row, options, driver):
                continue
            if options.autotuning:
                try_autotuning(row, options, driver)
            if not is_open(row, options):
                continue  # the search has measured it
        need = driver.needs(f"{row.name}_[0-9]", first_need(options))
        if driver.run_row(target, command_of(row, options, "row"), need).good:
            record = read(target)
            if (record.get("flags") or {}).get("own_process"):
                driver.run_row(target, command_of(row, options, "best"), need)
    return driver.failed


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a sitting, of rows and of searches."""
    parser.add_argument("rows", nargs="*", metavar="ROW", help="NAME:BATCH:FORM[:DTYPE]; without any, all")
    parser.add_argument("--out", type=Path, help="folder of the rows, one JSON file each")
    parser.add_argument("--seconds-total", type=float, default=1e9, help="of the sitting: no row that cannot end in it")
    parser.add_argument("--statistics", choices=("trained", "fresh"), default="trained", help="of batch norms")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per program")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds per process, then it is ended")
    parser.add_argument("--trial", type=float, default=0.4, help="seconds of timing per program and flag set")
    parser.add_argument("--search-seconds", type=float, default=15.0, help="of a search; no set is begun after them")
    parser.add_argument("--compile-limit", type=float, default=45.0, help="seconds that a flag set may compile")
    parser.add_argument("--no-search", action="store_true", help="no flags but those that are known")
    parser.add_argument("--more-flags", action="store_true", help="go on with sets that time did not suffice for")
    parser.add_argument("--autotuning", action="store_true", help="try sets that change autotuning, too")
    parser.add_argument("--retry", action="store_true", help="measure rows again that failed")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU: finds typos, not times")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--child", choices=("row", "best", "search", "try"), help=argparse.SUPPRESS)
    parser.add_argument("--set", help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    rows = [Row.parse(r, options.statistics) for r in options.rows] or all_rows(options.statistics)
    if options.list:
        print("\n".join(map(str, rows)))
        return 0
    if options.out is None:
        parser.error("--out DIR is needed")
    options.out = options.out.resolve()
    if options.child:
        in_child(rows[0], options)
        return 0
    return min(1, drive(rows, options))


if __name__ == "__main__":
    sys.exit(main())

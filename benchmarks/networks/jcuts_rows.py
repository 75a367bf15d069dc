"""The workloads under `jcuts.optimize`, beside plain `jax.jit` in the same process; one process and file per row.

    python benchmarks/networks/jcuts_rows.py --out DIR [ROW ...]       rows as NAME:BATCH:FORM:DTYPE

Writes ``jcuts_<row>.json``.  The tuning database stays in the output folder: a row that was cut, or not done within
``--budget``, goes on there with ``--retry``.  Where plain XLA won, the row says so and has its time.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import baseline  # noqa: E402
from benchmarks.networks.compiled_program import Stepped, compiled, memory_of, own_arguments  # noqa: E402
from benchmarks.networks.interleaved_timing import TURNS, interleaved  # noqa: E402
from benchmarks.networks.result_audit import audit  # noqa: E402
from benchmarks.networks.row_driver import Driver, read, script, write  # noqa: E402
from benchmarks.networks.workload_row import Row, all_rows  # noqa: E402

FIRST_NEED = 100.0
"""Seconds that a row of an unknown workload is taken to need."""


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Tunes and times one row in this process; plain XLA is compiled first, by the autotuning of the baselines."""
    import jax

    import jcuts
    from benchmarks.networks import partition_gpu
    from jcuts.base import fingerprint

    lines = partition_gpu.Lines.listening()
    form = baseline.built(row, options.dry)
    plain = compiled(form, {}, baseline.autotune_folder(options.out))
    ours = Stepped(jcuts.optimize(form.function, donate_argnums=form.donated), form, own_arguments(form))
    start = time.perf_counter()
    jax.block_until_ready(ours.step())
    spent = time.perf_counter() - start
    decision, report = ours.call.decision(*ours.arguments), ours.call.explain(*ours.arguments)
    calls = {"plain": plain.step, "jcuts": ours.step}
    raced, pairs = searched(ours, form)
    return {
        **baseline.described(row, options.dry),
        "record": "jcuts",
        "first_call_seconds": spent,
        "decision": None if decision is None else decision.to_dict(),
        "kernels": report.kernels,
        "tune_seconds": os.environ["JCUTS_TUNE_SECONDS"],
        "partition": {"log": lines.texts, "pairs": pairs},
        "programs": interleaved(calls | raced, options.seconds, 3 if options.dry else TURNS),
        **({"memory_bytes": {"plain": plain.memory, "jcuts": memory(ours)}} if options.memory else {}),
        **({"audit": audited(ours, form)} if options.audit else {}),
        **({"profile": profiled(row, calls | slower_variants(ours, form), report, options)} if options.profile else {}),
        **baseline.environment(),
        "jcuts": fingerprint.versions(),
    }


def audited(ours: Stepped, form: Any) -> list[str]:
    """What is wrong with the program on fresh arguments (`result_audit`), nothing where it is honest."""
    import jax

    given = form.arguments
    return audit(lambda *xs: ours.call(*jax.tree.map(jax.numpy.copy, xs)), form.function, given, donates=True)


def memory(ours: Stepped) -> dict[str, int]:
    """Bytes of the chosen program by XLA's account, which is compiled once more."""
    return memory_of(ours.call.chosen(*ours.arguments).compile())


def searched(ours: Stepped, form: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Calls of programs with searched regions and of the same with greedy ones, and which belong together.

    Nothing of a program with donated arguments: each would need its own.
    """
    from benchmarks.networks import partition_gpu

    programs = {} if form.donated else ours.call.programs(*ours.arguments)
    _, pairs = partition_gpu.searched_pairs(programs)
    names = {name for pair in pairs.items() for name in pair}
    return {name: functools.partial(programs[name], *ours.arguments) for name in names}, pairs


def slower_variants(ours: Stepped, form: Any) -> dict[str, Callable[[], Any]]:
    """Calls of programs with kernels that lost to another one, each with arguments of its own."""
    decision = ours.call.decision(*ours.arguments)
    programs = ours.call.programs(*ours.arguments)
    names = [name for name in programs if name.startswith("jcuts") and name != decision.chosen]
    return {name: Stepped(programs[name], form, own_arguments(form)).step for name in names}


def profiled(row: Row, calls: dict[str, Callable[[], Any]], report: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The kernels of programs on the device, and what is known of the regions (`program_profile`)."""
    from benchmarks.networks import program_profile

    return program_profile.profile(calls, report, options.out / f"profile_{Path(row.file).stem}")


def in_child(row: Row, options: argparse.Namespace) -> None:
    """What a child process does; writes the row's file."""
    if options.log:
        logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)8d ms %(name)s: %(message)s")
        logging.getLogger("jcuts").setLevel(logging.INFO)
    try:
        data = measure(row, options)
    except baseline.Skipped as why:
        data = {**baseline.described(row, options.dry), "record": "jcuts", "skipped": str(why)}
    write(options.out / file_of(row), data)


def file_of(row: Row) -> str:
    """The file of a row."""
    return f"jcuts_{row.file}"


def drive(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """One child process per row that has no file yet; gives the number of rows that failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {
        "JCUTS_CACHE_DIR": str(options.out / "tuning"),
        "JCUTS_TUNE_SECONDS": os.environ.get("JCUTS_TUNE_SECONDS", "inf"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # kernels are measured in a process beside
        **({"JCUTS_MAX_CANDIDATES": str(options.max_candidates)} if options.max_candidates else {}),
    }
    driver = Driver(options.out, options.seconds_total, options.budget, environment)
    for row in rows:
        target = options.out / file_of(row)
        record = read(target)
        if driver.left() <= 0 or (record and not ("failed" in record and options.retry)):
            continue
        words = ["--child", "--out", options.out, "--seconds", options.seconds, "--statistics", row.statistics]
        words += [f"--{name}" for name in ("dry", "log", "profile", "memory", "audit") if getattr(options, name)]
        need = 5.0 if options.dry else FIRST_NEED
        driver.run_row(target, script("jcuts_rows.py", *words, row), driver.needs(f"jcuts_{row.name}_[0-9]", need))
    return driver.failed


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="NAME:BATCH:FORM[:DTYPE]; without any, all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--statistics", choices=("trained", "fresh"), default="trained", help="of batch norms")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per program")
    parser.add_argument("--seconds-total", type=float, default=1e9, help="of the sitting")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds per row, tuning included")
    parser.add_argument("--max-candidates", type=int, help="kernels measured per subset (JCUTS_MAX_CANDIDATES)")
    parser.add_argument("--retry", action="store_true", help="rows again that failed; tuning goes on where it ended")
    parser.add_argument("--log", action="store_true", help="what a first call does, into the row's log")
    parser.add_argument("--profile", action="store_true", help="kernels of the programs, for `program_profile.py`")
    parser.add_argument("--memory", action="store_true", help="bytes of both programs (compiles once more)")
    parser.add_argument("--audit", action="store_true", help="results on fresh arguments, against float64")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU: finds typos, not times")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    options.out = options.out.resolve()
    rows = [Row.parse(r, options.statistics) for r in options.rows] or all_rows(options.statistics)
    if options.child:
        in_child(rows[0], options)
        return 0
    return min(1, drive(rows, options))


if __name__ == "__main__":
    sys.exit(main())

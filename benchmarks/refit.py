"""Fits a kernel family's cost-model coefficients to recorded schedules, and writes the family's data file.

    python benchmarks/refit.py attention             # error of the present coefficients on the recorded schedules
    python benchmarks/refit.py attention --write     # fits, and writes jcuts/schedule/gpu/attention/fit_h200.toml
    python benchmarks/refit.py skinny_gemm --results benchmarks/results/NEW.json --write

A family whose measured schedules are not recorded under ``benchmarks/results/`` is refused: its coefficients cannot be
fitted again until they are measured.  The error is that of log(measured / estimated time); nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Sample:
    """One measured schedule: its size's name, its time [s], and the cycles that the present coefficients count."""

    case: str
    seconds: float
    cycles: Callable[[], float]


@dataclass(frozen=True)
class Family:
    """What is recorded of a family: its table of coefficients, results files, and how samples are read from them."""

    table: str
    files: tuple[str, ...]
    samples: Callable[..., list[Sample]]


def attention_samples(paths: Sequence[Path], gpu: str = "H200") -> list[Sample]:
    """Flash attention (`benchmarks/gpu_kernels/attention.py`): every recorded schedule whose tile is still one.

    Args: gpu: whose rates cycles are counted with.
    """
    from benchmarks.gpu_kernels.attention import cases
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.base.errors import Refusal
    from jcuts.lower.patterns.attention import match
    from jcuts.schedule.gpu.attention import schedules
    from jcuts.schedule.gpu.attention.tile import FlashTile
    from jcuts.schedule.gpu.machine import GpuMachine

    machine, programs = GpuMachine.named(gpu), {case.name: program_of(case)[0] for case in cases()}
    found = []
    for path in paths:
        for row in json.loads(path.read_text()):
            program = programs.get(row["case"])
            known = None if program is None else match(program)
            if program is None or known is None or isinstance(known, Refusal):
                continue
            for measured in row["candidates"].values():
                params = measured["params"]
                tile = FlashTile(
                    known,
                    *params["tile"],
                    tuple(params["warps"]),
                    params["stages"],
                    bool(params.get("rounded")),
                    cluster=params.get("cluster", 1),
                )
                found.append(
                    Sample(
                        row["case"],
                        measured["median"],
                        lambda tile=tile, program=program: schedules.cycles(tile, program, machine),
                    )
                )
    return found


def clock_hertz() -> float:
    """Clock of the GPU while schedules were measured [Hz]."""
    from jcuts.schedule import fit

    return fit.coefficients("gpu/window", "cost").clock_hertz


def gemv_samples(paths: Sequence[Path], gpu: str = "H200") -> list[Sample]:
    """Split-K GEMV (`benchmarks/gpu_kernels/gemv.py`): every recorded schedule, its time alone. Args: gpu: as above."""
    from benchmarks.gpu_kernels.gemv import layers
    from jcuts.schedule.gpu.few_row_gemm import FewRowGemm
    from jcuts.schedule.gpu.gemv.schedules import GemvSchedule, estimated_seconds

    def schedule_of(entry: Mapping[str, Any]) -> GemvSchedule:
        params = {k: entry["params"].get(k, 1) for k in ("flight", "across", "threads", "cluster", "split")}
        return GemvSchedule(*entry["unroll"][-2:], **params)

    return _few_row_samples(paths, gpu, "gemv", layers(), FewRowGemm, schedule_of, estimated_seconds)


def skinny_gemm_samples(paths: Sequence[Path], gpu: str = "H200") -> list[Sample]:
    """Skinny GEMM (`benchmarks/gpu_kernels/few_row_gemm.py`): recorded schedules' times alone. Args: gpu: as above."""
    from benchmarks.gpu_kernels.few_row_gemm import ROWS, layers
    from jcuts.schedule.gpu.skinny_gemm.schedules import SkinnyProblem, SkinnySchedule, estimated_seconds

    def schedule_of(entry: Mapping[str, Any]) -> SkinnySchedule | None:
        has = entry[
            "params"
        ]  # results of row-major weights before copies were coalesced say nothing of today's kernels
        return SkinnySchedule.from_params(has) if "k_major" in has or "segment" in has else None

    return _few_row_samples(
        paths, gpu, "skinny_gemm", layers((1, *ROWS)), SkinnyProblem, schedule_of, estimated_seconds
    )


def _few_row_samples(
    paths: Sequence[Path],
    gpu: str,
    family: str,
    cases: Sequence[Any],
    problem_type: Any,
    schedule_of: Callable[[Mapping[str, Any]], Any],
    estimated_seconds: Callable[[Any, Any, Any], float],
) -> list[Sample]:
    """Recorded schedules of a family of few-row GEMMs.

    Args: cases: layers (`Case`). problem_type: `FewRowGemm` or a subclass. schedule_of: of a recorded schedule,
            None of a kernel that is no more.
    """
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.lower.patterns.gemm import as_gemm
    from jcuts.schedule.gpu.machine import GpuMachine

    clock = clock_hertz()
    machine, programs = GpuMachine.named(gpu), {case.name: program_of(case)[0] for case in cases}
    found = []
    for row in (row for path in paths for row in json.loads(path.read_text())):
        program = programs.get(row["case"])
        made = None if program is None else as_gemm(program)
        if made is None:
            continue
        problem = problem_type.of(made)
        for measured in row["programs"].values():
            if measured["family"] != family or not measured.get("alone"):
                continue
            schedule = schedule_of(measured)
            if schedule is None:
                continue
            found.append(
                Sample(
                    row["case"],
                    measured["alone"],
                    lambda p=problem, s=schedule: clock * estimated_seconds(p, s, machine),
                )
            )
    return found


def recurrence_samples(paths: Sequence[Path], gpu: str = "H200") -> list[Sample]:
    """Persistent recurrences (`benchmarks/gpu_kernels/recurrences.py --schedules`): recorded schedules' times alone."""
    from benchmarks.gpu_kernels.recurrences import case, programs_of
    from jcuts.schedule.gpu.machine import GpuMachine
    from jcuts.schedule.gpu.recurrence.step_time import estimated_time

    machine, clock, found = GpuMachine.named(gpu), clock_hertz(), []
    for name, row in (item for path in paths for item in json.loads(path.read_text()).items()):
        programs = programs_of(*case(name)) if len(row.get("schedules", ())) else []
        for measured in row.get("schedules", ()) if len(programs) == 1 else ():
            params = measured["params"]
            if "us" in measured and not {"mma", "exchange"} <= params.keys():  # a form that is no more
                made = replace(programs[0], params=tuple(params.items()))
                cycles = lambda made=made: clock * estimated_time(made, machine).seconds  # noqa: E731
                found.append(Sample(name, 1e-6 * measured["us"], cycles))
    return found


FAMILIES = {
    "recurrence": Family("cost", ("gpu_kernels/recurrence_schedules_h200_2026-11-28.json",), recurrence_samples),
    "gemv": Family("cost", ("gpu_kernels/gpu_gemv_h200_2026-11-24.json",), gemv_samples),
    "attention": Family(
        "cycles",
        ("gpu_kernels/gpu_attention_h200_2026-11-22.json", "gpu_kernels/gpu_attention_h200_2026-11-22b.json"),
        attention_samples,
    ),
    "skinny_gemm": Family("cost", (), skinny_gemm_samples),
}
"""Families whose measured schedules are recorded with all that counting their cycles needs."""


def recorded(family: str, results: Sequence[Path] = ()) -> tuple[Family, list[Path]]:
    """A family and its results files. Args: results: others than those that are recorded.

    Raises: SystemExit for a family without recorded samples, with what is there.
    """
    from jcuts.schedule import fit

    known = sorted(p.parent.name for p in (fit.ROOT / "gpu").rglob("fit_*.toml"))
    if family not in known:
        raise SystemExit(f"no family {family!r} with fitted coefficients: choose from {known}")
    if family in FAMILIES and results:
        return FAMILIES[family], list(results)
    if family not in FAMILIES or not FAMILIES[family].files:
        raise SystemExit(
            f"{family}: no recorded samples in benchmarks/results: its schedules must be measured again before its "
            f"coefficients can be fitted (recorded: {sorted(name for name in FAMILIES if FAMILIES[name].files)})"
        )
    paths = [RESULTS / name for name in FAMILIES[family].files]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise SystemExit(f"{family}: recorded samples are missing in benchmarks/results: {missing}")
    return FAMILIES[family], paths


@contextmanager
def trial(table: Any, values: dict[str, float]) -> Iterator[None]:
    """A table with other values: `jcuts.schedule.fit.Coefficients` are read-only for everybody else."""
    old = table.as_dict()
    vars(table).update(values)
    try:
        yield
    finally:
        vars(table).update(old)


def residuals(samples: Sequence[Sample], clock: float) -> np.ndarray:
    """log(measured / estimated time) of every sample. Args: clock: cycles per second."""
    return np.array([math.log(sample.seconds * clock / sample.cycles()) for sample in samples])


def error_of(values: np.ndarray, samples: Sequence[Sample]) -> dict[str, float]:
    """Root mean square of log ratios [%]; least and largest of the sizes' medians of measured over estimated time."""
    by_case: dict[str, list[float]] = {}
    for value, sample in zip(values, samples, strict=True):
        by_case.setdefault(sample.case, []).append(float(value))
    medians = [math.exp(float(np.median(found))) for found in by_case.values()]
    return {
        "rms_percent": round(100 * float(np.sqrt(np.mean(np.square(values)))), 1),
        "least_median": round(min(medians), 3),
        "largest_median": round(max(medians), 3),
    }


def fitted(table: Any, samples: Sequence[Sample], clock: float) -> dict[str, float]:
    """Coefficients with the least squares of log ratios, three digits of each; all stay positive."""
    from scipy.optimize import least_squares

    names = sorted(table.as_dict())
    start = np.log([table.as_dict()[name] for name in names])

    def loss(logs: np.ndarray) -> np.ndarray:
        with trial(table, dict(zip(names, np.exp(logs).tolist(), strict=True))):
            return residuals(samples, clock)

    bounds = (start - math.log(4), start + math.log(4))
    found = least_squares(loss, start, bounds=bounds, loss="soft_l1", f_scale=0.2, max_nfev=40)
    return {name: float(f"{math.exp(x):.3g}") for name, x in zip(names, found.x, strict=True)}


def rewritten(text: str, table: str, values: dict[str, float], header: dict[str, object]) -> str:
    """A data file with other values of one table, and what they come from."""
    before, mark, rest = text.partition(f"[{table}]\n")
    body, next_table, after = rest.partition("\n[registers]")
    for name, value in values.items():
        body = re.sub(rf"^({name} = {{ value = )[^,]+", rf"\g<1>{value!r}", body, flags=re.M)
    for key, value in header.items():
        shown = json.dumps(value, ensure_ascii=False)
        body = re.sub(rf"^{key} = .*$", lambda _, k=key, s=shown: f"{k} = {s}", body, count=1, flags=re.M)
    return before + mark + body + next_table + after


def _below_results(path: Path) -> str:
    """A results file as data files name it."""
    return str(path.resolve().relative_to(RESULTS)) if path.resolve().is_relative_to(RESULTS) else path.name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from jcuts.schedule import fit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("--write", action="store_true", help="fit, and write the family's data file")
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="files other than those recorded")
    parser.add_argument("--gpu", default="H200", help="where the schedules were measured (%(default)s)")
    options = parser.parse_args(arguments)
    family, paths = recorded(options.family, options.results)
    samples, clock = family.samples(paths, options.gpu), clock_hertz()
    table = fit.coefficients(f"gpu/{options.family}", family.table)
    present = error_of(residuals(samples, clock), samples)
    print(json.dumps({"family": options.family, "samples": len(samples), "present": present}))
    if not options.write:
        return 0
    values = fitted(table, samples, clock)
    with trial(table, values):
        error = error_of(residuals(samples, clock), samples)
    print(json.dumps({"fitted": error, "coefficients": values}))
    header = {
        "source": "benchmarks/results/" + ": with ".join(family.files or [_below_results(path) for path in paths]),
        "samples": len(samples),
        "error": f"{error['rms_percent']} % root mean square of log(measured / estimated)",
        "date": paths[-1].stem.split("_")[-1][:10],
    }
    path = fit.file_of(f"gpu/{options.family}")
    text = rewritten(path.read_text(encoding="utf-8"), family.table, values, header)
    fit.parse_tables(text, path.name)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

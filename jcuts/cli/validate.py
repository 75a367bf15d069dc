"""Compare predicted with measured step times and memory of the planner's model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError
from jcuts.cli import printing
from jcuts.cli.output_files import write
from jcuts.plan.calibrate import memory_table, releases, validate
from jcuts.plan.calibrate.tables import shipped
from jcuts.plan.spec import cluster as clusters
from jcuts.plan.spec.cluster import GIB

TABLES = ("megatron_seqsel_table5.csv", "vtrain_singlenode_a100.csv", "simumax_b200_llama3.csv")
"""Shipped tables that are checked by default."""

HELP = "check the planner against measured tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``jcuts validate``."""
    parser.add_argument(
        "tables", nargs="*", metavar="CSV", help="measured tables (default: those that come with jcuts)"
    )
    parser.add_argument("--cluster", metavar="NAME|FILE", help="constants (default: dgx-a100)")
    parser.add_argument(
        "--calibrate",
        metavar="ROWS",
        help="rows to fit constants on: 1,5,9 or @FILE, by idx or place in the table; others are reported",
    )
    parser.add_argument("--ablate", action="store_true", help="error with each constant switched off")
    parser.add_argument("--groups", action="store_true", help="rank correlation and regret of every group")
    parser.add_argument(
        "--releases", action="store_true", help="errors on every shipped table: as recorded per release, and now"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is standard output")


def _rows(text: str) -> set[int]:
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"{text[1:]}: cannot be read: {error.strerror}") from error
        text = " ".join(line for line in lines if not line.startswith("#"))
    try:
        return {int(word) for word in text.replace(",", " ").split()}
    except ValueError as error:
        raise UsageError(f"--calibrate {text!r}: rows are numbers, separated by commas") from error


def run(arguments: argparse.Namespace) -> int:
    """Runs ``jcuts validate``."""
    if arguments.releases:
        return _releases(arguments)
    default = not arguments.tables
    paths = arguments.tables or [shipped(name) for name in TABLES]
    documents, memory = [], []
    for path in paths:
        if memory_table.is_memory_table(path):
            memory.append(_memory(path))
        else:
            documents.append(_step_times(arguments, path, default))
    if arguments.json:
        write(arguments.json, documents + memory)
    if arguments.json != "-":
        if documents:
            _show_scores(documents)
        if memory:
            _show_memory(memory)
    return 0


def _memory(path: str | Path) -> dict[str, Any]:
    """Predicted against measured peaks of a table of memory."""
    cases = memory_table.read_cases(path)
    predicted = memory_table.predict(cases)
    found = memory_table.score(cases, predicted)
    return (
        {"table": Path(path).name, "memory": True}
        | vars(found)
        | {
            "cases": [
                {"layout": f"{case.network.name} {case.plan.short()}, sequence {case.network.sequence}"}
                | {"predicted": float(bytes_), "measured": case.measured}
                for case, bytes_ in zip(cases, predicted, strict=True)
            ]
        }
    )


def _show_memory(documents: list[dict[str, Any]]) -> None:
    for d in documents:
        rows = [
            (
                case["layout"],
                f"{case['predicted'] / GIB:.2f}",
                f"{case['measured'] / GIB:.2f}",
                f"{case['predicted'] / case['measured'] - 1:+.1%}",
            )
            for case in d["cases"]
        ]
        title = (
            f"{d['table']}: peak GiB per GPU; mean error {d['mape']:.2%}, largest {d['worst']:.1%}; nothing was fitted"
        )
        printing.console().print(printing.table(title, ("layout", "predicted", "measured", ""), rows, right=(1, 2, 3)))


def _releases(arguments: argparse.Namespace) -> int:
    """Errors as recorded per release and as the code stands; exit status 1 if one got worse than the last release."""
    recorded, now = releases.recorded(), releases.current()
    last = list(recorded)[-1]
    lost = releases.worse(now, recorded[last], releases.SLACK)
    if arguments.json:
        flat = [
            {"release": name, "table": table, "metric": metric, "value": value}
            for name, values in [*recorded.items(), ("now", now)]
            for (table, metric), value in values.items()
        ]
        write(arguments.json, flat)
    if arguments.json != "-":
        keys = dict.fromkeys(key for values in [*recorded.values(), now] for key in values)
        shown = [*recorded.values(), now]
        rows = []
        for key in keys:
            values = [f"{each[key]:.4g}" if key in each else "-" for each in shown]
            rows.append((*key, *values, "worse" if key in lost else ""))
        columns = ("table", "metric", *recorded, "now", "")
        printing.console().print(
            printing.table("errors by release", columns, rows, right=tuple(range(2, len(columns) - 1)))
        )
    return 1 if lost else 0


def _step_times(arguments: argparse.Namespace, path: str | Path, default: bool) -> dict[str, Any]:
    """Predicted against measured step times of a table."""
    cases = validate.read_cases(path)
    cluster, overhead, held_out = clusters.load(arguments.cluster or "dgx-a100"), 0.0, cases
    fitted: validate.Calibration | None = None
    named = arguments.calibrate
    if default and named is None and Path(path).name.startswith("vtrain"):
        named = f"@{shipped('vtrain_calibration_rows.txt')}"
    if named and not (default and Path(path).name.startswith("megatron")):
        wanted = _rows(named)
        chosen = [case for case in cases if case.row in wanted]
        missing = wanted - {case.row for case in cases}
        if missing:
            raise UsageError(f"{path} has no rows {sorted(missing)[:10]}", rows=sorted(missing))
        fitted = validate.calibrate(chosen, cluster)
        cluster, overhead = fitted.cluster, fitted.overhead
        held_out = [case for case in cases if case.row not in wanted]
        if not held_out:
            raise UsageError("every row is named for calibration: none is left to report on")
    predicted = validate.Bench(held_out).predict(cluster, overhead)
    ours = validate.score(held_out, predicted)
    fit_on = [case for case in cases if fitted and case.row in fitted.rows] or held_out
    naive = validate.score(held_out, validate.constant_efficiency(held_out, cluster, fit_on))
    return {
        "table": Path(path).name,
        "rows": ours.rows,
        "calibrated_on": list(fitted.rows) if fitted else [],
        "constants": fitted.values if fitted else {},
        "mape": ours.mape,
        "max": ours.worst,
        "bias": ours.bias,
        "groups": len(ours.groups),
        "spearman_median": ours.spearman,
        "regret_mean": ours.regret,
        "baseline": {
            "mape": naive.mape,
            "max": naive.worst,
            "spearman_median": naive.spearman,
            "regret_mean": naive.regret,
        },
        "ablation": validate.ablation(held_out, cluster, overhead) if arguments.ablate else {},
        "by_group": [group.__dict__ for group in ours.groups] if arguments.groups else [],
    }


def _show_scores(documents: list[dict[str, Any]]) -> None:
    console = printing.console()

    def number(value: float) -> str:
        return "-" if value != value else f"{value:.3f}"

    rows = []
    for d in documents:
        for label, s in (("model", d), ("constant efficiency", d["baseline"])):
            rows.append(
                (
                    d["table"],
                    label,
                    str(d["rows"]),
                    f"{s['mape']:.2%}",
                    f"{s['max']:.1%}",
                    number(s["spearman_median"]),
                    number(s["regret_mean"]),
                )
            )
    console.print(
        printing.table(
            "predicted against measured step time",
            ("table", "", "rows", "MAPE", "max", "Spearman", "regret"),
            rows,
            right=(2, 3, 4, 5, 6),
        )
    )
    for d in documents:
        if d["calibrated_on"]:
            fitted = ", ".join(f"{name} {value:.3g}" for name, value in d["constants"].items())
            console.print(
                f"{d['table']}: calibrated on {len(d['calibrated_on'])} rows, which are not reported: {fitted}"
            )
        else:
            console.print(f"{d['table']}: nothing was fitted on its rows")
        if d["groups"]:
            console.print(f"{d['table']}: {d['groups']} groups of equal model, GPUs and batch with at least 5 rows")
        if d["ablation"]:
            console.print(
                printing.table(
                    f"{d['table']}: MAPE with one constant's effect switched off",
                    ("constant", "MAPE"),
                    [(k, f"{v:.2%}") for k, v in d["ablation"].items()],
                    right=(1,),
                )
            )
        for g in d["by_group"]:
            console.print(f"  {g['name']}: {g['rows']} rows, Spearman {g['spearman']:.2f}, regret {g['regret']:.3f}")

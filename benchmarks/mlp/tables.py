"""Tables of docs/mlp.md: `page` fills them from the results in benchmarks/results/mlp, the report's numbers beside.

    python benchmarks/mlp/tables.py [--write]

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; the text around it is the page's own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.mlp import report_tables  # noqa: E402
from benchmarks.mlp.gemm_loops import TILED  # noqa: E402
from benchmarks.mlp.network import NAMES, largest  # noqa: E402
from benchmarks.networks.markdown_table import table, update  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mlp"
PAGE = ROOT / "docs" / "mlp.md"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Result = dict[str, Any]
OTHERS = ("OpenBLAS dgemm", "NumPy", "jax.jit", "jcuts.optimize", "jcuts, sum in 4 parts", "naive")


def result(name: str, folder: Path = RESULTS) -> Result:
    """The newest result of a name. Raises: FileNotFoundError."""
    found = sorted(folder.glob(f"{name}_*.json"))
    if not found:
        raise FileNotFoundError(f"no {name}_*.json in {folder}")
    return json.loads(found[-1].read_text(encoding="utf-8"))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def machine() -> str:
    """Where and when each result was measured."""
    rows = []
    for name in ("training_jit", "training_jcuts", "gemm", "history", "parallelism"):
        found = result(name)
        versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
        rows.append([name, found["date"], found["cpu"], found["cores"], f"{found['load']:.1f}", versions])
    return table(["result", "date", "processor", "cores", "load at its end", "versions"], rows)


def gemm() -> str:
    """Times and differences of everything without a block size."""
    rows = []
    for test, found in result("gemm")["tests"].items():
        base = found["rows"]["OpenBLAS dgemm"]["seconds"][0]
        for name in OTHERS:
            row = found["rows"][name]
            seconds, low, high = row["seconds"]
            spread = f"{_ms(seconds)} ({_ms(low)} to {_ms(high)})"
            chosen = f"{name} (chose {row['chosen']})" if "chosen" in row else name
            facts = [f"{row['difference']:.2e}", f"{row['from_exact']:.2e}"]
            rows.append([test, chosen, spread, _ratio(base / seconds), *facts])
        reported = report_tables.GEMM_SECONDS[test], report_tables.GEMM_DIFFERENCE[test]
        rows.append([test, "report, K80, against cuBLAS", _ms(reported[0]), "", f"{reported[1]:.2e}", ""])
    head = ["test", "program", "ms (quartiles)", "speed over OpenBLAS", "difference from OpenBLAS", "from exact"]
    return table(head, rows)


def blocks() -> str:
    """Milliseconds by block size."""
    rows = []
    for test, found in result("gemm")["tests"].items():
        sizes = [int(n.split()[-1]) for n in found["rows"] if n.startswith("tiled")]
        for form in (*TILED, "jcuts kernel"):
            present = [found["rows"].get(f"{form} {b}") for b in sizes]
            cells = ["none" if row is None else _ms(row["seconds"][0]) for row in present]
            if form == "jcuts kernel":
                tiles = ["" if row is None else " ({}x{})".format(*row["register_tile"]) for row in present]
                cells = [cell + tile for cell, tile in zip(cells, tiles, strict=True)]
            rows.append([test, form, *cells])
        rows.append([test, "report, tiled, K80", *(_ms(s) for s in report_tables.TABLE_2[test].values())])
    return table(["test", "kernel", "4", "8", "16", "32"], rows)


def uniform() -> str:
    """Differences with uniform operands."""
    rows = [[t, n, f"{d:.2e}"] for t, f in result("gemm")["tests"].items() for n, d in f["uniform"].items()]
    return table(["test", "program", "difference from OpenBLAS"], rows)


def accesses() -> str:
    """Counted transactions and passes, the ablation of coalescing and padding."""
    rows = []
    for row in result("cuda_counts")["counts"]:
        flags = ["yes" if row["coalesced"] else "no", "yes" if row["padding"] else "no"]
        rows.append([row["bank_bytes"], row["block"], *flags, *row["counts"].values()])
    head = ["bank bytes", "block size", "coalesced", "padded"]
    names = ["global load, transactions", "shared store, passes", "load of A, passes", "load of B, passes"]
    return table(head + names, rows)


def training() -> str:
    """Table 1 as measured."""
    rows = []
    for engine in ("jit", "jcuts"):
        for mode, found in result(f"training_{engine}")["modes"].items():
            sequential = found["sequential"]
            for count, row in found["parallel"].items():
                norms = [f"{row['differences'][n][k]:.1e}" for n in NAMES for k in ("max", "l2")]
                seconds = [f"{row['seconds']:.2f}", f"{sequential['seconds']:.1f}", f"{row['first_calls_seconds']:.1f}"]
                precision = [f"{row['precision']:.4f}", f"{sequential['precision']:.4f}"]
                program = f"{engine} ({row['chosen']['kernels']} kernels)" if row["chosen"] else engine
                rows.append([program, mode, count, *norms, f"{row['rank_difference']:.0e}", *seconds, *precision])
    norms = [f"{n} {k}" for n in NAMES for k in ("max", "L2")]
    times = ["training s", "NumPy s", "first calls s"]
    return table(["step by", "mode", "processes", *norms, "ranks", *times, "precision", "of NumPy"], rows)


def mnist() -> str:
    """Training on 5,000 digits of MNIST."""
    rows = []
    for engine in ("jit", "jcuts"):
        found = result(f"mnist5k_{engine}")
        for mode, trained in found["modes"].items():
            for count, row in trained["parallel"].items():
                off = [f"{largest(row['differences']):.1e}", f"{row['rank_difference']:.0e}"]
                facts = [
                    f"{row['seconds']:.2f}",
                    f"{row['precision']:.4f}",
                    f"{trained['sequential']['precision']:.4f}",
                ]
                rows.append([engine, mode, count, *off, *facts])
    head = ["step by", "mode", "processes", "largest difference from NumPy", "among ranks", "training s", "precision"]
    return table([*head, "of NumPy"], rows)


def reported() -> str:
    """Table 1 of the report."""
    rows = []
    for row in report_tables.TABLE_1:
        ends = row.seconds, report_tables.SEQUENTIAL_SECONDS[row.mode], report_tables.PRECISION[row.mode]
        rows.append([row.mode, row.processes, *(f"{d:.1e}" for d in row.differences), *ends])
    norms = [f"{n} {k}" for n in NAMES for k in ("max", "L2")]
    return table(["mode", "processes", *norms, "parallel s", "sequential s", "precision"], rows)


def history() -> str:
    """The ablation of the optimisation history."""
    found = result("history")["variants"]
    first = next(iter(found.values()))["seconds"][0]
    rows = [
        [name, *(f"{s:.3f}" for s in row["seconds"]), _ratio(first / row["seconds"][0]), f"{row['difference']:.1e}"]
        for name, row in found.items()
    ]
    return table(["variant", "s", "first quartile", "third", "over the first", "difference from NumPy"], rows)


def shares() -> str:
    """Operations of the step by share."""
    found = result("history")["operations"]
    rows = [[name, _ms(row["seconds"]), f"{100 * row['share']:.1f}"] for name, row in found.items()]
    products = sum(row["share"] for name, row in found.items() if name.startswith("GEMM"))
    rows.append(["all GEMM", "", f"{100 * products:.1f}"])
    rows.append(["all GEMM, report's Table 3", "", report_tables.TABLE_3["gpuGEMM4d1()"]])
    return table(["operation", "ms per step", "percent"], rows)


def parallel() -> str:
    """Data against model parallelism."""
    rows, found = [], result("parallelism")
    for kind in ("data", "model"):
        for count, row in found[kind]["measured"].items():
            price = found[kind]["priced"].get(count)
            collectives = sum(price["collectives"].values()) if price else 0
            predicted = [f"{1e6 * price['seconds']:.0f}", f"{1e6 * collectives:.0f}"] if price else ["", ""]
            megabytes = f"{found[kind]['summed_bytes'] / 1e6:.3g}"
            rows.append([kind, count, megabytes, _ms(row["seconds"]), f"{row['difference']:.0e}", *predicted])
    head = ["parallelism", "processes", "MB summed, float64", "measured ms per step", "difference from NumPy"]
    return table([*head, "priced us per step", "of it all-reduce"], rows)


def sums() -> str:
    """Seconds of training with one all-reduce per step and with four."""
    one, four = result("training_jit")["modes"], result("training_four_sums")["modes"]
    rows = [
        [mode, name, *(f"{row['seconds']:.2f}" for row in found[mode]["parallel"].values())]
        for mode in one
        for name, found in (("one", one), ("four", four))
    ]
    return table(["mode", "all-reduces per step", "1 process", "2", "3", "4"], rows)


def worst() -> str:
    """The largest difference of any mode and process count, from NumPy and among ranks."""
    rows = []
    for engine in ("jit", "jcuts"):
        for mode, found in result(f"training_{engine}")["modes"].items():
            parallel = found["parallel"].values()
            off = max(abs(r["precision"] - found["sequential"]["precision"]) for r in parallel)
            limits = [f"{max(largest(r['differences']) for r in parallel):.1e}", "1e-12" if mode == "1" else "1e-7"]
            rows.append([engine, mode, *limits, f"{max(r['rank_difference'] for r in parallel):.0e}", f"{off:.4f}"])
    head = ["step by", "mode", "largest difference from NumPy", "limit", "among ranks", "precision, off by"]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        machine,
        gemm,
        blocks,
        uniform,
        accesses,
        training,
        sums,
        worst,
        mnist,
        reported,
        history,
        shares,
        parallel,
    )
}


def page(text: str) -> str:
    """The page with its tables made anew. Raises: KeyError for a table that is not in `TABLES`."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    """Prints what is stale; writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if update({PAGE: page(PAGE.read_text(encoding="utf-8"))}, check=not args.write) and not args.write:
        sys.exit(1)


if __name__ == "__main__":
    main()

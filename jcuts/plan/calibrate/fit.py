"""Fits a cluster file's parameters to measured curves: GEMM speed and ramp, link latency and bandwidth from
all-reduces.

Separate from ``measure``, so that parameters can be fitted again from stored files, without the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.plan.cost.compute import gemm_time
from jcuts.plan.spec import toml_file
from jcuts.plan.spec.cluster import Gpu

RAMP = 128.0
"""Inner length at which a tile spends as long filling as computing, where the products measured cannot tell (stated, as
in the presets of this GPU generation)."""

SCATTER = 30e-6
"""Seconds by which the slope over a chain of collectives scatters from run to run: shorter times count as this long."""


@dataclass
class Measured:
    """Constants by TOML table, how each was measured, and curves.

    products: (type, m, n, k, FLOP/s); collectives: (kind, members, bytes, seconds); when: the day.
    """

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    products: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    collectives: list[tuple[str, int, int, float]] = field(default_factory=list)
    when: str = ""


def fit_products(
    rows: Sequence[tuple[int, int, int, float]], units: int, gap: float = 0.0, ramp: float | None = None
) -> tuple[float, float, float]:
    """Fits (peak FLOP/s, efficiency, ramp) of ``compute.gemm_time`` to measured GEMMs (m, n, k, FLOP/s), each the mean
    of (m, n, k) and (m, k, n).

        time = gap + work(ramp) / speed,   speed = median(work / (time - gap))

    The median, because single products are off by a factor of two (a kernel badly chosen, a clock that was low). The
    ramp is what makes the ratios agree best (mean absolute deviation of their logarithms) among products that differ
    in k alone; fewer than three such leave it at ``RAMP``.  Peak is the fastest product, or the fitted speed if higher.

    Args: units: multiprocessors; gap: seconds between kernels, which the planner adds to every product; ramp: keeps it.
    Raises: UsageError without rows.
    """
    if not rows:
        raise UsageError("no products to fit")
    m, n, k, speeds = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    took = np.maximum(2 * m * n * k / speeds - gap, 1e-9)

    def ratios(ramp: float, chosen: Any = slice(None)) -> np.ndarray:
        gpu = Gpu("", 1.0, 1.0, math.inf, multiprocessors=units, gemm_efficiency=1.0, gemm_ramp=ramp)
        a, b, c = m[chosen], n[chosen], k[chosen]
        return np.log((gemm_time(gpu, a, b, c) + gemm_time(gpu, a, c, b)) / 2 / took[chosen])

    if ramp is None:
        ramp, best = RAMP, math.inf
        family = _same_outside(m, n, k)
        for tried in np.geomspace(8, 512, 49) if len(family) > 2 else ():
            off = ratios(float(tried), family)
            spread = float(np.abs(off - np.median(off)).mean())
            if spread < best:
                best, ramp = spread, float(tried)
    speed = float(np.exp(np.median(ratios(ramp))))
    peak = max(float(speeds.max()), speed)
    return peak, speed / peak, ramp


def _same_outside(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Positions of the largest set of products with equal m and n and different k."""
    found: dict[tuple[float, float], dict[float, int]] = {}
    for i, (a, b, c) in enumerate(zip(m.tolist(), n.tolist(), k.tolist(), strict=True)):
        found.setdefault((a, b), {})[c] = i
    return np.array(sorted(max(found.values(), key=len).values()))


def fit_link(rows: Sequence[tuple[int, int, float]]) -> dict[str, float]:
    """Fits the link parameters to all-reduces (members, bytes, seconds): keys of a cluster file's ``[intra]``.

        t = call + 2 (n - 1) hop + 2 (n - 1)/n S / BW

    Non-negative least squares of relative errors; times below ``SCATTER`` are noise and count as that long.
    Raises: UsageError for fewer rows than constants.
    """
    from scipy.optimize import nnls

    if len(rows) < 3:
        raise UsageError(f"{len(rows)} all-reduces cannot fit a link", rows=len(rows))
    a = np.array([[1.0, 2.0 * (n - 1), 2.0 * (n - 1) / n * size] for n, size, _ in rows])
    t = np.array([took for *_, took in rows])
    weight = 1 / np.maximum(t, SCATTER)
    call, hop, inverse = nnls(a * weight[:, None], t * weight)[0]
    return {
        "bandwidth_gbs": 1 / max(inverse, 1e-15) / 1e9,
        "efficiency": 1.0,
        "hop_us": hop * 1e6,
        "call_us": call * 1e6,
    }


def constants(made: Measured, *, runs: int = 1) -> None:
    """Sets the fitted parameters (``[nodes.gpu]``'s speed and ramp, ``[intra]``) from the curves, with their sources.

    Args: runs: measurements that the curves are from, for the text.
    """
    gpu = made.tables["gpu"]
    half = [row for row in made.products if row[0] == "bfloat16"]
    if half:
        least = max(max(m, n, k) for _, m, n, k, _ in half) // 16
        rows = [(m, n, k, speed) for _, m, n, k, speed in half if min(m, n, k) >= least]
        family = _same_outside(*(np.array(column) for column in list(zip(*rows, strict=True))[:3]))
        units = int(gpu.get("multiprocessors", 1))
        peak, efficiency, ramp = fit_products(rows, units, gpu.get("kernel_gap_us", 0.0) * 1e-6)
        gpu |= {"peak_tflops": peak / 1e12, "gemm_efficiency": efficiency, "gemm_ramp": ramp}
        made.sources["peak_tflops"] = (
            "fastest 16-bit product measured, or the fitted speed if higher (no datasheet is consulted)"
        )
        made.sources["gemm_efficiency"] = (
            f"median over {len(rows)} 16-bit products of random data with all extents >= {least}, each the slope over "
            f"chains in one program, less kernel_gap_us" + (f"; the fastest of {runs} runs" if runs > 1 else "")
        )
        made.sources["gemm_ramp"] = (
            f"fitted on {len(family)} products that differ in their inner length alone"
            if len(family) > 2
            else "stated: too few of the products differ in their inner length alone"
        )
    reduces = [(n, size, took) for kind, n, size, took in made.collectives if kind == "all-reduce"]
    if len(reduces) > 2:
        made.tables["intra"] = fit_link(reduces)
        low, high = min(size for _, size, _ in reduces), max(size for _, size, _ in reduces)
        made.sources["intra"] = (
            f"least squares of relative errors over {len(reduces)} all-reduces of {low} to {high} bytes on "
            f"{sorted({n for n, *_ in reduces})} devices"
            + (f" in {runs} runs" if runs > 1 else "")
            + f", each the slope over chains in one program; times below {SCATTER * 1e6:.0f} us count as that long"
        )


def read(path: str | Path) -> Measured:
    """Reads a cluster file with its curves, which follow as comments.

    Raises: ModelError (not a cluster file, with line), UsageError (a file without curves).
    """
    table = toml_file.read(path)
    values = {name: dict(entry) for name, entry in table.values.items() if isinstance(entry, dict)}
    nodes = dict(table.values["nodes"][0]) if table.values.get("nodes") else {}
    values["gpu"] = dict(nodes.pop("gpu", {}))
    made = Measured(values | {"nodes": nodes}, values.pop("sources", {}))
    made.tables.pop("sources", None)
    for line in table.text.splitlines():
        words = line.removeprefix("#").split()
        if line.startswith("# Measured by") and words:
            made.when = words[-1].rstrip(".")
        if not line.startswith("# ") or not words[-1].replace(".", "", 1).isdigit():
            continue
        if len(words) == 5 and words[0] in ("bfloat16", "float32"):
            m, n, k = map(int, words[1:4])
            made.products.append((words[0], m, n, k, float(words[4]) * 1e12))
        elif len(words) == 4 and words[1].isdigit():
            made.collectives.append((words[0], int(words[1]), int(words[2]), float(words[3]) * 1e-3))
    if not made.products and not made.collectives:
        raise UsageError(f"{path}: holds no measured curves", path=str(path))
    return made


def refit(paths: Sequence[str | Path]) -> Measured:
    """Fits constants again to the curves of several measurements of one machine.

    Products: the fastest of each shape (what disturbs a product slows it); collectives: all; the rest: the last file's.
    """
    runs = [read(path) for path in paths]
    made = runs[-1]
    fastest: dict[tuple[str, int, int, int], float] = {}
    for run in runs:
        for *shape, speed in run.products:
            key = (str(shape[0]), int(shape[1]), int(shape[2]), int(shape[3]))
            fastest[key] = max(speed, fastest.get(key, 0.0))
    made.products = [(*key, speed) for key, speed in fastest.items()]
    made.collectives = [row for run in runs for row in run.collectives]
    constants(made, runs=len(runs))
    return made


def to_toml(made: Measured, name: str) -> str:
    """The cluster file: what ``jcuts plan --cluster FILE`` reads; curves follow as comments."""

    def line(key: str, value: Any) -> str:
        if isinstance(value, str):
            return f'{key} = "{value}"'.replace("\\", "/")
        return f"{key} = {value if isinstance(value, int) else float(f'{value:.4g}')}"

    lines = [f'# Measured by "jcuts cluster measure" on {made.when}.', line("name", name), "", "[[nodes]]"]
    lines += [line(key, value) for key, value in made.tables["nodes"].items()]
    lines += ["[nodes.gpu]", *(line(key, value) for key, value in made.tables["gpu"].items())]
    for table in ("intra", "host", "storage"):
        if table in made.tables:
            lines += ["", f"[{table}]", *(line(key, value) for key, value in made.tables[table].items())]
    lines += ["", "[sources]", *(line(key, value) for key, value in made.sources.items())]
    lines += ["", "# products: type m n k TFLOP/s"]
    lines += [f"# {dtype} {m} {n} {k} {speed / 1e12:.3f}" for dtype, m, n, k, speed in made.products]
    if made.collectives:
        lines += ["# collectives: kind members bytes milliseconds"]
        lines += [f"# {kind} {n} {size} {took * 1e3:.4f}" for kind, n, size, took in made.collectives]
    return "\n".join(lines) + "\n"


def finite(made: Measured) -> bool:
    """Whether every measured constant is a finite number >= 0."""
    values = [v for table in made.tables.values() for v in table.values() if not isinstance(v, str)]
    return all(math.isfinite(v) and v >= 0 for v in values)

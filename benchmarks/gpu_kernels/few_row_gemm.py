"""Products of 2 to 16 rows: the skinny GEMM and multi-row GEMV against XLA and against the tensor-core families.

    python benchmarks/gpu_kernels/few_row_gemm.py --out results --most 12 --budget 450
    python benchmarks/gpu_kernels/few_row_gemm.py --out results --rows 16,4 --budget 450
    python benchmarks/gpu_kernels/few_row_gemm.py --out results --only row-major --lost 1.0 --budget 220

Layers are timed as in `gemv`: every schedule alone, as a CUDA graph of launches on rotated operands that do not fit in
the L2 cache; the best of each family then as jitted chains, in turns with XLA under several sets of its flags.  Results
are judged by float64 first.  The layers that say most come first; what the budget does not reach is left out.
``--lost 1.0`` measures those again where XLA has been faster than every kernel in the recorded results (`RECORDED`).
Needs a GPU; compiles in parallel first (``--build``: only that, without one).
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_kernels.cases import Case  # noqa: E402
from benchmarks.gpu_kernels.gemv import FLAGS, dense, gemm_of, measured, show  # noqa: E402
from benchmarks.gpu_kernels.paired_timing import in_turn, options_of  # noqa: E402
from benchmarks.gpu_kernels.wgmma_tiles import build  # noqa: E402

SECONDS = 0.04
"""Of samples of one program."""
MINE = ("skinny_gemm", "gemv")
"""The families that are measured."""
OTHERS = 4
"""Schedules of the families that had these products before."""
ROWS = (8, 2, 16, 4)
"""In the order in which they are measured."""
LAYERS = ((4096, 4096), (2048, 1000), (4096, 11008), (1024, 4096), (768, 3072), (25088, 4096))
"""(K, N): LLaMA-7B, ResNet50's head, BERT-large and -base, VGG16; those that say most first."""
RECORDED = ("gpu_few_rows_h100_2026-11-26.json", "gpu_few_rows_16_4_h100_2026-11-26.json")
"""Earlier results, below ``benchmarks/results/gpu_kernels``."""


def layers(rows: Sequence[int] = ROWS) -> list[Case]:
    """All layers in both layouts and two types, the numbers of rows in this order; the largest ones last."""
    found = []
    for terms, columns, m in sorted(
        ((*layer, m) for m in rows for layer in LAYERS), key=lambda x: (math.prod(x[:2]) > 1 << 26, rows.index(x[2]))
    ):
        for dtype, is_k_major in itertools.product(("bfloat16", "float32"), (False, True)):
            shapes = ((m, terms), (columns, terms) if is_k_major else (terms, columns), (columns,))
            name = f"{m} rows {terms}x{columns} {'k-major' if is_k_major else 'row-major'} {dtype}"
            found.append(Case(name, partial(dense, is_k_major), tuple((s, dtype) for s in shapes)))
    return found


def schedules(case: Case, most: int) -> list[Any]:
    """Programs of a layer: so many of the skinny GEMM, of different kinds, all proposed ones, some of the others."""
    from jcuts.schedule.gpu.enumeration import enumerate_schedules
    from jcuts.schedule.gpu.families import FAMILIES, family_of
    from jcuts.schedule.gpu.machine import GpuMachine
    from jcuts.schedule.gpu.skinny_gemm import schedules as skinny

    machine = GpuMachine.named("H200")
    program, made = gemm_of(case)
    problem = skinny.SkinnyProblem.of(made)
    space = [s.apply(made, problem) for s, _ in skinny.best_of_kinds(problem, machine)]
    near, rest = space[: 2 * most // 3], space[2 * most // 3 :]
    found = [*near, *rest[:: max(1, len(rest) // max(1, most - len(near)))][: most - len(near)]]
    for name in MINE:
        found += [p for p, _ in FAMILIES[name].schedules(program, machine)]
    others = [p for p, _ in enumerate_schedules(program, machine) if family_of(p).name not in MINE]
    return list({p.digest: p for p in (*found, *others[:OTHERS])}.values())


def speedup(row: dict[str, Any], families: Sequence[str] = ()) -> float:
    """XLA's best time over that of the best kernel of these families (none: of any)."""
    timed = [p for p in row["programs"].values() if "median" in p]
    mine = [p for p in timed if p["family"] in families or (not families and p["family"] != "xla")]
    best = min((p["median"] for p in mine), default=math.inf)
    return min(p["median"] for p in timed if p["family"] == "xla") / best


def lost(ratio: float) -> set[str]:
    """Names of the layers of `RECORDED` in which no kernel was so many times as fast as XLA."""
    folder = ROOT / "benchmarks" / "results" / "gpu_kernels"
    rows = [row for name in RECORDED for row in json.loads((folder / name).read_text())]
    return {row["case"] for row in rows if speedup(row) < ratio}


def summary(rows: Sequence[dict[str, Any]], families: Sequence[str] = MINE) -> str:
    """XLA's best time over that of the families, of all layers: geometric mean, least, layers below 0.95."""
    ratios = [speedup(row, families) for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    below = sum(ratio < 0.95 for ratio in ratios)
    return f"{len(ratios)} layers: XLA takes {mean:.2f}x as long (least {min(ratios):.2f}), {below} below 0.95"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run

    parser = options_of(__doc__, "gpu_few_rows", most=12, schedules="schedules per layer", budget=450.0)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, in this order")
    parser.add_argument("--lost", type=float, help="only layers whose recorded speedup over XLA is less than this")
    parser.add_argument("--flags", default=",".join(FLAGS), help="XLA's sets of flags, of those that there are")
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rows = [int(m) for m in options.rows.split(",")]
    chosen = [case for case in layers(rows) if run.wanted(case, options.only)]
    if options.lost is not None:
        again = lost(options.lost)
        chosen = [case for case in chosen if case.name in again]
    work = [(case, schedules(case, options.most)) for case in chosen]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if options.build:
        return 0
    out = options.out / f"gpu_few_rows_{options.rows.replace(',', '_')}.json"
    flags = options.flags.split(",")
    jobs = [(case.name, partial(measured, case, made, folder, MINE, flags, SECONDS)) for case, made in work]
    in_turn(jobs, partial(show, mine=MINE), out, options.budget, start)
    if out.exists():
        found = json.loads(out.read_text())
        for families in (MINE, ()):
            print(f"{', '.join(families) or 'any family'}: {summary(found, families)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

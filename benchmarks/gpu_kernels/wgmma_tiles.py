"""Which tiles of warp groups win: many schedules of a few products against XLA and the best of the other family.

    python benchmarks/gpu_kernels/wgmma_tiles.py --out results --only "gemm 384,gemm 4096" --most 20 --budget 200

Needs a GPU of compute capability 9.0. Kernels compile in parallel first; then every case as in `run.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OTHERS = 2  # schedules of the other family


def schedules(case: Any, most: int, tiles: dict[str, list[list[Any]]]) -> list[Any]:
    """Programs of one case, for an H100 or H200: the best by the ranking, or those asked for."""
    from benchmarks.gpu_kernels.run import program_of
    from jcuts.lower.patterns.gemm import as_gemm
    from jcuts.schedule.gpu.candidates import GpuMachine
    from jcuts.schedule.gpu.gemm import mma as gemm_mma
    from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
    from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
    from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile

    program, _ = program_of(case)
    made = None if program is None else as_gemm(program)
    if made is None:
        return []
    machine = GpuMachine.named("H200")
    asked = [t for part, listed in tiles.items() if part in case.name for t in listed]
    if asked:
        found = []
        for rows, columns, terms, along, *more in asked:
            found.append(WgmmaTile(rows, columns, terms, (along, 1), *more).of(made))
        return found + [p for p, _ in gemm_mma.mma_schedules(made, machine, 1)]
    found = [p for p, _ in gemm_wgmma.wgmma_schedules(WgmmaProblem(made, machine), most, alike=True)]
    return found + [p for p, _ in gemm_mma.mma_schedules(made, machine, OTHERS)] if found else []


def compiled(job: tuple[Any, Path]) -> str:
    """Compiles one program into a file; returns what went wrong."""
    from jcuts.base.errors import CompileRejected
    from jcuts.codegen.cuda.compile import compile_program
    from jcuts.codegen.cuda.toolchain.target import CudaTarget
    from jcuts.tune.kernel_file import write_kernel

    program, folder = job
    try:
        write_kernel(folder / f"{program.digest}.kernel", compile_program(program, CudaTarget((9, 0))))
        return ""
    except CompileRejected as error:
        return f"{dict(program.params)}: {str(error)[-160:]}"


def build(programs: Sequence[Any], folder: Path, workers: int, start: float) -> None:
    """Compiles programs into a folder in parallel, and tells of those that are refused. Args: start: of the clock."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        refused = [x for x in pool.map(compiled, [(p, folder) for p in programs], chunksize=2) if x]
    print(f"{len(programs)} kernels, {len(refused)} refused, {time.perf_counter() - start:.0f} s", *refused, sep="\n")


def race(
    work: Sequence[tuple[Any, Sequence[Any]]],
    folder: Path,
    out: Path,
    budget: float,
    start: float,
    hidden: Sequence[str] = ("threads",),
    graphs: bool = False,
) -> None:
    """Times the schedules of cases against XLA, within a budget; shows them, best first.

    Args: work: cases with programs; folder: of their kernels; out: file of the rows, written after every case; budget,
        start: seconds and the clock's start; hidden: parameters that are not shown; graphs: as of `gpu_run.bench`.
    """
    from benchmarks.gpu_kernels import run

    rows: list[dict[str, Any]] = []
    for case, programs in work:
        if time.perf_counter() - start > budget:
            print(f"{case.name}: out of time")
            continue
        built = [p for p in programs if (folder / f"{p.digest}.kernel").exists()]
        row = run.bench(case, folder, 132, 0, (9, 0), built, graphs)
        rows.append(row)
        run.show(row)
        print(f"    {time.perf_counter() - start:.0f} s")
        for found in sorted(row["candidates"].values(), key=lambda c: c.get("median", 1e9)):
            params = {k: v for k, v in found["params"].items() if k not in hidden}
            print(f"    {found.get('median', 0) * 1e6:9.2f} {found['error']:.1e} {params}")
        for why in row["rejected"].values():
            print(f"    rejected {why[:200]}")
        out.write_text(json.dumps(rows, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from benchmarks.gpu_kernels import run
    from benchmarks.gpu_kernels.cases import cases
    from benchmarks.gpu_kernels.paired_timing import options_of

    parser = options_of(
        __doc__, "gpu_groups", most=20, schedules="schedules per case", budget=200.0, only="gemm", what="case"
    )
    parser.add_argument(
        "--tiles",
        type=Path,
        help="JSON: part of a case's name -> [rows, columns, terms, groups, "
        "stages, flight, split, cluster] of every schedule wanted",
    )
    options = parser.parse_args(arguments)
    folder = options.out / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tiles = json.loads(options.tiles.read_text()) if options.tiles else {}
    work = [(c, schedules(c, options.most, tiles)) for c in cases() if run.wanted(c, options.only)]
    work = [(case, programs) for case, programs in work if programs]
    build([p for _, programs in work for p in programs], folder, options.workers, start)
    if not options.build:
        race(work, folder, options.out / "gpu_groups.json", options.budget, start, hidden=("cuda", "threads"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

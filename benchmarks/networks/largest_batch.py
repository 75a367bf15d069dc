"""Largest batch of a training step that fits a memory, by XLA's own account: `jax.jit` and `jcuts.optimize`.

    python benchmarks/networks/largest_batch.py --out DIR [--gigabytes 128] ROW ...      rows as NAME:BATCH:FORM:DTYPE

Both programs are compiled, from shapes alone, for the row's batch and for twice as much.  Peak memory
(``memory_analysis``) grows linearly from there, which proposes a batch; that one is compiled too, and made smaller
until its peak fits.  jcuts chooses kernels by its estimator here (``tune="off"``), the regions that it would replace
in the race's first program; nothing is timed.  With ``--run`` one step of the largest batch of each runs in the end,
in a process whose allocator has that memory and no more.  XLA compiles without its autotuner (``AUTOTUNING``), which
would time candidates in buffers as large as the program's, and takes ten times as long.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import baseline  # noqa: E402
from benchmarks.networks.compiled_program import memory_of, own_arguments  # noqa: E402
from benchmarks.networks.row_driver import Driver, read, script, write  # noqa: E402
from benchmarks.networks.workload_row import Row  # noqa: E402

GIGA = 10**9
GIGABYTES = 128.0
"""Of an H200's 141 GB: what is left beside CUDA's context, cuDNN and the allocator's fragments."""
PROGRAMS = ("jax.jit", "jcuts")
TRIES = 6
"""Batches that are compiled after the first two."""
TOO_MUCH = 1 << 62
"""Bytes of a program that XLA refuses to compile for want of memory."""
ALLOCATOR = 0.95
"""Share of the GPU's memory that the allocator gets: XLA compiles for what it may have."""
NEED = 200.0
"""Seconds that a row is taken to need."""

AUTOTUNING = "--xla_gpu_autotune_level=0"
"""Libraries' algorithms by their own heuristics: their workspaces may differ from an autotuned program's."""
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{ALLOCATOR}",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {AUTOTUNING}".strip(),
}


def compiled_peak(program: str, row: Row, batch: int, *, run: bool = False) -> int:
    """Bytes that the step needs at a batch, arguments and results included. Args: run: also runs it once."""
    import jax

    form = baseline.built(replace(row, batch=batch), False)
    if run:
        arguments = own_arguments(form)
        result = jax.block_until_ready(step_of(program, form)(*arguments))
        return sum(x.nbytes for x in jax.tree.leaves(result))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), form.arguments)
    call = step_of(program, form)
    lowered = call.lower(*shapes) if program == "jax.jit" else call.chosen(*shapes)
    try:
        return memory_of(lowered.compile())["peak"]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return TOO_MUCH


def step_of(program: str, form: Any) -> Any:
    """The step by `jax.jit`, or by jcuts with kernels that the estimator chooses."""
    import jax

    if program == "jax.jit":
        return jax.jit(form.function, donate_argnums=form.donated)
    import jcuts

    return jcuts.optimize(form.function, mode="fusion", tune="off", donate_argnums=form.donated)


def largest(peak: Callable[[int], int], batch: int, limit: float) -> dict[str, Any]:
    """The largest batch whose peak fits, of those that were tried, and all peaks.

    Args: peak: bytes by batch; batch: the first one that is tried; limit: bytes.
    """
    peaks = {b: peak(b) for b in (batch, 2 * batch)}
    for _ in range(TRIES):
        (low, few), (high, many) = sorted((b, p) for b, p in peaks.items() if p < TOO_MUCH)[-2:]
        if many <= few:  # regions that were kernels at the smaller batch are not beyond 2^31 elements
            low, few = 0, 0
        proposed = low + int((limit - few) * (high - low) / (many - few))
        fits = max([0, *(b for b, p in peaks.items() if p <= limit)])
        over = min([b for b, p in peaks.items() if p > limit], default=None)
        if over is not None:
            proposed = (fits + over) // 2 if peaks[over] == TOO_MUCH else min(proposed, over - 1)
        if proposed <= fits:
            break
        peaks[proposed] = peak(proposed)
        if 0.99 * limit <= peaks[proposed] <= limit:
            break
    return {
        "largest": max([0, *(b for b, p in peaks.items() if p <= limit)]),
        "peaks": {str(b): p for b, p in sorted(peaks.items())},
    }


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Both programs' largest batches."""
    limit = options.gigabytes * GIGA
    programs = {}
    for name in options.programs or PROGRAMS:

        def peak(batch: int, name: str = name) -> int:
            found = compiled_peak(name, row, batch)
            print(row, name, batch, found, flush=True)
            return found

        programs[name] = largest(peak, row.batch, limit)
        if options.run:
            programs[name]["ran"] = ran(name, row, programs[name]["largest"], options)
        print(row, name, programs[name], flush=True)
    return {"record": "largest_batch", "row": str(row), "limit_bytes": limit, "programs": programs}


def ran(program: str, row: Row, batch: int, options: argparse.Namespace) -> str:
    """Whether a step ran within the memory: an empty string, or the last line of its error."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    if options.total:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{options.gigabytes / options.total:.4f}"
    words = ["--step", program, "--out", str(options.out), str(replace(row, batch=batch))]
    done = subprocess.run(script("largest_batch.py", *words), env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="NAME:BATCH:FORM[:DTYPE], with the first batch tried")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="of memory, 10^9 bytes (%(default)s)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, help="of the two, if not both")
    parser.add_argument("--run", action="store_true", help="runs a step of the largest batches")
    parser.add_argument("--total", type=float, help="gigabytes of the GPU, with --run: its allocator gets their share")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds per row (%(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    rows = [Row.parse(text) for text in options.rows]
    if options.step:
        compiled_peak(options.step, rows[0], rows[0].batch, run=True)
        return 0
    if options.child:
        write(options.out / f"largest_{rows[0].file}", measure(rows[0], options) | baseline.environment())
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(options.out, 1e9, options.budget, ENVIRONMENT)
    for row in rows:
        words = ["--child", "--out", options.out, "--gigabytes", options.gigabytes, *(["--run"] * options.run)]
        words += ["--total", options.total] if options.total else []
        words += ["--programs", *options.programs, "--"] if options.programs else []
        target = options.out / f"largest_{row.file}"
        if not read(target):
            driver.run_row(target, script("largest_batch.py", *words, row), NEED)
    return min(1, driver.failed)


if __name__ == "__main__":
    sys.exit(main())

"""Bit-for-bit repeatability of training in several processes: `jax.jit` and `jcuts.optimize` from the same start.

    python benchmarks/training_equivalence/repeatability.py --out DIR [--network NAME ...] [--deterministic]

Every program runs ``--steps`` steps in ``--processes`` processes, one after the other, and the parameters after the
last step are compared with those of the process before.  `jcuts` tunes in its first process into an empty database;
its second one finds that, and measures what ``JCUTS_TUNE_SECONDS`` left, so that kernels, and roundings, may change.
"Cached" processes (``tune="cached"``) run on the choices that are then in the database; the first of them is compared
with the last one that tuned.  ``--deterministic`` does it all again with XLA's flag ``xla_gpu_deterministic_ops``; the
median time of a step (each waited for) says what that flag costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks.compiled_program import own_arguments  # noqa: E402
from benchmarks.training_equivalence import network_processes, training_networks  # noqa: E402
from benchmarks.training_equivalence.training_networks import Network, Training  # noqa: E402

FLAG = "--xla_gpu_deterministic_ops=true"
CACHED = "jcuts, cached"
PROGRAMS = {"jax.jit": "auto", "jcuts": "auto", CACHED: "cached"}
"""Value of ``tune`` by program."""
POOL = 4
"""Batches that a run goes through over and over."""


def run_steps(network: Network, job: dict[str, Any]) -> dict[str, Any]:
    """One process's steps: seconds of each after the first, decision; writes the parameters to the job's file."""
    import jax
    import numpy as np

    form = network.form(dry=job["dry"])
    call = training_networks.program(job["program"], form, job["mode"], PROGRAMS[job["program"]])
    run = Training(call, form, own_arguments(form), training_networks.batches(form, POOL))
    seconds = []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        result = jax.block_until_ready(run.step())
        seconds.append(time.perf_counter() - start)
    np.savez(job["file"], *map(np.asarray, jax.tree.leaves(result[0])))
    said = {} if job["program"] == "jax.jit" else training_networks.chosen(call, form.arguments)
    return {"first call seconds": seconds[0], "ms": 1e3 * statistics.median(seconds[1:] or seconds), **said}


def process(network: str, job: dict[str, Any], cache: Path) -> dict[str, Any]:
    """A process of its own that runs the steps of a job. Args: cache: folder of its tuning database."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG if job['deterministic'] else ''}".strip()
    environment = {**os.environ, "JCUTS_CACHE_DIR": str(cache), **({"XLA_FLAGS": flags} if flags else {})}
    command = [sys.executable, __file__, "--out", ".", "--child", network, "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def difference(one: Path, other: Path) -> dict[str, Any]:
    """Whether the arrays of two files are equal bit for bit; how many are not, and the largest relative L2 distance."""
    import numpy as np

    unequal, worst = 0, 0.0
    with np.load(one) as a, np.load(other) as b:
        for name in a.files:
            if a[name].tobytes() != b[name].tobytes():
                x, y = a[name].astype(np.float64), b[name].astype(np.float64)
                unequal, worst = unequal + 1, max(worst, float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)))
        return {"equal": unequal == 0, "unequal leaves": unequal, "leaves": len(a.files), "l2": worst}


def measure(network: Network, options: argparse.Namespace) -> dict[str, Any]:
    """All processes of one network, one after the other."""
    folder = options.out / f"repeatability_{network.stem}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found: dict[str, Any] = {}
    for deterministic in (False, True) if options.deterministic else (False,):
        files: list[Path] = []
        for program in PROGRAMS:
            rows, before = [], files[-1:] if program == CACHED else []
            files = [folder / f"{program}_{number}.npz" for number in range(options.processes)]
            for file in files:
                job = {"program": program, "steps": options.steps, "dry": options.dry, "mode": options.mode}
                job |= {"file": str(file), "deterministic": deterministic}
                rows.append(process(options.child, job, folder / f"tuning_{deterministic}"))
            found[f"{program}, deterministic ops" if deterministic else program] = {
                "processes": rows,
                "ms": statistics.median(row["ms"] for row in rows),
                "differences": [difference(a, b) for a, b in itertools.pairwise([*before, *files])],
            }
    shutil.rmtree(folder)
    return {"steps": options.steps, "flag": FLAG if options.deterministic else None, "programs": found}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = network_processes.parser_of(__doc__, tune=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="of each program (%(default)s)")
    parser.add_argument("--deterministic", action="store_true", help=f"also with XLA_FLAGS={FLAG}")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.job:
        print(json.dumps(run_steps(Network.parse(options.child), options.job)))
        return 0
    found = network_processes.run(__file__, parser, measure, argv)
    for name, row in found.items():
        for program, made in row.get("programs", {}).items():
            words = ["equal" if d["equal"] else f"{d['l2']:.1e} apart" for d in made["differences"]]
            print(f"{name}, {program}: {', '.join(words)}; {made['ms']:.2f} ms per step")
    return int(any("programs" not in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())

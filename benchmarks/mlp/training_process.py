"""One process of data-parallel training by `jax.distributed`: rows of every mini-batch, gradients by an all-reduce.

    python training_process.py JOB.json RANK

`training.py` writes the job and starts the processes.  Every process reads the data set, keeps its own rows of each
mini-batch on its device, and writes FOLDER/RANK.npz (trained weights) and FOLDER/RANK.json (seconds).  A job of one
process runs without `jax.distributed`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks.mlp.digits import load_digits  # noqa: E402
from benchmarks.mlp.jax_network import AXIS, SHARDED, make_step, weighted_batches  # noqa: E402
from benchmarks.mlp.network import Params, Training, initial  # noqa: E402

Batches = list[tuple[jax.Array, ...]]


def put(value: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """A global array, of which this process puts its own part on its device."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def trained(data: Batches, how: Training, step: Any, mesh: Mesh, specs: Params) -> Params:
    """Weights after all epochs, waited for."""
    start = initial(how.hidden, data[0][0].shape[1])
    params = Params(*(put(p, mesh, spec) for p, spec in zip(start, specs, strict=True)))
    for _ in range(how.epochs):
        for part in data:
            params = step(params, *part)
    return jax.block_until_ready(params)


def pin(rank: int, processes: int) -> None:
    """Binds this process to its share of the cores, as ``mpirun --bind-to core`` does; shares overlap if they must."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank::processes] if processes <= len(cores) else {cores[rank % len(cores)]})


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("rank", type=int)
    args = parser.parse_args()
    job, rank = json.loads(args.job.read_text(encoding="utf-8")), args.rank
    pin(rank, job["processes"])
    jax.config.update("jax_enable_x64", True)
    if job["processes"] > 1:
        jax.distributed.initialize(f"localhost:{job['port']}", job["processes"], rank)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    by_rows = job["parallelism"] == "data"
    specs = Params(*[PartitionSpec()] * 4) if by_rows else SHARDED
    rows = PartitionSpec(AXIS) if by_rows else PartitionSpec()
    digits = load_digits(Path(job["digits"]))
    for mode, settings in job["modes"].items():
        how = Training(**settings)
        parts = weighted_batches(digits.x, digits.y, how.batch, job["processes"] if by_rows else 1)
        data = [tuple(put(a, mesh, rows) for a in part) for part in parts]
        step = make_step(how, job["engine"], mesh, job["parallelism"], **job["options"])
        start = time.perf_counter()
        # One full and one last mini-batch: both shapes compile here, and jcuts tunes.
        trained([data[0], data[-1]], replace(how, epochs=1), step, mesh, specs)
        ready = time.perf_counter()
        params = trained(data, how, step, mesh, specs)
        seconds = {"first_calls": ready - start, "training": time.perf_counter() - ready}
        shapes = sorted({part[0].addressable_shards[0].data.shape[0] for part in data})
        folder = Path(job["folder"])
        np.savez(folder / f"{mode}_{rank}.npz", *process_allgather(params, tiled=True))
        facts = {"seconds": seconds, "local_rows": shapes, "devices": len(jax.devices())}
        if job["engine"] == "jcuts":
            decision = step.decision(params, *data[0])
            kernels = step.chosen(params, *data[0]).as_text().count("stablehlo.custom_call @jcuts")
            facts["chosen"] = decision and {"chosen": decision.chosen, "reason": decision.reason, "kernels": kernels}
        (folder / f"{mode}_{rank}.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()

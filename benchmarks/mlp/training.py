"""Data-parallel training of the course report's MLP: `jax.distributed` on 1 to 4 processes against sequential NumPy.

    python benchmarks/mlp/training.py --out DIR                      # grading modes 1 to 3, 1 to 4 processes
    python benchmarks/mlp/training.py --out DIR --digits MNIST_FOLDER --engine jcuts
    python benchmarks/mlp/training.py --out DIR --dry                # tiny: 250 digits, one epoch

Reports, as Table 1 of the report: differences of W and b from the sequential program in the max and L2 norm, times, and
precision on the validation samples; beside them how far ranks differ from each other.  Everything is float64.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.mlp import network  # noqa: E402
from benchmarks.mlp.digits import IMAGES, Digits, load_digits, write_digits  # noqa: E402
from benchmarks.mlp.machine import described, written  # noqa: E402
from benchmarks.mlp.network import GRADING, Params, Training  # noqa: E402

PROCESS = Path(__file__).with_name("training_process.py")
LONGEST = 1800
"""Seconds of one job."""


class TrainingFailed(RuntimeError):
    """A process of a job ended with an error, which the message quotes."""


@dataclass(frozen=True)
class Job:
    """Trainings that one set of processes makes, one after another.

    ``options`` are those of `jcuts.optimize`, for the engine ``jcuts``.  ``parallelism``: "data" divides mini-batches,
    "model" hidden units, whose number then must divide by that of the processes.
    """

    digits: Path
    modes: Mapping[int, Training]
    engine: str = "jit"
    options: Mapping[str, Any] = field(default_factory=dict)
    parallelism: str = "data"


@dataclass(frozen=True)
class Trained:
    """What one mode's training gave: the weights of every rank and the facts of every rank."""

    params: list[Params]
    facts: list[dict[str, Any]]

    @property
    def rank_difference(self) -> float:
        """The largest relative difference of a rank's weights from those of rank 0."""
        return max(network.largest(network.differences(p, self.params[0])) for p in self.params)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def _fail_if(status: Sequence[int | None], logs: Sequence[Path]) -> None:
    """Raises for the first rank that ended by itself with an error; None: it was still running then."""
    for rank, (code, log) in enumerate(zip(status, logs, strict=True)):
        if code:
            raise TrainingFailed(f"rank {rank} ended with {code}:\n{log.read_text(encoding='utf-8')[-2000:]}")


def run(job: Job, processes: int, folder: Path) -> dict[int, Trained]:
    """By mode, what ``processes`` processes trained. Raises: TrainingFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"digits": str(job.digits), "engine": job.engine, "options": dict(job.options), "folder": str(folder)}
    told["parallelism"] = job.parallelism
    told |= {"modes": {mode: asdict(how) for mode, how in job.modes.items()}, "processes": processes}
    (folder / "job.json").write_text(json.dumps(told | {"port": free_port()}), encoding="utf-8")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JCUTS_PROGRESS": "0"}
    environment.pop("XLA_FLAGS", None)  # one device per process
    command = [sys.executable, str(PROCESS), str(folder / "job.json")]
    logs = [folder / f"{rank}.log" for rank in range(processes)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                started.append(subprocess.Popen([*command, str(rank)], stdout=out, stderr=out, env=environment))
        status = _wait(started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    _fail_if(status, logs)
    return {mode: _read(folder, mode, processes) for mode in job.modes}


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit status of all once they have ended, or one with an error (the others would wait for it: None).

    Raises: TrainingFailed: after `LONGEST`.
    """
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        status = [process.poll() for process in started]
        if None not in status or any(status):
            return status
        time.sleep(0.05)
    raise TrainingFailed(f"{len(started)} processes did not end within {LONGEST} s")


def _read(folder: Path, mode: int, processes: int) -> Trained:
    params, facts = [], []
    for rank in range(processes):
        with np.load(folder / f"{mode}_{rank}.npz") as saved:
            params.append(Params(*saved.values()))
        facts.append(json.loads((folder / f"{mode}_{rank}.json").read_text(encoding="utf-8")))
    return Trained(params, facts)


def sequential(digits: Digits, how: Training) -> tuple[Params, dict[str, float]]:
    """The weights that NumPy trains, with seconds and precision."""
    start = time.perf_counter()
    params = network.train(digits.x, digits.y, how)
    seconds = time.perf_counter() - start
    return params, {"seconds": seconds, "precision": validated(params, digits)}


def validated(params: Params, digits: Digits) -> float:
    """Precision on the validation samples."""
    return network.precision(params, digits.x_validation, digits.labels_validation)


def study(job: Job, counts: Sequence[int], work: Path) -> dict[str, Any]:
    """Table 1 of the report: by mode the sequential program, and a row per process count."""
    digits = load_digits(job.digits)
    reference = {mode: sequential(digits, how) for mode, how in job.modes.items()}
    modes: dict[str, Any] = {
        str(mode): {"training": asdict(how), "sequential": reference[mode][1], "parallel": {}}
        for mode, how in job.modes.items()
    }
    for count in counts:
        for mode, found in run(job, count, work / f"processes_{count}").items():
            row = {
                "differences": network.differences(found.params[0], reference[mode][0]),
                "rank_difference": found.rank_difference,
                "precision": validated(found.params[0], digits),
                "seconds": max(f["seconds"]["training"] for f in found.facts),
                "first_calls_seconds": max(f["seconds"]["first_calls"] for f in found.facts),
                "local_rows": found.facts[0]["local_rows"],
                "chosen": found.facts[0].get("chosen"),
            }
            modes[str(mode)]["parallel"][str(count)] = row
            worst = network.largest(row["differences"])
            print(f"mode {mode}, {count} processes: {row['seconds']:.2f} s, {worst:.2e}, {row['precision']:.4f}")
    samples = {"training": len(digits.x), "validation": len(digits.x_validation)}
    return {"engine": job.engine, "samples": samples, "modes": modes}


def main() -> None:
    """Runs the study and writes ``training_ENGINE.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--digits", type=Path, help="folder with MNIST's training files (default: generated digits)")
    parser.add_argument("--count", type=int, default=60000, help="digits to generate")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--modes", type=int, nargs="+", choices=tuple(GRADING), default=tuple(GRADING))
    parser.add_argument("--engine", choices=("jit", "jcuts"), default="jit")
    parser.add_argument("--tune", default="auto", help="of jcuts.optimize")
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    modes = {mode: replace(GRADING[mode], batch=100, epochs=1) if args.dry else GRADING[mode] for mode in args.modes}
    count = 250 if args.dry else args.count
    folder = args.digits or args.out / f"digits_{count}"
    if args.digits is None and not (folder / IMAGES).exists():
        write_digits(folder, count)
    tuning = {"tune": args.tune, "tune_seconds": args.tune_seconds}
    job = Job(folder, modes, args.engine, tuning if args.engine == "jcuts" else {})
    found = study(job, args.processes, args.out / "work") | {"data": "MNIST files" if args.digits else "generated"}
    written(args.out / f"training_{args.engine}.json", described() | found)


if __name__ == "__main__":
    main()

"""Times of convolutions, measured in a child process and kept in the benchmark database.

A candidate that crashes or hangs costs the child, not the user's process: it is left out, and the others are measured
by a new one.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxlib.version

from jcuts.base import knobs
from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.microbatch.benchmark import benchmark
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.table import Micro, Table
from jcuts.tune.pool import Pool
from jcuts.xla import cuda, cudnn, gpus
from jcuts.xla.convolutions import LIBRARY

log = logging.getLogger("jcuts.tune")

SECONDS = 0.3
"""Of measuring per convolution and batch size, shared by all algorithms; as much again for XLA's own."""
MOST_CRASHES = 3
_KERNEL_DRIVER = Path("/sys/module/nvidia/version")


def database_path() -> Path:
    """The user's benchmark database: ``microbatch.sqlite`` below ``JCUTS_CACHE_DIR``."""
    return knobs.current().cache_dir / "microbatch.sqlite"


def this_device(platform: str) -> Device:
    """What times measured here are valid for.  Raises: NativeError: no cuDNN."""
    library = f"cuDNN {cudnn.version()}, jaxlib {jaxlib.version.__version__}"
    if platform == "cpu":
        return Device("host", "none", library)
    try:
        driver = _KERNEL_DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        driver = "CUDA " + ".".join(map(str, cuda.driver_version() or ("unknown",)))
    return Device(gpus.this().name, driver, library)


class Measurer:
    """One device, through one measuring process; a context manager.

    Args: device: what times are recorded for; platform: 'cpu' (a cuDNN on the host) or 'cuda'; limit: workspaces above
        this [B] are not measured; seconds: of measuring per batch size; tolerance: a factor of `convolve.TOLERANCE`
        (times of less exact algorithms belong into a database of their own).
    """

    def __init__(
        self, device: Device, platform: str, *, limit: int | None = None, seconds: float = SECONDS,
        tolerance: float = 1.0,
    ) -> None:  # fmt: skip
        self._device, self.limit, self.seconds, self.tolerance = device, limit, seconds, tolerance
        self.left_out: list[tuple[str, int, str, str]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="jcuts-convolutions-"))
        self._pool = Pool(self._folder, {"measure": 1, "xla": 1}, platform)

    @property
    def device(self) -> Device:
        """What the times are valid for."""
        return self._device

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, convolution: Convolution, batch: int) -> Sequence[Micro]:
        """Every algorithm of cuDNN that runs.  Raises: WorkerFailed: no process can be started, or too many crashed."""
        skip: list[str] = []
        while True:
            request = {"op": "convolve", "limit": self.limit, "skip": skip, "tolerance": self.tolerance}
            answer = self._ask("measure", request, convolution, batch)
            if not isinstance(answer, CandidateRejected):
                self.left_out += [(str(convolution), batch, label, why) for label, why in answer["left_out"]]
                return _micros(answer, batch)
            running = str(answer.values.get("running") or "")
            log.warning("%s, batch %d: %s (%s)", convolution, batch, answer.message, running or "before any algorithm")
            if not running or running in skip or len(skip) >= MOST_CRASHES:
                raise answer
            skip.append(running)

    def library(self, convolution: Convolution, batch: int) -> Sequence[Micro]:
        """XLA's own convolution; nothing if it cannot be measured."""
        answer = self._ask("xla", {"op": "convolve_xla"}, convolution, batch)
        if isinstance(answer, CandidateRejected):
            self.left_out.append((str(convolution), batch, LIBRARY, answer.message))
            return ()
        return _micros(answer, batch)

    def _ask(
        self, group: str, request: dict[str, Any], convolution: Convolution, batch: int
    ) -> dict[str, Any] | CandidateRejected:
        request = {**request, "convolution": convolution.to_json(), "batch": batch, "seconds": self.seconds}
        answer: Any = None
        for _ in range(2):
            answers: list[Any] = []
            self._pool.submit(group, request, knobs.current().tune_timeout_s, answers.append)
            self._pool.drain()
            answer = answers[0] if answers else WorkerFailed("the measuring process gave no answer", reason="start")
            if not isinstance(answer, CandidateRejected) or answer.values.get("reason") != "memory":
                break
            self._pool.abandon()  # what both processes keep is free now
        return answer


def _micros(answer: dict[str, Any], batch: int) -> tuple[Micro, ...]:
    return tuple(
        Micro(batch, m["algorithm"], m["math"], max(1e-9, float(m["seconds"])), int(m["workspace"]))
        for m in answer["micros"]
    )


def measured(
    convolution: Convolution, batch: int, database: Database, measurer: Measurer, *, policy: str = "powerOfTwo",
    library: bool = True,
) -> Table:  # fmt: skip
    """Everything about one convolution, after measuring what is missing: a policy's sizes, and XLA's own of the batch.

    Raises: as `Measurer` and `database.Database`.
    """
    table = benchmark(convolution, batch, database, (measurer,), policy=policy)
    if not library or any(m.algorithm == LIBRARY and m.batch == batch for m in table.micros):
        return table
    mine = [m for m in table.micros if m.batch == batch]
    database.record(measurer.device, convolution, batch, [*mine, *measurer.library(convolution, batch)])
    return database.table(measurer.device, convolution)

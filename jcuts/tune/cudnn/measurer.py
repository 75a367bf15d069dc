"""Measures convolutions in a child process (crash isolation) and stores the times in the benchmark database.

A candidate that crashes or hangs costs the child, not the user's process: it is left out, and the others are measured
by a new one.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jaxlib.version

from jcuts.base import keys, knobs
from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.microbatch.benchmark import Found, benchmark
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import MEMORY, Database, Device
from jcuts.microbatch.sampling_plan import MOST, Slicing, worth_slicing
from jcuts.microbatch.timings import MicroConfig, Table
from jcuts.tune.cudnn.worker import TIMING
from jcuts.tune.parent.worker_pool import WorkerPool
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import LIBRARY

log = logging.getLogger("jcuts.tune")

SECONDS = 0.3
"""Of measuring per convolution and batch size, shared by all algorithms; as much again for XLA's own."""
MOST_CRASHES = 3
SLICED = "slices"
"""The remark that says what was tried in slices."""
LATER = ("memory", "start", "disk")
"""Reasons of failures that are nobody's fault and may be gone tomorrow."""
_KERNEL_DRIVER = Path("/sys/module/nvidia/version")


def database_path() -> Path:
    """The user's benchmark database: ``microbatch.sqlite`` below ``JCUTS_CACHE_DIR``."""
    return knobs.current().cache_dir / "microbatch.sqlite"


def this_device(platform: str, *, accuracy: str = "exact") -> Device:
    """What times measured here are valid for: also how they are taken, and how exact algorithms must be.

    Args: accuracy: of `settings.ACCURACIES`.  Raises: NativeError: no cuDNN.
    """
    method = "graphs" if _in_graphs(platform) else "calls"
    tolerance = {"exact": "tolerance 1"}.get(accuracy, f"accuracy {accuracy}")
    timing = f"{TIMING} in {method}"
    library = keys.convolution_library(str(cudnn_call.version()), jaxlib.version.__version__, timing, tolerance)
    if platform == "cpu":
        return Device("host", "none", library)
    try:
        driver = _KERNEL_DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        driver = "CUDA " + ".".join(map(str, cuda_launcher.driver_version() or ("unknown",)))
    return Device(xla_devices.this().name, driver, library)


def _in_graphs(platform: str) -> bool:
    """Whether calls are timed in CUDA graphs, as they will run."""
    return platform != "cpu" and knobs.current().cudnn_graphs


class Measurer:
    """One device, measured through a child process; a context manager.

    Args: device: what times are recorded for; platform: 'cpu' (a cuDNN on the host) or 'cuda'; limit: workspaces above
        this [B] are not measured; asked: no larger one [B] is worth freeing memory for; seconds: of measuring per batch
        size; accuracy: as the device was made with.
    Attributes: unwanted: algorithms with their maths ("cudnn/FFT tf32") that are not measured; whoever sets it records
        times that are not everything.
    """

    def __init__(
        self,
        device: Device,
        platform: str,
        *,
        limit: int | None = None,
        asked: int | None = None,
        seconds: float = SECONDS,
        accuracy: str = "exact",
    ) -> None:
        self._device, self.limit, self.asked, self.seconds, self.accuracy = device, limit, asked, seconds, accuracy
        self._graphs = _in_graphs(platform)
        self.unwanted: frozenset[str] = frozenset()
        self.left_out: list[tuple[str, int, str, str]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="jcuts-convolutions-"))
        self._pool = WorkerPool(self._folder, {"measure": 1, "xla": 1}, platform)

    @property
    def device(self) -> Device:
        """What the times are valid for."""
        return self._device

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, convolution: Convolution, batch: int) -> Sequence[MicroConfig]:
        """Every algorithm of cuDNN that runs; none, and a remark, where too many crash the process.

        Raises: WorkerFailed: no process can be started, or it fails before any algorithm runs.
        """
        return self._searched(convolution, batch, {"unwanted": sorted(self.unwanted)})

    def slices(self, convolution: Convolution, batch: int, wanted: Sequence[Slicing]) -> Sequence[MicroConfig]:
        """Algorithms in slices of the outputs, each with the first number of them that fits.  Raises: as a call."""
        asked = [
            (one.micro.algorithm.removesuffix(cudnn_call.LAUNCHED), one.micro.math, one.slices, one.limit)
            for one in wanted
        ]
        return self._searched(convolution, batch, {"slices": asked})

    def _searched(self, convolution: Convolution, batch: int, more: dict[str, Any]) -> Found:
        skip: list[str] = []
        while True:
            request = {
                "op": "convolve",
                "limit": self.limit,
                "skip": skip,
                "accuracy": self.accuracy,
                "graphs": self._graphs,
                **more,
            }
            answer = self._ask("measure", request, convolution, batch)
            if not isinstance(answer, CandidateRejected):
                self.left_out += [(str(convolution), batch, label, why) for label, why in answer["left_out"]]
                lacking = answer.get("lacking")
                return Found(_micros(answer, batch), {} if lacking is None else {MEMORY: str(lacking)})
            running = str(answer.values.get("running") or "")
            log.warning("%s, batch %d: %s (%s)", convolution, batch, answer.message, running or "before any algorithm")
            if not running or answer.values.get("reason") in LATER:
                raise answer
            if running in skip or len(skip) >= MOST_CRASHES:
                self.left_out.append((str(convolution), batch, running, answer.message))
                return Found((), {"crashed": f"{running}: {answer.message}"})
            skip.append(running)

    def library(self, convolution: Convolution, batch: int) -> Sequence[MicroConfig]:
        """XLA's own convolution; nothing, and a remark, if it cannot be measured.

        Raises: WorkerFailed: others hold the memory, or no process can be started: a later process may have more luck.
        """
        answer = self._ask("xla", {"op": "convolve_xla"}, convolution, batch)
        if isinstance(answer, CandidateRejected):
            self.left_out.append((str(convolution), batch, LIBRARY, answer.message))
            if answer.values.get("reason") in LATER:
                raise answer
            return Found((), {LIBRARY: answer.message})
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
            if not self._may_fit_alone(answer):
                break
            self._pool.abandon()  # what both processes keep is free now
        return answer

    def _may_fit_alone(self, answer: Any) -> bool:
        """Whether there was too little memory, of which our own processes hold some."""
        if isinstance(answer, CandidateRejected):
            return answer.values.get("reason") == "memory"
        least = answer.get("lacking")
        wanted = least is not None and (self.asked is None or least <= self.asked)
        return wanted and bool(self._pool.workers["xla"])


def _micros(answer: dict[str, Any], batch: int) -> tuple[MicroConfig, ...]:
    return tuple(
        MicroConfig(batch, m["algorithm"], m["math"], max(1e-9, float(m["seconds"])), int(m["workspace"]))
        for m in answer["micros"]
    )


def measured(
    convolution: Convolution,
    batch: int,
    database: Database,
    measurer: Measurer,
    *,
    policy: str = "powerOfTwo",
    library: bool = True,
) -> Table:
    """Everything about one convolution, after measuring what is missing: a policy's sizes, and XLA's own of the batch.

    Raises: as `Measurer` and `database.Database`.
    """
    device = measurer.device
    table = benchmark(convolution, batch, database, (measurer,), policy=policy, limit=measurer.asked)
    remarks = database.remarks(device, convolution, batch)
    if not library or LIBRARY in remarks or any(m.algorithm == LIBRARY and m.batch == batch for m in table.micros):
        return table
    mine = [m for m in table.micros if m.batch == batch]
    own = measurer.library(convolution, batch)
    database.record(device, convolution, batch, [*mine, *own], remarks={**remarks, **getattr(own, "remarks", {})})
    return database.table(device, convolution)


def to_slice(
    convolution: Convolution,
    batch: int,
    limits: Iterable[int],
    precisions: Iterable[str],
    database: Database,
    device: Device,
    *,
    most: int = MOST,
) -> dict[int, list[Slicing]]:
    """Size -> algorithms that slices of the outputs may bring below a limit, and that nobody tried there.

    Args: most: per limit and precision, the most promising ones.
    """
    table, names = database.table(device, convolution), cudnn_call.transforms(convolution.kind)
    names += tuple(name + cudnn_call.LAUNCHED for name in names)
    found: dict[int, list[Slicing]] = {}
    for limit, precision in itertools.product(limits, precisions):
        for one in worth_slicing(table, batch, limit, algorithms=names, precision=precision)[:most]:
            mine = found.setdefault(one.micro.batch, [])
            tried = database.remarks(device, convolution, one.micro.batch).get(SLICED, "").split(";")
            if one not in mine and one.text not in tried:
                mine.append(one)
    return {size: wanted for size, wanted in found.items() if wanted}


def measured_in_slices(
    convolution: Convolution,
    batch: int,
    limits: Sequence[int],
    precisions: Sequence[str],
    database: Database,
    measurer: Measurer,
    *,
    most: int = MOST,
) -> Table:
    """Everything about one convolution, after measuring what `to_slice` names.

    Raises: as `Measurer`, where later may be better; otherwise what fails is not tried again.
    """
    device = measurer.device
    for size, wanted in to_slice(convolution, batch, limits, precisions, database, device, most=most).items():
        try:
            made = measurer.slices(convolution, size, wanted)
        except CandidateRejected as error:
            if error.values.get("reason") in LATER:
                raise
            made = Found(())
        fresh = {(m.algorithm, m.math): m for m in made}
        known = {(m.algorithm, m.math): m for m in database.table(device, convolution).micros if m.batch == size}
        remarks = dict(database.remarks(device, convolution, size))
        tried = [*filter(None, remarks.get(SLICED, "").split(";")), *(one.text for one in wanted)]
        remarks |= {SLICED: ";".join(tried)}
        database.record(device, convolution, size, [*{**known, **fresh}.values()], remarks=remarks)
    return database.table(device, convolution)

"""Fills the benchmark database: measures the micro-batch sizes of a policy, on one device or on several equal ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from jcuts.base.errors import UsageError
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database, Device
from jcuts.microbatch.errors import ForeignDeviceError
from jcuts.microbatch.timings import MicroConfig, Table, policy_sizes, usable_sizes


class Found(tuple[MicroConfig, ...]):
    """A measurer's result, with remarks for the database (`Database.record`)."""

    remarks: Mapping[str, str]

    def __new__(cls, micros: Iterable[MicroConfig], remarks: Mapping[str, str] | None = None) -> Found:
        """A tuple with an attribute."""
        made = super().__new__(cls, tuple(micros))
        made.remarks = dict(remarks or {})
        return made


class Measurer(Protocol):
    """Measures on one device.

    Called with a convolution and a batch size it returns every micro-configuration that runs there (maybe none).
    Algorithms may come from several sources (a library's, XLA's, jcuts' own): their names tell them apart.
    """

    @property
    def device(self) -> Device:
        """The device identity that the times are valid for."""
        ...

    def __call__(self, convolution: Convolution, batch: int) -> Sequence[MicroConfig]: ...


def benchmark(
    convolution: Convolution,
    batch: int,
    database: Database,
    measurers: Sequence[Measurer],
    *,
    policy: str = "powerOfTwo",
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Measures the missing micro-batch sizes of a policy and returns all known times.

    The sizes are dealt to the measurers as they come free, the largest first; each is stored as soon as it is measured,
    so an interrupted benchmark goes on where it was.

    Args: measurers: one per device, all of one kind; limit: workspace that is asked for [B]: times that lack only
    larger ones are complete; progress: called with (sizes done, sizes to do).
    Raises: UsageError without measurers; ForeignDeviceError if they are not of one kind; what a measurer raises.
    """
    if not measurers:
        raise UsageError("a benchmark needs at least one device")
    device = measurers[0].device
    for other in measurers[1:]:
        if other.device != device:
            raise ForeignDeviceError(
                f"{other.device} cannot share a benchmark with {device}", device=str(other.device), known=(str(device),)
            )
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    sizes = usable_sizes(policy_sizes(policy, batch), batch, convolution.unit)
    missing = database.missing(device, convolution, sizes, limit=limit)
    for size in reversed(missing):
        todo.put(size)
    failures: list[BaseException] = []
    done = 0
    lock = threading.Lock()

    def work(measurer: Measurer) -> None:
        nonlocal done
        while not failures:
            try:
                size = todo.get_nowait()
            except queue.Empty:
                return
            try:
                micros = measurer(convolution, size)
                with lock:
                    database.record(device, convolution, size, micros, remarks=getattr(micros, "remarks", {}))
                    done += 1
                    if progress is not None:
                        progress(done, len(missing))
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(measurer,), daemon=True) for measurer in measurers[1:]]
    for thread in threads:
        thread.start()
    work(measurers[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return database.table(device, convolution)

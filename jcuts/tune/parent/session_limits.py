"""Resource limits of a tuning session, and who is told how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jcuts.tune import time_budget


class Progress(Protocol):
    """Callback interface for a session's progress."""

    def update(self, stage: str, done: int, total: int, name: str) -> None:
        """``stage`` is 'wait', 'compile', 'check' or 'measure'; ``done`` of ``total`` of that stage; what is next."""
        ...


@dataclass(frozen=True)
class TuningBudget:
    """Resource limits of a session.

    Attributes:
        seconds: sampling time per candidate [s].
        finalists: kernels that are timed against XLA after the quick screening.
        patience: most seconds to wait for another process that is measuring, `JCUTS_LOCK_PATIENCE_S` by default.
        timeout: seconds one candidate may take, `JCUTS_TUNE_TIMEOUT_S` by default.
        workers: compiling processes, `JCUTS_COMPILE_WORKERS` or one per core by default.
        seed: of the check inputs, `JCUTS_SEED` by default.
        checks_last: whether candidates are timed before they are checked; None: on GPUs.
        time: wall time for all of it; without a limit every candidate is measured.
    """

    seconds: float = 0.15
    finalists: int = 3
    patience: float | None = None
    timeout: float | None = None
    workers: int | None = None
    seed: int | None = None
    checks_last: bool | None = None
    time: time_budget.TimeBudget = time_budget.UNLIMITED

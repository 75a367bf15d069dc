"""Progress display of the first call's tuning: bars in a terminal, a line in the log elsewhere.

A callback set by `tune.session.set_progress` replaces it.  ``JCUTS_PROGRESS=0`` turns it off.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jcuts.base import knobs
from jcuts.tune import session, time_budget

log = logging.getLogger("jcuts")

BARS_AFTER = 3.0
"""A session that is over sooner [s] shows nothing."""
LINE_AFTER = 10.0
STAGES = {"wait": "wait for other processes", "compile": "compile", "check": "check", "measure": "measure"}


class Watch:
    """Progress of tuning one function (a `tune.parent.tuner.Progress`).

    Args:
        name: the user's function.
        terminal: whether standard error can show bars.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, *, terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.terminal, self.clock = name, terminal, clock
        self.start = clock()
        self.kernels = 0
        self.told = False
        self.state: dict[str, tuple[int, int]] = {}
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}

    def update(self, stage: str, done: int, total: int, name: str) -> None:
        """``done`` of ``total`` of ``stage``."""
        if not self.state:
            log.info("tuning %s", self.name)
        self.state[stage] = (done, total)
        if stage == "compile":
            self.kernels = max(self.kernels, total)
        waited = self.clock() - self.start
        if self.terminal:
            if waited >= BARS_AFTER:
                self._draw()
        elif waited >= LINE_AFTER and not self.told and stage != "wait":
            self.told = True
            log.warning(
                "tuning %d kernels for %s, first call only%s; cached in %s.  %s make it shorter "
                "(JCUTS_PROGRESS=0: no such line)",
                self.kernels,
                self.name,
                _limit(),
                knobs.current().cache_dir,
                _shorter(),
            )

    def close(self) -> None:
        """Takes the bars away."""
        if self.bars is not None:
            self.bars.stop()
            self.bars = None
        if self.state:
            log.info("tuned %s in %.1f s", self.name, self.clock() - self.start)

    def _draw(self) -> None:
        if self.bars is None:
            from jcuts.report.rich_tables import progress_bars

            self.bars = progress_bars(f"tuning {self.name} (first call only)")
            self.bars.start()
        for stage, (done, total) in self.state.items():
            if stage not in self.tasks:
                self.tasks[stage] = self.bars.add_task(STAGES.get(stage, stage), total=total)
            self.bars.update(self.tasks[stage], completed=done, total=total)


def _limit() -> str:
    budget = time_budget.current()
    return f", for {budget.seconds:g} s at most (tune_seconds, JCUTS_TUNE_SECONDS)" if budget.is_limited else ""


@contextlib.contextmanager
def shown(name: str) -> Iterator[None]:
    """Tuning inside the block is told to the user, unless somebody else is told already."""
    if session.progress() is not None or not knobs.current().progress:
        yield
        return
    watch = Watch(name, terminal=_is_terminal())
    session.set_progress(watch)
    try:
        yield
    finally:
        session.set_progress(None)
        watch.close()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False


def _shorter() -> str:
    """What makes tuning shorter and is not set."""
    mine, usual = knobs.current(), knobs.parse({})
    ways = [f"JCUTS_{n.upper()}=2" for n in ("max_candidates", "top_percent") if getattr(mine, n) == getattr(usual, n)]
    return " or ".join(filter(None, (", ".join(ways), 'tune="cached"')))

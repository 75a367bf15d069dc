"""Which kernels a random program runs: random schedules, covers, machines and pieces of the batch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from jcuts.base import knobs
from jcuts.fusion.partition_space import CPU_OPTIONS, Incumbent, SpaceOptions, explore
from jcuts.pipeline import computation, kernel_selection
from jcuts.pipeline import passes as pipeline_passes
from jcuts.pipeline.state import State
from jcuts.schedule.cpu import loop_candidates


class Watch(logging.Handler):
    """Remembers warnings: a kernel that does not compile is left to XLA with one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "jcuts.fusion.exact_cover":  # a cover that is not the best one is still a cover
            self.messages.append(record.getMessage())


def other_cover(level: computation.Computation, rng: np.random.Generator, options: SpaceOptions = CPU_OPTIONS) -> None:
    """Half of the levels get a random cover out of the partition search's, as if other subsets had been faster.

    Args: options: of the platform's search.
    """
    if rng.random() < 0.5 or not level.graph.nodes:
        return
    space = explore(level.graph, Incumbent(level.grouping.subsets), options)
    times = {subset: float(rng.uniform(1e-6, 1e-4)) for subset in space.estimates}
    level.set_partition(
        (members, space.programs[members])
        for members in space.best_measured_partition(times)
        if members in space.programs
    )


@contextlib.contextmanager
def choosing(choose: Callable[[computation.Computation], None]) -> Iterator[None]:
    """Within it ``choose`` sets regions and winners in place of the passes from 'partition' to 'search'."""

    def partition(state: State) -> State:
        choose(state.top)
        return replace(state, partition=kernel_selection.Partition(state.top, state.settings, state.platform))

    unchanged = dict.fromkeys(("collect", "tune", "resolve", "search"), lambda state: state)
    passes = pipeline_passes.with_substitutes({"partition": partition, **unchanged})
    with mock.patch.object(pipeline_passes, "PASSES", passes):
        yield


@contextlib.contextmanager
def every_kernel(seed: int) -> Iterator[tuple[list[computation.Computation], Watch]]:
    """Every subset runs a jcuts kernel with a random one of its candidate schedules; gives the plans made."""
    rng = np.random.default_rng([seed, 4])
    planned: list[computation.Computation] = []

    def choose(top: computation.Computation) -> None:
        planned.append(top)
        for level in top.walk():
            other_cover(level, rng)
        computation.add_candidates(subset for level in top.walk() for subset in level.subsets)
        chosen: dict[str, Any] = {}
        for level in top.walk():
            for subset in level.subsets:
                place = 0 if rng.random() < 0.4 else int(rng.integers(len(subset.ranked)))
                subset.chosen = chosen.setdefault(subset.identity, subset.ranked[place][0])
                subset.origin = "estimated"

    watch = Watch()
    logger = logging.getLogger("jcuts")
    logger.addHandler(watch)
    small = 200 if rng.random() < 0.5 else loop_candidates.SMALL_TASK  # several tasks although the shapes are small
    threads = int(rng.integers(2, 5))
    here = computation.machine()
    machine = loop_candidates.Machine(here.vector_bytes, here.registers, threads, here.l1, here.l2)
    try:
        with (
            choosing(choose),
            mock.patch.object(computation, "machine", lambda: machine),
            mock.patch.object(loop_candidates, "SMALL_TASK", small),
            knobs.scope(chunk=int(rng.integers(1, 4)) if rng.random() < 0.25 else 0),
        ):
            yield planned, watch
    finally:
        logger.removeHandler(watch)
        pipeline_passes.forget()

"""Immutable pass state: the record of one function that passes read and extend, from jaxpr to rebuilt program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jcuts.base import knobs
from jcuts.base.dump import Dump
from jcuts.base.settings import Settings
from jcuts.pipeline.computation import Computation
from jcuts.pipeline.kernel_selection import Partition
from jcuts.pipeline.microbatch_convs import Divided
from jcuts.pipeline.rebuild import Calls
from jcuts.rewrite.pointwise_conv import Convolutions
from jcuts.trace import jaxapi
from jcuts.tune.session import RegionProblems, TunedChoices


@dataclass(frozen=True, eq=False)
class State:
    """State of one function between two passes.

    Attributes:
        original: the jaxpr as it was traced. closed: what the passes have made of it.
        platform: 'cpu' or 'cuda'. may_measure: whether something may be timed now.
        unusable: why there are no kernels here, '' where there are: then convolutions alone are looked at.
        digest: of the original with its constants: what variants of a function have in common is kept by it.
        notes: what to tell the user, in the order of the passes. rewrites: how many were applied.
        convolutions: those that the rewrites made products of; restored: how many of these are convolutions again.
        gains_alone: whether a rewrite of a training step serves XLA's own code.
        chunked: whether the batch runs in chunks.
        computation, partition, problems, tuned, calls: made by the passes 'group', 'partition', 'collect', 'tune'
            and 'compile', None before.
        seconds: wall time by stage.
    """

    original: jaxapi.Closed
    closed: jaxapi.Closed
    name: str
    settings: Settings
    platform: str
    may_measure: bool
    unusable: str
    digest: str
    dump: Dump
    notes: tuple[str, ...] = ()
    rewrites: int = 0
    convolutions: Convolutions = field(default_factory=dict)
    restored: int = 0
    gains_alone: bool = False
    chunked_logits: int = 0
    chunked: bool = False
    division: Divided | None = None
    computation: Computation | None = None
    partition: Partition | None = None
    problems: RegionProblems | None = None
    tuned: TunedChoices | None = None
    calls: Calls = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def noted(self, note: object | None) -> State:
        """With a note, if there is one."""
        return self if note is None else replace(self, notes=(*self.notes, str(note)))

    @property
    def top(self) -> Computation:
        """The function as a computation: from the pass 'group' on."""
        assert self.computation is not None, "the pass 'group' comes first"
        return self.computation

    @property
    def regions(self) -> Partition:
        """The partition: from the pass 'partition' on."""
        assert self.partition is not None, "the pass 'partition' comes first"
        return self.partition

    @property
    def collected(self) -> RegionProblems:
        """The partition's problems: from the pass 'collect' on."""
        assert self.problems is not None, "the pass 'collect' comes first"
        return self.problems


def always(state: State) -> bool:
    """A dump that every function has."""
    return True


@dataclass(frozen=True)
class DumpedStage:
    """A file of ``JCUTS_DUMP``.

    Attributes:
        name: of the stage. text: its readable form. suffix: of the file.
        runs: files by suffix that can be run again (`trace.runnable`, `kernel_ir.run`), made of the state.
        when: whether a function has this stage.
    """

    name: str
    text: Callable[[State], str]
    suffix: str = "txt"
    runs: Callable[[State], Mapping[str, bytes]] = lambda state: {}
    when: Callable[[State], bool] = always


@dataclass(frozen=True)
class Pass:
    """One entry of the list.

    Attributes:
        apply: state in, state out. verify: raises IRError for a state that no right pass makes.
        dumps: what ``JCUTS_DUMP`` shows of its result.
        stage: under which its time is reported, by default its name.
        any_platform: whether it runs where there are no kernels.
        times: whether it may time kernels: such passes that follow each other share their worker processes.
    """

    name: str
    apply: Callable[[State], State]
    verify: Callable[[State], None]
    dumps: tuple[DumpedStage, ...] = ()
    stage: str = ""
    any_platform: bool = False
    times: bool = False

    def __call__(self, state: State) -> State:
        """The pass with all that belongs to it: its time, its dumps, its verifier."""
        if state.unusable and not self.any_platform:
            return state
        start = time.perf_counter()
        state = self.apply(state)
        stage = self.stage or self.name
        spent = state.seconds.get(stage, 0.0) + time.perf_counter() - start
        state = replace(state, seconds={**state.seconds, stage: spent})
        for dumped in self.dumps:
            if state.dump.enabled and dumped.when(state):
                _write(dumped, state)
        if knobs.current().verify:
            self.verify(state)
        return state


def _write(dumped: DumpedStage, state: State) -> None:
    path = state.dump.stage(dumped.name, lambda: dumped.text(state), suffix=dumped.suffix)
    if path is not None:
        state.dump.beside(path, lambda: dumped.runs(state))


def nothing(state: Any) -> None:
    """The verifier of a pass after which there is nothing to verify that was not verified before."""

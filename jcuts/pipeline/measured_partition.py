"""Partition search by measured kernel times (Algorithm 1, subset form): rounds of measurements, then the exact cover.

`fusion.partition_space` says which regions beyond the incumbent promise to save time; they are tuned like all others,
within the open tuning budget, and the exact cover over measured regions takes the incumbent's place.

The incumbent is the greedy cover; on a GPU with moved prologues and epilogues, with blocks, and with what is left to
XLA there (`kernel_selection`).  What XLA keeps on a GPU has no time of its own, since XLA fuses it into what surrounds
it, unless kernels surround it: all else counts nothing, and a region has to pay without it.  Element-wise pieces that
the search cuts off a kernel count what XLA alone takes for them, and stay with XLA where they move little.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jcuts.base.settings import Settings
from jcuts.fusion.dag import NodeSet as Members
from jcuts.fusion.partition_space import CPU_OPTIONS, Incumbent, Space, SpaceOptions, explore
from jcuts.kernel_ir.compulsory_traffic import compulsory_bytes
from jcuts.pipeline.computation import TO_FUSE, Computation, Region, add_candidates
from jcuts.tune import region_problem, session, time_budget
from jcuts.tune.choice import LIBRARY
from jcuts.tune.parent.worker_session import workers_of
from jcuts.xla import devices as xla_devices

log = logging.getLogger(__name__)

ROUNDS = 2
MOST_PER_ROUND = 6
"""Distinct subsets measured per round beyond the incumbent: most of a session's time is compiling candidates."""
GPU_CANDIDATES = 4
"""Kernels tried per such subset on a GPU: enough to be within a few percent of the best of all."""
MOST_TRIES = 8
"""Exact covers per round and level that may turn out to need subsets without a kernel form on a GPU."""
LEAST_MOVED = 1 << 20
"""Bytes below which an element-wise kernel on a GPU takes as long as its launch, whoever makes it."""


@dataclass(frozen=True)
class Summary:
    """Statistics of the search, for the report.

    Attributes:
        origin: 'greedy' (nothing was searched), 'measured' or 'stored' (the other numbers are of when it was searched).
        explored: subsets that could be kernels; measured: of these, how many distinct ones beyond the incumbent were
            measured; greedy_seconds, seconds: time of the incumbent and of the chosen cover [s], by measurements and
            predictions; on a GPU without what XLA fuses.
        is_cut: whether the tuning budget ended the search.
    """

    origin: str
    explored: int = 0
    measured: int = 0
    greedy_seconds: float = 0.0
    seconds: float = 0.0
    is_cut: bool = False

    def __str__(self) -> str:
        if not self.explored:
            return f"partition: {self.origin}"
        kept = "" if self.origin == "measured" else f"{self.origin}; "
        end = ", until the tuning budget was spent" if self.is_cut else ""
        return (
            f"partition: {kept}{self.explored} subsets explored, {self.measured} measured beyond the greedy cover{end}"
            f"; sum of subsets {self.greedy_seconds * 1e6:,.1f} -> {self.seconds * 1e6:,.1f} us"
        )

    def to_json(self) -> dict[str, Any]:
        """What is stored beside a partition; inverse of `stored`."""
        return {k: value for k, value in asdict(self).items() if k != "origin"}

    @classmethod
    def stored(cls, data: Any) -> Summary:
        """Of a partition that was taken from the database, with what its search said if that is known."""
        try:
            return cls("stored", *(kind(data[name]) for name, kind in _STORED.items()))
        except (KeyError, TypeError, ValueError):
            return cls("stored")


_STORED = {"explored": int, "measured": int, "greedy_seconds": float, "seconds": float, "is_cut": bool}


@dataclass(frozen=True)
class SearchResult:
    """What a search found; ``is_complete``: whether it is to be kept: a later call would find nothing else."""

    summary: Summary
    is_complete: bool


NOT_SEARCHED = SearchResult(Summary("greedy"), is_complete=True)


def search(levels: Sequence[Computation], settings: Settings, shares: dict[str, int], device: str = "") -> SearchResult:
    """Gives every level the best cover among measured subsets, which are those that promised to save time.

    Args:
        levels: with their incumbents, which have been tuned. shares: candidates per region identity; those of new
            regions are added. device: the GPU, '' for this CPU.
    """
    run = _GpuSearch(levels, settings, shares, device) if device else _Search(levels, settings, shares)
    return run.run()


def measured_seconds(subset: Region) -> float | None:
    """Time of what was chosen for the subset, kernel or XLA [s]; None if it was not measured."""
    return None if subset.choice is None else subset.choice.seconds(subset.choice.winner)


def library_seconds(subset: Region) -> float | None:
    """Time of XLA's code for the subset [s]; None if it was not measured."""
    return None if subset.choice is None else subset.choice.seconds(LIBRARY)


def postponed(subsets: Sequence[Region]) -> bool:
    """Whether a later call is to measure more: another process was measuring, or the time was up."""
    return any(s.choice is not None and (s.choice.is_postponed or s.choice.is_cut) for s in subsets)


@dataclass
class _Search:
    """The search on a CPU; `_GpuSearch` changes what a GPU has besides.

    Attributes: spaces, times: of every level. tried: distinct subsets measured. cut: whether the time was up.
    """

    levels: Sequence[Computation]
    settings: Settings
    shares: dict[str, int]
    device: str = ""
    spaces: list[Space] = field(default_factory=list)
    times: list[dict[Members, float]] = field(default_factory=list)
    tried: int = 0
    cut: bool = False

    candidates = region_problem.MIN_CANDIDATES
    """Kernels tried per new subset."""
    platform = "cpu"

    def run(self) -> SearchResult:
        """Measures in rounds, and takes the best cover."""
        self.spaces = [self.space(level) for level in self.levels]
        self.times = [{} for _ in self.levels]
        self.note_times()
        found = 0
        for _ in range(ROUNDS):
            fresh = self.affordable(self.promising())
            if not fresh:
                break
            self.measure(fresh)
            noted = self.note_times()
            found += noted
            if not noted:
                break
        for level, space, known in zip(self.levels, self.spaces, self.times, strict=True):
            self.take(level, space, space.best_measured_partition(known))
        summary = Summary(
            "measured",
            sum(len(s.programs) for s in self.spaces),
            self.tried,
            self.total(greedy=True),
            self.total(),
            self.cut,
        )
        log.info("%s", summary)
        return self.result(summary, found)

    def space(self, level: Computation) -> Space:
        """Candidate regions of a level."""
        return explore(level.graph, Incumbent(level.grouping.subsets), CPU_OPTIONS)

    def promising(self) -> dict[str, list[Region]]:
        """Unmeasured regions that could improve the cover, by identity, the most promising first."""
        fresh: dict[str, list[Region]] = {}
        for level, space, known in zip(self.levels, self.spaces, self.times, strict=True):
            for members in self.proposals(level, space, known):
                if level.is_small(space.programs[members]):
                    continue
                subset = level.subset(members, space.programs[members])
                if len(fresh) < MOST_PER_ROUND or subset.identity in fresh:
                    fresh.setdefault(subset.identity, []).append(subset)
        return fresh

    def proposals(self, level: Computation, space: Space, known: dict[Members, float]) -> list[Members]:
        """Subsets of one level, the most promising first."""
        return space.next_to_measure(known, 4 * MOST_PER_ROUND)

    def affordable(self, fresh: dict[str, list[Region]]) -> dict[str, list[Region]]:
        """Those that there is time for: on a CPU the tuner sees to that."""
        return fresh

    def measure(self, fresh: dict[str, list[Region]]) -> None:
        """Tunes regions."""
        new = [subset for group in fresh.values() for subset in group]
        self.tried += len(fresh)
        add_candidates(new, self.platform)
        extra = dict.fromkeys(fresh, self.candidates)
        self.shares.update({k: n for k, n in extra.items() if k not in self.shares})
        session.resolve_choices(new, self.settings, may_measure=True, shares=self.shares, device=self.device)
        self.cut = self.cut or postponed(new)

    def note_times(self) -> int:
        """Takes over what has been measured; returns how many subsets are new."""
        new = 0
        for level, space, known in zip(self.levels, self.spaces, self.times, strict=True):
            for members, subset in level.subset_cache.items():
                seconds = self.seconds_of(level, subset)
                wanted = members in space.estimates and members not in space.fixed and members not in known
                if seconds is not None and wanted:
                    known[members] = seconds
                    new += 1
        return new

    def seconds_of(self, level: Computation, subset: Region) -> float | None:
        """What a subset is taken to cost [s], None if it was not measured."""
        return measured_seconds(subset)

    def take(self, level: Computation, space: Space, cover: Sequence[Members]) -> None:
        """Makes a cover the level's."""
        level.set_partition((members, space.programs[members]) for members in cover if members in space.programs)

    def total(self, greedy: bool = False) -> float:
        """Seconds of the incumbent, or of the best cover."""
        total = 0.0
        for space, known in zip(self.spaces, self.times, strict=True):
            costs = space.known_seconds(known)
            total += sum(costs[s] for s in (space.greedy if greedy else space.best_measured_partition(known)))
        return total

    def result(self, summary: Summary, found: int) -> SearchResult:
        """Args: found: subsets beyond the incumbent that have a time now."""
        return SearchResult(replace(summary, is_cut=False), is_complete=not self.cut)


class _GpuSearch(_Search):
    """The search on a GPU."""

    candidates = GPU_CANDIDATES
    platform = "cuda"

    def space(self, level: Computation) -> Space:
        """Candidate regions of a level around its incumbent."""
        kernels = frozenset[int]().union(*(s.members for s in level.subsets if s.chosen is not None))
        alone = [s for s in level.library if s.ranked and self._has_no_neighbours(level, s, kernels)]
        subsets = [*level.subsets, *alone]
        cover = {s.members for s in subsets}
        others = [s for s in level.subset_cache.values() if s.members not in cover and s.chosen is not None]
        unknown = [s for s in level.subsets if self.seconds_of(level, s) is None]
        incumbent = Incumbent(
            [(s.members, s.program) for s in subsets],
            [(s.members, s.program) for s in others if self.seconds_of(level, s) is not None],
            frozenset(s.members for s in alone),
            frozenset(s.members for s in unknown),
        )
        return explore(level.graph, incumbent, SpaceOptions.on_gpu(xla_devices.machine()))

    @staticmethod
    def _has_no_neighbours(level: Computation, subset: Region, kernels: Members) -> bool:
        """Whether XLA has nothing to fuse an element-wise subset with: kernels make and read all its values."""
        graph, members = level.graph, subset.members
        if any(m not in level.left_out or level.left_out[m].reason != TO_FUSE for m in members):
            return False
        made = {graph.tensors[t].producer for t in graph.subset_inputs(members)} - {None}
        users = {u for t in graph.subset_outputs(members) for u in graph.tensors[t].users} - members
        return made | users <= kernels

    def proposals(self, level: Computation, space: Space, known: dict[Members, float]) -> list[Members]:
        """As on a CPU, without those that turn out to have no kernel form."""
        found: list[Members] = []
        for _ in range(MOST_TRIES):
            found = super().proposals(level, space, known)
            regions = [level.subset(members, space.programs[members]) for members in found]
            add_candidates(regions, self.platform)
            unable = {s.members for s in regions if not s.ranked}
            for members in unable:
                space.forget(members)
                level.subset_cache.pop(members, None)
            found = [members for members in found if members not in unable]
            if not unable:
                break
        return found

    def affordable(self, fresh: dict[str, list[Region]]) -> dict[str, list[Region]]:
        """As many as the tuning budget covers, the most promising first."""
        budget, most = time_budget.current(), len(fresh)
        while most and (budget.is_spent() or not budget.covers(most, most * self.candidates, workers_of())):
            most -= 1
        self.cut = self.cut or most < len(fresh)
        return dict(list(fresh.items())[:most])

    def seconds_of(self, level: Computation, subset: Region) -> float | None:
        """Also None for what was not measured to the end; XLA's time for element-wise pieces that stay with XLA."""
        if subset.choice is None or postponed([subset]):
            return None
        return library_seconds(subset) if self._is_left(level, subset) else measured_seconds(subset)

    @staticmethod
    def _is_left(level: Computation, subset: Region) -> bool:
        """Whether a subset is element-wise and too small to be cut out of XLA's program."""
        moved = compulsory_bytes(subset.program)
        return level.mixed and moved < LEAST_MOVED and not level.has_reduction(subset.members)

    def take(self, level: Computation, space: Space, cover: Sequence[Members]) -> None:
        """Changes the level's regions where the cover differs from the incumbent; all else stays as it was."""
        before = set(space.greedy)
        changed = [members for members in cover if members not in before]
        for members in changed:
            level.leave_equations(members)
        for members in changed:
            if members in space.programs:
                level.merge_into(level.subset(members, space.programs[members]))
        new = set(changed)
        level.leave_to_xla(lambda s: TO_FUSE if s.members in new and self._is_left(level, s) else "")

    def result(self, summary: Summary, found: int) -> SearchResult:
        """What was measured to the end counts; where that is nothing, a later call begins anew."""
        if self.cut and not found:
            return SearchResult(Summary("greedy"), is_complete=False)
        return SearchResult(summary, is_complete=True)

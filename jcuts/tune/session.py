"""Entry point of the autotuner: choices for all regions of one function, from the database, by measuring, or by
estimate.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jcuts.base.errors import IRError
from jcuts.base.settings import Settings
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read
from jcuts.tune import agreed_store, expected_gain, time_budget
from jcuts.tune.baseline.xla_export import with_exports
from jcuts.tune.baseline.xla_profile import RegionProfiler
from jcuts.tune.choice import LIBRARY, Choice
from jcuts.tune.database import Store
from jcuts.tune.parent import extra_kernels
from jcuts.tune.parent.tuner import Progress, TuningBudget, default_store, tune
from jcuts.tune.parent.worker_session import shared_worker_session, workers_of
from jcuts.tune.problem import Problem
from jcuts.tune.problem import label_of as _label
from jcuts.tune.region_problem import candidate_budget, make_problem, with_candidates
from jcuts.tune.row_signature import FOREIGN

__all__ = [
    "RegionProblems",
    "TunedChoices",
    "adopt_choices",
    "candidate_budget",
    "collect_problems",
    "generation",
    "make_problem",
    "progress",
    "resolve",
    "resolve_choices",
    "set_progress",
    "set_store",
    "shared_worker_session",
    "store",
    "tune_problems",
    "tune_together",
    "warm_workers",
]

OF_OTHERS = 10
"""Divisor of what problems of variants are expected to gain that are not expected to win."""
STORED_PROGRAMS = 512  # programs of choices that are kept as they were read

_log = logging.getLogger("jcuts.tune")
_progress: Progress | None = None
_store: Store | None = None
_cut: dict[str, Choice] = {}
"""What the time did not suffice for in this process, by digest: reports say so, the database does not."""


def set_progress(progress: Progress | None) -> None:
    """Who is told how far tuning is (the command line draws bars)."""
    global _progress
    _progress = progress


def progress() -> Progress | None:
    """Who is told how far tuning is."""
    return _progress


def store() -> Store:
    """The user's tuning database; the choices that processes have agreed on, where this thread plans by them."""
    global _store
    if (agreed := agreed_store.current.store) is not None:
        return agreed
    current = default_store() if _store is None else _store
    _store = current
    return current


def set_store(new: Store | None) -> None:
    """Another database (tests); None goes back to the user's."""
    global _store
    _store = new
    _cut.clear()


def generation() -> tuple[int, int]:
    """Changes whenever the database may hold other choices: part of the key of every remembered plan."""
    return store().generation()


@dataclass(frozen=True, eq=False)
class RegionProblems:
    """The tuning problems of several regions, made by `collect_problems`; nothing is compiled or timed yet.

    Attributes:
        regions: see `pipeline.computation.Region`; settings: the user's options; device: the GPU, '' for this CPU.
        shares: candidates per region identity. problems: by region identity.
        further: region and its chosen program -> the programs that run for it in the function.
        certain: programs of other kernels, which nothing is tuned in: they compile beside candidates.
    """

    regions: Sequence[Any]
    settings: Settings
    device: str
    shares: Mapping[str, int]
    problems: Mapping[str, Problem]
    further: Callable[[Any, Program], Iterable[Program]] | None = None
    certain: Sequence[Program] = ()

    @functools.cached_property
    def region_of(self) -> dict[str, Any]:
        """The first region of every problem, by the problem's digest."""
        found: dict[str, Any] = {}
        for region in self.regions:
            found.setdefault(self.problems[region.identity].digest, region)
        return found

    def prepare(self, problem: Problem) -> Problem:
        """A problem with its candidates and XLA's exports: what has to be measured needs them, and only that."""
        region = self.region_of[problem.digest]
        full = with_candidates(problem, region, self.shares[region.identity])
        return with_exports(full, region.closed, platform=problem.platform)

    def programs_of(self, digest: str, chosen: Program) -> list[Program]:
        """The programs that run in the function if a problem's answer is ``chosen``."""
        if self.further is None:
            return []
        mine = [r for r in self.regions if self.problems[r.identity].digest == digest]
        return [program for region in mine for program in self.further(region, chosen)]

    @functools.cached_property
    def gains(self) -> dict[str, float]:
        """Seconds that every problem is expected to save in one call of the function, by its digest."""
        gains: dict[str, float] = {}
        for region in self.regions:
            digest = self.problems[region.identity].digest
            gains[digest] = gains.get(digest, 0.0) + expected_gain.seconds(region, on_gpu=bool(self.device))
        return gains

    def gain(self, digest: str, profile: RegionProfiler | None) -> float:
        """Seconds that a problem is expected to save in one call, by the profile of plain XLA where it has it."""
        region = self.region_of.get(digest)
        baseline = None if profile is None or region is None else profile.seconds(region.closed.jaxpr.eqns)
        if region is None or baseline is None:
            return self.gains.get(digest, 0.0)
        return self.counts[digest] * expected_gain.profiled(region, baseline)

    @functools.cached_property
    def counts(self) -> Counter[str]:
        """How many regions every problem stands for, by its digest."""
        return Counter(self.problems[region.identity].digest for region in self.regions)

    def have_unknown(self) -> bool:
        """Whether the database lacks the answer to any of the problems."""
        return any(store().lookup(problem.digest) is None for problem in self.problems.values())


def collect_problems(
    regions: Sequence[Any],
    settings: Settings,
    *,
    shares: Mapping[str, int] | None = None,
    device: str = "",
    parts: Mapping[str, Sequence[str]] = MappingProxyType({}),
    further: Callable[[Any, Program], Iterable[Program]] | None = None,
    wanted: Collection[str] = (),
) -> RegionProblems:
    """The tuning problems of regions; equal regions have one.

    Args:
        shares: candidates per region identity, which are part of a problem's key; by default in proportion to work.
        device: the GPU that the candidates are for; '' is this CPU.
        parts: identity of a region -> those of others that do the same together, where there are such.
        further: region and its chosen program -> the programs that run for it in the function.
        wanted: identities of regions that are to be kernels even where XLA's code alone is faster.
    """
    used = {**candidate_budget(regions, bool(device)), **(shares or {})} if regions else {}
    problems: dict[str, Problem] = {}
    for region in regions:
        if region.identity not in problems:
            problem = make_problem(region, settings, used[region.identity], device)
            if region.identity in wanted:
                problem = replace(problem, wanted=True)
            if settings.tune == "off":
                problem = with_candidates(problem, region, used[region.identity])
            problems[region.identity] = problem
    for whole, pieces in parts.items():
        if whole in problems and all(piece in problems for piece in pieces):
            digests = tuple(problems[piece].digest for piece in pieces)
            problems[whole] = replace(problems[whole], parts=digests)
    return RegionProblems(regions, settings, device, used, problems, further)


@dataclass(frozen=True)
class TunedChoices:
    """A choice for every problem, by its digest, and the provenance of stored ones (`tune.row_signature`)."""

    choices: Mapping[str, Choice]
    sources: Mapping[str, str]


def tune_problems(collected: RegionProblems, *, may_measure: bool) -> TunedChoices:
    """Chooses a kernel, or XLA, for every problem: from the database, by measuring, or by estimate.

    Without permission to measure, ``tune="auto"`` reads the database like ``tune="cached"``.
    """
    settings = collected.settings
    how = settings if may_measure or settings.tune == "off" else replace(settings, tune="cached")
    problems = list(collected.problems.values())
    if not problems:
        return TunedChoices({}, {})
    sources: dict[str, str] = {}
    choices = tune(
        problems,
        store(),
        settings=how,
        effort=TuningBudget(time=time_budget.current()),
        progress=_progress,
        prepare=collected.prepare,
        sources=sources,
        gain=lambda problem: collected.gains[problem.digest],
    )
    return TunedChoices(_with_cut(choices), sources)


def _with_cut(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """Choices, those that nothing is known of with what this process had no time for."""
    _cut.update({digest: choice for digest, choice in choices.items() if choice.is_cut and choice.origin == "library"})
    nothing = {digest for digest, choice in choices.items() if choice.origin == "library" and not choice.rejections}
    return {digest: _cut.get(digest, choice) if digest in nothing else choice for digest, choice in choices.items()}


def tune_together(
    collections: Sequence[RegionProblems],
    quiet: Callable[[bool], bool] | None = None,
    profile: RegionProfiler | None = None,
    first: RegionProblems | None = None,
) -> None:
    """Tunes the problems of several functions, or of several variants of one, in a single session.

    The answers are in the database: `tune_problems` finds them there.

    Args:
        quiet: whether nothing else of this process uses the GPU; profile: of plain XLA's program (`tuner.tune`).
        first: the variant that is expected to win: where time is limited, the others' own problems come later.
    """
    every = [(problem, made) for made in collections for problem in made.problems.values()]
    owner = {problem.digest: (problem, made) for problem, made in sorted(every, key=lambda entry: entry[0].wanted)}
    if not owner:
        return

    def gain(problem: Problem) -> float:  # only one of the variants will run
        expected = max(made.gain(problem.digest, profile) for made in collections)
        return expected if first is None or problem.digest in first.region_of else expected / OF_OTHERS

    def profiled(digest: str) -> float | None:
        region = owner[digest][1].region_of[digest]
        return None if profile is None else profile.seconds(region.closed.jaxpr.eqns)

    start = time.monotonic()
    # Kernels of many operations take compilers longest: they begin first.
    order = sorted(owner.values(), key=lambda entry: -len(entry[1].region_of[entry[0].digest].closed.jaxpr.eqns))
    tune(
        interleave_conv_problems([problem for problem, _ in order]),
        store(),
        settings=collections[-1].settings,
        effort=TuningBudget(time=time_budget.current()),
        progress=_progress,
        prepare=lambda problem: owner[problem.digest][1].prepare(problem),
        quiet=quiet,
        further=lambda digest, chosen: [p for made in collections for p in made.programs_of(digest, chosen)],
        gain=gain,
        profiled=profiled if profile is not None and profile.is_known else None,
    )
    _log.info("%d problems of all forms: %.2f s", len(owner), time.monotonic() - start)


def adopt_choices(collected: RegionProblems, others: Sequence[RegionProblems]) -> int:
    """Answers problems by what was measured of the same regions among more candidates; gives how many.

    How many candidates a region may have depends on the program that it is part of, and belongs to a problem's key:
    without this the same region of another variant counts as unknown.
    """
    known, count = store(), 0
    for identity, problem in collected.problems.items():
        if known.lookup(problem.digest) is not None:
            continue
        larger = [made for made in others if made.shares.get(identity, 0) > collected.shares[identity]]
        for other in (made.problems[identity] for made in larger):
            choice, source = known.choice(other.digest)
            alike = (other.tolerance, other.device) == (problem.tolerance, problem.device)
            if choice is not None and choice.origin == "measured" and alike and source != FOREIGN:
                known.put(replace(choice, problem=problem.digest), source)
                count += 1
                break
    return count


def warm_workers(collected: RegionProblems) -> None:
    """Starts the open session's processes for a GPU if anything has to be measured: their imports take seconds.

    The kernels that the function needs besides compile first: no candidate is ready.
    """
    if collected.device and collected.have_unknown():
        with shared_worker_session() as workers:
            workers.warm("cuda", workers_of())
            extra_kernels.compile_ahead(workers, collected.certain)


def interleave_conv_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Problems of convolutions spread evenly among the others, else in this order.

    XLA's convolutions wait for one library, which compiles for one at a time; its products wait for the GPU and for
    compilers of its own.  One kind after the other, each would leave idle what the other waits for.
    """
    kinds: list[list[Problem]] = [[], []]
    for problem in problems:
        kinds["conv_general_dilated" in problem.text].append(problem)
    places = [((k + 0.5) / len(kind), problem) for kind in kinds for k, problem in enumerate(kind)]
    return [problem for _, problem in sorted(places, key=lambda place: place[0])]


def resolve(collected: RegionProblems, tuned: TunedChoices) -> None:
    """Sets ``chosen``, ``origin``, ``source`` and ``choice`` of every region (see `pipeline.computation.Region`).

    What has no answer is left to XLA, but for modes that ask for jcuts' kernels, which then follow the estimate.
    """
    for subset in collected.regions:
        problem = collected.problems[subset.identity]
        choice = tuned.choices[problem.digest]
        subset.choice, subset.origin = choice, choice.origin
        subset.source = tuned.sources.get(problem.digest, "")
        subset.chosen = _winner(subset, choice)
        if choice.winner != LIBRARY and subset.chosen is None:
            subset.origin = "library"
        estimated = choice.origin == "library" and not choice.is_cut
        if subset.chosen is None and collected.settings.mode != "mixed" and estimated:
            out = {r.label for r in choice.rejections}
            subset.chosen = next((p for p, _ in subset.ranked if not out or _label(p) not in out), None)
            subset.origin = "library" if subset.chosen is None else "estimated"


def resolve_choices(
    regions: Sequence[Any],
    settings: Settings,
    *,
    may_measure: bool,
    shares: Mapping[str, int] | None = None,
    device: str = "",
) -> dict[str, int]:
    """`collect_problems`, `tune_problems` and `resolve` of regions, one after the other; gives the shares used."""
    collected = collect_problems(regions, settings, shares=shares, device=device)
    resolve(collected, tune_problems(collected, may_measure=may_measure))
    return dict(collected.shares)


def _winner(subset: Any, choice: Choice) -> Program | None:
    """The chosen program: as the choice holds it, else found among the subset's candidates."""
    if choice.winner == LIBRARY:
        return None
    stored = _stored_program(choice.programs.get(choice.winner, ""))
    if stored is not None and _label(stored) == choice.winner:
        return stored
    return {_label(p): p for p, _ in subset.ranked}.get(choice.winner)


@functools.lru_cache(maxsize=STORED_PROGRAMS)
def _stored_program(text: str) -> Program | None:
    """A choice's program; None where it has none. Regions of all variants share choices."""
    try:
        return read(text, signed=True) if text else None  # `tune` has checked the row if it is not signed
    except IRError:  # a person may have edited the row
        return None

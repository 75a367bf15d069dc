"""A limited tuning budget, on a clock of its own: what is measured, in which order, and how a later session goes on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings
from jcuts.tune import time_budget
from jcuts.tune.choice import LIBRARY, OVER_BUDGET, Choice, Measurement
from jcuts.tune.database import Store
from jcuts.tune.parent.compile_backlog import CompileBacklog
from jcuts.tune.parent.job import TuningJob
from jcuts.tune.parent.measure_order import is_close_by_profile
from jcuts.tune.parent.rounds import FIRST_ROUND, by_gain, plan_round, worth_measuring
from jcuts.tune.parent.tuner import TuningBudget, tune
from jcuts.tune.select import keep_xla, over_budget
from jcuts.tune.time_budget import TimeBudget
from tests.tune import objects

pytestmark = pytest.mark.usefixtures("xla_as_shipped", "private_places")

GAINS = {"small": 1.0, "large": 3.0, "middle": 2.0}
KINDS = ("right", "slow", "wrong")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Session:
    """Problems whose preparation takes 10 s of a clock that nothing else moves."""

    def __init__(self, store=None, seconds=math.inf):
        self.store = store or Store(None, device="d", versions="v")
        self.clock, self.prepared = Clock(), []
        self.budget = TimeBudget(seconds, self.clock)

    def prepare(self, problem):
        self.prepared.append(problem.name)
        self.clock.now += 10.0
        return problem

    def tune(self, mode="mixed", gain=None, profiled=None, **more):
        limits = TuningBudget(seconds=0.02, finalists=2, timeout=20.0, workers=2, seed=1, patience=20.0)
        effort = replace(limits, time=self.budget, **more)
        problems = [objects.problem(*KINDS, name=name) for name in GAINS]
        found = tune(
            problems,
            self.store,
            settings=Settings(mode=mode),
            effort=effort,
            prepare=self.prepare,
            gain=gain or (lambda problem: GAINS[problem.name]),
            profiled=profiled,
        )
        return {choice.name: choice for choice in found.values()}

    def stored(self):
        return {name: self.store.lookup(objects.problem(*KINDS, name=name).digest) for name in GAINS}


def labels(choice: Choice) -> tuple[set[str], dict[str, str]]:
    return {m.label for m in choice.measurements}, {r.label: r.error for r in choice.rejections}


COMPLETE = {LIBRARY, "right", "slow"}, {"wrong": "AccuracyRejected"}
FIRST = {LIBRARY, "right", "slow"}, {"wrong": OVER_BUDGET}


@pytest.mark.parametrize("seconds", [math.inf, 1e9])
def test_with_time_enough_everything_is_measured_in_the_order_of_the_caller(seconds):
    session = Session(seconds=seconds)
    found = session.tune()
    assert session.prepared == list(GAINS)
    assert {name: labels(choice) for name, choice in found.items()} == dict.fromkeys(GAINS, COMPLETE)
    assert {name: labels(choice) for name, choice in session.stored().items()} == dict.fromkeys(GAINS, COMPLETE)
    assert not any(choice.is_cut for choice in found.values())


def test_the_time_goes_where_most_is_expected_and_nothing_else_begins():
    session = Session(seconds=12.0)  # enough for one problem, not for a second one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimeBudget, "covers", lambda *_: False)
        found = session.tune()
    assert session.prepared == ["large", "middle"]
    assert labels(found["large"]) == FIRST and found["large"].origin == "measured"
    for name in ("middle", "small"):
        assert found[name].winner == LIBRARY and found[name].is_cut and found[name].unmeasured == len(KINDS)
    assert {name for name, choice in session.stored().items() if choice is not None} == {"large"}


def test_the_next_session_goes_on_where_one_ended(monkeypatch):
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    first = Session(seconds=12.0)
    first.tune()
    second = Session(first.store, seconds=32.0)
    found = second.tune()
    # Those that nothing is known of first, then the third candidate of the best.
    assert second.prepared[:3] == ["middle", "small", "large"]
    assert labels(found["middle"]) == FIRST and labels(found["small"]) == FIRST
    third = Session(first.store)
    assert {name: labels(c) for name, c in third.tune().items()} == dict.fromkeys(GAINS, COMPLETE)
    fourth = Session(first.store)
    assert {name: labels(c) for name, c in fourth.tune().items()} == dict.fromkeys(GAINS, COMPLETE)
    assert fourth.prepared == []


def test_rounds_end_with_what_one_session_finds(monkeypatch):
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    session = Session(seconds=1e6)
    found = session.tune()
    assert session.prepared == ["large", "middle", "small"] * 2
    assert {name: labels(choice) for name, choice in found.items()} == dict.fromkeys(GAINS, COMPLETE)
    assert not any(choice.is_cut for choice in found.values())


def test_what_is_timed_before_it_is_checked_is_checked_when_the_time_is_up(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    session = Session(seconds=12.0)
    found = session.tune(checks_last=True)
    assert session.prepared == ["large", "middle"]
    assert found["large"].origin == "measured" and found["large"].unmeasured == 1
    assert all(m.method != "unchecked" for m in found["large"].measurements if m.label == found["large"].winner)
    assert found["middle"].is_cut and found["small"].is_cut
    found = Session(session.store).tune(checks_last=True)
    assert not any(choice.is_cut for choice in found.values())
    assert {choice.origin for choice in found.values()} == {"measured"}


def test_a_spent_budget_begins_nothing_and_keeps_what_is_known(monkeypatch):
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    first = Session(seconds=12.0)
    before = first.tune()["large"]
    late = Session(first.store, seconds=5.0)
    late.clock.now = 6.0
    found = late.tune()
    assert late.prepared == []
    assert found["large"] == before and found["small"].is_cut and found["small"].origin == "library"


def test_what_was_rejected_before_the_time_was_up_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    monkeypatch.setattr(TuningJob, "kernels_left", _noted(seen := []))
    monkeypatch.setitem(globals(), "KINDS", ("wrong", "right", "slow"))
    first = Session(seconds=12.0)
    found = first.tune()["large"]
    assert labels(found)[1] == {"wrong": "AccuracyRejected", "slow": OVER_BUDGET}
    seen.clear()
    Session(first.store).tune()
    assert ("large", ("right", "slow")) in seen


def _noted(seen):
    was = TuningJob.kernels_left

    def noted(self):
        found = was(self)
        seen.append((self.problem.name, tuple(found)))
        return found

    return noted


# ------------------------------------------------------------ the pieces


def names(problems):
    return [p.name for p in problems]


def test_rounds_go_by_gain_unless_the_time_will_do():
    problems = [objects.problem(*KINDS, name=name, exports=False) for name in GAINS]
    gain = lambda p: GAINS[p.name]  # noqa: E731
    short, long = TimeBudget(1.0, Clock()), TimeBudget(1e6, Clock())
    everything = plan_round(problems, {}, long, 2, gain)
    assert (names(everything.problems), everything.candidates) == (list(GAINS), None)
    first = plan_round(problems, {}, short, 2, gain)
    assert (names(first.problems), first.candidates) == (["large", "middle", "small"], FIRST_ROUND)
    partial = {p.digest: replace(keep_xla(p), rejections=(over_budget("wrong"),)) for p in problems[:2]}
    second = plan_round(problems, partial, short, 2, gain)
    assert (names(second.problems), second.candidates) == (["middle"], FIRST_ROUND)
    third = plan_round(problems[:2], partial, short, 2, gain)
    assert (names(third.problems), third.candidates) == (["large", "small"], None)
    assert names(plan_round(problems, {}, short, 2, None).problems) == list(GAINS)


def test_the_least_gains_are_left_unmeasured():
    problems = [objects.problem(*KINDS, name=name, exports=False) for name in ("a", "b", "c", "d", "e")]
    gains = dict(zip("abcde", (100.0, 1.5, 0.4, 0.0, 50.0), strict=True))

    def kept(share):
        found = worth_measuring(problems, lambda p: gains[p.name], share)
        return "".join(p.name for p in problems if p.digest in found)

    assert kept(2) == "ae" and kept(1) == "abe" and kept(0) == "abce" and kept(50) == "a"
    assert worth_measuring(problems, lambda p: 0.0) == {p.digest for p in problems}
    assert worth_measuring([], lambda p: 0.0) == set()


def test_by_a_profile_what_may_gain_most_is_complete_before_the_rest_begins(monkeypatch):
    monkeypatch.setattr(TimeBudget, "covers", lambda *_: False)
    session = Session(seconds=1e6)
    gains = {"large": 1e-3, "middle": 1e-4, "small": 1e-6}
    found = session.tune(profiled=lambda digest: 1e-3, gain=lambda problem: gains[problem.name])
    assert session.prepared == ["large", "middle", "large", "small", "middle", "small"]
    assert {name: labels(choice) for name, choice in found.items()} == dict.fromkeys(GAINS, COMPLETE)
    assert not any(choice.is_cut for choice in found.values())


def test_without_a_limit_close_cases_of_a_profile_are_measured_again():
    def stored(ours, method="profile"):
        times = {LIBRARY: (1.0, method), "right": (ours, "call")}
        made = tuple(Measurement(label, t, t, t, 5, how) for label, (t, how) in times.items())
        return Choice("p", LIBRARY, "", "measured", made)

    assert is_close_by_profile(stored(0.9)) and is_close_by_profile(stored(1.1))
    assert not is_close_by_profile(stored(0.5)) and not is_close_by_profile(stored(2.0))
    assert not is_close_by_profile(stored(0.9, "call"))
    assert not is_close_by_profile(Choice("p", LIBRARY, "", "library"))


def test_parts_come_behind_what_they_are_parts_of():
    made = {name: objects.problem(*KINDS, name=name, exports=False) for name in ("small", "middle", "large", "tiny")}
    made["large"] = replace(made["large"], parts=(made["tiny"].digest, made["small"].digest, "unknown"))
    order = by_gain(list(made.values()), lambda p: {"large": 4.0, "middle": 3.0, "small": 2.0, "tiny": 1.0}[p.name])
    assert names(order) == ["large", "tiny", "small", "middle"]


class Pool:
    def __init__(self, workers):
        self.sizes, self.queues = {"compile": workers}, {"compile": []}

    def drain(self):
        self.queues["compile"].clear()


@pytest.mark.parametrize(("limited", "queued"), [(False, 5), (True, 2)])
def test_no_more_is_queued_than_there_are_workers(limited, queued):
    pool, late, dropped = Pool(2), [], []
    backlog = CompileBacklog(pool, "compile", limited, lambda: bool(late))  # type: ignore[arg-type]
    for number in range(5):
        backlog.add(
            lambda number=number: pool.queues["compile"].append(number),
            lambda number=number: dropped.append(number),
        )
    assert pool.queues["compile"] == list(range(queued))
    pool.queues["compile"].pop(0)
    backlog.feed()
    assert pool.queues["compile"] == ([1, 2] if limited else [1, 2, 3, 4])
    late.append(True)
    backlog.feed()
    assert dropped == ([3, 4] if limited else [])


def test_a_budget_counts_on_its_clock():
    clock = Clock()
    budget = TimeBudget(20.0, clock)
    assert budget.covers(2, 8, workers=1) and not budget.covers(2, 80, workers=2)
    clock.now = 15.0
    assert (budget.spent(), budget.left(), budget.is_spent()) == (15.0, 5.0, False)
    assert not budget.covers(2, 8, workers=1)
    assert budget.measuring_seconds() == time_budget.PROBLEM_SECONDS
    budget.note_measured(3.0)
    budget.note_measured(1.0)
    assert budget.measuring_seconds() == 2.0
    clock.now = 20.0
    assert budget.is_spent()
    assert not time_budget.UNLIMITED.is_spent() and time_budget.UNLIMITED.covers(10**6, 10**9, workers=1)


def test_a_budget_is_open_inside_its_block():
    assert time_budget.current() is time_budget.UNLIMITED
    with time_budget.spending(TimeBudget(1.0)) as outer:
        with time_budget.spending(TimeBudget(2.0)) as inner:
            assert time_budget.current() is inner
        assert time_budget.current() is outer
    assert time_budget.current() is time_budget.UNLIMITED


def test_time_is_kept_for_whole_programs():
    clock = Clock()
    budget = TimeBudget(60.0, clock)
    budget.reserve(12.0)
    budget.reserve(5.0)
    assert budget.until == budget.left() == 43.0 and not budget.covers(30, 60, 4)
    clock.now += 44.0
    assert budget.is_spent() and budget.spent() == 44.0
    budget.reserve(100.0)
    assert budget.until == 30.0  # at most half of it
    unlimited = TimeBudget()
    unlimited.reserve(5.0)
    assert unlimited.left() == unlimited.until == float("inf")


def test_the_option_goes_before_the_variable_and_tune_has_no_limit_of_its_own():
    with knobs.scope(tune_seconds=7.0):
        assert time_budget.seconds_of(Settings()) == 7.0
        assert time_budget.seconds_of(Settings(tune_seconds=3)) == 3.0
        assert time_budget.seconds_of(Settings(), explicit=True) == math.inf
        assert time_budget.seconds_of(Settings(tune_seconds=0), explicit=True) == 0.0
    with knobs.scope(tune_seconds=None):
        assert (
            time_budget.seconds_of(Settings()) == 60.0 and time_budget.seconds_of(Settings(), explicit=True) == math.inf
        )
        assert time_budget.seconds_of(Settings(tune_seconds=9)) == 9.0
    assert knobs.parse({}).tune_seconds is None and knobs.parse({"JCUTS_TUNE_SECONDS": "inf"}).tune_seconds == math.inf


@pytest.mark.parametrize("value", [-1, math.nan, True, "60", [1]])
def test_impossible_durations_are_refused(value):
    with pytest.raises(UsageError, match="tune_seconds"):
        Settings(tune_seconds=value)


@pytest.mark.parametrize("value", ["-1", "nan", "soon"])
def test_impossible_variables_are_refused(value):
    with pytest.raises(UsageError, match="JCUTS_TUNE_SECONDS"):
        knobs.parse({"JCUTS_TUNE_SECONDS": value})


def test_the_option_is_part_of_no_key():
    assert repr(Settings(tune_seconds=5)) == repr(Settings()) and Settings(tune_seconds=5) != Settings()


def test_a_held_clock_stands_still():
    """What jax.jit's own first call takes does not count."""
    clock = Clock()
    budget = TimeBudget(20.0, clock)
    clock.now += 3.0
    budget.hold()
    budget.hold()  # as good as once
    clock.now += 100.0
    assert (budget.spent(), budget.left(), budget.is_spent()) == (3.0, 17.0, False)
    budget.release()
    budget.release()
    clock.now += 17.0
    assert budget.spent() == 20.0 and budget.is_spent()

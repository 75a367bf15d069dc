"""A stored choice carries its winner: on a warm start no candidate is made, let alone scored."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jcuts.base.settings import Settings
from jcuts.pipeline import computation
from jcuts.pipeline import passes as pipeline_passes
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.trace.inline import inline
from jcuts.tune import session
from jcuts.tune.choice import UNCHECKED, Choice, Measurement, Rejection
from jcuts.tune.database import Store
from jcuts.tune.parent import tuner as parent_tuner
from jcuts.tune.select import select

X = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32)


def subsets(mode="mixed"):
    closed = jax.make_jaxpr(lambda x, w: jax.nn.relu(x @ w + 1).sum(axis=0))(X, X)
    top = computation.group(simplify(inline(closed)), Settings(mode=mode), computation.Fuel())
    computation.add_candidates(top.subsets)
    return top.subsets


@pytest.fixture
def store(monkeypatch):
    store = Store(None, device="test", versions="1")
    monkeypatch.setattr(session, "_store", store)
    monkeypatch.setattr(session, "with_exports", lambda problem, closed, platform: problem)

    def measure(problems, asked, prepare):
        for problem in problems:
            full = prepare(problem)
            labels = ["xla", *(c.label for c in full.candidates)]
            times = tuple(Measurement(label, 1.0 / (k + 1), 0.0, 0.0, 5, "loop") for k, label in enumerate(labels))
            digests = {c.label: c.digest for c in full.candidates}
            choice = Choice(problem.digest, "xla", "", "measured", times, kernels=digests, digests=digests)
            choice = select(full, choice, "mixed")
            programs = {c.label: c.payload for c in full.candidates if c.label == choice.winner}
            choice = Choice.from_json({**choice.to_json(), "programs": programs})
            asked.store.put(choice)
            yield full, choice

    monkeypatch.setattr(parent_tuner, "_measure_all", measure)
    return store


def unranked(monkeypatch):
    monkeypatch.setattr(computation, "_rankings", {})

    def never(*args):
        raise AssertionError("candidates were made")

    monkeypatch.setattr(cpu_candidates, "candidates", never)


@pytest.mark.parametrize("mode", ["mixed", "fusion"])
@pytest.mark.parametrize("may_measure", [True, False])
def test_winners_come_from_the_database(store, monkeypatch, mode, may_measure):
    first = subsets(mode)
    session.resolve_choices(first, Settings(mode=mode), may_measure=True)
    assert all(s.chosen is not None for s in first)
    unranked(monkeypatch)
    again = subsets(mode)
    session.resolve_choices(again, Settings(mode=mode), may_measure=may_measure)
    assert [s.chosen for s in again] == [s.chosen for s in first]
    assert [s.origin for s in again] == ["measured"] * len(first)


def _with_body(text, body):
    data = json.loads(text)
    data["phases"][0]["body"] = body
    return json.dumps(data)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"format": 1}', "another", "body"])
def test_a_damaged_program_is_made_again(store, damage):
    first = subsets()
    session.resolve_choices(first, Settings(), may_measure=True)
    for subset in first:
        choice = subset.choice
        other = next(p.to_text() for p, _ in subset.ranked if p != subset.chosen)
        known = {"another": other, "body": _with_body(choice.programs[choice.winner], "x")}
        texts = {choice.winner: known.get(damage, damage)}
        store.put(Choice.from_json({**choice.to_json(), "programs": texts}))
    again = subsets()
    session.resolve_choices(again, Settings(), may_measure=True)
    assert [s.chosen for s in again] == [s.chosen for s in first]


def test_what_decides_the_candidates_is_part_of_the_key(store, monkeypatch):
    def keys():
        return {session.make_problem(s, Settings(), 4).digest for s in subsets()}

    before = keys()
    assert before == keys()
    assert before.isdisjoint({session.make_problem(s, Settings(), 5).digest for s in subsets()})
    monkeypatch.setenv("JCUTS_TOP_PERCENT", "3")
    assert before.isdisjoint(keys())


def test_progress_knows_how_many_kernels_come():
    problems = [session.make_problem(s, Settings(), 4) for s in subsets()]
    assert [p.expected for p in problems] == [4] * len(problems)
    full = session.with_candidates(problems[0], subsets()[0], 4)
    assert 0 < len(full.candidates) <= 4 and full.digest == problems[0].digest


def test_what_was_found_wrong_is_no_estimate(store):
    """A mode that wants a kernel and may not measure follows the estimate, but past what another mode saw rejected."""
    for subset in (first := subsets("fusion")):
        problem = session.make_problem(
            subset, Settings(mode="fusion"), session.candidate_budget(first)[subset.identity]
        )
        labels = [session._label(p) for p, _ in subset.ranked]
        wrong = Rejection(labels[0], "AccuracyRejected", "wrong")
        times = (Measurement("xla", 1.0, 1.0, 1.0, 5, "chain"), Measurement(labels[1], 2.0, 2.0, 2.0, 5, UNCHECKED))
        store.put(Choice(problem.digest, "xla", "", "measured", times, (wrong,)))
    again = subsets("fusion")
    session.resolve_choices(again, Settings(mode="fusion"), may_measure=False)
    assert [s.chosen for s in again] == [s.ranked[1][0] for s in again]
    assert [s.origin for s in again] == ["estimated"] * len(again)


def test_what_is_gathered_is_measured_in_one_session(store, monkeypatch):
    sessions = []
    measure = parent_tuner._measure_all

    def counted(problems, *more):
        sessions.append([p.digest for p in problems])
        yield from measure(problems, *more)

    monkeypatch.setattr(parent_tuner, "_measure_all", counted)
    first, second = subsets(), subsets("no_fusion")
    collected = [session.collect_problems(some, Settings()) for some in (first, second, first)]
    for some in (first, second):
        session.resolve_choices(some, Settings(), may_measure=False)
        assert [s.chosen for s in some] == [None] * len(some)
    assert not sessions and all(problems.have_unknown() for problems in collected)
    session.tune_together(collected)
    assert len(sessions) == 1 and not any(problems.have_unknown() for problems in collected)
    assert len(set(sessions[0])) == len(sessions[0]) == len({s.identity for s in (*first, *second)})
    for problems in collected[:2]:
        session.resolve(problems, session.tune_problems(problems, may_measure=True))
        assert [s.origin for s in problems.regions] == ["measured"] * len(problems.regions)
    session.tune_together([])
    session.tune_together([session.collect_problems((), Settings())])
    assert len(sessions) == 1


def test_a_plan_by_estimates_is_no_reason_not_to_measure(store):
    """Explaining, or a trace, may come before the first call."""
    pipeline_passes.forget()
    closed = jax.make_jaxpr(lambda x, w: jax.nn.relu(x @ w + 2).sum(axis=0))(X, X)
    for may_measure, origin in ((False, "estimated"), (True, "measured"), (False, "measured")):
        plan = pipeline_passes.optimize_jaxpr(closed, Settings(mode="fusion"), platform="cpu", may_measure=may_measure)
        assert {s.origin for s in plan.report.subsets} == {origin}
    pipeline_passes.forget()

"""A region that another variant measured among more candidates is known, whatever share it has in this one."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jcuts.base.settings import Settings
from jcuts.pipeline import computation
from jcuts.rewrite.simplify import simplify
from jcuts.trace.inline import inline
from jcuts.tune import session
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.database import Store
from jcuts.tune.row_signature import FOREIGN, TUNED

X, W = np.zeros((64, 48), np.float32), np.zeros((48, 32), np.float32)


@pytest.fixture
def store(monkeypatch):
    store = Store(None, device="test", versions="1")
    monkeypatch.setattr(session, "_store", store)
    return store


def regions():
    closed = simplify(inline(jax.make_jaxpr(lambda x, w: jax.nn.relu(x @ w))(X, W)))
    (region,) = computation.group(closed, Settings(), computation.Fuel(), "cpu", wait=True).subsets
    computation.add_candidates([region])
    return [region]


def collected(share, settings=Settings()):  # noqa: B008
    found = regions()
    return session.collect_problems(found, settings, shares={found[0].identity: share})


def answered(made, store, **changes):
    """Stores the measured choice of the problem's first candidate."""
    ((identity, problem),) = made.problems.items()
    full = session.with_candidates(problem, made.regions[0], made.shares[identity])
    best = full.candidates[0]
    times = [Measurement(n, s, s, s, 5, "chain") for n, s in ((best.label, 1e-6), (LIBRARY, 2e-6))]
    choice = Choice(problem.digest, best.label, best.digest, "measured", tuple(times))
    store.put(replace(choice, programs={best.label: best.payload}, **changes.pop("choice", {})), **changes)
    return best


def test_an_answer_among_more_candidates_counts(store):
    larger, smaller = collected(16), collected(2)
    (one,), (other,) = larger.problems.values(), smaller.problems.values()
    assert one.digest != other.digest
    best = answered(larger, store)
    assert session.adopt_choices(smaller, [larger]) == 1
    assert session.adopt_choices(smaller, [larger]) == 0  # it is known now
    choice, source = store.choice(other.digest)
    assert choice is not None and (choice.problem, choice.winner, source) == (other.digest, best.label, TUNED)
    session.resolve(smaller, session.tune_problems(smaller, may_measure=False))
    (region,) = smaller.regions
    assert region.origin == "measured" and region.chosen.digest.startswith(best.label.rpartition("-")[2])


@pytest.mark.parametrize(
    ("shares", "changes", "settings"),
    [
        ((2, 16), {}, Settings()),  # among fewer
        ((16, 2), {"source": FOREIGN}, Settings()),
        ((16, 2), {"choice": {"origin": "library", "winner": LIBRARY}}, Settings()),
        ((16, 2), {}, Settings(tolerance=4.0)),
    ],
)
def test_other_answers_do_not(store, shares, changes, settings):
    measured, asked = collected(shares[0], settings), collected(shares[1])
    answered(measured, store, **changes)
    assert session.adopt_choices(asked, [measured]) == 0
    (problem,) = asked.problems.values()
    assert store.lookup(problem.digest) is None


def test_nothing_is_adopted_from_what_was_not_measured(store):
    assert session.adopt_choices(collected(2), [collected(16)]) == 0

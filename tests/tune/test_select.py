"""Selection, noise margins, interleaving and replay."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import CacheError, UsageError
from jcuts.tune import replay
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.measure.statistics import LEAST_MARGIN, MOST_MARGIN, Samples, interleave, margin, race, standard_error
from jcuts.tune.problem import Candidate, Input, Output, Problem
from jcuts.tune.replay import Recording
from jcuts.tune.select import estimate, fastest, keep_xla, noise_margin, select


def make_problem(*labels, kinds=None):
    kinds = kinds or {}
    candidates = tuple(
        Candidate(kinds.get(label, "program"), f'"{label}"', label, pul=0.1 * n, bound_seconds=1e-3)
        for n, label in enumerate(labels, 1)
    )
    return Problem("id", (Input((2,), "float32"),), (Output((2,), "float32"),), candidates)


def make_choice(problem, seconds, margin=0.01, method="loop"):
    times = tuple(Measurement(label, s, s, s, 9, method) for label, s in seconds.items())
    return Choice(problem.digest, LIBRARY, "", "measured", times, margin=margin)


def test_modes():
    problem = make_problem("a", "b")
    choice = make_choice(problem, {"xla": 1.0, "a": 3.0, "b": 2.0})
    assert select(problem, choice, "mixed").winner == "xla"
    for mode in ("fusion", "no_fusion"):
        chosen = select(problem, choice, mode)
        assert chosen.winner == "b"
        assert chosen.winner_digest == problem.candidate("b").digest
    assert select(problem, make_choice(problem, {"xla": 1.0}), "fusion").winner == "xla"
    with pytest.raises(UsageError):
        select(problem, choice, "best")


def test_compiler_options_compete_only_with_xla():
    problem = make_problem("a", "flags", kinds={"flags": "stablehlo"})
    choice = make_choice(problem, {"xla": 3.0, "a": 2.0, "flags": 1.0})
    assert select(problem, choice, "mixed").winner == "flags"
    assert select(problem, choice, "fusion").winner == "a"


def test_ties_go_to_a_fixed_order():
    problem = make_problem("a", "b", "c")
    first = min((c for c in problem.candidates if c.label != "a"), key=lambda c: c.digest)
    times = {"xla": 2.0, "a": 1.5, "b": 1.0, "c": 1.005}
    winners = set()
    for order in itertools.permutations(times):
        winners.add(select(problem, make_choice(problem, {k: times[k] for k in order}), "mixed").winner)
    assert winners == {first.label}
    assert select(problem, make_choice(problem, {**times, "xla": 1.009}), "mixed").winner == "xla"
    assert select(problem, make_choice(problem, times, margin=0.001), "mixed").winner == "b"


def test_screened_times_do_not_win():
    problem = make_problem("a")
    choice = make_choice(problem, {"xla": 2.0})
    quick = Measurement("a", 0.1, 0.1, 0.1, 3, "screen")
    choice = Choice(problem.digest, LIBRARY, "", "measured", (*choice.measurements, quick), margin=0.01)
    assert select(problem, choice, "mixed").winner == "xla"


@given(st.dictionaries(st.text(min_size=1), st.floats(1e-6, 1.0), min_size=1), st.floats(0, 0.1))
def test_the_winner_is_within_the_margin(times, relative):
    measurements = tuple(Measurement(label, s, s, s, 9, "loop") for label, s in times.items())
    winner = fastest(measurements, sorted(times), relative_margin=relative)
    assert times[winner] <= (1 + relative) * min(times.values())


def test_estimates_decide_without_measuring():
    problem = make_problem("a", "b")
    assert estimate(problem, "mixed").winner == "b"
    assert estimate(problem, "mixed").origin == "estimated"
    assert estimate(make_problem(), "fusion").uses_library
    assert keep_xla(problem).uses_library


def test_margin_grows_with_noise_within_limits():
    assert margin([]) == LEAST_MARGIN
    assert margin([10.0]) == MOST_MARGIN
    quiet = standard_error(1.0, 0.99, 1.01, 100)
    loud = standard_error(1.0, 0.8, 1.2, 25)
    assert quiet < loud
    # 1.2533 * 0.4 / 1.349 / 5
    assert loud == pytest.approx(0.07432, rel=1e-3)


def test_interleave_alternates_and_divides():
    now = [0.0]
    order = []

    def run(name, cost):
        order.append(name)
        now[0] += cost

    samples = interleave(
        {"a": lambda: run("a", 2.0), "b": lambda: run("b", 6.0)},
        seconds=0.0,
        least=4,
        inner={"b": 3},
        clock=lambda: now[0],
    )
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert samples == {"a": Samples((2.0,) * 4), "b": Samples((2.0,) * 4)}


def test_replay_reproduces_the_choice(tmp_path):
    problem = make_problem("a", "b")
    choice = select(problem, make_choice(problem, {"xla": 1.0, "a": 0.5, "b": 0.8}), "mixed")
    recording = Recording("cpu", "v1")
    recording.add(problem, choice)
    recording.save(tmp_path / "session.json")
    again = replay.load(tmp_path / "session.json")
    assert again.entries == recording.entries
    assert again.replay("mixed")[problem.digest].winner == "a" == choice.winner
    guessed = again.replay("mixed", estimates=True)
    assert guessed[problem.digest].winner == "b"
    assert again.loss(guessed) == pytest.approx(0.8 / 0.5)
    assert again.loss(again.replay("mixed")) == 1.0
    assert again.replay("mixed", relative_margin=3.0)[problem.digest].winner == "xla"


def test_recordings_of_different_devices_do_not_merge(tmp_path):
    with pytest.raises(CacheError):
        replay.merge([Recording("a", "1"), Recording("b", "1")])
    problem = make_problem("a")
    one, two = Recording("d", "v"), Recording("d", "v")
    one.add(problem, make_choice(problem, {"xla": 1.0}))
    two.add(problem, make_choice(problem, {"xla": 2.0}))
    (entry,) = replay.merge([one, two]).entries
    assert entry[1].seconds("xla") == 2.0


@pytest.mark.parametrize("text", ["", "[]", '{"jcuts_recording": 2}', '{"jcuts_recording": 1, "entries": [{}]}'])
def test_bad_recordings(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(CacheError):
        replay.load(tmp_path / "bad.json")


def test_problem_round_trip_and_digest():
    problem = make_problem("a", "b").with_exports(b"\0lib", b"ref\xff", True)
    again = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem
    assert again.digest == problem.digest == make_problem("a", "b").digest  # artifacts are not identity
    assert make_problem("a").digest != problem.digest
    lazy = Problem("id", problem.inputs, problem.outputs, space="s")
    assert lazy.digest == Problem("id", problem.inputs, problem.outputs, problem.candidates, space="s").digest


@pytest.mark.parametrize("recipe", ["gaussian", "integers 3", "given"])
def test_bad_recipes(recipe):
    with pytest.raises(UsageError):
        Input((1,), "float32", recipe)


def test_bad_problems():
    with pytest.raises(UsageError):
        make_problem("a", "a")
    with pytest.raises(UsageError):
        make_problem("xla")
    with pytest.raises(UsageError):
        Problem.from_json({"format": 99})
    with pytest.raises(UsageError):
        Candidate("fortran", "", "f")


def _clock(steps):
    """A clock that runs only while a callable does, and callables of these lengths [s]."""
    now = [0.0]

    def advance(lengths):
        values = itertools.cycle(lengths)
        return lambda: now.__setitem__(0, now[0] + next(values))

    return (lambda: now[0]), {name: advance(lengths) for name, lengths in steps.items()}


def test_a_race_spends_its_time_on_those_that_may_win():
    clock, runs = _clock({"slow": [1.0], "a": [0.010, 0.012, 0.009], "b": [0.011, 0.010, 0.0105]})
    found = race(runs, seconds=2.0, most=100, clock=clock)
    assert len(found["slow"].seconds) == 7
    assert len(found["a"].seconds) == len(found["b"].seconds) > 7
    assert found["a"].median == pytest.approx(0.010)


def test_a_race_ends_early_where_one_is_left_and_steady_and_late_where_two_scatter():
    clock, runs = _clock({"slow": [0.2], "fast": [0.1]})
    assert {len(s.seconds) for s in race(runs, seconds=1e9, clock=clock).values()} == {7}
    clock, runs = _clock({"a": [1.0, 2.0, 1.5], "b": [1.4, 1.9, 1.0, 1.2]})
    assert {len(s.seconds) for s in race(runs, seconds=1e9, most=60, clock=clock).values()} == {63}
    assert {len(s.seconds) for s in race(runs, seconds=0.0, clock=clock).values()} == {7}


def test_noise_of_those_who_cannot_win_does_not_widen_the_margin():
    steady = Measurement("a", 1.0, 0.999, 1.001, 50, "loop")
    noisy = Measurement("xla", 9.0, 5.0, 13.0, 7, "loop")
    assert noise_margin((steady, noisy)) == LEAST_MARGIN
    assert noise_margin((steady, Measurement("xla", 1.2, 0.8, 1.6, 7, "loop"))) == MOST_MARGIN


def test_quartiles_by_hand():
    assert Samples((5.0, 1.0, 2.0, 4.0, 3.0)).quartiles == (2.0, 4.0)
    assert Samples((1.0, 3.0)).quartiles == (1.5, 2.5)
    assert Samples((3.0,)).quartiles == (3.0, 3.0)

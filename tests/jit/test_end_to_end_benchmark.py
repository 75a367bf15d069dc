"""The last guard on a clock of its own: no time passes but what the programs say they take."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.jit import end_to_end_benchmark
from jcuts.tune.measure import statistics as measure_statistics

X = np.ones(3, np.float32)


class Clock:
    """Seconds that programs spend; the n-th call of a program takes ``seconds(n)``."""

    def __init__(self):
        self.now = 0.0
        self.calls = {}

    def __call__(self):
        return self.now

    def program(self, name, seconds):
        def call():
            n = self.calls[name] = self.calls.get(name, 0) + 1
            self.now += seconds(n) if callable(seconds) else seconds
            return X

        return call


def decide(clock, **programs):
    calls = {name.replace("__", ":"): clock.program(name, s) for name, s in programs.items()}
    return end_to_end_benchmark.benchmark_variants(calls, lambda: ((), {}), donates=False, clock=clock)


def test_who_is_barred_is_timed_only_as_plain_xla_and_never_chosen():
    clock = Clock()
    calls = {
        name: clock.program(name, s)
        for name, s in {"xla": 0.001, "xla:wide": 0.0005, "jcuts": 0.006, "jcuts:wide": 0.007}.items()
    }
    barred = {"xla": "730 MiB", "xla:wide": "730 MiB"}
    decision = end_to_end_benchmark.benchmark_variants(
        calls, lambda: ((), {}), donates=False, clock=clock, barred=barred
    )
    assert decision.chosen == "jcuts" and "xla:wide" not in clock.calls
    assert decision.rejected["xla"] == "730 MiB" and decision.speed["jcuts"][0] == pytest.approx(1 / 6)

    def broken():
        raise RuntimeError("no memory")

    calls = {"xla": clock.program("xla", 0.001), "jcuts": broken}
    decision = end_to_end_benchmark.benchmark_variants(
        calls, lambda: ((), {}), donates=False, clock=clock, barred={"xla": "730 MiB"}
    )
    assert decision.chosen == "xla"  # nothing else is left


def disturbed(seconds, calls, extra=0.006):
    return lambda n: seconds + (extra if n in calls else 0.0)


@pytest.mark.parametrize("calls", [(2,), (3,), (2, 3), (2, 4, 6)])
def test_slow_warm_runs_do_not_drop_a_fast_program(calls):
    decision = decide(Clock(), xla=0.002, jcuts=disturbed(0.001, calls))
    assert decision.chosen == "jcuts" and not decision.rejected
    assert decision.speed["jcuts"][0] == pytest.approx(2.0) and "2.00 times" in decision.reason


def test_options_are_tried_only_where_they_may_make_up_for_the_difference():
    clock = Clock()
    decision = decide(clock, xla=0.010, xla__wide=0.001, jcuts=0.004, jcuts__wide=0.003)
    assert decision.chosen == "jcuts:wide"
    assert "xla takes 10 ms and jcuts 4 ms" in decision.rejected["xla:wide"] and "xla:wide" not in clock.calls
    decision = decide(Clock(), xla=0.006, xla__wide=0.001, jcuts=0.004, jcuts__wide=0.003)
    assert decision.chosen == "xla:wide"


def test_an_option_program_is_not_dropped_by_one_slow_run_either():
    decision = decide(Clock(), xla=0.004, xla__wide=disturbed(0.002, (2,), 0.1))
    assert decision.chosen == "xla:wide"


def test_a_hopeless_program_is_dropped_with_its_reason():
    clock = Clock()
    decision = decide(clock, xla=0.002, jcuts=0.02)
    assert decision.chosen == "xla" and "10.0 times" in decision.rejected["jcuts"]
    assert "every other program is out: jcuts: 10.0 times" in decision.reason
    assert clock.calls["jcuts"] == 1 + 2 + 6  # the result, two quick runs, and every warm run


def test_long_programs_are_run_a_few_times_and_options_not_at_all():
    clock = Clock()
    decision = decide(clock, xla=20.0, xla__wide=1.0, jcuts=10.0)
    assert decision.chosen == "jcuts" and "not tried" in decision.rejected["xla:wide"]
    assert clock.calls["jcuts"] <= 6 and "xla__wide" not in clock.calls
    assert clock.calls["jcuts"] >= 4  # nothing rests on one run


def test_a_gain_has_to_show_twice():
    # The machine is busy whenever plain XLA is sampled in the first 60 rounds, never afterwards.
    clock = Clock()
    decision = decide(clock, xla=lambda n: 0.004 if 8 < n <= 68 else 0.002, jcuts=0.002)
    assert decision.chosen == "xla" and decision.noisy and not decision.is_final


def test_scattered_runs_make_a_decision_that_is_measured_again():
    rng = np.random.default_rng(0)
    busy = [float(s) for s in rng.uniform(1.0, 3.0, 4000)]
    clock = Clock()
    # A sample is one run of 2 ms and more: half of the budget leaves few of them.
    decision = decide(clock, xla=lambda n: 0.06 * busy[n], jcuts=lambda n: 0.03 * busy[2000 + n])
    assert decision.noisy and not decision.is_final
    assert end_to_end_benchmark.Decision.from_dict(decision.to_dict()) == decision


def test_scatter_does_not_matter_where_the_gain_is_far_beyond_it():
    rng = np.random.default_rng(0)
    busy = [float(s) for s in rng.uniform(1.0, 3.0, 4000)]
    clock = Clock()
    decision = decide(clock, xla=lambda n: 0.06 * busy[n], jcuts=lambda n: 0.006 * busy[2000 + n])
    assert decision.chosen == "jcuts" and decision.is_final
    assert decision.speed["jcuts"][2] > 1.1 * decision.speed["jcuts"][0]


def test_a_gain_beyond_every_doubt_needs_no_second_session():
    clear, close = Clock(), Clock()
    assert decide(clear, xla=0.08, jcuts=0.01).chosen == decide(close, xla=0.08, jcuts=0.04).chosen == "jcuts"
    assert clear.calls["xla"] < close.calls["xla"]


def test_a_quiet_decision_is_final():
    assert decide(Clock(), xla=0.002, jcuts=0.001).is_final


def test_a_second_look_leaves_out_what_cannot_win():
    speed = {"xla": (1.0,) * 3, "xla:wide": (1.0, 0.9, 1.1), "jcuts": (2.0, 1.2, 2.8), "jcuts:wide": (1.8, 1.2, 2.4)}
    names = ["xla", "xla:wide", "jcuts", "jcuts:wide", "jcuts:new"]
    assert end_to_end_benchmark.Decision("jcuts", "r", speed=speed).still_contending(names) == [
        "xla",
        "jcuts",
        "jcuts:wide",
    ]
    assert end_to_end_benchmark.Decision("xla", "r").still_contending(names) == names


def test_noise_is_not_measured_for_ever():
    assert end_to_end_benchmark.Decision("jcuts", "r", noisy=True, tries=end_to_end_benchmark.MOST_TRIES).is_final


def test_the_faster_of_two_programs_wins_unless_they_are_equal():
    wide = decide(Clock(), xla=0.004, jcuts=0.002, jcuts__wide=0.0015)
    assert wide.chosen == "jcuts:wide"
    equal = decide(Clock(), xla=0.004, jcuts=0.002, jcuts__wide=0.00199)
    assert equal.chosen == "jcuts" and "jcuts:wide" in equal.reason and "equal within the noise" in equal.reason
    # Times and speeds belong together: those who compare them find the order of the decision.
    assert all(equal.seconds[n] == pytest.approx(equal.seconds["xla"] / equal.speed[n][0]) for n in equal.seconds)


def test_ratios_are_paired():
    """The machine slows down by a half in the middle: neighbours suffer alike."""
    plain = measure_statistics.Samples((2.0,) * 10 + (3.0,) * 10)
    ours = measure_statistics.Samples((1.0,) * 10 + (1.5,) * 10)
    decision = end_to_end_benchmark._choose({"xla": plain, "jcuts": ours}, {})
    assert decision.chosen == "jcuts" and decision.speed["jcuts"] == (2.0, 2.0, 2.0) and not decision.noisy


def test_donated_arguments_are_copied_outside_the_timed_part():
    clock = Clock()

    def fresh():
        clock.now += 1.0
        return (), {}

    calls = {"xla": clock.program("xla", 0.2), "jcuts": clock.program("jcuts", 0.1)}
    decision = end_to_end_benchmark.benchmark_variants(calls, fresh, donates=True, clock=clock)
    assert decision.chosen == "jcuts" and decision.speed["jcuts"][0] == pytest.approx(2.0)


def test_a_program_that_is_not_right_is_out():
    clock = Clock()
    calls = {name: clock.program(name, seconds) for name, seconds in (("xla", 0.004), ("jcuts/dots", 0.001))}

    def verify(name, reference, result):
        return "is off by 1" if name == "jcuts/dots" else None

    decision = end_to_end_benchmark.benchmark_variants(
        calls, lambda: ((), {}), donates=False, clock=clock, verify=verify
    )
    assert decision.chosen == "xla" and decision.rejected == {"jcuts/dots": "is off by 1"}


def test_options_that_may_gain_everything_are_tried_for_every_program():
    programs = {"xla": 0.02, "xla__graphs": 0.003, "jcuts": 0.004}
    assert "not tried" in decide(Clock(), **programs).rejected["xla:graphs"]
    clock = Clock()
    calls = {name.replace("__", ":"): clock.program(name, seconds) for name, seconds in programs.items()}
    decision = end_to_end_benchmark.benchmark_variants(
        calls, lambda: ((), {}), donates=False, clock=clock, options_gain=float("inf")
    )
    assert decision.chosen == "xla:graphs"


def test_options_make_no_program_less_plain():
    def samples(value):
        return measure_statistics.Samples((value, 1.3 * value, 0.8 * value, value, value) * 2)

    names = {"xla": 4.0, "jcuts": 1.06, "jcuts:graphs": 1.02, "jcuts/scales:graphs": 1.0}
    found = end_to_end_benchmark._choose({name: samples(value) for name, value in names.items()}, {})
    assert found.chosen == "jcuts:graphs" and "equal within the noise" in found.reason
    found = end_to_end_benchmark._choose({name: samples(1.0) for name in ("xla", "xla:graphs")}, {})
    assert found.chosen == "xla"


def results(**values):
    """Programs that take no time and return these, the first as plain XLA."""
    return {name.replace("__", ":"): lambda made=made: made for name, made in values.items()}


NOISE = [np.full((4, 4), 1e-7, np.float32), np.ones(3, np.float32)]
"""A gradient that is zero but for rounding, and one that is not."""


def chosen(second_opinion, **others):
    return end_to_end_benchmark.benchmark_variants(
        results(xla=[jnp.asarray(x) for x in NOISE], **others),
        lambda: ((), {}),
        donates=False,
        seconds=0.01,
        second_opinion=second_opinion,
        options_gain=float("inf"),  # none is left out for two slow runs
    )


def test_what_differs_grossly_is_judged_by_float64():
    asked = []

    def exact(reference, result):
        asked.append(
            [float(np.abs(np.asarray(r) - np.asarray(x)).max()) for r, x in zip(result, reference, strict=True)]
        )
        return "is off by 3 of float64" if asked[-1][1] else None

    noise = [jnp.full((4, 4), -1e-7), jnp.ones(3)]
    wrong = [jnp.full((4, 4), 1e-7), jnp.full(3, 4.0)]
    decision = chosen(exact, jcuts=noise, jcuts__graphs=wrong)
    assert "jcuts" not in decision.rejected and len(asked) == 2
    assert decision.rejected["jcuts:graphs"].endswith("; is off by 3 of float64")
    assert "differs from plain jax.jit" in chosen(None, jcuts=noise).rejected["jcuts"]


@pytest.mark.parametrize(("seconds", "asked"), [(0.0109, 1), (0.0112, 0)])
def test_float64_judges_no_program_that_is_slower_in_two_samples(seconds, asked):
    clock, judged = Clock(), []

    def program(name, seconds, result):
        call = clock.program(name, seconds)

        def go():
            call()
            return result

        return go

    calls = {
        "xla": program("xla", 0.010, [jnp.asarray(x) for x in NOISE]),
        "jcuts": program("jcuts", seconds, [jnp.full((4, 4), -1e-7), jnp.ones(3)]),
    }
    more = {"donates": False, "clock": clock, "second_opinion": lambda *_: judged.append(1)}
    decision = end_to_end_benchmark.benchmark_variants(calls, lambda: ((), {}), **more)
    assert len(judged) == asked and decision.chosen == "xla"
    assert asked or decision.rejected["jcuts"].endswith(
        "it is slower than plain jax.jit in two samples (11.2 ms against 10 ms): not judged by float64"
    )
    barred = {"xla": "730 MiB"}
    decision = end_to_end_benchmark.benchmark_variants(calls, lambda: ((), {}), barred=barred, **more)
    assert decision.chosen == "jcuts" and len(judged) == asked + 1  # nothing else is left


def test_no_second_opinion_makes_a_nan_right():
    nan = [jnp.full((4, 4), np.nan), jnp.ones(3)]
    assert "NaN" in chosen(lambda *_: None, jcuts=nan).rejected["jcuts"]

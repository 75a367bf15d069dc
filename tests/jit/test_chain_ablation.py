"""Chains against single calls: on a clock of its own, and with a CPU that is told to act as a GPU."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts import api
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings, Variant
from jcuts.jit import (
    chain_ablation,
    decision_cache,
    end_to_end_benchmark,
    paired_timing,
    variant_benchmark,
    variant_space,
)
from jcuts.jit.decision import Decision
from jcuts.jit.paired_timing import ms
from jcuts.pipeline import kernel_selection, rebuild
from jcuts.pipeline.computation import Fuel, group
from jcuts.trace import jaxapi
from jcuts.tune.measure import statistics as measure_statistics
from jcuts.xla import devices as xla_devices
from jcuts.xla.chains import fuse as chains_fuse
from tests.jit.test_end_to_end_benchmark import Clock

CHAINED, SINGLE = "jcuts/scales/anchored:graphs", "jcuts/scales/anchored/single:graphs"
FORM = Variant(("scales",), "anchored")
SIZE = variant_benchmark.SIZE_GPU


def decided(seconds=1e-4, **more):
    speed = {"xla": (1.0, 1.0, 1.0), CHAINED: (5.0, 4.0, 6.0)}
    times = {"xla": 5 * seconds, CHAINED: seconds}
    return Decision(CHAINED, "5.00 times as fast", times, 0.02, {}, True, speed, **more)


def compare(chained, single, *, donates=False, verify=None, results=None):
    clock = Clock()
    results = results or {}

    def program(name, seconds):
        call = clock.program(name, seconds)
        return (lambda: results[name]) if name in results else call

    calls = {name: program(name, s) for name, s in (("xla", 5e-4), (CHAINED, chained), (SINGLE, single))}
    found = chain_ablation.ablate_chains(
        decided(), SINGLE, calls, lambda: ((), {}), donates=donates, size=SIZE, verify=verify, clock=clock
    )
    return found, clock


def disturbed(seconds, every, extra):
    return lambda n: seconds + (extra if n % every == 0 else 0.0)


@pytest.mark.parametrize("donates", [False, True])
def test_single_calls_that_are_faster_run(donates):
    found, clock = compare(1.00e-4, 0.96e-4, donates=donates)
    assert found.chosen == SINGLE and found.measured and not found.noisy
    assert found.speed[SINGLE][0] == pytest.approx(5 / 0.96) and found.speed[CHAINED] == (5.0, 4.0, 6.0)
    assert found.seconds[SINGLE] == pytest.approx(0.96e-4) and found.seconds[CHAINED] == 1e-4
    assert "its kernels in chains: 0.1 ms, in single calls: 0.096 ms" in found.reason
    assert "single calls are faster" in found.reason and found.reason.startswith("5.00 times as fast; ")
    assert clock.calls["xla"] == 1 and abs(clock.calls[CHAINED] - clock.calls[SINGLE]) <= 1


@pytest.mark.parametrize(
    ("single", "verdict"),
    [(0.995e-4, "equal within the noise"), (1e-4, "equal within the noise"), (1.2e-4, "chains are faster")],
)
def test_chains_stay_where_single_calls_gain_nothing(single, verdict):
    found, clock = compare(1e-4, single)
    assert found.chosen == CHAINED and found.reason.endswith(verdict)
    assert found.seconds[SINGLE] == pytest.approx(single)
    assert clock.now < 2.0 * chain_ablation.SECONDS  # one session


def test_a_tie_in_noise_keeps_chains():
    rng = np.random.default_rng(3)
    found, _ = compare(lambda n: 1e-4 * (1 + 2 * rng.random()), lambda n: 0.98e-4 * (1 + 2 * rng.random()))
    assert found.chosen == CHAINED


def test_a_gain_has_to_show_twice():
    first = 20 * 80  # calls of a session and the runs before it
    found, clock = compare(lambda n: 1.1e-4 if n < first else 0.9e-4, 1e-4)
    assert found.chosen == CHAINED and "chains are faster" in found.reason
    assert clock.calls[CHAINED] > first  # there was a second session


@pytest.mark.parametrize(
    ("waited", "winner"), [(1.00, SINGLE), (0.985, SINGLE), (0.96, CHAINED), (0.9, CHAINED), (1.1, SINGLE)]
)
def test_what_is_lost_where_calls_are_waited_for_counts_too(monkeypatch, waited, winner):
    seen, real = [], paired_timing.sample

    def sample(calls, fresh_args, inner, donates, seconds, rounds, clock, one_by_one=False):
        seen.append(one_by_one)
        found = real(calls, fresh_args, inner, donates, seconds, rounds, clock, one_by_one)
        factor = {CHAINED: 2.0, SINGLE: 2.0 / waited * 1.03} if one_by_one else dict.fromkeys(calls, 1.0)
        return {n: measure_statistics.Samples(tuple(t * factor[n] for t in s.seconds)) for n, s in found.items()}

    monkeypatch.setattr(paired_timing, "sample", sample)
    found, _ = compare(1.03e-4, 1e-4)
    assert seen == [False, False, True] and found.chosen == winner
    times = f"0.206 and {ms(2.06e-4 / waited)}"
    assert f"waited for: {times.replace(' and', ' ms and')}: " in found.reason
    assert found.reason.endswith("faster" if winner == SINGLE else "chains lose no more than they gain there")


@pytest.mark.parametrize(("waited", "blocks"), [(False, 5), (True, 20)])
def test_each_call_of_a_sample_is_waited_for_where_that_is_asked(monkeypatch, waited, blocks):
    waits: list[str] = []
    monkeypatch.setattr(paired_timing.jax, "block_until_ready", lambda x: waits.append(x) or x)
    clock = Clock()
    calls = {"a": lambda: "a", "b": lambda: "b"}
    found = paired_timing.sample(calls, lambda: ((), {}), 4, False, 0.0, 5, clock, waited)
    assert waits.count("a") == waits.count("b") == blocks and len(found["a"].seconds) == 5


def test_bursts_of_other_work_do_not_decide():
    found, _ = compare(disturbed(1e-4, 97, 5e-3), 0.96e-4)
    assert found.chosen == SINGLE
    found, _ = compare(disturbed(1e-4, 97, 5e-3), 1e-4)
    assert found.chosen == CHAINED


def test_single_calls_that_are_wrong_or_fail_are_out():
    found, clock = compare(1e-4, 0.5e-4, results={"xla": jnp.ones(3), SINGLE: jnp.full(3, 2.0)})
    assert found.chosen == CHAINED and "differs from plain jax.jit" in found.rejected[SINGLE]
    assert SINGLE not in found.speed and clock.calls.get(CHAINED, 0) == 0
    found, _ = compare(1e-4, 0.5e-4, verify=lambda name, want, got: f"{name} is off")
    assert found.chosen == CHAINED and found.rejected == {SINGLE: f"{SINGLE} is off"}

    def broken():
        raise RuntimeError("no memory")

    calls = {"xla": lambda: np.ones(3, np.float32), CHAINED: broken, SINGLE: broken}
    found = chain_ablation.ablate_chains(decided(), SINGLE, calls, lambda: ((), {}), donates=False, size=SIZE)
    assert found.rejected == {SINGLE: "RuntimeError: no memory"} and found.chosen == CHAINED


def test_only_programs_with_chains_that_can_matter_have_a_rival():
    joined = {FORM: 42, None: 2}
    assert chain_ablation.unchained_variant(decided(), joined) == SINGLE
    assert (
        chain_ablation.unchained_variant(decided(), {None: 2}) == "" == chain_ablation.unchained_variant(decided(), {})
    )
    assert chain_ablation.unchained_variant(decided(seconds=0.04), joined) == SINGLE
    assert chain_ablation.unchained_variant(decided(seconds=0.05), joined) == ""  # 420 us at most
    for name, wanted in (("xla:graphs", ""), ("jcuts", "jcuts/plain/all/single")):
        decision = Decision(name, "", {name: 1e-4}, measured=True)
        assert chain_ablation.unchained_variant(decision, joined) == wanted
    assert chain_ablation.unchained_variant(Decision(CHAINED, "nothing was timed"), joined) == ""


@pytest.mark.parametrize("form", [None, Variant(("scales", "dots")), Variant((), "anchored"), FORM])
def test_a_form_with_single_calls_is_another_program_of_the_same_kernels(form, monkeypatch):
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("NVIDIA H200", (9, 0), 132))
    single = Variant.single(form)
    assert (
        not single.chained
        and Variant.parse(str(single)) == single
        and Variant.tuned(single) == form == Variant.tuned(form)
    )
    name = variant_space.name_of(single, "graph1")
    assert variant_space.form_of(name) == single and name != variant_space.name_of(form, "graph1")
    assert variant_space.is_known(name, "cuda", True) and not variant_space.is_known(
        name.partition(":")[0], "cpu", True
    )
    closed = jaxapi.closed_jaxpr_of(lambda x: jnp.sin(x).sum(), jnp.ones((4, 4)))
    level = group(closed, Settings(), Fuel(), "cuda")
    keys = {kernel_selection.partition_key(level, Settings(form=f), "cuda") for f in (form, single)}
    assert len(keys) == 1  # the cover that was measured is both forms'


@pytest.mark.parametrize("text", ["scales/all/double", "plain/anchored/single/single", "plain/single"])
def test_impossible_forms_are_an_error(text):
    with pytest.raises(UsageError, match="single"):
        Variant.parse(text)


def test_forms_with_single_calls_and_the_knob_leave_calls_alone(monkeypatch):
    monkeypatch.setattr(rebuild.xla_devices, "machine", lambda: types.SimpleNamespace(capability=(9, 0)))
    monkeypatch.setattr(chains_fuse, "calls", lambda closed: 2)
    monkeypatch.setattr(chains_fuse, "fuse_calls", lambda closed: "chains")
    closed: Any = "calls"
    for form in (None, FORM):
        assert rebuild.fuse_where_wanted(closed, Settings(form=form), "cuda") == "chains"
        assert rebuild.fuse_where_wanted(closed, Settings(form=Variant.single(form)), "cuda") == "calls"
        with knobs.scope(chains=False):
            assert rebuild.fuse_where_wanted(closed, Settings(form=form), "cuda") == "calls"


def pointwise(x, w, b):
    """A 1x1 convolution: the form of the test makes a product of it, whatever kernels win on this machine."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) + b)


def arguments():
    rng = np.random.default_rng(8)
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 4, 4, 8), (1, 1, 8, 16), (16,)))


@pytest.fixture
def acts_as_gpu(monkeypatch):
    """One form races, whose program is said to have chains."""
    monkeypatch.setattr(variant_space, "GPUS", ("cpu",))
    monkeypatch.setattr(variant_space, "candidate_variants", lambda closed, platform: [Variant(("dots",), "none")])
    monkeypatch.setattr(chains_fuse, "joined", lambda closed: 3)
    api.set_default_store(end_to_end_benchmark.MemoryStore())
    yield monkeypatch
    api.set_default_store(None)


@pytest.mark.parametrize("faster", ["single", "chains"])
def test_the_faster_of_both_runs_is_kept_and_shown(acts_as_gpu, faster):
    raced, timed, compare_them = [], [], chain_ablation.ablate_chains
    chained, single = "jcuts/dots/none:graphs", "jcuts/dots/none/single:graphs"

    def decide(calls, *_, **__):
        raced.append(list(calls))
        speed = {"xla": (1.0, 1.0, 1.0), chained: (5.0, 5.0, 5.0)}
        return Decision(chained, "5 times as fast", {"xla": 5e-4, chained: 1e-4}, measured=True, speed=speed)

    def compared(decision, name, calls, fresh_args, **more):
        timed.append((decision.chosen, name))
        assert set(calls) == {"xla", decision.chosen, name} and more["size"] == SIZE
        for call in calls.values():  # each runs, and takes as long as is said
            given, _ = fresh_args()
            np.testing.assert_allclose(call(*given), pointwise(*given), rtol=1e-5, atol=1e-5)
            assert more["verify"](name, pointwise(*given), call(*given)) is None
        clock = Clock()
        seconds = {"xla": 5e-4, chained: 1e-4, single: 0.9e-4 if faster == "single" else 1.1e-4}
        programs = {name: clock.program(name, seconds[name]) for name in calls}
        return compare_them(decision, name, programs, lambda: ((), {}), donates=False, size=SIZE, clock=clock)

    acts_as_gpu.setattr(end_to_end_benchmark, "benchmark_variants", decide)
    acts_as_gpu.setattr(chain_ablation, "ablate_chains", compared)
    args = arguments()
    ours = jcuts.optimize(lambda x, w, b: pointwise(x, w, b))
    np.testing.assert_allclose(ours(*args), pointwise(*args), rtol=1e-5, atol=1e-5)
    assert timed == [(chained, single)]
    decision = ours.decision(*args)
    assert decision.chosen == (single if faster == "single" else chained)
    shown = str(ours.explain(*args))
    assert f"whole function: {decision.chosen}" in shown and "its kernels in chains: 0.1 ms" in shown
    assert f"in single calls: {'0.09' if faster == 'single' else '0.11'} ms" in shown
    assert set(ours.programs(*args)) == {"xla", chained, single}
    again = jcuts.optimize(lambda x, w, b: pointwise(x, w, b))  # as another process
    np.testing.assert_array_equal(again(*args), ours(*args))
    assert again.decision(*args).to_dict() == decision.to_dict() and len(raced) == len(timed) == 1
    # What was decided under another setting is not taken.
    with knobs.scope(chains=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains_fuse, "joined", lambda closed: 0)
        other = jcuts.optimize(lambda x, w, b: pointwise(x, w, b))
        other(*args)
        assert len(raced) == 2 and len(timed) == 1 and other.decision(*args).chosen == chained
    more = jcuts.optimize(lambda x, w, b: pointwise(x, w, b))
    more(*args)
    assert len(raced) == 2 and more.decision(*args).chosen == decision.chosen


@pytest.mark.parametrize("count", [0, 3])
def test_where_no_kernels_are_in_chains_nothing_more_is_compiled(acts_as_gpu, count):
    compared = []
    acts_as_gpu.setattr(
        chain_ablation, "ablate_chains", lambda decision, *_, **__: compared.append(decision) or decision
    )
    acts_as_gpu.setattr(chains_fuse, "joined", lambda closed: count)
    acts_as_gpu.setattr(
        end_to_end_benchmark,
        "benchmark_variants",
        lambda calls, *_, **__: Decision(list(calls)[-1], "", dict.fromkeys(calls, 1e-4), measured=True),
    )
    made = jcuts.optimize(lambda x, w, b: pointwise(x, w, b) + 1)
    made(*arguments())
    assert len(compared) == (1 if count else 0)
    names = {program.name for program in made._carriers._programs.values()}
    assert ("jcuts/dots/none/single:graphs" in names) is bool(count)


@pytest.mark.parametrize("faster", [1.04, 1.3])
def test_who_decided_in_noise_times_single_calls_again(acts_as_gpu, faster):
    """Of what may still win; the program with chains races, and single calls follow it."""
    raced, compared = [], []

    def decide(calls, *_, **__):
        raced.append(list(calls))
        speed = {name: (1.0, 1.0, 1.0) if variant_space.is_xla(name) else (5.0, 5.0, 5.0) for name in calls}
        return Decision(list(calls)[-1], "", dict.fromkeys(calls, 1e-4), measured=True, speed=speed, noisy=True)

    def pick_single(decision, single, *_, **__):
        compared.append(single)
        speed = {**decision.speed, single: tuple(faster * s for s in (5.0, 4.9, 5.1))}
        return dataclasses.replace(decision, chosen=single, speed=speed)

    acts_as_gpu.setattr(end_to_end_benchmark, "benchmark_variants", decide)
    acts_as_gpu.setattr(chain_ablation, "ablate_chains", pick_single)
    args = arguments()
    for process in range(2):
        decision_cache.forget_decided_here()
        made = jcuts.optimize(lambda x, w, b: pointwise(x, w, b) - 1)
        made(*args)
        assert made.decision(*args).tries == process + 1
    assert len(compared) == 2 and "jcuts/dots/none:graphs" in raced[1] and not any("single" in n for n in raced[1])


@pytest.mark.parametrize("waited", [False, True])
def test_no_result_outlives_its_call_while_samples_are_taken(waited):
    live, most = set(), []

    class Result:
        def __init__(self):
            live.add(id(self))
            most.append(len(live))

        def __del__(self):
            live.discard(id(self))

    calls = {"a": Result, "b": Result}
    paired_timing.sample(calls, lambda: ((), {}), 5, False, 0.0, 3, Clock(), waited)
    assert len(most) == 30 and max(most) == 1

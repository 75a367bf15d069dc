"""Whole programs by name, the race of forms (on the CPU, which is told to act as a GPU here), and the float64 judge."""

from __future__ import annotations

import threading
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jcuts
from jcuts import api
from jcuts.base import knobs
from jcuts.base.errors import UsageError
from jcuts.base.settings import ATTENTION, Variant
from jcuts.jit import end_to_end_benchmark, race_limits, variant_planning, variant_space
from jcuts.jit.accuracy import float64_check
from jcuts.jit.precompile import peak_bytes, precompile_variants
from jcuts.pipeline import computation
from jcuts.report import measured_sums
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import RefusalReport, SubsetReport
from jcuts.trace import jaxapi
from jcuts.tune import time_budget
from tests.gpu.cases import attention

RNG = np.random.default_rng(5)


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


WEIGHTS = (values(1, 1, 8, 16), values(16), values(16), values(3, 3, 1, 16))
PAIR = (values(1, 1, 8, 4), values(1, 1, 8, 6))


def block(x):
    """A pointwise convolution with a folded batch norm, then a depthwise one."""
    w, s, b, d = WEIGHTS
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    x = jnp.clip(x * s + b, 0.0, 6.0)
    return lax.conv_general_dilated(x, d, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=16)


@pytest.mark.parametrize("form", [Variant(("scales", "dots")), Variant((), "anchored"), Variant(("dots",), "none")])
def test_names_and_forms_are_inverse(form):
    assert Variant.parse(str(form)) == form
    assert variant_space.form_of(variant_space.name_of(form, "graphs")) == form and variant_space.is_known(
        variant_space.name_of(form), "cuda", False
    )


def test_names():
    assert (
        variant_space.name_of(None) == "jcuts"
        and variant_space.form_of("jcuts:graphs") is None
        and Variant() == Variant.parse("")
    )
    assert variant_space.programs([Variant(("scales",)), Variant(("scales", "dots"), "none")], ("graphs",)) == [
        "xla",
        "xla:graphs",
        "jcuts/scales",
        "jcuts/scales:graphs",
        "jcuts/scales+dots/none:graphs",
    ]
    assert variant_space.programs([None], ("wide",)) == ["xla", "xla:wide", "jcuts", "jcuts:wide"]
    assert variant_space.programs([], ()) == ["xla"]


@pytest.mark.parametrize(
    ("name", "platform", "known"),
    [
        ("xla", "cpu", True),
        ("xla:wide", "cpu", True),
        ("xla:graphs", "cpu", False),
        ("jcuts", "cpu", True),
        ("jcuts/dots", "cpu", False),
        ("jcuts/plain/every", "cpu", True),
        ("jcuts/dots/every", "cpu", False),
        ("jcuts/plain/every", "cuda", False),
        ("jcuts/dots/anchored:graphs", "cuda", True),
        ("jcuts/halves", "cuda", False),
        ("jcuts/dots/most", "cuda", False),
        ("jcuts:gone", "cuda", False),
    ],
)
def test_stored_names_are_checked(name, platform, known):
    assert variant_space.is_known(name, platform, True) is known


def test_impossible_regions_are_an_error():
    with pytest.raises(UsageError, match="most"):
        Variant((), "most")


def test_forms_race_and_the_decision_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")  # programs race here, not kernels
    monkeypatch.setattr(variant_space, "GPUS", ("cpu",))
    store = end_to_end_benchmark.MemoryStore()
    api.set_default_store(store)
    try:
        x = values(2, 12, 12, 8)
        made = jcuts.optimize(lambda x: block(x))
        want = jax.jit(block)(x)
        np.testing.assert_allclose(made(x), want, rtol=1e-4, atol=1e-4)
        decision = made.decision(x)
        assert decision.measured and "jcuts/scales+dots/none:graphs" in {*decision.speed, *decision.rejected}
        assert not any("cannot be checked" in why for why in decision.rejected.values())
        report = made.explain(x)
        assert report.guard["chosen"] == decision.chosen
        if not variant_space.is_xla(decision.chosen):
            assert any("rewrites: scales" in note for note in report.notes)
        text = made.chosen(x).compile().as_text()
        assert "HloModule" in text
        again = jcuts.optimize(lambda x: block(x))
        np.testing.assert_array_equal(again(x), made(x))
        assert again.decision(x).chosen == decision.chosen
    finally:
        api.set_default_store(None)


def test_siblings_race_beside_all_other_rewrites_only():
    names = ("NHWC", "HWIO", "NHWC")

    def branches(x):
        return [lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names) for w in (PAIR[0], PAIR[1])]

    def planned(function, *shape):
        closed = jaxapi.closed_jaxpr_of(function, values(*shape))

        def plan(form):
            return types.SimpleNamespace(closed=None, report=types.SimpleNamespace(source=str(form)))

        return [str(form) for form in variant_space.plan_variants(closed, "cuda", plan) if form is not None]

    assert planned(block, 1, 4, 4, 8)[-1] == "scales+dots/absorbing"
    with_siblings = planned(branches, 1, 4, 4, 8)
    assert with_siblings[-3:] == ["dots+siblings/none", "dots+siblings", "dots+siblings/absorbing"]
    assert [name for name in with_siblings if "siblings" in name] == with_siblings[-3:]
    products = planned(lambda x: [x @ WEIGHTS[0][0, 0], x @ PAIR[0][0, 0]], 4, 8)
    assert products == ["plain/anchored", "plain/absorbing", "siblings/none", "siblings", "siblings/absorbing"]


def test_gradients_of_attention_have_a_form_with_kernels_for_attention_alone():
    def step(q, k, v, grad):
        out, backward = jax.vjp(attention(), q, k, v)
        return out, *backward(grad)

    arrays = [values(2, n, 3, 16) for n in (32, 48, 48, 32)]
    forms = variant_space.candidate_variants(jaxapi.closed_jaxpr_of(step, *arrays), "cuda")
    assert [form for form in forms if form is not None and "recomputes" in form.rewrites] == forms[-1:]
    assert str(forms[-1]) == "recomputes/attention"
    assert variant_space.is_known(variant_space.name_of(forms[-1]), "cuda", True)
    many = Variant(("scales", "rounds", "slots"), "all")
    assert race_limits.most_rewritten([None, Variant(("scales",)), many, forms[-1]]) == [None, many, forms[-1]]


def test_weights_are_rounded_in_every_form_where_there_are_warp_groups(monkeypatch):
    w = values(256, 128)
    closed = jaxapi.closed_jaxpr_of(lambda x: x @ w, values(4096, 256))
    for capability, wanted in (
        ((9, 0), ["rounds", "rounds/anchored", "rounds/none", "rounds/absorbing"]),
        ((8, 0), ["None", "plain/anchored", "plain/absorbing"]),
    ):
        machine = types.SimpleNamespace(capability=capability)
        monkeypatch.setattr(variant_space.xla_devices, "machine", lambda machine=machine: machine)
        assert [str(form) for form in variant_space.candidate_variants(closed, "cuda")] == wanted


def test_options_that_a_version_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(variant_space, "GPUS", ("cpu",))
    variant_space.accepts.cache_clear()
    known = end_to_end_benchmark.OPTIONS["cuda"]["graph1"]
    monkeypatch.setitem(end_to_end_benchmark.OPTIONS, "cuda", {"first": {"xla_gpu_no_such_option": 1}, "second": known})
    assert variant_space.options("cpu") == ("second",)
    monkeypatch.setitem(end_to_end_benchmark.OPTIONS, "cuda", {"first": {"xla_gpu_no_such_option": 1}})
    assert variant_space.options("cpu") == ()
    variant_space.accepts.cache_clear()


def test_the_judge_compares_with_float64():
    x = values(3, 5, 5, 8)
    closed = jaxapi.closed_jaxpr_of(block, x)
    judge = variant_space.Float64Judge(closed, [x], 2.0, "cpu")
    exact = judge.reference()[0]
    assert exact.dtype == np.float64
    good = np.asarray(jax.jit(block)(x))
    np.testing.assert_allclose(good, exact, atol=1e-4)
    name = "jcuts/dots:graphs"
    assert judge(name, [good], [jnp.asarray(good)]) is None
    everywhere = good * np.float32(1 + 3e-5)
    assert "in L2 norm" in judge(name, [good], [jnp.asarray(everywhere)])
    assert judge("jcuts", [good], [jnp.asarray(everywhere)]) is None  # not rewritten: checked subset by subset
    judge.of_every_form = True
    assert "in L2 norm" in judge("jcuts", [good], [jnp.asarray(everywhere)])
    assert judge("xla:graphs", [good], [jnp.asarray(everywhere)]) is None
    once = good.copy()
    once[0, 2, 3, 4] += np.float32(6e-5)
    assert "in one element" in judge(name, [good], [jnp.asarray(once)])
    assert variant_space.longest_sum(closed) == 9


@pytest.mark.parametrize(("tolerance", "right"), [(1.0, False), (2.0, False), (4.0, True)])
def test_the_judge_allows_the_multiple_that_was_set(tolerance, right):
    x = values(4, 5)
    judge = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], tolerance, "cpu")
    (exact,) = judge.reference()
    off = [(exact * (1 + error)).astype(np.float32) for error in (1e-3, 3e-3)]  # XLA's, and three times that
    assert (judge("jcuts/dots", [off[0]], [jnp.asarray(off[1])]) is None) == right


class AdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def test_outputs_of_one_role_share_the_error_that_xla_makes_in_any_of_them():
    """Adam's first step is the sign of the gradient: which element of which layer flips in rounding is chance."""
    x = values(4, 5)
    layers = {"layers": [{"scale": x, "bias": x}, {"scale": x, "bias": x}], "norm": x, "head": x[:2]}
    state = AdamState(x[0, 0], layers, layers)
    roles = float64_check.output_roles((layers, state, x))
    assert [roles.index(role) for role in roles[:6]] == [0, 1, 1, 1, 1, 1]  # the head has another shape
    assert len(set(roles[:6])) == len(set(roles[7:13])) == len(set(roles[13:19])) == 2
    assert len(set(roles)) == 8  # parameters, step, first and second moments, and the last

    def steps(x):
        return [jnp.sin(x), jnp.sin(x), 100.0 * jnp.sin(x)]

    def judge(*roles):
        return variant_space.Float64Judge(jax.make_jaxpr(steps)(x), [x], 2.0, "cpu", roles)

    exact = judge().reference()
    xla, ours = (
        [(r * (1 + e)).astype(np.float32) for r, e in zip(exact, off, strict=True)]
        for off in ((1e-7, 1e-3, 1e-7), (1e-3,) * 3)
    )
    name, ours = "jcuts/dots", [jnp.asarray(c) for c in ours]
    assert judge()(name, xla, ours).startswith("output 0 is off")
    assert judge("update", "other", "third")(name, xla, ours).startswith("output 0 is off")
    assert judge("update", "update", "update")(name, xla, ours).startswith("output 2 is off")  # of another magnitude
    assert judge("update", "update", "update")(name, xla, [*ours[:2], jnp.asarray(xla[2])]) is None


def test_sums_that_cancel_share_the_error_that_xla_makes_in_any_of_them():
    """Gradients of biases before a batch norm are zero but for rounding; how large that is in one of them is chance."""
    x = values(4, 5)

    def gradients(x):
        return [1e-12 * jnp.sin(x), 1e-15 * jnp.sin(x[:2]), jnp.sin(x)]

    judge = variant_space.Float64Judge(jax.make_jaxpr(gradients)(x), [x], 2.0, "cpu", ("a", "b", "c"))
    exact = judge.reference()

    def results(*off):
        return [(r * (1 + e)).astype(np.float32) for r, e in zip(exact, off, strict=True)]

    def why(*off):
        return judge("jcuts/dots", results(1e4, 3e4, 1e-7), [jnp.asarray(c) for c in results(*off)])

    assert why(5e4, 5e4, 1e-7) is None  # five times XLA's error of the first, less than twice that of the second
    assert why(1e4, 1e5, 1e-7).startswith("output 1 is off by 1e+05")
    assert why(1e4, 3e4, 1e-3).startswith("output 2 is off")


def test_rewrites_that_cannot_be_checked_are_not_used(monkeypatch):
    x = values(3, 5, 5, 8)
    judge = variant_space.Float64Judge(jaxapi.closed_jaxpr_of(block, x), [x], 2.0, "cpu")

    def fail(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(float64_check, "evaluate", fail)
    assert "cannot be checked against float64: MemoryError: no room" in judge("jcuts/dots", [x], [x])


def test_plain_xla_is_compiled_before_all_others_and_alone():
    busy, order = [], []

    class Lowered:
        def __init__(self, name):
            self.name = name

        def compile(self):
            busy.append(self.name)
            order.append((self.name, tuple(busy)))
            busy.remove(self.name)
            if self.name == "jcuts:graphs":
                raise RuntimeError("no such option")
            return self

        def memory_analysis(self):
            sizes = {"argument": 7, "output": 5, "alias": 3, "temp": len(self.name)}
            return types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})

    names = ["xla", "xla:graphs", "jcuts", "jcuts:graphs", "jcuts/dots:graphs", "jcuts/dots"]
    peaks = precompile_variants({name: (lambda n=name: Lowered(n)) for name in names})
    assert order[0] == ("xla", ("xla",)) and {name for name, _ in order} == set(names)
    first = [name for name, _ in order[1:3]]
    assert "jcuts/dots:graphs" in first and "xla:graphs" not in first
    assert peaks == {name: 9 + len(name) for name in names if name != "jcuts:graphs"}


def test_programs_that_need_more_memory_than_plain_xla_do_not_race():
    gb = 10**9
    peaks = {"xla": 10 * gb, "xla:graphs": 11 * gb, "jcuts": 103 * gb // 10, "jcuts/dots": 15 * gb}
    found = race_limits.over_memory(peaks, 16 * gb)
    assert set(found) == {"jcuts/dots"}
    assert "15.00 GB" in found["jcuts/dots"] and "10.00 GB" in found["jcuts/dots"]
    with knobs.scope(memory_over=0.0):
        assert set(race_limits.over_memory(peaks, 16 * gb)) == {"jcuts", "jcuts/dots"}
    with knobs.scope(memory_over=1.0):
        assert not race_limits.over_memory(peaks, 16 * gb)
    assert not race_limits.over_memory(peaks, 80 * gb)  # there is enough
    assert not race_limits.over_memory(peaks, None)
    assert not race_limits.over_memory({"jcuts": 15 * gb}, 16 * gb)  # plain XLA's memory is not known


def test_peak_memory_is_what_buffers_need():
    donated = jax.jit(lambda x, y: (x + y, jax.numpy.sum(y)), donate_argnums=0)
    x = jax.ShapeDtypeStruct((512, 128), "float32")
    peak = peak_bytes(donated.lower(x, x).compile())
    assert peak is not None and 2 * 512 * 128 * 4 <= peak < 3 * 512 * 128 * 4
    assert peak_bytes(object()) is None


def subset(chosen, seconds, xla, count=1):
    return SubsetReport(
        "f", {"add": 1}, [], "none", "simple", chosen, "measured", {}, 0.5, 0.0, seconds, xla, count, 1.0, 1.0
    )


def test_kernels_that_lost_by_little_are_worth_a_race():
    won, close, far = subset("map/1", 1.0, 2.0), subset("xla", 1.1, 1.0), subset("xla", 3.0, 1.0)

    def worth(*subsets, small=0, equations=20):
        refusals = (RefusalReport("exp", computation.TOO_LITTLE, "", small),) if small else ()
        return variant_space.near_ties(FunctionReport("f", "mixed", "cpu", subsets, refusals, equations))

    assert worth(won, close) and worth(close)
    assert not worth(won, far) and not worth(won) and not worth()
    assert not worth(subset("map/1", 1.0, 100.0), close)  # next to nothing of the whole
    assert worth(won, small=2) and not worth(won, small=1) and not worth(small=2)


def mlp(x, w, b):
    return jax.nn.softmax(jax.nn.relu(x @ w + b))


@pytest.mark.parametrize("worth", [True, False])
def test_a_program_with_every_kernel_competes(monkeypatch, worth):
    monkeypatch.setenv("JCUTS_MAX_CANDIDATES", "2")
    monkeypatch.setattr(variant_space, "near_ties", lambda report: worth)
    seen = []
    monkeypatch.setattr(
        end_to_end_benchmark,
        "benchmark_variants",
        lambda calls, *_, **more: (
            seen.append(dict(calls))
            or end_to_end_benchmark.Decision(
                "jcuts/plain/every" if "jcuts/plain/every" in calls else "xla", "", measured=True
            )
        ),
    )
    store = end_to_end_benchmark.MemoryStore()
    api.set_default_store(store)
    try:
        x, w, b = values(8, 16), values(16, 16), values(16)
        ours = jcuts.optimize(mlp)
        np.testing.assert_allclose(ours(x, w, b), jax.jit(mlp)(x, w, b), rtol=1e-5, atol=1e-6)
        assert ("jcuts/plain/every" in seen[0]) is worth
        if worth:
            report = ours.explain(x, w, b)
            assert report.guard["chosen"] == "jcuts/plain/every" and not report.runs_plain_xla
            assert {s.chosen.partition("/")[0] for s in report.subsets} >= {"rows"}  # too small for the plain program
            again = jcuts.optimize(mlp)  # as another process: what was decided is known
            again(x, w, b)
            assert len(seen) == 1 and again.explain(x, w, b).guard["chosen"] == "jcuts/plain/every"
    finally:
        api.set_default_store(None)


def test_programs_without_kernels_that_are_far_behind_by_measurement_do_not_race():
    def outcome(*subsets):
        names = ("chosen", "origin", "count", "seconds", "xla_seconds")
        rows = [types.SimpleNamespace(derived=False, **dict(zip(names, subset, strict=True))) for subset in subsets]
        return types.SimpleNamespace(report=types.SimpleNamespace(subsets=rows))

    fast, bare, other = Variant(("scales",)), Variant(("scales",), "none"), Variant(("scales", "dots"), "none")
    some, most = Variant(("scales",), "absorbing"), Variant(("scales",), "anchored")
    kernels = [("point", "measured", 3, 1e-6, 2e-6), ("point", "measured", 1, 1e-6, 3e-6)]  # 4 us that gain 5 us
    left = ("xla", "measured", 9, 1e-6, 1e-9)
    found = {fast: outcome(*kernels, left), bare: outcome(left), other: outcome(left)}
    (name,) = variant_space.dominated_variants(found)
    assert (
        name == bare and "those of jcuts/scales 5 us (and take 4 us)" in variant_space.dominated_variants(found)[bare]
    )
    few = {some: outcome(("point", "measured", 2, 1e-6, 2e-6)), most: outcome(*kernels[:1])}
    assert set(variant_space.dominated_variants({**found, **few})) == {bare, some}  # 3 us less, 2 us less
    assert not variant_space.dominated_variants({**found, fast: outcome(("point", "measured", 1, 1e-6, 1.5e-6))})
    assert not variant_space.dominated_variants({**found, fast: outcome(("point", "estimated", 1, 1e-6, 9e-6))})
    assert not variant_space.dominated_variants({fast: outcome(), bare: outcome(left)})
    # Where kernels take long, what surrounds them matters less.
    many = [(kind, origin, 500 * count, *times) for kind, origin, count, *times in kernels]
    near = outcome((*many[0][:4], 1.9e-6), many[1])
    assert set(variant_space.dominated_variants({fast: outcome(*many), most: near, some: outcome(many[0])})) == {some}
    # XLA's code for a kernel that clearly won was never compiled: less is enough.
    little = outcome(("point", "measured", 1, 1e-6, 1.5e-6))
    little.report.subsets[0].derived = True
    assert set(variant_space.dominated_variants({**found, fast: little})) == {bare}
    # Where the plain form is behind, plain XLA, which has no form, races all the same.
    behind = variant_space.dominated_variants({None: outcome(left), Variant((), "absorbing"): outcome(*kernels)})
    names = variant_space.programs([None, Variant((), "absorbing")], ["graphs"])
    assert set(variant_space.dominated_names(names, behind)) == {"jcuts", "jcuts:graphs"}


def test_kernels_of_clear_gains_are_a_variant_where_most_time_stays_with_xla():
    def outcome(*subsets):
        names = ("chosen", "origin", "count", "seconds", "xla_seconds")
        rows = [types.SimpleNamespace(derived=False, **dict(zip(names, subset, strict=True))) for subset in subsets]
        return types.SimpleNamespace(report=types.SimpleNamespace(subsets=rows))

    fast = Variant(("turns",))
    clear, close = ("rows", "measured", 10, 1e-4, 2e-4), ("rows", "measured", 20, 1e-4, 1.2e-4)
    left = ("xla", "measured", 5, 1e-3, 1e-4)
    found = {None: outcome(close), fast: outcome(clear, close, left), Variant(("turns",), "anchored"): outcome(clear)}
    made = variant_space.variant_of_clear(found, 20e-3)
    assert made == Variant(("turns",), "clear") == Variant.parse(str(made))
    assert variant_space.variant_of_clear(found, 6e-3) is None  # kernels keep most of it
    assert variant_space.variant_of_clear(found, 60e-3) is None  # 1 ms is less than a program has to gain
    assert variant_space.variant_of_clear({fast: outcome(clear)}, 20e-3) is None  # it is the same program
    assert variant_space.variant_of_clear({fast: outcome(close)}, 20e-3) is None
    assert variant_space.variant_of_clear(found, None) is None  # nothing is known of the whole
    # Kernels of attention gain besides: less of the program is left, of which to gain a share.
    attention = Variant(("recomputes",), "attention")
    weights = ("attention", "measured", 1, 1e-3, 20e-3)
    assert variant_space.variant_of_clear(found, 55e-3) is None
    both = variant_space.variant_of_clear({**found, attention: outcome(weights)}, 55e-3)
    assert both == Variant(("turns", "recomputes"), "clear")
    # Its sums are smaller, and it races all the same, with limited time, too.
    both = {fast: outcome(*[clear] * 9, close), made: outcome(clear)}
    assert not variant_space.dominated_variants(both)
    names = ["xla", "jcuts/turns", "jcuts/turns:graphs", "jcuts/turns/clear:graphs", "jcuts/turns/anchored:graphs"]
    names.append("jcuts/recomputes/attention:graphs")
    gains = {fast: 2e-3, made: 1e-3, Variant(("turns",), "anchored"): 15e-4, attention: 1e-3}
    assert set(race_limits.beyond_race_limit(names, gains)) == {"jcuts/turns", "jcuts/turns/anchored:graphs"}


def test_float64_results_that_cannot_be_had_early_are_asked_for_again(monkeypatch):
    x = values(4, 4)
    judge = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], 1.0, "cpu")
    monkeypatch.setattr(judge, "_run", lambda: (_ for _ in ()).throw(MemoryError("no room")))
    judge.precompute()
    assert judge.reference() is None  # and now it is known
    monkeypatch.undo()
    again = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], 1.0, "cpu")
    monkeypatch.setattr(again, "_run", lambda: (_ for _ in ()).throw(MemoryError("no room")))
    again.precompute()
    monkeypatch.undo()
    (found,) = again.reference()
    np.testing.assert_allclose(found, np.sin(np.asarray(x).astype(np.float64)), rtol=1e-15)


def test_the_float64_program_compiles_once_on_a_thread_of_its_own(monkeypatch):
    x = jnp.linspace(0.0, 1.0, 7)
    judge = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], 2.0, "cpu")
    made, wide = [], judge._wide
    monkeypatch.setattr(judge, "_wide", lambda: made.append(threading.current_thread().name) or wide())
    judge.compile_ahead()
    judge.compile()
    assert made == ["jcuts-float64"] and judge.compare([jnp.sin(x)], [jnp.sin(x)]) is None

    def full():
        raise RuntimeError("no memory")

    judge = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], 2.0, "cpu")
    monkeypatch.setattr(judge, "_wide", full)
    judge.compile_ahead()  # which fails there, unseen
    with pytest.raises(RuntimeError, match="no memory"):
        judge.compile()


def test_weights_that_are_arguments_are_turned_in_forms_of_their_own(monkeypatch):
    def network(w, gain, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y * jnp.sqrt(gain))

    closed = jaxapi.closed_jaxpr_of(network, values(1, 1, 256, 128), values(128), values(4, 32, 32, 256))
    for capability, wanted in (
        (
            (9, 0),
            ["None", "plain/anchored", "dots/none", "turns+vectors", "turns+vectors/anchored", "dots+turns+vectors"],
        ),
        ((8, 0), ["None", "plain/anchored", "dots", "dots/anchored", "dots/none", "dots/absorbing"]),
    ):
        machine = types.SimpleNamespace(capability=capability)
        monkeypatch.setattr(variant_space.xla_devices, "machine", lambda machine=machine: machine)
        assert [str(form) for form in variant_space.candidate_variants(closed, "cuda")] == wanted


def test_the_float64_program_is_compiled_apart_from_its_run(monkeypatch):
    x = values(4, 4)
    judge = variant_space.Float64Judge(jax.make_jaxpr(jnp.sin)(x), [x], 1.0, "cpu")
    judge.compile()
    wide = judge._wide
    monkeypatch.setattr(judge, "_wide", lambda: (None, wide()[1]))  # only what was compiled can run
    (found,) = judge.reference()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.sin(np.asarray(x).astype(np.float64)), rtol=1e-15)


def test_few_programs_race_where_time_is_limited():
    """The one with the largest measured gain; plain XLA always."""
    plain, dots, turned = None, Variant(("dots",), "none"), Variant(("dots", "turns"), "all")
    anchored = Variant((), "anchored")
    names = ["xla", "xla:graphs", *variant_space.programs([plain, anchored, dots, turned], ["graphs"])[2:]]
    out = race_limits.beyond_race_limit(names, {plain: 1e-4, anchored: 2e-4, dots: 0.0, turned: 3e-4})
    left = [name for name in names if name not in out]
    assert left == ["xla", "xla:graphs", "jcuts/dots+turns:graphs"]
    assert race_limits.beyond_race_limit(["xla", "jcuts"], {plain: 0.0}) == {}
    names = ["xla", "xla:graphs", "xla:library", *variant_space.programs([plain, turned], ["graphs"], ["library"])[3:]]
    out = race_limits.beyond_race_limit(names, {plain: 1e-4, turned: 3e-4})
    left = [name for name in names if name not in out and not variant_space.is_xla(name)]
    assert left == ["jcuts/dots+turns:graphs", "jcuts/dots+turns:library"]  # products in loops are left to XLA in both


def test_where_products_differ_the_least_total_races():
    """Gains count on XLA's code of the same variant, which is slower where it has more products."""
    plain, merged = Variant(("scales",), "all"), Variant(("scales", "dots", "siblings"), "all")
    anchored = Variant(("scales", "dots", "siblings"), "anchored")
    names = ["xla", *variant_space.programs([plain, merged, anchored], ["graphs"])[2:]]
    gains, totals = {plain: 3e-4, merged: 1e-4, anchored: 2e-4}, {plain: 5e-4, merged: 4e-4}
    out = race_limits.beyond_race_limit(names, gains, totals)
    assert [n for n in names if n not in out] == ["xla", "jcuts/scales+dots+siblings/anchored:graphs"]
    attention = Variant(("scales", "recomputes"), "attention")  # it races in any case, and has no total
    more = [*names, "jcuts/scales+recomputes/attention:graphs"]
    out = race_limits.beyond_race_limit(more, gains | {attention: 1e-5}, totals)
    assert [n for n in more if n not in out] == ["xla", "jcuts/scales+dots+siblings/anchored:graphs", more[-1]]
    out = race_limits.beyond_race_limit(more, gains | {attention: 5e-4}, totals)
    assert [n for n in more if n not in out] == ["xla", "jcuts/scales+dots+siblings/anchored:graphs", more[-1]]
    clear = [*more, "jcuts/scales+dots+siblings+recomputes/clear:graphs"]  # attention's kernels are among these
    out = race_limits.beyond_race_limit(clear, gains | {attention: 5e-4}, totals)
    assert [n for n in clear if n not in out] == ["xla", "jcuts/scales+dots+siblings/anchored:graphs", clear[-1]]
    assert race_limits.affordable(out, 9.0, 4.0, gains | {attention: 5e-4})[:1] == [more[-1]]
    out = race_limits.beyond_race_limit(names, gains, {plain: 5e-4})  # nothing is known of the others
    assert [n for n in names if n not in out] == ["xla", "jcuts/scales:graphs"]


def test_programs_that_the_limit_left_out_race_in_what_is_left_of_it():
    plain, merged, anchored = None, Variant(("dots",), "all"), Variant(("dots",), "anchored")
    names = variant_space.programs([plain, merged, anchored], ["graphs"])[2:]
    gains = {plain: 1e-4, merged: 2e-4, anchored: 3e-4}
    late = dict.fromkeys(names, race_limits.TOO_LATE) | {"jcuts/slots:graphs": "its kernels gain too little"}

    def affordable(seconds):
        return race_limits.affordable(late, seconds, 4.0, gains)

    assert affordable(-5.0) == affordable(3.9) == [] and affordable(4.1) == ["jcuts/dots/anchored:graphs"]
    assert affordable(9.0) == ["jcuts/dots/anchored:graphs", "jcuts/dots:graphs"]
    assert affordable(1e3) == ["jcuts/dots/anchored:graphs", "jcuts/dots:graphs", "jcuts:graphs"]  # not without options


def test_what_has_raced_says_who_races_in_what_is_left():
    """A GPT's step in bfloat16: the sums prefer the plain variant, whose program has lost."""
    attention, whole = Variant(("recomputes",), "attention"), Variant(("recomputes",), "all")
    gains, totals = {None: 4e-4, attention: 1.5e-3, whole: 1.8e-3}, {None: 7.9e-3, whole: 8.5e-3}
    late = dict.fromkeys(
        ["jcuts", "jcuts/recomputes:graphs", "jcuts/recomputes/attention:graphs"], race_limits.TOO_LATE
    )
    raced = {
        "xla": 7.1e-3,
        "xla:graphs": 7.1e-3,
        "jcuts:graphs": 7.08e-3,
        "jcuts/recomputes/attention:separate": 6.8e-3,
    }
    order = ["jcuts/recomputes:graphs", "jcuts/recomputes/attention:graphs", "jcuts"]  # raced with other options
    assert race_limits.affordable(late, 9.0, 3.0, gains, totals, raced) == order
    assert race_limits.affordable(late, 9.0, 3.0, gains, totals)[0] == "jcuts"  # by the sums alone
    # Nothing of its kind has raced: the sums decide.
    assert race_limits.affordable(late, 3.0, 3.0, gains, totals, {"xla": 7e-3}) == ["jcuts"]


def test_attention_races_beside_all_other_kernels(monkeypatch):
    gains = {"plain": 1e-4, "turned": 2e-4, "attention": 3e-4}
    monkeypatch.setattr(variant_space.measured_sums, "kernel_sums", lambda report: (1e-4, gains[report]))
    turned, attention = Variant(("scales", "turns"), "all"), Variant(("scales", "recomputes"), "attention")
    found = {
        form: types.SimpleNamespace(report=name)
        for form, name in ((Variant(("scales",)), "plain"), (turned, "turned"), (attention, "attention"))
    }
    assert variant_space.variant_with_attention(found) == Variant(("scales", "turns", "recomputes"), "all")
    gains["attention"] = 0.0
    assert variant_space.variant_with_attention(found) is None
    del found[attention]
    assert variant_space.variant_with_attention(found) is None


def test_totals_count_kernels_and_what_is_left_to_xla():
    def subset(chosen, seconds, xla_seconds, count, size):
        return types.SimpleNamespace(
            chosen=chosen, seconds=seconds, xla_seconds=xla_seconds, count=count, bytes=size, origin="measured"
        )

    def outcome(*rows):
        return types.SimpleNamespace(report=types.SimpleNamespace(subsets=rows))

    known = subset("window", 2e-6, 5e-6, 3, 100), subset("xla", 9e-6, 4e-6, 1, 200)
    unknown = subset("xla", None, None, 2, 50)
    found: Any = {None: outcome(*known), Variant((), "anchored"): outcome(*known), Variant(("dots",)): outcome()}
    assert variant_space.measured_totals(found) == pytest.approx({None: 10e-6})
    assert measured_sums.kernel_sums(found[None].report)[1] == pytest.approx(9e-6)
    found = {None: outcome(*known, unknown), Variant(("dots",)): outcome(unknown)}
    assert variant_space.measured_totals(found) == pytest.approx({None: 12e-6})  # a fifth more bytes


def test_programs_that_cannot_gain_enough_do_not_race():
    plain, turned = None, Variant(("turns",), "all")
    names = variant_space.programs([plain, turned], ["graphs"])
    gains = {plain: 1.9e-4, turned: 2.1e-4}  # of 10 ms, of which 2 % have to be gained
    out = race_limits.too_little_gain(names, gains, 1e-2)
    assert set(out) == {"jcuts", "jcuts:graphs"} and "gain 0.19 ms of 10 ms" in out["jcuts"]
    assert race_limits.too_little_gain(names, gains, None) == {}
    assert race_limits.too_little_gain(names, {plain: 0.0, turned: 0.0}, 5e-4) == {}  # launches decide


def test_the_clock_of_a_tuning_budget_is_held_while_plain_xla_compiles():
    now = [0.0]
    budget = time_budget.TimeBudget(60.0, lambda: now[0])

    def compiles():
        now[0] += 40.0
        raise RuntimeError("no memory")

    todo = variant_planning.beyond_plain_jit({"xla compiled": compiles, "xla run": lambda: None}, budget)
    now[0] += 5.0
    assert budget.spent() == 0.0 and list(todo) == ["xla compiled", "xla run"]
    with pytest.raises(RuntimeError):
        todo["xla compiled"]()
    now[0] += 7.0
    assert budget.spent() == 7.0
    assert variant_planning.beyond_plain_jit({}, budget) == {} and budget.spent() == 7.0


def test_products_in_loops_are_tried_with_the_library(monkeypatch):
    def recurrence(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0]

    def product(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(h), None), x @ w, None, length=4)[0]

    w, x = values(8, 8), values(2, 8)
    looped, plain = (jaxapi.closed_jaxpr_of(jax.jit(f), w, x) for f in (recurrence, product))
    assert variant_space.has_loops(looped) and not variant_space.has_loops(
        jaxapi.closed_jaxpr_of(block, values(3, 5, 5, 8))
    )
    assert variant_space.has_products_in_loops(looped) and not variant_space.has_products_in_loops(plain)
    monkeypatch.setattr(variant_space, "accepts", lambda name, platform: True)
    assert variant_space.loop_options(looped, "cuda") == ("library",)
    assert variant_space.loop_options(plain, "cuda") == variant_space.loop_options(looped, "cpu") == ()
    names = variant_space.programs([None], ["graphs"], ["library"])
    assert names == ["xla", "xla:graphs", "xla:library", "jcuts", "jcuts:graphs", "jcuts:library"]
    assert variant_space.is_known("jcuts:library", "cuda", True) and not variant_space.is_known(
        "xla:library", "cpu", True
    )
    assert variant_space.compiler_options("xla:library", "cuda") == {"xla_gpu_enable_triton_gemm": False}


def test_others_race_where_all_that_were_chosen_are_refused():
    plain, turned = None, Variant(("turns",), "all")
    anchored = Variant((), "anchored")
    names = ["xla", "xla:graphs", *variant_space.programs([plain, anchored, turned], ["graphs"])[2:]]
    gains = {plain: 1e-4, anchored: 2e-4, turned: 3e-4}
    late = race_limits.beyond_race_limit(names, gains)
    raced = [name for name in names if name not in late]
    assert raced == ["xla", "xla:graphs", "jcuts/turns:graphs"]
    more = race_limits.in_place_of_refused({"jcuts/turns:graphs": "is off"}, raced, late, gains)
    assert more == ["jcuts/plain/anchored:graphs"]
    assert race_limits.in_place_of_refused({}, raced, late, gains) == []
    assert race_limits.in_place_of_refused({"jcuts/turns:graphs": "is off"}, raced, {}, gains) == []


def test_recomputed_attention_is_tried_without_multi_output_fusion(monkeypatch):
    monkeypatch.setattr(variant_space, "accepts", lambda name, platform: True)
    monkeypatch.setattr(variant_space, "options", lambda platform: ("graphs",))
    forms = [None, Variant(("recomputes",)), Variant(("recomputes",), ATTENTION), Variant(("turns",))]
    names = race_limits.with_separate(variant_space.programs(forms, ["graphs"]), "cuda")
    separate = ["jcuts/recomputes:separate", "jcuts/recomputes/attention:separate"]
    assert [name for name in names if name.endswith(":separate")] == separate
    assert race_limits.with_separate(names, "cpu") == names
    options = variant_space.compiler_options("jcuts/recomputes:separate", "cuda")
    assert options is not None and options["xla_disable_hlo_passes"] == "multi_output_fusion"
    gains = dict.fromkeys(forms, 1e-3) | {forms[1]: 2e-3}
    late = race_limits.beyond_race_limit(names, gains)
    assert {name for name in names if name not in late} == {"xla", "xla:graphs", *separate}

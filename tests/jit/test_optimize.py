"""``optimize`` and ``Optimized``: conventions, decisions, errors."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.api import BoundOptimized, Optimized
from jcuts.base import knobs
from jcuts.base.errors import JcutsError, NotJaxError, UsageError
from jcuts.jit import decision as decisions
from jcuts.jit import decision_cache, end_to_end_benchmark
from tests.primitive.conftest import MARK, toy  # noqa: F401  (a fixture)

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def scaled(x, k=2.0):
    """Multiply."""
    return x * k


# ------------------------------------------------------------ conventions


def test_decorator_with_and_without_arguments():
    @jcuts.optimize
    def f(x):
        return x + 1

    @jcuts.optimize(mode="fusion", tune="off")
    def g(x):
        return x + 1

    assert isinstance(f, Optimized) and isinstance(g, Optimized)
    assert g.settings.mode == "fusion" and f.settings.mode == "mixed"
    np.testing.assert_array_equal(f(X), g(X))


def test_keeps_name_doc_and_signature():
    f = jcuts.optimize(scaled)
    assert f.__name__ == "scaled" and f.__doc__ == "Multiply." and f.__wrapped__ is scaled
    assert inspect.signature(f) == inspect.signature(scaled)
    assert "scaled" in repr(f)


def test_methods_are_bound():
    class Model:
        k = 3.0

        @jcuts.optimize(static_argnums=0, tune="off")
        def step(self, x):
            return x * self.k

    model = Model()
    assert isinstance(model.step, BoundOptimized) and isinstance(Model.step, Optimized)
    np.testing.assert_array_equal(model.step(X), X * 3)
    assert "stablehlo.multiply" in model.step.lower(X).as_text()
    assert model.step.__name__ == "step"


def test_callable_objects_and_partials():
    import functools

    class Call:
        def __call__(self, x):
            return x * 2

    np.testing.assert_array_equal(jcuts.optimize(Call(), tune="off")(X), X * 2)
    np.testing.assert_array_equal(jcuts.optimize(functools.partial(scaled, k=5.0), tune="off")(X), X * 5)


def test_is_accepted_where_jax_wants_a_jitted_function():
    f = jcuts.optimize(scaled, tune="off")
    assert jax.export.export(f)(X).call(X).shape == X.shape
    assert f.trace(X).jaxpr.out_avals[0].shape == X.shape
    assert f.eval_shape(X).shape == X.shape


def test_retraces_only_for_new_signatures():
    traced = []

    @jcuts.optimize(tune="off")
    def f(x):
        traced.append(x.shape)
        return x + 1

    for _ in range(3):
        f(X)
    once = len(traced)
    f(X[:2])
    again = len(traced)
    for _ in range(3):
        f(X), f(X[:2])
    assert once >= 1 and again > once and len(traced) == again


def _identity_counted():
    traced = []

    def f(x, k=2):
        traced.append(x.shape)
        return x * k

    return f, traced


def test_a_function_seen_before_is_not_traced_again():
    f, traced = _identity_counted()
    jcuts.optimize(f, tune="off")(X)
    before = len(traced)
    for _ in range(3):
        np.testing.assert_array_equal(jcuts.optimize(f, tune="off")(X), X * 2)
        np.testing.assert_array_equal(jcuts.optimize(tune="off")(f)(X), X * 2)
    assert len(traced) == before


def test_other_options_and_knobs_are_other_programs():
    f, _ = _identity_counted()
    made = [
        jcuts.optimize(f),
        jcuts.optimize(f, tune="off"),
        jcuts.optimize(f, static_argnames="k"),
        jcuts.optimize(f, static_argnums=[1]),
        jcuts.optimize(f, donate_argnums=(0,)),
    ]
    with knobs.scope(disable=True):
        made.append(jcuts.optimize(f))
        assert jcuts.optimize(f) is made[-1]
    assert len({id(m) for m in made}) == len(made)
    assert jcuts.optimize(f) is made[0]


def test_every_static_value_has_a_decision_of_its_own():
    f = jcuts.optimize(lambda x, n: x * n, static_argnums=1, tune="off")
    np.testing.assert_array_equal(f(X, 2), X * 2)
    assert f.decision(X, 2) is not None and f.decision(X, 3) is None


def test_functions_of_one_definition_stay_apart():
    class Scale:
        def __init__(self, k):
            self.k = k

        def run(self, x):
            return jcuts.optimize(self.times, tune="off")(x)

        def times(self, x):
            return x * self.k

    for k in (2.0, 3.0):
        np.testing.assert_array_equal(Scale(k).run(X), X * k)
        np.testing.assert_array_equal(jcuts.optimize(lambda x, k=k: x + k, tune="off")(X), X + k)

    f, _ = _identity_counted()
    jcuts.optimize(f, tune="off")(X)

    @functools.wraps(f)  # copies the attributes of f
    def negated(x):
        return -f(x)

    np.testing.assert_array_equal(jcuts.optimize(negated, tune="off")(X), -X * 2)
    np.testing.assert_array_equal(jcuts.optimize(f, tune="off")(X), X * 2)


def test_what_is_shared_dies_with_the_function():
    f, _ = _identity_counted()
    array = jnp.ones(3)
    held = weakref.ref(f), weakref.ref(jcuts.optimize(f, tune="off"))
    jcuts.optimize(f, tune="off")(array)
    jax.jit(jcuts.optimize(f, tune="off"))(array)
    assert held[1]() is not None  # the function keeps it
    del f
    gc.collect()
    assert held[0]() is None and held[1]() is None


def test_programs_do_not_travel_with_a_function_that_is_pickled():
    f, _ = _identity_counted()
    jcuts.optimize(f, tune="off")(X)
    (kept,) = (v for k, v in f.__dict__.items() if "jcuts" in k)
    assert pickle.loads(pickle.dumps(kept)).by_options == {}


def test_clear_cache_forgets():
    f = jcuts.optimize(scaled, tune="off")
    f(X)
    assert f.decision(X) is not None
    f.clear_cache()
    assert f.decision(X) is None
    np.testing.assert_array_equal(f(X), X * 2)


def test_threads_agree():
    f = jcuts.optimize(lambda x: jnp.sin(x) * 2)
    results = []
    threads = [threading.Thread(target=lambda: results.append(np.asarray(f(X)))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    for r in results:
        np.testing.assert_allclose(r, np.sin(X) * 2, rtol=1e-6)


# ------------------------------------------------------------ decisions


def test_concrete_call_may_measure_and_sees_real_values(toy):  # noqa: F811
    f = jcuts.optimize(lambda x, n: jax.lax.fori_loop(0, n, lambda _, v: v * 1.5, x))
    f(X, 3)
    first = toy.calls[0]
    assert first["may_measure"] is True
    assert int(first["examples"][1]) == 3
    assert all(not c["may_measure"] for c in toy.calls[1:])


def test_nothing_measures_inside_a_trace(toy):  # noqa: F811
    jax.jit(lambda x: jcuts.optimize(scaled)(x))(X)
    assert toy.calls and not any(c["may_measure"] for c in toy.calls)


@pytest.mark.parametrize("tune", ["cached", "off"])
def test_other_tune_modes_never_measure(toy, tune):  # noqa: F811
    f = jcuts.optimize(scaled, tune=tune)
    f(X)
    assert toy.calls and not any(c["may_measure"] for c in toy.calls)
    assert f.decision(X).chosen == end_to_end_benchmark.JCUTS and not f.decision(X).seconds


def test_guard_times_both_and_keeps_the_decision(toy):  # noqa: F811
    store = end_to_end_benchmark.MemoryStore()
    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, store)
    f(X)
    decision = f.decision(X)
    assert decision.measured and {end_to_end_benchmark.XLA, end_to_end_benchmark.JCUTS} <= set(decision.seconds) | set(
        decision.rejected
    )
    again = Optimized(scaled, f.settings, {}, store)
    again(X)
    assert again.decision(X) == decision


def test_stored_decision_is_followed(toy):  # noqa: F811
    class Fixed(end_to_end_benchmark.MemoryStore):
        def guard(self, key):
            return end_to_end_benchmark.Decision(end_to_end_benchmark.JCUTS, "kept", {}, 0.0, {}, True).to_dict()

    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, Fixed())
    np.testing.assert_array_equal(f(X), X * 2)
    assert f.decision(X).reason == "kept"


@pytest.mark.parametrize(
    "data",
    [{}, {"chosen": 1}, {"chosen": "gone", "reason": "", "seconds": {}, "margin": 0, "rejected": {}, "measured": True}],
)
def test_foreign_store_content_is_ignored(data):
    class Foreign(end_to_end_benchmark.MemoryStore):
        def guard(self, key):
            return data

    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, Foreign())
    np.testing.assert_array_equal(f(X), X * 2)
    assert f.decision(X).chosen.startswith(end_to_end_benchmark.XLA)


def test_several_programs_dispatch_by_signature(toy):  # noqa: F811
    class ByShape(end_to_end_benchmark.MemoryStore):
        seen = 0

        def guard(self, key):
            self.seen += 1  # twice for each signature: pinned, and not
            chosen = end_to_end_benchmark.JCUTS if self.seen <= 2 else end_to_end_benchmark.XLA
            return end_to_end_benchmark.Decision(chosen, "kept", {}, 0.0, {}, True).to_dict()

    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, ByShape())
    small, large = X[:1], X
    for _ in range(2):
        np.testing.assert_array_equal(f(small), small * 2)
        np.testing.assert_array_equal(f(large), large * 2)
    assert (
        f.decision(small).chosen == end_to_end_benchmark.JCUTS and f.decision(large).chosen == end_to_end_benchmark.XLA
    )


def test_chosen_program_is_the_one_that_runs(toy):  # noqa: F811
    f = jcuts.optimize(scaled, tune="off")
    f(X)
    assert MARK in f.lower(X).as_text()


def test_tune_measures_again(toy):  # noqa: F811
    f = jcuts.optimize(scaled, tune="off")
    f(X)
    report = f.tune(X)
    assert any(c["may_measure"] for c in toy.calls) and report.equations == 1


def test_explain_before_any_call(toy):  # noqa: F811
    assert jcuts.optimize(scaled).explain(X).equations == 1
    assert not any(c["may_measure"] for c in toy.calls)


def test_guard_chooses_the_plainer_program_in_a_tie():
    samples = {
        "xla": end_to_end_benchmark.measure_statistics.Samples((1.0, 1.0, 1.01)),
        "jcuts": end_to_end_benchmark.measure_statistics.Samples((0.995, 0.995, 1.0)),
    }
    assert end_to_end_benchmark._choose(samples, {}).chosen == "xla"


def test_guard_chooses_the_faster_program():
    samples = {
        "xla": end_to_end_benchmark.measure_statistics.Samples((1.0, 1.0, 1.01)),
        "jcuts": end_to_end_benchmark.measure_statistics.Samples((0.5, 0.5, 0.51)),
    }
    decision = end_to_end_benchmark._choose(samples, {})
    assert decision.chosen == "jcuts" and "2.00 times" in decision.reason


def _call(fn):
    jitted = jax.jit(fn)
    return lambda x: jitted(x)


def test_guard_rejects_wrong_and_failing_programs():
    def fails(x):
        raise RuntimeError("no device")

    calls = {
        "xla": _call(lambda x: x * 2),
        "wrong": _call(lambda x: x * 3),
        "nan": _call(lambda x: x * jnp.nan),
        "fails": fails,
    }
    decision = end_to_end_benchmark.benchmark_variants(calls, lambda: ((X,), {}), donates=False, seconds=0.02)
    assert decision.chosen == "xla"
    assert "norm" in decision.rejected["wrong"] and "NaN" in decision.rejected["nan"]
    assert "no device" in decision.rejected["fails"]


def test_guard_lets_the_users_own_error_through():
    def fails(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        end_to_end_benchmark.benchmark_variants({"xla": fails}, lambda: ((X,), {}), donates=False, seconds=0.02)


def test_decision_round_trip():
    decision = end_to_end_benchmark.Decision("jcuts", "r", {"xla": 2.0, "jcuts": 1.0}, 0.02, {"x": "y"}, True)
    assert end_to_end_benchmark.Decision.from_dict(decision.to_dict()) == decision


# ------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"},
        {"tune": "never"},
        {"tolerance": 0},
        {"workspace_limit": -1},
        {"total_workspace": 1.5},
        {"convolution_accuracy": "any"},
        {"strict": "yes"},
        {"tolerance": True},
    ],
)
def test_impossible_options(options):
    with pytest.raises(UsageError) as error:
        jcuts.optimize(scaled, **options)
    assert set(options) & set(error.value.values)


@pytest.mark.parametrize("fn", [None, 3, "f", None.__class__.__name__, [scaled]])
def test_not_a_function(fn):
    with pytest.raises(NotJaxError):
        jcuts.optimize(fn)


async def _coroutine(x):
    return x


def _generator(x):
    yield x


@pytest.mark.parametrize("fn", [_coroutine, _generator])
def test_functions_that_jax_cannot_trace(fn):
    with pytest.raises(NotJaxError) as error:
        jcuts.optimize(fn)
    assert error.value.kind in ("coroutine", "generator")


def test_unhashable_static_argument():
    f = jcuts.optimize(lambda x, n: x * sum(n), static_argnums=1)
    with pytest.raises(UsageError, match="unhashable type list") as error:
        f(X, [1, 2])
    assert error.value.value == [1, 2]
    np.testing.assert_array_equal(f(X, (1, 2)), X * 3)
    with pytest.raises(UsageError, match="unhashable"):
        f(X, [1, 2])


def test_argument_that_is_no_array():
    f = jcuts.optimize(scaled)
    with pytest.raises(NotJaxError, match="static_argnums"):
        f("text")
    f(X)
    with pytest.raises(NotJaxError, match="static_argnums"):
        f("text")


def test_argument_that_is_no_array_is_named():
    class Model:
        @jcuts.optimize
        def predict(self, x):
            return x * 2

    nested = jcuts.optimize(lambda params, *, scale: params["w"][1] * scale)
    for name, call in (
        ("self of ", lambda: Model().predict(X)),
        (r"params\['w'\]\[1\] of ", lambda: nested({"w": [X, "text"]}, scale=2)),
        ("scale of ", lambda: nested({"w": [X, X]}, scale="2")),
    ):
        with pytest.raises(NotJaxError, match=f"^argument {name}"):
            call()


def test_result_that_is_no_array():
    with pytest.raises(TypeError):
        jcuts.optimize(lambda x: "text")(X)
    with pytest.raises(NotJaxError, match="returned a value of type str"):
        jax.jit(jcuts.optimize(lambda x: "text"))(X)


def test_tracing_errors_of_jax_pass_through():
    def f(x):
        return x if x.sum() > 0 else -x

    for call in (jcuts.optimize(f), jax.jit(jcuts.optimize(f)), jcuts.optimize(f).lower):
        with pytest.raises(jax.errors.TracerBoolConversionError) as error:
            call(X)
        assert not isinstance(error.value, JcutsError)


def test_errors_of_the_user_pass_through():
    def f(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as error:
        jcuts.optimize(f)(X)
    assert "_Undecided" not in repr(error.value.__context__)


def test_wrong_arguments_raise_type_error():
    with pytest.raises(TypeError):
        jcuts.optimize(scaled)()
    with pytest.raises(TypeError):
        jcuts.optimize(scaled)(X, wrong=1)


_WITHOUT_NUMBA = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import jax.numpy as jnp, numpy as np, jcuts
x = np.ones((64, 64), np.float32)
f = jcuts.optimize(lambda x: jnp.tanh(x * 3.25) + 1, tune="off")
np.testing.assert_allclose(f(x), np.tanh(x * 3.25) + 1, rtol=1e-6)
print(f.explain(x))
"""


def test_without_numba_everything_goes_to_xla():
    out = subprocess.run(
        [sys.executable, "-c", _WITHOUT_NUMBA], capture_output=True, text=True, timeout=120, check=True
    )
    assert "is not installed" in out.stdout and "left to XLA" in out.stderr


# ------------------------------------------------------------ decisions that do not last


@pytest.fixture
def busy(toy, monkeypatch):  # noqa: F811
    """A pipeline that meets another measuring process until it is told otherwise."""
    plan = toy.optimize_jaxpr
    toy.is_busy = True

    def optimize_jaxpr(*args, may_measure, **kwargs):
        outcome = plan(*args, may_measure=may_measure, **kwargs)
        report = dataclasses.replace(outcome.report, postponed=toy.is_busy and may_measure)
        return dataclasses.replace(outcome, report=report)

    monkeypatch.setattr(sys.modules["jcuts.pipeline.passes"], "optimize_jaxpr", optimize_jaxpr)
    clock = types.SimpleNamespace(monotonic=lambda: toy.now, perf_counter=lambda: 0.0)
    monkeypatch.setattr("jcuts.jit.optimized.time", clock)
    toy.now = 0.0
    return toy


def measured(toy):  # noqa: F811
    return sum(c["may_measure"] for c in toy.calls)


@pytest.mark.parametrize("mode", ["mixed", "fusion"])
def test_a_call_that_could_not_tune_is_tuned_by_a_later_one(busy, mode):
    store = end_to_end_benchmark.MemoryStore()
    f = Optimized(scaled, jcuts.optimize(scaled, mode=mode).settings, {}, store)
    for _ in range(3):
        np.testing.assert_array_equal(f(X), X * 2)
    assert measured(busy) == 1 and f.decision(X).deferred and not store._kept
    assert f.decision(X).chosen == (end_to_end_benchmark.XLA if mode == "mixed" else end_to_end_benchmark.JCUTS)
    busy.now = 31.0  # busy still: the next pause is twice as long
    for _ in range(3):
        f(X)
    assert measured(busy) == 2
    busy.is_busy = False
    busy.now = 80.0
    f(X)
    assert measured(busy) == 2
    busy.now = 92.0
    for _ in range(3):
        np.testing.assert_array_equal(f(X), X * 2)
    assert measured(busy) == 3 and not f.decision(X).deferred


def test_forms_that_could_not_be_measured_decide_nothing(busy, monkeypatch):
    plan = sys.modules["jcuts.pipeline.passes"].optimize_jaxpr

    def unchanged(closed, *args, **kwargs):  # all was left to XLA for now
        outcome = plan(closed, *args, **kwargs)
        return dataclasses.replace(outcome, closed=closed) if busy.is_busy else outcome

    monkeypatch.setattr(sys.modules["jcuts.pipeline.passes"], "optimize_jaxpr", unchanged)
    monkeypatch.setattr("jcuts.jit.variant_space.GPUS", ("cpu",))
    store = end_to_end_benchmark.MemoryStore()
    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, store)
    np.testing.assert_array_equal(f(X), X * 2)
    assert f.decision(X).deferred and f.decision(X).chosen == end_to_end_benchmark.XLA and not store._kept
    busy.is_busy, busy.now = False, 31.0
    np.testing.assert_array_equal(f(X), X * 2)
    assert not f.decision(X).deferred and store._kept


def test_a_decision_taken_in_noise_is_measured_again_by_a_later_process(toy, monkeypatch):  # noqa: F811
    store, raced = end_to_end_benchmark.MemoryStore(), []

    def decide(calls, fresh_args, **_):
        raced.append(sorted(calls))
        return end_to_end_benchmark.Decision(end_to_end_benchmark.XLA, "busy", {"xla": 1.0}, measured=True, noisy=True)

    monkeypatch.setattr(end_to_end_benchmark, "benchmark_variants", decide)
    settings = jcuts.optimize(scaled).settings
    for process in range(end_to_end_benchmark.MOST_TRIES + 2):
        decision_cache.forget_decided_here()
        for _ in range(2):  # within a process once is enough
            f = Optimized(scaled, settings, {}, store)
            f(X)
        assert len(raced) == min(process + 1, end_to_end_benchmark.MOST_TRIES)
    assert f.decision(X).tries == end_to_end_benchmark.MOST_TRIES and f.decision(X).is_final


def test_equal_devices_share_a_decision(toy, monkeypatch):  # noqa: F811
    raced = []

    def decide(calls, fresh_args, **_):
        raced.append(sorted(calls))
        return end_to_end_benchmark.Decision(end_to_end_benchmark.XLA, "here", {"xla": 1.0}, measured=True)

    monkeypatch.setattr(end_to_end_benchmark, "benchmark_variants", decide)
    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, end_to_end_benchmark.MemoryStore())
    for device in jax.devices()[:2]:
        out = f(jax.device_put(X, device))
        assert out.devices() == {device}
        np.testing.assert_array_equal(out, X * 2)
    f(X)
    assert len(raced) == 1
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    signatures = [f._arguments.signature((x,), {}) for x in (X, jax.device_put(X, host))]
    keys = {f._deciding.decisions.key(f._closed((X,), {}), signature, "cpu") for signature in signatures}
    assert len(keys) == 2


def test_explain_knows_what_an_earlier_process_decided(toy):  # noqa: F811
    class Kept(end_to_end_benchmark.MemoryStore):
        def guard(self, key):
            return end_to_end_benchmark.Decision(end_to_end_benchmark.XLA, "kept", {}, 0.0, {}, True).to_dict()

    f = Optimized(scaled, jcuts.optimize(scaled).settings, {}, Kept())
    assert (
        f._deciding.decisions.of_earlier_process(f._closed((X,), {}), f._arguments.signature((X,), {}), True).reason
        == "kept"
    )


def test_disabled_explains_itself(monkeypatch):
    monkeypatch.setenv("JCUTS_DISABLE", "1")
    report = jcuts.optimize(scaled).explain(X)
    assert report.subsets == () and report.guard["chosen"] == "xla"
    assert "JCUTS_DISABLE" in str(report) and "0% of the FLOP" in str(report)


def test_a_misspelt_variable_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr("jcuts.api._told", set())
    monkeypatch.setenv("JCUTS_MAX_CANDIDATE", "3")
    for _ in range(2):
        jcuts.optimize(scaled)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "JCUTS_MAX_CANDIDATE means nothing" in line and "did you mean JCUTS_MAX_CANDIDATES?" in line


def test_a_first_call_traces_the_function_once(toy):  # noqa: F811
    traced = []

    def counted(x, n):
        traced.append(n)
        return {"y": x * n}

    settings = jcuts.optimize(counted, mode="fusion", static_argnums=1).settings
    f = Optimized(counted, settings, {"static_argnums": 1}, end_to_end_benchmark.MemoryStore())
    for n in (2, 3, 2):  # the same types, another static value: another function
        np.testing.assert_array_equal(f(X, n)["y"], X * n)
    assert traced == [2, 3]
    f.tune(X, 3)
    g = Optimized(lambda x, n: x - n, settings, {"static_argnums": 1}, end_to_end_benchmark.MemoryStore())
    np.testing.assert_array_equal(g(X, 3), X - 3)


def test_without_a_native_library_nothing_is_decided_for_good(tmp_path, caplog):
    """An installation that is mended tunes: nobody has compared its kernels."""
    store = end_to_end_benchmark.MemoryStore()
    decisions.set_default_store(store)
    try:
        with knobs.scope(native=tmp_path / "nothing.so"):
            broken = jcuts.optimize(scaled)
            np.testing.assert_array_equal(broken(X), 2 * X)
        decision = broken.decision(X)
        assert decision.chosen.startswith("xla") and "no kernels: JCUTS_NATIVE" in decision.reason
        assert not store._kept
    finally:
        decisions.set_default_store(None)


def test_who_may_not_measure_follows_what_was_decided():
    store = end_to_end_benchmark.MemoryStore()
    decisions.set_default_store(store)
    try:
        decided = jcuts.optimize(scaled)
        decided(X)
        (key,) = store._kept
        store._kept[key] = {**store._kept[key], "chosen": "xla", "reason": "it is faster"}
        cached, estimated = (jcuts.optimize(scaled, tune=how) for how in ("cached", "off"))
        for f in (cached, estimated):
            np.testing.assert_array_equal(f(X), 2 * X)
        assert cached.decision(X).reason == "it is faster"
        assert estimated.decision(X).chosen == "jcuts"  # the estimate alone
    finally:
        decisions.set_default_store(None)


def test_an_array_of_no_numbers_is_named():
    with pytest.raises(NotJaxError, match="has the type ndarray of dtype <U1, which JAX takes for no array"):
        jcuts.optimize(scaled)(np.array(["a"]))


def test_the_package_lists_what_it_has():
    assert {"optimize", "load", "stats", "__version__"} <= set(dir(jcuts))

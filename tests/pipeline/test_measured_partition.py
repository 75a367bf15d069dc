"""The partition search on a GPU that is not here: pretended times decide, and the incumbent has to be beaten."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.settings import CLEAR, SEARCHED, Settings, Variant
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.jit import variant_planning, variant_space
from jcuts.pipeline import computation, kernel_selection, measured_partition, partition_store
from jcuts.pipeline.measured_partition import GPU_CANDIDATES, MOST_PER_ROUND, ROUNDS, Summary
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.trace.inline import inline
from jcuts.tune import session, time_budget
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.database import Store
from jcuts.tune.select import over_budget
from tests.fusion.test_partition_space import ARCH
from tests.ptx import machine as ptx_machine

SETTINGS = Settings(form=Variant((), SEARCHED))
GREEDY = Settings()
X = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)


def residual(x, w):
    """Two products whose results meet: the sum may join either of them, or none."""
    return jax.nn.relu((x @ w) * 2 + (x @ (w + 1)) * 3)


def siblings(x, w):
    """Two maps of one argument that no edge joins, large enough for kernels of their own."""
    return jnp.tanh(x) * 2, jnp.exp(x) + 1


def tailed(x, w):
    """A product with a tail, and two without."""
    return jax.nn.relu(jnp.tanh(x @ w) * 2), w @ w, x @ w.T


def looped(x, w):
    def step(carry, _):
        return residual(carry, w), carry.sum()

    return jax.lax.scan(step, x, None, length=3)


@pytest.fixture
def store(monkeypatch):
    store = Store(None, device="test", versions="1")
    monkeypatch.setattr(session, "_store", store)
    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: GpuMachine.named("H200"))
    monkeypatch.setattr(computation.xla_devices, "this", lambda: computation.xla_devices.Gpu("H200", (9, 0), 132))
    return store


class Clock:
    """Stands in for measuring: ``seconds`` says what a region's kernels and XLA take; remembers what was asked."""

    def __init__(self, seconds):
        self.seconds, self.asked, self.cut = seconds, [], False

    def __call__(self, problems, tuned):
        for region in problems.regions:
            self.asked.append(region)
            mine, xla = self.seconds(region)
            label = session._label(region.ranked[0][0])
            times = [Measurement(n, s, s, s, 5, "chain") for n, s in ((label, mine), (LIBRARY, xla))]
            winner = label if mine < xla else LIBRARY
            cut = (over_budget("more", 2),) if self.cut else ()
            region.choice = Choice(problems.problems[region.identity].digest, winner, "", "measured", tuple(times), cut)
            region.chosen, region.origin = (region.ranked[0][0] if mine < xla else None), "measured"


@pytest.fixture
def clock(monkeypatch, store):
    def of(seconds):
        made = Clock(seconds)
        monkeypatch.setattr(session, "resolve", made)
        return made

    return of


def level_of(function=residual, settings=SETTINGS):
    closed = simplify(inline(jax.make_jaxpr(function)(X, W)))
    return computation.group(closed, settings, computation.Fuel(), "cuda", wait=True)


def selected(function=residual, settings=SETTINGS, may_measure=True):
    top = level_of(function, settings)
    return top, kernel_selection.select(top, settings, may_measure=may_measure, platform="cuda")


def cover(level):
    return [sorted(s.members) for s in level.subsets]


def predicted(region):
    """Everything takes what the model says, XLA twice that."""
    time = measured_partition.SpaceOptions.on_gpu(GpuMachine.named("H200")).model.kernel(region.program)
    return time, 2 * time


def slow_if_fused(region):
    """The same, but kernels of more than one product's operations with tails are slow."""
    mine, xla = predicted(region)
    return (40 * mine, 40 * xla) if len(region.members) > 3 else (mine, xla)


def test_a_slow_fused_kernel_is_taken_apart_and_a_later_process_takes_the_cover_over(clock, monkeypatch):
    greedy, summary = (clock(slow_if_fused), selected(settings=GREEDY))[1]
    assert summary.origin == "greedy" and max(len(s.members) for s in greedy.subsets) > 3
    measuring = clock(slow_if_fused)
    top, summary = selected()
    assert summary.origin == "measured" and summary.measured > 0 and not summary.is_cut
    assert summary.seconds < summary.greedy_seconds
    assert cover(top) != cover(greedy) and max(len(s.members) for s in top.subsets) <= 3
    assert all(s.chosen is not None and s.choice.origin == "measured" for s in top.subsets)
    everything = {n.number for n in top.graph.nodes}
    assert {m for s in top.subsets for m in s.members} | top.left_out.keys() == everything
    assert partition_store.is_partition(top, [s.members for s in top.subsets])
    # another process that may not measure makes the same programs, and ranks nothing
    measuring.asked.clear()
    monkeypatch.setattr(computation.gpu_candidates, "candidates", None)
    again, summary = selected(may_measure=False)
    assert summary.origin == "stored" and cover(again) == cover(top)
    assert "stored; " in str(summary) and summary.measured > 0 and summary.seconds < summary.greedy_seconds
    assert [s.program for s in again.subsets] == [s.program for s in top.subsets]
    assert sorted(s.identity for s in measuring.asked) == sorted(s.identity for s in again.subsets)
    assert partition_store.load_partition(again) == partition_store.load_partition(top)


def test_the_greedy_partition_stays_where_it_is_as_fast_as_predicted(clock):
    measuring = clock(predicted)
    greedy, _ = selected(settings=GREEDY)
    measuring.asked.clear()
    top, summary = selected()
    assert summary.origin == "measured" and summary.seconds == pytest.approx(summary.greedy_seconds)
    assert cover(top) == cover(greedy)
    assert {s.identity for s in measuring.asked} == {s.identity for s in top.subsets}


def test_measured_parts_that_disappoint_change_nothing(clock):
    """The fused kernel is slow, which makes its parts promising; measured, they are slower still."""

    def seconds(region):
        mine, _ = predicted(region)
        return (40 * mine, 80 * mine) if len(region.members) > 3 else (1.0, 1.0)

    clock(seconds)
    greedy, _ = selected(settings=GREEDY)
    top, summary = selected()
    assert summary.measured > 0 and cover(top) == cover(greedy)
    assert summary.seconds == pytest.approx(summary.greedy_seconds)


@pytest.mark.parametrize("settings", [GREEDY, Settings(form=Variant((), "anchored")), Settings(mode="no_fusion")])
def test_other_variants_are_not_searched(clock, settings):
    clock(slow_if_fused)
    top, summary = selected(settings=settings)
    assert summary.origin == "greedy"
    assert {s.identity for s in top.subset_cache.values() if s.choice} == {s.identity for s in top.subsets}


def test_what_does_not_race_is_searched_itself(clock):
    clock(slow_if_fused)
    top, summary = selected(settings=Settings(mode="fusion"))
    assert summary.origin == "measured" and max(len(s.members) for s in top.subsets) <= 3


def test_a_spent_budget_leaves_the_greedy_partition_and_stores_nothing(clock, store):
    clock(slow_if_fused)
    greedy, _ = selected(settings=GREEDY)
    before = store.ls()
    time = itertools.count(0.0, 0.5)
    with time_budget.spending(time_budget.TimeBudget(1.0, lambda: next(time))):
        top, summary = selected()
    assert summary.origin == "greedy" and cover(top) == cover(greedy) and store.ls() == before
    _, summary = selected()  # a later process has the time
    assert summary.origin == "measured" and not summary.is_cut


def test_a_budget_covers_the_most_promising_first(clock, monkeypatch):
    measuring = clock(slow_if_fused)
    monkeypatch.setattr(measured_partition, "workers_of", lambda: 1)
    with time_budget.spending(time_budget.TimeBudget(1.0 * GPU_CANDIDATES + 2.5, lambda: 0.0)):
        _, summary = selected()
    assert summary.measured == ROUNDS and summary.is_cut and "until the tuning budget was spent" in str(summary)
    assert measuring.asked


def test_times_of_a_cut_measurement_do_not_count(clock, store):
    measuring = clock(slow_if_fused)
    greedy, _ = selected(settings=GREEDY)
    before = store.ls()

    class Ended(Clock):
        def __call__(self, problems, tuned):
            self.cut = bool(self.asked)  # the incumbent is measured to the end
            super().__call__(problems, tuned)

    ended = Ended(measuring.seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "resolve", ended)
        top, summary = selected()
    assert len(ended.asked) > len(top.subsets)
    assert summary.origin == "greedy" and cover(top) == cover(greedy) and store.ls() == before


def test_no_more_is_measured_than_the_rounds_allow(clock):
    def function(x, w):
        """Layers of different widths, the first of them slow where their tails are fused."""
        for k in range(18):
            x = jax.nn.relu(jnp.exp(x @ w[: x.shape[1], : 512 - 8 * k]) * 2 + k)
        return x

    def seconds(region):
        mine, xla = predicted(region)
        slow = len(region.members) > 3 and any(v.aval.shape[-1] >= 456 for v in region.outputs)
        return (40 * mine, 40 * xla) if slow else (mine, xla)

    measuring = clock(seconds)
    _, summary = selected(function)
    assert 0 < summary.measured <= ROUNDS * MOST_PER_ROUND
    distinct = {s.identity for s in measuring.asked}
    assert summary.measured <= len(distinct)


@pytest.mark.parametrize("data", [None, [], {}, {"explored": "x"}, {"explored": 3}])
def test_statistics_of_a_search_are_stored_with_its_partition(data):
    made = Summary("measured", 30, 4, 2e-3, 1e-3, True)
    again = Summary.stored(made.to_json())
    assert dataclasses.replace(again, origin="measured") == made
    assert str(again) == str(made).replace("partition: ", "partition: stored; ")
    assert str(Summary.stored(data)) == "partition: stored"


def test_planning_is_deterministic(clock):
    found = []
    for _ in range(2):
        computation._grouped.clear()
        session.set_store(Store(None, device="test", versions="1"))
        measuring = clock(slow_if_fused)
        top, summary = selected()
        found.append((partition_store.load_partition(top), summary, [s.identity for s in measuring.asked]))
    assert found[0] == found[1]


def test_maps_that_share_an_argument_become_one_kernel(clock):
    """Horizontal merging: no edge joins them, so that the greedy partition has two kernels."""

    def seconds(region):
        mine, _ = predicted(region)
        return (mine if len(region.outputs) > 1 else 3 * mine), 1.0

    clock(seconds)
    greedy, _ = selected(siblings, settings=GREEDY)
    assert [len(s.outputs) for s in greedy.subsets] == [1, 1]
    top, summary = selected(siblings)
    (merged,) = top.subsets
    assert len(merged.outputs) == 2 and merged.program.template == "map" and summary.seconds < summary.greedy_seconds
    assert merged.chosen is not None and len(merged.inputs) == 1


def test_variants_move_prologues_and_epilogues_once(clock, monkeypatch):
    """Those of one function share the moved covers, which are what each would find by itself."""

    def function(x, w):
        return jnp.maximum(x * w[0], 0.0) @ w

    clock(predicted)
    closed = simplify(inline(jax.make_jaxpr(function)(X, W)))
    found = []
    for again in (False, True, False):
        if not again:
            computation._grouped.clear()
        top = computation.group(closed, GREEDY, computation.Fuel(), "cuda", wait=True)
        with monkeypatch.context() as patch:
            if again:
                patch.setattr(kernel_selection, "split_prologues", None)
            kernel_selection.select(top, GREEDY, may_measure=False, platform="cuda")
        found.append([(s.members, s.program) for s in top.subsets])
    assert found[0] == found[1] == found[2] and found[0]


def test_loop_bodies_are_searched(clock):
    clock(slow_if_fused)
    top, _ = selected(looped)
    inner = top.walk()[1]
    assert inner.subsets and all(len(s.members) <= 3 for s in inner.subsets)
    again, summary = selected(looped, may_measure=False)
    assert summary.origin == "stored" and [cover(a) for a in again.walk()] == [cover(a) for a in top.walk()]


def test_small_pieces_that_are_cut_off_stay_with_xla_at_its_time(clock, monkeypatch):
    """An element-wise tail of little traffic is no kernel of its own: it counts what XLA takes, which is more."""
    for module in (kernel_selection, measured_partition):
        monkeypatch.setattr(module, "LEAST_MOVED", 1 << 30)
    measuring = clock(slow_if_fused)
    top, summary = selected(tailed)
    assert summary.seconds < summary.greedy_seconds
    left = {m for m, refusal in top.left_out.items() if refusal.reason == computation.TO_FUSE}
    tails = [s for s in measuring.asked if s.members <= left]
    assert tails and all(top.has_reduction(s.members) for s in top.subsets)
    kept = sum(s.choice.seconds(s.choice.winner) for s in top.subsets)
    assert summary.seconds == pytest.approx(kept + sum(s.choice.seconds(LIBRARY) for s in tails))


@pytest.mark.cuda_compilers
@pytest.mark.parametrize(
    ("function", "seconds", "kernels"),
    [(tailed, slow_if_fused, 4), (siblings, lambda region: (1e-6, 1.0), 1)],
    ids=["taken apart", "merged"],
)
def test_kernels_of_a_searched_partition_compute_the_function(clock, monkeypatch, function, seconds, kernels):
    """All regions, one after the other, on the PTX machine; odd sizes, and against float64."""
    for module in (kernel_selection, measured_partition):
        monkeypatch.setattr(module, "LEAST_MOVED", 0)
    clock(seconds)
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((60, 44), (44, 44)))
    closed = simplify(inline(jax.make_jaxpr(function)(x, w)))
    top = computation.group(closed, SETTINGS, computation.Fuel(), "cuda", wait=True)
    summary = kernel_selection.select(top, SETTINGS, may_measure=True, platform="cuda")
    assert summary.seconds < summary.greedy_seconds and len(top.subsets) == kernels and not top.left_out
    known = dict(zip(closed.jaxpr.invars, (x, w), strict=True))
    for region in top.subsets:
        target = CudaTarget((9, 0))
        kernel, ptx = compiler.compile_program(region.chosen, target), compiler.ptx_of(region.chosen, target)
        results = ptx_machine.run_kernel(ptx, kernel, [known[v] for v in region.inputs])
        known.update(zip(region.outputs, results, strict=True))
    with jax.enable_x64(True):
        wanted = jax.tree.leaves(function(x.astype(np.float64), w.astype(np.float64)))
    for var, want in zip(closed.jaxpr.outvars, wanted, strict=True):
        np.testing.assert_allclose(known[var], want, rtol=5e-3, atol=5e-2)  # products in TF32


# -- the race -------------------------------------------------------------------------------------------------------
class Outcome:
    """What the race looks at."""

    def __init__(self, source, *rows):
        self.closed = source
        self.report = type("Report", (), {"source": source, "subsets": [Row(*row) for row in rows]})()


class Row:
    """A region of a report."""

    def __init__(self, chosen, count, seconds, xla_seconds):
        self.chosen, self.count, self.seconds, self.xla_seconds = chosen, count, seconds, xla_seconds


def test_the_variant_to_search_has_the_rewrites_of_the_fastest_one_with_all_regions():
    kernel, slow, left = ("map/1", 2, 1.0, 9.0), ("map/2", 1, 4.0, 9.0), ("xla", 1, 9.0, 2.5)
    unknown = ("map/3", 1, None, None)
    found = {
        None: Outcome("a", slow),
        Variant(("dots",)): Outcome("b", kernel),
        Variant(("dots",), "anchored"): Outcome("c", ("map/4", 1, 1e-9, 1.0)),
        Variant(("scales",)): Outcome("d", left),
        Variant(("turns",)): Outcome("e", unknown),
    }
    assert variant_space.variant_to_search(found) == Variant(("dots",), SEARCHED)
    assert variant_space.variant_to_search({None: Outcome("a", slow)}) == Variant((), SEARCHED)
    assert variant_space.variant_to_search({Variant((), "anchored"): Outcome("a", slow)}) is None
    assert variant_space.variant_to_search({None: Outcome("a")}) is None
    name = variant_space.name_of(Variant(("dots",), SEARCHED), "graphs")
    assert variant_space.is_known(name, "cuda", True) and not variant_space.is_known(name, "cpu", True)


@pytest.mark.parametrize(("source", "added"), [("other", True), ("a", False), ("original", False)])
def test_a_searched_partition_races_where_it_is_another_program(source, added):
    found = {None: Outcome("a", ("map/1", 1, 1.0, 2.0))}
    asked = []

    def plan(form):
        asked.append(form)
        return Outcome(source, ("map/1", 1, 1.0, 2.0))

    variant_planning._add_derived(found, "original", plan, None)
    assert asked == [Variant((), SEARCHED)] and (asked[0] in found) is added
    with time_budget.spending(time_budget.TimeBudget(0.0)):
        variant_planning._add_derived(found, "original", plan, None)
    assert len(asked) == 1


def test_a_variant_of_clear_gains_races_where_most_time_stays_with_xla():
    found = {None: Outcome("a", ("map/1", 1, 1.0, 2.0), ("map/2", 1, 1.0, 1.1))}
    for row in found[None].report.subsets:
        row.origin = "measured"
    asked = []

    def plan(form):
        asked.append(form)
        return Outcome(str(form), ("map/1", 1, 1.0, 2.0))

    with time_budget.spending(time_budget.TimeBudget(0.0)):  # it measures nothing
        variant_planning._add_derived(found, "original", plan, 10.0)
    assert asked == [Variant((), CLEAR)] == list(found)[1:]


LAYERS = [np.zeros(s, np.float32) for s in [(8, 112, 112, 16), (1, 1, 16, 96), (3, 3, 1, 96)]]


def layers(x, a, b):
    """A 1x1 and a depthwise convolution, with 37 MiB between them that a fused kernel never writes."""
    form = ("NHWC", "HWIO", "NHWC")
    wide = jnp.clip(jax.lax.conv_general_dilated(x, a, (1, 1), "SAME", dimension_numbers=form), 0, 6)
    return jax.lax.conv_general_dilated(wide, b, (2, 2), "SAME", dimension_numbers=form, feature_group_count=96)


def cpu_level():
    closed = simplify(inline(jax.make_jaxpr(layers)(*LAYERS)))
    return computation.group(closed, GREEDY, computation.Fuel(), "cpu", wait=True)


@pytest.mark.parametrize("fused", [True, False])
def test_layers_are_fused_on_a_cpu_where_that_is_measured_to_be_faster(clock, monkeypatch, fused):
    """One kernel of two convolutions; a later process that measures nothing makes it again."""
    # Where caches hold what lies between the two, or memory is fast, the model does not propose the kernel.
    slow = dataclasses.replace(ARCH, bandwidth={"l2": 100e9, "l3": 60e9, "dram": 2e9})
    monkeypatch.setattr("jcuts.schedule.cpu.time_estimate.host_arch", lambda: slow)
    chain = 1e-5 if fused else 5e-3
    clock(lambda region: (chain if region.program.template == "layer_fusion" else 1e-3, 1e-2))
    top = cpu_level()
    summary = kernel_selection.select(top, GREEDY, may_measure=True, platform="cpu")
    assert summary.origin == "measured"
    assert [s.program.template for s in top.subsets].count("layer_fusion") == fused
    again = cpu_level()
    summary = kernel_selection.select(again, GREEDY, may_measure=False, platform="cpu")
    assert summary.origin == "stored" and cover(again) == cover(top)
    assert [s.program for s in again.subsets] == [s.program for s in top.subsets]

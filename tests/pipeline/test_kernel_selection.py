"""The partition search in the pipeline: measured covers are stored, taken over, and checked before they are used."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.settings import Settings, Variant
from jcuts.fusion import join_regions
from jcuts.pipeline import computation, kernel_selection, partition_store
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace.inline import inline
from jcuts.tune import session
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.database import Store

AUTO = Settings()
X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


def fn(x, w):
    return jax.nn.relu((x @ w) * 2 + (x @ (w + 1)) * 3)


def looped(x, w):
    def step(carry, _):
        return fn(carry, w), carry.sum()

    return jax.lax.scan(step, x, None, length=3)


def with_softmax(x, w):
    return jax.nn.softmax(jax.nn.relu(x @ w)[:2, :8])


def level_of(function=fn, mode="mixed"):
    closed = jax.make_jaxpr(function)(X, X)
    return computation.group(simplify(inline(closed)), Settings(mode=mode), computation.Fuel())


@pytest.fixture
def store(monkeypatch):
    store = Store(None, device="test", versions="1")
    monkeypatch.setattr(session, "_store", store)
    return store


@pytest.fixture
def clock(monkeypatch):
    """Replaces measuring: kernels of more than four equations take 1 s, others 1 us; remembers what was asked."""
    asked: list[list[int]] = []

    def choose(problems, choices):
        for subset in problems.regions:
            asked.append(sorted(subset.members))
            label = session._label(subset.ranked[0][0])
            seconds = 1.0 if len(subset.members) > 4 else 1e-6
            time = Measurement(label, seconds, seconds, seconds, 5, "loop")
            subset.choice = Choice("p", label, "d", "measured", (time,))
            subset.chosen, subset.origin = subset.ranked[0][0], "measured"

    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(session, "resolve", choose)
    return asked


def cover(level):
    return [sorted(s.members) for s in level.subsets]


def test_slow_fused_kernels_are_taken_apart_and_the_cover_is_stored(store, clock):
    top = level_of()
    assert any(len(s.members) > 4 for s in top.subsets)
    summary = kernel_selection.select(top, AUTO, may_measure=True)
    assert summary.origin == "measured" and summary.measured > 0 and summary.seconds < summary.greedy_seconds
    assert all(len(s.members) <= 4 for s in top.subsets)
    assert all(s.chosen is not None for s in top.subsets)
    # another process takes it over and asks for nothing else
    found = cover(top)
    clock.clear()
    again = level_of()
    assert kernel_selection.select(again, AUTO, may_measure=True).origin == "stored"
    assert cover(again) == found and sorted(clock) == sorted(found)
    # so does one that may not measure
    third = level_of()
    assert kernel_selection.select(third, AUTO, may_measure=False).origin == "stored"
    assert cover(third) == found


def test_kernels_that_gain_little_are_left_in_the_form_of_clear_gains(monkeypatch):
    def sums(x, w):
        return x.sum(0), (w * x).max(1), jnp.exp(x).sum()

    top = level_of(sums)
    first, *others = top.subsets
    assert len(others) == 2

    def resolve(problems, tuned):
        for subset in problems.regions:
            label = session._label(subset.ranked[0][0])
            library = 1.6e-6 if subset is first else 1.4e-6
            times = [Measurement(name, s, s, s, 5, "loop") for name, s in ((label, 1e-6), (LIBRARY, library))]
            subset.choice = Choice("p", label, "d", "measured", tuple(times))
            subset.chosen, subset.origin = subset.ranked[0][0], "measured"

    monkeypatch.setattr(session, "resolve", resolve)
    for regions, kept in (("all", top.subsets), ("clear", [first])):
        partition = kernel_selection.choose_partition(top, Settings(form=Variant((), regions), tune="off"))
        problems = kernel_selection.collect_problems(partition)
        kernel_selection.resolve(partition, problems, {})
        assert [s for s in top.subsets if s.chosen is not None] == list(kept)


def test_loop_bodies_have_covers_of_their_own(store, clock):
    top = level_of(looped)
    kernel_selection.select(top, AUTO, may_measure=True)
    inner = top.walk()[1]
    assert inner.subsets and all(len(s.members) <= 4 for s in inner.subsets)
    again = level_of(looped)
    assert kernel_selection.select(again, AUTO, may_measure=True).origin == "stored"
    assert [cover(a) for a in again.walk()] == [cover(a) for a in top.walk()]


@pytest.mark.parametrize("settings", [Settings(mode="no_fusion"), Settings(tune="off"), Settings(tune="cached")])
def test_without_measuring_the_greedy_cover_stays(store, clock, settings):
    top = level_of(mode=settings.mode)
    before = cover(top)
    assert kernel_selection.select(top, settings, may_measure=settings.tune == "auto").origin == "greedy"
    assert cover(top) == before
    assert store.ls() == []


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"levels": "none"},
        {"levels": []},
        {"levels": [[[0, 999]]]},
        {"levels": [[[0], [0]]]},
        {"levels": [[["a"]]]},
        {"levels": [[None]]},
        {"levels": [[[]]]},
    ],
)
def test_a_stored_cover_that_does_not_fit_is_ignored(store, clock, damage):
    top = level_of()
    store.put_partition(kernel_selection.partition_key(top, AUTO), damage)
    assert kernel_selection.select(top, AUTO, may_measure=True).origin == "measured"
    assert kernel_selection.select(level_of(), AUTO, may_measure=True).origin == "stored"


def test_the_key_depends_on_function_mode_and_tolerance(store):
    top = level_of()
    keys = {
        kernel_selection.partition_key(top, AUTO),
        kernel_selection.partition_key(top, dataclasses.replace(AUTO, mode="fusion")),
        kernel_selection.partition_key(top, dataclasses.replace(AUTO, tolerance=4.0)),
        kernel_selection.partition_key(level_of(looped), AUTO),
    }
    assert len(keys) == 4
    assert kernel_selection.partition_key(level_of(), AUTO) in keys


def test_fuel_keeps_the_greedy_cover(store, clock, monkeypatch):
    monkeypatch.setenv("JCUTS_FUEL", "1")
    top = level_of()
    assert kernel_selection.select(top, AUTO, may_measure=True).origin == "greedy"


def gpu_level(function, *args, platform="cpu"):
    closed = jax.make_jaxpr(function)(*args)
    level = computation.group(simplify(inline(closed)), AUTO, computation.Fuel(), platform)
    machine = gpu_candidates.GpuMachine(132)
    for subset in (subset for one in level.walk() for subset in one.subsets):
        subset.ranking = functools.partial(gpu_candidates.candidates, subset.program, machine, 4)
    return level


@pytest.mark.parametrize("regions", ["all", "anchored", "absorbing"])
@pytest.mark.parametrize("measured", [True, False])
def test_attention_is_a_kernel_wherever_products_stay(regions, measured):
    def function(q, k, v, w):
        return (jax.nn.dot_product_attention(q, k, v) @ w) * 2

    q, w = np.ones((2, 64, 4, 32), np.float32), np.ones((32, 32), np.float32)
    level = gpu_level(function, q, q, q, w, platform="cuda")
    kernel_selection._leave_on_gpu([level], regions, measured=measured)
    kinds = [s.program.template for s in level.subsets]
    assert kinds == ["attention", *(["contraction"] if measured and regions != "absorbing" else [])]
    on_a_cpu = gpu_level(function, q, q, q, w)
    assert not any(s.program.template == "attention" for s in on_a_cpu.subsets)


@pytest.mark.parametrize("regions", ["all", "anchored", "absorbing"])
def test_what_gpus_leave_to_xla(regions):
    anchored = regions != "all"
    large, small = np.ones((2048, 2048), np.float32), np.ones((64, 64), np.float32)
    kernel, whole = np.ones((256, 256), np.float32), np.ones((256, 256), np.int32)

    def function(large, small, kernel, whole):
        counts = jax.lax.reduce_window(np.ones((64, 64), np.float32), 0.0, jax.lax.add, (3, 3), (1, 1), "SAME")
        exact = jnp.dot(whole, whole)
        return large * 2 + 1, small * 3 + 1, kernel @ kernel, jax.nn.softmax(large), counts, exact

    for measured in (True, False):
        level = gpu_level(function, large, small, kernel, whole)
        kernel_selection._leave_on_gpu([level], regions, measured=measured)
        kept = [sorted(level.graph.nodes[m].prim for m in s.members) for s in level.subsets]
        assert any("exp" in members for members in kept) and (["add", "mul"] in kept) is not anchored
        product = measured and regions != "absorbing"  # against the library it must win a measurement
        assert (["dot_general"] in kept) is product
        assert len(kept) == 2 - anchored + product  # neither the small one nor the constant
        reasons = {r.reason for r in level.left_out.values()}
        assert {"no kernel form on cuda", computation.TO_FUSE, computation.CONSTANT} <= reasons
        assert (computation.OF_LIBRARY in reasons) is not product


def leave_open(monkeypatch):
    """Nothing is tuned, and no region gets a choice."""
    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(session, "resolve", lambda problems, choices: None)


def inverted(x, w, f, v):
    names = ("NHWC", "HWIO", "NHWC")
    wide = jax.nn.relu6(jnp.einsum("nhwc,ce->nhwe", x, w))
    deep = jax.lax.conv_general_dilated(wide, f, (1, 1), "SAME", dimension_numbers=names, feature_group_count=48)
    return jnp.einsum("nhwe,ec->nhwc", jax.nn.relu6(deep), v) + x


@pytest.mark.parametrize(
    "times, whole",
    [
        ((3.0, 2.0, 2.0, 6.0), True),
        ((3.0, 2.0, 2.0, 8.0), False),
        ((3.0, None, 2.0, 8.0), True),
        ((3.0, 2.0, 2.0, None), False),
    ],
)
def test_a_block_takes_the_place_of_its_parts_where_it_is_measured_to_be_faster(times, whole, monkeypatch, store):
    shapes = (8, 28, 28, 16), (16, 48), (3, 3, 1, 48), (48, 16)
    level = gpu_level(inverted, *(np.ones(s, np.float32) for s in shapes))
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132))
    monkeypatch.setattr(kernel_selection.xla_devices, "this", lambda: computation.xla_devices.Gpu("H200", (9, 0), 132))
    asked = []

    def measured(problems, choices):
        subsets, shares = problems.regions, problems.shares
        further = problems.further
        assert all(further(s, s.ranked[0][0]) == [s.ranked[0][0]] for s in subsets)  # none is part of a larger array
        identity_of = {p.digest: identity for identity, p in problems.problems.items()}
        of_blocks = {k: [identity_of[part] for part in p.parts] for k, p in problems.problems.items() if p.parts}
        asked.extend(subsets)
        by_size = sorted(subsets, key=lambda s: len(s.program.phases))
        parts, (block,) = by_size[:-1], by_size[-1:]
        assert [len(s.program.phases) for s in (*parts, block)] == [1, 1, 1, 3]
        assert {k: set(v) for k, v in of_blocks.items()} == {block.identity: {p.identity for p in parts}}
        assert shares[block.identity] == kernel_selection.BLOCK_CANDIDATES and len(block.ranked) > 2
        for subset, time in zip((*parts, block), times, strict=True):
            subset.chosen = None if time is None else subset.ranked[0][0]
            subset.choice = Measured(time)

    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(session, "resolve", measured)
    kernel_selection.select(level, AUTO, may_measure=True, platform="cuda")
    assert len(asked) == 4 and (len(level.subsets) == 1) is whole
    if whole:
        chosen = level.subsets[0].chosen
        assert chosen is not None and dict(chosen.params)["cuda"] == "block"
        assert level.subsets[0].members == frozenset(range(len(level.graph.nodes))) and not level.left_out
    again = gpu_level(inverted, *(np.ones(s, np.float32) for s in shapes))
    known = {s.identity: s for s in level.subsets}

    def restored(problems, choices):
        assert problems.device and set(problems.shares) == set(known)
        for subset in problems.regions:
            assert subset.space == known[subset.identity].space
            subset.choice = Measured(1.0)

    monkeypatch.setattr(session, "resolve", restored)
    monkeypatch.setattr(computation.gpu_candidates, "candidates", None)  # nobody ranks anything
    assert kernel_selection.select(again, AUTO, may_measure=False, platform="cuda").origin == "stored"
    assert (
        partition_store.load_partition(again) == partition_store.load_partition(level)
        and again.left_out == level.left_out
    )
    assert [s.program for s in again.subsets] == [s.program for s in level.subsets]


def mlp(x, w, b, v):
    return jax.nn.gelu(x @ w + b, approximate=False) @ v + x


MLP_SHAPES = (4096, 96), (96, 384), (384,), (384, 96)


def mlp_level(monkeypatch, capability=(9, 0), shapes=MLP_SHAPES):
    machine, gpu = gpu_candidates.GpuMachine(132, capability=capability), computation.xla_devices.Gpu
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: machine)
    monkeypatch.setattr(kernel_selection.xla_devices, "this", lambda: gpu("some", capability, 132))
    return gpu_level(mlp, *(np.ones(s, np.float32) for s in shapes))


@pytest.mark.parametrize(("times", "whole"), [((3.0, 2.0, 4.0), True), ((3.0, 2.0, 6.0), False), ((3, 2, None), False)])
def test_a_back_to_back_gemm_takes_the_place_of_its_parts_where_it_is_measured_to_be_faster(
    times, whole, monkeypatch, store
):
    level = mlp_level(monkeypatch)

    def measured(problems, choices):
        pair = next(s for s in problems.regions if s.program.template == "layer_fusion")
        parts = [s for s in problems.regions if s is not pair]
        assert len(parts) == 2 and {dict(p.params)["cuda"] for p, _ in pair.ranked} == {"b2b"}
        for subset, time in zip((*parts, pair), times, strict=True):
            subset.chosen = None if time is None else subset.ranked[0][0]
            subset.choice = Measured(time)

    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(session, "resolve", measured)
    kernel_selection.select(level, AUTO, may_measure=True, platform="cuda")
    assert (len(level.subsets) == 1) is whole
    assert (dict(level.subsets[0].chosen.params)["cuda"] == "b2b") is whole


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [((7, 5), MLP_SHAPES), ((9, 0), ((4096, 2048), (2048, 4096), (4096,), (4096, 2048)))],
    ids=["no tensor cores", "too wide"],
)
def test_without_a_kernel_for_it_a_back_to_back_gemm_changes_no_plan(capability, shapes, monkeypatch, store):
    plans = []
    for groups in (join_regions.KINDS, join_regions.KINDS[:1]):
        monkeypatch.setattr(join_regions, "KINDS", groups)
        chosen = kernel_selection.choose_partition(mlp_level(monkeypatch, capability, shapes), AUTO, "cuda")
        assert not chosen.blocks
        plans.append((chosen.key, chosen.shares, [(s.members, s.program) for s in chosen.regions]))
    assert plans[0] == plans[1]


def test_a_stored_cover_of_a_gpu_that_does_not_fit_is_searched_again(monkeypatch, store, caplog):
    level = gpu_level(fn, X, X)
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132))
    monkeypatch.setattr(kernel_selection.xla_devices, "this", lambda: computation.xla_devices.Gpu("H200", (9, 0), 132))
    right = partition_store.load_partition(level)
    first, *others = right["subsets"]
    for damage in (
        {**right, "subsets": [[[900], 0]]},
        {**right, "subsets": [first, first]},
        {"subsets": []},
        {**right, "programs": ["{}"]},
        {**right, "subsets": [[first[0], 99], *others]},
        {**right, "left": [[900, "sin", ""]]},
    ):
        store.put_partition(kernel_selection.partition_key(level, AUTO, "cuda"), {"covers": [damage]})
        again = gpu_level(fn, X, X)
        leave_open(monkeypatch)
        assert kernel_selection.select(again, AUTO, may_measure=False, platform="cuda").origin == "greedy"
        assert "does not fit" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("function", "size"),
    [(fn, 32), (lambda x, w: fn(x, w).astype(jnp.bfloat16), 64)],
    ids=["operands and results of other shapes", "results of another type"],
)
def test_programs_of_a_stored_cover_that_does_not_fit_are_not_taken(monkeypatch, store, function, size):
    level = gpu_level(fn, X, X)
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132))
    monkeypatch.setattr(kernel_selection.xla_devices, "this", lambda: computation.xla_devices.Gpu("H200", (9, 0), 132))
    leave_open(monkeypatch)
    right = partition_store.load_partition(level)
    other = partition_store.load_partition(gpu_level(function, X[:size, :size], X[:size, :size]))
    assert len(other["programs"]) == len(right["programs"])
    cover = {**right, "programs": other["programs"]}
    store.put_partition(kernel_selection.partition_key(level, AUTO, "cuda"), {"covers": [cover]})
    again, usual = gpu_level(fn, X, X), gpu_level(fn, X, X)
    assert kernel_selection.select(again, AUTO, may_measure=False, platform="cuda").origin == "greedy"
    assert [s.program for s in again.subsets] == [s.program for s in usual.subsets]


def test_operations_stay_apart_where_nothing_is_to_be_fused(monkeypatch, store):
    monkeypatch.setattr(computation.xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132))
    monkeypatch.setattr(kernel_selection.xla_devices, "this", lambda: computation.xla_devices.Gpu("H200", (9, 0), 132))
    leave_open(monkeypatch)
    x, w = np.ones((2048, 256), np.float32), np.ones((256, 256), np.float32)
    headed = {}
    for mode in ("fusion", "no_fusion"):
        closed = jax.make_jaxpr(lambda x, w, s: jnp.maximum(x * s, 0.0) @ w)(x, w, x[0])
        settings = Settings(mode=mode)
        level = computation.group(simplify(inline(closed)), settings, computation.Fuel(), "cuda")
        kernel_selection.select(level, settings, may_measure=True, platform="cuda")
        headed[mode] = sorted(len(s.members) for s in level.subsets)
    assert max(headed["fusion"]) == 3 and set(headed["no_fusion"]) == {1}


@dataclasses.dataclass
class Measured:
    time: float | None
    winner: str = ""
    origin: str = "measured"
    is_postponed: bool = False
    is_cut: bool = False

    def seconds(self, winner):
        return self.time


def test_forms_of_a_function_share_what_their_subsets_are():
    closed = simplify(inline(jax.make_jaxpr(lambda x: jnp.tanh(x) @ jnp.ones((64, 64)) + 1.0)(jnp.ones((256, 64)))))
    one, other = (computation.group(closed, AUTO, computation.Fuel(), platform="cuda") for _ in range(2))
    pairs = list(zip(one.subsets, other.subsets, strict=True))
    assert pairs and all(a is not b and a.closed is b.closed and a.identity == b.identity for a, b in pairs)
    assert one.graph is other.graph and one.subset_cache is not other.subset_cache


def test_every_equation_is_in_a_subset_or_left_to_xla_with_a_reason():
    level = level_of(with_softmax)
    everything = {n.number for n in level.graph.nodes}
    small = {m for members, p in level.grouping.subsets if level.is_small(p) for m in members}
    assert small and len(level.subsets) < len(level.grouping.subsets)
    stored = [sorted(s.members) for s in level.subsets]
    for cover in (stored, []):  # what the database has leaves out what was too small
        assert partition_store.apply_stored(level, cover)
        mine = {m for s in level.subsets for m in s.members}
        assert mine == {m for members in cover for m in members} and mine | set(level.left_out) == everything
        assert not mine & set(level.left_out)
        reasons = {m: level.left_out[m].reason for m in level.left_out}
        assert all(reasons[m] == computation.TOO_LITTLE for m in small)
        rest = set(reasons) - small - set(level.grouping.left_out)
        assert all(reasons[m] == computation.BETWEEN for m in rest) and bool(rest) == (not cover)


@pytest.mark.parametrize(("xla", "every"), [(0.9, True), (0.5, False), (2.0, True)])
def test_the_form_with_every_kernel_has_those_that_lost_by_little(monkeypatch, xla, every):
    level = level_of()
    computation.add_candidates(level.subsets)

    def choose(problems, choices):
        settings = problems.settings
        assert settings.mode == ("fusion" if settings.form else "mixed")
        for s in problems.regions:
            best = s.ranked[0][0]
            times = (Measurement("a", 1.0, 1.0, 1.0, 9, "loop"), Measurement("xla", xla, xla, xla, 9, "loop"))
            wins = settings.mode == "fusion" or xla > 1
            s.choice = Choice("p", "a" if wins else "xla", "", "measured", times)
            s.chosen, s.origin = best if wins else None, "measured"

    monkeypatch.setattr(session, "resolve", choose)
    for settings, wins in ((Settings(form=Variant((), "every")), every), (Settings(), xla > 1)):
        partition = kernel_selection.Partition(level, settings, "cpu", origin="stored", shares={})
        kernel_selection.resolve(partition, kernel_selection.collect_problems(partition), {})
        assert all((s.chosen is not None) is wins for s in level.subsets)

"""The partition search on tensor graphs: legal covers, measurements only where they can matter, never worse."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.arch.cpu import CpuArch
from jcuts.fusion import partition_space
from jcuts.fusion.dag import is_acyclic_cover
from jcuts.fusion.greedy import group
from jcuts.fusion.partition_space import TOTAL, WORTH, Incumbent, Space, SpaceOptions, explore
from jcuts.lower.region import lower_region
from jcuts.schedule.cpu.time_estimate import CALL_SECONDS, seconds, traffic_seconds
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.fusion.dags import brute_force
from tests.fusion.test_greedy import FUNCTIONS, W, X

ARCH = CpuArch(
    name="test",
    machine="x86_64",
    cores=2,
    frequency=2e9,
    simd_bits=512,
    fma_ports=1,
    alu_ports=2,
    load_ports=2,
    store_ports=1,
    vector_registers=32,
    line=64,
    l1d=32768,
    l2=1 << 20,
    l3=16 << 20,
    bandwidth={"l2": 100e9, "l3": 60e9, "dram": 20e9},
)


def space_of(fn, *arguments) -> Space:
    graph = programs.trace(fn, *arguments).graph
    return explore(graph, Incumbent(group(graph).subsets))


def residual(x, w):
    """Two products whose results meet: the sum may join either of them."""
    return jax.nn.relu((x @ w) * 2 + (x @ (w + 1)) * 3)


def members(space: Space, *prims: str) -> list[frozenset[int]]:
    """Subsets whose operations are these, each once or more."""
    return [s for s in space.estimates if sorted({space.graph.nodes[n].prim for n in s}) == sorted(set(prims))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_covers_are_legal_whatever_the_times(name):
    fn, arguments = FUNCTIONS[name]
    space = space_of(fn, *arguments)
    everything = frozenset(node.number for node in space.graph.nodes)
    for seed in range(8):
        rng = random.Random(seed)
        measured = {s: rng.uniform(1e-6, 1e-3) for s in space.estimates if rng.random() < 0.7}
        for cover in (space.best_measured_partition(measured), space.estimated_cover(), space.greedy):
            assert sorted(n for s in cover for n in s) == sorted(everything)
            atoms = [space._as_atoms(s) for s in cover]
            assert is_acyclic_cover(space.dag, atoms)
        assert all(
            s in space.greedy or s in measured or s not in space.programs
            for s in space.best_measured_partition(measured)
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_never_worse_than_the_greedy_cover_and_equal_to_it_at_first(name):
    fn, arguments = FUNCTIONS[name]
    space = space_of(fn, *arguments)
    assert set(space.best_measured_partition({})) == set(space.greedy)
    for seed in range(8):
        rng = random.Random(seed)
        measured = {s: rng.uniform(1e-6, 1e-3) for s in space.estimates}
        assert (
            sum(measured[s] for s in space.best_measured_partition(measured))
            <= sum(measured[s] for s in space.greedy) + 1e-12
        )


def test_programs_are_those_of_their_equations():
    space = space_of(residual, X, W)
    assert set(space.programs) <= set(space.estimates)
    for subset, program in space.programs.items():
        again = lower_region(space.graph, subset)
        assert getattr(again, "digest", None) == program.digest


def test_a_slow_fused_kernel_is_taken_apart():
    space = space_of(residual, X, W)
    usual = {s: space.estimates[s] for s in space.greedy}
    assert space.next_to_measure(usual, 10) == []  # everything is as estimated: nothing to measure
    slow = max((s for s in space.greedy if len(s) > 2), key=len)
    measured = {**usual, slow: 40 * space.estimates[slow]}
    fresh = space.next_to_measure(measured, 10)
    assert fresh and all(s not in measured for s in fresh)
    assert frozenset().union(*fresh) & slow
    # what was proposed turns out as hoped: it is used, and the slow kernel is gone
    measured.update({s: space.estimates[s] for s in fresh})
    cover = space.best_measured_partition(measured)
    assert slow not in cover and set(fresh) & set(cover)
    # it turns out bad: the slow kernel stays
    measured.update(dict.fromkeys(fresh, 1.0))
    assert slow in space.best_measured_partition(measured)


def test_small_promises_are_not_worth_a_measurement():
    space = space_of(residual, X, W)
    usual = {s: space.estimates[s] for s in space.greedy}
    for subset in space.greedy:
        measured = {**usual, subset: (1 + min(WORTH, TOTAL) / 2) * usual[subset]}
        assert space.next_to_measure(measured, 10) == []


def test_at_most_the_limit_is_proposed():
    space = space_of(residual, X, W)
    measured = {s: (40 if len(s) > 2 else 1) * space.estimates[s] for s in space.greedy}
    everything = space.next_to_measure(measured, 100)
    assert len(everything) >= 1
    assert space.next_to_measure(measured, 0) == []
    assert len(space.next_to_measure(measured, 1)) <= 1


def test_predictions_follow_the_kind_and_the_operation():
    space = space_of(residual, X, W)
    measured = {s: 3 * space.estimates[s] for s in space.greedy}
    for subset, predicted in space.predicted_seconds(measured).items():
        if subset not in measured and subset in space.programs:
            assert predicted == pytest.approx(3 * space.estimates[subset])
    assert all(space.predicted_seconds(measured)[s] == measured[s] for s in measured)


def test_chains_of_element_operations_are_atoms():
    def chain(x, w):
        return jnp.exp(jnp.sin(x * 2) + 1) @ w

    space = space_of(chain, X, W)
    assert sorted(len(a) for a in space.atoms) == [1, 4]


def test_a_costly_value_that_is_broadcast_is_no_atom():
    def spread(x):
        return jnp.broadcast_to(jnp.exp(x[:, None]), (16, 400)) * 2

    space = space_of(spread, X[0])
    exp = next(n.number for n in space.graph.nodes if n.prim == "exp")
    atom = next(a for a in space.atoms if exp in a)
    assert "mul" not in {space.graph.nodes[n].prim for n in atom}


def test_seconds_by_hand():
    def relu(x):
        return jnp.maximum(x, 0)

    n = 1 << 16
    program = programs.trace(relu, np.zeros(n, np.float32)).program()
    element = (n / 16) / (2 * 2e9 * 2)
    memory = 2 * 4 * n / ARCH.ceiling("l2")
    assert seconds(program, ARCH) == pytest.approx(CALL_SECONDS + max(element, memory))
    product = programs.trace(jnp.matmul, np.zeros((512, 512), np.float32), np.zeros((512, 512), np.float32)).program()
    assert seconds(product, ARCH) == pytest.approx(CALL_SECONDS + 2 * 512**3 / ARCH.peak(), rel=0.02)
    assert traffic_seconds(1e6, ARCH) == pytest.approx(CALL_SECONDS + 1e6 / ARCH.ceiling("l2"))


def test_repeated_work_has_its_price():
    """An expensive prologue that a reduction over the other dimension would repeat costs more than its traffic."""

    def soft(x):
        return jnp.exp(x)

    alone = programs.trace(soft, np.zeros((256, 256), np.float32)).program()
    cheap = programs.trace(lambda x: x + 1, np.zeros((256, 256), np.float32)).program()
    assert seconds(alone, ARCH) > seconds(cheap, ARCH)


# -- on a GPU -------------------------------------------------------------------------------------------------------
H200 = GpuMachine.named("H200")


def gpu_space(fn, *arguments, **incumbent) -> Space:
    graph = programs.trace(fn, *arguments).graph
    subsets = incumbent.pop("subsets", None) or group(graph).subsets
    return explore(graph, Incumbent(subsets, fixed=frozenset(), **incumbent), SpaceOptions.on_gpu(H200))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_cover_by_gpu_estimates_is_that_of_brute_force(name):
    """Over all acyclic covers by explored subsets, by estimates and by random times."""
    fn, arguments = FUNCTIONS[name]
    space = gpu_space(fn, *arguments)
    by_atoms = {space._as_atoms(s): s for s in space.estimates}
    assert len(space.dag.nodes) <= 12
    rng = random.Random(name)
    for costs in (space.estimates, {s: rng.uniform(1e-6, 1e-5) for s in space.estimates}):
        chosen = sum(costs[s] for s in space._cover(costs))
        assert chosen == pytest.approx(brute_force(space.dag, {a: costs[s] for a, s in by_atoms.items()}), rel=1e-9)


def test_what_xla_keeps_costs_nothing_and_is_merged_only_where_a_kernel_gets_no_slower():
    """The sort has no rule, and the products around it are not in the incumbent."""
    fn, arguments = FUNCTIONS["all sorts"]
    graph = programs.trace(fn, *arguments).graph
    kept = [(members, p) for members, p in group(graph).subsets if p.template == "contraction"]
    space = gpu_space(fn, *arguments, subsets=kept)
    outside = {n.number for n in graph.nodes} - {n for members, _ in kept for n in members}
    assert outside and all(space.estimates[frozenset({n})] == 0.0 for n in outside)
    times = {members: space.estimates[members] for members, _ in kept}
    assert set(space.best_measured_partition(times)) == set(space.greedy)
    larger = [s for s in space.programs if any(s > members for members, _ in kept)]
    for subset in larger:  # none is faster than the kernel that it contains
        measured = {**times, subset: 1.01 * sum(times.values())}
        assert subset not in space.best_measured_partition(measured)


def test_what_has_no_kernel_is_forgotten():
    space = gpu_space(residual, X, W)
    further = next(s for s in space.programs if s not in space.greedy and s not in space.atoms)
    atom = next(a for a in space.atoms if a not in space.greedy and a in space.programs)
    for subset in (further, atom, space.greedy[0]):
        space.forget(subset)
    assert further not in space.programs and further not in space.estimates
    assert atom not in space.programs and atom in space.estimates
    assert space.greedy[0] in space.programs


def test_subsets_left_to_xla_between_kernels_are_measured_with_what_would_replace_them():
    """Their time is unknown: in the measured cover it counts nothing, in what is hoped for as predicted."""
    graph = programs.trace(residual, X, W).graph
    pieces = [(a, lower_region(graph, a)) for a in space_of(residual, X, W).atoms]
    tail = next(members for members, p in pieces if p.template == "map" and len(members) > 1)
    space = gpu_space(residual, X, W, subsets=pieces, alone=frozenset({tail}))
    measured = {s: space.estimates[s] for s in space.greedy if s != tail}
    assert space.known_seconds(measured)[tail] == 0.0 < space.predicted_seconds(measured)[tail]
    fresh = space.next_to_measure(measured, 10)
    assert any(s > tail for s in fresh) and tail in fresh
    assert set(space.best_measured_partition(measured)) == set(space.greedy)


def test_equal_exchanges_are_measured_together():
    def layers(x, w):
        for _ in range(6):
            x = jnp.exp(x @ w) * 2
            x = jax.lax.sort(x, dimension=1)  # keeps the layers apart
        return x

    space = gpu_space(layers, X, W)
    slow = [s for s in space.greedy if len(s) > 2]
    assert len({space.programs[s].digest for s in slow}) == 1 and len(slow) == 6
    # a product alone, beside them, is as fast as predicted: the usual ratio of its kind would be theirs
    measured = {s: (8 if s in slow else 1) * space.estimates[s] for s in space.greedy}
    measured |= {s: space.estimates[s] for s in space.atoms if space._kind(s) == "contraction"}
    fresh = space.next_to_measure(measured, 3)
    assert len({space.programs[s].digest for s in fresh}) <= 3 and len(fresh) == 6


def test_chains_of_layers_are_regions_where_they_are_kernels():
    """Two products with an activation between them: one kernel on a CPU, and on GPUs with TF32 or bfloat16 units."""
    graph = programs.trace(lambda x, a, b: jax.nn.relu(x @ a) @ b, X, W, W).graph
    everything = frozenset(node.number for node in graph.nodes)
    start = Incumbent(group(graph).subsets)
    on_cpu = explore(graph, start)
    assert on_cpu.programs[everything].template == "layer_fusion"
    on_gpu = explore(graph, start, SpaceOptions.on_gpu(GpuMachine.named("H200")))
    assert on_gpu.programs[everything].template == "layer_fusion"
    assert everything not in explore(graph, start, SpaceOptions.on_gpu(GpuMachine.named("V100"))).programs
    measured = dict.fromkeys(on_cpu.greedy, 0.001)
    assert set(on_cpu.best_measured_partition(measured)) == set(on_cpu.greedy)
    assert on_cpu.best_measured_partition(measured | {everything: 1e-3}) == [everything]


def no_pair(graph, subset, cheap, *, machine):
    return lower_region(graph, subset, cheap=cheap)


def needed_elsewhere(x, a, b):
    hidden = jax.nn.relu(x @ a)
    return hidden @ b, hidden


CHAINS = {
    "three products": (lambda x, a, b: jax.nn.relu(jax.nn.relu(x @ a) @ b) @ a, (X, W, W)),
    "needed elsewhere": (needed_elsewhere, (X, W, W)),
    "a norm between": (lambda x, a, b: jax.nn.softmax(x @ a) @ b, (X, W, W)),
    "no multiple of 16 bytes": (lambda x, a, b: jax.nn.relu(x @ a) @ b, (X, W[:, :31], W[:31])),
    "results too wide": (lambda x, a, b: jax.nn.relu(x @ a) @ b, (X, W, np.zeros((W.shape[1], 4096), np.float32))),
}


@pytest.mark.parametrize("name", CHAINS)
def test_regions_of_a_gpu_are_those_without_pairs_where_no_pair_is_a_kernel(name, monkeypatch):
    fn, arguments = CHAINS[name]
    graph = programs.trace(fn, *arguments).graph
    start, machine = Incumbent(group(graph).subsets), GpuMachine.named("H200")
    found = explore(graph, start, SpaceOptions.on_gpu(machine))
    pairs = {s for s, p in found.programs.items() if p.template == "layer_fusion"}
    monkeypatch.setattr(partition_space, "lower_region_or_b2b_gemm", no_pair)
    plain = explore(graph, start, SpaceOptions.on_gpu(machine))
    assert bool(pairs) is (name in ("three products", "no multiple of 16 bytes"))
    assert {s: p for s, p in found.programs.items() if s not in pairs} == plain.programs
    if not pairs:
        assert found.estimated_cover() == plain.estimated_cover()

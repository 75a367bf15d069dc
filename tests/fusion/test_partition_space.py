"""The partition search on tensor graphs: legal covers, measurements only where they can matter, never worse."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.arch.cpu import CpuArch
from jcuts.fusion.dag import is_acyclic_cover
from jcuts.fusion.greedy import group
from jcuts.fusion.partition_space import TOTAL, WORTH, Incumbent, Space, explore
from jcuts.lower.region import lower_region
from jcuts.schedule.cpu.time_estimate import CALL_SECONDS, seconds, traffic_seconds
from tests import programs
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

"""The time model of CPU kernels by hand: predicted time, bound and PUL of one expression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.estimate import time_model as tm
from jcuts.estimate.cpu import CpuWork, bound, work_terms
from jcuts.estimate.cpu_kernel import TILES, kernel_time, ratios
from jcuts.estimate.time_model import Resource, longest, on_cores, repeat, serial, soft_longest, term
from tests.estimate.test_cpu import ARCH, works

CALL = 3e-6


def code(arithmetic, overhead=0.0, moved=0.0):
    """1000 register tiles of so many cycles of the FMA ports and of overhead, beside cycles of the L2 cache."""
    tile = serial(
        [longest([term(Resource.COMPUTE, arithmetic), term(Resource.LOAD, 1.0)]), term(Resource.TILE, overhead)]
    )
    nothing = term(Resource.START, 0.0)
    return soft_longest(0.0, serial([repeat(1000, tile)], TILES), term(Resource.L2, moved, 32 * moved), nothing)


def test_the_busiest_core_decides():
    work = CpuWork(flop={"float32": 64e3 * 8}, tiles=1 << 20)
    time = kernel_time(code(10.0, 6.0), work, 3, ARCH, CALL)
    assert time.code.value == 16_000
    assert time.seconds == pytest.approx(CALL + 16_000 * 2 / 3 / 2e9)  # two of three tasks on one of two cores
    found = ratios(time, ARCH)
    assert found.balance == 0.75 and found.register == pytest.approx(10 / 16) and found.memory == found.cache == 1.0
    assert found.simd == pytest.approx(0.8)  # 512e3 FLOP, 64 per cycle: 8,000 of the 10,000 cycles
    assert found.pul == pytest.approx(0.75 * 10 / 16 * 0.8)


def test_memory_and_caches():
    work = CpuWork(flop={"float32": 64e3 * 10}, input_bytes=100e6, tiles=1 << 20)
    time = kernel_time(code(10.0, moved=40_000.0), work, 2, ARCH, CALL)
    assert time.seconds == pytest.approx(CALL + 100e6 / ARCH.likely("dram"))
    found = ratios(time, ARCH)
    assert found.cache == pytest.approx(0.25)
    assert found.memory == pytest.approx(10_000 / 2 / 2e9 / (100e6 / 20e9))
    assert time.bound(ARCH) == bound(work, ARCH).seconds == pytest.approx((100e6 - 2 * 32768 - (18 << 20)) / 30e9)


def test_without_accumulations_the_ports_are_the_work():
    time = kernel_time(code(10.0, 10.0), CpuWork(vector_ops={"store": 5.0}), 1, ARCH, CALL)
    assert ratios(time, ARCH).simd == 1.0 and ratios(time, ARCH).register == 0.5 and ratios(time, ARCH).balance == 0.5


@given(works(), st.floats(0, 1e9), st.integers(1, 50))
def test_no_prediction_is_below_its_bound(work, cycles, tasks):
    time = kernel_time(term(Resource.COMPUTE, cycles), work, tasks, ARCH, CALL)
    assert time.seconds >= time.bound(ARCH)
    found = ratios(time, ARCH)
    assert all(0 <= r <= 1 for r in (found.memory, found.cache, found.register, found.simd, found.balance))


def test_the_work_is_printable_and_counted_by_unit():
    work = CpuWork(flop={"float32": 640.0, "float64": 32.0}, vector_ops={"store": 4.0, "alu": 2.0}, input_bytes=64.0)
    root = work_terms(work, ARCH)
    amounts = tm.amounts_by_unit(root)
    assert amounts["compute unit", "float32"] == (640.0, 640.0) and amounts["compute unit", "float64"] == (32.0, 32.0)
    assert amounts["store ports", ""] == (4.0, 4.0) and amounts["memory", ""] == (64.0, 64.0)
    assert tm.amounts(root)["compute unit"] == (672.0, 672.0)
    shown = tm.text(root)
    assert "on the busiest core: x 1" in shown and "store ports (4)" in shown and "memory (64)" in shown


def test_nodes_of_cores():
    part = on_cores(serial([term(Resource.COMPUTE, 10.0, 100.0), term(Resource.TILE, 2.0)], TILES), 0.75)
    assert part.value == 9.0 and tm.named(part, TILES) == 9.0
    assert tm.breakdown(part) == {"compute unit": 7.5, "tile overhead": 1.5}
    assert tm.amounts(part) == {"compute unit": (75.0, 100.0)}

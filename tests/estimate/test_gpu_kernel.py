"""The time model of memory-bound launches against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jcuts.arch.load import load_gpu
from jcuts.base.errors import ModelError
from jcuts.estimate.gpu_kernel import LaunchUse, MemoryRates, launch_time, least_seconds, resident_blocks
from jcuts.estimate.kernel_pul import pul_ratios
from jcuts.estimate.time_model import KernelTime, serial

H200 = load_gpu("H200")
RATES = MemoryRates(
    latency_seconds=6e-7,
    launch_seconds=7e-7,
    l2_share=0.35,
    l1_share=0.15,
    latency_share=0.08,
    occupancy_exponent=0.03,
    tail_share=0.1,
)
USE = LaunchUse(
    blocks=8 * 132, threads=256, registers=32, shared=0, flop=1e6, compulsory=1e8, moved=1e8, lines=1e6, under_way=16.0
)


def seconds(use, arch=H200):
    return launch_time(use, arch, RATES).value


@pytest.mark.parametrize(
    "change, blocks",
    [
        ({}, 8),  # 2048 threads / 256
        ({"registers": 64}, 4),  # 65536 / (64 * 32) = 32 warps
        ({"registers": 33}, 6),  # a warp takes 33 * 32 = 1056, in units of 256: 1280; 51 warps
        ({"shared": 100_000}, 2),  # 233472 / (100000 + 1024)
        ({"threads": 32}, 32),  # blocks of a multiprocessor
        ({"threads": 1024, "registers": 65}, 0),  # 32 warps of 2304 registers
        ({"shared": 240_000}, 0),
        ({"registers": 256}, 0),
    ],
)
def test_resident_blocks(change, blocks):
    assert resident_blocks(replace(USE, **change), H200) == blocks


@pytest.mark.parametrize("name, blocks", [("RTX 2080", 4), ("V100", 8)])
def test_resident_blocks_where_nothing_is_reserved(name, blocks):
    """Before compute capability 8.0 a block without shared memory takes none."""
    assert load_gpu(name).shared_reserved == 0
    assert resident_blocks(USE, load_gpu(name)) == blocks


MOVING = 1e8 / 4.815e12 + 0.35 * 1e8 / H200.bw_l2 + 0.15 * 1e6 / (132 * 1.98e9)
UNDER_WAY = 132 * 8 * 256 * 16 / (4.815e12 * 6e-7)


def test_a_memory_bound_launch_that_fills_the_gpu():
    assert seconds(USE) == pytest.approx(MOVING * (1 + 0.08 / UNDER_WAY) * 1.1)  # one wave


def test_few_blocks_have_the_rates_of_few_multiprocessors():
    """A quarter of the SMs moves the L2 cache's and the L1 caches' share at a quarter of their rates."""
    moving = 1e8 / 4.815e12 + 4 * (MOVING - 1e8 / 4.815e12)
    hidden = 1 + 0.08 / (UNDER_WAY * 33 / 132 / 8)
    assert seconds(replace(USE, blocks=33)) == pytest.approx(moving * hidden * 1.1)


def test_many_operations_take_the_place_of_the_memory():
    busy = replace(USE, flop=1e13)
    assert seconds(busy) == pytest.approx(1e13 / (132 * 256 * 1.98e9) * (1 + 0.08 / UNDER_WAY) * 1.1)


def test_fewer_resident_threads_hide_less():
    half = replace(USE, registers=64)  # four blocks at once: two waves
    assert seconds(half) == pytest.approx(MOVING * 0.5**-0.03 * (1 + 0.08 / (UNDER_WAY / 2)) * 1.05)


def test_threads_without_work_hide_nothing():
    assert seconds(replace(USE, active=0.25)) == pytest.approx(seconds(USE) * 0.25**-0.03)


def test_many_waves_leave_little_idle():
    assert seconds(replace(USE, blocks=80 * 132)) == pytest.approx(seconds(USE) * 1.01 / 1.1)  # ten waves


def test_a_launch_has_a_least_time():
    small = LaunchUse(4, 128, 32, 0, 1e3, 4096.0, 4096.0, 32.0, 16.0)
    assert seconds(small) == 7e-7


def test_what_does_not_fit_takes_for_ever_and_has_no_pul():
    root = launch_time(USE, H200, RATES)
    assert KernelTime(root, fits=False).seconds == float("inf")
    assert pul_ratios(KernelTime(root, fits=False), H200).pul == 0.0 < pul_ratios(KernelTime(root), H200).pul


def test_ratios_of_a_memory_bound_launch():
    """1e6 FLOP over 1e8 bytes against the machine's balance; blocks of the average SM over those of the busiest."""
    found = pul_ratios(KernelTime(serial([launch_time(replace(USE, blocks=8 * 132 + 1), H200, RATES)])), H200)
    assert found.gm == pytest.approx(1e6 / 1e8 / (132 * 256 * 1.98e9 / 4.815e12))
    assert (found.sm, found.r) == (1.0, 1.0) and found.wb == pytest.approx((8 * 132 + 1) / 132 / 9)


def test_bad_counts():
    with pytest.raises(ModelError):
        resident_blocks(replace(USE, blocks=0), H200)


def test_the_bound():
    assert least_seconds(4.815e9, H200) == pytest.approx(1e-3)
    assert least_seconds(4.815e9, H200, resident=4.815e7) == pytest.approx(0.99e-3)
    assert least_seconds(4.815e9, H200, resident=1e12) == pytest.approx((4.815e9 - H200.l2_bytes) / 4.815e12)
    assert least_seconds(1e7, H200, resident=1e12) == pytest.approx(1e7 / H200.bw_l2)

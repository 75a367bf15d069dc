"""PUL of register-level GPU kernels against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jcuts.arch.load import load_gpu
from jcuts.base.errors import ModelError
from jcuts.estimate.gpu_kernel import LATENCY_S, LAUNCH_S, LaunchUse, least_seconds, resident_blocks, score

H200 = load_gpu("H200")
USE = LaunchUse(
    blocks=8 * 132, threads=256, registers=32, shared=0, flop=1e6, compulsory=1e8, moved=1e8, lines=1e6, under_way=16.0
)


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


def test_a_memory_bound_launch_that_fills_the_gpu():
    found = score([USE], H200)
    assert found.resident_threads == 132 * 8 * 256
    under_way = 132 * 8 * 256 * 16 / (4.815e12 * LATENCY_S)
    assert found.latency == pytest.approx(1 / (1 + 0.08 / under_way))
    assert (found.wb, found.r) == (pytest.approx(1 / 1.1), 1.0)  # one wave
    peak = 132 * 256 * 1.98e9
    moving = 1e8 / 4.815e12 + 0.35 * 1e8 / H200.bw_l2 + 0.15 * 1e6 / (132 * 1.98e9)
    assert found.gm == pytest.approx(1e6 / peak / moving)
    assert found.seconds == pytest.approx(moving / found.latency / found.wb)
    assert found.pul == pytest.approx(1e6 / peak / found.seconds)


def test_few_blocks_have_the_rates_of_few_multiprocessors():
    few, all_of_them = score([replace(USE, blocks=33)], H200), score([replace(USE, blocks=132)], H200)
    moving = 1e8 / 4.815e12 + 4 * (0.35 * 1e8 / H200.bw_l2 + 0.15 * 1e6 / (132 * 1.98e9))
    assert few.gm == pytest.approx(1e6 / (132 * 256 * 1.98e9) / moving)
    assert few.gm < all_of_them.gm == score([USE], H200).gm


def test_the_levels_overlap_in_part():
    one = score([USE], H200).gm
    assert score([replace(USE, moved=1e9)], H200).gm < one and score([replace(USE, lines=1e8)], H200).gm < one
    by_lines = score([replace(USE, lines=1e10)], H200)
    assert by_lines.gm == pytest.approx(1e6 / (132 * 256 * 1.98e9) / (0.15 * 1e10 / (132 * 1.98e9)), rel=0.01)


def test_fewer_resident_threads_hide_less():
    full, half = score([USE], H200), score([replace(USE, registers=64)], H200)
    assert half.resident_threads == full.resident_threads // 2
    under_way = 132 * 4 * 256 * 16 / (4.815e12 * LATENCY_S)
    assert half.latency == pytest.approx(0.5**0.03 / (1 + 0.08 / under_way))


def test_threads_without_work_hide_nothing():
    full, idle = score([USE], H200), score([replace(USE, active=0.25)], H200)
    assert idle.latency == pytest.approx(full.latency * 0.25**0.03) and idle.seconds > full.seconds


def test_many_waves_leave_little_idle():
    assert score([replace(USE, blocks=80 * 132)], H200).wb == pytest.approx(1 / 1.01)  # ten waves
    assert score([replace(USE, blocks=1)], H200).wb == pytest.approx(1 / 1.1)


def test_launches_add_up():
    small = LaunchUse(4, 128, 32, 0, 1e3, 4096.0, 4096.0, 32.0, 16.0)
    one, both = score([USE], H200), score([USE, small], H200)
    assert both.seconds == pytest.approx(one.seconds + LAUNCH_S)
    assert both.pul < one.pul


def test_what_does_not_fit_scores_nothing():
    found = score([USE, replace(USE, shared=240_000)], H200)
    assert (found.pul, found.r) == (0.0, 0.0)


def test_bad_counts():
    with pytest.raises(ModelError):
        score([], H200)
    with pytest.raises(ModelError):
        resident_blocks(replace(USE, blocks=0), H200)


def test_the_bound():
    assert least_seconds(4.815e9, H200) == pytest.approx(1e-3)
    assert least_seconds(4.815e9, H200, resident=4.815e7) == pytest.approx(0.99e-3)
    assert least_seconds(4.815e9, H200, resident=1e12) == pytest.approx((4.815e9 - H200.l2_bytes) / 4.815e12)
    assert least_seconds(1e7, H200, resident=1e12) == pytest.approx(1e7 / H200.bw_l2)

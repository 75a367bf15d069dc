"""PUL of register-level GPU kernels against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jcuts.arch.load import load_gpu
from jcuts.base.errors import ModelError
from jcuts.estimate.launches import LATENCY_S, LAUNCH_S, LaunchUse, least_seconds, resident_blocks, score

H200 = load_gpu("H200")
USE = LaunchUse(blocks=8 * 132, threads=256, registers=32, shared=0, flop=1e6, moved=1e8, under_way=16.0)


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


def test_a_memory_bound_launch_that_fills_the_gpu():
    found = score([USE], H200)
    assert found.resident_threads == 132 * 8 * 256
    assert (found.latency, found.wb, found.r) == (1.0, 1.0, 1.0)
    assert found.seconds == pytest.approx(1e8 / 4.815e12)
    peak = 132 * 256 * 1.98e9
    assert found.gm == pytest.approx((1e6 / 1e8) / (peak / 4.815e12))
    assert found.pul == pytest.approx(1e6 / peak / found.seconds)


def test_too_few_bytes_under_way():
    found = score([replace(USE, blocks=132, under_way=4.0)], H200)
    assert found.latency == pytest.approx(132 * 256 * 4 / (4.815e12 * LATENCY_S))
    assert found.seconds == pytest.approx(1e8 / 4.815e12 / found.latency)


def test_a_block_too_many_costs_a_wave():
    found = score([replace(USE, blocks=133, under_way=1e3)], H200)
    assert found.wb == pytest.approx(133 / 132 / 2)


def test_launches_add_up():
    small = LaunchUse(4, 128, 32, 0, 1e3, 4096.0, 16.0)
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

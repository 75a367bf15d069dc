"""Expressions of resource terms: values, amounts, bound, what is printed."""

from __future__ import annotations

import math

import pytest

from jcuts.arch.load import load_gpu
from jcuts.estimate import time_model as tm
from jcuts.estimate.kernel_pul import pul_ratios
from jcuts.estimate.time_model import KernelTime, Resource, per_sm, repeat, serial, term

H200 = load_gpu("H200")


def test_parallel_resources_take_the_longest_and_a_share_of_the_others():
    parts = [term(Resource.COMPUTE, 10.0), term(Resource.L2, 4.0), term(Resource.SMEM, 6.0)]
    assert tm.overlap(0.2, parts).value == pytest.approx(10 + 0.2 * 10)
    assert tm.longest(parts).value == 10.0


def test_nodes_nest():
    wave = serial([term(Resource.START, 100.0), repeat(8, term(Resource.COMPUTE, 50.0))])
    total = per_sm(2, wave, resident=2, blocks=500, sms=132)
    assert total.value == 2 * (100 + 8 * 50)
    assert tm.scaled("occupancy", 1.5, total).value == 1.5 * total.value
    assert tm.soft_maximum(2, term(Resource.L2, 3.0), term(Resource.DRAM, 4.0)).value == 5.0
    assert tm.soft_maximum(4, term(Resource.L2, 1.0), term(Resource.DRAM, 1.0)).value == pytest.approx(2**0.25)
    assert tm.by_ratios(total, {"lines": 0.5, "access": 0.8}).value == pytest.approx(total.value / 0.4)
    assert tm.at_least(2000.0, total).value == 2000.0 and tm.at_least(1.0, total) is total


def test_memory_beside_the_work():
    total, memory, start = term(Resource.COMPUTE, 10.0), term(Resource.DRAM, 8.0), term(Resource.START, 1.0)
    assert tm.soft_longest(0.25, total, memory, start).value == pytest.approx(10 + 0.25 * 8)
    assert tm.soft_longest(0.25, memory, total, start).value == pytest.approx(11 + 0.25 * 8)


def product(blocks):
    """Blocks of 128 x 128 x 1024 TF32 products, two on an SM at once, 64 in K per iteration."""
    k_tile = [
        term(Resource.COMPUTE, 1.0, 2 * 2.0 * 128 * 128 * 64),
        term(Resource.SMEM, 1.0, 2 * 65536.0),
        term(Resource.L2, 1.0, 2 * 256.0 * 64 * 4),
    ]
    loop = repeat(16, tm.longest(k_tile))
    return per_sm(math.ceil(blocks / 264), loop, resident=2, blocks=blocks, sms=132)


def test_amounts_of_the_busiest_sm_and_of_all():
    found = tm.amounts(product(300))
    each = 2.0 * 128 * 128 * 1024
    assert found["compute unit"] == pytest.approx((3 * each, 300 * each))  # 300 blocks on 132 SMs: three on some
    assert found["L2 cache"][1] == pytest.approx(300 * 256 * 1024 * 4)


def test_the_bound_is_the_largest_limit_at_peak_rates():
    time = KernelTime(product(300), hertz=1e9, unit="tf32_mma", compulsory=1e6)
    limits = time.limits(H200)
    compute = 3 * 2.0 * 128 * 128 * 1024 / (2048 * 1.98e9)
    assert limits["compute unit"] == pytest.approx(compute)
    assert limits["shared memory"] == pytest.approx(3 * 16 * 65536 / (128 * 1.98e9))
    assert limits["memory"] == pytest.approx(1e6 / 4.815e12)
    assert time.bound(H200) == max(limits.values())
    assert time.bound(H200, resident=1e9) == time.bound(H200)  # the memory does not decide
    large = KernelTime(product(300), hertz=1e9, unit="tf32_mma", compulsory=1e12)
    assert large.bound(H200) == pytest.approx(1e12 / 4.815e12)
    assert large.bound(H200, resident=1e12) == pytest.approx((1e12 - H200.l2_bytes) / 4.815e12)


def test_ratios_of_a_product():
    """GMRatio from the bytes that blocks ask for, SMRatio from the shared-memory port, WBRatio from 300 / 132 of 3."""
    found = pul_ratios(KernelTime(product(300), unit="tf32_mma"), H200)
    flop = 300 * 2.0 * 128 * 128 * 1024
    assert found.gm == pytest.approx(min(1.0, flop / H200.peak("tf32_mma") / (300 * 256 * 1024 * 4 / 4.815e12)))
    assert found.sm == 1.0  # 1,024 cycles of the units beside 512 of the port
    assert found.wb == pytest.approx(300 / 132 / 3)
    assert found.pul == pytest.approx(found.gm * found.sm * found.wb)


def test_the_breakdown_counts_every_repetition():
    root = serial([product(300), term(Resource.LAUNCH, 5.0)])
    assert tm.breakdown(root) == pytest.approx(
        {"compute unit": 32.0, "shared memory": 32.0, "L2 cache": 32.0, "launch": 5.0}
    )


def test_an_expression_is_printable():
    shown = tm.text(tm.scaled("occupancy", 1.25, product(300)))
    assert shown.splitlines()[0].split() == ["40", "occupancy:", "x", "1.25"]
    assert "2 waves" in shown and "16 x" in shown and "compute unit (4.194e+06)" in shown

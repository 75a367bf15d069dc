"""The CPU counterpart: bound and PUL by hand, properties, GEMM candidates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.arch.cpu import CpuArch
from jcuts.base.errors import ModelError
from jcuts.estimate.cpu import (
    CpuWork,
    bound,
    cache_ratio,
    core_balance,
    memory_ratio,
    pul,
    register_ratio,
    simd_ratio,
)
from jcuts.estimate.thesis.cpu_gemm import gemm_tiles, gemm_work


def make(**changes) -> CpuArch:
    values = {
        "name": "test",
        "machine": "x86_64",
        "cores": 2,
        "frequency": 2e9,
        "simd_bits": 512,
        "fma_ports": 2,
        "alu_ports": 2,
        "load_ports": 2,
        "store_ports": 1,
        "vector_registers": 32,
        "line": 64,
        "l1d": 32768,
        "l2": 1 << 20,
        "l3": 16 << 20,
        "bandwidth": {"l2": 100e9, "l3": 60e9, "dram": 20e9},
    }
    return CpuArch(**{**values, **changes})


ARCH = make()  # peak: 2 ports * 16 lanes * 2 * 2 cores * 2 GHz = 256 GFLOP/s


def test_compute_bound_by_hand():
    found = bound(CpuWork(flop={"float32": 256e9}, tiles=2), ARCH)
    assert found.seconds == pytest.approx(1.0) and found.limit == "flop" and found.balance == 1
    mixed = bound(CpuWork(flop={"float32": 128e9, "float64": 64e9}, tiles=2), ARCH)
    assert mixed.terms["flop"] == pytest.approx(1.0)
    # integers run beside floating point: 2 ports * 16 lanes * 4 GHz
    assert bound(CpuWork(flop={"int32": 128e9}, tiles=2), ARCH).terms["integer"] == pytest.approx(1.0)


def test_balance_by_hand():
    work = CpuWork(flop={"float32": 256e9}, tiles=3)
    # two of three tiles on one core: 4/3 of the even time
    assert bound(work, ARCH).seconds == pytest.approx(4 / 3)
    assert bound(CpuWork(flop={"float32": 256e9}, tiles=1), ARCH).seconds == pytest.approx(2.0)
    # two full tiles and one that is almost empty keep both cores busy
    edge = bound(CpuWork(flop={"float32": 256e9}, tiles=2, edge_share=0.01), ARCH)
    assert edge.seconds == pytest.approx(1.0)


L1, L2, L3 = 2 * 32768, 2 << 20, 16 << 20  # of both cores


@pytest.mark.parametrize(
    ("total", "level", "seconds"),
    [
        (60e3, "l1", 60e3 / (2 * 2e9 * 3 * 64)),
        (1e6, "l2", (1e6 - L1) / (2 * 2e9 * 128)),
        (10e6, "l3", (10e6 - L1 - L2) / 90e9),
        (100e6, "dram", (100e6 - L1 - L2 - L3) / 30e9),
        # a little more than L2 holds: all of it at L2's rate takes longer than the little at L3's
        (L2 + 2e3, "l3", (L2 + 2e3 - L1) / (2 * 2e9 * 128)),
    ],
)
def test_memory_term_charges_each_level_what_faster_ones_cannot_hold(total, level, seconds):
    found = bound(CpuWork(input_bytes=total / 2, output_bytes=total / 2), ARCH)
    assert found.level == level and found.terms["memory"] == pytest.approx(seconds)


def test_port_terms_by_hand():
    clocks = 2 * 2e9
    ops = {"fma": 8e9, "alu": 4e9, "special": 4e9, "load": 12e9, "store": 5e9}
    found = bound(CpuWork(vector_ops=ops, tiles=2, l2_bytes=1e9, l1_bytes=2e9), ARCH)
    assert found.terms["fma"] == pytest.approx(8e9 / (2 * clocks))
    assert found.terms["alu"] == pytest.approx(16e9 / (2 * clocks))
    assert found.terms["load"] == pytest.approx(12e9 / (2 * clocks))
    assert found.terms["store"] == pytest.approx(5e9 / clocks)
    assert found.terms["l2"] == pytest.approx(1e9 / ARCH.ceiling("l2"))
    assert found.terms["l1"] == pytest.approx(2e9 / ARCH.ceiling("l1"))
    assert found.limit == "alu"


def test_register_ratio_by_hand():
    # 6 x 4: 24 FMAs in 12 cycles, 10 loads in 5, latency 4: full rate, 29 of 32 registers
    assert register_ratio(6, 4, ARCH) == 1.0
    # 1 x 1: half a cycle of work every four cycles
    assert register_ratio(1, 1, ARCH) == pytest.approx(0.125)
    # 8 x 1: 4 cycles of FMAs, 4.5 of loads
    assert register_ratio(8, 1, ARCH) == pytest.approx(4 / 4.5)
    # 8 x 4 needs 37 registers
    assert register_ratio(8, 4, ARCH) == pytest.approx((32 / 37) ** 2)
    # AVX2 has 16 registers: 6 x 2 fits (15), 4 x 4 does not (21)
    avx2 = make(simd_bits=256, vector_registers=16)
    assert register_ratio(6, 2, avx2) == 1.0 and register_ratio(4, 4, avx2) < 1
    with pytest.raises(ModelError, match="0 x 2"):
        register_ratio(0, 2, ARCH)


def test_simd_and_balance_ratios():
    assert simd_ratio(64, 16) == 1.0 and simd_ratio(17, 16) == 17 / 32 and simd_ratio(1, 16) == 1 / 16
    assert core_balance(4, 2) == 1.0 and core_balance(3, 2) == 0.75 and core_balance(1, 2) == 0.5
    with pytest.raises(ModelError, match="0 elements"):
        simd_ratio(0, 16)
    with pytest.raises(ModelError, match="0 tiles"):
        core_balance(0, 2)


def test_cache_ratio_by_hand():
    fits = CpuWork(flop={"float32": 256e9}, l2_bytes=1e15, panel_bytes=16384)
    assert cache_ratio(fits, ARCH) == 1.0
    from_l2 = CpuWork(flop={"float32": 256e9}, l2_bytes=200e9, panel_bytes=16385)
    assert cache_ratio(from_l2, ARCH) == pytest.approx(0.5)
    from_l3 = CpuWork(flop={"float32": 256e9}, l2_bytes=120e9, panel_bytes=600e3)
    assert cache_ratio(from_l3, ARCH) == pytest.approx(0.5)
    from_dram = CpuWork(flop={"float32": 256e9}, l2_bytes=40e9, panel_bytes=9e6)
    assert cache_ratio(from_dram, ARCH) == pytest.approx(0.5)


def test_memory_ratio_by_hand():
    assert memory_ratio(CpuWork(flop={"float32": 256e9}, input_bytes=40e9), ARCH) == pytest.approx(0.5)
    assert memory_ratio(CpuWork(flop={"float32": 1.0}), ARCH) == 1.0


def test_pul_is_the_product():
    work = CpuWork(flop={"float32": 256e9}, input_bytes=40e9, tiles=3, rows=8, vectors=1, vector_extent=24)
    assert pul(work, ARCH) == pytest.approx(0.5 * (4 / 4.5) * (24 / 32) * 0.75)


@st.composite
def works(draw):
    amount = st.floats(0, 1e12)
    return CpuWork(
        flop={kind: draw(amount) for kind in draw(st.sets(st.sampled_from(["float32", "float64", "int32"])))},
        vector_ops={kind: draw(amount) for kind in draw(st.sets(st.sampled_from(["fma", "alu", "load", "store"])))},
        input_bytes=draw(amount),
        output_bytes=draw(amount),
        l2_bytes=draw(amount),
        l1_bytes=draw(amount),
        panel_bytes=draw(amount),
        tiles=draw(st.integers(1, 100)),
        edge_share=draw(st.floats(0, 0.9)),
        rows=draw(st.integers(0, 12)),
        vectors=draw(st.integers(0, 6)),
        vector_extent=draw(st.integers(0, 99)),
    )


@given(works())
def test_pul_is_a_share_and_bound_is_the_largest_term(work):
    assert 0 <= pul(work, ARCH) <= 1 + 1e-12
    found = bound(work, ARCH)
    assert found.seconds == max(found.terms.values()) == found.terms[found.limit] >= 0
    assert 1 <= found.balance <= ARCH.cores


@given(works(), st.floats(1, 5))
def test_more_work_takes_no_less_and_a_faster_machine_no_more(work, factor):
    doubled = CpuWork(
        **{
            **vars(work),
            "flop": {kind: factor * value for kind, value in work.flop.items()},
            "vector_ops": {kind: factor * value for kind, value in work.vector_ops.items()},
            "input_bytes": factor * work.input_bytes,
            "l2_bytes": factor * work.l2_bytes,
        }
    )
    assert bound(doubled, ARCH).seconds >= bound(work, ARCH).seconds * (1 - 1e-12)
    faster = make(frequency=ARCH.frequency * factor, bandwidth={k: v * factor for k, v in ARCH.bandwidth.items()})
    assert bound(work, faster).seconds <= bound(work, ARCH).seconds * (1 + 1e-12)


@given(works())
def test_even_work_is_never_bounded_above_one_core(work):
    alone = make(cores=1, l3=ARCH.l3, bandwidth={k: v / 2 for k, v in ARCH.bandwidth.items()})
    compute = ("flop", "integer", "fma", "alu", "load", "store")
    one, two = bound(work, alone).terms, bound(work, ARCH).terms
    assert all(two[name] <= one[name] * (1 + 1e-9) for name in compute)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flop": {"float32": -1}},
        {"input_bytes": math.inf},
        {"tiles": 0},
        {"edge_share": 1.0},
        {"vector_ops": {"mul": 1}},
        {"l2_bytes": math.nan},
        {"rows": -1},
    ],
)
def test_impossible_work(wrong):
    with pytest.raises(ModelError) as caught:
        CpuWork(**wrong)
    assert caught.value.field


def test_gemm_work_by_hand():
    work = gemm_work(100, 128, 64, ARCH, rows=6, vectors=4, block_rows=24, block_columns=64)
    assert work.flop == {"float32": 2.0 * 100 * 128 * 64}
    assert (work.input_bytes, work.output_bytes) == ((100 * 64 + 64 * 128) * 4, 100 * 128 * 4)
    # A once per strip of 64 columns (2), B once per block of 24 rows (5)
    assert work.l2_bytes == (100 * 64 * 2 + 64 * 128 * 5) * 4
    assert work.panel_bytes == 64 * 64 * 4
    # 4 x 2 full tasks, 4 of 100 rows are edge
    assert work.tiles == 8 and work.edge_share == pytest.approx(0.04)


def test_gemm_candidates():
    found = gemm_tiles(3120, 576, 96, ARCH)
    best = found[0]
    assert [t.pul for t in found] == sorted((t.pul for t in found), reverse=True) and best.pul > 0.95
    for tile in found:
        assert tile.rows * tile.vectors + tile.vectors + 1 <= 32
        assert tile.block_rows % tile.rows == 0 and tile.block_columns % (16 * tile.vectors) == 0
    assert best.rows * best.vectors >= 8 and found == gemm_tiles(3120, 576, 96, ARCH)
    narrow = make(simd_bits=256, vector_registers=16)
    assert all(t.rows * t.vectors + t.vectors + 1 <= 16 for t in gemm_tiles(64, 64, 64, narrow, percent=100))
    # packing that must be paid at every call is not worth it for one row
    assert not gemm_tiles(1, 1000, 1280, ARCH, constant_b=False)[0].pack_b


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.sampled_from([2, 4, 8]))
@settings(max_examples=25, deadline=None)
def test_gemm_candidates_exist_for_every_shape(m, n, k, dtype_bytes):
    found = gemm_tiles(m, n, k, ARCH, dtype_bytes)
    assert found and all(0 < t.pul <= 1 + 1e-12 for t in found)
    for tile in found[:3]:
        work = gemm_work(
            m,
            n,
            k,
            ARCH,
            rows=tile.rows,
            vectors=tile.vectors,
            block_rows=tile.block_rows,
            block_columns=tile.block_columns,
            dtype_bytes=dtype_bytes,
        )
        assert bound(work, ARCH).seconds >= 2.0 * m * n * k / ARCH.peak(
            {2: "bfloat16", 4: "float32", 8: "float64"}[dtype_bytes]
        )


def test_impossible_gemm():
    with pytest.raises(ModelError, match="M=0"):
        gemm_tiles(0, 4, 4, ARCH)
    with pytest.raises(ModelError, match="percent"):
        gemm_tiles(4, 4, 4, ARCH, percent=0)
    with pytest.raises(ModelError, match="1-byte"):
        gemm_work(4, 4, 4, ARCH, rows=1, vectors=1, block_rows=1, block_columns=16, dtype_bytes=1)

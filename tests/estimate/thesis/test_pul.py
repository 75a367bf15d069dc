"""The factors of PUL by hand, PUL and bound as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.arch.load import list_gpus, load_gpu
from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.limits import coef_r, num_thread, registers, size_shared, violations
from jcuts.estimate.thesis.params import FORMATS, FORMULAS, Operation, Tiles
from jcuts.estimate.thesis.pul import bound, estimate
from jcuts.estimate.thesis.ratios import gm_ratio, oi_tb, sm_ratio, thread_blocks, wb_ratio

V100 = load_gpu("V100")
H100 = load_gpu("H100")
GEMM = Operation("matmul", 1024, 512, 1024)
TILES = Tiles(n_block=64, n_thread=8, k_block=64, k_thread=8, c_input=8, format_shared=FORMATS.index("HWCN"))


def test_operational_intensity_by_hand():
    # COMP 2 * 64 * 512 * 64; transactions 64 * 16 + 512 * 2 = 2048, of 128 bytes
    assert oi_tb(GEMM, TILES, V100) == 2 * 64 * 512 * 64 / (128 * 2048) == 16.0
    # thesis: the knee of V100 is 15.6, so global memory is not the limit here
    assert gm_ratio(GEMM, TILES, V100, formula="printed") == 1.0
    half = Tiles(n_block=32, n_thread=8, k_block=32, k_thread=8, c_input=8)
    assert oi_tb(GEMM, half, V100) == 2 * 32 * 512 * 32 / (128 * (32 * 16 + 512)) == 8.0
    assert gm_ratio(GEMM, half, V100, formula="printed") == pytest.approx(8 / (14e12 / 900e9))
    assert gm_ratio(GEMM, half, V100) == pytest.approx(8 / (80 * 128 * 1.38e9 / 900e9))


def test_thesis_example_of_sm_ratio():
    # "10 floating-point operations per load, latency 20 cycles, no conflicts: SMRatio = 0.5"
    arch = load_gpu("V100")
    arch = type(arch)(**{**vars(arch), "lat_shared": 20.0})
    op = Operation("matmul", 64, 64, 64)
    # the same with 8 operations per load: 8 of 20 cycles are hidden, with two-way conflicts 8 of 40
    tiles = Tiles(n_block=8, n_thread=8, k_block=8, k_thread=8)
    assert sm_ratio(op, tiles, arch) == pytest.approx((2 * 8 * 8 / 16) / 20)
    assert sm_ratio(op, tiles, arch, coef_bc=2.0) == pytest.approx((2 * 8 * 8 / 16) / 40)
    pool = Operation("unary", 1, 1, 1, 1, 1)
    assert sm_ratio(pool, Tiles(), arch) == pytest.approx(1 / 20)
    # 128-bit loads: a quarter of the instructions, in the corrected form only
    wide = Tiles(n_block=8, n_thread=8, k_block=8, k_thread=8, vector=4)
    assert sm_ratio(op, wide, arch) == 1.0
    assert sm_ratio(op, wide, arch, formula="printed") == pytest.approx(8 / 20)


def test_blocks_and_waves():
    assert thread_blocks(GEMM, TILES) == 256
    odd = Operation("unary", 3, 1, 5, 7, 9)
    tiles = Tiles(n_block=2, k_block=2, h_block=4, w_block=8)
    assert thread_blocks(odd, tiles) == 2 * 3 * 2 * 2
    assert thread_blocks(odd, tiles, formula="printed") == 1.5 * 2.5 * 1.75 * 1.125
    assert thread_blocks(GEMM, Tiles(**{**vars(TILES), "split_k": 4})) == 1024


@pytest.mark.parametrize(
    ("blocks", "sms", "corrected", "printed"),
    [
        (80, 80, 1.0, 1.0),
        (160, 80, 1.0, 1.0),
        (81, 80, 81 / 160, 1 - (1 / 80) / 2),
        (40, 80, 0.5, 0.5),
        (120, 80, 0.75, 1 - 0.5 / 2),
        (1, 80, 1 / 80, 1 - 1 / 80),
    ],
)
def test_wb_ratio(blocks, sms, corrected, printed):
    assert wb_ratio(blocks, sms) == pytest.approx(corrected)
    assert wb_ratio(blocks, sms, formula="printed") == pytest.approx(printed)


def test_wb_ratio_of_nothing():
    with pytest.raises(ModelError, match="0 thread blocks"):
        wb_ratio(0, 80)


def test_resources_by_hand():
    assert num_thread(TILES) == 64 and num_thread(TILES, unit="fp16_mma") == 64 * 32
    # 64 rows of A and 64 columns of B, 8 channels, 4 bytes
    assert size_shared(GEMM, TILES) == 128 * 8 * 4
    double = Tiles(**{**vars(TILES), "prefetch": 1})
    assert size_shared(GEMM, double) == 2 * 128 * 8 * 4 and size_shared(GEMM, double, formula="printed") == 128 * 8 * 4
    conv = Operation("convolution", 1, 16, 8, 8, 8, f_h=3, f_w=3, p_h=1, p_w=1)
    tiles = Tiles(k_block=4, h_block=4, w_block=8, c_input=2)
    assert size_shared(conv, tiles) == (2 * 6 * 10 + 4 * 2 * 9) * 4
    # 64 accumulators, 8 operands, 10 others
    assert registers(GEMM, TILES) == 64 + 8 + 10
    assert registers(GEMM, TILES, unit="tf32_mma") == 2 + 1 + 10


def test_a_block_that_exactly_fills_a_limit_is_legal_but_not_in_print():
    op = Operation("unary", 1, 1, 1, 64, 64)
    full = Tiles(h_block=16, w_block=64)
    assert num_thread(full) == V100.max_thread
    assert coef_r(op, full, V100).tolist() == [1.0]
    assert coef_r(op, full, V100, formula="printed").tolist() == [0.0]
    over = Tiles(h_block=32, w_block=64)
    assert coef_r(op, over, V100).tolist() == coef_r(op, over, V100, formula="printed").tolist() == [0.0]


def test_each_hard_limit_is_named():
    def broken(op=GEMM, **changes):
        found = violations(op, Tiles(**{**vars(TILES), **changes}), V100)
        return {name for name, mask in found.items() if mask.any()}

    assert broken() == set()
    assert broken(n_block=1024, n_thread=1) == {"threads", "registers_sm"}
    assert broken(c_input=512) == {"shared"}
    assert broken(n_block=256, n_thread=64, k_block=64, k_thread=8) >= {"registers_thread"}
    assert broken(n_block=256, k_block=256, c_input=1) == {"registers_sm"}
    assert broken(vector=4) == set()
    # with C fastest a thread's loads run along the 8 channels; three do not divide by four
    assert broken(vector=4, format_shared=FORMATS.index("HWNC"), c_input=2) == {"vector"}
    assert broken(c_input=513, n_block=8, k_block=8) == {"c_input"}


def test_estimate_is_the_product():
    found = estimate(GEMM, TILES, V100)
    assert found.pul[0] == found.gm[0] * found.sm[0] * found.wb[0] * found.r[0]
    # 256 blocks on 80 SMs: 3.2 of 4 waves.  A warp is 4 x 8 threads: 4 rows of A without a conflict, 8 columns of B
    # that lie 8 words apart meet twice: COEF_bc = 1.5.  An 8 x 8 tile has 8 FLOP per load; the latency is 19
    assert found.wb[0] == pytest.approx(0.8)
    assert found.bc[0] == 1.5 and found.sm[0] == pytest.approx(8 / (19 * 1.5))


def test_bound_by_hand():
    found = {name: float(values[0]) for name, values in bound(GEMM, TILES, V100).items()}
    flop = 2 * 1024 * 512 * 1024
    seconds = flop / V100.peak()
    dram = (1024 * 512 + 512 * 1024 + 1024 * 1024) * 4 / 900e9
    l2 = (2 * 1024 * 512 * 16 + 1024 * 1024) * 4 / V100.bw_l2
    assert found["dram"] == pytest.approx(min(1, seconds / dram))
    assert found["l2"] == pytest.approx(min(1, seconds / l2))
    assert found["balance"] == pytest.approx(0.8)
    # one channel of a warp: 64 FMAs at 2 per cycle take 32 cycles, 80 instructions at 4 per cycle 20, banks 16 * 1.5
    assert found["issue"] == pytest.approx(1.0)
    assert found["bound"] == pytest.approx(min(found["dram"], found["l2"], 0.8))
    # Hopper does 4 FMAs per cycle: 16 cycles, and now the banks' 24 are the limit
    assert bound(GEMM, TILES, H100)["issue"][0] == pytest.approx(16 / 24)
    # without conflicts loads still take issue slots from the FMAs
    free = Tiles(**{**vars(TILES), "format_shared": FORMATS.index("HWNC"), "c_input": 1})
    assert bound(GEMM, free, H100)["issue"][0] <= 64 / 80


def test_bound_options():
    tiles = Tiles(n_block=64, n_thread=8, k_block=64, k_thread=8, c_input=8)
    thin = Operation("matmul", 64, 64, 64)
    cold, warm = bound(thin, tiles, V100), bound(thin, tiles, V100, resident_bytes=1e9)
    assert cold["dram"][0] < warm["dram"][0] == 1.0
    alone, shared = bound(GEMM, tiles, V100), bound(GEMM, tiles, V100, cluster=4)
    assert shared["l2"][0] >= alone["l2"][0]
    less = bound(GEMM, tiles, V100, executed_flop=1e8)
    assert less["dram"][0] < alone["dram"][0]
    for wrong in ({"cluster": 0}, {"resident_bytes": -1.0}, {"executed_flop": 0.0}):
        with pytest.raises(ModelError, match="must be positive"):
            bound(GEMM, tiles, V100, **wrong)


def test_balance_counts_full_blocks_only():
    # 81 blocks of which one is almost empty: the true bound may not claim two full waves
    op = Operation("unary", 1, 1, 80 * 32 + 1, 1, 1)
    tiles = Tiles(k_block=32)
    assert wb_ratio(thread_blocks(op, tiles), 80) == pytest.approx(81 / 160)
    assert bound(op, tiles, V100)["balance"][0] == 1.0
    alone = Operation("unary", 1, 1, 20, 1, 1)
    assert bound(alone, tiles, V100)["balance"][0] == pytest.approx(1 / 80)


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["convolution", "matmul", "batch_norm", "winograd", "pooling", "unary", "binary"]))
    small = st.integers(1, 40)
    spatial = kind != "matmul"
    window = kind in ("convolution", "pooling")
    f, s = (draw(st.integers(1, 5)), draw(st.integers(1, 3))) if window else (1, 1)
    p = draw(st.integers(0, (f - 1) // 2)) if window else 0
    op = Operation(
        kind,
        draw(small),
        draw(small) if kind in ("convolution", "matmul") else 1,
        draw(small),
        draw(small) if spatial else 1,
        draw(small) if spatial else 1,
        f,
        f,
        p,
        p,
        s,
        s,
    )
    values = {}
    for axis in "nkhw":
        if axis in "hw" and not spatial:
            continue
        thread = 2 ** draw(st.integers(0, 3))
        values[f"{axis}_thread"], values[f"{axis}_block"] = thread, thread * draw(st.integers(1, 8))
    values["c_input"] = draw(st.integers(1, max(1, op.c)))
    values["format_shared"] = draw(st.integers(0, 23))
    values["vector"] = draw(st.sampled_from([1, 2, 4]))
    values["prefetch"] = draw(st.integers(0, 1))
    return op, Tiles(**values), load_gpu(draw(st.sampled_from(list_gpus())))


@given(cases(), st.sampled_from(FORMULAS))
@settings(deadline=None)
def test_pul_is_a_share(case, formula):
    op, tiles, arch = case
    found = estimate(op, tiles, arch, formula=formula)
    for values in (found.gm, found.sm, found.wb, found.r, found.pul):
        assert values.shape == (1,) and 0 <= values[0] <= 1
    assert found.bc[0] >= 1


@given(cases())
@settings(deadline=None)
def test_bound_is_a_share_and_below_each_part(case):
    op, tiles, arch = case
    found = bound(op, tiles, arch)
    assert all(0 <= values[0] <= 1 for values in found.values())
    assert all(found["bound"][0] <= found[name][0] for name in ("dram", "l2", "issue", "balance"))
    assert (found["bound"][0] == 0) == (coef_r(op, tiles, arch)[0] == 0)


@given(cases(), st.floats(1.0, 8.0))
@settings(deadline=None)
def test_bound_grows_with_bandwidth(case, factor):
    op, tiles, arch = case
    faster = type(arch)(**{**vars(arch), "bw_global": arch.bw_global * factor, "bw_l2": arch.bw_l2 * factor})
    assert bound(op, tiles, faster)["bound"][0] >= bound(op, tiles, arch)["bound"][0]
    assert estimate(op, tiles, faster).pul[0] >= estimate(op, tiles, arch).pul[0]


@given(st.lists(cases(), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_arrays_equal_single_candidates(several):
    op, _, arch = several[0]
    rows = [tiles for _, tiles, _ in several]
    if op.kind == "matmul":
        rows = [Tiles(**{**vars(t), "h_block": 1, "w_block": 1, "h_thread": 1, "w_thread": 1}) for t in rows]
    stacked = Tiles(**{name: np.array([vars(t)[name] for t in rows]) for name in vars(rows[0])})
    together, apart = estimate(op, stacked, arch), [estimate(op, t, arch) for t in rows]
    assert np.allclose(together.pul, [e.pul[0] for e in apart]) and np.allclose(together.bc, [e.bc[0] for e in apart])
    both = bound(op, stacked, arch)["bound"]
    assert np.allclose(both, [bound(op, t, arch)["bound"][0] for t in rows])

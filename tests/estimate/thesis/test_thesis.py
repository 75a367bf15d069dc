"""Thesis 3.2 formula by formula: numbers worked out by hand, with H and W, F, P and S all different.

``test_tables`` counts every row of Tables 3.5 to 3.7 for square windows; here nothing is symmetric, so that an
exchanged H and W, or F_H and F_W, would show; and the factors of PUL are followed from Table 3.4 to the product.
"""

from __future__ import annotations

import pytest

from jcuts.arch.load import load_gpu
from jcuts.estimate.thesis.fusion import register_pul, shared_pul
from jcuts.estimate.thesis.limits import coef_r, num_thread, size_shared
from jcuts.estimate.thesis.params import COMPLEX, FORMATS, KINDS, Operation, Tiles
from jcuts.estimate.thesis.pul import estimate
from jcuts.estimate.thesis.ratios import gm_ratio, oi_tb, sm_ratio, thread_blocks, wb_ratio
from jcuts.estimate.thesis.shared_memory import coef_bc
from jcuts.estimate.thesis.tables import comp, n_load, num_trans

V100 = load_gpu("V100")
WINDOW = {"f_h": 3, "f_w": 5, "p_h": 1, "p_w": 2, "s_h": 2, "s_w": 3}
CONV = Operation("convolution", 8, 6, 32, 20, 28, **WINDOW)
POOL = Operation("pooling", 8, 1, 32, 20, 28, **WINDOW)
TILE = (2, 8, 4, 7)  # N, K, H, W: 448 outputs
# Input extents of the tile.  Printed: floor((4 + 3 - 2) / 2) + 1 = 3 rows, floor((7 + 5 - 4) / 3) + 1 = 3 columns.
# Corrected: 3 * 2 + 3 = 9 rows, 6 * 3 + 5 = 23 columns.


def test_table_3_1_classes():
    assert {"convolution", "matmul"} == COMPLEX and set(KINDS) - COMPLEX == {
        "batch_norm",
        "winograd",
        "pooling",
        "unary",
        "binary",
    }


def test_table_3_4_of_the_thesis_machine():
    # 80 SMs, 14 TFLOP/s, 900 GB/s; 128-byte transactions are 32 floats; Figure 3.2: the knee is at 15.6
    assert (V100.num_sm, V100.perf_peak, V100.bw_global) == (80, 14e12, 900e9)
    assert V100.trans_global(4) == 32 and V100.trans_global(2) == 64
    assert round(V100.perf_peak / V100.bw_global, 1) == 15.6
    assert (V100.max_thread, V100.max_shared) == (1024, 96 * 1024)


def test_table_3_5_asymmetric():
    assert comp(CONV, *TILE) == 2 * 2 * 6 * 8 * 4 * 7 * 3 * 5 == 80640
    assert comp(POOL, *TILE) == 2 * 8 * 4 * 7 * 3 * 5 == 6720
    assert comp(Operation("winograd", 8, 1, 32, 20, 28), *TILE) == 2.25 * 448 == 1008
    assert comp(Operation("batch_norm", 8, 1, 32, 20, 28), *TILE) == 1344
    # C_block, the part of the reduction that a block has
    assert comp(Operation("matmul", 64, 100, 64), 16, 8, 1, 1, c=25) == 2 * 16 * 25 * 8 == 6400


def test_table_3_6_asymmetric():
    weights = 8 * 6 * 5 * 3
    assert n_load(CONV, *TILE, formula="printed") == 2 * 6 * 3 * 3 + weights == 828
    assert n_load(CONV, *TILE) == 2 * 6 * 9 * 23 + weights == 3204
    assert n_load(POOL, *TILE) == n_load(POOL, *TILE, formula="printed") == 448 * 15
    for formula in ("printed", "corrected"):
        assert n_load(Operation("batch_norm", 8, 1, 32, 20, 28), *TILE, formula=formula) == 448 + 3 * 8
        assert n_load(Operation("binary", 8, 1, 32, 20, 28), *TILE, formula=formula) == 896
        # C_thread
        assert n_load(Operation("matmul", 64, 100, 64), 16, 8, 1, 1, c=25, formula=formula) == 16 * 25 + 25 * 8


def test_table_3_7_asymmetric():
    # four elements per transaction: 720 weights in 180; printed 3 columns in 1, corrected 23 in 6
    assert num_trans(CONV, *TILE, trans=4, formula="printed") == 2 * 6 * 3 * 1 + 180 == 216
    assert num_trans(CONV, *TILE, trans=4) == 2 * 6 * 9 * 6 + 180 == 828
    assert num_trans(POOL, *TILE, trans=4, formula="printed") == 2 * 8 * 3 * 1 == 48
    assert num_trans(POOL, *TILE, trans=4) == 2 * 8 * 9 * 6 == 864
    for formula in ("printed", "corrected"):
        # 7 columns in 2 transactions
        assert num_trans(Operation("unary", 8, 1, 32, 20, 28), *TILE, trans=4, formula=formula) == 2 * 8 * 4 * 2
        assert num_trans(Operation("winograd", 8, 1, 32, 20, 28), *TILE, trans=4, formula=formula) == 128
        assert num_trans(Operation("binary", 8, 1, 32, 20, 28), *TILE, trans=4, formula=formula) == 256
        assert num_trans(Operation("batch_norm", 8, 1, 32, 20, 28), *TILE, trans=4, formula=formula) == 128 + 3 * 2
        # 25 of a row in 7 transactions, 8 of a column in 2
        assert num_trans(Operation("matmul", 64, 100, 64), 16, 8, 1, 1, trans=4, c=25, formula=formula) == 16 * 7 + 50


# A block of 2 x 16 x 4 x 14 outputs, threads of 1 x 4 x 2 x 2: 2 * 4 * 2 * 7 = 112 threads
TILES = Tiles(
    n_block=2,
    n_thread=1,
    k_block=16,
    k_thread=4,
    h_block=4,
    h_thread=2,
    w_block=14,
    w_thread=2,
    c_input=2,
    format_shared=FORMATS.index("NCHW"),
)


def test_oi_tb_and_gm_ratio():
    work = 2 * 2 * 6 * 16 * 4 * 14 * 15
    # transactions of 32 floats.  Printed: 3 rows of floor(15 / 3) + 1 = 6 columns; corrected: 9 rows of 13 * 3 + 5 = 44
    printed = 2 * 6 * 3 * 1 + 16 * 6 * 15 // 32
    corrected = 2 * 6 * 9 * 2 + 16 * 6 * 15 // 32
    assert (work, printed, corrected) == (322560, 81, 261)
    assert oi_tb(CONV, TILES, V100, formula="printed") == work / (4 * 32 * printed)
    assert oi_tb(CONV, TILES, V100) == work / (4 * 32 * corrected)
    # printed R_peak: 14 TFLOP/s; corrected: 80 SMs * 128 FLOP * 1.38 GHz = 14.13 TFLOP/s
    assert gm_ratio(CONV, TILES, V100, formula="printed") == 1.0  # 31.1 FLOP per byte, beyond the knee
    assert gm_ratio(CONV, TILES, V100) == pytest.approx(322560 / (128 * 261) / (80 * 128 * 1.38e9 / 900e9))


def test_sm_ratio():
    # a thread: 2 * 6 * 4 * 2 * 2 * 15 FLOP; weights 4 * 6 * 15 = 360
    # printed rows floor((2 + 3 - 2) / 2) + 1 = 2, columns floor((2 + 5 - 4) / 3) + 1 = 2; corrected 5 and 8
    assert n_load(CONV, *TILES.thread, formula="printed") == 6 * 2 * 2 + 360 == 384
    assert n_load(CONV, *TILES.thread) == 6 * 5 * 8 + 360 == 600
    work, latency = 2880, V100.lat_shared
    assert comp(CONV, *TILES.thread) == work and latency == 19
    assert sm_ratio(CONV, TILES, V100, coef_bc=2.0, formula="printed") == pytest.approx(work / 384 / (19 * 2))
    assert sm_ratio(CONV, TILES, V100, coef_bc=2.0) == pytest.approx(work / 600 / (19 * 2))


def test_coef_bc_of_the_block():
    """Lanes along W, then H, then K: 7 threads 2 outputs (6 inputs) apart, 2 rows of threads 2 outputs (4 rows) apart.

    The input tile is 2 channels x 9 rows x 44 columns, so that a warp's first load reads words 6 w + 176 h, w < 7 and
    h < 2 (K does not move it); its first weights lie 4 channels of 2 * 3 * 5 words apart: 0, 120, 240 (K up to 2).
    """
    inputs = [(6 * w + 176 * h) % 32 for w in range(7) for h in range(2)]
    assert sorted(inputs) == [0, 2, 4, 6, 8, 12, 14, 16, 18, 20, 22, 24, 28, 30]  # 14 words on 14 banks
    assert sorted(120 * k % 32 for k in range(3)) == [0, 16, 24]
    assert coef_bc(CONV, TILES).tolist() == [1.0]
    # with C fastest they are words 12 w + 352 h: the second row of threads meets the first on every bank
    slow = Tiles(**{**vars(TILES), "format_shared": FORMATS.index("NHWC")})
    banks = [(12 * w + 352 * h) % 32 for w in range(7) for h in range(2)]
    assert {banks.count(bank) for bank in banks} == {2}
    # weights in the same order: 4 channels of 3 * 5 * 2 words again
    assert coef_bc(CONV, slow)[0] == pytest.approx((240 * 2 + 360 * 1) / 600)


def test_n_tb_and_wb_ratio():
    # 8/2 * 32/16 * 20/4 * 28/14 = 80 blocks on 80 SMs
    assert thread_blocks(CONV, TILES) == thread_blocks(CONV, TILES, formula="printed") == 80
    for formula in ("printed", "corrected"):
        assert wb_ratio(80, 80, formula=formula) == 1.0
    assert wb_ratio(100, 80) == pytest.approx(1.25 / 2)
    assert wb_ratio(100, 80, formula="printed") == pytest.approx(1 - 0.25 / 2)


def test_resources():
    assert num_thread(TILES) == 112
    # one iteration: 2 images of 2 channels, 9 x 44 inputs, and 16 * 2 * 15 weights, 4 bytes each
    assert size_shared(CONV, TILES) == (2 * 2 * 9 * 44 + 480) * 4
    assert coef_r(CONV, TILES, V100).tolist() == coef_r(CONV, TILES, V100, formula="printed").tolist() == [1.0]


@pytest.mark.parametrize("formula", ["printed", "corrected"])
def test_pul_is_followed_to_the_product(formula):
    loads, moved, peak = (384, 81, 14e12) if formula == "printed" else (600, 261, 80 * 128 * 1.38e9)
    gm = min(1.0, 322560 / (128 * moved) / (peak / 900e9))
    sm = min(1.0, 2880 / loads / 19)
    found = estimate(CONV, TILES, V100, formula=formula)
    assert found.pul[0] == pytest.approx(gm * sm * 1.0 * 1.0)


@pytest.mark.parametrize("formula", ["printed", "corrected"])
def test_register_level_fusion_adds_work_over_the_same_loads(formula):
    relu = Operation("unary", 8, 1, 32, 20, 28)
    loads, moved, peak = (384, 81, 14e12) if formula == "printed" else (600, 261, 80 * 128 * 1.38e9)
    # the block's 2 * 16 * 4 * 14 outputs and the thread's 16 are one operation each
    gm = min(1.0, (322560 + 1792) / (128 * moved) / (peak / 900e9))
    sm = min(1.0, (2880 + 16) / loads / 19)
    assert register_pul([CONV, relu], TILES, V100, formula=formula)[0] == pytest.approx(gm * sm)


@pytest.mark.parametrize("formula", ["printed", "corrected"])
def test_shared_level_fusion_frees_the_successor_of_global_loads(formula):
    second = Operation("convolution", 8, 32, 8, 20, 28)  # 1 x 1: its input tile is the predecessor's output tile
    first = Tiles(n_block=2, k_block=32, k_thread=4, h_block=4, h_thread=2, w_block=14, w_thread=2, c_input=2)
    after = Tiles(
        n_block=2,
        k_block=8,
        k_thread=2,
        h_block=4,
        w_block=14,
        w_thread=2,
        c_input=32,
        format_shared=FORMATS.index("NCHW"),
    )
    pair = shared_pul(CONV, first, second, after, V100, formula=formula)
    assert isinstance(pair, tuple)
    # a thread: 2 * 32 * 2 * 2 FLOP; 2 weights of 32 channels; printed extents floor((1 + 1) / 1) + 1 = 3 and 4
    loads = 32 * 3 * 4 + 64 if formula == "printed" else 32 * 1 * 2 + 64
    conflicts = coef_bc(second, after)[0]
    # 8/2 * 1 * 20/4 * 28/14 = 40 blocks on 80 SMs: half of them
    assert pair[1] == pytest.approx(256 / loads / (19 * conflicts) * 0.5)
    assert pair[0] == pytest.approx(estimate(CONV, first, V100, formula=formula).pul[0])

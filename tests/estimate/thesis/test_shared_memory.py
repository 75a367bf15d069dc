"""Bank conflicts by hand and against a slow count; access patterns of tiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles
from jcuts.estimate.thesis.shared_memory import bank_conflicts, coef_bc, lane_coordinates, load_patterns

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("addresses", "width", "cycles"),
    [
        (LANES * 4, 4, 1),  # neighbours
        (LANES * 0, 4, 1),  # all the same word: broadcast
        (LANES * 8, 4, 2),  # every other bank, twice
        (LANES * 12, 4, 1),  # an odd stride visits every bank
        (LANES * 128, 4, 32),  # one bank
        (LANES * 132, 4, 1),  # padded by one word
        (LANES // 2 * 4, 4, 1),  # pairs share a word
        (LANES % 2 * 128, 4, 2),  # two words of one bank, each for 16 lanes
        (LANES * 2, 2, 1),  # half words: two lanes share a word
        (LANES * 8, 8, 1),  # 64-bit neighbours: two phases, no conflict
        (LANES * 16, 16, 1),  # 128-bit neighbours: four phases
        (LANES * 32, 16, 2),  # 8 lanes of a phase 32 bytes apart: half of the banks twice
        (LANES * 128, 16, 8),  # 8 lanes of a phase on the same four banks
        (LANES * 0, 16, 1),
    ],
)
def test_by_hand(addresses, width, cycles):
    assert bank_conflicts(addresses, width) == cycles


def test_merged_counts_cycles_of_the_whole_warp():
    # 32 lanes of 16 bytes are 128 words: at least four cycles; a broadcast of one 16-byte value takes one
    assert bank_conflicts(LANES * 16, 16, merged=True) == 4
    assert bank_conflicts(LANES * 0, 16, merged=True) == 1
    assert bank_conflicts(LANES * 4, 4, merged=True) == 1


@given(
    st.lists(st.integers(0, 300), min_size=32, max_size=32),
    st.sampled_from([4, 8, 16]),
)
def test_against_a_slow_count(places, width):
    addresses = [place * width for place in places]
    lanes = {4: 32, 8: 16, 16: 8}[width]
    total = 0
    for start in range(0, 32, lanes):
        banks: dict[int, set[int]] = {}
        for address in addresses[start : start + lanes]:
            for word in range(address // 4, (address + width) // 4):
                banks.setdefault(word % 32, set()).add(word)
        total += max(map(len, banks.values()))
    found = bank_conflicts(addresses, width)
    assert found == total / (32 // lanes)
    assert 1 <= found <= 32


def test_rows_are_independent():
    both = bank_conflicts(np.stack([LANES * 4, LANES * 128]), 4)
    assert both.tolist() == [1, 32]


def test_bad_patterns():
    with pytest.raises(ModelError, match="32 lanes"):
        bank_conflicts(np.arange(16) * 4)
    with pytest.raises(ModelError, match="of 12"):
        bank_conflicts(LANES * 12, 12)
    with pytest.raises(ModelError, match="not aligned to 8"):
        bank_conflicts(LANES * 4, 8)


UNARY = Operation("unary", 2, 1, 4, 8, 64)


def test_threads_are_numbered_along_w_first():
    n, k, h, w = lane_coordinates(UNARY, Tiles(w_block=8, h_block=2, k_block=2, n_block=1))
    assert w[0].tolist() == list(range(8)) * 4
    assert h[0].tolist() == ([0] * 8 + [1] * 8) * 2
    assert k[0].tolist() == [0] * 16 + [1] * 16 and not n.any()


def test_missing_lanes_repeat_the_last_thread():
    _, _, _, w = lane_coordinates(UNARY, Tiles(w_block=4))
    assert w[0].tolist() == [0, 1, 2, 3] + [3] * 28


def test_layout_decides_conflicts():
    # 32 threads along W: W fastest is conflict-free; with K fastest they lie K_block words apart
    fast, slow = FORMATS.index("NCHW"), FORMATS.index("NHWC")
    tiles = Tiles(w_block=32, k_block=32, k_thread=32, format_shared=np.array([fast, slow]))
    assert coef_bc(UNARY, tiles).tolist() == [1, 32]
    ((offsets, loads),) = load_patterns(UNARY, tiles)
    assert offsets[0].tolist() == list(range(32)) and offsets[1].tolist() == [32 * i for i in range(32)]
    assert loads == 32


def test_thread_tile_and_stride_spread_lanes():
    conv = Operation("convolution", 1, 4, 8, 8, 128, f_h=1, f_w=1, s_w=2)
    tiles = Tiles(w_block=64, w_thread=2, c_input=4, format_shared=FORMATS.index("NCHW"))
    (inputs, of_inputs), (weights, of_weights) = load_patterns(conv, tiles)
    # every lane starts two outputs, four inputs further
    assert inputs[0].tolist() == [4 * i for i in range(32)] and not weights.any()
    # inputs: 4 channels x 1 row x 3 columns; weights: 4 channels
    assert (of_inputs, of_weights) == (12, 4)
    # four-way conflicts on the inputs, broadcast of the weights
    assert coef_bc(conv, tiles)[0] == pytest.approx((12 * 4 + 4 * 1) / 16)


def test_matmul_operands():
    gemm = Operation("matmul", 64, 32, 64)
    order = FORMATS.index("HWNC")  # rows of A, and columns of B, lie C_input apart
    tiles = Tiles(n_block=32, n_thread=4, k_block=16, k_thread=4, c_input=8, format_shared=order)
    (a, of_a), (b, of_b) = load_patterns(gemm, tiles)
    assert b[0].tolist() == [(lane % 4) * 4 * 8 for lane in range(32)]
    assert a[0].tolist() == [(lane // 4) * 4 * 8 for lane in range(32)]
    assert (of_a, of_b) == (128, 128)
    # A: 8 rows 32 words apart meet on one bank; B: 4 do
    assert coef_bc(gemm, tiles)[0] == 6
    # with C slowest they are four words apart: no conflict
    assert coef_bc(gemm, Tiles(**{**vars(tiles), "format_shared": FORMATS.index("HWCN")}))[0] == 1

"""Fusion rules of thesis 3.2.4 by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.arch.load import load_gpu
from jcuts.base.errors import Refusal
from jcuts.estimate.thesis.fusion import combined_pul, fused_is_complex, fusion_level, register_pul, shared_pul
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles
from jcuts.estimate.thesis.pul import estimate
from jcuts.estimate.thesis.ratios import sm_ratio, wb_ratio

V100 = load_gpu("V100")
CONV = Operation("convolution", 1, 16, 32, 16, 16, f_h=3, f_w=3, p_h=1, p_w=1)
RELU = Operation("unary", 1, 1, 32, 16, 16)
TILES = Tiles(k_block=32, k_thread=4, h_block=4, h_thread=2, w_block=8, w_thread=2, c_input=4)


@pytest.mark.parametrize(
    ("first", "second", "one_to_one", "level"),
    [
        (False, False, True, "register"),
        (True, False, True, "register"),
        (False, True, True, "register"),
        (True, True, True, "shared"),
        (False, True, False, "shared"),
        (False, False, False, "shared"),
    ],
)
def test_levels(first, second, one_to_one, level):
    assert fusion_level(first, second, one_to_one=one_to_one) == level


def test_kind_of_the_result():
    assert not fused_is_complex(False, False)
    assert fused_is_complex(True, False) and fused_is_complex(False, True) and fused_is_complex(True, True)


@pytest.mark.parametrize("formula", ["printed", "corrected"])
def test_register_level_keeps_loads_and_adds_work(formula):
    alone = register_pul([CONV], TILES, V100, formula=formula)
    assert alone == pytest.approx(estimate(CONV, TILES, V100, formula=formula).pul)
    fused = register_pul([CONV, RELU], TILES, V100, formula=formula)
    # COMP_thread 2 * 16 * 9 * 16 = 4608 becomes 4608 + 16 over the same loads
    conv = estimate(CONV, TILES, V100, formula=formula)
    assert conv.gm[0] < 1 or conv.sm[0] < 1
    more = (4608 + 16) / 4608
    expected = min(1, conv.gm[0] * more) * min(1, conv.sm[0] * more) * conv.wb[0] * conv.r[0]
    assert fused[0] == pytest.approx(expected)


def test_two_simple_operations():
    twice = register_pul([RELU, RELU], Tiles(k_block=8, w_block=16), V100)
    once = register_pul([RELU], Tiles(k_block=8, w_block=16), V100)
    # twice the work over the same loads: both ratios double
    assert twice[0] == pytest.approx(4 * once[0])


FIRST = Operation("convolution", 1, 8, 16, 10, 10, f_h=3, f_w=3, p_h=1, p_w=1)
SECOND = Operation("convolution", 1, 16, 8, 8, 8, f_h=3, f_w=3)
BEFORE = Tiles(k_block=16, h_block=6, h_thread=2, w_block=6, w_thread=2, c_input=8)
AFTER = Tiles(k_block=8, h_block=4, w_block=4, c_input=16, format_shared=FORMATS.index("NCHW"))


def test_shared_level_by_hand():
    pair = shared_pul(FIRST, BEFORE, SECOND, AFTER, V100)
    assert not isinstance(pair, Refusal)
    assert pair[0] == pytest.approx(estimate(FIRST, BEFORE, V100).pul[0])
    second = estimate(SECOND, AFTER, V100)
    # the successor loads nothing from global memory: GMRatio is 1
    assert pair[1] == pytest.approx(sm_ratio(SECOND, AFTER, V100, coef_bc=second.bc)[0] * wb_ratio(4, 80))
    assert second.gm[0] < 1 and pair[1] > second.pul[0]


def test_shared_level_refuses_tiles_that_do_not_match():
    few = shared_pul(FIRST, BEFORE, SECOND, Tiles(**{**vars(AFTER), "c_input": 8}), V100)
    assert isinstance(few, Refusal) and "C_input = 8" in few.reason and few.op == "convolution+convolution"
    small = shared_pul(FIRST, Tiles(**{**vars(BEFORE), "h_block": 4}), SECOND, AFTER, V100)
    assert isinstance(small, Refusal) and "(1, 16, 4, 6)" in small.reason and "(1, 16, 6, 6)" in small.reason
    relu = Operation("unary", 1, 1, 16, 10, 10)
    same = Tiles(k_block=16, h_block=6, w_block=6)
    assert not isinstance(shared_pul(FIRST, BEFORE, relu, same, V100), Refusal)


def test_combined():
    assert combined_pul([1.0, 1.0], [0.5, 0.5]) == 0.5
    # half of the work at full speed, half at a quarter: 2 / (1 + 4)
    assert combined_pul([1.0, 1.0], [1.0, 0.25]) == pytest.approx(0.4)
    assert combined_pul([1.0, 1.0], [1.0, 0.0]) == 0.0
    assert np.isclose(combined_pul([9.0, 1.0], [1.0, 0.1]), 10 / 19)

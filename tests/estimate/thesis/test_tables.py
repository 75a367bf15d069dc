"""Tables 3.5, 3.6 and 3.7, every row against a count by hand, printed and corrected."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.params import FORMATS, Operation, Tiles
from jcuts.estimate.thesis.tables import comp, input_extent, n_load, num_trans

# one 3x3 convolution with padding 1 and stride 2: 8 channels to 16, output 10 x 12
CONV = Operation("convolution", 4, 8, 16, 10, 12, f_h=3, f_w=3, p_h=1, p_w=1, s_h=2, s_w=2)
UNIT = Operation("convolution", 4, 8, 16, 10, 12, f_h=3, f_w=3, p_h=1, p_w=1)
GEMM = Operation("matmul", 64, 32, 48)
NORM = Operation("batch_norm", 4, 1, 16, 10, 12)
WINO = Operation("winograd", 4, 1, 16, 10, 12)
POOL = Operation("pooling", 4, 1, 16, 10, 12, f_h=3, f_w=3, p_h=1, p_w=1, s_h=2, s_w=2)
UNARY = Operation("unary", 4, 1, 16, 10, 12)
BINARY = Operation("binary", 4, 1, 16, 10, 12)
TILE = (2, 4, 5, 6)  # N, K, H, W: 240 outputs


@pytest.mark.parametrize(
    ("op", "tile", "count"),
    [
        (CONV, TILE, 2 * 2 * 8 * 4 * 5 * 6 * 3 * 3),
        (GEMM, (8, 4, 1, 1), 2 * 8 * 32 * 4),
        (NORM, TILE, 3 * 240),
        (WINO, TILE, 540.0),
        (POOL, TILE, 240 * 9),
        (UNARY, TILE, 240),
        (BINARY, TILE, 240),
    ],
)
def test_table_3_5(op, tile, count):
    assert comp(op, *tile) == count


@pytest.mark.parametrize(
    ("op", "tile", "printed", "corrected"),
    [
        # printed rows: floor((5 + 3 - 2) / 2) + 1 = 4, columns: floor((6 + 3 - 2) / 2) + 1 = 4; corrected 11 and 13
        (CONV, TILE, 2 * 8 * 4 * 4 + 4 * 8 * 9, 2 * 8 * 11 * 13 + 4 * 8 * 9),
        # at stride 1: printed 7 and 8, corrected 7 and 8: they agree where P = 1, F = 3, S = 1
        (UNIT, TILE, 2 * 8 * 7 * 8 + 4 * 8 * 9, 2 * 8 * 7 * 8 + 4 * 8 * 9),
        (GEMM, (8, 4, 1, 1), 8 * 32 + 32 * 4, 8 * 32 + 32 * 4),
        (NORM, TILE, 240 + 3 * 4, 240 + 3 * 4),
        (WINO, TILE, 240, 240),
        (POOL, TILE, 240 * 9, 240 * 9),
        (UNARY, TILE, 240, 240),
        (BINARY, TILE, 480, 480),
    ],
)
def test_table_3_6(op, tile, printed, corrected):
    assert n_load(op, *tile, formula="printed") == printed
    assert n_load(op, *tile) == corrected


@pytest.mark.parametrize(
    ("op", "tile", "printed", "corrected"),
    [
        # with 4 elements per transaction; printed extents 4 x 4 -> one transaction a row; corrected 11 x 13 -> four
        (CONV, TILE, 2 * 8 * 4 * 1 + 72, 2 * 8 * 11 * 4 + 72),
        (GEMM, (8, 6, 1, 1), 8 * 8 + 32 * 2, 8 * 8 + 32 * 2),
        (NORM, TILE, 2 * 4 * 5 * 2 + 3 * 1, 2 * 4 * 5 * 2 + 3 * 1),
        (WINO, TILE, 80, 80),
        (POOL, TILE, 2 * 4 * 4 * 1, 2 * 4 * 11 * 4),
        (UNARY, TILE, 80, 80),
        (BINARY, TILE, 160, 160),
    ],
)
def test_table_3_7(op, tile, printed, corrected):
    assert num_trans(op, *tile, trans=4, formula="printed") == printed
    assert num_trans(op, *tile, trans=4) == corrected


def test_corrected_extent_counts_the_rows_that_are_read():
    for out, filter_, stride in ((1, 1, 1), (1, 3, 2), (5, 3, 2), (4, 2, 3), (7, 5, 1)):
        touched = {i * stride + j for i in range(out) for j in range(filter_)}
        assert input_extent(out, filter_, 0, stride) == max(touched) + 1


def test_printed_extent_is_never_below_one():
    assert input_extent(1, 1, 5, 1, "printed") == 1


def test_tables_work_on_arrays():
    extents = np.array([[1, 2, 3, 4], [2, 4, 5, 6]]).T
    arrays = [num_trans(CONV, *(np.array(c) for c in zip(*extents.T.tolist(), strict=True)), trans=4)]
    scalars = [num_trans(CONV, *row, trans=4) for row in extents.T.tolist()]
    assert arrays[0].tolist() == scalars
    assert comp(CONV, *(np.array([v, v]) for v in TILE)).tolist() == [comp(CONV, *TILE)] * 2


def test_part_of_the_reduction():
    assert comp(GEMM, 8, 4, 1, 1, c=16) == comp(GEMM, 8, 4, 1, 1) // 2
    assert n_load(CONV, *TILE, c=2) == n_load(CONV, *TILE) // 4


def test_operation_counts():
    # output 10 x 12 at stride 2 with padding 1 reads (9 * 2 + 3 - 2) x (11 * 2 + 3 - 2) = 19 x 23 real inputs
    assert CONV.used_input() == 4 * 8 * 19 * 23 and CONV.weights() == 16 * 8 * 9 and CONV.outputs() == 4 * 16 * 120
    assert GEMM.used_input() == 64 * 32 and GEMM.weights() == 32 * 48 and GEMM.outputs() == 64 * 48
    assert BINARY.used_input() == 2 * 4 * 16 * 120 and NORM.weights() == 48
    # a 1x1 filter at stride 2 touches every other row only
    sparse = Operation("convolution", 1, 1, 1, 4, 4, s_h=2, s_w=2)
    assert sparse.used_input() == 16


def test_formats():
    assert len(FORMATS) == len(set(FORMATS)) == 24 and FORMATS[0] == "NCHW" and "WHCN" in FORMATS


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "conv", "n": 1}, "kind='conv'"),
        ({"kind": "unary", "n": 0}, "n=0"),
        ({"kind": "pooling", "n": 1, "p_h": -1}, "padding"),
        ({"kind": "matmul", "n": 1, "h": 2}, "H = W"),
    ],
)
def test_impossible_operations(arguments, match):
    with pytest.raises(ModelError, match=match):
        Operation(**arguments)


def test_impossible_tiles_and_formula():
    with pytest.raises(ModelError, match="power of two"):
        Tiles(n_block=3, n_thread=3)
    with pytest.raises(ModelError, match="multiple of k_thread"):
        Tiles(k_block=3, k_thread=2)
    with pytest.raises(ModelError, match="vector must be at least 1") as caught:
        Tiles(vector=0)
    assert caught.value.field == "vector"
    with pytest.raises(ModelError, match="below 24"):
        Tiles(format_shared=24)
    with pytest.raises(ModelError, match="formula='exact'"):
        n_load(GEMM, 1, 1, 1, 1, formula="exact")
    with pytest.raises(ModelError, match="TRANS_global"):
        num_trans(GEMM, 1, 1, 1, 1, trans=0)


def test_tiles_take_and_rows():
    tiles = Tiles(n_block=np.array([2, 4]), n_thread=np.array([1, 2]))
    assert len(tiles) == 2 and tiles.take(1) == Tiles(n_block=4, n_thread=2)
    assert tiles.rows() == [Tiles(n_block=2), Tiles(n_block=4, n_thread=2)]
    assert len(tiles.take(np.array([True, False]))) == 1

"""Enumeration and pruning: rules of Table 3.3, limits, determinism, never an empty list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcuts.arch.load import load_gpu
from jcuts.base.errors import ModelError
from jcuts.estimate.thesis.limits import coef_r, num_thread
from jcuts.estimate.thesis.params import COMPLEX, FORMATS, KINDS, Operation, Tiles
from jcuts.estimate.thesis.pul import bound, estimate
from jcuts.estimate.thesis.search_space import distinct_formats, enumerate_tiles, powers_of_two, prune, top_percent

V100 = load_gpu("V100")
CONV = Operation("convolution", 8, 32, 64, 28, 28, f_h=3, f_w=3, p_h=1, p_w=1)


def test_powers_of_two():
    assert powers_of_two(1) == [1] and powers_of_two(5) == [1, 2, 4, 8] and powers_of_two(8) == [1, 2, 4, 8]


def test_formats_without_duplicates():
    assert distinct_formats(CONV) == list(range(24))
    gemm = distinct_formats(Operation("matmul", 8, 8, 8))
    assert sorted(FORMATS[i].replace("H", "").replace("W", "") for i in gemm) == ["CN", "NC"]
    # vector loads run along the last dimension: it must not be one of length one
    assert all(FORMATS[i][-1] in "NC" for i in gemm)
    assert len(distinct_formats(Operation("unary", 1, 1, 4, 5, 6))) == 6
    assert len(distinct_formats(Operation("unary", 1, 1, 1, 1, 1))) == 1


@pytest.fixture(scope="module")
def tiles():
    return enumerate_tiles(CONV, V100, max_candidates=20_000)


def test_rules_of_table_3_3(tiles):
    assert 10_000 < len(tiles) <= 20_000
    for thread, block in zip(tiles.thread, tiles.block, strict=True):
        assert not (thread & (thread - 1)).any() and not (block % thread).any()
    assert coef_r(CONV, tiles, V100).all()
    assert set(np.unique(tiles.format_shared)) == set(range(24))
    assert set(np.unique(tiles.vector)) == {1, 2, 4} and set(np.unique(tiles.prefetch)) == {0, 1}
    # nothing to prefetch when all channels come at once
    assert not tiles.prefetch[tiles.c_input == CONV.c].any()
    assert set(np.unique(tiles.c_input)) == {1, 2, 4, 8, 16, 32}
    # warps are full, but for the one smallest tile
    assert (num_thread(tiles) < 32).sum() <= 1


def test_enumeration_is_the_same_every_time(tiles):
    again = enumerate_tiles(CONV, V100, max_candidates=20_000)
    assert all(np.array_equal(getattr(tiles, name), getattr(again, name)) for name in ("k_block", "w_thread", "vector"))


def test_prune_keeps_the_best_and_is_never_empty(tiles):
    kept = prune(CONV, tiles, V100, percent=1.0)
    scores = estimate(CONV, tiles, V100).pul
    assert len(kept) == -(-len(tiles) // 100)
    assert scores[kept[0]] == scores.max() and (np.diff(scores[kept]) <= 0).all()
    assert scores[kept[-1]] >= np.sort(scores)[-len(kept)]
    assert len(prune(CONV, tiles.take(np.arange(3)), V100, percent=0.1)) == 3
    assert len(prune(CONV, tiles.take(np.arange(50)), V100, percent=0.1, least=1)) == 1


def test_prune_drops_what_does_not_fit():
    mixed = Tiles(w_block=np.array([32, 4096, 32]), w_thread=np.array([1, 1, 1]))
    op = Operation("unary", 1, 1, 1, 1, 8192)
    assert prune(op, mixed, V100, percent=100).tolist() == [0, 2]
    with pytest.raises(ModelError, match="none of 1 candidates fits V100") as caught:
        prune(op, Tiles(w_block=4096), V100)
    assert caught.value.limits["threads"] == 1 and caught.value.limits["shared"] == 0
    with pytest.raises(ModelError, match="no candidates"):
        prune(op, Tiles(w_block=np.zeros(0, dtype=int)), V100)
    for wrong in ({"percent": 0}, {"percent": 101}, {"least": 0}):
        with pytest.raises(ModelError, match="percent"):
            prune(op, mixed, V100, **wrong)
    with pytest.raises(ModelError, match="max_candidates"):
        enumerate_tiles(op, V100, max_candidates=0)


def test_ties_keep_their_order():
    assert top_percent(np.array([0.5, 0.7, 0.7, 0.1]), np.array([0, 1, 2, 3]), 50, 1).tolist() == [1, 2]


def test_matrix_units_get_their_smallest_instruction():
    gemm = Operation("matmul", 256, 256, 256, element_bytes=2)
    tiles = enumerate_tiles(gemm, load_gpu("A100"), unit="bf16_mma", max_candidates=5000)
    assert (tiles.n_thread * tiles.h_thread * tiles.w_thread >= 16).all() and (tiles.k_thread >= 8).all()
    assert (num_thread(tiles, unit="bf16_mma") % 32 == 0).all()


@st.composite
def operations(draw):
    kind = draw(st.sampled_from(KINDS))
    size = st.integers(1, 70)
    spatial = kind != "matmul"
    f = draw(st.integers(1, 3)) if kind in ("convolution", "pooling") else 1
    return Operation(
        kind,
        draw(size),
        draw(size) if kind in COMPLEX else 1,
        draw(size),
        draw(size) if spatial else 1,
        draw(size) if spatial else 1,
        f,
        f,
        s_h=draw(st.integers(1, 2)) if f > 1 else 1,
        element_bytes=draw(st.sampled_from([2, 4, 8])),
    )


@given(operations(), st.sampled_from(["V100", "RTX 2080", "H200"]), st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_any_operation_has_candidates(op, name, most):
    arch = load_gpu(name)
    tiles = enumerate_tiles(op, arch, max_candidates=most)
    assert 1 <= len(tiles) <= most and coef_r(op, tiles, arch).all()
    kept = prune(op, tiles, arch)
    assert len(kept) >= 1 and len(set(kept.tolist())) == len(kept)
    assert (bound(op, tiles, arch)["bound"] > 0).all()


def test_a_hundred_thousand_at_once():
    many = enumerate_tiles(CONV, V100, max_candidates=100_000)
    found = estimate(CONV, many, V100)
    assert len(many) > 50_000 and found.pul.shape == (len(many),) and 0 < found.pul.max() <= 1

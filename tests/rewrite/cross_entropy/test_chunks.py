"""Chunks of rows: they cover every row once, and are boxes in every way in which values merge the rows' dimensions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jcuts.rewrite.cross_entropy.chunks import finest, local_shape, parts, positions
from jcuts.rewrite.cross_entropy.rows import reshaped


@pytest.mark.parametrize("dims", [(78,), (3, 26), (5, 4, 6), (2, 31), (1, 64), (7,)])
@pytest.mark.parametrize("wanted", [1, 4, 7, 13, 30, 1000])
def test_chunks_cover_every_row_once(dims, wanted):
    rows = np.arange(math.prod(dims))
    merged = {tuple(dims), (math.prod(dims),), (math.prod(dims[:-1]), dims[-1])}
    for shape in merged:
        array, seen = rows.reshape(shape), []
        axes = tuple(range(len(shape)))
        for part in parts(tuple(n for n in dims if n > 1), wanted):
            assert part.size <= max(wanted, 1)
            for turn in range(part.turns):
                at = positions(shape, axes, part.start(turn))
                local = local_shape(shape, axes, part.size)
                box = array[tuple(slice(a, a + n) for a, n in zip(at, local, strict=True))]
                np.testing.assert_array_equal(box.reshape(-1), part.start(turn) + np.arange(part.size))
                seen.append(box.reshape(-1))
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), rows)


def test_sizes_are_even_where_that_costs_little():
    assert [(p.size, p.turns) for p in parts((1024,), 300)] == [(256, 4)]
    assert [(p.size, p.turns) for p in parts((1022,), 300)] == [(256, 3), (254, 1)]
    assert [(p.size, p.turns) for p in parts((4, 16), 32)] == [(32, 2)]


def test_finest():
    assert finest({(3, 26), (78,)}) == (3, 26)
    assert finest({(78,)}) == (78,)
    assert finest({(6, 4), (3, 8), (24,)}) == (3, 2, 4)
    assert finest({(6, 4), (4, 6)}) is None


@pytest.mark.parametrize(
    ("old", "new", "rows", "wanted"),
    [
        ((3, 26, 9), (78, 9), (0, 1), (0,)),
        ((78, 9), (3, 26, 9), (0,), (0, 1)),
        ((3, 26, 9), (3, 26, 1, 9), (0, 1), (0, 1)),
        ((9, 6, 4), (3, 3, 24), (1, 2), (2,)),
        ((3, 26, 9), (26, 3, 9), (0, 1), (0, 1)),
        ((3, 26, 9), (3, 234), (0, 1), None),
        ((3, 26, 9), (6, 13, 9), (1,), None),
    ],
)
def test_rows_after_a_reshape(old, new, rows, wanted):
    assert reshaped(old, new, rows) == wanted

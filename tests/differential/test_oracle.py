"""What counts as XLA's mistake: windows and reductions checked in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

from benchmarks.random_programs import oracle
from jcuts.trace import jaxapi

RNG = np.random.default_rng(3)
WINDOWS = [
    ((2, 3), (1, 2), ((0, 0), (1, 2)), (1, 1), (1, 1)),
    ((3, 1), (2, 1), ((2, 1), (0, 0)), (1, 2), (2, 1)),
    ((2, 2), (1, 1), ((-1, 0), (0, -2)), (2, 1), (1, 3)),
]


@pytest.mark.parametrize("options", WINDOWS)
def test_windows_agree_with_sums_of_flags(options):
    flags = RNG.random((7, 9)) < 0.2
    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    found = oracle.in_windows(flags, dict(zip(names, options, strict=True)))
    counts = lax.reduce_window(flags.astype(np.int32), np.int32(0), lax.add, *options)
    np.testing.assert_array_equal(found, np.asarray(counts) > 0)


@pytest.mark.parametrize("extent", [24, 40_003])
def test_lost_nans_are_those_that_numpy_has_and_xla_not(extent):
    x = RNG.standard_normal(extent).astype(np.float32)
    x[::7] = np.nan

    def function(v):
        return lax.reduce_window(v, np.float32(np.inf), lax.min, (2,), (2,), "VALID"), v * 2

    closed = jaxapi.closed_jaxpr_of(function, x)
    lowest = np.asarray(jaxapi.eval_closed(closed, x)[0])
    wanted = np.minimum(x[: extent // 2 * 2 : 2], x[1::2])
    lost = int((np.isnan(wanted) & ~np.isnan(lowest)).sum())
    assert oracle.lost_nans(closed, [x]) == ({"reduce_window_min": lost} if lost else {})
    assert oracle.nan_unlike([[lowest]], [wanted]) == lost + int((~np.isnan(wanted) & np.isnan(lowest)).sum())


def test_integers_have_no_nans():
    x = np.arange(12, dtype=np.int32)
    closed = jaxapi.closed_jaxpr_of(lambda v: lax.reduce_max(v, (0,)), x)
    assert oracle.lost_nans(closed, [x]) == {}
    assert oracle.nan_unlike([[x]], [x + 1]) == 0

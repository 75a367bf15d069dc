"""Rounding in the PTX machine, against exact sums."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.ptx import machine as ptx_machine


def towards_zero(x: Fraction) -> float:
    near = float(x)
    return float(np.nextafter(near, 0.0)) if abs(Fraction(near)) > abs(x) else near


@pytest.mark.parametrize("name", ["add", "sub"])
def test_sums_towards_zero_in_float64(name):
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(3000) * 2.0 ** rng.integers(-60, 60, 3000) for _ in range(2))
    got = ptx_machine._ARITHMETIC[name]([name, "rz", "f64"], a, b)
    sign = 1 if name == "add" else -1
    np.testing.assert_array_equal(
        got, [towards_zero(Fraction(x) + sign * Fraction(y)) for x, y in zip(a, b, strict=True)]
    )
    most = np.finfo(np.float64).max
    with np.errstate(all="ignore"):
        got = ptx_machine._ARITHMETIC["add"](["add", "rz", "f64"], np.array([most, np.inf]), np.array([most, 1.0]))
    np.testing.assert_array_equal(got, [most, np.inf])

"""Options are checked when they are given; a variant's text stands for it."""

from __future__ import annotations

import math

import pytest

from jcuts.base.errors import UsageError
from jcuts.base.settings import REGIONS, Settings, Variant


@pytest.mark.parametrize("tolerance", [0, -1.0, math.inf, math.nan, True, "2", None])
def test_a_tolerance_is_a_positive_finite_number(tolerance):
    with pytest.raises(UsageError, match="positive finite number") as caught:
        Settings(tolerance=tolerance)
    assert caught.value.tolerance is tolerance
    assert Settings(tolerance=1).tolerance == 1


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"tune": "on"}, {"tune_seconds": -1}, {"tune_seconds": True}])
def test_unknown_options(options):
    with pytest.raises(UsageError):
        Settings(**options)


def test_a_variant_is_what_its_text_says():
    for rewrites in ((), ("scales",), ("turns", "vectors")):
        for regions in REGIONS:
            for chained in (True, False):
                variant = Variant(rewrites, regions, chained)
                assert Variant.parse(str(variant)) == variant
    for text in ("plain/some", "plain/all/twice"):
        with pytest.raises(UsageError):
            Variant.parse(text)

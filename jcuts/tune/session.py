"""Choices for all subsets of one function: from the database, by measuring, or by estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcuts.base.settings import Settings


def choose(subsets: Sequence[Any], settings: Settings, *, may_measure: bool) -> None:
    """Sets ``chosen`` and ``origin`` of every subset (see `pipeline.Subset`)."""
    for subset in subsets:
        if settings.tune == "off" or settings.mode != "mixed":
            subset.chosen, subset.origin = subset.ranked[0][0], "estimated"

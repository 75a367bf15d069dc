"""Elementwise maximum, minimum, ceiling, selection and table look-up over one number or an array of one per schedule.

Cost formulas that use these (and plain arithmetic) price one schedule, or all schedules of a program in one
vectorised evaluation, to the same bits: every operation is rounded as Python rounds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _is_batch(values: Sequence[Any]) -> bool:
    for value in values:  # noqa: SIM110 (a generator takes thrice as long)
        if isinstance(value, np.ndarray):
            return True
    return False


def maximum(*values: Any) -> Any:
    """The largest of several numbers, for every schedule."""
    return functools.reduce(np.maximum, values) if _is_batch(values) else max(values)


def minimum(*values: Any) -> Any:
    """The smallest of several numbers, for every schedule."""
    return functools.reduce(np.minimum, values) if _is_batch(values) else min(values)


def ceil(value: Any) -> Any:
    """Rounded up to an integer."""
    return np.ceil(value).astype(np.int64) if isinstance(value, np.ndarray) else math.ceil(value)


def floor(value: Any) -> Any:
    """Rounded down to an integer."""
    return np.floor(value).astype(np.int64) if isinstance(value, np.ndarray) else math.floor(value)


def is_any(condition: Any) -> bool:
    """Whether a condition holds for any schedule."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """One of two values, for every schedule. Both are evaluated."""
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else yes if condition else no


def per_distinct(function: Callable[..., float], *keys: Any) -> Any:
    """A scalar function of few small integers, called once for every distinct combination of them."""
    if not _is_batch(keys):
        return function(*keys)
    columns = np.broadcast_arrays(*keys)
    code = np.zeros(columns[0].shape, np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    found = [function(*(int(column.flat[n]) for column in columns)) for n in first]
    return np.asarray(found, np.float64)[place.reshape(code.shape)]


def pick(value: Any, place: int) -> Any:
    """The number of one schedule. Args: value: an array of all schedules, or what they have in common."""
    return value[place].item() if isinstance(value, np.ndarray) else value

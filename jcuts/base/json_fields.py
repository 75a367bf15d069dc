"""Strict readers of JSON values: a field of another type raises TypeError or ValueError and is never converted."""

from __future__ import annotations

import math
from typing import Any


def text(value: Any) -> str:
    """A JSON string. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{repr(value)[:40]} is no text")
    return value


def texts(value: Any) -> dict[str, str]:
    """A JSON object of strings. Raises TypeError; AttributeError for what is no object."""
    return {text(key): text(item) for key, item in value.items()}


def flag(value: Any) -> bool:
    """A JSON boolean. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{repr(value)[:40]} is neither true nor false")
    return value


def non_negative(value: Any) -> float:
    """A finite JSON number that is not negative. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{repr(value)[:40]} is no finite number from 0 on")
    return float(value)

"""Hashable keys of equations' parameters, for memos of what depends on an equation alone."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

PLAIN = (bool, int, float, complex, str, type(None))


class NotPlain(Exception):
    """A parameter is no plain value."""


def plain(value: Any) -> Hashable:
    """A parameter as a key. Raises: NotPlain."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, numbers.Integral):  # NumPy's
        return ("int", repr(int(value)))
    if isinstance(value, enum.Enum):
        return (str(type(value)), str(value.name))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(plain(v) for v in value))
    if isinstance(value, Mapping):
        return ("mapping", *((plain(k), plain(v)) for k, v in sorted(value.items(), key=lambda item: repr(item[0]))))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = [(field.name, plain(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return (str(type(value)), *values)
    if isinstance(value, np.dtype):
        return ("dtype", str(value))
    raise NotPlain

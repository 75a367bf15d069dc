"""Hashable keys of equations' parameters, for memos of what depends on an equation alone."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import numbers
import threading
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


MOST_KEYS = 1 << 16
"""Interned keys that are kept; numbers that were given stay valid when the others are forgotten."""
_interned: dict[Hashable, int] = {}
_numbers = itertools.count()
_interned_lock = threading.Lock()


def intern_key(key: Hashable) -> int:
    """A number for a key, the same for equal keys: a memo hashes numbers instead of nested tuples."""
    with _interned_lock:
        number = _interned.get(key)
        if number is None:
            if len(_interned) >= MOST_KEYS:
                _interned.clear()
            number = _interned[key] = next(_numbers)
        return number

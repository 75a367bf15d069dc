"""Bounded memoisation by object identity (`id`), for objects without a hash or with an expensive one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class IdentityMemo(Generic[Value]):
    """Values by the identity of an object that is kept with them, so that no other object takes its number.

    Threads may share it: at worst a value is computed again.

    Args: most: values that are kept; one more drops them all.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._found: dict[Hashable, tuple[Any, Value]] = {}

    def get(self, owner: Any, *more: Hashable) -> Value | None:
        """The value of an object, None where it has none. Args: more: what it depends on besides."""
        known = self._found.get((id(owner), *more))
        return known[1] if known is not None and known[0] is owner else None

    def keep(self, value: Value, owner: Any, *more: Hashable) -> Value:
        """Keeps a value, and gives it."""
        if len(self._found) >= self.most:
            self._found.clear()
        self._found[id(owner), *more] = owner, value
        return value

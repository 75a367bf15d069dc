"""A named table that is filled by decorators and never guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jcuts.base.errors import UsageError

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """Names to values of one kind (templates, commands, policies); a name is given once.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... def square(n):
    ...     return n * n
    >>> shapes["square"](3)
    9
    >>> shapes.names()
    ('square',)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, Value] = {}

    def register(self, name: str) -> Callable[[Value], Value]:
        """Decorator that enters its argument under ``name``.

        Raises:
            UsageError: the name is taken.
        """

        def enter(value: Value) -> Value:
            if name in self._values:
                raise UsageError(f"{self.kind} {name!r} is registered twice", kind=self.kind, name=name)
            self._values[name] = value
            return value

        return enter

    def __getitem__(self, name: str) -> Value:
        """The value of ``name``.

        Raises:
            UsageError: unknown; the message lists what there is.
        """
        try:
            return self._values[name]
        except KeyError:
            raise UsageError(
                f"unknown {self.kind} {name!r}: choose one of {', '.join(self.names()) or '(none)'}",
                kind=self.kind,
                name=name,
                known=self.names(),
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._values)

    def names(self) -> tuple[str, ...]:
        """All names, sorted: iteration never depends on import order."""
        return tuple(sorted(self._values))

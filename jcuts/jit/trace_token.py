"""Thread-local permission to trace a jitted variant: only the slow path may, while it calls one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jcuts.primitive.sharding import Placement, expected
from jcuts.trace.capture import Capture


class NeedsDecision(Exception):
    """A carrier met a signature without a decision.  Never leaves `jit.optimized`."""


class TraceToken(threading.local):
    """Thread-local: the program that the slow path is calling, if any; and what it traced to decide, for which
    program.
    """

    program: Any = None
    traced: tuple[Any, Capture] | None = None


permission = TraceToken()


@contextlib.contextmanager
def isolated_trace() -> Iterator[None]:
    """What is traced to decide inside the block is not seen outside it, nor the other way round."""
    before, permission.traced = permission.traced, None
    try:
        yield
    finally:
        permission.traced = before


class AuthorizedCall:
    """A jitted carrier with the token that lets the slow path trace and lower it."""

    def __init__(self, jitted: Any, token: object, placement: Placement) -> None:
        self.jitted = jitted
        self._token = token
        self._placement = placement

    def permitted(self, *args: Any, **kwargs: Any) -> Any:
        before = permission.program, expected.placement
        permission.program, expected.placement = self._token, self._placement
        try:
            return self.jitted(*args, **kwargs)
        finally:
            permission.program, expected.placement = before

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the carrier; what it compiles to is what a call with these arguments runs."""
        before = permission.program, expected.placement
        permission.program, expected.placement = self._token, self._placement
        try:
            return self.jitted.lower(*args, **kwargs)
        finally:
            permission.program, expected.placement = before

    def clear_cache(self) -> None:
        self.jitted.clear_cache()

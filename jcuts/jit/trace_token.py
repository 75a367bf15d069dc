"""Thread-local permission to trace a jitted variant: only the slow path may, while it calls one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jcuts.primitive.sharding import Placement, expected
from jcuts.trace.capture import Capture
from jcuts.tune import agreed_store
from jcuts.tune.agreed_store import AgreedStore


class NeedsDecision(Exception):
    """A carrier met a signature without a decision.  Never leaves `jit.optimized`."""


class UnseenSignature(NeedsDecision):
    """The same, found before any carrier was called."""


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
    """A jitted carrier with the token that lets the slow path trace and lower it.

    Attributes: agreed: the choices by which all processes lower it, where several run it.
    """

    def __init__(self, jitted: Any, token: object, placement: Placement) -> None:
        self.jitted = jitted
        self._token = token
        self._placement = placement
        self.agreed: AgreedStore | None = None

    def permitted(self, *args: Any, **kwargs: Any) -> Any:
        with self._permission():
            return self.jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the carrier; what it compiles to is what a call with these arguments runs."""
        with self._permission():
            return self.jitted.lower(*args, **kwargs)

    @contextlib.contextmanager
    def _permission(self) -> Iterator[None]:
        before = permission.program, expected.placement, expected.agreed
        permission.program, expected.placement = self._token, self._placement
        expected.agreed = self.agreed is not None
        try:
            with agreed_store.using(self.agreed):
                yield
        finally:
            permission.program, expected.placement, expected.agreed = before

    def clear_cache(self) -> None:
        self.jitted.clear_cache()

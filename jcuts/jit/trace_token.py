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
        self._has_run = False

    def permitted(self, *args: Any, **kwargs: Any) -> Any:
        """A call that may trace."""
        with self._permission():
            return self.jitted(*args, **kwargs)

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """A call as the user's are, through the jitted function's fast path once it is compiled: for timing.

        Giving permission takes 30 us, which a CPU's program adds to its own time where XLA runs it on this thread.  (A
        first call without it would leave the jitted function on its slow path.)
        """
        if not self._has_run:
            self._has_run = True
            return self.permitted(*args, **kwargs)
        try:
            return self.jitted(*args, **kwargs)
        except NeedsDecision:  # arguments of other types
            return self.permitted(*args, **kwargs)

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

"""Function multi-versioning: each program variant is its own ``jax.jit`` function (a *carrier*), made on first use.

Variants are plain XLA and jcuts, each with or without compiler options.  JAX runs the Python body of a carrier only for
a signature that it has not seen; if the slow path did not request that trace, a guard raises ``NeedsDecision``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jcuts.base.settings import Settings, Variant
from jcuts.jit import variant_space
from jcuts.jit.decision import Decision
from jcuts.jit.trace_token import AuthorizedCall, NeedsDecision, permission
from jcuts.primitive.call import jcuts_call
from jcuts.primitive.sharding import Placement
from jcuts.trace import jaxapi
from jcuts.trace.capture import Capture, capture


class Program(NamedTuple):
    """One variant: its ``name`` (`jit.variant_names`), placement, and jitted carrier."""

    name: str
    placement: Placement
    call: Any


# A call that could not tune because another process measured is tried again after this time [s], then twice that, ...
_RETRY_AFTER = 30.0
_RETRY_MOST = 960.0


@dataclasses.dataclass
class Postponed:
    """A signature that could not be tuned yet, and when to retry (monotonic seconds)."""

    program: Program
    decision: Decision
    pause: float
    again: float

    @classmethod
    def after(cls, before: Postponed | None, program: Program, decision: Decision, now: float) -> Postponed:
        """The next pause, from now on: twice the one before, if there was one."""
        pause = _RETRY_AFTER if before is None else min(_RETRY_MOST, 2 * before.pause)
        return cls(program, decision, pause, now + pause)


class VariantCompiler:
    """The program variants of one function, each made on first use.

    Args: fn: the user's function; settings: the user's options; options: of ``jax.jit``.
    Attributes:
        plain: the function under ``jax.jit``.
        nested: the jcuts program as a call inside another trace has it, with nothing compared.
        safer: compiler options of programs with kernels, where XLA cannot compile these without.
    """

    def __init__(self, fn: Callable[..., Any], settings: Settings, options: dict[str, Any]) -> None:
        self._fn = fn
        self._settings = settings
        self._options = options
        self._programs: dict[tuple[str, Placement], Program] = {}
        self.safer: dict[str, Any] = {}
        self.plain = self.jit(fn)
        self.nested = self.jit(self.traced_function(None))

    def jit(self, carrier: Callable[..., Any], **more: Any) -> Any:
        """A carrier under ``jax.jit`` with the user's options. Args: more: options besides."""
        return jax.jit(carrier, **self._options, **more)

    def traced_function(
        self, placement: Placement | None, form: Variant | None = None, *, decided: bool = False
    ) -> Callable[..., Any]:
        """A function to jit.  ``decided``: called by the slow path, which has traced the user's function already."""
        fn, settings = self._fn, self.settings_for(form)

        @functools.wraps(fn)
        def carrier(*args: Any, **kwargs: Any) -> Any:
            if jaxapi.jit_disabled():
                return fn(*args, **kwargs)
            seen = (self._traced_for(args, kwargs) if decided else None) or capture(fn, args, kwargs)
            outs = jcuts_call(seen.closed, seen.leaves, settings, name=seen.name, placement=placement)
            return jax.tree.unflatten(seen.out_tree, outs)

        return carrier

    def _traced_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture | None:
        """What the slow path has traced to decide, at the leaves of this trace; None if it is of other types."""
        if permission.traced is None or permission.traced[0] is not self:
            return None
        seen = permission.traced[1]
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if jaxapi.is_tracer(x)]
        if [jaxapi.aval_of(x) for x in leaves] != list(seen.closed.in_avals):
            return None
        return dataclasses.replace(seen, leaves=leaves)

    def settings_for(self, form: Variant | None) -> Settings:
        """The user's options with a form."""
        return self._settings if form is None else dataclasses.replace(self._settings, form=form)

    def program(self, name: str, placement: Placement, platform: str, more: dict[str, Any] | None = None) -> Program:
        """The program of a name. Args: more: compiler options besides, where the program has any at all."""
        key = (name, placement)
        if key not in self._programs:
            inner = self._fn
            if not variant_space.is_xla(name):
                inner = self.traced_function(placement, variant_space.form_of(name), decided=True)
            token = object()

            @functools.wraps(self._fn)
            def carrier(*args: Any, **kwargs: Any) -> Any:
                if permission.program is not token and not jaxapi.jit_disabled():
                    raise NeedsDecision
                return inner(*args, **kwargs)

            options = variant_space.compiler_options(name, platform)
            options = {**options, **(more or {})} if options else {}
            if not variant_space.is_xla(name):
                options = {**options, **self.safer}
            jitted = self.jit(carrier, compiler_options=options) if options else self.jit(carrier)
            self._programs[key] = Program(name, placement, AuthorizedCall(jitted, token, placement))
        return self._programs[key]

    def evict(self, name: str, placement: Placement) -> None:
        """Makes the program anew when it is asked for again."""
        self._programs.pop((name, placement), None)

    def clear_cache(self) -> None:
        """Frees what was compiled."""
        for program in self._programs.values():
            program.call.clear_cache()
        self.nested.clear_cache()
        self.plain.clear_cache()

"""``jcuts.optimize`` and ``Optimized``: the front door, a drop-in for ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jcuts.base.errors import NotJaxError
from jcuts.base.settings import Settings
from jcuts.primitive.call import jcuts_call
from jcuts.trace.capture import capture


class Optimized:
    """A function that runs jcuts' kernels where they win, called like the function that ``jax.jit`` returns."""

    def __init__(self, fn: Callable[..., Any], settings: Settings, jit_options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self.settings = settings

        @functools.wraps(fn)
        def carrier(*args: Any, **kwargs: Any) -> Any:
            seen = capture(fn, args, kwargs)
            outs = jcuts_call(seen.closed, seen.leaves, settings, name=seen.name)
            return jax.tree.unflatten(seen.out_tree, outs)

        self._jit = jax.jit(carrier, **jit_options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jit(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Lowered`` of the optimised program."""
        return self._jit.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.stages.Traced`` of the optimised program."""
        return self._jit.trace(*args, **kwargs)


def optimize(fn: Callable[..., Any] | None = None, *, mode: str = "mixed",
             static_argnums: int | Sequence[int] | None = None,
             static_argnames: str | Iterable[str] | None = None,
             donate_argnums: int | Sequence[int] | None = None,
             workspace_limit: int | None = None, total_workspace: int | None = None,
             tune: str = "auto", tolerance: float = 2.0, strict: bool = False) -> Any:
    """Optimise a JAX function; use it like ``jax.jit``, as a decorator with or without arguments."""
    settings = Settings(mode=mode, tune=tune, tolerance=tolerance, workspace_limit=workspace_limit,
                        total_workspace=total_workspace, strict=strict)
    options = dict(static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums)

    def wrap(target: Callable[..., Any]) -> Optimized:
        if not callable(target):
            raise NotJaxError(f"optimize needs a function, not a {type(target).__name__}", value=target)
        return Optimized(target, settings, options)

    return wrap if fn is None else wrap(fn)

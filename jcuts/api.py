"""``jcuts.optimize``: the front door, a drop-in for ``jax.jit``."""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jcuts.base import keys, knobs
from jcuts.base.errors import NotJaxError
from jcuts.base.settings import Settings
from jcuts.jit.decision import default_stores, set_default_store
from jcuts.jit.dispatch.bound_method import BoundOptimized
from jcuts.jit.optimized import Optimized
from jcuts.jit.serving.batch_buckets import BatchBuckets
from jcuts.jit.serving.bucketed import BucketedOptimized
from jcuts.trace import jaxapi
from jcuts.trace.capture import function_name

__all__ = ["BoundOptimized", "Optimized", "optimize", "set_default_store"]

log = logging.getLogger("jcuts")


class _NotGiven:
    """Tells ``optimize(mode=...)``, which makes a decorator, from ``optimize(None)``, which is a mistake."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN: Any = _NotGiven()


def optimize(
    fn: Callable[..., Any] = _NOT_GIVEN,
    *,
    mode: str = "mixed",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    workspace_limit: int | None = None,
    total_workspace: int | None = None,
    convolution_accuracy: str = "exact",
    microbatch_policy: str | None = None,
    tune: str = "auto",
    tune_seconds: float | None = None,
    tolerance: float = 2.0,
    strict: bool = False,
    chunk_logits: bool | None = None,
    require: str | None = None,
    batch_buckets: Iterable[int] | None = None,
    batch_argnums: int | Sequence[int] = 0,
) -> Any:
    """Make a JAX function faster; use it like ``jax.jit``, as a decorator with or without arguments.

    Args:
        fn: the function; left out when used as ``@optimize(...)``.
        mode: ``mixed`` (jcuts and XLA compete), ``fusion`` or ``no_fusion``.
        static_argnums, static_argnames, donate_argnums: as for ``jax.jit``.
        workspace_limit: bytes of workspace per convolution, or None.  total_workspace: bytes of all workspaces that are
            live at once, or None.  With either, convolutions on a GPU may run by cuDNN in pieces of the batch
            (docs/microbatch.md); ``mixed`` keeps XLA's own where that is measured to be faster.
        convolution_accuracy: their float32 algorithms: ``exact`` ones, within 1e-4 of the most exact one, or whatever
            cuDNN computes in float32 (``vendor``), Winograd's with 5x5 windows (off by 1e-3) included.
        microbatch_policy: sizes of pieces: ``all``, ``powerOfTwo``, ``undivided`` (default: docs/microbatch.md).
        tune: ``auto`` measures at the first concrete top-level call of each signature, on a CPU after some seconds
            (``JCUTS_FIRST_CALL_SECONDS``) beside those that follow; ``online`` starts with XLA's program, measures
            between calls, for at most ``JCUTS_ONLINE_SHARE`` of the time, then switches (docs/tuning.md); ``serve``
            without any waiting (docs/serving.md); ``cached`` uses earlier choices only, ``off`` the estimator alone.
        tune_seconds: wall time that tuning may take at a first call, beyond ``jax.jit``'s own first call [s]; None:
            what ``JCUTS_TUNE_SECONDS`` says (60).  It goes where the most is expected; a later process,
            or ``.tune()``, goes on where it ended.  ``math.inf``: no limit; 0: nothing is measured.
        tolerance: allowed error as a multiple of XLA's own error against float64.
        strict: raise ``UnsupportedError`` instead of leaving an equation to XLA that no kernel covers (one with too
            little work for a kernel of its own is left to XLA all the same).
        chunk_logits: True computes logits that feed a softmax loss, and their gradient, in chunks of tokens, False
            never; None where they would take much of a device's memory, or where it wins (docs/cross_entropy.md).
        require: ``complete`` measures nothing, and raises ``IncompleteTuning`` where something was not measured that a
            call needs; the error lists it (docs/tuning.md, "Results that travel").
        batch_buckets: batch sizes at which all batches run, padded or in pieces: for a function each of whose results
            has a row for each row of the batch that depends on that row alone (docs/serving.md; only shapes are
            checked).  batch_argnums: the arguments whose arrays have the batch as leading dimension.

    Like ``jax.jit``, it gives the same ``Optimized`` for a function object and options that it has seen.  Bound
    methods, callable objects, and functions that are defined anew each time are new functions.

    Returns: an ``Optimized``, with ``batch_buckets`` a ``BucketedOptimized``.
    Raises: UsageError for impossible options, NotJaxError if ``fn`` cannot be a JAX function.
    """
    _warn_of_misspelt_variables()
    settings = Settings(
        mode=mode,
        tune=tune,
        tune_seconds=tune_seconds,
        tolerance=tolerance,
        workspace_limit=workspace_limit,
        total_workspace=total_workspace,
        convolution_accuracy=convolution_accuracy,
        microbatch_policy=microbatch_policy,
        strict=strict,
        chunk_logits=chunk_logits,
        require=require,
    )
    names = static_argnames if static_argnames is None or isinstance(static_argnames, str) else tuple(static_argnames)
    options = {"static_argnums": static_argnums, "static_argnames": names, "donate_argnums": donate_argnums}
    buckets = None if batch_buckets is None else BatchBuckets.of(batch_buckets, batch_argnums, donate_argnums)

    def wrap(target: Callable[..., Any]) -> Any:
        _check_function(target)
        made = _cached_optimized(target, settings, options)
        return made if buckets is None else BucketedOptimized(made, buckets)

    return wrap if fn is _NOT_GIVEN else wrap(fn)


_MADE = "__jcuts_optimized__"
_making = threading.Lock()


class _OptimizedRegistry:
    """The ``Optimized`` objects of one function, kept in its ``__dict__``: they live exactly as long as it does.

    They refer to the function and it to them, a cycle that Python's collector frees; a table of weak references could
    not do that.  ``owner`` tells the function from another to which ``functools.wraps`` copied the attribute.
    """

    def __init__(self, owner: Callable[..., Any] | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.by_options: dict[Any, Optimized] = {}

    def __reduce__(self) -> Any:
        return _OptimizedRegistry, ()  # a function that is pickled by value leaves its programs behind


def _cached_optimized(fn: Callable[..., Any], settings: Settings, options: dict[str, Any]) -> Optimized:
    """The ``Optimized`` of this very function with these options, made now if there is none."""
    # Callable objects decide themselves what is equal, and a bound method is a new object each time it is looked up.
    if not isinstance(fn, types.FunctionType):
        return Optimized(fn, settings, options)
    # A wrapper made under other knobs or with another store decides anew.
    surroundings = knobs.current(), default_stores(), jaxapi.jit_disabled(), jaxapi.x64_enabled()
    key = keys.wrapper(settings, options, surroundings)
    with _making:
        made = fn.__dict__.get(_MADE)
        if not isinstance(made, _OptimizedRegistry) or made.owner is None or made.owner() is not fn:
            made = fn.__dict__[_MADE] = _OptimizedRegistry(fn)
        if key not in made.by_options:
            made.by_options[key] = Optimized(fn, settings, options)
        return made.by_options[key]


def _warn_of_misspelt_variables() -> None:
    for name in knobs.unknown_variables():
        if name not in _told:
            _told.add(name)
            close = difflib.get_close_matches(name, knobs.variables(), 1)
            hint = f": did you mean {close[0]}?" if close else " (jcuts doctor lists those that there are)"
            log.warning("the environment variable %s means nothing to jcuts%s", name, hint)


_told: set[str] = set()


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise NotJaxError(
            f"optimize needs a function, not an object of type {type(fn).__name__}: decorate a function, "
            "or call optimize(mode=...) with keywords only",
            value=fn,
        )
    call = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    for kind, test in (
        ("coroutine", inspect.iscoroutinefunction),
        ("generator", inspect.isgeneratorfunction),
        ("asynchronous generator", inspect.isasyncgenfunction),
    ):
        if test(fn) or test(call):
            raise NotJaxError(
                f"{function_name(fn)} is a {kind} function: JAX traces functions that return arrays",
                function=function_name(fn),
                kind=kind,
            )

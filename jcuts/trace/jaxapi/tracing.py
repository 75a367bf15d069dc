"""Tracing a Python function to a closed jaxpr (`jax.make_jaxpr`'s inside), and the state of the tracer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src.interpreters import partial_eval as _pe

from jcuts.trace.jaxapi.jaxprs import make_closed
from jcuts.trace.jaxapi.types import Closed, Eqn

trace_state_clean: Callable[[], bool] = _core.trace_ctx.is_top_level
"""Whether no JAX trace (jit, grad, vmap, ...) surrounds the caller: its arguments are concrete."""


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force."""
    return bool(_config.disable_jit.value)


def clear_fast_dispatch(jitted: Any) -> None:
    """Forgets which calls of a jitted function take the fast path, not what was traced and compiled.

    A call whose trace raised an error takes the slow path ever after, though a later one succeeds.
    """
    if (clear := getattr(jitted, "_clear_cache", None)) is not None:
        clear()


def trace_context() -> Any:
    """All of JAX's configuration that changes how a function is traced on this thread: equal on threads that trace the
    same.
    """
    return _config.trace_context()


def x64_enabled() -> bool:
    """Whether 64-bit types are in force."""
    return bool(_config.enable_x64.value)


def aval_of(x: Any) -> Any:
    """Abstract value (shape, dtype, weak type, sharding) of an array, tracer, scalar or ShapeDtypeStruct."""
    return _core.shaped_abstractify(x)


def is_tracer(x: Any) -> bool:
    """Whether ``x`` is a value inside a trace."""
    return isinstance(x, _core.Tracer)


def new_closed_jaxpr(fn_flat: Callable[..., Sequence[Any]], in_avals: Sequence[Any], *, name: str = "jcuts") -> Closed:
    """Trace ``fn_flat``, a function of flat arrays that returns a flat sequence, at ``in_avals``.

    Values of outer traces over which the function closes end up in ``.consts`` (see ``hoist_tracer_consts``).

    Raises: whatever the function raises while it is traced.
    """
    info = _api_util.debug_info(name, fn_flat, tuple(in_avals), {})
    wrapped = _lu.wrap_init(lambda *xs: list(fn_flat(*xs)), debug_info=info.with_unknown_names())
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, list(in_avals))
    return Closed(jaxpr, consts)


def without_mesh() -> Any:
    """A context in which traced equations record no mesh: such a jaxpr may run inside any ``shard_map``."""
    return _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh)


class Traced(NamedTuple):
    """A function as one closed jaxpr over flat arrays.

    Attributes:
        closed: the jaxpr.  in_tree: structure of ``(args, kwargs)``.  out_tree: structure of the result.
    """

    closed: Closed
    in_tree: Any
    out_tree: Any


def static_positions(fn: Callable[..., Any], argnums: Any, argnames: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names that ``jax.jit`` derives from ``argnums``/``argnames`` (each from the other)."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
        return nums, names
    nums, names = _api_util.infer_argnums_and_argnames(signature, argnums, argnames)
    return tuple(nums), tuple(names)


def trace_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace ``fn(*args, **kwargs)``; every leaf of the arguments is an array-like (or ShapeDtypeStruct)."""
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    out_trees: list[Any] = []

    def flat(*xs: Any) -> Sequence[Any]:
        inner_args, inner_kwargs = jax.tree.unflatten(in_tree, xs)
        outs, out_tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        out_trees.append(out_tree)
        return outs

    flat.__name__ = getattr(fn, "__name__", "function")
    closed = new_closed_jaxpr(flat, [aval_of(leaf) for leaf in leaves], name=flat.__name__)
    return Traced(closed, in_tree, out_trees[-1])


def closed_jaxpr_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Closed:
    """The closed jaxpr of ``fn`` at the shapes of ``args`` (arrays, scalars or ShapeDtypeStructs)."""
    return trace_function(fn, args, kwargs).closed


def call_eqn(fn: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any]) -> Eqn:
    """An equation that calls ``fn`` (a closed call) on the operands' values."""
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    (eqn,) = closed_jaxpr_of(jax.jit(fn), *shapes).jaxpr.eqns
    return eqn.replace(invars=list(operands), outvars=list(results))


def hoist_tracer_consts(closed: Closed) -> tuple[list[Any], Closed]:
    """Turn constants that are tracers (closed-over values of an outer trace) into leading arguments.

    Returns: the tracers, and a closed jaxpr that takes them before its own arguments.  Concrete constants stay.
    """
    moved = [is_tracer(c) for c in closed.consts]
    if not any(moved):
        return [], closed
    jaxpr = closed.jaxpr
    kept_vars = [v for v, m in zip(jaxpr.constvars, moved, strict=False) if not m]
    moved_vars = [v for v, m in zip(jaxpr.constvars, moved, strict=False) if m]
    kept = [c for c, m in zip(closed.consts, moved, strict=False) if not m]
    tracers = [c for c, m in zip(closed.consts, moved, strict=False) if m]
    new = make_closed(kept_vars, [*moved_vars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, kept, like=closed)
    return tracers, new

"""Traces a user's function on example arguments to a closed jaxpr, with pytree structures and the data arguments.

Static arguments (those that the user named in ``static_argnums``/``static_argnames``) stay Python values and are
closed over; the leaves of the others are the jaxpr's arguments, in tree order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jcuts.base.errors import NotJaxError
from jcuts.trace import jaxapi


@dataclass(frozen=True)
class Capture:
    """A function traced at one signature.

    Attributes:
        closed: the jaxpr over flat dynamic leaves; closed-over values of an outer trace are its ``consts``.
        leaves: the dynamic leaves it was traced at, in order.
        out_tree: structure of the result.
        name: the function's name.
    """

    closed: jaxapi.Closed
    leaves: list[Any]
    out_tree: Any
    name: str


def function_name(fn: Callable[..., Any]) -> str:
    """A readable name, also for partials and callable objects."""
    while hasattr(fn, "func") and not hasattr(fn, "__name__"):
        fn = fn.func  # type: ignore[attr-defined]
    return getattr(fn, "__name__", None) or type(fn).__name__


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_data: Callable[[Any], bool] = jaxapi.is_tracer,
) -> Capture:
    """Trace ``fn(*args, **kwargs)``.

    Args:
        is_data: which leaves become arguments of the jaxpr; the rest are closed over unchanged.  By default those
            that are tracers: ``capture`` then runs inside ``jax.jit``, which has made tracers of all dynamic leaves.

    Raises: NotJaxError if the function returns something that is not an array; JAX's own errors pass through.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    data = [is_data(leaf) for leaf in leaves]
    dynamic = [leaf for leaf, d in zip(leaves, data, strict=False) if d]
    out_trees: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        it = iter(xs)
        inner_args, inner_kwargs = jax.tree.unflatten(
            tree, [next(it) if d else leaf for leaf, d in zip(leaves, data, strict=False)]
        )
        outs, out_tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        for out in outs:
            _check_output(out, fn)
        out_trees.append(out_tree)
        return outs

    name = function_name(fn)
    flat.__name__ = flat.__qualname__ = name
    closed = jaxapi.new_closed_jaxpr(flat, [jaxapi.aval_of(leaf) for leaf in dynamic], name=name)
    return Capture(closed, dynamic, out_trees[-1], name)


def _check_output(out: Any, fn: Callable[..., Any]) -> None:
    try:
        jaxapi.aval_of(out)
    except TypeError as error:
        raise NotJaxError(
            f"{function_name(fn)} returned a value of type {type(out).__name__}, which JAX cannot trace: return "
            "arrays, numbers, or pytrees of them",
            function=function_name(fn),
            type=type(out).__name__,
        ) from error

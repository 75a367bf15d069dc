"""Rules of ``jcuts_call_p`` for ``jax.experimental.jet`` (Taylor mode) and ``jax.experimental.sparse.sparsify``.

Both transform the original jaxpr through JAX's own interpreters, and the result is one call of the primitive again.
Importing ``jax.experimental.sparse`` takes a good part of a second, so its rule is installed only once the user has
imported it, when an optimised function is called or traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import jet as _jet

from jcuts.trace import jaxapi

Bind = Callable[..., Sequence[Any]]

_SPARSE = "jax.experimental.sparse.transform"


def register_jet(primitive: jaxapi.Primitive, bind: Bind) -> None:
    """Install the Taylor-mode rule; ``bind(*args, jaxpr=..., **params)`` makes the derived call."""

    def rule(primals: Sequence[Any], series: Sequence[Any], *, jaxpr: jaxapi.Closed, **params: Any) -> Any:
        leaves, tree = jax.tree.flatten((list(primals), [list(terms) for terms in series]))
        derived, out_tree = _jet_of(jaxpr, tree, tuple(jaxapi.aval_of(x) for x in leaves))
        return jax.tree.unflatten(out_tree, bind(*leaves, jaxpr=derived, **params))

    _jet.jet_rules[primitive] = rule


@jaxapi.cached_by_jaxpr
def _jet_of(closed: jaxapi.Closed, tree: Any, avals: tuple[Any, ...]) -> tuple[jaxapi.Closed, Any]:
    # Inside the rule coefficients are not scaled by factorials: jet does that at its border.
    def expand(primals: list[Any], series: list[Any]) -> Any:
        return _jet.jet(lambda *xs: jaxapi.eval_closed(closed, *xs), primals, series, factorial_scaled=False)

    return _flat(expand, tree, avals)


def register_sparsify(primitive: jaxapi.Primitive, bind: Bind) -> None:
    """Install the rule for sparse operands if ``jax.experimental.sparse`` was imported by now."""
    transform = sys.modules.get(_SPARSE)
    tables = [getattr(transform, name, None) for name in ("sparse_rules_bcoo", "sparse_rules_bcsr")]
    missing = [table for table in tables if table is not None and primitive not in table]
    if transform is None or not missing:
        return
    sparse: Any = transform

    def rule(env: Any, *values: Any, jaxpr: jaxapi.Closed, **params: Any) -> Any:
        leaves, tree = jax.tree.flatten(list(sparse.spvalues_to_arrays(env, values)))
        avals = tuple(jaxapi.aval_of(x) for x in leaves)
        # Not kept: the structure of a sparse matrix is not hashable.
        derived, out_tree = _flat(sparse.sparsify(lambda *xs: jaxapi.eval_closed(jaxpr, *xs)), tree, avals)
        outs = jax.tree.unflatten(out_tree, bind(*leaves, jaxpr=derived, **params))
        return sparse.arrays_to_spvalues(env, outs)

    for table in missing:
        table[primitive] = rule


def _flat(fn: Callable[..., Any], tree: Any, avals: Sequence[Any]) -> tuple[jaxapi.Closed, Any]:
    """The jaxpr of ``fn(*unflattened arguments)`` over flat arrays, and the structure of its result."""
    trees: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        leaves, out_tree = jax.tree.flatten(fn(*jax.tree.unflatten(tree, xs)))
        trees.append(out_tree)
        return leaves

    return jaxapi.new_closed_jaxpr(flat, avals, name=getattr(fn, "__name__", "function")), trees[-1]

"""Exchanges the operands of matrix products whose results are transposed so that the first one's columns come last.

    transpose(dot(w, x))      becomes      dot(x, w), transposed less or not at all

`jnp.einsum("bsd,dhe->bhse", x, w)` is the product of w and x, of shape (h, e, b, s), transposed; the gradient of a
weight is that of the result's gradient and x, transposed.  Exchanged, results have neighbours in memory that are
neighbours where they are read or written.  XLA exchanges the latter, too (`AlgebraicSimplifier`).  A product that the
program has in the other order as well stays: it is a copy to be recomputed, which CSE would merge with that one
(`rewrite.attention.backward`).
"""

from __future__ import annotations

from typing import Any

from jcuts.trace import jaxapi
from jcuts.trace.equation_index import EquationIndex

DOT = "dot_general"
TRANSPOSE = "transpose"


def exchange_products(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Exchanges the operands of products that transposes alone read."""
    index = EquationIndex(closed)
    moved: dict[Any, tuple[Any, tuple[int, ...]]] = {}
    new: list[Any] = []
    present = {_identity(eqn) for eqn in index.eqns if jaxapi.primitive_name(eqn) == DOT}
    for eqn in index.eqns:
        readers = index.using(eqn.outvars[0]) if jaxapi.primitive_name(eqn) == DOT else []
        places = _exchanged_places(eqn, readers)
        if places and eqn.outvars[0] not in index.results and _identity(eqn, exchanged=True) not in present:
            old, eqn = eqn.outvars[0], _exchanged(eqn, places)
            if len(readers) == 1 and [places[d] for d in readers[0].params["permutation"]] == sorted(places):
                eqn = eqn.replace(outvars=readers[0].outvars)
            moved[old] = eqn.outvars[0], places
        elif jaxapi.primitive_name(eqn) == TRANSPOSE and eqn.invars[0] in moved:
            value, places = moved[eqn.invars[0]]
            if value is eqn.outvars[0]:
                continue  # it is the product itself
            permutation = tuple(places[d] for d in eqn.params["permutation"])
            eqn = eqn.replace(invars=[value], params={**eqn.params, "permutation": permutation})
        new.append(eqn)
    return jaxapi.with_eqns(closed, new) if moved else closed


def _identity(eqn: Any, *, exchanged: bool = False) -> tuple[Any, ...]:
    """Operands and dimensions of a product, whatever its precision."""
    step = -1 if exchanged else 1
    contracted, batch = eqn.params["dimension_numbers"]
    return tuple(map(id, eqn.invars[::step])), tuple(contracted[::step]), tuple(batch[::step])


def _exchanged_places(eqn: Any, users: list[Any]) -> tuple[int, ...]:
    """The dimension that each dimension of a product's result is after an exchange; () where that does not pay."""
    if not users or eqn.params.get("out_sharding") is not None:
        return ()
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.ndim - len(contracted) - len(batch)
    first, count = len(batch), eqn.outvars[0].aval.ndim
    right = count - first - left
    wanted = all(
        jaxapi.primitive_name(user) == TRANSPOSE and user.params["permutation"][-1] == first + left - 1
        for user in users
    )
    if not (left and right and users and wanted):
        return ()
    return (*range(first), *range(first + right, count), *range(first, first + right))


def _exchanged(eqn: Any, places: tuple[int, ...]) -> Any:
    """A product with its operands exchanged."""
    (contracted, batch), result = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    shape = [0] * result.ndim
    for place, size in zip(places, result.shape, strict=True):
        shape[place] = size
    precision = eqn.params["precision"]
    params = {
        **eqn.params,
        "dimension_numbers": (tuple(contracted[::-1]), tuple(batch[::-1])),
        "precision": tuple(precision[::-1]) if isinstance(precision, tuple) else precision,
    }
    return eqn.replace(
        invars=eqn.invars[::-1], outvars=[jaxapi.new_var(result.update(shape=tuple(shape)))], params=params
    )

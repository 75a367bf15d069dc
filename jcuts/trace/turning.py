"""Weights that are arguments as matrix units take them: joined, along terms and rounded to TF32, once per call.

    x . w  ->  x . v^T,    v = round(w^T)       conv(x, w)  ->  conv(x, v),  v = round(w) as (O, H, W, I)
    x . w1 + b1, x . w2 + b2  ->  parts of x . [w1 w2] + [b1 b2]

`rounding` does this ahead of time to constants.  An argument is turned and rounded in every call, which moves its bytes
twice; kernels of rounded weights gain more where there are many rows for each weight.  What such a product computes
does not change: the libraries round both operands to TF32 themselves.  A rounded value is the result of a
``reduce_precision`` to TF32, which `rounding.rounded_values` finds again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.products import DOT, Program, new_value
from jcuts.trace.rounding import TF32, Order, order_of, turned
from jcuts.trace.siblings import MOST, slices

THROUGH = ("reshape", "squeeze", "slice", "transpose", "copy", "concatenate")
"""Equations that only move what they are given: a layer's weights out of those of all layers."""
LEAST_ROWS = 256
"""Rows of a product for each of its weights from which on rounding them may be worth its bytes."""


def turns(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Joins, turns and rounds weights that are arguments; gives the program and how many were rounded."""
    given = _given(closed)
    if not any(_weights(eqn, given) for eqn in closed.jaxpr.eqns):
        return closed, 0
    closed = _joined(closed, given)
    given = _given(closed)
    program, made = Program(closed), dict[tuple[Any, Order], Any]()
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = _weights(eqn, given)
        if order is None:
            continue
        key, before = (eqn.invars[1], order), []
        if key not in made:
            made[key], before = _rounded(eqn, order)
        replaced[id(eqn)] = [*before, turned(eqn, made[key], order)]
    return program.with_eqns(replaced), len(made)


def _given(closed: jaxapi.Closed) -> set[Any]:
    """Arguments, and what only parts or rearrangements of them are."""
    found = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in THROUGH and all(not jaxapi.is_literal(a) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def _weights(eqn: Any, given: set[Any]) -> Order | None:
    """The order of a product's weights along terms, where they are to be rounded."""
    order = order_of(eqn)
    if order is None or jaxapi.is_literal(eqn.invars[1]) or eqn.invars[1] not in given:
        return None
    rows = eqn.outvars[0].aval.size // eqn.invars[1].aval.shape[order[0]]
    return order if rows >= LEAST_ROWS else None


def _rounded(eqn: Any, order: Order) -> tuple[Any, list[Any]]:
    """The weights of a product in this order and rounded, and the equations that make them."""
    weights, eqns = eqn.invars[1], []
    if order != tuple(range(len(order))):
        shape = [weights.aval.shape[d] for d in order]
        there = new_value(shape, weights.aval)
        eqns.append(jaxapi.new_eqn([weights], [there], jax.lax.transpose_p, {"permutation": order}, like=eqn))
        weights = there
    found = new_value(weights.aval.shape, weights.aval)
    eqns.append(jaxapi.new_eqn([weights], [found], jax.lax.reduce_precision_p, dict(TF32), like=eqn))
    return found, eqns


# -- products of one operand ----------------------------------------------------------------------------------------
def _joined(closed: jaxapi.Closed, given: set[Any]) -> jaxapi.Closed:
    """Matrix products of one operand with several arguments as one product, with the biases behind them."""
    groups: dict[Any, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = _weights(eqn, given)
        if order is None or len(order) != 2 or jaxapi.primitive_name(eqn) != DOT or jaxapi.is_literal(eqn.invars[0]):
            continue
        key = (eqn.invars[0], order, eqn.invars[1].aval.shape[order[1]], str(sorted(eqn.params.items(), key=str)))
        groups.setdefault(key, []).append((eqn, order))
    joined = [group[:MOST] for group in groups.values() if len(group) > 1]
    if not joined:
        return closed
    program, replaced = Program(closed), dict[int, list[Any]]()
    readers = {a: e for e in closed.jaxpr.eqns for a in e.invars if not jaxapi.is_literal(a)}
    for group in joined:
        eqns, gone = _one([eqn for eqn, _ in group], group[0][1], program, readers, given)
        replaced.update((id(eqn), []) for eqn in gone)
        replaced[id(group[0][0])] = eqns
    return program.with_eqns(replaced)


def _one(
    group: Sequence[Any], order: Order, program: Program, readers: dict[Any, Any], given: set[Any]
) -> tuple[list[Any], list[Any]]:
    """The product of several, their biases, and the parts of the result; and the equations that these replace."""
    first, gone = group[0], list(group)
    widths = [eqn.invars[1].aval.shape[order[0]] for eqn in group]
    weights, eqns = _concatenated([eqn.invars[1] for eqn in group], order[0], first)
    parts = [eqn.outvars[0] for eqn in group]
    shape = (*parts[0].aval.shape[:-1], sum(widths))
    whole = new_value(shape, parts[0].aval)
    eqns = [*eqns, first.replace(invars=[first.invars[0], weights], outvars=[whole])]
    biases = [_bias(part, program, readers, given) for part in parts]
    if all(biases):
        vector, more = _concatenated([bias for bias, _ in biases], 0, first)  # type: ignore[misc]
        ends = [end for _, end in biases]  # type: ignore[misc]
        wide, total = new_value((*[1] * (len(shape) - 1), shape[-1]), parts[0].aval), new_value(shape, parts[0].aval)
        params = {"shape": wide.aval.shape, "broadcast_dimensions": (len(shape) - 1,), "sharding": None}
        more.append(jaxapi.new_eqn([vector], [wide], jax.lax.broadcast_in_dim_p, params, like=first))
        eqns += [*more, ends[0].replace(invars=[whole, wide], outvars=[total])]
        gone += ends
        whole, parts = total, [end.outvars[0] for end in ends]
    return [*eqns, *slices(whole, parts, len(shape) - 1, widths, first)], gone


def _bias(part: Any, program: Program, readers: dict[Any, Any], given: set[Any]) -> tuple[Any, Any] | None:
    """The argument that is added to all rows of a product, and the addition."""
    end = readers.get(part) if program.uses[part] == 1 else None
    if end is None or jaxapi.primitive_name(end) != "add" or end.outvars[0].aval.shape != part.aval.shape:
        return None
    other = end.invars[1] if end.invars[0] is part else end.invars[0]
    made = None if jaxapi.is_literal(other) else program.made.get(other)
    if made is None or jaxapi.primitive_name(made) != "broadcast_in_dim" or jaxapi.is_literal(made.invars[0]):
        return None
    vector, last = made.invars[0], part.aval.ndim - 1
    plain = tuple(made.params["broadcast_dimensions"]) == (last,) and vector.aval.shape == part.aval.shape[-1:]
    plain = plain and other.aval.ndim == part.aval.ndim and other.aval.shape[-1] == part.aval.shape[-1]
    known = vector in given or vector in program.consts
    return (vector, end) if plain and known and vector.aval.dtype == part.aval.dtype else None


def _concatenated(parts: Iterable[Any], dimension: int, like: Any) -> tuple[Any, list[Any]]:
    """Values side by side, and the equation that makes them so."""
    parts = list(parts)
    shape = list(parts[0].aval.shape)
    shape[dimension] = sum(part.aval.shape[dimension] for part in parts)
    whole = new_value(shape, parts[0].aval)
    params = {"dimension": dimension}
    return whole, [jaxapi.new_eqn(parts, [whole], jax.lax.concatenate_p, params, like=like)]


"""Horizontal fusion of matmuls whose weights are arguments: the weights are concatenated in the program, in every call.

    x . w1 + b1, x . w2 + b2  ->  slices of x . [w1 w2] + [b1 b2]

`horizontal_matmul` does this ahead of time with constants.  Arguments are concatenated in every call, which costs
nothing more where `tf32_weight_args` copies them anyway: only weights that it transposes are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jcuts.rewrite.horizontal_matmul import MOST, slices
from jcuts.rewrite.matmul_patterns import DOT, Program, new_value
from jcuts.rewrite.tf32_weight_args import moved_arguments, order_of_argument
from jcuts.rewrite.tf32_weights import Order
from jcuts.trace import jaxapi


def horizontal_matmul_args(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Fuses matmuls of one operand with argument weights; returns the program and the number of matmuls that were
    fused.
    """
    given = moved_arguments(closed)
    groups: dict[Any, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = order_of_argument(eqn, given)
        if order is None or len(order) != 2 or jaxapi.primitive_name(eqn) != DOT or jaxapi.is_literal(eqn.invars[0]):
            continue
        key = (eqn.invars[0], order, eqn.invars[1].aval.shape[order[1]], str(sorted(eqn.params.items(), key=str)))
        groups.setdefault(key, []).append((eqn, order))
    joined = [group[:MOST] for group in groups.values() if len(group) > 1]
    if not joined:
        return closed, 0
    # The joined product stands where its first part stood: weights that are moved come before everything else.
    closed = jaxapi.with_eqns(closed, sorted(closed.jaxpr.eqns, key=lambda e: e.outvars[0] not in given))
    program, replaced = Program(closed), dict[int, list[Any]]()
    readers = {a: e for e in closed.jaxpr.eqns for a in e.invars if not jaxapi.is_literal(a)}
    for group in joined:
        eqns, gone = _one([eqn for eqn, _ in group], group[0][1], program, readers, given)
        replaced.update((id(eqn), []) for eqn in gone)
        replaced[id(group[0][0])] = eqns
    return program.with_eqns(replaced), sum(map(len, joined))


def _one(
    group: Sequence[Any], order: Order, program: Program, readers: dict[Any, Any], given: frozenset[Any]
) -> tuple[list[Any], list[Any]]:
    """The fused matmul, its biases, and the slices of the result; and the equations that these replace."""
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


def _bias(part: Any, program: Program, readers: dict[Any, Any], given: frozenset[Any]) -> tuple[Any, Any] | None:
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
    """The concatenation of values, and its equation."""
    parts = list(parts)
    shape = list(parts[0].aval.shape)
    shape[dimension] = sum(part.aval.shape[dimension] for part in parts)
    whole = new_value(shape, parts[0].aval)
    params = {"dimension": dimension}
    return whole, [jaxapi.new_eqn(parts, [whole], jax.lax.concatenate_p, params, like=like)]

"""Weights that are arguments, as a GPU's matrix units take them: rounded and turned in every call, all by one equation.

    v1, v2, ... = weights(w1, w2, ...)         vk = wk along terms, rounded to TF32 (as `trace.rounding` has constants)
    x . wk  ->  x . vk^T

Whoever passes parameters has to have them rounded again in every call: a pass over the weights, and kernels for the
products that take them as they are (`rounds`).  That pays where a product's operand and result are far larger than its
weights, so nothing else is turned.  Weights are arguments, possibly moved on the way: reshaped, one layer's out of
those of all, several side by side (`trace.joining`).  The equation is a call of a function of its own at the beginning
of the program, which no kernel takes apart.
"""

from __future__ import annotations

from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.products import Program, new_value
from jcuts.trace.rounding import Order, is_large, order_of, rounded_constants, turned

MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "slice", "concatenate", "copy")
ROUNDING, EXPONENT_BITS, MANTISSA_BITS = "reduce_precision", 8, 10
CALLS = ("jit", "pjit")
SHARE = 4
"""A product's operand and result together have at least that many times as many numbers as its weights."""


def turns(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rounds and turns the arguments that are weights of large products; gives the program and how many products."""
    program, given = Program(closed), moved_arguments(closed)
    made: dict[tuple[Any, Order], Any] = {}
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = order_of_argument(eqn, given)
        if order is None:
            continue
        weights = eqn.invars[1]
        if (weights, order) not in made:
            made[weights, order] = new_value([weights.aval.shape[d] for d in order], weights.aval)
        replaced[id(eqn)] = [turned(eqn, made[weights, order], order)]
    if not replaced:
        return closed, 0
    new = program.with_eqns(replaced)
    return jaxapi.with_eqns(new, [_call(closed, made), *new.jaxpr.eqns]), len(replaced)


def moved_arguments(closed: jaxapi.Closed) -> frozenset[Any]:
    """Arguments, and what is only parts or rearrangements of them."""
    found = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in MOVES and all(not jaxapi.is_literal(a) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return frozenset(found)


def order_of_argument(eqn: Any, given: frozenset[Any]) -> Order | None:
    """The order of a product's weights along terms, where rounding them in every call pays.

    Args: given: what `moved_arguments` found.
    """
    order = order_of(eqn)
    if order is None or jaxapi.is_literal(eqn.invars[1]) or eqn.invars[1] not in given:
        return None
    return order if is_large(eqn, order) and _pays(eqn) else None


def rounded_operands(closed: jaxapi.Closed) -> frozenset[Any]:
    """The values that are weights of large products, lie along terms, and hold TF32 numbers only.

    Constants of which that is known, and what a call rounds before it gives it back.
    """
    rounded = set()
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CALLS:
            rounded.update(_rounded_results(eqn))
    used = {
        eqn.invars[1] for eqn in closed.jaxpr.eqns
        if (order := order_of(eqn)) is not None and order == tuple(range(len(order)))
        and not jaxapi.is_literal(eqn.invars[1]) and is_large(eqn, order)
    }  # fmt: skip
    return rounded_constants(closed) | (rounded & used)


def _pays(eqn: Any) -> bool:
    operand, weights = (v.aval.size for v in eqn.invars)
    return SHARE * weights <= operand + eqn.outvars[0].aval.size


def _call(closed: jaxapi.Closed, made: dict[tuple[Any, Order], Any]) -> Any:
    """The equation that makes all weights. Args: made: (weights, order) -> the new value."""
    by = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    needed: dict[int, Any] = {}
    stack = [weights for weights, _ in made]
    while stack:
        eqn = by.get(stack.pop())
        if eqn is not None and id(eqn) not in needed:
            needed[id(eqn)] = eqn
            stack += eqn.invars
    moves = [eqn for eqn in closed.jaxpr.eqns if id(eqn) in needed]
    read = [*(weights for weights, _ in made), *(a for eqn in moves for a in eqn.invars)]
    arguments = list(dict.fromkeys(a for a in read if a not in by))

    def weights(*values: Any) -> list[Any]:
        known = dict(zip(arguments, values, strict=True))
        for eqn in moves:
            (known[eqn.outvars[0]],) = jaxapi.bind_eqn(eqn, [known[a] for a in eqn.invars])
        found = []
        for atom, order in made:
            value = known[atom] if order == tuple(range(len(order))) else jax.lax.transpose(known[atom], order)
            found.append(jax.lax.reduce_precision(value, EXPONENT_BITS, MANTISSA_BITS))
        return found

    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in arguments]
    (eqn,) = jaxapi.closed_jaxpr_of(jax.jit(weights), *shapes).jaxpr.eqns
    return eqn.replace(invars=arguments, outvars=list(made.values()))


def _rounded_results(call: Any) -> list[Any]:
    """The results of a call that it rounds to TF32 in the end."""
    bodies = jaxapi.inner_jaxprs(call)
    if len(bodies) != 1 or len(bodies[0][2].jaxpr.outvars) != len(call.outvars):
        return []
    jaxpr = bodies[0][2].jaxpr
    rounded = {
        eqn.outvars[0] for eqn in jaxpr.eqns
        if jaxapi.primitive_name(eqn) == ROUNDING and str(eqn.outvars[0].aval.dtype) == "float32"
        and eqn.params["exponent_bits"] <= EXPONENT_BITS and eqn.params["mantissa_bits"] <= MANTISSA_BITS
    }  # fmt: skip
    pairs = zip(jaxpr.outvars, call.outvars, strict=True)
    return [outer for inner, outer in pairs if not jaxapi.is_literal(inner) and inner in rounded]

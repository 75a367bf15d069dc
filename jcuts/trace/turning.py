"""Weights that are arguments, as a GPU's matrix units take them: rounded and turned in every call, all by one equation.

    v1, v2, ... = weights(w1, w2, ...)         vk = wk along terms, rounded to TF32 (as `trace.rounding` has constants)
    x . wk  ->  x . vk^T

Whoever passes parameters has to have them rounded again in every call: a pass over the weights, and kernels for the
products that take them as they are (`rounds`).  That pays where a product's operand and result are far larger than its
weights, so nothing else is turned.  Weights are arguments, possibly reshaped on the way; the equation is a call of a
function of its own at the beginning of the program, which no kernel takes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi
from jcuts.trace.products import Program
from jcuts.trace.rounding import Order, is_large, order_of, rounded_constants, turned

LAYOUTS = ("reshape", "squeeze", "expand_dims", "transpose")
ROUNDING, EXPONENT_BITS, MANTISSA_BITS = "reduce_precision", 8, 10
CALLS = ("jit", "pjit")
SHARE = 4
"""A product's operand and result together have at least that many times as many numbers as its weights."""

_Source = tuple[Any, tuple[Any, ...], Order]
"""An argument, the equations that reshape it, and the order of dimensions behind them."""


def turns(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rounds and turns the arguments that are weights of large products; gives the program and how many products."""
    program = Program(closed)
    arguments = set(closed.jaxpr.invars)
    sources: dict[Any, _Source] = {}
    made: dict[Any, Any] = {}
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        order = order_of(eqn)
        if order is None or not is_large(eqn, order) or not _pays(eqn):
            continue
        chain = _chain(eqn.invars[1], program, arguments)
        if chain is None:
            continue
        key = (chain[0], tuple(map(id, chain[1])), order)
        if key not in made:
            sources[key] = (*chain, order)
            weights = eqn.invars[1].aval
            made[key] = jaxapi.new_var(jaxapi.ShapedArray(tuple(weights.shape[d] for d in order), weights.dtype))
        replaced[id(eqn)] = [turned(eqn, made[key], order)]
    if not replaced:
        return closed, 0
    call = _call(list(sources.values()), [made[key] for key in sources])
    new = program.with_eqns(replaced)
    return jaxapi.with_eqns(new, [call, *new.jaxpr.eqns]), len(replaced)


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


def _chain(atom: Any, program: Program, arguments: set[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The argument that a value is, and the equations that give it other dimensions; None for other values."""
    chain: list[Any] = []
    while not jaxapi.is_literal(atom) and atom not in arguments:
        eqn = program.made.get(atom)
        if eqn is None or jaxapi.primitive_name(eqn) not in LAYOUTS:
            return None
        chain.insert(0, eqn)
        atom = eqn.invars[0]
    return None if jaxapi.is_literal(atom) else (atom, tuple(chain))


def _call(sources: Sequence[_Source], results: Sequence[Any]) -> Any:
    """The equation that makes all weights."""

    def weights(*arguments: Any) -> list[Any]:
        found = []
        for value, (_, chain, order) in zip(arguments, sources, strict=True):
            for eqn in chain:
                (value,) = jaxapi.bind_eqn(eqn, [value])
            value = value if order == tuple(range(len(order))) else jax.lax.transpose(value, order)
            found.append(jax.lax.reduce_precision(value, EXPONENT_BITS, MANTISSA_BITS))
        return found

    arguments = [atom for atom, _, _ in sources]
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in arguments]
    (eqn,) = jaxapi.closed_jaxpr_of(jax.jit(weights), *shapes).jaxpr.eqns
    return eqn.replace(invars=arguments, outvars=list(results))


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

"""Transposes and TF32-rounds weight arguments once per call, in one fused kernel, for ``wgmma`` GEMMs.

    v1, v2, ... = weights(w1, w2, ...)         vk = wk K-major, rounded to TF32 (as `tf32_weights` has constants)
    x . wk  ->  x . vk^T

Weights that are arguments must be rounded in every call: one pass over them, after which the matmuls use the kernels
for pre-rounded weights (`rounds`).  That pays where a matmul's operand and result are far larger than its weights, or
the weights are small; nothing else is transposed.  Weights are arguments, possibly moved on the way: reshaped, one
layer's out of those of all, several concatenated (`horizontal_matmul_args`).  The equations are calls of a function of
their own at the beginning of the program, which no region may cut.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jcuts.rewrite.matmul_patterns import CONVOLUTION, Program, new_value
from jcuts.rewrite.tf32_weights import LEAST_POINTS, Order, order_of, rounded_constants, turned
from jcuts.trace import jaxapi

MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "slice", "concatenate", "copy")
RESHAPES = MOVES[:3]
ROUNDING = "reduce_precision"
EXPONENT_BITS = 8
"""Of TF32."""
MANTISSA_BITS = 10
"""Of TF32."""
CALLS = ("jit", "pjit")
SHARE = 4
"""A product's operand and result together have at least that many times as many numbers as its weights."""
FEW = 1 << 20
"""Or its weights are so few that a pass over them takes no longer than what a launch costs.  Filters of few outputs
count by `SHARE` alone: a pass over those is as long as their convolution."""

MOST = 120
"""Weights of one call: as many as a kernel has parameters for (`lower.weight_transpose`)."""


def tf32_weight_args(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rounds and transposes the arguments that are weights of large matmuls; returns the program and the number of
    matmuls.
    """
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
    return jaxapi.with_eqns(new, [*_calls(closed, made), *new.jaxpr.eqns]), len(replaced)


def moved_arguments(closed: jaxapi.Closed) -> frozenset[Any]:
    """Arguments, and values that are only slices or rearrangements of them."""
    found = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in MOVES and all(not jaxapi.is_literal(a) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return frozenset(found)


def order_of_argument(eqn: Any, given: frozenset[Any]) -> Order | None:
    """The K-major dimension order of a matmul's weights, where rounding them in every call pays.

    Args: given: what `moved_arguments` found.
    """
    order = order_of(eqn)
    if order is None or jaxapi.is_literal(eqn.invars[1]) or eqn.invars[1] not in given:
        return None
    return order if _pays(eqn, order) else None


def rounded_operands(closed: jaxapi.Closed) -> frozenset[Any]:
    """The values that are K-major weights of large matmuls and hold TF32 numbers only.

    Constants of which that is known, and what a call rounds before it gives it back.
    """
    rounded = set()
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CALLS:
            rounded.update(_rounded_results(eqn))
    used = {
        eqn.invars[1]
        for eqn in closed.jaxpr.eqns
        if (order := order_of(eqn)) is not None
        and order == tuple(range(len(order)))
        and not jaxapi.is_literal(eqn.invars[1])
    }
    return rounded_constants(closed) | (rounded & used)


def turned_shapes(call: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Shapes of operands and results of a call that only transposes and rounds all its operands; else None.

    An operand's columns lie side by side, and are the result's first dimension.
    """
    bodies = jaxapi.inner_jaxprs(call) if jaxapi.primitive_name(call) in CALLS else []
    if len(bodies) != 1 or bodies[0][2].consts or set(_rounded_results(call)) != set(call.outvars):
        return None
    jaxpr = bodies[0][2].jaxpr
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    found = []
    for argument, result in zip(jaxpr.invars, jaxpr.outvars, strict=False):
        turn = made.get(made[result].invars[0])
        if turn is None or jaxapi.primitive_name(turn) != "transpose":
            return None
        order, atom = turn.params["permutation"], turn.invars[0]
        while atom in made and jaxapi.primitive_name(made[atom]) in RESHAPES:
            atom = made[atom].invars[0]
        if atom is not argument or tuple(order) != (len(order) - 1, *range(len(order) - 1)):
            return None
        found.append((tuple(argument.aval.shape), tuple(result.aval.shape)))
    return found if len(found) == len(jaxpr.invars) == len(jaxpr.outvars) else None


def _is_turned(order: Order) -> bool:
    return order != tuple(range(len(order)))


def _pays(eqn: Any, order: Order) -> bool:
    operand, weights = (v.aval.size for v in eqn.invars)
    points, taps = eqn.outvars[0].aval.size, math.prod(eqn.invars[1].aval.shape[d] for d in order[1:-1])
    filters = jaxapi.primitive_name(eqn) == CONVOLUTION and taps > 1
    return (weights <= FEW and not (filters and points < LEAST_POINTS)) or SHARE * weights <= operand + points


def _calls(closed: jaxapi.Closed, made: dict[tuple[Any, Order], Any]) -> list[Any]:
    """The equations that prepare all weights: those that one batched-transpose kernel can take, and the rest."""
    by = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    whole: dict[Any, tuple[Any, Order]] = {}
    for key in made:
        argument = key[0]
        while argument in by and jaxapi.primitive_name(by[argument]) in RESHAPES:
            argument = by[argument].invars[0]
        if argument not in by and _is_turned(key[1]):
            whole.setdefault(argument, key)
    alone = list(whole.values())
    groups = [alone[k : k + MOST] for k in range(0, len(alone), MOST)]
    rest = [key for key in made if key not in alone]
    return [_call(closed, {key: made[key] for key in keys}) for keys in (*groups, rest) if keys]


def _call(closed: jaxapi.Closed, made: dict[tuple[Any, Order], Any]) -> Any:
    """The equation that makes all weights. Args: made: (weights, order) -> the new value."""
    by = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    needed: dict[int, Any] = {}
    read: dict[Any, None] = {}  # in the order of the results
    stack = [weights for weights, _ in reversed(made)]
    while stack:
        atom = stack.pop()
        eqn = by.get(atom)
        if eqn is None:
            read.setdefault(atom)
        elif id(eqn) not in needed:
            needed[id(eqn)] = eqn
            stack += reversed(eqn.invars)
    moves = [eqn for eqn in closed.jaxpr.eqns if id(eqn) in needed]
    arguments = list(read)

    def weights(*values: Any) -> list[Any]:
        known = dict(zip(arguments, values, strict=True))
        for eqn in moves:
            (known[eqn.outvars[0]],) = jaxapi.bind_eqn(eqn, [known[a] for a in eqn.invars])
        found = []
        for atom, order in made:
            value = jax.lax.transpose(known[atom], order) if _is_turned(order) else known[atom]
            found.append(jax.lax.reduce_precision(value, EXPONENT_BITS, MANTISSA_BITS))
        return found

    return jaxapi.call_eqn(weights, arguments, list(made.values()))


def _rounded_results(call: Any) -> list[Any]:
    """The results of a call that it rounds to TF32 in the end."""
    bodies = jaxapi.inner_jaxprs(call)
    if len(bodies) != 1 or len(bodies[0][2].jaxpr.outvars) != len(call.outvars):
        return []
    jaxpr = bodies[0][2].jaxpr
    rounded = {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if jaxapi.primitive_name(eqn) == ROUNDING
        and str(eqn.outvars[0].aval.dtype) == "float32"
        and eqn.params["exponent_bits"] <= EXPONENT_BITS
        and eqn.params["mantissa_bits"] <= MANTISSA_BITS
    }
    pairs = zip(jaxpr.outvars, call.outvars, strict=True)
    return [outer for inner, outer in pairs if not jaxapi.is_literal(inner) and inner in rounded]

"""Vectors that depend on vector arguments alone, made by one equation at the beginning of the program.

    y * (g * rsqrt(v + e)) + (b - m * (g * rsqrt(v + e)))  ->  s, t = vectors(g, v, b, m),  y * s + t

A batch norm whose parameters are arguments is two vectors in every call.  Kernels that apply it would compute them
again for every few of their results; like this they read two vectors.  All layers' vectors are results of one call,
behind one barrier, so that XLA finds them side by side and may make many of them in one launch.  Nothing but
element-wise operations on vectors moves, so values stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi

LAYOUTS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
ELEMENTWISE = frozenset({
    "abs", "add", "convert_element_type", "div", "exp", "exp2", "integer_pow", "log", "logistic", "max", "min", "mul",
    "neg", "pow", "rsqrt", "sqrt", "square", "sub", "tanh",
})  # fmt: skip
TYPES = ("float32", "float64", "bfloat16", "float16")
LONGEST = 1 << 16
"""Numbers in the longest of these vectors."""


def vectors(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Moves what is made of vector arguments alone into one call; gives the program and how many results it has."""
    jaxpr = closed.jaxpr
    known = {v for v in (*jaxpr.invars, *jaxpr.constvars) if _is_vector(v)}
    made: dict[Any, Any] = {}
    computed: set[Any] = set()
    for eqn in jaxpr.eqns:
        name = jaxapi.primitive_name(eqn)
        atoms = [a for a in eqn.invars if not jaxapi.is_literal(a)]
        if name in LAYOUTS | ELEMENTWISE and atoms and known.issuperset(atoms) and _is_vector(eqn.outvars[0]):
            known.add(eqn.outvars[0])
            made[eqn.outvars[0]] = eqn
            if name in ELEMENTWISE or not computed.isdisjoint(atoms):
                computed.add(eqn.outvars[0])
    users = [e for e in jaxpr.eqns if e.outvars[0] not in made] if made else []
    results = list(dict.fromkeys(a for e in users for a in e.invars if not jaxapi.is_literal(a) and a in computed))
    needed = _ancestors(results, made)
    read = list(dict.fromkeys(a for e in needed for a in e.invars if not jaxapi.is_literal(a) and a not in made))
    results = [a for a in results if a.aval.size > 1]
    if not results or set(read).isdisjoint(jaxpr.invars):
        return closed, 0
    new = {a: jaxapi.new_var(a.aval) for a in results}
    moved = set(map(id, users))
    eqns = [
        e.replace(invars=[a if jaxapi.is_literal(a) else new.get(a, a) for a in e.invars]) if id(e) in moved else e
        for e in jaxpr.eqns
    ]
    inside = jaxapi.make_closed([], read, results, needed, [], like=closed)
    return jaxapi.with_eqns(closed, [_call(inside, list(new.values())), *eqns]), len(results)


def _is_vector(var: Any) -> bool:
    shape, dtype = getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)
    if shape is None or getattr(dtype, "name", "") not in TYPES:
        return False
    return sum(n != 1 for n in shape) <= 1 and var.aval.size <= LONGEST


def _ancestors(results: Sequence[Any], made: dict[Any, Any]) -> list[Any]:
    """The equations behind some values, in the program's order."""
    found: set[Any] = set()
    stack = list(results)
    while stack:
        var = stack.pop()
        if not jaxapi.is_literal(var) and var in made and var not in found:
            found.add(var)
            stack.extend(made[var].invars)
    return [eqn for var, eqn in made.items() if var in found]


def _call(inside: jaxapi.Closed, results: list[Any]) -> Any:
    """The equation that makes all vectors."""

    def vectors(*operands: Any) -> list[Any]:
        return jax.lax.optimization_barrier(jaxapi.eval_closed(inside, *operands))

    operands = inside.jaxpr.invars
    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    (eqn,) = jaxapi.closed_jaxpr_of(jax.jit(vectors), *shapes).jaxpr.eqns
    return eqn.replace(invars=list(operands), outvars=results)

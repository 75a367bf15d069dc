"""Hoists element-wise operations on vector arguments (batch-norm scales and biases) to the beginning of the program.

    y * (g * rsqrt(v + e)) + (b - m * (g * rsqrt(v + e)))  ->  s, t = vectors(g, v, b, m),  y * s + t

A batch norm whose parameters are arguments is two vectors in every call.  A kernel that applies the norm would
recompute them for every few results; after this rewrite it reads two vectors.  All layers' vectors are results of one
call (or of a few, as a kernel has 4 KiB of parameters), behind one optimisation barrier, so that XLA too keeps them
together. Only element-wise operations on vectors are moved, so values stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jcuts.trace import jaxapi

LAYOUTS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "convert_element_type",
        "div",
        "exp",
        "exp2",
        "integer_pow",
        "log",
        "logistic",
        "max",
        "min",
        "mul",
        "neg",
        "pow",
        "rsqrt",
        "sqrt",
        "square",
        "sub",
        "tanh",
    }
)
TYPES = ("float32", "float64", "bfloat16", "float16")
CALLS = ("jit", "pjit")
BARRIER = "optimization_barrier"
MOST = 240
"""Operands and results of one call: as many as a kernel has parameters for (`lower.horizontal`)."""
LONGEST = 1 << 16
"""Numbers in the longest of these vectors."""


def hoist_vectors(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Hoists values computed from vector arguments alone into one call; returns the program and the number of its
    results.
    """
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
    results = [a for a in results if a.aval.size > 1 and not _operands([a], made).isdisjoint(jaxpr.invars)]
    if not results:
        return closed, 0
    new = {a: jaxapi.new_var(a.aval) for a in results}
    moved = set(map(id, users))
    eqns = [
        e.replace(invars=[a if jaxapi.is_literal(a) else new.get(a, a) for a in e.invars]) if id(e) in moved else e
        for e in jaxpr.eqns
    ]
    calls = [_call(closed, group, [new[a] for a in group], made) for group in _groups(results, made)]
    return jaxapi.with_eqns(closed, [*calls, *eqns]), len(results)


def body(call: Any) -> jaxapi.Closed | None:
    """The jaxpr of a call that `barrier_call` made, without the barrier; None for any other equation."""
    bodies = jaxapi.inner_jaxprs(call) if jaxapi.primitive_name(call) in CALLS else []
    if len(bodies) != 1 or bodies[0][2].consts or not bodies[0][2].jaxpr.eqns:
        return None
    inside = bodies[0][2]
    *eqns, last = inside.jaxpr.eqns
    if jaxapi.primitive_name(last) != BARRIER or list(last.outvars) != list(inside.jaxpr.outvars):
        return None
    return jaxapi.make_closed([], inside.jaxpr.invars, last.invars, eqns, [], like=inside)


def barrier_call(name: str, inside: jaxapi.Closed, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """A call equation of a jaxpr, behind an optimisation barrier: `body` gives the jaxpr back.

    Args: operands, results: variables of the surrounding jaxpr.
    """

    def call(*xs: Any) -> list[Any]:
        return jax.lax.optimization_barrier(jaxapi.eval_closed(inside, *xs))

    call.__name__ = name
    return jaxapi.call_eqn(call, operands, results)


def _groups(results: Sequence[Any], made: dict[Any, Any]) -> list[list[Any]]:
    """Partitions the results into calls: those that share an equation together, within a kernel's parameter limit."""
    parts: list[tuple[list[Any], set[int]]] = []
    for result in results:
        own = {id(e) for e in _ancestors([result], made)}
        alike = [part for part in parts if not part[1].isdisjoint(own)]
        merged = ([*(a for part in alike for a in part[0]), result], own.union(*(part[1] for part in alike)))
        parts = [*(part for part in parts if part not in alike), merged]
    found: list[list[Any]] = []
    for part, _ in parts:
        joined = [*found[-1], *part] if found else part
        if found and len(joined) + len(_operands(joined, made)) <= MOST:
            found[-1] = joined
        else:
            found.append(part)
    return found


def _operands(results: Sequence[Any], made: dict[Any, Any]) -> set[Any]:
    atoms = (a for e in _ancestors(results, made) for a in e.invars if not jaxapi.is_literal(a))
    return {a for a in atoms if a not in made}


def _is_vector(var: Any) -> bool:
    shape, dtype = getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)
    if shape is None or getattr(dtype, "name", "") not in TYPES:
        return False
    return sum(n != 1 for n in shape) <= 1 and var.aval.size <= LONGEST


def _ancestors(results: Sequence[Any], made: dict[Any, Any]) -> list[Any]:
    """Backward slice: the equations that some values depend on, in program order."""
    found: set[Any] = set()
    stack = list(results)
    while stack:
        var = stack.pop()
        if not jaxapi.is_literal(var) and var in made and var not in found:
            found.add(var)
            stack.extend(made[var].invars)
    return [eqn for var, eqn in made.items() if var in found]


def _call(closed: jaxapi.Closed, results: Sequence[Any], new: list[Any], made: dict[Any, Any]) -> Any:
    """The call equation that computes some vectors, under new names."""
    eqns = _ancestors(results, made)
    read = list(dict.fromkeys(a for e in eqns for a in e.invars if not jaxapi.is_literal(a) and a not in made))
    inside = jaxapi.make_closed([], read, results, eqns, [], like=closed)
    return barrier_call("vectors", inside, read, new)

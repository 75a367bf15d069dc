"""Small rewrites of a flat jaxpr before subsets are formed. None changes a value."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jcuts.trace import jaxapi

CHEAP = ("broadcast_in_dim", "iota")


def simplify(closed: jaxapi.Closed) -> jaxapi.Closed:
    """Drops dead equations; gives every user of a cheap broadcast a copy of its own.

    A broadcast or iota that several subsets use would otherwise be written to memory by one of them; as a copy it
    becomes an index map inside each. Bodies of control flow are simplified as well.
    """
    closed = jaxapi.dce(closed)
    eqns = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in ("scan", "while", "cond"):
            eqn = jaxapi.with_inner_jaxprs(eqn, [_copied(body) for _, _, body in jaxapi.inner_jaxprs(eqn)])
        eqns.append(eqn)
    return _copied(jaxapi.with_eqns(closed, eqns))


def _copied(closed: jaxapi.Closed) -> jaxapi.Closed:
    cheap: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in CHEAP and _grows(eqn):
            cheap[eqn.outvars[0]] = eqn
    uses: Counter[Any] = Counter()
    for eqn in closed.jaxpr.eqns:
        uses.update({a for a in eqn.invars if not jaxapi.is_literal(a)})
    shared = {v: e for v, e in cheap.items() if uses[v] > 1}
    if not shared:
        return closed
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        new: dict[Any, Any] = {}
        for atom in eqn.invars:
            if not jaxapi.is_literal(atom) and atom in shared and atom not in new:
                new[atom] = jaxapi.new_var(atom.aval)
                eqns.append(shared[atom].replace(outvars=[new[atom]]))
        if new:
            eqn = eqn.replace(invars=[a if jaxapi.is_literal(a) else new.get(a, a) for a in eqn.invars])
        eqns.append(eqn)
    return jaxapi.dce(jaxapi.with_eqns(closed, eqns))


def _grows(eqn: Any) -> bool:
    size = eqn.outvars[0].aval.size
    return not eqn.invars or all(getattr(a.aval, "size", 1) * 4 <= size or size <= 64 for a in eqn.invars)

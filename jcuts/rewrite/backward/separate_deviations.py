"""Copies a deviation from the mean to the sum of its squares where others use it too, so that the sum may stand alone.

    d = y - mean;  sum(d * d);  2 * d        becomes        e = y - mean;  sum(e * e);  d = y - mean;  2 * d

The statistics of a batch norm can then be part of the kernel that makes y, and what needs the deviation at every point
part of another.  No value changes; XLA merges the copies again where both stay with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jcuts.trace import jaxapi

DEVIATION = "sub"
SQUARES = ("square", "mul", "integer_pow")


def separate_deviations(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The program with such copies; the same program where there are none."""
    made = {eqn.outvars[0]: eqn for eqn in closed.jaxpr.eqns if jaxapi.primitive_name(eqn) == DEVIATION}
    users: dict[Any, list[Any]] = {}
    uses: Counter[Any] = Counter(v for v in closed.jaxpr.outvars if not jaxapi.is_literal(v))
    for eqn in closed.jaxpr.eqns:
        for atom in {a for a in eqn.invars if not jaxapi.is_literal(a)}:
            users.setdefault(atom, []).append(eqn)
            uses[atom] += 1
    eqns: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) in SQUARES:
            source = eqn.invars[0]
            alone = not jaxapi.is_literal(source) and all(a is source for a in eqn.invars)
            if alone and source in made and uses[source] > 1 and _is_summed(eqn, users, uses):
                copy = jaxapi.new_var(source.aval)
                eqns.append(made[source].replace(outvars=[copy]))
                eqn = eqn.replace(invars=[copy] * len(eqn.invars))
        eqns.append(eqn)
    same = all(a is b for a, b in zip(closed.jaxpr.eqns, eqns, strict=False)) and len(eqns) == len(closed.jaxpr.eqns)
    return closed if same else jaxapi.with_eqns(closed, eqns)


def _is_summed(eqn: Any, users: dict[Any, list[Any]], uses: Counter[Any]) -> bool:
    """Whether a square is summed and nothing else."""
    (square,) = eqn.outvars
    return uses[square] == 1 and [jaxapi.primitive_name(u) for u in users.get(square, ())] == ["reduce_sum"]

"""Liveness analysis: peak memory of a jaxpr in its equation order; results have their own buffers unless they alias
operands.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jcuts.trace import jaxapi


def bytes_of(closed: jaxapi.Closed, views: Collection[str]) -> int:
    """Peak of live bytes, without arguments, constants and the bodies of equations.

    Args: views: primitives whose results are their first operand's memory.
    """
    eqns = closed.jaxpr.eqns
    memory: dict[Any, Any] = {}  # value -> the one in whose memory it lies
    for eqn in eqns:
        shared = [(v, v) for v in eqn.outvars]
        if jaxapi.primitive_name(eqn) in views:
            shared = [(eqn.outvars[0], eqn.invars[0])]
        else:
            shared += [(eqn.outvars[to], eqn.invars[k]) for k, to in eqn.params.get("input_output_aliases") or ()]
        for value, source in shared:
            if not jaxapi.is_literal(source):
                memory[value] = memory.get(source, source)
    last: dict[Any, int] = {}
    for step, eqn in enumerate(eqns):
        for value in (*eqn.invars, *eqn.outvars):
            if not jaxapi.is_literal(value) and value in memory:
                last[memory[value]] = step
    for value in closed.jaxpr.outvars:
        if not jaxapi.is_literal(value) and value in memory:
            last[memory[value]] = len(eqns)
    ends: dict[int, list[Any]] = {}
    for value, step in last.items():
        ends.setdefault(step, []).append(value)
    live = most = 0
    begun: set[Any] = set()
    for step, eqn in enumerate(eqns):
        for value in eqn.outvars:
            place = memory.get(value, value)
            if place in last and place not in begun:
                begun.add(place)
                live += jaxapi.nbytes(place)
        most = max(most, live)
        live -= sum(jaxapi.nbytes(value) for value in ends.get(step, ()))
    return most

"""Accumulation in loop carries: which equations of a scan's body add to a carried array that nothing else reads.

acc_out = acc_in + h^T g       acc_in is carried, acc_out its next value: GEMM with beta = 1 and C in place
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jcuts.trace import jaxapi

ADDITIONS = ("add", "add_any")


def accumulations(scan: Any, body: jaxapi.Closed) -> frozenset[int]:
    """Numbers of a scan's equations that add to a carry, with its next value as their result, and of what they add.

    Args: scan: the equation; body: its jaxpr, which has carried values behind its loop-invariant ones.
    """
    first, count = jaxapi.scan_constants(scan), jaxapi.scan_carries(scan)
    reads = Counter(a for eqn in body.jaxpr.eqns for a in eqn.invars if not jaxapi.is_literal(a))
    reads.update(a for a in body.jaxpr.outvars if not jaxapi.is_literal(a))
    carried = body.jaxpr.invars[first : first + count]
    last_of = {v: last for v, last in zip(body.jaxpr.outvars, carried, strict=False) if not jaxapi.is_literal(v)}
    makers = {v: number for number, eqn in enumerate(body.jaxpr.eqns) for v in eqn.outvars}
    found: set[int] = set()
    for number, eqn in enumerate(body.jaxpr.eqns):
        last = last_of.get(eqn.outvars[0])
        if jaxapi.primitive_name(eqn) in ADDITIONS and last in eqn.invars and reads[last] == 1:
            added = (a for a in eqn.invars if not jaxapi.is_literal(a) and a is not last and reads[a] == 1)
            found |= {number, *(makers[a] for a in added if a in makers)}
    return frozenset(found)

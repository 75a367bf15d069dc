"""Eliminates the copies of growing concatenations (DenseNet): one preallocated buffer, updated in place by every layer.

    c1 = concatenate(x, y1); c2 = concatenate(c1, y2); ...     ->
    b0 = update(0, x); b1 = update(b0, y1); ...                x is b0[:, :n], c1 is b1[:, :n1], ...

Otherwise a dense block copies all of its channels in every layer: with n layers of equal width, n / 2 times the bytes
that it produces.  Readers of ``ci`` are ordered before the producer of ``y(i+1)``, so that XLA updates ``b`` in place,
and a slice is an index to jcuts' kernels and to XLA's fusions.  Values are the same.
"""

from __future__ import annotations

from typing import Any

import jax

from jcuts.rewrite.inplace_concat import CONCATENATE, eliminate_concat, in_place
from jcuts.rewrite.matmul_patterns import Program
from jcuts.trace import jaxapi

LEAST = 3
"""Concatenations of a chain: of fewer, what is saved may be less than the padding and the updates cost."""


def inplace_concat_chain(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """The program with growing chains of concatenations, and concatenations of kernels' results, in place; the number
    of them.
    """
    count = 0
    while chains := _chains(closed, program := Program(closed)):
        chain = chains[0]
        operands = [chain[0].invars[0], *(part for eqn in chain for part in eqn.invars[1:])]
        closed, count = in_place(closed, program, chain[-1], operands, chain), count + len(chain)
    closed, others = eliminate_concat(closed)
    return closed, count + others


def _chains(closed: jaxapi.Closed, program: Program) -> list[list[Any]]:
    """Concatenations each of which begins with the one before it, and alone does."""
    after: dict[int, list[Any]] = {}
    inner: set[int] = set()
    found = [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) == CONCATENATE]
    for eqn in found:
        first = eqn.invars[0]
        before = None if jaxapi.is_literal(first) else program.made.get(first)
        if before is None or jaxapi.primitive_name(before) != CONCATENATE:
            continue
        if before.params["dimension"] == eqn.params["dimension"] and not _is_odd(eqn):
            after.setdefault(id(before), []).append(eqn)
    chains = []
    for eqn in found:
        if id(eqn) in inner or _is_odd(eqn):
            continue
        chain = [eqn]
        while len(following := after.get(id(chain[-1]), ())) == 1:
            if {e.outvars[0] for e in chain} & set(following[0].invars[1:]):
                break  # a part that would be gone
            chain += following
            inner.add(id(chain[-1]))
        # A result of the program would be a copy: the array goes on growing.
        if len(chain) >= LEAST and not any(e.outvars[0] in closed.jaxpr.outvars for e in chain[:-1]):
            chains.append(chain)
    return chains


def _is_odd(eqn: Any) -> bool:
    """Whether an operand is a number, empty, or there more than once; or keys of random numbers, which have no zero."""
    operands = [a for a in eqn.invars if not jaxapi.is_literal(a)]
    if jax.numpy.issubdtype(eqn.outvars[0].aval.dtype, jax.dtypes.extended):
        return True
    return len(set(operands)) < len(eqn.invars) or any(a.aval.size == 0 for a in operands)

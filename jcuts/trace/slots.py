"""Concatenations that grow by a part at a time, in one array: nothing that lies there already is copied again.

    c1 = concatenate(x, y1); c2 = concatenate(c1, y2); ...     ->
    b1 = update(pad(x), y1); b2 = update(b1, y2); ...          c1 is b1[:, :n1], c2 is b2[:, :n2], ...

A dense block copies all of its channels for every layer otherwise: of n layers of equal width, n / 2 times what it
makes.  Whatever reads ``ci`` comes before what makes ``y(i+1)``, so that XLA updates ``b`` in place, and a slice is an
index to jcuts' kernels and to XLA's fusions.  Values are the same.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jcuts.trace import jaxapi
from jcuts.trace.products import Program, new_value

CONCATENATE = "concatenate"
LEAST = 3
"""Concatenations of a chain: of fewer, what is saved may be less than the padding and the updates cost."""


def slots(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """The program with its chains of concatenations in place, and how many concatenations were replaced."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    for chain in _chains(closed, program):
        replaced.update(_in_place(chain))
    return (program.with_eqns(replaced), len(replaced)) if replaced else (closed, 0)


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
        while len(after.get(id(chain[-1]), ())) == 1:
            chain += after[id(chain[-1])]
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


def _in_place(chain: list[Any]) -> dict[int, list[Any]]:
    """The equations that take the place of every concatenation of a chain."""
    dimension, whole = chain[0].params["dimension"], chain[-1].outvars[0].aval
    start = chain[0].invars[0]
    array = new_value(whole.shape, whole)
    room = [(0, 0, 0)] * len(whole.shape)
    room[dimension] = (0, whole.shape[dimension] - start.aval.shape[dimension], 0)
    zero = jaxapi.new_literal(np.zeros((), whole.dtype), jaxapi.ShapedArray((), whole.dtype))
    before = [jaxapi.new_eqn([start, zero], [array], jax.lax.pad_p, {"padding_config": tuple(room)}, like=chain[0])]
    replaced: dict[int, list[Any]] = {}
    for eqn in chain:
        eqns, place = before, eqn.invars[0].aval.shape[dimension]
        before = []
        for part in eqn.invars[1:]:
            following = new_value(whole.shape, whole)
            if eqn is chain[-1] and part is eqn.invars[-1]:
                following = eqn.outvars[0]
            starts = [_literal(place if k == dimension else 0) for k in range(len(whole.shape))]
            eqns.append(
                jaxapi.new_eqn([array, part, *starts], [following], jax.lax.dynamic_update_slice_p, {}, like=eqn)
            )
            array, place = following, place + part.aval.shape[dimension]
        if eqn is not chain[-1]:
            limits = tuple(place if k == dimension else n for k, n in enumerate(whole.shape))
            params = {"start_indices": (0,) * len(limits), "limit_indices": limits, "strides": None}
            eqns.append(jaxapi.new_eqn([array], eqn.outvars, jax.lax.slice_p, params, like=eqn))
        replaced[id(eqn)] = eqns
    return replaced


def _literal(value: int) -> Any:
    return jaxapi.new_literal(np.int32(value), jaxapi.ShapedArray((), np.dtype("int32")))

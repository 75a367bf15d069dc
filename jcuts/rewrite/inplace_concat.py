"""Eliminates concatenate: every producer writes its slice of the result in place (``dynamic_update_slice``).

    c = concatenate(p1, p2, p3)      ->      b1 = update(0, p1); b2 = update(b1, p2); c = update(b2, p3)

    y = x . [wt w1]; t, p1 = parts of y; c = concatenate(p1, p2(t))
                                     ->      b1 = update(0, y);  b2 = update(b1, p2(part of b1));  c = part of b2

The branches of an inception block are such producers: a matmul, a convolution or a window with its epilogue.  Where the
first operand is the last slice of a wider matmul's columns (`rewrite/horizontal_matmul.py`), the array begins with all
of them.  A reader of columns that are already written reads the newest state of the array before its branch updates it,
so that every update is in place.  The initial zeros matter only where XLA makes the first update; nobody reads them
(`jcuts.pipeline.inplace_update`).  Values are the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jcuts.rewrite.horizontal_matmul import MORE_OPERANDS, ONE_OPERAND
from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT, Program, new_value
from jcuts.trace import jaxapi

CONCATENATE = "concatenate"
SLICE = "slice"
UPDATE = "dynamic_update_slice"
LEAST_BYTES = 1 << 18
"""Of a concatenation: smaller ones are part of what XLA fuses them with."""
MADE = (CONVOLUTION, DOT, "reduce_window", "reduce_window_max", "reduce_window_sum")


def eliminate_concat(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """The program with such concatenations as in-place updates, and the number of eliminated ones."""
    count = 0
    while (new := _next(closed)) is not None:
        closed, count = new, count + 1
    return closed, count


def _next(closed: jaxapi.Closed) -> jaxapi.Closed | None:
    program = Program(closed)
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == CONCATENATE:
            gone = [eqn]
            operands = _operands(eqn, program, gone)
            if _is_worth(eqn, operands, program):
                return in_place(closed, program, eqn, operands, gone)
    return None


def _operands(eqn: Any, program: Program, gone: list[Any]) -> list[Any]:
    """Flattened operands of a concatenation: nested concatenations with no other use are inlined (``gone``)."""
    found = []
    for atom in eqn.invars:
        inner = program.maker(atom, CONCATENATE)
        if inner is not None and inner.params["dimension"] == eqn.params["dimension"]:
            gone.append(inner)
            found += _operands(inner, program, gone)
        else:
            found.append(atom)
    return found


def _is_worth(eqn: Any, operands: Sequence[Any], program: Program) -> bool:
    """Whether kernels can write all operands after the first slice, and no other concatenation reads them."""
    aval = eqn.outvars[0].aval
    if any(jaxapi.is_literal(a) for a in operands) or len(set(operands)) < len(operands) or len(operands) < 2:
        return False
    if not jax.numpy.issubdtype(aval.dtype, np.floating) or aval.size * aval.dtype.itemsize < LEAST_BYTES:
        return False
    outer = {e.outvars[0] for e in program.made.values() if jaxapi.primitive_name(e) == CONCATENATE} & set(operands)
    used_by = [e for e in program.closed.jaxpr.eqns if eqn.outvars[0] in e.invars]
    inside = [e for e in used_by if jaxapi.primitive_name(e) == CONCATENATE]
    cut = any(jaxapi.primitive_name(program.made[a]) == SLICE for a in operands[1:] if a in program.made)
    return not (outer or inside or cut) and all(_is_made(a, program) for a in operands)


def _is_made(atom: Any, program: Program) -> bool:
    """Whether a value is produced by a matmul, convolution or window, through element-wise operations and slices."""
    while atom in program.made:
        eqn = program.made[atom]
        name = jaxapi.primitive_name(eqn)
        if name in MADE:
            return True
        if name not in (*ONE_OPERAND, *MORE_OPERANDS, SLICE):
            return False
        large = [a for a in eqn.invars if not jaxapi.is_literal(a) and a.aval.size >= atom.aval.size]
        large = [a for a in large if a in program.made and jaxapi.primitive_name(program.made[a]) != "broadcast_in_dim"]
        if len(large) != 1:
            return False
        atom = large[0]
    return False


# -- the updates ----------------------------------------------------------------------------------------------------
def in_place(
    closed: jaxapi.Closed, program: Program, eqn: Any, operands: Sequence[Any], gone: Sequence[Any]
) -> jaxapi.Closed:
    """The program in which a concatenation is a sequence of updates of one array.

    Args: operands: the parts. gone: this and other concatenations that disappear; a result of one of them that is read
        elsewhere holds the first of the parts.
    """
    dim, result = eqn.params["dimension"], eqn.outvars[0]
    base, before, pieces = _base(operands, dim, program)
    replaced: dict[int, list[Any]] = {id(e): [] for e in gone}
    replaced.update({id(program.made[piece]): [] for piece in pieces if piece is not base})
    pieces.update({e.outvars[0]: before for e in gone if e is not eqn})
    rest = list(operands[1:])
    shape = list(result.aval.shape)
    shape[dim] += before
    eqns, states = _updates(base, rest, dim, shape, eqn)
    if not before:
        states[-1] = result
        eqns[-1] = eqns[-1].replace(outvars=[result])
    branch = _branches(rest, program)
    cut: dict[tuple[Any, int], Any] = {}
    for reader in closed.jaxpr.eqns:
        mine = [a for a in reader.invars if not jaxapi.is_literal(a) and a in pieces]
        if not mine or id(reader) in replaced:
            continue
        state = branch.get(id(reader), len(rest))
        for piece in mine:
            if (piece, state) not in cut:
                cut[piece, state] = new_value(piece.aval.shape, piece.aval)
                eqns.append(_cut(states[state], cut[piece, state], dim, pieces[piece], reader))
        changed = [a if jaxapi.is_literal(a) or a not in pieces else cut[a, state] for a in reader.invars]
        replaced[id(reader)] = [reader.replace(invars=changed)]
    if before:
        eqns.append(_cut(states[-1], result, dim, before, eqn))
    replaced[id(eqn)] = eqns
    return _ordered(program.with_eqns(replaced))


def _base(operands: Sequence[Any], dim: int, program: Program) -> tuple[Any, int, dict[Any, int]]:
    """The array's initial value, its columns before the first operand, and the values that it holds, with offsets.

    It is the wider result whose last columns the first part is, if nothing but slices reads it, and else that part.
    """
    first = operands[0]
    eqn = program.maker(first, SLICE)
    results = set(program.closed.jaxpr.outvars)
    is_read = program.uses[first] > 1 and first in program.made and first not in results
    alone = (first, 0, {first: 0} if is_read else {})
    if eqn is None or eqn.invars[0] not in program.made:
        return alone
    whole = eqn.invars[0]
    readers = [e for e in program.closed.jaxpr.eqns if whole in e.invars]
    cuts = [e.outvars[0] for e in readers]
    if len(readers) != program.uses[whole] or not all(_is_along(e, dim) for e in readers):
        return alone
    begin, end = (eqn.params[name][dim] for name in ("start_indices", "limit_indices"))
    if end != whole.aval.shape[dim] or results & set(cuts) or set(operands[1:]) & set(cuts):
        return alone
    return whole, begin, {e.outvars[0]: e.params["start_indices"][dim] for e in readers}


def _is_along(eqn: Any, dim: int) -> bool:
    """Whether an equation is a unit-stride slice along one dimension."""
    if jaxapi.primitive_name(eqn) != SLICE or any(s != 1 for s in eqn.params["strides"] or ()):
        return False
    shapes = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    return all(a == b for k, (a, b) in enumerate(shapes) if k != dim)


def _branches(rest: Sequence[Any], program: Program) -> dict[int, int]:
    """For every equation that an operand depends on, the first such operand: the array state that it may read."""
    found: dict[int, int] = {}
    for number, part in enumerate(rest):
        stack = [part]
        while stack:
            eqn = program.made.get(stack.pop())
            if eqn is None or id(eqn) in found:
                continue
            found[id(eqn)] = number
            stack += [a for a in eqn.invars if not jaxapi.is_literal(a)]
    return found


def _updates(base: Any, rest: Sequence[Any], dim: int, shape: Sequence[int], like: Any) -> tuple[list[Any], list[Any]]:
    """The ``dynamic_update_slice`` equations that write values into an array, and its state after each."""
    zero = jaxapi.new_literal(np.zeros((), base.aval.dtype), jaxapi.ShapedArray((), base.aval.dtype))
    array = new_value(shape, base.aval)
    params = {"shape": tuple(shape), "broadcast_dimensions": (), "sharding": None}
    eqns, states, place = [jaxapi.new_eqn([zero], [array], jax.lax.broadcast_in_dim_p, params, like=like)], [], 0
    for part in (base, *rest):
        following = new_value(shape, base.aval)
        states.append(following)
        eqns.append(_update(array, part, following, dim, place, like))
        array, place = following, place + part.aval.shape[dim]
    return eqns, states


def _update(array: Any, part: Any, result: Any, dim: int, place: int, like: Any) -> Any:
    """The ``dynamic_update_slice`` equation that writes a value at an offset."""
    starts = [_literal(place if k == dim else 0) for k in range(len(array.aval.shape))]
    return jaxapi.new_eqn([array, part, *starts], [result], jax.lax.dynamic_update_slice_p, {}, like=like)


def _cut(array: Any, result: Any, dim: int, place: int, like: Any) -> Any:
    """The slice equation that reads a result at an offset."""
    starts = [place if k == dim else 0 for k in range(len(array.aval.shape))]
    limits = tuple(s + n for s, n in zip(starts, result.aval.shape, strict=True))
    params = {"start_indices": tuple(starts), "limit_indices": limits, "strides": None}
    return jaxapi.new_eqn([array], [result], jax.lax.slice_p, params, like=like)


def _literal(value: int) -> Any:
    return jaxapi.new_literal(np.int32(value), jaxapi.ShapedArray((), np.dtype("int32")))


def undo_eliminated_concat(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The program in which every reader of a part of such an array has a slice of its own (an index to it)."""
    program = Program(closed)
    shared = {}
    for eqn in closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == SLICE and program.uses[eqn.outvars[0]] > 1:
            array = program.made.get(eqn.invars[0])
            if array is not None and jaxapi.primitive_name(array) == UPDATE:
                shared[eqn.outvars[0]] = eqn
    replaced: dict[int, list[Any]] = {}
    kept = {v for v in closed.jaxpr.outvars if not jaxapi.is_literal(v)}
    for eqn in closed.jaxpr.eqns:
        mine = [a for a in dict.fromkeys(a for a in eqn.invars if not jaxapi.is_literal(a)) if a in shared]
        own = {a: new_value(a.aval.shape, a.aval) for a in mine}
        if mine:
            slices = [shared[a].replace(outvars=[own[a]]) for a in mine]
            replaced[id(eqn)] = [*slices, jaxapi.substituted(eqn, own)]
        elif eqn.outvars[0] in shared and eqn.outvars[0] not in kept:
            replaced[id(eqn)] = []
    return program.with_eqns(replaced) if replaced else closed


def _ordered(closed: jaxapi.Closed) -> jaxapi.Closed:
    """The program in a stable topological order."""
    eqns = closed.jaxpr.eqns
    made = {v: k for k, e in enumerate(eqns) for v in e.outvars if not jaxapi.is_dropvar(v)}
    needs = [{made[a] for a in e.invars if not jaxapi.is_literal(a) and a in made} for e in eqns]
    effects = [k for k, e in enumerate(eqns) if e.effects]
    for before, after in itertools.pairwise(effects):
        needs[after].add(before)
    users: dict[int, list[int]] = {}
    for k, found in enumerate(needs):
        for number in found:
            users.setdefault(number, []).append(k)
    left = [len(found) for found in needs]
    ready = [k for k, n in enumerate(left) if n == 0]
    result = []
    while ready:
        k = heapq.heappop(ready)
        result.append(eqns[k])
        for user in users.get(k, ()):
            left[user] -= 1
            if left[user] == 0:
                heapq.heappush(ready, user)
    return jaxapi.with_eqns(closed, result)

"""Horizontal fusion of matmuls that share an operand and have constant weights: one matmul with concatenated weights.

    a = x . w1,  b = x . w2,  ...     ->     y = x . [w1 w2 ...],   a, b, ... = slices of y

The q, k and v of attention and the branches of an inception block are such siblings.  One matmul reads x once, fills
more of a GPU than each of its parts, and is one launch.  Weights must be constants: arguments would be joined again in
every call (`horizontal_matmul_args` does that).  An epilogue that all siblings share, with constants per channel
(biases, an activation), is applied once, before the result is sliced: XLA can fuse it into the library's call, which a
slice in between would prevent.  One that most of them share (a bias, a ReLU) is applied to all: the other siblings get
the neutral constant.

        max(a + u, 0), max(b + v, 0), pool(c)   ->   y = max(x . [wa wb wc] + [u v 0], [0 0 -inf])

The same holds of an epilogue in a wider type (a norm in float32 behind a matmul in bfloat16), if all siblings convert
back.

A sibling that feeds a concatenation is put last, so that the matmul's result can be the concatenation's buffer
(`rewrite/inplace_concat.py`).

XLA:GPU joins matrix products itself where one of them moves less than 32 MB (``xla_gpu_dot_merger_threshold_mb``), but
slices right behind them; it joins no convolutions.

Siblings depend on x and constants only, so the fused matmul is placed where the first of them was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT, Program, constant_of, new_value
from jcuts.rewrite.simplify import FOLD_LIMIT, SMALL
from jcuts.trace import jaxapi

MOST = 16
"""Siblings of one product. Attention has 3, an inception block 4; each part is a slice that somebody must read."""

ONE_OPERAND = frozenset(
    {"abs", "convert_element_type", "copy", "erf", "erfc", "exp", "integer_pow", "logistic", "neg", "square", "tanh"}
)
MORE_OPERANDS = frozenset({"add", "clamp", "div", "max", "min", "mul", "sub"})
NEUTRAL = {"add": -0.0, "div": 1.0, "max": -np.inf, "min": np.inf, "mul": 1.0, "sub": 0.0}
"""Constants that change nothing, as the second operand."""
CONCATENATE = "concatenate"
CONVERT = "convert_element_type"


@dataclass(frozen=True)
class _Sibling:
    """A matmul that may be fused with others of the same operand.

    Attributes:
        eqn: the product.
        side: which operand the weights are.
        weights: their value.
        along: their dimension that is joined.
        place: the same dimension of the result.
    """

    eqn: Any
    side: int
    weights: Any
    along: int
    place: int

    @property
    def width(self) -> int:
        """Size of the joined dimension."""
        return self.weights.shape[self.along]


def horizontal_matmul(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """The program with sibling matmuls fused, and the number of fused matmuls."""
    program = Program(closed)
    groups: dict[Any, list[list[_Sibling]]] = {}
    taken: set[int] = set()
    for side in (1, 0):
        for eqn in closed.jaxpr.eqns:
            found = None if id(eqn) in taken else _candidate(eqn, side, program.consts)
            if found is None:
                continue
            known = groups.setdefault(_key(found), [[]])
            if not _fits(known[-1], found):
                known.append([])
            known[-1].append(found)
        joined = [group for known in groups.values() for group in known if len(group) > 1]
        taken.update(id(s.eqn) for group in joined for s in group)
    if not taken:
        return closed, 0
    joined = [group for known in groups.values() for group in known if len(group) > 1]
    replaced: dict[int, list[Any]] = {}
    readers = {a: e for e in closed.jaxpr.eqns for a in e.invars if not jaxapi.is_literal(a)}
    for group in joined:
        first = group[0].eqn
        group.sort(key=lambda s: _is_part(s, program, readers))
        eqns, gone = _joined(group, program, readers)
        replaced.update((id(eqn), []) for eqn in gone)
        replaced[id(first)] = eqns
    return program.with_eqns(replaced), len(joined)


def _candidate(eqn: Any, side: int, constants: dict[Any, Any]) -> _Sibling | None:
    """A matmul whose operand ``side`` is a constant with a dimension to concatenate along; None for other equations."""
    name = jaxapi.primitive_name(eqn)
    if name not in (CONVOLUTION, DOT) or eqn.params.get("out_sharding") is not None:
        return None
    shared, weights = eqn.invars[1 - side], eqn.invars[side]
    if jaxapi.is_literal(shared) or jaxapi.is_literal(weights) or jaxapi.is_dropvar(eqn.outvars[0]):
        return None
    value = constants.get(weights)
    if value is None or jaxapi.is_tracer(value) or not isinstance(getattr(value, "dtype", None), np.dtype):
        return None
    dimensions = _of_convolution(eqn, side) if name == CONVOLUTION else _of_dot(eqn, side)
    if dimensions is None or not value.size or not eqn.outvars[0].aval.size:
        return None
    return _Sibling(eqn, side, value, *dimensions)


def _of_convolution(eqn: Any, side: int) -> tuple[int, int] | None:
    numbers = eqn.params["dimension_numbers"]
    grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    return None if side != 1 or grouped else (numbers.rhs_spec[0], numbers.out_spec[1])


def _of_dot(eqn: Any, side: int) -> tuple[int, int] | None:
    """The first dimension of the weights that is neither summed nor a batch; results have batch, left, right."""
    contracted, batched = eqn.params["dimension_numbers"]
    free = [[d for d in range(a.aval.ndim) if d not in (*contracted[i], *batched[i])] for i, a in enumerate(eqn.invars)]
    if not free[side]:
        return None
    return free[side][0], len(batched[0]) + (len(free[0]) if side == 1 else 0)


def _key(found: _Sibling) -> Any:
    """Grouping key of fusible matmuls: all attributes except the concatenated dimension."""
    eqn, shape = found.eqn, list(found.weights.shape)
    shape[found.along] = -1
    params = str(sorted(eqn.params.items(), key=str))
    kind = (jaxapi.primitive_name(eqn), params, str(found.weights.dtype), str(eqn.outvars[0].aval.dtype))
    return (found.side, eqn.invars[1 - found.side], tuple(shape), *kind)


def _fits(group: Sequence[_Sibling], found: _Sibling) -> bool:
    """Whether a matmul may be fused: the concatenated weights must not exceed the size limit of constant folding."""
    total = sum(s.weights.size * s.weights.dtype.itemsize for s in (*group, found))
    return len(group) < MOST and total <= FOLD_LIMIT


def _is_part(found: _Sibling, program: Program, readers: dict[Any, Any]) -> bool:
    """Whether a sibling, with its element-wise epilogue, feeds a concatenation along its columns."""
    part = found.eqn.outvars[0]
    while program.uses[part] == 1 and part in readers:
        eqn = readers[part]
        if jaxapi.primitive_name(eqn) == CONCATENATE:
            return eqn.params["dimension"] == found.place
        if jaxapi.primitive_name(eqn) not in ONE_OPERAND | MORE_OPERANDS:
            return False
        part = eqn.outvars[0]
    return False


def _joined(group: Sequence[_Sibling], program: Program, readers: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """The fused matmul, the siblings' common epilogue, and the slices; and the equations that these replace."""
    first = group[0]
    weights = np.concatenate([np.asarray(s.weights) for s in group], first.along)
    invars = list(first.eqn.invars)
    invars[first.side] = program.constant(weights, weights.dtype)
    parts = [s.eqn.outvars[0] for s in group]
    widths = [s.width for s in group]
    whole = new_value(_wide(parts[0].aval.shape, first.place, sum(widths)), parts[0].aval)
    eqns, gone = [first.eqn.replace(invars=invars, outvars=[whole])], [s.eqn for s in group]
    settled = eqns, gone, whole, parts  # the last state in which every part has the type of the whole
    while True:
        now = [part if part.aval.dtype == whole.aval.dtype else None for part in parts]
        followers = [readers.get(part) if part is not None and program.uses[part] == 1 else None for part in now]
        step = _common(followers, parts, first.place, widths, program) if None not in followers else None
        if step is None:
            followers = _of_most(followers, parts, widths)
            step = _common(followers, parts, first.place, widths, program) if any(followers) else None
        if step is None:
            break
        operands, before = step
        model = next(eqn for eqn in followers if eqn is not None)
        whole_after = new_value(_wide(parts[0].aval.shape, first.place, sum(widths)), model.outvars[0].aval)
        invars = [whole if operand is None else operand for operand in operands]
        eqns = [*eqns, *before, model.replace(invars=invars, outvars=[whole_after])]
        parts = [part if eqn is None else eqn.outvars[0] for eqn, part in zip(followers, parts, strict=True)]
        whole, gone = whole_after, gone + [eqn for eqn in followers if eqn is not None]
        if all(part.aval.dtype == whole.aval.dtype for part in parts):
            settled = eqns, gone, whole, parts
    eqns, gone, whole, parts = settled
    return [*eqns, *slices(whole, parts, first.place, widths, first.eqn)], gone


def _wide(shape: Sequence[int], place: int, width: int) -> tuple[int, ...]:
    return (*shape[:place], width, *shape[place + 1 :])


def slices(whole: Any, parts: Sequence[Any], place: int, widths: Sequence[int], like: Any) -> list[Any]:
    """Equations that slice a fused result into its parts."""
    made, start = [], 0
    for part, width in zip(parts, widths, strict=True):
        starts, limits = [0] * whole.aval.ndim, list(whole.aval.shape)
        starts[place], limits[place] = start, start + width
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
        made.append(jaxapi.new_eqn([whole], [part], jax.lax.slice_p, params, like=like))
        start += width
    return made


# -- what follows all siblings alike --------------------------------------------------------------------------------
def _of_most(followers: Sequence[Any], parts: Sequence[Any], widths: Sequence[int]) -> list[Any]:
    """The epilogue operations that most columns share and that have a neutral constant; None for all others."""
    by_name: dict[str, int] = {}
    for eqn, part, width in zip(followers, parts, widths, strict=True):
        if eqn is not None and eqn.invars[0] is part and (jaxapi.primitive_name(eqn) in NEUTRAL or _keeps(eqn, parts)):
            name = jaxapi.primitive_name(eqn)
            by_name[name] = by_name.get(name, 0) + width
    name = max(by_name, key=lambda n: by_name[n], default="")
    if not name or 2 * by_name[name] < sum(widths) or not jax.numpy.issubdtype(parts[0].aval.dtype, np.floating):
        return [None] * len(parts)
    found = [
        eqn if eqn is not None and jaxapi.primitive_name(eqn) == name and eqn.invars[0] is part else None
        for eqn, part in zip(followers, parts, strict=True)
    ]
    if name == CONVERT:  # no other part may lose by it
        after = next(eqn for eqn in found if eqn is not None).outvars[0].aval.dtype
        others = [part.aval.dtype for eqn, part in zip(found, parts, strict=True) if eqn is None]
        if not all(_holds(after, kind) for kind in others):
            return [None] * len(parts)
    return found


def _keeps(eqn: Any, parts: Sequence[Any]) -> bool:
    """Whether a conversion is exact for every sibling: to a wider type, or back to the type of unconverted ones."""
    if jaxapi.primitive_name(eqn) != CONVERT:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    waiting = {part.aval.dtype for part in parts} - {before}
    if waiting:
        return waiting == {after}
    return before != after and _holds(after, before)


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every value of a floating type is representable in another."""
    if wide == narrow:
        return True
    if not all(jax.numpy.issubdtype(t, np.floating) for t in (wide, narrow)):
        return False
    a, b = jax.numpy.finfo(wide), jax.numpy.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp - a.nmant <= b.minexp - b.nmant


def _common(
    followers: Sequence[Any], parts: Sequence[Any], place: int, widths: Sequence[int], program: Program
) -> tuple[list[Any], list[Any]] | None:
    """The operands of one equation in place of several (None for the whole itself), and equations that make them.

    None where the equations differ in more than constants, or are not element-wise.  A part without one gets the
    constant that changes nothing.
    """
    real = [(eqn, part) for eqn, part in zip(followers, parts, strict=True) if eqn is not None]
    first, model = real[0]
    name = jaxapi.primitive_name(first)
    if name not in ONE_OPERAND | MORE_OPERANDS or len({id(eqn) for eqn, _ in real}) < len(real):
        return None
    for eqn, part in real:
        alike = jaxapi.primitive_name(eqn) == name and str(eqn.params) == str(first.params)
        mine, its = eqn.outvars[0].aval, first.outvars[0].aval
        if not alike or mine.shape != part.aval.shape or mine.dtype != its.dtype or jaxapi.is_dropvar(eqn.outvars[0]):
            return None
        if [a is part for a in eqn.invars] != [a is model for a in first.invars]:
            return None
    operands: list[Any] = []
    before: list[Any] = []
    for position, operand in enumerate(first.invars):
        if operand is model:
            operands.append(None)
            continue
        given = [None if eqn is None else eqn.invars[position] for eqn in followers]
        if _one_value(given):
            operands.append(operand)
            continue
        values = _side_by_side(given, parts, place, widths, program, NEUTRAL.get(name, 0.0))
        if values is None or name not in MORE_OPERANDS or name == "clamp":
            return None
        shape = _wide(parts[0].aval.shape, place, sum(widths))
        wide = operand.aval.shape in ((), model.aval.shape)
        joined, made = program.broadcast(values, jaxapi.ShapedArray(shape, operand.aval.dtype), wide, first)
        operands.append(joined)
        before += made
    return operands, before


def _one_value(given: Sequence[Any]) -> bool:
    """Whether all operands are the same scalar."""
    if any(a is None for a in given):
        return False
    scalars = all(jaxapi.is_literal(a) and np.ndim(a.val) == 0 and a.aval.shape == () for a in given)
    return scalars and len({(str(a.aval.dtype), np.asarray(a.val).tobytes()) for a in given}) == 1


def _side_by_side(
    given: Sequence[Any], parts: Sequence[Any], place: int, widths: Sequence[int], program: Program, neutral: float
) -> np.ndarray | None:
    """Constants of the siblings concatenated along the result's dimension ``place``; other dimensions 1 where possible.

    ``neutral`` is the constant of a sibling that has none.
    None where one is no constant, where their types differ, or where they are too large to be worth joining.
    """
    rank = parts[0].aval.ndim
    kind = next(atom.aval.dtype for atom in given if atom is not None)
    values = []
    for atom, part in zip(given, parts, strict=True):
        if atom is None:
            values.append(np.full((1,) * rank, neutral, kind))
            continue
        literal = jaxapi.is_literal(atom)
        value = np.asarray(atom.val) if literal else constant_of(atom, program.made, program.consts)
        if value is None or value.ndim not in (0, rank) or atom.aval.dtype != part.aval.dtype:
            return None
        values.append(value.reshape(value.shape or (1,) * rank))
    try:
        others = np.broadcast_shapes(*(_wide(v.shape, place, 1) for v in values))
    except ValueError:
        return None
    if np.prod(others) * sum(widths) > SMALL:
        return None
    shapes = [_wide(others, place, width) for width in widths]
    return np.concatenate([np.broadcast_to(v, s) for v, s in zip(values, shapes, strict=True)], place)

"""Rematerialises masks that depend on positions alone (`jax.lax.iota`), at the shape of what reads them.

    broadcast(select(row >= column, 0, -1e9))     becomes     select(row' >= column', 0, -1e9)

where row' and column' are iotas of the wide shape.  A causal mask is made once, of the shape (queries, keys), and
broadcast over heads and batch.  Left so it is an array in memory, which the score modification of every attention
loads, an access per score.  Its few operations on numbers of rows and columns are cheaper in the kernel that reads it
(`fusion.match_attention` takes what has the shape of the scores).  No value changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

Places = tuple[int | None, ...]
"""The dimension of the wide shape that each dimension of a value is; None where it has one element, repeated there."""
IOTA = "iota"
BROADCAST = "broadcast_in_dim"
ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "ge", "gt", "le", "lt", "eq", "ne", "and", "or", "not", "select_n"}
    | {"convert_element_type"}
)
MOST_OPERATIONS = 16
"""Equations of a mask, at most: a load is cheaper than more."""
LEAST_SIZE = 1 << 12
"""Elements of a mask, at least: a smaller one is in a cache."""


def position_masks(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces masks that something larger reads by masks of its shape; the program and the number of these readers."""
    if not any(jaxapi.primitive_name(eqn) == IOTA for eqn in closed.jaxpr.eqns):
        return closed, 0
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqns: list[Any] = []
    count = 0
    for eqn in closed.jaxpr.eqns:
        masks = [atom for atom in eqn.invars if _is_narrow_mask(atom, eqn, made)]
        if not masks:
            eqns.append(eqn)
            continue
        count += 1
        wide = _Widened(eqn.outvars[0].aval.shape, made)
        if jaxapi.primitive_name(eqn) == BROADCAST:
            wide.rebuild(made[masks[0]], _places(eqn, masks[0], tuple(range(len(wide.shape)))), eqn.outvars[0])
            eqns += wide.eqns
        else:
            operands = [wide.operand(a, eqn) if any(a is mask for mask in masks) else a for a in eqn.invars]
            eqns += [*wide.eqns, eqn.replace(invars=operands)]
    return (jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count) if count else (closed, 0)


def _is_narrow_mask(atom: Any, reader: Any, made: dict[Any, Any]) -> bool:
    """Whether an operand is made of positions and numbers alone, and its reader's result repeats it."""
    name = jaxapi.primitive_name(reader)
    if name not in ELEMENTWISE and name != BROADCAST:
        return False
    mask = None if jaxapi.is_literal(atom) else made.get(atom)
    if mask is None or atom.aval.size < LEAST_SIZE or atom.aval.size == reader.outvars[0].aval.size:
        return False
    seen: set[int] = set()
    if not _is_positional(mask, made, seen) or len(seen) > MOST_OPERATIONS:
        return False
    return any(jaxapi.primitive_name(eqn) in ELEMENTWISE for eqn in made.values() if id(eqn) in seen)


def _is_positional(eqn: Any, made: dict[Any, Any], seen: set[int]) -> bool:
    """Whether an equation depends on iotas and literals alone. Args: seen: gets the equations."""
    if id(eqn) in seen:
        return True
    seen.add(id(eqn))
    name = jaxapi.primitive_name(eqn)
    if name not in ELEMENTWISE and name not in (IOTA, BROADCAST):
        return False
    if len(seen) > MOST_OPERATIONS:
        return False
    makers = [made.get(atom) for atom in eqn.invars if not jaxapi.is_literal(atom)]
    return all(maker is not None and _is_positional(maker, made, seen) for maker in makers)


class _Widened:
    """Rebuilds the equations of masks for a wider shape."""

    def __init__(self, shape: tuple[int, ...], made: dict[Any, Any]) -> None:
        self.shape, self.made = shape, made
        self.eqns: list[Any] = []
        self.known: dict[Any, Any] = {}

    def operand(self, atom: Any, reader: Any, places: Places | None = None) -> Any:
        """An operand of an element-wise equation at the wide shape. Args: places: of the equation's result."""
        if jaxapi.is_literal(atom) or atom.aval.ndim == 0:
            return atom
        places = _places(reader, atom, places or tuple(range(len(self.shape))))
        if (atom, places) not in self.known:
            self.known[atom, places] = made = jaxapi.new_var(atom.aval.update(shape=self.shape))
            self.rebuild(self.made[atom], places, made)
        return self.known[atom, places]

    def rebuild(self, eqn: Any, places: Places, result: Any) -> None:
        """An equation at the wide shape. Args: places: the dimension there of each of its result's dimensions."""
        name = jaxapi.primitive_name(eqn)
        if name == IOTA:
            place = places[eqn.params["dimension"]]
            if place is None:
                zero = jaxapi.new_literal(np.zeros((), result.aval.dtype), result.aval.update(shape=()))
                self._broadcast(zero, result)
            else:
                params = {**eqn.params, "shape": self.shape, "dimension": place}
                self.eqns.append(eqn.replace(outvars=[result], params=params))
        elif name == BROADCAST:
            (atom,) = eqn.invars
            if atom.aval.ndim == 0:
                self._broadcast(atom, result)
            else:
                self.rebuild(self.made[atom], _places(eqn, atom, places), result)
        else:
            atoms = [self.operand(atom, eqn, places) for atom in eqn.invars]
            self.eqns.append(eqn.replace(invars=atoms, outvars=[result]))

    def _broadcast(self, scalar: Any, result: Any) -> None:
        """Broadcasts a scalar to the wide shape."""
        made = jaxapi.call_eqn(lambda x: lax.broadcast(x, self.shape), [scalar], [result])
        self.eqns.append(made)


def _places(reader: Any, operand: Any, places: Places) -> Places:
    """The dimensions of an operand at the wide shape. Args: places: those of its reader's result."""
    shape, result = operand.aval.shape, reader.outvars[0].aval.shape
    if jaxapi.primitive_name(reader) == BROADCAST:
        onto = reader.params["broadcast_dimensions"]
    else:
        onto = range(len(shape))
    return tuple(places[d] if result[d] == n else None for d, n in zip(onto, shape, strict=True))

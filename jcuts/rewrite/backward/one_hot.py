"""Scatters and gathers of one element per row as element-wise operations (one-hot comparison with an iota).

    scatter_add(zeros, label, g)[r, c]      becomes        select(c == label[r], g[r], 0)
    gather(f(x, y), label)                  becomes        f(gather(x, label), gather(y, label)),  f element-wise

A cross-entropy takes the label's log-probability out of every row (`jnp.take_along_axis`), and its gradient adds one
number to a row of zeros.  XLA writes log-probabilities and zeros to memory for that, both as large as the logits.
Rewritten, the gather reads logits, and the one-hot gradient is part of the kernel that reads it.

Both are exact: an index out of bounds writes nothing or gives NaN as before, which the operations f here hand on.  A
gather that fills in another number than NaN stays.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

GATHER = "gather"
SCATTER = "scatter-add"
BROADCAST = "broadcast_in_dim"
CLIP = lax.GatherScatterMode.CLIP
HANDS_NAN_ON = ("add", "sub", "mul", "div", "neg", "exp", "log", "tanh", "convert_element_type")
"""Operations on floats that give NaN for NaN, whatever their other operand is."""


def one_hot_scatters(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces scatters of one number per row into zeros; returns the program and the number of these scatters."""
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqns, count = [], 0
    for eqn in closed.jaxpr.eqns:
        axis = _scattered_axis(eqn, made) if jaxapi.primitive_name(eqn) == SCATTER else None
        count += axis is not None
        eqns.append(eqn if axis is None else _compared(eqn, axis))
    return (jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count) if count else (closed, 0)


def gathers_before_elementwise(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Moves gathers of one element per row before the element-wise operations on what they read.

    Returns: the program and the number of these gathers.
    """
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqns: list[Any] = []
    count = 0
    for eqn in closed.jaxpr.eqns:
        axis = _gathered_axis(eqn) if jaxapi.primitive_name(eqn) == GATHER else None
        source = None if axis is None else _elementwise(eqn.invars[0], made)
        mover = None if axis is None or source is None else _Mover(eqn, axis, made)
        if mover is None or not mover.is_movable(source):
            eqns.append(eqn)
            continue
        count += 1
        eqns += mover.moved(source, eqn.outvars[0])
    return (jaxapi.dce(jaxapi.with_eqns(closed, eqns)), count) if count else (closed, 0)


# -- scatters ---------------------------------------------------------------------------------------------------------
def _scattered_axis(eqn: Any, made: dict[Any, Any]) -> int | None:
    """The dimension along which a scatter adds one number per row to zeros; None for any other scatter."""
    numbers = eqn.params["dimension_numbers"]
    zeros, indices, updates = eqn.invars
    if numbers.update_window_dims or not _is_zero(zeros, made):
        return None
    return _single_axis(
        zeros.aval,
        indices,
        updates.aval.shape,
        numbers.scatter_dims_to_operand_dims,
        numbers.inserted_window_dims,
        (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims),
    )


def _is_zero(atom: Any, made: dict[Any, Any]) -> bool:
    """Whether every element is +0."""
    eqn = None if jaxapi.is_literal(atom) else made.get(atom)
    if eqn is None or jaxapi.primitive_name(eqn) != BROADCAST or not jaxapi.is_literal(eqn.invars[0]):
        return False
    value = np.asarray(eqn.invars[0].val)  # not of JAX: nothing runs while a program is traced
    return value.ndim == 0 and bool(value == 0) and not np.signbit(value.astype(np.float64))


def _single_axis(
    operand: Any,
    indices: Any,
    rows: tuple[int, ...],
    indexed: tuple[int, ...],
    dropped: tuple[int, ...],
    batching: tuple[tuple[int, ...], tuple[int, ...]],
) -> int | None:
    """The dimension that one index per row goes along; None unless all others are rows, in the same order.

    Args: operand: what is indexed; rows: shape of what is taken or added; indexed, dropped: by an index; batching:
        dimensions of the operand, and of the indices, that are rows.
    """
    if len(indexed) != 1 or tuple(indexed) != tuple(dropped):
        return None
    (axis,) = indexed
    others = tuple(d for d in range(operand.ndim) if d != axis)
    if tuple(batching[0]) != others or tuple(batching[1]) != tuple(sorted(batching[1])):
        return None
    wanted = tuple(1 if d == axis else size for d, size in enumerate(operand.shape))
    holds = jnp.iinfo(indices.aval.dtype).max >= operand.shape[axis]
    return axis if rows == wanted and indices.aval.shape == (*rows, 1) and holds else None


def _compared(eqn: Any, axis: int) -> Any:
    """A scatter of one number per row as a comparison of column numbers with the row's index."""
    result = eqn.outvars[0].aval
    clips = eqn.params["mode"] == CLIP

    def one_hot(indices: Any, updates: Any) -> Any:
        index = jnp.squeeze(indices, -1)
        if clips:
            index = jnp.clip(index, 0, result.shape[axis] - 1)
        columns = lax.broadcasted_iota(index.dtype, result.shape, axis)
        chosen = columns == jnp.broadcast_to(index, result.shape)
        return jnp.where(chosen, jnp.broadcast_to(updates, result.shape), jnp.zeros((), result.dtype))

    return jaxapi.call_eqn(one_hot, eqn.invars[1:], eqn.outvars)


# -- gathers ----------------------------------------------------------------------------------------------------------
def _gathered_axis(eqn: Any) -> int | None:
    """The dimension along which a gather takes one number per row; None for any other gather."""
    numbers, fill = eqn.params["dimension_numbers"], eqn.params["fill_value"]
    operand, indices = eqn.invars
    if numbers.offset_dims or any(size != 1 for size in eqn.params["slice_sizes"]):
        return None
    if not jnp.issubdtype(operand.aval.dtype, jnp.inexact) or not (fill is None or fill != fill):
        return None
    return _single_axis(
        operand.aval,
        indices,
        eqn.outvars[0].aval.shape,
        numbers.start_index_map,
        numbers.collapsed_slice_dims,
        (numbers.operand_batching_dims, numbers.start_indices_batching_dims),
    )


def _elementwise(atom: Any, made: dict[Any, Any]) -> Any:
    """The element-wise equation on floats that makes a value, if one does."""
    eqn = None if jaxapi.is_literal(atom) else made.get(atom)
    if eqn is None or jaxapi.primitive_name(eqn) not in HANDS_NAN_ON:
        return None
    return eqn if all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in eqn.invars) else None


class _Mover:
    """Rebuilds what a gather reads, element by element of its result."""

    def __init__(self, gather: Any, axis: int, made: dict[Any, Any]) -> None:
        self.gather = gather
        self.axis = axis
        self.made = made
        self.shape = gather.outvars[0].aval.shape
        self.whole = gather.invars[0].aval.shape
        self.eqns: list[Any] = []
        self.known: dict[Any, Any] = {}

    def is_movable(self, eqn: Any) -> bool:
        """Whether all operands are as large as what is gathered from, or the same along the gather's dimension."""
        for atom in eqn.invars:
            if jaxapi.is_literal(atom) or atom.aval.shape in ((), self.shape):
                continue
            source = _elementwise(atom, self.made)
            if atom.aval.shape != self.whole or (source is not None and not self.is_movable(source)):
                return False
        return True

    def moved(self, eqn: Any, result: Any) -> list[Any]:
        """The equations that give the gather's result from gathers of the operands of an element-wise equation."""
        self._rebuilt(eqn, result)
        return self.eqns

    def _rebuilt(self, eqn: Any, result: Any) -> None:
        atoms = [self._atom(atom) for atom in eqn.invars]
        self.eqns.append(eqn.replace(invars=atoms, outvars=[result]))

    def _atom(self, atom: Any) -> Any:
        """An operand's elements at the gather's indices."""
        if jaxapi.is_literal(atom) or atom.aval.shape in ((), self.shape):
            return atom
        if atom not in self.known:
            self.known[atom] = result = jaxapi.new_var(atom.aval.update(shape=self.shape))
            eqn = self.made.get(atom)
            if (source := _elementwise(atom, self.made)) is not None:
                self._rebuilt(source, result)
            elif eqn is not None and jaxapi.primitive_name(eqn) == BROADCAST and self._is_constant_along(eqn):
                params = {**eqn.params, "shape": self.shape}
                self.eqns.append(eqn.replace(outvars=[result], params=params))
            else:
                invars = [atom, self.gather.invars[1]]
                self.eqns.append(self.gather.replace(invars=invars, outvars=[result]))
        return self.known[atom]

    def _is_constant_along(self, broadcast: Any) -> bool:
        """Whether a broadcast is the same along the gather's dimension."""
        places = [int(d) for d in broadcast.params["broadcast_dimensions"]]
        source = broadcast.invars[0].aval
        return self.axis not in places or source.shape[places.index(self.axis)] == 1

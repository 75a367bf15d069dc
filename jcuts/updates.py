"""Kernels that write their result where an update in place would copy it: into the array that it becomes part of.

    y = kernel(x); b2 = dynamic_update_slice(b1, y, ...)     ->     b2 = kernel(x, b1)     b1 is b2's memory

The kernel may read other parts of the array, as a layer of a dense block does.  What is chosen, checked and timed is
the kernel; where its stores go changes nothing of what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.levels import Level, Subset
from jcuts.region.placed import Placed, placed
from jcuts.trace import jaxapi
from jcuts.xla.kernels import is_for_gpu

UPDATE = "dynamic_update_slice"


@dataclass(frozen=True)
class Update:
    """The equation that a kernel takes over. Attributes: number: of the equation. array: what is updated."""

    number: int
    array: Any
    placed: Placed


def update_of(level: Level, subset: Subset) -> Update | None:
    """The update that alone uses what a subset's chosen kernel makes; None where there is none that it could do."""
    if subset.chosen is None or not is_for_gpu(subset.chosen) or len(subset.outputs) != 1:
        return None
    tensor = level.graph.tensors[level.graph.of_var[subset.outputs[0]]]
    if tensor.escapes or len(set(tensor.users)) != 1:
        return None
    (number,) = set(tensor.users)
    eqn = level.closed.jaxpr.eqns[number]
    if jaxapi.primitive_name(eqn) != UPDATE or eqn.invars[1] is not subset.outputs[0]:
        return None
    array = eqn.invars[0]
    if jaxapi.is_literal(array) or not all(jaxapi.is_literal(s) for s in eqn.invars[2:]):
        return None
    starts, operand = [int(s.val) for s in eqn.invars[2:]], -1
    if array in subset.inputs:
        operand = subset.inputs.index(array)
        if not _reads_other_parts(level, subset, array, starts, subset.outputs[0].aval.shape):
            return None
    found = placed(subset.chosen, array.aval.shape, starts, operand)
    return None if found is None else Update(number, array, found)


def _reads_other_parts(level: Level, subset: Subset, array: Any, starts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a subset reads nothing of an array but slices that lie beside the part that begins there."""
    for member in subset.members:
        eqn = level.closed.jaxpr.eqns[member]
        if not any(a is array for a in eqn.invars):
            continue
        if jaxapi.primitive_name(eqn) != "slice":
            return False
        low, high = eqn.params["start_indices"], eqn.params["limit_indices"]
        if all(a < start + n and start < b for a, b, start, n in zip(low, high, starts, sizes, strict=True)):
            return False
    return True

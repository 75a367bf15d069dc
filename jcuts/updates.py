"""Kernels that write their result where an update in place would copy it: into the array that it becomes part of.

    y = kernel(x); b2 = dynamic_update_slice(b1, y, ...)     ->     b2 = kernel(x, b1)     b1 is b2's memory

What is chosen, checked and timed is the kernel; where its stores go changes nothing of what it computes.
"""

from __future__ import annotations

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
    array, starts = eqn.invars[0], eqn.invars[2:]
    # Of an operand that is also read XLA would make a copy.
    if jaxapi.is_literal(array) or array in subset.inputs or not all(jaxapi.is_literal(s) for s in starts):
        return None
    found = placed(subset.chosen, array.aval.shape, [int(s.val) for s in starts])
    return None if found is None else Update(number, array, found)

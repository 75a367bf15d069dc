"""In-place dynamic-update-slice: moves a program's output to a slice of a larger buffer, an aliased operand.

The larger array is operand and result in one: an extra last operand that the kernel does not read, or an operand of
which it reads other parts than it writes.  A kernel that writes the first slice has no such operand: the rest of its
result is undefined, and nobody may read it.  A constant offset of the slice is not part of the program: the call adds
bytes to the result's address, so that all layers of a dense block share one kernel.  One that is an argument (the
position of a key-value cache) is an operand, which the kernel adds to the address (`kernel_ir.program.Offset`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Atom, Index
from jcuts.kernel_ir.program import ALIGNMENT, ITEM_SIZE, Buffer, Offset, Phase, Program

ONTO = "onto"
BEGINS = "begins"
"""Operand of a run-time offset."""


@dataclass(frozen=True)
class SlicedOutput:
    """A program that writes a slice of a larger array.

    Attributes: start: bytes before its part. operand: number of the array, None where the kernel begins it.
        position: number of the operand that says where the part begins, None where that is a constant.
    """

    program: Program
    start: int
    operand: int | None
    position: int | None = None


def write_into_slice(
    program: Program, whole: Sequence[int], starts: Sequence[int | str], operand: int | None = -1
) -> SlicedOutput | None:
    """The scheduled program with its one result as a slice of a larger array; None where its stores have no row stride.

    Args:
        whole: the array's shape.
        starts: the part's first element; it must be whole along all dimensions but one. The type of a number that is
            an argument (int32, int64) stands for one that is known at run time: it is clamped, as XLA clamps it.
        operand: which operand the array is already; -1: it becomes the last one; None: the kernel begins it. Where the
            part begins, if that is an argument, becomes the one behind it.
    """
    if len(program.outputs) != 1 or any(b.name in (ONTO, BEGINS) for b in program.buffers):
        return None
    result = program.outputs[0]
    if result.offset is not None:
        return None
    partial = [k for k, (a, b) in enumerate(zip(result.shape, whole, strict=True)) if a != b]
    others = [start for k, start in enumerate(starts) if [k] != partial and not isinstance(start, str)]
    if len(partial) != 1 or any(others):
        return None
    dim, first = partial[0], starts[partial[0]]
    limit = whole[dim] - result.shape[dim]
    here, there = (math.prod(shape[dim:]) for shape in (result.shape, whole))
    stride = there // whole[dim]
    unit, offset = stride * ITEM_SIZE[result.dtype], None
    if isinstance(first, str):
        start, offset = 0, Offset(BEGINS, limit, stride)
        fits = operand == -1 and limit > 0 and unit % ALIGNMENT == 0
    else:
        start = first * unit
        fits = 0 <= first <= limit and start % ALIGNMENT == 0
    phases = [_moved(program, phase, result.name, here, there) for phase in program.phases] if fits else [None]
    if any(phase is None for phase in phases):
        return None
    buffers = [b if b is not result else replace(b, shape=tuple(whole), offset=offset) for b in program.buffers]
    position = None
    if operand is not None and operand < 0:
        last = max((k for k, b in enumerate(buffers) if b.role == "in"), default=-1)
        buffers.insert(last + 1, Buffer(ONTO, result.dtype, tuple(whole), "in"))
        operand = len(program.inputs)
        if isinstance(first, str):
            buffers.insert(last + 2, Buffer(BEGINS, first, (), "in"))
            position = operand + 1
    made = replace(program, buffers=tuple(buffers), phases=tuple(p for p in phases if p is not None))
    return SlicedOutput(made, start, operand, position)


def _moved(program: Program, phase: Phase, result: str, here: int, there: int) -> Phase | None:
    """The phase with the result's row stride changed from ``here`` to ``there`` elements."""
    stores = []
    grid = {f"{g.axis}_lo": g.extent for g in program.grid}
    for store in phase.stores:
        if store.buffer == result:
            ranges = {**grid, **phase.ranges()}
            address = store.address.floordiv(here, ranges) * there + store.address.mod(here, ranges)
            if _index_atoms(address) - _index_atoms(store.address):
                return None  # accesses of several elements would not know that they are neighbours
            store = replace(store, address=address)
        stores.append(store)
    return replace(phase, stores=tuple(stores))


def _index_atoms(index: Index) -> set[Atom]:
    return {atom for atom, _ in index.terms}

"""In-place dynamic-update-slice: lets a kernel write its result directly into the larger array that it is copied into.

    y = kernel(x); b2 = dynamic_update_slice(b1, y, ...)     ->     b2 = kernel(x, b1)     b1 is b2's memory
    y = kernel(x); b2 = dynamic_update_slice(b1, y, k)       ->     b2 = kernel(x, b1, k)  k is known at run time
    y = kernel(x); b1 = dynamic_update_slice(zeros, y, ...)  ->     b1 = kernel(x)         where nobody reads the zeros

A kernel that writes the first slice leaves the rest of the array uninitialised.  That requires a proof, followed
through all updates, that every reader of the array is a slice of what is written by then, or an update whose result is
read in the same way.  Slices that no kernel produces are copied there by kernels, too: XLA's own updates in between are
not in place (it may read slices of older states).  The kernel may read other parts of the array, as a layer of a dense
block does.  The unmodified kernel is what is chosen, checked and timed; the address of its stores does not change what
it computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import START_TYPES
from jcuts.lower.region import lower_region
from jcuts.lower.sliced_output import SlicedOutput, write_into_slice
from jcuts.lower.tensor_graph import build_graph
from jcuts.ops.gather import UPDATE
from jcuts.pipeline.computation import Computation, Region
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.candidates import GpuMachine
from jcuts.trace import jaxapi
from jcuts.trace.source import place
from jcuts.xla.kernel_cache import is_for_gpu


@dataclass(frozen=True)
class InplaceUpdate:
    """An update that a kernel takes over.

    Attributes: number: of the equation. array: what is updated. zeros: number of the equation that made it, where the
        kernel begins the array. begins: where the part begins, if that is an argument of the update.
    """

    number: int
    array: Any
    placed: SlicedOutput
    zeros: int | None = None
    begins: Any = None

    def inputs(self, own: Sequence[Any]) -> list[Any]:
        """The kernel's operands. Args: own: those without the update."""
        added = [self.array] if self.placed.operand == len(own) else []
        return [*own, *added, *([] if self.begins is None else [self.begins])]


def note(top: Computation) -> str | None:
    """What kernels write into larger arrays, as a sentence for the report."""

    def count(kind: Callable[[Computation], list[int]]) -> int:
        eqns = [level.closed.jaxpr.eqns[number] for level in top.walk() for number in kind(level)]
        return sum(jaxapi.primitive_name(eqn) == UPDATE for eqn in eqns)

    made, copied = count(lambda level: level.updated), count(lambda level: level.copied)
    more = f", and copy {copied} there that XLA computes" if copied else ""
    return f"kernels write {made} results into the arrays that they become part of{more}" if made else None


def find_inplace_update(level: Computation, subset: Region, chosen: Program | None = None) -> InplaceUpdate | None:
    """The update that alone uses what a subset's chosen kernel makes; None where there is none that it could do.

    Args: chosen: the program, if it is not ``subset.chosen``.
    """
    chosen = subset.chosen if chosen is None else chosen
    if chosen is None or not is_for_gpu(chosen) or len(subset.outputs) != 1:
        return None
    tensor = level.graph.tensors[level.graph.of_var[subset.outputs[0]]]
    if tensor.escapes or len(set(tensor.users)) != 1:
        return None
    (number,) = set(tensor.users)
    eqn = level.closed.jaxpr.eqns[number]
    if jaxapi.primitive_name(eqn) != UPDATE or eqn.invars[1] is not subset.outputs[0]:
        return None
    array, begins = eqn.invars[0], _begins(eqn)
    if jaxapi.is_literal(array):
        return None
    if begins is not None:
        return None if array in subset.inputs else _with_run_time_start(chosen, number, eqn, begins)
    starts, operand = [int(s.val) for s in eqn.invars[2:]], -1
    if array in subset.inputs:
        operand = subset.inputs.index(array)
        if not _reads_other_parts(level, subset, array, starts, subset.outputs[0].aval.shape):
            return None
    zeros = _unread_zeros(level, number) if operand < 0 else None
    found = write_into_slice(chosen, array.aval.shape, starts, operand if zeros is None else None)
    return None if found is None else InplaceUpdate(number, array, found, zeros)


def appends(closed: jaxapi.Closed) -> bool:
    """Whether a program, or a loop in it, updates an array at a position that is no constant: a key-value cache."""
    return any(
        (jaxapi.primitive_name(eqn) == UPDATE and _begins(eqn) is not None)
        or any(appends(body) for _, _, body in jaxapi.inner_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


def _begins(eqn: Any) -> Any:
    """The argument that says where an update begins along the dimension of which it is a part; None for constants."""
    starts = eqn.invars[2:]
    if all(jaxapi.is_literal(s) for s in starts):
        return None
    shapes = zip(*(v.aval.shape for v in eqn.invars[:2]), strict=True)
    found = [s for s, (whole, part) in zip(starts, shapes, strict=True) if whole != part and not jaxapi.is_literal(s)]
    return found[0] if found else next(s for s in starts if not jaxapi.is_literal(s))


def _with_run_time_start(chosen: Program, number: int, eqn: Any, begins: Any) -> InplaceUpdate | None:
    """The update at a position that is an argument (a key-value cache), if a program can do it."""
    array, dtype = eqn.invars[0], str(begins.aval.dtype)
    if dtype not in START_TYPES:
        return None
    starts = [int(s.val) if jaxapi.is_literal(s) else dtype for s in eqn.invars[2:]]
    found = write_into_slice(chosen, array.aval.shape, starts)
    return None if found is None or found.position is None else InplaceUpdate(number, array, found, begins=begins)


def programs(level: Computation, subset: Region, chosen: Program | None = None) -> list[Program]:
    """What runs for a subset if a program is chosen for it: that one, or what writes into a larger array instead."""
    chosen = subset.chosen if chosen is None else chosen
    update = find_inplace_update(level, subset, chosen)
    return ([] if chosen is None else [chosen]) if update is None else [update.placed.program]


def copy_kernels(level: Computation, machine: GpuMachine) -> list[InplaceUpdate]:
    """Updates of arrays to which kernels write, that are left: kernels that copy parts there."""
    found = []
    for number, eqn in enumerate(level.closed.jaxpr.eqns):
        if jaxapi.primitive_name(eqn) != UPDATE or (zeros := _unread_zeros(level, number)) is None:
            continue
        chain = _chain(level, number)
        if not set(chain) & set(level.updated):
            continue
        for one in chain:
            array, part, *starts = level.closed.jaxpr.eqns[one].invars
            if one in level.updated or not all(jaxapi.is_literal(s) for s in starts):
                continue
            program = _copying(part.aval.shape, array.aval.shape, str(part.aval.dtype), machine)
            operand = None if one == number else -1
            made = program and write_into_slice(program, array.aval.shape, [int(s.val) for s in starts], operand)
            if made is not None:
                found.append(InplaceUpdate(one, array, made, zeros if one == number else None))
    return found


def _chain(level: Computation, number: int) -> list[int]:
    """An update and those of its result, one after the other."""
    chain = [number]
    while True:
        result = level.closed.jaxpr.eqns[chain[-1]].outvars[0]
        users = set(level.graph.tensors[level.graph.of_var[result]].users)
        following = [k for k in users if _is_update_of(level.closed.jaxpr.eqns[k], result)]
        if len(following) != 1:
            return chain
        chain += following


def _is_update_of(eqn: Any, array: Any) -> bool:
    return jaxapi.primitive_name(eqn) == UPDATE and [a is array for a in eqn.invars[:2]] == [True, False]


@functools.lru_cache(256)
def _copying(shape: tuple[int, ...], whole: tuple[int, ...], dtype: str, machine: GpuMachine) -> Program | None:
    """A scheduled program that copies an array of a shape, in lines as a part of a larger array has them."""
    partial = [k for k, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
    if len(partial) != 1:
        return None
    rows, width = math.prod(shape[: partial[0]]), math.prod(shape[partial[0] :])
    wide = jax.ShapeDtypeStruct((rows, 2 * width), dtype)
    graph = build_graph(jaxapi.closed_jaxpr_of(lambda x: x[:, :width], wide).jaxpr, place)
    program = lower_region(graph, frozenset(range(len(graph.nodes))))
    if isinstance(program, Refusal) or not (scheduled := gpu_candidates.candidates(program, machine, 1)):
        return None
    best = scheduled[0][0]
    (phase,) = best.phases
    (store,) = phase.stores
    nodes = [replace(n, index=store.address) if n.op == "load" else n for n in phase.exit.nodes]
    buffers = tuple(replace(b, shape=shape) for b in best.buffers)
    return replace(best, buffers=buffers, phases=(replace(phase, exit=Graph(nodes)),))


def _unread_zeros(level: Computation, number: int) -> int | None:
    """The equation that makes the array of an update, if it is one number everywhere that nobody else ever reads."""
    eqns = level.closed.jaxpr.eqns
    array = eqns[number].invars[0]
    tensor = level.graph.tensors[level.graph.of_var[array]]
    made = [k for k, e in enumerate(eqns) if array in e.outvars]
    if not made or tensor.escapes or set(tensor.users) != {number} or not _is_one_number(eqns[made[0]]):
        return None
    dims = [k for k, (a, b) in enumerate(zip(*(v.aval.shape for v in eqns[number].invars[:2]), strict=True)) if a != b]
    return made[0] if len(dims) == 1 and _reads_what_is_written(level, number, dims[0], []) else None


def _is_one_number(eqn: Any) -> bool:
    return jaxapi.primitive_name(eqn) == "broadcast_in_dim" and jaxapi.is_literal(eqn.invars[0])


def _reads_what_is_written(level: Computation, number: int, dim: int, written: list[tuple[int, int]]) -> bool:
    """Whether nothing reads more of an update's result than what was written until then.

    Args: dim: along which parts lie. written: from where to where, before this update.
    """
    eqn = level.closed.jaxpr.eqns[number]
    array, part, *starts = eqn.invars
    result = eqn.outvars[0]
    whole = result.aval.shape
    same = all(n == m for k, (n, m) in enumerate(zip(part.aval.shape, whole, strict=True)) if k != dim)
    if not same or part is array or not all(jaxapi.is_literal(s) for s in starts):
        return False
    begin = min(max(int(starts[dim].val), 0), whole[dim] - part.aval.shape[dim])
    written = [*written, (begin, begin + part.aval.shape[dim])]
    if _covers(written, 0, whole[dim]):
        return True
    tensor = level.graph.tensors[level.graph.of_var[result]]
    if tensor.escapes:
        return False
    for user in set(tensor.users):
        reader = level.closed.jaxpr.eqns[user]
        name = jaxapi.primitive_name(reader)
        if name == "slice":
            fine = _covers(written, reader.params["start_indices"][dim], reader.params["limit_indices"][dim])
        else:
            fine = _is_update_of(reader, result) and _reads_what_is_written(level, user, dim, written)
        if not fine:
            return False
    return True


def _covers(written: Sequence[tuple[int, int]], low: int, high: int) -> bool:
    for begin, end in sorted(written):
        if begin <= low < end:
            low = end
    return low >= high


def _reads_other_parts(
    level: Computation, subset: Region, array: Any, starts: Sequence[int], sizes: Sequence[int]
) -> bool:
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

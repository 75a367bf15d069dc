"""Reference interpreter of kernel programs in NumPy: slow, for tests and for locating miscompiles.

It runs unscheduled and scheduled programs alike: a schedule changes how points are grouped, never what they compute.
All points of a phase are evaluated together, of reduction points as many as `_AT_ONCE` allows; their terms are combined
one after the other.  It is stricter than a kernel: an unguarded load outside its buffer, a result element that is
written twice or never, and a read of scratch memory that the task has not written are IRErrors.  Of a result with a
run-time offset the elements that are not written are what they were: nothing, and no error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.numpy_semantics import apply, carried, combine, numpy_dtype, stored
from jcuts.kernel_ir.program import Axis, Buffer, Phase, Program

Values = dict[int, Any]
_AT_ONCE = 1 << 16
"""Elements that a node of a reduction has at most, unless a single reduction point has more."""


class _Memory:
    """A flat buffer and how often each of its elements was written."""

    def __init__(self, name: str, data: np.ndarray, is_input: bool) -> None:
        self.name, self.data, self.is_input, self.offset = name, data, is_input, 0
        self.writes = np.full(data.size, int(is_input), np.int64)

    def load(self, address: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        live = address if mask is None else address[mask]
        if live.size and (live.min() < 0 or live.max() >= self.data.size):
            raise IRError(f"{self.name}: loads {live.min()}..{live.max()} of {self.data.size} elements")
        if live.size and not self.writes[live].all():
            raise IRError(f"{self.name}: reads an element that was not written")
        return self.data[address if mask is None else np.where(mask, address, 0)]

    def store(self, address: np.ndarray, value: np.ndarray, again: bool) -> None:
        address = address + self.offset
        if address.size and (address.min() < 0 or address.max() >= self.data.size):
            raise IRError(f"{self.name}: stores {address.min()}..{address.max()} of {self.data.size} elements")
        self.data[address] = value
        if again:  # a phase with ``when`` corrects what is there
            self.writes[address] = np.maximum(self.writes[address], 1)
        else:
            np.add.at(self.writes, address.ravel(), 1)


def interpret(program: Program, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a program.

    Args: operands: one array per input buffer, of its shape and dtype.
    Returns: one array per output buffer.
    Raises: IRError where an operand does not fit, or the program breaks a rule above.
    """
    inputs = program.inputs
    if len(operands) != len(inputs):
        raise IRError(f"{program.name} takes {len(inputs)} operands, got {len(operands)}")
    memory: dict[str, _Memory] = {}
    for buffer, operand in zip(inputs, operands, strict=True):
        array = np.asarray(operand)
        if array.shape != buffer.shape or array.dtype != numpy_dtype(buffer.dtype):
            raise IRError(f"{buffer.name} is {buffer.dtype}{list(buffer.shape)}, got {array.dtype}{list(array.shape)}")
        memory[buffer.name] = _Memory(buffer.name, array.ravel(), True)
    for buffer in program.outputs:
        memory[buffer.name] = _Memory(buffer.name, _uninitialised(buffer), False)
        if buffer.offset is not None:
            start = int(memory[buffer.offset.start].data[0])
            memory[buffer.name].offset = min(max(start, 0), buffer.offset.limit) * buffer.offset.stride
    with np.errstate(all="ignore"):
        for task in itertools.product(*(range(g.blocks) for g in program.grid)):
            _task(program, task, memory)
    for buffer in program.outputs:
        writes = memory[buffer.name].writes
        if buffer.offset is not None:  # a part of an array that the caller has; how large it is nobody knows
            writes = writes[writes > 0]
        if not writes.size or not (writes == 1).all():
            raise IRError(f"{buffer.name}: elements are written {writes.min()} to {writes.max()} times instead of once")
    return [memory[b.name].data.reshape(b.shape) for b in program.outputs]


def _task(program: Program, task: tuple[int, ...], memory: dict[str, _Memory]) -> None:
    spans = {}
    for grid, number in zip(program.grid, task, strict=True):
        spans[grid.axis] = (number * grid.block, min((number + 1) * grid.block, grid.extent))
    for buffer in program.locals:
        memory[buffer.name] = _Memory(buffer.name, _uninitialised(buffer), False)
    bases = {f"{axis}_lo": low for axis, (low, _) in spans.items()}
    for point in itertools.product(*(range(*spans[axis]) for axis in program.serial)):
        fixed = {**bases, **dict(zip(program.serial, point, strict=True))}
        for phase in program.phases:
            if any(fixed[axis] != bases[f"{axis}_lo"] for axis in phase.once):
                continue
            if any(fixed[axis] != spans[axis][1] - 1 for axis in phase.last):
                continue
            if phase.when and not memory[phase.when].load(np.zeros(1, np.int64), None)[0]:
                continue
            _phase(phase, [a for a in phase.axes if a.name not in fixed], spans, fixed, memory)


def _uninitialised(buffer: Buffer) -> np.ndarray:
    """What stands in a local buffer before anything is stored: values that show in a result that reads them."""
    dtype = numpy_dtype(buffer.dtype)
    if np.issubdtype(dtype, np.integer):
        return np.full(buffer.size, np.iinfo(dtype).max, dtype)
    return np.ones(buffer.size, dtype) if dtype == np.bool_ else np.full(buffer.size, np.nan, dtype)


def _phase(
    phase: Phase,
    loops: Sequence[Axis],
    spans: Mapping[str, tuple[int, int]],
    fixed: Mapping[str, int],
    memory: Mapping[str, _Memory],
) -> None:
    env: dict[str, Any] = dict(fixed)
    shape = []
    for place, axis in enumerate(loops):
        low, high = spans.get(axis.name, (0, axis.extent))
        points = np.arange(low, high, dtype=np.int64)
        shape.append(points.size)
        env[axis.name] = points.reshape([-1 if k == place else 1 for k in range(len(loops))])
    totals: list[tuple[Any, ...]] = []
    points = list(itertools.product(*(range(r.extent) for r in phase.reds))) if phase.reds else []
    several = max(1, _AT_ONCE // max(1, math.prod(shape)))
    for some in (points[k : k + several] for k in range(0, len(points), several)):
        numbers = np.array(some, np.int64).reshape(len(some), len(phase.reds), *(1 for _ in loops))
        here = {**env, **{r.name: numbers[:, k] for k, r in enumerate(phase.reds)}}
        values = _graph(phase.body, here, memory, [])
        found = [tuple(np.broadcast_to(values[v], (len(some), *shape)) for v in acc.values) for acc in phase.accs]
        for number in range(len(some)):
            terms = [tuple(value[number] for value in acc) for acc in found]
            if not totals:
                totals = [tuple(np.array(t) for t in term) for term in terms]
            else:
                totals = [combine(a.combine, a.dtype, t, n) for a, t, n in zip(phase.accs, totals, terms, strict=True)]
    results = _graph(phase.exit, env, memory, [t[-1] for t in totals])
    for store in phase.stores:
        address = np.broadcast_to(_index(store.address, env, results), shape)
        value = np.broadcast_to(stored(results[store.value], phase.exit.nodes[store.value].dtype), shape)
        if store.guards:
            holds = np.broadcast_to(_guards(store.guards, env, results), shape)
            address, value = address[holds], value[holds]
        memory[store.buffer].store(address, value, bool(phase.when))


def _graph(graph: Graph, env: Mapping[str, Any], memory: Mapping[str, _Memory], accs: Sequence[Any]) -> Values:
    values: Values = {}
    for number, node in enumerate(graph.nodes):
        values[number] = _node(graph, node, env, memory, accs, values)
    return values


def _node(
    graph: Graph,
    node: Node,
    env: Mapping[str, Any],
    memory: Mapping[str, _Memory],
    accs: Sequence[Any],
    values: Values,
) -> Any:
    if node.op == "const":
        return np.asarray(node.value).astype(numpy_dtype(node.dtype)).astype(carried(node.dtype))
    if node.op == "acc":
        return accs[int(str(node.attr("number")))]
    if node.op == "index":
        assert node.index is not None
        return np.asarray(_index(node.index, env, values)).astype(numpy_dtype(node.dtype)).astype(carried(node.dtype))
    if node.op == "guard":
        return _guards(node.guards, env, values)
    if node.op == "load":
        assert node.index is not None
        address, mask = _index(node.index, env, values), None
        if node.guards:
            address, mask = np.broadcast_arrays(address, _guards(node.guards, env, values))
        found = memory[node.buffer].load(np.asarray(address), mask).astype(carried(node.dtype))
        if mask is None:
            return found
        fill = np.asarray(node.value).astype(numpy_dtype(node.dtype)).astype(carried(node.dtype))
        return np.where(mask, found, fill)
    types = [graph.nodes[a].dtype for a in node.args]
    return apply(node.op, node.dtype, types, [values[a] for a in node.args], dict(node.attrs))


def _guards(guards: Sequence[Guard], env: Mapping[str, Any], values: Values) -> np.ndarray:
    holds = np.asarray(True)
    for guard in guards:
        index = np.asarray(_index(guard.index, env, values))
        if guard.low is not None:
            holds = holds & (index >= guard.low)
        if guard.high is not None:
            holds = holds & (index <= guard.high)
    return holds


def _index(index: Index, env: Mapping[str, Any], values: Values) -> Any:
    """The number (or array of numbers) that an index expression has."""
    total: Any = index.const
    for atom, coef in index.terms:
        if atom.kind == "axis":
            if atom.name not in env:
                raise IRError(f"axis {atom.name!r} is used outside its loop")
            part = env[atom.name]
        elif atom.kind == "value":
            part = values[atom.value].astype(np.int64)
        else:
            assert atom.inner is not None
            inner = _index(atom.inner, env, values)
            part = inner // atom.modulus if atom.kind == "div" else inner % atom.modulus
        total = total + coef * part
    return total

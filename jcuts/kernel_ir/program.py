"""Kernel programs, the loop-nest IR of one generated kernel: buffers, loop nests (*phases*) of data-flow graphs.

They are plain data, independent of process and device.

A `Program` is a list of phases that one task (a tile of the grid) runs in order.  A phase is a loop nest over output
axes with a data-flow graph in it: the *body* graph runs inside the reduction loops and feeds accumulators, the *exit*
graph runs after them and feeds stores (thesis 3.3.1, "looped operation").  A phase without reductions has only an exit
graph.  Register-level fusion is one phase with concatenated graphs; shared-memory-level fusion is several phases that
pass values through a local buffer, which on a CPU is a cache-resident piece of scratch memory.

Programs are JSON: a worker process compiles them, golden tests print them, caches are keyed by `Program.digest`.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace

from jcuts.base import keys
from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.json_schema import FORMAT, ITEM_SIZE, check, parsed
from jcuts.kernel_ir.node import Graph, Guard, Node

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "ITEM_SIZE",
    "Acc",
    "Axis",
    "Buffer",
    "Grid",
    "Offset",
    "Phase",
    "Program",
    "Red",
    "Store",
]


ALIGNMENT = 16
"""Bytes that divide the address of every buffer, and run-time offsets: what an access of several elements relies on."""


@dataclass(frozen=True)
class Offset:
    """A run-time offset of all addresses of a result: ``clip(start, 0, limit) * stride`` elements, ``start`` being the
    one element of an operand (a dynamic-update-slice).
    """

    start: str
    limit: int
    stride: int

    @property
    def most(self) -> int:
        """The largest offset [elements]."""
        return self.limit * self.stride

    def __str__(self) -> str:
        return f"clip({self.start}, 0, {self.limit}) * {self.stride}"


@dataclass(frozen=True)
class Buffer:
    """A dense row-major array. ``role`` is 'in', 'out', 'local' (private to the running task), or in one of several
    kernels of a program 'scratch' (memory of the call, which its tasks read and write).

    ``tf32``: a float32 operand whose values are TF32 numbers (the low 13 bits are 0). ``offset``: of a result.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    tf32: bool = False
    offset: Offset | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.size * ITEM_SIZE[self.dtype]

    @property
    def reach(self) -> int:
        """Elements that addresses may reach without the run-time offset."""
        return self.size - (0 if self.offset is None else self.offset.most)

    def to_json(self) -> list[object]:
        """Plain data."""
        row: list[object] = [self.name, self.dtype, list(self.shape), self.role]
        if self.offset is not None:
            return [*row, self.tf32, [self.offset.start, self.offset.limit, self.offset.stride]]
        return [*row, True] if self.tf32 else row

    @staticmethod
    def from_json(row: list) -> Buffer:
        """The inverse of `to_json`."""
        name, dtype, shape, role, *more = row
        offset = Offset(*more[1]) if len(more) > 1 else None
        return Buffer(name, dtype, tuple(shape), role, bool(more and more[0]), offset)


@dataclass(frozen=True)
class Axis:
    """An output loop: ``unroll`` points (vectors, where ``vector``) form a register tile."""

    name: str
    extent: int
    unroll: int = 1
    vector: bool = False


@dataclass(frozen=True)
class Red:
    """A reduction loop.  ``unroll`` points per iteration; ``chains`` independent accumulators hide the latency."""

    name: str
    extent: int
    unroll: int = 1
    vector: bool = False
    chains: int = 1


@dataclass(frozen=True)
class Acc:
    """An accumulator of the body graph.

    ``combine``: add, mul, max, min, and, or, xor; or argmax/argmin, whose contribution is (value, position) and
    whose dtype is the value's, ``index_dtype`` the position's.
    """

    combine: str
    dtype: str
    values: tuple[int, ...]
    index_dtype: str = ""


@dataclass(frozen=True)
class Store:
    """``buffer[address] = value`` for every point of the phase at which the guards hold.

    Guards must not depend on the lane axis: they are for tiles that reach beyond the result.
    """

    buffer: str
    address: Index
    value: int
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class Phase:
    """A loop nest with its body and exit graphs.  ``axes`` outermost first; ``reds`` outermost first, inside them.

    A phase inside serial loops need not run in each of their steps: ``once`` names serial axes at whose first value in
    the task alone it runs (what it leaves in local buffers stays), ``last`` those at whose last value, ``when`` a local
    bool buffer whose first element must be true (a correction that is rarely needed; it may write results that an
    earlier phase has written).
    """

    name: str
    axes: tuple[Axis, ...]
    reds: tuple[Red, ...]
    accs: tuple[Acc, ...]
    body: Graph
    exit: Graph
    stores: tuple[Store, ...]
    once: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    when: str = ""

    @property
    def vector_axis(self) -> Axis | Red | None:
        """The axis along which lanes run, or None for a scalar phase."""
        for axis in (*self.axes, *self.reds):
            if axis.vector:
                return axis
        return None

    def ranges(self) -> dict[str, int]:
        """Extent of every axis of the phase."""
        return {axis.name: axis.extent for axis in (*self.axes, *self.reds)}


@dataclass(frozen=True)
class Grid:
    """Tiles an axis over the grid: one task per block (times the blocks of the other grid axes)."""

    axis: str
    extent: int
    block: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return max(1, -(-self.extent // self.block))


@dataclass(frozen=True)
class Program:
    """The IR of one kernel.  ``serial`` axes are grid axes whose loop surrounds all phases (a row at a time)."""

    name: str
    buffers: tuple[Buffer, ...]
    grid: tuple[Grid, ...]
    serial: tuple[str, ...]
    phases: tuple[Phase, ...]
    lanes: int
    template: str = ""
    params: tuple[tuple[str, object], ...] = ()

    @property
    def tiles(self) -> int:
        """Number of independent tasks."""
        total = 1
        for grid in self.grid:
            total *= grid.blocks
        return total

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """Operands, in call order."""
        return tuple(b for b in self.buffers if b.role == "in")

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """Results, in call order."""
        return tuple(b for b in self.buffers if b.role == "out")

    @property
    def locals(self) -> tuple[Buffer, ...]:
        """Scratch arrays of one running task."""
        return tuple(b for b in self.buffers if b.role == "local")

    def local_offsets(self) -> dict[str, int]:
        """Byte offset of each local buffer in the task's scratch memory (64-byte aligned)."""
        offsets, total = {}, 0
        for buffer in self.locals:
            offsets[buffer.name] = total
            total += -(-(buffer.bytes + 64) // 64) * 64
        return offsets

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of one running task."""
        return sum(-(-(b.bytes + 64) // 64) * 64 for b in self.locals)

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise IRError(f"program {self.name} has no buffer {name!r}")

    @functools.cached_property
    def digest(self) -> str:
        """Content hash: equal programs have equal digests in every process. The name is not part of it."""
        return keys.kernel_program(self.to_json())

    def renamed(self, name: str) -> Program:
        """The same kernel under another name."""
        return replace(self, name=name)

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "format": FORMAT,
            "name": self.name,
            "template": self.template,
            "params": [list(p) for p in self.params],
            "lanes": self.lanes,
            "buffers": [b.to_json() for b in self.buffers],
            "grid": [[g.axis, g.extent, g.block] for g in self.grid],
            "serial": list(self.serial),
            "phases": [_phase_json(p) for p in self.phases],
        }

    @staticmethod
    def from_json(data: dict | str) -> Program:
        """The inverse of `to_json` (plain data, or its JSON text).

        Raises: SchemaError for data of another form (`kernel_ir.json_schema`), IRError for graphs that are none.
            Whether the program is one that may be compiled is for `kernel_ir.verify` to say.
        """
        data = check(parsed(data) if isinstance(data, str) else data)
        return Program(
            name=data["name"],
            template=data["template"],
            params=tuple((k, _hashable(v)) for k, v in data["params"]),
            lanes=data["lanes"],
            buffers=tuple(Buffer.from_json(row) for row in data["buffers"]),
            grid=tuple(Grid(*g) for g in data["grid"]),
            serial=tuple(data["serial"]),
            phases=tuple(_phase_from_json(p) for p in data["phases"]),
        )

    def to_text(self) -> str:
        """Canonical JSON text (the format in which worker processes receive it)."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))


def _phase_json(phase: Phase) -> dict[str, object]:
    data: dict[str, object] = {
        "name": phase.name,
        "axes": [[a.name, a.extent, a.unroll, a.vector] for a in phase.axes],
        "reds": [[r.name, r.extent, r.unroll, r.vector, r.chains] for r in phase.reds],
        "accs": [[a.combine, a.dtype, list(a.values), a.index_dtype] for a in phase.accs],
        "body": _graph_json(phase.body),
        "exit": _graph_json(phase.exit),
        "stores": [
            [s.buffer, s.address.to_json(), s.value, *([_guards_json(s.guards)] if s.guards else [])]
            for s in phase.stores
        ],
    }
    if phase.once:
        data["once"] = list(phase.once)
    if phase.last:
        data["last"] = list(phase.last)
    if phase.when:
        data["when"] = phase.when
    return data


def _phase_from_json(data: dict) -> Phase:
    return Phase(
        name=data["name"],
        axes=tuple(Axis(*a) for a in data["axes"]),
        reds=tuple(Red(*r) for r in data["reds"]),
        accs=tuple(Acc(c, d, tuple(v), i) for c, d, v, i in data["accs"]),
        body=_graph_from_json(data["body"]),
        exit=_graph_from_json(data["exit"]),
        stores=tuple(Store(b, Index.from_json(a), v, _guards_from_json(*g)) for b, a, v, *g in data["stores"]),
        once=tuple(data.get("once", ())),
        last=tuple(data.get("last", ())),
        when=data.get("when", ""),
    )


def _guards_json(guards: tuple[Guard, ...]) -> list[object]:
    return [[g.index.to_json(), g.low, g.high] for g in guards]


def _guards_from_json(rows: list | tuple = ()) -> tuple[Guard, ...]:
    return tuple(Guard(Index.from_json(i), lo, hi) for i, lo, hi in rows)


def _graph_json(graph: Graph) -> list[object]:
    rows: list[object] = []
    for node in graph.nodes:
        row: dict[str, object] = {"op": node.op, "dtype": node.dtype}
        if node.args:
            row["args"] = list(node.args)
        if node.buffer:
            row["buffer"] = node.buffer
        if node.index is not None:
            row["index"] = node.index.to_json()
        if node.guards:
            row["guards"] = _guards_json(node.guards)
        if node.value is not None:
            row["value"] = node.value.hex() if isinstance(node.value, float) else node.value
        if node.attrs:
            row["attrs"] = [list(a) for a in node.attrs]
        rows.append(row)
    return rows


def _graph_from_json(rows: list) -> Graph:
    graph = Graph()
    for row in rows:
        value = row.get("value")
        if isinstance(value, str):
            value = float.fromhex(value)
        node = Node(
            row["op"],
            row["dtype"],
            tuple(row.get("args", ())),
            row.get("buffer", ""),
            Index.from_json(row["index"]) if "index" in row else None,
            _guards_from_json(row.get("guards", ())),
            value,
            tuple((k, _hashable(v)) for k, v in row.get("attrs", ())),
        )
        if graph.add(node) != len(graph.nodes) - 1:
            raise IRError("kernel program holds the same node twice")
    return graph


def _hashable(value: object) -> object:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value

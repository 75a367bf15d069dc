"""Buffer liveness of a jaxpr as XLA would fuse it: which values are buffers, and how many bytes are live at once.

Where `plan.cost.jaxpr` counts equation by equation, calls are inlined here and element-wise chains have no buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import jax
import numpy as np

from jcuts.base.csv_file import read_csv
from jcuts.plan.cost.expanded_jaxpr import (
    Node,
    Value,
    body_of,
    expanded,
    inlined,
    is_conditional,
    is_kept_loop,
)
from jcuts.plan.cost.jaxpr import bytes_of, inner, trace
from jcuts.plan.cost.primitive_kinds import BUFFERS
from jcuts.plan.cost.program_memory import buffer_ownership, instruction_schedule, loop_stacks
from jcuts.plan.cost.program_memory.buffer_ownership import opaque_node
from jcuts.plan.cost.program_memory.heap_simulation import Buffer, Lifetime, Timeline
from jcuts.trace import jaxapi


@dataclass(frozen=True)
class Footprint:
    """Bytes per device of one call: arguments, results, of which ``aliased`` reuse donated arguments, and
    temporaries; ``live`` are the temporaries at the peak, the largest first."""

    arguments: float
    results: float
    aliased: float
    temporary: float
    live: tuple[Buffer, ...] = ()

    @property
    def peak(self) -> float:
        """arguments + results - aliased + temporary, as ``compiled.memory_analysis()`` adds up."""
        return self.arguments + self.results - self.aliased + self.temporary


def footprint(
    function: Callable, *arguments: Any, donated: Sequence[int] = (), backend: Literal["gpu", "cpu"] = "gpu"
) -> Footprint:
    """Memory that a call needs per device, from liveness over its jaxpr.

    Values that fuse are never buffers: an elementwise result, a broadcast, a reshape.  A loop's carry is one buffer.
    Inside ``shard_map`` shapes are per device; outside, a value is divided as the ``shard_map`` that it enters or
    leaves says, and elementwise results as their operands.

    Args: donated: positions of arguments whose buffers results may take; backend: whose compiler is asked (XLA's CPU
        compiler writes transposed operands of products once more, and schedules a loss last).
    Raises: NotJaxError if the function cannot be traced.
    """
    closed = trace(function, arguments)
    given = [Value(v.aval) for v in closed.invars]
    nodes, outs = inlined(closed, given)
    share = shares(nodes)
    sizes = [bytes_of(v) * share.get(v, 1.0) for v in given]
    results = [(v, bytes_of(v) * share.get(v, 1.0)) for v in outs if v is not None]
    ends = np.cumsum([0, *(len(jax.tree.leaves(argument)) for argument in arguments)])
    free = sum(sum(sizes[ends[i] : ends[i + 1]]) for i in donated)
    total = sum(size for _, size in results)
    nodes, outs = expanded(nodes, outs)
    timeline = Timeline()
    _Run(_Program(nodes, given, outs, share), backend, timeline).run()
    return Footprint(sum(sizes), total, min(free, total), timeline.height(), timeline.live())


def live_at(closed: jaxapi.Closed, primitive: str) -> tuple[int, ...]:
    """Bytes that are live while each equation of a primitive runs, in program order: arguments, results, temporaries.

    Bodies of loops that stay loops count once, as `footprint` counts them; the equation's own operands and result are
    among them, what it needs only while it runs is not.
    """
    given = [Value(v.aval) for v in closed.jaxpr.invars]
    constants = sum(np.asarray(c).nbytes if not hasattr(c, "nbytes") else c.nbytes for c in closed.consts)
    nodes, outs = inlined(closed.jaxpr, given)
    held = constants + sum(map(bytes_of, given)) + sum(bytes_of(v) for v in outs if v is not None)
    nodes, outs = expanded(nodes, outs)
    timeline = Timeline()
    _Run(_Program(nodes, given, outs, {}), "gpu", timeline).run()
    return tuple(int(held + timeline.bytes_at(instant)) for name, instant in timeline.ran if name == primitive)


def shares(nodes: list[Node]) -> dict[Value, float]:
    """Fraction of each value per device, where a ``shard_map`` determines it; elementwise neighbours are
    sharded alike.
    """
    share: dict[Value, float] = {}
    for node in nodes:
        if node.name == "shard_map":
            body = inner(node.equation)[0][0]
            for value, inside in zip(node.arguments, body.invars, strict=True):
                if value is not None:
                    share.setdefault(value, bytes_of(inside) / max(bytes_of(value), 1.0))
            for value, inside in zip(node.outputs, body.outvars, strict=True):
                share.setdefault(value, bytes_of(inside) / max(bytes_of(value), 1.0))
    for _ in range(2):
        for node in nodes:
            same = (
                [v for v in (*node.inputs, *node.outputs) if v.aval.shape == node.outputs[0].aval.shape]
                if node.outputs
                else []
            )
            known = [share[v] for v in same if v in share]
            if known and node.name not in BUFFERS and not inner(node.equation):
                for v in same:
                    share.setdefault(v, min(known))
    return share


@dataclass(frozen=True)
class _Program:
    """Nodes with inputs, results and fractions of values per device.

    loop: whose body it is, if that stays a loop; branch: whether it is a conditional's, which makes the results.
    """

    nodes: list[Node]
    given: list[Value]
    outs: Sequence[Value | None]
    share: dict[Value, float]
    loop: Any = None
    branch: bool = False


def _program(node: Node, jaxpr: Any) -> _Program:
    """A node's own program; its inputs and results are accounted by the caller, but for the copies that a turn of a
    loop makes, and for the results of a conditional."""
    nodes, outs, given = body_of(node, jaxpr)
    loop = node.equation if is_kept_loop(node.equation) else None
    return _Program(nodes, given, outs, {}, loop, is_conditional(node))


def _buffer(v: Value, size: float, primitive: str) -> Buffer:
    return Buffer(size, primitive, tuple(v.aval.shape), str(v.aval.dtype))


@cache
def workspace() -> float:
    """Bytes that XLA gives to each call of cuBLAS on Hopper."""
    table = str(resources.files("jcuts.plan") / "data" / "xla_gpu_workspace.csv")
    return float(read_csv(table)[0]["bytes"])


class _Run:
    """One run of a program through a timeline: allocates and frees its temporaries, and those of the programs inside.

    owner: whose buffer a value has; kept: buffers of the caller; last: position of the last use; early: by position,
    what is made before its place; slices: copied out of what a loop runs over.
    """

    def __init__(self, program: _Program, backend: str, timeline: Timeline) -> None:
        self.program, self.gpu, self.backend, self.timeline = program, backend == "gpu", backend, timeline
        outs, loop = program.outs, program.loop
        self.given = set(program.given)
        self.nodes = _scheduled(program, backend)
        self.owner = buffer_ownership.owners(self.nodes, outs)
        self.kept = {self.owner.get(v, v) for v in outs if v is not None}
        self.slices: set[Value] = set()
        late: set[Value | None] = set()
        if loop is not None:
            inward, outward = loop_stacks.copied(loop, self.nodes, program.given, outs, self.owner)
            self.slices = set(inward)
            late = {self.owner.get(v, v) for v in outward} & self.kept
            self.kept -= late
        self.early = loop_stacks.stacks_of_zeros(self.nodes, self.owner, self.kept) if self.gpu else {}
        self.last = buffer_ownership.last_uses(self.nodes, self.owner)
        if program.branch:  # made here, and the caller's from then on
            late, self.kept = late | self.kept, set()
        if self.gpu or program.branch:  # copied into the stacks at the end of a turn
            self.last |= dict.fromkeys((v for v in late if v is not None), len(self.nodes))
        self.flat = buffer_ownership.flattened(self.nodes, self.owner)
        self.fused = {v for node in self.nodes if not opaque_node(node) for v in node.outputs if self.owner[v] is v}
        self.twice = set() if self.gpu else buffer_ownership.two_layouts(self.nodes, self.owner) & self.fused
        self.alive: dict[Value, Lifetime] = {}
        self.transposed: set[Value] = set()

    def run(self) -> None:
        """Runs all nodes."""
        for position, node in enumerate(self.nodes):
            self.timeline.now += 1
            self.timeline.ran.append((node.name, self.timeline.now))
            self._prefetch(position, node)
            dying = [v for v in self.alive if self.last.get(v, -1) <= position]
            made = [v for v in node.outputs if self._is_made(v)]
            if is_conditional(node):  # its branches make its results
                self._inside(node)
            for v in made:
                self.last.setdefault(v, position)
                self._make(v, node, dying)
            if self.gpu and is_kept_loop(node.equation):
                self._transpose_stacks(node)
            scratch = self._scratch(node)
            if scratch.bytes:
                self.timeline.free(self.timeline.allocate(scratch))
            if not is_conditional(node):
                self._inside(node)
            for v in [v for v in self.alive if self.last.get(v, -1) <= position]:
                self.timeline.free(self.alive.pop(v))
        self.timeline.now += self.program.branch
        for lifetime in self.alive.values():
            self.timeline.free(lifetime)

    def _allocate(self, v: Value, primitive: str) -> None:
        size = bytes_of(v) * self.program.share.get(v, 1.0) * (2 if v in self.twice else 1)
        self.alive[v] = self.timeline.allocate(_buffer(v, size, primitive))

    def _is_made(self, v: Value) -> bool:
        """Whether a node writes a new buffer for its result."""
        caller = v in self.kept or v in self.given
        return self.owner[v] is v and not caller and v not in self.alive

    def _prefetch(self, position: int, node: Node) -> None:
        """What is made before a node: slices that it needs as buffers (a GPU copies them from the start of a turn, in
        streams of their own), and stacks."""
        read = {self.owner.get(v, v) for v in node.inputs} if opaque_node(node) else set()
        for v in self.slices - set(self.alive):
            if v in read or (self.gpu and position == 0):
                self._allocate(v, "dynamic_slice")
        for v, primitive in self.early.get(position, ()):
            self._allocate(v, primitive)

    def _make(self, v: Value, node: Node, dying: list[Value]) -> None:
        """Allocates a result, or lets it take the buffer of an operand that a fused kernel reads last."""
        old = next((old for old in dying if buffer_ownership.is_same_array(v, old)), None)
        if old is None or opaque_node(node) or v in self.flat:
            self._allocate(v, node.name)
        else:
            dying.remove(old)
            self.alive[v] = self.alive.pop(old)

    def _transpose_stacks(self, loop: Node) -> None:
        """Copies the stacks of an earlier loop into the layout that this one reads; remembers those of this one."""
        for v in self.transposed & {self.owner.get(v, v) for v in loop.inputs} & set(self.alive):
            stack = self.alive[v]
            self._allocate(v, "transpose")
            self.timeline.free(stack)
            self.timeline.now += 1
        self.transposed |= loop_stacks.transposed_stacks(loop)

    def _scratch(self, node: Node) -> Buffer:
        """What a product needs while it runs: transposed copies on a CPU, the workspace of a library on a GPU."""
        if not self.gpu:
            return Buffer(buffer_ownership.transposed_copies(node, self.owner, self.fused), "copy")
        return Buffer(workspace() if node.name == "dot_general" else 0.0, "workspace")

    def _inside(self, node: Node) -> None:
        """Runs the programs of a node.

        A loop of more than one turn holds its carry twice, where the body still reads the old while it writes the new.
        """
        again = buffer_ownership.doubled_carries(node, scatters=self.gpu) if is_kept_loop(node.equation) else []
        held = [self.timeline.allocate(_buffer(v, bytes_of(v), "carry")) for v in again]
        for body, _ in inner(node.equation):
            _Run(_program(node, body), self.backend, self.timeline).run()
        for lifetime in held:
            self.timeline.free(lifetime)


def _scheduled(program: _Program, backend: str) -> list[Node]:
    """The nodes in the order in which XLA's compiler for a backend runs them."""
    nodes, loop = program.nodes, program.loop
    if backend == "cpu":
        return instruction_schedule.scalars_last(nodes, program.outs)
    if loop is not None:
        nodes = instruction_schedule.carry_first(nodes, program.outs[: jaxapi.scan_carries(loop)])
    return instruction_schedule.collectives_late(nodes)

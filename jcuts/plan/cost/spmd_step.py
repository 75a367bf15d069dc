"""Cost model of an existing SPMD step: any JAX function with its own ``shard_map``s and collectives, on any cluster.

Where the planner prices the program that a plan implies, this prices a given one: every GEMM at its shape and type,
every fused kernel by the bytes it reads and writes, every collective by its members and bytes, loops by their trip
count.  Nothing is allocated, compiled or run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jcuts.base.errors import UsageError
from jcuts.plan.cost import collectives
from jcuts.plan.cost.compute import gemm_time
from jcuts.plan.cost.expanded_jaxpr import Node, Value, inlined, is_kept_loop
from jcuts.plan.cost.jaxpr import bytes_of, inner, products_of, trace
from jcuts.plan.cost.primitive_kinds import BUFFERS, COLLECTIVES, UPDATES, VIEWS
from jcuts.plan.cost.program_memory.buffer_ownership import owners
from jcuts.plan.cost.program_memory.jaxpr_liveness import shares
from jcuts.plan.cost.program_memory.loop_stacks import copied
from jcuts.plan.spec.cluster import Cluster, Gpu
from jcuts.trace import jaxapi

SLICES = frozenset({"gather", "dynamic_slice"})
"""Read only what they return."""


@dataclass
class StepTime:
    """Seconds of a step by part; the parts add up.

    products: matrix products and convolutions; kernels: everything else that moves memory; gaps: between kernels;
    collectives: seconds by kind.  calls: kernels launched; flops: of the products; moved: bytes of the kernels.
    """

    products: float = 0.0
    kernels: float = 0.0
    gaps: float = 0.0
    collectives: dict[str, float] = field(default_factory=dict)
    calls: float = 0.0
    flops: float = 0.0
    moved: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.products + self.kernels + self.gaps + sum(self.collectives.values())

    def add(self, other: StepTime, times: float) -> None:
        """Adds ``times`` runs of a part."""
        for name in ("products", "kernels", "gaps", "calls", "flops", "moved"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, seconds in other.collectives.items():
            self.collectives[kind] = self.collectives.get(kind, 0.0) + times * seconds


def step_time(function: Callable, *arguments: Any, cluster: Cluster) -> StepTime:
    """Predicts the time of ``function(*arguments)`` run on every device at once (SPMD).

        step = sum over products t(m, n, k) + sum over kernels bytes/bandwidth + kernels x gap + sum over collectives

    Kernels are what fusion leaves: elementwise chains, views and broadcasts cost nothing of their own, and elementwise
    results of one shape that feed each other are one kernel with several results.  Of a conditional the dearest branch
    counts, wherever it is taken, a ``while`` counts once; nothing overlaps.  Collectives are those that the program
    writes (``shard_map``): what GSPMD would insert for shardings is not known before compiling.  What a loop stacks up
    (a ``scan``'s results per turn: what its backward pass needs) is filled with zeros before it; no kernel fuses across
    the edge of a loop: see ``liveness.copied``.

    Args: arguments: may be ``ShapeDtypeStruct`` trees.
    Raises: NotJaxError (cannot be traced), UsageError (more devices in its mesh than the cluster has).
    """
    jaxpr = trace(function, arguments)
    return _program(jaxpr, cluster, {})


def _program(jaxpr: Any, cluster: Cluster, mesh: dict[str, int], loop: Any = None) -> StepTime:
    """Prices a program; as one turn of ``loop``, if that is given."""
    given = [Value(v.aval) for v in jaxpr.invars]
    nodes, outs = inlined(jaxpr, given)
    nodes = _needed(nodes, outs)
    owner, share = owners(nodes, outs), shares(nodes)
    made = StepTime()
    kernels = _Kernels(share)
    if loop is not None:
        slices, results = copied(loop, nodes, given, outs, owner)
        for v in (*slices, *results):
            kernels.alone(2 * kernels.size(v))
    for node in nodes:
        bases = kernels.read(node, owner)
        bodies = inner(node.equation)
        if node.name in COLLECTIVES:
            _collective(made, node, cluster, mesh, share)
        elif bodies:
            inside = mesh
            if node.name == "shard_map":
                inside = mesh | dict(node.equation.params["mesh"].shape)
                _check(cluster, inside)
            branches = node.equation.params["branches"] if node.name == "cond" else [body for body, _ in bodies]
            times = bodies[0][1] if node.name == "scan" else 1.0
            turns = node.equation if is_kept_loop(node.equation) else None
            if turns is not None:
                kernels.clear(node, turns)
            costs = [_program(getattr(b, "jaxpr", b), cluster, inside, turns) for b in branches]
            made.add(max(costs, key=lambda cost: cost.seconds), times)
        elif (product := products_of(node.equation)) is not None:
            made.products += _product(cluster.gpu, product, node, share)
            made.flops += 2.0 * product.m * product.n * product.k * product.batch
            made.calls += 1
        elif node.name in VIEWS or all(owner[v] is None for v in node.outputs):
            continue
        else:
            kernels.write(node, bases, owner)
    made.moved += kernels.bytes
    made.calls += kernels.count
    made.kernels += kernels.bytes / (cluster.gpu.bandwidth * cluster.gpu.memory_efficiency)
    # What bodies added has its own gaps already.
    own = kernels.count + sum(1 for node in nodes if products_of(node.equation) is not None)
    made.gaps += own * cluster.gpu.kernel_gap
    return made


def _needed(nodes: Sequence[Node], outs: Sequence[Value | None]) -> list[Node]:
    """Without what nothing uses (XLA removes it; recomputation's last product is such)."""
    wanted = {v for v in outs if v is not None}
    kept = []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]


@dataclass(eq=False)
class _Kernel:
    """One fused kernel: buffers that it reads (bytes each) and writes; ``level`` as in ``_Kernels``."""

    count: int
    level: int
    read: dict[Value, float] = field(default_factory=dict)
    written: dict[Value, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return sum(self.written.values()) + sum(size for v, size in self.read.items() if v not in self.written)


class _Kernels:
    """Fused kernels of one program and the bytes that they move.

    A value's level is how many products, loops, reductions and the like lie before it: elementwise results of one
    level and shape that feed each other, directly or through a third, are one kernel; across levels they cannot be.
    """

    def __init__(self, share: dict[Value, float]) -> None:
        self.share = share
        self.roots: dict[Value, set[Value]] = {}  # buffers that a value which fuses away is computed from
        self.level: dict[Value, int] = {}
        self.made_by: dict[Value, _Kernel] = {}
        self.all: set[_Kernel] = set()
        self.moved, self.single = 0.0, 0  # of kernels that nothing fuses with

    @property
    def bytes(self) -> float:
        """Moved by all kernels."""
        return self.moved + sum(kernel.bytes for kernel in self.all)

    @property
    def count(self) -> int:
        """Kernels."""
        return self.single + len(self.all)

    def size(self, v: Value) -> float:
        """Bytes on one device."""
        return bytes_of(v) * self.share.get(v, 1.0)

    def alone(self, moved: float) -> None:
        """A kernel that nothing fuses with."""
        self.moved, self.single = self.moved + moved, self.single + 1

    def clear(self, node: Node, loop: Any) -> None:
        """Fills a loop's stacks with zeros: one constant for all of a shape and type, which all but one copy."""
        seen: set[tuple] = set()
        for position in range(jaxapi.scan_carries(loop), len(loop.outvars)):
            v = node.outputs[position]
            kind = (v.aval.shape, v.aval.dtype)
            self.alone(self.size(v) * (2 if kind in seen else 1))
            seen.add(kind)

    def read(self, node: Node, owner: dict[Value, Value | None]) -> set[Value]:
        """Buffers that a node reads, through what fuses into it."""
        bases: set[Value] = set()
        for v in node.inputs:
            base = owner.get(v, v)
            bases |= self.roots.get(v, set()) if base is None else {base}
        level = max((self.level.get(v, 0) for v in node.inputs), default=0)
        level += node.name in BUFFERS or bool(inner(node.equation))
        for v in node.outputs:
            self.level[v] = level
            if owner.get(v, v) is None:
                self.roots[v] = bases
        return bases

    def write(self, node: Node, bases: set[Value], owner: dict[Value, Value | None]) -> None:
        """A kernel for a node's results, or further results of the kernels that its operands come from."""
        out = sum(self.size(v) for v in node.outputs)
        if node.name in SLICES:
            self.alone(2 * out)
        elif node.name in UPDATES:
            updates = sum(self.size(v) for v in node.inputs[1:])
            fresh = out if owner.get(node.inputs[0], node.inputs[0]) is None else 0.0  # a constant to begin with
            self.alone(3 * updates + fresh)
        elif node.name in BUFFERS:
            self.alone(out + sum(map(self.size, bases)))
        else:
            count = math.prod(node.outputs[0].aval.shape)
            level = self.level[node.outputs[0]]
            mine = _Kernel(count, level)
            for kernel in {self.made_by[v] for v in bases if v in self.made_by}:
                if (kernel.count, kernel.level) == (count, level):
                    mine.read |= kernel.read
                    mine.written |= kernel.written
                    self.all.discard(kernel)
            for v in bases:  # an elementwise result needs no more of an operand than it has values
                mine.read[v] = min(self.size(v), count * _width(v) * self.share.get(v, 1.0))
            mine.written |= {v: self.size(v) for v in node.outputs}
            self.all.add(mine)
            for v in mine.written:
                self.made_by[v] = mine


def _width(v: Value) -> int:
    return np.dtype(v.aval.dtype).itemsize


def _product(gpu: Gpu, product: Any, node: Node, share: dict[Value, float]) -> float:
    """Seconds of a product; of 32-bit operands at half the 16-bit speed (TF32, XLA's default)."""
    part = share.get(node.outputs[0], 1.0)
    return part * float(gemm_time(gpu, product.m, product.n, product.k, product.batch, width=product.bytes))


def _check(cluster: Cluster, mesh: dict[str, int]) -> None:
    devices = math.prod(mesh.values())
    if devices > cluster.gpus:
        raise UsageError(
            f"the step's mesh has {devices} devices, {cluster.name} has {cluster.gpus}",
            need=devices,
            have=cluster.gpus,
        )


def _collective(made: StepTime, node: Node, cluster: Cluster, mesh: dict[str, int], share: dict[Value, float]) -> None:
    """Adds a collective; devices lie in the mesh's order, its last axis within a node first."""
    params = node.equation.params
    named = params.get("axes", params.get("axis_name", ()))
    axes = [name for name in (named if isinstance(named, tuple | list) else (named,)) if name in mesh]
    members = math.prod(mesh[name] for name in axes)
    if members < 2:
        return
    place = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    group = place[tuple(slice(None) if name in axes else 0 for name in mesh)].ravel()
    near = int(np.count_nonzero(group < cluster.gpus_per_node))
    kind = COLLECTIVES[node.name]
    size = sum(bytes_of(v) * share.get(v, 1.0) for v in node.inputs)
    whole = size * members if kind == "all-gather" else size
    links = (cluster.intra, cluster.inter)
    if kind == "collective-permute":
        took = collectives.point_to_point(*links, near < members, size)
    else:
        price = {
            "all-reduce": collectives.all_reduce,
            "all-gather": collectives.all_gather,
            "reduce-scatter": collectives.reduce_scatter,
            "all-to-all": collectives.all_to_all,
        }[kind]
        took = price(*links, members, max(near, 1), whole)
    made.collectives[kind] = made.collectives.get(kind, 0.0) + float(took)

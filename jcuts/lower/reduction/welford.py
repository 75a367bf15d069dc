"""One-pass mean and variance (Welford; Chan's merge): recognises two-pass statistics, makes the programs of one pass.

A program that first sums ``x`` and then ``(x - c)**2``, with ``c`` made from the sum, reads its operand twice.  With
count n, the mean m and the sum of squared deviations M of any points, the second sum is ``M + n * (m - c)**2``, and (n,
m, M) of two sets give those of their union (Chan, Golub, LeVeque: Updating formulae, 1979), as accurately as two passes
do.  `codegen.cuda.reduction.welford` emits that pass; the programs made here keep their two phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index, flatten, unflatten
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Acc, Axis, Buffer, Grid, Phase, Program, Red, Store

GROUP = "s"
TERM = "f"
MEAN = "mean"  # the local buffer of the first kernel


@dataclass(frozen=True)
class MeanVariance:
    """Result of `match_welford`: the local buffer that holds ``c``, and the node of ``x`` in the first body."""

    centre: str
    value: int


def match_welford(program: Program) -> MeanVariance | None:
    """Matches the first two phases of a program to mean and sum of squares; None where they are not."""
    if len(program.phases) < 2 or any(p.reds for p in program.phases[2:]):
        return None
    first, second = program.phases[:2]
    if not first.reds or not second.reds or len(first.accs) != 1 or len(second.accs) != 1:
        return None
    one, other = first.accs[0], second.accs[0]
    if (one.combine, other.combine) != ("add", "add") or one.dtype not in ("float32", "float64"):
        return None
    root = second.body.nodes[other.values[0]]
    if one.dtype != other.dtype or root.dtype != one.dtype:
        return None
    if root.op == "square" or (root.op == "mul" and root.args[0] == root.args[1]):
        difference = second.body.nodes[root.args[0]]
    else:
        return None
    if difference.op != "sub":
        return None
    made = {s.buffer for s in first.stores if program.buffer(s.buffer).role == "local"}
    for value, centre in (difference.args, difference.args[::-1]):
        kept = second.body.nodes[centre]
        if kept.op == "load" and kept.buffer in made and _equal(first.body, one.values[0], second.body, value):
            return MeanVariance(kept.buffer, one.values[0])
    return None


def _equal(a: Graph, x: int, b: Graph, y: int) -> bool:
    left, right = a.nodes[x], b.nodes[y]
    if replace(left, args=()) != replace(right, args=()) or len(left.args) != len(right.args):
        return False
    if left.index is not None and left.index.values():
        return False
    return all(_equal(a, p, b, q) for p, q in zip(left.args, right.args, strict=True))


@dataclass(frozen=True)
class SplitKernels:
    """The kernels of split statistics in launch order, and the scratch buffers between them."""

    programs: tuple[Program, ...]
    scratch: tuple[Buffer, ...]


def split_kernels(program: Program) -> SplitKernels:
    """The kernels of split statistics: per group of points, merged per column with the results, and the maps that use
    them.

    ``params``: ``split`` groups, rounded so that only the last one is short, and those of
    `codegen.cuda.reduction.column_norm`.
    """
    params = {k: v for k, v in program.params if k != "split"}
    split = int(str(dict(program.params)["split"]))
    phase = program.phases[0]
    extents = tuple(r.extent for r in phase.reds)
    terms, columns = math.prod(extents), math.prod(a.extent for a in phase.axes)
    step = int(str(params["threads"])) // int(str(params["across"])) * int(str(params["chunks"]))
    share = -(-terms // (split * step)) * step
    groups = -(-terms // share)
    flat = flatten(tuple(Index.axis(a.name) for a in phase.axes), tuple(a.extent for a in phase.axes))
    dtype = phase.accs[0].dtype
    parts = tuple(Buffer(f"part{k}", dtype, (groups, columns), "out") for k in range(2))
    first = _first(program, parts, flat, share, groups)
    names = {n.buffer for p in program.phases[2:] for n in p.exit.nodes if n.op == "load"}
    kept = {
        b.name: replace(b, name=f"kept_{b.name}", shape=(columns,), role="out")
        for b in program.locals
        if b.name in names
    }
    second = merge_kernel(program, parts, kept, flat, share, groups)
    maps = tuple(_map(program, p, kept, flat) for p in program.phases[2:])
    return SplitKernels((first, second, *maps), (*parts, *kept.values()))


def _first(program: Program, parts: tuple[Buffer, ...], flat: Index, share: int, groups: int) -> Program:
    """Mean and sum of squared deviations of every group."""
    phase = program.phases[0]
    found = match_welford(program)
    if found is None:
        raise IRError(f"{program.name}: no statistics")
    columns = parts[0].shape[1]
    extents = tuple(r.extent for r in phase.reds)
    terms = math.prod(extents)
    axes = (Axis(GROUP, groups), *phase.axes)
    ranges = {**{a.name: a.extent for a in axes}, TERM: share}
    point = Index.axis(GROUP) * share + Index.axis(TERM)
    places = dict(zip((r.name for r in phase.reds), unflatten(point, extents, ranges), strict=True))
    guard = Guard(point, None, terms - 1)
    lane = phase.axes[-1]
    local = Buffer(MEAN, parts[0].dtype, (lane.extent,), "local")
    here = Index.axis(lane.name) - Index.axis(f"{lane.name}_lo")
    bodies = []
    for squares in (False, True):
        body = Graph()
        value = _remap_graph(phase.body, found.value, body, places, guard, ranges)
        if squares:
            gone = body.apply("sub", local.dtype, value, body.load(MEAN, here, local.dtype))
            value = body.apply("mul", local.dtype, gone, gone)
        if not guard.always(ranges):
            holds = body.add(Node("guard", "bool", guards=(guard,)))
            value = body.apply("select", local.dtype, holds, value, body.const(0.0, local.dtype))
        bodies.append((body, value))
    exits = Graph(), Graph()
    sums = [g.add(Node("acc", local.dtype, attrs=(("number", 0),))) for g in exits]
    mean = exits[0].apply("div", local.dtype, sums[0], group_count(exits[0], local.dtype, share, groups, terms))
    address = Index.axis(GROUP) * columns + flat
    stores = (Store(MEAN, here, mean), Store(parts[0].name, address, mean)), (Store(parts[1].name, address, sums[1]),)
    reds = (Red(TERM, share),)
    phases = tuple(
        Phase(f"{phase.name}.{k}", axes, reds, (Acc("add", local.dtype, (value,)),), body, exits[k], stores[k])
        for k, (body, value) in enumerate(bodies)
    )
    used = {n.buffer for p in phases for n in p.body.nodes if n.op == "load"}
    kept = tuple((k, v) for k, v in program.params if k != "split")
    return replace(
        program,
        name=f"{program.name}_first",
        phases=phases,
        buffers=(*(b for b in program.inputs if b.name in used), *parts, local),
        grid=tuple(Grid(a.name, a.extent, a.extent) for a in axes),
        serial=tuple(a.name for a in axes[:-1]),
        params=(*kept, ("terms", terms)),
    )


def merge_kernel(
    program: Program, parts: tuple[Buffer, ...], kept: dict[str, Buffer], flat: Index, share: int, groups: int
) -> Program:
    """Merges the statistics of all groups, and computes the program's results from them."""
    one, other = program.phases[:2]
    found = match_welford(program)
    assert found is not None
    dtype, terms = parts[0].dtype, math.prod(r.extent for r in one.reds)
    lane = one.axes[-1]
    here = Index.axis(lane.name) - Index.axis(f"{lane.name}_lo")
    address = Index.axis(GROUP) * parts[0].shape[1] + flat
    bodies = []
    for squares in (False, True):
        body = Graph()
        mean, count = body.load(parts[0].name, address, dtype), group_count(body, dtype, share, groups, terms)
        if squares:
            gone = body.apply("sub", dtype, mean, body.load(found.centre, here, dtype))
            moved = body.apply("mul", dtype, count, body.apply("mul", dtype, gone, gone))
            value = body.apply("add", dtype, body.load(parts[1].name, address, dtype), moved)
        else:
            value = body.apply("mul", dtype, mean, count)
        bodies.append((body, value))
    reds = (Red(GROUP, groups),)
    phases = []
    for phase, (body, value) in zip((one, other), bodies, strict=True):
        more = tuple(Store(kept[s.buffer].name, flat, s.value) for s in phase.stores if s.buffer in kept)
        acc = Acc("add", dtype, (value,))
        phases.append(replace(phase, reds=reds, accs=(acc,), body=body, stores=(*phase.stores, *more)))
    written = {s.buffer for p in phases for s in p.stores}
    read = {n.buffer for p in phases for g in (p.body, p.exit) for n in g.nodes if n.op == "load"}
    buffers = (
        *(replace(p, role="in") for p in parts),
        *(b for b in program.inputs if b.name in read),
        *(b for b in program.outputs if b.name in written),
        *kept.values(),
        *(b for b in program.locals if b.name in written),
    )
    across = min(32 if lane.extent >= 8192 else 8, 1 << (lane.extent - 1).bit_length())
    deep = min(1024 // across, max(32 // across, 1 << max(0, groups // 2 - 1).bit_length()), 256)
    params = (
        ("cuda", "column_rows"),
        ("threads", across * deep),
        ("across", across),
        ("vector", 1),
        ("chunks", min(32, -(-groups // deep))),
    )
    return replace(program, name=f"{program.name}_second", buffers=buffers, phases=tuple(phases), params=params)


def _map(program: Program, phase: Phase, kept: dict[str, Buffer], flat: Index) -> Program:
    """An element-wise phase on the statistics, as a kernel of its own."""
    exit_, numbers = Graph(), {}
    for number, node in enumerate(phase.exit.nodes):
        args = tuple(numbers[a] for a in node.args)
        if node.op == "load" and node.buffer in kept:
            numbers[number] = exit_.load(kept[node.buffer].name, flat, node.dtype)
            continue
        index = None if node.index is None else node.index.renumber(numbers)
        guards = tuple(Guard(g.index.renumber(numbers), g.low, g.high) for g in node.guards)
        numbers[number] = exit_.add(replace(node, args=args, index=index, guards=guards))
    stores = tuple(replace(s, value=numbers[s.value]) for s in phase.stores)
    address = stores[0].address
    axes = tuple(sorted(phase.axes, key=lambda a: -(address.stride(a.name) or 0)))
    read = {n.buffer for n in exit_.nodes if n.op == "load"}
    written = {s.buffer for s in stores}
    buffers = (
        *(b for b in program.inputs if b.name in read),
        *(replace(b, role="in") for b in kept.values() if b.name in read),
        *(b for b in program.outputs if b.name in written),
    )
    made = replace(phase, axes=axes, exit=exit_, stores=stores)
    plain = collapse_program(
        replace(
            program,
            name=f"{program.name}_map",
            buffers=buffers,
            phases=(made,),
            grid=(),
            serial=(),
            params=(("cuda", "point"), ("threads", 256)),
        )
    )
    lane = plain.phases[0].axes[-1]
    widest = max(1, 16 // max(ITEM_SIZE[b.dtype] for b in plain.outputs))
    vector = next(v for v in (widest, 4, 2, 1) if v <= widest and lane.extent % v == 0)
    tiled = tuple(replace(a, unroll=vector if a is lane else 1) for a in plain.phases[0].axes)
    return replace(plain, phases=(replace(plain.phases[0], axes=tiled),))


def group_count(graph: Graph, dtype: str, share: int, groups: int, terms: int) -> int:
    """Points of group ``s``: all groups but the last one are full."""
    last = terms - (groups - 1) * share
    if last == share:
        return graph.const(float(share), dtype)
    full = graph.add(Node("guard", "bool", guards=(Guard(Index.axis(GROUP), None, groups - 2),)))
    return graph.apply("select", dtype, full, graph.const(float(share), dtype), graph.const(float(last), dtype))


def _remap_graph(
    source: Graph, wanted: int, target: Graph, places: dict[str, Index], guard: Guard, ranges: dict[str, int]
) -> int:
    """A value at another point, whose loads read nothing where the guard fails."""
    numbers: dict[int, int] = {}
    for number in source.needed([wanted]):
        node = source.nodes[number]
        index = None if node.index is None else node.index.substitute(places, ranges).renumber(numbers)
        guards = tuple(Guard(g.index.substitute(places, ranges).renumber(numbers), g.low, g.high) for g in node.guards)
        guards = tuple(g for g in ((*guards, guard) if node.op == "load" else guards) if not g.always(ranges))
        value = node.value if node.op != "load" or node.guards else (0 if guards else None)
        args = tuple(numbers[a] for a in node.args)
        if node.op == "guard" and not guards:
            numbers[number] = target.const(True, "bool")
            continue
        numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
    return numbers[wanted]

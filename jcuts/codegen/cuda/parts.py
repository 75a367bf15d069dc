"""The kernels that one program becomes: one, or two where a reduction is split over the grid.

A split reduction gives each of ``split`` groups of terms to threads of its own; the first kernel writes one partial
result per group into scratch memory, the second combines them and finishes.  No atomics: results do not depend on the
order in which blocks run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.base.errors import CompileRejected
from jcuts.dfg.index import Index, flatten, unflatten
from jcuts.dfg.node import Graph, Guard, Node
from jcuts.dfg.program import Acc, Axis, Buffer, Phase, Program, Red, Store

SCRATCH_ALIGN = 256


@dataclass(frozen=True)
class Part:
    """One kernel: its program, and for each of its buffers the operand or result number, or (-1, scratch offset)."""

    program: Program
    arguments: tuple[tuple[int, int], ...]


def parts(program: Program) -> tuple[list[Part], int]:
    """The kernels of a scheduled program in launch order, and the bytes of scratch memory that they share."""
    order = {b.name: n for n, b in enumerate((*program.inputs, *program.outputs))}
    if dict(program.params).get("split", 1) == 1:
        names = [b.name for b in program.buffers if b.role != "local"]
        return [Part(program, tuple((order[n], 0) for n in names))], 0
    first, second, partials = _split(program, int(str(dict(program.params)["split"])))
    places, total = {}, 0
    for buffer in partials:
        places[buffer.name] = (-1, total)
        total += -(-buffer.bytes // SCRATCH_ALIGN) * SCRATCH_ALIGN
    found = []
    for part in (first, second):
        arguments = [places.get(b.name) or (order[b.name], 0) for b in part.buffers if b.role != "local"]
        found.append(Part(part, tuple(arguments)))
    return found, total


def _split(program: Program, count: int) -> tuple[Program, Program, list[Buffer]]:
    if len(program.phases) != 1 or not program.phases[0].reds:
        raise CompileRejected(f"{program.name}: only a single reduction can be split over the grid")
    phase = program.phases[0]
    if any(acc.index_dtype for acc in phase.accs):
        raise CompileRejected(f"{program.name}: argmax and argmin are not split over the grid")
    params = dict(program.params)
    extents = tuple(r.extent for r in phase.reds)
    length = math.prod(extents)
    unit = max(1, int(str(params.get("vector", 1))))
    share = -(-length // (count * unit)) * unit
    rows = math.prod(a.extent for a in phase.axes)
    row = flatten(tuple(Index.axis(a.name) for a in phase.axes), tuple(a.extent for a in phase.axes))
    partials = [Buffer(f"part{k}", acc.dtype, (rows, count), "out") for k, acc in enumerate(phase.accs)]

    ranges = {**{a.name: a.extent for a in phase.axes}, "s": count, "f": share}
    columns = params["cuda"] == "point"
    if columns:  # neighbouring threads read neighbouring terms
        point = Index.axis("f") * count + Index.axis("s")
    else:
        point = Index.axis("s") * share + Index.axis("f")
    places = dict(zip((r.name for r in phase.reds), unflatten(point, extents, ranges), strict=True))
    guard = Guard(point, None, length - 1)
    body, numbers = _inside(phase.body, places, guard, ranges)
    accs = []
    for acc in phase.accs:
        value = numbers[acc.values[0]]
        if not guard.always(ranges):
            from jcuts.ops.window import identity

            holds = body.add(Node("guard", "bool", guards=(guard,)))
            nothing = body.const(identity(acc.combine, acc.dtype), acc.dtype)
            value = body.apply("select", body.nodes[value].dtype, holds, value, nothing)
        accs.append(Acc(acc.combine, acc.dtype, (value,)))
    exit_ = Graph()
    stores = tuple(
        Store(p.name, row * count + Index.axis("s"), exit_.add(Node("acc", a.dtype, attrs=(("number", k),))))
        for k, (p, a) in enumerate(zip(partials, accs, strict=True))
    )
    used = {n.buffer for n in phase.body.nodes if n.op == "load"}
    lane = phase.axes[-1:] if columns else ()
    others = phase.axes[: len(phase.axes) - len(lane)]
    first = replace(
        program, name=f"{program.name}_first", params=_without_split(program, str(params["cuda"])),
        buffers=(*(b for b in program.inputs if b.name in used), *partials),
        phases=(Phase(f"{phase.name}.first", (*others, Axis("s", count), *lane),
                      (Red("f", share, _unroll(phase), False, 1),), tuple(accs), body, exit_, stores),),
    )  # fmt: skip

    final = Graph()
    loads = [final.load(p.name, row * count + Index.axis("s"), p.dtype) for p in partials]
    again = tuple(Acc(a.combine, a.dtype, (v,)) for a, v in zip(accs, loads, strict=True))
    kept = {n.buffer for n in phase.exit.nodes if n.op == "load"}
    finish = Phase(f"{phase.name}.second", tuple(replace(a, unroll=1) for a in phase.axes), (Red("s", count),), again,
                   final, phase.exit, phase.stores)  # fmt: skip
    second = replace(
        program, name=f"{program.name}_second",
        buffers=(*(replace(p, role="in") for p in partials), *(b for b in program.inputs if b.name in kept),
                 *program.outputs),
        phases=(finish,), params=(("cuda", "team"), *_second_team(rows, count)),
    )  # fmt: skip
    return first, second, partials


def _unroll(phase: Phase) -> int:
    return min(16, max(1, phase.reds[-1].unroll))


def _second_team(rows: int, count: int) -> tuple[tuple[str, object], ...]:
    """Few rows: a block each; many: a warp each."""
    team = 32 if rows > 1024 or count <= 32 else min(256, 1 << (count - 1).bit_length())
    threads = max(128, team) if team <= 32 else team
    vector = 4 if count % 4 == 0 and count >= 4 * team else 1
    return (("threads", threads), ("team", team), ("vector", vector), ("chunks", 8))


def _without_split(program: Program, form: str) -> tuple[tuple[str, object], ...]:
    return (("cuda", form), *((k, v) for k, v in program.params if k not in ("split", "cuda")))


def _inside(
    graph: Graph, places: dict[str, Index], guard: Guard, ranges: dict[str, int]
) -> tuple[Graph, dict[int, int]]:
    """The graph over the split axes; loads beyond the last term read nothing."""
    target = Graph()
    numbers: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        index = None
        if node.index is not None:
            index = node.index.substitute(places, ranges).renumber(numbers)
        guards = tuple(Guard(g.index.substitute(places, ranges).renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load":
            guards = (*guards, guard)
        guards = tuple(g for g in guards if not g.always(ranges))
        value = node.value if node.op != "load" or node.guards else (0 if guards else None)
        args = tuple(numbers[a] for a in node.args)
        if node.op == "guard" and not guards:
            numbers[number] = target.const(True, "bool")
            continue
        numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
    return target, numbers

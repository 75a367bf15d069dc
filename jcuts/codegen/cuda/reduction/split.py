"""Splits a reduction over the grid: a kernel of partial results per group of reduced points, then one that combines.

The first kernel writes one partial result per group into scratch memory, the second adds them up and runs the epilogue.
No atomics: results do not depend on the order in which blocks run.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.graph.predication import mask_accumulators, predicate_loads
from jcuts.kernel_ir.index import Index, flatten, unflatten
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Phase, Program, Red, Store

MANY_RESULTS = 8192
"""Results of a split reduction from which on the second kernel has blocks enough with whole lines."""

Split = tuple[list[Program], list[Buffer]]
"""Kernels in launch order, and the buffers of scratch memory that they share."""


def split_reduction(program: Program) -> Split:
    """Of threads with points of their own, or teams on rows: the second kernel has a team per result."""
    phase = split_phase(program)
    params = dict(program.params)
    count = int(str(params["split"]))
    extents = tuple(r.extent for r in phase.reds)
    length = math.prod(extents)
    unit = max(1, int(str(params.get("vector", 1))))
    share = -(-length // (count * unit)) * unit
    rows = math.prod(a.extent for a in phase.axes)
    row = flatten(tuple(Index.axis(a.name) for a in phase.axes), tuple(a.extent for a in phase.axes))
    partials = [Buffer(f"part{k}", acc.dtype, (rows, count), "out") for k, acc in enumerate(phase.accs)]

    ranges = {**{a.name: a.extent for a in phase.axes}, "s": count, "f": share}
    ahead = params["cuda"] == "point"  # neighbouring threads read neighbouring terms, and neighbouring outputs
    point = Index.axis("f") * count + Index.axis("s") if ahead else Index.axis("s") * share + Index.axis("f")
    places = dict(zip((r.name for r in phase.reds), unflatten(point, extents, ranges), strict=True))
    guard = Guard(point, None, length - 1)
    body, numbers = predicate_loads(phase.body, places, guard, ranges)
    accs = renumbered(phase, numbers) if guard.always(ranges) else mask_accumulators(body, phase.accs, numbers, guard)
    exit_ = Graph()
    stores = tuple(
        Store(p.name, row * count + Index.axis("s"), exit_.add(Node("acc", a.dtype, attrs=(("number", k),))))
        for k, (p, a) in enumerate(zip(partials, accs, strict=True))
    )
    axes = (*phase.axes[:-1], Axis("s", count), *phase.axes[-1:]) if ahead else (*phase.axes, Axis("s", count))
    first = replace(
        program,
        name=f"{program.name}_first",
        params=_without_split(program, str(params["cuda"])),
        buffers=(*_read(program, phase.body), *partials),
        phases=(
            Phase(f"{phase.name}.first", axes, (Red("f", share, _unroll(phase), False, 1),), accs, body, exit_, stores),
        ),
    )

    address = row * count + Index.axis("s")
    second = _combine_kernel(program, partials, accs, address, count, tuple(replace(a, unroll=1) for a in phase.axes))
    return [first, replace(second, params=(("cuda", "team"), *_second_team(rows, count)))], partials


def _combine_kernel(
    program: Program,
    partials: list[Buffer],
    accs: tuple[Acc, ...],
    address: Index,
    count: int,
    axes: tuple[Axis, ...],
) -> Program:
    """The kernel that combines ``count`` partial results and finishes; without a schedule."""
    phase = program.phases[0]
    final = Graph()
    loads = [final.load(p.name, address, p.dtype) for p in partials]
    again = tuple(Acc(a.combine, a.dtype, (v,)) for a, v in zip(accs, loads, strict=True))
    finish = Phase(f"{phase.name}.second", axes, (Red("s", count),), again, final, phase.exit, phase.stores)
    buffers = (*(replace(p, role="in") for p in partials), *_read(program, phase.exit), *program.outputs)
    return replace(program, name=f"{program.name}_second", buffers=buffers, phases=(finish,))


def _read(program: Program, graph: Graph) -> tuple[Buffer, ...]:
    used = {n.buffer for n in graph.nodes if n.op == "load"}
    return tuple(b for b in program.inputs if b.name in used)


def renumbered(phase: Phase, numbers: dict[int, int]) -> tuple[Acc, ...]:
    """A phase's accumulators after its body was copied: new numbers of their values."""
    return tuple(replace(a, values=tuple(numbers[v] for v in a.values)) for a in phase.accs)


def split_phase(program: Program) -> Phase:
    """The phase of a program that can be split. Raises CompileRejected for all others."""
    if len(program.phases) != 1 or not program.phases[0].reds:
        raise CompileRejected(f"{program.name}: only a single reduction can be split over the grid")
    if any(acc.index_dtype for acc in program.phases[0].accs):
        raise CompileRejected(f"{program.name}: argmax and argmin are not split over the grid")
    return program.phases[0]


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


# -- the columns form -----------------------------------------------------------------------------------------------
def column_program(program: Program) -> Program:
    """The program of the columns form as `codegen.cuda.reduction.column` reads it.

    The reductions become one axis ``f`` that counts tiles (``unroll`` points of each reduction), and short reductions
    ``u0``, ``u1`` .. over the points of a tile.  With ``split``, an axis ``s`` counts groups of ``share`` tiles; with
    ``walk``, a reduction and how many of its points a thread takes at a time, threads walk along that part of a tile.
    """
    if len(program.phases) != 1 or not program.phases[0].reds:
        raise CompileRejected(f"{program.name}: the columns form is for a single reduction")
    phase, params = program.phases[0], dict(program.params)
    if any(r.extent % r.unroll for r in phase.reds):
        raise CompileRejected(f"{program.name}: tiles that do not divide the reduction")
    counts = tuple(r.extent // r.unroll for r in phase.reds)
    terms = math.prod(counts)
    split = int(str(params.get("split", 1)))
    step = int(str(params["threads"])) // int(str(params["across"])) * int(str(params["flight"]))
    share = terms if split == 1 else -(-terms // (split * step)) * step
    groups = -(-terms // share)
    walked, rows = params.get("walk", ("", 1))  # type: ignore[misc]
    inner = tuple(
        Red(f"u{k}", r.unroll, int(str(rows)) if r.name == walked else 1)
        for k, r in enumerate(phase.reds)
        if r.unroll > 1
    )
    if any(r.extent % r.unroll for r in inner):
        raise CompileRejected(f"{program.name}: steps of {rows} points do not divide {[r.extent for r in inner]}")
    ranges = {**{a.name: a.extent for a in phase.axes}, **{u.name: u.extent for u in inner}, "f": share, "s": groups}
    term = Index.axis("f") + (Index.axis("s") * share if split > 1 else 0)
    names = {u.name for u in inner}
    places = {
        r.name: tile * r.unroll + (Index.axis(f"u{k}") if f"u{k}" in names else 0)
        for k, (r, tile) in enumerate(zip(phase.reds, unflatten(term, counts, ranges), strict=True))
    }
    guard = Guard(term, None, terms - 1)
    body, numbers = predicate_loads(phase.body, places, guard, ranges)
    accs = renumbered(phase, numbers) if guard.always(ranges) else mask_accumulators(body, phase.accs, numbers, guard)
    axes = (Axis("s", groups), *phase.axes) if split > 1 else phase.axes
    made = replace(phase, axes=axes, reds=(Red("f", share), *inner), accs=accs, body=body)
    kept = tuple((k, v) for k, v in program.params if k not in ("split", "terms", "walk"))
    found = [f"u{k}" for k, r in enumerate(phase.reds) if r.name == walked and r.unroll > 1]
    return replace(program, phases=(made,), params=(*kept, ("terms", terms), *(("walked", n) for n in found)))


def split_columns(program: Program) -> Split:
    """Of column reductions. Partial results lie group by group, so that both kernels read and write whole lines."""
    phase = split_phase(program)
    tiles = column_program(program)
    made = tiles.phases[0]
    groups = made.axes[0].extent
    first, partials, place = partial_kernel(tiles, phase, groups)
    return [first, combine_columns(program, partials, made.accs, place, groups)], partials


def partial_kernel(program: Program, phase: Phase, groups: int) -> tuple[Program, list[Buffer], Index]:
    """The kernel that writes partial results group by group; ``program`` has the axis ``s`` already."""
    made = program.phases[0]
    extents = tuple(a.extent for a in phase.axes)
    rows = math.prod(extents)
    place = flatten(tuple(Index.axis(a.name) for a in phase.axes), extents) + Index.axis("s") * rows
    partials = [Buffer(f"part{k}", acc.dtype, (groups, rows), "out") for k, acc in enumerate(made.accs)]
    exit_ = Graph()
    stores = tuple(
        Store(p.name, place, exit_.add(Node("acc", a.dtype, attrs=(("number", k),))))
        for k, (p, a) in enumerate(zip(partials, made.accs, strict=True))
    )
    first = replace(
        program,
        name=f"{program.name}_first",
        buffers=(*_read(program, phase.body), *partials),
        phases=(replace(made, name=f"{phase.name}.first", exit=exit_, stores=stores),),
    )
    return first, partials, place


def combine_columns(
    program: Program, partials: list[Buffer], accs: tuple[Acc, ...], place: Index, groups: int
) -> Program:
    """The kernel that adds up partial results that lie group by group."""
    axes = tuple(replace(a, unroll=1) for a in program.phases[0].axes)
    rows = math.prod(a.extent for a in axes)
    second = collapse_program(_combine_kernel(program, partials, accs, place, groups, axes))
    lane = second.phases[0].axes[-1].extent
    across = 32 if rows >= MANY_RESULTS else 8
    while across > 1 and across // 2 >= lane:
        across //= 2
    deep = 1 << max(2, min(groups, 512 // across) - 1).bit_length()
    threads = max(128, min(512, across * deep))
    flight = min(8, -(-groups // (threads // across)))
    params = (("cuda", "columns"), ("threads", threads), ("across", across), ("flight", flight))
    return column_program(replace(second, params=params))

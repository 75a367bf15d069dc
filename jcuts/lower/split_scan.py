"""Three-pass parallel scan (reduce, scan, add offsets) along columns on a GPU; which scan operators are associative.

Few columns do not fill a GPU, so every column is split into groups: one kernel reduces each group to its total, a short
scan turns the totals into the carry before each group, and a third kernel scans all groups at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Grid, Phase, Program, Red, Store
from jcuts.lower.scan_axes import CARRY, TIME

GROUP = "g"
STEP = "i"
COMBINE = ("add", "mul", "max", "min")


@dataclass(frozen=True)
class SplitKernels:
    """The kernels of a split scan in launch order, and the scratch buffers between them."""

    programs: tuple[Program, ...]
    scratch: tuple[Buffer, ...]


def scan_operator(program: Program) -> tuple[str, int] | None:
    """The combining operator of a scan and the node of the scanned element; None where it is not one associative
    operation.
    """
    phase = program.phases[0]
    found = phase.exit.nodes[phase.stores[0].value]
    if found.op == "select":  # the first step, and all others
        found = phase.exit.nodes[found.args[2]]
    if found.op not in COMBINE or len(found.args) != 2:
        return None
    before, value = found.args
    node = phase.exit.nodes[before]
    return (found.op, value) if node.op == "load" and node.buffer == CARRY else None


def split_scan(program: Program, groups: int, unroll: int) -> SplitKernels:
    """The unscheduled kernels of a scan whose columns are split into at most ``groups`` groups.

    Raises: IRError where `associative` has nothing.
    """
    found = scan_operator(program)
    if found is None:
        raise IRError(f"{program.name}: no associative scan")
    combine, value = found
    carry, result = program.phases
    time = next(a for a in carry.axes if a.name == TIME)
    others = tuple(a for a in carry.axes if a is not time)
    columns = math.prod(a.extent for a in others)
    share = -(-time.extent // (groups * unroll)) * unroll
    groups = -(-time.extent // share)
    dtype = carry.exit.nodes[value].dtype
    flat = flatten(tuple(Index.axis(a.name) for a in others), tuple(a.extent for a in others))
    here = Index.axis(GROUP) * columns + flat
    totals = Buffer("totals", dtype, (groups, columns), "out")
    starts = Buffer("starts", dtype, (groups, columns), "out")
    point = Index.axis(GROUP) * share + Index.axis(STEP)
    ranges = {**{a.name: a.extent for a in others}, GROUP: groups, STEP: share}
    return SplitKernels(
        (
            _group_totals(program, combine, value, totals, point, here, share, ranges),
            _scan_totals(program, combine, totals, starts, here, others, groups),
            _add_offsets(
                program, combine, value, starts, point, Index.axis(GROUP) * columns - columns + flat, ranges, result
            ),
        ),
        (totals, starts),
    )


def _group_totals(
    program: Program,
    combine: str,
    value: int,
    totals: Buffer,
    point: Index,
    here: Index,
    share: int,
    ranges: dict[str, int],
) -> Program:
    """The total of every group (that of the last one is not needed, and a step beyond the end adds nothing)."""
    from jcuts.ops.window import identity

    phase = program.phases[0]
    time = next(a for a in phase.axes if a.name == TIME)
    guard = Guard(point, None, time.extent - 1)
    body = Graph()
    term = _copied(phase.exit, [value], body, {TIME: point}, ranges, guard)[0]
    dtype = body.nodes[term].dtype
    if not guard.always(ranges):
        holds = body.add(Node("guard", "bool", guards=(guard,)))
        term = body.apply("select", dtype, holds, term, body.const(identity(combine, dtype), dtype))
    exit_ = Graph()
    store = Store(totals.name, here, exit_.add(Node("acc", dtype, attrs=(("number", 0),))))
    axes = (Axis(GROUP, ranges[GROUP]), *(a for a in phase.axes if a is not time))
    made = Phase("totals", axes, (Red(STEP, share),), (Acc(combine, dtype, (term,)),), body, exit_, (store,))
    used = {n.buffer for n in body.nodes if n.op == "load"}
    buffers = (*(b for b in program.inputs if b.name in used), totals)
    return Program(f"{program.name}_totals", buffers, (), (), (made,), 1, "reduction")


def _scan_totals(
    program: Program, combine: str, totals: Buffer, starts: Buffer, here: Index, others: tuple[Axis, ...], groups: int
) -> Program:
    """Exclusive scan of the groups' totals: the carry into each group."""
    axes = (*others[:-1], Axis(STEP, groups), *others[-1:])
    place = here.substitute({GROUP: Index.axis(STEP)}, {a.name: a.extent for a in axes})
    graph, dtype = Graph(), totals.dtype
    value = graph.load(totals.name, place, dtype)
    address = _address(others)
    before = graph.load(CARRY, address, dtype, (Guard(Index.axis(STEP), 1, None),), 0)
    first = graph.add(Node("guard", "bool", guards=(Guard(Index.axis(STEP), 0, 0),)))
    carried = graph.apply("select", dtype, first, value, graph.apply(combine, dtype, before, value))
    result = Graph()
    out = Store(starts.name, place, result.load(CARRY, address, dtype))
    phases = (
        Phase("carry", axes, (), (), Graph(), graph, (Store(CARRY, address, carried),)),
        Phase("map", axes, (), (), Graph(), result, (out,)),
    )
    return _scan(program, f"{program.name}_starts", (replace(totals, role="in"), starts), axes, phases)


def _add_offsets(
    program: Program,
    combine: str,
    value: int,
    starts: Buffer,
    point: Index,
    before: Index,
    ranges: dict[str, int],
    result: Phase,
) -> Program:
    """The scan, with groups as an axis; a group's first step starts from its carry."""
    phase = program.phases[0]
    others = tuple(a for a in phase.axes if a.name != TIME)
    axes = (Axis(GROUP, ranges[GROUP]), *others[:-1], Axis(STEP, ranges[STEP]), *others[-1:])
    dtype = starts.dtype
    graph = Graph()
    old = phase.exit.nodes[phase.stores[0].value]
    time = next(a for a in phase.axes if a.name == TIME)
    guard = Guard(point, None, time.extent - 1)  # the last group may be short
    term, whole = _copied(phase.exit, [value, phase.stores[0].value], graph, {TIME: point}, ranges, guard)
    assert old.op == "select"
    inner = graph.nodes[whole]
    first_of_all, start, combined = inner.args
    later = (Guard(Index.axis(GROUP), 1, None),)
    from_group = graph.apply(combine, dtype, graph.load(starts.name, before, dtype, later, 0), term)
    opens = graph.add(Node("guard", "bool", guards=(Guard(Index.axis(STEP), 0, 0),)))
    carried = graph.apply("select", dtype, opens, from_group, combined)
    carried = graph.apply("select", dtype, first_of_all, start, carried)
    exit_ = Graph()
    numbers = _copied(result.exit, [s.value for s in result.stores], exit_, {TIME: point}, ranges, guard)
    guards = () if guard.always(ranges) else (guard,)
    stores = tuple(
        replace(s, address=s.address.substitute({TIME: point}, ranges), value=n, guards=guards)
        for s, n in zip(result.stores, numbers, strict=True)
    )
    address = phase.stores[0].address
    phases = (
        Phase("carry", axes, (), (), Graph(), graph, (Store(CARRY, address, carried),)),
        Phase("map", axes, (), (), Graph(), exit_, stores),
    )
    inputs = tuple(b for b in program.inputs)
    made = _scan(program, f"{program.name}_walk", (replace(starts, role="in"), *inputs, *program.outputs), axes, phases)
    return replace(made, params=(("terms", time.extent),))


def _scan(
    program: Program, name: str, buffers: tuple[Buffer, ...], axes: tuple[Axis, ...], phases: tuple[Phase, ...]
) -> Program:
    read = {n.buffer for p in phases for n in p.exit.nodes if n.op == "load"}
    kept = tuple(b for b in buffers if b.role == "out" or b.name in read)
    kept = (*kept, *(b for b in program.locals if b.name == CARRY))
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in axes)
    serial = tuple(a.name for a in axes[:-1])
    return Program(name, kept, grid, serial, phases, 1, "scan")


def _address(others: tuple[Axis, ...]) -> Index:
    lane = others[-1].name
    return Index.axis(lane) - Index.axis(f"{lane}_lo")


def _copied(
    source: Graph,
    wanted: list[int],
    target: Graph,
    places: dict[str, Index],
    ranges: dict[str, int],
    guard: Guard | None,
) -> list[int]:
    """Values at other points; with a guard, loads read nothing where it fails. Loads of the carry follow the steps."""
    numbers: dict[int, int] = {}
    for number in source.needed(wanted):
        node = source.nodes[number]
        here = {TIME: Index.axis(STEP)} if node.buffer == CARRY else places
        index = None if node.index is None else node.index.substitute(here, ranges).renumber(numbers)
        guards = tuple(Guard(g.index.substitute(here, ranges).renumber(numbers), g.low, g.high) for g in node.guards)
        if node.op == "load" and guard is not None:
            guards = tuple(g for g in (*guards, guard) if not g.always(ranges))
        value = node.value if node.op != "load" or node.guards else (0 if guards else None)
        args = tuple(numbers[a] for a in node.args)
        numbers[number] = target.add(Node(node.op, node.dtype, args, node.buffer, index, guards, value, node.attrs))
    return [numbers[w] for w in wanted]

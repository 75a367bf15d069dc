"""Splits a GEMM with column sums into two launches: partial sums per row tile in the epilogue, then their combination.

The first kernel stores the GEMM's results, and for every row tile and column the partial sum of each summed value (of
statistics: mean and sum of squared deviations of the tile's rows).  The second is a column reduction over row tiles in
fixed order, or the merge of `lower.reduction.welford`, with what is computed per column as its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm.split_k import split_k
from jcuts.codegen.cuda.reduction.split import Split, combine_columns
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Acc, Axis, Buffer, Phase, Program, Red, Store
from jcuts.lower.patterns.column_sums import SUMS, TYPE, ColumnSums, column_phases, match_column_sums
from jcuts.lower.patterns.gemm import COLUMNS, ROWS
from jcuts.lower.reduction.welford import GROUP, MEAN, group_count, merge_kernel


@dataclass(frozen=True)
class TilePartials:
    """What the first kernel reduces of each tile.

    Attributes:
        kept: local buffers of its first phase whose columns are summed.
        parts: the buffers of the partial results, as many; of statistics mean and squared deviations.
        moments: whether they are statistics.
    """

    kept: tuple[str, ...]
    parts: tuple[str, ...]
    moments: bool


def split_gemm(program: Program) -> Split:
    """The kernels of a GEMM with column sums, or of one that is split along K."""
    return split_column_sums(program) if SUMS in dict(program.params) else split_k(program)


def split_column_sums(program: Program) -> Split:
    """The kernel with partial sums in its epilogue, and the one that combines them.

    Raises: CompileRejected for other programs, and where blocks share a sum along K.
    """
    params: Any = dict(program.params)
    found = match_column_sums(program)
    if found is None or params[SUMS] != found.partials or not {"split", "cluster"}.isdisjoint(params):
        raise CompileRejected(f"{program.name}: no column sums of a product that one block adds up")
    extents, rows = program.phases[0].ranges(), params["tile"][0]
    groups, columns = -(-extents[ROWS] // rows), extents[COLUMNS]
    partials = [Buffer(f"part{k}", TYPE, (groups, columns), "out") for k in range(found.partials)]
    sums = _sums_alone(program)
    if found.moments:
        second = merge_kernel(sums, tuple(partials), {}, Index.axis(COLUMNS), rows, groups)
    else:
        place = Index.axis(COLUMNS) + Index.axis(GROUP) * columns
        second = combine_columns(sums, partials, sums.phases[0].accs, place, groups)
    return [_with_partials(program, found, partials, rows), second], partials


def _sums_alone(program: Program) -> Program:
    """The column phases with the buffers that they use, as a reduction of its own."""
    made = column_phases(program)
    used = {s.buffer for p in made.phases for s in p.stores}
    used |= {n.buffer for p in made.phases for g in (p.body, p.exit) for n in g.nodes if n.op == "load"}
    buffers = tuple(b for b in made.buffers if b.name in used)
    return replace(made, buffers=buffers, template="rows" if len(made.phases) > 1 else "reduction")


def _with_partials(program: Program, found: ColumnSums, partials: list[Buffer], rows: int) -> Program:
    """The first kernel's program: the GEMM's phase, then partial sums of every row tile."""
    gemm, (groups, columns) = program.phases[0], partials[0].shape
    extent = gemm.ranges()[ROWS]
    row, place = Index.axis(GROUP) * rows + Index.axis(ROWS), Index.axis(GROUP) * columns + Index.axis(COLUMNS)
    guard = Guard(row, None, extent - 1)
    always = guard.always({GROUP: groups, ROWS: rows})

    def value(body: Graph, kept: str) -> int:
        return body.load(kept, row * columns + Index.axis(COLUMNS), TYPE, () if always else (guard,), 0)

    def phase(name: str, body: Graph, values: list[int], made: Graph, stores: list[Store]) -> Phase:
        accs = tuple(Acc("add", TYPE, (v,)) for v in values)
        axes = (Axis(GROUP, groups), Axis(COLUMNS, columns))
        return Phase(name, axes, (Red(ROWS, rows),), accs, body, made, tuple(stores))

    body, made = Graph(), Graph()
    values = [value(body, kept) for kept in found.kept]
    sums = [made.add(Node("acc", TYPE, attrs=(("number", k),))) for k in range(len(values))]
    locals_ = [b for b in program.locals if b.name in found.kept]
    if found.moments:
        mean = made.apply("div", TYPE, sums[0], group_count(made, TYPE, rows, groups, extent))
        first = phase("means", body, values, made, [Store(partials[0].name, place, mean), Store(MEAN, place, mean)])
        body, made = Graph(), Graph()
        gone = body.apply("sub", TYPE, value(body, found.kept[0]), body.load(MEAN, place, TYPE))
        square = body.apply("mul", TYPE, gone, gone)
        if not always:
            holds = body.add(Node("guard", "bool", guards=(guard,)))
            square = body.apply("select", TYPE, holds, square, body.const(0.0, TYPE))
        total = made.add(Node("acc", TYPE, attrs=(("number", 0),)))
        phases = (first, phase("deviations", body, [square], made, [Store(partials[1].name, place, total)]))
        locals_.append(replace(partials[0], name=MEAN, role="local"))
    else:
        stores = [Store(p.name, place, total) for p, total in zip(partials, sums, strict=True)]
        phases = (phase("partial_sums", body, values, made, stores),)
    read = {n.buffer for g in (gemm.body, gemm.exit) for n in g.nodes if n.op == "load"}
    written = {s.buffer for s in gemm.stores}
    buffers = (
        *(b for b in program.inputs if b.name in read),
        *(b for b in program.outputs if b.name in written),
        *partials,
        *locals_,
    )
    return replace(program, name=f"{program.name}_first", phases=(gemm, *phases), buffers=buffers, grid=())


def tile_partials(program: Program) -> TilePartials | None:
    """What the epilogue of a first kernel reduces; None where the program has no column sums."""
    if len(program.phases) == 1:
        return None
    first, *others = program.phases[1:]
    kept = tuple(first.body.nodes[acc.values[0]].buffer for acc in first.accs)
    parts = tuple(s.buffer for p in (first, *others) for s in p.stores if program.buffer(s.buffer).role == "out")
    if not all(kept) or SUMS not in dict(program.params):
        raise CompileRejected(f"{program.name}: phases behind a product that are no column sums")
    return TilePartials(kept, parts, bool(others))

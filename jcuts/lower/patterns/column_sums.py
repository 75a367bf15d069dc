"""Matches GEMMs with column reductions in the epilogue: a contraction phase, then sums over all rows of its values.

    y[m, n] = epilogue(sum over k of left[m, k] right[k, n]),   sums_j[n] = sum over m of f_j(y[m, n], operands at m, n)

The first phase stores its results, and every summed value into a local buffer; the phases behind it sum those buffers
(`lower.reduction.column_sums`).  No kernel has these buffers in memory: its epilogue reduces the columns of a block's
tile (`codegen.cuda.gemm.column_sums`), and a second launch combines the partial sums of all row tiles.

Two kinds are matched: sums of values of the contraction's point (gradients of a batch norm), and the mean and the sum
of squared deviations from it (its statistics, `lower.reduction.welford`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.loop_transforms import collapse_axes, map_indices
from jcuts.kernel_ir.node import Node
from jcuts.kernel_ir.program import Axis, Grid, Phase, Program, Red
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, B, GemmOperand, K, _number, as_gemm, gemm_operands
from jcuts.lower.reduction.welford import match_welford

TEMPLATE = "column_sums"
SUMS = "sums"
"""Schedule parameter of every program of the template: partial results per row tile and column."""
LEAST_LINE = 64
"""Bytes along K of the shortest k-tile (`schedule.gpu.gemm.mma`)."""
MOST_KEYS = 1 << 12
"""Contractions that are remembered."""
TYPE = "float32"
"""What is summed, and in what."""


@dataclass(frozen=True)
class ColumnSums:
    """The column reductions of a program.

    Attributes:
        kept: local buffers of the first phase whose columns are summed; of moments one.
        moments: whether they are a mean and the sum of squared deviations from it.
    """

    kept: tuple[str, ...]
    moments: bool

    @property
    def partials(self) -> int:
        """Partial results per row tile and column."""
        return 2 if self.moments else len(self.kept)


def column_phases(program: Program) -> Program:
    """The column reductions alone, as a program that reads what the contraction keeps."""
    return replace(program, phases=program.phases[1:])


def match_column_sums(program: Program) -> ColumnSums | None:
    """The column reductions behind a program's first phase; None where there are none, or others."""
    if program.template != TEMPLATE or len(program.phases) < 2:
        return None
    made = {s.buffer for s in program.phases[0].stores if program.buffer(s.buffer).role == "local"}
    sums = program.phases[1]
    if len(program.phases) == 2:
        loads = [_kept(sums, acc.values[0], made) for acc in sums.accs if (acc.combine, acc.dtype) == ("add", TYPE)]
        kept = tuple(node.buffer for node in loads if node is not None)
        whole = len(kept) == len(sums.accs) and {n.buffer for n in sums.body.nodes if n.op == "load"} == set(kept)
        return ColumnSums(kept, moments=False) if kept and whole and len(set(kept)) == len(kept) else None
    moments = match_welford(column_phases(program)) if len(program.phases) == 3 else None
    node = None if moments is None else _kept(sums, moments.value, made)
    return None if node is None or node.dtype != TYPE else ColumnSums((node.buffer,), moments=True)


def _kept(phase: Phase, number: int, made: set[str]) -> Node | None:
    """A node that is a plain load of what the contraction keeps."""
    node = phase.body.nodes[number]
    return node if node.op == "load" and node.buffer in made and not node.guards else None


def as_gemm_with_column_sums(program: Program) -> Program | None:
    """The program with GEMM axes (`as_gemm`) and column phases over ``n`` that sum over ``m``; None if it is none."""
    found = match_column_sums(program)
    if found is None:
        return None
    first, *others = program.phases
    made = as_row_major_gemm(replace(program, phases=(first,), grid=(), serial=()), found.kept)
    if made is None:
        return None
    gemm = made.phases[0]
    rows, columns = (gemm.ranges()[axis] for axis in (ROWS, COLUMNS))
    place = Index.axis(ROWS) * columns + Index.axis(COLUMNS)
    stores = tuple(replace(s, address=place) if s.buffer in found.kept else s for s in gemm.stores)
    sums = [_renamed(phase, rows, columns) for phase in others]
    for phase in sums:
        if phase is None or any(n.index != place for n in phase.body.nodes if n.buffer in found.kept):
            return None
    grid = (Grid(COLUMNS, columns, columns),) if found.moments else ()
    phases = (replace(gemm, stores=stores), *(phase for phase in sums if phase is not None))
    return replace(made, phases=phases, grid=grid)


def as_row_major_gemm(program: Program, stored: Collection[str]) -> Program | None:
    """The program as a GEMM without a batch whose points lie row by row in these buffers; None if it is none."""
    first = program.phases[0]
    made = as_gemm(program)
    if made is None or B in made.phases[0].ranges() or any(_has_short_runs(s, made) for s in gemm_operands(made)):
        return None
    if not all(_is_row_major(first, s.address) for s in first.stores if s.buffer in stored):
        return None
    ends = [_number(s.address, {ROWS: 0, COLUMNS: 1}) for s in made.phases[0].stores if s.buffer in stored]
    return made if all(end == 1 for end in ends) else None  # else columns of the GEMM are another axis


def is_row_major_gemm(program: Program, stored: Collection[str]) -> bool:
    """Whether `as_row_major_gemm` finds one: its epilogue decides nothing, but for where results are stored."""
    phase = program.phases[0]
    key = (
        tuple(node.key() for node in phase.body.nodes),
        (phase.axes, phase.reds, phase.accs, program.params),
        tuple((store.address, store.guards, store.buffer in stored) for store in phase.stores),
    )
    if key not in _row_major:
        if len(_row_major) >= MOST_KEYS:
            _row_major.clear()
        _row_major[key] = as_row_major_gemm(program, stored) is not None
    return _row_major[key]


_row_major: dict[Hashable, bool] = {}
"""Answers by everything but the epilogue: regions grow by one operation of it after the other."""


def _has_short_runs(side: GemmOperand, gemm: Program) -> bool:
    """Whether neighbouring k lie together in pieces that fill no k-tile: no kernel of these families copies them."""
    return side.run % (LEAST_LINE // side.item) != 0 and side.run != gemm.phases[0].ranges()[K]


def sums_all_rows(program: Program) -> bool:
    """Whether the column phases sum all points of the first one but for its last axis."""
    first, *others = program.phases
    columns, rows = first.axes[-1].extent, math.prod(a.extent for a in first.axes[:-1])
    return all([a.extent for a in p.axes] == [columns] and math.prod(r.extent for r in p.reds) == rows for p in others)


def _is_row_major(phase: Phase, address: Index) -> bool:
    """Whether an address counts the points of a phase, last axis fastest: that of ``m`` and ``n`` is then affine."""
    return address == flatten(tuple(Index.axis(a.name) for a in phase.axes), tuple(a.extent for a in phase.axes))


def _renamed(phase: Phase, rows: int, columns: int) -> Phase | None:
    """A column phase over the axes ``n`` and ``m``; None where it has others."""
    phase = collapse_axes(phase)
    if [a.extent for a in phase.axes] != [columns] or [r.extent for r in phase.reds] != [rows]:
        return None
    (axis,), (red,) = phase.axes, phase.reds
    names = {axis.name: COLUMNS, f"{axis.name}_lo": f"{COLUMNS}_lo", red.name: ROWS}
    where = {old: Index.axis(new) for old, new in names.items()}
    ranges = {COLUMNS: columns, ROWS: rows, f"{COLUMNS}_lo": 1}
    made = map_indices(phase, lambda index: index.substitute(where, ranges))
    return replace(made, axes=(Axis(COLUMNS, columns),), reds=(Red(ROWS, rows),))

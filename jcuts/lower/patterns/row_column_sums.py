"""Matches row reductions with column reductions beside them: the gradients of a layer norm or an RMS norm.

    dx[m, n] = f(rows of x and g),    sums_j[n] = sum over m of f_j(x[m, n], g[m, n], values of row m)

The row phases of `lower.reduction.row_reduction` come first; what is summed of their values lies in local buffers,
which no kernel has in memory.  The last phase sums columns (`lower.reduction.row_column_sums`): a block adds up the
rows that it walks over, and a second launch combines the blocks' partial sums
(`codegen.cuda.reduction.row_column_sums`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.kernel_ir.index import Index, flatten
from jcuts.kernel_ir.program import Axis, Grid, Phase, Program

TEMPLATE = "row_column_sums"
TYPE = "float32"
"""In what columns are summed."""
MOST_VALUES = 32 << 10
"""Operands, results and sums of a row that a block's threads keep in registers; more are the work of two kernels."""


@dataclass(frozen=True)
class RowColumnSums:
    """A program's two parts.

    Attributes:
        rows: the row phases alone, whose row axes are serial.
        sums: the phase that sums columns; of the second kernel in scheduled parts.
        axes: they number the rows.
    """

    rows: Program
    sums: Phase
    axes: tuple[Axis, ...]

    @property
    def row_count(self) -> int:
        """Rows."""
        return math.prod(a.extent for a in self.axes)

    @property
    def columns(self) -> int:
        """Points of a row."""
        return self.sums.axes[-1].extent

    @property
    def row(self) -> Index:
        """Number of the row at hand, by the row phases' axes."""
        return flatten(tuple(Index.axis(a.name) for a in self.axes), tuple(a.extent for a in self.axes))


def split_phases(program: Program) -> RowColumnSums:
    """The two parts of a program of the template."""
    phases = program.phases[:-1]
    axes = next(p for p in phases if p.reds).axes
    grid = tuple(Grid(a.name, a.extent, a.extent) for a in axes)
    rows = replace(program, phases=phases, grid=grid, serial=tuple(a.name for a in axes), template="rows")
    return RowColumnSums(rows, program.phases[-1], axes)


def register_values(program: Program) -> int:
    """Values per column that a kernel keeps in registers: large operands and results, vectors along a row, and sums.

    What only the exit graph of the sums reads is the second kernel's: the state of an optimiser, say.
    """
    found = split_phases(program)
    large = found.row_count * found.columns
    graphs = [found.sums.body, *(graph for phase in found.rows.phases for graph in (phase.body, phase.exit))]
    read = {node.buffer for graph in graphs for node in graph.nodes if node.op == "load"}
    operands = sum(b.name in read and b.size in (large, found.columns) for b in program.inputs)
    return operands + sum(b.size == large for b in program.outputs) + len(found.sums.accs)


def sums_columns(program: Program) -> bool:
    """Whether the last phase adds up all rows of the phases before it, in float32, and one block can keep a row."""
    found = split_phases(program)
    sums, lengths = found.sums, {_row_length(found, phase) for phase in found.rows.phases}
    same = math.prod(r.extent for r in sums.reds) == found.row_count and lengths == {found.columns}
    plain = len(sums.axes) == 1 and all((a.combine, a.dtype) == ("add", TYPE) for a in sums.accs)
    return same and plain and found.columns * register_values(program) <= MOST_VALUES


def _row_length(found: RowColumnSums, phase: Phase) -> int:
    serial = {a.name for a in found.axes}
    return math.prod(x.extent for x in (*phase.reds, *phase.axes) if x.name not in serial)

"""Column norms whose columns do not fit in a block: several passes of few blocks over an array, which stay apart.

A norm or softmax along a dimension that is not the last is one kernel (`codegen.cuda.reduction.column_norm`): a block
has all points of its columns and every phase reads them again unless they stay in registers.  The gradient of a batch
norm has hundreds of thousands of points per channel and few channels: eight blocks would read the array four times.
Apart, its sums are column reductions that fill the device, and the rest is element-wise.
"""

from __future__ import annotations

import math

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.program import Program
from jcuts.lower.reduction.welford import match_welford

MOST_POINTS = 8192
"""Points of a column that threads of a block keep in registers, 8 float32 columns (a sector of memory) side by side."""


def is_long_column_norm(program: Program) -> bool:
    """Whether several phases read columns of more than `MOST_POINTS` points, which no single pass gives (Welford)."""
    if program.template != "rows" or len(program.phases) == 1:
        return False
    if {g.axis for g in program.grid} == set(program.serial):  # rows
        return False
    points = max(math.prod(red.extent for red in phase.reds) for phase in program.phases)
    return points > MOST_POINTS and match_welford(collapse_program(program)) is None

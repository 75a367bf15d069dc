"""The call that turns weights (`trace.turning`) as one kernel: a network's layers would be a launch each.

What it computes has no rounding of its own to be judged: every result is an operand rounded to TF32, bit by bit what
XLA makes of it.  Whether a program with it pays is measured with the program.
"""

from __future__ import annotations

from jcuts.levels import Level
from jcuts.region.weights import turning
from jcuts.trace import turning as calls


def add(level: Level) -> int:
    """Gives the kernel to every such call of a level that has room for it; gives how many there are."""
    found = 0
    for number, eqn in enumerate(level.closed.jaxpr.eqns):
        shapes = calls.turned_shapes(eqn)
        program = None if shapes is None else turning(shapes)
        if program is None:
            continue
        subset = level.subset(frozenset({number}), program)
        if subset.inputs != list(eqn.invars) or subset.outputs != list(eqn.outvars):
            continue  # an argument twice, or a result that nothing reads
        subset.chosen, subset.origin = program, "estimated"
        level.replace(subset)
        found += 1
    return found

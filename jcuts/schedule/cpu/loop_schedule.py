"""Applies a loop-nest schedule: collapses axes, sets the lane axis, the register tile and the task blocks.

A `Schedule` is plain data (what the tuner varies); `apply` makes the scheduled program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jcuts.base.errors import IRError
from jcuts.kernel_ir.program import Axis, Grid, Program, Red


@dataclass(frozen=True)
class Schedule:
    """Kernel parameters of a single-phase program (thesis Table 3.3, for a CPU).

    Attributes:
        lanes: elements per vector.
        vector: the lane axis ('' for scalar code).
        unroll: register tile: (axis, points or vectors computed together).
        order: output axes, outermost first; axes that are missing keep their order in front.
        red_unroll: (reduction axis, points per iteration).
        chains: (reduction axis, independent accumulators).
        blocks: (axis, block per task), outermost first.
    """

    lanes: int = 1
    vector: str = ""
    unroll: tuple[tuple[str, int], ...] = ()
    order: tuple[str, ...] = ()
    red_unroll: tuple[tuple[str, int], ...] = ()
    chains: tuple[tuple[str, int], ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()

    def params(self) -> tuple[tuple[str, object], ...]:
        """For the program's ``params`` and for ``explain``."""
        return (
            ("lanes", self.lanes),
            ("vector", self.vector),
            ("unroll", self.unroll),
            ("order", self.order),
            ("red_unroll", self.red_unroll),
            ("chains", self.chains),
            ("blocks", self.blocks),
        )


def apply(program: Program, schedule: Schedule) -> Program:
    """The program with this schedule. Raises IRError where the schedule names axes that do not exist."""
    if len(program.phases) != 1:
        raise IRError(f"{program.name} has {len(program.phases)} phases; this schedule is for one")
    phase = program.phases[0]
    unroll, chains = dict(schedule.unroll), dict(schedule.chains)
    red_unroll = dict(schedule.red_unroll)
    names = {a.name for a in phase.axes} | {r.name for r in phase.reds}
    for name in (*unroll, *red_unroll, *chains, *schedule.order, *dict(schedule.blocks)):
        if name not in names:
            raise IRError(f"schedule names axis {name!r}; {program.name} has {sorted(names)}")
    axes = [
        Axis(
            a.name,
            a.extent,
            min(unroll.get(a.name, 1), -(-a.extent // (schedule.lanes if a.name == schedule.vector else 1))),
            a.name == schedule.vector,
        )
        for a in phase.axes
    ]
    reds = []
    for r in phase.reds:
        vector = r.name == schedule.vector
        width = schedule.lanes if vector else 1
        count = max(1, min(red_unroll.get(r.name, 1), -(-r.extent // width)))
        chain = chains.get(r.name, 1)
        reds.append(Red(r.name, r.extent, count, vector, chain if count % chain == 0 else 1))
    place = {name: k for k, name in enumerate(schedule.order)}
    axes.sort(key=lambda a: place.get(a.name, -1))
    by_name = {a.name: a for a in axes}
    grid = []
    for name, block in schedule.blocks:
        axis = by_name[name]
        step = axis.unroll * (schedule.lanes if axis.vector else 1)
        grid.append(Grid(name, axis.extent, max(step, -(-block // step) * step)))
    scheduled = replace(phase, axes=tuple(axes), reds=tuple(reds))
    lanes = schedule.lanes if schedule.vector else 1
    return replace(program, grid=tuple(grid), phases=(scheduled,), lanes=lanes, params=schedule.params())

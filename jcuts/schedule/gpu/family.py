"""Interface of a GPU kernel family to the scheduler: what it matches, which schedules it proposes, what launches move.

`family_statistics.FamilyStatistics` are what the performance model of memory-bound kernels reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu.family_statistics import FamilyStatistics
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.problem import GpuProblem

TENSOR_CORES = (8, 0)
"""The least compute capability with ``cp.async`` and TF32 ``mma.sync``."""
WARPGROUPS = (9, 0)
"""The compute capability with ``wgmma.mma_async``."""


def _no_schedules(problem: GpuProblem) -> Iterable[Candidate]:
    """Of families whose scheduled programs lowering makes."""
    return ()


def schedule_parameters(program: Program) -> dict[str, Any]:
    """The tile of families without a record of it: the schedule's parameters by name."""
    return {name: value for name, value in program.params if name != "cuda"}


@dataclass(frozen=True)
class ScheduleFamily:
    """The scheduling half of one kernel family.

    Attributes:
        name: its key in `FAMILIES`.
        form: the value of the schedule parameter ``cuda`` of its programs.
        summary: the technique, and the instructions that it maps to.
        documentation: the page that describes its kernels.
        templates: templates of the unscheduled programs that it computes; () where lowering makes scheduled ones.
        propose: its schedules of an unscheduled program, whatever other families have; none of programs that it does
            not compute.
        required: parameters that its schedules have, of several families of one form.
        excluded: parameters that they do not have.
        condition: what its scheduled programs fulfil besides.
        capability: the least compute capability that its instructions need.
        tile_of: the tile that a scheduled program's block computes: a record of the family, or `schedule_parameters`.
        statistics: what its launches move, and on which unit they compute.
        time: its time model of a scheduled program; None: that of memory-bound kernels, from its statistics.
    """

    name: str
    form: str
    summary: str
    documentation: str
    templates: tuple[str, ...] = ()
    propose: Callable[[GpuProblem], Iterable[Candidate]] = _no_schedules
    required: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    condition: Callable[[Program], bool] | None = None
    capability: tuple[int, int] = (0, 0)
    tile_of: Callable[[Program], Any] = schedule_parameters
    statistics: FamilyStatistics = FamilyStatistics()
    time: Callable[[Program, GpuMachine], KernelTime] | None = None

    def match(self, program: Program) -> bool:
        """Whether a scheduled program is of this family; of every schedule one family's is true."""
        params = dict(program.params)
        if params.get("cuda") != self.form or not params.keys() >= {*self.required}:
            return False
        if not params.keys().isdisjoint(self.excluded):
            return False
        return self.condition is None or self.condition(program)

    def schedules(self, program: Program, machine: GpuMachine) -> Iterable[Candidate]:
        """Its schedules of an unscheduled program, with scores; none on GPUs that lack its instructions."""
        return self.schedules_of(GpuProblem(program, machine))

    def schedules_of(self, problem: GpuProblem) -> Iterable[Candidate]:
        """The same of a problem that several families share."""
        return self.propose(problem) if problem.machine.capability >= self.capability else ()

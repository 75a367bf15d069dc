"""Interface of a GPU kernel family to the scheduler: what it matches, which schedules it proposes, what launches move.

`FamilyStatistics` are what the performance model reads: traffic, bytes in flight, compute unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu import traffic as gpu_traffic
from jcuts.schedule.gpu.coalescing import CoalescingStats
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.problem import GpuProblem
from jcuts.schedule.gpu.traffic import Traffic


@dataclass(frozen=True)
class FamilyStatistics:
    """What `schedule.gpu.launch_stats` has to know of a family.

    Attributes:
        unit: the compute unit that does the work, as `jcuts.estimate` names it.
        traffic: bytes and lines that a launch of so many blocks and threads moves.
        bytes_in_flight: bytes that a thread asks for before it needs the first of them.
        coalescing: how accesses use 128-byte lines, of families whose schedules say it; else None.
        kernels: the kernels of a program, of families whose kernels are independent of each other; else None.
    """

    unit: Callable[[Program], str] = gpu_traffic.ffma_unit
    traffic: Callable[[Program, int, int], Traffic] = gpu_traffic.compulsory_traffic
    bytes_in_flight: Callable[[Program], float] = gpu_traffic.load_bytes_in_flight
    coalescing: Callable[[Program], CoalescingStats] | None = None
    kernels: Callable[[Program], Sequence[Program]] | None = None


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

"""Offline (cross-compiled) ranking: a function's GPU candidates, ranked for an architecture file without that GPU.

Nothing runs.  The candidates of every subset, and of subsets joined into one kernel, are enumerated for the GPU's size
and compute capability, assembled for it, and ranked by PUL (`estimate.gpu_kernel`) with what the assembler reports.
For a GPU that today's assembler no longer supports, registers and shared memory are those of the oldest one that it
supports, and `Ranking.why` is the error that says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jcuts.arch.gpu import GpuArch
from jcuts.base.errors import CompileRejected, JcutsError, Refusal, UsageError
from jcuts.base.settings import Settings
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import OLDEST, CudaTarget
from jcuts.fusion.join_regions import region_groups
from jcuts.kernel_ir.program import Program
from jcuts.pipeline.computation import Computation, Fuel, Region, group
from jcuts.pipeline.predictions import of_schedule, taken_by
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.families import needs_tensor_cores
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

NO_FORM = "no schedule for this GPU: products need matrix units with asynchronous copies (compute capability 8.0)"
NO_SCHEDULE = "no schedule for a GPU"


@dataclass(frozen=True)
class Scored:
    """One ranked candidate.

    Attributes:
        schedule: its form and parameters; score: the enumeration's ranking in (0, 1].
        pul: processor utilisation level (thesis 3.2), in [0, 1]; seconds: predicted time; bound: its lower bound [s];
            by the kernel's time model, None where it has none.
        registers, shared: of its largest launch, shared in bytes.
        rejected: why it cannot be used, or ''.
    """

    program: Program = field(repr=False)
    schedule: str
    score: float
    pul: float | None = None
    seconds: float | None = None
    bound: float | None = None
    registers: int = 0
    shared: int = 0
    rejected: str = ""


@dataclass(frozen=True)
class Operation:
    """One distinct region: its equations by primitive, how often it occurs, its candidates, best first.

    ``refused`` says why there are none.
    """

    name: str
    primitives: dict[str, int]
    count: int
    candidates: tuple[Scored, ...]
    refused: Refusal | None = None


@dataclass(frozen=True)
class Ranking:
    """All regions of a function, ranked for one GPU.

    Attributes:
        arch: the GPU's name; target: the architecture that was assembled for, '' where nothing was.
        why: what kept the GPU's own machine code from being made: an older architecture, no assembler; None if nothing.
        left_out: equations that no subset covers.
    """

    arch: str
    target: str
    why: JcutsError | None
    operations: tuple[Operation, ...]
    left_out: tuple[Refusal, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "arch": self.arch,
            "target": self.target,
            "not_assembled": self.why and self.why.message,
            "operations": [_operation_dict(o) for o in self.operations],
            "left_out": [str(r) for r in self.left_out],
        }


def rank(fn: Any, *args: Any, arch: GpuArch, limit: int = 4, percent: float = 100.0, **keywords: Any) -> Ranking:
    """Ranks the candidates of every operation of ``fn`` for a GPU.

    Args: args, keywords: arrays or ShapeDtypeStructs; limit, percent: candidates per operation, as when tuning.
    Raises: NotJaxError where ``fn`` cannot be traced.
    """
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *args, **keywords)))
    top = group(closed, Settings(mode="fusion"), Fuel(), "cuda")
    capability = divmod(arch.compute_capability, 10)
    machine = gpu_candidates.GpuMachine.of(arch)
    target, why = _target(arch, capability)
    levels = list(top.walk())
    regions = [subset for level in levels for subset in (*level.subsets, *_joined(level, machine))]
    operations = [_ranked(members, machine, arch, target, limit, percent) for members in _distinct(regions)]
    left_out = tuple(r for level in levels for r in level.left_out.values())
    shown = target.arch if target is not None else ""
    return Ranking(arch.name, shown, why, tuple(operations), left_out)


def write_ptx(ranking: Ranking, folder: Path) -> list[Path]:
    """Writes the PTX of every operation's best candidate.

    Raises: the ranking's own error where no code is made for the GPU itself.
    """
    if ranking.why is not None:
        raise ranking.why
    major, minor = divmod(int(ranking.target.removeprefix("sm_")), 10)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, operation in enumerate(ranking.operations):
        best = next((c for c in operation.candidates if not c.rejected), None)
        if best is not None:
            written.append(folder / f"{number:03}_{best.program.name}.ptx")
            written[-1].write_text(compiler.ptx_of(best.program, CudaTarget((major, minor))))
    return written


def _target(arch: GpuArch, capability: tuple[int, int]) -> tuple[CudaTarget | None, JcutsError | None]:
    """The architecture to assemble for, and why that is not the GPU's own."""
    if missing := compiler.available():
        return None, UsageError(f"nothing is assembled: {missing}", arch=arch.name)
    try:
        return CudaTarget(capability), None
    except UsageError as error:
        return CudaTarget(OLDEST), error


def _joined(level: Computation, machine: gpu_candidates.GpuMachine) -> list[Region]:
    """Regions that could be one kernel in place of several of the partition."""
    cover = [(s.members, s.program) for s in level.subsets]
    groups = region_groups(level.graph, cover, lambda program: bool(gpu_candidates.candidates(program, machine, 1)))
    return [level.subset(group.members, group.program) for group in groups]


def _distinct(regions: list[Region]) -> Iterator[list[Region]]:
    """Regions of equal programs, in order of their first occurrence."""
    found: dict[str, list[Region]] = {}
    for subset in regions:
        found.setdefault(subset.program.digest, []).append(subset)
    yield from found.values()


def _ranked(
    same: list[Region],
    machine: gpu_candidates.GpuMachine,
    arch: GpuArch,
    target: CudaTarget | None,
    limit: int,
    percent: float,
) -> Operation:
    program = same[0].program
    primitives = dict(Counter(jaxapi.primitive_name(eqn) for eqn in same[0].closed.jaxpr.eqns))
    found = []
    for made, score in gpu_candidates.candidates(program, machine, limit, percent):
        model = of_schedule(made, machine)
        found.append(Scored(made, schedule(made), score, model.pul, model.seconds, model.bound))
    refused = None
    if not found:
        product = needs_tensor_cores(program.template) and not machine.multiplies
        refused = Refusal(program.template, NO_FORM if product else NO_SCHEDULE)
    if target is not None:
        found = [_assembled(candidate, arch, target) for candidate in found]
        found.sort(key=lambda c: (bool(c.rejected), c.seconds or math.inf, c.program.digest))
    return Operation(program.name, primitives, len(same), tuple(found), refused)


def _assembled(candidate: Scored, arch: GpuArch, target: CudaTarget) -> Scored:
    try:
        kernel = compiler.compile_program(candidate.program, target)
    except CompileRejected as error:
        return replace(candidate, rejected=error.message)
    taken = taken_by(kernel.object_code)
    machine = gpu_candidates.GpuMachine.of(arch)
    made = of_schedule(candidate.program, machine, taken)
    registers, shared = max(t[2] for t in taken), max(t[3] for t in taken)
    no_room = f"a block does not fit on a multiprocessor of the {arch.name}"
    return replace(
        candidate,
        pul=made.pul,
        seconds=made.seconds,
        bound=made.bound,
        registers=registers,
        shared=shared,
        rejected="" if kernel_time.fits(taken, machine) else no_room,
    )


def schedule(program: Program) -> str:
    """A schedule in one line: form and parameters, then the register tile."""
    params = dict(program.params)
    more = ", ".join(f"{k}={v}" for k, v in params.items() if k != "cuda")
    tile = "x".join(str(x.unroll) for phase in program.phases[:1] for x in (*phase.axes, *phase.reds))
    return f"{params.get('cuda')}, {more}, tile {tile or 1}"


def _operation_dict(operation: Operation) -> dict[str, Any]:
    shown = ("schedule", "score", "pul", "seconds", "bound", "registers", "shared", "rejected")
    return {
        "name": operation.name,
        "primitives": operation.primitives,
        "count": operation.count,
        "refused": operation.refused and str(operation.refused),
        "candidates": [{k: getattr(c, k) for k in shown} for c in operation.candidates],
    }

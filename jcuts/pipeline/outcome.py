"""Result record of the pass pipeline: a program of the same signature, and a report."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.codegen.artifact import CompiledKernel
from jcuts.kernel_ir.program import Program
from jcuts.report.function_report import FunctionReport
from jcuts.trace import jaxapi

Winner = tuple[Program | None, CompiledKernel | None]


@dataclass(frozen=True)
class Outcome:
    """Result of planning: a closed jaxpr of the same signature, and the report.

    Attributes:
        failed: an error came back instead of a plan: nothing is known about the program, which is as it was.
        gains_alone: whether the program is written so that XLA's own code gains, whatever kernels do.
        winners: of every row of the report's regions the chosen program and its kernel (None where XLA runs it).
    """

    closed: jaxapi.Closed
    report: FunctionReport
    failed: bool = False
    winners: tuple[Winner, ...] = ()
    gains_alone: bool = False

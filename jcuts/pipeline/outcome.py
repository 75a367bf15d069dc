"""Result record of the pass pipeline: a program of the same signature, and a report."""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.report.function_report import FunctionReport
from jcuts.trace import jaxapi


@dataclass(frozen=True)
class Outcome:
    """Result of planning: a closed jaxpr of the same signature, and the report.

    Attributes: failed: an error came back instead of a plan: nothing is known about the program, which is as it was.
    """

    closed: jaxapi.Closed
    report: FunctionReport
    failed: bool = False

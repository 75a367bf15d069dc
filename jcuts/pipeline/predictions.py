"""Performance model of a chosen kernel for `explain`: predicted time and PUL, beside the roofline bound and the score.

GPU: `estimate.gpu_kernel` with the registers, shared memory and launches that the assembler reports.  CPU: the cycle
model that ranks schedules, of loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.pipeline.outcome import Outcome, Winner
from jcuts.report.function_report import FunctionReport
from jcuts.schedule.cpu import time_estimate
from jcuts.schedule.gpu import launch_stats
from jcuts.xla import devices as xla_devices


@dataclass(frozen=True)
class Prediction:
    """What the model says of a kernel. Args: seconds: predicted time; pul: processor utilisation level in [0, 1]; both
    None where the model has no such kernel, or it was not compiled."""

    seconds: float | None = None
    pul: float | None = None


def taken_by(image: bytes) -> list[launch_stats.Taken]:
    """Blocks, threads, registers and shared bytes of every launch of a compiled GPU kernel."""
    return [
        (math.prod(x.grid), math.prod(x.block), x.resources.registers, x.resources.shared + x.shared)
        for x in Image.unpack(image).launches
    ]


def with_predictions(outcome: Outcome) -> FunctionReport:
    """An outcome's report with the model of every chosen kernel.

    Counting a GPU kernel's traffic takes milliseconds: `explain` asks for it, planning does not.
    """
    found = [predict(winner) for winner in outcome.winners]
    subsets = tuple(
        replace(subset, predicted_seconds=made.seconds, pul=made.pul)
        for subset, made in zip(outcome.report.subsets, found, strict=True)
    )
    return replace(outcome.report, subsets=subsets)


def predict(winner: Winner) -> Prediction:
    """The model of a chosen kernel."""
    program, kernel = winner
    if program is None:
        return Prediction()
    if "cuda" not in dict(program.params):
        return Prediction(time_estimate.seconds(program))
    if kernel is None:
        return Prediction()
    arch, _ = xla_devices.architecture_of(xla_devices.this())
    made = launch_stats.score_of(program, taken_by(kernel.object_code), arch)
    return Prediction(made.seconds, made.pul) if made.pul else Prediction()

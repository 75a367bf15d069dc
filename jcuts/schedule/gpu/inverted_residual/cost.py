"""Cycle model of fused inverted residuals, from the counts of both GEMMs (`b2b_gemm.cost`) and of the depthwise stage.

    cycles = waves * longer(blocks * pieces * longest(units, shared memory, issue, L2 cache),
                            LATENCY + pieces * (products + windows + WAIT) + EXIT),
             at least bytes / (memory bytes per cycle)

with the constants of `gemm.mma`; *pieces* are the channel chunks, *products* the two GEMMs, *windows* the depthwise
convolution, *units* the tensor cores.
"""

from __future__ import annotations

import functools
import math

from jcuts.estimate.time_model import TimeTerm
from jcuts.lower.patterns.inverted_residual import InvertedResidual
from jcuts.schedule import fit
from jcuts.schedule.gpu.b2b_gemm.cost import (
    AROUND,
    COUNTED,
    WAIT,
    Counted,
    epilogue_steps,
    gemm_cycles,
    launch_time,
    moved_bytes,
)
from jcuts.schedule.gpu.b2b_gemm.pair_tile import WORD
from jcuts.schedule.gpu.gemm.mma import LATENCY, bound_rates
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile
from jcuts.schedule.gpu.machine import WARP, GpuMachine, unit_rate


def least(found: InvertedResidual, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: memory, tensor cores."""
    images, rows, columns, channels = found.window.image
    outputs = images * math.prod(found.window.outputs)
    multiplied = float(channels) * (images * rows * columns * found.in_channels + outputs * found.out_channels)
    rates = bound_rates(machine)
    unit = unit_rate(rates, found.item)
    return max(moved_bytes(found) / rates.memory_bytes_per_cycle, multiplied / (machine.sms * unit), LATENCY)


def time(shape: InvertedResidualTile, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    found = shape.block
    phases = gemm_cycles(shape, machine, _steps(found)[0]), _windows(shape, bound_rates(machine))
    copied = 0 if found.expand is not None else shape.pixels
    return launch_time(shape, machine, phases, wait=WAIT, copied=copied)


def cycles(shape: InvertedResidualTile, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, machine).value


@functools.lru_cache(maxsize=COUNTED)
def _steps(found: InvertedResidual) -> tuple[float, float]:
    """Instructions per sum after the expand GEMM, and after the windows."""
    first = 0.0 if found.expand is None else epilogue_steps(found.expand.phases[0])
    return first, epilogue_steps(found.window.phase)


def _windows(shape: InvertedResidualTile, rates: fit.Coefficients) -> Counted:
    """Cycles of the depthwise stage of a channel chunk."""
    found, groups = shape.block, shape.threads // shape.words
    strips = -(-shape.strips // groups) * groups
    covered, made, lanes = covered_pixels(found, shape.strip), math.prod(shape.strip), shape.lanes
    each = covered * (1 if lanes == 1 else 1 + lanes) + 2 * made
    each += lanes * made * (len(found.window.taps) + _steps(found)[1])
    words = shape.words * strips * (covered + made)
    issued = shape.words * (strips * each + groups * AROUND) / WARP
    return 0.0, WORD * words / rates.smem_bytes_per_cycle, issued / 4, issued


def covered_pixels(found: InvertedResidual, strip: tuple[int, int]) -> int:
    """Pixels that the windows of a strip cover."""
    (down, across), (high, wide) = found.window.step, found.window.receptive_field
    return ((strip[0] - 1) * down + high) * ((strip[1] - 1) * across + wide)

"""Time estimate of an unscheduled program on a CPU, for the partition search before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Callable

from jcuts.arch.cpu import CpuArch
from jcuts.estimate.cpu import CpuWork
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.schedule import fit
from jcuts.schedule.cpu.bound import FLOATS, host_arch, work_of

CALL_SECONDS = fit.coefficients("cpu", "time_estimate").call_seconds
"""A custom call with its hand-over to the thread pool [s]; of the order of what XLA's own thunks cost."""

FRESH = 0.5
"""Share of DRAM bandwidth that intermediate values larger than the caches see.

Every write first reads its line, and temporary buffers beyond malloc's threshold (32 MiB) are mapped anew in every run:
47 MiB of them cost 11,769 page faults per call of MobileNetV2 at batch 8.
"""

FREE = frozenset({"const", "index", "guard", "acc", "load", "widen"})
COSTLY = {"div": 4, "rem": 8, "sqrt": 4, "rsqrt": 5, "integer_pow": 2}
SPECIAL = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "logistic",
        "sin",
        "cos",
        "tan",
        "erf",
        "erfc",
        "pow",
        "cbrt",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "asin",
        "acos",
        "atan",
        "atan2",
        "erf_inv",
        "lgamma",
        "digamma",
    }
)
SPECIAL_STEPS = 16  # vector instructions of a polynomial with its range reduction


def call_seconds(arch: CpuArch) -> float:
    """Of a custom call with its hand-over to the thread pool: as measured on this CPU, else `CALL_SECONDS`."""
    return arch.call_seconds + arch.handover_seconds if arch.call_seconds else CALL_SECONDS


def seconds(program: Program, arch: CpuArch | None = None) -> float:
    """Estimated time of the kernel with a good schedule [s], > 0.

        call + max(accumulations / peak + element operations / ALU rate, bytes / bandwidth of their level)

    Unlike `bound`, this is no limit: element operations that XLA or LLVM could remove are counted, so that an operation
    that a subset repeats for every use has its price.  It ranks subsets; measurements scale it
    (`fusion.partition_space.Space`).
    """
    arch = arch or host_arch()
    work = work_of(program, arch)
    footprint = work.input_bytes + work.output_bytes
    memory = footprint / arch.likely(arch.resident_level(footprint)) if footprint else 0.0
    return call_seconds(arch) + max(_compute_seconds(program, work, arch), memory)


def traffic_seconds(size: float, arch: CpuArch | None = None) -> float:
    """Estimated time of an operation that XLA runs and that moves ``size`` bytes [s], > 0."""
    arch = arch or host_arch()
    return call_seconds(arch) + size / arch.likely(arch.resident_level(size))


def _compute_seconds(program: Program, work: CpuWork, arch: CpuArch) -> float:
    """Accumulations at their peak, then element operations."""
    peak = sum(amount / arch.peak(kind) for kind, amount in work.flop.items())
    return peak + sum(_element_seconds(phase, arch) for phase in program.phases)


def _element_seconds(phase: Phase, arch: CpuArch) -> float:
    rate = arch.cores * arch.frequency * max(arch.fma_ports, arch.alu_ports)
    return element_steps(phase, lambda item: arch.lanes(min(8, max(4, item)))) / rate


def element_steps(phase: Phase, lanes: Callable[[int], int] = lambda item: 1) -> float:
    """Weighted instructions of a phase's element operations, all points together.

    Args: lanes: elements of so many bytes that one instruction works on; by default one.
    """
    points = math.prod(a.extent for a in phase.axes)
    inner = math.prod(r.extent for r in phase.reds)
    body = _steps(phase.body, lanes, fused={v for acc in phase.accs for v in acc.values}) if phase.reds else 0.0
    return points * inner * body + points * _steps(phase.exit, lanes)


def _steps(graph: Graph, lanes: Callable[[int], int], fused: set[int] | frozenset[int] = frozenset()) -> float:
    """Vector instructions per point; a product that is accumulated belongs to the accumulation's FMA."""
    total = 0.0
    for number, node in enumerate(graph.nodes):
        if node.op in FREE or (number in fused and node.op == "mul" and node.dtype in FLOATS):
            continue
        steps = SPECIAL_STEPS if node.op in SPECIAL else COSTLY.get(node.op, 1)
        total += steps / lanes(ITEM_SIZE.get(node.dtype, 4))
    return total


def streamed_seconds(program: Program, arch: CpuArch | None = None) -> float:
    """Estimated time of the kernel when what it reads was just written by another one [s], > 0.

        call + accumulations / peak + element operations / ALU rate + bytes / measured bandwidth of their level

    The level is the smallest of which operands and results fill at most half.  Nothing overlaps: pessimistic, but alike
    for all sizes of a batch, which is what it compares.
    """
    arch = arch or host_arch()
    work = work_of(program, arch)
    moved = cached_traffic_seconds(work.input_bytes + work.output_bytes, arch)
    return call_seconds(arch) + _compute_seconds(program, work, arch) + moved


def cached_traffic_seconds(size: float, arch: CpuArch | None = None) -> float:
    """Estimated time of reading and writing ``size`` bytes that stay in the caches where they fit [s]."""
    arch = arch or host_arch()
    level = arch.resident_level(2 * size)
    return size / (arch.measured(level) * (FRESH if level == "dram" else 1.0))

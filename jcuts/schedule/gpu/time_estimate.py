"""Time estimate of an unscheduled program on a GPU (roofline of its counts), for the partition search.

    launch + max(accumulations / peak of their unit + element operations / ALU rate, bytes / bandwidth of their level)

The level is the L2 cache where operands and results fit into it: in a network the kernel before has just written them.
Rates are those of the GPU's data file (`arch/data`).  It ranks subsets of one graph before anything is measured;
measured times of the same kind of kernel scale it (`fusion.partition_space.Space`).  The families' cost models are for
schedules of one program, and take milliseconds; this takes microseconds, and grows with every count.
"""

from __future__ import annotations

import math

from jcuts.kernel_ir.program import ITEM_SIZE, Phase, Program
from jcuts.lower.attention.backward import TEMPLATE as ATTENTION_BACKWARD
from jcuts.lower.attention.forward import TEMPLATE as ATTENTION
from jcuts.lower.layer_fusion import TEMPLATE as LAYER_FUSION
from jcuts.lower.patterns.inverted_residual import TEMPLATE as INVERTED_RESIDUAL
from jcuts.schedule.cpu.time_estimate import element_steps
from jcuts.schedule.gpu.launch_stats import memory_rates
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.problem import GEMM_TEMPLATES
from jcuts.schedule.gpu.traffic import compulsory

MATRIX_TEMPLATES = (*GEMM_TEMPLATES, ATTENTION, ATTENTION_BACKWARD, INVERTED_RESIDUAL, LAYER_FUSION)
"""Templates whose accumulations tensor cores do, where the GPU has them."""
UNITS = {"float64": "fp64", "float32": "tf32_mma", "bfloat16": "bf16_mma", "float16": "fp16_mma"}
"""The tensor cores of an operand's type."""


def seconds(program: Program, machine: GpuMachine) -> float:
    """Estimated time of the kernel with a good schedule [s], > 0."""
    return _launched(_compute_seconds(program, machine), compulsory(program), machine)


def traffic_seconds(size: float, machine: GpuMachine) -> float:
    """Estimated time of operations that XLA runs in one kernel and that move ``size`` bytes [s], > 0."""
    return _launched(0.0, size, machine)


def _launched(computing: float, moved: float, machine: GpuMachine) -> float:
    arch = machine.arch
    bandwidth = arch.bw_l2 if moved <= arch.l2_bytes else arch.bw_global
    return memory_rates(machine).launch_seconds + max(computing, moved / bandwidth)


def _compute_seconds(program: Program, machine: GpuMachine) -> float:
    arch = machine.arch
    rate = arch.peak() / 2  # an FMA counts 2
    elements = sum(element_steps(phase) for phase in program.phases) / rate
    return elements + sum(_accumulation_seconds(program, phase, machine) for phase in program.phases)


def _accumulation_seconds(program: Program, phase: Phase, machine: GpuMachine) -> float:
    terms = math.prod(a.extent for a in phase.axes) * math.prod(r.extent for r in phase.reds) * len(phase.accs)
    return 2 * terms / machine.arch.peak(_unit(program, phase, machine)) if terms else 0.0


def _unit(program: Program, phase: Phase, machine: GpuMachine) -> str:
    """The compute unit of a phase's accumulations: of products the tensor cores of their widest operand's type."""
    if program.template not in MATRIX_TEMPLATES or not machine.multiplies:
        return "ffma"
    loaded = {node.dtype for node in phase.body.nodes if node.op == "load"} & UNITS.keys()
    widest = max(sorted(loaded), key=lambda kind: ITEM_SIZE[kind], default="")
    if "precision" in dict(program.params) and widest != "float64":
        return "ffma"
    unit = UNITS.get(widest, "ffma")
    return unit if unit in machine.arch.flop_per_clock_sm else "ffma"

"""Time models of scheduled tensor-core, GEMV and window kernels: the tile is read back from the schedule's parameters.

Every function takes a scheduled program of one family (`schedule.gpu.families`) and gives the expression by which the
family's enumeration ranks.
"""

from __future__ import annotations

from typing import Any

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.estimate.time_model import KernelTime, Resource, TimeTerm, serial, term
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.column_sums import SUMS, TYPE
from jcuts.lower.patterns.conv_window import ConvWindow, match_conv_window
from jcuts.lower.patterns.gemm import COLUMNS, ROWS, K
from jcuts.schedule.gpu import traffic
from jcuts.schedule.gpu.attention import backward_schedules as attention_backward
from jcuts.schedule.gpu.attention import backward_tile as attention_backward_tile
from jcuts.schedule.gpu.attention import schedules as attention
from jcuts.schedule.gpu.attention import tile as attention_tile
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.conv import few_channels, few_channels_tile, implicit_gemm, implicit_gemm_cluster
from jcuts.schedule.gpu.conv.implicit_gemm import ImplicitGemmTile
from jcuts.schedule.gpu.few_row_gemm import FewRowGemm
from jcuts.schedule.gpu.gemm import cost_mma
from jcuts.schedule.gpu.gemm.cost import CostCoefficients
from jcuts.schedule.gpu.gemm.problem import GemmProblem, MmaTile
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import STEP, WgmmaTile
from jcuts.schedule.gpu.gemv import schedules as gemv
from jcuts.schedule.gpu.inverted_residual import cost as inverted_residual
from jcuts.schedule.gpu.inverted_residual import tile as inverted_residual_tile
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized
from jcuts.schedule.gpu.warp_specialized.schedules import WarpSpecializedTile


def _params(program: Program) -> dict[str, Any]:
    return dict(program.params)


def _numbers(params: dict[str, Any], **defaults: int) -> dict[str, int]:
    """Parameters that a schedule names only where they differ from these."""
    return {name: int(params.get(name, default)) for name, default in defaults.items()}


def column_sum_cycles(program: Program, machine: GpuMachine) -> float:
    """Cycles of the second launch of a program with column sums, which combines the partial sums of all row tiles."""
    params, extents = _params(program), program.phases[0].ranges()
    if SUMS not in params:
        return 0.0
    size = ITEM_SIZE[TYPE] * params[SUMS] * -(-extents[ROWS] // params["tile"][0]) * extents[COLUMNS]
    rates = machine.record("gpu/gemm", "mma_tf32", CostCoefficients)
    speed = machine.coefficients("gpu/gemm", "occupancy").partial_sum_bytes_per_cycle
    return rates.split_k_launch_cycles + rates.split_k_bytes_factor * 2 * size / speed


def _in_cycles(program: Program, root: TimeTerm, machine: GpuMachine, unit: str) -> KernelTime:
    if more := column_sum_cycles(program, machine):
        root = serial([root, term(Resource.REDUCE, more)])
    return KernelTime(root, machine.clock_hertz, unit, memory_bound(program).bytes)


# -- GEMM -------------------------------------------------------------------------------------------------------------
def mma_tile(program: Program) -> MmaTile:
    """The tile of an ``mma.sync`` or SIMT GEMM."""
    params = _params(program)
    more = _numbers(params, split=1, cluster=1, early=0, fma=0)
    rows, columns, terms = params["tile"]
    return MmaTile(rows, columns, terms, tuple(params["warps"]), params["stages"], **more)


def mma_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of ``mma.sync`` and SIMT GEMMs."""
    tile = mma_tile(program)
    root = cost_mma.warp_time(GemmProblem(program, machine, fma=tile.fma), tile)
    return _in_cycles(program, root, machine, "ffma" if tile.fma else traffic.mma_unit(program))


def wgmma_tile(program: Program) -> WgmmaTile:
    """The tile of a ``wgmma`` GEMM."""
    params = _params(program)
    more = _numbers(params, flight=0, split=1, cluster=1, rounded=0, spread=0, steps=1, cached=0, push=0, early=0)
    more |= _numbers(params, held=0, paired=0)
    rows, columns, terms = params["tile"]
    if more["steps"] == terms * 4 // STEP > 1:  # all steps of a k-tile are one commit group
        more["steps"] = 0
    return WgmmaTile(rows, columns, terms, tuple(params["groups"]), params["stages"], **more)


def wgmma_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of ``wgmma`` GEMMs."""
    root = WgmmaProblem(program, machine).time(wgmma_tile(program))
    return _in_cycles(program, root, machine, traffic.mma_unit(program))


def warp_specialized_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of warp-specialised GEMMs and convolutions."""
    params = _params(program)
    rows, columns, _ = params["tile"]
    more = _numbers(params, pixels=0, rounds=1, early=0, beside=0)
    tile = WarpSpecializedTile(rows, columns, params["groups"][0], params["stages"], params["fed"], **more)
    way = _window(program) if tile.pixels else None
    root = warp_specialized.time(WgmmaProblem(program, machine), way, tile)
    return _in_cycles(program, root, machine, traffic.mma_unit(program))


# -- convolutions ------------------------------------------------------------------------------------------------------
def _window(program: Program) -> ConvWindow:
    found = match_conv_window(program)
    if found is None:
        raise CompileRejected(f"{program.name}: no convolution window", program=program.name)
    return found


def implicit_gemm_tile(program: Program) -> ImplicitGemmTile:
    """The tile of an implicit GEMM with its halo in shared memory."""
    params = _params(program)
    rows, columns, _ = params["tile"]
    more = _numbers(params, rounds=1, spread=0, steps=1, unrolled=0, fetched=0, short=0, paired=0, cluster=1, early=0)
    more |= _numbers(params, sums=0)
    return ImplicitGemmTile(rows, columns, params["groups"][0], params["stages"], params["pixels"], **more)


def implicit_gemm_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of implicit GEMMs, those whose clusters split the channels too."""
    tile, counter, found = implicit_gemm_tile(program), WgmmaProblem(program, machine), _window(program)
    of = implicit_gemm_cluster if tile.cluster > 1 else implicit_gemm
    return _in_cycles(program, of.time(counter, found, tile), machine, traffic.mma_unit(program))


def few_channels_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of convolutions of few channels."""
    root = few_channels.time(program, few_channels_tile.shape_of(program), machine)
    return _in_cycles(program, root, machine, traffic.conv_unit(program))


# -- fused operations --------------------------------------------------------------------------------------------------
def inverted_residual_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of fused inverted residuals."""
    tile = inverted_residual_tile.shape_of(program)
    if tile is None:
        raise CompileRejected(f"{program.name}: no inverted residual", program=program.name)
    root = inverted_residual.time(tile, machine)
    return _in_cycles(program, root, machine, traffic.inverted_residual_unit(program))


def attention_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of flash attention."""
    tile = attention_tile.shape_of(program)
    if isinstance(tile, Refusal):
        raise CompileRejected(f"{program.name}: {tile}", program=program.name)
    return _in_cycles(program, attention.time(tile, program, machine), machine, traffic.attention_unit(program))


def attention_backward_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of the backward pass of attention."""
    tile = attention_backward_tile.backward_tile(program)
    if isinstance(tile, Refusal):
        raise CompileRejected(f"{program.name}: {tile}", program=program.name)
    root = attention_backward.time(tile, program, machine)
    return _in_cycles(program, root, machine, traffic.attention_backward_unit(program))


# -- matrix-vector products --------------------------------------------------------------------------------------------
def gemv_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of split-K GEMV."""
    params, phase = _params(program), program.phases[0]
    terms = next(r.unroll for r in phase.reds if r.name == K)
    more = _numbers(params, flight=1, across=1, threads=1, cluster=1, split=1)
    schedule = gemv.GemvSchedule(phase.axes[-1].unroll, terms, **more)
    problem = FewRowGemm.of(program)
    flop = 2.0 * problem.rows * problem.columns * problem.terms * problem.batch
    root = gemv.time(problem, schedule, machine)
    return KernelTime(root, unit="ffma", compulsory=memory_bound(program).bytes, flop=flop)

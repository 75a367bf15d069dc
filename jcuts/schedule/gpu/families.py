"""Registry of the GPU kernel families, scheduling half: schedules, tile, statistics and documentation of each.

The kernel half (emitter, launch, split into kernels) is `jcuts.codegen.cuda.families.FAMILIES`, under the same names.
Which families are asked for schedules, and how several compete, is said by `schedule.gpu.enumeration.RULES`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from jcuts.base.errors import CompileRejected
from jcuts.base.registry import Registry
from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.lower import horizontal, weight_transpose
from jcuts.lower.layer_fusion import TEMPLATE as LAYER_FUSION
from jcuts.lower.patterns.gemm import WIDE, gemm_operands
from jcuts.lower.patterns.inverted_residual import TEMPLATE as INVERTED_RESIDUAL
from jcuts.lower.reduction import multi_tensor_sums
from jcuts.schedule.gpu import family_statistics as stats
from jcuts.schedule.gpu import tensor_core_times as times
from jcuts.schedule.gpu.attention import families as attention_families
from jcuts.schedule.gpu.b2b_gemm import schedules as b2b_schedules
from jcuts.schedule.gpu.b2b_gemm import tile as b2b_tile
from jcuts.schedule.gpu.b2b_gemm import traffic as b2b_traffic
from jcuts.schedule.gpu.b2b_gemm import wgmma_schedules as b2b_wgmma_schedules
from jcuts.schedule.gpu.b2b_gemm import wgmma_tile as b2b_wgmma_tile
from jcuts.schedule.gpu.conv import few_channels, few_channels_tile, implicit_gemm
from jcuts.schedule.gpu.elementwise import schedules as elementwise_schedules
from jcuts.schedule.gpu.family import TENSOR_CORES, WARPGROUPS, ScheduleFamily
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.schedule.gpu.gemm.problem import gemm_tile
from jcuts.schedule.gpu.gemv import schedules as gemv_schedules
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.inverted_residual import tile as inverted_residual_tile
from jcuts.schedule.gpu.launch_stats import memory_time
from jcuts.schedule.gpu.machine import Candidate, GpuMachine
from jcuts.schedule.gpu.problem import CONTRACTIONS, GEMM_TEMPLATES, RECURRENCE, GpuProblem
from jcuts.schedule.gpu.recurrence import schedules as recurrence_schedules
from jcuts.schedule.gpu.recurrence import step_time as recurrence_time
from jcuts.schedule.gpu.reduction import column as reduction_column
from jcuts.schedule.gpu.reduction import column_time, online_softmax, row_column_sums
from jcuts.schedule.gpu.reduction import row as reduction_row
from jcuts.schedule.gpu.skinny_gemm import schedules as skinny_schedules
from jcuts.schedule.gpu.warp_specialized import schedules as warp_specialized_schedules
from jcuts.schedule.gpu.window import schedules as window_schedules


# -- what they propose ------------------------------------------------------------------------------------------------
def _register_tiles(problem: GpuProblem) -> Iterable[Candidate]:
    if problem.is_map:
        return elementwise_schedules.register_tiles(problem.collapsed, problem.machine)
    return window_schedules.register_tiles(problem.collapsed, problem.machine) if problem.is_window else ()


def _register_tile_time(program: Program, machine: GpuMachine) -> KernelTime:
    """Of register tiles: windows by their own model, all others as memory-bound launches."""
    is_window = len(program.phases) == 1 and bool(program.phases[0].reds)
    if is_window and "split" not in dict(program.params):
        return window_schedules.window_time(program, machine)
    return memory_time(program, stats.REGISTER_TILES, machine)


def _row_teams(problem: GpuProblem) -> Iterable[Candidate]:
    if problem.is_row_norm:
        return reduction_row.row_reduction_teams(problem.program, problem.machine, 1)
    return reduction_row.row_reduction(problem.program, problem.machine) if problem.is_row_reduction else ()


def _gemv(problem: GpuProblem) -> Iterable[Candidate]:
    if problem.gemm is None or not (problem.is_matvec or problem.has_few_rows(gemv_schedules.MOST_ROWS)):
        return ()
    return gemv_schedules.gemv_schedules(problem.gemm, problem.machine)


def _skinny_gemm(problem: GpuProblem) -> Iterable[Candidate]:
    made = problem.gemm
    return skinny_schedules.skinny_schedules(made, problem.machine) if made and skinny_schedules.matches(made) else ()


def _is_float64(program: Program) -> bool:
    return gemm_operands(program)[0].dtype == WIDE


def _exact_gemm(problem: GpuProblem, *, is_wide: bool) -> Iterable[Candidate]:
    """Schedules of products that ask for more than TF32, of float64 or of float32."""
    made = problem.exact_gemm
    return gemm_mma.ffma_schedules(made, problem.machine) if made and _is_float64(made) == is_wide else ()


# -- the registry -----------------------------------------------------------------------------------------------------
FAMILIES: Registry[ScheduleFamily] = Registry("kernel family")
"""Every kernel family by name."""


def _enter(*families: ScheduleFamily) -> None:
    for family in families:
        FAMILIES.register(family.name)(family)


_enter(
    ScheduleFamily(
        "thread_tile",
        "point",
        "Register tiling: a thread computes a tile of output points, and all values that are reduced for them.",
        "docs/kernels/elementwise.md",
        templates=("map", "window", "reduction", *CONTRACTIONS),
        propose=_register_tiles,
        excluded=("walk",),
        statistics=stats.REGISTER_TILES,
        time=_register_tile_time,
    ),
    ScheduleFamily(
        "sliding_window",
        "point",
        "Register tiles that slide along one axis of a window: rows loaded for one tile are kept for the next.",
        "docs/kernels/window.md",
        templates=("window", *CONTRACTIONS),
        propose=lambda p: window_schedules.sliding_tiles(p.collapsed, p.machine) if p.is_window else (),
        required=("walk",),
        statistics=stats.REGISTER_TILES,
        time=window_schedules.window_time,
    ),
    ScheduleFamily(
        "smem_transpose",
        "transposed",
        "Transposes through a padded tile of shared memory, so that loads and stores are both coalesced.",
        "docs/kernels/elementwise.md",
        templates=("map",),
        propose=lambda p: elementwise_schedules.smem_transposes(p.collapsed, p.machine) if p.is_map else (),
        statistics=stats.TRANSPOSES,
    ),
    ScheduleFamily(
        "horizontal",
        horizontal.FORM,
        "Horizontal fusion: independent one-dimensional maps in one launch.",
        "docs/kernels/elementwise.md",
    ),
    ScheduleFamily(
        "weight_transpose",
        weight_transpose.FORM,
        "Batched transpose of weight matrices, rounded to TF32, in one launch.",
        "docs/kernels/layout.md",
    ),
)
_enter(
    ScheduleFamily(
        "row_reduction",
        "team",
        "Row reductions: 8 to 1,024 threads share a row and combine by `shfl.sync` and shared memory.",
        "docs/kernels/reduction.md",
        templates=("rows", "reduction", *CONTRACTIONS),
        propose=_row_teams,
        excluded=(online_softmax.ONLINE,),
        statistics=stats.ROWS,
    ),
    online_softmax.FAMILY,
    row_column_sums.FAMILY,
    ScheduleFamily(
        "column_reduction",
        "columns",
        "Column reductions: a thread has a vector of outputs and its share of the reduced values, `split` over blocks.",
        "docs/kernels/reduction.md",
        templates=("reduction", *CONTRACTIONS),
        propose=lambda p: reduction_column.columns(p.collapsed, p.machine) if p.is_column_reduction else (),
        statistics=stats.COLUMNS,
        time=column_time.column_reduction_time,
    ),
    ScheduleFamily(
        "column_softmax",
        "column_rows",
        "Softmax, norms and statistics along a dimension that is not contiguous: several passes over columns.",
        "docs/kernels/reduction.md",
        templates=("rows",),
        propose=lambda p: reduction_column.column_softmax(p.collapsed, p.machine) if p.is_column_norm else (),
        statistics=stats.COLUMN_POINTS,
        time=column_time.softmax_time,
    ),
    ScheduleFamily(
        "multi_tensor_sums",
        multi_tensor_sums.FORM,
        "Multi-tensor reduction: partial sums of many arrays in one launch, a chunk of one array per block.",
        "docs/kernels/elementwise.md",
    ),
    ScheduleFamily(
        "welford",
        "moments",
        "Mean and variance of columns in one pass (Welford's update), and the batch norm that uses them.",
        "docs/kernels/reduction.md",
        templates=("rows",),
        propose=lambda p: reduction_column.welford(p.collapsed, p.machine) if p.is_welford else (),
        statistics=stats.WELFORD,
        time=column_time.welford_time,
    ),
    ScheduleFamily(
        "scan_rows",
        "scan_rows",
        "Prefix scans of rows: a team of threads scans by `shfl.sync.up`.",
        "docs/kernels/scan.md",
        templates=("scan",),
        propose=lambda p: reduction_column.row_scans(p.program, p.machine) if p.is_scan else (),
        statistics=stats.SCANS,
        time=column_time.scan_time,
    ),
    ScheduleFamily(
        "scan_columns",
        "scan_columns",
        "Prefix scans of columns: a thread walks down its own.",
        "docs/kernels/scan.md",
        templates=("scan",),
        propose=lambda p: reduction_column.column_scans(p.program, p.machine) if p.is_scan else (),
        statistics=stats.SCANS,
        time=column_time.scan_time,
    ),
    ScheduleFamily(
        "recurrence",
        recurrence_schedules.FORM,
        "Persistent recurrences: all steps of a `scan` in a cooperative launch, grid barriers or flags between.",
        "docs/kernels/recurrence.md",
        (RECURRENCE,),
        lambda p: recurrence_schedules.recurrence_schedules(p.program, p.machine),
        time=recurrence_time.estimated_time,
    ),
)
_enter(
    ScheduleFamily(
        "mma",
        "product",
        "GEMM by `mma.sync` on shared-memory tiles that `cp.async` copies.",
        "docs/kernels/gemm.md",
        GEMM_TEMPLATES,
        lambda p: gemm_mma.mma_schedules(p.gemm, p.machine) if p.gemm else (),
        excluded=("fed", "pixels", "groups", "fma"),
        condition=lambda program: not _is_float64(program),
        capability=TENSOR_CORES,
        tile_of=gemm_tile,
        statistics=stats.TENSOR_CORE_GEMM,
        time=times.mma_time,
    ),
    ScheduleFamily(
        "mma_f64",
        "product",
        "GEMM of float64 by `mma.sync` (DMMA).",
        "docs/kernels/gemm.md",
        CONTRACTIONS,
        functools.partial(_exact_gemm, is_wide=True),
        excluded=("fed", "pixels", "groups", "fma", "sums"),
        condition=_is_float64,
        capability=TENSOR_CORES,
        tile_of=gemm_tile,
        statistics=stats.TENSOR_CORE_GEMM,
        time=times.mma_time,
    ),
    ScheduleFamily(
        "simt_gemm",
        "product",
        "GEMM of float32 in full precision by fused multiply-adds (`fma.rn.f32`) of single threads.",
        "docs/kernels/gemm.md",
        CONTRACTIONS,
        functools.partial(_exact_gemm, is_wide=False),
        required=("fma",),
        excluded=("sums",),
        capability=TENSOR_CORES,
        tile_of=gemm_tile,
        statistics=stats.SIMT_GEMM,
        time=times.mma_time,
    ),
    ScheduleFamily(
        "wgmma",
        "product",
        "GEMM by warpgroups (`wgmma.mma_async`) on a ring of shared-memory tiles.",
        "docs/kernels/gemm.md",
        GEMM_TEMPLATES,
        lambda p: gemm_wgmma.wgmma_schedules(p.wgmma) if p.wgmma else (),
        required=("groups",),
        excluded=("fed", "pixels"),
        capability=WARPGROUPS,
        tile_of=gemm_tile,
        statistics=stats.TENSOR_CORE_GEMM,
        time=times.wgmma_time,
    ),
    ScheduleFamily(
        "implicit_gemm",
        "product",
        "Convolutions as implicit GEMM by `wgmma`, on an input tile with its halo in shared memory.",
        "docs/kernels/conv.md",
        GEMM_TEMPLATES,
        lambda p: implicit_gemm.candidates(p.wgmma, p.wgmma.program) if p.wgmma else (),
        required=("pixels",),
        excluded=("fed",),
        capability=WARPGROUPS,
        tile_of=gemm_tile,
        statistics=stats.TENSOR_CORE_GEMM,
        time=times.implicit_gemm_time,
    ),
    ScheduleFamily(
        "warp_specialized",
        "product",
        "GEMM by warp specialisation: producer warps copy, consumer warpgroups issue `wgmma`, `mbarrier` between them.",
        "docs/kernels/warp_specialized.md",
        CONTRACTIONS,
        lambda p: warp_specialized_schedules.candidates(p.wgmma, p.wgmma.program) if p.wgmma else (),
        required=("fed",),
        excluded=("sums",),
        capability=WARPGROUPS,
        tile_of=gemm_tile,
        statistics=stats.TENSOR_CORE_GEMM,
        time=times.warp_specialized_time,
    ),
    ScheduleFamily(
        "gemv",
        gemv_schedules.FORM,
        "Split-K GEMV: a matrix times 1 to 4 vectors, K split over threads and blocks (by DSMEM or scratch).",
        "docs/kernels/gemv.md",
        CONTRACTIONS,
        _gemv,
        statistics=stats.GEMV,
        time=times.gemv_time,
    ),
    ScheduleFamily(
        "skinny_gemm",
        skinny_schedules.FORM,
        "Skinny GEMM: 2 to 16 rows by `mma.sync`, a `cp.async` ring of weights per warp, K split over warps, blocks.",
        "docs/kernels/skinny_gemm.md",
        CONTRACTIONS,
        _skinny_gemm,
        capability=TENSOR_CORES,
        tile_of=skinny_schedules.SkinnySchedule.of,
        statistics=stats.SKINNY_GEMM,
        time=skinny_schedules.skinny_time,
    ),
    ScheduleFamily(
        "few_channels_conv",
        "patch",
        "Convolutions of few input channels by `mma.sync`: a block keeps an image patch in shared memory.",
        "docs/kernels/conv.md",
        ("convolution",),
        lambda p: few_channels.products(p.program, p.machine) if p.is_convolution else (),
        capability=TENSOR_CORES,
        tile_of=few_channels_tile.shape_of,
        statistics=stats.FEW_CHANNELS,
        time=times.few_channels_time,
    ),
)
_enter(
    ScheduleFamily(
        "inverted_residual",
        "block",
        "Inverted residuals (1x1, depthwise, 1x1 convolution) fused in one kernel, by `mma.sync`.",
        "docs/kernels/inverted_residual.md",
        (INVERTED_RESIDUAL,),
        lambda p: inverted_residual_schedules.products(p.program, p.machine) if p.is_inverted_residual else (),
        capability=TENSOR_CORES,
        tile_of=inverted_residual_tile.shape_of,
        statistics=stats.INVERTED_RESIDUAL,
        time=times.inverted_residual_time,
    ),
    ScheduleFamily(
        "b2b_gemm",
        b2b_tile.FORM,
        "Back-to-back GEMM (fused MLP) by `mma.sync`: the hidden matrix stays in shared memory, chunk by chunk.",
        "docs/kernels/b2b_gemm.md",
        (LAYER_FUSION,),
        lambda p: b2b_schedules.b2b_schedules(p.program, p.machine) if p.is_layer_fusion else (),
        excluded=("groups",),
        capability=TENSOR_CORES,
        tile_of=b2b_tile.shape_of,
        statistics=b2b_traffic.STATISTICS,
        time=b2b_schedules.b2b_time,
    ),
    ScheduleFamily(
        "b2b_wgmma",
        b2b_tile.FORM,
        "Back-to-back GEMM by warp specialisation and `wgmma`: the hidden chunk is a register-sourced A operand.",
        "docs/kernels/b2b_gemm.md",
        (LAYER_FUSION,),
        lambda p: b2b_wgmma_schedules.b2b_wgmma_schedules(p.program, p.machine) if p.is_layer_fusion else (),
        required=("groups",),
        capability=WARPGROUPS,
        tile_of=b2b_wgmma_tile.wgmma_shape_of,
        statistics=b2b_traffic.STATISTICS,
        time=b2b_wgmma_schedules.b2b_wgmma_time,
    ),
    *attention_families.FAMILIES,
)


def family_of(program: Program) -> ScheduleFamily:
    """The family of a scheduled program. Raises CompileRejected where its parameters are no family's schedule."""
    found = next((FAMILIES[name] for name in FAMILIES if FAMILIES[name].match(program)), None)
    if found is None:
        raise CompileRejected(f"{program.name}: no schedule for a GPU ({program.params})", program=program.name)
    return found


def needs_tensor_cores(template: str) -> bool:
    """Whether there are families on tensor cores for programs of a template."""
    return any(template in FAMILIES[name].templates for name in FAMILIES if FAMILIES[name].capability >= TENSOR_CORES)

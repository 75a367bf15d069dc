"""Traffic, launches and compute unit of the kernel families (`FamilyStatistics`), for the performance model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower.patterns.row_column_sums import TYPE, split_phases
from jcuts.lower.reduction import welford
from jcuts.schedule.gpu import coalescing, launch_shapes, traffic
from jcuts.schedule.gpu.coalescing import CoalescingStats
from jcuts.schedule.gpu.launch_shapes import LaunchShape
from jcuts.schedule.gpu.machine import WARP
from jcuts.schedule.gpu.traffic import Traffic, compulsory_traffic, ffma_unit, load_bytes_in_flight


def _one_launch(program: Program) -> Sequence[LaunchShape]:
    """Of families whose time is modelled otherwise: one thread per output."""
    threads = int(str(dict(program.params).get("threads", WARP)))
    points = max((b.size for b in program.outputs), default=1)
    return (LaunchShape(-(-points // threads), threads, WARP),)


def _split_results(program: Program, blocks: int) -> tuple[float, float]:
    """Of reductions that are split over the grid: a partial result per output and part of the split."""
    split = int(str(dict(program.params).get("split", 1)))
    return float(split * sum(b.size * 4 for b in program.outputs)), float(sum(b.bytes for b in program.outputs))


def _partial_column_sums(program: Program, blocks: int) -> tuple[float, float]:
    """Of row reductions with column sums: a partial sum per column and block."""
    sums = program.phases[-1]
    line = len(sums.accs) * sums.axes[-1].extent * ITEM_SIZE[TYPE]
    return float(blocks * line), float(line)


@dataclass(frozen=True)
class FamilyStatistics:
    """What the launches of a family move: for `schedule.gpu.launch_stats.memory_time` and `weight_prefetch`.

    Attributes:
        unit: the compute unit that does the work, as `jcuts.estimate` names it.
        traffic: bytes and lines that a launch of so many blocks and threads moves.
        bytes_in_flight: bytes that a thread asks for before it needs the first of them.
        coalescing: how accesses use 128-byte lines, of families whose schedules say it; else None.
        kernels: the kernels of a program, of families whose kernels are independent of each other; else None.
        launches: grid, block and registers of its launches before it is compiled, as far as they can be estimated.
        partial_results: bytes that so many blocks of a first launch leave to a second one, and of what that one writes.
        prefetched_operands: operands, the largest ones, that its kernels may prefetch into the L2 cache before they
            wait for the kernel in front (`schedule.gpu.weight_prefetch`).
    """

    unit: Callable[[Program], str] = ffma_unit
    traffic: Callable[[Program, int, int], Traffic] = compulsory_traffic
    bytes_in_flight: Callable[[Program], float] = load_bytes_in_flight
    coalescing: Callable[[Program], CoalescingStats] | None = None
    kernels: Callable[[Program], Sequence[Program]] | None = None
    launches: Callable[[Program], Sequence[LaunchShape]] = _one_launch
    partial_results: Callable[[Program, int], tuple[float, float]] = _split_results
    prefetched_operands: int = 0


def coalesced(
    stats: Callable[[Program], CoalescingStats],
    launches: Callable[[Program], Sequence[LaunchShape]],
    kernels: Callable[[Program], Sequence[Program]] | None = None,
) -> FamilyStatistics:
    """Of families whose accesses are known from their schedules (`schedule.gpu.coalescing`)."""
    return FamilyStatistics(
        traffic=lambda program, blocks, threads: traffic.coalesced_traffic(program, stats(program)),
        bytes_in_flight=lambda program: max(stats(program).under_way, 1.0),
        coalescing=stats,
        kernels=kernels,
        launches=launches,
    )


REGISTER_TILES = FamilyStatistics(traffic=traffic.thread_tile_traffic, launches=launch_shapes.thread_tile_launch)
TRANSPOSES = coalesced(coalescing.transpose_access, launch_shapes.transpose_launch)
ROWS = coalesced(coalescing.row_access, launch_shapes.row_launch)
ONLINE_ROWS = coalesced(coalescing.online_row_access, launch_shapes.online_row_launch)
ROW_COLUMN_SUMS = replace(
    coalesced(lambda p: coalescing.row_access(split_phases(p).rows), launch_shapes.row_column_sums_launch),
    partial_results=_partial_column_sums,
)
COLUMNS = coalesced(coalescing.column_access, launch_shapes.column_launch)
COLUMN_POINTS = coalesced(coalescing.column_points_access, launch_shapes.column_points_launch)
WELFORD = coalesced(
    coalescing.column_points_access,
    launch_shapes.welford_launch,
    lambda program: welford.split_kernels(program).programs,
)
GEMV = replace(coalesced(coalescing.gemv_access, launch_shapes.column_launch), prefetched_operands=1)
SKINNY_GEMM = FamilyStatistics(
    traffic.mma_unit,
    lambda program, blocks, threads: traffic.coalesced_traffic(program, coalescing.skinny_gemm_access(program)),
    lambda program: coalescing.skinny_gemm_access(program).under_way,
    prefetched_operands=1,
)
SCANS = FamilyStatistics(launches=launch_shapes.scan_launch)
TENSOR_CORE_GEMM = FamilyStatistics(
    traffic.mma_unit, traffic.gemm_traffic, traffic.gemm_bytes_in_flight, prefetched_operands=1
)
SIMT_GEMM = replace(TENSOR_CORE_GEMM, unit=traffic.ffma_unit)
FEW_CHANNELS = FamilyStatistics(traffic.conv_unit, traffic.few_channels_traffic, traffic.few_channels_bytes_in_flight)
INVERTED_RESIDUAL = FamilyStatistics(
    traffic.inverted_residual_unit, traffic.inverted_residual_traffic, traffic.inverted_residual_bytes_in_flight
)
ATTENTION = FamilyStatistics(traffic.attention_unit, traffic.attention_traffic, prefetched_operands=2)
ATTENTION_BACKWARD = FamilyStatistics(traffic.attention_backward_unit, traffic.attention_backward_traffic)

"""Registry of the GPU kernel families, kernel half: the tile's emitter, its launch, its split into several kernels.

`FAMILIES` has one `KernelFamily` per kernel family, under the names of `schedule.gpu.families.FAMILIES`, which has the
scheduling half: what a schedule's parameters look like, which compute capability it needs, where it is documented.
`compile`, `launch_source` and `split_kernels` ask these two tables and know no family themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jcuts.base.errors import CompileRejected
from jcuts.base.registry import Registry
from jcuts.codegen.cuda.attention.backward import AttentionBackwardKernel, backward_shape
from jcuts.codegen.cuda.attention.flash import FlashAttentionKernel, attention_shape
from jcuts.codegen.cuda.b2b_gemm.kernel import B2bGemmKernel, b2b_shape
from jcuts.codegen.cuda.b2b_gemm.wgmma_kernel import B2bWgmmaKernel, b2b_wgmma_shape
from jcuts.codegen.cuda.conv.few_channels import FewChannelConvKernel, patch_shape
from jcuts.codegen.cuda.conv.implicit_gemm import ImplicitGemmKernel
from jcuts.codegen.cuda.conv.implicit_gemm_tile import window_shape
from jcuts.codegen.cuda.elementwise.horizontal import HorizontalKernel, combined_shape
from jcuts.codegen.cuda.elementwise.launch import launch_register_tiles, launch_smem_transpose
from jcuts.codegen.cuda.elementwise.smem_transpose import SmemTransposeKernel
from jcuts.codegen.cuda.elementwise.thread_tile import ThreadTileKernel
from jcuts.codegen.cuda.gemm.column_sums import split_gemm
from jcuts.codegen.cuda.gemm.mma_f64 import F64MmaKernel, double_shape
from jcuts.codegen.cuda.gemm.mma_mainloop import MmaKernel, MmaKernelTile, block_count, product_shape
from jcuts.codegen.cuda.gemm.simt import SimtGemmKernel, fma_shape
from jcuts.codegen.cuda.gemm.split_k import split_k
from jcuts.codegen.cuda.gemm.wgmma_mainloop import WgmmaKernel
from jcuts.codegen.cuda.gemm.wgmma_tile import group_shape
from jcuts.codegen.cuda.gemv.kernel import GemvKernel, gemv_program
from jcuts.codegen.cuda.gemv.launch import launch_gemv
from jcuts.codegen.cuda.inverted_residual.kernel import InvertedResidualKernel, block_shape
from jcuts.codegen.cuda.launch_writer import Launch, launch_per_block
from jcuts.codegen.cuda.layout.weight_transpose import WeightTransposeKernel, turn_shape
from jcuts.codegen.cuda.ptx import wgmma
from jcuts.codegen.cuda.recurrence.kernel import RecurrenceKernel
from jcuts.codegen.cuda.recurrence.launch import launch_recurrence
from jcuts.codegen.cuda.recurrence.split import split_recurrence
from jcuts.codegen.cuda.reduction.column import ColumnReductionKernel
from jcuts.codegen.cuda.reduction.column_norm import ColumnSoftmaxKernel
from jcuts.codegen.cuda.reduction.launch import (
    launch_column_points,
    launch_columns,
    launch_row_column_sums,
    launch_rows,
)
from jcuts.codegen.cuda.reduction.multi_tensor_sums import MultiTensorSumsKernel, sums_shape
from jcuts.codegen.cuda.reduction.online_softmax import OnlineSoftmaxKernel
from jcuts.codegen.cuda.reduction.row import RowReductionKernel
from jcuts.codegen.cuda.reduction.row_column_sums import RowColumnSumsKernel, split_row_column_sums
from jcuts.codegen.cuda.reduction.split import Split, column_program, split_columns, split_reduction
from jcuts.codegen.cuda.reduction.welford import WelfordKernel
from jcuts.codegen.cuda.scan.kernel import ScanColumnsEmitter, ScanRowsEmitter
from jcuts.codegen.cuda.scan.launch import launch_scan_columns, launch_scan_rows
from jcuts.codegen.cuda.scan.split import split_scan_columns
from jcuts.codegen.cuda.skinny_gemm.kernel import SkinnyGemmKernel
from jcuts.codegen.cuda.skinny_gemm.tile import block_count as skinny_block_count
from jcuts.codegen.cuda.skinny_gemm.tile import skinny_tile
from jcuts.codegen.cuda.tile_kernel import TileKernel
from jcuts.codegen.cuda.warp_specialized.kernel import WarpSpecializedKernel
from jcuts.codegen.cuda.warp_specialized.tile import WarpSpecializedTile, fed_shape
from jcuts.codegen.cuda.window.sliding_window import SlidingWindowKernel
from jcuts.kernel_ir.program import Program
from jcuts.lower.reduction import welford
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile
from jcuts.schedule.gpu.families import family_of


def _no_split(program: Program) -> Split:
    """Of families whose programs are one kernel."""
    raise CompileRejected(f"{program.name}: its kernel is not split over the grid")


@dataclass(frozen=True)
class KernelFamily:
    """The kernel half of one kernel family.

    Attributes:
        name: its key in `FAMILIES` and in `schedule.gpu.families.FAMILIES`.
        kernel: emits a tile; knows nothing of the launch.
        launch: writes the numba.cuda source of a launch, which decodes block and thread numbers and calls the tile.
        whole: the program of one kernel as `kernel` reads it.
        split: the kernels of a program that is split over the grid, and their scratch buffers.
        features: letter of the architecture-specific features that its instructions need (``sm_90a``), or ''.
        overlapped: whether the kernel is refused where ptxas would serialise its ``wgmma`` instructions.
        entry_registers: registers of a thread that a tile's ``setmaxnreg`` is written for, or None.
    """

    name: str
    kernel: type[TileKernel]
    launch: Launch
    whole: Callable[[Program], Program] = lambda program: program
    split: Callable[[Program], Split] = _no_split
    features: str = ""
    overlapped: bool = False
    entry_registers: Callable[[Any], int | None] = lambda tile: None


# -- launches and splits that several share ---------------------------------------------------------------------------
def _launch_gemm(tile_of: Callable[[Program], MmaKernelTile], least: int = 0) -> Launch:
    """One block per output tile and slice of K. Args: least: 1 where ptxas would rather spill a register."""
    return launch_per_block(
        tile_of,
        lambda tile: f"product_{tile.left.size}x{tile.right.size}x{tile.left.terms}",
        block_count,
        alignment=lambda tile: tile.alignment,
        cluster=lambda tile: tile.cluster,
        least=lambda tile: least,
    )


def _split_welford(program: Program) -> Split:
    made = welford.split_kernels(program)
    return list(made.programs), list(made.scratch)


def _setmaxnreg_registers(tile: WarpSpecializedTile | B2bWgmmaTile) -> int | None:
    return tile.entry_registers if tile.registers else None


# -- the registry -----------------------------------------------------------------------------------------------------
FAMILIES: Registry[KernelFamily] = Registry("kernel family")
"""Every kernel family by name."""


def _enter(*families: KernelFamily) -> None:
    for family in families:
        FAMILIES.register(family.name)(family)


_enter(
    KernelFamily("thread_tile", ThreadTileKernel, launch_register_tiles, split=split_reduction),
    KernelFamily("sliding_window", SlidingWindowKernel, launch_register_tiles, split=split_reduction),
    KernelFamily("smem_transpose", SmemTransposeKernel, launch_smem_transpose),
    KernelFamily(
        "horizontal",
        HorizontalKernel,
        launch_per_block(combined_shape, lambda tile: "combined", shared=lambda tile: 0),
    ),
    KernelFamily(
        "weight_transpose",
        WeightTransposeKernel,
        launch_per_block(turn_shape, lambda tile: "weights", shared=lambda tile: 0),
    ),
)
_enter(
    KernelFamily("row_reduction", RowReductionKernel, launch_rows, split=split_reduction),
    KernelFamily("online_softmax", OnlineSoftmaxKernel, launch_rows),
    KernelFamily("row_column_sums", RowColumnSumsKernel, launch_row_column_sums, split=split_row_column_sums),
    KernelFamily("column_reduction", ColumnReductionKernel, launch_columns, whole=column_program, split=split_columns),
    KernelFamily("column_softmax", ColumnSoftmaxKernel, launch_column_points),
    KernelFamily(
        "multi_tensor_sums",
        MultiTensorSumsKernel,
        launch_per_block(sums_shape, lambda tile: "partial_sums", shared=lambda tile: 0),
    ),
    KernelFamily("welford", WelfordKernel, launch_column_points, split=_split_welford),
    KernelFamily("scan_rows", ScanRowsEmitter, launch_scan_rows),
    KernelFamily("scan_columns", ScanColumnsEmitter, launch_scan_columns, split=split_scan_columns),
    KernelFamily("recurrence", RecurrenceKernel, launch_recurrence, split=split_recurrence),
)
_enter(
    KernelFamily("mma", MmaKernel, _launch_gemm(product_shape), split=split_gemm),
    KernelFamily("mma_f64", F64MmaKernel, _launch_gemm(double_shape, least=1), split=split_k),
    KernelFamily("simt_gemm", SimtGemmKernel, _launch_gemm(fma_shape, least=1), split=split_k),
    KernelFamily("wgmma", WgmmaKernel, _launch_gemm(group_shape), split=split_gemm, features="a"),
    KernelFamily(
        "implicit_gemm",
        ImplicitGemmKernel,
        launch_per_block(
            window_shape,
            lambda tile: f"window_{tile.left.size}x{tile.right.size}",
            alignment=lambda tile: tile.alignment,
            cluster=lambda tile: tile.cluster,
        ),
        split=split_gemm,
        features="a",
        overlapped=True,
    ),
    KernelFamily(
        "warp_specialized",
        WarpSpecializedKernel,
        launch_per_block(
            fed_shape,
            lambda tile: f"fed_{tile.left.size}x{tile.right.size}",
            alignment=lambda tile: tile.alignment,
            least=lambda tile: 1,
        ),
        split=split_k,
        features="a",
        overlapped=True,
        entry_registers=_setmaxnreg_registers,
    ),
    KernelFamily("gemv", GemvKernel, launch_gemv, whole=gemv_program, split=split_columns),
    KernelFamily(
        "skinny_gemm",
        SkinnyGemmKernel,
        launch_per_block(
            skinny_tile,
            lambda tile: f"skinny_{tile.rows}x{tile.columns}x{tile.terms}",
            skinny_block_count,
            cluster=lambda tile: tile.cluster,
            least=lambda tile: 1,
        ),
        split=split_k,
    ),
    KernelFamily(
        "few_channels_conv",
        FewChannelConvKernel,
        launch_per_block(
            patch_shape,
            lambda tile: f"patch_{tile.rows}x{tile.pixels}x{tile.columns}",
            lambda program, tile: math.prod(tile.blocks),
        ),
    ),
)
_enter(
    KernelFamily(
        "inverted_residual",
        InvertedResidualKernel,
        launch_per_block(
            block_shape,
            lambda tile: f"block_{tile.images}x{tile.rows}x{tile.columns}x{tile.chunk}",
            lambda program, tile: tile.tiles,
            least=lambda tile: tile.beside,
        ),
    ),
    KernelFamily(
        "b2b_gemm",
        B2bGemmKernel,
        launch_per_block(
            b2b_shape,
            lambda tile: f"b2b_{tile.rows}x{tile.chunk}",
            lambda program, tile: tile.tiles,
            least=lambda tile: tile.beside,
        ),
    ),
    KernelFamily(
        "b2b_wgmma",
        B2bWgmmaKernel,
        launch_per_block(
            b2b_wgmma_shape,
            lambda tile: f"b2b_wgmma_{tile.rows}x{tile.chunk}",
            alignment=lambda tile: wgmma.ATOM,
            least=lambda tile: tile.beside,
        ),
        features="a",
        overlapped=True,
        entry_registers=_setmaxnreg_registers,
    ),
    KernelFamily(
        "flash_attention",
        FlashAttentionKernel,
        launch_per_block(
            attention_shape,
            lambda tile: f"attention_{tile.rows}x{tile.keys}",
            lambda program, tile: tile.block_count,
            cluster=lambda tile: tile.cluster,
            least=lambda tile: 1,
        ),
    ),
    KernelFamily(
        "attention_backward",
        AttentionBackwardKernel,
        launch_per_block(
            backward_shape,
            lambda tile: f"attention_backward_{tile.rows}x{tile.columns}",
            lambda program, tile: tile.block_count,
            least=lambda tile: 1,
        ),
    ),
)


def kernel_family_of(program: Program) -> KernelFamily:
    """The family of a scheduled program. Raises CompileRejected where its parameters are no family's schedule."""
    return FAMILIES[family_of(program).name]

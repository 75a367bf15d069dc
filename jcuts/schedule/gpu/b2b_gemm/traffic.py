"""What launches of the back-to-back GEMM move: rows once, both weights once per block."""

from __future__ import annotations

from jcuts.kernel_ir.program import Program
from jcuts.schedule.gpu.b2b_gemm.cost import moved_bytes
from jcuts.schedule.gpu.b2b_gemm.schedules import unit_of
from jcuts.schedule.gpu.b2b_gemm.tile import B2bGemmTile, shape_of
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile, wgmma_shape_of
from jcuts.schedule.gpu.family_statistics import FamilyStatistics
from jcuts.schedule.gpu.traffic import LINE, Traffic, compulsory_traffic, load_bytes_in_flight


def b2b_traffic(program: Program, blocks: int, threads: int) -> Traffic:
    """Of a back-to-back GEMM: every block reads its rows, and all weights."""
    if (tile := _tile_of(program)) is None:
        return compulsory_traffic(program)
    rows = tile.tiles * tile.rows * tile.block.in_channels
    moved = float(tile.item * (rows + tile.tiles * _weights(tile) * tile.block.expanded_channels))
    moved += sum(b.bytes for b in program.outputs)
    return Traffic(max(moved_bytes(tile.block), moved), moved / LINE, 1.0)


def b2b_bytes_in_flight(program: Program) -> float:
    """Of a back-to-back GEMM: the weights of a chunk, per thread."""
    if (tile := _tile_of(program)) is None:
        return load_bytes_in_flight(program)
    return tile.item * tile.chunk * _weights(tile) / tile.threads


def _tile_of(program: Program) -> B2bGemmTile | B2bWgmmaTile | None:
    """The block tile of a schedule by ``mma.sync`` or by ``wgmma``."""
    return (wgmma_shape_of if "groups" in dict(program.params) else shape_of)(program)


def _weights(tile: B2bGemmTile | B2bWgmmaTile) -> int:
    """Elements of both weights per hidden column."""
    return tile.block.in_channels + tile.block.out_channels


STATISTICS = FamilyStatistics(unit_of, b2b_traffic, b2b_bytes_in_flight)

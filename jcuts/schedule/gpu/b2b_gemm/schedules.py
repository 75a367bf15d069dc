"""Schedules of back-to-back GEMMs (`lower.patterns.b2b_gemm`), ranked by the cycle model of `cost`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.b2b_gemm import B2bGemm, match_b2b_gemm
from jcuts.schedule.gpu.b2b_gemm import cost
from jcuts.schedule.gpu.b2b_gemm.pair_tile import COLUMN_TILE, ROW_TILE, WORD
from jcuts.schedule.gpu.b2b_gemm.tile import FORM, B2bGemmTile, shape_of
from jcuts.schedule.gpu.gemm.mma import AGAIN, BLOCKS, REGISTERS
from jcuts.schedule.gpu.machine import Candidate, GpuMachine, scheduled

LISTED = 40
"""Schedules that are ranked."""
ROWS = (16, 32, 64, 96, 128, 192, 256)
"""Rows of a tile."""
CHUNKS = (16, 32, 64, 128)
"""Hidden columns of a chunk."""
WARPS = (1, 2, 4, 8, 16)
ACROSS = (1, 2, 4, 8)
"""Warps along columns."""
MOST_SUMS = 128
"""Registers of a thread for accumulators of the results."""
MOST_WIDE = 64
"""Registers of a thread for accumulators of a chunk of hidden columns."""
MOST_REGISTERS = 232
"""Registers of a thread, as estimated, that the assembler finds room for."""
MOST_UNROLLED = 512
"""Most ``mma`` instructions in one thread's code per chunk."""
FIXED = 40
"""Registers of a thread for addresses, loop and copies."""
LEFT = 1 << 10
"""Bytes of shared memory that a block does not ask for, and that the system takes of every block."""


def b2b_schedules(program: Program, machine: GpuMachine, most: int = LISTED) -> Iterator[Candidate]:
    """Schedules of a back-to-back GEMM, the best of every kind of tile, at most so many; none for other programs."""
    found = match_b2b_gemm(program)
    if isinstance(found, Refusal):
        return
    best: dict[tuple[int, ...], tuple[float, B2bGemmTile]] = {}
    for shape in shapes(found, machine):
        count, key = cost.cycles(shape, machine), (shape.rows, shape.chunk, shape.threads, shape.held)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    floor = cost.least(found, machine)
    ranked = sorted(best.values(), key=lambda item: item[0])[:most]
    for place, (count, shape) in enumerate(ranked):
        yield of(program, shape), min(1.0, floor / count) * AGAIN**place


def of(program: Program, shape: B2bGemmTile) -> Program:
    """The scheduled program."""
    params = (
        ("tile", shape.rows),
        ("chunk", shape.chunk),
        ("expand", shape.expand),
        ("project", shape.project),
        *((("held", True),) if shape.held else ()),
        *((("beside", shape.beside),) if shape.beside > 1 else ()),
    )
    return scheduled(program, FORM, shape.threads, *params)


def shapes(found: B2bGemm, machine: GpuMachine) -> Iterator[B2bGemmTile]:
    """All schedules that fit: rows, chunks, warps along rows and columns of both GEMMs, the input held or not."""
    room = machine.limits.smem_per_block_bytes - LEFT
    rows = [r for r in ROWS if r == ROWS[0] or r < 2 * found.rows]
    chunks = [c for c in CHUNKS if c == CHUNKS[0] or c < 2 * found.expanded_channels]
    splits = [(warps, across) for warps in WARPS for across in ACROSS if warps % across == 0]
    for high, chunk, (warps, first) in itertools.product(rows, chunks, splits):
        if high % (ROW_TILE * (warps // first)) or chunk % (COLUMN_TILE * first):
            continue
        for (beside, second), held in itertools.product(splits, (False, True)):
            if beside != warps or high % (ROW_TILE * (warps // second)):
                continue
            if second > 1 and COLUMN_TILE * (second - 1) >= found.out_channels:  # warps without columns
                continue
            shares = (warps // first, first), (warps // second, second)
            shape = B2bGemmTile(found, high, chunk, *shares, held)
            if shape.fits and shape.shared <= room and _is_small(shape):
                yield replace(shape, beside=_blocks_per_sm(shape, machine))


def b2b_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The time model of a scheduled program."""
    tile = shape_of(program)
    if tile is None:
        raise CompileRejected(f"{program.name}: no back-to-back GEMM", program=program.name)
    return KernelTime(cost.time(tile, machine), machine.clock_hertz, unit_of(program), cost.moved_bytes(tile.block))


def unit_of(program: Program) -> str:
    """The tensor cores, of the operands' type."""
    is_float32 = isinstance(known := match_b2b_gemm(program), Refusal) or known.item == WORD
    return "tf32_mma" if is_float32 else "bf16_mma"


def _blocks_per_sm(shape: B2bGemmTile, machine: GpuMachine) -> int:
    """Resident blocks per multiprocessor by registers, threads and shared memory."""
    by_registers = REGISTERS // (shape.threads * _registers(shape))
    by_shared = (machine.limits.smem_per_block_bytes - LEFT) // (shape.shared + LEFT)
    return max(1, min(by_registers, by_shared, machine.threads_per_sm // shape.threads, BLOCKS))


def _is_small(shape: B2bGemmTile) -> bool:
    """Whether registers and unrolled code of a thread are within bounds."""
    wide = shape.chunk // shape.expand[1] // 8
    expand = shape.m_fragments_in * wide
    project = shape.m_fragments_out * shape.n_per_warp // 8
    unrolled = (expand * shape.padded_in_channels + project * shape.chunk) // shape.step
    if project * 4 > MOST_SUMS or expand * 4 > MOST_WIDE or unrolled > MOST_UNROLLED:
        return False
    registers = _registers(shape)
    return registers <= MOST_REGISTERS and registers * shape.threads <= REGISTERS


def _registers(shape: B2bGemmTile) -> int:
    """Estimated registers of a thread: results, and a chunk's sums with their operands beside them."""
    wide = shape.chunk // shape.expand[1] // 8
    held = shape.input_registers if shape.held else 4 * shape.m_fragments_in
    sums, expand = shape.m_fragments_out * shape.n_per_warp // 2, 4 * shape.m_fragments_in * wide
    return FIXED + sums + held + expand + 2 * wide

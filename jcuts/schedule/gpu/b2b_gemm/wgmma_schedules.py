"""Schedules of back-to-back GEMMs by ``wgmma`` (capability 9.0), ranked by the cycle model of `wgmma_cost`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.estimate.time_model import KernelTime
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.b2b_gemm import B2bGemm, match_b2b_gemm
from jcuts.schedule import fit
from jcuts.schedule.gpu.b2b_gemm import cost, wgmma_cost
from jcuts.schedule.gpu.b2b_gemm.schedules import unit_of
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile, wgmma_shape_of
from jcuts.schedule.gpu.gemm.mma import AGAIN
from jcuts.schedule.gpu.gemm.wgmma import GROUPED
from jcuts.schedule.gpu.machine import Candidate, GpuMachine

LISTED = 24
"""Schedules that are ranked."""
GROUPS = (1, 2, 3)
"""Consumer warpgroups."""
HIGHS = (1, 2)
"""Fragments of 64 rows of a warpgroup."""
CHUNKS = (32, 64, 128)
"""Hidden columns of a chunk."""
STAGES = (2, 3, 4, 6)
"""Stages of the ring of weights."""
BESIDE = (1, 2)
"""Resident blocks per multiprocessor."""
ALIKE = fit.coefficients("gpu/b2b_gemm", "wgmma").alike_cycles_factor
"""What the cycles of every further schedule with the same rows and chunk count: they should differ."""


def b2b_wgmma_schedules(program: Program, machine: GpuMachine, most: int = LISTED) -> Iterator[Candidate]:
    """Schedules of a back-to-back GEMM by ``wgmma``, at most so many, best first; none for other programs."""
    found = match_b2b_gemm(program)
    if isinstance(found, Refusal) or machine.capability != GROUPED:
        return
    seen: dict[tuple[int, int], int] = {}
    counted = sorted(((wgmma_cost.cycles(s, machine), s) for s in shapes(found, machine)), key=lambda item: item[0])
    ranked = []
    for count, shape in counted:
        key = shape.rows, shape.chunk
        ranked.append((count * ALIKE ** seen.get(key, 0), shape))
        seen[key] = seen.get(key, 0) + 1
    floor = cost.least(found, machine)
    for place, (count, shape) in enumerate(sorted(ranked, key=lambda item: item[0])[:most]):
        yield shape.of(program), min(1.0, floor / count) * AGAIN**place


def shapes(found: B2bGemm, machine: GpuMachine) -> Iterator[B2bWgmmaTile]:
    """All schedules that fit: warpgroups and their rows, chunks, stages, blocks of a multiprocessor."""
    room = machine.limits.smem_per_block_bytes
    for groups, high, chunk, beside in itertools.product(GROUPS, HIGHS, CHUNKS, BESIDE):
        if chunk > CHUNKS[0] and chunk >= 2 * found.expanded_channels:
            continue
        for stages in STAGES:
            shape = B2bWgmmaTile(found, groups, high, chunk, stages)
            if high * groups > 1 and shape.rows >= 2 * found.rows:
                continue
            if stages > STAGES[0] and stages > 2 * shape.chunks:
                continue
            rounds = max(1, -(-shape.tiles // (beside * machine.sms)))
            shape = B2bWgmmaTile(found, groups, high, chunk, stages, rounds, beside)
            reserved = machine.limits.smem_reserved_per_block_bytes
            by_shared = machine.limits.smem_per_sm_bytes // (shape.shared + reserved)
            if shape.fits and shape.shared <= room and by_shared >= beside and shape.has_registers:
                yield shape


def b2b_wgmma_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The time model of a scheduled program."""
    tile = wgmma_shape_of(program)
    if tile is None:
        raise CompileRejected(f"{program.name}: no back-to-back GEMM", program=program.name)
    root = wgmma_cost.time(tile, machine)
    return KernelTime(root, machine.clock_hertz, unit_of(program), cost.moved_bytes(tile.block))

"""Schedules of few-channel convolutions (`lower.patterns.few_channel_conv`), ranked by a cycle model.

    cycles = waves * (LATENCY + filters + share * longest(units, shared memory, issue, L2 cache) + exit),
             at least bytes / (memory bytes per cycle)

with the constants of `gemm.mma`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.few_channel_conv import as_few_channel_conv, conv_geometry
from jcuts.schedule import fit
from jcuts.schedule.gpu.conv.few_channels_tile import DEPTH, LINES, TILE, WORD, FewChannelTile
from jcuts.schedule.gpu.gemm.mma import (
    AGAIN,
    BLOCKS,
    CHAIN,
    EXIT,
    LATENCY,
    MOST,
    MOST_SHARED,
    NOT_SHARED,
    OVERLAP,
    REGISTERS,
    bound_rates,
)
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine, scheduled, unit_rate

TILES = ((2, 32), (4, 16), (4, 32), (8, 16), (2, 64), (8, 32), (16, 16), (4, 64), (1, 32), (1, 64), (1, 128))
"""Rows and neighbours of a block's tile."""
COLUMNS = (16, 32, 64, 96, 128)
WARP_PIXELS = (16, 32, 64)
WARP_COLUMNS = (32, 64, 16, 48)
SHARES = (1, 2, 4, 8, 16)
RESIDENT = (1, 2, 3, 4, 6, 8)
"""Blocks of a multiprocessor that are to share all tiles evenly."""
_FIT = fit.coefficients("gpu/conv", "few_channels")
PIECE = _FIT.copy_instructions
"""Instructions of one copy of a patch: whether it is inside the image, and itself."""
RESULT = _FIT.result_instructions
"""Instructions per result of a thread: what follows the sum, and its share of the addresses."""
MOST_SHARE = 64
"""Tiles of a block."""
MOST_STEPS = 1400
"""Most ``mma`` instructions in one thread's code: it is unrolled."""


def products(program: Program, machine: GpuMachine, most: int = MOST) -> Iterator[Candidate]:
    """Schedules of a few-channel convolution (`lower.patterns.few_channel_conv`), at most so many; none for other
    programs.
    """
    made = as_few_channel_conv(program)
    if made is None:
        return
    best: dict[tuple[int, ...], tuple[float, FewChannelTile]] = {}
    for shape in shapes(made, machine):
        count = cycles(made, shape, machine)
        key = (shape.rows * shape.pixels, shape.columns, shape.stages)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    floor = cycle_bound(made, machine)
    ranked = sorted(best.values(), key=lambda found: found[0])[:most]
    for place, (count, shape) in enumerate(ranked):
        yield apply_tile(made, shape), min(1.0, floor / count) * AGAIN**place


def first_product(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """A schedule of `products`, if there are any: no times are estimated for it."""
    made = as_few_channel_conv(program)
    if made is None:
        return
    for shape in itertools.islice(shapes(made, machine), 1):
        yield apply_tile(made, shape), 1.0


def apply_tile(program: Program, shape: FewChannelTile) -> Program:
    """The scheduled program."""
    tile = (shape.rows, shape.pixels, shape.columns)
    params = (("tile", tile), ("warps", shape.warps), ("stages", shape.stages), ("share", shape.share))
    return scheduled(program, "patch", shape.threads, *params)


def shapes(program: Program, machine: GpuMachine) -> Iterator[FewChannelTile]:
    """All schedules that fit."""
    found = conv_geometry(program)
    widths = [c for c in COLUMNS if c == COLUMNS[0] or c < found.columns + TILE]
    for rows, pixels in TILES:
        if rows >= 2 * found.rows > 2 or (rows == 1) != (found.rows == 1) or pixels >= 2 * max(TILE, found.outputs):
            continue
        tiles = FewChannelTile(found, rows, pixels, TILE, (1, 1, 1), 1, 1).tiles
        even = {-(-tiles // (count * machine.sms)) for count in RESIDENT}
        shares = sorted({*SHARES, *(share for share in even if share <= MOST_SHARE)})
        for columns in widths:
            for warps in _warps(rows, pixels, columns):
                for share in shares:
                    for stages in (1, 2) if share > 1 else (1,):
                        shape = FewChannelTile(found, rows, pixels, columns, warps, stages, share)
                        products = shape.steps * math.prod(shape.warp) // (TILE * 8)
                        if shape.fits and shape.shared <= MOST_SHARED and products <= MOST_STEPS:
                            yield shape


def _warps(rows: int, pixels: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Warps of 32 or 64 outputs by 16 to 64 columns: rows of warps first."""
    for outputs in WARP_PIXELS:
        for wide in WARP_COLUMNS:
            if columns % wide or outputs * wide > 64 * 64:
                continue
            for long in (16, 32, 64):
                if outputs % long or pixels % long or rows % (outputs // long):
                    continue
                warps = (rows * long // outputs, pixels // long, columns // wide)
                if 2 <= math.prod(warps) <= 8:
                    yield warps


def cycle_bound(program: Program, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: memory, tensor cores."""
    found = conv_geometry(program)
    outputs = found.images * found.rows * found.outputs
    multiplied = float(outputs * found.columns * len(found.terms))
    rates = bound_rates(machine)
    unit = unit_rate(rates, found.item)
    return max(_moved(program) / rates.memory_bytes_per_cycle, multiplied / (machine.sms * unit), LATENCY)


def _moved(program: Program) -> float:
    return float(sum(b.bytes for b in (*program.inputs, *program.outputs)))


def time(program: Program, shape: FewChannelTile, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    high, long, broad = shape.warp
    rates = bound_rates(machine)
    outputs, warps = shape.rows * shape.pixels, math.prod(shape.warps)
    registers = 30 + high * long * broad // WARP + high * long * 6 // 5 + broad // 5
    room = machine.limits.smem_per_sm_bytes - NOT_SHARED
    resident = min(room // (shape.shared + 1024), REGISTERS // (shape.threads * registers), BLOCKS)
    resident = max(1, min(resident, machine.threads_per_sm // shape.threads))
    queue = -(-math.prod(shape.blocks) // machine.sms)
    beside, waves = min(resident, queue), queue / min(resident, queue)
    waits = shape.bank_conflict_cycles / len(shape.k_offsets)
    item = shape.patches.item
    read = warps * shape.steps * WORD * (high * long * waits * DEPTH // item + broad * LINES)
    tiles = high * long // TILE * (broad // 8)
    issued = warps * shape.steps * (tiles + high * long * 2 // item + broad // 4)
    issued += warps * shape.copies(shape.threads_per_line) * PIECE
    issued += RESULT * outputs * shape.columns / WARP
    copied = item * (shape.lines * shape.length + outputs * shape.columns)
    products = beside * shape.steps * (DEPTH // item) * outputs * shape.columns
    limits = [
        term(Resource.COMPUTE, products / unit_rate(rates, item), 2.0 * products),
        term(Resource.SMEM, beside * read / rates.smem_bytes_per_cycle),
        term(Resource.ISSUE, beside * issued / 4),
        term(Resource.L2, beside * copied / rates.l2_bytes_per_cycle),
        term(Resource.CHAIN, shape.steps * (CHAIN[1] + CHAIN[2] * tiles)),
    ]
    alone = LATENCY / beside if shape.stages == 1 else EXIT / beside  # what blocks beside it do not hide
    tile = serial([overlap(OVERLAP, limits), term(Resource.LATENCY, alone)])
    filters = term(Resource.L2, beside * shape.filters / rates.l2_bytes_per_cycle)
    share = min(shape.share, shape.tiles)
    wave = serial([term(Resource.LATENCY, LATENCY), filters, repeat(share, tile), term(Resource.EPILOGUE, EXIT)])
    total = per_sm(max(1.0, waves), wave, resident=beside, blocks=math.prod(shape.blocks), sms=machine.sms)
    moved = _moved(program)
    memory = serial([term(Resource.DRAM, moved / rates.memory_bytes_per_cycle, moved), term(Resource.LATENCY, LATENCY)])
    return overlap(OVERLAP, (total, memory))


def cycles(program: Program, shape: FewChannelTile, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(program, shape, machine).value

"""Schedules of the attention backward kernel, ranked by the cycle model of flash attention (`schedules`).

A column tile costs a warp the products of scores, dO V^T and the results, fragment reads for all of them, and the
element-wise operations of P and dS:

    cycles = sum over waves of hypot(blocks * work, ends + tiles * chain),  at least bytes / memory

Coefficients are those of the forward kernel, which has the same mainloop; registers are fitted to compiled kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jcuts.base.errors import Refusal
from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, soft_maximum, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.attention_backward import AttentionBackward, match_backward
from jcuts.lower.patterns.masked_tiles import masked_backward
from jcuts.schedule import fit
from jcuts.schedule.gpu.attention.backward_tile import FLAGS, FORM, BackwardTile
from jcuts.schedule.gpu.attention.schedules import (
    FEW_SHARED,
    HIGH,
    QUARTERS,
    bound_of_work,
    launch_time,
    resident_blocks,
    with_skips,
)
from jcuts.schedule.gpu.attention.tile import EIGHT, SIXTEEN, STEP
from jcuts.schedule.gpu.gemm.mma import (
    AGAIN,
    MOST,
    MOST_SHARED,
    OVERLAP,
    REGISTERS,
    bound_rates,
)
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine, scheduled, unit_rate

_FIT = fit.coefficients("gpu/attention", "cycles")
_REGISTERS = fit.coefficients("gpu/attention", "backward_registers")
COLUMNS = (16, 32, 64)
"""Columns of a tile."""
WARPS = (2, 4, 8)
STAGES = (2, 3, 1)
"""One where two do not fit: copies of a tile then wait for the products of the one before."""
EACH_ALIKE = 2
"""Schedules of equal rows and columns of a warp that are kept."""


def backward_schedules(program: Program, machine: GpuMachine, most: int = MOST) -> Iterator[Candidate]:
    """Schedules of a backward program, at most so many, the best of every kind of tile; none for other programs."""
    attention = match_backward(program)
    if isinstance(attention, Refusal):
        return
    counted = sorted(
        ((cycles(shape, program, machine), shape) for shape in shapes(attention, machine)), key=lambda found: found[0]
    )
    if not counted:
        return
    least = min(bound(attention, program, machine), counted[0][0])
    seen: dict[object, int] = {}
    scored = []
    for count, shape in counted:
        kind = (shape.high, shape.columns, shape.held)
        if seen.get(kind, 0) < EACH_ALIKE:
            scored.append((least / count * AGAIN ** seen.get(kind, 0), shape))
        seen[kind] = seen.get(kind, 0) + 1
    scored.sort(key=lambda found: -found[0])
    tried = with_skips(scored, masked_backward(attention) is not None, lambda shape: shape.tiles)
    for score, shape in itertools.islice(tried, most):
        yield apply_tile(program, shape), score


def apply_tile(program: Program, shape: BackwardTile) -> Program:
    """The scheduled program."""
    flags = tuple((name, True) for name in FLAGS if getattr(shape, name))
    params = (("tile", (shape.rows, shape.columns)), ("warps", shape.warps), ("stages", shape.stages), *flags)
    return scheduled(program, FORM, shape.threads, *params)


def shapes(attention: AttentionBackward, machine: GpuMachine) -> Iterator[BackwardTile]:
    """All block tiles within registers and shared memory."""
    rounded = (False, True) if attention.kind == "tf32" else (False,)
    room = machine.limits.smem_per_block_bytes
    most = min(FEW_SHARED, room) if machine.capability >= (9, 0) else min(MOST_SHARED, room)
    for high, columns, warps in itertools.product(HIGH, COLUMNS, WARPS):
        rows = high * warps
        if (rows > SIXTEEN and rows >= 2 * attention.rows) or (columns > SIXTEEN and columns >= 2 * attention.columns):
            continue
        fitting = False
        for stages, early, held in itertools.product(STAGES, rounded, (False, True)):
            shape = BackwardTile(attention, rows, columns, warps, stages, early, held)
            if (stages == 1 and fitting) or (stages > 2 and stages > shape.tiles) or shape.shared > most:
                continue
            fitting = True
            if registers(shape) <= min(_REGISTERS.maximum, REGISTERS / shape.threads):
                yield shape


def registers(shape: BackwardTile) -> float:
    """Registers of a thread: accumulators of the results and of both products of a tile, held fragments, addresses of
    what every score loads.
    """
    bands = shape.high // SIXTEEN
    outs = sum(tile.padded for tile in _factors(shape)) // EIGHT
    held = sum(tile.steps for tile in shape.row_tiles) if shape.held else 0
    kept = outs + held + 2 * shape.columns // EIGHT
    loads = shape.attention.pair_loads * _REGISTERS.per_pair_load
    return _REGISTERS.base + loads + _REGISTERS.per_value * bands * 4 * kept


def _factors(shape: BackwardTile) -> tuple:
    first, second = shape.column_tiles
    return (first,) if len(shape.attention.results) == 1 else (second, first)


def bound(attention: AttentionBackward, program: Program, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: tensor cores, memory."""
    work = attention.batches * attention.rows * attention.columns * sum(attention.products)
    return bound_of_work(work, attention.scores.item, program, machine)


def _issued(shape: BackwardTile) -> tuple[float, float, float]:
    """Of a warp and a column tile: products, element-wise instructions, and all other instructions."""
    attention, item = shape.attention, shape.attention.scores.item
    bands, terms = shape.high // SIXTEEN, STEP // item
    deep = sum(tile.steps for tile in shape.column_tiles)
    wide = sum(tile.padded for tile in _factors(shape))
    products = bands * (shape.columns // EIGHT * deep + wide // EIGHT * shape.columns // terms)
    reads = shape.columns // SIXTEEN * deep + wide // SIXTEEN * shape.columns // terms * (2 if item == 4 else 1)
    turned = 4 * reads if attention.kind == "tf32" and not shape.rounded else 0
    rows = 0 if shape.held else bands * deep
    each = shape.high * shape.columns / WARP * (_FIT.score_instructions + attention.element_ops)
    return products, each + _FIT.row_tile_instructions * bands, reads + turned + rows


def time(shape: BackwardTile, program: Program, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    attention, rates = shape.attention, machine.coefficients("gpu/attention", "cycles")
    item = attention.scores.item
    products, each, rest = _issued(shape)
    copies = shape.stage / 16 / WARP
    early = 6 * copies if shape.rounded else 0
    issued = (shape.warps * (products + each + rest) + 2 * copies + early) * _FIT.instruction_issue_cycles
    multiplied = shape.rows * shape.columns * sum(attention.products)
    passes = len(attention.results) + 2
    read = (shape.warps * passes / 2 + 1 + (2 if shape.rounded else 0)) * shape.stage
    read += 0 if shape.held else shape.row_bytes
    chain = _FIT.k_tile_chain_cycles + _FIT.product_chain_cycles * products + _FIT.instruction_chain_cycles * each
    own = serial([repeat(shape.tiles, term(Resource.CHAIN, chain)), term(Resource.START, _FIT.block_ends_cycles)])

    def wave(times: int, blocks: int, of_all: int) -> TimeTerm:
        uneven = -(-blocks * shape.warps // QUARTERS) * QUARTERS / (blocks * shape.warps)
        limits = [
            term(Resource.COMPUTE, multiplied / (2 * unit_rate(bound_rates(machine), item)), 2 * multiplied),
            term(Resource.SMEM, read / rates.smem_bytes_per_cycle),
            term(Resource.ISSUE, issued / QUARTERS * uneven),
            term(Resource.L2, shape.stage / rates.l2_bytes_per_cycle),
        ]
        work = repeat(blocks * shape.tiles, overlap(OVERLAP, limits))
        return per_sm(times, soft_maximum(2, work, own), resident=blocks, blocks=of_all, sms=machine.sms)

    resident = resident_blocks(shape.shared, registers(shape), shape.threads, machine)
    return launch_time(wave, shape.block_count, resident, program, machine)


def cycles(shape: BackwardTile, program: Program, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, program, machine).value

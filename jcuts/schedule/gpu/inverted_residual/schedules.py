"""Schedules of fused inverted residuals (`lower.patterns.inverted_residual`), ranked by a cycle model.

    cycles = waves * longer(blocks * pieces * longest(units, shared memory, issue, L2 cache),
                            LATENCY + pieces * (products + windows + WAIT) + EXIT),
             at least bytes / (memory bytes per cycle)

with the constants of `gemm.mma`; *pieces* are the channel chunks, *products* the two GEMMs, *windows* the depthwise
convolution, *units* the tensor cores.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from jcuts.base.errors import Refusal
from jcuts.estimate.time_model import Resource, TimeTerm, overlap, per_sm, repeat, serial, term
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.patterns.inverted_residual import InvertedResidual, match_inverted_residual
from jcuts.schedule import fit
from jcuts.schedule.gpu.gemm.mma import AGAIN, BLOCKS, EXIT, LATENCY, OVERLAP, REGISTERS, bound_rates
from jcuts.schedule.gpu.inverted_residual.tile import COLUMN_TILE, ROW_TILE, WORD, InvertedResidualTile
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine, scheduled, unit_rate

LISTED = 80
"""Schedules that are ranked: by default a tenth of them is measured."""
EDGES = (4, 7, 8, 14, 16, 28)
"""Outputs along an edge of a tile."""
IMAGES = (1, 2, 4)
CHUNKS = {4: (16, 32, 48, 64), 2: (16, 32, 48, 64, 96, 128)}
"""Channels of a piece, by bytes of an operand."""
WARPS = (4, 6, 7, 8, 12, 14, 16)
ACROSS = (1, 2, 3, 4)
STRIPS = (
    (4, 4),
    (7, 2),
    (2, 7),
    (4, 2),
    (2, 4),
    (7, 1),
    (1, 7),
    (8, 1),
    (1, 8),
    (2, 2),
    (4, 1),
    (1, 4),
    (8, 2),
    (2, 1),
)
MOST_STRIP = 64
"""Pixels that a strip's windows may cover."""
MOST_PIXELS = 480
"""Input pixels of a tile."""
MOST_OUTPUTS = 256
"""Outputs of a tile."""
MOST_SUMS = 96
"""Registers of a thread for accumulators of the results."""
MOST_WIDE = 64
"""Registers of a thread for accumulators of a channel chunk."""
CROWDED = 2
"""Best schedules that are also tried with one more block beside the others."""
_FIT = fit.coefficients("gpu/inverted_residual", "cycles")
_CANDIDATES = fit.coefficients("gpu/inverted_residual", "candidates")
NEXT = _CANDIDATES.bfloat16_alike_score_factor
"""What every further schedule of bfloat16 counts: estimates are off by more than they differ (16 % over 17 schedules),
so that more are tried."""
ALIKE = _CANDIDATES.bfloat16_alike_cycles_factor
"""What a schedule of bfloat16 counts more for every better one of its tile, or of its pieces and threads."""
LARGE = 256
"""Threads from which on a schedule of bfloat16 is of another kind: what float32 holds or not. It takes less room."""
SPARED = _CANDIDATES.register_excess_factor
"""What the assembler may have to do without, as a factor of the registers that there are."""
MOST_UNROLLED = 400
"""Most ``mma`` instructions in one thread's code per channel chunk."""
LEFT = 1 << 10
"""Bytes of shared memory that a block does not ask for."""
WAIT = _FIT.barrier_wait_cycles
"""Cycles of a channel chunk that a thread block waits for barriers and first reads."""
ALONE = _FIT.single_warp_cycles
"""Cycles of a warp's instruction, alone."""
QUARTERS = 4
"""Parts of a multiprocessor, each with warps of its own."""
AROUND = _FIT.chunk_instructions
"""Instructions of a warp per piece: loop, copies, addresses."""
PIECE = _FIT.copy_instructions
"""Instructions of a copy of a piece of an operand."""
FRAGMENT = 1024
"""Products of an instruction."""
MANY = 4
"""Waves from which on the last one counts for what it is."""


def products(program: Program, machine: GpuMachine, most: int = LISTED) -> Iterator[Candidate]:
    """Schedules of a fused inverted residual, at most so many; none for other programs."""
    found = match_inverted_residual(program)
    if isinstance(found, Refusal):
        return
    best: dict[tuple[int, ...], tuple[float, InvertedResidualTile]] = {}
    for shape in shapes(found, machine):
        count = cycles(shape, machine)
        kind = shape.held if found.item == WORD else shape.threads >= LARGE
        key = (shape.images, shape.rows, shape.columns, shape.chunk, kind)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    floor = least(found, machine)
    ranked = sorted(best.values(), key=lambda item: item[0])[:most]
    if found.item < WORD:
        ranked = _diverse(ranked)
    for place, (count, shape) in enumerate(ranked[:CROWDED]):
        others = [*_one_more_block(shape, machine)]
        if found.item < WORD and place == 0:
            others += [
                one
                for made in _toggle_input_registers(shape, machine)
                for one in (made, *_one_more_block(made, machine))
            ]
        more = [(max(count, cycles(other, machine)), other) for other in others]
        ranked[2 * place + 1 : 2 * place + 1] = more or [(math.inf, shape)]
    ranked = [found for found in ranked if found[0] < math.inf][:most]
    for place, (count, shape) in enumerate(ranked):
        yield of(program, shape), min(1.0, floor / count) * (AGAIN if found.item == WORD else NEXT) ** place


def _diverse(ranked: list[tuple[float, InvertedResidualTile]]) -> list[tuple[float, InvertedResidualTile]]:
    """The same, reordered so that neighbours of equal cycles differ in tiles, channel chunks and threads."""
    left, found, seen = list(ranked), [], Counter[tuple[str, int, int]]()

    def kinds(shape: InvertedResidualTile) -> tuple[tuple[str, int, int], ...]:
        return ("tile", shape.rows, shape.columns), ("work", shape.chunk, shape.threads)

    while left:
        found.append(min(left, key=lambda item: item[0] * ALIKE ** sum(seen[kind] for kind in kinds(item[1]))))
        left.remove(found[-1])
        seen.update(kinds(found[-1][1]))
    return found


def of(program: Program, shape: InvertedResidualTile) -> Program:
    """The scheduled program."""
    params = (
        ("tile", (shape.images, shape.rows, shape.columns)),
        ("chunk", shape.chunk),
        ("expand", shape.expand),
        ("project", shape.project),
        ("strip", shape.strip),
        *((("held", True),) if shape.held else ()),
        *((("beside", shape.beside),) if shape.beside > 1 else ()),
    )
    return scheduled(program, "block", shape.threads, *params)


def shapes(found: InvertedResidual, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """All schedules that fit; of the ways to divide work among warps, the one with least padding."""
    room = machine.limits.smem_per_block_bytes - LEFT
    outputs, (count, *_) = found.window.outputs, found.window.image
    rows, columns = ([e for e in EDGES if e == EDGES[0] or e < 2 * extent] for extent in outputs)
    for high, wide in itertools.product(rows, columns):
        whole = high >= outputs[0] and wide >= outputs[1]
        if high > wide and wide < outputs[1]:  # lines of memory are longer the other way
            continue
        for images in IMAGES if whole else IMAGES[:1]:
            if images > count or images * high * wide > MOST_OUTPUTS:
                continue
            plain = InvertedResidualTile(found, images, high, wide, COLUMN_TILE, (1, 1), (1, 1), (1, 1))
            if plain.pixels > MOST_PIXELS:
                continue
            for chunk in CHUNKS[found.item]:
                if chunk >= found.expanded_channels + COLUMN_TILE:
                    continue
                for warps in WARPS:
                    for held in (False, True):
                        shape = _split_over_warps(plain, chunk, warps, held)
                        if shape is not None and shape.fits and shape.shared <= room and _small(shape):
                            yield replace(
                                shape,
                                beside=max(
                                    1, min(_blocks_per_sm_by_registers(shape), _blocks_per_sm_limit(shape, machine))
                                ),
                            )


def _one_more_block(shape: InvertedResidualTile, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """The same with one more resident block per multiprocessor, where registers allow."""
    more = _blocks_per_sm_by_registers(shape) + 1
    if more <= _blocks_per_sm_limit(shape, machine) and more * shape.threads * _registers(shape) <= SPARED * REGISTERS:
        yield replace(shape, beside=more)


def _toggle_input_registers(shape: InvertedResidualTile, machine: GpuMachine) -> Iterator[InvertedResidualTile]:
    """The same with input pixels in registers instead of shared memory, or the reverse."""
    made = replace(shape, held=not shape.held, beside=1)
    if made.fits and made.shared <= machine.limits.smem_per_block_bytes - LEFT and _small(made):
        yield replace(made, beside=max(1, min(_blocks_per_sm_by_registers(made), _blocks_per_sm_limit(made, machine))))


def _blocks_per_sm_by_registers(shape: InvertedResidualTile) -> int:
    """Resident blocks per multiprocessor by registers."""
    return max(1, REGISTERS // (shape.threads * _registers(shape)))


def _blocks_per_sm_limit(shape: InvertedResidualTile, machine: GpuMachine) -> int:
    """Resident blocks per multiprocessor by threads and shared memory."""
    room = machine.limits.smem_per_block_bytes - LEFT
    return min(machine.threads_per_sm // shape.threads, BLOCKS, room // (shape.shared + 1024))


def _split_over_warps(plain: InvertedResidualTile, chunk: int, warps: int, held: bool) -> InvertedResidualTile | None:
    """The work divided among warps: fewest fragments of a warp, then fewest reads."""
    found = plain.block
    if warps * WARP % replace(plain, chunk=chunk).words:
        return None
    up = [
        (-(-plain.pixels // (ROW_TILE * (warps // a))) * (chunk // (8 * a)), a)
        for a in ACROSS
        if warps % a == 0 and chunk % (COLUMN_TILE * a) == 0
    ]
    down = [
        (-(-plain.outputs // (ROW_TILE * (warps // a))) * -(-found.out_channels // (COLUMN_TILE * a)), a)
        for a in (1, 2, 3, 4, 6, 7, 8)
        if warps % a == 0
    ]
    strips = [s for s in STRIPS if plain.rows % s[0] == plain.columns % s[1] == 0 and _covered(found, s) <= MOST_STRIP]
    if not up or not strips:
        return None
    first, second = min(up)[1], min(down)[1]
    groups = warps * WARP // replace(plain, chunk=chunk).words
    outputs = plain.outputs

    def work(strip: tuple[int, int]) -> float:
        turns = -(-(outputs // math.prod(strip)) // groups)
        return turns * (_covered(found, strip) + math.prod(strip) * (2 + len(found.window.taps) / 4) + 12)

    strip = min(strips, key=work)
    shares = (warps // first, first), (warps // second, second)
    return InvertedResidualTile(found, plain.images, plain.rows, plain.columns, chunk, *shares, strip, held)


def _covered(found: InvertedResidual, strip: tuple[int, int]) -> int:
    """Pixels that the windows of a strip cover."""
    step, reach = found.window.step, found.window.receptive_field
    return math.prod((s - 1) * t + r for s, t, r in zip(strip, step, reach, strict=True))


def _small(shape: InvertedResidualTile) -> bool:
    wide = shape.chunk // shape.expand[1] // 8
    unrolled = (
        shape.m_fragments_in * wide * shape.padded_in_channels
        + shape.m_fragments_out * shape.n_per_warp // 8 * shape.chunk
    ) // shape.step
    sums, piece = (
        shape.m_fragments_out * shape.n_per_warp // 2,
        shape.m_fragments_in * wide * 4 if shape.padded_in_channels else 0,
    )
    return sums <= MOST_SUMS and piece <= MOST_WIDE and unrolled <= MOST_UNROLLED and _registers(shape) <= 232


def _registers(shape: InvertedResidualTile) -> int:
    """Estimated registers of a thread."""
    wide = shape.chunk // shape.expand[1] // 8
    held = shape.input_registers if shape.held else 8
    alone = (
        shape.padded_in_channels <= shape.step and shape.item < WORD
    )  # one instruction per sum: one row after another
    sums = 2 * wide if alone else shape.m_fragments_in * wide
    expand = (sums + shape.m_fragments_in) * 4 - (12 if alone else 0)
    expand = expand if shape.padded_in_channels else shape.pixels * shape.words // shape.threads // 2
    windows = shape.lanes * math.prod(shape.strip) + _covered(shape.block, shape.strip) // 2
    filters = shape.lanes * len(shape.block.window.taps)
    if (
        shape.channel_chunks == 1 and not shape.padded_in_channels
    ):  # windows are summed before the results are, and as their pixels come
        return 36 + max(3 * shape.m_fragments_out * shape.n_per_warp // 4 + held, windows + filters // 2)
    return 36 + shape.m_fragments_out * shape.n_per_warp // 2 + held + max(expand, windows) + filters


def least(found: InvertedResidual, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: memory, tensor cores."""
    images, rows, columns, channels = found.window.image
    outputs = images * math.prod(found.window.outputs)
    multiplied = float(channels) * (images * rows * columns * found.in_channels + outputs * found.out_channels)
    rates = bound_rates(machine)
    unit = unit_rate(rates, found.item)
    return max(_moved(found) / rates.memory_bytes_per_cycle, multiplied / (machine.sms * unit), LATENCY)


def _moved(found: InvertedResidual) -> float:
    return float(sum(b.bytes for b in (*found.program.inputs, *found.program.outputs)))


def time(shape: InvertedResidualTile, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    found, warps, rates = shape.block, math.prod(shape.expand), bound_rates(machine)
    queue = -(-shape.tiles // machine.sms)
    beside = min(shape.beside, queue)
    waves = queue / beside
    waves = math.ceil(waves) if waves < MANY else waves
    phases = _products(shape, rates), _windows(shape, rates)
    units, port, issue = (float(sum(limit)) for limit in zip(*(p[:3] for p in phases), strict=True))
    copied = found.in_channels + found.out_channels + (shape.pixels if found.expand is None else 0)
    limits = [
        term(Resource.COMPUTE, units, 2.0 * units * unit_rate(rates, shape.item)),
        term(Resource.SMEM, port),
        term(Resource.ISSUE, issue),
        term(Resource.L2, shape.item * shape.chunk * copied / rates.l2_bytes_per_cycle),
    ]
    # Barriers keep a block's phases apart, and a warp waits for itself: only blocks beside each other fill the gaps.
    uneven = -(-warps // QUARTERS) * QUARTERS / warps
    own = sum(max(uneven * p[0], p[1], uneven * p[2], p[3] * ALONE / warps) for p in phases)
    chunk = serial([term(Resource.CHAIN, own), term(Resource.BARRIER, WAIT)])
    moved = shape.item * (shape.pixels * found.in_channels + 2 * shape.outputs * found.out_channels)
    ends = term(Resource.L2, moved / rates.l2_bytes_per_cycle)
    busy = repeat(beside, serial([repeat(shape.channel_chunks, overlap(OVERLAP, limits)), ends]))
    latency, exit_ = term(Resource.LATENCY, LATENCY), term(Resource.EPILOGUE, EXIT)
    alone = serial([latency, repeat(shape.channel_chunks, chunk), ends, exit_])
    wave = overlap(OVERLAP, (busy, alone))
    total = per_sm(waves, wave, resident=beside, blocks=shape.tiles, sms=machine.sms)
    memory = serial([term(Resource.DRAM, _moved(found) / rates.memory_bytes_per_cycle, _moved(found)), latency])
    return overlap(OVERLAP, (total, memory))


def cycles(shape: InvertedResidualTile, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, machine).value


Counted = tuple[float, float, float, float]
"""Cycles of a multiprocessor's tensor cores, shared memory and issue; instructions."""


def _products(shape: InvertedResidualTile, rates: fit.Coefficients) -> Counted:
    """Cycles of both GEMMs of a channel chunk."""
    found, chunk, warps = shape.block, shape.chunk, math.prod(shape.expand)
    pixels, outputs = (
        ROW_TILE * shape.m_fragments_in * shape.expand[0],
        ROW_TILE * shape.m_fragments_out * shape.project[0],
    )
    columns = shape.n_per_warp * shape.project[1]
    multiplied = chunk * (pixels * shape.padded_in_channels + outputs * columns)
    words = (
        shape.expand[0] * chunk * shape.padded_in_channels + shape.pixels * chunk + shape.project[1] * outputs * chunk
    )
    words += shape.project[0] * chunk * columns + chunk * (shape.padded_in_channels + columns)
    first, second = (
        0 if s is None or s.item < WORD or found.program.buffer(s.buffer).tf32 else 4 for s in found.weights
    )
    issued = multiplied / (FRAGMENT * shape.lanes) + warps * AROUND
    if found.expand is not None:
        issued += pixels * chunk * (_steps(found.expand.phases[0]) + _FIT.expand_instructions / shape.lanes) / WARP
    else:
        issued += shape.pixels * shape.words / 4 * PIECE / WARP
    issued += warps * (chunk / shape.expand[1] / 16) * shape.padded_in_channels / shape.step * (1 + first)
    issued += warps * chunk / shape.step * (shape.m_fragments_out + shape.n_per_warp / 16 * (1 + second))
    if not shape.held and shape.padded_in_channels:
        words += shape.expand[1] * pixels * shape.padded_in_channels
        issued += warps * shape.m_fragments_in * shape.padded_in_channels / shape.step
    unit, port = unit_rate(rates, shape.item), rates.smem_bytes_per_cycle
    return multiplied / unit, shape.item * words / port, issued / 4, issued


def _windows(shape: InvertedResidualTile, rates: fit.Coefficients) -> Counted:
    """Cycles of the depthwise stage of a channel chunk."""
    found, groups = shape.block, shape.threads // shape.words
    strips = -(-shape.strips // groups) * groups
    covered, made, lanes = _covered(found, shape.strip), math.prod(shape.strip), shape.lanes
    each = covered * (1 if lanes == 1 else 1 + lanes) + 2 * made
    each += lanes * made * (len(found.window.taps) + _steps(found.window.phase))
    words = shape.words * strips * (covered + made)
    issued = shape.words * (strips * each + groups * AROUND) / WARP
    return 0.0, WORD * words / rates.smem_bytes_per_cycle, issued / 4, issued


def _steps(phase: Phase) -> float:
    """Instructions per sum of the operations that follow it: bfloat16 is computed in pairs, and rounded with a ReLU."""
    nodes = phase.exit.nodes
    halves = sum(n.dtype == "bfloat16" and n.op in ("convert", "min", "max") for n in nodes)
    relu = any(n.dtype == "bfloat16" and n.op == "max" for n in nodes)
    skipped = ("acc", "load", "const", "widen")
    return sum(n.op not in skipped and n.dtype != "bfloat16" for n in nodes) + (halves - relu) / 2

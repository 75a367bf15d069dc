"""Flash-attention schedules for tensor cores, ranked by a cycle model.

A multiprocessor has ``queue`` blocks to run, ``resident`` of them at once (occupancy):

    cycles = sum over its waves of hypot(blocks * work, ENDS + tiles * chain),  at least bytes / memory
    memory = at most the bytes of the rings of all blocks that run at once over the memory's latency (Little's law)
    work = tiles * longest(units, shared memory, issue, L2 cache)    chain = dependent latency of one warp

Each quarter of a multiprocessor issues for its own warps: with five warps, one quarter has two.

Where heads and rows make fewer blocks than there are multiprocessors (decoding), the blocks of a cluster divide the
keys (split-KV; capability 9.0).  Clusters do not fill all multiprocessors of their GPCs: 16 clusters of eight blocks
that fill an SM each took two waves on an H200.

Constants are fitted to 190 schedules of 14 sizes on an H200, in float32 and bfloat16: the median of measured over
estimated time is within 25 % of 1 for each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jcuts.base.errors import Refusal
from jcuts.estimate.time_model import Resource, TimeTerm, longest, overlap, per_sm, repeat, serial, soft_maximum, term
from jcuts.kernel_ir.program import Program
from jcuts.lower.patterns.attention import Attention, match
from jcuts.lower.patterns.masked_tiles import masked_forward
from jcuts.schedule import fit
from jcuts.schedule.gpu.attention.tile import EIGHT, FLAGS, SIXTEEN, STEP, FlashTile
from jcuts.schedule.gpu.few_row_gemm import CLUSTER_SIZES, CLUSTERS
from jcuts.schedule.gpu.gemm.mma import (
    AGAIN,
    BLOCKS,
    LATENCY,
    MOST,
    MOST_SHARED,
    NOT_SHARED,
    OVERLAP,
    REGISTERS,
    bound_rates,
)
from jcuts.schedule.gpu.machine import WARP, Candidate, GpuMachine, scheduled, unit_rate

_FIT = fit.coefficients("gpu/attention", "cycles")
_REGISTERS = fit.coefficients("gpu/attention", "registers")
_SPLIT = fit.coefficients("gpu/attention", "split_keys")
HIGH = (16, 32)
"""Rows of a warp."""
WIDE = (16, 32, 64)
"""Keys of a warp."""
WARPS = (1, 2, 3, 4, 6, 8, 12)
"""Warps along rows."""
PARTS = (1, 2, 4, 8)
"""Warps along keys."""
STAGES = (1, 2, 3, 4)
MOST_WARPS = 12
FEWEST_WARPS = 2
FEW = 264
"""So few blocks may take more shared memory each, where an SM has it."""
FEW_SHARED = 208 << 10
"""Bytes of shared memory of such a block."""
MANY = 16
"""Column tiles of which leaving out the masked ones is likely to gain: with eight it does not (H200, 512 positions)."""
QUARTERS = 4
"""Parts of a multiprocessor, each with registers and warps of its own."""


def products(program: Program, machine: GpuMachine, most: int = MOST) -> Iterator[Candidate]:
    """Schedules of an attention program, at most so many, the best of every kind of tile; none for other programs."""
    attention = match(program)
    if isinstance(attention, Refusal):
        return
    best: dict[tuple[object, ...], tuple[float, FlashTile]] = {}
    for shape in shapes(attention, machine):
        count = cycles(shape, program, machine)
        key = (shape.rows, shape.warps, shape.rounded, shape.cluster)
        if key not in best or count < best[key][0]:
            best[key] = (count, shape)
    least = min(bound(attention, program, machine), *(count for count, _ in best.values())) if best else 0.0
    seen: dict[object, int] = {}
    scored = []
    for count, shape in sorted(best.values(), key=lambda found: found[0]):
        kind = (shape.warp[0], shape.rounded, shape.cluster)
        scored.append((least / count * AGAIN ** seen.get(kind, 0), shape))
        seen[kind] = seen.get(kind, 0) + 1
    scored.sort(key=lambda found: -found[0])
    tried = with_skips(scored, masked_forward(attention) is not None, lambda shape: -(-attention.keys // shape.keys))
    for score, shape in itertools.islice(tried, most):
        yield apply_tile(program, shape), score


def with_skips(
    scored: list[tuple[float, Any]], masks: bool, walked: Callable[[Any], int]
) -> Iterator[tuple[float, Any]]:
    """Tiles with their scores; where scores may be masked each of them twice, with `skips` and without.

    The model does not know how many tiles are masked: both are measured, the likelier one first.

    Args: walked: column tiles that a row tile is multiplied with.
    """
    for score, shape in scored:
        skips = masks and walked(shape) >= MANY
        if skips:
            yield score, replace(shape, skips=True)
        yield score, shape
        if masks and not skips:
            yield score * AGAIN, replace(shape, skips=True)


def apply_tile(program: Program, shape: FlashTile) -> Program:
    """The scheduled program."""
    more: tuple[tuple[str, object], ...] = tuple((name, True) for name in FLAGS if getattr(shape, name))
    more += (("cluster", shape.cluster),) if shape.cluster > 1 else ()
    params = (("tile", (shape.rows, shape.keys)), ("warps", shape.warps), ("stages", shape.stages), *more)
    return scheduled(program, "attention", shape.threads, *params)


def shapes(attention: Attention, machine: GpuMachine) -> Iterator[FlashTile]:
    """All block tiles within registers and shared memory."""
    rounded = (False, True) if attention.kind == "tf32" else (False,)
    room = machine.limits.smem_per_block_bytes
    most = min(FEW_SHARED, room) if machine.capability >= (9, 0) else MOST_SHARED
    for high, wide, along, parts in itertools.product(HIGH, WIDE, WARPS, PARTS):
        rows, keys = high * along, wide * parts
        if not FEWEST_WARPS <= along * parts <= MOST_WARPS or (rows > SIXTEEN and rows >= 2 * attention.rows):
            continue
        if keys > SIXTEEN and keys >= 2 * attention.keys:
            continue
        blocks = attention.batches * -(-attention.rows // rows)
        clusters = CLUSTER_SIZES if machine.capability >= CLUSTERS and blocks < machine.sms else (1,)
        for stages, early, cluster in itertools.product(STAGES, rounded, clusters):
            shape = FlashTile(attention, rows, keys, (along, parts), stages, early, cluster=cluster)
            if stages > shape.walked or (stages == 1 < shape.walked):
                continue
            if shape.shared > MOST_SHARED and shape.block_count > FEW:
                continue
            if (
                shape.fits
                and shape.shared <= most
                and registers(shape) <= min(_REGISTERS.maximum, register_budget(shape))
            ):
                yield shape


def registers(shape: FlashTile) -> float:
    """Registers of a thread: query fragments, output accumulators, scores."""
    high, wide = shape.warp
    kept = shape.steps + shape.padded_head_dim // EIGHT + wide // EIGHT
    bands = high // SIXTEEN
    found = _REGISTERS.base + _REGISTERS.per_value * bands * 2 * shape.lane_rows * kept
    return found + _REGISTERS.per_16_keys * wide / SIXTEEN + _REGISTERS.per_16_rows * bands


def register_budget(shape: FlashTile) -> float:
    """Register limit of a thread with one resident block."""
    return REGISTERS / shape.threads


def bound(attention: Attention, program: Program, machine: GpuMachine) -> float:
    """Lower bound on any schedule's cycles: tensor cores, memory."""
    work = attention.batches * attention.rows * attention.keys * (attention.key.length + attention.value.length)
    return bound_of_work(work, attention.key.item, program, machine)


def bound_of_work(work: int, item: int, program: Program, machine: GpuMachine) -> float:
    """Lower bound on the cycles of so many multiply-adds of operands of ``item`` bytes, and of a program's memory."""
    moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
    rates = bound_rates(machine)
    return max(work / (machine.sms * 2 * unit_rate(rates, item)), moved / rates.memory_bytes_per_cycle, LATENCY)


def resident_blocks(shared: int, registers: float, threads: int, machine: GpuMachine) -> int:
    """Blocks that a multiprocessor holds at once. Args: shared: bytes of a block; registers: of a thread."""
    taken = -(-registers // EIGHT) * EIGHT * WARP
    beside = QUARTERS * int(REGISTERS // QUARTERS // taken) // (threads // WARP)
    room = machine.limits.smem_per_sm_bytes - NOT_SHARED
    return max(1, min(room // (shared + 1024), beside, BLOCKS, machine.threads_per_sm // threads))


def launch_time(
    wave: Callable[[int, int, int], TimeTerm],
    blocks: int,
    resident: int,
    program: Program,
    machine: GpuMachine,
    in_flight: int = 0,
    cluster: int = 1,
) -> TimeTerm:
    """Cycles of a launch in waves, or of its memory.

    Args:
        wave: of how often, with how many blocks per multiprocessor, for how many of all blocks.
        in_flight: bytes that a block has asked for at a time; 0: enough.
        cluster: blocks that run on multiprocessors of one GPC at once: clusters do not fill all of them.
    """
    beyond = max(0.0, cluster - _SPLIT.tpc_multiprocessors)
    usable = int(machine.sms * (1 - _SPLIT.idle_share_per_block * beyond))
    full, rest = divmod(-(-blocks // usable), resident)
    first = min(blocks, full * resident * usable)
    waves = [wave(full, resident, first)] if full else []
    if rest:
        waves.append(wave(1, rest, blocks - first))
    moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
    memory = term(Resource.DRAM, moved / bound_rates(machine).memory_bytes_per_cycle, moved)
    if in_flight:
        at_once = in_flight * min(blocks, resident * machine.sms)
        latency = _SPLIT.memory_latency_seconds * machine.clock_hertz
        memory = soft_maximum(4, memory, term(Resource.LATENCY, moved / at_once * latency))
    return longest((serial(waves), serial([memory, term(Resource.LATENCY, LATENCY)])))


def time(shape: FlashTile, program: Program, machine: GpuMachine) -> TimeTerm:
    """Cycles of a launch by their terms."""
    attention, rates = shape.attention, machine.coefficients("gpu/attention", "cycles")
    item, (high, wide), (along, parts) = attention.key.item, shape.warp, shape.warps
    depth, features = shape.steps * STEP // item, shape.padded_head_dim
    count, bands = along * parts, high // SIXTEEN
    line = (depth + features) * item
    values = wide * item // STEP  # steps along the keys of a warp
    products = bands * (wide // EIGHT * shape.steps + features // EIGHT * values)
    reads = wide // SIXTEEN * shape.steps + features // SIXTEEN * values * (2 if item == 4 else 1)
    turned = 4 * reads if item == 4 and not shape.rounded else 0
    each = high * wide / WARP * (_FIT.score_instructions + attention.score_ops)
    each = each + high * features / WARP + _FIT.row_tile_instructions * bands
    copies = shape.keys * line / 16 / WARP
    early = 2 * copies + 4 * copies if shape.rounded else 0
    issued = (count * (products + reads + turned + each) + 2 * copies + early) * _FIT.instruction_issue_cycles
    multiplied = shape.rows * shape.keys * (depth + features)
    read = (along + 1 + (2 if shape.rounded else 0)) * shape.keys * line
    chain = _FIT.k_tile_chain_cycles + _FIT.product_chain_cycles * products + _FIT.instruction_chain_cycles * each
    ends = _FIT.block_ends_cycles * (1 if parts == 1 else 2)
    if shape.cluster > 1:
        ends += _SPLIT.cluster_seconds * machine.clock_hertz
    own = serial([repeat(shape.walked, term(Resource.CHAIN, chain)), term(Resource.START, ends)])

    def wave(times: int, blocks: int, of_all: int) -> TimeTerm:
        uneven = -(-blocks * count // QUARTERS) * QUARTERS / (blocks * count)  # a quarter has whole warps
        limits = [
            term(
                Resource.COMPUTE,
                multiplied / (2 * unit_rate(bound_rates(machine), item)),
                2.0 * multiplied,
            ),
            term(Resource.SMEM, read / rates.smem_bytes_per_cycle),
            term(Resource.ISSUE, issued / QUARTERS * uneven),
            term(Resource.L2, shape.keys * line / rates.l2_bytes_per_cycle),
        ]
        work = repeat(blocks * shape.walked, overlap(OVERLAP, limits))
        return per_sm(times, soft_maximum(2, work, own), resident=blocks, blocks=of_all, sms=machine.sms)

    resident = resident_blocks(shape.shared, registers(shape), shape.threads, machine)
    in_flight = shape.ahead * shape.keys * line
    return launch_time(wave, shape.block_count, resident, program, machine, in_flight, shape.cluster)


def cycles(shape: FlashTile, program: Program, machine: GpuMachine) -> float:
    """Estimated cycles of a launch."""
    return time(shape, program, machine).value

"""Schedules of the depthwise filter gradient (wgrad): a register-tiled reduction whose window slides down image rows.

Rows that windows share stay in registers; the reduction is split over blocks; a fitted cost model ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcuts.estimate.time_model import KernelTime, Resource, TimeTerm, scaled, serial, term
from jcuts.kernel_ir.program import Phase, Program, Red
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import work
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.machine import (
    ACCESS,
    IN_FLIGHT,
    MOST_REGISTERS,
    SECTOR,
    TAPS,
    Candidate,
    GpuMachine,
    block_threads,
    distinct_loads,
    lane_counts,
    loads_of,
    narrowest,
    scheduled,
    tiled,
)

_FIT = fit.coefficients("gpu/window", "filter_gradient")


def sliding_gradients(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules whose threads take a few columns of an image, slide down its rows, and keep shared rows in
    registers.
    """
    phase = program.phases[0]
    taps = taps_of(phase)
    if not taps or math.prod(taps.values()) > TAPS or any(acc.index_dtype for acc in phase.accs):
        return
    last, others = inner_reduction(phase, taps)
    if not others:
        return
    lane, size, down = phase.axes[-1], narrowest(program), others[-1]
    for vector in [v for v in (ACCESS // size // 2, ACCESS // size // 4) if v and lane.extent % v == 0]:
        for wide, rows in itertools.product((2, 4, 7, 8), (1, 2, 4)):
            if last.extent % wide or down.extent % rows:
                continue
            counts = {**taps, last.name: wide, down.name: rows, lane.name: vector}
            values = distinct_loads(phase, counts)
            fresh = max(1, distinct_loads(phase, {**counts, down.name: 2 * rows}) - values)
            registers = _registers(taps, vector, values, fresh, size, wide)
            if registers > MOST_REGISTERS:
                continue
            for pieces in (1, 2, 4):
                if down.extent % (pieces * rows) == 0 and down.extent > pieces * rows:
                    tile = _Tile(vector, {last.name: wide, down.name: down.extent // pieces}, values, fresh, registers)
                    yield from _shapes(program, machine, tile, (down.name, rows))


@dataclass(frozen=True)
class _Tile:
    """Register tile of a filter gradient.

    Attributes:
        vector: neighbouring outputs of a thread.
        terms: points of reductions per step.
        values: values loaded by a step.
        fresh: new values in it.
        registers: of a thread.
    """

    vector: int
    terms: dict[str, int]
    values: int
    fresh: int
    registers: float


@dataclass(frozen=True)
class _Launch:
    """Blocks of one tile. Args: across: threads along the lanes; each: tiles of a thread; ahead: tiles loaded early."""

    across: int
    threads: int
    each: int
    ahead: int
    split: int


def _shapes(program: Program, machine: GpuMachine, tile: _Tile, walk: tuple[str, int]) -> Iterator[Candidate]:
    """Blocks and splits of one tile."""
    phase = program.phases[0]
    taps, lane, size = taps_of(phase), phase.axes[-1], narrowest(program)
    whole = sum(b.bytes for b in (*program.inputs, *program.outputs)) / machine.bandwidth
    terms = math.prod(r.extent for r in phase.reds) // math.prod(tile.terms.values())
    wide = lane.extent // tile.vector
    options = lane_counts(wide)
    exact = [a for a in options if wide % a == 0] or options
    for across in [a for a in exact if a * tile.vector * size % SECTOR == 0] or exact:
        for threads, each, ahead in itertools.product(block_threads(across, (128, 256, 512)), (1, 2), (1, 2)):
            deep = threads // across
            split = -(-terms // (deep * each))
            if split < 2 or deep < 2 or across * tile.vector > threads:
                continue
            registers = tile.registers + (ahead - 1) * tile.fresh * size / 4
            if _resident(registers, threads, machine) < machine.sms or registers > MOST_REGISTERS:
                continue
            launch = _Launch(across, threads, each, ahead, split)
            seconds = _time(program, machine, tile, walk[1], launch).value
            made = tiled(program, {**taps, lane.name: tile.vector}, tile.terms)
            params = (("across", across), ("flight", 1), ("split", split), ("walk", walk), ("ahead", ahead))
            yield scheduled(made, "columns", threads, *params), whole / seconds


def _resident(registers: float, threads: int, machine: GpuMachine) -> int:
    """Blocks that the GPU runs at once."""
    of_threads = min(machine.threads_per_sm, machine.limits.registers_per_sm // (-(-int(registers) // 8) * 8))
    return machine.sms * of_threads // threads


def _time(program: Program, machine: GpuMachine, tile: _Tile, rows: int, launch: _Launch) -> TimeTerm:
    """Seconds by their terms. Args: rows: of a step of the sliding window."""
    phase = program.phases[0]
    taps, lane, size = taps_of(phase), phase.axes[-1], narrowest(program)
    inside = math.prod(tile.terms.values())
    terms = math.prod(r.extent for r in phase.reds) // inside
    steps = _steps(phase, tile, rows)
    across, ahead, split = launch.across, launch.ahead, launch.split
    wide = lane.extent // tile.vector
    deep, lanes = launch.threads // across, -(-wide // across)
    registers = tile.registers + (ahead - 1) * tile.fresh * size / 4
    held = max(1, _resident(registers, launch.threads, machine))
    blocks = lanes * split
    waves = max(1.0, blocks / held)
    there = min(blocks, held) * launch.threads
    under_way = there * tile.fresh * size * (_FIT.prefetch_in_flight_factor if ahead > 1 else 1.0)
    used = terms / (split * deep * launch.each) * wide / (lanes * across)
    work = 1.0 + 0.5 * IN_FLIGHT / 2 / under_way
    work += _FIT.reread_weight * (tile.values / tile.fresh - 1.0) / steps
    work += 0.5 * (tile.fresh / (2 * inside // steps * tile.vector) - 1.0)  # columns that neighbours read as well
    work += 2.0 * steps / (inside * tile.vector)  # what a step takes besides its products
    narrow = _FIT.narrow_access_8_factor if tile.vector * size == 8 else _FIT.narrow_access_factor
    line = min(1.0, _FIT.line_share_base + _FIT.line_share_slope * across * tile.vector * size / 128)
    waste = 1.0 + ahead * _FIT.prefetch_factor + 1.0 / (steps * launch.each * waves)
    ratios = {
        "loads in flight and reuse": work,
        "access": 1.0 if tile.vector * size == 16 else narrow,
        "waves": waste + _FIT.wave_weight * (waves > 1.0) / waves,
        "idle threads": (1.0 + _FIT.idle_weight * (1.0 / used - 1.0)) / line,
        "idle SMs": math.sqrt(max(1.0, machine.sms / blocks)),
        "occupancy": (there / machine.threads) ** -_FIT.resident_threads_exponent,
    }
    moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
    spent = term(Resource.DRAM, moved / machine.bandwidth, moved)
    for name, ratio in ratios.items():
        spent = scaled(name, ratio, spent)
    results = math.prod(taps.values()) * lane.extent
    second = term(Resource.REDUCE, 8 * results * split / machine.bandwidth)
    return serial([spent, term(Resource.LAUNCH, _FIT.launch_seconds), second])


def _steps(phase: Phase, tile: _Tile, rows: int) -> int:
    """Steps of a thread's sliding window."""
    _, others = inner_reduction(phase, taps_of(phase))
    return tile.terms[others[-1].name] // rows


def gradient_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled filter gradient with a sliding window."""
    params: Any = dict(program.params)
    phase, size = program.phases[0], narrowest(program)
    taps, lane = taps_of(phase), phase.axes[-1]
    down, rows = params["walk"]
    terms = {r.name: r.unroll for r in phase.reds}
    counts = {**taps, **terms, down: rows, lane.name: lane.unroll}
    values = distinct_loads(phase, counts)
    fresh = max(1, distinct_loads(phase, {**counts, down: 2 * rows}) - values)
    wide = terms[inner_reduction(phase, taps)[0].name]
    registers = _registers(taps, lane.unroll, values, fresh, size, wide)
    across, threads, split = int(params["across"]), int(params["threads"]), int(params["split"])
    tiles = math.prod(r.extent for r in phase.reds) // math.prod(terms.values())
    each = -(-tiles // (threads // across * split))
    tile = _Tile(lane.unroll, terms, values, fresh, registers)
    root = _time(program, machine, tile, rows, _Launch(across, threads, each, int(params["ahead"]), split))
    flop = float(sum(work(phase) for phase in program.phases))
    return KernelTime(root, unit="ffma", compulsory=memory_bound(program).bytes, flop=flop)


def _registers(taps: dict[str, int], vector: int, values: int, fresh: int, size: int, wide: int) -> float:
    """Registers of a thread, estimated."""
    return 24 + math.prod(taps.values()) * vector + (values + fresh) * size / 4 + wide * vector


def inner_reduction(phase: Phase, taps: dict[str, int]) -> tuple[Red, list[Red]]:
    """The innermost reduction (densest points), and the others that taps move along with."""
    last = phase.reds[-1] if len(phase.reds) == 1 else max(phase.reds, key=lambda r: innermost(phase, r.name))
    return last, [r for r in phase.reds if r is not last and any(shares_operand(phase, a, r.name) for a in taps)]


def taps_of(phase: Phase) -> dict[str, int]:
    """Axes of results that share operands: the taps of a filter's gradient."""
    strides = {
        a.name: [n.index.stride(a.name) for n in loads_of(phase) if n.index is not None] for a in phase.axes[:-1]
    }
    slides = {
        name for name, moves in strides.items() if any(m not in (0, None) for m in moves) and any(m == 0 for m in moves)
    }
    return {a.name: a.extent for a in phase.axes[:-1] if a.name in slides}


def shares_operand(phase: Phase, axis: str, red: str) -> bool:
    """Whether some operand depends on an axis and a reduction through their sum."""
    return any(
        n.index is not None and n.index.stride(axis) not in (0, None) and n.index.stride(red) not in (0, None)
        for n in loads_of(phase)
    )


def innermost(phase: Phase, name: str) -> float:
    """Stride of a reduction's points, as a sort key."""
    strides = [abs(s) for n in loads_of(phase) if n.index is not None and (s := n.index.stride(name))]
    return -max(strides, default=math.inf)

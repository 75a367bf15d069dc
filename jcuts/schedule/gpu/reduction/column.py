"""Schedules of column reductions, softmax and norms along columns, Welford statistics, scans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jcuts.kernel_ir.program import Axis, Phase, Program
from jcuts.lower import split_scan
from jcuts.lower.scan_axes import LANE, TIME
from jcuts.schedule import fit
from jcuts.schedule.gpu.machine import (
    ACCESS,
    REGISTERS,
    RESIDENT,
    SHARED,
    TAPS,
    WARP,
    Candidate,
    GpuMachine,
    block_threads,
    distinct_loads,
    diverse_best,
    lane_counts,
    narrowest,
    rescale_to,
    scheduled,
    tiled,
    vectors,
)
from jcuts.schedule.gpu.reduction.column_cost import ColumnSchedule, column_time, groups_of, memory_of
from jcuts.schedule.gpu.reduction.column_time import (
    column_norm_time,
    scan_ratios,
    welford_ratios,
)
from jcuts.schedule.gpu.window import filter_gradient
from jcuts.schedule.gpu.window.filter_gradient import inner_reduction, innermost, taps_of

_POINT = fit.coefficients("gpu/reduction", "column_point")
_COLUMN = fit.coefficients("gpu/reduction", "column")
_WELFORD = fit.coefficients("gpu/reduction", "welford")
_SCAN = fit.coefficients("gpu/reduction", "scan")


def columns(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Column-reduction schedules: neighbouring outputs in neighbouring threads; rows of threads, and blocks, split the
    reduction.
    """
    phase = program.phases[0]
    # Terms that lie far apart change slowest: what neighbouring terms share is still in the cache.
    phase = replace(phase, reds=tuple(sorted(phase.reds, key=lambda r: innermost(phase, r.name))))
    program = replace(program, phases=(phase,))
    plain = list(_columns(program, machine))
    yield from plain
    yield from rescale_to(diverse_best(filter_gradient.sliding_gradients(program, machine)), plain)


def _columns(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    phase = program.phases[0]
    lane = phase.axes[-1]
    size = narrowest(program)
    results = math.prod(a.extent for a in phase.axes)
    if math.prod(r.extent for r in phase.reds) <= TAPS:  # few terms: a thread takes them all
        whole_tile = {r.name: r.extent for r in phase.reds}
        for vector, threads in itertools.product(vectors(lane.extent, size), (128, 256)):
            fill = min(1.0, results / vector / machine.threads)
            access = min(1.0, vector * size / ACCESS)
            if vector * math.prod(whole_tile.values()) <= REGISTERS:
                score = _POINT.occupancy_base + _POINT.occupancy_slope * fill
                score *= _POINT.access_base + _POINT.access_slope * access
                yield scheduled(tiled(program, {lane.name: vector}, whole_tile), "point", threads), score
    splittable = not any(acc.index_dtype for acc in phase.accs)
    memory = memory_of(program, machine)
    for taps, tile in _column_tiles(phase):
        terms = math.prod(r.extent // tile.get(r.name, 1) for r in phase.reds)
        inside = math.prod(tile.values())
        outer = math.prod(a.extent // taps.get(a.name, 1) for a in phase.axes[:-1])
        for vector in vectors(lane.extent, size):
            kept = math.prod(taps.values()) * vector * len(phase.accs)
            loads = distinct_loads(phase, {**taps, **tile, lane.name: vector})
            if kept > 80 or loads > 2 * REGISTERS:
                continue
            wide, made = lane.extent // vector, tiled(program, {**taps, lane.name: vector}, tile)
            shapes = [(a, t) for a in lane_counts(wide) for t in block_threads(a, (256, 512, 1024))]
            for (across, threads), flight in itertools.product(shapes, (4, 8, 2, 1)):
                deep = threads // across
                if flight > 1 and (inside > 1 or kept + flight * loads > REGISTERS or deep * flight > 2 * terms):
                    continue
                if across * vector > threads or (threads > (512 if taps else 768) and kept + flight * loads > 40):
                    continue
                once = ColumnSchedule(
                    wide, outer, vector, size, across, threads, kept, loads, inside, flight, 1, bool(taps)
                )
                resident = machine.sms * once.resident(machine)  # blocks that run at once
                for waves in (1, 2, 4, 0):
                    split = 1 if waves == 0 else min(waves * resident // once.blocks, terms // (2 * deep * flight))
                    if split < 1 or (split == 1) != (waves == 0) or (split > 1 and not splittable):
                        continue
                    groups = groups_of(terms, deep * flight, split)
                    spent = column_time(replace(once, split=groups), results, memory, machine).value
                    params = (("across", across), ("flight", flight), *((("split", split),) if split > 1 else ()))
                    yield (
                        scheduled(made, "columns", threads, *params),
                        (memory.value / spent if memory.value else 1.0),
                    )


def column_softmax(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of multi-phase programs along columns: a block has all points of its columns."""
    phase = next(p for p in program.phases if p.reds)
    lane = phase.axes[-1]
    size = narrowest(program)
    length = math.prod(r.extent for r in phase.reds)
    memory = memory_of(program, machine)
    for vector in vectors(lane.extent, size):
        wide = (8, 32) if length < 64 else ()  # short columns: threads beyond the last one rather than idle rows
        options = dict.fromkeys((*lane_counts(lane.extent // vector), *wide))
        for across, threads in itertools.product(options, (1024, 512, 256, 128)):
            unit = WARP // math.gcd(across, WARP)
            deep = threads // across // unit * unit
            if deep < 1 or vector > deep or deep > 2 * length:
                continue
            reduced = sum(len(p.accs) for p in program.phases)
            rows = across * deep // WARP if across < WARP and WARP % across == 0 else deep
            if 4 * reduced * rows * across * vector > SHARED:
                continue
            pieces = -(-length // deep)
            kept = pieces * vector
            if kept <= RESIDENT:
                chunks = pieces
            elif kept <= 2 * RESIDENT and threads <= 512:
                continue  # too much for registers at full occupancy, too little for a loop
            else:
                chunks = max(1, 8 // vector)
            params = (("across", across), ("vector", vector), ("chunks", chunks))
            made = scheduled(program, "column_rows", across * deep, *params)
            yield made, memory.value / column_norm_time(made, machine).value


def welford(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Schedules of one-pass (Welford) statistics, split over the grid, with results and dependent maps in further
    launches.
    """
    phase = program.phases[0]
    lane = phase.axes[-1]
    size = narrowest(program)
    length = math.prod(r.extent for r in phase.reds)
    outer = math.prod(a.extent for a in phase.axes[:-1])
    for vector in vectors(lane.extent, size):
        shapes = [(a, t) for a in lane_counts(lane.extent // vector) for t in block_threads(a, (512, 256))]
        for (across, threads), chunks in itertools.product(shapes, (8, 4)):
            unit = WARP // math.gcd(across, WARP)
            deep = threads // across // unit * unit
            lines = across * deep // WARP if across < WARP and WARP % across == 0 else deep
            if deep < vector or chunks * vector > RESIDENT or 16 * lines * across * vector > SHARED:
                continue
            blocks = -(-lane.extent // (vector * across)) * outer
            for waves in (1, 2):
                split = min(waves * machine.sms * (1024 // threads) // blocks, length // (deep * chunks))
                if split < 2:
                    continue
                params = (("across", across), ("vector", vector), ("chunks", chunks), ("split", split))
                made = scheduled(program, "moments", across * deep, *params)
                yield made, math.prod(welford_ratios(made, machine, threads).values())


def _scans_rows(program: Program) -> bool:
    """Whether a scan runs along the dimension that is contiguous in memory."""
    loads = [n.index for p in program.phases for n in p.exit.nodes if n.op == "load" and n.index is not None]
    return any(abs(i.stride(TIME) or 0) == 1 for i in loads)


def _time_axis(phase: Phase) -> tuple[Axis, int]:
    """The axis of a scan, and how many scans there are."""
    time = next(a for a in phase.axes if a.name == TIME)
    return time, math.prod(a.extent for a in phase.axes if a is not time)


def row_scans(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Scan schedules along rows: cooperating threads share each."""
    if not _scans_rows(program) or split_scan.scan_operator(program) is None:
        return
    time, _ = _time_axis(program.phases[0])
    size = narrowest(program)
    for vector in vectors(time.extent, size):
        for team in (32, 64, 128, 256, 512):
            if team > 32 and team * vector > 2 * time.extent:
                continue
            params = (("team", team), ("vector", vector))
            made = scheduled(program, "scan_rows", 128 if team == WARP else team, *params)
            yield made, math.prod(scan_ratios(made, machine).values())


def column_scans(program: Program, machine: GpuMachine) -> Iterator[Candidate]:
    """Scan schedules along columns: single threads, and groups of the scan in parallel where columns are few."""
    phase = program.phases[0]
    time, others = _time_axis(phase)
    size = narrowest(program)
    associates = split_scan.scan_operator(program) is not None
    lane = phase.axes[-1]
    if _scans_rows(program) or lane.name != LANE:
        return  # neighbouring threads would read far apart
    for vector in vectors(lane.extent, size):
        unroll = max(2, 16 // vector)
        params = (("vector", vector), ("unroll", unroll))
        made = scheduled(program, "scan_columns", 128, *params)
        yield made, math.prod(scan_ratios(made, machine).values())
        wanted = int(machine.threads / (others / vector))
        if associates and wanted > 1 and time.extent >= 8 * unroll:
            most = min(wanted, time.extent // (2 * unroll))
            for groups in {min(most, 512), min(most, 128)}:  # their totals are scanned one after another
                if groups > 1:
                    made = scheduled(program, "scan_columns", 128, *params, ("split", groups))
                    yield made, math.prod(scan_ratios(made, machine).values())


def _column_tiles(phase: Phase) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Register tile of a thread: outputs and reduced points (axis -> unroll, reduction -> unroll).

    One reduced point of one output but for windows (filter gradients), whose outputs at different taps share operands.
    """
    taps = taps_of(phase)
    if not taps or math.prod(taps.values()) > TAPS:
        return [({}, {})]
    last, others = inner_reduction(phase, taps)
    tiles = [{last.name: n} for n in (8, 7, 6, 5, 4, 3, 2) if last.extent % n == 0][:3]
    for red in others[-1:]:  # rows of the window are shared as well
        tiles += [{**t, red.name: n} for t in tiles for n in (2, 4) if red.extent % n == 0 and t[last.name] <= 4]
    return [*((taps, tile) for tile in tiles), (taps, {})]

"""Time model of scheduled column reductions, norms, Welford statistics and scans: memory time and ratios.

    seconds = (compulsory bytes / bandwidth) * product of ratios + launches

The ratios are fitted by hand (`fit_h200.toml`): lines that are used in part, loads in flight, idle threads, waves.
Columns that do not fit into registers are walked down phase by phase: few blocks take far longer for that than the
memory does (`column_walk`).
"""

from __future__ import annotations

import math
from typing import Any

from jcuts.estimate.time_model import KernelTime, Resource, TimeTerm, by_ratios, soft_maximum, term
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.scan_axes import TIME
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import work
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.machine import (
    ACCESS,
    IN_FLIGHT,
    GpuMachine,
    distinct_loads,
    narrowest,
)
from jcuts.schedule.gpu.reduction.column_cost import ColumnSchedule, column_time, groups_of, memory_of
from jcuts.schedule.gpu.window import filter_gradient

_SOFTMAX = fit.coefficients("gpu/reduction", "column_softmax")
_WALK = fit.coefficients("gpu/reduction", "column_walk")
_WELFORD = fit.coefficients("gpu/reduction", "welford")
_SCAN = fit.coefficients("gpu/reduction", "scan")
SOFTMAX_THREADS = {
    1024: _SOFTMAX.threads_1024_factor,
    512: 1.0,
    256: _SOFTMAX.threads_256_factor,
    128: _SOFTMAX.threads_128_factor,
}
"""Factor on the score, by threads of a block."""


def of_program(program: Program, root: TimeTerm) -> KernelTime:
    """The model of a scheduled program with an expression in seconds."""
    flop = float(sum(work(phase) for phase in program.phases))
    return KernelTime(root, unit="ffma", compulsory=memory_bound(program).bytes, flop=flop)


# -- sums of columns ---------------------------------------------------------------------------------------------------
def column_schedule(program: Program) -> ColumnSchedule:
    """The schedule of a scheduled column reduction."""
    params: Any = dict(program.params)
    phase = program.phases[0]
    lane, others = phase.axes[-1], phase.axes[:-1]
    tile = {r.name: r.unroll for r in phase.reds}
    counts = {**{a.name: a.unroll for a in phase.axes}, **tile}
    kept = math.prod(a.unroll for a in phase.axes) * len(phase.accs)
    terms, flight = math.prod(r.extent // r.unroll for r in phase.reds), int(params.get("flight", 1))
    return ColumnSchedule(
        lane.extent // lane.unroll,
        math.prod(a.extent // a.unroll for a in others),
        lane.unroll,
        narrowest(program),
        int(params["across"]),
        int(params["threads"]),
        kept,
        distinct_loads(phase, counts),
        math.prod(tile.values()),
        flight,
        groups_of(terms, int(params["threads"]) // int(params["across"]) * flight, int(params.get("split", 1))),
        any(a.unroll > 1 for a in others),
    )


def column_reduction_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled column reduction, of filter gradients with a sliding window too."""
    results = math.prod(a.extent for a in program.phases[0].axes)
    made = filter_gradient.gradient_schedule(program) if "walk" in dict(program.params) else column_schedule(program)
    root = column_time(made, results, memory_of(program, machine), machine)
    return of_program(program, root)


# -- norms, statistics, scans ------------------------------------------------------------------------------------------
def softmax_ratios(program: Program, machine: GpuMachine, threads: int) -> dict[str, float]:
    """Shares of the bandwidth of a norm or softmax of columns in registers. Args: threads: of a block, rounded up."""
    params: Any = dict(program.params)
    phase = next(p for p in program.phases if p.reds)
    lane, size = phase.axes[-1], narrowest(program)
    length, outer = math.prod(r.extent for r in phase.reds), math.prod(a.extent for a in phase.axes[:-1])
    across, vector = int(params["across"]), int(params["vector"])
    deep = int(params["threads"]) // across
    pieces = -(-length // deep)
    blocks = -(-lane.extent // (vector * across)) * outer
    fill = min(1.0, blocks * across * deep / machine.threads)
    return {
        "lines": _line_share(across * vector * size),
        "occupancy": _SOFTMAX.occupancy_base + _SOFTMAX.occupancy_slope * fill,
        "depth": min(1.0, _SOFTMAX.depth_base + _SOFTMAX.depth_slope * pieces * vector / 16),
        "idle points": length / (pieces * deep),
        "idle columns": lane.extent / (-(-lane.extent // (vector * across)) * vector * across),
        "block": SOFTMAX_THREADS.get(threads, 1.0),
    }


def _line_share(width: int) -> float:
    """Share of the bandwidth that accesses of so many neighbouring bytes reach."""
    return min(1.0, _SOFTMAX.line_share_base + _SOFTMAX.line_share_slope * width / LINE)


def _accesses(phase: Phase, columns: frozenset[str]) -> int:
    """Values that a phase loads and stores at every point: those whose address moves along the column."""
    inner = [r.name for r in phase.reds] or [a.name for a in phase.axes if a.name not in columns]
    graph = phase.body if phase.reds else phase.exit
    loads = [n.index for n in graph.nodes if n.op == "load" and n.index is not None]
    return sum(any(i.stride(name) != 0 for name in inner) for i in (*loads, *(s.address for s in phase.stores)))


def _walk_seconds(program: Program, machine: GpuMachine) -> float:
    """What the blocks of an SM take to walk down their columns, every phase anew, a chunk of points after the other.

    passes over the columns * chunks * (latency + values of a thread * (its own + the SM's seconds per value))
    """
    params: Any = dict(program.params)
    phase = next(p for p in program.phases if p.reds)
    columns = frozenset(a.name for a in phase.axes)
    across, vector, chunks, threads = (int(params[n]) for n in ("across", "vector", "chunks", "threads"))
    length, outer = math.prod(r.extent for r in phase.reds), math.prod(a.extent for a in phase.axes[:-1])
    blocks = -(-phase.axes[-1].extent // (vector * across)) * outer
    steps = -(-length // (threads // across * chunks))
    together = min(-(-blocks // machine.sms), max(1, machine.threads_per_sm // threads))
    waves = blocks / (machine.sms * together)
    values = chunks * vector * sum(_accesses(p, columns) for p in program.phases)
    each = _WALK.value_seconds + _WALK.sm_value_seconds * threads * together
    share = min(1.0, across * vector * narrowest(program) / LINE) ** _WALK.line_exponent
    return math.ceil(waves) * steps * (len(program.phases) * _WALK.latency_seconds + values * each) / share


def column_norm_time(program: Program, machine: GpuMachine) -> TimeTerm:
    """Seconds of a norm or softmax of columns: of such as stay in registers by the memory, of longer ones by the walk
    down them, too.
    """
    params: Any = dict(program.params)
    threads, memory = int(params["threads"]), memory_of(program, machine)
    length = math.prod(r.extent for r in next(p for p in program.phases if p.reds).reds)
    if int(params["chunks"]) * (threads // int(params["across"])) < length:
        return soft_maximum(2, memory, term(Resource.LATENCY, _walk_seconds(program, machine)))
    nominal = next((n for n in sorted(SOFTMAX_THREADS) if n >= threads), threads)
    return by_ratios(memory, softmax_ratios(program, machine, nominal))


def softmax_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled norm or softmax of columns."""
    return of_program(program, column_norm_time(program, machine))


def welford_ratios(program: Program, machine: GpuMachine, threads: int) -> dict[str, float]:
    """Shares of the bandwidth of one-pass statistics. Args: threads: of a block, rounded up."""
    params: Any = dict(program.params)
    phase = program.phases[0]
    lane, size = phase.axes[-1], narrowest(program)
    outer = math.prod(a.extent for a in phase.axes[:-1])
    across, vector, chunks, split = (int(params[n]) for n in ("across", "vector", "chunks", "split"))
    blocks = -(-lane.extent // (vector * across)) * outer
    under_way = min(blocks * split * threads, machine.threads // 2) * chunks * vector * size
    waves = blocks * split / (machine.sms * max(1, 1024 // threads))
    access = min(1.0, vector * size / ACCESS)
    return {
        "lines": min(1.0, _WELFORD.line_share_base + _WELFORD.line_share_slope * across * vector * size / 128),
        "loads in flight": 1.0 / (1.0 + IN_FLIGHT / 2 / under_way),
        "idle columns": math.sqrt(lane.extent / (blocks // outer * across * vector)),
        "access": _WELFORD.access_base + _WELFORD.access_slope * access,
        "chunks": 1.0 if chunks == 8 else _WELFORD.other_chunks_factor,
        "waves": 1.0 if waves <= 1.0 else _WELFORD.more_waves_factor,
        "block": 1.0 if threads == 256 else _WELFORD.other_threads_factor,
    }


def welford_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of scheduled one-pass statistics."""
    threads = int(str(dict(program.params)["threads"]))
    nominal = 256 if threads <= 256 else 512
    return of_program(program, by_ratios(memory_of(program, machine), welford_ratios(program, machine, nominal)))


def scan_ratios(program: Program, machine: GpuMachine) -> dict[str, float]:
    """Shares of the bandwidth of a scan along rows or columns."""
    params: Any = dict(program.params)
    time = next(a for a in program.phases[0].axes if a.name == TIME)
    others = math.prod(a.extent for a in program.phases[0].axes if a is not time)
    vector, size = int(params["vector"]), narrowest(program)
    access = min(1.0, vector * size / ACCESS)
    if "team" in params:
        team = int(params["team"])
        fill = min(1.0, others * team / machine.threads)
        idle = time.extent / (-(-time.extent // (team * vector)) * team * vector)
        return {
            "idle points": idle,
            "occupancy": _SCAN.row_occupancy_base + _SCAN.row_occupancy_slope * fill,
            "access": access,
        }
    threads, groups = others / vector, int(params.get("split", 1))
    fill = min(1.0, threads / machine.threads)
    if groups == 1:
        return {"occupancy": _SCAN.column_base + _SCAN.column_occupancy_slope * fill}
    covered = min(1.0, threads * groups / machine.threads)
    little = covered < _SCAN.split_full_limit * fill
    return {
        "occupancy": _SCAN.column_base + _SCAN.column_occupancy_slope * covered,
        "split": _SCAN.split_little_factor if little else _SCAN.split_factor,
        "access": access,
    }


def scan_time(program: Program, machine: GpuMachine) -> KernelTime:
    """The model of a scheduled scan."""
    return of_program(program, by_ratios(memory_of(program, machine), scan_ratios(program, machine)))

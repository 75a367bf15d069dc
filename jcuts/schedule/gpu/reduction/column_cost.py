"""Cost model of column reductions and filter gradients: memory time and ratios that lengthen it, and the launches.

    seconds = (compulsory bytes / bandwidth) * product of ratios + launches

The ratios are fitted (`fit_h200.toml`): lines that are used in part, loads in flight, idle threads, waves.  A gradient
whose window slides is the same reduction: a step loads what is new in it, and what it keeps takes registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcuts.estimate.time_model import Resource, TimeTerm, scaled, serial, term
from jcuts.kernel_ir.program import Program
from jcuts.schedule import fit
from jcuts.schedule.gpu.coalescing import LINE
from jcuts.schedule.gpu.machine import IN_FLIGHT, GpuMachine

_COLUMN = fit.coefficients("gpu/reduction", "column")
_TAPS = fit.coefficients("gpu/reduction", "gradient_registers")
WORD = 4
"""Bytes of a partial sum."""


def memory_of(program: Program, machine: GpuMachine) -> TimeTerm:
    """All operands and results by the memory."""
    moved = float(sum(b.bytes for b in (*program.inputs, *program.outputs)))
    return term(Resource.DRAM, moved / machine.bandwidth, moved)


def groups_of(terms: int, rows: int, split: int) -> int:
    """Groups of blocks that a reduction is split over: whole rows of threads, so fewer than asked for where terms end.

    Args: terms: tiles of reduced points; rows: tiles that a block takes at once.
    """
    share = -(-terms // (split * rows)) * rows
    return -(-terms // share) if split > 1 else 1


@dataclass(frozen=True)
class ColumnSchedule:
    """One schedule of a column reduction, in the counts that decide its time.

    Attributes:
        lane, outer: vectors of neighbouring outputs; tiles of the other output axes.
        vector, size: outputs of a thread along the lanes; bytes of an element.
        across, threads: threads of a block along the lanes; all of them.
        kept, loads, inside: accumulators of a thread; values that a tile of reduced points loads; such points.
        flight, split: tiles that are loaded early; groups of blocks that share a reduction.
        taps: whether outputs share operands (filter gradients).
        carried: values that a sliding window keeps from step to step, or loads early; 0 without.
    """

    lane: int
    outer: int
    vector: int
    size: int
    across: int
    threads: int
    kept: int
    loads: int
    inside: int
    flight: int
    split: int
    taps: bool
    carried: int = 0

    @property
    def blocks(self) -> int:
        """Of the launch."""
        return -(-self.lane // self.across) * self.outer * self.split

    @property
    def registers(self) -> float:
        """Of a thread of a filter gradient, estimated."""
        words = max(1.0, self.size / WORD)
        if self.carried:
            return _TAPS.sliding_base + _TAPS.per_carried * (self.kept + words * self.carried)
        return _TAPS.base + self.kept + _TAPS.per_load * words * self.loads

    def resident(self, machine: GpuMachine) -> int:
        """Blocks that one SM runs at once, as estimated from the registers."""
        if self.taps:
            most = machine.limits.registers_per_sm // self.threads
            return max(1, machine.resident_blocks(self.threads, min(self.registers, most), 0))
        registers = self.kept + self.flight * self.loads
        held = 1 if registers > 80 else 2 if registers > 40 else 3
        return max(1, held * 768 // self.threads)


def column_time(made: ColumnSchedule, results: int, memory: TimeTerm, machine: GpuMachine) -> TimeTerm:
    """Seconds by their terms. Args: results: outputs of the reduction; memory: its compulsory traffic."""
    resident, blocks = made.resident(machine) * machine.sms, made.blocks
    rounds = -(-blocks // resident)
    under_way = min(made.flight * max(1, made.loads) * made.size, 4 * max(16, 96 - made.kept))  # bytes of a thread
    there = min(blocks, resident) * made.threads
    even = -(-blocks // machine.sms) * machine.sms if rounds == 1 else rounds * resident
    waste = even / blocks if rounds < 4 else 1.0
    line = min(1.0, made.across * made.vector * made.size / LINE)
    deep = made.threads // made.across
    idle = -(-made.lane // made.across) * made.across / made.lane * made.threads / (made.across * deep)
    again = made.loads / (made.inside * made.vector) - 1.0  # what the caches deliver again
    ratios = {
        "loads in flight": 1.0 + _COLUMN.latency_share * IN_FLIGHT / (under_way * there),
        "idle threads": max(1.0, idle) ** _COLUMN.idle_exponent,
        "lines": 1.0 / (_COLUMN.line_share_base + (1.0 - _COLUMN.line_share_base) * line),
        "cached reads": 1.0 + _COLUMN.cached_read_weight * again,
        "waves": 1.0 + _COLUMN.wave_waste_weight * (waste - 1.0),
        "occupancy": min(1.0, there / machine.threads) ** -_COLUMN.occupancy_exponent,
    }
    spent = memory
    for name, ratio in ratios.items():
        spent = scaled(name, ratio, spent)
    fixed = term(Resource.LAUNCH, _COLUMN.launch_seconds)
    parts = [spent, fixed, term(Resource.BARRIER, deep * _COLUMN.row_seconds)]
    if made.split > 1:
        parts.append(term(Resource.LAUNCH, _COLUMN.split_launch_seconds))
        partial = WORD * results * made.split / machine.bandwidth
        parts.append(term(Resource.REDUCE, _COLUMN.partial_sum_passes * partial))
    return serial(parts)

"""Cycle model of a scheduled program on one core (port pressure, latency, spills, cache misses), as an expression of
resource terms (`estimate.time_model`): the CPU's ranking score, and the code in its kernels' time model.

Everything is counted from the program alone, tile by tile: port pressure (arithmetic, load, store) of a loop body,
latency of its accumulation chains, register spills, overhead of a tile outside its body; and, from the loop order, the
lines that come from the second-level cache and from beyond it (`schedule.cpu.cache_traffic`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jcuts.estimate.cpu_kernel import TILES
from jcuts.estimate.time_model import Resource, TimeTerm, longest, repeat, serial, term
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import ITEM_SIZE, Axis, Phase, Program, Red
from jcuts.schedule import fit
from jcuts.schedule.cpu.cache_traffic import beside_traffic
from jcuts.schedule.cpu.machine import Machine
from jcuts.schedule.cpu.time_estimate import COSTLY, FLOATS, SPECIAL, SPECIAL_STEPS

_FIT = fit.coefficients("cpu", "cycle_model")
GATHER_STEPS = _FIT.gather_instructions_per_lane  # instructions of a gather per lane
GUARD_STEPS = 4  # scalar instructions of a guarded address: compare twice, combine, choose
SPILL_CYCLES = _FIT.spill_cycles  # per vector that is stored or loaded because it does not fit the registers
TILE_CYCLES = _FIT.tile_cycles  # prologue, epilogue and refilled pipelines of one tile
LOOP_STEPS = 3  # counter, compare, branch
EXIT_CYCLES = _FIT.loop_end_cycles  # share of a mispredicted branch that the end of an inner loop costs
COMBINE = {"max": 3, "min": 3, "argmax": 5, "argmin": 5}  # instructions: NaN is kept, whatever the order
ENTRY_CYCLES = 1.0  # of a call, so that a program without work takes time

Counts = Mapping[str, int]


@dataclass(frozen=True)
class _Load:
    """What the model knows of one load of a graph, for the lane axis of its phase.

    ``kind`` is 'scalar' (one element for all lanes), 'row' or 'gather'; ``strides`` of every axis (None: not affine).
    """

    kind: str
    strides: tuple[tuple[str, int | None], ...]
    guards: frozenset[str]
    guarded: bool
    slots: float  # load slots of one address


def cycles(program: Program, machine: Machine) -> float:
    """Estimated cycles of all tiles on one core, > 0."""
    return cycle_terms(program, machine).value


def cycle_terms(program: Program, machine: Machine) -> TimeTerm:
    """The same by resource: tiles of every phase beside the lines that they bring into the caches."""
    phases = [_phase_terms(program, phase, machine) for phase in program.phases]
    return serial([*phases, term(Resource.START, ENTRY_CYCLES)])


def _phase_terms(program: Program, phase: Phase, machine: Machine) -> TimeTerm:
    repeats = math.prod(g.blocks for g in program.grid if all(a.name != g.axis for a in phase.axes))
    tasks = {g.axis: g.blocks for g in program.grid}
    first = math.prod(tasks[a.name] / a.extent for a in phase.axes if a.name in phase.once)
    lanes = program.lanes if phase.vector_axis is not None else 1
    body, leave = _Body(phase, lanes, machine) if phase.reds else None, _Exit(phase, lanes, machine)
    tiles = []
    for counts, times in _variants(phase.axes, lanes, program.serial):
        parts = [term(Resource.TILE, TILE_CYCLES), leave.terms(counts)]
        tiles.append(repeat(times, serial([*parts, body.terms(counts)] if body is not None else parts)))
    return repeat(repeats * first, beside_traffic(program, phase, lanes, machine, serial(tiles, TILES)))


def _variants(axes: tuple[Axis, ...], lanes: int, serial: tuple[str, ...]) -> Iterator[tuple[dict[str, int], int]]:
    """Points per axis of every kind of tile, and how many such tiles there are."""
    choices = [_tile_counts(a.extent, 1 if a.name in serial else a.unroll, lanes if a.vector else 1) for a in axes]
    for pick in itertools.product(*choices):
        yield {a.name: count for a, (count, _) in zip(axes, pick, strict=True)}, math.prod(n for _, n in pick)


def _tile_counts(extent: int, unroll: int, width: int) -> list[tuple[int, int]]:
    """(points or vectors, how often) of whole tiles and of the rest."""
    whole, rest = divmod(extent, unroll * width)
    pieces = [(unroll, whole)] if whole else []
    return [*pieces, (-(-rest // width), 1)] if rest else pieces


class _Counter:
    """Counts what a graph's loads and operations cost, per tile."""

    def __init__(self, phase: Phase, graph: Graph, lanes: int, machine: Machine) -> None:
        vector = phase.vector_axis
        self.vector = "" if vector is None else vector.name
        self.lanes = lanes
        self.names = tuple(phase.ranges())
        self.loads = [_load(n, self.vector, lanes, self.names, machine) for n in graph.nodes if n.op == "load"]

    def moves(self, load: _Load, counts: Counts) -> tuple[tuple[int, int], ...]:
        """(elements between neighbours, points) of the axes along which a load moves within a tile."""
        return tuple(
            (stride * (self.lanes if name == self.vector else 1), counts.get(name, 1))
            for name, stride in load.strides
            if stride and counts.get(name, 1) > 1
        )

    def points(self, load: _Load, counts: Counts) -> int:
        """Distinct addresses (of first lanes) in a tile."""
        return len(_offsets(self.moves(load, counts)))

    def live(self, load: _Load, counts: Counts, reds: Counts) -> tuple[int, int, int]:
        """(values that stay for later points of the reduction at most, all distinct values, all uses)."""
        return _live(self.moves(load, counts), self.moves(load, reds))


@functools.lru_cache(1 << 14)
def _offsets(moves: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """The distinct sums of one multiple of every stride."""
    distinct = {0}
    for stride, count in moves:
        distinct = {d + stride * k for d in distinct for k in range(count)}
    return frozenset(distinct)


@functools.lru_cache(1 << 14)
def _live(tile: tuple[tuple[int, int], ...], reds: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """See `_Counter.live`: points of the reduction follow one another in row-major order."""
    offsets = _offsets(tile)
    order = [sum(p) for p in itertools.product(*(range(0, s * n, s) for s, n in reds))]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, base in enumerate(order):
        for offset in offsets:
            first.setdefault(base + offset, step)
            last[base + offset] = step
    changes = [0] * (len(order) + 1)
    for value, begin in first.items():
        if last[value] > begin:
            changes[begin] += 1
            changes[last[value]] -= 1
    return max(itertools.accumulate(changes)), len(first), len(offsets) * len(order)


def _load(node: Node, vector: str, lanes: int, names: tuple[str, ...], machine: Machine) -> _Load:
    assert node.index is not None
    size = ITEM_SIZE[node.dtype]
    strides = tuple((n, None if node.index.values() else node.index.stride(n)) for n in names)
    along = dict(strides).get(vector, 0) if vector else 0
    guards = frozenset().union(*(g.index.axes() for g in node.guards)) if node.guards else frozenset()
    kind = "scalar" if along == 0 and vector not in guards else "row" if along == 1 else "gather"
    slots = machine.slots(machine.load_ports, size)
    if kind == "gather":
        slots *= GATHER_STEPS * lanes
    elif kind == "row":
        # Rows that do not start at multiples of their length straddle lines: such a load is two.
        step = min(machine.line, lanes * size)
        others = [s for n, s in strides if n != vector]
        aligned = node.index.const * size % step == 0 and all(s is not None and s * size % step == 0 for s in others)
        slots = machine.slots(machine.load_ports, lanes * size) * (1.0 if aligned else 1.0 + step / machine.line)
    return _Load(kind, strides, guards, bool(node.guards), slots)


class _Body:
    """The loop body of a phase with reductions."""

    def __init__(self, phase: Phase, lanes: int, machine: Machine) -> None:
        self.phase, self.lanes, self.machine = phase, lanes, machine
        self.counter = _Counter(phase, phase.body, lanes, machine)
        self.fused = {
            a.values[0]
            for a in phase.accs
            if a.combine == "add" and a.dtype in FLOATS and phase.body.nodes[a.values[0]].op == "mul"
        }
        self.width = machine.slots(machine.fma_ports, lanes * max([4, *(ITEM_SIZE[a.dtype] for a in phase.accs)]))
        self.steps = _instructions(phase.body, self.fused, frozenset(phase.ranges()))
        inner = phase.reds[-1]
        self.straight = inner.extent < 2 * inner.unroll * (lanes if inner.vector else 1)  # no loop around the body
        self.chains = math.prod(r.chains for r in phase.reds)

    def terms(self, counts: Counts) -> TimeTerm:
        """All iterations of the reduction loops for one tile."""
        phase = self.phase
        pieces = [_tile_counts(r.extent, r.unroll, self.lanes if r.vector else 1) for r in phase.reds]
        parts = []
        for pick in itertools.product(*pieces):
            inside = {**counts, **{r.name: c for r, (c, _) in zip(phase.reds, pick, strict=True)}}
            parts.append(repeat(math.prod(n for _, n in pick), self._iteration(inside, counts)))
        trips = 1
        for red in phase.reds:
            rounds = red.extent // (red.unroll * (self.lanes if red.vector else 1))
            if rounds > self.machine.core.predicted_iterations:
                parts.append(term(Resource.LOOP_END, trips * EXIT_CYCLES))
            trips *= max(1, rounds)
        if hoisted := self._hoisted(counts):
            parts.append(term(Resource.ADDRESS, hoisted))
        return serial(parts)

    def _iteration(self, inside: Counts, counts: Counts) -> TimeTerm:
        machine, counter = self.machine, self.counter
        points = math.prod(counts.values())
        steps = math.prod(inside[r.name] for r in self.phase.reds)
        work = points * steps * sum(COMBINE.get(a.combine, 1) for a in self.phase.accs)
        arithmetic = work + sum(s * math.prod(inside[n] for n in axes) for axes, s in self.steps)
        arithmetic *= self.width
        loads, scalar, pointers = 0.0, float(LOOP_STEPS), 0
        inner = self.phase.reds[-1].name
        for load in counter.loads:
            distinct = counter.points(load, inside)
            loads += distinct * load.slots
            if load.guarded:
                if inner in load.guards or self.straight:
                    scalar += GUARD_STEPS * distinct
                else:
                    pointers += counter.points(load, {**inside, inner: 1})
        accs = points * self.chains * len(self.phase.accs)
        reloads, spills = self._spilled(inside, counts, accs, steps)
        loads += 0.5 * max(0, pointers - machine.core.address_registers)
        issued = arithmetic + loads + scalar
        ports = longest(
            [
                term(Resource.COMPUTE, arithmetic / machine.fma_ports),
                term(Resource.LOAD, loads / machine.load_ports),
                term(Resource.ISSUE, issued / machine.core.issue_width),
                term(Resource.CHAIN, steps / self.chains * machine.core.fma_latency),
            ]
        )
        if not reloads + spills:
            return ports
        return serial([ports, term(Resource.SPILL, SPILL_CYCLES * (reloads + spills))])

    def _spilled(self, inside: Counts, counts: Counts, accs: int, steps: int) -> tuple[float, float]:
        """Loads and stores of what does not fit the registers, per iteration.

        Beside the accumulators there are, of the loads that the points of a reduction do not share, the fewer values of
        one load (the others' pass by), and of those that they share (a window's taps) all that is used again later.
        """
        reds = {r.name: inside[r.name] for r in self.phase.reds}
        single, shared, values, uses = [], 0, 0, 0
        for load in self.counter.loads:
            kept, distinct, used = self.counter.live(load, counts, reds)
            if kept:
                shared, values, uses = shared + kept, values + distinct, uses + used
            else:
                single.append(self.counter.points(load, counts))
        passing = min(single, default=0) if len(single) > 1 or shared else 0
        excess = accs + shared + passing + 1 - self.machine.registers
        if excess <= 0:
            return 0.0, 0.0
        part = min(1.0, excess / shared) if shared else 0.0
        beyond = max(0, excess - shared) * steps
        return part * (uses - values) + beyond, part * values + beyond

    def _hoisted(self, counts: Counts) -> float:
        """Guarded addresses that the innermost loop does not change, once per tile and outer step."""
        reds = self.phase.reds
        inner = reds[-1]
        if self.straight:
            return 0.0
        total = 0.0
        for load in self.counter.loads:
            if load.guarded and inner.name not in load.guards:
                all_taps = {**counts, **{r.name: r.extent for r in reds[:-1]}}
                total += GUARD_STEPS * self.counter.points(load, all_taps)
        return total / self.machine.core.issue_width * 2


class _Exit:
    """What follows the reduction, or all of an element-wise phase: the exit graph and the stores."""

    def __init__(self, phase: Phase, lanes: int, machine: Machine) -> None:
        self.phase, self.machine = phase, machine
        self.lane_reduced = isinstance(phase.vector_axis, Red)
        self.lanes = 1 if self.lane_reduced else lanes
        self.counter = _Counter(phase, phase.exit, self.lanes, machine)
        sizes = [ITEM_SIZE[n.dtype] for n in phase.exit.nodes if n.op not in ("guard", "index")]
        self.width = machine.slots(machine.fma_ports, self.lanes * max([4, *sizes]))
        self.steps = _instructions(phase.exit, set(), frozenset(a.name for a in phase.axes))
        self.reduce = (2 * math.log2(lanes) + 4 if self.lane_reduced else 0.0) + math.log2(
            math.prod(r.chains for r in phase.reds)
        )
        self.stores = [_store(phase, s.buffer, s.address, self.lanes) for s in phase.stores]

    def terms(self, counts: Counts) -> TimeTerm:
        """One tile."""
        machine, counter = self.machine, self.counter
        points = math.prod(counts.values())
        arithmetic = sum(s * math.prod(counts[n] for n in axes) for axes, s in self.steps)
        arithmetic = self.width * (arithmetic + points * self.reduce * len(self.phase.accs))
        loads = sum(counter.points(load, counts) * load.slots for load in counter.loads)
        scalar = sum(GUARD_STEPS * counter.points(load, counts) for load in counter.loads if load.guarded)
        stores = points * sum(self.stores)
        issued = arithmetic + loads + stores + scalar
        return longest(
            [
                term(Resource.COMPUTE, arithmetic / machine.fma_ports),
                term(Resource.LOAD, loads / machine.load_ports),
                term(Resource.STORE, stores / machine.store_ports),
                term(Resource.ISSUE, issued / machine.core.issue_width),
            ]
        )


def _store(phase: Phase, buffer: str, address, lanes: int) -> float:
    """Store slots of one vector of results."""
    vector = phase.vector_axis
    if vector is None or isinstance(vector, Red):
        return 1.0
    if address.stride(vector.name) != 1 or address.values():
        return 2.0 * lanes
    aligned = all((address.stride(a.name) or 0) % lanes == 0 for a in phase.axes if a is not vector)
    return 1.0 if aligned else 2.0


def _instructions(graph: Graph, fused: set[int], names: frozenset[str]) -> list[tuple[tuple[str, ...], float]]:
    """Element operations: the axes that each depends on, and its instructions."""
    axes: list[frozenset[str]] = []
    found = []
    for number, node in enumerate(graph.nodes):
        mine = frozenset(node.index.axes()) if node.index is not None else frozenset()
        for guard in node.guards:
            mine |= guard.index.axes()
        for arg in node.args:
            mine |= axes[arg]
        axes.append(names if node.op == "acc" else mine & names)
        if node.op in ("const", "load", "index", "guard", "acc") or number in fused:
            continue
        found.append((axes[-1], SPECIAL_STEPS if node.op in SPECIAL else COSTLY.get(node.op, 1)))
    return [(tuple(sorted(mine)), float(steps)) for mine, steps in found]

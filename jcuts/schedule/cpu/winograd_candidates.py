"""Enumerates Winograd kernels of a convolution, ranked by estimated time over the direct form's.

Everything is counted in vector multiply-adds of one core.  The product runs at the rate of its register tile; the
transforms are dominated by stores and cache misses, so that their costs are constants per transformed vector, fitted to
measurements (56x56x64, 28x28x128, 14x14x256 and 7x7x512 on a core with 1 MiB of second-level cache; the estimated
speedup over the direct form was within 10% of the measured one).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jcuts.arch.cpu_cores import CORE
from jcuts.estimate.time_model import Resource, TimeTerm, serial, term
from jcuts.kernel_ir.program import ITEM_SIZE, Program
from jcuts.lower import toom_cook
from jcuts.lower.patterns.winograd import WinogradRoles, match
from jcuts.schedule import fit
from jcuts.schedule.cpu.loop_candidates import lanes_of
from jcuts.schedule.cpu.machine import Machine
from jcuts.schedule.cpu.winograd import Plan, apply

# Multiply-add times per transformed vector and point: stores, cache misses, arithmetic (fitted to measurements).
_FIT = fit.coefficients("cpu", "winograd")
FILTER_COST = _FIT.filter_transform_cost
INPUT_COST = _FIT.input_transform_cost
OUTPUT_COST = _FIT.output_transform_cost
RUN = 64  # bytes of a row of weights at which reading them costs as much again
ADD_COST = _FIT.accumulate_cost  # per vector of products that a step of channels adds to
REGISTER_TILES = (
    (20, 1),
    (16, 1),
    (14, 1),
    (12, 1),
    (10, 2),
    (10, 1),
    (9, 2),
    (8, 2),
    (7, 2),
    (6, 3),
    (5, 4),
    (4, 4),
    (4, 2),
    (3, 6),
    (2, 8),
    (2, 4),
    (1, 8),
    (1, 4),
    (1, 1),
)
ACCUMULATORS = 2 * CORE.fma_latency  # independent ones that keep the units of two ports busy
SPILL = 20  # accumulators from which on LLVM's code for 32 registers spills (measured: a third of the speed)
BLOCKS = (4, 8, 16, 28, 56)  # tiles per block: enough to reuse a filter in registers, few enough for the cache
FEATURES = (16, 32, 64, 128)
STEPS = (16, 32)  # channels per step; with 64 the error of 56x56x64 was 1.5 times that with 32, near the limit
PRESSURE = _FIT.cache_pressure
"""Slowdown of the product per size of the second-level cache that its matrices exceed it by."""
MOST = 4
PER_POINTS = 2


def candidates(program: Program, machine: Machine) -> list[tuple[Program, float]]:
    """Scheduled programs with the direct form's multiplications over their estimated time (in multiplications).

    The best of each number of points, then the second best of each, of another block size: where six points are not
    accurate enough, four are.  Only those that promise a gain, at most `MOST`.
    """
    form = match(program)
    if form is None:
        return []
    kinds: dict[int, list[tuple[Plan, float]]] = {}
    for plan, score in sorted(_tilings(program, form, machine), key=lambda item: (-item[1], str(item[0]))):
        same = kinds.setdefault(plan.points, [])
        fresh = all((p.tiles, p.features) != (plan.tiles, plan.features) for p, _ in same)
        if score > 1.0 and fresh and len(same) < PER_POINTS:
            same.append((plan, score))
    turns = itertools.zip_longest(*kinds.values())
    return [(apply(program, form, one[0]), one[1]) for turn in turns for one in turn if one is not None][:MOST]


def _tilings(program: Program, form: WinogradRoles, machine: Machine) -> Iterator[tuple[Plan, float]]:
    lanes = lanes_of(program, machine)
    while lanes > 4 and lanes // 2 >= form.feature.extent:
        lanes //= 2
    features = {f for f in FEATURES if f % lanes == 0 and form.feature.extent % f == 0} | {form.feature.extent}
    for points in toom_cook.POINTS:
        if any(d.unit(points) < 2 for d in form.transformed):
            continue
        counts = [(d.axis, d.count(points)) for d in form.dims]
        blocks = {_block(counts, target) for target in BLOCKS}
        for tiles, width, first in itertools.product(sorted(blocks), sorted(features), (True, False)):
            whole = dict(tiles) == dict(counts)
            if first if whole else not first and width == form.feature.extent:
                continue  # with one block of tiles, or of features, the order does not matter
            rows, vectors = _register_tile(tiles, width, lanes, machine)
            for step in _steps(form.channel.extent, lanes):
                plan = Plan(points, tiles, width, step, first, rows, vectors, lanes)
                plan = replace(plan, split=_split(form, plan, machine))
                yield plan, _score(program, form, plan, machine)


def _steps(channels: int, lanes: int) -> list[int]:
    """Channels per step: divisors that are whole vectors, or all of them."""
    if channels <= STEPS[0]:
        return [channels]
    return [c for c in STEPS if channels % c == 0 and c % lanes == 0] or [channels]


def _block(counts: Sequence[tuple[str, int]], target: int) -> tuple[tuple[str, int], ...]:
    """About ``target`` tiles: whole inner axes first; an axis that is cut is cut evenly."""
    found, room = [], target
    for axis, count in reversed(counts):
        pieces = -(-count // max(1, room))
        size = -(-count // pieces)
        found.append((axis, size))
        room //= size
    return tuple(reversed(found))


def _register_tile(tiles: tuple[tuple[str, int], ...], width: int, lanes: int, machine: Machine) -> tuple[int, int]:
    return max(
        (_tile_rate(math.prod(n for _, n in tiles), -(-width // lanes), rows, vectors), rows, vectors)
        for rows, vectors in REGISTER_TILES
        if rows * vectors <= SPILL * machine.registers // 32
    )[1:]


def _tile_rate(tiles: int, wide: int, rows: int, vectors: int) -> float:
    """Share of the multiply-add rate that a register tile reaches: issue, latency, edges."""
    units = rows * vectors
    issue = units / max(units, vectors + 0.5 * rows, ACCUMULATORS)
    edges = tiles / (-(-tiles // rows) * rows) * wide / (-(-wide // vectors) * vectors)
    return issue * edges


def _split(form: WinogradRoles, plan: Plan, machine: Machine) -> tuple[tuple[str, int], ...]:
    """Blocks per task: along the outermost serial axes, so that what is kept is rarely computed twice."""
    serial = [(f"{d.axis}s", -(-d.count(plan.points) // n)) for d, (_, n) in zip(form.dims, plan.tiles, strict=True)]
    feature = (f"{form.feature.name}s", form.feature.extent // plan.features)
    order = [feature, *serial] if plan.filters_first else [*serial, feature]
    wanted, found = machine.threads, []
    for name, count in order:
        if count > 1 and wanted > 1:
            pieces = min(count, wanted)
            # Even shares: 7 blocks for 2 threads are 4 and 3; more tasks than threads would repeat transforms.
            found.append((name, -(-count // pieces)))
            wanted = -(-wanted // pieces)
    return tuple(found)


def _score(program: Program, form: WinogradRoles, plan: Plan, machine: Machine) -> float:
    """Multiplications of the direct form over the kernel's estimated time, both in vector multiply-adds of one core."""
    time, tasks = _terms(program, form, plan, machine)
    used = min(1.0, tasks / machine.threads)
    wide = -(-form.feature.extent // plan.lanes)
    direct = math.prod(d.extent * d.taps for d in form.dims) * form.channel.extent * wide
    return direct / time.value * used


def _terms(program: Program, form: WinogradRoles, plan: Plan, machine: Machine) -> tuple[TimeTerm, int]:
    """The kernel by its steps, in vector multiply-adds of one core; and its tasks."""
    lanes, size = plan.lanes, ITEM_SIZE[program.phases[0].accs[0].dtype]
    points = plan.points ** len(form.transformed)
    in_block = math.prod(n for _, n in plan.tiles)
    strips = math.prod(-(-d.count(plan.points) // n) for d, (_, n) in zip(form.dims, plan.tiles, strict=True))
    tiles, channels = in_block * strips, form.channel.extent
    wide, deep = -(-form.feature.extent // lanes), -(-channels // lanes)
    blocks = form.feature.extent // plan.features
    pieces = {name: -(-count // block) for (name, block), count in _counts(form, plan)}
    feature_tasks = pieces.pop(f"{form.feature.name}s", 1)
    tile_tasks = math.prod(pieces.values())
    filters = tile_tasks if plan.filters_first else strips
    inputs = blocks if plan.filters_first else feature_tasks
    rate = _tile_rate(in_block, -(-plan.features // lanes), plan.rows, plan.vectors)
    u_channels = channels if plan.filters_first and strips > 1 else plan.channels
    v_channels = channels if not plan.filters_first and blocks > 1 else plan.channels
    kept = points * size * (u_channels * plan.features + v_channels * in_block + in_block * plan.features)
    pressure = 1.0 + PRESSURE * max(0.0, kept / machine.l2 - 1.0)
    product = pressure * points * tiles * channels * wide / rate
    sums = ADD_COST * points * tiles * wide * (channels // plan.channels - 1)
    weights = FILTER_COST * (1.0 + RUN / (plan.features * size)) * points * channels * wide * filters
    patches = INPUT_COST * points * tiles * deep * inputs
    transforms = serial(
        [term(Resource.TRANSFORM, patches), term(Resource.TRANSFORM, OUTPUT_COST * points * tiles * wide)]
    )
    parts = [
        term(Resource.COMPUTE, product),
        term(Resource.REDUCE, sums),
        term(Resource.TRANSFORM, weights),
        transforms,
    ]
    return serial(parts), feature_tasks * tile_tasks


def _counts(form: WinogradRoles, plan: Plan) -> list[tuple[tuple[str, int], int]]:
    extents = {f"{form.feature.name}s": form.feature.extent // plan.features}
    extents |= {f"{d.axis}s": -(-d.count(plan.points) // n) for d, (_, n) in zip(form.dims, plan.tiles, strict=True)}
    return [((name, block), extents[name]) for name, block in plan.split]

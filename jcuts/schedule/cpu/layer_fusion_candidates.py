"""Enumerates tilings of fused layers on a CPU, ranked by their estimated cycles: windows fit a core's L2 cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jcuts.base.errors import Refusal
from jcuts.kernel_ir.program import Phase, Program
from jcuts.lower.patterns.layer_windows import LayerLink, match_layers, movable_axes
from jcuts.schedule.cpu import loop_candidates, loop_schedule
from jcuts.schedule.cpu.bound import ACCUMULATIONS
from jcuts.schedule.cpu.cycle_model import cycles
from jcuts.schedule.cpu.layer_fusion import (
    HALO,
    LayerTiling,
    local_bytes,
    schedule_phases,
    split_tiles,
    tile_program,
    windows,
)
from jcuts.schedule.cpu.loop_schedule import Schedule
from jcuts.schedule.cpu.machine import Machine

TILES = (1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256, 512)
"""Points of a tile along the axis that is cut."""
CACHE_SHARES = (1 / 32, 1 / 8, 1 / 3, 2 / 3, 1)
"""Of each axis, the largest tile whose intermediate results fill at most such a share of the L2 cache."""
EVEN_SHARES = (1, 2, 3, 4, 6, 8)
"""Tiles per thread of tiles that leave every thread as many."""
PER_AXIS = 3
"""Tilings of each axis that are kept."""
Tiled = tuple[LayerTiling, Program]
"""A tiling, and the program in these tiles."""


def schedules(program: Program, machine: Machine, limit: int) -> list[tuple[Program, float]]:
    """Scheduled programs of a chain of layers with their scores, best first; none where no tiling is legal."""
    links = match_layers(program)
    if isinstance(links, Refusal):
        return []
    kept: list[tuple[Program, float]] = []
    lanes = loop_candidates.lanes_of(program, machine)
    for tilings in _tilings(program, links, machine):
        chosen = _RegisterTiles(machine, lanes)
        made = [_scheduled(program, tiling, tiled, chosen) for tiling, tiled in tilings]
        kept += sorted(((p, _score(p, machine)) for p in made), key=_order)[:PER_AXIS]
    return sorted(kept, key=_order)[:limit]


def _order(item: tuple[Program, float]) -> tuple[float, str]:
    return -item[1], str(item[0].params)


def _tilings(program: Program, links: Sequence[LayerLink], machine: Machine) -> Iterator[list[Tiled]]:
    """For each axis of the last layer tiles of it, large ones first, with one point of the axes outside it.

    Where no windows fit the cache, the smallest ones.
    """
    extents = program.phases[-1].ranges()
    axes = movable_axes(program, links)
    beyond: Tiled | None = None
    fitting = False
    for depth, cut in enumerate(axes):
        fits: dict[int, tuple[int, Tiled]] = {}
        smallest: Tiled | None = None
        even = {-(-extents[cut] // (machine.threads * n)) for n in EVEN_SHARES}
        for size in sorted({min(t, extents[cut]) for t in TILES} | even):
            tiling = LayerTiling((*((a, 1) for a in axes[:depth]), (cut, size)))
            layers = windows(program, links, tiling)
            if isinstance(layers, Refusal):
                continue
            made = tile_program(program, links, layers, tiling)
            if smallest is not None and math.prod(g.extent for g in made.grid) < machine.threads:
                break  # threads without a tile
            share = local_bytes(made) / machine.l2
            if share > 1 and smallest is not None:
                break
            halo = any(any(layer.result.overlap) for layer in layers if layer.result is not None)
            tiling = replace(tiling, split=_split(made, machine, halo))
            tiled = tiling, split_tiles(made, tiling)
            smallest = smallest or tiled
            fits.update({k: (size, tiled) for k, most in enumerate(CACHE_SHARES) if share <= most})
        found = dict(fits.values())
        beyond, fitting = smallest or beyond, fitting or bool(found)
        yield [found[size] for size in sorted(found, reverse=True)]
    if beyond is not None and not fitting:
        yield [beyond]


def _split(program: Program, machine: Machine, halo: bool) -> tuple[tuple[str, int], ...]:
    """Tiles per task: even shares along the outermost axes; more tasks than threads would compute more halos."""
    wanted = machine.threads * (1 if halo or machine.threads == 1 else loop_candidates.TASKS_PER_THREAD)
    found = []
    for grid in program.grid:
        pieces = min(grid.extent, wanted)
        block = -(-grid.extent // pieces)
        found.append((grid.axis, block))
        wanted = -(-wanted // -(-grid.extent // block))
    return tuple(found)


class _RegisterTiles:
    """The register tile of every layer: that of the largest tile serves all of one axis."""

    def __init__(self, machine: Machine, lanes: int) -> None:
        self.machine, self.lanes = replace(machine, threads=1), lanes
        self.of: dict[tuple[str, tuple[str, ...]], Schedule] = {}

    def choose(self, part: Program, guarded: frozenset[str]) -> Phase:
        """The best schedule of a phase whose lanes do not run along a guarded axis, scalar code where there is none."""
        (phase,) = part.phases
        names = tuple(phase.ranges())
        key = phase.name.removesuffix(HALO), names
        known = self.of.get(key)
        if known is None or known.vector in guarded:
            ranked = loop_candidates.candidates(part, self.machine, limit=1 << 30)
            fit = (s for s, _ in ranked if s.vector and s.vector not in guarded)
            known = replace(next(fit, Schedule()), lanes=self.lanes, blocks=())
            self.of[key] = known
        return loop_schedule.apply(part, known).phases[0]


def _scheduled(program: Program, tiling: LayerTiling, tiled: Program, chosen: _RegisterTiles) -> Program:
    """Args: tiled: the program in these tiles."""
    made = schedule_phases(tiled, chosen.lanes, chosen.choose)
    unroll = tuple(tuple((a.name, a.unroll) for a in p.axes if a.unroll > 1) for p in made.phases)
    params = (
        ("lanes", chosen.lanes),
        ("tiles", tiling.tiles),
        ("split", tiling.split),
        ("unroll", unroll),
        ("local_bytes", local_bytes(made)),
        (ACCUMULATIONS, _accumulations(program)),
    )
    return replace(made, params=params)


def _accumulations(program: Program) -> tuple[int, ...]:
    """Accumulated terms of every layer, without what tiles compute beyond it or twice."""
    return tuple(math.prod(a.extent for a in p.axes) * math.prod(r.extent for r in p.reds) for p in program.phases)


def _score(program: Program, machine: Machine) -> float:
    """Accumulations at the machine's peak over the estimated cycles of all layers, by the share of threads at work."""
    (counts,) = (value for name, value in program.params if name == ACCUMULATIONS)
    assert isinstance(counts, tuple)
    least = sum(counts) / (program.lanes * machine.fma_ports)
    rounds = -(-program.tiles // machine.threads)
    return min(1.0, least / cycles(program, machine)) * program.tiles / (rounds * machine.threads)

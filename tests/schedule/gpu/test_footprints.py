"""Traffic of sampled blocks and footprints of windows: counted together as one by one, and as sets of addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import traffic
from jcuts.schedule.gpu.machine import window_values
from jcuts.schedule.gpu.window.counter import Slide, WindowCounter
from jcuts.schedule.gpu.window.schedules import fully_unrolled
from tests import programs
from tests.gpu import cases

MACHINE = gpu_candidates.GpuMachine(132)
MAPS = ("chain", "permute", "max pool", "depthwise odd")


def _scheduled(name: str):
    fn, arguments = cases.CASES[name]
    found = gpu_candidates.candidates(programs.trace(fn, *arguments).program(), MACHINE, 100)
    return [p for p, _ in found if dict(p.params)["cuda"] == "point" and "walk" not in dict(p.params)]


@pytest.mark.parametrize("name", MAPS)
def test_blocks_together_as_alone(name):
    made = _scheduled(name)
    assert made
    for program in made:
        threads = int(str(dict(program.params)["threads"]))
        phase = program.phases[0]
        places = (0, 1, 5)
        alone = [traffic._blocks(program, phase, [place], threads)[0].tolist() for place in places]
        assert traffic._blocks(program, phase, places, threads).tolist() == alone
        assert [sectors for sectors, _, _ in alone] == [_sectors(program, place, threads) for place in places]


def _sectors(program, place: int, threads: int) -> int:
    """Sectors of a block's accesses, an address at a time."""
    phase, kept = program.phases[0], traffic.l1_resident(program)
    env = traffic._points(program, phase, [place], threads)
    sizes = {b.name: b.bytes // b.size for b in program.buffers}
    axes = [a.name for a in phase.axes]
    inside = np.array(True)
    for axis in phase.axes:
        inside = inside & (env[axis.name] < axis.extent)
    loads = [(n.buffer, n.index, n.guards) for g in (phase.body, phase.exit) for n in g.nodes if n.op == "load"]
    touched = set()
    for buffer, index, guards in [*loads, *((s.buffer, s.address, ()) for s in phase.stores)]:
        if buffer in kept:
            continue
        where = env if (buffer, index, guards) in loads else {name: env[name] for name in axes}
        whole = {**dict.fromkeys(env, np.zeros(1, np.int64)), **where}
        value = np.asarray(traffic._value(index, whole))
        value, held = np.broadcast_arrays(value, inside & traffic._holds(guards, whole))
        touched |= {(buffer, int(v) * sizes[buffer] // 32) for v in value[held]}
    return len(touched)


def test_lines_before_an_array_are_of_no_access():
    first = np.array([[-3, -1, 0, 5] * 8 + [7] * 32, [traffic.NOWHERE, 2, 2, 4] * 8 + [-1] * 32])
    assert traffic._distinct_by_warp(first, first).tolist() == [2 + 1, 2 + 0]
    ends = np.where(first < 0, first, first + 1)
    assert traffic._distinct_by_warp(first, ends).tolist() == [4 + 2, 4 + 0]


@pytest.mark.parametrize("name", ["max pool", "depthwise odd"])
def test_a_counter_that_has_counted_others(name):
    fn, arguments = cases.CASES[name]
    program = fully_unrolled(collapse_program(programs.trace(fn, *arguments).program()))
    phase, shared = program.phases[0], WindowCounter(program)
    lane, along = phase.axes[-1].name, phase.axes[0].name
    for vector, rows, threads, ahead in itertools.product((1, 2, 4), (1, 2), (64, 128), (None, 0, 2)):
        unroll = {lane: vector, along: rows}
        values = window_values(phase, unroll)
        slide = None if ahead is None else Slide(along, 1, 2, 1, ahead)
        fresh = WindowCounter(program).cost(unroll, values, threads, slide)
        assert shared.cost(unroll, values, threads, slide) == fresh

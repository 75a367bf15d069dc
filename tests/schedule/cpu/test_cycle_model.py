"""Counted cycles and moved bytes against hand counts, and what they must rank above what."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.schedule.cpu import loop_candidates, packing
from jcuts.schedule.cpu.cache_traffic import _Access, _bytes_into_cache
from jcuts.schedule.cpu.cycle_model import _live, _offsets, cycles
from jcuts.schedule.cpu.loop_schedule import Schedule, apply
from jcuts.schedule.cpu.machine import Machine
from tests import programs

CORE = Machine(vector_bytes=64, registers=32, threads=1, fma_ports=1, load_ports=1)


def gemm(m: int, k: int, n: int):
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    return collapse_program(programs.trace(lambda a, b: a @ b, a, b).program())


def tile(program, rows: int, vectors: int, unroll: int = 2):
    return apply(program, Schedule(16, "d1", (("d0", rows), ("d1", vectors)), ("d1", "d0"), (("k0", unroll),)))


def test_a_gemm_takes_its_multiply_adds_and_little_more():
    program = gemm(60, 256, 64)
    least = 60 * 256 * 64 / 16  # one vector multiply-add per cycle
    found = cycles(tile(program, 6, 4), CORE)
    assert least < found < 1.25 * least  # of which lines from the second-level cache are a fifth
    two_ports = Machine(64, 32, 1, fma_ports=2, load_ports=2)
    assert least / 2 < cycles(tile(program, 6, 4), two_ports) < 0.75 * least


def test_few_accumulators_wait_for_themselves():
    program = gemm(64, 256, 64)
    # one accumulator: an addition every four cycles; four of them: one every cycle
    assert cycles(tile(program, 1, 1), CORE) > 3.5 * cycles(tile(program, 4, 2), CORE)


def test_what_does_not_fit_the_registers_costs():
    program = gemm(64, 256, 128)
    # 8 x 3 + 3 vectors + 1 fit 32 registers, 8 x 4 + 4 + 1 do not
    assert cycles(tile(program, 8, 3), CORE) < 0.8 * cycles(tile(program, 8, 4), CORE)


def test_rows_that_straddle_lines_cost_two_loads():
    aligned, shifted = gemm(16, 256, 64), gemm(16, 256, 67)
    per_column = [cycles(tile(p, 2, 4), CORE) / n for p, n in ((aligned, 64), (shifted, 80))]
    assert per_column[1] > 1.2 * per_column[0]


def test_slots_of_narrow_instructions():
    # a core that splits vectors runs two of half the width; one with two full ports gains nothing
    assert CORE.slots(CORE.fma_ports, 32) == 0.5 and CORE.slots(CORE.fma_ports, 64) == 1.0
    assert CORE.slots(CORE.fma_ports, 128) == 2.0
    assert Machine(64, 32, 1).slots(2, 32) == 1.0


def test_offsets_and_live_values_of_a_window():
    assert _offsets(((1, 7), (1, 3))) == frozenset(range(9))
    # 7 outputs, 3 taps: 9 values, 21 uses; after a tap 6 values are needed again
    assert _live(((1, 7),), ((1, 3),)) == (6, 9, 21)
    # at stride 2 the third tap needs what the first had, but for its first output
    assert _live(((2, 4),), ((1, 3),)) == (3, 9, 12)
    # a plain reduction uses every value once
    assert _live(((100, 4),), ((1, 8),)) == (0, 32, 32)


def test_lines_and_sets():
    rows = _Access((("r", 4096), ("c", 4)), 4, 1 << 20)
    # 16 rows of 16 floats: 16 lines; 4 KiB apart they share one of the 64 sets of a 32 KiB cache
    assert rows.lines({"r": 16, "c": 16}, 32 << 10) == (1024.0, 1024.0 * 64)
    assert rows.has_set_conflicts({"r": 7, "c": 1}, 32 << 10) and not rows.has_set_conflicts({"r": 6, "c": 1}, 32 << 10)
    near = _Access((("r", 64), ("c", 4)), 4, 1 << 20)
    assert near.lines({"r": 16, "c": 16}, 32 << 10) == (1024.0, 1024.0)


def test_moved_bytes_follow_the_loop_order():
    panel = _Access((("k", 64), ("j", 4)), 4, 64 << 10)  # 1024 rows of 16 floats
    stream = _Access((("i", 4096), ("k", 4)), 4, 1 << 20)
    inner = [("i", 256, 1), ("k", 1024, 1)]
    # the panel fits a large cache: it comes once, the stream once
    assert _bytes_into_cache([panel, stream], inner, 2 << 20, 0.75, 0.0) == (64 << 10) + (1 << 20)
    # a small one loads it again for every i
    assert _bytes_into_cache([panel, stream], inner, 16 << 10, 0.75, 0.0) >= 200 * (64 << 10)
    # without i in the address the loop costs nothing
    assert _bytes_into_cache([panel], [("i", 256, 1), ("k", 1024, 1)], 16 << 10, 0.75, 0.0) >= 200 * (64 << 10)
    assert _bytes_into_cache([panel], [("k", 1024, 1), ("i", 256, 1)], 16 << 10, 0.75, 0.0) == 64 << 10


@pytest.mark.parametrize("machine", [CORE, Machine(32, 16, 1), Machine(16, 32, 4)])
def test_scores_are_shares_and_packing_is_scored_alike(machine):
    program = gemm(64, 512, 512)
    lanes = loop_candidates.lanes_of(program, machine)
    scores = [score for _, score in loop_candidates.candidates(program, machine, 1000)]
    packings = packing.packings(program, lanes, machine.registers)
    packed = [loop_candidates.score(packing.apply(program, p, 1), machine) for p in packings]
    assert packed and all(0 < s <= 1 for s in scores + packed)

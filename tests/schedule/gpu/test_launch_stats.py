"""Sectors that blocks move, against hand counts."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.arch.load import load_gpu
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import launch_stats
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.machine import scheduled
from tests import programs
from tests.ops.cases import conv

H200 = load_gpu("H200")


def zeros(*shape):
    return np.zeros(shape, np.float32)


def point(fn, arguments, threads, *block, **unroll):
    """A program in the point form: unrolled axes by name, block shape as (axis, threads) pairs."""
    program = collapse_program(programs.trace(fn, *arguments).program())
    phase = program.phases[0]
    axes = tuple(replace(a, unroll=unroll.get(a.name, 1)) for a in phase.axes)
    program = replace(program, phases=(replace(phase, axes=axes),))
    return scheduled(program, "point", threads, *((("block", block),) if block else ()))


def moved(program, blocks):
    (use,) = launch_stats.launch_stats(program, [(blocks, dict(program.params)["threads"], 32, 0)])
    return use.moved


def test_a_copy_moves_every_sector_once():
    program = point(lambda x: x + 1, (zeros(4096),), 256, d0=4)
    assert moved(program, 4) == 2 * 4096 * 4


def test_a_large_operand_that_is_broadcast_is_loaded_by_every_block():
    program = point(lambda x, b: x + b, (zeros(4, 32), zeros(32)), 64)
    # 2 blocks of two rows: 256 bytes of x, 256 of the result, 128 of b
    assert moved(program, 2) == 2 * (256 + 256 + 128)


def test_a_small_one_stays_in_the_cache():
    program = point(lambda x, b: x + b, (zeros(64, 32), zeros(32)), 64)
    assert moved(program, 32) == 32 * (256 + 256) + 128


def test_a_transpose_without_tiles_loads_a_sector_per_element():
    program = point(lambda x: x.T * 2, (zeros(64, 64),), 64)
    assert moved(program, 64) == 64 * (64 * 32 + 256)


def test_a_block_along_the_operand_uses_whole_sectors():
    program = point(lambda x: x.T * 2, (zeros(64, 64),), 64, ("d0", 8), ("d1", 8))
    assert moved(program, 64) == 64 * (8 * 32 + 8 * 32)


def test_halos_between_blocks():
    fn, arguments = (lambda x, w: conv(x, w, groups=8), (zeros(1, 8, 8, 8), zeros(3, 3, 1, 8)))
    program = point(fn, arguments, 64)
    # A block computes one row of 8 pixels and 8 channels (256 bytes) of three rows. Weights: 9 * 32 bytes.
    assert moved(program, 8) == pytest.approx(8 * (256 + 9 * 32 + 3 * 256))


def lines(program, blocks):
    (use,) = launch_stats.launch_stats(program, [(blocks, dict(program.params)["threads"], 32, 0)])
    return use.lines


def test_lines_of_wide_and_narrow_accesses():
    # A warp's 128 elements are four lines in one access of 16 bytes, or one line in each of four accesses.
    wide = point(lambda x: x + 1, (zeros(4096),), 256, d0=4)
    narrow = point(lambda x: x + 1, (zeros(4096),), 256)
    assert lines(wide, 4) == lines(narrow, 16) == 2 * 4096 * 4 / 128


def test_lines_of_a_transpose():
    program = point(lambda x: x.T * 2, (zeros(64, 64),), 64)
    assert lines(program, 64) == 64 * (64 + 2)  # a line per element of the operand, two lines of results


def test_threads_without_work_load_nothing():
    program = point(lambda x, b: x + b, (zeros(64, 32), zeros(32)), 256, ("d0", 2), ("d1", 128))
    (use,) = launch_stats.launch_stats(program, [(32, 256, 32, 0)])
    assert use.under_way == 8 * 0.25  # 32 of 128 along d1


def test_loads_under_way():
    (use,) = launch_stats.launch_stats(point(lambda x: x + 1, (zeros(4096),), 256, d0=4), [(4, 256, 32, 0)])
    assert use.under_way == 16
    program = programs.trace(lambda x: x.sum(1), zeros(512, 1024)).program()
    team = scheduled(program, "team", 128, ("team", 32), ("vector", 4), ("chunks", 8))
    (use,) = launch_stats.launch_stats(team, [(128, 128, 40, 0)])
    assert use.under_way == 4 * 8 * 4
    assert use.moved == 512 * 1024 * 4 + 512 * 4


def test_a_split_pays_for_its_partial_results():
    program = programs.trace(lambda x: x.sum(0), zeros(8192, 64)).program()
    split = scheduled(program, "point", 128, ("split", 64))
    first, second = launch_stats.launch_stats(split, [(32, 128, 32, 0), (64, 128, 32, 0)])
    partial = 64 * 64 * 4
    assert first.moved == 8192 * 64 * 4 + 64 * 4 + partial
    assert second.moved == partial + 64 * 4


def test_blocks_of_a_product_read_their_rows_and_columns():
    product = as_gemm(programs.trace(lambda x, w: x @ w, zeros(256, 512), zeros(512, 128)).program())
    assert product is not None
    tiling = MmaTile(64, 32, 16, (2, 2, 1), 3, 1, 2)
    (use,) = launch_stats.launch_stats(tiling.of(product), [(4 * 4 * 2, 128, 64, 40_000)])
    assert use.moved == 32 * (64 + 32) * 256 * 4 + 256 * 128 * 4
    assert use.under_way == 2 * (64 + 32) * 16 * 4 / 128
    found = launch_stats.score_of(tiling.of(product), [(32, 128, 64, 40_000)], H200)
    assert 0 < found.pul < 1 and launch_stats.unit_of(tiling.of(product)) == "tf32_mma"


def test_every_candidate_gets_a_score():
    program = programs.trace(lambda x: jnp.maximum(x, 0), zeros(256, 256)).program()
    for candidate, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132), 64):
        found = launch_stats.score_of(candidate, [(64, dict(candidate.params)["threads"], 32, 0)], H200)
        assert 0 < found.pul <= 1 and found.seconds > 0


def coalescing_of(program):
    """How a scheduled program's accesses use lines, as its family says."""
    stats = family_of(program).statistics.coalescing
    return None if stats is None else stats(program)


def access(fn, arguments, form, **params):
    program = programs.trace(fn, *arguments).program()
    program = program if form == "team" else collapse_program(program)
    found = coalescing_of(scheduled(program, form, params.pop("threads"), *params.items()))
    assert found is not None
    return found


ROWS = (lambda x: x.sum(1), (zeros(64, 1000),))


def test_a_team_touches_each_line_once_where_its_vectors_are_whole_accesses():
    found = access(*ROWS, "team", threads=64, team=64, vector=4, chunks=8)
    # 250 vectors for 64 threads: four rounds of 256 elements, of which 250 are there
    assert found.lines == pytest.approx(1024 / 1000) and found.passes == 1.0
    assert found.under_way == pytest.approx(4 * 4 * 4 * 1000 / 1024)  # four rounds, not eight
    two = access(*ROWS, "team", threads=64, team=64, vector=8, chunks=8)
    assert two.lines == pytest.approx(2 * 1024 / 1000)  # each of two accesses touches all lines of both


def test_a_team_longer_than_its_row_is_mostly_idle():
    found = access(*ROWS, "team", threads=1024, team=1024, vector=4, chunks=4)
    assert found.under_way == pytest.approx(16 * 1000 / 4096) and found.lines == pytest.approx(4096 / 1000)


def test_small_teams_touch_a_line_per_row():
    found = access(*ROWS, "team", threads=64, team=8, vector=1, chunks=125)
    assert found.lines == pytest.approx(4.0)  # 32 bytes of each of four rows


def test_rows_that_do_not_stay_in_registers_are_read_by_every_phase():
    softmax = (lambda x: x - x.max(1, keepdims=True), (zeros(64, 1024),))
    kept, again = (access(*softmax, "team", threads=32, team=32, vector=4, chunks=n) for n in (8, 4))
    assert (kept.lines, kept.passes) == (1.0, 1.0) and again.lines == 2.0 and again.passes == 1.25


@pytest.mark.parametrize(("across", "lines"), [(32, 1.0), (8, 1.0), (4, 2.0), (2, 4.0)])
def test_columns_touch_whole_lines_where_threads_lie_side_by_side(across, lines):
    sums = (lambda x: x.sum(0), (zeros(4096, 256),))
    program = collapse_program(programs.trace(*[sums[0], *sums[1]]).program())
    phase = program.phases[0]
    axes = tuple(replace(a, unroll=4) for a in phase.axes)
    program = replace(program, phases=(replace(phase, axes=axes),))
    found = coalescing_of(scheduled(program, "columns", 256, ("across", across), ("flight", 4)))
    assert found is not None and found.lines == lines and found.under_way == 4 * 4 * 4

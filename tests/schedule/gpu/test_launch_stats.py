"""Sectors that blocks move, against hand counts."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu import launch_stats as stats
from jcuts.schedule.gpu.families import family_of
from jcuts.schedule.gpu.family_statistics import REGISTER_TILES
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.machine import scheduled
from tests import programs
from tests.ops.cases import conv


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
    (use,) = kernel_time.launch_stats(program, [(blocks, dict(program.params)["threads"], 32, 0)])
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
    (use,) = kernel_time.launch_stats(program, [(blocks, dict(program.params)["threads"], 32, 0)])
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
    (use,) = kernel_time.launch_stats(program, [(32, 256, 32, 0)])
    assert use.under_way == 8 * 0.25  # 32 of 128 along d1


def test_loads_under_way():
    (use,) = kernel_time.launch_stats(point(lambda x: x + 1, (zeros(4096),), 256, d0=4), [(4, 256, 32, 0)])
    assert use.under_way == 16
    program = programs.trace(lambda x: x.sum(1), zeros(512, 1024)).program()
    team = scheduled(program, "team", 128, ("team", 32), ("vector", 4), ("chunks", 8))
    (use,) = kernel_time.launch_stats(team, [(128, 128, 40, 0)])
    assert use.under_way == 4 * 8 * 4
    assert use.moved == 512 * 1024 * 4 + 512 * 4


def test_a_split_pays_for_its_partial_results():
    program = programs.trace(lambda x: x.sum(0), zeros(8192, 64)).program()
    split = scheduled(program, "point", 128, ("split", 64))
    first, second = kernel_time.launch_stats(split, [(32, 128, 32, 0), (64, 128, 32, 0)])
    partial = 64 * 64 * 4
    assert first.moved == 8192 * 64 * 4 + 64 * 4 + partial
    assert second.moved == partial + 64 * 4


def test_blocks_of_a_product_read_their_rows_and_columns():
    product = as_gemm(programs.trace(lambda x, w: x @ w, zeros(256, 512), zeros(512, 128)).program())
    assert product is not None
    tiling = MmaTile(64, 32, 16, (2, 2, 1), 3, 1, 2)
    (use,) = kernel_time.launch_stats(tiling.of(product), [(4 * 4 * 2, 128, 64, 40_000)])
    assert use.moved == 32 * (64 + 32) * 256 * 4 + 256 * 128 * 4
    assert use.under_way == 2 * (64 + 32) * 16 * 4 / 128
    assert kernel_time.unit_of(tiling.of(product)) == "tf32_mma"


def test_the_assemblers_figures_take_the_place_of_the_estimates():
    program = programs.trace(lambda x: jnp.maximum(x, 0), zeros(4096, 4096)).program()
    machine = gpu_candidates.GpuMachine.named("H200")
    for candidate, _ in gpu_candidates.candidates(program, machine, 64):
        estimated = kernel_time.kernel_time(candidate, machine)
        threads = dict(candidate.params)["threads"]
        blocks = family_of(candidate).statistics.launches(candidate)[0].blocks
        few = stats.memory_time(candidate, REGISTER_TILES, machine, [(blocks, threads, 32, 0)])
        many = stats.memory_time(candidate, REGISTER_TILES, machine, [(blocks, threads, 255, 0)])
        assert few.seconds < many.seconds and few.seconds == pytest.approx(estimated.seconds, rel=0.05)

"""Schedules for a GPU: legal, ranked, repeatable; what has no form gets none; bounds that count compulsory bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.bound import roofline_bound
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.bound import GpuBound, memory_bound
from jcuts.schedule.gpu.machine import block_threads, lane_counts
from tests import programs
from tests.gpu import cases
from tests.ops.cases import conv

MACHINE = gpu_candidates.GpuMachine(132)


def program_of(fn, *arguments):
    return programs.trace(fn, *arguments).program()


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("name", cases.CASES)
def test_candidates_are_well_formed_and_keep_the_meaning_of_the_program(name):
    fn, arguments = cases.CASES[name]
    program = program_of(fn, *arguments)
    found = gpu_candidates.candidates(program, MACHINE, 10)
    assert found and all(0 < score <= 1 for _, score in found)
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True)
    for candidate, _ in found:
        verify(candidate)
        assert Program.from_json(candidate.to_text()).digest == candidate.digest
        assert (candidate.inputs, candidate.outputs) == (program.inputs, program.outputs)
        threads = dict(candidate.params)["threads"]
        assert threads % 32 == 0 and 32 <= threads <= 1024
    again = gpu_candidates.candidates(program, MACHINE, 10)
    assert [(p.digest, s) for p, s in again] == [(p.digest, s) for p, s in found]


@pytest.mark.parametrize("name", ["chain", "permute", "max pool", "depthwise odd", "short rows"])
def test_schedules_compute_the_same(name):
    fn, arguments = cases.CASES[name]
    traced = programs.trace(fn, *arguments)
    program, operands = traced.program(), traced.operands()
    wanted = interpret(program, operands)
    for candidate, _ in gpu_candidates.candidates(program, MACHINE, 3):
        for got, want in zip(interpret(candidate, operands), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fn, arguments",
    [
        (lambda a, b: jnp.dot(a, b), (zeros(256, 256).astype(np.int32), zeros(256, 256).astype(np.int32))),
        (
            lambda x, w: conv(x, w, layout=("NCHW", "OIHW", "NCHW")),
            (zeros(1, 3, 16, 16), zeros(64, 3, 7, 7)),
        ),
        (lambda x: jax.lax.cumlogsumexp(x, 1), (zeros(64, 64),)),
    ],
    ids=["contraction", "convolution", "cumulative"],
)
def test_programs_without_a_form_get_no_candidate(fn, arguments):
    assert gpu_candidates.candidates(program_of(fn, *arguments), MACHINE, 100) == []


def test_limits_prune_but_never_to_nothing():
    program = program_of(lambda x: x * 2, zeros(4096, 1024))
    assert len(gpu_candidates.candidates(program, MACHINE, 1)) == 1
    assert len(gpu_candidates.candidates(program, MACHINE, 100, 0.001)) == min(
        gpu_candidates.LEAST, len(gpu_candidates.candidates(program, MACHINE, 100))
    )


def test_few_outputs_are_split_over_the_grid():
    best = gpu_candidates.candidates(program_of(lambda x: x.sum(), zeros(4096, 4096)), MACHINE, 1)[0][0]
    assert dict(best.params)["split"] > 132
    many = gpu_candidates.candidates(program_of(lambda x: x.sum(1), zeros(65536, 4096)), MACHINE, 1)[0][0]
    assert "split" not in dict(many.params)


def test_accesses_fill_sixteen_bytes():
    for dtype, count in ((np.float32, 4), (np.int8, 16), (np.float64, 2)):
        best = gpu_candidates.candidates(program_of(lambda x: x + x, zeros(4096, 1024, dtype=dtype)), MACHINE, 1)[0][0]
        assert best.phases[0].axes[-1].unroll % count == 0


def test_the_bound_counts_bytes_that_must_move():
    fn = lambda x, b: x * b  # noqa: E731
    best = gpu_candidates.candidates(program_of(fn, zeros(1024, 1024), zeros(1024)), MACHINE, 1)[0][0]
    found = roofline_bound(best)
    assert isinstance(found, GpuBound)
    assert found.bytes == 4 * (2 * 1024 * 1024 + 1024)
    assert found.seconds == pytest.approx(found.bytes / 4.815e12)
    rows = program_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), zeros(5000, 64), zeros(100, dtype=np.int32))
    gathered = gpu_candidates.candidates(rows, MACHINE, 1)[0][0]
    assert memory_bound(gathered).bytes == 4 * (100 * 64 + 100)  # not the table


def test_threads_of_a_block_fill_rows_and_warps():
    assert block_threads(36, (256, 512)) == [288, 576]
    assert block_threads(12, (128, 256, 512)) == [96, 288, 480]
    assert block_threads(16, (256, 512, 1024)) == [256, 512, 1024]
    assert lane_counts(18) == [8, 16, 18] and 36 in lane_counts(36) and lane_counts(5) == [5]


def test_walks_have_whole_tiles():
    """Tiles divide the image, and no thread has fewer than two of them."""
    program = programs.trace(
        lambda x, w: conv(x, w, padding="SAME", groups=32),
        np.zeros((8, 28, 28, 32), np.float32),
        np.zeros((3, 3, 1, 32), np.float32),
    ).program()
    walks = [
        p
        for p, _ in gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132), 1 << 20)
        if "walk" in dict(p.params)
    ]
    assert len({dict(p.params)["ahead"] for p in walks}) > 1
    for found in walks:
        name, tiles = dict(found.params)["walk"]
        axis = next(a for a in found.phases[0].axes if a.name == name)
        assert axis.extent % axis.unroll == 0 and 2 <= tiles <= axis.extent // axis.unroll


def test_windows_of_a_number_have_schedules():
    """They read nothing (how many points of an average lie inside the image)."""
    fn = lambda: jax.lax.reduce_window(  # noqa: E731
        jnp.ones((1, 35, 35, 1)), 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
    )
    assert all(0 < score <= 1 for _, score in gpu_candidates.candidates(program_of(fn), MACHINE, 16))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.pad(x, np.float32(1), ((3, 3, 1), (2, 1, 2))).max(0),  # most tiles see padding alone
        lambda x: jax.lax.pad(x, np.float32(1), ((1, 1, 0), (3, -1, 1))).sum(0),
        lambda x: (jax.lax.broadcasted_iota(np.int32, (170, 50), 0) * 3 % 7).sum(0),  # reads nothing
    ],
)
def test_columns_that_read_little_have_schedules(fn):
    traced = programs.trace(fn, np.arange(85, dtype=np.float32).reshape(17, 5))
    program, operands = traced.program(), traced.operands()
    found = gpu_candidates.candidates(program, MACHINE, 6)
    assert found and all(0 < score <= 1 for _, score in found)
    wanted = interpret(program, operands)
    for candidate, _ in found:
        np.testing.assert_allclose(interpret(candidate, operands)[0], wanted[0], rtol=1e-6)

"""Schedules and their enumeration: what `apply` makes, and that every candidate is a legal program."""

from __future__ import annotations

import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.cpu import loop_candidates
from jcuts.schedule.cpu.loop_schedule import Schedule, apply
from tests import programs
from tests.ops.cases import CASES, make


def gemm(m=13, k=40, n=37):
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    return collapse_program(programs.trace(lambda a, b: a @ b, a, b).program())


def test_apply_tiles_vectorises_and_blocks():
    schedule = Schedule(16, "d1", (("d0", 6), ("d1", 2)), ("d0", "d1"), (("k0", 4),), (("k0", 2),), (("d0", 7),))
    program = apply(gemm(), schedule)
    verify(program)
    (phase,) = program.phases
    assert [(a.name, a.unroll, a.vector) for a in phase.axes] == [("d0", 6, False), ("d1", 2, True)]
    assert [(r.unroll, r.chains) for r in phase.reds] == [(4, 2)]
    assert [(g.axis, g.block, g.blocks) for g in program.grid] == [("d0", 12, 2)]  # whole register tiles
    assert dict(program.params)["lanes"] == program.lanes == 16


def test_unrolls_are_cut_to_the_extent():
    program = apply(gemm(m=3), Schedule(16, "d1", (("d0", 8), ("d1", 9)), (), (("k0", 99),)))
    assert [a.unroll for a in program.phases[0].axes] == [3, 3]
    assert program.phases[0].reds[0].unroll == 40


def test_chains_divide_the_unrolled_terms():
    for unroll, chains in ((6, 3), (6, 4), (1, 2)):
        (red,) = apply(gemm(), Schedule(red_unroll=(("k0", unroll),), chains=(("k0", chains),))).phases[0].reds
        assert (red.unroll, red.chains) == (unroll, chains if unroll % chains == 0 else 1)


@pytest.mark.parametrize(
    "schedule", [Schedule(unroll=(("z", 2),)), Schedule(blocks=(("z", 2),)), Schedule(order=("z",))]
)
def test_axes_that_do_not_exist(schedule):
    with pytest.raises(IRError, match="'z'"):
        apply(gemm(), schedule)


def test_several_phases_have_schedules_of_their_own():
    import jax

    program = programs.trace(lambda x: jax.nn.softmax(x), np.zeros((4, 8), np.float32)).program()
    with pytest.raises(IRError, match="phases"):
        apply(program, Schedule())


@pytest.mark.parametrize("case", [c for c in CASES if c.golden], ids=lambda c: c.name)
@pytest.mark.parametrize(
    "machine", [programs.MACHINE, loop_candidates.Machine(32, 16, 1), loop_candidates.Machine(16, 32, 8)]
)
def test_every_candidate_is_legal_and_different(case, machine):
    program = programs.trace(case.call, *(make(text) for text in case.inputs)).program()
    found = loop_candidates.candidates(collapse_program(program), machine, 24)
    assert found
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True) and all(0 <= s <= 1 for s in scores)
    made = [apply(collapse_program(program), s) for s, _ in found]
    for one in made:
        verify(one)
    assert len({s for s, _ in found}) == len(found)


def test_candidates_are_deterministic():
    assert loop_candidates.candidates(gemm(), programs.MACHINE, 16) == loop_candidates.candidates(
        gemm(), programs.MACHINE, 16
    )


def test_gemm_accumulators_fit_the_register_file():
    for machine in (programs.MACHINE, loop_candidates.Machine(32, 16, 2)):
        for schedule, _ in loop_candidates.candidates(gemm(256, 256, 256), machine, 8):
            tile = dict(schedule.unroll)
            assert np.prod(list(tile.values())) <= machine.registers


def test_large_kernels_are_split_and_small_ones_are_not():
    assert apply(gemm(4, 4, 4), loop_candidates.candidates(gemm(4, 4, 4), programs.MACHINE, 1)[0][0]).tiles == 1
    big = gemm(256, 256, 256)
    assert apply(big, loop_candidates.candidates(big, loop_candidates.Machine(64, 32, 8), 1)[0][0]).tiles >= 8

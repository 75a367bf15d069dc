"""Weights of few-row products on their way to the L2 cache before the wait for the grid in front."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.programmatic_launch import HINT, WAIT, insert_grid_dependency_wait
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu.few_row_gemm import FewRowGemm
from jcuts.schedule.gpu.gemv.schedules import GemvSchedule
from jcuts.schedule.gpu.skinny_gemm.schedules import SkinnyProblem, SkinnySchedule
from tests import programs

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers


def product(rows, terms, columns, k_major, dtype=jnp.bfloat16):
    x, w = np.zeros((rows, terms), dtype), np.zeros((columns, terms) if k_major else (terms, columns), dtype)
    made = as_gemm(programs.trace(lambda x, w: x @ (w.T if k_major else w), x, w).program())
    assert made is not None
    return made


GEMVS = {
    "row-major": (False, GemvSchedule(8, 4, 2, 8, 128), 8),
    "row-major, split": (False, GemvSchedule(8, 4, 2, 8, 128, split=2), 8),
    "row-major, cluster": (False, GemvSchedule(8, 4, 4, 8, 128, cluster=2), 16),
    "k-major": (True, GemvSchedule(4, 8, 2, 4, 128), 8),
}


def parts(program, target=SM90):
    """PTX of the program's first kernel before and behind its wait."""
    text = compiler.ptx_of(program, target).split(".visible .entry")[1]
    before, _, behind = text.partition(WAIT.splitlines()[0])
    return before, behind


@compiled
@pytest.mark.parametrize("name", GEMVS)
def test_a_gemv_prefetches_its_first_weights_once(name):
    """One prefetch per access of 16 bytes of the register tiles that a thread loads first."""
    k_major, schedule, count = GEMVS[name]
    program = product(1, 1024, 256, k_major)
    before, behind = parts(schedule.apply(program, FewRowGemm.of(program)))
    assert before.count(HINT) == count and HINT not in behind
    places = re.findall(r"prefetch\.global\.L2 (\[[^\]]*\]);", before)
    assert len(set(places)) == count
    assert "ld.global" not in before and "ld.global" in behind


@compiled
@pytest.mark.parametrize("k_major", [False, True])
def test_a_skinny_gemm_prefetches_its_first_ring(k_major):
    program = product(8, 1024, 64, k_major)
    made = SkinnySchedule(64, 1, 4, 2).apply(program, SkinnyProblem.of(program))
    before, behind = parts(made)
    copies = [line for line in behind.splitlines() if "cp.async" in line and "L2::128B" in line]
    assert 0 < before.count(HINT) <= len(copies) and HINT not in behind and "cp.async" not in before


@compiled
@pytest.mark.parametrize(("terms", "prefetches"), [(1000, True), (600, False), (200, False)])
def test_a_skinny_gemm_prefetches_where_first_steps_are_whole(terms, prefetches):
    """Steps of 256 in two slices: the last one has 488, 88 and no terms."""
    program = product(8, terms, 64, False)
    made = SkinnySchedule(64, 1, 4, 2, split=2).apply(program, SkinnyProblem.of(program))
    before, behind = parts(made)
    assert (HINT in before) == prefetches and HINT not in behind


@compiled
def test_without_programmatic_launch_there_is_no_prefetch():
    program = product(1, 1024, 256, False)
    made = GemvSchedule(8, 4, 2, 8, 128).apply(program, FewRowGemm.of(program))
    assert not any(HINT in part for part in parts(made, SM80))


def test_a_prefetch_comes_before_the_wait_where_its_address_does():
    body = ["\tld.param.u64 \t%rd1, [k];", f"{HINT}[%rd1+64];", "\tld.global.u64 \t%rd2, [%rd1];", f"{HINT}[%rd2];"]
    lines = insert_grid_dependency_wait([*body, "\tret;"], 0)
    place = lines.index("\t" + WAIT)
    assert lines[:2] == body[:2] and lines[place + 1 : -1] == body[2:]

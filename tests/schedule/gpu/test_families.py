"""The registry of kernel families: every schedule is one family's, every family is documented and asked by a rule."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, UsageError
from jcuts.schedule.gpu.enumeration import RULES, enumerate_schedules
from jcuts.schedule.gpu.families import FAMILIES, family_of, needs_tensor_cores
from jcuts.schedule.gpu.gemm.problem import GemmTile
from jcuts.schedule.gpu.machine import GpuMachine, scheduled
from jcuts.schedule.gpu.problem import GpuProblem
from tests import programs
from tests.gpu import cases
from tests.ops.cases import conv

MACHINE = GpuMachine(132)
AMPERE, TURING = GpuMachine(108, capability=(8, 0)), GpuMachine(46, 1024, (7, 5))
REPOSITORY = Path(__file__).resolve().parents[3]
LOWERED = {"horizontal", "multi_tensor_sums", "weight_transpose"}
"""Families whose scheduled programs lowering makes."""


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def half(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


PROGRAMS = {
    "transpose": (lambda x: x.T * 2, (zeros(256, 512),)),
    "row sum": (lambda x: x.sum(1), (zeros(512, 1024),)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (zeros(512, 1000),)),
    "long softmax": (lambda x: jax.nn.softmax(x, -1), (zeros(4, 5000),)),
    "column sum": (lambda x: x.sum(0), (zeros(5000, 64),)),
    "column softmax": (lambda x: jax.nn.softmax(x, 0), (zeros(500, 64),)),
    "column variance": (lambda x: x.var(0), (zeros(65536, 64),)),
    "row scan": (lambda x: jnp.cumsum(x, 1), (zeros(64, 1024),)),
    "column scan": (lambda x: jnp.cumsum(x, 0), (zeros(1024, 64),)),
    "pooling": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        (zeros(2, 32, 32, 16),),
    ),
    "product": (lambda x, w: x @ w, (zeros(256, 512), zeros(512, 128))),
    "large product": (lambda x, w: x @ w, (half(1024, 1024), half(1024, 1024))),
    "exact product": (lambda x, w: jnp.dot(x, w, precision="highest"), (zeros(256, 512), zeros(512, 128))),
    "double product": (lambda x, w: x @ w, (zeros(256, 512, dtype="float64"), zeros(512, 128, dtype="float64"))),
    "vector product": (lambda x, w: x @ w, (zeros(1, 2048), zeros(2048, 1024))),
    "product of few rows": (lambda x, w: x @ w, (zeros(8, 2048), zeros(2048, 1024))),
    "convolution": (lambda x, w: conv(x, w, padding="SAME"), (half(8, 56, 56, 64), half(3, 3, 64, 64))),
    "first convolution": (lambda x, w: conv(x, w, padding="SAME"), (zeros(2, 64, 64, 3), zeros(3, 3, 3, 32))),
}


def program_of(name):
    fn, arguments = PROGRAMS[name]
    with jax.enable_x64(name.startswith("double")):
        return programs.trace(fn, *arguments).program()


def test_an_unknown_family_is_a_typed_error_with_the_names_that_there_are():
    with pytest.raises(UsageError, match=r"unknown kernel family 'gemm': choose one of .*mma_f64.*wgmma") as raised:
        FAMILIES["gemm"]
    assert set(FAMILIES.names()) == {name for name in FAMILIES if name in str(raised.value)}


@pytest.mark.parametrize("name", FAMILIES.names())
def test_every_family_is_documented(name):
    family = FAMILIES[name]
    assert family.name == name and family.summary.endswith(".") and len(family.summary) > 30
    assert (REPOSITORY / family.documentation).is_file()
    forms = (REPOSITORY / "docs" / "kernels" / "README.md").read_text(encoding="utf-8")
    assert f"`{family.form}`" in forms
    assert bool(family.templates) == (name not in LOWERED)


def test_summaries_differ():
    assert len({FAMILIES[name].summary for name in FAMILIES}) == len(FAMILIES)


def test_every_family_is_asked_by_a_rule():
    assert {name for rule in RULES for name in rule.families} == set(FAMILIES) - LOWERED
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("machine", [MACHINE, AMPERE, TURING], ids=lambda m: f"sm_{m.capability[0]}{m.capability[1]}")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule_is_of_one_family_that_its_rule_names(name, machine):
    program = program_of(name)
    problem = GpuProblem(program, machine)
    named = {family for rule in RULES if rule.match(problem) for family in rule.families}
    found = list(enumerate_schedules(program, machine))
    assert found or machine is TURING
    for candidate, _ in found:
        (family,) = (FAMILIES[n] for n in FAMILIES if FAMILIES[n].match(candidate))
        assert family_of(candidate) is family and family.name in named
        assert machine.capability >= family.capability and program.template in family.templates
        assert family.tile_of(candidate)


@pytest.mark.parametrize("name", cases.CASES)
def test_schedules_of_the_kernel_cases_are_of_one_family(name):
    fn, arguments = cases.CASES[name]
    for candidate, _ in enumerate_schedules(programs.trace(fn, *arguments).program(), MACHINE):
        assert [n for n in FAMILIES if FAMILIES[n].match(candidate)] == [family_of(candidate).name]


def test_a_family_proposes_its_own_schedules():
    seen = set()
    for name in PROGRAMS:
        program = program_of(name)
        for key in FAMILIES:
            for candidate, score in FAMILIES[key].schedules(program, MACHINE):
                made = family_of(candidate).name
                assert made == key or (key, made) == ("column_reduction", "thread_tile")  # short sums of columns
                assert score > 0
                seen.add(made)
    missing = set(FAMILIES) - LOWERED - seen  # see the tests of each
    alone = {"attention_backward", "b2b_gemm", "b2b_wgmma", "flash_attention", "inverted_residual", "warp_specialized"}
    assert missing == {*alone, "recurrence", "row_column_sums"}


def test_a_family_has_no_schedules_where_its_instructions_are_missing():
    program = program_of("large product")
    assert list(FAMILIES["wgmma"].schedules(program, MACHINE))
    assert not list(FAMILIES["wgmma"].schedules(program, AMPERE)) and list(FAMILIES["mma"].schedules(program, AMPERE))
    assert not list(FAMILIES["mma"].schedules(program, TURING))


def test_tile_of_a_gemm():
    candidate, _ = next(iter(FAMILIES["mma"].schedules(program_of("product"), MACHINE)))
    params = dict(candidate.params)
    tile = family_of(candidate).tile_of(candidate)
    assert isinstance(tile, GemmTile) and (tile.rows, tile.columns, tile.terms) == params["tile"]
    assert (tile.threads, tile.stages, tile.fma) == (params["threads"], params["stages"], False)


def test_a_program_without_a_schedule_has_no_family():
    program = program_of("row sum")
    with pytest.raises(CompileRejected, match="no schedule for a GPU"):
        family_of(program)
    with pytest.raises(CompileRejected, match="no schedule for a GPU"):
        family_of(scheduled(program, "no such form", 128))


def test_templates_of_tensor_cores():
    assert needs_tensor_cores("contraction") and needs_tensor_cores("convolution")
    assert not needs_tensor_cores("reduction") and not needs_tensor_cores("map")
